//! The body of the `journal` thread: the only writer. Takes everything that waits into one transaction (one flush),
//! publishes its events in the order of their ids, then runs the callbacks in order.
//!
//! Leaves what is legal to `ledger`, the file to `schema`. Rules a change could break: nobody hears of a record before
//! its commit; outcomes that are owed go before anything newer; a callback is called exactly once, whatever happens.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rusqlite::hooks::Wal;
use rusqlite::{Connection, params};

use super::ledger::{Claimed, Ledger, claim, run};
use super::prune::{self, Walk};
use super::reader::events_between;
use super::recover::head;
use super::schema;
use super::time::KEPT_EVERY_MS;
use super::trouble::{cannot_record, may_pass, words};
use super::types::{AcceptOutcome, Acceptance, Change, JournalOptions, KeptEvent, Unit};
use super::{Done, Places, Shared};
use crate::bus::Publisher;
use crate::clock::{UnixMs, now_ms, rfc3339};
use crate::error::{Code, Error, Result};
use crate::ids::EventId;
use crate::sync::{Receiver, RecvTimeoutError};
use crate::threads::{Doing, doing};

/// Content taken into one transaction at most, in bytes: bounds its time on a slow disk.
const BATCH_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Records taken into one transaction at most.
const BATCH_MAX: usize = 1024;
/// Rows of other programs read at once.
const FOREIGN_ROWS: usize = 256;
/// The log is emptied in an idle moment from this many pages on (2 MiB) …
const WAL_PAGES_IDLE: i32 = 512;
/// … and even under load from this many on (16 MiB), so that neither it nor the pause grows.
const WAL_PAGES_MAX: i32 = 4096;
/// So long without work is an idle moment.
const IDLE: Duration = Duration::from_millis(50);
/// Somebody sent a message so shortly ago: the next one may be on its way.
const COMPANY_WITHIN: Duration = Duration::from_millis(20);
/// Longest wait of the ledger for it.
const COMPANY_MAX: Duration = Duration::from_millis(2);
/// New work does not try a bad disk again sooner than this after the last try.
const RETRY_GAP: Duration = Duration::from_millis(20);
/// Pause after a checkpoint that failed …
const CHECKPOINT_GAP: Duration = Duration::from_secs(2);
/// … and after one that a reader kept from its end.
const READER_GAP: Duration = Duration::from_millis(100);
/// Pause between two full steps of pruning.
const PRUNE_GAP: Duration = Duration::from_millis(20);
/// Looks for old events between two walks over the claims.
const PRUNES_PER_WALK: u64 = 60;
/// Longest sleep when nothing is due.
const LONG: Duration = Duration::from_secs(600);

/// What the thread is asked to do.
pub(super) enum Job {
    /// Record a message.
    Accept { acceptance: Acceptance, bytes: usize, place: Places, done: Done<AcceptOutcome> },
    /// Record a unit; `owed` ones are tried until they commit.
    Unit { unit: Unit, owed: bool, place: Places, done: Done<Vec<EventId>> },
    /// Somebody cares for other programs' events from now on.
    Look,
    /// Finish everything and close the file.
    Close,
}

impl Job {
    /// It records a message or the dispatch of some.
    fn records(&self) -> bool {
        match self {
            Job::Accept { .. } => true,
            Job::Unit { unit, .. } => unit.changes.iter().any(|change| matches!(change, Change::Dispatch { .. })),
            Job::Look | Job::Close => false,
        }
    }
}

/// What one job came to inside the transaction.
enum Came {
    Accepted(AcceptOutcome),
    Unit(Result<Vec<EventId>>),
    Refused(Error),
}

struct Batch {
    came: Vec<Came>,
    /// The newest event of other programs that lies before ours.
    foreign_upto: EventId,
    /// The newest event after the commit.
    head: EventId,
    at: String,
}

/// The writer's state.
pub(super) struct Writer {
    pub path: PathBuf,
    /// Device and inode of the file that was opened.
    pub file: Option<(u64, u64)>,
    /// `None` after a rollback failed, until it opens again; and after the end.
    pub db: Option<Connection>,
    pub ledger: Ledger,
    pub options: JournalOptions,
    pub publisher: Arc<dyn Publisher>,
    pub shared: Arc<Shared>,
    pub jobs: Receiver<Job>,
    /// Newest event that was published or that lay there at the start.
    pub head: EventId,
    /// Outcomes that wait for the disk, oldest first.
    pub owed: VecDeque<Job>,
    pub times: Times,
}

/// When things were done last.
pub(super) struct Times {
    /// The last try on a disk that was bad.
    tried: Instant,
    worked: Instant,
    /// The last batch with a message.
    accepted: Instant,
    looked: Instant,
    prune_at: Instant,
    prunes: u64,
    walk: Walk,
    data_version: i64,
    wal_pages: Arc<AtomicI32>,
    /// Pages of the log that are in the database already.
    moved_pages: i32,
    /// The log is emptied under load from so many pages on.
    wal_pages_max: i32,
    /// No checkpoint before, after one that failed.
    checkpoint_at: Instant,
    /// The journal's time when it was kept last in this life.
    kept_ms: Option<UnixMs>,
    closed: bool,
}

impl Times {
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            tried: now,
            worked: now,
            accepted: now,
            looked: now,
            prune_at: now,
            prunes: 0,
            walk: Walk::default(),
            data_version: -1,
            wal_pages: Arc::default(),
            moved_pages: 0,
            wal_pages_max: WAL_PAGES_MAX,
            checkpoint_at: now,
            kept_ms: None,
            closed: false,
        }
    }
}

/// Tells the writer how long the log is after each commit.
fn watch_wal(db: &mut Connection, pages: &Arc<AtomicI32>) -> rusqlite::Result<()> {
    let pages = Arc::clone(pages);
    db.wal_hook(Some(move |_: &mut Wal, now| {
        pages.store(now, Ordering::Relaxed);
        Ok(())
    }))
}

impl Writer {
    /// Runs until every handle is gone.
    pub fn run(mut self) {
        if let Some(db) = &mut self.db
            && let Err(e) = watch_wal(db, &self.times.wal_pages)
        {
            log::warn!("journal: the length of the log is not watched: {}", words(&e));
        }
        loop {
            let first = {
                let _at = doing(Doing::WaitWork);
                self.jobs.recv_timeout(self.until_due())
            };
            match first {
                Ok(first) => {
                    let (batch, close) = self.gather(first);
                    if self.times.closed {
                        refuse(batch, || Error::new(Code::ShuttingDown, "the journal is closed"));
                    } else {
                        self.work(batch);
                        if close {
                            self.close();
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if !self.times.closed {
                self.keep_house();
            }
        }
        if !self.times.closed {
            self.close();
        }
    }

    /// Everything that waits, up to the bounds of a batch; and whether to close after it.
    fn gather(&mut self, first: Job) -> (Vec<Job>, bool) {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut has_message = false;
        let mut company_until = None;
        let mut next = Some(first);
        while let Some(job) = next {
            match job {
                Job::Accept { bytes: more, .. } => {
                    bytes += more;
                    has_message = true;
                    batch.push(job);
                }
                Job::Unit { .. } => batch.push(job),
                Job::Look => {}
                Job::Close => return (batch, true),
            }
            next = if batch.len() < BATCH_MAX && bytes < BATCH_BYTES_MAX { self.jobs.try_recv().ok() } else { None };
            if next.is_none() && !has_message && !batch.is_empty() {
                let until = *company_until.get_or_insert_with(|| Instant::now() + self.company_wait());
                next = self.jobs.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
            }
        }
        if has_message {
            self.times.accepted = Instant::now();
        }
        (batch, false)
    }

    /// How long records of the ledger wait for a message to share their flush: while somebody is sending, half of what
    /// the last commit took. Else a person's next message would come just behind the flush of the last one's dispatch
    /// and wait for two.
    fn company_wait(&self) -> Duration {
        if self.times.accepted.elapsed() > COMPANY_WITHIN || !self.owed.is_empty() {
            return Duration::ZERO;
        }
        let last = Duration::from_micros(self.shared.counters.commit_us.load(Ordering::Relaxed));
        (last / 2).min(COMPANY_MAX)
    }

    fn until_due(&self) -> Duration {
        if self.times.closed {
            return LONG;
        }
        let now = Instant::now();
        let mut due = LONG;
        let mut at = |when: Instant| due = due.min(when.saturating_duration_since(now));
        if self.shared.is_bad() || !self.owed.is_empty() {
            at(self.times.tried + Duration::from_millis(self.options.retry_ms));
        } else {
            at(self.times.prune_at);
            if self.times.wal_pages.load(Ordering::Relaxed) - self.times.moved_pages >= WAL_PAGES_IDLE {
                at((self.times.worked + IDLE).max(self.times.checkpoint_at));
            }
        }
        if self.shared.is_watched() {
            at(self.times.looked + Duration::from_millis(self.options.watch_ms));
        }
        due
    }

    fn work(&mut self, batch: Vec<Job>) {
        if self.shared.is_bad() || !self.owed.is_empty() {
            if self.times.tried.elapsed() >= RETRY_GAP {
                self.try_again();
            }
            if let Some(reason) = self.shared.trouble() {
                self.keep_owed_refuse_rest(batch, &reason);
                return;
            }
        }
        if !batch.is_empty() {
            self.commit(batch);
        }
        self.times.worked = Instant::now();
    }

    /// The disk was bad: what is owed first, else a record of no meaning, to see whether it is good again.
    fn try_again(&mut self) {
        self.times.tried = Instant::now();
        if self.owed.is_empty() {
            match self.probe() {
                Ok(()) => self.is_good(),
                Err(e) => self.is_bad(&e),
            }
        } else {
            let owed: Vec<Job> = self.owed.drain(..).collect();
            self.commit(owed);
        }
    }

    fn probe(&mut self) -> rusqlite::Result<()> {
        let faults = self.options.faults.clone();
        self.transaction(|_, db| {
            run(db, &faults, "INSERT OR REPLACE INTO meta VALUES('probe', ?1)", [now_ms().to_string()])?;
            Ok(())
        })
    }

    /// One transaction around `body`, rolled back with any error.
    fn transaction<T>(
        &mut self,
        body: impl FnOnce(&mut Self, &Connection) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        let db = self.take_db()?;
        let faults = self.options.faults.clone();
        let result = (|| {
            faults.check()?;
            db.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
            let value = body(self, &db)?;
            faults.check()?;
            let _at = doing(Doing::Commit);
            db.prepare_cached("COMMIT")?.execute([])?;
            Ok(value)
        })();
        match &result {
            Ok(_) => {
                self.ledger.committed();
                self.db = Some(db);
            }
            Err(_) => {
                self.ledger.rolled_back();
                self.times.kept_ms = None;
                self.shared.count(|n| &n.failures, 1);
                // SQLite rolls back by itself after some errors. A connection that cannot even do that is not kept.
                let _ = db.is_autocommit() || db.execute_batch("ROLLBACK").is_ok();
                if db.is_autocommit() {
                    self.db = Some(db);
                }
            }
        }
        result
    }

    fn take_db(&mut self) -> rusqlite::Result<Connection> {
        // SQLite would write on into a file that no path leads to, and nobody would find it after a restart.
        if schema::identity(&self.path) != self.file {
            return Err(rusqlite::Error::SqliteFailure(
                rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_READONLY_DBMOVED),
                Some("the journal was moved or deleted while in use".into()),
            ));
        }
        if let Some(db) = self.db.take() {
            return Ok(db);
        }
        let busy = Duration::from_millis(self.options.busy_ms);
        match schema::open_writer(&self.path, busy, self.options.pages_max) {
            Ok((mut db, _)) => {
                watch_wal(&mut db, &self.times.wal_pages)?;
                self.times.data_version = -1;
                Ok(db)
            }
            Err(e) => Err(rusqlite::Error::SqliteFailure(
                rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CANTOPEN),
                Some(e.to_string()),
            )),
        }
    }

    fn is_good(&mut self) {
        if self.shared.set_trouble(None) {
            log::info!("journal: records again");
        }
    }

    fn is_bad(&mut self, e: &rusqlite::Error) {
        let reason = words(e);
        if self.shared.set_trouble(Some(reason.clone())) {
            log::error!("journal: cannot record: {reason}");
        }
        self.times.tried = Instant::now();
    }

    /// Commits `batch` and tells everybody; with trouble, keeps what is owed and refuses the rest. False with trouble.
    fn commit(&mut self, batch: Vec<Job>) -> bool {
        let records = batch.iter().any(Job::records);
        if records {
            if crate::faults::planted("publish_before_commit") {
                self.publish_early(&batch);
            }
            crate::faults::point("before_record");
        }
        let begun = Instant::now();
        let result = self.transaction(|this, db| this.write(db, &batch));
        match result {
            Ok(made) => {
                let took = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
                self.shared.committed(batch.len(), took);
                self.is_good();
                if records {
                    crate::faults::point("after_record_before_answer");
                }
                self.tell(batch, made);
                true
            }
            Err(e) if may_pass(&e) => {
                self.is_bad(&e);
                self.keep_owed_refuse_rest(batch, &words(&e));
                false
            }
            Err(e) if batch.len() == 1 => {
                log::error!("journal: a record that can never be made: {}", words(&e));
                refuse(batch, || Error::internal(format!("cannot be recorded: {}", words(&e))));
                true
            }
            // One record of the batch can never be made: find it by committing them one by one.
            Err(_) => {
                let mut good = true;
                for job in batch {
                    if good {
                        good = self.commit(vec![job]);
                    } else {
                        let reason = self.shared.trouble().unwrap_or_default();
                        self.keep_owed_refuse_rest(vec![job], &reason);
                    }
                }
                good
            }
        }
    }

    /// The planted fault: messages are told under the ids that they will probably have.
    fn publish_early(&mut self, batch: &[Job]) {
        let at = rfc3339(now_ms());
        for job in batch {
            if let Job::Accept { acceptance, .. } = job {
                self.head += 1;
                self.publisher.publish_kept(self.head, acceptance.event.event, &acceptance.event.data, &at);
            }
        }
    }

    fn keep_owed_refuse_rest(&mut self, batch: Vec<Job>, reason: &str) {
        let mut rest = Vec::new();
        for job in batch {
            match job {
                Job::Unit { owed: true, .. } => self.owed.push_back(job),
                Job::Unit { owed: false, .. } | Job::Accept { .. } | Job::Look | Job::Close => rest.push(job),
            }
        }
        self.shared.set_owed(self.owed.len());
        refuse(rest, || cannot_record(reason));
    }

    /// Inside the transaction: every job's rows.
    fn write(&mut self, db: &Connection, batch: &[Job]) -> rusqlite::Result<Batch> {
        let faults = self.options.faults.clone();
        let now = self.shared.time.now();
        let at = rfc3339(now_ms());
        faults.check()?;
        if self.times.kept_ms.is_none_or(|kept| now - kept >= KEPT_EVERY_MS) {
            self.shared.time.keep(db)?;
            self.times.kept_ms = Some(now);
        }
        let foreign_upto = head(db)?;
        let mut last = foreign_upto;
        let mut came = Vec::with_capacity(batch.len());
        for job in batch {
            came.push(match job {
                Job::Accept { acceptance: a, .. } => {
                    if self.ledger.open.contains_key(&a.message.uuid) {
                        Came::Refused(Error::internal(format!("message {} is recorded twice", a.message.uuid)))
                    } else {
                        match claim(db, &faults, &self.ledger, a, last + 1, now, self.options.claim_age_ms)? {
                            Claimed::Taken => {
                                last += 1;
                                self.ledger.accept(db, &faults, a, last)?;
                                self.insert_event(db, last, &a.event, &at)?;
                                Came::Accepted(AcceptOutcome::Recorded { event_id: last })
                            }
                            Claimed::Repeat(answer) => Came::Accepted(AcceptOutcome::Repeat(answer)),
                            Claimed::Conflict => Came::Accepted(AcceptOutcome::Conflict),
                        }
                    }
                }
                Job::Unit { unit, .. } => match self.ledger.apply(db, &faults, &unit.changes, now)? {
                    Ok(()) => {
                        let mut ids = Vec::with_capacity(unit.events.len());
                        for event in &unit.events {
                            last += 1;
                            self.insert_event(db, last, event, &at)?;
                            ids.push(last);
                        }
                        Came::Unit(Ok(ids))
                    }
                    Err(refused) => Came::Unit(Err(refused)),
                },
                Job::Look | Job::Close => Came::Refused(Error::internal("no record")),
            });
        }
        Ok(Batch { came, foreign_upto, head: last, at })
    }

    fn insert_event(&self, db: &Connection, id: EventId, event: &KeptEvent, at: &str) -> rusqlite::Result<()> {
        run(
            db,
            &self.options.faults,
            "INSERT INTO event(id, at, event, data) VALUES(?1, ?2, ?3, ?4)",
            params![id, at, event.event, event.data.to_string()],
        )?;
        Ok(())
    }

    /// After the commit: events in the order of ids, other programs' ones between ours, then the callbacks in order.
    fn tell(&mut self, batch: Vec<Job>, made: Batch) {
        if made.foreign_upto > self.head && !crate::faults::planted("publish_before_commit") {
            self.publish_foreign(made.foreign_upto);
        }
        let told = if crate::faults::planted("publish_before_commit") { self.head } else { 0 };
        let publish = |id: EventId, event: &KeptEvent| {
            if id <= told {
                return;
            }
            self.publisher.publish_kept(id, event.event, &event.data, &made.at);
        };
        let (mut events, mut accepted, mut repeats, mut units) = (0, 0, 0, 0);
        for (job, came) in batch.iter().zip(&made.came) {
            match (job, came) {
                (Job::Accept { acceptance, .. }, Came::Accepted(AcceptOutcome::Recorded { event_id })) => {
                    publish(*event_id, &acceptance.event);
                    events += 1;
                    accepted += 1;
                }
                (Job::Unit { unit, .. }, Came::Unit(Ok(ids))) => {
                    for (id, event) in ids.iter().zip(&unit.events) {
                        publish(*id, event);
                    }
                    events += ids.len() as u64;
                    units += 1;
                }
                (_, Came::Accepted(_)) => repeats += 1,
                (_, Came::Unit(_) | Came::Refused(_)) => {}
            }
        }
        self.head = made.head;
        self.shared.count(|n| &n.events, events);
        self.shared.count(|n| &n.accepted, accepted);
        self.shared.count(|n| &n.repeats, repeats);
        self.shared.count(|n| &n.units, units);
        self.shared.set_owed(self.owed.len());
        for (job, came) in batch.into_iter().zip(made.came) {
            match (job, came) {
                (Job::Accept { place, done, bytes, .. }, came) => {
                    self.shared.give_bytes(bytes);
                    drop(place);
                    done(match came {
                        Came::Accepted(outcome) => Ok(outcome),
                        Came::Refused(e) => Err(e),
                        Came::Unit(_) => Err(Error::internal("an answer of another kind")),
                    });
                }
                (Job::Unit { place, done, .. }, came) => {
                    drop(place);
                    done(match came {
                        Came::Unit(result) => result,
                        Came::Refused(e) => Err(e),
                        Came::Accepted(_) => Err(Error::internal("an answer of another kind")),
                    });
                }
                (Job::Look | Job::Close, _) => {}
            }
        }
    }

    /// Publishes what other programs wrote after our newest event, up to and with `upto`.
    fn publish_foreign(&mut self, upto: EventId) {
        while self.head < upto {
            let rows = match self.db.as_ref().map(|db| events_between(db, self.head, upto + 1, FOREIGN_ROWS)) {
                Some(Ok(rows)) => rows,
                Some(Err(e)) => {
                    // Subscribers find them in the store; the ids after them stay in order.
                    log::error!("journal: events of other programs are not told: {}", words(&e));
                    break;
                }
                None => break,
            };
            let Some(last) = rows.last() else { break };
            let newest = last.id;
            for row in &rows {
                let data = serde_json::from_str(&row.data_json).unwrap_or(serde_json::Value::Null);
                self.publisher.publish_kept(row.id, &row.event, &data, &row.at);
            }
            self.shared.count(|n| &n.events, rows.len() as u64);
            self.head = newest;
        }
        self.head = self.head.max(upto);
    }

    /// What is due between batches.
    fn keep_house(&mut self) {
        let now = Instant::now();
        if self.shared.is_bad() || !self.owed.is_empty() {
            if self.times.tried.elapsed() >= Duration::from_millis(self.options.retry_ms) {
                self.try_again();
            }
            return;
        }
        if self.shared.is_watched()
            && now.duration_since(self.times.looked) >= Duration::from_millis(self.options.watch_ms)
        {
            self.look_for_foreign();
        }
        let pages = self.times.wal_pages.load(Ordering::Relaxed);
        if pages < self.times.moved_pages {
            // The last commit began at the log's head again.
            self.times.moved_pages = 0;
            self.times.wal_pages_max = WAL_PAGES_MAX;
        }
        let idle = pages - self.times.moved_pages >= WAL_PAGES_IDLE && self.times.worked.elapsed() >= IDLE;
        if (idle || pages >= self.times.wal_pages_max) && now >= self.times.checkpoint_at {
            self.checkpoint();
        }
        if now >= self.times.prune_at {
            self.prune();
        }
        self.shared.set_wal_pages(self.times.wal_pages.load(Ordering::Relaxed));
    }

    /// Did another program write since the last look?
    fn look_for_foreign(&mut self) {
        self.times.looked = Instant::now();
        let Some(db) = &self.db else { return };
        let version = db
            .prepare_cached("PRAGMA data_version")
            .and_then(|mut statement| statement.query_row([], |row| row.get::<_, i64>(0)));
        match version {
            Ok(version) if version == self.times.data_version => {}
            Ok(version) => match head(db) {
                Ok(upto) => {
                    self.times.data_version = version;
                    if upto > self.head {
                        self.publish_foreign(upto);
                    }
                }
                Err(e) => log::warn!("journal: no look for other programs' events: {}", words(&e)),
            },
            Err(e) => log::warn!("journal: no look for other programs' events: {}", words(&e)),
        }
    }

    fn checkpoint(&mut self) {
        // Also without a connection: a due time that stays in the past would make the thread spin.
        self.times.checkpoint_at = Instant::now() + CHECKPOINT_GAP;
        let Some(db) = &self.db else { return };
        let begun = Instant::now();
        let result = db.wal_checkpoint_v2(None::<&str>, rusqlite::wal::CheckpointMode::PASSIVE);
        self.shared.checkpointed(u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX));
        match result {
            // With all of it in the database the next commit starts at the log's head again, unless a reader is in the
            // log just then; so the next checkpoint is due when a good deal was added.
            Ok((log, moved)) => {
                self.times.moved_pages = moved;
                self.times.wal_pages_max = WAL_PAGES_MAX.max(log.saturating_add(WAL_PAGES_MAX / 4));
                self.times.checkpoint_at = Instant::now() + if log == moved { Duration::ZERO } else { READER_GAP };
            }
            Err(e) => log::warn!("journal: checkpoint: {}", words(&e)),
        }
    }

    fn prune(&mut self) {
        let mut gap = Duration::from_millis(self.options.prune_every_ms);
        // Also without a connection: a due time that stays in the past would make the thread spin.
        self.times.prune_at = Instant::now() + gap;
        let Some(db) = &self.db else { return };
        let now = self.shared.time.now();
        if !self.times.walk.is_under_way() {
            if self.times.prunes.is_multiple_of(PRUNES_PER_WALK) {
                self.times.walk.begin();
            }
            self.times.prunes += 1;
        }
        let due = self.times.walk.is_under_way() || prune::events_due(db, &self.options).unwrap_or(false);
        if due {
            let result = self.transaction(|this, db| {
                let mut walk = this.times.walk.clone();
                let pruned = prune::step(db, &this.options.faults, &this.options, &mut walk, now)?;
                Ok((pruned, walk))
            });
            match result {
                Ok((pruned, walk)) => {
                    self.times.walk = walk;
                    self.shared.count(|n| &n.pruned, pruned.events);
                    if pruned.more {
                        gap = PRUNE_GAP;
                    }
                }
                Err(e) => log::warn!("journal: prune: {}", words(&e)),
            }
        }
        self.times.prune_at = Instant::now() + gap;
    }

    /// Tries once more what is owed, empties the log, closes the file.
    fn close(&mut self) {
        if !self.owed.is_empty() {
            self.try_again();
        }
        if !self.owed.is_empty() {
            log::error!("journal: closes with {} outcomes unrecorded; the next start looks them up", self.owed.len());
            let owed: Vec<Job> = self.owed.drain(..).collect();
            let reason = self.shared.trouble().unwrap_or_default();
            refuse(owed, || cannot_record(&reason));
        }
        self.shared.close_readers();
        if let Some(db) = self.db.take() {
            let _ = db.wal_checkpoint_v2(None::<&str>, rusqlite::wal::CheckpointMode::TRUNCATE);
            if let Err((_, e)) = db.close() {
                log::warn!("journal: close: {}", words(&e));
            }
        }
        self.times.closed = true;
        self.shared.set_closed();
    }
}

/// Answers every job of `batch` with an error.
fn refuse(batch: Vec<Job>, error: impl Fn() -> Error) {
    for job in batch {
        match job {
            Job::Accept { place, done, bytes, .. } => {
                place.shared().give_bytes(bytes);
                drop(place);
                done(Err(error()));
            }
            Job::Unit { place, done, .. } => {
                drop(place);
                done(Err(error()));
            }
            Job::Look | Job::Close => {}
        }
    }
}
