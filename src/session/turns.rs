//! Frames of running and just ended turns, so that a reader who lost its connection can resume in the middle.
//! Leaves the live stream to `bus`. Rule a change could break: memory is bounded for each turn and in all, and a reader
//! that missed frames is told so (`gap`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::value::RawValue;

use crate::ids::{SessionId, TurnId};
use crate::sync::{Condvar, Mutex};
use crate::threads::{Doing, at_work_for, doing};

/// Frames kept of one turn.
pub const FRAMES_MAX: usize = 4_000;
/// Bytes kept of one turn.
pub const FRAME_BYTES_MAX: usize = 8 * 1024 * 1024;
/// How long an ended turn is kept.
pub const KEPT_AFTER_END: Duration = Duration::from_secs(60);
/// Turns kept in all; the oldest ended one goes first.
const TURNS_MAX: usize = 256;
/// Bytes kept of all turns; the oldest ended one goes first. Turns that run have their own bound.
const ALL_BYTES_MAX: usize = 64 * 1024 * 1024;

/// One adapted message of a turn.
#[derive(Debug, Clone, Serialize)]
pub struct Frame {
    /// Counts from 1 within the turn.
    pub seq: u64,
    /// The adapted message.
    pub msg: Arc<RawValue>,
}

/// What a reader gets of a turn.
#[derive(Debug, Clone, Serialize)]
pub struct TurnPage {
    /// Frames after the asked place, oldest first.
    pub frames: Vec<Frame>,
    /// The turn is over and every kept frame is in `frames`.
    pub complete: bool,
    /// Why it ended in error, if it did.
    pub error: Option<String>,
    /// Frames between the asked place and the first given one are gone.
    pub gap: bool,
}

#[derive(Default)]
struct Buffer {
    frames: VecDeque<Frame>,
    bytes: usize,
    last_seq: u64,
    ended: Option<(Instant, Option<String>)>,
    /// Whose turn it is, for dumps.
    session: Option<SessionId>,
}

/// All buffers of the server.
#[derive(Default)]
pub struct TurnBuffers {
    kept: Mutex<Kept>,
    changed: Condvar,
}

#[derive(Default)]
struct Kept {
    turns: HashMap<TurnId, Buffer>,
    /// Bytes of all frames.
    bytes: usize,
}

impl Kept {
    /// Forgets the turn that ended first; false if none has ended.
    fn forget_oldest(&mut self) -> bool {
        let ended = self.turns.iter().filter_map(|(t, b)| b.ended.as_ref().map(|(at, _)| (*at, t)));
        let Some(oldest) = ended.min().map(|(_, t)| t.clone()) else { return false };
        self.bytes -= self.turns.remove(&oldest).map_or(0, |b| b.bytes);
        true
    }
}

impl TurnBuffers {
    /// Opens a buffer; frames of a turn without one are not kept.
    pub fn begin(&self, turn: &TurnId, session: &SessionId) {
        let mut kept = self.kept.lock();
        if kept.turns.len() >= TURNS_MAX {
            kept.forget_oldest();
        }
        let buffer = kept.turns.entry(turn.clone()).or_default();
        buffer.ended = None;
        buffer.session = Some(session.clone());
    }

    /// Forgets turns whose time is over.
    pub fn forget_ended(&self) {
        let over = |buffer: &Buffer| buffer.ended.as_ref().is_some_and(|(at, _)| at.elapsed() >= KEPT_AFTER_END);
        let mut kept = self.kept.lock();
        kept.turns.retain(|_, buffer| !over(buffer));
        kept.bytes = kept.turns.values().map(|buffer| buffer.bytes).sum();
    }

    /// Keeps a frame; returns its number.
    pub fn push(&self, turn: &TurnId, msg: Arc<RawValue>) -> u64 {
        let mut kept = self.kept.lock();
        let Some(buffer) = kept.turns.get_mut(turn) else { return 0 };
        let before = buffer.bytes;
        buffer.last_seq += 1;
        buffer.bytes += msg.get().len();
        let seq = buffer.last_seq;
        buffer.frames.push_back(Frame { seq, msg });
        while buffer.frames.len() > FRAMES_MAX || (buffer.bytes > FRAME_BYTES_MAX && buffer.frames.len() > 1) {
            if let Some(gone) = buffer.frames.pop_front() {
                buffer.bytes -= gone.msg.get().len();
            }
        }
        let after = buffer.bytes;
        kept.bytes = kept.bytes + after - before;
        while kept.bytes > ALL_BYTES_MAX && kept.forget_oldest() {}
        drop(kept);
        self.changed.notify_all();
        seq
    }

    /// The turn is over, in error if `error` says why.
    pub fn end(&self, turn: &TurnId, error: Option<String>) {
        if let Some(buffer) = self.kept.lock().turns.get_mut(turn) {
            buffer.ended = Some((Instant::now(), error));
        }
        self.changed.notify_all();
    }

    /// Frames after `after`; waits up to `wait` for the first one or the end. `None` for a turn that is not kept.
    #[must_use]
    pub fn read(&self, turn: &TurnId, after: u64, wait: Duration) -> Option<TurnPage> {
        let deadline = Instant::now() + wait;
        let mut kept = self.kept.lock();
        loop {
            let buffer = kept.turns.get(turn)?;
            if buffer.last_seq > after || buffer.ended.is_some() || Instant::now() >= deadline {
                let first = buffer.frames.front().map_or(buffer.last_seq + 1, |f| f.seq);
                return Some(TurnPage {
                    frames: buffer.frames.iter().filter(|f| f.seq > after).cloned().collect(),
                    complete: buffer.ended.is_some(),
                    error: buffer.ended.as_ref().and_then(|(_, e)| e.clone()),
                    gap: after + 1 < first,
                });
            }
            let _for = buffer.session.as_ref().map(at_work_for);
            let _at = doing(Doing::WaitTurn);
            self.changed.wait_until(&mut kept, deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Arc<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap().into()
    }

    #[test]
    fn a_reader_resumes_after_its_last_frame_and_learns_of_a_gap() {
        let buffers = TurnBuffers::default();
        let turn = TurnId::fresh();
        assert!(buffers.read(&turn, 0, Duration::ZERO).is_none());
        buffers.begin(&turn, &SessionId::fresh());
        for i in 0..FRAMES_MAX + 10 {
            assert_eq!(buffers.push(&turn, raw("1")), i as u64 + 1);
        }
        let page = buffers.read(&turn, FRAMES_MAX as u64 + 8, Duration::ZERO).unwrap();
        assert_eq!((page.frames.len(), page.gap, page.complete), (2, false, false));
        let page = buffers.read(&turn, 3, Duration::ZERO).unwrap();
        assert_eq!((page.frames.len(), page.frames[0].seq, page.gap), (FRAMES_MAX, 11, true));
        buffers.end(&turn, Some("broke off".into()));
        let page = buffers.read(&turn, FRAMES_MAX as u64 + 10, Duration::from_secs(60)).unwrap();
        assert_eq!((page.frames.len(), page.complete, page.error.as_deref()), (0, true, Some("broke off")));
    }

    #[test]
    fn bytes_of_a_turn_are_bounded() {
        let buffers = TurnBuffers::default();
        let turn = TurnId::fresh();
        buffers.begin(&turn, &SessionId::fresh());
        let big = raw(&format!("\"{}\"", "x".repeat(3 * 1024 * 1024)));
        for _ in 0..4 {
            buffers.push(&turn, big.clone());
        }
        let page = buffers.read(&turn, 0, Duration::ZERO).unwrap();
        assert_eq!((page.frames.len(), page.gap), (2, true));
    }

    #[test]
    fn bytes_of_all_turns_are_bounded_and_the_oldest_ended_one_goes_first() {
        let buffers = TurnBuffers::default();
        let big = raw(&format!("\"{}\"", "x".repeat(7 * 1024 * 1024)));
        let turns: Vec<TurnId> = (0..12).map(|_| TurnId::fresh()).collect();
        for turn in &turns {
            buffers.begin(turn, &SessionId::fresh());
            buffers.push(turn, big.clone());
            buffers.end(turn, None);
        }
        let kept = |turn: &TurnId| buffers.read(turn, 0, Duration::ZERO).is_some();
        assert!(!turns[..3].iter().any(kept) && turns[3..].iter().all(kept));
        assert_eq!(buffers.kept.lock().bytes, 9 * big.get().len());
    }
}
