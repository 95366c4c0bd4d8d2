//! A stand-in for the model's HTTP interface on loopback, so that the real agent program can be driven without a model.
//!
//! `cargo run --example fake-messages-api -- [--port N] [--log FILE]`, then point the program at it:
//! `ANTHROPIC_BASE_URL=http://127.0.0.1:N ANTHROPIC_API_KEY=dummy`.
//!
//! The newest user text that holds `FAKE{…}` is the scenario: `{"steps":[STEP, …]}`, where step k answers the k-th
//! request after that text (k counts the assistant messages behind it); past the end the answer is "ok".
//! A step: `blocks` ([{"text"} | {"think"} | {"tool","input"}], each with `chunks`), `delay` (seconds before the head),
//! `first` (before the first event), `chunk_delay` (between deltas), `status` with `error_type`, `message`,
//! `retry_after`, `should_retry` (an error instead, for the first `times` requests of the step), `hang` (the stream never
//! ends after the last block's deltas), `cut` (the socket drops there), `stop`. Side requests, which carry no tools, get a
//! short text and use up no step, unless the scenario says `"any":true`.
//!
//! Every request and how it was answered is a JSON line in the log. Rule a change could break: it listens on loopback
//! only, and a client that leaves ends its thread.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use beebox_chatd::ids::MessageUuid;
use beebox_chatd::sync::Mutex;
use beebox_chatd::threads::{self, Name, OnPanic};
use serde::Deserialize;
use serde_json::{Value, json};

/// Longest request head, in bytes.
const HEAD_BYTES_MAX: u64 = 64 * 1024;
/// Largest request body, in bytes: a conversation with many photos.
const BODY_BYTES_MAX: usize = 256 * 1024 * 1024;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Scenario {
    steps: Vec<Step>,
    any: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Step {
    blocks: Vec<Block>,
    delay: f64,
    first: f64,
    chunk_delay: f64,
    status: Option<u16>,
    error_type: Option<String>,
    message: Option<String>,
    times: Option<u64>,
    retry_after: Option<String>,
    should_retry: Option<String>,
    hang: bool,
    ping: Option<f64>,
    cut: bool,
    stop: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Block {
    text: Option<String>,
    think: Option<String>,
    tool: Option<String>,
    input: Value,
    chunks: Option<usize>,
}

impl Step {
    fn saying(text: String, chunks: usize, chunk_delay: f64) -> Self {
        let block = Block { text: Some(text), chunks: Some(chunks), ..Block::default() };
        Self { blocks: vec![block], chunk_delay, ..Self::default() }
    }

    fn stop_reason(&self) -> &str {
        let calls = self.blocks.iter().any(|block| block.tool.is_some());
        self.stop.as_deref().unwrap_or(if calls { "tool_use" } else { "end_turn" })
    }
}

impl Block {
    /// The whole block as the interface names it.
    fn content(&self) -> Value {
        if let Some(text) = &self.text {
            json!({"type": "text", "text": text})
        } else if let Some(thoughts) = &self.think {
            json!({"type": "thinking", "thinking": thoughts, "signature": "c2ln".repeat(20)})
        } else {
            json!({"type": "tool_use", "id": id("toolu"), "name": self.tool, "input": self.input})
        }
    }
}

fn id(prefix: &str) -> String {
    let letters: String = String::from(MessageUuid::fresh()).replace('-', "");
    format!("{prefix}_{}", &letters[..22])
}

/// The parts of one content block's stream: its empty start, the deltas, and a signature if it has one.
fn parts(content: &Value, chunks: usize) -> (Value, Vec<Value>, Option<Value>) {
    let kind = content["type"].as_str().unwrap_or_default();
    let mut start = content.clone();
    let (whole, delta, key, signature) = match kind {
        "thinking" => {
            start["thinking"] = json!("");
            start["signature"] = json!("");
            let signature = json!({"type": "signature_delta", "signature": content["signature"]});
            (content["thinking"].as_str().unwrap_or_default().to_owned(), "thinking_delta", "thinking", Some(signature))
        }
        "tool_use" => {
            start["input"] = json!({});
            (content["input"].to_string(), "input_json_delta", "partial_json", None)
        }
        _ => {
            start["text"] = json!("");
            (content["text"].as_str().unwrap_or_default().to_owned(), "text_delta", "text", None)
        }
    };
    let letters: Vec<char> = whole.chars().collect();
    let size = letters.len().div_ceil(chunks.max(1)).max(1);
    let deltas = letters.chunks(size).map(|piece| json!({"type": delta, key: piece.iter().collect::<String>()}));
    (start, deltas.collect(), signature)
}

fn texts(message: &Value) -> Vec<&str> {
    match &message["content"] {
        Value::String(text) => vec![text],
        Value::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Vec::new(),
    }
}

/// The last scenario in `text`.
fn scenario_in(text: &str) -> Option<Scenario> {
    text.match_indices("FAKE{")
        .filter_map(|(at, _)| serde_json::Deserializer::from_str(&text[at + 4..]).into_iter::<Scenario>().next()?.ok())
        .last()
}

/// What answers a request, and a key that is the same for every repeat of it.
fn choose(request: &Value) -> (Step, String) {
    let none = Vec::new();
    let messages = request["messages"].as_array().unwrap_or(&none);
    let side = request["tools"].as_array().is_none_or(Vec::is_empty);
    let found =
        messages.iter().enumerate().rev().filter(|(_, message)| message["role"] == "user").find_map(|(at, message)| {
            texts(message).into_iter().rev().find_map(|text| Some((at, text, scenario_in(text)?)))
        });
    if let Some((at, text, scenario)) = found
        && (!side || scenario.any)
    {
        let k = messages[at + 1..].iter().filter(|message| message["role"] == "assistant").count();
        let step = scenario.steps.get(k).cloned().unwrap_or_else(|| Step::saying("ok".to_owned(), 3, 0.0));
        return (step, format!("{k} {text}"));
    }
    if side {
        return (Step::saying("Side answer.".to_owned(), 5, 0.01), String::new());
    }
    let said = messages.iter().rev().find(|message| message["role"] == "user").map(texts).unwrap_or_default();
    let said = said.into_iter().rfind(|text| !text.starts_with("<system-reminder>")).unwrap_or_default();
    let said: String = said.chars().take(60).collect();
    (Step::saying(format!("Hello from the fake API. You said: {said}"), 5, 0.01), String::new())
}

/// Media type and base64 length of every photo in `value`.
fn photos(value: &Value, found: &mut Vec<Value>) {
    match value {
        Value::Object(fields) => {
            if let (Some("image"), Some(data)) = (value["type"].as_str(), value["source"]["data"].as_str()) {
                found.push(json!({"mediaType": value["source"]["media_type"], "base64Bytes": data.len()}));
            }
            fields.values().for_each(|inner| photos(inner, found));
        }
        Value::Array(items) => items.iter().for_each(|inner| photos(inner, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// What the threads share.
struct Shared {
    log: Option<Mutex<File>>,
    /// How often a step that fails was asked for.
    failed: Mutex<HashMap<String, u64>>,
    requests: Mutex<u64>,
}

impl Shared {
    fn log(&self, line: Value) {
        if let Some(log) = &self.log {
            // A full disk must not end a conversation.
            let _ = log.lock().write_all(format!("{line}\n").as_bytes());
        }
    }
}

struct Request {
    method: String,
    path: String,
    body: Vec<u8>,
}

fn bad(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The next request of a connection; `None` at its end.
fn read_request(from: &mut BufReader<TcpStream>) -> io::Result<Option<Request>> {
    let mut head = from.by_ref().take(HEAD_BYTES_MAX);
    let mut line = String::new();
    if head.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else {
        return Err(bad("no request line"));
    };
    let mut length = 0;
    loop {
        let mut field = String::new();
        if head.read_line(&mut field)? == 0 {
            return Err(bad("the head does not end"));
        }
        match field.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.trim().parse().map_err(|_| bad("content-length is no number"))?;
            }
            Some(_) => {}
            None if field.trim_end().is_empty() => break,
            None => return Err(bad("a head line without a colon")),
        }
    }
    if length > BODY_BYTES_MAX {
        return Err(bad("the body is too large"));
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok(Some(Request { method, path, body }))
}

struct Connection {
    to: TcpStream,
    shared: Arc<Shared>,
}

fn pause(seconds: f64) {
    // The scenario's own time; nobody could signal it.
    if seconds > 0.0 {
        std::thread::sleep(Duration::from_secs_f64(seconds.min(86_400.0)));
    }
}

impl Connection {
    fn json(&mut self, status: u16, body: &Value, more: &str, head_only: bool) -> io::Result<()> {
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {status} Fake\r\ncontent-type: application/json\r\ncontent-length: {}\r\nrequest-id: {}\r\n{more}\r\n",
            body.len(),
            id("req")
        );
        self.to.write_all((head + if head_only { "" } else { &body }).as_bytes())
    }

    fn not_found(&mut self, head_only: bool) -> io::Result<()> {
        let error = json!({"type": "not_found_error", "message": "fake: no such path"});
        self.json(404, &json!({"type": "error", "error": error}), "", head_only)
    }

    fn answer(&mut self, request: &Request) -> io::Result<()> {
        let (method, path) = (request.method.as_str(), request.path.as_str());
        let head_only = method == "HEAD";
        if method != "POST" {
            self.shared.log(json!({"method": method, "path": path}));
            return match path {
                _ if path.starts_with("/v1/models") => {
                    self.json(200, &json!({"data": [], "has_more": false}), "", head_only)
                }
                "/" => self.json(200, &json!({}), "", head_only),
                _ => self.not_found(head_only),
            };
        }
        let body: Option<Value> = serde_json::from_slice(&request.body).ok();
        let Some(body) = body.filter(|_| path.starts_with("/v1/messages")) else {
            self.shared.log(json!({"method": method, "path": path, "bytes": request.body.len()}));
            return self.not_found(false);
        };
        let number = {
            let mut requests = self.shared.requests.lock();
            *requests += 1;
            *requests
        };
        let mut images = Vec::new();
        photos(&body["messages"], &mut images);
        let roles: Vec<&Value> = body["messages"].as_array().into_iter().flatten().map(|m| &m["role"]).collect();
        self.shared.log(json!({
            "number": number, "path": path, "bytes": request.body.len(), "model": body["model"], "stream": body["stream"],
            "tools": body["tools"].as_array().map_or(0, Vec::len), "roles": roles, "images": images,
        }));
        if path.starts_with("/v1/messages/count_tokens") {
            return self.json(200, &json!({"input_tokens": (request.body.len() / 4).max(1)}), "", false);
        }
        let (step, key) = choose(&body);
        pause(step.delay);
        if let Some(status) = step.status {
            let nth = {
                let mut failed = self.shared.failed.lock();
                let count = failed.entry(key).or_default();
                *count += 1;
                *count
            };
            if step.times.is_none_or(|times| nth <= times) {
                self.shared.log(json!({"number": number, "answered": status, "nth": nth}));
                let mut more = String::new();
                for (name, value) in [("retry-after", &step.retry_after), ("x-should-retry", &step.should_retry)] {
                    if let Some(value) = value {
                        more += &format!("{name}: {value}\r\n");
                    }
                }
                let error = json!({
                    "type": step.error_type.as_deref().unwrap_or("overloaded_error"),
                    "message": step.message.as_deref().unwrap_or("Overloaded"),
                });
                return self.json(status, &json!({"type": "error", "error": error}), &more, false);
            }
        }
        let told = if body["stream"] == true { self.stream(&body, &step) } else { self.whole(&body, &step) };
        let outcome = told.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned());
        self.shared.log(json!({"number": number, "answered": 200, "outcome": outcome}));
        told
    }

    fn message(&self, request: &Value, content: Vec<Value>, stop: Value, output_tokens: usize) -> Value {
        let usage = json!({
            "input_tokens": 100, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": output_tokens,
        });
        json!({
            "id": id("msg"), "type": "message", "role": "assistant", "model": request["model"], "content": content,
            "stop_reason": stop, "stop_sequence": null, "usage": usage,
        })
    }

    fn whole(&mut self, request: &Value, step: &Step) -> io::Result<()> {
        if step.hang {
            // Until the client leaves.
            let mut rest = Vec::new();
            self.to.read_to_end(&mut rest)?;
            return Ok(());
        }
        let content = step.blocks.iter().map(Block::content).collect();
        let message = self.message(request, content, json!(step.stop_reason()), 20);
        self.json(200, &message, "", false)
    }

    fn event(&mut self, event: &Value) -> io::Result<()> {
        let text = format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default());
        self.to.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes())
    }

    fn stream(&mut self, request: &Value, step: &Step) -> io::Result<()> {
        let head = format!(
            "HTTP/1.1 200 Fake\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\nrequest-id: {}\r\ntransfer-encoding: chunked\r\n\r\n",
            id("req")
        );
        self.to.write_all(head.as_bytes())?;
        pause(step.first);
        let message = self.message(request, Vec::new(), Value::Null, 1);
        self.event(&json!({"type": "message_start", "message": message}))?;
        let mut deltas_said = 0;
        for (index, block) in step.blocks.iter().enumerate() {
            let (start, deltas, signature) = parts(&block.content(), block.chunks.unwrap_or(3));
            self.event(&json!({"type": "content_block_start", "index": index, "content_block": start}))?;
            for delta in deltas {
                pause(step.chunk_delay);
                self.event(&json!({"type": "content_block_delta", "index": index, "delta": delta}))?;
                deltas_said += 1;
            }
            if index + 1 == step.blocks.len() {
                if step.cut {
                    self.to.shutdown(std::net::Shutdown::Both)?;
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "cut by the scenario"));
                }
                if step.hang {
                    // Until a ping finds the client gone.
                    loop {
                        pause(step.ping.unwrap_or(2.0));
                        self.event(&json!({"type": "ping"}))?;
                    }
                }
            }
            if let Some(signature) = signature {
                self.event(&json!({"type": "content_block_delta", "index": index, "delta": signature}))?;
            }
            self.event(&json!({"type": "content_block_stop", "index": index}))?;
        }
        let delta = json!({"stop_reason": step.stop_reason(), "stop_sequence": null});
        let usage = json!({"output_tokens": deltas_said.max(1)});
        self.event(&json!({"type": "message_delta", "delta": delta, "usage": usage}))?;
        self.event(&json!({"type": "message_stop"}))?;
        self.to.write_all(b"0\r\n\r\n")
    }

    fn live(mut self) -> io::Result<()> {
        self.to.set_nodelay(true)?;
        let mut from = BufReader::new(self.to.try_clone()?);
        while let Some(request) = read_request(&mut from)? {
            self.answer(&request)?;
        }
        Ok(())
    }
}

/// Answers on a free loopback port (or `port`) in threads of its own, for ever; returns the port.
pub fn start(port: u16, log: Option<&Path>) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let port = listener.local_addr()?.port();
    let log = log.map(|path| File::options().append(true).create(true).open(path)).transpose()?;
    let shared =
        Arc::new(Shared { log: log.map(Mutex::new), failed: Mutex::new(HashMap::new()), requests: Mutex::new(0) });
    threads::spawn(Name::fixed("fake-accept"), threads::SMALL_STACK_BYTES, OnPanic::Contain, move || {
        for (n, stream) in listener.incoming().flatten().enumerate() {
            let connection = Connection { to: stream, shared: Arc::clone(&shared) };
            let body = move || {
                // A client that leaves is no news.
                let _ = connection.live();
            };
            let name = Name::numbered("fake", n % 100);
            if let Err(e) = threads::spawn(name, threads::WORK_STACK_BYTES, OnPanic::Contain, body) {
                log::error!("no thread for a connection: {e}");
            }
        }
    })?;
    Ok(port)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut port, mut log) = (0, None);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--port" => port = value.parse()?,
            "--log" => log = Some(value),
            _ => return Err(format!("unknown flag {flag}; known: --port N, --log FILE").into()),
        }
    }
    let port = start(port, log.as_deref().map(Path::new))?;
    writeln!(io::stdout(), "listening on http://127.0.0.1:{port}")?;
    loop {
        std::thread::park();
    }
}
