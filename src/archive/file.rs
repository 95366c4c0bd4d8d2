//! One open transcript: ranged reads, pooled buffers, one line at a time. Rule a change could break: a reader that was
//! opened keeps the same file, whatever is renamed over its name.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;

use crate::sync::Mutex;
use crate::transcript::index::Step;
use crate::transcript::sniff::Sniff;
use crate::transcript::strip::{Cut, Left, Strip, is_clean};

/// Bytes of one read: fits a core's own cache, so that scanning does not wait for memory.
pub const READ_BYTES: usize = 256 * 1024;
/// Buffers kept for the next reader.
const BUFFERS_KEPT: usize = 8;

/// An open transcript, as large as it was when opened.
#[derive(Debug, Clone)]
pub struct Source {
    file: Arc<File>,
    /// Device and inode: which file it is.
    pub identity: (u64, u64),
    /// Its size when opened.
    pub size: u64,
}

impl Source {
    /// Opens `path`; none if it is not there. Never blocks and never touches what is not a regular file: the folder is
    /// somebody else's, and a FIFO, a socket or a device can carry the name of a transcript.
    ///
    /// # Errors
    /// What the kernel says; `InvalidInput` for anything but a regular file.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        // Looked at before the opening: opening alone can rewind a tape or wake the other end of a FIFO.
        let looked = std::fs::metadata(path).and_then(|meta| regular(&meta));
        let opened = looked.and_then(|()| {
            // And not blocking, for what was put there in between.
            let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
            File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
        });
        let file = match opened {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let meta = file.metadata()?;
        regular(&meta)?;
        Ok(Some(Self { file: Arc::new(file), identity: (meta.dev(), meta.ino()), size: meta.len() }))
    }

    /// The open file, for a lock on it.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Reads at `at`, never past the size seen at the opening; 0 at the end.
    pub fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let room = usize::try_from(self.size.saturating_sub(at)).unwrap_or(usize::MAX);
        let want = buffer.len().min(room);
        if want == 0 {
            return Ok(0);
        }
        loop {
            match self.file.read_at(&mut buffer[..want], at) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Fills `buffer` from `at`; false if the file has become too short.
    pub fn fill_at(&self, mut buffer: &mut [u8], mut at: u64) -> io::Result<bool> {
        while !buffer.is_empty() {
            let n = self.read_at(buffer, at)?;
            if n == 0 {
                return Ok(false);
            }
            buffer = &mut buffer[n..];
            at += n as u64;
        }
        Ok(true)
    }
}

fn regular(meta: &std::fs::Metadata) -> io::Result<()> {
    if meta.is_file() { Ok(()) } else { Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file")) }
}

/// Read buffers that go from request to request.
#[derive(Debug, Default)]
pub struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// A buffer of [`READ_BYTES`], with whatever was read before in it.
    pub fn take(&self) -> Buffer<'_> {
        let bytes = self.0.lock().pop().unwrap_or_else(|| vec![0; READ_BYTES]);
        Buffer { pool: self, bytes }
    }
}

/// See [`Buffers::take`].
#[derive(Debug)]
pub struct Buffer<'a> {
    pool: &'a Buffers,
    bytes: Vec<u8>,
}

impl std::ops::Deref for Buffer<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl std::ops::DerefMut for Buffer<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut kept = self.pool.0.lock();
        if kept.len() < BUFFERS_KEPT {
            kept.push(bytes);
        }
    }
}

/// One line that was read again.
pub enum Whole<'a> {
    /// What is left of it.
    Line(&'a [u8], &'a [Cut]),
    /// It was too long.
    Sniffed(&'a Sniff),
}

/// Reads the lines of a plan, one after the other, in one buffer.
pub struct LineReader<'a> {
    buffer: Buffer<'a>,
    strip: Strip,
}

impl<'a> LineReader<'a> {
    pub fn new(buffers: &'a Buffers) -> Self {
        Self { buffer: buffers.take(), strip: Strip::default() }
    }

    /// What is left of the record at `step`, `bytes_max` of it at most; none if the file has become too short.
    pub fn read(&mut self, source: &Source, step: &Step, bytes_max: u64) -> io::Result<Option<Whole<'_>>> {
        let (start, end) = (step.place.offset, step.place.offset + step.place.len.min(bytes_max));
        let len = usize::try_from(end - start).unwrap_or(usize::MAX);
        if step.spans.is_empty() && len <= self.buffer.len() {
            if !source.fill_at(&mut self.buffer[..len], start)? {
                return Ok(None);
            }
            if is_clean(&self.buffer[..len]) {
                return Ok(Some(Whole::Line(&self.buffer[..len], &[])));
            }
            self.strip.clear();
            self.strip.feed(&self.buffer[..len]);
        } else {
            self.strip.clear();
            let mut at = start;
            for span in &step.spans {
                if !self.feed(source, at, start + u64::from(span.start))? {
                    return Ok(None);
                }
                self.strip.pass_run(span.len);
                at = start + u64::from(span.start) + u64::from(span.len);
            }
            if !self.feed(source, at, end)? {
                return Ok(None);
            }
        }
        Ok(Some(match self.strip.finish() {
            Left::Held(line, cuts) => Whole::Line(line, cuts),
            Left::Over(sniff) => Whole::Sniffed(sniff),
        }))
    }

    fn feed(&mut self, source: &Source, mut at: u64, end: u64) -> io::Result<bool> {
        while at < end {
            let want = self.buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
            let n = source.read_at(&mut self.buffer[..want], at)?;
            if n == 0 {
                return Ok(false);
            }
            self.strip.feed(&self.buffer[..n]);
            at += n as u64;
        }
        Ok(true)
    }
}
