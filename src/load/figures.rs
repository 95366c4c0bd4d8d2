//! Figures of a run: per step a histogram of latencies, errors, and the course over time.
//!
//! Latencies of rounds begun by the clock count from the moment they were due, so that a stall of the server is seen by
//! all who would have come meanwhile (no coordinated omission). Rule a change could break: recording takes one short
//! lock and no system call.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::sync::Mutex;

/// Points of a course over time, at most.
const BINS: u32 = 100;
/// Shortest time of one point.
const BIN_MIN: Duration = Duration::from_millis(250);

struct Bin {
    hist: Histogram<u32>,
    errors: u64,
}

struct Row {
    hist: Histogram<u64>,
    errors: u64,
    first_error: Option<String>,
    bins: Vec<Bin>,
}

/// The board on which every client of a run writes.
pub struct Board {
    begun: Instant,
    bin: Duration,
    groups: Vec<(String, Mutex<BTreeMap<&'static str, Row>>)>,
}

impl Board {
    /// An empty board for groups of these names and a run about so long.
    #[must_use]
    pub fn new(groups: impl IntoIterator<Item = String>, duration: Duration) -> Self {
        Self {
            begun: Instant::now(),
            bin: (duration / BINS).max(BIN_MIN),
            groups: groups.into_iter().map(|name| (name, Mutex::new(BTreeMap::new()))).collect(),
        }
    }

    /// Since the board was made.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    fn with_row(&self, group: usize, step: &'static str, f: impl FnOnce(&mut Row, usize)) {
        let at = (self.begun.elapsed().as_nanos() / self.bin.as_nanos().max(1)) as usize;
        let mut rows = self.groups[group].1.lock();
        let row = rows.entry(step).or_insert_with(|| Row {
            // Three digits; with that many any histogram can be made.
            hist: Histogram::new(3).expect("3 digits are possible"),
            errors: 0,
            first_error: None,
            bins: Vec::new(),
        });
        // A run may last longer than planned (settling, a slow machine): the last point takes the rest.
        let at = at.min(BINS as usize * 4);
        while row.bins.len() <= at {
            row.bins.push(Bin { hist: Histogram::new(2).expect("2 digits are possible"), errors: 0 });
        }
        f(row, at);
    }

    /// Notes a latency.
    pub fn took(&self, group: usize, step: &'static str, latency: Duration) {
        self.took_many(group, step, &[latency]);
    }

    /// Notes several latencies under one lock.
    pub fn took_many(&self, group: usize, step: &'static str, latencies: &[Duration]) {
        self.with_row(group, step, |row, at| {
            for latency in latencies {
                let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX).clamp(1, u64::from(u32::MAX));
                // Histograms that grow as needed take every value there is.
                row.hist.record(us).expect("the histogram resizes");
                row.bins[at].hist.record(us).expect("the histogram resizes");
            }
        });
    }

    /// Notes a failed step.
    pub fn failed(&self, group: usize, step: &'static str, why: impl Into<String>) {
        self.with_row(group, step, |row, at| {
            row.errors += 1;
            row.bins[at].errors += 1;
            row.first_error.get_or_insert_with(|| why.into());
        });
    }

    /// Steps done and failed so far.
    #[must_use]
    pub fn totals(&self) -> (u64, u64) {
        let mut totals = (0, 0);
        for (_, rows) in &self.groups {
            for row in rows.lock().values() {
                totals.0 += row.hist.len();
                totals.1 += row.errors;
            }
        }
        totals
    }

    /// The table, for a run in which clients were at work for `span`.
    #[must_use]
    pub fn rows(&self, span: Duration) -> Vec<StepFigures> {
        let ms = |us: u64| us as f64 / 1000.0;
        let mut table = Vec::new();
        for (group, rows) in &self.groups {
            for (step, row) in rows.lock().iter() {
                let q = |q: f64| ms(row.hist.value_at_quantile(q));
                table.push(StepFigures {
                    group: group.clone(),
                    step: (*step).to_owned(),
                    count: row.hist.len(),
                    errors: row.errors,
                    first_error: row.first_error.clone(),
                    per_s: row.hist.len() as f64 / span.as_secs_f64().max(0.001),
                    p50_ms: q(0.5),
                    p90_ms: q(0.9),
                    p99_ms: q(0.99),
                    p999_ms: q(0.999),
                    max_ms: ms(row.hist.max()),
                    percentiles: PERCENTILES.iter().map(|p| (*p, q(*p / 100.0))).collect(),
                    course: row
                        .bins
                        .iter()
                        .enumerate()
                        .map(|(at, bin)| Point {
                            at_s: (self.bin * u32::try_from(at).unwrap_or(0)).as_secs_f64(),
                            per_s: bin.hist.len() as f64 / self.bin.as_secs_f64(),
                            p50_ms: ms(bin.hist.value_at_quantile(0.5)),
                            p99_ms: ms(bin.hist.value_at_quantile(0.99)),
                            max_ms: ms(bin.hist.max()),
                            errors: bin.errors,
                        })
                        .collect(),
                });
            }
        }
        table
    }
}

/// Points of the percentile curve.
const PERCENTILES: &[f64] =
    &[0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 97.5, 99.0, 99.5, 99.75, 99.9, 99.95, 99.99, 99.999, 100.0];

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepFigures {
    /// The group.
    pub group: String,
    /// The step.
    pub step: String,
    /// How often it succeeded.
    pub count: u64,
    /// How often it failed.
    pub errors: u64,
    /// The first failure, in words.
    pub first_error: Option<String>,
    /// Successes per second.
    pub per_s: f64,
    /// Median.
    pub p50_ms: f64,
    /// 90 % took at most this.
    pub p90_ms: f64,
    /// 99 %.
    pub p99_ms: f64,
    /// 99.9 %.
    pub p999_ms: f64,
    /// The slowest.
    pub max_ms: f64,
    /// Percentile and latency in milliseconds.
    pub percentiles: Vec<(f64, f64)>,
    /// The course over time.
    pub course: Vec<Point>,
}

/// One point of a course.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Point {
    /// Seconds since the start.
    pub at_s: f64,
    /// Successes per second.
    pub per_s: f64,
    /// Median.
    pub p50_ms: f64,
    /// 99 %.
    pub p99_ms: f64,
    /// The slowest.
    pub max_ms: f64,
    /// Failures.
    pub errors: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_what_was_noted() {
        let board = Board::new(["g".to_owned()], Duration::from_secs(1));
        for us in 1..=1000u64 {
            board.took(0, "send", Duration::from_micros(us * 10));
        }
        board.failed(0, "send", "first");
        board.failed(0, "send", "second");
        assert_eq!(board.totals(), (1000, 2));
        let row = board.rows(Duration::from_secs(2)).remove(0);
        assert_eq!((row.count, row.errors, row.first_error.as_deref()), (1000, 2, Some("first")));
        assert!((row.p50_ms - 5.0).abs() < 0.05 && (row.p99_ms - 9.9).abs() < 0.05, "{row:?}");
        assert!((row.per_s - 500.0).abs() < 0.1 && (row.max_ms - 10.0).abs() < 0.02, "{row:?}");
        assert_eq!(row.course.iter().map(|p| p.errors).sum::<u64>(), 2);
    }
}
