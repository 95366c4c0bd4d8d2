//! Many conversations on one box: live places, eviction, threads of outside channels and their pool, flags, frames of a
//! turn, many servers at once, the ends of a server.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use beebox_chatd::load::client::Answer;
use beebox_chatd::load::proc;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{LIMIT, Options, Server, dispatches, is_end_of, setting, texts};

/// Runs `body` while the live agents of the server are counted again and again; the most there were at one time.
fn most_agents_during(server: &Server, body: impl FnOnce()) -> usize {
    let (over, most) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                most.fetch_max(server.agents().len(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        body();
        over.store(true, Ordering::Relaxed);
    });
    most.into_inner()
}

fn thread_send(server: &Server, thread: &str, message: &str, id: Option<&str>) -> Answer {
    let mut body = json!({"thread": thread, "message": message});
    if let Some(id) = id {
        body["messageId"] = json!(id);
    }
    server.diagnosis().must("an answer to a thread", server.client().limit(LIMIT * 2).post("/api/threads/send", &body))
}

fn answered(server: &Server, thread: &str, message: &str) -> Value {
    let answer = thread_send(server, thread, message, None);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// A message that is answered with one response to the thread.
fn say(text: &str) -> String {
    format!("{{{{say=\"<chat-response>{text}</chat-response>\"}}}}")
}

fn wait_turn_began(server: &Server, session: &str) {
    server.wait_until("a turn in flight", |s| (s.status(session)["phase"] == "streaming").then_some(()));
}

/// What the agent was given, as it wrote it down.
fn raw_transcript(server: &Server, session: &str) -> String {
    std::fs::read_to_string(server.transcript(session).expect("a transcript")).unwrap()
}

#[test]
fn simultaneous_first_sends_never_exceed_the_live_cap_and_all_are_answered() {
    let server = Server::new();
    let most = most_agents_during(&server, || {
        let mut events = server.follow();
        let sent: Vec<_> = std::thread::scope(|scope| {
            let sends: Vec<_> = (0..8)
                .map(|n| {
                    let server = &server;
                    scope.spawn(move || server.send("new", &format!("{{{{deltas=3 delta_ms=20}}}} number {n}")))
                })
                .collect();
            sends.into_iter().map(|s| s.join().unwrap()).collect()
        });
        for accepted in &sent {
            events.end_of_message(&accepted.message_uuid);
        }
        let sessions: BTreeSet<_> = sent.iter().map(|a| a.session_id.as_str()).collect();
        assert_eq!(sessions.len(), 8);
    });
    assert!((1..=2).contains(&most), "{most} agents at one time on a cap of 2");
}

#[test]
fn many_sessions_on_a_cap_of_two_are_served_in_the_order_of_their_messages() {
    let server = Server::new();
    let sessions = usize::try_from(setting("BEEBOX_SESSIONS", 20)).unwrap();
    let mut events = server.follow();
    let most = most_agents_during(&server, || {
        // Two long turns hold the places, so that the order of the others is the order in which they waited.
        let first: Vec<_> = (0..2).map(|_| server.send("new", "{{deltas=30 delta_ms=50}} long")).collect();
        for accepted in &first {
            wait_turn_began(&server, &accepted.session_id);
        }
        let waiting: Vec<_> = (2..sessions).map(|n| server.send("new", &format!("number {n}"))).collect();
        for accepted in &waiting {
            assert_eq!(events.end_of_message(&accepted.message_uuid).event, "chat-complete");
        }
        // Two places: one that waited may overtake only its neighbours on the way to its dispatch.
        let order: Vec<usize> =
            events.seen().iter().filter_map(|f| waiting.iter().position(|w| dispatches(f, &w.message_uuid))).collect();
        assert_eq!(order.len(), waiting.len());
        for (place, number) in order.iter().enumerate() {
            assert!(place.abs_diff(*number) <= 2, "{order:?}");
        }
    });
    assert_eq!(most, 2);
    println!("\nrounds: {sessions} sessions on a cap of 2, at most {most} agents at one time");
}

#[test]
fn a_turn_that_ends_gives_its_place_to_a_session_that_waits() {
    let server = Options::default().args(["--live-max", "1"]).start();
    let mut events = server.follow();
    let long = server.send("new", "{{deltas=20 delta_ms=40}} long");
    wait_turn_began(&server, &long.session_id);
    let waits = server.send("new", "waits for the place");
    let page = server.get("/api/debug/threads").text();
    assert!(page.contains("live places: 1 of 1 taken, 1 wait for one"), "{page}");
    let row = page.lines().find(|l| l.contains(&waits.session_id)).expect("its row");
    assert!(row.contains("queued 1  waits for a live place"), "{row}");
    events.end_of_message(&waits.message_uuid);
    let end = events.turn_end(&long.message_uuid);
    assert_eq!(end.data["isError"], false, "eviction never interrupts a turn");
}

#[test]
fn a_background_task_keeps_its_agent_until_it_settles() {
    let server = Options::default().args(["--live-max", "1"]).start();
    let mut events = server.follow();
    let first = server.send("new", "{{bg_ms=700}} background");
    events.turn_end(&first.message_uuid);
    let second = server.send("new", "waits for the task");
    let own = events.wait_for("the turn of the task", |f| {
        f.event == "chat-complete" && f.text("sessionId") == first.session_id && f.text("turnId") != first.message_uuid
    });
    let dispatched = events.wait_for("the other's turn", |f| dispatches(f, &second.message_uuid));
    assert!(own.id < dispatched.id, "the task's own turn came before the eviction");
    events.end_of_message(&second.message_uuid);
}

#[test]
fn a_session_with_a_queue_is_not_evicted() {
    let server = Options::default().args(["--live-max", "1"]).start();
    let mut events = server.follow();
    let long = server.send("new", "{{deltas=15 delta_ms=40}} long");
    wait_turn_began(&server, &long.session_id);
    let other = server.send("new", "another conversation");
    let queued = server.send(&long.session_id, "queued behind the long one");
    let queued_end = events.end_of_message(&queued.message_uuid);
    let other_end = events.end_of_message(&other.message_uuid);
    assert!(queued_end.id < other_end.id, "the queue drains into the same run before it may go");
    assert!(events.kept("chat-queue-cleared").is_empty());
}

#[test]
fn an_idle_session_is_closed_and_goes_on_when_it_is_used() {
    let server = Options::default().args(["--idle-close-s", "1"]).start();
    let (first, _) = server.converse("new", "hello");
    server.wait_phase(&first.session_id, "idle");
    server.wait_until("no agent", |s| s.agents().is_empty().then_some(()));
    let (second, end) = server.converse(&first.session_id, "and again");
    assert_eq!((second.session_id, end.event.as_str()), (first.session_id.clone(), "chat-complete"));
    assert_eq!(texts(&server.history(&first.session_id), "user").len(), 2);
    answered(&server, "t", &say("x"));
    server.wait_until("no agent of the pool", |s| s.agents().is_empty().then_some(()));
    assert_eq!(answered(&server, "t", &say("y"))["responses"], json!(["y"]));
}

#[test]
fn status_stop_and_history_answer_while_a_start_is_blocked() {
    let dir = tempfile::tempdir().unwrap();
    let gate = dir.path().join("gate");
    let begun = dir.path().join("begun");
    let hook = format!("touch {}; while [ ! -e {} ]; do sleep 0.05; done", begun.display(), gate.display());
    let server = Options::default().args(["--prepare", &hook]).start();
    let mut events = server.follow();
    let first = server.send("new", "blocked in its start");
    server.wait_until("the hook", |_| begun.exists().then_some(()));
    let session = first.session_id.as_str();
    assert_eq!(server.status(session)["phase"], "starting");
    assert_eq!(server.history(session)["total"], 0);
    let second = server.send(session, "rides the first turn");
    assert!(second.queued);
    let page = server.get("/api/debug/threads").text();
    assert!(page.contains("starting"), "{page}");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(events.turn_of(&second.message_uuid), first.message_uuid, "one first turn");
    events.end_of_message(&first.message_uuid);

    // Once more, and stopped in its start: carried out the moment the start returns.
    std::fs::remove_file(&gate).unwrap();
    std::fs::remove_file(&begun).unwrap();
    let other = server.send("new", "never delivered");
    server.wait_until("the hook", |_| begun.exists().then_some(()));
    assert_eq!(server.control("stop", &other.session_id), "stopped");
    assert_eq!(server.bootstrap(&other.session_id)["pending"], json!([]), "cleared before the answer");
    std::fs::write(&gate, "").unwrap();
    server.wait_phase(&other.session_id, "idle");
    assert!(!events.seen().iter().any(|f| dispatches(f, &other.message_uuid)));
}

#[test]
fn parked_sessions_hold_no_thread_and_no_descriptor_and_little_memory() {
    let server = Options::default().args(["--live-max", "1"]).start();
    let parked = setting("BEEBOX_PARKED", 40);
    let mut events = server.follow();
    let (first, _) = server.converse("new", "first");
    let before = server.usage();
    let mut last = first.clone();
    for n in 1..parked {
        last = server.send("new", &format!("number {n}"));
        events.end_of_message(&last.message_uuid);
    }
    // The one of the last session lives on; all others were closed to make room.
    server.wait_phase(&last.session_id, "ready");
    server.wait_until("one agent", |s| (s.agents().len() == 1).then_some(()));
    let phases = server.get("/metrics").text();
    assert!(phases.contains(&format!("beebox_sessions{{phase=\"idle\"}} {}", parked - 1)), "{phases}");
    let now = server.wait_until("what runs held is given back", |s| {
        Some(s.usage()).filter(|now| now.threads <= before.threads && now.fds <= before.fds)
    });
    println!(
        "\nrounds: {parked} sessions, all but one parked: {} threads, {} open files, RSS {:.1} MiB ({:.1} MiB with one)",
        now.threads,
        now.fds,
        now.rss_kib as f64 / 1024.0,
        before.rss_kib as f64 / 1024.0
    );
    // 4 MiB for what is bounded however many there are (recent events, frames of ended turns, pages of the journal).
    assert!(now.rss_kib <= before.rss_kib + 4 * 1024 + parked * 12, "{now:?}");
    assert_eq!(server.converse(&first.session_id, "and the first goes on").1.event, "chat-complete");
}

#[test]
fn two_threads_take_turns_however_many_messages_each_has() {
    let server = Server::new();
    let messages = setting("BEEBOX_THREAD_MESSAGES", 100);
    let mut events = server.follow();
    // How many messages of a thread came while the other's turn was not over.
    let (in_turn, met) = (AtomicUsize::new(0), AtomicU64::new(0));
    let most = most_agents_during(&server, || {
        std::thread::scope(|scope| {
            for thread in ["anna", "bert"] {
                let (server, in_turn, met) = (&server, &in_turn, &met);
                scope.spawn(move || {
                    for n in 0..messages {
                        let text = format!("{thread} {n}");
                        if in_turn.fetch_add(1, Ordering::Relaxed) > 0 {
                            met.fetch_add(1, Ordering::Relaxed);
                        }
                        let answer = answered(server, thread, &say(&text));
                        in_turn.fetch_sub(1, Ordering::Relaxed);
                        assert_eq!(answer["responses"], json!([text]));
                        assert_eq!(answer["success"], true);
                    }
                });
            }
        });
    });
    assert_eq!(most, 1, "the pool keeps one active session");
    let met = met.into_inner();
    assert!(met > 0, "each waited for the other");
    let list = server.get_json("/api/threads");
    let counts: Vec<_> =
        list["threads"].as_array().unwrap().iter().map(|t| t["messageCount"].as_u64().unwrap()).collect();
    assert_eq!(counts, [(messages - 1) % 50 + 1; 2], "each goes on in a fresh session after fifty");
    events.wait_for("the last response", |f| {
        f.event == "thread-response" && f.text("text") == format!("anna {}", messages - 1)
    });
    events.wait_for("the last response", |f| {
        f.event == "thread-response" && f.text("text") == format!("bert {}", messages - 1)
    });
    let told = events.kept("thread-response");
    for thread in ["anna", "bert"] {
        let of_one: Vec<_> =
            told.iter().filter(|f| f.text("thread") == thread).map(|f| f.text("text").to_owned()).collect();
        assert_eq!(of_one, (0..messages).map(|n| format!("{thread} {n}")).collect::<Vec<_>>(), "each once, in order");
    }
    println!("\nrounds: 2 threads of {messages} messages, {met} came during the other's turn");
}

#[test]
fn a_message_for_another_thread_waits_for_the_turn_in_flight_and_parks_it() {
    let server = Server::new();
    let mut events = server.follow();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| {
            answered(&server, "anna", "{{say=\"<chat-response>slow</chat-response>\" deltas=10 delta_ms=60}}")
        });
        events.wait_for("her turn", |f| f.event == "chat-message-dispatched");
        let other = answered(&server, "bert", &say("other"));
        assert_eq!(other["responses"], json!(["other"]));
        assert_eq!(slow.join().unwrap()["responses"], json!(["slow"]));
    });
    assert_eq!(server.get_json("/api/threads")["active"], "bert");
    let responses: Vec<_> = {
        events.wait_for("his response", |f| f.event == "thread-response" && f.text("thread") == "bert");
        events.kept("thread-response").iter().map(|f| f.text("text").to_owned()).collect()
    };
    assert_eq!(responses, ["slow", "other"]);
}

#[test]
fn a_repeat_of_a_thread_message_gets_the_kept_answer_also_after_a_restart() {
    let mut server = Server::new();
    let first = thread_send(&server, "anna", &say("once"), Some("m-1"));
    assert_eq!(first.status, 200, "{}", first.text());
    assert_eq!(thread_send(&server, "anna", &say("once"), Some("m-1")).json(), first.json());
    assert_eq!(thread_send(&server, "anna", &say("twice"), Some("m-1")).status, 409, "other content");
    assert_eq!(server.terminate().code(), Some(0));
    server.restart();
    assert_eq!(thread_send(&server, "anna", &say("once"), Some("m-1")).json(), first.json());
    let session = first.json()["sessionId"].as_str().unwrap().to_owned();
    let next = answered(&server, "anna", &say("goes on"));
    assert_eq!(next["sessionId"], session.as_str(), "the thread's session outlives the server");
    let list = server.get_json("/api/threads");
    assert_eq!(list["threads"][0]["messageCount"], 2, "{list}");
}

#[test]
fn a_repeat_that_comes_during_the_turn_shares_its_answer() {
    let server = Server::new();
    let mut events = server.follow();
    let text = "{{say=\"<chat-response>shared</chat-response>\" deltas=10 delta_ms=60}}";
    std::thread::scope(|scope| {
        let sends: Vec<_> = (0..3).map(|_| scope.spawn(|| thread_send(&server, "anna", text, Some("m-1")))).collect();
        for send in sends {
            let answer = send.join().unwrap();
            assert_eq!(answer.json()["responses"], json!(["shared"]), "{}", answer.text());
        }
    });
    events.wait_for("the response", |f| f.event == "thread-response");
    assert_eq!(events.kept("thread-message").len(), 1, "recorded once");
}

#[test]
fn a_chat_send_into_the_conversation_of_a_thread_is_refused() {
    let server = Server::new();
    let session = answered(&server, "anna", &say("hi"))["sessionId"].as_str().unwrap().to_owned();
    let refused = server.try_send(&session, "hello", None, &[]).unwrap_err();
    assert_eq!((refused.status, refused.code().as_str()), (409, "thread_session"));
    let listed = server.get_json("/api/chat/sessions");
    assert!(!listed.to_string().contains(&session), "a thread's session is not in the list: {listed}");
}

#[test]
fn a_thread_goes_on_in_a_fresh_session_after_fifty_messages() {
    let server = Server::new();
    let sessions: Vec<String> = (0..51)
        .map(|n| answered(&server, "anna", &say(&n.to_string()))["sessionId"].as_str().unwrap().to_owned())
        .collect();
    assert!(sessions[..50].iter().all(|s| *s == sessions[0]));
    assert_ne!(sessions[50], sessions[0]);
}

#[test]
fn a_thread_turn_that_ends_in_error_resets_its_session() {
    let server = Server::new();
    let good = answered(&server, "anna", &say("good"));
    let bad = answered(&server, "anna", "{{error}} fails");
    assert_eq!((&bad["success"], &bad["sessionId"]), (&json!(false), &good["sessionId"]));
    let fresh = answered(&server, "anna", &say("fresh"));
    assert_eq!(fresh["success"], true);
    assert_ne!(fresh["sessionId"], good["sessionId"]);
}

#[test]
fn a_message_right_behind_a_failed_turn_goes_to_the_fresh_session() {
    let server = Server::new();
    for round in 0..5 {
        let thread = format!("thread {round}");
        let mut events = server.follow();
        std::thread::scope(|scope| {
            let bad = scope.spawn(|| answered(&server, &thread, "{{error delay_ms=150}} fails"));
            events.wait_for("its turn", |f| f.event == "chat-message-dispatched");
            let next = answered(&server, &thread, &say("next"));
            let bad = bad.join().unwrap();
            assert_eq!((&bad["success"], &next["success"]), (&json!(false), &json!(true)));
            assert_ne!(bad["sessionId"], next["sessionId"]);
        });
    }
}

#[test]
fn a_thread_whose_agent_cannot_start_is_answered_as_failed_and_holds_nobody_up() {
    let server = Options::default().args(["--agent", "/nonexistent/agent"]).start();
    let answer = answered(&server, "anna", "hello");
    assert_eq!(answer["success"], false, "{answer}");
    assert_eq!(answered(&server, "bert", "hello")["success"], false);
}

#[test]
fn a_thread_message_unfinished_at_a_crash_is_told_as_failed_and_never_run_again() {
    let mut server = Server::new();
    let mut events = server.follow();
    let (addr, text) = (server.addr(), "{{hang}} unfinished");
    let body = json!({"thread": "anna", "message": text, "messageId": "m-1"});
    let hanging = std::thread::spawn(move || {
        beebox_chatd::load::client::Client::new(addr).limit(LIMIT).post("/api/threads/send", &body).map(|a| a.status)
    });
    let message = events.wait_for("acceptance", |f| f.event == "thread-message");
    events.wait_for("its turn", |f| f.event == "chat-message-dispatched");
    let cursor = events.cursor();
    server.kill9();
    assert!(hanging.join().unwrap().is_err(), "no answer");
    server.restart();
    let mut events = server.follow_from(Some(&cursor));
    let told = events.wait_for("told as failed", |f| f.event == "chat-turn-failed");
    assert_eq!(told.data["messageUuids"], json!([message.text("messageUuid")]));
    assert_eq!(told.data["willRetry"], false);
    let repeat = thread_send(&server, "anna", text, Some("m-1"));
    assert_eq!((repeat.status, &repeat.json()["success"]), (200, &json!(false)), "{}", repeat.text());
    assert_eq!(answered(&server, "anna", &say("goes on"))["responses"], json!(["goes on"]));
    events.wait_for("its turn", |f| f.event == "chat-message-dispatched");
    events.wait_for("its end", |f| f.event == "chat-complete");
    assert_eq!(events.kept("chat-message-dispatched").len(), 1, "only the new message was dispatched");
}

#[test]
fn a_stopped_thread_turn_is_answered_as_failed() {
    let server = Server::new();
    let mut events = server.follow();
    std::thread::scope(|scope| {
        let hanging = scope.spawn(|| answered(&server, "anna", "{{hang}} for ever"));
        let dispatched = events.wait_for("its turn", |f| f.event == "chat-message-dispatched");
        wait_turn_began(&server, dispatched.text("sessionId"));
        assert_eq!(server.control("stop", dispatched.text("sessionId")), "stopped");
        assert_eq!(hanging.join().unwrap()["success"], false);
    });
    assert!(
        !events.seen().iter().any(|f| f.event == "chat-phase" && f.text("phase") == "stopping"),
        "parked, not stopped"
    );
    assert_eq!(answered(&server, "anna", &say("goes on"))["success"], true);
}

#[test]
fn a_tag_in_the_answer_changes_a_feature_after_the_turn_is_over() {
    let mut server = Server::new();
    let mut events = server.follow();
    let sent = server
        .send("new", r#"{{say="well <chat-app narration=\"on\"/> <Chat-App colour=\"red\" prose=\"maybe\" /> so"}}"#);
    let session = sent.session_id.clone();
    let changed = events.wait_for("the change", |f| f.event == "chat-features-changed");
    assert_eq!(changed.data["features"], json!({"narration": "on", "prose": "on"}));
    let ready = events
        .seen()
        .iter()
        .rposition(|f| f.event == "chat-phase" && f.text("phase") == "ready")
        .expect("the phase was told");
    let told = events.seen().iter().position(|f| f.event == "chat-features-changed").expect("it was told");
    assert!(ready < told, "busy flips before features");
    // A listener that reacts to the event is not refused.
    let body = json!({"session": session, "feature": "prose", "value": "off"});
    assert_eq!(server.post("/api/chat/features", &body).json()["features"], json!({"narration": "on", "prose": "off"}));
    for (feature, value) in [("colour", "red"), ("prose", "maybe")] {
        let body = json!({"session": session, "feature": feature, "value": value});
        assert_eq!(server.post("/api/chat/features", &body).status, 400);
    }

    server.converse(&session, "next words");
    let raw = raw_transcript(&server, &session);
    assert!(raw.contains(r#"<chat-app narration=\"on\" prose=\"off\" />\nnext words"#), "the agent is told: {raw}");
    let history = server.history(&session);
    let shown = texts(&history, "assistant").join("|") + &texts(&history, "user")[1];
    assert!(!shown.to_lowercase().contains("chat-app"), "neither snapshot nor tag is shown: {shown}");

    assert_eq!(server.terminate().code(), Some(0));
    server.restart();
    let kept = server.get_json(&format!("/api/chat/features?session={session}"));
    assert_eq!(kept["features"], json!({"narration": "on", "prose": "off"}));
}

#[test]
fn seeds_of_a_new_conversation_reach_the_agent_and_are_kept() {
    let mut server = Server::new();
    let mut events = server.follow();
    let seeded = |session: &str, seeds: Value| {
        server.post("/api/chat/send", &json!({"session": session, "message": "hello", "seedFeatures": seeds}))
    };
    let bad = seeded("main", json!({"prose": "maybe"}));
    assert_eq!(bad.status, 400, "{}", bad.text());
    assert_eq!(server.get_json("/api/chat/bootstrap")["kind"], "empty", "a refused send leaves nothing behind");
    let answer = seeded("new", json!({"narration": "on"}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let session = answer.json()["sessionId"].as_str().unwrap().to_owned();
    events.end_of_message(answer.json()["messageUuid"].as_str().unwrap());
    assert!(raw_transcript(&server, &session).contains(r#"<chat-app narration=\"on\" prose=\"on\" />\nhello"#));
    // Seeds are for a conversation that has not begun.
    assert_eq!(seeded(&session, json!({"prose": "off"})).status, 200);
    server.kill9();
    server.restart();
    let kept = server.get_json(&format!("/api/chat/features?session={session}"));
    assert_eq!(kept["features"], json!({"narration": "on", "prose": "on"}));
}

#[test]
fn frames_of_a_turn_are_resumed_after_the_last_one_seen() {
    let server = Server::new();
    let mut events = server.follow();
    let sent = server.send("new", "{{deltas=12 delta_ms=30}} frames");
    events.wait_for("a frame", |f| f.event == "chat-turn");
    let turn = |after: u64| server.get_json(&format!("/api/chat/turns/{}?after={after}&wait=20000", sent.message_uuid));
    let (mut after, mut all) = (0, Vec::new());
    loop {
        let page = turn(after);
        assert_eq!(page["gap"], false);
        for frame in page["frames"].as_array().unwrap() {
            all.push(frame["seq"].as_u64().unwrap());
        }
        after = all.last().copied().unwrap_or(0);
        if page["complete"] == true {
            assert_eq!(page["error"], Value::Null);
            break;
        }
    }
    assert_eq!(all, (1..=after).collect::<Vec<_>>());
    assert!(after > 12);
    assert_eq!(server.get("/api/chat/turns/never-was?after=0").status, 404);

    let flood = server.send(&sent.session_id, "{{flood=6000}} many");
    events.turn_end(&flood.message_uuid);
    let page = server.get_json(&format!("/api/chat/turns/{}?after=10", flood.message_uuid));
    assert_eq!((&page["gap"], &page["complete"]), (&json!(true), &json!(true)), "the middle is gone, and that is told");
    assert!(page["frames"].as_array().unwrap().len() <= 4000);
}

#[test]
fn of_twenty_servers_started_on_one_box_exactly_one_serves_it() {
    let dir = tempfile::tempdir().unwrap();
    let box_dir = dir.path().join("box");
    let started: Vec<_> = std::thread::scope(|scope| {
        let starts: Vec<_> =
            (0..20).map(|_| scope.spawn(|| Options::default().box_dir(&box_dir).try_start())).collect();
        starts.into_iter().map(|s| s.join().unwrap()).collect()
    });
    let (won, lost): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
    assert_eq!(won.len(), 1);
    for refused in lost {
        let why = refused.err().unwrap().to_string();
        assert!(why.contains("is served by"), "{why}");
    }
    let winner = won.into_iter().next().unwrap().unwrap();
    assert_eq!(winner.converse("new", "hello").1.event, "chat-complete");
}

#[test]
fn a_torn_or_foreign_state_file_is_set_aside_and_the_server_serves() {
    for content in [&b"{\"sessionId\": \"half"[..], b"\xff\xfe", b"[1,2]", b""] {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("box/.beebox");
        std::fs::create_dir_all(&state).unwrap();
        std::fs::write(state.join("chat-session-id.json"), content).unwrap();
        let server = Options::default().box_dir(&dir.path().join("box")).start();
        let aside = std::fs::read_dir(&state)
            .unwrap()
            .flatten()
            .find(|e| e.file_name().to_string_lossy().starts_with("chat-session-id.set-aside-"))
            .expect("kept under another name");
        assert_eq!(std::fs::read(aside.path()).unwrap(), content);
        assert!(server.stderr().contains("chat-session-id.json"), "named: {}", server.stderr());
        let (main, _) = server.converse("main", "hello");
        assert!(std::fs::read_to_string(state.join("chat-session-id.json")).unwrap().contains(&main.session_id));
    }
}

#[test]
fn sigterm_lets_a_turn_finish_and_keeps_the_queue_for_the_next_server() {
    let mut server = Server::new();
    let events = server.follow();
    let first = server.send("new", "{{deltas=20 delta_ms=50}} finishes");
    wait_turn_began(&server, &first.session_id);
    let queued = server.send(&first.session_id, "waits");
    let waiting = server.send("new", "also waits");
    let cursor = events.hello.data["epoch"].as_str().map(|epoch| format!("{epoch}.0")).unwrap();
    assert_eq!(server.terminate().code(), Some(0), "{}", server.stderr());
    server.restart();
    let mut events = server.follow_from(Some(&cursor));
    assert_eq!(events.turn_end(&first.message_uuid).data["isError"], false, "drained");
    for message in [&queued.message_uuid, &waiting.message_uuid] {
        assert_eq!(events.end_of_message(message).event, "chat-complete");
    }
    let ends = events.seen().iter().filter(|f| is_end_of(f, &queued.message_uuid)).count();
    assert_eq!(ends, 1);
}

#[test]
fn sigterm_during_sends_loses_none_that_was_answered() {
    let mut server = Server::new();
    let addr = server.addr();
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let senders: Vec<_> = (0..4)
        .map(|n| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                let mut accepted = Vec::new();
                for i in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let mut client = beebox_chatd::load::client::Client::new(addr).limit(LIMIT);
                    match client.send("main", &format!("sender {n} message {i}"), None, &[]) {
                        Ok(Ok(answer)) => accepted.push(answer.message_uuid),
                        Ok(Err(_)) | Err(_) => break,
                    }
                }
                accepted
            })
        })
        .collect();
    server.wait_until("some turns", |s| {
        (s.get_json("/api/chat/sessions")["sessions"][0]["running"] == true).then_some(())
    });
    let status = server.terminate();
    stop.store(true, Ordering::Relaxed);
    let accepted: Vec<String> = senders.into_iter().flat_map(|s| s.join().unwrap()).collect();
    assert_eq!(status.code(), Some(0), "{}", server.stderr());
    assert!(!accepted.is_empty());
    server.restart();
    let main = server.get_json("/api/chat/bootstrap")["sessionId"].as_str().unwrap().to_owned();
    server.wait_until("everything delivered", |s| (s.bootstrap(&main)["pending"] == json!([])).then_some(()));
    let delivered = server.bootstrap(&main)["delivered"].to_string();
    for uuid in accepted {
        assert!(delivered.contains(&uuid), "{uuid} is missing in {delivered}");
    }
}

#[test]
fn sigterm_during_a_start_ends_in_time_and_the_message_is_delivered_later() {
    let dir = tempfile::tempdir().unwrap();
    let begun = dir.path().join("begun");
    let hook = format!("if [ ! -e {0} ]; then touch {0}; sleep 60; fi", begun.display());
    let mut server = Options::default().args(["--prepare", &hook, "--drain-s", "0"]).start();
    let sent = server.send("new", "in its start");
    server.wait_until("the hook", |_| begun.exists().then_some(()));
    let began = Instant::now();
    assert_eq!(server.terminate().code(), Some(0), "{}", server.stderr());
    assert!(began.elapsed() < Duration::from_secs(25), "far from the hook's minute, also on a busy machine");
    server.restart();
    let mut events = server.follow_from(None);
    if server.bootstrap(&sent.session_id)["pending"] != json!([]) {
        events.wait_for("its end", |f| is_end_of(f, &sent.message_uuid));
    }
    assert_eq!(texts(&server.history(&sent.session_id), "user"), ["in its start"]);
}

#[test]
fn sigterm_while_slow_readers_catch_up_ends_in_time_and_the_whole_journal_is_read_afterwards() {
    use std::io::{Read as _, Write as _};
    let mut server = Options::default().args(["--drain-s", "0"]).start();
    let first = server.follow();
    let begin = first.hello.data["epoch"].as_str().map(|epoch| format!("{epoch}.0")).unwrap();
    drop(first);
    // More than sockets hold: readers that take nothing stay in the middle of it.
    let held = server.send("new", "{{hang}} behind which the others wait");
    wait_turn_began(&server, &held.session_id);
    let words = "w".repeat(64 * 1024);
    let mut sent = vec![held.message_uuid];
    sent.extend((0..400).map(|_| server.send(&held.session_id, &words).message_uuid));
    let slow: Vec<_> = (0..4)
        .map(|_| {
            let mut socket = std::net::TcpStream::connect(server.addr()).unwrap();
            write!(
                socket,
                "GET /api/events?after={begin} HTTP/1.1\r\nHost: {}\r\nAccept: text/event-stream\r\n\r\n",
                server.addr()
            )
            .unwrap();
            let mut some = [0; 4096];
            assert!(socket.read(&mut some).unwrap() > 0, "it began");
            socket
        })
        .collect();
    server.wait_until("all are behind, their sockets full", |s| {
        let page = s.get("/metrics").text();
        let all = |name: &str| page.lines().any(|l| l == format!("beebox_push_{name} {}", slow.len()));
        (all("replaying_clients") && all("blocked_clients")).then_some(())
    });
    assert_eq!(server.terminate().code(), Some(0), "{}", server.stderr());
    assert!(!server.stderr().contains("did not end in time"), "{}", server.stderr());
    drop(slow);
    server.restart();
    let mut events = server.follow_from(Some(&begin));
    let last = sent.last().unwrap().clone();
    events.wait_for("the last of it", |f| f.event == "chat-user-message" && f.text("messageUuid") == last);
    let told: Vec<_> = events.kept("chat-user-message").iter().map(|f| f.text("messageUuid").to_owned()).collect();
    assert_eq!(told, sent, "each once, in order");
}

#[test]
fn a_second_sigterm_skips_the_drain() {
    let mut server = Options::default().args(["--drain-s", "600"]).start();
    let sent = server.send("new", "{{hang}} for ever");
    wait_turn_began(&server, &sent.session_id);
    proc::signal(server.pid(), Signal::TERM);
    server.wait_until("it goes down", |s| (s.get("/readyz").status == 503).then_some(()));
    assert_eq!(server.terminate().code(), Some(0), "{}", server.stderr());
}

#[test]
fn requests_that_come_again_and_again_in_a_turn_leave_room_for_other_conversations() {
    let server = Server::new();
    let sent = server.send("new", "{{hang ignore=interrupt}} for ever");
    wait_turn_began(&server, &sent.session_id);
    let mut client = server.client();
    let places = || {
        let page = server.get("/metrics").text();
        let line = page.lines().find(|l| l.starts_with("beebox_journal_places ")).unwrap().to_owned();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    for _ in 0..60 {
        let answer = client.post("/api/chat/interrupt", &json!({"session": sent.session_id})).unwrap();
        assert_eq!(answer.status, 200);
    }
    assert!(places() < 30, "{} places are held", places());
}

#[test]
fn a_start_that_takes_too_long_is_logged_once_with_a_dump() {
    let dir = tempfile::tempdir().unwrap();
    let gate = dir.path().join("gate");
    let hook = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let server = Options::default().args(["--prepare", &hook, "--stuck-s", "1"]).start();
    let mut events = server.follow();
    let sent = server.send("new", "blocked");
    let told = format!("session {} has been starting for more than 1 s", sent.session_id);
    server.wait_until("the log", |s| s.stderr().contains("push: ").then_some(()));
    assert_eq!(server.stderr().matches(&told).count(), 1, "{}", server.stderr());
    assert!(server.stderr().contains("sweep"), "with the threads: {}", server.stderr());
    std::fs::write(&gate, "").unwrap();
    events.end_of_message(&sent.message_uuid);
}

#[test]
fn a_stop_that_takes_too_long_is_logged_once_with_a_dump() {
    let server = Options::default().args(["--stuck-s", "1"]).start();
    let sent = server.send("new", "{{ignore=both hang}} stubborn");
    wait_turn_began(&server, &sent.session_id);
    assert_eq!(server.control("stop", &sent.session_id), "stopped");
    // It is killed after its 7 s.
    server.wait_phase(&sent.session_id, "idle");
    let log = server.stderr();
    let told = format!("session {} has been stopping for more than 1 s; what the server is at:", sent.session_id);
    let (before, page) = log.split_once(&told).unwrap_or_else(|| panic!("not told: {log}"));
    assert!(!before.contains("has been stopping") && !page.contains("has been stopping"), "once: {log}");
    let row = page.lines().find(|l| l.trim_start().starts_with(&sent.session_id)).expect("its row");
    assert!(row.contains("stopping") && row.contains(" pid "), "{row}");
}

#[test]
fn a_dump_names_every_thread_and_session_and_shows_no_words_of_theirs() {
    let mut server = Server::new();
    let sent = server.send("new", "{{hang}} secret words");
    wait_turn_began(&server, &sent.session_id);
    answered(&server, "anna", &say("x"));
    let page = server.get("/api/debug/threads").text();
    for wanted in
        [sent.session_id.as_str(), "streaming", "last message", "of a thread", "gate", "journal", "waits for its agent"]
    {
        assert!(page.contains(wanted), "{wanted} is missing in {page}");
    }
    assert!(page.contains("locks held for over 1000 ms: 0"), "{page}");
    assert!(!page.contains("secret"), "{page}");
    server.wait_until("a row for each thread of the process", |s| {
        let page = s.get("/api/debug/threads").text();
        (s.thread_names().len() == page.lines().filter(|l| l.contains(" tid ") && l.contains(" cpu ")).count())
            .then_some(())
    });
    proc::signal(server.pid(), Signal::QUIT);
    server.wait_until("the dump on stderr", |s| s.stderr().contains("locks held for over 1000 ms: 0").then_some(()));
    assert!(server.is_running());
}

#[test]
fn a_dump_is_answered_while_every_worker_is_busy() {
    let server = Options::default().args(["--http-workers", "1"]).start();
    let mut events = server.follow();
    std::thread::scope(|scope| {
        for n in 0..3 {
            let server = &server;
            scope.spawn(move || {
                answered(
                    server,
                    &format!("t{n}"),
                    "{{say=\"<chat-response>x</chat-response>\" deltas=20 delta_ms=100}}",
                )
            });
        }
        events.wait_for("a turn", |f| f.event == "chat-message-dispatched");
        server.wait_until("a dump of waiting threads", |s| {
            let page = s.get("/api/debug/threads").text();
            (page.contains("waits for a turn to end") && page.contains("waits for its place")).then_some(())
        });
    });
}

/// Waits for a dump, asked for by HTTP and then printed on a signal, in which all of `wanted` stands.
fn dumped(server: &Server, wanted: &[&str]) -> String {
    let has_all = |page: &str| wanted.iter().all(|words| page.contains(words));
    let page = server.wait_until(&format!("a dump with {wanted:?}"), |s| {
        Some(s.get("/api/debug/threads").text()).filter(|page| has_all(page))
    });
    let before = server.stderr().len();
    proc::signal(server.pid(), Signal::QUIT);
    server.wait_until(&format!("a dump on stderr with {wanted:?}"), |s| has_all(&s.stderr()[before..]).then_some(()));
    page
}

#[test]
fn a_lock_that_is_held_too_long_is_told_with_who_holds_it_and_who_waits_while_no_worker_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let hold = dir.path().join("hold");
    let faults = format!("state_locked=hold:{0},sessions_locked=hold:{0}", hold.display());
    let server = Options::default().args(["--http-workers", "2"]).env("BEEBOX_FAULT", &faults).start();
    let session = server.converse("new", "hello").0.session_id;
    for lock in ["state", "sessions"] {
        std::fs::write(&hold, "").unwrap();
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| match lock {
                "state" => {
                    let body = json!({"session": session, "feature": "prose", "value": "off"});
                    server.post("/api/chat/features", &body).status
                }
                _ => server.get("/api/chat/sessions").status,
            });
            let held =
                if lock == "state" { format!("state of {session}: by http-") } else { "sessions: by http-".into() };
            dumped(&server, &[&held, "locks held for over 1000 ms: 1"]);
            // The other worker.
            let waiter = scope.spawn(|| server.get(&format!("/api/chat/status?session={session}")).status);
            let waits = if lock == "state" { "waits for a lock state" } else { "waits for the lock sessions" };
            let page = dumped(&server, &[&held, waits]);
            if lock == "state" {
                assert!(page.contains(&format!("{session} (its first id): its lock is held")), "{page}");
            }
            let told = format!("the lock {lock} is held for more than 5 s; what the server is at:");
            server.wait_until("the alarm", |s| s.stderr().contains(&told).then_some(()));
            server.wait_until("its page", |s| s.stderr().split_once(&told)?.1.contains(&held).then_some(()));
            std::fs::remove_file(&hold).unwrap();
            assert_eq!((holder.join().unwrap(), waiter.join().unwrap()), (200, 200));
            assert_eq!(server.stderr().matches(&told).count(), 1, "once");
        });
    }
    assert!(server.get("/api/debug/threads").text().contains("locks held for over 1000 ms: 0"));
}

#[test]
fn a_thread_that_spins_shows_its_processor_time_and_who_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let hold = dir.path().join("hold");
    let fault = format!("before_record=spin:{}", hold.display());
    let server = Options::default().env("BEEBOX_FAULT", &fault).start();
    std::fs::write(&hold, "").unwrap();
    std::thread::scope(|scope| {
        let send = scope.spawn(|| server.send("new", "recorded when it no longer spins"));
        let cpu_ms = |page: &str| -> u64 {
            let row = page.lines().find(|l| l.trim_start().starts_with("journal ")).expect("its row");
            row.split_once(" cpu ").unwrap().1.split_whitespace().next().unwrap().parse().unwrap()
        };
        let first = cpu_ms(&dumped(&server, &["waits for a commit"]));
        let page = server.wait_until("a processor at work", |s| {
            Some(s.get("/api/debug/threads").text()).filter(|page| cpu_ms(page) >= first + 200)
        });
        let row = page.lines().find(|l| l.trim_start().starts_with("journal ")).unwrap();
        assert!(row.contains(" working for "), "{row}");
        std::fs::remove_file(&hold).unwrap();
        send.join().unwrap();
    });
}

#[test]
fn a_dump_shows_an_agent_that_reads_nothing_and_the_request_that_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let deaf = dir.path().join("deaf");
    std::fs::write(&deaf, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    std::fs::set_permissions(&deaf, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let server = Options::default().args(["--agent", deaf.to_str().unwrap()]).start();
    // More than its stdin takes.
    let words = "x".repeat(300_000);
    let session = server.send("new", &words).session_id;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| answered(&server, "anna", &words));
        let page = dumped(
            &server,
            &[
                &session,
                "streaming",
                "said nothing yet",
                "of a thread",
                "waits for its agent",
                "waits for a turn to end",
            ],
        );
        assert!(!page.contains("xxxx"), "{page}");
        let of_thread = page.lines().find(|l| l.contains("of a thread")).unwrap().split_whitespace().next().unwrap();
        assert_eq!(server.control("stop", of_thread), "stopped");
        assert_eq!(waiting.join().unwrap()["success"], false);
    });
    assert_eq!(server.control("stop", &session), "stopped");
    server.wait_phase(&session, "idle");
}

#[test]
fn sighup_reads_the_token_file_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let write = |token: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::write(&file, token).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    let (old, new) = ("a".repeat(40), "b".repeat(40));
    write(&old);
    let server = Options::default().args(["--token-file", file.to_str().unwrap()]).bearer(&old).start();
    let status = |token: &str| server.client().bearer(token).get("/api/chat/sessions").unwrap().status;
    assert_eq!((status(&old), status(&new)), (200, 401));
    write("");
    proc::signal(server.pid(), Signal::HUP);
    server.wait_until("the bad file is told", |s| s.stderr().contains("the token stays as it was").then_some(()));
    assert_eq!(status(&old), 200);
    write(&new);
    proc::signal(server.pid(), Signal::HUP);
    server.wait_until("the new token", |_| (status(&new) == 200).then_some(()));
    assert_eq!(status(&old), 401);
}

#[test]
fn the_supervisor_hears_that_the_server_is_ready_lives_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let mut server =
        Options::default().env("NOTIFY_SOCKET", path.to_str().unwrap()).env("WATCHDOG_USEC", "200000").start();
    let mut heard = Vec::new();
    let next = || {
        let mut bytes = [0; 64];
        let len = socket.recv(&mut bytes).expect("a word");
        String::from_utf8(bytes[..len].to_vec()).unwrap()
    };
    while heard.iter().filter(|word| *word == "WATCHDOG=1").count() < 3 || !heard.contains(&"READY=1".to_owned()) {
        heard.push(next());
    }
    assert_eq!(server.terminate().code(), Some(0));
    while next() != "STOPPING=1" {}
}

#[test]
fn a_hundred_clients_get_in_where_256_files_may_be_open_and_messages_still_pass() {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    let dir = tempfile::tempdir().unwrap();
    let start = format!(
        "ulimit -n 256; exec {} --box {} --listen 127.0.0.1:0",
        env!("CARGO_BIN_EXE_beebox-chatd"),
        dir.path().join("box").display()
    );
    let mut server =
        std::process::Command::new("sh").args(["-c", &start]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let addr: std::net::SocketAddr = line.trim().rsplit('/').next().unwrap().parse().unwrap();
    let ask = |stream: &mut std::net::TcpStream| {
        stream.write_all(format!("GET /healthz HTTP/1.1\r\nHost: {addr}\r\n\r\n").as_bytes()).unwrap();
        let mut answer = [0; 512];
        let n = stream.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..n]).split(' ').nth(1).unwrap_or_default().to_owned()
    };
    // A burst: all are open before the first is asked.
    let mut clients: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(addr).unwrap()).collect();
    let answers: Vec<_> = clients.iter_mut().map(ask).collect();
    let mut client = beebox_chatd::load::client::Client::new(addr);
    let sent = client.send("new", "beside a hundred clients", None, &[]);
    let agents = || beebox_chatd::load::proc::children(server.id()).len();
    let deadline = Instant::now() + crate::support::LIMIT;
    while agents() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let lived = agents();
    beebox_chatd::load::proc::signal(server.id(), rustix::process::Signal::TERM);
    server.wait().unwrap();
    assert!(answers.iter().all(|status| status == "200"), "{answers:?}");
    assert!(sent.unwrap().is_ok() && lived == 1);
}
