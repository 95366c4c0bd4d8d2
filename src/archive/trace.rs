//! Whether the agent recorded a message: the look-up that recovery needs, and the watch over what is appended that the
//! durability gate needs. Both read whole lines alone. Rule a change could break: an id counts at its place in a
//! record, never inside a text.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};

use memchr::memmem;

use super::{Archive, unreadable};
use crate::error::Result;
use crate::ids::SessionId;
use crate::threads::{Doing, doing};
use crate::transcript::line::{Body, RawLine, Scanner, Seen};
use crate::transcript::record::{Kind, Record};
use crate::transcript::sniff::Sniff;

use super::file::Source;

/// Transcripts of conversations that nobody knows that are searched for a turn, the newest first …
const STRANGERS_MAX: usize = 1_000;
/// … up to so many bytes in all.
const STRANGERS_BYTES_MAX: u64 = 4 * 1024 * 1024 * 1024;

/// A turn that is looked for.
#[derive(Debug, Clone, Copy)]
pub struct Sought<'a> {
    /// The ids of the turn and of its messages.
    pub ids: &'a [&'a str],
    /// A turn that was in the transcript before. A file without it is not the file the agent wrote.
    pub anchor: Option<&'a str>,
}

/// What the transcripts know of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trace {
    /// The session has no transcript, and no other that nobody knows has the turn.
    NoFile,
    /// None of the ids is in it.
    NotRecorded {
        /// What was in the transcript before is still there (or nothing is known to have been there).
        anchored: bool,
    },
    /// One of them is.
    Recorded {
        /// The agent answered: its last line calls no tool, or a person spoke again, or it was interrupted.
        finished: bool,
        /// It stands in the transcript of this conversation, which nobody knew: the agent named itself so.
        elsewhere: Option<SessionId>,
    },
    /// There are more transcripts of unknown conversations than are searched: it may be in one of them.
    Unsearched,
}

impl Archive {
    /// Looks for a turn by the ids of its messages: `uuid`, `mergedSendUuids`, `attachment.source_uuid`. What is not in
    /// the session's own transcript is looked for in those of the folder that belong to no conversation we know.
    ///
    /// # Errors
    /// `Unreadable`: the transcript is there and cannot be read.
    pub fn look_up(&self, session: &SessionId, sought: Sought<'_>) -> Result<Trace> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return Ok(crate::model::trace(session, sought.ids));
        }
        let _at = doing(Doing::ReadFile);
        let mut here = Trace::NoFile;
        let mut anchored = false;
        for path in self.inner.finder.paths_of(session) {
            let fail = |e: std::io::Error| unreadable(&path, &e);
            if let Some(source) = Source::open(&path).map_err(fail)? {
                let searched = self.search(&source, sought).map_err(fail)?;
                if let Some(finished) = searched.finished {
                    return Ok(Trace::Recorded { finished, elsewhere: None });
                }
                anchored |= searched.anchored;
                here = Trace::NotRecorded { anchored };
            }
        }
        Ok(self.look_among_strangers(sought).unwrap_or(here))
    }

    fn look_among_strangers(&self, sought: Sought<'_>) -> Option<Trace> {
        let (mut bytes, mut all) = (0, true);
        for (n, (session, path)) in self.inner.finder.strangers().into_iter().enumerate() {
            let Ok(Some(source)) = Source::open(&path) else { continue };
            bytes += source.size;
            if n >= STRANGERS_MAX || bytes > STRANGERS_BYTES_MAX {
                all = false;
                break;
            }
            // One that cannot be read belongs to nobody we know, and the next one may be the right one.
            if let Ok(Searched { finished: Some(finished), .. }) = self.search(&source, sought) {
                return Some(Trace::Recorded { finished, elsewhere: Some(session) });
            }
        }
        (!all).then_some(Trace::Unsearched)
    }

    fn search(&self, source: &Source, sought: Sought<'_>) -> std::io::Result<Searched> {
        let ids = sought.ids;
        let finders: Vec<_> =
            ids.iter().copied().chain(sought.anchor).map(|id| memmem::Finder::new(id.as_bytes())).collect();
        let (mut found, mut end) = (false, End::default());
        let mut anchored = sought.anchor.is_none();
        self.scan(source, 0, |raw| {
            if !found && !may_hold(raw, &finders) {
                return true;
            }
            raw.each(|seen| match seen {
                Seen::Record { record, line, .. } => {
                    if found {
                        end.record(&record);
                    } else if !record.sidechain {
                        let here = record.ids(line);
                        found = here.iter().any(|id| ids.contains(&id.as_str()));
                        anchored |= here.iter().any(|id| sought.anchor == Some(id));
                    }
                }
                Seen::Stub { kind, sniff, .. } => {
                    if found {
                        end.stub(kind, sniff);
                    } else if !sniff.sidechain {
                        found = sniffed_ids(sniff).any(|id| ids.iter().any(|want| want.as_bytes() == id));
                        anchored |= sniffed_ids(sniff).any(|id| sought.anchor.is_some_and(|a| a.as_bytes() == id));
                    }
                }
                Seen::Gap => {}
            });
            !end.for_good
        })?;
        Ok(Searched { finished: found.then(|| end.is_finished()), anchored })
    }

    /// Watches what is appended to the transcript of `session` from now on.
    #[must_use]
    pub fn watch(&self, session: &SessionId) -> TailWatch {
        let from = self.path_of(session).and_then(|path| std::fs::metadata(path).ok()).map_or(0, |m| m.len());
        TailWatch {
            archive: self.clone(),
            session: session.clone(),
            // The end can lie inside a line that is being written; whole again, it counts.
            from: self.line_start(session, from),
            identity: None,
            seen: SeenIds::default(),
            is_interrupted: false,
        }
    }

    /// Watches the transcript of `session` from its first line on: for one that got its id only now.
    #[must_use]
    pub fn watch_from_start(&self, session: &SessionId) -> TailWatch {
        TailWatch {
            archive: self.clone(),
            session: session.clone(),
            from: 0,
            identity: None,
            seen: SeenIds::default(),
            is_interrupted: false,
        }
    }

    /// Where the line starts that goes on at `end`.
    fn line_start(&self, session: &SessionId, end: u64) -> u64 {
        let Some(source) = self.path_of(session).and_then(|path| Source::open(&path).ok().flatten()) else {
            return 0;
        };
        let mut buffer = self.inner.cache.buffers.take();
        let mut to = end;
        // A longer half line is looked at from its middle: what is found there is no record.
        for _ in 0..64 {
            let from = to.saturating_sub(buffer.len() as u64);
            let want = (to - from) as usize;
            if want == 0 || !matches!(source.fill_at(&mut buffer[..want], from), Ok(true)) {
                return to;
            }
            if let Some(n) = memchr::memrchr(b'\n', &buffer[..want]) {
                return from + n as u64 + 1;
            }
            to = from;
        }
        to
    }
}

fn may_hold(raw: &RawLine<'_>, finders: &[memmem::Finder<'_>]) -> bool {
    match raw.body {
        Body::Held(line, _) | Body::Tail(line, _) => finders.iter().any(|f| f.find(line).is_some()),
        Body::Over(_) => true,
        Body::Dropped { .. } => false,
    }
}

pub(super) fn sniffed_ids(sniff: &Sniff) -> impl Iterator<Item = &[u8]> {
    std::iter::once(&sniff.uuid[..]).chain(sniff.other_ids.iter().map(|id| &id[..]))
}

/// What one transcript says of a turn.
struct Searched {
    /// Whether it is finished; `None` if it is not there.
    finished: Option<bool>,
    anchored: bool,
}

/// Follows the lines behind a turn's own.
#[derive(Debug, Default)]
pub(super) struct End {
    answered: bool,
    for_good: bool,
}

impl End {
    /// The turn was answered to its end, or another one followed it.
    pub(super) fn is_finished(&self) -> bool {
        self.for_good || self.answered
    }

    pub(super) fn record(&mut self, record: &Record<'_>) {
        match record.kind {
            Kind::Assistant => {
                let content = record.content.unwrap_or_default();
                let goes_on = record.stop_reason.is_some_and(|r| r.is(b"tool_use"));
                let only_thought = content.shown > 0 && content.shown == content.thoughts;
                self.answered = content.tools == 0 && !goes_on && !only_thought;
            }
            // A message folded into the running turn is no end of it: the agent owes an answer to it.
            Kind::User | Kind::Notice if !record.in_message => self.answered = false,
            Kind::User | Kind::Interrupted | Kind::Notice => self.for_good = true,
            // As it does to a result.
            Kind::Result => self.answered = false,
            Kind::Compaction | Kind::Hidden | Kind::Unreadable => {}
        }
    }

    pub(super) fn stub(&mut self, kind: Kind, sniff: &Sniff) {
        match kind {
            Kind::Assistant => self.answered = !sniff.tools && sniff.stop_reason != b"tool_use",
            Kind::User | Kind::Interrupted | Kind::Notice => self.for_good = true,
            Kind::Result => self.answered = false,
            Kind::Compaction | Kind::Hidden | Kind::Unreadable => {}
        }
    }
}

/// Ids remembered by one watch, at least half as many: more than a turn has lines.
const SEEN_MAX: usize = 8192;

/// The last ids seen, each as two keyed hashes: a live agent has one of these, and whole ids would be ten times its size.
#[derive(Debug, Default)]
struct SeenIds {
    keys: [RandomState; 2],
    fresh: HashSet<[u64; 2]>,
    /// Those before them.
    older: HashSet<[u64; 2]>,
}

impl SeenIds {
    fn key(&self, id: &[u8]) -> [u64; 2] {
        [self.keys[0].hash_one(id), self.keys[1].hash_one(id)]
    }

    fn insert(&mut self, id: &[u8]) {
        let key = self.key(id);
        self.fresh.insert(key);
        if self.fresh.len() >= SEEN_MAX / 2 {
            self.older = std::mem::take(&mut self.fresh);
        }
    }

    fn contains(&self, id: &str) -> bool {
        let key = self.key(id.as_bytes());
        self.fresh.contains(&key) || self.older.contains(&key)
    }
}

/// Says whether lines have reached the transcript; reads only what was appended since it last looked.
#[derive(Debug)]
pub struct TailWatch {
    archive: Archive,
    session: SessionId,
    from: u64,
    identity: Option<(u64, u64)>,
    seen: SeenIds,
    is_interrupted: bool,
}

impl TailWatch {
    /// True once the marker of an interrupt stands behind the last words of a person.
    pub fn is_interrupted(&mut self) -> bool {
        if !self.is_interrupted {
            self.look();
        }
        self.is_interrupted
    }

    /// True if there is a transcript by now.
    #[must_use]
    pub fn has_file(&self) -> bool {
        self.archive.path_of(&self.session).is_some()
    }

    /// True if whole lines with all the `wanted` ids were appended since the watch began. A file that is not there yet,
    /// or cannot be read, has none.
    pub fn has_all(&mut self, wanted: &[&str]) -> bool {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return wanted.iter().all(|turn| crate::model::is_recorded(turn));
        }
        if wanted.iter().any(|id| !self.seen.contains(id)) {
            self.look();
        }
        wanted.iter().all(|id| self.seen.contains(id))
    }

    fn look(&mut self) {
        let Some(path) = self.archive.path_of(&self.session) else {
            return;
        };
        let Ok(Some(source)) = Source::open(&path) else {
            return;
        };
        // Another file, or a shorter one: all of it is new.
        if source.size < self.from || self.identity.is_some_and(|was| was != source.identity) {
            self.from = 0;
        }
        self.identity = Some(source.identity);
        if source.size == self.from {
            return;
        }
        let mut buffer = self.archive.inner.cache.buffers.take();
        let mut scanner = Scanner::new(self.from);
        let mut at = self.from;
        let (seen_ids, is_interrupted) = (&mut self.seen, &mut self.is_interrupted);
        while let Ok(n) = source.read_at(&mut buffer, at)
            && n > 0
        {
            at += n as u64;
            scanner.push(&buffer[..n], |raw| {
                raw.each(|seen| match seen {
                    Seen::Record { record, line, .. } => {
                        match record.kind {
                            Kind::User => *is_interrupted = false,
                            Kind::Interrupted => *is_interrupted = true,
                            Kind::Assistant
                            | Kind::Compaction
                            | Kind::Notice
                            | Kind::Result
                            | Kind::Hidden
                            | Kind::Unreadable => {}
                        }
                        record.ids(line).iter().for_each(|id| seen_ids.insert(id.as_bytes()));
                    }
                    Seen::Stub { sniff, .. } => sniffed_ids(sniff).for_each(|id| seen_ids.insert(id)),
                    Seen::Gap => {}
                });
            });
        }
        self.from = scanner.held_from();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_remembers_the_last_ids_and_forgets_the_first() {
        let mut seen = SeenIds::default();
        for n in 0..10 * SEEN_MAX {
            seen.insert(format!("id-{n}").as_bytes());
        }
        let known = |n: usize| seen.contains(&format!("id-{n}"));
        assert!((10 * SEEN_MAX - SEEN_MAX / 2..10 * SEEN_MAX).all(known));
        assert!(!(0..9 * SEEN_MAX).any(known));
        assert!(seen.fresh.len() + seen.older.len() <= SEEN_MAX);
    }
}
