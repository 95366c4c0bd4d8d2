//! PURE. What a person asks of a session: stop, park (a thread's run), restart, interrupt, in every phase.

use super::{Did, Effect, EndHow, Machine, RunRef, Step};
use crate::lifecycle::{InvariantError, Phase};

impl<R: RunRef> Machine<R> {
    pub(super) fn mark_stopped(&mut self, out: &mut Vec<Effect<R>>) {
        if let Some(flight) = &mut self.turn
            && !std::mem::replace(&mut flight.stopped, true)
        {
            out.push(Effect::MarkStopped(flight.turn.clone()));
        }
    }

    /// Clears what is recorded and not dispatched; true if there was anything.
    pub(super) fn clear_queue(&mut self, out: &mut Vec<Effect<R>>) -> bool {
        let mut any = false;
        if let Some(flight) = self.turn.take_if(|t| t.step != Step::Sent) {
            any = true;
            out.push(Effect::End { turn: flight.turn, members: flight.members, how: EndHow::Cleared });
        }
        if let Some(owed) = &mut self.owed {
            any = true;
            if !std::mem::replace(&mut owed.stopped, true) {
                out.push(Effect::MarkStopped(owed.turn.clone()));
            }
        }
        if let Some(owed) = self.owed.take_if(|o| !o.unsure) {
            out.push(Effect::Cleared(owed.members));
        }
        let cleared = self.inbox.clear_recorded();
        if !cleared.is_empty() {
            any = true;
            out.push(Effect::Cleared(cleared));
        }
        any
    }

    pub(super) fn close_for_stop(&mut self, run: R, out: &mut Vec<Effect<R>>) -> Result<(), InvariantError> {
        let was_busy = self.phase().is_busy();
        self.lifecycle.move_to(Phase::Stopping { run: run.clone(), was_busy })?;
        self.closing = true;
        out.push(Effect::Close(run));
        Ok(())
    }

    pub(super) fn stop(&mut self, out: &mut Vec<Effect<R>>) -> Result<Did, InvariantError> {
        let cleared = self.clear_queue(out);
        let did = match self.phase().clone() {
            Phase::Idle => {
                let waited = std::mem::take(&mut self.slot_wanted);
                if waited {
                    out.push(Effect::SlotFree);
                }
                cleared || waited
            }
            Phase::Starting => {
                self.stop_remembered = true;
                true
            }
            Phase::Ready { run } | Phase::Streaming { run } => {
                self.mark_stopped(out);
                self.close_for_stop(run, out)?;
                true
            }
            Phase::Stopping { .. } => cleared,
        };
        out.push(Effect::Changed);
        // What is behind a place under way may have become the front.
        self.advance(out)?;
        Ok(if did { Did::Stopped } else { Did::Nothing })
    }

    pub(super) fn park(&mut self, out: &mut Vec<Effect<R>>) -> Result<Did, InvariantError> {
        match self.phase().clone() {
            Phase::Ready { run } | Phase::Streaming { run } => {
                let cleared = self.clear_queue(out);
                self.mark_stopped(out);
                let closes = !std::mem::replace(&mut self.closing, true);
                if closes {
                    out.push(Effect::Close(run));
                }
                out.push(Effect::Changed);
                Ok(if closes || cleared { Did::Stopped } else { Did::Nothing })
            }
            Phase::Starting => {
                self.clear_queue(out);
                self.park_remembered = true;
                out.push(Effect::Changed);
                Ok(Did::Stopped)
            }
            Phase::Idle | Phase::Stopping { .. } => self.stop(out),
        }
    }

    pub(super) fn restart(&mut self, out: &mut Vec<Effect<R>>) -> Result<Did, InvariantError> {
        Ok(match self.phase().clone() {
            Phase::Ready { run } | Phase::Streaming { run } => {
                if !std::mem::replace(&mut self.closing, true) {
                    out.push(Effect::Close(run));
                }
                out.push(Effect::Changed);
                Did::Restarted
            }
            Phase::Idle => {
                let waited = self.has_work();
                self.halted = false;
                self.paused = false;
                self.start_failures = 0;
                self.advance(out)?;
                if waited { Did::Restarted } else { Did::Nothing }
            }
            // A fresh run is on its way, or comes when the old one is gone.
            Phase::Starting | Phase::Stopping { .. } => Did::Nothing,
        })
    }

    pub(super) fn interrupt(&mut self, out: &mut Vec<Effect<R>>) -> Did {
        match self.phase().clone() {
            Phase::Starting => {
                self.interrupt_remembered = true;
                Did::Asked
            }
            Phase::Streaming { run } if !self.closing => {
                if let Some(flight) = self.turn.as_mut().filter(|t| t.step != Step::Sent) {
                    flight.interrupt_after_send = true;
                } else {
                    self.mark_stopped(out);
                }
                out.push(Effect::AskInterrupt(run));
                Did::Asked
            }
            Phase::Ready { .. } if !self.closing => match &mut self.turn {
                Some(flight) => {
                    flight.interrupt_after_send = true;
                    Did::Asked
                }
                None => Did::Nothing,
            },
            Phase::Idle | Phase::Ready { .. } | Phase::Streaming { .. } | Phase::Stopping { .. } => Did::Nothing,
        }
    }
}
