//! Request bodies on their way in: chunked decoding (pure), and the store that begins in memory and goes on in an
//! unlinked file. Rule a change could break: a body is never larger in memory than its share, and never forwarded
//! before it is whole.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::limits::{CHUNK_LINE_BYTES_MAX, TRAILER_BYTES_MAX};
use crate::error::{Code, Error, Result};

/// Decoder of a chunked body, fed in pieces of any size.
#[derive(Debug)]
pub struct Chunks {
    at: At,
    /// Bytes of the line or trailer being read.
    line_bytes: usize,
    size: u64,
    digits: u8,
    total: u64,
    total_max: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Size,
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    TrailerStart,
    Trailer,
    TrailerLf,
    LastLf,
    Done,
}

impl Chunks {
    /// A decoder for at most `total_max` bytes of body.
    #[must_use]
    pub fn new(total_max: u64) -> Self {
        Self { at: At::Size, line_bytes: 0, size: 0, digits: 0, total: 0, total_max }
    }

    /// True when the last chunk and its trailer were read.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.at == At::Done
    }

    /// Decodes from `input` into `out` until the input or the body ends; says how many bytes were used.
    ///
    /// # Errors
    /// 400 for anything but strict chunks, 413 beyond the limit.
    pub fn feed(&mut self, input: &[u8], mut out: impl FnMut(&[u8]) -> Result<()>) -> Result<usize> {
        let wrong = |text| Err(Error::new(Code::BadRequest, text));
        let mut at = 0;
        while at < input.len() && self.at != At::Done {
            if self.at == At::Data {
                let piece = &input[at..at + usize::try_from(self.size).unwrap_or(usize::MAX).min(input.len() - at)];
                out(piece)?;
                at += piece.len();
                self.size -= piece.len() as u64;
                if self.size == 0 {
                    self.at = At::DataCr;
                }
                continue;
            }
            let b = input[at];
            at += 1;
            self.line_bytes += 1;
            self.at = match (self.at, b) {
                (At::Size, b) if b.is_ascii_hexdigit() => {
                    self.digits += 1;
                    if self.digits > 16 {
                        return wrong("a chunk size of more than 16 digits");
                    }
                    self.size = self.size << 4 | u64::from((b as char).to_digit(16).unwrap_or(0));
                    At::Size
                }
                (At::Size, b'\r') if self.digits > 0 => At::SizeLf,
                (At::Size, b';') if self.digits > 0 => At::Extension,
                (At::Extension, b'\r') => At::SizeLf,
                (At::Extension, b) if b == b'\t' || (0x20..0x7f).contains(&b) => {
                    if self.line_bytes > CHUNK_LINE_BYTES_MAX {
                        return wrong("a chunk extension that is too long");
                    }
                    At::Extension
                }
                (At::SizeLf, b'\n') => {
                    self.line_bytes = 0;
                    self.digits = 0;
                    if self.size > self.total_max - self.total {
                        return Err(Error::new(Code::TooLarge, format!("a body over {} bytes", self.total_max)));
                    }
                    self.total += self.size;
                    if self.size == 0 { At::TrailerStart } else { At::Data }
                }
                (At::DataCr, b'\r') => At::DataLf,
                (At::DataLf, b'\n') => {
                    self.line_bytes = 0;
                    At::Size
                }
                (At::TrailerStart, b'\r') => At::LastLf,
                (At::TrailerStart | At::Trailer, b) if b != b'\n' && b != b'\r' && b != 0 => {
                    if self.line_bytes > TRAILER_BYTES_MAX {
                        return Err(Error::new(Code::HeadTooLarge, "a trailer that is too long"));
                    }
                    At::Trailer
                }
                (At::Trailer, b'\r') => At::TrailerLf,
                (At::TrailerLf, b'\n') => At::TrailerStart,
                (At::LastLf, b'\n') => At::Done,
                (_, _) => return wrong("malformed chunks"),
            };
        }
        Ok(at)
    }
}

/// An unlinked file of the state directory: gone with its last descriptor, whatever happens.
///
/// # Errors
/// What the kernel says; 503, for the disk or the descriptors are short.
pub fn unlinked_file(dir: &Path) -> Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let made = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR).map(File::from);
    let made = made.or_else(|_| named_and_unlinked(dir));
    made.map_err(|e| Error::new(Code::Overloaded, format!("no room to spool a body: {e}")))
}

/// For file systems without O_TMPFILE.
fn named_and_unlinked(dir: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = dir.join(format!(".spool-{}", crate::ids::random_uuid()));
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// A body.
#[derive(Debug)]
pub enum Store {
    /// In memory.
    Memory(Vec<u8>),
    /// In an unlinked file of so many bytes.
    File(File, u64),
}

impl Default for Store {
    fn default() -> Self {
        Self::Memory(Vec::new())
    }
}

impl Store {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Store::Memory(bytes) => bytes.len() as u64,
            Store::File(_, len) => *len,
        }
    }

    /// True without a byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends; moves to a file of `dir` when it would hold more than `memory_max`.
    ///
    /// # Errors
    /// 503 when the disk has no room.
    pub fn append(&mut self, piece: &[u8], memory_max: usize, dir: &Path) -> Result<()> {
        if let Store::Memory(bytes) = self {
            if bytes.len() + piece.len() <= memory_max {
                bytes.extend_from_slice(piece);
                return Ok(());
            }
            let file = unlinked_file(dir)?;
            file.write_all_at(bytes, 0).map_err(disk)?;
            *self = Store::File(file, bytes.len() as u64);
        }
        if let Store::File(file, len) = self {
            file.write_all_at(piece, *len).map_err(disk)?;
            *len += piece.len() as u64;
        }
        Ok(())
    }

    /// Copies bytes from `at` on into `buffer`; fewer only at the end.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read_at(&self, at: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Store::Memory(bytes) => {
                let from = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
                let piece = &bytes[from..][..buffer.len().min(bytes.len() - from)];
                buffer[..piece.len()].copy_from_slice(piece);
                Ok(piece.len())
            }
            Store::File(file, _) => file.read_at(buffer, at),
        }
    }

    /// All of it.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn into_bytes(self) -> Result<Vec<u8>> {
        match self {
            Store::Memory(bytes) => Ok(bytes),
            Store::File(file, len) => {
                let len = usize::try_from(len).map_err(|_| Error::internal("a body longer than memory"))?;
                let mut bytes = vec![0; len];
                file.read_exact_at(&mut bytes, 0)?;
                Ok(bytes)
            }
        }
    }
}

fn disk(e: std::io::Error) -> Error {
    Error::new(Code::Overloaded, format!("no room to spool a body: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(input: &[u8], cuts: &[usize], max: u64) -> std::result::Result<(Vec<u8>, usize), Code> {
        let mut chunks = Chunks::new(max);
        let (mut body, mut used, mut from) = (Vec::new(), 0, 0);
        for cut in cuts.iter().copied().chain([input.len()]) {
            let n = chunks
                .feed(&input[from..cut], |p| {
                    body.extend_from_slice(p);
                    Ok(())
                })
                .map_err(|e| e.code())?;
            used += n;
            if chunks.is_done() {
                return Ok((body, used));
            }
            assert_eq!(n, cut - from);
            from = cut;
        }
        Err(Code::RequestTimeout)
    }

    #[test]
    fn chunks_decode_alike_however_they_are_cut() {
        let input = b"5;ext=\"1\"\r\nhello\r\n00000A\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\nGET";
        for first in 0..input.len() {
            for second in [first, (first + 1).min(input.len()), input.len()] {
                let (body, used) = decode(input, &[first, second], 15).unwrap();
                assert_eq!((body.as_slice(), used), (&b"hello0123456789"[..], input.len() - 3));
            }
        }
    }

    #[test]
    fn malformed_or_oversized_chunks_are_refused() {
        for (input, code) in [
            (&b"\r\n"[..], Code::BadRequest),
            (b"5\nhello", Code::BadRequest),
            (b"5\r\nhelloX", Code::BadRequest),
            (b"5\r\nhello\n", Code::BadRequest),
            (b"-5\r\n", Code::BadRequest),
            (b"0x5\r\n", Code::BadRequest),
            (b" 5\r\n", Code::BadRequest),
            (b"5 \r\n", Code::BadRequest),
            (b";a\r\n", Code::BadRequest),
            (b"5;\x01\r\n", Code::BadRequest),
            (b"0\r\nX: y\n\r\n", Code::BadRequest),
            (b"00000000000000005\r\n", Code::BadRequest),
            (b"10\r\n", Code::TooLarge),
            (b"ffffffffffffffff\r\n", Code::TooLarge),
            (b"5\r\nhello\r\nfffffffffffffffb\r\n", Code::TooLarge),
        ] {
            assert_eq!(decode(input, &[], 15), Err(code), "{:?}", String::from_utf8_lossy(input));
        }
        let long = [b"0\r\nX: ".as_slice(), &b"y".repeat(TRAILER_BYTES_MAX)].concat();
        assert_eq!(decode(&long, &[], 15), Err(Code::HeadTooLarge));
    }

    #[test]
    fn a_store_moves_to_an_unlinked_file_and_reads_back_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::default();
        let mut all = Vec::new();
        for n in 0..50u8 {
            let piece = vec![n; usize::from(n) * 3];
            store.append(&piece, 1000, dir.path()).unwrap();
            all.extend_from_slice(&piece);
            assert_eq!(matches!(store, Store::Memory(_)), all.len() <= 1000);
        }
        assert_eq!(store.len(), all.len() as u64);
        let mut back = vec![0; all.len() + 1];
        assert_eq!(store.read_at(0, &mut back).unwrap(), all.len());
        assert_eq!(&back[..all.len()], &all[..]);
        assert_eq!(store.read_at(all.len() as u64, &mut back).unwrap(), 0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
