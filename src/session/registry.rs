//! Every conversation of the box, by its canonical id: never two objects, never two agents, for one. Lends the live
//! places, evicts, closes idle runs, follows ids that change. Leaves what a conversation does to `engine`.
//! Rule a change could break: who holds or wants a live place is read from the machines under both locks, never kept
//! beside them, so the order in which news arrives does not matter.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde_json::json;

use super::Context;
use super::engine::{Kind, Pending, Session};
use super::features::Features;
use crate::agent::AgentIdentity;
use crate::clock::{self, UnixMs};
use crate::error::{Code, Error, Result};
use crate::ids::{MessageUuid, SessionId, TurnId};
use crate::inbox::Message;
use crate::journal::{Change, KeptEvent, Recovered, SessionRow, Unit};
use crate::lifecycle::PhaseKind;
use crate::lifecycle::machine::{Fact, Machine, OwedTurn};
use crate::sync::{Condvar, Held, Mutex, Sender, Watched, unbounded};
use crate::threads::{self, Doing, Name, OnPanic, Thread, doing};

/// File that keeps the box's own conversation.
const MAIN_FILE: &str = "chat-session-id.json";
/// File that lists the conversations the box ever had, newest first, for people and other tools.
const HISTORY_FILE: &str = "chat-session-history.json";
/// Conversations the history file lists.
const HISTORY_ROWS_MAX: usize = 200;

/// What a client calls a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// A fresh one.
    New,
    /// The box's own.
    Main,
    /// By its id.
    Id(SessionId),
}

impl Word {
    /// Reads the `session` field.
    ///
    /// # Errors
    /// `bad_field` for what is neither a word nor an id.
    pub fn parse(text: &str) -> Result<Self> {
        match text {
            "new" => Ok(Word::New),
            "main" => Ok(Word::Main),
            id => SessionId::parse(id).map(Word::Id).map_err(|_| {
                Error::new(Code::BadField, "session is \"new\", \"main\" or an id of 1 to 64 A-Z a-z 0-9 _ -")
            }),
        }
    }
}

/// One row of the list.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// Its id.
    pub session_id: SessionId,
    /// First real words of a person, if any.
    pub label: Option<String>,
    /// RFC 3339.
    pub last_used_at: String,
    /// A run is open for turns.
    pub running: bool,
    /// A start or turn is under way.
    pub busy: bool,
    /// Messages that wait.
    pub queued: usize,
}

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

/// What the sweep thread waits for.
struct Timer {
    at: Instant,
    session: Weak<Session>,
    what: Due,
}

#[derive(Debug, Clone, Copy)]
enum Due {
    /// A pause of the session is over.
    Retry,
    /// The frames of its turn were kept long enough.
    Forget,
    /// The session should have left this phase, entered then.
    Left(PhaseKind, UnixMs),
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Timer {}
impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap gives its greatest first: the earliest timer.
        other.at.cmp(&self.at)
    }
}

#[derive(Default)]
struct Clock {
    timers: BinaryHeap<Timer>,
    going_down: bool,
}

/// Something to look up in the transcripts, on the `recover` thread.
enum LookUp {
    /// A turn whose run is gone.
    Turn { session: Arc<Session>, turn: TurnId, messages: Vec<MessageUuid> },
    /// What waits since an earlier life of the server.
    Queue { session: Arc<Session>, messages: Vec<Arc<Message>> },
}

/// The registry.
pub struct Registry {
    context: Arc<Context>,
    /// The lock called `sessions` in the table of `lib.rs`.
    sessions: Watched<Map>,
    /// Every conversation object that lives, for dumps: beside the map, so that a stuck map hides none. A leaf lock.
    all: Mutex<Vec<Weak<Session>>>,
    clock: Mutex<Clock>,
    clock_changed: Condvar,
    look_ups: Mutex<Option<Sender<LookUp>>>,
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
        map.main = read_main(&context);
        for mut owed in recovered.owed {
            if crate::faults::planted("remerge_at_recovery") {
                remerge(&context, &mut owed);
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
                tell_failed(&context, &owed.session, members.chain(owed.queue).map(|m| m.uuid.clone()).collect());
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
        let (to_look_up, jobs) = unbounded::<LookUp>();
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
            move || {
                sweep_leftovers(&context);
                loop {
                    let job = {
                        let _at = doing(Doing::WaitWork);
                        jobs.recv()
                    };
                    let Ok(job) = job else { return };
                    look_up(job);
                }
            },
        )?;
        let weak = Arc::downgrade(&registry);
        let sweep = threads::spawn(
            const { Name::fixed("sweep") },
            threads::SMALL_STACK_BYTES,
            OnPanic::EndProcess,
            move || {
                sweep(&weak);
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
    pub fn for_send(self: &Arc<Self>, word: &Word) -> Result<Pin> {
        let session = match word {
            Word::Id(id) => self.find(id)?,
            Word::New => self.coin(Kind::Chat),
            Word::Main => return self.main_for_send(),
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

    /// The conversation a page without a wish opens: busy before running before the last used.
    #[must_use]
    pub fn most_active(&self) -> Option<SessionId> {
        let best = {
            let map = self.sessions.lock();
            map.by_id
                .values()
                .filter(|s| s.kind == Kind::Chat)
                .filter_map(|s| {
                    let state = s.state();
                    let known = map.known.contains_key(&state.id) || state.resumable;
                    let rank = (state.machine.is_busy(), state.machine.phase().is_running(), state.last_used_ms);
                    known.then(|| (rank, state.id.clone()))
                })
                .max()
        };
        let best = best.filter(|(rank, _)| rank.0 || rank.1).map(|(_, id)| id);
        best.or_else(|| self.main().filter(|id| self.is_known(id)))
            .or_else(|| self.list(1).into_iter().next().map(|row| row.session_id))
    }

    /// Conversations, newest first; those that only lie in the agent's home among them.
    #[must_use]
    pub fn list(&self, rows_max: usize) -> Vec<Listed> {
        let mut rows: HashMap<SessionId, Listed> = HashMap::new();
        let on_disk = self.context.archive.list(rows_max);
        let map = self.sessions.lock();
        crate::faults::point("sessions_locked");
        for file in on_disk {
            let canonical = Self::canonical(&map, &file.session);
            rows.insert(canonical.clone(), listed(canonical, file.label, file.last_used_ms));
        }
        for row in map.known.values().filter(|r| r.thread.is_none()) {
            let entry =
                rows.entry(row.session.clone()).or_insert_with(|| listed(row.session.clone(), None, row.last_used_ms));
            // First words of the transcript before first words sent through us: it may be older than the server.
            if entry.label.is_none() {
                entry.label.clone_from(&row.label);
            }
            let at = clock::rfc3339(row.last_used_ms);
            if at > entry.last_used_at {
                entry.last_used_at = at;
            }
        }
        for row in map.known.values().filter(|r| r.thread.is_some()) {
            rows.remove(&row.session);
        }
        for session in map.by_id.values() {
            let state = session.state();
            if let Some(row) = rows.get_mut(&state.id) {
                row.running = state.machine.phase().is_running() && !state.machine.is_closing();
                row.busy = state.machine.is_busy();
                row.queued = state.machine.queued();
            }
        }
        drop(map);
        let mut rows: Vec<_> = rows.into_values().collect();
        rows.sort_by(|a, b| b.last_used_at.cmp(&a.last_used_at).then_with(|| a.session_id.cmp(&b.session_id)));
        rows.truncate(rows_max);
        rows
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

    // ---- live places ----

    /// Brings the lists of live and waiting conversations in line with this one's machine, then lends what is free.
    pub fn reconcile(&self, session: &Arc<Session>) {
        {
            let mut map = self.sessions.lock();
            let state = session.state();
            let (holds, wants) = (state.machine.holds_slot(), state.machine.wants_slot());
            drop(state);
            map.live.retain(|s| !Arc::ptr_eq(s, session));
            if holds {
                map.live.push(session.clone());
            }
            let waits = map.waiting.iter().any(|s| Arc::ptr_eq(s, session));
            if wants && !waits {
                map.waiting.push_back(session.clone());
            } else if !wants && waits {
                map.waiting.retain(|s| !Arc::ptr_eq(s, session));
            }
        }
        self.lend();
    }

    /// Lends free places to the oldest waiting message; makes room by closing what nobody uses.
    fn lend(&self) {
        // Each round lends a place or asks one session to go; both are bounded by the number of sessions.
        loop {
            let Some((session, pending)) = self.lend_one() else { return };
            session.run(pending);
        }
    }

    /// One decision, in one critical section; the effects are carried out by the caller after unlock.
    fn lend_one(&self) -> Option<(Arc<Session>, Pending)> {
        let mut map = self.sessions.lock();
        if map.draining {
            return None;
        }
        // The pool's one run is beside the cap.
        for (is_thread, cap) in [(true, 1), (false, self.context.config.live_max)] {
            let Some(at) = map.waiting.iter().position(|s| s.is_thread() == is_thread) else { continue };
            if map.live.iter().filter(|s| s.is_thread() == is_thread).count() < cap {
                return self.grant(&mut map, at);
            }
            // One that is going makes room already.
            let mut of_kind = map.live.iter().filter(|s| s.is_thread() == is_thread);
            if of_kind.any(|s| s.state().machine.is_closing()) {
                continue;
            }
            if let Some(evicted) = self.evict_one(&map, is_thread) {
                return Some(evicted);
            }
        }
        None
    }

    fn grant(&self, map: &mut Map, at: usize) -> Option<(Arc<Session>, Pending)> {
        let session = map.waiting.remove(at)?;
        let run = self.context.next_run();
        let mut state = session.state();
        let (pending, _) = session.apply_locked(&mut state, Fact::SlotGranted(run), None);
        let holds = state.machine.holds_slot();
        drop(state);
        if holds {
            map.live.push(session.clone());
        }
        Some((session, pending))
    }

    fn evict_one(&self, map: &Map, is_thread: bool) -> Option<(Arc<Session>, Pending)> {
        let mut candidates: Vec<(UnixMs, &Arc<Session>)> = map
            .live
            .iter()
            .filter(|s| s.is_thread() == is_thread)
            .filter_map(|s| {
                let state = s.state();
                state.may_be_closed().then_some((state.last_used_ms, s))
            })
            .collect();
        candidates.sort_by_key(|(used, _)| *used);
        let session = candidates.first().map(|(_, s)| (*s).clone())?;
        let mut state = session.state();
        // Looked at again: between two takings of its lock a message may have come. Then the end of that turn asks anew.
        if !state.may_be_closed() {
            return None;
        }
        log::info!("session {}: closed to make room", state.id);
        let (pending, _) = session.apply_locked(&mut state, session.way_to_close(), None);
        drop(state);
        Some((session, pending))
    }

    /// True if the id belongs to another conversation than `session`, called `mine` now. An object that somebody's look
    /// at a file left, and nobody uses, is none.
    fn is_taken(map: &Map, session: &Arc<Session>, mine: &SessionId, id: &SessionId) -> bool {
        let other = map.by_id.get(id).filter(|other| !Arc::ptr_eq(other, session));
        let is_used = other.is_some_and(|other| {
            let state = other.state();
            other.is_thread() || state.pins > 0 || state.machine.holds_slot() || !state.machine.is_settled()
        });
        let is_alias_of_another = map.aliases.contains_key(id) && Self::canonical(map, id) != *mine;
        is_used || is_alias_of_another || map.known.contains_key(id)
    }

    /// A conversation got another id from its agent: both lead to it from now on. After a reset of the conversation
    /// (`cleared`) the old id stays a conversation of its own.
    ///
    /// # Errors
    /// `internal` if the id is another conversation's: both keep their ids, and the agent must go.
    pub fn rename(&self, session: &Arc<Session>, id: &SessionId, cleared: bool) -> Result<()> {
        let was = {
            let mut map = self.sessions.lock();
            // Before the lock of this one: two of a kind are never held at once.
            let mine = session.id();
            if mine == *id {
                return Ok(());
            }
            if Self::is_taken(&map, session, &mine, id) {
                return Err(Error::internal(format!("the agent answers as {id}, which is another conversation")));
            }
            let mut state = session.state();
            let was = std::mem::replace(&mut state.id, id.clone());
            // What was cleared has no transcript under its new id before the agent's first line.
            state.resumable &= !cleared;
            // Nothing is known of the new file yet.
            (state.folder, state.anchor) = (None, None);
            map.by_id.remove(&was);
            map.aliases.remove(id);
            map.by_id.insert(id.clone(), session.clone());
            let row = row_of(&session.kind, &state);
            if cleared {
                state.label = None;
            } else {
                map.aliases.insert(was.clone(), id.clone());
                map.known.remove(&was);
            }
            map.known.insert(id.clone(), row.clone());
            if map.main.as_ref() == Some(&was) {
                map.main = Some(id.clone());
            }
            // Queued inside both locks: what is recorded for the new id comes after this.
            let json = serde_json::to_string(&state.features).unwrap_or_default();
            let mut changes = vec![Change::Session(row), Change::Features { session: id.clone(), json }];
            changes.push(if cleared {
                Change::Move { was: was.clone(), now: id.clone() }
            } else {
                Change::Alias { was: was.clone(), now: id.clone() }
            });
            let event = KeptEvent { event: "chat-session-assigned", data: json!({"sessionId": id, "was": was}) };
            match self.context.journal.reserve(1) {
                Ok(place) => {
                    let unit = Unit { changes, events: vec![event] };
                    self.context.journal.owe(unit, place, Box::new(|_| ()));
                }
                Err(e) => log::error!("session {was}: its new id {id} is not recorded: {e}"),
            }
            was
        };
        self.context.archive.remember(id, None);
        log::info!("session {was} is {id} now");
        self.write_files();
        Ok(())
    }

    // ---- time ----

    /// Reports [`Fact::RetryDue`] to the session after `ms` milliseconds.
    pub fn retry_in(&self, session: &Arc<Session>, ms: u64) {
        self.at(session, Duration::from_millis(ms), Due::Retry);
    }

    /// Has the frames of a turn that just ended forgotten in time.
    pub fn forget_frames_later(&self, session: &Arc<Session>) {
        self.at(session, super::turns::KEPT_AFTER_END, Due::Forget);
    }

    /// Has a dump logged if the session is still in the phase it entered at `since_ms` when `stuck-s` is over.
    pub fn watch_phase(&self, session: &Arc<Session>, kind: PhaseKind, since_ms: UnixMs) {
        self.at(session, Duration::from_secs(self.context.config.stuck_s), Due::Left(kind, since_ms));
    }

    fn at(&self, session: &Arc<Session>, after: Duration, what: Due) {
        let at = Instant::now() + after;
        let mut clock = self.clock.lock();
        let is_next = clock.timers.peek().is_none_or(|next| at < next.at);
        clock.timers.push(Timer { at, session: Arc::downgrade(session), what });
        drop(clock);
        if is_next {
            self.clock_changed.notify_all();
        }
    }

    /// Has the transcript searched for a turn, on the `recover` thread.
    pub fn look_up(&self, session: &Arc<Session>, turn: TurnId, messages: Vec<MessageUuid>) {
        self.ask(LookUp::Turn { session: session.clone(), turn, messages });
    }

    /// Has the transcript searched for messages that wait since an earlier life, on the `recover` thread.
    pub fn look_up_queue(&self, session: &Arc<Session>, messages: Vec<Arc<Message>>) {
        self.ask(LookUp::Queue { session: session.clone(), messages });
    }

    fn ask(&self, job: LookUp) {
        if let Some(queue) = self.look_ups.lock().as_ref() {
            // The receiver lives as long as the sender; a closed queue means the server is gone.
            let _ = queue.send(job);
        }
    }

    /// Closes runs that nobody used for `idle-close-s`; returns when the next may be due.
    fn close_idle(&self) -> Duration {
        let limit_ms = i64::try_from(self.context.config.idle_close_s.saturating_mul(1000)).unwrap_or(i64::MAX);
        let now = clock::now_ms();
        let mut next_ms = limit_ms;
        let mut todo = Vec::new();
        {
            let map = self.sessions.lock();
            for session in &map.live {
                let mut state = session.state();
                if !state.may_be_closed() {
                    continue;
                }
                let idle_since = state.since_ms.max(state.last_used_ms);
                let left = idle_since.saturating_add(limit_ms) - now;
                if left <= 0 {
                    log::info!("session {}: closed after {} s without a turn", state.id, limit_ms / 1000);
                    let (pending, _) = session.apply_locked(&mut state, session.way_to_close(), None);
                    drop(state);
                    todo.push((session.clone(), pending));
                } else {
                    next_ms = next_ms.min(left);
                }
            }
        }
        for (session, pending) in todo {
            session.run(pending);
        }
        Duration::from_millis(u64::try_from(next_ms).unwrap_or(1).max(1))
    }

    // ---- files ----

    fn write_files(&self) {
        let _alone = self.files.lock();
        let (main, history) = {
            let map = self.sessions.lock();
            let mut rows: Vec<_> = map.known.values().filter(|r| r.thread.is_none()).cloned().collect();
            rows.sort_by_key(|r| std::cmp::Reverse(r.last_used_ms));
            rows.truncate(HISTORY_ROWS_MAX);
            (map.main.clone(), rows)
        };
        let dir = self.context.config.state_dir();
        let history: Vec<_> = history
            .iter()
            .map(|r| json!({"sessionId": r.session, "label": r.label, "lastUsedAt": clock::rfc3339(r.last_used_ms)}))
            .collect();
        for (name, value) in [(MAIN_FILE, json!({"sessionId": main})), (HISTORY_FILE, json!(history))] {
            if let Err(e) = write_whole(&dir.join(name), &value) {
                log::warn!("{name}: {e}");
            }
        }
    }

    // ---- the end ----

    /// Begins nothing more; lets turns in flight finish for `drain`, then closes every run, then ends them. True if all
    /// runs were reaped. `hurry` cuts the first wait short.
    #[must_use]
    pub fn shut_down(&self, drain: Duration, hurry: &dyn Fn() -> bool, last_limit: Duration) -> bool {
        let all: Vec<_> = {
            let mut map = self.sessions.lock();
            map.draining = true;
            map.by_id.values().cloned().collect()
        };
        for session in &all {
            session.apply_reserved(Fact::Drain);
        }
        let deadline = Instant::now() + drain;
        while !hurry() && Instant::now() < deadline && all.iter().any(|s| s.state().machine.is_busy()) {
            let busy = all.iter().find(|s| s.state().machine.is_busy());
            if let Some(busy) = busy {
                // Wakes at every change of that session; the slice bounds how late a second signal is seen.
                let slice = deadline.min(Instant::now() + Duration::from_millis(50));
                let _ = busy.wait_for_idle(slice);
            }
        }
        for session in &all {
            let run = {
                let state = session.state();
                state.machine.phase().run().or(state.starting.as_ref()).cloned()
            };
            if let Some(run) = run {
                session.apply_reserved(Fact::Restart);
                run.close();
            }
        }
        // A start that waits for its hook goes on to see that its run is closed.
        self.context.hooks.cancel();
        let last = Instant::now() + last_limit;
        let gone = wait_until_idle(&all, last.checked_sub(Duration::from_secs(1)).unwrap_or(last));
        let gone = gone || {
            for session in &all {
                let run = session.state().machine.phase().run().cloned();
                if let Some(run) = run {
                    run.kill_now();
                }
            }
            wait_until_idle(&all, last)
        };
        self.look_ups.lock().take();
        self.clock.lock().going_down = true;
        self.clock_changed.notify_all();
        for thread in self.threads.lock().drain(..) {
            if !thread.join_within(Duration::from_millis(500)) {
                log::warn!("thread {} did not end in time", thread.name());
            }
        }
        gone
    }
}

/// Messages of a thread that a dead server left unanswered.
fn tell_failed(context: &Context, session: &SessionId, messages: Vec<MessageUuid>) {
    let Some(first) = messages.first() else { return };
    let error = "the server ended before the turn was over";
    let event = KeptEvent {
        event: "chat-turn-failed",
        data: json!({
            "sessionId": session, "turnId": first, "messageUuids": messages, "error": error, "willRetry": false,
        }),
    };
    let mut changes: Vec<_> = messages
        .iter()
        .map(|message| Change::ThreadAnswer { message: message.clone(), responses_json: "[]".into(), success: false })
        .collect();
    changes.push(Change::Clear { messages, why: error.into() });
    match context.journal.reserve_for_outcome(1) {
        Ok(place) => context.journal.owe(Unit { changes, events: vec![event] }, place, Box::new(|_| ())),
        Err(e) => log::error!("session {session}: unanswered messages of a thread are not told: {e}"),
    }
}

/// The planted fault: what was dispatched goes back to the front of the queue, and no transcript is looked at.
fn remerge(context: &Context, owed: &mut crate::journal::Owed) {
    let Some(turn) = owed.turn.take() else { return };
    let changes = vec![Change::Recall { turn: turn.turn.clone() }, Change::Split { turn: turn.turn }];
    if let Ok(place) = context.journal.reserve_for_outcome(1) {
        context.journal.owe(Unit { changes, events: vec![] }, place, Box::new(|_| ()));
    }
    owed.queue.splice(0..0, turn.members);
}

fn wait_until_idle(all: &[Arc<Session>], deadline: Instant) -> bool {
    all.iter().all(|session| {
        let mut state = session.state();
        while state.machine.phase().kind() != PhaseKind::Idle {
            if state.wait_until(session.changed(), deadline) {
                return state.machine.phase().kind() == PhaseKind::Idle;
            }
        }
        true
    })
}

fn sweep_leftovers(context: &Context) {
    let gone = context.leftovers.sweep(&context.mark);
    if gone.is_empty() {
        return;
    }
    let changes = gone.into_iter().map(|session| Change::AgentGone { session }).collect();
    if let Ok(place) = context.journal.reserve_for_outcome(1) {
        context.journal.owe(Unit { changes, events: vec![] }, place, Box::new(|_| ()));
    }
}

fn look_up(job: LookUp) {
    match job {
        LookUp::Turn { session, turn, messages } => {
            let ids: Vec<&str> =
                std::iter::once(turn.as_str()).chain(messages.iter().map(MessageUuid::as_str)).collect();
            let seen = {
                let _at = doing(Doing::ReadFile);
                session.seen(&ids)
            };
            log::info!("session {}: turn {turn} in the transcript: {seen:?}", session.id());
            session.apply_reserved(Fact::LookedUp(turn, seen));
        }
        LookUp::Queue { session, messages } => {
            let fact = {
                let _at = doing(Doing::ReadFile);
                session.seen_of_queue(&messages)
            };
            session.apply_reserved(fact);
        }
    }
}

fn tell_if_stuck(session: &Session, kind: PhaseKind, since_ms: UnixMs) {
    let id = {
        let state = session.state();
        if state.machine.phase().kind() != kind || state.since_ms != since_ms {
            return;
        }
        state.id.clone()
    };
    let s = session.context.config.stuck_s;
    crate::dump::alarm(&format!("session {id} has been {} for more than {s} s", kind.word()));
}

/// Body of the thread `sweep`. Wakes at named times only: a pause that is over, a phase that should be left, the next
/// session to close, frames to forget, and half the supervisor's watchdog time if it has one.
fn sweep(registry: &Weak<Registry>) {
    let watchdog = crate::supervisor::watchdog_interval();
    loop {
        let Some(registry) = registry.upgrade() else { return };
        let now = Instant::now();
        // Takes every lock a request takes: who comes by here serves.
        let mut idle_next = now + registry.close_idle();
        registry.context.turns.forget_ended();
        if let Some(every) = watchdog {
            crate::supervisor::notify("WATCHDOG=1");
            idle_next = idle_next.min(now + every);
        }
        let mut due = Vec::new();
        {
            let mut clock = registry.clock.lock();
            let now = Instant::now();
            while clock.timers.peek().is_some_and(|t| t.at <= now) {
                due.extend(clock.timers.pop().and_then(|t| Some((t.session.upgrade()?, t.what))));
            }
            if clock.going_down {
                return;
            }
            if due.is_empty() {
                let next = clock.timers.peek().map_or(idle_next, |t| t.at.min(idle_next));
                let _at = doing(Doing::WaitTime);
                registry.clock_changed.wait_until(&mut clock, next);
            }
        }
        for (session, what) in due {
            match what {
                Due::Retry => {
                    session.apply(Fact::RetryDue);
                }
                Due::Left(kind, since_ms) => tell_if_stuck(&session, kind, since_ms),
                // The next round does it.
                Due::Forget => {}
            }
        }
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

fn listed(session_id: SessionId, label: Option<String>, last_used_ms: UnixMs) -> Listed {
    Listed { session_id, label, last_used_at: clock::rfc3339(last_used_ms), running: false, busy: false, queued: 0 }
}

fn read_main(context: &Context) -> Option<SessionId> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Main {
        session_id: Option<SessionId>,
    }
    let path = context.config.state_dir().join(MAIN_FILE);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
        Err(e) => {
            log::warn!("{}: {e}", path.display());
            return None;
        }
    };
    match serde_json::from_slice::<Main>(&text) {
        Ok(main) => main.session_id,
        Err(e) => {
            set_aside(&path, &e.to_string());
            None
        }
    }
}

/// Renames a state file that nobody can read, so that it neither stops the start nor is lost.
fn set_aside(path: &PathBuf, why: &str) {
    let aside = path.with_extension(format!("set-aside-{}", clock::now_ms()));
    match std::fs::rename(path, &aside) {
        Ok(()) => log::error!("{} is not what we write ({why}): kept as {}", path.display(), aside.display()),
        Err(e) => log::error!("{} is not what we write ({why}) and cannot be set aside: {e}", path.display()),
    }
}

/// Writes a small file whole: a reader sees the old or the new one, also after a crash.
fn write_whole(path: &std::path::Path, value: &serde_json::Value) -> std::io::Result<()> {
    use std::io::Write as _;
    let dir = path.parent().ok_or_else(|| std::io::Error::other("a state file lies in a folder"))?;
    let fresh = path.with_extension("new");
    let mut file = std::fs::File::create(&fresh)?;
    file.write_all(value.to_string().as_bytes())?;
    file.sync_data()?;
    std::fs::rename(&fresh, path)?;
    std::fs::File::open(dir)?.sync_data()
}
