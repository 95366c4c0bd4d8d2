//! The one connection to the pool, over which the heads of requests go to tiny_http, many at a time.
//!
//! Leaves which request goes when to `pool`, bodies and answers to `exchange`. Rules a change could break: it counts only
//! after its probe was answered; a head is written whole or its request is taken back; nothing but the probe's answer ever
//! comes back over it.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::client::{Got, Sent, receive, send};
use super::core::{Core, KIND_LINE};
use super::metrics::count;
use super::slab::Key;
use crate::http::server::PROBE_PATH;

/// How long to wait after the pool could not be reached.
const OPEN_AGAIN: Duration = Duration::from_millis(50);
/// What the pool answers to the probe; fields may follow.
const PROBE_ANSWER: &[u8] = b"HTTP/1.1 204 ";

/// The connection.
#[derive(Debug, Default)]
pub(super) struct Line {
    socket: Option<OwnedFd>,
    /// The probe was answered.
    is_up: bool,
    /// Heads to write, from `out_at` on.
    out: Vec<u8>,
    out_at: usize,
    /// The kernel tells when a write may take something again.
    watches_writable: bool,
    /// Answer to the probe, so far.
    inbuf: Vec<u8>,
    /// Counts connections, so that an old one's event is not taken for this one's.
    number: u32,
}

impl Line {
    /// True when requests may be put on it.
    pub fn is_up(&self) -> bool {
        self.is_up
    }

    /// Puts the head of a request on it; `head` lacks the number and the empty line.
    pub fn put(&mut self, head: &[u8], field: &str, number: u64) {
        self.out.extend_from_slice(head);
        self.out.extend_from_slice(field.as_bytes());
        self.out.extend_from_slice(b": ");
        self.out.extend_from_slice(number.to_string().as_bytes());
        self.out.extend_from_slice(b"\r\n\r\n");
    }
}

impl Core {
    /// Opens it if it is down and not to rest.
    pub(super) fn want_line(&mut self) {
        if self.line.socket.is_some() || self.open_again_at.is_some() {
            return;
        }
        if let Err(e) = self.open_line() {
            log::warn!("the pool cannot be reached: {e}");
            self.open_again_at = Some(self.now + OPEN_AGAIN);
        }
    }

    fn open_line(&mut self) -> rustix::io::Result<()> {
        // The pool needs two descriptors for its end, and ends accepting for good when it has none: never open with the
        // last ones.
        let event = self.parts.exchanges.notes().event();
        let spare: rustix::io::Result<Vec<OwnedFd>> =
            (0..8).map(|_| rustix::io::fcntl_dupfd_cloexec(event, 0)).collect();
        drop(spare?);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(self.parts.pool.path())?)?;
        let number = self.line.number.wrapping_add(1);
        epoll::add(&self.epoll, &socket, line_data(number), EventFlags::IN | EventFlags::RDHUP)?;
        let out = format!("GET {PROBE_PATH} HTTP/1.1\r\n\r\n").into_bytes();
        self.line = Line { socket: Some(socket), out, number, ..Line::default() };
        Ok(())
    }

    /// Writes what it takes.
    pub(super) fn flush_line(&mut self) {
        let line = &mut self.line;
        let Some(socket) = &line.socket else {
            return;
        };
        while line.out_at < line.out.len() {
            match send(socket, &line.out[line.out_at..]) {
                Sent::Some(n) => line.out_at += n,
                Sent::Blocked => return self.watch_line(true),
                Sent::Gone => return self.fail_line("it is closed"),
            }
        }
        line.out.clear();
        line.out_at = 0;
        if line.watches_writable {
            self.watch_line(false);
        }
    }

    fn watch_line(&mut self, writable: bool) {
        let line = &mut self.line;
        let Some(socket) = &line.socket else {
            return;
        };
        if line.watches_writable == writable {
            return;
        }
        line.watches_writable = writable;
        let mut watch = EventFlags::IN | EventFlags::RDHUP;
        if writable {
            watch |= EventFlags::OUT;
        }
        if let Err(e) = epoll::modify(&self.epoll, socket, line_data(line.number), watch) {
            log::error!("the connection to the pool cannot be watched: {e}");
            self.fail_line("it cannot be watched");
        }
    }

    /// An event of it.
    pub(super) fn drive_line(&mut self, data: u64, flags: EventFlags) {
        if data as u32 != self.line.number {
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.flush_line();
        }
        if !flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            return;
        }
        let line = &mut self.line;
        let Some(socket) = &line.socket else {
            return;
        };
        let n = match receive(socket, &mut self.scratch) {
            Got::Some(n) => n,
            Got::Blocked => return,
            Got::End | Got::Gone => return self.fail_line("it was closed"),
        };
        if line.is_up {
            return self.fail_line("bytes came that answer nothing");
        }
        line.inbuf.extend_from_slice(&self.scratch[..n]);
        let known = line.inbuf.len().min(PROBE_ANSWER.len());
        if line.inbuf[..known] != PROBE_ANSWER[..known] || line.inbuf.len() > self.parts.limits.head_bytes_max {
            return self.fail_line("a strange answer to the probe");
        }
        if line.inbuf.ends_with(b"\r\n\r\n") {
            line.inbuf = Vec::new();
            line.is_up = true;
            self.dispatch();
        }
    }

    /// It is over. Requests that no worker has taken up are taken back and wait for the next one: they were not executed
    /// and now cannot be.
    pub(super) fn fail_line(&mut self, why: &'static str) {
        if self.line.is_up {
            log::warn!("the connection to the pool failed: {why}");
            count(&self.parts.metrics.line_failures);
        }
        self.line = Line { number: self.line.number, ..Line::default() };
        self.open_again_at = Some(self.now + OPEN_AGAIN);
        let flights: Vec<Key> = self.flights.iter().map(|(key, _)| key).collect();
        for key in flights {
            if let Some(body) = self.parts.exchanges.take_back(key.pack()) {
                self.call_back(key, body);
            }
        }
    }
}

fn line_data(number: u32) -> EventData {
    EventData::new_u64(KIND_LINE | u64::from(number))
}
