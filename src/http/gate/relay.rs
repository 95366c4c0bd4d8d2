//! Answers on their way from a worker to a client.
//!
//! Leaves which request goes where to `pool`. Rules a change could break: an answer is exactly as long as its head says,
//! or its client is closed; a worker whose client left is told at once, and its place counts as taken until it has ended.

use std::time::Duration;

use super::body::unlinked_file;
use super::client::{BULK, Phase, Sent, Spill, send};
use super::core::Core;
use super::exchange::{End, Taken};
use super::metrics::count;
use super::slab::Key;
use crate::error::{Code, Error};

/// How often to look whether others wait for a worker that waits for a reader.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl Core {
    /// Takes what a worker has given, if its client can: at once, but for long answers, which go one piece per round.
    pub fn drive_flight(&mut self, key: Key) {
        match self.flights.get_mut(key) {
            Some(flight) if flight.lane == BULK => self.bulk.push_back(key),
            Some(_) => self.advance_flight(key),
            None => {}
        }
    }

    /// The next piece of a long answer: one per round, because it costs as much as a dozen short requests.
    pub fn advance_bulk(&mut self) {
        if let Some(key) = self.bulk.pop_front() {
            self.advance_flight(key);
        }
    }

    fn advance_flight(&mut self, key: Key) {
        let Some(flight) = self.flights.get_mut(key) else {
            return;
        };
        let client = flight.client;
        if client.is_some_and(|client| self.is_full(client)) {
            return;
        }
        let Some(flight) = self.flights.get_mut(key) else {
            return;
        };
        let taken = flight.exchange.take();
        let end = taken.end;
        if let Some(client) = client
            && !taken.bytes.is_empty()
        {
            self.give(client, taken);
        }
        let torn = match end {
            End::Open => return,
            End::Whole => false,
            End::Torn => true,
        };
        if let Some(client) = self.land(key) {
            if torn { self.tear(client) } else { self.settle(client) }
        }
        if self.is_crowded() {
            self.dispatch();
        }
    }

    /// True when the client has enough to take first; notes since when its worker waits.
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

    /// Bytes of an answer for a client: to its socket, or behind what waits for it.
    fn give(&mut self, key: Key, taken: Taken) {
        let Taken { status, total, mut bytes, .. } = taken;
        let (now, draining) = (self.now, self.draining.is_some());
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        if let Some(job) = client.job.as_mut() {
            if !job.answer_begun {
                job.answer_begun = true;
                job.status = status;
                job.answer_total = total;
                let keep = job.keep_alive && !draining;
                client.closing |= !keep;
                if !keep || job.http10 {
                    let field: &[u8] = if keep { b"Connection: keep-alive\r\n" } else { b"Connection: close\r\n" };
                    let line = memchr::memchr(b'\n', &bytes).map_or(bytes.len(), |at| at + 1);
                    bytes.splice(line..line, field.iter().copied());
                }
            }
            job.answer_bytes += bytes.len() as u64;
            job.progress = now;
            if job.spilling {
                if self.spill(key, &bytes).is_err() {
                    self.close_client(key);
                }
                return;
            }
        }
        let mut sent = 0;
        if client.out_is_empty() {
            while client.writable && sent < bytes.len() {
                match send(&client.fd, &bytes[sent..]) {
                    Sent::Some(n) => sent += n,
                    Sent::Blocked => client.writable = false,
                    Sent::Gone => return self.close_client(key),
                }
            }
            if sent == bytes.len() {
                return self.keep_buffer(bytes);
            }
            client.out = bytes;
            client.out_at = sent;
        } else {
            client.out.extend_from_slice(&bytes);
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

    /// A slow reader's answer goes to a file from now on, so that its worker is free for those who wait. A reader whose
    /// answer has no room there is sent away: nothing is written that would be thrown away.
    fn start_spilling(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Phase::Served(flight) = client.phase else {
            return;
        };
        if let Some(job) = client.job.as_mut() {
            job.spilling = true;
            let rest = job.answer_total.saturating_sub(job.answer_bytes);
            if self.spilled_bytes + rest > self.parts.limits.spool_answers_max {
                return self.close_client(key);
            }
        }
        count(&self.parts.metrics.spilled);
        let reader_time = self.parts.limits.reader_time;
        self.arm(key, self.now + reader_time);
        self.drive_flight(flight);
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

    /// The worker could not give what it promised: an answer that has begun ends with its connection.
    fn tear(&mut self, key: Key) {
        count(&self.parts.metrics.answers_torn);
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        match client.job.as_ref() {
            Some(job) if !job.answer_begun => {
                let class = job.class;
                client.phase = Phase::Answer;
                self.refuse(key, &Error::new(Code::Internal, "the answer was lost"), class, None, true);
                self.drive_client(key);
            }
            Some(_) | None => self.close_client(key),
        }
    }

    /// The client's patience with a worker ended.
    pub fn time_out_served(&mut self, key: Key, flight: Key) {
        let (now, reader_time, patience) = (self.now, self.parts.limits.reader_time, self.patience());
        let others_wait = self.is_crowded();
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
        if let Some(flight) = self.flights.get_mut(flight) {
            flight.client = None;
            flight.overdue = true;
            flight.exchange.abandon();
            self.overdue_now += 1;
        }
        self.refuse(key, &Error::new(Code::Timeout, "no answer in time"), class, None, true);
        self.drive_client(key);
    }
}
