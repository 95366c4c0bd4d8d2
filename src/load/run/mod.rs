//! Runs a scenario: starts the server if asked, lets clients loose, lets it settle, gathers evidence, has it judged.
//!
//! `person` is a scripted client, `watch` many subscribers on one thread, `chaos` kills, `upheaval` moves, copies and
//! exchanges what the server stands on, `gather` collects evidence.
//! Rule a change could break: what a client did is noted before the next thing is done, so that a death on either side
//! loses no evidence.

mod chaos;
mod gather;
mod person;
mod upheaval;
mod watch;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::checker::{self, Sent, Slack, Verdict, Violation};
use super::client::Client;
use super::events::OrderCheck;
use super::figures::{Board, StepFigures};
use super::proc::{self, Usage};
use super::scenario::{Chaos, Group, Scenario};
use super::spawn::{SpawnOptions, Spawned};
use crate::sync::{Mutex, Receiver, Sender, bounded};
use crate::threads::{self, Name, OnPanic, Thread, WORK_STACK_BYTES};

/// How long clients may take to leave after the end of the scenario, beside their own limits.
const LEAVE_WITHIN: Duration = Duration::from_secs(90);
/// Distance of two looks at the server.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);

/// The server to load.
#[derive(Debug)]
pub enum Target {
    /// One that runs already.
    Running {
        /// Where it listens.
        addr: SocketAddr,
        /// Its process, for figures.
        pid: Option<u32>,
        /// Its agent's home, so that the checker reads transcripts itself.
        agent_home: Option<PathBuf>,
    },
    /// One to start, and to end afterwards.
    Spawn(SpawnOptions),
}

/// What to run.
#[derive(Debug)]
pub struct RunOptions {
    /// Who does what.
    pub scenario: Scenario,
    /// On which server.
    pub target: Target,
    /// Whether to kill as the scenario says.
    pub chaos: bool,
    /// Faults to arm inside the server (values of `BEEBOX_FAULT`), one for each of its lives; later ones have none.
    pub faults: Vec<String>,
    /// The token to show.
    pub bearer: Option<String>,
    /// Called about once a second with a line of progress.
    pub progress: fn(&str),
}

/// One look at the server.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    /// Seconds since the start.
    pub at_s: f64,
    /// CPU used since the last look, in percent of one core.
    pub cpu_percent: f64,
    /// The rest.
    #[serde(flatten)]
    pub usage: Usage,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// What ran.
    pub scenario: Scenario,
    /// How long clients were at work.
    pub span: Duration,
    /// Start of the process to listening, when it was started here.
    pub started_after: Option<Duration>,
    /// The table.
    pub rows: Vec<StepFigures>,
    /// The server over time.
    pub samples: Vec<Sample>,
    /// CPU time the server used while clients were at work, all its lives.
    pub server_cpu: Duration,
    /// CPU time of this tool meanwhile.
    pub own_cpu: Duration,
    /// Frames that watchers received.
    pub deliveries: u64,
    /// Servers and agents killed.
    pub kills: (u64, u64),
    /// Failed steps in all.
    pub errors: u64,
    /// The judgement.
    pub verdict: Verdict,
    /// Words for a person: what could not be checked and why.
    pub notes: Vec<String>,
    /// The end of the server's stderr, when it was started here.
    pub stderr: String,
}

impl Outcome {
    /// True when no promise was broken and no more steps failed than the scenario allows.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.verdict.violations.is_empty() && self.scenario.errors_max.is_none_or(|max| self.errors <= max)
    }
}

/// What all clients of a run share.
pub(super) struct World {
    pub scenario: Scenario,
    pub addr: SocketAddr,
    pub bearer: Option<String>,
    /// Makes message ids of this run unlike those of any other.
    pub tag: String,
    /// The conversations made beforehand.
    pub sessions: Mutex<Vec<String>>,
    pub board: Board,
    /// Set once: no new rounds.
    pub stop: AtomicBool,
    /// Disconnects when `stop` is set, so that waits end at once.
    pub stopped: Receiver<()>,
    /// The last event of the settled server; -1 while unknown.
    pub head: AtomicI64,
    pub sent: Mutex<Vec<Sent>>,
    /// When a message was sent, for watchers that see it come back; empty without watchers.
    pub sent_at: Mutex<HashMap<String, Instant>>,
    pub has_watchers: bool,
    pub subscribers: Mutex<Vec<(String, OrderCheck)>>,
    /// Id and hash of kept events as clients saw them.
    pub hashes: Mutex<Vec<(i64, u64)>>,
    pub deliveries: AtomicU64,
    pub faults: Mutex<Vec<Violation>>,
    pub sessions_used: Mutex<Vec<String>>,
}

impl World {
    /// A client of the server, with the scenario's limit.
    pub fn client(&self) -> Client {
        let client = Client::new(self.addr).limit(self.answer_within());
        match &self.bearer {
            Some(token) => client.bearer(token),
            None => client,
        }
    }

    pub fn answer_within(&self) -> Duration {
        Duration::from_secs_f64(self.scenario.answer_within_s)
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits so long, or until the run stops.
    pub fn pause(&self, span: Duration) {
        if !span.is_zero() {
            let _at = threads::doing(threads::Doing::WaitTime);
            let _ = self.stopped.recv_timeout(span);
        }
    }
}

/// The server of a run, and its pid for those that look at it while it may be killed and started again.
pub(super) struct Host {
    pub spawned: Option<Mutex<Spawned>>,
    pub pid: AtomicU64,
}

impl Host {
    pub fn usage(&self) -> Option<Usage> {
        u32::try_from(self.pid.load(Ordering::Acquire)).ok().filter(|pid| *pid > 0).and_then(proc::usage)
    }
}

/// Runs a scenario from start to judgement.
///
/// # Errors
/// When the server does not start or the scenario cannot begin; whatever happens later is in the outcome.
pub fn run(options: RunOptions) -> io::Result<Outcome> {
    let RunOptions { scenario, target, chaos, faults, bearer, progress } = options;
    let dies = chaos || !faults.is_empty();
    allow_many_files();
    let mut notes = Vec::new();
    let (host, addr, agent_home, started_after) = match target {
        Target::Running { addr, pid, agent_home } => {
            let host = Host { spawned: None, pid: AtomicU64::new(u64::from(pid.unwrap_or(0))) };
            (host, addr, agent_home, None)
        }
        Target::Spawn(mut options) => {
            options.args.extend(scenario.server_args.iter().cloned());
            std::fs::create_dir_all(&options.box_dir)?;
            options.box_dir = options.box_dir.canonicalize()?;
            let home = options.box_dir.join(".beebox").join("agent");
            if let Some(plan) = scenario.archive {
                progress("writing the archive");
                gather::write_archive(&home, &options.box_dir, plan, scenario.seed)?;
            }
            let plan = if chaos { scenario.chaos } else { Chaos::default() };
            let home = upheaval::prepare(plan, &mut options).unwrap_or(home);
            let spawned = Spawned::start(options)?;
            let (addr, after) = (spawned.addr(), spawned.started_after);
            let pid = AtomicU64::new(u64::from(spawned.pid()));
            (Host { spawned: Some(Mutex::new(spawned)), pid }, addr, Some(home), Some(after))
        }
    };
    if dies && host.spawned.is_none() {
        return Err(io::Error::other("only a server started here is killed"));
    }
    let host = Arc::new(host);
    let (stopper, stopped) = bounded::<()>(0);
    let has_watchers = scenario.groups.iter().any(|g| matches!(g, Group::Watch(_)));
    let names = scenario.groups.iter().map(|g| g.name().to_owned());
    let mut world = World {
        board: Board::new(names, Duration::from_secs_f64(scenario.duration_s)),
        tag: format!("{:x}", crate::clock::now_ms()),
        scenario,
        addr,
        bearer,
        sessions: Mutex::new(Vec::new()),
        stop: AtomicBool::new(false),
        stopped,
        head: AtomicI64::new(-1),
        sent: Mutex::new(Vec::new()),
        sent_at: Mutex::new(HashMap::new()),
        has_watchers,
        subscribers: Mutex::new(Vec::new()),
        hashes: Mutex::new(Vec::new()),
        deliveries: AtomicU64::new(0),
        faults: Mutex::new(Vec::new()),
        sessions_used: Mutex::new(Vec::new()),
    };
    let from = if host.spawned.is_some() { 0 } else { gather::head(&world)? };
    // What the server makes once, at the first use, is no leak.
    let baseline = gather::warm_up(&world, &host)?;
    progress("making sessions");
    gather::make_sessions(&world)?;
    // The clock of the course starts with the clients, not with the warm-up.
    world.board = Board::new(
        world.scenario.groups.iter().map(|g| g.name().to_owned()),
        Duration::from_secs_f64(world.scenario.duration_s),
    );
    let world = Arc::new(world);

    let begun = Instant::now();
    let (own_before, server_before) = (proc::usage(std::process::id()), host.usage());
    let (samples, sampler_stop, sampler) = start_sampler(&world, &host, progress)?;
    let killer = if dies { Some(chaos::start(&world, &host, chaos, faults)?) } else { None };
    let clients = start_clients(&world)?;

    world.pause(Duration::from_secs_f64(world.scenario.duration_s));
    world.stop.store(true, Ordering::Release);
    drop(stopper);
    let span = begun.elapsed();
    let server_after = host.usage();

    progress("settling");
    let deadline = Instant::now() + LEAVE_WITHIN + Duration::from_secs_f64(world.scenario.insist_s);
    // Disconnected: every client is done with sending, also one whose thread panicked.
    let _ = clients.done.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    let settled = gather::settle(&world);
    if let Err(why) = &settled {
        world.faults.lock().push(Violation::NotSettled { why: why.clone() });
    }
    match gather::head(&world) {
        Ok(head) => world.head.store(head, Ordering::Release),
        Err(e) => {
            world.faults.lock().push(Violation::NotSettled { why: format!("no head of the bus: {e}") });
            world.head.store(0, Ordering::Release);
        }
    }
    for client in &clients.running {
        if !client.thread.join_within(deadline.saturating_duration_since(Instant::now())) {
            let why = format!("client {} did not leave", client.name);
            world.faults.lock().push(Violation::NotSettled { why });
        }
    }
    let kills = killer.map_or((0, 0), chaos::Killer::finish);
    drop(sampler_stop);
    let _ = sampler.join_within(Duration::from_secs(5));
    let own_after = proc::usage(std::process::id());

    progress("gathering evidence");
    let plan = if chaos { world.scenario.chaos } else { Chaos::default() };
    let agent_home = match &host.spawned {
        // The box may lie elsewhere by now, and the home with it.
        Some(spawned) if plan.move_box && !plan.hidden_home => {
            Some(spawned.lock().options_mut().box_dir.join(".beebox").join("agent"))
        }
        Some(_) | None => agent_home,
    };
    let mut evidence = gather::evidence(&world, from, agent_home.as_deref(), settled.is_ok(), &mut notes);
    evidence.unseen = plan.hidden_home;
    let mut verdict = checker::check(&evidence);
    verdict.violations.append(&mut world.faults.lock());
    if let (Some(before), false, true) = (baseline, dies, host.spawned.is_some()) {
        progress("looking for leaks");
        let slack =
            Slack { rss_kib: world.scenario.rss_slack_mib * 1024, fds: world.scenario.files_slack, ..Slack::default() };
        verdict.violations.append(&mut gather::leaks(&world, &host, &before, slack));
    }
    verdict.violations.sort();
    verdict.violations.dedup();

    let samples = std::mem::take(&mut *samples.lock());
    let cpu = |before: Option<Usage>, after: Option<Usage>| match (before, after) {
        (Some(b), Some(a)) => Duration::from_millis(a.cpu_ms.saturating_sub(b.cpu_ms)),
        (Some(_) | None, Some(_) | None) => Duration::ZERO,
    };
    if kills.0 > 0 {
        notes.push("the server was killed: its CPU time is that of its last life".to_owned());
    }
    let server_before = if kills.0 > 0 { server_after.map(|a| Usage { cpu_ms: 0, ..a }) } else { server_before };
    let stderr = host.spawned.as_ref().map(|s| s.lock().stderr()).unwrap_or_default();
    let rows = world.board.rows(span);
    Ok(Outcome {
        span,
        started_after,
        errors: rows.iter().map(|r| r.errors).sum(),
        rows,
        samples,
        server_cpu: cpu(server_before, server_after),
        own_cpu: cpu(own_before, own_after),
        deliveries: world.deliveries.load(Ordering::Relaxed),
        kills,
        verdict,
        notes,
        stderr,
        scenario: world.scenario.clone(),
    })
}

/// A thousand watchers are a thousand open files.
fn allow_many_files() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let wide = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    // What the kernel refuses shows later as an error of the client that got no file.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, wide);
}

struct Running {
    name: String,
    thread: Thread,
}

struct Clients {
    running: Vec<Running>,
    /// Disconnects when the last scripted client is done with sending.
    done: Receiver<()>,
}

fn start_clients(world: &Arc<World>) -> io::Result<Clients> {
    let mut running = Vec::new();
    let (busy, done) = bounded::<()>(0);
    let ramp = Duration::from_secs_f64(world.scenario.ramp_s);
    let mut start = |stem: &str, name: String, body: Box<dyn FnOnce() + Send>| {
        let thread_name = Name::numbered(stem, running.len());
        let thread = threads::spawn(thread_name, WORK_STACK_BYTES, OnPanic::Contain, body)?;
        running.push(Running { name, thread });
        io::Result::Ok(())
    };
    for (at, group) in world.scenario.groups.iter().enumerate() {
        match group {
            Group::Script(script) => {
                for n in 0..script.clients {
                    let delay = ramp.mul_f64(n as f64 / script.clients as f64);
                    let person = person::Person::new(Arc::clone(world), at, script, n, busy.clone());
                    start("client", format!("{}-{n}", script.name), Box::new(move || person.live(delay)))?;
                }
            }
            Group::Watch(watch) => {
                let mut first = 0;
                while first < watch.watchers {
                    let count = watch.per_thread.min(watch.watchers - first);
                    let wall = watch::Wall::new(Arc::clone(world), at, watch, first, count);
                    start("watch", format!("{}-{first}", watch.name), Box::new(move || wall.live()))?;
                    first += count;
                }
            }
        }
    }
    Ok(Clients { running, done })
}

type Sampler = (Arc<Mutex<Vec<Sample>>>, Sender<()>, Thread);

fn start_sampler(world: &Arc<World>, host: &Arc<Host>, progress: fn(&str)) -> io::Result<Sampler> {
    let samples = Arc::new(Mutex::new(Vec::new()));
    let (stop, stopped) = bounded::<()>(0);
    let (into, world, host) = (Arc::clone(&samples), Arc::clone(world), Arc::clone(host));
    let thread = threads::spawn(Name::fixed("load-sample"), WORK_STACK_BYTES, OnPanic::Contain, move || {
        let mut last: Option<(Instant, Usage)> = None;
        let (mut said, mut done_before, mut delivered_before) = (Instant::now(), 0, 0);
        while matches!(stopped.recv_timeout(SAMPLE_EVERY), Err(crate::sync::RecvTimeoutError::Timeout)) {
            let usage = host.usage();
            let now = Instant::now();
            if let Some(usage) = usage {
                let cpu_percent = last.map_or(0.0, |(then, before)| {
                    let used_ms = usage.cpu_ms.saturating_sub(before.cpu_ms) as f64;
                    used_ms / now.duration_since(then).as_secs_f64().max(0.001) / 10.0
                });
                last = Some((now, usage));
                into.lock().push(Sample { at_s: world.board.elapsed().as_secs_f64(), cpu_percent, usage });
            }
            let since = said.elapsed();
            if since >= Duration::from_secs(1) {
                let (done, errors) = world.board.totals();
                let delivered = world.deliveries.load(Ordering::Relaxed);
                let per_s = |now: u64, then: u64| (now - then) as f64 / since.as_secs_f64();
                let server = last.map_or_else(String::new, |(_, u)| {
                    let cpu = into.lock().last().map_or(0.0, |s| s.cpu_percent);
                    format!(
                        " | server {} MiB, {} threads, {} files, {} agents, CPU {cpu:.0} %",
                        u.rss_kib / 1024,
                        u.threads,
                        u.fds,
                        u.children
                    )
                });
                progress(&format!(
                    "{:5.0} s  {:.0} steps/s, {:.0} deliveries/s, {errors} errors{server}",
                    world.board.elapsed().as_secs_f64(),
                    per_s(done, done_before),
                    per_s(delivered, delivered_before),
                ));
                (said, done_before, delivered_before) = (now, done, delivered);
            }
        }
    })?;
    Ok((samples, stop, thread))
}
