//! Speed of the gate beside bare tiny_http and Fastify, in one run: `scripts/bench-gate`.
//!
//! Every server and every load is a process of its own (this binary in another role), so that a thread list, a resident
//! size and a CPU belong to one of them. Rounds alternate between the servers, because the machine may be shared: read
//! the ratios, not the figures. `wrk` is run too when it is there, as a client that is not ours.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement fails loudly and prints")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beebox_chatd::error::Result;
use beebox_chatd::http::gate::exchange::Exchanges;
use beebox_chatd::http::gate::{self, GateConfig, Limits, Local};
use beebox_chatd::http::reply::{Body, Reply};
use beebox_chatd::http::route::Route;
use beebox_chatd::http::server::{self, Handler, Incoming, ServerConfig};
use rustix::event::epoll::{self, EventData, EventFlags};

const WORKERS: usize = 8;
const SMALL: &str = "/api/chat/sessions";
const LARGE: &str = "/api/chat/status?session=a";
const HUGE: &str = "/api/session-media/s/e/0";

fn main() {
    raise_descriptors();
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["serve-gate", workers] => serve_gate(workers.parse().unwrap(), None),
        ["serve-gate", workers, waiting] => serve_gate(workers.parse().unwrap(), waiting.parse().ok()),
        ["serve-bare"] => serve_bare(),
        ["load", address, path, connections, ms] => {
            let load = load(address.parse().unwrap(), path, connections.parse().unwrap(), ms.parse().unwrap());
            println!("{}", load.line());
        }
        ["hostile", address, slow, unread] => {
            hostile(address.parse().unwrap(), slow.parse().unwrap(), unread.parse().unwrap())
        }
        ["idle", address, count] => hold_idle(address.parse().unwrap(), count.parse().unwrap()),
        [] => report(10, 1),
        ["quick"] => report(2, 1),
        ["rounds", rounds, seconds] => report(rounds.parse().unwrap(), seconds.parse().unwrap()),
        other => panic!("unknown role {other:?}"),
    }
}

fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}

// ---- servers

fn small() -> Vec<u8> {
    format!("{{\"ok\":\"{}\"}}", "x".repeat(191)).into_bytes()
}

struct Fixed;

impl Handler for Fixed {
    #[expect(clippy::wildcard_enum_match_arm, reason = "three routes are measured")]
    fn answer(&self, incoming: Incoming) -> Result<Reply> {
        Ok(match incoming.route {
            Route::Sessions => Reply::json_bytes(200, small()),
            Route::Status { .. } => Reply::json_bytes(200, vec![b'x'; 3000]),
            _ => {
                let mut reply = Reply::empty(200);
                reply.body = Body::Reader { reader: Box::new(std::io::repeat(b'x')), len: 8 << 20 };
                reply
            }
        })
    }
}

impl Local for Fixed {
    fn ready(&self) -> std::result::Result<(), String> {
        Ok(())
    }
    fn metrics(&self, _: &mut String) {}
    fn debug_threads(&self) -> String {
        String::new()
    }
}

fn serve_gate(workers: usize, waiting: Option<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let exchanges = Exchanges::new().unwrap();
    let mut limits = Limits::default();
    limits.waiting_max = waiting.unwrap_or(limits.waiting_max);
    let socket = dir.path().join("http.sock");
    let config = ServerConfig { socket: socket.clone(), workers, waiting: limits.waiting_max };
    let _server = server::start(&config, Arc::new(Fixed), exchanges.clone()).unwrap();
    let config = GateConfig {
        listen: "127.0.0.1:0".parse().unwrap(),
        chat_socket: None,
        http_socket: socket,
        agents: 3,
        state_dir: dir.path().to_owned(),
        public_url: None,
        token: None,
        workers,
        limits,
        exchanges,
    };
    let gate = gate::start(config, Arc::new(Fixed), Arc::new(|_| {})).unwrap();
    println!("{}", gate.address());
    until_stdin_ends();
}

#[expect(clippy::disallowed_methods, reason = "the bare server that is measured beside ours")]
fn serve_bare() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Accepted sockets inherit it; tiny_http itself cannot set it.
    rustix::net::sockopt::set_tcp_nodelay(&listener, true).unwrap();
    println!("{}", listener.local_addr().unwrap());
    let server = Arc::new(tiny_http::Server::from_listener(listener, None).unwrap());
    for _ in 0..WORKERS {
        let server = server.clone();
        std::thread::spawn(move || {
            while let Ok(request) = server.recv() {
                let body = if request.url() == SMALL { small() } else { vec![b'x'; 3000] };
                let json = tiny_http::Header::from_bytes("Content-Type", "application/json").unwrap();
                let _ = request.respond(tiny_http::Response::from_data(body).with_header(json));
            }
        });
    }
    until_stdin_ends();
}

fn until_stdin_ends() {
    let _ = std::io::stdin().read(&mut [0]);
}

struct Running {
    child: Child,
    address: SocketAddr,
}

impl Running {
    fn role(args: &[&str]) -> Self {
        let mut child = me(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let address = first_line(&mut child).trim().parse().unwrap();
        Self { child, address }
    }

    /// The peer, when node and its modules are there.
    fn fastify() -> Option<Self> {
        let peer = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench/peers");
        if !peer.join("node_modules/fastify").exists() {
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut child = Command::new("node")
            .args(["http.js", &port.to_string(), "200"])
            .current_dir(peer)
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        first_line(&mut child);
        Some(Self { child, address: SocketAddr::from(([127, 0, 0, 1], port)) })
    }

    fn rss_kib(&self) -> u64 {
        self.status("VmRSS:")
    }

    fn threads(&self) -> u64 {
        self.status("Threads:")
    }

    fn status(&self, key: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(key)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn me(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(args);
    command
}

fn first_line(child: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    line
}

// ---- load

struct Load {
    per_second: f64,
    p50_us: u64,
    p99_us: u64,
    max_us: u64,
    stranded: usize,
}

impl Load {
    fn line(&self) -> String {
        format!("{} {} {} {} {}", self.per_second, self.p50_us, self.p99_us, self.max_us, self.stranded)
    }

    fn parse(line: &str) -> Self {
        let f: Vec<f64> = line.split_whitespace().map(|w| w.parse().unwrap()).collect();
        Self {
            per_second: f[0],
            p50_us: f[1] as u64,
            p99_us: f[2] as u64,
            max_us: f[3] as u64,
            stranded: f[4] as usize,
        }
    }
}

struct Wire {
    stream: TcpStream,
    sent: Instant,
    got: usize,
    whole: usize,
}

/// A closed loop over keep-alive connections on one thread, as wrk does it. Connections are opened one after another,
/// each with a first request, so that a server that strands bursts can be measured too.
fn load(address: SocketAddr, path: &str, connections: usize, ms: u64) -> Load {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let mut wires = Vec::new();
    let mut stranded = 0;
    let mut buffer = vec![0; 1 << 16];
    for at in 0..connections {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => {}
            Ok(_) | Err(_) => {
                stranded += 1;
                continue;
            }
        }
        stream.set_nonblocking(true).unwrap();
        while stream.read(&mut buffer).is_ok_and(|n| n > 0) {}
        std::thread::sleep(Duration::from_millis(1));
        while stream.read(&mut buffer).is_ok_and(|n| n > 0) {}
        epoll::add(&epoll, &stream, EventData::new_u64((at - stranded) as u64), EventFlags::IN).unwrap();
        wires.push(Wire { stream, sent: Instant::now(), got: 0, whole: 0 });
    }
    let started = Instant::now();
    let until = started + Duration::from_millis(ms);
    for wire in &mut wires {
        wire.sent = Instant::now();
        wire.stream.write_all(request.as_bytes()).unwrap();
    }
    let mut took = Vec::with_capacity(1 << 20);
    let mut events = Vec::with_capacity(256);
    let second = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
    while Instant::now() < until && !wires.is_empty() {
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&second)).unwrap();
        for event in events.drain(..) {
            let wire = &mut wires[event.data.u64() as usize];
            let Ok(n) = wire.stream.read(&mut buffer) else {
                continue;
            };
            assert!(n > 0, "the server closed");
            if wire.got == 0 {
                wire.whole = whole_length(&buffer[..n]);
            }
            wire.got += n;
            if wire.got >= wire.whole {
                let now = Instant::now();
                took.push((now - wire.sent).as_micros() as u32);
                wire.got = 0;
                wire.sent = now;
                wire.stream.write_all(request.as_bytes()).unwrap();
            }
        }
    }
    let elapsed = started.elapsed().as_secs_f64();
    took.sort_unstable();
    let at = |share: f64| {
        u64::from(
            took.get(((took.len() as f64 * share) as usize).min(took.len().saturating_sub(1))).copied().unwrap_or(0),
        )
    };
    Load { per_second: took.len() as f64 / elapsed, p50_us: at(0.5), p99_us: at(0.99), max_us: at(1.0), stranded }
}

fn whole_length(bytes: &[u8]) -> usize {
    let head = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a whole head in the first read") + 4;
    let text = std::str::from_utf8(&bytes[..head]).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    let length =
        text.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok());
    head + length.expect("a length")
}

fn run_load(address: SocketAddr, path: &str, connections: usize, ms: u64) -> Load {
    let out = me(&["load", &address.to_string(), path, &connections.to_string(), &ms.to_string()]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Load::parse(&String::from_utf8(out.stdout).unwrap())
}

/// Requests per second and p99 in microseconds, by wrk.
fn run_wrk(address: SocketAddr, path: &str, connections: usize, seconds: u64) -> Option<(f64, u64)> {
    let out = Command::new("wrk")
        .args([
            "-t1",
            &format!("-c{connections}"),
            &format!("-d{seconds}s"),
            "--latency",
            &format!("http://{address}{path}"),
        ])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let word =
        |key: &str| text.lines().find_map(|l| l.trim().strip_prefix(key)?.split_whitespace().next().map(str::to_owned));
    let p99 = word("99%")?;
    let (number, unit) = p99.split_at(p99.find(|c: char| c.is_ascii_alphabetic())?);
    let scale = match unit {
        "us" => 1.0,
        "ms" => 1e3,
        _ => 1e6,
    };
    Some((word("Requests/sec:")?.parse().ok()?, (number.parse::<f64>().ok()? * scale) as u64))
}

/// Clients that trickle heads and bodies, and clients that ask for 8 MiB and read nothing.
fn hostile(address: SocketAddr, slow: usize, unread: usize) {
    let mut wires: Vec<OwnedFd> = Vec::new();
    let mut trickle = Vec::new();
    for at in 0..slow {
        let Ok(mut stream) = TcpStream::connect(address) else {
            continue;
        };
        let _ = if at % 2 == 0 {
            write!(stream, "GET / HTTP/1.1\r\nX-Slow: ")
        } else {
            write!(
                stream,
                "POST /api/chat/send HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
            )
        };
        trickle.push(stream);
    }
    for _ in 0..unread {
        let Ok(mut stream) = TcpStream::connect(address) else {
            continue;
        };
        let _ = write!(stream, "GET {HUGE} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        wires.push(stream.into());
    }
    println!("{} {}", trickle.len(), wires.len());
    let _ = std::io::stdout().flush();
    loop {
        for stream in &mut trickle {
            let _ = stream.write(b"a");
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn hold_idle(address: SocketAddr, count: usize) {
    let request = format!("GET {SMALL} HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let mut wires = Vec::new();
    let mut buffer = [0; 4096];
    for _ in 0..count {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        assert!(stream.read(&mut buffer).unwrap() > 0);
        wires.push(stream);
    }
    println!("{}", wires.len());
    until_stdin_ends();
}

// ---- the report

/// One figure over all rounds, for one server.
#[derive(Default, Clone)]
struct Figure(Vec<f64>);

impl Figure {
    fn sorted(&self) -> Vec<f64> {
        let mut values = self.0.clone();
        values.sort_by(f64::total_cmp);
        values
    }

    fn median(&self) -> f64 {
        self.sorted().get(self.0.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// The round that the neighbours on the machine disturbed least.
    fn best(&self, less: bool) -> f64 {
        let values = self.sorted();
        let best = if less { values.first() } else { values.last() };
        best.copied().unwrap_or(f64::NAN)
    }
}

const ROWS: [(&str, bool); 6] = [
    ("requests/s, 64 connections", false),
    ("p99 us, 64 connections", true),
    ("requests/s, 64 connections, wrk", false),
    ("p99 us, 64 connections, wrk", true),
    ("p50 us, 1 connection", true),
    ("p99 us, 3 kB, 1 connection", true),
];

fn verdict(name: &str, value: f64, goal: f64, less: bool) {
    let good = if less { value <= goal } else { value >= goal };
    let sign = if less { "<=" } else { ">=" };
    let word = if good { "met" } else { "MISSED" };
    println!("{name:<44}{value:>9.2}  {sign} {goal:<6} {word}");
}

fn report(rounds: usize, seconds: u64) {
    let ours = Running::role(&["serve-gate", &WORKERS.to_string()]);
    let bare = Running::role(&["serve-bare"]);
    let peer = Running::fastify();
    if peer.is_none() {
        println!("(no Fastify: run npm install in tests/bench/peers)");
    }
    let servers = [Some((&ours, SMALL)), Some((&bare, SMALL)), peer.as_ref().map(|p| (p, "/"))];
    let mut table: [[Figure; ROWS.len()]; 3] = Default::default();
    let ms = seconds * 1000;
    for _ in 0..rounds {
        // Short windows in turn: the shorter, the likelier that one of them falls between the neighbours' work.
        for _ in 0..4 {
            for (at, server) in servers.iter().enumerate() {
                let Some((server, path)) = server else {
                    continue;
                };
                let many = run_load(server.address, path, 64, ms / 4);
                if many.stranded > 0 {
                    println!("(server {at}: {} of 64 connections were never answered)", many.stranded);
                }
                table[at][0].0.push(many.per_second);
                table[at][1].0.push(many.p99_us as f64);
                table[at][4].0.push(run_load(server.address, path, 1, ms / 10).p50_us as f64);
            }
        }
        for (at, server) in servers.iter().enumerate() {
            let Some((server, path)) = server else {
                continue;
            };
            // Bare tiny_http strands most of wrk's burst of connections, so that its figure would mean nothing.
            if at != 1
                && let Some((per_second, p99)) = run_wrk(server.address, path, 64, seconds)
            {
                table[at][2].0.push(per_second);
                table[at][3].0.push(p99 as f64);
            }
            if at != 2 {
                table[at][5].0.push(run_load(server.address, LARGE, 1, ms / 2).p99_us as f64);
            }
        }
    }
    let cpus = std::thread::available_parallelism().unwrap();
    println!("{rounds} rounds of {seconds} s, {WORKERS} workers, {cpus} CPUs; best round (median)");
    println!("{:<34}{:>18}{:>18}{:>18}", "", "gate", "bare", "fastify");
    for (row, (name, less)) in ROWS.iter().enumerate() {
        let cell = |at: usize| format!("{:.0} ({:.0})", table[at][row].best(*less), table[at][row].median());
        println!("{name:<34}{:>18}{:>18}{:>18}", cell(0), cell(1), cell(2));
    }
    println!();
    let best = |at: usize, row: usize| table[at][row].best(ROWS[row].1);
    verdict("requests/s over Fastify", best(0, 0) / best(2, 0), 1.0, false);
    verdict("requests/s over Fastify, wrk", best(0, 2) / best(2, 2), 1.0, false);
    verdict("requests/s over bare tiny_http", best(0, 0) / best(1, 0), 0.6, false);
    verdict("p99 over Fastify", best(0, 1) / best(2, 1), 1.0, true);
    verdict("p99 over Fastify, wrk", best(0, 3) / best(2, 3), 1.0, true);
    verdict("added p50 us at 1 connection over bare", best(0, 4) - best(1, 4), 60.0, true);
    verdict("3 kB p99 ms", best(0, 5) / 1000.0, 5.0, true);
    drop((bare, peer));

    crowd(&ours, "5000 idle clients", &["idle", &ours.address.to_string(), "5000"], rounds, seconds, 2.0);
    crowd(
        &ours,
        "1000 slowloris and 500 non-readers",
        &["hostile", &ours.address.to_string(), "1000", "500"],
        rounds,
        seconds,
        5.0,
    );
}

/// A good load of 16 connections before and beside a crowd.
fn crowd(ours: &Running, name: &str, role: &[&str], rounds: usize, seconds: u64, goal: f64) {
    let p99s = |count: usize| {
        let mut calm = Figure::default();
        for _ in 0..count {
            calm.0.push(run_load(ours.address, SMALL, 16, seconds * 500).p99_us as f64);
        }
        calm
    };
    let calm = p99s(rounds);
    let (threads, rss) = (ours.threads(), ours.rss_kib());
    let mut crowd = me(role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let held = first_line(&mut crowd);
    let arriving = run_load(ours.address, SMALL, 16, seconds * 1000).p99_us;
    let beside = p99s(rounds);
    let (threads_then, rss_then) = (ours.threads(), ours.rss_kib());
    println!(
        "\n{name} (held: {}); p99 us of 16 others, best (median): {:.0} ({:.0}) -> {:.0} ({:.0}), {arriving} while it arrives",
        held.trim(),
        calm.best(true),
        calm.median(),
        beside.best(true),
        beside.median(),
    );
    println!("threads {threads} -> {threads_then}, RSS {rss} -> {rss_then} KiB");
    verdict("added threads", threads_then as f64 - threads as f64, 0.0, true);
    if role[0] == "idle" {
        verdict("KiB per idle client", (rss_then as f64 - rss as f64) / 5000.0, 2.0, true);
    }
    verdict("p99 of the others, ratio of best", beside.best(true) / calm.best(true), goal, true);
    verdict("p99 of the others, ratio of median", beside.median() / calm.median(), goal, true);
    let _ = crowd.kill();
    let _ = crowd.wait();
}
