//! PURE. What history shows of a record: an entry with its blocks, exactly as the wire writes it.
//!
//! Leaves which records are shown to `record`. Rules a change could break: no base64 run of 1 KiB or more in any text;
//! nothing is cut inside a character; photos are numbered by [`walk_blocks`] alone.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::Value;

use super::json::{Cursor, Str};
use super::record::{BlockRef, Kind, Record, Role, role, shown_text, walk_blocks};
use super::sniff::Sniff;
use super::strip::{Cut, cuts_between};
use crate::ids::{SessionId, is_plain_id};

/// Characters of a tool's result shown on its call (WIRE).
const RESULT_CHARS_MAX: usize = 500;
/// Characters of a call's input shown in one line.
const INPUT_SUMMARY_CHARS_MAX: usize = 200;
/// Characters of a name or a media type that are believed.
const WORD_BYTES_MAX: usize = 256;
/// What stands where a photo cannot be shown (WIRE).
pub const NO_IMAGE: &str = "[image not displayed]";

/// What kind of entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryType {
    /// A person's words or photos.
    User,
    /// The agent's.
    Assistant,
    /// The summary that a compaction left.
    Compaction,
    /// The agent was interrupted here.
    Interrupted,
    /// A user line that no person wrote.
    Notice,
}

/// One entry of history (WIRE, Entries).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The line's uuid, or `at-<byte offset>`.
    pub uuid: String,
    /// What kind of entry.
    #[serde(rename = "type")]
    pub kind: EntryType,
    /// As the line says; null if it says none.
    pub timestamp: Option<String>,
    /// Its blocks, at least one.
    pub content: Vec<Block>,
    /// Who wrote it, if the text says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Their address, if the text says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_email: Option<String>,
}

/// One block of an entry.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", rename_all_fields = "camelCase")]
pub enum Block {
    /// Words.
    Text {
        /// The words.
        text: String,
    },
    /// A call of a tool, with its result once there is one.
    ToolUse {
        /// Its name.
        tool_name: String,
        /// The call's id.
        tool_id: String,
        /// What it was given.
        input: Value,
        /// The same in one line.
        input_summary: String,
        /// The result's first 500 characters.
        #[serde(skip_serializing_if = "Option::is_none")]
        result_summary: Option<String>,
    },
    /// A thought.
    Thinking {
        /// The thought.
        text: String,
    },
    /// A photo: one that the server serves, or one that lies elsewhere.
    Image {
        /// Its media type, as the line says.
        #[serde(skip_serializing_if = "Option::is_none")]
        media_type: Option<String>,
        /// `<sessionId>/<entryUuid>/<index>`.
        #[serde(skip_serializing_if = "Option::is_none")]
        image_ref: Option<String>,
        /// Where it lies, if not with us.
        #[serde(skip_serializing_if = "Option::is_none")]
        image_url: Option<String>,
    },
}

/// A tool's result on its way to its call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolResult {
    /// The call's id.
    pub tool_id: String,
    /// Its first 500 characters.
    pub summary: String,
}

/// The id under which a record is an entry: its uuid, or its place.
#[must_use]
pub fn entry_id(uuid: Option<Cow<'_, str>>, offset: u64) -> String {
    uuid.map_or_else(|| format!("at-{offset}"), Cow::into_owned)
}

fn entry_type(kind: Kind) -> Option<EntryType> {
    match kind {
        Kind::User => Some(EntryType::User),
        Kind::Assistant => Some(EntryType::Assistant),
        Kind::Compaction => Some(EntryType::Compaction),
        Kind::Interrupted => Some(EntryType::Interrupted),
        Kind::Notice => Some(EntryType::Notice),
        Kind::Result | Kind::Hidden | Kind::Unreadable => None,
    }
}

/// The entry that `record` is (none for a line of results alone) and the results it carries.
#[must_use]
pub fn build(
    record: &Record<'_>,
    line: &[u8],
    cuts: &[Cut],
    session: &SessionId,
    offset: u64,
) -> (Option<Entry>, Vec<ToolResult>) {
    let mut results = Vec::new();
    let mut blocks = Vec::new();
    let uuid = entry_id(record.plain_uuid(), offset);
    if let Some(content) = record.content {
        let mut cursor = Cursor::new(line, content.at);
        // Read whole before, so it cannot fail here.
        let _ = walk_blocks(&mut cursor, |block| match role(&block, cuts) {
            Role::Nothing => {}
            Role::Text(text) => blocks.push(Block::Text { text: shown_text(&text.text(cuts)).into_owned() }),
            Role::Thought(text) => blocks.push(Block::Thinking { text: text.text(cuts).into_owned() }),
            Role::Call => blocks.push(call(&block, line, cuts)),
            Role::Result => results.extend(result(&block, line, cuts)),
            Role::Photo => blocks.push(photo(&block, cuts, session, &uuid, record.in_message)),
            Role::Unknown => blocks.push(unknown(&block)),
        });
    }
    let entry = entry_type(record.kind).map(|kind| {
        let (user, user_email) = match kind {
            EntryType::User => author(&blocks),
            EntryType::Assistant | EntryType::Compaction | EntryType::Interrupted | EntryType::Notice => (None, None),
        };
        let timestamp = record.timestamp.and_then(|t| t.short(WORD_BYTES_MAX)).map(Cow::into_owned);
        Entry { uuid, kind, timestamp, content: blocks, user, user_email }
    });
    (entry, results)
}

/// The entry that stands for a record too long or too deep to read.
#[must_use]
pub fn build_stub(kind: Kind, uuid: String, timestamp: Option<String>, len: u64) -> Option<Entry> {
    let text = format!("[message too large to display: ~{} KB]", len.div_ceil(1024).max(1));
    entry_type(kind).map(|kind| Entry {
        uuid,
        kind,
        timestamp,
        content: vec![Block::Text { text }],
        user: None,
        user_email: None,
    })
}

/// Id and time of a sniffed record.
#[must_use]
pub fn sniffed_id(sniff: &Sniff, offset: u64) -> (String, Option<String>) {
    let uuid = std::str::from_utf8(&sniff.uuid).ok().filter(|u| is_plain_id(u)).map(Cow::Borrowed);
    let timestamp = (!sniff.timestamp.is_empty() && sniff.timestamp.len() <= WORD_BYTES_MAX)
        .then(|| super::json::unescape(&sniff.timestamp).into_owned());
    (entry_id(uuid, offset), timestamp)
}

/// The result that a sniffed record carries.
#[must_use]
pub fn sniffed_result(sniff: &Sniff) -> Option<ToolResult> {
    let tool_id = std::str::from_utf8(&sniff.tool_use_id).ok().filter(|t| !t.is_empty())?;
    let mut raw = &sniff.result_text[..];
    // What was kept can end inside an escape or a character; the summary is cut well before.
    if let Some(cut) = raw.len().checked_sub(12)
        && raw.len() >= 4096
    {
        raw = &raw[..cut];
    }
    Some(ToolResult {
        tool_id: tool_id.to_owned(),
        summary: first_chars(&super::json::unescape(raw), RESULT_CHARS_MAX),
    })
}

fn call(block: &BlockRef<'_>, line: &[u8], cuts: &[Cut]) -> Block {
    let word = |s: Option<Str<'_>>| s.map(|s| first_chars(&s.text(cuts), WORD_BYTES_MAX)).unwrap_or_default();
    let input = block.input_at.and_then(|at| Cursor::new(line, at).value(cuts).ok()).unwrap_or(Value::Null);
    let input_summary = summarize(&input);
    Block::ToolUse { tool_name: word(block.name), tool_id: word(block.id), input, input_summary, result_summary: None }
}

/// The part of a call's input that says most, in one line.
fn summarize(input: &Value) -> String {
    const TELLING: &[&str] =
        &["command", "file_path", "notebook_path", "path", "pattern", "query", "url", "description", "prompt", "skill"];
    let text = match input {
        Value::Object(map) => TELLING
            .iter()
            .find_map(|key| map.get(*key).and_then(Value::as_str))
            .map(str::to_owned)
            .unwrap_or_else(|| if map.is_empty() { String::new() } else { input.to_string() }),
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) => input.to_string(),
    };
    let line = first_chars(&text, 4 * INPUT_SUMMARY_CHARS_MAX).split_whitespace().collect::<Vec<_>>().join(" ");
    first_chars(&line, INPUT_SUMMARY_CHARS_MAX)
}

fn result(block: &BlockRef<'_>, line: &[u8], cuts: &[Cut]) -> Option<ToolResult> {
    let tool_id = block.tool_use_id?.text(cuts).into_owned();
    let mut text = String::new();
    if let Some(at) = block.content_at {
        let mut cursor = Cursor::new(line, at);
        let _ = walk_blocks(&mut cursor, |part| {
            // Enough is there; the rest of a long result is not even copied.
            if text.len() > 8 * RESULT_CHARS_MAX {
                return;
            }
            let next = match (part.text, part.image, part.kind) {
                (Some(words), ..) => Cow::Owned(first_chars(&words.text(cuts), RESULT_CHARS_MAX)),
                (None, Some(_), _) => Cow::Borrowed(NO_IMAGE),
                (None, None, Some(_)) => Cow::Owned(unknown_text(&part)),
                (None, None, None) => return,
            };
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(&next);
        });
    }
    Some(ToolResult { tool_id, summary: first_chars(&text, RESULT_CHARS_MAX) })
}

fn photo(block: &BlockRef<'_>, cuts: &[Cut], session: &SessionId, uuid: &str, in_message: bool) -> Block {
    let source = block.source.unwrap_or_default();
    let media_type = source
        .media_type
        .and_then(|m| m.short(WORD_BYTES_MAX))
        .filter(|m| m.bytes().all(|b| b.is_ascii_alphanumeric() || b"/+.-_".contains(&b)))
        .map(Cow::into_owned);
    if block.has_payload(cuts)
        && let Some(index) = block.image
        && in_message
    // a reference counts blocks of `message.content`
    {
        return Block::Image { media_type, image_ref: Some(format!("{session}/{uuid}/{index}")), image_url: None };
    }
    let url = source.url.filter(|_| !block.has_payload(cuts)).map(|u| u.text(cuts).into_owned());
    match url {
        // Nothing but a web address is an address to a browser.
        Some(url) if url.starts_with("https://") || url.starts_with("http://") => {
            Block::Image { media_type, image_ref: None, image_url: Some(url) }
        }
        Some(_) | None => Block::Text { text: NO_IMAGE.to_owned() },
    }
}

fn unknown(block: &BlockRef<'_>) -> Block {
    Block::Text { text: unknown_text(block) }
}

fn unknown_text(block: &BlockRef<'_>) -> String {
    let kind = block.kind.and_then(|k| k.short(WORD_BYTES_MAX)).unwrap_or(Cow::Borrowed("unknown"));
    format!("[{}]", first_chars(&kind, 64))
}

/// The first `chars` characters of `text`.
#[must_use]
pub fn first_chars(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => text[..end].to_owned(),
        None => text.to_owned(),
    }
}

/// Who wrote the message, from the tag it opens with.
fn author(blocks: &[Block]) -> (Option<String>, Option<String>) {
    let first = blocks.iter().find_map(|b| match b {
        Block::Text { text } => Some(text),
        Block::ToolUse { .. } | Block::Thinking { .. } | Block::Image { .. } => None,
    });
    first.map_or((None, None), |text| author_of(text))
}

/// `user` and `user-email` of the tag `<typed …>`, `<speech …>` or `<external-input …>` that `text` opens with.
#[must_use]
pub fn author_of(text: &str) -> (Option<String>, Option<String>) {
    const TAG_BYTES_MAX: usize = 1024;
    let text = text.trim_start();
    let rest = ["<typed", "<speech", "<external-input"].iter().find_map(|tag| text.strip_prefix(tag));
    let Some(rest) = rest.filter(|r| r.starts_with(char::is_whitespace)) else {
        return (None, None);
    };
    let Some(end) = tag_end(rest).filter(|end| *end <= TAG_BYTES_MAX) else {
        return (None, None);
    };
    let tag = &rest[..end];
    (attribute(tag, "user"), attribute(tag, "user-email"))
}

fn tag_end(rest: &str) -> Option<usize> {
    let mut quoted = false;
    rest.char_indices().find_map(|(at, c)| {
        quoted ^= c == '"';
        (c == '>' && !quoted).then_some(at)
    })
}

fn attribute(tag: &str, name: &str) -> Option<String> {
    let mut rest = tag;
    loop {
        rest = rest.trim_start();
        let equals = rest.find('=')?;
        let key = rest[..equals].trim();
        let value = rest[equals + 1..].trim_start().strip_prefix('"')?;
        let end = value.find('"')?;
        if key.rsplit(char::is_whitespace).next() == Some(name) {
            let text = value[..end]
                .replace("&quot;", "\"")
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&#39;", "'")
                .replace("&amp;", "&");
            return (!text.is_empty()).then_some(text);
        }
        rest = &value[end + 1..];
    }
}

/// The first words of a person in an entry, in one line without tags, for the list of sessions.
#[must_use]
pub fn label(entry: &Entry, chars_max: usize) -> Option<String> {
    let text = entry.content.iter().find_map(|b| match b {
        Block::Text { text } if text != NO_IMAGE => Some(text),
        Block::Text { .. } | Block::ToolUse { .. } | Block::Thinking { .. } | Block::Image { .. } => None,
    })?;
    let head = first_chars(text, 16 * chars_max);
    let mut out = String::new();
    let mut rest = head.as_str();
    while let Some(open) = rest.find('<') {
        out.push_str(&rest[..open]);
        let after = &rest[open + 1..];
        let is_tag = after.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
        match tag_end(after).filter(|_| is_tag) {
            Some(end) => {
                out.push(' ');
                rest = &after[end + 1..];
            }
            None => {
                out.push('<');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    let line = first_chars(&out.split_whitespace().collect::<Vec<_>>().join(" "), chars_max);
    (!line.is_empty()).then_some(line)
}

/// Where the payload of photo `index` of `record` stands, in bytes of the stripped line, and in the line itself.
#[must_use]
pub fn payload(record: &Record<'_>, line: &[u8], cuts: &[Cut], index: usize) -> Option<(u64, u64)> {
    if !record.in_message {
        return None;
    }
    let mut cursor = Cursor::new(line, record.content?.at);
    let mut found = None;
    let _ = walk_blocks(&mut cursor, |block| {
        if block.image == Some(index) && block.has_payload(cuts) {
            found = block.source.and_then(|s| s.data);
        }
    });
    let data = found?;
    let start = super::strip::in_line(cuts, data.at, false);
    let taken: u64 = cuts_between(cuts, data.at, data.end()).iter().map(|c| u64::from(c.len)).sum();
    Some((start, data.raw.len() as u64 + taken))
}
