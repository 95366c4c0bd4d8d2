//! The real agent program behind a real server: every case of a conversation over the port, against a stand-in for the
//! model. Run by `scripts/real-agent`, which installs the program, cleans the environment, cuts the network, and names
//! the programs in `BEEBOX_REAL_AGENTS` (`VERSION=PATH` separated by blanks); `BEEBOX_CASES` (parts of names) picks some.
//!
//! Leaves clients to `beebox_chatd::load`, the server to `support`, the promises to `load::checker`. Rule a change could
//! break: after each case every accepted message is looked for in what the agent wrote, by its uuid.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests fail loudly")]

#[path = "../../it/agent_process.rs"]
#[allow(dead_code, reason = "the other users need the rest of it")]
mod agent_process;
mod cases;
#[path = "../fake_messages_api.rs"]
#[allow(dead_code, reason = "its main is the example's")]
mod fake_messages_api;
mod figures;
mod scene;
#[path = "../../it/support.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use scene::{Real, Scene};

/// One case of the table.
struct Case {
    name: &'static str,
    run: fn(&Real),
}

/// A case whose server is started as usual and whose messages are judged at its end.
fn usual(real: &Real, play: fn(&mut Scene)) {
    let mut scene = Scene::new(real);
    play(&mut scene);
    scene.judge();
}

macro_rules! cases {
    ($($name:literal $run:expr;)*) => { vec![$(Case { name: $name, run: |real| { let run: fn(&Real) = $run; run(real) } }),*] };
}

fn all() -> Vec<Case> {
    cases! {
        "text" |r| usual(r, cases::text);
        "three turns" |r| usual(r, cases::three_turns);
        "thinking" |r| usual(r, cases::thinking);
        "tool with result" |r| usual(r, cases::tool);
        "photo, bytes kept" |r| usual(r, cases::photo);
        "big photo, by uuid" |r| usual(r, cases::big_photo);
        "two while streaming" |r| usual(r, cases::two_while_streaming);
        "interrupt while streaming" |r| usual(r, cases::interrupt_streaming);
        "interrupt in a tool" |r| usual(r, cases::interrupt_in_a_tool);
        "interrupt before init" |r| usual(r, cases::interrupt_before_init);
        "interrupt idle" |r| usual(r, cases::interrupt_idle);
        "stop with a queue" |r| usual(r, cases::stop_with_a_queue);
        "stop in a tool" |r| usual(r, cases::stop_in_a_tool);
        "restart" |r| usual(r, cases::restart);
        "reset" |r| usual(r, cases::reset);
        "agent killed in its first turn" |r| usual(r, cases::agent_killed_in_its_first_turn);
        "agent killed in a turn" |r| usual(r, cases::agent_killed);
        "server killed in a turn" |r| usual(r, cases::server_killed);
        "resume after a restart" |r| usual(r, cases::resume);
        "/clear" |r| usual(r, cases::clear);
        "400" |r| usual(r, cases::refused_by_the_model);
        "529 twice, then fine" |r| usual(r, cases::overloaded_twice);
        "stream cut" |r| usual(r, cases::stream_cut);
        "stream hangs" |r| usual(r, cases::stream_hangs);
        "background task" |r| usual(r, cases::background_task);
        "transcript removed" |r| usual(r, cases::transcript_removed);
        "resume refused" |r| usual(r, cases::resume_refused);
        "tool asked for" cases::tool_asked_for;
        "thread" |r| usual(r, cases::thread);
        "thread, transcript removed" |r| usual(r, cases::thread_whose_transcript_is_gone);
        "not installed" cases::not_installed;
        "refused as root" cases::refused_as_root;
        "needs a login" cases::needs_a_login;
        "moved box, home inside" cases::moved_box;
        "moved box, home outside" cases::moved_box_of_a_person;
        "copy of a live box" cases::copy_of_a_live_box;
        "history at every end" |r| usual(r, cases::history_at_every_end);
        "start and stop, five times" |r| usual(r, cases::rounds);
    }
}

#[test]
fn every_case_holds_over_the_port() {
    let agents = std::env::var("BEEBOX_REAL_AGENTS").expect("scripts/real-agent sets BEEBOX_REAL_AGENTS");
    let foreign = std::env::vars().map(|(name, _)| name).find(|name| {
        name.starts_with("ANTHROPIC_") || name.starts_with("CLAUDE") || name.to_ascii_lowercase().ends_with("_proxy")
    });
    assert_eq!(foreign, None, "the environment must be clean");
    let wanted = std::env::var("BEEBOX_CASES").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    let reals: Vec<Real> = agents
        .split_whitespace()
        .map(|agent| {
            let (version, path) = agent.split_once('=').expect("VERSION=PATH");
            // One each: it counts the requests that a scenario fails.
            let api = fake_messages_api::start(0, None).unwrap();
            Real { version: version.to_owned(), program: path.to_owned(), api }
        })
        .collect();
    let mut rows: Vec<(&str, Vec<String>)> = Vec::new();
    let mut failed = 0;
    for case in all() {
        if !wanted.is_empty() && !wanted.iter().any(|part| case.name.contains(part)) {
            continue;
        }
        let mut row = Vec::new();
        for real in &reals {
            let began = Instant::now();
            println!("--- {} · {}", case.name, real.version);
            let held = catch_unwind(AssertUnwindSafe(|| (case.run)(real))).is_ok();
            failed += usize::from(!held);
            row.push(format!("{} ({:.1} s)", if held { "ok" } else { "FAILED" }, began.elapsed().as_secs_f64()));
        }
        rows.push((case.name, row));
    }
    let lines = figures::measure(&reals);
    println!("\n{:<28}{}", "case", reals.iter().map(|r| format!("| {:<18}", r.version)).collect::<String>());
    for (name, row) in &rows {
        println!("{name:<28}{}", row.iter().map(|cell| format!("| {cell:<18}")).collect::<String>());
    }
    println!("\n{lines}");
    let versions: Vec<&str> = reals.iter().map(|r| r.version.as_str()).collect();
    println!("versions: {} · cases: {} · failed: {failed}", versions.join(", "), rows.len() * reals.len());
    assert_eq!(failed, 0, "cases failed, see above");
}
