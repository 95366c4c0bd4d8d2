//! Each kind of violation is planted once in evidence that is clean without it, and must be the one that is found.

use std::collections::BTreeSet;

use serde_json::json;

use super::disk::{Disk, Transcript, UserLine};
use super::*;
use crate::load::events::OrderCheck;

fn answer(n: i64) -> Accepted {
    Accepted {
        session_id: "s".to_owned(),
        message_uuid: format!("u{n}"),
        event_id: n,
        turn_id: None,
        queued: false,
        deduplicated: false,
        state: None,
    }
}

fn sent(n: i64, tries: Vec<Try>) -> Sent {
    let message_id = format!("m{n}");
    Sent { text: format!("hello {} [image#1]", mark(&message_id)), message_id, photos: 0, tries, discarded: false }
}

fn line(uuid: &str, text: &str) -> UserLine {
    UserLine { uuids: vec![uuid.to_owned()], text: text.to_owned(), photos: 0 }
}

fn words(n: i64) -> String {
    format!("hello {} [image#7]", mark(&format!("m{n}")))
}

/// Messages 1 to 6 in session `s`. 1: a turn of its own. 2 and 3: merged. 4: pending as failed. 5: cleared.
/// 6: never answered, delivered once, by a turn that was tried twice.
fn clean() -> Evidence {
    let mut log = EventLog { complete: true, ..EventLog::default() };
    for n in 1..=6 {
        let data = json!({ "sessionId": "s", "messageUuid": format!("u{n}"), "message": words(n) });
        log.add(n, "chat-user-message", data);
    }
    let more = [
        ("chat-message-dispatched", json!({ "turnId": "u1", "messageUuids": ["u1"] })),
        ("chat-complete", json!({ "turnId": "u1", "isError": false })),
        ("chat-message-dispatched", json!({ "turnId": "u2", "messageUuids": ["u2", "u3"] })),
        ("chat-complete", json!({ "turnId": "u2", "isError": true })),
        ("chat-message-dispatched", json!({ "turnId": "u4", "messageUuids": ["u4"] })),
        ("chat-turn-failed", json!({ "turnId": "u4", "messageUuids": ["u4"], "willRetry": false })),
        ("chat-queue-cleared", json!({ "sessionId": "s", "messageUuids": ["u5"], "why": "stop" })),
        ("chat-message-dispatched", json!({ "turnId": "u6", "messageUuids": ["u6"] })),
        ("chat-turn-failed", json!({ "turnId": "u6", "messageUuids": ["u6"], "willRetry": true })),
        ("chat-message-dispatched", json!({ "turnId": "u6", "messageUuids": ["u6"] })),
        ("chat-complete", json!({ "turnId": "u6" })),
        ("chat-complete", json!({ "turnId": "of-the-agent-itself" })),
    ];
    for (at, (event, data)) in more.into_iter().enumerate() {
        log.add(7 + at as i64, event, data);
    }
    let users =
        vec![line("u1", &words(1)), line("u2", &format!("{}\n\n{}", words(2), words(3))), line("u6", &words(6))];
    let mut disk = Disk::default();
    disk.sessions.insert("s".to_owned(), Transcript { users, assistants: 3, bad: 0 });
    let ok = |n| vec![Try::Accepted(answer(n))];
    let mut first = sent(1, ok(1));
    first.tries = vec![Try::NoAnswer, Try::Accepted(answer(1)), Try::Accepted(answer(1))];
    Evidence {
        sent: vec![first, sent(2, ok(2)), sent(3, ok(3)), sent(4, ok(4)), sent(5, ok(5)), sent(6, vec![Try::NoAnswer])],
        disk,
        log,
        pending: vec![Pending { session: "s".to_owned(), uuid: "u4".to_owned(), state: "failed".to_owned() }],
        subscribers: vec![("w".to_owned(), OrderCheck::default())],
        settled: true,
        unseen: false,
    }
}

fn users(e: &mut Evidence) -> &mut Vec<UserLine> {
    &mut e.disk.sessions.get_mut("s").unwrap().users
}

#[test]
fn clean_evidence_has_no_violation_and_is_counted() {
    let verdict = check(&clean());
    assert_eq!(verdict.violations, []);
    assert_eq!((verdict.messages, verdict.accepted, verdict.unanswered), (6, 5, 1));
    assert_eq!((verdict.delivered, verdict.pending, verdict.cleared, verdict.turns), (4, 1, 1, 4));
    assert!(verdict.to_string().ends_with("violations = 0"), "{verdict}");
}

#[test]
fn every_planted_violation_is_caught_as_what_it_is() {
    type Plant = fn(&mut Evidence);
    let table: &[(&str, Plant)] = &[
        ("lost", |e| e.pending.clear()),
        ("lost", |e| drop(users(e).remove(0))),
        ("doubled", |e| users(e).push(line("x", &words(1)))),
        ("doubled", |e| users(e).push(line("u6", &words(6)))),
        ("doubled", |e| {
            let again = Transcript { users: vec![line("u1", &words(1))], ..Transcript::default() };
            e.disk.sessions.insert("t".to_owned(), again);
        }),
        ("refused-delivered", |e| e.sent[5].tries = vec![Try::Refused { status: 429, code: "queue_full".to_owned() }]),
        ("repeats-differ", |e| e.sent[0].tries.push(Try::Accepted(answer(9)))),
        ("answer-without-event", |e| {
            let Some(Try::Accepted(a)) = e.sent[1].tries.first_mut() else { panic!("it was accepted") };
            a.event_id = 3;
        }),
        ("accepted-twice", |e| {
            e.log.add(99, "chat-user-message", json!({ "messageUuid": "u6", "message": words(6) }));
        }),
        ("delivered-unrecorded", |e| {
            e.sent.push(sent(7, vec![Try::NoAnswer]));
            users(e).push(line("u7", &words(7)));
        }),
        ("delivered-undispatched", |e| {
            e.log.add(98, "chat-user-message", json!({ "messageUuid": "u7", "message": words(7) }));
            e.sent.push(sent(7, vec![Try::NoAnswer]));
            users(e).push(line("u7", &words(7)));
        }),
        ("dispatched-unaccepted", |e| {
            e.log.add(98, "chat-message-dispatched", json!({ "turnId": "u8", "messageUuids": ["u8"] }));
            e.log.add(99, "chat-complete", json!({ "turnId": "u8" }));
        }),
        ("wrong-session", |e| {
            let transcript = e.disk.sessions.remove("s").unwrap();
            e.disk.sessions.insert("other".to_owned(), transcript);
        }),
        ("text-changed", |e| users(e)[0].text = format!("hullo {}", mark("m1"))),
        ("photos-changed", |e| e.sent[1].photos = 1),
        ("out-of-order", |e| users(e).swap(0, 1)),
        ("out-of-order", |e| users(e)[1].text = format!("{}\n\n{}", words(3), words(2))),
        ("cleared-but-delivered", |e| {
            e.log.add(99, "chat-queue-cleared", json!({ "messageUuids": ["u3"] }));
        }),
        ("failed-but-delivered", |e| {
            users(e).insert(2, line("u4", &words(4)));
        }),
        ("stuck", |e| e.pending[0].state = "dispatched".to_owned()),
        ("turn-without-end", |e| drop(e.log.events.remove(&8))),
        ("turn-without-end", |e| drop(e.log.events.remove(&16).and(e.log.events.remove(&17)))),
        ("turn-ended-twice", |e| {
            e.log.add(99, "chat-turn-failed", json!({ "turnId": "u1", "messageUuids": [], "willRetry": false }));
        }),
        ("turn-ended-twice", |e| e.log.add(99, "chat-complete", json!({ "turnId": "of-the-agent-itself" }))),
        ("event-order", |e| e.subscribers[0].1.faults.push("a hole".to_owned())),
        ("event-differs", |e| e.log.add(8, "chat-complete", json!({ "turnId": "u1", "isError": true }))),
    ];
    for (at, (kind, plant)) in table.iter().enumerate() {
        let mut evidence = clean();
        plant(&mut evidence);
        let found: BTreeSet<&str> = check(&evidence).violations.iter().map(Violation::kind).collect();
        assert!(found.contains(kind), "row {at}: {kind} was planted, {found:?} found");
        // A message in the wrong place may break a neighbouring promise, too; anything else is a false alarm.
        let beside = ["wrong-session", "lost", "doubled", kind];
        assert!(found.iter().all(|f| beside.contains(f)), "row {at}: {kind} was planted, {found:?} found");
    }
}

#[test]
fn words_are_the_same_when_photos_stand_in_the_place_of_their_tokens() {
    for (delivered, sent, same) in [
        ("one two", "one two", true),
        ("zero one two three", "one two", true),
        ("one  two", "one two", false),
        ("see  \nand\n here", "see [image#1] and [image#2] here", true),
        ("see [image#12] and [image#3] here", "see [image#1] and [image#2] here", true),
        ("see [image#1] and here", "see [image#1] or here", false),
        ("[image#x] [image#", "[image#x] [image#", true),
    ] {
        assert_eq!(evidence::holds_words(delivered, sent), same, "{delivered:?} {sent:?}");
    }
}

#[test]
fn an_assigned_session_id_is_the_same_session() {
    let mut evidence = clean();
    let transcript = evidence.disk.sessions.remove("s").unwrap();
    evidence.disk.sessions.insert("later".to_owned(), transcript);
    evidence.log.add(50, "chat-session-assigned", json!({ "sessionId": "mid", "was": "s" }));
    evidence.log.add(51, "chat-session-assigned", json!({ "sessionId": "later", "was": "mid" }));
    assert_eq!(check(&evidence).violations, []);
}

#[test]
fn while_work_is_under_way_open_turns_and_pending_messages_are_no_violation() {
    let mut evidence = clean();
    evidence.log.events.remove(&8);
    evidence.pending[0].state = "dispatched".to_owned();
    evidence.settled = false;
    assert_eq!(check(&evidence).violations, []);
}

#[test]
fn a_promised_try_that_was_cleared_instead_is_an_end() {
    let mut evidence = clean();
    users(&mut evidence).remove(2);
    evidence.log.events.remove(&16);
    evidence.log.events.remove(&17);
    evidence.log.add(50, "chat-queue-cleared", json!({ "messageUuids": ["u6"] }));
    assert_eq!(check(&evidence).violations, []);
}

#[test]
fn an_agent_that_keeps_no_uuid_may_hold_what_shows_as_failed() {
    let mut evidence = clean();
    users(&mut evidence).insert(2, line("of-the-agent", &words(4)));
    assert_eq!(check(&evidence).violations, []);
}

#[test]
fn growth_beyond_the_slack_is_a_leak() {
    let before = Usage { rss_kib: 9000, rss_peak_kib: 0, threads: 8, fds: 20, children: 0, cpu_ms: 0, switches: 0 };
    assert_eq!(leaks(&before, &before, Slack::default()), []);
    let after = Usage { rss_kib: 90_000, threads: 9, fds: 21, children: 1, ..before };
    assert_eq!(leaks(&before, &after, Slack::default()).len(), 4);
}
