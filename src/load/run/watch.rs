//! A wall of watchers: many subscribers on one thread, by epoll. Some of them never read after the hello.
//! Rule a change could break: each subscriber's ids are watched one by one; what is shared is only the clock.

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{Timespec, epoll};
use serde_json::Value;
use tungstenite::{Message, WebSocket};

use super::World;
use crate::load::events::{Envelope, OrderCheck, as_io, open_websocket};
use crate::load::scenario::Watch;
use crate::threads::{Doing, doing};

/// Frames taken from one socket before the next gets its turn.
const FRAMES_PER_TURN: usize = 64;
/// Sockets that epoll reports at once.
const READY_MAX: usize = 256;
/// Between two tries to connect again.
const AGAIN_AFTER: Duration = Duration::from_millis(250);
/// How long watchers may take to reach the last event of the settled server.
const TAIL_WITHIN: Duration = Duration::from_secs(15);
/// Accepted messages whose sending time is remembered by event id.
const KNOWN_MAX: usize = 4096;

struct Watcher {
    name: String,
    socket: Option<WebSocket<TcpStream>>,
    asked: Option<String>,
    again_at: Instant,
    /// When it subscribed last.
    since: Instant,
    order: OrderCheck,
    stalled: bool,
}

/// The subscribers of one thread.
pub struct Wall {
    world: Arc<World>,
    group: usize,
    watchers: Vec<Watcher>,
    /// Acceptance events by id: when the message was sent.
    known: HashMap<i64, Option<Instant>>,
}

impl Wall {
    /// Watchers `first..first + count` of a group; the last ones of the group are the stalled ones.
    pub fn new(world: Arc<World>, group: usize, watch: &Watch, first: usize, count: usize) -> Self {
        let now = Instant::now();
        let watchers = (first..first + count)
            .map(|n| Watcher {
                name: format!("{}-{n}", watch.name),
                socket: None,
                asked: None,
                again_at: now,
                since: now,
                order: OrderCheck::default(),
                stalled: n >= watch.watchers - watch.stalled,
            })
            .collect();
        Self { world, group, watchers, known: HashMap::new() }
    }

    /// From arrival to departure.
    pub fn live(mut self) {
        if let Err(e) = self.watch() {
            self.world.board.failed(self.group, "watch", e.to_string());
        }
        let mut all = self.world.subscribers.lock();
        all.extend(self.watchers.into_iter().filter(|w| !w.stalled).map(|w| (w.name, w.order)));
    }

    fn watch(&mut self) -> io::Result<()> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut tail_until = None;
        let mut ready =
            vec![epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; READY_MAX];
        let mut pending: Vec<usize> = Vec::new();
        loop {
            // What came along with the handshake lies in the socket's own buffer: the kernel does not report it.
            pending.extend(self.connect_missing(&epoll));
            let head = self.world.head.load(Ordering::Acquire);
            if head >= 0 {
                let end = *tail_until.get_or_insert_with(|| Instant::now() + TAIL_WITHIN);
                let behind = |w: &Watcher| !w.stalled && w.order.last_id().is_none_or(|last| last < head);
                if !self.watchers.iter().any(behind) {
                    return Ok(());
                }
                if Instant::now() > end {
                    for watcher in self.watchers.iter_mut().filter(|w| behind(w)) {
                        let last = watcher.order.last_id();
                        watcher.order.faults.push(format!("stopped at event {last:?}, the last is {head}"));
                    }
                    return Ok(());
                }
            }
            let wait_ms = if pending.is_empty() { 100 } else { 0 };
            let timeout = Timespec { tv_sec: 0, tv_nsec: wait_ms * 1_000_000 };
            let count = {
                let _at = doing(Doing::WaitReady);
                match epoll::wait(&epoll, ready.as_mut_slice(), Some(&timeout)) {
                    Ok(count) => count,
                    Err(rustix::io::Errno::INTR) => 0,
                    Err(e) => return Err(e.into()),
                }
            };
            // Those with frames left in their buffer are not reported by the kernel again.
            let mut turn: Vec<usize> = std::mem::take(&mut pending);
            for event in &ready[..count] {
                let data = event.data;
                turn.push(data.u64() as usize);
            }
            turn.sort_unstable();
            turn.dedup();
            let mut latencies = Vec::new();
            let mut ages = Vec::new();
            for at in turn {
                match self.read(&epoll, at, &mut latencies, &mut ages) {
                    Ok(true) => pending.push(at),
                    Ok(false) => {}
                    Err(why) => self.lost(at, &why),
                }
            }
            if !latencies.is_empty() {
                self.world.board.took_many(self.group, "send to delivery", &latencies);
            }
            if !ages.is_empty() {
                self.world.board.took_many(self.group, "age of event", &ages);
            }
        }
    }

    fn lost(&mut self, at: usize, why: &io::Error) {
        let watcher = &mut self.watchers[at];
        // Dropping the socket takes it out of epoll, too.
        watcher.socket = None;
        watcher.again_at = Instant::now() + AGAIN_AFTER;
        if !watcher.stalled {
            self.world.board.failed(self.group, "watch", why.to_string());
        }
    }

    /// Connects who is not connected; those that now are.
    fn connect_missing(&mut self, epoll: &OwnedFd) -> Vec<usize> {
        let mut fresh = Vec::new();
        let now = Instant::now();
        let limit = self.world.answer_within();
        let bearer = self.world.bearer.as_deref();
        let mut failed = Vec::new();
        for (at, watcher) in self.watchers.iter_mut().enumerate() {
            let gave_up = watcher.stalled && watcher.order.last_id().is_some();
            if watcher.socket.is_some() || watcher.again_at > now || gave_up {
                continue;
            }
            watcher.asked = watcher.order.cursor();
            let begun = Instant::now();
            let opened = open_websocket(self.world.addr, watcher.asked.as_deref(), bearer, limit).and_then(|socket| {
                socket.get_ref().set_nonblocking(true)?;
                let data = epoll::EventData::new_u64(at as u64);
                epoll::add(epoll, socket.get_ref(), data, epoll::EventFlags::IN)?;
                Ok(socket)
            });
            match opened {
                Ok(socket) => {
                    watcher.socket = Some(socket);
                    watcher.since = Instant::now();
                    fresh.push(at);
                    self.world.board.took(self.group, "follow", begun.elapsed());
                }
                Err(e) => {
                    watcher.again_at = now + AGAIN_AFTER;
                    failed.push(e.to_string());
                    // One refusal tells enough of a server that is down; the others wait as well.
                    break;
                }
            }
            if begun.duration_since(now) > AGAIN_AFTER {
                // Those that are connected must not starve meanwhile.
                break;
            }
        }
        for why in failed {
            self.world.board.failed(self.group, "follow", why);
        }
        fresh
    }

    /// Reads some frames; true when there may be more at once.
    fn read(
        &mut self,
        epoll: &OwnedFd,
        at: usize,
        latencies: &mut Vec<Duration>,
        ages: &mut Vec<Duration>,
    ) -> io::Result<bool> {
        for _ in 0..FRAMES_PER_TURN {
            let watcher = &mut self.watchers[at];
            let Some(socket) = watcher.socket.as_mut() else {
                return Ok(false);
            };
            if watcher.stalled && watcher.order.last_id().is_some() {
                // From now on the kernel's buffer fills, and the server is left with the rest.
                epoll::delete(epoll, socket.get_ref())?;
                return Ok(false);
            }
            let text = match socket.read() {
                Ok(Message::Text(text)) => text,
                Ok(Message::Ping(_)) => {
                    socket.flush().map_err(as_io)?;
                    continue;
                }
                Ok(Message::Pong(_)) => continue,
                Ok(Message::Close(_)) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Ok(Message::Binary(_) | Message::Frame(_)) => {
                    return Err(io::Error::other("a frame that is not text"));
                }
                Err(tungstenite::Error::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(false);
                }
                Err(e) => return Err(as_io(e)),
            };
            let got = Instant::now();
            let frame: Envelope<'_> = serde_json::from_str(&text).map_err(io::Error::other)?;
            let data = || frame.data.and_then(|d| serde_json::from_str(d.get()).ok()).unwrap_or(Value::Null);
            watcher.order.see(frame.id, &frame.event, data, watcher.asked.as_deref());
            self.world.deliveries.fetch_add(1, Ordering::Relaxed);
            if let Some(age) = frame.at.as_deref().and_then(age_of) {
                ages.push(age);
            }
            if let (Some(id), "chat-user-message") = (frame.id, frame.event.as_ref()) {
                let sent = *self.known.entry(id).or_insert_with(|| {
                    let text = data()["message"].as_str().unwrap_or_default().to_owned();
                    let message_id = text.rsplit_once("<#").and_then(|(_, rest)| rest.strip_suffix("#>"));
                    message_id.and_then(|m| self.world.sent_at.lock().get(m).copied())
                });
                // Only what was sent after this one subscribed is late for it; a replay is not.
                if let Some(sent) = sent.filter(|sent| *sent >= watcher.since) {
                    latencies.push(got.saturating_duration_since(sent));
                }
                if self.known.len() > KNOWN_MAX {
                    self.known.clear();
                }
            }
        }
        Ok(true)
    }
}

/// How old a frame is by the wall clock; its stamp has milliseconds, so this is up to 1 ms too much.
fn age_of(at: &str) -> Option<Duration> {
    let stamp = Duration::from_millis(u64::try_from(crate::clock::from_rfc3339(at)?).ok()?);
    SystemTime::now().duration_since(UNIX_EPOCH).ok()?.checked_sub(stamp)
}
