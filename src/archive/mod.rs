//! The files of transcripts: finds them, reads windows and photos of them, looks turns up, watches what is appended.
//! Only ever reads transcripts; at most a link to one is made.
//!
//! Leaves what a line means to `transcript`. Rules a change could break: memory is bounded per request and in all; one
//! scan of a file serves every reader that came meanwhile; nothing is read under a lock; a file that is appended to,
//! replaced or shortened at any moment gives old or new content, never a mixture that was on disk at no time.

mod cache;
mod file;
mod find;
mod media;
mod queue;
mod trace;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use find::Listed;
pub use media::{MediaFile, MediaReader};
pub use queue::{FoundTurn, QueueTrace, Waiting};
pub use trace::{Sought, TailWatch, Trace};

use crate::error::{Code, Error, Result};
use crate::ids::SessionId;
use crate::threads::{Doing, at_work_for, doing};
use crate::transcript::entry::{Entry, ToolResult, build, build_stub, sniffed_result};
use crate::transcript::index::{Index, Mark, Plan, Step};
use crate::transcript::line::{Scanner, Seen};
use crate::transcript::page::{ENTRIES_MAX, Gather, Page, Window};
use crate::transcript::record::{self, Kind};
use crate::transcript::{LINE_BYTES_MAX, MediaRef};
use cache::Cache;
use file::{LineReader, Source, Whole};
use find::Finder;

/// See the head of this file. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Archive {
    inner: Arc<Inner>,
}

/// How a transcript stood at one moment: one that was written to since has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    file: (u64, u64),
    bytes: u64,
}

#[derive(Debug)]
struct Inner {
    finder: Finder,
    cache: Cache,
}

/// Most bytes of one line that are read again for the words of a tool's result.
const RESULT_BYTES_MAX: u64 = 8 * 1024 * 1024;

impl Archive {
    /// Over the transcripts of `box_dir` in `agent_home`; `former` are paths that the box had before it was moved.
    #[must_use]
    pub fn new(agent_home: &Path, box_dir: &Path, former: Vec<String>) -> Self {
        let finder = Finder::new(agent_home, box_dir, former);
        Self { inner: Arc::new(Inner { finder, cache: Cache::default() }) }
    }

    /// The journal knows this conversation: its transcript is looked for in every project folder of the agent's home,
    /// in `folder` first.
    pub fn remember(&self, session: &SessionId, folder: Option<&str>) {
        self.inner.finder.remember(session, folder);
    }

    /// The project folder that the transcript of `session` lies in now.
    #[must_use]
    pub fn folder_of(&self, session: &SessionId) -> Option<String> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return crate::model::has_transcript(session).then(|| "model".to_owned());
        }
        self.inner.finder.folder_of(&self.path_of(session)?)
    }

    /// How the transcript of `session` stands now; `None` if there is none.
    #[must_use]
    pub fn stamp(&self, session: &SessionId) -> Option<Stamp> {
        use std::os::unix::fs::MetadataExt as _;
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return None;
        }
        let meta = std::fs::metadata(self.path_of(session)?).ok()?;
        Some(Stamp { file: (meta.dev(), meta.ino()), bytes: meta.len() })
    }

    /// Lets an agent that looks only in the folder of its working directory find the transcript of `session` after the box
    /// was moved. True if that was done now.
    #[must_use]
    pub fn link_here(&self, session: &SessionId) -> bool {
        self.inner.finder.link_here(session).unwrap_or_else(|e| {
            log::warn!("session {session}: its transcript is not linked into the folder of the box: {e}");
            false
        })
    }

    /// Ok if the transcript of `session` can be opened, or if there is none.
    ///
    /// # Errors
    /// [`Code::Unreadable`]: something stands there that is no readable file.
    pub fn ensure_readable(&self, session: &SessionId) -> Result<()> {
        let Some(path) = self.path_of(session) else { return Ok(()) };
        Source::open(&path).map(|_| ()).map_err(|e| unreadable(&path, &e))
    }

    /// The transcript of `session`, opened with the one lock that says "an agent of ours writes here"; `None` if there
    /// is no transcript. The lock is given back when the file is dropped.
    ///
    /// # Errors
    /// [`Code::AgentUnavailable`]: a server of another box (a copy of this one) has an agent in the conversation.
    pub fn hold(&self, session: &SessionId) -> Result<Option<std::fs::File>> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return Ok(None);
        }
        let Some(path) = self.path_of(session) else { return Ok(None) };
        let opened = Source::open(&path).map_err(|e| unreadable(&path, &e))?;
        let Some(file) = opened.map(|source| source.file().try_clone()).transpose()? else { return Ok(None) };
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let text = "another server, of a copy of this box, has an agent in this conversation now";
                Err(Error::new(Code::AgentUnavailable, text))
            }
            Err(e) => {
                log::warn!("transcript {}: not locked: {e}", path.display());
                Ok(None)
            }
        }
    }

    /// The transcript of `session`, if there is one.
    #[must_use]
    pub fn path_of(&self, session: &SessionId) -> Option<PathBuf> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return crate::model::has_transcript(session).then(PathBuf::new);
        }
        let _at = doing(Doing::ReadFile);
        self.inner.finder.path_of(session)
    }

    /// A window of the conversation; empty if it has no transcript.
    ///
    /// # Errors
    /// [`Code::Unreadable`]: the transcript is there and cannot be read.
    pub fn history(&self, session: &SessionId, window: Window) -> Result<Page> {
        let _for = at_work_for(session);
        let _at = doing(Doing::ReadFile);
        let Some(path) = self.inner.finder.path_of(session) else {
            return Ok(Page::empty());
        };
        let made = self.inner.cache.with(&path, |index, source| {
            let plan = match window {
                Window::Tail { tail, min_real_user_messages } => {
                    index.plan_tail(tail.min(ENTRIES_MAX), min_real_user_messages, ENTRIES_MAX)
                }
                Window::Page { offset, limit } => index.plan_page(offset, limit.min(ENTRIES_MAX)),
            };
            let (plan, window_index) = match plan {
                Plan::Rescan(mark) => (None, Some((Index::window(index, mark), mark))),
                Plan::Lines { steps, first_entry } => (Some((steps, first_entry)), None),
            };
            (plan, window_index, index.total(), index.skipped(), source.clone())
        });
        let (plan, rescan, total, skipped_lines, source) = match made.map_err(|e| unreadable(&path, &e))? {
            Some(made) => made,
            None => return Ok(Page::empty()),
        };
        let (steps, first_entry) = match (plan, rescan, window) {
            (Some(plan), ..) => plan,
            (None, Some((index, mark)), Window::Page { offset, limit }) => {
                self.rescan(&source, index, mark, offset, limit.min(ENTRIES_MAX)).map_err(|e| unreadable(&path, &e))?
            }
            (None, ..) => (Vec::new(), total),
        };
        let newest_first = matches!(window, Window::Tail { .. });
        let limit = match window {
            Window::Tail { .. } => ENTRIES_MAX,
            Window::Page { limit, .. } => limit.min(ENTRIES_MAX),
        };
        let entries = self.gather(&source, session, steps, newest_first, limit).map_err(|e| unreadable(&path, &e))?;
        let shown = entries.len() as u64;
        let (offset, has_more) = if newest_first {
            let offset = total.saturating_sub(shown);
            (offset, offset > 0)
        } else {
            (first_entry, first_entry + shown < total)
        };
        Ok(Page { entries, total, offset, has_more, skipped_lines })
    }

    fn gather(
        &self,
        source: &Source,
        session: &SessionId,
        mut steps: Vec<Step>,
        newest_first: bool,
        limit: usize,
    ) -> std::io::Result<Vec<Entry>> {
        if newest_first {
            steps.reverse();
        }
        let mut gather = Gather::new(newest_first, limit);
        let mut reader = LineReader::new(&self.inner.cache.buffers);
        for step in &steps {
            if gather.wants_only_results() {
                if newest_first || !gather.has_open_calls() {
                    break;
                }
                if !step.place.results {
                    continue;
                }
            }
            let (entry, results, bytes) = read_step(source, session, step, &mut reader)?;
            gather.add(entry, results, bytes);
        }
        Ok(gather.finish())
    }

    /// The plan of a page whose lines the index no longer has.
    fn rescan(
        &self,
        source: &Source,
        mut index: Index,
        mark: Mark,
        offset: u64,
        limit: usize,
    ) -> std::io::Result<(Vec<Step>, u64)> {
        let enough = offset + limit as u64;
        let mut behind = 0_u32;
        self.scan(source, mark.offset, |raw| {
            index.take(raw);
            behind += u32::from(index.total() > enough);
            // Far enough for the results of the page's last calls.
            behind < 256
        })?;
        Ok(match index.plan_page(offset, limit) {
            Plan::Lines { steps, first_entry } => (steps, first_entry),
            Plan::Rescan(_) => (Vec::new(), offset),
        })
    }

    /// Walks whole lines from `from` on until `each` says false.
    fn scan(
        &self,
        source: &Source,
        from: u64,
        mut each: impl FnMut(&crate::transcript::line::RawLine<'_>) -> bool,
    ) -> std::io::Result<()> {
        let mut buffer = self.inner.cache.buffers.take();
        let mut scanner = Scanner::new(from);
        let (mut at, mut on) = (from, true);
        while on && at < source.size {
            let n = source.read_at(&mut buffer, at)?;
            if n == 0 {
                break;
            }
            at += n as u64;
            scanner.push(&buffer[..n], |raw| on = on && each(&raw));
        }
        Ok(())
    }

    /// One photo, validated whole.
    ///
    /// # Errors
    /// [`Code::NotFound`]: no such entry, no such photo, or its payload is not whole base64; [`Code::TooLarge`]: it
    /// stands in a line over 64 MiB; [`Code::Unreadable`]: the transcript cannot be read.
    pub fn media(&self, media: &MediaRef) -> Result<MediaFile> {
        let _for = at_work_for(&media.session);
        let _at = doing(Doing::ReadFile);
        let missing = || Error::new(Code::NotFound, format!("no photo {media}"));
        let path = self.inner.finder.path_of(&media.session).ok_or_else(missing)?;
        let fail = |e: std::io::Error| unreadable(&path, &e);
        let found = self.inner.cache.with(&path, |index, source| (index.find(&media.entry), source.clone()));
        let (found, source) = found.map_err(fail)?.ok_or_else(missing)?;
        let step = match found {
            Ok(step) => step,
            Err(mark) => self.find_by_scan(&source, mark, &media.entry).map_err(fail)?,
        };
        let step = step.ok_or_else(missing)?;
        if step.place.len > LINE_BYTES_MAX {
            return Err(Error::new(Code::TooLarge, format!("{media} stands in a line over {LINE_BYTES_MAX} bytes")));
        }
        if step.place.stub || usize::from(step.place.images) <= media.index && step.place.images < u8::MAX {
            return Err(missing());
        }
        let mut reader = LineReader::new(&self.inner.cache.buffers);
        let payload = reader.read(&source, &step, u64::MAX).map_err(fail)?.and_then(|whole| match whole {
            Whole::Line(line, cuts) => {
                let record = record::read(line, cuts, 0).ok()?;
                crate::transcript::entry::payload(&record, line, cuts, media.index)
            }
            Whole::Sniffed(_) => None,
        });
        drop(reader);
        let (start, len) = payload.ok_or_else(missing)?;
        MediaFile::check(source, step.place.offset + start, len).map_err(fail)?.ok_or_else(missing)
    }

    fn find_by_scan(&self, source: &Source, mark: Mark, id: &str) -> std::io::Result<Option<Step>> {
        let mut index = Index::default();
        self.scan(source, mark.offset, |raw| {
            // Only the wanted line goes into this small index.
            let mut wanted = false;
            raw.each(|seen| match seen {
                Seen::Record { record, offset, .. } => {
                    wanted |=
                        record.kind.is_entry() && crate::transcript::entry::entry_id(record.plain_uuid(), offset) == id;
                }
                Seen::Stub { .. } | Seen::Gap => {}
            });
            if wanted {
                index.take(raw);
            }
            !wanted
        })?;
        Ok(index.find(id).unwrap_or(None))
    }

    /// The conversations of the box, the last used first, `rows_max` at most.
    #[must_use]
    pub fn list(&self, rows_max: usize) -> Vec<Listed> {
        let _at = doing(Doing::ReadFile);
        self.inner.finder.list(rows_max)
    }

    /// Memory of all indexes, in bytes.
    #[must_use]
    pub fn index_bytes(&self) -> usize {
        self.inner.cache.bytes()
    }

    /// Lines and memory of the index of `session`, if it is in memory; for measurements.
    #[must_use]
    pub fn index_size(&self, session: &SessionId) -> Option<(u64, usize)> {
        let path = self.inner.finder.path_of(session)?;
        self.inner.cache.with(&path, |index, _| (index.lines(), index.bytes())).ok().flatten()
    }
}

fn read_step(
    source: &Source,
    session: &SessionId,
    step: &Step,
    reader: &mut LineReader<'_>,
) -> std::io::Result<(Option<Entry>, Vec<ToolResult>, usize)> {
    let place = &step.place;
    if let Some(stub) = &step.stub {
        if place.kind == Kind::Result {
            let result = match reader.read(source, step, RESULT_BYTES_MAX)? {
                Some(Whole::Sniffed(sniff)) => sniffed_result(sniff),
                Some(Whole::Line(..)) | None => None,
            };
            return Ok((None, result.into_iter().collect(), 0));
        }
        let entry = build_stub(place.kind, stub.uuid.clone(), stub.timestamp.clone(), place.len);
        return Ok((entry, Vec::new(), 256));
    }
    Ok(match reader.read(source, step, u64::MAX)? {
        Some(Whole::Line(line, cuts)) => match record::read(line, cuts, 0) {
            Ok(record) => {
                let (entry, results) = build(&record, line, cuts, session, place.offset);
                (entry, results, line.len())
            }
            Err(_) => (None, Vec::new(), 0),
        },
        Some(Whole::Sniffed(_)) | None => (None, Vec::new(), 0),
    })
}

fn unreadable(path: &Path, e: &std::io::Error) -> Error {
    log::warn!("transcript {} cannot be read: {e}", path.display());
    Error::new(Code::Unreadable, format!("the transcript is there and cannot be read: {e}"))
}

#[cfg(test)]
mod tests;
