//! Whether messages that wait were delivered already: after a journal came back from a backup, the transcript knows more
//! than the queue. One pass over the transcript for the whole queue.
//!
//! A turn carries the id of its first message only; the others of a merged turn are found by its words, which are the
//! words of its messages in order. Rule a change could break: a message counts as delivered only by its id, or as a part
//! of a turn whose words and photos are exactly those of the messages from the one with the id on.

use super::trace::{End, sniffed_ids};
use super::{Archive, unreadable};
use crate::error::Result;
use crate::ids::SessionId;
use crate::threads::{Doing, doing};
use crate::transcript::json::Cursor;
use crate::transcript::line::Seen;
use crate::transcript::record::{Record, Role, role, walk_blocks};
use crate::transcript::strip::Cut;

use super::file::Source;

/// A message that waits.
#[derive(Debug, Clone, Copy)]
pub struct Waiting<'a> {
    /// Its id.
    pub id: &'a str,
    /// Its words.
    pub text: &'a str,
    /// How many photos it has.
    pub photos: usize,
}

/// A turn of waiting messages that stands in a transcript.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundTurn {
    /// Which of the waiting messages it carries; the first one's id is the turn's.
    pub members: std::ops::Range<usize>,
    /// It was answered to its end.
    pub finished: bool,
}

/// What the transcript knows of a queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueTrace {
    /// Turns of it that were delivered, in the order of the queue.
    pub turns: Vec<FoundTurn>,
    /// Messages behind a turn whose line is too long to read: they may have been part of it.
    pub unsure: Vec<usize>,
}

/// One waiting message that was found.
struct Hit {
    /// Which.
    at: usize,
    /// The words of its line, without blanks and tokens of photos; `None` if the line is too long to read.
    words: Option<String>,
    photos: usize,
    end: End,
}

impl Archive {
    /// Looks for all of `queue` in the transcript of `session`.
    ///
    /// # Errors
    /// `Unreadable`: the transcript is there and cannot be read.
    pub fn look_up_queue(&self, session: &SessionId, queue: &[Waiting<'_>]) -> Result<QueueTrace> {
        #[cfg(feature = "model")]
        if crate::model::is_on() {
            return Ok(QueueTrace::default());
        }
        let _at = doing(Doing::ReadFile);
        let Some(path) = self.path_of(session) else { return Ok(QueueTrace::default()) };
        let fail = |e: std::io::Error| unreadable(&path, &e);
        let Some(source) = Source::open(&path).map_err(fail)? else { return Ok(QueueTrace::default()) };
        let mut hits: Vec<Hit> = Vec::new();
        let place = |id: &[u8]| queue.iter().position(|w| w.id.as_bytes() == id);
        self.scan(&source, 0, |raw| {
            raw.each(|seen| match seen {
                Seen::Record { record, line, cuts, .. } => {
                    if let Some(hit) = hits.last_mut() {
                        hit.end.record(&record);
                    }
                    if record.sidechain {
                        return;
                    }
                    if let Some(at) = record.ids(line).iter().find_map(|id| place(id.as_bytes())) {
                        let photos = record.content.map_or(0, |content| content.images as usize);
                        let words = Some(words(&record, line, cuts));
                        hits.push(Hit { at, words, photos, end: End::default() });
                    }
                }
                Seen::Stub { kind, sniff, .. } => {
                    if let Some(hit) = hits.last_mut() {
                        hit.end.stub(kind, sniff);
                    }
                    if let Some(at) = sniffed_ids(sniff).find_map(place).filter(|_| !sniff.sidechain) {
                        hits.push(Hit { at, words: None, photos: 0, end: End::default() });
                    }
                }
                Seen::Gap => {}
            });
            true
        })
        .map_err(fail)?;
        Ok(judge(queue, hits))
    }
}

fn judge(queue: &[Waiting<'_>], mut hits: Vec<Hit>) -> QueueTrace {
    hits.sort_by_key(|hit| hit.at);
    // Of two lines with one id the first counts, as for every reader.
    hits.dedup_by_key(|hit| hit.at);
    let mut trace = QueueTrace::default();
    for (n, hit) in hits.iter().enumerate() {
        let until = hits.get(n + 1).map_or(queue.len(), |next| next.at);
        let end = match &hit.words {
            Some(words) => hit.at + carried(&queue[hit.at..until], words, hit.photos),
            None => {
                trace.unsure.extend(hit.at + 1..until);
                hit.at + 1
            }
        };
        trace.turns.push(FoundTurn { members: hit.at..end, finished: hit.end.is_finished() });
    }
    trace
}

/// How many of `queue`, from its first on, a line with these words and photos carries; the first it does in any case.
fn carried(queue: &[Waiting<'_>], words: &str, photos: usize) -> usize {
    let (mut all, mut sum, mut most) = (String::new(), 0, 1);
    for (n, waiting) in queue.iter().enumerate() {
        push_plain(&mut all, waiting.text);
        sum += waiting.photos;
        if all.len() > words.len() {
            break;
        }
        // What we put in front (flags, a word on the thread) is nobody's message.
        if sum == photos && words.ends_with(&all) {
            most = n + 1;
        }
    }
    most
}

fn words(record: &Record<'_>, line: &[u8], cuts: &[Cut]) -> String {
    let mut words = String::new();
    if let Some(content) = record.content {
        let mut cursor = Cursor::new(line, content.at);
        // Read whole before, so it cannot fail here.
        let _ = walk_blocks(&mut cursor, |block| match role(&block, cuts) {
            Role::Text(text) => push_plain(&mut words, &text.text(cuts)),
            Role::Nothing | Role::Thought(_) | Role::Call | Role::Result | Role::Photo | Role::Unknown => {}
        });
    }
    words
}

/// Appends a text without its blanks and without its tokens of photos, which are renumbered when messages are merged.
fn push_plain(out: &mut String, text: &str) {
    let mut rest = text;
    while let Some(at) = rest.find("[image") {
        out.extend(rest[..at].split_whitespace());
        let after = &rest[at + "[image".len()..];
        let digits = after.trim_start_matches('#').trim_start_matches(|c: char| c.is_ascii_digit());
        match digits.strip_prefix(']') {
            Some(behind) => rest = behind,
            None => {
                out.push_str("[image");
                rest = after;
            }
        }
    }
    out.extend(rest.split_whitespace());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting<'a>(id: &'a str, text: &'a str, photos: usize) -> Waiting<'a> {
        Waiting { id, text, photos }
    }

    fn plain(text: &str) -> String {
        let mut out = String::new();
        push_plain(&mut out, text);
        out
    }

    #[test]
    fn a_merged_turn_carries_exactly_the_messages_whose_words_and_photos_it_has() {
        let queue = [waiting("a", "let's go now", 0), waiting("b", "go", 0), waiting("c", "see [image#1]", 1)];
        let table = [
            ("let's go now", 0, 1),
            ("<chat-app prose=\"off\" />\nlet's go now\n\ngo", 0, 2),
            ("let's go now\n\ngo\n\nsee [image#7]", 1, 3),
            // The photo of the last one is missing: it was not part of it.
            ("let's go now\n\ngo\n\nsee [image#7]", 0, 1),
            ("something else", 0, 1),
        ];
        for (words, photos, expected) in table {
            assert_eq!(carried(&queue, &plain(words), photos), expected, "{words:?}");
        }
        let twice = [waiting("a", "a", 0), waiting("b", "a", 0), waiting("c", "", 1)];
        assert_eq!(carried(&twice, &plain("a"), 0), 1, "the same words again are another message");
        assert_eq!(carried(&twice, &plain("a\n\na"), 0), 2, "a photo alone has no words, and counts");
        assert_eq!(plain("a [image#12] b [image c [image3]"), "ab[imagec");
    }

    #[test]
    fn what_stands_behind_a_line_too_long_to_read_is_not_known() {
        let queue = [waiting("a", "a", 0), waiting("b", "b", 0), waiting("c", "c", 0)];
        let hit = |at, words: Option<&str>| Hit { at, words: words.map(str::to_owned), photos: 0, end: End::default() };
        let trace = judge(&queue, vec![hit(2, Some("c")), hit(0, None)]);
        assert_eq!(trace.turns.iter().map(|t| t.members.clone()).collect::<Vec<_>>(), [0..1, 2..3]);
        assert_eq!(trace.unsure, [1]);
    }
}
