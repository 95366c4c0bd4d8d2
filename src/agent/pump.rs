//! The body of a run's thread: starts the agent, moves lines both ways, keeps its timers, ends it, reports its end.
//!
//! One poll loop for stdout, stdin, stderr, the agent's exit and a wake descriptor; it never blocks anywhere else, so a
//! photo on stdin cannot dead-lock with the agent's stdout, and stop and death are seen while a turn waits for its
//! transcript. Leaves the meaning of messages to `turns` and `adapt`, and of facts to the listener. Rule a change could
//! break: the agent is reaped before [`RunListener::ended`], and that call comes from `Drop`.

mod end;
mod handle;
#[cfg(feature = "model")]
mod model;
mod told;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::end::Ladder;
use self::handle::ORDERS_MAX;
pub use self::handle::{Order, Shared, start};
use self::told::Gate;
use super::command::{Agent, Tools};
use super::content;
use super::pipes::{ErrorText, Outbox, Pipe, read_from};
use super::turns::TurnTracker;
use super::wire::{AgentMessage, Lines, parse};
use super::{RunFact, RunListener, RunSpec, Turn};
use crate::error::{Error, Result};
use crate::ids::MessageUuid;
use crate::sync::Receiver;
use crate::threads::{Doing, doing};

/// How long a turn has to end once a person asked.
const INTERRUPT_LIMIT: Duration = Duration::from_secs(10);
/// Facts held back behind the gate before stdout is left unread.
const HELD_FACTS_MAX: usize = 1024;
/// Bytes read from a pipe in one call: what a pipe holds.
const READ_BYTES: usize = 64 * 1024;

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
    /// What a turn that was broken off had running.
    tools: Tools,
    spoke_told: bool,
    version: Option<String>,
    interrupt_due: Option<Instant>,
    gate: Option<Gate>,
    gate_timeouts: u32,
    held: VecDeque<RunFact>,
    unknown: BTreeMap<String, u64>,
    start_error: Option<Error>,
    errors: Vec<String>,
}

impl Pump {
    fn new(spec: RunSpec, listener: Arc<dyn RunListener>, shared: Arc<Shared>, orders: Receiver<Order>) -> Self {
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
            tools: Tools::default(),
            spoke_told: false,
            version: None,
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
        crate::faults::point("after_answer_before_spawn");
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
        self.exit.is_some() && self.gate.is_none() && self.drain_until.is_none() && agent.stdout.is_none()
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
        self.outbox.push(content::interrupt_line(MessageUuid::fresh().as_str()), false);
    }

    /// Begins a turn only while none runs: a line written into a turn would be merged or folded by the agent.
    fn begin_due_turn(&mut self) {
        if !matches!(self.ladder, Ladder::Open) || self.tracker.is_busy() || self.gate.is_some() {
            return;
        }
        if let Some((turn, interrupted)) = self.due.pop_front() {
            if let Some(end) = self.tracker.begin(turn.turn.clone()) {
                self.emit(RunFact::TurnEnded(end));
                return;
            }
            self.outbox.push(content::user_line(&turn), true);
            if interrupted {
                self.tracker.interrupt();
                self.interrupt_due = Some(Instant::now() + INTERRUPT_LIMIT);
            }
        }
    }

    fn wait(&mut self) -> Ready {
        let Some(agent) = &self.agent else {
            return Ready::default();
        };
        let timeout = self.next_due().map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        if self.exit.is_none() {
            fds.push(PollFd::new(agent.pidfd(), PollFlags::IN));
        }
        let mut places = [None; 3];
        let reads = self.held.len() < HELD_FACTS_MAX;
        let wanted = [
            (agent.stdin.as_ref().filter(|_| !self.outbox.is_empty()).map(AsFd::as_fd), PollFlags::OUT),
            (agent.stdout.as_ref().filter(|_| reads).map(AsFd::as_fd), PollFlags::IN),
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
        Ready { stdin: is(places[0]), stdout: is(places[1]), stderr: is(places[2]) }
    }

    /// When something is due without anything becoming ready.
    fn next_due(&self) -> Option<Instant> {
        let ladder = match self.ladder {
            Ladder::StdinEnded(due) | Ladder::Terminated(due) if self.exit.is_none() => Some(due),
            Ladder::Open | Ladder::StdinEnded(_) | Ladder::Terminated(_) | Ladder::Killed => None,
        };
        let gate = self.gate.as_ref().map(|gate| gate.next);
        [ladder, gate, self.interrupt_due, self.drain_until].into_iter().flatten().min()
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
}

fn read_line(line: &[u8]) -> Option<AgentMessage> {
    (!line.trim_ascii().is_empty()).then(|| parse(line))
}

#[cfg(test)]
mod tests;
