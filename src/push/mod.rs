//! Every WebSocket and Server-Sent-Events client: one thread, `push`, non-blocking, one serialized frame for all; and
//! one thread, `replay`, that reads the store for those the ring cannot serve.
//!
//! Leaves to others: who may connect and the request head (the gate), what is published (`bus`), what is durable
//! (the [`EventStore`]). Rule a change could break: nothing a client does or leaves undone costs another client time,
//! or this process memory that grows.
//!
//! Reading order: `protocol` (the bytes of both protocols), `client` (one connection and its place in the stream),
//! `reactor` (the thread), `replay` (the other thread).

mod client;
mod protocol;
mod reactor;
mod replay;

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::bus::{Bus, EventStore};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::threads::{Name, OnPanic, SMALL_STACK_BYTES, Thread, WORK_STACK_BYTES, spawn};

/// Bounds of the live stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushLimits {
    /// Clients at once; more get 503.
    pub clients_max: usize,
    /// Time between two pings to a client, in milliseconds.
    pub ping_every_ms: u64,
    /// Pings that may stay unanswered before a client is closed.
    pub pings_missed_max: u8,
    /// A client whose socket takes nothing for so long is closed, in milliseconds.
    pub stall_ms: u64,
    /// Largest frame or message from a client, in bytes.
    pub client_frame_bytes_max: usize,
    /// Frames a client may send at once, and then ten each second.
    pub client_frames_burst: u32,
    /// Memory that blocked readers may hold alone, in bytes; past it the longest blocked are closed.
    pub pinned_bytes_max: usize,
    /// How long a closing connection may take to read the close frame, in milliseconds.
    pub linger_ms: u64,
    /// Kernel send buffer of each client in bytes; none leaves it to the kernel, which grows it to 4 MiB. 128 KiB
    /// lost no speed on loopback (800 MB/s of replay against 310 without a bound), 64 KiB fell to 2 MB/s with
    /// frames of 1 MiB: two segments of 64 KiB must fit.
    pub send_buffer_bytes: Option<usize>,
}

impl Default for PushLimits {
    fn default() -> Self {
        Self {
            clients_max: 10_000,
            ping_every_ms: 20_000,
            pings_missed_max: 2,
            stall_ms: 30_000,
            client_frame_bytes_max: 64 * 1024,
            client_frames_burst: 60,
            pinned_bytes_max: 16 * 1024 * 1024,
            linger_ms: 2_000,
            send_buffer_bytes: Some(128 * 1024),
        }
    }
}

/// A connected socket.
#[derive(Debug)]
pub enum Stream {
    /// From the TCP port.
    Tcp(TcpStream),
    /// From the local socket.
    Unix(UnixStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

/// What the client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpgradeKind {
    /// A WebSocket; `key` is its `Sec-WebSocket-Key`.
    WebSocket {
        /// The value of the header.
        key: String,
    },
    /// `text/event-stream`.
    Sse,
}

/// A connection whose request head was read and vetted. `push` writes the 101 or 200 head itself.
#[derive(Debug)]
pub struct Upgrade {
    /// The connection.
    pub stream: Stream,
    /// What it becomes.
    pub kind: UpgradeKind,
    /// `after=` or `Last-Event-ID`; [`crate::bus::parse_cursor`] took it before.
    pub cursor: Option<String>,
    /// Bytes that came behind the request head.
    pub leftover: Vec<u8>,
    /// Who it is, for the log.
    pub peer: String,
}

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Figures of the live stream, for metrics.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct PushStats { $($(#[$doc])* pub $name: u64),* }

        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64),* }

        impl Counters {
            fn snapshot(&self) -> PushStats {
                PushStats { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

stats! {
    /// WebSocket clients now.
    websocket_clients,
    /// SSE clients now.
    sse_clients,
    /// Clients now that are served from the store.
    replaying_clients,
    /// Clients now whose socket is full.
    blocked_clients,
    /// The largest number of frames a client was behind, at the last look (each tick).
    lag_frames_max,
    /// Bytes that blocked readers hold alone, at the last look.
    pinned_bytes,
    /// Clients taken on.
    adopted,
    /// Clients refused because there are too many or the store cannot be read.
    refused,
    /// Events delivered.
    frames_sent,
    /// Bytes delivered, protocol included.
    bytes_sent,
    /// Transient events that slow readers lost.
    transient_dropped,
    /// Cursors answered by `resync`.
    resyncs,
    /// Reads of the store for laggards.
    store_reads,
    /// Clients closed because they took nothing.
    closed_stalled,
    /// Clients closed because they answered no ping.
    closed_silent,
    /// Clients closed for what they sent.
    closed_protocol,
}

impl Counters {
    fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// What other threads leave for `push`.
#[derive(Default)]
struct Inbox {
    upgrades: Vec<Upgrade>,
    replies: Vec<replay::Reply>,
    shutdown: Option<Instant>,
}

struct Shared {
    bus: Arc<Bus>,
    limits: PushLimits,
    counters: Counters,
    inbox: Mutex<Inbox>,
    waker: reactor::Waker,
    asks: replay::Asks,
    store: Arc<dyn EventStore>,
}

/// Handle of the live stream.
#[derive(Clone)]
pub struct Push {
    shared: Arc<Shared>,
    threads: Arc<[Thread; 2]>,
}

impl std::fmt::Debug for Push {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Push").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// Starts the threads `push` and `replay`.
///
/// # Errors
/// When the kernel has no thread, epoll or eventfd to give, or the bus has a `push` already.
pub fn start(bus: Arc<Bus>, store: Arc<dyn EventStore>, limits: PushLimits) -> Result<Push> {
    let shared = Arc::new(Shared {
        bus: bus.clone(),
        limits,
        counters: Counters::default(),
        inbox: Mutex::default(),
        waker: reactor::Waker::new()?,
        asks: replay::Asks::default(),
        store: store.clone(),
    });
    let reactor = reactor::Reactor::new(shared.clone())?;
    let waking = Arc::downgrade(&shared);
    let wake = move || {
        if let Some(shared) = waking.upgrade() {
            shared.waker.wake();
        }
    };
    if !bus.set_wake(Box::new(wake)) {
        return Err(Error::internal("this bus is served already"));
    }
    let replaying = shared.clone();
    let replay = spawn(const { Name::fixed("replay") }, WORK_STACK_BYTES, OnPanic::EndProcess, move || {
        replay::run(&replaying, store.as_ref());
    })?;
    let push = spawn(const { Name::fixed("push") }, SMALL_STACK_BYTES, OnPanic::EndProcess, move || reactor.run())?;
    Ok(Push { shared, threads: Arc::new([push, replay]) })
}

impl Push {
    /// Takes a client on, from any thread; never blocks.
    pub fn adopt(&self, upgrade: Upgrade) {
        self.shared.inbox.lock().upgrades.push(upgrade);
        self.shared.waker.wake();
    }

    /// Closes every client with 1001 and ends the threads; true if all of it was done within `limit`.
    pub fn shutdown(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        self.shared.inbox.lock().shutdown = Some(deadline);
        self.shared.waker.wake();
        // The reactor ends at the deadline by itself; the rest is for the thread's last steps.
        let grace = Duration::from_millis(200);
        self.threads.iter().all(|t| t.join_within(deadline.saturating_duration_since(Instant::now()) + grace))
    }

    /// The figures now.
    #[must_use]
    pub fn stats(&self) -> PushStats {
        self.shared.counters.snapshot()
    }
}
