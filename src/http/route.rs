//! PURE. The whole URL map on one page: method and target to a [`Route`] with typed arguments.
//!
//! Leaves bodies to the handlers and who may ask to `guard`. Rule a change could break: what is accepted here is safe to
//! use as it is: ids keep to their alphabet, numbers to their range, and a decoded path holds no `/`, NUL or control byte
//! that the raw one did not show.

use std::borrow::Cow;

use crate::error::{Code, Error};
use crate::ids::{MessageUuid, SessionId, TurnId};
use crate::transcript::media::MediaRef;
pub use crate::transcript::page::Window;

/// Most entries that one page of history may hold (WIRE).
pub const PAGE_ENTRIES_MAX: usize = 5000;
/// Entries in a page when the client names no number (WIRE).
pub const PAGE_ENTRIES_DEFAULT: usize = 200;
/// Messages of a person that a tail holds at least, when the client names no number (WIRE).
pub const REAL_USER_MESSAGES_DEFAULT: usize = 2;
/// Longest wait that `turns?wait=` may ask for, in milliseconds: below what proxies cut, and the lane is shared.
pub const TURNS_WAIT_MS_MAX: u64 = 60_000;
/// Most photos of a message that can be asked for by number.
const PHOTO_NUMBER_MAX: u64 = 9_999;

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// Accept a message.
    Send,
    /// A page of a conversation.
    History {
        /// Which conversation.
        session: SessionId,
        /// Which part of it.
        window: Window,
    },
    /// Everything a page needs to start.
    Bootstrap {
        /// Which conversation; none is the most active one.
        session: Option<SessionId>,
        /// How many entries.
        tail: usize,
    },
    /// The list of conversations.
    Sessions,
    /// Phase of one conversation.
    Status {
        /// Which.
        session: SessionId,
    },
    /// End the turn in flight.
    Interrupt,
    /// Close the run and clear the queue.
    Stop,
    /// Close the run and go on in a fresh one.
    Restart,
    /// Stop, then forget the saved session id.
    Reset,
    /// A photo of a message that is not in the transcript yet.
    PendingImage {
        /// Which message.
        message: MessageUuid,
        /// Its n-th photo, from 0.
        n: usize,
    },
    /// Queue a failed message again.
    Retry,
    /// Drop a failed message.
    Discard,
    /// The features of one conversation.
    GetFeatures {
        /// Which.
        session: SessionId,
    },
    /// Set one feature.
    SetFeature,
    /// Frames of a turn, with a wait for more.
    Turns {
        /// Which turn.
        turn: TurnId,
        /// The last frame the client has.
        after: u64,
        /// How long to wait for more, in milliseconds.
        wait_ms: u64,
    },
    /// A photo of a transcript.
    Media {
        /// Which.
        media: MediaRef,
        /// Only its head.
        head: bool,
    },
    /// A message of an outside channel; answered after its turn.
    ThreadsSend,
    /// The list of threads.
    Threads,
    /// The event stream; the gate hands it to `push`.
    Events,
    /// The dump; answered by the gate.
    DebugThreads,
    /// Alive; answered by the gate.
    Healthz,
    /// Fit to serve; answered by the gate.
    Readyz,
    /// Numbers for Prometheus; answered by the gate.
    Metrics,
    /// The page that turns a one-time code into a cookie; answered by the gate.
    Login,
    /// A file of the web page.
    Asset {
        /// `/` or `/name.ext`.
        path: String,
    },
}

/// Why a request has no route; `allow` is the value of the Allow header of a 405.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// The answer.
    pub error: Error,
    /// The methods that the path knows.
    pub allow: Option<&'static str>,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, allow: None }
    }
}

/// Which part of the house does the work of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// A worker, for a short time.
    Work,
    /// A worker whose answer may be long, cold or slow to read; some workers are kept out of its reach.
    Bulk,
    /// A worker that may wait for a turn; these are bounded on their own.
    Wait,
    /// The gate's own thread.
    Local,
    /// The thread of the event stream.
    Push,
}

macro_rules! classes {
    ($($name:ident = $text:literal),* $(,)?) => {
        /// A route without its arguments: the label of metrics and the index of per-route limits.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Class { $(#[doc = $text] $name),* }

        impl Class {
            /// Every class.
            pub const ALL: &'static [Class] = &[$(Class::$name),*];

            /// The label.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Class::$name => $text),* }
            }
        }
    };
}

classes! {
    Send = "send", History = "history", Bootstrap = "bootstrap", Sessions = "sessions", Status = "status",
    Interrupt = "interrupt", Stop = "stop", Restart = "restart", Reset = "reset", PendingImage = "pending_image",
    Retry = "retry", Discard = "discard", GetFeatures = "get_features", SetFeature = "set_feature", Turns = "turns",
    Media = "media", ThreadsSend = "threads_send", Threads = "threads", Events = "events",
    DebugThreads = "debug_threads", Healthz = "healthz", Readyz = "readyz", Metrics = "metrics", Login = "login",
    Asset = "asset", Unknown = "unknown",
}

impl Route {
    /// The conversation that its address names.
    #[must_use]
    pub fn session(&self) -> Option<&SessionId> {
        match self {
            Route::History { session, .. } | Route::Status { session } | Route::GetFeatures { session } => {
                Some(session)
            }
            Route::Bootstrap { session, .. } => session.as_ref(),
            Route::Media { media, .. } => Some(&media.session),
            Route::Send
            | Route::Sessions
            | Route::Interrupt
            | Route::Stop
            | Route::Restart
            | Route::Reset
            | Route::PendingImage { .. }
            | Route::Retry
            | Route::Discard
            | Route::SetFeature
            | Route::Turns { .. }
            | Route::ThreadsSend
            | Route::Threads
            | Route::Events
            | Route::DebugThreads
            | Route::Healthz
            | Route::Readyz
            | Route::Metrics
            | Route::Login
            | Route::Asset { .. } => None,
        }
    }

    /// The route without its arguments.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Route::Send => Class::Send,
            Route::History { .. } => Class::History,
            Route::Bootstrap { .. } => Class::Bootstrap,
            Route::Sessions => Class::Sessions,
            Route::Status { .. } => Class::Status,
            Route::Interrupt => Class::Interrupt,
            Route::Stop => Class::Stop,
            Route::Restart => Class::Restart,
            Route::Reset => Class::Reset,
            Route::PendingImage { .. } => Class::PendingImage,
            Route::Retry => Class::Retry,
            Route::Discard => Class::Discard,
            Route::GetFeatures { .. } => Class::GetFeatures,
            Route::SetFeature => Class::SetFeature,
            Route::Turns { .. } => Class::Turns,
            Route::Media { .. } => Class::Media,
            Route::ThreadsSend => Class::ThreadsSend,
            Route::Threads => Class::Threads,
            Route::Events => Class::Events,
            Route::DebugThreads => Class::DebugThreads,
            Route::Healthz => Class::Healthz,
            Route::Readyz => Class::Readyz,
            Route::Metrics => Class::Metrics,
            Route::Login => Class::Login,
            Route::Asset { .. } => Class::Asset,
        }
    }

    /// Who does the work.
    #[must_use]
    pub fn lane(&self) -> Lane {
        match self {
            Route::Send
            | Route::Sessions
            | Route::Status { .. }
            | Route::Interrupt
            | Route::Stop
            | Route::Restart
            | Route::Reset
            | Route::Retry
            | Route::Discard
            | Route::GetFeatures { .. }
            | Route::SetFeature
            | Route::Threads
            | Route::Asset { .. } => Lane::Work,
            Route::History { .. } | Route::Bootstrap { .. } | Route::PendingImage { .. } | Route::Media { .. } => {
                Lane::Bulk
            }
            Route::Turns { wait_ms, .. } => {
                if *wait_ms == 0 {
                    Lane::Work
                } else {
                    Lane::Wait
                }
            }
            Route::ThreadsSend => Lane::Wait,
            Route::DebugThreads | Route::Healthz | Route::Readyz | Route::Metrics | Route::Login => Lane::Local,
            Route::Events => Lane::Push,
        }
    }
}

const GET: &str = "GET, HEAD";
const POST: &str = "POST";
const GET_POST: &str = "GET, HEAD, POST";

/// Finds the route of a request line. `target` is in origin form (`/path?query`).
///
/// # Errors
/// 400 for a malformed target or argument, 404 for an unknown path, 405 for a method that the path does not know.
pub fn parse(method: &str, target: &str) -> Result<Route, Refusal> {
    let (raw_path, query) = target.split_once('?').unwrap_or((target, ""));
    let path = decode_path(raw_path)?;
    let path = path.strip_prefix('/').ok_or_else(|| bad("the target must start with /"))?;
    let mut parts = [""; 6];
    let mut count = 0;
    for part in path.split('/') {
        if count == parts.len() {
            return Err(unknown());
        }
        parts[count] = part;
        count += 1;
    }
    let get = || {
        if method == "GET" || method == "HEAD" { Ok(()) } else { Err(not_allowed(GET)) }
    };
    let post = |route: Route| {
        if method == "POST" { Ok(route) } else { Err(not_allowed(POST)) }
    };
    match &parts[..count] {
        ["api", "chat", "send"] => post(Route::Send),
        ["api", "chat", "history"] => {
            get()?;
            let q = Query::parse(query)?;
            Ok(Route::History { session: session(&q)?, window: window(&q)? })
        }
        ["api", "chat", "bootstrap"] => {
            get()?;
            let q = Query::parse(query)?;
            let of = if q.get("session")?.is_some() { Some(session(&q)?) } else { None };
            let tail = q.count("tail", PAGE_ENTRIES_MAX)?.unwrap_or(PAGE_ENTRIES_DEFAULT);
            Ok(Route::Bootstrap { session: of, tail })
        }
        ["api", "chat", "sessions"] => get().map(|()| Route::Sessions),
        ["api", "chat", "status"] => {
            get()?;
            Ok(Route::Status { session: session(&Query::parse(query)?)? })
        }
        ["api", "chat", "interrupt"] => post(Route::Interrupt),
        ["api", "chat", "stop"] => post(Route::Stop),
        ["api", "chat", "restart"] => post(Route::Restart),
        ["api", "chat", "reset"] => post(Route::Reset),
        ["api", "chat", "pending", "retry"] => post(Route::Retry),
        ["api", "chat", "pending", "discard"] => post(Route::Discard),
        ["api", "chat", "pending", message, n] => {
            get()?;
            let message = MessageUuid::parse(message).map_err(|e| field("messageUuid", e))?;
            Ok(Route::PendingImage { message, n: index(n)? })
        }
        ["api", "chat", "features"] => match method {
            "GET" | "HEAD" => Ok(Route::GetFeatures { session: session(&Query::parse(query)?)? }),
            "POST" => Ok(Route::SetFeature),
            _ => Err(not_allowed(GET_POST)),
        },
        ["api", "chat", "turns", turn] => {
            get()?;
            let turn = TurnId::parse(turn).map_err(|e| field("turnId", e))?;
            let q = Query::parse(query)?;
            let after = q.number("after", u64::MAX)?.unwrap_or(0);
            let wait_ms = q.number("wait", TURNS_WAIT_MS_MAX)?.unwrap_or(0);
            Ok(Route::Turns { turn, after, wait_ms })
        }
        ["api", "session-media", rest @ ..] if rest.len() != 3 => {
            get()?;
            Err(bad("a photo is named by <sessionId>/<entryUuid>/<index>").into())
        }
        ["api", "session-media", of, entry, n] => {
            get()?;
            let of = SessionId::parse(of).map_err(|e| field("sessionId", e))?;
            if !crate::ids::is_plain_id(entry) {
                return Err(bad("entryUuid is 1 to 64 of A-Z a-z 0-9 _ -").into());
            }
            let media = MediaRef { session: of, entry: (*entry).to_owned(), index: index(n)? };
            Ok(Route::Media { media, head: method == "HEAD" })
        }
        ["api", "threads", "send"] => post(Route::ThreadsSend),
        ["api", "threads"] => get().map(|()| Route::Threads),
        ["api", "events"] => {
            if method != "GET" {
                return Err(not_allowed("GET"));
            }
            events_after(query)?;
            Ok(Route::Events)
        }
        ["api", "debug", "threads"] => get().map(|()| Route::DebugThreads),
        ["healthz"] => get().map(|()| Route::Healthz),
        ["readyz"] => get().map(|()| Route::Readyz),
        ["metrics"] => get().map(|()| Route::Metrics),
        ["login"] => match method {
            "GET" | "HEAD" | "POST" => Ok(Route::Login),
            _ => Err(not_allowed(GET_POST)),
        },
        [""] => get().map(|()| Route::Asset { path: "/".to_owned() }),
        [name] | ["assets", name] if is_file_name(name) => get().map(|()| Route::Asset { path: format!("/{path}") }),
        _ => Err(unknown()),
    }
}

/// The `after` of an event stream's query, as written; the caller checks that it parses.
///
/// # Errors
/// 400 when the query is malformed or names it twice.
pub fn events_after(query: &str) -> Result<Option<String>, Error> {
    Ok(Query::parse(query)?.get("after")?.map(Cow::into_owned))
}

/// A name with an extension that cannot leave its directory.
fn is_file_name(name: &str) -> bool {
    name.len() <= 64
        && !name.starts_with('.')
        && name.contains('.')
        && !name.contains("..")
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

fn bad(text: impl Into<String>) -> Error {
    Error::new(Code::BadRequest, text)
}

fn field(name: &str, why: impl std::fmt::Display) -> Error {
    Error::new(Code::BadField, format!("{name}: {why}"))
}

fn unknown() -> Refusal {
    Error::new(Code::UnknownPath, "no such path").into()
}

fn not_allowed(allow: &'static str) -> Refusal {
    let error = Error::new(Code::MethodNotAllowed, format!("this path answers to {allow}"));
    Refusal { error, allow: Some(allow) }
}

fn session(q: &Query<'_>) -> Result<SessionId, Error> {
    let text = q.get("session")?.ok_or_else(|| field("session", "missing"))?;
    SessionId::parse(&text).map_err(|e| field("session", e))
}

fn window(q: &Query<'_>) -> Result<Window, Error> {
    let offset = q.number("offset", u64::MAX)?;
    let limit = q.count("limit", PAGE_ENTRIES_MAX)?;
    let tail = q.count("tail", PAGE_ENTRIES_MAX)?;
    let least = q.count("minRealUserMessages", PAGE_ENTRIES_MAX)?;
    if offset.is_some() || limit.is_some() {
        if tail.is_some() || least.is_some() {
            return Err(field("tail", "either tail or offset and limit"));
        }
        return Ok(Window::Page { offset: offset.unwrap_or(0), limit: limit.unwrap_or(PAGE_ENTRIES_DEFAULT) });
    }
    Ok(Window::Tail {
        tail: tail.unwrap_or(PAGE_ENTRIES_DEFAULT),
        min_real_user_messages: least.unwrap_or(REAL_USER_MESSAGES_DEFAULT),
    })
}

/// The index of a photo: digits only, no sign, no leading zero but "0" itself (one photo has one address).
fn index(text: &str) -> Result<usize, Error> {
    if text.len() > 1 && text.starts_with('0') {
        return Err(field("index", "no leading zero"));
    }
    let n = digits("index", text, PHOTO_NUMBER_MAX)?;
    Ok(usize::try_from(n).unwrap_or(usize::MAX))
}

fn digits(name: &str, text: &str, max: u64) -> Result<u64, Error> {
    let wrong = || field(name, format!("a number from 0 to {max}"));
    if text.is_empty() || text.len() > 20 || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    text.parse().ok().filter(|n| *n <= max).ok_or_else(wrong)
}

/// The decoded path; an escape of `/`, NUL or any control byte, or one that is no UTF-8, is 400.
fn decode_path(raw: &str) -> Result<Cow<'_, str>, Error> {
    if raw.contains('#') {
        return Err(bad("the target holds a fragment"));
    }
    decode(raw, false, |b| b == b'/' || b < 0x20 || b == 0x7f)
}

fn decode(raw: &str, plus_is_space: bool, refuse: impl Fn(u8) -> bool) -> Result<Cow<'_, str>, Error> {
    if !raw.bytes().any(|b| b == b'%' || (plus_is_space && b == b'+')) {
        return Ok(Cow::Borrowed(raw));
    }
    let mut out = Vec::with_capacity(raw.len());
    let mut rest = raw.as_bytes();
    while let Some((&b, after)) = rest.split_first() {
        rest = after;
        if b == b'+' && plus_is_space {
            out.push(b' ');
        } else if b == b'%' {
            let (Some(high), Some(low)) = (rest.first().and_then(hex), rest.get(1).and_then(hex)) else {
                return Err(bad("a % that two hex digits do not follow"));
            };
            let byte = high << 4 | low;
            if refuse(byte) {
                return Err(bad(format!("%{byte:02X} has no place here")));
            }
            out.push(byte);
            rest = &rest[2..];
        } else {
            out.push(b);
        }
    }
    String::from_utf8(out).map(Cow::Owned).map_err(|_| bad("escapes that are not UTF-8"))
}

fn hex(b: &u8) -> Option<u8> {
    match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        b'A'..=b'F' => Some(b - b'A' + 10),
        _ => None,
    }
}

/// A query, decoded when asked: unknown names are ignored, a known name given twice is 400.
struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    fn parse(raw: &'a str) -> Result<Self, Error> {
        if raw.contains('#') {
            return Err(bad("the target holds a fragment"));
        }
        Ok(Self(raw))
    }

    fn get(&self, name: &str) -> Result<Option<Cow<'a, str>>, Error> {
        let mut found = None;
        for pair in self.0.split('&').filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            if decode(key, true, |b| b == 0)? != name {
                continue;
            }
            if found.is_some() {
                return Err(field(name, "given twice"));
            }
            found = Some(decode(value, true, |b| b < 0x20 || b == 0x7f)?);
        }
        Ok(found)
    }

    fn number(&self, name: &str, max: u64) -> Result<Option<u64>, Error> {
        self.get(name)?.map(|text| digits(name, &text, max)).transpose()
    }

    fn count(&self, name: &str, max: usize) -> Result<Option<usize>, Error> {
        Ok(self.number(name, max as u64)?.map(|n| usize::try_from(n).unwrap_or(max)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(line: &str) -> Result<Route, (Code, Option<&'static str>)> {
        let (method, target) = line.split_once(' ').unwrap();
        parse(method, target).map_err(|r| (r.error.code(), r.allow))
    }

    #[test]
    fn every_path_of_the_map_finds_its_route() {
        let s = SessionId::parse("s-1").unwrap();
        let m = MessageUuid::parse("m_1").unwrap();
        let tail = |tail, least| Window::Tail { tail, min_real_user_messages: least };
        let history = |window| Route::History { session: s.clone(), window };
        let media =
            |head| Route::Media { media: MediaRef { session: s.clone(), entry: "at-12".to_owned(), index: 3 }, head };
        let turn = |after, wait_ms| Route::Turns { turn: TurnId::parse("t").unwrap(), after, wait_ms };
        let asset = |path: &str| Route::Asset { path: path.to_owned() };
        for (line, expected) in [
            ("POST /api/chat/send", Route::Send),
            ("GET /api/chat/history?session=s-1", history(tail(200, 2))),
            ("GET /api/chat/history?session=s%2D1&tail=5&minRealUserMessages=0", history(tail(5, 0))),
            ("GET /api/chat/history?offset=7&limit=9&session=s-1", history(Window::Page { offset: 7, limit: 9 })),
            ("GET /api/chat/history?session=s-1&offset=7&other=%00", history(Window::Page { offset: 7, limit: 200 })),
            ("GET /api/chat/bootstrap", Route::Bootstrap { session: None, tail: 200 }),
            ("GET /api/chat/bootstrap?session=s-1&tail=1", Route::Bootstrap { session: Some(s.clone()), tail: 1 }),
            ("GET /api/chat/sessions", Route::Sessions),
            ("GET /api/chat/status?session=s-1", Route::Status { session: s.clone() }),
            ("POST /api/chat/interrupt", Route::Interrupt),
            ("POST /api/chat/stop", Route::Stop),
            ("POST /api/chat/restart", Route::Restart),
            ("POST /api/chat/reset", Route::Reset),
            ("GET /api/chat/pending/m_1/2", Route::PendingImage { message: m, n: 2 }),
            ("POST /api/chat/pending/retry", Route::Retry),
            ("POST /api/chat/pending/discard", Route::Discard),
            ("GET /api/chat/features?session=s-1", Route::GetFeatures { session: s.clone() }),
            ("POST /api/chat/features", Route::SetFeature),
            ("GET /api/chat/turns/t", turn(0, 0)),
            ("GET /api/chat/turns/t?after=18446744073709551615&wait=60000", turn(u64::MAX, 60_000)),
            ("GET /api/session-media/s-1/at-12/3", media(false)),
            ("HEAD /api/session-media/s-1/at-12/3", media(true)),
            ("POST /api/threads/send", Route::ThreadsSend),
            ("GET /api/threads", Route::Threads),
            ("GET /api/events?after=5", Route::Events),
            ("GET /api/debug/threads", Route::DebugThreads),
            ("GET /healthz", Route::Healthz),
            ("HEAD /readyz", Route::Readyz),
            ("GET /metrics", Route::Metrics),
            ("GET /login", Route::Login),
            ("POST /login", Route::Login),
            ("GET /", asset("/")),
            ("GET /?x=1", asset("/")),
            ("GET /app.js", asset("/app.js")),
        ] {
            assert_eq!(route(line), Ok(expected), "{line}");
        }
    }

    #[test]
    fn wrong_methods_paths_and_arguments_get_their_codes() {
        let not = |allow| (Code::MethodNotAllowed, Some(allow));
        for (line, expected) in [
            ("GET /api/chat/send", not("POST")),
            ("OPTIONS /api/chat/send", not("POST")),
            ("DELETE /api/chat/history?session=s", not("GET, HEAD")),
            ("PUT /api/chat/features", not("GET, HEAD, POST")),
            ("POST /", not("GET, HEAD")),
            ("POST /app.js", not("GET, HEAD")),
            ("POST /api/events", not("GET")),
            ("get /", not("GET, HEAD")),
            ("GET /nothing", (Code::UnknownPath, None)),
            ("POST /nothing", (Code::UnknownPath, None)),
            ("GET //", (Code::UnknownPath, None)),
            ("GET /api/chat/send/", (Code::UnknownPath, None)),
            ("GET /.probe", (Code::UnknownPath, None)),
            ("GET /../app.js", (Code::UnknownPath, None)),
            ("GET /a/b/c/d/e/f/g", (Code::UnknownPath, None)),
            ("GET /%00", (Code::BadRequest, None)),
            ("GET /api%2Fchat", (Code::BadRequest, None)),
            ("GET /%", (Code::BadRequest, None)),
            ("GET /%4", (Code::BadRequest, None)),
            ("GET /%zz", (Code::BadRequest, None)),
            ("GET /%ff", (Code::BadRequest, None)),
            ("GET /#x", (Code::BadRequest, None)),
            ("GET *", (Code::BadRequest, None)),
            ("GET host:80", (Code::BadRequest, None)),
            ("GET /api/chat/history", (Code::BadField, None)),
            ("GET /api/chat/history?session=", (Code::BadField, None)),
            ("GET /api/chat/history?session=a.b", (Code::BadField, None)),
            ("GET /api/chat/history?session=a%2Fb", (Code::BadField, None)),
            ("GET /api/chat/history?session=a%00b", (Code::BadRequest, None)),
            ("GET /api/chat/history?session=a&session=a", (Code::BadField, None)),
            ("GET /api/chat/history?session=a&tail=5001", (Code::BadField, None)),
            ("GET /api/chat/history?session=a&tail=-1", (Code::BadField, None)),
            ("GET /api/chat/history?session=a&tail=", (Code::BadField, None)),
            ("GET /api/chat/history?session=a&offset=1&tail=2", (Code::BadField, None)),
            ("GET /api/chat/turns/t?wait=60001", (Code::BadField, None)),
            ("GET /api/session-media/s/../0", (Code::BadRequest, None)),
            ("GET /api/session-media/s/e/01", (Code::BadField, None)),
            ("GET /api/session-media/s/e/-1", (Code::BadField, None)),
            ("GET /api/session-media/s/e/10000", (Code::BadField, None)),
            ("GET /api/session-media/s/%00/0", (Code::BadRequest, None)),
            ("GET /api/session-media/s/e%2F/0", (Code::BadRequest, None)),
            ("GET /api/chat/pending/a.b/0", (Code::BadField, None)),
        ] {
            assert_eq!(route(line), Err(expected), "{line}");
        }
    }

    #[test]
    fn only_routes_that_wait_for_a_turn_ride_the_waiting_lane() {
        assert_eq!(route("GET /api/chat/turns/t").unwrap().lane(), Lane::Work);
        assert_eq!(route("GET /api/chat/turns/t?wait=1").unwrap().lane(), Lane::Wait);
        assert_eq!(route("POST /api/threads/send").unwrap().lane(), Lane::Wait);
        assert_eq!(route("GET /api/session-media/s/e/0").unwrap().lane(), Lane::Bulk);
    }
}
