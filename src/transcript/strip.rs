//! PURE. Takes base64 runs of 1 KiB and more out of a line while it streams by, wherever they stand, and remembers
//! where each was. What is left goes to `json`; a line that stays too long goes to `sniff` piece by piece.
//!
//! The cuts are kept beside the bytes, never as a mark inside them: nothing that a transcript says can forge one.
//! Rules a change could break: the outcome depends on the bytes alone, not on where they were divided; an escape
//! sequence is never cut in two; no run of [`RUN_BYTES_MIN`] is left.

use super::json::note;
use super::sniff::Sniff;
use super::{HELD_BYTES_MAX, LINE_BYTES_MAX, RUN_BYTES_MIN};

/// A run that was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Where it was, in the stripped bytes.
    pub at: u32,
    /// Where it starts in the line.
    pub start: u32,
    /// Its length in bytes.
    pub len: u32,
}

/// The cuts that lie inside the stripped bytes `from..=to`.
#[must_use]
pub fn cuts_between(cuts: &[Cut], from: usize, to: usize) -> &[Cut] {
    if cuts.is_empty() {
        return cuts;
    }
    let low = cuts.partition_point(|c| (c.at as usize) < from);
    let high = cuts.partition_point(|c| (c.at as usize) <= to);
    &cuts[low..high.max(low)]
}

/// Where the byte at `at` of the stripped line stands in the line itself; with `after`, cuts right at it count as past.
#[must_use]
pub fn in_line(cuts: &[Cut], at: usize, after: bool) -> u64 {
    let past = cuts.iter().take_while(|c| if after { c.at as usize <= at } else { (c.at as usize) < at });
    at as u64 + past.map(|c| u64::from(c.len)).sum::<u64>()
}

/// Letters, digits and marks of both base64 alphabets; branch-free, so that blocks of it become vector code.
#[inline]
fn is_letter(b: u8) -> bool {
    ((b | 0x20).wrapping_sub(b'a') < 26)
        | (b.wrapping_sub(b'/') < 11)
        | (b == b'+')
        | (b == b'=')
        | (b == b'-')
        | (b == b'_')
}

/// A letter, or the backslash of `\/`, which some writers put before every slash.
#[inline]
fn is_run_byte(bytes: &[u8], at: usize) -> bool {
    is_letter(bytes[at]) || (bytes[at] == b'\\' && bytes.get(at + 1) == Some(&b'/'))
}

/// How many bytes from `from` on belong to a run.
fn run_len(bytes: &[u8], from: usize) -> usize {
    const BLOCK: usize = 64;
    let mut i = from;
    loop {
        while let Some(block) = bytes.get(i..i + BLOCK) {
            if !block.iter().fold(true, |all, b| all & is_letter(*b)) {
                break;
            }
            i += BLOCK;
        }
        let stop = bytes.len().min(i + BLOCK);
        while i < stop && is_run_byte(bytes, i) {
            i += 1;
        }
        if i < stop || i == bytes.len() {
            return i - from;
        }
    }
}

/// Finds the first run of [`RUN_BYTES_MIN`] or more that starts at or after `from`, where no run may be under way.
/// Returns its start, or where the run that the bytes end with starts (their length if none).
fn find_run(bytes: &[u8], from: usize) -> Result<usize, usize> {
    let mut p = from;
    // Looks at the far end of each window first: text is passed at a few bytes per KiB.
    while p + RUN_BYTES_MIN <= bytes.len() {
        let mut r = p + RUN_BYTES_MIN;
        while r > p && is_run_byte(bytes, r - 1) {
            r -= 1;
        }
        if r == p {
            return Ok(p);
        }
        p = r;
    }
    let mut r = bytes.len();
    while r > p && is_run_byte(bytes, r - 1) {
        r -= 1;
    }
    Err(r)
}

/// True if `line` has no run to take out.
#[must_use]
pub fn is_clean(line: &[u8]) -> bool {
    line.len() < RUN_BYTES_MIN || find_run(line, 0).is_err()
}

/// `text` with a note in place of each run, or nothing if it has none.
#[must_use]
pub fn shorten_runs(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut start = find_run(bytes, 0).ok()?;
    let mut out = String::new();
    let mut from = 0;
    loop {
        let len = run_len(bytes, start);
        // Runs are ASCII, so both ends are char boundaries.
        out.push_str(&text[from..start]);
        out.push_str(&note(len as u64));
        from = start + len;
        match find_run(bytes, from) {
            Ok(next) => start = next,
            Err(_) => break,
        }
    }
    out.push_str(&text[from..]);
    Some(out)
}

#[derive(Debug, Clone, Copy)]
struct Run {
    /// Where its first byte stands in `out`.
    out_at: usize,
    /// The byte before it.
    before: u8,
    /// Where it starts in the line.
    start: u64,
    len: u64,
}

/// Bytes of a run kept until its end shows whether it is long: enough for the decision and for what stays of it.
const RUN_KEPT_MAX: usize = RUN_BYTES_MIN + 16;
/// What stays of a run that begins inside an escape: `\u1234` and one more.
const ESCAPE_KEPT: usize = 6;

/// One line on its way through.
#[derive(Debug, Default)]
pub struct Strip {
    out: Vec<u8>,
    cuts: Vec<Cut>,
    /// Bytes of the line so far.
    fed: u64,
    run: Option<Run>,
    /// The piece before ended with a backslash, which is judged with the byte after it.
    carry: bool,
    last: u8,
    sniff: Option<Box<Sniff>>,
}

/// What is left of a whole line.
#[derive(Debug)]
pub enum Left<'a> {
    /// The stripped bytes and their cuts.
    Held(&'a [u8], &'a [Cut]),
    /// It stayed too long; this is what was seen of it.
    Over(&'a Sniff),
}

impl Strip {
    /// Forgets the line, keeps the memory.
    pub fn clear(&mut self) {
        self.out.clear();
        self.out.shrink_to(2 * HELD_BYTES_MAX);
        self.cuts.clear();
        self.fed = 0;
        self.run = None;
        self.carry = false;
        self.last = 0;
        self.sniff = None;
    }

    /// Bytes of the line so far.
    #[must_use]
    pub fn fed(&self) -> u64 {
        self.fed + u64::from(self.carry)
    }

    /// True once the line is too long to be held.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.sniff.is_some()
    }

    /// The next bytes of the line.
    pub fn feed(&mut self, mut piece: &[u8]) {
        while self.carry {
            let Some((&first, rest)) = piece.split_first() else {
                return;
            };
            self.carry = false;
            if first == b'\\' {
                self.take(b"\\");
                self.carry = true;
            } else {
                self.take(&[b'\\', first]);
            }
            piece = rest;
        }
        if let Some((b'\\', rest)) = piece.split_last() {
            self.carry = true;
            piece = rest;
        }
        self.take(piece);
        if self.out.len() > HELD_BYTES_MAX || self.fed > LINE_BYTES_MAX {
            self.sniff.get_or_insert_default();
            self.flush();
        }
    }

    /// A whole run of `len` bytes that an earlier pass found here and that is not read again.
    pub fn pass_run(&mut self, len: u32) {
        self.end_run();
        self.cuts.push(Cut { at: at(self.out.len()), start: at64(self.fed), len });
        self.fed += u64::from(len);
        self.last = b'A';
    }

    /// The line is over.
    pub fn finish(&mut self) -> Left<'_> {
        if std::mem::take(&mut self.carry) {
            self.take(b"\\");
        }
        self.end_run();
        if self.sniff.is_some() || self.out.len() > HELD_BYTES_MAX {
            self.sniff.get_or_insert_default();
            self.flush();
        }
        match &self.sniff {
            Some(sniff) => Left::Over(sniff),
            None => Left::Held(&self.out, &self.cuts),
        }
    }

    fn flush(&mut self) {
        let ready = self.run.map_or(self.out.len(), |run| run.out_at);
        if let Some(sniff) = &mut self.sniff {
            sniff.feed(&self.out[..ready]);
        }
        self.out.drain(..ready);
        self.cuts.clear();
        if let Some(run) = &mut self.run {
            run.out_at = 0;
        }
    }

    /// `piece` does not end with a backslash, except as the line's last byte.
    fn take(&mut self, piece: &[u8]) {
        let Some(&piece_last) = piece.last() else {
            return;
        };
        let mut copied = 0;
        if let Some(run) = &mut self.run {
            let n = run_len(piece, 0);
            let room = RUN_KEPT_MAX.saturating_sub(usize::try_from(run.len).unwrap_or(usize::MAX));
            self.out.extend_from_slice(&piece[..n.min(room)]);
            run.len += n as u64;
            if n == piece.len() {
                self.fed += n as u64;
                self.last = piece_last;
                return;
            }
            self.end_run();
            copied = n;
        }
        loop {
            match find_run(piece, copied) {
                Ok(start) => {
                    self.out.extend_from_slice(&piece[copied..start]);
                    let len = run_len(piece, start);
                    self.begin_run(piece, start, len);
                    self.out.extend_from_slice(&piece[start..start + len.min(RUN_KEPT_MAX)]);
                    copied = start + len;
                    if copied == piece.len() {
                        break;
                    }
                    self.end_run();
                }
                Err(tail) => {
                    self.out.extend_from_slice(&piece[copied..tail]);
                    if tail < piece.len() {
                        self.begin_run(piece, tail, piece.len() - tail);
                        self.out.extend_from_slice(&piece[tail..]);
                    }
                    break;
                }
            }
        }
        self.fed += piece.len() as u64;
        self.last = piece_last;
    }

    fn begin_run(&mut self, piece: &[u8], start: usize, len: usize) {
        let before = if start == 0 { self.last } else { piece[start - 1] };
        self.run = Some(Run { out_at: self.out.len(), before, start: self.fed + start as u64, len: len as u64 });
    }

    fn end_run(&mut self) {
        let Some(run) = self.run.take() else { return };
        if run.len < RUN_BYTES_MIN as u64 {
            return;
        }
        let mut keep = 0;
        if run.before == b'\\' || self.out[run.out_at] == b'\\' {
            keep = ESCAPE_KEPT;
            // Not between the two bytes of `\/`.
            while self.out[run.out_at + keep - 1] == b'\\' {
                keep += 1;
            }
        }
        self.out.truncate(run.out_at + keep);
        let len = run.len - keep as u64;
        self.cuts.push(Cut { at: at(self.out.len()), start: at64(run.start + keep as u64), len: at64(len) });
    }
}

/// Lines whose numbers do not fit are over [`LINE_BYTES_MAX`] and their cuts are never looked at.
fn at(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn at64(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strip_in(line: &[u8], piece: usize) -> (Vec<u8>, Vec<Cut>) {
        let mut strip = Strip::default();
        for part in line.chunks(piece.max(1)) {
            strip.feed(part);
        }
        match strip.finish() {
            Left::Held(out, cuts) => (out.to_vec(), cuts.to_vec()),
            Left::Over(_) => panic!("line stays small"),
        }
    }

    fn put_back(line: &[u8], out: &[u8], cuts: &[Cut]) -> Vec<u8> {
        let mut whole = Vec::new();
        let mut from = 0;
        for cut in cuts {
            whole.extend_from_slice(&out[from..cut.at as usize]);
            whole.extend_from_slice(&line[cut.start as usize..(cut.start + cut.len) as usize]);
            from = cut.at as usize;
        }
        whole.extend_from_slice(&out[from..]);
        whole
    }

    #[test]
    fn long_runs_go_and_everything_else_stays_however_it_is_divided() {
        let b64 = |n: usize| "QUJD/+x9".repeat(n / 8 + 1)[..n].to_string();
        let cases = [
            (format!(r#"{{"data":"{}","x":"{}"}}"#, b64(1024), b64(1023)), 1),
            (format!(r#"{{"data":"{}"}}"#, b64(5000).replace('/', "\\/")), 1),
            (format!(r#"{{"data":"a\n{}"}}"#, b64(3000)), 1),
            (format!(r#"{{"data":"a\\{}"}}"#, b64(3000)), 1),
            (format!(r#"{{"data":"\u00e9{}="}}"#, b64(3000)), 1),
            (format!(r#"{{"data":"\\/{}\\"}}"#, b64(3000)), 1),
            (format!(r#"{{"data":"\/\/\/{}"}}"#, b64(3000).replace('/', "\\/")), 1),
            (format!("{} {} {}", b64(2000), b64(1000), b64(2000)), 2),
            (b64(1024), 1),
            ("word ".repeat(3000), 0),
            (format!("{}\\", b64(1500)), 1),
        ];
        for (line, want) in cases {
            let line = line.as_bytes();
            let (out, cuts) = strip_in(line, usize::MAX);
            assert_eq!(cuts.len(), want, "{:?}", String::from_utf8_lossy(&line[..20]));
            assert_eq!(put_back(line, &out, &cuts), line);
            assert_eq!(is_clean(line), cuts.is_empty());
            for piece in [1, 2, 3, 7, 64, 1023, 1024, 1025, 1500] {
                assert_eq!(strip_in(line, piece), (out.clone(), cuts.clone()), "pieces of {piece}");
            }
            let text = String::from_utf8(out).unwrap();
            if text.starts_with('{') {
                let value: serde_json::Value = serde_json::from_str(&text).unwrap();
                assert!(value["data"].as_str().unwrap().len() < RUN_BYTES_MIN);
            }
            for cut in &cuts {
                assert_eq!(in_line(&cuts, cut.at as usize, false), u64::from(cut.start));
                assert_eq!(in_line(&cuts, cut.at as usize, true), u64::from(cut.start + cut.len));
            }
        }
    }

    #[test]
    fn a_run_that_an_earlier_pass_found_need_not_be_read() {
        let line = format!(r#"{{"a":"{}","b":"é{}"}}"#, "x".repeat(2000), "y/".repeat(900));
        let (out, cuts) = strip_in(line.as_bytes(), usize::MAX);
        let mut strip = Strip::default();
        let mut from = 0;
        for cut in &cuts {
            strip.feed(&line.as_bytes()[from..cut.start as usize]);
            strip.pass_run(cut.len);
            from = (cut.start + cut.len) as usize;
        }
        strip.feed(&line.as_bytes()[from..]);
        let Left::Held(again, cuts_again) = strip.finish() else { panic!("small") };
        assert_eq!((again, cuts_again), (&out[..], &cuts[..]));
    }

    #[test]
    fn a_text_is_shortened_only_where_it_has_a_run() {
        assert_eq!(shorten_runs("plain text"), None);
        let text = format!("é{} and {}ü", "A".repeat(1024), "B".repeat(1023));
        let want = format!("é[1024 bytes of base64 not displayed] and {}ü", "B".repeat(1023));
        assert_eq!(shorten_runs(&text).unwrap(), want);
    }
}
