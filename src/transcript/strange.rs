//! Tests: every line that real transcripts were seen to hold and a reader must survive, each between good neighbours and
//! in pieces of several sizes; then the properties that hold for any bytes.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::entry::{Entry, build, build_stub, payload, sniffed_id};
use super::line::{Scanner, Seen};
use super::media::Decoder;
use super::record::Kind;
use super::strip::{Left, Strip};
use crate::ids::SessionId;

/// Entries and unreadable lines of a transcript that comes in pieces.
fn read(bytes: &[u8], piece: usize) -> (Vec<Entry>, usize) {
    let session = SessionId::parse("s").unwrap();
    let (mut entries, mut gaps) = (Vec::new(), 0);
    let mut scanner = Scanner::new(0);
    for part in bytes.chunks(piece) {
        scanner.push(part, |raw| {
            raw.each(|seen| match seen {
                Seen::Gap => gaps += 1,
                Seen::Stub { kind, sniff, offset, len } => {
                    let (uuid, timestamp) = sniffed_id(sniff, offset);
                    entries.extend(build_stub(kind, uuid, timestamp, len));
                }
                Seen::Record { record, line, cuts, offset, len } => {
                    assert!(offset + len <= bytes.len() as u64);
                    gaps += usize::from(record.kind == Kind::Unreadable);
                    entries.extend(build(&record, line, cuts, &session, offset).0);
                }
            });
        });
    }
    (entries, gaps)
}

fn user(uuid: &str, content: Value) -> String {
    json!({"parentUuid":null,"isSidechain":false,"type":"user","message":{"role":"user","content":content},"uuid":uuid,
           "timestamp":"2026-12-01T00:00:00.000Z"})
    .to_string()
}

fn text_of(entry: &Entry) -> String {
    serde_json::to_value(entry).unwrap()["content"][0]["text"].as_str().unwrap_or("?").to_owned()
}

const PIECES: [usize; 6] = [1, 3, 17, 100, 1024, 1 << 20];

/// The texts that `line` shows between two good lines, and how many lines were unreadable, in pieces of every size.
fn between(line: &[u8]) -> (Vec<String>, usize) {
    let good = |uuid| user(uuid, json!(uuid)) + "\n";
    let file = [good("before").as_bytes(), line, b"\n", good("after").as_bytes()].concat();
    let mut first = None;
    for piece in PIECES {
        let (entries, gaps) = read(&file, piece);
        let texts: Vec<String> = entries.iter().map(text_of).collect();
        assert_eq!(texts.first().map(String::as_str), Some("before"), "{:?}", String::from_utf8_lossy(line));
        assert_eq!(texts.last().map(String::as_str), Some("after"), "{:?}", String::from_utf8_lossy(line));
        let this = (texts[1..texts.len() - 1].to_vec(), gaps);
        assert_eq!(first.get_or_insert_with(|| this.clone()), &this, "pieces of {piece}");
    }
    first.unwrap()
}

#[test]
fn strange_lines_show_what_can_be_shown_and_never_hide_their_neighbours() {
    let x = user("x", json!("x"));
    let deep = |n: usize| {
        format!(r#"{{"type":"user","a":{}{},"message":{{"content":"x"}},"uuid":"x"}}"#, "[".repeat(n), "]".repeat(n))
    };
    let with =
        |content: &str| format!(r#"{{"type":"user","message":{{"content":{content}}},"uuid":"x","timestamp":"t"}}"#);
    let table: Vec<(&str, Vec<u8>, &[&str], usize)> = vec![
        ("empty", vec![], &[], 0),
        ("blanks", b" \t  ".to_vec(), &[], 0),
        ("CRLF", format!("{x}\r").into(), &["x"], 0),
        ("only CR", b"\r".to_vec(), &[], 0),
        ("line separators inside a text", with("\"a\rb\u{2028}c\u{2029}d\"").into(), &["a\rb\u{2028}c\u{2029}d"], 0),
        ("BOM", format!("\u{feff}{x}").into(), &["x"], 0),
        ("torn", x.as_bytes()[..x.len() / 2].to_vec(), &[], 1),
        ("two records", format!("{x}{}", user("y", json!("y"))).into(), &["x", "y"], 0),
        ("two records and a blank", format!("{x} {} ", user("y", json!("y"))).into(), &["x", "y"], 0),
        ("a record and a torn one", format!("{x}{}", &x[..40]).into(), &["x"], 1),
        ("a record and rubbish", format!("{x}rubbish").into(), &["x"], 1),
        ("truncated attachment", br#"{"parentUuid":"p","attachment":{"type":"queued_command","prompt":"hel"#.to_vec(), &[], 1),
        ("a NUL inside a text", with("\"a\0b\"").into(), &["a\0b"], 0),
        ("NULs before a record", [vec![0; 5000], x.clone().into_bytes()].concat(), &["x"], 1),
        ("NULs alone", vec![0; 5000], &[], 1),
        ("invalid UTF-8", [b"{\"type\":\"user\",\"message\":{\"content\":\"a\xff\xfe\xc3\"},\"uuid\":\"x\"}".to_vec()].concat(), &["a\u{fffd}\u{fffd}\u{fffd}"], 0),
        ("wide characters", with("\"größe 😀 \u{4f60}\"").into(), &["größe 😀 \u{4f60}"], 0),
        ("nested 100 deep", deep(100).into(), &["x"], 0),
        ("nested 200 deep", deep(200).into(), &["[message too large to display: ~1 KB]"], 0),
        ("nested 5000 deep", deep(5000).into(), &[], 1),
        ("deep and torn", "[".repeat(300).into(), &[], 1),
        ("numbers out of range", format!(r#"{{"n":[1e400,NaN,-Infinity,123456789012345678901234567890],{}"#, &x[1..]).into(), &["x"], 0),
        ("double keys", format!(r#"{{"uuid":"no","type":"assistant",{}"#, &x[1..]).into(), &["x"], 0),
        ("a list", b"[]".to_vec(), &[], 1),
        ("null", b"null".to_vec(), &[], 1),
        ("a number", b"5".to_vec(), &[], 1),
        ("a text", b"\"text\"".to_vec(), &[], 1),
        ("no type", b"{\"a\":1}".to_vec(), &[], 1),
        ("lone surrogates", with(r#""a\ud83d b\ude00 \ud83d\ude00""#).into(), &["a\u{fffd} b\u{fffd} 😀"], 0),
        ("missing message", br#"{"type":"user","uuid":"x"}"#.to_vec(), &[], 1),
        ("content is a text", with("\"x\"").into(), &["x"], 0),
        ("content is null", with("null").into(), &[], 1),
        ("content is a number", with("5").into(), &[], 1),
        ("content is one block", with(r#"{"type":"text","text":"x"}"#).into(), &["x"], 0),
        ("content holds bare texts", with(r#"["x"]"#).into(), &["x"], 0),
        ("content holds nonsense", with(r#"[null,5,[],{},{"type":5},{"type":"text"},{"type":"text","text":5},{"type":"text","text":"x"}]"#).into(), &["x"], 0),
        ("an unknown block", with(r#"[{"type":"hologram","data":"x"}]"#).into(), &["[hologram]"], 0),
        ("an unknown kind of line", br#"{"type":"telemetry","message":{"content":"x"}}"#.to_vec(), &[], 0),
        ("an unknown kind of line, type last", br#"{"message":{"content":"x"},"type":"telemetry"}"#.to_vec(), &[], 0),
        ("an unknown kind of line, torn", br#"{"type":"telemetry","mess"#.to_vec(), &[], 1),
        ("spaces around colons", br#" { "type" : "user" , "message" : { "content" : [ { "text" : "x" , "type" : "text" } ] } , "uuid" : "x" } "#.to_vec(), &["x"], 0),
        ("an escaped slash", with(r#""a\/b""#).into(), &["a/b"], 0),
        ("a meta prompt", br#"{"type":"user","isMeta":true,"message":{"content":"x"}}"#.to_vec(), &[], 0),
        ("a side chain", br#"{"type":"user","isSidechain":true,"message":{"content":"x"}}"#.to_vec(), &[], 0),
        ("a synthetic answer", br#"{"type":"assistant","message":{"model":"<synthetic>","content":"x"}}"#.to_vec(), &[], 0),
        ("an API error", br#"{"type":"assistant","isApiErrorMessage":true,"message":{"model":"<synthetic>","content":"x"}}"#.to_vec(), &["x"], 0),
        ("plumbing", with(r#"[{"type":"text","text":"Tool loaded."}]"#).into(), &[], 0),
        ("more plumbing", with(r#""<command-name>/x</command-name>\n <command-args></command-args>""#).into(), &[], 0),
        ("words of ours", with(r#""<chat-app box=\"1\"><a/></chat-app>""#).into(), &[], 0),
        ("words of ours among others", with(r#""Hi <chat-app feature=\"a\" value=\"b\"/>there""#).into(), &["Hi there"], 0),
        ("a tag in other letters", with(r#""x <Chat-App a=\"b\" /> <CHAT-APP>y</chat-APP> z""#).into(), &["x   z"], 0),
        ("an unfinished tag", with(r#""x <chat-app y""#).into(), &["x <chat-app y"], 0),
        ("blank words", with(r#""  \n ""#).into(), &[], 0),
    ];
    for (name, line, want, gaps) in table {
        let (texts, got) = between(&line);
        assert_eq!((texts, got), (want.iter().map(|s| (*s).to_owned()).collect(), gaps), "{name}");
    }
}

#[test]
fn a_line_that_no_person_wrote_is_a_notice() {
    let kind = |line: &str| {
        let (entries, _) = read(format!("{line}\n").as_bytes(), 100);
        serde_json::to_value(&entries[0]).unwrap()["type"].as_str().unwrap().to_owned()
    };
    let with = |more: &str| format!(r#"{{"type":"user",{more}"message":{{"content":"x"}},"uuid":"x"}}"#);
    assert_eq!(kind(&with("")), "user");
    assert_eq!(kind(&with(r#""origin":null,"#)), "user");
    assert_eq!(kind(&with(r#""origin":{"kind":"human"},"#)), "user");
    assert_eq!(kind(&with(r#""origin":{"kind":"task-notification"},"#)), "notice");
    assert_eq!(kind(&with(r#""isCompactSummary":true,"#)), "compaction");
    let older = user("x", json!("<task-notification>\n<task-id>1</task-id></task-notification>"));
    assert_eq!(kind(&older), "notice");
    let folded = |mode: &str| {
        format!(
            r#"{{"type":"attachment","attachment":{{"type":"queued_command","prompt":"x","commandMode":"{mode}"}},"uuid":"x"}}"#
        )
    };
    assert_eq!(kind(&folded("prompt")), "user");
    assert_eq!(kind(&folded("task-notification")), "notice");
    let photo = r#"{"type":"attachment","attachment":{"type":"queued_command","prompt":[{"type":"image","source":{"data":"QUJD"}}]},"uuid":"x"}"#;
    let (entries, _) = read(format!("{photo}\n").as_bytes(), 100);
    assert_eq!(text_of(&entries[0]), "[image not displayed]");
}

#[test]
fn a_bom_at_the_start_of_the_file_is_no_part_of_the_first_line() {
    for piece in PIECES {
        let (entries, gaps) = read(format!("\u{feff}{}\n", user("x", json!("x"))).as_bytes(), piece);
        assert_eq!((entries.len(), gaps), (1, 0));
    }
}

#[test]
fn a_record_glued_to_a_torn_line_is_shown_wherever_the_line_was_torn() {
    let photo = "QUJD".repeat(400);
    let lines = [
        user("t", json!([{"type":"image","source":{"type":"base64","media_type":"image/png","data":photo}},{"type":"text","text":"a \"quoted\" \\ word"}])),
        json!({"type":"api-request-blob","hash":"h","message":{"role":"user","content":[{"type":"image","source":{"data":photo}}]}}).to_string(),
        json!({"parentUuid":null,"isSidechain":false,"message":{"content":[{"type":"tool_use","id":"t","name":"n","input":{"a":[1,true,{"b":null}]}}]},"type":"assistant","uuid":"t"}).to_string(),
    ];
    let records = [user("x", json!("x")), r#"{"type":"user","message":{"content":"x"},"uuid":"x"}"#.to_owned()];
    for line in &lines {
        for record in &records {
            // The middle of a photo is like its middle.
            let at = |n: &usize| {
                !(line.find("QUJDQUJD").map_or(0, |p| p + 9)..line.rfind("QUJDQUJD").unwrap_or(0)).contains(n)
            };
            for torn in (1..line.len()).filter(at) {
                let file = format!("{}\n{}{record}\n{}\n", user("b", json!("b")), &line[..torn], user("a", json!("a")));
                for piece in [61, 1 << 20] {
                    let (entries, gaps) = read(file.as_bytes(), piece);
                    let uuids: Vec<&str> = entries.iter().map(|e| e.uuid.as_str()).collect();
                    assert_eq!(uuids, ["b", "x", "a"], "torn at {torn}: {}", &line[..torn.min(200)]);
                    assert_eq!(gaps, 1, "torn at {torn}: {}", &line[..torn.min(200)]);
                }
            }
        }
    }
}

#[test]
fn a_line_of_seventy_megabytes_is_a_stub_and_its_neighbours_are_there() {
    let words = "some long words ".repeat(64 * 1024);
    let mut scanner = Scanner::new(0);
    let mut seen = Vec::new();
    let mut push = |bytes: &[u8]| {
        scanner.push(bytes, |raw| {
            raw.each(|s| match s {
                Seen::Record { record, .. } => seen.push(record.plain_uuid().unwrap().into_owned()),
                Seen::Stub { kind, sniff, len, .. } => {
                    assert!(kind == Kind::User && len > super::LINE_BYTES_MAX);
                    seen.push(String::from_utf8(sniff.uuid.clone()).unwrap());
                }
                Seen::Gap => seen.push("gap".to_owned()),
            });
        });
    };
    push((user("before", json!("x")) + "\n" + r#"{"type":"user","message":{"content":""#).as_bytes());
    for _ in 0..70 {
        push(words.as_bytes());
    }
    push(("\"},\"uuid\":\"long\"}\n".to_owned() + &user("after", json!("x")) + "\n").as_bytes());
    assert_eq!(seen, ["before", "long", "after"]);
}

#[test]
fn base64_never_leaves_in_texts_keys_inputs_or_results_and_a_note_says_so() {
    let long = "A1b2".repeat(1000);
    let call = json!({"type":"assistant","message":{"content":[
        {"type":"tool_use","id":"t","name":"Write","input":{"data":long,"deep":[{"k":long}],long.clone():1}},
        {"type":"text","text":format!("see {long} there")},
        {"type":"thinking","thinking":long,"signature":long},
        {"type":"document","source":{"type":"base64","data":long}},
    ]},"uuid":"a"});
    let hidden = user("u", json!(format!("x {}", long))).replace("A1b2A1b2", "\\u0041\\u0031b2A1b2");
    let (entries, gaps) = read(format!("{call}\n{hidden}\n").as_bytes(), 1000);
    let text = serde_json::to_string(&entries).unwrap();
    assert_eq!((entries.len(), gaps), (2, 0));
    assert!(longest_run(text.as_bytes()) < 1024);
    let value = serde_json::to_value(&entries[0]).unwrap();
    assert_eq!(value["content"][0]["input"]["data"], "[4000 bytes of base64 not displayed]");
    assert_eq!(value["content"][1]["text"], "see [4000 bytes of base64 not displayed] there");
    assert_eq!(value["content"][3]["text"], "[document]");
}

fn longest_run(bytes: &[u8]) -> usize {
    bytes.split(|b| !(b.is_ascii_alphanumeric() || b"+/=_-".contains(b))).map(<[u8]>::len).max().unwrap_or(0)
}

/// Bytes as crashes and other writers leave them: pieces of real lines, base64, rubbish.
fn rubbish() -> impl Strategy<Value = Vec<u8>> {
    let real =
        user("r", json!([{"type":"image","source":{"data":"QUJD".repeat(500)}},{"type":"text","text":"w \\ \" ü"}]));
    let other = r#"{"type":"api-request-blob","message":{"content":[{"type":"text","text":"x"}]}}"#;
    let cut = |line: String| (0..line.len()).prop_map(move |n| line.as_bytes()[..n].to_vec());
    let part = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..60),
        "[A-Za-z0-9+/\\\\]{0,2600}".prop_map(String::into_bytes),
        r#"[\[\]{}",:\\/ntu0-9 ]{0,40}"#.prop_map(String::into_bytes),
        cut(real),
        cut(other.to_owned()),
    ];
    proptest::collection::vec(part, 0..4).prop_map(|parts| parts.concat().into_iter().filter(|b| *b != b'\n').collect())
}

#[test]
fn garbage_that_a_fuzzer_found_reads_alike_wherever_reads_divide_it() {
    for found in
        [&include_bytes!("../../tests/fixtures/fuzz/line-1")[..], include_bytes!("../../tests/fixtures/fuzz/line-2")]
    {
        let good = "\n{\"type\":\"user\",\"message\":{\"content\":\"x\"},\"uuid\":\"good\"}\n";
        let file = [found, good.as_bytes()].concat();
        let whole = read(&file, file.len());
        for piece in 1..=256 {
            assert_eq!(read(&file, piece), whole, "in pieces of {piece}");
        }
        assert_eq!(whole.0.last().map(|e| e.uuid.as_str()), Some("good"));
    }
}

#[test]
fn a_kind_that_ends_behind_the_head_of_a_line_is_judged_alike_wherever_reads_divide_it() {
    let good = "{\"type\":\"user\",\"message\":{\"content\":\"x\"},\"uuid\":\"good\"}\n";
    let file = format!("{{\"type\":\"ap{}b\",\"message\":{{\"c{{\"uuid\":}}\n{good}", "y\0".repeat(40));
    let whole = read(file.as_bytes(), file.len());
    for piece in [1, 7, 8, 63, 64, 65, 100] {
        assert_eq!(read(file.as_bytes(), piece), whole, "in pieces of {piece}");
    }
    assert_eq!(whole.0.len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn good_lines_are_shown_whatever_stands_between_them(soup in proptest::collection::vec(rubbish(), 0..6), piece in 1_usize..3000) {
        let mut file = Vec::new();
        for (n, rubbish) in soup.iter().enumerate() {
            file.extend_from_slice(rubbish);
            file.push(b'\n');
            file.extend_from_slice(user(&format!("good-{n}"), json!("x")).as_bytes());
            file.push(b'\n');
        }
        let (entries, gaps) = read(&file, piece);
        let good: Vec<&str> = entries.iter().map(|e| e.uuid.as_str()).filter(|u| u.starts_with("good-")).collect();
        let want: Vec<String> = (0..soup.len()).map(|n| format!("good-{n}")).collect();
        prop_assert_eq!(good, want);
        prop_assert_eq!((entries, gaps), read(&file, file.len().max(1)));
    }

    #[test]
    fn no_run_is_left_and_nothing_else_is_lost(line in rubbish(), piece in 1_usize..3000) {
        let mut strip = Strip::default();
        for part in line.chunks(piece) {
            strip.feed(part);
        }
        let Left::Held(out, cuts) = strip.finish() else { return Ok(()) };
        // A cut stands between what is before and behind it.
        let mut from = 0;
        let mut whole = Vec::new();
        for cut in cuts {
            let to = cut.at as usize;
            prop_assert!(longest_run(&out[from..to]) < 1024);
            whole.extend_from_slice(&out[from..to]);
            whole.extend_from_slice(&line[cut.start as usize..][..cut.len as usize]);
            from = to;
        }
        prop_assert!(longest_run(&out[from..]) < 1024);
        whole.extend_from_slice(&out[from..]);
        prop_assert_eq!(whole, line);
    }

    #[test]
    fn the_photo_that_history_names_is_the_photo_that_is_served(
        photos in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..3000), any::<bool>(), any::<bool>()), 1..6),
        escaped in any::<bool>(),
        piece in 1_usize..4000,
    ) {
        let content: Vec<Value> = photos.iter().flat_map(|(bytes, first, words)| {
            let data = base64_simd::STANDARD.encode_to_string(bytes);
            let image = if *first {
                json!({"source":{"data":data,"media_type":"image/png","type":"base64"},"type":"image"})
            } else {
                json!({"type":"image","source":{"type":"base64","data":data}})
            };
            [Some(image), words.then(|| json!({"type":"text","text":format!("\"type\":\"image\" {data}")}))].into_iter().flatten()
        }).collect();
        let mut line = user("u", json!(content));
        if escaped {
            line = line.replace('/', "\\/");
        }
        let mut strip = Strip::default();
        for part in line.as_bytes().chunks(piece) {
            strip.feed(part);
        }
        let Left::Held(out, cuts) = strip.finish() else { return Err(TestCaseError::fail("small")) };
        let record = super::record::read(out, cuts, 0).unwrap();
        let (entry, _) = build(&record, out, cuts, &SessionId::parse("s").unwrap(), 0);
        let shown = serde_json::to_string(&entry).unwrap();
        for (index, (bytes, ..)) in photos.iter().enumerate() {
            let named = shown.contains(&format!("\"s/u/{index}\""));
            prop_assert_eq!(named, !bytes.is_empty());
            let found = payload(&record, out, cuts, index);
            prop_assert_eq!(found.is_some(), named);
            if let Some((start, len)) = found {
                let mut decoder = Decoder::default();
                let mut got = Vec::new();
                for part in line.as_bytes()[start as usize..][..len as usize].chunks(piece) {
                    prop_assert!(decoder.feed(part, &mut got).is_ok());
                }
                prop_assert!(decoder.finish().is_ok());
                prop_assert_eq!(&got, bytes);
            }
        }
        prop_assert_eq!(payload(&record, out, cuts, photos.len()), None);
    }
}
