//! Durable sends: how many are answered in a second and how long one takes, beside `send.js full` of the peers and the
//! raw flush of the same disk, in turns in one run; all of it also with 1 ms added to every flush. `scripts/bench-send`
//! calls it: `send [--peer DIR] [--slow LIBRARY] [--work DIR] [--runs N] [--seconds N]`. One client process for both
//! servers: sockets and epoll on one thread. The other modes are the processes that it starts:
//! `send load ADDR KIND CLIENTS SECONDS SESSION…` and `send raw DIR SECONDS`.
//!
//! Ours: 16 conversations whose agents drain their queues, 64 workers, every record of the ledger counted in. The peer
//! has one insert for each send and nothing else to do.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark fails loudly and prints its table")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use beebox_chatd::load::client::Client;
use beebox_chatd::load::spawn::{SpawnOptions, Spawned};
use hdrhistogram::Histogram;
use rustix::event::epoll::{self, EventData, EventFlags};
use serde_json::json;

const SESSIONS: usize = 16;
const CLIENTS: usize = 64;
/// What people write: a short line.
const TEXT: &str = "please look at the kitchen light again, it blinks";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    match args.first().map(String::as_str) {
        Some("load") => load(
            args[1].parse().unwrap(),
            &args[2],
            args[3].parse().unwrap(),
            Duration::from_secs_f64(args[4].parse().unwrap()),
            &args[5..],
        ),
        Some("raw") => raw(Path::new(&args[1]), Duration::from_secs_f64(args[2].parse().unwrap())),
        Some(_) | None => compare(&args),
    }
}

/// Figures of one round, by name.
type Row = BTreeMap<String, f64>;

fn print(times: &Histogram<u64>, span: Duration) {
    let ms = |q: f64| times.value_at_quantile(q) as f64 / 1000.0;
    let row = json!({"per_s": times.len() as f64 / span.as_secs_f64(), "p50_ms": ms(0.5), "p99_ms": ms(0.99), "n": times.len()});
    println!("{row}");
}

/// Appends what a WAL appends for a small record and flushes it, again and again.
fn raw(dir: &Path, span: Duration) {
    let mut file = std::fs::File::create(dir.join("raw")).unwrap();
    let page = [7u8; 4120];
    let mut times = Histogram::<u64>::new(3).unwrap();
    let begun = Instant::now();
    while begun.elapsed() < span {
        let at = Instant::now();
        file.write_all(&page).unwrap();
        file.sync_data().unwrap();
        times.record(at.elapsed().as_micros() as u64).unwrap();
    }
    print(&times, begun.elapsed());
}

// ---- the client

struct Conn {
    stream: TcpStream,
    request: Vec<u8>,
    sent_at: Instant,
    got: Vec<u8>,
}

/// Length of the whole answer, once its head is there.
fn answer_len(got: &[u8]) -> Option<usize> {
    let end = got.windows(4).position(|w| w == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&got[..end]).unwrap().to_ascii_lowercase();
    let len = head.lines().find_map(|l| l.strip_prefix("content-length:")).unwrap().trim().parse::<usize>().unwrap();
    Some(end + 4 + len)
}

fn load(addr: SocketAddr, kind: &str, clients: usize, span: Duration, sessions: &[String]) {
    let epoll: OwnedFd = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let mut conns: Vec<Conn> = (0..clients)
        .map(|n| {
            let (path, body) = match kind {
                "ours" => {
                    ("/api/chat/send", json!({"session": sessions[n % sessions.len()], "message": TEXT}).to_string())
                }
                _ => ("/", json!({"session": "0e0e0e0e-0000-4000-8000-000000000000", "text": TEXT}).to_string()),
            };
            let request = format!(
                "POST {path} HTTP/1.1\r\nHost: {addr}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let stream = TcpStream::connect(addr).unwrap();
            stream.set_nodelay(true).unwrap();
            epoll::add(&epoll, &stream, EventData::new_u64(n as u64), EventFlags::IN).unwrap();
            Conn { stream, request: request.into_bytes(), sent_at: Instant::now(), got: Vec::new() }
        })
        .collect();
    let mut times = Histogram::<u64>::new(3).unwrap();
    let mut refused: BTreeMap<String, u64> = BTreeMap::new();
    let mut chunk = [0; 16 * 1024];
    let begun = Instant::now();
    for conn in &mut conns {
        conn.sent_at = Instant::now();
        conn.stream.write_all(&conn.request).unwrap();
    }
    let mut ready = Vec::with_capacity(clients);
    let mut open = clients;
    while open > 0 {
        ready.clear();
        let _ = epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut ready), None);
        for event in &ready {
            let conn = &mut conns[event.data.u64() as usize];
            let n = conn.stream.read(&mut chunk).unwrap();
            assert!(n > 0, "the server closed a connection after {:?}", String::from_utf8_lossy(&conn.got));
            conn.got.extend_from_slice(&chunk[..n]);
            if answer_len(&conn.got).is_none_or(|len| conn.got.len() < len) {
                continue;
            }
            if conn.got.starts_with(b"HTTP/1.1 200") {
                times.record(conn.sent_at.elapsed().as_micros() as u64).unwrap();
            } else {
                *refused.entry(String::from_utf8_lossy(&conn.got[9..12]).into_owned()).or_default() += 1;
            }
            conn.got.clear();
            if begun.elapsed() >= span {
                open -= 1;
                epoll::delete(&epoll, &conn.stream).unwrap();
                continue;
            }
            conn.sent_at = Instant::now();
            conn.stream.write_all(&conn.request).unwrap();
        }
    }
    if !refused.is_empty() {
        eprintln!("refused: {refused:?}");
    }
    print(&times, begun.elapsed());
}

// ---- the comparison

struct Bench {
    peer: Option<PathBuf>,
    slow: Option<PathBuf>,
    work: PathBuf,
    seconds: f64,
}

impl Bench {
    fn preload(&self, slow: bool) -> Option<(&'static str, String)> {
        slow.then(|| ("LD_PRELOAD", self.slow.as_ref().unwrap().to_string_lossy().into_owned()))
    }

    fn me(&self, args: &[&str], slow: bool) -> Row {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(args)
            .envs(self.preload(slow))
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn load(&self, addr: SocketAddr, kind: &str, clients: usize, sessions: &[String]) -> Row {
        let (addr, clients, seconds) = (addr.to_string(), clients.to_string(), self.seconds.to_string());
        let mut args = vec!["load", &addr, kind, &clients, &seconds];
        args.extend(sessions.iter().map(String::as_str));
        self.me(&args, false)
    }

    fn raw(&self, slow: bool) -> Row {
        self.me(&["raw", &self.work.to_string_lossy(), &(self.seconds / 2.0).to_string()], slow)
    }

    fn ours(&self, slow: bool, clients: usize) -> Row {
        let dir = self.work.join("ours");
        let _ = std::fs::remove_dir_all(&dir);
        let mut options = SpawnOptions::new(env!("CARGO_BIN_EXE_beebox-chatd"), &dir);
        options.args = ["--live-max", "16", "--http-workers", "64"].map(str::to_owned).to_vec();
        options.env = vec![("BEEBOX_AGENT_DIRECTIVES".into(), "say=ok deltas=1".into())];
        options.env.extend(self.preload(slow).map(|(k, v)| (k.to_owned(), v)));
        options.start_within = Duration::from_secs(30);
        let server = Spawned::start(options).unwrap();
        let mut client = Client::new(server.addr()).limit(Duration::from_secs(30));
        let sessions: Vec<String> = (0..if clients == 1 { 1 } else { SESSIONS })
            .map(|_| client.send("new", "hello", None, &[]).unwrap().unwrap().session_id)
            .collect();
        // Every agent is there before the clock starts.
        settle(&mut client);
        let before = counters(&mut client);
        let mut row = self.load(server.addr(), "ours", clients, &sessions);
        let after = counters(&mut client);
        let grew = |name: &str| after.get(name).unwrap_or(&0.0) - before.get(name).unwrap_or(&0.0);
        row.insert("acks_per_flush".into(), grew("beebox_journal_accepted") / grew("beebox_journal_commits"));
        row.insert("flushes_per_s".into(), grew("beebox_journal_commits") / self.seconds);
        row.insert("units_per_s".into(), grew("beebox_journal_units") / self.seconds);
        settle(&mut client);
        row
    }

    fn theirs(&self, slow: bool, clients: usize) -> Option<Row> {
        let dir = self.work.join("theirs");
        let _ = std::fs::remove_dir_all(&dir);
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut node = Node(
            Command::new("node")
                .arg("send.js")
                .arg(port.to_string())
                .arg(&dir)
                .arg("full")
                .current_dir(self.peer.as_ref()?)
                .envs(self.preload(slow))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        let mut line = String::new();
        BufReader::new(node.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "listening");
        Some(self.load(SocketAddr::from(([127, 0, 0, 1], port)), "theirs", clients, &[]))
    }
}

struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until every conversation is idle with nothing queued.
fn settle(client: &mut Client) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let list = client.get("/api/chat/sessions").unwrap().json();
        let busy =
            list["sessions"].as_array().unwrap().iter().filter(|s| s["busy"] == true || s["queued"] != 0).count();
        if busy == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "{busy} conversations do not settle");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn counters(client: &mut Client) -> Row {
    let page = client.get("/metrics").unwrap().text();
    page.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}

fn median(rows: &[Row], name: &str) -> f64 {
    let mut values: Vec<f64> = rows.iter().filter_map(|r| r.get(name).copied()).collect();
    values.sort_by(f64::total_cmp);
    if values.is_empty() { f64::NAN } else { values[values.len() / 2] }
}

fn compare(args: &[String]) {
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|at| args.get(at + 1)).cloned();
    let bench = Bench {
        peer: value("--peer").map(|dir| std::fs::canonicalize(dir).unwrap()),
        slow: value("--slow").map(|file| std::fs::canonicalize(file).unwrap()),
        work: value("--work").map_or_else(|| std::env::temp_dir().join("beebox-bench-send"), PathBuf::from),
        seconds: value("--seconds").map_or(4.0, |n| n.parse().unwrap()),
    };
    let runs: usize = value("--runs").map_or(3, |n| n.parse().unwrap());
    std::fs::create_dir_all(&bench.work).unwrap();
    for slow in [false, true] {
        if slow && bench.slow.is_none() {
            println!("no --slow LIBRARY: not measured with 1 ms in every flush");
            break;
        }
        let (mut raw, mut alone, mut full) = (vec![], (vec![], vec![]), (vec![], vec![]));
        for _ in 0..runs {
            raw.push(bench.raw(slow));
            alone.0.push(bench.ours(slow, 1));
            alone.1.extend(bench.theirs(slow, 1));
            full.0.push(bench.ours(slow, CLIENTS));
            full.1.extend(bench.theirs(slow, CLIENTS));
        }
        println!(
            "\n== {} ({runs} rounds of {} s in turns, medians)",
            if slow { "1 ms added to every flush" } else { "this disk as it is" },
            bench.seconds
        );
        println!(
            "raw append+fdatasync          {:9.0} /s   p50 {:.3} ms   p99 {:.3} ms",
            median(&raw, "per_s"),
            median(&raw, "p50_ms"),
            median(&raw, "p99_ms")
        );
        for (name, rows) in [
            ("ours,  1 client", &alone.0),
            ("peer,  1 client", &alone.1),
            ("ours, 64 clients", &full.0),
            ("peer, 64 clients", &full.1),
        ] {
            print!(
                "{name:<30}{:9.0} /s   p50 {:.3} ms   p99 {:.3} ms",
                median(rows, "per_s"),
                median(rows, "p50_ms"),
                median(rows, "p99_ms")
            );
            if rows.iter().any(|r| r.contains_key("acks_per_flush")) {
                print!(
                    "   {:.1} acks a flush, {:.0} flushes/s, {:.0} ledger units/s",
                    median(rows, "acks_per_flush"),
                    median(rows, "flushes_per_s"),
                    median(rows, "units_per_s")
                );
            }
            println!();
        }
        println!(
            "ratios: acks/s at 64 against the peer {:.2} x · p50 alone against raw {:.2} x, against the peer {:.2} x · p99 at 64 {:.1} ms against the peer's p50 {:.1} ms",
            median(&full.0, "per_s") / median(&full.1, "per_s"),
            median(&alone.0, "p50_ms") / median(&raw, "p50_ms"),
            median(&alone.0, "p50_ms") / median(&alone.1, "p50_ms"),
            median(&full.0, "p99_ms"),
            median(&full.1, "p50_ms"),
        );
        let rounds = |rows: &[Row]| rows.iter().map(|r| format!("{:.0}", r["per_s"])).collect::<Vec<_>>().join(" ");
        println!("rounds at 64: ours {} · peer {}", rounds(&full.0), rounds(&full.1));
    }
}
