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

/// What the transcript knows of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trace {
    /// The session has no transcript.
    NoFile,
    /// None of the ids is in it.
    NotRecorded,
    /// One of them is.
    Recorded {
        /// The agent answered: its last line calls no tool, or a person spoke again, or it was interrupted.
        finished: bool,
    },
}

impl Archive {
    /// Looks for a turn by the ids of its messages: `uuid`, `mergedSendUuids`, `attachment.source_uuid`.
    ///
    /// # Errors
    /// `Unreadable`: the transcript is there and cannot be read.
    pub fn look_up(&self, session: &SessionId, ids: &[&str]) -> Result<Trace> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return Ok(match crate::model::trace(ids) {
                Some(finished) => Trace::Recorded { finished },
                None => Trace::NotRecorded,
            });
        }
        let _at = doing(Doing::ReadFile);
        let Some(path) = self.path_of(session) else {
            return Ok(Trace::NoFile);
        };
        let fail = |e: std::io::Error| unreadable(&path, &e);
        let Some(source) = Source::open(&path).map_err(fail)? else {
            return Ok(Trace::NoFile);
        };
        let finders: Vec<_> = ids.iter().map(|id| memmem::Finder::new(id.as_bytes())).collect();
        let (mut found, mut end) = (false, End::default());
        self.scan(&source, 0, |raw| {
            if !found && !may_hold(raw, &finders) {
                return true;
            }
            raw.each(|seen| match seen {
                Seen::Record { record, line, .. } => {
                    if found {
                        end.record(&record);
                    } else if !record.sidechain {
                        found = record.ids(line).iter().any(|id| ids.contains(&id.as_str()));
                    }
                }
                Seen::Stub { kind, sniff, .. } => {
                    if found {
                        end.stub(kind, sniff);
                    } else if !sniff.sidechain {
                        found = sniffed_ids(sniff).any(|id| ids.iter().any(|want| want.as_bytes() == id));
                    }
                }
                Seen::Gap => {}
            });
            !end.for_good
        })
        .map_err(fail)?;
        Ok(if found { Trace::Recorded { finished: end.for_good || end.answered } } else { Trace::NotRecorded })
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
        }
    }

    /// Watches the transcript of `session` from its first line on: for one that got its id only now.
    #[must_use]
    pub fn watch_from_start(&self, session: &SessionId) -> TailWatch {
        TailWatch { archive: self.clone(), session: session.clone(), from: 0, identity: None, seen: SeenIds::default() }
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

fn sniffed_ids(sniff: &Sniff) -> impl Iterator<Item = &[u8]> {
    std::iter::once(&sniff.uuid[..]).chain(sniff.other_ids.iter().map(|id| &id[..]))
}

/// Follows the lines behind a turn's own.
#[derive(Debug, Default)]
struct End {
    answered: bool,
    for_good: bool,
}

impl End {
    fn record(&mut self, record: &Record<'_>) {
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

    fn stub(&mut self, kind: Kind, sniff: &Sniff) {
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
}

impl TailWatch {
    /// True if whole lines with all the `wanted` ids were appended since the watch began. A file that is not there yet,
    /// or cannot be read, has none.
    pub fn has_all(&mut self, wanted: &[&str]) -> bool {
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
        let seen_ids = &mut self.seen;
        while let Ok(n) = source.read_at(&mut buffer, at)
            && n > 0
        {
            at += n as u64;
            scanner.push(&buffer[..n], |raw| {
                raw.each(|seen| match seen {
                    Seen::Record { record, line, .. } => {
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
