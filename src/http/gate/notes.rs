//! What other threads tell the gate: a short list and a wake fd. Rule a change could break: telling never blocks on
//! the gate, and a note is never lost.

use std::sync::Arc;
use std::time::Instant;

use rustix::event::EventfdFlags;
use rustix::fd::OwnedFd;

use crate::error::Result;
use crate::sync::Mutex;

/// A note.
#[derive(Debug)]
pub enum Note {
    /// The worker on this upstream could not give the body it promised: nothing more will come.
    Torn(u64),
    /// The token was changed.
    Token(crate::http::guard::Token),
    /// Finish what is in flight, until then, and end.
    Shutdown(Instant),
}

/// The list.
#[derive(Debug)]
pub struct Notes {
    list: Mutex<Vec<Note>>,
    event: OwnedFd,
}

impl Notes {
    /// An empty list.
    ///
    /// # Errors
    /// When the kernel has no descriptor to give.
    pub fn new() -> Result<Arc<Self>> {
        let event =
            rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        Ok(Arc::new(Self { list: Mutex::new(Vec::new()), event }))
    }

    /// Leaves a note and wakes the gate.
    pub fn leave(&self, note: Note) {
        self.list.lock().push(note);
        // The only error of a full counter is EAGAIN, and then the gate has not read the earlier wake-up yet.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Takes every note.
    pub fn take(&self) -> Vec<Note> {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8][..]);
        std::mem::take(&mut *self.list.lock())
    }

    /// What to wait on.
    #[must_use]
    pub fn event(&self) -> &OwnedFd {
        &self.event
    }
}
