//! What the agent writes into the transcript: whole lines, each with its line feed.

use super::super::Profile;
use super::super::input::Incoming;
use super::super::json::{Obj, strings};
use super::{ApiMessage, Block, Session, StopReason, fresh, now, synthetic, usage};

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

impl Session {
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
        Obj::new().str_or_null("parentUuid", parent).raw("isSidechain", false)
    }

    /// `queue-operation`; `more` adds what the operation carries.
    pub fn queue_operation(&self, operation: &str, more: impl FnOnce(Obj) -> Obj) -> String {
        let obj = Obj::new().str("type", "queue-operation").str("operation", operation);
        let mut line = more(obj.str("timestamp", &now()).str("sessionId", &self.id)).end();
        line.push('\n');
        line
    }

    /// `last-prompt`.
    pub fn last_prompt(&self, words: &str, leaf: Option<&str>) -> String {
        let short: String = words.chars().take(200).collect();
        let obj = Obj::new().str("type", "last-prompt").str("lastPrompt", &short).str_if("leafUuid", leaf);
        let mut line = obj.str("sessionId", &self.id).end();
        line.push('\n');
        line
    }

    /// A user line of the transcript.
    pub fn user_line(&self, line: &UserLine<'_>) -> String {
        let message = Obj::new().str("role", "user").raw("content", line.content).end();
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
            .when(line.origin.is_some(), |obj| obj.raw("origin", line.origin.unwrap_or("null")))
            .str("promptSource", if line.origin.is_some() { "system" } else { "sdk" });
        self.tail(match self.profile {
            Profile::Old => obj,
            Profile::Current => obj
                .raw("sentAtMs", line.sent_at_ms)
                .str("rowSource", if line.origin.is_some() { "recorded" } else { "local" })
                .str("turnOrigin", if line.origin.is_some() { "task_notification" } else { "sdk" })
                .raw("turnPosition", format_args!(r#"{{"promptIndex":0,"turnIndex":{}}}"#, line.turn_index))
                .when(!line.merged.is_empty(), |obj| obj.raw("mergedSendUuids", strings(line.merged)))
                .when(line.origin.is_none(), |obj| obj.str("turnAttributionKey", line.uuid)),
        })
    }

    /// The companion of a line with photos, meant for the model only.
    pub fn companion_line(&self, parent: &str, prompt_id: &str, photos: usize, uuid: &str) -> String {
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
            .raw("message", Obj::new().str("role", "user").raw("content", content).end())
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
            .raw("message", Obj::new().str("role", "user").raw("content", content).end())
            .str("uuid", uuid)
            .str("timestamp", &now())
            .raw("toolUseResult", result)
            .str("sourceToolAssistantUUID", asked_by);
        self.tail(obj)
    }

    /// The note of an interruption as a user line. `content` is JSON.
    pub fn interruption_line(&self, parent: Option<&str>, prompt_id: &str, content: &str, uuid: &str) -> String {
        let obj = Self::head(parent)
            .str("promptId", prompt_id)
            .str("type", "user")
            .raw("message", Obj::new().str("role", "user").raw("content", content).end())
            .when(self.profile == Profile::Current, |obj| obj.str("rowSource", "harness"))
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
            .when(line.aborted && current, |obj| obj.raw("isAbortedMidStream", true))
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
            .when(self.profile == Profile::Current, |obj| obj.str("apiErrorType", "invalid_request_error"));
        self.tail(obj)
    }

    /// A user's words that were folded into a running turn.
    pub fn queued_command_line(&self, parent: Option<&str>, folded: &Incoming, uuid: &str) -> String {
        let at = crate::clock::rfc3339(folded.at_ms);
        let attachment = Obj::new()
            .str("type", "queued_command")
            .raw("prompt", &folded.content)
            .str_if("source_uuid", folded.uuid.as_deref())
            .str("commandMode", "prompt")
            .str("timestamp", &at)
            .when(self.profile == Profile::Current, |obj| obj.raw("hostsOwnTurn", true))
            .end();
        let obj = Self::head(parent).raw("attachment", attachment).str("type", "attachment").str("uuid", uuid);
        self.tail(obj.str("timestamp", &at))
    }

    /// What `/clear` leaves at the start of the new file; returns the lines and the uuid of the last.
    pub fn clear_lines(&self, command_uuid: &str) -> (String, String) {
        let (caveat, output) = (fresh(), fresh());
        let user = |content: &str| Obj::new().str("role", "user").str("content", content).end();
        let mut lines = Obj::new().str("type", "mode").str("mode", "normal").str("sessionId", &self.id).end();
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
        let obj = Obj::new().str("type", "cost-state").str("sessionId", &self.id);
        let mut line = obj.raw("totalCostUSD", format_args!("{total_cost_usd:.5}")).raw("modelUsage", "{}").end();
        line.push('\n');
        line
    }
}
