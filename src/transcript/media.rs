//! PURE. A photo's reference, its payload decoded piece by piece, and its type told from its first bytes.
//!
//! Leaves reading the file to `archive`. Rule a change could break: a payload that is not whole, padded, standard
//! base64 is refused, never served as far as it goes.

use std::fmt;

use base64_simd::STANDARD;
use memchr::memchr;

use crate::ids::{SessionId, is_plain_id};

/// Names one photo of one entry: `<sessionId>/<entryUuid>/<index>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MediaRef {
    /// Which conversation.
    pub session: SessionId,
    /// Which entry.
    pub entry: String,
    /// Which of its photos: counts blocks of type `image` in `message.content`.
    pub index: usize,
}

impl MediaRef {
    /// Reads `<sessionId>/<entryUuid>/<index>`; none for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let session = SessionId::parse(parts.next()?).ok()?;
        let entry = parts.next().filter(|e| is_plain_id(e))?.to_owned();
        let digits = parts.next()?;
        let canonical = digits == "0" || !digits.starts_with('0');
        if parts.next().is_some() || digits.len() > 6 || !canonical || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        Some(Self { session, entry, index: digits.parse().ok()? })
    }
}

impl fmt::Display for MediaRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.session, self.entry, self.index)
    }
}

/// `bytes` as standard base64 with padding.
#[must_use]
pub fn encode_base64(bytes: &[u8]) -> String {
    STANDARD.encode_to_string(bytes)
}

/// The bytes of standard base64 with padding; none for anything else.
#[must_use]
pub fn decode_base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode_to_vec(text).ok()
}

/// The payload is not whole standard base64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadPayload;

/// Decodes a payload that comes in pieces, as it stands in the line (with `\/` for `/`, if the writer did so).
#[derive(Debug, Default)]
pub struct Decoder {
    /// Letters of a group of four that is not whole.
    carry: [u8; 4],
    carried: usize,
    /// An escape that is not whole.
    escape: Vec<u8>,
    /// Padding was seen: nothing may follow.
    ended: bool,
    plain: Vec<u8>,
}

impl Decoder {
    /// Decodes the next piece to the end of `out`.
    ///
    /// # Errors
    /// It is not base64.
    pub fn feed(&mut self, piece: &[u8], out: &mut Vec<u8>) -> Result<(), BadPayload> {
        if self.escape.is_empty() && memchr(b'\\', piece).is_none() {
            return self.letters(piece, out);
        }
        let mut plain = std::mem::take(&mut self.plain);
        plain.clear();
        let done = self.unescape(piece, &mut plain).and_then(|()| self.letters(&plain, out));
        self.plain = plain;
        done
    }

    /// The payload is over.
    ///
    /// # Errors
    /// It was cut short, or has no bytes.
    pub fn finish(&self) -> Result<(), BadPayload> {
        if self.carried == 0 && self.escape.is_empty() { Ok(()) } else { Err(BadPayload) }
    }

    fn unescape(&mut self, piece: &[u8], plain: &mut Vec<u8>) -> Result<(), BadPayload> {
        for &b in piece {
            if self.escape.is_empty() {
                if b == b'\\' {
                    self.escape.push(b);
                } else {
                    plain.push(b);
                }
                continue;
            }
            self.escape.push(b);
            match (self.escape[1], self.escape.len()) {
                (b'/', _) => {
                    plain.push(b'/');
                    self.escape.clear();
                }
                (b'u', 6) => {
                    let text = super::json::unescape(&self.escape).into_owned();
                    plain.extend_from_slice(text.as_bytes());
                    self.escape.clear();
                }
                (b'u', _) => {}
                _ => return Err(BadPayload),
            }
        }
        Ok(())
    }

    fn letters(&mut self, mut piece: &[u8], out: &mut Vec<u8>) -> Result<(), BadPayload> {
        if piece.is_empty() {
            return Ok(());
        }
        if self.ended {
            return Err(BadPayload);
        }
        if self.carried > 0 {
            let n = piece.len().min(4 - self.carried);
            self.carry[self.carried..self.carried + n].copy_from_slice(&piece[..n]);
            self.carried += n;
            piece = &piece[n..];
            if self.carried < 4 {
                return Ok(());
            }
            let group = self.carry;
            self.carried = 0;
            self.group(&group, out)?;
            if piece.is_empty() {
                return Ok(());
            }
            if self.ended {
                return Err(BadPayload);
            }
        }
        let whole = piece.len() / 4 * 4;
        let (groups, rest) = piece.split_at(whole);
        self.group(groups, out)?;
        if self.ended && !rest.is_empty() {
            return Err(BadPayload);
        }
        self.carry[..rest.len()].copy_from_slice(rest);
        self.carried = rest.len();
        Ok(())
    }

    fn group(&mut self, groups: &[u8], out: &mut Vec<u8>) -> Result<(), BadPayload> {
        if groups.is_empty() {
            return Ok(());
        }
        self.ended = groups.last() == Some(&b'=');
        STANDARD.decode_append(groups, out).map_err(|_| BadPayload)
    }
}

/// The media type of a photo by its first bytes: one of the seven that browsers show, else bytes.
#[must_use]
pub fn mime(head: &[u8]) -> &'static str {
    if head.starts_with(b"\x89PNG\r\n\x1a\n") {
        return "image/png";
    }
    if head.starts_with(b"\xff\xd8\xff") {
        return "image/jpeg";
    }
    if head.starts_with(b"GIF87a") || head.starts_with(b"GIF89a") {
        return "image/gif";
    }
    if head.starts_with(b"RIFF") && head.get(8..12) == Some(b"WEBP") {
        return "image/webp";
    }
    if head.get(4..8) == Some(b"ftyp") {
        return match head.get(8..12) {
            Some(b"avif" | b"avis") => "image/avif",
            Some(b"heic" | b"heix" | b"hevc" | b"hevx" | b"heim" | b"heis") => "image/heic",
            Some(b"mif1" | b"msf1") => "image/heif",
            Some(_) | None => OTHER_MIME,
        };
    }
    OTHER_MIME
}

/// What a photo of no known type is served as.
pub const OTHER_MIME: &str = "application/octet-stream";
/// Bytes that [`mime`] looks at.
pub const MIME_HEAD_BYTES: usize = 16;

/// A quick digest of a photo for its ETag: not secret, told apart by any changed byte.
#[derive(Debug, Clone)]
pub struct Digest {
    lanes: [u64; 4],
    bytes: u64,
}

impl Default for Digest {
    fn default() -> Self {
        Self {
            lanes: [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x27d4_eb2f_1656_67c5],
            bytes: 0,
        }
    }
}

impl Digest {
    /// The next bytes. The outcome depends on where they are divided: callers divide at fixed places.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        let (blocks, rest) = bytes.as_chunks::<32>();
        for block in blocks {
            self.block(block);
        }
        if !rest.is_empty() {
            let mut last = [0; 32];
            last[..rest.len()].copy_from_slice(rest);
            self.block(&last);
        }
    }

    fn block(&mut self, block: &[u8; 32]) {
        for (lane, word) in self.lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = (*lane ^ u64::from_le_bytes(*word)).wrapping_mul(0x9fb2_1c65_1e98_df25);
            *lane ^= *lane >> 32;
        }
    }

    /// 128 bits in hexadecimal.
    #[must_use]
    pub fn text(&self) -> String {
        let [a, b, c, d] = self.lanes;
        let high = (a.rotate_left(7) ^ c).wrapping_mul(0xff51_afd7_ed55_8ccd) ^ self.bytes;
        let low = (b.rotate_left(11) ^ d).wrapping_mul(0xc4ce_b9fe_1a85_ec53) ^ high >> 29;
        format!("{high:016x}{low:016x}")
    }
}
