//! The pool of thread sessions: one is active, the others are parked, waiting messages are served in order of arrival.
//! Leaves turns to `engine`, blocks and rotation to `thread`. Rule a change could break: the active session is parked
//! only when nothing of it is in flight, and a request that waits past its deadline changes nothing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use super::chat::{self, Draft, Sent};
use super::engine::{Kind, Session};
use super::registry::Registry;
use super::thread::Record;
use crate::clock;
use crate::error::{Code, Error, Result};
use crate::ids::{MessageUuid, SessionId};
use crate::inbox::Image;
use crate::journal::{Change, Claim, ClaimAnswer, KeptAnswer, KeptEvent, Unit, content_hash};
use crate::lifecycle::PhaseKind;
use crate::lifecycle::machine::Fact;
use crate::sync::{Condvar, Mutex};
use crate::threads::{Doing, at_work_for, doing};

/// How long a message waits for the turns before it (CONTRACT §4).
pub const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// Longest a parked run may take to be reaped: stdin end 2 s, SIGTERM 5 s, SIGKILL, and air.
const REAP_LIMIT: Duration = Duration::from_secs(20);

/// What a thread's message was answered.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// Its response blocks, in order.
    pub responses: Vec<String>,
    /// The turn ended well.
    pub success: bool,
    /// The session that answered.
    pub session_id: SessionId,
}

impl Answer {
    fn kept(kept: &KeptAnswer, session_id: SessionId) -> Self {
        let responses = serde_json::from_str(&kept.responses_json).unwrap_or_default();
        Self { responses, success: kept.success, session_id }
    }
}

/// A message of an outside channel.
#[derive(Debug)]
pub struct ThreadMessage {
    /// The thread's reference.
    pub thread: String,
    /// The words.
    pub message: String,
    /// What the channel says the thread is.
    pub description: Option<String>,
    /// The channel's key of this message.
    pub message_id: Option<crate::ids::MessageId>,
}

#[derive(Default)]
struct Line {
    next_ticket: u64,
    /// Tickets in order of arrival; the first may act.
    waiting: VecDeque<u64>,
    active: Option<Arc<Session>>,
    records: BTreeMap<String, Record>,
}

/// The pool. One for a server.
pub struct Pool {
    registry: Arc<Registry>,
    /// A leaf lock: taken last and alone.
    line: Mutex<Line>,
    moved: Condvar,
    wait_limit: Duration,
}

/// The right to act, until dropped.
struct Turnstile<'a> {
    pool: &'a Pool,
    ticket: u64,
}

impl Drop for Turnstile<'_> {
    fn drop(&mut self) {
        self.pool.line.lock().waiting.retain(|t| *t != self.ticket);
        self.pool.moved.notify_all();
    }
}

impl Pool {
    /// A pool over the records the journal kept.
    #[must_use]
    pub fn new(registry: Arc<Registry>, kept: &[(String, String)], wait_limit: Duration) -> Self {
        let mut records = BTreeMap::new();
        for (thread, text) in kept {
            match serde_json::from_str(text) {
                Ok(record) => {
                    records.insert(thread.clone(), record);
                }
                Err(e) => log::error!("the record of thread {thread:?} is not what we write ({e}): it begins afresh"),
            }
        }
        Self { registry, line: Mutex::new(Line { records, ..Line::default() }), moved: Condvar::new(), wait_limit }
    }

    /// Answers a message of a thread; blocks until its turn is over.
    ///
    /// # Errors
    /// `busy` if the turns before it do not end in time, `content_conflict`, `cannot_record`.
    pub fn send(self: &Arc<Self>, message: ThreadMessage) -> Result<Answer> {
        let deadline = Instant::now() + self.wait_limit;
        let none: &[Image] = &[];
        let claim = message
            .message_id
            .clone()
            .map(|id| Claim { id, hash: content_hash(&message.message, none, &[message.thread.as_str()]) });
        if let Some(answer) = self.kept_answer(claim.as_ref())? {
            return Ok(answer);
        }
        let known = self.line.lock().records.get(&message.thread).and_then(|record| record.session_id.clone());
        let turnstile = {
            let _for = known.as_ref().map(at_work_for);
            self.wait_in_line(deadline)?
        };
        // The first send of this messageId may have been in the line before us.
        if let Some(answer) = self.kept_answer(claim.as_ref())? {
            return Ok(answer);
        }
        let session = self.activate(&message, deadline)?;
        let draft = Draft {
            text: message.message.clone(),
            images: Vec::new(),
            message_id: message.message_id.clone(),
            seeds: Vec::new(),
        };
        let late = {
            let (pool, session) = (Arc::clone(self), session.clone());
            let (thread, description) = (message.thread.clone(), message.description.clone());
            Box::new(move || pool.count(&thread, description, &session))
        };
        let sent = chat::accept(&session, draft, claim, Some(message.thread.clone()), Some(late));
        if !matches!(sent, Ok(Sent::Accepted { .. })) {
            self.registry.forget_unrecorded(&session);
        }
        let uuid = match sent? {
            Sent::Accepted { message: uuid, .. } => uuid,
            Sent::Repeat(first) => {
                drop(turnstile);
                return self.answer_of(&first);
            }
        };
        self.registry.recorded(&session);
        self.count(&message.thread, message.description.clone(), &session);
        // The turnstile is held until the answer is kept: the next one in line sees what a failed turn changed.
        let answer = wait_for_answer(&session, &uuid)?;
        if !answer.success {
            self.begin_afresh(&message.thread, &session.id());
        }
        Ok(answer)
    }

    /// The answer a message got, or will get.
    fn answer_of(&self, first: &ClaimAnswer) -> Result<Answer> {
        // Looked for without its session: a crash may have left the answer and nothing else.
        if let Some(kept) = self.registry.context().journal.thread_answer(&first.message_uuid)? {
            return Ok(Answer::kept(&kept, self.registry.current_id(&first.session)));
        }
        wait_for_answer(&self.registry.find(&first.session)?, &first.message_uuid)
    }

    /// The answer of a repeat: kept, or still being made.
    fn kept_answer(&self, claim: Option<&Claim>) -> Result<Option<Answer>> {
        let Some(claim) = claim else { return Ok(None) };
        let journal = &self.registry.context().journal;
        let first = match journal.claim_answer(claim)? {
            None => return Ok(None),
            Some(Ok(first)) => first,
            Some(Err(_)) => {
                let text = format!("messageId {:?} was used for other content", claim.id.as_str());
                return Err(Error::new(Code::ContentConflict, text));
            }
        };
        self.answer_of(&first).map(Some)
    }

    fn wait_in_line(&self, deadline: Instant) -> Result<Turnstile<'_>> {
        let mut line = self.line.lock();
        let ticket = line.next_ticket;
        line.next_ticket += 1;
        line.waiting.push_back(ticket);
        let turnstile = Turnstile { pool: self, ticket };
        #[cfg(feature = "model")]
        if crate::model::is_planted(crate::model::Planted::ParkWithoutWaiting) {
            drop(line);
            return Ok(turnstile);
        }
        while line.waiting.front() != Some(&ticket) {
            let _at = doing(Doing::WaitPlace);
            if self.moved.wait_until(&mut line, deadline).timed_out() && line.waiting.front() != Some(&ticket) {
                drop(line);
                drop(turnstile);
                return Err(self.busy());
            }
        }
        drop(line);
        Ok(turnstile)
    }

    fn busy(&self) -> Error {
        Error::new(
            Code::Busy,
            format!(
                "the turn of another thread did not end within {} s; nothing was changed",
                self.wait_limit.as_secs()
            ),
        )
    }

    /// Makes the thread's session the active one, parking the other after its turn. Called by the first in line only.
    fn activate(&self, message: &ThreadMessage, deadline: Instant) -> Result<Arc<Session>> {
        let now = clock::now_ms();
        let (active, known) = {
            let line = self.line.lock();
            let record = line.records.get(&message.thread);
            (line.active.clone(), record.and_then(|r| r.session_for(now)).cloned())
        };
        #[cfg(feature = "model")]
        let waits = !crate::model::is_planted(crate::model::Planted::ParkWithoutWaiting);
        #[cfg(not(feature = "model"))]
        let waits = true;
        if let Some(active) = &active
            && waits
            && !active.wait_until_settled(deadline)
        {
            return Err(self.busy());
        }
        let session = self.session_of(message, known.as_ref())?;
        if let Some(active) = active.filter(|a| !Arc::ptr_eq(a, &session)) {
            active.apply_reserved(Fact::Park);
            if !active.wait_until_gone(Instant::now() + REAP_LIMIT) {
                self.registry.forget_unrecorded(&session);
                return Err(Error::internal(format!("the run of thread session {} does not end", active.id())));
            }
        }
        self.line.lock().active = Some(session.clone());
        Ok(session)
    }

    fn session_of(&self, message: &ThreadMessage, known: Option<&SessionId>) -> Result<Arc<Session>> {
        if let Some(id) = known {
            match self.registry.find(id) {
                Ok(session) if session.has_its_transcript() => return Ok(session),
                Ok(_) => self.note(message, id, "its transcript is gone; the thread goes on in a fresh conversation"),
                Err(e) => self.note(message, id, e.text()),
            }
        }
        let session = self.registry.coin(Kind::Thread(message.thread.clone()));
        {
            let mut state = session.state();
            state.preamble = Some(super::thread::preamble(&message.thread, message.description.as_deref()));
        }
        self.registry.keep(&session);
        Ok(session)
    }

    /// A note that people of the thread see: once for each conversation that is lost.
    fn note(&self, message: &ThreadMessage, session: &SessionId, why: &str) {
        log::warn!("thread {:?}: conversation {session}: {why}", message.thread);
        let event = KeptEvent {
            event: "thread-response",
            data: json!({"thread": message.thread, "sessionId": session, "text": format!("[{why}]"), "notice": true}),
        };
        self.record(Unit { changes: vec![], events: vec![event] });
    }

    fn record(&self, unit: Unit) {
        let journal = &self.registry.context().journal;
        match journal.reserve_for_outcome(1) {
            Ok(place) => journal.owe(unit, place, Box::new(|_| ())),
            Err(e) => log::error!("threads: a record finds no place: {e}"),
        }
    }

    fn count(&self, thread: &str, description: Option<String>, session: &Session) {
        let now = clock::now_ms();
        let id = session.id();
        let record = {
            let mut line = self.line.lock();
            let record = line.records.entry(thread.to_owned()).or_insert_with(|| Record::fresh(now));
            if record.session_id.as_ref() != Some(&id) {
                *record = Record { description: record.description.clone(), ..Record::fresh(now) };
                record.session_id = Some(id);
            }
            record.last_used_ms = now;
            record.message_count += 1;
            if description.is_some() {
                record.description = description;
            }
            record.clone()
        };
        self.keep(thread, &record);
    }

    /// After a turn that ended in error the thread's next message begins a fresh session.
    fn begin_afresh(&self, thread: &str, session: &SessionId) {
        let record = {
            let mut line = self.line.lock();
            let Some(record) = line.records.get_mut(thread).filter(|r| r.session_id.as_ref() == Some(session)) else {
                return;
            };
            record.session_id = None;
            record.message_count = 0;
            record.clone()
        };
        self.keep(thread, &record);
    }

    fn keep(&self, thread: &str, record: &Record) {
        let json = serde_json::to_string(record).unwrap_or_default();
        self.record(Unit { changes: vec![Change::Thread { thread: thread.to_owned(), json }], events: vec![] });
    }

    /// The active thread, and every thread ever heard of.
    #[must_use]
    pub fn list(&self) -> serde_json::Value {
        let line = self.line.lock();
        let active = line.active.clone();
        let records = line.records.clone();
        drop(line);
        let active = active.map(|session| match &session.kind {
            Kind::Thread(thread) => thread.clone(),
            Kind::Chat => String::new(),
        });
        let threads: Vec<_> = records
            .iter()
            .map(|(thread, r)| {
                json!({
                    "thread": thread, "sessionId": r.session_id, "createdAt": clock::rfc3339(r.created_ms),
                    "lastUsedAt": clock::rfc3339(r.last_used_ms), "messageCount": r.message_count,
                    "description": r.description,
                })
            })
            .collect();
        json!({"active": active, "threads": threads})
    }
}

/// Waits until the message has its answer. The turn itself has no limit; its end is certain (result, death or stop).
fn wait_for_answer(session: &Arc<Session>, message: &MessageUuid) -> Result<Answer> {
    let _for = at_work_for(&session.id());
    let journal = &session.context.journal;
    loop {
        let commits = session.state().commits;
        if let Some(kept) = journal.thread_answer(message)? {
            return Ok(Answer::kept(&kept, session.id()));
        }
        let _at = doing(Doing::WaitTurn);
        let mut state = session.state();
        while state.commits == commits {
            state.wait(session.changed());
        }
    }
}

impl Session {
    /// Waits until nothing is in flight, being prepared or waiting, until `deadline` at most. True if so.
    #[must_use]
    pub fn wait_until_settled(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, |state| state.machine.is_settled())
    }

    /// Waits until the last run was reaped, until `deadline` at most. True if so.
    #[must_use]
    pub fn wait_until_gone(&self, deadline: Instant) -> bool {
        self.wait_until(deadline, |state| state.machine.phase().kind() == PhaseKind::Idle)
    }

    fn has_its_transcript(&self) -> bool {
        let (id, resumable) = {
            let state = self.state();
            (state.id.clone(), state.resumable)
        };
        !resumable || self.context.archive.path_of(&id).is_some()
    }
}
