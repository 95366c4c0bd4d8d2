//! The thread `sweep`: pauses that are over, phases that should have been left, idle runs, frames to forget, and the
//! supervisor's watchdog. It wakes at named times only.

use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Registry;
use crate::clock::UnixMs;
use crate::lifecycle::PhaseKind;
use crate::lifecycle::machine::Fact;
use crate::session::engine::Session;
use crate::threads::{Doing, doing};

/// What the sweep thread waits for.
struct Timer {
    at: Instant,
    session: Weak<Session>,
    what: Due,
}

#[derive(Debug, Clone, Copy)]
enum Due {
    /// A pause of the session is over.
    Retry,
    /// The frames of its turn were kept long enough.
    Forget,
    /// The session should have left this phase, entered then.
    Left(PhaseKind, UnixMs),
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Timer {}
impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap gives its greatest first: the earliest timer.
        other.at.cmp(&self.at)
    }
}

#[derive(Default)]
pub(super) struct Clock {
    timers: BinaryHeap<Timer>,
    pub(super) going_down: bool,
}

impl Registry {
    /// Reports [`Fact::RetryDue`] to the session after `ms` milliseconds.
    pub fn retry_in(&self, session: &Arc<Session>, ms: u64) {
        self.at(session, Duration::from_millis(ms), Due::Retry);
    }

    /// Has the frames of a turn that just ended forgotten in time.
    pub fn forget_frames_later(&self, session: &Arc<Session>) {
        self.at(session, crate::session::turns::KEPT_AFTER_END, Due::Forget);
    }

    /// Has a dump logged if the session is still in the phase it entered at `since_ms` when `stuck-s` is over.
    pub fn watch_phase(&self, session: &Arc<Session>, kind: PhaseKind, since_ms: UnixMs) {
        self.at(session, Duration::from_secs(self.context.config.stuck_s), Due::Left(kind, since_ms));
    }

    fn at(&self, session: &Arc<Session>, after: Duration, what: Due) {
        let at = Instant::now() + after;
        let mut clock = self.clock.lock();
        let is_next = clock.timers.peek().is_none_or(|next| at < next.at);
        clock.timers.push(Timer { at, session: Arc::downgrade(session), what });
        drop(clock);
        if is_next {
            self.clock_changed.notify_all();
        }
    }
}

fn tell_if_stuck(session: &Session, kind: PhaseKind, since_ms: UnixMs) {
    let id = {
        let state = session.state();
        if state.machine.phase().kind() != kind || state.since_ms != since_ms {
            return;
        }
        state.id.clone()
    };
    let s = session.context.config.stuck_s;
    crate::dump::alarm(&format!("session {id} has been {} for more than {s} s", kind.word()));
}

/// Body of the thread `sweep`. Wakes at named times only: a pause that is over, a phase that should be left, the next
/// session to close, frames to forget, and half the supervisor's watchdog time if it has one.
pub(super) fn sweep(registry: &Weak<Registry>) {
    let watchdog = crate::supervisor::watchdog_interval();
    loop {
        let Some(registry) = registry.upgrade() else { return };
        let now = Instant::now();
        // Takes every lock a request takes: who comes by here serves.
        let mut idle_next = now + registry.close_idle();
        registry.context.turns.forget_ended();
        if let Some(every) = watchdog {
            crate::supervisor::notify("WATCHDOG=1");
            idle_next = idle_next.min(now + every);
        }
        let mut due = Vec::new();
        {
            let mut clock = registry.clock.lock();
            let now = Instant::now();
            while clock.timers.peek().is_some_and(|t| t.at <= now) {
                due.extend(clock.timers.pop().and_then(|t| Some((t.session.upgrade()?, t.what))));
            }
            if clock.going_down {
                return;
            }
            if due.is_empty() {
                let next = clock.timers.peek().map_or(idle_next, |t| t.at.min(idle_next));
                let _at = doing(Doing::WaitTime);
                registry.clock_changed.wait_until(&mut clock, next);
            }
        }
        for (session, what) in due {
            match what {
                Due::Retry => {
                    session.apply(Fact::RetryDue);
                }
                Due::Left(kind, since_ms) => tell_if_stuck(&session, kind, since_ms),
                // The next round does it.
                Due::Forget => {}
            }
        }
    }
}
