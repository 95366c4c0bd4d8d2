//! A plain HTTP/1.1 client over one TCP connection: keep-alive, raw bytes, JSON, both ways to frame an answer.
//!
//! Leaves events to `events`. Rule a change could break: every call ends within its limit, and nothing is sent twice by
//! itself, so that what the checker counts is what the caller sent.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

/// Largest answer read, in bytes: above any answer the server may give, photos included.
const ANSWER_BYTES_MAX: usize = 256 * 1024 * 1024;
/// Largest answer head read, in bytes.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// Header fields in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body, its framing taken off.
    pub body: Vec<u8>,
}

impl Answer {
    /// The first value of a header field.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    /// The body as JSON; `null` when it is none.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The body as text, for messages to a person.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The word `code` of an error answer; empty when there is none.
    #[must_use]
    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// One TCP connection whose bytes the caller chooses.
#[derive(Debug)]
pub struct Conn {
    stream: TcpStream,
    buf: Vec<u8>,
}

impl Conn {
    /// Opens a connection.
    ///
    /// # Errors
    /// What the kernel says, or `TimedOut`.
    pub fn open(addr: SocketAddr, limit: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, limit)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buf: Vec::new() })
    }

    /// The socket itself, for shutdown, peeking, or handing it on.
    #[must_use]
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The socket, and what was read of it but not used.
    #[must_use]
    pub fn into_parts(self) -> (TcpStream, Vec<u8>) {
        (self.stream, self.buf)
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// What the kernel says, or `TimedOut`.
    pub fn write(&mut self, bytes: &[u8], limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        let mut left = bytes;
        while !left.is_empty() {
            self.stream.set_write_timeout(Some(time_left(deadline)?))?;
            match self.stream.write(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => left = &left[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(as_timeout(e)),
            }
        }
        Ok(())
    }

    /// Reads more into the buffer; how many bytes, 0 at the end.
    fn fill(&mut self, deadline: Instant) -> io::Result<usize> {
        let mut chunk = [0; 64 * 1024];
        loop {
            self.stream.set_read_timeout(Some(time_left(deadline)?))?;
            match self.stream.read(&mut chunk) {
                Ok(n) => {
                    self.buf.extend_from_slice(&chunk[..n]);
                    return Ok(n);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(as_timeout(e)),
            }
        }
    }

    /// Reads until `n` bytes are in the buffer.
    fn fill_to(&mut self, n: usize, deadline: Instant) -> io::Result<()> {
        while self.buf.len() < n {
            if self.fill(deadline)? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    format!("the answer ended at {} of {n} bytes", self.buf.len()),
                ));
            }
        }
        Ok(())
    }

    fn take_line(&mut self, deadline: Instant) -> io::Result<String> {
        let mut from = 0;
        loop {
            if let Some(at) = self.buf[from..].iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buf.drain(..=from + at).collect();
                let text = String::from_utf8_lossy(&line);
                return Ok(text.trim_end_matches(['\r', '\n']).to_owned());
            }
            from = self.buf.len();
            if from > HEAD_BYTES_MAX {
                return Err(io::Error::other("a line of the answer's framing is endless"));
            }
            if self.fill(deadline)? == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed in the middle of the framing"));
            }
        }
    }

    /// Reads status line and fields (interim 1xx answers but 101 are passed over); the body stays unread.
    ///
    /// # Errors
    /// What the kernel says, `TimedOut`, `UnexpectedEof`, or that it is not HTTP.
    pub fn read_head(&mut self, limit: Duration) -> io::Result<Answer> {
        let deadline = Instant::now() + limit;
        loop {
            let head_len = loop {
                if let Some(at) = self.buf.windows(4).position(|w| w == b"\r\n\r\n") {
                    break at + 4;
                }
                if self.buf.len() > HEAD_BYTES_MAX {
                    return Err(io::Error::other("the answer's head is endless"));
                }
                if self.fill(deadline)? == 0 {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        format!("closed after {} bytes of an answer", self.buf.len()),
                    ));
                }
            };
            let head: Vec<u8> = self.buf.drain(..head_len).collect();
            let head = String::from_utf8_lossy(&head);
            let mut lines = head.split("\r\n");
            let first = lines.next().unwrap_or_default();
            let status = first
                .strip_prefix("HTTP/1.")
                .and_then(|rest| rest.split(' ').nth(1)?.parse::<u16>().ok())
                .ok_or_else(|| io::Error::other(format!("not a status line: {first:?}")))?;
            let headers: Vec<(String, String)> = lines
                .filter_map(|line| line.split_once(':'))
                .map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned()))
                .collect();
            if (100..200).contains(&status) && status != 101 {
                continue;
            }
            return Ok(Answer { status, headers, body: Vec::new() });
        }
    }

    /// Reads one whole answer; `no_body` for the answer to a HEAD. The bool says whether the connection may be used
    /// again.
    ///
    /// # Errors
    /// As [`Conn::read_head`].
    pub fn read_answer(&mut self, no_body: bool, limit: Duration) -> io::Result<(Answer, bool)> {
        let deadline = Instant::now() + limit;
        let mut answer = self.read_head(limit)?;
        let keep = !answer.header("connection").is_some_and(|v| v.to_ascii_lowercase().contains("close"));
        if no_body || matches!(answer.status, 101 | 204 | 304) {
            return Ok((answer, keep));
        }
        if answer.header("transfer-encoding").is_some_and(|v| v.to_ascii_lowercase().contains("chunked")) {
            loop {
                let line = self.take_line(deadline)?;
                let size = usize::from_str_radix(line.split(';').next().unwrap_or_default().trim(), 16)
                    .map_err(|_| io::Error::other(format!("not a chunk size: {line:?}")))?;
                check_size(answer.body.len().saturating_add(size))?;
                if size == 0 {
                    while !self.take_line(deadline)?.is_empty() {}
                    return Ok((answer, keep));
                }
                self.fill_to(size + 2, deadline)?;
                answer.body.extend(self.buf.drain(..size));
                if self.buf.drain(..2).as_slice() != b"\r\n" {
                    return Err(io::Error::other("a chunk is longer than it says"));
                }
            }
        }
        if let Some(length) = answer.header("content-length") {
            let length = length.parse().map_err(|_| io::Error::other(format!("not a content length: {length:?}")))?;
            check_size(length)?;
            self.fill_to(length, deadline)?;
            answer.body = self.buf.drain(..length).collect();
            return Ok((answer, keep));
        }
        while self.fill(deadline)? > 0 {
            check_size(self.buf.len())?;
        }
        answer.body = std::mem::take(&mut self.buf);
        Ok((answer, false))
    }

    /// Everything until the other side closes, or until `limit`; what came so far either way.
    #[must_use]
    pub fn read_to_end(&mut self, limit: Duration) -> Vec<u8> {
        let deadline = Instant::now() + limit;
        while matches!(self.fill(deadline), Ok(1..)) {}
        std::mem::take(&mut self.buf)
    }

    /// True when the other side has closed, or has said something unasked.
    fn is_stale(&self) -> bool {
        let mut byte = [0];
        if !self.buf.is_empty() || self.stream.set_nonblocking(true).is_err() {
            return true;
        }
        let quiet = matches!(self.stream.peek(&mut byte), Err(e) if e.kind() == io::ErrorKind::WouldBlock);
        self.stream.set_nonblocking(false).is_err() || !quiet
    }
}

fn check_size(bytes: usize) -> io::Result<()> {
    if bytes > ANSWER_BYTES_MAX {
        return Err(io::Error::other(format!("an answer of {bytes} bytes is more than {ANSWER_BYTES_MAX}")));
    }
    Ok(())
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "no whole answer within the limit"));
    }
    Ok(left)
}

/// A socket's own time-out reads as "would block".
fn as_timeout(e: io::Error) -> io::Error {
    if e.kind() == io::ErrorKind::WouldBlock {
        return io::Error::new(io::ErrorKind::TimedOut, "no whole answer within the limit");
    }
    e
}

/// One photo to send.
#[derive(Debug, Clone)]
pub struct Photo {
    /// The client's word for it.
    pub id: String,
    /// Its media type.
    pub mime: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Photo {
    /// A PNG of about `bytes` bytes, called `[image#number]`.
    #[must_use]
    pub fn png(number: u32, bytes: usize, seed: u64) -> Self {
        Self { id: format!("image#{number}"), mime: "image/png".to_owned(), bytes: super::png::of_bytes(bytes, seed) }
    }
}

/// What a send was answered, when with 200.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Accepted {
    /// The session it went to.
    pub session_id: String,
    /// The uuid it got.
    pub message_uuid: String,
    /// The id of its acceptance event.
    pub event_id: i64,
    /// Its turn, when it started one at once (or, in a repeat, by now).
    #[serde(default)]
    pub turn_id: Option<String>,
    /// It waits behind a turn.
    #[serde(default)]
    pub queued: bool,
    /// It had been accepted before.
    #[serde(default)]
    pub deduplicated: bool,
    /// Where it is, in a repeat.
    #[serde(default)]
    pub state: Option<String>,
}

/// The body of `POST /api/chat/send`.
#[must_use]
pub fn send_body(session: &str, text: &str, message_id: Option<&str>, photos: &[Photo]) -> Value {
    let mut body = json!({ "session": session, "message": text });
    if let Some(id) = message_id {
        body["messageId"] = id.into();
    }
    if !photos.is_empty() {
        body["images"] = photos
            .iter()
            .map(|p| {
                json!({
                    "id": p.id,
                    "mimeType": p.mime,
                    "dataBase64": base64_simd::STANDARD.encode_to_string(&p.bytes),
                })
            })
            .collect();
    }
    body
}

/// A client that keeps its connection.
#[derive(Debug)]
pub struct Client {
    addr: SocketAddr,
    bearer: Option<String>,
    limit: Duration,
    conn: Option<Conn>,
}

impl Client {
    /// A client of `addr`; it connects at the first request. Ten seconds for each answer.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Self {
        Self { addr, bearer: None, limit: Duration::from_secs(10), conn: None }
    }

    /// The same with another limit for each answer.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// The same with a bearer token.
    #[must_use]
    pub fn bearer(mut self, token: impl Into<String>) -> Self {
        self.bearer = Some(token.into());
        self
    }

    /// Where it connects to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Closes the connection; the next request opens another.
    pub fn hang_up(&mut self) {
        self.conn = None;
    }

    /// The bytes of a request.
    #[must_use]
    pub fn encode(&self, method: &str, path: &str, fields: &[(&str, &str)], body: Option<&[u8]>) -> Vec<u8> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\n", self.addr);
        if let Some(token) = &self.bearer {
            head.push_str(&format!("Authorization: Bearer {token}\r\n"));
        }
        for (name, value) in fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(body) = body {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body.unwrap_or_default());
        bytes
    }

    /// One request, one answer, on the kept connection when it is still good.
    ///
    /// # Errors
    /// What the kernel says, `TimedOut`, `UnexpectedEof`. The connection is closed then.
    pub fn request(
        &mut self,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        body: Option<&[u8]>,
    ) -> io::Result<Answer> {
        let bytes = self.encode(method, path, fields, body);
        let mut conn = match self.conn.take() {
            Some(conn) if !conn.is_stale() => conn,
            Some(_) | None => Conn::open(self.addr, self.limit)?,
        };
        let written = conn.write(&bytes, self.limit);
        // A server that refuses early answers and closes while we still write: its answer is worth more than the error.
        let (answer, keep) = match conn.read_answer(method == "HEAD", self.limit) {
            Ok(got) => got,
            Err(e) => return Err(written.err().unwrap_or(e)),
        };
        if keep && written.is_ok() {
            self.conn = Some(conn);
        }
        Ok(answer)
    }

    /// GET.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn get(&mut self, path: &str) -> io::Result<Answer> {
        self.request("GET", path, &[], None)
    }

    /// POST of JSON.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn post(&mut self, path: &str, body: &Value) -> io::Result<Answer> {
        self.request("POST", path, &[("Content-Type", "application/json")], Some(body.to_string().as_bytes()))
    }

    /// Writes `bytes` on a connection of their own and reads until it closes or the limit is over.
    ///
    /// # Errors
    /// What the kernel says about connecting or writing.
    pub fn raw(&self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut conn = Conn::open(self.addr, self.limit)?;
        conn.write(bytes, self.limit)?;
        Ok(conn.read_to_end(self.limit))
    }

    /// Writes a POST on a connection of its own and closes after `keep` of its bytes, or, with all written, before the
    /// answer came.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn post_and_drop(&self, path: &str, body: &Value, keep: usize) -> io::Result<()> {
        let body = body.to_string();
        let bytes = self.encode("POST", path, &[("Content-Type", "application/json")], Some(body.as_bytes()));
        let mut conn = Conn::open(self.addr, self.limit)?;
        conn.write(&bytes[..keep.min(bytes.len())], self.limit)
    }

    /// Sends a message once.
    ///
    /// # Errors
    /// As [`Client::request`]; an answer other than 200 is no error but the `Err` of the inner result.
    pub fn send(
        &mut self,
        session: &str,
        text: &str,
        message_id: Option<&str>,
        photos: &[Photo],
    ) -> io::Result<Result<Accepted, Answer>> {
        let answer = self.post("/api/chat/send", &send_body(session, text, message_id, photos))?;
        if answer.status != 200 {
            return Ok(Err(answer));
        }
        serde_json::from_slice(&answer.body)
            .map(Ok)
            .map_err(|e| io::Error::other(format!("the answer to a send reads {:?}: {e}", answer.text())))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::threads::{self, Name, OnPanic, SMALL_STACK_BYTES};

    const LIMIT: Duration = Duration::from_secs(10);

    /// Answers each connection with the bytes given for it, one byte at a time, then closes.
    fn scripted(answers: Vec<&'static [u8]>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        threads::spawn(Name::fixed("scripted"), SMALL_STACK_BYTES, OnPanic::Contain, move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_nodelay(true).unwrap();
                let mut seen = [0; 4096];
                let _ = stream.read(&mut seen);
                for byte in answer {
                    let _ = stream.write_all(std::slice::from_ref(byte));
                }
            }
        })
        .unwrap();
        addr
    }

    #[test]
    fn both_framings_and_interim_answers_are_read_whole() {
        let table: &[(&[u8], u16, &str, bool)] = &[
            (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, "hello", true),
            (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", 200, "hello", false),
            (
                b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nT: 1\r\n\r\n",
                404,
                "abcde",
                true,
            ),
            (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, "until the end", false),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 304 Same\r\nETag: x\r\n\r\n", 304, "", true),
        ];
        for (bytes, status, body, keep) in table {
            let mut conn = Conn::open(scripted(vec![bytes]), LIMIT).unwrap();
            conn.write(b"GET / HTTP/1.1\r\n\r\n", LIMIT).unwrap();
            let (answer, kept) = conn.read_answer(false, LIMIT).unwrap();
            assert_eq!((answer.status, answer.text().as_str(), kept), (*status, *body, *keep));
        }
    }

    #[test]
    fn a_short_answer_and_a_silent_server_are_errors_within_the_limit() {
        let mut client = Client::new(scripted(vec![b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"])).limit(LIMIT);
        assert_eq!(client.get("/").unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = Client::new(silent.local_addr().unwrap()).limit(Duration::from_millis(50));
        assert_eq!(client.get("/").unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_connection_that_the_server_closed_meanwhile_is_replaced_before_anything_is_sent() {
        let ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        let mut client = Client::new(scripted(vec![ok, ok])).limit(LIMIT);
        assert_eq!(client.get("/").unwrap().text(), "ok");
        let closed = Instant::now() + LIMIT;
        while !client.conn.as_ref().unwrap().is_stale() {
            assert!(Instant::now() < closed, "the scripted server does not close");
            threads_yield();
        }
        assert_eq!(client.get("/").unwrap().text(), "ok");
    }

    fn threads_yield() {
        std::thread::yield_now();
    }

    #[test]
    fn a_send_carries_its_photos_as_base64() {
        let photo = Photo::png(1, 100, 7);
        let body = send_body("main", "look [image#1]", Some("m1"), std::slice::from_ref(&photo));
        assert_eq!(body["messageId"], "m1");
        let data = body["images"][0]["dataBase64"].as_str().unwrap();
        assert_eq!(base64_simd::STANDARD.decode_to_vec(data).unwrap(), photo.bytes);
        assert!(send_body("main", "x", None, &[]).get("images").is_none());
    }
}
