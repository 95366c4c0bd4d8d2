//! A subscriber: follows the bus over a WebSocket or over Server-Sent Events, from a cursor.
//!
//! Leaves judgement over the whole to the checker; here only the order of ids is watched, frame by frame. Rule a change
//! could break: a frame is counted before anybody looks at it, so that no reader can skip a hole.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tungstenite::protocol::WebSocketConfig;
use tungstenite::{ClientRequestBuilder, HandshakeError, Message, WebSocket};

use super::client::{Client, Conn};

/// One frame as it came.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Its id, if it is a kept event.
    pub id: Option<i64>,
    /// Its name.
    pub event: String,
    /// What it tells.
    pub data: Value,
    /// When the server made it, RFC 3339.
    pub at: Option<String>,
    /// When it was read here.
    pub got: Instant,
}

impl Frame {
    /// A field of the data as text; empty when it is none.
    #[must_use]
    pub fn text(&self, key: &str) -> &str {
        self.data[key].as_str().unwrap_or_default()
    }
}

/// The envelope of a frame with its data unread: what a reader of many frames can afford.
#[derive(Debug, Deserialize)]
pub struct Envelope<'a> {
    /// Its id, if it is a kept event.
    #[serde(default)]
    pub id: Option<i64>,
    /// Its name.
    #[serde(borrow)]
    pub event: std::borrow::Cow<'a, str>,
    /// What it tells, as written.
    #[serde(borrow, default)]
    pub data: Option<&'a RawValue>,
    /// When the server made it.
    #[serde(borrow, default)]
    pub at: Option<std::borrow::Cow<'a, str>>,
}

/// Watches the ids that one subscriber sees, over all its connections.
#[derive(Debug, Clone, Default)]
pub struct OrderCheck {
    /// The id the next kept event must have; none before the first hello.
    expected: Option<i64>,
    /// Where a `{"after":ID}` frame asked to go, until the first event from there.
    moved: Option<i64>,
    /// The epoch of the store.
    epoch: Option<String>,
    /// Explicit resyncs seen.
    pub resyncs: u64,
    /// Kept events seen.
    pub kept: u64,
    /// Transient events seen.
    pub transient: u64,
    /// What was wrong, in words.
    pub faults: Vec<String>,
}

impl OrderCheck {
    /// The cursor from which another connection goes on, `EPOCH.ID`.
    #[must_use]
    pub fn cursor(&self) -> Option<String> {
        Some(format!("{}.{}", self.epoch.as_ref()?, self.expected? - 1))
    }

    /// The id of the last kept event seen (or the place the first hello named).
    #[must_use]
    pub fn last_id(&self) -> Option<i64> {
        self.expected.map(|id| id - 1)
    }

    /// Notes that the cursor was moved by a client frame.
    pub fn move_to(&mut self, after: i64) {
        self.moved = Some(after);
    }

    /// Takes in one frame. `data` is read only for hello and resync.
    pub fn see(&mut self, id: Option<i64>, event: &str, data: impl FnOnce() -> Value, asked: Option<&str>) {
        match (id, event) {
            (None, "hello") => {
                let data = data();
                let head = data["head"].as_i64();
                self.epoch = data["epoch"].as_str().map(str::to_owned);
                // A cursor EPOCH.ID or ID goes on behind ID; without one, behind the head.
                let after = asked.and_then(|c| c.rsplit('.').next()?.parse().ok()).or(head);
                match after {
                    Some(after) => self.expected = Some(after + 1),
                    None => self.faults.push(format!("a hello without a head: {data}")),
                }
            }
            (None, "resync") => {
                self.resyncs += 1;
                let data = data();
                match data["head"].as_i64() {
                    Some(head) => {
                        self.expected = Some(head + 1);
                        self.moved = None;
                    }
                    None => self.faults.push(format!("a resync without a head: {data}")),
                }
            }
            (None, _) => self.transient += 1,
            (Some(id), _) => {
                self.kept += 1;
                if self.moved.is_some_and(|after| id == after + 1) {
                    self.moved = None;
                    self.expected = Some(id + 1);
                    return;
                }
                match self.expected {
                    None => self.faults.push(format!("event {id} before the hello")),
                    Some(expected) if id < expected => {
                        self.faults.push(format!("event {id} again (or late): {expected} was next"));
                        return;
                    }
                    Some(expected) if id > expected => {
                        self.faults.push(format!("a hole: event {id} came, {expected} was next"));
                    }
                    Some(_) => {}
                }
                self.expected = Some(id + 1);
            }
        }
    }
}

enum Wire {
    Ws(Box<WebSocket<TcpStream>>),
    Sse { stream: TcpStream, raw: Vec<u8>, text: Vec<u8>, chunked: bool },
}

/// Buffer of a WebSocket reader, in bytes; the default of 128 KiB would be most of a watcher's memory.
const READ_BUFFER_BYTES: usize = 8 * 1024;

/// Opens the WebSocket of the bus.
///
/// # Errors
/// What the kernel says, or the status of a refusal.
pub fn open_websocket(
    addr: SocketAddr,
    cursor: Option<&str>,
    bearer: Option<&str>,
    limit: Duration,
) -> io::Result<WebSocket<TcpStream>> {
    let query = cursor.map(|c| format!("?after={c}")).unwrap_or_default();
    let uri = format!("ws://{addr}/api/events{query}")
        .parse()
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, format!("cursor {cursor:?}: {e}")))?;
    let mut request = ClientRequestBuilder::new(uri);
    if let Some(token) = bearer {
        request = request.with_header("Authorization", format!("Bearer {token}"));
    }
    let stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    let config = WebSocketConfig::default().read_buffer_size(READ_BUFFER_BYTES).write_buffer_size(0);
    match tungstenite::client::client_with_config(request, stream, Some(config)) {
        Ok((socket, _)) => Ok(socket),
        Err(HandshakeError::Interrupted(_)) => Err(io::ErrorKind::TimedOut.into()),
        Err(HandshakeError::Failure(tungstenite::Error::Http(answer))) => {
            let body = answer.body().as_deref().map(String::from_utf8_lossy).unwrap_or_default().into_owned();
            Err(io::Error::other(format!("the upgrade was answered {}: {body}", answer.status().as_u16())))
        }
        Err(HandshakeError::Failure(e)) => Err(as_io(e)),
    }
}

/// A WebSocket error as the plain I/O error it mostly is.
#[must_use]
pub fn as_io(e: tungstenite::Error) -> io::Error {
    if let tungstenite::Error::Io(e) = e { e } else { io::Error::other(e.to_string()) }
}

/// One subscriber.
pub struct Follower {
    addr: SocketAddr,
    bearer: Option<String>,
    wire: Option<Wire>,
    asked: Option<String>,
    ready: VecDeque<Frame>,
    /// The order of its ids.
    pub order: OrderCheck,
    /// Every frame so far, if it keeps them.
    pub seen: Vec<Frame>,
    keeps: bool,
    over_sse: bool,
    /// How far [`Follower::wait_next`] has looked.
    looked: usize,
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("addr", &self.addr).field("order", &self.order).finish_non_exhaustive()
    }
}

impl Follower {
    /// Opens a WebSocket after `cursor` (none: from now on).
    ///
    /// # Errors
    /// What the kernel says, or the status of a refusal.
    pub fn websocket(addr: SocketAddr, cursor: Option<&str>, limit: Duration) -> io::Result<Self> {
        let mut follower = Self::detached(addr);
        follower.open(cursor, limit)?;
        Ok(follower)
    }

    /// Opens a Server-Sent Events stream after `cursor`, sent as `Last-Event-ID` or as `after=`.
    ///
    /// # Errors
    /// What the kernel says, or the status of a refusal.
    pub fn sse(addr: SocketAddr, cursor: Option<&str>, as_last_event_id: bool, limit: Duration) -> io::Result<Self> {
        let mut follower = Self::detached(addr);
        follower.open_sse(cursor, as_last_event_id, limit)?;
        Ok(follower)
    }

    /// A subscriber that is not connected yet.
    #[must_use]
    pub fn detached(addr: SocketAddr) -> Self {
        Self {
            addr,
            bearer: None,
            wire: None,
            asked: None,
            ready: VecDeque::new(),
            order: OrderCheck::default(),
            seen: Vec::new(),
            keeps: true,
            over_sse: false,
            looked: 0,
        }
    }

    /// The same, forgetting each frame once it was handed out (for long runs).
    #[must_use]
    pub fn forgetful(mut self) -> Self {
        self.keeps = false;
        self
    }

    /// The same with a bearer token.
    #[must_use]
    pub fn bearer(mut self, token: impl Into<String>) -> Self {
        self.bearer = Some(token.into());
        self
    }

    /// True while it holds a connection.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.wire.is_some()
    }

    /// Drops the connection without a close frame, as a phone in a tunnel does.
    pub fn drop_connection(&mut self) {
        self.wire = None;
    }

    /// Another address from now on (a restarted server).
    pub fn set_addr(&mut self, addr: SocketAddr) {
        self.addr = addr;
    }

    /// Connects again behind the last kept event seen, the same way as before.
    ///
    /// # Errors
    /// As [`Follower::websocket`].
    pub fn resume(&mut self, limit: Duration) -> io::Result<()> {
        let cursor = self.order.cursor();
        if self.over_sse { self.open_sse(cursor.as_deref(), true, limit) } else { self.open(cursor.as_deref(), limit) }
    }

    /// Connects behind `cursor` (none: from now on), over Server-Sent Events.
    ///
    /// # Errors
    /// As [`Follower::sse`].
    pub fn open_sse(&mut self, cursor: Option<&str>, as_last_event_id: bool, limit: Duration) -> io::Result<()> {
        self.wire = None;
        self.over_sse = true;
        let mut fields = vec![("Accept", "text/event-stream")];
        let mut path = "/api/events".to_owned();
        match cursor {
            Some(cursor) if as_last_event_id => fields.push(("Last-Event-ID", cursor)),
            Some(cursor) => path.push_str(&format!("?after={cursor}")),
            None => {}
        }
        let mut asker = Client::new(self.addr);
        if let Some(token) = &self.bearer {
            asker = asker.bearer(token);
        }
        let mut conn = Conn::open(self.addr, limit)?;
        conn.write(&asker.encode("GET", &path, &fields, None), limit)?;
        let head = conn.read_head(limit)?;
        if head.status != 200 {
            return Err(io::Error::other(format!("the stream was answered {}", head.status)));
        }
        let chunked = head.header("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked"));
        let (stream, raw) = conn.into_parts();
        self.wire = Some(Wire::Sse { stream, raw, text: Vec::new(), chunked });
        self.asked = cursor.map(str::to_owned);
        Ok(())
    }

    /// Connects behind `cursor` (none: from now on), over a WebSocket.
    ///
    /// # Errors
    /// As [`Follower::websocket`].
    pub fn open(&mut self, cursor: Option<&str>, limit: Duration) -> io::Result<()> {
        self.wire = None;
        let socket = open_websocket(self.addr, cursor, self.bearer.as_deref(), limit)?;
        self.wire = Some(Wire::Ws(Box::new(socket)));
        self.asked = cursor.map(str::to_owned);
        Ok(())
    }

    /// Asks the server to go on behind `after`.
    ///
    /// # Errors
    /// What the kernel says; that this is not a WebSocket.
    pub fn move_cursor(&mut self, after: i64) -> io::Result<()> {
        match &mut self.wire {
            Some(Wire::Ws(socket)) => {
                self.order.move_to(after);
                socket.send(Message::text(format!("{{\"after\":{after}}}"))).map_err(as_io)
            }
            Some(Wire::Sse { .. }) | None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// The next frame; none when none came within `limit`.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn next(&mut self, limit: Duration) -> io::Result<Option<Frame>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(frame) = self.ready.pop_front() {
                if self.keeps {
                    self.seen.push(frame.clone());
                }
                return Ok(Some(frame));
            }
            match self.read_some(deadline) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(e) => {
                    self.wire = None;
                    return Err(e);
                }
            }
        }
    }

    /// Reads once; false when the deadline passed.
    fn read_some(&mut self, deadline: Instant) -> io::Result<bool> {
        // A millisecond at least, so that a limit of zero still takes what lies ready.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let texts: Vec<String> = match self.wire.as_mut().ok_or(io::ErrorKind::NotConnected)? {
            Wire::Ws(socket) => {
                socket.get_ref().set_read_timeout(Some(left))?;
                match socket.read() {
                    Ok(Message::Text(text)) => vec![text.as_str().to_owned()],
                    Ok(Message::Ping(_)) => {
                        socket.flush().map_err(as_io)?;
                        Vec::new()
                    }
                    Ok(Message::Pong(_)) => Vec::new(),
                    Ok(Message::Close(frame)) => {
                        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, format!("closed: {frame:?}")));
                    }
                    Ok(Message::Binary(_) | Message::Frame(_)) => {
                        return Err(io::Error::other("a frame that is not text"));
                    }
                    Err(tungstenite::Error::Io(e))
                        if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
                    {
                        return Ok(Instant::now() < deadline);
                    }
                    Err(e) => return Err(as_io(e)),
                }
            }
            Wire::Sse { stream, raw, text, chunked } => {
                if !decode_sse(raw, text, *chunked)? {
                    stream.set_read_timeout(Some(left))?;
                    let mut chunk = [0; 16 * 1024];
                    match io::Read::read(stream, &mut chunk) {
                        Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                        Ok(n) => raw.extend_from_slice(&chunk[..n]),
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                            return Ok(Instant::now() < deadline);
                        }
                        Err(e) => return Err(e),
                    }
                    decode_sse(raw, text, *chunked)?;
                }
                take_sse_frames(text)?
            }
        };
        for text in texts {
            self.take_in(&text)?;
        }
        Ok(true)
    }

    fn take_in(&mut self, text: &str) -> io::Result<()> {
        let got = Instant::now();
        let envelope: Envelope<'_> =
            serde_json::from_str(text).map_err(|e| io::Error::other(format!("not a frame: {text:.200}: {e}")))?;
        let data: Value = match envelope.data {
            Some(raw) => serde_json::from_str(raw.get()).map_err(io::Error::other)?,
            None => Value::Null,
        };
        self.order.see(envelope.id, &envelope.event, || data.clone(), self.asked.as_deref());
        self.ready.push_back(Frame {
            id: envelope.id,
            event: envelope.event.into_owned(),
            data,
            at: envelope.at.map(std::borrow::Cow::into_owned),
            got,
        });
        Ok(())
    }

    /// The first frame that `wanted` likes, among those already seen or still to come. Needs kept frames.
    ///
    /// # Errors
    /// `TimedOut` with the names of the last frames; what the connection says.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Frame) -> bool, limit: Duration) -> io::Result<Frame> {
        if let Some(frame) = self.seen.iter().find(|f| wanted(f)) {
            return Ok(frame.clone());
        }
        self.wait_new(what, wanted, limit)
    }

    /// The first such frame behind the one that the last `wait_next` returned.
    ///
    /// # Errors
    /// As [`Follower::wait_for`].
    pub fn wait_next(&mut self, what: &str, wanted: impl Fn(&Frame) -> bool, limit: Duration) -> io::Result<Frame> {
        if let Some(at) = self.seen[self.looked..].iter().position(&wanted) {
            self.looked += at + 1;
            return Ok(self.seen[self.looked - 1].clone());
        }
        let frame = self.wait_new(what, wanted, limit)?;
        self.looked = self.seen.len();
        Ok(frame)
    }

    fn wait_new(&mut self, what: &str, wanted: impl Fn(&Frame) -> bool, limit: Duration) -> io::Result<Frame> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next(left)? {
                Some(frame) if wanted(&frame) => return Ok(frame),
                // A flood of other frames must not stretch the wait.
                Some(_) if Instant::now() < deadline => {}
                Some(_) | None => {
                    let last: Vec<String> = self
                        .seen
                        .iter()
                        .rev()
                        .take(12)
                        .rev()
                        .map(|f| format!("{}{}", f.event, f.id.map(|id| format!("#{id}")).unwrap_or_default()))
                        .collect();
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("no {what} within {limit:?}; the last frames: {}", last.join(" ")),
                    ));
                }
            }
        }
    }
}

/// Moves whole chunks from `raw` to `text`; true if any byte moved.
fn decode_sse(raw: &mut Vec<u8>, text: &mut Vec<u8>, chunked: bool) -> io::Result<bool> {
    if !chunked {
        let any = !raw.is_empty();
        text.append(raw);
        return Ok(any);
    }
    let mut any = false;
    while let Some(line_end) = raw.windows(2).position(|w| w == b"\r\n") {
        let size_text = String::from_utf8_lossy(&raw[..line_end]).into_owned();
        let size = usize::from_str_radix(size_text.split(';').next().unwrap_or_default().trim(), 16)
            .map_err(|_| io::Error::other(format!("not a chunk size: {size_text:?}")))?;
        if size == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if raw.len() < line_end + 2 + size + 2 {
            break;
        }
        text.extend_from_slice(&raw[line_end + 2..line_end + 2 + size]);
        raw.drain(..line_end + 2 + size + 2);
        any = true;
    }
    Ok(any)
}

/// Takes whole events out of `text`: the JSON frame of each. The envelope is rebuilt from the fields when the data
/// alone is sent.
fn take_sse_frames(text: &mut Vec<u8>) -> io::Result<Vec<String>> {
    let mut frames = Vec::new();
    while let Some(end) = text.windows(2).position(|w| w == b"\n\n") {
        let block: Vec<u8> = text.drain(..end + 2).collect();
        let block = String::from_utf8(block).map_err(io::Error::other)?;
        let (mut id, mut event, mut data) = (None, None, String::new());
        for line in block.lines() {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match name {
                "id" => id = value.rsplit('.').next().and_then(|n| n.parse::<i64>().ok()),
                "event" => event = Some(value.to_owned()),
                "data" => {
                    if !data.is_empty() {
                        data.push('\n');
                    }
                    data.push_str(value);
                }
                // Comments (an empty name) and fields we do not use, such as retry.
                _ => {}
            }
        }
        if data.is_empty() {
            continue;
        }
        let whole = serde_json::from_str::<Envelope<'_>>(&data).is_ok_and(|e| e.data.is_some());
        match event {
            Some(event) if !whole => {
                let id = id.map(|id| format!("\"id\":{id},")).unwrap_or_default();
                frames.push(format!("{{{id}\"event\":{},\"data\":{data}}}", Value::String(event)));
            }
            Some(_) | None => frames.push(data),
        }
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn checked(asked: Option<&str>, frames: &[(Option<i64>, &str, Value)]) -> OrderCheck {
        let mut order = OrderCheck::default();
        for (id, event, data) in frames {
            order.see(*id, event, || data.clone(), asked);
        }
        order
    }

    fn hello(head: i64) -> (Option<i64>, &'static str, Value) {
        (None, "hello", json!({ "epoch": "e", "head": head, "oldest": 1 }))
    }

    fn kept(id: i64) -> (Option<i64>, &'static str, Value) {
        (Some(id), "chat-complete", Value::Null)
    }

    #[test]
    fn ids_without_hole_or_double_are_fine_from_a_cursor_and_from_the_head() {
        let live = checked(None, &[hello(7), kept(8), (None, "chat-turn", Value::Null), kept(9)]);
        assert_eq!((live.faults.len(), live.kept, live.transient), (0, 2, 1));
        assert_eq!(live.cursor().as_deref(), Some("e.9"));
        assert!(checked(Some("e.3"), &[hello(7), kept(4), kept(5)]).faults.is_empty());
        assert!(checked(Some("0"), &[hello(7), kept(1)]).faults.is_empty());
        let resync = (None, "resync", json!({ "reason": "old", "head": 20 }));
        let resynced = checked(Some("e.3"), &[hello(20), resync, kept(21)]);
        assert_eq!((resynced.faults.len(), resynced.resyncs), (0, 1));
    }

    #[test]
    fn a_hole_a_double_and_a_step_back_are_each_caught_once() {
        for (frames, word) in [
            (vec![hello(7), kept(8), kept(10), kept(11)], "hole"),
            (vec![hello(7), kept(8), kept(8), kept(9)], "again"),
            (vec![hello(7), kept(8), kept(9), kept(7), kept(10)], "again"),
            (vec![hello(7), kept(9), kept(10)], "hole"),
            (vec![kept(1), kept(2)], "before the hello"),
        ] {
            let faults = checked(None, &frames).faults;
            assert!(faults.len() == 1 && faults[0].contains(word), "{word}: {faults:?}");
        }
    }

    #[test]
    fn a_moved_cursor_goes_on_from_there_after_what_was_under_way() {
        let mut order = checked(None, &[hello(7), kept(8)]);
        order.move_to(2);
        for id in [9, 3, 4] {
            order.see(Some(id), "x", || Value::Null, None);
        }
        assert!(order.faults.is_empty(), "{:?}", order.faults);
        order.see(Some(9), "x", || Value::Null, None);
        assert_eq!(order.faults.len(), 1);
    }

    #[test]
    fn server_sent_events_are_put_together_from_chunks_and_fields() {
        let mut raw =
            b"1c\r\nid: e.5\nevent: chat-complete\r\n1f\r\n\ndata: {\"sessionId\":\"s\"}\n\n: hi\n\r\n5\r\n\ndata"
                .to_vec();
        let mut text = Vec::new();
        assert!(decode_sse(&mut raw, &mut text, true).unwrap());
        let frames = take_sse_frames(&mut text).unwrap();
        assert_eq!(frames, [r#"{"id":5,"event":"chat-complete","data":{"sessionId":"s"}}"#]);
        assert_eq!(raw, b"5\r\n\ndata");
        let mut text = b"id: e.6\ndata: {\"id\":6,\"event\":\"x\",\"data\":{}}\n\n".to_vec();
        assert_eq!(take_sse_frames(&mut text).unwrap(), [r#"{"id":6,"event":"x","data":{}}"#]);
    }
}
