//! Random deaths at named points, judged by the checker: what was answered 200 is delivered exactly once.
//!
//! `BEEBOX_CRASH_ROUNDS` sets how many rounds (few by default), `BEEBOX_CRASH_SEED` the first seed; each round prints
//! its seed, so that one can be had again. Rule a change could break: every named point is struck in turn, once by a
//! death of the process that passes it and once by a death of the other side while it is held there.

use beebox_chatd::faults::POINTS;
use beebox_chatd::load::rng::Rng;
use beebox_chatd::load::run::{self, Outcome, RunOptions, Target};
use beebox_chatd::load::scenario::Scenario;
use beebox_chatd::load::spawn::SpawnOptions;

use crate::support::{LIMIT, Options};

/// Rounds without a setting: enough to see that the machinery works, not more.
const ROUNDS: u64 = 4;
/// Passes of a point before it kills, at most.
const PASSES_MAX: u64 = 12;

/// Clients with unique ids that send, drop, repeat and insist; half of the turns as the older agent program writes them:
/// no deduplication, the user line and the final line late.
const PEOPLE: &str = r#"{
  "name": "crash", "duration_s": 1.5, "sessions": 2, "insist_s": 20, "settle_within_s": 60, "errors_max": null,
  "server_args": ["--live-max", "2"], "seed": SEED,
  "chaos": {"kill_server_every_s": SERVER, "kill_agent_every_s": AGENT},
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

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}

/// One round: what was armed, and what came of it.
fn round(seed: u64) -> (String, Outcome) {
    let mut rng = Rng::new(seed, 0);
    let point = POINTS[(seed % POINTS.len() as u64) as usize];
    let nth = 1 + rng.below(PASSES_MAX);
    // The process that passes the point dies there, or the other one (or both) while it is held there.
    let (fault, server_s, agent_s) = match (seed / POINTS.len() as u64) % 3 {
        0 => (format!("{point}:{nth}"), "null", "null"),
        1 => (format!("{point}=delay:40"), "0.5", "null"),
        _ => (format!("{point}=delay:40"), "null", "0.2"),
    };
    let text = PEOPLE.replace("SEED", &seed.to_string()).replace("SERVER", server_s).replace("AGENT", agent_s);
    let dir = tempfile::Builder::new().prefix("beebox-crash-").tempdir().unwrap();
    let mut options = SpawnOptions::new(env!("CARGO_BIN_EXE_beebox-chatd"), dir.path().join("box"));
    options.start_within = LIMIT;
    let outcome = run::run(RunOptions {
        scenario: Scenario::parse(&text).unwrap(),
        target: Target::Spawn(options),
        chaos: true,
        faults: vec![fault.clone()],
        bearer: None,
        progress: |_| {},
    })
    .unwrap_or_else(|e| panic!("seed {seed}, {fault}: {e}"));
    if !outcome.is_good() {
        // The box tells the rest of the story.
        println!("the box of seed {seed} is kept: {}", dir.keep().display());
    }
    (fault, outcome)
}

#[test]
fn what_was_accepted_is_delivered_exactly_once_whoever_dies_where() {
    let first = setting("BEEBOX_CRASH_SEED", u64::from(std::process::id()));
    let rounds = setting("BEEBOX_CRASH_ROUNDS", ROUNDS);
    let (mut messages, mut deaths, mut bad) = (0, 0, Vec::new());
    for seed in first..first + rounds {
        let (fault, outcome) = round(seed);
        messages += outcome.verdict.messages;
        deaths += outcome.kills.0 + outcome.kills.1;
        println!(
            "seed {seed} {fault}: {} servers and {} agents died; {}",
            outcome.kills.0, outcome.kills.1, outcome.verdict
        );
        for violation in &outcome.verdict.violations {
            bad.push(format!("seed {seed} {fault}: {violation}"));
            println!("  {violation}");
        }
        if !outcome.verdict.violations.is_empty() {
            println!("{}", outcome.stderr);
        }
    }
    println!("{rounds} rounds from seed {first}: {messages} messages, {deaths} deaths, {} violations", bad.len());
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn a_turn_whose_end_died_with_the_agent_before_it_reached_the_disk_is_sent_again() {
    let server = Options::default().start();
    // The server trusts the look-up only of an agent it has seen to keep our uuids.
    let (first, _) = server.converse("new", "hello");
    let mut events = server.follow();
    let sent = server.send(&first.session_id, "late {{dedup=off flush_ms=1500 user_flush_ms=1500 say=\"done\"}} once");
    events.wait_for("the last word of the answer", |f| {
        f.event == "chat-turn"
            && f.text("turnId") == sent.message_uuid
            && f.data["msg"].to_string().contains("message_stop")
    });
    for agent in server.agents() {
        beebox_chatd::load::proc::signal(agent, rustix::process::Signal::KILL);
    }
    events.wait_for("news of the death", |f| f.event == "chat-turn-failed" && f.data["willRetry"] == true);
    let end = events.turn_end(&sent.message_uuid);
    assert_eq!(end.event, "chat-complete");
    let asked = crate::support::texts(&server.history(&first.session_id), "user");
    assert_eq!(asked.iter().filter(|t| t.contains("once")).count(), 1, "{asked:?}");
}
