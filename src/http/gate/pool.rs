//! Upstreams: opening them, and handing requests to free ones.
//!
//! Leaves their answers to `relay`. Rules a change could break: an upstream carries one request at a time and counts only
//! after its probe was answered; they are opened one after another, because tiny_http strands some of a burst; a lane
//! never has more in flight than it has workers.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::body::Store;
use super::client::{BULK, LANES, Phase, Sent, WAIT, WORK, send};
use super::core::{Again, Core, Step};
use super::slab::Key;
use super::upstream::{State, Upstream};
use crate::http::server::{PROBE_PATH, UPSTREAM_FIELD};

/// How long to wait after the pool could not be reached.
pub(super) const OPEN_AGAIN: Duration = Duration::from_millis(50);

impl Core {
    // ---- opening

    /// Opens the next upstream if one is needed: as many as there are ordinary workers at once, more on demand.
    pub fn want_upstreams(&mut self) {
        let most = self.parts.lane_max[WORK] + self.parts.lane_max[WAIT];
        let here = self.upstreams.len();
        let waiting = (0..LANES).any(|lane| self.queued[lane] > 0 && self.has_room(lane));
        let needed = here < self.parts.lane_max[WORK] || here < most && waiting && self.idle.is_empty();
        if self.opening || self.open_again_at.is_some() || !needed {
            return;
        }
        match self.open() {
            Ok(()) => self.opening = true,
            Err(e) => {
                if here == 0 {
                    log::warn!("the pool cannot be reached: {e}");
                }
                self.open_again_at = Some(self.now + OPEN_AGAIN);
            }
        }
    }

    fn open(&mut self) -> rustix::io::Result<()> {
        // The pool needs two descriptors for its end, and ends accepting for good when it has none: never open with the
        // last ones.
        let spare: rustix::io::Result<Vec<OwnedFd>> =
            (0..8).map(|_| rustix::io::fcntl_dupfd_cloexec(self.parts.notes.event(), 0)).collect();
        drop(spare?);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(self.parts.pool.path())?)?;
        let probe = format!("GET {PROBE_PATH} HTTP/1.1\r\n\r\n");
        let key = self.upstreams.insert(Upstream::new(fd, probe.as_bytes()));
        self.watch_upstream(key).inspect_err(|_| {
            self.upstreams.remove(key);
        })?;
        self.again.push(Again::Upstream(key));
        Ok(())
    }

    // ---- handing out

    /// Puts a whole request in line.
    pub fn enqueue(&mut self, key: Key, lane: usize) {
        while let Some(front) = self.queues[lane].front().copied() {
            if self.clients.get_mut(front).is_some_and(|c| c.phase == Phase::Queued) {
                break;
            }
            self.queues[lane].pop_front();
        }
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        client.phase = Phase::Queued;
        self.queues[lane].push_back(key);
        self.queued[lane] += 1;
        let deadline = self.now + self.parts.limits.queue_time;
        self.arm(key, deadline);
    }

    /// Hands waiting requests to free upstreams.
    pub fn dispatch(&mut self) {
        while let Some(lane) = self.next_lane() {
            let Some(upstream) = self.idle.pop() else {
                return self.want_upstreams();
            };
            if self.hand_next(lane, upstream) {
                self.bulk_first = lane == WORK;
            } else {
                self.idle.push(upstream);
            }
        }
    }

    /// The lane whose oldest request goes next: the two that share workers take turns, so that neither starves.
    fn next_lane(&self) -> Option<usize> {
        let order = if self.bulk_first { [BULK, WORK, WAIT] } else { [WORK, BULK, WAIT] };
        order.into_iter().find(|lane| self.queued[*lane] > 0 && self.has_room(*lane))
    }

    /// True when one more request of the lane may be in flight.
    pub fn has_room(&self, lane: usize) -> bool {
        let ordinary = self.in_flight[WORK] + self.in_flight[BULK];
        self.in_flight[lane] < self.parts.lane_max[lane] && (lane == WAIT || ordinary < self.parts.lane_max[WORK])
    }

    fn hand_next(&mut self, lane: usize, upstream: Key) -> bool {
        while let Some(key) = self.queues[lane].pop_front() {
            if self.clients.get_mut(key).is_some_and(|c| c.phase == Phase::Queued) {
                self.queued[lane] -= 1;
                self.hand(key, lane, upstream);
                return true;
            }
        }
        self.queued[lane] = 0;
        false
    }

    /// Gives a whole request to a free upstream.
    pub fn hand(&mut self, key: Key, lane: usize, upstream_key: Key) {
        let now = self.now;
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Some(job) = client.job.as_mut() else {
            return;
        };
        let Some(upstream) = self.upstreams.get_mut(upstream_key) else {
            return;
        };
        client.phase = Phase::Served(upstream_key);
        job.progress = now;
        upstream.state = State::Head;
        upstream.client = Some(key);
        upstream.lane = lane;
        upstream.head_only = job.head_only;
        upstream.out.clear();
        upstream.out_at = 0;
        upstream.out.extend_from_slice(&job.upstream_head);
        let body = std::mem::take(&mut job.body);
        let mut number = itoa(upstream_key.pack());
        if !body.is_empty() {
            upstream.out.extend_from_slice(b"Content-Length: ");
            upstream.out.extend_from_slice(itoa(body.len()).as_bytes());
            upstream.out.extend_from_slice(b"\r\n");
        }
        number.push_str("\r\n\r\n");
        upstream.out.extend_from_slice(UPSTREAM_FIELD.as_bytes());
        upstream.out.extend_from_slice(b": ");
        upstream.out.extend_from_slice(number.as_bytes());
        upstream.body_at = 0;
        match body {
            // Head and body in one write.
            Store::Memory(bytes) => {
                upstream.out.extend_from_slice(&bytes);
                self.body_bytes -= bytes.len();
            }
            Store::File(..) => upstream.body = body,
        }
        let deadline = now + job.answer_time;
        self.in_flight[lane] += 1;
        self.arm(key, deadline);
        if let Step::Close = self.write_upstream(upstream_key) {
            self.fail_upstream(upstream_key, "the pool closed it", true);
        }
    }

    /// Writes what the upstream takes of its request.
    pub(super) fn write_upstream(&mut self, key: Key) -> Step {
        loop {
            let Some(upstream) = self.upstreams.get_mut(key) else {
                return Step::Wait;
            };
            if upstream.is_sent() {
                let watched = upstream.watches_writable;
                if watched {
                    self.watch_writable(key, false);
                }
                return Step::More;
            }
            let sent = if upstream.out_at < upstream.out.len() {
                let sent = send(&upstream.fd, &upstream.out[upstream.out_at..]);
                if let Sent::Some(n) = sent {
                    upstream.out_at += n;
                }
                sent
            } else {
                let Ok(n @ 1..) = upstream.body.read_at(upstream.body_at, &mut self.scratch) else {
                    return Step::Close;
                };
                let sent = send(&upstream.fd, &self.scratch[..n]);
                if let Sent::Some(n) = sent {
                    upstream.body_at += n as u64;
                }
                sent
            };
            match sent {
                Sent::Some(_) => {}
                Sent::Blocked => {
                    self.watch_writable(key, true);
                    return Step::Wait;
                }
                Sent::Gone => return Step::Close,
            }
        }
    }
}

fn itoa(number: u64) -> String {
    number.to_string()
}
