//! The event stream in memory: a ring of recent frames, each serialized once, and the places of readers in it.
//!
//! Leaves to others: what is durable (`journal` commits first and publishes after), sockets (`push`), and every event
//! that is no longer in the ring (the [`EventStore`]). Rule a change could break: a kept event is handed to a reader if
//! and only if its id is above the last one that reader was given, in rising order and without a gap, whether it came
//! from the ring or from the store; so replay and live join without a hole and without a double by construction.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use serde::Serialize;

use crate::error::Result;
use crate::ids::{EventId, is_plain_id};
use crate::sync::Mutex;

/// Frames the ring holds at most: enough for 1.6 s at 10,000 events/s.
const RING_FRAMES_MAX: usize = 16 * 1024;
/// Bytes the ring holds at most; one larger frame alone is kept.
const RING_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// A reader that far behind in the ring, in bytes, loses transient events.
const TRANSIENT_LAG_BYTES_MAX: u64 = 1024 * 1024;
/// Room in front of a payload for the longest frame header of a server: 2 + 8 bytes.
const HEADER_BYTES_MAX: usize = 10;

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
    Ok(Cursor {
        epoch,
        id: id.parse().map_err(|_| BadCursor)?,
    })
}

/// One event, serialized once: a whole WebSocket text frame, and its SSE form once somebody asks for it.
pub struct Frame {
    /// Header and payload of the frame, from `start`.
    bytes: Box<[u8]>,
    start: u8,
    event_len: u8,
    /// 0 for a transient event.
    id: EventId,
    sse: OnceLock<Box<[u8]>>,
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("id", &self.id)
            .field("bytes", &self.ws().len())
            .finish_non_exhaustive()
    }
}

impl Frame {
    /// The frame of a kept event; `data` is JSON text.
    #[must_use]
    pub fn kept(id: EventId, event: &str, data_json: &str, at: &str) -> Self {
        Self::build(id, event, at, |to| {
            to.extend_from_slice(data_json.as_bytes())
        })
    }

    /// A frame of the stream itself (`hello`, `resync`), for one client.
    #[must_use]
    pub fn notice(event: &str, data_json: &str) -> Self {
        Self::build(0, event, "", |to| {
            to.extend_from_slice(data_json.as_bytes())
        })
    }

    fn build(id: EventId, event: &str, at: &str, data: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut bytes = Vec::with_capacity(256);
        bytes.resize(HEADER_BYTES_MAX, 0);
        bytes.push(b'{');
        if id > 0 {
            bytes.extend_from_slice(b"\"id\":");
            bytes.extend_from_slice(id.to_string().as_bytes());
            bytes.push(b',');
        }
        bytes.extend_from_slice(b"\"event\":\"");
        bytes.extend_from_slice(event.as_bytes());
        bytes.extend_from_slice(b"\",\"data\":");
        data(&mut bytes);
        if !at.is_empty() {
            bytes.extend_from_slice(b",\"at\":\"");
            bytes.extend_from_slice(at.as_bytes());
            bytes.push(b'"');
        }
        bytes.push(b'}');
        let payload = bytes.len() - HEADER_BYTES_MAX;
        let (header, header_len) = header(payload);
        let start = HEADER_BYTES_MAX - header_len;
        bytes[start..HEADER_BYTES_MAX].copy_from_slice(&header[..header_len]);
        Self {
            bytes: bytes.into_boxed_slice(),
            start: start as u8,
            event_len: event.len().min(255) as u8,
            id,
            sse: OnceLock::new(),
        }
    }

    /// Its id; 0 for a transient event.
    #[must_use]
    pub fn id(&self) -> EventId {
        self.id
    }

    /// The whole WebSocket frame: header and JSON.
    #[must_use]
    pub fn ws(&self) -> &[u8] {
        &self.bytes[usize::from(self.start)..]
    }

    /// The JSON object alone.
    #[must_use]
    pub fn json(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES_MAX..]
    }

    /// The event as `text/event-stream` has it: `id: EPOCH.ID` (kept ones), `event:`, `data:` with the whole object.
    pub fn sse(&self, epoch: &str) -> &[u8] {
        self.sse.get_or_init(|| {
            let json = self.json();
            // {"id":N,"event":"NAME" or {"event":"NAME"
            let name_at = if self.id > 0 {
                16 + self.id.to_string().len()
            } else {
                10
            };
            let mut text = Vec::with_capacity(json.len() + 96);
            if self.id > 0 {
                text.extend_from_slice(format!("id: {epoch}.{}\n", self.id).as_bytes());
            }
            text.extend_from_slice(b"event: ");
            text.extend_from_slice(&json[name_at..name_at + usize::from(self.event_len)]);
            text.extend_from_slice(b"\ndata: ");
            text.extend_from_slice(json);
            text.extend_from_slice(b"\n\n");
            text.into_boxed_slice()
        })
    }
}

/// Header of an unmasked, unfragmented text frame of `len` payload bytes (RFC 6455 §5.2), and its length.
fn header(len: usize) -> ([u8; HEADER_BYTES_MAX], usize) {
    let mut header = [0; HEADER_BYTES_MAX];
    header[0] = 0x81;
    if len < 126 {
        header[1] = len as u8;
        (header, 2)
    } else if let Ok(short) = u16::try_from(len) {
        header[1] = 126;
        header[2..4].copy_from_slice(&short.to_be_bytes());
        (header, 4)
    } else {
        header[1] = 127;
        header[2..10].copy_from_slice(&(len as u64).to_be_bytes());
        (header, 10)
    }
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

/// A reader's place: what it was given, and where in the ring it reads on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    /// Number of the frame it reads next.
    pub next: u64,
    /// Id of the last kept event it was given (or that it said it has).
    pub after: EventId,
    /// Transient frames below this number are not for it.
    pub transient_from: u64,
}

/// A frame to be written to one reader.
#[derive(Debug, Clone)]
pub struct Taken {
    /// The frame.
    pub frame: Arc<Frame>,
    /// Its number.
    pub number: u64,
    /// Transient frames that the reader loses before it.
    pub dropped: u32,
}

impl Reader {
    /// Moves past a frame that is (or is being) written.
    pub fn pass(&mut self, taken: &Taken) {
        self.next = taken.number + 1;
        if taken.frame.id > 0 {
            self.after = taken.frame.id;
        }
    }
}

/// What a read of the ring found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// Everything up to the newest frame.
    Whole,
    /// The limit was reached, there is more.
    More,
    /// The ring no longer holds (or never held) the event after `Reader::after`: ask the store.
    Behind,
}

struct Entry {
    frame: Arc<Frame>,
    /// The newest kept id up to and with this frame.
    kept_through: EventId,
    /// Bytes published up to and with this frame.
    bytes_through: u64,
}

struct Ring {
    entries: VecDeque<Entry>,
    /// Number of the first entry.
    first: u64,
    head: EventId,
    /// Every kept event above this one, up to head, is in the ring.
    floor: EventId,
    bytes_through: u64,
    frames_max: usize,
    bytes_max: u64,
}

impl Ring {
    fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    fn push(&mut self, frame: Arc<Frame>) {
        if frame.id > 0 {
            if frame.id != self.head + 1 {
                // Somebody else's rows lie between: readers below get them from the store.
                self.floor = frame.id - 1;
            }
            self.head = frame.id;
        }
        self.bytes_through += frame.ws().len() as u64;
        self.entries.push_back(Entry {
            frame,
            kept_through: self.head,
            bytes_through: self.bytes_through,
        });
        while self.entries.len() > 1
            && (self.entries.len() > self.frames_max || self.held() > self.bytes_max)
        {
            if let Some(gone) = self.entries.pop_front() {
                self.first += 1;
                self.floor = self.floor.max(gone.frame.id);
            }
        }
    }

    fn held(&self) -> u64 {
        self.entries.front().map_or(0, |e| {
            self.bytes_through - e.bytes_through + e.frame.ws().len() as u64
        })
    }

    fn read(
        &self,
        reader: &mut Reader,
        frames_max: usize,
        bytes_max: usize,
        out: &mut Vec<Taken>,
    ) -> (Reading, u64) {
        let mut lost = 0;
        if reader.next < self.first {
            if reader.after < self.floor {
                return (Reading::Behind, 0);
            }
            lost = self.first - reader.next;
            reader.next = self.first;
        }
        let (mut bytes, mut dropped) = (0, 0);
        let mut at = reader.next;
        let mut after = reader.after;
        while let Some(entry) = self.entries.get((at - self.first) as usize) {
            let id = entry.frame.id;
            let wanted = if id > 0 {
                if id > after + 1 && after < self.floor {
                    let seen = if out.is_empty() {
                        Reading::Behind
                    } else {
                        Reading::More
                    };
                    return (seen, lost);
                }
                id > after
            } else {
                let stale = self.bytes_through - entry.bytes_through > TRANSIENT_LAG_BYTES_MAX;
                dropped += u32::from(stale && at >= reader.transient_from);
                !stale && at >= reader.transient_from
            };
            if wanted {
                if out.len() >= frames_max || bytes >= bytes_max {
                    return (Reading::More, lost);
                }
                bytes += entry.frame.ws().len();
                out.push(Taken {
                    frame: entry.frame.clone(),
                    number: at,
                    dropped,
                });
                dropped = 0;
                after = after.max(id);
            } else if out.is_empty() {
                reader.next = at + 1;
                lost += u64::from(dropped);
                dropped = 0;
            }
            at += 1;
        }
        (Reading::Whole, lost)
    }

    fn join(&self, reader: &mut Reader) -> bool {
        if reader.after < self.floor {
            return false;
        }
        let kept = self.first
            + self
                .entries
                .partition_point(|e| e.kept_through <= reader.after) as u64;
        reader.next = kept.min(reader.transient_from.max(self.first));
        true
    }
}

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
        f.debug_struct("Bus")
            .field("epoch", &self.epoch())
            .field("head", &self.head())
            .finish_non_exhaustive()
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
        let ring = Ring {
            entries: VecDeque::new(),
            first: 0,
            head: 0,
            floor: 0,
            bytes_through: 0,
            frames_max,
            bytes_max,
        };
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
        let frame = Frame::build(
            0,
            event,
            &crate::clock::rfc3339(crate::clock::now_ms()),
            |to| {
                let was = to.len();
                if let Err(e) = serde_json::to_writer(&mut *to, data) {
                    to.truncate(was);
                    to.extend_from_slice(b"null");
                    failed = Some(e);
                }
            },
        );
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
        self.listener_count
            .store(listeners.len(), Ordering::Release);
    }

    fn send_on(&self, frame: Arc<Frame>, event: &str, heard: bool) {
        {
            let mut ring = self.ring.lock();
            if frame.id > 0 && frame.id <= ring.head {
                log::error!("event {} was published after event {}", frame.id, ring.head);
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
            let heard = Heard {
                id: (frame.id > 0).then_some(frame.id),
                event,
                json,
            };
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
        Reader {
            next: ring.end(),
            after: ring.head,
            transient_from: ring.end(),
        }
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

    /// Frames from number `from` on, whoever they are for, at most `frames_max`; the number of the first.
    pub(crate) fn tail(&self, from: u64, frames_max: usize, out: &mut Vec<Arc<Frame>>) -> u64 {
        let ring = self.ring.lock();
        let from = from.max(ring.first);
        let at = (from - ring.first) as usize;
        out.extend(
            ring.entries
                .iter()
                .skip(at)
                .take(frames_max)
                .map(|e| e.frame.clone()),
        );
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
            let wanted = wanted.map(|(e, id): (Option<&str>, i64)| Cursor {
                epoch: e.map(str::to_owned),
                id,
            });
            assert_eq!(parse_cursor(text).ok(), wanted, "{text:?}");
        }
    }

    #[test]
    fn a_frame_is_a_whole_websocket_frame_and_an_sse_event() {
        for size in [0, 100, 200, 65_000, 66_000] {
            let data = json!({"t": "x".repeat(size)}).to_string();
            let frame = Frame::kept(123, "chat-complete", &data, "2026-12-01T00:00:00.000Z");
            let json = format!(
                r#"{{"id":123,"event":"chat-complete","data":{data},"at":"2026-12-01T00:00:00.000Z"}}"#
            );
            assert_eq!(std::str::from_utf8(frame.json()).unwrap(), json);
            let (head, len) = header(json.len());
            assert_eq!(&frame.ws()[..len], &head[..len]);
            assert_eq!(&frame.ws()[len..], json.as_bytes());
            let sse = format!("id: e1.123\nevent: chat-complete\ndata: {json}\n\n");
            assert_eq!(std::str::from_utf8(frame.sse("e1")).unwrap(), sse);
        }
        assert_eq!(header(125).1, 2);
        assert_eq!(
            (header(126).1, header(65_535).1, header(65_536).1),
            (4, 4, 10)
        );
        let transient = Frame::notice("hello", "{}");
        assert_eq!(
            transient.sse("e"),
            b"event: hello\ndata: {\"event\":\"hello\",\"data\":{}}\n\n"
        );
    }

    #[test]
    fn a_reader_gets_every_kept_event_above_its_cursor_once() {
        let bus = Bus::new("e", 10);
        for id in 11..=15 {
            keep(&bus, id);
        }
        for (after, wanted) in [
            (10, vec![11, 12, 13, 14, 15]),
            (13, vec![14, 15]),
            (15, vec![]),
            (20, vec![]),
        ] {
            let mut reader = Reader {
                next: 0,
                after,
                transient_from: bus.end(),
            };
            assert!(bus.join(&mut reader), "{after}");
            assert_eq!(
                read_all(&bus, &mut reader),
                (wanted, Reading::Whole, 0),
                "{after}"
            );
        }
        let mut reader = Reader {
            next: 0,
            after: 9,
            transient_from: bus.end(),
        };
        assert!(!bus.join(&mut reader), "event 10 is in the store only");
        // Read ahead from the store: what the ring gets later is no double.
        let mut reader = Reader {
            next: 0,
            after: 17,
            transient_from: bus.end(),
        };
        assert!(bus.join(&mut reader));
        for id in 16..=19 {
            keep(&bus, id);
        }
        assert_eq!(
            read_all(&bus, &mut reader),
            (vec![18, 19], Reading::Whole, 0)
        );
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
        assert_eq!(
            read_all(&bus, &mut at_two),
            (vec![3, 4, 5], Reading::Whole, 0)
        );
        // Only transient ones fell out since: nothing that the store has is missing.
        for _ in 0..10 {
            bus.publish("t", &json!({}));
        }
        assert_eq!(read_all(&bus, &mut at_two), (vec![0; 4], Reading::Whole, 6));
    }

    #[test]
    fn transient_events_before_the_reader_came_are_not_for_it() {
        let bus = Bus::new("e", 0);
        keep(&bus, 1);
        bus.publish("t", &json!({}));
        keep(&bus, 2);
        let mut reader = Reader {
            next: 0,
            after: 0,
            transient_from: bus.end(),
        };
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
        assert_eq!(
            bus.read(&mut reader, 100, usize::MAX, &mut out).0,
            Reading::More
        );
        assert_eq!(ids(&out), [1]);
        reader.pass(&out[0]);
        assert_eq!(
            read_all(&bus, &mut reader).1,
            Reading::Behind,
            "2 and 3 are in the store"
        );
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
        assert_eq!(
            got.iter()
                .filter(|id| **id > 0)
                .copied()
                .collect::<Vec<_>>(),
            (1..=40).collect::<Vec<_>>()
        );
        let transient = got.iter().filter(|id| **id == 0).count();
        assert!(
            (10..=16).contains(&transient),
            "the last MiB of 64 KiB frames: {transient}"
        );
    }

    #[test]
    fn an_old_id_is_refused_and_listeners_hear_what_clients_get() {
        let bus = Bus::new("e", 5);
        let heard = Arc::new(Mutex::new(Vec::new()));
        let to = heard.clone();
        bus.listen(Arc::new(move |h| {
            to.lock()
                .push((h.id, h.event.to_owned(), h.json.to_owned()))
        }));
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
}
