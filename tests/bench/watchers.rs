//! A wall of watchers: every event to every client. Our live stream beside `ws.js` of the peers, in turns, seen by one
//! and the same client process. Usage: `watchers [--peer DIR] [--runs N] [--clients N] [--seconds N] [--stalled N]`;
//! `scripts/bench-watchers` calls it. The two other modes are the processes that it starts:
//! `watchers serve CLIENTS RATE SECONDS BYTES` and `watchers watch PORT CLIENTS STALLED`.
//!
//! Both servers run on core 0 and the client on core 1 where `taskset` can be had, so that no server gets the other's
//! time. CPU is that of the server's process alone; latency is from the making of an event to the client's read.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark fails loudly and prints its table")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beebox_chatd::bus::{Bus, EventStore, StoredEvent};
use beebox_chatd::error::Result;
use beebox_chatd::ids::EventId;
use beebox_chatd::push::{Push, PushLimits, Stream, Upgrade, UpgradeKind, start};
use beebox_chatd::threads::{Name, OnPanic, SMALL_STACK_BYTES, spawn};
use rustix::event::epoll;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// Bytes of an event: a delta of an answer.
const BYTES: usize = 300;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let number = |at: usize| args[at].parse::<usize>().unwrap();
    match args.first().map(String::as_str) {
        Some("serve") => serve(number(1), number(2), number(3), number(4)),
        Some("watch") => watch(number(1), number(2), number(3)),
        Some(_) | None => compare(&args),
    }
}

fn nanos(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn status_kib(pid: &str, field: &str) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Times the process's threads went to sleep and were woken.
fn switches() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|t| {
            let status = std::fs::read_to_string(t.unwrap().path().join("status")).unwrap_or_default();
            let line = status.lines().find(|l| l.starts_with("voluntary_ctxt")).unwrap_or("x 0");
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        })
        .sum()
}

// ---- the server under test

struct NoStore;

impl EventStore for NoStore {
    fn events_after(&self, _: EventId, _: usize) -> Result<Vec<StoredEvent>> {
        Ok(Vec::new())
    }

    fn bounds(&self) -> Result<(EventId, EventId)> {
        Ok((1, 0))
    }
}

/// None for a connection that says nothing: the look whether somebody listens.
fn read_head(mut stream: TcpStream) -> Option<Upgrade> {
    let mut head = Vec::new();
    let mut byte = [0; 1024];
    while !head.ends_with(b"\r\n\r\n") {
        let len = stream.read(&mut byte).ok().filter(|len| *len > 0)?;
        head.extend_from_slice(&byte[..len]);
    }
    let text = String::from_utf8(head).unwrap();
    let key = text.lines().find_map(|l| l.strip_prefix("Sec-WebSocket-Key: ")).unwrap().to_owned();
    let kind = UpgradeKind::WebSocket { key };
    Some(Upgrade { stream: Stream::Tcp(stream), kind, cursor: None, leftover: Vec::new(), peer: String::new() })
}

fn wait_until(seen: impl Fn() -> bool) {
    while !seen() {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// What `ws.js` does, with our parts: waits for the clients, then publishes at the rate (0: each event as soon as the
/// one before is with everybody), and says what it cost.
fn serve(clients: usize, rate: usize, seconds: usize, bytes: usize) {
    let bus = Arc::new(Bus::new("bench", 0));
    let push: Push = start(bus.clone(), Arc::new(NoStore), PushLimits::default()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", json!({"port": listener.local_addr().unwrap().port()}));
    let rss_before = status_kib("self", "VmRSS");
    let to = push.clone();
    let _gate = spawn(const { Name::fixed("bench-gate") }, SMALL_STACK_BYTES, OnPanic::EndProcess, move || {
        while let Ok((stream, _)) = listener.accept() {
            if let Some(upgrade) = read_head(stream) {
                to.adopt(upgrade);
            }
        }
    })
    .unwrap();
    wait_until(|| push.stats().websocket_clients as usize == clients);
    std::thread::sleep(Duration::from_millis(500));
    let rss = (status_kib("self", "VmRSS") - rss_before) / clients as f64;
    let quiet = switches();
    std::thread::sleep(Duration::from_secs(3));
    // The thread that looks is one of them.
    let idle_wakes = switches() - quiet - 1;
    let (cpu, sent, begun) = (nanos(ClockId::ProcessCPUTime), push.stats().frames_sent, Instant::now());
    let filler = "x".repeat(bytes - 62);
    let mut events = 0u64;
    while begun.elapsed().as_secs_f64() < seconds as f64 {
        let event = format!("{:019}", nanos(ClockId::Monotonic));
        bus.publish("chat-turn", &json!({"t": event, "x": filler}));
        events += 1;
        match rate {
            0 => wait_until(|| push.stats().frames_sent - sent >= events * clients as u64),
            _ => {
                let due = Duration::from_secs_f64(events as f64 / rate as f64);
                std::thread::sleep(due.saturating_sub(begun.elapsed()));
            }
        }
    }
    let elapsed = begun.elapsed().as_secs_f64();
    let cpu_micros = (nanos(ClockId::ProcessCPUTime) - cpu) as f64 / 1e3;
    let deliveries = (push.stats().frames_sent - sent) as f64;
    println!(
        "{}",
        json!({
            "clients": clients, "rate": rate, "deliveriesPerSecond": (deliveries / elapsed).round(),
            "cpuMicrosPerDelivery": cpu_micros / deliveries, "rssKiBPerClient": rss,
            "idleWakesPerSecond": idle_wakes as f64 / 3.0, "rssKiB": status_kib("self", "VmRSS"),
            "blocked": push.stats().blocked_clients, "dropped": push.stats().transient_dropped,
        })
    );
    std::thread::sleep(Duration::from_millis(500));
}

// ---- the client

struct Watched {
    stream: TcpStream,
    /// Bytes of a frame that is not whole.
    rest: Vec<u8>,
}

/// Opens the clients, reads until the server goes away, and says how long deliveries took.
fn watch(port: usize, clients: usize, stalled: usize) {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let mut watched: Vec<Watched> = Vec::new();
    let mut asleep = Vec::new();
    for n in 0..clients + stalled {
        let mut stream = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
        write!(
            stream,
            "GET /api/events HTTP/1.1\r\nHost: localhost:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        .unwrap();
        let mut head = Vec::new();
        let mut buffer = [0; 1024];
        let end = loop {
            let len = stream.read(&mut buffer).unwrap();
            assert!(len > 0, "the server left");
            head.extend_from_slice(&buffer[..len]);
            if let Some(at) = head.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
        };
        if n >= clients {
            asleep.push(stream);
            continue;
        }
        stream.set_nonblocking(true).unwrap();
        epoll::add(&epoll, &stream, epoll::EventData::new_u64(n as u64), epoll::EventFlags::IN).unwrap();
        watched.push(Watched { stream, rest: head[end..].to_vec() });
    }
    let mut latencies_us: Vec<u32> = Vec::new();
    let mut open = clients;
    let mut events = Vec::with_capacity(256);
    let mut buffer = vec![0; 64 * 1024];
    while open > 0 {
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None).unwrap();
        for event in events.drain(..) {
            let client = &mut watched[event.data.u64() as usize];
            let len = client.stream.read(&mut buffer).unwrap_or(0);
            if len == 0 {
                epoll::delete(&epoll, &client.stream).unwrap();
                open -= 1;
                continue;
            }
            let now = nanos(ClockId::Monotonic);
            client.rest.extend_from_slice(&buffer[..len]);
            let used = each_frame(&client.rest, |payload| {
                if let Some(at) = payload.windows(4).position(|w| w == b"\"t\":") {
                    let digits = payload[at + 4..].iter().skip_while(|b| **b == b'"').take(19);
                    let made = digits.fold(0u64, |n, b| n * 10 + u64::from(b - b'0'));
                    latencies_us.push((now.saturating_sub(made) / 1000) as u32);
                }
            });
            client.rest.drain(..used);
        }
    }
    latencies_us.sort_unstable();
    let at = |share: f64| {
        let last = latencies_us.len().saturating_sub(1);
        f64::from(*latencies_us.get((last as f64 * share) as usize).unwrap_or(&0)) / 1000.0
    };
    println!(
        "{}",
        json!({"deliveries": latencies_us.len(), "p50Ms": at(0.5), "p90Ms": at(0.9), "p99Ms": at(0.99), "maxMs": at(1.0)})
    );
}

/// Calls `each` with the payload of every whole frame; the bytes they took.
fn each_frame(bytes: &[u8], mut each: impl FnMut(&[u8])) -> usize {
    let mut used = 0;
    loop {
        let rest = &bytes[used..];
        let (head, len) = match rest {
            [_, len @ 0..=125, ..] => (2, usize::from(*len)),
            [_, 126, a, b, ..] => (4, usize::from(u16::from_be_bytes([*a, *b]))),
            [_, 127, ..] if rest.len() >= 10 => (10, u64::from_be_bytes(rest[2..10].try_into().unwrap()) as usize),
            [..] => return used,
        };
        if rest.len() < head + len {
            return used;
        }
        each(&rest[head..head + len]);
        used += head + len;
    }
}

// ---- the comparison

fn on_core(core: usize, program: &str, args: &[String]) -> Child {
    let pinned = Command::new("taskset").arg("-V").output().is_ok();
    let mut command = if pinned { Command::new("taskset") } else { Command::new(program) };
    if pinned {
        command.args(["-c", &core.to_string(), program]);
    }
    command.args(args).stdout(Stdio::piped()).spawn().unwrap()
}

fn strings(words: &[&dyn std::fmt::Display]) -> Vec<String> {
    words.iter().map(|w| w.to_string()).collect()
}

/// One run: the server's own figures and the client's.
fn run(peer: Option<&str>, clients: usize, rate: usize, seconds: usize, stalled: usize) -> (Value, Value) {
    let me = std::env::current_exe().unwrap();
    let me = me.to_str().unwrap();
    let all = clients + stalled;
    let (mut server, port) = match peer {
        None => (on_core(0, me, &strings(&[&"serve", &all, &rate, &seconds, &BYTES])), None),
        Some(dir) => {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let script = format!("{dir}/ws.js");
            (on_core(0, "node", &strings(&[&script, &port, &all, &rate, &seconds, &BYTES])), Some(port))
        }
    };
    let mut said = BufReader::new(server.stdout.take().unwrap());
    let mut line = String::new();
    let port = port.unwrap_or_else(|| {
        said.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()["port"].as_u64().unwrap() as u16
    });
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(10), "the server does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let client = on_core(1, me, &strings(&[&"watch", &port, &clients, &stalled]));
    line.clear();
    said.read_line(&mut line).unwrap();
    let figures = serde_json::from_str(&line).unwrap_or(Value::Null);
    server.wait().unwrap();
    let seen = client.wait_with_output().unwrap();
    (figures, serde_json::from_slice(&seen.stdout).unwrap_or(Value::Null))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn compare(args: &[String]) {
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: usize| value(name).map_or(default, |v| v.parse().unwrap());
    let (runs, clients) = (number("--runs", 3), number("--clients", 1000));
    let (seconds, stalled) = (number("--seconds", 5), number("--stalled", 0));
    let peer = value("--peer").map(String::as_str);
    let columns = ["deliveriesPerSecond", "cpuMicrosPerDelivery", "p50Ms", "p99Ms", "maxMs", "rssKiBPerClient"];
    println!(
        "{clients} clients, {BYTES} bytes, {seconds} s, medians of {runs} runs in turns; {stalled} stalled beside"
    );
    println!(
        "{:<10} {:>6} {:>12} {:>12} {:>9} {:>9} {:>9} {:>10}",
        "server", "rate", "deliv/s", "µs CPU/del", "p50 ms", "p99 ms", "max ms", "KiB/client"
    );
    // At full speed each event waits for everybody, so that stalled readers would stop it.
    let rates = if stalled == 0 { vec![20_000 / clients.max(1), 0] } else { vec![20_000 / clients.max(1)] };
    for rate in rates {
        let mut table: BTreeMap<&str, Vec<Vec<f64>>> = BTreeMap::new();
        let mut idle = Vec::new();
        for _ in 0..runs {
            for (name, peer) in [("ours", None), ("ws.js", peer)] {
                if name == "ws.js" && peer.is_none() {
                    continue;
                }
                let (server, client) = run(peer, clients, rate, seconds, stalled);
                let row = columns.iter().map(|c| server[c].as_f64().or(client[c].as_f64()).unwrap_or(f64::NAN));
                table.entry(name).or_default().push(row.collect());
                idle.extend(server["idleWakesPerSecond"].as_f64());
            }
        }
        let mut medians = BTreeMap::new();
        for (name, rows) in &table {
            let row: Vec<f64> =
                (0..columns.len()).map(|c| median(&mut rows.iter().map(|r| r[c]).collect::<Vec<_>>())).collect();
            println!(
                "{name:<10} {rate:>6} {:>12.0} {:>12.2} {:>9.2} {:>9.2} {:>9.2} {:>10.2}",
                row[0], row[1], row[2], row[3], row[4], row[5]
            );
            medians.insert(*name, row);
        }
        println!("ours, idle: {:.2} wake-ups/s of all threads, clients attached (a tick each 5 s)", median(&mut idle));
        if let (Some(ours), Some(theirs)) = (medians.get("ours"), medians.get("ws.js")) {
            println!(
                "ours : ws.js = {:.2} × deliveries per CPU second (goal 1.5), {:.2} × p99 (goal 0.6 at 20,000/s)",
                theirs[1] / ours[1],
                ours[3] / theirs[3]
            );
        }
    }
}
