//! What the kernel says about a process: memory, threads, open files, CPU time, children, CPU of the machine.
//! Leaves judgement to the checker. Rule a change could break: reading costs the watched process nothing.

use std::fs;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::Serialize;

/// One look at a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Resident memory in KiB.
    pub rss_kib: u64,
    /// Highest resident memory so far in KiB.
    pub rss_peak_kib: u64,
    /// Threads.
    pub threads: u64,
    /// Open files.
    pub fds: u64,
    /// Live child processes.
    pub children: u64,
    /// CPU time used so far, user and system, in milliseconds.
    pub cpu_ms: u64,
    /// Times it gave up the CPU of its own will so far (wake-ups, nearly).
    pub switches: u64,
}

/// Fields of `/proc/<pid>/stat` after the name, which may itself hold spaces and parentheses.
fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

fn status_kib(status: &str, key: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// Looks at `pid`; none when it is gone.
#[must_use]
pub fn usage(pid: u32) -> Option<Usage> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let fields = stat_fields(pid)?;
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    let switches = fs::read_dir(format!("/proc/{pid}/task"))
        .ok()?
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
        .map(|status| status_kib(&status, "voluntary_ctxt_switches"))
        .sum();
    Some(Usage {
        rss_kib: status_kib(&status, "VmRSS"),
        rss_peak_kib: status_kib(&status, "VmHWM"),
        threads: status_kib(&status, "Threads"),
        fds: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten().count() as u64,
        children: children(pid).len() as u64,
        cpu_ms: ticks * 1000 / rustix::param::clock_ticks_per_second().max(1),
        switches,
    })
}

/// Names of the threads of `pid`, sorted.
#[must_use]
pub fn thread_names(pid: u32) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim_end_matches('\n').to_owned())
        .collect();
    names.sort();
    names
}

/// Pids whose parent is `pid`, zombies left out.
#[must_use]
pub fn children(pid: u32) -> Vec<u32> {
    let parent = pid.to_string();
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|child| {
            stat_fields(*child).is_some_and(|f| {
                f.get(1).is_some_and(|ppid| *ppid == parent) && f.first().is_some_and(|state| state != "Z")
            })
        })
        .collect()
}

/// When `pid` started, in clock ticks since boot: with the pid, the name of one process for ever.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    stat_fields(pid)?.get(19)?.parse().ok()
}

/// Sends `signal` to `pid`; false when there is no such process.
pub fn signal(pid: u32, signal: Signal) -> bool {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok())
}

/// Waits until `pid` exited, `limit` at most; true if it did (or was never there).
#[must_use]
pub fn exited_within(pid: u32, limit: Duration) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return true;
    };
    let Ok(fd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
        return true;
    };
    let deadline = std::time::Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::from(i32::MAX), tv_nsec: 0 });
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_sees_its_own_threads_and_children() {
        let me = std::process::id();
        let before = usage(me).unwrap();
        assert!(before.rss_kib > 0 && before.threads > 0 && before.fds > 2);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(children(me).contains(&child.id()));
        assert!(start_time(child.id()).unwrap() >= start_time(me).unwrap());
        assert!(!exited_within(child.id(), Duration::from_millis(1)));
        assert!(signal(child.id(), Signal::KILL));
        assert!(exited_within(child.id(), Duration::from_secs(10)));
        assert!(!children(me).contains(&child.id()), "a zombie is not a live child");
        child.wait().unwrap();
        assert!(exited_within(child.id(), Duration::ZERO));
    }
}
