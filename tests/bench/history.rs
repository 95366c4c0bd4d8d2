//! Measures reading transcripts against what such servers do today (`peers/history.js`) and against a plain read of the
//! same file. `scripts/bench-history` runs it; the table it prints is the one in the README.
//!
//! Every figure is the median of runs in turns, files in the page cache, the answer serialized to JSON on our side as
//! on the peer's. Memory is measured in fresh processes of this same program.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measuring program: it prints, and fails loudly")]

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use beebox_chatd::archive::Archive;
use beebox_chatd::ids::SessionId;
use beebox_chatd::transcript::{MediaRef, Window};

const BOX: &str = "/srv/bench-box";
const TAIL: Window = Window::Tail { tail: 200, min_real_user_messages: 2 };
/// The 15.5 MB file: 1,587 lines, 14 of them over 1 MB.
const LINES: usize = 1587;
const PHOTO_LINES: usize = 14;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["rss", kind, home] => rss(kind, Path::new(home)),
        ["run", home, big_mb, peers] => run(Path::new(home), big_mb.parse().unwrap(), Path::new(peers)),
        _ => println!("usage: scripts/bench-history [--big-mb N] [--peers DIR]"),
    }
}

fn folder(home: &Path) -> PathBuf {
    home.join("projects").join(beebox_chatd::transcript::slug(BOX))
}

fn archive(home: &Path) -> Archive {
    Archive::new(home, Path::new(BOX), Vec::new())
}

fn id(name: &str) -> SessionId {
    SessionId::parse(name).unwrap()
}

/// Some letters that compress badly, the same in every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn base64(&mut self, len: usize) -> String {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut out = String::with_capacity(len + 10);
        while out.len() < len {
            let mut word = self.next();
            for _ in 0..10 {
                out.push(char::from(LETTERS[(word & 63) as usize]));
                word >>= 6;
            }
        }
        out.truncate(len / 4 * 4);
        out
    }

    fn words(&mut self, len: usize) -> String {
        const WORDS: [&str; 8] = ["lorem", "ipsum", "dolor", "\\\"sit\\\"", "amet,\\n", "consectetur", "größe", "elit"];
        let mut out = String::new();
        while out.len() < len {
            out.push_str(WORDS[(self.next() & 7) as usize]);
            out.push(' ');
        }
        out
    }
}

/// Writes a conversation of about `bytes` in the mix that the real program leaves.
fn generate(path: &Path, bytes: u64) {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path).unwrap());
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let photos: Vec<String> = (0..4).map(|_| noise.base64(1_048_576)).collect();
    let (mut done, mut line) = (0_u64, 0_usize);
    while done < bytes {
        let n = line % LINES;
        let tail = format!(
            "\"timestamp\":\"2026-12-01T02:20:{:02}.{:03}Z\",\"cwd\":\"{BOX}\",\"sessionId\":\"s\",\"version\":\"2.1.332\",\"gitBranch\":\"\"}}\n",
            line % 60,
            line % 1000
        );
        let uuid = format!("{:08x}-0000-4000-8000-{:012x}", line, noise.next() & 0xffff_ffff_ffff);
        let text = if n % (LINES / PHOTO_LINES) == 40 && n / (LINES / PHOTO_LINES) < PHOTO_LINES {
            let photo = &photos[n / (LINES / PHOTO_LINES) % photos.len()];
            if n.is_multiple_of(2) {
                format!(
                    "{{\"parentUuid\":null,\"isSidechain\":false,\"type\":\"user\",\"message\":{{\"role\":\"user\",\"content\":[{{\"type\":\"image\",\"source\":{{\"type\":\"base64\",\"media_type\":\"image/png\",\"data\":\"{photo}\"}}}},{{\"type\":\"text\",\"text\":\"look\"}}]}},\"uuid\":\"{uuid}\",{tail}"
                )
            } else {
                format!(
                    "{{\"type\":\"api-request-blob\",\"hash\":\"{uuid}\",\"message\":{{\"role\":\"user\",\"content\":[{{\"type\":\"image\",\"source\":{{\"type\":\"base64\",\"media_type\":\"image/png\",\"data\":\"{photo}\"}}}}]}},\"sessionId\":\"s\"}}\n"
                )
            }
        } else {
            match n % 4 {
                0 => {
                    let words = noise.words(300);
                    format!(
                        "{{\"parentUuid\":null,\"isSidechain\":false,\"promptId\":\"p\",\"type\":\"user\",\"message\":{{\"role\":\"user\",\"content\":\"{words}\"}},\"uuid\":\"{uuid}\",{tail}"
                    )
                }
                1 => format!(
                    "{{\"type\":\"last-prompt\",\"lastPrompt\":\"{}\",\"leafUuid\":\"{uuid}\",\"sessionId\":\"s\"}}\n",
                    noise.words(100)
                ),
                2 => {
                    let words = noise.words(900);
                    format!(
                        "{{\"parentUuid\":null,\"isSidechain\":false,\"message\":{{\"id\":\"msg_1\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"m\",\"content\":[{{\"type\":\"text\",\"text\":\"{words}\"}}],\"stop_reason\":\"end_turn\",\"usage\":{{\"input_tokens\":1,\"output_tokens\":2}}}},\"type\":\"assistant\",\"uuid\":\"{uuid}\",{tail}"
                    )
                }
                _ => {
                    let words = noise.words(200);
                    format!(
                        "{{\"parentUuid\":null,\"isSidechain\":false,\"message\":{{\"id\":\"msg_1\",\"role\":\"assistant\",\"model\":\"m\",\"content\":[{{\"type\":\"tool_use\",\"id\":\"toolu_{line}\",\"name\":\"Bash\",\"input\":{{\"command\":\"{words}\",\"description\":\"x\"}}}}]}},\"type\":\"assistant\",\"uuid\":\"{uuid}\",{tail}"
                    )
                }
            }
        };
        out.write_all(text.as_bytes()).unwrap();
        done += text.len() as u64;
        line += 1;
    }
    out.flush().unwrap();
}

fn generate_long_line(path: &Path, bytes: usize) {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path).unwrap());
    let mut noise = Noise(7);
    let words = noise.words(1 << 20);
    write!(out, "{{\"type\":\"user\",\"message\":{{\"role\":\"user\",\"content\":\"").unwrap();
    for _ in 0..bytes / words.len() {
        out.write_all(words.as_bytes()).unwrap();
    }
    writeln!(out, "\"}},\"uuid\":\"long\",\"timestamp\":\"2026-12-01T02:20:18.495Z\"}}").unwrap();
    for n in 0..1000 {
        writeln!(out, "{{\"type\":\"user\",\"message\":{{\"role\":\"user\",\"content\":\"{}\"}},\"uuid\":\"u{n}\",\"timestamp\":\"2026-12-01T02:20:18.495Z\"}}", noise.words(500)).unwrap();
    }
    out.flush().unwrap();
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn time<T>(f: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let out = f();
    (start.elapsed().as_secs_f64(), out)
}

fn answer(archive: &Archive, session: &SessionId) -> usize {
    serde_json::to_vec(&archive.history(session, TAIL).unwrap()).unwrap().len()
}

/// What a plain read of the whole file costs.
fn pread(path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    let mut buffer = vec![0; 256 * 1024];
    let (mut at, mut sum) = (0, 0_u64);
    loop {
        let n = file.read_at(&mut buffer, at).unwrap();
        if n == 0 {
            return sum;
        }
        at += n as u64;
        sum = sum.wrapping_add(u64::from(buffer[n - 1])).wrapping_add(n as u64);
    }
}

/// Seconds, total and peak memory of the peer.
fn peer(peers: &Path, file: &Path) -> Option<(f64, u64, u64)> {
    let out = Command::new("node").arg(peers.join("history.js")).arg(file).output().ok()?;
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).ok()?;
    Some((value["seconds"].as_f64()?, value["total"].as_u64()?, value["peakRssKiB"].as_u64()?))
}

fn row(what: &str, measured: String, goal: &str, met: bool) {
    println!("| {what} | {measured} | {goal} | {} |", if met { "met" } else { "missed" });
}

fn run(home: &Path, big_mb: u64, peers: &Path) {
    fs::create_dir_all(folder(home)).unwrap();
    let file = |name: &str| folder(home).join(format!("{name}.jsonl"));
    generate(&file("small"), 15_500_000);
    generate(&file("big"), big_mb * 1_000_000);
    generate_long_line(&file("long"), 100_000_000);
    let bytes = |name: &str| fs::metadata(file(name)).unwrap().len() as f64;
    println!("| what | measured | goal | |\n|---|---|---|---|");

    let (small, big) = (id("small"), id("big"));
    let (mut ours, mut theirs, mut node) = (Vec::new(), Vec::new(), None);
    for _ in 0..5 {
        ours.push(time(|| answer(&archive(home), &small)).0);
        node = peer(peers, &file("small"));
        theirs.extend(node.map(|(seconds, ..)| seconds));
    }
    let first = median(ours);
    let rate = bytes("small") / first / 1e9;
    match node {
        Some((_, _, peak)) => {
            let times = median(theirs.clone()) / first;
            row(
                &format!("first tail-200, {:.1} MB", bytes("small") / 1e6),
                format!(
                    "{:.2} ms = {rate:.2} GB/s; Node {:.0} ms, peak {} MiB: {times:.0} x",
                    first * 1e3,
                    median(theirs) * 1e3,
                    peak / 1024
                ),
                ">= 30 x Node, >= 1 GB/s",
                times >= 30.0 && rate >= 1.0,
            );
        }
        None => row(
            "first tail-200, 15.5 MB",
            format!("{:.2} ms = {rate:.2} GB/s; no Node here", first * 1e3),
            ">= 1 GB/s",
            rate >= 1.0,
        ),
    }

    let (mut scans, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        plain.push(time(|| pread(&file("big"))).0);
        scans.push(time(|| answer(&archive(home), &big)).0);
    }
    let (scan, read) = (median(scans), median(plain));
    row(
        &format!("first tail-200, {:.2} GB", bytes("big") / 1e9),
        format!(
            "{:.0} ms = {:.2} GB/s; pread {:.2} GB/s: {:.2} x",
            scan * 1e3,
            bytes("big") / scan / 1e9,
            bytes("big") / read / 1e9,
            read / scan
        ),
        ">= 0.35 x pread",
        read / scan >= 0.35,
    );

    let warm_archive = archive(home);
    let warm = |session: &SessionId| {
        answer(&warm_archive, session);
        median((0..300).map(|_| time(|| answer(&warm_archive, session)).0).collect())
    };
    let (warm_small, warm_big) = (warm(&small), warm(&big));
    row(
        "warm tail-200",
        format!("{:.2} ms p50 ({:.2} ms for the small file)", warm_big * 1e3, warm_small * 1e3),
        "<= 1.5 x the small file, <= 2 ms",
        warm_big <= 1.5 * warm_small && warm_big <= 0.002,
    );

    let after: Vec<f64> = (0..50)
        .map(|n| {
            let mut out = OpenOptions::new().append(true).open(file("big")).unwrap();
            writeln!(out, "{{\"type\":\"user\",\"message\":{{\"role\":\"user\",\"content\":\"one more\"}},\"uuid\":\"more-{n}\",\"timestamp\":\"x\"}}").unwrap();
            time(|| answer(&warm_archive, &big)).0
        })
        .collect();
    let after = median(after);
    row("after 1 line was appended", format!("{:.2} ms p50", after * 1e3), "<= warm + 1 ms", after <= warm_big + 0.001);

    for (kind, what) in
        [("big", "8 readers of the large file, first"), ("long", "8 readers of a file with a 100 MB line, first")]
    {
        let grown = child(kind, home);
        row(
            &format!("memory: {what}"),
            format!("{:.1} MiB over idle", grown / 1024.0),
            "<= 16 MiB",
            grown <= 16.0 * 1024.0,
        );
    }

    let photo = last_photo(&warm_archive, &big);
    let one = |reference: &MediaRef| {
        let photo = warm_archive.media(reference).unwrap();
        let mut out = photo.open(0, photo.len).unwrap();
        std::io::copy(&mut out, &mut std::io::sink()).unwrap()
    };
    let mut sent = 0;
    let media = median((0..100).map(|_| time(|| sent = one(&photo)).0).collect());
    row(
        "a 1 MB photo of the large file, warm",
        format!("{:.2} ms to the last of {sent} bytes", media * 1e3),
        "<= 3 ms",
        media <= 0.003,
    );
    let grown = child("media", home) / 200.0;
    row("memory: 200 photos at once", format!("{grown:.0} KiB a request"), "<= 256 KiB a request", grown <= 256.0);

    let (first, again, labels) = list(home);
    row(
        "first 50 of 5,000 conversations",
        format!("{:.1} ms, then {:.1} ms; {labels} with a label", first * 1e3, again * 1e3),
        "without reading whole files",
        labels == 50,
    );

    let (lines, index) = warm_archive.index_size(&big).unwrap();
    let per_line = index as f64 / lines as f64;
    row(
        "index of the large file",
        format!(
            "{:.1} bytes a line of {lines}, {:.2} MiB; all {:.2} MiB",
            per_line,
            index as f64 / 1048576.0,
            warm_archive.index_bytes() as f64 / 1048576.0
        ),
        "<= 40 bytes a line, <= 8 MiB, <= 64 MiB in all",
        per_line <= 40.0 && index <= 8 << 20 && warm_archive.index_bytes() <= 64 << 20,
    );
}

/// The list of conversations in a folder of its own with 5,000 of them.
fn list(home: &Path) -> (f64, f64, usize) {
    let home = home.join("many");
    fs::create_dir_all(folder(&home)).unwrap();
    for n in 0..5000 {
        let line = format!(
            "{{\"type\":\"user\",\"message\":{{\"content\":\"question {n}\"}},\"uuid\":\"u\",\"cwd\":\"{BOX}\"}}\n"
        );
        fs::write(folder(&home).join(format!("session-{n}.jsonl")), line).unwrap();
    }
    let archive = archive(&home);
    let (first, rows) = time(|| archive.list(50));
    let again = median((0..10).map(|_| time(|| archive.list(50)).0).collect());
    (first, again, rows.iter().filter(|r| r.label.is_some()).count())
}

/// The photo that is nearest to the end.
fn last_photo(archive: &Archive, session: &SessionId) -> MediaRef {
    let page = archive.history(session, Window::Tail { tail: 2000, min_real_user_messages: 0 }).unwrap();
    let text = serde_json::to_string(&page).unwrap();
    let at = text.rfind("\"imageRef\":\"").unwrap() + 12;
    MediaRef::parse(&text[at..at + text[at..].find('"').unwrap()]).unwrap()
}

/// Growth of memory in KiB, in a fresh process.
fn child(kind: &str, home: &Path) -> f64 {
    let out = Command::new(std::env::current_exe().unwrap()).args(["rss", kind]).arg(home).output().unwrap();
    String::from_utf8(out.stdout).unwrap().trim().parse().unwrap()
}

fn status(key: &str) -> f64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn rss(kind: &str, home: &Path) {
    let archive = archive(home);
    let idle = if kind == "media" {
        let photo = last_photo(&archive, &id("big"));
        let _ = archive.media(&photo).unwrap();
        let idle = status("VmRSS:");
        at_once(200, || {
            let photo = archive.media(&photo).unwrap();
            let mut out = photo.open(0, photo.len).unwrap();
            let mut some = vec![0; 16 * 1024];
            out.read_exact(&mut some).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            std::io::copy(&mut out, &mut std::io::sink()).unwrap();
        });
        idle
    } else {
        let idle = status("VmRSS:");
        at_once(8, || {
            let _ = answer(&archive, &id(kind));
        });
        idle
    };
    println!("{}", status("VmHWM:") - idle);
}

fn at_once(readers: usize, f: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..readers)
            .map(|_| std::thread::Builder::new().stack_size(256 * 1024).spawn_scoped(scope, &f).unwrap())
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    });
}
