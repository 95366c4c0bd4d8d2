//! Files of transcripts as they grow, are replaced, shared and torn.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;
use crate::transcript::slug;

struct Home {
    dir: tempfile::TempDir,
    box_dir: PathBuf,
    archive: Archive,
}

fn home() -> Home {
    let dir = tempfile::tempdir().unwrap();
    let box_dir = dir.path().join("box");
    fs::create_dir(&box_dir).unwrap();
    let archive = Archive::new(dir.path(), &box_dir, Vec::new());
    let home = Home { dir, box_dir, archive };
    fs::create_dir_all(home.folder()).unwrap();
    home
}

impl Home {
    fn folder(&self) -> PathBuf {
        self.dir.path().join("projects").join(slug(self.box_dir.to_str().unwrap()))
    }

    fn file(&self, session: &str) -> PathBuf {
        self.folder().join(format!("{session}.jsonl"))
    }

    fn put(&self, session: &str, bytes: &[u8]) -> SessionId {
        fs::write(self.file(session), bytes).unwrap();
        id(session)
    }

    fn append(&self, session: &str, bytes: &[u8]) {
        OpenOptions::new().append(true).create(true).open(self.file(session)).unwrap().write_all(bytes).unwrap();
    }

    fn tail(&self, session: &str, tail: usize) -> Value {
        let page = self.archive.history(&id(session), Window::Tail { tail, min_real_user_messages: 0 }).unwrap();
        serde_json::to_value(page).unwrap()
    }

    fn page(&self, session: &str, offset: u64, limit: usize) -> Value {
        serde_json::to_value(self.archive.history(&id(session), Window::Page { offset, limit }).unwrap()).unwrap()
    }

    fn bytes(&self, reference: &str) -> Result<Vec<u8>> {
        let file = self.archive.media(&MediaRef::parse(reference).unwrap())?;
        let mut bytes = Vec::new();
        file.open(0, file.len)?.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, file.len);
        Ok(bytes)
    }
}

fn id(text: &str) -> SessionId {
    SessionId::parse(text).unwrap()
}

fn user(uuid: &str, content: Value) -> String {
    json!({"parentUuid":null,"isSidechain":false,"type":"user","message":{"role":"user","content":content},"uuid":uuid,
           "timestamp":"2026-12-01T00:00:00.000Z","cwd":"/elsewhere"})
    .to_string()
}

fn assistant(uuid: &str, text: &str) -> String {
    json!({"parentUuid":null,"isSidechain":false,"message":{"role":"assistant","content":[{"type":"text","text":text}]},
           "type":"assistant","uuid":uuid,"timestamp":"2026-12-01T00:00:00.000Z"})
    .to_string()
}

fn image(data: &str) -> Value {
    json!({"type":"image","source":{"type":"base64","media_type":"image/png","data":data}})
}

fn uuids(page: &Value) -> Vec<&str> {
    page["entries"].as_array().unwrap().iter().map(|e| e["uuid"].as_str().unwrap()).collect()
}

/// An encoder and a decoder that share nothing with the code under test.
fn encode(bytes: &[u8]) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for three in bytes.chunks(3) {
        let n = three.iter().fold(0_u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let letter = LETTERS[(n >> (18 - 6 * i) & 63) as usize] as char;
            out.push(if i <= three.len() { letter } else { '=' });
        }
    }
    out
}

fn decode(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let (mut n, mut bits) = (0_u32, 0);
    for b in text.bytes().filter(|b| *b != b'=') {
        let value = match b {
            b'A'..=b'Z' => b - b'A',
            b'a'..=b'z' => b - b'a' + 26,
            b'0'..=b'9' => b - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        n = n << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push((n >> bits) as u8);
        }
    }
    out
}

fn noise(len: usize, mut seed: u64) -> Vec<u8> {
    (0..len)
        .map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 56) as u8
        })
        .collect()
}

fn longest_run(text: &str) -> usize {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || "+/=_-".contains(c))).map(str::len).max().unwrap_or(0)
}

fn fixtures() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/transcripts");
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .map(|p| (p.file_stem().unwrap().to_str().unwrap().to_owned(), fs::read(p).unwrap()))
        .collect();
    all.sort();
    assert_eq!(all.len(), 10);
    all
}

#[test]
fn every_photo_of_the_real_transcripts_comes_back_byte_for_byte() {
    let home = home();
    let mut photos = 0;
    for (name, bytes) in fixtures() {
        home.put(&name, &bytes);
        let page = home.tail(&name, 5000);
        let text = page.to_string();
        assert!(longest_run(&text) < 1024, "{name}");
        assert_eq!(page["skippedLines"], 0, "{name}");
        assert_eq!(page["total"], uuids(&page).len() as u64, "{name}");
        for line in bytes.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
            let line: Value = serde_json::from_slice(line).unwrap();
            // `api-request-blob` lines repeat the whole request.
            let Some(blocks) = line["message"]["content"].as_array().filter(|_| line["type"] == "user") else {
                continue;
            };
            for (index, block) in blocks.iter().filter(|b| b["type"] == "image").enumerate() {
                let reference = format!("{name}/{}/{index}", line["uuid"].as_str().unwrap());
                assert!(text.contains(&format!("\"imageRef\":\"{reference}\"")), "{reference}");
                let want = decode(block["source"]["data"].as_str().unwrap());
                assert_eq!(home.bytes(&reference).unwrap(), want, "{reference}");
                let file = home.archive.media(&MediaRef::parse(&reference).unwrap()).unwrap();
                assert_eq!(file.mime, block["source"]["media_type"].as_str().unwrap());
                for (start, len) in [(0, 1), (1, 7), (2, 100_000), (want.len() as u64 - 1, 1), (5, 0)] {
                    let mut part = Vec::new();
                    file.open(start, len).unwrap().read_to_end(&mut part).unwrap();
                    assert_eq!(part, want[start as usize..(start + len) as usize], "{reference} {start}+{len}");
                }
                assert_eq!(file.open(want.len() as u64, 1).err().unwrap().code(), Code::BadRange);
                photos += 1;
            }
        }
        assert_eq!(home.bytes(&format!("{name}/{}/0", uuids(&page)[0])).is_ok(), text.contains("imageRef"), "{name}");
    }
    assert_eq!(photos, 3);
}

#[test]
fn the_real_transcripts_show_what_was_said_and_nothing_else() {
    let home = home();
    for (name, bytes) in fixtures() {
        home.put(&name, &bytes);
    }
    let kinds = |name: &str| -> Vec<String> {
        home.tail(name, 5000)["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|e| e["type"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(kinds("queued_during_tool"), ["user", "assistant", "user", "assistant"]);
    let text = home.tail("queued_during_tool", 200).to_string();
    assert_eq!(text.matches("second, sent while the tool runs").count(), 1);
    assert_eq!(kinds("interrupt_in_tool"), ["user", "assistant", "assistant", "interrupted", "user", "assistant"]);
    assert_eq!(kinds("background_bash"), ["user", "assistant", "assistant", "notice", "assistant"]);
    assert_eq!(kinds("two_png1m_jpg200k"), ["user", "assistant", "user", "assistant"]);
    assert_eq!(kinds("one_text_turn"), ["user", "assistant"]);

    let tools = home.tail("tools", 5000);
    let calls: Vec<&Value> = tools["entries"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|e| e["content"].as_array().unwrap())
        .filter(|b| b["type"] == "tool_use")
        .collect();
    assert_eq!(calls.len(), 10);
    let results: Vec<&str> = calls.iter().map(|c| c["resultSummary"].as_str().unwrap()).collect();
    assert_eq!(results[0], "hi\nerr");
    assert_eq!(results[2], "[image not displayed]");
    assert_eq!((results[8], results[9]), ("p1", "p2"));
    assert_eq!(calls[0]["inputSummary"], "echo hi; echo err >&2");
    assert_eq!(tools["entries"][1]["content"][0]["type"], "thinking");
}

#[test]
fn a_page_at_a_time_gives_the_whole_in_both_directions() {
    let home = home();
    let mut text = String::new();
    for n in 0..2500 {
        text += &user(&format!("u{n}"), json!(format!("question {n}")));
        text += "\n{\"type\":\"mode\",\"mode\":\"x\"}\n";
        text += &json!({"type":"assistant","message":{"content":[{"type":"tool_use","id":format!("t{n}"),"name":"Bash","input":{"command":"ls"}}]},"uuid":format!("a{n}")}).to_string();
        text += "\n";
        text += &user(
            &format!("r{n}"),
            json!([{"type":"tool_result","tool_use_id":format!("t{n}"),"content":format!("result {n}")}]),
        );
        text += "\n";
    }
    home.put("s", text.as_bytes());
    let whole = home.page("s", 0, 5000);
    assert_eq!((whole["total"].as_u64(), whole["hasMore"].as_bool()), (Some(5000), Some(false)));
    let all = whole["entries"].as_array().unwrap();
    assert_eq!(all.len(), 5000);
    for n in 0..2500 {
        assert_eq!(all[2 * n + 1]["content"][0]["resultSummary"], format!("result {n}"));
    }
    assert_eq!(home.tail("s", 5000)["entries"], whole["entries"]);
    for limit in [1, 7, 333, 1024, 2049] {
        let (mut offset, mut got) = (0, Vec::new());
        loop {
            let page = home.page("s", offset, limit);
            got.extend(page["entries"].as_array().unwrap().clone());
            offset += limit as u64;
            if !page["hasMore"].as_bool().unwrap() || (limit == 1 && offset == 50) {
                break;
            }
        }
        assert_eq!(got[..], all[..got.len()], "pages of {limit}");
    }
    let tail = home.tail("s", 3);
    assert_eq!(
        (uuids(&tail), tail["offset"].as_u64(), tail["hasMore"].as_bool()),
        (vec!["a2498", "u2499", "a2499"], Some(4997), Some(true))
    );
    let more = home.archive.history(&id("s"), Window::Tail { tail: 1, min_real_user_messages: 2 }).unwrap();
    assert_eq!(more.entries.len(), 4);
    assert_eq!(home.page("s", 5000, 10)["entries"], json!([]));
}

#[test]
fn a_half_line_is_held_back_and_shown_once_when_it_is_whole() {
    let home = home();
    let (one, two) = (user("u1", json!("one")), assistant("a1", "two"));
    home.put("s", format!("{one}\n{}", &two[..40]).as_bytes());
    for _ in 0..2 {
        assert_eq!(uuids(&home.tail("s", 10)), ["u1"]);
    }
    home.append("s", &two.as_bytes()[40..80]);
    assert_eq!(uuids(&home.tail("s", 10)), ["u1"]);
    home.append("s", &two.as_bytes()[80..]);
    assert_eq!(uuids(&home.tail("s", 10)), ["u1"]);
    home.append("s", b"\n");
    for _ in 0..2 {
        let page = home.tail("s", 10);
        assert_eq!((uuids(&page), page["skippedLines"].as_u64()), (vec!["u1", "a1"], Some(0)));
    }
}

#[test]
fn a_replaced_or_shortened_file_is_read_anew() {
    let home = home();
    home.put("s", format!("{}\n{}\n", user("u1", json!("one")), assistant("a1", "two")).as_bytes());
    assert_eq!(uuids(&home.tail("s", 10)), ["u1", "a1"]);
    home.put("s", format!("{}\n", user("u2", json!("short"))).as_bytes());
    assert_eq!(uuids(&home.tail("s", 10)), ["u2"]);
    // As long as before and longer, in place: only the bytes tell.
    home.put("s", format!("{}\n{}\n", user("u3", json!("short")), assistant("a3", "x")).as_bytes());
    assert_eq!(uuids(&home.tail("s", 10)), ["u3", "a3"]);
    let other = home.folder().join("other");
    fs::write(&other, format!("{}\n{}\n{}\n", user("u4", json!("a")), assistant("a4", "x"), assistant("a5", "y")))
        .unwrap();
    fs::rename(&other, home.file("s")).unwrap();
    assert_eq!(uuids(&home.tail("s", 10)), ["u4", "a4", "a5"]);
    fs::remove_file(home.file("s")).unwrap();
    assert_eq!(home.tail("s", 10), json!({"entries":[],"total":0,"offset":0,"hasMore":false,"skippedLines":0}));
}

#[test]
fn an_unreadable_transcript_is_an_error_never_an_empty_conversation() {
    let home = home();
    fs::create_dir(home.file("s")).unwrap();
    std::os::unix::fs::symlink(home.file("loop"), home.file("loop")).unwrap();
    for session in ["s", "loop"] {
        assert!(home.archive.path_of(&id(session)).is_some());
        let window = Window::Page { offset: 0, limit: 10 };
        assert_eq!(home.archive.history(&id(session), window).unwrap_err().code(), Code::Unreadable);
        let photo = MediaRef::parse(&format!("{session}/u/0")).unwrap();
        assert_eq!(home.archive.media(&photo).unwrap_err().code(), Code::Unreadable);
        assert_eq!(
            home.archive.look_up(&id(session), Sought { ids: &["u"], anchor: None }).unwrap_err().code(),
            Code::Unreadable
        );
        assert!(!home.archive.watch(&id(session)).has_all(&["u"]));
    }
    assert!(home.archive.path_of(&id("none")).is_none());
    assert!(home.archive.list(10).is_empty());
}

#[test]
fn an_answer_stops_at_four_mebibytes_with_whole_entries() {
    let home = home();
    let words = "word and more ".repeat(15_000);
    let text: String = (0..40).map(|n| user(&format!("u{n}"), json!(words)) + "\n").collect();
    home.put("s", text.as_bytes());
    let tail = home.tail("s", 200);
    let got = uuids(&tail);
    assert!(tail.to_string().len() <= 4 * 1024 * 1024 + 200 && got.len() >= 18, "{}", got.len());
    assert_eq!((got.last(), tail["total"].as_u64()), (Some(&"u39"), Some(40)));
    assert_eq!(tail["offset"].as_u64().unwrap(), 40 - got.len() as u64);
    let page = home.page("s", 2, 200);
    assert_eq!((uuids(&page)[0], page["hasMore"].as_bool()), ("u2", Some(true)));
    assert_eq!(uuids(&page).len(), got.len());
}

#[test]
fn a_very_long_line_is_a_stub_with_its_own_id_and_time() {
    let home = home();
    let words = "long words ".repeat(40_000);
    let result = json!([{"type":"tool_result","content":words,"tool_use_id":"t1"}]);
    let call = json!({"type":"assistant","message":{"content":[{"type":"tool_use","id":"t1","name":"Read","input":{}}]},"uuid":"a1"});
    let deep = format!(
        r#"{{"type":"user","message":{{"content":{}{}}},"uuid":"u3","timestamp":"now"}}"#,
        "[".repeat(200),
        "]".repeat(200)
    );
    let text = [user("u1", json!(words)), call.to_string(), user("r1", result), deep, user("u2", json!("short"))]
        .join("\n")
        + "\n";
    home.put("s", text.as_bytes());
    let page = home.tail("s", 10);
    assert_eq!(uuids(&page), ["u1", "a1", "u3", "u2"]);
    assert_eq!(
        page["entries"][0]["content"],
        json!([{"type":"text","text":"[message too large to display: ~430 KB]"}])
    );
    assert_eq!(page["entries"][0]["timestamp"], "2026-12-01T00:00:00.000Z");
    assert_eq!(page["entries"][1]["content"][0]["resultSummary"], words[..500]);
    assert_eq!(page["entries"][2]["timestamp"], "now");
    assert_eq!(page["skippedLines"], 0);
}

#[test]
fn a_photo_is_found_by_its_number_and_odd_payloads_are_not_there() {
    let home = home();
    let png = [b"\x89PNG\r\n\x1a\n".to_vec(), noise(100_000, 7)].concat();
    let good = encode(&png);
    let tiny = encode(b"x");
    let content = json!([
        {"type":"text","text":format!("not a photo: {}", json!(image(&tiny)))},
        image(""), image(&good), {"type":"image","source":{"type":"url","url":"https://example.org/a.png"}},
        image(&tiny), image("QUJ"), image("QU_-"), image("QUJD QUJD"), image("QUI=QUJD"), {"type":"image"}, image(&good)
    ]);
    let line = user("u1", content);
    // The same payload with every slash escaped, as some writers do.
    let escaped = user("u2", json!([image(&good)])).replace('/', "\\/");
    let spaced = user("u3", json!([])).replace(
        r#""content":[]"#,
        &format!(r#""content" : [ {{ "source" : {{ "data" : "{good}" , "type" : "base64" }} , "type" : "image" }} ]"#),
    );
    let nameless = format!(r#"{{"type":"user","message":{{"content":[{}]}}}}"#, image(&good));
    home.put("s", [line.as_str(), &escaped, &spaced, &nameless, ""].join("\n").as_bytes());
    let page = home.tail("s", 10);
    let blocks = page["entries"][0]["content"].as_array().unwrap();
    assert_eq!(blocks[0]["text"], format!("not a photo: {}", json!(image(&tiny))));
    assert_eq!(blocks[1], json!({"type":"text","text":"[image not displayed]"}));
    assert_eq!(blocks[2], json!({"type":"image","mediaType":"image/png","imageRef":"s/u1/1"}));
    assert_eq!(blocks[3], json!({"type":"image","imageUrl":"https://example.org/a.png"}));
    let at = page["entries"][3]["uuid"].as_str().unwrap().to_owned();
    assert!(at.starts_with("at-"));
    for reference in ["s/u1/1", "s/u1/9", "s/u2/0", "s/u3/0", &format!("s/{at}/0")] {
        assert!(page.to_string().contains(&format!("\"{reference}\"")), "{reference}");
        assert_eq!(home.bytes(reference).unwrap(), png, "{reference}");
    }
    let file = home.archive.media(&MediaRef::parse("s/u2/0").unwrap()).unwrap();
    let mut part = Vec::new();
    file.open(50_001, 1000).unwrap().read_to_end(&mut part).unwrap();
    assert_eq!(part, png[50_001..51_001]);
    assert_eq!(home.bytes("s/u1/3").unwrap(), b"x");
    for missing in [
        "s/u1/0", "s/u1/2", "s/u1/4", "s/u1/5", "s/u1/6", "s/u1/7", "s/u1/8", "s/u1/10", "s/u9/0", "s/at-1/0",
        "t/u1/0", "s/u2/1",
    ] {
        assert_eq!(home.bytes(missing).unwrap_err().code(), Code::NotFound, "{missing}");
    }
    for malformed in
        ["", "s", "s/u1", "s/u1/", "s/u1/-1", "s/u1/01", "s/u1/1/2", "s/u.1/0", "../u1/0", "s/u1/99999999999"]
    {
        assert_eq!(MediaRef::parse(malformed), None, "{malformed}");
    }
}

#[test]
fn a_turn_is_looked_up_in_whole_parsed_lines() {
    let home = home();
    let call = json!({"type":"assistant","message":{"content":[{"type":"tool_use","id":"t","name":"x","input":{}}]},"uuid":"a2"}).to_string();
    let result = user("r1", json!([{"type":"tool_result","tool_use_id":"t","content":"ok"}]));
    let merged = r#"{"type":"user","message":{"content":"m"},"uuid":"u2","mergedSendUuids":["m1","m2"]}"#;
    let folded =
        r#"{"type":"attachment","attachment":{"type":"queued_command","prompt":"p","source_uuid":"q1"},"uuid":"x1"}"#;
    let marker = user("i1", json!([{"type":"text","text":"[Request interrupted by user]"}]));
    let begun = json!({"type":"assistant","message":{"stop_reason":"tool_use","content":[{"type":"text","text":"let me see"}]},"uuid":"a3"}).to_string();
    let thought =
        json!({"type":"assistant","message":{"content":[{"type":"thinking","thinking":"hm"}]},"uuid":"a4"}).to_string();
    let u1 = user("u1", json!("the words u7 and \"uuid\":\"u8\""));
    let said = assistant("a1", "done");
    let found = |finished| Trace::Recorded { finished, elsewhere: None };
    let look_up = |session: &str, ids: &[&str]| {
        home.archive.remember(&id(session), None);
        home.archive.look_up(&id(session), Sought { ids, anchor: None })
    };
    let table: Vec<(Vec<&str>, &str, Trace)> = vec![
        (vec![], "u1", Trace::NotRecorded { anchored: true }),
        (vec![&u1], "u1", found(false)),
        (vec![&u1], "u7", Trace::NotRecorded { anchored: true }),
        (vec![&u1], "u8", Trace::NotRecorded { anchored: true }),
        (vec![&u1, &said], "u1", found(true)),
        (vec![&u1, &thought], "u1", found(false)),
        (vec![&u1, &begun], "u1", found(false)),
        (vec![&u1, &begun, &call], "u1", found(false)),
        (vec![&u1, &call, &result], "u1", found(false)),
        (vec![&u1, &call, &result, &said], "u1", found(true)),
        (vec![&u1, &call, &marker], "u1", found(true)),
        (vec![&u1, &said, folded], "u1", found(false)),
        (vec![&u1, &call, merged], "u1", found(true)),
        (vec![merged, &said], "m2", found(true)),
        (vec![folded, &said], "q1", found(true)),
        (vec![&said, merged], "u1", Trace::NotRecorded { anchored: true }),
    ];
    for (n, (lines, wanted, want)) in table.into_iter().enumerate() {
        let name = format!("s{n}");
        home.put(&name, (lines.join("\n") + "\n").as_bytes());
        assert_eq!(look_up(&name, &["nope", wanted]).unwrap(), want, "case {n}");
    }
    assert_eq!(look_up("none", &["u1"]).unwrap(), Trace::NoFile);
    home.put("torn", &u1.as_bytes()[..u1.len() - 2]);
    assert_eq!(look_up("torn", &["u1"]).unwrap(), Trace::NotRecorded { anchored: true });
}

#[test]
fn a_watch_sees_whole_lines_that_are_appended_even_to_a_file_that_was_not_there() {
    let home = home();
    let mut watch = home.archive.watch(&id("s"));
    assert!(!watch.has_all(&["u1"]));
    let line = user("u1", json!("words"));
    home.append("s", &line.as_bytes()[..50]);
    assert!(!watch.has_all(&["u1"]));
    home.append("s", &line.as_bytes()[50..]);
    assert!(!watch.has_all(&["u1"]));
    home.append("s", b"\n");
    assert!(watch.has_all(&["u1"]) && !watch.has_all(&["u1", "a1"]));

    let mut later = home.archive.watch(&id("s"));
    home.append("s", format!("{}\n", assistant("a1", "u9")).as_bytes());
    assert!(watch.has_all(&["u1", "a1"]));
    assert!(later.has_all(&["a1"]) && !later.has_all(&["u1"]) && !later.has_all(&["u9"]));
    assert!(watch.has_all(&[]));
}

#[test]
fn conversations_are_listed_newest_first_with_the_first_words_of_a_person() {
    let home = home();
    let tagged = r#"<typed user="Ann &amp; Co" user-email="ann@x.org">hello   <b>there</b></typed>"#;
    home.put("one", format!("{{\"type\":\"summary\",\"summary\":\"x\"}}\n{}\n", user("u", json!(tagged))).as_bytes());
    home.put(
        "two",
        format!("{}\n", user("u", json!([image(&encode(&noise(2_000_000, 3))), {"type":"text","text":"a photo"}])))
            .as_bytes(),
    );
    home.put("three", b"");
    fs::write(home.folder().join("not.a.session.jsonl"), "x").unwrap();
    for (n, name) in ["one", "two", "three"].iter().enumerate() {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1000 + n as u64);
        OpenOptions::new().append(true).open(home.file(name)).unwrap().set_modified(time).unwrap();
    }
    let rows = home.archive.list(10);
    let got: Vec<_> = rows.iter().map(|r| (r.session.as_str(), r.label.as_deref(), r.last_used_ms)).collect();
    assert_eq!(
        got,
        [("three", None, 1_002_000), ("two", Some("a photo"), 1_001_000), ("one", Some("hello there"), 1_000_000)]
    );
    assert_eq!(home.archive.list(1).len(), 1);
    let page = home.tail("one", 1);
    assert_eq!(
        (page["entries"][0]["user"].as_str(), page["entries"][0]["userEmail"].as_str()),
        (Some("Ann & Co"), Some("ann@x.org"))
    );
}

#[test]
fn the_transcript_of_another_box_with_the_same_slug_is_not_ours() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (dir.path().join("a-b"), dir.path().join("a/b"));
    fs::create_dir_all(&ours).unwrap();
    fs::create_dir_all(&theirs).unwrap();
    let archive = Archive::new(dir.path(), &ours, Vec::new());
    let folder = dir.path().join("projects").join(slug(ours.to_str().unwrap()));
    fs::create_dir_all(&folder).unwrap();
    for (name, cwd) in [("mine", &ours), ("yours", &theirs)] {
        let line = user("u", json!("x")).replace("/elsewhere", cwd.to_str().unwrap());
        fs::write(folder.join(format!("{name}.jsonl")), line + "\n").unwrap();
    }
    assert!(archive.path_of(&id("mine")).is_some() && archive.path_of(&id("yours")).is_none());
    assert_eq!(archive.list(10).len(), 1);
}

#[test]
fn a_long_slug_that_the_agent_cut_is_found_by_file_name() {
    let dir = tempfile::tempdir().unwrap();
    let box_dir = dir.path().join("x".repeat(120)).join("y".repeat(120));
    fs::create_dir_all(&box_dir).unwrap();
    let cut = format!("{}-abc123", &slug(box_dir.to_str().unwrap())[..200]);
    let folder = dir.path().join("projects").join(cut);
    fs::create_dir_all(&folder).unwrap();
    let line = user("u", json!("x")).replace("/elsewhere", box_dir.to_str().unwrap());
    fs::write(folder.join("s.jsonl"), line + "\n").unwrap();
    fs::write(folder.join("t.jsonl"), user("u", json!("x")) + "\n").unwrap();
    let archive = Archive::new(dir.path(), &box_dir, Vec::new());
    assert!(archive.path_of(&id("s")).is_some() && archive.path_of(&id("t")).is_none());
    assert_eq!(archive.list(10).len(), 1);
}

#[test]
fn many_readers_of_a_growing_file_see_whole_lines_in_order() {
    let home = home();
    home.put("s", b"");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut last = 0;
                for _ in 0..200 {
                    let page = home.tail("s", 5000);
                    let total = page["total"].as_u64().unwrap();
                    assert!(total >= last && page["skippedLines"] == 0);
                    assert_eq!(uuids(&page), (0..total).map(|n| format!("u{n}")).collect::<Vec<_>>());
                    last = total;
                }
            });
        }
        for n in 0..300 {
            let line = user(&format!("u{n}"), json!(format!("words {n}"))) + "\n";
            home.append("s", &line.as_bytes()[..30]);
            home.append("s", &line.as_bytes()[30..]);
        }
    });
    assert_eq!(home.tail("s", 5000)["total"], 300);
}

#[test]
fn a_record_glued_to_a_very_long_torn_line_is_shown() {
    let home = home();
    let words = "long words ".repeat(60_000);
    let torn = user("t", json!(words));
    let text = format!(
        "{}\n{}{}\n{}\n",
        user("u1", json!("a")),
        &torn[..500_000],
        user("u2", json!("b")),
        user("u3", json!("c"))
    );
    home.put("s", text.as_bytes());
    let page = home.tail("s", 10);
    assert_eq!((uuids(&page), page["skippedLines"].as_u64()), (vec!["u1", "u2", "u3"], Some(1)));
}

#[test]
fn an_index_past_its_bound_goes_sparse_and_every_page_and_photo_is_still_right() {
    let home = home();
    let count = 320_000_u64;
    let mut text = String::new();
    for n in 0..count {
        let photo = if n % 50_000 == 7 { r#"{"type":"image","source":{"data":"QUJD"}},"# } else { "" };
        text += &format!("{{\"type\":\"user\",\"message\":{{\"content\":[{photo}\"{n}\"]}},\"uuid\":\"u{n}\"}}\n");
        if n % 1000 == 500 {
            // The second of two with one id does not count.
            text += &format!("{{\"type\":\"user\",\"message\":{{\"content\":\"double\"}},\"uuid\":\"u{n}\"}}\n");
        }
    }
    home.put("s", text.as_bytes());
    let (lines, bytes) = {
        home.tail("s", 1);
        home.archive.index_size(&id("s")).unwrap()
    };
    assert!(lines == count && bytes <= crate::transcript::index::INDEX_BYTES_MAX, "{lines} {bytes}");
    for offset in [0, 499, 1023, 99_990, 160_000, 200_501, count - 300, count - 3] {
        let page = home.page("s", offset, 7);
        let want: Vec<String> = (offset..count.min(offset + 7)).map(|n| format!("u{n}")).collect();
        assert_eq!(
            (uuids(&page), page["total"].as_u64(), page["offset"].as_u64()),
            (want.iter().map(String::as_str).collect(), Some(count), Some(offset))
        );
        assert_eq!(page["hasMore"].as_bool(), Some(offset + 7 < count));
    }
    for n in [7, 100_007, 300_007] {
        assert_eq!(home.bytes(&format!("s/u{n}/0")).unwrap(), b"ABC", "{n}");
    }
    let at = text.find("\"u50007\"").unwrap();
    let at = text[..at].rfind('\n').unwrap() + 1;
    // A record with an id is not found by its place.
    assert!(home.bytes(&format!("s/at-{at}/0")).is_err());
    assert_eq!(home.bytes("s/u8/0").unwrap_err().code(), Code::NotFound);
    assert_eq!(home.bytes("s/nobody/0").unwrap_err().code(), Code::NotFound);
}
