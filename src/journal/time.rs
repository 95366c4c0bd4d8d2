//! The journal's own time: it only ever goes forward, at the pace of the clock that nobody can set, so that setting the
//! wall clock right makes no claim a week older than it is. While the machine is off it stands still.
//!
//! It is kept in `meta` as a reading of both clocks; what was recorded since then is at most [`KEPT_EVERY_MS`] newer, so
//! after a boot the journal's time may stand that much behind: claims then live so much longer, never shorter.

use rusqlite::{Connection, OptionalExtension as _};

use crate::clock::{UnixMs, boot_id, now_ms, since_boot_ms};

/// How often the reading is kept while messages come, in milliseconds.
pub(super) const KEPT_EVERY_MS: i64 = 60_000;
const KEY: &str = "time";

/// A reading of the journal's time and of the boot clock at one moment.
#[derive(Debug, Clone)]
pub(super) struct JournalTime {
    journal_ms: UnixMs,
    boot_ms: i64,
    boot: String,
}

impl JournalTime {
    /// Goes on from what `db` has; a journal that has none begins at the wall clock, and behind everything it holds.
    pub fn open(db: &Connection) -> rusqlite::Result<Self> {
        let kept: Option<String> =
            db.query_row("SELECT value FROM meta WHERE key=?1", [KEY], |row| row.get(0)).optional()?;
        let (boot, boot_ms) = (boot_id(), since_boot_ms());
        let journal_ms = match kept.as_deref().and_then(parse) {
            Some(kept) if kept.boot == boot && !boot.is_empty() => kept.journal_ms + (boot_ms - kept.boot_ms).max(0),
            Some(kept) => kept.journal_ms,
            None => {
                let newest: Option<UnixMs> = db.query_row(
                    "SELECT max(at) FROM (SELECT max(at_ms) AS at FROM claim UNION ALL SELECT max(at_ms) FROM answer
                     UNION ALL SELECT max(at_ms) FROM delivered)",
                    [],
                    |row| row.get(0),
                )?;
                now_ms().max(newest.unwrap_or(0))
            }
        };
        Ok(Self { journal_ms, boot_ms, boot })
    }

    /// A time of no journal, for the model checker.
    #[cfg(feature = "model")]
    pub fn at_zero() -> Self {
        Self { journal_ms: 0, boot_ms: since_boot_ms(), boot: String::new() }
    }

    /// The time now. Not the wall clock's: only differences mean something.
    pub fn now(&self) -> UnixMs {
        self.journal_ms + (since_boot_ms() - self.boot_ms).max(0)
    }

    /// Keeps the reading, inside a transaction of the caller.
    pub fn keep(&self, db: &Connection) -> rusqlite::Result<()> {
        let text = format!("{} {} {}", self.now(), since_boot_ms(), self.boot);
        db.prepare_cached("INSERT OR REPLACE INTO meta VALUES(?1, ?2)")?.execute([KEY, &text])?;
        Ok(())
    }
}

fn parse(text: &str) -> Option<JournalTime> {
    let mut parts = text.splitn(3, ' ');
    let (journal_ms, boot_ms) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some(JournalTime { journal_ms, boot_ms, boot: parts.next()?.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn db(kept: Option<&str>) -> Connection {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(
            "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL); CREATE TABLE claim(at_ms INTEGER);
             CREATE TABLE answer(at_ms INTEGER); CREATE TABLE delivered(at_ms INTEGER);",
        )
        .unwrap();
        if let Some(kept) = kept {
            db.execute("INSERT INTO meta VALUES('time', ?1)", [kept]).unwrap();
        }
        db
    }

    #[test]
    fn it_goes_on_where_it_was_kept_and_stands_still_while_the_machine_is_off() {
        let (boot, now) = (boot_id(), since_boot_ms());
        assert!(!boot.is_empty() && now > 0);
        let same = JournalTime::open(&db(Some(&format!("5000 {} {boot}", now - 700)))).unwrap();
        assert!((5700..6700).contains(&same.now()), "{}", same.now());
        let other = JournalTime::open(&db(Some(&format!("5000 {} another", now - 700)))).unwrap();
        assert!((5000..6000).contains(&other.now()), "{}", other.now());
        // Kept and read again it is never behind itself.
        let db = db(None);
        let first = JournalTime::open(&db).unwrap();
        first.keep(&db).unwrap();
        assert!(JournalTime::open(&db).unwrap().now() >= first.now());
    }

    #[test]
    fn an_older_journal_begins_behind_everything_it_holds() {
        let db = db(None);
        db.execute("INSERT INTO claim VALUES(?1)", [now_ms() + 1_000_000]).unwrap();
        assert!(JournalTime::open(&db).unwrap().now() >= now_ms() + 900_000);
        assert!(parse("x 1 b").is_none() && parse("1").is_none());
    }
}
