//! What the handle of a run and its thread share, and how the thread is started.
//!
//! Leaves the thread's work to its parent module. Rule a change could break: no call here waits, [`Shared::join_within`]
//! aside, and close and kill cannot fail: they are flags, not orders in a queue that may be full.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::agent::{RunListener, RunSpec, Turn};
use crate::error::{Code, Error, Result};
use crate::ids::RunNo;
use crate::sync::{Sender, TrySendError, bounded};
use crate::threads::{self, Name, OnPanic, WORK_STACK_BYTES};

/// Orders that wait for the pump; a session has one turn in flight.
pub(super) const ORDERS_MAX: usize = 16;

/// What the handle asks of the pump.
#[derive(Debug)]
pub enum Order {
    /// Hand this to the agent.
    Turn(Turn),
    /// Ask it to end its turn.
    Interrupt,
}

/// What the handle and the pump share.
#[derive(Debug)]
pub struct Shared {
    no: RunNo,
    orders: Sender<Order>,
    pub(super) wake: OwnedFd,
    /// Nothing more reaches the agent.
    pub(super) closed: AtomicBool,
    /// Somebody called close or kill.
    pub(super) asked: AtomicBool,
    pub(super) killed: AtomicBool,
    /// 0 while there is no process.
    pub(super) pid: AtomicU32,
    began: Instant,
    /// Milliseconds since `began` at the last message, plus one; 0 before the first.
    last_message: AtomicU64,
    thread: OnceLock<threads::Thread>,
    #[cfg(feature = "model")]
    pub(super) woken: (crate::sync::Mutex<bool>, crate::sync::Condvar),
}

impl Shared {
    /// Queues an order.
    ///
    /// # Errors
    /// The run is closed, or has [`ORDERS_MAX`] orders waiting.
    pub fn send(&self, order: Order) -> Result<()> {
        if self.is_closed() {
            return Err(self.refuse("is closed"));
        }
        match self.orders.try_send(order) {
            Ok(()) => {
                self.wake();
                Ok(())
            }
            Err(TrySendError::Full(_)) => Err(self.refuse("has too much waiting")),
            Err(TrySendError::Disconnected(_)) => Err(self.refuse("has ended")),
        }
    }

    fn refuse(&self, why: &str) -> Error {
        Error::new(Code::AgentUnavailable, format!("{} {why}", self.no))
    }

    /// Asks for the end of the run.
    pub fn close(&self) {
        self.asked.store(true, Ordering::Release);
        self.closed.store(true, Ordering::Release);
        self.wake();
    }

    /// Asks for the end of the run, now.
    pub fn kill(&self) {
        self.killed.store(true, Ordering::Release);
        self.close();
    }

    /// Nothing more reaches the agent.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Number of the run.
    pub fn no(&self) -> RunNo {
        self.no
    }

    /// The process while it lives.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Acquire)).filter(|pid| *pid != 0)
    }

    /// Waits for the thread.
    pub fn join_within(&self, limit: Duration) -> bool {
        self.thread.get().is_some_and(|thread| thread.join_within(limit))
    }

    /// Age of the last message, in milliseconds.
    pub fn last_message_age_ms(&self) -> Option<u64> {
        let at = self.last_message.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.now_ms().saturating_sub(at))
    }

    /// The agent said something.
    pub(super) fn heard(&self) {
        self.last_message.store(self.now_ms() + 1, Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }

    fn wake(&self) {
        #[cfg(feature = "model")]
        {
            *self.woken.0.lock() = true;
            self.woken.1.notify_all();
        }
        // Full means that a wake is on its way already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Takes the wakes that came.
    pub(super) fn unwake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }
}

/// Starts a run's thread.
///
/// # Errors
/// No thread or descriptor to be had.
pub fn start(spec: RunSpec, listener: Arc<dyn RunListener>) -> Result<Arc<Shared>> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| Error::new(Code::AgentUnavailable, format!("no descriptor for a run: {e}")))?;
    let (orders, inbox) = bounded(ORDERS_MAX);
    let shared = Arc::new(Shared {
        no: spec.run,
        orders,
        wake,
        closed: AtomicBool::new(false),
        asked: AtomicBool::new(false),
        killed: AtomicBool::new(false),
        pid: AtomicU32::new(0),
        began: Instant::now(),
        last_message: AtomicU64::new(0),
        thread: OnceLock::new(),
        #[cfg(feature = "model")]
        woken: Default::default(),
    });
    let name = Name::run(&spec.session);
    let mine = Arc::clone(&shared);
    let thread = threads::spawn(name, WORK_STACK_BYTES, OnPanic::Contain, move || {
        #[cfg(feature = "model")]
        super::model::run(&spec, &*listener, &mine, &inbox);
        #[cfg(not(feature = "model"))]
        super::Pump::new(spec, listener, mine, inbox).run();
    })
    .map_err(|e| Error::new(Code::AgentUnavailable, format!("no thread for a run: {e}")))?;
    let _ = shared.thread.set(thread);
    Ok(shared)
}
