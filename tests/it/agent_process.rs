//! An agent as a process, driven line by line, and the comparison of what it says with another's. Used by the cases of
//! the embedded agent and by those that put it beside the real program.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use beebox_chatd::sync::{Receiver, bounded};
use beebox_chatd::threads::{self, Name, OnPanic};
use serde_json::{Value, json};

/// Longest wait for anything.
pub const LIMIT: Duration = Duration::from_secs(20);

pub struct Place {
    pub dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("box")).unwrap();
        Self { dir }
    }

    /// The embedded agent.
    pub fn start(&self, flags: &[&str]) -> Agent {
        let mut command = Command::new(env!("CARGO_BIN_EXE_beebox-chatd"));
        command.arg("agent").env_clear();
        self.start_program(command, flags)
    }

    /// Any program that speaks the protocol, with `flags` behind the usual ones.
    pub fn start_program(&self, mut command: Command, flags: &[&str]) -> Agent {
        let mut child = command
            .args(["--output-format", "stream-json", "--input-format", "stream-json", "--verbose"])
            .args(["--include-partial-messages", "--permission-mode", "bypassPermissions"])
            .args(flags)
            .current_dir(self.dir.path().join("box"))
            .env("CLAUDE_CONFIG_DIR", self.dir.path().join("home"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        // Bounded: a test that does not listen leaves the agent's pipe full.
        let (said, hear) = bounded(64);
        threads::spawn(Name::fixed("agent-out"), threads::WORK_STACK_BYTES, OnPanic::Contain, move || {
            for line in stdout.lines() {
                let line = line.unwrap();
                let message: Value = serde_json::from_str(&line).unwrap();
                if said.send((message, line)).is_err() {
                    break;
                }
            }
        })
        .unwrap();
        Agent { stdin: child.stdin.take(), child, hear, heard: Vec::new(), raw: Vec::new(), taken: 0 }
    }

    /// The transcript of `session`, every line whole.
    pub fn lines(&self, session: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.file(session)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The same as text.
    pub fn raw_lines(&self, session: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.file(session)).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    pub fn file(&self, session: &str) -> PathBuf {
        let folders = std::fs::read_dir(self.dir.path().join("home/projects")).unwrap();
        let name = format!("{session}.jsonl");
        folders.map(|folder| folder.unwrap().path().join(&name)).find(|path| path.exists()).unwrap()
    }

    pub fn holds(&self, session: &str, text: &str) -> bool {
        std::fs::read_to_string(self.file(session)).unwrap().contains(text)
    }
}

pub struct Agent {
    pub child: Child,
    pub stdin: Option<ChildStdin>,
    pub hear: Receiver<(Value, String)>,
    pub heard: Vec<Value>,
    pub raw: Vec<String>,
    pub taken: usize,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Agent {
    pub fn line(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub fn send_as(&mut self, uuid: &str, content: impl Into<Value>) {
        let message = json!({"role": "user", "content": content.into()});
        let line = json!({"type": "user", "message": message, "parent_tool_use_id": null, "uuid": uuid});
        self.line(&line.to_string());
    }

    pub fn interrupt(&mut self, id: &str) {
        let line = json!({"type": "control_request", "request_id": id, "request": {"subtype": "interrupt"}});
        self.line(&line.to_string());
    }

    /// Answers a question of the agent.
    pub fn allow(&mut self, request: &Value, behavior: &str) {
        let inner = json!({"behavior": behavior, "message": "so the test wants"});
        let response = json!({"subtype": "success", "request_id": request["request_id"], "response": inner});
        self.line(&json!({"type": "control_response", "response": response}).to_string());
    }

    /// The next message that `wanted` takes; earlier ones are passed over, but stay in `heard`.
    pub fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + LIMIT;
        loop {
            while self.taken < self.heard.len() {
                self.taken += 1;
                if wanted(&self.heard[self.taken - 1]) {
                    return self.heard[self.taken - 1].clone();
                }
            }
            match self.hear.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((message, raw)) => {
                    self.heard.push(message);
                    self.raw.push(raw);
                }
                Err(e) => panic!("no {what}: {e}; heard {:#?}", self.kinds()),
            }
        }
    }

    pub fn kind(&mut self, kind: &str) -> Value {
        self.until(kind, |message| kind_of(message) == kind)
    }

    pub fn result(&mut self) -> Value {
        self.kind("result")
    }

    pub fn state(&mut self, uuid: &str, state: &str) -> Value {
        self.until(state, |message| message["command_uuid"] == uuid && message["state"] == state)
    }

    /// Closes stdin, hears the rest, and waits for the end.
    pub fn end(&mut self) -> (ExitStatus, String) {
        self.stdin = None;
        self.gone()
    }

    pub fn gone(&mut self) -> (ExitStatus, String) {
        while let Ok((message, raw)) = self.hear.recv_timeout(LIMIT) {
            self.heard.push(message);
            self.raw.push(raw);
        }
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, stderr);
            }
            assert!(Instant::now() < end, "the agent closed stdout and lives on");
            std::thread::yield_now();
        }
    }

    pub fn code(&mut self) -> i32 {
        self.end().0.code().unwrap()
    }

    pub fn kinds(&self) -> Vec<String> {
        self.heard.iter().map(kind_of).collect()
    }
}

pub fn kind_of(message: &Value) -> String {
    let kind = message["type"].as_str().unwrap_or("?");
    match kind {
        "system" => format!("system/{}", message["subtype"].as_str().unwrap_or("?")),
        "stream_event" => format!("stream_event/{}", message["event"]["type"].as_str().unwrap_or("?")),
        "command_lifecycle" => format!("command_lifecycle/{}", message["state"].as_str().unwrap_or("?")),
        "attachment" => format!("attachment/{}", message["attachment"]["type"].as_str().unwrap_or("?")),
        "queue-operation" => format!("queue-operation/{}", message["operation"].as_str().unwrap_or("?")),
        _ => kind.to_owned(),
    }
}

pub fn fixture(name: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

pub fn parsed(lines: &[String]) -> Vec<Value> {
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Kinds in order, a run of deltas as one.
pub fn order(messages: &[Value]) -> Vec<String> {
    let mut kinds: Vec<String> = messages.iter().map(kind_of).filter(|kind| kind != "system/thinking_tokens").collect();
    kinds.dedup_by(|b, a| a == b && a.ends_with("delta"));
    kinds
}

/// The keys of a JSON object as its text has them.
pub fn keys(line: &str) -> Vec<String> {
    struct Keys(Vec<String>);
    impl<'de> serde::Deserialize<'de> for Keys {
        fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            struct Visitor;
            impl<'de> serde::de::Visitor<'de> for Visitor {
                type Value = Keys;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("an object")
                }
                fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                    let mut keys = Vec::new();
                    while let Some((key, _)) = map.next_entry::<String, serde::de::IgnoredAny>()? {
                        keys.push(key);
                    }
                    Ok(Keys(keys))
                }
            }
            from.deserialize_map(Visitor)
        }
    }
    serde_json::from_str::<Keys>(line).unwrap().0
}

/// Every line of ours has its keys in the order of the real line of the same kind, and none of its own.
pub fn assert_shapes(ours: &[String], real: &[String]) {
    for line in ours {
        let kind = kind_of(&serde_json::from_str(line).unwrap());
        let real_keys: Vec<Vec<String>> =
            real.iter().filter(|line| kind_of(&serde_json::from_str(line).unwrap()) == kind).map(|l| keys(l)).collect();
        assert!(!real_keys.is_empty(), "the real agent has no {kind}");
        let own = keys(line);
        let fits = real_keys.iter().any(|real| {
            let mut rest = real.iter();
            own.iter().all(|key| rest.any(|other| other == key))
        });
        assert!(fits, "{kind}: {own:?} is no part of {real_keys:?}");
    }
}
