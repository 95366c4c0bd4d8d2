//! The tests from outside, one binary.
