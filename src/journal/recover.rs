//! What the journal knows when it opens: everything owed, in order, for the sessions; and the ledger's memory of it.
//! Leaves looking at transcripts to the sessions. Rule a change could break: the order of a queue is the order of its
//! commits, a retried message at the end, and nothing that is owed is passed over because a row beside it is odd.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rusqlite::Connection;

use super::ledger::{Ledger, Open, OpenTurn, id, join, maybe_id};
use super::reader::{members, message_of};
use super::types::{Owed, OwedTurn, Recovered, SessionRow};
use crate::ids::{MessageId, MessageUuid, SessionId, TurnId};
use crate::inbox::Message;

/// Reads everything; runs once, before the journal's thread starts.
pub(super) fn recover(db: &Connection, epoch: String) -> rusqlite::Result<(Recovered, Ledger)> {
    let mut ledger = Ledger::default();
    ledger.next_ord = 1;
    let mut all = Recovered { epoch, head: head(db)?, ..Recovered::default() };
    all.sessions = rows(
        db,
        "SELECT session, thread, created_ms, last_used_ms, label, resumable, folder, anchor FROM session
         ORDER BY last_used_ms DESC",
        |row| {
            Ok(SessionRow {
                session: id(row, 0, SessionId::parse)?,
                thread: row.get(1)?,
                created_ms: row.get(2)?,
                last_used_ms: row.get(3)?,
                label: row.get(4)?,
                resumable: row.get(5)?,
                folder: row.get(6)?,
                anchor: maybe_id(row, 7, TurnId::parse)?,
            })
        },
    )?;
    all.aliases = rows(db, "SELECT was, now FROM alias", |row| {
        Ok((id(row, 0, SessionId::parse)?, id(row, 1, SessionId::parse)?))
    })?;
    all.agents = rows(db, "SELECT session, pid, start_time FROM agent", |row| {
        Ok((id(row, 0, SessionId::parse)?, row.get(1)?, row.get::<_, i64>(2)?.unsigned_abs()))
    })?;
    all.state = rows(db, "SELECT key, value FROM state", |row| Ok((row.get(0)?, row.get(1)?)))?;
    all.features =
        rows(db, "SELECT session, json FROM feature", |row| Ok((id(row, 0, SessionId::parse)?, row.get(1)?)))?;
    all.threads = rows(db, "SELECT thread, json FROM thread", |row| Ok((row.get(0)?, row.get(1)?)))?;
    owed(db, &mut all.owed, &mut ledger)?;
    Ok((all, ledger))
}

/// The id of the newest event there ever was.
pub(super) fn head(db: &Connection) -> rusqlite::Result<i64> {
    db.prepare_cached("SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name='event'), 0)")?
        .query_row([], |row| row.get(0))
}

fn rows<T>(
    db: &Connection,
    sql: &str,
    read: impl Fn(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Vec<T>> {
    let mut statement = db.prepare(sql)?;
    statement.query_map([], read)?.collect()
}

struct Waiting {
    message: Arc<Message>,
    session: SessionId,
    failed: bool,
    alone: bool,
    thread: Option<String>,
}

struct TurnRow {
    turn: TurnId,
    session: SessionId,
    members: Vec<MessageUuid>,
    attempts: u32,
    dispatched: bool,
    stopped: bool,
    agent: Option<String>,
}

fn owed(db: &Connection, all: &mut Vec<Owed>, ledger: &mut Ledger) -> rusqlite::Result<()> {
    let mut in_order = Vec::new();
    {
        let mut statement = db.prepare(
            "SELECT mid, uuid, at_ms, images, user, text, ord, session, failed, alone, claim, thread
             FROM open ORDER BY ord",
        )?;
        let mut found = statement.query([])?;
        while let Some(row) = found.next()? {
            let (mid, message) = message_of(db, row)?;
            let session = id(row, 7, SessionId::parse)?;
            let failed = row.get(8)?;
            ledger.next_ord = ledger.next_ord.max(row.get::<_, i64>(6)? + 1);
            let claim: Option<String> = row.get(10)?;
            let open = Open {
                mid,
                session: session.clone(),
                failed,
                turn: None,
                claim: claim.and_then(|text| MessageId::parse(&text).ok()),
                has_images: !message.images.is_empty(),
            };
            ledger.open.insert(message.uuid.clone(), open);
            in_order.push(Waiting { message, session, failed, alone: row.get(9)?, thread: row.get(11)? });
        }
    }
    let turns = rows(db, "SELECT turn, session, members, attempts, dispatched, stopped, agent FROM turn", |row| {
        Ok(TurnRow {
            turn: id(row, 0, TurnId::parse)?,
            session: id(row, 1, SessionId::parse)?,
            members: members(row, 2)?,
            attempts: row.get(3)?,
            dispatched: row.get(4)?,
            stopped: row.get(5)?,
            agent: row.get(6)?,
        })
    })?;
    let by_uuid: HashMap<&MessageUuid, &Waiting> = in_order.iter().map(|w| (&w.message.uuid, w)).collect();
    let mut owed: Vec<Owed> = Vec::new();
    let mut taken: HashSet<&MessageUuid> = HashSet::new();
    for mut row in turns {
        let had = row.members.len();
        row.members.retain(|member| by_uuid.get(member).is_some_and(|w| !w.failed));
        if row.members.is_empty() || place(&mut owed, &row.session).turn.is_some() {
            // Never written so by us; its messages, if any, stay in the queue.
            log::warn!("journal: turn {} of {} has no place and is taken apart", row.turn, row.session);
            db.execute("DELETE FROM turn WHERE turn=?1", [row.turn.as_str()])?;
            continue;
        }
        if row.members.len() != had {
            db.execute(
                "UPDATE turn SET members=?2 WHERE turn=?1",
                rusqlite::params![row.turn.as_str(), join(&row.members)],
            )?;
        }
        let mut whole = Vec::with_capacity(row.members.len());
        for member in &row.members {
            if let Some((uuid, waiting)) = by_uuid.get_key_value(member) {
                taken.insert(uuid);
                whole.push(Arc::clone(&waiting.message));
            }
            if let Some(open) = ledger.open.get_mut(member) {
                open.turn = Some(row.turn.clone());
            }
        }
        place(&mut owed, &row.session).turn = Some(OwedTurn {
            turn: row.turn.clone(),
            members: whole,
            attempts: row.attempts,
            stopped: row.stopped,
            dispatched: row.dispatched,
            agent: row.agent,
        });
        let open = OpenTurn { session: row.session, members: row.members, dispatched: row.dispatched };
        ledger.turns.insert(row.turn, open);
    }
    for waiting in &in_order {
        let uuid = &waiting.message.uuid;
        let place = place(&mut owed, &waiting.session);
        if let Some(thread) = &waiting.thread {
            place.threads.push((uuid.clone(), thread.clone()));
        }
        if waiting.failed {
            place.failed.push(uuid.clone());
        } else if !taken.contains(uuid) {
            place.queue.push(Arc::clone(&waiting.message));
            if waiting.alone {
                place.alone.push(uuid.clone());
            }
        }
    }
    *all = owed;
    Ok(())
}

fn place<'a>(owed: &'a mut Vec<Owed>, session: &SessionId) -> &'a mut Owed {
    let at = owed.iter().position(|o| o.session == *session).unwrap_or_else(|| {
        owed.push(Owed {
            session: session.clone(),
            turn: None,
            queue: Vec::new(),
            alone: Vec::new(),
            failed: Vec::new(),
            threads: Vec::new(),
        });
        owed.len() - 1
    });
    &mut owed[at]
}
