//! Transcripts that the real agent wrote, laid into a box: history and every photo over the port.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Server, entry_text};

fn fixtures() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/transcripts");
    let mut all: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .flatten()
        .map(|f| f.path())
        .filter(|p| p.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    all.sort();
    assert_eq!(all.len(), 10);
    all
}

/// Lays a transcript into the box under its own session id.
fn lay(server: &Server, fixture: &Path) -> (String, Vec<Value>) {
    let text = std::fs::read_to_string(fixture).unwrap();
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let session = lines.iter().find_map(|l| l["sessionId"].as_str()).unwrap().to_owned();
    let slug: String = server
        .box_dir()
        .canonicalize()
        .unwrap()
        .to_str()
        .unwrap()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let dir = server.agent_home().join("projects").join(slug);
    std::fs::create_dir_all(&dir).unwrap();
    // The lines' cwd is the truth about whose they are.
    let here = server.box_dir().canonicalize().unwrap();
    let text = text.replace("\"cwd\":\"/srv/box\"", &format!("\"cwd\":{}", serde_json::json!(here)));
    std::fs::write(dir.join(format!("{session}.jsonl")), text).unwrap();
    (session, lines)
}

/// The photos of a line's message, decoded by other code than the server's.
fn photos(line: &Value) -> Vec<Vec<u8>> {
    let blocks = line["message"]["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    blocks.iter().filter(|b| b["type"] == "image").map(|b| decode(b["source"]["data"].as_str().unwrap())).collect()
}

/// Base64 by the book, bit by bit.
fn decode(text: &str) -> Vec<u8> {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut held, mut out) = (0u32, 0, Vec::new());
    for letter in text.bytes().filter(|b| *b != b'=') {
        let value = LETTERS.iter().position(|l| *l == letter).unwrap() as u32;
        bits = bits << 6 | value;
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
        }
    }
    out
}

#[test]
fn real_transcripts_are_listed_and_read_with_every_photo_byte_for_byte() {
    let server = Server::new();
    let mut all_photos = 0;
    for fixture in fixtures() {
        let name = fixture.file_stem().unwrap().to_string_lossy().into_owned();
        let (session, lines) = lay(&server, &fixture);
        let history = server.history(&session);
        let text = history.to_string();
        let entries = history["entries"].as_array().unwrap();
        assert_eq!(history["total"], entries.len(), "{name}: total is exact");
        assert_eq!(history["skippedLines"], 0, "{name}");
        let meta = entries.iter().filter(|e| e["type"] == "user" && entry_text(e).contains("[Image: source:"));
        assert_eq!(meta.count(), 0, "{name}: a meta line shows");
        assert!(!has_long_base64(&text), "{name}: base64 left the server");
        for line in lines.iter().filter(|l| l["type"] == "user" && l["isMeta"] != true) {
            for (index, photo) in photos(line).iter().enumerate() {
                let reference = format!("{session}/{}/{index}", line["uuid"].as_str().unwrap());
                assert!(text.contains(&reference), "{name}: {reference} is not minted");
                let answer = server.get(&format!("/api/session-media/{reference}"));
                assert_eq!(answer.status, 200, "{name}: {reference}: {}", answer.text());
                assert!(answer.body == *photo, "{name}: {reference} differs");
                all_photos += 1;
            }
        }
    }
    assert_eq!(all_photos, 3, "the fixtures hold three photos in people's words");
    let listed = server.get_json("/api/chat/sessions");
    assert_eq!(listed["sessions"].as_array().unwrap().len(), 10, "conversations like any other: {listed}");
}

fn has_long_base64(text: &str) -> bool {
    let mut run = 0;
    text.bytes().any(|b| {
        run = if b.is_ascii_alphanumeric() || b == b'+' || b == b'/' || b == b'=' { run + 1 } else { 0 };
        run >= 1024
    })
}

#[test]
fn a_message_that_exists_only_as_a_queued_command_shows_once() {
    let server = Server::new();
    let fixture = fixtures().into_iter().find(|f| f.ends_with("queued_during_tool.jsonl")).unwrap();
    let (session, lines) = lay(&server, &fixture);
    let queued = lines.iter().find(|l| l["attachment"]["type"] == "queued_command").expect("the fixture has one");
    let prompt = &queued["attachment"]["prompt"];
    let words = prompt.as_str().map_or_else(|| prompt[0]["text"].as_str().unwrap().to_owned(), str::to_owned);
    let history = server.history(&session);
    let shown: Vec<_> = history["entries"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["type"] == "user" && entry_text(e).contains(&words))
        .collect();
    assert_eq!(shown.len(), 1, "{words:?} in {history}");
}

#[test]
fn a_transcript_the_server_never_saw_can_be_resumed() {
    let server = Server::new();
    let fixture = fixtures().into_iter().find(|f| f.ends_with("one_text_turn.jsonl")).unwrap();
    let (session, _) = lay(&server, &fixture);
    let before = server.history(&session)["total"].as_u64().unwrap();
    let (accepted, end) = server.converse(&session, "and on");
    assert_eq!((accepted.session_id.as_str(), end.event.as_str()), (session.as_str(), "chat-complete"));
    assert_eq!(server.history(&session)["total"].as_u64().unwrap(), before + 2);
}

#[test]
fn a_conversation_whose_transcript_is_gone_is_410_before_acceptance() {
    let server = Server::new();
    let (first, _) = server.converse("main", "here");
    server.control("stop", &first.session_id);
    server.wait_phase(&first.session_id, "idle");
    std::fs::remove_file(server.transcript(&first.session_id).unwrap()).unwrap();
    let refused = server.try_send(&first.session_id, "more", None, &[]).unwrap_err();
    assert_eq!((refused.status, refused.code().as_str()), (410, "session_gone"));
    assert_eq!(server.bootstrap(&first.session_id)["kind"], "unavailable");
}

#[test]
fn media_answers_as_a_browser_needs_them() {
    let server = Server::new();
    let fixture = fixtures().into_iter().find(|f| f.ends_with("one_png_200k.jsonl")).unwrap();
    let (session, lines) = lay(&server, &fixture);
    let line = lines.iter().find(|l| !photos(l).is_empty() && l["type"] == "user").unwrap();
    let photo = &photos(line)[0];
    let path = format!("/api/session-media/{session}/{}/0", line["uuid"].as_str().unwrap());
    let ask = |head: &str, method: &str| {
        let host = server.addr();
        let raw = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{head}Connection: close\r\n\r\n");
        let answer = server.client().raw(raw.as_bytes()).unwrap();
        let split = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
        (String::from_utf8_lossy(&answer[..split]).to_lowercase(), answer[split + 4..].to_vec())
    };
    let (head, body) = ask("", "GET");
    assert!(head.starts_with("http/1.1 200"), "{head}");
    for field in [
        format!("content-length: {}", photo.len()),
        "content-type: image/png".into(),
        "cache-control: private, max-age=31536000, immutable".into(),
        "x-content-type-options: nosniff".into(),
        "content-disposition: inline".into(),
    ] {
        assert!(head.contains(&field), "{field} in {head}");
    }
    assert!(body == *photo);
    let etag = head.lines().find_map(|l| l.strip_prefix("etag: ")).unwrap().to_owned();
    let (head, body) = ask(&format!("If-None-Match: {etag}\r\n"), "GET");
    assert!(head.starts_with("http/1.1 304") && body.is_empty(), "{head}");
    let (head, body) = ask("", "HEAD");
    assert!(head.contains(&format!("content-length: {}", photo.len())) && body.is_empty(), "{head}");
    let (head, body) = ask("Range: bytes=10-19\r\n", "GET");
    assert!(head.starts_with("http/1.1 206") && body == photo[10..20], "{head}");
    assert!(head.contains(&format!("content-range: bytes 10-19/{}", photo.len())), "{head}");
    let (head, _) = ask("Range: bytes=99999999-\r\n", "GET");
    assert!(
        head.starts_with("http/1.1 416") && head.contains(&format!("content-range: bytes */{}", photo.len())),
        "{head}"
    );
}
