//! Request heads from arbitrary bytes: never a panic, and never two readings of where a request ends.
#![no_main]

use beebox_chatd::http::gate::head::{Framing, Scan, parse, scan};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut scanned = 0;
    let whole = scan(bytes, &mut scanned);
    // Fed byte by byte it ends at the same place.
    let mut at = 0;
    let bit_by_bit = (1..=bytes.len()).map(|n| scan(&bytes[..n], &mut at)).find(|s| *s != Scan::Partial);
    assert_eq!(bit_by_bit.unwrap_or(Scan::Partial), whole);
    let Scan::Whole(len) = whole else { return };
    let Ok(head) = parse(&bytes[..len]) else { return };
    assert!(head.target.starts_with('/') || head.target == "*");
    assert!(head.target.bytes().all(|b| (0x21..0x7f).contains(&b)));
    let lower = bytes[..len].to_ascii_lowercase();
    let fields = |name: &[u8]| lower.windows(name.len()).filter(|w| *w == name).count();
    match head.framing {
        Framing::Length(_) => assert_eq!(fields(b"\r\ntransfer-encoding:"), 0),
        Framing::Chunked => assert_eq!(fields(b"\r\ncontent-length:"), 0),
        Framing::None => assert_eq!(fields(b"\r\ntransfer-encoding:"), 0),
    }
    let _ = beebox_chatd::http::route::parse(head.method, head.target);
});
