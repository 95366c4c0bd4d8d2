//! Photos made on the spot: valid PNG files of any size in bytes, each different.
//! Rule a change could break: the files are true PNG (signature, chunk sums, zlib stream), so a reader that validates
//! accepts them, and the bytes do not compress to something smaller on the way.

/// CRC-32 as PNG chunks carry it.
fn crc32(parts: [&[u8]; 2]) -> u32 {
    let mut crc = u32::MAX;
    for byte in parts.into_iter().flatten() {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let mask = (crc & 1).wrapping_neg();
            crc = (crc >> 1) ^ (0xedb8_8320 & mask);
        }
    }
    !crc
}

/// Adler-32 as zlib streams carry it.
fn adler32(bytes: &[u8]) -> u32 {
    let (mut a, mut b) = (1u32, 0u32);
    // 5,552 is the longest stretch whose sums cannot overflow 32 bits.
    for chunk in bytes.chunks(5_552) {
        for byte in chunk {
            a += u32::from(*byte);
            b += a;
        }
        a %= 65_521;
        b %= 65_521;
    }
    (b << 16) | a
}

fn chunk(out: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    out.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(kind);
    out.extend_from_slice(data);
    out.extend_from_slice(&crc32([kind, data]).to_be_bytes());
}

/// A grey noise picture of `width` times `height` pixels; equal arguments give equal bytes.
#[must_use]
pub fn noise(width: u32, height: u32, seed: u64) -> Vec<u8> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let mut raw = Vec::with_capacity((width as usize + 1) * height as usize);
    for _ in 0..height {
        raw.extend_from_slice(&[0]); // filter type of the row: none
        for _ in 0..width {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            raw.push((state >> 56) as u8);
        }
    }
    // Stored deflate blocks: no compressor needed, and the size is known beforehand.
    let mut zlib = vec![0x78, 0x01];
    let mut blocks = raw.chunks(usize::from(u16::MAX)).peekable();
    while let Some(block) = blocks.next() {
        let len = block.len() as u16;
        zlib.push(u8::from(blocks.peek().is_none()));
        zlib.extend_from_slice(&len.to_le_bytes());
        zlib.extend_from_slice(&(!len).to_le_bytes());
        zlib.extend_from_slice(block);
    }
    zlib.extend_from_slice(&adler32(&raw).to_be_bytes());

    let mut head = Vec::with_capacity(13);
    head.extend_from_slice(&width.to_be_bytes());
    head.extend_from_slice(&height.to_be_bytes());
    head.extend_from_slice(&[8, 0, 0, 0, 0]); // 8 bits of grey, no interlace

    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut out, b"IHDR", &head);
    chunk(&mut out, b"IDAT", &zlib);
    chunk(&mut out, b"IEND", &[]);
    out
}

/// A picture of about `bytes` bytes, 70 at least.
#[must_use]
pub fn of_bytes(bytes: usize, seed: u64) -> Vec<u8> {
    // 63 bytes of frame and zlib, one filter byte a row.
    let pixels = bytes.saturating_sub(63).max(1);
    let width = (pixels as f64).sqrt().ceil().clamp(1.0, 2_000.0) as usize;
    let height = (pixels / (width + 1)).max(1);
    noise(u32::try_from(width).unwrap_or(1), u32::try_from(height).unwrap_or(1), seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_match_published_values() {
        assert_eq!(crc32([b"1234", b"56789"]), 0xcbf4_3926);
        assert_eq!(crc32([b"IEND", b""]), 0xae42_6082);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn pictures_are_about_as_large_as_asked_and_differ_by_seed() {
        for bytes in [70, 500, 70_000, 200_000, 1_000_000] {
            let picture = of_bytes(bytes, 1);
            assert!(picture.starts_with(b"\x89PNG\r\n\x1a\n") && picture.ends_with(b"\xae\x42\x60\x82"));
            assert!(picture.len().abs_diff(bytes) * 10 <= bytes, "{} for {bytes}", picture.len());
        }
        assert_ne!(of_bytes(500, 1), of_bytes(500, 2));
        assert_eq!(of_bytes(500, 1), of_bytes(500, 1));
    }
}
