//! (room being built)
pub mod gate;
pub mod guard;
pub mod handlers;
pub mod reply;
pub mod route;
pub mod server;
