//! The gate and the pool behind it, over real sockets, with a small handler of the test's own.
//! Every wait is bounded: a read that gets nothing for [`PATIENCE`] fails the test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use beebox_chatd::error::{Code, Error, Result};
use beebox_chatd::http::gate::notes::Notes;
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
        let (_open, out) = self
            .changed
            .wait_timeout_while(open, PATIENCE, |open| !*open)
            .unwrap();
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
}

/// A body that ends before it said it would.
struct Short(usize);

impl Read for Short {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.0.min(buffer.len());
        buffer[..n].fill(b'x');
        self.0 -= n;
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
                let reader = Box::new(Short(usize::try_from(given).unwrap()));
                let mut reply = Reply::empty(200);
                reply.headers.push((
                    "ETag",
                    format!("{:?}", incoming.if_none_match.unwrap_or_default()),
                ));
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
        Self {
            workers: 4,
            limits: Limits::default(),
            token: false,
        }
    }
}

impl Plan {
    fn start(self) -> House {
        let dir = tempfile::tempdir().unwrap();
        let play = Arc::new(Play::default());
        let notes = Notes::new().unwrap();
        let socket = dir.path().join("http.sock");
        let config = ServerConfig {
            socket: socket.clone(),
            workers: self.workers,
            waiting: self.limits.waiting_max,
        };
        let server = server::start(&config, play.clone(), notes.clone()).unwrap();
        let upgrades = Arc::new(Mutex::new(Vec::new()));
        let taken = upgrades.clone();
        let config = GateConfig {
            listen: "127.0.0.1:0".parse().unwrap(),
            chat_socket: Some(dir.path().join("chat.sock")),
            http_socket: socket,
            state_dir: dir.path().to_owned(),
            public_url: None,
            token: self.token.then(|| Token::parse(TOKEN).unwrap()),
            workers: self.workers,
            limits: self.limits,
            notes,
        };
        let gate = gate::start(
            config,
            Arc::new(Calm),
            Arc::new(move |u| taken.lock().unwrap().push(u)),
        )
        .unwrap();
        let address = gate.address();
        House {
            dir,
            play,
            gate: Some(gate),
            server: Some(server),
            address,
            upgrades,
        }
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
        Wire {
            stream,
            host: self.address.to_string(),
            rest: Vec::new(),
        }
    }

    fn metric(&self, line: &str) -> u64 {
        let page = self.connect().get("/metrics").text();
        let found = page
            .lines()
            .find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("{line} not in\n{page}"))
    }

    fn wait_for(&self, what: &str, mut done: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done() {
            assert!(
                Instant::now() < until,
                "{what} never happened\n{}",
                beebox_chatd::dump::threads_page()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.play.latch.open();
        let ended = self
            .gate
            .take()
            .is_none_or(|g| g.shutdown(Duration::from_secs(1)));
        let workers = self
            .server
            .take()
            .is_none_or(|s| s.shutdown(Duration::from_secs(5)));
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
                assert!(
                    self.rest.is_empty(),
                    "half a head: {:?}",
                    String::from_utf8_lossy(&self.rest)
                );
                return None;
            }
        };
        let head = String::from_utf8(self.rest.drain(..end).collect()).unwrap();
        let status = head[9..12].parse().unwrap();
        let mut answer = Answer {
            status,
            head,
            body: Vec::new(),
        };
        let length = answer
            .field("content-length")
            .map_or(0, |l| l.parse().unwrap());
        if !head_only && status != 304 {
            while self.rest.len() < length {
                assert!(
                    self.more(),
                    "the body ended at {} of {length}",
                    self.rest.len()
                );
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
            Err(e) => panic!(
                "nothing came for {PATIENCE:?}: {e}; so far {:?}",
                String::from_utf8_lossy(&self.rest)
            ),
        }
    }

    fn is_closed(&mut self) -> bool {
        assert!(
            self.rest.is_empty(),
            "bytes behind the answer: {:?}",
            String::from_utf8_lossy(&self.rest)
        );
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
