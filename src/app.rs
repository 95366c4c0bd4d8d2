//! Builds every part in order, owns them, and shuts them down in reverse, each step with a time limit.
//! Leaves flags to `config` and signals to `main`. Rule a change could break: queues are loaded before the port opens,
//! owed turns are delivered after it, and no step of the end can wait for ever.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{Seek as _, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::archive::Archive;
use crate::bus::Bus;
use crate::config::{AgentKind, Config};
use crate::dump;
use crate::error::{Code, Error, Result};
use crate::http::gate::limits::Limits;
use crate::http::gate::notes::Notes;
use crate::http::gate::{self, Gate, GateConfig, Local};
use crate::http::handlers::Handlers;
use crate::http::server::{self, Server, ServerConfig};
use crate::journal::{Journal, JournalOptions};
use crate::push::{self, Push, PushLimits};
use crate::session::Context;
use crate::session::listener::KEEPS_UUIDS_KEY;
use crate::session::pool::{self, Pool};
use crate::session::recover::Leftovers;
use crate::session::registry::Registry;

/// Workers beside the pool for routes that wait for a turn.
const WAITING_WORKERS: usize = 16;
/// After the drain, everything is over within this (WIRE, Command line).
const LAST_LIMIT: Duration = Duration::from_secs(9);

/// A running server.
pub struct App {
    context: Arc<Context>,
    registry: Arc<Registry>,
    push: Arc<Push>,
    server: Server,
    gate: Gate,
    going_down: Arc<AtomicBool>,
    _box_lock: std::fs::File,
}

impl App {
    /// Starts a server; when this returns, the port answers.
    ///
    /// # Errors
    /// `bad_field` for a setting that cannot work here (box in use, port in use, token file), else what failed.
    pub fn start(config: Config) -> Result<Self> {
        let state_dir = config.state_dir();
        let box_lock = lock_box(&state_dir)?;
        clear_active_marks(&state_dir);
        std::fs::create_dir_all(&config.agent_home)
            .map_err(|e| Error::new(Code::BadField, format!("--agent-home {}: {e}", config.agent_home.display())))?;
        let token = match &config.token_file {
            Some(path) => Some(gate::token::read(path).map_err(|e| Error::new(Code::BadField, e.text()))?),
            None => None,
        };

        let bus = Arc::new(Bus::unopened());
        let (journal, recovered) = Journal::open(&state_dir, JournalOptions::default(), bus.clone())?;
        bus.open(recovered.epoch.clone(), recovered.head);

        let archive = Arc::new(Archive::new(&config.agent_home, &config.box_dir));
        let leftovers = Leftovers::new(recovered.agents.clone());
        let keeps_uuids = recovered.state.iter().any(|(key, value)| key == KEEPS_UUIDS_KEY && value == "true");
        let program = program(&config.agent)?;
        let context = Arc::new(Context::new(
            config.clone(),
            program,
            agent_env(&config),
            journal.clone(),
            bus.clone(),
            archive,
            leftovers,
            keeps_uuids,
        ));
        let threads = recovered.threads.clone();
        let registry = Registry::new(context.clone(), recovered)?;
        let pool = Arc::new(Pool::new(registry.clone(), &threads, pool::WAIT_LIMIT));

        let push = Arc::new(push::start(bus, Arc::new(journal.clone()), PushLimits::default())?);
        let going_down = Arc::new(AtomicBool::new(false));
        let notes = Notes::new()?;
        let server = server::start(
            &ServerConfig {
                socket: state_dir.join("http.sock"),
                workers: config.http_workers,
                waiting: WAITING_WORKERS,
            },
            Arc::new(Handlers::new(registry.clone(), pool, going_down.clone())),
            notes.clone(),
        )?;
        let local = Arc::new(Rooms { context: context.clone(), push: push.clone(), going_down: going_down.clone() });
        let to_push = push.clone();
        let gate = gate::start(
            GateConfig {
                listen: config.listen,
                chat_socket: Some(state_dir.join("chat.sock")),
                http_socket: state_dir.join("http.sock"),
                state_dir,
                public_url: config.public_url.clone(),
                token,
                workers: config.http_workers,
                limits: Limits::default(),
                notes,
            },
            local,
            Arc::new(move |upgrade| to_push.adopt(upgrade)),
        )?;
        registry.resume();
        Ok(Self { context, registry, push, server, gate, going_down, _box_lock: box_lock })
    }

    /// Where the gate listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.gate.address()
    }

    /// The gate, for a token that was changed and for logins.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// The dump, for SIGQUIT.
    pub fn dump_page(&self) -> impl Fn() -> String + Send + Sync + 'static {
        let context = self.context.clone();
        move || page(&context)
    }

    /// Ends the server: takes no new message, lets turns finish for `--drain-s` unless `hurry` says no, closes runs,
    /// clients and journal. True if everything ended in order within the limits.
    #[must_use]
    pub fn shut_down(self, hurry: &dyn Fn() -> bool) -> bool {
        self.going_down.store(true, Ordering::Release);
        let drain = Duration::from_secs(self.context.config.drain_s);
        let mut clean = self.registry.shut_down(drain, hurry, LAST_LIMIT.saturating_sub(Duration::from_secs(2)));
        let last = Instant::now() + Duration::from_secs(2);
        let left = || last.saturating_duration_since(Instant::now());
        let mut step = |name: &str, ended: bool| {
            if !ended {
                log::warn!("{name} did not end in time");
                clean = false;
            }
        };
        step("push", self.push.shutdown(left() / 3));
        step("gate", self.gate.shutdown(left() / 3));
        step("http", self.server.shutdown(left() / 2));
        step("journal", self.context.journal.shutdown(left().max(Duration::from_millis(300))));
        clean
    }
}

/// True once the process `pid` has ended, within the moment that a killed server takes to let go of its box.
fn ends_soon(pid: &str) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) else { return true };
    // No such process: it has let go already.
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return true };
    let moment = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    matches!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&moment)), Ok(1))
}

/// Removes the marks of starts and runs that a dead server left behind.
fn clear_active_marks(state_dir: &Path) {
    for entry in std::fs::read_dir(state_dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("chat-active-") {
            // Gone already is as good.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// One server for a box: an advisory lock that the kernel gives back whatever happens. Not inherited by agents.
fn lock_box(state_dir: &Path) -> Result<std::fs::File> {
    let path = state_dir.join("server.lock");
    let mut file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|e| Error::new(Code::BadField, format!("{}: {e}", path.display())))?;
    let lock = || rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    let read_holder = || std::fs::read_to_string(&path).unwrap_or_default();
    if lock().is_err() && !(ends_soon(read_holder().trim()) && lock().is_ok()) {
        let holder = read_holder();
        let holder = holder.trim();
        let who = if holder.is_empty() { "another server".to_owned() } else { format!("the server with pid {holder}") };
        let box_dir = state_dir.parent().unwrap_or(state_dir);
        return Err(Error::new(Code::BadField, format!("box {} is served by {who}", box_dir.display())));
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

fn program(agent: &AgentKind) -> Result<Vec<OsString>> {
    Ok(match agent {
        // The very file that runs, also after it was replaced on disk by an update.
        AgentKind::Embedded => vec!["/proc/self/exe".into(), "agent".into()],
        AgentKind::Claude => vec!["claude".into()],
        AgentKind::Command(words) => words.iter().map(OsString::from).collect(),
    })
}

fn agent_env(config: &Config) -> Vec<(OsString, OsString)> {
    let mut env: Vec<(OsString, OsString)> =
        vec![("CLAUDE_CONFIG_DIR".into(), config.agent_home.clone().into_os_string())];
    if config.sandbox {
        env.push(("IS_SANDBOX".into(), "1".into()));
    }
    env
}

/// What the gate's own routes ask.
struct Rooms {
    context: Arc<Context>,
    push: Arc<Push>,
    going_down: Arc<AtomicBool>,
}

impl Local for Rooms {
    fn ready(&self) -> std::result::Result<(), String> {
        if self.going_down.load(Ordering::Relaxed) {
            return Err("the server is going down".into());
        }
        self.context.journal.health().map_err(|e| e.text().to_owned())
    }

    fn metrics(&self, page: &mut String) {
        let journal = self.context.journal.stats();
        let push = self.push.stats();
        // The stats of these rooms are plain counters; their field names are the metric names.
        for (room, debug) in [("journal", format!("{journal:?}")), ("push", format!("{push:?}"))] {
            for (name, value) in numbers(&debug) {
                let _ = writeln!(page, "beebox_{room}_{name} {value}");
            }
        }
        let mut phases = std::collections::BTreeMap::new();
        let mut queued = 0;
        if let Some(all) = self.context.registry().and_then(|r| r.try_all()) {
            for session in all {
                if let Some(state) = session.try_state() {
                    *phases.entry(state.machine.phase().kind()).or_insert(0u64) += 1;
                    queued += state.machine.queued();
                }
            }
        }
        for (phase, count) in phases {
            let _ = writeln!(page, "beebox_sessions{{phase=\"{}\"}} {count}", phase.word());
        }
        let _ = writeln!(page, "beebox_messages_queued {queued}");
    }

    fn debug_threads(&self) -> String {
        page(&self.context)
    }
}

/// `name: 12` pairs of a flat struct's Debug form.
fn numbers(debug: &str) -> impl Iterator<Item = (&str, u64)> {
    debug.split(['{', '}', ',']).filter_map(|part| {
        let (name, value) = part.split_once(':')?;
        Some((name.trim(), value.trim().parse().ok()?))
    })
}

fn page(context: &Context) -> String {
    let mut page = dump::threads_page();
    let Some(all) = context.registry().and_then(|r| r.try_all()) else {
        page.push_str("sessions: the registry's lock is held\n");
        return page;
    };
    let _ = writeln!(page, "sessions: {}", all.len());
    let now = crate::clock::now_ms();
    for session in all {
        let Some(state) = session.try_state() else {
            page.push_str("  a session's lock is held\n");
            continue;
        };
        let phase = state.machine.phase();
        let _ = write!(
            page,
            "  {} {:<9} for {} ms  queued {}",
            state.id,
            phase.kind().word(),
            now - state.since_ms,
            state.machine.queued()
        );
        if let Some(turn) = state.machine.current_turn() {
            let _ = write!(page, "  turn {turn}");
        }
        if let Some(run) = phase.run() {
            let _ = write!(page, "  {} pid {}", run.no(), run.pid().unwrap_or(0));
            if let Some(age) = run.last_message_age_ms() {
                let _ = write!(page, "  last message {age} ms ago");
            }
        }
        page.push('\n');
    }
    let stats = context.journal.stats();
    let _ = writeln!(page, "journal: {stats:?}");
    let _ = writeln!(page, "bus: head {}", context.bus.head());
    page
}
