//! The embedded agent as a process: what it says, what it leaves on disk, how it ends. The real agent's own output in
//! `tests/fixtures` is the measure of order and shape.

use std::time::Instant;

use beebox_chatd::sync::bounded;
use serde_json::{Value, json};

use crate::agent_process::{Agent, LIMIT, Place, assert_shapes, fixture, order, parsed};

const S: &str = "00000000-0000-4000-8000-000000000001";

#[test]
fn a_text_turn_has_the_order_and_the_shapes_of_the_real_agent() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "hello there");
    let result = agent.result();
    assert_eq!(result["result"], "You wrote 2 words: hello there");
    assert_eq!((&result["is_error"], &result["user_message_uuids"]), (&json!(false), &json!(["u1"])));
    assert_eq!(agent.code(), 0);
    let real = fixture("agent-stdout/one_text_turn.jsonl");
    assert_eq!(order(&agent.heard), order(&parsed(&real)));
    assert_shapes(&agent.raw, &real);

    assert_shapes(&place.raw_lines(S), &fixture("transcripts/one_text_turn.jsonl"));
    let lines = place.lines(S);
    let user = lines.iter().find(|line| line["type"] == "user").unwrap();
    assert_eq!((&user["uuid"], &user["message"]["content"]), (&json!("u1"), &json!("hello there")));
    let said = agent.heard.iter().find(|message| message["type"] == "assistant").unwrap();
    let written = lines.iter().find(|line| line["type"] == "assistant").unwrap();
    assert_eq!(said["uuid"], written["uuid"]);
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(std::fs::metadata(place.file(S)).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn messages_that_come_while_it_streams_become_one_user_line() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "first {{delay_ms=1500}}");
    agent.kind("system/init");
    agent.send_as("u2", "second");
    agent.send_as("u3", "third");
    agent.result();
    assert_eq!(agent.result()["user_message_uuids"], json!(["u2", "u3"]));
    assert_eq!(agent.code(), 0);
    let mut kinds = order(&agent.heard);
    let mut real = order(&parsed(&fixture("agent-stdout/queued_while_streaming.jsonl")));
    // When the two came differs, so only the rest is compared.
    kinds.retain(|kind| kind != "command_lifecycle/queued");
    real.retain(|kind| kind != "command_lifecycle/queued");
    real.dedup_by(|b, a| a == b && a.ends_with("delta"));
    assert_eq!(kinds, real);
    let merged = place.lines(S).into_iter().find(|line| line["uuid"] == "u3").unwrap();
    assert_eq!((&merged["mergedSendUuids"], &merged["message"]["content"]), (&json!(["u2"]), &json!("second\nthird")));
    assert_shapes(&place.raw_lines(S), &fixture("transcripts/queued_while_streaming.jsonl"));
}

#[test]
fn a_message_that_comes_while_a_tool_runs_is_folded_into_the_turn() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    // The tool waits for leave until the second message is there.
    agent.send_as("u1", "run {{ask}}");
    let request = agent.kind("control_request");
    agent.send_as("u2", "folded");
    agent.state("u2", "queued");
    agent.allow(&request, "allow");
    agent.state("u2", "started");
    agent.state("u2", "completed");
    let result = agent.result();
    assert_eq!(result["user_message_uuids"], json!(["u1", "u2"]));
    assert_eq!((&result["user_message_uuid"], &result["num_turns"]), (&json!("u1"), &json!(2)));
    assert_eq!(agent.code(), 0);
    assert_shapes(&place.raw_lines(S), &fixture("transcripts/queued_during_tool.jsonl"));
    let lines = place.lines(S);
    let folded = lines.iter().find(|line| line["attachment"]["source_uuid"] == "u2").unwrap();
    assert_eq!(folded["attachment"]["prompt"], "folded");
    assert!(!lines.iter().any(|line| line["uuid"] == "u2"));
}

#[test]
fn an_interrupt_ends_the_turn_and_what_waits_runs_next() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "long {{think deltas=1000 delta_ms=20 size=10000}}");
    agent.until("text", |message| message["event"]["delta"]["type"] == "text_delta");
    agent.send_as("u2", "next");
    agent.state("u2", "queued");
    agent.interrupt("r1");
    let answer = agent.kind("control_response");
    assert_eq!((&answer["response"]["request_id"], &answer["response"]["subtype"]), (&json!("r1"), &json!("success")));
    assert_eq!(answer["response"]["response"]["still_queued"], json!(["u2"]));
    let result = agent.result();
    assert_eq!((&result["is_error"], &result["subtype"]), (&json!(true), &json!("error_during_execution")));
    assert!(result.get("result").is_none() && result["errors"][0].is_string());
    assert_eq!(agent.result()["result"], "You wrote 1 word: next");
    assert_eq!(agent.code(), 0);
    let mut real = order(&parsed(&fixture("agent-stdout/interrupt_streaming.jsonl")));
    let mut ours = order(&agent.heard);
    real.retain(|kind| kind != "command_lifecycle/queued");
    ours.retain(|kind| kind != "command_lifecycle/queued");
    ours.dedup_by(|b, a| a == b && a.ends_with("delta"));
    assert_eq!(ours, real);
    let aborted = agent.heard.iter().find(|message| message["aborted"] == true).unwrap();
    let lines = place.lines(S);
    assert!(lines.iter().any(|line| line["uuid"] == aborted["uuid"] && line["isAbortedMidStream"] == true));
    assert!(place.holds(S, "[Request interrupted by user]"));
    assert_shapes(&place.raw_lines(S), &fixture("transcripts/interrupt_streaming.jsonl"));
}

#[test]
fn an_interrupt_in_a_tool_refuses_it_and_the_exit_code_tells() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "run {{tool tool_ms=60000}}");
    agent.kind("stream_event/message_stop");
    agent.interrupt("r1");
    agent.until("the note", |m| m["message"]["content"][0]["text"] == "[Request interrupted by user for tool use]");
    assert_eq!(agent.result()["terminal_reason"], "aborted_tools");
    agent.state("u1", "cancelled");
    assert_eq!(agent.code(), 1);
}

#[test]
fn an_idle_agent_answers_an_interrupt_and_does_nothing_else() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    agent.interrupt("r1");
    agent.kind("control_response");
    agent.line(r#"{"type":"control_request","request_id":"r2","request":{"subtype":"initialize"}}"#);
    agent.kind("control_response");
    agent.line(r#"{"type":"never heard of"}"#);
    agent.line("");
    assert_eq!(agent.code(), 0);
    assert_eq!(agent.kinds(), ["control_response", "control_response"]);
    assert!(!place.dir.path().join("home").exists(), "without a message there is no transcript");
}

#[test]
fn an_interrupt_before_init_is_answered_and_does_nothing() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{init_ms=800}} hello");
    agent.state("u1", "started");
    agent.interrupt("r1");
    agent.kind("control_response");
    agent.kind("system/init");
    assert_eq!(agent.result()["is_error"], false);
}

#[test]
fn a_scripted_agent_ignores_interrupts_or_only_answers_them() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{ignore=interrupt hang}} a");
    agent.kind("system/init");
    agent.interrupt("r1");
    // Lines are taken in order: once this one is, the interrupt was.
    agent.send_as("u2", "{{ignore=answered hang}} b");
    agent.state("u2", "queued");
    assert!(!agent.kinds().iter().any(|kind| kind == "control_response" || kind == "result"));

    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{ignore=answered hang}} a");
    agent.kind("system/init");
    agent.interrupt("r2");
    agent.kind("control_response");
    agent.send_as("u2", "b");
    agent.state("u2", "queued");
    assert!(!agent.kinds().contains(&"result".to_owned()));

    let mut agent = place.start(&[]);
    agent.send_as("u3", "{{hang}} c");
    agent.until("the answer", |m| m["event"]["delta"]["text"].as_str().is_some_and(|text| text.ends_with('c')));
    agent.interrupt("r3");
    assert_eq!(agent.result()["is_error"], true);
}

#[test]
fn a_uuid_that_the_session_holds_is_not_run_again_and_told_once_after_a_resume() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "hello");
    agent.state("u1", "completed");
    let told = agent.heard.len();
    agent.send_as("u1", "hello");
    assert_eq!(agent.code(), 0);
    assert_eq!(agent.heard.len(), told, "not a word about a repeat in the same process");

    let mut agent = place.start(&["--resume", S]);
    agent.send_as("u1", "hello");
    agent.state("u1", "completed");
    agent.send_as("u1", "hello");
    agent.interrupt("r1");
    agent.kind("control_response");
    assert_eq!(agent.kinds(), ["command_lifecycle/completed", "control_response"]);
    agent.send_as("u1", "{{dedup=off}} hello");
    agent.result();
    assert_eq!(agent.code(), 0);
    assert_eq!(place.lines(S).iter().filter(|line| line["uuid"] == "u1").count(), 2);
}

#[test]
fn the_old_profile_names_no_uuids_and_drops_repeats_without_a_word() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S, "--profile", "2.1.197"]);
    agent.send_as("u1", "hello");
    let result = agent.result();
    assert!(result.get("user_message_uuids").is_none());
    agent.send_as("u1", "hello");
    agent.send_as("u2", "/clear");
    let init = agent.kind("system/init");
    assert_ne!(init["session_id"], S);
    agent.result();
    agent.interrupt("r1");
    assert!(agent.kind("control_response")["response"].get("response").is_none());
    assert_eq!(agent.code(), 0);
    let kinds = agent.kinds();
    assert!(!kinds.iter().any(|kind| kind.starts_with("command_lifecycle") || kind == "conversation_reset"));
    assert!(place.lines(S).iter().any(|line| line["uuid"] == "u1" && line["version"] == "2.1.197"));
}

#[test]
fn a_session_that_exists_is_refused_and_one_that_does_not_cannot_go_on() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "hello");
    agent.result();
    assert_eq!(agent.code(), 0);
    let mut agent = place.start(&["--session-id", S]);
    let (status, stderr) = agent.end();
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("is already in use"), "{stderr}");
    assert!(agent.heard.is_empty());
    let mut agent = place.start(&["--resume", "nobody"]);
    let (status, stderr) = agent.end();
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("No conversation found with session ID: nobody"), "{stderr}");
    assert_eq!(agent.heard[0]["subtype"], "error_during_execution");
    assert_eq!(agent.heard[0]["errors"][0], "No conversation found with session ID: nobody");
}

#[test]
fn a_line_that_is_not_json_ends_the_process_also_in_a_turn() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{hang}}");
    agent.kind("system/init");
    agent.line("this is not json");
    let (status, stderr) = agent.gone();
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("Error parsing streaming input line"), "{stderr}");
}

#[test]
fn the_end_of_stdin_lets_the_turn_and_what_waits_finish() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "{{delay_ms=200}} one two three");
    agent.kind("system/init");
    agent.send_as("u2", "two {{error=\"API Error: 500 made up\" flush_ms=60000}}");
    assert_eq!(agent.code(), 1);
    let results: Vec<&Value> = agent.heard.iter().filter(|message| message["type"] == "result").collect();
    assert_eq!(results.len(), 2);
    assert_eq!((&results[1]["subtype"], &results[1]["is_error"]), (&json!("success"), &json!(true)));
    assert_eq!(results[1]["result"], "API Error: 500 made up");
    let error = place.lines(S).into_iter().find(|line| line["isApiErrorMessage"] == true).unwrap();
    assert_eq!(error["message"]["model"], "<synthetic>");
}

fn terminate(agent: &Agent) {
    let pid = rustix::process::Pid::from_child(&agent.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

#[test]
fn sigterm_ends_it_at_once_unless_the_script_says_otherwise() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{hang}}");
    agent.kind("system/init");
    terminate(&agent);
    assert_eq!(agent.gone().0.code(), Some(143));
    // Also one that is blocked, since nobody reads its stdout.
    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{flood=100000}}");
    agent.kind("system/init");
    terminate(&agent);
    assert_eq!(agent.child.wait().unwrap().code(), Some(143));

    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{ignore=sigterm}} a");
    agent.result();
    terminate(&agent);
    agent.send_as("u2", "still here");
    agent.result();
    assert_eq!(agent.code(), 0);
}

#[test]
fn an_agent_whose_reader_is_gone_ends() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{flood=1000000}}");
    agent.kind("system/init");
    agent.hear = bounded(0).1;
    assert_eq!(agent.child.wait().unwrap().code(), Some(1));
}

#[test]
fn a_scripted_death_leaves_what_it_says_it_leaves() {
    for (die, recorded, answered) in [("before", true, false), ("mid", true, false), ("after", true, true)] {
        let place = Place::new();
        let mut agent = place.start(&["--session-id", S]);
        agent.send_as("u1", format!("{{{{die={die} deltas=4}}}} some words"));
        assert_eq!(agent.gone().0.code(), Some(9), "{die}");
        let kinds = agent.kinds();
        assert_eq!(kinds.contains(&"stream_event/content_block_delta".to_owned()), die != "before");
        assert_eq!(kinds.contains(&"result".to_owned()), die == "after");
        let lines = place.lines(S);
        assert_eq!(lines.iter().any(|line| line["uuid"] == "u1"), recorded, "{die}");
        assert_eq!(lines.iter().any(|line| line["type"] == "assistant"), answered, "{die}");
    }
    // A user line that is late dies with it, whatever was said.
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "{{die=after user_flush_ms=60000}} some words");
    assert_eq!(agent.gone().0.code(), Some(9));
    assert!(!place.lines(S).iter().any(|line| line["uuid"] == "u1" || line["type"] == "assistant"));
}

#[test]
fn a_torn_line_is_closed_by_the_next_run() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "{{torn}} some words");
    assert_eq!(agent.gone().0.code(), Some(9));
    assert!(!std::fs::read_to_string(place.file(S)).unwrap().ends_with('\n'));
    let mut agent = place.start(&["--resume", S]);
    agent.send_as("u1", "some words");
    agent.state("u1", "completed");
    agent.send_as("u2", "more");
    agent.result();
    assert_eq!(agent.code(), 0);
    let text = std::fs::read_to_string(place.file(S)).unwrap();
    let (good, bad): (Vec<&str>, Vec<&str>) =
        text.lines().partition(|line| serde_json::from_str::<Value>(line).is_ok());
    assert_eq!(bad.len(), 1, "one torn line, and nothing is glued to it");
    assert!(good.iter().any(|line| line.contains(r#""uuid":"u2""#)));
}

#[test]
fn the_final_line_is_on_disk_before_the_result_or_as_late_as_the_script_says() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "{{say=first}}");
    agent.result();
    assert!(place.holds(S, r#""text":"first""#));
    agent.send_as("u2", "{{say=second flush_ms=100}}");
    agent.result();
    let end = Instant::now() + LIMIT;
    while !place.holds(S, r#""text":"second""#) {
        assert!(Instant::now() < end, "the late line never came");
        std::thread::yield_now();
    }
    agent.send_as("u3", "{{say=third flush_ms=-100}}");
    agent.result();
    assert!(place.holds(S, r#""text":"third""#));
    agent.send_as("u4", "{{say=fourth flush_ms=60000}}");
    agent.result();
    assert!(!place.holds(S, r#""text":"fourth""#));
    assert_eq!(agent.code(), 0);
    assert!(place.holds(S, r#""text":"fourth""#), "a graceful end loses nothing");
}

#[test]
fn clear_goes_on_under_another_id_in_another_file() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "hello");
    agent.send_as("u2", "/clear");
    agent.send_as("u3", "after");
    agent.result();
    let reset = agent.kind("conversation_reset");
    assert_eq!((&reset["user_message_uuid"], &reset["session_id"]), (&json!("u2"), &json!(S)));
    let id = agent.kind("system/init")["session_id"].as_str().unwrap().to_owned();
    assert_ne!(id, S);
    assert_eq!(agent.result()["user_message_uuids"], json!(["u2"]));
    assert_eq!(agent.result()["session_id"], json!(id));
    assert_eq!(agent.code(), 0);
    assert!(place.lines(S).iter().all(|line| line["uuid"] != "u2" && line["uuid"] != "u3"));
    let lines = place.lines(&id);
    assert!(lines.iter().any(|line| line["uuid"] == "u2") && lines.iter().any(|line| line["uuid"] == "u3"));
}

#[test]
fn a_background_task_starts_a_turn_that_nobody_asked_for() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "{{bg_ms=100}} start it");
    let task = agent.kind("system/task_started")["task_id"].clone();
    assert_eq!(agent.result()["user_message_uuids"], json!(["u1"]));
    assert_eq!(agent.kind("system/task_notification")["task_id"], task);
    agent.kind("system/init");
    let result = agent.result();
    assert!(result.get("user_message_uuids").is_none());
    assert_eq!(result["origin"]["kind"], "task-notification");
    assert_eq!(agent.code(), 0);
    assert!(place.lines(S).iter().any(|line| line["origin"]["kind"] == "task-notification" && line["type"] == "user"));
}

#[test]
fn a_line_that_meets_a_background_turn_waits_or_is_folded_into_it() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "{{own_turn_on_send}} one");
    agent.kind("system/init");
    agent.state("u1", "queued");
    assert_eq!(agent.result()["origin"]["kind"], "task-notification");
    agent.state("u1", "started");
    assert_eq!(agent.result()["user_message_uuids"], json!(["u1"]));
    agent.state("u1", "completed");
    agent.send_as("u2", "{{own_turn_on_send=fold}} two");
    agent.kind("system/init");
    agent.state("u2", "started");
    agent.state("u2", "completed");
    assert_eq!(agent.result()["origin"]["kind"], "task-notification");
    assert_eq!(agent.code(), 0);
    assert_eq!(agent.kinds().iter().filter(|kind| *kind == "result").count(), 3);
    let lines = place.lines(S);
    assert!(lines.iter().any(|line| line["attachment"]["source_uuid"] == "u2"));
    assert!(!lines.iter().any(|line| line["uuid"] == "u2"));
}

#[test]
fn a_late_id_is_another_one_with_its_own_file() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    agent.send_as("u1", "{{late_id_ms=100}} hello");
    let id = agent.kind("system/init")["session_id"].as_str().unwrap().to_owned();
    assert_ne!(id, S);
    assert_eq!(agent.result()["session_id"], json!(id));
    assert_eq!(agent.code(), 0);
    let folder = place.file(&id).parent().unwrap().to_owned();
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1, "no file under the first id");
    assert!(place.lines(&id).iter().any(|line| line["uuid"] == "u1"));
}

#[test]
fn an_agent_that_keeps_no_uuids_names_none() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S, "--directives", "keep_uuid=off"]);
    agent.send_as("u1", "hello");
    assert!(agent.result().get("user_message_uuids").is_none());
    agent.send_as("u1", "hello");
    agent.result();
    assert_eq!(agent.code(), 0);
    assert!(!agent.raw.iter().any(|line| line.contains("\"u1\"")));
    let users = place.lines(S).into_iter().filter(|line| line["message"]["content"] == "hello");
    assert!(users.clone().all(|line| line["uuid"].is_string() && line["uuid"] != "u1"));
    assert_eq!(users.count(), 2);
}

#[test]
fn photos_are_kept_as_they_came_and_told_by_size_and_type() {
    let place = Place::new();
    let mut agent = place.start(&["--session-id", S]);
    let png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    // Bigger than a pipe, so that it comes in many pieces.
    let big = "A".repeat(1_400_000);
    let image = |mime: &str, data: &str| json!({"type": "image", "source": {"type": "base64", "media_type": mime, "data": data}});
    let content =
        json!([{"type": "text", "text": "look at these"}, image("image/png", png), image("image/jpeg", &big)]);
    agent.send_as("u1", content.clone());
    assert_eq!(
        agent.result()["result"],
        "You wrote 3 words: look at these\nPhoto 1: image/png, 70 bytes, 1 x 1.\nPhoto 2: image/jpeg, 1050000 bytes, unknown dimensions."
    );
    assert_eq!(agent.code(), 0);
    let lines = place.lines(S);
    let user = lines.iter().find(|line| line["uuid"] == "u1").unwrap();
    assert_eq!((&user["message"]["content"], &user["imagePasteIds"]), (&content, &json!([1, 2])));
    let text = std::fs::read_to_string(place.file(S)).unwrap();
    let line = text.lines().find(|line| line.contains(r#""uuid":"u1""#)).unwrap();
    assert!(line.find(r#""uuid":"u1""#) > line.find("AAAAAAAA"), "the uuid stands behind the payload");
    assert!(lines.iter().any(|line| line["turnCompanion"] == true && line["isMeta"] == true));
}

#[test]
fn answers_have_the_size_and_the_deltas_that_the_script_asks_for() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    for (script, size, deltas) in [("size=5000 deltas=7", 5000, 7), ("flood=2000", 32_000, 2000), ("say=\"a b\"", 3, 3)]
    {
        let from = agent.heard.len();
        agent.send_as(&format!("u{size}"), format!("{{{{{script}}}}}"));
        let result = agent.result();
        let text = result["result"].as_str().unwrap();
        assert_eq!(text.len(), size, "{script}");
        let pieces: Vec<&str> =
            agent.heard[from..].iter().filter_map(|message| message["event"]["delta"]["text"].as_str()).collect();
        assert_eq!((pieces.len(), pieces.concat().as_str()), (deltas, text), "{script}");
    }
}

#[test]
fn a_tool_that_needs_leave_waits_for_it() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    for (behavior, is_error) in [("deny", true), ("allow", false)] {
        agent.send_as(behavior, "{{ask tool=Write}}");
        let request = agent.kind("control_request");
        assert_eq!(
            (&request["request"]["subtype"], &request["request"]["tool_name"]),
            (&json!("can_use_tool"), &json!("Write"))
        );
        agent.allow(&request, behavior);
        let result = agent.kind("user");
        assert_eq!(result["message"]["content"][0]["is_error"], is_error);
        agent.result();
    }
}

#[test]
fn an_error_in_execution_has_no_result_text() {
    let place = Place::new();
    let mut agent = place.start(&[]);
    agent.send_as("u1", "{{error=execution}}");
    let result = agent.result();
    assert_eq!((&result["subtype"], &result["is_error"]), (&json!("error_during_execution"), &json!(true)));
    assert!(result.get("result").is_none());
    assert_eq!(agent.code(), 1);
}
