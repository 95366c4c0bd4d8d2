//! Answers on their way from an upstream to a client.
//!
//! Leaves which request goes where to `pool`. Rules a change could break: an answer is exactly as long as its head says,
//! or both ends are closed; nothing is sent again once a byte went upstream, but a GET once; an answer of a client that
//! left is still read.

use std::time::Duration;

use super::body::{Store, unlinked_file};
use super::client::{Client, Got, LANES, Phase, Sent, Spill, Target, receive, send};
use super::core::{Again, Core, Step};
use super::metrics::count;
use super::pool::OPEN_AGAIN;
use super::slab::Key;
use super::upstream::{State, answer_head};
use crate::error::{Code, Error};

/// Steps that one upstream makes before the others get their turn.
const STEPS_MAX: usize = 2;
/// How often to look whether others wait for a worker that waits for a reader.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl Core {
    // ---- relaying

    /// Lets an upstream do what it can.
    pub fn drive_upstream(&mut self, key: Key) {
        for _ in 0..STEPS_MAX {
            match self.step_upstream(key) {
                Ok(Step::More) => {}
                Ok(Step::Wait) => return,
                Ok(Step::Close) => return self.fail_upstream(key, "the pool closed it", true),
                Err(why) => return self.fail_upstream(key, why, false),
            }
        }
        self.again.push(Again::Upstream(key));
    }

    fn step_upstream(&mut self, key: Key) -> Result<Step, &'static str> {
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return Ok(Step::Wait);
        };
        if !upstream.is_sent()
            && let Step::Close = self.write_upstream(key)
        {
            return Ok(Step::Close);
        }
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return Ok(Step::Wait);
        };
        if !upstream.readable {
            return Ok(Step::Wait);
        }
        if let Some(client_key) = upstream.client
            && self.is_full(client_key)
        {
            return Ok(Step::Wait);
        }
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return Ok(Step::Wait);
        };
        let mut scratch = std::mem::take(&mut self.scratch);
        let got = receive(&upstream.fd, &mut scratch);
        let step = match got {
            Got::Some(n) => {
                upstream.readable = n == scratch.len() || upstream.half_closed;
                self.take_answer(key, &scratch[..n])
            }
            Got::Blocked => {
                upstream.readable = false;
                Ok(Taken::More(Step::Wait))
            }
            Got::End | Got::Gone => Ok(Taken::More(Step::Close)),
        };
        self.scratch = scratch;
        match step? {
            Taken::More(step) => Ok(step),
            Taken::Probed => {
                self.opening = false;
                self.idle.push(key);
                self.dispatch();
                self.want_upstreams();
                Ok(Step::More)
            }
            Taken::Whole => {
                self.complete(key);
                Ok(Step::More)
            }
        }
    }

    /// True when the client has enough to take first; notes since when its upstream waits.
    fn is_full(&mut self, key: Key) -> bool {
        let patience = self.now + self.patience();
        let limits = &self.parts.limits;
        let Some(client) = self.clients.get_mut(key) else {
            return false;
        };
        let full = client.out_waiting() >= limits.answer_memory_max;
        let Some(job) = client.job.as_mut() else {
            return false;
        };
        if !full || job.spilling {
            return false;
        }
        if job.blocked_since.is_none() {
            job.blocked_since = Some(self.now);
            self.arm(key, patience);
        }
        true
    }

    /// How long a worker may wait for a reader: the shorter, the more others wait for that worker. A crowd of readers
    /// that take nothing is so gone through in about a second, however large it is.
    fn patience(&self) -> Duration {
        let others: usize = self.queued.iter().sum();
        self.parts.limits.reader_stall / u32::try_from(1 + others).unwrap_or(u32::MAX)
    }

    fn take_answer(&mut self, key: Key, bytes: &[u8]) -> Result<Taken, &'static str> {
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return Ok(Taken::More(Step::Wait));
        };
        match upstream.state {
            State::Idle => Err("bytes that answer nothing"),
            State::Probing => {
                upstream.inbuf.extend_from_slice(bytes);
                match answer_head(&upstream.inbuf, false)? {
                    None => Ok(Taken::More(Step::More)),
                    Some(head) if head.status == 204 && head.len == upstream.inbuf.len() => {
                        upstream.inbuf = Vec::new();
                        upstream.state = State::Idle;
                        Ok(Taken::Probed)
                    }
                    Some(_) => Err("a strange answer to the probe"),
                }
            }
            State::Head => {
                let mut joined = std::mem::take(&mut upstream.inbuf);
                let all = if joined.is_empty() {
                    bytes
                } else {
                    joined.extend_from_slice(bytes);
                    &joined
                };
                let Some(head) = answer_head(all, upstream.head_only)? else {
                    upstream.inbuf = all.to_vec();
                    return Ok(Taken::More(Step::More));
                };
                let piece = (all.len() - head.len) as u64;
                if piece > head.body {
                    return Err("more bytes than the answer has");
                }
                upstream.state = State::Body(head.body - piece);
                let client = upstream.client;
                if let Some(client) = client {
                    self.begin_answer(client, head.status, head.status_line, all);
                }
                Ok(if piece == head.body { Taken::Whole } else { Taken::More(Step::More) })
            }
            State::Body(left) => {
                let piece = bytes.len() as u64;
                if piece > left {
                    return Err("more bytes than the answer has");
                }
                upstream.state = State::Body(left - piece);
                let client = upstream.client;
                if let Some(client) = client {
                    self.give(client, bytes);
                }
                Ok(if piece == left { Taken::Whole } else { Taken::More(Step::More) })
            }
        }
    }

    /// The head of an answer, with what came of its body; `bytes` go out as they are when the connection just lives on.
    fn begin_answer(&mut self, key: Key, status: u16, status_line: usize, bytes: &[u8]) {
        let draining = self.draining.is_some();
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Some(job) = client.job.as_mut() else {
            return;
        };
        job.status = status;
        job.answer_begun = true;
        let keep = job.keep_alive && !draining;
        let http10 = job.http10;
        client.closing |= !keep;
        if keep && !http10 {
            return self.give(key, bytes);
        }
        let field: &[u8] = if keep { b"Connection: keep-alive\r\n" } else { b"Connection: close\r\n" };
        let (line, rest) = bytes.split_at(status_line);
        self.give(key, &[line, field, rest].concat());
    }

    /// Bytes of an answer for a client: to its socket, or behind what waits for it.
    fn give(&mut self, key: Key, bytes: &[u8]) {
        let now = self.now;
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        if let Some(job) = client.job.as_mut() {
            job.answer_bytes += bytes.len() as u64;
            job.progress = now;
            if job.spilling {
                if self.spill(key, bytes).is_err() {
                    self.close_client(key);
                }
                return;
            }
        }
        let mut rest = bytes;
        if client.out_is_empty() {
            while client.writable && !rest.is_empty() {
                match send(&client.fd, rest) {
                    Sent::Some(n) => rest = &rest[n..],
                    Sent::Blocked => client.writable = false,
                    Sent::Gone => return self.close_client(key),
                }
            }
        }
        if !rest.is_empty() {
            if client.out.capacity() == 0 {
                let buffer = self.buffer();
                if let Some(client) = self.clients.get_mut(key) {
                    client.out = buffer;
                }
            }
            if let Some(client) = self.clients.get_mut(key) {
                client.out.extend_from_slice(rest);
            }
        }
    }

    fn spill(&mut self, key: Key, bytes: &[u8]) -> Result<(), ()> {
        let more = bytes.len() as u64;
        let (all, answers) = (self.spool_bytes + more, self.spilled_bytes + more);
        let limits = &self.parts.limits;
        if all > limits.spool_bytes_max || answers > limits.spool_answers_max {
            return Err(());
        }
        let Some(client) = self.clients.get_mut(key) else {
            return Ok(());
        };
        if client.spill.is_none() {
            let file = unlinked_file(&self.parts.state_dir).map_err(|_| ())?;
            client.spill = Some(Box::new(Spill::new(file)));
        }
        if let Some(spill) = client.spill.as_mut() {
            spill.append(bytes).map_err(|_| ())?;
            self.spool_bytes += more;
            self.spilled_bytes += more;
        }
        Ok(())
    }

    /// A slow reader's answer goes to a file from now on, so that its worker is free for those who wait.
    pub fn start_spilling(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Phase::Served(upstream) = client.phase else {
            return;
        };
        if let Some(job) = client.job.as_mut() {
            job.spilling = true;
        }
        count(&self.parts.metrics.spilled);
        let reader_time = self.parts.limits.reader_time;
        self.arm(key, self.now + reader_time);
        self.drive_upstream(upstream);
    }

    /// The answer is whole: the upstream is free, the client's answer needs nobody else.
    fn complete(&mut self, key: Key) {
        let Some(upstream) = self.upstreams.get_mut(key) else {
            return;
        };
        if !upstream.is_sent() {
            // Answered before it had the whole request: what is left of that would be read as the next one.
            return self.fail_upstream(key, "answered before the request was whole", false);
        }
        let (client, lane) = (upstream.client.take(), upstream.lane);
        let body = std::mem::take(&mut upstream.body);
        upstream.body_at = 0;
        upstream.out.clear();
        upstream.out_at = 0;
        upstream.state = State::Idle;
        if std::mem::take(&mut upstream.overdue) {
            self.overdue_now -= 1;
        }
        self.forget_body(&body);
        self.in_flight[lane] -= 1;
        self.idle.push(key);
        if let Some(client) = client {
            self.settle(client);
        }
        if self.queued != [0; LANES] {
            self.dispatch();
        }
    }

    /// Nothing more comes for this client's request.
    fn settle(&mut self, key: Key) {
        let reader_time = self.parts.limits.reader_time;
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        client.phase = Phase::Answer;
        if !client.out_is_empty() {
            self.arm(key, self.now + reader_time);
        }
        self.drive_client(key);
    }

    /// An upstream is over; its client gets another (a GET without a byte of answer, once), a 500, or the end.
    pub fn fail_upstream(&mut self, key: Key, why: &'static str, by_itself: bool) {
        let Some(upstream) = self.upstreams.remove(key) else {
            return;
        };
        self.idle.retain(|k| *k != key);
        self.forget_body(&upstream.body);
        if upstream.overdue {
            self.overdue_now -= 1;
        }
        match upstream.state {
            State::Probing => {
                self.opening = false;
                self.open_again_at = Some(self.now + OPEN_AGAIN);
            }
            State::Idle => {}
            State::Head | State::Body(_) => {
                self.in_flight[upstream.lane] -= 1;
                count(&self.parts.metrics.upstream_failures);
                log::warn!("a connection to the pool failed under a request: {why}");
            }
        }
        if let Some(client_key) = upstream.client
            && let Some(client) = self.clients.get_mut(client_key)
            && client.phase == Phase::Served(key)
        {
            match client.job.as_mut() {
                Some(job) if !job.answer_begun && job.repeatable && by_itself => {
                    job.repeatable = false;
                    self.enqueue(client_key, upstream.lane);
                }
                Some(job) if !job.answer_begun => {
                    let class = job.class;
                    client.phase = Phase::Answer;
                    self.refuse(client_key, &Error::new(Code::Internal, "the answer was lost"), class, None, true);
                    self.drive_client(client_key);
                }
                Some(_) | None => self.close_client(client_key),
            }
        }
        self.want_upstreams();
        self.dispatch();
    }

    /// The client's patience with a worker ended.
    pub fn time_out_served(&mut self, key: Key, upstream_key: Key) {
        let (now, reader_time, patience) = (self.now, self.parts.limits.reader_time, self.patience());
        let others_wait = self.queued != [0; LANES];
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Some(job) = client.job.as_ref() else {
            return;
        };
        if job.answer_begun {
            if job.progress + reader_time <= now {
                // Either the reader takes nothing or the worker gives nothing: the answer cannot be saved.
                self.close_client(key);
            } else if others_wait && !job.spilling && job.blocked_since.is_some_and(|since| since + patience <= now) {
                self.start_spilling(key);
            } else {
                let until = job.progress + reader_time;
                let soon = now + LOOK_AGAIN;
                let waits = job.blocked_since.is_some() && !job.spilling;
                self.arm(key, if waits { until.min(soon) } else { until });
            }
            return;
        }
        let (class, took) = (job.class, now - job.started);
        log::warn!("{} took over {} ms: answered 504, its worker is still at it", class.name(), took.as_millis());
        count(&self.parts.metrics.overdue);
        client.phase = Phase::Answer;
        if let Some(upstream) = self.upstreams.get_mut(upstream_key) {
            upstream.client = None;
            upstream.overdue = true;
            self.overdue_now += 1;
        }
        self.refuse(key, &Error::new(Code::Timeout, "no answer in time"), class, None, true);
        self.drive_client(key);
    }

    /// Counts out the memory or disk of a body that is dropped.
    pub fn forget_body(&mut self, body: &Store) {
        match body {
            Store::Memory(bytes) => self.body_bytes -= bytes.len(),
            Store::File(_, len) => self.spool_bytes -= len,
        }
    }

    /// The lane of a client's request.
    pub fn lane_of(client: &Client) -> Option<usize> {
        match client.job.as_ref()?.target {
            Target::Pool(lane) => Some(lane),
            Target::Login => None,
        }
    }
}

enum Taken {
    /// Go on as the step says.
    More(Step),
    /// The probe was answered.
    Probed,
    /// The answer is whole.
    Whole,
}
