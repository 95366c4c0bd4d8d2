//! PURE. What the agent says on stdout: bytes to lines, one line to one [`AgentMessage`].
//!
//! Leaves what becomes of a message to `adapt` and which turn it belongs to to `turns`. Rule a change could break:
//! [`parse`] is total. No type, key, value or byte of a foreign program may fail it, and what is forwarded is kept as
//! the text it came in, so that numbers, double keys and keys nobody knows survive.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::scrub;

/// Longest line that is read, in bytes; a longer one is skipped and counted. The largest seen is one picture of a tool,
/// twice (2 MB).
pub const LINE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Longest type name that is kept of an unknown message, in bytes.
const KIND_BYTES_MAX: usize = 64;
/// What the buffer of lines shrinks back to after a large line, in bytes.
const BUFFER_KEEP_BYTES: usize = 256 * 1024;

/// Cuts a stream of bytes into lines, each at most a limit long.
#[derive(Debug)]
pub struct Lines {
    buffer: Vec<u8>,
    line_bytes_max: usize,
    /// Inside a line that is over the limit: drop until its LF.
    skipping: bool,
    skipped: u64,
}

impl Default for Lines {
    fn default() -> Self {
        Self::new(LINE_BYTES_MAX)
    }
}

impl Lines {
    /// No bytes yet; lines over `line_bytes_max` will be skipped.
    #[must_use]
    pub fn new(line_bytes_max: usize) -> Self {
        Self { buffer: Vec::new(), line_bytes_max, skipping: false, skipped: 0 }
    }

    /// Takes `bytes` and calls `each` with every line that is now whole, without its LF.
    pub fn push(&mut self, mut bytes: &[u8], mut each: impl FnMut(&[u8])) {
        while let Some(at) = bytes.iter().position(|b| *b == b'\n') {
            let (head, rest) = (&bytes[..at], &bytes[at + 1..]);
            bytes = rest;
            if self.skipping {
                self.skipping = false;
            } else if self.buffer.len() + head.len() > self.line_bytes_max {
                self.skipped += 1;
            } else if self.buffer.is_empty() {
                each(head);
            } else {
                self.buffer.extend_from_slice(head);
                each(&self.buffer);
            }
            self.clear();
        }
        if self.skipping {
            return;
        }
        if self.buffer.len() + bytes.len() > self.line_bytes_max {
            self.skipped += 1;
            self.skipping = true;
            self.clear();
        } else {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// The stream ended: `each` gets what follows the last LF, if anything.
    pub fn finish(&mut self, each: impl FnOnce(&[u8])) {
        if !self.skipping && !self.buffer.is_empty() {
            each(&self.buffer);
        }
        self.skipping = false;
        self.clear();
    }

    /// Lines dropped so far because they were over the limit.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    fn clear(&mut self) {
        self.buffer.clear();
        self.buffer.shrink_to(BUFFER_KEEP_BYTES);
    }
}

/// A value of the agent, kept as the JSON text it came in. Its lone surrogates are replaced by U+FFFD, so that any
/// reader of JSON takes it.
pub type Raw = Box<RawValue>;

/// One message of the agent.
#[derive(Debug)]
pub enum AgentMessage {
    /// `system/init`: a turn begins.
    Init {
        /// The session as the agent calls it.
        session: Option<String>,
        /// The version of its program.
        version: Option<String>,
    },
    /// The conversation was cleared: the next init has another session id.
    ConversationReset,
    /// The conversation was compacted.
    CompactBoundary,
    /// `assistant`: one content block, whole.
    Assistant(Said),
    /// `user`: tool results and the agent's own notes.
    User(Said),
    /// `stream_event`: a delta.
    StreamEvent {
        /// The event, verbatim.
        event: Raw,
        /// The tool call whose subagent speaks.
        parent_tool_use_id: Option<String>,
    },
    /// `result`: a turn ended.
    Result(Box<TurnResult>),
    /// `system/task_*`: a background task.
    Task {
        /// What happened to it.
        phase: TaskPhase,
        /// Not meant for the conversation.
        hidden: bool,
        /// The whole message, verbatim.
        raw: Raw,
    },
    /// `system/api_retry`: the agent waits for the model's API.
    ApiRetry {
        /// Which try failed.
        attempt: Option<u64>,
        /// Tries in all.
        retries_max: Option<u64>,
        /// How long it waits, in milliseconds.
        retry_delay_ms: Option<f64>,
        /// HTTP status of the API.
        error_status: Option<u64>,
        /// The API's word for it.
        error: Option<String>,
    },
    /// `command_lifecycle`: what became of a line that we sent.
    Lifecycle {
        /// The line's uuid.
        command: String,
        /// Its state.
        state: CommandState,
    },
    /// The answer to a request of ours.
    ControlResponse {
        /// Our id of the request.
        request_id: Option<String>,
        /// Whether it was granted.
        success: bool,
    },
    /// A request of the agent that wants an answer.
    ControlRequest {
        /// Its id, for the answer.
        request_id: String,
        /// What it asks, e.g. `can_use_tool`.
        subtype: String,
        /// The tool, if it asks for one.
        tool_name: Option<String>,
        /// What the tool would be given; a yes has to repeat it.
        input: Option<Raw>,
    },
    /// Known, and nothing that a person or the server acts on.
    Quiet,
    /// A type that nobody knows.
    Unknown {
        /// `type` or `type/subtype`, cut to 64 bytes.
        kind: String,
    },
    /// Not a JSON object: the reason, without its content.
    Unreadable(&'static str),
}

/// An `assistant` or `user` message.
#[derive(Debug)]
pub struct Said {
    /// Its uuid, which is the uuid of its line in the transcript.
    pub uuid: Option<String>,
    /// The API's id of the message: blocks of one answer share it.
    pub message_id: Option<String>,
    /// `message.role`.
    pub role: Option<String>,
    /// `message.content`, verbatim: text or a list of blocks; absent when the agent left it out.
    pub content: Option<Raw>,
    /// `message.stop_reason`.
    pub stop_reason: Option<String>,
    /// Cut off by an interrupt.
    pub aborted: bool,
    /// Written by the agent itself, not by a tool.
    pub synthetic: bool,
    /// The tool call whose subagent speaks.
    pub parent_tool_use_id: Option<String>,
}

/// What a `result` says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TurnResult {
    /// The only word on whether it failed; the subtype may say `success` all the same.
    pub is_error: bool,
    /// `success`, `error_during_execution` and the like.
    pub subtype: String,
    /// Details of a failure; the text of `result` when there are none.
    pub errors: Vec<String>,
    /// The lines that it answers; `None` when the key is absent.
    pub user_message_uuids: Option<Vec<String>>,
    /// It answers something that no line of ours asked for.
    pub has_origin: bool,
    /// How long the turn took, in milliseconds.
    pub duration_ms: Option<u64>,
    /// Model turns in it.
    pub num_turns: Option<u64>,
    /// Cost of the process so far, in US dollars.
    pub total_cost_usd: Option<f64>,
}

/// What happened to a background task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskPhase {
    /// It runs.
    Started,
    /// It said something.
    Progress,
    /// Its state changed.
    Updated,
    /// It is over, and the agent was told.
    Notification,
}

impl TaskPhase {
    /// The word on the wire.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            TaskPhase::Started => "started",
            TaskPhase::Progress => "progress",
            TaskPhase::Updated => "updated",
            TaskPhase::Notification => "notification",
        }
    }
}

/// What became of a line that we sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandState {
    /// The agent has it.
    Queued,
    /// It is being answered.
    Started,
    /// It was answered, now or in an earlier life.
    Completed,
    /// It was taken back by an interrupt.
    Cancelled,
    /// A word nobody knows.
    Other,
}

/// Reads one line of stdout.
#[must_use]
pub fn parse(line: &[u8]) -> AgentMessage {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_start_matches('\u{feff}').trim();
    if text.is_empty() {
        return AgentMessage::Quiet;
    }
    if !text.starts_with('{') {
        return AgentMessage::Unreadable("not a JSON object");
    }
    match serde_json::Deserializer::from_str(text).deserialize_map(ReadFields) {
        Ok(fields) => message(&fields, text),
        Err(e) if e.is_eof() => AgentMessage::Unreadable("the line is torn"),
        Err(_) => AgentMessage::Unreadable("not JSON"),
    }
}

fn message(f: &Fields<'_>, whole: &str) -> AgentMessage {
    let kind = string(f.r#type).unwrap_or_default();
    let subtype = string(f.subtype);
    match (kind.as_str(), subtype.as_deref().unwrap_or("")) {
        ("system", "init") => {
            AgentMessage::Init { session: string(f.session_id), version: string(f.claude_code_version) }
        }
        ("conversation_reset", _) | ("system", "conversation_reset") => AgentMessage::ConversationReset,
        ("compact_boundary", _) | ("system", "compact_boundary") => AgentMessage::CompactBoundary,
        ("assistant", _) => AgentMessage::Assistant(said(f)),
        ("user", _) => AgentMessage::User(said(f)),
        ("stream_event", _) => match f.event {
            Some(event) => {
                AgentMessage::StreamEvent { event: own(event), parent_tool_use_id: string(f.parent_tool_use_id) }
            }
            None => AgentMessage::Quiet,
        },
        ("result", _) => AgentMessage::Result(Box::new(result(f, subtype.unwrap_or_default()))),
        ("system", "task_started") => task(f, TaskPhase::Started, whole),
        ("system", "task_progress") => task(f, TaskPhase::Progress, whole),
        ("system", "task_updated") => task(f, TaskPhase::Updated, whole),
        ("system", "task_notification") => task(f, TaskPhase::Notification, whole),
        ("system", "api_retry") => AgentMessage::ApiRetry {
            attempt: number(f.attempt),
            retries_max: number(f.max_retries),
            retry_delay_ms: float(f.retry_delay_ms),
            error_status: number(f.error_status),
            error: string(f.error),
        },
        ("command_lifecycle", _) => AgentMessage::Lifecycle {
            command: string(f.command_uuid).unwrap_or_default(),
            state: match string(f.state).as_deref() {
                Some("queued") => CommandState::Queued,
                Some("started") => CommandState::Started,
                Some("completed") => CommandState::Completed,
                Some("cancelled") => CommandState::Cancelled,
                _ => CommandState::Other,
            },
        },
        ("control_response", _) => {
            let inner = f.response.map(inner).unwrap_or_default();
            AgentMessage::ControlResponse {
                request_id: string(inner.request_id),
                success: string(inner.subtype).as_deref() == Some("success"),
            }
        }
        ("control_request", _) => {
            let inner = f.request.map(inner).unwrap_or_default();
            match string(f.request_id) {
                Some(request_id) => AgentMessage::ControlRequest {
                    request_id,
                    subtype: string(inner.subtype).unwrap_or_default(),
                    tool_name: string(inner.tool_name),
                    input: inner.input.map(own),
                },
                None => AgentMessage::Unknown { kind: "control_request without request_id".to_owned() },
            }
        }
        // The family of system notes grows with every version; none that we do not act on is worth a person's eye.
        ("system", sub) if !sub.is_empty() => AgentMessage::Quiet,
        (
            "control_cancel_request"
            | "tool_progress"
            | "auth_status"
            | "tool_use_summary"
            | "rate_limit_event"
            | "prompt_suggestion"
            | "keep_alive",
            _,
        ) => AgentMessage::Quiet,
        (_, sub) => AgentMessage::Unknown { kind: short_kind(f.r#type, &kind, sub) },
    }
}

fn short_kind(raw: Option<&RawValue>, kind: &str, subtype: &str) -> String {
    let mut text = match (raw, kind, subtype) {
        (None, _, _) => "no type".to_owned(),
        (Some(_), "", _) => "type is no text".to_owned(),
        (Some(_), kind, "") => kind.to_owned(),
        (Some(_), kind, sub) => format!("{kind}/{sub}"),
    };
    let mut end = text.len().min(KIND_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

fn said(f: &Fields<'_>) -> Said {
    let message = f.message.map(inner).unwrap_or_default();
    Said {
        uuid: string(f.uuid),
        message_id: string(message.id),
        role: string(message.role),
        content: message.content.map(own),
        stop_reason: string(message.stop_reason),
        aborted: truth(f.aborted),
        synthetic: truth(f.is_synthetic),
        parent_tool_use_id: string(f.parent_tool_use_id),
    }
}

fn task(f: &Fields<'_>, phase: TaskPhase, whole: &str) -> AgentMessage {
    let hidden = truth(f.skip_transcript) || truth(f.ambient);
    match RawValue::from_string(scrub::surrogates(whole).into_owned()) {
        Ok(raw) => AgentMessage::Task { phase, hidden, raw },
        Err(_) => AgentMessage::Unreadable("not JSON"),
    }
}

fn result(f: &Fields<'_>, subtype: String) -> TurnResult {
    let is_error = truth(f.is_error);
    let mut errors = f.errors.map(strings).unwrap_or_default();
    if is_error && errors.is_empty() {
        errors.extend(string(f.result).filter(|text| !text.is_empty()));
    }
    for error in &mut errors {
        scrub::cut(error, ERROR_BYTES_MAX);
    }
    errors.truncate(ERRORS_MAX);
    let user_message_uuids = match (f.user_message_uuids, f.user_message_uuid) {
        (Some(many), _) if many.get() != "null" => Some(strings(many)),
        (_, Some(one)) => string(Some(one)).map(|one| vec![one]),
        _ => None,
    };
    TurnResult {
        is_error,
        subtype,
        errors,
        user_message_uuids,
        has_origin: f.origin.is_some_and(|o| o.get() != "null"),
        duration_ms: number(f.duration_ms),
        num_turns: number(f.num_turns),
        total_cost_usd: float(f.total_cost_usd),
    }
}

/// Longest text that is kept of one error, in bytes.
const ERROR_BYTES_MAX: usize = 2048;
/// Errors kept of one result.
const ERRORS_MAX: usize = 16;

fn inner(raw: &RawValue) -> Fields<'_> {
    serde_json::Deserializer::from_str(raw.get()).deserialize_map(ReadFields).unwrap_or_default()
}

fn own(raw: &RawValue) -> Raw {
    match scrub::surrogates(raw.get()) {
        Cow::Borrowed(_) => raw.to_owned(),
        // Replacing an escape by another of the same length keeps it JSON.
        Cow::Owned(text) => RawValue::from_string(text).unwrap_or_else(|_| raw.to_owned()),
    }
}

fn string(raw: Option<&RawValue>) -> Option<String> {
    serde_json::from_str(&scrub::surrogates(raw?.get())).ok()
}

fn strings(raw: &RawValue) -> Vec<String> {
    let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(raw.get()) else {
        return Vec::new();
    };
    items.into_iter().map(|item| string(Some(item)).unwrap_or_else(|| item.get().to_owned())).collect()
}

fn truth(raw: Option<&RawValue>) -> bool {
    raw.is_some_and(|raw| raw.get() == "true")
}

fn number(raw: Option<&RawValue>) -> Option<u64> {
    let text = raw?.get();
    // A duration may come as 12.5; a float past the range of u64 saturates.
    text.parse().ok().or_else(|| float(raw).filter(|f| *f >= 0.0).map(|f| f as u64))
}

fn float(raw: Option<&RawValue>) -> Option<f64> {
    raw?.get().parse().ok().filter(|f: &f64| f.is_finite())
}

macro_rules! fields {
    ($($name:ident = $key:literal),* $(,)?) => {
        /// The keys that we look at, each as raw text; of a key that comes twice the last counts.
        #[derive(Default)]
        struct Fields<'a> { $($name: Option<&'a RawValue>),* }

        impl<'de> Visitor<'de> for ReadFields {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Fields::default();
                // A raw key, because a key with a lone surrogate is no Rust string.
                while let Some(key) = map.next_key::<&RawValue>()? {
                    let value = map.next_value::<&'de RawValue>()?;
                    match key.get() {
                        $(concat!("\"", $key, "\"") => fields.$name = Some(value),)*
                        _ => {}
                    }
                }
                Ok(fields)
            }
        }
    };
}

struct ReadFields;

fields! {
    r#type = "type", subtype = "subtype", session_id = "session_id", uuid = "uuid", message = "message",
    event = "event", aborted = "aborted", is_synthetic = "isSynthetic", parent_tool_use_id = "parent_tool_use_id",
    is_error = "is_error", errors = "errors", result = "result", user_message_uuids = "user_message_uuids",
    user_message_uuid = "user_message_uuid", origin = "origin", duration_ms = "duration_ms", num_turns = "num_turns",
    total_cost_usd = "total_cost_usd", skip_transcript = "skip_transcript", ambient = "ambient", attempt = "attempt",
    max_retries = "max_retries", retry_delay_ms = "retry_delay_ms", error_status = "error_status", error = "error",
    command_uuid = "command_uuid", state = "state", response = "response", request = "request",
    request_id = "request_id", tool_name = "tool_name", input = "input", id = "id", role = "role", content = "content",
    stop_reason = "stop_reason", claude_code_version = "claude_code_version",
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(line_bytes_max: usize, chunks: &[&str]) -> (Vec<String>, u64) {
        let mut lines = Lines::new(line_bytes_max);
        let mut out = Vec::new();
        for chunk in chunks {
            lines.push(chunk.as_bytes(), |line| out.push(String::from_utf8_lossy(line).into_owned()));
        }
        lines.finish(|line| out.push(format!("{}|end", String::from_utf8_lossy(line))));
        (out, lines.skipped())
    }

    #[test]
    fn lines_are_cut_at_lf_wherever_the_chunks_end() {
        assert_eq!(split(99, &["a\nb", "c\n", "\nd"]).0, ["a", "bc", "", "d|end"]);
        assert_eq!(split(99, &["a\r\n\u{2028}b\n"]).0, ["a\r", "\u{2028}b"]);
    }

    #[test]
    fn a_line_over_the_limit_is_skipped_and_counted_and_hides_no_neighbour() {
        assert_eq!(split(4, &["ok\ntoolong\nok2\n"]), (vec!["ok".into(), "ok2".into()], 1));
        assert_eq!(split(4, &["ok\ntoo", "long", "er\nok2\n", "12345"]), (vec!["ok".into(), "ok2".into()], 2));
        assert_eq!(split(4, &["1234\n12345\n"]), (vec!["1234".into()], 1));
    }

    #[test]
    fn every_line_of_a_real_agent_is_known() {
        for (name, text) in crate::agent::fixtures::ALL {
            let mut lines = Lines::default();
            let mut count = 0;
            lines.push(text.as_bytes(), |line| {
                count += 1;
                let message = parse(line);
                assert!(
                    !matches!(message, AgentMessage::Unknown { .. } | AgentMessage::Unreadable(_)),
                    "{name} line {count}: {message:?}"
                );
            });
            assert!(count > 5, "{name}");
        }
    }

    #[test]
    fn a_result_is_read_whatever_its_values_are() {
        let AgentMessage::Result(r) = parse(
            br#"{"is_error":true,"errors":["a",5,{"x":1},"\ud83d"],"duration_ms":12.5,"num_turns":"x","total_cost_usd":1e400,
            "user_message_uuids":"no list","origin":null,"type":"result"}"#
                .as_slice(),
        ) else {
            panic!()
        };
        assert_eq!(r.errors, ["a", "5", "{\"x\":1}", "\u{fffd}"]);
        assert_eq!((r.duration_ms, r.num_turns, r.total_cost_usd), (Some(12), None, None));
        assert_eq!((r.user_message_uuids, r.has_origin, r.is_error), (Some(vec![]), false, true));
    }

    #[test]
    fn a_failure_without_details_keeps_the_text_of_its_result() {
        let AgentMessage::Result(r) =
            parse(br#"{"type":"result","subtype":"success","is_error":true,"result":"API Error: 400"}"#)
        else {
            panic!()
        };
        assert_eq!(r.errors, ["API Error: 400"]);
        assert_eq!(r.user_message_uuids, None);
    }

    #[test]
    fn strange_lines_never_fail_and_say_what_they_are() {
        let nested = format!("{{\"type\":\"x\",\"a\":{}{}}}", "[".repeat(5000), "]".repeat(5000));
        let table: &[(&[u8], &str)] = &[
            (b"", "Quiet"),
            (b"  \r", "Quiet"),
            (b"hello", "Unreadable"),
            (b"[]", "Unreadable"),
            (b"null", "Unreadable"),
            (b"{", "Unreadable"),
            (b"{\"type\":\"assistant\",\"message\":{\"con", "Unreadable"),
            (b"{\"type\":NaN}", "Unreadable"),
            (b"\xff\xfe\x00", "Unreadable"),
            (b"{}", "Unknown"),
            (b"{\"type\":5}", "Unknown"),
            (b"{\"type\":\"brand_new\",\"n\":1e400,\"n\":123456789012345678901234567890}", "Unknown"),
            (nested.as_bytes(), "Unknown"),
            (b"{\"type\":\"a\",\"type\":\"keep_alive\"}", "Quiet"),
            (b"\xef\xbb\xbf{\"type\":\"keep_alive\"}", "Quiet"),
            (b"{\"type\":\"system\",\"subtype\":\"hook_started\"}", "Quiet"),
            (b"{\"type\":\"system\"}", "Unknown"),
            (b"{\"type\":\"assistant\",\"message\":5,\"uuid\":{}}", "Assistant"),
            (b"{\"type\":\"user\",\"bad\xff\":\"\xc3\"}", "User"),
            (b"{\"\\ud83d\":1,\"type\":\"user\"}", "User"),
            (b"{\"type\":\"stream_event\"}", "Quiet"),
            (b"{\"type\":\"result\"}", "Result"),
            (b"{\"type\":\"control_response\",\"response\":7}", "ControlResponse"),
            (b"{\"type\":\"control_request\",\"request\":{\"subtype\":\"can_use_tool\"}}", "Unknown"),
            (b"{\"type\":\"command_lifecycle\",\"state\":\"brand_new\"}", "Lifecycle"),
        ];
        for (line, want) in table {
            let got = format!("{:?}", parse(line));
            assert!(got.starts_with(want), "{} gave {got}, not {want}", String::from_utf8_lossy(line));
        }
    }

    #[test]
    fn what_is_forwarded_keeps_its_numbers_and_double_keys() {
        let AgentMessage::StreamEvent { event, .. } =
            parse(br#"{"event":{"n":123456789012345678901234567890,"a":1,"a":2,"f":1e400},"type":"stream_event"}"#)
        else {
            panic!()
        };
        assert_eq!(event.get(), r#"{"n":123456789012345678901234567890,"a":1,"a":2,"f":1e400}"#);
    }

    #[test]
    fn an_unknown_kind_is_cut_at_a_character() {
        let AgentMessage::Unknown { kind } = parse(format!("{{\"type\":\"{}\"}}", "ä".repeat(90)).as_bytes()) else {
            panic!()
        };
        assert_eq!(kind, "ä".repeat(32));
    }
}
