//! Facade over parking_lot and crossbeam: session code takes its locks, condvars and channels from here, so that the
//! model checker can run the shipped code with its own. Leaves which lock comes before which to the table in `lib.rs`.
//! Rule a change could break: who holds a [`Watched`] lock, and since when, is read without taking any lock.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[cfg(feature = "model")]
pub mod model;

#[cfg(feature = "model")]
pub use self::model::{Condvar, Mutex, MutexGuard, Receiver, Sender, bounded, unbounded};
#[cfg(not(feature = "model"))]
pub use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
pub use crossbeam_channel::{RecvTimeoutError, TryRecvError, TrySendError};
#[cfg(not(feature = "model"))]
pub use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::threads::{self, Doing, doing};

/// A lock that somebody waits for longer than this is told with a dump, once. Critical sections take microseconds.
const HELD_LIMIT: Duration = Duration::from_secs(5);

/// A mutex that tells dumps who holds it. Costs four relaxed stores and a clock more than a plain one.
pub struct Watched<T> {
    name: &'static str,
    /// What who waits for it is at.
    waits: Doing,
    lock: Mutex<T>,
    holder: AtomicU64,
    since_ms: AtomicU64,
    told: AtomicBool,
}

/// Who holds a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Kernel thread id; 0 for a thread that is not in the table.
    pub tid: u64,
    /// For how long, in milliseconds.
    pub for_ms: u64,
}

impl<T> Watched<T> {
    /// An open lock; `name` is what dumps call it, `waits` what a thread is at that waits for it.
    pub fn new(name: &'static str, waits: Doing, value: T) -> Self {
        Self {
            name,
            waits,
            lock: Mutex::new(value),
            holder: AtomicU64::new(u64::MAX),
            since_ms: AtomicU64::new(0),
            told: AtomicBool::new(false),
        }
    }

    /// Takes it.
    pub fn lock(&self) -> WatchedGuard<'_, T> {
        self.lock_or_tell(HELD_LIMIT)
    }

    fn lock_or_tell(&self, limit: Duration) -> WatchedGuard<'_, T> {
        if let Some(guard) = self.lock.try_lock() {
            return self.guarded(guard);
        }
        let _at = doing(self.waits);
        if let Some(guard) = self.lock.try_lock_for(limit) {
            return self.guarded(guard);
        }
        if !self.told.swap(true, Ordering::Relaxed) {
            crate::dump::alarm(&format!("the lock {} is held for more than {} s", self.name, limit.as_secs()));
        }
        let guard = self.lock.lock();
        self.guarded(guard)
    }

    /// Takes it within `limit`, or not: for dumps.
    pub fn try_lock_for(&self, limit: Duration) -> Option<WatchedGuard<'_, T>> {
        self.lock.try_lock_for(limit).map(|guard| self.guarded(guard))
    }

    fn guarded<'a>(&'a self, guard: MutexGuard<'a, T>) -> WatchedGuard<'a, T> {
        self.mark();
        WatchedGuard { guard, of: self }
    }

    fn mark(&self) {
        self.since_ms.store(threads::monotonic_ms(), Ordering::Relaxed);
        self.holder.store(threads::my_tid(), Ordering::Release);
    }

    fn unmark(&self) {
        self.holder.store(u64::MAX, Ordering::Release);
    }

    /// Who holds it now. Takes no lock.
    pub fn held(&self) -> Option<Held> {
        let tid = self.holder.load(Ordering::Acquire);
        let for_ms = threads::monotonic_ms().saturating_sub(self.since_ms.load(Ordering::Relaxed));
        (tid != u64::MAX).then_some(Held { tid, for_ms })
    }
}

/// The lock is held while this lives.
pub struct WatchedGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    of: &'a Watched<T>,
}

impl<T> WatchedGuard<'_, T> {
    /// Gives the lock back until `changed` is notified.
    pub fn wait(&mut self, changed: &Condvar) {
        self.of.unmark();
        changed.wait(&mut self.guard);
        self.of.mark();
    }

    /// The same, until `deadline` at most; true if that passed.
    pub fn wait_until(&mut self, changed: &Condvar, deadline: Instant) -> bool {
        self.of.unmark();
        let timed_out = changed.wait_until(&mut self.guard, deadline).timed_out();
        self.of.mark();
        timed_out
    }
}

impl<T> Deref for WatchedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for WatchedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> Drop for WatchedGuard<'_, T> {
    fn drop(&mut self) {
        // Before the lock itself is given back, so that the next holder's mark stays.
        self.of.unmark();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::threads::{Name, OnPanic, SMALL_STACK_BYTES, spawn};

    #[test]
    fn a_lock_tells_who_holds_it_and_a_waiter_does_not_hold_it() {
        let lock = Arc::new((Watched::new("test", Doing::WaitState, false), Condvar::new()));
        assert_eq!(lock.0.held(), None);
        let (said, hear) = bounded::<()>(0);
        let (go, wait) = bounded::<()>(0);
        let theirs = lock.clone();
        let thread = spawn(const { Name::fixed("holder") }, SMALL_STACK_BYTES, OnPanic::Contain, move || {
            let mut guard = theirs.0.lock();
            said.send(()).unwrap();
            wait.recv().unwrap();
            while !*guard {
                guard.wait(&theirs.1);
            }
        })
        .unwrap();
        hear.recv().unwrap();
        let holder = lock.0.held().expect("held");
        let tid = threads::table().0.into_iter().find(|r| r.name.as_str() == "holder").unwrap().tid;
        assert_eq!(holder.tid, tid);
        assert!(lock.0.try_lock_for(Duration::from_millis(1)).is_none());
        go.send(()).unwrap();
        // It waits on the condvar now, or will soon: the lock is free then.
        let mut guard = lock.0.lock_or_tell(Duration::from_secs(20));
        *guard = true;
        assert_eq!(lock.0.held().unwrap().tid, threads::my_tid());
        drop(guard);
        lock.1.notify_all();
        assert!(thread.join_within(Duration::from_secs(20)));
        assert_eq!(lock.0.held(), None);
    }
}
