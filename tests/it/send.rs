//! Acceptance at its edges: other programs that write into the journal, a disk that says no, and sends, attachments and
//! tabs that race with the end of a turn.
//!
//! `BEEBOX_RACE_SENDS` and `BEEBOX_RACE_ATTACHES` set how many races (few by default; `scripts/nightly` runs 10,000 and
//! 1,000). Elsewhere: the reader of 1 kB per 100 ms, reconnect storms and crowds of watchers are in `push`; a log cut at
//! every byte of its last page, the disk that drops what was not synced and faults at each n-th call in the journal's
//! own tests; flushes between request and answer are counted by `scripts/flush-count`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beebox_chatd::load::client::{Accepted, Answer};
use beebox_chatd::load::events::Frame;
use beebox_chatd::load::rng::Rng;
use beebox_chatd::sync::Mutex;
use beebox_chatd::threads::{Name, OnPanic, SMALL_STACK_BYTES, spawn};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;

use crate::support::{LIMIT, Options, Server, setting, texts};

fn journal_file(server: &Server) -> PathBuf {
    server.box_dir().join(".beebox").join("journal.db")
}

#[test]
fn events_of_another_program_are_seen_within_a_second_in_order_and_once() {
    const FOREIGN: usize = 60;
    let server = Server::new();
    let (first, _) = server.converse("new", "hello");
    let mut early = server.follow();
    let cursor = early.cursor();
    let path = journal_file(&server);
    let written = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&written);
    let writer = spawn(Name::fixed("foreign"), 1 << 20, OnPanic::Contain, move || {
        let db = rusqlite::Connection::open(path).unwrap();
        db.busy_timeout(Duration::from_secs(10)).unwrap();
        for n in 0..FOREIGN {
            let data = format!("{{\"n\":{n}}}");
            db.execute("INSERT INTO event(event, data) VALUES('other-program', ?1)", [data]).unwrap();
            to.lock().push((db.last_insert_rowid(), Instant::now()));
            std::thread::sleep(Duration::from_millis(15));
        }
    })
    .unwrap();
    // Ours go on between theirs.
    let mut ours = Vec::new();
    while !writer.join_within(Duration::from_millis(5)) {
        ours.push(server.send(&first.session_id, "ours {{dedup=off}}").message_uuid);
    }
    let theirs = written.lock().clone();
    assert_eq!(theirs.len(), FOREIGN);
    let last = theirs[FOREIGN - 1].0;
    early.wait_for("the last row of the other program", |f| f.id == Some(last));
    for uuid in &ours {
        early.end_of_message(uuid);
    }
    // One who was there, one who comes behind a cursor, one over SSE: all see the same, each id once.
    let head = early.seen().iter().filter_map(|f| f.id).max().unwrap();
    let mut late = server.follow_from(Some(&cursor));
    late.wait_for("the head", |f| f.id == Some(head));
    let mut sse = server.follow_sse(Some(&cursor), true);
    sse.wait_for("the head", |f| f.id == Some(head));
    let ids = |w: &crate::support::Watch| -> Vec<i64> { w.seen().iter().filter_map(|f| f.id).collect() };
    for watch in [&late, &sse] {
        assert_eq!(ids(watch), ids(&early));
    }
    let numbers: Vec<u64> = early.kept("other-program").iter().map(|f| f.data["n"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..FOREIGN as u64).collect::<Vec<_>>());
    assert!(ids(&early).windows(2).all(|pair| pair[1] == pair[0] + 1), "{:?}", ids(&early));
}

#[test]
fn one_row_of_another_program_wakes_a_quiet_server_that_is_watched() {
    let server = Server::new();
    let mut events = server.follow();
    let db = rusqlite::Connection::open(journal_file(&server)).unwrap();
    for n in 0..3 {
        db.execute("INSERT INTO event(event, data) VALUES('other-program', ?1)", [format!("{{\"n\":{n}}}")]).unwrap();
        // With nothing of ours to carry it along; the limit of the wait is far above the second that is promised.
        events.wait_for("the row", |f| f.event == "other-program" && f.data["n"] == n);
    }
    drop(events);
    server.wait_until("the journal to stop looking", |s| {
        let page = s.get("/metrics").text();
        (page.contains("beebox_push_websocket_clients 0")).then_some(())
    });
    // Nobody watches: what is written now waits for the next reader, who gets it behind the cursor.
    db.execute("INSERT INTO event(event, data) VALUES('other-program', '{\"n\":9}')", []).unwrap();
    server.follow_from(Some("0")).wait_for("the row", |f| f.event == "other-program" && f.data["n"] == 9);
}

/// Repeats a send under its id until it is accepted; the answers before.
fn insist(server: &Server, session: &str, text: &str, id: &str) -> (Accepted, Vec<Answer>) {
    let deadline = Instant::now() + LIMIT;
    let mut refused = Vec::new();
    loop {
        match server.try_send(session, text, Some(id), &[]) {
            Ok(accepted) => return (accepted, refused),
            Err(answer) => refused.push(answer),
        }
        assert!(Instant::now() < deadline, "never accepted: {:?}", refused.last());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn assert_cannot_record(answer: &Answer, reason: &str) {
    assert_eq!((answer.status, answer.code().as_str()), (503, "cannot_record"), "{}", answer.text());
    assert!(answer.text().contains(reason), "{}", answer.text());
}

/// After the disk came back: everything once, nothing half.
fn assert_whole(server: &Server, session: &str, expected: &[&str]) {
    let asked = texts(&server.history(session), "user");
    assert_eq!(asked, expected, "each once and in order");
    let boot = server.bootstrap(session);
    assert_eq!(boot["pending"], serde_json::json!([]), "nothing is left half done");
    let ready = server.get("/readyz");
    assert_eq!(ready.status, 200, "{}", ready.text());
}

#[test]
fn a_disk_that_fails_at_the_nth_call_costs_a_503_and_nothing_else() {
    for (kind, nth, reason) in [
        ("full", 1, "the disk is full"),
        ("fsync", 3, "the disk reports an error"),
        ("readonly", 5, "read-only"),
        ("write", 9, "error"),
    ] {
        let server = Options::default().env("BEEBOX_DISK", &format!("{kind}:{nth}:30")).start();
        let mut events = server.follow();
        let (first, mut refused) = insist(&server, "main", "one {{dedup=off}}", "m-1");
        let (second, more) = insist(&server, "main", "two {{dedup=off}}", "m-2");
        refused.extend(more);
        for answer in &refused {
            assert_cannot_record(answer, reason);
        }
        // The first calls are those of the first message; later ones may hit a dispatch or an outcome, which is owed.
        assert!(!refused.is_empty() || nth > 3, "{kind}:{nth} hit nothing");
        for sent in [&first, &second] {
            assert_eq!(events.end_of_message(&sent.message_uuid).event, "chat-complete");
        }
        // Merged into one turn or not, each text is there once.
        let asked = texts(&server.history(&first.session_id), "user").join("\n\n");
        assert_eq!((asked.matches("one").count(), asked.matches("two").count()), (1, 1), "{kind}:{nth}: {asked}");
        assert_eq!(events.kept("chat-user-message").len(), 2, "{kind}:{nth}");
        server.wait_until("readiness", |s| (s.get("/readyz").status == 200).then_some(()));
        assert_eq!(server.bootstrap(&first.session_id)["pending"], serde_json::json!([]));
    }
}

#[test]
fn a_journal_that_is_moved_away_is_told_and_served_again_when_it_is_back() {
    let server = Server::new();
    let mut events = server.follow();
    let (first, _) = server.converse("new", "before");
    let (path, away) = (journal_file(&server), journal_file(&server).with_extension("away"));
    std::fs::rename(&path, &away).unwrap();
    for n in 0..3 {
        let refused = server.try_send(&first.session_id, "meanwhile", Some("m-1"), &[]).unwrap_err();
        assert_cannot_record(&refused, "moved or deleted");
        let ready = server.get("/readyz");
        assert!(ready.status == 503 && ready.text().contains("moved or deleted"), "{n}: {}", ready.text());
    }
    // Reading goes on.
    assert_eq!(texts(&server.history(&first.session_id), "user"), ["before"]);
    std::fs::rename(&away, &path).unwrap();
    let (sent, _) = insist(&server, &first.session_id, "meanwhile", "m-1");
    events.end_of_message(&sent.message_uuid);
    assert_whole(&server, &first.session_id, &["before", "meanwhile"]);
}

#[test]
fn a_full_disk_refuses_sends_and_serves_again_without_a_restart() {
    let server = Server::new();
    let mut events = server.follow();
    let (first, _) = server.converse("new", "before");
    let pid = Pid::from_raw(i32::try_from(server.pid()).unwrap());
    let limit = |bytes: Option<u64>| prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    // The kernel takes no byte past the first 4 KiB of any file.
    limit(Some(4096));
    let long = "words ".repeat(4000).trim().to_owned();
    for _ in 0..3 {
        let refused = server.try_send(&first.session_id, &long, Some("m-1"), &[]).unwrap_err();
        assert_cannot_record(&refused, "disk");
        let ready = server.get("/readyz");
        assert!(ready.status == 503 && ready.text().contains("disk"), "{}", ready.text());
    }
    limit(None);
    let (sent, _) = insist(&server, &first.session_id, &long, "m-1");
    events.end_of_message(&sent.message_uuid);
    assert_whole(&server, &first.session_id, &["before", &long]);
}

#[test]
fn sends_within_a_millisecond_of_a_result_are_delivered_once_and_in_order() {
    let wanted = usize::try_from(setting("BEEBOX_RACE_SENDS", 80)).unwrap();
    let server = Server::new();
    let mut events = server.follow();
    let (first, _) = server.converse("new", "hello");
    let session = first.session_id;
    let mut rng = Rng::new(7, 7);
    let (mut within_1_ms, mut before) = (0, 0);
    let mut client = server.client();
    let mut expected = Vec::new();
    // From the first frame of a turn to its end, in microseconds; learnt from which side of it the last send fell on.
    let mut span_us: i64 = 8000;
    for n in 0..wanted {
        let lead = client.send(&session, &format!("a{n} {{{{dedup=off deltas=3 delta_ms=3}}}}"), None, &[]).unwrap();
        let lead = lead.unwrap().message_uuid;
        events.wait_for("a frame", |f| f.event == "chat-turn" && f.text("turnId") == lead);
        let jitter_us = i64::try_from(rng.below(2000)).unwrap() - 1000;
        let wait = Duration::from_micros(u64::try_from(span_us + jitter_us).unwrap_or(0));
        let begun = Instant::now();
        while begun.elapsed() < wait {
            std::hint::spin_loop();
        }
        let racing = client.send(&session, &format!("b{n} {{{{dedup=off}}}}"), None, &[]).unwrap().unwrap();
        // Queued: the turn had not ended when it came.
        before += usize::from(racing.queued);
        span_us = (span_us + if racing.queued { 300 } else { -300 }).max(0);
        events.end_of_message(&racing.message_uuid);
        let end = ms_of_day(&events.turn_end(&lead));
        let came = ms_of_day(&events.wait_for("the acceptance", |f| f.id == Some(racing.event_id)));
        within_1_ms += usize::from((came - end).abs() <= 1);
        expected.extend([format!("a{n}"), format!("b{n}")]);
        events.follower().seen.clear();
    }
    let asked = user_words(&server, &session);
    let got: Vec<&str> = asked.iter().map(String::as_str).filter(|w| *w != "hello").collect();
    assert_eq!(got, expected);
    println!(
        "\nrace sends: {wanted} beside a result, {within_1_ms} of them within 1 ms of it by the journal's clock; \
         {before} before the end of the turn was known, {} after",
        wanted - before
    );
    // Both sides of the race were seen, or it was none.
    assert!(before > 0 && before < wanted, "{before} of {wanted} came before the end");
}

/// The time of day at which a kept event was recorded, in milliseconds.
fn ms_of_day(frame: &Frame) -> i64 {
    let at = frame.at.as_deref().unwrap_or_default();
    let part = |from: usize, to: usize| at[from..to].parse::<i64>().unwrap();
    ((part(11, 13) * 60 + part(14, 16)) * 60 + part(17, 19)) * 1000 + part(20, 23)
}

/// The first word of every paragraph that a person sent, merged turns taken apart.
fn user_words(server: &Server, session: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut offset = 0;
    loop {
        let page = server.get_json(&format!("/api/chat/history?session={session}&offset={offset}&limit=1000"));
        for text in texts(&page, "user") {
            words.extend(text.split("\n\n").filter_map(|p| p.split_whitespace().next()).map(str::to_owned));
        }
        offset += page["entries"].as_array().unwrap().len();
        if page["hasMore"] != true {
            return words;
        }
    }
}

/// Attaches again and again while turns end; messages accepted before an attachment that it did not show.
fn attach_races(server: &Server, attaches: u64) -> (u64, Vec<String>) {
    let (first, _) = server.converse("new", "hello");
    let session = first.session_id;
    let (stop, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let accepted = Arc::new(Mutex::new(String::from("hello")));
    let (mut sender, mut events) = (server.client(), server.follow());
    let talker = {
        let (stop, ended, accepted, session) =
            (Arc::clone(&stop), Arc::clone(&ended), Arc::clone(&accepted), session.clone());
        spawn(Name::fixed("talker"), 1 << 20, OnPanic::Contain, move || {
            for n in 0.. {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let mark = format!("mark-{n}-");
                let sent = sender.send(&session, &mark, None, &[]).unwrap().unwrap();
                *accepted.lock() = mark;
                events.end_of_message(&sent.message_uuid);
                ended.fetch_add(1, Ordering::AcqRel);
            }
        })
        .unwrap()
    };
    let (mut met, mut missing) = (0, Vec::new());
    let mut tab = server.client();
    let deadline = Instant::now() + LIMIT * (1 + u32::try_from(attaches / 200).unwrap_or(100));
    while met < attaches && missing.is_empty() && Instant::now() < deadline {
        let (mark, before) = (accepted.lock().clone(), ended.load(Ordering::Acquire));
        let boot = tab.get(&format!("/api/chat/bootstrap?session={session}&tail=50")).unwrap().json();
        met += u64::from(ended.load(Ordering::Acquire) != before);
        let shows =
            |list: &Value| list.as_array().is_some_and(|l| l.iter().any(|e| e["content"].to_string().contains(&mark)));
        if !shows(&boot["entries"]) && !shows(&boot["pending"]) {
            missing.push(mark);
        }
    }
    stop.store(true, Ordering::Release);
    assert!(talker.join_within(LIMIT), "the talker");
    (met, missing)
}

#[test]
fn who_attaches_exactly_while_a_turn_ends_sees_its_message() {
    let wanted = setting("BEEBOX_RACE_ATTACHES", 40);
    let (met, missing) = attach_races(&Server::new(), wanted);
    println!("\nrace attaches: {met} while a turn ended, missing = {}", missing.len());
    assert!(missing.is_empty(), "in neither record: {missing:?}");
    assert!(met >= wanted, "only {met} attachments met the end of a turn");
}

#[test]
fn a_bootstrap_that_reads_entries_before_pending_is_found() {
    let server = Options::default().env("BEEBOX_PLANT", "entries_before_pending").start();
    let (met, missing) = attach_races(&server, 400);
    assert!(!missing.is_empty(), "planted, and {met} attachments found nothing");
}

#[test]
fn two_tabs_that_send_at_once_see_the_same_and_lose_nothing() {
    const EACH: usize = 15;
    let server = Server::new();
    let (first, _) = server.converse("new", "hello");
    let session = first.session_id;
    let tabs: Vec<_> = (0..2)
        .map(|tab| {
            let (mut client, mut events, session) = (server.client(), server.follow(), session.clone());
            let sent = Arc::new(Mutex::new(Vec::new()));
            let to = Arc::clone(&sent);
            let thread = spawn(Name::numbered("tab", tab), SMALL_STACK_BYTES * 4, OnPanic::Contain, move || {
                for n in 0..EACH {
                    let accepted = client.send(&session, &format!("t{tab}-{n}"), None, &[]).unwrap().unwrap();
                    to.lock().push(accepted.message_uuid.clone());
                    if n % 3 == 0 {
                        events.end_of_message(&accepted.message_uuid);
                    }
                }
            })
            .unwrap();
            (thread, sent)
        })
        .collect();
    let mut watch = server.follow_from(Some("0"));
    let mut uuids = Vec::new();
    for (thread, sent) in &tabs {
        assert!(thread.join_within(LIMIT), "a tab");
        uuids.extend(sent.lock().clone());
    }
    assert_eq!(uuids.len(), 2 * EACH);
    for uuid in &uuids {
        watch.end_of_message(uuid);
    }
    let words: Vec<String> = user_words(&server, &session).into_iter().skip(1).collect();
    for tab in 0..2 {
        let of_tab: Vec<&String> = words.iter().filter(|w| w.starts_with(&format!("t{tab}-"))).collect();
        assert_eq!(of_tab, (0..EACH).map(|n| format!("t{tab}-{n}")).collect::<Vec<_>>().iter().collect::<Vec<_>>());
    }
    // The order on the bus is the order in the transcript.
    let told: Vec<&str> = watch
        .kept("chat-user-message")
        .into_iter()
        .filter(|f| f.text("sessionId") == session)
        .map(|f| f.text("message"))
        .collect();
    assert_eq!(told[1..].to_vec(), words.iter().map(String::as_str).collect::<Vec<_>>());
}
