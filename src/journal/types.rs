//! What is recorded, and what is answered: the values that cross the journal's door.

use std::sync::Arc;

use super::Faults;
use crate::clock::UnixMs;
use crate::ids::{EventId, MessageId, MessageUuid, SessionId, TurnId};
use crate::inbox::Message;

/// The client's own key of a send, bound to what was sent under it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The key.
    pub id: MessageId,
    /// Made by [`super::content_hash`].
    pub hash: [u8; 32],
}

/// A message to record: with its event and its claim it is one transaction or nothing.
#[derive(Debug, Clone)]
pub struct Acceptance {
    /// Whose inbox it waits in.
    pub session: SessionId,
    /// The whole content.
    pub message: Arc<Message>,
    /// Makes repeats of it one message.
    pub claim: Option<Claim>,
    /// The outside channel it came from.
    pub thread: Option<String>,
    /// The first answer said that it waits behind a turn.
    pub queued: bool,
    /// The turn that the first answer named; repeats name it too.
    pub turn: Option<TurnId>,
    /// The event that tells it.
    pub event: KeptEvent,
}

/// What became of an [`Acceptance`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AcceptOutcome {
    /// It is durable.
    Recorded {
        /// The id of its event.
        event_id: EventId,
    },
    /// The same content was recorded under this claim before; nothing was written.
    Repeat(ClaimAnswer),
    /// Other content was recorded under this claim; nothing was written.
    Conflict,
}

/// The claim is bound to other content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conflict;

/// What the first send under a claim was answered, and how its message stands now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimAnswer {
    /// As the first answer said.
    pub session: SessionId,
    /// As the first answer said.
    pub message_uuid: MessageUuid,
    /// As the first answer said.
    pub event_id: EventId,
    /// As the first answer said.
    pub turn: Option<TurnId>,
    /// How it stands now.
    pub state: MessageState,
}

/// How a message stands in the delivery ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageState {
    /// Recorded, not handed to an agent.
    Accepted,
    /// Handed to an agent, no outcome yet.
    Dispatched,
    /// The agent recorded it.
    Done,
    /// Taken back by a person.
    Cleared,
    /// Never recorded by the agent; waits for a person.
    Failed,
}

impl MessageState {
    /// The word on the wire.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            MessageState::Accepted => "accepted",
            MessageState::Dispatched => "dispatched",
            MessageState::Done => "done",
            MessageState::Cleared => "cleared",
            MessageState::Failed => "failed",
        }
    }
}

/// An event that is kept and replayed.
#[derive(Debug, Clone, PartialEq)]
pub struct KeptEvent {
    /// Its name (WIRE, Events).
    pub event: &'static str,
    /// Its data.
    pub data: serde_json::Value,
}

/// One move of the ledger, or one fact to keep.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Accepted messages become the turn in flight of their session. Refused if one of them is not accepted, or if the
    /// session has another unfinished turn. A recalled turn is dispatched again under its id with the same members.
    Dispatch {
        /// Whose.
        session: SessionId,
        /// The turn.
        turn: TurnId,
        /// In the order of delivery.
        members: Vec<MessageUuid>,
        /// 1 for the first time.
        attempt: u32,
        /// Which agent it goes to, in whatever words the caller tells agents apart.
        agent: Option<String>,
    },
    /// Accepted messages turned out to be delivered already, as one turn; their contents are dropped.
    Found {
        /// Whose.
        session: SessionId,
        /// The turn.
        turn: TurnId,
        /// Which; those already gone are passed over.
        messages: Vec<MessageUuid>,
        /// How it ended.
        outcome: String,
    },
    /// A counted death before the agent recorded it: accepted again, its members, their order and its id kept.
    Recall {
        /// The turn.
        turn: TurnId,
    },
    /// A person stopped or interrupted the turn: it is never sent again.
    Stopped {
        /// The turn.
        turn: TurnId,
    },
    /// The agent recorded the turn; its contents are dropped.
    Done {
        /// The turn.
        turn: TurnId,
        /// How it ended.
        outcome: String,
    },
    /// Taken back; contents are dropped.
    Clear {
        /// Which; those already gone are passed over.
        messages: Vec<MessageUuid>,
        /// Why.
        why: String,
    },
    /// Given up; they stay, with their contents, until a person retries or discards them.
    Fail {
        /// Which; those already gone are passed over.
        messages: Vec<MessageUuid>,
        /// Why, in words for a person.
        error: String,
    },
    /// A failed message is accepted again, at the end of the queue.
    Retry {
        /// Which; `NotFailed` or `NotFound` otherwise.
        message: MessageUuid,
    },
    /// A failed message is taken back.
    Discard {
        /// Which; `NotFailed` or `NotFound` otherwise.
        message: MessageUuid,
    },
    /// A merged turn becomes single messages again, in order, each to be sent alone.
    Split {
        /// The turn.
        turn: TurnId,
    },
    /// What is known of a session (whole row, replaced).
    Session(SessionRow),
    /// `was` is known as `now` from here on; what is owed moves along.
    Alias {
        /// The old id.
        was: SessionId,
        /// The new one.
        now: SessionId,
    },
    /// What is owed by `was` moves to `now`; `was` stays a session of its own.
    Move {
        /// The old id.
        was: SessionId,
        /// The new one.
        now: SessionId,
    },
    /// An agent process lives for this session.
    Agent {
        /// Whose.
        session: SessionId,
        /// Its process id.
        pid: u32,
        /// Field 22 of its `/proc` stat: tells it from a later process with the same id.
        start_time: u64,
    },
    /// It was reaped.
    AgentGone {
        /// Whose.
        session: SessionId,
    },
    /// A value of the server's own.
    SetState {
        /// Its name.
        key: String,
        /// Its value.
        value: String,
    },
    /// The features of a session.
    Features {
        /// Whose.
        session: SessionId,
        /// All of them.
        json: String,
    },
    /// What a thread's message was answered, kept for repeats as long as a claim.
    ThreadAnswer {
        /// The message.
        message: MessageUuid,
        /// The responses, a JSON array of texts.
        responses_json: String,
        /// The turn ended well.
        success: bool,
    },
    /// The record of a thread.
    Thread {
        /// Its reference.
        thread: String,
        /// The record.
        json: String,
    },
}

/// What is kept of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// Its id.
    pub session: SessionId,
    /// The thread it belongs to.
    pub thread: Option<String>,
    /// When it was first seen.
    pub created_ms: UnixMs,
    /// Its last turn.
    pub last_used_ms: UnixMs,
    /// What lists show.
    pub label: Option<String>,
    /// It had a transcript: without one it is gone.
    pub resumable: bool,
    /// The project folder of the agent's home that its transcript was seen in last.
    pub folder: Option<String>,
    /// The last turn of ours that was seen in the transcript.
    pub anchor: Option<TurnId>,
}

/// Changes and the events that tell them: one transaction.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Unit {
    /// In order.
    pub changes: Vec<Change>,
    /// In order.
    pub events: Vec<KeptEvent>,
}

/// One message that is owed or failed, as `pending` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingRow {
    /// Which.
    pub message: MessageUuid,
    /// Accepted, dispatched or failed.
    pub state: MessageState,
    /// The unfinished turn that it is part of.
    pub turn: Option<TurnId>,
    /// The words.
    pub text: String,
    /// The photos, without their bytes.
    pub images: Vec<ImageMeta>,
    /// Who wrote it.
    pub user: Option<String>,
    /// When it was accepted.
    pub at_ms: UnixMs,
    /// Why it failed.
    pub error: Option<String>,
}

/// A photo without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageMeta {
    /// The N of its `[image#N]` token.
    pub number: u32,
    /// Its media type.
    pub mime: String,
    /// Its length in bytes.
    pub bytes: u64,
}

/// What a thread's message was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptAnswer {
    /// A JSON array of texts.
    pub responses_json: String,
    /// The turn ended well.
    pub success: bool,
}

/// What the journal knows when it opens.
#[derive(Debug, Clone, Default)]
pub struct Recovered {
    /// Random, made with the journal: cursors of another journal are recognized by it.
    pub epoch: String,
    /// Id of the newest event, 0 if none.
    pub head: EventId,
    /// Every session, last used first.
    pub sessions: Vec<SessionRow>,
    /// Old id, new id.
    pub aliases: Vec<(SessionId, SessionId)>,
    /// What is owed, session by session.
    pub owed: Vec<Owed>,
    /// Agents that lived: session, pid, start time.
    pub agents: Vec<(SessionId, u32, u64)>,
    /// Values of the server's own.
    pub state: Vec<(String, String)>,
    /// Features of sessions.
    pub features: Vec<(SessionId, String)>,
    /// Records of threads.
    pub threads: Vec<(String, String)>,
}

/// What is owed to one session.
#[derive(Debug, Clone)]
pub struct Owed {
    /// Whose.
    pub session: SessionId,
    /// Dispatched or recalled, and unfinished.
    pub turn: Option<OwedTurn>,
    /// What waits behind it, in order.
    pub queue: Vec<Arc<Message>>,
    /// Those of `queue` that came out of a split turn: each is sent alone.
    pub alone: Vec<MessageUuid>,
    /// Given up, waiting for a person.
    pub failed: Vec<MessageUuid>,
    /// Those of the queue and the turn that came from an outside channel, with its thread.
    pub threads: Vec<(MessageUuid, String)>,
}

/// An unfinished turn.
#[derive(Debug, Clone)]
pub struct OwedTurn {
    /// Its id.
    pub turn: TurnId,
    /// In the order of delivery.
    pub members: Vec<Arc<Message>>,
    /// How often it was dispatched.
    pub attempts: u32,
    /// A person stopped it.
    pub stopped: bool,
    /// True if it may be at an agent; false if it was recalled.
    pub dispatched: bool,
    /// Which agent it was handed to, as [`Change::Dispatch`] had it.
    pub agent: Option<String>,
}

/// Every limit of the journal.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// Records that may wait at once.
    pub places_max: usize,
    /// Bytes of content that may wait at once.
    pub queue_bytes_max: usize,
    /// How long another program may hold the write lock, in milliseconds.
    pub busy_ms: u64,
    /// How often a bad disk is tried again, in milliseconds.
    pub retry_ms: u64,
    /// How often other programs' events are looked for while somebody cares, in milliseconds.
    pub watch_ms: u64,
    /// Events older than this are pruned, in milliseconds.
    pub event_age_ms: i64,
    /// Events are pruned from a journal with more bytes in use than this.
    pub bytes_max: u64,
    /// Claims live this long, in milliseconds.
    pub claim_age_ms: i64,
    /// How often there is a look for something to prune, in milliseconds.
    pub prune_every_ms: u64,
    /// Most pages of the file (tests: a full disk that is real).
    pub pages_max: Option<u32>,
    /// Planted faults (tests).
    pub faults: Faults,
}

impl Default for JournalOptions {
    fn default() -> Self {
        const DAY_MS: i64 = 24 * 60 * 60 * 1000;
        Self {
            places_max: 4096,
            queue_bytes_max: 256 * 1024 * 1024,
            busy_ms: 2000,
            retry_ms: 250,
            watch_ms: 250,
            event_age_ms: 14 * DAY_MS,
            bytes_max: 1024 * 1024 * 1024,
            claim_age_ms: 7 * DAY_MS,
            prune_every_ms: 60_000,
            pages_max: None,
            faults: Faults::default(),
        }
    }
}

/// Counters since the journal opened, and how it stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalStats {
    /// Transactions committed; each is one flush.
    pub commits: u64,
    /// Transactions that failed.
    pub failures: u64,
    /// Messages recorded.
    pub accepted: u64,
    /// Sends that were repeats.
    pub repeats: u64,
    /// Units committed.
    pub units: u64,
    /// Events published, other programs' included.
    pub events: u64,
    /// Events pruned.
    pub pruned: u64,
    /// Records in the largest transaction.
    pub batch_max: u64,
    /// Places taken now.
    pub places: u64,
    /// Bytes of content waiting now.
    pub queue_bytes: u64,
    /// Outcomes that wait for the disk.
    pub owed: u64,
    /// Pages in the write-ahead log.
    pub wal_pages: u64,
    /// The last commit, in microseconds.
    pub commit_us: u64,
    /// How often the log was emptied.
    pub checkpoints: u64,
    /// The longest of these, in microseconds: what a send may have waited behind.
    pub checkpoint_us_max: u64,
    /// Why nothing can be recorded now.
    pub trouble: Option<String>,
}
