//! One live agent: [`Run`] is its handle, the pump its thread.
//!
//! `command` starts and ends processes, `pump` is the body of the run's thread, `wire`, `adapt`, `turns`, `content` and
//! `scrub` are pure, `embedded` is an agent of our own. Leaves to the session when a run starts, what it is asked, and
//! what its end means. Rule a change could break: [`RunListener::ended`] is called exactly once for every run that
//! [`Run::start`] returned, after its process is reaped, also when the thread panics; a session would stay busy for
//! ever, or two agents would meet.

pub mod adapt;
pub mod command;
pub mod content;
pub mod embedded;
pub mod hook;
pub mod identity;
pub mod leftovers;
pub mod pipes;
pub mod pump;
pub mod scrub;
pub mod turns;
pub mod wire;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use adapt::{Adapted, Status};
pub use command::start_time_of;
pub use identity::AgentIdentity;
pub use leftovers::{BoxMark, MARK_VARIABLE, end_leftovers};

use crate::error::{Error, Result};
use crate::ids::{RunNo, SessionId, TurnId};
use crate::inbox::Image;

/// What the agent is asked in one line.
#[derive(Debug, Clone)]
pub struct Turn {
    /// Goes to the agent as the line's uuid.
    pub turn: TurnId,
    /// The words, with `[image#N]` where photos stand.
    pub text: String,
    /// Its photos; numbers are unique.
    pub images: Vec<Image>,
}

/// How to start an agent.
#[derive(Debug, Clone)]
pub struct RunSpec {
    /// Number of the run.
    pub run: RunNo,
    /// Its session.
    pub session: SessionId,
    /// Go on with a conversation that exists, or begin it under this id.
    pub resume: bool,
    /// Program and arguments, without the flags of the protocol.
    pub program: Vec<OsString>,
    /// Its working directory.
    pub box_dir: PathBuf,
    /// Added to the inherited environment.
    pub env: Vec<(OsString, OsString)>,
    /// Whose agent it is, by a variable in its environment; finds it after a crash.
    pub mark: BoxMark,
    /// Let its tools run when it asks, instead of a reasoned no.
    pub allow_tools: bool,
}

/// Who hears of a run. Called on the run's own thread with no lock held; what takes long here holds up the agent.
pub trait RunListener: Send + Sync + 'static {
    /// Before the agent is started. An error ends the run with it as its start error.
    ///
    /// # Errors
    /// Why the agent must not be started.
    fn prepare(&self, run: RunNo) -> Result<()>;
    /// The process exists. `start_time` is field 22 of `/proc/<pid>/stat`, which tells it from a later one.
    fn started(&self, run: &Run, pid: u32, start_time: u64);
    /// Something happened.
    fn fact(&self, run: RunNo, fact: RunFact);
    /// Whether the transcript holds all of a turn that ended: polled every few milliseconds, 5 s at most.
    fn is_durable(&self, run: RunNo, end: &TurnEnd) -> bool;
    /// The run is over and its process reaped. The last call, exactly once.
    fn ended(&self, end: RunEnd);
}

/// What happened in a run.
#[derive(Debug)]
pub enum RunFact {
    /// The first message on stdout.
    Spoke,
    /// The agent began a turn that nobody asked for.
    AgentTurnBegan {
        /// A fresh id for it.
        turn: TurnId,
    },
    /// Something to show.
    Frame {
        /// Of this turn.
        turn: TurnId,
        /// The message.
        msg: Adapted,
    },
    /// A background task: `{phase, taskId, settled, …}`.
    Task(serde_json::Value),
    /// The conversation has another id now.
    SessionId {
        /// The id.
        id: SessionId,
        /// It was cleared, and the old conversation stays as it is.
        cleared: bool,
    },
    /// A message that nobody knows, or a line that is none.
    Unknown {
        /// Its type; `unreadable` and `too long` for lines.
        kind: String,
        /// How many of this kind so far in this run.
        count: u64,
    },
    /// A turn is over, and the transcript has it. Once per turn that got a result.
    TurnEnded(TurnEnd),
    /// 10 s since [`Run::interrupt`], and the turn is not over.
    InterruptTimedOut,
    /// The agent told which version of its program it is; again when that changes.
    Version(String),
}

/// How a turn ended.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnEnd {
    /// The turn.
    pub turn: TurnId,
    /// Asked by us, not begun by the agent.
    pub ours: bool,
    /// It failed; the only word on it.
    pub is_error: bool,
    /// The agent's word: `success` also on some failures.
    pub subtype: String,
    /// Details of a failure.
    pub errors: Vec<String>,
    /// A person asked it to end.
    pub interrupted: bool,
    /// The agent held this message from an earlier life and did nothing now.
    pub had_it_already: bool,
    /// Uuid of the transcript's last line of the answer.
    pub last_assistant_uuid: Option<String>,
    /// How long it took, in milliseconds.
    pub duration_ms: Option<u64>,
    /// Model turns in it.
    pub num_turns: Option<u64>,
    /// Cost of the process so far, in US dollars.
    pub total_cost_usd: Option<f64>,
}

/// How a run ended.
#[derive(Debug)]
pub struct RunEnd {
    /// Number of the run.
    pub run: RunNo,
    /// It said something before; a run that did not is a start that failed.
    pub spoke: bool,
    /// Why it did not start, in words a person can act on.
    pub start_error: Option<Error>,
    /// [`Run::close`] or [`Run::kill_now`] was called.
    pub asked: bool,
    /// `exit 1`, `signal 9`, `not started`.
    pub exit: String,
    /// The last 2 KiB of stderr.
    pub stderr_tail: String,
    /// What the agent said about its failure on stdout.
    pub errors: Vec<String>,
    /// It said in words we know that it does not start: what it was given it did not read.
    pub refused: bool,
    /// It did not start because it has a conversation of this id, which it must resume.
    pub has_conversation: bool,
}

/// Handle of one live agent. Cheap to clone; dropping it ends nothing.
#[derive(Clone)]
pub struct Run {
    shared: Arc<pump::Shared>,
}

impl Run {
    /// Starts the run's thread `run-xxxxxxxx`, which starts the agent, and returns at once.
    ///
    /// # Errors
    /// The machine has no thread or descriptor to give; then the listener hears nothing.
    pub fn start(spec: RunSpec, listener: Arc<dyn RunListener>) -> Result<Run> {
        Ok(Run { shared: pump::start(spec, listener)? })
    }

    /// Hands a turn to the agent; one at a time, the next after [`RunFact::TurnEnded`].
    ///
    /// # Errors
    /// The run is closed, or its queue is full; then nothing was sent.
    pub fn send_turn(&self, turn: Turn) -> Result<()> {
        self.shared.send(pump::Order::Turn(turn))
    }

    /// Asks the agent to end the turn under way. Without one it does nothing.
    pub fn interrupt(&self) {
        if let Err(e) = self.shared.send(pump::Order::Interrupt) {
            log::debug!("{}: no interrupt: {e}", self.no());
        }
    }

    /// Ends the run: stdin end, after 2 s SIGTERM, after 5 s more SIGKILL. Returns at once.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Ends the run by SIGKILL. Returns at once.
    pub fn kill_now(&self) {
        self.shared.kill();
    }

    /// From the call of [`Run::close`] or the agent's end on, nothing reaches it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Number of the run.
    #[must_use]
    pub fn no(&self) -> RunNo {
        self.shared.no()
    }

    /// The agent's process id while it lives.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.shared.pid()
    }

    /// Waits until the run's thread ended, `limit` at most; true if it did.
    #[must_use]
    pub fn join_within(&self, limit: Duration) -> bool {
        self.shared.join_within(limit)
    }

    /// How long ago the agent said something, in milliseconds; `None` before its first message.
    #[must_use]
    pub fn last_message_age_ms(&self) -> Option<u64> {
        self.shared.last_message_age_ms()
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    //! Recordings of a real agent's stdout.
    pub const ONE_TEXT: &str = include_str!("../../tests/fixtures/agent-stdout/one_text_turn.jsonl");
    pub const TOOLS: &str = include_str!("../../tests/fixtures/agent-stdout/tools.jsonl");
    pub const RETRIED: &str = include_str!("../../tests/fixtures/agent-stdout/529_twice_then_ok.jsonl");
    pub const BACKGROUND: &str = include_str!("../../tests/fixtures/agent-stdout/background_bash.jsonl");
    pub const INTERRUPTED: &str = include_str!("../../tests/fixtures/agent-stdout/interrupt_streaming.jsonl");
    pub const QUEUED: &str = include_str!("../../tests/fixtures/agent-stdout/queued_while_streaming.jsonl");
    pub const ALL: &[(&str, &str)] = &[
        ("one_text_turn", ONE_TEXT),
        ("tools", TOOLS),
        ("529_twice_then_ok", RETRIED),
        ("background_bash", BACKGROUND),
        ("interrupt_streaming", INTERRUPTED),
        ("queued_while_streaming", QUEUED),
    ];
}
