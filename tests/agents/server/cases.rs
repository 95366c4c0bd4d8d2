//! The cases: what is asked, what is done to it meanwhile, and what must be seen at once. That nothing is lost, doubled
//! or out of order is judged behind each case by `Scene::judge`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use beebox_chatd::load::client::{Accepted, Photo};
use beebox_chatd::load::{png, proc};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::scene::{Real, Scene, Start, all_gone, with_word};
use crate::support::{entry_text, texts};

/// How long a process may take to be gone that was asked to.
const GONE: Duration = Duration::from_secs(5);
/// Turns after each of which history is read at once.
const TURNS_READ: usize = 12;

fn says(text: &str) -> Value {
    json!([{"blocks": [{"text": text}]}])
}

/// An answer of some seconds.
fn slowly() -> Value {
    json!([{"blocks": [{"text": "slow words ".repeat(100), "chunks": 100}], "chunk_delay": 0.05}])
}

/// An answer that never ends.
fn endless() -> Value {
    json!([{"blocks": [{"text": "the beginning of an answer", "chunks": 5}], "hang": true}])
}

fn runs(command: &str) -> Value {
    json!([
        {"blocks": [{"tool": "Bash", "input": {"command": command, "description": "a tool"}}]},
        {"blocks": [{"text": "the tool is done"}]},
    ])
}

fn entry<'a>(history: &'a Value, sent: &Accepted) -> &'a Value {
    let found = history["entries"].as_array().unwrap().iter().find(|e| e["uuid"] == sent.message_uuid.as_str());
    found.unwrap_or_else(|| panic!("no entry {}: {history}", sent.message_uuid))
}

fn blocks<'a>(history: &'a Value, kind: &str) -> Vec<&'a Value> {
    let entries = history["entries"].as_array().unwrap().iter();
    entries.flat_map(|e| e["content"].as_array().unwrap()).filter(|b| b["type"] == kind).collect()
}

/// A command that does not end, and a word by which its processes are told from all others. No `sleep`: newer agents
/// refuse a long one.
fn endless_tool() -> (String, String) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let word = format!("3{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    (format!("tail -s {word} -f /dev/null"), word)
}

pub fn text(scene: &mut Scene) {
    let sent = scene.send("hello", &says("good morning"));
    assert_eq!(sent.turn_id.as_deref(), Some(sent.message_uuid.as_str()), "it leads its own turn");
    scene.good_end(&sent);
    let history = scene.history();
    assert_eq!(texts(&history, "assistant"), ["good morning"], "the instant the end is told, the answer is there");
    entry(&history, &sent);
}

pub fn three_turns(scene: &mut Scene) {
    for word in ["one", "two", "three"] {
        scene.converse(word, &says(word));
    }
    assert_eq!(texts(&scene.history(), "assistant"), ["one", "two", "three"]);
    assert_eq!(scene.server.agents().len(), 1, "one run for all of them");
}

pub fn thinking(scene: &mut Scene) {
    let sent = scene.send("think", &json!([{"blocks": [{"think": "it could be so"}, {"text": "it is so"}]}]));
    scene.said("a thought", &sent, |msg| msg["event"]["delta"]["type"] == "thinking_delta");
    scene.good_end(&sent);
    let history = scene.history();
    assert!(blocks(&history, "thinking").iter().any(|b| b["text"] == "it could be so"), "{history}");
    assert!(texts(&history, "assistant").contains(&"it is so".to_owned()), "{history}");
}

pub fn tool(scene: &mut Scene) {
    scene.converse("use a tool", &runs("echo this is $((40 + 2))"));
    let history = scene.history();
    let calls = blocks(&history, "tool_use");
    assert_eq!(calls.len(), 1, "{history}");
    assert_eq!(calls[0]["toolName"], "Bash");
    assert!(calls[0]["resultSummary"].as_str().unwrap_or_default().contains("this is 42"), "{history}");
    assert!(texts(&history, "assistant").contains(&"the tool is done".to_owned()));
}

/// The photo of the message, as the reader of history gets it: type and bytes.
fn photo_of(scene: &Scene, sent: &Accepted) -> (String, Vec<u8>) {
    let history = scene.history();
    let content = entry(&history, sent)["content"].as_array().unwrap();
    let reference = content.iter().find_map(|b| b["imageRef"].as_str()).expect("an image in the user's entry");
    let answer = scene.server.get(&format!("/api/session-media/{reference}"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    (answer.header("content-type").unwrap_or_default().to_owned(), answer.body)
}

pub fn photo(scene: &mut Scene) {
    let photo = Photo::png(1, 100_000, 7);
    let sent = scene.send_with("look at [image#1] please", &says("a picture"), std::slice::from_ref(&photo));
    scene.good_end(&sent);
    let (mime, bytes) = photo_of(scene, &sent);
    assert_eq!(mime, "image/png");
    assert!(bytes == photo.bytes, "byte for byte");
}

pub fn big_photo(scene: &mut Scene) {
    let photo = Photo { id: "image#1".into(), mime: "image/png".into(), bytes: png::noise(2600, 1300, 3) };
    let sent = scene.send_with("look at [image#1] please", &says("large"), std::slice::from_ref(&photo));
    scene.good_end(&sent);
    let (mime, bytes) = photo_of(scene, &sent);
    assert!(mime.starts_with("image/"), "{mime}");
    assert!(!bytes.is_empty() && bytes != photo.bytes, "the agent makes it smaller: it is found by the uuid alone");
}

pub fn two_while_streaming(scene: &mut Scene) {
    let first = scene.send("first", &slowly());
    scene.streams(&first);
    let second = scene.send("second", &says("both"));
    let third = scene.send("third", &says("both"));
    assert!(second.queued && third.queued);
    scene.good_end(&first);
    scene.good_end(&third);
    assert_eq!(scene.events.turn_of(&third.message_uuid), second.message_uuid, "one turn, named by its first message");
    let history = scene.history();
    let merged = entry_text(entry(&history, &second));
    assert!(merged.contains("second") && merged.contains("third"), "{merged}");
}

pub fn interrupt_streaming(scene: &mut Scene) {
    let first = scene.send("first", &slowly());
    scene.streams(&first);
    let second = scene.send("second", &says("next"));
    assert_eq!(scene.server.control("interrupt", &scene.session), "asked");
    let end = scene.end(&first);
    assert_eq!((&end.data["isError"], &end.data["interrupted"]), (&json!(true), &json!(true)), "{end:?}");
    assert_eq!(texts(&scene.history(), "interrupted").len(), 1, "whole the instant its end is told");
    scene.good_end(&second);
    assert_eq!(texts(&scene.history(), "interrupted").len(), 1);
}

pub fn interrupt_in_a_tool(scene: &mut Scene) {
    let (command, word) = endless_tool();
    let first = scene.send("first", &runs(&command));
    let pids = scene.tool_runs(&first, &word);
    assert_eq!(scene.server.control("interrupt", &scene.session), "asked");
    let end = scene.end(&first);
    assert_eq!(end.data["interrupted"], true, "{end:?}");
    assert!(all_gone(&pids, GONE), "the tool's processes end with the turn");
    scene.converse("second", &says("next"));
}

pub fn interrupt_before_init(scene: &mut Scene) {
    let first = scene.send("first", &endless());
    assert_eq!(scene.server.control("interrupt", &scene.session), "asked");
    let end = scene.end(&first);
    assert_ne!(end.data["isError"], false, "{end:?}");
    scene.converse("second", &says("next"));
    // And in a run that is open already, before the turn's own init.
    let third = scene.send("third", &endless());
    assert_eq!(scene.server.control("interrupt", &scene.session), "asked");
    let end = scene.end(&third);
    assert_ne!(end.data["isError"], false, "{end:?}");
    scene.converse("fourth", &says("and on"));
}

pub fn interrupt_idle(scene: &mut Scene) {
    scene.converse("first", &says("one"));
    assert_eq!(scene.server.control("interrupt", &scene.session), "nothing");
    scene.converse("second", &says("two"));
    assert_eq!(texts(&scene.history(), "interrupted").len(), 0);
}

pub fn stop_with_a_queue(scene: &mut Scene) {
    let first = scene.send("first", &slowly());
    scene.streams(&first);
    let queued = scene.send("never sent", &says("never"));
    assert_eq!(scene.server.control("stop", &scene.session), "stopped");
    let pending = scene.server.bootstrap(&scene.session)["pending"].to_string();
    assert!(!pending.contains(&queued.message_uuid), "{pending}");
    scene.events.turn_end(&first.message_uuid);
    scene.server.wait_phase(&scene.session, "idle");
    assert_eq!(scene.server.agents(), [0; 0], "no agent is left");
    scene.converse("afterwards", &says("again"));
    let users = texts(&scene.history(), "user").join("|");
    assert!(users.contains("afterwards") && !users.contains("never sent"), "{users}");
}

pub fn stop_in_a_tool(scene: &mut Scene) {
    let (command, word) = endless_tool();
    let first = scene.send("first", &runs(&command));
    let pids = scene.tool_runs(&first, &word);
    assert_eq!(scene.server.control("stop", &scene.session), "stopped");
    scene.server.wait_phase(&scene.session, "idle");
    assert!(all_gone(&pids, GONE) && with_word(&word).is_empty(), "no process of the tool is left");
    scene.end(&first);
    scene.converse("afterwards", &says("again"));
}

pub fn restart(scene: &mut Scene) {
    let first = scene.send("wedged", &endless());
    scene.streams(&first);
    let queued = scene.send("waits behind it", &says("fresh"));
    let before = scene.server.agents();
    assert_eq!(scene.server.control("restart", &scene.session), "restarted");
    scene.good_end(&queued);
    scene.end(&first);
    assert_ne!(scene.server.agents(), before, "another agent");
}

pub fn reset(scene: &mut Scene) {
    scene.session = "main".to_owned();
    let first = scene.converse("first", &says("one"));
    assert_eq!(scene.server.control("reset", &first.session_id), "reset");
    scene.session = "main".to_owned();
    let second = scene.converse("second", &says("two"));
    assert_ne!(first.session_id, second.session_id);
    assert_eq!(texts(&scene.server.history(&first.session_id), "assistant"), ["one"], "the old one stays readable");
    scene.session.clone_from(&first.session_id);
    scene.converse("and goes on when asked", &says("one more"));
}

/// An agent that is known to keep what it gets: a turn that is not in its transcript is given again.
pub fn agent_killed(scene: &mut Scene) {
    scene.converse("before", &says("one"));
    agent_killed_in_its_first_turn(scene);
}

/// An agent that nothing is known of: if the turn is not in a transcript, it is shown as failed.
pub fn agent_killed_in_its_first_turn(scene: &mut Scene) {
    let first = scene.send("first", &slowly());
    scene.streams(&first);
    let queued = scene.send("waits", &says("next"));
    for pid in scene.server.agents() {
        assert!(proc::signal(pid, Signal::KILL));
    }
    scene.good_end(&queued);
    scene.end(&first);
}

pub fn server_killed(scene: &mut Scene) {
    let first = scene.send("first", &slowly());
    scene.streams(&first);
    let queued: Vec<Accepted> = (0..3).map(|n| scene.send(&format!("queued {n}"), &says("next"))).collect();
    let agents = scene.server.agents();
    assert_eq!(agents.len(), 1);
    scene.server.kill9();
    assert!(all_gone(&agents, GONE), "an agent that honours SIGTERM does not outlive its server");
    scene.server.restart();
    scene.follow_on();
    scene.repeat(3);
    scene.good_end(&queued[0]);
}

fn moves(scene: &mut Scene) {
    let photo = Photo::png(1, 20_000, 5);
    let before = scene.send_with("before [image#1]", &says("one"), std::slice::from_ref(&photo));
    scene.good_end(&before);
    let running = scene.send("over the move", &slowly());
    scene.streams(&running);
    scene.is_written(&running);
    let queued = scene.send("waits over the move", &says("two"));
    scene.move_box();
    let end = scene.events.turn_end(&running.message_uuid);
    assert!(end.text("error").contains("before it finished"), "it was recorded, and is not sent again: {end:?}");
    scene.good_end(&queued);
    scene.converse("after the move", &says("three"));
    let listed = scene.server.get_json("/api/chat/sessions").to_string();
    assert!(listed.contains(&scene.session), "{listed}");
    assert_eq!(texts(&scene.history(), "user").len(), 4);
    assert_eq!(photo_of(scene, &before).1, photo.bytes);
}

pub fn moved_box(real: &Real) {
    let mut scene = Scene::new(real);
    moves(&mut scene);
    scene.judge();
}

pub fn moved_box_of_a_person(real: &Real) {
    let mut scene = Scene::start(real, &Start { outside_home: true, ..Start::default() });
    moves(&mut scene);
    scene.judge();
}

pub fn copy_of_a_live_box(real: &Real) {
    let mut scene = Scene::start(real, &Start { outside_home: true, ..Start::default() });
    scene.converse("before", &says("one"));
    let running = scene.send("while it is copied", &slowly());
    scene.streams(&running);
    let agents = scene.server.agents();
    let copy = scene.serve_a_copy();
    let mut events = copy.follow();
    let words = format!("in the copy FAKE{}", json!({"steps": says("two")}));
    let sent = copy.send(&scene.session, &words);
    let refused = events.wait_for("the refusal", |f| {
        f.event == "chat-turn-failed" && f.data["messageUuids"].to_string().contains(&sent.message_uuid)
    });
    assert!(refused.text("error").contains("another server") && refused.data["willRetry"] == true, "{refused:?}");
    assert_eq!((scene.server.agents(), copy.agents()), (agents, Vec::new()), "one agent in the conversation");
    scene.good_end(&running);
    assert_eq!(scene.server.control("stop", &scene.session), "stopped");
    scene.server.wait_phase(&scene.session, "idle");
    assert_eq!(events.end_of_message(&sent.message_uuid).event, "chat-complete");
    copy.control("stop", &scene.session);
    copy.wait_phase(&scene.session, "idle");
    scene.converse("after the copy", &says("three"));
    let asked = texts(&scene.history(), "user");
    assert_eq!(asked.iter().filter(|t| t.contains("in the copy")).count(), 1, "{asked:?}");
    scene.judge();
}

pub fn resume(scene: &mut Scene) {
    scene.converse("before", &says("one"));
    let before = scene.history();
    assert_eq!(scene.server.terminate().code(), Some(0));
    scene.server.restart();
    scene.follow_on();
    assert_eq!(scene.history()["entries"], before["entries"]);
    scene.converse("after", &says("two"));
    assert_eq!(texts(&scene.history(), "assistant"), ["one", "two"]);
}

pub fn clear(scene: &mut Scene) {
    scene.session = "main".to_owned();
    let first = scene.converse("before", &says("one"));
    let clear = scene.server.send(&first.session_id, "/clear");
    scene.end(&clear);
    scene.session = "main".to_owned();
    let after = scene.converse("after", &says("two"));
    assert_ne!(after.session_id, first.session_id, "another conversation");
    let assigned = scene.events.wait_for("another id", |f| f.event == "chat-session-assigned");
    assert_eq!(
        (assigned.text("was"), assigned.text("sessionId")),
        (first.session_id.as_str(), after.session_id.as_str())
    );
    assert_eq!(texts(&scene.server.history(&first.session_id), "assistant")[0], "one");
    assert_eq!(texts(&scene.history(), "assistant").last().unwrap(), "two");
    // Both stay, also for the next life of the server.
    scene.server.kill9();
    scene.server.restart();
    scene.follow_on();
    scene.converse("later", &says("three"));
    assert_eq!(texts(&scene.history(), "assistant").last().unwrap(), "three");
    assert_eq!(texts(&scene.server.history(&first.session_id), "assistant")[0], "one");
}

pub fn refused_by_the_model(scene: &mut Scene) {
    let step = json!([{"status": 400, "error_type": "invalid_request_error", "message": "made up for a test"}]);
    let sent = scene.send("fail please", &step);
    let end = scene.end(&sent);
    assert_eq!((end.event.as_str(), &end.data["isError"]), ("chat-complete", &json!(true)), "{end:?}");
    let shown = scene.history().to_string() + &end.data.to_string();
    assert!(shown.contains("made up for a test"), "the reason reaches a person: {shown}");
    scene.converse("and on", &says("fine"));
}

pub fn overloaded_twice(scene: &mut Scene) {
    let step = json!([{"status": 529, "times": 2, "blocks": [{"text": "at last"}]}]);
    let sent = scene.send("try", &step);
    scene.said("a retry is visible", &sent, |msg| msg["type"] == "status");
    scene.good_end(&sent);
    assert_eq!(texts(&scene.history(), "assistant"), ["at last"]);
}

pub fn stream_cut(scene: &mut Scene) {
    let step = json!([{"blocks": [{"text": "words that come to nothing", "chunks": 4}], "cut": true}]);
    let sent = scene.send("cut", &step);
    scene.end(&sent);
    let said = texts(&scene.history(), "assistant");
    assert!(said.iter().filter(|text| text.contains("come to nothing")).count() <= 1, "{said:?}");
    scene.converse("and on", &says("fine"));
}

pub fn stream_hangs(scene: &mut Scene) {
    let first = scene.send("hang", &endless());
    scene.streams(&first);
    let queued = scene.send("waits", &says("next"));
    let status = scene.server.status(&scene.session);
    assert_eq!((&status["phase"], &status["queued"]), (&json!("streaming"), &json!(1)), "{status}");
    assert_eq!(scene.server.control("interrupt", &scene.session), "asked");
    assert_eq!(scene.end(&first).data["interrupted"], true);
    scene.good_end(&queued);
}

pub fn background_task(scene: &mut Scene) {
    let step = json!([
        {"blocks": [{"tool": "Bash", "input": {"command": "sleep 1", "description": "a task", "run_in_background": true}}]},
        {"blocks": [{"text": "it is under way"}]},
    ]);
    let sent = scene.converse("in the background", &step);
    let task = scene.events.wait_for("the task is told", |f| f.event == "chat-task");
    assert!(task.data["task"]["taskId"].is_string(), "{task:?}");
    let own = scene.events.wait_for("the end of a turn nobody asked for", |f| {
        f.event == "chat-complete" && f.text("turnId") != sent.message_uuid
    });
    let turn = own.text("turnId").to_owned();
    let seen = scene.events.seen();
    let at = |wanted: &dyn Fn(&beebox_chatd::load::events::Frame) -> bool| seen.iter().position(wanted).unwrap();
    let began = at(&|f| f.event == "chat-turn" && f.text("turnId") == turn);
    let ended = at(&|f| f.event == "chat-complete" && f.text("turnId") == turn);
    let busy = seen[..began].iter().rev().find(|f| f.event == "chat-phase").map(|f| f.text("phase").to_owned());
    assert!(began < ended && busy.as_deref() == Some("streaming"), "the session is busy meanwhile: {busy:?}");
    scene.converse("and on", &says("fine"));
}

pub fn transcript_removed(scene: &mut Scene) {
    scene.converse("first", &says("one"));
    let path = scene.server.transcript(&scene.session).expect("a transcript");
    scene.server.terminate();
    std::fs::remove_file(path).unwrap();
    scene.server.restart();
    scene.follow_on();
    let refused = scene.server.try_send(&scene.session, "second", None, &[]).expect_err("nothing to resume");
    assert_eq!(refused.status, 410, "{}", refused.text());
    scene.forget_sent();
}

/// Accepted while the conversation was there; when the agent is to resume it, it is not.
pub fn resume_refused(scene: &mut Scene) {
    scene.converse("first", &says("one"));
    assert_eq!(scene.server.control("stop", &scene.session), "stopped");
    scene.server.wait_phase(&scene.session, "idle");
    // There is a file, but the agent finds no conversation in it.
    let path = scene.server.transcript(&scene.session).expect("a transcript");
    std::fs::write(&path, "{\"torn\n").unwrap();
    let sent = scene.send("second", &says("never"));
    let failed = scene.events.wait_for("the message fails", |f| {
        f.event == "chat-turn-failed" && f.data["messageUuids"].to_string().contains(&sent.message_uuid)
    });
    assert_eq!(failed.data["willRetry"], false, "{failed:?}");
    assert!(failed.text("error").contains("no such conversation"), "{failed:?}");
    let shown = scene.server.bootstrap(&scene.session)["pending"].clone();
    assert_eq!((&shown[0]["uuid"], &shown[0]["state"]), (&json!(sent.message_uuid), &json!("failed")), "{shown}");
    assert!(scene.server.status(&scene.session)["startError"].as_str().unwrap().contains("no such conversation"));
    let id = scene.session.clone();
    let discard = json!({"session": id, "messageUuid": sent.message_uuid});
    assert_eq!(scene.server.post("/api/chat/pending/discard", &discard).status, 200);
    scene.forget_sent();
}

/// A start that fails says why on the bus and in the status, and keeps the message.
fn start_fails(real: &Real, how: &Start, word: &str) {
    let mut scene = Scene::start(real, how);
    let sent = scene.send("hello", &says("never"));
    let failed = scene.events.wait_for("the start's failure", |f| f.event == "chat-turn-failed");
    assert!(failed.text("error").contains(word) && failed.data["willRetry"] == true, "{failed:?}");
    let status = scene.server.status(&scene.session);
    assert!(status["startError"].as_str().unwrap_or_default().contains(word), "{status}");
    let shown = scene.server.bootstrap(&scene.session)["pending"].clone();
    assert_eq!(shown[0]["uuid"], sent.message_uuid.as_str(), "the message waits: {shown}");
}

pub fn not_installed(real: &Real) {
    start_fails(real, &Start { program: Some("/nowhere/claude".to_owned()), ..Start::default() }, "is not installed");
}

pub fn refused_as_root(real: &Real) {
    if rustix::process::geteuid().is_root() {
        start_fails(real, &Start { sandbox: false, ..Start::default() }, "as root");
    } else {
        println!("    not root: nothing to refuse");
    }
}

pub fn needs_a_login(real: &Real) {
    let mut scene = Scene::start(real, &Start { key: false, ..Start::default() });
    let sent = scene.send("hello", &says("never"));
    let end = scene.end(&sent);
    assert_ne!(end.data["isError"], false, "{end:?}");
    let shown = (scene.history().to_string() + &end.data.to_string()).to_lowercase();
    assert!(shown.contains("/login") || shown.contains("log in"), "{shown}");
}

/// The agent asks before a tool only where its own settings say so.
pub fn tool_asked_for(real: &Real) {
    let program =
        format!(r#"{} --permission-prompt-tool stdio --settings '{{"permissions":{{"ask":["Bash"]}}}}'"#, real.program);
    for (flags, allowed) in [(&[][..], false), (&["--allow-tools"], true)] {
        let mut scene = Scene::start(real, &Start { program: Some(program.clone()), flags, ..Start::default() });
        scene.converse("use a tool", &runs("echo this is $((40 + 2))"));
        let history = scene.history();
        let result = blocks(&history, "tool_use")[0]["resultSummary"].as_str().unwrap_or_default().to_owned();
        assert_eq!(result.contains("this is 42"), allowed, "{flags:?}: {result}");
        assert_eq!(result.contains("needs a permission that nobody is there to give"), !allowed, "{flags:?}: {result}");
        scene.judge();
    }
}

/// A message of an outside channel, answered.
fn ask_thread(scene: &Scene, words: &str) -> Value {
    let steps = says(&format!("aside <chat-response>you said {words}</chat-response>"));
    let message = format!("{words} FAKE{}", json!({"steps": steps}));
    let answer = scene.server.post("/api/threads/send", &json!({"thread": "t", "message": message}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!((&answer["responses"], &answer["success"]), (&json!([format!("you said {words}")]), &json!(true)));
    answer
}

pub fn thread(scene: &mut Scene) {
    let first = ask_thread(scene, "one");
    assert_eq!(ask_thread(scene, "two")["sessionId"], first["sessionId"]);
    scene.server.restart();
    scene.follow_on();
    assert_eq!(ask_thread(scene, "three")["sessionId"], first["sessionId"], "it goes on where it was");
}

pub fn thread_whose_transcript_is_gone(scene: &mut Scene) {
    let first = ask_thread(scene, "one");
    let path = scene.server.transcript(first["sessionId"].as_str().unwrap()).expect("a transcript");
    scene.server.terminate();
    std::fs::remove_file(path).unwrap();
    scene.server.restart();
    scene.follow_on();
    let second = ask_thread(scene, "two");
    assert_ne!(second["sessionId"], first["sessionId"], "only a thread begins afresh");
    scene.events.wait_for("a note to people", |f| f.event == "thread-response" && f.data["notice"] == true);
    assert_eq!(ask_thread(scene, "three")["sessionId"], second["sessionId"], "once");
}

pub fn history_at_every_end(scene: &mut Scene) {
    for n in 0..TURNS_READ {
        let answer = format!("answer {n}");
        scene.converse("go on", &says(&answer));
        let last = texts(&scene.history(), "assistant").pop();
        assert_eq!(last.as_deref(), Some(answer.as_str()), "turn {n}");
    }
    assert!(!scene.server.stderr().contains("the transcript lacks"), "the gate never gave up");
}

pub fn rounds(scene: &mut Scene) {
    scene.converse("first", &says("one"));
    scene.server.control("stop", &scene.session);
    scene.server.wait_phase(&scene.session, "idle");
    let before = scene.server.usage();
    for n in 0..5 {
        scene.converse(&format!("round {n}"), &says("round"));
        assert_eq!(scene.server.control("stop", &scene.session), "stopped");
        scene.server.wait_phase(&scene.session, "idle");
    }
    scene.server.wait_until("what a run held is given back", |server| {
        let now = server.usage();
        (now.threads <= before.threads && now.fds <= before.fds && now.children == 0).then_some(())
    });
}
