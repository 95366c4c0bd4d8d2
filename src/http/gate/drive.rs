//! What a client does next: its bytes in and out, step by step, and its end.
//!
//! Leaves what its bytes mean to `request`. Rule a change could break: a step never blocks, and a client that gives a lot
//! of work gets its share of steps, then the others theirs.

use super::client::{Client, Flush, Got, Phase, Target, receive};
use super::core::{Core, SCRATCH_BYTES, Step};
use super::metrics::count;
use super::slab::Key;
use rustix::event::epoll;

/// Steps that one connection makes before the others get their turn.
const STEPS_MAX: usize = 16;
/// Buffers kept for reuse.
const BUFFERS_MAX: usize = 64;
/// A buffer that grew beyond this is not kept.
const BUFFER_BYTES_MAX: usize = 64 * 1024;

impl Core {
    /// Lets a client do what it can.
    pub fn drive_client(&mut self, key: Key) {
        for _ in 0..STEPS_MAX {
            match self.step_client(key) {
                Step::More => {}
                Step::Wait => return,
                Step::Close => return self.close_client(key),
            }
        }
        self.again.push(key);
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
                    if let Phase::Served(flight) = phase {
                        self.drive_flight(flight);
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
            Phase::Served(flight) => {
                if client.job.as_ref().is_some_and(|j| j.blocked_since.is_some()) {
                    self.drive_flight(flight);
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
                if client.dropped > limit { Step::Close } else { Step::More }
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
        let fresh = if self.clients.get_mut(key)?.inbuf.capacity() == 0 { self.buffers.pop() } else { None };
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
                // What was used goes first, or a pipeline that never ends would never be let go of.
                client.inbuf.drain(..client.inbuf_at);
                client.inbuf_at = 0;
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

    pub fn keep_buffer(&mut self, mut buffer: Vec<u8>) {
        if self.buffers.len() < BUFFERS_MAX && (1..=BUFFER_BYTES_MAX).contains(&buffer.capacity()) {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }

    /// A buffer, used before or fresh.
    pub fn buffer(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_default()
    }

    /// Removes a client; a worker that is at its request is told that nobody wants the answer.
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
                && let Target::Pool(lane) = job.target
            {
                self.queued[lane] -= 1;
            }
        }
        if let Some(spill) = client.spill.take() {
            self.spool_bytes -= spill.bytes();
            self.spilled_bytes -= spill.bytes();
        }
        if let Phase::Served(key) = client.phase
            && let Some(flight) = self.flights.get_mut(key)
        {
            flight.client = None;
            flight.exchange.abandon();
            // What was told already is looked at again: its end may be among it.
            self.bulk.push_back(key);
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
}
