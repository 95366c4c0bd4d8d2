//! Start time and memory of the agent alone and behind the server. Figures, not promises: nothing is asserted of them.

use std::process::Command;
use std::time::{Duration, Instant};

use beebox_chatd::load::proc;
use serde_json::json;

use crate::agent_process::Place;
use crate::scene::{Real, Scene};

/// Starts of each kind; the middle one counts.
const STARTS: usize = 3;

pub fn measure(reals: &[Real]) -> String {
    let mut lines = format!(
        "start to first answer, and resident memory then (middle of {STARTS}):\n{:<10}| {:<24}| {:<24}| server itself\n",
        "version", "agent alone", "behind the server"
    );
    for real in reals {
        let alone = middle((0..STARTS).map(|_| alone(real)).collect());
        let mut server_kib = 0;
        let behind = (0..STARTS).map(|_| {
            let (took, kib, server) = behind(real);
            server_kib = server;
            (took, kib)
        });
        let behind = middle(behind.collect());
        let cell = |(took, kib): (Duration, u64)| format!("{} ms, {} MiB", took.as_millis(), kib / 1024);
        lines +=
            &format!("{:<10}| {:<24}| {:<24}| {} MiB\n", real.version, cell(alone), cell(behind), server_kib / 1024);
    }
    lines
}

fn middle(mut samples: Vec<(Duration, u64)>) -> (Duration, u64) {
    samples.sort_unstable();
    samples[samples.len() / 2]
}

fn alone(real: &Real) -> (Duration, u64) {
    let place = Place::new();
    let mut command = Command::new(&real.program);
    let home = place.dir.path().to_str().unwrap().to_owned();
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("ANTHROPIC_API_KEY", "dummy").env("IS_SANDBOX", "1").envs(real.env(&home));
    let began = Instant::now();
    let mut agent = place.start_program(command, &[]);
    agent.send_as("00000000-0000-4000-8000-0000000000a1", format!("hello FAKE{}", json!({"steps": []})));
    agent.result();
    (began.elapsed(), proc::usage(agent.child.id()).unwrap().rss_kib)
}

fn behind(real: &Real) -> (Duration, u64, u64) {
    let mut scene = Scene::new(real);
    let began = Instant::now();
    let sent = scene.send("hello", &json!([]));
    scene.good_end(&sent);
    let took = began.elapsed();
    let agent = scene.server.agents()[0];
    (took, proc::usage(agent).unwrap().rss_kib, scene.server.rss_kib())
}
