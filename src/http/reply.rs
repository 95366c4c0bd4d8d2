//! What goes back to a client: status, header fields, body. The only place that knows status codes.
//!
//! Leaves framing (Content-Length, Connection, Date) to the pool and the gate. Rule a change could break: every error
//! answer is `{"error": text, "code": WORD}`, with the status that [`status`] gives its code.

use std::io::Read;

use serde::Serialize;

use crate::error::{Code, Error};

/// When a client may try again after being refused for load, in seconds: longer than a burst, shorter than a person's patience.
const RETRY_AFTER_S: &str = "1";

/// Fields that only the pool and the gate write.
const FRAMING: [&str; 4] = ["Connection", "Content-Length", "Date", "Transfer-Encoding"];

/// The body of an answer.
pub enum Body {
    /// Whole in memory.
    Bytes(Vec<u8>),
    /// Read while it is sent.
    Reader {
        /// Where the bytes come from; must give exactly `len` of them.
        reader: Box<dyn Read + Send>,
        /// Their number.
        len: u64,
    },
}

impl Body {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::Reader { len, .. } => *len,
        }
    }

    /// True without a byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An answer.
pub struct Reply {
    /// Status code.
    pub status: u16,
    /// Header fields; names and values are printable ASCII without CR or LF.
    pub headers: Vec<(&'static str, String)>,
    /// Body.
    pub body: Body,
}

impl Reply {
    /// 200 with `value` as JSON, never cached.
    #[must_use]
    pub fn json(value: &impl Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(bytes) => Self::json_bytes(200, bytes),
            Err(e) => Self::from_error(&Error::internal(format!("an answer that is no JSON: {e}"))),
        }
    }

    /// JSON that is serialized already.
    #[must_use]
    pub fn json_bytes(status: u16, bytes: Vec<u8>) -> Self {
        Self {
            status,
            headers: vec![
                ("Content-Type", "application/json".to_owned()),
                ("Cache-Control", "no-store".to_owned()),
                ("X-Content-Type-Options", "nosniff".to_owned()),
            ],
            body: Body::Bytes(bytes),
        }
    }

    /// Plain text, never cached.
    #[must_use]
    pub fn text(status: u16, text: impl Into<String>) -> Self {
        Self {
            status,
            headers: vec![
                ("Content-Type", "text/plain; charset=utf-8".to_owned()),
                ("Cache-Control", "no-store".to_owned()),
                ("X-Content-Type-Options", "nosniff".to_owned()),
            ],
            body: Body::Bytes(text.into().into_bytes()),
        }
    }

    /// A status alone.
    #[must_use]
    pub fn empty(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Body::Bytes(Vec::new()) }
    }

    /// The answer to a failure.
    #[must_use]
    pub fn from_error(error: &Error) -> Self {
        #[derive(Serialize)]
        struct Shape<'a> {
            error: &'a str,
            code: &'static str,
        }
        let bytes = serde_json::to_vec(&Shape { error: error.text(), code: error.code().word() }).unwrap_or_default();
        let mut reply = Self::json_bytes(status(error.code()), bytes);
        match error.code() {
            Code::QueueFull | Code::CannotRecord | Code::ShuttingDown | Code::Overloaded => {
                reply.headers.push(("Retry-After", RETRY_AFTER_S.to_owned()));
            }
            Code::Unauthorized => reply.headers.push(("WWW-Authenticate", "Bearer".to_owned())),
            Code::UpgradeRequired => {
                reply.headers.push(("Upgrade", "websocket".to_owned()));
                reply.headers.push(("Sec-WebSocket-Version", "13".to_owned()));
            }
            Code::BadRequest
            | Code::BadJson
            | Code::BadField
            | Code::ForbiddenHost
            | Code::ForbiddenOrigin
            | Code::UnknownPath
            | Code::MethodNotAllowed
            | Code::UnknownSession
            | Code::NotFound
            | Code::SessionGone
            | Code::ContentConflict
            | Code::ThreadSession
            | Code::NotFailed
            | Code::Busy
            | Code::LengthRequired
            | Code::TooLarge
            | Code::NotJson
            | Code::BadRange
            | Code::HeadTooLarge
            | Code::RequestTimeout
            | Code::Timeout
            | Code::Unreadable
            | Code::NotImplemented
            | Code::AgentUnavailable
            | Code::Internal => {}
        }
        reply
    }

    /// Appends its head to `out`; `connection` is the value of the Connection field, `date` of Date.
    pub fn write_head(&self, out: &mut Vec<u8>, connection: Option<&str>, date: Option<&str>) {
        use std::io::Write as _;
        // Writing to a Vec cannot fail.
        let _ = write!(out, "HTTP/1.1 {} {}\r\n", self.status, reason(self.status));
        if let Some(connection) = connection {
            let _ = write!(out, "Connection: {connection}\r\n");
        }
        if let Some(date) = date {
            let _ = write!(out, "Date: {date}\r\n");
        }
        if !matches!(self.status, 204 | 304) {
            let _ = write!(out, "Content-Length: {}\r\n", self.body.len());
        }
        for (name, value) in &self.headers {
            if FRAMING.iter().any(|framing| name.eq_ignore_ascii_case(framing)) {
                log::error!("an answer sets {name} itself: left out");
                continue;
            }
            if value.bytes().any(|b| b < 0x20 && b != b'\t' || b >= 0x7f) {
                log::error!("header {name} of an answer holds bytes that are not printable ASCII: left out");
                continue;
            }
            let _ = write!(out, "{name}: {value}\r\n");
        }
        out.extend_from_slice(b"\r\n");
    }

    /// The same answer with one more field.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

/// The status of a code.
#[must_use]
pub fn status(code: Code) -> u16 {
    match code {
        Code::BadRequest | Code::BadJson | Code::BadField => 400,
        Code::Unauthorized => 401,
        Code::ForbiddenHost | Code::ForbiddenOrigin => 403,
        Code::UnknownPath | Code::UnknownSession | Code::NotFound => 404,
        Code::MethodNotAllowed => 405,
        Code::RequestTimeout => 408,
        Code::ContentConflict | Code::ThreadSession | Code::NotFailed | Code::Busy => 409,
        Code::SessionGone => 410,
        Code::LengthRequired => 411,
        Code::TooLarge => 413,
        Code::NotJson => 415,
        Code::BadRange => 416,
        Code::UpgradeRequired => 426,
        Code::QueueFull => 429,
        Code::HeadTooLarge => 431,
        Code::Unreadable | Code::Internal => 500,
        Code::NotImplemented => 501,
        Code::CannotRecord | Code::ShuttingDown | Code::Overloaded | Code::AgentUnavailable => 503,
        Code::Timeout => 504,
    }
}

/// The reason phrase of a status.
#[must_use]
pub fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        204 => "No Content",
        206 => "Partial Content",
        303 => "See Other",
        304 => "Not Modified",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        410 => "Gone",
        411 => "Length Required",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        416 => "Range Not Satisfiable",
        426 => "Upgrade Required",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_answer_names_text_and_code_and_when_to_come_back() {
        let reply = Reply::from_error(&Error::new(Code::Overloaded, "try \"later\""));
        assert_eq!(reply.status, 503);
        assert!(reply.headers.iter().any(|(n, v)| *n == "Retry-After" && v == "1"));
        let Body::Bytes(bytes) = reply.body else { panic!("bytes") };
        assert_eq!(bytes, br#"{"error":"try \"later\"","code":"overloaded"}"#);
    }

    #[test]
    fn a_head_cannot_be_split_or_reframed_by_its_fields() {
        let reply = Reply::text(200, "abc").with("X-A", "b\r\nX-B: c").with("Content-Length", "9").with("X-C", "d");
        let mut out = Vec::new();
        reply.write_head(&mut out, Some("close"), None);
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n"));
        assert!(text.ends_with("X-C: d\r\n\r\n") && !text.contains("X-A") && !text.contains('9'));
    }

    #[test]
    fn every_code_is_an_error_status() {
        for code in Code::ALL {
            assert!((400..=504).contains(&status(*code)), "{code:?}");
        }
    }
}
