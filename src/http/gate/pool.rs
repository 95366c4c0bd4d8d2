//! Requests on their way to workers: the lanes, who goes next, and what is in flight.
//!
//! Leaves the connection to `line`, bodies and answers to `exchange`, what becomes of answers to `relay`. Rule a change
//! could break: a lane never has more in flight than it has workers, so that a request never waits behind another one
//! inside the pool; and large bodies at workers stay below a bound, while small requests pass those that wait for it.

use std::sync::Arc;

use super::body::Store;
use super::client::{BULK, Client, LANES, Phase, Target, WAIT, WORK};
use super::core::Core;
use super::exchange::Exchange;
use super::request::sizes;
use super::slab::Key;
use crate::http::server::EXCHANGE_FIELD;

/// Requests that are looked at behind one whose body is too large for now.
const LOOK_BEHIND_MAX: usize = 256;

/// A request at a worker, or on the line to one.
#[derive(Debug)]
pub(super) struct Flight {
    /// Who waits for the answer; none when the client left.
    pub client: Option<Key>,
    /// Its lane.
    pub lane: usize,
    /// Its answer.
    pub exchange: Arc<Exchange>,
    /// Its worker passed the deadline.
    pub overdue: bool,
    /// Body bytes that went along, in memory.
    memory_bytes: usize,
    /// The same, in a file.
    file_bytes: u64,
}

impl Core {
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

    /// Hands waiting requests to free workers.
    pub fn dispatch(&mut self) {
        if !self.line.is_up() {
            return self.want_line();
        }
        // A lane whose waiting requests are all too large for now is passed over.
        let mut passed = [false; LANES];
        while let Some(lane) = self.next_lane(passed) {
            if self.hand_next(lane) {
                self.bulk_first = lane == WORK;
            } else {
                passed[lane] = true;
            }
        }
    }

    /// The lane whose oldest request goes next: the two that share workers take turns, so that neither starves.
    fn next_lane(&self, passed: [bool; LANES]) -> Option<usize> {
        let order = if self.bulk_first { [BULK, WORK, WAIT] } else { [WORK, BULK, WAIT] };
        order.into_iter().find(|lane| self.queued[*lane] > 0 && self.has_room(*lane) && !passed[*lane])
    }

    /// True when one more request of the lane may be in flight.
    pub fn has_room(&self, lane: usize) -> bool {
        let ordinary = self.in_flight[WORK] + self.in_flight[BULK];
        self.in_flight[lane] < self.parts.lane_max[lane] && (lane == WAIT || ordinary < self.parts.lane_max[WORK])
    }

    /// True if the body of this client's request may go to a worker beside those that are there.
    pub fn has_room_for_body(&mut self, key: Key) -> bool {
        let Some(job) = self.clients.get_mut(key).and_then(|client| client.job.as_ref()) else { return true };
        let (_, file_bytes) = sizes(&job.body);
        file_bytes == 0
            || self.at_work_bytes == 0
            || self.at_work_bytes + file_bytes <= self.parts.limits.bodies_at_work_max
    }

    fn hand_next(&mut self, lane: usize) -> bool {
        let mut at = 0;
        while let Some(key) = self.queues[lane].get(at).copied() {
            if !self.clients.get_mut(key).is_some_and(|c| c.phase == Phase::Queued) {
                self.queues[lane].remove(at);
            } else if self.has_room_for_body(key) {
                self.queues[lane].remove(at);
                self.queued[lane] -= 1;
                self.hand(key, lane);
                return true;
            } else if at == LOOK_BEHIND_MAX {
                return false;
            } else {
                at += 1;
            }
        }
        if at == 0 {
            self.queued[lane] = 0;
        }
        false
    }

    /// Gives a whole request to the pool.
    pub fn hand(&mut self, key: Key, lane: usize) {
        let now = self.now;
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Some(job) = client.job.as_mut() else {
            return;
        };
        let body = std::mem::take(&mut job.body);
        let (memory_bytes, file_bytes) = sizes(&body);
        let flight = self.flights.insert_with(|flight| Flight {
            client: Some(key),
            lane,
            exchange: self.parts.exchanges.lay_out(flight.pack(), body),
            overdue: false,
            memory_bytes,
            file_bytes,
        });
        self.line.put(&job.upstream_head, EXCHANGE_FIELD, flight.pack());
        client.phase = Phase::Served(flight);
        job.progress = now;
        let deadline = now + job.answer_time;
        self.in_flight[lane] += 1;
        self.at_work_bytes += file_bytes;
        self.arm(key, deadline);
    }

    /// A request that was in flight was taken back: its client waits again.
    pub(super) fn call_back(&mut self, key: Key, body: Store) {
        let Some(flight) = self.flights.remove(key) else {
            return;
        };
        self.in_flight[flight.lane] -= 1;
        self.at_work_bytes -= flight.file_bytes;
        self.overdue_now -= usize::from(flight.overdue);
        let client = flight.client.and_then(|key| self.clients.get_mut(key));
        match client.and_then(|c| c.job.as_mut()) {
            // The bytes of the body stay counted.
            Some(job) => {
                job.body = body;
                if let Some(client) = flight.client {
                    self.enqueue(client, flight.lane);
                }
            }
            None => self.forget_body(&body),
        }
    }

    /// A flight is over: its worker is free. Says who waits for it.
    pub(super) fn land(&mut self, key: Key) -> Option<Key> {
        let flight = self.flights.remove(key)?;
        self.in_flight[flight.lane] -= 1;
        self.at_work_bytes -= flight.file_bytes;
        self.overdue_now -= usize::from(flight.overdue);
        self.body_bytes -= flight.memory_bytes;
        self.spool_bytes -= flight.file_bytes;
        flight.client
    }

    /// Counts out the memory or disk of a body that is dropped.
    pub fn forget_body(&mut self, body: &Store) {
        let (memory, file) = sizes(body);
        self.body_bytes -= memory;
        self.spool_bytes -= file;
    }

    /// The lane of a client's request.
    pub fn lane_of(client: &Client) -> Option<usize> {
        match client.job.as_ref()?.target {
            Target::Pool(lane) => Some(lane),
            Target::Login => None,
        }
    }

    /// True when a request waits for a worker.
    pub(super) fn is_crowded(&self) -> bool {
        self.queued != [0; LANES]
    }
}
