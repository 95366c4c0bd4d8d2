//! Every limit of the gate, each with the reason of its number. Rule a change could break: nothing that a client does
//! costs the gate more than what is written here.

use std::time::Duration;

use crate::config::{IMAGES_BASE64_BYTES_MAX, TEXT_BYTES_MAX};
use crate::http::route::Class;

/// The limits; tests shorten the times.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request head: what browsers with many cookies send at most, with room.
    pub head_bytes_max: usize,
    /// From the first byte of a head to its last: a phone on a bad line needs two, a slowloris all it can get.
    pub head_time: Duration,
    /// A body's time before the least rate counts: one stall of a mobile line.
    pub body_grace: Duration,
    /// Bytes per second that a body must make on the whole, beyond the grace.
    pub body_rate_min: u64,
    /// Keep-alive without a request: longer than browsers' own 60 s, so that they close first.
    pub idle_time: Duration,
    /// A reader that takes nothing: a tunnel on a train line.
    pub reader_time: Duration,
    /// A reader that is slower than its worker gives the worker back after this when one other waits (the promise is
    /// 2 s), sooner when more do.
    pub reader_stall: Duration,
    /// A request that waits for a worker: longer than a burst, shorter than the client's own patience.
    pub queue_time: Duration,
    /// Requests that wait for a worker, per lane: a second of work at full speed is no more than that.
    pub queue_requests_max: usize,
    /// Connections in all; lowered at start so that descriptors are left for files, agents and the pool.
    pub connections_max: usize,
    /// Connections of one address (an IPv6 /64 counts as one); loopback is exempt, a proxy in front is one address.
    pub connections_per_address_max: usize,
    /// True only in tests: loopback counts like any address.
    pub count_loopback: bool,
    /// Body bytes kept in memory before the rest goes to a file: most sends without a photo.
    pub body_memory_max: usize,
    /// Body bytes in memory over all connections; beyond it bodies go to files from their first byte.
    pub bodies_memory_max: usize,
    /// Bytes of large bodies (those in files) at workers at one time: a worker reads its body whole and needs up to three
    /// times its size for what it makes of it. Room for the largest that may be sent, and a little beside it.
    pub bodies_at_work_max: u64,
    /// Bytes of bodies and answers in unlinked files over all connections: forty sends with all the photos they may
    /// have, and little enough that the kernel takes it in without making us wait for the disk.
    pub spool_bytes_max: u64,
    /// Of these, bytes of answers: a hundred photos; the reader that would need more is sent away.
    pub spool_answers_max: u64,
    /// Answer bytes kept for a client that reads slower than a worker writes, before the worker has to wait.
    pub answer_memory_max: usize,
    /// Bytes of an answer in the kernel for one connection, sent and not acknowledged or not sent: 5 MB/s over a line of
    /// 50 ms. Left to itself the kernel takes 4 MiB for each reader that takes nothing.
    pub send_buffer_bytes: usize,
    /// Waiting-lane requests in flight: each holds a worker of its own.
    pub waiting_max: usize,
    /// After refusing a request with its body unread: how long to take in and drop bytes, so that the answer is not lost
    /// to a reset.
    pub linger_time: Duration,
    /// Bytes dropped while lingering.
    pub linger_bytes_max: usize,
    /// How long accepting rests after the kernel had no descriptor to give.
    pub accept_pause: Duration,
    /// Deadline of a worker's answer on ordinary routes: the journal gives up at 2 s, a cold scan of a large transcript
    /// takes some seconds.
    pub answer_time: Duration,
    /// Deadline of `threads/send`: a turn may run for long.
    pub thread_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head_bytes_max: 16 * 1024,
            head_time: Duration::from_secs(10),
            body_grace: Duration::from_secs(30),
            body_rate_min: 1000,
            idle_time: Duration::from_secs(75),
            reader_time: Duration::from_secs(30),
            reader_stall: Duration::from_secs(1),
            queue_time: Duration::from_secs(10),
            queue_requests_max: 1024,
            connections_max: 8192,
            connections_per_address_max: 256,
            count_loopback: false,
            body_memory_max: 64 * 1024,
            bodies_memory_max: 64 * 1024 * 1024,
            bodies_at_work_max: 40 * 1024 * 1024,
            spool_bytes_max: 1024 * 1024 * 1024,
            spool_answers_max: 128 * 1024 * 1024,
            answer_memory_max: 64 * 1024,
            send_buffer_bytes: 256 * 1024,
            waiting_max: 16,
            linger_time: Duration::from_secs(2),
            linger_bytes_max: 1024 * 1024,
            accept_pause: Duration::from_millis(100),
            answer_time: Duration::from_secs(30),
            thread_time: Duration::from_secs(60 * 60),
        }
    }
}

/// Header fields of one request, at most; a browser sends about twenty.
pub const FIELDS_MAX: usize = 100;
/// Bytes of one chunk-size line: sixteen digits, and extensions nobody sends.
pub const CHUNK_LINE_BYTES_MAX: usize = 256;
/// Bytes of the trailer of a chunked body; its fields are dropped.
pub const TRAILER_BYTES_MAX: usize = 4096;
/// Bytes of a login code's body.
pub const LOGIN_BYTES_MAX: u64 = 4096;

impl Limits {
    /// Largest body of a route, in bytes; 0 for routes that take none.
    #[must_use]
    pub fn body_bytes_max(&self, class: Class) -> u64 {
        match class {
            // JSON may write a character of the text as six bytes; photos are base64, which needs no escape.
            Class::Send => (IMAGES_BASE64_BYTES_MAX + 6 * TEXT_BYTES_MAX + 64 * 1024) as u64,
            Class::ThreadsSend => (6 * TEXT_BYTES_MAX + 64 * 1024) as u64,
            Class::Interrupt
            | Class::Stop
            | Class::Restart
            | Class::Reset
            | Class::Retry
            | Class::Discard
            | Class::SetFeature => 64 * 1024,
            Class::Login => LOGIN_BYTES_MAX,
            Class::History
            | Class::Bootstrap
            | Class::Sessions
            | Class::Status
            | Class::PendingImage
            | Class::GetFeatures
            | Class::Turns
            | Class::Media
            | Class::Threads
            | Class::Events
            | Class::DebugThreads
            | Class::Healthz
            | Class::Readyz
            | Class::Metrics
            | Class::Asset
            | Class::Unknown => 0,
        }
    }

    /// How long a worker may take until its answer begins; `wait_ms` is what the client asked to wait.
    #[must_use]
    pub fn answer_time(&self, class: Class, wait_ms: u64) -> Duration {
        if class == Class::ThreadsSend { self.thread_time } else { self.answer_time + Duration::from_millis(wait_ms) }
    }
}
