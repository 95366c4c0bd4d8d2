//! PURE. What one session decides: facts and requests go in, the phase moves and effects come out.
//! Leaves carrying effects out, clocks and locks to `session`. Rule a change could break: a message leaves the machine
//! only through an effect that records where it went (dispatched, done, cleared, failed), and nothing is dispatched to a
//! run from the request to close it until Idle.

mod facts;
mod look_ups;
mod requests;

use std::sync::Arc;

pub use facts::{Did, Effect, EndHow, Fact, FoundTurn, Seen, Unknown};

use super::{InvariantError, Lifecycle, Phase, PhaseKind};
use crate::ids::{MessageUuid, RunNo, TurnId};
use crate::inbox::{Inbox, Message};

/// Starts that may fail in a row before the queue waits for the next send or a restart.
pub const START_ATTEMPTS_MAX: u32 = 5;
/// Deaths of an agent before it recorded a turn: then a merged turn is split and a single message fails.
pub const DEATHS_MAX: u32 = 3;
/// First pause after a failed start; it doubles up to [`BACKOFF_MAX_MS`].
pub const BACKOFF_MIN_MS: u64 = 1_000;
/// Longest pause after a failed start.
pub const BACKOFF_MAX_MS: u64 = 60_000;
/// Pause before a dispatch that could not be recorded is tried again.
pub const DISPATCH_RETRY_MS: u64 = 500;

/// A handle that knows the number of its run.
pub trait RunRef: Clone {
    /// The number; rising over the life of the server.
    fn no(&self) -> RunNo;
}

impl RunRef for RunNo {
    fn no(&self) -> RunNo {
        *self
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// `dispatched` is being recorded.
    Committing,
    /// Recorded, held back because the agent is in a turn of its own.
    Held,
    /// In the agent's hands.
    Sent,
}

#[derive(Debug, Clone)]
struct InFlight {
    turn: TurnId,
    members: Vec<Arc<Message>>,
    step: Step,
    deaths: u32,
    stopped: bool,
    interrupt_after_send: bool,
}

/// A turn as the journal left it, its fate open.
#[derive(Debug, Clone)]
pub struct OwedTurn {
    /// The turn.
    pub turn: TurnId,
    /// Its messages, in order.
    pub members: Vec<Arc<Message>>,
    /// Deaths of an agent before it recorded the turn, so far.
    pub deaths: u32,
    /// A person stopped it.
    pub stopped: bool,
}

/// A turn that was dispatched and whose run is gone.
#[derive(Debug, Clone)]
struct Owed {
    turn: TurnId,
    members: Vec<Arc<Message>>,
    deaths: u32,
    stopped: bool,
    /// The transcript was not asked yet.
    unsure: bool,
    asked: bool,
}

/// The decisions of one session.
#[derive(Debug, Clone)]
pub struct Machine<R> {
    lifecycle: Lifecycle<R>,
    inbox: Inbox,
    turn: Option<InFlight>,
    agent_turn: Option<TurnId>,
    owed: Option<Owed>,
    /// From the request to close the run until Idle.
    closing: bool,
    stop_remembered: bool,
    park_remembered: bool,
    interrupt_remembered: bool,
    starting: Option<RunNo>,
    start_failures: u32,
    slot_wanted: bool,
    paused: bool,
    halted: bool,
    draining: bool,
    /// The queue is a dead server's, and the transcript was not asked for it yet.
    queue: Queue,
}

/// What is known of a queue that a dead server left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    /// It is ours, or was looked up.
    Known,
    /// A message of it may be delivered already.
    Unsure,
    /// The transcript is being searched.
    Asked,
}

impl<R: RunRef> Default for Machine<R> {
    fn default() -> Self {
        Self {
            lifecycle: Lifecycle::default(),
            inbox: Inbox::new(),
            turn: None,
            agent_turn: None,
            owed: None,
            closing: false,
            stop_remembered: false,
            park_remembered: false,
            interrupt_remembered: false,
            starting: None,
            start_failures: 0,
            slot_wanted: false,
            paused: false,
            halted: false,
            draining: false,
            queue: Queue::Known,
        }
    }
}

impl<R: RunRef> Machine<R> {
    /// A session as the journal left it: a turn whose fate is open, and what waits behind it. Idle, whatever it was.
    #[must_use]
    pub fn recovered(owed: Option<OwedTurn>, queue: Vec<Arc<Message>>, alone: &[MessageUuid]) -> Self {
        let owed = owed.map(|o| Owed {
            turn: o.turn,
            members: o.members,
            deaths: o.deaths,
            stopped: o.stopped,
            unsure: true,
            asked: false,
        });
        let asks = if queue.is_empty() { Queue::Known } else { Queue::Unsure };
        let mut machine = Self { owed, queue: asks, ..Self::default() };
        for message in queue {
            let alone = alone.contains(&message.uuid);
            machine.inbox.push_recorded(message, alone);
        }
        machine
    }

    /// The phase.
    pub fn phase(&self) -> &Phase<R> {
        self.lifecycle.phase()
    }

    /// A start, a turn or the preparation of one is under way.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.phase().is_busy() || self.turn.is_some()
    }

    /// From the request to close the run until Idle.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// Recorded messages not yet dispatched.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.inbox.queued() + self.owed.as_ref().map_or(0, |o| if o.unsure { 0 } else { o.members.len() })
    }

    /// The messages that wait for a run, oldest first.
    #[must_use]
    pub fn waiting(&self) -> Vec<MessageUuid> {
        let owed = self.owed.iter().flat_map(|o| o.members.iter());
        let held = self.turn.iter().filter(|t| t.step != Step::Sent).flat_map(|t| t.members.iter());
        owed.chain(held).map(|m| m.uuid.clone()).chain(self.inbox.recorded_uuids()).collect()
    }

    /// The messages themselves that wait for a run and were never given to it, oldest first.
    #[must_use]
    pub fn waiting_messages(&self) -> Vec<Arc<Message>> {
        let owed = self.owed.iter().filter(|o| !o.unsure).flat_map(|o| o.members.iter().cloned());
        owed.chain(self.inbox.recorded_messages()).collect()
    }

    /// The inbox, for its limits.
    pub fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// The turn in flight, ours before the agent's.
    #[must_use]
    pub fn current_turn(&self) -> Option<&TurnId> {
        self.turn.as_ref().map(|t| &t.turn).or(self.agent_turn.as_ref())
    }

    /// The turn is the person's, and a person stopped it.
    #[must_use]
    pub fn is_stopped(&self, turn: &TurnId) -> bool {
        self.turn.as_ref().is_some_and(|t| t.turn == *turn && t.stopped)
    }

    /// Nothing is in flight, being prepared, waiting or owed.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        !self.phase().is_busy()
            && self.inbox.is_empty()
            && self.turn.is_none()
            && self.agent_turn.is_none()
            && self.owed.is_none()
    }

    /// Nothing is under way or owed: the run may be closed to make room.
    #[must_use]
    pub fn is_evictable(&self) -> bool {
        matches!(self.phase(), Phase::Ready { .. }) && !self.closing && self.is_settled()
    }

    /// It waits for a live place.
    #[must_use]
    pub fn wants_slot(&self) -> bool {
        self.slot_wanted
    }

    /// The live place is taken: a run exists or a start is under way.
    #[must_use]
    pub fn holds_slot(&self) -> bool {
        self.phase().kind() != PhaseKind::Idle
    }

    /// Takes the last place in the queue. True if the message leads the next turn as things stand.
    pub fn take_place(&mut self, message: Arc<Message>) -> bool {
        let leads = self.inbox.is_empty() && !self.is_busy() && !self.closing && self.owed.is_none();
        self.inbox.take_place(message);
        leads
    }

    /// Takes a fact in; returns what to carry out, in order, and what a request did.
    pub fn apply(&mut self, fact: Fact<R>) -> (Vec<Effect<R>>, Did) {
        let mut out = Vec::new();
        let did = match self.decide(fact, &mut out) {
            Ok(did) => did,
            Err(bug) => {
                // A bug of ours: this session closes its run and reaches Idle when it is reaped; the queue is kept.
                out.push(Effect::Bug(bug));
                if let Some(run) = self.phase().run().cloned() {
                    self.closing = true;
                    out.push(Effect::Close(run));
                }
                Did::Nothing
            }
        };
        (out, did)
    }

    fn decide(&mut self, fact: Fact<R>, out: &mut Vec<Effect<R>>) -> Result<Did, InvariantError> {
        match fact {
            Fact::Recorded(uuid) => {
                if self.inbox.recorded(&uuid) {
                    // A send wakes a queue that had given up starting.
                    if self.halted {
                        self.halted = false;
                        self.start_failures = 0;
                    }
                    self.advance(out)?;
                    out.push(Effect::Changed);
                }
            }
            Fact::NotRecorded(uuid) => {
                self.inbox.give_up(&uuid);
                self.advance(out)?;
            }
            Fact::Requeued(message) => {
                self.inbox.push_recorded(message, false);
                self.halted = false;
                self.advance(out)?;
                out.push(Effect::Changed);
            }
            Fact::SlotGranted(run) => {
                self.slot_wanted = false;
                if matches!(self.phase(), Phase::Idle) && self.may_start() {
                    self.lifecycle.move_to(Phase::Starting)?;
                    self.starting = Some(run);
                    out.push(Effect::Start(run));
                    out.push(Effect::Changed);
                } else {
                    out.push(Effect::SlotFree);
                }
            }
            Fact::Started(run) => {
                if self.starting == Some(run.no()) {
                    self.starting = None;
                    self.lifecycle.move_to(Phase::Ready { run: run.clone() })?;
                    if std::mem::take(&mut self.stop_remembered) || self.draining {
                        self.interrupt_remembered = false;
                        self.close_for_stop(run, out)?;
                    } else if std::mem::take(&mut self.park_remembered) {
                        self.interrupt_remembered = false;
                        self.closing = true;
                        out.push(Effect::Close(run));
                    } else {
                        self.advance(out)?;
                        // Nothing rode the first turn: an interrupt must not hit a later one.
                        self.interrupt_remembered = false;
                    }
                    out.push(Effect::Changed);
                }
            }
            Fact::Spoke(run) => {
                if self.is_current(run) {
                    self.start_failures = 0;
                }
            }
            Fact::Dispatched(turn) => self.dispatched(&turn, out)?,
            Fact::DispatchRefused(turn) => {
                if let Some(flight) = self.turn.take_if(|t| t.turn == turn && t.step == Step::Committing) {
                    if flight.deaths > 0 {
                        self.owed = Some(Owed { unsure: false, asked: false, ..Owed::from(flight) });
                    } else {
                        self.inbox.put_back(flight.members, false);
                    }
                    self.paused = true;
                    out.push(Effect::RetryIn(DISPATCH_RETRY_MS));
                    out.push(Effect::Changed);
                }
            }
            Fact::AgentTurnBegan(run, turn) => {
                if self.is_current(run) {
                    self.agent_turn = Some(turn);
                    if let Phase::Ready { run } = self.phase().clone() {
                        self.lifecycle.move_to(Phase::Streaming { run })?;
                    }
                    out.push(Effect::Changed);
                }
            }
            Fact::TurnEnded(run, turn) => self.turn_ended(run, &turn, out)?,
            Fact::InterruptTimedOut(run) => {
                // The agent does not listen: close the run, then as restart. The turn itself is not sent again.
                if self.is_current(run)
                    && !self.closing
                    && let Some(run) = self.phase().run().cloned()
                {
                    self.mark_stopped(out);
                    self.closing = true;
                    out.push(Effect::Close(run));
                    out.push(Effect::Changed);
                }
            }
            Fact::RunEnded { run, spoke, refused, error, hopeless } => {
                self.run_ended(run, spoke, refused, error, hopeless, out)?;
            }
            Fact::LookedUp(turn, seen) => self.looked_up(&turn, seen, out)?,
            Fact::QueueLookedUp { found, unsure, why } => self.queue_looked_up(found, &unsure, why, out)?,
            Fact::RetryDue => {
                self.paused = false;
                self.advance(out)?;
            }
            Fact::Stop => return self.stop(out),
            Fact::Park => return self.park(out),
            Fact::Restart => return self.restart(out),
            Fact::Interrupt => return Ok(self.interrupt(out)),
            Fact::Drain => {
                self.draining = true;
                if std::mem::take(&mut self.slot_wanted) {
                    out.push(Effect::SlotFree);
                }
                if let Phase::Ready { run } = self.phase().clone()
                    && self.turn.is_none()
                    && !self.closing
                {
                    self.closing = true;
                    out.push(Effect::Close(run));
                }
            }
        }
        Ok(Did::Nothing)
    }

    fn is_current(&self, run: RunNo) -> bool {
        self.phase().run().is_some_and(|r| r.no() == run)
    }

    fn has_work(&self) -> bool {
        if self.queue != Queue::Known {
            return false;
        }
        match &self.owed {
            Some(owed) => !owed.unsure,
            None => self.inbox.has_visible(),
        }
    }

    fn may_start(&self) -> bool {
        self.has_work() && self.turn.is_none() && !self.paused && !self.halted && !self.draining
    }

    /// Does whatever can be done next: ask the transcript, ask for a live place, or begin a turn.
    fn advance(&mut self, out: &mut Vec<Effect<R>>) -> Result<(), InvariantError> {
        match self.phase().clone() {
            Phase::Idle => {
                if let Some(owed) = &mut self.owed
                    && owed.unsure
                {
                    if !std::mem::replace(&mut owed.asked, true) {
                        out.push(Effect::LookUp { turn: owed.turn.clone(), members: owed.members.clone() });
                    }
                    return Ok(());
                }
                if self.queue == Queue::Unsure {
                    // Behind the owed turn: what it decides may put messages back into the queue.
                    self.queue = Queue::Asked;
                    out.push(Effect::LookUpQueue(self.inbox.recorded_messages()));
                    return Ok(());
                }
                if self.may_start() {
                    if !std::mem::replace(&mut self.slot_wanted, true) {
                        out.push(Effect::WantSlot);
                    }
                } else if std::mem::take(&mut self.slot_wanted) {
                    out.push(Effect::SlotFree);
                }
            }
            Phase::Ready { run } => {
                if self.closing {
                    return Ok(());
                }
                if self.turn.as_ref().is_some_and(|t| t.step == Step::Held) {
                    return self.send(run, out);
                }
                if self.draining {
                    if self.turn.is_none() {
                        self.closing = true;
                        out.push(Effect::Close(run));
                    }
                } else if self.turn.is_none() && self.has_work() && !self.paused {
                    self.begin_turn(out);
                }
            }
            #[cfg(feature = "model")]
            Phase::Streaming { .. }
                if self.has_work() && crate::model::is_planted(crate::model::Planted::DrainBeforeReady) =>
            {
                self.begin_turn(out);
            }
            Phase::Starting | Phase::Streaming { .. } | Phase::Stopping { .. } => {}
        }
        Ok(())
    }

    fn begin_turn(&mut self, out: &mut Vec<Effect<R>>) {
        let interrupt_after_send = std::mem::take(&mut self.interrupt_remembered);
        let flight = match self.owed.take() {
            Some(owed) => InFlight {
                turn: owed.turn,
                members: owed.members,
                step: Step::Committing,
                deaths: owed.deaths,
                stopped: owed.stopped,
                interrupt_after_send,
            },
            None => {
                let members = self.inbox.drain_turn();
                let Some(first) = members.first() else { return };
                InFlight {
                    turn: TurnId::of(&first.uuid),
                    members,
                    step: Step::Committing,
                    deaths: 0,
                    stopped: false,
                    interrupt_after_send,
                }
            }
        };
        out.push(Effect::Dispatch {
            turn: flight.turn.clone(),
            members: flight.members.clone(),
            attempt: flight.deaths + 1,
        });
        out.push(Effect::Changed);
        self.turn = Some(flight);
    }

    fn dispatched(&mut self, turn: &TurnId, out: &mut Vec<Effect<R>>) -> Result<(), InvariantError> {
        let Some(flight) = self.turn.as_mut().filter(|t| t.turn == *turn && t.step == Step::Committing) else {
            return Ok(());
        };
        flight.step = Step::Held;
        match self.phase().clone() {
            Phase::Ready { run } if !self.closing => self.send(run, out),
            // The agent is in a turn of its own: held until that ends.
            Phase::Streaming { .. } if !self.closing => Ok(()),
            // The run went away meanwhile: the turn was never sent, so it waits for the next one.
            Phase::Ready { .. } | Phase::Streaming { .. } | Phase::Stopping { .. } | Phase::Starting => Ok(()),
            Phase::Idle => {
                self.unsent(out);
                self.advance(out)
            }
        }
    }

    fn send(&mut self, run: R, out: &mut Vec<Effect<R>>) -> Result<(), InvariantError> {
        self.lifecycle.move_to(Phase::Streaming { run: run.clone() })?;
        if let Some(flight) = &mut self.turn {
            flight.step = Step::Sent;
            let (turn, members) = (flight.turn.clone(), flight.members.clone());
            let interrupt = std::mem::take(&mut flight.interrupt_after_send);
            out.push(Effect::Send { run: run.clone(), turn, members });
            if interrupt {
                self.mark_stopped(out);
                out.push(Effect::AskInterrupt(run));
            }
        }
        out.push(Effect::Changed);
        Ok(())
    }

    /// A dispatched turn whose run is gone before it got a byte: no question to the transcript, no death counted.
    fn unsent(&mut self, out: &mut Vec<Effect<R>>) {
        if let Some(flight) = self.turn.take_if(|t| t.step == Step::Held) {
            if flight.stopped {
                out.push(Effect::End { turn: flight.turn, members: flight.members, how: EndHow::Cleared });
            } else {
                let owed = Owed { unsure: false, ..Owed::from(flight) };
                out.push(Effect::End { turn: owed.turn.clone(), members: owed.members.clone(), how: EndHow::Again });
                self.owed = Some(owed);
            }
        }
    }

    fn turn_ended(&mut self, run: RunNo, turn: &TurnId, out: &mut Vec<Effect<R>>) -> Result<(), InvariantError> {
        if !self.is_current(run) {
            return Ok(());
        }
        if self.agent_turn.take_if(|t| *t == *turn).is_some() {
            out.push(Effect::AgentTurnEnded(turn.clone(), true));
        } else if let Some(flight) = self.turn.take_if(|t| t.turn == *turn && t.step == Step::Sent) {
            out.push(Effect::End { turn: flight.turn, members: flight.members, how: EndHow::Result });
        } else {
            return Ok(());
        }
        let ours_in_flight = self.turn.as_ref().is_some_and(|t| t.step == Step::Sent);
        if !ours_in_flight && self.agent_turn.is_none() {
            self.lifecycle.after_turn_result();
        }
        out.push(Effect::Changed);
        self.advance(out)
    }

    fn run_ended(
        &mut self,
        run: RunNo,
        spoke: bool,
        refused: bool,
        error: Option<String>,
        hopeless: bool,
        out: &mut Vec<Effect<R>>,
    ) -> Result<(), InvariantError> {
        let was_starting = self.starting == Some(run);
        if !was_starting && !self.is_current(run) {
            return Ok(());
        }
        let asked = self.closing || self.stop_remembered || self.park_remembered || self.draining;
        self.lifecycle.move_to(Phase::Idle)?;
        self.starting = None;
        self.closing = false;
        self.stop_remembered = false;
        self.park_remembered = false;
        self.interrupt_remembered = false;
        out.push(Effect::SlotFree);
        if let Some(turn) = self.agent_turn.take() {
            out.push(Effect::AgentTurnEnded(turn, false));
        }
        // Who said that it does not start took nothing that was written to it.
        if refused && let Some(flight) = self.turn.as_mut().filter(|t| t.step == Step::Sent) {
            flight.step = Step::Held;
        }
        // While its record is under way a turn stays: `dispatched` or `DispatchRefused` finds the run gone.
        if let Some(flight) = self.turn.take_if(|t| t.step == Step::Sent || (hopeless && t.step == Step::Held)) {
            self.owed = Some(Owed::from(flight));
        }
        if hopeless {
            let why = error.clone().unwrap_or_else(|| "the conversation cannot be resumed".into());
            if let Some(owed) = self.owed.take() {
                out.push(Effect::End { turn: owed.turn, members: owed.members, how: EndHow::Failed(why.clone()) });
            }
            let waiting = self.inbox.clear_recorded();
            if !waiting.is_empty() {
                out.push(Effect::Failed(waiting, why.clone()));
            }
            out.push(Effect::StartFailed { error: why, will_retry: false });
        } else if !asked && (was_starting || !spoke) {
            self.start_failures += 1;
            let will_retry = self.start_failures < START_ATTEMPTS_MAX;
            out.push(Effect::StartFailed {
                error: error.unwrap_or_else(|| "the agent ended before it said anything".into()),
                will_retry,
            });
            if will_retry {
                self.paused = true;
                let doubled = BACKOFF_MIN_MS << (self.start_failures - 1).min(16);
                out.push(Effect::RetryIn(doubled.min(BACKOFF_MAX_MS)));
            } else {
                self.halted = true;
            }
        }
        // After the reason, which clients hear first.
        self.unsent(out);
        out.push(Effect::Changed);
        self.advance(out)
    }
}

impl From<InFlight> for Owed {
    fn from(flight: InFlight) -> Self {
        Owed {
            turn: flight.turn,
            members: flight.members,
            deaths: flight.deaths,
            stopped: flight.stopped,
            unsure: true,
            asked: false,
        }
    }
}

#[cfg(test)]
mod tests;
