//! The broken promises that the checker can find, each with a word for tables and a sentence for a person.
//! Rule a change could break: each one has a row in the tests that plants it.

use std::fmt;

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the sentence that Display writes names every field")]
pub enum Violation {
    /// Answered 200, and nowhere to be found.
    Lost { message_id: String, uuid: String },
    /// In the transcripts more than once.
    Doubled { message_id: String, times: usize, answered: bool },
    /// Refused, and delivered all the same.
    RefusedDelivered { message_id: String },
    /// Repeats of one id were answered with different ids.
    RepeatsDiffer { message_id: String, first: String, later: String },
    /// A 200 whose event is not on the bus, or tells something else.
    AnswerWithoutEvent { message_id: String, event_id: i64 },
    /// One id, several acceptance events.
    AcceptedTwice { message_id: String, events: Vec<i64> },
    /// In the transcript, and no acceptance on the bus.
    DeliveredUnrecorded { message_id: String },
    /// In the transcript, and no dispatch on the bus.
    DeliveredUndispatched { message_id: String },
    /// A dispatch of a message that had not been accepted before it.
    DispatchedUnaccepted { turn: String, uuid: String },
    /// Delivered to another session than it was accepted for.
    WrongSession { message_id: String, accepted: String, delivered: String },
    /// The words changed on the way.
    TextChanged { message_id: String },
    /// A line with more or fewer photos than its messages had.
    PhotosChanged { session: String, sent: usize, delivered: usize },
    /// Two messages in the transcript against the order of their acceptance.
    OutOfOrder { session: String, first: String, second: String },
    /// Told as cleared, and in the transcript.
    ClearedButDelivered { message_id: String },
    /// Pending as failed, and in the transcript under our own uuid.
    FailedButDelivered { message_id: String },
    /// Still owed though the server says that it is idle.
    Stuck { session: String, uuid: String, state: String },
    /// A dispatched turn without an end.
    TurnWithoutEnd { turn: String },
    /// A turn that ended more often than it was dispatched.
    TurnEndedTwice { turn: String, events: Vec<i64> },
    /// A hole, a double or a step back in one subscriber's ids.
    EventOrder { subscriber: String, fault: String },
    /// One id told two things.
    EventDiffers { id: i64 },
    /// More than before, with nothing left to do.
    Leak { what: String, before: u64, after: u64 },
    /// The server still has work, or does not answer, long after the last client left.
    NotSettled { why: String },
}

impl Violation {
    /// One word for tables.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Violation::Lost { .. } => "lost",
            Violation::Doubled { .. } => "doubled",
            Violation::RefusedDelivered { .. } => "refused-delivered",
            Violation::RepeatsDiffer { .. } => "repeats-differ",
            Violation::AnswerWithoutEvent { .. } => "answer-without-event",
            Violation::AcceptedTwice { .. } => "accepted-twice",
            Violation::DeliveredUnrecorded { .. } => "delivered-unrecorded",
            Violation::DeliveredUndispatched { .. } => "delivered-undispatched",
            Violation::DispatchedUnaccepted { .. } => "dispatched-unaccepted",
            Violation::WrongSession { .. } => "wrong-session",
            Violation::TextChanged { .. } => "text-changed",
            Violation::PhotosChanged { .. } => "photos-changed",
            Violation::OutOfOrder { .. } => "out-of-order",
            Violation::ClearedButDelivered { .. } => "cleared-but-delivered",
            Violation::FailedButDelivered { .. } => "failed-but-delivered",
            Violation::Stuck { .. } => "stuck",
            Violation::TurnWithoutEnd { .. } => "turn-without-end",
            Violation::TurnEndedTwice { .. } => "turn-ended-twice",
            Violation::EventOrder { .. } => "event-order",
            Violation::EventDiffers { .. } => "event-differs",
            Violation::Leak { .. } => "leak",
            Violation::NotSettled { .. } => "not-settled",
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.kind())?;
        match self {
            Violation::Lost { message_id, uuid } => {
                write!(
                    f,
                    "{message_id} ({uuid}) was answered 200 and is neither delivered, pending, cleared nor failed"
                )
            }
            Violation::Doubled { message_id, times, answered } => {
                let how = if *answered { "answered 200" } else { "never answered" };
                write!(f, "{message_id} ({how}) was delivered {times} times")
            }
            Violation::RefusedDelivered { message_id } => {
                write!(f, "{message_id} was refused and delivered")
            }
            Violation::RepeatsDiffer { message_id, first, later } => {
                write!(f, "{message_id} was answered {first}, then {later}")
            }
            Violation::AnswerWithoutEvent { message_id, event_id } => {
                write!(f, "{message_id} was answered with event {event_id}, which is not its acceptance")
            }
            Violation::AcceptedTwice { message_id, events } => {
                write!(f, "{message_id} was accepted in events {events:?}")
            }
            Violation::DeliveredUnrecorded { message_id } => {
                write!(f, "{message_id} was delivered and its acceptance never told")
            }
            Violation::DeliveredUndispatched { message_id } => {
                write!(f, "{message_id} was delivered and its dispatch never told")
            }
            Violation::DispatchedUnaccepted { turn, uuid } => {
                write!(f, "turn {turn} dispatched {uuid} before its acceptance was told")
            }
            Violation::WrongSession { message_id, accepted, delivered } => {
                write!(f, "{message_id} was accepted for {accepted} and delivered to {delivered}")
            }
            Violation::TextChanged { message_id } => {
                write!(f, "{message_id} was delivered with other words")
            }
            Violation::PhotosChanged { session, sent, delivered } => {
                write!(f, "a line of {session} holds {delivered} photos, its messages had {sent}")
            }
            Violation::OutOfOrder { session, first, second } => {
                write!(f, "in {session}, {second} was delivered before {first}, which was accepted first")
            }
            Violation::ClearedButDelivered { message_id } => {
                write!(f, "{message_id} was told as cleared and delivered")
            }
            Violation::FailedButDelivered { message_id } => {
                write!(f, "{message_id} shows as failed and was delivered")
            }
            Violation::Stuck { session, uuid, state } => {
                write!(f, "{uuid} in {session} is {state} though the server is idle")
            }
            Violation::TurnWithoutEnd { turn } => {
                write!(f, "turn {turn} was dispatched and has no end")
            }
            Violation::TurnEndedTwice { turn, events } => {
                write!(f, "turn {turn} ended in events {events:?}")
            }
            Violation::EventOrder { subscriber, fault } => write!(f, "{subscriber}: {fault}"),
            Violation::EventDiffers { id } => write!(f, "event {id} told different things to different subscribers"),
            Violation::Leak { what, before, after } => write!(f, "{what}: {before} before, {after} after"),
            Violation::NotSettled { why } => f.write_str(why),
        }
    }
}
