//! One client: its socket, its place in the stream, and what waits to be written to it.
//! Leaves to `reactor` when it is called, and to `replay` the reading of the store.
//! Rule a change could break: at most one unfinished frame, a few control bytes and one shared batch belong to a
//! client; all else that it has yet to get stays in the ring or in the store.

mod output;

use std::sync::Arc;

pub(super) use output::LiveFrames;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::protocol::{Close, Inbound, PING, Protocol, SSE_HEAD, SSE_PING, refusal, switching_head, write_close};
use super::replay::{Batch, Found};
use super::{Counters, Shared, Stream, Upgrade, UpgradeKind};
use crate::bus::{Cursor, Frame, Reader, Taken, parse_cursor};
use crate::error::Result;
use crate::ids::EventId;

/// Control bytes that may wait: pongs of a client that does not read them.
const CONTROL_BYTES_MAX: usize = 8 * 1024;
/// Frames a client may send each second, beyond the burst.
const CLIENT_FRAMES_PER_S: u64 = 10;
/// Bytes a client may send at once: two frames of the largest size.
const CLIENT_BYTES_BURST: u64 = 160 * 1024;
/// Bytes a client may send each second, beyond the burst.
const CLIENT_BYTES_PER_S: u64 = 4 * 1024;
/// Bytes read and thrown away while closing, so that the close frame is not lost to a reset.
const DISCARD_BYTES_MAX: usize = 1024 * 1024;

/// What a call needs from the reactor.
pub(super) struct Round<'a> {
    pub(super) shared: &'a Shared,
    pub(super) now_ms: u64,
    /// Room for the frames of one write.
    pub(super) taken: &'a mut Vec<Taken>,
}

enum Kind {
    WebSocket(Box<Protocol>),
    Sse,
}

enum Place {
    /// The bounds of the store are being asked for; nothing was written yet.
    Opening(Box<Opening>),
    /// It moved its cursor; the bounds are being asked for again.
    Seeking(Cursor),
    /// It reads the ring.
    Live,
    /// It is served from the store: a batch and how much of it is passed, or the wait for one.
    Replaying(Option<(Arc<Batch>, usize)>),
    /// Only control bytes go out any more.
    Closing(Closing),
}

struct Opening {
    key: Option<String>,
    cursor: Option<String>,
    leftover: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct Closing {
    deadline_ms: u64,
    /// Nothing more will come from the peer that matters: gone as soon as all is written.
    peer_is_done: bool,
    /// Our side is shut, the peer's end is awaited.
    shut: bool,
    discarded: usize,
}

/// What a client may still send.
struct Allowance {
    frames: u64,
    bytes: u64,
    at_ms: u64,
}

/// A question for the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    Bounds,
    RowsAfter(EventId),
}

pub(super) struct Client {
    pub(super) stream: Stream,
    pub(super) token: u64,
    /// What the reactor told epoll.
    pub(super) interest: EventFlags,
    /// To be dropped.
    pub(super) gone: bool,
    /// To be asked by the reactor.
    pub(super) want: Option<Want>,
    /// Number of its last question.
    pub(super) asked: u32,
    /// Counted by the reactor as blocked, as replaying, as closing.
    pub(super) counted: [bool; 3],
    kind: Kind,
    place: Place,
    reader: Reader,
    /// The frame that was cut by a full socket, and how much of it is written.
    partial: Option<(Arc<Frame>, usize)>,
    /// Heads, hello, resync, pings, pongs, close: whole, and written between frames.
    control: Vec<u8>,
    blocked: bool,
    /// When the socket last took something or was not full.
    progress_ms: u64,
    next_ping_ms: u64,
    pings_unanswered: u8,
    allowance: Allowance,
}

impl Client {
    pub(super) fn new(upgrade: Upgrade, token: u64, round: &Round<'_>) -> Self {
        let limits = &round.shared.limits;
        let (kind, key) = match upgrade.kind {
            UpgradeKind::WebSocket { key } => {
                (Kind::WebSocket(Box::new(Protocol::new(limits.client_frame_bytes_max))), Some(key))
            }
            UpgradeKind::Sse => (Kind::Sse, None),
        };
        Self {
            stream: upgrade.stream,
            token,
            interest: EventFlags::empty(),
            gone: false,
            want: Some(Want::Bounds),
            asked: 0,
            counted: [false; 3],
            kind,
            place: Place::Opening(Box::new(Opening { key, cursor: upgrade.cursor, leftover: upgrade.leftover })),
            reader: round.shared.bus.live_reader(),
            partial: None,
            control: Vec::new(),
            blocked: false,
            progress_ms: round.now_ms,
            // Spread over four ticks, so that the pongs of many who came at once do not.
            next_ping_ms: round.now_ms + limits.ping_every_ms - (token & 3) * limits.ping_every_ms / 4,
            pings_unanswered: 0,
            allowance: Allowance {
                frames: u64::from(limits.client_frames_burst),
                bytes: CLIENT_BYTES_BURST,
                at_ms: round.now_ms,
            },
        }
    }

    pub(super) fn is_sse(&self) -> bool {
        matches!(self.kind, Kind::Sse)
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    pub(super) fn is_replaying(&self) -> bool {
        matches!(self.place, Place::Replaying(_))
    }

    /// When a closing client is dropped at the latest.
    pub(super) fn closing_deadline_ms(&self) -> Option<u64> {
        match &self.place {
            Place::Closing(closing) => Some(closing.deadline_ms),
            Place::Opening(_) | Place::Seeking(_) | Place::Live | Place::Replaying(_) => None,
        }
    }

    /// What epoll should watch.
    pub(super) fn wanted_interest(&self) -> EventFlags {
        let mut flags = EventFlags::empty();
        // What a client says before its head is out would be answered before it.
        flags.set(EventFlags::IN, !matches!(self.place, Place::Opening(_)));
        flags.set(EventFlags::OUT, self.blocked);
        flags
    }

    /// Frames between it and the newest.
    pub(super) fn lag_frames(&self, end: u64) -> u64 {
        match self.place {
            Place::Live => end.saturating_sub(self.reader.next),
            Place::Opening(_) | Place::Seeking(_) | Place::Replaying(_) | Place::Closing(_) => 0,
        }
    }

    /// Bytes of the unfinished frame, if this client alone keeps it.
    pub(super) fn lone_frame_bytes(&self) -> usize {
        // A second reference is the ring's, a batch's or another reader's.
        self.partial.as_ref().filter(|(f, _)| Arc::strong_count(f) == 1).map_or(0, |(f, _)| f.ws().len())
    }

    /// Its share of what blocked readers keep in memory, in bytes, and since when it takes nothing.
    pub(super) fn pinned(&self) -> (usize, u64) {
        let batch = match &self.place {
            Place::Replaying(Some((batch, _))) => batch.bytes() / Arc::strong_count(batch).max(1),
            Place::Opening(_) | Place::Seeking(_) | Place::Live | Place::Replaying(None) | Place::Closing(_) => 0,
        };
        (self.lone_frame_bytes() + batch, self.progress_ms)
    }

    /// The answer to [`Want::Bounds`].
    pub(super) fn bounds(&mut self, found: Result<Found>, round: &mut Round<'_>) {
        match std::mem::replace(&mut self.place, Place::Live) {
            Place::Opening(opening) => {
                let found = match found {
                    Ok(found) => found,
                    Err(e) => {
                        log::warn!("events cannot be read: {e}");
                        Counters::add(&round.shared.counters.refused, 1);
                        return self.refuse("cannot_record", "the events cannot be read now", round);
                    }
                };
                match &opening.key {
                    Some(key) => self.control = switching_head(key),
                    None => self.control.extend_from_slice(SSE_HEAD),
                }
                self.take_place(opening.cursor.as_deref().and_then(|c| parse_cursor(c).ok()), &found, true, round);
                if opening.leftover.is_empty() {
                    self.pump(round);
                } else {
                    self.feed(&opening.leftover, round);
                }
            }
            Place::Seeking(cursor) => match found {
                Ok(found) => {
                    self.take_place(Some(cursor), &found, false, round);
                    self.pump(round);
                }
                Err(e) => self.store_failed(&e, round),
            },
            other @ (Place::Live | Place::Replaying(_) | Place::Closing(_)) => self.place = other,
        }
    }

    /// The answer to [`Want::RowsAfter`].
    pub(super) fn rows(&mut self, found: Result<Found>, round: &mut Round<'_>) {
        if !matches!(self.place, Place::Replaying(None)) {
            return;
        }
        match found {
            // Rows were dropped from the store before they could be read.
            Ok(found) if self.reader.after.saturating_add(1) < found.oldest => self.resync("old", round),
            Ok(Found { batch: Some(batch), .. }) => self.place = Place::Replaying(Some((batch, 0))),
            Ok(Found { batch: None, .. }) => {
                if round.shared.bus.join(&mut self.reader) {
                    self.place = Place::Live;
                } else {
                    let after = self.reader.after;
                    log::error!("the store has no event after {after}, the bus does");
                    return self.close(Close::TryAgain, "events are missing", round);
                }
            }
            Err(e) => return self.store_failed(&e, round),
        }
        self.pump(round);
    }

    fn store_failed(&mut self, e: &crate::error::Error, round: &mut Round<'_>) {
        log::warn!("events cannot be read: {e}");
        self.close(Close::TryAgain, "the events cannot be read now", round);
    }

    /// Says hello to a newcomer, then finds the place its cursor means.
    fn take_place(&mut self, cursor: Option<Cursor>, found: &Found, hello: bool, round: &mut Round<'_>) {
        let bus = &round.shared.bus;
        let transient_from = if hello { bus.end() } else { self.reader.transient_from };
        let mut wrong = None;
        match cursor {
            None => self.reader = bus.live_reader(),
            Some(cursor) => {
                if cursor.epoch.is_some_and(|epoch| epoch != bus.epoch()) {
                    wrong = Some("foreign");
                } else if cursor.id.saturating_add(1) < found.oldest {
                    wrong = Some("old");
                } else if cursor.id > bus.head().max(found.head) {
                    wrong = Some("future");
                }
                self.reader = Reader { next: 0, after: cursor.id, transient_from };
            }
        }
        if hello {
            let id = wrong.is_none().then_some(self.reader.after);
            let data = serde_json::json!({"epoch": bus.epoch(), "head": bus.head(), "oldest": found.oldest});
            self.notice(id, "hello", &data, round);
        }
        if let Some(reason) = wrong {
            self.resync(reason, round);
        } else if bus.join(&mut self.reader) {
            self.place = Place::Live;
        } else {
            self.want = Some(Want::RowsAfter(self.reader.after));
            self.place = Place::Replaying(None);
        }
    }

    /// Tells the client to load everything anew; it goes on live.
    fn resync(&mut self, reason: &'static str, round: &mut Round<'_>) {
        Counters::add(&round.shared.counters.resyncs, 1);
        self.reader = round.shared.bus.live_reader();
        self.place = Place::Live;
        let head = self.reader.after;
        self.notice(Some(head), "resync", &serde_json::json!({"reason": reason, "head": head}), round);
    }

    /// Queues a frame of the stream itself. An SSE client remembers `id` as its cursor.
    fn notice(&mut self, id: Option<EventId>, event: &str, data: &serde_json::Value, round: &Round<'_>) {
        let frame = Frame::notice(event, &data.to_string());
        match self.kind {
            Kind::WebSocket(_) => self.control.extend_from_slice(frame.ws()),
            Kind::Sse => {
                let epoch = round.shared.bus.epoch();
                if let Some(id) = id {
                    self.control.extend_from_slice(format!("id: {epoch}.{id}\n").as_bytes());
                }
                self.control.extend_from_slice(frame.sse(epoch));
            }
        }
    }

    /// Answers 503 instead of the head.
    fn refuse(&mut self, code: &str, text: &str, round: &mut Round<'_>) {
        self.control = refusal(code, text);
        self.start_closing(false, round);
    }

    /// Closes with a code; frames that are not begun are not sent any more.
    pub(super) fn close(&mut self, close: Close, reason: &'static str, round: &mut Round<'_>) {
        match (&self.place, &self.kind) {
            (Place::Closing(_), _) => return,
            (Place::Opening(_), _) => return self.refuse("shutting_down", reason, round),
            (Place::Seeking(_) | Place::Live | Place::Replaying(_), Kind::WebSocket(_)) => {
                write_close(close, reason, &mut self.control);
            }
            (Place::Seeking(_) | Place::Live | Place::Replaying(_), Kind::Sse) => {}
        }
        self.start_closing(false, round);
    }

    fn start_closing(&mut self, peer_is_done: bool, round: &mut Round<'_>) {
        let deadline_ms = round.now_ms + round.shared.limits.linger_ms;
        self.place = Place::Closing(Closing { deadline_ms, peer_is_done, shut: false, discarded: 0 });
        self.pump(round);
    }

    /// There is something to read.
    pub(super) fn readable(&mut self, buffer: &mut [u8], round: &mut Round<'_>) {
        let len = match recv(&self.stream, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((_, len)) => len,
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => 0,
        };
        if len == 0 {
            self.gone = true;
            return;
        }
        self.feed(&buffer[..len], round);
    }

    fn feed(&mut self, mut input: &[u8], round: &mut Round<'_>) {
        self.pings_unanswered = 0;
        if let Place::Closing(closing) = &mut self.place {
            closing.discarded += input.len();
            self.gone |= closing.discarded > DISCARD_BYTES_MAX;
            return;
        }
        let burst = u64::from(round.shared.limits.client_frames_burst);
        self.allowance.refill(round.now_ms, burst);
        if !take(&mut self.allowance.bytes, input.len() as u64) {
            return self.fail(Close::Policy, "too many bytes", round);
        }
        while let Kind::WebSocket(protocol) = &mut self.kind {
            let Some(said) = protocol.next(&mut input, &mut self.control) else {
                break;
            };
            if !take(&mut self.allowance.frames, 1) || self.control.len() > CONTROL_BYTES_MAX {
                return self.fail(Close::Policy, "too many frames", round);
            }
            match said {
                Inbound::Control => {}
                Inbound::Seek(cursor) => {
                    // What it got of the transient ones it does not get again.
                    self.reader.transient_from = self.reader.transient_from.max(self.reader.next);
                    self.place = Place::Seeking(cursor);
                    self.want = Some(Want::Bounds);
                }
                Inbound::Closing => return self.start_closing(true, round),
                Inbound::Fail(close, reason) => return self.fail(close, reason, round),
            }
        }
        self.pump(round);
    }

    fn fail(&mut self, close: Close, reason: &'static str, round: &mut Round<'_>) {
        Counters::add(&round.shared.counters.closed_protocol, 1);
        self.close(close, reason, round);
    }

    /// The socket takes bytes again.
    pub(super) fn writable(&mut self, round: &mut Round<'_>) {
        self.blocked = false;
        self.progress_ms = round.now_ms;
        // A slow reader meets our ping only behind all that waits before it: reading is as good as a pong.
        self.pings_unanswered = 0;
        self.pump(round);
    }

    /// Looks at the clock: pings, silent and stalled peers.
    pub(super) fn tick(&mut self, round: &mut Round<'_>) {
        let limits = &round.shared.limits;
        let counters = &round.shared.counters;
        if self.blocked {
            if round.now_ms.saturating_sub(self.progress_ms) > limits.stall_ms {
                Counters::add(&counters.closed_stalled, 1);
                self.gone = true;
            }
            return;
        }
        if round.now_ms < self.next_ping_ms || matches!(self.place, Place::Opening(_) | Place::Closing(_)) {
            return;
        }
        self.next_ping_ms = round.now_ms + limits.ping_every_ms;
        match self.kind {
            Kind::WebSocket(_) => {
                if self.pings_unanswered >= limits.pings_missed_max {
                    Counters::add(&counters.closed_silent, 1);
                    self.gone = true;
                    return;
                }
                self.pings_unanswered += 1;
                self.control.extend_from_slice(PING);
            }
            Kind::Sse => self.control.extend_from_slice(SSE_PING),
        }
        self.pump(round);
    }
}

impl Allowance {
    fn refill(&mut self, now_ms: u64, frames_burst: u64) {
        let passed_s = now_ms.saturating_sub(self.at_ms) / 1000;
        if passed_s > 0 {
            self.frames = (self.frames + passed_s * CLIENT_FRAMES_PER_S).min(frames_burst);
            self.bytes = (self.bytes + passed_s * CLIENT_BYTES_PER_S).min(CLIENT_BYTES_BURST);
            self.at_ms += passed_s * 1000;
        }
    }
}

/// Takes `wanted` from what is left; false if there is too little.
fn take(left: &mut u64, wanted: u64) -> bool {
    let enough = *left >= wanted;
    *left = left.saturating_sub(wanted);
    enough
}
