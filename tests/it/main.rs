//! The tests from outside, one binary.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail loudly"
)]

mod agent_process; // harness: an agent driven line by line
mod embedded; // the embedded agent as a process
