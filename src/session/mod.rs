//! Conversations: one [`engine::Session`] for each, the registry that owns them all, and what rides on them.
//! Leaves decisions to `lifecycle::machine`, durability to `journal`, processes to `agent`. Rule a change could break:
//! lock order `sessions` (registry) → `state` (one session) → leaf locks, and nothing slow under any of them.

pub mod chat;
pub mod engine;
pub mod features;
pub mod listener;
pub mod look_up;
pub mod moved;
pub mod pool;
pub mod proof;
pub mod records;
pub mod recover;
pub mod registry;
pub mod thread;
pub mod turns;

use std::ffi::OsString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::agent::{AgentIdentity, BoxMark};
use crate::archive::Archive;
use crate::bus::Bus;
use crate::config::Config;
use crate::ids::RunNo;
use crate::journal::Journal;

/// What every session works with; made once by `app`.
pub struct Context {
    /// The settings.
    pub config: Config,
    /// Command line of the agent without the protocol's flags.
    pub program: Vec<OsString>,
    /// Added to the agent's environment.
    pub agent_env: Vec<(OsString, OsString)>,
    /// The durable record.
    pub journal: Journal,
    /// Events to everybody.
    pub bus: Arc<Bus>,
    /// Transcripts.
    pub archive: Arc<Archive>,
    /// Frames of running and just ended turns.
    pub turns: turns::TurnBuffers,
    /// Agents of a dead server, by session.
    pub leftovers: recover::Leftovers,
    /// Which agents were seen to keep our ids in their transcripts.
    pub proofs: proof::Proofs,
    /// What the agents of this box are known by after a crash.
    pub mark: BoxMark,
    /// Ends prepare hooks when the server goes down.
    pub hooks: crate::agent::hook::Cancel,
    /// The registry, once it exists; sessions ask it for live places.
    pub registry: OnceLock<Weak<registry::Registry>>,
    next_run: AtomicU64,
}

impl Context {
    /// Puts the parts together; the registry comes later.
    #[must_use]
    #[expect(clippy::too_many_arguments, reason = "called once, by app, with every part by name")]
    pub fn new(
        config: Config,
        program: Vec<OsString>,
        agent_env: Vec<(OsString, OsString)>,
        journal: Journal,
        bus: Arc<Bus>,
        archive: Arc<Archive>,
        leftovers: recover::Leftovers,
        proofs: proof::Proofs,
    ) -> Self {
        Self {
            mark: BoxMark::of(&config.box_dir),
            config,
            program,
            agent_env,
            journal,
            bus,
            archive,
            turns: turns::TurnBuffers::default(),
            leftovers,
            proofs,
            hooks: crate::agent::hook::Cancel::default(),
            registry: OnceLock::new(),
            next_run: AtomicU64::new(1),
        }
    }

    /// Which agent a start would start now: its program may be exchanged on disk at any time.
    #[must_use]
    pub fn agent(&self) -> AgentIdentity {
        AgentIdentity::of(&self.program, &self.config.agent_home, &self.config.box_dir)
    }

    /// A number no other run of this server has.
    #[must_use]
    pub fn next_run(&self) -> RunNo {
        RunNo(self.next_run.fetch_add(1, Ordering::Relaxed))
    }

    /// The registry; `None` only while the server is built or torn down.
    #[must_use]
    pub fn registry(&self) -> Option<Arc<registry::Registry>> {
        self.registry.get().and_then(Weak::upgrade)
    }
}
