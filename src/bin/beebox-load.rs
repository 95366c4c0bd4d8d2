//! `beebox-load`: scripted clients against a server, honest figures, and a judgement over what they saw.
//!
//! Flags and output only; the work is in `beebox_chatd::load`. Rule a change could break: the exit code is 0 only when
//! no promise was broken (1 when one was or too many steps failed, 2 when the run could not be made).

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use beebox_chatd::load::run::{self, RunOptions, Target};
use beebox_chatd::load::scenario::{Group, HELP, Scenario};
use beebox_chatd::load::spawn::SpawnOptions;
use beebox_chatd::load::{page, report};
use clap::Parser;

/// Scripted load for beebox-chatd: runs a scenario, prints figures, judges the server by its promises.
///
/// Example: beebox-load family --spawn --html family.html
#[derive(Debug, Parser)]
#[command(after_long_help = HELP)]
struct Flags {
    /// A scenario file, or the name of a standing one: one-phone, family, watchers, senders, archive, streams, bad-day
    scenario: String,
    /// The running server to load
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7717", conflicts_with = "spawn")]
    addr: SocketAddr,
    /// Process id of the running server, for its figures
    #[arg(long, conflicts_with = "spawn")]
    pid: Option<u32>,
    /// Home of the running server's agent, so that the checker reads transcripts itself
    #[arg(long, value_name = "DIR", conflicts_with = "spawn")]
    agent_home: Option<PathBuf>,
    /// Start a server for the run, and end it afterwards
    #[arg(long)]
    spawn: bool,
    /// The server to start (beside this program by default)
    #[arg(long, value_name = "FILE", requires = "spawn")]
    program: Option<PathBuf>,
    /// The box of the started server (a fresh one by default, removed after a good run)
    #[arg(long = "box", value_name = "DIR", requires = "spawn")]
    box_dir: Option<PathBuf>,
    /// One more flag for the started server; may be given again
    #[arg(long, value_name = "FLAG", requires = "spawn", allow_hyphen_values = true)]
    server_arg: Vec<String>,
    /// Kill servers and agents as the scenario says
    #[arg(long, requires = "spawn")]
    chaos: bool,
    /// Arm a fault inside the started server (NAME:N, NAME=delay:MS); given again, for its next life
    #[arg(long, value_name = "FAULT", requires = "spawn")]
    fault: Vec<String>,
    /// Instead of the scenario's own
    #[arg(long, value_name = "S")]
    duration: Option<f64>,
    /// Instead of the scenario's own
    #[arg(long)]
    seed: Option<u64>,
    /// Times as many clients and watchers
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    scale: f64,
    /// A file with the bearer token
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Where to write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where to write the page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// No line of progress
    #[arg(long)]
    quiet: bool,
}

fn main() -> ExitCode {
    match load(Flags::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            let _ = writeln!(io::stderr(), "beebox-load: {e}");
            ExitCode::from(2)
        }
    }
}

fn load(flags: Flags) -> io::Result<bool> {
    let standing = Scenario::STANDING.iter().find(|(name, _)| *name == flags.scenario);
    let text = match standing {
        Some((_, text)) => (*text).to_owned(),
        None => std::fs::read_to_string(&flags.scenario)
            .map_err(|e| io::Error::new(e.kind(), format!("scenario {}: {e}", flags.scenario)))?,
    };
    let mut scenario =
        Scenario::parse(&text).map_err(|e| io::Error::other(format!("scenario {}: {e}", flags.scenario)))?;
    scenario.duration_s = flags.duration.unwrap_or(scenario.duration_s);
    scenario.seed = flags.seed.unwrap_or(scenario.seed);
    let times = |n: usize| (n as f64 * flags.scale).round() as usize;
    for group in &mut scenario.groups {
        match group {
            Group::Script(script) => script.clients = times(script.clients).max(1),
            Group::Watch(watch) => {
                watch.watchers = times(watch.watchers).max(1);
                watch.stalled = times(watch.stalled).min(watch.watchers - 1);
            }
        }
    }
    let bearer = match &flags.token_file {
        Some(file) => Some(std::fs::read_to_string(file)?.trim().to_owned()),
        None => None,
    };

    let mut fresh_box = None;
    let target = if flags.spawn {
        let program = match flags.program {
            Some(program) => program,
            None => std::env::current_exe()?.with_file_name("beebox-chatd"),
        };
        let box_dir = flags.box_dir.unwrap_or_else(|| {
            let dir = std::env::temp_dir().join(format!("beebox-load-{}", std::process::id()));
            fresh_box.insert(dir).clone()
        });
        let mut options = SpawnOptions::new(program, box_dir);
        options.args = flags.server_arg;
        Target::Spawn(options)
    } else {
        Target::Running { addr: flags.addr, pid: flags.pid, agent_home: flags.agent_home }
    };
    let progress = if flags.quiet { |_: &str| {} } else { say };
    let outcome = run::run(RunOptions { scenario, target, chaos: flags.chaos, faults: flags.fault, bearer, progress })?;

    io::stdout().write_all(report::text(&outcome).as_bytes())?;
    if let Some(file) = &flags.json {
        std::fs::write(file, report::json(&outcome).to_string())?;
    }
    if let Some(file) = &flags.html {
        std::fs::write(file, page::html(&outcome))?;
    }
    if let Some(dir) = fresh_box {
        if outcome.is_good() {
            let _ = std::fs::remove_dir_all(&dir);
        } else {
            let log = dir.join("server.log");
            std::fs::write(&log, &outcome.stderr)?;
            writeln!(io::stderr(), "the box is kept: {} (its stderr: {})", dir.display(), log.display())?;
        }
    }
    Ok(outcome.is_good())
}

/// A line of progress; stderr may be closed, which stops nothing.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
