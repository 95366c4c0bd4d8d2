//! The gate's event loop: sockets in, events to the right part, timers, accepting, and the end.
//!
//! Leaves new clients to `accept`, what clients do to `drive`, requests to `request`, the pool to `line`, `pool` and
//! `relay`. Rules a change could break: nothing here blocks; every client has a deadline at all times; a connection that
//! gives a lot of work gets its share per round, not more.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::client::{Client, LANES, Phase};
use super::exchange::Exchanges;
use super::limits::Limits;
use super::line::Line;
use super::metrics::{Gauges, Metrics};
use super::notes::Note;
use super::place::Place;
use super::pool::Flight;
use super::slab::{Key, Slab};
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
pub(super) const KIND_LINE: u64 = 1 << 56;
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

/// Where clients come in.
#[derive(Debug)]
pub(super) struct Listener {
    pub fd: OwnedFd,
    pub unix: bool,
}

/// What the loop is made of; see [`super::start`].
pub(super) struct Parts {
    pub listeners: Vec<Listener>,
    pub exchanges: Arc<Exchanges>,
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
    pub line: Line,
    pub flights: Slab<Flight>,
    pub queues: [VecDeque<Key>; LANES],
    pub queued: [usize; LANES],
    pub in_flight: [usize; LANES],
    /// Whose turn it is among the lanes that share the ordinary workers.
    pub bulk_first: bool,
    pub open_again_at: Option<Instant>,
    timers: BinaryHeap<Reverse<(Instant, Key)>>,
    /// Clients that used up their steps.
    pub again: Vec<Key>,
    notes: Vec<Note>,
    /// Flights to look at, one in each round: long answers that have something, and those whose client left.
    pub bulk: VecDeque<Key>,
    pub scratch: Box<[u8]>,
    pub buffers: Vec<Vec<u8>>,
    pub now: Instant,
    pub born: Instant,
    pub accept_again_at: Option<Instant>,
    pub draining: Option<Instant>,
    pub per_address: HashMap<IpAddr, usize>,
    pub spool_bytes: u64,
    /// Of these, bytes of bodies that a worker has.
    pub at_work_bytes: u64,
    pub spilled_bytes: u64,
    pub body_bytes: usize,
    pub overdue_now: usize,
}

impl Core {
    /// Registers the listeners; nothing is accepted before [`Core::run`].
    pub fn new(parts: Parts) -> Result<Self> {
        let io = std::io::Error::from;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io)?;
        epoll::add(&epoll, parts.exchanges.notes().event(), EventData::new_u64(KIND_NOTES), EventFlags::IN)
            .map_err(io)?;
        let now = Instant::now();
        let core = Self {
            parts,
            epoll,
            clients: Slab::new(),
            line: Line::default(),
            flights: Slab::new(),
            queues: [const { VecDeque::new() }; LANES],
            queued: [0; LANES],
            in_flight: [0; LANES],
            bulk_first: false,
            open_again_at: None,
            timers: BinaryHeap::new(),
            again: Vec::new(),
            notes: Vec::new(),
            bulk: VecDeque::new(),
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            buffers: Vec::new(),
            now,
            born: now,
            accept_again_at: None,
            draining: None,
            per_address: HashMap::new(),
            spool_bytes: 0,
            at_work_bytes: 0,
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
        self.want_line();
        while !self.is_over() {
            // What this round put on it goes out in one write: one wake-up of the pool.
            self.flush_line();
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
            for key in std::mem::take(&mut self.again) {
                self.drive_client(key);
            }
            self.read_notes();
            self.advance_bulk();
            self.fire_timers();
        }
        for (_, flight) in self.flights.iter() {
            flight.exchange.abandon();
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
        let wait = if self.again.is_empty() && self.bulk.is_empty() && self.parts.exchanges.notes().rest() {
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
            KIND_LINE => self.drive_line(data, flags),
            KIND_LISTENER => self.accept((data & !KIND_MASK) as usize),
            // They are read in every round.
            KIND_NOTES => self.parts.exchanges.notes().clear(),
            _ => {}
        }
    }

    fn read_notes(&mut self) {
        let mut notes = std::mem::take(&mut self.notes);
        self.parts.exchanges.notes().take(&mut notes);
        for note in notes.drain(..) {
            match note {
                Note::Answer(number) => self.drive_flight(Key::unpack(number)),
                Note::Token(token) => self.parts.guard.set_token(token),
                Note::Shutdown(until) => self.drain(until),
            }
        }
        self.notes = notes;
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
            self.want_line();
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
            queue: self.queued.map(|n| n as u64),
            pool_up: u64::from(self.line.is_up()),
            in_flight: self.in_flight.map(|n| n as u64),
            overdue_now: self.overdue_now as u64,
            spool_bytes: self.spool_bytes,
            body_bytes: self.body_bytes as u64,
            ..Gauges::default()
        };
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
