//! Deaths on purpose: kill -9 of the server (started again on the same port at once) and of its agents, at random
//! moments. Rule a change could break: only processes of the server that was started here are killed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::{Host, World};
use crate::load::checker::Violation;
use crate::load::proc;
use crate::load::rng::Rng;
use crate::threads::{self, Name, OnPanic, Thread, WORK_STACK_BYTES};

/// The lane of the random numbers, apart from those of clients.
const LANE: u64 = u64::MAX;

/// The one who kills.
pub struct Killer {
    thread: Thread,
    servers: Arc<AtomicU64>,
    agents: Arc<AtomicU64>,
}

impl Killer {
    /// Waits until it is done; how many servers and agents were killed.
    pub fn finish(self) -> (u64, u64) {
        // It stops with the run; a server just being started again takes a moment.
        let _ = self.thread.join_within(Duration::from_secs(30));
        (self.servers.load(Ordering::Relaxed), self.agents.load(Ordering::Relaxed))
    }
}

/// Starts killing as the scenario says, until the run stops.
///
/// # Errors
/// When there is no thread to be had.
pub fn start(world: &Arc<World>, host: &Arc<Host>) -> io::Result<Killer> {
    let (servers, agents) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let thread = {
        let (world, host) = (Arc::clone(world), Arc::clone(host));
        let (servers, agents) = (Arc::clone(&servers), Arc::clone(&agents));
        threads::spawn(Name::fixed("chaos"), WORK_STACK_BYTES, OnPanic::Contain, move || {
            kill_until_stopped(&world, &host, &servers, &agents);
        })?
    };
    Ok(Killer { thread, servers, agents })
}

fn kill_until_stopped(world: &World, host: &Host, servers: &AtomicU64, agents: &AtomicU64) {
    let plan = world.scenario.chaos;
    let Some(spawned) = &host.spawned else { return };
    let mut rng = Rng::new(world.scenario.seed, LANE);
    let mut next = |mean_s: Option<f64>| mean_s.map(|s| Instant::now() + rng.exponential(Duration::from_secs_f64(s)));
    let (mut server_at, mut agent_at) = (next(plan.kill_server_every_s), next(plan.kill_agent_every_s));
    let mut pick = Rng::new(world.scenario.seed, LANE - 1);
    while let Some(due) = [server_at, agent_at].into_iter().flatten().min() {
        world.pause(due.saturating_duration_since(Instant::now()));
        if world.is_stopped() {
            return;
        }
        if server_at == Some(due) {
            let mut server = spawned.lock();
            servers.fetch_add(1, Ordering::Relaxed);
            let up = server.kill9().and_then(|_| server.restart(true));
            if let Err(e) = up {
                let why = format!("the killed server does not come back: {e}");
                world.faults.lock().push(Violation::NotSettled { why });
                return;
            }
            host.pid.store(u64::from(server.pid()), Ordering::Release);
            drop(server);
            server_at = next(plan.kill_server_every_s);
        } else {
            let live = spawned.lock().agents();
            if !live.is_empty() {
                let victim = live[pick.below(live.len() as u64) as usize];
                agents.fetch_add(u64::from(proc::signal(victim, Signal::KILL)), Ordering::Relaxed);
            }
            agent_at = next(plan.kill_agent_every_s);
        }
    }
}
