//! Any text as a reference, any bytes as a payload: read back alike, and decoded as a plain decoder does or not at all.
#![no_main]

use beebox_chatd::transcript::MediaRef;
use beebox_chatd::transcript::media::{Decoder, mime};
use libfuzzer_sys::fuzz_target;

fn decode(payload: &[u8], piece: usize) -> Option<Vec<u8>> {
    let mut decoder = Decoder::default();
    let mut out = Vec::new();
    for part in payload.chunks(piece) {
        decoder.feed(part, &mut out).ok()?;
    }
    decoder.finish().ok().map(|()| out)
}

fn plain(payload: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut n, mut bits) = (Vec::new(), 0_u32, 0);
    let letters = payload
        .iter()
        .position(|b| *b == b'=')
        .unwrap_or(payload.len());
    if payload.len() % 4 != 0
        || payload.len() - letters > 2
        || payload[letters..].iter().any(|b| *b != b'=')
    {
        return None;
    }
    for b in &payload[..letters] {
        let value = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
            .iter()
            .position(|l| l == b)?;
        n = n << 6 | value as u32;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push((n >> bits) as u8);
        }
    }
    // Bits that belong to no byte must be clear.
    (n & ((1 << bits) - 1) == 0).then_some(out)
}

fuzz_target!(|input: &[u8]| {
    let [first, rest @ ..] = input else { return };
    if let Some(media) = std::str::from_utf8(rest).ok().and_then(MediaRef::parse) {
        assert_eq!(media.to_string().as_bytes(), rest);
    }
    let whole = decode(rest, rest.len().max(1));
    assert_eq!(decode(rest, usize::from(*first) + 1), whole);
    if !rest.contains(&b'\\') {
        assert_eq!(whole, plain(rest));
    }
    let _ = mime(rest);
});
