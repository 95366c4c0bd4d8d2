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
use crate::http::gate::exchange::Exchanges;
use crate::http::gate::limits::Limits;
use crate::http::gate::{self, Gate, GateConfig, Local};
use crate::http::handlers::Handlers;
use crate::http::server::{self, Server, ServerConfig};
use crate::journal::{Change, Faults, Journal, JournalOptions, Unit};
#[cfg(feature = "mirror")]
use crate::mirror::{self, Mirror};
use crate::push::{self, Push, PushLimits};
use crate::session::Context;
use crate::session::engine::{Session, State};
use crate::session::moved::{self, Paths};
use crate::session::pool::{self, Pool};
use crate::session::proof::{self, Proofs};
use crate::session::recover::Leftovers;
use crate::session::registry::Registry;
use crate::threads::{Doing, doing};

/// Workers beside the pool for routes that wait for a turn.
const WAITING_WORKERS: usize = 16;
/// After the drain, everything is over within this (WIRE, Command line).
const LAST_LIMIT: Duration = Duration::from_secs(9);

/// A server that was killed while it started an agent: the half-born child holds its lock until it becomes the agent.
/// So long it may, which a supervisor's restart at once would meet …
const LOCK_LIMIT: Duration = Duration::from_secs(5);
/// … with looks this far apart: nothing tells that a lock is free but a call that would wait without a limit.
const LOCK_STEP: Duration = Duration::from_millis(10);

/// A running server.
pub struct App {
    context: Arc<Context>,
    registry: Arc<Registry>,
    push: Arc<Push>,
    #[cfg(feature = "mirror")]
    mirror: Option<Arc<Mirror>>,
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
        #[cfg(feature = "mirror")]
        if let Some(to) = &config.mirror {
            mirror::check(&to.url)?;
        }
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
        let (journal, recovered) = Journal::open(
            &state_dir,
            JournalOptions { faults: Faults::from_env(), ..JournalOptions::default() },
            bus.clone(),
        )?;
        bus.open(recovered.epoch.clone(), recovered.head);

        let kept = |key: &str| recovered.state.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str());
        let paths = Paths::read(kept(moved::STATE_KEY), &config.box_dir);
        let archive = Arc::new(Archive::new(&config.agent_home, &config.box_dir, paths.former));
        let leftovers = Leftovers::new(recovered.agents.clone());
        let proofs = Proofs::from_kept(kept(proof::STATE_KEY));
        let program = program(&config.agent)?;
        let context = Arc::new(Context::new(
            config.clone(),
            program,
            agent_env(&config),
            journal.clone(),
            bus.clone(),
            archive,
            leftovers,
            proofs,
        ));
        if let Some(value) = paths.to_keep {
            keep_state(&journal, moved::STATE_KEY, value);
        }
        let threads = recovered.threads.clone();
        let registry = Registry::new(context.clone(), recovered)?;
        let pool = Arc::new(Pool::new(registry.clone(), &threads, pool::WAIT_LIMIT));

        #[cfg(feature = "mirror")]
        let mirror = match &config.mirror {
            Some(to) => Some(Arc::new(mirror::start(&to.url, &to.name, &bus, Arc::new(journal.clone()))?)),
            None => None,
        };
        // The pool's one run is beside the cap.
        let (limits, agents) = (Limits::default(), config.live_max + 1);
        let mut push_limits = PushLimits::default();
        push_limits.clients_max =
            push_limits.clients_max.min(gate::shares(config.http_workers, agents, &limits).streams);
        let push = Arc::new(push::start(bus, Arc::new(journal.clone()), push_limits)?);
        let going_down = Arc::new(AtomicBool::new(false));
        let exchanges = Exchanges::new()?;
        let server = server::start(
            &ServerConfig {
                socket: state_dir.join("http.sock"),
                workers: config.http_workers,
                waiting: WAITING_WORKERS,
            },
            Arc::new(Handlers::new(registry.clone(), pool, going_down.clone())),
            exchanges.clone(),
        )?;
        let local = Arc::new(Rooms {
            context: context.clone(),
            push: push.clone(),
            #[cfg(feature = "mirror")]
            mirror: mirror.clone(),
            going_down: going_down.clone(),
        });
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
                limits,
                agents,
                exchanges,
            },
            local,
            Arc::new(move |upgrade| to_push.adopt(upgrade)),
        )?;
        registry.resume();
        {
            let (context, push) = (Arc::downgrade(&context), Arc::downgrade(&push));
            dump::set_page(Box::new(move || match (context.upgrade(), push.upgrade()) {
                (Some(context), Some(push)) => page(&context, &push),
                _ => dump::threads_page(),
            }));
        }
        Ok(Self {
            context,
            registry,
            push,
            #[cfg(feature = "mirror")]
            mirror,
            server,
            gate,
            going_down,
            _box_lock: box_lock,
        })
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
        let (context, push) = (self.context.clone(), self.push.clone());
        move || page(&context, &push)
    }

    /// Reads the token file again, for SIGHUP; a file that cannot be read changes nothing and is logged.
    pub fn token_reader(&self) -> impl Fn() + Send + Sync + 'static {
        let set = self.gate.token_setter();
        let path = self.context.config.token_file.clone();
        move || match path.as_deref().map(gate::token::read) {
            Some(Ok(token)) => {
                set(token);
                log::warn!("SIGHUP: the token file was read again");
            }
            Some(Err(e)) => log::error!("SIGHUP: the token stays as it was: {}", e.text()),
            None => log::warn!("SIGHUP: there is no --token-file to read again"),
        }
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
        #[cfg(feature = "mirror")]
        if let Some(mirror) = &self.mirror {
            step("mirror", mirror.shutdown(left() / 2));
        }
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
    let deadline = Instant::now() + LOCK_LIMIT;
    while rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
        let holder = std::fs::read_to_string(&path).unwrap_or_default();
        let holder = holder.trim();
        if ends_soon(holder) && Instant::now() < deadline {
            let _at = doing(Doing::WaitTime);
            std::thread::sleep(LOCK_STEP);
            continue;
        }
        let who = if holder.is_empty() { "another server".to_owned() } else { format!("the server with pid {holder}") };
        let box_dir = state_dir.parent().unwrap_or(state_dir);
        return Err(Error::new(Code::BadField, format!("box {} is served by {who}", box_dir.display())));
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

/// Keeps a value of the server's own, whenever the disk takes it.
fn keep_state(journal: &Journal, key: &str, value: String) {
    let unit = Unit { changes: vec![Change::SetState { key: key.to_owned(), value }], events: Vec::new() };
    match journal.reserve_for_outcome(1) {
        Ok(place) => journal.owe(unit, place, Box::new(|_| ())),
        Err(e) => log::error!("{key} is not kept: {e}"),
    }
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
    #[cfg(feature = "mirror")]
    mirror: Option<Arc<Mirror>>,
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
        let rooms = [("journal", format!("{journal:?}")), ("push", format!("{push:?}"))];
        #[cfg(feature = "mirror")]
        let rooms = rooms.into_iter().chain(self.mirror.as_ref().map(|m| ("mirror", format!("{:?}", m.stats()))));
        for (room, debug) in rooms {
            for (name, value) in numbers(&debug) {
                let _ = writeln!(page, "beebox_{room}_{name} {value}");
            }
        }
        let mut phases = std::collections::BTreeMap::new();
        let mut queued = 0;
        let until = Instant::now() + PAGE_WAITS;
        if let Some(registry) = self.context.registry() {
            for session in registry.all() {
                let limit = until.saturating_duration_since(Instant::now()).min(Duration::from_millis(20));
                if let Ok(state) = session.try_state(limit) {
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
        page(&self.context, &self.push)
    }
}

/// `name: 12` pairs of a flat struct's Debug form.
fn numbers(debug: &str) -> impl Iterator<Item = (&str, u64)> {
    debug.split(['{', '}', ',']).filter_map(|part| {
        let (name, value) = part.split_once(':')?;
        Some((name.trim(), value.trim().parse().ok()?))
    })
}

/// Longest the page waits for locks of sessions, in all: it is made on the gate's thread.
const PAGE_WAITS: Duration = Duration::from_millis(100);
/// A lock held longer than this is told.
const HELD_TOLD_MS: u64 = 1_000;
/// An agent in a turn that says nothing for so long is told as silent; it is never punished.
const SILENT_MS: u64 = 60_000;

fn page(context: &Context, push: &Push) -> String {
    let mut page = dump::threads_page();
    let Some(registry) = context.registry() else {
        page.push_str("sessions: the server is being built or torn down\n");
        return page;
    };
    let mut held: Vec<_> = registry.held().map(|held| ("sessions".to_owned(), held)).into_iter().collect();
    let now = crate::clock::now_ms();
    let until = Instant::now() + PAGE_WAITS;
    let (mut rows, mut live, mut wait) = (Vec::new(), 0, 0);
    for session in registry.all() {
        let limit = until.saturating_duration_since(Instant::now()).min(Duration::from_millis(20));
        let state = match session.try_state(limit) {
            Ok(state) => state,
            Err(holder) => {
                let line = format!("  {} (its first id): its lock is held\n", session.first_id());
                rows.push(((0, 0), line));
                held.extend(holder.map(|held| (format!("state of {}", session.first_id()), held)));
                continue;
            }
        };
        live += usize::from(state.machine.holds_slot() && !session.is_thread());
        wait += usize::from(state.machine.wants_slot() && !session.is_thread());
        // What somebody may wait for comes first, what is parked last.
        let rank = match (state.machine.holds_slot(), state.machine.is_settled()) {
            (true, _) => 1,
            (false, false) => 2,
            (false, true) => 3,
        };
        rows.push(((rank, state.since_ms), row(&session, &state, now)));
    }
    rows.sort();
    let _ = writeln!(
        page,
        "sessions: {}, live places: {live} of {} taken, {wait} wait for one",
        rows.len(),
        context.config.live_max
    );
    page.extend(rows.into_iter().map(|(_, line)| line));
    held.retain(|(_, held)| held.for_ms >= HELD_TOLD_MS);
    let _ = writeln!(page, "locks held for over {HELD_TOLD_MS} ms: {}", held.len());
    let names = crate::threads::table().0;
    for (lock, held) in held {
        let name = names.iter().find(|row| row.tid == held.tid).map_or("an unlisted thread", |row| row.name.as_str());
        let _ = writeln!(page, "  {lock}: by {name} (tid {}) for {}", held.tid, dump::span(held.for_ms));
    }
    let j = context.journal.stats();
    let _ = writeln!(
        page,
        "journal: {} places taken, {} bytes queued, {} outcomes owed, last commit {} us; {} commits ({} records at most), \
         {} failed; log of {} pages, emptied {} times in {} us at most; trouble: {}",
        j.places,
        j.queue_bytes,
        j.owed,
        j.commit_us,
        j.commits,
        j.batch_max,
        j.failures,
        j.wal_pages,
        j.checkpoints,
        j.checkpoint_us_max,
        j.trouble.as_deref().unwrap_or("none")
    );
    let _ = writeln!(page, "bus: head {}", context.bus.head());
    let p = push.stats();
    let _ = writeln!(
        page,
        "push: {} WebSocket and {} SSE clients, {} replaying, {} blocked, furthest behind {} frames, {} bytes held for \
         blocked ones; {} frames in {} bytes delivered, {} transient ones dropped, {} resyncs; closed {} stalled, {} \
         silent, {} for what they sent",
        p.websocket_clients,
        p.sse_clients,
        p.replaying_clients,
        p.blocked_clients,
        p.lag_frames_max,
        p.pinned_bytes,
        p.frames_sent,
        p.bytes_sent,
        p.transient_dropped,
        p.resyncs,
        p.closed_stalled,
        p.closed_silent,
        p.closed_protocol
    );
    page
}

/// One session in the page. No words of anybody: ids, numbers, spans of time.
fn row(session: &Session, state: &State, now: crate::clock::UnixMs) -> String {
    let (machine, phase) = (&state.machine, state.machine.phase());
    let since = dump::span(u64::try_from(now - state.since_ms).unwrap_or(0));
    let mut row = format!("  {} {:<9} for {since}  queued {}", state.id, phase.kind().word(), machine.queued());
    for (is_so, words) in [
        (session.is_thread(), "of a thread"),
        (machine.is_closing(), "closing"),
        (machine.wants_slot(), "waits for a live place"),
        (state.start_error.is_some(), "its last start failed"),
    ] {
        if is_so {
            let _ = write!(row, "  {words}");
        }
    }
    if let Some(turn) = machine.current_turn() {
        let _ = write!(row, "  turn {turn}");
    }
    if !state.tasks.is_empty() {
        let _ = write!(row, "  background tasks {}", state.tasks.len());
    }
    if state.pins > 0 {
        let _ = write!(row, "  sends under way {}", state.pins);
    }
    if let Some(run) = phase.run() {
        let _ = write!(row, "  {} pid {}", run.no(), run.pid().unwrap_or(0));
        match run.last_message_age_ms() {
            None => row.push_str("  said nothing yet"),
            Some(age) if age >= SILENT_MS && phase.is_busy() => {
                let _ = write!(row, "  no message for {} min", age / 60_000);
            }
            Some(age) => {
                let _ = write!(row, "  last message {} ago", dump::span(age));
            }
        }
    }
    row.push('\n');
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_of_a_dead_server_is_waited_for_and_that_of_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = lock_box(dir.path()).unwrap();
        let refused = lock_box(dir.path()).unwrap_err();
        assert!(refused.text().contains(&format!("pid {}", std::process::id())), "{}", refused.text());
        // Its server died, and a child that was just being born still has the lock.
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        std::fs::write(dir.path().join("server.lock"), format!("{}\n", dead.id())).unwrap();
        let child = crate::threads::spawn(
            crate::threads::Name::fixed("half-born"),
            crate::threads::SMALL_STACK_BYTES,
            crate::threads::OnPanic::Contain,
            move || {
                std::thread::sleep(Duration::from_millis(200));
                drop(file);
            },
        )
        .unwrap();
        lock_box(dir.path()).unwrap();
        assert!(child.join_within(LOCK_LIMIT));
    }
}
