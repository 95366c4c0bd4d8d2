//! PURE. One window of a conversation: which entries, results grafted on their calls, and where an answer stops.
//!
//! Leaves reading the lines to `archive`. Rule a change could break: an answer holds whole entries and at most
//! [`ANSWER_BYTES_MAX`] of them; what is left away is the far end of the window.

use std::collections::HashMap;
use std::io::Write;

use serde::Serialize;

use super::entry::{Block, Entry, ToolResult};

/// Most bytes of one answer's entries, serialized (WIRE).
pub const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Most entries of one answer (WIRE).
pub const ENTRIES_MAX: usize = 5_000;

/// Which part of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// The newest `tail` entries, more if that takes so many messages of persons.
    Tail {
        /// Entries.
        tail: usize,
        /// Messages that persons wrote.
        min_real_user_messages: usize,
    },
    /// `limit` entries from number `offset` on, counted from the oldest.
    Page {
        /// Number of the first.
        offset: u64,
        /// Entries.
        limit: usize,
    },
}

/// One answer (WIRE, history).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Page {
    /// Oldest first.
    pub entries: Vec<Entry>,
    /// Entries of the whole conversation.
    pub total: u64,
    /// Number of the first entry here, counted from the oldest.
    pub offset: u64,
    /// More lies beyond the far end: before a tail, behind a page.
    pub has_more: bool,
    /// Lines of the whole transcript that could not be read.
    pub skipped_lines: u64,
}

impl Page {
    /// A conversation without a transcript.
    #[must_use]
    pub fn empty() -> Self {
        Self { entries: Vec::new(), total: 0, offset: 0, has_more: false, skipped_lines: 0 }
    }
}

/// Collects entries in one direction until the window or the answer is full.
#[derive(Debug)]
pub struct Gather {
    entries: Vec<Entry>,
    /// Results that wait for a call (when going back), calls that wait for a result (when going on).
    results: HashMap<String, String>,
    calls: HashMap<String, (usize, usize)>,
    newest_first: bool,
    entries_max: usize,
    bound_bytes: usize,
    /// Exact, once the bound no longer shows that everything fits.
    exact_bytes: Option<usize>,
    full: bool,
}

impl Gather {
    /// Records come newest first if `newest_first`, else oldest first.
    #[must_use]
    pub fn new(newest_first: bool, entries_max: usize) -> Self {
        Self {
            entries: Vec::new(),
            results: HashMap::new(),
            calls: HashMap::new(),
            newest_first,
            entries_max,
            bound_bytes: 0,
            exact_bytes: None,
            full: false,
        }
    }

    /// True if nothing more fits.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// True if only results of earlier calls can still be of use.
    #[must_use]
    pub fn wants_only_results(&self) -> bool {
        self.full || self.entries.len() >= self.entries_max
    }

    /// True while a call has no result.
    #[must_use]
    pub fn has_open_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// The next record; `line_bytes` is the length of its stripped line.
    pub fn add(&mut self, entry: Option<Entry>, results: Vec<ToolResult>, line_bytes: usize) {
        for result in results {
            if self.newest_first {
                // The first result of a call counts: going back it comes last.
                self.results.insert(result.tool_id, result.summary);
            } else if let Some((entry, block)) = self.calls.remove(&result.tool_id) {
                if let Some(bytes) = &mut self.exact_bytes {
                    *bytes = (*bytes + serialized_bytes(&result.summary)).saturating_sub(RESULT_ROOM_BYTES);
                }
                graft(&mut self.entries[entry].content[block], result.summary);
            }
        }
        let Some(mut entry) = entry else { return };
        if self.wants_only_results() {
            self.full = true;
            return;
        }
        if self.newest_first {
            for block in &mut entry.content {
                if let Block::ToolUse { tool_id, .. } = block
                    && let Some(summary) = self.results.remove(tool_id)
                {
                    graft(block, summary);
                }
            }
        }
        if !self.fits(&entry, line_bytes) {
            self.full = true;
            return;
        }
        if !self.newest_first {
            for (at, block) in entry.content.iter().enumerate() {
                if let Block::ToolUse { tool_id, .. } = block {
                    self.calls.entry(tool_id.clone()).or_insert((self.entries.len(), at));
                }
            }
        }
        self.entries.push(entry);
    }

    fn fits(&mut self, entry: &Entry, line_bytes: usize) -> bool {
        // No byte of a line takes more than six in the answer; a block adds a few words and a result at most.
        self.bound_bytes += 6 * line_bytes + 4096 * (entry.content.len() + 1);
        if self.bound_bytes <= ANSWER_BYTES_MAX {
            return true;
        }
        let before = match self.exact_bytes {
            Some(bytes) => bytes,
            None => {
                let written: usize = self.entries.iter().map(|e| serialized_bytes(e) + 1).sum();
                written + RESULT_ROOM_BYTES * self.calls.len()
            }
        };
        let bytes = before + serialized_bytes(entry) + 1 + self.room_for_results(entry);
        let fits = bytes <= ANSWER_BYTES_MAX || self.entries.is_empty();
        self.exact_bytes = Some(if fits { bytes } else { before });
        fits
    }

    /// Going on, results come after their calls were measured.
    fn room_for_results(&self, entry: &Entry) -> usize {
        if self.newest_first {
            return 0;
        }
        RESULT_ROOM_BYTES * entry.content.iter().filter(|b| matches!(b, Block::ToolUse { .. })).count()
    }

    /// The entries, oldest first.
    #[must_use]
    pub fn finish(mut self) -> Vec<Entry> {
        if self.newest_first {
            self.entries.reverse();
        }
        self.entries
    }
}

/// Most bytes of a result in an answer: 500 characters, each six bytes as an escape, with its key.
const RESULT_ROOM_BYTES: usize = 3072;

fn graft(block: &mut Block, summary: String) {
    if let Block::ToolUse { result_summary, .. } = block
        && result_summary.is_none()
    {
        *result_summary = Some(summary);
    }
}

fn serialized_bytes(value: &impl Serialize) -> usize {
    struct Count(usize);
    impl Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        Err(_) => ANSWER_BYTES_MAX,
    }
}
