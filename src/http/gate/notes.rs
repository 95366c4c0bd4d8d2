//! What other threads tell the gate: a short list and a wake fd. Rule a change could break: telling never blocks on
//! the gate, a note is never lost, and a gate that is awake costs no wake-up.

use std::sync::Arc;
use std::time::Instant;

use rustix::event::EventfdFlags;
use rustix::fd::OwnedFd;

use crate::error::Result;
use crate::sync::Mutex;

/// A note.
#[derive(Debug)]
pub enum Note {
    /// The exchange of this number has bytes or its end.
    Answer(u64),
    /// The token was changed.
    Token(crate::http::guard::Token),
    /// Finish what is in flight, until then, and end.
    Shutdown(Instant),
}

/// The list.
#[derive(Debug)]
pub struct Notes {
    list: Mutex<List>,
    event: OwnedFd,
}

#[derive(Debug, Default)]
struct List {
    notes: Vec<Note>,
    /// The gate found nothing and waits: the next note wakes it.
    asleep: bool,
}

impl Notes {
    /// An empty list.
    ///
    /// # Errors
    /// When the kernel has no descriptor to give.
    pub fn new() -> Result<Arc<Self>> {
        let event =
            rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        Ok(Arc::new(Self { list: Mutex::default(), event }))
    }

    /// Leaves a note, and wakes the gate if it sleeps.
    pub fn leave(&self, note: Note) {
        let wake = {
            let mut list = self.list.lock();
            list.notes.push(note);
            std::mem::take(&mut list.asleep)
        };
        if wake {
            // The only error of a full counter is EAGAIN, and then an earlier wake-up was not read yet.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Swaps the list with an empty one of the caller's.
    pub fn take(&self, empty: &mut Vec<Note>) {
        let mut list = self.list.lock();
        list.asleep = false;
        std::mem::swap(&mut list.notes, empty);
    }

    /// Says that the gate is about to wait; false if it must not, because there is a note.
    #[must_use]
    pub fn rest(&self) -> bool {
        let mut list = self.list.lock();
        list.asleep = list.notes.is_empty();
        list.asleep
    }

    /// Takes the wake-up out of the event.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8][..]);
    }

    /// What to wait on.
    #[must_use]
    pub fn event(&self) -> &OwnedFd {
        &self.event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_woken(notes: &Notes) -> bool {
        rustix::io::read(notes.event(), &mut [0u8; 8][..]).is_ok()
    }

    #[test]
    fn only_a_gate_that_rests_is_woken_and_never_with_a_note_left() {
        let notes = Notes::new().unwrap();
        notes.leave(Note::Answer(1));
        assert!(!is_woken(&notes), "it looks before it rests");
        assert!(!notes.rest());
        let mut taken = Vec::new();
        notes.take(&mut taken);
        assert!(matches!(taken[..], [Note::Answer(1)]));
        taken.clear();
        assert!(notes.rest());
        notes.leave(Note::Answer(2));
        notes.leave(Note::Answer(3));
        assert!(is_woken(&notes));
        assert!(!is_woken(&notes), "once");
        notes.take(&mut taken);
        assert!(matches!(taken[..], [Note::Answer(2), Note::Answer(3)]));
    }
}
