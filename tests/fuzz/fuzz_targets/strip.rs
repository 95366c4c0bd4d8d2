//! Any bytes as a line: no run is left, nothing else is lost, and pieces do not matter.
#![no_main]

use beebox_chatd::transcript::strip::{Cut, Left, Strip, is_clean};
use libfuzzer_sys::fuzz_target;

fn strip(line: &[u8], piece: usize) -> Option<(Vec<u8>, Vec<Cut>)> {
    let mut strip = Strip::default();
    for part in line.chunks(piece) {
        strip.feed(part);
    }
    match strip.finish() {
        Left::Held(out, cuts) => Some((out.to_vec(), cuts.to_vec())),
        Left::Over(_) => None,
    }
}

fn longest_run(bytes: &[u8]) -> usize {
    bytes
        .split(|b| !(b.is_ascii_alphanumeric() || b"+/=_-".contains(b)))
        .map(<[u8]>::len)
        .max()
        .unwrap_or(0)
}

fuzz_target!(|input: &[u8]| {
    let [first, rest @ ..] = input else { return };
    // Bytes of the input are repeated, so that runs are reached.
    let line: Vec<u8> = rest
        .iter()
        .flat_map(|b| std::iter::repeat_n(*b, if b.is_ascii_uppercase() { 300 } else { 1 }))
        .collect();
    let Some((out, cuts)) = strip(&line, line.len().max(1)) else {
        return;
    };
    assert_eq!(
        strip(&line, usize::from(*first) + 1),
        Some((out.clone(), cuts.clone()))
    );
    assert_eq!(is_clean(&line), cuts.is_empty());
    let (mut from, mut whole) = (0, Vec::new());
    for cut in &cuts {
        let kept = &out[from..cut.at as usize];
        assert!(longest_run(kept) < 1024);
        whole.extend_from_slice(kept);
        whole.extend_from_slice(&line[cut.start as usize..][..cut.len as usize]);
        from = cut.at as usize;
    }
    assert!(longest_run(&out[from..]) < 1024);
    whole.extend_from_slice(&out[from..]);
    assert_eq!(whole, line);
});
