//! The pump with real processes: small shell scripts as agents, good ones and hostile ones.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::end::STDIN_GRACE;
use super::told::GATE_LIMIT;
use super::*;
use std::sync::atomic::AtomicU32;

use crate::agent::{Adapted, BoxMark, Image, MARK_VARIABLE, Run, RunEnd, TurnEnd, end_leftovers, start_time_of};
use crate::error::Code;
use crate::ids::{RunNo, SessionId, TurnId};
use crate::sync::{Mutex, Sender, unbounded};

/// Longest wait of a test for one event.
const LIMIT: Duration = Duration::from_secs(30);

/// What agents share: `$S` is the session; `init`, `say`, `result` speak; `turn` answers one.
const PRELUDE: &str = r#"
for S; do :; done
init() { printf '{"type":"system","subtype":"init","session_id":"%s"}\n' "$S"; }
say() { printf '{"type":"assistant","uuid":"a-%s","message":{"role":"assistant","content":[{"type":"text","text":"%s"}]}}\n' "$1" "$1"; }
result() { printf '{"type":"result","subtype":"success","is_error":false,"num_turns":1}\n'; }
failed() { printf '{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["stopped"]}\n'; }
turn() { init; say "$1"; result; }
"#;

#[derive(Debug)]
enum Heard {
    Started(u32),
    Fact(RunFact),
    Ended(RunEnd),
}

type Durable = Box<dyn Fn(&TurnEnd) -> bool + Send + Sync>;

struct Ear {
    heard: Sender<Heard>,
    prepare: Mutex<Option<Result<()>>>,
    durable: Durable,
    panic_on_spoke: bool,
}

impl RunListener for Ear {
    fn prepare(&self, _: RunNo) -> Result<()> {
        self.prepare.lock().take().unwrap_or(Ok(()))
    }

    fn started(&self, _: &Run, pid: u32, start_time: u64) {
        assert_eq!(start_time_of(pid), Some(start_time));
        let _ = self.heard.send(Heard::Started(pid));
    }

    fn fact(&self, _: RunNo, fact: RunFact) {
        assert!(!(self.panic_on_spoke && matches!(fact, RunFact::Spoke)), "on purpose");
        let _ = self.heard.send(Heard::Fact(fact));
    }

    fn is_durable(&self, _: RunNo, end: &TurnEnd) -> bool {
        (self.durable)(end)
    }

    fn ended(&self, end: RunEnd) {
        let _ = self.heard.send(Heard::Ended(end));
    }
}

/// A run of a shell script, and what is heard of it.
struct Stage {
    run: Run,
    heard: Receiver<Heard>,
    mark: String,
    _dir: tempfile::TempDir,
}

struct Setting {
    prepare: Result<()>,
    durable: Durable,
    panic_on_spoke: bool,
    program: Option<Vec<OsString>>,
    resume: bool,
    allow_tools: bool,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            prepare: Ok(()),
            durable: Box::new(|_| true),
            panic_on_spoke: false,
            program: None,
            resume: false,
            allow_tools: false,
        }
    }
}

impl Stage {
    fn new(script: &str) -> Stage {
        Self::with(script, Setting::default())
    }

    fn with(script: &str, setting: Setting) -> Stage {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sh");
        std::fs::write(&path, format!("{PRELUDE}{script}")).unwrap();
        let (heard, ear) = unbounded();
        let session = SessionId::fresh();
        let mark = BoxMark::of(dir.path());
        let value = mark.of_run(&session);
        let listener = Ear {
            heard,
            prepare: Mutex::new(Some(setting.prepare)),
            durable: setting.durable,
            panic_on_spoke: setting.panic_on_spoke,
        };
        let spec = RunSpec {
            run: RunNo(7),
            session,
            resume: setting.resume,
            program: setting.program.unwrap_or_else(|| vec!["/bin/sh".into(), path.into()]),
            box_dir: dir.path().to_owned(),
            env: vec![("EXTRA".into(), "extra value".into())],
            mark,
            allow_tools: setting.allow_tools,
        };
        let run = Run::start(spec, Arc::new(listener)).unwrap();
        Stage { run, heard: ear, mark: value, _dir: dir }
    }

    fn next(&self) -> Heard {
        match self.heard.recv_timeout(LIMIT) {
            Ok(heard) => heard,
            Err(e) => panic!("{e}; {}", crate::dump::threads_page()),
        }
    }

    /// The next one that `pick` takes; others are passed over.
    fn until<T>(&self, mut pick: impl FnMut(Heard) -> Option<T>) -> T {
        loop {
            let heard = self.next();
            if let Heard::Ended(end) = &heard {
                let text = format!("{end:?}");
                return pick(heard).unwrap_or_else(|| panic!("the run ended: {text}"));
            }
            if let Some(found) = pick(heard) {
                return found;
            }
        }
    }

    fn pid(&self) -> u32 {
        self.until(|heard| if let Heard::Started(pid) = heard { Some(pid) } else { None })
    }

    fn send(&self, text: &str) -> TurnId {
        self.send_with(text, Vec::new())
    }

    fn send_with(&self, text: &str, images: Vec<Image>) -> TurnId {
        let turn = TurnId::fresh();
        self.run.send_turn(Turn { turn: turn.clone(), text: text.into(), images }).unwrap();
        turn
    }

    fn turn_end(&self) -> TurnEnd {
        self.until(|heard| if let Heard::Fact(RunFact::TurnEnded(end)) = heard { Some(end) } else { None })
    }

    /// The end; nothing comes after it, the thread ends, and no process is left.
    fn end(self) -> RunEnd {
        let end = self.until(|heard| if let Heard::Ended(end) = heard { Some(end) } else { None });
        assert!(self.run.join_within(LIMIT));
        assert!(self.heard.recv_timeout(LIMIT).is_err(), "the listener was dropped and silent");
        assert!(self.run.is_closed());
        assert_eq!(self.run.pid(), None);
        assert!(self.run.send_turn(Turn { turn: TurnId::fresh(), text: String::new(), images: vec![] }).is_err());
        // The kernel ends those that were killed in its own time.
        wait_until("no process of the run is left", || processes_with(&self.mark).is_empty());
        end
    }
}

fn processes_with(mark: &str) -> Vec<u32> {
    let entry = format!("{MARK_VARIABLE}={mark}\0").into_bytes();
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ.windows(entry.len()).any(|w| w == entry)
        })
        .collect()
}

fn photo(bytes: usize) -> Vec<Image> {
    vec![Image { number: 1, mime: "image/png".into(), bytes: vec![7; bytes].into() }]
}

/// Waits until `done`, for [`LIMIT`] at most.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let from = Instant::now();
    while !done() {
        assert!(from.elapsed() < LIMIT, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_turn_is_handed_over_shown_and_ended_and_close_is_gentle() {
    let stage = Stage::new(
        r#"echo "args $*" >&2; echo "mark $BEEBOX_RUN extra $EXTRA cwd $PWD" >&2
        while read -r line; do printf '%s\n' "$line" >&2; turn one; done"#,
    );
    assert!(stage.run.last_message_age_ms().is_none());
    assert_eq!(stage.run.no(), RunNo(7));
    let pid = stage.pid();
    assert_eq!(stage.run.pid(), Some(pid));
    let turn = stage.send("hello");
    assert!(matches!(stage.next(), Heard::Fact(RunFact::Spoke)));
    let heard = stage.next();
    let Heard::Fact(RunFact::Frame { turn: of, msg: msg @ Adapted::Assistant(_) }) = heard else { panic!("{heard:?}") };
    assert_eq!(of, turn);
    assert_eq!(msg.answer_texts(), ["one"]);
    let end = stage.turn_end();
    assert_eq!((end.turn, end.ours, end.is_error), (turn, true, false));
    assert_eq!((end.last_assistant_uuid.as_deref(), end.num_turns), (Some("a-one"), Some(1)));
    assert!(stage.run.last_message_age_ms().is_some());
    let second = stage.send("again");
    assert_eq!(stage.turn_end().turn, second);
    let mark = stage.mark.clone();
    stage.run.close();
    let end = stage.end();
    assert_eq!((end.exit.as_str(), end.spoke, end.asked), ("exit 0", true, true));
    assert!(end.start_error.is_none());
    let said = end.stderr_tail;
    for want in [
        "--output-format stream-json --input-format stream-json --verbose --include-partial-messages \
         --permission-mode bypassPermissions --session-id ",
        &format!("mark {mark} extra extra value cwd /"),
        r#""content":"hello""#,
        second.as_str(),
    ] {
        assert!(said.contains(want), "{want:?} is not in {said}");
    }
}

#[test]
fn a_photo_on_stdin_and_a_flood_on_stdout_do_not_dead_lock() {
    // It writes 3 MB before it reads a byte, and more while it reads.
    let stage = Stage::new(
        r#"init; i=0; while [ $i -lt 3 ]; do printf '{"type":"stream_event","event":{"n":"%01000000d"}}\n' 1; i=$((i+1)); done
        head -n 1 | wc -c >&2; printf '{"type":"stream_event","event":{"n":"%01000000d"}}\n' 1; say done; result; cat >/dev/null"#,
    );
    let turn = stage.send_with("see [image#1]", photo(1_000_000));
    let end = stage.turn_end();
    assert_eq!(end.turn, turn);
    stage.run.close();
    let said = stage.end().stderr_tail;
    assert!(said.trim().parse::<usize>().unwrap() > 1_333_333, "{said}");
}

#[test]
fn an_agent_that_never_reads_its_stdin_can_be_closed() {
    let stage = Stage::new("init; exec sleep 60");
    stage.send_with("see", photo(1_000_000));
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::Spoke)).then_some(()));
    stage.run.close();
    assert_eq!(stage.end().exit, "signal 15");
}

#[test]
fn an_agent_that_ignores_sigterm_is_killed_with_its_tools() {
    let stage = Stage::new(r#"trap "" TERM; init; say up; while :; do sleep 1; done"#);
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::AgentTurnBegan { .. })).then_some(()));
    stage.run.close();
    let end = stage.end();
    assert_eq!((end.exit.as_str(), end.asked), ("signal 9", true));
}

#[test]
fn an_agent_that_goes_without_its_tools_has_them_ended() {
    // 2.1.197 does so on SIGTERM.
    let stage = Stage::new(r#"init; sleep 600 </dev/null >/dev/null 2>&1 & echo $! >&2; say up; wait"#);
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::AgentTurnBegan { .. })).then_some(()));
    stage.run.close();
    let end = stage.end();
    assert_eq!(end.exit, "signal 15");
    let tool: u32 = end.stderr_tail.trim().parse().unwrap();
    assert!(crate::load::proc::exited_within(tool, LIMIT));
}

#[test]
fn kill_now_skips_the_graces() {
    let stage = Stage::new(r#"trap "" TERM; init; say up; while :; do sleep 60; done"#);
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::AgentTurnBegan { .. })).then_some(()));
    stage.run.kill_now();
    let from = Instant::now();
    assert_eq!(stage.end().exit, "signal 9");
    assert!(from.elapsed() < STDIN_GRACE);
}

#[test]
fn a_start_that_fails_says_why() {
    let missing = |program: &str| Setting { program: Some(vec![program.into()]), ..Setting::default() };
    for (script, setting, want) in [
        ("echo 'Error: Session ID x is already in use.' >&2; exit 1", Setting::default(), "already in use"),
        ("echo oops >&2; exit 3", Setting::default(), "exit 3 (oops)"),
        ("exit 0", Setting::default(), "exit 0"),
        ("kill -9 $$", Setting::default(), "signal 9"),
        ("", missing("no-such-program-here"), "not installed"),
        ("", missing("/etc/passwd"), "may not be executed"),
        ("", Setting { program: Some(vec![]), ..Setting::default() }, "no agent program"),
        ("", Setting { prepare: Err(Error::internal("not now")), ..Setting::default() }, "not now"),
    ] {
        let end = Stage::with(script, setting).end();
        let got = end.start_error.unwrap().to_string();
        assert!(got.contains(want), "{got}");
        assert!(!end.spoke && !end.asked);
    }
}

#[test]
fn a_conversation_that_the_agent_does_not_know_is_gone() {
    let setting = Setting { resume: true, ..Setting::default() };
    let stage = Stage::with(
        r#"echo "resumed with $*" >&2; printf '{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["No conversation found with session ID: %s"]}\n' "$S"; exit 1"#,
        setting,
    );
    let end = stage.end();
    assert_eq!(end.start_error.unwrap().code(), Code::SessionGone);
    assert!(end.errors[0].starts_with("No conversation found"));
    assert!(end.stderr_tail.contains("--resume "));
    assert!(!end.spoke);
}

#[test]
fn an_agent_that_closes_its_stdout_and_lives_is_ended() {
    let stage = Stage::new("init; say x; exec 1>&-; exec sleep 60");
    let end = stage.end();
    assert_eq!((end.exit.as_str(), end.spoke, end.asked), ("signal 15", true, false));
}

#[test]
fn an_agent_that_closes_its_stdin_and_lives_is_ended() {
    let stage = Stage::new(r#"exec 0<&-; printf '{"type":"keep_alive"}\n'; exec sleep 60"#);
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::Spoke)).then_some(()));
    stage.send("nobody reads this");
    let end = stage.end();
    assert_eq!((end.exit.as_str(), end.asked), ("signal 15", false));
}

#[test]
fn a_process_of_the_agents_that_keeps_stdout_open_does_not_hold_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    let script = format!("init; sleep 20 2>&- & echo $! > {}; say x; exit 4", file.display());
    let stage = Stage::new(&script);
    let end = stage.until(|heard| if let Heard::Ended(end) = heard { Some(end) } else { None });
    assert_eq!(end.exit, "exit 4");
    assert!(stage.run.join_within(LIMIT));
    // It was left running on purpose; it is ours to clean up.
    let pid = std::fs::read_to_string(file).unwrap();
    assert!(Command::new("kill").arg(pid.trim()).status().unwrap().success());
}

#[test]
fn an_agent_behind_a_wrapper_does_not_outlive_the_run() {
    // The wrapper ends; what it forked has the agent's command line, its mark, and its stdout.
    let stage = Stage::new("init; say x; (trap '' TERM; while :; do sleep 1; done) 2>&- & exit 4");
    assert_eq!(stage.end().exit, "exit 4");
}

#[test]
fn noise_on_stdout_is_counted_and_hides_nothing() {
    let stage = Stage::new(
        r#"echo hello; printf '\000\377\376\n'; echo; echo '{"type":"assistant","mess'; echo '{"type":"brand_new"}'; echo '[]'
        read -r line; turn one; printf '{"type":"brand_new"'; cat >/dev/null"#,
    );
    stage.send("x");
    let mut unknown = Vec::new();
    stage.until(|heard| match heard {
        Heard::Fact(RunFact::Unknown { kind, count }) => {
            unknown.push(format!("{kind} {count}"));
            None
        }
        Heard::Fact(RunFact::TurnEnded(end)) => {
            assert_eq!(end.last_assistant_uuid.as_deref(), Some("a-one"));
            Some(())
        }
        Heard::Fact(_) | Heard::Started(_) | Heard::Ended(_) => None,
    });
    assert_eq!(unknown, ["unreadable 1", "unreadable 2", "unreadable 3", "brand_new 1", "unreadable 4"]);
    stage.run.close();
    assert_eq!(stage.end().exit, "exit 0");
}

#[test]
fn a_line_of_ten_megabytes_arrives_whole() {
    let stage = Stage::new(
        r#"read -r line; init; printf '{"type":"assistant","message":{"content":"'; head -c 10000000 /dev/zero | tr '\0' x; printf '"}}\n'; result; cat >/dev/null"#,
    );
    stage.send("x");
    let len = stage.until(|heard| match heard {
        Heard::Fact(RunFact::Frame { msg, .. }) => Some(msg.answer_texts()[0].len()),
        Heard::Fact(_) | Heard::Started(_) | Heard::Ended(_) => None,
    });
    assert_eq!(len, 10_000_000);
    stage.turn_end();
    stage.run.close();
    stage.end();
}

#[test]
fn a_last_line_without_lf_counts() {
    let stage = Stage::new(r#"read -r line; init; say x; printf '{"type":"result","is_error":false}'"#);
    let turn = stage.send("x");
    assert_eq!(stage.turn_end().turn, turn);
    let end = stage.end();
    assert_eq!((end.exit.as_str(), end.asked), ("exit 0", false));
}

#[test]
fn an_interrupt_before_init_is_asked_again_under_a_fresh_id() {
    let stage = Stage::new(
        r#"read -r turn; printf '{"type":"keep_alive"}\n'; read -r ask; init; read -r again; printf '%s\n%s\n' "$ask" "$again" >&2; failed; cat >/dev/null"#,
    );
    let turn = stage.send("x");
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::Spoke)).then_some(()));
    stage.run.interrupt();
    let end = stage.turn_end();
    assert_eq!((end.turn, end.interrupted, end.is_error), (turn, true, true));
    assert_eq!(end.errors, ["stopped"]);
    // Idle: nothing to ask.
    stage.run.interrupt();
    stage.run.close();
    let said = stage.end().stderr_tail;
    let ids: Vec<_> = said
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|ask| (ask["request"]["subtype"].clone(), ask["request_id"].clone()))
        .collect();
    assert_eq!(ids.len(), 2);
    assert!(ids.iter().all(|(subtype, _)| subtype == "interrupt"));
    assert_ne!(ids[0].1, ids[1].1);
}

#[test]
fn an_interrupt_without_a_result_times_out_once() {
    let stage = Stage::new("read -r turn; init; cat >/dev/null");
    stage.send("x");
    stage.run.interrupt();
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::InterruptTimedOut)).then_some(()));
    stage.run.close();
    stage.end();
}

#[test]
fn a_question_about_a_tool_is_answered_no() {
    let stage = Stage::new(
        r#"read -r turn; init; printf '{"type":"control_request","request_id":"q1","request":{"subtype":"can_use_tool","tool_name":"Bash"}}\n'
        read -r a; printf '{"type":"control_request","request_id":"q2","request":{"subtype":"brand_new"}}\n'; read -r b
        printf '%s\n%s\n' "$a" "$b" >&2; result; cat >/dev/null"#,
    );
    stage.send("x");
    stage.turn_end();
    stage.run.close();
    let said = stage.end().stderr_tail;
    let answers: Vec<serde_json::Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers[0]["response"]["request_id"], "q1");
    assert_eq!(answers[0]["response"]["response"]["behavior"], "deny");
    assert!(answers[0]["response"]["response"]["message"].as_str().unwrap().contains("Bash"));
    assert_eq!(answers[1]["response"]["subtype"], "error");
}

#[test]
fn a_question_about_a_tool_is_answered_yes_where_the_setting_says_so() {
    let script = r#"read -r turn; init; printf '{"type":"control_request","request_id":"q1","request":{"subtype":"can_use_tool","tool_name":"Bash","input":{"command":"x \\ud83d"}}}\n'
        read -r a; printf '%s\n' "$a" >&2; result; cat >/dev/null"#;
    let stage = Stage::with(script, Setting { allow_tools: true, ..Setting::default() });
    stage.send("x");
    stage.turn_end();
    stage.run.close();
    let said = stage.end().stderr_tail;
    let answer: serde_json::Value = serde_json::from_str(said.trim()).unwrap();
    let verdict = &answer["response"]["response"];
    assert_eq!((&answer["response"]["request_id"], &verdict["behavior"]), (&"q1".into(), &"allow".into()));
    assert_eq!(verdict["updatedInput"]["command"], "x \u{fffd}", "the input comes back, made readable");
}

#[test]
fn the_end_of_a_turn_waits_for_the_transcript_and_what_follows_waits_behind_it() {
    let looks = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&looks);
    let setting =
        Setting { durable: Box::new(move |_| seen.fetch_add(1, Ordering::Relaxed) >= 5), ..Setting::default() };
    let stage = Stage::with("read -r x; init; say a; result; init; say b; result; cat >/dev/null", setting);
    stage.send("x");
    let mut order = Vec::new();
    stage.until(|heard| {
        if let Heard::Fact(fact) = heard {
            order.push(match &fact {
                RunFact::TurnEnded(end) if end.ours => "ours ended",
                RunFact::TurnEnded(_) => "agent's ended",
                RunFact::AgentTurnBegan { .. } => "began",
                RunFact::Frame { .. } => "frame",
                RunFact::Spoke
                | RunFact::Task(_)
                | RunFact::SessionId { .. }
                | RunFact::Unknown { .. }
                | RunFact::Version(_)
                | RunFact::InterruptTimedOut => "other",
            });
        }
        (order.last() == Some(&"agent's ended")).then_some(())
    });
    assert_eq!(order, ["other", "frame", "ours ended", "began", "frame", "agent's ended"]);
    assert_eq!(looks.load(Ordering::Relaxed), 7);
    stage.run.close();
    stage.end();
}

#[test]
fn a_flood_of_ends_costs_no_stack() {
    let looks = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&looks);
    let setting =
        Setting { durable: Box::new(move |_| seen.fetch_add(1, Ordering::Relaxed) > 50), ..Setting::default() };
    let stage = Stage::with(
        r#"read -r x; (init; result) >one; i=0; while [ $i -lt 13 ]; do cat one one >two; mv two one; i=$((i+1)); done; cat one; cat >/dev/null"#,
        setting,
    );
    stage.send("x");
    for _ in 0..8192 {
        stage.turn_end();
    }
    stage.run.close();
    stage.end();
}

#[test]
fn a_transcript_that_never_comes_holds_two_turns_and_no_more() {
    let setting = Setting { durable: Box::new(|_| false), ..Setting::default() };
    let stage = Stage::with("while read -r x; do turn a; done", setting);
    let times: Vec<_> = (0..3)
        .map(|_| {
            stage.send("x");
            let from = Instant::now();
            stage.turn_end();
            from.elapsed()
        })
        .collect();
    assert!(times[0] >= GATE_LIMIT && times[1] >= GATE_LIMIT && times[2] < GATE_LIMIT, "{times:?}");
    stage.run.close();
    stage.end();
}

#[test]
fn close_works_while_a_turn_waits_for_its_transcript() {
    let setting = Setting { durable: Box::new(|_| false), ..Setting::default() };
    let stage = Stage::with("read -r x; turn a; cat >/dev/null; exit 5", setting);
    stage.send("x");
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::Frame { .. })).then_some(()));
    let from = Instant::now();
    stage.run.close();
    // Its result is told all the same.
    stage.turn_end();
    assert_eq!(stage.end().exit, "exit 5");
    assert!(from.elapsed() < GATE_LIMIT);
}

#[test]
fn a_turn_that_finishes_inside_the_close_window_is_told() {
    let stage = Stage::new("read -r x; init; say a; cat >/dev/null; result; exit 1");
    let turn = stage.send("x");
    stage.until(|heard| matches!(heard, Heard::Fact(RunFact::Frame { .. })).then_some(()));
    stage.run.close();
    assert!(stage.run.send_turn(Turn { turn: TurnId::fresh(), text: "late".into(), images: vec![] }).is_err());
    assert_eq!(stage.turn_end().turn, turn);
    assert_eq!(stage.end().exit, "exit 1");
}

#[test]
fn a_turn_sent_while_the_agent_is_in_a_turn_of_its_own_is_written_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let script = format!(
        r#"init; say own; while [ ! -e {} ]; do sleep 0.01; done
        echo before >&2; printf '{{"type":"result","is_error":false,"origin":{{}}}}\n'; read -r x; echo after >&2; turn a; cat >/dev/null"#,
        go.display()
    );
    let stage = Stage::new(&script);
    let own = stage.until(|heard| match heard {
        Heard::Fact(RunFact::AgentTurnBegan { turn }) => Some(turn),
        Heard::Fact(_) | Heard::Started(_) | Heard::Ended(_) => None,
    });
    let ours = stage.send("x");
    std::fs::write(go, "").unwrap();
    let first = stage.turn_end();
    assert_eq!((first.turn, first.ours), (own, false));
    let second = stage.turn_end();
    assert_eq!((second.turn, second.ours), (ours, true));
    stage.run.close();
    stage.end();
}

#[test]
fn a_panic_in_a_listener_still_reaps_the_agent_and_tells_the_end() {
    let setting = Setting { panic_on_spoke: true, ..Setting::default() };
    let stage = Stage::with("init; exec sleep 60", setting);
    let end = stage.end();
    assert_eq!((end.exit.as_str(), end.asked), ("signal 9", false));
}

#[test]
fn a_run_that_is_closed_before_it_started_starts_nothing() {
    let stage = Stage::with("init; exec sleep 60", Setting::default());
    stage.run.close();
    let end = stage.end();
    assert!(end.asked);
    assert!(end.start_error.is_none());
}

/// A child that does not outlive a test that fails.
struct Held(std::process::Child);

impl Held {
    fn is_gone(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn leftovers_of_a_box_are_ended_and_those_of_its_copy_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, copy) = (dir.path().join("box"), dir.path().join("copy"));
    std::fs::create_dir(&ours).unwrap();
    std::fs::create_dir(&copy).unwrap();
    let (mark, of_copy) = (BoxMark::of(&ours), BoxMark::of(&copy));
    let session = SessionId::fresh();
    let start = |script: &str, name: &str, mark: &BoxMark, cwd: &std::path::Path| {
        let mut child = Command::new("/bin/sh")
            .args(["-c", &format!("{script} echo up; while :; do sleep 1; done"), name])
            .env(MARK_VARIABLE, mark.of_run(&session))
            .current_dir(cwd)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        Held(child)
    };
    // Bystanders: the mark without the agent's command line, the mark of a copy, the mark somewhere else, no mark.
    let mut dev_server = start("", "dev-server", &mark, &ours);
    let mut of_the_copy = start("", "stream-json", &of_copy, &copy);
    let mut marked_as_copy = start("", "stream-json", &of_copy, &ours);
    let mut elsewhere = start("", "stream-json", &mark, dir.path());
    let mut stubborn = start("trap '' TERM;", "stream-json", &mark, &ours);
    let mut docile = start("", "stream-json", &mark, &ours);
    // A copied journal knows all of them by pid and start time.
    let known = |held: &Held| (held.0.id(), start_time_of(held.0.id()).unwrap());
    let of_others = [known(&of_the_copy), known(&marked_as_copy), known(&elsewhere)];
    // A shell that is just forking its sleep is there twice.
    assert!(end_leftovers(&mark, &of_others) >= 2);
    assert!(stubborn.is_gone() && docile.is_gone());
    let (pid, start_time) = known(&dev_server);
    assert_eq!(end_leftovers(&mark, &[(pid, start_time + 1)]), 0, "a pid that was given again");
    for bystander in [&mut dev_server, &mut of_the_copy, &mut marked_as_copy, &mut elsewhere] {
        assert!(!bystander.is_gone());
    }
    // One that the journal knows needs no command line: a wrapper has its own.
    assert_eq!(end_leftovers(&mark, &[(pid, start_time)]), 1);
    assert!(dev_server.is_gone());
    drop((of_the_copy, marked_as_copy, elsewhere));
    for mark in [mark, of_copy] {
        wait_until("the shells' sleeps ended", || processes_with(&mark.of_run(&session)).is_empty());
    }
}

/// Runs the ignored test `name` of this file in a process of its own.
fn in_own_process(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("agent::pump::tests::{name}"), "--ignored", "--nocapture"]);
    command
}

#[test]
fn two_hundred_rounds_leave_no_thread_descriptor_child_or_zombie() {
    let out = in_own_process("rounds").output().unwrap();
    assert!(out.status.success(), "{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
}

#[test]
#[ignore = "counts what its process holds, so it runs alone, started by the test above"]
fn rounds() {
    let count = || {
        let entries = |dir: &str| std::fs::read_dir(dir).unwrap().count();
        let me = std::process::id();
        let children = std::fs::read_to_string(format!("/proc/self/task/{me}/children")).unwrap_or_default();
        (entries("/proc/self/fd"), entries("/proc/self/task"), children)
    };
    let round = |n: usize| {
        let stage = Stage::new("while read -r x; do turn a; done");
        stage.send("x");
        if n.is_multiple_of(2) {
            stage.turn_end();
        }
        if n.is_multiple_of(3) {
            stage.run.kill_now();
        } else {
            stage.run.close();
        }
        stage.end();
    };
    round(0);
    // A thread's last act is after its end is known; give the kernel the time to take it away.
    let mut before = count();
    wait_until("the first round's thread is gone", || {
        before = count();
        before.1 == 2
    });
    for n in 0..200 {
        round(n);
    }
    wait_until("everything is given back", || count() == before);
}

#[test]
fn an_agent_gets_sigterm_when_its_server_is_killed() {
    let mut server = in_own_process("server_to_be_killed").stdout(Stdio::piped()).spawn().unwrap();
    let pid = BufReader::new(server.stdout.take().unwrap())
        .lines()
        .find_map(|line| line.unwrap().strip_prefix("agent ").map(|pid| pid.parse::<u32>().unwrap()))
        .unwrap();
    let start = start_time_of(pid).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    // Nobody of ours reaps it; a zombie of whoever adopted it is dead as well.
    wait_until("the agent is gone", || {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        start_time_of(pid) != Some(start) || state.contains(") Z ")
    });
}

#[test]
#[ignore = "is killed by the test above"]
fn server_to_be_killed() {
    let stage = Stage::new("init; exec sleep 60");
    println!("agent {}", stage.pid());
    // Longer than anybody waits for it.
    std::thread::sleep(LIMIT);
}
