//! The tests from outside, one binary.

mod push; // the live event stream over real sockets
