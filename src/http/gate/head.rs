//! PURE. Request heads: where one ends, and what it says, strictly.
//!
//! Leaves who may talk to `guard` and paths to `route`. Rule a change could break: two readers can never disagree about
//! where a request that passed here ends: one Content-Length of digits or one `chunked`, no bare LF, no folding, no
//! space before a colon, no second Host.

use std::mem::MaybeUninit;

use super::limits::FIELDS_MAX;
use crate::error::{Code, Error, Result};

/// What the bytes so far hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// No end of a head yet.
    Partial,
    /// A head of so many bytes, its empty line included.
    Whole(usize),
    /// A line that ends in LF alone.
    BareLf,
}

/// Looks for the empty line; `scanned` remembers how far earlier calls came, so that a head fed byte by byte is read once.
pub fn scan(bytes: &[u8], scanned: &mut usize) -> Scan {
    let mut at = *scanned;
    while let Some(found) = memchr::memchr(b'\n', &bytes[at..]) {
        let lf = at + found;
        if lf == 0 || bytes[lf - 1] != b'\r' {
            return Scan::BareLf;
        }
        if lf >= 3 && bytes[lf - 2] == b'\n' {
            *scanned = lf + 1;
            return Scan::Whole(lf + 1);
        }
        at = lf + 1;
    }
    *scanned = bytes.len();
    Scan::Partial
}

/// How the body is framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    None,
    /// So many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
}

/// What a head says; every text is ASCII.
#[derive(Debug)]
pub struct Head<'a> {
    /// The method.
    pub method: &'a str,
    /// Origin form: path and query.
    pub target: &'a str,
    /// HTTP/1.0.
    pub http10: bool,
    /// The authority the client called us by.
    pub host: &'a str,
    /// `Origin`.
    pub origin: Option<&'a str>,
    /// `Authorization`.
    pub authorization: Option<&'a str>,
    /// `Cookie`.
    pub cookie: Option<&'a str>,
    /// `Content-Type`.
    pub content_type: Option<&'a str>,
    /// `Accept`.
    pub accept: Option<&'a str>,
    /// `Accept-Encoding` takes gzip.
    pub accepts_gzip: bool,
    /// `Range`.
    pub range: Option<&'a str>,
    /// `If-None-Match`.
    pub if_none_match: Option<&'a str>,
    /// `Last-Event-ID`.
    pub last_event_id: Option<&'a str>,
    /// `Upgrade` names websocket and `Connection` names upgrade.
    pub websocket: bool,
    /// `Sec-WebSocket-Key`.
    pub websocket_key: Option<&'a str>,
    /// `Sec-WebSocket-Version`.
    pub websocket_version: Option<&'a str>,
    /// Body framing.
    pub framing: Framing,
    /// `Expect: 100-continue`.
    pub expects_continue: bool,
    /// The connection stays open afterwards.
    pub keep_alive: bool,
}

fn bad(text: &'static str) -> Error {
    Error::new(Code::BadRequest, text)
}

/// One value, or 400 for a second one.
fn once<'a>(slot: &mut Option<&'a str>, value: &'a str, twice: &'static str) -> Result<()> {
    if slot.replace(value).is_some() { Err(bad(twice)) } else { Ok(()) }
}

/// Reads one whole head (as [`scan`] delimited it).
///
/// # Errors
/// 400 for anything that is not strict HTTP/1.1 or 1.0, 413 for a length no limit allows, 431 for too many fields,
/// 501 for a coding that is not `chunked`.
pub fn parse(bytes: &[u8]) -> Result<Head<'_>> {
    let mut slots = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut []);
    match request.parse_with_uninit_headers(bytes, &mut slots) {
        Ok(httparse::Status::Complete(len)) if len == bytes.len() => {}
        Ok(_) => return Err(bad("the head does not end where its empty line is")),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(Error::new(Code::HeadTooLarge, format!("more than {FIELDS_MAX} header fields")));
        }
        Err(httparse::Error::Version) => return Err(bad("not HTTP/1.1")),
        Err(httparse::Error::HeaderName) => return Err(bad("malformed header name")),
        Err(httparse::Error::HeaderValue) => return Err(bad("malformed header value")),
        Err(httparse::Error::NewLine | httparse::Error::Status | httparse::Error::Token) => {
            return Err(bad("malformed request line or header"));
        }
    }
    let method = request.method.ok_or_else(|| bad("no method"))?;
    let target = request.path.ok_or_else(|| bad("no target"))?;
    if !target.bytes().all(|b| (0x21..0x7f).contains(&b)) {
        return Err(bad("the target holds bytes that must be escaped"));
    }
    let http10 = request.version == Some(0);

    let mut host = None;
    let mut head = Head {
        method,
        target,
        http10,
        host: "",
        origin: None,
        authorization: None,
        cookie: None,
        content_type: None,
        accept: None,
        accepts_gzip: false,
        range: None,
        if_none_match: None,
        last_event_id: None,
        websocket: false,
        websocket_key: None,
        websocket_version: None,
        framing: Framing::None,
        expects_continue: false,
        keep_alive: !http10,
    };
    let (mut length, mut coding, mut expect, mut upgrade) = (None, None, None, None);
    let (mut close, mut keep, mut connection_upgrade) = (false, false, false);
    for field in request.headers.iter() {
        let name = field.name;
        let is = |wanted: &str| name.eq_ignore_ascii_case(wanted);
        // By length first: most fields of a browser are none of ours and cost one comparison.
        let slot = match name.len() {
            4 if is("host") => &mut host,
            5 if is("range") => &mut head.range,
            6 if is("origin") => &mut head.origin,
            6 if is("cookie") => &mut head.cookie,
            6 if is("accept") => {
                // A list field may come in parts; which part asks for what does not matter to us.
                let text = ascii(field.value)?;
                if head.accept.is_none_or(|a| !a.contains("text/event-stream")) {
                    head.accept = Some(text);
                }
                continue;
            }
            6 if is("expect") => &mut expect,
            7 if is("upgrade") => &mut upgrade,
            10 if is("connection") => {
                for word in ascii(field.value)?.split(',').map(str::trim) {
                    close |= word.eq_ignore_ascii_case("close");
                    keep |= word.eq_ignore_ascii_case("keep-alive");
                    connection_upgrade |= word.eq_ignore_ascii_case("upgrade");
                }
                continue;
            }
            12 if is("content-type") => &mut head.content_type,
            13 if is("authorization") => &mut head.authorization,
            13 if is("if-none-match") => &mut head.if_none_match,
            13 if is("last-event-id") => &mut head.last_event_id,
            14 if is("content-length") => &mut length,
            15 if is("accept-encoding") => {
                head.accepts_gzip |= takes_gzip(ascii(field.value)?);
                continue;
            }
            17 if is("transfer-encoding") => &mut coding,
            17 if is("sec-websocket-key") => &mut head.websocket_key,
            21 if is("sec-websocket-version") => &mut head.websocket_version,
            _ => continue,
        };
        once(slot, ascii(field.value)?, "a header field that may come once came twice")?;
    }

    head.framing = match (length, coding) {
        (Some(_), Some(_)) => return Err(bad("both Content-Length and Transfer-Encoding")),
        (Some(length), None) => content_length(length)?,
        (None, Some(_)) if http10 => return Err(bad("Transfer-Encoding in HTTP/1.0")),
        (None, Some(coding)) if coding.eq_ignore_ascii_case("chunked") => Framing::Chunked,
        (None, Some(_)) => {
            return Err(Error::new(Code::NotImplemented, "the only transfer coding is chunked"));
        }
        (None, None) => Framing::None,
    };
    head.expects_continue = match expect {
        None => false,
        Some(value) if value.eq_ignore_ascii_case("100-continue") => !http10,
        Some(_) => return Err(bad("the only expectation is 100-continue")),
    };
    head.keep_alive = if http10 { keep && !close } else { !close };
    head.websocket = connection_upgrade
        && upgrade.is_some_and(|u| u.split(',').any(|word| word.trim().eq_ignore_ascii_case("websocket")));

    let named = host.ok_or_else(|| bad("no Host header"))?;
    head.host = named;
    if !target.starts_with('/') && target != "*" {
        // Absolute form: its authority counts; one that contradicts the Host field is somebody's trick.
        let rest = strip_scheme(target).ok_or_else(|| bad("the target is no path"))?;
        let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        if authority.contains(['?', '@']) || !authority.eq_ignore_ascii_case(named) {
            return Err(bad("the target and the Host header name different hosts"));
        }
        head.target = path;
    }
    Ok(head)
}

fn strip_scheme(target: &str) -> Option<&str> {
    let (scheme, rest) = target.split_once("://")?;
    (scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")).then_some(rest)
}

fn ascii(value: &[u8]) -> Result<&str> {
    match std::str::from_utf8(value) {
        Ok(text) if text.is_ascii() => Ok(text),
        Ok(_) | Err(_) => Err(bad("a header field we read holds bytes outside ASCII")),
    }
}

fn content_length(text: &str) -> Result<Framing> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad("Content-Length must be digits only"));
    }
    match text.parse::<u64>() {
        Ok(0) => Ok(Framing::None),
        Ok(length) => Ok(Framing::Length(length)),
        Err(_) => Err(Error::new(Code::TooLarge, "Content-Length is beyond any limit")),
    }
}

/// `gzip` in an `Accept-Encoding` list, unless it is there to be refused.
fn takes_gzip(list: &str) -> bool {
    list.split(',').any(|part| {
        let mut words = part.split(';').map(str::trim);
        let named = words.next().is_some_and(|w| w.eq_ignore_ascii_case("gzip") || w == "*");
        named && !words.any(|w| matches!(w, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
    })
}

/// True for the 16 bytes of base64 that a WebSocket client coins.
#[must_use]
pub fn is_websocket_key(key: &str) -> bool {
    let bytes = key.as_bytes();
    // 22 digits and two fillers; the last digit carries 2 bits, so its low 4 are zero.
    bytes.len() == 24
        && bytes.ends_with(b"==")
        && bytes[..22].iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/'))
        && matches!(bytes[21], b'A' | b'Q' | b'g' | b'w')
}

/// True for `application/json`, with or without parameters.
#[must_use]
pub fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> std::result::Result<Head<'_>, Code> {
        let mut scanned = 0;
        match scan(text.as_bytes(), &mut scanned) {
            Scan::Whole(len) if len == text.len() => parse(text.as_bytes()).map_err(|e| e.code()),
            Scan::Whole(_) | Scan::Partial => panic!("not one head: {text:?}"),
            Scan::BareLf => Err(Code::BadRequest),
        }
    }

    #[test]
    fn a_head_ends_at_its_empty_line_however_it_arrives() {
        let text = b"GET / HTTP/1.1\r\nHost: a\r\n\r\nmore";
        for cut in 0..text.len() {
            let mut scanned = 0;
            let first = scan(&text[..cut], &mut scanned);
            if cut < 27 {
                assert_eq!(first, Scan::Partial, "{cut}");
                assert_eq!(scan(text, &mut scanned), Scan::Whole(27), "{cut}");
            } else {
                assert_eq!(first, Scan::Whole(27));
            }
        }
        for bare in ["GET / HTTP/1.1\n", "\n", "GET / HTTP/1.1\r\nHost: a\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\n\n"] {
            assert_eq!(scan(bare.as_bytes(), &mut 0), Scan::BareLf, "{bare:?}");
        }
    }

    #[test]
    fn framing_is_one_length_of_digits_or_one_chunked() {
        let with = |fields: &str| read(&format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n")).map(|h| h.framing);
        assert_eq!(with(""), Ok(Framing::None));
        assert_eq!(with("Content-Length: 0\r\n"), Ok(Framing::None));
        assert_eq!(with("content-length:  17 \r\n"), Ok(Framing::Length(17)));
        assert_eq!(with("Content-Length: 1099511627776\r\n"), Ok(Framing::Length(1 << 40)));
        assert_eq!(with("Transfer-Encoding: Chunked\r\n"), Ok(Framing::Chunked));
        for (fields, code) in [
            ("Content-Length: 18446744073709551616\r\n", Code::TooLarge),
            ("Content-Length: 99999999999999999999999999999999\r\n", Code::TooLarge),
            ("Content-Length: -1\r\n", Code::BadRequest),
            ("Content-Length: +5\r\n", Code::BadRequest),
            ("Content-Length: 0x10\r\n", Code::BadRequest),
            ("Content-Length: abc\r\n", Code::BadRequest),
            ("Content-Length: \r\n", Code::BadRequest),
            ("Content-Length: 5, 5\r\n", Code::BadRequest),
            ("Content-Length: 5 5\r\n", Code::BadRequest),
            ("Content-Length: 5\r\nContent-Length: 5\r\n", Code::BadRequest),
            ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", Code::BadRequest),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", Code::BadRequest),
            ("Transfer-Encoding: gzip, chunked\r\n", Code::NotImplemented),
            ("Transfer-Encoding: identity\r\n", Code::NotImplemented),
            ("Transfer-Encoding: \u{b}chunked\r\n", Code::BadRequest),
            ("Content-Length : 5\r\n", Code::BadRequest),
            (" Content-Length: 5\r\n", Code::BadRequest),
            ("X: a\r\n b\r\n", Code::BadRequest),
            ("X: a\0b\r\n", Code::BadRequest),
            ("X: a\rb\r\n", Code::BadRequest),
            ("X\r\n", Code::BadRequest),
            ("Expect: tea\r\n", Code::BadRequest),
            ("Host: a\r\n", Code::BadRequest),
            ("Origin: a\r\nOrigin: b\r\n", Code::BadRequest),
        ] {
            assert_eq!(with(fields), Err(code), "{fields:?}");
        }
        let many = "X: y\r\n".repeat(FIELDS_MAX);
        assert_eq!(with(&many), Err(Code::HeadTooLarge));
        assert_eq!(with(&many[6..]), Ok(Framing::None));
    }

    #[test]
    fn request_lines_are_strict_and_absolute_targets_must_name_the_host() {
        for (line, expected) in [
            ("GET /a?b HTTP/1.1", Ok("/a?b")),
            ("GET http://a/x?y HTTP/1.1", Ok("/x?y")),
            ("GET HTTP://A HTTP/1.1", Ok("/")),
            ("GET http://b/x HTTP/1.1", Err(Code::BadRequest)),
            ("GET http://u@a/x HTTP/1.1", Err(Code::BadRequest)),
            ("GET http://a?x HTTP/1.1", Err(Code::BadRequest)),
            ("GET a:80 HTTP/1.1", Err(Code::BadRequest)),
            ("OPTIONS * HTTP/1.1", Ok("*")),
            ("GET /\u{e9} HTTP/1.1", Err(Code::BadRequest)),
            ("GET /a b HTTP/1.1", Err(Code::BadRequest)),
            ("GET  / HTTP/1.1", Err(Code::BadRequest)),
            ("GET / HTTP/2.0", Err(Code::BadRequest)),
            ("GET / HTTP/1.2", Err(Code::BadRequest)),
            ("GET /", Err(Code::BadRequest)),
            ("PRI * HTTP/2.0", Err(Code::BadRequest)),
            ("G\0T / HTTP/1.1", Err(Code::BadRequest)),
        ] {
            assert_eq!(read(&format!("{line}\r\nHost: a\r\n\r\n")).map(|h| h.target), expected, "{line}");
        }
        assert_eq!(read("GET / HTTP/1.1\r\n\r\n").map(|_| ()), Err(Code::BadRequest));
    }

    #[test]
    fn the_connection_lives_on_as_version_and_field_say() {
        for (version, field, keep) in [
            ("1.1", "", true),
            ("1.1", "Connection: close\r\n", false),
            ("1.1", "Connection: foo, Close\r\n", false),
            ("1.0", "", false),
            ("1.0", "Connection: keep-alive\r\n", true),
            ("1.0", "Connection: keep-alive, close\r\n", false),
        ] {
            let text = format!("GET / HTTP/{version}\r\nHost: a\r\n{field}\r\n");
            assert_eq!(read(&text).unwrap().keep_alive, keep, "{text:?}");
        }
    }

    #[test]
    fn websocket_keys_are_sixteen_bytes_of_base64() {
        assert!(is_websocket_key("dGhlIHNhbXBsZSBub25jZQ=="));
        for bad in ["", "dGhlIHNhbXBsZSBub25jZQ=", "dGhlIHNhbXBsZSBub25jZR==", "dGhlIHNhbXBsZSBub25j!Q=="] {
            assert!(!is_websocket_key(bad), "{bad}");
        }
        assert!(is_json("application/json; charset=utf-8") && is_json("Application/JSON"));
        assert!(!is_json("text/plain") && !is_json("application/jsonx") && !is_json(""));
    }

    #[test]
    fn whatever_the_bytes_a_head_has_one_end_and_one_framing() {
        use proptest::prelude::*;
        let tokens = proptest::sample::select(vec![
            "GET ",
            "POST ",
            "/",
            "http://a/",
            " HTTP/1.1\r\n",
            " HTTP/1.0\r\n",
            "\r\n",
            "\n",
            "\r",
            "Host: a\r\n",
            "Content-Length: 5\r\n",
            "content-length:7\r\n",
            "Transfer-Encoding: chunked\r\n",
            "Connection: close\r\n",
            "X",
            ":",
            " ",
            "\t",
            "\0",
            "\u{e9}",
        ]);
        let heads = proptest::collection::vec(tokens, 0..12).prop_map(|words| {
            // Half of them begin well, or nothing would ever pass.
            let begin = if words.len() % 2 == 0 { "GET / HTTP/1.1\r\nHost: a\r\n" } else { "" };
            format!("{begin}{}", words.concat())
        });
        let config = ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() };
        proptest::test_runner::TestRunner::new(config)
            .run(&heads, |text| {
                let bytes = text.as_bytes();
                let whole = scan(bytes, &mut 0);
                let mut at = 0;
                let one_by_one = (1..=bytes.len()).map(|n| scan(&bytes[..n], &mut at)).find(|s| *s != Scan::Partial);
                prop_assert_eq!(one_by_one.unwrap_or(Scan::Partial), whole);
                let Scan::Whole(len) = whole else {
                    return Ok(());
                };
                let Ok(head) = parse(&bytes[..len]) else {
                    return Ok(());
                };
                let lower = text[..len].to_ascii_lowercase();
                let lengths = lower.matches("\r\ncontent-length:").count();
                let codings = lower.matches("\r\ntransfer-encoding:").count();
                let expected = match head.framing {
                    Framing::Length(_) => (1, 0),
                    Framing::Chunked => (0, 1),
                    Framing::None => (0, 0),
                };
                prop_assert_eq!((lengths, codings), expected);
                prop_assert!(!lower.contains('\0') && !text[..len].replace("\r\n", "").contains(['\r', '\n']));
                Ok(())
            })
            .unwrap();
    }
}
