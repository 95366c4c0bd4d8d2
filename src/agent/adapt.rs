//! PURE. What becomes of each agent message: shown, told as a task, handled inside, skipped, or unknown.
//!
//! Leaves turns to `turns` and delivery to the session. Rule a change could break: [`adapt`] is the one exhaustive
//! match; a new kind of message does not compile until it has a fate here.

use serde::Serialize;
use serde_json::{Map, Value};

use super::scrub::{self, Strip};
use super::wire::{AgentMessage, Raw, Said, TaskPhase};

/// Longest text of a tool's result in a frame, in bytes; history shows 500 characters of it.
const OUTPUT_BYTES_MAX: usize = 16 * 1024;
/// Longest text in a task event, in bytes.
const TASK_TEXT_BYTES_MAX: usize = 4 * 1024;
/// Longest content in a frame, in bytes; history has the same limit for a line (WIRE, "Entries").
const CONTENT_BYTES_MAX: usize = 256 * 1024;

/// A message to show, as the `msg` of a `chat-turn` event. What the agent said keeps the agent's own key names.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Adapted {
    /// One whole content block of the answer.
    Assistant(Shown),
    /// A tool's result, or a note that the agent wrote itself.
    User(Shown),
    /// A delta. A `message_start` voids the deltas since the last whole block.
    StreamEvent {
        /// The model API's event, verbatim.
        event: Raw,
        /// Set when a subagent speaks.
        #[serde(rename = "parentToolUseId", skip_serializing_if = "Option::is_none")]
        parent_tool_use_id: Option<String>,
    },
    /// Why the agent waits.
    Status(Status),
}

/// A whole message.
#[derive(Debug, Clone, Serialize)]
pub struct Shown {
    /// The uuid of its line in the transcript.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Role and content.
    pub message: ShownMessage,
    /// Cut off by an interrupt.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub aborted: bool,
    /// Set when a subagent speaks: not the answer itself.
    #[serde(rename = "parentToolUseId", skip_serializing_if = "Option::is_none")]
    pub parent_tool_use_id: Option<String>,
}

/// The inner message, without usage and the like.
#[derive(Debug, Clone, Serialize)]
pub struct ShownMessage {
    /// The API's id: blocks of one answer share it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `assistant` or `user`.
    pub role: String,
    /// Text or blocks, photos taken out; a note when that is still over 256 KiB.
    pub content: Raw,
    /// The content itself where a note stands for it: an answer is acted on whole.
    #[serde(skip)]
    pub whole: Option<Raw>,
    /// Why the model stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<String>,
}

/// A status line for a person.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// `api_retry`.
    pub kind: &'static str,
    /// Which try failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u64>,
    /// Tries in all.
    #[serde(rename = "maxRetries", skip_serializing_if = "Option::is_none")]
    pub retries_max: Option<u64>,
    /// How long it waits before the next, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_delay_ms: Option<f64>,
    /// HTTP status of the model's API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_status: Option<u64>,
    /// Its word for what is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Adapted {
    /// The texts of a whole answer block, in order; none for deltas, tools' results and subagents.
    #[must_use]
    pub fn answer_texts(&self) -> Vec<String> {
        match self {
            Adapted::Assistant(shown) if shown.parent_tool_use_id.is_none() => {
                texts(shown.message.whole.as_ref().unwrap_or(&shown.message.content))
            }
            Adapted::Assistant(_) | Adapted::User(_) | Adapted::StreamEvent { .. } | Adapted::Status(_) => Vec::new(),
        }
    }
}

fn texts(content: &Raw) -> Vec<String> {
    match serde_json::from_str(content.get()) {
        Ok(Value::String(text)) => vec![text],
        Ok(Value::Array(blocks)) => blocks
            .iter()
            .filter(|block| block["type"] == "text")
            .filter_map(|block| block["text"].as_str().map(str::to_owned))
            .collect(),
        Ok(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) | Err(_) => Vec::new(),
    }
}

/// What becomes of a message.
#[derive(Debug)]
pub enum Fate {
    /// To be shown in its turn.
    Show(Adapted),
    /// To be told as a task event: `{phase, taskId, …}`.
    Task(Value),
    /// The pump and the turn tracker act on it; nobody else hears of it.
    Handled,
    /// Known, and of no use to anybody.
    Skip,
    /// Nobody knows it: told, counted, logged once per kind.
    Unknown(String),
    /// No message at all: counted; the reason.
    Unreadable(&'static str),
}

/// The one map from messages to fates.
#[must_use]
pub fn adapt(message: AgentMessage) -> Fate {
    match message {
        AgentMessage::Assistant(said) => {
            shown(said, "assistant", Strip::Photos).map_or(Fate::Skip, |s| Fate::Show(Adapted::Assistant(s)))
        }
        AgentMessage::User(said) => shown(said, "user", Strip::Outputs { text_bytes_max: OUTPUT_BYTES_MAX })
            .map_or(Fate::Skip, |s| Fate::Show(Adapted::User(s))),
        AgentMessage::StreamEvent { event, parent_tool_use_id } => {
            Fate::Show(Adapted::StreamEvent { event: stripped(event, Strip::Photos), parent_tool_use_id })
        }
        AgentMessage::ApiRetry { attempt, retries_max, retry_delay_ms, error_status, error } => {
            Fate::Show(Adapted::Status(Status {
                kind: "api_retry",
                attempt,
                retries_max,
                retry_delay_ms,
                error_status,
                error,
            }))
        }
        AgentMessage::Task { hidden: true, .. } => Fate::Skip,
        AgentMessage::Task { phase, hidden: false, raw } => Fate::Task(task(phase, &raw)),
        AgentMessage::Init { .. }
        | AgentMessage::ConversationReset
        | AgentMessage::CompactBoundary
        | AgentMessage::Result(_)
        | AgentMessage::Lifecycle { .. }
        | AgentMessage::ControlResponse { .. }
        | AgentMessage::ControlRequest { .. } => Fate::Handled,
        AgentMessage::Quiet => Fate::Skip,
        AgentMessage::Unknown { kind } => Fate::Unknown(kind),
        AgentMessage::Unreadable(why) => Fate::Unreadable(why),
    }
}

fn shown(said: Said, role: &str, strip: Strip) -> Option<Shown> {
    let content = stripped(said.content?, strip);
    let len = content.get().len();
    let (content, whole) = if len > CONTENT_BYTES_MAX { (note(len), Some(content)) } else { (content, None) };
    Some(Shown {
        uuid: said.uuid,
        message: ShownMessage {
            id: said.message_id,
            role: said.role.unwrap_or_else(|| role.to_owned()),
            content,
            whole,
            stop_reason: said.stop_reason,
        },
        aborted: said.aborted,
        parent_tool_use_id: said.parent_tool_use_id,
    })
}

fn note(len: usize) -> Raw {
    let text = format!(r#"[{{"type":"text","text":"[message too large to display: ~{} KB]"}}]"#, len / 1024);
    serde_json::value::RawValue::from_string(text).unwrap_or_else(|_| serde_json::value::RawValue::NULL.to_owned())
}

fn stripped(raw: Raw, what: Strip) -> Raw {
    let text = match scrub::strip(raw.get(), what) {
        std::borrow::Cow::Borrowed(_) => return raw,
        std::borrow::Cow::Owned(text) => text,
    };
    // The strip keeps JSON to JSON; should it ever not, an empty content is safer than a photo in every client.
    serde_json::value::RawValue::from_string(text).unwrap_or_else(|_| serde_json::value::RawValue::NULL.to_owned())
}

/// The keys of a task that are told, and what they are called on the wire.
const TASK_KEYS: &[(&str, &str)] = &[
    ("task_id", "taskId"),
    ("tool_use_id", "toolUseId"),
    ("task_type", "taskType"),
    ("description", "description"),
    ("status", "status"),
    ("summary", "summary"),
    ("error", "error"),
    ("last_tool_name", "lastToolName"),
    ("is_backgrounded", "isBackgrounded"),
];
/// States after which a task does nothing more.
const SETTLED: &[&str] = &["completed", "failed", "killed", "stopped", "cancelled", "error"];

fn task(phase: TaskPhase, raw: &Raw) -> Value {
    // Too deep or too odd for a plain parse: told without details.
    let whole: Value = serde_json::from_str(raw.get()).unwrap_or_default();
    let mut out = Map::new();
    out.insert("phase".into(), phase.word().into());
    for (from, to) in TASK_KEYS {
        // An update carries its news in `patch`.
        let value = [&whole["patch"][*from], &whole[*from]].into_iter().find(|v| !v.is_null());
        match value {
            Some(Value::String(text)) => {
                let mut text = text.clone();
                scrub::cut(&mut text, TASK_TEXT_BYTES_MAX);
                out.insert((*to).into(), text.into());
            }
            Some(value @ (Value::Bool(_) | Value::Number(_))) => {
                out.insert((*to).into(), value.clone());
            }
            Some(Value::Null | Value::Array(_) | Value::Object(_)) | None => {}
        }
    }
    let settled = phase == TaskPhase::Notification
        || out.get("status").and_then(Value::as_str).is_some_and(|status| SETTLED.contains(&status));
    out.insert("settled".into(), settled.into());
    Value::Object(out)
}

#[cfg(test)]
mod tests {
    use super::super::wire::parse;
    use super::*;

    fn fates(text: &str) -> Vec<Fate> {
        text.lines().map(|line| adapt(parse(line.as_bytes()))).collect()
    }

    fn json(fate: &Fate) -> String {
        match fate {
            Fate::Show(shown) => serde_json::to_string(shown).unwrap(),
            Fate::Task(_) | Fate::Handled | Fate::Skip | Fate::Unknown(_) | Fate::Unreadable(_) => {
                format!("{fate:?}")
            }
        }
    }

    #[test]
    fn every_frame_of_a_real_agent_is_small_and_json() {
        for (name, text) in crate::agent::fixtures::ALL {
            for fate in fates(text) {
                if let Fate::Show(shown) = &fate {
                    let frame = serde_json::to_string(shown).unwrap();
                    assert!(frame.len() < 8192, "{name}: {} bytes: {}", frame.len(), &frame[..200]);
                    serde_json::from_str::<Value>(&frame).unwrap();
                }
                assert!(!matches!(fate, Fate::Unknown(_) | Fate::Unreadable(_)), "{name}");
            }
        }
    }

    #[test]
    fn a_picture_that_a_tool_read_is_a_marker_in_the_frame() {
        let frames: Vec<_> = fates(crate::agent::fixtures::TOOLS).iter().map(json).collect();
        let marked = frames.iter().filter(|f| f.contains(scrub::MARKER)).count();
        assert_eq!(marked, 2);
        assert!(frames.iter().any(|f| f.contains(r#""content":"hi\nerr""#)));
        assert!(!frames.iter().any(|f| f.contains("iVBORw0KGgo")));
    }

    #[test]
    fn frames_have_the_shape_that_clients_read() {
        for (line, want) in [
            (
                r#"{"type":"assistant","message":{"role":"assistant","usage":{},"content":[{"type":"text","text":"hi"}]},"uuid":"u"}"#,
                r#"{"type":"assistant","uuid":"u","message":{"role":"assistant","content":[{"type":"text","text":"hi"}]}}"#,
            ),
            (
                r#"{"type":"user","message":{"content":"x"},"parent_tool_use_id":"t","aborted":true,"tool_use_result":{"a":1}}"#,
                r#"{"type":"user","message":{"role":"user","content":"x"},"aborted":true,"parentToolUseId":"t"}"#,
            ),
            (
                r#"{"type":"stream_event","event":{"type":"message_start","n":1e3},"uuid":"u"}"#,
                r#"{"type":"stream_event","event":{"type":"message_start","n":1e3}}"#,
            ),
            (
                r#"{"type":"system","subtype":"api_retry","attempt":1,"max_retries":10,"retry_delay_ms":591,"error_status":529,"error":"overloaded"}"#,
                r#"{"type":"status","kind":"api_retry","attempt":1,"maxRetries":10,"retryDelayMs":591.0,"errorStatus":529,"error":"overloaded"}"#,
            ),
        ] {
            assert_eq!(json(&adapt(parse(line.as_bytes()))), want);
        }
    }

    #[test]
    fn an_answer_too_large_to_show_is_still_acted_on_whole() {
        let line = format!(
            r#"{{"type":"assistant","message":{{"content":[{{"type":"text","text":"{}"}}]}}}}"#,
            "x".repeat(300 * 1024)
        );
        let Fate::Show(shown) = adapt(parse(line.as_bytes())) else { panic!() };
        let frame = serde_json::to_string(&shown).unwrap();
        assert!(frame.contains("[message too large to display: ~300 KB]") && frame.len() < 200, "{frame}");
        assert_eq!(shown.answer_texts()[0].len(), 300 * 1024);
    }

    #[test]
    fn a_background_task_is_told_until_it_settled() {
        let told: Vec<_> = fates(crate::agent::fixtures::BACKGROUND)
            .into_iter()
            .filter_map(|fate| if let Fate::Task(task) = fate { Some(task) } else { None })
            .collect();
        let brief: Vec<_> = told.iter().map(|t| (t["phase"].as_str().unwrap(), t["settled"] == true)).collect();
        assert_eq!(brief, [("started", false), ("updated", true), ("notification", true)]);
        assert!(told.iter().all(|t| t["taskId"] == "bed9dqmy4"));
        let hidden = br#"{"type":"system","subtype":"task_started","task_id":"x","ambient":true}"#;
        assert!(matches!(adapt(parse(hidden)), Fate::Skip));
    }

    #[test]
    fn only_the_agents_own_words_are_its_answer() {
        let answer = |line: &str| {
            let Fate::Show(shown) = adapt(parse(line.as_bytes())) else { panic!("{line}") };
            shown.answer_texts()
        };
        assert_eq!(
            answer(
                r#"{"type":"assistant","message":{"content":[{"type":"text","text":"a"},{"type":"tool_use"},{"type":"text","text":"\ud83d"}]}}"#
            ),
            ["a", "\u{fffd}"]
        );
        assert!(answer(r#"{"type":"assistant","parent_tool_use_id":"t","message":{"content":"sub"}}"#).is_empty());
        assert!(answer(r#"{"type":"user","message":{"content":"me"}}"#).is_empty());
    }
}
