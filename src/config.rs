//! Flags and `BEEBOX_…` variables to one [`Config`]; every limit of the server with its unit in the name.
//! Leaves meaning to the rooms. Rule a change could break: a bad setting ends the start with one clear line.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Which agent a run starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentKind {
    /// This very binary, `beebox-chatd agent`.
    Embedded,
    /// The real program, `claude` on PATH.
    Claude,
    /// Any program that speaks the protocol, with its arguments.
    Command(Vec<String>),
}

/// Every setting of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The box: the agent's working directory (absolute, created).
    pub box_dir: PathBuf,
    /// Where the gate listens; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Which agent.
    pub agent: AgentKind,
    /// The agent's home; transcripts in `<home>/projects/<slug>/<session>.jsonl`.
    pub agent_home: PathBuf,
    /// Most live agent processes of chat sessions.
    pub live_max: usize,
    /// A session without a turn for so long is closed.
    pub idle_close_s: u64,
    /// Workers of the tiny_http pool.
    pub http_workers: usize,
    /// Bearer token file, 0600.
    pub token_file: Option<PathBuf>,
    /// What a proxy in front is called.
    pub public_url: Option<String>,
    /// How long SIGTERM lets turns finish.
    pub drain_s: u64,
    /// Optional command run in the box before each start of an agent.
    pub prepare: Option<String>,
}

impl Config {
    /// Server state: `<box>/.beebox`.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.box_dir.join(".beebox")
    }
}

/// Largest text of one message, in bytes (WIRE).
pub const TEXT_BYTES_MAX: usize = 1024 * 1024;
/// Largest sum of one message's photos, in base64 bytes (WIRE).
pub const IMAGES_BASE64_BYTES_MAX: usize = 25 * 1024 * 1024;
/// Messages waiting in one session (then 429).
pub const QUEUE_MESSAGES_MAX: usize = 1000;
/// Bytes waiting in one session, text and decoded photos (then 429).
pub const QUEUE_BYTES_MAX: usize = 64 * 1024 * 1024;
