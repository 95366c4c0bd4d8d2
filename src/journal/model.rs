//! The journal of the model checker: the shipped handle and queue, and in place of the database a ledger in memory that
//! refuses what must not happen. Rule a change could break: as with the real one, `done` runs on the journal's thread,
//! in the order of the calls.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use super::reader::Readers;
use super::time::JournalTime;
use super::writer::Job;
use super::{Counters, Journal, JournalOptions, Shared};
use crate::error::Result;
use crate::model;
use crate::sync::{Condvar, Mutex, unbounded};
use crate::threads::{self, Name, OnPanic, SMALL_STACK_BYTES};

impl Journal {
    /// A journal in memory, with its thread.
    ///
    /// # Errors
    /// None here.
    pub fn in_memory() -> Result<Journal> {
        let options = JournalOptions::default();
        let (jobs, waiting) = unbounded();
        let shared = Arc::new(Shared {
            places: AtomicUsize::new(0),
            places_max: options.places_max,
            bytes: AtomicUsize::new(0),
            bytes_max: options.queue_bytes_max,
            bad: AtomicBool::new(false),
            trouble: Mutex::new(None),
            watched: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            closed: Mutex::new(false),
            closed_now: Condvar::new(),
            counters: Counters::default(),
            readers: Readers::new(PathBuf::new(), Duration::ZERO),
            time: JournalTime::at_zero(),
        });
        let theirs = Arc::clone(&shared);
        threads::spawn(const { Name::fixed("journal") }, SMALL_STACK_BYTES, OnPanic::Contain, move || {
            while let Ok(job) = waiting.recv() {
                match job {
                    Job::Accept { acceptance, bytes, place, done } => {
                        theirs.give_bytes(bytes);
                        let outcome = model::accept(&acceptance);
                        drop(place);
                        done(outcome);
                    }
                    Job::Unit { unit, owed: _, place, done } => {
                        model::record(&unit);
                        drop(place);
                        done(Ok(Vec::new()));
                    }
                    Job::Look => {}
                    Job::Close => break,
                }
            }
            theirs.set_closed();
        })?;
        Ok(Journal { jobs, shared, claim_age_ms: options.claim_age_ms })
    }

    /// Places that are taken now: none, once everything is over.
    #[must_use]
    pub fn places_taken(&self) -> u64 {
        self.stats().places
    }
}
