//! The end of a turn, in the order of keys of each version and each kind of end.

use super::super::Profile;
use super::super::json::{Obj, strings};
use super::{Session, StopReason, fresh, usage};

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

impl ResultLine<'_> {
    /// JSON; an aborted turn has none.
    fn api_error_status(&self) -> Option<&'static str> {
        self.result.map(|_| if self.is_error { "400" } else { "null" })
    }
}

impl Session {
    /// `result` of a turn.
    pub fn result(&self, end: &ResultLine<'_>) -> String {
        match self.profile {
            Profile::Current => self.current_result(end),
            Profile::Old => self.old_result(end),
        }
    }

    fn current_result(&self, end: &ResultLine<'_>) -> String {
        let aborted = !end.errors.is_empty();
        // The turn's own message leads; folded ones follow it in the list.
        let leader = |obj: Obj, here: bool| obj.str_if("user_message_uuid", end.leader.filter(|_| here));
        let obj = Obj::new()
            .raw("duration_api_ms", end.duration_ms)
            .str_or_null("stop_reason", end.stop.word())
            .str("session_id", &self.id)
            .raw("total_cost_usd", cost(end.total_cost_usd))
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
            .when(aborted, |obj| leader(obj.raw("errors", strings(end.errors)), true))
            .str("type", "result")
            .raw("duration_ms", end.duration_ms)
            .str("uuid", &fresh())
            .raw("begun_message_ids", strings(end.message_ids));
        leader(obj, !aborted)
            .when(end.leader.is_some(), |obj| obj.raw("user_message_uuids", strings(end.uuids)))
            .raw("queued_turn_count", 0)
            .raw("result_index", end.index)
            .end()
    }

    fn old_result(&self, end: &ResultLine<'_>) -> String {
        let aborted = !end.errors.is_empty();
        Obj::new()
            .str("type", "result")
            .str("subtype", end.subtype)
            .when(!aborted, |obj| obj.raw("is_error", end.is_error))
            .raw_if("api_error_status", end.api_error_status())
            .raw("duration_ms", end.duration_ms)
            .raw("duration_api_ms", end.duration_ms)
            .when(aborted, |obj| obj.raw("is_error", end.is_error))
            .raw("num_turns", end.num_turns)
            .str_if("result", end.result)
            .str_or_null("stop_reason", end.stop.word())
            .str("session_id", &self.id)
            .raw("total_cost_usd", cost(end.total_cost_usd))
            .raw("usage", usage(end.output_tokens))
            .raw("modelUsage", "{}")
            .raw("permission_denials", "[]")
            .str("terminal_reason", end.terminal_reason)
            .str("fast_mode_state", "off")
            .raw_if("origin", end.origin)
            .str("uuid", &fresh())
            .when(aborted, |obj| obj.raw("errors", strings(end.errors)))
            .end()
    }

    /// `result` of a command that the agent runs without the model.
    pub fn command_result(&self, uuid: Option<&str>, total_cost_usd: f64, index: u64) -> String {
        let shared = |obj: Obj| {
            obj.raw("num_turns", 0)
                .when(self.profile == Profile::Old, |obj| obj.str("result", ""))
                .raw("stop_reason", "null")
                .str("session_id", &self.id)
                .raw("total_cost_usd", cost(total_cost_usd))
                .raw("usage", usage(0))
                .raw("modelUsage", "{}")
                .raw("permission_denials", "[]")
                .str("fast_mode_state", "off")
        };
        match self.profile {
            Profile::Current => {
                let obj = shared(Obj::new().raw("is_error", false).raw("duration_api_ms", 0));
                let obj = obj.raw("safety_stops", 0).str("subtype", "success").str("result", "");
                let obj = obj.str_if("user_message_uuid", uuid);
                let obj = match uuid {
                    Some(uuid) => obj.raw("user_message_uuids", strings(&[uuid])),
                    None => obj,
                };
                obj.str("type", "result")
                    .raw("duration_ms", 0)
                    .str("uuid", &fresh())
                    .raw("queued_turn_count", 0)
                    .raw("result_index", index)
                    .end()
            }
            Profile::Old => {
                let obj = Obj::new().str("type", "result").str("subtype", "success").raw("is_error", false);
                shared(obj.raw("duration_ms", 0).raw("duration_api_ms", 0)).str("uuid", &fresh()).end()
            }
        }
    }

    /// `result` of a process that was to go on with a session nobody has.
    pub fn no_session_result(&self, error: &str) -> String {
        Obj::new()
            .str("type", "result")
            .str("subtype", "error_during_execution")
            .raw("duration_ms", 0)
            .raw("duration_api_ms", 0)
            .raw("is_error", true)
            .raw("num_turns", 0)
            .raw("stop_reason", "null")
            .str("session_id", &fresh())
            .raw("total_cost_usd", 0)
            .raw("usage", usage(0))
            .raw("modelUsage", "{}")
            .raw("permission_denials", "[]")
            .str("uuid", &fresh())
            .raw("errors", strings(&[error]))
            .end()
    }
}

fn cost(dollars: f64) -> String {
    format!("{dollars:.5}")
}
