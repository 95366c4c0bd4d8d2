//! Deaths on purpose: kill -9 of the server and of its agents at random moments, and faults armed inside the server.
//! A server that died, however, is started again on the same port at once, as a supervisor would.
//! Rule a change could break: only processes of the server that was started here are killed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::{Host, World, upheaval};
use crate::load::checker::Violation;
use crate::load::proc;
use crate::load::rng::Rng;
use crate::load::scenario::Chaos;
use crate::threads::{self, Name, OnPanic, Thread, WORK_STACK_BYTES};

/// The lane of the random numbers, apart from those of clients.
const LANE: u64 = u64::MAX;

/// How long it takes at most to see that the run is over.
const SLICE: Duration = Duration::from_millis(50);
/// The variable that arms faults inside the server.
const FAULT_VARIABLE: &str = "BEEBOX_FAULT";

/// The one who kills and starts again.
pub struct Killer {
    thread: Thread,
    over: Arc<AtomicBool>,
    servers: Arc<AtomicU64>,
    agents: Arc<AtomicU64>,
}

impl Killer {
    /// Ends the watch over the server; how many servers and agents died.
    pub fn finish(self) -> (u64, u64) {
        self.over.store(true, Ordering::Release);
        // A server just being started again takes a moment.
        let _ = self.thread.join_within(Duration::from_secs(30));
        (self.servers.load(Ordering::Relaxed), self.agents.load(Ordering::Relaxed))
    }
}

struct Deaths {
    world: Arc<World>,
    host: Arc<Host>,
    /// What to arm in the next lives of the server, the next one last.
    faults: Vec<String>,
    /// What happens between two lives.
    plan: Chaos,
    over: Arc<AtomicBool>,
    servers: Arc<AtomicU64>,
    agents: Arc<AtomicU64>,
}

/// Starts to kill as the scenario says (`kills`) until the run stops, and to watch over the server until
/// [`Killer::finish`]. With faults the server is killed at once and started again with the first one armed.
///
/// # Errors
/// When there is no thread to be had.
pub fn start(world: &Arc<World>, host: &Arc<Host>, kills: bool, mut faults: Vec<String>) -> io::Result<Killer> {
    let (servers, agents) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let over = Arc::new(AtomicBool::new(false));
    faults.reverse();
    let mut deaths = Deaths {
        world: Arc::clone(world),
        host: Arc::clone(host),
        faults,
        plan: if kills { world.scenario.chaos } else { Chaos::default() },
        over: Arc::clone(&over),
        servers: Arc::clone(&servers),
        agents: Arc::clone(&agents),
    };
    if !deaths.faults.is_empty() && !deaths.replace_server() {
        return Err(io::Error::other("the server does not start with a fault armed"));
    }
    let thread = threads::spawn(Name::fixed("chaos"), WORK_STACK_BYTES, OnPanic::Contain, move || {
        deaths.rule();
    })?;
    Ok(Killer { thread, over, servers, agents })
}

impl Deaths {
    fn rule(&mut self) {
        let plan = self.plan;
        let mut rng = Rng::new(self.world.scenario.seed, LANE);
        let mut next =
            |mean_s: Option<f64>| mean_s.map(|s| Instant::now() + rng.exponential(Duration::from_secs_f64(s)));
        let (mut server_at, mut agent_at) = (next(plan.kill_server_every_s), next(plan.kill_agent_every_s));
        let mut pick = Rng::new(self.world.scenario.seed, LANE - 1);
        while !self.over.load(Ordering::Acquire) {
            let now = Instant::now();
            let due = [server_at, agent_at].into_iter().flatten().min().filter(|_| !self.world.is_stopped());
            let slice = due.map_or(SLICE, |due| due.saturating_duration_since(now)).min(SLICE);
            let pid = u32::try_from(self.host.pid.load(Ordering::Acquire)).unwrap_or(0);
            if proc::exited_within(pid, slice) {
                if !self.replace_server() {
                    return;
                }
                continue;
            }
            let Some(due) = due.filter(|due| *due <= Instant::now()) else { continue };
            if server_at == Some(due) {
                if !self.replace_server() {
                    return;
                }
                server_at = next(plan.kill_server_every_s);
            } else {
                let live = proc::children(pid);
                if !live.is_empty() {
                    let victim = live[pick.below(live.len() as u64) as usize];
                    self.agents.fetch_add(u64::from(proc::signal(victim, Signal::KILL)), Ordering::Relaxed);
                }
                agent_at = next(plan.kill_agent_every_s);
            }
        }
    }

    /// Kills the server, if it is not dead yet, and starts it again; false when it does not come back.
    fn replace_server(&mut self) -> bool {
        let Some(spawned) = &self.host.spawned else { return false };
        let mut server = spawned.lock();
        let life = self.servers.fetch_add(1, Ordering::Relaxed) + 1;
        let options = server.options_mut().clone();
        match upheaval::before_death(self.plan, &options) {
            Ok(wrong) => self.world.faults.lock().extend(wrong),
            Err(e) => log::warn!("the box was not copied: {e}"),
        }
        let env = &mut server.options_mut().env;
        env.retain(|(name, _)| name != FAULT_VARIABLE);
        env.extend(self.faults.pop().map(|fault| (FAULT_VARIABLE.to_owned(), fault)));
        let killed = server.kill9().map(|_| ());
        let moved = killed.and_then(|()| upheaval::between_lives(self.plan, server.options_mut(), life));
        match moved.and_then(|()| server.restart(true)) {
            Ok(()) => {
                self.host.pid.store(u64::from(server.pid()), Ordering::Release);
                true
            }
            Err(e) => {
                let why = format!("the server does not come back: {e}");
                self.world.faults.lock().push(Violation::NotSettled { why });
                false
            }
        }
    }
}
