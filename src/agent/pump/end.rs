//! How a run ends: stdin end, SIGTERM, SIGKILL, each after its grace; the exit; the report from `Drop`.
//!
//! Rule a change could break: from the first step on nothing is written to the agent, and [`RunListener::ended`] comes
//! after it is reaped, on every path.
//!
//! [`RunListener::ended`]: crate::agent::RunListener::ended

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{INTERRUPT_LIMIT, Pump, read_line};
use crate::agent::command::{exit_words, explain_early_end, is_in_use, is_refusal};
use crate::agent::leftovers::end_wrapped;
use crate::agent::{RunEnd, RunFact};
use crate::threads::{Doing, doing};

/// From the end of stdin to SIGTERM.
pub(super) const STDIN_GRACE: Duration = Duration::from_secs(2);
/// From SIGTERM to SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(5);
/// How long stdout may stay open after the agent ended, because a process of its own holds it.
const ORPHAN_GRACE: Duration = Duration::from_millis(300);

/// How far the agent's end has been asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ladder {
    /// It may live.
    Open,
    /// stdin ended; SIGTERM is due.
    StdinEnded(Instant),
    /// SIGTERM sent; SIGKILL is due.
    Terminated(Instant),
    /// SIGKILL sent: the kernel's turn.
    Killed,
}

impl Pump {
    /// Nothing more is written; the agent has its graces.
    pub(super) fn close(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        if matches!(self.ladder, Ladder::Open) {
            self.hold_tools();
            self.end_stdin();
            self.ladder = Ladder::StdinEnded(Instant::now() + STDIN_GRACE);
            if crate::faults::planted("run_ended_before_reap") && self.exit.is_none() {
                self.tell_end();
            }
        }
    }

    /// Nothing more is written, and no grace is given.
    pub(super) fn kill(&mut self) {
        if !matches!(self.ladder, Ladder::Killed) {
            self.ladder = Ladder::Killed;
            if let (Some(agent), None) = (&self.agent, &self.exit) {
                agent.kill();
            }
        }
        // After the signal: an end of stdin is a wish to end in good order, and the agent might be quick.
        self.end_stdin();
    }

    /// Whom the agent started for the turn under way: when it is gone, nobody could find them any more.
    fn hold_tools(&mut self) {
        if let (Some(agent), None, true) = (&self.agent, &self.exit, self.tracker.is_busy()) {
            self.tools.add(agent.tools());
        }
    }

    fn end_stdin(&mut self) {
        self.outbox.clear();
        self.due.clear();
        if let Some(agent) = &mut self.agent {
            agent.stdin = None;
        }
    }

    /// Does what is due by now.
    pub(super) fn keep_timers(&mut self) {
        let now = Instant::now();
        match self.ladder {
            Ladder::StdinEnded(due) if due <= now && self.exit.is_none() => {
                self.hold_tools();
                if let Some(agent) = &self.agent {
                    agent.terminate();
                }
                self.ladder = Ladder::Terminated(now + TERM_GRACE);
            }
            Ladder::Terminated(due) if due <= now && self.exit.is_none() => {
                log::warn!("{}: the agent ignores SIGTERM, killing it", self.spec.run);
                self.kill();
            }
            Ladder::Open | Ladder::StdinEnded(_) | Ladder::Terminated(_) | Ladder::Killed => {}
        }
        if self.interrupt_due.is_some_and(|due| due <= now) {
            self.interrupt_due = None;
            log::warn!("{}: no end of the turn within {} s of the interrupt", self.spec.run, INTERRUPT_LIMIT.as_secs());
            self.listener.fact(self.spec.run, RunFact::InterruptTimedOut);
        }
        self.look_at_gate(now);
        if self.drain_until.is_some_and(|until| until <= now) {
            self.end_wrapped_agents();
            self.stop_reading();
        }
    }

    /// Who holds stdout may be the agent itself, started by a wrapper that is gone; it must not meet the next run's.
    fn end_wrapped_agents(&self) {
        let _at = doing(Doing::Reap);
        end_wrapped(&self.spec.mark, &self.spec.session);
    }

    /// stdout is at its end, or what holds it open has had its grace.
    pub(super) fn stop_reading(&mut self) {
        self.drain_until = None;
        if let Some(agent) = &mut self.agent
            && agent.stdout.take().is_none()
        {
            return;
        }
        let mut last = None;
        self.lines.finish(|line| last = read_line(line));
        if let Some(message) = last {
            self.hear(message);
        }
    }

    /// Reaps the agent if it ended.
    pub(super) fn see_exit(&mut self) {
        if self.exit.is_some() {
            return;
        }
        let Some(agent) = &mut self.agent else { return };
        let Some(status) = agent.try_wait() else {
            return;
        };
        self.exit = Some(status);
        // It had its chance to end them itself.
        std::mem::take(&mut self.tools).kill();
        self.shared.pid.store(0, Ordering::Release);
        self.close();
        if self.agent.as_ref().is_some_and(|agent| agent.stdout.is_some()) {
            self.drain_until = Some(Instant::now() + ORPHAN_GRACE);
        }
    }

    /// The report of the end.
    fn tell_end(&mut self) {
        let asked = self.shared.asked.load(Ordering::Acquire);
        let exit = match (&self.agent, self.exit) {
            (Some(_), Some(status)) => exit_words(status),
            (Some(_), None) => "ended".to_owned(),
            (None, _) => "not started".to_owned(),
        };
        let stderr_tail = self.error_text.tail();
        let spoke = self.tracker.spoke();
        let mut start_error = self.start_error.take();
        if start_error.is_none() && !spoke && !asked && self.agent.is_some() {
            start_error = Some(explain_early_end(&exit, &stderr_tail, &self.errors));
        }
        if self.exit.is_some() {
            // The descriptors go first: whoever hears of the end may count them.
            self.agent = None;
        }
        let says_no = !spoke && !asked;
        let has_conversation = says_no && is_in_use(&stderr_tail, &self.errors);
        let refused = says_no && is_refusal(&stderr_tail, &self.errors);
        let end = RunEnd {
            run: self.spec.run,
            spoke,
            refused,
            has_conversation,
            start_error,
            asked,
            exit,
            stderr_tail,
            errors: std::mem::take(&mut self.errors),
        };
        // A panic while unwinding would abort the process.
        let listener = &self.listener;
        if catch_unwind(AssertUnwindSafe(|| listener.ended(end))).is_err() {
            log::error!("{}: the listener of a run's end panicked", self.spec.run);
        }
    }

    /// The last words of stderr, which may have come with the exit.
    pub(super) fn lines_end(&mut self) {
        self.read_stderr();
        let run = self.spec.run;
        self.error_text.finish(|line| log::info!(target: "agent", "{run}: {line}"));
    }
}

impl Drop for Pump {
    /// Reaps the agent, by force if it still lives, and tells the end: also when the thread panics.
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        if let (Some(agent), None) = (&mut self.agent, self.exit) {
            let _at = doing(Doing::Reap);
            agent.kill();
            self.exit = agent.wait();
        }
        self.shared.pid.store(0, Ordering::Release);
        self.tell_end();
    }
}
