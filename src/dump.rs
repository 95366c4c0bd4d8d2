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

/// The thread part of the page.
#[must_use]
pub fn threads_page() -> String {
    let (mut rows, unlisted) = threads::table();
    rows.sort_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
    let mut page = format!("threads: {} listed, {unlisted} unlisted\n", rows.len());
    for row in rows {
        let (state, cpu_ms) = kernel_view(row.tid).unwrap_or(('?', 0));
        let _ = writeln!(
            page,
            "  {:<15} tid {:<7} {state}  cpu {cpu_ms} ms  {} for {} ms",
            row.name.as_str(),
            row.tid,
            row.doing.words(),
            row.for_ms
        );
    }
    page
}

/// Writes the page to stderr and ends the process with code 1.
pub fn print_and_exit() -> ! {
    use std::io::Write as _;
    let _ = std::io::stderr().write_all(threads_page().as_bytes());
    std::process::exit(1)
}
