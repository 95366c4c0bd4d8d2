//! What the agent says on stdout, but for results.

use super::super::Profile;
use super::super::json::{Obj, strings};
use super::{ApiMessage, Block, SIGNATURE, START_USAGE, Session, StopReason, answers, fresh, now, synthetic};

impl Session {
    /// `command_lifecycle`.
    pub fn lifecycle(&self, command: &str, state: &str) -> String {
        self.told(Obj::new().str("type", "command_lifecycle").str("command_uuid", command).str("state", state)).end()
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
        let obj = Obj::new().str("type", "system").str("subtype", "status").str("status", "requesting");
        match self.profile {
            Profile::Current => obj
                .str("session_id", &self.id)
                .str("uuid", &fresh())
                .when(!uuids.is_empty(), |obj| obj.raw("user_message_uuids", strings(uuids)))
                .end(),
            Profile::Old => self.told(obj).end(),
        }
    }

    /// The answer to a control request.
    pub fn control_response(&self, request_id: &str, still_queued: &[String]) -> String {
        let inner = Obj::new().str("subtype", "success").str("request_id", request_id);
        let inner = inner.when(self.profile == Profile::Current, |obj| {
            obj.raw("response", Obj::new().raw("still_queued", strings(still_queued)).end())
        });
        Obj::new().str("type", "control_response").raw("response", inner.end()).end()
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
        Obj::new().str("type", "control_request").str("request_id", request_id).raw("request", request).end()
    }

    fn stream(&self, message: &ApiMessage, event: String) -> Obj {
        self.stream_with(message, event, |obj| obj)
    }

    /// A frame of the model's stream; `more` stands before the message's id.
    fn stream_with(&self, message: &ApiMessage, event: String, more: impl FnOnce(Obj) -> Obj) -> Obj {
        let obj = Obj::new()
            .str("type", "stream_event")
            .raw("event", event)
            .str("session_id", &self.id)
            .raw("parent_tool_use_id", "null")
            .str("uuid", &fresh());
        more(obj).when(self.profile == Profile::Current, |obj| obj.str("api_message_id", &message.id))
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
        let event = Obj::new().str("type", "message_start").raw("message", start.end()).end();
        answers(self.stream_with(message, event, |obj| obj.raw("ttft_ms", ttft_ms)), &message.answers).end()
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
        self.any_delta(message, index, &Obj::new().str("type", kind).str(key, piece).end())
    }

    /// The signature that ends a thinking block.
    pub fn signature(&self, message: &ApiMessage, index: usize) -> String {
        self.any_delta(message, index, &Obj::new().str("type", "signature_delta").str("signature", SIGNATURE).end())
    }

    fn any_delta(&self, message: &ApiMessage, index: usize, delta: &str) -> String {
        let event = Obj::new().str("type", "content_block_delta").raw("index", index).raw("delta", delta).end();
        self.stream(message, event).end()
    }

    /// `content_block_stop`.
    pub fn block_stop(&self, message: &ApiMessage, index: usize) -> String {
        self.stream(message, Obj::new().str("type", "content_block_stop").raw("index", index).end()).end()
    }

    /// `message_delta`.
    pub fn message_delta(&self, message: &ApiMessage, stop: StopReason, output_tokens: u64) -> String {
        let delta = Obj::new().str_or_null("stop_reason", stop.word()).raw("stop_sequence", "null").end();
        let event = Obj::new()
            .str("type", "message_delta")
            .raw("delta", delta)
            .raw("usage", Obj::new().raw("output_tokens", output_tokens).end())
            .end();
        self.stream(message, event).end()
    }

    /// `message_stop`.
    pub fn message_stop(&self, message: &ApiMessage) -> String {
        self.stream(message, Obj::new().str("type", "message_stop").end()).end()
    }

    /// `assistant`, one block.
    pub fn assistant(&self, message: &ApiMessage, block: &Block, uuid: &str, aborted: bool) -> String {
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
        let current = self.profile == Profile::Current;
        let obj = Obj::new()
            .str("type", "assistant")
            .raw("message", inner.end())
            .raw("parent_tool_use_id", "null")
            .str("session_id", &self.id)
            .str("uuid", uuid)
            .when(current, |obj| obj.str("timestamp", &now()))
            .str("request_id", &message.request_id)
            .when(aborted && current, |obj| obj.raw("aborted", true));
        answers(obj, &message.answers).end()
    }

    /// `assistant` that carries the text of a failure.
    pub fn api_error(&self, text: &str, uuid: &str, uuids: &[String]) -> String {
        let current = self.profile == Profile::Current;
        let obj = Obj::new()
            .str("type", "assistant")
            .raw("message", synthetic(text))
            .raw("parent_tool_use_id", "null")
            .str("session_id", &self.id)
            .str("uuid", uuid)
            .when(current, |obj| obj.str("timestamp", &now()))
            .str("error", "unknown")
            .when(current, |obj| {
                let obj = obj.raw("is_api_error_message", true).raw("api_error_status", 400);
                obj.str("api_error_type", "invalid_request_error")
            });
        answers(obj, uuids).end()
    }

    /// The old version's `assistant` after a command that the model never saw.
    pub fn no_content(&self) -> String {
        Obj::new()
            .str("type", "assistant")
            .raw("message", synthetic("(no content)"))
            .raw("parent_tool_use_id", "null")
            .str("session_id", &self.id)
            .str("uuid", &fresh())
            .end()
    }

    /// `user`: a tool's result or words of the agent's own. `content` is JSON.
    pub fn user(&self, content: &str, uuid: &str, tool_use_result: Option<&str>) -> String {
        let obj = Obj::new()
            .str("type", "user")
            .raw("message", Obj::new().str("role", "user").raw("content", content).end())
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
        self.told(more(Obj::new().str("type", "system").str("subtype", subtype))).end()
    }

    /// `system/task_notification`: a background task has ended.
    pub fn task_notification(&self, task_id: &str, tool_id: &str) -> String {
        let obj = Obj::new()
            .str("type", "system")
            .str("subtype", "task_notification")
            .str("task_id", task_id)
            .str("tool_use_id", tool_id)
            .str("status", "completed")
            .str("output_file", "")
            .str("summary", "Background command \"background\" completed (exit code 0)");
        match self.profile {
            Profile::Current => self.told(obj).end(),
            Profile::Old => obj.str("session_id", &self.id).str("uuid", &fresh()).end(),
        }
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
}
