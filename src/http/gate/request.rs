//! From bytes to a decision: heads, bodies, refusals, the gate's own answers, and the end of each request.
//!
//! Rules a change could break: Host, Origin and token are looked at before anything is done; what is refused with bytes
//! unread closes its connection; every request is counted and logged once, without a secret.

use super::body::{Chunks, Store};
use super::client::{BodyIn, Job, Peer, Phase, Target};
use super::core::{Core, Step};
use super::head::{self, Framing, Scan};
use super::slab::Key;
use super::vet::{Let, Plan};
use crate::error::{Code, Error};
use crate::http::reply::{Body, Reply};
use crate::http::route::{Class, Refusal};

impl Core {
    // ---- heads

    pub(super) fn step_head(&mut self, key: Key) -> Step {
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        if !client.unread().is_empty()
            && let Some(step) = self.try_head(key)
        {
            return step;
        }
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let was_empty = client.unread().is_empty();
        if let Some(step) = self.fill(key) {
            return step;
        }
        if was_empty {
            // Most requests come whole: their head needs no timer.
            if let Some(step) = self.try_head(key) {
                return step;
            }
            // Empty lines alone begin nothing, and buy no time.
            let begun = self.clients.get_mut(key).is_some_and(|c| !c.unread().is_empty());
            if begun {
                let deadline = self.now + self.parts.limits.head_time;
                self.arm(key, deadline);
            }
        }
        Step::More
    }

    /// Reads a head if one is whole.
    fn try_head(&mut self, key: Key) -> Option<Step> {
        let head_max = self.parts.limits.head_bytes_max;
        let client = self.clients.get_mut(key)?;
        // One empty line before a request is an old client's habit; more are somebody's trick and end at the limit.
        while client.scanned == 0 && client.unread().starts_with(b"\r\n") && client.inbuf_at < head_max {
            client.inbuf_at += 2;
        }
        let mut scanned = client.scanned;
        let scan = head::scan(client.unread(), &mut scanned);
        client.scanned = scanned;
        let too_large = || Error::new(Code::HeadTooLarge, format!("a head over {head_max} bytes"));
        let len = match scan {
            Scan::Whole(len) if len <= head_max => len,
            Scan::Partial if client.unread().len() <= head_max => return None,
            Scan::Whole(_) | Scan::Partial => {
                self.refuse(key, &too_large(), Class::Unknown, None, true);
                return Some(Step::More);
            }
            Scan::BareLf => {
                let error = Error::new(Code::BadRequest, "a line that ends in LF alone");
                self.refuse(key, &error, Class::Unknown, None, true);
                return Some(Step::More);
            }
        };
        let buffer = std::mem::take(&mut client.inbuf);
        let from = client.inbuf_at;
        let decision = self.vet(key, &buffer[from..from + len]);
        let client = self.clients.get_mut(key)?;
        client.inbuf = buffer;
        client.inbuf_at += len;
        client.scanned = 0;
        self.release_inbuf(key);
        Some(match decision {
            Ok(admitted) => self.admit(key, admitted),
            Err(refused) => {
                let job =
                    self.fresh_job(refused.class, refused.head_only, refused.http10, !refused.close, refused.line);
                let client = self.clients.get_mut(key)?;
                client.job = Some(Box::new(job));
                let Refusal { error, allow } = refused.refusal;
                self.refuse(key, &error, refused.class, allow, refused.close);
                Step::More
            }
        })
    }

    fn fresh_job(&self, class: Class, head_only: bool, http10: bool, keep_alive: bool, line: Option<String>) -> Job {
        Job {
            class,
            target: Target::Login,
            head_only,
            http10,
            keep_alive,
            started: self.now,
            body_started: self.now,
            body_received: 0,
            body_in: BodyIn::Left(0),
            body: Store::default(),
            upstream_head: Vec::new(),
            answer_time: self.parts.limits.answer_time,
            status: 0,
            answer_bytes: 0,
            answer_total: 0,
            answer_begun: false,
            progress: self.now,
            blocked_since: None,
            spilling: false,
            line,
        }
    }

    fn admit(&mut self, key: Key, admitted: Let) -> Step {
        let Let { class, plan, head_only, http10, keep_alive, framing, expects_continue, line } = admitted;
        let mut job = self.fresh_job(class, head_only, http10, keep_alive, line);
        match plan {
            Plan::Push { kind, cursor } => {
                self.hand_to_push(key, kind, cursor);
                return Step::Wait;
            }
            Plan::Own(route) => {
                let Some(client) = self.clients.get_mut(key) else {
                    return Step::Wait;
                };
                client.job = Some(Box::new(job));
                let reply = self.own_answer(&route);
                self.answer(key, reply, false);
                return Step::More;
            }
            Plan::Login => job.target = Target::Login,
            Plan::Pool { lane, upstream_head, wait_ms } => {
                job.target = Target::Pool(lane);
                job.upstream_head = upstream_head;
                job.answer_time = self.parts.limits.answer_time(class, wait_ms);
            }
        }
        let limits = &self.parts.limits;
        match framing {
            Framing::None => {}
            Framing::Length(n) => job.body_in = BodyIn::Left(n),
            Framing::Chunked => job.body_in = BodyIn::Chunked(Chunks::new(limits.body_bytes_max(class))),
        }
        let deadline = self.now + limits.body_grace;
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        client.job = Some(Box::new(job));
        if framing == Framing::None {
            return self.body_is_whole(key);
        }
        client.phase = Phase::Body;
        if expects_continue && client.unread().is_empty() {
            client.out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        self.arm(key, deadline);
        Step::More
    }

    // ---- bodies

    pub(super) fn step_body(&mut self, key: Key) -> Step {
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        if client.unread().is_empty() {
            client.inbuf.clear();
            client.inbuf_at = 0;
            if let Some(step) = self.fill(key) {
                return step;
            }
        }
        let limits = &self.parts.limits;
        let memory_max = if self.body_bytes < limits.bodies_memory_max { limits.body_memory_max } else { 0 };
        let spool_left = limits.spool_bytes_max.saturating_sub(self.spool_bytes);
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let Some(job) = client.job.as_mut() else {
            return Step::Close;
        };
        let (memory_before, file_before) = sizes(&job.body);
        let input = &client.inbuf[client.inbuf_at..];
        let dir = &self.parts.state_dir;
        let body = &mut job.body;
        let mut store = |piece: &[u8]| {
            if body.len() + piece.len() as u64 > spool_left + memory_max as u64 {
                return Err(Error::new(Code::Overloaded, "no room to spool a body"));
            }
            body.append(piece, memory_max, dir)
        };
        let (used, whole) = match &mut job.body_in {
            BodyIn::Left(left) => {
                let n = input.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                let stored = store(&input[..n]);
                *left -= n as u64;
                (stored.map(|()| n), *left == 0)
            }
            BodyIn::Chunked(chunks) => {
                let used = chunks.feed(input, store);
                (used, chunks.is_done())
            }
        };
        let (memory_after, file_after) = sizes(&job.body);
        self.body_bytes = self.body_bytes + memory_after - memory_before;
        self.spool_bytes = self.spool_bytes + file_after - file_before;
        match used {
            Ok(n) => {
                client.inbuf_at += n;
                job.body_received += n as u64;
            }
            Err(error) => {
                let class = job.class;
                self.refuse(key, &error, class, None, true);
                return Step::More;
            }
        }
        let earned = std::time::Duration::from_millis(job.body_received * 1000 / limits.body_rate_min.max(1));
        let deadline = job.body_started + limits.body_grace + earned;
        if whole {
            self.release_inbuf(key);
            return self.body_is_whole(key);
        }
        client.deadline = deadline;
        Step::More
    }

    /// The whole request is here.
    fn body_is_whole(&mut self, key: Key) -> Step {
        let queue_max = self.parts.limits.queue_requests_max;
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let Some(job) = client.job.as_ref() else {
            return Step::Close;
        };
        let (target, class) = (job.target, job.class);
        match target {
            Target::Login => {
                let reply = self.log_in(key);
                self.answer(key, reply, false);
                Step::More
            }
            Target::Pool(lane) => {
                if self.queued[lane] == 0 && self.has_room(lane) && self.line.is_up() && self.has_room_for_body(key) {
                    self.hand(key, lane);
                    return Step::Wait;
                } else if self.queued[lane] >= queue_max {
                    let error = Error::new(Code::Overloaded, format!("{queue_max} requests are waiting already"));
                    self.refuse(key, &error, class, None, false);
                    return Step::More;
                }
                self.enqueue(key, lane);
                self.want_line();
                Step::Wait
            }
        }
    }

    // ---- answers from here

    /// Answers with an error; `close` when bytes of the request stay unread.
    pub(super) fn refuse(&mut self, key: Key, error: &Error, class: Class, allow: Option<&'static str>, close: bool) {
        let mut reply = Reply::from_error(error);
        if let Some(allow) = allow {
            reply.headers.push(("Allow", allow.to_owned()));
        }
        let needs_job = self.clients.get_mut(key).is_some_and(|c| c.job.is_none());
        if needs_job {
            let job = self.fresh_job(class, false, false, !close, None);
            if let Some(client) = self.clients.get_mut(key) {
                client.job = Some(Box::new(job));
            }
        }
        self.answer(key, reply, close);
    }

    /// Answers from here; the reply's body is in memory.
    fn answer(&mut self, key: Key, reply: Reply, close: bool) {
        let deadline = self.now + self.parts.limits.reader_time;
        let draining = self.draining.is_some();
        let mut out = self.buffer();
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Some(job) = client.job.as_mut() else {
            return;
        };
        let keep = job.keep_alive && !close && !draining;
        let connection = match (keep, job.http10) {
            (true, false) => None,
            (true, true) => Some("keep-alive"),
            (false, _) => Some("close"),
        };
        reply.write_head(&mut out, connection, None);
        if let Body::Bytes(bytes) = &reply.body
            && !job.head_only
        {
            out.extend_from_slice(bytes);
        }
        job.status = reply.status;
        job.answer_begun = true;
        job.answer_bytes = out.len() as u64;
        client.closing |= !keep;
        client.phase = Phase::Answer;
        client.out.extend_from_slice(&out);
        self.arm(key, deadline);
    }

    // ---- the end of a request

    /// The answer is out.
    pub(super) fn finish_answer(&mut self, key: Key) -> Step {
        let (idle, linger) = (self.parts.limits.idle_time, self.parts.limits.linger_time);
        let draining = self.draining.is_some();
        // At the end of the house nobody lingers for long.
        let linger = if draining { linger / 8 } else { linger };
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let peer = client.peer;
        let job = client.job.take();
        let spilled = client.spill.take().map_or(0, |s| s.bytes());
        client.phase = Phase::Head;
        let (closing, rest) = (client.closing || draining, !client.unread().is_empty());
        if closing {
            let _ = rustix::net::shutdown(&client.fd, rustix::net::Shutdown::Write);
            client.phase = Phase::Linger;
            client.inbuf = Vec::new();
            client.inbuf_at = 0;
        }
        self.spool_bytes -= spilled;
        self.spilled_bytes -= spilled;
        if let Some(job) = job {
            self.forget_body(&job.body);
            self.record(&job, job.status, peer);
        }
        let patience = if closing {
            linger
        } else if rest {
            self.parts.limits.head_time
        } else {
            idle
        };
        self.arm(key, self.now + patience);
        Step::More
    }

    /// Counts and logs a request, once.
    pub(super) fn record(&self, job: &Job, status: u16, peer: Peer) {
        let took = self.now.saturating_duration_since(job.started);
        self.parts.metrics.request(job.class, status, took);
        if let Some(line) = &job.line {
            log::debug!("{} {line} {status} {} bytes {} us", peer_text(peer), job.answer_bytes, took.as_micros());
        }
    }

    /// A client's deadline passed.
    pub(super) fn time_out(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        match client.phase {
            Phase::Head if client.unread().is_empty() => self.close_client(key),
            Phase::Head | Phase::Body => {
                let class = client.job.as_ref().map_or(Class::Unknown, |j| j.class);
                let error = Error::new(Code::RequestTimeout, "the request took too long to arrive");
                self.refuse(key, &error, class, None, true);
                self.drive_client(key);
            }
            Phase::Queued => {
                let class = client.job.as_ref().map_or(Class::Unknown, |j| j.class);
                if let Some(lane) = Self::lane_of(client) {
                    self.queued[lane] -= 1;
                }
                let error = Error::new(Code::Overloaded, "no worker was free in time");
                self.refuse(key, &error, class, None, false);
                self.drive_client(key);
            }
            Phase::Served(flight) => self.time_out_served(key, flight),
            Phase::Answer | Phase::Linger => self.close_client(key),
        }
    }
}

/// Bytes of a body in memory, and in a file.
pub(super) fn sizes(body: &Store) -> (usize, u64) {
    match body {
        Store::Memory(bytes) => (bytes.len(), 0),
        Store::File(_, len) => (0, *len),
    }
}

pub(super) fn peer_text(peer: Peer) -> String {
    match peer {
        Peer::Tcp(ip) => ip.to_string(),
        Peer::Unix => "chat.sock".to_owned(),
    }
}
