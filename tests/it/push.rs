//! The live event stream over real sockets, with a store in memory: hello, replay, live, resync; joining while events
//! are published; slow, silent, hostile and many clients.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use beebox_chatd::bus::{Bus, EventStore, Publisher, StoredEvent};
use beebox_chatd::error::{Code, Error, Result};
use beebox_chatd::ids::EventId;
use beebox_chatd::push::{Push, PushLimits, Stream, Upgrade, UpgradeKind, start};
use beebox_chatd::sync::Mutex;
use beebox_chatd::threads::{Name, OnPanic, SMALL_STACK_BYTES, Thread, spawn};
use serde_json::{Value, json};
use tungstenite::{Message, WebSocket};

/// Longest wait for anything.
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Default)]
struct MemoryStore {
    rows: Mutex<Vec<StoredEvent>>,
    /// Rows below this id were pruned.
    oldest: AtomicI64,
    broken: AtomicBool,
    /// Milliseconds that each read takes.
    slow_ms: AtomicUsize,
}

impl MemoryStore {
    fn push(&self, id: EventId, data: &Value) {
        self.rows.lock().push(StoredEvent {
            id,
            event: "k".to_owned(),
            data_json: data.to_string(),
            at: AT.to_owned(),
        });
    }

    fn check(&self) -> Result<()> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(Error::new(Code::CannotRecord, "disk is gone"));
        }
        std::thread::sleep(Duration::from_millis(self.slow_ms.load(Ordering::SeqCst) as u64));
        Ok(())
    }
}

impl EventStore for MemoryStore {
    fn events_after(&self, after: EventId, rows_max: usize) -> Result<Vec<StoredEvent>> {
        self.check()?;
        let rows = self.rows.lock();
        let oldest = self.oldest.load(Ordering::SeqCst);
        let from = rows.partition_point(|r| r.id <= after || r.id < oldest);
        Ok(rows[from..].iter().take(rows_max).cloned().collect())
    }

    fn bounds(&self) -> Result<(EventId, EventId)> {
        self.check()?;
        let rows = self.rows.lock();
        let oldest = self.oldest.load(Ordering::SeqCst).max(rows.first().map_or(1, |r| r.id));
        Ok((oldest, rows.last().map_or(0, |r| r.id)))
    }
}

const AT: &str = "2026-12-01T00:00:00.000Z";

/// A stand-in for the gate, the bus, the store and what is tested.
struct World {
    bus: Arc<Bus>,
    store: Arc<MemoryStore>,
    push: Push,
    port: u16,
    stop: Arc<AtomicBool>,
    gate: Thread,
}

impl World {
    fn new() -> Self {
        Self::with(Bus::unopened(), PushLimits::default())
    }

    fn with(bus: Bus, limits: PushLimits) -> Self {
        bus.open("e1", 0);
        let bus = Arc::new(bus);
        let store = Arc::new(MemoryStore::default());
        let push = start(bus.clone(), store.clone(), limits).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let stop = Arc::new(AtomicBool::new(false));
        let (to, stopped) = (push.clone(), stop.clone());
        let gate = spawn(Name::fixed("test-gate"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
            while let Ok((stream, peer)) = listener.accept() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                if let Some(upgrade) = read_head(stream, peer.to_string()) {
                    to.adopt(upgrade);
                }
            }
        })
        .unwrap();
        Self { bus, store, push, port, stop, gate }
    }

    /// Records an event, then publishes it, as the journal does.
    fn keep(&self, data: Value) -> EventId {
        keep(&self.store, &self.bus, data)
    }

    fn socket(&self) -> TcpStream {
        let socket = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
        socket
    }

    fn client(&self, after: &str) -> Client {
        Client::over(self.socket(), after)
    }

    fn sse(&self, after: &str, socket: &mut TcpStream) {
        write!(socket, "GET /api/events{} HTTP/1.1\r\nAccept: text/event-stream\r\n\r\n", query(after)).unwrap();
    }

    /// Waits until `seen` of the figures.
    fn wait_for(&self, what: &str, seen: impl Fn(&beebox_chatd::push::PushStats) -> bool) {
        let begun = Instant::now();
        while !seen(&self.push.stats()) {
            assert!(begun.elapsed() < LIMIT, "{what}: {:?}\n{}", self.push.stats(), beebox_chatd::dump::threads_page());
            std::thread::yield_now();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let ended = self.push.shutdown(Duration::from_secs(5)) && self.gate.join_within(Duration::from_secs(5));
        if !std::thread::panicking() {
            assert!(ended, "{}", beebox_chatd::dump::threads_page());
        }
    }
}

fn keep(store: &MemoryStore, bus: &Bus, data: Value) -> EventId {
    // The lock over both keeps the order of publication that of the ids.
    let mut rows = store.rows.lock();
    let id = rows.last().map_or(0, |r| r.id) + 1;
    rows.push(StoredEvent { id, event: "k".to_owned(), data_json: data.to_string(), at: AT.to_owned() });
    bus.publish_kept(id, "k", &data, AT);
    id
}

fn query(after: &str) -> String {
    if after.is_empty() { String::new() } else { format!("?after={after}") }
}

fn read_head(mut stream: TcpStream, peer: String) -> Option<Upgrade> {
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    let end = loop {
        let len = stream.read(&mut buffer).ok().filter(|len| *len > 0)?;
        head.extend_from_slice(&buffer[..len]);
        if let Some(at) = head.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
    };
    let text = std::str::from_utf8(&head[..end]).ok()?;
    let path = text.split(' ').nth(1)?;
    let cursor = path.split_once("after=").map(|(_, c)| c.to_owned());
    let field = |name: &str| {
        let line = text.lines().find(|l| l.to_ascii_lowercase().starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kind = match field("sec-websocket-key:") {
        Some(key) => UpgradeKind::WebSocket { key },
        None => UpgradeKind::Sse,
    };
    let leftover = head[end..].to_vec();
    Some(Upgrade { stream: Stream::Tcp(stream), kind, cursor, leftover, peer })
}

struct Client {
    socket: WebSocket<TcpStream>,
}

impl Client {
    fn over(socket: TcpStream, after: &str) -> Self {
        let url = format!("ws://localhost/api/events{}", query(after));
        let (socket, answer) = tungstenite::client(url, socket).expect("the handshake");
        assert_eq!(answer.status(), 101);
        Self { socket }
    }

    /// The next event, whatever pings come between.
    fn next(&mut self) -> Value {
        loop {
            match self.socket.read() {
                Ok(Message::Text(text)) => return serde_json::from_str(&text).unwrap(),
                Ok(Message::Ping(_) | Message::Pong(_)) => {}
                other => panic!("{other:?}\n{}", beebox_chatd::dump::threads_page()),
            }
        }
    }

    fn hello(&mut self) -> Value {
        let hello = self.next();
        assert_eq!(hello["event"], "hello");
        hello["data"].clone()
    }

    /// Ids of the next `count` kept events.
    fn ids(&mut self, count: usize) -> Vec<EventId> {
        let mut ids = Vec::new();
        while ids.len() < count {
            ids.extend(self.next()["id"].as_i64());
        }
        ids
    }

    fn say(&mut self, text: &str) {
        self.socket.send(Message::text(text)).unwrap();
    }

    /// Reads on until the close frame; its code.
    fn close_code(&mut self) -> u16 {
        loop {
            match self.socket.read() {
                Ok(Message::Close(frame)) => return frame.map_or(1005, |f| f.code.into()),
                Ok(_) => {}
                Err(e) => panic!("{e}"),
            }
        }
    }
}

fn range(from: EventId, to: EventId) -> Vec<EventId> {
    (from..=to).collect()
}

#[test]
fn hello_comes_first_then_replay_then_live() {
    let world = World::new();
    for n in 1..=5 {
        world.keep(json!({ "n": n }));
    }
    let mut client = world.client("e1.2");
    assert_eq!(client.hello(), json!({"epoch": "e1", "head": 5, "oldest": 1}));
    assert_eq!(client.next(), json!({"id": 3, "event": "k", "data": {"n": 3}, "at": AT}));
    assert_eq!(client.ids(2), [4, 5]);
    world.keep(json!({"n": 6}));
    world.bus.publish("chat-phase", &json!({"phase": "idle"}));
    assert_eq!(client.ids(1), [6]);
    let transient = client.next();
    assert_eq!((&transient["event"], &transient["data"]["phase"]), (&json!("chat-phase"), &json!("idle")));
    assert!(transient.get("id").is_none());
}

#[test]
fn each_cursor_leads_to_its_place() {
    let world = World::with(Bus::with_limits(4, 1 << 20), PushLimits::default());
    for n in 1..=20 {
        world.keep(json!({ "n": n }));
    }
    world.store.oldest.store(7, Ordering::SeqCst);
    let table: [(&str, Option<&str>, Vec<EventId>); 10] = [
        ("", None, vec![]),
        ("20", None, vec![]),
        ("e1.20", None, vec![]),
        ("17", None, range(18, 20)),
        ("6", None, range(7, 20)),
        ("e1.9", None, range(10, 20)),
        ("5", Some("old"), vec![]),
        ("0", Some("old"), vec![]),
        ("21", Some("future"), vec![]),
        ("e0.20", Some("foreign"), vec![]),
    ];
    let mut clients = Vec::new();
    for (after, resync, replayed) in table {
        let mut client = world.client(after);
        assert_eq!(client.hello(), json!({"epoch": "e1", "head": 20, "oldest": 7}), "{after}");
        if let Some(reason) = resync {
            let wanted = json!({"event": "resync", "data": {"reason": reason, "head": 20}});
            assert_eq!(client.next(), wanted, "{after}");
        }
        assert_eq!(client.ids(replayed.len()), replayed, "{after}");
        clients.push(client);
    }
    world.keep(json!({"n": 21}));
    for client in &mut clients {
        assert_eq!(client.ids(1), [21]);
    }
}

#[test]
fn a_client_moves_its_cursor() {
    let world = World::with(Bus::with_limits(4, 1 << 20), PushLimits::default());
    for n in 1..=600 {
        world.keep(json!({ "n": n }));
    }
    let mut client = world.client("");
    client.hello();
    client.say(r#"{"after":10}"#);
    assert_eq!(client.ids(590), range(11, 600));
    client.say(r#"{"after":"e1.598"}"#);
    assert_eq!(client.ids(2), [599, 600]);
    client.say(r#"{"after":601}"#);
    assert_eq!(client.next()["data"], json!({"reason": "future", "head": 600}));
    client.say(r#"{"after":"e9.600"}"#);
    assert_eq!(client.next()["data"], json!({"reason": "foreign", "head": 600}));
    world.keep(json!({}));
    assert_eq!(client.ids(1), [601]);
}

#[test]
fn attaching_while_events_are_published_makes_no_hole_and_no_double() {
    // A small ring, so that newcomers meet store, ring and the seam between them.
    let world = Arc::new(World::with(Bus::with_limits(64, 1 << 20), PushLimits::default()));
    let done = Arc::new(AtomicBool::new(false));
    let publisher = {
        let (store, bus, done) = (world.store.clone(), world.bus.clone(), done.clone());
        spawn(Name::fixed("publisher"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
            let mut n = 0;
            while !done.load(Ordering::SeqCst) {
                keep(&store, &bus, json!({ "n": n }));
                if n % 3 == 0 {
                    bus.publish("t", &json!({}));
                }
                n += 1;
                if n % 8 == 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        })
        .unwrap()
    };
    let attached = Arc::new(AtomicUsize::new(0));
    let attachers: Vec<Thread> = (0..4)
        .map(|worker| {
            let (world, attached) = (world.clone(), attached.clone());
            spawn(Name::numbered("attach", worker), SMALL_STACK_BYTES, OnPanic::Contain, move || {
                for round in 0..500 {
                    let head = world.bus.head();
                    let back = [0, 0, 1, 3, 30, 60, 64, 70, 100, 300][round % 10];
                    let after = (head - back).max(0);
                    let mut client = world.client(&after.to_string());
                    client.hello();
                    let wanted = 5 + back as usize;
                    assert_eq!(client.ids(wanted), range(after + 1, after + wanted as i64));
                    attached.fetch_add(1, Ordering::SeqCst);
                }
            })
            .unwrap()
        })
        .collect();
    for attacher in attachers {
        assert!(attacher.join_within(Duration::from_secs(120)));
    }
    done.store(true, Ordering::SeqCst);
    assert!(publisher.join_within(LIMIT));
    assert_eq!(attached.load(Ordering::SeqCst), 2000);
    assert!(world.push.stats().store_reads > 100, "{:?}", world.push.stats());
}

#[test]
fn a_slow_reader_gets_every_kept_event_and_slows_nobody() {
    let world = World::with(Bus::with_limits(256, 1 << 20), PushLimits::default());
    let slow = world.socket();
    let mut slow = Client::over(slow, "0");
    slow.hello();
    let mut quick = world.client("0");
    quick.hello();
    let filler = "x".repeat(8 * 1024);
    let count = 2000;
    for n in 1..=count {
        world.keep(json!({"n": n, "filler": filler}));
        for _ in 0..2 {
            world.bus.publish("t", &json!({"filler": filler}));
        }
        // The slow one takes about one event while the quick one takes all.
        if n % 50 == 0 {
            assert_eq!(quick.ids(50), range(n - 49, n));
            assert_eq!(slow.ids(1), [n / 50]);
        }
    }
    // Its socket is full, or it waits for rows of the store at this very moment.
    world.wait_for("the slow one is behind", |s| s.blocked_clients + s.replaying_clients >= 1);
    let stats = world.push.stats();
    assert_eq!(stats.closed_stalled, 0, "{stats:?}");
    assert!(stats.pinned_bytes < 1 << 20, "{stats:?}");
    assert_eq!(slow.ids(count as usize - 40), range(41, count));
    world.wait_for("the slow one is live again", |s| s.replaying_clients == 0);
    world.keep(json!({}));
    assert_eq!(slow.ids(1), [count + 1]);
    assert_eq!(quick.ids(1), [count + 1]);
    // 4,000 transient events of 8 KiB were published: the slow one cannot have had them all.
    assert!(world.push.stats().store_reads > 10, "{:?}", world.push.stats());
}

/// A masked frame of a client.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![first];
    match payload.len() {
        len @ 0..126 => bytes.push(0x80 | len as u8),
        len @ 126..65_536 => {
            bytes.push(0x80 | 126);
            bytes.extend_from_slice(&(len as u16).to_be_bytes());
        }
        len => {
            bytes.push(0x80 | 127);
            bytes.extend_from_slice(&(len as u64).to_be_bytes());
        }
    }
    let mask = [1, 2, 3, 4];
    bytes.extend_from_slice(&mask);
    bytes.extend(payload.iter().enumerate().map(|(i, b)| b ^ mask[i % 4]));
    bytes
}

#[test]
fn malformed_frames_are_closed_with_their_code() {
    let world = World::new();
    let mut bystander = world.client("");
    bystander.hello();
    let pings = |count: usize| frame(0x89, b"x").repeat(count);
    let cursor = |text: &str| frame(0x81, text.as_bytes());
    let table: Vec<(&str, Vec<u8>, u16)> = vec![
        ("unmasked", vec![0x81, 2, b'h', b'i'], 1002),
        ("bad UTF-8", frame(0x81, &[0xff, 0xfe]), 1007),
        ("bad UTF-8 over two fragments", [frame(0x01, &[0xc3]), frame(0x80, b"x")].concat(), 1007),
        ("reserved bit 1", frame(0xc1, b"{}"), 1002),
        ("reserved bit 3", frame(0x91, b"{}"), 1002),
        ("reserved data opcode", frame(0x83, b"{}"), 1002),
        ("reserved control opcode", frame(0x8b, b""), 1002),
        ("fragmented ping", frame(0x09, b""), 1002),
        ("long ping", frame(0x89, &[0; 126]), 1002),
        ("continuation of nothing", frame(0x80, b"x"), 1002),
        ("new message inside a message", [frame(0x01, b"x"), frame(0x81, b"y")].concat(), 1002),
        ("binary", frame(0x82, b"{}"), 1003),
        ("64 KiB and one byte", frame(0x81, &[b' '; 65_537]), 1009),
        ("2^63 bytes announced", [&[0x81, 0xff][..], &[0x7f; 8], &[0; 4]].concat(), 1009),
        (
            "many fragments over 64 KiB",
            frame(0x01, &[b' '; 1000]).into_iter().chain(frame(0x00, &[b' '; 1000]).repeat(70)).collect(),
            1009,
        ),
        ("64 KiB that are no cursor", frame(0x81, &[b' '; 65_536]), 1008),
        ("no JSON", cursor("hello"), 1008),
        ("no cursor", cursor(r#"{"before":1}"#), 1008),
        ("negative", cursor(r#"{"after":-1}"#), 1008),
        ("fraction", cursor(r#"{"after":1.5}"#), 1008),
        ("2^64", cursor(r#"{"after":18446744073709551616}"#), 1008),
        ("2^63", cursor(r#"{"after":9223372036854775808}"#), 1008),
        ("bad cursor text", cursor(r#"{"after":"e1."}"#), 1008),
        ("ping flood", pings(1000), 1008),
        ("pong flood", frame(0x8a, b"").repeat(1000), 1008),
        ("flood of empty fragments", [frame(0x01, b""), frame(0x00, b"").repeat(100_000)].concat(), 1008),
        ("close 1000", frame(0x88, &1000u16.to_be_bytes()), 1000),
        ("close without a code", frame(0x88, b""), 1005),
        ("close with half a code", frame(0x88, b"x"), 1002),
        ("close with a code nobody may send", frame(0x88, &1005u16.to_be_bytes()), 1002),
        ("close with a reason that is not UTF-8", frame(0x88, &[0x03, 0xe8, 0xff]), 1007),
    ];
    for (what, bytes, code) in table {
        let mut client = world.client("");
        client.hello();
        // The server may have closed before all was written.
        let _ = client.socket.get_mut().write_all(&bytes);
        assert_eq!(client.close_code(), code, "{what}");
        let mut rest = Vec::new();
        match client.socket.get_mut().read_to_end(&mut rest) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{what}"),
        }
        world.keep(json!({ "after": what }));
        assert_eq!(bystander.next()["data"]["after"], what);
    }
    world.wait_for("all but one are gone", |s| s.websocket_clients == 1);
}

#[test]
fn frames_that_come_in_pieces_or_with_the_head_are_understood() {
    let world = World::new();
    for n in 1..=3 {
        world.keep(json!({ "n": n }));
    }
    let seek = frame(0x81, br#"{"after":1}"#);
    let mut client = world.client("");
    client.hello();
    for byte in &seek {
        client.socket.get_mut().write_all(&[*byte]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(client.ids(2), [2, 3]);
    // A ping is answered with its payload, in front of nothing that it could cut.
    client.socket.get_mut().write_all(&frame(0x89, b"payload")).unwrap();
    assert_eq!(client.socket.read().unwrap(), Message::Pong(b"payload"[..].into()));
    // Pipelined behind the request head.
    let mut socket = world.socket();
    let head = b"GET /api/events HTTP/1.1\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    socket.write_all(&[&head[..], &seek].concat()).unwrap();
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    while !String::from_utf8_lossy(&bytes).contains("\"id\":3") {
        let len = socket.read(&mut buffer).unwrap();
        assert!(len > 0);
        bytes.extend_from_slice(&buffer[..len]);
    }
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.starts_with("HTTP/1.1 101 "), "{text}");
    assert!(text.contains("Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"), "{text}");
    let at = |what: &str| text.find(what).unwrap();
    assert!(at("hello") < at("\"id\":2") && at("\"id\":2") < at("\"id\":3"), "{text}");
}

#[test]
fn server_sent_events_carry_cursors_and_resume() {
    let world = World::new();
    for n in 1..=3 {
        world.keep(json!({ "n": n }));
    }
    let read_until = |socket: &mut TcpStream, end: &str| {
        let mut text = String::new();
        let mut buffer = [0; 1024];
        while !text.contains(end) {
            let len = socket.read(&mut buffer).unwrap();
            assert!(len > 0, "{text}");
            text.push_str(std::str::from_utf8(&buffer[..len]).unwrap());
        }
        text
    };
    let mut socket = world.socket();
    world.sse("e1.1", &mut socket);
    let text = read_until(&mut socket, "\"n\":3}");
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("Content-Type: text/event-stream"), "{head}");
    let wanted = format!(
        "id: e1.1\nevent: hello\ndata: {{\"event\":\"hello\",\"data\":{{\"epoch\":\"e1\",\"head\":3,\"oldest\":1}}}}\n\n\
         id: e1.2\nevent: k\ndata: {{\"id\":2,\"event\":\"k\",\"data\":{{\"n\":2}},\"at\":\"{AT}\"}}\n\n\
         id: e1.3\nevent: k\ndata: {{\"id\":3,\"event\":\"k\",\"data\":{{\"n\":3}},\"at\":\"{AT}\"}}"
    );
    assert_eq!(body.trim_end(), wanted);
    world.bus.publish("t", &json!({"live": true}));
    world.keep(json!({"n": 4}));
    let text = read_until(&mut socket, "\"n\":4}");
    assert!(text.contains("event: t\ndata: {\"event\":\"t\"") && text.contains("id: e1.4\nevent: k\n"), "{text}");
    let mut foreign = world.socket();
    world.sse("e0.1", &mut foreign);
    let text = read_until(&mut foreign, "resync\",");
    assert!(text.contains("id: e1.4\nevent: resync\n") && !text.contains("id: e1.1"), "{text}");
    // One that leaves is noticed.
    drop(socket);
    world.wait_for("it is gone", |s| s.sse_clients == 1);
}

#[test]
fn silent_clients_are_closed_and_answering_ones_stay() {
    let limits = PushLimits { ping_every_ms: 100, ..PushLimits::default() };
    let world = World::with(Bus::unopened(), limits);
    let mut silent = world.client("");
    silent.hello();
    let mut sse = world.socket();
    world.sse("", &mut sse);
    let world = Arc::new(world);
    let mut alive = world.client("");
    alive.hello();
    let reading = spawn(Name::fixed("answers"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
        // Answers pings while it waits.
        assert_eq!(alive.ids(1), [1]);
    })
    .unwrap();
    world.wait_for("the silent one is closed", |s| s.closed_silent == 1 && s.websocket_clients == 1);
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while text.matches(": ping\n\n").count() < 3 {
        let len = sse.read(&mut buffer).unwrap();
        assert!(len > 0);
        text.push_str(std::str::from_utf8(&buffer[..len]).unwrap());
    }
    world.keep(json!({}));
    assert!(reading.join_within(LIMIT));
    assert_eq!(world.push.stats().closed_silent, 1);
}

#[test]
fn a_reader_that_takes_nothing_is_closed_by_time() {
    let limits = PushLimits { stall_ms: 200, send_buffer_bytes: Some(16 * 1024), ..PushLimits::default() };
    let world = World::with(Bus::with_limits(64, 1 << 20), limits);
    let mut stalled = world.client("");
    stalled.hello();
    let mut quick = world.client("");
    quick.hello();
    let filler = "x".repeat(64 * 1024);
    let begun = Instant::now();
    let mut n = 0;
    while world.push.stats().closed_stalled == 0 {
        assert!(begun.elapsed() < LIMIT, "{:?}", world.push.stats());
        n = world.keep(json!({ "filler": filler }));
        assert_eq!(quick.ids(1), [n]);
        std::thread::sleep(Duration::from_millis(2));
    }
    world.wait_for("it is gone", |s| s.websocket_clients == 1 && s.blocked_clients == 0);
    assert!(n > 0);
}

#[test]
fn readers_that_hold_too_much_memory_are_closed_by_bytes() {
    let limits = PushLimits {
        stall_ms: 60_000,
        ping_every_ms: 400,
        pings_missed_max: u8::MAX,
        pinned_bytes_max: 2 << 20,
        send_buffer_bytes: Some(16 * 1024),
        ..PushLimits::default()
    };
    let world = World::with(Bus::with_limits(4, 1 << 20), limits);
    let filler = "x".repeat(1 << 20);
    for _ in 0..40 {
        world.keep(json!({ "filler": filler }));
    }
    // Each stops inside another event of 1 MiB, which the ring has no more.
    let stalled: Vec<Client> = (0..20)
        .map(|n| {
            let socket = world.socket();
            rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 4096).unwrap();
            Client::over(socket, &n.to_string())
        })
        .collect();
    world.wait_for("the longest blocked are closed", |s| s.closed_stalled >= 10);
    world.wait_for("and no more than needed", |s| s.pinned_bytes <= 2 << 20 && s.websocket_clients >= 1);
    drop(stalled);
}

#[test]
fn a_reconnect_storm_is_served_without_hole_or_double() {
    let world = Arc::new(World::with(Bus::with_limits(128, 1 << 20), PushLimits::default()));
    for n in 1..=1000 {
        world.keep(json!({ "n": n }));
    }
    for _ in 0..3 {
        let head = world.bus.head();
        let storm: Vec<Thread> = (0..50)
            .map(|n| {
                let world = world.clone();
                spawn(Name::numbered("storm", n), SMALL_STACK_BYTES, OnPanic::Contain, move || {
                    let mut client = world.client("e1.1");
                    client.hello();
                    assert_eq!(client.ids(head as usize + 49), range(2, head + 50));
                })
                .unwrap()
            })
            .collect();
        for n in 0..50 {
            world.keep(json!({ "n": n }));
            std::thread::sleep(Duration::from_millis(1));
        }
        for client in storm {
            assert!(client.join_within(LIMIT), "{}", beebox_chatd::dump::threads_page());
        }
    }
    world.wait_for("all are gone", |s| s.websocket_clients == 0);
}

#[test]
fn a_thousand_subscribers_get_every_event() {
    let world = World::new();
    let mut clients: Vec<Client> = (0..1000).map(|_| world.client("")).collect();
    for client in &mut clients {
        client.hello();
    }
    for n in 1..=20 {
        world.keep(json!({ "n": n }));
    }
    for client in &mut clients {
        assert_eq!(client.ids(20), range(1, 20));
    }
    let stats = world.push.stats();
    assert_eq!((stats.websocket_clients, stats.frames_sent, stats.store_reads), (1000, 20_000, 0), "{stats:?}");
}

#[test]
fn too_many_clients_and_a_broken_store_are_refused_in_words() {
    let limits = PushLimits { clients_max: 2, ..PushLimits::default() };
    let world = World::with(Bus::with_limits(4, 1 << 20), limits);
    let refused = |world: &World| {
        let mut socket = world.socket();
        world.sse("", &mut socket);
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("Retry-After: 1"), "{text}");
        let body: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
        body["code"].as_str().unwrap().to_owned()
    };
    world.store.broken.store(true, Ordering::SeqCst);
    assert_eq!(refused(&world), "cannot_record");
    world.store.broken.store(false, Ordering::SeqCst);
    let mut one = world.client("");
    one.hello();
    let mut two = world.client("");
    two.hello();
    assert_eq!(refused(&world), "overloaded");
    for n in 1..=20 {
        world.keep(json!({ "n": n }));
    }
    assert_eq!(one.ids(20), range(1, 20));
    // Live clients need no store; one that does is told to come back.
    world.store.broken.store(true, Ordering::SeqCst);
    two.say(r#"{"after":1}"#);
    assert_eq!(two.close_code(), 1013);
    world.keep(json!({}));
    assert_eq!(one.ids(1), [21]);
}

#[test]
fn events_dropped_from_the_store_under_a_laggard_lead_to_resync() {
    let world = World::with(Bus::with_limits(4, 1 << 20), PushLimits::default());
    for n in 1..=3000 {
        world.keep(json!({ "n": n, "filler": "x".repeat(2000) }));
    }
    world.store.slow_ms.store(20, Ordering::SeqCst);
    let mut client = world.client("0");
    client.hello();
    assert_eq!(client.ids(1), [1]);
    world.store.oldest.store(3000, Ordering::SeqCst);
    let mut last = 1;
    loop {
        let event = client.next();
        match event["id"].as_i64() {
            Some(id) => {
                assert_eq!(id, last + 1);
                last = id;
            }
            None => {
                assert_eq!(event["data"], json!({"reason": "old", "head": 3000}));
                break;
            }
        }
    }
    assert!(last < 3000);
    world.keep(json!({}));
    assert_eq!(client.ids(1), [3001]);
}

#[test]
fn rows_of_another_process_reach_live_clients() {
    let world = World::new();
    let mut client = world.client("");
    client.hello();
    world.keep(json!({}));
    // Committed by somebody else and never published here.
    world.store.push(2, &json!({}));
    world.store.push(3, &json!({}));
    world.keep(json!({}));
    assert_eq!(client.ids(4), range(1, 4));
}

#[test]
fn shutdown_says_1001_and_ends_within_its_limit() {
    let world =
        World::with(Bus::unopened(), PushLimits { send_buffer_bytes: Some(16 * 1024), ..PushLimits::default() });
    let mut client = world.client("");
    client.hello();
    // One whose socket is full cannot be told.
    let mut deaf = world.client("");
    deaf.hello();
    let filler = "x".repeat(1 << 20);
    while world.push.stats().blocked_clients == 0 {
        let id = world.keep(json!({ "filler": filler }));
        assert_eq!(client.ids(1), [id]);
    }
    let mut sse = world.socket();
    world.sse("", &mut sse);
    let mut text = String::new();
    let mut byte = [0];
    while !text.contains("event: hello\n") {
        sse.read_exact(&mut byte).unwrap();
        text.push(char::from(byte[0]));
    }
    let last = world.keep(json!({}));
    assert_eq!(client.ids(1), [last]);
    let reading = spawn(Name::fixed("reads-close"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
        assert_eq!(client.close_code(), 1001);
    })
    .unwrap();
    assert!(world.push.shutdown(Duration::from_secs(3)), "{}", beebox_chatd::dump::threads_page());
    assert!(reading.join_within(LIMIT));
    // A stream of events just ends, after what was published before.
    sse.read_to_string(&mut text).unwrap();
    assert!(text.contains(&format!("id: e1.{last}\n")) && text.ends_with("}\n\n"), "{text}");
    let mut late = world.socket();
    world.sse("", &mut late);
    late.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let _ = late.read(&mut [0; 64]);
}

#[test]
fn a_local_socket_is_served_like_the_port() {
    let world = World::new();
    world.keep(json!({}));
    let (mut here, there) = std::os::unix::net::UnixStream::pair().unwrap();
    here.set_read_timeout(Some(LIMIT)).unwrap();
    world.push.adopt(Upgrade {
        stream: Stream::Unix(there),
        kind: UpgradeKind::Sse,
        cursor: Some("0".to_owned()),
        leftover: Vec::new(),
        peer: "local".to_owned(),
    });
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while !text.contains("id: e1.1\n") {
        let len = here.read(&mut buffer).unwrap();
        assert!(len > 0, "{text}");
        text.push_str(std::str::from_utf8(&buffer[..len]).unwrap());
    }
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
}

#[test]
fn stalled_readers_change_nothing_for_the_others() {
    let world = World::with(Bus::with_limits(256, 1 << 20), PushLimits::default());
    let mut stalled: Vec<Client> = (0..100).map(|_| world.client("")).collect();
    let mut quick = world.client("");
    quick.hello();
    let filler = "x".repeat(16 * 1024);
    for n in 1..=600 {
        world.keep(json!({ "filler": filler }));
        assert_eq!(quick.ids(1), [n]);
    }
    let stats = world.push.stats();
    assert_eq!((stats.blocked_clients, stats.closed_stalled), (100, 0), "{stats:?}");
    // And each of them has everything once it reads on.
    for client in stalled.iter_mut().take(5) {
        client.hello();
        assert_eq!(client.ids(600), range(1, 600));
    }
}
