//! The word to systemd, or to what stands in for it: ready, alive, going down (`sd_notify`'s protocol).
//! Leaves when to say it to `main` and the sweep. Rule a change could break: without `NOTIFY_SOCKET` it does nothing.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells systemd (or what stands in for it) how the server is, if it asked by `NOTIFY_SOCKET`.
pub fn notify(word: &str) {
    let Some(path) = std::env::var("NOTIFY_SOCKET").ok().filter(|p| !p.is_empty()) else { return };
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|to| UnixDatagram::unbound()?.send_to_addr(word.as_bytes(), &to));
    if let Err(e) = sent {
        log::warn!("NOTIFY_SOCKET: {e}");
    }
}

/// How often the supervisor wants to hear from us, halved: `WATCHDOG_USEC`, if it means this process.
#[must_use]
pub fn watchdog_interval() -> Option<std::time::Duration> {
    let meant = std::env::var("WATCHDOG_PID").ok().is_none_or(|pid| pid.parse() == Ok(std::process::id()));
    let every_us: u64 = std::env::var("WATCHDOG_USEC").ok()?.parse().ok().filter(|us| *us > 0)?;
    meant.then(|| std::time::Duration::from_micros(every_us / 2))
}
