//! Reads: a few read-only connections, each held for one question. Never a transaction that outlives its question, so
//! readers cannot keep the write-ahead log from being emptied. Rule a change could break: nothing here writes, and one
//! question is one snapshot.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension as _, params};

use super::ledger::{claim_row, id};
use super::schema;
use super::trouble::cannot_read;
use super::types::{Claim, ClaimAnswer, Conflict, ImageMeta, KeptAnswer, MessageState, PendingRow};
use crate::bus::StoredEvent;
use crate::clock::UnixMs;
use crate::error::Result;
use crate::ids::{EventId, MessageUuid, SessionId, TurnId};
use crate::inbox::{Image, Message};
use crate::sync::{Condvar, Mutex};

/// Connections at once; a fifth reader waits for one of them, which is a matter of microseconds. More would each have a
/// page cache of its own, and SQLite keeps the files of closed ones open while others hold locks.
const OPEN_MAX: usize = 4;
/// An answer of `events_after` stops here, so that 256 events of 1 MiB are not held at once.
const EVENTS_BYTES_MAX: usize = 4 * 1024 * 1024;

/// The read-only side of the journal.
pub(super) struct Readers {
    path: PathBuf,
    busy: Duration,
    pool: Mutex<Pool>,
    returned: Condvar,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Connection>,
    /// Connections that are idle or asked something.
    open: usize,
}

/// A place in the pool, given back when dropped, with the connection if it is still good.
struct Lent<'a> {
    readers: &'a Readers,
    db: Option<Connection>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut pool = self.readers.pool.lock();
        match self.db.take() {
            Some(db) => pool.idle.push(db),
            None => pool.open -= 1,
        }
        drop(pool);
        self.readers.returned.notify_one();
    }
}

impl Readers {
    pub fn new(path: PathBuf, busy: Duration) -> Self {
        Self { path, busy, pool: Mutex::default(), returned: Condvar::new() }
    }

    /// Waits for a place; its connection is there if an idle one was.
    fn lend(&self) -> Lent<'_> {
        let mut pool = self.pool.lock();
        loop {
            if let Some(db) = pool.idle.pop() {
                return Lent { readers: self, db: Some(db) };
            }
            if pool.open < OPEN_MAX {
                pool.open += 1;
                return Lent { readers: self, db: None };
            }
            self.returned.wait(&mut pool);
        }
    }

    /// Asks with a connection of the pool; a connection that failed is not kept.
    fn ask<T>(&self, question: impl Fn(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        let mut lent = self.lend();
        let db = match lent.db.take() {
            Some(db) => db,
            None => schema::open_reader(&self.path, self.busy).map_err(|e| cannot_read(&e))?,
        };
        let answer = question(&db).map_err(|e| cannot_read(&e))?;
        lent.db = Some(db);
        Ok(answer)
    }

    /// Closes idle connections.
    pub fn close(&self) {
        let idle = {
            let mut pool = self.pool.lock();
            pool.open -= pool.idle.len();
            std::mem::take(&mut pool.idle)
        };
        drop(idle);
    }

    pub fn events_after(&self, after: EventId, rows_max: usize) -> Result<Vec<StoredEvent>> {
        self.ask(|db| events_between(db, after, EventId::MAX, rows_max))
    }

    pub fn bounds(&self) -> Result<(EventId, EventId)> {
        self.ask(|db| {
            // One statement, so that a prune between the two numbers cannot be seen.
            db.prepare_cached(
                "SELECT (SELECT min(id) FROM event), coalesce((SELECT seq FROM sqlite_sequence WHERE name='event'), 0)",
            )?
            .query_row([], |row| {
                let head: EventId = row.get(1)?;
                Ok((row.get::<_, Option<EventId>>(0)?.unwrap_or(head + 1), head))
            })
        })
    }

    pub fn claim_answer(
        &self,
        claim: &Claim,
        young_after_ms: UnixMs,
    ) -> Result<Option<std::result::Result<ClaimAnswer, Conflict>>> {
        self.ask(|db| {
            // Old claims count only while their message is owed, as when a send takes them.
            let found = db
                .prepare_cached(
                    "SELECT c.session, c.uuid, c.event_id, c.turn, c.cleared, c.hash=?2, o.failed,
                            (SELECT 1 FROM turn t WHERE t.dispatched AND ','||t.members||',' LIKE '%,'||c.uuid||',%')
                     FROM claim c LEFT JOIN open o ON o.mid=c.event_id
                     WHERE c.id=?1 AND (c.at_ms >= ?3 OR o.mid IS NOT NULL)",
                )?
                .query_row(params![claim.id.as_str(), &claim.hash[..], young_after_ms], |row| {
                    let answer = claim_row(row)?;
                    let state = match (row.get::<_, Option<bool>>(6)?, row.get::<_, Option<i64>>(7)?) {
                        (None, _) => answer.state,
                        (Some(true), _) => MessageState::Failed,
                        (Some(false), Some(_)) => MessageState::Dispatched,
                        (Some(false), None) => MessageState::Accepted,
                    };
                    Ok((ClaimAnswer { state, ..answer }, row.get::<_, bool>(5)?))
                })
                .optional()?;
            Ok(found.map(|(answer, same)| if same { Ok(answer) } else { Err(Conflict) }))
        })
    }

    pub fn pending(&self, session: &SessionId) -> Result<Vec<PendingRow>> {
        self.ask(|db| {
            let snapshot = db.unchecked_transaction()?;
            let turns = turns_of(&snapshot, session)?;
            let mut rows = Vec::new();
            {
                let mut statement = snapshot.prepare_cached(
                    "SELECT mid, uuid, at_ms, failed, images, user, error, text FROM open WHERE session=?1
                     ORDER BY ord",
                )?;
                let mut found = statement.query([session.as_str()])?;
                while let Some(row) = found.next()? {
                    let message = id(row, 1, MessageUuid::parse)?;
                    let part_of = turns.iter().find(|(_, members, _)| members.contains(&message));
                    let state = match (row.get::<_, bool>(3)?, part_of) {
                        (true, _) => MessageState::Failed,
                        (false, Some((_, _, true))) => MessageState::Dispatched,
                        (false, Some((_, _, false)) | None) => MessageState::Accepted,
                    };
                    let images =
                        if row.get::<_, i64>(4)? == 0 { Vec::new() } else { images_of(&snapshot, row.get(0)?)? };
                    rows.push(PendingRow {
                        state,
                        turn: part_of.map(|(turn, _, _)| turn.clone()),
                        text: row.get(7)?,
                        images,
                        user: row.get(5)?,
                        at_ms: row.get(2)?,
                        error: row.get(6)?,
                        message,
                    });
                }
            }
            snapshot.commit()?;
            Ok(rows)
        })
    }

    pub fn pending_image(&self, message: &MessageUuid, n: usize) -> Result<Option<(String, Vec<u8>)>> {
        self.ask(|db| {
            db.prepare_cached(
                "SELECT i.mime, i.bytes FROM image i WHERE i.mid=(SELECT mid FROM open WHERE uuid=?1) AND i.n=?2",
            )?
            .query_row(params![message.as_str(), i64::try_from(n).unwrap_or(i64::MAX)], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()
        })
    }

    pub fn message(&self, message: &MessageUuid) -> Result<Option<Arc<Message>>> {
        self.ask(|db| {
            let snapshot = db.unchecked_transaction()?;
            let found = snapshot
                .prepare_cached("SELECT mid, uuid, at_ms, images, user, text FROM open WHERE uuid=?1")?
                .query_row([message.as_str()], |row| message_of(&snapshot, row))
                .optional()?;
            snapshot.commit()?;
            Ok(found.map(|(_, message)| message))
        })
    }

    pub fn delivered_since(&self, session: &SessionId, since_ms: UnixMs) -> Result<Vec<(MessageUuid, TurnId)>> {
        self.ask(|db| {
            let mut statement = db.prepare_cached(
                "SELECT turn, members FROM delivered
                 WHERE session IN (SELECT ?1 UNION SELECT was FROM alias WHERE now=?1) AND at_ms>=?2 ORDER BY at_ms",
            )?;
            let mut found = statement.query(params![session.as_str(), since_ms])?;
            let mut all = Vec::new();
            while let Some(row) = found.next()? {
                let turn = id(row, 0, TurnId::parse)?;
                all.extend(members(row, 1)?.into_iter().map(|message| (message, turn.clone())));
            }
            Ok(all)
        })
    }

    pub fn thread_answer(&self, message: &MessageUuid) -> Result<Option<KeptAnswer>> {
        self.ask(|db| {
            db.prepare_cached("SELECT responses, success FROM answer WHERE uuid=?1")?
                .query_row([message.as_str()], |row| {
                    Ok(KeptAnswer { responses_json: row.get(0)?, success: row.get(1)? })
                })
                .optional()
        })
    }
}

/// Events with `after < id < before`, oldest first, bounded by rows and by bytes (one event at least).
pub(super) fn events_between(
    db: &Connection,
    after: EventId,
    before: EventId,
    rows_max: usize,
) -> rusqlite::Result<Vec<StoredEvent>> {
    let mut statement =
        db.prepare_cached("SELECT id, event, data, at FROM event WHERE id>?1 AND id<?2 ORDER BY id LIMIT ?3")?;
    let mut found = statement.query(params![after, before, i64::try_from(rows_max).unwrap_or(i64::MAX)])?;
    let mut rows = Vec::new();
    let mut bytes = 0;
    while let Some(row) = found.next()? {
        let stored = StoredEvent { id: row.get(0)?, event: row.get(1)?, data_json: row.get(2)?, at: row.get(3)? };
        bytes += stored.data_json.len();
        rows.push(stored);
        if bytes > EVENTS_BYTES_MAX {
            break;
        }
    }
    Ok(rows)
}

/// A member list, as `ledger::join` wrote it.
pub(super) fn members(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<Vec<MessageUuid>> {
    let text = row.get_ref(column)?.as_str()?;
    text.split(',')
        .map(|part| {
            MessageUuid::parse(part).map_err(|e| {
                rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(e))
            })
        })
        .collect()
}

type OpenTurns = Vec<(TurnId, Vec<MessageUuid>, bool)>;

fn turns_of(db: &Connection, session: &SessionId) -> rusqlite::Result<OpenTurns> {
    let mut statement = db.prepare_cached("SELECT turn, members, dispatched FROM turn WHERE session=?1")?;
    let found = statement
        .query_map([session.as_str()], |row| Ok((id(row, 0, TurnId::parse)?, members(row, 1)?, row.get(2)?)))?;
    found.collect()
}

fn images_of(db: &Connection, mid: EventId) -> rusqlite::Result<Vec<ImageMeta>> {
    let mut statement = db.prepare_cached("SELECT number, mime, length(bytes) FROM image WHERE mid=?1 ORDER BY n")?;
    let found = statement.query_map([mid], |row| {
        Ok(ImageMeta { number: row.get(0)?, mime: row.get(1)?, bytes: row.get::<_, i64>(2)?.unsigned_abs() })
    })?;
    found.collect()
}

/// A whole message from `mid, uuid, at_ms, images, user, text`.
pub(super) fn message_of(db: &Connection, row: &rusqlite::Row<'_>) -> rusqlite::Result<(EventId, Arc<Message>)> {
    let mid = row.get(0)?;
    let images = if row.get::<_, i64>(3)? == 0 {
        Vec::new()
    } else {
        let mut statement = db.prepare_cached("SELECT number, mime, bytes FROM image WHERE mid=?1 ORDER BY n")?;
        let found = statement.query_map([mid], |row| {
            Ok(Image { number: row.get(0)?, mime: row.get(1)?, bytes: row.get_ref(2)?.as_blob()?.into() })
        })?;
        found.collect::<rusqlite::Result<_>>()?
    };
    let message = Message {
        uuid: id(row, 1, MessageUuid::parse)?,
        text: row.get(5)?,
        images,
        user: row.get(4)?,
        at_ms: row.get(2)?,
    };
    Ok((mid, Arc::new(message)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_readers_at_once_share_a_few_connections() {
        let dir = tempfile::tempdir().unwrap();
        let path = schema::path_in(dir.path());
        drop(schema::open_writer(&path, Duration::from_secs(1), None).unwrap());
        let readers = Readers::new(path, Duration::from_secs(1));
        let most = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..32 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        assert_eq!(readers.bounds().unwrap(), (1, 0));
                        most.fetch_max(readers.pool.lock().open, std::sync::atomic::Ordering::Relaxed);
                    }
                });
            }
        });
        assert!((1..=OPEN_MAX).contains(&most.into_inner()));
        readers.close();
        assert_eq!(readers.pool.lock().open, 0);
    }
}
