//! (room being built)
pub mod chat;
pub mod durability;
pub mod features;
pub mod pool;
pub mod registry;
pub mod thread;
