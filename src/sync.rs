//! Facade over parking_lot and crossbeam: session code takes its locks, condvars and channels from here, so that the
//! model checker can run the shipped code with its own. Leaves which lock comes before which to the table in `lib.rs`.

pub use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, TrySendError, bounded, unbounded};
pub use parking_lot::{Condvar, Mutex, MutexGuard};
