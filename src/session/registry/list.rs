//! The list of conversations, newest first, and the one that a page without a wish opens. Rows come from the journal and
//! from the transcripts in the agent's home, which may hold conversations that the server never saw.

use std::collections::HashMap;

use super::Registry;
use crate::clock::{self, UnixMs};
use crate::ids::SessionId;
use crate::session::engine::Kind;

/// One row of the list.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// Its id.
    pub session_id: SessionId,
    /// First real words of a person, if any.
    pub label: Option<String>,
    /// RFC 3339.
    pub last_used_at: String,
    /// A run is open for turns.
    pub running: bool,
    /// A start or turn is under way.
    pub busy: bool,
    /// Messages that wait.
    pub queued: usize,
}

impl Registry {
    /// The conversation a page without a wish opens: busy before running before the last used.
    #[must_use]
    pub fn most_active(&self) -> Option<SessionId> {
        let best = {
            let map = self.sessions.lock();
            map.by_id
                .values()
                .filter(|s| s.kind == Kind::Chat)
                .filter_map(|s| {
                    let state = s.state();
                    let known = map.known.contains_key(&state.id) || state.resumable;
                    let rank = (state.machine.is_busy(), state.machine.phase().is_running(), state.last_used_ms);
                    known.then(|| (rank, state.id.clone()))
                })
                .max()
        };
        let best = best.filter(|(rank, _)| rank.0 || rank.1).map(|(_, id)| id);
        best.or_else(|| self.main().filter(|id| self.is_known(id)))
            .or_else(|| self.list(1).into_iter().next().map(|row| row.session_id))
    }

    /// Conversations, newest first; those that only lie in the agent's home among them.
    #[must_use]
    pub fn list(&self, rows_max: usize) -> Vec<Listed> {
        let mut rows: HashMap<SessionId, Listed> = HashMap::new();
        let on_disk = self.context.archive.list(rows_max);
        let map = self.sessions.lock();
        crate::faults::point("sessions_locked");
        for file in on_disk {
            let canonical = Self::canonical(&map, &file.session);
            rows.insert(canonical.clone(), listed(canonical, file.label, file.last_used_ms));
        }
        for row in map.known.values().filter(|r| r.thread.is_none()) {
            let entry =
                rows.entry(row.session.clone()).or_insert_with(|| listed(row.session.clone(), None, row.last_used_ms));
            // First words of the transcript before first words sent through us: it may be older than the server.
            if entry.label.is_none() {
                entry.label.clone_from(&row.label);
            }
            let at = clock::rfc3339(row.last_used_ms);
            if at > entry.last_used_at {
                entry.last_used_at = at;
            }
        }
        for row in map.known.values().filter(|r| r.thread.is_some()) {
            rows.remove(&row.session);
        }
        for session in map.by_id.values() {
            let state = session.state();
            if let Some(row) = rows.get_mut(&state.id) {
                row.running = state.machine.phase().is_running() && !state.machine.is_closing();
                row.busy = state.machine.is_busy();
                row.queued = state.machine.queued();
            }
        }
        drop(map);
        let mut rows: Vec<_> = rows.into_values().collect();
        rows.sort_by(|a, b| b.last_used_at.cmp(&a.last_used_at).then_with(|| a.session_id.cmp(&b.session_id)));
        rows.truncate(rows_max);
        rows
    }
}

fn listed(session_id: SessionId, label: Option<String>, last_used_ms: UnixMs) -> Listed {
    Listed { session_id, label, last_used_at: clock::rfc3339(last_used_ms), running: false, busy: false, queued: 0 }
}
