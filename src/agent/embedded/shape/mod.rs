//! The shapes of what the agent says and writes: one function per kind of line, keys in the order of the real agent.
//! Leaves when to say it to `turn`. Rule a change could break: in a user line of the transcript uuid and timestamp come
//! after the payload, as readers must expect.

mod result;
mod said;
mod written;

pub use result::ResultLine;
pub use written::{AssistantLine, UserLine};

use super::Profile;
use super::json::{Obj, strings};

/// What every line of a session shares.
#[derive(Debug, Clone)]
pub struct Session {
    /// Its id.
    pub id: String,
    /// The working directory.
    pub cwd: String,
    /// Which version is played.
    pub profile: Profile,
    /// What `--model` said.
    pub model: String,
    /// What `--permission-mode` said.
    pub permission_mode: String,
}

/// A fresh uuid.
pub fn fresh() -> String {
    uuid_text(crate::ids::MessageUuid::fresh())
}

fn uuid_text(uuid: crate::ids::MessageUuid) -> String {
    String::from(uuid)
}

/// `msg_` or another prefix with random letters.
pub fn api_id(prefix: &str) -> String {
    let letters: String = fresh().chars().filter(char::is_ascii_alphanumeric).take(22).collect();
    format!("{prefix}_{letters}")
}

/// The time now as the lines carry it.
pub fn now() -> String {
    crate::clock::rfc3339(crate::clock::now_ms())
}

const START_USAGE: &str =
    r#"{"input_tokens":100,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":1}"#;

fn usage(output_tokens: u64) -> String {
    format!(
        r#"{{"input_tokens":100,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":{output_tokens},"output_tokens_details":{{"thinking_tokens":0}},"server_tool_use":{{"web_search_requests":0,"web_fetch_requests":0}},"service_tier":"standard","cache_creation":{{"ephemeral_1h_input_tokens":0,"ephemeral_5m_input_tokens":0}},"inference_geo":"","iterations":[],"speed":"standard","fallback_credit":null}}"#
    )
}

/// The end of an assistant's message, or of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// Said all.
    EndTurn,
    /// Calls a tool.
    ToolUse,
    /// Was interrupted.
    None,
}

impl StopReason {
    fn word(self) -> Option<&'static str> {
        match self {
            StopReason::EndTurn => Some("end_turn"),
            StopReason::ToolUse => Some("tool_use"),
            StopReason::None => None,
        }
    }
}

/// One content block of an assistant.
#[derive(Debug, Clone)]
pub enum Block {
    /// Words.
    Text(String),
    /// Thoughts.
    Thinking(String),
    /// A tool call; `input` is JSON.
    Tool { id: String, name: String, input: String },
}

const SIGNATURE: &str = "c2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2ln";

impl Block {
    fn json(&self) -> String {
        match self {
            Block::Text(text) => Obj::new().str("type", "text").str("text", text).end(),
            Block::Thinking(text) => {
                Obj::new().str("type", "thinking").str("thinking", text).str("signature", SIGNATURE).end()
            }
            Block::Tool { id, name, input } => {
                Obj::new().str("type", "tool_use").str("id", id).str("name", name).raw("input", input).end()
            }
        }
    }

    fn empty_json(&self) -> String {
        match self {
            Block::Text(_) => r#"{"type":"text","text":""}"#.to_owned(),
            Block::Thinking(_) => r#"{"type":"thinking","thinking":"","signature":""}"#.to_owned(),
            Block::Tool { id, name, .. } => {
                Obj::new().str("type", "tool_use").str("id", id).str("name", name).raw("input", "{}").end()
            }
        }
    }
}

/// One assistant message of the model's interface: what its frames and lines share.
#[derive(Debug, Clone)]
pub struct ApiMessage {
    /// `msg_…`.
    pub id: String,
    /// `req_…`.
    pub request_id: String,
    /// The user lines it answers, for its first frames only.
    pub answers: Vec<String>,
}

impl ApiMessage {
    /// A fresh one.
    pub fn new(answers: Vec<String>) -> Self {
        Self { id: api_id("msg"), request_id: api_id("req"), answers }
    }
}

fn answers(obj: Obj, uuids: &[String]) -> Obj {
    match uuids.last() {
        Some(last) => obj.str("user_message_uuid", last).raw("user_message_uuids", strings(uuids)),
        None => obj,
    }
}

impl Session {
    fn version(&self) -> &'static str {
        self.profile.version()
    }

    fn told(&self, obj: Obj) -> Obj {
        obj.str("uuid", &fresh()).str("session_id", &self.id)
    }
}

fn synthetic(text: &str) -> String {
    Obj::new()
        .str("id", &fresh())
        .str("model", "<synthetic>")
        .str("role", "assistant")
        .str("stop_reason", "stop_sequence")
        .str("stop_sequence", "")
        .str("type", "message")
        .raw("usage", START_USAGE)
        .raw("content", format_args!("[{}]", Block::Text(text.to_owned()).json()))
        .raw("context_management", "null")
        .end()
}
