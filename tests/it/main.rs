//! The tests from outside, one binary.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "tests fail loudly and run clients of their own"
)]

mod agent_process; // harness: an agent driven line by line
mod agents; // agents behind the server: starts, stops, what is left, what a failed start says
mod conversation; // a conversation with the embedded agent, through deaths and restarts
mod crash; // random deaths at named points, judged by the checker
mod embedded; // the embedded agent as a process
mod gate; // the port: framing, times, load, who may talk
mod harness; // the harness itself: what it promises to the tests below
mod input; // what bad input gets, on every route
mod load; // the load tool from outside
mod many; // many conversations: live places, threads, flags, frames, many servers, the ends of one
mod memory; // what a body costs in memory, whatever is in it
mod promise; // the promise with agents, places and copies that nobody thought of
mod push; // the live event stream over real sockets
mod run; // a run of the library with the embedded agent, no server around it
mod send; // acceptance at its edges: other writers, a bad disk, races with the end of a turn
mod support; // a server on a box of its own, clients, and waits that explain themselves
mod tidy; // the rules of the house, read off its source
mod transcripts; // what the real agent wrote, read over the port
