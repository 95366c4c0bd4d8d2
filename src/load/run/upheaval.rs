//! What happens to a box and its agent between two lives of the server: the box is moved, a copy of the live box is
//! served for a moment, the agent's program is exchanged, or the agent keeps its transcripts where the server does not
//! look. Invariant: only directories beside the box of this run are made, and only what was made here is removed.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::load::checker::Violation;
use crate::load::scenario::Chaos;
use crate::load::spawn::{SpawnOptions, Spawned};

/// How the embedded agent is told to keep its transcripts elsewhere.
const HOME_VARIABLE: &str = "BEEBOX_AGENT_OWN_HOME";
/// How it is told to behave otherwise.
const DIRECTIVES_VARIABLE: &str = "BEEBOX_AGENT_DIRECTIVES";
/// Another agent: it keeps none of our ids and runs a repeat again.
const OTHER_AGENT: &str = "keep_uuid=off dedup=off";
/// How long a copy is served.
const COPY_LIVES: Duration = Duration::from_millis(700);
/// What a server says when it ends agents of an earlier one.
const ENDS_AGENTS: &str = "left by an earlier server";

/// Where the agent keeps its transcripts, once `plan` has been taken into `options`, if that is not in the box.
pub fn prepare(plan: Chaos, options: &mut SpawnOptions) -> Option<PathBuf> {
    if !plan.hidden_home {
        return None;
    }
    let home = beside(&options.box_dir, "agent-home");
    options.env.push((HOME_VARIABLE.to_owned(), home.display().to_string()));
    Some(home)
}

fn beside(box_dir: &Path, suffix: &str) -> PathBuf {
    let mut name = box_dir.file_name().unwrap_or_default().to_owned();
    name.push("-");
    name.push(suffix);
    box_dir.with_file_name(name)
}

/// Before the server is killed: a copy of its live box is served for a moment, which must not touch its agents.
///
/// # Errors
/// When the box cannot be copied. A copy of a database in use may be torn: that its server does not start is no fault.
pub fn before_death(plan: Chaos, options: &SpawnOptions) -> io::Result<Option<Violation>> {
    if !plan.copy_box {
        return Ok(None);
    }
    let copy = beside(&options.box_dir, "copy");
    let status = Command::new("cp").arg("-a").arg(&options.box_dir).arg(&copy).status()?;
    if !status.success() {
        log::warn!("the live box was not copied whole ({status}): files came and went");
    }
    let mut theirs = SpawnOptions { box_dir: copy.clone(), listen: "127.0.0.1:0".to_owned(), ..options.clone() };
    // What is armed is for the server under test.
    theirs.env.retain(|(name, _)| name != "BEEBOX_FAULT");
    let mut wrong = None;
    if let Ok(server) = Spawned::start(theirs) {
        std::thread::park_timeout(COPY_LIVES);
        if server.stderr().contains(ENDS_AGENTS) {
            let why = "the server of a copy ended agents of the original".to_owned();
            wrong = Some(Violation::NotSettled { why });
        }
    }
    // Agents of the copy end with their server; what one writes a moment later goes with the next copy.
    let _ = std::fs::remove_dir_all(&copy);
    Ok(wrong)
}

/// Between the death of the server and its next life, the `life`-th.
///
/// # Errors
/// When the box cannot be moved.
pub fn between_lives(plan: Chaos, options: &mut SpawnOptions, life: u64) -> io::Result<()> {
    if plan.move_box {
        let there = options.box_dir.extension().is_some_and(|e| e == "moved");
        let to = if there { options.box_dir.with_extension("") } else { options.box_dir.with_extension("moved") };
        std::fs::rename(&options.box_dir, &to)?;
        options.box_dir = to;
    }
    if plan.exchange_agent {
        options.env.retain(|(name, _)| name != DIRECTIVES_VARIABLE);
        if life % 2 == 1 {
            options.env.push((DIRECTIVES_VARIABLE.to_owned(), OTHER_AGENT.to_owned()));
        }
    }
    Ok(())
}
