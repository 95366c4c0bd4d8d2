//! The routes that change something. Rule a change could break: an answer says what is already recorded.

use serde_json::json;

use super::Handlers;
use super::body::Fields;
use crate::error::{Code, Error, Result};
use crate::http::reply::Reply;
use crate::ids::SessionId;
use crate::lifecycle::machine::Did;
use crate::session::chat::{self, Draft, Sent};
use crate::session::pool::ThreadMessage;
use crate::session::registry::Selector;

/// Longest thread reference, in bytes: messengers use far less.
const THREAD_BYTES_MAX: usize = 512;

fn did(did: Did) -> Reply {
    let word = match did {
        Did::Asked => "asked",
        Did::Stopped => "stopped",
        Did::Restarted => "restarted",
        Did::Nothing => "nothing",
    };
    Reply::json(&json!({"ok": true, "did": word}))
}

impl Handlers {
    pub(super) fn send(&self, body: Vec<u8>) -> Result<Reply> {
        self.ensure_open()?;
        let fields = Fields::read(&body)?;
        let selector = Selector::parse(&fields.text("session")?)?;
        let draft = Draft {
            text: fields.message()?,
            message_id: fields.message_id()?,
            images: fields.images()?,
            seeds: fields.seeds()?,
        };
        if draft.text.trim().is_empty() && draft.images.is_empty() {
            return Err(Error::new(Code::BadField, "message is empty, and no photo is attached"));
        }
        // All that is needed of it is in the draft: what waits for the disk should not hold it twice.
        drop(body);
        let mut answer = match chat::send(&self.registry, &selector, draft)? {
            Sent::Accepted { session, message, event, turn: Some(turn) } => {
                json!({"sessionId": session, "messageUuid": message, "eventId": event, "turnId": turn})
            }
            Sent::Accepted { session, message, event, turn: None } => {
                json!({"sessionId": session, "messageUuid": message, "eventId": event, "queued": true})
            }
            Sent::Repeat(first) => {
                let mut answer = json!({
                    "sessionId": first.session,
                    "messageUuid": first.message_uuid,
                    "eventId": first.event_id,
                    "state": first.state.word(),
                    "deduplicated": true,
                });
                if let Some(turn) = &first.turn {
                    answer["turnId"] = json!(turn);
                }
                answer
            }
        };
        // A conversation may have been given another id meanwhile; the one it has now is the useful one.
        if let Some(id) = answer["sessionId"].as_str().and_then(|id| SessionId::parse(id).ok()) {
            answer["sessionId"] = json!(self.registry.current_id(&id));
        }
        Ok(Reply::json(&answer))
    }

    pub(super) fn interrupt(&self, body: &[u8]) -> Result<Reply> {
        let session = self.session(&Fields::read(body)?.session()?)?;
        Ok(did(chat::interrupt(&session)))
    }

    pub(super) fn stop(&self, body: &[u8]) -> Result<Reply> {
        let session = self.session(&Fields::read(body)?.session()?)?;
        chat::stop(&session).map(did)
    }

    pub(super) fn restart(&self, body: &[u8]) -> Result<Reply> {
        let session = self.session(&Fields::read(body)?.session()?)?;
        Ok(did(chat::restart(&session)))
    }

    pub(super) fn reset(&self, body: &[u8]) -> Result<Reply> {
        let session = self.session(&Fields::read(body)?.session()?)?;
        chat::reset(&self.registry, &session)?;
        Ok(Reply::json(&json!({"ok": true, "did": "reset"})))
    }

    pub(super) fn retry(&self, body: &[u8]) -> Result<Reply> {
        self.ensure_open()?;
        let fields = Fields::read(body)?;
        let (session, message) = (self.session(&fields.session()?)?, fields.message_uuid()?);
        chat::retry(&session, &message)?;
        Ok(Reply::json(&json!({"ok": true})))
    }

    pub(super) fn discard(&self, body: &[u8]) -> Result<Reply> {
        let fields = Fields::read(body)?;
        let (session, message) = (self.session(&fields.session()?)?, fields.message_uuid()?);
        chat::discard(&session, &message)?;
        Ok(Reply::json(&json!({"ok": true})))
    }

    pub(super) fn send_to_thread(&self, body: &[u8]) -> Result<Reply> {
        self.ensure_open()?;
        let fields = Fields::read(body)?;
        let thread = fields.text("thread")?.into_owned();
        if thread.is_empty() || thread.len() > THREAD_BYTES_MAX || thread.chars().any(char::is_control) {
            return Err(Error::new(
                Code::BadField,
                format!("thread is 1 to {THREAD_BYTES_MAX} bytes without control characters"),
            ));
        }
        let message = ThreadMessage {
            thread,
            message: fields.message()?,
            description: fields.optional_text("description")?,
            message_id: fields.message_id()?,
        };
        if message.message.trim().is_empty() {
            return Err(Error::new(Code::BadField, "message is empty"));
        }
        Ok(Reply::json(&self.pool.send(message)?))
    }

    pub(super) fn threads(&self) -> Reply {
        Reply::json(&self.pool.list())
    }

    pub(super) fn features(&self, session: &SessionId) -> Result<Reply> {
        let session = self.session(session)?;
        let features = session.state().features.clone();
        Ok(Reply::json(&json!({"features": features})))
    }

    pub(super) fn set_feature(&self, body: &[u8]) -> Result<Reply> {
        let fields = Fields::read(body)?;
        let session = self.session(&fields.session()?)?;
        let features = session.set_feature(&fields.text("feature")?, &fields.text("value")?)?;
        Ok(Reply::json(&json!({"features": features})))
    }
}
