//! The end of the server: turns in flight get time to finish, then runs are closed, then ended by force.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Registry;
use crate::lifecycle::PhaseKind;
use crate::lifecycle::machine::Fact;
use crate::session::engine::Session;

impl Registry {
    /// Begins nothing more; lets turns in flight finish for `drain`, then closes every run, then ends them. True if all
    /// runs were reaped. `hurry` cuts the first wait short.
    #[must_use]
    pub fn shut_down(&self, drain: Duration, hurry: &dyn Fn() -> bool, last_limit: Duration) -> bool {
        let all: Vec<_> = {
            let mut map = self.sessions.lock();
            map.draining = true;
            map.by_id.values().cloned().collect()
        };
        for session in &all {
            session.apply_reserved(Fact::Drain);
        }
        let deadline = Instant::now() + drain;
        while !hurry() && Instant::now() < deadline && all.iter().any(|s| s.state().machine.is_busy()) {
            let busy = all.iter().find(|s| s.state().machine.is_busy());
            if let Some(busy) = busy {
                // Wakes at every change of that session; the slice bounds how late a second signal is seen.
                let slice = deadline.min(Instant::now() + Duration::from_millis(50));
                let _ = busy.wait_for_idle(slice);
            }
        }
        for session in &all {
            let run = {
                let state = session.state();
                state.machine.phase().run().or(state.starting.as_ref()).cloned()
            };
            if let Some(run) = run {
                session.apply_reserved(Fact::Restart);
                run.close();
            }
        }
        // A start that waits for its hook goes on to see that its run is closed.
        self.context.hooks.cancel();
        let last = Instant::now() + last_limit;
        let gone = wait_until_idle(&all, last.checked_sub(Duration::from_secs(1)).unwrap_or(last));
        let gone = gone || {
            for session in &all {
                let run = session.state().machine.phase().run().cloned();
                if let Some(run) = run {
                    run.kill_now();
                }
            }
            wait_until_idle(&all, last)
        };
        self.look_ups.lock().take();
        self.clock.lock().going_down = true;
        self.clock_changed.notify_all();
        for thread in self.threads.lock().drain(..) {
            if !thread.join_within(Duration::from_millis(500)) {
                log::warn!("thread {} did not end in time", thread.name());
            }
        }
        gone
    }
}

fn wait_until_idle(all: &[Arc<Session>], deadline: Instant) -> bool {
    all.iter().all(|session| {
        let mut state = session.state();
        while state.machine.phase().kind() != PhaseKind::Idle {
            if state.wait_until(session.changed(), deadline) {
                return state.machine.phase().kind() == PhaseKind::Idle;
            }
        }
        true
    })
}
