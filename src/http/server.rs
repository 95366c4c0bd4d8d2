//! The tiny_http pool: workers that turn vetted requests into replies. The only file that names tiny_http.
//!
//! Leaves vetting, deadlines and slow clients to the gate, its only client. Rules a change could break: a handler never
//! owns the request; a panic in one is a 500 and its worker lives on; a body that ends early is told to the gate, which
//! closes both ends, because tiny_http would let the next answer follow in its place.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::gate::notes::{Note, Notes};
use super::gate::place::Place;
use super::reply::{Body, Reply};
use super::route::{self, Route};
use crate::error::{Code, Error, Result};
use crate::threads::{self, Doing, Name, OnPanic, Thread};

/// Where the gate asks whether a fresh connection is served; no client can, the route map does not know it.
pub const PROBE_PATH: &str = "/.probe";
/// The field that names the connection to the gate, for [`Note::Torn`].
pub const UPSTREAM_FIELD: &str = "U";
/// Bytes of a streamed body per write: few system calls, little memory.
const PIECE_BYTES: usize = 64 * 1024;

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
    notes: Arc<Notes>,
    closing: AtomicBool,
}

/// Starts the pool. `notes` is what the gate reads.
///
/// # Errors
/// When the socket cannot be bound or a thread not be started.
pub fn start(config: &ServerConfig, handler: Arc<dyn Handler>, notes: Arc<Notes>) -> Result<Server> {
    let place = Place::new(&config.socket)?;
    place.clear()?;
    let http = build(place.path())?;
    place.make_private()?;
    let shared = Arc::new(Shared { http, handler, notes, closing: AtomicBool::new(false) });
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
            shared.http.recv()
        };
        match received {
            // Handlers are contained inside; this holds for our own code around them, so that the count of workers
            // never falls. The request that was lost with it ends at the gate's deadline.
            Ok(request) => {
                if catch_unwind(AssertUnwindSafe(|| serve(shared, request))).is_err() {
                    log::error!("a worker panicked outside its handler and goes on");
                }
            }
            Err(_) if shared.closing.load(Ordering::Acquire) => {}
            // tiny_http accepts no more after this; the connections that the gate has go on.
            Err(e) => log::error!("the pool can take no further connection of the gate: {e}"),
        }
    }
}

fn serve(shared: &Shared, mut request: tiny_http::Request) {
    if request.url() == PROBE_PATH {
        let _ = write_reply(request.into_writer(), Reply::empty(204), false);
        return;
    }
    let head_only = *request.method() == tiny_http::Method::Head;
    let upstream = field(&request, UPSTREAM_FIELD).and_then(|u| u.parse().ok());
    // The handler and the reader of its reply are foreign code: what they leave half done is dropped with them.
    let reply = catch_unwind(AssertUnwindSafe(|| answer(shared, &mut request))).unwrap_or_else(|_| {
        log::error!("a handler panicked");
        Err(Error::internal("a fault of ours; it is in the log"))
    });
    let reply = reply.unwrap_or_else(|e| {
        log_failure(&e);
        Reply::from_error(&e)
    });
    let writer = request.into_writer();
    let whole = catch_unwind(AssertUnwindSafe(|| write_reply(writer, reply, head_only)));
    if !matches!(whole, Ok(Ok(()))) {
        if let Ok(Err(e)) = whole {
            log::warn!("an answer ended early: {e}");
        }
        if let Some(upstream) = upstream {
            shared.notes.leave(Note::Torn(upstream));
        }
    }
}

fn log_failure(e: &Error) {
    if super::reply::status(e.code()) >= 500 {
        log::warn!("{}: {e}", e.code().word());
    } else {
        log::debug!("{}: {e}", e.code().word());
    }
}

fn field(request: &tiny_http::Request, name: &'static str) -> Option<String> {
    request.headers().iter().find(|h| h.field.equiv(name)).map(|h| h.value.as_str().to_owned())
}

fn answer(shared: &Shared, request: &mut tiny_http::Request) -> Result<Reply> {
    let route = route::parse(request.method().as_str(), request.url()).map_err(|refusal| refusal.error)?;
    let range = field(request, "Range");
    let if_none_match = field(request, "If-None-Match");
    let length = request.body_length().unwrap_or(0);
    let mut body = Vec::with_capacity(length);
    request.as_reader().take(length as u64).read_to_end(&mut body)?;
    if body.len() != length {
        return Err(Error::new(Code::BadRequest, "the body ended early"));
    }
    shared.handler.answer(Incoming {
        route,
        range,
        if_none_match,
        accepts_gzip: field(request, "Accept-Encoding").is_some(),
        body,
    })
}

/// Writes the whole reply; an error also when the reader gave less than it promised.
fn write_reply(mut writer: Box<dyn Write + Send>, reply: Reply, head_only: bool) -> std::io::Result<()> {
    let mut out = Vec::with_capacity(512);
    with_date(|date| reply.write_head(&mut out, None, Some(date)));
    match reply.body {
        Body::Bytes(_) | Body::Reader { .. } if head_only || matches!(reply.status, 204 | 304) => {
            writer.write_all(&out)?;
        }
        Body::Bytes(bytes) if bytes.len() <= PIECE_BYTES => {
            // One write, one wake-up of the gate.
            out.extend_from_slice(&bytes);
            writer.write_all(&out)?;
        }
        Body::Bytes(bytes) => {
            writer.write_all(&out)?;
            writer.write_all(&bytes)?;
        }
        Body::Reader { mut reader, len } => {
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
                if !out.is_empty() {
                    writer.write_all(&out)?;
                    out.clear();
                }
                writer.write_all(&piece[..got])?;
                left -= got as u64;
            }
            writer.write_all(&out)?;
        }
    }
    writer.flush()
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
