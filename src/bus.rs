//! The ordered stream of events. Here: the two seams towards the journal.

use crate::error::Result;
use crate::ids::EventId;

/// Where the journal hands over a kept event, after its commit, in the order of ids.
pub trait Publisher: Send + Sync {
    /// Event `id` is durable; `at` is its RFC 3339 time.
    fn publish_kept(&self, id: EventId, event: &str, data: &serde_json::Value, at: &str);
}

/// Where subscribers read what is kept.
pub trait EventStore: Send + Sync {
    /// Kept events with ids above `after`, oldest first, `rows_max` at most.
    ///
    /// # Errors
    /// The store cannot be read.
    fn events_after(&self, after: EventId, rows_max: usize) -> Result<Vec<StoredEvent>>;
    /// Oldest kept id (1 if none) and newest (0 if none).
    ///
    /// # Errors
    /// The store cannot be read.
    fn bounds(&self) -> Result<(EventId, EventId)>;
}

/// A kept event as it lies in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEvent {
    /// Positive, rising.
    pub id: EventId,
    /// Its name.
    pub event: String,
    /// Its data, one JSON value.
    pub data_json: String,
    /// RFC 3339.
    pub at: String,
}
