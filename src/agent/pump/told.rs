//! What the pump tells the listener: messages become facts, and the end of a turn waits for the transcript.
//!
//! Rule a change could break: facts reach the listener in the order of the messages, whatever waits.

use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use super::{Ladder, Pump};
use crate::agent::adapt::{Fate, adapt};
use crate::agent::turns::Step;
use crate::agent::wire::AgentMessage;
use crate::agent::{RunFact, TurnEnd, content};

/// How long the end of a turn waits for the transcript.
pub(super) const GATE_LIMIT: Duration = Duration::from_secs(5);
/// Time-outs of the gate after which a run waits no more.
const GATE_TIMEOUTS_MAX: u32 = 2;
/// Between two looks at the transcript, at first and after [`GATE_EAGER`]: the lags seen are 0 to 100 ms.
const GATE_STEP: Duration = Duration::from_millis(2);
const GATE_STEP_LATE: Duration = Duration::from_millis(20);
const GATE_EAGER: Duration = Duration::from_millis(200);
/// Kinds of unknown messages that are counted by name.
const UNKNOWN_KINDS_MAX: usize = 64;

/// The end of a turn that waits for the transcript.
pub(super) struct Gate {
    end: TurnEnd,
    since: Instant,
    /// The next look.
    pub(super) next: Instant,
}

impl Pump {
    /// Takes one message.
    pub(super) fn hear(&mut self, message: AgentMessage) {
        self.shared.heard();
        let steps = self.tracker.hear(&message);
        if self.tracker.spoke() && !std::mem::replace(&mut self.spoke_told, true) {
            self.emit(RunFact::Spoke);
        }
        if let AgentMessage::Init { version: Some(version), .. } = &message
            && self.version.as_ref() != Some(version)
        {
            self.version = Some(version.clone());
            self.emit(RunFact::Version(version.clone()));
        }
        for step in steps {
            match step {
                Step::AgentTurnBegan(turn) => self.emit(RunFact::AgentTurnBegan { turn }),
                Step::SessionId { id, cleared } => self.emit(RunFact::SessionId { id, cleared }),
                Step::Ended(end) => {
                    self.interrupt_due = None;
                    self.emit(RunFact::TurnEnded(end));
                }
                Step::AskInterruptAgain => self.ask_interrupt(),
                Step::StartRefused(errors) => {
                    self.errors = errors;
                    self.close();
                }
            }
        }
        if let AgentMessage::ControlRequest { request_id, subtype, tool_name, input } = &message {
            self.answer(request_id, subtype, tool_name.as_deref(), input.as_deref());
        }
        match adapt(message) {
            Fate::Show(msg) => match self.tracker.current().cloned() {
                Some(turn) => self.emit(RunFact::Frame { turn, msg }),
                None => log::debug!("{}: a message outside any turn", self.spec.run),
            },
            Fate::Task(task) => self.emit(RunFact::Task(task)),
            Fate::Unknown(kind) => self.count_unknown(&kind),
            Fate::Unreadable(why) => {
                log::debug!("{}: a line of stdout is no message: {why}", self.spec.run);
                self.count_unknown("unreadable");
            }
            Fate::Handled | Fate::Skip => {}
        }
    }

    fn answer(&mut self, request_id: &str, subtype: &str, tool_name: Option<&str>, input: Option<&RawValue>) {
        if matches!(self.ladder, Ladder::Open) {
            let line = match subtype {
                "can_use_tool" if self.spec.allow_tools => content::allow_line(request_id, input),
                "can_use_tool" => content::deny_line(request_id, tool_name.unwrap_or("asked for")),
                _ => content::refuse_line(request_id, subtype),
            };
            self.outbox.push(line, false);
        }
    }

    /// Counts what nobody knows, and tells it.
    pub(super) fn count_unknown(&mut self, kind: &str) {
        let known = self.unknown.contains_key(kind) || self.unknown.len() < UNKNOWN_KINDS_MAX;
        let kind = if known { kind } else { "other" };
        let count = self.unknown.entry(kind.to_owned()).or_default();
        *count += 1;
        let count = *count;
        if count == 1 {
            log::warn!("{}: the agent says something unknown: {kind}", self.spec.run);
        }
        self.emit(RunFact::Unknown { kind: kind.to_owned(), count });
    }

    /// Tells a fact now, or after the end of the turn that the gate holds.
    pub(super) fn emit(&mut self, fact: RunFact) {
        self.held.push_back(fact);
        if self.gate.is_none() {
            self.tell_held(Instant::now());
        }
    }

    /// Lets the turn's end pass if its transcript is there or its time is up, and then what waits behind it.
    pub(super) fn look_at_gate(&mut self, now: Instant) {
        if self.gate.as_ref().is_some_and(|gate| gate.next <= now) {
            self.tell_held(now);
        }
    }

    /// A loop, not a recursion: a flood of ends must not cost stack.
    fn tell_held(&mut self, now: Instant) {
        loop {
            if let Some(mut gate) = self.gate.take() {
                if !self.may_pass(&gate, now) {
                    let is_eager = now.saturating_duration_since(gate.since) < GATE_EAGER;
                    gate.next = now + if is_eager { GATE_STEP } else { GATE_STEP_LATE };
                    self.gate = Some(gate);
                    return;
                }
                // Whatever the files say: an agent that told the end has had the turn.
                crate::faults::point("after_result_before_ledger");
                self.listener.fact(self.spec.run, RunFact::TurnEnded(gate.end));
            }
            match self.held.pop_front() {
                Some(RunFact::TurnEnded(end)) => self.gate = Some(Gate { end, since: now, next: now }),
                Some(fact) => self.listener.fact(self.spec.run, fact),
                None => return,
            }
        }
    }

    fn may_pass(&mut self, gate: &Gate, now: Instant) -> bool {
        // What the agent had already it wrote in an earlier life.
        if gate.end.had_it_already || self.gate_timeouts >= GATE_TIMEOUTS_MAX {
            return true;
        }
        // Asked also of an agent that is gone, which writes no more.
        if self.listener.is_durable(self.spec.run, &gate.end) || self.exit.is_some() {
            return true;
        }
        if now.saturating_duration_since(gate.since) < GATE_LIMIT {
            return false;
        }
        self.gate_timeouts += 1;
        log::warn!("{}: the transcript lacks the end of turn {}", self.spec.run, gate.end.turn);
        true
    }
}
