//! (room being built)
pub mod adapt;
pub mod command;
pub mod content;
pub mod embedded;
pub mod pump;
pub mod wire;
