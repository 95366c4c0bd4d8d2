//! One connection to the pool: what it carries, and the pure reading of a reply's head. Leaves the moves to `relay`.
//! Rule a change could break: one request at a time, and a reply is exactly as long as its head says.

use std::os::fd::OwnedFd;

use super::body::Store;
use super::slab::Key;

/// What an upstream is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Its first answer is awaited; until then it does not count.
    Probing,
    /// Free.
    Idle,
    /// A request went out, or is going; its answer has not begun.
    Head,
    /// Bytes of the answer that are still to come.
    Body(u64),
}

/// An upstream.
#[derive(Debug)]
pub struct Upstream {
    /// Its socket, non-blocking.
    pub fd: OwnedFd,
    /// What it is at.
    pub state: State,
    /// A read may give something (edge-triggered).
    pub readable: bool,
    /// The pool closed its end.
    pub half_closed: bool,
    /// The kernel tells when a write may take something again.
    pub watches_writable: bool,
    /// Who waits for the answer; none when the client left.
    pub client: Option<Key>,
    /// Lane of the request it carries.
    pub lane: usize,
    /// The answer to HEAD has no body.
    pub head_only: bool,
    /// Its worker passed the deadline.
    pub overdue: bool,
    /// Request head to write, from `out_at` on.
    pub out: Vec<u8>,
    /// See `out`.
    pub out_at: usize,
    /// Request body to write after it, from `body_at` on.
    pub body: Store,
    /// See `body`.
    pub body_at: u64,
    /// A head of an answer that came in parts.
    pub inbuf: Vec<u8>,
}

impl Upstream {
    /// A fresh one that will write `probe`.
    #[must_use]
    pub fn new(fd: OwnedFd, probe: &[u8]) -> Self {
        Self {
            fd,
            state: State::Probing,
            readable: false,
            half_closed: false,
            watches_writable: false,
            client: None,
            lane: 0,
            head_only: false,
            overdue: false,
            out: probe.to_vec(),
            out_at: 0,
            body: Store::default(),
            body_at: 0,
            inbuf: Vec::new(),
        }
    }

    /// True when its request went out whole.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        self.out_at == self.out.len() && self.body_at == self.body.len()
    }
}

/// Head of a pool's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerHead {
    /// Its bytes, with the empty line.
    pub len: usize,
    /// Where its status line ends.
    pub status_line: usize,
    /// Its status.
    pub status: u16,
    /// Bytes of body that follow.
    pub body: u64,
}

/// Largest head of an answer, in bytes; ours have a dozen short fields.
pub const ANSWER_HEAD_BYTES_MAX: usize = 16 * 1024;

/// Reads the head of an answer; none while it is not whole.
///
/// # Errors
/// When it is nothing that our own pool writes.
pub fn answer_head(bytes: &[u8], head_only: bool) -> Result<Option<AnswerHead>, &'static str> {
    let mut slots = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut slots);
    let len = match response.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if bytes.len() > ANSWER_HEAD_BYTES_MAX => {
            return Err("the head is too long");
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err("the head is malformed"),
    };
    let status = response.code.unwrap_or(0);
    if !(200..600).contains(&status) {
        return Err("the status is none of ours");
    }
    let mut length = None;
    for field in response.headers.iter() {
        if field.name.eq_ignore_ascii_case("content-length") {
            let text = std::str::from_utf8(field.value).unwrap_or_default();
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            match text.parse::<u64>() {
                Ok(n) if digits && length.is_none() => length = Some(n),
                Ok(_) | Err(_) => return Err("the length is malformed"),
            }
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") || field.name.eq_ignore_ascii_case("connection")
        {
            return Err("a field that our pool does not write");
        }
    }
    let status_line = memchr::memchr(b'\n', bytes).map_or(len, |at| at + 1);
    let body = match (status, length) {
        (204 | 304, _) => 0,
        (_, Some(_)) if head_only => 0,
        (_, Some(n)) => n,
        (_, None) => return Err("no length"),
    };
    Ok(Some(AnswerHead { len, status_line, status, body }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_as_long_as_its_head_says() {
        let head = |text: &str| answer_head(text.as_bytes(), false).map(|h| h.map(|h| (h.status, h.body)));
        assert_eq!(head("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), Ok(Some((200, 5))));
        assert_eq!(head("HTTP/1.1 304 Not Modified\r\n\r\n"), Ok(Some((304, 0))));
        assert_eq!(head("HTTP/1.1 200 OK\r\nContent-Le"), Ok(None));
        for broken in [
            "HTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 100 Continue\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            "nonsense\r\n\r\n",
        ] {
            assert!(head(broken).is_err(), "{broken:?}");
        }
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        let expected = AnswerHead { len: text.len(), status_line: 17, status: 200, body: 0 };
        assert_eq!(answer_head(text, true), Ok(Some(expected)));
    }
}
