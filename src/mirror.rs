//! Kept events copied into a stream of an outside broker (Redis Streams), for consumers of many boxes. Feature `mirror`.
//!
//! Leaves to others: what is an event (`journal`), trimming the stream (its operator). Rule a change could break: the
//! broker's own last id is the only cursor, asked anew after every doubt, and an entry's id is the event's id; so a
//! second copy is refused by the broker itself, and what the broker lost with its machine is sent again. A batch is one
//! transaction: the broker takes all of it or nothing, so that no refusal in the middle can leave a hole.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::{Client, Connection, ErrorKind, RedisError, RedisResult, Value};

use crate::bus::{Bus, EventStore, StoredEvent};
use crate::error::{Code, Error, Result};
use crate::ids::EventId;
use crate::sync::{Condvar, Mutex};
use crate::threads::{self, Doing, Name, OnPanic, Thread, doing};

/// Events of one transaction at most; the store gives at most 4 MiB or one event at once.
const ROWS_MAX: usize = 256;
/// The set that lists the stream of every box, so that consumers find them.
const STREAMS_KEY: &str = "beebox:streams";
/// How long the broker may take to connect or to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// First wait after a failure; doubled up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
/// Longest wait between two tries.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Without news, the broker is asked so often whether it still has everything: it may have lost its last second.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// Counters of the mirror.
#[derive(Debug, Clone, Default)]
pub struct MirrorStats {
    /// Events that the broker took.
    pub events: u64,
    /// Tries that failed.
    pub failures: u64,
    /// Newest event the broker is known to have.
    pub last: u64,
}

#[derive(Default)]
struct Bell {
    news: bool,
    stop: bool,
}

struct Shared {
    bell: Mutex<Bell>,
    rung: Condvar,
    events: AtomicU64,
    failures: AtomicU64,
    last: AtomicU64,
}

impl Shared {
    fn ring(&self, change: impl FnOnce(&mut Bell)) {
        change(&mut self.bell.lock());
        self.rung.notify_one();
    }

    fn is_stopped(&self) -> bool {
        self.bell.lock().stop
    }

    /// Waits for the end, for news too if `for_news`, `limit` at most.
    fn wait(&self, limit: Duration, for_news: bool) {
        let until = Instant::now() + limit;
        let mut bell = self.bell.lock();
        while !(bell.stop || for_news && bell.news) {
            if self.rung.wait_until(&mut bell, until).timed_out() {
                break;
            }
        }
        if for_news {
            bell.news = false;
        }
    }
}

/// The running mirror; ends with [`Mirror::shutdown`].
pub struct Mirror {
    shared: Arc<Shared>,
    thread: Thread,
}

/// Checks the broker's address, without connecting.
///
/// # Errors
/// `bad_field`: it is not one that this build can use.
pub fn check(url: &str) -> Result<()> {
    open(url).map(|_| ())
}

fn open(url: &str) -> Result<Client> {
    // The address may hold a password: it is never repeated.
    Client::open(url)
        .map_err(|e| Error::new(Code::BadField, format!("--mirror: {e}; it is such as redis://127.0.0.1:6379/")))
}

/// Key of the stream of the box called `name`, in the life `epoch` of its journal: event ids begin anew with each.
fn stream_key(name: &str, epoch: &str) -> String {
    format!("beebox:{name}:{epoch}")
}

/// Copies what `store` keeps to the broker at `url`, from where the broker says it is, and goes on with what `bus` tells.
///
/// # Errors
/// `bad_field` for the address; what the kernel says when it has no thread to give.
pub fn start(url: &str, name: &str, bus: &Bus, store: Arc<dyn EventStore>) -> Result<Mirror> {
    let client = open(url)?;
    let key = stream_key(name, bus.epoch());
    let shared = Arc::new(Shared {
        bell: Mutex::new(Bell::default()),
        rung: Condvar::new(),
        events: AtomicU64::new(0),
        failures: AtomicU64::new(0),
        last: AtomicU64::new(0),
    });
    let theirs = shared.clone();
    let thread =
        threads::spawn(const { Name::fixed("mirror") }, threads::WORK_STACK_BYTES, OnPanic::EndProcess, move || {
            Copier { client, key, store, shared: theirs }.run()
        })?;
    let bell = shared.clone();
    bus.listen(Arc::new(move |heard| {
        if heard.id.is_some() {
            bell.ring(|bell| bell.news = true);
        }
    }));
    Ok(Mirror { shared, thread })
}

impl Mirror {
    /// Ends it; what the broker does not have yet it gets after the next start. True if that took no longer than `limit`.
    #[must_use]
    pub fn shutdown(&self, limit: Duration) -> bool {
        self.shared.ring(|bell| bell.stop = true);
        self.thread.join_within(limit)
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> MirrorStats {
        MirrorStats {
            events: self.shared.events.load(Ordering::Relaxed),
            failures: self.shared.failures.load(Ordering::Relaxed),
            last: self.shared.last.load(Ordering::Relaxed),
        }
    }
}

/// Why a round ended early.
enum Trouble {
    /// The broker, or the way to it.
    Broker(RedisError),
    /// Our own journal.
    Store(Error),
    /// The broker has events that the journal never had: copying on would put two stories under one name.
    Ahead { last: EventId, head: EventId },
}

impl From<RedisError> for Trouble {
    fn from(e: RedisError) -> Self {
        Trouble::Broker(e)
    }
}

impl From<Error> for Trouble {
    fn from(e: Error) -> Self {
        Trouble::Store(e)
    }
}

struct Copier {
    client: Client,
    key: String,
    store: Arc<dyn EventStore>,
    shared: Arc<Shared>,
}

impl Copier {
    fn run(&self) {
        let mut retry = RETRY_MIN;
        let mut told = false;
        while !self.shared.is_stopped() {
            let before = self.shared.last.load(Ordering::Relaxed);
            let Err(trouble) = self.follow(&mut told) else { return };
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
            // Told once for each time the broker is away, not with each try.
            if !told {
                match &trouble {
                    Trouble::Broker(e) => log::warn!("mirror: the broker does not take events, trying on: {e}"),
                    Trouble::Store(e) => log::warn!("mirror: {e}"),
                    Trouble::Ahead { last, head } => log::error!(
                        "mirror: stream {} ends with event {last}, but the journal with {head}: nothing is copied \
                         until the stream is deleted or the journal is further (was an old journal put back?)",
                        self.key
                    ),
                }
                told = true;
            }
            if self.shared.last.load(Ordering::Relaxed) != before {
                retry = RETRY_MIN;
            }
            {
                let _at = doing(Doing::WaitTime);
                self.shared.wait(retry, false);
            }
            retry = (retry * 2).min(RETRY_MAX);
        }
    }

    /// One connection's life; returns Ok only at the end.
    fn follow(&self, told: &mut bool) -> std::result::Result<(), Trouble> {
        let mut link = {
            let _at = doing(Doing::WaitBroker);
            let link = self.client.get_connection_with_timeout(ANSWER_LIMIT)?;
            link.set_read_timeout(Some(ANSWER_LIMIT))?;
            link.set_write_timeout(Some(ANSWER_LIMIT))?;
            link
        };
        redis::cmd("SADD").arg(STREAMS_KEY).arg(&self.key).exec(&mut link)?;
        loop {
            let mut after = self.last_id(&mut link)?;
            let (_, head) = self.store.bounds()?;
            if after > head {
                return Err(Trouble::Ahead { last: after, head });
            }
            if std::mem::take(told) {
                log::warn!("mirror: the broker is back, and has events up to {after} of {head}");
            }
            self.note(after);
            loop {
                if self.shared.is_stopped() {
                    return Ok(());
                }
                let rows = self.store.events_after(after, ROWS_MAX)?;
                // Bounds after the rows: events dropped between the two are then noticed.
                let (oldest, _) = self.store.bounds()?;
                let gap = gap(after, rows.first().map(|row| row.id), oldest);
                let Some(newest) = rows.last().map(|row| row.id).or(gap.map(|(_, to)| to)) else { break };
                self.copy(&mut link, gap, &rows)?;
                after = newest;
                self.shared.events.fetch_add(rows.len() as u64, Ordering::Relaxed);
                self.note(after);
            }
            let _at = doing(Doing::WaitWork);
            self.shared.wait(ASK_EVERY, true);
        }
    }

    fn note(&self, last: EventId) {
        self.shared.last.store(last.unsigned_abs(), Ordering::Relaxed);
    }

    /// The newest event that the stream has or had; 0 for a stream that does not exist.
    fn last_id(&self, link: &mut Connection) -> RedisResult<EventId> {
        let _at = doing(Doing::WaitBroker);
        let found: bool = redis::cmd("EXISTS").arg(&self.key).query(link)?;
        if !found {
            return Ok(0);
        }
        let info: Vec<Value> = redis::cmd("XINFO").arg("STREAM").arg(&self.key).query(link)?;
        let place = info
            .iter()
            .position(|name| redis::from_redis_value_ref::<String>(name).is_ok_and(|name| name == "last-generated-id"));
        let id: Option<String> =
            place.and_then(|at| info.get(at + 1)).and_then(|id| redis::from_redis_value_ref(id).ok());
        id.and_then(|id| id.split_once('-')?.0.parse().ok())
            .ok_or_else(|| (ErrorKind::UnexpectedReturnType, "XINFO STREAM without last-generated-id").into())
    }

    /// Appends in one transaction; a gap first, as an entry of its own.
    fn copy(&self, link: &mut Connection, gap: Option<(EventId, EventId)>, rows: &[StoredEvent]) -> RedisResult<()> {
        let _at = doing(Doing::WaitBroker);
        let mut batch = redis::pipe();
        batch.atomic();
        if let Some((from, to)) = gap {
            log::warn!("mirror: events {from} to {to} were dropped from the journal before the broker had them");
            let data = format!("{{\"from\":{from},\"to\":{to}}}");
            // Behind the last event that is missing, before the first that is there.
            batch.cmd("XADD").arg(&self.key).arg(format!("{to}-1")).arg("event").arg("mirror-gap");
            batch.arg("at").arg(crate::clock::rfc3339(crate::clock::now_ms())).arg("data").arg(data);
        }
        for row in rows {
            batch.cmd("XADD").arg(&self.key).arg(format!("{}-0", row.id)).arg("event").arg(&row.event);
            batch.arg("at").arg(&row.at).arg("data").arg(&row.data_json);
        }
        batch.exec(link)
    }
}

/// Events that neither the broker has nor the journal any more: after `after`, before the first of the rows (without
/// rows: before `oldest`).
fn gap(after: EventId, first: Option<EventId>, oldest: EventId) -> Option<(EventId, EventId)> {
    let next = first.unwrap_or(oldest);
    // Ids that no event ever had leave no gap: only what lies before the oldest was dropped.
    (oldest > after + 1 && next > after + 1).then_some((after + 1, next.min(oldest) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_what_was_dropped_before_it_was_copied_and_nothing_else() {
        for (after, first, oldest, expected) in [
            (0, None, 1, None),
            (0, Some(1), 1, None),
            (5, Some(6), 1, None),
            (5, Some(6), 6, None),
            (5, None, 6, None),
            (5, Some(9), 9, Some((6, 8))),
            (5, None, 9, Some((6, 8))),
            (0, Some(100), 100, Some((1, 99))),
            // Dropped between the two reads: the rows are there.
            (5, Some(6), 9, None),
            // An id that was never given away is none.
            (5, Some(8), 3, None),
        ] {
            assert_eq!(gap(after, first, oldest), expected, "{after} {first:?} {oldest}");
        }
    }

    #[test]
    fn an_address_that_cannot_be_used_is_refused_without_repeating_its_password() {
        assert!(check("redis://127.0.0.1:6379/").is_ok());
        assert!(check("redis://:secret@127.0.0.1:6379/1").is_ok());
        for bad in ["", "http://:secret@127.0.0.1/", "rediss://:secret@127.0.0.1/", "redis://:secret@127.0.0.1/x"] {
            let e = check(bad).unwrap_err();
            assert!(e.code() == Code::BadField && e.text().contains("--mirror"), "{bad}: {e}");
            assert!(!e.text().contains("secret"), "{e}");
        }
    }
}
