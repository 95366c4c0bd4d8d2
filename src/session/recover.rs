//! What a dead server left behind: agents that still run, turns whose fate only the transcript knows.
//! Leaves killing to `agent::command`, reading to `archive`. Rule a change could break: an old agent is gone before its
//! session's transcript is searched or its conversation resumed.

use std::collections::HashMap;
use std::path::Path;

use crate::ids::SessionId;
use crate::sync::Mutex;

/// Value of the environment mark of an agent: box and session, so that a crash before the record still leaves a trace.
#[must_use]
pub fn mark(box_dir: &Path, session: &SessionId) -> String {
    format!("{}#{session}", box_dir.display())
}

/// Agents that the journal knew as running when the server started, by session: pid and start time.
#[derive(Default)]
pub struct Leftovers {
    known: Mutex<HashMap<SessionId, (u32, u64)>>,
    /// No agent of an older server can be left for these.
    clean: Mutex<std::collections::HashSet<SessionId>>,
}

impl Leftovers {
    /// As the journal recorded them.
    #[must_use]
    pub fn new(agents: Vec<(SessionId, u32, u64)>) -> Self {
        Self {
            known: Mutex::new(agents.into_iter().map(|(s, pid, start)| (s, (pid, start))).collect()),
            clean: Mutex::default(),
        }
    }

    /// Sessions with a recorded agent.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionId> {
        self.known.lock().keys().cloned().collect()
    }

    /// Ends what an older server left running of this session; waits until it is gone, within the limits of `agent`.
    /// Looks at /proc once for each session in the life of a server: later agents are our own children.
    pub fn end(&self, box_dir: &Path, session: &SessionId) {
        if self.clean.lock().contains(session) {
            return;
        }
        let known = self.known.lock().remove(session);
        let ended = crate::agent::command::end_leftovers(&mark(box_dir, session), known);
        if ended > 0 {
            log::warn!("session {session}: ended {ended} agent(s) that an older server left running");
        }
        self.clean.lock().insert(session.clone());
    }
}
