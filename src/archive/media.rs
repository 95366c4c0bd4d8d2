//! One photo in its transcript: checked whole before its head goes out, then decoded from the file as it is sent.
//! Rule a change could break: constant memory per request, whatever the photo's size.

use std::io::{self, Read};

use super::file::Source;
use crate::error::{Code, Error, Result};
use crate::transcript::media::{Decoder, Digest, MIME_HEAD_BYTES, mime};

/// Base64 bytes of one read: a multiple of four, and small enough for hundreds of requests at once.
const PIECE_BYTES: usize = 48 * 1024;

/// A photo that was read to its end and is whole.
#[derive(Debug, Clone)]
pub struct MediaFile {
    /// Its type, told from its bytes.
    pub mime: &'static str,
    /// Its decoded length in bytes.
    pub len: u64,
    /// A strong ETag, with quotes.
    pub etag: String,
    source: Source,
    /// Where its base64 starts in the file, and how long it is.
    at: u64,
    base64_len: u64,
    /// Escapes stand in it: no arithmetic from decoded to encoded places.
    escaped: bool,
}

impl MediaFile {
    /// Reads the payload once; none if it is not whole base64.
    pub(super) fn check(source: Source, at: u64, base64_len: u64) -> io::Result<Option<Self>> {
        let mut decoder = Decoder::default();
        let mut digest = Digest::default();
        let mut head = Vec::with_capacity(MIME_HEAD_BYTES);
        let (mut len, mut done, mut escaped) = (0, 0, false);
        let mut piece = vec![0; PIECE_BYTES];
        let mut out = Vec::with_capacity(PIECE_BYTES);
        while done < base64_len {
            let want = usize::try_from(base64_len - done).unwrap_or(usize::MAX).min(PIECE_BYTES);
            if !source.fill_at(&mut piece[..want], at + done)? {
                return Ok(None);
            }
            done += want as u64;
            escaped |= memchr::memchr(b'\\', &piece[..want]).is_some();
            out.clear();
            if decoder.feed(&piece[..want], &mut out).is_err() {
                return Ok(None);
            }
            head.extend(out.iter().take(MIME_HEAD_BYTES - head.len()));
            digest.feed(&out);
            len += out.len() as u64;
        }
        if decoder.finish().is_err() || len == 0 {
            return Ok(None);
        }
        let etag = format!("\"{}\"", digest.text());
        Ok(Some(Self { mime: mime(&head), len, etag, source, at, base64_len, escaped }))
    }

    /// Its decoded bytes from `start` on, `len` of them.
    ///
    /// # Errors
    /// [`Code::BadRange`]: not inside the photo.
    pub fn open(&self, start: u64, len: u64) -> Result<Box<dyn Read + Send>> {
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            let range = format!("bytes {start} to {} of a photo of {} bytes", start.saturating_add(len), self.len);
            return Err(Error::new(Code::BadRange, range));
        }
        let (skip_base64, skip) = if self.escaped { (0, start) } else { (start / 3 * 4, start % 3) };
        Ok(Box::new(MediaReader {
            source: self.source.clone(),
            at: self.at + skip_base64,
            end: self.at + self.base64_len,
            decoder: Decoder::default(),
            out: Vec::new(),
            out_at: 0,
            piece: Vec::new(),
            skip,
            left: len,
        }))
    }
}

/// Decodes as it is read. A file that was shortened meanwhile is an error, never a short photo.
#[derive(Debug)]
pub struct MediaReader {
    source: Source,
    at: u64,
    end: u64,
    decoder: Decoder,
    out: Vec<u8>,
    out_at: usize,
    piece: Vec<u8>,
    skip: u64,
    left: u64,
}

impl MediaReader {
    fn refill(&mut self) -> io::Result<()> {
        let broken = || io::Error::new(io::ErrorKind::UnexpectedEof, "the transcript changed while a photo was sent");
        let want = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(PIECE_BYTES);
        if want == 0 {
            return Err(broken());
        }
        self.piece.resize(PIECE_BYTES, 0);
        if !self.source.fill_at(&mut self.piece[..want], self.at)? {
            return Err(broken());
        }
        self.at += want as u64;
        self.out.clear();
        self.out_at = 0;
        self.decoder.feed(&self.piece[..want], &mut self.out).map_err(|_| broken())?;
        let skip = usize::try_from(self.skip).unwrap_or(usize::MAX).min(self.out.len());
        self.out_at = skip;
        self.skip -= skip as u64;
        Ok(())
    }
}

impl Read for MediaReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        while self.out_at == self.out.len() {
            self.refill()?;
        }
        let ready = &self.out[self.out_at..];
        let n = ready.len().min(buffer.len()).min(usize::try_from(self.left).unwrap_or(usize::MAX));
        buffer[..n].copy_from_slice(&ready[..n]);
        self.out_at += n;
        self.left -= n as u64;
        Ok(n)
    }
}
