//! PURE. Cuts a stream of bytes into lines and hands on what is left of each once its LF was seen; what follows the
//! last LF is held back. Lines of kinds that are not conversation pass without being parsed or kept.
//!
//! Leaves taking runs out to `strip` and meaning to `record`. Rule a change could break: what comes out depends on the
//! bytes alone, not on the chunks; one bad line never hides its neighbours, nor a whole record glued to it.

use memchr::{memchr, memmem};

use super::json::Cursor;
use super::record::{Kind, Part, Record, is_conversation, judge_sniffed, next_alone, split};
use super::sniff::Sniff;
use super::strip::{Cut, Left, Strip, in_line, is_clean};
use super::{HELD_BYTES_MAX, LINE_BYTES_MAX};

/// One whole line.
#[derive(Debug)]
pub struct RawLine<'a> {
    /// Where it starts in the file (for [`Body::Tail`]: where the possible record starts).
    pub offset: u64,
    /// Its bytes, LF not counted.
    pub len: u64,
    /// What is left of it.
    pub body: Body<'a>,
}

/// What is left of a line.
#[derive(Debug)]
pub enum Body<'a> {
    /// Short enough to parse.
    Held(&'a [u8], &'a [Cut]),
    /// Too long.
    Over(&'a Sniff),
    /// The end of a line of another kind, from where a glued record may start.
    Tail(&'a [u8], &'a [Cut]),
    /// Not part of the conversation.
    Dropped {
        /// It does not end as a whole record does.
        torn: bool,
    },
}

/// One thing that a line holds.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, on the stack, and mostly records")]
pub enum Seen<'a> {
    /// A whole record.
    Record {
        /// Judged.
        record: Record<'a>,
        /// The stripped line it stands in.
        line: &'a [u8],
        /// The line's cuts.
        cuts: &'a [Cut],
        /// Where it starts in the file.
        offset: u64,
        /// Its bytes in the file.
        len: u64,
    },
    /// A whole record that is too long or too deep.
    Stub {
        /// What it is.
        kind: Kind,
        /// What could be seen of it.
        sniff: &'a Sniff,
        /// Where it starts in the file.
        offset: u64,
        /// Its bytes in the file.
        len: u64,
    },
    /// Something unreadable.
    Gap,
}

impl RawLine<'_> {
    /// Walks what the line holds, in order.
    pub fn each(&self, mut f: impl FnMut(Seen<'_>)) {
        let (line, cuts, from) = match self.body {
            Body::Dropped { torn: false } => return,
            Body::Dropped { torn: true } => return f(Seen::Gap),
            Body::Over(sniff) => return f(stub(sniff, self.offset, self.len)),
            Body::Held(line, cuts) => (line, cuts, 0),
            Body::Tail(line, cuts) => match glued_record(line, cuts) {
                Some(at) => {
                    f(Seen::Gap);
                    (line, cuts, at)
                }
                None if ends_torn(line, cuts) => return f(Seen::Gap),
                None => return,
            },
        };
        let offset_of = |at: usize| self.offset + in_line(cuts, at, true);
        split(line, cuts, from, |part| match part {
            Part::Gap => f(Seen::Gap),
            Part::Deep(at) => {
                let mut sniff = Sniff::default();
                sniff.feed(&line[at..]);
                let offset = offset_of(at);
                f(stub(&sniff, offset, self.offset + self.len - offset));
            }
            Part::Record(record) => {
                let offset = offset_of(record.start);
                let end = self.offset + in_line(cuts, record.end, false);
                f(Seen::Record { line, cuts, offset, len: end - offset, record });
            }
        });
    }
}

fn stub(sniff: &Sniff, offset: u64, len: u64) -> Seen<'_> {
    if sniff.is_whole() { Seen::Stub { kind: judge_sniffed(sniff), sniff, offset, len } } else { Seen::Gap }
}

/// No record ends otherwise than with a brace.
fn ends_torn(line: &[u8], cuts: &[Cut]) -> bool {
    let mut end = line.len();
    while end > 0 && line[end - 1].is_ascii_whitespace() {
        end -= 1;
    }
    end == 0 || line[end - 1] != b'}' || cuts.iter().any(|c| c.at as usize >= end)
}

/// Bytes of a line that surely show its kind, if the kind comes first.
const HEAD_BYTES: usize = 64;

#[derive(Debug, Clone, Copy)]
enum State {
    /// At the start of a line.
    Fresh,
    /// Inside a line that is stripped.
    Strip {
        /// From the middle of a line of another kind.
        tail: bool,
    },
    /// Inside a line of which too little was seen to tell its kind: it is in `head`.
    Head,
    /// Inside a line of another kind.
    Dropped {
        /// Its last byte before `carry`; 0 at its start.
        before: u8,
        /// Its last byte that is no blank.
        end: u8,
    },
}

/// See the head of this file.
#[derive(Debug)]
pub struct Scanner {
    strip: Strip,
    state: State,
    /// Where the next byte stands in the file.
    at: u64,
    /// Where the line under way starts.
    line_at: u64,
    /// Where its stripped part starts.
    strip_at: u64,
    /// Its first bytes, while they are fewer than [`HEAD_BYTES`].
    head: Vec<u8>,
    /// Of a dropped line: what may be the start of a glued record, once more of it is seen. Short.
    carry: Vec<u8>,
    glue: memmem::Finder<'static>,
}

impl Scanner {
    /// For bytes that start at `offset` of the file, at the start of a line.
    #[must_use]
    pub fn new(offset: u64) -> Self {
        Self {
            strip: Strip::default(),
            state: State::Fresh,
            at: offset,
            line_at: offset,
            strip_at: offset,
            head: Vec::with_capacity(HEAD_BYTES),
            carry: Vec::new(),
            glue: memmem::Finder::new(b"{\""),
        }
    }

    /// Where the line starts whose LF was not seen yet: everything before it was handed on.
    #[must_use]
    pub fn held_from(&self) -> u64 {
        self.line_at
    }

    /// The next bytes; `each` gets every line that ends in them.
    pub fn push(&mut self, mut chunk: &[u8], mut each: impl FnMut(RawLine<'_>)) {
        while !chunk.is_empty() {
            match memchr(b'\n', chunk) {
                Some(n) => {
                    self.line_ends(&chunk[..n], &mut each);
                    self.at += n as u64 + 1;
                    self.line_at = self.at;
                    chunk = &chunk[n + 1..];
                }
                None => {
                    self.more(chunk);
                    self.at += chunk.len() as u64;
                    return;
                }
            }
        }
    }

    /// `piece` is the rest of a line.
    fn line_ends(&mut self, piece: &[u8], each: &mut impl FnMut(RawLine<'_>)) {
        if matches!(self.state, State::Fresh) {
            if piece.is_empty() {
                return;
            }
            // No more than a divided read would judge by, so that where reads divide a line changes nothing.
            if is_other_kind(&piece[..piece.len().min(HEAD_BYTES)]) {
                match self.find_glued(piece, 1, 0) {
                    None => {
                        let body = Body::Dropped { torn: ends_torn(piece, &[]) };
                        return each(RawLine { offset: self.at, len: piece.len() as u64, body });
                    }
                    Some(n) => return self.whole(n, &piece[n..], true, each),
                }
            }
            return self.whole(0, piece, false, each);
        }
        self.more(piece);
        if matches!(self.state, State::Head) {
            self.decide();
        }
        if let State::Dropped { before, end } = self.state
            && !self.carry.is_empty()
        {
            // No more of it comes: judged as a whole line's end is.
            self.at += piece.len() as u64;
            self.pass_other(&[], 0, before, end, true);
            self.at -= piece.len() as u64;
        }
        match std::mem::replace(&mut self.state, State::Fresh) {
            State::Fresh | State::Head => {}
            State::Dropped { end, .. } => {
                let len = self.at + piece.len() as u64 - self.line_at;
                each(RawLine { offset: self.line_at, len, body: Body::Dropped { torn: end != b'}' } });
            }
            State::Strip { tail } => self.hand_on(tail, each),
        }
    }

    /// A line (or its end, from `skip` bytes on) that lies in one chunk.
    fn whole(&mut self, skip: usize, line: &[u8], tail: bool, each: &mut impl FnMut(RawLine<'_>)) {
        let offset = self.at + skip as u64;
        if line.len() <= HELD_BYTES_MAX && is_clean(line) {
            let body = if tail { Body::Tail(line, &[]) } else { Body::Held(line, &[]) };
            return each(RawLine { offset, len: line.len() as u64, body });
        }
        self.strip_at = offset;
        self.strip.clear();
        self.strip.feed(line);
        self.hand_on(tail, each);
    }

    fn hand_on(&mut self, tail: bool, each: &mut impl FnMut(RawLine<'_>)) {
        let len = self.strip.fed();
        let body = match self.strip.finish() {
            Left::Over(sniff) if len > LINE_BYTES_MAX || !tail || sniff.is_whole() => Body::Over(sniff),
            Left::Over(_) => Body::Dropped { torn: false },
            Left::Held(line, cuts) if tail => Body::Tail(line, cuts),
            Left::Held(line, cuts) => Body::Held(line, cuts),
        };
        each(RawLine { offset: self.strip_at, len, body });
    }

    /// `piece` belongs to a line that goes on after it.
    fn more(&mut self, piece: &[u8]) {
        if piece.is_empty() {
            return;
        }
        match self.state {
            State::Fresh => {
                self.line_at = self.at;
                self.head.clear();
                self.state = State::Head;
                self.more(piece);
            }
            State::Head => {
                let n = piece.len().min(HEAD_BYTES - self.head.len());
                self.head.extend_from_slice(&piece[..n]);
                if self.head.len() == HEAD_BYTES {
                    self.decide();
                    self.at += n as u64;
                    self.more(&piece[n..]);
                    self.at -= n as u64;
                }
            }
            State::Strip { tail } => {
                self.strip.feed(piece);
                if self.strip.is_over() && !tail {
                    self.look_for_glue(piece);
                }
            }
            State::Dropped { before, end } => self.pass_other(piece, 0, before, end, false),
        }
    }

    /// What to do with the line whose first bytes are in `head`.
    fn decide(&mut self) {
        let head = std::mem::take(&mut self.head);
        let at = std::mem::replace(&mut self.at, self.line_at);
        if is_other_kind(&head) {
            self.carry.clear();
            self.pass_other(&head, 1, 0, 0, false);
        } else {
            self.begin_strip(self.line_at, false);
            self.strip.feed(&head);
        }
        self.at = at;
        self.head = head;
    }

    /// A line that is too long is not parsed, so a record glued to it is looked for here: no `{"` stands inside a text,
    /// and outside of one it follows a colon, a comma or a bracket.
    fn look_for_glue(&mut self, piece: &[u8]) {
        let glued = self.glue.find_iter(piece).find(|&n| n > 0 && !may_precede_value(piece[n - 1]));
        if let Some(n) = glued {
            self.begin_strip(self.at + n as u64, true);
            self.strip.feed(&piece[n..]);
        }
    }

    fn begin_strip(&mut self, at: u64, tail: bool) {
        self.strip_at = at;
        self.strip.clear();
        self.state = State::Strip { tail };
    }

    /// Passes `piece` of a dropped line over, looking for a glued record from its byte `from` on. `before` is the byte in
    /// front of it. What the end of the piece leaves open is carried over, unless it is the `last` of the line, so that
    /// where reads divide the line changes nothing.
    fn pass_other(&mut self, piece: &[u8], from: usize, before: u8, end: u8, last: bool) {
        let carried = self.carry.len();
        let joined;
        let bytes = if carried == 0 {
            piece
        } else {
            joined = [std::mem::take(&mut self.carry).as_slice(), piece].concat();
            &joined
        };
        let at = self.at - carried as u64;
        let open = if last { bytes.len() } else { open_from(bytes, before) };
        if let Some(n) = self.find_glued(bytes, from, before).filter(|&n| n < open) {
            self.begin_strip(at + n as u64, true);
            self.strip.feed(&bytes[n..]);
            return;
        }
        let passed = &bytes[..open];
        let end = passed.iter().rev().find(|b| !b.is_ascii_whitespace()).copied().unwrap_or(end);
        self.state = State::Dropped { before: passed.last().copied().unwrap_or(before), end };
        self.carry.extend_from_slice(&bytes[open..]);
    }

    fn find_glued(&self, bytes: &[u8], from: usize, before: u8) -> Option<usize> {
        let hay = bytes.get(from..)?;
        self.glue.find_iter(hay).map(|n| n + from).find(|&n| is_glue(bytes, n, before))
    }
}

/// True if a record may be glued to a torn line at `n`: a `{"` that no value can stand at, or that starts as records do.
fn is_glue(bytes: &[u8], n: usize, before: u8) -> bool {
    let prev = if n == 0 { before } else { bytes[n - 1] };
    !may_precede_value(prev) || starts_record(&bytes[n + 1..])
}

/// Where a whole record is glued in the end of a line of another kind.
fn glued_record(line: &[u8], cuts: &[Cut]) -> Option<usize> {
    let glue = |n: usize| is_glue(line, n, 0) || cuts.iter().any(|c| c.at as usize == n);
    next_alone(line, cuts, glue)
}

fn may_precede_value(b: u8) -> bool {
    matches!(b, b':' | b',' | b'[' | b' ' | b'\t')
}

/// True if what follows a `{` begins as conversation records do, as far as it is there.
/// From where on the end of `bytes` may be the start of a glued record, but too little of it is there to tell.
fn open_from(bytes: &[u8], before: u8) -> usize {
    const LOOK_AHEAD: usize = b"{\"type\":\"attachment\"".len();
    let near = bytes.len().saturating_sub(LOOK_AHEAD);
    let start = (near..bytes.len()).find(|&n| {
        let prev = if n == 0 { before } else { bytes[n - 1] };
        match bytes[n..] {
            [b'{'] => true,
            [b'{', b'"', ..] => may_precede_value(prev) && starts_record(&bytes[n + 1..]),
            _ => false,
        }
    });
    start.unwrap_or(bytes.len())
}

fn starts_record(after: &[u8]) -> bool {
    const HEADS: [&[u8]; 4] =
        [b"\"parentUuid\":", b"\"type\":\"user\"", b"\"type\":\"assistant\"", b"\"type\":\"attachment\""];
    HEADS.iter().any(|head| {
        let n = head.len().min(after.len());
        head[..n] == after[..n]
    })
}

/// True if the line says first of all that it is of a kind that is not conversation.
fn is_other_kind(line: &[u8]) -> bool {
    let Some(rest) = line.strip_prefix(b"{\"type\":\"") else {
        return false;
    };
    let Some(len) = memchr(b'"', &rest[..rest.len().min(HEAD_BYTES)]) else {
        return false;
    };
    !is_conversation(&rest[..len]) && !rest[..len].contains(&b'\\')
}

/// True if nothing but blanks is in `line`.
#[must_use]
pub fn is_blank(line: &[u8]) -> bool {
    let mut cursor = Cursor::new(line, 0);
    cursor.blanks();
    cursor.at == line.len()
}
