//! The embedded agent, `beebox-chatd agent`: a process that speaks the real agent's protocol on stdin and stdout and
//! writes the same transcript, with a script language inside the text for tests and load (`--help` lists it).
//!
//! One thread and one poll loop: a turn is a straight piece of code, and wherever it waits it reads stdin meanwhile.
//! Leaves how a server treats an agent to `pump`. Rules a change could break: no wake-up while idle; every promise about
//! what is on disk when a line is said (`turn`); a photo's text is never held twice longer than a turn needs it.

mod directive;
mod flags;
mod input;
mod json;
mod out;
mod photo;
mod shape;
mod transcript;
mod turn;

use std::collections::{HashSet, VecDeque};
use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use directive::{Dedup, Interrupts, OwnTurn, Script};
use flags::{Flags, Profile, Start, read_flags};
use input::{Asked, Incoming, Lines};
use out::Out;
use shape::{Session, fresh};
use transcript::{Transcript, log_line};

/// Exit code of a process that SIGTERM ended, as the real agent has it.
const EXIT_SIGTERM: i32 = 143;

/// Why a turn's code does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// An interrupt ends the turn.
    Interrupted,
    /// The process ends with this code.
    Exit(i32),
}

/// The agent's life on stdin and stdout; returns its exit code.
pub fn main(args: Vec<OsString>) -> i32 {
    crate::faults::this_is_an_agent();
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
    /// Uuids that came in this process's life.
    seen: HashSet<String>,
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
        if let Err(e) = signal_hook::flag::register_conditional_shutdown(sigterm, EXIT_SIGTERM, Arc::clone(&mortal)) {
            log_line(&format!("cannot handle SIGTERM: {e}"));
        }
        let folder = |name| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
        let home = folder("BEEBOX_AGENT_OWN_HOME").or_else(|| folder("CLAUDE_CONFIG_DIR"));
        let home = home.unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| OsString::from("/"))).join(".claude")
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
        let mut session =
            Session { id: String::new(), cwd, profile, model: flags.model, permission_mode: flags.permission_mode };
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
                        log_line(&format!("Error: cannot read conversation {}: {e}", session.id));
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
            seen: HashSet::new(),
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
            } else if let Some(at) = self.background.iter().position(|task| task.due <= Instant::now()) {
                let task = self.background.swap_remove(at);
                self.background_turn(Some(task), false)?;
            } else if self.lines.ended {
                self.transcript.flush_all();
                if self.results > 0 && self.session.profile == Profile::Current {
                    self.transcript.append(self.session.cost_state(self.total_cost_usd));
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

    /// Whether messages name the user lines they are about.
    fn names_uuids(&self) -> bool {
        self.keep_uuid && self.session.profile == Profile::Current
    }

    /// Says what only the current version says.
    fn lifecycle(&mut self, uuid: Option<&str>, state: &str) -> Result<(), Stop> {
        match uuid {
            Some(uuid) if self.names_uuids() => self.out.line(self.session.lifecycle(uuid, state)),
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
        let due = [until, self.transcript.next_due()].into_iter().flatten().min();
        let timeout = due.map(|due| {
            let left = due.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        let stdin = rustix::stdio::stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        let fds = if self.lines.ended { &mut fds[..0] } else { &mut fds[..] };
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
                log_line(&format!("Error parsing streaming input line ({} chars): {e}", line.trim_ascii().len()));
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
            Asked::Answered { request_id, allowed } => {
                self.verdicts.push((request_id, allowed));
                Ok(())
            }
            Asked::Nothing => Ok(()),
        }
    }

    fn answer(&mut self, request_id: &str) -> Result<(), Stop> {
        let queued: Vec<String> = self.waiting.iter().filter_map(|message| message.uuid.clone()).collect();
        self.out.line(self.session.control_response(request_id, &queued))
    }

    fn take_message(&mut self, message: Incoming) -> Result<(), Stop> {
        self.lasting(&message.script);
        if let Some(uuid) = &message.uuid {
            let (seen, known) = (self.seen.contains(uuid), self.transcript.known.contains(uuid));
            // A repeat within one process is dropped without a word; one that the transcript knows is told once.
            match self.dedup {
                Dedup::Told if known && !seen => {
                    self.seen.insert(uuid.clone());
                    return self.lifecycle(Some(uuid), "completed");
                }
                Dedup::Told | Dedup::Silent if seen || known => return Ok(()),
                Dedup::Told | Dedup::Silent | Dedup::Off => {}
            }
            if self.keep_uuid {
                self.seen.insert(uuid.clone());
            }
        }
        // A session that gets its id later leaves no file under the first one.
        if message.script.late_id_ms.is_none() {
            let enqueue = self.session.queue_operation("enqueue", |obj| obj.str("content", &message.text));
            self.transcript.append(enqueue);
        }
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
    let line = session.no_session_result(&text);
    let _ = out.line(line);
    Stop::Exit(1)
}
