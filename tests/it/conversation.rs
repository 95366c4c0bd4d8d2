//! A conversation with the embedded agent over the real port: turns, photos, queues, stop, restart, deaths of the agent
//! and of the server.

use std::collections::BTreeSet;

use beebox_chatd::load::client::Photo;
use beebox_chatd::load::proc;
use serde_json::{Value, json};

use crate::support::{LIMIT, Options, Server, entry_text, texts};

/// Ids of the user entries, in order.
fn user_ids(history: &Value) -> Vec<String> {
    let entries = history["entries"].as_array().expect("entries");
    entries.iter().filter(|e| e["type"] == "user").map(|e| e["uuid"].as_str().unwrap().to_owned()).collect()
}

fn wait_streaming(server: &Server, session: &str, turn: &str) {
    let mut events = server.follow();
    let bootstrap = server.bootstrap(session);
    if bootstrap["status"]["phase"] == "streaming" && bootstrap["status"]["turnId"] == turn {
        return;
    }
    events.wait_for("a first frame of the turn", |f| f.event == "chat-turn" && f.text("turnId") == turn);
}

#[test]
fn three_turns_a_photo_and_the_history_after_a_restart_of_the_server() {
    let mut server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "first words");
    assert_eq!(first.turn_id.as_deref(), Some(first.message_uuid.as_str()), "it leads its own turn");
    let end = events.end_of_message(&first.message_uuid);
    assert_eq!(end.event, "chat-complete");
    assert_eq!(end.data["isError"], false);
    let session = first.session_id.clone();

    server.converse(&session, "second {{think=1 tool=1 deltas=5}}");
    let photo = Photo::png(1, 1_000_000, 7);
    let third = server.send_as(&session, "look at [image#1] please", None, std::slice::from_ref(&photo));
    events.end_of_message(&third.message_uuid);

    // The instant the end is told, history holds the answer.
    let before = server.history(&session);
    assert_eq!(before["total"], before["entries"].as_array().unwrap().len());
    assert_eq!(texts(&before, "user").len(), 3);
    let ids = user_ids(&before);
    assert_eq!(ids[0], first.message_uuid, "the transcript's user line carries the accepted uuid");
    assert_eq!(ids[2], third.message_uuid);
    let entry =
        before["entries"].as_array().unwrap().iter().find(|e| e["uuid"] == third.message_uuid.as_str()).unwrap();
    let image = entry["content"].as_array().unwrap().iter().find(|b| b["type"] == "image").unwrap();
    let reference = image["imageRef"].as_str().unwrap().to_owned();
    let answer = server.get(&format!("/api/session-media/{reference}"));
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("image/png"));
    assert!(answer.body == photo.bytes, "the photo comes back byte for byte");

    let cursor = events.cursor();
    let status = server.terminate();
    assert_eq!(status.code(), Some(0));
    server.restart();
    assert_eq!(server.history(&session)["entries"], before["entries"], "history whole, ids stable");
    let mut events = server.follow_from(Some(&cursor));
    let fourth = server.send(&session, "after the restart");
    events.end_of_message(&fourth.message_uuid);
    assert!(events.kept("chat-user-message").len() == 1, "the cursor goes on without hole or double");
    assert_eq!(texts(&server.history(&session), "user").len(), 4);
}

#[test]
fn two_messages_while_streaming_become_one_merged_turn() {
    let server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "{{deltas=20 delta_ms=40}} slow");
    let session = first.session_id.clone();
    wait_streaming(&server, &session, &first.message_uuid);
    let photo = |seed| Photo::png(1, 20_000, seed);
    let second = server.send_as(&session, "two [image#1]", None, &[photo(1)]);
    let third = server.send_as(&session, "three [image#1]", None, &[photo(2)]);
    assert!(second.queued && third.queued);
    assert_eq!(server.status(&session)["queued"], 2);
    let pending = server.bootstrap(&session)["pending"].clone();
    let states: Vec<_> = pending.as_array().unwrap().iter().map(|p| p["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["dispatched", "accepted", "accepted"]);
    let url = pending[1]["content"].as_array().unwrap().iter().find_map(|b| b["imageUrl"].as_str()).unwrap();
    assert!(server.get(url).body == photo(1).bytes, "a waiting photo can be seen");

    assert_eq!(events.turn_of(&third.message_uuid), second.message_uuid, "one turn, named by its first message");
    events.end_of_message(&third.message_uuid);
    let history = server.history(&session);
    let merged =
        history["entries"].as_array().unwrap().iter().find(|e| e["uuid"] == second.message_uuid.as_str()).unwrap();
    let text = entry_text(merged);
    assert!(text.contains("two") && text.contains("three"), "{text}");
    let photos: Vec<_> = merged["content"].as_array().unwrap().iter().filter_map(|b| b["imageRef"].as_str()).collect();
    assert_eq!(photos.len(), 2);
    for (reference, seed) in photos.iter().zip([1, 2]) {
        assert!(server.get(&format!("/api/session-media/{reference}")).body == photo(seed).bytes);
    }
    assert_eq!(server.bootstrap(&session)["pending"], json!([]));
}

#[test]
fn stop_with_a_queue_clears_it_before_the_answer_and_sends_nothing_old() {
    let server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "{{deltas=200 delta_ms=40}} long");
    let session = first.session_id.clone();
    wait_streaming(&server, &session, &first.message_uuid);
    let queued = server.send(&session, "never sent");
    assert_eq!(server.control("stop", &session), "stopped");
    let pending = server.bootstrap(&session)["pending"].clone();
    assert!(pending.as_array().unwrap().iter().all(|p| p["uuid"] != queued.message_uuid.as_str()), "{pending}");
    let cleared = events.wait_for("the queue is cleared", |f| f.event == "chat-queue-cleared");
    assert_eq!(cleared.data["messageUuids"], json!([queued.message_uuid]));
    events.turn_end(&first.message_uuid);
    server.wait_phase(&session, "idle");
    let after = server.send(&session, "afterwards");
    events.end_of_message(&after.message_uuid);
    let users = texts(&server.history(&session), "user").join("|");
    assert!(users.contains("afterwards") && !users.contains("never sent"), "{users}");
}

#[test]
fn restart_with_a_queue_delivers_it_to_a_fresh_run() {
    let server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "{{hang=1}} wedged");
    let session = first.session_id.clone();
    wait_streaming(&server, &session, &first.message_uuid);
    let queued = server.send(&session, "waits behind it");
    assert_eq!(server.control("restart", &session), "restarted");
    let end = events.end_of_message(&queued.message_uuid);
    assert_eq!(end.event, "chat-complete");
    let told = events.turn_end(&first.message_uuid);
    assert_eq!(told.event, "chat-turn-failed", "recorded and broken off: {told:?}");
    assert_eq!(user_ids(&server.history(&session)), [first.message_uuid, queued.message_uuid]);
}

#[test]
fn interrupt_ends_the_turn_and_leaves_the_queue() {
    let server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "{{deltas=500 delta_ms=40}} long");
    let session = first.session_id.clone();
    wait_streaming(&server, &session, &first.message_uuid);
    let queued = server.send(&session, "next");
    assert_eq!(server.control("interrupt", &session), "asked");
    let end = events.turn_end(&first.message_uuid);
    assert_eq!((end.event.as_str(), &end.data["isError"]), ("chat-complete", &json!(true)));
    events.end_of_message(&queued.message_uuid);
    let history = server.history(&session);
    assert_eq!(texts(&history, "interrupted").len(), 1);
    assert_eq!(server.control("interrupt", &session), "nothing", "nothing is in flight");
}

#[test]
fn an_agent_killed_in_a_turn_is_replaced_and_everything_is_there_once() {
    let server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "{{deltas=300 delta_ms=40}} long");
    let session = first.session_id.clone();
    wait_streaming(&server, &session, &first.message_uuid);
    let queued = server.send(&session, "waits");
    for pid in server.agents() {
        proc::signal(pid, rustix::process::Signal::KILL);
    }
    events.end_of_message(&queued.message_uuid);
    events.turn_end(&first.message_uuid);
    let ids = user_ids(&server.history(&session));
    assert_eq!(ids, [first.message_uuid, queued.message_uuid], "each once, in order");
}

#[test]
fn a_server_killed_in_a_turn_delivers_everything_once_after_its_restart() {
    let mut server = Server::new();
    let first = server.send("new", "{{deltas=300 delta_ms=40}} long");
    let session = first.session_id.clone();
    wait_streaming(&server, &session, &first.message_uuid);
    let queued: Vec<_> =
        (0..3).map(|n| server.send_as(&session, &format!("queued {n}"), Some(&format!("id-{n}")), &[])).collect();
    let cursor = server.follow().cursor();
    server.kill9();
    server.restart();
    let repeat = server.send_as(&session, "queued 1", Some("id-1"), &[]);
    assert!(repeat.deduplicated);
    assert_eq!(repeat.message_uuid, queued[1].message_uuid, "a repeat is answered with the first answer's ids");
    let mut events = server.follow_from(Some(&cursor));
    events.turn_end(&queued[0].message_uuid);
    let history = server.history(&session);
    let users = texts(&history, "user").join("\n");
    for n in 0..3 {
        assert_eq!(users.matches(&format!("queued {n}")).count(), 1, "{users}");
    }
    let ids = user_ids(&history);
    assert_eq!(ids, [first.message_uuid, queued[0].message_uuid.clone()], "the three were merged into one turn");
    assert_eq!(server.bootstrap(&session)["pending"], json!([]));
}

#[test]
fn a_session_is_coined_once_for_two_first_sends_to_main() {
    let server = Server::new();
    let sessions: BTreeSet<String> = std::thread::scope(|scope| {
        let sends: Vec<_> = (0..8)
            .map(|n| {
                scope.spawn({
                    let server = &server;
                    move || server.send("main", &format!("hello {n}")).session_id
                })
            })
            .collect();
        sends.into_iter().map(|s| s.join().unwrap()).collect()
    });
    assert_eq!(sessions.len(), 1);
    let main = sessions.into_iter().next().unwrap();
    server.converse(&main, "and it answers");
    let kept = std::fs::read_to_string(server.box_dir().join(".beebox/chat-session-id.json")).unwrap();
    assert!(kept.contains(&main), "{kept}");
    assert_eq!(server.control("reset", &main), "reset");
    let other = server.send("main", "a new conversation").session_id;
    assert_ne!(other, main);
    assert!(server.history(&main)["total"].as_u64().unwrap() > 0, "the old one stays readable");
}

#[test]
fn a_slash_clear_moves_the_conversation_and_keeps_the_old_one() {
    let server = Server::new();
    let mut events = server.follow();
    let (first, _) = server.converse("main", "before");
    let clear = server.send(&first.session_id, "/clear");
    let assigned = events.wait_for("another id", |f| f.event == "chat-session-assigned");
    assert_eq!(assigned.text("was"), first.session_id);
    let now = assigned.text("sessionId").to_owned();
    events.end_of_message(&clear.message_uuid);
    let after = server.send("main", "after");
    assert_eq!(after.session_id, now);
    events.end_of_message(&after.message_uuid);
    assert!(texts(&server.history(&first.session_id), "user").join("|").contains("before"));
    assert!(texts(&server.history(&now), "user").join("|").contains("after"));
}

#[test]
fn an_id_that_the_agent_assigns_late_leads_to_the_conversation_as_the_coined_one_does() {
    let server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "{{late_id_ms=50 deltas=10 delta_ms=30}} late");
    let assigned = events.wait_for("another id", |f| f.event == "chat-session-assigned");
    assert_eq!(assigned.text("was"), first.session_id);
    let now = assigned.text("sessionId").to_owned();
    events.turn_end(&first.message_uuid);
    assert_eq!(server.history(&first.session_id)["sessionId"], now.as_str());
    let second = server.send(&first.session_id, "by the old id");
    assert_eq!(second.session_id, now);
    events.end_of_message(&second.message_uuid);
}

#[test]
fn an_id_that_was_replaced_is_not_a_second_conversation_in_the_list_also_after_a_restart() {
    let mut server = Server::new();
    let (first, _) = server.converse("new", "{{late_id=late-1}} late");
    let listed = |server: &Server| {
        let rows = server.get_json("/api/chat/sessions")["sessions"].clone();
        rows.as_array().unwrap().iter().map(|r| r["sessionId"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(listed(&server), ["late-1"]);
    assert_eq!(server.terminate().code(), Some(0));
    server.restart();
    assert_eq!(listed(&server), ["late-1"]);
    let (again, _) = server.converse(&first.session_id, "by the old id");
    assert_eq!(again.session_id, "late-1");
}

#[test]
fn an_agent_that_answers_as_another_conversation_is_ended_and_both_stay_what_they_were() {
    let server = Server::new();
    let mut events = server.follow();
    let (other, _) = server.converse("main", "mine");
    let confused = server.send("new", &format!("{{{{late_id={} hang}}}} confused", other.session_id));
    let failed = events.wait_for("the message fails", |f| {
        f.event == "chat-turn-failed" && f.text("turnId") == confused.message_uuid && f.data["willRetry"] == false
    });
    assert!(failed.text("error").contains(&format!("answers as {}", other.session_id)), "{failed:?}");
    assert!(events.kept("chat-session-assigned").is_empty());
    server.wait_phase(&confused.session_id, "idle");
    assert_eq!(
        server.bootstrap(&confused.session_id)["pending"][0]["state"],
        "failed",
        "kept, visible, not sent again"
    );
    for session in [other.session_id.as_str(), confused.session_id.as_str()] {
        let (sent, end) = server.converse(session, "goes on");
        assert_eq!((sent.session_id.as_str(), end.event.as_str()), (session, "chat-complete"));
    }
    assert_eq!(server.send("main", "and again").session_id, other.session_id, "the box's own one");
}

#[test]
fn an_id_that_somebody_looked_at_before_its_agent_had_it_is_one_conversation() {
    let server = Server::new();
    let (before, _) = server.converse("new", "so that there is a folder");
    let folder = server.transcript(&before.session_id).expect("a transcript").parent().unwrap().to_owned();
    // The agent's file is there before its init, and a page that lists files asks for its history.
    std::fs::write(folder.join("late-1.jsonl"), "").unwrap();
    assert_eq!(server.status("late-1")["phase"], "idle");
    let (first, _) = server.converse("new", "{{late_id=late-1}} late");
    assert_eq!(server.status("late-1")["phase"], "ready", "the object that was looked at made way");
    for id in ["late-1", first.session_id.as_str()] {
        assert_eq!(server.converse(id, "goes on").0.session_id, "late-1");
    }
    assert_eq!(texts(&server.history("late-1"), "user").len(), 3);
    assert_eq!(server.agents().len(), 2, "its own, and that of the conversation before");
}

#[test]
fn an_agent_that_goes_back_to_the_id_it_had_is_followed_also_after_a_restart() {
    let mut server = Server::new();
    let (first, _) = server.converse("new", "{{late_id=late-1}} there");
    server.control("stop", "late-1");
    server.wait_phase("late-1", "idle");
    // With the first init of its next run, as a resume that forks does.
    let (back, _) = server.converse("late-1", &format!("{{{{late_id={}}}}} and back", first.session_id));
    assert_eq!(server.status("late-1")["sessionId"], first.session_id.as_str());
    assert_eq!(server.terminate().code(), Some(0));
    server.restart();
    for id in ["late-1", first.session_id.as_str()] {
        assert_eq!(server.converse(id, "goes on").0.session_id, first.session_id);
    }
    assert_eq!(back.session_id, "late-1", "known by that id when it was sent");
}

#[test]
fn a_turn_of_the_agents_own_makes_the_session_busy_and_ends_on_its_own() {
    let server = Server::new();
    let mut events = server.follow();
    let first = server.send("new", "{{bg_ms=200}} later");
    events.end_of_message(&first.message_uuid);
    let own = events
        .wait_for("a turn nobody asked for", |f| f.event == "chat-complete" && f.text("turnId") != first.message_uuid);
    assert_eq!(own.text("sessionId"), first.session_id);
}

#[test]
fn a_failed_turn_is_told_by_is_error_and_its_errors() {
    let server = Server::new();
    let (_, end) = server.converse("new", "{{error=1}} please fail");
    assert_eq!(end.event, "chat-complete");
    assert_eq!(end.data["isError"], true);
}

#[test]
fn an_agent_that_dies_before_recording_is_tried_three_times_then_the_message_fails_and_can_be_retried() {
    let server = Server::new();
    let mut events = server.follow();
    server.converse("main", "so that the agent is known to keep our ids");
    let main = server.get_json("/api/chat/bootstrap")["sessionId"].as_str().unwrap().to_owned();
    let doomed = server.send(&main, "{{die=before user_flush_ms=5000}} doomed");
    let end = events.wait_for("the end of its last try", |f| {
        f.event == "chat-turn-failed" && f.text("turnId") == doomed.message_uuid && f.data["willRetry"] == false
    });
    assert!(end.text("error").contains("3 times"), "{end:?}");
    let pending = server.bootstrap(&main)["pending"].clone();
    assert_eq!(
        (pending[0]["state"].as_str(), pending[0]["uuid"].as_str()),
        (Some("failed"), Some(doomed.message_uuid.as_str()))
    );
    let body = json!({"session": main, "messageUuid": doomed.message_uuid});
    let mut events = server.follow();
    assert_eq!(server.post("/api/chat/pending/retry", &body).status, 200);
    events.wait_for("it fails again", |f| {
        f.event == "chat-turn-failed" && f.text("turnId") == doomed.message_uuid && f.data["willRetry"] == false
    });
    assert_eq!(server.post("/api/chat/pending/discard", &body).status, 200);
    assert_eq!(server.post("/api/chat/pending/discard", &body).status, 404);
    assert_eq!(server.bootstrap(&main)["pending"], json!([]));
    let (_, end) = server.converse(&main, "goes on");
    assert_eq!(end.event, "chat-complete");
}

#[test]
fn sigterm_ends_in_time_with_a_browser_attached_and_an_agent_that_ignores_it() {
    let mut server = Options::default().args(["--drain-s", "0"]).start();
    let mut events = server.follow();
    let first = server.send("new", "{{ignore=both hang=1}} stubborn");
    events.wait_for("its turn", |f| f.event == "chat-message-dispatched");
    wait_streaming(&server, &first.session_id, &first.message_uuid);
    let agents = server.agents();
    assert_eq!(agents.len(), 1);
    let began = std::time::Instant::now();
    let status = server.terminate();
    assert_eq!(status.code(), Some(0), "{}", server.stderr());
    assert!(began.elapsed() < std::time::Duration::from_secs(12), "10 s, and what a busy machine adds");
    assert!(proc::exited_within(agents[0], LIMIT), "no agent is left");
}

#[test]
fn the_threads_of_a_server_read_like_the_table_in_the_architecture_page() {
    let server = Server::new();
    server.converse("new", "hello");
    let names = server.thread_names();
    for name in ["gate", "http-00", "http-accept", "journal", "push", "recover", "replay", "signals", "sweep"] {
        assert!(names.iter().any(|n| n == name), "{name} is missing in {names:?}");
    }
    assert!(names.iter().any(|n| n.starts_with("run-")), "{names:?}");
}
