//! Locks, condvars, channels and threads of the model checker, with the names and signatures of the shipped ones.
//! Rule a change could break: a wait times out only where the scenario says so, a few times in a schedule, at once and
//! whether or not its news would come. So a wake-up that only a time limit would make up for is a deadlock here, and the
//! checker reports it.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvError, RecvTimeoutError, SendError, TryRecvError, TrySendError};

/// A mutex.
#[derive(Debug, Default)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

/// Its guard.
pub struct MutexGuard<'a, T> {
    guard: Option<shuttle::sync::MutexGuard<'a, T>>,
    of: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    /// An open one.
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    /// Takes it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { guard: Some(self.take()), of: self }
    }

    fn take(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes it if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(|guard| MutexGuard { guard: Some(guard), of: self })
    }

    /// Takes it.
    pub fn try_lock_for(&self, _limit: Duration) -> Option<MutexGuard<'_, T>> {
        Some(self.lock())
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("only a wait takes it out")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("only a wait takes it out")
    }
}

impl<T> MutexGuard<'_, T> {
    /// True if the wait that begins now times out: the lock is given back for a moment, as in any wait.
    fn times_out(&mut self) -> bool {
        if !crate::model::times_out() {
            return false;
        }
        self.guard = None;
        shuttle::thread::yield_now();
        self.guard = Some(self.of.take());
        true
    }
}

/// A condvar.
#[derive(Debug, Default)]
pub struct Condvar(shuttle::sync::Condvar);

/// Whether a wait timed out.
#[derive(Debug, Clone, Copy)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// It did.
    #[must_use]
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// One without waiters.
    #[must_use]
    pub fn new() -> Self {
        Self(shuttle::sync::Condvar::new())
    }

    /// Waits for a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(inner) = guard.guard.take() {
            guard.guard = Some(self.0.wait(inner).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// The same, or times out.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _deadline: Instant) -> WaitTimeoutResult {
        let timed_out = guard.times_out();
        if !timed_out {
            self.wait(guard);
        }
        WaitTimeoutResult(timed_out)
    }

    /// The same, or times out.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) -> WaitTimeoutResult {
        self.wait_until(guard, Instant::now() + limit)
    }

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes every waiter.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[derive(Debug)]
struct Channel<T> {
    queue: Mutex<VecDeque<T>>,
    changed: Condvar,
    room: usize,
    senders: AtomicUsize,
    receivers: AtomicUsize,
}

/// The sending end of a channel.
#[derive(Debug)]
pub struct Sender<T>(Arc<Channel<T>>);

/// The receiving end of a channel.
#[derive(Debug)]
pub struct Receiver<T>(Arc<Channel<T>>);

/// A channel with `room`; with none at all, one place stands for the meeting.
#[must_use]
pub fn bounded<T>(room: usize) -> (Sender<T>, Receiver<T>) {
    let channel = Arc::new(Channel {
        queue: Mutex::new(VecDeque::new()),
        changed: Condvar::new(),
        room: room.max(1),
        senders: AtomicUsize::new(1),
        receivers: AtomicUsize::new(1),
    });
    (Sender(Arc::clone(&channel)), Receiver(channel))
}

/// A channel without a limit.
#[must_use]
pub fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
    bounded(usize::MAX)
}

impl<T> Sender<T> {
    /// Sends; waits for room.
    ///
    /// # Errors
    /// No receiver is left.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        let mut queue = self.0.queue.lock();
        while queue.len() >= self.0.room && self.0.receivers.load(Ordering::SeqCst) > 0 {
            self.0.changed.wait(&mut queue);
        }
        if self.0.receivers.load(Ordering::SeqCst) == 0 {
            return Err(SendError(value));
        }
        queue.push_back(value);
        self.0.changed.notify_all();
        Ok(())
    }

    /// Sends if there is room.
    ///
    /// # Errors
    /// There is none, or no receiver is left.
    pub fn try_send(&self, value: T) -> Result<(), TrySendError<T>> {
        let mut queue = self.0.queue.lock();
        if self.0.receivers.load(Ordering::SeqCst) == 0 {
            return Err(TrySendError::Disconnected(value));
        }
        if queue.len() >= self.0.room {
            return Err(TrySendError::Full(value));
        }
        queue.push_back(value);
        self.0.changed.notify_all();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Receives; waits.
    ///
    /// # Errors
    /// Nothing is left, and no sender.
    pub fn recv(&self) -> Result<T, RecvError> {
        let mut queue = self.0.queue.lock();
        loop {
            if let Some(value) = queue.pop_front() {
                self.0.changed.notify_all();
                return Ok(value);
            }
            if self.0.senders.load(Ordering::SeqCst) == 0 {
                return Err(RecvError);
            }
            self.0.changed.wait(&mut queue);
        }
    }

    /// The same, or times out.
    ///
    /// # Errors
    /// As [`Receiver::recv`].
    pub fn recv_timeout(&self, _limit: Duration) -> Result<T, RecvTimeoutError> {
        let mut queue = self.0.queue.lock();
        if queue.is_empty() && queue.times_out() && queue.is_empty() {
            return Err(RecvTimeoutError::Timeout);
        }
        drop(queue);
        self.recv().map_err(|_| RecvTimeoutError::Disconnected)
    }

    /// Receives what is there.
    ///
    /// # Errors
    /// Nothing is.
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        let mut queue = self.0.queue.lock();
        match queue.pop_front() {
            Some(value) => {
                self.0.changed.notify_all();
                Ok(value)
            }
            None if self.0.senders.load(Ordering::SeqCst) == 0 => Err(TryRecvError::Disconnected),
            None => Err(TryRecvError::Empty),
        }
    }

    /// What is there now.
    pub fn try_iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.try_recv().ok())
    }
}

impl<T> Channel<T> {
    fn end_left(&self) {
        // A schedule that fails unwinds every thread; nobody waits any more then.
        if !std::thread::panicking() {
            drop(self.queue.lock());
            self.changed.notify_all();
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        self.0.receivers.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if self.0.senders.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.end_left();
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        if self.0.receivers.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.end_left();
        }
    }
}
