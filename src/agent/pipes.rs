//! The three pipes of an agent, without waiting: lines to stdin, bytes from stdout, text from stderr.
//!
//! Leaves polling and meaning to `pump`. Rule a change could break: a call here never blocks and never does unbounded
//! work, so that a flooding agent cannot keep the pump from its other duties.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};

/// Bytes moved in one call, at most, before the pump looks around again.
const SPAN_BYTES_MAX: usize = 1024 * 1024;
/// What is kept of stderr for the run's end, in bytes.
const TAIL_BYTES: usize = 2048;
/// Longest line of stderr in the log, in bytes.
const LOG_LINE_BYTES_MAX: usize = 4096;

/// How a pipe is after a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pipe {
    /// It may take or give more later.
    Open,
    /// The other side is gone.
    Ended,
}

struct Line {
    bytes: Vec<u8>,
    is_turn: bool,
}

/// Lines that wait to be written to stdin, in order; one is never begun inside another.
#[derive(Default)]
pub struct Outbox {
    lines: VecDeque<Line>,
    /// Bytes of the first line that are written.
    written: usize,
}

impl Outbox {
    /// Queues one whole line.
    pub fn push(&mut self, bytes: Vec<u8>, is_turn: bool) {
        self.lines.push_back(Line { bytes, is_turn });
    }

    /// Nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Forgets what waits.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Writes what the pipe takes.
    pub fn write_to(&mut self, pipe: &mut impl Write) -> Pipe {
        let mut budget = SPAN_BYTES_MAX;
        while let Some(line) = self.lines.front() {
            let half = line.bytes.len() / 2;
            // A turn's line goes in two halves, so that a test can end the server between them.
            let end = if line.is_turn && self.written < half { half } else { line.bytes.len() };
            match pipe.write(&line.bytes[self.written..end]) {
                Ok(0) => return Pipe::Ended,
                Ok(count) => {
                    self.written += count;
                    budget = budget.saturating_sub(count);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Pipe::Open,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Pipe::Ended,
            }
            if line.is_turn && self.written == half {
                crate::faults::point("mid_stdin");
            }
            if self.written == line.bytes.len() {
                if line.is_turn {
                    crate::faults::point("after_stdin_before_line");
                }
                self.lines.pop_front();
                self.written = 0;
            }
            if budget == 0 {
                return Pipe::Open;
            }
        }
        Pipe::Open
    }
}

/// Reads what the pipe has, through `buffer`, and hands it to `each`.
pub fn read_from(pipe: &mut impl Read, buffer: &mut [u8], mut each: impl FnMut(&[u8])) -> Pipe {
    let mut budget = SPAN_BYTES_MAX;
    while budget > 0 {
        match pipe.read(buffer) {
            Ok(0) => return Pipe::Ended,
            Ok(count) => {
                each(&buffer[..count]);
                budget = budget.saturating_sub(count);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Pipe::Open,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Pipe::Ended,
        }
    }
    Pipe::Open
}

/// What the agent writes to stderr: lines for the log, and the end of it.
#[derive(Default)]
pub struct ErrorText {
    tail: Vec<u8>,
    line: Vec<u8>,
}

impl ErrorText {
    /// Takes `bytes`; `log` gets every line that is now whole, printable and cut to 4 KiB.
    pub fn push(&mut self, bytes: &[u8], mut log: impl FnMut(&str)) {
        self.tail.extend_from_slice(bytes);
        let over = self.tail.len().saturating_sub(TAIL_BYTES);
        self.tail.drain(..over);
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            let room = LOG_LINE_BYTES_MAX.saturating_sub(self.line.len());
            self.line.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                self.flush(&mut log);
            }
        }
    }

    /// stderr ended: `log` gets what follows the last LF.
    pub fn finish(&mut self, mut log: impl FnMut(&str)) {
        self.flush(&mut log);
    }

    /// The last 2 KiB, as text.
    #[must_use]
    pub fn tail(&self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }

    fn flush(&mut self, log: &mut impl FnMut(&str)) {
        let text = String::from_utf8_lossy(&self.line).replace(|c: char| c.is_control(), " ");
        let text = text.trim();
        if !text.is_empty() {
            log(text);
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes at most `step` bytes a call, then refuses once.
    struct Slow {
        got: Vec<u8>,
        step: usize,
        refuse: bool,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.refuse = !self.refuse;
            if !self.refuse {
                return Err(ErrorKind::WouldBlock.into());
            }
            let count = bytes.len().min(self.step);
            self.got.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_arrive_whole_and_in_order_through_a_pipe_that_takes_little() {
        for step in [1, 2, 3, 7, 100] {
            let mut out = Outbox::default();
            out.push(b"first turn\n".to_vec(), true);
            out.push(b"x\n".to_vec(), false);
            out.push(b"\n".to_vec(), true);
            let mut pipe = Slow { got: Vec::new(), step, refuse: false };
            let mut rounds = 0;
            while !out.is_empty() {
                assert_eq!(out.write_to(&mut pipe), Pipe::Open);
                rounds += 1;
                assert!(rounds < 100);
            }
            assert_eq!(pipe.got, b"first turn\nx\n\n");
        }
    }

    #[test]
    fn stderr_is_logged_by_line_and_its_end_is_kept() {
        let mut text = ErrorText::default();
        let mut logged = Vec::new();
        for chunk in [&b"one\ntw"[..], b"o\x1b[31m\n\n", &[b'x'; 5000], b"\ntail"] {
            text.push(chunk, |line| logged.push(line.to_owned()));
        }
        text.finish(|line| logged.push(line.to_owned()));
        assert_eq!(logged, ["one", "two [31m", &"x".repeat(4096), "tail"]);
        assert_eq!(text.tail().len(), 2048);
        assert!(text.tail().ends_with("x\ntail"));
    }
}
