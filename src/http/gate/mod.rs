//! The gate: owns the port, vets every request, and lets only whole vetted ones through to the pool.
//!
//! Reading order: `limits` (what anything may cost), `head` and `body` (pure reading), `client` (state of a connection),
//! `core` (the loop), `accept` and `drive` (clients), `vet`, `request` and `own` (from bytes to a decision and an
//! answer), `pool`, `line` and `exchange` (requests to workers), `relay` (answers back). It is one thread, called `gate`,
//! that never blocks: idle and slow clients cost memory, not threads.
//! Leaves who may talk to `guard`, paths to `route`, the event stream to `push`. Rule a change could break: nothing
//! unvetted, unbounded or unfinished reaches `server`.

mod accept;
pub mod body;
mod client;
mod core;
pub mod descriptors;
mod drive;
pub mod exchange;
pub mod head;
pub mod limits;
mod line;
mod login;
pub mod metrics;
pub mod notes;
mod own;
pub mod place;
mod pool;
mod relay;
mod request;
mod slab;
pub mod token;
mod vet;

use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::client::LANES;
use self::core::{Core, Listener, Parts};
use self::exchange::Exchanges;
use self::metrics::Metrics;
use self::notes::{Note, Notes};
use self::place::Place;
use crate::error::{Error, Result};
use crate::http::guard::{Guard, Logins, Token};
use crate::push::Upgrade;
use crate::sync::Mutex;
use crate::threads::{self, Name, OnPanic, Thread};

pub use self::limits::Limits;

/// What the gate needs to know.
#[derive(Debug)]
pub struct GateConfig {
    /// Where to listen; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The second door, `<box>/.beebox/chat.sock`; none in some tests.
    pub chat_socket: Option<PathBuf>,
    /// The pool's socket, `<box>/.beebox/http.sock`.
    pub http_socket: PathBuf,
    /// Live agents that there may be, for the share of open files they need.
    pub agents: usize,
    /// Where bodies and answers are spooled.
    pub state_dir: PathBuf,
    /// What a proxy in front is called.
    pub public_url: Option<String>,
    /// The bearer token.
    pub token: Option<Token>,
    /// Workers of ordinary routes, as the pool was started with.
    pub workers: usize,
    /// Every limit.
    pub limits: Limits,
    /// What the pool shares with the gate; the same that it was started with.
    pub exchanges: Arc<Exchanges>,
}

/// What the gate's own routes ask the rest of the house; called on the gate's thread, so it must not block.
pub trait Local: Send + Sync {
    /// Fit to serve, or why not.
    ///
    /// # Errors
    /// The reason, for a person.
    fn ready(&self) -> std::result::Result<(), String>;
    /// Appends the numbers of the other rooms, in Prometheus text.
    fn metrics(&self, page: &mut String);
    /// The page of `/api/debug/threads`; takes no lock that a stuck thread could hold.
    fn debug_threads(&self) -> String;
}

/// Takes an event-stream client over.
pub type PushTo = dyn Fn(Upgrade) + Send + Sync;

/// A running gate.
pub struct Gate {
    thread: Thread,
    notes: Arc<Notes>,
    address: SocketAddr,
    metrics: Arc<Metrics>,
    logins: Arc<Mutex<Logins>>,
    born: Instant,
    origin: String,
}

/// Connections that wait to be accepted; the kernel cuts it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// Binds the doors and starts the thread `gate`.
///
/// # Errors
/// A bad setting (an open address without a token), a port in use, or what the kernel says.
pub fn start(config: GateConfig, local: Arc<dyn Local>, push: Arc<PushTo>) -> Result<Gate> {
    let listens_everywhere = config.listen.ip().is_unspecified();
    // Before the port is bound: an address that must not be open is never open.
    Guard::new(config.listen, config.public_url.as_deref(), config.token.clone())?;
    let tcp = listen(config.listen, config.limits.send_buffer_bytes)?;
    let address = tcp.local_addr()?;
    let guard = Guard::new(address, config.public_url.as_deref(), config.token)?;
    let mut listeners = vec![Listener { fd: tcp.into(), unix: false }];
    let chat_socket = match &config.chat_socket {
        None => None,
        Some(path) => {
            let place = Place::new(path)?;
            place.clear()?;
            let unix = UnixListener::bind(place.path())
                .map_err(|e| Error::internal(format!("socket {}: {e}", path.display())))?;
            place.make_private()?;
            unix.set_nonblocking(true)?;
            listeners.push(Listener { fd: unix.into(), unix: true });
            Some(place)
        }
    };
    let mut limits = config.limits;
    let descriptors = descriptors::raise();
    let lane_max = lanes(config.workers, limits.waiting_max, descriptors);
    limits.connections_max = limits.connections_max.min(shares(config.workers, config.agents, &limits).connections);

    let metrics = Arc::new(Metrics::default());
    let logins = Arc::new(Mutex::new(Logins::default()));
    let origin =
        config.public_url.clone().map_or_else(|| format!("http://{address}"), |u| u.trim_end_matches('/').to_owned());
    let core = Core::new(Parts {
        listeners,
        exchanges: Arc::clone(&config.exchanges),
        guard,
        listens_everywhere,
        limits,
        lane_max,
        pool: Place::new(&config.http_socket)?,
        state_dir: config.state_dir,
        metrics: Arc::clone(&metrics),
        local,
        push,
        logins: Arc::clone(&logins),
        origin: origin.clone(),
        chat_socket,
    })?;
    let born = core.born;
    let name = const { Name::fixed("gate") };
    let thread = threads::spawn(name, threads::WORK_STACK_BYTES, OnPanic::EndProcess, move || core.run())?;
    Ok(Gate { thread, notes: Arc::clone(config.exchanges.notes()), address, metrics, logins, born, origin })
}

impl Gate {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the token; open streams go on, every request from now on needs the new one.
    pub fn token_setter(&self) -> impl Fn(Token) + Send + Sync + 'static {
        let notes = Arc::clone(&self.notes);
        move |token| notes.leave(Note::Token(token))
    }

    /// Its numbers.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// A link that logs a browser in, once, within ten minutes. It holds a secret: not for a log.
    #[must_use]
    pub fn login_link(&self) -> String {
        let code = token::secret();
        let now_ms = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        let link = format!("{}/login#{code}", self.origin);
        self.logins.lock().add(code, now_ms);
        link
    }

    /// Takes nothing new, finishes the answers in flight for at most `limit`, closes everything and ends; true if the
    /// thread ended in time.
    #[must_use]
    pub fn shutdown(self, limit: Duration) -> bool {
        self.notes.leave(Note::Shutdown(Instant::now() + limit));
        self.thread.join_within(limit + Duration::from_millis(500))
    }
}

fn listen(address: SocketAddr, send_buffer_bytes: usize) -> Result<TcpListener> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
    let wrong = |e: rustix::io::Errno| Error::internal(format!("listening on {address}: {}", std::io::Error::from(e)));
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(wrong)?;
    sockopt::set_socket_reuseaddr(&fd, true).map_err(wrong)?;
    // Accepted sockets inherit it. The kernel takes twice what it is told, for its own needs.
    sockopt::set_socket_send_buffer_size(&fd, send_buffer_bytes / 2).map_err(wrong)?;
    rustix::net::bind(&fd, &address).map_err(wrong)?;
    rustix::net::listen(&fd, BACKLOG).map_err(wrong)?;
    Ok(fd.into())
}

/// How many connections and event streams there may be beside `workers` and `agents`.
#[must_use]
pub fn shares(workers: usize, agents: usize, limits: &Limits) -> descriptors::Shares {
    let open = descriptors::raise();
    let [work, wait, _] = lanes(workers, limits.waiting_max, open);
    descriptors::share(open, work + wait, agents)
}

/// Requests in flight per lane: as many as workers, fewer when descriptors are short (a request may open four files). Of the
/// ordinary workers a quarter, one at least, is out of reach of long answers.
fn lanes(workers: usize, waiting: usize, descriptors: u64) -> [usize; LANES] {
    let most = usize::try_from(descriptors.saturating_sub(32) / 4).unwrap_or(usize::MAX).max(2);
    let work = workers.clamp(1, most.div_ceil(2).max(most.saturating_sub(waiting)));
    let bulk = (work - work.div_ceil(4)).max(1);
    [work, waiting.clamp(1, most - work.min(most - 1)), bulk]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_keep_within_the_descriptors_and_never_lack_one() {
        for (workers, waiting, descriptors, expected) in [
            (8, 16, 1024, [8, 16, 6]),
            (8, 16, u64::MAX, [8, 16, 6]),
            (8, 16, 64, [4, 4, 3]),
            (1, 1, 0, [1, 1, 1]),
            (100, 16, 432, [84, 16, 63]),
            (0, 0, 1024, [1, 1, 1]),
        ] {
            assert_eq!(lanes(workers, waiting, descriptors), expected, "{workers} {waiting} {descriptors}");
        }
    }
}
