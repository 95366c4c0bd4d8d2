//! The thread `replay`: reads the store for clients that the ring cannot serve, one bounded batch at a time.
//! Leaves to `client` what is done with a batch. Rule a change could break: bounds are read after the rows, so that a
//! store that drops old events between the two is noticed and never makes a silent hole.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::{Counters, Shared};
use crate::bus::{EventStore, Frame};
use crate::error::Result;
use crate::ids::EventId;
use crate::sync::{Condvar, Mutex};
use crate::threads::{Doing, doing};

/// Rows of one read at most, so that no laggard keeps the others waiting.
const ROWS_MAX: usize = 256;
/// Bytes of a batch while few are behind: one write to a socket.
const BATCH_BYTES_MAX: usize = 64 * 1024;
/// Bytes of a batch when thousands are behind.
const BATCH_BYTES_MIN: usize = 4 * 1024;
/// What all batches together should stay below, in bytes.
const BATCHES_BYTES: usize = 4 * 1024 * 1024;
/// Batches remembered for clients that ask for the same rows (a reconnect storm), as long as somebody holds them.
const SHARED_BATCHES: usize = 16;

/// Rows of the store as frames, oldest first; shared by all clients that asked for the same.
pub(super) struct Batch {
    pub(super) frames: Vec<Arc<Frame>>,
    bytes: usize,
    alive: Arc<AtomicUsize>,
}

impl Batch {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.alive.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A question of one client.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    /// Which client.
    pub(super) token: u64,
    /// Which of its questions; an answer to an older one is void.
    pub(super) number: u32,
    /// Rows after this one; without it only the bounds.
    pub(super) rows_after: Option<EventId>,
}

/// What the store said.
pub(super) struct Found {
    pub(super) oldest: EventId,
    pub(super) head: EventId,
    /// None if there are no rows.
    pub(super) batch: Option<Arc<Batch>>,
}

/// The answer to an [`Ask`].
pub(super) struct Reply {
    pub(super) ask: Ask,
    pub(super) found: Result<Found>,
}

#[derive(Default)]
struct Queue {
    /// Newcomers wait for one short look-up, so they go first.
    bounds: Vec<Ask>,
    rows: VecDeque<Ask>,
    stop: bool,
}

/// Questions on their way to the thread: at most one of each client counts, so the clients bound them.
#[derive(Default)]
pub(super) struct Asks {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Bytes of all batches that somebody holds.
    pub(super) alive: Arc<AtomicUsize>,
}

impl Asks {
    pub(super) fn ask(&self, ask: Ask) {
        let mut queue = self.queue.lock();
        match ask.rows_after {
            Some(_) => queue.rows.push_back(ask),
            None => queue.bounds.push(ask),
        }
        drop(queue);
        self.changed.notify_one();
    }

    pub(super) fn stop(&self) {
        self.queue.lock().stop = true;
        self.changed.notify_one();
    }
}

/// Body of the thread; ends after [`Asks::stop`].
pub(super) fn run(shared: &Shared, store: &dyn EventStore) {
    let mut reader = StoreReader { store, alive: shared.asks.alive.clone(), shared: VecDeque::new(), row_bytes: 1024 };
    let mut newcomers = Vec::new();
    loop {
        let next = {
            let mut queue = shared.asks.queue.lock();
            loop {
                if queue.stop {
                    return;
                }
                std::mem::swap(&mut newcomers, &mut queue.bounds);
                let next = queue.rows.pop_front();
                if !newcomers.is_empty() || next.is_some() {
                    break next;
                }
                let _at = doing(Doing::WaitWork);
                shared.asks.changed.wait(&mut queue);
            }
        };
        let mut replies = Vec::with_capacity(newcomers.len() + 1);
        if !newcomers.is_empty() {
            let bounds = store.bounds();
            for ask in newcomers.drain(..) {
                let found = bounds.clone().map(|(oldest, head)| Found { oldest, head, batch: None });
                replies.push(Reply { ask, found });
            }
        }
        if let Some(ask) = next {
            let laggards = shared.counters.replaying_clients.load(Ordering::Relaxed) as usize;
            let bytes_max = (BATCHES_BYTES / laggards.max(1)).clamp(BATCH_BYTES_MIN, BATCH_BYTES_MAX);
            Counters::add(&shared.counters.store_reads, 1);
            replies.push(Reply { ask, found: reader.rows(ask.rows_after.unwrap_or(0), bytes_max) });
        }
        shared.inbox.lock().replies.append(&mut replies);
        shared.waker.wake();
    }
}

struct StoreReader<'a> {
    store: &'a dyn EventStore,
    alive: Arc<AtomicUsize>,
    shared: VecDeque<(EventId, Weak<Batch>)>,
    /// Bytes of a row lately, so that a read fetches about as much as is wanted.
    row_bytes: usize,
}

impl StoreReader<'_> {
    fn rows(&mut self, after: EventId, bytes_max: usize) -> Result<Found> {
        self.shared.retain(|(_, batch)| batch.strong_count() > 0);
        let known = self.shared.iter().find(|(at, _)| *at == after).and_then(|(_, batch)| batch.upgrade());
        let batch = match known {
            Some(batch) => Some(batch),
            None => self.read(after, bytes_max)?,
        };
        let (oldest, head) = self.store.bounds()?;
        Ok(Found { oldest, head, batch })
    }

    fn read(&mut self, after: EventId, bytes_max: usize) -> Result<Option<Arc<Batch>>> {
        let rows_max = (bytes_max / self.row_bytes.max(1)).clamp(1, ROWS_MAX);
        let rows = self.store.events_after(after, rows_max)?;
        if rows.is_empty() {
            return Ok(None);
        }
        let (mut frames, mut bytes) = (Vec::with_capacity(rows.len()), 0);
        for row in &rows {
            // A read that brought more than wanted is cut; the rest is read when this is written.
            if bytes >= bytes_max {
                break;
            }
            let frame = Frame::kept(row.id, &row.event, &row.data_json, &row.at);
            bytes += frame.ws().len();
            frames.push(Arc::new(frame));
        }
        self.row_bytes = (self.row_bytes * 3 + bytes / frames.len()) / 4;
        self.alive.fetch_add(bytes, Ordering::Relaxed);
        let batch = Arc::new(Batch { frames, bytes, alive: self.alive.clone() });
        self.shared.push_back((after, Arc::downgrade(&batch)));
        if self.shared.len() > SHARED_BATCHES {
            self.shared.pop_front();
        }
        Ok(Some(batch))
    }
}
