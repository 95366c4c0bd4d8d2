//! Ids that change: an agent may answer under another id than it was started with, or begin a new conversation by
//! `/clear`. Invariant: one id leads to one conversation, and both ids of one lead to the same.

use std::sync::Arc;

use serde_json::json;

use super::{Map, Registry, row_of};
use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::journal::{Change, KeptEvent, Unit};
use crate::session::engine::Session;

impl Registry {
    /// True if the id belongs to another conversation than `session`, called `mine` now. An object that somebody's look
    /// at a file left, and nobody uses, is none.
    fn is_taken(map: &Map, session: &Arc<Session>, mine: &SessionId, id: &SessionId) -> bool {
        let other = map.by_id.get(id).filter(|other| !Arc::ptr_eq(other, session));
        let is_used = other.is_some_and(|other| {
            let state = other.state();
            other.is_thread() || state.pins > 0 || state.machine.holds_slot() || !state.machine.is_settled()
        });
        let is_alias_of_another = map.aliases.contains_key(id) && Self::canonical(map, id) != *mine;
        is_used || is_alias_of_another || map.known.contains_key(id)
    }

    /// A conversation got another id from its agent: both lead to it from now on. After a reset of the conversation
    /// (`cleared`) the old id stays a conversation of its own.
    ///
    /// # Errors
    /// `internal` if the id is another conversation's: both keep their ids, and the agent must go.
    pub fn rename(&self, session: &Arc<Session>, id: &SessionId, cleared: bool) -> Result<()> {
        let was = {
            let mut map = self.sessions.lock();
            // Before the lock of this one: two of a kind are never held at once.
            let mine = session.id();
            if mine == *id {
                return Ok(());
            }
            if Self::is_taken(&map, session, &mine, id) {
                return Err(Error::internal(format!("the agent answers as {id}, which is another conversation")));
            }
            let mut state = session.state();
            let was = std::mem::replace(&mut state.id, id.clone());
            // What was cleared has no transcript under its new id before the agent's first line.
            state.resumable &= !cleared;
            // Nothing is known of the new file yet.
            (state.folder, state.anchor) = (None, None);
            map.by_id.remove(&was);
            map.aliases.remove(id);
            map.by_id.insert(id.clone(), session.clone());
            let row = row_of(&session.kind, &state);
            if cleared {
                state.label = None;
            } else {
                map.aliases.insert(was.clone(), id.clone());
                map.known.remove(&was);
            }
            map.known.insert(id.clone(), row.clone());
            if map.main.as_ref() == Some(&was) {
                map.main = Some(id.clone());
            }
            // Queued inside both locks: what is recorded for the new id comes after this.
            let json = serde_json::to_string(&state.features).unwrap_or_default();
            let mut changes = vec![Change::Session(row), Change::Features { session: id.clone(), json }];
            changes.push(if cleared {
                Change::Move { was: was.clone(), now: id.clone() }
            } else {
                Change::Alias { was: was.clone(), now: id.clone() }
            });
            let event = KeptEvent { event: "chat-session-assigned", data: json!({"sessionId": id, "was": was}) };
            match self.context.journal.reserve(1) {
                Ok(place) => {
                    let unit = Unit { changes, events: vec![event] };
                    self.context.journal.owe(unit, place, Box::new(|_| ()));
                }
                Err(e) => log::error!("session {was}: its new id {id} is not recorded: {e}"),
            }
            was
        };
        self.context.archive.remember(id, None);
        log::info!("session {was} is {id} now");
        self.write_files();
        Ok(())
    }
}
