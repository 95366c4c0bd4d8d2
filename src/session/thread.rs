//! PURE. A thread of an outside channel: what of an agent's words is delivered to it, and when its session rotates.
//! Leaves turns to `pool`. Rule a change could break: only complete `<chat-response>…</chat-response>` blocks leave, each
//! once and the moment it is complete; every other kind of message is skipped by name.

use serde::{Deserialize, Serialize};

use crate::agent::Adapted;
use crate::clock::UnixMs;
use crate::ids::SessionId;

/// Messages after which a thread goes on in a fresh session.
pub const ROTATE_MESSAGES: u64 = 50;
/// Age of a session after which a thread goes on in a fresh one, in milliseconds.
pub const ROTATE_AGE_MS: i64 = 24 * 60 * 60 * 1000;
const OPEN: &str = "<chat-response>";
const CLOSE: &str = "</chat-response>";

/// What is kept of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Its session now; none after a turn that ended in error.
    pub session_id: Option<SessionId>,
    /// When that session began, milliseconds since 1970.
    pub created_ms: UnixMs,
    /// Its last message, milliseconds since 1970.
    pub last_used_ms: UnixMs,
    /// Messages of that session.
    pub message_count: u64,
    /// What the channel says the thread is.
    #[serde(default)]
    pub description: Option<String>,
}

impl Record {
    /// A thread without a session yet.
    #[must_use]
    pub fn fresh(now: UnixMs) -> Self {
        Self { session_id: None, created_ms: now, last_used_ms: now, message_count: 0, description: None }
    }

    /// The session the next message goes to; `None` begins a fresh one.
    #[must_use]
    pub fn session_for(&self, now: UnixMs) -> Option<&SessionId> {
        let worn = self.message_count >= ROTATE_MESSAGES || now - self.created_ms >= ROTATE_AGE_MS;
        self.session_id.as_ref().filter(|_| !worn)
    }
}

/// Finds response blocks in the words of one turn, however they are split over blocks and messages.
#[derive(Debug, Default, Clone)]
pub struct Responses {
    words: String,
    done: usize,
}

impl Responses {
    /// Takes a message in; returns the responses that it completed.
    pub fn hear(&mut self, message: &Adapted) -> Vec<String> {
        match message {
            Adapted::Assistant(_) => {
                for text in message.answer_texts() {
                    self.words.push_str(&text);
                }
                self.complete()
            }
            // The same words come whole in the assistant message that follows.
            Adapted::StreamEvent { .. } => skipped("partial delta"),
            // What the tools said, and our own words back.
            Adapted::User(_) => skipped("user echo"),
            // Waiting for the model's API is nobody's answer.
            Adapted::Status(_) => skipped("status"),
        }
    }

    fn complete(&mut self) -> Vec<String> {
        let mut found = Vec::new();
        while let Some(open) = self.words[self.done..].find(OPEN) {
            let start = self.done + open + OPEN.len();
            let Some(len) = self.words[start..].find(CLOSE) else { break };
            found.push(self.words[start..start + len].trim().to_owned());
            self.done = start + len + CLOSE.len();
        }
        found
    }
}

fn skipped(what: &str) -> Vec<String> {
    log::trace!("thread: {what} is not delivered");
    Vec::new()
}

/// What the agent is told in front of the first message of a thread's session.
#[must_use]
pub fn preamble(thread: &str, description: Option<&str>) -> String {
    let about = description.map(|d| format!(" ({d})")).unwrap_or_default();
    format!(
        "This conversation is the thread {thread:?}{about} of an outside channel. People there see only what you write \
         inside {OPEN} and {CLOSE}; write one such block for each message you send them."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_blocks_are_found_once_however_they_are_split() {
        let table: &[(&[&str], &[&[&str]])] = &[
            (&["no block"], &[&[]]),
            (&["<chat-response>a</chat-response> x <chat-response> b </chat-response>"], &[&["a", "b"]]),
            (&["<chat-resp", "onse>a", "b</chat-", "response>"], &[&[], &[], &[], &["ab"]]),
            (&["<chat-response>open", " still open"], &[&[], &[]]),
            (&["```\n<chat-response>in a fence</chat-response>\n```"], &[&["in a fence"]]),
            (&["</chat-response><chat-response>c</chat-response>"], &[&["c"]]),
        ];
        for (parts, expected) in table {
            let mut responses = Responses::default();
            for (part, found) in parts.iter().zip(*expected) {
                responses.words.push_str(part);
                assert_eq!(&responses.complete(), found, "{parts:?}");
            }
        }
    }

    #[test]
    fn a_thread_rotates_by_count_and_by_age() {
        let session = SessionId::fresh();
        let record = Record { session_id: Some(session.clone()), ..Record::fresh(0) };
        assert_eq!(record.session_for(1), Some(&session));
        assert_eq!(record.session_for(ROTATE_AGE_MS), None);
        assert_eq!(Record { message_count: ROTATE_MESSAGES, ..record.clone() }.session_for(1), None);
        assert_eq!(Record { session_id: None, ..record }.session_for(1), None);
    }
}
