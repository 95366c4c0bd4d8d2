//! The shapes of what the agent says and writes: one function per kind of line, keys in the order of the real agent.
//! Leaves when to say it to `turn`. Rule a change could break: in a user line of the transcript uuid and timestamp come
//! after the payload, as readers must expect.

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
    let letters: String = fresh()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(22)
        .collect();
    format!("{prefix}_{letters}")
}

/// The time now as the lines carry it.
pub fn now() -> String {
    crate::clock::rfc3339(crate::clock::now_ms())
}

const START_USAGE: &str = r#"{"input_tokens":100,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":1}"#;

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
    Tool {
        id: String,
        name: String,
        input: String,
    },
}

const SIGNATURE: &str =
    "c2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2lnc2ln";

impl Block {
    fn json(&self) -> String {
        match self {
            Block::Text(text) => Obj::new().str("type", "text").str("text", text).end(),
            Block::Thinking(text) => Obj::new()
                .str("type", "thinking")
                .str("thinking", text)
                .str("signature", SIGNATURE)
                .end(),
            Block::Tool { id, name, input } => Obj::new()
                .str("type", "tool_use")
                .str("id", id)
                .str("name", name)
                .raw("input", input)
                .end(),
        }
    }

    fn empty_json(&self) -> String {
        match self {
            Block::Text(_) => r#"{"type":"text","text":""}"#.to_owned(),
            Block::Thinking(_) => r#"{"type":"thinking","thinking":"","signature":""}"#.to_owned(),
            Block::Tool { id, name, .. } => Obj::new()
                .str("type", "tool_use")
                .str("id", id)
                .str("name", name)
                .raw("input", "{}")
                .end(),
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
        Self {
            id: api_id("msg"),
            request_id: api_id("req"),
            answers,
        }
    }
}

fn answers(obj: Obj, uuids: &[String]) -> Obj {
    match uuids.last() {
        Some(last) => obj
            .str("user_message_uuid", last)
            .raw("user_message_uuids", strings(uuids)),
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

    /// `command_lifecycle`.
    pub fn lifecycle(&self, command: &str, state: &str) -> String {
        self.told(
            Obj::new()
                .str("type", "command_lifecycle")
                .str("command_uuid", command)
                .str("state", state),
        )
        .end()
    }

    /// `system/init`.
    pub fn init(&self) -> String {
        Obj::new()
            .str("type", "system")
            .str("subtype", "init")
            .str("cwd", &self.cwd)
            .str("session_id", &self.id)
            .raw("tools", r#"["Task","Bash","Read"]"#)
            .raw("mcp_servers", "[]")
            .str("model", &self.model)
            .str("permissionMode", &self.permission_mode)
            .str("claude_code_version", self.version())
            .str("uuid", &fresh())
            .end()
    }

    /// `system/status`: a request to the model is on its way.
    pub fn requesting(&self, uuids: &[String]) -> String {
        let obj = Obj::new()
            .str("type", "system")
            .str("subtype", "status")
            .str("status", "requesting");
        obj.str("session_id", &self.id)
            .str("uuid", &fresh())
            .when(!uuids.is_empty(), |obj| {
                obj.raw("user_message_uuids", strings(uuids))
            })
            .end()
    }

    /// The answer to a control request.
    pub fn control_response(&self, request_id: &str, still_queued: &[String]) -> String {
        let inner = Obj::new()
            .str("subtype", "success")
            .str("request_id", request_id);
        let inner = inner.when(self.profile == Profile::Current, |obj| {
            obj.raw(
                "response",
                Obj::new().raw("still_queued", strings(still_queued)).end(),
            )
        });
        Obj::new()
            .str("type", "control_response")
            .raw("response", inner.end())
            .end()
    }

    /// The question whether a tool may run.
    pub fn can_use_tool(&self, request_id: &str, tool: &Block) -> String {
        let Block::Tool { id, name, input } = tool else {
            return Obj::new().end();
        };
        let request = Obj::new()
            .str("subtype", "can_use_tool")
            .str("tool_name", name)
            .raw("input", input)
            .str("tool_use_id", id)
            .end();
        Obj::new()
            .str("type", "control_request")
            .str("request_id", request_id)
            .raw("request", request)
            .end()
    }

    fn stream(&self, message: &ApiMessage, event: String) -> Obj {
        self.stream_with(message, event, |obj| obj)
    }

    /// A frame of the model's stream; `more` stands before the message's id.
    fn stream_with(
        &self,
        message: &ApiMessage,
        event: String,
        more: impl FnOnce(Obj) -> Obj,
    ) -> Obj {
        let obj = Obj::new()
            .str("type", "stream_event")
            .raw("event", event)
            .str("session_id", &self.id)
            .raw("parent_tool_use_id", "null")
            .str("uuid", &fresh());
        more(obj).when(self.profile == Profile::Current, |obj| {
            obj.str("api_message_id", &message.id)
        })
    }

    /// `message_start`.
    pub fn message_start(&self, message: &ApiMessage, ttft_ms: u128) -> String {
        let start = Obj::new()
            .str("id", &message.id)
            .str("type", "message")
            .str("role", "assistant")
            .str("model", &self.model)
            .raw("content", "[]")
            .raw("stop_reason", "null")
            .raw("stop_sequence", "null")
            .raw("usage", START_USAGE);
        let event = Obj::new()
            .str("type", "message_start")
            .raw("message", start.end())
            .end();
        answers(
            self.stream_with(message, event, |obj| obj.raw("ttft_ms", ttft_ms)),
            &message.answers,
        )
        .end()
    }

    /// `content_block_start`.
    pub fn block_start(&self, message: &ApiMessage, index: usize, block: &Block) -> String {
        let event = Obj::new()
            .str("type", "content_block_start")
            .raw("index", index)
            .raw("content_block", block.empty_json())
            .end();
        self.stream(message, event).end()
    }

    /// `content_block_delta` with the next `piece` of `block`.
    pub fn delta(&self, message: &ApiMessage, index: usize, block: &Block, piece: &str) -> String {
        let (kind, key) = match block {
            Block::Text(_) => ("text_delta", "text"),
            Block::Thinking(_) => ("thinking_delta", "thinking"),
            Block::Tool { .. } => ("input_json_delta", "partial_json"),
        };
        self.any_delta(
            message,
            index,
            &Obj::new().str("type", kind).str(key, piece).end(),
        )
    }

    /// The signature that ends a thinking block.
    pub fn signature(&self, message: &ApiMessage, index: usize) -> String {
        self.any_delta(
            message,
            index,
            &Obj::new()
                .str("type", "signature_delta")
                .str("signature", SIGNATURE)
                .end(),
        )
    }

    fn any_delta(&self, message: &ApiMessage, index: usize, delta: &str) -> String {
        let event = Obj::new()
            .str("type", "content_block_delta")
            .raw("index", index)
            .raw("delta", delta)
            .end();
        self.stream(message, event).end()
    }

    /// `content_block_stop`.
    pub fn block_stop(&self, message: &ApiMessage, index: usize) -> String {
        self.stream(
            message,
            Obj::new()
                .str("type", "content_block_stop")
                .raw("index", index)
                .end(),
        )
        .end()
    }

    /// `message_delta`.
    pub fn message_delta(
        &self,
        message: &ApiMessage,
        stop: StopReason,
        output_tokens: u64,
    ) -> String {
        let delta = Obj::new()
            .str_or_null("stop_reason", stop.word())
            .raw("stop_sequence", "null")
            .end();
        let event = Obj::new()
            .str("type", "message_delta")
            .raw("delta", delta)
            .raw(
                "usage",
                Obj::new().raw("output_tokens", output_tokens).end(),
            )
            .end();
        self.stream(message, event).end()
    }

    /// `message_stop`.
    pub fn message_stop(&self, message: &ApiMessage) -> String {
        self.stream(message, Obj::new().str("type", "message_stop").end())
            .end()
    }

    /// `assistant`, one block.
    pub fn assistant(
        &self,
        message: &ApiMessage,
        block: &Block,
        uuid: &str,
        aborted: bool,
    ) -> String {
        let inner = Obj::new()
            .str("id", &message.id)
            .str("type", "message")
            .str("role", "assistant")
            .str("model", &self.model)
            .raw("content", format_args!("[{}]", block.json()))
            .raw("stop_reason", "null")
            .raw("stop_sequence", "null")
            .raw("usage", START_USAGE)
            .raw("context_management", "null");
        let obj = Obj::new()
            .str("type", "assistant")
            .raw("message", inner.end())
            .raw("parent_tool_use_id", "null")
            .str("session_id", &self.id)
            .str("uuid", uuid)
            .str("timestamp", &now())
            .str("request_id", &message.request_id)
            .when(aborted, |obj| obj.raw("aborted", true));
        answers(obj, &message.answers).end()
    }

    /// `assistant` that carries the text of a failure.
    pub fn api_error(&self, text: &str, uuid: &str, uuids: &[String]) -> String {
        let obj = Obj::new()
            .str("type", "assistant")
            .raw("message", synthetic(text))
            .raw("parent_tool_use_id", "null")
            .str("session_id", &self.id)
            .str("uuid", uuid)
            .str("timestamp", &now())
            .str("error", "unknown")
            .raw("is_api_error_message", true)
            .raw("api_error_status", 400)
            .str("api_error_type", "invalid_request_error");
        answers(obj, uuids).end()
    }

    /// `user`: a tool's result or words of the agent's own. `content` is JSON.
    pub fn user(&self, content: &str, uuid: &str, tool_use_result: Option<&str>) -> String {
        let obj = Obj::new()
            .str("type", "user")
            .raw(
                "message",
                Obj::new().str("role", "user").raw("content", content).end(),
            )
            .raw("parent_tool_use_id", "null")
            .str("session_id", &self.id)
            .str("uuid", uuid)
            .str("timestamp", &now());
        match tool_use_result {
            Some(result) => obj.raw("tool_use_result", result).end(),
            None => obj.end(),
        }
    }

    /// `system/<subtype>` about a background task; `more` adds what that subtype carries.
    pub fn task(&self, subtype: &str, more: impl FnOnce(Obj) -> Obj) -> String {
        self.told(more(
            Obj::new().str("type", "system").str("subtype", subtype),
        ))
        .end()
    }

    /// `conversation_reset`.
    pub fn conversation_reset(&self, uuid: &str) -> String {
        let reset = fresh();
        Obj::new()
            .str("type", "conversation_reset")
            .str("new_conversation_id", &reset)
            .str("uuid", &reset)
            .str("trigger", "clear")
            .str("user_message_uuid", uuid)
            .str("timestamp", &now())
            .str("session_id", &self.id)
            .end()
    }

    /// `result`.
    pub fn result(&self, end: &ResultLine<'_>) -> String {
        match self.profile {
            Profile::Current => self.current_result(end),
            Profile::Old => self.old_result(end),
        }
    }

    fn current_result(&self, end: &ResultLine<'_>) -> String {
        let obj = Obj::new()
            .raw("duration_api_ms", end.duration_ms)
            .str_or_null("stop_reason", end.stop.word())
            .str("session_id", &self.id)
            .raw("total_cost_usd", format_args!("{:.5}", end.total_cost_usd))
            .raw("usage", usage(end.output_tokens))
            .raw("modelUsage", "{}")
            .raw("permission_denials", "[]")
            .str("terminal_reason", end.terminal_reason)
            .str("fast_mode_state", "off")
            .raw_if("origin", end.origin)
            .raw("safety_stops", 0)
            .raw("is_error", end.is_error)
            .raw("num_turns", end.num_turns)
            .str("subtype", end.subtype)
            .raw_if("api_error_status", end.api_error_status())
            .str_if("result", end.result)
            .when(!end.errors.is_empty(), |obj| {
                obj.raw("errors", strings(end.errors))
            })
            .str("type", "result")
            .raw("duration_ms", end.duration_ms)
            .str("uuid", &fresh())
            .raw("begun_message_ids", strings(end.message_ids));
        // The turn's own message leads; folded ones follow it in the list.
        let obj = match end.leader {
            Some(leader) => obj
                .str("user_message_uuid", leader)
                .raw("user_message_uuids", strings(end.uuids)),
            None => obj,
        };
        obj.raw("queued_turn_count", 0)
            .raw("result_index", end.index)
            .end()
    }

    fn old_result(&self, end: &ResultLine<'_>) -> String {
        Obj::new()
            .str("type", "result")
            .str("subtype", end.subtype)
            .raw("is_error", end.is_error)
            .raw_if("api_error_status", end.api_error_status())
            .raw("duration_ms", end.duration_ms)
            .raw("duration_api_ms", end.duration_ms)
            .raw("num_turns", end.num_turns)
            .str_if("result", end.result)
            .str_or_null("stop_reason", end.stop.word())
            .str("session_id", &self.id)
            .raw("total_cost_usd", format_args!("{:.5}", end.total_cost_usd))
            .raw("usage", usage(end.output_tokens))
            .raw("modelUsage", "{}")
            .raw("permission_denials", "[]")
            .str("terminal_reason", end.terminal_reason)
            .str("fast_mode_state", "off")
            .raw_if("origin", end.origin)
            .when(!end.errors.is_empty(), |obj| {
                obj.raw("errors", strings(end.errors))
            })
            .str("uuid", &fresh())
            .end()
    }

    // ---- lines of the transcript

    fn tail(&self, obj: Obj) -> String {
        let mut line = obj
            .str("userType", "external")
            .str("entrypoint", "sdk-cli")
            .str("cwd", &self.cwd)
            .str("sessionId", &self.id)
            .str("version", self.version())
            .str("gitBranch", "HEAD")
            .end();
        line.push('\n');
        line
    }

    fn head(parent: Option<&str>) -> Obj {
        Obj::new()
            .str_or_null("parentUuid", parent)
            .raw("isSidechain", false)
    }

    /// `queue-operation`; `more` adds what the operation carries.
    pub fn queue_operation(&self, operation: &str, more: impl FnOnce(Obj) -> Obj) -> String {
        let obj = Obj::new()
            .str("type", "queue-operation")
            .str("operation", operation);
        let mut line = more(obj.str("timestamp", &now()).str("sessionId", &self.id)).end();
        line.push('\n');
        line
    }

    /// `last-prompt`.
    pub fn last_prompt(&self, words: &str, leaf: Option<&str>) -> String {
        let short: String = words.chars().take(200).collect();
        let obj = Obj::new()
            .str("type", "last-prompt")
            .str("lastPrompt", &short)
            .str_if("leafUuid", leaf);
        let mut line = obj.str("sessionId", &self.id).end();
        line.push('\n');
        line
    }

    /// A user line of the transcript.
    pub fn user_line(&self, line: &UserLine<'_>) -> String {
        let message = Obj::new()
            .str("role", "user")
            .raw("content", line.content)
            .end();
        let obj = Self::head(line.parent)
            .str("promptId", line.prompt_id)
            .str("type", "user")
            .raw("message", message)
            .str("uuid", line.uuid)
            .str("timestamp", &now());
        let photos = line.photos;
        let obj = obj.when(photos > 0, |obj| {
            let ids: Vec<String> = (1..=photos).map(|n| n.to_string()).collect();
            obj.raw("imagePasteIds", format_args!("[{}]", ids.join(",")))
        });
        let obj = obj
            .str("permissionMode", &self.permission_mode)
            .when(line.origin.is_some(), |obj| {
                obj.raw("origin", line.origin.unwrap_or("null"))
            })
            .str(
                "promptSource",
                if line.origin.is_some() {
                    "system"
                } else {
                    "sdk"
                },
            );
        self.tail(match self.profile {
            Profile::Old => obj,
            Profile::Current => obj
                .raw("sentAtMs", line.sent_at_ms)
                .str(
                    "rowSource",
                    if line.origin.is_some() {
                        "recorded"
                    } else {
                        "local"
                    },
                )
                .str(
                    "turnOrigin",
                    if line.origin.is_some() {
                        "task_notification"
                    } else {
                        "sdk"
                    },
                )
                .raw(
                    "turnPosition",
                    format_args!(r#"{{"promptIndex":0,"turnIndex":{}}}"#, line.turn_index),
                )
                .when(!line.merged.is_empty(), |obj| {
                    obj.raw("mergedSendUuids", strings(line.merged))
                })
                .when(line.origin.is_none(), |obj| {
                    obj.str("turnAttributionKey", line.uuid)
                }),
        })
    }

    /// The companion of a line with photos, meant for the model only.
    pub fn companion_line(
        &self,
        parent: &str,
        prompt_id: &str,
        photos: usize,
        uuid: &str,
    ) -> String {
        let blocks: Vec<String> = (1..=photos)
            .map(|n| {
                let text = format!("[Image: source: /tmp/agent-0/{}/images/{n}]", self.id);
                Obj::new().str("type", "text").str("text", &text).end()
            })
            .collect();
        let content = format!("[{}]", blocks.join(","));
        let obj = Self::head(Some(parent))
            .str("promptId", prompt_id)
            .str("type", "user")
            .raw(
                "message",
                Obj::new().str("role", "user").raw("content", content).end(),
            )
            .raw("isMeta", true)
            .raw("turnCompanion", true)
            .str("uuid", uuid)
            .str("timestamp", &now());
        self.tail(obj)
    }

    /// A tool's result as a user line. `content` and `result` are JSON.
    pub fn tool_result_line(
        &self,
        parent: Option<&str>,
        prompt_id: &str,
        content: &str,
        uuid: &str,
        result: &str,
        asked_by: &str,
    ) -> String {
        let obj = Self::head(parent)
            .str("promptId", prompt_id)
            .str("type", "user")
            .raw(
                "message",
                Obj::new().str("role", "user").raw("content", content).end(),
            )
            .str("uuid", uuid)
            .str("timestamp", &now())
            .raw("toolUseResult", result)
            .str("sourceToolAssistantUUID", asked_by);
        self.tail(obj)
    }

    /// The note of an interruption as a user line. `content` is JSON.
    pub fn interruption_line(
        &self,
        parent: Option<&str>,
        prompt_id: &str,
        content: &str,
        uuid: &str,
    ) -> String {
        let obj = Self::head(parent)
            .str("promptId", prompt_id)
            .str("type", "user")
            .raw(
                "message",
                Obj::new().str("role", "user").raw("content", content).end(),
            )
            .when(self.profile == Profile::Current, |obj| {
                obj.str("rowSource", "harness")
            })
            .str("uuid", uuid)
            .str("timestamp", &now());
        self.tail(obj)
    }

    /// An assistant line of the transcript: one block.
    pub fn assistant_line(&self, line: &AssistantLine<'_>) -> String {
        let message = Obj::new()
            .str("id", &line.message.id)
            .str("type", "message")
            .str("role", "assistant")
            .str("model", &self.model)
            .raw("content", format_args!("[{}]", line.block.json()))
            .str_or_null("stop_reason", line.stop.word())
            .raw("stop_sequence", "null")
            .raw("usage", usage(line.output_tokens))
            .raw("stop_details", "null")
            .end();
        let current = self.profile == Profile::Current;
        let obj = Self::head(line.parent)
            .raw("message", message)
            .when(current, |obj| obj.raw("apiBlockIndex", line.index))
            .str("requestId", &line.message.request_id)
            .str("type", "assistant")
            .str("uuid", line.uuid)
            .str("timestamp", &now())
            .when(line.aborted && current, |obj| {
                obj.raw("isAbortedMidStream", true)
            })
            .when(current, |obj| obj.str("madeBy", "model"));
        self.tail(obj)
    }

    /// The assistant line that carries the text of a failure.
    pub fn api_error_line(&self, parent: Option<&str>, text: &str, uuid: &str) -> String {
        let obj = Self::head(parent)
            .str("type", "assistant")
            .str("uuid", uuid)
            .str("timestamp", &now())
            .raw("message", synthetic(text))
            .str("error", "unknown")
            .raw("isApiErrorMessage", true)
            .raw("apiErrorStatus", 400)
            .str("apiErrorType", "invalid_request_error");
        self.tail(obj)
    }

    /// A user's words that were folded into a running turn.
    pub fn queued_command_line(
        &self,
        parent: Option<&str>,
        folded: &super::input::Incoming,
        uuid: &str,
    ) -> String {
        let at = crate::clock::rfc3339(folded.at_ms);
        let attachment = Obj::new()
            .str("type", "queued_command")
            .raw("prompt", &folded.content)
            .str_if("source_uuid", folded.uuid.as_deref())
            .str("commandMode", "prompt")
            .str("timestamp", &at)
            .when(self.profile == Profile::Current, |obj| {
                obj.raw("hostsOwnTurn", true)
            })
            .end();
        let obj = Self::head(parent)
            .raw("attachment", attachment)
            .str("type", "attachment")
            .str("uuid", uuid);
        self.tail(obj.str("timestamp", &at))
    }

    /// What `/clear` leaves at the start of the new file; returns the lines and the uuid of the last.
    pub fn clear_lines(&self, command_uuid: &str) -> (String, String) {
        let (caveat, output) = (fresh(), fresh());
        let user = |content: &str| Obj::new().str("role", "user").str("content", content).end();
        let mut lines = Obj::new()
            .str("type", "mode")
            .str("mode", "normal")
            .str("sessionId", &self.id)
            .end();
        lines.push('\n');
        lines += &self.tail(
            Self::head(None)
                .str("type", "user")
                .raw("message", user("<local-command-caveat>The command below was run directly, not sent to you as a request.</local-command-caveat>"))
                .raw("isMeta", true)
                .str("uuid", &caveat)
                .str("timestamp", &now()),
        );
        lines += &self.tail(
            Self::head(Some(&caveat))
                .str("type", "user")
                .raw("message", user("<command-name>/clear</command-name>\n            <command-message>clear</command-message>\n            <command-args></command-args>"))
                .str("uuid", command_uuid)
                .str("timestamp", &now()),
        );
        lines += &self.tail(
            Self::head(Some(command_uuid))
                .str("type", "system")
                .str("subtype", "local_command")
                .str("content", "<local-command-stdout></local-command-stdout>")
                .str("level", "info")
                .str("timestamp", &now())
                .str("uuid", &output)
                .raw("isMeta", false),
        );
        (lines, output)
    }

    /// `cost-state`, the last line of a graceful end.
    pub fn cost_state(&self, total_cost_usd: f64) -> String {
        let obj = Obj::new()
            .str("type", "cost-state")
            .str("sessionId", &self.id);
        let mut line = obj
            .raw("totalCostUSD", format_args!("{total_cost_usd:.5}"))
            .raw("modelUsage", "{}")
            .end();
        line.push('\n');
        line
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
        .raw(
            "content",
            format_args!("[{}]", Block::Text(text.to_owned()).json()),
        )
        .raw("context_management", "null")
        .end()
}

/// What a user line of the transcript holds.
#[derive(Debug, Clone, Copy)]
pub struct UserLine<'a> {
    /// The line before it.
    pub parent: Option<&'a str>,
    /// Shared by the lines of one prompt.
    pub prompt_id: &'a str,
    /// JSON.
    pub content: &'a str,
    /// Its uuid.
    pub uuid: &'a str,
    /// How many photos.
    pub photos: usize,
    /// JSON, if no person wrote it.
    pub origin: Option<&'a str>,
    /// When it was sent, in Unix milliseconds.
    pub sent_at_ms: i64,
    /// The user turn's number in the session, from 1.
    pub turn_index: u64,
    /// Uuids of the messages merged into it.
    pub merged: &'a [String],
}

/// What an assistant line of the transcript holds.
#[derive(Debug, Clone, Copy)]
pub struct AssistantLine<'a> {
    /// The line before it.
    pub parent: Option<&'a str>,
    /// The message it belongs to.
    pub message: &'a ApiMessage,
    /// The block.
    pub block: &'a Block,
    /// The block's number in the message.
    pub index: usize,
    /// Its uuid, the one of stdout.
    pub uuid: &'a str,
    /// How the message ended.
    pub stop: StopReason,
    /// Tokens of the message.
    pub output_tokens: u64,
    /// Interrupted in the middle.
    pub aborted: bool,
}

impl ResultLine<'_> {
    /// JSON; an aborted turn has none.
    fn api_error_status(&self) -> Option<&'static str> {
        self.result
            .map(|_| if self.is_error { "400" } else { "null" })
    }
}

/// What a result says.
#[derive(Debug, Clone, Copy)]
pub struct ResultLine<'a> {
    /// `success` or `error_during_execution`.
    pub subtype: &'a str,
    /// The one to look at.
    pub is_error: bool,
    /// How the last message ended.
    pub stop: StopReason,
    /// Why the turn ended.
    pub terminal_reason: &'a str,
    /// JSON, for a turn nobody asked for.
    pub origin: Option<&'a str>,
    /// Messages of the model in this turn.
    pub num_turns: u64,
    /// The answer; an aborted turn has none.
    pub result: Option<&'a str>,
    /// Details of an abort.
    pub errors: &'a [String],
    /// From the turn's start, in milliseconds.
    pub duration_ms: u128,
    /// Ids of the messages.
    pub message_ids: &'a [String],
    /// The uuid of the turn's user line.
    pub leader: Option<&'a str>,
    /// Every user message of the turn.
    pub uuids: &'a [String],
    /// Tokens said.
    pub output_tokens: u64,
    /// Of the process so far, in dollars.
    pub total_cost_usd: f64,
    /// Which result of the process, from 0.
    pub index: u64,
}
