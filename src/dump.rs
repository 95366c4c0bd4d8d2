//! The plain-text page of what the server is doing: every thread, every session. Printed on SIGQUIT, answered by
//! `/api/debug/threads`. Rule a change could break: it takes no lock that a stuck thread could hold, and shows no secret.

use std::fmt::Write as _;
use std::sync::OnceLock;

use crate::threads;

type Page = Box<dyn Fn() -> String + Send + Sync>;

static PAGE: OnceLock<Page> = OnceLock::new();

/// Gives alarms the whole page to print; without it they print the threads. Once in a process.
pub fn set_page(page: Page) {
    // A second server in one process (tests) keeps the page of the first.
    let _ = PAGE.set(page);
}

/// Logs that something takes far too long, with the page.
pub fn alarm(why: &str) {
    let page = PAGE.get().map_or_else(threads_page, |page| page());
    log::error!("{why}; what the server is at:\n{page}");
}

/// State letter and CPU time in milliseconds of a thread, from /proc.
fn kernel_view(tid: u64) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).ok()?;
    // The name stands in parentheses and may hold spaces: fields count from the last one.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let state = fields.first()?.chars().next()?;
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some((state, ticks * 1000 / rustix::param::clock_ticks_per_second().max(1)))
}

/// A span of time as a person reads it, never with more than three or four digits.
#[must_use]
pub fn span(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{ms} ms"),
        10_000..600_000 => format!("{} s", ms / 1_000),
        600_000..36_000_000 => format!("{} min", ms / 60_000),
        _ => format!("{} h", ms / 3_600_000),
    }
}

/// Threads of this process that are not in the table: those a library made, by the names it gave them.
fn others(listed: &[threads::Row]) -> Vec<(u64, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let tids = tasks.filter_map(|task| task.file_name().to_str()?.parse::<u64>().ok());
    let mut others: Vec<_> = tids
        .filter(|tid| listed.iter().all(|row| row.tid != *tid))
        .filter_map(|tid| Some((tid, std::fs::read_to_string(format!("/proc/self/task/{tid}/comm")).ok()?)))
        .collect();
    others.sort();
    others
}

/// The thread part of the page.
#[must_use]
pub fn threads_page() -> String {
    let (mut rows, unlisted) = threads::table();
    rows.sort_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
    let others = others(&rows);
    let mut page = format!(
        "beebox-chatd {} pid {} at {}\nthreads: {} listed, {unlisted} unlisted, {} of libraries\n",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
        crate::clock::rfc3339(crate::clock::now_ms()),
        rows.len(),
        others.len()
    );
    for row in rows {
        let (state, cpu_ms) = kernel_view(row.tid).unwrap_or(('?', 0));
        let _ = writeln!(
            page,
            "  {:<15} tid {:<7} {state}  cpu {cpu_ms:>6} ms  {} for {}{}",
            row.name.as_str(),
            row.tid,
            row.doing.words(),
            span(row.for_ms),
            row.session.map(|session| format!("  session {session}")).unwrap_or_default()
        );
    }
    for (tid, name) in others {
        let (state, cpu_ms) = kernel_view(tid).unwrap_or(('?', 0));
        let _ = writeln!(page, "  {:<15} tid {tid:<7} {state}  cpu {cpu_ms:>6} ms  of a library", name.trim_end());
    }
    page
}

/// Writes the page to stderr and ends the process with code 1.
pub fn print_and_exit() -> ! {
    use std::io::Write as _;
    let _ = std::io::stderr().write_all(threads_page().as_bytes());
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_of_time_has_few_digits() {
        let table = [(0, "0 ms"), (9_999, "9999 ms"), (10_000, "10 s"), (599_999, "599 s"), (600_000, "10 min")];
        for (ms, words) in table.into_iter().chain([(35_999_999, "599 min"), (36_000_000, "10 h")]) {
            assert_eq!(span(ms), words);
        }
    }
}
