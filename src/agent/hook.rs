//! The prepare hook: a command of the owner's that runs in the box before an agent starts.
//! Leaves what its failure means to the session. Rule a change could break: it ends within its deadline, its children
//! with it.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::error::{Error, Result};

/// Runs `command` by `sh -c` in `dir`; its output goes to our stderr.
///
/// # Errors
/// It cannot be started, it fails, or it is not done by `deadline` and is killed.
pub fn run(command: &str, dir: &Path, deadline: Instant) -> Result<()> {
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
            match poll(&mut [PollFd::new(&fd, PollFlags::IN)], wait.as_ref()) {
                Ok(ready) if ready > 0 => return true,
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
        return Err(Error::internal(format!("sh -c {command:?} took too long and was killed")));
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
        run("echo x > here", dir.path(), soon()).unwrap();
        assert!(dir.path().join("here").exists());
        assert!(run("exit 3", dir.path(), soon()).unwrap_err().text().contains("exit status: 3"));
        let late = run("sleep 60 & wait", dir.path(), Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert!(late.text().contains("took too long"), "{late}");
    }
}
