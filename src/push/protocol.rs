//! The bytes of both protocols: response heads, close frames and pings of ours, and what a WebSocket client's bytes
//! mean. The only file that names tungstenite. Leaves sockets and the stream to its neighbours.
//! Rule a change could break: whatever bytes come, the answer is a value; no reply is larger than what caused it.

use std::io::{self, Read, Write};

use tungstenite::Message;
use tungstenite::error::{CapacityError, Error as WsError};
use tungstenite::handshake::derive_accept_key;
use tungstenite::protocol::{Role, WebSocketConfig, WebSocketContext};

use crate::bus::{Cursor, parse_cursor};

/// Read buffer of a client, in bytes: its frames are pongs and cursors. tungstenite's default of 128 KiB would be
/// allocated for each client.
const READ_BUFFER_BYTES: usize = 64;
/// Longest text that can be `{"after":"EPOCH.ID"}`, with room for spaces, in bytes.
const CURSOR_TEXT_BYTES_MAX: usize = 256;

/// A ping frame without payload.
pub(super) const PING: &[u8] = &[0x89, 0];
/// A comment, which SSE clients skip.
pub(super) const SSE_PING: &[u8] = b": ping\n\n";

/// Close codes (RFC 6455 §7.4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Close {
    GoingAway,
    Protocol,
    Unsupported,
    BadUtf8,
    Policy,
    TooBig,
    TryAgain,
}

impl Close {
    fn code(self) -> u16 {
        match self {
            Close::GoingAway => 1001,
            Close::Protocol => 1002,
            Close::Unsupported => 1003,
            Close::BadUtf8 => 1007,
            Close::Policy => 1008,
            Close::TooBig => 1009,
            Close::TryAgain => 1013,
        }
    }
}

/// Appends a close frame; `reason` is at most 123 bytes.
pub(super) fn write_close(close: Close, reason: &str, to: &mut Vec<u8>) {
    debug_assert!(reason.len() <= 123);
    to.extend_from_slice(&[0x88, (reason.len() + 2) as u8]);
    to.extend_from_slice(&close.code().to_be_bytes());
    to.extend_from_slice(reason.as_bytes());
}

/// The 101 head for a `Sec-WebSocket-Key`.
pub(super) fn switching_head(key: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {}\r\n\r\n",
        derive_accept_key(key.as_bytes())
    )
    .into_bytes()
}

/// The 200 head of an SSE stream, which ends with the connection.
pub(super) const SSE_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\
X-Accel-Buffering: no\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n";

/// The whole answer to a client that cannot be served now.
pub(super) fn refusal(code: &str, text: &str) -> Vec<u8> {
    let body = serde_json::json!({ "error": text, "code": code }).to_string();
    format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Retry-After: 1\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// What a client said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Inbound {
    /// A ping (answered in the reply buffer) or a pong.
    Control,
    /// `{"after":ID}`.
    Seek(Cursor),
    /// It closes; the answer is in the reply buffer.
    Closing,
    /// It must be closed.
    Fail(Close, &'static str),
}

/// The reading half of one WebSocket connection.
pub(super) struct Protocol {
    context: WebSocketContext,
}

/// What tungstenite takes for the socket: bytes that were read already, and a buffer for its replies.
struct Fed<'a, 'b> {
    input: &'a mut &'b [u8],
    replies: &'a mut Vec<u8>,
}

impl Read for Fed<'_, '_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.input.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.input.read(to)
    }
}

impl Write for Fed<'_, '_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.replies.extend_from_slice(from);
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Protocol {
    pub(super) fn new(frame_bytes_max: usize) -> Self {
        let config = WebSocketConfig::default()
            .read_buffer_size(READ_BUFFER_BYTES)
            .write_buffer_size(0)
            .max_frame_size(Some(frame_bytes_max))
            .max_message_size(Some(frame_bytes_max));
        Self { context: WebSocketContext::new(Role::Server, Some(config)) }
    }

    /// The next thing `input` says, if a whole frame is there; takes what it used from `input`.
    pub(super) fn next(&mut self, input: &mut &[u8], replies: &mut Vec<u8>) -> Option<Inbound> {
        let mut fed = Fed { input, replies };
        Some(match self.context.read(&mut fed) {
            Ok(Message::Text(text)) => match cursor_of(&text) {
                Some(cursor) => Inbound::Seek(cursor),
                None => Inbound::Fail(Close::Policy, "the only message is {\"after\":ID}"),
            },
            Ok(Message::Binary(_)) => Inbound::Fail(Close::Unsupported, "no binary messages"),
            Ok(Message::Ping(_) | Message::Pong(_)) => Inbound::Control,
            Ok(Message::Close(_)) => {
                // The reply goes out with the flush, which then says that the connection is closed.
                let _ = self.context.flush(&mut fed);
                Inbound::Closing
            }
            Ok(Message::Frame(_)) => Inbound::Fail(Close::Protocol, "unexpected frame"),
            Err(WsError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => return None,
            Err(WsError::Capacity(CapacityError::MessageTooLong { .. })) => {
                Inbound::Fail(Close::TooBig, "message over 64 KiB")
            }
            Err(WsError::Utf8(_)) => Inbound::Fail(Close::BadUtf8, "not UTF-8"),
            Err(WsError::ConnectionClosed | WsError::AlreadyClosed) => Inbound::Closing,
            Err(
                WsError::Io(_)
                | WsError::Tls(_)
                | WsError::Capacity(CapacityError::TooManyHeaders)
                | WsError::Protocol(_)
                | WsError::WriteBufferFull(_)
                | WsError::AttackAttempt
                | WsError::Url(_)
                | WsError::Http(_)
                | WsError::HttpFormat(_),
            ) => Inbound::Fail(Close::Protocol, "broken frame"),
        })
    }
}

/// `{"after":ID}` or `{"after":"EPOCH.ID"}`.
fn cursor_of(text: &str) -> Option<Cursor> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum After {
        Number(u64),
        Text(String),
    }
    #[derive(serde::Deserialize)]
    struct Seek {
        after: After,
    }
    // serde would read a struct from an array as well.
    if text.len() > CURSOR_TEXT_BYTES_MAX || !text.trim_start().starts_with('{') {
        return None;
    }
    match serde_json::from_str::<Seek>(text).ok()?.after {
        After::Number(id) => Some(Cursor { epoch: None, id: i64::try_from(id).ok()? }),
        After::Text(text) => parse_cursor(&text).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_a_number_or_a_text_and_nothing_else() {
        let cursor = |epoch: Option<&str>, id| Some(Cursor { epoch: epoch.map(str::to_owned), id });
        let table = [
            (r#"{"after":0}"#, cursor(None, 0)),
            (r#" { "after" : 12 , "more" : [] } "#, cursor(None, 12)),
            (r#"{"after":"12"}"#, cursor(None, 12)),
            (r#"{"after":"e-1.12"}"#, cursor(Some("e-1"), 12)),
            (r#"{"after":-1}"#, None),
            (r#"{"after":1e3}"#, None),
            (r#"{"after":null}"#, None),
            (r#"{"after":1} x"#, None),
            (r#"{}"#, None),
            ("[1]", None),
            ("", None),
        ];
        for (text, wanted) in table {
            assert_eq!(cursor_of(text), wanted, "{text}");
        }
        assert_eq!(cursor_of(&format!("{{\"after\":1}}{}", " ".repeat(300))), None);
    }

    #[test]
    fn any_bytes_in_any_pieces_end_in_a_value_and_never_in_a_larger_reply() {
        use proptest::prelude::*;
        let piece = proptest::collection::vec(any::<u8>(), 0..40);
        // Half of the first bytes look like a frame, so that more than the header is reached.
        let head = (0x80u8..0x90, 0x80u8..0xff).prop_map(|(a, b)| vec![a, b, 1, 2, 3, 4]);
        let pieces = proptest::collection::vec(prop_oneof![piece, head], 0..20);
        proptest!(|(pieces in pieces)| {
            let mut protocol = Protocol::new(64 * 1024);
            let mut replies = Vec::new();
            let mut fed = 0;
            'all: for piece in &pieces {
                fed += piece.len();
                let mut input = &piece[..];
                while let Some(said) = protocol.next(&mut input, &mut replies) {
                    if matches!(said, Inbound::Closing | Inbound::Fail(..)) {
                        break 'all;
                    }
                }
                prop_assert!(input.is_empty());
            }
            prop_assert!(replies.len() <= fed + 32);
        });
    }
}
