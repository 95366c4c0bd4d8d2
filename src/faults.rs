//! Named places where a test may kill or hold a process, and faults of thought that a test may plant, to show that the
//! crash checker finds them.
//!
//! `BEEBOX_FAULT` is a comma-separated list of `NAME` (kill at the first pass), `NAME:N` (kill at the N-th pass),
//! `NAME@server:N` and `NAME@agent:N` (at the N-th pass that process dies, whoever passes), `NAME=delay:MS` (hold
//! every pass that long), `NAME=hold:PATH` and `NAME=spin:PATH` (hold it while there is a file PATH, asleep or on the
//! CPU). The embedded agent inherits the variable: one list arms the points of both, each process
//! counts its own passes, and a fresh agent begins at nought. `BEEBOX_PLANT` names one fault of [`PLANTS`]; only debug
//! builds have them. `BEEBOX_DISK` is `KIND:NTH:COUNT`: from the N-th call of the journal to its disk on COUNT calls
//! fail (`journal::Faults`). Each is read once. All are for tests only.
//!
//! Leaves to others where the points stand. Rule a change could break: without the variable a point costs one relaxed
//! load, and a name that is unknown ends the start of a test with a clear line instead of testing nothing.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Every point: those that a message passes, in their order, then those that hold a lock.
pub const POINTS: &[&str] = &[
    "before_record",              // journal: before a transaction with a message or a dispatch begins
    "after_record_before_answer", // journal: committed, nobody told yet
    "after_answer_before_spawn",  // run: the send was recorded, the agent not started
    "after_spawn_before_stdin",   // run: the agent lives and got nothing
    "mid_stdin",                  // run: half a line is written to the agent
    "after_stdin_before_line",    // run: the line is written; embedded agent: it is read, the transcript has nothing
    "mid_line",                   // embedded agent: half a line is in the transcript
    "before_result",              // embedded agent: all is said and written but the result
    "after_result_before_ledger", // run: the result is read, the ledger does not know
    "state_locked",               // whoever sets a feature: with the session's lock held
    "sessions_locked",            // whoever lists the conversations: with the lock of the map held
];

/// Every fault of thought that can be planted.
pub const PLANTS: &[&str] = &[
    "dispatch_before_commit", // the agent gets its line while the dispatch is still to be recorded
    "publish_before_commit",  // subscribers hear of a message that is still to be recorded
    "entries_before_pending", // bootstrap reads the transcript before what is owed
    "remerge_at_recovery",    // a turn whose fate is open joins the queue after a restart
    "run_ended_before_reap",  // the end of a run is told when it is closed, not when its agent is gone
];

/// Who dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// Whoever passes.
    Self_,
    Server,
    Agent,
}

/// How a pass is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Busy {
    Asleep,
    OnTheCpu,
}

/// How often a sleeper looks for its file. It only ends a hold; nothing is measured by it.
const LOOK: Duration = Duration::from_millis(5);

/// What happens at a point.
#[derive(Debug, PartialEq, Eq)]
enum What {
    /// SIGKILL at the n-th pass, counted from 1.
    KillAt(Victim, u64),
    /// Hold every pass.
    Delay(Duration),
    /// Hold a pass while the file is there.
    While(PathBuf, Busy),
}

#[derive(Debug)]
struct Armed {
    name: String,
    what: What,
    passes: AtomicU64,
}

static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();
static PLANTED: OnceLock<Option<String>> = OnceLock::new();
static IS_AGENT: AtomicBool = AtomicBool::new(false);

/// Said once by the embedded agent: who passes a point here is an agent, and its parent the server.
pub fn this_is_an_agent() {
    IS_AGENT.store(true, Ordering::Relaxed);
}

fn parse(list: &str) -> Result<Vec<Armed>, String> {
    list.split(',')
        .filter(|part| !part.is_empty())
        .map(|part| {
            let bad = || {
                format!(
                    "BEEBOX_FAULT: `{part}` is not NAME, NAME:N, NAME@server:N, NAME@agent:N, NAME=delay:MS, \
                     NAME=hold:/PATH or NAME=spin:/PATH with NAME one of {POINTS:?}"
                )
            };
            let (name, what) = if let Some((name, ms)) = part.split_once("=delay:") {
                (name, What::Delay(Duration::from_millis(ms.parse().map_err(|_| bad())?)))
            } else if let Some((name, path)) = part.split_once("=hold:/") {
                (name, What::While(Path::new("/").join(path), Busy::Asleep))
            } else if let Some((name, path)) = part.split_once("=spin:/") {
                (name, What::While(Path::new("/").join(path), Busy::OnTheCpu))
            } else {
                let (name, n) = match part.split_once(':') {
                    Some((name, n)) => (name, n.parse().map_err(|_| bad())?),
                    None => (part, 1),
                };
                let (name, victim) = match name.split_once('@') {
                    None => (name, Victim::Self_),
                    Some((name, "server")) => (name, Victim::Server),
                    Some((name, "agent")) => (name, Victim::Agent),
                    Some(_) => return Err(bad()),
                };
                (name, What::KillAt(victim, n))
            };
            if !POINTS.contains(&name) || matches!(what, What::KillAt(_, 0)) {
                return Err(bad());
            }
            Ok(Armed { name: name.to_owned(), what, passes: AtomicU64::new(0) })
        })
        .collect()
}

fn armed() -> &'static [Armed] {
    ARMED.get_or_init(|| {
        let Some(list) = std::env::var_os("BEEBOX_FAULT") else {
            return Vec::new();
        };
        parse(&list.to_string_lossy()).unwrap_or_else(|bad| refuse(&bad))
    })
}

fn refuse(bad: &str) -> ! {
    log::error!("{bad}");
    std::process::exit(2)
}

/// Passes the point `name`.
#[inline]
pub fn point(name: &'static str) {
    debug_assert!(POINTS.contains(&name), "{name} is missing in faults::POINTS");
    let armed = armed();
    if !armed.is_empty() {
        pass(armed, name);
    }
}

/// True if something waits at the point `name`: for code that goes to it in smaller steps than it would.
#[inline]
#[must_use]
pub fn is_armed(name: &'static str) -> bool {
    let armed = armed();
    !armed.is_empty() && armed.iter().any(|fault| fault.name == name)
}

#[cold]
fn pass(armed: &[Armed], name: &str) {
    for fault in armed.iter().filter(|fault| fault.name == name) {
        match &fault.what {
            What::KillAt(victim, n) => {
                if fault.passes.fetch_add(1, Ordering::Relaxed) + 1 == *n {
                    kill(*victim);
                }
            }
            What::Delay(time) => std::thread::sleep(*time),
            What::While(path, Busy::Asleep) => {
                while path.exists() {
                    std::thread::sleep(LOOK);
                }
            }
            What::While(path, Busy::OnTheCpu) => while path.exists() {},
        }
    }
}

fn kill(victim: Victim) {
    match (victim, IS_AGENT.load(Ordering::Relaxed)) {
        (Victim::Self_, _) | (Victim::Server, false) | (Victim::Agent, true) => {
            // Nothing may run after this: no destructor, no flush, no answer.
            let _ = kill_process(rustix::process::getpid(), Signal::KILL);
            std::process::abort();
        }
        (Victim::Server, true) => {
            // An agent that outlived its server has init for a parent, which is not ours to kill.
            if let Some(parent) = rustix::process::getppid().filter(|pid| !pid.is_init()) {
                let _ = kill_process(parent, Signal::KILL);
            }
        }
        (Victim::Agent, false) => {
            for child in children() {
                let _ = kill_process(child, Signal::KILL);
            }
        }
    }
}

/// Children of every thread of this process: its agents.
fn children() -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>())
        .filter_map(Pid::from_raw)
        .collect()
}

/// True if the fault of thought `name` is planted; never in a release build.
#[inline]
#[must_use]
pub fn planted(name: &'static str) -> bool {
    if !cfg!(debug_assertions) {
        return false;
    }
    debug_assert!(PLANTS.contains(&name), "{name} is missing in faults::PLANTS");
    let planted = PLANTED.get_or_init(|| {
        let plant = std::env::var("BEEBOX_PLANT").ok()?;
        if !PLANTS.contains(&plant.as_str()) {
            refuse(&format!("BEEBOX_PLANT: `{plant}` is not one of {PLANTS:?}"));
        }
        log::warn!("planted: {plant}");
        Some(plant)
    });
    planted.as_deref() == Some(name)
}

/// What `BEEBOX_DISK` asks for: kind, first call, number of calls.
#[must_use]
pub fn disk() -> Option<(String, u64, u64)> {
    let text = std::env::var("BEEBOX_DISK").ok()?;
    let parts: Vec<&str> = text.split(':').collect();
    let read = || match parts[..] {
        [kind, nth, count] => Some((kind.to_owned(), nth.parse().ok()?, count.parse().ok()?)),
        _ => None,
    };
    Some(read().unwrap_or_else(|| refuse(&format!("BEEBOX_DISK: `{text}` is not KIND:NTH:COUNT"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_faults_is_read_whole_or_refused() {
        let armed = parse(
            "before_record:3,mid_line,before_result=delay:20,mid_stdin@agent:2,mid_line@server,\
             state_locked=hold:/a/b,before_record=spin:/c",
        )
        .unwrap();
        let seen: Vec<_> = armed.iter().map(|a| (a.name.as_str(), &a.what)).collect();
        assert_eq!(
            seen,
            [
                ("before_record", &What::KillAt(Victim::Self_, 3)),
                ("mid_line", &What::KillAt(Victim::Self_, 1)),
                ("before_result", &What::Delay(Duration::from_millis(20))),
                ("mid_stdin", &What::KillAt(Victim::Agent, 2)),
                ("mid_line", &What::KillAt(Victim::Server, 1)),
                ("state_locked", &What::While("/a/b".into(), Busy::Asleep)),
                ("before_record", &What::While("/c".into(), Busy::OnTheCpu)),
            ]
        );
        assert!(parse("").unwrap().is_empty());
        for bad in ["nowhere", "mid_line:x", "mid_line:0", "mid_line=delay:", "mid_line=hold:3", "mid_line@me:1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
