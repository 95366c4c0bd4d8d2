//! PURE. What goes into a session's machine and what comes out: facts, the effects that carry out a decision, and the
//! words for how a turn ended, what a transcript says of it and what a request did.

use std::sync::Arc;

use crate::ids::{MessageUuid, RunNo, TurnId};
use crate::inbox::Message;
use crate::lifecycle::InvariantError;

/// What happened, or what somebody asks.
#[derive(Debug, Clone)]
pub enum Fact<R> {
    /// The record of a message is committed.
    Recorded(MessageUuid),
    /// It is not, or the message was a repeat: the place is given up.
    NotRecorded(MessageUuid),
    /// A failed message was put back into the queue by hand, recorded.
    Requeued(Arc<Message>),
    /// The registry lends one of its live places for the run of this number.
    SlotGranted(RunNo),
    /// The start returned a run.
    Started(R),
    /// The run said something for the first time.
    Spoke(RunNo),
    /// `dispatched` is committed.
    Dispatched(TurnId),
    /// `dispatched` could not be recorded.
    DispatchRefused(TurnId),
    /// The agent began a turn nobody asked for.
    AgentTurnBegan(RunNo, TurnId),
    /// A turn got its result, and the transcript holds it.
    TurnEnded(RunNo, TurnId),
    /// An interrupt brought no result in time.
    InterruptTimedOut(RunNo),
    /// A run ended and its agent is reaped.
    RunEnded {
        /// Which.
        run: RunNo,
        /// It had said something.
        spoke: bool,
        /// It said in words we know that it does not start, and so read nothing of what it was given.
        refused: bool,
        /// Why it could not start, in words.
        error: Option<String>,
        /// The conversation cannot be resumed, ever: what waits fails with `error`.
        hopeless: bool,
    },
    /// The transcript was searched for a turn.
    LookedUp(TurnId, Seen),
    /// The transcript was searched for what waits (after a start of the server, or because somebody else wrote to it): what
    /// of it was delivered already, and of what nobody can know.
    QueueLookedUp {
        /// Turns of it that the agent recorded, in order.
        found: Vec<FoundTurn>,
        /// Messages that may have been part of one.
        unsure: Vec<MessageUuid>,
        /// Why nobody can know it of those.
        why: Unknown,
    },
    /// A pause is over.
    RetryDue,
    /// A person asks to stop.
    Stop,
    /// The run of a thread is closed, by its pool or a person: what waits is cleared; Ready or Streaming until the run
    /// is reaped, then Idle, without Stopping.
    Park,
    /// A person asks for a fresh run.
    Restart,
    /// A person asks to end the turn.
    Interrupt,
    /// The server goes down: finish what is in flight, begin nothing.
    Drain,
}

/// What the transcript says of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Recorded, and answered to the end.
    Finished,
    /// Recorded, the answer broke off.
    Unfinished,
    /// Not there: safe to send again.
    Absent,
    /// Nobody can know.
    Unknowable(Unknown),
}

/// Why nobody can know whether an agent has a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// This program, in this home, was never seen to keep our messages' ids where we read.
    NotProven,
    /// There was a transcript, and it is gone.
    Gone,
    /// The transcript is no longer the one that the agent wrote: what was in it before is not there.
    NotTheSameFile,
    /// The transcript is there and cannot be read, or not far enough.
    Unreadable,
}

impl Unknown {
    /// In words for a person.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Unknown::NotProven => "this agent was never seen to keep our messages in its transcript",
            Unknown::Gone => "the transcript of this conversation is gone",
            Unknown::NotTheSameFile => "the transcript was shortened or is another file than before",
            Unknown::Unreadable => "the transcript cannot be read",
        }
    }

    pub(super) fn error(self) -> String {
        format!("nobody can know whether the agent had the message ({}); retry by hand", self.words())
    }
}

/// A turn of waiting messages that the agent turned out to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundTurn {
    /// Its messages, in order; the first one's id is the turn's.
    pub members: Vec<MessageUuid>,
    /// It was answered to its end.
    pub finished: bool,
}

/// How a turn ended, for the ledger and the bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndHow {
    /// The agent said `result`.
    Result,
    /// No result, but the transcript holds the whole answer.
    Recovered,
    /// Recorded by the agent, then it died: done, told as interrupted.
    BrokeOff,
    /// Never recorded: goes out again with the same members and id.
    Again,
    /// Never recorded too often: its members go out one by one.
    Split,
    /// Stopped before the agent recorded it: cleared.
    Cleared,
    /// Given up, with the reason.
    Failed(String),
}

/// What the session must carry out, in order.
#[derive(Debug, Clone)]
pub enum Effect<R> {
    /// Ask the registry for a live place.
    WantSlot,
    /// Give a live place back, or withdraw the wish for one.
    SlotFree,
    /// Start the run of this number.
    Start(RunNo),
    /// Record `dispatched`, then report [`Fact::Dispatched`].
    Dispatch {
        /// The turn.
        turn: TurnId,
        /// Its messages, in order.
        members: Vec<Arc<Message>>,
        /// 1 for the first try.
        attempt: u32,
    },
    /// Hand the turn to the run.
    Send {
        /// To which run.
        run: R,
        /// The turn.
        turn: TurnId,
        /// Its messages, in order.
        members: Vec<Arc<Message>>,
    },
    /// Ask the agent to end its turn.
    AskInterrupt(R),
    /// Close the run.
    Close(R),
    /// Record that a person stopped this turn: whatever crashes, it is not sent again.
    MarkStopped(TurnId),
    /// Search the transcript for the turn, then report [`Fact::LookedUp`].
    LookUp {
        /// The turn.
        turn: TurnId,
        /// Its messages.
        members: Vec<Arc<Message>>,
    },
    /// Search the transcript for these waiting messages, then report [`Fact::QueueLookedUp`].
    LookUpQueue(Vec<Arc<Message>>),
    /// Waiting messages turned out to be delivered already, as one turn.
    Found {
        /// The turn.
        turn: TurnId,
        /// Its messages, in order.
        members: Vec<Arc<Message>>,
        /// It was answered to its end.
        finished: bool,
    },
    /// A turn of ours is over, or this try of it.
    End {
        /// The turn.
        turn: TurnId,
        /// Its messages.
        members: Vec<Arc<Message>>,
        /// How.
        how: EndHow,
    },
    /// A turn of the agent's own got its result (`true`) or broke off.
    AgentTurnEnded(TurnId, bool),
    /// Messages left the queue without having been dispatched.
    Cleared(Vec<Arc<Message>>),
    /// Waiting messages failed for good.
    Failed(Vec<Arc<Message>>, String),
    /// A start failed; tells whether it is tried again by itself.
    StartFailed {
        /// In words.
        error: String,
        /// False: the queue waits for the next send or a restart.
        will_retry: bool,
    },
    /// Report [`Fact::RetryDue`] after so many milliseconds.
    RetryIn(u64),
    /// The phase or the queue changed: tell it.
    Changed,
    /// A bug of ours was contained: the run closes, the queue is kept.
    Bug(InvariantError),
}

/// What a request did, as the wire says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Did {
    /// The agent was asked, or will be.
    Asked,
    /// Something was stopped or cleared.
    Stopped,
    /// A run closes, or a waiting queue is tried again.
    Restarted,
    /// There was nothing to do.
    Nothing,
}
