//! PURE. Which turn the agent is in, whose it is, and which message ends it (CONTRACT §3, "Which result ends our turn").
//!
//! Leaves timers, the durability gate and the writing of lines to `pump`. Rule a change could break: a turn of ours
//! ends exactly once, and never by a result that answers something else.

use std::collections::VecDeque;

use super::TurnEnd;
use super::wire::{AgentMessage, CommandState, Said, TurnResult};
use crate::ids::{SessionId, TurnId};

/// What a message means for the turns.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// A turn that nobody asked for begins.
    AgentTurnBegan(TurnId),
    /// The conversation has another id now.
    SessionId {
        /// The id.
        id: SessionId,
        /// Because it was cleared; the old one stays as it is.
        cleared: bool,
    },
    /// A turn is over.
    Ended(TurnEnd),
    /// The turn that a person wants to end has only now begun: ask again.
    AskInterruptAgain,
    /// The agent says that it cannot start, and why; no turn began.
    StartRefused(Vec<String>),
}

/// A turn of ours, from the moment its line is due.
#[derive(Debug)]
struct Ours {
    turn: TurnId,
    /// An init came since its line was due, or since the last result that was not its own.
    begun: bool,
    /// Its line was answered inside another turn: the next result ends both.
    folded: bool,
    interrupted: bool,
    /// A result that was not its own, kept in case its line turns out to have been part of that turn.
    foreign: Option<TurnResult>,
    last_assistant_uuid: Option<String>,
}

/// A turn that the agent began itself.
#[derive(Debug)]
struct Agents {
    turn: TurnId,
    interrupted: bool,
    last_assistant_uuid: Option<String>,
}

/// The turns of one run.
#[derive(Debug)]
pub struct TurnTracker {
    session: SessionId,
    reset: bool,
    /// An init named the session: from then on another id is another conversation.
    confirmed: bool,
    /// A message that was no refusal has come.
    spoke: bool,
    /// An init came before anything was asked. Some programs greet so; it is a turn once something follows.
    greeted: bool,
    asked_once: bool,
    ours: Option<Ours>,
    agents: Option<Agents>,
    /// Turns of ours that ended, the newest last: the process drops a repeat of one without a word.
    answered: VecDeque<TurnId>,
}

/// Ended turns that are remembered; a repeat, should there ever be one, follows at once.
const ANSWERED_MAX: usize = 64;

impl TurnTracker {
    /// A run that has said nothing; `session` is the id it was started with.
    #[must_use]
    pub fn new(session: SessionId) -> Self {
        Self {
            session,
            reset: false,
            confirmed: false,
            spoke: false,
            greeted: false,
            asked_once: false,
            ours: None,
            agents: None,
            answered: VecDeque::new(),
        }
    }

    /// The line of `turn` is about to be written. The pump does so only while no turn runs. A turn that this process
    /// ended before is not begun: its end is returned, and the line must not be written.
    pub fn begin(&mut self, turn: TurnId) -> Option<TurnEnd> {
        if self.answered.contains(&turn) {
            return Some(had_already(turn, false));
        }
        self.asked_once = true;
        self.ours = Some(Ours {
            turn,
            begun: std::mem::take(&mut self.greeted),
            folded: false,
            interrupted: false,
            foreign: None,
            last_assistant_uuid: None,
        });
        None
    }

    /// The turn that what is said now belongs to.
    #[must_use]
    pub fn current(&self) -> Option<&TurnId> {
        self.agents.as_ref().map(|a| &a.turn).or(self.ours.as_ref().map(|o| &o.turn))
    }

    /// A turn of ours or the agent's is under way.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.ours.is_some() || self.agents.is_some()
    }

    /// The agent has said something that was no refusal to start.
    #[must_use]
    pub fn spoke(&self) -> bool {
        self.spoke
    }

    /// A person wants the turn under way to end; false when there is none.
    pub fn interrupt(&mut self) -> bool {
        if let Some(agents) = &mut self.agents {
            agents.interrupted = true;
        } else if let Some(ours) = &mut self.ours {
            ours.interrupted = true;
        }
        self.is_busy()
    }

    /// Takes a message; what it means, in order. A frame belongs to [`TurnTracker::current`] after its own steps.
    pub fn hear(&mut self, message: &AgentMessage) -> Vec<Step> {
        let mut steps = Vec::new();
        match message {
            AgentMessage::Unreadable(_) => return steps,
            AgentMessage::Result(result) if !self.spoke && refuses_start(result) => {
                return vec![Step::StartRefused(result.errors.clone())];
            }
            AgentMessage::Init { session, .. } => self.init(session.as_deref(), &mut steps),
            AgentMessage::ConversationReset => self.reset = true,
            AgentMessage::Assistant(said) => {
                self.late_begin(&mut steps);
                self.said(said);
            }
            AgentMessage::User(_) | AgentMessage::StreamEvent { .. } | AgentMessage::ApiRetry { .. } => {
                self.late_begin(&mut steps);
            }
            AgentMessage::Result(result) => {
                self.late_begin(&mut steps);
                let end = self.result(result);
                self.remember(end.as_ref());
                steps.extend(end.map(Step::Ended));
            }
            AgentMessage::Lifecycle { command, state } => {
                steps.extend(self.lifecycle(command, *state).map(Step::Ended));
            }
            AgentMessage::Task { .. }
            | AgentMessage::CompactBoundary
            | AgentMessage::ControlResponse { .. }
            | AgentMessage::ControlRequest { .. }
            | AgentMessage::Quiet
            | AgentMessage::Unknown { .. } => {}
        }
        self.spoke = true;
        steps
    }

    fn remember(&mut self, end: Option<&TurnEnd>) {
        if let Some(end) = end.filter(|end| end.ours) {
            if self.answered.len() == ANSWERED_MAX {
                self.answered.pop_front();
            }
            self.answered.push_back(end.turn.clone());
        }
    }

    fn init(&mut self, session: Option<&str>, steps: &mut Vec<Step>) {
        if let Some(id) = session.and_then(|id| SessionId::parse(id).ok()) {
            // 2.1.197 clears without a word of it. An id that comes late, or with a resume, comes with the first init.
            let cleared = std::mem::take(&mut self.reset) | std::mem::replace(&mut self.confirmed, true);
            if id != self.session {
                self.session = id.clone();
                steps.push(Step::SessionId { id, cleared });
            }
        }
        if let Some(ours) = &mut self.ours {
            ours.begun = true;
            if ours.interrupted {
                steps.push(Step::AskInterruptAgain);
            }
        } else if self.agents.is_none() {
            if self.asked_once {
                self.begin_agents(steps);
            } else {
                self.greeted = true;
            }
        }
    }

    fn late_begin(&mut self, steps: &mut Vec<Step>) {
        if self.greeted && self.ours.is_none() && self.agents.is_none() {
            self.begin_agents(steps);
        }
    }

    fn begin_agents(&mut self, steps: &mut Vec<Step>) {
        self.greeted = false;
        let turn = TurnId::fresh();
        self.agents = Some(Agents { turn: turn.clone(), interrupted: false, last_assistant_uuid: None });
        steps.push(Step::AgentTurnBegan(turn));
    }

    fn said(&mut self, said: &Said) {
        // A subagent's lines are in a file of their own.
        if said.parent_tool_use_id.is_some() || said.uuid.is_none() {
            return;
        }
        if let Some(agents) = &mut self.agents {
            agents.last_assistant_uuid.clone_from(&said.uuid);
        } else if let Some(ours) = &mut self.ours {
            ours.last_assistant_uuid.clone_from(&said.uuid);
        }
    }

    fn result(&mut self, result: &TurnResult) -> Option<TurnEnd> {
        if let Some(agents) = self.agents.take() {
            return Some(end(agents.turn, false, result, agents.interrupted, agents.last_assistant_uuid));
        }
        let ours = self.ours.as_mut()?;
        let answers_it = match &result.user_message_uuids {
            Some(uuids) => uuids.iter().any(|uuid| uuid == ours.turn.as_str()),
            None => !result.has_origin,
        };
        if !answers_it && !ours.folded {
            // It answers something else. What came before it was not ours either.
            ours.begun = false;
            ours.foreign = Some(result.clone());
            return None;
        }
        let ours = self.ours.take()?;
        Some(end(ours.turn, true, result, ours.interrupted, ours.last_assistant_uuid))
    }

    fn lifecycle(&mut self, command: &str, state: CommandState) -> Option<TurnEnd> {
        let ours = self.ours.as_mut().filter(|ours| ours.turn.as_str() == command)?;
        match state {
            CommandState::Completed | CommandState::Cancelled if ours.begun => {
                ours.folded = true;
                None
            }
            CommandState::Completed => {
                let ours = self.ours.take()?;
                Some(match ours.foreign {
                    // It was answered inside the turn that ended just before.
                    Some(foreign) => end(ours.turn, true, &foreign, ours.interrupted, ours.last_assistant_uuid),
                    None => had_already(ours.turn, ours.interrupted),
                })
            }
            CommandState::Cancelled => {
                let ours = self.ours.take()?;
                let result = TurnResult { is_error: true, subtype: "cancelled".to_owned(), ..TurnResult::default() };
                Some(end(ours.turn, true, &result, true, ours.last_assistant_uuid))
            }
            CommandState::Queued | CommandState::Started | CommandState::Other => None,
        }
    }
}

/// The end of a turn that the agent held from before.
fn had_already(turn: TurnId, interrupted: bool) -> TurnEnd {
    let result = TurnResult { subtype: "success".to_owned(), ..TurnResult::default() };
    TurnEnd { had_it_already: true, ..end(turn, true, &result, interrupted, None) }
}

/// What `--resume` of an unknown id says before anything else (AGENT-PROTOCOL, the table of starts).
fn refuses_start(result: &TurnResult) -> bool {
    result.is_error
        && result.subtype == "error_during_execution"
        && !result.errors.is_empty()
        && result.user_message_uuids.is_none()
}

fn end(
    turn: TurnId,
    ours: bool,
    result: &TurnResult,
    interrupted: bool,
    last_assistant_uuid: Option<String>,
) -> TurnEnd {
    TurnEnd {
        turn,
        ours,
        is_error: result.is_error,
        subtype: result.subtype.clone(),
        errors: result.errors.clone(),
        interrupted,
        had_it_already: false,
        last_assistant_uuid,
        duration_ms: result.duration_ms,
        num_turns: result.num_turns,
        total_cost_usd: result.total_cost_usd,
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::parse;
    use super::*;

    const INIT: &str = r#"{"type":"system","subtype":"init","session_id":"s"}"#;
    const SAID: &str = r#"{"type":"assistant","uuid":"a1","message":{"content":"x"}}"#;
    const PLAIN: &str = r#"{"type":"result","subtype":"success","is_error":false}"#;
    const FOREIGN: &str = r#"{"type":"result","subtype":"success","is_error":false,"origin":{"kind":"task"}}"#;

    /// What a table's row does: ask a turn, interrupt, or hear a line.
    enum Do<'a> {
        Ask(&'a str),
        Stop,
        Hear(&'a str),
    }
    use Do::{Ask, Hear, Stop};

    fn story(rows: &[Do<'_>]) -> Vec<String> {
        let mut tracker = TurnTracker::new(SessionId::parse("s").unwrap());
        let mut out = Vec::new();
        for row in rows {
            match row {
                Ask(id) => {
                    out.extend(
                        tracker
                            .begin(TurnId::parse(id).unwrap())
                            .map(|e| format!("{} had it {}", e.turn, e.had_it_already)),
                    );
                }
                Stop => out.push(format!("stop {}", tracker.interrupt())),
                Hear(line) => out.extend(tracker.hear(&parse(line.as_bytes())).into_iter().map(|step| match step {
                    Step::AgentTurnBegan(_) => "agent's".to_owned(),
                    Step::SessionId { id, cleared } => format!("id {id} {cleared}"),
                    Step::Ended(e) => format!(
                        "{} ended{}{}{}{}",
                        if e.ours { e.turn.as_str() } else { "agent's" },
                        if e.is_error { " error" } else { "" },
                        if e.interrupted { " interrupted" } else { "" },
                        if e.had_it_already { " had it" } else { "" },
                        e.last_assistant_uuid.map(|u| format!(" {u}")).unwrap_or_default(),
                    ),
                    Step::AskInterruptAgain => "ask again".to_owned(),
                    Step::StartRefused(errors) => format!("refused {errors:?}"),
                })),
            }
        }
        out
    }

    fn answers(ids: &str) -> String {
        format!(r#"{{"type":"result","is_error":false,"user_message_uuids":[{ids}]}}"#)
    }

    fn lifecycle(id: &str, state: &str) -> String {
        format!(r#"{{"type":"command_lifecycle","command_uuid":"{id}","state":"{state}"}}"#)
    }

    #[test]
    fn a_turn_ends_with_its_own_result_once() {
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(SAID), Hear(PLAIN), Hear(PLAIN)]), ["t ended a1"]);
        let own = answers("\"x\",\"t\"");
        let done = lifecycle("t", "completed");
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(&own), Hear(&done)]), ["t ended"]);
    }

    #[test]
    fn a_result_that_answers_something_else_ends_no_turn_of_ours() {
        let late = answers("\"old\"");
        let none = answers("");
        let own = answers("\"t\"");
        for other in [FOREIGN, &late, &none] {
            assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(other)]), Vec::<String>::new());
            assert_eq!(story(&[Ask("t"), Hear(other), Hear(INIT), Hear(SAID), Hear(&own)]), ["t ended a1"]);
        }
    }

    #[test]
    fn a_message_that_the_agent_had_already_is_over_without_a_turn() {
        let done = lifecycle("t", "completed");
        assert_eq!(story(&[Ask("t"), Hear(&lifecycle("t", "queued")), Hear(&done)]), ["t ended had it"]);
        assert_eq!(story(&[Ask("t"), Hear(&lifecycle("x", "completed"))]), Vec::<String>::new());
    }

    #[test]
    fn a_repeat_in_the_same_process_is_not_written_because_it_would_be_dropped_in_silence() {
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(PLAIN), Ask("t"), Ask("u")]), ["t ended", "t had it true"]);
        let gone = lifecycle("t", "cancelled");
        assert_eq!(story(&[Ask("t"), Hear(&gone), Ask("t")]), ["t ended error interrupted"]);
    }

    #[test]
    fn a_line_folded_into_the_agents_own_turn_ends_with_it_in_either_order() {
        let done = lifecycle("t", "completed");
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(SAID), Hear(&done), Hear(FOREIGN)]), ["t ended a1"]);
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(SAID), Hear(FOREIGN), Hear(&done)]), ["t ended a1"]);
    }

    #[test]
    fn an_init_that_nobody_asked_for_is_the_agents_turn() {
        let rows = [
            Ask("t"),
            Hear(INIT),
            Hear(PLAIN),
            Hear(INIT),
            Hear(SAID),
            Hear(FOREIGN),
            Ask("u"),
            Hear(INIT),
            Hear(PLAIN),
        ];
        assert_eq!(story(&rows), ["t ended", "agent's", "agent's ended a1", "u ended"]);
    }

    #[test]
    fn a_greeting_is_no_turn_until_something_follows() {
        assert_eq!(story(&[Hear(INIT), Ask("t"), Hear(SAID), Hear(PLAIN)]), ["t ended a1"]);
        assert_eq!(story(&[Hear(INIT), Hear(SAID), Hear(FOREIGN)]), ["agent's", "agent's ended a1"]);
        let failed = r#"{"type":"result","is_error":true}"#;
        assert_eq!(story(&[Hear(INIT), Hear(failed)]), ["agent's", "agent's ended error"]);
    }

    #[test]
    fn an_interrupt_that_came_too_early_is_asked_again() {
        let failed = r#"{"type":"result","is_error":true,"subtype":"error_during_execution"}"#;
        assert_eq!(
            story(&[Stop, Ask("t"), Stop, Hear(INIT), Hear(failed)]),
            ["stop false", "stop true", "ask again", "t ended error interrupted"]
        );
        let gone = lifecycle("t", "cancelled");
        assert_eq!(story(&[Ask("t"), Stop, Hear(&gone)]), ["stop true", "t ended error interrupted"]);
        assert_eq!(
            story(&[Ask("t"), Hear(INIT), Stop, Hear(&gone), Hear(failed)]),
            ["stop true", "t ended error interrupted"]
        );
    }

    #[test]
    fn an_error_before_anything_else_is_a_refused_start() {
        let refused = r#"{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["No conversation found"]}"#;
        assert_eq!(story(&[Ask("t"), Hear("noise"), Hear(refused)]), [r#"refused ["No conversation found"]"#]);
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(refused)]), ["t ended error"]);
    }

    #[test]
    fn a_cleared_conversation_goes_on_under_another_id() {
        let reset = r#"{"type":"conversation_reset"}"#;
        let other = r#"{"type":"system","subtype":"init","session_id":"s2"}"#;
        let bad = r#"{"type":"system","subtype":"init","session_id":"../s3"}"#;
        assert_eq!(
            story(&[
                Ask("t"),
                Hear(INIT),
                Hear(reset),
                Hear(PLAIN),
                Ask("u"),
                Hear(other),
                Hear(PLAIN),
                Ask("v"),
                Hear(bad)
            ]),
            ["t ended", "id s2 true", "u ended"]
        );
        assert_eq!(story(&[Ask("t"), Hear(other)]), ["id s2 false"]);
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(PLAIN), Ask("u"), Hear(other)]), ["t ended", "id s2 true"]);
    }

    #[test]
    fn a_subagents_words_are_not_the_last_of_the_turn() {
        let sub = r#"{"type":"assistant","uuid":"sub","parent_tool_use_id":"x","message":{"content":"x"}}"#;
        assert_eq!(story(&[Ask("t"), Hear(INIT), Hear(SAID), Hear(sub), Hear(PLAIN)]), ["t ended a1"]);
    }

    /// Replays a recording; asks the turns that it names where a real host would have.
    fn replay(text: &str) -> Vec<String> {
        let session = parse_init(text);
        let mut tracker = TurnTracker::new(session);
        let mut out = Vec::new();
        for line in text.lines() {
            let message = parse(line.as_bytes());
            if let AgentMessage::Lifecycle { command, state: CommandState::Started } = &message
                && !tracker.is_busy()
            {
                assert_eq!(tracker.begin(TurnId::parse(command).unwrap()), None);
            }
            for step in tracker.hear(&message) {
                match &step {
                    Step::Ended(e) => {
                        assert!(e.last_assistant_uuid.is_some());
                        out.push(format!("{} {}", if e.ours { "ours" } else { "agent's" }, e.subtype));
                    }
                    Step::AgentTurnBegan(_) => out.push("began".into()),
                    Step::SessionId { .. } | Step::AskInterruptAgain | Step::StartRefused(_) => {
                        panic!("{step:?}")
                    }
                }
            }
        }
        assert!(!tracker.is_busy());
        out
    }

    fn parse_init(text: &str) -> SessionId {
        text.lines()
            .find_map(|line| {
                let AgentMessage::Init { session, .. } = parse(line.as_bytes()) else {
                    return None;
                };
                SessionId::parse(&session?).ok()
            })
            .unwrap()
    }

    #[test]
    fn every_turn_of_the_recordings_ends_once() {
        use crate::agent::fixtures as f;
        for (text, want) in [
            (f::ONE_TEXT, &["ours success"][..]),
            (f::TOOLS, &["ours success"]),
            (f::RETRIED, &["ours success"]),
            (f::BACKGROUND, &["ours success", "began", "agent's success"]),
            (f::INTERRUPTED, &["ours error_during_execution", "ours success"]),
            (f::QUEUED, &["ours success", "ours success"]),
        ] {
            assert_eq!(replay(text), want);
        }
    }
}
