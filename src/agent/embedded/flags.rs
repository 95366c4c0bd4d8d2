//! The agent's flags, its help, and the versions it plays. Rule a change could break: an unknown flag is ignored, as it
//! may be one that the real program knows.

use std::ffi::OsString;

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
BEEBOX_AGENT_OWN_HOME keeps transcripts there, wherever it is told to: an agent whose home nobody else reads
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
  dedup=on|silent|off what a repeated uuid meets, from now on. on: one of an earlier process is told as completed, one of
                      this process is dropped without a word; silent: dropped; off: run again
  keep_uuid=off       from now on user lines get uuids of the agent's own and no message names ours
  late_id_ms=N        init comes N ms late, with another session id than asked for
  late_id=ID          init comes with that session id, whoever has it
  late_init_ms=N      init comes N ms after the user line is in the transcript
"#;

/// Which version of the real agent is played.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// 2.1.332.
    Current,
    /// 2.1.197.
    Old,
}

impl Profile {
    pub fn version(self) -> &'static str {
        match self {
            Profile::Current => "2.1.332",
            Profile::Old => "2.1.197",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        [Profile::Current, Profile::Old].into_iter().find(|profile| profile.version() == text)
    }
}

/// How a session starts.
#[derive(Debug, PartialEq, Eq)]
pub enum Start {
    Fresh,
    Named(String),
    Resume(String),
}

#[derive(Debug)]
pub struct Flags {
    pub start: Start,
    pub profile: Profile,
    pub model: String,
    pub permission_mode: String,
    pub directives: String,
}

/// What `args` say, or text for stdout and the exit code.
pub fn read_flags(args: Vec<OsString>) -> Result<Flags, (String, i32)> {
    let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let mut profile = env("BEEBOX_AGENT_PROFILE").unwrap_or_else(|| Profile::Current.version().to_owned());
    let mut flags = Flags {
        start: Start::Fresh,
        profile: Profile::Current,
        model: "embedded".to_owned(),
        permission_mode: "default".to_owned(),
        directives: env("BEEBOX_AGENT_DIRECTIVES").unwrap_or_default(),
    };
    let mut args = args.into_iter().map(|arg| arg.to_string_lossy().into_owned());
    while let Some(arg) = args.next() {
        let (flag, given) = match arg.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag.to_owned(), Some(value.to_owned())),
            _ => (arg, None),
        };
        let mut value = || given.clone().or_else(|| args.next()).ok_or((format!("error: {flag} needs a value\n"), 1));
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
    flags.profile =
        Profile::parse(&profile).ok_or((format!("error: profile {profile} is not 2.1.332 or 2.1.197\n"), 1))?;
    match &flags.start {
        Start::Named(id) | Start::Resume(id) if !crate::ids::is_plain_id(id) => {
            Err((format!("error: session id {id} is not 1 to 64 of A-Z a-z 0-9 _ -\n"), 1))
        }
        Start::Fresh | Start::Named(_) | Start::Resume(_) => Ok(flags),
    }
}

#[cfg(test)]
mod tests {
    use super::super::directive::Script;
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
        assert_eq!((read.start, read.profile), (Start::Named("abc".into()), Profile::Old));
        assert_eq!(read.permission_mode, "bypassPermissions");
        assert_eq!(flags(&["--resume", "x"]).unwrap().start, Start::Resume("x".into()));
        for bad in [&["--resume"][..], &["--session-id", "../x"], &["--profile", "3"]] {
            assert_eq!(flags(bad).unwrap_err().1, 1, "{bad:?}");
        }
    }

    #[test]
    fn the_help_names_every_directive_of_the_wire() {
        assert_eq!(flags(&["--help"]).unwrap_err().1, 0);
        let keys = "delay_ms deltas delta_ms size think tool tool_ms error hang die ignore bg_ms flush_ms torn dedup \
                    keep_uuid user_flush_ms own_turn_on_send flood late_id_ms late_id late_init_ms say";
        for key in keys.split(' ') {
            assert!(HELP.lines().any(|line| line.trim_start().starts_with(key)), "{key}");
            // And the script knows it.
            let known = ["1", "on", "before", "both"].iter().any(|value| {
                let mut script = Script::default();
                script.take_from(&format!("{{{{{key}={value}}}}}")).is_empty()
            });
            assert!(known, "{key}");
        }
    }
}
