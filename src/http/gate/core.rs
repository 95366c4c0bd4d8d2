//! The gate's event loop: sockets in, events to the right part, timers, accepting, and the end.
//!
//! Leaves requests to `request` and upstreams to `relay`. Rules a change could break: nothing here blocks; every client
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
use rustix::net::{SocketAddrAny, SocketFlags};

use super::client::{Client, Flush, Got, Peer, Phase, WAIT, WORK, receive};
use super::limits::Limits;
use super::metrics::{Gauges, Metrics, count};
use super::notes::{Note, Notes};
use super::place::Place;
use super::slab::{Key, Slab};
use super::upstream::{State, Upstream};
use super::{Local, PushTo};
use crate::error::{Code, Error, Result};
use crate::http::guard::{Guard, Logins};
use crate::http::route::Class;
use crate::sync::Mutex;
use crate::threads::{self, Doing};

/// Bytes per read: one large answer moves in few calls, and one buffer serves all.
const SCRATCH_BYTES: usize = 64 * 1024;
/// Events per wait.
const EVENTS_MAX: usize = 256;
/// Steps that one connection makes before the others get their turn.
const STEPS_MAX: usize = 16;
/// Connections accepted per event, so that a flood of them does not hold up those that are in.
const ACCEPTS_MAX: usize = 64;
/// Connections beyond the cap that are refused with an answer; the ones beyond are closed without.
const REFUSALS_MAX: usize = 128;
/// Buffers kept for reuse.
const BUFFERS_MAX: usize = 64;
/// A buffer that grew beyond this is not kept.
const BUFFER_BYTES_MAX: usize = 64 * 1024;

const KIND_CLIENT: u64 = 0;
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
    pub lane_max: [usize; 2],
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
    epoll: OwnedFd,
    pub clients: Slab<Client>,
    pub upstreams: Slab<Upstream>,
    pub idle: Vec<Key>,
    pub queues: [VecDeque<Key>; 2],
    pub queued: [usize; 2],
    pub in_flight: [usize; 2],
    pub opening: bool,
    pub open_again_at: Option<Instant>,
    timers: BinaryHeap<Reverse<(Instant, Key)>>,
    pub again: Vec<Again>,
    pub scratch: Box<[u8]>,
    buffers: Vec<Vec<u8>>,
    pub now: Instant,
    pub born: Instant,
    accept_again_at: Option<Instant>,
    pub draining: Option<Instant>,
    per_address: HashMap<IpAddr, usize>,
    pub spool_bytes: u64,
    pub body_bytes: usize,
    pub overdue_now: usize,
}

impl Core {
    /// Registers the listeners; nothing is accepted before [`Core::run`].
    pub fn new(parts: Parts) -> Result<Self> {
        let io = std::io::Error::from;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io)?;
        epoll::add(
            &epoll,
            parts.notes.event(),
            EventData::new_u64(KIND_NOTES),
            EventFlags::IN,
        )
        .map_err(io)?;
        let now = Instant::now();
        let core = Self {
            parts,
            epoll,
            clients: Slab::new(),
            upstreams: Slab::new(),
            idle: Vec::new(),
            queues: [VecDeque::new(), VecDeque::new()],
            queued: [0; 2],
            in_flight: [0; 2],
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
            body_bytes: 0,
            overdue_now: 0,
        };
        core.watch_listeners().map_err(io)?;
        Ok(core)
    }

    fn watch_listeners(&self) -> rustix::io::Result<()> {
        for (at, listener) in self.parts.listeners.iter().enumerate() {
            epoll::add(
                &self.epoll,
                &listener.fd,
                EventData::new_u64(KIND_LISTENER | at as u64),
                EventFlags::IN,
            )?;
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
        self.draining
            .is_some_and(|until| self.clients.len() == 0 || self.now >= until)
    }

    fn until_next_timer(&self) -> Option<rustix::event::Timespec> {
        let mut next = self.timers.peek().map(|Reverse((at, _))| *at);
        for at in [self.accept_again_at, self.open_again_at, self.draining]
            .into_iter()
            .flatten()
        {
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
                        Note::Torn(upstream) => self.fail_upstream(
                            Key::unpack(upstream),
                            "the answer ended early",
                            false,
                        ),
                        Note::Token(token) => self.parts.guard.set_token(token),
                        Note::Shutdown(until) => self.drain(until),
                    }
                }
            }
            _ => {}
        }
    }

    // ---- accepting

    fn accept(&mut self, at: usize) {
        for _ in 0..ACCEPTS_MAX {
            let Some(listener) = self.parts.listeners.get(at) else {
                return;
            };
            let unix = listener.unix;
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(&listener.fd, flags) {
                Ok((fd, from)) => {
                    let peer = if unix {
                        Peer::Unix
                    } else {
                        Peer::Tcp(address(from))
                    };
                    self.take_in(fd, peer);
                }
                Err(Errno::AGAIN) => return,
                // The connection was gone before we came to it.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM) => {}
                Err(e) => {
                    // No descriptor or no memory: the connections wait in the kernel's queue until some are free.
                    log::warn!(
                        "accepting rests for {} ms: {e}",
                        self.parts.limits.accept_pause.as_millis()
                    );
                    count(&self.parts.metrics.accept_pauses);
                    for listener in &self.parts.listeners {
                        let _ = epoll::delete(&self.epoll, &listener.fd);
                    }
                    self.accept_again_at = Some(self.now + self.parts.limits.accept_pause);
                    return;
                }
            }
        }
    }

    fn take_in(&mut self, fd: OwnedFd, peer: Peer) {
        match peer {
            Peer::Tcp(_) => {
                // An answer in two parts must not wait for the acknowledgement of the first (44 ms).
                let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
            }
            Peer::Unix => {
                let ours = rustix::process::geteuid();
                match rustix::net::sockopt::socket_peercred(&fd) {
                    Ok(who) if who.uid == ours => {}
                    Ok(_) | Err(_) => {
                        log::warn!("chat.sock: a peer of another user was sent away");
                        return count(&self.parts.metrics.foreign_peers);
                    }
                }
            }
        }
        let limits = &self.parts.limits;
        let crowded = match counted_address(peer, limits.count_loopback) {
            Some(address) => {
                let here = self.per_address.entry(address).or_default();
                *here += 1;
                *here > limits.connections_per_address_max
            }
            None => false,
        };
        let over = self.clients.len() >= limits.connections_max;
        let deadline = self.now + limits.idle_time;
        if self.clients.len() >= limits.connections_max + REFUSALS_MAX {
            count(&self.parts.metrics.refused);
            return self.forget_address(peer);
        }
        let client = Client::new(fd, peer, deadline);
        let key = self.clients.insert(client);
        let watch = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        if let Err(e) = epoll::add(
            &self.epoll,
            &client.fd,
            EventData::new_u64(KIND_CLIENT | key.pack()),
            watch,
        ) {
            log::warn!("a connection cannot be watched: {e}");
            return self.close_client(key);
        }
        count(&self.parts.metrics.accepted);
        self.arm(key, deadline);
        if over || crowded || self.draining.is_some() {
            count(&self.parts.metrics.refused);
            let text = if over {
                "too many connections"
            } else {
                "too many connections from one address"
            };
            self.refuse(
                key,
                &Error::new(Code::Overloaded, text),
                Class::Unknown,
                None,
                true,
            );
        }
        self.drive_client(key);
    }

    fn forget_address(&mut self, peer: Peer) {
        if let Some(address) = counted_address(peer, self.parts.limits.count_loopback)
            && let Some(here) = self.per_address.get_mut(&address)
        {
            *here -= 1;
            if *here == 0 {
                self.per_address.remove(&address);
            }
        }
    }

    // ---- clients

    /// Lets a client do what it can.
    pub fn drive_client(&mut self, key: Key) {
        for _ in 0..STEPS_MAX {
            match self.step_client(key) {
                Step::More => {}
                Step::Wait => return,
                Step::Close => return self.close_client(key),
            }
        }
        self.again.push(Again::Client(key));
    }

    fn step_client(&mut self, key: Key) -> Step {
        let now = self.now;
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        if !client.out_is_empty() {
            let flushed = client.flush(SCRATCH_BYTES);
            if let Some(job) = client.job.as_mut()
                && flushed != Flush::Blocked(false)
            {
                job.progress = now;
            }
            match flushed {
                Flush::Gone => return Step::Close,
                Flush::Blocked(moved) => {
                    let phase = client.phase;
                    if moved && phase == Phase::Answer {
                        self.arm(key, now + self.parts.limits.reader_time);
                    }
                    if let Phase::Served(upstream) = phase {
                        self.drive_upstream(upstream);
                    }
                    return Step::Wait;
                }
                Flush::Done => {
                    if client.out.capacity() > 0 {
                        let buffer = std::mem::take(&mut client.out);
                        self.keep_buffer(buffer);
                    }
                }
            }
        }
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        match client.phase {
            Phase::Head => self.step_head(key),
            Phase::Body => self.step_body(key),
            Phase::Queued => {
                if client.half_closed {
                    return Step::Close;
                }
                Step::Wait
            }
            Phase::Served(upstream) => {
                if client
                    .job
                    .as_ref()
                    .is_some_and(|j| j.blocked_since.is_some())
                {
                    self.drive_upstream(upstream);
                }
                Step::Wait
            }
            Phase::Answer => self.finish_answer(key),
            Phase::Linger => self.step_linger(key),
        }
    }

    fn step_linger(&mut self, key: Key) -> Step {
        let limit = self.parts.limits.linger_bytes_max;
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        if !client.readable {
            return Step::Wait;
        }
        match receive(&client.fd, &mut self.scratch) {
            Got::Some(n) => {
                client.dropped += n;
                if client.dropped > limit {
                    Step::Close
                } else {
                    Step::More
                }
            }
            Got::Blocked => {
                client.readable = false;
                Step::Wait
            }
            Got::End | Got::Gone => Step::Close,
        }
    }

    /// Reads once into the client's buffer; none when nothing came.
    pub fn fill(&mut self, key: Key) -> Option<Step> {
        let fresh = if self.clients.get_mut(key)?.inbuf.capacity() == 0 {
            self.buffers.pop()
        } else {
            None
        };
        let client = self.clients.get_mut(key)?;
        if let Some(buffer) = fresh {
            client.inbuf = buffer;
        }
        if !client.readable {
            return Some(Step::Wait);
        }
        match receive(&client.fd, &mut self.scratch) {
            Got::Some(n) => {
                // A short read emptied the socket, unless the peer's end is still to be read.
                client.readable = n == self.scratch.len() || client.half_closed;
                client.inbuf.extend_from_slice(&self.scratch[..n]);
                None
            }
            Got::Blocked => {
                client.readable = false;
                Some(Step::Wait)
            }
            Got::End | Got::Gone => Some(Step::Close),
        }
    }

    /// Gives back the buffer of a client that used up what it read.
    pub fn release_inbuf(&mut self, key: Key) {
        if let Some(client) = self.clients.get_mut(key)
            && client.inbuf_at == client.inbuf.len()
        {
            let buffer = std::mem::take(&mut client.inbuf);
            client.inbuf_at = 0;
            client.scanned = 0;
            self.keep_buffer(buffer);
        }
    }

    fn keep_buffer(&mut self, mut buffer: Vec<u8>) {
        if self.buffers.len() < BUFFERS_MAX && (1..=BUFFER_BYTES_MAX).contains(&buffer.capacity()) {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }

    /// A buffer, used before or fresh.
    pub fn buffer(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_default()
    }

    /// Sets the client's deadline, and a timer if none is due before it.
    pub fn arm(&mut self, key: Key, deadline: Instant) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        client.deadline = deadline;
        if client.timer_at.is_none_or(|at| deadline < at) {
            client.timer_at = Some(deadline);
            self.timers.push(Reverse((deadline, key)));
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

    /// Removes a client; an upstream that carries its request goes on, and its answer is dropped.
    pub fn close_client(&mut self, key: Key) {
        let Some(mut client) = self.clients.remove(key) else {
            return;
        };
        if let Some(job) = client.job.take() {
            if client.phase != Phase::Linger {
                count(&self.parts.metrics.left);
                self.record(&job, 499, client.peer);
            }
            self.forget_body(&job.body);
            if client.phase == Phase::Queued
                && let super::client::Target::Pool(lane) = job.target
            {
                self.queued[lane] -= 1;
            }
        }
        if let Some(spill) = client.spill.take() {
            self.spool_bytes -= spill.bytes();
        }
        if let Phase::Served(upstream) = client.phase
            && let Some(upstream) = self.upstreams.get_mut(upstream)
        {
            upstream.client = None;
            let upstream = upstream_key(client.phase);
            self.again.extend(upstream.map(Again::Upstream));
        }
        self.keep_buffer(std::mem::take(&mut client.inbuf));
        self.keep_buffer(std::mem::take(&mut client.out));
        self.forget_address(client.peer);
    }

    /// Moves a client out of the loop, socket and unread bytes.
    pub fn give_away(&mut self, key: Key) -> Option<Client> {
        let client = self.clients.remove(key)?;
        self.forget_address(client.peer);
        if let Err(e) = epoll::delete(&self.epoll, &client.fd) {
            log::warn!("a connection cannot be given away: {e}");
            return None;
        }
        Some(client)
    }

    // ---- upstream sockets

    /// Watches a fresh upstream.
    pub fn watch_upstream(&mut self, key: Key) -> rustix::io::Result<()> {
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return Ok(());
        };
        let data = EventData::new_u64(KIND_UPSTREAM | key.pack());
        epoll::add(
            &self.epoll,
            &upstream.fd,
            data,
            EventFlags::IN | EventFlags::RDHUP | EventFlags::ET,
        )
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
        if let Err(e) = epoll::modify(
            &self.epoll,
            &upstream.fd,
            EventData::new_u64(KIND_UPSTREAM | key.pack()),
            watch,
        ) {
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
            upstreams: self.upstreams.len() as u64,
            overdue_now: self.overdue_now as u64,
            spool_bytes: self.spool_bytes,
            body_bytes: self.body_bytes as u64,
            ..Gauges::default()
        };
        g.upstreams_busy = self
            .upstreams
            .iter()
            .filter(|(_, u)| matches!(u.state, State::Head | State::Body(_)))
            .count() as u64;
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

fn upstream_key(phase: Phase) -> Option<Key> {
    match phase {
        Phase::Served(upstream) => Some(upstream),
        Phase::Head | Phase::Body | Phase::Queued | Phase::Answer | Phase::Linger => None,
    }
}

fn address(from: Option<SocketAddrAny>) -> IpAddr {
    from.and_then(|a| std::net::SocketAddr::try_from(a).ok())
        .map_or(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), |a| {
            a.ip().to_canonical()
        })
}

/// What the cap per address counts: an IPv6 client owns a whole /64.
fn counted_address(peer: Peer, count_loopback: bool) -> Option<IpAddr> {
    match peer {
        Peer::Unix => None,
        Peer::Tcp(ip) if ip.is_loopback() && !count_loopback => None,
        Peer::Tcp(IpAddr::V4(ip)) => Some(IpAddr::V4(ip)),
        Peer::Tcp(IpAddr::V6(ip)) => {
            let [a, b, c, d, ..] = ip.segments();
            Some(IpAddr::V6(std::net::Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0)))
        }
    }
}
