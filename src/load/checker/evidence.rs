//! What the judge is shown: tries of clients, transcripts, kept events, what is pending.
//! Rule a change could break: each part comes from another witness and none is derived from another.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::disk::Disk;
use crate::load::client::Accepted;
use crate::load::events::OrderCheck;

/// What came of one try to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Try {
    /// 200.
    Accepted(Accepted),
    /// An error answer.
    Refused {
        /// Its status.
        status: u16,
        /// Its code word.
        code: String,
    },
    /// No answer: time-out, dropped connection, killed server.
    NoAnswer,
}

/// One message as its client knows it.
#[derive(Debug, Clone)]
pub struct Sent {
    /// The client's key.
    pub message_id: String,
    /// The words; they hold [`mark`] of the key.
    pub text: String,
    /// Photos with it.
    pub photos: usize,
    /// Every try, in order.
    pub tries: Vec<Try>,
    /// The client discarded it by hand after it had failed.
    pub discarded: bool,
}

impl Sent {
    /// The first 200, if any.
    #[must_use]
    pub fn accepted(&self) -> Option<&Accepted> {
        self.tries.iter().find_map(|t| match t {
            Try::Accepted(a) => Some(a),
            Try::Refused { .. } | Try::NoAnswer => None,
        })
    }

    /// True when every try got a refusal after which nothing may be delivered.
    pub(super) fn surely_refused(&self) -> bool {
        !self.tries.is_empty()
            && self.tries.iter().all(|t| match t {
                Try::Refused { status, .. } => (400..500).contains(status),
                Try::Accepted(_) | Try::NoAnswer => false,
            })
    }
}

/// The token by which a message is found again in any text: `<#id#>`. Ids must not hold `#>`.
#[must_use]
pub fn mark(message_id: &str) -> String {
    format!("<#{message_id}#>")
}

/// The ids of all marks in a text, in order, with their places.
pub(super) fn marks(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].find("<#") {
        let start = from + at + 2;
        let Some(len) = text[start..].find("#>") else {
            break;
        };
        found.push((start, &text[start..start + len]));
        from = start + len + 2;
    }
    found
}

/// Whether `delivered` holds the words of `sent`: verbatim, or, for a text with `[image#N]` tokens, but for the tokens
/// (whose photos may stand in their places, under shifted numbers) and the blanks around them.
pub(super) fn holds_words(delivered: &str, sent: &str) -> bool {
    if !sent.contains("[image#") {
        return delivered.contains(sent);
    }
    words_alone(delivered).contains(&words_alone(sent))
}

fn words_alone(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("[image#") {
        out.extend(rest[..at].split_whitespace());
        let token = &rest[at + "[image#".len()..];
        let after = token.trim_start_matches(|c: char| c.is_ascii_digit());
        rest = after.strip_prefix(']').unwrap_or(token);
    }
    out.extend(rest.split_whitespace());
    out
}

/// One kept event.
#[derive(Debug, Clone, PartialEq)]
pub struct Kept {
    /// Its name.
    pub event: String,
    /// What it told.
    pub data: Value,
}

/// Kept events of all subscribers put together, by id.
#[derive(Debug, Clone, Default)]
pub struct EventLog {
    pub(super) events: BTreeMap<i64, Kept>,
    pub(super) differing: BTreeSet<i64>,
    /// True when it reaches back to the first event of the box, so that what is not in it was never told.
    pub complete: bool,
}

impl EventLog {
    /// Takes in one kept event; seen before with other content, it is noted.
    pub fn add(&mut self, id: i64, event: &str, data: Value) {
        let kept = Kept { event: event.to_owned(), data };
        if let Some(before) = self.events.get(&id) {
            if *before != kept {
                self.differing.insert(id);
            }
            return;
        }
        self.events.insert(id, kept);
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// True when there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (i64, &Kept)> {
        self.events.iter().map(|(id, kept)| (*id, kept))
    }
}

/// One pending message as bootstrap shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// The session asked for.
    pub session: String,
    /// The message.
    pub uuid: String,
    /// `accepted`, `dispatched` or `failed`.
    pub state: String,
}

/// Everything the judge sees.
#[derive(Debug, Default)]
pub struct Evidence {
    /// What was sent.
    pub sent: Vec<Sent>,
    /// What the agents wrote.
    pub disk: Disk,
    /// What the bus told.
    pub log: EventLog,
    /// What is owed.
    pub pending: Vec<Pending>,
    /// Each subscriber's own account, with its name.
    pub subscribers: Vec<(String, OrderCheck)>,
    /// True when the server says that it has nothing left to do: then nothing may be under way.
    pub settled: bool,
    /// The server does not see the transcripts: it cannot know that what it told as failed or cleared was recorded.
    pub unseen: bool,
}
