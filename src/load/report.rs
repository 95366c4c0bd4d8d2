//! What a run says at its end: a table for a terminal, JSON for machines. The page with plots is in `page`.
//! Rule a change could break: a figure never stands without how it was measured and on what.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::run::Outcome;
use super::scenario::Group;

/// Columns of a table, right-aligned but for the first two.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let width = widths[c];
            let _ = if c < 2 { write!(line, "{cell:<width$}  ") } else { write!(line, "{cell:>width$}  ") };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Milliseconds with as many decimals as tell something.
#[must_use]
pub fn ms(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Frames per second of CPU time that the server used, if both are known.
#[must_use]
pub fn deliveries_per_cpu_s(outcome: &Outcome) -> Option<f64> {
    let cpu_s = outcome.server_cpu.as_secs_f64();
    (outcome.deliveries > 0 && cpu_s > 0.0).then(|| outcome.deliveries as f64 / cpu_s)
}

/// How a group begins its rounds.
fn pace(outcome: &Outcome, name: &str) -> String {
    outcome
        .scenario
        .groups
        .iter()
        .find_map(|group| match group {
            Group::Script(s) if s.name == name => Some(match s.per_s {
                Some(per_s) => format!("{} x {per_s}/s", s.clients),
                None => format!("{} closed", s.clients),
            }),
            Group::Watch(w) if w.name == name => Some(format!("{} watch", w.watchers)),
            Group::Script(_) | Group::Watch(_) => None,
        })
        .unwrap_or_default()
}

/// The whole report as text.
#[must_use]
pub fn text(outcome: &Outcome) -> String {
    let mut out = String::new();
    let scenario = &outcome.scenario;
    let _ = writeln!(out, "\n{}: {}", scenario.name, scenario.about);
    let _ = writeln!(
        out,
        "seed {}, {:.1} s, killed: {} servers, {} agents\n",
        scenario.seed,
        outcome.span.as_secs_f64(),
        outcome.kills.0,
        outcome.kills.1
    );
    let head = ["group", "step", "pace", "count", "errors", "per s", "p50", "p90", "p99", "p99.9", "max ms"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for row in &outcome.rows {
        rows.push(vec![
            row.group.clone(),
            row.step.clone(),
            pace(outcome, &row.group),
            row.count.to_string(),
            row.errors.to_string(),
            format!("{:.1}", row.per_s),
            ms(row.p50_ms),
            ms(row.p90_ms),
            ms(row.p99_ms),
            ms(row.p999_ms),
            ms(row.max_ms),
        ]);
    }
    out.push_str(&table(&rows));
    out.push_str("latencies in ms; rounds with a rate count from when they were due\n");
    for row in outcome.rows.iter().filter(|r| r.errors > 0) {
        if let Some(why) = &row.first_error {
            let _ = writeln!(out, "first error of {} / {}: {why}", row.group, row.step);
        }
    }
    out.push('\n');
    if let Some(after) = outcome.started_after {
        let _ = writeln!(out, "server: listening after {} ms", ms(after.as_secs_f64() * 1000.0));
    }
    if let (Some(first), Some(last)) = (outcome.samples.first(), outcome.samples.last()) {
        let max = |f: fn(&super::run::Sample) -> f64| outcome.samples.iter().map(f).fold(0.0, f64::max);
        let mut rows = vec![["server", "", "first", "max", "last"].map(str::to_owned).to_vec()];
        type Look = fn(&super::run::Sample) -> f64;
        let looks: [(&str, Look); 5] = [
            ("resident MiB", |s| s.usage.rss_kib as f64 / 1024.0),
            ("threads", |s| s.usage.threads as f64),
            ("open files", |s| s.usage.fds as f64),
            ("agents", |s| s.usage.children as f64),
            ("CPU %", |s| s.cpu_percent),
        ];
        for (name, look) in looks {
            let cells = [look(first), max(look), look(last)].map(|v| format!("{v:.0}"));
            let mut row = vec![name.to_owned(), String::new()];
            row.extend(cells);
            rows.push(row);
        }
        out.push_str(&table(&rows));
    }
    let _ = writeln!(
        out,
        "CPU: server {:.2} s ({:.1} % of a core), this tool {:.2} s",
        outcome.server_cpu.as_secs_f64(),
        outcome.server_cpu.as_secs_f64() * 100.0 / outcome.span.as_secs_f64().max(0.001),
        outcome.own_cpu.as_secs_f64()
    );
    if let Some(per_cpu_s) = deliveries_per_cpu_s(outcome) {
        let _ = writeln!(
            out,
            "deliveries: {} ({:.0}/s), {per_cpu_s:.0} per CPU second of the server",
            outcome.deliveries,
            outcome.deliveries as f64 / outcome.span.as_secs_f64().max(0.001)
        );
    }
    for note in &outcome.notes {
        let _ = writeln!(out, "note: {note}");
    }
    let _ = writeln!(out, "\nchecker: {}", outcome.verdict);
    for violation in outcome.verdict.violations.iter().take(VIOLATIONS_SHOWN) {
        let _ = writeln!(out, "  VIOLATION {violation}");
    }
    if outcome.verdict.violations.len() > VIOLATIONS_SHOWN {
        let _ = writeln!(out, "  … and {} more", outcome.verdict.violations.len() - VIOLATIONS_SHOWN);
    }
    let _ = writeln!(out, "{}", if outcome.is_good() { "GOOD" } else { "BAD" });
    out
}

/// Violations printed one by one.
const VIOLATIONS_SHOWN: usize = 40;

/// The whole report for machines.
#[must_use]
pub fn json(outcome: &Outcome) -> Value {
    let verdict = &outcome.verdict;
    json!({
        "good": outcome.is_good(),
        "scenario": outcome.scenario,
        "spanS": outcome.span.as_secs_f64(),
        "startedAfterMs": outcome.started_after.map(|d| d.as_secs_f64() * 1000.0),
        "steps": outcome.rows,
        "samples": outcome.samples,
        "serverCpuS": outcome.server_cpu.as_secs_f64(),
        "ownCpuS": outcome.own_cpu.as_secs_f64(),
        "deliveries": outcome.deliveries,
        "deliveriesPerCpuS": deliveries_per_cpu_s(outcome),
        "killedServers": outcome.kills.0,
        "killedAgents": outcome.kills.1,
        "errors": outcome.errors,
        "notes": outcome.notes,
        "checker": {
            "summary": verdict.to_string(),
            "messages": verdict.messages,
            "accepted": verdict.accepted,
            "unanswered": verdict.unanswered,
            "delivered": verdict.delivered,
            "pending": verdict.pending,
            "cleared": verdict.cleared,
            "turns": verdict.turns,
            "events": verdict.events,
            "subscribers": verdict.subscribers,
            "resyncs": verdict.resyncs,
            "violations": verdict
                .violations
                .iter()
                .map(|v| json!({ "kind": v.kind(), "text": v.to_string() }))
                .collect::<Vec<_>>(),
        },
    })
}
