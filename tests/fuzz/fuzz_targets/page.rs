//! Any bytes as a transcript: every line of the index reads again as what it was, and pages make up the whole.
#![no_main]

use beebox_chatd::transcript::index::{Index, Plan, Step};
use beebox_chatd::transcript::line::Scanner;
use beebox_chatd::transcript::record;
use beebox_chatd::transcript::strip::{Left, Strip};
use libfuzzer_sys::fuzz_target;

fn steps(plan: Plan) -> Vec<Step> {
    match plan {
        Plan::Lines { steps, .. } => steps,
        Plan::Rescan(_) => panic!("small files are known whole"),
    }
}

fuzz_target!(|input: &[u8]| {
    let [size, bytes @ ..] = input else { return };
    let mut index = Index::default();
    let mut scanner = Scanner::new(0);
    scanner.push(bytes, |raw| index.take(&raw));
    let all = steps(index.plan_tail(usize::MAX, 0, usize::MAX));
    let entries = all.iter().filter(|s| s.place.kind.is_entry()).count() as u64;
    assert_eq!(entries, index.total());
    for step in all.iter().filter(|s| !s.place.stub) {
        let mut strip = Strip::default();
        strip.feed(&bytes[step.place.offset as usize..][..step.place.len as usize]);
        let Left::Held(line, cuts) = strip.finish() else {
            panic!("was held before")
        };
        let record = record::read(line, cuts, 0).expect("was read before");
        assert_eq!(record.kind, step.place.kind);
        if let (Some(uuid), true) = (record.plain_uuid(), record.kind.is_entry()) {
            assert_eq!(index.find(&uuid), Ok(Some(step.clone())));
        }
    }
    let page = usize::from(*size) + 1;
    let mut got = Vec::new();
    for offset in (0..entries).step_by(page) {
        let plan = steps(index.plan_page(offset, page));
        got.extend(
            plan.into_iter()
                .filter(|s| s.place.kind.is_entry())
                .map(|s| s.place.offset),
        );
    }
    let want: Vec<u64> = all
        .iter()
        .filter(|s| s.place.kind.is_entry())
        .map(|s| s.place.offset)
        .collect();
    assert_eq!(got, want);
});
