//! What bad input gets, on every route: the right status, a code word, the field's name, and no change of state.

use beebox_chatd::error::Code;
use serde_json::{Value, json};

use crate::support::{Options, Server};

#[track_caller]
fn refused(answer: &beebox_chatd::load::client::Answer, status: u16, code: &str, names: &str) {
    let text = answer.text();
    assert_eq!(answer.status, status, "{text}");
    let body: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(body["code"], code, "{text}");
    assert!(body["error"].as_str().unwrap().contains(names), "{text} names no {names:?}");
}

#[test]
fn every_route_refuses_a_wrong_method_and_unknown_paths_are_404() {
    let server = Server::new();
    let mut client = server.client();
    for path in [
        "/api/chat/send",
        "/api/chat/stop",
        "/api/chat/interrupt",
        "/api/chat/restart",
        "/api/chat/reset",
        "/api/chat/pending/retry",
        "/api/chat/pending/discard",
        "/api/threads/send",
    ] {
        refused(&client.get(path).unwrap(), 405, "method_not_allowed", "");
    }
    for path in [
        "/api/chat/history?session=a",
        "/api/chat/bootstrap",
        "/api/chat/sessions",
        "/api/chat/status?session=a",
        "/api/threads",
        "/healthz",
        "/",
        "/api/session-media/a/b/0",
        "/api/chat/turns/a",
    ] {
        refused(&client.post(path, &json!({})).unwrap(), 405, "method_not_allowed", "");
    }
    for path in ["/nope", "/api", "/api/chat", "/api/chat/send/more", "/app.js/x"] {
        refused(&client.get(path).unwrap(), 404, "unknown_path", "");
    }
}

#[test]
fn a_body_that_is_not_what_it_should_be_names_the_field() {
    let server = Server::new();
    let (known, _) = server.converse("main", "here");
    let before = server.get_json("/api/chat/sessions");
    let id = known.session_id.as_str();
    let photo = |data: &str, mime: &str| json!([{"id": 1, "mimeType": mime, "dataBase64": data}]);
    let table: Vec<(&str, Value, u16, &str, &str)> = vec![
        ("/api/chat/send", json!({}), 400, "bad_field", "session"),
        ("/api/chat/send", json!({"session": "new"}), 400, "bad_field", "message"),
        ("/api/chat/send", json!({"session": "new", "message": 5}), 400, "bad_field", "message"),
        ("/api/chat/send", json!({"session": "new", "message": " "}), 400, "bad_field", "message"),
        ("/api/chat/send", json!({"session": "a/b", "message": "x"}), 400, "bad_field", "session"),
        ("/api/chat/send", json!({"session": "a.b", "message": "x"}), 400, "bad_field", "session"),
        ("/api/chat/send", json!({"session": "", "message": "x"}), 400, "bad_field", "session"),
        ("/api/chat/send", json!({"session": "x".repeat(65), "message": "x"}), 400, "bad_field", "session"),
        ("/api/chat/send", json!({"session": "never-known", "message": "x"}), 404, "unknown_session", "never-known"),
        ("/api/chat/send", json!({"session": "new", "message": "x", "messageId": ""}), 400, "bad_field", "messageId"),
        ("/api/chat/send", json!({"session": "new", "message": "x", "messageId": "ü"}), 400, "bad_field", "messageId"),
        (
            "/api/chat/send",
            json!({"session": "new", "message": "x", "images": photo("%%", "image/png")}),
            400,
            "bad_field",
            "images[0].dataBase64",
        ),
        (
            "/api/chat/send",
            json!({"session": "new", "message": "x", "images": photo("QQ==", "text/html")}),
            400,
            "bad_field",
            "images[0].mimeType",
        ),
        (
            "/api/chat/send",
            json!({"session": "new", "message": "x", "seedFeatures": {"colour": "red"}}),
            400,
            "bad_field",
            "colour",
        ),
        (
            "/api/chat/send",
            json!({"session": "new", "message": "x".repeat(1024 * 1024 + 1)}),
            413,
            "too_large",
            "message",
        ),
        (
            "/api/chat/send",
            json!({"session": "new", "message": "x", "images": photo(&"A".repeat(26 * 1024 * 1024), "image/png")}),
            413,
            "too_large",
            "images",
        ),
        ("/api/chat/stop", json!({}), 400, "bad_field", "session"),
        ("/api/chat/stop", json!({"session": "never-known"}), 404, "unknown_session", "never-known"),
        ("/api/chat/interrupt", json!({"session": 7}), 400, "bad_field", "session"),
        ("/api/chat/restart", json!({"session": "x y"}), 400, "bad_field", "session"),
        ("/api/chat/reset", json!([]), 400, "bad_json", ""),
        ("/api/chat/features", json!({"session": id, "feature": "colour", "value": "on"}), 400, "bad_field", "colour"),
        ("/api/chat/features", json!({"session": id, "feature": "prose", "value": "maybe"}), 400, "bad_field", "maybe"),
        ("/api/chat/features", json!({"session": id, "feature": "prose"}), 400, "bad_field", "value"),
        ("/api/chat/pending/retry", json!({"session": id, "messageUuid": "nobody"}), 404, "not_found", "nobody"),
        ("/api/chat/pending/discard", json!({"session": id}), 400, "bad_field", "messageUuid"),
        ("/api/threads/send", json!({"message": "x"}), 400, "bad_field", "thread"),
        ("/api/threads/send", json!({"thread": "t", "message": ""}), 400, "bad_field", "message"),
    ];
    for (path, body, status, code, names) in &table {
        refused(&server.post(path, body), *status, code, names);
    }
    assert_eq!(server.get_json("/api/chat/sessions"), before, "nothing changed");
}

#[test]
fn what_is_not_json_is_415_or_400() {
    let server = Server::new();
    let mut client = server.client();
    let post = |kind: &str, body: &str| {
        format!(
            "POST /api/chat/send HTTP/1.1\r\nHost: {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            server.addr(),
            body.len()
        )
    };
    for (kind, body, status) in [
        ("text/plain", "{}", "415"),
        ("application/x-www-form-urlencoded", "a=b", "415"),
        ("application/json", "", "400"),
        ("application/json", "{", "400"),
        ("application/json", "\u{feff}nul", "400"),
        ("application/json; charset=utf-8", "5", "400"),
    ] {
        let answer = client.raw(post(kind, body).as_bytes()).unwrap();
        let text = String::from_utf8_lossy(&answer).into_owned();
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{kind} {body:?}: {text}");
    }
    assert!(client.get("/healthz").unwrap().status == 200);
}

#[test]
fn ids_and_numbers_in_a_path_or_query_are_checked() {
    let server = Server::new();
    let (known, _) = server.converse("main", "here");
    let id = known.session_id.as_str();
    for (path, status, code) in [
        ("/api/chat/history".to_owned(), 400, "bad_field"),
        ("/api/chat/history?session=a%2fb".to_owned(), 400, "bad_field"),
        ("/api/chat/history?session=..".to_owned(), 400, "bad_field"),
        ("/api/chat/history?session=a%00".to_owned(), 400, "bad_request"),
        ("/api/chat/history?session=never-known".to_owned(), 404, "unknown_session"),
        (format!("/api/chat/history?session={id}&tail=-1"), 400, "bad_field"),
        (format!("/api/chat/history?session={id}&tail=5001"), 400, "bad_field"),
        (format!("/api/chat/history?session={id}&offset=x&limit=1"), 400, "bad_field"),
        ("/api/chat/status?session=never-known".to_owned(), 404, "unknown_session"),
        ("/api/chat/features?session=never-known".to_owned(), 404, "unknown_session"),
        ("/api/chat/turns/never-known".to_owned(), 404, "not_found"),
        ("/api/chat/pending/never-known/0".to_owned(), 404, "not_found"),
        ("/api/session-media/a".to_owned(), 400, "bad_request"),
        ("/api/session-media/../../etc/passwd".to_owned(), 400, "bad_request"),
        (format!("/api/session-media/{id}/nobody/0"), 404, "not_found"),
    ] {
        let answer = server.get(&path);
        let text = answer.text();
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{path}: {text}");
    }
}

#[test]
fn the_same_message_id_with_other_content_is_409_and_with_the_same_is_one_message() {
    let server = Server::new();
    let first = server.send_as("main", "words", Some("key"), &[]);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let sends: Vec<_> =
            (0..64).map(|_| scope.spawn(|| server.send_as("main", "words", Some("key"), &[]))).collect();
        sends.into_iter().map(|s| s.join().unwrap()).collect()
    });
    for again in answers {
        assert!(again.deduplicated);
        assert_eq!((again.message_uuid, again.event_id), (first.message_uuid.clone(), first.event_id));
    }
    let other = server.try_send("main", "other words", Some("key"), &[]).unwrap_err();
    assert_eq!((other.status, other.code().as_str()), (409, "content_conflict"));
    let events = server.follow_from(Some("0")).drain(std::time::Duration::from_millis(300)).to_vec();
    assert_eq!(events.iter().filter(|f| f.event == "chat-user-message").count(), 1);
}

#[test]
fn sixty_four_first_sends_with_one_id_are_one_message() {
    let server = Server::new();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let sends: Vec<_> =
            (0..64).map(|_| scope.spawn(|| server.send_as("new", "at once", Some("one"), &[]))).collect();
        sends.into_iter().map(|s| s.join().unwrap()).collect()
    });
    let first = &answers[0];
    assert_eq!(answers.iter().filter(|a| !a.deduplicated).count(), 1);
    assert!(answers.iter().all(|a| a.message_uuid == first.message_uuid && a.session_id == first.session_id));
    assert_eq!(server.get_json("/api/chat/sessions")["sessions"].as_array().unwrap().len(), 1, "no other was begun");
}

#[test]
fn a_bad_setting_ends_the_start_with_one_clear_line_and_code_2() {
    for (listen, names) in [("localhost:1", "--listen"), ("0.0.0.0:0", "--token-file")] {
        let words = Options::default().listen(listen).try_start().err().expect("refused").to_string();
        assert!(words.contains(names) && words.contains("exit status: 2"), "{listen}: {words}");
    }
    for (args, names) in [(&["--agent", "'"][..], "--agent"), (&["--live-max", "0"], "--live-max")] {
        let words = Options::default().args(args.iter().copied()).try_start().err().expect("refused").to_string();
        assert!(words.contains(names), "{args:?}: {words}");
    }
    let first = Server::new();
    let words = Options::default().box_dir(first.box_dir()).try_start().err().expect("one server a box").to_string();
    assert!(words.contains(&format!("pid {}", first.pid())), "names the first: {words}");
    let words =
        Options::default().listen(&first.addr().to_string()).try_start().err().expect("port in use").to_string();
    assert!(words.contains("in use") || words.contains("Address"), "{words}");
}

#[test]
fn every_code_word_is_on_the_architecture_page() {
    let page = include_str!("../../src/lib.rs");
    for code in Code::ALL {
        assert!(page.contains(&format!("`{}`", code.word())), "{} is not listed", code.word());
    }
}
