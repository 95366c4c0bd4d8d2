//! The event stream in memory: a ring of recent frames, each serialized once, and the places of readers in it.
//!
//! Leaves to others: what is durable (`journal` commits first and publishes after), sockets (`push`), and every event
//! that is no longer in the ring (the [`EventStore`]). Rule a change could break: a kept event is handed to a reader if
//! and only if its id is above the last one that reader was given, in rising order and without a gap, whether it came
//! from the ring or from the store; so replay and live join without a hole and without a double by construction.

mod frame;
mod ring;

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use serde::Serialize;

use crate::error::Result;
use crate::ids::{EventId, is_plain_id};
use crate::sync::Mutex;

pub use frame::Frame;
use ring::Ring;
pub use ring::{Reader, Reading, Taken};

/// Frames the ring holds at most: enough for 1.6 s at 10,000 events/s.
const RING_FRAMES_MAX: usize = 16 * 1024;
/// Bytes the ring holds at most; one larger frame alone is kept.
const RING_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Takes kept events after their commit, in commit order.
pub trait Publisher: Send + Sync {
    /// Hands on the kept event `id`, committed at `at`. Never blocks on a reader.
    fn publish_kept(&self, id: EventId, event: &str, data: &serde_json::Value, at: &str);
}

/// Where kept events are read from when the ring no longer has them.
pub trait EventStore: Send + Sync {
    /// Events above `after`, oldest first, at most `rows_max`; fewer only if there are no more.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn events_after(&self, after: EventId, rows_max: usize) -> Result<Vec<StoredEvent>>;

    /// Id of the oldest event (1 if none) and of the newest (0 if none).
    ///
    /// # Errors
    /// When the store cannot be read.
    fn bounds(&self) -> Result<(EventId, EventId)>;

    /// Somebody follows the stream from now on, or nobody does: a store that others write to looks only meanwhile.
    fn set_watched(&self, _watched: bool) {}
}

/// A kept event as the store has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEvent {
    /// Its id.
    pub id: EventId,
    /// Its kind, such as `chat-user-message`.
    pub event: String,
    /// Its data, as JSON text.
    pub data_json: String,
    /// When it was recorded, RFC 3339.
    pub at: String,
}

/// A place in the stream, as clients write it: `EPOCH.ID` or `ID`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// The life of the store it belongs to; a plain `ID` means the present one.
    pub epoch: Option<String>,
    /// The last event the client has.
    pub id: EventId,
}

/// A text that is no cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadCursor;

impl fmt::Display for BadCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a cursor is ID or EPOCH.ID, ID a number from 0 to 9223372036854775807")
    }
}

impl std::error::Error for BadCursor {}

/// Parses `EPOCH.ID` or `ID`.
///
/// # Errors
/// [`BadCursor`] for anything else.
pub fn parse_cursor(text: &str) -> Result<Cursor, BadCursor> {
    let (epoch, id) = match text.rsplit_once('.') {
        Some((epoch, id)) if is_plain_id(epoch) => (Some(epoch.to_owned()), id),
        Some(_) => return Err(BadCursor),
        None => (None, text),
    };
    // `parse` would take a sign.
    if !id.bytes().all(|b| b.is_ascii_digit()) {
        return Err(BadCursor);
    }
    Ok(Cursor { epoch, id: id.parse().map_err(|_| BadCursor)? })
}

/// What an in-process listener hears.
#[derive(Debug, Clone, Copy)]
pub struct Heard<'a> {
    /// Its id; none for a transient event.
    pub id: Option<EventId>,
    /// Its kind.
    pub event: &'a str,
    /// The whole object as clients get it, JSON.
    pub json: &'a str,
}

/// Called with every event, on the thread that published it, with no lock held; must not block.
pub type Listener = Arc<dyn Fn(&Heard<'_>) + Send + Sync>;

/// The stream: publishers on one side, `push` and in-process listeners on the other.
pub struct Bus {
    epoch: OnceLock<String>,
    ring: Mutex<Ring>,
    /// The ring's head, for those who need no more.
    head: AtomicI64,
    listeners: Mutex<Vec<Listener>>,
    listener_count: AtomicUsize,
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bus").field("epoch", &self.epoch()).field("head", &self.head()).finish_non_exhaustive()
    }
}

impl Bus {
    /// A bus over a store whose life is called `epoch` and whose newest event is `head`.
    #[must_use]
    pub fn new(epoch: impl Into<String>, head: EventId) -> Self {
        let bus = Self::unopened();
        bus.open(epoch, head);
        bus
    }

    /// A bus for a store that is still to be opened: pass it as its publisher, then call [`Bus::open`].
    #[must_use]
    pub fn unopened() -> Self {
        Self::with_limits(RING_FRAMES_MAX, RING_BYTES_MAX)
    }

    /// The same with a ring of at most `frames_max` frames and `bytes_max` bytes.
    #[must_use]
    pub fn with_limits(frames_max: usize, bytes_max: u64) -> Self {
        let ring = Ring::new(frames_max, bytes_max);
        Self {
            epoch: OnceLock::new(),
            ring: Mutex::new(ring),
            head: AtomicI64::new(0),
            listeners: Mutex::new(Vec::new()),
            listener_count: AtomicUsize::new(0),
            wake: OnceLock::new(),
        }
    }

    /// Names the store's life and its newest event, once, before the first reader.
    pub fn open(&self, epoch: impl Into<String>, head: EventId) {
        if self.epoch.set(epoch.into()).is_ok() {
            let mut ring = self.ring.lock();
            if ring.head < head {
                ring.head = head;
                ring.floor = head;
                self.head.store(head, Ordering::Release);
            }
        }
    }

    /// The life of the store.
    #[must_use]
    pub fn epoch(&self) -> &str {
        self.epoch.get().map_or("", String::as_str)
    }

    /// Id of the newest published kept event, 0 if none.
    #[must_use]
    pub fn head(&self) -> EventId {
        self.head.load(Ordering::Acquire)
    }

    /// Publishes a transient event: no id, never replayed.
    pub fn publish(&self, event: &'static str, data: &impl Serialize) {
        self.publish_to(event, data, true);
    }

    fn publish_to(&self, event: &'static str, data: &impl Serialize, heard: bool) {
        let mut failed = None;
        let frame = Frame::build(0, event, &crate::clock::rfc3339(crate::clock::now_ms()), |to| {
            let was = to.len();
            if let Err(e) = serde_json::to_writer(&mut *to, data) {
                to.truncate(was);
                to.extend_from_slice(b"null");
                failed = Some(e);
            }
        });
        match failed {
            // A map whose keys are no strings, say: a fault of ours that must not reach a client.
            Some(e) => log::error!("event {event} is not JSON: {e}"),
            None => self.send_on(Arc::new(frame), event, heard),
        }
    }

    /// The same for a caller that holds a lock: in-process listeners, which may want that lock, do not hear it.
    pub fn publish_unheard(&self, event: &'static str, data: &impl Serialize) {
        self.publish_to(event, data, false);
    }

    /// Adds an in-process listener; it hears what is published from now on.
    pub fn listen(&self, listener: Listener) {
        let mut listeners = self.listeners.lock();
        listeners.push(listener);
        self.listener_count.store(listeners.len(), Ordering::Release);
    }

    fn send_on(&self, frame: Arc<Frame>, event: &str, heard: bool) {
        {
            let mut ring = self.ring.lock();
            if frame.id() > 0 && frame.id() <= ring.head {
                log::error!("event {} was published after event {}", frame.id(), ring.head);
                return;
            }
            ring.push(frame.clone());
            self.head.store(ring.head, Ordering::Release);
        }
        if let Some(wake) = self.wake.get() {
            wake();
        }
        if heard && self.listener_count.load(Ordering::Acquire) > 0 {
            let listeners = self.listeners.lock().clone();
            let json = std::str::from_utf8(frame.json()).unwrap_or("null");
            let heard = Heard { id: (frame.id() > 0).then_some(frame.id()), event, json };
            for listener in listeners {
                listener(&heard);
            }
        }
    }

    /// Sets what is called after each publication; false if somebody else did already.
    pub(crate) fn set_wake(&self, wake: Box<dyn Fn() + Send + Sync>) -> bool {
        self.wake.set(wake).is_ok()
    }

    /// Number that the next frame will have.
    pub(crate) fn end(&self) -> u64 {
        self.ring.lock().end()
    }

    /// A reader that gets what is published from now on.
    pub(crate) fn live_reader(&self) -> Reader {
        let ring = self.ring.lock();
        Reader { next: ring.end(), after: ring.head, transient_from: ring.end() }
    }

    /// Puts the reader into the ring, right behind the last event it has; false if the ring begins later.
    pub(crate) fn join(&self, reader: &mut Reader) -> bool {
        self.ring.lock().join(reader)
    }

    /// Frames for one reader, and how many transient ones it lost for good. The reader moves by [`Reader::pass`].
    pub(crate) fn read(
        &self,
        reader: &mut Reader,
        frames_max: usize,
        bytes_max: usize,
        out: &mut Vec<Taken>,
    ) -> (Reading, u64) {
        self.ring.lock().read(reader, frames_max, bytes_max, out)
    }

    /// Frames from number `from` on, whoever they are for, until `frames_max` or `bytes_max` is reached; the number of
    /// the first.
    pub(crate) fn tail(&self, from: u64, frames_max: usize, bytes_max: usize, out: &mut Vec<Arc<Frame>>) -> u64 {
        let ring = self.ring.lock();
        let from = from.max(ring.first);
        let mut bytes = 0;
        for entry in ring.entries.iter().skip((from - ring.first) as usize).take(frames_max) {
            bytes += entry.frame.ws().len();
            if bytes > bytes_max && !out.is_empty() {
                break;
            }
            out.push(entry.frame.clone());
        }
        from
    }
}

impl Publisher for Bus {
    fn publish_kept(&self, id: EventId, event: &str, data: &serde_json::Value, at: &str) {
        let frame = Frame::build(id, event, at, |to| {
            // Writing a Value to memory cannot fail.
            let _ = serde_json::to_writer(to, data);
        });
        self.send_on(Arc::new(frame), event, true);
    }
}

#[cfg(test)]
mod tests {
    use super::frame::header;
    use super::*;
    use serde_json::json;

    fn ids(taken: &[Taken]) -> Vec<EventId> {
        taken.iter().map(|t| t.frame.id()).collect()
    }

    fn read_all(bus: &Bus, reader: &mut Reader) -> (Vec<EventId>, Reading, u64) {
        let mut out = Vec::new();
        let (seen, lost) = bus.read(reader, 1000, usize::MAX, &mut out);
        for taken in &out {
            reader.pass(taken);
        }
        (ids(&out), seen, lost)
    }

    fn keep(bus: &Bus, id: EventId) {
        bus.publish_kept(id, "k", &json!({"n": id}), "2026-12-01T00:00:00.000Z");
    }

    #[test]
    fn cursors_are_a_number_or_an_epoch_and_a_number() {
        let table = [
            ("0", Some((None, 0))),
            ("17", Some((None, 17))),
            ("abc-1.17", Some((Some("abc-1"), 17))),
            ("9223372036854775807", Some((None, i64::MAX))),
            ("9223372036854775808", None),
            ("-1", None),
            ("+1", None),
            ("1 ", None),
            ("", None),
            (".", None),
            (".5", None),
            ("abc.", None),
            ("a.b.5", None),
            ("a b.5", None),
            ("abc", None),
            ("0x10", None),
            ("١", None),
        ];
        for (text, wanted) in table {
            let wanted = wanted.map(|(e, id): (Option<&str>, i64)| Cursor { epoch: e.map(str::to_owned), id });
            assert_eq!(parse_cursor(text).ok(), wanted, "{text:?}");
        }
    }

    #[test]
    fn a_frame_is_a_whole_websocket_frame_and_an_sse_event() {
        for size in [0, 100, 200, 65_000, 66_000] {
            let data = json!({"t": "x".repeat(size)}).to_string();
            let frame = Frame::kept(123, "chat-complete", &data, "2026-12-01T00:00:00.000Z");
            let json = format!(r#"{{"id":123,"event":"chat-complete","data":{data},"at":"2026-12-01T00:00:00.000Z"}}"#);
            assert_eq!(std::str::from_utf8(frame.json()).unwrap(), json);
            let (head, len) = header(json.len());
            assert_eq!(&frame.ws()[..len], &head[..len]);
            assert_eq!(&frame.ws()[len..], json.as_bytes());
            let sse = format!("id: e1.123\nevent: chat-complete\ndata: {json}\n\n");
            assert_eq!(std::str::from_utf8(frame.sse("e1")).unwrap(), sse);
        }
        assert_eq!(header(125).1, 2);
        assert_eq!((header(126).1, header(65_535).1, header(65_536).1), (4, 4, 10));
        let transient = Frame::notice("hello", "{}");
        assert_eq!(transient.sse("e"), b"event: hello\ndata: {\"event\":\"hello\",\"data\":{}}\n\n");
    }

    #[test]
    fn a_reader_gets_every_kept_event_above_its_cursor_once() {
        let bus = Bus::new("e", 10);
        for id in 11..=15 {
            keep(&bus, id);
        }
        for (after, wanted) in [(10, vec![11, 12, 13, 14, 15]), (13, vec![14, 15]), (15, vec![]), (20, vec![])] {
            let mut reader = Reader { next: 0, after, transient_from: bus.end() };
            assert!(bus.join(&mut reader), "{after}");
            assert_eq!(read_all(&bus, &mut reader), (wanted, Reading::Whole, 0), "{after}");
        }
        let mut reader = Reader { next: 0, after: 9, transient_from: bus.end() };
        assert!(!bus.join(&mut reader), "event 10 is in the store only");
        // Read ahead from the store: what the ring gets later is no double.
        let mut reader = Reader { next: 0, after: 17, transient_from: bus.end() };
        assert!(bus.join(&mut reader));
        for id in 16..=19 {
            keep(&bus, id);
        }
        assert_eq!(read_all(&bus, &mut reader), (vec![18, 19], Reading::Whole, 0));
    }

    #[test]
    fn a_reader_that_the_ring_has_left_behind_is_sent_to_the_store() {
        let bus = Bus::with_limits(4, u64::MAX);
        bus.open("e", 0);
        let mut reader = bus.live_reader();
        for id in 1..=4 {
            keep(&bus, id);
        }
        let mut at_two = reader;
        at_two.next = 2;
        at_two.after = 2;
        keep(&bus, 5);
        assert_eq!(read_all(&bus, &mut reader).1, Reading::Behind);
        assert_eq!(read_all(&bus, &mut at_two), (vec![3, 4, 5], Reading::Whole, 0));
        // Only transient ones fell out since: nothing that the store has is missing.
        for _ in 0..10 {
            bus.publish("t", &json!({}));
        }
        assert_eq!(read_all(&bus, &mut at_two), (vec![0; 4], Reading::Whole, 6));
        // The other one is told although no kept event is left in the ring to show it.
        assert_eq!(read_all(&bus, &mut reader), (vec![], Reading::Behind, 0));
    }

    #[test]
    fn transient_events_before_the_reader_came_are_not_for_it() {
        let bus = Bus::new("e", 0);
        keep(&bus, 1);
        bus.publish("t", &json!({}));
        keep(&bus, 2);
        let mut reader = Reader { next: 0, after: 0, transient_from: bus.end() };
        bus.publish("t", &json!({}));
        assert!(bus.join(&mut reader));
        assert_eq!(read_all(&bus, &mut reader).0, [1, 2, 0]);
    }

    #[test]
    fn rows_of_another_process_are_never_skipped() {
        let bus = Bus::new("e", 0);
        let mut reader = bus.live_reader();
        keep(&bus, 1);
        keep(&bus, 4);
        let mut out = Vec::new();
        assert_eq!(bus.read(&mut reader, 100, usize::MAX, &mut out).0, Reading::More);
        assert_eq!(ids(&out), [1]);
        reader.pass(&out[0]);
        assert_eq!(read_all(&bus, &mut reader).1, Reading::Behind, "2 and 3 are in the store");
        assert!(!bus.join(&mut reader));
        reader.after = 3;
        assert!(bus.join(&mut reader));
        assert_eq!(read_all(&bus, &mut reader).0, [4]);
    }

    #[test]
    fn a_slow_reader_loses_transient_events_and_no_kept_one() {
        let bus = Bus::with_limits(100_000, 64 * 1024 * 1024);
        bus.open("e", 0);
        let mut reader = bus.live_reader();
        let filler = "x".repeat(64 * 1024);
        for id in 1..=40 {
            bus.publish("t", &json!({"filler": filler}));
            keep(&bus, id);
        }
        let (got, seen, _) = read_all(&bus, &mut reader);
        assert_eq!(seen, Reading::Whole);
        assert_eq!(got.iter().filter(|id| **id > 0).copied().collect::<Vec<_>>(), (1..=40).collect::<Vec<_>>());
        let transient = got.iter().filter(|id| **id == 0).count();
        assert!((10..=16).contains(&transient), "the last MiB of 64 KiB frames: {transient}");
    }

    #[test]
    fn an_old_id_is_refused_and_listeners_hear_what_clients_get() {
        let bus = Bus::new("e", 5);
        let heard = Arc::new(Mutex::new(Vec::new()));
        let to = heard.clone();
        bus.listen(Arc::new(move |h| to.lock().push((h.id, h.event.to_owned(), h.json.to_owned()))));
        keep(&bus, 5);
        keep(&bus, 6);
        bus.publish("chat-phase", &json!({"phase": "idle"}));
        assert_eq!(bus.head(), 6);
        let heard = heard.lock();
        assert_eq!(heard.len(), 2);
        assert_eq!((heard[0].0, heard[1].0), (Some(6), None));
        let transient: serde_json::Value = serde_json::from_str(&heard[1].2).unwrap();
        assert_eq!(transient["event"], "chat-phase");
        assert_eq!(transient["data"]["phase"], "idle");
    }

    mod model {
        use super::*;
        use proptest::prelude::*;

        /// What may happen, in any order.
        #[derive(Debug, Clone)]
        enum Step {
            Keep,
            Transient,
            /// Somebody else's row, published by nobody.
            Foreign,
            /// Some reader takes up to so many frames from the ring and writes some of them.
            Read {
                who: usize,
                frames: usize,
                written: usize,
            },
            /// Some reader that the ring cannot serve reads up to so many rows of the store.
            Store {
                who: usize,
                rows: usize,
            },
            /// Some reader leaves and comes back with the cursor it has.
            Back {
                who: usize,
            },
        }

        fn step() -> impl Strategy<Value = Step> {
            prop_oneof![
                4 => Just(Step::Keep),
                2 => Just(Step::Transient),
                1 => Just(Step::Foreign),
                4 => (0..3usize, 1..6usize, 0..6usize).prop_map(|(who, frames, written)| Step::Read { who, frames, written }),
                3 => (0..3usize, 1..4usize).prop_map(|(who, rows)| Step::Store { who, rows }),
                1 => (0..3usize).prop_map(|who| Step::Back { who }),
            ]
        }

        struct Model {
            bus: Bus,
            stored: EventId,
            /// Place, whether the store serves it, and what it got.
            readers: Vec<(Reader, bool, Vec<EventId>)>,
        }

        impl Model {
            fn read(&mut self, who: usize, frames: usize, written: usize) {
                let (reader, replaying, got) = &mut self.readers[who];
                if *replaying {
                    return;
                }
                let mut out = Vec::new();
                *replaying = self.bus.read(reader, frames, usize::MAX, &mut out).0 == Reading::Behind;
                for taken in out.iter().take(written) {
                    reader.pass(taken);
                    got.extend(Some(taken.frame.id()).filter(|id| *id > 0));
                }
            }

            fn store(&mut self, who: usize, rows: usize) {
                let (reader, replaying, got) = &mut self.readers[who];
                if *replaying {
                    for _ in 0..rows.min((self.stored - reader.after) as usize) {
                        reader.after += 1;
                        got.push(reader.after);
                    }
                    *replaying = !self.bus.join(reader);
                }
            }
        }

        proptest! {
            #[test]
            fn every_reader_gets_every_kept_event_once_and_in_order(steps in proptest::collection::vec(step(), 0..200)) {
                let bus = Bus::with_limits(5, u64::MAX);
                bus.open("e", 0);
                let readers = vec![(bus.live_reader(), false, Vec::new()); 3];
                let mut model = Model { bus, stored: 0, readers };
                for step in steps {
                    match step {
                        Step::Keep => {
                            model.stored += 1;
                            keep(&model.bus, model.stored);
                        }
                        Step::Transient => model.bus.publish("t", &json!({})),
                        Step::Foreign => model.stored += 1,
                        Step::Read { who, frames, written } => model.read(who, frames, written),
                        Step::Store { who, rows } => model.store(who, rows),
                        Step::Back { who } => {
                            let end = model.bus.end();
                            let (reader, replaying, _) = &mut model.readers[who];
                            reader.transient_from = end;
                            *replaying = !model.bus.join(reader);
                        }
                    }
                }
                // Once all is quiet, everybody has everything that was published.
                model.stored += 1;
                keep(&model.bus, model.stored);
                for who in 0..3 {
                    for _ in 0..1000 {
                        model.read(who, 100, 100);
                        model.store(who, 100);
                    }
                    let wanted: Vec<EventId> = (1..=model.stored).collect();
                    prop_assert_eq!(&model.readers[who].2, &wanted);
                }
            }
        }
    }
}
