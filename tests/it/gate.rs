//! The gate and the pool behind it, over real sockets, with a small handler of the test's own.
//! Every wait is bounded: a read that gets nothing for [`PATIENCE`] fails the test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use beebox_chatd::error::{Code, Error, Result};
use beebox_chatd::http::gate::exchange::Exchanges;
use beebox_chatd::http::gate::{self, Gate, GateConfig, Limits, Local};
use beebox_chatd::http::guard::Token;
use beebox_chatd::http::reply::{Body, Reply};
use beebox_chatd::http::route::Route;
use beebox_chatd::http::server::{self, Handler, Incoming, Server, ServerConfig};
use beebox_chatd::push::{Upgrade, UpgradeKind};

/// Longest that any wait of a test may take.
const PATIENCE: Duration = Duration::from_secs(20);
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

// ---- the house under test

/// Blocks handlers until it is opened.
#[derive(Default)]
struct Latch {
    open: Mutex<bool>,
    changed: Condvar,
    waiting: AtomicUsize,
}

impl Latch {
    fn wait(&self) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let open = self.open.lock().unwrap();
        let (_open, out) = self.changed.wait_timeout_while(open, PATIENCE, |open| !*open).unwrap();
        assert!(!out.timed_out(), "a latch was never opened");
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

/// What the routes of the test do; the session of a request says what is wanted.
#[derive(Default)]
struct Play {
    answered: AtomicU64,
    /// Sends that were executed: what smuggled requests would hit.
    sends: AtomicU64,
    latch: Latch,
    /// Bytes read of media.
    read: Arc<AtomicU64>,
}

/// A body that may end before it said it would, and counts what was read of it.
struct Short(usize, Arc<AtomicU64>);

impl Read for Short {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.0.min(buffer.len());
        buffer[..n].fill(b'x');
        self.0 -= n;
        self.1.fetch_add(n as u64, Ordering::SeqCst);
        Ok(n)
    }
}

impl Handler for Play {
    #[expect(clippy::wildcard_enum_match_arm, reason = "a test's handler plays a few routes")]
    fn answer(&self, incoming: Incoming) -> Result<Reply> {
        self.answered.fetch_add(1, Ordering::SeqCst);
        match incoming.route {
            Route::Send => {
                self.sends.fetch_add(1, Ordering::SeqCst);
                let sum: u64 = incoming.body.iter().map(|b| u64::from(*b)).sum();
                Ok(Reply::text(200, format!("{} {sum}", incoming.body.len())))
            }
            Route::Status { session } => match session.as_str() {
                "panic" => panic!("on purpose"),
                "wait" => {
                    self.latch.wait();
                    Ok(Reply::text(200, "waited"))
                }
                "gone" => Err(Error::new(Code::SessionGone, "its transcript is gone")),
                other => Ok(Reply::text(200, format!("status {other}"))),
            },
            Route::Turns { turn, wait_ms, .. } => {
                if wait_ms > 0 {
                    self.latch.wait();
                }
                Ok(Reply::text(200, format!("turn {turn}")))
            }
            Route::Media { media, .. } => {
                let len = 1000u64 * 10u64.pow(u32::try_from(media.index).unwrap());
                let given = if media.entry == "short" { len / 2 } else { len };
                let reader = Box::new(Short(usize::try_from(given).unwrap(), self.read.clone()));
                let mut reply = Reply::empty(200);
                reply.headers.push(("ETag", format!("{:?}", incoming.if_none_match.unwrap_or_default())));
                reply.body = Body::Reader { reader, len };
                Ok(reply)
            }
            Route::Sessions => Ok(Reply::json(&vec!["x"; 800])),
            _ => Ok(Reply::text(200, "else")),
        }
    }
}

struct Calm;

impl Local for Calm {
    fn ready(&self) -> std::result::Result<(), String> {
        Ok(())
    }
    fn metrics(&self, page: &mut String) {
        page.push_str("other_room 1\n");
    }
    fn debug_threads(&self) -> String {
        beebox_chatd::dump::threads_page()
    }
}

struct House {
    dir: tempfile::TempDir,
    play: Arc<Play>,
    gate: Option<Gate>,
    server: Option<Server>,
    address: SocketAddr,
    upgrades: Arc<Mutex<Vec<Upgrade>>>,
}

struct Plan {
    workers: usize,
    limits: Limits,
    token: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self { workers: 4, limits: Limits::default(), token: false }
    }
}

impl Plan {
    fn start(self) -> House {
        let dir = tempfile::tempdir().unwrap();
        let play = Arc::new(Play::default());
        let exchanges = Exchanges::new().unwrap();
        let socket = dir.path().join("http.sock");
        let config = ServerConfig { socket: socket.clone(), workers: self.workers, waiting: self.limits.waiting_max };
        let server = server::start(&config, play.clone(), exchanges.clone()).unwrap();
        let upgrades = Arc::new(Mutex::new(Vec::new()));
        let taken = upgrades.clone();
        let config = GateConfig {
            listen: "127.0.0.1:0".parse().unwrap(),
            chat_socket: Some(dir.path().join("chat.sock")),
            http_socket: socket,
            agents: 3,
            state_dir: dir.path().to_owned(),
            public_url: None,
            token: self.token.then(|| Token::parse(TOKEN).unwrap()),
            workers: self.workers,
            limits: self.limits,
            exchanges,
        };
        let gate = gate::start(config, Arc::new(Calm), Arc::new(move |u| taken.lock().unwrap().push(u))).unwrap();
        let address = gate.address();
        House { dir, play, gate: Some(gate), server: Some(server), address, upgrades }
    }
}

impl House {
    fn new() -> Self {
        Plan::default().start()
    }

    fn connect(&self) -> Wire<TcpStream> {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Wire { stream, host: self.address.to_string(), rest: Vec::new() }
    }

    fn metric(&self, line: &str) -> u64 {
        let page = self.connect().get("/metrics").text();
        let found = page.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("{line} not in\n{page}"))
    }

    fn wait_for(&self, what: &str, mut done: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < until, "{what} never happened\n{}", beebox_chatd::dump::threads_page());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.play.latch.open();
        let ended = self.gate.take().is_none_or(|g| g.shutdown(Duration::from_secs(1)));
        let workers = self.server.take().is_none_or(|s| s.shutdown(Duration::from_secs(5)));
        if !std::thread::panicking() {
            assert!(ended && workers, "gate {ended} workers {workers}");
        }
    }
}

// ---- a client

struct Wire<S> {
    stream: S,
    host: String,
    rest: Vec<u8>,
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|l| {
            let (key, value) = l.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}

impl<S: Read + Write> Wire<S> {
    fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        self.stream.write_all(bytes.as_ref()).unwrap();
        self
    }

    fn get(&mut self, path: &str) -> Answer {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.host);
        self.send(request).answer()
    }

    fn post(&mut self, path: &str, body: &[u8]) -> Answer {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.host,
            body.len()
        );
        self.send(head).send(body).answer()
    }

    fn answer(&mut self) -> Answer {
        self.answer_to(false).expect("an answer, not the end")
    }

    /// The next answer; none when the connection ended before it.
    fn answer_to(&mut self, head_only: bool) -> Option<Answer> {
        let end = loop {
            if let Some(at) = self.rest.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.more() {
                assert!(self.rest.is_empty(), "half a head: {:?}", String::from_utf8_lossy(&self.rest));
                return None;
            }
        };
        let head = String::from_utf8(self.rest.drain(..end).collect()).unwrap();
        let status = head[9..12].parse().unwrap();
        let mut answer = Answer { status, head, body: Vec::new() };
        let length = answer.field("content-length").map_or(0, |l| l.parse().unwrap());
        if !head_only && status != 304 {
            while self.rest.len() < length {
                assert!(self.more(), "the body ended at {} of {length}", self.rest.len());
            }
            answer.body = self.rest.drain(..length).collect();
        }
        Some(answer)
    }

    fn more(&mut self) -> bool {
        let mut buffer = [0; 65536];
        match self.stream.read(&mut buffer) {
            Ok(0) => false,
            Ok(n) => {
                self.rest.extend_from_slice(&buffer[..n]);
                true
            }
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => false,
            Err(e) => panic!("nothing came for {PATIENCE:?}: {e}; so far {:?}", String::from_utf8_lossy(&self.rest)),
        }
    }

    fn is_closed(&mut self) -> bool {
        assert!(self.rest.is_empty(), "bytes behind the answer: {:?}", String::from_utf8_lossy(&self.rest));
        !self.more()
    }
}

#[test]
fn requests_of_every_kind_reach_their_worker_and_come_back() {
    let house = House::new();
    let mut wire = house.connect();
    assert_eq!(wire.get("/api/chat/status?session=a").text(), "status a");
    assert_eq!(wire.post("/api/chat/send", b"{}").text(), "2 248");
    assert_eq!(wire.get("/healthz").text(), "ok\n");
    assert_eq!(wire.get("/api/chat/status?session=gone").status, 410);
    let big = vec![7u8; 5_000_000];
    assert_eq!(wire.post("/api/chat/send", &big).text(), "5000000 35000000");
    assert_eq!(wire.get("/api/session-media/s/e/4").body.len(), 10_000_000);
    assert_eq!(wire.get("/api/chat/status?session=b").text(), "status b");
}

// ---- framing

/// What happens after the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Open,
    Closed,
}

/// Sends raw bytes (HOST stands for our address) and says the status (0 for none) and what became of the connection.
fn raw(house: &House, bytes: &[u8]) -> (u16, After) {
    let text = bytes_with_host(house, bytes);
    let mut wire = house.connect();
    wire.send(&text);
    let head_only = text.starts_with(b"HEAD");
    let Some(answer) = wire.answer_to(head_only) else {
        return (0, After::Closed);
    };
    if answer.field("connection") == Some("close") {
        assert!(wire.is_closed(), "said close and stayed: {}", answer.head);
        return (answer.status, After::Closed);
    }
    // Open is only what still serves.
    assert_eq!(wire.get("/healthz").text(), "ok\n", "after {}", answer.head);
    (answer.status, After::Open)
}

fn bytes_with_host(house: &House, bytes: &[u8]) -> Vec<u8> {
    let host = house.address.to_string();
    let mut out = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(4).position(|w| w == b"HOST") {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(host.as_bytes());
        rest = &rest[at + 4..];
    }
    out.extend_from_slice(rest);
    out
}

const JSON: &str = "Host: HOST\r\nContent-Type: application/json\r\n";

#[test]
fn raw_bytes_get_their_status_and_the_connection_lives_or_ends() {
    use After::{Closed, Open};
    let house = House::new();
    let get = |rest: &str| format!("GET /api/chat/status?session=a HTTP/1.1\r\nHost: HOST\r\n{rest}\r\n");
    let post = |rest: &str| format!("POST /api/chat/send HTTP/1.1\r\n{JSON}{rest}");
    let rows: Vec<(String, u16, After)> = vec![
        (get(""), 200, Open),
        (get("Connection: close\r\n"), 200, Closed),
        (get("Connection: keep-alive\r\nX-Odd: \u{e9}\r\n"), 200, Open),
        (format!("\r\n{}", get("")), 200, Open),
        ("HEAD /api/chat/status?session=a HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 200, Open),
        ("GET /api/chat/status?session=a HTTP/1.0\r\nHost: HOST\r\n\r\n".into(), 200, Closed),
        ("GET /api/chat/status?session=a HTTP/1.0\r\nHost: HOST\r\nConnection: keep-alive\r\n\r\n".into(), 200, Open),
        ("GET http://HOST/healthz HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 200, Open),
        ("GET http://evil.example/healthz HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Closed),
        ("GET http://evil.example/healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n".into(), 403, Open),
        // Heads that are none.
        ("\0".repeat(4) + "\r\n\r\n", 400, Closed),
        ("GET / HTTP/1.1\nHost: HOST\n\n".into(), 400, Closed),
        ("GET / HTTP/1.1\r\nHost: HOST\n\r\n".into(), 400, Closed),
        ("GET / HTTP/1.1\r\n\r\n".into(), 400, Closed),
        ("GET / HTTP/1.0\r\n\r\n".into(), 400, Closed),
        ("GET / HTTP/3.0\r\nHost: HOST\r\n\r\n".into(), 400, Closed),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(), 400, Closed),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n".into(), 400, Closed),
        ("GET /\u{e9} HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Closed),
        ("GET /a\0b HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Closed),
        (get("Host: HOST\r\n"), 400, Closed),
        (get("X : y\r\n"), 400, Closed),
        (get("X: y\r\n z\r\n"), 400, Closed),
        (get("X: y\0z\r\n"), 400, Closed),
        (get("Expect: tea\r\n"), 400, Closed),
        (get(&"X: y\r\n".repeat(100)), 431, Closed),
        (get(&format!("X: {}\r\n", "y".repeat(16 * 1024))), 431, Closed),
        (get(&format!("X: {}\r\n", "y".repeat(15 * 1024))), 200, Open),
        ("X".repeat(17 * 1024), 431, Closed),
        // Lengths.
        (post("Content-Length: 2\r\n\r\n{}"), 200, Open),
        (post("Content-Length: 0\r\n\r\n"), 200, Open),
        (post("\r\n"), 200, Open),
        (post("Content-Length: -1\r\n\r\n"), 400, Closed),
        (post("Content-Length: +5\r\n\r\n"), 400, Closed),
        (post("Content-Length: 0x10\r\n\r\n"), 400, Closed),
        (post("Content-Length: 2, 2\r\n\r\n{}"), 400, Closed),
        (post("Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}"), 400, Closed),
        (post("Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), 400, Closed),
        (post("Content-Length: 1099511627776\r\n\r\n"), 413, Closed),
        (post("Content-Length: 1125899906842624\r\n\r\n"), 413, Closed),
        (post("Content-Length: 18446744073709551615\r\n\r\n"), 413, Closed),
        (post("Content-Length: 18446744073709551616\r\n\r\n"), 413, Closed),
        (post("Content-Length: 40000000\r\n\r\n"), 413, Closed),
        (get("Content-Length: 5\r\n") + "hello", 413, Closed),
        // Chunks.
        (post("Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"), 200, Open),
        (post("Transfer-Encoding: chunked\r\n\r\n1;x=y\r\n{\r\n1\r\n}\r\n0\r\nT: u\r\n\r\n"), 200, Open),
        (post("Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n"), 400, Closed),
        (post("Transfer-Encoding: chunked\r\n\r\nzz\r\n"), 400, Closed),
        (post("Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"), 413, Closed),
        (post("Transfer-Encoding: xchunked\r\n\r\n"), 501, Closed),
        (post("Transfer-Encoding: gzip, chunked\r\n\r\n"), 501, Closed),
        (get("Transfer-Encoding: chunked\r\n") + "0\r\n\r\n", 413, Closed),
        // Who, where, how.
        ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n".into(), 403, Open),
        ("POST /api/chat/send HTTP/1.1\r\nHost: HOST\r\nContent-Length: 2\r\n\r\n{}".into(), 415, Closed),
        ("POST /api/chat/stop HTTP/1.1\r\nHost: HOST\r\nContent-Type: text/plain\r\n\r\n".into(), 415, Open),
        ("GET /nowhere HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 404, Open),
        ("GET /.probe HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 404, Open),
        ("DELETE /api/chat/send HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 405, Open),
        ("OPTIONS * HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Open),
        ("CONNECT HOST HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Closed),
        ("GET /api/session-media/%00/e/0 HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Open),
        ("GET /api/session-media/s/../0 HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Open),
        ("GET /api/session-media/s/a%2fb/0 HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 400, Open),
        ("GET /api/events HTTP/1.1\r\nHost: HOST\r\n\r\n".into(), 426, Open),
    ];
    for (bytes, status, after) in rows {
        let shown: String = bytes.chars().take(200).collect();
        assert_eq!(raw(&house, bytes.as_bytes()), (status, after), "{shown:?}");
    }
}

#[test]
fn every_route_class_refuses_the_same_bad_framing() {
    let house = House::new();
    for line in [
        "POST /api/chat/send",
        "GET /api/chat/history?session=a",
        "GET /api/chat/sessions",
        "POST /api/chat/stop",
        "GET /api/chat/pending/m/0",
        "GET /api/chat/turns/t?wait=5",
        "GET /api/session-media/s/e/0",
        "POST /api/threads/send",
        "GET /api/events",
        "GET /api/debug/threads",
        "GET /healthz",
        "GET /metrics",
        "GET /login",
        "POST /login",
        "GET /",
    ] {
        let with = |fields: &str| format!("{line} HTTP/1.1\r\n{JSON}{fields}\r\n");
        for (fields, status) in [
            ("Content-Length: abc\r\n", 400),
            ("Content-Length: 1\r\nContent-Length: 1\r\n", 400),
            ("Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", 400),
            ("Content-Length: 1152921504606846976\r\n", 413),
            ("Transfer-Encoding: identity\r\n", 501),
            ("Origin: http://evil.example\r\nContent-Length: 5\r\n", 403),
            ("Origin: null\r\nContent-Length: 5\r\n", 403),
        ] {
            assert_eq!(raw(&house, with(fields).as_bytes()), (status, After::Closed), "{line} {fields:?}");
        }
    }
    assert_eq!(house.play.answered.load(Ordering::SeqCst), 0);
}

#[test]
fn smuggled_requests_are_never_executed() {
    let house = House::new();
    let hidden = format!("POST /api/chat/send HTTP/1.1\r\n{JSON}Content-Length: 2\r\n\r\n{{}}");
    let n = hidden.len() + 100;
    for carrier in [
        format!("POST /api/chat/stop HTTP/1.1\r\n{JSON}Content-Length: 0\r\nContent-Length: {n}\r\n\r\n"),
        format!(
            "POST /api/chat/stop HTTP/1.1\r\n{JSON}Content-Length: {n}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        format!("POST /api/chat/stop HTTP/1.1\r\n{JSON}Content-Length: abc\r\n\r\n"),
        format!("POST /api/chat/stop HTTP/1.1\r\n{JSON}Transfer-Encoding:\tchunked, identity\r\n\r\n0\r\n\r\n"),
        format!("POST /api/chat/stop HTTP/1.1\r\n{JSON}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
        format!("POST /api/chat/stop HTTP/1.1\r\n{JSON}X: y\nContent-Length: 0\r\n\r\n"),
        format!("POST /api/chat/stop HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n0\n\n"),
        format!("POST /api/chat/stop HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n"),
        format!(
            "POST /api/chat/stop HTTP/1.1\r\nHost: HOST\r\nContent-Type: text/plain\r\nContent-Length: {n}\r\n\r\n"
        ),
        "GET /healthz HTTP/1.1\r\nHost: HOST\r\nContent-Length: 7\r\n\r\n".into(),
        "GET /nowhere HTTP/1.1\r\nHost: HOST\r\nContent-Length: 7\r\n\r\n".into(),
        "GET / HTTP/1.1\r\nHost: HOST\r\nHost: HOST\r\n\r\n".into(),
        "GET /%0d%0aX:%20y HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: x\r\n\r\n".into(),
    ] {
        let bytes = bytes_with_host(&house, format!("{carrier}{hidden}").as_bytes());
        let mut wire = house.connect();
        wire.send(&bytes);
        let first = wire.answer();
        assert!(first.status >= 400, "{carrier:?}: {}", first.head);
        assert!(wire.is_closed(), "{carrier:?}");
        assert_eq!(house.play.sends.load(Ordering::SeqCst), 0, "{carrier:?}");
    }
    // The canary does count what is really sent.
    assert_eq!(house.connect().post("/api/chat/send", b"{}").status, 200);
    assert_eq!(house.play.sends.load(Ordering::SeqCst), 1);
}

#[test]
fn pages_of_other_origins_and_rebound_names_get_nothing() {
    let house = House::new();
    let port = house.address.port();
    for host in [
        "evil.example".to_owned(),
        format!("localhost.evil.example:{port}"),
        format!("127.0.0.1.nip.io:{port}"),
        format!("127.0.0.1:{}", port ^ 1),
        "127.0.0.1".to_owned(),
        format!("0.0.0.0:{port}"),
        format!("[::]:{port}"),
    ] {
        for target in ["/", "/healthz", "/api/chat/sessions", "/api/events", "/metrics"] {
            let answer = house.connect().send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n")).answer();
            assert_eq!(answer.status, 403, "{host} {target}");
            assert!(answer.text().contains("forbidden_host"));
        }
    }
    for origin in ["null", "http://evil.example", "https://127.0.0.1", "file://"] {
        for upgrade in [
            "",
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        ] {
            let head = format!("GET /api/events HTTP/1.1\r\nHost: HOST\r\nOrigin: {origin}\r\n{upgrade}\r\n");
            assert_eq!(raw(&house, head.as_bytes()), (403, After::Open), "{origin} {upgrade}");
        }
    }
    for good in [format!("http://{}", house.address), format!("http://localhost:{port}")] {
        let head =
            format!("GET /api/chat/status?session=a HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: {good}\r\n\r\n");
        let answer = house.connect().send(head).answer();
        assert_eq!(answer.status, 200, "{good}");
        assert_eq!(answer.field("access-control-allow-origin"), None);
    }
    assert!(house.upgrades.lock().unwrap().is_empty());
}

#[test]
fn pipelined_requests_are_answered_in_order_one_at_a_time() {
    let house = House::new();
    let mut wire = house.connect();
    let host = house.address;
    let mut all = String::new();
    for n in 0..50 {
        all += &match n % 3 {
            0 => format!("GET /api/chat/status?session=n{n} HTTP/1.1\r\nHost: {host}\r\n\r\n"),
            1 => format!("GET /healthz?{n} HTTP/1.1\r\nHost: {host}\r\n\r\n"),
            _ => format!(
                "POST /api/chat/send HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n{n:x}\r\n{}\r\n0\r\n\r\n",
                "1".repeat(n)
            ),
        };
    }
    wire.send(&all);
    for n in 0..50 {
        let expected = match n % 3 {
            0 => format!("status n{n}"),
            1 => "ok\n".to_owned(),
            _ => format!("{n} {}", n * 49),
        };
        assert_eq!(wire.answer().text(), expected);
    }
    assert_eq!(wire.get("/healthz").text(), "ok\n");
}

#[test]
fn requests_read_the_same_however_the_bytes_are_cut() {
    let house = House::new();
    let text = bytes_with_host(
        &house,
        format!(
            "GET /api/chat/status?session=a HTTP/1.1\r\nHost: HOST\r\n\r\nPOST /api/chat/send HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n0\r\nT: u\r\n\r\nPOST /api/chat/send HTTP/1.1\r\n{JSON}Content-Length: 4\r\n\r\nabcdGET /healthz HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n"
        )
        .as_bytes(),
    );
    let expected = ["status a", "3 294", "4 394", "ok\n"];
    let check = |cuts: &[usize]| {
        let mut wire = house.connect();
        wire.stream.set_nodelay(true).unwrap();
        let mut from = 0;
        for cut in cuts.iter().copied().chain([text.len()]) {
            wire.send(&text[from..cut]);
            from = cut;
            // Lets the piece arrive alone, most of the time.
            std::thread::yield_now();
        }
        for text in expected {
            assert_eq!(wire.answer().text(), text, "{cuts:?}");
        }
        assert!(wire.is_closed());
    };
    for cut in 1..text.len() {
        check(&[cut]);
    }
    check(&(1..text.len()).collect::<Vec<_>>());
    use proptest::prelude::*;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let cuts = proptest::collection::btree_set(1..text.len(), 0..20);
    runner
        .run(&cuts, |cuts| {
            check(&cuts.into_iter().collect::<Vec<_>>());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_client_that_asks_first_is_told_to_go_on_or_not_to() {
    let house = House::new();
    let mut wire = house.connect();
    let head = |n: u64| {
        format!(
            "POST /api/chat/send HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: {n}\r\n\r\n",
            house.address
        )
    };
    assert_eq!(wire.send(head(3)).answer().status, 100);
    assert_eq!(wire.send("abc").answer().text(), "3 294");
    // With the body right behind the head nobody needs to be told.
    assert_eq!(wire.send(head(3) + "abc").answer().text(), "3 294");
    assert_eq!(wire.send(head(1 << 40)).answer().status, 413);
    assert!(wire.is_closed());
}

// ---- time

fn hurried() -> Limits {
    Limits {
        head_time: Duration::from_millis(300),
        body_grace: Duration::from_millis(300),
        idle_time: Duration::from_millis(500),
        reader_time: Duration::from_millis(700),
        reader_stall: Duration::from_millis(200),
        queue_time: Duration::from_secs(10),
        ..Limits::default()
    }
}

#[test]
fn slow_heads_and_bodies_end_with_408_and_idle_clients_without_a_word() {
    let house = Plan { limits: hurried(), ..Plan::default() }.start();
    let mut fast = house.connect();
    let mut head = house.connect();
    let mut body = house.connect();
    let mut chunks = house.connect();
    let mut idle = house.connect();
    let mut used = house.connect();
    assert_eq!(used.get("/healthz").status, 200);
    head.send("GET / HTTP/1.1\r\nX-");
    body.send(bytes_with_host(
        &house,
        format!("POST /api/chat/send HTTP/1.1\r\n{JSON}Content-Length: 50\r\n\r\nabc").as_bytes(),
    ));
    chunks.send(bytes_with_host(
        &house,
        format!("POST /api/chat/send HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n5\r\nab").as_bytes(),
    ));
    for (what, wire) in [("head", &mut head), ("body", &mut body), ("chunks", &mut chunks)] {
        // A trickle does not buy time.
        for _ in 0..3 {
            let _ = wire.stream.write_all(b"a");
            assert_eq!(fast.get("/api/chat/status?session=a").status, 200);
            std::thread::sleep(Duration::from_millis(50));
        }
        let answer = wire.answer();
        assert_eq!((answer.status, answer.field("connection")), (408, Some("close")), "{what}");
        assert!(wire.is_closed(), "{what}");
    }
    assert!(idle.is_closed());
    assert!(used.is_closed());
}

#[test]
fn a_body_that_keeps_its_rate_may_take_longer_than_the_grace() {
    let limits = Limits { body_grace: Duration::from_millis(200), body_rate_min: 1000, ..Limits::default() };
    let house = Plan { limits, ..Plan::default() }.start();
    let mut wire = house.connect();
    wire.send(bytes_with_host(
        &house,
        format!("POST /api/chat/send HTTP/1.1\r\n{JSON}Content-Length: 100000\r\n\r\n").as_bytes(),
    ));
    for _ in 0..10 {
        wire.send([b'a'; 10_000]);
        std::thread::sleep(Duration::from_millis(60));
    }
    assert_eq!(wire.answer().text(), "100000 9700000");
}

#[test]
fn a_reader_that_takes_nothing_is_closed_and_its_file_and_slot_are_free() {
    let house = Plan { workers: 1, limits: hurried(), ..Plan::default() }.start();
    let mut stuck = house.connect();
    stuck.send(format!("GET /api/session-media/s/e/4 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    house.wait_for("the answer", || house.metric("beebox_http_connections{state=\"served\"}") == 1);
    assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
    house.wait_for("the end", || house.metric("beebox_http_left_total") == 1);
    house.wait_for("free", || in_flight(&house) == 0 && house.metric("beebox_http_spool_bytes") == 0);
}

#[test]
fn a_slow_reader_gives_its_worker_back_when_others_wait_and_still_gets_everything() {
    let house = Plan { workers: 1, ..Plan::default() }.start();
    let mut slow = house.connect();
    slow.send(format!("GET /api/session-media/s/e/4 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    assert!(slow.more());
    // The one worker is held by the slow reader until the gate moves the rest of its answer to a file.
    assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
    house.wait_for("the spill", || house.metric("beebox_http_spilled_total") == 1);
    let answer = slow.answer();
    assert_eq!(answer.body.len(), 10_000_000);
    assert!(answer.body.iter().all(|b| *b == b'x'));
    assert_eq!(slow.get("/api/chat/status?session=b").text(), "status b");
    house.wait_for("an empty spool", || house.metric("beebox_http_spool_bytes") == 0);
}

#[test]
fn a_slow_reader_whose_answer_has_no_room_in_the_spool_is_sent_away_before_a_byte_of_it_is_written() {
    let limits = Limits { spool_answers_max: 5_000_000, ..Limits::default() };
    let house = Plan { workers: 1, limits, ..Plan::default() }.start();
    let mut slow = house.connect();
    slow.send(format!("GET /api/session-media/s/e/4 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    assert!(slow.more());
    assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
    house.wait_for("the end", || house.metric("beebox_http_left_total") == 1);
    assert_eq!((house.metric("beebox_http_spilled_total"), house.metric("beebox_http_spool_bytes")), (0, 0));
    while slow.more() {}
    assert!(slow.rest.len() < 10_000_000);
}

#[test]
fn a_route_past_its_deadline_is_504_and_its_worker_is_reported_until_it_is_free() {
    let limits = Limits { answer_time: Duration::from_millis(300), ..Limits::default() };
    let house = Plan { workers: 2, limits, ..Plan::default() }.start();
    let mut wire = house.connect();
    let answer = wire.get("/api/chat/status?session=wait");
    assert_eq!((answer.status, answer.text().contains("\"timeout\"")), (504, true));
    assert!(wire.is_closed());
    assert_eq!(house.metric("beebox_http_overdue_workers"), 1);
    assert_eq!(house.connect().get("/api/chat/status?session=a").status, 200);
    house.play.latch.open();
    house.wait_for("a free worker", || house.metric("beebox_http_overdue_workers") == 0);
    assert_eq!(house.metric("beebox_http_pool_failures_total"), 0);
}

// ---- load

#[test]
fn connections_opened_together_before_any_speaks_are_all_answered() {
    let burst = |house: &House, n: usize| {
        let mut wires: Vec<_> = (0..n).map(|_| house.connect()).collect();
        for wire in &mut wires {
            wire.send(format!("GET /api/chat/status?session=a HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
        }
        for wire in &mut wires {
            assert_eq!(wire.answer().text(), "status a", "of {n}");
        }
    };
    let rested = House::new();
    burst(&rested, 3);
    let quiet_since = Instant::now();
    for n in [5, 16, 64] {
        burst(&House::new(), n);
    }
    // tiny_http ends idle threads after 5 s, and counts them wrongly afterwards.
    std::thread::sleep(Duration::from_secs(10).saturating_sub(quiet_since.elapsed()));
    for n in [5, 16, 64] {
        burst(&rested, n);
    }
}

#[test]
fn many_readers_that_take_nothing_hold_up_neither_short_work_nor_other_readers() {
    let house = Plan { workers: 4, ..Plan::default() }.start();
    let mut stuck: Vec<_> = (0..40).map(|_| house.connect()).collect();
    for wire in &mut stuck {
        wire.send(format!("GET /api/session-media/s/e/4 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    }
    for _ in 0..100 {
        assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
    }
    assert_eq!(house.connect().get("/api/session-media/s/e/4").body.len(), 10_000_000);
}

#[test]
fn waiting_requests_ride_their_own_lane_and_hold_up_nobody() {
    let limits = Limits { waiting_max: 3, ..Limits::default() };
    let house = Plan { workers: 2, limits, ..Plan::default() }.start();
    let mut waiting: Vec<_> = (0..6).map(|_| house.connect()).collect();
    for wire in &mut waiting {
        wire.send(format!("GET /api/chat/turns/t?wait=5000 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    }
    house.wait_for("three waiters", || house.play.latch.waiting.load(Ordering::SeqCst) == 3);
    house.wait_for("a queue", || house.metric("beebox_http_queue{lane=\"wait\"}") == 3);
    for _ in 0..20 {
        assert_eq!(house.connect().get("/api/chat/status?session=a").status, 200);
    }
    assert_eq!(house.connect().get("/api/chat/turns/t").text(), "turn t");
    house.play.latch.open();
    for wire in &mut waiting {
        assert_eq!(wire.answer().text(), "turn t");
    }
}

#[test]
fn with_every_worker_busy_health_and_numbers_answer_and_the_queue_is_bounded() {
    let limits = Limits { queue_requests_max: 2, queue_time: Duration::from_secs(1), ..Limits::default() };
    let house = Plan { workers: 2, limits, ..Plan::default() }.start();
    let mut busy: Vec<_> = (0..2).map(|_| house.connect()).collect();
    for wire in &mut busy {
        wire.send(format!("GET /api/chat/status?session=wait HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    }
    house.wait_for("two busy workers", || house.play.latch.waiting.load(Ordering::SeqCst) == 2);
    let mut queued: Vec<_> = (0..2).map(|_| house.connect()).collect();
    for wire in &mut queued {
        wire.send(format!("GET /api/chat/status?session=q HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    }
    house.wait_for("a queue", || house.metric("beebox_http_queue{lane=\"work\"}") == 2);
    let mut refused = house.connect();
    let answer = refused.get("/api/chat/status?session=r");
    assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")));
    for path in ["/healthz", "/readyz", "/metrics", "/api/debug/threads"] {
        assert_eq!(refused.get(path).status, 200, "{path}");
    }
    assert!(refused.get("/api/debug/threads").text().contains("http-01"));
    assert!(refused.get("/metrics").text().contains("other_room 1"));
    for wire in &mut queued {
        let answer = wire.answer();
        assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")));
    }
    house.play.latch.open();
    for wire in &mut busy {
        assert_eq!(wire.answer().text(), "waited");
    }
    assert_eq!(queued[0].get("/api/chat/status?session=a").text(), "status a");
}

#[test]
fn unread_bodies_and_a_stalled_stream_with_requests_behind_it_starve_nobody() {
    let house = Plan { workers: 4, ..Plan::default() }.start();
    let head = bytes_with_host(
        &house,
        format!("POST /api/chat/send HTTP/1.1\r\n{JSON}Content-Length: 3000000\r\n\r\n").as_bytes(),
    );
    let mut unread: Vec<_> = (0..8).map(|_| house.connect()).collect();
    for wire in &mut unread {
        wire.send(&head).send([b'a'; 100_000]);
    }
    let mut stalled = house.connect();
    let media = format!("GET /api/session-media/s/e/5 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address);
    let status = format!("GET /api/chat/status?session=behind HTTP/1.1\r\nHost: {}\r\n\r\n", house.address);
    stalled.send(media).send(status.repeat(20));
    let mut good = house.connect();
    for _ in 0..200 {
        assert_eq!(good.get("/api/chat/status?session=a").text(), "status a");
    }
    assert_eq!(house.play.sends.load(Ordering::SeqCst), 0);
    assert_eq!(house.metric("beebox_http_spool_bytes"), 8 * 100_000);
    drop(unread);
    house.wait_for("an empty spool", || house.metric("beebox_http_spool_bytes") == 0);
    assert_eq!(stalled.answer().body.len(), 100_000_000);
    for _ in 0..20 {
        assert_eq!(stalled.answer().text(), "status behind");
    }
}

#[test]
fn connections_beyond_the_caps_are_refused_politely() {
    let limits =
        Limits { connections_max: 6, connections_per_address_max: 4, count_loopback: true, ..Limits::default() };
    let house = Plan { limits, ..Plan::default() }.start();
    let mut kept: Vec<_> = (0..4).map(|_| house.connect()).collect();
    for wire in &mut kept {
        assert_eq!(wire.get("/healthz").status, 200);
    }
    for _ in 0..10 {
        let mut refused = house.connect();
        let answer = refused.answer();
        assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")));
        assert!(refused.is_closed());
    }
    drop(kept.pop());
    house.wait_for("a free place", || {
        let mut wire = house.connect();
        wire.send(format!("GET /healthz HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
        wire.answer_to(false).is_some_and(|a| a.status == 200)
    });
}

#[test]
fn a_client_that_leaves_the_queue_frees_its_place_and_is_never_executed() {
    let house = Plan { workers: 1, ..Plan::default() }.start();
    let mut busy = house.connect();
    busy.send(format!("GET /api/chat/status?session=wait HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    house.wait_for("a busy worker", || house.play.latch.waiting.load(Ordering::SeqCst) == 1);
    let mut leaver = house.connect();
    leaver.send(bytes_with_host(
        &house,
        format!("POST /api/chat/send HTTP/1.1\r\n{JSON}Content-Length: 2\r\n\r\n{{}}").as_bytes(),
    ));
    house.wait_for("a queue", || house.metric("beebox_http_queue{lane=\"work\"}") == 1);
    drop(leaver);
    house.wait_for("no queue", || house.metric("beebox_http_queue{lane=\"work\"}") == 0);
    assert_eq!(house.metric("beebox_http_body_bytes"), 0);
    house.play.latch.open();
    assert_eq!(busy.answer().text(), "waited");
    assert_eq!(busy.get("/api/chat/status?session=a").status, 200);
    assert_eq!(house.play.sends.load(Ordering::SeqCst), 0);
}

fn in_flight(house: &House) -> u64 {
    ["work", "wait", "bulk"].iter().map(|lane| house.metric(&format!("beebox_http_in_flight{{lane=\"{lane}\"}}"))).sum()
}

#[test]
fn a_worker_whose_client_left_stops_at_once_and_goes_on_with_the_next() {
    let house = Plan { workers: 1, ..Plan::default() }.start();
    for index in [0, 6] {
        for _ in 0..5 {
            let mut wire = house.connect();
            wire.send(format!("GET /api/session-media/s/e/{index} HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
            if index == 6 {
                assert!(wire.more());
            }
        }
    }
    assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
    house.wait_for("free", || in_flight(&house) == 0);
    let read = house.play.read.load(Ordering::SeqCst);
    assert!(read < 100_000_000, "{read} bytes of answers that nobody wanted, of a billion each");
    assert_eq!(house.metric("beebox_http_pool_failures_total"), 0);
}

// ---- isolation

fn http_threads() -> usize {
    beebox_chatd::threads::table().0.iter().filter(|r| r.name.as_str().starts_with("http-0")).count()
}

#[test]
fn a_panic_is_a_500_and_its_worker_lives() {
    let house = Plan { workers: 2, limits: Limits { waiting_max: 1, ..Limits::default() }, ..Plan::default() }.start();
    let mut wire = house.connect();
    for _ in 0..50 {
        let answer = wire.get("/api/chat/status?session=panic");
        assert_eq!((answer.status, answer.text().contains("\"internal\"")), (500, true));
    }
    // All at once: every worker is still there.
    let mut all: Vec<_> = (0..2).map(|_| house.connect()).collect();
    for wire in &mut all {
        wire.send(format!("GET /api/chat/status?session=wait HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    }
    house.wait_for("both workers", || house.play.latch.waiting.load(Ordering::SeqCst) == 2);
    assert!(http_threads() >= 3);
    house.play.latch.open();
    for wire in &mut all {
        assert_eq!(wire.answer().status, 200);
    }
}

#[test]
fn a_body_that_ends_early_closes_the_client_and_never_shifts_the_next_answer() {
    let house = Plan { workers: 2, ..Plan::default() }.start();
    // Less than a piece: nothing of it had left the worker yet, there is still room for the truth.
    let answer = house.connect().get("/api/session-media/s/short/0");
    assert_eq!((answer.status, answer.field("connection")), (500, Some("close")));
    let mut wire = house.connect();
    wire.send(format!("GET /api/session-media/s/short/3 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    let mut bytes = Vec::new();
    wire.stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("Content-Length: 1000000"), "{head}");
    assert!(body.len() <= 500_000 && body.bytes().all(|b| b == b'x'), "{}", body.len());
    for _ in 0..20 {
        assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
    }
    assert_eq!(house.metric("beebox_http_answers_torn_total"), 2);
    assert_eq!(house.metric("beebox_http_pool_failures_total"), 0);
}

#[test]
fn head_requests_get_a_head_and_ranges_and_etags_reach_the_handler() {
    let house = House::new();
    let mut wire = house.connect();
    wire.send(format!("HEAD /api/session-media/s/e/0 HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    let answer = wire.answer_to(true).unwrap();
    assert_eq!((answer.status, answer.field("content-length")), (200, Some("1000")));
    wire.send(format!("HEAD /healthz HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    assert_eq!(wire.answer_to(true).unwrap().field("content-length"), Some("3"));
    wire.send(format!(
        "GET /api/session-media/s/e/0 HTTP/1.1\r\nHost: {}\r\nIf-None-Match: \"x\"\r\n\r\n",
        house.address
    ));
    assert_eq!(wire.answer().field("etag"), Some(r#""\"x\"""#));
    let answer = wire.get("/api/chat/sessions");
    assert!(answer.field("date").is_some_and(|d| d.ends_with(" GMT")), "{}", answer.head);
    assert_eq!(answer.body.len(), 3201);
}

// ---- who may talk

#[test]
fn with_a_token_every_route_but_health_needs_it_and_a_login_code_works_once() {
    let house = Plan { token: true, ..Plan::default() }.start();
    let with = |fields: &str, line: &str| {
        let text =
            format!("{line} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n{fields}\r\n", house.address);
        house.connect().send(text).answer()
    };
    for line in [
        "GET /",
        "GET /readyz",
        "GET /metrics",
        "GET /api/chat/sessions",
        "GET /nowhere",
        "POST /api/chat/send",
        "GET /api/events",
        "GET /api/debug/threads",
    ] {
        let answer = with("", line);
        assert_eq!((answer.status, answer.field("www-authenticate")), (401, Some("Bearer")), "{line}");
        assert_eq!(with("Authorization: Bearer 0123456789abcdef0123456789abcdeX\r\n", line).status, 401, "{line}");
        assert_ne!(with(&format!("Authorization: Bearer {TOKEN}\r\n"), line).status, 401, "{line}");
    }
    assert_eq!(with("", "GET /healthz").status, 200);
    assert_eq!(with("", "GET /login").status, 200);
    assert_eq!(with("", &format!("GET /api/chat/sessions?token={TOKEN}")).status, 401);

    let mut local = house.chat();
    let link = local.post("/login", b"{}").text();
    let code = link.split_once("#").unwrap().1.trim_end_matches("\"}").to_owned();
    let body = format!("{{\"code\":\"{code}\"}}");
    let answer = house.connect().post("/login", body.as_bytes());
    let cookie = answer.field("set-cookie").unwrap().to_owned();
    for part in ["HttpOnly", "SameSite=Strict", "Path=/"] {
        assert!(cookie.contains(part), "{cookie}");
    }
    let cookie = cookie.split(';').next().unwrap();
    assert_eq!(with(&format!("Cookie: a=b; {cookie}\r\n"), "GET /api/chat/sessions").status, 200);
    let again = house.connect().post("/login", body.as_bytes());
    assert_eq!((again.status, again.field("set-cookie")), (401, None));
    let link = house.gate.as_ref().unwrap().login_link();
    let code = link.split_once("#").unwrap().1;
    assert_eq!(house.connect().post("/login", format!("{{\"code\":\"{code}\"}}").as_bytes()).status, 200);
    assert_eq!(house.connect().post("/login", b"{}").status, 400);
}

impl House {
    fn chat(&self) -> Wire<UnixStream> {
        let stream = UnixStream::connect(self.dir.path().join("chat.sock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Wire { stream, host: "localhost".to_owned(), rest: Vec::new() }
    }
}

#[test]
fn chat_sock_is_private_and_vetted_like_the_port() {
    use std::os::unix::fs::PermissionsExt;
    let house = Plan { token: true, ..Plan::default() }.start();
    for name in ["chat.sock", "http.sock"] {
        let mode = std::fs::metadata(house.dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    assert_eq!(std::fs::metadata(house.dir.path()).unwrap().permissions().mode() & 0o777, 0o700);
    let mut wire = house.chat();
    assert_eq!(wire.get("/api/chat/status?session=a").text(), "status a");
    assert_eq!(wire.send("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").answer().status, 403);
    assert_eq!(
        wire.send("GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n").answer().status,
        403
    );
    assert_eq!(wire.send("POST /api/chat/stop HTTP/1.1\r\nHost: localhost\r\n\r\n").answer().status, 415);
    assert_eq!(wire.send("GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n").answer().status, 400);
    assert!(wire.is_closed());
}

#[test]
fn an_open_address_without_a_token_is_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = GateConfig {
        listen: "0.0.0.0:0".parse().unwrap(),
        chat_socket: None,
        http_socket: dir.path().join("http.sock"),
        agents: 3,
        state_dir: dir.path().to_owned(),
        public_url: None,
        token: None,
        workers: 1,
        limits: Limits::default(),
        exchanges: Exchanges::new().unwrap(),
    };
    let error = gate::start(config, Arc::new(Calm), Arc::new(|_| {})).map(|_| ()).unwrap_err();
    assert!(error.text().contains("--token-file"), "{error}");
}

#[test]
fn event_streams_are_vetted_and_handed_over_with_what_came_behind_the_head() {
    let house = House::new();
    let ws = |version: &str, key: &str, query: &str| {
        format!(
            "GET /api/events{query} HTTP/1.1\r\nHost: HOST\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: {version}\r\nSec-WebSocket-Key: {key}\r\n\r\n"
        )
    };
    const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
    let sse = |query: &str, last: &str| {
        format!("GET /api/events{query} HTTP/1.1\r\nHost: HOST\r\nAccept: text/event-stream\r\n{last}\r\n")
    };
    for (head, status) in [
        (ws("12", KEY, ""), 426),
        (ws("13", "short", ""), 400),
        (ws("13", KEY, "?after=x"), 400),
        (ws("13", KEY, "?after="), 400),
        (ws("13", KEY, "?after=1&after=2"), 400),
        (sse("?after=-1", ""), 400),
        (sse("", "Last-Event-ID: x\r\n"), 400),
        (ws("13", KEY, "").replace("GET", "POST"), 405),
        (ws("13", KEY, "").replace("Upgrade: websocket", "Upgrade: h2c"), 426),
        (ws("13", KEY, "").replace("HTTP/1.1", "HTTP/1.0"), 400),
    ] {
        assert_eq!(raw(&house, head.as_bytes()).0, status, "{head:?}");
    }
    assert!(house.upgrades.lock().unwrap().is_empty());
    let behind = bytes_with_host(&house, (ws("13", KEY, "?after=e.7") + "frame").as_bytes());
    let mut socket = house.connect();
    socket.send(behind);
    house.wait_for("the socket", || house.upgrades.lock().unwrap().len() == 1);
    let mut stream = house.chat();
    stream.send(sse("?after=5", "Last-Event-ID: e.9\r\n").replace("HOST", "localhost"));
    house.wait_for("the stream", || house.upgrades.lock().unwrap().len() == 2);
    let taken = std::mem::take(&mut *house.upgrades.lock().unwrap());
    assert_eq!(taken[0].kind, UpgradeKind::WebSocket { key: KEY.to_owned() });
    assert_eq!((taken[0].cursor.as_deref(), taken[0].leftover.as_slice()), (Some("e.7"), &b"frame"[..]));
    assert_eq!((taken[1].kind.clone(), taken[1].cursor.as_deref()), (UpgradeKind::Sse, Some("e.9")));
    drop(taken);
    assert!(socket.is_closed());
}

// ---- the end, and the descriptors

#[test]
fn shutdown_finishes_what_is_in_flight_and_closes_the_rest() {
    let mut house = Plan { workers: 2, ..Plan::default() }.start();
    let mut busy = house.connect();
    let mut idle = house.connect();
    assert_eq!(idle.get("/healthz").status, 200);
    busy.send(format!("GET /api/chat/status?session=wait HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    house.wait_for("a busy worker", || house.play.latch.waiting.load(Ordering::SeqCst) == 1);
    let gate = house.gate.take().unwrap();
    let play = house.play.clone();
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| gate.shutdown(PATIENCE));
        assert!(idle.is_closed());
        assert!(TcpStream::connect(house.address).is_err());
        play.latch.open();
        let answer = busy.answer();
        assert_eq!((answer.text().as_str(), answer.field("connection")), ("waited", Some("close")));
        assert!(busy.is_closed());
        drop(busy);
        assert!(ending.join().unwrap());
    });
    assert!(!house.dir.path().join("chat.sock").exists());
}

#[test]
fn a_shutdown_with_a_stuck_worker_ends_at_its_limit() {
    let mut house = Plan { workers: 2, ..Plan::default() }.start();
    let mut busy = house.connect();
    busy.send(format!("GET /api/chat/status?session=wait HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    house.wait_for("a busy worker", || house.play.latch.waiting.load(Ordering::SeqCst) == 1);
    assert!(house.gate.take().unwrap().shutdown(Duration::from_millis(200)));
    assert!(busy.answer_to(false).is_none());
}

#[test]
fn running_out_of_descriptors_pauses_accepting_and_it_goes_on_by_itself() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "gate::child_without_descriptors", "--ignored", "--nocapture", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "lowers the limits of its process; run by the test above in a child"]
fn child_without_descriptors() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let house = Plan { workers: 2, ..Plan::default() }.start();
    let mut early = house.connect();
    assert_eq!(early.get("/api/chat/status?session=a").status, 200);
    // A few descriptors from here on; the clients of this process use them up.
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(used + 12), maximum: Some(used + 12) }).unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    let mut clients = Vec::new();
    let mut refused = 0;
    while Instant::now() < until {
        match TcpStream::connect(house.address) {
            Ok(stream) => clients.push(stream),
            Err(_) => refused += 1,
        }
        // The one that was in before is served all the time.
        assert_eq!(early.get("/api/chat/status?session=a").text(), "status a");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(refused > 0, "the descriptors never ran out");
    assert!(
        early
            .get("/metrics")
            .text()
            .lines()
            .any(|l| l.starts_with("beebox_http_accept_pauses_total ") && !l.ends_with(" 0"))
    );
    clients.clear();
    let mut served = 0;
    house.wait_for("service", || {
        served += u32::from(TcpStream::connect(house.address).is_ok());
        served >= 20
    });
    for _ in 0..20 {
        assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
    }
}

#[test]
fn a_box_under_a_long_path_is_served() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("x".repeat(120));
    std::fs::create_dir(&dir).unwrap();
    let exchanges = Exchanges::new().unwrap();
    let config = ServerConfig { socket: dir.join("http.sock"), workers: 1, waiting: 1 };
    let server = server::start(&config, Arc::new(Play::default()), exchanges.clone()).unwrap();
    let config = GateConfig {
        listen: "[::1]:0".parse().unwrap(),
        chat_socket: Some(dir.join("chat.sock")),
        http_socket: dir.join("http.sock"),
        agents: 3,
        state_dir: dir.clone(),
        public_url: None,
        token: None,
        workers: 1,
        limits: Limits::default(),
        exchanges,
    };
    let gate = gate::start(config, Arc::new(Calm), Arc::new(|_| {})).unwrap();
    let stream = TcpStream::connect(gate.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut wire = Wire { stream, host: gate.address().to_string(), rest: Vec::new() };
    assert_eq!(wire.get("/api/chat/status?session=a").text(), "status a");
    assert!(gate.shutdown(Duration::from_secs(1)));
    assert!(server.shutdown(Duration::from_secs(5)));
    assert!(!dir.join("http.sock").exists() && !dir.join("chat.sock").exists());
}

// ---- the gate before a pool that misbehaves

/// What a played pool does with a request.
#[derive(Clone)]
enum Act {
    /// Takes it up, gives these pieces one by one, and ends the answer.
    Pieces(Vec<Vec<u8>>),
    /// Takes it up, gives this, and falls.
    Fall(Vec<u8>),
    /// Closes the line, with the request not taken up.
    Close,
    /// Writes this to the line, with the request not taken up.
    Noise(&'static [u8]),
    /// Takes it up, closes the line, and answers well.
    CloseAndAnswer,
}

/// What the gate shares with a played pool, and what that saw.
struct Stage {
    exchanges: Arc<Exchanges>,
    /// Heads that came over the line.
    heads: Mutex<Vec<String>>,
    /// Bodies of requests that were taken up.
    taken: Mutex<Vec<Vec<u8>>>,
    acts: Mutex<std::collections::VecDeque<Act>>,
}

/// A gate before a pool that answers probes well and requests as told, in order; the last act stays.
struct Played {
    gate: Option<Gate>,
    _dir: tempfile::TempDir,
    stage: Arc<Stage>,
}

impl Played {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(dir.path().join("http.sock")).unwrap();
        let exchanges = Exchanges::new().unwrap();
        let stage = Arc::new(Stage {
            exchanges: exchanges.clone(),
            heads: Mutex::default(),
            taken: Mutex::default(),
            acts: Mutex::default(),
        });
        let played = stage.clone();
        std::thread::Builder::new().name("played-pool".into()).spawn_forever(move || {
            for stream in listener.incoming() {
                let stage = played.clone();
                let stream = stream.unwrap();
                std::thread::Builder::new().spawn_forever(move || play_pool(stream, &stage));
            }
        });
        let config = GateConfig {
            listen: "127.0.0.1:0".parse().unwrap(),
            chat_socket: None,
            http_socket: dir.path().join("http.sock"),
            agents: 3,
            state_dir: dir.path().to_owned(),
            public_url: None,
            token: None,
            workers: 8,
            limits: Limits::default(),
            exchanges,
        };
        let gate = gate::start(config, Arc::new(Calm), Arc::new(|_| {})).unwrap();
        Self { gate: Some(gate), _dir: dir, stage }
    }

    fn connect(&self) -> Wire<TcpStream> {
        let address = self.gate.as_ref().unwrap().address();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Wire { stream, host: address.to_string(), rest: Vec::new() }
    }

    fn wire(&self, acts: &[Act]) -> Wire<TcpStream> {
        *self.stage.acts.lock().unwrap() = acts.iter().cloned().collect();
        self.stage.heads.lock().unwrap().clear();
        self.stage.taken.lock().unwrap().clear();
        self.connect()
    }

    fn heads(&self) -> Vec<String> {
        self.stage.heads.lock().unwrap().clone()
    }

    fn taken(&self) -> Vec<Vec<u8>> {
        self.stage.taken.lock().unwrap().clone()
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        let _ = self.gate.take().is_none_or(|g| g.shutdown(Duration::from_millis(100)));
    }
}

/// Threads of a played peer: they end with their sockets.
trait SpawnForever {
    fn spawn_forever(self, body: impl FnOnce() + Send + 'static);
}

impl SpawnForever for std::thread::Builder {
    #[expect(clippy::disallowed_methods, reason = "the peer under a test, not the server")]
    fn spawn_forever(self, body: impl FnOnce() + Send + 'static) {
        self.spawn(body).unwrap();
    }
}

fn play_pool(mut stream: UnixStream, stage: &Stage) {
    let mut bytes = Vec::new();
    loop {
        let end = loop {
            if let Some(at) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            let mut piece = [0; 4096];
            match stream.read(&mut piece) {
                Ok(n @ 1..) => bytes.extend_from_slice(&piece[..n]),
                Ok(_) | Err(_) => return,
            }
        };
        let head = String::from_utf8(bytes.drain(..end).collect()).unwrap();
        if head.starts_with("GET /.probe ") {
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n");
            continue;
        }
        let number: u64 = head.lines().find_map(|l| l.strip_prefix("X: ")?.parse().ok()).expect("a number");
        stage.heads.lock().unwrap().push(head);
        let act = {
            let mut acts = stage.acts.lock().unwrap();
            if acts.len() > 1 { acts.pop_front() } else { acts.front().cloned() }
        };
        let take_up = || {
            let (body, answering) = stage.exchanges.listen().unwrap().take_up(number).expect("a request laid out");
            stage.taken.lock().unwrap().push(body.into_bytes().unwrap());
            answering.begin(200, GOOD.len() as u64);
            answering
        };
        match act.expect("an act") {
            Act::Pieces(pieces) => {
                let answering = take_up();
                for piece in pieces {
                    if !answering.give(&piece) {
                        break;
                    }
                    std::thread::yield_now();
                }
                answering.finish(Vec::new());
            }
            Act::Fall(bytes) => {
                let answering = take_up();
                let _ = bytes.is_empty() || answering.give(&bytes);
            }
            Act::Close => return,
            Act::Noise(bytes) => {
                let _ = stream.write_all(bytes);
                // The gate closes its end.
                while matches!(stream.read(&mut [0; 4096]), Ok(1..)) {}
                return;
            }
            Act::CloseAndAnswer => {
                let answering = take_up();
                drop(stream);
                answering.finish(GOOD.to_vec());
                return;
            }
        }
    }
}

const GOOD: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 10\r\n\r\n0123456789";

fn good() -> Act {
    Act::Pieces(vec![GOOD.to_vec()])
}

#[test]
fn an_answer_reads_the_same_however_its_worker_gives_it() {
    let played = Played::start();
    // A worker gives the head whole.
    let head = GOOD.len() - 10;
    let mut cuts: Vec<Vec<Vec<u8>>> =
        (head..GOOD.len()).map(|cut| vec![GOOD[..cut].to_vec(), GOOD[cut..].to_vec()]).collect();
    cuts.push(std::iter::once(GOOD[..head].to_vec()).chain(GOOD[head..].iter().map(|b| vec![*b])).collect());
    for pieces in cuts {
        let mut wire = played.wire(&[Act::Pieces(pieces.clone())]);
        for _ in 0..2 {
            assert_eq!(wire.get("/api/chat/sessions").text(), "0123456789", "{}", pieces[0].len());
        }
        // The head is rewritten for a connection that ends.
        let host = wire.host.clone();
        wire.send(format!("GET /api/chat/sessions HTTP/1.0\r\nHost: {host}\r\n\r\n"));
        let answer = wire.answer();
        assert_eq!((answer.text().as_str(), answer.field("connection")), ("0123456789", Some("close")));
        assert!(wire.is_closed());
    }
}

#[test]
fn a_worker_that_falls_costs_its_client_the_answer_and_nobody_else() {
    let played = Played::start();
    for (what, act, status) in [
        ("nothing", Act::Fall(Vec::new()), 500),
        ("half a body", Act::Fall(GOOD[..GOOD.len() - 1].to_vec()), 0),
        ("a head", Act::Fall(GOOD[..GOOD.len() - 10].to_vec()), 0),
    ] {
        let mut wire = played.wire(&[act, good()]);
        let host = wire.host.clone();
        wire.send(format!(
            "POST /api/chat/stop HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"
        ));
        let mut bytes = Vec::new();
        wire.stream.read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        if status == 500 {
            assert!(text.starts_with("HTTP/1.1 500 ") && text.contains("\"internal\""), "{what}: {text:?}");
        } else {
            let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
            assert!(text.is_empty() || text.starts_with("HTTP/1.1 200") && body.len() < 10, "{what}: {text:?}");
        }
        assert_eq!(played.taken().len(), 1, "{what}: never executed twice");
        let mut next = played.wire(&[good()]);
        assert_eq!(next.get("/api/chat/sessions").text(), "0123456789", "after {what}");
    }
}

#[test]
fn a_request_on_a_broken_line_is_taken_back_and_executed_exactly_once() {
    let played = Played::start();
    for (what, acts, heads) in [
        ("closed before a worker had it", vec![Act::Close, good()], 2),
        ("closed twice", vec![Act::Close, Act::Close, good()], 3),
        ("garbage", vec![Act::Noise(b"garbage"), good()], 2),
        ("an answer where none belongs", vec![Act::Noise(GOOD), good()], 2),
        ("closed while a worker had it", vec![Act::CloseAndAnswer], 1),
    ] {
        for post in [false, true] {
            let mut wire = played.wire(&acts);
            let answer = if post { wire.post("/api/chat/stop", b"{\"a\":1}") } else { wire.get("/api/chat/sessions") };
            assert_eq!((answer.status, answer.text().as_str()), (200, "0123456789"), "{what}");
            assert_eq!(played.heads().len(), heads, "{what}");
            let body: &[u8] = if post { b"{\"a\":1}" } else { b"" };
            assert_eq!(played.taken(), [body], "{what}: executed once, with its whole body");
        }
    }
}

#[test]
fn a_line_that_breaks_under_many_requests_loses_none_and_executes_none_twice() {
    const CLIENTS: usize = 16;
    const ROUNDS: u64 = 40;
    for seed in 0..ROUNDS {
        let played = Played::start();
        let mut random = seed * 2 + 1;
        let acts: Vec<Act> = (0..CLIENTS)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                match random >> 33 & 7 {
                    0 => Act::Close,
                    1 => Act::Noise(b"x"),
                    2 => Act::CloseAndAnswer,
                    _ => good(),
                }
            })
            .chain([good()])
            .collect();
        let mut wires: Vec<_> = std::iter::once(played.wire(&acts)).collect();
        wires.extend((1..CLIENTS).map(|_| played.connect()));
        for (at, wire) in wires.iter_mut().enumerate() {
            let (host, body) = (wire.host.clone(), format!("{{\"a\":{}}}", at + 10));
            wire.send(format!(
                "POST /api/chat/stop HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            ));
        }
        for wire in &mut wires {
            let answer = wire.answer();
            assert_eq!((answer.status, answer.text().as_str()), (200, "0123456789"), "seed {seed}");
        }
        let mut taken = played.taken();
        taken.sort();
        let each: Vec<_> = (0..CLIENTS).map(|at| format!("{{\"a\":{}}}", at + 10).into_bytes()).collect();
        assert_eq!(taken, each, "seed {seed}");
    }
}

#[test]
fn the_pool_sees_a_canonical_head_and_nothing_else_of_the_clients() {
    let played = Played::start();
    let mut wire = played.wire(&[good()]);
    let host = wire.host.clone();
    wire.send(format!(
        "GET http://{host}/api/session-media/s/e/0 HTTP/1.0\r\nHost: {host}\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nCookie: secret\r\nRange: bytes=0-9\r\nTE: chunked\r\nUpgrade: h2c\r\nX: 99\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n"
    ));
    assert_eq!(wire.answer().status, 200);
    wire.send(format!(
        "POST /api/chat/stop HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nRange: bytes=0-9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nX: 5\r\n\r\n"
    ));
    assert_eq!(wire.answer().status, 200);
    let heads: Vec<Vec<String>> =
        played.heads().iter().map(|head| head.lines().map(str::to_owned).filter(|l| !l.is_empty()).collect()).collect();
    assert_eq!(heads[0][..2], ["GET /api/session-media/s/e/0 HTTP/1.1", "Range: bytes=0-9"]);
    assert_eq!(heads[0].len(), 3, "{heads:?}");
    assert!(heads[0][2].starts_with("X: ") && heads[0][2] != "X: 99", "{heads:?}");
    assert_eq!(heads[1][0], "POST /api/chat/stop HTTP/1.1");
    assert_eq!(heads[1].len(), 2, "{heads:?}");
    assert_eq!(played.taken(), [b"".as_slice(), b"{}"]);
}

#[test]
fn stuck_workers_do_not_keep_the_others_from_working() {
    let house = Plan { workers: 6, ..Plan::default() }.start();
    let mut stuck: Vec<_> = (0..5).map(|_| house.connect()).collect();
    for wire in &mut stuck {
        wire.send(format!("GET /api/chat/status?session=wait HTTP/1.1\r\nHost: {}\r\n\r\n", house.address));
    }
    house.wait_for("five stuck workers", || house.play.latch.waiting.load(Ordering::SeqCst) == 5);
    for _ in 0..50 {
        assert_eq!(house.connect().get("/api/chat/status?session=a").text(), "status a");
        assert_eq!(house.connect().post("/api/chat/send", b"{}").text(), "2 248");
    }
    house.play.latch.open();
    for wire in &mut stuck {
        assert_eq!(wire.answer().text(), "waited");
    }
}
