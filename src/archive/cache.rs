//! Indexes of the files in use. Readers of one file take turns for the microseconds that bringing its index up to date
//! takes; the first reader of a file scans it, those that come meanwhile wait for that one scan.
//! Rules a change could break: no lock is held while a file is read; a scan that fails or panics leaves no reader
//! waiting; all indexes together stay under [`ALL_BYTES_MAX`].

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memchr::memchr;

use super::file::{Buffers, Source};
use crate::sync::{Condvar, Mutex};
use crate::transcript::index::Index;
use crate::transcript::line::Scanner;
use crate::transcript::media::Digest;

/// Most memory of all indexes, in bytes.
pub const ALL_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Most indexes, whatever their size.
const FILES_MAX: usize = 1024;
/// Bytes before the end of what is indexed that tell whether the file is still the same.
const TAIL_BYTES: usize = 4096;

/// See the head of this file.
#[derive(Debug, Default)]
pub struct Cache {
    slots: Mutex<Slots>,
    /// For every reader of the archive.
    pub buffers: Buffers,
}

#[derive(Debug, Default)]
struct Slots {
    by_path: HashMap<PathBuf, Kept>,
    clock: u64,
}

#[derive(Debug)]
struct Kept {
    slot: Arc<Slot>,
    used: u64,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Slot {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Somebody has the turn, and `known` with it.
    busy: bool,
    known: Option<Box<Known>>,
}

#[derive(Debug)]
struct Known {
    index: Index,
    identity: (u64, u64),
    /// Behind the last LF that was seen.
    end: u64,
    /// No LF stands between `end` and here.
    looked_to: u64,
    tail: String,
}

/// Gives the turn back, also when the scan failed or panicked.
struct Turn<'a> {
    slot: &'a Slot,
    known: Option<Box<Known>>,
}

impl<'a> Turn<'a> {
    fn wait_for(slot: &'a Slot) -> Self {
        let mut state = slot.state.lock();
        while state.busy {
            slot.changed.wait(&mut state);
        }
        state.busy = true;
        let known = state.known.take();
        Self { slot, known }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let known = self.known.take();
        let mut state = self.slot.state.lock();
        state.busy = false;
        state.known = known;
        drop(state);
        self.slot.changed.notify_one();
    }
}

impl Cache {
    /// Calls `f` with the index of `path`, up to date with every line that was whole when this was called; none if the
    /// file is not there. `f` must be quick: it has the turn.
    pub fn with<T>(&self, path: &Path, f: impl FnOnce(&Index, &Source) -> T) -> io::Result<Option<T>> {
        let slot = self.slot(path);
        let mut turn = Turn::wait_for(&slot);
        // Opened under the turn: a reader that waited sees at least what the one before it saw.
        let Some(source) = Source::open(path)? else {
            turn.known = None;
            drop(turn);
            self.slots.lock().by_path.remove(path);
            return Ok(None);
        };
        let known = turn.known.take();
        let known = turn.known.insert(self.refresh(known, &source)?);
        let out = f(&known.index, &source);
        let bytes = known.index.bytes();
        drop(turn);
        self.account(path, bytes);
        Ok(Some(out))
    }

    /// Memory of all indexes.
    pub fn bytes(&self) -> usize {
        self.slots.lock().by_path.values().map(|k| k.bytes).sum()
    }

    fn slot(&self, path: &Path) -> Arc<Slot> {
        let mut slots = self.slots.lock();
        slots.clock += 1;
        let used = slots.clock;
        if let Some(kept) = slots.by_path.get_mut(path) {
            kept.used = used;
            return kept.slot.clone();
        }
        let slot = Arc::new(Slot::default());
        slots.by_path.insert(path.to_owned(), Kept { slot: slot.clone(), used, bytes: 0 });
        slot
    }

    fn account(&self, path: &Path, bytes: usize) {
        let mut gone = Vec::new();
        let mut slots = self.slots.lock();
        if let Some(kept) = slots.by_path.get_mut(path) {
            kept.bytes = bytes;
        }
        let mut sum: usize = slots.by_path.values().map(|k| k.bytes).sum();
        while (sum > ALL_BYTES_MAX || slots.by_path.len() > FILES_MAX) && slots.by_path.len() > 1 {
            let oldest = slots.by_path.iter().min_by_key(|(_, k)| k.used).map(|(path, _)| path.clone());
            let Some(kept) = oldest.and_then(|path| slots.by_path.remove(&path)) else {
                break;
            };
            sum -= kept.bytes;
            gone.push(kept);
        }
        drop(slots);
        drop(gone);
    }

    fn refresh(&self, known: Option<Box<Known>>, source: &Source) -> io::Result<Box<Known>> {
        let known = match known {
            Some(known) if self.is_same(&known, source)? => known,
            Some(_) | None => Box::new(Known {
                index: Index::default(),
                identity: source.identity,
                end: 0,
                looked_to: 0,
                tail: String::new(),
            }),
        };
        if source.size == known.looked_to || !self.has_new_line(&known, source)? {
            return Ok(Box::new(Known { looked_to: source.size.max(known.looked_to), ..*known }));
        }
        self.extend(known, source)
    }

    fn is_same(&self, known: &Known, source: &Source) -> io::Result<bool> {
        Ok(known.identity == source.identity
            && source.size >= known.looked_to
            && tail(source, known.end)? == known.tail)
    }

    /// Looks only at bytes that were not looked at before, so that a long line that grows costs its length once.
    fn has_new_line(&self, known: &Known, source: &Source) -> io::Result<bool> {
        if known.looked_to == known.end {
            return Ok(true);
        }
        let mut buffer = self.buffers.take();
        let mut at = known.looked_to;
        loop {
            let n = source.read_at(&mut buffer, at)?;
            if n == 0 {
                return Ok(false);
            }
            if memchr(b'\n', &buffer[..n]).is_some() {
                return Ok(true);
            }
            at += n as u64;
        }
    }

    fn extend(&self, mut known: Box<Known>, source: &Source) -> io::Result<Box<Known>> {
        let mut buffer = self.buffers.take();
        let mut scanner = Scanner::new(known.end);
        let mut at = known.end;
        loop {
            let n = source.read_at(&mut buffer, at)?;
            if n == 0 {
                break;
            }
            at += n as u64;
            scanner.push(&buffer[..n], |raw| known.index.take(&raw));
        }
        known.end = scanner.held_from();
        known.looked_to = at;
        known.tail = tail(source, known.end)?;
        Ok(known)
    }
}

/// Tells whether the bytes before `end` are still the same.
fn tail(source: &Source, end: u64) -> io::Result<String> {
    let mut bytes = [0; TAIL_BYTES];
    let start = end.saturating_sub(TAIL_BYTES as u64);
    let want = (end - start) as usize;
    if !source.fill_at(&mut bytes[..want], start)? {
        return Ok(String::new());
    }
    let mut digest = Digest::default();
    digest.feed(&bytes[..want]);
    Ok(digest.text())
}
