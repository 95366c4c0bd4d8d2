//! The tiny_http pool: workers that turn vetted requests into replies. The only file that names tiny_http.
//!
//! Leaves vetting, deadlines and slow clients to the gate, its only client: heads come from it over the private socket,
//! bodies and answers go through [`Exchanges`]. Rules a change could break: a handler never owns the request; a panic in
//! one is a 500 and its worker lives on; nothing is written to the socket but the answer to the probe.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::gate::body::Store;
use super::gate::exchange::{Answering, Exchanges, Listening, PIPE_BYTES_MAX};
use super::gate::place::Place;
use super::reply::{Body, Reply};
use super::route::{self, Route};
use crate::error::{Error, Result};
use crate::threads::{self, Doing, Name, OnPanic, Thread};

/// Where the gate asks whether a fresh connection is served; no client can, the route map does not know it.
pub const PROBE_PATH: &str = "/.probe";
/// The field with the number of the exchange.
pub const EXCHANGE_FIELD: &str = "X";
/// Bytes of a long body per piece: few hand-overs, little memory.
const PIECE_BYTES: usize = PIPE_BYTES_MAX;

/// A vetted request.
#[derive(Debug)]
pub struct Incoming {
    /// What it asks for.
    pub route: Route,
    /// `Range`, as sent.
    pub range: Option<String>,
    /// `If-None-Match`, as sent.
    pub if_none_match: Option<String>,
    /// The client takes gzip.
    pub accepts_gzip: bool,
    /// The whole body.
    pub body: Vec<u8>,
}

/// The routes.
pub trait Handler: Send + Sync {
    /// Answers one request; may block.
    ///
    /// # Errors
    /// What went wrong; it becomes the error answer.
    fn answer(&self, incoming: Incoming) -> Result<Reply>;
}

/// What a pool needs to know.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Its private socket, `<box>/.beebox/http.sock`.
    pub socket: PathBuf,
    /// Workers of ordinary routes.
    pub workers: usize,
    /// Workers beside them for routes that wait for a turn.
    pub waiting: usize,
}

/// A running pool.
pub struct Server {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
    place: Place,
}

struct Shared {
    http: tiny_http::Server,
    handler: Arc<dyn Handler>,
    exchanges: Arc<Exchanges>,
    closing: AtomicBool,
}

/// Starts the pool. `exchanges` is what it shares with the gate.
///
/// # Errors
/// When the socket cannot be bound or a thread not be started.
pub fn start(config: &ServerConfig, handler: Arc<dyn Handler>, exchanges: Arc<Exchanges>) -> Result<Server> {
    let place = Place::new(&config.socket)?;
    place.clear()?;
    let http = build(place.path())?;
    place.make_private()?;
    let shared = Arc::new(Shared { http, handler, exchanges, closing: AtomicBool::new(false) });
    let mut threads = Vec::new();
    for number in 0..config.workers + config.waiting {
        let shared = Arc::clone(&shared);
        let name = Name::numbered("http", number);
        threads.push(threads::spawn(name, threads::WORK_STACK_BYTES, OnPanic::Contain, move || work(&shared))?);
    }
    Ok(Server { shared, threads, place })
}

/// tiny_http's own threads take the name of the thread that builds it.
fn build(path: &Path) -> Result<tiny_http::Server> {
    let (give, take) = crate::sync::bounded(1);
    let path = path.to_owned();
    let name = const { Name::fixed("http-accept") };
    let builder = threads::spawn(name, threads::SMALL_STACK_BYTES, OnPanic::Contain, move || {
        let _ = give.send(tiny_http::Server::http_unix(&path).map_err(|e| e.to_string()));
    })?;
    let built = take.recv().map_err(|_| Error::internal("the pool's accept thread ended before it began"))?;
    let _ = builder.join_within(Duration::from_secs(1));
    built.map_err(|e| Error::internal(format!("the pool's socket: {e}")))
}

impl Server {
    /// Ends the workers once they have answered what they are at; true if all ended within `limit`.
    #[must_use]
    pub fn shutdown(self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        self.shared.closing.store(true, Ordering::Release);
        self.shared.exchanges.close();
        for _ in &self.threads {
            self.shared.http.unblock();
        }
        let mut ended = true;
        for thread in &self.threads {
            ended &= thread.join_within(until.saturating_duration_since(Instant::now()));
        }
        drop(self.shared);
        let _ = self.place.clear();
        ended
    }
}

fn work(shared: &Shared) {
    while !shared.closing.load(Ordering::Acquire) {
        let received = {
            let _at = threads::doing(Doing::WaitRequest);
            let Some(listening) = shared.exchanges.listen() else {
                return;
            };
            shared.http.recv().map(|request| (listening, request))
        };
        match received {
            // Handlers are contained inside; this holds for our own code around them, so that the count of workers
            // never falls. The request that was lost with it ends at the gate's deadline.
            Ok((listening, request)) => {
                if catch_unwind(AssertUnwindSafe(|| serve(shared, listening, request))).is_err() {
                    log::error!("a worker panicked outside its handler and goes on");
                }
            }
            Err(_) if shared.closing.load(Ordering::Acquire) => {}
            // tiny_http accepts no more after this; the connections that the gate has go on.
            Err(e) => log::error!("the pool can take no further connection of the gate: {e}"),
        }
    }
}

fn serve(shared: &Shared, listening: Listening<'_>, request: tiny_http::Request) {
    let asked = Asked::of(&request);
    let mut writer = request.into_writer();
    if asked.url == PROBE_PATH {
        let mut out = Vec::new();
        with_date(|date| Reply::empty(204).write_head(&mut out, None, Some(date)));
        let _ = writer.write_all(&out).and_then(|()| writer.flush());
        return;
    }
    drop(writer);
    // None: the gate took the request back, and gives it to another worker if its client still waits.
    let Some((body, answering)) = asked.number.and_then(|number| listening.take_up(number)) else {
        return;
    };
    let head_only = asked.method == "HEAD";
    let route = route::parse(&asked.method, &asked.url).map_err(|refusal| refusal.error);
    let _for = route.as_ref().ok().and_then(Route::session).map(threads::at_work_for);
    // The handler and the reader of its reply are foreign code: what they leave half done is dropped with them.
    let reply = catch_unwind(AssertUnwindSafe(|| answer(shared, route?, asked, body))).unwrap_or_else(|_| {
        log::error!("a handler panicked");
        Err(Error::internal("a fault of ours; it is in the log"))
    });
    let reply = reply.unwrap_or_else(|e| {
        log_failure(&e);
        Reply::from_error(&e)
    });
    let given = catch_unwind(AssertUnwindSafe(|| give_reply(answering, reply, head_only)));
    if let Ok(Err(e)) = given {
        log::warn!("an answer ended early: {e}");
    }
}

fn log_failure(e: &Error) {
    if super::reply::status(e.code()) >= 500 {
        log::warn!("{}: {e}", e.code().word());
    } else {
        log::debug!("{}: {e}", e.code().word());
    }
}

/// What a request says, without its hold on the connection: tiny_http writes an answer of its own for a request that is
/// dropped whole.
struct Asked {
    method: String,
    url: String,
    number: Option<u64>,
    range: Option<String>,
    if_none_match: Option<String>,
    accepts_gzip: bool,
}

impl Asked {
    fn of(request: &tiny_http::Request) -> Self {
        let field = |name: &'static str| {
            request.headers().iter().find(|h| h.field.equiv(name)).map(|h| h.value.as_str().to_owned())
        };
        Self {
            method: request.method().as_str().to_owned(),
            url: request.url().to_owned(),
            number: field(EXCHANGE_FIELD).and_then(|n| n.parse().ok()),
            range: field("Range"),
            if_none_match: field("If-None-Match"),
            accepts_gzip: field("Accept-Encoding").is_some(),
        }
    }
}

fn answer(shared: &Shared, route: Route, asked: Asked, body: Store) -> Result<Reply> {
    let Asked { range, if_none_match, accepts_gzip, .. } = asked;
    let body = body.into_bytes()?;
    shared.handler.answer(Incoming { route, range, if_none_match, accepts_gzip, body })
}

/// Gives the whole reply; an error when its reader gave less than it promised. A reply that nobody wants any more is let
/// go of.
fn give_reply(answering: Answering, reply: Reply, head_only: bool) -> std::io::Result<()> {
    let status = reply.status;
    let mut out = Vec::with_capacity(512);
    with_date(|date| reply.write_head(&mut out, None, Some(date)));
    let bodiless = head_only || matches!(status, 204 | 304);
    let total = out.len() as u64 + if bodiless { 0 } else { reply.body.len() };
    answering.begin(status, total);
    match reply.body {
        Body::Bytes(_) | Body::Reader { .. } if bodiless => {}
        Body::Bytes(bytes) if bytes.len() <= PIECE_BYTES => out.extend_from_slice(&bytes),
        Body::Bytes(bytes) => give_long(&answering, &mut out, &mut &bytes[..], bytes.len() as u64)?,
        Body::Reader { mut reader, len } => give_long(&answering, &mut out, &mut reader, len)?,
    }
    answering.finish(out);
    Ok(())
}

/// Gives a body in pieces behind the head that is in `out`, until nobody wants more. What is less than a piece stays in
/// `out`: it goes with the end, and a reader that fails until then leaves room for an honest answer.
fn give_long(answering: &Answering, out: &mut Vec<u8>, reader: &mut dyn Read, len: u64) -> std::io::Result<()> {
    let mut left = len;
    let mut piece = vec![0; PIECE_BYTES];
    while left > 0 {
        let most = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let got = match reader.read(&mut piece[..most]) {
            Ok(0) => {
                let text = format!("{left} of {len} bytes are missing");
                return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, text));
            }
            Ok(got) => got,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        left -= got as u64;
        if out.len() + got < PIECE_BYTES {
            out.extend_from_slice(&piece[..got]);
            continue;
        }
        let wanted = answering.give(out) && answering.give(&piece[..got]);
        out.clear();
        if !wanted {
            break;
        }
    }
    Ok(())
}

/// The date of this second, made once per second and thread.
fn with_date<T>(use_it: impl FnOnce(&str) -> T) -> T {
    thread_local! {
        static DATE: RefCell<(i64, String)> = const { RefCell::new((0, String::new())) };
    }
    DATE.with_borrow_mut(|(second, text)| {
        let now_ms = crate::clock::now_ms();
        if *second != now_ms / 1000 {
            *second = now_ms / 1000;
            *text = crate::clock::http_date(now_ms);
        }
        use_it(text)
    })
}
