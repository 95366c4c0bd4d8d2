//! A run of the library with the embedded agent behind it: which turns begin and end, and how, for what it can be told
//! to do. No server around it.

use std::sync::Arc;
use std::time::Duration;

use beebox_chatd::agent::{BoxMark, Run, RunEnd, RunFact, RunListener, RunSpec, Turn, TurnEnd};
use beebox_chatd::error::Result;
use beebox_chatd::ids::{RunNo, SessionId, TurnId};
use beebox_chatd::inbox::Image;
use beebox_chatd::sync::{Receiver, Sender, unbounded};

/// Longest wait for one event.
const LIMIT: Duration = Duration::from_secs(30);

enum Heard {
    Fact(RunFact),
    Ended(RunEnd),
}

struct Ear(Sender<Heard>);

impl RunListener for Ear {
    fn prepare(&self, _: RunNo) -> Result<()> {
        Ok(())
    }

    fn started(&self, _: &Run, _: u32, _: u64) {}

    fn fact(&self, _: RunNo, fact: RunFact) {
        let _ = self.0.send(Heard::Fact(fact));
    }

    fn is_durable(&self, _: RunNo, _: &TurnEnd) -> bool {
        true
    }

    fn ended(&self, end: RunEnd) {
        let _ = self.0.send(Heard::Ended(end));
    }
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn run(&self, session: &SessionId, resume: bool) -> Live {
        let (said, heard) = unbounded();
        let spec = RunSpec {
            run: RunNo(1),
            session: session.clone(),
            resume,
            program: vec![env!("CARGO_BIN_EXE_beebox-chatd").into(), "agent".into()],
            box_dir: self.0.path().to_owned(),
            env: vec![("CLAUDE_CONFIG_DIR".into(), self.0.path().join("home").into())],
            mark: BoxMark::of(self.0.path()),
            allow_tools: false,
        };
        let run = Run::start(spec, Arc::new(Ear(said))).unwrap();
        Live { run, heard, seen: Vec::new(), answer: String::new() }
    }
}

struct Live {
    run: Run,
    heard: Receiver<Heard>,
    /// Beginnings and ends, in order.
    seen: Vec<String>,
    answer: String,
}

impl Live {
    fn send(&self, turn: &TurnId, text: &str, images: Vec<Image>) {
        self.run.send_turn(Turn { turn: turn.clone(), text: text.into(), images }).unwrap();
    }

    /// Takes events until `count` turns ended.
    fn ends(&mut self, count: usize) -> TurnEnd {
        let mut left = count;
        loop {
            let heard = self.heard.recv_timeout(LIMIT);
            let heard = heard.unwrap_or_else(|e| panic!("{e} after {:?}", self.seen));
            let Heard::Fact(fact) = heard else { panic!("the run ended after {:?}", self.seen) };
            if let RunFact::AgentTurnBegan { .. } = fact {
                self.seen.push("began".into());
            } else if let RunFact::SessionId { cleared, .. } = fact {
                self.seen.push(format!("id cleared={cleared}"));
            } else if let RunFact::Unknown { kind, .. } = fact {
                self.seen.push(format!("unknown {kind}"));
            } else if let RunFact::Frame { msg, .. } = fact {
                self.answer.push_str(&msg.answer_texts().concat());
            } else if let RunFact::TurnEnded(end) = fact {
                let mut text = if end.ours { "ours".to_owned() } else { "agent's".to_owned() };
                text.push_str(&format!(" {}", end.subtype));
                for (is, word) in
                    [(end.is_error, "error"), (end.interrupted, "interrupted"), (end.had_it_already, "had it")]
                {
                    if is {
                        text.push_str(&format!(", {word}"));
                    }
                }
                self.seen.push(text);
                left -= 1;
                if left == 0 {
                    return end;
                }
            }
        }
    }

    fn frame(&self) {
        loop {
            if let Ok(Heard::Fact(RunFact::Frame { .. })) = self.heard.recv_timeout(LIMIT) {
                return;
            }
        }
    }

    fn end(self) -> RunEnd {
        loop {
            if let Heard::Ended(end) = self.heard.recv_timeout(LIMIT).expect("the run ends") {
                assert!(self.run.join_within(LIMIT));
                return end;
            }
        }
    }
}

#[test]
fn each_thing_the_agent_can_do_begins_and_ends_the_turns_it_should() {
    for (text, ends, want) in [
        ("hello", 1, &["ours success"][..]),
        ("{{tool think ask}}", 1, &["ours success"]),
        ("{{error}}", 1, &["ours success, error"]),
        ("{{error=execution}}", 1, &["ours error_during_execution, error"]),
        ("{{flood=2000}}", 1, &["ours success"]),
        ("{{bg_ms=50}}", 2, &["ours success", "began", "agent's success"]),
        ("{{own_turn_on_send}}", 1, &["ours success"]),
        ("{{own_turn_on_send=fold}}", 1, &["ours success"]),
        ("{{keep_uuid=off}}", 1, &["ours success"]),
        ("{{late_id_ms=20}}", 1, &["id cleared=false", "ours success"]),
    ] {
        let place = Place::new();
        let mut live = place.run(&SessionId::fresh(), false);
        let turn = TurnId::fresh();
        live.send(&turn, text, Vec::new());
        let end = live.ends(ends);
        assert_eq!(live.seen, want, "{text}");
        assert!(end.last_assistant_uuid.is_some() || end.is_error, "{text}");
        // The next one is answered as well.
        live.seen.clear();
        live.send(&TurnId::fresh(), "and now?", Vec::new());
        live.ends(1);
        assert_eq!(live.seen, ["ours success"], "after {text}");
        live.run.close();
        let end = live.end();
        assert!(end.asked && end.start_error.is_none(), "{text}: {end:?}");
    }
}

#[test]
fn a_repeated_turn_is_had_already_by_the_next_process() {
    let place = Place::new();
    let session = SessionId::fresh();
    let turn = TurnId::fresh();
    let mut live = place.run(&session, false);
    live.send(&turn, "once", Vec::new());
    live.ends(1);
    assert_eq!(live.seen, ["ours success"]);
    live.run.close();
    live.end();
    let mut live = place.run(&session, true);
    live.send(&turn, "once", Vec::new());
    live.ends(1);
    assert_eq!(live.seen, ["ours success, had it"]);
    live.run.kill_now();
    assert_eq!(live.end().exit, "signal 9");
}

#[test]
fn a_photo_arrives_with_its_size() {
    let place = Place::new();
    let mut live = place.run(&SessionId::fresh(), false);
    let bytes: Vec<u8> = [b"\x89PNG\r\n\x1a\n".as_slice(), &[0; 1_000_000]].concat();
    let image = Image { number: 1, mime: "image/png".into(), bytes: bytes.into() };
    live.send(&TurnId::fresh(), "look [image#1] here", vec![image]);
    live.ends(1);
    assert!(live.answer.contains("1000008") || live.answer.contains("1,000,008"), "{}", live.answer);
    live.run.close();
    live.end();
}

#[test]
fn an_interrupt_ends_the_turn_before_and_after_init() {
    let place = Place::new();
    for (text, early) in [("{{hang}}", false), ("{{hang init_ms=300}}", true)] {
        let mut live = place.run(&SessionId::fresh(), false);
        live.send(&TurnId::fresh(), text, Vec::new());
        if !early {
            live.frame();
        }
        live.run.interrupt();
        live.ends(1);
        assert_eq!(live.seen, ["ours error_during_execution, error, interrupted"], "{text}");
        live.run.close();
        // Exit 1 after an interrupted turn is not an error.
        assert!(live.end().start_error.is_none());
    }
}

#[test]
fn a_conversation_is_followed_over_clear() {
    let place = Place::new();
    let mut live = place.run(&SessionId::fresh(), false);
    live.send(&TurnId::fresh(), "one", Vec::new());
    live.ends(1);
    live.send(&TurnId::fresh(), "/clear", Vec::new());
    live.ends(1);
    live.send(&TurnId::fresh(), "two", Vec::new());
    live.ends(1);
    assert_eq!(live.seen.iter().filter(|s| *s == "id cleared=true").count(), 1, "{:?}", live.seen);
    assert_eq!(live.seen.iter().filter(|s| s.starts_with("ours success")).count(), 3, "{:?}", live.seen);
    live.run.close();
    live.end();
}

#[test]
fn starts_that_the_agent_refuses_say_why() {
    let place = Place::new();
    let session = SessionId::fresh();
    let end = place.run(&session, true).end();
    assert_eq!(end.start_error.unwrap().code().word(), "session_gone");
    let mut live = place.run(&session, false);
    live.send(&TurnId::fresh(), "now it exists", Vec::new());
    live.ends(1);
    live.run.close();
    live.end();
    let end = place.run(&session, false).end();
    assert!(end.start_error.unwrap().to_string().contains("already in use"));
}

#[test]
fn an_agent_that_dies_or_will_not_die_ends_all_the_same() {
    let place = Place::new();
    for (text, want) in
        [("{{die=before}}", "exit 9"), ("{{die=mid}}", "exit 9"), ("{{die=after}}", "exit 9"), ("{{torn}}", "exit 9")]
    {
        let live = place.run(&SessionId::fresh(), false);
        live.send(&TurnId::fresh(), text, Vec::new());
        let end = live.end();
        assert_eq!((end.exit.as_str(), end.spoke, end.asked), (want, true, false), "{text}");
    }
    let live = place.run(&SessionId::fresh(), false);
    live.send(&TurnId::fresh(), "{{ignore=both hang}}", Vec::new());
    live.frame();
    live.run.close();
    assert_eq!(live.end().exit, "signal 9");
}
