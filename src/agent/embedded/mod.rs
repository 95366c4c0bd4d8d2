//! The embedded agent, `beebox-chatd agent`: a process that speaks the real agent's protocol on stdin and stdout and
//! writes the same transcript, with a script language inside the text for tests and load (`--help` lists it).
//!
//! One thread and one poll loop: a turn is a straight piece of code, and wherever it waits it reads stdin meanwhile.
//! Leaves how a server treats an agent to `pump`. Rules a change could break: no wake-up while idle; every promise about
//! what is on disk when a line is said (`turn`); a photo's text is never held twice longer than a turn needs it.

mod directive;
mod input;
mod json;
mod photo;
mod shape;
mod transcript;
mod turn;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use directive::{Dedup, Interrupts, OwnTurn, Script};
use input::{Asked, Incoming, Lines};
use shape::{Session, fresh};
use transcript::{Transcript, log_line};

/// Exit code of a process that SIGTERM ended, as the real agent has it.
const EXIT_SIGTERM: i32 = 143;
/// Output held back during a flood, in bytes: one write for many frames, as a pipe takes them.
const HELD_BYTES_MAX: usize = 32 * 1024;

const HELP: &str = r#"beebox-chatd agent: the embedded agent

It speaks stream-json on stdin and stdout, one JSON object a line, as the `claude` program does, and writes
$CLAUDE_CONFIG_DIR/projects/<slug of the working directory>/<session>.jsonl (else below ~/.claude).

  --session-id ID     open a new conversation under ID (exit 1 if it exists)
  --resume ID         go on with conversation ID (exit 1 if it does not exist)
  --model NAME        what init and messages name
  --permission-mode M what init names
  --profile VERSION   2.1.332 (default) or 2.1.197: no command_lifecycle, no user_message_uuids, repeats of a uuid are
                      dropped without a word, user line and final line reach the transcript up to 100 ms late
  --directives "…"    directives for every message (also BEEBOX_AGENT_DIRECTIVES; profile: BEEBOX_AGENT_PROFILE)
  --version, --help
Other flags of `claude` are accepted and ignored.

Without directives it answers with the words it got, how many they are, and size, type and dimensions of each photo.
`/clear` starts a new conversation: conversation_reset, then another session id and file.

Directives stand anywhere in the text as {{KEY=VALUE KEY=VALUE …}}, are taken out of the answer, and apply to the turn.
A brace pair with an unknown key or value is plain text. A value with blanks is quoted: "…", with \" \\ \n inside.

  init_ms=N           wait between taking the message and init; an interrupt meanwhile is answered and does nothing
  delay_ms=N          wait before the first delta
  deltas=N            number of deltas of the answer (default by size, at least 3)
  delta_ms=N          wait between deltas
  size=BYTES          an answer of that many bytes
  flood=N             an answer of N deltas without any pause
  say="text"          an answer of exactly that text
  think[="text"]      a thinking block first
  tool[=NAME]         a tool call (default Bash) with its result, then the answer
  tool_ms=N           how long the tool runs; messages that come meanwhile are folded into the turn
  ask                 ask can_use_tool before the tool runs; denied: an error as its result
  error[="text"]      the turn ends as an API failure: result with subtype success and is_error true
  error=execution     the turn ends as error_during_execution
  hang                all deltas, then never a result (an interrupt ends it)
  die=before|mid|after
                      exit code 9 before any delta, after half of them, right after the result
  torn                leave half of the final line in the transcript and die with code 9
  ignore=interrupt|answered|sigterm|both
                      interrupt: no answer and no effect in this turn; answered: success and no effect;
                      sigterm: from now on; both: interrupt and sigterm
  bg_ms=N             a background task that ends N ms after the turn and starts a turn of its own
  own_turn_on_send[=fold]
                      a background turn begins just as this line arrives; the line waits, or is folded into it
  flush_ms=N          the final line reaches the transcript N ms after the result; negative: that long before
  user_flush_ms=N     the user line reaches the transcript N ms after the turn began (all later lines wait behind it)
  dedup=on|silent|off what a repeated uuid meets, from now on: told as completed, dropped, or run again
  keep_uuid=off       from now on user lines get uuids of the agent's own and no message names ours
  late_id_ms=N        init comes N ms late, with another session id than asked for
"#;

/// Which version of the real agent is played.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// 2.1.332.
    Current,
    /// 2.1.197.
    Old,
}

impl Profile {
    fn version(self) -> &'static str {
        match self {
            Profile::Current => "2.1.332",
            Profile::Old => "2.1.197",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Profile::Current, Profile::Old]
            .into_iter()
            .find(|profile| profile.version() == text)
    }
}

/// Why a turn's code does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// An interrupt ends the turn.
    Interrupted,
    /// The process ends with this code.
    Exit(i32),
}

/// How a session starts.
#[derive(Debug, PartialEq, Eq)]
enum Start {
    Fresh,
    Named(String),
    Resume(String),
}

#[derive(Debug)]
struct Flags {
    start: Start,
    profile: Profile,
    model: String,
    permission_mode: String,
    directives: String,
}

/// What `args` say, or text for stdout and the exit code.
fn read_flags(args: Vec<OsString>) -> Result<Flags, (String, i32)> {
    let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let mut profile =
        env("BEEBOX_AGENT_PROFILE").unwrap_or_else(|| Profile::Current.version().to_owned());
    let mut flags = Flags {
        start: Start::Fresh,
        profile: Profile::Current,
        model: "embedded".to_owned(),
        permission_mode: "default".to_owned(),
        directives: env("BEEBOX_AGENT_DIRECTIVES").unwrap_or_default(),
    };
    let mut args = args
        .into_iter()
        .map(|arg| arg.to_string_lossy().into_owned());
    while let Some(arg) = args.next() {
        let (flag, given) = match arg.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => {
                (flag.to_owned(), Some(value.to_owned()))
            }
            _ => (arg, None),
        };
        let mut value = || {
            given
                .clone()
                .or_else(|| args.next())
                .ok_or((format!("error: {flag} needs a value\n"), 1))
        };
        match flag.as_str() {
            "--help" | "-h" => return Err((HELP.to_owned(), 0)),
            "--version" | "-v" => return Err((format!("{profile} (embedded agent)\n"), 0)),
            "--session-id" => flags.start = Start::Named(value()?),
            "--resume" | "-r" => flags.start = Start::Resume(value()?),
            "--profile" => profile = value()?,
            "--model" => flags.model = value()?,
            "--permission-mode" => flags.permission_mode = value()?,
            "--directives" => flags.directives = value()?,
            _ => {}
        }
    }
    flags.profile = Profile::parse(&profile).ok_or((
        format!("error: profile {profile} is not 2.1.332 or 2.1.197\n"),
        1,
    ))?;
    match &flags.start {
        Start::Named(id) | Start::Resume(id) if !crate::ids::is_plain_id(id) => Err((
            format!("error: session id {id} is not 1 to 64 of A-Z a-z 0-9 _ -\n"),
            1,
        )),
        Start::Fresh | Start::Named(_) | Start::Resume(_) => Ok(flags),
    }
}

/// The agent's life on stdin and stdout; returns its exit code.
pub fn main(args: Vec<OsString>) -> i32 {
    let flags = match read_flags(args) {
        Ok(flags) => flags,
        Err((text, 0)) => {
            return i32::from(std::io::stdout().lock().write_all(text.as_bytes()).is_err());
        }
        Err((text, code)) => {
            log_line(text.trim_end());
            return code;
        }
    };
    match Agent::start(flags).and_then(|mut agent| agent.live()) {
        Ok(code) | Err(Stop::Exit(code)) => code,
        // Only a turn is interrupted, and it handles that itself.
        Err(Stop::Interrupted) => 1,
    }
}

/// A turn that nobody asked for, and when.
struct Background {
    due: Instant,
    task_id: String,
    tool_id: String,
}

/// The process.
struct Agent {
    session: Session,
    home: PathBuf,
    transcript: Transcript,
    defaults: Script,
    lines: Lines,
    out: Out,
    waiting: VecDeque<Incoming>,
    background: Vec<Background>,
    /// A line that starts a background turn, with the way it fares.
    own_turn: Option<OwnTurn>,
    /// SIGTERM ends the process while this is set.
    mortal: Arc<AtomicBool>,
    dedup: Dedup,
    keep_uuid: bool,
    /// What an interrupt meets now; `None` outside a turn.
    interrupts: Option<Interrupts>,
    interrupted: bool,
    /// Answers to questions of ours.
    verdicts: Vec<(String, bool)>,
    last_failed: bool,
    results: u64,
    total_cost_usd: f64,
}

impl Agent {
    fn start(flags: Flags) -> Result<Self, Stop> {
        let mortal = Arc::new(AtomicBool::new(true));
        // The handler ends the process itself: also one that is blocked on a full pipe goes at once.
        let sigterm = signal_hook::consts::SIGTERM;
        if let Err(e) = signal_hook::flag::register_conditional_shutdown(
            sigterm,
            EXIT_SIGTERM,
            Arc::clone(&mortal),
        ) {
            log_line(&format!("cannot handle SIGTERM: {e}"));
        }
        let home = std::env::var_os("CLAUDE_CONFIG_DIR")
            .filter(|dir| !dir.is_empty())
            .map(PathBuf::from);
        let home = home.unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| OsString::from("/")))
                .join(".claude")
        });
        let cwd = match std::env::current_dir() {
            Ok(dir) => dir.to_string_lossy().into_owned(),
            Err(e) => {
                log_line(&format!("Error: no working directory: {e}"));
                return Err(Stop::Exit(1));
            }
        };
        let mut out = Out::new()?;
        let profile = flags.profile;
        let mut session = Session {
            id: String::new(),
            cwd,
            profile,
            model: flags.model,
            permission_mode: flags.permission_mode,
        };
        let transcript = match flags.start {
            Start::Fresh => {
                session.id = fresh();
                Transcript::fresh(&home, &session.cwd, &session.id)
            }
            Start::Named(id) => {
                if transcript::find(&home, &session.cwd, &id).is_some() {
                    log_line(&format!("Error: Session ID {id} is already in use."));
                    return Err(Stop::Exit(1));
                }
                session.id = id;
                Transcript::fresh(&home, &session.cwd, &session.id)
            }
            Start::Resume(id) => {
                session.id = id;
                match transcript::find(&home, &session.cwd, &session.id).map(Transcript::resumed) {
                    Some(Ok(transcript)) => transcript,
                    None => return Err(no_conversation(&session, &mut out)),
                    Some(Err(e)) => {
                        log_line(&format!(
                            "Error: cannot read conversation {}: {e}",
                            session.id
                        ));
                        return Err(Stop::Exit(1));
                    }
                }
            }
        };
        let mut defaults = Script::default();
        if !flags.directives.trim().is_empty() {
            let rest = defaults.take_from(&format!("{{{{{}}}}}", flags.directives.trim()));
            if !rest.is_empty() {
                log_line(&format!("error: unknown directives {}", flags.directives));
                return Err(Stop::Exit(1));
            }
        }
        let mut agent = Self {
            session,
            home,
            transcript,
            lines: Lines::default(),
            out,
            waiting: VecDeque::new(),
            background: Vec::new(),
            own_turn: None,
            mortal,
            dedup: match profile {
                Profile::Current => Dedup::Told,
                Profile::Old => Dedup::Silent,
            },
            keep_uuid: true,
            interrupts: None,
            interrupted: false,
            verdicts: Vec::new(),
            last_failed: false,
            results: 0,
            total_cost_usd: 0.0,
            defaults: Script::default(),
        };
        agent.lasting(&defaults);
        agent.defaults = defaults;
        Ok(agent)
    }

    /// Until stdin ended and every turn is over; returns the exit code.
    fn live(&mut self) -> Result<i32, Stop> {
        loop {
            // Lines that came together with what ran last.
            self.take_lines()?;
            if let Some(fate) = self.own_turn.take() {
                self.background_turn(None, fate == OwnTurn::Fold)?;
            } else if !self.waiting.is_empty() {
                self.user_turn()?;
            } else if let Some(at) = self
                .background
                .iter()
                .position(|task| task.due <= Instant::now())
            {
                let task = self.background.swap_remove(at);
                self.background_turn(Some(task), false)?;
            } else if self.lines.ended {
                self.transcript.flush_all();
                if self.results > 0 && self.session.profile == Profile::Current {
                    self.transcript
                        .append(self.session.cost_state(self.total_cost_usd));
                }
                return Ok(i32::from(self.last_failed));
            } else {
                let until = self.background.iter().map(|task| task.due).min();
                self.poll_once(until)?;
            }
        }
    }

    /// Says a line.
    fn say(&mut self, line: String) -> Result<(), Stop> {
        self.out.line(line)
    }

    /// Says what only the current version says.
    fn lifecycle(&mut self, uuid: Option<&str>, state: &str) -> Result<(), Stop> {
        match uuid {
            Some(uuid) if self.session.profile == Profile::Current && self.keep_uuid => {
                self.out.line(self.session.lifecycle(uuid, state))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Waits until `until` (for ever without), reading stdin and writing what is due meanwhile.
    fn wait_until(&mut self, until: Option<Instant>) -> Result<(), Stop> {
        loop {
            self.take_lines()?;
            if self.interrupted {
                return Err(Stop::Interrupted);
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Ok(());
            }
            self.poll_once(until)?;
        }
    }

    /// Looks at stdin without waiting.
    fn glance(&mut self) -> Result<(), Stop> {
        self.poll_once(Some(Instant::now()))?;
        self.wait_until(Some(Instant::now()))
    }

    /// One poll of stdin until `until` or until a late batch is due, which is then written.
    fn poll_once(&mut self, until: Option<Instant>) -> Result<(), Stop> {
        self.out.flush()?;
        let due = [until, self.transcript.next_due()]
            .into_iter()
            .flatten()
            .min();
        let timeout = due.map(|due| {
            let left = due.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        let stdin = rustix::stdio::stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        let fds = if self.lines.ended {
            &mut fds[..0]
        } else {
            &mut fds[..]
        };
        let readable = match poll(fds, timeout.as_ref()) {
            Ok(count) => count > 0,
            Err(rustix::io::Errno::INTR) => false,
            Err(e) => {
                log_line(&format!("cannot poll stdin: {e}"));
                return Err(Stop::Exit(1));
            }
        };
        if readable && let Err(e) = self.lines.read() {
            log_line(&format!("cannot read stdin: {e}"));
            return Err(Stop::Exit(1));
        }
        self.transcript.flush_due(Instant::now());
        Ok(())
    }

    /// Does what the lines that have come ask; stops before the next line when an idle agent got something to run.
    fn take_lines(&mut self) -> Result<(), Stop> {
        while self.interrupts.is_some() || (self.waiting.is_empty() && self.own_turn.is_none()) {
            let Some(line) = self.lines.next() else { break };
            self.take_line(&line)?;
        }
        Ok(())
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), Stop> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let asked = match input::parse(line, &self.defaults) {
            Ok(asked) => asked,
            Err(e) => {
                log_line(&format!(
                    "Error parsing streaming input line ({} chars): {e}",
                    line.trim_ascii().len()
                ));
                return Err(Stop::Exit(1));
            }
        };
        match asked {
            Asked::Message(message) => self.take_message(*message),
            Asked::Interrupt { request_id } => match self.interrupts {
                Some(Interrupts::Ignored) => Ok(()),
                Some(Interrupts::Obeyed) => {
                    self.interrupted = true;
                    self.answer(&request_id)
                }
                Some(Interrupts::OnlyAnswered) | None => self.answer(&request_id),
            },
            Asked::Control { request_id } => self.answer(&request_id),
            Asked::Answered {
                request_id,
                allowed,
            } => {
                self.verdicts.push((request_id, allowed));
                Ok(())
            }
            Asked::Nothing => Ok(()),
        }
    }

    fn answer(&mut self, request_id: &str) -> Result<(), Stop> {
        let queued: Vec<String> = self
            .waiting
            .iter()
            .filter_map(|message| message.uuid.clone())
            .collect();
        self.out
            .line(self.session.control_response(request_id, &queued))
    }

    fn take_message(&mut self, message: Incoming) -> Result<(), Stop> {
        self.lasting(&message.script);
        if let Some(uuid) = &message.uuid {
            match self.dedup {
                Dedup::Told if self.transcript.known.contains(uuid) => {
                    return self.lifecycle(Some(uuid), "completed");
                }
                Dedup::Silent if self.transcript.known.contains(uuid) => return Ok(()),
                Dedup::Told | Dedup::Silent | Dedup::Off => {}
            }
            if self.keep_uuid {
                self.transcript.known.insert(uuid.clone());
            }
        }
        self.transcript.append(
            self.session
                .queue_operation("enqueue", |obj| obj.str("content", &message.text)),
        );
        if self.interrupts.is_none() {
            self.own_turn = message.script.own_turn_on_send;
        }
        // The background turn is the news; the line waits behind its init.
        if self.own_turn.is_none() {
            self.lifecycle(message.uuid.as_deref(), "queued")?;
        }
        self.waiting.push_back(message);
        Ok(())
    }

    /// Takes over what of `script` outlives its turn.
    fn lasting(&mut self, script: &Script) {
        if script.ignore_sigterm {
            self.mortal.store(false, Ordering::SeqCst);
        }
        self.dedup = script.dedup.unwrap_or(self.dedup);
        self.keep_uuid = script.keep_uuid.unwrap_or(self.keep_uuid);
    }
}

/// Says that there is no such conversation.
fn no_conversation(session: &Session, out: &mut Out) -> Stop {
    let text = format!("No conversation found with session ID: {}", session.id);
    log_line(&text);
    let usage = json::Obj::new()
        .raw("input_tokens", 0)
        .raw("output_tokens", 0)
        .end();
    let line = json::Obj::new()
        .str("type", "result")
        .str("subtype", "error_during_execution")
        .raw("duration_ms", 0)
        .raw("duration_api_ms", 0)
        .raw("is_error", true)
        .raw("num_turns", 0)
        .raw("stop_reason", "null")
        .str("session_id", &fresh())
        .raw("total_cost_usd", 0)
        .raw("usage", usage)
        .raw("modelUsage", "{}")
        .raw("permission_denials", "[]")
        .str("uuid", &fresh())
        .raw("errors", json::strings(&[text]))
        .end();
    let _ = out.line(line);
    Stop::Exit(1)
}

/// stdout: a write for every line, or one for many during a flood.
struct Out {
    pipe: File,
    held: Vec<u8>,
    holding: bool,
}

impl Out {
    fn new() -> Result<Self, Stop> {
        match std::io::stdout().as_fd().try_clone_to_owned() {
            Ok(fd) => Ok(Self {
                pipe: File::from(fd),
                held: Vec::new(),
                holding: false,
            }),
            Err(e) => {
                log_line(&format!("Error: no stdout: {e}"));
                Err(Stop::Exit(1))
            }
        }
    }

    fn line(&mut self, mut line: String) -> Result<(), Stop> {
        line.push('\n');
        self.held.extend_from_slice(line.as_bytes());
        if self.holding && self.held.len() < HELD_BYTES_MAX {
            Ok(())
        } else {
            self.flush()
        }
    }

    fn flush(&mut self) -> Result<(), Stop> {
        if self.held.is_empty() {
            return Ok(());
        }
        // Whoever read it is gone: so is the reason to live.
        let written = self.pipe.write_all(&self.held).map_err(|_| Stop::Exit(1));
        self.held.clear();
        self.held.shrink_to(2 * HELD_BYTES_MAX);
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(args: &[&str]) -> Result<Flags, (String, i32)> {
        read_flags(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn flags_of_claude_are_accepted_and_ignored() {
        let read = flags(&[
            "--output-format",
            "stream-json",
            "--verbose",
            "--permission-mode",
            "bypassPermissions",
            "--session-id=abc",
            "--profile",
            "2.1.197",
        ])
        .unwrap();
        assert_eq!(
            (read.start, read.profile),
            (Start::Named("abc".into()), Profile::Old)
        );
        assert_eq!(read.permission_mode, "bypassPermissions");
        assert_eq!(
            flags(&["--resume", "x"]).unwrap().start,
            Start::Resume("x".into())
        );
        for bad in [
            &["--resume"][..],
            &["--session-id", "../x"],
            &["--profile", "3"],
        ] {
            assert_eq!(flags(bad).unwrap_err().1, 1, "{bad:?}");
        }
    }

    #[test]
    fn the_help_names_every_directive_of_the_wire() {
        assert_eq!(flags(&["--help"]).unwrap_err().1, 0);
        let keys = "delay_ms deltas delta_ms size think tool tool_ms error hang die ignore bg_ms flush_ms torn dedup \
                    keep_uuid user_flush_ms own_turn_on_send flood late_id_ms say";
        for key in keys.split(' ') {
            assert!(
                HELP.lines().any(|line| line.trim_start().starts_with(key)),
                "{key}"
            );
            // And the script knows it.
            let known = ["1", "on", "before", "both"].iter().any(|value| {
                let mut script = Script::default();
                script
                    .take_from(&format!("{{{{{key}={value}}}}}"))
                    .is_empty()
            });
            assert!(known, "{key}");
        }
    }
}
