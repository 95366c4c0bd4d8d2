//! What a dead server left behind: agents that still run. Leaves killing to `agent::leftovers`, owed turns to `registry`.
//! Rule a change could break: every old agent of the box is gone before a transcript is searched for an owed turn or a
//! conversation is resumed.

use crate::agent::BoxMark;
use crate::ids::SessionId;
use crate::sync::{Condvar, Mutex};

/// Agents of an older server, until they are swept out.
pub struct Leftovers {
    known: Vec<(SessionId, u32, u64)>,
    swept: Mutex<bool>,
    done: Condvar,
}

impl Leftovers {
    /// Session, pid and start time, as the journal recorded them.
    #[must_use]
    pub fn new(known: Vec<(SessionId, u32, u64)>) -> Self {
        Self { known, swept: Mutex::new(false), done: Condvar::new() }
    }

    /// Ends what an older server left running in this box, recorded or not; returns the sessions of recorded ones. Once,
    /// before anything else is resumed. Takes some 7 s for each agent that ignores SIGTERM.
    pub fn sweep(&self, mark: &BoxMark) -> Vec<SessionId> {
        let known: Vec<_> = self.known.iter().map(|(_, pid, start_time)| (*pid, *start_time)).collect();
        let ended = crate::agent::end_leftovers(mark, &known);
        if ended > 0 {
            log::warn!("ended {ended} agent(s) that an older server left running");
        }
        *self.swept.lock() = true;
        self.done.notify_all();
        self.known.iter().map(|(session, _, _)| session.clone()).collect()
    }

    /// Waits until the sweep is over.
    pub fn wait_until_swept(&self) {
        let mut swept = self.swept.lock();
        while !*swept {
            self.done.wait(&mut swept);
        }
    }
}
