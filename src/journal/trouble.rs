//! What can be wrong with the disk under the journal: words for a person, and faults that tests plant at our own seam.
//! Rule a change could break: every call that can reach the disk while a record is made passes [`Faults::check`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rusqlite::ErrorCode;
use rusqlite::ffi;

use crate::error::{Code, Error};
use crate::sync::Mutex;

/// How a planted fault looks to the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The disk is full.
    Full,
    /// The disk reports an error on a write.
    IoWrite,
    /// The disk reports an error on a flush.
    IoFsync,
    /// The file system went read-only.
    ReadOnly,
    /// Another program holds the write lock.
    Busy,
}

impl FaultKind {
    fn error(self) -> rusqlite::Error {
        let code = match self {
            FaultKind::Full => ffi::SQLITE_FULL,
            FaultKind::IoWrite => ffi::SQLITE_IOERR_WRITE,
            FaultKind::IoFsync => ffi::SQLITE_IOERR_FSYNC,
            FaultKind::ReadOnly => ffi::SQLITE_READONLY,
            FaultKind::Busy => ffi::SQLITE_BUSY,
        };
        rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
    }
}

#[derive(Debug)]
struct Plan {
    calls: AtomicU64,
    /// First failing call (counted from 1), how many fail, and how.
    failing: Mutex<Option<(u64, u64, FaultKind)>>,
}

/// Faults planted at the n-th call of the writer to SQLite (begin, each statement, commit). Off by default, and free.
#[derive(Debug, Clone, Default)]
pub struct Faults(Option<Arc<Plan>>);

impl Faults {
    /// Counts calls and fails none until [`Faults::fail`].
    #[must_use]
    pub fn counting() -> Self {
        Self(Some(Arc::new(Plan { calls: AtomicU64::new(0), failing: Mutex::new(None) })))
    }

    /// As the tests' variable asks; none without it.
    #[must_use]
    pub fn from_env() -> Self {
        let Some((kind, nth, count)) = crate::faults::disk() else { return Self::default() };
        let kind = match kind.as_str() {
            "full" => FaultKind::Full,
            "write" => FaultKind::IoWrite,
            "fsync" => FaultKind::IoFsync,
            "readonly" => FaultKind::ReadOnly,
            "busy" => FaultKind::Busy,
            other => {
                log::error!("BEEBOX_DISK: `{other}` is not full, write, fsync, readonly or busy");
                std::process::exit(2)
            }
        };
        let faults = Self::counting();
        faults.fail(nth, count, kind);
        faults
    }

    /// From the `nth` call from now (1 is the next) `count` calls fail as `kind`.
    pub fn fail(&self, nth: u64, count: u64, kind: FaultKind) {
        if let Some(plan) = &self.0 {
            let first = plan.calls.load(Ordering::SeqCst).saturating_add(nth);
            *plan.failing.lock() = Some((first, count, kind));
        }
    }

    /// The disk is good again.
    pub fn heal(&self) {
        if let Some(plan) = &self.0 {
            *plan.failing.lock() = None;
        }
    }

    /// Calls so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.0.as_ref().map_or(0, |plan| plan.calls.load(Ordering::SeqCst))
    }

    /// Passes one call.
    pub(super) fn check(&self) -> rusqlite::Result<()> {
        let Some(plan) = &self.0 else { return Ok(()) };
        let call = plan.calls.fetch_add(1, Ordering::SeqCst) + 1;
        match *plan.failing.lock() {
            Some((first, count, kind)) if call >= first && call - first < count => Err(kind.error()),
            Some(_) | None => Ok(()),
        }
    }
}

/// True for trouble of the disk or of its neighbours, which may pass; false for a record that can never be made.
pub(super) fn may_pass(e: &rusqlite::Error) -> bool {
    !matches!(
        e.sqlite_error_code(),
        None | Some(ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig | ErrorCode::Unknown)
    )
}

/// `e` in words a person can act on.
pub(super) fn words(e: &rusqlite::Error) -> String {
    let known = match e.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Some("the disk is full"),
        Some(ErrorCode::ReadOnly) => Some("the journal is read-only"),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Some("another program holds the journal"),
        Some(ErrorCode::SystemIoFailure) => Some("the disk reports an error"),
        Some(ErrorCode::CannotOpen) => Some("the journal cannot be opened"),
        Some(ErrorCode::DatabaseCorrupt) => Some("the journal is damaged"),
        Some(ErrorCode::NotADatabase) => Some("the journal is not a database"),
        Some(ErrorCode::OutOfMemory) => Some("out of memory"),
        Some(_) | None => None,
    };
    match known {
        Some(words) => format!("{words} ({e})"),
        None => e.to_string(),
    }
}

/// The answer to whoever wanted a record.
pub(super) fn cannot_record(reason: &str) -> Error {
    Error::new(Code::CannotRecord, format!("not known to be recorded, repeat with the same messageId: {reason}"))
}

/// A read that failed.
pub(super) fn cannot_read(e: &rusqlite::Error) -> Error {
    Error::internal(format!("journal read: {}", words(e)))
}
