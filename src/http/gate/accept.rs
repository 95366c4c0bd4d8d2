//! New clients: accepting, the caps, and who may come in by `chat.sock`.
//!
//! Leaves what they say to `drive`. Rule a change could break: running out of descriptors pauses accepting and never ends
//! it, and a connection beyond a cap costs no more than an answer.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketAddrAny, SocketFlags};

use super::client::{Client, Peer};
use super::core::{Core, KIND_CLIENT};
use super::metrics::count;
use crate::error::{Code, Error};
use crate::http::route::Class;

/// Connections accepted per event, so that a flood of them does not hold up those that are in.
const ACCEPTS_MAX: usize = 64;
/// Connections beyond the cap that are refused with an answer; the ones beyond are closed without.
const REFUSALS_MAX: usize = 128;

impl Core {
    pub(super) fn accept(&mut self, at: usize) {
        for _ in 0..ACCEPTS_MAX {
            let Some(listener) = self.parts.listeners.get(at) else {
                return;
            };
            let unix = listener.unix;
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(&listener.fd, flags) {
                Ok((fd, from)) => {
                    let peer = if unix { Peer::Unix } else { Peer::Tcp(address(from)) };
                    self.take_in(fd, peer);
                }
                Err(Errno::AGAIN) => return,
                // The connection was gone before we came to it.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM) => {}
                Err(e) => {
                    // No descriptor or no memory: the connections wait in the kernel's queue until some are free.
                    log::warn!("accepting rests for {} ms: {e}", self.parts.limits.accept_pause.as_millis());
                    count(&self.parts.metrics.accept_pauses);
                    for listener in &self.parts.listeners {
                        let _ = epoll::delete(&self.epoll, &listener.fd);
                    }
                    self.accept_again_at = Some(self.now + self.parts.limits.accept_pause);
                    return;
                }
            }
        }
    }

    fn take_in(&mut self, fd: OwnedFd, peer: Peer) {
        match peer {
            Peer::Tcp(_) => {
                // An answer in two parts must not wait for the acknowledgement of the first (44 ms).
                let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
            }
            Peer::Unix => {
                let ours = rustix::process::geteuid();
                match rustix::net::sockopt::socket_peercred(&fd) {
                    Ok(who) if who.uid == ours => {}
                    Ok(_) | Err(_) => {
                        log::warn!("chat.sock: a peer of another user was sent away");
                        return count(&self.parts.metrics.foreign_peers);
                    }
                }
            }
        }
        let limits = &self.parts.limits;
        let crowded = match counted_address(peer, limits.count_loopback) {
            Some(address) => {
                let here = self.per_address.entry(address).or_default();
                *here += 1;
                *here > limits.connections_per_address_max
            }
            None => false,
        };
        let over = self.clients.len() >= limits.connections_max;
        let deadline = self.now + limits.idle_time;
        if self.clients.len() >= limits.connections_max + REFUSALS_MAX {
            count(&self.parts.metrics.refused);
            return self.forget_address(peer);
        }
        let client = Client::new(fd, peer, deadline);
        let key = self.clients.insert(client);
        let watch = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        if let Err(e) = epoll::add(&self.epoll, &client.fd, EventData::new_u64(KIND_CLIENT | key.pack()), watch) {
            log::warn!("a connection cannot be watched: {e}");
            return self.close_client(key);
        }
        count(&self.parts.metrics.accepted);
        self.arm(key, deadline);
        if over || crowded || self.draining.is_some() {
            count(&self.parts.metrics.refused);
            let text = if over { "too many connections" } else { "too many connections from one address" };
            self.refuse(key, &Error::new(Code::Overloaded, text), Class::Unknown, None, true);
        }
        self.drive_client(key);
    }

    pub(super) fn forget_address(&mut self, peer: Peer) {
        if let Some(address) = counted_address(peer, self.parts.limits.count_loopback)
            && let Some(here) = self.per_address.get_mut(&address)
        {
            *here -= 1;
            if *here == 0 {
                self.per_address.remove(&address);
            }
        }
    }
}

fn address(from: Option<SocketAddrAny>) -> IpAddr {
    from.and_then(|a| std::net::SocketAddr::try_from(a).ok())
        .map_or(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), |a| a.ip().to_canonical())
}

/// What the cap per address counts: an IPv6 client owns a whole /64.
fn counted_address(peer: Peer, count_loopback: bool) -> Option<IpAddr> {
    match peer {
        Peer::Unix => None,
        Peer::Tcp(ip) if ip.is_loopback() && !count_loopback => None,
        Peer::Tcp(IpAddr::V4(ip)) => Some(IpAddr::V4(ip)),
        Peer::Tcp(IpAddr::V6(ip)) => {
            let [a, b, c, d, ..] = ip.segments();
            Some(IpAddr::V6(std::net::Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0)))
        }
    }
}
