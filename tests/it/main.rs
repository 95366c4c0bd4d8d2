//! The tests from outside, one binary.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail loudly"
)]

mod harness; // the harness itself: what it promises to the tests below
mod support; // a server on a box of its own, clients, and waits that explain themselves
