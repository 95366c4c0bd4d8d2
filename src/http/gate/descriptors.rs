//! How the open files that this process may have are shared out. The rule, in this order:
//!
//! 1. [`FIXED`] for what is always open: sockets, event descriptors, the journal with its log and readers, logs.
//! 2. [`PER_AGENT`] for each live agent that the settings allow: three pipes, its process, a wake descriptor, its
//!    transcript held and read.
//! 3. [`PER_REQUEST`] for each request that can be at a worker: a transcript, a body in a file.
//! 4. Of what is left three quarters are connections, one quarter is event streams, each up to its own limit.
//!
//! Refusing a connection needs a descriptor too: a few beyond the limit are kept for that. Invariant: what a client can
//! open never takes what a message needs on its way to the agent.

/// Always open.
const FIXED: u64 = 40;
/// For each live agent.
const PER_AGENT: u64 = 8;
/// For each request at a worker.
const PER_REQUEST: u64 = 2;
/// Connections that get in however short descriptors are.
const CONNECTIONS_MIN: u64 = 8;
/// Event streams that are served however short descriptors are.
const STREAMS_MIN: u64 = 4;

/// How many of each there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// Connections at the gate.
    pub connections: usize,
    /// Clients that follow the events.
    pub streams: usize,
}

/// Shares `descriptors` out among clients, beside `requests` at workers and `agents` that live.
#[must_use]
pub fn share(descriptors: u64, requests: usize, agents: usize) -> Shares {
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let needed = FIXED
        .saturating_add(PER_AGENT.saturating_mul(count(agents)))
        .saturating_add(PER_REQUEST.saturating_mul(count(requests)));
    let left = descriptors.saturating_sub(needed);
    let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    Shares { connections: size((left - left / 4).max(CONNECTIONS_MIN)), streams: size((left / 4).max(STREAMS_MIN)) }
}

/// Raises the soft limit of descriptors to the hard one, and says what it is.
#[must_use]
pub fn raise() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let hard = now.maximum.unwrap_or(u64::MAX);
    if now.current.is_some_and(|c| c < hard) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_messages_need_comes_before_clients_and_clients_get_the_rest() {
        for (descriptors, requests, agents, connections, streams) in [
            (256, 24, 3, 108, 36),
            (1024, 24, 3, 684, 228),
            (20_000, 24, 3, 14_916, 4_972),
            (64, 8, 3, 8, 4),
            (0, 24, 3, 8, 4),
        ] {
            assert_eq!(share(descriptors, requests, agents), Shares { connections, streams }, "{descriptors}");
        }
        assert!(share(u64::MAX, usize::MAX, usize::MAX).connections >= 8);
    }
}
