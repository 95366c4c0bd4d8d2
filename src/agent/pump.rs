//! The body of a run's thread: starts the agent, moves lines both ways, keeps its timers, ends it, reports its end.
//!
//! One poll loop for stdout, stdin, stderr, the agent's exit and a wake descriptor; it never blocks anywhere else, so a
//! photo on stdin cannot dead-lock with the agent's stdout, and stop and death are seen while a turn waits for its
//! transcript. Leaves the meaning of messages to `turns` and `adapt`, and of facts to the listener. Rule a change could
//! break: the agent is reaped before [`RunListener::ended`], and that call comes from `Drop`.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::adapt::{Fate, adapt};
use super::command::{Agent, exit_words, explain_early_end};
use super::content;
use super::pipes::{ErrorText, Outbox, Pipe, read_from};
use super::turns::{Step, TurnTracker};
use super::wire::{AgentMessage, Lines, parse};
use super::{RunEnd, RunFact, RunListener, RunSpec, Turn, TurnEnd};
use crate::error::{Code, Error, Result};
use crate::ids::{MessageUuid, RunNo};
use crate::sync::{Receiver, Sender, TrySendError, bounded};
use crate::threads::{self, Doing, Name, OnPanic, WORK_STACK_BYTES, doing};

/// From the end of stdin to SIGTERM.
const STDIN_GRACE: Duration = Duration::from_secs(2);
/// From SIGTERM to SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(5);
/// How long stdout may stay open after the agent ended, because a process of its own holds it.
const ORPHAN_GRACE: Duration = Duration::from_millis(300);
/// How long a turn has to end once a person asked.
const INTERRUPT_LIMIT: Duration = Duration::from_secs(10);
/// How long the end of a turn waits for the transcript.
const GATE_LIMIT: Duration = Duration::from_secs(5);
/// Time-outs of the gate after which a run waits no more.
const GATE_TIMEOUTS_MAX: u32 = 2;
/// Between two looks at the transcript, at first and after [`GATE_EAGER`]: the lags seen are 0 to 100 ms.
const GATE_STEP: Duration = Duration::from_millis(2);
const GATE_STEP_LATE: Duration = Duration::from_millis(20);
const GATE_EAGER: Duration = Duration::from_millis(200);
/// Facts held back behind the gate before stdout is left unread.
const HELD_FACTS_MAX: usize = 1024;
/// Orders that wait for the pump; a session has one turn in flight.
const ORDERS_MAX: usize = 16;
/// Kinds of unknown messages that are counted by name.
const UNKNOWN_KINDS_MAX: usize = 64;
/// Bytes read from a pipe in one call: what a pipe holds.
const READ_BYTES: usize = 64 * 1024;

/// What the handle asks of the pump.
#[derive(Debug)]
pub enum Order {
    /// Hand this to the agent.
    Turn(Turn),
    /// Ask it to end its turn.
    Interrupt,
}

/// What the handle and the pump share.
#[derive(Debug)]
pub struct Shared {
    no: RunNo,
    orders: Sender<Order>,
    wake: OwnedFd,
    /// Nothing more reaches the agent.
    closed: AtomicBool,
    /// Somebody called close or kill.
    asked: AtomicBool,
    killed: AtomicBool,
    /// 0 while there is no process.
    pid: AtomicU32,
    began: Instant,
    /// Milliseconds since `began` at the last message, plus one; 0 before the first.
    last_message: AtomicU64,
    thread: OnceLock<threads::Thread>,
}

impl Shared {
    /// Queues an order.
    ///
    /// # Errors
    /// The run is closed, or has [`ORDERS_MAX`] orders waiting.
    pub fn send(&self, order: Order) -> Result<()> {
        if self.is_closed() {
            return Err(self.refuse("is closed"));
        }
        match self.orders.try_send(order) {
            Ok(()) => {
                self.wake();
                Ok(())
            }
            Err(TrySendError::Full(_)) => Err(self.refuse("has too much waiting")),
            Err(TrySendError::Disconnected(_)) => Err(self.refuse("has ended")),
        }
    }

    fn refuse(&self, why: &str) -> Error {
        Error::new(Code::AgentUnavailable, format!("{} {why}", self.no))
    }

    /// Asks for the end of the run.
    pub fn close(&self) {
        self.asked.store(true, Ordering::Release);
        self.closed.store(true, Ordering::Release);
        self.wake();
    }

    /// Asks for the end of the run, now.
    pub fn kill(&self) {
        self.killed.store(true, Ordering::Release);
        self.close();
    }

    /// Nothing more reaches the agent.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Number of the run.
    pub fn no(&self) -> RunNo {
        self.no
    }

    /// The process while it lives.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Acquire)).filter(|pid| *pid != 0)
    }

    /// Waits for the thread.
    pub fn join_within(&self, limit: Duration) -> bool {
        self.thread
            .get()
            .is_some_and(|thread| thread.join_within(limit))
    }

    /// Age of the last message, in milliseconds.
    pub fn last_message_age_ms(&self) -> Option<u64> {
        let at = self.last_message.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.now_ms().saturating_sub(at))
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }

    fn wake(&self) {
        // Full means that a wake is on its way already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn unwake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }
}

/// Starts a run's thread.
///
/// # Errors
/// No thread or descriptor to be had.
pub fn start(spec: RunSpec, listener: Arc<dyn RunListener>) -> Result<Arc<Shared>> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| {
        Error::new(
            Code::AgentUnavailable,
            format!("no descriptor for a run: {e}"),
        )
    })?;
    let (orders, inbox) = bounded(ORDERS_MAX);
    let shared = Arc::new(Shared {
        no: spec.run,
        orders,
        wake,
        closed: AtomicBool::new(false),
        asked: AtomicBool::new(false),
        killed: AtomicBool::new(false),
        pid: AtomicU32::new(0),
        began: Instant::now(),
        last_message: AtomicU64::new(0),
        thread: OnceLock::new(),
    });
    let name = Name::run(&spec.session);
    let mine = Arc::clone(&shared);
    let thread = threads::spawn(name, WORK_STACK_BYTES, OnPanic::Contain, move || {
        Pump::new(spec, listener, mine, inbox).run();
    })
    .map_err(|e| Error::new(Code::AgentUnavailable, format!("no thread for a run: {e}")))?;
    let _ = shared.thread.set(thread);
    Ok(shared)
}

/// How far the agent's end has been asked for.
#[derive(Debug, Clone, Copy)]
enum Ladder {
    /// It may live.
    Open,
    /// stdin ended; SIGTERM is due.
    StdinEnded(Instant),
    /// SIGTERM sent; SIGKILL is due.
    Terminated(Instant),
    /// SIGKILL sent: the kernel's turn.
    Killed,
}

/// The end of a turn that waits for the transcript.
struct Gate {
    end: TurnEnd,
    since: Instant,
    next: Instant,
}

/// What is ready after a poll.
#[derive(Default)]
struct Ready {
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

struct Pump {
    spec: RunSpec,
    listener: Arc<dyn RunListener>,
    shared: Arc<Shared>,
    orders: Receiver<Order>,
    tracker: TurnTracker,
    /// Turns whose line is due once no turn runs, and whether a person wants them to end already.
    due: VecDeque<(Turn, bool)>,
    outbox: Outbox,
    lines: Lines,
    error_text: ErrorText,
    buffer: Vec<u8>,
    agent: Option<Agent>,
    exit: Option<ExitStatus>,
    /// When reading stdout after the exit is given up.
    drain_until: Option<Instant>,
    ladder: Ladder,
    spoke_told: bool,
    interrupt_due: Option<Instant>,
    gate: Option<Gate>,
    gate_timeouts: u32,
    held: VecDeque<RunFact>,
    unknown: BTreeMap<String, u64>,
    start_error: Option<Error>,
    errors: Vec<String>,
}

impl Pump {
    fn new(
        spec: RunSpec,
        listener: Arc<dyn RunListener>,
        shared: Arc<Shared>,
        orders: Receiver<Order>,
    ) -> Self {
        let tracker = TurnTracker::new(spec.session.clone());
        Self {
            spec,
            listener,
            shared,
            orders,
            tracker,
            due: VecDeque::new(),
            outbox: Outbox::default(),
            lines: Lines::default(),
            error_text: ErrorText::default(),
            buffer: vec![0; READ_BYTES],
            agent: None,
            exit: None,
            drain_until: None,
            ladder: Ladder::Open,
            spoke_told: false,
            interrupt_due: None,
            gate: None,
            gate_timeouts: 0,
            held: VecDeque::new(),
            unknown: BTreeMap::new(),
            start_error: None,
            errors: Vec::new(),
        }
    }

    fn run(mut self) {
        if let Err(e) = self.begin() {
            self.start_error = Some(e);
            return;
        }
        while !self.is_over() {
            self.take_orders();
            self.begin_due_turn();
            self.keep_timers();
            if self.is_over() {
                break;
            }
            let ready = self.wait();
            self.move_bytes(&ready);
            self.see_exit();
        }
        self.lines_end();
    }

    /// Prepares and starts the agent, unless the run was closed meanwhile.
    fn begin(&mut self) -> Result<()> {
        if self.shared.is_closed() {
            return Ok(());
        }
        self.listener.prepare(self.spec.run)?;
        if self.shared.is_closed() {
            return Ok(());
        }
        let agent = {
            let _at = doing(Doing::Spawn);
            Agent::spawn(&self.spec)?
        };
        let (pid, start_time) = (agent.pid, agent.start_time);
        self.agent = Some(agent);
        self.shared.pid.store(pid, Ordering::Release);
        self.listener.started(&super::Run { shared: Arc::clone(&self.shared) }, pid, start_time);
        crate::faults::point("after_spawn_before_stdin");
        Ok(())
    }

    /// No process, or it is reaped and all that it said was read.
    fn is_over(&self) -> bool {
        let Some(agent) = &self.agent else {
            return true;
        };
        self.exit.is_some()
            && self.gate.is_none()
            && self.drain_until.is_none()
            && agent.stdout.is_none()
    }

    fn take_orders(&mut self) {
        self.shared.unwake();
        // A second turn is due only after the first ended; more than a few waiting is left in the channel.
        while self.due.len() < ORDERS_MAX {
            match self.orders.try_recv() {
                Ok(Order::Turn(turn)) => self.due.push_back((turn, false)),
                Ok(Order::Interrupt) => self.interrupt(),
                Err(_) => break,
            }
        }
        if self.shared.killed.load(Ordering::Acquire) {
            self.kill();
        } else if self.shared.is_closed() {
            self.close();
        }
    }

    fn interrupt(&mut self) {
        self.begin_due_turn();
        // One that waits for the agent's own turn to end is asked once it began.
        for (_, interrupted) in &mut self.due {
            *interrupted = true;
        }
        if self.tracker.interrupt() {
            self.ask_interrupt();
            self.interrupt_due = Some(Instant::now() + INTERRUPT_LIMIT);
        }
    }

    fn ask_interrupt(&mut self) {
        self.outbox.push(
            content::interrupt_line(MessageUuid::fresh().as_str()),
            false,
        );
    }

    /// Begins a turn only while none runs: a line written into a turn would be merged or folded by the agent.
    fn begin_due_turn(&mut self) {
        if !matches!(self.ladder, Ladder::Open) || self.tracker.is_busy() || self.gate.is_some() {
            return;
        }
        if let Some((turn, interrupted)) = self.due.pop_front() {
            self.outbox.push(content::user_line(&turn), true);
            self.tracker.begin(turn.turn);
            if interrupted {
                self.tracker.interrupt();
                self.interrupt_due = Some(Instant::now() + INTERRUPT_LIMIT);
            }
        }
    }

    /// Nothing more is written; the agent has its graces.
    fn close(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        if matches!(self.ladder, Ladder::Open) {
            self.end_stdin();
            self.ladder = Ladder::StdinEnded(Instant::now() + STDIN_GRACE);
        }
    }

    fn kill(&mut self) {
        self.end_stdin();
        if !matches!(self.ladder, Ladder::Killed) {
            self.ladder = Ladder::Killed;
            if let (Some(agent), None) = (&self.agent, &self.exit) {
                agent.kill();
            }
        }
    }

    fn end_stdin(&mut self) {
        self.outbox.clear();
        self.due.clear();
        if let Some(agent) = &mut self.agent {
            agent.stdin = None;
        }
    }

    fn keep_timers(&mut self) {
        let now = Instant::now();
        match self.ladder {
            Ladder::StdinEnded(due) if due <= now && self.exit.is_none() => {
                if let Some(agent) = &self.agent {
                    agent.terminate();
                }
                self.ladder = Ladder::Terminated(now + TERM_GRACE);
            }
            Ladder::Terminated(due) if due <= now && self.exit.is_none() => {
                log::warn!("{}: the agent ignores SIGTERM, killing it", self.spec.run);
                self.kill();
            }
            Ladder::Open | Ladder::StdinEnded(_) | Ladder::Terminated(_) | Ladder::Killed => {}
        }
        if self.interrupt_due.is_some_and(|due| due <= now) {
            self.interrupt_due = None;
            log::warn!(
                "{}: no end of the turn within {} s of the interrupt",
                self.spec.run,
                INTERRUPT_LIMIT.as_secs()
            );
            self.listener
                .fact(self.spec.run, RunFact::InterruptTimedOut);
        }
        self.look_at_gate(now);
        if self.drain_until.is_some_and(|until| until <= now) {
            self.stop_reading();
        }
    }

    fn wait(&mut self) -> Ready {
        let Some(agent) = &self.agent else {
            return Ready::default();
        };
        let timeout = self
            .next_due()
            .map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        if self.exit.is_none() {
            fds.push(PollFd::new(agent.pidfd(), PollFlags::IN));
        }
        let mut places = [None; 3];
        let reads = self.held.len() < HELD_FACTS_MAX;
        let wanted = [
            (
                agent
                    .stdin
                    .as_ref()
                    .filter(|_| !self.outbox.is_empty())
                    .map(AsFd::as_fd),
                PollFlags::OUT,
            ),
            (
                agent.stdout.as_ref().filter(|_| reads).map(AsFd::as_fd),
                PollFlags::IN,
            ),
            (agent.stderr.as_ref().map(AsFd::as_fd), PollFlags::IN),
        ];
        for (place, (fd, flags)) in places.iter_mut().zip(wanted) {
            if let Some(fd) = fd {
                *place = Some(fds.len());
                fds.push(PollFd::from_borrowed_fd(fd, flags));
            }
        }
        {
            let _at = doing(Doing::WaitAgent);
            // An interrupted or refused poll reads as nothing ready; the timers bound the loop.
            let _ = poll(&mut fds, timeout.as_ref());
        }
        let is = |place: Option<usize>| place.is_some_and(|at| !fds[at].revents().is_empty());
        Ready {
            stdin: is(places[0]),
            stdout: is(places[1]),
            stderr: is(places[2]),
        }
    }

    /// When something is due without anything becoming ready.
    fn next_due(&self) -> Option<Instant> {
        let ladder = match self.ladder {
            Ladder::StdinEnded(due) | Ladder::Terminated(due) if self.exit.is_none() => Some(due),
            Ladder::Open | Ladder::StdinEnded(_) | Ladder::Terminated(_) | Ladder::Killed => None,
        };
        let gate = self.gate.as_ref().map(|gate| gate.next);
        [ladder, gate, self.interrupt_due, self.drain_until]
            .into_iter()
            .flatten()
            .min()
    }

    fn move_bytes(&mut self, ready: &Ready) {
        if ready.stderr {
            self.read_stderr();
        }
        if ready.stdout {
            self.read_stdout();
        }
        if ready.stdin {
            self.write_stdin();
        }
    }

    fn write_stdin(&mut self) {
        let Some(stdin) = self.agent.as_mut().and_then(|agent| agent.stdin.as_mut()) else {
            return;
        };
        if self.outbox.write_to(stdin) == Pipe::Ended {
            log::warn!("{}: the agent no longer reads its stdin", self.spec.run);
            self.close();
        }
    }

    fn read_stderr(&mut self) {
        let Some(agent) = &mut self.agent else { return };
        let Some(stderr) = &mut agent.stderr else {
            return;
        };
        let run = self.spec.run;
        let log = |line: &str| log::info!(target: "agent", "{run}: {line}");
        let text = &mut self.error_text;
        if read_from(stderr, &mut self.buffer, |bytes| text.push(bytes, log)) == Pipe::Ended {
            text.finish(log);
            agent.stderr = None;
        }
    }

    fn read_stdout(&mut self) {
        let Some(stdout) = self.agent.as_mut().and_then(|agent| agent.stdout.as_mut()) else {
            return;
        };
        let mut messages = Vec::new();
        let skipped = self.lines.skipped();
        let lines = &mut self.lines;
        let mut buffer = std::mem::take(&mut self.buffer);
        let pipe = read_from(stdout, &mut buffer, |bytes| {
            lines.push(bytes, |line| messages.extend(read_line(line)));
        });
        self.buffer = buffer;
        for _ in skipped..self.lines.skipped() {
            self.count_unknown("too long");
        }
        for message in messages {
            self.hear(message);
        }
        if pipe == Pipe::Ended {
            self.stop_reading();
            // Deaf to us it is of no use; when it has ended as well, this does nothing.
            self.close();
        }
    }

    /// stdout is at its end, or what holds it open has had its grace.
    fn stop_reading(&mut self) {
        self.drain_until = None;
        if let Some(agent) = &mut self.agent {
            if agent.stdout.take().is_none() {
                return;
            }
        }
        let mut last = None;
        self.lines.finish(|line| last = read_line(line));
        if let Some(message) = last {
            self.hear(message);
        }
    }

    fn see_exit(&mut self) {
        if self.exit.is_some() {
            return;
        }
        let Some(agent) = &mut self.agent else { return };
        let Some(status) = agent.try_wait() else {
            return;
        };
        self.exit = Some(status);
        self.shared.pid.store(0, Ordering::Release);
        self.close();
        if self
            .agent
            .as_ref()
            .is_some_and(|agent| agent.stdout.is_some())
        {
            self.drain_until = Some(Instant::now() + ORPHAN_GRACE);
        }
    }

    fn hear(&mut self, message: AgentMessage) {
        self.shared
            .last_message
            .store(self.shared.now_ms() + 1, Ordering::Relaxed);
        let steps = self.tracker.hear(&message);
        if self.tracker.spoke() && !std::mem::replace(&mut self.spoke_told, true) {
            self.emit(RunFact::Spoke);
        }
        for step in steps {
            match step {
                Step::AgentTurnBegan(turn) => self.emit(RunFact::AgentTurnBegan { turn }),
                Step::SessionId { id, cleared } => self.emit(RunFact::SessionId { id, cleared }),
                Step::Ended(end) => {
                    self.interrupt_due = None;
                    self.emit(RunFact::TurnEnded(end));
                }
                Step::AskInterruptAgain => self.ask_interrupt(),
                Step::StartRefused(errors) => {
                    self.errors = errors;
                    self.close();
                }
            }
        }
        if let AgentMessage::ControlRequest {
            request_id,
            subtype,
            tool_name,
        } = &message
        {
            self.answer(request_id, subtype, tool_name.as_deref());
        }
        match adapt(message) {
            Fate::Show(msg) => match self.tracker.current().cloned() {
                Some(turn) => self.emit(RunFact::Frame { turn, msg }),
                None => log::debug!("{}: a message outside any turn", self.spec.run),
            },
            Fate::Task(task) => self.emit(RunFact::Task(task)),
            Fate::Unknown(kind) => self.count_unknown(&kind),
            Fate::Unreadable(why) => {
                log::debug!("{}: a line of stdout is no message: {why}", self.spec.run);
                self.count_unknown("unreadable");
            }
            Fate::Handled | Fate::Skip => {}
        }
    }

    fn answer(&mut self, request_id: &str, subtype: &str, tool_name: Option<&str>) {
        if matches!(self.ladder, Ladder::Open) {
            let line = if subtype == "can_use_tool" {
                content::deny_line(request_id, tool_name.unwrap_or("asked for"))
            } else {
                content::refuse_line(request_id, subtype)
            };
            self.outbox.push(line, false);
        }
    }

    fn count_unknown(&mut self, kind: &str) {
        let known = self.unknown.contains_key(kind) || self.unknown.len() < UNKNOWN_KINDS_MAX;
        let kind = if known { kind } else { "other" };
        let count = self.unknown.entry(kind.to_owned()).or_default();
        *count += 1;
        let count = *count;
        if count == 1 {
            log::warn!(
                "{}: the agent says something unknown: {kind}",
                self.spec.run
            );
        }
        self.emit(RunFact::Unknown {
            kind: kind.to_owned(),
            count,
        });
    }

    /// Tells a fact now, or after the end of the turn that the gate holds.
    fn emit(&mut self, fact: RunFact) {
        if self.gate.is_some() {
            self.held.push_back(fact);
            return;
        }
        match fact {
            RunFact::TurnEnded(end) if self.waits_for_transcript(&end) => {
                let now = Instant::now();
                self.gate = Some(Gate {
                    end,
                    since: now,
                    next: now,
                });
                self.look_at_gate(now);
            }
            fact => self.listener.fact(self.spec.run, fact),
        }
    }

    fn waits_for_transcript(&self, end: &TurnEnd) -> bool {
        // What the agent had already it wrote in an earlier life.
        !end.had_it_already && self.gate_timeouts < GATE_TIMEOUTS_MAX
    }

    fn look_at_gate(&mut self, now: Instant) {
        let Some(gate) = &mut self.gate else { return };
        if gate.next > now {
            return;
        }
        let waited = now.saturating_duration_since(gate.since);
        let durable = self.listener.is_durable(self.spec.run, &gate.end);
        // An agent that is gone writes no more.
        if !durable && waited < GATE_LIMIT && self.exit.is_none() {
            gate.next = now
                + if waited < GATE_EAGER {
                    GATE_STEP
                } else {
                    GATE_STEP_LATE
                };
            return;
        }
        if !durable && self.exit.is_none() {
            self.gate_timeouts += 1;
            log::warn!(
                "{}: the transcript lacks the end of turn {}",
                self.spec.run,
                gate.end.turn
            );
        }
        let Some(gate) = self.gate.take() else { return };
        self.listener
            .fact(self.spec.run, RunFact::TurnEnded(gate.end));
        while self.gate.is_none() {
            match self.held.pop_front() {
                Some(fact) => self.emit(fact),
                None => break,
            }
        }
    }

    /// The last words of stderr, which may have come with the exit.
    fn lines_end(&mut self) {
        self.read_stderr();
        let run = self.spec.run;
        self.error_text
            .finish(|line| log::info!(target: "agent", "{run}: {line}"));
    }
}

fn read_line(line: &[u8]) -> Option<AgentMessage> {
    (!line.trim_ascii().is_empty()).then(|| parse(line))
}

impl Drop for Pump {
    /// Reaps the agent, by force if it still lives, and tells the end: also when the thread panics.
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        if let (Some(agent), None) = (&mut self.agent, self.exit) {
            let _at = doing(Doing::Reap);
            agent.kill();
            self.exit = agent.wait();
        }
        self.shared.pid.store(0, Ordering::Release);
        let asked = self.shared.asked.load(Ordering::Acquire);
        let exit = match (&self.agent, self.exit) {
            (Some(_), Some(status)) => exit_words(status),
            (Some(_), None) => "ended".to_owned(),
            (None, _) => "not started".to_owned(),
        };
        let stderr_tail = self.error_text.tail();
        let spoke = self.tracker.spoke();
        let mut start_error = self.start_error.take();
        if start_error.is_none() && !spoke && !asked && self.agent.is_some() {
            start_error = Some(explain_early_end(&exit, &stderr_tail, &self.errors));
        }
        // The descriptors go first: whoever hears of the end may count them.
        self.agent = None;
        let end = RunEnd {
            run: self.spec.run,
            spoke,
            start_error,
            asked,
            exit,
            stderr_tail,
            errors: std::mem::take(&mut self.errors),
        };
        // A panic while unwinding would abort the process.
        let listener = &self.listener;
        if catch_unwind(AssertUnwindSafe(|| listener.ended(end))).is_err() {
            log::error!("{}: the listener of a run's end panicked", self.spec.run);
        }
    }
}

#[cfg(test)]
mod tests;
