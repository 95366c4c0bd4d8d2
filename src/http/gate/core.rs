//! The gate's event loop: sockets in, events to the right part, timers, accepting, and the end.
//!
//! Leaves new clients to `accept`, what clients do to `drive`, requests to `request`, upstreams to `pool` and `relay`. Rules a change could break: nothing here blocks; every client
//! has a deadline at all times; a connection that gives a lot of work gets its share per round, not more.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::client::{BULK, Client, LANES, Phase, WAIT, WORK};
use super::limits::Limits;
use super::metrics::{Gauges, Metrics};
use super::notes::{Note, Notes};
use super::place::Place;
use super::slab::{Key, Slab};
use super::upstream::{State, Upstream};
use super::{Local, PushTo};
use crate::error::Result;
use crate::http::guard::{Guard, Logins};
use crate::sync::Mutex;
use crate::threads::{self, Doing};

/// Bytes per read: one large answer moves in few calls, and one buffer serves all.
pub(super) const SCRATCH_BYTES: usize = 64 * 1024;
/// Events per wait.
const EVENTS_MAX: usize = 256;

/// Timers look at their client at least so often: those of clients long gone must not pile up.
const TIMER_MAX: Duration = Duration::from_secs(15);

pub(super) const KIND_CLIENT: u64 = 0;
const KIND_UPSTREAM: u64 = 1 << 56;
const KIND_LISTENER: u64 = 2 << 56;
const KIND_NOTES: u64 = 3 << 56;
const KIND_MASK: u64 = 0xff << 56;

/// What a step says about the next one.
#[derive(Debug)]
pub(super) enum Step {
    /// Another may do something.
    More,
    /// Nothing to do until an event.
    Wait,
    /// The connection is over.
    Close,
}

/// A connection that used up its steps.
#[derive(Debug, Clone, Copy)]
pub(super) enum Again {
    Client(Key),
    Upstream(Key),
}

/// Where clients come in.
#[derive(Debug)]
pub(super) struct Listener {
    pub fd: OwnedFd,
    pub unix: bool,
}

/// What the loop is made of; see [`super::start`].
pub(super) struct Parts {
    pub listeners: Vec<Listener>,
    pub notes: Arc<Notes>,
    pub guard: Guard,
    pub listens_everywhere: bool,
    pub limits: Limits,
    pub lane_max: [usize; LANES],
    pub pool: Place,
    pub state_dir: PathBuf,
    pub metrics: Arc<Metrics>,
    pub local: Arc<dyn Local>,
    pub push: Arc<PushTo>,
    pub logins: Arc<Mutex<Logins>>,
    pub origin: String,
    pub chat_socket: Option<Place>,
}

pub(super) struct Core {
    pub parts: Parts,
    pub epoll: OwnedFd,
    pub clients: Slab<Client>,
    pub upstreams: Slab<Upstream>,
    pub idle: Vec<Key>,
    pub queues: [VecDeque<Key>; LANES],
    pub queued: [usize; LANES],
    pub in_flight: [usize; LANES],
    /// Whose turn it is among the lanes that share the ordinary workers.
    pub bulk_first: bool,
    pub opening: bool,
    pub open_again_at: Option<Instant>,
    timers: BinaryHeap<Reverse<(Instant, Key)>>,
    pub again: Vec<Again>,
    pub scratch: Box<[u8]>,
    pub buffers: Vec<Vec<u8>>,
    pub now: Instant,
    pub born: Instant,
    pub accept_again_at: Option<Instant>,
    pub draining: Option<Instant>,
    pub per_address: HashMap<IpAddr, usize>,
    pub spool_bytes: u64,
    pub spilled_bytes: u64,
    pub body_bytes: usize,
    pub overdue_now: usize,
}

impl Core {
    /// Registers the listeners; nothing is accepted before [`Core::run`].
    pub fn new(parts: Parts) -> Result<Self> {
        let io = std::io::Error::from;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io)?;
        epoll::add(&epoll, parts.notes.event(), EventData::new_u64(KIND_NOTES), EventFlags::IN).map_err(io)?;
        let now = Instant::now();
        let core = Self {
            parts,
            epoll,
            clients: Slab::new(),
            upstreams: Slab::new(),
            idle: Vec::new(),
            queues: [const { VecDeque::new() }; LANES],
            queued: [0; LANES],
            in_flight: [0; LANES],
            bulk_first: false,
            opening: false,
            open_again_at: None,
            timers: BinaryHeap::new(),
            again: Vec::new(),
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            buffers: Vec::new(),
            now,
            born: now,
            accept_again_at: None,
            draining: None,
            per_address: HashMap::new(),
            spool_bytes: 0,
            spilled_bytes: 0,
            body_bytes: 0,
            overdue_now: 0,
        };
        core.watch_listeners().map_err(io)?;
        Ok(core)
    }

    fn watch_listeners(&self) -> rustix::io::Result<()> {
        for (at, listener) in self.parts.listeners.iter().enumerate() {
            epoll::add(&self.epoll, &listener.fd, EventData::new_u64(KIND_LISTENER | at as u64), EventFlags::IN)?;
        }
        Ok(())
    }

    /// Runs until told to end.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        self.want_upstreams();
        while !self.is_over() {
            let timeout = self.until_next_timer();
            {
                let _at = threads::doing(Doing::WaitReady);
                let wait = rustix::buffer::spare_capacity(&mut events);
                match epoll::wait(&self.epoll, wait, timeout.as_ref()) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => panic!("epoll_wait on our own descriptor: {e}"),
                }
            }
            self.now = Instant::now();
            for event in events.drain(..) {
                self.event(event.data.u64(), event.flags);
            }
            for again in std::mem::take(&mut self.again) {
                match again {
                    Again::Client(key) => self.drive_client(key),
                    Again::Upstream(key) => self.drive_upstream(key),
                }
            }
            self.fire_timers();
        }
    }

    fn is_over(&self) -> bool {
        self.draining.is_some_and(|until| self.clients.len() == 0 || self.now >= until)
    }

    fn until_next_timer(&self) -> Option<rustix::event::Timespec> {
        let mut next = self.timers.peek().map(|Reverse((at, _))| *at);
        for at in [self.accept_again_at, self.open_again_at, self.draining].into_iter().flatten() {
            next = Some(next.map_or(at, |n| n.min(at)));
        }
        let wait = if self.again.is_empty() {
            // Rounded up, so that the timer is due when we wake.
            next?.saturating_duration_since(Instant::now()) + Duration::from_micros(999)
        } else {
            Duration::ZERO
        };
        rustix::event::Timespec::try_from(wait).ok()
    }

    fn event(&mut self, data: u64, flags: EventFlags) {
        let key = Key::unpack(data);
        match data & KIND_MASK {
            KIND_CLIENT => {
                let Some(client) = self.clients.get_mut(key) else {
                    return;
                };
                client.readable |= flags.intersects(EventFlags::IN | EventFlags::RDHUP);
                client.writable |= flags.contains(EventFlags::OUT);
                client.half_closed |= flags.contains(EventFlags::RDHUP);
                if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                    return self.close_client(key);
                }
                self.drive_client(key);
            }
            KIND_UPSTREAM => {
                let Some(upstream) = self.upstreams.get_mut(key) else {
                    return;
                };
                let ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
                upstream.readable |= ended || flags.contains(EventFlags::IN);
                upstream.half_closed |= ended;
                self.drive_upstream(key);
            }
            KIND_LISTENER => self.accept((data & !KIND_MASK) as usize),
            KIND_NOTES => {
                for note in self.parts.notes.take() {
                    match note {
                        Note::Torn(upstream) => {
                            self.fail_upstream(Key::unpack(upstream), "the answer ended early", false)
                        }
                        Note::Token(token) => self.parts.guard.set_token(token),
                        Note::Shutdown(until) => self.drain(until),
                    }
                }
            }
            _ => {}
        }
    }

    // ---- timers

    /// Sets the client's deadline, and a timer if none is due before it.
    pub fn arm(&mut self, key: Key, deadline: Instant) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        client.deadline = deadline;
        let at = deadline.min(self.now + TIMER_MAX);
        if client.timer_at.is_none_or(|earlier| at < earlier) {
            client.timer_at = Some(at);
            self.timers.push(Reverse((at, key)));
        }
    }

    fn fire_timers(&mut self) {
        while let Some(Reverse((at, key))) = self.timers.peek().copied() {
            if at > self.now {
                break;
            }
            self.timers.pop();
            let Some(client) = self.clients.get_mut(key) else {
                continue;
            };
            if client.timer_at != Some(at) {
                continue;
            }
            client.timer_at = None;
            let deadline = client.deadline;
            if deadline <= self.now {
                self.time_out(key);
            } else {
                self.arm(key, deadline);
            }
        }
        if self.accept_again_at.is_some_and(|at| at <= self.now) {
            self.accept_again_at = None;
            if let Err(e) = self.watch_listeners() {
                log::warn!("accepting goes on later: {e}");
                for listener in &self.parts.listeners {
                    let _ = epoll::delete(&self.epoll, &listener.fd);
                }
                self.accept_again_at = Some(self.now + self.parts.limits.accept_pause);
            }
        }
        if self.open_again_at.is_some_and(|at| at <= self.now) {
            self.open_again_at = None;
            self.want_upstreams();
        }
    }

    // ---- upstream sockets

    /// Watches a fresh upstream.
    pub fn watch_upstream(&mut self, key: Key) -> rustix::io::Result<()> {
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return Ok(());
        };
        let data = EventData::new_u64(KIND_UPSTREAM | key.pack());
        epoll::add(&self.epoll, &upstream.fd, data, EventFlags::IN | EventFlags::RDHUP | EventFlags::ET)
    }

    /// Asks to be told, or not, when a write may take something. Not by default: a Unix socket tells it after every read
    /// of its peer, which would be one more wake-up per request.
    pub fn watch_writable(&mut self, key: Key, wanted: bool) {
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return;
        };
        if upstream.watches_writable == wanted {
            return;
        }
        upstream.watches_writable = wanted;
        let mut watch = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        if wanted {
            watch |= EventFlags::OUT;
        }
        if let Err(e) = epoll::modify(&self.epoll, &upstream.fd, EventData::new_u64(KIND_UPSTREAM | key.pack()), watch)
        {
            log::error!("an upstream cannot be watched: {e}");
        }
    }

    // ---- the end, and what is seen from outside

    fn drain(&mut self, until: Instant) {
        self.draining = Some(until);
        for listener in self.parts.listeners.drain(..) {
            let _ = epoll::delete(&self.epoll, &listener.fd);
        }
        if let Some(place) = &self.parts.chat_socket {
            let _ = place.clear();
        }
        let resting: Vec<Key> = self
            .clients
            .iter()
            .filter(|(_, c)| c.phase == Phase::Linger || c.phase == Phase::Head && c.out_is_empty())
            .map(|(key, _)| key)
            .collect();
        for key in resting {
            self.close_client(key);
        }
    }

    /// Counts what there is.
    pub fn gauges(&self) -> Gauges {
        let mut g = Gauges {
            queue_work: self.queued[WORK] as u64,
            queue_wait: self.queued[WAIT] as u64,
            queue_bulk: self.queued[BULK] as u64,
            upstreams: self.upstreams.len() as u64,
            overdue_now: self.overdue_now as u64,
            spool_bytes: self.spool_bytes,
            body_bytes: self.body_bytes as u64,
            ..Gauges::default()
        };
        g.upstreams_busy =
            self.upstreams.iter().filter(|(_, u)| matches!(u.state, State::Head | State::Body(_))).count() as u64;
        for (_, client) in self.clients.iter() {
            match client.phase {
                Phase::Head if client.unread().is_empty() => g.idle += 1,
                Phase::Head | Phase::Body => g.reading += 1,
                Phase::Queued => g.queued += 1,
                Phase::Served(_) => g.served += 1,
                Phase::Answer => g.writing += 1,
                Phase::Linger => g.closing += 1,
            }
        }
        g
    }
}
