//! A server with the real agent on a box of its own, what was sent to it, and the judgement at the end of a case.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use beebox_chatd::load::checker::disk::Disk;
use beebox_chatd::load::checker::{EventLog, Evidence, Pending, Sent, Try, check, mark};
use beebox_chatd::load::client::{Accepted, Photo};
use beebox_chatd::load::events::Frame;
use serde_json::{Value, json};

use crate::support::{LIMIT, Options, Server, Watch};

/// A real agent, and where the stand-in for the model listens.
pub struct Real {
    pub version: String,
    pub program: String,
    pub api: u16,
}

impl Real {
    /// The variables the agent gets through the server, but for the key.
    pub fn env(&self, home: &str) -> Vec<(&'static str, String)> {
        vec![
            ("HOME", home.to_owned()),
            ("ANTHROPIC_BASE_URL", format!("http://127.0.0.1:{}", self.api)),
            ("CLAUDE_CODE_MAX_RETRIES", "2".to_owned()),
            ("DISABLE_TELEMETRY", "1".to_owned()),
            ("DISABLE_AUTOUPDATER", "1".to_owned()),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".to_owned()),
        ]
    }
}

/// What differs from the usual start.
pub struct Start {
    pub sandbox: bool,
    pub key: bool,
    /// Another program, or more arguments.
    pub program: Option<String>,
    /// The agent's home lies beside the box, as that of a person does.
    pub outside_home: bool,
    pub flags: &'static [&'static str],
}

impl Default for Start {
    fn default() -> Self {
        Self { sandbox: true, key: true, program: None, outside_home: false, flags: &[] }
    }
}

pub struct Scene {
    pub server: Server,
    pub events: Watch,
    /// `new` until the first message.
    pub session: String,
    sent: Vec<Sent>,
    /// The agent's home.
    pub home: PathBuf,
    /// How the server was started, for another one like it.
    options: Options,
    // Behind the server, which goes first.
    dir: tempfile::TempDir,
}

impl Scene {
    pub fn new(real: &Real) -> Self {
        Self::start(real, &Start::default())
    }

    pub fn start(real: &Real, how: &Start) -> Self {
        let dir = tempfile::Builder::new().prefix("beebox-real-").tempdir().unwrap();
        let (home, box_dir) = (dir.path().join("home"), dir.path().join("box"));
        std::fs::create_dir(&home).unwrap();
        let agent_home =
            if how.outside_home { dir.path().join("agent") } else { box_dir.join(".beebox").join("agent") };
        let mut options = Options::default().box_dir(&box_dir).args([
            "--agent",
            how.program.as_deref().unwrap_or(&real.program),
            "--agent-home",
            agent_home.to_str().unwrap(),
        ]);
        options = options.args(how.flags.iter().copied());
        if how.sandbox {
            options = options.args(["--sandbox"]);
        }
        for (name, value) in real.env(home.to_str().unwrap()) {
            options = options.env(name, &value);
        }
        if how.key {
            options = options.env("ANTHROPIC_API_KEY", "dummy");
        }
        let server = options.clone().start();
        let events = server.follow();
        Self { server, events, session: "new".to_owned(), sent: Vec::new(), home: agent_home, options, dir }
    }

    /// Moves the box while nobody serves it, and serves it there.
    pub fn move_box(&mut self) {
        let to = self.dir.path().join("moved");
        if self.home.starts_with(self.server.box_dir()) {
            let home = to.join(".beebox").join("agent");
            let args = &mut self.server.next_start().args;
            let at = args.iter().position(|arg| arg == "--agent-home").unwrap();
            args[at + 1] = home.display().to_string();
            self.home = home;
        }
        self.server.move_box(&to);
        self.follow_on();
    }

    /// A server on a copy of the live box, with the same agent and the same home.
    pub fn serve_a_copy(&self) -> Server {
        let copy = self.dir.path().join("copy");
        let status = std::process::Command::new("cp").arg("-a").arg(self.server.box_dir()).arg(&copy).status().unwrap();
        assert!(status.success());
        self.options.clone().box_dir(&copy).start()
    }

    /// Sends a message whose answer is `steps` of the stand-in's script; it must be accepted.
    pub fn send(&mut self, words: &str, steps: &Value) -> Accepted {
        self.send_with(words, steps, &[])
    }

    pub fn send_with(&mut self, words: &str, steps: &Value, photos: &[Photo]) -> Accepted {
        let id = format!("m{}", self.sent.len() + 1);
        let text = format!("{words} {} FAKE{}", mark(&id), json!({ "steps": steps }));
        let accepted = self.server.send_as(&self.session, &text, Some(&id), photos);
        if matches!(self.session.as_str(), "new" | "main") {
            self.session.clone_from(&accepted.session_id);
        }
        self.sent.push(Sent {
            message_id: id,
            text,
            photos: photos.len(),
            tries: vec![Try::Accepted(accepted.clone())],
            discarded: false,
        });
        accepted
    }

    /// Sends again what was sent as the `nth` message (from 1); it must be known.
    pub fn repeat(&mut self, nth: usize) {
        let before = &mut self.sent[nth - 1];
        let again = self.server.send_as(&self.session, &before.text, Some(&before.message_id), &[]);
        assert!(again.deduplicated, "{again:?}");
        before.tries.push(Try::Accepted(again));
    }

    /// Sends and waits for a good end of the turn.
    pub fn converse(&mut self, words: &str, steps: &Value) -> Accepted {
        let accepted = self.send(words, steps);
        self.good_end(&accepted);
        accepted
    }

    pub fn end(&mut self, accepted: &Accepted) -> Frame {
        self.events.end_of_message(&accepted.message_uuid)
    }

    pub fn good_end(&mut self, accepted: &Accepted) -> Frame {
        let end = self.end(accepted);
        assert_eq!((end.event.as_str(), &end.data["isError"]), ("chat-complete", &json!(false)), "{end:?}");
        end
    }

    /// Waits for a message of a turn that `wanted` likes.
    pub fn said(&mut self, what: &str, accepted: &Accepted, wanted: impl Fn(&Value) -> bool) {
        let turn = accepted.message_uuid.clone();
        self.events.wait_for(what, |f| f.event == "chat-turn" && f.text("turnId") == turn && wanted(&f.data["msg"]));
    }

    /// Waits until words of the answer stream.
    pub fn streams(&mut self, accepted: &Accepted) {
        self.said("words of the answer", accepted, |msg| {
            msg["type"] == "stream_event" && msg["event"]["type"] == "content_block_delta"
        });
    }

    /// Waits until the agent has written the message down.
    pub fn is_written(&self, accepted: &Accepted) {
        self.server.wait_until("the user's line in the transcript", |_| {
            let disk = Disk::read(&self.home, |_| true).unwrap();
            let mut lines = disk.sessions.values().flat_map(|t| &t.users);
            lines.any(|line| line.uuids.contains(&accepted.message_uuid)).then_some(())
        });
    }

    /// Waits until a tool runs whose command holds `word`; its processes.
    pub fn tool_runs(&mut self, accepted: &Accepted, word: &str) -> Vec<u32> {
        self.said("a tool call", accepted, |msg| msg["message"]["content"].to_string().contains("tool_use"));
        self.server.wait_until("the tool's process", |_| Some(with_word(word)).filter(|pids| !pids.is_empty()))
    }

    /// Follows anew behind what was told before, as a client does whose server was started again.
    pub fn follow_on(&mut self) {
        let cursor = self.events.cursor();
        self.events = self.server.follow_from(Some(&cursor));
    }

    pub fn history(&self) -> Value {
        self.server.history(&self.session)
    }

    /// What the judge must not ask for: the case took it away.
    pub fn forget_sent(&mut self) {
        self.sent.clear();
    }

    /// Waits until nothing is left to do, then looks for every accepted message in what the agent wrote.
    pub fn judge(mut self) {
        let mut quiet = 0;
        self.server.wait_until("nothing left to do", |server| {
            let listed = server.get_json("/api/chat/sessions");
            let at_work = listed["sessions"].as_array().unwrap().iter().any(|s| s["busy"] == true || s["queued"] != 0);
            quiet = if at_work { 0 } else { quiet + 1 };
            (quiet == 3).then_some(())
        });
        let mut replay = self.server.follow_from(Some("0"));
        let head = replay.hello.data["head"].as_i64().unwrap();
        replay.wait_for("the newest event", |f| f.id == Some(head));
        let mut log = EventLog::default();
        log.complete = true;
        let mut sessions: Vec<String> = Vec::new();
        for frame in replay.seen() {
            let Some(id) = frame.id else { continue };
            log.add(id, &frame.event, frame.data.clone());
            let session = frame.text("sessionId").to_owned();
            if !session.is_empty() && !sessions.contains(&session) {
                sessions.push(session);
            }
        }
        let mut pending = Vec::new();
        for session in &sessions {
            let shown = self.server.bootstrap(session);
            for row in shown["pending"].as_array().unwrap() {
                let word = |key: &str| row[key].as_str().unwrap().to_owned();
                pending.push(Pending { session: session.clone(), uuid: word("uuid"), state: word("state") });
            }
        }
        let disk = Disk::read(&self.home, |_| true).unwrap();
        self.assert_by_uuid(&log, &disk);
        let subscribers = vec![("case".to_owned(), self.events.follower().order.clone())];
        let verdict =
            check(&Evidence { sent: self.sent, disk, log, pending, subscribers, settled: true, unseen: false });
        println!("    {verdict}");
        assert!(verdict.violations.is_empty(), "{:#?}\n{}", verdict.violations, self.server.stderr());
    }

    /// Who was dispatched and neither cleared nor failed stands in one line of the transcripts, under the turn's uuid.
    fn assert_by_uuid(&self, log: &EventLog, disk: &Disk) {
        for sent in &self.sent {
            let uuid = sent.accepted().unwrap().message_uuid.as_str();
            let names = |data: &Value| data["messageUuids"].as_array().is_some_and(|all| all.iter().any(|u| u == uuid));
            let mut turn = None;
            let mut gone = false;
            for (_, kept) in log.iter() {
                match kept.event.as_str() {
                    "chat-message-dispatched" if names(&kept.data) => turn = kept.data["turnId"].as_str(),
                    "chat-queue-cleared" if names(&kept.data) => gone = true,
                    "chat-turn-failed" if names(&kept.data) && kept.data["willRetry"] == false => gone = true,
                    _ => {}
                }
            }
            let lines = disk
                .sessions
                .values()
                .flat_map(|transcript| &transcript.users)
                .filter(|line| line.uuids.iter().any(|u| u == uuid || turn.is_some_and(|turn| u == turn)))
                .count();
            assert!(lines == 1 || (lines == 0 && gone), "message {uuid} (turn {turn:?}) stands in {lines} lines");
        }
    }
}

/// Processes whose command line holds `word`.
pub fn with_word(word: &str) -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(word)
    })
    .collect()
}

/// Waits until none of `pids` is there, `limit` at most.
pub fn all_gone(pids: &[u32], limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    pids.iter().all(|pid| {
        let left = deadline.saturating_duration_since(Instant::now());
        beebox_chatd::load::proc::exited_within(*pid, left.min(LIMIT))
    })
}
