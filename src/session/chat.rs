//! What a person asks of the box's conversations: send, stop, restart, reset, interrupt, retry, discard, features.
//! Leaves decisions to the machine and HTTP to the handlers. Rule a change could break: a place in the inbox and the
//! place in the journal's queue are taken under one lock, so commit order is inbox order is delivery order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use super::engine::{Kind, Session};
use super::features::{BadFeature, Features};
use super::registry::{Registry, Selector};
use crate::clock;
use crate::config::{QUEUE_BYTES_MAX, QUEUE_MESSAGES_MAX};
use crate::error::{Code, Error, Result};
use crate::ids::{EventId, MessageId, MessageUuid, SessionId, TurnId};
use crate::inbox::{Image, Message};
use crate::journal::{
    AcceptOutcome, Acceptance, Change, Claim, ClaimAnswer, KeptEvent, MessageState, Unit, content_hash,
};
use crate::lifecycle::machine::{Did, Fact};
use crate::sync::bounded;
use crate::threads::{Doing, at_work_for, doing};

/// Longest a sender waits for its commit. The journal gives up on a foreign lock after 2 s and on a bad disk at once,
/// so this is reached only when the disk itself hangs.
const COMMIT_WAIT: Duration = Duration::from_secs(20);
/// Bytes of a text that are looked at for its first words.
const LABEL_LOOK_BYTES: usize = 16 * 1024;
/// Letters of the first message that name a conversation in the list.
const LABEL_CHARS: usize = 80;

/// A message as a client sent it, checked.
#[derive(Debug)]
pub struct Draft {
    /// The words.
    pub text: String,
    /// The photos, decoded.
    pub images: Vec<Image>,
    /// The client's key of this send.
    pub message_id: Option<MessageId>,
    /// Flags for a new conversation.
    pub seeds: Vec<(String, String)>,
}

/// What became of a send.
#[derive(Debug)]
pub enum Sent {
    /// Recorded now.
    Accepted {
        /// The conversation.
        session: SessionId,
        /// The message's id.
        message: MessageUuid,
        /// Its event.
        event: EventId,
        /// The turn it leads, if nothing was in front of it; else it waits.
        turn: Option<TurnId>,
    },
    /// Recorded before, under the same messageId.
    Repeat(ClaimAnswer),
}

/// Takes a message for a conversation; returns when it is durably recorded.
///
/// # Errors
/// `unknown_session`, `session_gone`, `thread_session`, `content_conflict`, `queue_full`, `cannot_record`, `bad_field`.
pub fn send(registry: &Arc<Registry>, selector: &Selector, draft: Draft) -> Result<Sent> {
    let claim = draft.message_id.clone().map(|id| Claim { id, hash: content_hash(&draft.text, &draft.images, &[]) });
    // A repeat is answered from the claim, whatever has become of its conversation or of the queue.
    let journal = &registry.context().journal;
    if let Some(claim) = &claim
        && let Some(answer) = journal.claim_answer(claim)?
    {
        return answer.map(Sent::Repeat).map_err(|_| conflict(claim));
    }
    // Before a conversation is coined: a refused send leaves nothing behind.
    let seeded = seeds(&draft.seeds)?;
    let session = registry.for_send(selector)?;
    if session.kind != Kind::Chat {
        return Err(Error::new(Code::ThreadSession, format!("{} is the conversation of a thread", session.id())));
    }
    ensure_resumable(&session)?;
    if let Some(features) = seeded {
        let mut state = session.state();
        // Seeds are for a conversation that has not begun.
        if !state.resumable && state.label.is_none() && state.machine.inbox().is_empty() {
            state.features = features;
        }
    }
    let sent = accept(&session, draft, claim, None, None);
    if matches!(sent, Ok(Sent::Accepted { .. })) {
        registry.recorded(&session);
        return sent;
    }
    let session = {
        // The pin ends first: it stands for a send under way.
        let pin = session;
        Arc::clone(&pin)
    };
    registry.forget_unrecorded(&session);
    sent
}

/// A conversation whose transcript is gone is told before acceptance.
fn ensure_resumable(session: &Session) -> Result<()> {
    let (id, resumable, has_run) = {
        let state = session.state();
        (state.id.clone(), state.resumable, state.machine.phase().run().is_some())
    };
    if resumable && session.context.archive.path_of(&id).is_none() {
        return Err(Error::new(Code::SessionGone, format!("the transcript of conversation {id} is gone")));
    }
    // No agent could go on with what is no transcript; one that has begun reads it no more.
    if has_run { Ok(()) } else { session.context.archive.ensure_readable(&id) }
}

fn seeds(list: &[(String, String)]) -> Result<Option<Features>> {
    if list.is_empty() {
        return Ok(None);
    }
    let mut features = Features::default();
    for (name, value) in list {
        features.set(name, value).map_err(|e| bad_feature(name, value, &e))?;
    }
    Ok(Some(features))
}

/// The words of a feature that the table does not have.
#[must_use]
pub fn bad_feature(name: &str, value: &str, bad: &BadFeature) -> Error {
    let text = match bad {
        BadFeature::Name => {
            let names: Vec<_> = super::features::FEATURES.iter().map(|f| f.name).collect();
            format!("feature {name:?} is unknown, there are: {}", names.join(", "))
        }
        BadFeature::Value(values) => format!("feature {name} cannot be {value:?}, only: {}", values.join(", ")),
    };
    Error::new(Code::BadField, text)
}

fn conflict(claim: &Claim) -> Error {
    Error::new(
        Code::ContentConflict,
        format!("messageId {:?} was used for other content within the last 7 days", claim.id.as_str()),
    )
}

/// First words of a message, for the list; `None` if it has no words.
#[must_use]
pub fn label_of(text: &str) -> Option<String> {
    // The first words are near the front, behind a few tags at most.
    let text = &text[..text.floor_char_boundary(LABEL_LOOK_BYTES)];
    let shown = crate::transcript::record::shown_text(text);
    // `<typed user="…">` and its like say who wrote, not what.
    let shown = match shown.trim_start().strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((tag, rest)) if ["typed", "speech", "external-input"].iter().any(|t| tag.starts_with(t)) => rest,
        Some(_) | None => &shown,
    };
    let words = shown.split("</").next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
    let label: String = words.chars().take(LABEL_CHARS).collect();
    (!label.is_empty()).then_some(label)
}

/// What is done when a message lands whose sender had given up; called on the journal's thread, so it must not block.
pub(super) type Late = Box<dyn FnOnce() + Send>;

/// Records a message in the conversation's queue. The heart of the promise: returns `Accepted` only after the commit.
pub(super) fn accept(
    session: &Arc<Session>,
    draft: Draft,
    claim: Option<Claim>,
    thread: Option<String>,
    late: Option<Late>,
) -> Result<Sent> {
    let place = session.reserve(1)?;
    let message = Arc::new(Message {
        uuid: MessageUuid::fresh(),
        user: crate::transcript::entry::author_of(&draft.text).0,
        text: draft.text,
        images: draft.images,
        at_ms: clock::now_ms(),
    });
    let (answer, answered) = bounded(1);
    // Set by the first of both: the sender that gives up, the outcome that comes. So exactly one of them tells the
    // registry of a message that lands.
    let settled = Arc::new(AtomicBool::new(false));
    let session_id;
    let turn;
    {
        let mut state = session.state();
        let inbox = state.machine.inbox();
        if inbox.places() >= QUEUE_MESSAGES_MAX || inbox.weight_bytes() + message.weight_bytes() > QUEUE_BYTES_MAX {
            return Err(Error::new(
                Code::QueueFull,
                format!(
                    "{} messages of {} bytes wait in this conversation, at most {QUEUE_MESSAGES_MAX} of {QUEUE_BYTES_MAX} bytes may",
                    inbox.places(),
                    inbox.weight_bytes()
                ),
            ));
        }
        let leads = state.machine.take_place(message.clone());
        session_id = state.id.clone();
        turn = leads.then(|| TurnId::of(&message.uuid));
        if state.label.is_none() {
            state.label = label_of(&message.text);
        }
        state.last_used_ms = message.at_ms;
        let acceptance = Acceptance {
            session: session_id.clone(),
            message: message.clone(),
            claim: claim.clone(),
            thread,
            queued: turn.is_none(),
            turn: turn.clone(),
            event: match &session.kind {
                Kind::Chat => user_message_event(&session_id, &message),
                Kind::Thread(thread) => KeptEvent {
                    event: "thread-message",
                    data: json!({
                        "thread": thread, "sessionId": session_id, "text": message.text, "messageUuid": message.uuid,
                    }),
                },
            },
        };
        let (session, uuid, settled) = (session.clone(), message.uuid.clone(), settled.clone());
        session.context.journal.clone().accept(
            acceptance,
            place,
            Box::new(move |outcome| {
                let recorded = matches!(outcome, Ok(AcceptOutcome::Recorded { .. }));
                let gave_up = settled.swap(true, Ordering::AcqRel);
                if recorded {
                    session.keep_row();
                    if gave_up && let Some(registry) = session.context.registry() {
                        registry.recorded(&session);
                        if let Some(late) = late {
                            late();
                        }
                    }
                }
                // The machine learns first: who has the answer and asks for the status sees the message counted.
                session.apply(if recorded { Fact::Recorded(uuid) } else { Fact::NotRecorded(uuid) });
                // A sender that gave up waiting left no receiver.
                let _ = answer.send(outcome);
            }),
        );
    }
    let outcome = {
        let _for = at_work_for(&session_id);
        let _at = doing(Doing::WaitCommit);
        match answered.recv_timeout(COMMIT_WAIT) {
            // It came just now.
            Err(_) if settled.swap(true, Ordering::AcqRel) => answered.recv().ok(),
            other => other.ok(),
        }
    };
    match outcome {
        Some(Ok(AcceptOutcome::Recorded { event_id })) => {
            Ok(Sent::Accepted { session: session_id, message: message.uuid.clone(), event: event_id, turn })
        }
        Some(Ok(AcceptOutcome::Repeat(answer))) => Ok(Sent::Repeat(answer)),
        Some(Ok(AcceptOutcome::Conflict)) => {
            Err(claim.as_ref().map_or_else(|| Error::internal("a message without a messageId met a claim"), conflict))
        }
        Some(Err(e)) => Err(e),
        None => Err(Error::new(
            Code::CannotRecord,
            format!("not known to be recorded after {} s, repeat with the same messageId", COMMIT_WAIT.as_secs()),
        )),
    }
}

fn user_message_event(id: &SessionId, message: &Message) -> KeptEvent {
    let mut data = json!({
        "sessionId": id,
        "messageUuid": message.uuid,
        "message": message.text,
        "images": message.images.len(),
        "timestamp": clock::rfc3339(message.at_ms),
    });
    if let Some(user) = &message.user {
        data["user"] = json!(user);
    }
    KeptEvent { event: "chat-user-message", data }
}

/// Waits until everything the journal was given before is committed.
fn after_commit(session: &Session) -> Result<()> {
    let place = session.reserve(1)?;
    let (answer, answered) = bounded(1);
    session.context.journal.owe(
        Unit { changes: vec![], events: vec![] },
        place,
        Box::new(move |done| {
            let _ = answer.send(done.map(|_| ()));
        }),
    );
    let _for = at_work_for(&session.id());
    let _at = doing(Doing::WaitCommit);
    answered.recv_timeout(COMMIT_WAIT).unwrap_or_else(|_| {
        Err(Error::new(Code::CannotRecord, "what was done is not recorded yet; it is kept and tried again"))
    })
}

/// Stops the conversation: the queue is cleared, the run closed. Returns when that is recorded.
///
/// # Errors
/// `cannot_record` when the journal takes nothing; nothing was stopped then.
pub fn stop(session: &Arc<Session>) -> Result<Did> {
    let places = session.reserve(4)?;
    let did = session.apply_with(session.way_to_close(), Some(places));
    after_commit(session)?;
    Ok(did)
}

/// Gives the conversation a fresh run; its queue goes there.
pub fn restart(session: &Arc<Session>) -> Did {
    session.apply_reserved(Fact::Restart)
}

/// Asks the agent to end its turn; the queue is untouched.
pub fn interrupt(session: &Arc<Session>) -> Did {
    session.apply_reserved(Fact::Interrupt)
}

/// Stops the conversation and, if it is the box's own, forgets that: the next `main` send opens a new one.
///
/// # Errors
/// As [`stop`].
pub fn reset(registry: &Registry, session: &Arc<Session>) -> Result<()> {
    stop(session)?;
    registry.forget_main(&session.id());
    Ok(())
}

/// Puts a failed message back into the queue.
///
/// # Errors
/// `not_found` for a message the journal does not have as pending, `not_failed` if it did not fail.
pub fn retry(session: &Arc<Session>, message: &MessageUuid) -> Result<()> {
    let content = failed(session, message)?;
    let place = session.reserve(1)?;
    let again = session.clone();
    // Back in the inbox in commit order, as any other message; of two retries at once the journal refuses one.
    record(session, Change::Retry { message: message.clone() }, vec![], place, move || {
        again.apply(Fact::Requeued(content));
    })
}

/// Gives a failed message up.
///
/// # Errors
/// As [`retry`].
pub fn discard(session: &Arc<Session>, message: &MessageUuid) -> Result<()> {
    failed(session, message)?;
    let event = KeptEvent {
        event: "chat-queue-cleared",
        data: json!({"sessionId": session.id(), "messageUuids": [message], "why": "discarded"}),
    };
    record(session, Change::Discard { message: message.clone() }, vec![event], session.reserve(1)?, || ())
}

fn failed(session: &Session, message: &MessageUuid) -> Result<Arc<Message>> {
    let journal = &session.context.journal;
    let gone = || Error::new(Code::NotFound, format!("no message {message} waits in this conversation"));
    let row = journal.pending(&session.id())?.into_iter().find(|row| row.message == *message).ok_or_else(gone)?;
    if row.state != MessageState::Failed {
        return Err(Error::new(
            Code::NotFailed,
            format!("message {message} is {}, only a failed one can be retried or discarded", row.state.word()),
        ));
    }
    journal.message(message)?.ok_or_else(gone)
}

fn record(
    session: &Session,
    change: Change,
    events: Vec<KeptEvent>,
    place: crate::journal::Places,
    then: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let (answer, answered) = bounded(1);
    session.context.journal.submit(
        Unit { changes: vec![change], events },
        place,
        Box::new(move |done| {
            if done.is_ok() {
                then();
            }
            let _ = answer.send(done.map(|_| ()));
        }),
    );
    let _for = at_work_for(&session.id());
    let _at = doing(Doing::WaitCommit);
    answered
        .recv_timeout(COMMIT_WAIT)
        .unwrap_or_else(|_| Err(Error::new(Code::CannotRecord, "not known to be recorded, ask again")))
}

impl Session {
    /// Records the conversation's row once, right behind its first message; until then `open` messages stand for it.
    fn keep_row(&self) {
        let mut state = self.state();
        if state.row_kept {
            return;
        }
        if let Ok(place) = self.context.journal.reserve_for_outcome(1) {
            state.row_kept = true;
            let row = super::registry::row_of(&self.kind, &state);
            let mut changes = vec![Change::Session(row)];
            if state.features != Features::default() {
                let json = serde_json::to_string(&state.features).unwrap_or_default();
                changes.push(Change::Features { session: state.id.clone(), json });
            }
            self.context.journal.owe(Unit { changes, events: vec![] }, place, Box::new(|_| ()));
        }
    }

    /// Sets a flag, keeps it and tells it; allowed at any time, also from a listener of the event it causes.
    ///
    /// # Errors
    /// `bad_field` for what the table does not have, `cannot_record` when it cannot be kept; nothing changes then.
    pub fn set_feature(self: &Arc<Self>, name: &str, value: &str) -> Result<Features> {
        let place = self.reserve(1)?;
        let (id, features, changed) = {
            let mut state = self.state();
            crate::faults::point("state_locked");
            let mut features = state.features.clone();
            let changed = features.set(name, value).map_err(|e| bad_feature(name, value, &e))?;
            if changed {
                state.features = features.clone();
                let json = serde_json::to_string(&features).unwrap_or_default();
                let unit = Unit { changes: vec![Change::Features { session: state.id.clone(), json }], events: vec![] };
                self.context.journal.owe(unit, place, Box::new(|_| ()));
            }
            (state.id.clone(), features, changed)
        };
        if changed {
            // No lock is held: a listener may call this again.
            self.context.bus.publish("chat-features-changed", &json!({"sessionId": id, "features": features}));
        }
        Ok(features)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_the_first_words_on_one_line_never_half_a_character() {
        assert_eq!(label_of("  \n "), None);
        assert_eq!(label_of("two\n\n words "), Some("two words".into()));
        assert_eq!(label_of("<typed user=\"Ann\">buy milk</typed>"), Some("buy milk".into()));
        assert_eq!(label_of("a < b and c > d"), Some("a < b and c > d".into()));
        let long = "ä".repeat(200);
        assert_eq!(label_of(&long).unwrap().chars().count(), LABEL_CHARS);
    }
}
