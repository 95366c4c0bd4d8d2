//! One turn from its user line to its result. Leaves waiting and reading to the agent's poll loop.
//! Rules a change could break: the user line is on disk before init unless the script says otherwise; the final line is
//! on disk before the result unless the script says otherwise; every turn that is not cut by death says one result.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::directive::{Die, Interrupts, Script};
use super::input::{self, Incoming};
use super::json::{self, Obj};
use super::photo::Photo;
use super::shape::{ApiMessage, AssistantLine, Block, ResultLine, StopReason, UserLine, fresh};
use super::transcript::Transcript;
use super::{Agent, Background, Profile, Stop};

/// Exit code of a scripted death.
const EXIT_DIED: i32 = 9;
/// Words repeated in an answer at most, in characters.
const ECHO_CHARS_MAX: usize = 2000;
/// Deltas without a pause between two looks at stdin.
const DELTAS_PER_GLANCE: usize = 64;
/// Latest flush of the old version, in milliseconds.
const OLD_FLUSH_MS_MAX: u64 = 100;

const TOOL_DENIED: &str =
    "The user doesn't want to proceed with this tool use. The tool use was rejected.";

/// A turn under way.
struct Turn {
    script: Script,
    words: String,
    photos: Vec<Photo>,
    prompt_id: String,
    /// Uuid of its user line, if its sender gave one.
    leader: Option<String>,
    /// Every user message of it.
    uuids: Vec<String>,
    folded: Vec<Incoming>,
    origin: Option<String>,
    began: Instant,
    message_ids: Vec<String>,
    answer: String,
    output_tokens: u64,
    open: Option<OpenMessage>,
    running_tool: Option<(String, String)>,
    /// Lines of the last message, not yet given to the transcript.
    final_lines: String,
}

/// The message that is being said.
struct OpenMessage {
    message: ApiMessage,
    done: Vec<(Block, String)>,
    /// The block under way and how much of it was said, in bytes.
    block: Option<(Block, usize)>,
}

impl Agent {
    /// Runs what waits: everything up to the next `/clear` as one user line.
    pub(super) fn user_turn(&mut self) -> Result<(), Stop> {
        let is_clear = |message: &Incoming| message.text.trim() == "/clear";
        let mut batch = Vec::new();
        while let Some(message) = self
            .waiting
            .pop_front_if(|next| batch.is_empty() || !is_clear(next))
        {
            let alone = is_clear(&message);
            self.lifecycle(message.uuid.as_deref(), "started")?;
            batch.push(message);
            if alone {
                return self.clear(batch);
            }
        }
        let dequeue = self
            .session
            .queue_operation("dequeue", |obj| obj)
            .repeat(batch.len());
        let mut uuids: Vec<String> = batch
            .iter()
            .filter_map(|message| message.uuid.clone())
            .collect();
        let Some((message, mut merged)) = input::merge(batch, &self.defaults) else {
            return Ok(());
        };
        if !self.keep_uuid {
            uuids.clear();
            merged.clear();
        }
        let script = message.script;
        self.interrupted = false;
        if let Some(late_ms) = script
            .late_id_ms
            .or((script.init_ms > 0).then_some(script.init_ms))
        {
            // An interrupt before init is answered and does nothing.
            self.interrupts = Some(Interrupts::OnlyAnswered);
            self.wait_until(Some(Instant::now() + Duration::from_millis(late_ms)))?;
            if script.late_id_ms.is_some() {
                let known = std::mem::take(&mut self.transcript.known);
                self.move_to(fresh());
                self.transcript.known = known;
            }
        }
        self.interrupts = Some(script.interrupts.unwrap_or_default());
        let began = Instant::now();
        let prompt_id = fresh();
        let line_uuid = message
            .uuid
            .clone()
            .filter(|_| self.keep_uuid)
            .unwrap_or_else(fresh);
        self.transcript.turns += 1;
        let mut lines = self.session.user_line(&UserLine {
            parent: self.transcript.leaf.as_deref(),
            prompt_id: &prompt_id,
            content: &message.content,
            uuid: &line_uuid,
            photos: message.photos.len(),
            origin: None,
            sent_at_ms: message.at_ms,
            turn_index: self.transcript.turns,
            merged: &merged,
        });
        let mut leaf = line_uuid.clone();
        if !message.photos.is_empty() {
            let companion = fresh();
            lines +=
                &self
                    .session
                    .companion_line(&leaf, &prompt_id, message.photos.len(), &companion);
            leaf = companion;
        }
        self.transcript.leaf = Some(leaf);
        let old_ms = (self.session.profile == Profile::Old).then(|| old_flush_ms(&line_uuid));
        match script.user_flush_ms.or(old_ms) {
            Some(late_ms) => {
                self.transcript.append(dequeue);
                self.transcript
                    .append_at(began + Duration::from_millis(late_ms), lines);
            }
            None => self.transcript.append(dequeue + &lines),
        }
        let leader = message.uuid.filter(|_| self.keep_uuid);
        self.run(Turn {
            script,
            words: message.words,
            photos: message.photos,
            prompt_id,
            leader,
            uuids,
            folded: Vec::new(),
            origin: None,
            began,
            message_ids: Vec::new(),
            answer: String::new(),
            output_tokens: 0,
            open: None,
            running_tool: None,
            final_lines: String::new(),
        })
    }

    /// A turn that nobody asked for: the end of `task`, or one that began just as a line came.
    pub(super) fn background_turn(
        &mut self,
        task: Option<Background>,
        fold: bool,
    ) -> Result<(), Stop> {
        let on_send = task.is_none();
        let task = task.unwrap_or_else(|| Background {
            due: Instant::now(),
            task_id: task_id(),
            tool_id: fresh(),
        });
        let id = task.task_id.as_str();
        let end_time = crate::clock::now_ms();
        self.say(self.session.task("task_updated", |obj| {
            obj.str("task_id", id).raw(
                "patch",
                format_args!(r#"{{"status":"completed","end_time":{end_time}}}"#),
            )
        }))?;
        self.say(self.session.task("task_notification", |obj| {
            let obj = obj
                .str("task_id", id)
                .str("tool_use_id", &task.tool_id)
                .str("status", "completed");
            obj.str("output_file", "").str(
                "summary",
                "Background command \"background\" completed (exit code 0)",
            )
        }))?;
        self.say(
            self.session
                .task("background_tasks_changed", |obj| obj.raw("tasks", "[]")),
        )?;
        // The line that came is the newest of those that wait.
        let queued = self.waiting.back().cloned().filter(|_| on_send);
        let mut script = Script::default();
        if let Some(queued) = &queued {
            script.delta_ms = queued.script.delta_ms;
            script.delay_ms = queued.script.delay_ms;
        }
        script.say = Some("The background task is done.".to_owned());
        let origin = Obj::new()
            .str("kind", "task-notification")
            .str("producer", "session-task")
            .end();
        let text = format!(
            "<task-notification>\n<task-id>{id}</task-id>\n<status>completed</status>\n<summary>Background command \"background\" completed (exit code 0)</summary>\n</task-notification>"
        );
        let (uuid, prompt_id) = (fresh(), fresh());
        self.transcript.turns += 1;
        let line = self.session.user_line(&UserLine {
            parent: self.transcript.leaf.as_deref(),
            prompt_id: &prompt_id,
            content: &json::quoted(&text),
            uuid: &uuid,
            photos: 0,
            origin: Some(&origin),
            sent_at_ms: end_time,
            turn_index: self.transcript.turns,
            merged: &[],
        });
        self.transcript.append(line);
        self.transcript.leaf = Some(uuid);
        self.interrupted = false;
        self.interrupts = Some(Interrupts::Obeyed);
        let mut turn = Turn {
            script,
            words: String::new(),
            photos: Vec::new(),
            prompt_id,
            leader: None,
            uuids: Vec::new(),
            folded: Vec::new(),
            origin: Some(origin),
            began: Instant::now(),
            message_ids: Vec::new(),
            answer: String::new(),
            output_tokens: 0,
            open: None,
            running_tool: None,
            final_lines: String::new(),
        };
        if let Some(queued) = queued {
            self.say(self.session.init())?;
            self.lifecycle(queued.uuid.as_deref(), "queued")?;
            if fold {
                self.fold_waiting(&mut turn)?;
            }
            self.say(self.session.requesting(&turn.uuids))?;
            return self.run_after_init(turn);
        }
        self.run(turn)
    }

    /// `/clear`: another session id, another file, a result without a turn of the model.
    fn clear(&mut self, batch: Vec<Incoming>) -> Result<(), Stop> {
        let Some(uuid) = batch.into_iter().next().map(|message| message.uuid) else {
            return Ok(());
        };
        self.transcript
            .append(self.session.queue_operation("dequeue", |obj| obj));
        if self.session.profile == Profile::Current {
            self.say(
                self.session
                    .conversation_reset(uuid.as_deref().unwrap_or_default()),
            )?;
            self.say(
                self.session
                    .task("background_tasks_changed", |obj| obj.raw("tasks", "[]")),
            )?;
        }
        self.background.clear();
        self.move_to(fresh());
        let kept = uuid
            .clone()
            .filter(|_| self.session.profile == Profile::Current && self.keep_uuid);
        let (lines, leaf) = self
            .session
            .clear_lines(&kept.clone().unwrap_or_else(fresh));
        self.transcript.known.extend(kept.clone());
        self.transcript.append(lines);
        self.transcript.leaf = Some(leaf);
        self.say(self.session.init())?;
        let uuids: Vec<String> = kept.clone().into_iter().collect();
        let result = self.session.result(&ResultLine {
            subtype: "success",
            is_error: false,
            stop: StopReason::None,
            terminal_reason: "completed",
            origin: None,
            num_turns: 0,
            result: Some(""),
            errors: &[],
            duration_ms: 0,
            message_ids: &[],
            leader: kept.as_deref(),
            uuids: &uuids,
            output_tokens: 0,
            total_cost_usd: 0.0,
            index: self.results,
        });
        self.results += 1;
        self.last_failed = false;
        self.say(result)?;
        self.lifecycle(uuid.as_deref(), "completed")
    }

    /// Goes on under another session id, in another file.
    fn move_to(&mut self, id: String) {
        self.transcript.flush_all();
        self.session.id = id;
        self.transcript = Transcript::fresh(&self.home, &self.session.cwd, &self.session.id);
    }

    fn run(&mut self, turn: Turn) -> Result<(), Stop> {
        self.say(self.session.init())?;
        self.say(self.session.requesting(&turn.uuids))?;
        self.run_after_init(turn)
    }

    fn run_after_init(&mut self, mut turn: Turn) -> Result<(), Stop> {
        let ended = match self.body(&mut turn) {
            Ok(()) => self.finish(&mut turn),
            Err(Stop::Interrupted) => self.abort(&mut turn),
            Err(Stop::Exit(code)) => Err(Stop::Exit(code)),
        };
        self.out.holding = false;
        self.out.flush()?;
        self.interrupts = None;
        self.interrupted = false;
        ended
    }

    /// Everything between init and the result.
    fn body(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        self.wait_until(Some(
            Instant::now() + Duration::from_millis(turn.script.delay_ms),
        ))?;
        if turn.script.die == Some(Die::Before) {
            return Err(Stop::Exit(EXIT_DIED));
        }
        if turn.script.error.is_some() {
            return Ok(());
        }
        let thoughts = turn.script.think.take().map(|text| {
            Block::Thinking(if text.is_empty() {
                "I think about it for a while.".to_owned()
            } else {
                text
            })
        });
        let uses_tool =
            turn.script.tool.is_some() || turn.script.ask || turn.script.bg_ms.is_some();
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
        self.say_block(
            turn,
            Block::Text(answer),
            usize::try_from(deltas).unwrap_or(usize::MAX),
            true,
        )?;
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
        let name = turn
            .script
            .tool
            .clone()
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "Bash".to_owned());
        let input = Obj::new()
            .str(
                "command",
                &format!("sleep {}; echo done", turn.script.tool_ms as f64 / 1000.0),
            )
            .str("description", "background")
            .when(turn.script.bg_ms.is_some(), |obj| {
                obj.raw("run_in_background", true)
            });
        let id = super::shape::api_id("toolu");
        let tool = Block::Tool {
            id: id.clone(),
            name,
            input: input.end(),
        };
        self.say_block(turn, tool.clone(), 3, false)?;
        self.close_block(turn)?;
        let asked_by = turn
            .open
            .as_ref()
            .and_then(|open| open.done.last())
            .map(|(_, uuid)| uuid.clone());
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
            let task = Obj::new()
                .str("task_id", &task_id)
                .str("task_type", "local_bash");
            let task = task.str("description", "background").end();
            self.say(self.session.task("background_tasks_changed", |obj| {
                obj.raw("tasks", format_args!("[{task}]"))
            }))?;
            self.say(self.session.task("task_started", |obj| {
                let obj = obj
                    .str("task_id", &task_id)
                    .str("tool_use_id", &id)
                    .str("description", "background");
                obj.raw("is_backgrounded", true)
                    .str("task_type", "local_bash")
            }))?;
            // Counted from the turn's end; `finish` moves it there.
            let due = Instant::now() + Duration::from_millis(bg_ms);
            self.background.push(Background {
                due,
                task_id,
                tool_id: id.clone(),
            });
        }
        self.wait_until(Some(
            Instant::now() + Duration::from_millis(turn.script.tool_ms),
        ))?;
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

    fn tool_result(&mut self, turn: &mut Turn, text: &str, is_error: bool) -> Result<(), Stop> {
        let Some((tool_id, asked_by)) = turn.running_tool.take() else {
            return Ok(());
        };
        let block = Obj::new()
            .str("tool_use_id", &tool_id)
            .str("type", "tool_result")
            .str("content", text);
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
        let line = self.session.tool_result_line(
            parent.as_deref(),
            &turn.prompt_id,
            &content,
            &uuid,
            &result,
            &asked_by,
        );
        self.transcript.append(line);
        Ok(())
    }

    /// Takes what waits into the running turn: an attachment each, no user line.
    fn fold_waiting(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        while let Some(message) = self.waiting.pop_front() {
            let uuid = fresh();
            let parent = self.transcript.leaf.replace(uuid.clone());
            let remove = self.session.queue_operation("remove", |obj| {
                let obj = obj
                    .str("content", &message.text)
                    .str("reason", "absorbed_mid_turn");
                obj.str_if("commandUuid", message.uuid.as_deref())
            });
            let line = self
                .session
                .queued_command_line(parent.as_deref(), &message, &uuid);
            self.transcript.append(remove + &line);
            self.lifecycle(message.uuid.as_deref(), "started")?;
            if self.keep_uuid {
                turn.uuids.extend(message.uuid.clone());
            }
            // A folded message ran again when its uuid came once more: only user lines are known.
            if let Some(uuid) = &message.uuid {
                self.transcript.known.remove(uuid);
            }
            turn.folded.push(message);
        }
        Ok(())
    }

    fn open_message(&mut self, turn: &mut Turn) -> Result<(), Stop> {
        let first = turn.message_ids.is_empty();
        let uuids = if first && self.session.profile == Profile::Current {
            turn.uuids.clone()
        } else {
            Vec::new()
        };
        let message = ApiMessage::new(uuids);
        turn.message_ids.push(message.id.clone());
        self.say(
            self.session
                .message_start(&message, turn.began.elapsed().as_millis()),
        )?;
        turn.open = Some(OpenMessage {
            message,
            done: Vec::new(),
            block: None,
        });
        Ok(())
    }

    /// Says `block` in `pieces` deltas; `paced` ones keep the script's pauses and its death.
    fn say_block(
        &mut self,
        turn: &mut Turn,
        block: Block,
        pieces: usize,
        paced: bool,
    ) -> Result<(), Stop> {
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
        let pause = if paced && turn.script.flood.is_none() {
            turn.script.delta_ms
        } else {
            0
        };
        self.out.holding = paced && turn.script.flood.is_some();
        let began = Instant::now();
        let cuts = Pieces {
            text,
            count: pieces.clamp(1, text.len().max(1)),
            done: 0,
            from: 0,
        };
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
        self.say(
            self.session
                .message_delta(&open.message, stop, turn.output_tokens),
        )?;
        self.say(self.session.message_stop(&open.message))?;
        turn.final_lines = self.lines_of(&open, stop, turn.output_tokens, false);
        Ok(())
    }

    /// The transcript's lines of a message.
    fn lines_of(
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

    /// The end of a turn that said all it had to say, or failed as the script wants.
    fn finish(&mut self, turn: &mut Turn) -> Result<(), Stop> {
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
                let text = if text.is_empty() {
                    "API Error: 400 the script asked for this error"
                } else {
                    text
                };
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
        let flush_ms = turn
            .script
            .flush_ms
            .or(old_ms.and_then(|ms| i64::try_from(ms).ok()));
        match flush_ms {
            Some(late_ms) if late_ms > 0 => {
                self.transcript.append_at(
                    Instant::now() + Duration::from_millis(late_ms.unsigned_abs()),
                    lines,
                );
            }
            Some(early_ms) => {
                self.transcript.append(lines);
                // Too late for an interrupt: the answer is complete.
                self.interrupts = Some(Interrupts::OnlyAnswered);
                self.wait_until(Some(
                    Instant::now() + Duration::from_millis(early_ms.unsigned_abs()),
                ))?;
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
                subtype: if errors.is_empty() {
                    "success"
                } else {
                    "error_during_execution"
                },
                terminal_reason: if failed { "api_error" } else { "completed" },
                is_error: failed,
                stop: if failed {
                    StopReason::None
                } else {
                    StopReason::EndTurn
                },
                result: result.as_deref(),
                errors: &errors,
            },
        )
    }

    /// The end of a turn that was interrupted.
    fn abort(&mut self, turn: &mut Turn) -> Result<(), Stop> {
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
            lines += &self.lines_of(
                &open,
                StopReason::None,
                turn.output_tokens,
                open_index.is_some(),
            );
            turn.open = Some(open);
        }
        let uuid = fresh();
        let content = format!(
            "[{}]",
            Obj::new().str("type", "text").str("text", note).end()
        );
        self.say(self.session.user(&content, &uuid, None))?;
        let parent = self.transcript.leaf.replace(uuid.clone());
        lines +=
            &self
                .session
                .interruption_line(parent.as_deref(), &turn.prompt_id, &content, &uuid);
        self.transcript.append(lines);
        if let Some(open) = turn.open.take() {
            if let Some(index) = open_index {
                self.say(self.session.block_stop(&open.message, index))?;
            }
            self.say(self.session.message_delta(
                &open.message,
                StopReason::None,
                turn.output_tokens,
            ))?;
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
                errors: &[
                    "[ede_diagnostic] result_type=user last_content_type=n/a stop_reason=null"
                        .to_owned(),
                ],
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
            leader: turn
                .leader
                .as_deref()
                .or(turn.uuids.last().map(String::as_str)),
            uuids: &turn.uuids,
            output_tokens: turn.output_tokens,
            total_cost_usd: self.total_cost_usd,
            index: self.results,
        });
        self.results += 1;
        self.last_failed = end.is_error;
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
        let folded: Vec<&str> = turn
            .folded
            .iter()
            .filter_map(|message| message.uuid.as_deref())
            .collect();
        let state = if end.is_error {
            "cancelled"
        } else {
            "completed"
        };
        for at in 0..turn.uuids.len() {
            // Folded ones of a good turn were told before its result.
            if end.is_error || !folded.contains(&turn.uuids[at].as_str()) {
                let uuid = turn.uuids[at].clone();
                self.lifecycle(Some(&uuid), state)?;
            }
        }
        self.transcript.append(
            self.session
                .last_prompt(&turn.words, self.transcript.leaf.as_deref()),
        );
        Ok(())
    }
}

/// How a turn ends.
struct Ending<'a> {
    subtype: &'a str,
    terminal_reason: &'a str,
    is_error: bool,
    stop: StopReason,
    result: Option<&'a str>,
    errors: &'a [String],
}

impl Turn {
    fn answer(&self) -> String {
        if let Some(say) = &self.script.say {
            return say.clone();
        }
        if let Some(flood) = self.script.flood {
            return (0..flood).fold(String::new(), |mut text, n| {
                // Sixteen bytes a delta.
                let _ = write!(text, "flood {n:>9} ");
                text
            });
        }
        if let Some(size) = self.script.size {
            return filler(size);
        }
        let words = self.words.split_whitespace().count();
        let mut answer = match words {
            0 => "You wrote no words.".to_owned(),
            1 => format!("You wrote 1 word: {}", shortened(&self.words)),
            _ => format!("You wrote {words} words: {}", shortened(&self.words)),
        };
        for (n, photo) in self.photos.iter().enumerate() {
            let _ = write!(answer, "\nPhoto {}: {}.", n + 1, photo.words());
        }
        for folded in &self.folded {
            let _ = write!(
                answer,
                "\nMeanwhile you wrote: {}",
                shortened(&folded.words)
            );
        }
        answer
    }
}

fn shortened(words: &str) -> String {
    match words.char_indices().nth(ECHO_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words.to_owned(),
    }
}

/// `size` bytes of numbered lines, so that a reader sees what is missing.
fn filler(size: usize) -> String {
    let mut text = String::with_capacity(size + 32);
    let mut n = 0;
    while text.len() < size {
        n += 1;
        let _ = write!(text, "{n} the quick brown fox; ");
    }
    text.truncate(size);
    text
}

fn task_id() -> String {
    format!(
        "b{}",
        fresh()
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .take(8)
            .collect::<String>()
    )
}

/// 1 to 100 ms, from the letters of an id.
fn old_flush_ms(id: &str) -> u64 {
    1 + id.bytes().map(u64::from).sum::<u64>() % OLD_FLUSH_MS_MAX
}

/// Cuts a text into `count` pieces of nearly the same size, at character borders.
struct Pieces<'a> {
    text: &'a str,
    count: usize,
    done: usize,
    from: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        while self.done < self.count {
            self.done += 1;
            let mut end = self.text.len() * self.done / self.count;
            while !self.text.is_char_boundary(end) {
                end += 1;
            }
            if end > self.from {
                let piece = &self.text[self.from..end];
                self.from = end;
                return Some(piece);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_characters_and_add_up() {
        for (text, count) in [
            ("", 1),
            ("a", 1),
            ("abc", 3),
            ("ääää", 8),
            ("one two three four", 5),
            ("😀😀", 3),
        ] {
            let pieces: Vec<&str> = Pieces {
                text,
                count,
                done: 0,
                from: 0,
            }
            .collect();
            assert_eq!(pieces.concat(), text);
            assert!(pieces.len() <= count, "{text}");
        }
        assert_eq!(
            Pieces {
                text: "abcdef",
                count: 3,
                done: 0,
                from: 0
            }
            .collect::<Vec<_>>(),
            ["ab", "cd", "ef"]
        );
    }

    #[test]
    fn fillers_have_the_size_that_was_asked_for() {
        for size in [0, 1, 25, 1000] {
            assert_eq!(filler(size).len(), size);
        }
        assert_eq!(
            shortened(&"é".repeat(3000)).chars().count(),
            ECHO_CHARS_MAX + 1
        );
    }
}
