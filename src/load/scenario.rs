//! A scenario: who does what when, as JSON. [`HELP`] is its documentation.
//! Leaves doing it to `run`. Rule a change could break: what cannot be done is refused before the first client starts.

use serde::{Deserialize, Serialize};

/// The format, for `beebox-load --help`.
pub const HELP: &str = "\
A scenario is one JSON object:
  name, about        text
  seed               chance is repeatable (1)
  duration_s         how long clients go on (30)
  ramp_s             clients start spread over this time (0)
  sessions           conversations made before the clients start (1); 0: only the box's own, `main`
  server_args        flags of the server when --spawn starts it ([])
  answer_within_s    limit of every answer (10)
  settle_within_s    how long the server may take to finish its turns afterwards (60)
  insist_s           a send without an answer, or with 503 or 429, is repeated with the same id for so long (0)
  errors_max         more failed steps than this fail the run; null: any number (0)
  rss_slack_mib      growth of the idle server that is no leak (24): allocators keep some for each thread that worked
  files_slack        the same for open files (0): SQLite keeps one for each reader there was at once
  archive            a transcript written before the server starts (--spawn only), as session `archive`:
                     {mib, photo_kib, photos_every (lines; 0: none)}
  chaos              what --chaos does: {kill_server_every_s, kill_agent_every_s}; each may be null. And, true or false:
                     exchange_agent (every other life of the server has an agent that keeps none of our ids),
                     hidden_home (the agent keeps its transcripts where the server does not look), move_box (the box has
                     another path in each life), copy_box (before each death a copy of the live box is served)
  groups             [group, …]
A group of scripted clients (one thread each):
  name, clients
  session            `shared` (client i talks in session i mod sessions), `main`, `new` (one of its own) or `archive`
  per_s              rounds per second of each client, begun by the clock: a late answer makes the next round
                     late, and that is counted. Absent: the next round begins when the last ended
  start              steps once; `loop` steps again and again
A group of watchers (subscribers, many on one thread):
  name, watchers, stalled (how many of them read nothing after the hello; 0), per_thread (500)
A step is {\"do\": word, …}:
  send               text (`hello`; directives of the embedded agent work), photos ([bytes, …])
  send_and_drop      the same, but the connection is dropped in mid-request or before the answer
  repeat             the last send once more under its id: must be answered with the same ids
  wait               until the turn of the last send ended: limit_s (60)
  follow             subscribe, over `websocket` or `sse`
  drop, resume       lose the subscription; take it up again behind the last event seen
  bootstrap, history tail (200)
  page               a random page of history: limit (50)
  photos             fetch up to max (3) photos of the last history, page or bootstrap
  status, sessions, interrupt, stop, restart
  get                path
  pause              ms: [low, high]; events are read meanwhile
  stall              ms; events are not read meanwhile
A step of the loop may have \"chance\": 0.0…1.0 (1).";

fn one() -> f64 {
    1.0
}
fn default_seed() -> u64 {
    1
}
fn default_duration_s() -> f64 {
    30.0
}
fn default_sessions() -> usize {
    1
}
fn default_answer_within_s() -> f64 {
    10.0
}
fn default_settle_within_s() -> f64 {
    60.0
}
fn default_errors_max() -> Option<u64> {
    Some(0)
}
fn default_rss_slack_mib() -> u64 {
    24
}
fn default_per_thread() -> usize {
    500
}
fn default_text() -> String {
    "hello".to_owned()
}
fn default_wait_s() -> f64 {
    60.0
}
fn default_tail() -> u64 {
    200
}
fn default_limit() -> u64 {
    50
}
fn default_max() -> usize {
    3
}

/// The whole.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "HELP documents each field for its users")]
pub struct Scenario {
    pub name: String,
    #[serde(default)]
    pub about: String,
    #[serde(default = "default_seed")]
    pub seed: u64,
    #[serde(default = "default_duration_s")]
    pub duration_s: f64,
    #[serde(default)]
    pub ramp_s: f64,
    #[serde(default = "default_sessions")]
    pub sessions: usize,
    #[serde(default)]
    pub server_args: Vec<String>,
    #[serde(default = "default_answer_within_s")]
    pub answer_within_s: f64,
    #[serde(default = "default_settle_within_s")]
    pub settle_within_s: f64,
    #[serde(default)]
    pub insist_s: f64,
    #[serde(default = "default_errors_max")]
    pub errors_max: Option<u64>,
    #[serde(default = "default_rss_slack_mib")]
    pub rss_slack_mib: u64,
    #[serde(default)]
    pub files_slack: u64,
    #[serde(default)]
    pub archive: Option<ArchivePlan>,
    #[serde(default)]
    pub chaos: Chaos,
    pub groups: Vec<Group>,
}

/// A transcript to write beforehand.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "HELP documents each field for its users")]
pub struct ArchivePlan {
    pub mib: u64,
    pub photo_kib: usize,
    pub photos_every: u64,
}

/// Deaths on purpose.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "HELP documents each field for its users")]
pub struct Chaos {
    #[serde(default)]
    pub kill_server_every_s: Option<f64>,
    #[serde(default)]
    pub kill_agent_every_s: Option<f64>,
    #[serde(default)]
    pub exchange_agent: bool,
    #[serde(default)]
    pub hidden_home: bool,
    #[serde(default)]
    pub move_box: bool,
    #[serde(default)]
    pub copy_box: bool,
}

/// Which conversation a client talks in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionChoice {
    /// Client i in session i mod sessions.
    #[default]
    Shared,
    /// The box's own.
    Main,
    /// One of its own.
    New,
    /// The transcript written beforehand.
    Archive,
}

/// Clients of one kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Group {
    /// Scripted clients.
    Script(Script),
    /// Subscribers.
    Watch(Watch),
}

impl Group {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Group::Script(script) => &script.name,
            Group::Watch(watch) => &watch.name,
        }
    }
}

/// Scripted clients.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "HELP documents each field for its users")]
pub struct Script {
    pub name: String,
    pub clients: usize,
    #[serde(default)]
    pub session: SessionChoice,
    #[serde(default)]
    pub per_s: Option<f64>,
    #[serde(default)]
    pub start: Vec<Step>,
    #[serde(default, rename = "loop")]
    pub rounds: Vec<Step>,
}

/// Subscribers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "HELP documents each field for its users")]
pub struct Watch {
    pub name: String,
    pub watchers: usize,
    #[serde(default)]
    pub stalled: usize,
    #[serde(default = "default_per_thread")]
    pub per_thread: usize,
}

/// How events are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Over {
    /// As a page does.
    #[default]
    WebSocket,
    /// Server-Sent Events.
    Sse,
}

/// One step and how likely it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step {
    /// What to do.
    #[serde(flatten)]
    pub act: Act,
    /// 0.0 to 1.0.
    #[serde(default = "one")]
    pub chance: f64,
}

/// What a client can do.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
#[expect(missing_docs, reason = "HELP documents each word for its users")]
pub enum Act {
    Send {
        #[serde(default = "default_text")]
        text: String,
        #[serde(default)]
        photos: Vec<usize>,
    },
    SendAndDrop {
        #[serde(default = "default_text")]
        text: String,
        #[serde(default)]
        photos: Vec<usize>,
    },
    Repeat,
    Wait {
        #[serde(default = "default_wait_s")]
        limit_s: f64,
    },
    Follow {
        #[serde(default)]
        over: Over,
    },
    Drop,
    Resume,
    Bootstrap {
        #[serde(default = "default_tail")]
        tail: u64,
    },
    History {
        #[serde(default = "default_tail")]
        tail: u64,
    },
    Page {
        #[serde(default = "default_limit")]
        limit: u64,
    },
    Photos {
        #[serde(default = "default_max")]
        max: usize,
    },
    Status,
    Sessions,
    Interrupt,
    Stop,
    Restart,
    Get {
        path: String,
    },
    Pause {
        ms: [u64; 2],
    },
    Stall {
        ms: u64,
    },
}

impl Act {
    /// Its row in the table of figures.
    #[must_use]
    pub fn row(&self) -> &'static str {
        match self {
            Act::Send { .. } => "send",
            Act::SendAndDrop { .. } => "send and drop",
            Act::Repeat => "repeat",
            Act::Wait { .. } => "send to end of turn",
            Act::Follow { .. } => "follow",
            Act::Drop => "drop",
            Act::Resume => "resume",
            Act::Bootstrap { .. } => "bootstrap",
            Act::History { .. } => "history",
            Act::Page { .. } => "page",
            Act::Photos { .. } => "photo",
            Act::Status => "status",
            Act::Sessions => "sessions",
            Act::Interrupt => "interrupt",
            Act::Stop => "stop",
            Act::Restart => "restart",
            Act::Get { .. } => "get",
            Act::Pause { .. } => "pause",
            Act::Stall { .. } => "stall",
        }
    }
}

impl Scenario {
    /// Reads a scenario.
    ///
    /// # Errors
    /// What is wrong, with its place.
    pub fn parse(text: &str) -> Result<Self, String> {
        let scenario: Self = serde_json::from_str(text).map_err(|e| e.to_string())?;
        scenario.check()?;
        Ok(scenario)
    }

    fn check(&self) -> Result<(), String> {
        if !self.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') || self.name.is_empty() {
            return Err(format!("name {:?}: letters, digits and hyphens only", self.name));
        }
        for (what, value, low) in [
            ("duration_s", self.duration_s, 0.1),
            ("ramp_s", self.ramp_s, 0.0),
            ("answer_within_s", self.answer_within_s, 0.1),
            ("settle_within_s", self.settle_within_s, 0.1),
            ("insist_s", self.insist_s, 0.0),
        ] {
            if !(low..=86_400.0).contains(&value) {
                return Err(format!("{what} is {value}; {low} to 86400 is possible"));
            }
        }
        for group in &self.groups {
            match group {
                Group::Script(script) => self.check_script(script)?,
                Group::Watch(watch) => {
                    if watch.stalled > watch.watchers || watch.per_thread == 0 {
                        return Err(format!("group {}: stalled or per_thread out of range", watch.name));
                    }
                }
            }
        }
        Ok(())
    }

    fn check_script(&self, script: &Script) -> Result<(), String> {
        let refuse = |why: &str| Err(format!("group {}: {why}", script.name));
        if script.per_s.is_some_and(|r| !(0.000_1..=100_000.0).contains(&r)) {
            return refuse("per_s must be 0.0001 to 100000");
        }
        match script.session {
            SessionChoice::Shared if self.sessions == 0 => {
                return refuse("`shared` needs sessions > 0");
            }
            SessionChoice::Archive if self.archive.is_none() => {
                return refuse("`archive` needs an archive");
            }
            SessionChoice::Shared | SessionChoice::Main | SessionChoice::New | SessionChoice::Archive => {}
        }
        let (mut sent, mut follows) = (false, false);
        for step in script.start.iter().chain(&script.rounds) {
            if !(0.0..=1.0).contains(&step.chance) {
                return refuse("chance must be 0.0 to 1.0");
            }
            match &step.act {
                Act::Send { .. } | Act::SendAndDrop { .. } => sent = true,
                Act::Follow { .. } => follows = true,
                Act::Repeat if !sent => return refuse("repeat comes before any send"),
                Act::Wait { .. } if !sent || !follows => {
                    return refuse("wait needs a follow and a send before it");
                }
                Act::Drop | Act::Resume if !follows => {
                    return refuse("drop and resume need a follow before them");
                }
                Act::Repeat
                | Act::Wait { .. }
                | Act::Drop
                | Act::Resume
                | Act::Bootstrap { .. }
                | Act::History { .. }
                | Act::Page { .. }
                | Act::Photos { .. }
                | Act::Status
                | Act::Sessions
                | Act::Interrupt
                | Act::Stop
                | Act::Restart
                | Act::Get { .. }
                | Act::Pause { .. }
                | Act::Stall { .. } => {}
            }
        }
        Ok(())
    }

    /// Scenarios that come with the tool: name and text.
    pub const STANDING: &'static [(&'static str, &'static str)] = &[
        ("one-phone", include_str!("../../scripts/scenarios/one-phone.json")),
        ("family", include_str!("../../scripts/scenarios/family.json")),
        ("watchers", include_str!("../../scripts/scenarios/watchers.json")),
        ("senders", include_str!("../../scripts/scenarios/senders.json")),
        ("archive", include_str!("../../scripts/scenarios/archive.json")),
        ("streams", include_str!("../../scripts/scenarios/streams.json")),
        ("bad-day", include_str!("../../scripts/scenarios/bad-day.json")),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standing_scenarios_are_valid_and_named_after_their_file() {
        for (name, text) in Scenario::STANDING {
            let scenario = Scenario::parse(text).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(scenario.name, *name);
            assert!(!scenario.about.is_empty());
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_its_place() {
        let with = |rest: &str| Scenario::parse(&format!(r#"{{"name":"x","groups":[{rest}]}}"#));
        assert!(with("").is_ok());
        for (group, word) in [
            (r#"{"name":"g","clients":1,"loop":[{"do":"repeat"}]}"#, "repeat"),
            (r#"{"name":"g","clients":1,"loop":[{"do":"send"},{"do":"wait"}]}"#, "wait"),
            (r#"{"name":"g","clients":1,"loop":[{"do":"resume"}]}"#, "resume"),
            (r#"{"name":"g","clients":1,"loop":[{"do":"status","chance":2}]}"#, "chance"),
            (r#"{"name":"g","clients":1,"per_s":0,"loop":[]}"#, "per_s"),
            (r#"{"name":"g","clients":1,"session":"archive","loop":[]}"#, "archive"),
            (r#"{"name":"g","watchers":1,"stalled":2}"#, "stalled"),
            (r#"{"name":"g","clients":1,"loop":[{"do":"dance"}]}"#, ""),
        ] {
            let refused = with(group).unwrap_err();
            assert!(refused.contains(word), "{group}: {refused}");
        }
    }
}
