//! PURE. What can be known of a line that is too long or too deep to be held: its kind, ids, time, whether it is only
//! a tool's result and the first words of that. Walks the structure as the bytes stream by, in constant memory.
//!
//! Leaves the judgement to `record`. Rule a change could break: only values at their proper place in the structure
//! count; the same words inside a text do not.

use memchr::memchr2;

/// Deepest nesting that is followed.
const LEVELS_MAX: usize = 4096;
/// Levels whose key and index are remembered.
const PATH_LEVELS: usize = 6;
/// Most bytes kept of one value: enough for 500 characters of any script with escapes.
const VALUE_BYTES_MAX: usize = 4096;
/// Most ids kept of one line.
const IDS_MAX: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Value,
    /// Right after `[`: a value or `]`.
    ValueOrEnd,
    /// Right after `{`: a key or `}`.
    KeyOrEnd,
    Key,
    Colon,
    String {
        key: bool,
        escaped: bool,
    },
    Scalar,
    After,
    /// The outermost value is over.
    Done,
    Bad,
}

#[derive(Debug, Clone, Copy, Default)]
struct Level {
    index: u32,
    key: [u8; 24],
    key_len: u8,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Sniff {
    state: State,
    /// One bit per level: set for objects.
    kinds: Vec<u64>,
    depth: usize,
    path: [Level; PATH_LEVELS],
    value: Vec<u8>,
    keep: bool,
    /// `type` of the line.
    pub kind: Vec<u8>,
    /// `uuid`, as it stands.
    pub uuid: Vec<u8>,
    /// `timestamp`, as it stands.
    pub timestamp: Vec<u8>,
    /// `isMeta`.
    pub meta: bool,
    /// `isSidechain`.
    pub sidechain: bool,
    /// `isCompactSummary`.
    pub compact: bool,
    /// `isApiErrorMessage`.
    pub api_error: bool,
    /// `origin` that is not null.
    pub origin: bool,
    /// `message.model` is `<synthetic>`.
    pub synthetic: bool,
    /// `message` is an object.
    pub message: bool,
    /// `message.content` has a tool result.
    pub results: bool,
    /// `message.content` has a tool call.
    pub tools: bool,
    /// `message.content` has something else, or is a text.
    pub others: bool,
    /// `message.stop_reason`.
    pub stop_reason: Vec<u8>,
    /// `attachment.type` is `queued_command`.
    pub queued_command: bool,
    /// `attachment.commandMode`, if it is not `prompt`.
    pub other_mode: bool,
    /// `tool_use_id` of the first block.
    pub tool_use_id: Vec<u8>,
    /// The first words of that result, escapes unread.
    pub result_text: Vec<u8>,
    /// `mergedSendUuids` and `attachment.source_uuid`.
    pub other_ids: Vec<Vec<u8>>,
}

impl Default for Sniff {
    fn default() -> Self {
        Self {
            state: State::Value,
            kinds: Vec::new(),
            depth: 0,
            path: [Level::default(); PATH_LEVELS],
            value: Vec::new(),
            keep: false,
            kind: Vec::new(),
            uuid: Vec::new(),
            timestamp: Vec::new(),
            meta: false,
            sidechain: false,
            compact: false,
            api_error: false,
            origin: false,
            synthetic: false,
            message: false,
            results: false,
            tools: false,
            others: false,
            stop_reason: Vec::new(),
            queued_command: false,
            other_mode: false,
            tool_use_id: Vec::new(),
            result_text: Vec::new(),
            other_ids: Vec::new(),
        }
    }
}

impl Sniff {
    /// True if the line was one whole object.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.state == State::Done
    }

    /// The next stripped bytes of the line.
    pub fn feed(&mut self, bytes: &[u8]) {
        let mut i = 0;
        while i < bytes.len() {
            let b = bytes[i];
            match self.state {
                State::Bad => return,
                State::String { key, escaped } => {
                    if escaped {
                        self.keep_bytes(&bytes[i..=i]);
                        self.state = State::String { key, escaped: false };
                        i += 1;
                        continue;
                    }
                    let n = memchr2(b'"', b'\\', &bytes[i..]).unwrap_or(bytes.len() - i);
                    self.keep_bytes(&bytes[i..i + n]);
                    i += n;
                    match bytes.get(i) {
                        None => {}
                        Some(b'"') => {
                            self.string_ends(key);
                            i += 1;
                        }
                        Some(_) => {
                            self.keep_bytes(b"\\");
                            self.state = State::String { key, escaped: true };
                            i += 1;
                        }
                    }
                    continue;
                }
                State::Scalar => {
                    if matches!(b, b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'+' | b'.') {
                        self.keep_bytes(&[b]);
                        i += 1;
                        continue;
                    }
                    self.scalar_ends();
                    continue;
                }
                State::Value
                | State::ValueOrEnd
                | State::KeyOrEnd
                | State::Key
                | State::Colon
                | State::After
                | State::Done => self.structure(b),
            }
            i += 1;
        }
    }

    fn keep_bytes(&mut self, bytes: &[u8]) {
        if self.keep {
            let room = VALUE_BYTES_MAX.saturating_sub(self.value.len());
            self.value.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    fn structure(&mut self, b: u8) {
        if matches!(b, b' ' | b'\t' | b'\r' | b'\n') {
            return;
        }
        self.state = match (self.state, b) {
            (State::Value | State::ValueOrEnd, b'{' | b'[') => self.open(b == b'{'),
            (State::Value | State::ValueOrEnd, b'"') if self.depth > 0 => self.string_begins(false),
            (State::Value | State::ValueOrEnd, b'0'..=b'9' | b'-' | b'a'..=b'z' | b'A'..=b'Z') if self.depth > 0 => {
                self.value.clear();
                self.value.push(b);
                self.keep = true;
                State::Scalar
            }
            (State::KeyOrEnd | State::Key, b'"') => self.string_begins(true),
            (State::Colon, b':') => State::Value,
            (State::After, b',') => {
                if let Some(level) = self.path.get_mut(self.depth - 1) {
                    level.index += 1;
                }
                if self.in_object() { State::Key } else { State::Value }
            }
            (State::After | State::KeyOrEnd, b'}') if self.in_object() => self.close(),
            (State::After | State::ValueOrEnd, b']') if !self.in_object() => self.close(),
            _ => State::Bad,
        };
    }

    fn in_object(&self) -> bool {
        self.depth > 0 && self.kinds[(self.depth - 1) / 64] >> ((self.depth - 1) % 64) & 1 == 1
    }

    fn open(&mut self, object: bool) -> State {
        if self.depth == LEVELS_MAX || (self.depth == 0 && !object) {
            return State::Bad;
        }
        if self.depth == 1 && object {
            match self.key(0) {
                b"message" => self.message = true,
                b"origin" => self.origin = true,
                _ => {}
            }
        }
        let (word, bit) = (self.depth / 64, 1 << (self.depth % 64));
        if word == self.kinds.len() {
            self.kinds.push(0);
        }
        if object {
            self.kinds[word] |= bit;
        } else {
            self.kinds[word] &= !bit;
        }
        if let Some(level) = self.path.get_mut(self.depth) {
            *level = Level::default();
        }
        self.depth += 1;
        if object { State::KeyOrEnd } else { State::ValueOrEnd }
    }

    fn close(&mut self) -> State {
        self.depth -= 1;
        if self.depth == 0 { State::Done } else { State::After }
    }

    fn string_begins(&mut self, key: bool) -> State {
        self.value.clear();
        self.keep = self.depth <= PATH_LEVELS;
        State::String { key, escaped: false }
    }

    fn string_ends(&mut self, key: bool) {
        if key {
            if let Some(level) = self.path.get_mut(self.depth - 1) {
                // A longer key is none of ours.
                let len = if self.value.len() > level.key.len() { 0 } else { self.value.len() };
                level.key[..len].copy_from_slice(&self.value[..len]);
                level.key_len = len as u8;
            }
            self.state = State::Colon;
        } else {
            self.state = State::After;
            self.string_value();
        }
    }

    fn key(&self, level: usize) -> &[u8] {
        let level = &self.path[level];
        &level.key[..usize::from(level.key_len)]
    }

    fn string_value(&mut self) {
        let value = std::mem::take(&mut self.value);
        let first = self.path[2].index == 0;
        match self.depth {
            1 => match self.key(0) {
                b"type" => self.kind = value,
                b"uuid" => self.uuid = value,
                b"timestamp" => self.timestamp = value,
                b"origin" => self.origin = true,
                _ => self.value = value,
            },
            2 => match (self.key(0), self.key(1)) {
                (b"message", b"model") => self.synthetic = value == b"<synthetic>",
                (b"message", b"stop_reason") => self.stop_reason = value,
                (b"message", b"content") => self.others = true,
                (b"attachment", b"type") => self.queued_command = value == b"queued_command",
                (b"attachment", b"commandMode") => self.other_mode = value != b"prompt",
                (b"attachment", b"source_uuid") => self.other_id(value),
                (b"mergedSendUuids", _) => self.other_id(value),
                _ => self.value = value,
            },
            4 if self.key(0) == b"message" && self.key(1) == b"content" => match self.key(3) {
                b"type" => match &value[..] {
                    b"tool_result" => self.results = true,
                    b"tool_use" => {
                        self.tools = true;
                        self.others = true;
                    }
                    _ => self.others = true,
                },
                b"tool_use_id" if first => self.tool_use_id = value,
                b"content" if first => self.result_text = value,
                _ => self.value = value,
            },
            6 if first
                && self.result_text.is_empty()
                && self.key(0) == b"message"
                && self.key(1) == b"content"
                && self.key(3) == b"content"
                && self.key(5) == b"text" =>
            {
                self.result_text = value;
            }
            _ => self.value = value,
        }
    }

    fn other_id(&mut self, value: Vec<u8>) {
        if self.other_ids.len() < IDS_MAX && value.len() <= crate::ids::ID_BYTES_MAX {
            self.other_ids.push(value);
        }
    }

    fn scalar_ends(&mut self) {
        self.state = State::After;
        if self.depth == 1 {
            let yes = self.value == b"true";
            match self.key(0) {
                b"isMeta" => self.meta = yes,
                b"isSidechain" => self.sidechain = yes,
                b"isCompactSummary" => self.compact = yes,
                b"isApiErrorMessage" => self.api_error = yes,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sniff(line: &str, piece: usize) -> Sniff {
        let mut sniff = Sniff::default();
        for part in line.as_bytes().chunks(piece) {
            sniff.feed(part);
        }
        sniff
    }

    #[test]
    fn only_values_at_their_proper_place_count() {
        let line = r#"{"x":{"uuid":"no","type":"no"},"t":"\"uuid\":\"no\"","isSidechain":false,"type":"user","message":{"role":"user","content":[{"tool_use_id":"t1","type":"tool_result","content":[{"type":"text","text":"first \"words\""},{"type":"text","text":"more"}]}]},"uuid":"u1","timestamp":"2026","toolUseResult":{"uuid":"no","a":[1,{"b":null}]},"mergedSendUuids":["m1","m2"]}"#;
        for piece in [1, 2, 5, 1000] {
            let seen = sniff(line, piece);
            assert!(seen.is_whole(), "pieces of {piece}");
            assert_eq!((&seen.kind[..], &seen.uuid[..], &seen.timestamp[..]), (&b"user"[..], &b"u1"[..], &b"2026"[..]));
            assert!(seen.results && !seen.others && seen.message && !seen.meta && !seen.sidechain);
            assert_eq!((&seen.tool_use_id[..], &seen.result_text[..]), (&b"t1"[..], &br#"first \"words\""#[..]));
            assert_eq!(seen.other_ids, [b"m1".to_vec(), b"m2".to_vec()]);
        }
    }

    #[test]
    fn a_torn_or_endless_line_is_not_whole() {
        for line in ["", "{", r#"{"a":1"#, r#"{"a":"x"#, r#"{"a" 1}"#, r#"{"a":1}}"#, "[]", "5", r#"{"a":1}{"b":2}"#] {
            assert!(!sniff(line, 1).is_whole(), "{line}");
        }
        assert!(!sniff(&format!("{{\"a\":{}", "[".repeat(100_000)), 4096).is_whole());
        let deep = format!("{{\"a\":{}{},\"uuid\":\"u\"}}", "[".repeat(200), "]".repeat(200));
        let seen = sniff(&deep, 64);
        assert!(seen.is_whole() && seen.uuid == b"u");
    }
}
