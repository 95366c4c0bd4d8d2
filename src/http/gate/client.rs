//! One client connection: its socket, what it is at, and the request it is at. Leaves the moves to `core`.
//! Rule a change could break: an idle client owns no buffer, so that thousands of them cost a few hundred bytes each.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::body::{Chunks, Store};
use super::slab::Key;
use crate::http::route::Class;

/// What a client is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Between requests, or in the middle of a head.
    Head,
    /// A body is on its way in.
    Body,
    /// Its whole request waits for a worker.
    Queued,
    /// Its request is in flight under this key.
    Served(Key),
    /// Its answer is on its way out and needs nobody else.
    Answer,
    /// Refused with bytes unread: what still comes is dropped, so that the answer is not lost to a reset.
    Linger,
}

/// The lanes of requests for the pool, as indexes: short work.
pub const WORK: usize = 0;
/// Requests that wait for a turn, on workers of their own.
pub const WAIT: usize = 1;
/// Answers that may be long or slow to read, on the workers of [`WORK`] but for some that are kept for short work.
pub const BULK: usize = 2;
/// Their number.
pub const LANES: usize = 3;

/// What is left of a body on its way in.
#[derive(Debug)]
pub enum BodyIn {
    /// So many bytes.
    Left(u64),
    /// Chunks.
    Chunked(Chunks),
}

/// Where a request goes once it is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// To the pool, in this lane.
    Pool(usize),
    /// To the gate's own login.
    Login,
}

/// One request, from its whole head to its last answer byte.
#[derive(Debug)]
pub struct Job {
    /// The route's label.
    pub class: Class,
    /// Where it goes.
    pub target: Target,
    /// Only the head of the answer is wanted.
    pub head_only: bool,
    /// The client speaks HTTP/1.0.
    pub http10: bool,
    /// The connection may live on afterwards.
    pub keep_alive: bool,
    /// When its head was whole.
    pub started: Instant,
    /// Since when its body is on its way.
    pub body_started: Instant,
    /// Body bytes so far.
    pub body_received: u64,
    /// What is left of the body.
    pub body_in: BodyIn,
    /// The body.
    pub body: Store,
    /// Request line and fields for the pool, without the last one.
    pub upstream_head: Vec<u8>,
    /// How long the worker may take to begin.
    pub answer_time: Duration,
    /// Status of the answer, once known.
    pub status: u16,
    /// Bytes of the answer.
    pub answer_bytes: u64,
    /// Bytes that it will have in all.
    pub answer_total: u64,
    /// A byte of the answer went to the client.
    pub answer_begun: bool,
    /// Last time that a byte moved from the worker or to the client.
    pub progress: Instant,
    /// Since when the worker waits for this client.
    pub blocked_since: Option<Instant>,
    /// Answer bytes go to a file from here on.
    pub spilling: bool,
    /// Method and path, when the access log is on.
    pub line: Option<String>,
}

/// Answer bytes in an unlinked file.
#[derive(Debug)]
pub struct Spill {
    file: File,
    written: u64,
    read: u64,
}

impl Spill {
    /// An empty one.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self { file, written: 0, read: 0 }
    }

    /// Bytes in the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.written
    }

    /// Appends.
    ///
    /// # Errors
    /// When the disk has no room.
    pub fn append(&mut self, piece: &[u8]) -> std::io::Result<()> {
        self.file.write_all_at(piece, self.written)?;
        self.written += piece.len() as u64;
        Ok(())
    }

    fn take(&mut self, buffer: &mut Vec<u8>, most: usize) -> std::io::Result<usize> {
        let most = most.min(usize::try_from(self.written - self.read).unwrap_or(usize::MAX));
        let from = buffer.len();
        buffer.resize(from + most, 0);
        let got = self.file.read_at(&mut buffer[from..], self.read)?;
        buffer.truncate(from + got);
        self.read += got as u64;
        Ok(got)
    }

    fn is_empty(&self) -> bool {
        self.read == self.written
    }
}

/// Over which listener a client came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// The port.
    Tcp(IpAddr),
    /// `chat.sock`.
    Unix,
}

/// A client.
#[derive(Debug)]
pub struct Client {
    /// Its socket, non-blocking.
    pub fd: OwnedFd,
    /// Who.
    pub peer: Peer,
    /// What it is at.
    pub phase: Phase,
    /// A read may give something (edge-triggered).
    pub readable: bool,
    /// A write may take something (edge-triggered).
    pub writable: bool,
    /// The peer said it sends no more, or is gone.
    pub half_closed: bool,
    /// No request after this one.
    pub closing: bool,
    /// Bytes read and not used yet, from `inbuf_at` on.
    pub inbuf: Vec<u8>,
    /// See `inbuf`.
    pub inbuf_at: usize,
    /// How far behind `inbuf_at` the end of a head was looked for.
    pub scanned: usize,
    /// Bytes to write, from `out_at` on.
    pub out: Vec<u8>,
    /// See `out`.
    pub out_at: usize,
    /// What is to be written after `out`.
    pub spill: Option<Box<Spill>>,
    /// The request.
    pub job: Option<Box<Job>>,
    /// When its patience ends.
    pub deadline: Instant,
    /// The earliest timer that is set for it.
    pub timer_at: Option<Instant>,
    /// Bytes dropped while lingering.
    pub dropped: usize,
}

/// How writing went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// Nothing is left.
    Done,
    /// The client takes no more now; true if it took something.
    Blocked(bool),
    /// The client is gone.
    Gone,
}

impl Client {
    /// A fresh one.
    #[must_use]
    pub fn new(fd: OwnedFd, peer: Peer, deadline: Instant) -> Self {
        Self {
            fd,
            peer,
            phase: Phase::Head,
            readable: true,
            writable: true,
            half_closed: false,
            closing: false,
            inbuf: Vec::new(),
            inbuf_at: 0,
            scanned: 0,
            out: Vec::new(),
            out_at: 0,
            spill: None,
            job: None,
            deadline,
            timer_at: None,
            dropped: 0,
        }
    }

    /// Bytes read and not used.
    #[must_use]
    pub fn unread(&self) -> &[u8] {
        &self.inbuf[self.inbuf_at..]
    }

    /// Bytes in memory that wait for the client.
    #[must_use]
    pub fn out_waiting(&self) -> usize {
        self.out.len() - self.out_at
    }

    /// True when nothing waits for the client, in memory or file.
    #[must_use]
    pub fn out_is_empty(&self) -> bool {
        self.out_waiting() == 0 && self.spill.as_ref().is_none_or(|s| s.is_empty())
    }

    /// Writes what waits, as far as the client takes it.
    pub fn flush(&mut self, piece_bytes: usize) -> Flush {
        let mut moved = false;
        loop {
            if self.out_at == self.out.len() {
                self.out.clear();
                self.out_at = 0;
                match self.spill.as_mut().filter(|s| !s.is_empty()) {
                    None => return Flush::Done,
                    Some(spill) => match spill.take(&mut self.out, piece_bytes) {
                        Ok(0) | Err(_) => return Flush::Gone,
                        Ok(_) => {}
                    },
                }
            }
            if !self.writable {
                return Flush::Blocked(moved);
            }
            match send(&self.fd, &self.out[self.out_at..]) {
                Sent::Some(n) => {
                    self.out_at += n;
                    moved = true;
                }
                Sent::Blocked => self.writable = false,
                Sent::Gone => return Flush::Gone,
            }
        }
    }
}

/// How a write went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// So many bytes.
    Some(usize),
    /// None now.
    Blocked,
    /// None ever.
    Gone,
}

/// Writes once, without a signal when the peer is gone.
pub fn send(fd: &OwnedFd, bytes: &[u8]) -> Sent {
    loop {
        return match rustix::net::send(fd, bytes, rustix::net::SendFlags::NOSIGNAL) {
            Ok(n) => Sent::Some(n),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => Sent::Blocked,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => Sent::Gone,
        };
    }
}

/// How a read went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Got {
    /// So many bytes.
    Some(usize),
    /// None now.
    Blocked,
    /// The peer sends no more.
    End,
    /// The peer is gone.
    Gone,
}

/// Reads once.
pub fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> Got {
    loop {
        return match rustix::net::recv(fd, &mut *buffer, rustix::net::RecvFlags::empty()) {
            Ok((0, _)) => Got::End,
            Ok((n, _)) => Got::Some(n),
            Err(rustix::io::Errno::AGAIN) => Got::Blocked,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => Got::Gone,
        };
    }
}
