//! (room being built)

/// Which part of a conversation a page holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// The newest entries.
    Tail {
        /// How many.
        tail: usize,
        /// More, until so many messages of a person are in it.
        min_real_user_messages: usize,
    },
    /// Entries from a place on, counted from the oldest.
    Page {
        /// The first.
        offset: u64,
        /// How many.
        limit: usize,
    },
}
