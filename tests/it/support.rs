//! A server on a box of its own, clients, and waits that explain themselves.
//!
//! The clients are those of `beebox_chatd::load`; here they only learn to panic with everything a person needs: what was
//! waited for, the server's threads, the end of its stderr. Rule a change could break: every wait has a limit, and a
//! test that is done leaves no process behind.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beebox_chatd::load::client::{Accepted, Answer, Client, Photo};
use beebox_chatd::load::events::{Follower, Frame};
use beebox_chatd::load::proc::{self, Usage};
use beebox_chatd::load::spawn::{SpawnOptions, Spawned};
use beebox_chatd::sync::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Limit of every wait that does not name its own: generous, since machines of CI are slow and waits end at the event.
pub const LIMIT: Duration = Duration::from_secs(30);
/// How much of stderr a failure prints, in bytes.
const STDERR_SHOWN_BYTES: usize = 8 * 1024;

/// A number from the environment: how much of a test that scales.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}

/// How to start a server.
#[derive(Debug, Clone, Default)]
pub struct Options {
    args: Vec<String>,
    env: Vec<(String, String)>,
    listen: Option<String>,
    bearer: Option<String>,
    box_dir: Option<PathBuf>,
}

impl Options {
    /// Adds flags.
    pub fn args<'a>(mut self, args: impl IntoIterator<Item = &'a str>) -> Self {
        self.args.extend(args.into_iter().map(str::to_owned));
        self
    }

    /// Adds a variable to the environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Listens elsewhere than on a free port of 127.0.0.1.
    pub fn listen(mut self, listen: &str) -> Self {
        self.listen = Some(listen.to_owned());
        self
    }

    /// The token that clients of the harness show.
    pub fn bearer(mut self, token: &str) -> Self {
        self.bearer = Some(token.to_owned());
        self
    }

    /// A box that the test keeps itself.
    pub fn box_dir(mut self, dir: &Path) -> Self {
        self.box_dir = Some(dir.to_owned());
        self
    }

    /// Starts; panics with the server's stderr when it does not come up.
    pub fn start(self) -> Server {
        self.try_start().unwrap_or_else(|e| panic!("{e}"))
    }

    /// Starts, or says why not (for tests of refused starts).
    pub fn try_start(self) -> std::io::Result<Server> {
        let (kept, box_dir) = match self.box_dir {
            Some(dir) => (None, dir),
            None => {
                let dir = tempfile::Builder::new().prefix("beebox-it-").tempdir()?;
                let path = dir.path().join("box");
                (Some(dir), path)
            }
        };
        let mut options = SpawnOptions::new(env!("CARGO_BIN_EXE_beebox-chatd"), &box_dir);
        options.start_within = LIMIT;
        options.args = self.args;
        options.env = self.env;
        if let Some(listen) = self.listen {
            options.listen = listen;
        }
        let spawned = Spawned::start(options)?;
        Ok(Server { spawned, bearer: self.bearer, box_dir, _dir: kept })
    }
}

/// A running server; dropped, it is killed together with its agents, and its box is removed.
pub struct Server {
    // Before the directory: processes end first.
    spawned: Spawned,
    bearer: Option<String>,
    box_dir: PathBuf,
    _dir: Option<TempDir>,
}

impl Server {
    /// A server with the embedded agent and the default settings.
    pub fn new() -> Self {
        Options::default().start()
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.spawned.addr()
    }

    /// Its box.
    pub fn box_dir(&self) -> &Path {
        &self.box_dir
    }

    /// The home of the embedded agent, where it keeps transcripts.
    pub fn agent_home(&self) -> PathBuf {
        self.box_dir.join(".beebox").join("agent")
    }

    /// The transcript of a session, once there is one.
    pub fn transcript(&self, session: &str) -> Option<PathBuf> {
        let projects = std::fs::read_dir(self.agent_home().join("projects")).ok()?;
        projects.flatten().map(|p| p.path().join(format!("{session}.jsonl"))).find(|p| p.is_file())
    }

    /// Everything it said on stderr so far.
    pub fn stderr(&self) -> String {
        self.spawned.stderr()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.spawned.pid()
    }

    /// True while the process runs.
    pub fn is_running(&mut self) -> bool {
        self.spawned.is_running()
    }

    /// kill -9.
    pub fn kill9(&mut self) {
        let gone = self.spawned.kill9();
        self.diagnosis().must("the end of a killed server", gone);
    }

    /// SIGTERM; the exit status.
    pub fn terminate(&mut self) -> ExitStatus {
        let gone = self.spawned.terminate(LIMIT);
        self.diagnosis().must("the end after SIGTERM", gone)
    }

    /// Waits for the end of the process without asking for it.
    pub fn wait_exit(&mut self) -> ExitStatus {
        let gone = self.spawned.wait_exit(LIMIT);
        self.diagnosis().must("the end of the server", gone)
    }

    /// Starts it again on the same box and port (killed before, if it still runs).
    pub fn restart(&mut self) {
        let up = self.spawned.restart(true);
        self.diagnosis().must("a restart on the same port", up);
    }

    /// Starts it again on the same box, on whatever port is free.
    pub fn restart_elsewhere(&mut self) {
        self.spawned.options_mut().listen = "127.0.0.1:0".to_owned();
        let up = self.spawned.restart(false);
        self.diagnosis().must("a restart on another port", up);
    }

    /// Kills it, moves its box to `to`, and starts it there on the same port.
    pub fn move_box(&mut self, to: &Path) {
        self.kill9();
        std::fs::rename(&self.box_dir, to).expect("the box can be moved");
        self.box_dir = to.to_owned();
        self.spawned.options_mut().box_dir = to.to_owned();
        self.restart();
    }

    /// Flags and environment of the next restart.
    pub fn next_start(&mut self) -> &mut SpawnOptions {
        self.spawned.options_mut()
    }

    /// Names of its threads, sorted.
    pub fn thread_names(&self) -> Vec<String> {
        proc::thread_names(self.pid())
    }

    /// Memory, threads, open files, children, CPU time.
    pub fn usage(&self) -> Usage {
        proc::usage(self.pid()).expect("the server runs")
    }

    /// Resident memory in KiB.
    pub fn rss_kib(&self) -> u64 {
        self.usage().rss_kib
    }

    /// Open files.
    pub fn fds(&self) -> u64 {
        self.usage().fds
    }

    /// Live agents, by pid.
    pub fn agents(&self) -> Vec<u32> {
        self.spawned.agents()
    }

    /// What a failure prints; outlives borrows of the server.
    pub fn diagnosis(&self) -> Diagnosis {
        Diagnosis { addr: self.addr(), bearer: self.bearer.clone(), stderr: self.spawned.stderr_record() }
    }

    /// A client with a connection of its own.
    pub fn client(&self) -> Client {
        let client = Client::new(self.addr()).limit(LIMIT);
        match &self.bearer {
            Some(token) => client.bearer(token),
            None => client,
        }
    }

    /// One GET on a fresh connection.
    pub fn get(&self, path: &str) -> Answer {
        self.diagnosis().must(path, self.client().get(path))
    }

    /// One GET that must be 200 and JSON.
    pub fn get_json(&self, path: &str) -> Value {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    /// One POST of JSON on a fresh connection.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.diagnosis().must(path, self.client().post(path, body))
    }

    /// Sends a message that must be accepted.
    pub fn send(&self, session: &str, text: &str) -> Accepted {
        self.send_as(session, text, None, &[])
    }

    /// Sends a message with an id or photos; it must be accepted.
    pub fn send_as(&self, session: &str, text: &str, id: Option<&str>, photos: &[Photo]) -> Accepted {
        self.try_send(session, text, id, photos)
            .unwrap_or_else(|a| panic!("a send was answered {}: {}", a.status, a.text()))
    }

    /// Sends a message; the answer that refuses it, if it is not accepted.
    pub fn try_send(&self, session: &str, text: &str, id: Option<&str>, photos: &[Photo]) -> Result<Accepted, Answer> {
        self.diagnosis().must("an answer to a send", self.client().send(session, text, id, photos))
    }

    /// Sends a message and waits for the end of its turn, whatever that is.
    pub fn converse(&self, session: &str, text: &str) -> (Accepted, Frame) {
        let mut events = self.follow();
        let accepted = self.send(session, text);
        let end = events.end_of_message(&accepted.message_uuid);
        (accepted, end)
    }

    /// `POST /api/chat/<what>` with the session; what it did.
    pub fn control(&self, what: &str, session: &str) -> String {
        let answer = self.post(&format!("/api/chat/{what}"), &json!({ "session": session }));
        assert_eq!(answer.status, 200, "{what}: {}", answer.text());
        answer.json()["did"].as_str().unwrap_or_default().to_owned()
    }

    /// The whole transcript as a reader gets it (5,000 entries at most).
    pub fn history(&self, session: &str) -> Value {
        self.get_json(&format!("/api/chat/history?session={session}&tail=5000"))
    }

    /// What a page starts from.
    pub fn bootstrap(&self, session: &str) -> Value {
        self.get_json(&format!("/api/chat/bootstrap?session={session}"))
    }

    /// Phase and queue.
    pub fn status(&self, session: &str) -> Value {
        self.get_json(&format!("/api/chat/status?session={session}"))
    }

    /// Waits until the session is in `phase`, with the bus as the alarm.
    pub fn wait_phase(&self, session: &str, phase: &str) {
        let mut events = self.follow();
        if self.status(session)["phase"] == phase {
            return;
        }
        events.wait_for(&format!("phase {phase}"), |f| {
            f.event == "chat-phase" && f.text("sessionId") == session && f.text("phase") == phase
        });
    }

    /// A subscriber from now on, its hello read.
    pub fn follow(&self) -> Watch {
        self.follow_from(None)
    }

    /// A subscriber behind a cursor, its hello read.
    pub fn follow_from(&self, cursor: Option<&str>) -> Watch {
        let diagnosis = self.diagnosis();
        let mut follower = Follower::detached(self.addr());
        if let Some(token) = &self.bearer {
            follower = follower.bearer(token);
        }
        diagnosis.must("a WebSocket", follower.open(cursor, LIMIT));
        Watch::new(follower, diagnosis)
    }

    /// A subscriber over Server-Sent Events, its hello read.
    pub fn follow_sse(&self, cursor: Option<&str>, as_last_event_id: bool) -> Watch {
        let diagnosis = self.diagnosis();
        let follower = diagnosis.must("an event stream", Follower::sse(self.addr(), cursor, as_last_event_id, LIMIT));
        Watch::new(follower, diagnosis)
    }

    /// Looks again and again until `probe` gives a value: for what no event tells (threads, files, /proc).
    pub fn wait_until<T>(&self, what: &str, mut probe: impl FnMut(&Self) -> Option<T>) -> T {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(value) = probe(self) {
                return value;
            }
            if Instant::now() > deadline {
                self.diagnosis().give_up(what, "not within the limit");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// What a failure prints.
#[derive(Debug, Clone)]
pub struct Diagnosis {
    addr: SocketAddr,
    bearer: Option<String>,
    stderr: Arc<Mutex<Vec<u8>>>,
}

impl Diagnosis {
    /// The value, or a panic that says what was waited for and what the server was doing.
    pub fn must<T>(&self, what: &str, got: std::io::Result<T>) -> T {
        got.unwrap_or_else(|e| self.give_up(what, &e.to_string()))
    }

    /// Panics with everything known.
    pub fn give_up(&self, what: &str, why: &str) -> ! {
        let mut client = Client::new(self.addr).limit(Duration::from_secs(5));
        if let Some(token) = &self.bearer {
            client = client.bearer(token);
        }
        let threads = client.get("/api/debug/threads").map_or_else(|e| format!("(none: {e})"), |a| a.text());
        let stderr = self.stderr.lock();
        let tail = String::from_utf8_lossy(&stderr[stderr.len().saturating_sub(STDERR_SHOWN_BYTES)..]).into_owned();
        drop(stderr);
        panic!("{what}: {why}\n--- threads of the server\n{threads}\n--- end of its stderr\n{tail}");
    }
}

/// A subscriber whose waits explain themselves, and whose ids must rise without a hole.
#[derive(Debug)]
pub struct Watch {
    follower: Follower,
    diagnosis: Diagnosis,
    /// The first frame.
    pub hello: Frame,
}

impl Watch {
    fn new(mut follower: Follower, diagnosis: Diagnosis) -> Self {
        let hello = diagnosis.must("hello", follower.wait_for("hello", |_| true, LIMIT));
        assert_eq!(hello.event, "hello", "the first frame");
        Self { follower, diagnosis, hello }
    }

    /// Every frame so far.
    pub fn seen(&self) -> &[Frame] {
        &self.follower.seen
    }

    /// The subscriber itself.
    pub fn follower(&mut self) -> &mut Follower {
        &mut self.follower
    }

    /// Kept events so far of one name.
    pub fn kept(&self, event: &str) -> Vec<&Frame> {
        self.seen().iter().filter(|f| f.id.is_some() && f.event == event).collect()
    }

    /// Where to go on.
    pub fn cursor(&self) -> String {
        self.follower.order.cursor().expect("the hello was read")
    }

    /// The first such frame, seen already or still to come.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Frame) -> bool) -> Frame {
        let got = self.follower.wait_for(what, wanted, LIMIT);
        let frame = self.diagnosis.must(what, got);
        self.assert_in_order();
        frame
    }

    /// The first such frame behind the one the last `wait_next` gave.
    pub fn wait_next(&mut self, what: &str, wanted: impl Fn(&Frame) -> bool) -> Frame {
        let got = self.follower.wait_next(what, wanted, LIMIT);
        let frame = self.diagnosis.must(what, got);
        self.assert_in_order();
        frame
    }

    /// Reads what comes within `span`, for tests that something does NOT happen.
    pub fn drain(&mut self, span: Duration) -> &[Frame] {
        let from = self.follower.seen.len();
        let deadline = Instant::now() + span;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let got = self.follower.next(left);
            if self.diagnosis.must("frames", got).is_none() {
                break;
            }
        }
        self.assert_in_order();
        &self.follower.seen[from..]
    }

    /// The end of a turn: `chat-complete`, or `chat-turn-failed` that will not be tried again.
    pub fn turn_end(&mut self, turn: &str) -> Frame {
        self.wait_for(&format!("end of turn {turn}"), |f| is_end_of(f, turn))
    }

    /// The turn in which a message was dispatched last, once it was.
    pub fn turn_of(&mut self, message_uuid: &str) -> String {
        self.wait_for(&format!("dispatch of {message_uuid}"), |f| dispatches(f, message_uuid)).text("turnId").to_owned()
    }

    /// The end of the turn that carried a message, queued or not.
    pub fn end_of_message(&mut self, message_uuid: &str) -> Frame {
        let turn = self.turn_of(message_uuid);
        self.turn_end(&turn)
    }

    /// Panics if a kept event was missed, doubled or out of order.
    pub fn assert_in_order(&self) {
        assert!(self.follower.order.faults.is_empty(), "order of events: {:?}", self.follower.order.faults);
    }
}

/// True for the frame that ends `turn` for good.
pub fn is_end_of(frame: &Frame, turn: &str) -> bool {
    frame.text("turnId") == turn
        && (frame.event == "chat-complete" || (frame.event == "chat-turn-failed" && frame.data["willRetry"] == false))
}

/// True for the frame that tells the dispatch of a message.
pub fn dispatches(frame: &Frame, message_uuid: &str) -> bool {
    frame.event == "chat-message-dispatched"
        && frame.data["messageUuids"].as_array().is_some_and(|all| all.iter().any(|u| u == message_uuid))
}

/// The texts of a history's entries of one type, in order.
pub fn texts(history: &Value, kind: &str) -> Vec<String> {
    let entries = history["entries"].as_array().map(Vec::as_slice).unwrap_or_default();
    entries.iter().filter(|e| e["type"] == kind).map(entry_text).collect()
}

/// The text blocks of one entry, put together.
pub fn entry_text(entry: &Value) -> String {
    let blocks = entry["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    blocks.iter().filter_map(|b| b["text"].as_str()).collect()
}
