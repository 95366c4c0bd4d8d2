//! The prepare hook: a command of the owner's that runs in the box before an agent starts.
//! Leaves what its failure means to the session. Rule a change could break: it ends within its deadline, its children
//! with it.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::error::{Error, Result};

/// Ends every hook, running or still to come.
#[derive(Debug)]
pub struct Cancel(Option<OwnedFd>);

impl Default for Cancel {
    fn default() -> Self {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        // Without it a hook runs to its end or its deadline.
        Self(event.map_err(|e| log::warn!("no eventfd: {e}")).ok())
    }
}

impl Cancel {
    /// From now on a hook is killed at once.
    pub fn cancel(&self) {
        if let Some(event) = &self.0 {
            // Never read, so it stays ready for every hook; a full counter is as good.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }
}

/// Runs `command` by `sh -c` in `dir`; its output goes to our stderr.
///
/// # Errors
/// It cannot be started, it fails, or it is killed: not done by `deadline`, or cancelled.
pub fn run(command: &str, dir: &Path, deadline: Instant, cancel: &Cancel) -> Result<()> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .process_group(0)
        .spawn()
        .map_err(|e| Error::internal(format!("sh -c {command:?}: {e}")))?;
    let pid = Pid::from_child(&child);
    let ended = pidfd_open(pid, PidfdFlags::empty()).is_ok_and(|fd| {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let wait = Timespec::try_from(left).ok();
            let mut ends = vec![PollFd::new(&fd, PollFlags::IN)];
            ends.extend(cancel.0.as_ref().map(|event| PollFd::new(event, PollFlags::IN)));
            match poll(&mut ends, wait.as_ref()) {
                Ok(ready) if ready > 0 => return ends.first().is_some_and(|end| !end.revents().is_empty()),
                Ok(_) | Err(_) => {}
            }
        }
    });
    if !ended {
        // Its own group: what it started goes with it.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let status = child.wait()?;
    if !ended {
        return Err(Error::internal(format!(
            "sh -c {command:?} took too long, or the server goes down: it was killed"
        )));
    }
    if !status.success() {
        return Err(Error::internal(format!("sh -c {command:?} ended with {status}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_hook_runs_in_the_box_and_says_how_it_failed() {
        let dir = tempfile::tempdir().unwrap();
        let soon = || Instant::now() + Duration::from_secs(20);
        let cancel = Cancel::default();
        run("echo x > here", dir.path(), soon(), &cancel).unwrap();
        assert!(dir.path().join("here").exists());
        assert!(run("exit 3", dir.path(), soon(), &cancel).unwrap_err().text().contains("exit status: 3"));
        let late = run("sleep 60 & wait", dir.path(), Instant::now() + Duration::from_millis(50), &cancel).unwrap_err();
        assert!(late.text().contains("took too long"), "{late}");
        cancel.cancel();
        for _ in 0..2 {
            let ended = run("sleep 60", dir.path(), soon(), &cancel).unwrap_err();
            assert!(ended.text().contains("goes down"), "{ended}");
        }
    }
}
