//! Every conversation of the box, by its canonical id: found, begun, remembered. Invariant: there are never two objects,
//! and never two agents, for one conversation.
//!
//! `selector` is what a client calls a conversation, `list` the list of them, `places` who may have a live agent, `names`
//! ids that change, `timers` the thread `sweep`, `recovery` the thread `recover`, `state_files` two files for people,
//! `shutdown` the end. What one conversation does is in `engine`.

mod list;
mod names;
mod places;
mod recovery;
mod selector;
mod shutdown;
mod state_files;
mod timers;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use super::Context;
use super::engine::{Kind, Session};
use super::features::Features;
use crate::agent::AgentIdentity;
use crate::clock;
use crate::error::{Code, Error, Result};
use crate::ids::SessionId;
use crate::journal::{Recovered, SessionRow};
use crate::lifecycle::machine::{Fact, Machine, OwedTurn};
use crate::sync::{Condvar, Held, Mutex, Sender, Watched, unbounded};
use crate::threads::{self, Doing, Name, OnPanic, Thread};

pub use list::Listed;
pub use selector::Selector;

#[derive(Default)]
struct Map {
    by_id: HashMap<SessionId, Arc<Session>>,
    /// Later ids of conversations that changed theirs.
    aliases: HashMap<SessionId, SessionId>,
    /// Everything the journal ever recorded.
    known: HashMap<SessionId, SessionRow>,
    kept_features: HashMap<SessionId, String>,
    /// Sessions with a run or a start under way.
    live: Vec<Arc<Session>>,
    /// Sessions that wait for a live place, oldest first.
    waiting: VecDeque<Arc<Session>>,
    main: Option<SessionId>,
    draining: bool,
}

/// The registry.
pub struct Registry {
    context: Arc<Context>,
    /// The lock called `sessions` in the table of `lib.rs`.
    sessions: Watched<Map>,
    /// Every conversation object that lives, for dumps: beside the map, so that a stuck map hides none. A leaf lock.
    all: Mutex<Vec<Weak<Session>>>,
    clock: Mutex<timers::Clock>,
    clock_changed: Condvar,
    look_ups: Mutex<Option<Sender<recovery::LookUp>>>,
    threads: Mutex<Vec<Thread>>,
    /// Held while the two state files are written, so that an older state never replaces a newer one.
    files: Mutex<()>,
}

/// A send is under way to this conversation, until dropped.
pub struct Pin {
    session: Arc<Session>,
    registry: Arc<Registry>,
}

impl std::ops::Deref for Pin {
    type Target = Arc<Session>;

    fn deref(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let may_go_now = {
            let mut state = self.session.state();
            state.pins -= 1;
            state.may_be_closed()
        };
        if may_go_now {
            self.registry.reconcile(&self.session);
        }
    }
}

impl Registry {
    /// Takes over what the journal recovered. Nothing runs until [`Registry::resume`].
    ///
    /// # Errors
    /// When the kernel has no threads to give.
    pub fn new(context: Arc<Context>, recovered: Recovered) -> Result<Arc<Self>> {
        let mut map = Map { aliases: recovered.aliases.into_iter().collect(), ..Map::default() };
        // A row under an older id stands for the conversation that has another now.
        let rows = recovered.sessions.into_iter().filter(|row| !map.aliases.contains_key(&row.session));
        let known = rows.map(|row| (row.session.clone(), row)).collect();
        map.known = known;
        map.kept_features = recovered.features.into_iter().collect();
        for row in map.known.values() {
            context.archive.remember(&row.session, row.folder.as_deref());
        }
        map.main = state_files::read_main(&context);
        for mut owed in recovered.owed {
            if crate::faults::planted("remerge_at_recovery") {
                recovery::remerge(&context, &mut owed);
            }
            if owed.turn.is_none() && owed.queue.is_empty() {
                continue;
            }
            // Its row follows its first message: a crash in between leaves it without one.
            context.archive.remember(&owed.session, None);
            let row = map.known.get(&owed.session).cloned().unwrap_or_else(|| fresh_row(&owed.session, None));
            if row.thread.is_some() || !owed.threads.is_empty() {
                // Nobody waits any more: told as failed, never run again in silence.
                let members = owed.turn.into_iter().flat_map(|t| t.members);
                recovery::tell_failed(
                    &context,
                    &owed.session,
                    members.chain(owed.queue).map(|m| m.uuid.clone()).collect(),
                );
                continue;
            }
            let handed_to = owed.turn.as_ref().and_then(|t| t.agent.clone()).map(AgentIdentity::from_kept);
            let turn = owed.turn.map(|t| OwedTurn {
                turn: t.turn,
                members: t.members,
                // `attempts` counts dispatches; each that a recall followed was a death.
                deaths: if t.dispatched { t.attempts.saturating_sub(1) } else { t.attempts },
                stopped: t.stopped,
            });
            let machine = Machine::recovered(turn, owed.queue, &owed.alone);
            let session = make(&context, &row, machine, map.kept_features.get(&owed.session));
            session.state().handed_to = handed_to;
            map.by_id.insert(owed.session, session);
        }
        let (to_look_up, jobs) = unbounded();
        let registry = Arc::new(Self {
            context: context.clone(),
            all: Mutex::new(map.by_id.values().map(Arc::downgrade).collect()),
            sessions: Watched::new("sessions", Doing::WaitSessions, map),
            clock: Mutex::default(),
            clock_changed: Condvar::new(),
            look_ups: Mutex::new(Some(to_look_up)),
            threads: Mutex::default(),
            files: Mutex::new(()),
        });
        if context.registry.set(Arc::downgrade(&registry)).is_err() {
            return Err(Error::internal("a context has one registry"));
        }
        let recover = threads::spawn(
            const { Name::fixed("recover") },
            threads::WORK_STACK_BYTES,
            OnPanic::EndProcess,
            move || recovery::recover(&context, &jobs),
        )?;
        let weak = Arc::downgrade(&registry);
        let sweep = threads::spawn(
            const { Name::fixed("sweep") },
            threads::SMALL_STACK_BYTES,
            OnPanic::EndProcess,
            move || {
                timers::sweep(&weak);
            },
        )?;
        registry.threads.lock().extend([recover, sweep]);
        Ok(registry)
    }

    /// Begins to deliver what was owed when the server went down. Called once, after the port is open.
    pub fn resume(&self) {
        let all: Vec<_> = self.sessions.lock().by_id.values().cloned().collect();
        for session in all {
            session.apply(Fact::RetryDue);
        }
    }

    /// The canonical id behind an id that may be an older one.
    fn canonical(map: &Map, id: &SessionId) -> SessionId {
        let mut id = id;
        // A chain of assignments is short; the bound guards against a loop in a foreign file.
        for _ in 0..16 {
            match map.aliases.get(id) {
                Some(now) => id = now,
                None => break,
            }
        }
        id.clone()
    }

    /// The conversation of an id.
    ///
    /// # Errors
    /// `unknown_session` if it was never known, `session_gone` if its transcript is gone.
    pub fn find(&self, id: &SessionId) -> Result<Arc<Session>> {
        {
            let map = self.sessions.lock();
            if let Some(session) = map.by_id.get(&Self::canonical(&map, id)) {
                return Ok(session.clone());
            }
        }
        // The file is looked for without a lock: a folder may be slow.
        let canonical = Self::canonical(&self.sessions.lock(), id);
        let has_file = self.context.archive.path_of(&canonical).is_some();
        let mut map = self.sessions.lock();
        // Again: it may have got another id meanwhile.
        let canonical = Self::canonical(&map, id);
        if let Some(session) = map.by_id.get(&canonical) {
            return Ok(session.clone());
        }
        let row = match map.known.get(&canonical) {
            Some(row) => row.clone(),
            None if has_file => fresh_row(&canonical, None),
            None => return Err(Error::new(Code::UnknownSession, format!("no conversation has the id {id}"))),
        };
        let session = make(&self.context, &row, Machine::default(), map.kept_features.get(&canonical));
        self.list_for_dumps(&session);
        map.by_id.insert(canonical, session.clone());
        Ok(session)
    }

    /// True if a conversation was ever recorded or has a transcript.
    #[must_use]
    pub fn is_known(&self, id: &SessionId) -> bool {
        let canonical = self.current_id(id);
        {
            let map = self.sessions.lock();
            if map.known.contains_key(&canonical) || map.by_id.contains_key(&canonical) {
                return true;
            }
        }
        self.context.archive.path_of(&canonical).is_some()
    }

    /// The id a conversation is known by now.
    #[must_use]
    pub fn current_id(&self, id: &SessionId) -> SessionId {
        Self::canonical(&self.sessions.lock(), id)
    }

    /// The conversation a send is for, on the map and kept there, its run open, while the send is under way.
    ///
    /// # Errors
    /// As [`Registry::find`].
    pub fn for_send(self: &Arc<Self>, selector: &Selector) -> Result<Pin> {
        let session = match selector {
            Selector::Id(id) => self.find(id)?,
            Selector::New => self.coin(Kind::Chat),
            Selector::Main => return self.main_for_send(),
        };
        let mut map = self.sessions.lock();
        let id = session.id();
        // Of two objects for one conversation only the one on the map may go on.
        let session = map.by_id.entry(id).or_insert(session).clone();
        Ok(self.pin(session))
    }

    fn main_for_send(self: &Arc<Self>) -> Result<Pin> {
        let main = self.sessions.lock().main.clone();
        if let Some(id) = main {
            match self.find(&id) {
                Ok(_) => {}
                Err(e) if e.code() == Code::UnknownSession => {
                    log::warn!("the kept main conversation {id} is unknown: a new one is begun");
                }
                Err(e) => return Err(e),
            }
        }
        // Two first sends at once meet in one conversation, and the refusal of one does not take it from the other:
        // what the pointer leads to is read and pinned in one critical section.
        let (pin, is_fresh) = {
            let mut map = self.sessions.lock();
            let met = map.main.as_ref().map(|m| Self::canonical(&map, m));
            let met = met.and_then(|m| map.by_id.get(&m)).cloned();
            let is_fresh = met.is_none();
            let session = met.unwrap_or_else(|| {
                let fresh = self.coin(Kind::Chat);
                let id = fresh.id();
                map.main = Some(id.clone());
                map.by_id.insert(id, fresh.clone());
                fresh
            });
            (self.pin(session), is_fresh)
        };
        if is_fresh {
            // Before the message is recorded: a death in between leaves a pointer to nothing, which the next send
            // mends; the other way about the box's own conversation would be begun twice.
            self.write_files();
        }
        Ok(pin)
    }

    /// Called with the lock of the map held.
    fn pin(self: &Arc<Self>, session: Arc<Session>) -> Pin {
        session.state().pins += 1;
        Pin { session, registry: self.clone() }
    }

    /// A conversation with an id of ours; [`Registry::keep`] puts it on the map.
    #[must_use]
    pub fn coin(&self, kind: Kind) -> Arc<Session> {
        let thread = match &kind {
            Kind::Chat => None,
            Kind::Thread(thread) => Some(thread.clone()),
        };
        let row = fresh_row(&SessionId::fresh(), thread);
        let session = make(&self.context, &row, Machine::default(), None);
        self.list_for_dumps(&session);
        session
    }

    /// Puts a conversation on the map, before its first message is recorded.
    pub fn keep(&self, session: &Arc<Session>) {
        let id = session.id();
        self.sessions.lock().by_id.entry(id).or_insert_with(|| session.clone());
    }

    /// Takes a conversation off the map whose first message was not recorded, unless another send to it is under way.
    pub fn forget_unrecorded(&self, session: &Arc<Session>) {
        let id = session.id();
        let mut map = self.sessions.lock();
        let state = session.state();
        let is_wanted = state.pins > 0 || !state.machine.inbox().is_empty() || state.machine.holds_slot();
        if !map.known.contains_key(&id) && !is_wanted {
            map.by_id.remove(&id);
            if map.main.as_ref() == Some(&id) {
                map.main = None;
            }
        }
    }

    /// A message of the conversation was recorded: it is known from now on.
    pub fn recorded(&self, session: &Session) {
        let is_new = {
            let mut map = self.sessions.lock();
            let state = session.state();
            let row = row_of(&session.kind, &state);
            self.context.archive.remember(&row.session, None);
            map.known.insert(row.session.clone(), row).is_none()
        };
        if is_new {
            self.write_files();
        }
    }

    /// What every session works with.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The box's own conversation.
    #[must_use]
    pub fn main(&self) -> Option<SessionId> {
        self.sessions.lock().main.clone()
    }

    /// Forgets the box's own conversation if it is this one: the next `main` send opens a new one.
    pub fn forget_main(&self, id: &SessionId) {
        let forgot = {
            let mut map = self.sessions.lock();
            // The file may still have an older id of it.
            let is_main = map.main.as_ref().is_some_and(|m| Self::canonical(&map, m) == *id);
            is_main && map.main.take().is_some()
        };
        if forgot {
            self.write_files();
        }
    }

    /// Every conversation object, for dumps and metrics. Takes a lock that is never held for longer than a push.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Session>> {
        self.all.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Who holds the lock of the map now. Takes no lock.
    #[must_use]
    pub fn held(&self) -> Option<Held> {
        self.sessions.held()
    }

    fn list_for_dumps(&self, session: &Arc<Session>) {
        let mut all = self.all.lock();
        if all.len() == all.capacity() {
            all.retain(|s| s.strong_count() > 0);
        }
        all.push(Arc::downgrade(session));
    }
}

fn make(
    context: &Arc<Context>,
    row: &SessionRow,
    machine: Machine<crate::agent::Run>,
    features: Option<&String>,
) -> Arc<Session> {
    let kind = row.thread.clone().map_or(Kind::Chat, Kind::Thread);
    let features = features.map(|json| Features::from_json(json)).unwrap_or_default();
    // Whether a transcript is there is looked at before each start; this says whether one must be.
    Session::new(context.clone(), kind, row, machine, features)
}

fn fresh_row(session: &SessionId, thread: Option<String>) -> SessionRow {
    let now = clock::now_ms();
    SessionRow {
        session: session.clone(),
        thread,
        created_ms: now,
        last_used_ms: now,
        label: None,
        resumable: false,
        folder: None,
        anchor: None,
    }
}

/// The row that the journal keeps of a conversation.
pub(super) fn row_of(kind: &Kind, state: &super::engine::State) -> SessionRow {
    SessionRow {
        session: state.id.clone(),
        thread: match kind {
            Kind::Chat => None,
            Kind::Thread(thread) => Some(thread.clone()),
        },
        created_ms: state.created_ms,
        last_used_ms: state.last_used_ms,
        label: state.label.clone(),
        resumable: state.resumable,
        folder: state.folder.clone(),
        anchor: state.anchor.clone(),
    }
}
