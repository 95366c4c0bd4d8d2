//! The file of the journal: how it is opened, what is in it, and how an older one is brought up to date.
//!
//! Leaves rows to `ledger` and `writer`. Rule a change could break: a schema is migrated and never dropped, and a file
//! that we did not write, that is cut short or that a newer program wrote is refused with one clear line, untouched.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

use super::trouble::words;
use crate::error::{Error, Result};
use crate::ids::MessageUuid;

/// Name of the journal inside the state directory.
pub(super) const FILE_NAME: &str = "journal.db";
/// `beeb` in the file's head: this database is ours.
const APPLICATION_ID: i32 = 0x6265_6562;

/// Statement lists that lead from version n to n + 1, run inside one transaction; their number is the version that this
/// program writes. Only ever append.
///
/// `open` holds what is owed and nothing else, so it stays small and its pages stay hot; `mid` is the id of the
/// message's own event, so it is unique for ever. Big columns stand last, where a scan does not touch them.
/// Other programs append to `event`: the checks keep out what would break a frame or an SSE line.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE event(
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ','now')) CHECK(at GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9]Z'),
        event TEXT NOT NULL CHECK(length(event) BETWEEN 1 AND 64 AND event NOT GLOB '*[^a-z0-9-]*'),
        data TEXT NOT NULL CHECK(json_valid(data) AND instr(data, char(10))=0 AND instr(data, char(13))=0));
    CREATE TABLE claim(
        id TEXT PRIMARY KEY, hash BLOB NOT NULL, session TEXT NOT NULL, uuid TEXT NOT NULL, event_id INTEGER NOT NULL,
        turn TEXT, at_ms INTEGER NOT NULL, cleared INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
    CREATE TABLE open(
        mid INTEGER PRIMARY KEY, ord INTEGER NOT NULL, uuid TEXT NOT NULL, session TEXT NOT NULL, at_ms INTEGER NOT NULL,
        failed INTEGER NOT NULL DEFAULT 0, alone INTEGER NOT NULL DEFAULT 0, images INTEGER NOT NULL, claim TEXT,
        thread TEXT, user TEXT, error TEXT, text TEXT NOT NULL);
    CREATE TABLE image(
        mid INTEGER NOT NULL, n INTEGER NOT NULL, number INTEGER NOT NULL, mime TEXT NOT NULL, bytes BLOB NOT NULL,
        PRIMARY KEY(mid, n));
    CREATE TABLE turn(
        turn TEXT PRIMARY KEY, session TEXT NOT NULL, members TEXT NOT NULL, attempts INTEGER NOT NULL,
        dispatched INTEGER NOT NULL, stopped INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
    CREATE TABLE delivered(
        id INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, session TEXT NOT NULL, turn TEXT NOT NULL,
        members TEXT NOT NULL, outcome TEXT NOT NULL);
    CREATE INDEX delivered_of ON delivered(session, at_ms);
    CREATE TABLE session(
        session TEXT PRIMARY KEY, thread TEXT, created_ms INTEGER NOT NULL, last_used_ms INTEGER NOT NULL, label TEXT,
        resumable INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE alias(was TEXT PRIMARY KEY, now TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE agent(session TEXT PRIMARY KEY, pid INTEGER NOT NULL, start_time INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE state(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE feature(session TEXT PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE thread(thread TEXT PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE answer(
        uuid TEXT PRIMARY KEY, at_ms INTEGER NOT NULL, success INTEGER NOT NULL, responses TEXT NOT NULL) WITHOUT ROWID;
", "
    -- Which agent a turn was handed to: what its silence in a transcript means depends on that.
    ALTER TABLE turn ADD COLUMN agent TEXT;
    -- The project folder that the transcript was seen in, and the last turn of ours that was seen in it.
    ALTER TABLE session ADD COLUMN folder TEXT;
    ALTER TABLE session ADD COLUMN anchor TEXT;
"];

/// Where the journal of the state directory `dir` lies.
pub(super) fn path_in(dir: &Path) -> PathBuf {
    dir.join(FILE_NAME)
}

fn refuse(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::internal(format!("journal {}: {why}", path.display()))
}

/// Looks at the bytes before SQLite does: a foreign file must not even get a lock beside it. False if there is none.
fn look_before_opening(path: &Path) -> Result<bool> {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    let log_bytes = std::fs::metadata(&log).map_or(0, |meta| meta.len());
    let opened = match std::fs::File::open(path) {
        Ok(file) => Some(file),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(refuse(path, e)),
    };
    let len = opened.as_ref().map_or(Ok(0), |file| file.metadata().map(|meta| meta.len()))?;
    let Some(mut file) = opened.filter(|_| len > 0) else {
        // SQLite would begin anew and throw the log away.
        if log_bytes > 0 {
            return Err(refuse(path, "is missing or empty beside its log; restore it, or delete journal.db-wal too"));
        }
        return Ok(false);
    };
    let mut head = [0; 100];
    if file.read_exact(&mut head).is_err() || &head[..16] != b"SQLite format 3\0" {
        return Err(refuse(path, "is not a journal of beebox-chatd; move it away or restore a copy"));
    }
    let page = match u16::from_be_bytes([head[16], head[17]]) {
        1 => 65_536,
        n => u64::from(n).max(1),
    };
    // With a log beside it a half page at the end is what a crash in a checkpoint leaves; SQLite writes it again.
    if log_bytes == 0 && !len.is_multiple_of(page) {
        return Err(refuse(path, format!("is cut short at {len} bytes; restore a copy")));
    }
    Ok(true)
}

/// An empty file that only its owner reads: it will hold what people write. SQLite gives the log the same mode.
fn create(path: &Path) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let created = std::fs::File::options().write(true).create(true).truncate(false).mode(0o600).open(path);
    created.map_err(|e| refuse(path, e))?;
    // SQLite flushes the directory for the files beside the database, not for the database itself.
    std::fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(())
}

/// Opens (and creates or migrates) the journal for its one writer. Returns it with its epoch.
pub(super) fn open_writer(path: &Path, busy: Duration, pages_max: Option<u32>) -> Result<(Connection, String)> {
    if !look_before_opening(path)? {
        create(path)?;
    }
    let mut db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)
        .map_err(|e| refuse(path, words(&e)))?;
    let epoch = prepare(&mut db, path, busy).map_err(|e| match e {
        Trouble::Sql(e) => refuse(path, words(&e)),
        Trouble::Refused(why) => refuse(path, why),
    })?;
    if let Some(pages) = pages_max {
        db.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).map_err(|e| refuse(path, words(&e)))?;
    }
    Ok((db, epoch))
}

enum Trouble {
    Sql(rusqlite::Error),
    Refused(String),
}

impl From<rusqlite::Error> for Trouble {
    fn from(e: rusqlite::Error) -> Self {
        Trouble::Sql(e)
    }
}

fn prepare(db: &mut Connection, path: &Path, busy: Duration) -> std::result::Result<String, Trouble> {
    db.busy_timeout(busy)?;
    db.set_prepared_statement_cache_capacity(64);
    let ours: i32 = db.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let tables: i64 = db.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if ours != APPLICATION_ID && (ours != 0 || tables != 0) {
        return Err(Trouble::Refused("is a database of another program; move it away".into()));
    }
    let mode: String = db.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get(0))?;
    if mode != "wal" {
        return Err(Trouble::Refused(format!("its file system cannot keep a write-ahead log (mode {mode})")));
    }
    // FULL: a commit is on the disk, not only in the kernel, when it returns.
    db.pragma_update(None, "synchronous", "FULL")?;
    // Checkpoints are the writer's to time, so that no send pays for one.
    db.pragma_update_and_check(None, "wal_autocheckpoint", 0, |_| Ok(()))?;
    db.pragma_update_and_check(None, "journal_size_limit", 32 * 1024 * 1024, |_| Ok(()))?;
    db.pragma_update(None, "cache_size", -8192)?;
    db.pragma_update(None, "temp_store", "MEMORY")?;
    db.pragma_update(None, "trusted_schema", "OFF")?;
    // The checks are for other programs; our own rows satisfy them by construction, at a third of the price.
    db.pragma_update(None, "ignore_check_constraints", "ON")?;
    migrate(db, path, MIGRATIONS)?;
    Ok(db.query_row("SELECT value FROM meta WHERE key='epoch'", [], |row| row.get(0))?)
}

/// Brings the file up to the version that `steps` leads to, in one transaction.
fn migrate(db: &mut Connection, path: &Path, steps: &[&str]) -> std::result::Result<(), Trouble> {
    let known = steps.len();
    let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let is_empty: bool = tx.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))?;
    let version: usize = if is_empty {
        0
    } else {
        let text: Option<String> =
            tx.query_row("SELECT value FROM meta WHERE key='schema'", [], |row| row.get(0)).optional()?;
        text.and_then(|text| text.parse().ok())
            .ok_or_else(|| Trouble::Refused("names no schema version; restore a copy".into()))?
    };
    if version > known {
        return Err(Trouble::Refused(format!(
            "has schema {version}, this program knows up to {known}; use the newer program"
        )));
    }
    if version == known {
        return Ok(());
    }
    for step in steps.iter().skip(version) {
        tx.execute_batch(step)?;
    }
    tx.execute("INSERT OR REPLACE INTO meta VALUES('schema', ?1)", [known.to_string()])?;
    let fresh = MessageUuid::fresh().as_str().replace('-', "");
    tx.execute("INSERT OR IGNORE INTO meta VALUES('epoch', ?1)", [&fresh[..16]])?;
    tx.pragma_update(None, "application_id", APPLICATION_ID)?;
    tx.commit()?;
    if version != 0 {
        log::info!("journal {}: schema {version} brought to {known}", path.display());
    }
    Ok(())
}

/// Opens the journal for reading only.
pub(super) fn open_reader(path: &Path, busy: Duration) -> rusqlite::Result<Connection> {
    let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    db.busy_timeout(busy)?;
    db.pragma_update(None, "query_only", "ON")?;
    db.pragma_update(None, "cache_size", -512)?;
    Ok(db)
}

/// Which file lies at `path`: device and inode.
pub(super) fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_schema_is_migrated_with_its_rows_and_its_epoch_kept() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = path_in(dir.path());
        let (mut db, epoch) = open_writer(&path, Duration::from_secs(1), None).unwrap();
        db.execute("INSERT INTO state VALUES('key', 'kept')", []).unwrap();
        let next = [MIGRATIONS, &["CREATE TABLE later(x); INSERT INTO later SELECT value FROM state"]].concat();
        assert!(migrate(&mut db, &path, &next).is_ok());
        let row = |sql: &str| db.query_row(sql, [], |row| row.get::<_, String>(0)).unwrap();
        assert_eq!(row("SELECT x FROM later"), "kept");
        assert_eq!(row("SELECT value FROM meta WHERE key='epoch'"), epoch);
        assert_eq!(row("SELECT value FROM meta WHERE key='schema'"), next.len().to_string());
        drop(db);
        // To the program before, it is the journal of a newer one.
        let refused = open_writer(&path, Duration::from_secs(1), None).unwrap_err();
        assert!(refused.text().contains("use the newer program"), "{refused}");
    }

    #[test]
    fn a_migration_that_fails_leaves_the_older_schema_whole() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = path_in(dir.path());
        let (mut db, epoch) = open_writer(&path, Duration::from_secs(1), None).unwrap();
        let next = [MIGRATIONS, &["DROP TABLE event; CREATE TABLE no(x", "never"]].concat();
        assert!(migrate(&mut db, &path, &next).is_err());
        drop(db);
        let (db, again) = open_writer(&path, Duration::from_secs(1), None).unwrap();
        assert_eq!(again, epoch);
        db.execute("INSERT INTO event(event, data) VALUES('x', '1')", []).unwrap();
    }
}
