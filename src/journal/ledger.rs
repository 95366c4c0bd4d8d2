//! The delivery ledger: which moves are legal, and the rows that make them.
//!
//! A unit is first planned against what is in memory (all of it or, with an error, none of it), then its statements run.
//! Leaves transactions to `writer`. Rule a change could break: whatever the memory learns is in the undo log until the
//! commit, so after a rollback memory and database say the same.

use std::collections::HashMap;

use rusqlite::{Connection, params};

use super::trouble::Faults;
use super::types::{Acceptance, Change, ClaimAnswer, MessageState};
use crate::clock::UnixMs;
use crate::error::{Code, Error, Result};
use crate::ids::{EventId, MessageId, MessageUuid, SessionId, TurnId};

/// A message that is owed or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Open {
    pub mid: EventId,
    pub session: SessionId,
    pub failed: bool,
    pub turn: Option<TurnId>,
    pub claim: Option<MessageId>,
    pub has_images: bool,
}

/// An unfinished turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OpenTurn {
    pub session: SessionId,
    pub members: Vec<MessageUuid>,
    pub dispatched: bool,
}

enum Undo {
    Open(MessageUuid, Option<Open>),
    Turn(TurnId, Option<OpenTurn>),
    Ord(i64),
}

/// What is owed, in memory.
#[derive(Default)]
pub(super) struct Ledger {
    pub open: HashMap<MessageUuid, Open>,
    pub turns: HashMap<TurnId, OpenTurn>,
    /// The next place at the end of all queues.
    pub next_ord: i64,
    undo: Vec<Undo>,
}

/// One statement to run.
enum Op<'a> {
    PutTurn { turn: TurnId, session: SessionId, members: String, attempt: u32, agent: Option<&'a str> },
    Members { turn: TurnId, members: String },
    Recalled { turn: &'a TurnId },
    Stopped { turn: &'a TurnId },
    DropTurn { turn: TurnId },
    Delivered { turn: &'a TurnId, session: SessionId, members: String, outcome: &'a str },
    DropOpen { mid: EventId, has_images: bool },
    Cleared { claim: MessageId, mid: EventId },
    Failed { mid: EventId, error: &'a str },
    Retried { mid: EventId, ord: i64 },
    Alone { mid: EventId },
    Moved { was: &'a SessionId, now: &'a SessionId },
    Fact(&'a Change),
}

/// Member lists are kept as one text: uuids hold no comma.
pub(super) fn join(members: &[MessageUuid]) -> String {
    let mut text = String::with_capacity(members.len() * 37);
    for member in members {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(member.as_str());
    }
    text
}

/// Runs one cached statement.
pub(super) fn run(db: &Connection, faults: &Faults, sql: &str, args: impl rusqlite::Params) -> rusqlite::Result<usize> {
    faults.check()?;
    db.prepare_cached(sql)?.execute(args)
}

impl Ledger {
    /// Forgets how to undo: the transaction is committed.
    pub fn committed(&mut self) {
        self.undo.clear();
    }

    /// Back to what it was at the last [`Ledger::committed`].
    pub fn rolled_back(&mut self) {
        self.undo_to(0);
    }

    fn undo_to(&mut self, mark: usize) {
        while self.undo.len() > mark {
            match self.undo.pop() {
                Some(Undo::Open(key, Some(was))) => {
                    self.open.insert(key, was);
                }
                Some(Undo::Open(key, None)) => {
                    self.open.remove(&key);
                }
                Some(Undo::Turn(key, Some(was))) => {
                    self.turns.insert(key, was);
                }
                Some(Undo::Turn(key, None)) => {
                    self.turns.remove(&key);
                }
                Some(Undo::Ord(was)) => self.next_ord = was,
                None => {}
            }
        }
    }

    fn take_ord(&mut self) -> i64 {
        self.undo.push(Undo::Ord(self.next_ord));
        self.next_ord += 1;
        self.next_ord - 1
    }

    fn set_open(&mut self, key: &MessageUuid, value: Option<Open>) {
        let was = match value {
            Some(open) => self.open.insert(key.clone(), open),
            None => self.open.remove(key),
        };
        self.undo.push(Undo::Open(key.clone(), was));
    }

    fn change_open(&mut self, key: &MessageUuid, change: impl FnOnce(&mut Open)) {
        if let Some(open) = self.open.get_mut(key) {
            self.undo.push(Undo::Open(key.clone(), Some(open.clone())));
            change(open);
        }
    }

    fn set_turn(&mut self, key: &TurnId, value: Option<OpenTurn>) {
        let was = match value {
            Some(turn) => self.turns.insert(key.clone(), turn),
            None => self.turns.remove(key),
        };
        self.undo.push(Undo::Turn(key.clone(), was));
    }

    /// How the message stands; `None` if it is no longer owed.
    pub fn state_of(&self, message: &MessageUuid) -> Option<MessageState> {
        let open = self.open.get(message)?;
        let dispatched = open.turn.as_ref().and_then(|turn| self.turns.get(turn)).is_some_and(|turn| turn.dispatched);
        Some(match (open.failed, dispatched) {
            (true, _) => MessageState::Failed,
            (false, true) => MessageState::Dispatched,
            (false, false) => MessageState::Accepted,
        })
    }

    /// Records a message whose event has the id `event_id`.
    pub fn accept(
        &mut self,
        db: &Connection,
        faults: &Faults,
        a: &Acceptance,
        event_id: EventId,
    ) -> rusqlite::Result<()> {
        let message = &a.message;
        let claim = a.claim.as_ref().map(|claim| claim.id.clone());
        let ord = self.take_ord();
        run(
            db,
            faults,
            "INSERT INTO open(mid, ord, uuid, session, at_ms, images, claim, thread, user, text)
             VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            params![
                event_id,
                ord,
                message.uuid.as_str(),
                a.session.as_str(),
                message.at_ms,
                i64::try_from(message.images.len()).unwrap_or(i64::MAX),
                claim.as_ref().map(MessageId::as_str),
                a.thread,
                message.user,
                message.text
            ],
        )?;
        for (n, image) in message.images.iter().enumerate() {
            run(
                db,
                faults,
                "INSERT INTO image(mid, n, number, mime, bytes) VALUES(?1, ?2, ?3, ?4, ?5)",
                params![event_id, i64::try_from(n).unwrap_or(i64::MAX), image.number, image.mime, &image.bytes[..]],
            )?;
        }
        let open = Open {
            mid: event_id,
            session: a.session.clone(),
            failed: false,
            turn: None,
            claim,
            has_images: !message.images.is_empty(),
        };
        self.set_open(&message.uuid, Some(open));
        Ok(())
    }

    /// Makes all changes or, with a logic error inside the `Ok`, none.
    pub fn apply(
        &mut self,
        db: &Connection,
        faults: &Faults,
        changes: &[Change],
        now: UnixMs,
    ) -> rusqlite::Result<Result<()>> {
        let mark = self.undo.len();
        let mut ops = Vec::with_capacity(changes.len() + 4);
        for change in changes {
            if let Err(refused) = self.plan(change, &mut ops) {
                self.undo_to(mark);
                return Ok(Err(refused));
            }
        }
        for op in ops {
            op.run(db, faults, now)?;
        }
        Ok(Ok(()))
    }

    fn plan<'a>(&mut self, change: &'a Change, ops: &mut Vec<Op<'a>>) -> Result<()> {
        match change {
            Change::Dispatch { session, turn, members, attempt, agent } => {
                self.plan_dispatch(session, turn, members)?;
                ops.push(Op::PutTurn {
                    turn: turn.clone(),
                    session: session.clone(),
                    members: join(members),
                    attempt: *attempt,
                    agent: agent.as_deref(),
                });
            }
            Change::Found { session, turn, messages, outcome } => {
                let mut found = Vec::new();
                for message in messages {
                    self.leave_turn(message, ops);
                    if self.drop_open(message, ops).is_some() {
                        found.push(message.clone());
                    }
                }
                if !found.is_empty() {
                    ops.push(Op::Delivered { turn, session: session.clone(), members: join(&found), outcome });
                }
            }
            Change::Recall { turn } => match self.turns.get(turn).cloned() {
                Some(was) => {
                    self.set_turn(turn, Some(OpenTurn { dispatched: false, ..was }));
                    ops.push(Op::Recalled { turn });
                }
                None => log::warn!("journal: recall of turn {turn}, which is not open"),
            },
            Change::Stopped { turn } => {
                if self.turns.contains_key(turn) {
                    ops.push(Op::Stopped { turn });
                }
            }
            Change::Done { turn, outcome } => {
                // A turn that the agent began itself has no messages of ours, and so no row.
                if let Some(was) = self.turns.get(turn).cloned() {
                    for member in &was.members {
                        self.drop_open(member, ops);
                    }
                    self.set_turn(turn, None);
                    ops.push(Op::DropTurn { turn: turn.clone() });
                    let members = join(&was.members);
                    ops.push(Op::Delivered { turn, session: was.session, members, outcome });
                }
            }
            Change::Clear { messages, why: _ } => {
                for message in messages {
                    self.clear(message, ops);
                }
            }
            Change::Fail { messages, error } => {
                for message in messages {
                    self.leave_turn(message, ops);
                    if let Some(mid) = self.open.get(message).map(|open| open.mid) {
                        self.change_open(message, |open| open.failed = true);
                        ops.push(Op::Failed { mid, error });
                    }
                }
            }
            Change::Retry { message } => {
                let mid = self.failed(message)?;
                self.change_open(message, |open| open.failed = false);
                let ord = self.take_ord();
                ops.push(Op::Retried { mid, ord });
            }
            Change::Discard { message } => {
                self.failed(message)?;
                self.clear(message, ops);
            }
            Change::Split { turn } => match self.turns.get(turn).cloned() {
                Some(was) => {
                    for member in &was.members {
                        if let Some(mid) = self.open.get(member).map(|open| open.mid) {
                            self.change_open(member, |open| open.turn = None);
                            ops.push(Op::Alone { mid });
                        }
                    }
                    self.set_turn(turn, None);
                    ops.push(Op::DropTurn { turn: turn.clone() });
                }
                None => log::warn!("journal: split of turn {turn}, which is not open"),
            },
            Change::Alias { was, now } | Change::Move { was, now } => {
                let mine = |session: &SessionId| session == was;
                let messages: Vec<_> =
                    self.open.iter().filter(|(_, open)| mine(&open.session)).map(|(key, _)| key.clone()).collect();
                for message in &messages {
                    self.change_open(message, |open| open.session = now.clone());
                }
                let turns: Vec<_> = self
                    .turns
                    .iter()
                    .filter(|(_, turn)| mine(&turn.session))
                    .map(|(key, turn)| (key.clone(), OpenTurn { session: now.clone(), ..turn.clone() }))
                    .collect();
                for (key, turn) in turns {
                    self.set_turn(&key, Some(turn));
                }
                if matches!(change, Change::Alias { .. }) {
                    ops.push(Op::Fact(change));
                }
                ops.push(Op::Moved { was, now });
            }
            Change::Session(_)
            | Change::Agent { .. }
            | Change::AgentGone { .. }
            | Change::SetState { .. }
            | Change::Features { .. }
            | Change::ThreadAnswer { .. }
            | Change::Thread { .. } => ops.push(Op::Fact(change)),
        }
        Ok(())
    }

    fn plan_dispatch(&mut self, session: &SessionId, turn: &TurnId, members: &[MessageUuid]) -> Result<()> {
        if members.is_empty() {
            return Err(Error::internal(format!("dispatch of turn {turn} without messages")));
        }
        if let Some(was) = self.turns.get(turn)
            && was.members != members
        {
            return Err(Error::internal(format!("turn {turn} is dispatched again with other messages")));
        }
        if let Some((other, _)) = self.turns.iter().find(|(key, open)| open.session == *session && *key != turn) {
            return Err(Error::internal(format!("dispatch of turn {turn} while turn {other} is unfinished")));
        }
        for member in members {
            match self.open.get(member) {
                Some(open) if !open.failed && open.turn.as_ref().is_none_or(|of| of == turn) => {}
                Some(_) | None => {
                    return Err(Error::internal(format!("dispatch of message {member}, which is not accepted")));
                }
            }
        }
        for member in members {
            self.change_open(member, |open| open.turn = Some(turn.clone()));
        }
        let row = OpenTurn { session: session.clone(), members: members.to_vec(), dispatched: true };
        self.set_turn(turn, Some(row));
        Ok(())
    }

    /// The row of a failed message, for retry and discard.
    fn failed(&self, message: &MessageUuid) -> Result<EventId> {
        match self.open.get(message) {
            Some(open) if open.failed => Ok(open.mid),
            Some(_) => Err(Error::new(Code::NotFailed, format!("message {message} has not failed"))),
            None => Err(Error::new(Code::NotFound, format!("no message {message} is waiting"))),
        }
    }

    fn drop_open(&mut self, message: &MessageUuid, ops: &mut Vec<Op<'_>>) -> Option<Open> {
        let was = self.open.get(message).cloned()?;
        self.set_open(message, None);
        ops.push(Op::DropOpen { mid: was.mid, has_images: was.has_images });
        Some(was)
    }

    fn clear(&mut self, message: &MessageUuid, ops: &mut Vec<Op<'_>>) {
        self.leave_turn(message, ops);
        if let Some(was) = self.drop_open(message, ops)
            && let Some(claim) = was.claim
        {
            ops.push(Op::Cleared { claim, mid: was.mid });
        }
    }

    /// Takes a message out of its unfinished turn; the turn goes with its last member.
    fn leave_turn(&mut self, message: &MessageUuid, ops: &mut Vec<Op<'_>>) {
        let Some(turn) = self.open.get(message).and_then(|open| open.turn.clone()) else {
            return;
        };
        self.change_open(message, |open| open.turn = None);
        let Some(mut was) = self.turns.get(&turn).cloned() else {
            return;
        };
        was.members.retain(|member| member != message);
        if was.members.is_empty() {
            self.set_turn(&turn, None);
            ops.push(Op::DropTurn { turn });
        } else {
            let members = join(&was.members);
            self.set_turn(&turn, Some(was));
            ops.push(Op::Members { turn, members });
        }
    }
}

impl Op<'_> {
    fn run(self, db: &Connection, faults: &Faults, now: UnixMs) -> rusqlite::Result<()> {
        match self {
            Op::PutTurn { turn, session, members, attempt, agent } => run(
                db,
                faults,
                "INSERT INTO turn(turn, session, members, attempts, dispatched, agent) VALUES(?1, ?2, ?3, ?4, 1, ?5)
                 ON CONFLICT(turn) DO UPDATE SET attempts=excluded.attempts, dispatched=1, agent=excluded.agent",
                params![turn.as_str(), session.as_str(), members, attempt, agent],
            )?,
            Op::Members { turn, members } => {
                run(db, faults, "UPDATE turn SET members=?2 WHERE turn=?1", params![turn.as_str(), members])?
            }
            Op::Recalled { turn } => run(db, faults, "UPDATE turn SET dispatched=0 WHERE turn=?1", [turn.as_str()])?,
            Op::Stopped { turn } => run(db, faults, "UPDATE turn SET stopped=1 WHERE turn=?1", [turn.as_str()])?,
            Op::DropTurn { turn } => run(db, faults, "DELETE FROM turn WHERE turn=?1", [turn.as_str()])?,
            Op::Delivered { turn, session, members, outcome } => run(
                db,
                faults,
                "INSERT INTO delivered(session, at_ms, turn, members, outcome) VALUES(?1, ?2, ?3, ?4, ?5)",
                params![session.as_str(), now, turn.as_str(), members, outcome],
            )?,
            Op::DropOpen { mid, has_images } => {
                if has_images {
                    run(db, faults, "DELETE FROM image WHERE mid=?1", [mid])?;
                }
                run(db, faults, "DELETE FROM open WHERE mid=?1", [mid])?
            }
            // The claim may have lived out its days and be another message's by now.
            Op::Cleared { claim, mid } => {
                run(db, faults, "UPDATE claim SET cleared=1 WHERE id=?1 AND event_id=?2", params![claim.as_str(), mid])?
            }
            Op::Failed { mid, error } => {
                run(db, faults, "UPDATE open SET failed=1, error=?2 WHERE mid=?1", params![mid, error])?
            }
            Op::Retried { mid, ord } => {
                run(db, faults, "UPDATE open SET failed=0, error=NULL, ord=?2 WHERE mid=?1", params![mid, ord])?
            }
            Op::Alone { mid } => run(db, faults, "UPDATE open SET alone=1 WHERE mid=?1", [mid])?,
            Op::Moved { was, now } => {
                let ids = params![was.as_str(), now.as_str()];
                run(db, faults, "UPDATE open SET session=?2 WHERE session=?1", ids)?;
                run(db, faults, "UPDATE turn SET session=?2 WHERE session=?1", ids)?
            }
            Op::Fact(change) => fact(change, db, faults, now)?,
        };
        Ok(())
    }
}

fn fact(change: &Change, db: &Connection, faults: &Faults, now: UnixMs) -> rusqlite::Result<usize> {
    match change {
        Change::Session(row) => run(
            db,
            faults,
            "INSERT OR REPLACE INTO session(session, thread, created_ms, last_used_ms, label, resumable, folder, anchor)
             VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                row.session.as_str(),
                row.thread,
                row.created_ms,
                row.last_used_ms,
                row.label,
                row.resumable,
                row.folder,
                row.anchor.as_ref().map(TurnId::as_str)
            ],
        ),
        Change::Alias { was, now } => {
            // An agent may go back to an id it had: it leads nowhere else from now on.
            run(db, faults, "DELETE FROM alias WHERE was=?1", [now.as_str()])?;
            run(db, faults, "INSERT OR REPLACE INTO alias VALUES(?1, ?2)", params![was.as_str(), now.as_str()])
        }
        Change::Agent { session, pid, start_time } => run(
            db,
            faults,
            "INSERT OR REPLACE INTO agent VALUES(?1, ?2, ?3)",
            params![session.as_str(), pid, i64::try_from(*start_time).unwrap_or(i64::MAX)],
        ),
        Change::AgentGone { session } => run(db, faults, "DELETE FROM agent WHERE session=?1", [session.as_str()]),
        Change::SetState { key, value } => {
            run(db, faults, "INSERT OR REPLACE INTO state VALUES(?1, ?2)", params![key, value])
        }
        Change::Features { session, json } => {
            run(db, faults, "INSERT OR REPLACE INTO feature VALUES(?1, ?2)", params![session.as_str(), json])
        }
        Change::ThreadAnswer { message, responses_json, success } => run(
            db,
            faults,
            "INSERT OR REPLACE INTO answer VALUES(?1, ?2, ?3, ?4)",
            params![message.as_str(), now, success, responses_json],
        ),
        Change::Thread { thread, json } => {
            run(db, faults, "INSERT OR REPLACE INTO thread VALUES(?1, ?2)", params![thread, json])
        }
        Change::Dispatch { .. }
        | Change::Found { .. }
        | Change::Recall { .. }
        | Change::Stopped { .. }
        | Change::Done { .. }
        | Change::Clear { .. }
        | Change::Fail { .. }
        | Change::Retry { .. }
        | Change::Discard { .. }
        | Change::Split { .. }
        | Change::Move { .. } => Ok(0),
    }
}

/// What became of a claim inside the transaction.
pub(super) enum Claimed {
    /// It is this message's.
    Taken,
    /// It was there, with the same content.
    Repeat(ClaimAnswer),
    /// It was there, with other content.
    Conflict,
}

/// Takes the claim of `a` for the event `event_id`, unless it is taken and young.
pub(super) fn claim(
    db: &Connection,
    faults: &Faults,
    ledger: &Ledger,
    a: &Acceptance,
    event_id: EventId,
    now: UnixMs,
    claim_age_ms: i64,
) -> rusqlite::Result<Claimed> {
    let Some(claim) = &a.claim else {
        return Ok(Claimed::Taken);
    };
    let taken = run(
        db,
        faults,
        "INSERT INTO claim(id, hash, session, uuid, event_id, turn, at_ms) VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT(id) DO UPDATE SET hash=excluded.hash, session=excluded.session, uuid=excluded.uuid,
             event_id=excluded.event_id, turn=excluded.turn, at_ms=excluded.at_ms, cleared=0
         WHERE at_ms < ?8 AND NOT EXISTS(SELECT 1 FROM open WHERE mid=claim.event_id)",
        params![
            claim.id.as_str(),
            &claim.hash[..],
            a.session.as_str(),
            a.message.uuid.as_str(),
            event_id,
            a.turn.as_ref().map(TurnId::as_str),
            now,
            now - claim_age_ms
        ],
    )?;
    if taken == 1 {
        return Ok(Claimed::Taken);
    }
    faults.check()?;
    let (row, same) = db
        .prepare_cached("SELECT session, uuid, event_id, turn, cleared, hash=?2 FROM claim WHERE id=?1")?
        .query_row(params![claim.id.as_str(), &claim.hash[..]], |row| Ok((claim_row(row)?, row.get::<_, bool>(5)?)))?;
    if !same {
        return Ok(Claimed::Conflict);
    }
    let state = ledger.state_of(&row.message_uuid).unwrap_or(row.state);
    Ok(Claimed::Repeat(ClaimAnswer { state, ..row }))
}

/// `session, uuid, event_id, turn, cleared` of a claim whose message is no longer owed.
pub(super) fn claim_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<ClaimAnswer> {
    Ok(ClaimAnswer {
        session: id(row, 0, SessionId::parse)?,
        message_uuid: id(row, 1, MessageUuid::parse)?,
        event_id: row.get(2)?,
        turn: maybe_id(row, 3, TurnId::parse)?,
        state: if row.get(4)? { MessageState::Cleared } else { MessageState::Done },
    })
}

/// An id column; something else in it is a damaged journal.
pub(super) fn id<T>(
    row: &rusqlite::Row<'_>,
    column: usize,
    parse: impl Fn(&str) -> std::result::Result<T, crate::ids::BadId>,
) -> rusqlite::Result<T> {
    let bad = |e: crate::ids::BadId| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(e))
    };
    parse(row.get_ref(column)?.as_str()?).map_err(bad)
}

/// An id column that may be NULL.
pub(super) fn maybe_id<T>(
    row: &rusqlite::Row<'_>,
    column: usize,
    parse: impl Fn(&str) -> std::result::Result<T, crate::ids::BadId>,
) -> rusqlite::Result<Option<T>> {
    match row.get_ref(column)?.as_str_or_null()? {
        Some(_) => id(row, column, parse).map(Some),
        None => Ok(None),
    }
}
