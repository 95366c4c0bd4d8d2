//! The ring of recent frames and the places of readers in it; pure. Leaves the lock over it to `bus`.
//! Rule a change could break: [`Ring::floor`] is never too low, so that no reader takes a gap for the next event.

use std::collections::VecDeque;
use std::sync::Arc;

use super::frame::Frame;
use crate::ids::EventId;

/// A reader that far behind in the ring, in bytes, loses transient events.
const TRANSIENT_LAG_BYTES_MAX: u64 = 1024 * 1024;

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
        if taken.frame.id() > 0 {
            self.after = taken.frame.id();
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

pub(super) struct Entry {
    pub(super) frame: Arc<Frame>,
    /// The newest kept id up to and with this frame.
    kept_through: EventId,
    /// Bytes published up to and with this frame.
    bytes_through: u64,
}

pub(super) struct Ring {
    pub(super) entries: VecDeque<Entry>,
    /// Number of the first entry.
    pub(super) first: u64,
    pub(super) head: EventId,
    /// Every kept event above this one, up to head, is in the ring.
    pub(super) floor: EventId,
    bytes_through: u64,
    frames_max: usize,
    bytes_max: u64,
}

impl Ring {
    pub(super) fn new(frames_max: usize, bytes_max: u64) -> Self {
        Self { entries: VecDeque::new(), first: 0, head: 0, floor: 0, bytes_through: 0, frames_max, bytes_max }
    }

    pub(super) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    pub(super) fn push(&mut self, frame: Arc<Frame>) {
        if frame.id() > 0 {
            if frame.id() != self.head + 1 {
                // Somebody else's rows lie between: readers below get them from the store.
                self.floor = frame.id() - 1;
            }
            self.head = frame.id();
        }
        self.bytes_through += frame.ws().len() as u64;
        self.entries.push_back(Entry { frame, kept_through: self.head, bytes_through: self.bytes_through });
        while self.entries.len() > 1 && (self.entries.len() > self.frames_max || self.held() > self.bytes_max) {
            if let Some(gone) = self.entries.pop_front() {
                self.first += 1;
                self.floor = self.floor.max(gone.frame.id());
            }
        }
    }

    fn held(&self) -> u64 {
        self.entries.front().map_or(0, |e| self.bytes_through - e.bytes_through + e.frame.ws().len() as u64)
    }

    pub(super) fn read(
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
            let id = entry.frame.id();
            let wanted = if id > 0 {
                if id > after + 1 && after < self.floor {
                    let seen = if out.is_empty() { Reading::Behind } else { Reading::More };
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
                out.push(Taken { frame: entry.frame.clone(), number: at, dropped });
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

    pub(super) fn join(&self, reader: &mut Reader) -> bool {
        if reader.after < self.floor {
            return false;
        }
        let kept = self.first + self.entries.partition_point(|e| e.kept_through <= reader.after) as u64;
        reader.next = kept.min(reader.transient_from.max(self.first));
        true
    }
}
