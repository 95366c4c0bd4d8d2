//! Frames of running and just ended turns, so that a reader who lost its connection can resume in the middle.
//! Leaves the live stream to `bus`. Rule a change could break: memory is bounded for each turn and in all, and a reader
//! that missed frames is told so (`gap`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::value::RawValue;

use crate::ids::TurnId;
use crate::sync::{Condvar, Mutex};
use crate::threads::{Doing, doing};

/// Frames kept of one turn.
pub const FRAMES_MAX: usize = 4_000;
/// Bytes kept of one turn.
pub const FRAME_BYTES_MAX: usize = 8 * 1024 * 1024;
/// How long an ended turn is kept.
pub const KEPT_AFTER_END: Duration = Duration::from_secs(60);
/// Turns kept in all; the oldest ended one goes first.
const TURNS_MAX: usize = 256;

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
}

/// All buffers of the server.
#[derive(Default)]
pub struct TurnBuffers {
    turns: Mutex<HashMap<TurnId, Buffer>>,
    changed: Condvar,
}

impl TurnBuffers {
    /// Opens a buffer; frames of a turn without one are not kept.
    pub fn begin(&self, turn: &TurnId) {
        let mut turns = self.turns.lock();
        if turns.len() >= TURNS_MAX
            && let Some(oldest) =
                turns.iter().filter_map(|(t, b)| b.ended.as_ref().map(|(at, _)| (*at, t.clone()))).min().map(|(_, t)| t)
        {
            turns.remove(&oldest);
        }
        let buffer = turns.entry(turn.clone()).or_default();
        buffer.ended = None;
    }

    /// Forgets turns whose time is over.
    pub fn forget_ended(&self) {
        let over = |buffer: &Buffer| buffer.ended.as_ref().is_some_and(|(at, _)| at.elapsed() >= KEPT_AFTER_END);
        self.turns.lock().retain(|_, buffer| !over(buffer));
    }

    /// Keeps a frame; returns its number.
    pub fn push(&self, turn: &TurnId, msg: Arc<RawValue>) -> u64 {
        let mut turns = self.turns.lock();
        let Some(buffer) = turns.get_mut(turn) else { return 0 };
        buffer.last_seq += 1;
        buffer.bytes += msg.get().len();
        let seq = buffer.last_seq;
        buffer.frames.push_back(Frame { seq, msg });
        while buffer.frames.len() > FRAMES_MAX || (buffer.bytes > FRAME_BYTES_MAX && buffer.frames.len() > 1) {
            if let Some(gone) = buffer.frames.pop_front() {
                buffer.bytes -= gone.msg.get().len();
            }
        }
        drop(turns);
        self.changed.notify_all();
        seq
    }

    /// The turn is over, in error if `error` says why.
    pub fn end(&self, turn: &TurnId, error: Option<String>) {
        if let Some(buffer) = self.turns.lock().get_mut(turn) {
            buffer.ended = Some((Instant::now(), error));
        }
        self.changed.notify_all();
    }

    /// Frames after `after`; waits up to `wait` for the first one or the end. `None` for a turn that is not kept.
    #[must_use]
    pub fn read(&self, turn: &TurnId, after: u64, wait: Duration) -> Option<TurnPage> {
        let deadline = Instant::now() + wait;
        let mut turns = self.turns.lock();
        loop {
            let buffer = turns.get(turn)?;
            if buffer.last_seq > after || buffer.ended.is_some() || Instant::now() >= deadline {
                let first = buffer.frames.front().map_or(buffer.last_seq + 1, |f| f.seq);
                return Some(TurnPage {
                    frames: buffer.frames.iter().filter(|f| f.seq > after).cloned().collect(),
                    complete: buffer.ended.is_some(),
                    error: buffer.ended.as_ref().and_then(|(_, e)| e.clone()),
                    gap: after + 1 < first,
                });
            }
            let _at = doing(Doing::WaitTurn);
            self.changed.wait_until(&mut turns, deadline);
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
        buffers.begin(&turn);
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
        buffers.begin(&turn);
        let big = raw(&format!("\"{}\"", "x".repeat(3 * 1024 * 1024)));
        for _ in 0..4 {
            buffers.push(&turn, big.clone());
        }
        let page = buffers.read(&turn, 0, Duration::ZERO).unwrap();
        assert_eq!((page.frames.len(), page.gap), (2, true));
    }
}
