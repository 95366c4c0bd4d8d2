//! Numbers of the HTTP side, as relaxed atomics, and their page for Prometheus. Rule a change could break: counting
//! takes no lock and a label never holds anything that a client wrote.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::client::{BULK, LANES, WAIT, WORK};
use crate::http::route::Class;

/// Statuses that are counted by themselves; the last slot takes every other.
const STATUSES: [u16; 28] = [
    101, 200, 204, 206, 303, 304, 400, 401, 403, 404, 405, 408, 409, 410, 411, 413, 415, 416, 426, 429, 431, 499, 500,
    501, 503, 504, 505, 0,
];
const CLASSES: usize = Class::ALL.len();
/// Upper bounds of the latency buckets, in microseconds; the last bucket has none.
const BOUNDS_US: [u64; 13] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 10_000_000];

struct Row {
    status: [AtomicU64; STATUSES.len()],
    bucket: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Row {
    const fn new() -> Self {
        Self {
            status: [const { AtomicU64::new(0) }; STATUSES.len()],
            bucket: [const { AtomicU64::new(0) }; BOUNDS_US.len() + 1],
            sum_us: AtomicU64::new(0),
        }
    }
}

/// Everything counted.
pub struct Metrics {
    rows: [Row; CLASSES],
    /// Connections taken in.
    pub accepted: AtomicU64,
    /// Connections refused at a cap.
    pub refused: AtomicU64,
    /// Times that accepting rested for want of a descriptor.
    pub accept_pauses: AtomicU64,
    /// Peers of another uid on `chat.sock`.
    pub foreign_peers: AtomicU64,
    /// Requests that the client left before their answer was out.
    pub left: AtomicU64,
    /// Requests whose worker passed its deadline, in all.
    pub overdue: AtomicU64,
    /// Connections to the pool that failed.
    pub line_failures: AtomicU64,
    /// Answers that their worker could not end.
    pub answers_torn: AtomicU64,
    /// Answers moved to a file because their reader was slow.
    pub spilled: AtomicU64,
}

/// What the gate sees when it is asked, in connections, requests or bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Gauges {
    /// Keep-alive, no request begun.
    pub idle: u64,
    /// A head or body is on its way in.
    pub reading: u64,
    /// Waiting for a worker.
    pub queued: u64,
    /// A worker is at it.
    pub served: u64,
    /// The answer is on its way out.
    pub writing: u64,
    /// Closing.
    pub closing: u64,
    /// Requests that wait for a worker, by lane.
    pub queue: [u64; LANES],
    /// 1 while the pool can be reached.
    pub pool_up: u64,
    /// Requests at workers, by lane.
    pub in_flight: [u64; LANES],
    /// Workers past their deadline right now.
    pub overdue_now: u64,
    /// Bytes in unlinked files.
    pub spool_bytes: u64,
    /// Bytes of request bodies in memory.
    pub body_bytes: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            rows: [const { Row::new() }; CLASSES],
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            accept_pauses: AtomicU64::new(0),
            foreign_peers: AtomicU64::new(0),
            left: AtomicU64::new(0),
            overdue: AtomicU64::new(0),
            line_failures: AtomicU64::new(0),
            answers_torn: AtomicU64::new(0),
            spilled: AtomicU64::new(0),
        }
    }
}

/// Adds one.
pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Metrics {
    /// Counts an answered request.
    pub fn request(&self, class: Class, status: u16, took: Duration) {
        let row = &self.rows[class as usize];
        let at = STATUSES.iter().position(|s| *s == status).unwrap_or(STATUSES.len() - 1);
        count(&row.status[at]);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        count(&row.bucket[BOUNDS_US.iter().position(|b| us <= *b).unwrap_or(BOUNDS_US.len())]);
        row.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Requests of a class that got this status.
    #[must_use]
    pub fn requests(&self, class: Class, status: u16) -> u64 {
        let at = STATUSES.iter().position(|s| *s == status).unwrap_or(STATUSES.len() - 1);
        self.rows[class as usize].status[at].load(Ordering::Relaxed)
    }

    /// Writes the page.
    pub fn render(&self, page: &mut String, gauges: &Gauges) {
        page.push_str("# HELP beebox_http_requests_total Answered requests by route and status.\n");
        page.push_str("# TYPE beebox_http_requests_total counter\n");
        for (class, row) in Class::ALL.iter().zip(&self.rows) {
            for (status, counter) in STATUSES.iter().zip(&row.status) {
                let n = counter.load(Ordering::Relaxed);
                if n > 0 {
                    let (route, status) = (class.name(), *status);
                    let _ = writeln!(page, "beebox_http_requests_total{{route=\"{route}\",status=\"{status}\"}} {n}");
                }
            }
        }
        page.push_str("# HELP beebox_http_request_seconds From the whole head to the last byte of the answer.\n");
        page.push_str("# TYPE beebox_http_request_seconds histogram\n");
        for (class, row) in Class::ALL.iter().zip(&self.rows) {
            let route = class.name();
            let mut below = 0;
            let mut lines = String::new();
            for (at, bucket) in row.bucket.iter().enumerate() {
                below += bucket.load(Ordering::Relaxed);
                let bound = BOUNDS_US.get(at).map_or("+Inf".to_owned(), |us| format!("{}", *us as f64 / 1e6));
                let _ =
                    writeln!(lines, "beebox_http_request_seconds_bucket{{route=\"{route}\",le=\"{bound}\"}} {below}");
            }
            if below > 0 {
                page.push_str(&lines);
                let sum = row.sum_us.load(Ordering::Relaxed) as f64 / 1e6;
                let _ = writeln!(page, "beebox_http_request_seconds_sum{{route=\"{route}\"}} {sum}");
                let _ = writeln!(page, "beebox_http_request_seconds_count{{route=\"{route}\"}} {below}");
            }
        }
        page.push_str("# HELP beebox_http_connections Connections by state.\n# TYPE beebox_http_connections gauge\n");
        for (state, n) in [
            ("idle", gauges.idle),
            ("reading", gauges.reading),
            ("queued", gauges.queued),
            ("served", gauges.served),
            ("writing", gauges.writing),
            ("closing", gauges.closing),
        ] {
            let _ = writeln!(page, "beebox_http_connections{{state=\"{state}\"}} {n}");
        }
        for (name, help, by_lane) in [
            ("queue", "Requests that wait for a worker.", gauges.queue),
            ("in_flight", "Requests at workers.", gauges.in_flight),
        ] {
            let _ = writeln!(page, "# HELP beebox_http_{name} {help}\n# TYPE beebox_http_{name} gauge");
            for (lane, at) in [("work", WORK), ("wait", WAIT), ("bulk", BULK)] {
                let _ = writeln!(page, "beebox_http_{name}{{lane=\"{lane}\"}} {}", by_lane[at]);
            }
        }
        for (name, help, n) in [
            ("pool_up", "1 while the pool of workers can be reached.", gauges.pool_up),
            ("overdue_workers", "Workers past their deadline.", gauges.overdue_now),
            ("spool_bytes", "Bytes in unlinked files.", gauges.spool_bytes),
            ("body_bytes", "Bytes of request bodies in memory.", gauges.body_bytes),
        ] {
            let _ = writeln!(
                page,
                "# HELP beebox_http_{name} {help}\n# TYPE beebox_http_{name} gauge\nbeebox_http_{name} {n}"
            );
        }
        for (name, help, counter) in [
            ("accepted", "Connections taken in.", &self.accepted),
            ("refused", "Connections refused at a cap.", &self.refused),
            ("accept_pauses", "Rests of accepting for want of a descriptor.", &self.accept_pauses),
            ("foreign_peers", "Peers of another uid on chat.sock.", &self.foreign_peers),
            ("left", "Requests whose client left before the answer.", &self.left),
            ("overdue", "Requests whose worker passed its deadline.", &self.overdue),
            ("pool_failures", "Connections to the pool that failed.", &self.line_failures),
            ("answers_torn", "Answers that their worker could not end.", &self.answers_torn),
            ("spilled", "Answers moved to a file for a slow reader.", &self.spilled),
        ] {
            let n = counter.load(Ordering::Relaxed);
            let _ = writeln!(
                page,
                "# HELP beebox_http_{name}_total {help}\n# TYPE beebox_http_{name}_total counter\nbeebox_http_{name}_total {n}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_counts_by_route_status_and_time() {
        let metrics = Metrics::default();
        metrics.request(Class::Send, 200, Duration::from_micros(300));
        metrics.request(Class::Send, 200, Duration::from_secs(60));
        metrics.request(Class::Unknown, 418, Duration::ZERO);
        let mut page = String::new();
        metrics.render(&mut page, &Gauges { idle: 3, ..Gauges::default() });
        for line in [
            "beebox_http_requests_total{route=\"send\",status=\"200\"} 2",
            "beebox_http_requests_total{route=\"unknown\",status=\"0\"} 1",
            "beebox_http_request_seconds_bucket{route=\"send\",le=\"0.00025\"} 0",
            "beebox_http_request_seconds_bucket{route=\"send\",le=\"0.0005\"} 1",
            "beebox_http_request_seconds_bucket{route=\"send\",le=\"+Inf\"} 2",
            "beebox_http_request_seconds_count{route=\"send\"} 2",
            "beebox_http_connections{state=\"idle\"} 3",
        ] {
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
        assert!(!page.contains("route=\"stop\""));
    }
}
