//! The tests from outside, one binary.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail loudly"
)]

mod embedded; // the embedded agent as a process
mod gate; // the port: framing, times, load, who may talk
mod harness; // the harness itself: what it promises to the tests below
mod push; // the live event stream over real sockets
mod support; // a server on a box of its own, clients, and waits that explain themselves
