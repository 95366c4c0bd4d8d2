//! beebox-chatd: hosts long-lived conversations with a coding agent for one box and serves them over one port.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests fail loudly"))]

pub mod agent;
pub mod app;
pub mod archive;
pub mod bus;
pub mod clock;
pub mod config;
pub mod dump;
pub mod error;
pub mod faults;
pub mod http;
pub mod ids;
pub mod inbox;
pub mod journal;
pub mod lifecycle;
pub mod load;
pub mod push;
pub mod session;
pub mod sync;
pub mod threads;
pub mod tools;
pub mod transcript;
pub mod web;
