//! What a run tells its session: facts to the machine, frames to the bus, the durability gate.
//! Leaves the process and its protocol to `agent`. Runs on the run's own thread. Rule a change could break: whatever
//! happened before, `ended` reaches the machine once, and a report carries its run's number so that an old one is ignored.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use super::engine::{Kind, SeenIn, Session};
use super::proof::{Proofs, STATE_KEY};
use crate::agent::{AgentIdentity, Run, RunEnd, RunFact, RunListener, TurnEnd};
use crate::archive::TailWatch;
use crate::error::{Code, Error, Result};
use crate::ids::{RunNo, SessionId};
use crate::journal::{Change, Unit};
use crate::lifecycle::machine::Fact;
use crate::sync::Mutex;

/// Longest the prepare hook may take before it is ended and the start goes on.
const PREPARE_LIMIT: Duration = Duration::from_secs(60);
/// Longest wait for the marker of an interrupt in the transcript, once everything else is there: 2.1.197 writes it some
/// 100 ms late, and an agent that writes none must not hold up its session.
const MARKER_LIMIT: Duration = Duration::from_secs(1);

/// The ear of one run.
pub struct Listener {
    session: Arc<Session>,
    run: RunNo,
    watch: Mutex<Option<TailWatch>>,
    active_file: Mutex<Option<PathBuf>>,
    /// Why the conversation cannot go on with this agent.
    foreign: Mutex<Option<Error>>,
    /// Keeps a server of a copy of this box out of the conversation while the agent lives.
    held: Mutex<Option<std::fs::File>>,
    /// The version that the agent told.
    version: Mutex<Option<String>>,
    /// Since when all of an interrupted turn but the marker of its interrupt is in the transcript.
    marker_due: Mutex<Option<Instant>>,
}

impl Listener {
    /// An ear for the run of this number.
    #[must_use]
    pub fn new(session: Arc<Session>, run: RunNo) -> Self {
        Self {
            session,
            run,
            watch: Mutex::new(None),
            active_file: Mutex::new(None),
            foreign: Mutex::new(None),
            held: Mutex::new(None),
            version: Mutex::new(None),
            marker_due: Mutex::new(None),
        }
    }

    fn record(&self, change: Change) {
        if let Ok(place) = self.session.reserve(1) {
            self.session.context.journal.owe(Unit { changes: vec![change], events: vec![] }, place, Box::new(|_| ()));
        }
    }

    fn agent(&self) -> Option<AgentIdentity> {
        self.session.state().agent.clone()
    }

    fn proofs(&self) -> &Proofs {
        &self.session.context.proofs
    }

    /// What the transcript holds at the end of a turn, and what that says of the agent.
    fn look_at_end(&self, end: &TurnEnd) -> SeenIn {
        self.marker_due.lock().take();
        let archive = &self.session.context.archive;
        let id = self.session.id();
        let folder = archive.folder_of(&id);
        let is_new = end.ours && !end.had_it_already;
        let has_turn = is_new && self.watch.lock().as_mut().is_some_and(|watch| watch.has_all(&[end.turn.as_str()]));
        if let (true, Some(agent)) = (is_new, self.agent()) {
            if has_turn {
                let version = self.version.lock().clone();
                if let Some(kept) = self.proofs().add(&agent, version.as_deref()) {
                    self.record(Change::SetState { key: STATE_KEY.into(), value: kept });
                }
            } else if folder.is_none() {
                self.proofs().keeps_none(&agent);
            }
        }
        if folder.is_some() {
            archive.remember(&id, folder.as_deref());
            // A conversation that has only begun had no file to hold.
            let mut held = self.held.lock();
            if held.is_none() {
                *held = archive.hold(&id).unwrap_or_else(|e| {
                    log::error!("session {id}: {}", e.text());
                    None
                });
            }
        }
        SeenIn { folder, has_turn }
    }

    fn release_active_file(&self) {
        if let Some(path) = self.active_file.lock().take() {
            // Gone already is as good.
            let _ = std::fs::remove_file(path);
        }
    }

    fn run_prepare_hook(&self, id: &SessionId) {
        let context = &self.session.context;
        let Some(command) = &context.config.prepare else { return };
        match crate::agent::hook::run(command, &context.config.box_dir, Instant::now() + PREPARE_LIMIT, &context.hooks)
        {
            Ok(()) => {}
            Err(e) => log::warn!("session {id}: prepare hook: {e}"),
        }
    }

    fn follow(&self, id: SessionId, cleared: bool) {
        if let Some(registry) = self.session.context.registry()
            && let Err(e) = registry.rename(&self.session, &id, cleared)
        {
            log::error!("session {}: {}; its run is closed", self.session.id(), e.text());
            *self.foreign.lock() = Some(e);
            // Two agents must not write one conversation.
            self.session.apply_reserved(Fact::Restart);
            return;
        }
        // The next end holds the new file.
        drop(self.held.lock().take());
        // The new file may hold lines of this turn already, so it is read from its start.
        *self.watch.lock() = Some(self.session.context.archive.watch_from_start(&id));
    }
}

impl RunListener for Listener {
    fn prepare(&self, _run: RunNo) -> Result<()> {
        let context = &self.session.context;
        let id = self.session.id();
        context.leftovers.wait_until_swept();
        let path = context.config.state_dir().join(format!("chat-active-{id}"));
        match std::fs::write(&path, format!("{}\n", std::process::id())) {
            Ok(()) => *self.active_file.lock() = Some(path),
            Err(e) => log::warn!("session {id}: {}: {e}", path.display()),
        }
        self.run_prepare_hook(&id);
        // After the sweep: an agent that outlived its server does not hold the file, its server did.
        *self.held.lock() = context.archive.hold(&id)?;
        self.session.look_again();
        *self.watch.lock() = Some(context.archive.watch(&id));
        Ok(())
    }

    fn started(&self, run: &Run, pid: u32, start_time: u64) {
        self.record(Change::Agent { session: self.session.id(), pid, start_time });
        {
            self.session.state().start_error = None;
        }
        self.session.apply(Fact::Started(run.clone()));
    }

    fn fact(&self, run: RunNo, fact: RunFact) {
        let session = &self.session;
        match fact {
            RunFact::Spoke => {
                session.apply(Fact::Spoke(run));
            }
            RunFact::AgentTurnBegan { turn } => {
                session.context.turns.begin(&turn, &session.id());
                session.apply_reserved(Fact::AgentTurnBegan(run, turn));
            }
            RunFact::Frame { turn, msg } => {
                let raw = match serde_json::value::to_raw_value(&msg) {
                    Ok(raw) => Arc::<serde_json::value::RawValue>::from(raw),
                    Err(e) => {
                        log::error!("session {}: frame dropped: {e}", session.id());
                        return;
                    }
                };
                let seq = session.context.turns.push(&turn, raw.clone());
                let texts = msg.answer_texts();
                let id = {
                    let mut state = session.state();
                    for text in texts {
                        state.said.push_str(&text);
                    }
                    if let Kind::Thread(_) = &session.kind {
                        for response in state.responses.hear(&msg) {
                            session.give_response(&mut state, response);
                        }
                    }
                    state.id.clone()
                };
                session.context.bus.publish("chat-turn", &ChatTurn { session_id: &id, turn_id: &turn, seq, msg: &raw });
            }
            RunFact::Task(task) => {
                let (id, may_go_now) = {
                    let mut state = session.state();
                    let could_go = state.may_be_closed();
                    if let Some(task_id) = task["taskId"].as_str() {
                        if task["settled"].as_bool() == Some(true) {
                            state.tasks.remove(task_id);
                        } else {
                            state.tasks.insert(task_id.to_owned());
                        }
                    }
                    (state.id.clone(), !could_go && state.may_be_closed())
                };
                if may_go_now && let Some(registry) = session.context.registry() {
                    registry.reconcile(session);
                }
                session.context.bus.publish("chat-task", &json!({"sessionId": id, "task": task}));
            }
            RunFact::SessionId { id, cleared } => self.follow(id, cleared),
            RunFact::Unknown { kind, count } => {
                let id = session.id();
                if count == 1 {
                    log::warn!("session {id}: the agent sent a message of unknown type {kind}");
                }
                session.context.bus.publish("unknown-message", &json!({"sessionId": id, "type": kind, "count": count}));
            }
            RunFact::Version(version) => {
                if let Some(agent) = self.agent()
                    && let Some(kept) = session.context.proofs.told_version(&agent, &version)
                {
                    log::warn!("session {}: the agent's program is another version now: {version}", session.id());
                    self.record(Change::SetState { key: STATE_KEY.into(), value: kept });
                }
                *self.version.lock() = Some(version);
            }
            RunFact::TurnEnded(end) => {
                let seen_in = self.look_at_end(&end);
                session.apply_end(run, end, seen_in);
            }
            RunFact::InterruptTimedOut => {
                session.apply_reserved(Fact::InterruptTimedOut(run));
            }
        }
    }

    fn is_durable(&self, _run: RunNo, end: &TurnEnd) -> bool {
        let own = (end.ours && !end.had_it_already).then_some(end.turn.as_str());
        let mut wanted: Vec<&str> = own.into_iter().collect();
        wanted.extend(end.last_assistant_uuid.as_deref());
        if wanted.is_empty() {
            return true;
        }
        let keeps_none = self.agent().is_some_and(|agent| self.proofs().is_known_to_keep_none(&agent));
        let mut watch = self.watch.lock();
        let Some(watch) = watch.as_mut() else { return true };
        if !watch.has_all(&wanted) {
            // Nothing is waited for that never comes.
            return keeps_none && !watch.has_file();
        }
        // A turn that an interrupt ended is whole with the marker of it.
        if end.interrupted && end.is_error && !watch.is_interrupted() {
            let now = Instant::now();
            return *self.marker_due.lock().get_or_insert(now + MARKER_LIMIT) <= now;
        }
        true
    }

    fn ended(&self, end: RunEnd) {
        self.release_active_file();
        let stamp = self.session.context.archive.stamp(&self.session.id());
        self.session.state().looked_at = stamp;
        drop(self.held.lock().take());
        if end.has_conversation {
            // In another home than the one we read, or it would have been resumed: from now on it is.
            self.session.state().has_it_elsewhere = true;
        } else if end.start_error.as_ref().is_some_and(|e| e.code() == Code::SessionGone) {
            self.session.state().has_it_elsewhere = false;
        }
        self.record(Change::AgentGone { session: self.session.id() });
        let foreign = self.foreign.lock().take();
        // What such an agent was given is in another conversation's transcript: sent again it would be there twice.
        let knows_none = end.start_error.as_ref().is_some_and(|e| e.code() == Code::SessionGone);
        // Some versions look only in the folder of their working directory: after a move the transcript is in another.
        let is_linked = knows_none && self.session.context.archive.link_here(&self.session.id());
        let hopeless = foreign.is_some() || (knows_none && !is_linked);
        let error = foreign.or(end.start_error).map(|e| e.text().to_owned()).or_else(|| {
            (!end.spoke && !end.asked).then(|| format!("the agent ended before it said anything ({})", end.exit))
        });
        self.session.apply_reserved(Fact::RunEnded {
            run: self.run,
            spoke: end.spoke,
            refused: end.refused,
            error,
            hopeless,
        });
    }
}

#[derive(serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct ChatTurn<'a> {
    session_id: &'a SessionId,
    turn_id: &'a crate::ids::TurnId,
    seq: u64,
    msg: &'a serde_json::value::RawValue,
}
