//! One conversation: its lock, its machine, and the carrying out of what the machine decides.
//! Leaves what a request means to `chat` and `thread`, reports of the agent to `listener`, live places to `registry`.
//! Rule a change could break: work for the journal and the run is queued inside the state's lock (those queues never
//! block), so that the order of records and events is the order of transitions; everything else happens after unlock.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Instant;

use serde_json::json;

use super::Context;
use super::features::{Features, with_snapshot};
use super::listener::Listener;
use super::records::{cleared_event, complete_event, failed_event};
use super::thread::Responses;
use crate::agent::{AgentIdentity, Run, RunSpec, Turn, TurnEnd};
use crate::archive::Stamp;
use crate::clock::{self, UnixMs};
use crate::error::Result;
use crate::ids::{MessageUuid, RunNo, SessionId, TurnId};
use crate::inbox::{self, Message};
use crate::journal::{Change, KeptEvent, Places, SessionRow, Unit};
use crate::lifecycle::PhaseKind;
use crate::lifecycle::machine::{Did, Effect, Fact, Machine, RunRef};
use crate::sync::{Condvar, Held, Watched, WatchedGuard};

/// Records a turn needs after it was dispatched, at most: marked as stopped, ended, features, agent gone.
const PLACES_PER_TURN: usize = 4;

impl RunRef for Run {
    fn no(&self) -> RunNo {
        Run::no(self)
    }
}

/// What the transcript of a conversation was seen to hold at the end of a turn.
#[derive(Debug, Clone, Default)]
pub struct SeenIn {
    /// The project folder that it lies in; `None` if there is none.
    pub folder: Option<String>,
    /// It holds the turn.
    pub has_turn: bool,
}

/// Which door a conversation belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// The whole box, interactive.
    Chat,
    /// One chat of an outside channel, by its thread reference.
    Thread(String),
}

/// What a conversation's lock protects.
pub struct State {
    /// The decisions.
    pub machine: Machine<Run>,
    /// The id it is known by now.
    pub id: SessionId,
    /// When the phase last changed.
    pub since_ms: UnixMs,
    /// Last use, for the order of the list and of eviction.
    pub last_used_ms: UnixMs,
    /// When the session was first recorded.
    pub created_ms: UnixMs,
    /// First words, for the list.
    pub label: Option<String>,
    /// A transcript of it was seen, so the next run resumes, and without one it is gone.
    pub resumable: bool,
    /// The project folder that the transcript was seen in last.
    pub folder: Option<String>,
    /// The last turn of ours that was seen in the transcript.
    pub anchor: Option<TurnId>,
    /// Which agent the run that is open, or was last, is of.
    pub agent: Option<AgentIdentity>,
    /// Which agent the turn whose fate is open was handed to.
    pub handed_to: Option<AgentIdentity>,
    /// How the transcript stood when it was searched, or when our last run of it ended.
    pub looked_at: Option<Stamp>,
    /// The agent said that it has this conversation, though no transcript is where we look.
    pub has_it_elsewhere: bool,
    /// The flags.
    pub features: Features,
    /// Background tasks the agent reported and did not settle.
    pub tasks: std::collections::HashSet<String>,
    /// Keeps it from being evicted.
    pub pins: usize,
    /// Words the assistant said in the turn in flight, for feature tags.
    pub said: String,
    /// What a thread's agent is told in front of its first message.
    pub preamble: Option<String>,
    /// Records of a thread's session that were committed, so that who waits for an answer looks again.
    pub commits: u64,
    /// Finds a thread's responses in the turn in flight.
    pub responses: Responses,
    /// Those found so far.
    pub given: Vec<String>,
    /// The run that is being started, for the end of the server.
    pub starting: Option<Run>,
    /// Why the last start failed, until one succeeds.
    pub start_error: Option<String>,
    /// The journal has a row of it.
    pub row_kept: bool,
    /// The agent's own account of the turn that just ended.
    pub(super) end: Option<TurnEnd>,
    /// The transcript was seen to hold that turn.
    pub(super) is_recorded: bool,
    /// Places in the journal's queue for the records this turn will need.
    spare: Option<Places>,
    phase_told: (PhaseKind, usize),
}

impl State {
    /// Its run may be closed to make room or because nobody used it: nothing is under way, owed or pinned.
    #[must_use]
    pub fn may_be_closed(&self) -> bool {
        self.machine.is_evictable() && self.pins == 0 && self.tasks.is_empty()
    }
}

/// One conversation.
pub struct Session {
    /// What it works with.
    pub context: Arc<Context>,
    /// Which door it belongs to.
    pub kind: Kind,
    me: Weak<Session>,
    first_id: SessionId,
    /// The lock called `state` in the table of `lib.rs`.
    state: Watched<State>,
    /// Waiters for the end of a turn; notified after every fact.
    changed: Condvar,
}

/// What is carried out after the lock is given back.
pub(super) enum Late {
    Reconcile,
    Start(RunNo, SessionId, bool),
    LookUp(TurnId, Vec<MessageUuid>),
    LookUpQueue(Vec<Arc<Message>>),
    Watch(PhaseKind, UnixMs),
    ForgetFrames,
    RetryIn(u64),
    Features(String),
}

/// Effects that wait for the lock to be given back.
#[must_use = "dropping it forgets effects"]
pub struct Pending(Vec<Late>);

impl Session {
    /// A conversation as the journal and the archive know it.
    #[must_use]
    pub fn new(
        context: Arc<Context>,
        kind: Kind,
        row: &SessionRow,
        machine: Machine<Run>,
        features: Features,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            context,
            kind,
            me: me.clone(),
            first_id: row.session.clone(),
            state: Watched::new(
                "state",
                crate::threads::Doing::WaitState,
                State {
                    machine,
                    id: row.session.clone(),
                    since_ms: clock::now_ms(),
                    last_used_ms: row.last_used_ms,
                    created_ms: row.created_ms,
                    label: row.label.clone(),
                    resumable: row.resumable,
                    folder: row.folder.clone(),
                    anchor: row.anchor.clone(),
                    agent: None,
                    handed_to: None,
                    looked_at: None,
                    has_it_elsewhere: false,
                    features,
                    tasks: std::collections::HashSet::new(),
                    pins: 0,
                    said: String::new(),
                    preamble: None,
                    commits: 0,
                    responses: Responses::default(),
                    given: Vec::new(),
                    starting: None,
                    start_error: None,
                    row_kept: false,
                    end: None,
                    is_recorded: true,
                    spare: None,
                    phase_told: (PhaseKind::Idle, 0),
                },
            ),
            changed: Condvar::new(),
        })
    }

    /// It belongs to a thread of an outside channel.
    #[must_use]
    pub fn is_thread(&self) -> bool {
        matches!(self.kind, Kind::Thread(_))
    }

    /// How its run is closed when nobody needs it, and when a person stops it.
    #[must_use]
    pub fn way_to_close(&self) -> Fact<Run> {
        if self.is_thread() { Fact::Park } else { Fact::Stop }
    }

    /// The lock. Lock order: after the registry's, before any leaf lock.
    pub fn state(&self) -> WatchedGuard<'_, State> {
        self.state.lock()
    }

    /// The lock within `limit`, or who holds it: for dumps.
    ///
    /// # Errors
    /// It is held; by whom, unless it was given back this moment.
    pub fn try_state(&self, limit: std::time::Duration) -> std::result::Result<WatchedGuard<'_, State>, Option<Held>> {
        self.state.try_lock_for(limit).ok_or_else(|| self.state.held())
    }

    /// The id it began with; needs no lock.
    #[must_use]
    pub fn first_id(&self) -> &SessionId {
        &self.first_id
    }

    /// Condvar of the lock, notified after every fact.
    pub fn changed(&self) -> &Condvar {
        &self.changed
    }

    /// The id it is known by now.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.state.lock().id.clone()
    }

    /// Takes a fact in and carries out what follows.
    pub fn apply(self: &Arc<Self>, fact: Fact<Run>) -> Did {
        self.apply_with(fact, None)
    }

    /// The same, with places in the journal's queue for what the fact will record.
    pub fn apply_with(self: &Arc<Self>, fact: Fact<Run>, places: Option<Places>) -> Did {
        let (pending, did) = {
            let mut state = self.state.lock();
            self.apply_locked(&mut state, fact, places)
        };
        self.run(pending);
        did
    }

    /// The end of a turn with the agent's own account of it; `seen_in` is what its transcript was seen to hold.
    pub fn apply_end(self: &Arc<Self>, run: RunNo, end: TurnEnd, seen_in: SeenIn) {
        let pending = {
            let mut state = self.state.lock();
            let turn = end.turn.clone();
            state.is_recorded = seen_in.has_turn || end.had_it_already || !end.ours;
            if seen_in.has_turn && end.ours {
                state.anchor = Some(turn.clone());
            }
            state.resumable |= seen_in.folder.is_some();
            if seen_in.folder.is_some() {
                state.folder.clone_from(&seen_in.folder);
            }
            state.end = Some(end);
            let (pending, _) = self.apply_locked(&mut state, Fact::TurnEnded(run, turn), None);
            state.end = None;
            pending
        };
        self.run(pending);
    }

    /// The critical section of [`Session::apply`], for callers that hold more locks; they run the rest after unlock.
    pub fn apply_locked(
        self: &Arc<Self>,
        state: &mut State,
        fact: Fact<Run>,
        places: Option<Places>,
    ) -> (Pending, Did) {
        if let Some(places) = places {
            match &mut state.spare {
                Some(spare) => spare.add(places),
                None => state.spare = Some(places),
            }
        }
        let mut late = Vec::new();
        let could_go = state.may_be_closed();
        let (effects, did) = state.machine.apply(fact);
        let mut todo: VecDeque<Effect<Run>> = effects.into();
        // A refused dispatch is a fact of its own; one fact follows another at most once, so this ends.
        while let Some(effect) = todo.pop_front() {
            if let Some(next) = self.carry_out(state, effect, &mut late) {
                let (more, _) = state.machine.apply(next);
                todo.extend(more);
            }
        }
        match &mut state.spare {
            Some(_) if state.machine.current_turn().is_none() => state.spare = None,
            // Requests that come again and again in one turn must not take the queue's places away from others.
            Some(spare) => drop(spare.take(spare.count().saturating_sub(PLACES_PER_TURN))),
            None => {}
        }
        let was = state.phase_told.0;
        self.tell_phase(state);
        let kind = state.phase_told.0;
        if kind != was && matches!(kind, PhaseKind::Starting | PhaseKind::Stopping) {
            late.push(Late::Watch(kind, state.since_ms));
        }
        if kind != PhaseKind::Starting {
            state.starting = None;
        }
        if !could_go && state.may_be_closed() {
            // Somebody may wait for the live place of this one.
            late.push(Late::Reconcile);
        }
        self.changed.notify_all();
        (Pending(late), did)
    }

    /// Carries out what had to wait for the unlock.
    pub fn run(self: &Arc<Self>, pending: Pending) {
        for late in pending.0 {
            match late {
                Late::Reconcile => {
                    if let Some(registry) = self.context.registry() {
                        registry.reconcile(self);
                    }
                }
                Late::Start(run, id, resume) => self.start(run, id, resume),
                Late::LookUp(turn, messages) => {
                    if let Some(registry) = self.context.registry() {
                        registry.look_up(self, turn, messages);
                    }
                }
                Late::LookUpQueue(messages) => {
                    if let Some(registry) = self.context.registry() {
                        registry.look_up_queue(self, messages);
                    }
                }
                Late::ForgetFrames => {
                    if let Some(registry) = self.context.registry() {
                        registry.forget_frames_later(self);
                    }
                }
                Late::Watch(kind, since_ms) => {
                    if let Some(registry) = self.context.registry() {
                        registry.watch_phase(self, kind, since_ms);
                    }
                }
                Late::RetryIn(ms) => {
                    if let Some(registry) = self.context.registry() {
                        registry.retry_in(self, ms);
                    }
                }
                Late::Features(said) => self.apply_deltas(&said),
            }
        }
    }

    fn tell_phase(&self, state: &mut State) {
        let now = (state.machine.phase().kind(), state.machine.queued());
        if now == state.phase_told {
            return;
        }
        if now.0 != state.phase_told.0 {
            state.since_ms = clock::now_ms();
        }
        if now.0 == PhaseKind::Idle {
            // What ran in the background of an agent ended with it.
            state.tasks.clear();
        }
        state.phase_told = now;
        // Inside the lock, so that phases are told in their order; listeners of ours would want the lock.
        self.context
            .bus
            .publish_unheard("chat-phase", &json!({"sessionId": state.id, "phase": now.0.word(), "queued": now.1}));
    }

    /// One effect; inside the lock, so nothing here may block. Returns a fact that follows at once.
    fn carry_out(self: &Arc<Self>, state: &mut State, effect: Effect<Run>, late: &mut Vec<Late>) -> Option<Fact<Run>> {
        match effect {
            Effect::WantSlot | Effect::SlotFree => late.push(Late::Reconcile),
            Effect::Start(run) => late.push(Late::Start(run, state.id.clone(), state.resumable)),
            Effect::Dispatch { turn, members, attempt } => return self.dispatch(state, turn, &members, attempt),
            Effect::Send { run, turn, members } => {
                self.context.turns.begin(&turn, &state.id);
                state.said.clear();
                let (text, images) = inbox::merge(&members);
                let mut text = with_snapshot(&state.features, &text, members.len() == 1);
                if let Some(preamble) = &state.preamble {
                    text = format!("{preamble}\n\n{text}");
                }
                state.responses = Responses::default();
                state.given.clear();
                // A closed run reports its end; the turn is looked up then.
                if let Err(e) = run.send_turn(Turn { turn, text, images }) {
                    log::warn!("session {}: {} takes no turn: {e}", state.id, run.no());
                }
            }
            Effect::AskInterrupt(run) => run.interrupt(),
            Effect::Close(run) => run.close(),
            Effect::MarkStopped(turn) => {
                self.owe(state, Unit { changes: vec![Change::Stopped { turn }], events: vec![] })
            }
            Effect::LookUp { turn, members } => {
                late.push(Late::LookUp(turn, members.iter().map(|m| m.uuid.clone()).collect()));
            }
            Effect::LookUpQueue(messages) => late.push(Late::LookUpQueue(messages)),
            Effect::Found { turn, members, finished } => self.record_found(state, turn, &members, finished),
            Effect::End { turn, members, how } => self.record_end(state, turn, &members, how, late),
            Effect::AgentTurnEnded(turn, with_result) => {
                let event = if with_result {
                    complete_event(&state.id, &turn, state.end.as_ref())
                } else {
                    failed_event(&state.id, &turn, &[], "the agent ended in the middle of a turn of its own", false)
                };
                self.context.turns.end(&turn, None);
                late.push(Late::ForgetFrames);
                self.owe(state, Unit { changes: vec![], events: vec![event] });
                if with_result {
                    late.push(Late::Features(std::mem::take(&mut state.said)));
                }
            }
            Effect::Cleared(messages) => {
                let uuids: Vec<_> = messages.iter().map(|m| m.uuid.clone()).collect();
                let event = cleared_event(&state.id, &uuids, "stopped");
                let mut changes = self.failed_answers(&uuids);
                changes.push(Change::Clear { messages: uuids, why: "stopped".into() });
                self.owe(state, Unit { changes, events: vec![event] });
            }
            Effect::Failed(messages, error) => {
                let uuids: Vec<_> = messages.iter().map(|m| m.uuid.clone()).collect();
                let events = uuids
                    .first()
                    .map(|first| failed_event(&state.id, &TurnId::of(first), &uuids, &error, false))
                    .into_iter()
                    .collect();
                let mut changes = vec![Change::Fail { messages: uuids.clone(), error }];
                changes.extend(self.failed_answers(&uuids));
                self.owe(state, Unit { changes, events });
            }
            Effect::StartFailed { error, will_retry } => {
                log::warn!(
                    "session {}: start failed: {error}{}",
                    state.id,
                    if will_retry { "; will retry" } else { "" }
                );
                let waiting = state.machine.waiting();
                if let Some(first) = waiting.first() {
                    let event = failed_event(&state.id, &TurnId::of(first), &waiting, &error, will_retry);
                    self.owe(state, Unit { changes: vec![], events: vec![event] });
                }
                state.start_error = Some(error);
                if !will_retry && matches!(self.kind, Kind::Thread(_)) {
                    // Somebody waits for the answer, and the threads behind it wait too: answered as failed.
                    return Some(Fact::Stop);
                }
            }
            Effect::RetryIn(ms) => late.push(Late::RetryIn(ms)),
            Effect::Changed => {}
            Effect::Bug(bug) => log::error!("session {}: bug contained: {bug}", state.id),
        }
        None
    }

    /// Queues a record that must come true; the journal keeps it and tries again.
    pub(super) fn owe(&self, state: &mut State, unit: Unit) {
        let spare = state.spare.as_mut().map(|s| s.take(1)).filter(|p| p.count() == 1);
        match spare.map_or_else(|| self.context.journal.reserve_for_outcome(1), Ok) {
            Ok(place) => {
                let id = state.id.clone();
                let waited_for = (self.kind != Kind::Chat).then(|| self.me.clone());
                self.context.journal.owe(
                    unit,
                    place,
                    Box::new(move |done| {
                        if let Err(e) = done {
                            log::error!("session {id}: a record was given up: {e}");
                        }
                        if let Some(session) = waited_for.and_then(|me| me.upgrade()) {
                            session.state.lock().commits += 1;
                            session.changed.notify_all();
                        }
                    }),
                );
            }
            // Callers reserve before they act, so this is a bug; the ledger still knows the message as undelivered.
            Err(e) => log::error!("session {}: a record finds no place: {e}", state.id),
        }
    }

    fn dispatch(
        self: &Arc<Self>,
        state: &mut State,
        turn: TurnId,
        members: &[Arc<Message>],
        attempt: u32,
    ) -> Option<Fact<Run>> {
        let refused = Fact::DispatchRefused(turn.clone());
        let mut places = match self.context.journal.reserve(1 + PLACES_PER_TURN) {
            Ok(places) => places,
            Err(e) => {
                log::warn!("session {}: turn not dispatched: {e}", state.id);
                return Some(refused);
            }
        };
        let place = places.take(1);
        state.spare = Some(places);
        let uuids: Vec<_> = members.iter().map(|m| m.uuid.clone()).collect();
        let event = KeptEvent {
            event: "chat-message-dispatched",
            data: json!({"sessionId": state.id, "turnId": turn, "messageUuids": uuids}),
        };
        let early = crate::faults::planted("dispatch_before_commit").then(|| Fact::Dispatched(turn.clone()));
        state.handed_to.clone_from(&state.agent);
        let change = Change::Dispatch {
            session: state.id.clone(),
            turn: turn.clone(),
            members: uuids,
            attempt,
            agent: state.agent.as_ref().map(|agent| agent.as_str().to_owned()),
        };
        let session: Weak<Self> = Arc::downgrade(self);
        self.context.journal.submit(
            Unit { changes: vec![change], events: vec![event] },
            place,
            Box::new(move |done| {
                let Some(session) = session.upgrade() else { return };
                match done {
                    Ok(_) if crate::faults::planted("dispatch_before_commit") => {}
                    Ok(_) => {
                        session.apply(Fact::Dispatched(turn));
                    }
                    Err(e) => {
                        log::warn!("turn {turn} not dispatched: {e}");
                        session.apply(Fact::DispatchRefused(turn));
                    }
                }
            }),
        );
        early
    }

    fn start(self: &Arc<Self>, run: RunNo, id: SessionId, had_transcript: bool) {
        let agent = self.context.agent();
        #[cfg(feature = "model")]
        let agent = crate::model::agent_of(&id).unwrap_or(agent);
        let has_it_elsewhere = {
            let mut state = self.state.lock();
            state.agent = Some(agent);
            state.has_it_elsewhere
        };
        let resume = has_it_elsewhere || self.context.archive.path_of(&id).is_some();
        if had_transcript && !resume {
            let error = Some("the transcript of this conversation is gone, so it cannot be resumed".to_owned());
            self.apply_reserved(Fact::RunEnded { run, spoke: false, refused: false, error, hopeless: true });
            return;
        }
        let spec = RunSpec {
            run,
            session: id.clone(),
            resume,
            program: self.context.program.clone(),
            box_dir: self.context.config.box_dir.clone(),
            env: self.context.agent_env.clone(),
            mark: self.context.mark.clone(),
            allow_tools: self.context.config.allow_tools,
        };
        match Run::start(spec, Arc::new(Listener::new(self.clone(), run))) {
            Ok(handle) => {
                let mut state = self.state.lock();
                // It may be further than that already; then the machine has the handle.
                if state.machine.phase().kind() == PhaseKind::Starting {
                    state.starting = Some(handle);
                }
            }
            Err(e) => {
                // No thread to be had: as if the agent could not be started.
                let error = Some(e.text().to_owned());
                self.apply_reserved(Fact::RunEnded { run, spoke: false, refused: false, error, hopeless: false });
            }
        }
    }

    /// Applies a fact that ends things, with the places its records may need; those of a turn in flight are kept.
    pub fn apply_reserved(self: &Arc<Self>, fact: Fact<Run>) -> Did {
        let places = self.context.journal.reserve_for_outcome(PLACES_PER_TURN).ok();
        self.apply_with(fact, places)
    }

    fn apply_deltas(self: &Arc<Self>, said: &str) {
        for (name, value) in super::features::deltas(said) {
            if let Err(e) = self.set_feature(&name, &value) {
                log::warn!("session {}: the agent set {name}: {}", self.id(), e.text());
            }
        }
    }

    /// Waits until no turn is in flight or being prepared, until `deadline` at most. True if it is idle.
    #[must_use]
    pub fn wait_for_idle(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, |state| !state.machine.is_busy())
    }

    /// Waits on the condvar of the lock until `met`, until `deadline` at most. True if it is met.
    pub(super) fn wait_until(&self, deadline: Instant, met: impl Fn(&State) -> bool) -> bool {
        let _for = crate::threads::at_work_for(&self.id());
        let _at = crate::threads::doing(crate::threads::Doing::WaitTurn);
        let mut state = self.state.lock();
        while !met(&state) {
            if state.wait_until(&self.changed, deadline) {
                return met(&state);
            }
        }
        true
    }

    /// Places in the journal's queue for a request that will record something.
    ///
    /// # Errors
    /// `cannot_record` when the journal has none to give.
    pub fn reserve(&self, places: usize) -> Result<Places> {
        self.context.journal.reserve(places)
    }
}
