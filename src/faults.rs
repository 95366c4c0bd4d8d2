//! Named places where a test may kill or hold this process, for the crash checker and for race tests.
//!
//! `BEEBOX_FAULT` is a comma-separated list of `NAME` (kill at the first pass), `NAME:N` (kill at the N-th pass) and
//! `NAME=delay:MS` (hold every pass that long); it is read once, at the first point that is passed. Leaves to others
//! where the points stand. Rule a change could break: without the variable a point costs one relaxed load, and a name
//! that is not in [`POINTS`] ends the start of a test with a clear line instead of testing nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Every point, in the order in which a message passes them.
pub const POINTS: &[&str] = &[
    "before_record",              // journal: before the transaction begins
    "after_record_before_answer", // journal: committed, nobody told yet
    "after_answer_before_spawn",  // run: the send was answered, the agent not started
    "after_spawn_before_stdin",   // run: the agent lives and got nothing
    "mid_stdin",                  // run: half a line is written to the agent
    "after_stdin_before_line",    // run: a whole line is written to the agent, its transcript may have nothing
    "mid_line",                   // embedded agent: half a line is in the transcript
    "before_result",              // embedded agent: all lines are there, no result said
    "after_result_before_ledger", // run: the result is read, the ledger does not know
];

/// What happens at a point.
#[derive(Debug, PartialEq, Eq)]
enum What {
    /// SIGKILL at the n-th pass, counted from 1.
    KillAt(u64),
    /// Hold every pass.
    Delay(Duration),
}

#[derive(Debug)]
struct Armed {
    name: String,
    what: What,
    passes: AtomicU64,
}

static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();

fn parse(list: &str) -> Result<Vec<Armed>, String> {
    list.split(',')
        .filter(|part| !part.is_empty())
        .map(|part| {
            let bad =
                || format!("BEEBOX_FAULT: `{part}` is not NAME, NAME:N or NAME=delay:MS with NAME one of {POINTS:?}");
            let (name, what) = if let Some((name, ms)) = part.split_once("=delay:") {
                (name, What::Delay(Duration::from_millis(ms.parse().map_err(|_| bad())?)))
            } else if let Some((name, n)) = part.split_once(':') {
                (name, What::KillAt(n.parse().map_err(|_| bad())?))
            } else {
                (part, What::KillAt(1))
            };
            if !POINTS.contains(&name) || what == What::KillAt(0) {
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
        parse(&list.to_string_lossy()).unwrap_or_else(|bad| {
            log::error!("{bad}");
            std::process::exit(2)
        })
    })
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

#[cold]
fn pass(armed: &[Armed], name: &str) {
    for fault in armed.iter().filter(|fault| fault.name == name) {
        match fault.what {
            What::KillAt(n) => {
                if fault.passes.fetch_add(1, Ordering::Relaxed) + 1 == n {
                    // Nothing may run after this: no destructor, no flush, no answer.
                    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                    std::process::abort();
                }
            }
            What::Delay(time) => std::thread::sleep(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_faults_is_read_whole_or_refused() {
        let armed = parse("before_record:3,mid_line,before_result=delay:20").unwrap();
        let seen: Vec<_> = armed.iter().map(|a| (a.name.as_str(), &a.what)).collect();
        assert_eq!(
            seen,
            [
                ("before_record", &What::KillAt(3)),
                ("mid_line", &What::KillAt(1)),
                ("before_result", &What::Delay(Duration::from_millis(20))),
            ]
        );
        assert!(parse("").unwrap().is_empty());
        for bad in ["nowhere", "mid_line:x", "mid_line:0", "mid_line=delay:", "mid_line=hold:3"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
