//! A request at a worker, and its answer on the way back: what the gate and the pool share of it.
//!
//! The head of a request goes to the pool over its socket, under a number; its body and its answer go through here, in
//! memory. Rules a change could break: a request is either taken up by one worker or taken back by the gate, never both;
//! whoever took it up ends it, whatever happens; an answer holds no more memory than [`PIPE_BYTES_MAX`] and one piece,
//! and a worker that waits for room is told at once when nobody wants the rest.

use std::collections::HashMap;
use std::sync::Arc;

use super::body::Store;
use super::notes::{Note, Notes};
use crate::error::Result;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::threads::{self, Doing};

/// Bytes of an answer that wait for the gate before their worker has to: two reads of a file are under way at once, one
/// being sent and one being made.
pub const PIPE_BYTES_MAX: usize = 64 * 1024;

/// What the gate and the pool share.
#[derive(Debug)]
pub struct Exchanges {
    notes: Arc<Notes>,
    desk: Mutex<Desk>,
    call: Condvar,
}

/// Requests that no worker has taken up yet, and the workers that may.
///
/// Of the free workers only [`LISTENERS`] listen to tiny_http at a time, because it wakes one for every request, with its
/// queue locked, if any waits there; the others rest here until requests outnumber the listeners.
#[derive(Debug, Default)]
struct Desk {
    waiting: HashMap<u64, Waiting>,
    /// Workers that listen, or were called to.
    listening: usize,
    resting: usize,
    /// Resting workers that were called and have not gone yet.
    called: usize,
    closed: bool,
}

/// Workers that listen at a time: one is on its way to its next request while the other waits for one.
const LISTENERS: usize = 2;

#[derive(Debug)]
struct Waiting {
    body: Store,
    exchange: Arc<Exchange>,
}

/// One request's answer on its way.
#[derive(Debug, Default)]
pub struct Exchange {
    pipe: Mutex<Pipe>,
    room: Condvar,
}

#[derive(Debug, Default)]
struct Pipe {
    status: u16,
    total: u64,
    bytes: Vec<u8>,
    end: End,
    /// A note about it is on its way to the gate.
    told: bool,
    /// Nobody wants the rest.
    gone: bool,
    /// Its worker waits for room.
    worker_waits: bool,
}

/// How an answer stands.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// More is to come.
    #[default]
    Open,
    /// It is whole.
    Whole,
    /// Its worker could not give what it promised: nothing more will come.
    Torn,
}

/// What came since the last time.
#[derive(Debug)]
pub struct Taken {
    /// Status of the answer.
    pub status: u16,
    /// Bytes that it will have in all, head and body.
    pub total: u64,
    /// Bytes of its head and body.
    pub bytes: Vec<u8>,
    /// How it stands behind them.
    pub end: End,
}

impl Exchanges {
    /// None at first.
    ///
    /// # Errors
    /// When the kernel has no descriptor to give.
    pub fn new() -> Result<Arc<Self>> {
        Ok(Arc::new(Self { notes: Notes::new()?, desk: Mutex::default(), call: Condvar::new() }))
    }

    /// What wakes the gate.
    #[must_use]
    pub fn notes(&self) -> &Arc<Notes> {
        &self.notes
    }

    /// Lays a request out for the worker that will get its number.
    pub fn lay_out(&self, number: u64, body: Store) -> Arc<Exchange> {
        let exchange = Arc::new(Exchange::default());
        let waiting = Waiting { body, exchange: Arc::clone(&exchange) };
        let mut desk = self.desk.lock();
        desk.waiting.insert(number, waiting);
        self.call_if_needed(desk);
        exchange
    }

    /// Takes a request back, with its body; none if a worker has it.
    pub fn take_back(&self, number: u64) -> Option<Store> {
        self.desk.lock().waiting.remove(&number).map(|w| w.body)
    }

    /// A free worker waits until it may listen to tiny_http; none at the end of the house.
    pub fn listen(&self) -> Option<Listening<'_>> {
        let mut desk = self.desk.lock();
        if desk.listening < LISTENERS {
            desk.listening += 1;
        } else {
            desk.resting += 1;
            while desk.called == 0 && !desk.closed {
                self.call.wait(&mut desk);
            }
            desk.resting -= 1;
            // Who called counted it as listening.
            if desk.called == 0 {
                return None;
            }
            desk.called -= 1;
        }
        let closed = desk.closed;
        drop(desk);
        let listening = Listening { exchanges: self };
        (!closed).then_some(listening)
    }

    /// No worker listens from now on.
    pub fn close(&self) {
        self.desk.lock().closed = true;
        self.call.notify_all();
    }

    /// Calls a resting worker if requests wait and nobody listens.
    fn call_if_needed(&self, mut desk: MutexGuard<'_, Desk>) {
        let call = !desk.waiting.is_empty() && desk.listening == 0 && desk.resting > desk.called;
        if call {
            desk.listening += 1;
            desk.called += 1;
        }
        drop(desk);
        if call {
            self.call.notify_one();
        }
    }
}

/// A worker's leave to listen, given back when it has its request.
#[derive(Debug)]
pub struct Listening<'a> {
    exchanges: &'a Exchanges,
}

impl Listening<'_> {
    /// Takes a request up; none if the gate took it back.
    pub fn take_up(self, number: u64) -> Option<(Store, Answering)> {
        let Waiting { body, exchange } = self.exchanges.desk.lock().waiting.remove(&number)?;
        Some((body, Answering { number, exchange, notes: Arc::clone(&self.exchanges.notes) }))
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        let mut desk = self.exchanges.desk.lock();
        desk.listening -= 1;
        self.exchanges.call_if_needed(desk);
    }
}

impl Exchange {
    /// What came since the last time; its worker may go on.
    pub fn take(&self) -> Taken {
        let mut pipe = self.pipe.lock();
        pipe.told = false;
        let bytes = std::mem::take(&mut pipe.bytes);
        let taken = Taken { status: pipe.status, total: pipe.total, bytes, end: pipe.end };
        if std::mem::take(&mut pipe.worker_waits) {
            drop(pipe);
            self.room.notify_one();
        }
        taken
    }

    /// Nobody wants the rest; its end is still told.
    pub fn abandon(&self) {
        let mut pipe = self.pipe.lock();
        pipe.gone = true;
        pipe.bytes = Vec::new();
        if std::mem::take(&mut pipe.worker_waits) {
            drop(pipe);
            self.room.notify_one();
        }
    }
}

/// The worker's end; one that is dropped before [`Answering::finish`] tears the answer.
#[derive(Debug)]
pub struct Answering {
    number: u64,
    exchange: Arc<Exchange>,
    notes: Arc<Notes>,
}

impl Answering {
    /// Says what the answer will be: its status, and its bytes in all.
    pub fn begin(&self, status: u16, total: u64) {
        let mut pipe = self.exchange.pipe.lock();
        (pipe.status, pipe.total) = (status, total);
    }

    /// Gives bytes of head or body, and waits while the client has enough to take; false if nobody wants more.
    #[must_use]
    pub fn give(&self, piece: &[u8]) -> bool {
        let mut pipe = self.exchange.pipe.lock();
        if !pipe.gone && pipe.bytes.len() >= PIPE_BYTES_MAX {
            let _at = threads::doing(Doing::WaitReader);
            while !pipe.gone && pipe.bytes.len() >= PIPE_BYTES_MAX {
                pipe.worker_waits = true;
                self.exchange.room.wait(&mut pipe);
            }
        }
        if pipe.gone {
            return false;
        }
        pipe.bytes.extend_from_slice(piece);
        let tell = !std::mem::replace(&mut pipe.told, true);
        drop(pipe);
        if tell {
            self.notes.leave(Note::Answer(self.number));
        }
        true
    }

    /// Gives the last bytes.
    pub fn finish(self, bytes: Vec<u8>) {
        let mut pipe = self.exchange.pipe.lock();
        if pipe.bytes.is_empty() {
            pipe.bytes = bytes;
        } else {
            pipe.bytes.extend_from_slice(&bytes);
        }
        pipe.end = End::Whole;
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut pipe = self.exchange.pipe.lock();
        if pipe.end == End::Open {
            pipe.end = End::Torn;
        }
        let tell = !std::mem::replace(&mut pipe.told, true);
        drop(pipe);
        if tell {
            self.notes.leave(Note::Answer(self.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_up(exchanges: &Exchanges, number: u64) -> Option<(Store, Answering)> {
        exchanges.listen().unwrap().take_up(number)
    }

    fn answers(exchanges: &Exchanges) -> usize {
        let mut notes = Vec::new();
        exchanges.notes().take(&mut notes);
        notes.len()
    }

    #[test]
    fn a_request_is_taken_up_or_taken_back_and_never_both() {
        let exchanges = Exchanges::new().unwrap();
        exchanges.lay_out(1, Store::Memory(vec![7]));
        exchanges.lay_out(2, Store::Memory(vec![8]));
        assert_eq!(exchanges.take_back(1).unwrap().len(), 1);
        assert!(take_up(&exchanges, 1).is_none());
        let (body, _answering) = take_up(&exchanges, 2).unwrap();
        assert!(matches!(body, Store::Memory(b) if b == [8]));
        assert!(exchanges.take_back(2).is_none());
        assert!(take_up(&exchanges, 2).is_none());
    }

    #[test]
    fn an_answer_is_told_once_until_it_is_taken_and_torn_if_its_worker_falls() {
        let exchanges = Exchanges::new().unwrap();
        let exchange = exchanges.lay_out(1, Store::default());
        let (_, answering) = take_up(&exchanges, 1).unwrap();
        answering.begin(200, 100);
        assert!(answering.give(b"ab"));
        assert!(answering.give(b"cd"));
        assert_eq!(answers(&exchanges), 1);
        let taken = exchange.take();
        assert_eq!((taken.status, taken.total, &taken.bytes[..], taken.end), (200, 100, &b"abcd"[..], End::Open));
        drop(answering);
        assert_eq!(answers(&exchanges), 1);
        assert_eq!(exchange.take().end, End::Torn);

        let exchange = exchanges.lay_out(2, Store::default());
        let (_, answering) = take_up(&exchanges, 2).unwrap();
        answering.begin(206, 2);
        assert!(answering.give(b"a"));
        answering.finish(b"b".to_vec());
        assert_eq!(answers(&exchanges), 1);
        let taken = exchange.take();
        assert_eq!((taken.status, &taken.bytes[..], taken.end), (206, &b"ab"[..], End::Whole));
    }

    #[test]
    fn a_worker_waits_for_its_reader_and_ends_when_that_is_gone() {
        let exchanges = Exchanges::new().unwrap();
        let exchange = exchanges.lay_out(1, Store::default());
        let (_, answering) = take_up(&exchanges, 1).unwrap();
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let mut given = 0;
                while answering.give(&[0; 1024]) {
                    given += 1024;
                }
                given
            });
            let mut taken = 0;
            while taken < 10 * PIPE_BYTES_MAX {
                let bytes = exchange.take().bytes.len();
                assert!(bytes < PIPE_BYTES_MAX + 1024);
                taken += bytes;
                std::thread::yield_now();
            }
            exchange.abandon();
            assert!(worker.join().unwrap() >= taken);
        });
    }

    #[test]
    fn a_request_finds_a_listener_while_others_are_at_work_and_however_many_fall() {
        let exchanges = Exchanges::new().unwrap();
        let (give, take) = crate::sync::unbounded::<Option<u64>>();
        let done = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                let (exchanges, take, done) = (&exchanges, take.clone(), &done);
                scope.spawn(move || {
                    while let Some(listening) = exchanges.listen() {
                        let Ok(Some(number)) = take.recv() else { return };
                        // Every third leave is dropped as by a worker that falls.
                        if number % 3 == 0 {
                            drop(listening);
                            exchanges.take_back(number).unwrap();
                        } else {
                            drop(listening.take_up(number).unwrap());
                        }
                        done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
            for number in 0..10_000 {
                exchanges.lay_out(number, Store::default());
                give.send(Some(number)).unwrap();
            }
            let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while done.load(std::sync::atomic::Ordering::SeqCst) < 10_000 {
                assert!(std::time::Instant::now() < until, "{exchanges:?}");
                std::thread::yield_now();
            }
            exchanges.close();
            for _ in 0..6 {
                give.send(None).unwrap();
            }
        });
        let desk = exchanges.desk.lock();
        assert_eq!((desk.waiting.len(), desk.listening, desk.resting, desk.called), (0, 0, 0, 0));
    }
}
