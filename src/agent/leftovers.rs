//! Agents that a dead server left behind: how one of a box is told from everybody else's, and ended.
//!
//! A process is an agent of a box if its environment carries the box's mark and its working directory is the box: by
//! device and inode, so that neither a copy of the box, nor another file system that shows the same path, nor a process
//! that got a pid again is taken for it. Invariant: a pid out of a journal proves nothing by itself (the journal may be
//! a copy); nothing is signalled but through a descriptor whose start time was compared.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Signal, pidfd_send_signal};

use super::command::{descendants, hold, processes, start_time_of, wait_until_gone};
use crate::ids::SessionId;

/// The variable in an agent's environment that says which box and conversation it is of.
pub const MARK_VARIABLE: &str = "BEEBOX_RUN";
/// How long a leftover has after SIGTERM.
const TERM_LIMIT: Duration = Duration::from_secs(2);
/// How long the kernel has after SIGKILL; a process in an uninterruptible read may take longer than anybody waits.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// A box as its agents' marks name it: `PATH:SESSION@DEVICE.INODE`. The path is for people; what counts is the directory
/// itself, which keeps its inode when the box is moved and has another when it is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxMark {
    path: PathBuf,
    directory: Option<(u64, u64)>,
}

impl BoxMark {
    /// The mark of the box at `path`.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), directory: directory(path) }
    }

    /// What the agent of `session` carries.
    #[must_use]
    pub fn of_run(&self, session: &SessionId) -> String {
        format!("{}:{session}{}", self.path.display(), self.suffix())
    }

    fn suffix(&self) -> String {
        self.directory.map(|(device, inode)| format!("@{device}.{inode}")).unwrap_or_default()
    }

    /// True if `value` is the mark of an agent of this box, of `session` only if one is named. Marks of older
    /// servers name the path alone.
    fn matches(&self, value: &[u8], session: Option<&SessionId>) -> bool {
        let Ok(value) = std::str::from_utf8(value) else { return false };
        let value = match value.rsplit_once('@') {
            Some((rest, at)) if at.bytes().all(|b| b.is_ascii_digit() || b == b'.') => {
                if format!("@{at}") != self.suffix() {
                    return false;
                }
                rest
            }
            Some(_) | None => match value.strip_prefix(&*self.path.to_string_lossy()) {
                Some(rest) if rest.starts_with(':') => value,
                Some(_) | None => return false,
            },
        };
        session.is_none_or(|session| value.ends_with(&format!(":{session}")))
    }

    /// True if the working directory of process `pid` is this box.
    fn is_home_of(&self, pid: u32) -> bool {
        self.directory.is_some() && directory(Path::new(&format!("/proc/{pid}/cwd"))) == self.directory
    }
}

fn directory(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Ends every agent of the box that still runs: those that the journal knows by pid and start time, and those that died
/// before they were recorded, by their command line. SIGTERM, after 2 s SIGKILL, 5 s more at most until they are gone.
/// Says how many there were.
///
/// What an agent started and left running on purpose has its mark too, but not its command line: it is let be.
#[must_use]
pub fn end_leftovers(mark: &BoxMark, known: &[(u32, u64)]) -> usize {
    let is_known = |pid, start_time| known.contains(&(pid, start_time));
    end(|pid, start_time| {
        has_mark(pid, mark, None) && mark.is_home_of(pid) && (is_known(pid, start_time) || is_agent(pid))
    })
}

/// Ends the agents of one conversation of the box whose wrapper is gone, wherever the wrapper took them.
pub fn end_wrapped(mark: &BoxMark, session: &SessionId) {
    end(|pid, _| has_mark(pid, mark, Some(session)) && is_agent(pid));
}

fn end(is_ours: impl Fn(u32, u64) -> bool) -> usize {
    if cfg!(feature = "model") {
        return 0;
    }
    let me = std::process::id();
    let mut found: Vec<(u32, OwnedFd)> = Vec::new();
    for pid in processes().filter(|pid| *pid != me) {
        let Some(start_time) = start_time_of(pid) else {
            continue;
        };
        if is_ours(pid, start_time) {
            found.extend(hold(pid, start_time).map(|fd| (pid, fd)));
        }
    }
    if found.is_empty() {
        return 0;
    }
    let count = found.len();
    let pids: Vec<_> = found.iter().map(|(pid, _)| *pid).collect();
    log::warn!("ending {count} agents left by an earlier server: {pids:?}");
    for (_, fd) in &found {
        let _ = pidfd_send_signal(fd, Signal::TERM);
    }
    wait_until_gone(&mut found, TERM_LIMIT);
    if !found.is_empty() {
        // What an agent that must be killed started, it cannot end itself.
        let tools: Vec<_> = found.iter().flat_map(|(pid, _)| descendants(*pid)).collect();
        for (_, fd) in found.iter().chain(&tools) {
            let _ = pidfd_send_signal(fd, Signal::KILL);
        }
        wait_until_gone(&mut found, KILL_LIMIT);
    }
    if !found.is_empty() {
        log::error!("{} agents left by an earlier server cannot be ended", found.len());
    }
    count
}

fn has_mark(pid: u32, mark: &BoxMark, session: Option<&SessionId>) -> bool {
    let Ok(environment) = std::fs::read(format!("/proc/{pid}/environ")) else {
        return false;
    };
    environment.split(|b| *b == 0).any(|entry| {
        let value = entry.strip_prefix(MARK_VARIABLE.as_bytes()).and_then(|rest| rest.strip_prefix(b"="));
        value.is_some_and(|value| mark.matches(value, session))
    })
}

/// By its command line: the flags of the protocol, or the one word that the real agent puts there as its title.
fn is_agent(pid: u32) -> bool {
    let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else {
        return false;
    };
    let words: Vec<&[u8]> = line.split(|b| *b == 0).filter(|word| !word.is_empty()).collect();
    let title = words.first().map(|word| Path::new(OsStr::from_bytes(word)));
    words.contains(&b"stream-json".as_slice())
        || (words.len() == 1 && title.and_then(Path::file_name) == Some(OsStr::new("claude")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_of_one_directory_whatever_its_path_and_of_no_copy() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        std::fs::create_dir(&one).unwrap();
        let session = SessionId::fresh();
        let mark = BoxMark::of(&one);
        let value = mark.of_run(&session);
        assert!(value.starts_with(&format!("{}:{session}", one.display())), "{value}");
        assert!(mark.matches(value.as_bytes(), None) && mark.matches(value.as_bytes(), Some(&session)));
        assert!(!mark.matches(value.as_bytes(), Some(&SessionId::fresh())));
        // Of an older server.
        assert!(mark.matches(format!("{}:{session}", one.display()).as_bytes(), Some(&session)));
        std::fs::rename(&one, &two).unwrap();
        assert!(BoxMark::of(&two).matches(value.as_bytes(), Some(&session)), "moved");
        std::fs::create_dir(&one).unwrap();
        assert!(!BoxMark::of(&one).matches(value.as_bytes(), None), "another directory at the same path");
        for foreign in ["", "x", "/elsewhere:s", &format!("{}2:s", two.display())] {
            assert!(!BoxMark::of(&two).matches(foreign.as_bytes(), None), "{foreign:?}");
        }
    }

    #[test]
    fn this_process_is_no_agent_of_a_box() {
        let here = BoxMark::of(&std::env::current_dir().unwrap());
        assert!(here.is_home_of(std::process::id()));
        assert!(!has_mark(std::process::id(), &here, None));
        assert!(!BoxMark::of(Path::new("/")).is_home_of(std::process::id()));
        assert!(!BoxMark::of(Path::new("/nowhere")).is_home_of(std::process::id()));
    }
}
