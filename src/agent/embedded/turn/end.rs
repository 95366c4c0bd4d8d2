//! How a turn ends: with an answer, with a failure, by an interrupt.

use std::time::{Duration, Instant};

use super::super::directive::{Die, Interrupts};
use super::super::json::Obj;
use super::super::shape::{Block, ResultLine, StopReason, fresh};
use super::super::{Agent, Profile, Stop};
use super::{EXIT_DIED, TOOL_DENIED, Turn, old_flush_ms};

/// How late 2.1.197 writes the marker of an interrupt.
const OLD_MARKER_LAG: Duration = Duration::from_millis(100);

/// How a turn ends.
struct Ending<'a> {
    subtype: &'a str,
    terminal_reason: &'a str,
    is_error: bool,
    stop: StopReason,
    result: Option<&'a str>,
    errors: &'a [String],
}

impl Agent {
    /// The end of a turn that said all it had to say, or failed as the script wants.
    pub(super) fn finish(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        let error = turn.script.error.take();
        let failed = error.is_some();
        let mut result = Some(std::mem::take(&mut turn.answer));
        let mut errors = Vec::new();
        match error.as_deref() {
            Some("execution") => {
                result = None;
                errors.push("the script asked for this error".to_owned());
            }
            Some(text) => {
                let text = if text.is_empty() { "API Error: 400 the script asked for this error" } else { text };
                let uuid = fresh();
                self.say(self.session.api_error(text, &uuid, &turn.uuids))?;
                let parent = self.transcript.leaf.replace(uuid.clone());
                turn.final_lines = self.session.api_error_line(parent.as_deref(), text, &uuid);
                result = Some(text.to_owned());
            }
            None => {}
        }
        let lines = std::mem::take(&mut turn.final_lines);
        if turn.script.torn {
            self.transcript.tear(&lines);
            return Err(Stop::Exit(EXIT_DIED));
        }
        let old_ms = (self.session.profile == Profile::Old).then(|| old_flush_ms(&turn.prompt_id));
        let flush_ms = turn.script.flush_ms.or(old_ms.and_then(|ms| i64::try_from(ms).ok()));
        match flush_ms {
            Some(late_ms) if late_ms > 0 => {
                self.transcript.append_at(Instant::now() + Duration::from_millis(late_ms.unsigned_abs()), lines);
            }
            Some(early_ms) => {
                self.transcript.append(lines);
                // Too late for an interrupt: the answer is complete.
                self.interrupts = Some(Interrupts::OnlyAnswered);
                self.wait_until(Some(Instant::now() + Duration::from_millis(early_ms.unsigned_abs())))?;
            }
            None => self.transcript.append(lines),
        }
        for at in 0..turn.folded.len() {
            let uuid = turn.folded[at].uuid.clone();
            self.lifecycle(uuid.as_deref(), "completed")?;
        }
        self.end_turn(
            turn,
            &Ending {
                subtype: if errors.is_empty() { "success" } else { "error_during_execution" },
                terminal_reason: if failed { "api_error" } else { "completed" },
                is_error: failed,
                stop: if failed { StopReason::None } else { StopReason::EndTurn },
                result: result.as_deref(),
                errors: &errors,
            },
        )
    }

    /// The end of a turn that was interrupted.
    pub(super) fn abort(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        self.interrupted = false;
        self.interrupts = Some(Interrupts::OnlyAnswered);
        self.out.holding = false;
        let mut note = "[Request interrupted by user]";
        let mut terminal_reason = "aborted_streaming";
        let mut stop = StopReason::None;
        if turn.running_tool.is_some() {
            note = "[Request interrupted by user for tool use]";
            terminal_reason = "aborted_tools";
            stop = StopReason::ToolUse;
            self.tool_result(turn, TOOL_DENIED, true)?;
        }
        let open = turn.open.take();
        let mut lines = std::mem::take(&mut turn.final_lines);
        let mut open_index = None;
        if let Some(mut open) = open {
            if let Some((block, said)) = open.block.take() {
                open_index = Some(open.done.len());
                // Of a tool call that was cut, nothing is kept.
                let kept = match block {
                    Block::Text(text) => Some(Block::Text(text[..said].to_owned())),
                    Block::Thinking(text) => Some(Block::Thinking(text[..said].to_owned())),
                    Block::Tool { .. } => None,
                };
                if let Some(kept) = kept.filter(|_| said > 0) {
                    let uuid = fresh();
                    self.say(self.session.assistant(&open.message, &kept, &uuid, true))?;
                    open.done.push((kept, uuid));
                }
            }
            lines += &self.lines_of(&open, StopReason::None, turn.output_tokens, open_index.is_some());
            turn.open = Some(open);
        }
        let uuid = fresh();
        let content = format!("[{}]", Obj::new().str("type", "text").str("text", note).end());
        self.say(self.session.user(&content, &uuid, None))?;
        let parent = self.transcript.leaf.replace(uuid.clone());
        let marker = self.session.interruption_line(parent.as_deref(), &turn.prompt_id, &content, &uuid);
        let current = self.session.profile == Profile::Current;
        if current {
            self.transcript.append(lines + &marker);
        } else {
            self.transcript.append(lines);
            self.transcript.append_at(Instant::now() + OLD_MARKER_LAG, marker);
        }
        // The old version leaves its stream open.
        if let Some(open) = turn.open.take().filter(|_| current) {
            if let Some(index) = open_index {
                self.say(self.session.block_stop(&open.message, index))?;
            }
            self.say(self.session.message_delta(&open.message, StopReason::None, turn.output_tokens))?;
            self.say(self.session.message_stop(&open.message))?;
        }
        self.end_turn(
            turn,
            &Ending {
                subtype: "error_during_execution",
                terminal_reason,
                is_error: true,
                stop,
                result: None,
                errors: &["[ede_diagnostic] result_type=user last_content_type=n/a stop_reason=null".to_owned()],
            },
        )
    }

    fn end_turn(&mut self, turn: &mut Turn, end: &Ending<'_>) -> Result<(), Stop> {
        self.total_cost_usd += 0.0004 + 0.00002 * turn.output_tokens as f64;
        let result = self.session.result(&ResultLine {
            subtype: end.subtype,
            is_error: end.is_error,
            stop: end.stop,
            terminal_reason: end.terminal_reason,
            origin: turn.origin.as_deref(),
            num_turns: turn.message_ids.len().max(1) as u64,
            result: end.result,
            errors: end.errors,
            duration_ms: turn.began.elapsed().as_millis(),
            message_ids: &turn.message_ids,
            leader: turn.leader.as_deref().or(turn.uuids.last().map(String::as_str)),
            uuids: &turn.uuids,
            output_tokens: turn.output_tokens,
            total_cost_usd: self.total_cost_usd,
            index: self.results,
        });
        self.results += 1;
        self.last_failed = end.is_error;
        if crate::faults::is_armed("before_result") {
            // What was said before is out.
            self.out.flush()?;
            crate::faults::point("before_result");
        }
        self.say(result)?;
        if turn.script.die == Some(Die::After) {
            return Err(Stop::Exit(EXIT_DIED));
        }
        if let Some(bg_ms) = turn.script.bg_ms {
            let due = Instant::now() + Duration::from_millis(bg_ms);
            if let Some(task) = self.background.last_mut() {
                task.due = due;
            }
        }
        let folded: Vec<&str> = turn.folded.iter().filter_map(|message| message.uuid.as_deref()).collect();
        let state = if end.is_error { "cancelled" } else { "completed" };
        for at in 0..turn.uuids.len() {
            // Folded ones of a good turn were told before its result.
            if end.is_error || !folded.contains(&turn.uuids[at].as_str()) {
                let uuid = turn.uuids[at].clone();
                self.lifecycle(Some(&uuid), state)?;
            }
        }
        self.transcript.append(self.session.last_prompt(&turn.words, self.transcript.leaf.as_deref()));
        Ok(())
    }
}
