//! Deaths at named points, judged by the checker: what was answered 200 is delivered exactly once.
//!
//! `BEEBOX_CRASH_ROUNDS` sets how many rounds (few by default), `BEEBOX_CRASH_SEED` the first seed; each round prints
//! its seed, so that one can be had again. Rule a change could break: [`POINTS`] × who dies × the agent's profile comes
//! round every 44 seeds, first by a death at an exact pass, then by random deaths while each pass is held, each beside
//! one of [`UPHEAVALS`]; a planted
//! fault of thought ([`PLANTS`]) is found.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use beebox_chatd::faults::{PLANTS, POINTS};
use beebox_chatd::load::checker::Slack;
use beebox_chatd::load::proc;
use beebox_chatd::load::rng::Rng;
use beebox_chatd::load::run::{self, Outcome, RunOptions, Target};
use beebox_chatd::load::scenario::Scenario;
use beebox_chatd::load::spawn::SpawnOptions;

use crate::support::{LIMIT, Options, setting};

/// Rounds without a setting: enough to see that the machinery works, not more.
const ROUNDS: u64 = 6;
/// Passes of a point before it kills, at most.
const PASSES_MAX: u64 = 12;

/// Clients with unique ids that send, drop, repeat and insist; half of the turns as the older agent program writes them:
/// no deduplication, the user line and the final line late.
const PEOPLE: &str = r#"{
  "name": "crash", "duration_s": 1.5, "sessions": 2, "insist_s": 20, "settle_within_s": 60, "errors_max": null,
  "server_args": ["--live-max", "2"], "seed": SEED,
  "chaos": {"kill_server_every_s": SERVER, "kill_agent_every_s": AGENT UPHEAVAL},
  "groups": [
    {"name": "people", "clients": 4, "per_s": 8, "start": [{"do": "follow"}], "loop": [
      {"do": "send", "text": "go on {{dedup=off}}", "chance": 0.5},
      {"do": "send", "text": "late {{dedup=off flush_ms=15 user_flush_ms=25}}", "chance": 0.5},
      {"do": "send_and_drop", "text": "gone in the tunnel {{dedup=off}}", "chance": 0.3},
      {"do": "repeat", "chance": 0.3},
      {"do": "send", "text": "see [image#1] {{dedup=off}}", "photos": [3000], "chance": 0.1},
      {"do": "interrupt", "chance": 0.05},
      {"do": "stop", "chance": 0.03},
      {"do": "restart", "chance": 0.03},
      {"do": "drop", "chance": 0.1}, {"do": "resume"}
    ]},
    {"name": "wall", "watchers": 3}
  ]
}"#;

/// What else happens in a round, by turns: nothing; every other life has an agent that keeps none of our ids; the agent
/// keeps its transcripts where the server does not look; the box is moved; a copy of the live box is served.
const UPHEAVALS: &[&str] =
    &["", ", \"exchange_agent\": true", ", \"hidden_home\": true", ", \"move_box\": true", ", \"copy_box\": true"];

/// What a seed stands for: the fault, how often the server and an agent are killed beside it, the agent's profile.
struct Round {
    fault: String,
    server_s: &'static str,
    agent_s: &'static str,
    profile: &'static str,
    upheaval: &'static str,
}

fn plan(seed: u64) -> Round {
    let mut rng = Rng::new(seed, 0);
    // Points change fastest, so that a few rounds see many of them.
    let count = POINTS.len() as u64;
    let (point, rest) = (POINTS[(seed % count) as usize], seed / count);
    let (server_dies, old, exact) = (rest.is_multiple_of(2), rest / 2 % 2 == 1, (rest / 4).is_multiple_of(2));
    let victim = if server_dies { "server" } else { "agent" };
    let profile = if old { "2.1.197" } else { "2.1.332" };
    // Their number and that of the points have no common divisor: each meets each.
    let upheaval = UPHEAVALS[(seed % UPHEAVALS.len() as u64) as usize];
    if exact {
        // An agent is started a few times in a round, everything else happens often.
        let passes = if point.contains("spawn") { 2 } else { PASSES_MAX };
        // An agent of 2.1.197 writes two lines before the message: one that dies at these each time is never started, and
        // after five tries its messages rightly wait for the next send.
        let before = if (point, victim, old) == ("mid_line", "agent", true) { 2 } else { 0 };
        let nth = 1 + before + rng.below(passes);
        return Round {
            fault: format!("{point}@{victim}:{nth}"),
            server_s: "null",
            agent_s: "null",
            profile,
            upheaval,
        };
    }
    let (server_s, agent_s) = if server_dies { ("0.5", "null") } else { ("null", "0.2") };
    Round { fault: format!("{point}=delay:40"), server_s, agent_s, profile, upheaval }
}

/// Runs `text` against a server on a box of its own, with one fault armed in its second life and more variables.
fn run(text: &str, chaos: bool, faults: &[&str], env: &[(&str, &str)]) -> Outcome {
    let dir = tempfile::Builder::new().prefix("beebox-crash-").tempdir().unwrap();
    let mut options = SpawnOptions::new(env!("CARGO_BIN_EXE_beebox-chatd"), dir.path().join("box"));
    options.start_within = LIMIT;
    options.env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let outcome = run::run(RunOptions {
        scenario: Scenario::parse(text).unwrap(),
        target: Target::Spawn(options),
        chaos,
        faults: faults.iter().map(|f| (*f).to_owned()).collect(),
        bearer: None,
        progress: |_| {},
    })
    .unwrap_or_else(|e| panic!("{faults:?} {env:?}: {e}"));
    if !outcome.is_good() && env.iter().all(|(name, _)| *name != "BEEBOX_PLANT") {
        // The box tells the rest of the story.
        println!("the box of {faults:?} is kept: {}", dir.keep().display());
    }
    outcome
}

#[test]
fn what_was_accepted_is_delivered_exactly_once_whoever_dies_where() {
    let first = setting("BEEBOX_CRASH_SEED", u64::from(std::process::id()));
    let rounds = setting("BEEBOX_CRASH_ROUNDS", ROUNDS);
    let (mut messages, mut accepted, mut delivered, mut servers, mut agents) = (0, 0, 0, 0, 0);
    let (mut bad, mut seen) = (Vec::new(), BTreeSet::new());
    for seed in first..first + rounds {
        let Round { fault, server_s, agent_s, profile, upheaval } = plan(seed);
        let text = PEOPLE.replace("SEED", &seed.to_string()).replace("SERVER", server_s).replace("AGENT", agent_s);
        let text = text.replace("UPHEAVAL", upheaval);
        let outcome = run(&text, true, &[&fault], &[("BEEBOX_AGENT_PROFILE", profile)]);
        let verdict = &outcome.verdict;
        messages += verdict.messages;
        accepted += verdict.accepted;
        delivered += verdict.delivered;
        // The first death is the restart that arms the fault.
        servers += outcome.kills.0 - 1;
        agents += outcome.kills.1;
        println!(
            "seed {seed} {fault} {profile}{upheaval}: {} servers died, {} agents were killed from outside; {verdict}",
            outcome.kills.0 - 1,
            outcome.kills.1
        );
        seen.insert((seed % POINTS.len() as u64, seed / POINTS.len() as u64 % 4));
        for violation in &verdict.violations {
            bad.push(format!("seed {seed} {fault} {profile}{upheaval}: {violation}"));
            println!("  {violation}");
        }
        if !verdict.violations.is_empty() {
            println!("{}", outcome.stderr);
        }
    }
    println!(
        "crash rounds: {rounds} from seed {first}, {} of {} of point x victim x profile, {} upheavals; {servers} servers died, {agents} \
         agents were killed from outside (those that die at a point are not counted); {messages} messages, {accepted} answered 200, \
         {delivered} delivered, violations = {}",
        seen.len(),
        POINTS.len() * 4,
        UPHEAVALS.len(),
        bad.len()
    );
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn a_result_that_came_ends_its_turn_though_the_agent_died_before_the_disk_had_it() {
    let server = Options::default().start();
    let (first, end) = server.converse("new", "hello");
    assert_eq!(end.data.get("recorded"), None, "the usual case says nothing");
    let mut events = server.follow();
    let sent = server.send(&first.session_id, "late {{dedup=off flush_ms=1500 user_flush_ms=1500 say=\"done\"}} once");
    events.wait_for("the last word of the answer", |f| {
        f.event == "chat-turn"
            && f.text("turnId") == sent.message_uuid
            && f.data["msg"].to_string().contains("message_stop")
    });
    for agent in server.agents() {
        proc::signal(agent, rustix::process::Signal::KILL);
    }
    let end = events.turn_end(&sent.message_uuid);
    assert_eq!(
        (end.event.as_str(), &end.data["isError"], &end.data["recorded"]),
        ("chat-complete", &false.into(), &false.into())
    );
    // The next message goes to a fresh agent, and this one is not given again.
    events.end_of_message(&server.send(&first.session_id, "and on").message_uuid);
    let dispatched = events.kept("chat-message-dispatched");
    let times = dispatched.iter().filter(|f| f.text("turnId") == sent.message_uuid).count();
    assert_eq!(times, 1, "{dispatched:?}");
}

#[test]
fn a_death_at_the_first_message_leaves_the_boxs_own_conversation_one() {
    for (point, is_recorded) in [("before_record", false), ("after_record_before_answer", true)] {
        let mut server = Options::default().env("BEEBOX_FAULT", &format!("{point}@server:1")).start();
        let unanswered = server.client().send("main", "first", Some("one"), &[]);
        assert!(unanswered.is_err(), "{point}");
        server.wait_exit();
        server.next_start().env.retain(|(name, _)| name != "BEEBOX_FAULT");
        server.restart();
        assert_eq!(
            server.get_json("/api/chat/bootstrap").get("kind").and_then(|k| k.as_str()),
            Some(if is_recorded { "resumable" } else { "empty" })
        );
        let (second, _) = server.converse("main", "second");
        assert_eq!(server.send_as("main", "first", Some("one"), &[]).session_id, second.session_id, "{point}");
        let listed = server.get_json("/api/chat/sessions");
        assert_eq!(listed["sessions"].as_array().map(Vec::len), Some(1), "{point}: {listed}");
    }
}

/// Two people, briefly; `LOOP` is what they do.
const TWO: &str = r#"{
  "name": "plant", "duration_s": 1.5, "sessions": 2, "insist_s": 20, "settle_within_s": 20, "errors_max": null,
  "seed": SEED, "groups": [
    {"name": "people", "clients": 2, "per_s": 5, "start": [{"do": "follow"}], "loop": [LOOP]},
    {"name": "wall", "watchers": 2}
  ]
}"#;

/// For each planted fault: the faults and steps under which it shows, and the promises it may break.
const CATCHES: &[(&str, &str, &str, &[&str])] = &[
    (
        "dispatch_before_commit",
        "before_record=delay:300,before_result@server:1",
        r#"{"do": "send", "text": "go on {{dedup=off}}"}"#,
        &["doubled", "delivered-undispatched"],
    ),
    (
        "publish_before_commit",
        "before_record=delay:60,before_record:6",
        r#"{"do": "send", "text": "go on {{dedup=off}}"}"#,
        &["event-differs", "event-order"],
    ),
    ("remerge_at_recovery", "before_result@server:1", r#"{"do": "send", "text": "go on {{dedup=off}}"}"#, &["doubled"]),
    (
        "run_ended_before_reap",
        "",
        r#"{"do": "send", "text": "late {{dedup=off delay_ms=60 user_flush_ms=500}}"}, {"do": "pause", "ms": [40, 80]},
           {"do": "restart"}"#,
        &["doubled"],
    ),
];

fn plant(name: &str) {
    let (_, fault, steps, kinds) = CATCHES.iter().find(|(plant, ..)| *plant == name).expect("a row in CATCHES");
    let faults: Vec<&str> = Some(*fault).filter(|f| !f.is_empty()).into_iter().collect();
    let mut all = Vec::new();
    // Whether a death meets the planted fault is a matter of milliseconds: a few tries.
    for seed in 1..=6 {
        let text = TWO.replace("SEED", &seed.to_string()).replace("LOOP", steps);
        let outcome = run(&text, false, &faults, &[("BEEBOX_PLANT", name)]);
        let found: Vec<_> = outcome.verdict.violations.iter().filter(|v| kinds.contains(&v.kind())).collect();
        if let Some(first) = found.first() {
            println!("planted {name}: found in round {seed}: {first} ({} in all)", outcome.verdict.violations.len());
            return;
        }
        all.extend(outcome.verdict.violations);
    }
    panic!("planted {name}, and the checker found only {all:?}");
}

#[test]
fn a_dispatch_before_its_commit_is_found() {
    plant("dispatch_before_commit");
}

#[test]
fn an_event_told_before_its_commit_is_found() {
    plant("publish_before_commit");
}

#[test]
fn a_turn_merged_again_at_recovery_is_found() {
    plant("remerge_at_recovery");
}

#[test]
fn a_run_that_is_told_ended_before_its_agent_is_gone_is_found() {
    plant("run_ended_before_reap");
}

#[test]
fn every_fault_of_thought_has_a_test_that_finds_it() {
    let elsewhere = "entries_before_pending"; // tests/it/send.rs
    let found: BTreeSet<_> = CATCHES.iter().map(|(plant, ..)| *plant).chain([elsewhere]).collect();
    assert_eq!(found, PLANTS.iter().copied().collect());
    // The same rounds without a fault of thought break nothing: what is found is the plant.
    for (_, fault, steps, _) in CATCHES {
        let faults: Vec<&str> = Some(*fault).filter(|f| !f.is_empty()).into_iter().collect();
        let outcome = run(&TWO.replace("SEED", "1").replace("LOOP", steps), false, &faults, &[]);
        assert!(outcome.verdict.violations.is_empty(), "{fault} {steps}: {:?}", outcome.verdict.violations);
    }
}

#[test]
fn dead_agents_leave_no_thread_file_or_child_behind() {
    let server = Options::default().start();
    let mut events = server.follow();
    let (first, _) = server.converse("new", "hello");
    let before = server.usage();
    for n in 0..8 {
        let sent = server.send(&first.session_id, &format!("number {n} {{{{dedup=off delay_ms=200}}}}"));
        events.wait_for("the dispatch", |f| {
            f.event == "chat-turn" && f.text("turnId") == sent.message_uuid && f.data["msg"].to_string().len() > 2
        });
        for agent in server.agents() {
            proc::signal(agent, rustix::process::Signal::KILL);
        }
        events.turn_end(&sent.message_uuid);
    }
    events.end_of_message(&server.send(&first.session_id, "the last").message_uuid);
    let slack = Slack::default();
    let deadline = Instant::now() + LIMIT;
    loop {
        let leaks = beebox_chatd::load::checker::leaks(&before, &server.usage(), slack);
        if leaks.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "{leaks:?}\n{:?}", server.thread_names());
        std::thread::sleep(Duration::from_millis(20));
    }
}
