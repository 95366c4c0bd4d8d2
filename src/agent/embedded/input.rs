//! Bytes of stdin to lines, and a line to what it asks. Leaves what to do about it to the agent. Rule a change could
//! break: a user line's content is kept as the very JSON that came, so that the transcript repeats it to the byte.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::directive::Script;
use super::json;
use super::photo::Photo;

/// Bytes asked of the pipe at once: all it can hold.
const READ_BYTES: usize = 64 * 1024;
/// A line buffer that grew beyond this is given back, in bytes: one photo must not stay in memory for ever.
const KEPT_BYTES_MAX: usize = 128 * 1024;

/// Splits stdin into lines.
#[derive(Default)]
pub struct Lines {
    buffer: Vec<u8>,
    ready: VecDeque<Vec<u8>>,
    /// Nothing more will come.
    pub ended: bool,
}

impl Lines {
    /// One read of what is there; call it when stdin is readable.
    pub fn read(&mut self) -> io::Result<()> {
        let from = self.buffer.len();
        self.buffer.resize(from + READ_BYTES, 0);
        let count = rustix::io::retry_on_intr(|| rustix::io::read(rustix::stdio::stdin(), &mut self.buffer[from..]));
        self.buffer.truncate(from + count.unwrap_or(0));
        if count? == 0 {
            self.ended = true;
            if !self.buffer.is_empty() {
                self.ready.push_back(std::mem::take(&mut self.buffer));
            }
            return Ok(());
        }
        let mut scanned = from;
        while let Some(at) = self.buffer[scanned..].iter().position(|byte| *byte == b'\n') {
            let rest = self.buffer.split_off(scanned + at + 1);
            self.ready.push_back(std::mem::replace(&mut self.buffer, rest));
            scanned = 0;
        }
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_BYTES_MAX {
            self.buffer = Vec::new();
        }
        Ok(())
    }

    /// The next whole line.
    pub fn next(&mut self) -> Option<Vec<u8>> {
        self.ready.pop_front()
    }
}

/// What a line asks.
pub enum Asked {
    /// A user's message.
    Message(Box<Incoming>),
    /// End the turn.
    Interrupt { request_id: String },
    /// Another control request, answered with success.
    Control { request_id: String },
    /// The answer to a request of ours.
    Answered { request_id: String, allowed: bool },
    /// A type that nobody knows.
    Nothing,
}

/// A user's message as it came.
#[derive(Debug, Clone)]
pub struct Incoming {
    /// Its uuid, if the sender gave one.
    pub uuid: Option<String>,
    /// `message.content`, verbatim JSON.
    pub content: String,
    /// All its text.
    pub text: String,
    /// The text without directives.
    pub words: String,
    /// What the directives say.
    pub script: Script,
    /// Its photos.
    pub photos: Vec<Photo>,
    /// When it came, in Unix milliseconds.
    pub at_ms: i64,
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: Option<Cow<'a, str>>,
    uuid: Option<String>,
    #[serde(borrow)]
    message: Option<LineMessage<'a>>,
    request_id: Option<String>,
    request: Option<LineRequest>,
    response: Option<LineResponse>,
}

#[derive(Deserialize)]
struct LineMessage<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct LineRequest {
    subtype: Option<String>,
}

#[derive(Deserialize)]
struct LineResponse {
    request_id: Option<String>,
    response: Option<LineVerdict>,
}

#[derive(Deserialize)]
struct LineVerdict {
    behavior: Option<String>,
}

#[derive(Deserialize)]
struct Block<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    #[serde(borrow)]
    source: Option<Source<'a>>,
}

#[derive(Deserialize)]
struct Source<'a> {
    media_type: Option<String>,
    #[serde(borrow)]
    data: Option<Cow<'a, str>>,
}

/// Reads one line; the error is the parser's.
pub fn parse(line: &[u8], defaults: &Script) -> Result<Asked, serde_json::Error> {
    let text = String::from_utf8_lossy(line);
    // Anything that is JSON but no object of ours is a type that nobody knows.
    serde_json::from_str::<&RawValue>(&text)?;
    let Ok(line) = serde_json::from_str::<Line<'_>>(&text) else {
        return Ok(Asked::Nothing);
    };
    Ok(match (line.kind.as_deref(), line.request_id) {
        (Some("user"), _) => match line.message.and_then(|message| message.content) {
            Some(content) => Asked::Message(Box::new(message(line.uuid, content.get(), defaults))),
            None => Asked::Nothing,
        },
        (Some("control_request"), Some(request_id)) => {
            match line.request.and_then(|request| request.subtype).as_deref() {
                Some("interrupt") => Asked::Interrupt { request_id },
                _ => Asked::Control { request_id },
            }
        }
        (Some("control_response"), _) => match line.response {
            Some(LineResponse { request_id: Some(request_id), response }) => Asked::Answered {
                request_id,
                allowed: response.and_then(|verdict| verdict.behavior).as_deref() == Some("allow"),
            },
            _ => Asked::Nothing,
        },
        _ => Asked::Nothing,
    })
}

fn message(uuid: Option<String>, content: &str, defaults: &Script) -> Incoming {
    let mut text = String::new();
    let mut photos = Vec::new();
    if content.starts_with('"') {
        text = serde_json::from_str(content).unwrap_or_default();
    } else {
        for block in serde_json::from_str::<Vec<Block<'_>>>(content).unwrap_or_default() {
            if let Some(part) = block.text {
                if !text.is_empty() {
                    text.push('\n');
                }
                text.push_str(&part);
            }
            if block.kind.as_deref() == Some("image") {
                let source = block.source.unwrap_or(Source { media_type: None, data: None });
                let mime = source.media_type.unwrap_or_else(|| "unknown type".to_owned());
                photos.push(Photo::read(&mime, source.data.as_deref().unwrap_or_default()));
            }
        }
    }
    let mut script = defaults.clone();
    let words = script.take_from(&text);
    Incoming { uuid, content: content.to_owned(), text, words, script, photos, at_ms: crate::clock::now_ms() }
}

/// Several messages as the one the agent makes of them: strings joined by a line feed, else all their blocks.
pub fn merge(messages: Vec<Incoming>, defaults: &Script) -> Option<(Incoming, Vec<String>)> {
    let mut earlier: Vec<String> = Vec::new();
    let mut merged: Option<Incoming> = None;
    for next in messages {
        let Some(before) = merged else {
            merged = Some(next);
            continue;
        };
        earlier.extend(before.uuid);
        let text = format!("{}\n{}", before.text, next.text);
        let content = if before.content.starts_with('"') && next.content.starts_with('"') {
            json::quoted(&text)
        } else {
            format!("[{}]", [inner_blocks(&before.content), inner_blocks(&next.content)].join(","))
        };
        let mut script = defaults.clone();
        let words = script.take_from(&text);
        let photos = before.photos.into_iter().chain(next.photos).collect();
        merged = Some(Incoming { uuid: next.uuid, content, text, words, script, photos, at_ms: before.at_ms });
    }
    Some((merged?, earlier))
}

/// A content's blocks without their brackets; a string becomes one text block.
fn inner_blocks(content: &str) -> String {
    match content.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(blocks) => blocks.trim().to_owned(),
        None => json::Obj::new().str("type", "text").raw("text", content).end(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(line: &str) -> Incoming {
        match parse(line.as_bytes(), &Script::default()) {
            Ok(Asked::Message(incoming)) => *incoming,
            _ => panic!("not a message: {line}"),
        }
    }

    #[test]
    fn a_line_is_a_message_a_request_or_nothing_and_only_bad_json_is_an_error() {
        let one = incoming(
            r#"{"uuid":"u","type":"user","message":{"role":"user","content":[{"type":"text","text":"see {{think}}"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"QUJD"}}]}}"#,
        );
        assert_eq!((one.uuid.as_deref(), one.words.as_str(), one.photos[0].bytes), (Some("u"), "see", 3));
        assert!(one.script.think.is_some());
        for (line, right) in [
            (r#"{"type":"control_request","request_id":"r","request":{"subtype":"interrupt"}}"#, "interrupt"),
            (r#"{"type":"control_request","request_id":"r","request":{"subtype":"initialize"}}"#, "control"),
            (r#"{"type":"keep_alive"}"#, "nothing"),
            (r#"{"type":"user"}"#, "nothing"),
            (r#"{"type":"user","message":5}"#, "nothing"),
            ("5", "nothing"),
            ("[]", "nothing"),
            ("this is not json", "error"),
            ("{\"type\":\"user\"", "error"),
        ] {
            let read = match parse(line.as_bytes(), &Script::default()) {
                Ok(Asked::Interrupt { .. }) => "interrupt",
                Ok(Asked::Control { .. }) => "control",
                Ok(Asked::Message(_)) => "message",
                Ok(Asked::Answered { .. }) => "answered",
                Ok(Asked::Nothing) => "nothing",
                Err(_) => "error",
            };
            assert_eq!(read, right, "{line}");
        }
    }

    #[test]
    fn waiting_messages_become_one_with_the_last_uuid() {
        let one = incoming(r#"{"type":"user","uuid":"a","message":{"content":"one"}}"#);
        let two = incoming(r#"{"type":"user","uuid":"b","message":{"content":"two {{hang}}"}}"#);
        let three = incoming(r#"{"type":"user","uuid":"c","message":{"content":[{"type":"text","text":"three"}]}}"#);
        let (merged, earlier) = merge(vec![one.clone(), two.clone()], &Script::default()).unwrap();
        assert_eq!((merged.uuid.as_deref(), merged.content.as_str()), (Some("b"), r#""one\ntwo {{hang}}""#));
        assert_eq!((earlier, merged.script.hang), (vec!["a".to_owned()], true));
        let (merged, earlier) = merge(vec![one, two, three], &Script::default()).unwrap();
        assert_eq!(earlier, ["a", "b"]);
        assert_eq!(merged.content, r#"[{"type":"text","text":"one\ntwo {{hang}}"},{"type":"text","text":"three"}]"#);
        assert!(merge(Vec::new(), &Script::default()).is_none());
    }
}
