//! One event, serialized once, in the forms that go out. Leaves places in the stream to `ring`.
//! Rule a change could break: the JSON object begins with `id` (kept events only) and `event`, which the SSE form
//! reads back.

use std::fmt;
use std::sync::OnceLock;

use crate::ids::EventId;

/// Room in front of a payload for the longest frame header of a server: 2 + 8 bytes.
const HEADER_BYTES_MAX: usize = 10;

/// One event, serialized once: a whole WebSocket text frame, and its SSE form once somebody asks for it.
pub struct Frame {
    /// Header and payload of the frame, from `start`.
    bytes: Box<[u8]>,
    start: u8,
    event_len: u8,
    /// 0 for a transient event.
    id: EventId,
    sse: OnceLock<Box<[u8]>>,
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame").field("id", &self.id).field("bytes", &self.ws().len()).finish_non_exhaustive()
    }
}

impl Frame {
    /// The frame of a kept event; `data` is JSON text.
    #[must_use]
    pub fn kept(id: EventId, event: &str, data_json: &str, at: &str) -> Self {
        Self::build(id, event, at, |to| to.extend_from_slice(data_json.as_bytes()))
    }

    /// A frame of the stream itself (`hello`, `resync`), for one client.
    #[must_use]
    pub fn notice(event: &str, data_json: &str) -> Self {
        Self::build(0, event, "", |to| to.extend_from_slice(data_json.as_bytes()))
    }

    pub(super) fn build(id: EventId, event: &str, at: &str, data: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut bytes = Vec::with_capacity(256);
        bytes.resize(HEADER_BYTES_MAX, 0);
        bytes.push(b'{');
        if id > 0 {
            bytes.extend_from_slice(b"\"id\":");
            bytes.extend_from_slice(id.to_string().as_bytes());
            bytes.push(b',');
        }
        bytes.extend_from_slice(b"\"event\":\"");
        bytes.extend_from_slice(event.as_bytes());
        bytes.extend_from_slice(b"\",\"data\":");
        data(&mut bytes);
        if !at.is_empty() {
            bytes.extend_from_slice(b",\"at\":\"");
            bytes.extend_from_slice(at.as_bytes());
            bytes.push(b'"');
        }
        bytes.push(b'}');
        let payload = bytes.len() - HEADER_BYTES_MAX;
        let (header, header_len) = header(payload);
        let start = HEADER_BYTES_MAX - header_len;
        bytes[start..HEADER_BYTES_MAX].copy_from_slice(&header[..header_len]);
        Self {
            bytes: bytes.into_boxed_slice(),
            start: start as u8,
            event_len: event.len().min(255) as u8,
            id,
            sse: OnceLock::new(),
        }
    }

    /// Its id; 0 for a transient event.
    #[must_use]
    pub fn id(&self) -> EventId {
        self.id
    }

    /// The whole WebSocket frame: header and JSON.
    #[must_use]
    pub fn ws(&self) -> &[u8] {
        &self.bytes[usize::from(self.start)..]
    }

    /// The JSON object alone.
    #[must_use]
    pub fn json(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES_MAX..]
    }

    /// The event as `text/event-stream` has it: `id: EPOCH.ID` (kept ones), `event:`, `data:` with the whole object.
    pub fn sse(&self, epoch: &str) -> &[u8] {
        self.sse.get_or_init(|| {
            let json = self.json();
            // {"id":N,"event":"NAME" or {"event":"NAME"
            let name_at = if self.id > 0 { 16 + self.id.to_string().len() } else { 10 };
            let mut text = Vec::with_capacity(json.len() + 96);
            if self.id > 0 {
                text.extend_from_slice(format!("id: {epoch}.{}\n", self.id).as_bytes());
            }
            text.extend_from_slice(b"event: ");
            text.extend_from_slice(&json[name_at..name_at + usize::from(self.event_len)]);
            text.extend_from_slice(b"\ndata: ");
            text.extend_from_slice(json);
            text.extend_from_slice(b"\n\n");
            text.into_boxed_slice()
        })
    }
}

/// Header of an unmasked, unfragmented text frame of `len` payload bytes (RFC 6455 §5.2), and its length.
pub(super) fn header(len: usize) -> ([u8; HEADER_BYTES_MAX], usize) {
    let mut header = [0; HEADER_BYTES_MAX];
    header[0] = 0x81;
    if len < 126 {
        header[1] = len as u8;
        (header, 2)
    } else if let Ok(short) = u16::try_from(len) {
        header[1] = 126;
        header[2..4].copy_from_slice(&short.to_be_bytes());
        (header, 4)
    } else {
        header[1] = 127;
        header[2..10].copy_from_slice(&(len as u64).to_be_bytes());
        (header, 10)
    }
}
