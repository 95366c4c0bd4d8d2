//! The only spawner of threads: names of 1 to 15 bytes (checked at compile time), a join with a limit, and the table
//! that dumps read. Leaves to others what a thread does. Rule a change could break: reading the table takes no lock and
//! allocates no slot, so a dump works whatever any thread is stuck in.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::{Receiver, bounded};

/// Stack of threads whose frames are known to be small, in bytes.
pub const SMALL_STACK_BYTES: usize = 256 * 1024;
/// Stack of threads that parse JSON, walk transcripts or run SQLite, in bytes. Only touched pages cost memory.
pub const WORK_STACK_BYTES: usize = 1024 * 1024;
/// Threads the table can show; later ones run unlisted (the dump says how many).
const SLOTS: usize = 1024;
/// What Linux keeps of a thread's name, in bytes.
const NAME_BYTES_MAX: usize = 15;

/// A thread's name: 1 to 15 bytes of printable ASCII.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; NAME_BYTES_MAX],
    len: u8,
}

impl Name {
    /// A name known at compile time; one that is too long or not printable ASCII does not compile in a `const`.
    #[must_use]
    pub const fn fixed(text: &str) -> Self {
        assert!(!text.is_empty() && text.len() <= NAME_BYTES_MAX, "a thread name is 1 to 15 bytes");
        let from = text.as_bytes();
        let mut bytes = [0; NAME_BYTES_MAX];
        let mut i = 0;
        while i < from.len() {
            assert!(from[i] > 0x20 && from[i] < 0x7f, "a thread name is printable ASCII");
            bytes[i] = from[i];
            i += 1;
        }
        Self { bytes, len: from.len() as u8 }
    }

    /// `http-07` and its like: `stem`, then two digits.
    #[must_use]
    pub fn numbered(stem: &str, number: usize) -> Self {
        Self::cut(&format!("{stem}-{number:02}"))
    }

    /// `run-3f9a2c1b`: the run of the session whose id starts so.
    #[must_use]
    pub fn run(session: &crate::ids::SessionId) -> Self {
        Self::cut(&format!("run-{}", session.short()))
    }

    fn cut(text: &str) -> Self {
        let mut bytes = [0; NAME_BYTES_MAX];
        let len = text.len().min(NAME_BYTES_MAX);
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        Self { bytes, len: len as u8 }
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or("?")
    }
}

macro_rules! doing {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// What a thread is at, in one closed list, so that the table holds a byte and no pointer.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Doing { $($(#[$doc])* $name),* }

        impl Doing {
            const ALL: &'static [Doing] = &[$(Doing::$name),*];

            /// In words, for the dump.
            #[must_use]
            pub fn words(self) -> &'static str {
                match self { $(Doing::$name => $text),* }
            }
        }
    };
}

doing! {
    /// On the CPU, as far as it said.
    Working = "working",
    /// A worker between requests.
    WaitRequest = "waits for a request",
    /// epoll or poll.
    WaitReady = "waits for sockets",
    /// The journal or another thread that takes work from a channel.
    WaitWork = "waits for work",
    /// A sender whose record is being committed.
    WaitCommit = "waits for a commit",
    /// A run's pump.
    WaitAgent = "waits for its agent",
    /// A worker whose answer waits for its reader.
    WaitReader = "waits for a reader",
    /// A request that waits for the end of a turn.
    WaitTurn = "waits for a turn to end",
    /// A thread message that waits for its place in the pool.
    WaitPlace = "waits for its place",
    /// The lock of the map of conversations, which another thread holds.
    WaitSessions = "waits for the lock sessions",
    /// The lock of one conversation, which another thread holds.
    WaitState = "waits for a lock state",
    /// The disk.
    ReadFile = "reads a file",
    /// The disk, with everybody who waits for a record behind it.
    Commit = "commits",
    /// A timer.
    WaitTime = "waits for its next round",
    /// A signal.
    WaitSignal = "waits for a signal",
    /// fork and exec of an agent.
    Spawn = "starts an agent",
    /// wait4 of an agent that was told to go.
    Reap = "waits for its agent to exit",
    /// The broker that kept events are copied to.
    WaitBroker = "waits for the broker",
    /// Another thread's end.
    Join = "waits for a thread to end",
}

struct Slot {
    /// Kernel thread id; 0 while free.
    tid: AtomicU64,
    name_low: AtomicU64,
    name_high: AtomicU64,
    doing: AtomicU8,
    since_ms: AtomicU64,
    /// The first eight letters of the session that it is at work for; 0 for none.
    session: AtomicU64,
}

#[expect(clippy::declare_interior_mutable_const, reason = "the seed of a static array, never used otherwise")]
const FREE: Slot = Slot {
    tid: AtomicU64::new(0),
    name_low: AtomicU64::new(0),
    name_high: AtomicU64::new(0),
    doing: AtomicU8::new(0),
    since_ms: AtomicU64::new(0),
    session: AtomicU64::new(0),
};

static TABLE: [Slot; SLOTS] = [FREE; SLOTS];
static UNLISTED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static MINE: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// Milliseconds on the monotonic clock, from the first call of this process.
pub(crate) fn monotonic_ms() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Kernel id of the calling thread; 0 if it is not in the table.
#[must_use]
pub fn my_tid() -> u64 {
    MINE.get().map_or(0, |at| TABLE[at].tid.load(Ordering::Relaxed))
}

/// Takes a slot for the calling thread until dropped.
struct Listed(Option<usize>);

impl Listed {
    fn take(name: Name) -> Self {
        let tid = u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
        for (at, slot) in TABLE.iter().enumerate() {
            if slot.tid.compare_exchange(0, tid, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                let mut wide = [0u8; 16];
                wide[..NAME_BYTES_MAX].copy_from_slice(&name.bytes);
                let (low, high) = wide.split_at(8);
                slot.name_low.store(u64::from_le_bytes(low.try_into().unwrap_or_default()), Ordering::Relaxed);
                slot.name_high.store(u64::from_le_bytes(high.try_into().unwrap_or_default()), Ordering::Relaxed);
                slot.doing.store(Doing::Working as u8, Ordering::Relaxed);
                slot.session.store(0, Ordering::Relaxed);
                slot.since_ms.store(monotonic_ms(), Ordering::Release);
                MINE.set(Some(at));
                return Self(Some(at));
            }
        }
        UNLISTED.fetch_add(1, Ordering::Relaxed);
        Self(None)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        match self.0 {
            Some(at) => TABLE[at].tid.store(0, Ordering::Release),
            None => {
                UNLISTED.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

/// Says what the calling thread is at until the guard drops, then what it was at before.
#[must_use = "the thread reads as being at it only while the guard lives"]
pub struct DoingGuard(Option<(usize, u8)>);

/// Marks the calling thread as being at `what` until the guard drops. Costs two relaxed stores.
pub fn doing(what: Doing) -> DoingGuard {
    let Some(at) = MINE.get() else { return DoingGuard(None) };
    let was = TABLE[at].doing.swap(what as u8, Ordering::Relaxed);
    TABLE[at].since_ms.store(monotonic_ms(), Ordering::Relaxed);
    DoingGuard(Some((at, was)))
}

impl Drop for DoingGuard {
    fn drop(&mut self) {
        if let Some((at, was)) = self.0 {
            TABLE[at].doing.store(was, Ordering::Relaxed);
            TABLE[at].since_ms.store(monotonic_ms(), Ordering::Relaxed);
        }
    }
}

/// Says for which session the calling thread is at work until the guard drops.
#[must_use = "the thread reads as being at work for it only while the guard lives"]
pub struct SessionGuard(Option<(usize, u64)>);

/// Marks the calling thread as being at work for `session` until the guard drops. Costs a relaxed store.
pub fn at_work_for(session: &crate::ids::SessionId) -> SessionGuard {
    let Some(at) = MINE.get() else { return SessionGuard(None) };
    let mut letters = [0; 8];
    for (letter, of) in letters.iter_mut().zip(session.as_str().bytes()) {
        *letter = of;
    }
    SessionGuard(Some((at, TABLE[at].session.swap(u64::from_le_bytes(letters), Ordering::Relaxed))))
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        if let Some((at, was)) = self.0 {
            TABLE[at].session.store(was, Ordering::Relaxed);
        }
    }
}

/// What happens when a thread's body panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnPanic {
    /// Log it and end the thread; its owner copes.
    Contain,
    /// Print the dump and end the process with code 1: a supervisor restarts it and the journal recovers.
    EndProcess,
}

/// A running thread of ours. Dropping it lets the thread run on; owners call [`Thread::join_within`].
#[derive(Debug)]
pub struct Thread {
    name: Name,
    ended: Receiver<()>,
}

impl Thread {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Waits until the thread ended, `limit` at most; true if it did.
    #[must_use]
    pub fn join_within(&self, limit: Duration) -> bool {
        let _at = doing(Doing::Join);
        // The sender is dropped by the thread's end, so a disconnect is the news.
        !matches!(self.ended.recv_timeout(limit), Err(crate::sync::RecvTimeoutError::Timeout))
    }
}

/// Starts a thread called `name` with a stack of `stack_bytes`.
///
/// # Errors
/// What the kernel says when it has no thread to give.
pub fn spawn(
    name: Name,
    stack_bytes: usize,
    on_panic: OnPanic,
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<Thread> {
    let (alive, ended) = bounded::<()>(0);
    #[cfg(feature = "model")]
    {
        // Threads of the checker: in no table, and a panic fails the schedule.
        let _ = (stack_bytes, on_panic);
        shuttle::thread::spawn(move || {
            let _alive = alive;
            body();
        });
        Ok(Thread { name, ended })
    }
    #[cfg(not(feature = "model"))]
    spawn_listed(name, stack_bytes, on_panic, alive, body)?;
    #[cfg(not(feature = "model"))]
    Ok(Thread { name, ended })
}

#[cfg(not(feature = "model"))]
fn spawn_listed(
    name: Name,
    stack_bytes: usize,
    on_panic: OnPanic,
    alive: crate::sync::Sender<()>,
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    #[expect(clippy::disallowed_methods, reason = "this is the one place that spawns")]
    std::thread::Builder::new().name(name.as_str().to_owned()).stack_size(stack_bytes).spawn(move || {
        let _alive = alive;
        let _listed = Listed::take(name);
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            log::error!("thread {} panicked", name.as_str());
            match on_panic {
                OnPanic::Contain => {}
                OnPanic::EndProcess => {
                    crate::dump::print_and_exit();
                }
            }
        }
    })?;
    Ok(())
}

/// Lists the calling thread (main, or one a library made) under `name` for as long as the process lives.
pub fn list_this_thread(name: Name) {
    std::mem::forget(Listed::take(name));
}

/// One row of the table.
#[derive(Debug, Clone)]
pub struct Row {
    /// Kernel thread id, as `/proc/self/task/<tid>`.
    pub tid: u64,
    /// Its name.
    pub name: Name,
    /// What it said it is at.
    pub doing: Doing,
    /// For how long, in milliseconds.
    pub for_ms: u64,
    /// The first letters of the id of the session that it is at work for.
    pub session: Option<String>,
}

/// Every listed thread, and how many are unlisted. Takes no lock.
#[must_use]
pub fn table() -> (Vec<Row>, u64) {
    let now = monotonic_ms();
    let rows = TABLE
        .iter()
        .filter_map(|slot| {
            let tid = slot.tid.load(Ordering::Acquire);
            if tid == 0 {
                return None;
            }
            let mut bytes = [0; NAME_BYTES_MAX];
            bytes[..8].copy_from_slice(&slot.name_low.load(Ordering::Relaxed).to_le_bytes());
            bytes[8..].copy_from_slice(&slot.name_high.load(Ordering::Relaxed).to_le_bytes()[..7]);
            let len = bytes.iter().position(|b| *b == 0).unwrap_or(NAME_BYTES_MAX) as u8;
            let doing = Doing::ALL[usize::from(slot.doing.load(Ordering::Relaxed)).min(Doing::ALL.len() - 1)];
            let since = slot.since_ms.load(Ordering::Relaxed);
            let letters = slot.session.load(Ordering::Relaxed).to_le_bytes();
            let letters: Vec<u8> = letters.into_iter().take_while(|letter| *letter != 0).collect();
            let session = String::from_utf8(letters).ok().filter(|letters| !letters.is_empty());
            Some(Row { tid, name: Name { bytes, len }, doing, for_ms: now.saturating_sub(since), session })
        })
        .collect();
    (rows, UNLISTED.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_listed_under_its_name_with_what_it_is_at_until_it_ends() {
        let (go, wait) = bounded::<()>(0);
        let (said, hear) = bounded::<()>(0);
        let thread = spawn(Name::fixed("listed-thread"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
            let _at = doing(Doing::WaitWork);
            said.send(()).unwrap();
            let _ = wait.recv();
        })
        .unwrap();
        hear.recv().unwrap();
        let find = || table().0.into_iter().find(|r| r.name.as_str() == "listed-thread");
        assert_eq!(find().unwrap().doing, Doing::WaitWork);
        assert!(!thread.join_within(Duration::from_millis(1)));
        drop(go);
        assert!(thread.join_within(Duration::from_secs(10)));
        assert!(find().is_none());
    }

    #[test]
    fn a_panic_is_contained_and_the_end_is_seen() {
        let thread =
            spawn(Name::numbered("boom", 7), SMALL_STACK_BYTES, OnPanic::Contain, || panic!("on purpose")).unwrap();
        assert_eq!(thread.name(), "boom-07");
        assert!(thread.join_within(Duration::from_secs(10)));
    }
}
