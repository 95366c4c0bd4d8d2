//! The thread `push`: epoll over every client, new frames to all, timers. Leaves what is said to a client to `client`.
//! Rule a change could break: it never blocks but in `epoll_wait`, and with no client it has no timer, so an idle
//! server does not wake up.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::net::{SendFlags, send, sockopt};

use super::client::{Client, LiveFrames, Round, Want};
use super::protocol::{Close, refusal};
use super::replay::{Ask, Reply};
use super::{Counters, Shared, Stream, Upgrade};
use crate::bus::Taken;
use crate::error::Result;
use crate::threads::{Doing, doing};

/// Token of the wake fd: no slot has it.
const WAKE: u64 = u64::MAX;
/// Events of one `epoll_wait`.
const EVENTS_MAX: usize = 256;
/// Bytes read from a client at once; the rest waits for its next turn.
const READ_BYTES_MAX: usize = 16 * 1024;
/// New frames handed out at once, before sockets are looked at again.
const LIVE_FRAMES_MAX: usize = 256;
/// Bytes of frames handed out at once: they are copied into one piece for all.
const LIVE_BYTES_MAX: usize = 256 * 1024;

/// Wakes the reactor from any thread, with one write however many ask.
pub(super) struct Waker {
    fd: OwnedFd,
    /// The reactor is, or is about to be, in `epoll_wait`.
    asleep: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        Ok(Self { fd, asleep: AtomicBool::new(false) })
    }

    /// What is to be found must be in place before.
    pub(super) fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            // Full means that it is awake already.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    fn drain(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.fd, &mut count);
    }
}

struct Slot {
    /// Rises with each client, so that a late answer for the one before finds nobody.
    generation: u32,
    client: Option<Box<Client>>,
}

pub(super) struct Reactor {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    slots: Vec<Slot>,
    free: Vec<usize>,
    clients: usize,
    /// Slots of closing clients, for their deadlines.
    closing: Vec<usize>,
    /// Number of the next frame that was not handed out.
    handed: u64,
    live: LiveFrames,
    taken: Vec<Taken>,
    started: Instant,
    now_ms: u64,
    next_tick_ms: u64,
    shutdown: Option<Instant>,
}

impl Reactor {
    pub(super) fn new(shared: Arc<Shared>) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        epoll::add(&epoll, &shared.waker.fd, EventData::new_u64(WAKE), EventFlags::IN).map_err(std::io::Error::from)?;
        let handed = shared.bus.end();
        Ok(Self {
            shared,
            epoll,
            slots: Vec::new(),
            free: Vec::new(),
            clients: 0,
            closing: Vec::new(),
            handed,
            live: LiveFrames::default(),
            taken: Vec::new(),
            started: Instant::now(),
            now_ms: 0,
            next_tick_ms: 0,
            shutdown: None,
        })
    }

    /// Body of the thread; ends after a shutdown.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut buffer = vec![0; READ_BYTES_MAX];
        loop {
            self.now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.hand_out();
            self.look_into_inbox();
            self.look_at_clock();
            if let Some(deadline) = self.shutdown
                && (self.clients == 0 || Instant::now() >= deadline)
            {
                self.shared.asks.stop();
                return;
            }
            self.wait(&mut events);
            for event in events.drain(..) {
                self.handle(event.data.u64(), event.flags, &mut buffer);
            }
        }
    }

    /// Waits for sockets, for the next timer, or for [`Waker::wake`].
    fn wait(&mut self, events: &mut Vec<epoll::Event>) {
        self.shared.waker.asleep.store(true, Ordering::SeqCst);
        let timeout = if self.has_work() { Some(Timespec { tv_sec: 0, tv_nsec: 0 }) } else { self.timeout() };
        let waited = {
            let _at = doing(Doing::WaitReady);
            epoll::wait(&self.epoll, spare_capacity(events), timeout.as_ref())
        };
        self.shared.waker.asleep.store(false, Ordering::SeqCst);
        match waited {
            Ok(_) | Err(Errno::INTR) => {}
            // Only a broken descriptor of ours can do this.
            Err(e) => panic!("epoll_wait: {e}"),
        }
    }

    fn has_work(&self) -> bool {
        if self.shared.bus.end() != self.handed {
            return true;
        }
        let inbox = self.shared.inbox.lock();
        !inbox.upgrades.is_empty() || !inbox.replies.is_empty() || (inbox.shutdown.is_some() && self.shutdown.is_none())
    }

    fn timeout(&self) -> Option<Timespec> {
        let tick = (self.clients > 0).then_some(self.next_tick_ms);
        let closing = self.closing.iter().filter_map(|at| self.slots[*at].client.as_ref()?.closing_deadline_ms()).min();
        let shutdown = self.shutdown.map(|d| {
            u64::try_from(d.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX).saturating_add(1)
        });
        let at_ms = [tick, closing, shutdown].into_iter().flatten().min()?;
        let now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let left_ms = at_ms.saturating_sub(now_ms) + 1;
        Some(Timespec { tv_sec: (left_ms / 1000) as i64, tv_nsec: (left_ms % 1000 * 1_000_000) as i64 })
    }

    fn tick_ms(&self) -> u64 {
        let limits = &self.shared.limits;
        // A quarter: a ping is at most so much late.
        (limits.ping_every_ms.min(limits.stall_ms) / 4).max(5)
    }

    /// Gives every frame that is new to every client that waits for it.
    fn hand_out(&mut self) {
        self.live.frames.clear();
        let start = self.shared.bus.tail(self.handed, LIVE_FRAMES_MAX, LIVE_BYTES_MAX, &mut self.live.frames);
        if self.live.frames.is_empty() {
            return;
        }
        self.handed = start + self.live.frames.len() as u64;
        self.live.set(start);
        let mut live = std::mem::take(&mut self.live);
        for at in 0..self.slots.len() {
            self.with(at, |client, round| client.live(&mut live, round));
        }
        live.frames.clear();
        self.live = live;
    }

    fn look_into_inbox(&mut self) {
        let (upgrades, replies, shutdown) = {
            let mut inbox = self.shared.inbox.lock();
            (std::mem::take(&mut inbox.upgrades), std::mem::take(&mut inbox.replies), inbox.shutdown)
        };
        for upgrade in upgrades {
            self.adopt(upgrade);
        }
        for reply in replies {
            self.answer(reply);
        }
        if shutdown.is_some() && self.shutdown.is_none() {
            self.shutdown = shutdown;
            for at in 0..self.slots.len() {
                self.with(at, |client, round| client.close(Close::GoingAway, "the server is going down", round));
            }
        }
    }

    fn adopt(&mut self, upgrade: Upgrade) {
        let prepared = prepare(&upgrade.stream, self.shared.limits.send_buffer_bytes, self.shared.limits.stall_ms);
        let refused = match prepared {
            Err(e) => {
                log::debug!("client {} left before it was taken on: {e}", upgrade.peer);
                return;
            }
            Ok(()) if self.shutdown.is_some() => Some(("shutting_down", "the server is going down")),
            Ok(()) if self.clients >= self.shared.limits.clients_max => {
                Some(("overloaded", "too many clients follow the events"))
            }
            Ok(()) => None,
        };
        if let Some((code, text)) = refused {
            Counters::add(&self.shared.counters.refused, 1);
            log::warn!("client {} refused: {text}", upgrade.peer);
            // Its socket is fresh, so this fits; if not, it was about to be closed anyway.
            let _ = send(&upgrade.stream, &refusal(code, text), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            return;
        }
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, client: None });
            self.slots.len() - 1
        });
        let token = u64::from(self.slots[at].generation) << 32 | at as u64;
        let round = Round { shared: &self.shared, now_ms: self.now_ms, taken: &mut self.taken };
        let client = Box::new(Client::new(upgrade, token, &round));
        if let Err(e) = epoll::add(&self.epoll, &client.stream, EventData::new_u64(token), EventFlags::empty()) {
            log::warn!("a client cannot be watched: {e}");
            self.free.push(at);
            return;
        }
        if self.clients == 0 {
            self.next_tick_ms = self.now_ms + self.tick_ms();
            self.shared.store.set_watched(true);
        }
        self.clients += 1;
        let counters = &self.shared.counters;
        Counters::add(&counters.adopted, 1);
        Counters::add(if client.is_sse() { &counters.sse_clients } else { &counters.websocket_clients }, 1);
        self.slots[at].client = Some(client);
        self.with(at, |_, _| {});
    }

    fn answer(&mut self, reply: Reply) {
        let at = (reply.ask.token & u64::from(u32::MAX)) as usize;
        let is_for = |c: &Client| c.token == reply.ask.token && c.asked == reply.ask.number;
        if !self.slots[at].client.as_deref().is_some_and(is_for) {
            return;
        }
        self.with(at, |client, round| match reply.ask.rows_after {
            Some(_) => client.rows(reply.found, round),
            None => client.bounds(reply.found, round),
        });
    }

    fn handle(&mut self, token: u64, flags: EventFlags, buffer: &mut [u8]) {
        if token == WAKE {
            self.shared.waker.drain();
            return;
        }
        let at = (token & u64::from(u32::MAX)) as usize;
        if self.slots[at].client.as_ref().is_none_or(|c| c.token != token) {
            return;
        }
        self.with(at, |client, round| {
            if flags.contains(EventFlags::OUT) {
                client.writable(round);
            }
            if flags.contains(EventFlags::IN) && !client.gone {
                client.readable(buffer, round);
            } else if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
                client.gone = true;
            }
        });
    }

    fn look_at_clock(&mut self) {
        let mut at = 0;
        while at < self.closing.len() {
            let slot = self.closing[at];
            let deadline = self.slots[slot].client.as_ref().and_then(|c| c.closing_deadline_ms());
            if deadline.is_some_and(|d| d > self.now_ms) {
                at += 1;
                continue;
            }
            self.closing.swap_remove(at);
            if deadline.is_some() {
                self.with(slot, |client, _| client.gone = true);
            }
        }
        if self.clients == 0 || self.now_ms < self.next_tick_ms {
            return;
        }
        self.next_tick_ms = self.now_ms + self.tick_ms();
        let end = self.shared.bus.end();
        let (mut lag, mut pinned) = (0, self.shared.asks.alive.load(Ordering::Relaxed));
        for at in 0..self.slots.len() {
            self.with(at, |client, round| client.tick(round));
            if let Some(client) = &self.slots[at].client {
                lag = lag.max(client.lag_frames(end));
                pinned += client.lone_frame_bytes();
            }
        }
        let counters = &self.shared.counters;
        counters.lag_frames_max.store(lag, Ordering::Relaxed);
        counters.pinned_bytes.store(pinned as u64, Ordering::Relaxed);
        if pinned > self.shared.limits.pinned_bytes_max {
            self.unpin(pinned);
        }
    }

    /// Closes blocked readers, the longest blocked first, until what they hold alone is within its bound.
    fn unpin(&mut self, mut pinned: usize) {
        let mut holders: Vec<(u64, usize, usize)> = (0..self.slots.len())
            .filter_map(|at| {
                let client = self.slots[at].client.as_ref()?;
                let (bytes, since_ms) = client.pinned();
                (client.is_blocked() && bytes > 0).then_some((since_ms, at, bytes))
            })
            .collect();
        holders.sort_unstable();
        for (_, at, bytes) in holders {
            if pinned <= self.shared.limits.pinned_bytes_max {
                break;
            }
            Counters::add(&self.shared.counters.closed_stalled, 1);
            self.with(at, |client, _| client.gone = true);
            pinned = pinned.saturating_sub(bytes);
        }
    }

    /// Calls the client in a slot, then does what it left to do.
    fn with(&mut self, at: usize, call: impl FnOnce(&mut Client, &mut Round<'_>)) {
        let Some(client) = self.slots[at].client.as_deref_mut() else {
            return;
        };
        let mut round = Round { shared: &self.shared, now_ms: self.now_ms, taken: &mut self.taken };
        call(client, &mut round);
        let counters = &self.shared.counters;
        let closing = client.closing_deadline_ms().is_some();
        let now = [client.is_blocked(), client.is_replaying(), closing];
        if now != client.counted {
            for (gauge, (now, was)) in [&counters.blocked_clients, &counters.replaying_clients]
                .into_iter()
                .zip(now.into_iter().zip(client.counted))
            {
                if now != was {
                    if now {
                        gauge.fetch_add(1, Ordering::Relaxed)
                    } else {
                        gauge.fetch_sub(1, Ordering::Relaxed)
                    };
                }
            }
            if closing && !client.counted[2] {
                self.closing.push(at);
            }
            client.counted = now;
        }
        if client.gone {
            for (gauge, was) in [&counters.blocked_clients, &counters.replaying_clients].into_iter().zip(now) {
                gauge.fetch_sub(u64::from(was), Ordering::Relaxed);
            }
            let gauge = if client.is_sse() { &counters.sse_clients } else { &counters.websocket_clients };
            gauge.fetch_sub(1, Ordering::Relaxed);
            // Closing the descriptor takes it out of the epoll set.
            self.slots[at].client = None;
            self.slots[at].generation = self.slots[at].generation.wrapping_add(1);
            self.free.push(at);
            self.clients -= 1;
            if self.clients == 0 {
                self.shared.store.set_watched(false);
            }
            return;
        }
        if let Some(want) = client.want.take() {
            client.asked = client.asked.wrapping_add(1);
            let rows_after = match want {
                Want::Bounds => None,
                Want::RowsAfter(after) => Some(after),
            };
            self.shared.asks.ask(Ask { token: client.token, number: client.asked, rows_after });
        }
        let interest = client.wanted_interest();
        if interest != client.interest {
            client.interest = interest;
            let token = EventData::new_u64(client.token);
            if let Err(e) = epoll::modify(&self.epoll, &client.stream, token, interest) {
                log::warn!("a client cannot be watched: {e}");
            }
        }
    }
}

/// Makes a fresh socket ready for the reactor.
fn prepare(stream: &Stream, send_buffer_bytes: Option<usize>, stall_ms: u64) -> std::io::Result<()> {
    if let Some(bytes) = send_buffer_bytes {
        // The kernel doubles the value for its own book-keeping.
        sockopt::set_socket_send_buffer_size(stream, bytes / 2)?;
    }
    match stream {
        Stream::Tcp(tcp) => {
            tcp.set_nonblocking(true)?;
            tcp.set_nodelay(true)?;
            // A peer that vanished is noticed though it owes no pong (SSE).
            let timeout_ms = u32::try_from(stall_ms * 2).unwrap_or(u32::MAX);
            sockopt::set_tcp_user_timeout(tcp, timeout_ms)?;
        }
        Stream::Unix(unix) => unix.set_nonblocking(true)?,
    }
    Ok(())
}
