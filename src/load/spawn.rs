//! A server started as a child process on a box: start, kill -9, SIGTERM, restart on the same box.
//! Leaves what is said to it to `client` and `events`. Rule a change could break: every wait has a limit, and dropping
//! the handle leaves neither the server nor an agent of it behind.

use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::proc;
use crate::sync::{Mutex, Receiver, RecvTimeoutError, bounded};
use crate::threads::{self, Name, OnPanic, SMALL_STACK_BYTES, Thread};

/// Most of the server's stderr that is kept, in bytes; the oldest half goes first.
const STDERR_BYTES_MAX: usize = 1024 * 1024;
/// How long a killed process may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// What to start, and where.
#[derive(Debug, Clone)]
pub struct SpawnOptions {
    /// The binary `beebox-chatd`.
    pub program: PathBuf,
    /// The box.
    pub box_dir: PathBuf,
    /// The value of `--listen`.
    pub listen: String,
    /// More flags.
    pub args: Vec<String>,
    /// Added to the inherited environment.
    pub env: Vec<(String, String)>,
    /// How long it may take to say that it listens.
    pub start_within: Duration,
}

impl SpawnOptions {
    /// The defaults: a free port on loopback, ten seconds to start.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>, box_dir: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            box_dir: box_dir.into(),
            listen: "127.0.0.1:0".to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            start_within: Duration::from_secs(10),
        }
    }
}

/// A running (or just ended) server.
#[derive(Debug)]
pub struct Spawned {
    options: SpawnOptions,
    child: Child,
    ended: Option<ExitStatus>,
    addr: SocketAddr,
    stderr: Arc<Mutex<Vec<u8>>>,
    /// Start to the line that says it listens.
    pub started_after: Duration,
}

impl Spawned {
    /// Starts a server and waits until it says where it listens.
    ///
    /// # Errors
    /// What the kernel says, or that it ended or stayed silent, with its stderr.
    pub fn start(options: SpawnOptions) -> io::Result<Self> {
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let (child, addr, started_after) = launch(&options, &stderr)?;
        Ok(Self { options, child, ended: None, addr, stderr, started_after })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it was started with; changes take effect at the next restart.
    pub fn options_mut(&mut self) -> &mut SpawnOptions {
        &mut self.options
    }

    /// The growing record of its stderr, for whoever outlives a borrow of this.
    #[must_use]
    pub fn stderr_record(&self) -> Arc<Mutex<Vec<u8>>> {
        Arc::clone(&self.stderr)
    }

    /// Everything it said on stderr so far, all lives of it, 1 MiB at most.
    #[must_use]
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.stderr.lock()).into_owned()
    }

    /// True while the process runs.
    pub fn is_running(&mut self) -> bool {
        self.ended.is_none() && !proc::exited_within(self.child.id(), Duration::ZERO)
    }

    /// kill -9, and waits until it is gone. Its agents are left to its own means (parent-death signal).
    ///
    /// # Errors
    /// When the kernel does not let it go within ten seconds.
    pub fn kill9(&mut self) -> io::Result<ExitStatus> {
        if self.ended.is_none() {
            proc::signal(self.child.id(), Signal::KILL);
        }
        self.wait_exit(GONE_WITHIN)
    }

    /// SIGTERM, and waits until it is gone.
    ///
    /// # Errors
    /// When it is not gone within `limit`.
    pub fn terminate(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        if self.ended.is_none() {
            proc::signal(self.child.id(), Signal::TERM);
        }
        self.wait_exit(limit)
    }

    /// Waits until it ended of its own.
    ///
    /// # Errors
    /// When it is still there after `limit`.
    pub fn wait_exit(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        if let Some(status) = self.ended {
            return Ok(status);
        }
        if !proc::exited_within(self.child.id(), limit) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the server (pid {}) is still there after {limit:?}", self.child.id()),
            ));
        }
        let status = self.child.wait()?;
        self.ended = Some(status);
        Ok(status)
    }

    /// Starts it again on the same box after it ended (kills it first if it did not).
    /// With `same_port` it takes the address it had.
    ///
    /// # Errors
    /// As [`Spawned::start`].
    pub fn restart(&mut self, same_port: bool) -> io::Result<()> {
        self.kill9()?;
        if same_port {
            self.options.listen = self.addr.to_string();
        }
        let (child, addr, started_after) = launch(&self.options, &self.stderr)?;
        self.child = child;
        self.ended = None;
        self.addr = addr;
        self.started_after = started_after;
        Ok(())
    }

    /// Live agents (child processes), by pid.
    #[must_use]
    pub fn agents(&self) -> Vec<u32> {
        proc::children(self.child.id())
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        // An agent may have been told to ignore the parent-death signal: note who they are before the parent goes.
        let agents: Vec<(u32, Option<u64>)> =
            self.agents().into_iter().map(|pid| (pid, proc::start_time(pid))).collect();
        let _ = self.kill9();
        for (pid, started) in agents {
            if started.is_some() && proc::start_time(pid) == started {
                proc::signal(pid, Signal::KILL);
            }
        }
    }
}

fn launch(options: &SpawnOptions, stderr: &Arc<Mutex<Vec<u8>>>) -> io::Result<(Child, SocketAddr, Duration)> {
    let begun = Instant::now();
    let mut child = Command::new(&options.program)
        .arg("--box")
        .arg(&options.box_dir)
        .arg("--listen")
        .arg(&options.listen)
        .args(&options.args)
        .envs(options.env.iter().map(|(k, v)| (k, v)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("cannot start {}: {e}", options.program.display())))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let listening = read_stdout(out)?;
    let reading = keep_stderr(err, Arc::clone(stderr))?;

    let refuse = |mut child: Child, what: String| {
        let _ = child.kill();
        let status = child.wait();
        // Its last words may still be on their way through the pipe; an agent of its own could hold that open.
        let _ = reading.join_within(Duration::from_secs(2));
        let said = String::from_utf8_lossy(&stderr.lock()).into_owned();
        let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
        Err(io::Error::other(format!("{what} ({status}); its stderr:\n{said}")))
    };
    match listening.recv_timeout(options.start_within) {
        Ok(url) => match url.trim().trim_start_matches("http://").trim_end_matches('/').parse() {
            Ok(addr) => Ok((child, addr, begun.elapsed())),
            Err(_) => refuse(child, format!("the server says it listens on {url:?}, which is no address")),
        },
        Err(RecvTimeoutError::Disconnected) => {
            // It ended: let it leave its exit status and its last words before it is reported.
            let _ = proc::exited_within(child.id(), GONE_WITHIN);
            refuse(child, "the server ended before it listened".to_owned())
        }
        Err(RecvTimeoutError::Timeout) => {
            refuse(child, format!("the server does not listen after {:?}", options.start_within))
        }
    }
}

/// The address from the line `listening on …`; the pipe is read to its end so that the server never blocks on it.
fn read_stdout(out: Option<impl Read + Send + 'static>) -> io::Result<Receiver<String>> {
    let (said, hear) = bounded(1);
    threads::spawn(Name::fixed("srv-stdout"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
        let Some(out) = out else { return };
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            if let Some(url) = line.strip_prefix("listening on ") {
                // Full means that the first such line already went; later ones tell nothing new.
                let _ = said.try_send(url.to_owned());
            }
        }
    })?;
    Ok(hear)
}

fn keep_stderr(err: Option<impl Read + Send + 'static>, into: Arc<Mutex<Vec<u8>>>) -> io::Result<Thread> {
    threads::spawn(Name::fixed("srv-stderr"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
        let Some(mut err) = err else { return };
        let mut chunk = [0; 8192];
        while let Ok(n @ 1..) = err.read(&mut chunk) {
            let mut kept = into.lock();
            if kept.len() > STDERR_BYTES_MAX {
                kept.drain(..STDERR_BYTES_MAX / 2);
            }
            kept.extend_from_slice(&chunk[..n]);
        }
    })
}
