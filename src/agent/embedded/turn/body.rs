//! Between init and the result: thoughts, the tool and what comes meanwhile, the answer.

use std::time::{Duration, Instant};

use super::super::directive::Die;
use super::super::json::Obj;
use super::super::shape::{ApiMessage, AssistantLine, Block, StopReason, api_id, fresh};
use super::super::{Agent, Background, Profile, Stop};
use super::answer::Pieces;
use super::{EXIT_DIED, OpenMessage, TOOL_DENIED, Turn, task_id};

/// Deltas without a pause between two looks at stdin.
const DELTAS_PER_GLANCE: usize = 64;

impl Agent {
    /// Everything between init and the result.
    pub(super) fn body(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        self.wait_until(Some(Instant::now() + Duration::from_millis(turn.script.delay_ms)))?;
        if turn.script.die == Some(Die::Before) {
            return Err(Stop::Exit(EXIT_DIED));
        }
        if turn.script.error.is_some() {
            return Ok(());
        }
        let thoughts = turn.script.think.take().map(|text| {
            Block::Thinking(if text.is_empty() { "I think about it for a while.".to_owned() } else { text })
        });
        let uses_tool = turn.script.tool.is_some() || turn.script.ask || turn.script.bg_ms.is_some();
        if uses_tool {
            self.tool_message(turn, thoughts)?;
            self.open_message(turn)?;
        } else {
            self.open_message(turn)?;
            if let Some(thoughts) = thoughts {
                self.say_block(turn, thoughts, 3, false)?;
                self.close_block(turn)?;
            }
        }
        let answer = turn.answer();
        let deltas = match (turn.script.flood, turn.script.deltas) {
            (Some(flood), _) => flood,
            (None, Some(deltas)) => deltas,
            (None, None) => (answer.len() / 1024).clamp(3, 64) as u64,
        };
        self.say_block(turn, Block::Text(answer), usize::try_from(deltas).unwrap_or(usize::MAX), true)?;
        if turn.script.hang {
            self.wait_until(None)?;
        }
        self.close_block(turn)?;
        self.close_message(turn, StopReason::EndTurn)
    }

    /// The message that calls a tool, and the tool's result.
    fn tool_message(&mut self, turn: &mut Turn, thoughts: Option<Block>) -> Result<(), Stop> {
        self.open_message(turn)?;
        if let Some(thoughts) = thoughts {
            self.say_block(turn, thoughts, 3, false)?;
            self.close_block(turn)?;
        }
        let name = turn.script.tool.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| "Bash".to_owned());
        let input = Obj::new()
            .str("command", &format!("sleep {}; echo done", turn.script.tool_ms as f64 / 1000.0))
            .str("description", "background")
            .when(turn.script.bg_ms.is_some(), |obj| obj.raw("run_in_background", true));
        let id = api_id("toolu");
        let tool = Block::Tool { id: id.clone(), name, input: input.end() };
        self.say_block(turn, tool.clone(), 3, false)?;
        self.close_block(turn)?;
        let asked_by = turn.open.as_ref().and_then(|open| open.done.last()).map(|(_, uuid)| uuid.clone());
        self.close_message(turn, StopReason::ToolUse)?;
        let lines = std::mem::take(&mut turn.final_lines);
        self.transcript.append(lines);

        turn.running_tool = Some((id.clone(), asked_by.unwrap_or_default()));
        let mut denied = false;
        if turn.script.ask {
            let request_id = fresh();
            self.say(self.session.can_use_tool(&request_id, &tool))?;
            denied = !self.verdict(&request_id)?;
        }
        if let Some(bg_ms) = turn.script.bg_ms {
            let task_id = task_id();
            let task = Obj::new().str("task_id", &task_id).str("task_type", "local_bash");
            let task = task.str("description", "background").end();
            let current = self.session.profile == Profile::Current;
            self.tasks_changed(&task)?;
            self.say(self.session.task("task_started", |obj| {
                let obj = obj.str("task_id", &task_id).str("tool_use_id", &id).str("description", "background");
                obj.when(current, |obj| obj.raw("is_backgrounded", true)).str("task_type", "local_bash")
            }))?;
            // Counted from the turn's end; `finish` moves it there.
            let due = Instant::now() + Duration::from_millis(bg_ms);
            self.background.push(Background { due, task_id, tool_id: id.clone() });
        }
        self.wait_until(Some(Instant::now() + Duration::from_millis(turn.script.tool_ms)))?;
        let text = match (denied, turn.script.bg_ms) {
            (true, _) => TOOL_DENIED,
            (false, Some(_)) => "Command running in background.",
            (false, None) => "done",
        };
        self.tool_result(turn, text, denied)?;
        if !self.waiting.is_empty() {
            self.fold_waiting(turn)?;
        }
        self.say(self.session.requesting(&turn.uuids))
    }

    /// Tells which background tasks there are, as JSON without its brackets; the old version does not.
    pub(super) fn tasks_changed(&mut self, tasks: &str) -> Result<(), Stop> {
        if self.session.profile == Profile::Old {
            return Ok(());
        }
        self.say(self.session.task("background_tasks_changed", |obj| obj.raw("tasks", format_args!("[{tasks}]"))))
    }

    /// Waits for the server's word on a tool.
    fn verdict(&mut self, request_id: &str) -> Result<bool, Stop> {
        loop {
            self.take_lines()?;
            if let Some(at) = self.verdicts.iter().position(|(id, _)| id == request_id) {
                return Ok(self.verdicts.swap_remove(at).1);
            }
            if self.interrupted {
                return Err(Stop::Interrupted);
            }
            if self.lines.ended {
                return Ok(false);
            }
            self.poll_once(None)?;
        }
    }

    pub(super) fn tool_result(&mut self, turn: &mut Turn, text: &str, is_error: bool) -> Result<(), Stop> {
        let Some((tool_id, asked_by)) = turn.running_tool.take() else {
            return Ok(());
        };
        let block = Obj::new().str("tool_use_id", &tool_id).str("type", "tool_result").str("content", text);
        let content = format!("[{}]", block.raw("is_error", is_error).end());
        let uuid = fresh();
        let result = Obj::new()
            .str("stdout", if is_error { "" } else { text })
            .str("stderr", "")
            .raw("interrupted", is_error)
            .raw("isImage", false)
            .end();
        self.say(self.session.user(&content, &uuid, Some(&result)))?;
        let parent = self.transcript.leaf.replace(uuid.clone());
        let line =
            self.session.tool_result_line(parent.as_deref(), &turn.prompt_id, &content, &uuid, &result, &asked_by);
        self.transcript.append(line);
        Ok(())
    }

    /// Takes what waits into the running turn: an attachment each, no user line.
    pub(super) fn fold_waiting(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        while let Some(message) = self.waiting.pop_front() {
            let uuid = fresh();
            let parent = self.transcript.leaf.replace(uuid.clone());
            let current = self.session.profile == Profile::Current;
            let remove = self.session.queue_operation("remove", |obj| {
                obj.when(current, |obj| {
                    let obj = obj.str("content", &message.text).str("reason", "absorbed_mid_turn");
                    obj.str_if("commandUuid", message.uuid.as_deref())
                })
            });
            let line = self.session.queued_command_line(parent.as_deref(), &message, &uuid);
            self.transcript.append(remove + &line);
            self.lifecycle(message.uuid.as_deref(), "started")?;
            if self.names_uuids() {
                turn.uuids.extend(message.uuid.clone());
            }
            turn.folded.push(message);
        }
        Ok(())
    }

    fn open_message(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        let first = turn.message_ids.is_empty();
        let uuids = if first && self.session.profile == Profile::Current { turn.uuids.clone() } else { Vec::new() };
        let message = ApiMessage::new(uuids);
        turn.message_ids.push(message.id.clone());
        self.say(self.session.message_start(&message, turn.began.elapsed().as_millis()))?;
        turn.open = Some(OpenMessage { message, done: Vec::new(), block: None });
        Ok(())
    }

    /// Says `block` in `pieces` deltas; `paced` ones keep the script's pauses and its death.
    fn say_block(&mut self, turn: &mut Turn, block: Block, pieces: usize, paced: bool) -> Result<(), Stop> {
        let Some(open) = &mut turn.open else {
            return Ok(());
        };
        let index = open.done.len();
        let message = open.message.clone();
        open.block = Some((block.clone(), 0));
        self.say(self.session.block_start(&message, index, &block))?;
        let text = match &block {
            Block::Text(text) | Block::Thinking(text) => text.as_str(),
            Block::Tool { input, .. } => input.as_str(),
        };
        let pause = if paced && turn.script.flood.is_none() { turn.script.delta_ms } else { 0 };
        self.out.holding = paced && turn.script.flood.is_some();
        let began = Instant::now();
        let cuts = Pieces { text, count: pieces.clamp(1, text.len().max(1)), done: 0, from: 0 };
        let half = cuts.count / 2;
        for (n, piece) in cuts.enumerate() {
            if paced && turn.script.die == Some(Die::Mid) && n >= half {
                return Err(Stop::Exit(EXIT_DIED));
            }
            if pause > 0 && n > 0 {
                let due = Duration::from_millis(pause.saturating_mul(n as u64));
                self.wait_until(Some(began + due))?;
            } else if n % DELTAS_PER_GLANCE == DELTAS_PER_GLANCE - 1 {
                self.glance()?;
            }
            self.say(self.session.delta(&message, index, &block, piece))?;
            turn.output_tokens += 1;
            if let Some((_, said)) = turn.open.as_mut().and_then(|open| open.block.as_mut()) {
                *said += piece.len();
            }
        }
        if paced && turn.script.die == Some(Die::Mid) {
            return Err(Stop::Exit(EXIT_DIED));
        }
        self.out.holding = false;
        self.out.flush()?;
        if matches!(block, Block::Thinking(_)) {
            self.say(self.session.signature(&message, index))?;
        }
        self.glance()
    }

    fn close_block(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        let Some(open) = &mut turn.open else {
            return Ok(());
        };
        let Some((block, _)) = open.block.take() else {
            return Ok(());
        };
        let (index, uuid) = (open.done.len(), fresh());
        self.say(self.session.assistant(&open.message, &block, &uuid, false))?;
        open.message.answers.clear();
        self.say(self.session.block_stop(&open.message, index))?;
        if let Block::Text(text) = &block {
            turn.answer.clone_from(text);
        }
        open.done.push((block, uuid));
        Ok(())
    }

    fn close_message(&mut self, turn: &mut Turn, stop: StopReason) -> Result<(), Stop> {
        let Some(open) = turn.open.take() else {
            return Ok(());
        };
        self.say(self.session.message_delta(&open.message, stop, turn.output_tokens))?;
        self.say(self.session.message_stop(&open.message))?;
        turn.final_lines = self.lines_of(&open, stop, turn.output_tokens, false);
        Ok(())
    }

    /// The transcript's lines of a message.
    pub(super) fn lines_of(
        &mut self,
        open: &OpenMessage,
        stop: StopReason,
        output_tokens: u64,
        last_aborted: bool,
    ) -> String {
        let mut lines = String::new();
        for (index, (block, uuid)) in open.done.iter().enumerate() {
            let parent = self.transcript.leaf.replace(uuid.clone());
            lines += &self.session.assistant_line(&AssistantLine {
                parent: parent.as_deref(),
                message: &open.message,
                block,
                index,
                uuid,
                stop,
                output_tokens,
                aborted: last_aborted && index + 1 == open.done.len(),
            });
        }
        lines
    }
}
