//! Agents behind the server: where history stands when an end is told, what starts and stops leave behind, who outlives
//! a killed server, what a start that fails says. The embedded agent plays the real one; `scripts/real-agent` has it.

use std::time::Duration;

use beebox_chatd::load::proc;
use rustix::process::Signal;
use serde_json::json;

use crate::support::{LIMIT, Options, Server, is_end_of, texts};

/// How often a loop goes round: `variable`, or few.
fn rounds(variable: &str, few: usize) -> usize {
    std::env::var(variable).map_or(few, |n| n.parse().unwrap_or_else(|e| panic!("{variable}={n}: {e}")))
}

/// Processes whose environment names this box's agents, zombies too.
fn of_box(server: &Server) -> Vec<u32> {
    let mark = format!("BEEBOX_RUN={}:", server.box_dir().canonicalize().unwrap().display());
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|b| *b == 0).any(|entry| entry.starts_with(mark.as_bytes()))
        })
        .collect()
}

/// Children of the server in any state; a zombie counts.
fn children_and_zombies(server: &Server) -> Vec<String> {
    let me = server.pid().to_string();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok())
        .filter(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.split_whitespace().nth(1) == Some(&me)))
        .collect()
}

#[test]
fn history_read_at_the_instant_of_an_end_holds_the_answer_whatever_the_agent_flushes_when() {
    // 2.1.197 tells the end up to 100 ms before the transcript has it, 2.1.332 a little after; here in turns.
    let server = Options::default().env("BEEBOX_AGENT_PROFILE", "2.1.197").start();
    let mut events = server.follow();
    let mut session = "new".to_owned();
    let turns = rounds("BEEBOX_TURNS", 40);
    for n in 0..turns {
        let lag = ["", " flush_ms=60", " flush_ms=-20", " flush_ms=3 user_flush_ms=30"][n % 4];
        let sent = server.send(&session, &format!("turn {n} {{{{say=\"answer {n}\"{lag}}}}}"));
        session.clone_from(&sent.session_id);
        events.turn_end(&sent.message_uuid);
        let history = server.get_json(&format!("/api/chat/history?session={session}&tail=4"));
        assert_eq!(texts(&history, "assistant").last(), Some(&format!("answer {n}")), "turn {n}: {history}");
        let last = history["entries"].as_array().unwrap().iter().rfind(|e| e["type"] == "user").unwrap();
        assert_eq!(last["uuid"], sent.message_uuid.as_str());
    }
    assert!(!server.stderr().contains("the transcript lacks"), "the gate gave up:\n{}", server.stderr());
    println!("\nrounds: {turns} ends, the answer in history at each");
}

#[test]
fn rounds_of_start_and_stop_leave_no_thread_descriptor_child_or_zombie() {
    let server = Server::new();
    let mut events = server.follow();
    let (first, _) = server.converse("new", "first");
    let session = first.session_id;
    let stop = || {
        server.control("stop", &session);
        server.wait_phase(&session, "idle");
    };
    stop();
    let before = server.usage();
    let rounds = rounds("BEEBOX_ROUNDS", 25);
    for n in 0..rounds {
        // Stopped behind its turn, in it, and while it starts.
        let text = ["whole", "{{hang}} broken off", "{{init_ms=60000}} at once"][n % 3];
        let sent = server.send(&session, text).message_uuid;
        match n % 3 {
            0 => drop(events.turn_end(&sent)),
            1 => drop(events.wait_for("its turn", |f| f.event == "chat-turn" && f.text("turnId") == sent)),
            _ => {}
        }
        stop();
        if n % 3 != 0 {
            events.wait_for("what became of it", |f| {
                is_end_of(f, &sent)
                    || (f.event == "chat-queue-cleared" && f.data["messageUuids"].to_string().contains(&sent))
            });
        }
    }
    server.wait_until("what runs held is given back", |server| {
        let now = server.usage();
        (now.threads <= before.threads && now.fds <= before.fds && children_and_zombies(server).is_empty())
            .then_some(())
    });
    assert_eq!(of_box(&server), [0; 0], "no process of the box is left");
    println!("\nrounds: {rounds} starts and stops, threads {} and open files {} as before", before.threads, before.fds);
}

#[test]
fn a_killed_server_leaves_no_agent_that_honours_sigterm() {
    let mut server = Server::new();
    let mut events = server.follow();
    let sent = server.send("new", "{{hang}} under way");
    events.wait_for("its turn", |f| f.event == "chat-turn" && f.text("turnId") == sent.message_uuid);
    let agents = server.agents();
    assert_eq!(agents.len(), 1);
    server.kill9();
    assert!(proc::exited_within(agents[0], Duration::from_secs(5)), "it outlives its server");
}

#[test]
fn an_agent_that_outlived_its_server_is_ended_before_its_conversation_is_resumed() {
    let mut server = Server::new();
    let mut events = server.follow();
    let sent = server.send("new", "{{ignore=sigterm hang}} stubborn");
    events.wait_for("its turn", |f| f.event == "chat-turn" && f.text("turnId") == sent.message_uuid);
    let queued = server.send(&sent.session_id, "waits");
    let cursor = events.cursor();
    let agents = server.agents();
    server.kill9();
    assert!(!proc::exited_within(agents[0], Duration::from_millis(100)), "it is one of those that stay");
    server.restart();
    let mut events = server.follow_from(Some(&cursor));
    events.end_of_message(&queued.message_uuid);
    assert!(proc::exited_within(agents[0], Duration::ZERO), "never two agents on one conversation");
    assert!(server.stderr().contains("left running"), "it is told in the log");
    let users = texts(&server.history(&sent.session_id), "user");
    assert_eq!(users.len(), 2, "each once: {users:?}");
}

#[test]
fn a_start_that_fails_says_why_on_the_bus_and_in_the_status_and_keeps_the_message() {
    let server = Options::default().args(["--agent", "/nowhere/claude"]).start();
    let mut events = server.follow();
    let sent = server.send("new", "hello");
    let failed = events.wait_for("the failure", |f| f.event == "chat-turn-failed");
    assert!(failed.text("error").contains("/nowhere/claude is not installed"), "{failed:?}");
    assert_eq!((&failed.data["willRetry"], &failed.data["messageUuids"]), (&json!(true), &json!([sent.message_uuid])));
    let status = server.status(&sent.session_id);
    assert!(status["startError"].as_str().unwrap_or_default().contains("is not installed"), "{status}");
    assert_eq!(server.bootstrap(&sent.session_id)["pending"][0]["uuid"], sent.message_uuid.as_str());
}

#[test]
fn what_was_accepted_before_its_conversation_was_lost_fails_with_the_reason() {
    let mut server = Server::new();
    let (first, _) = server.converse("new", "first");
    let mut events = server.follow();
    let session = first.session_id;
    let held = server.send(&session, "{{init_ms=60000}} held");
    let queued = server.send(&session, "queued");
    events.turn_of(&held.message_uuid);
    let cursor = events.cursor();
    server.kill9();
    std::fs::remove_file(server.transcript(&session).expect("a transcript")).unwrap();
    server.restart();
    let mut events = server.follow_from(Some(&cursor));
    for sent in [&held, &queued] {
        let failed = events.wait_for("the message fails", |f| {
            f.event == "chat-turn-failed"
                && f.data["willRetry"] == false
                && f.data["messageUuids"].to_string().contains(&sent.message_uuid)
        });
        assert!(failed.text("error").contains("transcript of this conversation is gone"), "{failed:?}");
    }
    let pending = server.bootstrap(&session)["pending"].clone();
    let states: Vec<_> = pending.as_array().unwrap().iter().map(|p| p["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["failed", "failed"], "{pending}");
    let refused = server.try_send(&session, "later", None, &[]).expect_err("nothing to resume");
    assert_eq!(refused.status, 410, "{}", refused.text());
}

#[test]
fn a_tool_that_asks_is_refused_unless_the_setting_allows_it() {
    for (flags, runs) in [(&[][..], false), (&["--allow-tools"], true)] {
        let server = Options::default().args(flags.iter().copied()).start();
        let (sent, end) = server.converse("new", "{{tool ask}} please");
        assert_eq!(end.event, "chat-complete");
        let history = server.history(&sent.session_id).to_string();
        assert_eq!(!history.contains("want to proceed with this tool use"), runs, "{history}");
    }
}

#[test]
fn an_agent_killed_from_outside_while_idle_is_replaced_by_the_next_message() {
    let server = Server::new();
    let (first, _) = server.converse("new", "first");
    let agents = server.agents();
    assert!(proc::signal(agents[0], Signal::KILL));
    assert!(proc::exited_within(agents[0], LIMIT));
    server.wait_phase(&first.session_id, "idle");
    let (_, end) = server.converse(&first.session_id, "second");
    assert_eq!(end.event, "chat-complete");
    assert_eq!(texts(&server.history(&first.session_id), "user").len(), 2);
}

#[test]
fn an_interrupt_that_the_agent_only_answers_closes_the_run_after_10_s_and_the_queue_goes_to_a_fresh_one() {
    let server = Server::new();
    let mut events = server.follow();
    let sent = server.send("new", "{{ignore=answered hang}} deaf");
    let session = sent.session_id.clone();
    events.wait_for("its turn", |f| f.event == "chat-turn" && f.text("turnId") == sent.message_uuid);
    let queued = server.send(&session, "waits");
    let before = server.agents();
    let asked = std::time::Instant::now();
    assert_eq!(server.control("interrupt", &session), "asked");
    let end = events.end_of_message(&queued.message_uuid);
    assert_eq!((end.event.as_str(), &end.data["isError"]), ("chat-complete", &json!(false)));
    assert!(asked.elapsed() >= Duration::from_secs(10), "it had its ten seconds");
    events.turn_end(&sent.message_uuid);
    assert_ne!(server.agents(), before);
    assert_eq!(texts(&server.history(&session), "user").len(), 2, "each once");
}

#[test]
fn a_second_server_on_a_box_does_not_start_and_names_the_first() {
    let server = Server::new();
    let refused = Options::default().box_dir(server.box_dir()).try_start();
    let words = refused.err().expect("one server for a box").to_string();
    assert!(words.contains(&format!("is served by the server with pid {}", server.pid())), "{words}");
    let (_, end) = server.converse("new", "and the first goes on");
    assert_eq!(end.event, "chat-complete");
}
