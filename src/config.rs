//! Flags and `BEEBOX_…` variables to one [`Config`]; every limit of a message with its unit in the name.
//! Leaves meaning to the rooms. Rule a change could break: a bad setting ends the start with one clear line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};

use crate::error::{Code, Error, Result};

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
    /// The broker that kept events are copied to, and what the box is called there.
    pub mirror: Option<MirrorTo>,
    /// How long SIGTERM lets turns finish.
    pub drain_s: u64,
    /// A start or stop that takes longer, in seconds, is logged with a dump of all threads and sessions.
    pub stuck_s: u64,
    /// Optional command run in the box before each start of an agent.
    pub prepare: Option<String>,
    /// Answer tool permission requests with yes instead of a reasoned no.
    pub allow_tools: bool,
    /// Tell the agent that it runs in a sandbox, so that it starts as root.
    pub sandbox: bool,
}

/// Where kept events are copied to.
#[derive(Clone)]
pub struct MirrorTo {
    /// Address of the broker; may hold a password.
    pub url: String,
    /// What the box is called there.
    pub name: String,
}

impl std::fmt::Debug for MirrorTo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let host = self.url.rsplit_once('@').map_or(self.url.as_str(), |(_, host)| host);
        write!(f, "MirrorTo({host}, {})", self.name)
    }
}

/// Largest text of one message, in bytes (WIRE).
pub const TEXT_BYTES_MAX: usize = 1024 * 1024;
/// Largest sum of one message's photos, in base64 bytes (WIRE).
pub const IMAGES_BASE64_BYTES_MAX: usize = 25 * 1024 * 1024;
/// Most photos of one message: a person attaches a few; each costs some hundred bytes wherever it is, however small.
pub const IMAGES_MAX: usize = 100;
/// Messages waiting in one session (then 429).
pub const QUEUE_MESSAGES_MAX: usize = 1000;
/// Bytes waiting in one session, text and decoded photos (then 429).
pub const QUEUE_BYTES_MAX: usize = 64 * 1024 * 1024;

impl Config {
    /// Server state: `<box>/.beebox`.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.box_dir.join(".beebox")
    }
}

/// Hosts long-lived conversations with a coding agent for one box and serves them over one port.
#[derive(Debug, Parser)]
#[command(name = "beebox-chatd", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; without a word: serve.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Settings of the server.
    #[command(flatten)]
    pub serve: ServeFlags,
}

/// The program's other lives.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a box (the default).
    Serve(ServeFlags),
    /// The embedded agent on stdin and stdout; `agent --help` lists its directives.
    #[command(disable_help_flag = true)]
    Agent {
        /// Its own flags.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Write a fresh bearer token into a file (0600) and print how to log in with it.
    Token {
        /// The file to create; an existing one is kept unless --replace is given.
        file: PathBuf,
        /// Write a new token over an existing one.
        #[arg(long)]
        replace: bool,
    },
    /// Print a link that logs a browser into a running box that has a token; good once.
    Login {
        /// The box of the running server.
        #[arg(long = "box", value_name = "DIR", default_value = "./box", env = "BEEBOX_BOX")]
        box_dir: PathBuf,
    },
    /// Follow the events of a running box in the terminal.
    Tail {
        /// The box of the running server.
        #[arg(long = "box", value_name = "DIR", default_value = "./box", env = "BEEBOX_BOX")]
        box_dir: PathBuf,
        /// Start after this event (`EPOCH.ID` or `ID`); without it only new ones.
        #[arg(long)]
        after: Option<String>,
    },
    /// Send a message to a running box and print the answer of the server.
    Send {
        /// The box of the running server.
        #[arg(long = "box", value_name = "DIR", default_value = "./box", env = "BEEBOX_BOX")]
        box_dir: PathBuf,
        /// `new`, `main` or an id.
        #[arg(long, default_value = "main")]
        session: String,
        /// The message; `-` reads it from standard input.
        message: String,
    },
}

/// Settings as flags; each also as `BEEBOX_<NAME>`.
#[derive(Debug, Clone, Args)]
pub struct ServeFlags {
    /// The box: the agent's working directory; created if absent.
    #[arg(long = "box", value_name = "DIR", default_value = "./box", env = "BEEBOX_BOX")]
    pub box_dir: PathBuf,
    /// Numeric address and port; port 0 picks a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7717", env = "BEEBOX_LISTEN")]
    pub listen: String,
    /// `embedded`, `claude`, or a command line that speaks the same protocol.
    #[arg(long, value_name = "AGENT", default_value = "embedded", env = "BEEBOX_AGENT")]
    pub agent: String,
    /// The agent's home. Default: `<box>/.beebox/agent` for the embedded agent, else `$CLAUDE_CONFIG_DIR` or `~/.claude`.
    #[arg(long, value_name = "DIR", env = "BEEBOX_AGENT_HOME")]
    pub agent_home: Option<PathBuf>,
    /// Most agent processes of conversations at once.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1000), env = "BEEBOX_LIVE_MAX")]
    pub live_max: u16,
    /// Seconds without a turn after which an agent is closed.
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..), env = "BEEBOX_IDLE_CLOSE_S")]
    pub idle_close_s: u32,
    /// Threads that answer requests.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256), env = "BEEBOX_HTTP_WORKERS")]
    pub http_workers: u16,
    /// File with the bearer token that every request must carry (see `token`).
    #[arg(long, value_name = "FILE", env = "BEEBOX_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// What a proxy in front is called, such as `https://box.example`.
    #[arg(long, value_name = "URL", env = "BEEBOX_PUBLIC_URL")]
    pub public_url: Option<String>,
    /// Copy kept events into a stream of this Redis, such as `redis://127.0.0.1:6379/` (needs a build with feature `mirror`).
    #[arg(long, value_name = "URL", env = "BEEBOX_MIRROR", hide_env_values = true)]
    pub mirror: Option<String>,
    /// What the box is called there; default: the name of its folder.
    #[arg(long, value_name = "NAME", env = "BEEBOX_MIRROR_NAME")]
    pub mirror_name: Option<String>,
    /// Seconds that SIGTERM lets turns finish; a second signal skips them.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=86_400), env = "BEEBOX_DRAIN_S")]
    pub drain_s: u32,
    /// Log a dump of all threads and sessions when a start or stop takes longer than this, in seconds
    #[arg(long, env = "BEEBOX_STUCK_S", value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..))]
    pub stuck_s: u32,
    /// Command run by `sh -c` in the box before each start of an agent.
    #[arg(long, value_name = "CMD", env = "BEEBOX_PREPARE")]
    pub prepare: Option<String>,
    /// Allow the tools the agent asks for, when it asks at all.
    #[arg(long, env = "BEEBOX_ALLOW_TOOLS")]
    pub allow_tools: bool,
    /// Tell the agent that this machine is a sandbox (`IS_SANDBOX=1`), so that it starts as root.
    #[arg(long, env = "BEEBOX_SANDBOX")]
    pub sandbox: bool,
    /// Print the settings as they would be used, then exit.
    #[arg(long)]
    pub print_config: bool,
}

impl ServeFlags {
    /// Checks the settings and creates the box.
    ///
    /// # Errors
    /// `bad_field` with the setting, its value and what it may be.
    pub fn into_config(self) -> Result<Config> {
        let bad = |text: String| Error::new(Code::BadField, text);
        let listen: SocketAddr = self.listen.parse().map_err(|_| {
            bad(format!("--listen {:?}: a numeric address with a port, such as 127.0.0.1:7717 or [::1]:0", self.listen))
        })?;
        if !listen.ip().is_loopback() && self.token_file.is_none() {
            return Err(bad(format!(
                "--listen {listen}: an address that others can reach needs --token-file (see `beebox-chatd token`)"
            )));
        }
        let box_dir = make_box(&self.box_dir)?;
        let agent = match self.agent.trim() {
            "embedded" => AgentKind::Embedded,
            "claude" => AgentKind::Claude,
            "" => return Err(bad("--agent is empty: embedded, claude or a command line".into())),
            line => AgentKind::Command(
                shlex::split(line)
                    .ok_or_else(|| bad(format!("--agent {line:?}: a quote or backslash is not closed")))?,
            ),
        };
        let agent_home = match self.agent_home {
            Some(home) => absolute(&home)?,
            None if agent == AgentKind::Embedded => box_dir.join(".beebox").join("agent"),
            None => match std::env::var_os("CLAUDE_CONFIG_DIR").filter(|v| !v.is_empty()) {
                Some(home) => absolute(Path::new(&home))?,
                None => std::env::var_os("HOME")
                    .map(|home| Path::new(&home).join(".claude"))
                    .ok_or_else(|| bad("--agent-home is needed: neither CLAUDE_CONFIG_DIR nor HOME is set".into()))?,
            },
        };
        let mirror = self.mirror.filter(|url| !url.is_empty()).map(|url| {
            let folder = || box_dir.file_name().map_or("box".into(), |name| name.to_string_lossy().into_owned());
            MirrorTo { url, name: self.mirror_name.unwrap_or_else(folder) }
        });
        if cfg!(not(feature = "mirror")) && mirror.is_some() {
            return Err(bad("--mirror: this program was built without it (cargo build --features mirror)".into()));
        }
        Ok(Config {
            box_dir,
            listen,
            agent,
            agent_home,
            live_max: usize::from(self.live_max),
            idle_close_s: u64::from(self.idle_close_s),
            http_workers: usize::from(self.http_workers),
            token_file: self.token_file,
            public_url: self.public_url,
            mirror,
            drain_s: u64::from(self.drain_s),
            stuck_s: u64::from(self.stuck_s),
            prepare: self.prepare,
            allow_tools: self.allow_tools,
            sandbox: self.sandbox,
        })
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| Error::from(e).context(path.display()))
}

/// Creates the box and its state folder; the path is canonical, since the agent names its transcripts by it.
fn make_box(dir: &Path) -> Result<PathBuf> {
    let cannot = |what: &Path, e: std::io::Error| {
        Error::new(Code::BadField, format!("--box {}: {}: {e}", dir.display(), what.display()))
    };
    std::fs::create_dir_all(dir).map_err(|e| cannot(dir, e))?;
    let dir_canonical = dir.canonicalize().map_err(|e| cannot(dir, e))?;
    let state = dir_canonical.join(".beebox");
    std::fs::create_dir_all(&state).map_err(|e| cannot(&state, e))?;
    // Named by us: of several servers started at once each has its own.
    let probe = state.join(format!("writable-{}", std::process::id()));
    std::fs::write(&probe, b"").and_then(|()| std::fs::remove_file(&probe)).map_err(|e| cannot(&state, e))?;
    Ok(dir_canonical)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_can_reach_needs_a_token() {
        let parse = |args: &[&str]| {
            let cli = Cli::try_parse_from([&["beebox-chatd"], args].concat()).unwrap();
            cli.serve.into_config()
        };
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().to_str().unwrap();
        assert!(parse(&["--box", dir]).is_ok());
        let error = parse(&["--box", dir, "--listen", "0.0.0.0:0"]).unwrap_err();
        assert!(error.text().contains("--token-file"), "{error}");
        assert!(parse(&["--box", dir, "--listen", "0.0.0.0:0", "--token-file", "t"]).is_ok());
        for bad in [&["--listen", "localhost:1"][..], &["--agent", " "], &["--agent", "'x"]] {
            assert!(parse(&[&["--box", dir], bad].concat()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_mirror_is_refused_by_a_program_that_has_none_and_its_password_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let args = ["x", "--box", dir.path().to_str().unwrap(), "--mirror", "redis://:secret@127.0.0.1:1/"];
        match Cli::try_parse_from(args).unwrap().serve.into_config() {
            Ok(config) => {
                if !cfg!(feature = "mirror") {
                    panic!("accepted without the feature");
                }
                let shown = format!("{config:?}");
                assert!(shown.contains("127.0.0.1:1") && !shown.contains("secret"), "{shown}");
            }
            Err(e) => assert!(!cfg!(feature = "mirror") && e.text().contains("--features mirror"), "{e}"),
        }
    }

    #[test]
    fn a_box_that_cannot_be_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let flags = Cli::try_parse_from(["x", "--box", file.to_str().unwrap()]).unwrap().serve;
        let error = flags.into_config().unwrap_err();
        assert!(error.text().contains("--box") && error.text().contains("file"), "{error}");
    }
}
