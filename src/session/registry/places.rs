//! Live places: at most so many agents live at once, lent to the oldest waiting message; a session that nobody uses is
//! closed to make room, or after a while without a turn. Invariant: who holds or wants a place is read from the machines
//! under both locks, never kept beside them, so the order in which news arrives does not matter.

use std::sync::Arc;
use std::time::Duration;

use super::{Map, Registry};
use crate::clock::{self, UnixMs};
use crate::lifecycle::machine::Fact;
use crate::session::engine::{Pending, Session};

impl Registry {
    /// Brings the lists of live and waiting conversations in line with this one's machine, then lends what is free.
    pub fn reconcile(&self, session: &Arc<Session>) {
        {
            let mut map = self.sessions.lock();
            let state = session.state();
            let (holds, wants) = (state.machine.holds_slot(), state.machine.wants_slot());
            drop(state);
            map.live.retain(|s| !Arc::ptr_eq(s, session));
            if holds {
                map.live.push(session.clone());
            }
            let waits = map.waiting.iter().any(|s| Arc::ptr_eq(s, session));
            if wants && !waits {
                map.waiting.push_back(session.clone());
            } else if !wants && waits {
                map.waiting.retain(|s| !Arc::ptr_eq(s, session));
            }
        }
        self.lend();
    }

    /// Lends free places to the oldest waiting message; makes room by closing what nobody uses.
    fn lend(&self) {
        // Each round lends a place or asks one session to go; both are bounded by the number of sessions.
        loop {
            let Some((session, pending)) = self.lend_one() else { return };
            session.run(pending);
        }
    }

    /// One decision, in one critical section; the effects are carried out by the caller after unlock.
    fn lend_one(&self) -> Option<(Arc<Session>, Pending)> {
        let mut map = self.sessions.lock();
        if map.draining {
            return None;
        }
        // The pool's one run is beside the cap.
        for (is_thread, cap) in [(true, 1), (false, self.context.config.live_max)] {
            let Some(at) = map.waiting.iter().position(|s| s.is_thread() == is_thread) else { continue };
            if map.live.iter().filter(|s| s.is_thread() == is_thread).count() < cap {
                return self.grant(&mut map, at);
            }
            // One that is going makes room already.
            let mut of_kind = map.live.iter().filter(|s| s.is_thread() == is_thread);
            if of_kind.any(|s| s.state().machine.is_closing()) {
                continue;
            }
            if let Some(evicted) = self.evict_one(&map, is_thread) {
                return Some(evicted);
            }
        }
        None
    }

    fn grant(&self, map: &mut Map, at: usize) -> Option<(Arc<Session>, Pending)> {
        let session = map.waiting.remove(at)?;
        let run = self.context.next_run();
        let mut state = session.state();
        let (pending, _) = session.apply_locked(&mut state, Fact::SlotGranted(run), None);
        let holds = state.machine.holds_slot();
        drop(state);
        if holds {
            map.live.push(session.clone());
        }
        Some((session, pending))
    }

    fn evict_one(&self, map: &Map, is_thread: bool) -> Option<(Arc<Session>, Pending)> {
        let mut candidates: Vec<(UnixMs, &Arc<Session>)> = map
            .live
            .iter()
            .filter(|s| s.is_thread() == is_thread)
            .filter_map(|s| {
                let state = s.state();
                state.may_be_closed().then_some((state.last_used_ms, s))
            })
            .collect();
        candidates.sort_by_key(|(used, _)| *used);
        let session = candidates.first().map(|(_, s)| (*s).clone())?;
        let mut state = session.state();
        // Looked at again: between two takings of its lock a message may have come. Then the end of that turn asks anew.
        if !state.may_be_closed() {
            return None;
        }
        log::info!("session {}: closed to make room", state.id);
        let (pending, _) = session.apply_locked(&mut state, session.way_to_close(), None);
        drop(state);
        Some((session, pending))
    }

    /// Closes runs that nobody used for `idle-close-s`; returns when the next may be due.
    pub(super) fn close_idle(&self) -> Duration {
        let limit_ms = i64::try_from(self.context.config.idle_close_s.saturating_mul(1000)).unwrap_or(i64::MAX);
        let now = clock::now_ms();
        let mut next_ms = limit_ms;
        let mut todo = Vec::new();
        {
            let map = self.sessions.lock();
            for session in &map.live {
                let mut state = session.state();
                if !state.may_be_closed() {
                    continue;
                }
                let idle_since = state.since_ms.max(state.last_used_ms);
                let left = idle_since.saturating_add(limit_ms) - now;
                if left <= 0 {
                    log::info!("session {}: closed after {} s without a turn", state.id, limit_ms / 1000);
                    let (pending, _) = session.apply_locked(&mut state, session.way_to_close(), None);
                    drop(state);
                    todo.push((session.clone(), pending));
                } else {
                    next_ms = next_ms.min(left);
                }
            }
        }
        for (session, pending) in todo {
            session.run(pending);
        }
        Duration::from_millis(u64::try_from(next_ms).unwrap_or(1).max(1))
    }
}
