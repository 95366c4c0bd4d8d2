//! PURE. Where the shown lines of one transcript stand: offset, length, kind, photo count and id of each, in bounded
//! memory, so that a page, the total and a photo cost no second scan.
//!
//! 12 bytes a line in chunks of 1,024, and a table of id hashes at 12 bytes a place. Past [`INDEX_BYTES_MAX`] the
//! oldest chunks shrink to one mark each and their pages are scanned again from the mark. Leaves files and freshness to
//! `archive`. Rules a change could break: of two records with one id the first counts (among the last 229,000 at
//! least); nothing grows without a bound.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use super::entry::sniffed_id;
use super::line::{RawLine, Seen};
use super::record::Kind;
use super::strip::Cut;

/// Most memory of one file's index, in bytes.
pub const INDEX_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Lines of one chunk.
const CHUNK_LINES: usize = 1024;
/// Most bytes of chunks; the rest of the bound is for the two id tables.
const CHUNK_BYTES_MAX: usize = INDEX_BYTES_MAX - 2 * ID_PLACES_MAX * ID_PLACE_BYTES - 256 * 1024;
/// Places of one id table, at 12 bytes each.
const ID_PLACES_MAX: usize = 1 << 18;
const ID_PLACE_BYTES: usize = 12;
/// Base64 runs so long are remembered, so that a page does not read them again.
pub const SPAN_BYTES_MIN: u32 = 16 * 1024;
/// Doubles remembered by place, for pages that are scanned again.
const DOUBLES_MAX: usize = 4096;

/// One line of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Where the record starts in the file.
    pub offset: u64,
    /// Its bytes in the file.
    pub len: u64,
    /// What it is.
    pub kind: Kind,
    /// Too long or too deep to be parsed.
    pub stub: bool,
    /// Carries results of tools.
    pub results: bool,
    /// Photos in it, 255 at most.
    pub images: u8,
}

/// A [`Place`] in 12 bytes.
#[derive(Debug, Clone, Copy)]
struct Packed([u32; 3]);

const KIND_BITS: u32 = 0x7;
const STUB_BIT: u32 = 0x8;
const RESULTS_BIT: u32 = 0x10;

impl Packed {
    fn new(place: &Place) -> Self {
        let flags =
            place.kind as u32 | if place.stub { STUB_BIT } else { 0 } | if place.results { RESULTS_BIT } else { 0 };
        Self([
            place.offset as u32,
            u32::try_from(place.len).unwrap_or(u32::MAX),
            ((place.offset >> 32) as u32 & 0xffff) << 16 | flags << 8 | u32::from(place.images),
        ])
    }

    fn place(self) -> Place {
        let Self([low, len, rest]) = self;
        let flags = rest >> 8 & 0xff;
        Place {
            offset: u64::from(rest >> 16) << 32 | u64::from(low),
            len: u64::from(len),
            kind: Kind::from_number((flags & KIND_BITS) as u8),
            stub: flags & STUB_BIT != 0,
            results: flags & RESULTS_BIT != 0,
            images: rest as u8,
        }
    }
}

/// A long base64 run inside a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Which line of its chunk.
    line: u16,
    /// Where it starts in the record.
    pub start: u32,
    /// Its bytes.
    pub len: u32,
}

/// What is kept of a record that is shown as a stub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StubId {
    /// Its id as an entry.
    pub uuid: String,
    /// Its time, if it says one.
    pub timestamp: Option<String>,
}

#[derive(Debug, Default)]
struct Chunk {
    /// Entries before its first line.
    entries_before: u64,
    entries: u32,
    lines: Vec<Packed>,
    spans: Vec<Span>,
    stubs: Vec<(u16, StubId)>,
}

impl Chunk {
    fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.lines.capacity() * size_of::<Packed>()
            + self.spans.capacity() * size_of::<Span>()
            + self
                .stubs
                .iter()
                .map(|(_, s)| 96 + s.uuid.len() + s.timestamp.as_ref().map_or(0, String::len))
                .sum::<usize>()
    }
}

/// What is left of a chunk that had to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Where its first line starts.
    pub offset: u64,
    /// Entries before it.
    pub entries_before: u64,
}

/// Hashes of ids to line numbers, open addressing.
#[derive(Debug, Default)]
struct Ids {
    hashes: Vec<u64>,
    lines: Vec<u32>,
    used: usize,
}

impl Ids {
    fn find(&self, hash: u64) -> Option<u32> {
        if self.hashes.is_empty() {
            return None;
        }
        let mask = self.hashes.len() - 1;
        let mut at = hash as usize & mask;
        while self.hashes[at] != 0 {
            if self.hashes[at] == hash {
                return Some(self.lines[at]);
            }
            at = (at + 1) & mask;
        }
        None
    }

    fn is_full(&self) -> bool {
        self.hashes.len() == ID_PLACES_MAX && self.used >= ID_PLACES_MAX / 8 * 7
    }

    /// Not for a hash that is there already.
    fn add(&mut self, hash: u64, line: u32) {
        if self.used >= self.hashes.len() / 8 * 7 {
            let places = (self.hashes.len() * 2).max(16);
            let (hashes, lines) =
                (std::mem::replace(&mut self.hashes, vec![0; places]), std::mem::take(&mut self.lines));
            self.lines = vec![0; places];
            for (hash, line) in hashes.into_iter().zip(lines).filter(|(hash, _)| *hash != 0) {
                self.put(hash, line);
            }
        }
        self.put(hash, line);
        self.used += 1;
    }

    fn put(&mut self, hash: u64, line: u32) {
        let mask = self.hashes.len() - 1;
        let mut at = hash as usize & mask;
        while self.hashes[at] != 0 {
            at = (at + 1) & mask;
        }
        self.hashes[at] = hash;
        self.lines[at] = line;
    }

    fn bytes(&self) -> usize {
        self.hashes.len() * ID_PLACE_BYTES
    }
}

/// A line of a plan: where it is, and what need not be read of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Where it is.
    pub place: Place,
    /// Long runs inside it, in order.
    pub spans: Vec<Span>,
    /// Its id and time, if it is a stub.
    pub stub: Option<StubId>,
}

/// Where to look for a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// These lines, oldest first; `first_entry` entries come before them.
    Lines {
        /// Lines to read.
        steps: Vec<Step>,
        /// Number of the first entry among them.
        first_entry: u64,
    },
    /// The index no longer has them: scan the file again from this mark.
    Rescan(Mark),
}

/// See the head of this file.
#[derive(Debug)]
pub struct Index {
    hasher: RandomState,
    chunks: VecDeque<Chunk>,
    marks: Vec<Mark>,
    chunk_bytes: usize,
    ids: Ids,
    older_ids: Ids,
    doubles: HashSet<u64>,
    /// Doubles are known by place alone: this index covers a window that was scanned before.
    window: bool,
    lines: u64,
    total: u64,
    skipped: u64,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            chunks: VecDeque::new(),
            marks: Vec::new(),
            chunk_bytes: 0,
            ids: Ids::default(),
            older_ids: Ids::default(),
            doubles: HashSet::new(),
            window: false,
            lines: 0,
            total: 0,
            skipped: 0,
        }
    }
}

impl Index {
    /// Entries of the transcript.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Lines that could not be read.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Lines it knows of.
    #[must_use]
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// Its memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.chunk_bytes
            + self.chunks.back().map_or(0, Chunk::bytes)
            + self.marks.capacity() * size_of::<Mark>()
            + self.ids.bytes()
            + self.older_ids.bytes()
            + self.doubles.capacity() * 9
    }

    /// For the lines from `mark` on, of which `of` forgot the places.
    #[must_use]
    pub fn window(of: &Index, mark: Mark) -> Self {
        Self { window: true, doubles: of.doubles.clone(), total: mark.entries_before, ..Self::default() }
    }

    fn hash(&self, id: &str) -> u64 {
        self.hasher.hash_one(id).max(1)
    }

    /// Takes in the next line of the file.
    pub fn take(&mut self, raw: &RawLine<'_>) {
        raw.each(|seen| match seen {
            Seen::Gap => self.skipped += 1,
            Seen::Record { record, cuts, offset, len, .. } => match record.kind {
                Kind::Hidden => {}
                Kind::Unreadable => self.skipped += 1,
                Kind::User | Kind::Assistant | Kind::Compaction | Kind::Interrupted | Kind::Notice | Kind::Result => {
                    let content = record.content.unwrap_or_default();
                    let place = Place {
                        offset,
                        len,
                        kind: record.kind,
                        stub: false,
                        results: content.results > 0,
                        images: u8::try_from(content.images).unwrap_or(u8::MAX),
                    };
                    let id = record.plain_uuid();
                    let shift = u32::try_from(offset - raw.offset).unwrap_or(u32::MAX);
                    let own =
                        |c: &&Cut| c.len >= SPAN_BYTES_MIN && c.start >= shift && u64::from(c.start - shift) < len;
                    let spans = cuts.iter().filter(own).map(|c| (c.start - shift, c.len));
                    self.add(place, id.as_deref(), spans, None);
                }
            },
            Seen::Stub { kind, sniff, offset, len } => match kind {
                Kind::Hidden => {}
                Kind::Unreadable => self.skipped += 1,
                Kind::User | Kind::Assistant | Kind::Compaction | Kind::Interrupted | Kind::Notice | Kind::Result => {
                    let place = Place { offset, len, kind, stub: true, results: sniff.results, images: 0 };
                    let (uuid, timestamp) = sniffed_id(sniff, offset);
                    let id = (!uuid.starts_with("at-")).then(|| uuid.clone());
                    self.add(place, id.as_deref(), std::iter::empty(), Some(StubId { uuid, timestamp }));
                }
            },
        });
    }

    fn add(&mut self, place: Place, id: Option<&str>, spans: impl Iterator<Item = (u32, u32)>, stub: Option<StubId>) {
        if place.kind.is_entry() && self.is_double(id, place.offset) {
            return;
        }
        if self.chunks.back().is_none_or(|c| c.lines.len() == CHUNK_LINES) {
            self.chunk_bytes += self.chunks.back().map_or(0, Chunk::bytes);
            self.chunks.push_back(Chunk { entries_before: self.total, ..Chunk::default() });
            self.evict();
        }
        let Some(chunk) = self.chunks.back_mut() else {
            return;
        };
        let line = chunk.lines.len() as u16;
        chunk.lines.push(Packed::new(&place));
        chunk.spans.extend(spans.map(|(start, len)| Span { line, start, len }));
        chunk.stubs.extend(stub.map(|s| (line, s)));
        if place.kind.is_entry() {
            chunk.entries += 1;
            self.total += 1;
        }
        self.lines += 1;
    }

    /// Also remembers the id.
    fn is_double(&mut self, id: Option<&str>, offset: u64) -> bool {
        if self.window {
            return self.doubles.contains(&offset);
        }
        let Some(id) = id else { return false };
        let hash = self.hash(id);
        if self.ids.find(hash).or_else(|| self.older_ids.find(hash)).is_some() {
            if self.doubles.len() < DOUBLES_MAX {
                self.doubles.insert(offset);
            }
            return true;
        }
        if self.ids.is_full() {
            self.older_ids = std::mem::take(&mut self.ids);
        }
        self.ids.add(hash, u32::try_from(self.lines).unwrap_or(u32::MAX));
        false
    }

    fn evict(&mut self) {
        while self.chunk_bytes > CHUNK_BYTES_MAX && self.chunks.len() > 1 {
            let Some(gone) = self.chunks.pop_front() else {
                return;
            };
            self.chunk_bytes -= gone.bytes();
            let offset = gone.lines.first().map_or(0, |l| l.place().offset);
            self.marks.push(Mark { offset, entries_before: gone.entries_before });
        }
    }

    /// Lines before the first chunk.
    fn first_line(&self) -> u64 {
        (self.marks.len() * CHUNK_LINES) as u64
    }

    fn step(&self, chunk: &Chunk, line: usize) -> Step {
        let number = line as u16;
        let from = chunk.spans.partition_point(|s| s.line < number);
        let to = chunk.spans.partition_point(|s| s.line <= number);
        Step {
            place: chunk.lines[line].place(),
            spans: chunk.spans[from..to].to_vec(),
            stub: chunk.stubs.iter().find(|(l, _)| *l == number).map(|(_, s)| s.clone()),
        }
    }

    /// The lines of the newest `tail` entries, more if that takes `users_min` messages of persons; `entries_max` at most.
    #[must_use]
    pub fn plan_tail(&self, tail: usize, users_min: usize, entries_max: usize) -> Plan {
        let (mut entries, mut users) = (0, 0);
        let mut steps = Vec::new();
        'all: for chunk in self.chunks.iter().rev() {
            for line in (0..chunk.lines.len()).rev() {
                let place = chunk.lines[line].place();
                if place.kind.is_entry() {
                    if entries == entries_max || (entries >= tail && users >= users_min) {
                        break 'all;
                    }
                    entries += 1;
                    users += usize::from(place.kind == Kind::User);
                }
                steps.push(self.step(chunk, line));
            }
        }
        steps.reverse();
        Plan::Lines { steps, first_entry: self.total - entries as u64 }
    }

    /// The lines of `limit` entries from entry number `offset` on, and what may carry results of their calls.
    #[must_use]
    pub fn plan_page(&self, offset: u64, limit: usize) -> Plan {
        if offset >= self.total || limit == 0 {
            return Plan::Lines { steps: Vec::new(), first_entry: offset.min(self.total) };
        }
        let at = self.chunks.partition_point(|c| c.entries_before + u64::from(c.entries) <= offset);
        if at == 0
            && self.chunks.front().is_none_or(|c| c.entries_before > offset)
            && let Some(mark) = self.marks.iter().rev().find(|m| m.entries_before <= offset)
        {
            return Plan::Rescan(*mark);
        }
        let mut steps = Vec::new();
        let mut number = self.chunks.get(at).map_or(0, |c| c.entries_before);
        let mut behind = 0;
        'all: for chunk in self.chunks.iter().skip(at) {
            for line in 0..chunk.lines.len() {
                let place = chunk.lines[line].place();
                let taken = number >= offset + limit as u64;
                if taken {
                    // Results of the page's last calls stand before the next words of a person.
                    behind += 1;
                    if matches!(place.kind, Kind::User | Kind::Compaction) || behind > LOOK_AHEAD_LINES {
                        break 'all;
                    }
                    if place.kind == Kind::Result {
                        steps.push(self.step(chunk, line));
                    }
                    continue;
                }
                if place.kind.is_entry() {
                    number += 1;
                    if number > offset {
                        steps.push(self.step(chunk, line));
                    }
                } else if number > offset {
                    steps.push(self.step(chunk, line));
                }
            }
        }
        Plan::Lines { steps, first_entry: offset }
    }

    /// The line of the entry `id`, if the index still knows it; `Err` if only a scan can tell.
    ///
    /// # Errors
    /// The mark to scan from.
    pub fn find(&self, id: &str) -> Result<Option<Step>, Mark> {
        let start = Mark { offset: 0, entries_before: 0 };
        if let Some(offset) = id.strip_prefix("at-").and_then(|n| n.parse::<u64>().ok()) {
            let at = self.chunks.partition_point(|c| c.lines.first().is_some_and(|l| l.place().offset <= offset));
            if at == 0 {
                return match self.marks.iter().rev().find(|m| m.offset <= offset) {
                    Some(mark) => Err(*mark),
                    None => Ok(None),
                };
            }
            let chunk = &self.chunks[at - 1];
            return Ok(chunk
                .lines
                .binary_search_by_key(&offset, |l| l.place().offset)
                .ok()
                .map(|line| self.step(chunk, line)));
        }
        let hash = self.hash(id);
        match self.ids.find(hash).or_else(|| self.older_ids.find(hash)) {
            Some(line) => match u64::from(line).checked_sub(self.first_line()) {
                Some(n) => {
                    let n = n as usize;
                    let chunk = self.chunks.get(n / CHUNK_LINES);
                    Ok(chunk.filter(|c| n % CHUNK_LINES < c.lines.len()).map(|c| self.step(c, n % CHUNK_LINES)))
                }
                None => Err(self.marks.get(line as usize / CHUNK_LINES).copied().unwrap_or(start)),
            },
            // All ids are known as long as no table was given up.
            None if self.marks.is_empty() && self.older_ids.used == 0 => Ok(None),
            None => Err(start),
        }
    }
}

/// Lines behind a page that are looked at for results of its calls.
const LOOK_AHEAD_LINES: usize = 256;
