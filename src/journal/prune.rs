//! What is old goes, in steps of a few milliseconds on the journal's thread. Rule a change could break: events go from
//! the oldest end only, so what is kept has no hole; nothing that is owed goes, nor a claim before its time.

use rusqlite::{Connection, params};

use super::ledger::run;
use super::trouble::Faults;
use super::types::JournalOptions;
use crate::clock::{UnixMs, now_ms, rfc3339};

/// Rows looked at in one step: about a millisecond of work.
const ROWS_PER_STEP: i64 = 500;
/// So many newest events stay whatever the size, so that a journal full of claims still replays.
const EVENTS_KEPT_MIN: i64 = 4096;
/// Deliveries are told for an hour (WIRE, bootstrap); a day is kept.
const DELIVERED_AGE_MS: i64 = 24 * 60 * 60 * 1000;

/// The walk over the claims, which have no order of age: a few hundred a step, `None` between two walks.
#[derive(Debug, Clone, Default)]
pub(super) struct Walk {
    claims_after: Option<String>,
}

impl Walk {
    /// Starts over.
    pub fn begin(&mut self) {
        self.claims_after = Some(String::new());
    }

    /// There are claims to walk over.
    pub fn is_under_way(&self) -> bool {
        self.claims_after.is_some()
    }
}

/// What a step did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Pruned {
    pub events: u64,
    /// There is more to do now.
    pub more: bool,
}

/// True if an event is due, by age or by size; reads only.
pub(super) fn events_due(db: &Connection, options: &JournalOptions) -> rusqlite::Result<bool> {
    if is_over(db, options)? {
        return Ok(true);
    }
    let oldest: Option<String> = db
        .prepare_cached("SELECT max(at) FROM (SELECT at FROM event ORDER BY id LIMIT 1)")?
        .query_row([], |row| row.get(0))?;
    Ok(oldest.is_some_and(|at| at < rfc3339(now_ms() - options.event_age_ms)))
}

fn is_over(db: &Connection, options: &JournalOptions) -> rusqlite::Result<bool> {
    let pages: u64 = db.pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0))?.unsigned_abs();
    let free: u64 = db.pragma_query_value(None, "freelist_count", |row| row.get::<_, i64>(0))?.unsigned_abs();
    let page_bytes: u64 = db.pragma_query_value(None, "page_size", |row| row.get::<_, i64>(0))?.unsigned_abs();
    if pages.saturating_sub(free) * page_bytes <= options.bytes_max {
        return Ok(false);
    }
    let (oldest, newest): (Option<i64>, Option<i64>) = db
        .prepare_cached("SELECT (SELECT min(id) FROM event), (SELECT max(id) FROM event)")?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(matches!((oldest, newest), (Some(oldest), Some(newest)) if newest - oldest >= EVENTS_KEPT_MIN))
}

/// One step inside a transaction of the caller; `now` is the journal's time. Events are aged by the wall clock that
/// their own times are of: a reader whose cursor is gone with them is told so (`resync`).
pub(super) fn step(
    db: &Connection,
    faults: &Faults,
    options: &JournalOptions,
    walk: &mut Walk,
    now: UnixMs,
) -> rusqlite::Result<Pruned> {
    let mut pruned = Pruned::default();
    let over = is_over(db, options)?;
    // The newest of the oldest rows that is due: rows of other programs may carry odd times.
    let upto: Option<i64> = db
        .prepare_cached("SELECT max(id) FROM (SELECT id, at FROM event ORDER BY id LIMIT ?1) WHERE ?2 OR at < ?3")?
        .query_row(params![ROWS_PER_STEP, over, rfc3339(now_ms() - options.event_age_ms)], |row| row.get(0))?;
    if let Some(upto) = upto {
        let gone = run(db, faults, "DELETE FROM event WHERE id<=?1", [upto])? as u64;
        pruned.events = gone;
        pruned.more = gone >= ROWS_PER_STEP.unsigned_abs();
    }
    let upto: Option<i64> = db
        .prepare_cached("SELECT max(id) FROM (SELECT id, at_ms FROM delivered ORDER BY id LIMIT ?1) WHERE at_ms < ?2")?
        .query_row(params![ROWS_PER_STEP, now - DELIVERED_AGE_MS], |row| row.get(0))?;
    if let Some(upto) = upto {
        let gone = run(db, faults, "DELETE FROM delivered WHERE id<=?1", [upto])? as i64;
        pruned.more |= gone >= ROWS_PER_STEP;
    }
    if let Some(after) = walk.claims_after.take() {
        let old = now - options.claim_age_ms;
        walk.claims_after = db
            .prepare_cached("SELECT max(id) FROM (SELECT id FROM claim WHERE id>?1 ORDER BY id LIMIT ?2)")?
            .query_row(params![after, ROWS_PER_STEP], |row| row.get(0))?;
        if let Some(upto) = &walk.claims_after {
            run(
                db,
                faults,
                "DELETE FROM claim WHERE id>?1 AND id<=?2 AND at_ms<?3
                 AND NOT EXISTS(SELECT 1 FROM open WHERE mid=claim.event_id)",
                params![after, upto, old],
            )?;
            pruned.more = true;
        } else {
            // Answers of threads are few; they go when the walk over the claims is through.
            run(db, faults, "DELETE FROM answer WHERE at_ms<?1", [old])?;
        }
    }
    Ok(pruned)
}
