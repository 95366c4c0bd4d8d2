//! The journal: what was accepted, what became of it, and the events that told it, in one SQLite file with one writer.
//!
//! A record is durable (WAL, `synchronous=FULL`) before anybody hears of it. Leaves to others: which moves a session
//! makes and when, pushing events to clients, reading transcripts. Rules a change could break: acceptance is claim,
//! content and event in one transaction; order of commits is order of calls; nothing accepted is ever dropped here.

mod ledger;
#[cfg(feature = "model")]
mod model;
mod prune;
mod reader;
mod recover;
mod schema;
mod time;
mod trouble;
mod types;
mod writer;

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

pub use trouble::{FaultKind, Faults};
pub use types::{
    AcceptOutcome, Acceptance, Change, Claim, ClaimAnswer, Conflict, ImageMeta, JournalOptions, JournalStats,
    KeptAnswer, KeptEvent, MessageState, Owed, OwedTurn, PendingRow, Recovered, SessionRow, Unit,
};

use crate::bus::{EventStore, Publisher, StoredEvent};
use crate::clock::UnixMs;
use crate::error::{Code, Error, Result};
use crate::ids::{EventId, MessageUuid, SessionId, TurnId};
use crate::inbox::{Image, Message};
use crate::sync::{Condvar, Mutex, Sender, unbounded};
use crate::threads::{self, Doing, Name, OnPanic, doing};
use reader::Readers;
use trouble::cannot_record;
use writer::{Job, Times, Writer};

/// Called once, on the journal's thread, after the commit and after its events were published. Must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// Stack of the journal's thread, in bytes: SQLite's own need is small, JSON of events is shallow.
const STACK_BYTES: usize = threads::WORK_STACK_BYTES;

/// What a claim is bound to: the text, each photo (number, type, bytes) and `extras` (features that seed a session and
/// their like), each with its length in front, so that no two contents read alike.
#[must_use]
pub fn content_hash(text: &str, images: &[Image], extras: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(text.as_bytes());
    part(&(images.len() as u64).to_le_bytes());
    for image in images {
        part(&image.number.to_le_bytes());
        part(image.mime.as_bytes());
        part(&image.bytes);
    }
    for extra in extras {
        part(extra.as_bytes());
    }
    hash.finalize().into()
}

/// Counters that the journal's thread writes and anybody reads.
#[derive(Debug, Default)]
pub(in crate::journal) struct Counters {
    commits: AtomicU64,
    failures: AtomicU64,
    accepted: AtomicU64,
    repeats: AtomicU64,
    units: AtomicU64,
    events: AtomicU64,
    pruned: AtomicU64,
    batch_max: AtomicU64,
    owed: AtomicU64,
    wal_pages: AtomicU64,
    commit_us: AtomicU64,
    checkpoints: AtomicU64,
    checkpoint_us_max: AtomicU64,
}

/// What handles, places and the thread share.
pub(in crate::journal) struct Shared {
    places: AtomicUsize,
    places_max: usize,
    bytes: AtomicUsize,
    bytes_max: usize,
    /// Mirrors `trouble`, for the path of every send.
    bad: AtomicBool,
    trouble: Mutex<Option<String>>,
    watched: AtomicBool,
    closing: AtomicBool,
    closed: Mutex<bool>,
    closed_now: Condvar,
    counters: Counters,
    readers: Readers,
    time: time::JournalTime,
}

impl Shared {
    fn is_bad(&self) -> bool {
        self.bad.load(Ordering::Acquire)
    }

    fn trouble(&self) -> Option<String> {
        if self.is_bad() { self.trouble.lock().clone() } else { None }
    }

    /// True if that is news.
    fn set_trouble(&self, reason: Option<String>) -> bool {
        let now_bad = reason.is_some();
        if !now_bad && !self.is_bad() {
            return false;
        }
        *self.trouble.lock() = reason;
        self.bad.swap(now_bad, Ordering::AcqRel) != now_bad
    }

    fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    fn count(&self, which: impl Fn(&Counters) -> &AtomicU64, more: u64) {
        which(&self.counters).fetch_add(more, Ordering::Relaxed);
    }

    fn committed(&self, records: usize, us: u64) {
        self.count(|n| &n.commits, 1);
        self.counters.batch_max.fetch_max(records as u64, Ordering::Relaxed);
        self.counters.commit_us.store(us, Ordering::Relaxed);
    }

    fn checkpointed(&self, us: u64) {
        self.count(|n| &n.checkpoints, 1);
        self.counters.checkpoint_us_max.fetch_max(us, Ordering::Relaxed);
    }

    fn set_owed(&self, owed: usize) {
        self.counters.owed.store(owed as u64, Ordering::Relaxed);
    }

    fn set_wal_pages(&self, pages: i32) {
        self.counters.wal_pages.store(u64::from(pages.unsigned_abs()), Ordering::Relaxed);
    }

    fn give_bytes(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    fn close_readers(&self) {
        self.readers.close();
    }

    fn set_closed(&self) {
        *self.closed.lock() = true;
        self.closed_now.notify_all();
    }
}

/// Places in the journal's queue, given back when dropped. A record takes one along.
#[must_use = "the places are given back when this drops"]
pub struct Places {
    shared: Arc<Shared>,
    count: usize,
}

impl Places {
    /// Splits `count` of these places off (as many as there are, at most).
    pub fn take(&mut self, count: usize) -> Places {
        let count = count.min(self.count);
        self.count -= count;
        Places { shared: Arc::clone(&self.shared), count }
    }

    /// Takes others in.
    pub fn add(&mut self, mut others: Places) {
        self.count += std::mem::take(&mut others.count);
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        self.shared.places.fetch_sub(self.count, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for Places {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Places({})", self.count)
    }
}

/// Handle of the journal. Its thread ends when the last handle is gone.
#[derive(Clone)]
pub struct Journal {
    jobs: Sender<Job>,
    shared: Arc<Shared>,
    claim_age_ms: i64,
}

impl Journal {
    /// Opens, creates or migrates the journal of the state directory `dir` and starts its thread.
    ///
    /// # Errors
    /// One clear line: the file is foreign, damaged or of a newer program, or the disk says no.
    pub fn open(dir: &Path, options: JournalOptions, publisher: Arc<dyn Publisher>) -> Result<(Journal, Recovered)> {
        let path = schema::path_in(dir);
        let busy = Duration::from_millis(options.busy_ms);
        let (db, epoch) = schema::open_writer(&path, busy, options.pages_max)?;
        let (recovered, ledger) = recover::recover(&db, epoch)
            .map_err(|e| Error::internal(format!("journal {}: {}", path.display(), trouble::words(&e))))?;
        let time = time::JournalTime::open(&db)
            .map_err(|e| Error::internal(format!("journal {}: {}", path.display(), trouble::words(&e))))?;
        let (jobs, waiting) = unbounded();
        let shared = Arc::new(Shared {
            places: AtomicUsize::new(0),
            places_max: options.places_max,
            bytes: AtomicUsize::new(0),
            bytes_max: options.queue_bytes_max,
            bad: AtomicBool::new(false),
            trouble: Mutex::new(None),
            watched: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            closed: Mutex::new(false),
            closed_now: Condvar::new(),
            counters: Counters::default(),
            readers: Readers::new(path.clone(), busy),
            time,
        });
        let claim_age_ms = options.claim_age_ms;
        let writer = Writer {
            file: schema::identity(&path),
            path,
            db: Some(db),
            ledger,
            options,
            publisher,
            shared: Arc::clone(&shared),
            jobs: waiting,
            head: recovered.head,
            owed: VecDeque::new(),
            times: Times::new(),
        };
        threads::spawn(Name::fixed("journal"), STACK_BYTES, OnPanic::EndProcess, move || writer.run())?;
        Ok((Journal { jobs, shared, claim_age_ms }, recovered))
    }

    /// Takes `places` places in the queue.
    ///
    /// # Errors
    /// `CannotRecord` with the reason: no places left, or the disk is known to be bad. `ShuttingDown` after the end.
    pub fn reserve(&self, places: usize) -> Result<Places> {
        self.health()?;
        if self.shared.bytes.load(Ordering::Acquire) >= self.shared.bytes_max {
            return Err(cannot_record("too much content waits for the disk"));
        }
        self.reserve_for_outcome(places)
    }

    /// As [`Journal::reserve`], also while the disk is bad: for an outcome that nobody could foresee.
    ///
    /// # Errors
    /// `CannotRecord`: no places left. `ShuttingDown` after the end.
    pub fn reserve_for_outcome(&self, places: usize) -> Result<Places> {
        if self.shared.closing.load(Ordering::Acquire) {
            return Err(Error::new(Code::ShuttingDown, "the journal is closed"));
        }
        let max = self.shared.places_max;
        let taken = self.shared.places.fetch_update(Ordering::AcqRel, Ordering::Acquire, |taken| {
            taken.checked_add(places).filter(|sum| *sum <= max)
        });
        match taken {
            Ok(_) => Ok(Places { shared: Arc::clone(&self.shared), count: places }),
            Err(taken) => Err(cannot_record(&format!("{taken} of {max} places are taken by records that wait"))),
        }
    }

    fn send(&self, job: Job) {
        // The thread lives as long as a handle does and answers every job, after the end with a refusal.
        if self.jobs.send(job).is_err() {
            log::error!("journal: its thread is gone");
        }
    }

    /// Records a message: claim, content and event in one transaction. Never blocks; the order of calls is the order of
    /// commits.
    pub fn accept(&self, acceptance: Acceptance, place: Places, done: Done<AcceptOutcome>) {
        debug_assert!(place.count() >= 1, "a record needs a place");
        let images: usize = acceptance.message.images.iter().map(|image| image.bytes.len()).sum();
        // The text stands in the message and in its event.
        let bytes = acceptance.message.text.len() * 2 + images;
        self.shared.bytes.fetch_add(bytes, Ordering::AcqRel);
        self.send(Job::Accept { acceptance, bytes, place, done });
    }

    /// Records a unit, or fails and leaves everything as it was: the caller undoes. Never blocks.
    pub fn submit(&self, unit: Unit, place: Places, done: Done<Vec<EventId>>) {
        debug_assert!(place.count() >= 1, "a record needs a place");
        self.send(Job::Unit { unit, owed: false, place, done });
    }

    /// Records an outcome: kept and tried again, in order and before anything newer, until it commits. Fails only if it
    /// is no legal move, or at the end of the program. Never blocks.
    pub fn owe(&self, unit: Unit, place: Places, done: Done<Vec<EventId>>) {
        debug_assert!(place.count() >= 1, "a record needs a place");
        self.send(Job::Unit { unit, owed: true, place, done });
    }

    /// What the first send under `claim` was answered; `None` if there was none in seven days.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn claim_answer(&self, claim: &Claim) -> Result<Option<std::result::Result<ClaimAnswer, Conflict>>> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return Ok(crate::model::claim_answer(claim).map(Ok));
        }
        self.shared.readers.claim_answer(claim, self.shared.time.now() - self.claim_age_ms)
    }

    /// What is accepted, dispatched or failed in `session`, in the order of delivery.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn pending(&self, session: &SessionId) -> Result<Vec<PendingRow>> {
        self.shared.readers.pending(session)
    }

    /// The `n`-th photo (from 0) of a message that is still owed or failed: its type and bytes.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn pending_image(&self, message: &MessageUuid, n: usize) -> Result<Option<(String, Vec<u8>)>> {
        self.shared.readers.pending_image(message, n)
    }

    /// The whole content of a message that is still owed or failed.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn message(&self, message: &MessageUuid) -> Result<Option<Arc<Message>>> {
        self.shared.readers.message(message)
    }

    /// What was delivered in `session` (under any of its ids) within the last `within_ms` milliseconds, oldest first.
    /// Setting the wall clock changes nothing about it.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn delivered_within(&self, session: &SessionId, within_ms: i64) -> Result<Vec<(MessageUuid, TurnId)>> {
        let since_ms: UnixMs = self.shared.time.now().saturating_sub(within_ms);
        self.shared.readers.delivered_since(session, since_ms)
    }

    /// True if a turn of `session` (under any of its ids) was ever delivered, as far as the journal remembers: a day.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn has_delivered(&self, session: &SessionId) -> Result<bool> {
        Ok(!self.shared.readers.delivered_since(session, UnixMs::MIN)?.is_empty())
    }

    /// What a thread's message was answered.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn thread_answer(&self, message: &MessageUuid) -> Result<Option<KeptAnswer>> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return Ok(crate::model::thread_answer(message));
        }
        self.shared.readers.thread_answer(message)
    }

    /// Ok while records can be made.
    ///
    /// # Errors
    /// `CannotRecord` with the reason.
    pub fn health(&self) -> Result<()> {
        match self.shared.trouble() {
            Some(reason) => Err(cannot_record(&reason)),
            None => Ok(()),
        }
    }

    /// While true, events that other programs append are looked for a few times a second.
    pub fn set_watched(&self, watched: bool) {
        if self.shared.watched.swap(watched, Ordering::AcqRel) != watched && watched {
            self.send(Job::Look);
        }
    }

    /// Records what waits, then closes the file; what comes later is refused. True if that was done within `limit`.
    #[must_use]
    pub fn shutdown(&self, limit: Duration) -> bool {
        let _at = doing(Doing::Join);
        let deadline = Instant::now() + limit;
        if !self.shared.closing.swap(true, Ordering::AcqRel) {
            self.send(Job::Close);
        }
        let mut closed = self.shared.closed.lock();
        while !*closed {
            if self.shared.closed_now.wait_until(&mut closed, deadline).timed_out() {
                return *closed;
            }
        }
        true
    }

    /// Counters, and how it stands.
    #[must_use]
    pub fn stats(&self) -> JournalStats {
        let n = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        JournalStats {
            commits: get(&n.commits),
            failures: get(&n.failures),
            accepted: get(&n.accepted),
            repeats: get(&n.repeats),
            units: get(&n.units),
            events: get(&n.events),
            pruned: get(&n.pruned),
            batch_max: get(&n.batch_max),
            places: self.shared.places.load(Ordering::Relaxed) as u64,
            queue_bytes: self.shared.bytes.load(Ordering::Relaxed) as u64,
            owed: get(&n.owed),
            wal_pages: get(&n.wal_pages),
            commit_us: get(&n.commit_us),
            checkpoints: get(&n.checkpoints),
            checkpoint_us_max: get(&n.checkpoint_us_max),
            trouble: self.shared.trouble(),
        }
    }
}

impl EventStore for Journal {
    /// May stop early (after 4 MiB of data): only an empty answer is the end.
    fn events_after(&self, after: EventId, rows_max: usize) -> Result<Vec<StoredEvent>> {
        self.shared.readers.events_after(after, rows_max)
    }

    fn bounds(&self) -> Result<(EventId, EventId)> {
        self.shared.readers.bounds()
    }

    fn set_watched(&self, watched: bool) {
        Journal::set_watched(self, watched);
    }
}
