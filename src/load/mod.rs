//! Client side of the wire: what the tests from outside and `beebox-load` share.
//!
//! Everything here talks to a server over its port, its command line, /proc and the files its agents leave, as a
//! stranger would. Rule a change could break: no line here reaches into a room of the server, so that a fault there
//! cannot hide itself by being on both sides of a comparison.

pub mod checker;
pub mod client;
pub mod events;
pub mod figures;
pub mod page;
pub mod png;
pub mod proc;
pub mod report;
pub mod rng;
pub mod run;
pub mod scenario;
pub mod spawn;
