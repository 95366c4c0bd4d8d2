//! stdout, line by line.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;

use super::Stop;
use super::transcript::log_line;

/// Output held back during a flood, in bytes: one write for many frames, as a pipe takes them.
const HELD_BYTES_MAX: usize = 32 * 1024;

/// stdout: a write for every line, or one for many during a flood.
pub struct Out {
    pipe: File,
    held: Vec<u8>,
    /// Whether lines may wait for more of them.
    pub holding: bool,
}

impl Out {
    pub fn new() -> Result<Self, Stop> {
        match std::io::stdout().as_fd().try_clone_to_owned() {
            Ok(fd) => Ok(Self { pipe: File::from(fd), held: Vec::new(), holding: false }),
            Err(e) => {
                log_line(&format!("Error: no stdout: {e}"));
                Err(Stop::Exit(1))
            }
        }
    }

    pub fn line(&mut self, mut line: String) -> Result<(), Stop> {
        line.push('\n');
        self.held.extend_from_slice(line.as_bytes());
        if self.holding && self.held.len() < HELD_BYTES_MAX { Ok(()) } else { self.flush() }
    }

    pub fn flush(&mut self) -> Result<(), Stop> {
        if self.held.is_empty() {
            return Ok(());
        }
        // Whoever read it is gone: so is the reason to live.
        let written = self.pipe.write_all(&self.held).map_err(|_| Stop::Exit(1));
        self.held.clear();
        self.held.shrink_to(2 * HELD_BYTES_MAX);
        written
    }
}
