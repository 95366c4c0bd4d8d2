//! Processes of agents: how one is started, told to go, and found again after a crash of the server.
//!
//! Leaves what is said to it to `pump`. Rule a change could break: an agent dies with the thread that started it
//! (parent-death signal), inherits no descriptor but its three pipes, and is only ever signalled through a descriptor
//! of its own or after its start time was compared, so that a reused pid is never hit.
//!
//! The one file with `unsafe`: `pre_exec` is the only way to set the parent-death signal in the child.
#![allow(unsafe_code, reason = "CommandExt::pre_exec; see the note at its call")]

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::RunSpec;
use super::leftovers::MARK_VARIABLE;
use crate::error::{Code, Error, Result};

/// How the agent is told to speak (AGENT-PROTOCOL, "Starting it").
const PROTOCOL_FLAGS: &[&str] = &[
    "--output-format",
    "stream-json",
    "--input-format",
    "stream-json",
    "--verbose",
    "--include-partial-messages",
    "--permission-mode",
    "bypassPermissions",
];
/// How long the kernel has to end the processes of a tool.
const TOOLS_KILL: Duration = Duration::from_secs(1);

/// A started agent with its pipes.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    pidfd: OwnedFd,
    /// Its process id.
    pub pid: u32,
    /// Field 22 of its `stat`.
    pub start_time: u64,
    /// Ours to write; `None` once ended.
    pub stdin: Option<ChildStdin>,
    /// Ours to read; `None` once at its end.
    pub stdout: Option<ChildStdout>,
    /// Ours to read; `None` once at its end.
    pub stderr: Option<ChildStderr>,
}

impl Agent {
    /// Starts the agent of `spec` with non-blocking pipes. Call it on the thread that will live as long as the agent.
    ///
    /// # Errors
    /// Why it cannot be started, in words a person can act on.
    pub fn spawn(spec: &RunSpec) -> Result<Agent> {
        let mut command = command(spec)?;
        let mut child = command.spawn().map_err(|e| explain_spawn(&e, spec))?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let opened = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).and_then(|pidfd| {
            for fd in
                [stdin.as_ref().map(AsFd::as_fd), stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)]
            {
                rustix::io::ioctl_fionbio(fd.ok_or(rustix::io::Errno::BADF)?, true)?;
            }
            Ok(pidfd)
        });
        match opened {
            Ok(pidfd) => {
                let pid = child.id();
                let start_time = start_time_of(pid).unwrap_or_default();
                Ok(Agent { child, pidfd, pid, start_time, stdin, stdout, stderr })
            }
            Err(e) => {
                // Without its descriptor we would not see it end.
                let _ = child.kill();
                let _ = child.wait();
                Err(Error::new(Code::AgentUnavailable, format!("the agent cannot be watched: {e}")))
            }
        }
    }

    /// Readable once the process ended.
    #[must_use]
    pub fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Its exit status if it ended; it is reaped then.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Asks it to go. Nothing happens once it was reaped.
    pub fn terminate(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::TERM);
    }

    /// Ends it by force, and with it the processes of its tools, which nobody else would end.
    pub fn kill(&self) {
        // Stopped first: what it would start between the look and the end, nobody could find any more.
        let _ = pidfd_send_signal(&self.pidfd, Signal::STOP);
        let tools = self.tools();
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        tools.kill();
    }

    /// The processes it has started by now, held so that they can be ended after it is gone.
    #[must_use]
    pub fn tools(&self) -> Tools {
        Tools(descendants(self.pid))
    }

    /// Waits until it ended, however long that takes, and reaps it.
    pub fn wait(&mut self) -> Option<ExitStatus> {
        self.stdin = None;
        self.child.wait().ok()
    }
}

/// Processes that an agent started. Some versions of it end without them.
#[derive(Debug, Default)]
pub struct Tools(Vec<(u32, OwnedFd)>);

impl Tools {
    /// Holds those too.
    pub fn add(&mut self, more: Tools) {
        self.0.extend(more.0);
    }

    /// Ends those that are still there, and waits until the kernel has let go of them.
    pub fn kill(self) {
        for (_, tool) in &self.0 {
            let _ = pidfd_send_signal(tool, Signal::KILL);
        }
        let mut left = self.0;
        wait_until_gone(&mut left, TOOLS_KILL);
    }
}

fn command(spec: &RunSpec) -> Result<Command> {
    let (program, arguments) =
        spec.program.split_first().ok_or_else(|| Error::new(Code::AgentUnavailable, "no agent program is set"))?;
    let mut command = Command::new(from_here(program));
    command
        .args(arguments)
        .args(PROTOCOL_FLAGS)
        .arg(if spec.resume { "--resume" } else { "--session-id" })
        .arg(spec.session.as_str())
        .current_dir(&spec.box_dir)
        .env_remove("CLAUDECODE")
        .envs(spec.env.iter().map(|(key, value)| (key, value)))
        .env(MARK_VARIABLE, spec.mark.of_run(&spec.session))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C at a terminal is for the server, which then ends its agents in order.
        .process_group(0);
    let parent = rustix::process::getpid();
    let die_with_parent = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
        // A parent that died before the line above sends no signal.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from(rustix::io::Errno::SRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes two raw system calls
    // (prctl, getppid) through rustix's linux_raw backend: no allocation, no lock, no libc state. It captures a pid by
    // value. Masks and SIGPIPE are reset by std before exec.
    unsafe { command.pre_exec(die_with_parent) };
    Ok(command)
}

/// A program given by a relative path is meant from where the server was started, not from the box.
fn from_here(program: &OsStr) -> OsString {
    if program.as_bytes().contains(&b'/') {
        std::path::absolute(program).map_or_else(|_| program.to_owned(), std::path::PathBuf::into_os_string)
    } else {
        program.to_owned()
    }
}

fn explain_spawn(e: &io::Error, spec: &RunSpec) -> Error {
    let program = spec.program.first().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    let text = if !spec.box_dir.is_dir() {
        format!("the box directory {} is not there", spec.box_dir.display())
    } else {
        let is = |errno: rustix::io::Errno| e.raw_os_error() == Some(errno.raw_os_error());
        if is(rustix::io::Errno::NOENT) {
            format!("the agent program {program} is not installed (neither on PATH nor a path to a program)")
        } else if is(rustix::io::Errno::ACCESS) || is(rustix::io::Errno::PERM) {
            format!("the agent program {program} may not be executed by this user")
        } else if is(rustix::io::Errno::NOEXEC) {
            format!("the agent program {program} is not a program for this machine")
        } else {
            format!("the agent program {program} cannot be started: {e}")
        }
    };
    Error::new(Code::AgentUnavailable, text)
}

/// Why a run ended before it said anything, from what it left: words a person can act on.
#[must_use]
pub fn explain_early_end(exit: &str, stderr: &str, errors: &[String]) -> Error {
    let said = errors.iter().map(String::as_str).chain(stderr.lines().rev()).find(|line| !line.trim().is_empty());
    let said = said.map(|line| format!(" ({})", line.trim())).unwrap_or_default();
    let text = match refusal(stderr, errors) {
        Some(Refusal::NoConversation) => {
            return Error::new(Code::SessionGone, format!("the agent has no such conversation{said}"));
        }
        Some(Refusal::InUse) => format!("the agent says that this session id is already in use{said}"),
        Some(Refusal::Root) => {
            format!(
                "the agent refuses to run as root: use another user, or set IS_SANDBOX=1 if this is a sandbox{said}"
            )
        }
        Some(Refusal::Login) => {
            format!("the agent needs a login: run it once by hand and log in, or set its API key{said}")
        }
        Some(Refusal::Flags) => format!("the agent program does not know the flags of the protocol{said}"),
        None => format!("the agent ended before it said anything, {exit}{said}"),
    };
    Error::new(Code::AgentUnavailable, text)
}

/// Why an agent says that it does not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    NoConversation,
    InUse,
    Root,
    Login,
    Flags,
}

/// The words by which each is known, in lower case.
const REFUSALS: &[(Refusal, &[&str])] = &[
    (Refusal::NoConversation, &["no conversation found"]),
    (Refusal::InUse, &["already in use"]),
    (Refusal::Root, &["root/sudo", "as root", "with root"]),
    (Refusal::Login, &["/login", "log in", "logged in", "api key", "authenticat", "oauth"]),
    (Refusal::Flags, &["unknown option", "unknown argument", "unexpected argument", "unrecognized option"]),
];

fn refusal(stderr: &str, errors: &[String]) -> Option<Refusal> {
    let all = format!("{}\n{stderr}", errors.join("\n")).to_lowercase();
    REFUSALS.iter().find(|(_, words)| words.iter().any(|word| all.contains(word))).map(|(refusal, _)| *refusal)
}

/// True if an agent refused to begin a conversation because it has one of that id.
#[must_use]
pub fn is_in_use(stderr: &str, errors: &[String]) -> bool {
    refusal(stderr, errors) == Some(Refusal::InUse)
}

/// True if an agent that said nothing on stdout told on stderr why it does not start.
#[must_use]
pub fn is_refusal(stderr: &str, errors: &[String]) -> bool {
    refusal(stderr, errors).is_some()
}

/// `exit 1` or `signal 9`.
#[must_use]
pub fn exit_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// Field 22 of `/proc/<pid>/stat`: clock ticks from boot to the start of the process. `None` when there is none.
#[must_use]
pub fn start_time_of(pid: u32) -> Option<u64> {
    stat(pid).map(|stat| stat.start_time)
}

struct Stat {
    parent: u32,
    start_time: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let bytes = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, a parenthesis too.
    let after = bytes.iter().rposition(|b| *b == b')')? + 1;
    let rest = std::str::from_utf8(&bytes[after..]).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let start_time = fields.nth(17)?.parse().ok()?;
    Some(Stat { parent, start_time })
}

pub(super) fn processes() -> impl Iterator<Item = u32> {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
}

/// A descriptor of the process `pid` that started at `start_time`.
pub(super) fn hold(pid: u32, start_time: u64) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // Compared after opening: from here on the descriptor and the pid are one process.
    (start_time_of(pid.as_raw_pid().unsigned_abs()) == Some(start_time)).then_some(fd)
}

pub(super) fn descendants(root: u32) -> Vec<(u32, OwnedFd)> {
    let all: HashMap<u32, Stat> = processes().filter_map(|pid| Some((pid, stat(pid)?))).collect();
    let is_below = |pid: u32| {
        let mut at = pid;
        // The table is no snapshot: a bound, not trust, keeps a circle from spinning.
        for _ in 0..64 {
            match all.get(&at) {
                Some(stat) if stat.parent == root => return true,
                Some(stat) if stat.parent > 1 => at = stat.parent,
                Some(_) | None => return false,
            }
        }
        false
    };
    all.iter()
        .filter(|(pid, _)| is_below(**pid))
        .filter_map(|(pid, stat)| Some((*pid, hold(*pid, stat.start_time)?)))
        .collect()
}

/// Keeps in `left` who is not gone within `limit`.
pub(super) fn wait_until_gone(left: &mut Vec<(u32, OwnedFd)>, limit: Duration) {
    let deadline = Instant::now() + limit;
    while !left.is_empty() {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return;
        }
        let mut fds: Vec<PollFd<'_>> = left.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
        if poll(&mut fds, Timespec::try_from(rest).ok().as_ref()).is_err() {
            continue;
        }
        let gone: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut gone = gone.into_iter();
        left.retain(|_| gone.next() != Some(true));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::leftovers::BoxMark;
    use super::*;

    #[test]
    fn a_start_that_failed_says_what_a_person_can_do() {
        for (stderr, errors, want) in [
            ("", &["No conversation found with session ID: x"][..], "no such conversation"),
            ("Error: Session ID x is already in use.\n", &[], "already in use"),
            ("--dangerously-skip-permissions cannot be used with root/sudo privileges", &[], "IS_SANDBOX=1"),
            ("Invalid API key · Please run /login", &[], "needs a login"),
            ("error: unknown option '--output-format'", &[], "does not know the flags"),
            ("boom\n\n", &[], "ended before it said anything, exit 1 (boom)"),
            ("", &[], "ended before it said anything, exit 1"),
        ] {
            let errors: Vec<String> = errors.iter().map(|e| (*e).to_owned()).collect();
            let got = explain_early_end("exit 1", stderr, &errors).to_string();
            assert!(got.contains(want), "{got}");
        }
        assert_eq!(explain_early_end("", "", &["No conversation found".into()]).code(), Code::SessionGone);
    }

    #[test]
    fn the_agent_inherits_the_environment_but_not_the_mark_of_another_host() {
        let spec = RunSpec {
            run: crate::ids::RunNo(1),
            session: crate::ids::SessionId::fresh(),
            resume: true,
            program: vec!["dir/agent".into(), "first".into()],
            box_dir: "/".into(),
            env: vec![("A".into(), "b".into())],
            mark: BoxMark::of(Path::new("/nowhere")),
            allow_tools: false,
        };
        let command = command(&spec).unwrap();
        let env: Vec<_> = command.get_envs().map(|(k, v)| (k.to_str().unwrap(), v.and_then(OsStr::to_str))).collect();
        let mark = format!("/nowhere:{}", spec.session);
        assert_eq!(env, [("A", Some("b")), ("BEEBOX_RUN", Some(mark.as_str())), ("CLAUDECODE", None)]);
        assert!(Path::new(command.get_program()).is_absolute(), "relative to the server, not to the box");
        let args: Vec<_> = command.get_args().map(|a| a.to_str().unwrap()).collect();
        assert_eq!(args[..3], ["first", "--output-format", "stream-json"]);
        assert_eq!(args[args.len() - 2..], ["--resume", spec.session.as_str()]);
    }

    #[test]
    fn the_start_time_tells_a_process_from_a_later_one() {
        let me = std::process::id();
        let start = start_time_of(me).unwrap();
        assert!(hold(me, start).is_some());
        assert!(hold(me, start + 1).is_none());
        assert!(start_time_of(u32::MAX).is_none());
    }
}
