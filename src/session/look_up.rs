//! Whether the agent has a message already, as the transcripts tell it: of a turn whose run is gone, of what waits since
//! an earlier life of the server, and of what somebody else may have given meanwhile. The ground of each answer is the
//! table "What is taken as proof" in the crate docs. Leaves what follows from an answer to the machine.

use std::sync::Arc;

use serde_json::json;

use super::engine::{Session, State};
use super::records::failed_event;
use crate::agent::Run;
use crate::archive::{Sought, Trace, Waiting};
use crate::ids::{SessionId, TurnId};
use crate::inbox::Message;
use crate::journal::{Change, KeptEvent, Unit};
use crate::lifecycle::machine::{Fact, FoundTurn, Seen, Unknown};

impl Session {
    /// What the transcripts say of a turn, in the machine's words. If the turn stands in a conversation that nobody knew,
    /// the agent named itself so before it could tell: this conversation goes on there.
    #[must_use]
    pub fn seen(self: &Arc<Self>, ids: &[&str]) -> Seen {
        let (id, anchor, agent, had_transcript) = {
            let state = self.state();
            (state.id.clone(), state.anchor.clone(), state.handed_to.clone(), state.resumable)
        };
        self.look_now(&id);
        let sought = Sought { ids, anchor: anchor.as_ref().map(TurnId::as_str) };
        let is_proven = agent.is_some_and(|agent| self.context.proofs.holds(&agent));
        match self.context.archive.look_up(&id, sought) {
            Ok(Trace::Recorded { finished, elsewhere }) => {
                if let (Some(now), Some(registry)) = (elsewhere, self.context.registry()) {
                    log::warn!("session {id}: its turn stands in {now}, which the agent had begun");
                    if let Err(e) = registry.rename(self, &now, false) {
                        log::error!("session {id}: not followed to {now}: {}", e.text());
                    }
                }
                if finished { Seen::Finished } else { Seen::Unfinished }
            }
            Ok(Trace::NoFile) if had_transcript => Seen::Unknowable(Unknown::Gone),
            Ok(Trace::NotRecorded { anchored: false }) => Seen::Unknowable(Unknown::NotTheSameFile),
            Ok(Trace::NoFile | Trace::NotRecorded { anchored: true }) if is_proven => Seen::Absent,
            Ok(Trace::NoFile | Trace::NotRecorded { anchored: true }) => Seen::Unknowable(Unknown::NotProven),
            Ok(Trace::Unsearched) => Seen::Unknowable(Unknown::Unreadable),
            Err(e) => {
                log::warn!("session {id}: transcript not searched: {e}");
                Seen::Unknowable(Unknown::Unreadable)
            }
        }
    }

    /// Notes how the transcript stands before it is read: what is written later is looked for again before a run starts.
    fn look_now(&self, id: &SessionId) {
        let stamp = self.context.archive.stamp(id);
        self.state().looked_at = stamp;
    }

    /// Before an agent is started: if somebody else wrote to the transcript since it was searched, or since our last run
    /// (the server of a copy of this box, a person at a terminal), what waits is looked for in it once more.
    pub fn look_again(self: &Arc<Self>) {
        let id = self.id();
        let stamp = self.context.archive.stamp(&id);
        let waiting = {
            let state = self.state();
            if state.looked_at == stamp { Vec::new() } else { state.machine.waiting_messages() }
        };
        if !waiting.is_empty() {
            let fact = self.seen_of_queue(&waiting);
            self.apply_reserved(fact);
        }
    }

    /// What of a queue that a dead server left is delivered already, as the fact that the machine waits for.
    #[must_use]
    pub fn seen_of_queue(&self, queue: &[Arc<Message>]) -> Fact<Run> {
        let waiting: Vec<_> =
            queue.iter().map(|m| Waiting { id: m.uuid.as_str(), text: &m.text, photos: m.images.len() }).collect();
        let id = self.id();
        // Two faults of thought are caught by this very look-up; they show only without it.
        let is_blind = ["dispatch_before_commit", "remerge_at_recovery"].into_iter().any(crate::faults::planted);
        let waiting = if is_blind { Vec::new() } else { waiting };
        let uuids = |at: std::ops::Range<usize>| queue[at].iter().map(|m| m.uuid.clone()).collect::<Vec<_>>();
        self.look_now(&id);
        let (found, unsure) = match self.context.archive.look_up_queue(&id, &waiting) {
            Ok(trace) => {
                let found = trace.turns.into_iter();
                let found = found.map(|t| FoundTurn { members: uuids(t.members), finished: t.finished }).collect();
                (found, trace.unsure.into_iter().map(|at| queue[at].uuid.clone()).collect())
            }
            Err(e) => {
                log::warn!("session {id}: transcript not searched for what waits: {e}");
                (Vec::new(), uuids(0..queue.len()))
            }
        };
        Fact::QueueLookedUp { found, unsure, why: Unknown::Unreadable }
    }

    /// The row of a conversation whose transcript was found to hold `turn`.
    pub(super) fn found_in_transcript(&self, state: &mut State, turn: &TurnId) -> Change {
        state.resumable = true;
        state.anchor = Some(turn.clone());
        Change::Session(super::registry::row_of(&self.kind, state))
    }

    /// Waiting messages turned out to be delivered: a journal that came back from a backup knows less than the agent.
    pub(super) fn record_found(&self, state: &mut State, turn: TurnId, members: &[Arc<Message>], finished: bool) {
        let uuids: Vec<_> = members.iter().map(|m| m.uuid.clone()).collect();
        log::warn!("session {}: {} waiting message(s) are in the transcript already", state.id, uuids.len());
        let row = self.found_in_transcript(state, &turn);
        let id = state.id.clone();
        let dispatched = KeptEvent {
            event: "chat-message-dispatched",
            data: json!({"sessionId": id, "turnId": turn, "messageUuids": uuids}),
        };
        let (outcome, end) = if finished {
            let data = json!({"sessionId": id, "turnId": turn, "isError": false, "subtype": "recovered"});
            ("recovered", KeptEvent { event: "chat-complete", data })
        } else {
            ("interrupted", failed_event(&id, &turn, &uuids, "the agent ended before it finished the turn", false))
        };
        let found = Change::Found { session: id, turn, messages: uuids, outcome: outcome.into() };
        self.owe(state, Unit { changes: vec![found, row], events: vec![dispatched, end] });
    }
}
