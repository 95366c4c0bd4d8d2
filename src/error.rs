//! The one error type: a code word a client can act on, and context added on the way up. Knows no HTTP: the status of
//! each code is in `http/reply.rs`. Rule a change could break: messages name the value and the allowed range, and never
//! hold a token, a prompt or a transcript line.

use std::fmt;

/// What went wrong, as the `code` word of an error answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// The request line, head or framing is not HTTP/1.1 as we speak it.
    BadRequest,
    /// The body is not JSON, or not an object.
    BadJson,
    /// A field is missing, of the wrong type or out of its range; the text names it.
    BadField,
    /// No or a wrong bearer token.
    Unauthorized,
    /// The Host header is none of ours.
    ForbiddenHost,
    /// A page of another origin asks.
    ForbiddenOrigin,
    /// No such path.
    UnknownPath,
    /// The path is right, the method is not.
    MethodNotAllowed,
    /// A session id that was never known.
    UnknownSession,
    /// No such turn, message or photo.
    NotFound,
    /// The session was known, its transcript is gone.
    SessionGone,
    /// The same messageId with other content.
    ContentConflict,
    /// The session belongs to a thread of an outside channel.
    ThreadSession,
    /// Only a failed message can be retried or discarded.
    NotFailed,
    /// The other thread's turn did not end before the deadline.
    Busy,
    /// A body without a length that we could bound.
    LengthRequired,
    /// The body, a photo or a text is over its limit.
    TooLarge,
    /// Not `Content-Type: application/json`.
    NotJson,
    /// The byte range lies outside the photo.
    BadRange,
    /// The session's queue is at its limit.
    QueueFull,
    /// The request head is over its limit.
    HeadTooLarge,
    /// The WebSocket handshake is missing or of another version.
    UpgradeRequired,
    /// The client took too long to send its request.
    RequestTimeout,
    /// The message is not known to be recorded; repeat it with the same messageId.
    CannotRecord,
    /// The server is going down and takes no new messages.
    ShuttingDown,
    /// Too many requests or connections at once; try again later.
    Overloaded,
    /// The route did not answer before its deadline.
    Timeout,
    /// A transcript exists and cannot be read.
    Unreadable,
    /// An encoding or feature of HTTP that we do not speak.
    NotImplemented,
    /// The agent cannot be started, in words a person can act on.
    AgentUnavailable,
    /// A fault of ours.
    Internal,
}

impl Code {
    /// Every code, for the table in the crate docs and its test.
    pub const ALL: &'static [Code] = &[
        Code::BadRequest,
        Code::BadJson,
        Code::BadField,
        Code::Unauthorized,
        Code::ForbiddenHost,
        Code::ForbiddenOrigin,
        Code::UnknownPath,
        Code::MethodNotAllowed,
        Code::UnknownSession,
        Code::NotFound,
        Code::SessionGone,
        Code::ContentConflict,
        Code::ThreadSession,
        Code::NotFailed,
        Code::Busy,
        Code::LengthRequired,
        Code::TooLarge,
        Code::NotJson,
        Code::BadRange,
        Code::QueueFull,
        Code::HeadTooLarge,
        Code::UpgradeRequired,
        Code::RequestTimeout,
        Code::CannotRecord,
        Code::ShuttingDown,
        Code::Overloaded,
        Code::Timeout,
        Code::Unreadable,
        Code::NotImplemented,
        Code::AgentUnavailable,
        Code::Internal,
    ];

    /// The word on the wire.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Code::BadRequest => "bad_request",
            Code::BadJson => "bad_json",
            Code::BadField => "bad_field",
            Code::Unauthorized => "unauthorized",
            Code::ForbiddenHost => "forbidden_host",
            Code::ForbiddenOrigin => "forbidden_origin",
            Code::UnknownPath => "unknown_path",
            Code::MethodNotAllowed => "method_not_allowed",
            Code::UnknownSession => "unknown_session",
            Code::NotFound => "not_found",
            Code::SessionGone => "session_gone",
            Code::ContentConflict => "content_conflict",
            Code::ThreadSession => "thread_session",
            Code::NotFailed => "not_failed",
            Code::Busy => "busy",
            Code::LengthRequired => "length_required",
            Code::TooLarge => "too_large",
            Code::NotJson => "not_json",
            Code::BadRange => "bad_range",
            Code::QueueFull => "queue_full",
            Code::HeadTooLarge => "head_too_large",
            Code::UpgradeRequired => "upgrade_required",
            Code::RequestTimeout => "request_timeout",
            Code::CannotRecord => "cannot_record",
            Code::ShuttingDown => "shutting_down",
            Code::Overloaded => "overloaded",
            Code::Timeout => "timeout",
            Code::Unreadable => "unreadable",
            Code::NotImplemented => "not_implemented",
            Code::AgentUnavailable => "agent_unavailable",
            Code::Internal => "internal",
        }
    }
}

/// A failure with its code and a text for a person.
#[derive(Debug, Clone)]
pub struct Error {
    code: Code,
    text: String,
}

/// Result with our [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failure; `text` is lower case and names the value and the allowed range.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// A fault of ours or of the machine.
    pub fn internal(text: impl Into<String>) -> Self {
        Self::new(Code::Internal, text)
    }

    /// The same failure with what was being done in front: `context: text`.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.text = format!("{context}: {}", self.text);
        self
    }

    /// Its code.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// The text for a person.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Self {
        Self::internal(e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_own_word() {
        let words: std::collections::BTreeSet<_> = Code::ALL.iter().map(|c| c.word()).collect();
        assert_eq!(words.len(), Code::ALL.len());
    }
}
