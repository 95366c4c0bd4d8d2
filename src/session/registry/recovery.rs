//! The thread `recover`: ends agents that a dead server left, then looks up in the transcripts what is owed. And what is
//! told of a thread's messages that a dead server left unanswered.

use std::sync::Arc;

use serde_json::json;

use super::Registry;
use crate::ids::{MessageUuid, SessionId, TurnId};
use crate::inbox::Message;
use crate::journal::{Change, KeptEvent, Owed, Unit};
use crate::lifecycle::machine::Fact;
use crate::session::Context;
use crate::session::engine::Session;
use crate::sync::Receiver;
use crate::threads::{Doing, doing};

/// Something to look up in the transcripts, on the `recover` thread.
pub(super) enum LookUp {
    /// A turn whose run is gone.
    Turn { session: Arc<Session>, turn: TurnId, messages: Vec<MessageUuid> },
    /// What waits since an earlier life of the server.
    Queue { session: Arc<Session>, messages: Vec<Arc<Message>> },
}

impl Registry {
    /// Has the transcript searched for a turn, on the `recover` thread.
    pub fn look_up(&self, session: &Arc<Session>, turn: TurnId, messages: Vec<MessageUuid>) {
        self.ask(LookUp::Turn { session: session.clone(), turn, messages });
    }

    /// Has the transcript searched for messages that wait since an earlier life, on the `recover` thread.
    pub fn look_up_queue(&self, session: &Arc<Session>, messages: Vec<Arc<Message>>) {
        self.ask(LookUp::Queue { session: session.clone(), messages });
    }

    fn ask(&self, job: LookUp) {
        if let Some(queue) = self.look_ups.lock().as_ref() {
            // The receiver lives as long as the sender; a closed queue means the server is gone.
            let _ = queue.send(job);
        }
    }
}

/// Body of the thread `recover`; ends with the last sender of jobs.
pub(super) fn recover(context: &Context, jobs: &Receiver<LookUp>) {
    sweep_leftovers(context);
    loop {
        let job = {
            let _at = doing(Doing::WaitWork);
            jobs.recv()
        };
        let Ok(job) = job else { return };
        look_up(job);
    }
}

fn sweep_leftovers(context: &Context) {
    let gone = context.leftovers.sweep(&context.mark);
    if gone.is_empty() {
        return;
    }
    let changes = gone.into_iter().map(|session| Change::AgentGone { session }).collect();
    if let Ok(place) = context.journal.reserve_for_outcome(1) {
        context.journal.owe(Unit { changes, events: vec![] }, place, Box::new(|_| ()));
    }
}

fn look_up(job: LookUp) {
    match job {
        LookUp::Turn { session, turn, messages } => {
            let ids: Vec<&str> =
                std::iter::once(turn.as_str()).chain(messages.iter().map(MessageUuid::as_str)).collect();
            let seen = {
                let _at = doing(Doing::ReadFile);
                session.seen(&ids)
            };
            log::info!("session {}: turn {turn} in the transcript: {seen:?}", session.id());
            session.apply_reserved(Fact::LookedUp(turn, seen));
        }
        LookUp::Queue { session, messages } => {
            let fact = {
                let _at = doing(Doing::ReadFile);
                session.seen_of_queue(&messages)
            };
            session.apply_reserved(fact);
        }
    }
}

/// Messages of a thread that a dead server left unanswered.
pub(super) fn tell_failed(context: &Context, session: &SessionId, messages: Vec<MessageUuid>) {
    let Some(first) = messages.first() else { return };
    let error = "the server ended before the turn was over";
    let event = KeptEvent {
        event: "chat-turn-failed",
        data: json!({
            "sessionId": session, "turnId": first, "messageUuids": messages, "error": error, "willRetry": false,
        }),
    };
    let mut changes: Vec<_> = messages
        .iter()
        .map(|message| Change::ThreadAnswer { message: message.clone(), responses_json: "[]".into(), success: false })
        .collect();
    changes.push(Change::Clear { messages, why: error.into() });
    match context.journal.reserve_for_outcome(1) {
        Ok(place) => context.journal.owe(Unit { changes, events: vec![event] }, place, Box::new(|_| ())),
        Err(e) => log::error!("session {session}: unanswered messages of a thread are not told: {e}"),
    }
}

/// The planted fault: what was dispatched goes back to the front of the queue, and no transcript is looked at.
pub(super) fn remerge(context: &Context, owed: &mut Owed) {
    let Some(turn) = owed.turn.take() else { return };
    let changes = vec![Change::Recall { turn: turn.turn.clone() }, Change::Split { turn: turn.turn }];
    if let Ok(place) = context.journal.reserve_for_outcome(1) {
        context.journal.owe(Unit { changes, events: vec![] }, place, Box::new(|_| ()));
    }
    owed.queue.splice(0..0, turn.members);
}
