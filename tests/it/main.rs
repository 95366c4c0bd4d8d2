//! The tests from outside, one binary.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

/// The port: framing, times, load, who may talk.
mod gate;
