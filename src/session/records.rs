//! What is recorded of a turn, and the kept events that tell it: its end in every way, answers of a thread, and what left
//! the queue. Invariant: a move of the ledger and the event that tells it are one unit, so that nobody hears of what a
//! crash could take back.

use std::sync::Arc;

use serde_json::json;

use super::engine::{Kind, Late, Session, State};
use crate::agent::TurnEnd;
use crate::ids::{MessageUuid, SessionId, TurnId};
use crate::inbox::Message;
use crate::journal::{Change, KeptEvent, Unit};
use crate::lifecycle::machine::EndHow;

impl Session {
    /// Answers for messages of a thread that will have none from the agent.
    pub(super) fn failed_answers(&self, messages: &[MessageUuid]) -> Vec<Change> {
        match &self.kind {
            Kind::Chat => Vec::new(),
            Kind::Thread(_) => messages
                .iter()
                .map(|message| Change::ThreadAnswer {
                    message: message.clone(),
                    responses_json: "[]".into(),
                    success: false,
                })
                .collect(),
        }
    }

    /// A complete response of a thread: told at once, kept for repeats.
    pub(super) fn give_response(&self, state: &mut State, text: String) {
        if let Kind::Thread(thread) = &self.kind {
            let event = KeptEvent {
                event: "thread-response",
                data: json!({"thread": thread, "sessionId": state.id, "text": text}),
            };
            state.given.push(text);
            self.owe(state, Unit { changes: vec![], events: vec![event] });
        }
    }

    pub(super) fn record_end(
        &self,
        state: &mut State,
        turn: TurnId,
        members: &[Arc<Message>],
        how: EndHow,
        late: &mut Vec<Late>,
    ) {
        let uuids: Vec<_> = members.iter().map(|m| m.uuid.clone()).collect();
        let id = state.id.clone();
        let done = |outcome: &str| Change::Done { turn: turn.clone(), outcome: outcome.into() };
        let (mut changes, events, error) = match &how {
            EndHow::Result => {
                let end = state.end.as_ref();
                let outcome = end.map_or("result", |e| if e.is_error { "error" } else { "success" });
                let error = end.filter(|e| e.is_error).map(|e| e.errors.join("; "));
                late.push(Late::Features(std::mem::take(&mut state.said)));
                // Once a turn, so that the list's order survives a restart.
                let row = Change::Session(super::registry::row_of(&self.kind, state));
                let mut event = complete_event(&id, &turn, end);
                if !state.is_recorded {
                    event.data["recorded"] = json!(false);
                }
                (vec![done(outcome), row], vec![event], error)
            }
            EndHow::Recovered => {
                let event = KeptEvent {
                    event: "chat-complete",
                    data: json!({"sessionId": id, "turnId": turn, "isError": false, "subtype": "recovered"}),
                };
                let row = self.found_in_transcript(state, &turn);
                (vec![done("recovered"), row], vec![event], None)
            }
            EndHow::BrokeOff => {
                let error = "the agent ended before it finished the turn";
                let row = self.found_in_transcript(state, &turn);
                let event = failed_event(&id, &turn, &uuids, error, false);
                (vec![done("interrupted"), row], vec![event], Some(error.into()))
            }
            EndHow::Again => {
                let error = "the agent ended before it recorded the turn";
                let event = failed_event(&id, &turn, &uuids, error, true);
                (vec![Change::Recall { turn: turn.clone() }], vec![event], Some(error.into()))
            }
            EndHow::Split => {
                let error = "the agent ended again before it recorded the turn; its messages go out one by one";
                let event = failed_event(&id, &turn, &uuids, error, true);
                (vec![Change::Split { turn: turn.clone() }], vec![event], Some(error.into()))
            }
            EndHow::Cleared => {
                let error = "stopped before the agent recorded the turn";
                let events =
                    vec![failed_event(&id, &turn, &uuids, error, false), cleared_event(&id, &uuids, "stopped")];
                (vec![Change::Clear { messages: uuids, why: "stopped".into() }], events, Some(error.into()))
            }
            EndHow::Failed(error) => (
                vec![Change::Fail { messages: uuids.clone(), error: error.clone() }],
                vec![failed_event(&id, &turn, &uuids, error, false)],
                Some(error.clone()),
            ),
        };
        if let Kind::Thread(_) = &self.kind
            && !matches!(how, EndHow::Again | EndHow::Split)
        {
            let success = how == EndHow::Result && error.is_none();
            if success {
                // Told once; a turn that never reached the agent tells it again.
                state.preamble = None;
            }
            changes.extend(members.iter().map(|member| Change::ThreadAnswer {
                message: member.uuid.clone(),
                responses_json: json!(state.given).to_string(),
                success,
            }));
        }
        self.context.turns.end(&turn, error);
        late.push(Late::ForgetFrames);
        self.owe(state, Unit { changes, events });
    }
}

pub(super) fn complete_event(id: &SessionId, turn: &TurnId, end: Option<&TurnEnd>) -> KeptEvent {
    let mut data = json!({
        "sessionId": id,
        "turnId": turn,
        "isError": end.is_some_and(|e| e.is_error),
        "subtype": end.map_or("success", |e| e.subtype.as_str()),
    });
    if let Some(end) = end {
        if !end.errors.is_empty() {
            data["errors"] = json!(end.errors);
        }
        if end.interrupted {
            data["interrupted"] = json!(true);
        }
        if let Some(ms) = end.duration_ms {
            data["durationMs"] = json!(ms);
        }
        if let Some(turns) = end.num_turns {
            data["numTurns"] = json!(turns);
        }
        if let Some(cost) = end.total_cost_usd {
            data["totalCostUsd"] = json!(cost);
        }
    }
    KeptEvent { event: "chat-complete", data }
}

pub(super) fn failed_event(
    id: &SessionId,
    turn: &TurnId,
    messages: &[MessageUuid],
    error: &str,
    will_retry: bool,
) -> KeptEvent {
    KeptEvent {
        event: "chat-turn-failed",
        data: json!({
            "sessionId": id, "turnId": turn, "messageUuids": messages, "error": error, "willRetry": will_retry,
        }),
    }
}

pub(super) fn cleared_event(id: &SessionId, messages: &[MessageUuid], why: &str) -> KeptEvent {
    KeptEvent { event: "chat-queue-cleared", data: json!({"sessionId": id, "messageUuids": messages, "why": why}) }
}
