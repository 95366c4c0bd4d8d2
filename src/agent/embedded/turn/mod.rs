//! One turn from its user line to its result. Leaves waiting and reading to the agent's poll loop.
//! Rules a change could break: the user line is on disk before init unless the script says otherwise; the final line is
//! on disk before the result unless the script says otherwise; every turn that is not cut by death says one result.

mod answer;
mod body;
mod end;

use std::time::{Duration, Instant};

use super::directive::{Interrupts, Script};
use super::input::{self, Incoming};
use super::json::{self, Obj};
use super::photo::Photo;
use super::shape::{ApiMessage, Block, UserLine, fresh};
use super::transcript::Transcript;
use super::{Agent, Background, Profile, Stop};

/// Exit code of a scripted death.
const EXIT_DIED: i32 = 9;
/// Latest flush of the old version, in milliseconds.
const OLD_FLUSH_MS_MAX: u64 = 100;

const TOOL_DENIED: &str = "The user doesn't want to proceed with this tool use. The tool use was rejected.";

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
        while let Some(message) = self.waiting.pop_front_if(|next| batch.is_empty() || !is_clear(next)) {
            let alone = is_clear(&message);
            self.lifecycle(message.uuid.as_deref(), "started")?;
            batch.push(message);
            if alone {
                return self.clear(batch);
            }
        }
        let dequeue = self.session.queue_operation("dequeue", |obj| obj).repeat(batch.len());
        let mut uuids: Vec<String> = batch.iter().filter_map(|message| message.uuid.clone()).collect();
        let Some((message, mut merged)) = input::merge(batch, &self.defaults) else {
            return Ok(());
        };
        if !self.names_uuids() {
            uuids.clear();
            merged.clear();
        }
        let script = message.script;
        self.interrupted = false;
        if let Some(late_ms) = script.late_id_ms.or((script.init_ms > 0).then_some(script.init_ms)) {
            // An interrupt before init is answered and does nothing.
            self.interrupts = Some(Interrupts::OnlyAnswered);
            self.wait_until(Some(Instant::now() + Duration::from_millis(late_ms)))?;
            if script.late_id_ms.is_some() {
                self.move_to(script.late_id.clone().unwrap_or_else(fresh));
            }
        }
        self.interrupts = Some(script.interrupts.unwrap_or_default());
        let began = Instant::now();
        let prompt_id = fresh();
        let line_uuid = message.uuid.clone().filter(|_| self.keep_uuid).unwrap_or_else(fresh);
        self.transcript.turns += 1;
        crate::faults::point("after_stdin_before_line");
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
            lines += &self.session.companion_line(&leaf, &prompt_id, message.photos.len(), &companion);
            leaf = companion;
        }
        self.transcript.leaf = Some(leaf);
        let old_ms = (self.session.profile == Profile::Old).then(|| old_flush_ms(&line_uuid));
        match script.user_flush_ms.or(old_ms) {
            Some(late_ms) => {
                self.transcript.append(dequeue);
                self.transcript.append_at(began + Duration::from_millis(late_ms), lines);
            }
            None => self.transcript.append(dequeue + &lines),
        }
        if let Some(late_ms) = script.late_init_ms {
            self.interrupts = Some(Interrupts::OnlyAnswered);
            self.wait_until(Some(Instant::now() + Duration::from_millis(late_ms)))?;
            self.interrupts = Some(script.interrupts.unwrap_or_default());
        }
        let leader = message.uuid.filter(|_| self.names_uuids());
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
    pub(super) fn background_turn(&mut self, task: Option<Background>, fold: bool) -> Result<(), Stop> {
        let on_send = task.is_none();
        let task = task.unwrap_or_else(|| Background { due: Instant::now(), task_id: task_id(), tool_id: fresh() });
        let id = task.task_id.as_str();
        let end_time = crate::clock::now_ms();
        self.say(self.session.task("task_updated", |obj| {
            obj.str("task_id", id).raw("patch", format_args!(r#"{{"status":"completed","end_time":{end_time}}}"#))
        }))?;
        self.say(self.session.task_notification(id, &task.tool_id))?;
        self.tasks_changed("")?;
        // The line that came is the newest of those that wait.
        let queued = self.waiting.back().cloned().filter(|_| on_send);
        let mut script = Script::default();
        if let Some(queued) = &queued {
            script.delta_ms = queued.script.delta_ms;
            script.delay_ms = queued.script.delay_ms;
        }
        script.say = Some("The background task is done.".to_owned());
        let origin = Obj::new().str("kind", "task-notification").str("producer", "session-task").end();
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
        let enqueue = self.session.queue_operation("enqueue", |obj| obj.str("content", &text));
        let dequeue = self.session.queue_operation("dequeue", |obj| obj);
        self.transcript.append(enqueue + &dequeue + &line);
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
        self.transcript.append(self.session.queue_operation("dequeue", |obj| obj));
        if self.session.profile == Profile::Current {
            self.say(self.session.conversation_reset(uuid.as_deref().unwrap_or_default()))?;
            self.tasks_changed("")?;
        }
        self.background.clear();
        self.move_to(fresh());
        let kept = uuid.clone().filter(|_| self.names_uuids());
        let (lines, leaf) = self.session.clear_lines(&kept.clone().unwrap_or_else(fresh));
        self.transcript.append(lines);
        self.transcript.leaf = Some(leaf);
        self.say(self.session.init())?;
        if self.session.profile == Profile::Old {
            self.say(self.session.no_content())?;
        }
        let result = self.session.command_result(kept.as_deref(), self.total_cost_usd, self.results);
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
}

fn task_id() -> String {
    format!("b{}", fresh().chars().filter(char::is_ascii_alphanumeric).take(8).collect::<String>())
}

/// 1 to 100 ms, from the letters of an id.
fn old_flush_ms(id: &str) -> u64 {
    1 + id.bytes().map(u64::from).sum::<u64>() % OLD_FLUSH_MS_MAX
}
