//! The promise with agents, places and copies that nobody thought of: agents that keep no transcript where the server
//! looks, or name their session themselves; agents that are exchanged; boxes that are moved, copied or restored; a clock
//! that is set right. Each row of the table "what is taken as proof" in the crate docs names its test here.

use std::path::{Path, PathBuf};
use std::process::Command;

use beebox_chatd::load::client::Photo;
use beebox_chatd::load::proc;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::{Options, Server, is_end_of, texts};

/// An agent that speaks the protocol and keeps no transcript. It appends the uuid of each user line to `given`.
const KEEPS_NOTHING: &str = r#"
here=$(dirname "$0")
id=; for word; do [ "$last" = --session-id ] || [ "$last" = --resume ] && id=$word; last=$word; done
while IFS= read -r line; do
    case $line in *'"type":"user"'*) ;; *) continue ;; esac
    uuid=$(printf '%s' "$line" | sed -n 's/.*"uuid":"\([^"]*\)".*/\1/p')
    echo "$uuid" >>"$here/given"
    echo '{"type":"system","subtype":"init","session_id":"'"$id"'"}'
    [ "$MODE" = die ] && exit 1
    echo '{"type":"assistant","uuid":"a-'"$uuid"'","message":{"role":"assistant","content":[{"type":"text","text":"done it"}]}}'
    echo '{"type":"result","subtype":"success","is_error":false,"session_id":"'"$id"'"}'
    [ "$MODE" = oneshot ] && exit 0
done
"#;

/// A folder with a box in it and the scripted agent beside it.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("beebox-promise-").tempdir().unwrap();
        std::fs::write(dir.path().join("agent.sh"), KEEPS_NOTHING).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn box_dir(&self) -> PathBuf {
        self.path("box")
    }

    /// The command line of the scripted agent.
    fn agent(&self) -> String {
        format!("sh {}", self.path("agent.sh").display())
    }

    fn options(&self) -> Options {
        Options::default().box_dir(&self.box_dir())
    }

    fn scripted(&self, mode: &str) -> Options {
        self.options().args(["--agent", &self.agent()]).env("MODE", mode)
    }

    /// How often the scripted agent was given this message.
    fn given(&self, uuid: &str) -> usize {
        std::fs::read_to_string(self.path("given")).unwrap_or_default().lines().filter(|line| *line == uuid).count()
    }
}

fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(status.success());
}

/// State and error of the messages that are still owed or failed.
fn pending(server: &Server, session: &str) -> Vec<(String, String)> {
    let rows = server.bootstrap(session)["pending"].clone();
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    rows.as_array().unwrap().iter().map(|row| (text(row, "state"), text(row, "error"))).collect()
}

/// How often a transcript line of a person holds these words, over all transcripts below `home`.
fn delivered(home: &Path, words: &str) -> usize {
    let disk = beebox_chatd::load::checker::disk::Disk::read(home, |_| true).unwrap();
    disk.sessions.values().flat_map(|t| &t.users).filter(|user| user.text.contains(words)).count()
}

#[test]
fn an_agent_that_keeps_no_transcript_and_dies_gets_the_message_once() {
    let place = Place::new();
    let server = place.scripted("die").start();
    let (sent, end) = server.converse("new", "hello");
    assert_eq!((end.event.as_str(), &end.data["willRetry"]), ("chat-turn-failed", &false.into()));
    assert!(end.text("error").contains("nobody can know"), "{end:?}");
    assert_eq!(place.given(&sent.message_uuid), 1);
    let rows = pending(&server, &sent.session_id);
    assert!(rows.len() == 1 && rows[0].0 == "failed" && rows[0].1.contains("never seen to keep"), "{rows:?}");
    // By hand, a person may have it given again.
    let mut events = server.follow();
    let body = serde_json::json!({"session": sent.session_id, "messageUuid": sent.message_uuid});
    assert_eq!(server.post("/api/chat/pending/retry", &body).status, 200);
    events.end_of_message(&sent.message_uuid);
    assert_eq!(place.given(&sent.message_uuid), 2);
}

#[test]
fn a_whole_answer_of_an_agent_that_keeps_no_transcript_counts_whether_it_stays_or_goes() {
    for mode in ["oneshot", "stay"] {
        let place = Place::new();
        let mut server = place.scripted(mode).start();
        let (first, end) = server.converse("new", "one");
        assert_eq!((end.event.as_str(), &end.data["isError"]), ("chat-complete", &false.into()), "{mode}");
        assert_eq!(end.data["recorded"], false, "{mode}");
        let (second, end) = server.converse(&first.session_id, "two");
        assert_eq!(end.event, "chat-complete", "{mode}");
        assert_eq!(pending(&server, &first.session_id), [], "{mode}");
        let history = server.history(&first.session_id);
        assert_eq!((&history["total"], &history["reason"]["code"]), (&0.into(), &"agent_keeps_none".into()), "{mode}");
        server.kill9();
        server.restart();
        let (third, end) = server.converse(&first.session_id, "three");
        assert_eq!(end.event, "chat-complete", "{mode}");
        for sent in [&first, &second, &third] {
            assert_eq!(place.given(&sent.message_uuid), 1, "{mode}");
        }
        assert_eq!(server.bootstrap(&first.session_id)["reason"]["code"], "agent_keeps_none", "{mode}");
    }
}

#[test]
fn a_turn_with_a_keeper_of_nothing_whose_server_dies_is_given_once() {
    let place = Place::new();
    // It takes the line and says nothing more.
    std::fs::write(place.path("agent.sh"), KEEPS_NOTHING.replace("[ \"$MODE\" = die ] && exit 1", "sleep 60")).unwrap();
    let mut server = place.scripted("hang").start();
    let mut events = server.follow();
    let sent = server.send("new", "hello");
    events.wait_for("the line to be taken", |f| f.event == "chat-phase" && f.text("phase") == "streaming");
    server.wait_until("the line at the agent", |_| (place.given(&sent.message_uuid) == 1).then_some(()));
    server.kill9();
    server.restart();
    let mut events = server.follow_from(Some(&events.cursor()));
    events.turn_end(&sent.message_uuid);
    assert_eq!(pending(&server, &sent.session_id)[0].0, "failed");
    assert_eq!(place.given(&sent.message_uuid), 1);
}

#[test]
fn the_history_of_a_conversation_without_a_transcript_says_why_it_is_empty() {
    let place = Place::new();
    let mut server = place.options().start();
    let waiting = server.send("new", "{{init_ms=60000 late_id_ms=60000}}");
    assert_eq!(server.history(&waiting.session_id)["reason"]["code"], "no_transcript_yet");
    let (talked, _) = server.converse("new", "hello");
    assert_eq!(server.history(&talked.session_id).get("reason"), None);
    server.kill9();
    std::fs::remove_file(server.transcript(&talked.session_id).unwrap()).unwrap();
    server.restart();
    assert_eq!(server.history(&talked.session_id)["reason"]["code"], "transcript_gone");
}

#[test]
fn the_proof_of_one_program_says_nothing_of_the_next() {
    let place = Place::new();
    let mut server = place.options().start();
    // The embedded agent is seen to keep ids, in its home.
    let (first, _) = server.converse("new", "hello");
    server.terminate();
    let home = server.agent_home().display().to_string();
    let agent = place.agent();
    server.next_start().args.extend(["--agent".into(), agent, "--agent-home".into(), home]);
    server.next_start().env.push(("MODE".into(), "die".into()));
    server.restart();
    for session in ["new", &first.session_id] {
        let (sent, end) = server.converse(session, "to another program");
        assert_eq!(end.data["willRetry"], false, "{end:?}");
        assert_eq!(place.given(&sent.message_uuid), 1, "{session}");
        assert_eq!(pending(&server, &sent.session_id)[0].0, "failed", "{session}");
    }
}

#[test]
fn what_was_handed_to_a_proven_program_is_judged_by_it_after_the_exchange() {
    let place = Place::new();
    let mut server = place.options().start();
    server.converse("new", "hello");
    let mut events = server.follow();
    // Its line never reaches the transcript, and this agent is known to write it.
    let sent = server.send("new", "{{user_flush_ms=60000 hang}} again");
    events.turn_of(&sent.message_uuid);
    server.wait_phase(&sent.session_id, "streaming");
    server.kill9();
    let home = server.agent_home().display().to_string();
    let agent = place.agent();
    server.next_start().args.extend(["--agent".into(), agent, "--agent-home".into(), home]);
    server.next_start().env.push(("MODE".into(), "stay".into()));
    server.restart();
    let mut events = server.follow_from(Some(&events.cursor()));
    let end = events.turn_end(&sent.message_uuid);
    assert_eq!((end.event.as_str(), place.given(&sent.message_uuid)), ("chat-complete", 1), "{end:?}");
}

#[test]
fn another_version_of_the_program_has_to_be_seen_anew() {
    let place = Place::new();
    // A wrapper: the file stays as it is, what it starts is another version.
    let wrapper = place.path("wrapper.sh");
    let start = format!(
        "[ -e {flag} ] && export BEEBOX_AGENT_OWN_HOME={home} BEEBOX_AGENT_PROFILE=2.1.197; exec {server} agent \"$@\"",
        flag = place.path("new-version").display(),
        home = place.path("elsewhere").display(),
        server = env!("CARGO_BIN_EXE_beebox-chatd"),
    );
    std::fs::write(&wrapper, start).unwrap();
    let server = place.options().args(["--agent", &format!("sh {}", wrapper.display())]);
    let home = place.box_dir().join(".beebox/agent").display().to_string();
    let server = server.args(["--agent-home", &home]).start();
    server.converse("new", "hello");
    std::fs::write(place.path("new-version"), "").unwrap();
    let mut events = server.follow();
    let (sent, end) = server.converse("new", "{{die=mid}} gone");
    assert_eq!((end.event.as_str(), &end.data["willRetry"]), ("chat-turn-failed", &false.into()), "{end:?}");
    assert_eq!(pending(&server, &sent.session_id)[0].0, "failed");
    events.turn_end(&sent.message_uuid);
    assert_eq!(events.kept("chat-message-dispatched").len(), 1);
}

#[test]
fn an_agent_that_has_the_conversation_in_another_home_is_resumed_there() {
    let place = Place::new();
    let elsewhere = place.path("elsewhere").display().to_string();
    let mut server = place.options().env("BEEBOX_AGENT_OWN_HOME", &elsewhere).start();
    let (first, end) = server.converse("new", "one");
    assert_eq!(end.data["recorded"], false);
    server.terminate();
    server.restart();
    let (_, end) = server.converse(&first.session_id, "two");
    assert_eq!(end.event, "chat-complete", "{end:?}");
    for words in ["one", "two"] {
        assert_eq!(delivered(Path::new(&elsewhere), words), 1, "{words}");
    }
}

#[test]
fn a_server_on_a_copy_of_a_live_box_leaves_the_original_and_its_agents_alone() {
    let place = Place::new();
    let server = place.options().start();
    let (first, _) = server.converse("main", "hello");
    let mut events = server.follow();
    let running = server.send("main", "{{deltas=40 delta_ms=100}} long");
    events.turn_of(&running.message_uuid);
    server.wait_phase(&first.session_id, "streaming");
    let agents = server.agents();
    copy(&place.box_dir(), &place.path("copy"));
    let other = Options::default().box_dir(&place.path("copy")).start();
    // Its own conversation goes on from what was copied, in its own files.
    let (sent, end) = other.converse("main", "in the copy");
    assert_eq!((end.event.as_str(), &sent.session_id), ("chat-complete", &first.session_id));
    assert_eq!(server.agents(), agents, "the original's agent lives");
    assert_eq!(events.turn_end(&running.message_uuid).event, "chat-complete");
    assert!(!other.stderr().contains("left by an earlier server"), "{}", other.stderr());
    assert_eq!(delivered(&server.agent_home(), "in the copy"), 0);
    assert_eq!(delivered(&server.agent_home(), "long"), 1);
}

#[test]
fn two_servers_whose_boxes_share_a_home_never_have_two_agents_in_one_conversation() {
    let place = Place::new();
    let home = place.path("home").display().to_string();
    let server = place.options().args(["--agent-home", &home]).start();
    let (first, _) = server.converse("new", "hello");
    let (mut events, session) = (server.follow(), first.session_id);
    let running = server.send(&session, "{{deltas=20 delta_ms=100}} long");
    events.turn_of(&running.message_uuid);
    server.wait_phase(&session, "streaming");
    copy(&place.box_dir(), &place.path("copy"));
    let other = Options::default().box_dir(&place.path("copy")).args(["--agent-home", &home]).start();
    let mut others = other.follow();
    let sent = other.send(&session, "from the copy");
    let refused = others.wait_for("the refusal", |f| {
        f.event == "chat-turn-failed" && f.data["messageUuids"].to_string().contains(&sent.message_uuid)
    });
    assert!(refused.text("error").contains("another server") && refused.data["willRetry"] == true, "{refused:?}");
    assert_eq!(events.turn_end(&running.message_uuid).event, "chat-complete");
    server.control("stop", &session);
    server.wait_phase(&session, "idle");
    assert_eq!(others.end_of_message(&sent.message_uuid).event, "chat-complete");
    assert_eq!(delivered(Path::new(&home), "from the copy"), 1);
    assert_eq!(delivered(Path::new(&home), "long"), 1);
}

#[test]
fn a_moved_box_has_its_conversations_its_photos_and_what_it_owes() {
    for home in [None, Some("home")] {
        let place = Place::new();
        let home = home.map(|home| place.path(home).display().to_string());
        let args: Vec<String> = home.iter().flat_map(|home| ["--agent-home".to_owned(), home.clone()]).collect();
        let args = || args.iter().map(String::as_str);
        let mut server = place.options().args(args()).start();
        let photo = Photo::png(1, 3000, 1);
        let sent = server.send_as("main", "see [image#1]", None, std::slice::from_ref(&photo));
        let main = sent.session_id.clone();
        server.follow_from(Some("0")).turn_end(&sent.message_uuid);
        let alone = server.converse("new", "another").0.session_id;
        let mut events = server.follow();
        let running = server.send("main", "{{hang}} before the move");
        let turn = running.message_uuid.clone();
        events.wait_for("the turn is in the transcript", |f| f.event == "chat-turn" && f.text("turnId") == turn);
        let waiting = server.send("main", "waits over the move");
        server.kill9();
        std::fs::rename(place.box_dir(), place.path("moved")).unwrap();
        let moved = Options::default().box_dir(&place.path("moved")).args(args()).start();
        let mut events = moved.follow_from(Some(&events.cursor()));
        let end = events.turn_end(&running.message_uuid);
        assert!(end.text("error").contains("before it finished"), "recorded, so never sent again: {end:?}");
        assert_eq!(events.end_of_message(&waiting.message_uuid).event, "chat-complete");
        assert_eq!(pending(&moved, &main), []);
        let asked = texts(&moved.history(&main), "user");
        assert_eq!(asked.len(), 3, "{asked:?}");
        let reference = moved.history(&main).to_string();
        let at = reference.find("\"imageRef\":\"").expect("a photo") + 12;
        let reference = &reference[at..at + reference[at..].find('"').unwrap()];
        assert_eq!(moved.get(&format!("/api/session-media/{reference}")).status, 200);
        let listed = moved.get_json("/api/chat/sessions").to_string();
        assert!(listed.contains(&main) && listed.contains(&alone), "{listed}");
        let (again, end) = moved.converse(&alone, "goes on");
        assert_eq!((again.session_id.as_str(), end.event.as_str()), (alone.as_str(), "chat-complete"));
        assert_eq!(moved.history(&alone)["total"], 4);
        let home = home.map_or(moved.agent_home(), PathBuf::from);
        for words in ["before the move", "waits over the move", "goes on"] {
            assert_eq!(delivered(&home, words), 1, "{words}");
        }
    }
}

#[test]
fn an_agent_that_named_its_session_before_it_told_has_the_turn_once() {
    for (dies, victim) in [(true, "server"), (false, "agent")] {
        let place = Place::new();
        let mut server = place.options().start();
        server.converse("new", "hello");
        let mut events = server.follow();
        let text = "{{dedup=off late_id_ms=0 late_init_ms=60000}} named by itself";
        let sent = server.send("new", text);
        events.turn_of(&sent.message_uuid);
        server.wait_until("the line in a transcript of another name", |s| {
            (delivered(&s.agent_home(), "named by itself") == 1).then_some(())
        });
        if dies {
            server.kill9();
            server.restart();
        } else {
            server.agents().into_iter().for_each(|agent| assert!(proc::signal(agent, Signal::KILL)));
        }
        let mut events = server.follow_from(Some(&events.cursor()));
        let end = events.turn_end(&sent.message_uuid);
        assert!(end.text("error").contains("before it finished"), "{victim}: {end:?}");
        assert_eq!(delivered(&server.agent_home(), "named by itself"), 1, "{victim}");
        let assigned = events.wait_for("the other id", |f| f.event == "chat-session-assigned");
        assert_eq!(assigned.text("was"), sent.session_id, "{victim}");
        // Both ids lead to the conversation, and it goes on.
        assert_eq!(texts(&server.history(&sent.session_id), "user").len(), 1, "{victim}");
        let (_, end) = server.converse(&sent.session_id, "and on");
        assert_eq!(end.event, "chat-complete", "{victim}: {end:?}");
        assert_eq!(server.history(assigned.text("sessionId"))["total"], 3, "{victim}");
    }
}

/// The journal's files out of a box, or back into it.
fn journal_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for name in ["journal.db", "journal.db-wal", "journal.db-shm"] {
        let _ = std::fs::remove_file(to.join(name));
        if from.join(name).exists() {
            std::fs::copy(from.join(name), to.join(name)).unwrap();
        }
    }
}

#[test]
fn what_waits_in_a_restored_journal_is_looked_up_before_its_first_byte() {
    let place = Place::new();
    let mut server = place.options().env("BEEBOX_AGENT_PROFILE", "2.1.197").start();
    let (first, _) = server.converse("new", "hello {{dedup=off}}");
    let session = first.session_id;
    let mut events = server.follow();
    let running = server.send(&session, "{{hang dedup=off}} running");
    events.turn_of(&running.message_uuid);
    server.wait_until("the turn in the transcript", |s| (delivered(&s.agent_home(), "running") == 1).then_some(()));
    // Two that will be one turn, the second found only by its words.
    let one = server.send(&session, "waits: one {{dedup=off}}");
    let two = server.send(&session, "one");
    server.kill9();
    let state = place.box_dir().join(".beebox");
    journal_files(&state, &place.path("backup"));
    server.restart();
    let mut events = server.follow_from(Some(&events.cursor()));
    events.end_of_message(&two.message_uuid);
    let (later, _) = server.converse(&session, "after the backup {{dedup=off}}");
    server.kill9();
    journal_files(&place.path("backup"), &state);
    server.restart();
    let mut events = server.follow_from(Some("0"));
    for sent in [&one, &two] {
        let end = events.end_of_message(&sent.message_uuid);
        assert_eq!((end.event.as_str(), end.text("subtype")), ("chat-complete", "recovered"), "{end:?}");
    }
    let fresh = server.send(&session, "after the restore {{dedup=off}}");
    events.end_of_message(&fresh.message_uuid);
    assert_eq!(pending(&server, &session), []);
    let asked = texts(&server.history(&session), "user");
    assert_eq!(asked.len(), 5, "{asked:?}");
    for words in ["running", "waits: one", "after the backup", "after the restore"] {
        assert_eq!(asked.iter().filter(|t| t.contains(words)).count(), 1, "{words}: {asked:?}");
    }
    assert_ne!(later.message_uuid, fresh.message_uuid);
}

#[test]
fn a_transcript_that_was_shortened_or_exchanged_proves_nothing() {
    for exchange in [false, true] {
        let place = Place::new();
        let mut server = place.options().start();
        let (first, _) = server.converse("new", "the anchor");
        let mut events = server.follow();
        let sent = server.send(&first.session_id, "{{user_flush_ms=60000 hang}} unknown");
        events.turn_of(&sent.message_uuid);
        server.wait_phase(&first.session_id, "streaming");
        let path = server.transcript(&first.session_id).unwrap();
        server.kill9();
        let line = r#"{"type":"user","message":{"role":"user","content":"somebody else"},"uuid":"x"}"#;
        std::fs::write(&path, if exchange { format!("{line}\n") } else { String::new() }).unwrap();
        server.restart();
        let mut events = server.follow_from(Some(&events.cursor()));
        let end = events.turn_end(&sent.message_uuid);
        assert!(end.text("error").contains("another file than before"), "{exchange}: {end:?}");
        assert_eq!(pending(&server, &first.session_id)[0].0, "failed");
        assert_eq!(delivered(&server.agent_home(), "unknown"), 0);
    }
}

#[test]
fn a_claim_is_as_old_as_time_has_passed_whatever_the_clock_is_set_to() {
    const YEARS_MS: i64 = 10 * 365 * 24 * 3600 * 1000;
    let place = Place::new();
    let clock = place.path("clock");
    let set = |ms: i64| std::fs::write(&clock, ms.to_string()).unwrap();
    // A machine without a battery clock starts in the past …
    set(-YEARS_MS);
    let mut server = place.options().env("BEEBOX_CLOCK", &clock.display().to_string()).start();
    let first = server.send_as("new", "once", Some("the same"), &[]);
    server.follow_from(Some("0")).turn_end(&first.message_uuid);
    let again = |server: &Server| server.send_as("new", "once", Some("the same"), &[]);
    // … until its clock is set right, by and by.
    for (ms, restarts) in [(0, false), (0, true), (YEARS_MS, false), (-YEARS_MS, true), (0, true)] {
        set(ms);
        if restarts {
            server.kill9();
            server.restart();
        }
        let repeat = again(&server);
        assert_eq!((&repeat.message_uuid, repeat.deduplicated), (&first.message_uuid, true), "{ms} {restarts}");
        let delivered = server.bootstrap(&first.session_id)["delivered"].clone();
        assert_eq!(
            delivered[0]["uuid"],
            first.message_uuid.as_str(),
            "{ms} {restarts}: the last hour is not the clock's"
        );
    }
    assert_eq!(server.history(&first.session_id)["total"], 2);
}

#[test]
fn what_is_no_regular_file_holds_up_nobody() {
    let place = Place::new();
    let server = place.options().args(["--http-workers", "8"]).start();
    let (first, _) = server.converse("new", "hello");
    let folder = server.transcript(&first.session_id).unwrap().parent().unwrap().to_owned();
    let mkfifo = Command::new("mkfifo").arg(folder.join("fifo.jsonl")).status().unwrap();
    assert!(mkfifo.success());
    std::os::unix::net::UnixListener::bind(folder.join("socket.jsonl")).unwrap();
    std::fs::create_dir(folder.join("folder.jsonl")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.join("device.jsonl")).unwrap();
    std::os::unix::fs::symlink("device.jsonl", folder.join("loop.jsonl")).unwrap();
    for name in ["fifo", "socket", "folder", "device", "loop"] {
        for _ in 0..3 {
            for path in ["/api/chat/history?session=", "/api/chat/bootstrap?session=", "/api/chat/status?session="] {
                let answer = server.get(&format!("{path}{name}"));
                assert!([200, 404, 410, 500].contains(&answer.status), "{path}{name}: {}", answer.text());
            }
            let photo = server.get(&format!("/api/session-media/{name}/x/0"));
            assert!([404, 500].contains(&photo.status), "{name}: {}", photo.text());
            let refused = server.try_send(name, "to no conversation", None, &[]).expect_err(name);
            assert_eq!(refused.status, 500, "{name}: {}", refused.text());
        }
    }
    let listed = server.get_json("/api/chat/sessions");
    assert!(!listed.to_string().contains("fifo"), "{listed}");
    assert_eq!(server.history(&first.session_id)["total"], 2);
    let (_, end) = server.converse(&first.session_id, "and on");
    assert_eq!(end.event, "chat-complete");
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("beebox_http_overdue_workers 0"), "{metrics}");
}

#[test]
fn history_is_whole_at_the_end_of_an_interrupted_turn() {
    for profile in ["2.1.197", "2.1.332"] {
        let server = Options::default().env("BEEBOX_AGENT_PROFILE", profile).start();
        let (first, _) = server.converse("new", "hello");
        let session = first.session_id;
        for round in 0..5 {
            let mut events = server.follow();
            let sent = server.send(&session, &format!("{{{{deltas=100 delta_ms=50}}}} {round}"));
            let turn = sent.message_uuid.clone();
            events.wait_for("an answer", |f| f.event == "chat-turn" && f.text("turnId") == turn);
            server.control("interrupt", &session);
            events.wait_for("the end", |f| is_end_of(f, &turn));
            let entries = server.history(&session)["entries"].clone();
            let last = entries.as_array().unwrap().last().unwrap().clone();
            assert_eq!(last["type"], "interrupted", "{profile} round {round}: {last}");
        }
        assert!(!server.stderr().contains("the transcript lacks"), "{}", server.stderr());
    }
}

#[test]
fn an_agent_that_keeps_nothing_is_waited_for_once_not_at_every_turn() {
    let place = Place::new();
    let server = place.scripted("stay").start();
    let (first, _) = server.converse("new", "one");
    for n in 0..3 {
        server.converse(&first.session_id, &format!("again {n}"));
    }
    // The gate waits 5 s for a transcript that may come late; not for one that never comes.
    let stderr = server.stderr();
    assert_eq!(stderr.matches("the transcript lacks").count(), 1, "{stderr}");
}

#[test]
fn a_thread_message_recorded_after_its_sender_gave_up_is_in_the_threads_record() {
    let place = Place::new();
    let hold = place.path("hold");
    let fault = format!("before_record=hold:{}", hold.display());
    let server = place.options().env("BEEBOX_FAULT", &fault).start();
    let post = |id: &str| {
        let body = serde_json::json!({"thread": "anna", "message": "{{say=ok}}", "messageId": id});
        server.post("/api/threads/send", &body)
    };
    let count = || server.get_json("/api/threads")["threads"][0]["messageCount"].as_u64().unwrap_or(0);
    assert_eq!((post("first").status, count()), (200, 1));
    std::fs::write(&hold, "").unwrap();
    let unknown = post("second");
    assert_eq!((unknown.status, count()), (503, 1), "{}", unknown.text());
    std::fs::remove_file(&hold).unwrap();
    server.wait_until("the record", |_| (count() == 2).then_some(()));
    assert_eq!((post("second").status, count()), (200, 2), "a repeat is no third message");
}

#[test]
fn a_worker_that_waits_says_in_the_dump_for_which_session() {
    let server = Server::new();
    let (first, _) = server.converse("new", "hello");
    let running = server.send(&first.session_id, "{{hang}}");
    server.wait_phase(&first.session_id, "streaming");
    let letters = &first.session_id[..8];
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            server.get(&format!("/api/chat/turns/{}?after=9999&wait=20000", running.message_uuid));
        });
        server.wait_until("the worker's row", |s| {
            let dump = s.get("/api/debug/threads").text();
            let row = |l: &str| l.contains("waits for a turn to end") && l.contains(&format!("session {letters}"));
            dump.lines().any(row).then_some(())
        });
        server.control("stop", &first.session_id);
        waits.join().unwrap();
    });
}

#[test]
fn what_the_original_writes_after_it_was_copied_is_not_given_again_by_the_copy() {
    let place = Place::new();
    let home = place.path("home").display().to_string();
    let server = place.options().args(["--agent-home", &home]).start();
    let (first, _) = server.converse("new", "hello");
    let (mut events, session) = (server.follow(), first.session_id);
    // The copy finds nothing of it at first: the agent writes it down late.
    let running = server.send(&session, "{{dedup=off user_flush_ms=2500 deltas=30 delta_ms=100}} written late");
    events.turn_of(&running.message_uuid);
    server.wait_phase(&session, "streaming");
    copy(&place.box_dir(), &place.path("copy"));
    let other = Options::default().box_dir(&place.path("copy")).args(["--agent-home", &home]).start();
    let mut others = other.follow_from(Some("0"));
    others.wait_for("the copy wants to give it again", |f| {
        f.event == "chat-turn-failed" && f.text("turnId") == running.message_uuid && f.data["willRetry"] == true
    });
    events.turn_end(&running.message_uuid);
    server.control("stop", &session);
    server.wait_phase(&session, "idle");
    other.send(&session, "and on, in the copy");
    let end = others.turn_end(&running.message_uuid);
    assert_eq!(end.text("subtype"), "recovered", "{end:?}");
    assert_eq!(delivered(Path::new(&home), "written late"), 1);
}

/// An agent that says why it does not start, until `fine` is there; then one that keeps no transcript.
const REFUSES: &str = r#"
here=$(dirname "$0")
[ -e "$here/fine" ] && exec sh "$here/agent.sh" "$@"
read -r line
echo "--dangerously-skip-permissions cannot be used with root/sudo privileges" >&2
exit 1
"#;

#[test]
fn a_start_that_the_agent_refuses_is_told_with_its_reason_first_and_keeps_the_message() {
    let place = Place::new();
    let refuses = place.path("refuses.sh");
    std::fs::write(&refuses, REFUSES).unwrap();
    let server = place.options().args(["--agent", &format!("sh {}", refuses.display())]).env("MODE", "stay").start();
    let mut events = server.follow();
    let sent = server.send("new", "hello");
    let first = events.wait_for("the refusal", |frame| frame.event == "chat-turn-failed");
    assert!(first.text("error").contains("as root") && first.data["willRetry"] == true, "{first:?}");
    assert_eq!(pending(&server, &sent.session_id).len(), 1, "the message waits");
    std::fs::write(place.path("fine"), "").unwrap();
    events.wait_for("the answer", |frame| frame.event == "chat-complete");
    // Nobody doubts that it was given to none of those that refused: it is not shown as failed, and is given once.
    assert_eq!(place.given(&sent.message_uuid), 1);
}

#[test]
fn a_conversation_that_the_agent_does_not_find_fails_with_that_reason_and_no_other() {
    let place = Place::new();
    // The embedded agent, until `lost` is there.
    let script = place.path("loses.sh");
    let program = env!("CARGO_BIN_EXE_beebox-chatd");
    let says =
        r#"{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["No conversation found"]}"#;
    let lost = place.path("lost");
    let text =
        format!("[ -e {} ] || exec {program} agent \"$@\"\nread -r line\necho '{says}'\nexit 1\n", lost.display());
    std::fs::write(&script, text).unwrap();
    let server = place.options().args(["--agent", &format!("sh {}", script.display())]).start();
    let (first, _) = server.converse("new", "one");
    server.control("stop", &first.session_id);
    server.wait_phase(&first.session_id, "idle");
    std::fs::write(lost, "").unwrap();
    let mut events = server.follow();
    let sent = server.send(&first.session_id, "two");
    let failed = events.wait_for("the failure", |frame| {
        frame.event == "chat-turn-failed" && frame.data["messageUuids"].to_string().contains(&sent.message_uuid)
    });
    assert!(failed.text("error").contains("no such conversation") && failed.data["willRetry"] == false, "{failed:?}");
    let rows = pending(&server, &first.session_id);
    assert!(rows.len() == 1 && rows[0].0 == "failed" && rows[0].1.contains("no such conversation"), "{rows:?}");
}
