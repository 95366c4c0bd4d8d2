//! Any bytes as a transcript: what is shown does not depend on where reads divide it, and good lines among them are there.
#![no_main]

use beebox_chatd::ids::SessionId;
use beebox_chatd::transcript::entry::{Entry, build};
use beebox_chatd::transcript::line::{Scanner, Seen};
use beebox_chatd::transcript::record::Kind;
use libfuzzer_sys::fuzz_target;

fn read(bytes: &[u8], piece: usize) -> (Vec<Entry>, usize) {
    let session = SessionId::parse("s").unwrap();
    let (mut entries, mut gaps) = (Vec::new(), 0);
    let mut scanner = Scanner::new(0);
    for part in bytes.chunks(piece) {
        scanner.push(part, |raw| {
            raw.each(|seen| match seen {
                Seen::Gap => gaps += 1,
                Seen::Stub { .. } => {}
                Seen::Record {
                    record,
                    line,
                    cuts,
                    offset,
                    len,
                } => {
                    assert!(offset + len <= bytes.len() as u64);
                    gaps += usize::from(record.kind == Kind::Unreadable);
                    let (entry, _) = build(&record, line, cuts, &session, offset);
                    assert_eq!(entry.is_some(), record.kind.is_entry());
                    assert!(entry.as_ref().is_none_or(|e| !e.content.is_empty()));
                    entries.extend(entry);
                }
            });
        });
    }
    (entries, gaps)
}

fuzz_target!(|input: &[u8]| {
    let Some((first, rest)) = input.split_first() else {
        return;
    };
    let good = br#"{"type":"user","message":{"content":"x"},"uuid":"good"}"#;
    let file = [rest, b"\n", good, b"\n"].concat();
    let whole = read(&file, file.len());
    assert_eq!(read(&file, usize::from(*first) + 1), whole);
    assert_eq!(whole.0.last().map(|e| e.uuid.as_str()), Some("good"));
});
