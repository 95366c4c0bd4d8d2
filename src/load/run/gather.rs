//! Before and after the clients: the archive, the conversations, settling, evidence, the look for leaks.
//! Rule a change could break: cursor first, then what is pending, then transcripts, so that no message is in neither.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Host, World, person};
use crate::load::checker::disk::{Disk, Transcript, UserLine};
use crate::load::checker::{self, EventLog, Evidence, Pending, Sent, Slack, Try, Violation, mark};
use crate::load::events::{Follower, OrderCheck};
use crate::load::png;
use crate::load::proc::Usage;
use crate::load::scenario::ArchivePlan;

/// The session that a written archive is.
pub const ARCHIVE_SESSION: &str = "archive";
/// Distance of two looks at a server that settles.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the idle server may take to give back what it held for clients.
const BACK_WITHIN: Duration = Duration::from_secs(20);
/// How long a server may take to hold still after its start, and how often it must look the same.
const STILL_WITHIN: Duration = Duration::from_secs(10);
const STILL_LOOKS: u32 = 5;
/// Photos made once and used again and again in an archive.
const ARCHIVE_PHOTOS: u64 = 8;

/// Writes a transcript as the agent would, of about so many MiB; one that is there already is kept.
pub fn write_archive(home: &Path, box_dir: &Path, plan: ArchivePlan, seed: u64) -> io::Result<()> {
    let cwd = box_dir.to_string_lossy();
    let slug: String = cwd.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let dir = home.join("projects").join(slug);
    std::fs::create_dir_all(&dir)?;
    let path = dir.join(format!("{ARCHIVE_SESSION}.jsonl"));
    let size = plan.mib * 1024 * 1024;
    if std::fs::metadata(&path).is_ok_and(|m| m.len() >= size) {
        return Ok(());
    }
    let photos: Vec<String> = (0..ARCHIVE_PHOTOS)
        .map(|n| {
            let bytes = png::of_bytes(plan.photo_kib * 1024, seed ^ n);
            base64_simd::STANDARD.encode_to_string(bytes)
        })
        .collect();
    let mut out = BufWriter::with_capacity(1 << 20, std::fs::File::create(&path)?);
    let (mut written, mut n) = (0u64, 0u64);
    let mut parent = Value::Null;
    while written < size {
        let uuid = format!("00000000-0000-4000-8000-{n:012x}");
        let text = format!("line {n} of the archive: {}", "lorem ipsum dolor sit amet ".repeat(12));
        let stamp = crate::clock::rfc3339(1_700_000_000_000 + i64::try_from(n).unwrap_or(0) * 1000);
        let from_person = n.is_multiple_of(2);
        let with_photo = plan.photos_every > 0 && from_person && (n / 2).is_multiple_of(plan.photos_every);
        let mut content = vec![json!({ "type": "text", "text": text })];
        if with_photo {
            let data = &photos[(n % ARCHIVE_PHOTOS) as usize];
            let source = json!({ "type": "base64", "media_type": "image/png", "data": data });
            content.push(json!({ "type": "image", "source": source }));
        }
        let kind = if from_person { "user" } else { "assistant" };
        let line = json!({
            "parentUuid": parent, "isSidechain": false, "type": kind,
            "message": { "role": kind, "content": content },
            "uuid": uuid, "timestamp": stamp, "cwd": cwd, "sessionId": ARCHIVE_SESSION, "version": "2.1.332",
        })
        .to_string();
        out.write_all(line.as_bytes())?;
        out.write_all(b"\n")?;
        written += line.len() as u64 + 1;
        parent = uuid.into();
        n += 1;
    }
    out.flush()
}

/// Uses the server a little and waits until it holds still; how it looks then, if its process is known.
pub fn warm_up(world: &World, host: &Host) -> io::Result<Option<Usage>> {
    let limit = world.answer_within();
    for cursor in [None, Some("0")] {
        let mut follower = follower(world);
        follower.open(cursor, limit)?;
        follower.next(limit)?;
    }
    let mut client = world.client();
    for path in ["/healthz", "/api/chat/sessions", "/api/chat/bootstrap"] {
        client.get(path)?;
    }
    if host.spawned.is_some() {
        // One conversation, from its first word to its end, passes every room of the server.
        let session = make_session(world, "warm-up")?;
        settle(world).map_err(|why| io::Error::new(io::ErrorKind::TimedOut, why))?;
        client.get(&format!("/api/chat/bootstrap?session={session}"))?;
        client.get(&format!("/api/chat/history?session={session}"))?;
        client.post("/api/chat/stop", &json!({ "session": session }))?;
    }
    client.hang_up();
    let deadline = Instant::now() + STILL_WITHIN;
    let mut last = host.usage();
    let mut still = 0;
    while still < STILL_LOOKS && last.is_some() && Instant::now() < deadline {
        std::thread::park_timeout(LOOK_EVERY);
        let now = host.usage();
        let same = |a: &Usage, b: &Usage| (a.threads, a.fds, a.children) == (b.threads, b.fds, b.children);
        still = match (&last, &now) {
            (Some(a), Some(b)) if same(a, b) => still + 1,
            (Some(_) | None, Some(_) | None) => 0,
        };
        last = now;
    }
    Ok(last)
}

/// Makes the conversations of the scenario, one message each, and waits for the end of their turns.
pub fn make_sessions(world: &World) -> io::Result<()> {
    for n in 0..world.scenario.sessions {
        let session = make_session(world, &format!("session-{n}"))?;
        world.sessions.lock().push(session);
    }
    settle(world).map_err(|why| io::Error::new(io::ErrorKind::TimedOut, why))
}

/// A new conversation with its first message, sent twice under one id.
fn make_session(world: &World, name: &str) -> io::Result<String> {
    let mut client = world.client();
    let message_id = format!("{}-{name}", world.tag);
    let text = format!("a new conversation {}", mark(&message_id));
    let mut tries = Vec::new();
    for _ in 0..2 {
        let accepted = client
            .send("new", &text, Some(&message_id), &[])?
            .map_err(|a| io::Error::other(format!("a new session was refused: {} {}", a.status, a.text())))?;
        tries.push(accepted);
    }
    let session = tries[0].session_id.clone();
    let tries = tries.into_iter().map(Try::Accepted).collect();
    world.sent.lock().push(Sent { message_id, text, photos: 0, tries, discarded: false });
    world.sessions_used.lock().push(session.clone());
    Ok(session)
}

/// Waits until no session has work, `settle_within_s` at most.
pub fn settle(world: &World) -> Result<(), String> {
    let deadline = Instant::now() + Duration::from_secs_f64(world.scenario.settle_within_s);
    let mut client = world.client();
    let mut quiet = 0;
    let mut last;
    while quiet < 2 {
        match client.get("/api/chat/sessions") {
            Ok(answer) if answer.status == 200 => {
                let listed = answer.json();
                let at_work: Vec<&Value> = listed["sessions"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(|s| s["busy"] == true || s["queued"].as_u64().unwrap_or(0) > 0)
                    .collect();
                quiet = if at_work.is_empty() { quiet + 1 } else { 0 };
                last = at_work.iter().take(5).map(|s| format!("{s} ")).collect();
            }
            Ok(answer) => last = format!("{} {}", answer.status, answer.text()),
            Err(e) => last = e.to_string(),
        }
        if Instant::now() > deadline {
            let limit_s = world.scenario.settle_within_s;
            return Err(format!("work is left after {limit_s} s: {last}"));
        }
        if quiet < 2 {
            std::thread::park_timeout(LOOK_EVERY);
        }
    }
    Ok(())
}

/// The last event of the bus now.
pub fn head(world: &World) -> io::Result<i64> {
    let limit = world.answer_within();
    let mut follower = follower(world);
    follower.open(None, limit)?;
    follower.next(limit)?;
    follower.order.last_id().ok_or_else(|| io::Error::other("no hello"))
}

fn follower(world: &World) -> Follower {
    let follower = Follower::detached(world.addr).forgetful();
    match &world.bearer {
        Some(token) => follower.bearer(token),
        None => follower,
    }
}

/// Everything the judge wants to see. What could not be had is a fault of the run.
pub fn evidence(world: &World, from: i64, home: Option<&Path>, settled: bool, notes: &mut Vec<String>) -> Evidence {
    let fault = |what: &str, e: &io::Error| {
        world.faults.lock().push(Violation::NotSettled { why: format!("no {what}: {e}") });
    };
    let mut subscribers = std::mem::take(&mut *world.subscribers.lock());
    let log = match replay(world, from) {
        Ok((log, order)) => {
            subscribers.push(("replay".to_owned(), order));
            log
        }
        Err(e) => {
            fault("replay of the events", &e);
            EventLog::default()
        }
    };
    let sent = std::mem::take(&mut *world.sent.lock());
    let sessions: BTreeSet<String> = sessions_of(world, &sent, &log);
    let pending = pending(world, &sessions).unwrap_or_else(|e| {
        fault("pending messages", &e);
        Vec::new()
    });
    let disk = match home {
        Some(home) => Disk::read(home, |session| session != ARCHIVE_SESSION),
        None => {
            notes.push("transcripts were read through the server's own history (no --agent-home)".to_owned());
            told_by_history(world, &sessions)
        }
    };
    let disk = disk.unwrap_or_else(|e| {
        fault("transcripts", &e);
        Disk::default()
    });
    Evidence { sent, disk, log, pending, subscribers, settled, unseen: false }
}

/// The whole bus behind `from`, read anew, held against what clients saw at the time.
fn replay(world: &World, from: i64) -> io::Result<(EventLog, OrderCheck)> {
    let limit = world.answer_within();
    let mut follower = follower(world);
    follower.open(Some(&from.to_string()), limit)?;
    let head = world.head.load(Ordering::Acquire);
    let mut log = EventLog::default();
    log.complete = true;
    let mut hashes = BTreeMap::new();
    let mut last = from;
    while last < head {
        let frame =
            follower.next(limit)?.ok_or_else(|| io::Error::other(format!("it ends at {last}, the last is {head}")))?;
        if let Some(id) = frame.id {
            hashes.insert(id, person::hash_of(&frame.event, &frame.data));
            log.add(id, &frame.event, frame.data);
            last = id;
        }
        if follower.order.resyncs > 0 {
            // Pruned: what is not in it may have been told nevertheless.
            log.complete = false;
            last = follower.order.last_id().unwrap_or(head);
        }
    }
    for (id, hash) in world.hashes.lock().iter() {
        if hashes.get(id).is_some_and(|replayed| replayed != hash) {
            world.faults.lock().push(Violation::EventDiffers { id: *id });
        }
    }
    Ok((log, follower.order))
}

fn sessions_of(world: &World, sent: &[Sent], log: &EventLog) -> BTreeSet<String> {
    let mut sessions: BTreeSet<String> = world.sessions_used.lock().iter().cloned().collect();
    sessions.extend(sent.iter().filter_map(|s| s.accepted()).map(|a| a.session_id.clone()));
    let told = log.iter().filter_map(|(_, kept)| kept.data["sessionId"].as_str());
    sessions.extend(told.map(str::to_owned));
    sessions
}

fn pending(world: &World, sessions: &BTreeSet<String>) -> io::Result<Vec<Pending>> {
    let mut client = world.client();
    let mut all = BTreeMap::new();
    for session in sessions {
        let answer = client.get(&format!("/api/chat/bootstrap?session={session}&tail=1"))?;
        if answer.status != 200 {
            return Err(io::Error::other(format!("bootstrap of {session}: {} {}", answer.status, answer.text())));
        }
        for row in answer.json()["pending"].as_array().into_iter().flatten() {
            let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            // A session with two names shows its messages under both.
            all.insert(text("uuid"), Pending { session: session.clone(), uuid: text("uuid"), state: text("state") });
        }
    }
    Ok(all.into_values().collect())
}

/// The conversations as the server tells them: a weaker witness than the files.
fn told_by_history(world: &World, sessions: &BTreeSet<String>) -> io::Result<Disk> {
    let mut client = world.client();
    let mut disk = Disk::default();
    for session in sessions {
        let mut transcript = Transcript::default();
        let mut offset = 0;
        loop {
            let path = format!("/api/chat/history?session={session}&offset={offset}&limit=5000");
            let answer = client.get(&path)?;
            if answer.status != 200 {
                return Err(io::Error::other(format!("{path}: {} {}", answer.status, answer.text())));
            }
            let page = answer.json();
            let entries = page["entries"].as_array().map(Vec::as_slice).unwrap_or_default();
            for entry in entries.iter().filter(|e| e["type"] == "user") {
                let blocks = entry["content"].as_array().map(Vec::as_slice).unwrap_or_default();
                transcript.users.push(UserLine {
                    uuids: entry["uuid"].as_str().map(str::to_owned).into_iter().collect(),
                    text: blocks.iter().filter_map(|b| b["text"].as_str()).collect::<Vec<_>>().join("\n"),
                    photos: blocks.iter().filter(|b| b["type"] == "image").count(),
                });
            }
            offset += entries.len() as u64;
            if entries.is_empty() || offset >= page["total"].as_u64().unwrap_or(0) {
                break;
            }
        }
        disk.sessions.insert(session.clone(), transcript);
    }
    Ok(disk)
}

/// Ends every agent, waits until the server is as it was at the start, and says what is not.
pub fn leaks(world: &World, host: &Host, before: &Usage, slack: Slack) -> Vec<Violation> {
    let mut client = world.client();
    let listed = client.get("/api/chat/sessions").map(|a| a.json()).unwrap_or(Value::Null);
    for session in listed["sessions"].as_array().into_iter().flatten() {
        // A session that is not running has nothing to stop: its answer does not matter.
        let _ = client.post("/api/chat/stop", &json!({ "session": session["sessionId"] }));
    }
    client.hang_up();
    let deadline = Instant::now() + BACK_WITHIN;
    loop {
        let Some(after) = host.usage() else {
            return vec![Violation::NotSettled { why: "the server is gone".to_owned() }];
        };
        let found = checker::leaks(before, &after, slack);
        if found.is_empty() || Instant::now() > deadline {
            return found;
        }
        std::thread::park_timeout(LOOK_EVERY);
    }
}
