//! What can be said of a photo from its base64 text: size, kind, dimensions. Reads single bytes in place, so a photo of
//! any size costs no memory. Rule a change could break: any input gives an answer, never a panic.

/// What is known of one photo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Photo {
    /// The media type its sender named.
    pub mime: String,
    /// Decoded size in bytes, as far as the base64 is sound.
    pub bytes: usize,
    /// Width and height in pixels, if the header says.
    pub dimensions: Option<(u32, u32)>,
}

impl Photo {
    /// Reads the photo in `base64`.
    pub fn read(mime: &str, base64: &str) -> Self {
        let peek = Peek(base64.trim_end_matches('=').as_bytes());
        Self { mime: mime.to_owned(), bytes: peek.len(), dimensions: dimensions(&peek) }
    }

    /// `image/png, 1234 bytes, 640 x 480`.
    pub fn words(&self) -> String {
        match self.dimensions {
            Some((width, height)) => {
                format!("{}, {} bytes, {width} x {height}", self.mime, self.bytes)
            }
            None => format!("{}, {} bytes, unknown dimensions", self.mime, self.bytes),
        }
    }
}

/// Random access to the bytes behind base64 without its padding.
struct Peek<'a>(&'a [u8]);

impl Peek<'_> {
    fn len(&self) -> usize {
        self.0.len() / 4 * 3 + [0, 0, 1, 2][self.0.len() % 4]
    }

    fn byte(&self, at: usize) -> Option<u32> {
        let bit = at.checked_mul(8)?;
        let (first, skip) = (bit / 6, bit % 6);
        let high = six_bits(*self.0.get(first)?)?;
        let low = six_bits(*self.0.get(first + 1)?)?;
        Some(((high << 6 | low) >> (4 - skip)) & 0xff)
    }

    fn starts_with(&self, from: usize, text: &[u8]) -> bool {
        text.iter().enumerate().all(|(i, byte)| self.byte(from + i) == Some(u32::from(*byte)))
    }

    /// `count` bytes from `at`, most significant first.
    fn big(&self, at: usize, count: usize) -> Option<u32> {
        (at..at + count).try_fold(0, |sum, i| Some(sum << 8 | self.byte(i)?))
    }

    /// `count` bytes from `at`, least significant first.
    fn little(&self, at: usize, count: usize) -> Option<u32> {
        (at..at + count).rev().try_fold(0, |sum, i| Some(sum << 8 | self.byte(i)?))
    }
}

fn six_bits(letter: u8) -> Option<u32> {
    Some(u32::from(match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

fn dimensions(peek: &Peek<'_>) -> Option<(u32, u32)> {
    if peek.starts_with(0, b"\x89PNG\r\n\x1a\n") {
        Some((peek.big(16, 4)?, peek.big(20, 4)?))
    } else if peek.starts_with(0, b"GIF8") {
        Some((peek.little(6, 2)?, peek.little(8, 2)?))
    } else if peek.starts_with(0, b"\xff\xd8") {
        jpeg(peek)
    } else if peek.starts_with(0, b"RIFF") && peek.starts_with(8, b"WEBP") {
        webp(peek)
    } else {
        None
    }
}

fn jpeg(peek: &Peek<'_>) -> Option<(u32, u32)> {
    let mut at = 2;
    loop {
        if peek.byte(at)? != 0xff {
            return None;
        }
        match peek.byte(at + 1)? {
            // Fill bytes and markers without a length.
            0xff => at += 1,
            0x01 | 0xd0..=0xd8 => at += 2,
            // Start of frame, all kinds but the tables that share its range.
            marker @ 0xc0..=0xcf if ![0xc4, 0xc8, 0xcc].contains(&marker) => {
                return Some((peek.big(at + 7, 2)?, peek.big(at + 5, 2)?));
            }
            _ => {
                let length = peek.big(at + 2, 2)?;
                if length < 2 {
                    return None;
                }
                at += 2 + length as usize;
            }
        }
    }
}

fn webp(peek: &Peek<'_>) -> Option<(u32, u32)> {
    if peek.starts_with(12, b"VP8X") {
        Some((peek.little(24, 3)? + 1, peek.little(27, 3)? + 1))
    } else if peek.starts_with(12, b"VP8L") {
        let bits = peek.little(21, 4)?;
        Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
    } else if peek.starts_with(12, b"VP8 ") {
        Some((peek.little(26, 2)? & 0x3fff, peek.little(28, 2)? & 0x3fff))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_tell_dimensions_and_padding_the_size() {
        // A 1 x 1 PNG, whole.
        let png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
        let photo = Photo::read("image/png", png);
        assert_eq!((photo.bytes, photo.dimensions), (70, Some((1, 1))));
        assert_eq!(photo.words(), "image/png, 70 bytes, 1 x 1");
        // GIF89a, 3 x 2.
        assert_eq!(Photo::read("image/gif", "R0lGODlhAwACAA==").dimensions, Some((3, 2)));
        // JPEG: SOI, APP0 of 4 bytes, SOF0 with 16 rows and 32 columns.
        assert_eq!(Photo::read("image/jpeg", "/9j/4AAEAAD/wAALCAAQACAB").dimensions, Some((32, 16)));
    }

    #[test]
    fn strange_input_has_no_dimensions_and_does_not_panic() {
        for text in ["", "=", "A", "AA", "!!!!", "/9j/", "/9j/4AAA", "iVBORw0KGgo=", "UklGRgAAAABXRUJQVlA4WA=="] {
            assert_eq!(Photo::read("image/x", text).dimensions, None, "{text}");
        }
        assert_eq!(Photo::read("image/x", "QQ==").bytes, 1);
    }
}
