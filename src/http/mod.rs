//! The HTTP side: what may come in, where it goes, how it is answered.
//!
//! `gate` owns the port and vets everything; `server` is the tiny_http worker pool behind it; `route` is the URL map,
//! `guard` who may talk, `reply` the status codes, `handlers` the routes themselves.
//! Rule a change could break: nothing reaches `server` that the gate has not vetted.

pub mod gate;
pub mod guard;
pub mod handlers;
pub mod reply;
pub mod route;
pub mod server;
