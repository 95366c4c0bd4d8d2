//! (room being built)

/// A client's socket.
#[derive(Debug)]
pub enum Stream {
    /// Over the port.
    Tcp(std::net::TcpStream),
    /// Over `chat.sock`.
    Unix(std::os::unix::net::UnixStream),
}

/// How the client reads events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpgradeKind {
    /// WebSocket with this `Sec-WebSocket-Key`.
    WebSocket {
        /// The key, checked to be 16 bytes of base64.
        key: String,
    },
    /// Server-Sent Events.
    Sse,
}

/// A vetted request for the event stream, with its socket.
#[derive(Debug)]
pub struct Upgrade {
    /// The socket, non-blocking.
    pub stream: Stream,
    /// How.
    pub kind: UpgradeKind,
    /// The raw cursor, checked to parse.
    pub cursor: Option<String>,
    /// Bytes that came after the request head.
    pub leftover: Vec<u8>,
    /// Who, for the log.
    pub peer: String,
}
