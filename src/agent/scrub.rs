//! PURE. Makes JSON text of an agent fit to be sent on: lone surrogates replaced, photos taken out, long texts cut.
//!
//! Works on the text, so that all else stays byte for byte. Rule a change could break: what comes out is JSON whenever
//! what went in was, and it grows by no more than the notes it leaves.

use std::borrow::Cow;

/// What stands in a frame where base64 stood.
pub const MARKER: &str = "[base64 not displayed]";
/// Shortest base64 text that is taken out, in bytes (CONTRACT §8).
const BASE64_BYTES_MIN: usize = 1024;

/// What to look for besides photos.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strip {
    /// Photos and data URLs only.
    Photos,
    /// Every text that is nothing but base64, and what a text has over this many bytes.
    Outputs {
        /// Longest text that stays whole, in bytes.
        text_bytes_max: usize,
    },
}

/// Replaces every escaped surrogate without its other half by U+FFFD; a plain JSON parse refuses it.
#[must_use]
pub fn surrogates(json: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut copied = 0;
    let mut at = 0;
    while let Some(step) = json[at..].find('\\') {
        at += step;
        match unit(json, at) {
            Some(0xd800..=0xdbff) if matches!(unit(json, at + 6), Some(0xdc00..=0xdfff)) => at += 12,
            Some(0xd800..=0xdfff) => {
                out.push_str(&json[copied..at]);
                out.push_str("\\ufffd");
                at += 6;
                copied = at;
            }
            Some(_) => at += 6,
            None => at = next_char(json, at + 1),
        }
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    out.push_str(&json[copied..]);
    Cow::Owned(out)
}

/// The code unit of an escape `\uXXXX` that begins at `at`.
fn unit(json: &str, at: usize) -> Option<u32> {
    let digits = json.get(at..at + 6)?.strip_prefix("\\u")?;
    digits.bytes().all(|b| b.is_ascii_hexdigit()).then(|| u32::from_str_radix(digits, 16).ok())?
}

/// The first byte after the character at `at`; the end of the text at most.
fn next_char(text: &str, at: usize) -> usize {
    text[at..].chars().next().map_or(text.len(), |c| at + c.len_utf8())
}

/// `json` without its photos; see [`Strip`].
#[must_use]
pub fn strip(json: &str, what: Strip) -> Cow<'_, str> {
    // Nothing that is shorter in all can hold a text that is too long.
    if json.len() < BASE64_BYTES_MIN {
        return Cow::Borrowed(json);
    }
    let mut out = String::new();
    let mut copied = 0;
    let mut at = 0;
    let mut key = "";
    while let Some(step) = json[at..].find('"') {
        let start = at + step + 1;
        let end = string_end(json, start);
        let text = &json[start..end];
        at = (end + 1).min(json.len());
        if json[at..].trim_start().starts_with(':') {
            key = text;
            continue;
        }
        match verdict(key, text, what) {
            Verdict::Keep => {}
            Verdict::Marker => {
                out.push_str(&json[copied..start]);
                out.push_str(MARKER);
                copied = end;
            }
            Verdict::Cut(kept) => {
                out.push_str(&json[copied..start + kept]);
                out.push_str(&format!(" [{} more bytes]", text.len() - kept));
                copied = end;
            }
        }
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    out.push_str(&json[copied..]);
    Cow::Owned(out)
}

enum Verdict {
    Keep,
    Marker,
    /// Keep so many bytes of the escaped text.
    Cut(usize),
}

fn verdict(key: &str, text: &str, what: Strip) -> Verdict {
    if text.len() < BASE64_BYTES_MIN {
        return Verdict::Keep;
    }
    let named = matches!(key, "data" | "base64");
    let data_url = text.starts_with("data:") && text[..256.min(floor(text, 256))].contains(";base64,");
    match what {
        Strip::Photos if data_url || (named && is_base64(text)) => Verdict::Marker,
        Strip::Photos => Verdict::Keep,
        Strip::Outputs { .. } if data_url || is_base64(text) => Verdict::Marker,
        Strip::Outputs { text_bytes_max } if text.len() > text_bytes_max => Verdict::Cut(cut_at(text, text_bytes_max)),
        Strip::Outputs { .. } => Verdict::Keep,
    }
}

/// Where the string that begins at `start` has its closing quote; the end of the text if it has none.
fn string_end(json: &str, start: usize) -> usize {
    let mut at = start;
    while let Some(step) = json[at..].find(['"', '\\']) {
        at += step;
        if json.as_bytes()[at] == b'"' {
            return at;
        }
        if at + 1 >= json.len() {
            break;
        }
        at = next_char(json, at + 1);
    }
    json.len()
}

fn is_base64(text: &str) -> bool {
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        let fits = match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'+' | b'/' | b'=' | b'-' | b'_' => true,
            b'\\' => matches!(bytes.next(), Some(b'/' | b'n' | b'r')),
            _ => false,
        };
        if !fits {
            return false;
        }
    }
    true
}

/// The longest prefix of an escaped text that has at most `bytes_max` bytes and ends between two characters.
fn cut_at(text: &str, bytes_max: usize) -> usize {
    let mut at = 0;
    loop {
        let next = match text[at..].chars().next() {
            None => return at,
            Some('\\') => match unit(text, at) {
                Some(0xd800..=0xdbff) if matches!(unit(text, at + 6), Some(0xdc00..=0xdfff)) => at + 12,
                Some(_) => at + 6,
                None => next_char(text, (at + 1).min(text.len())),
            },
            Some(c) => at + c.len_utf8(),
        };
        if next > bytes_max {
            return at;
        }
        at = next;
    }
}

/// Shortens `text` to at most `bytes_max` bytes, at a character.
pub fn cut(text: &mut String, bytes_max: usize) {
    text.truncate(floor(text, bytes_max));
}

fn floor(text: &str, bytes_max: usize) -> usize {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUT: Strip = Strip::Outputs { text_bytes_max: 2000 };

    #[test]
    fn lone_surrogates_are_replaced_and_pairs_stay() {
        for (json, want) in [
            (r#""\ud83d""#, r#""\ufffd""#),
            (r#""\ude00x""#, r#""\ufffdx""#),
            (r#""\ud83d\ude00""#, r#""\ud83d\ude00""#),
            (r#""\ud83d\ud83d\ude00""#, r#""\ufffd\ud83d\ude00""#),
            (r#""\\ud83d""#, r#""\\ud83d""#),
            (r#""\\\ud83d""#, r#""\\\ufffd""#),
            (r#""é\nx\u00e9""#, r#""é\nx\u00e9""#),
            (r#"\"#, r#"\"#),
            (r#"\u"#, r#"\u"#),
        ] {
            assert_eq!(surrogates(json), want);
        }
    }

    #[test]
    fn a_photo_goes_and_all_around_it_stays() {
        let data = "iVBORw0KGgo\\/".repeat(200);
        let json = format!(r#"[{{"type":"image","source":{{"data" : "{data}","n":1e400}}}},{{"text":"a \" b"}}]"#);
        let want = format!(r#"[{{"type":"image","source":{{"data" : "{MARKER}","n":1e400}}}},{{"text":"a \" b"}}]"#);
        assert_eq!(strip(&json, Strip::Photos), want);
        assert_eq!(strip(&json, CUT), want);
        let url = format!(r#"{{"url":"data:image\/png;base64,{data}"}}"#);
        assert_eq!(strip(&url, Strip::Photos), format!(r#"{{"url":"{MARKER}"}}"#));
    }

    #[test]
    fn an_answer_that_looks_like_base64_stays_unless_it_is_a_tools_output() {
        let json = format!(r#"{{"text":"{}"}}"#, "x".repeat(5000));
        assert_eq!(strip(&json, Strip::Photos), json);
        assert_eq!(strip(&json, CUT), format!(r#"{{"text":"{MARKER}"}}"#));
        let short = format!(r#"{{"data":"{}","pad":"{}"}}"#, "x".repeat(1023), "y ".repeat(99));
        assert_eq!(strip(&short, CUT), short);
    }

    #[test]
    fn text_that_talks_about_a_photo_comes_back_unchanged() {
        let json = format!(r#"{{"text":"{{\"type\":\"image\",\"data\":\"{}\"}}"}}"#, "iVBO".repeat(400));
        assert_eq!(strip(&json, Strip::Photos), json);
    }

    #[test]
    fn a_long_output_is_cut_between_characters_and_says_how_much_is_gone() {
        for piece in ["a b ", "\\n é", "\\ud83d\\ude00 ", "\\\\ ", "\\\" "] {
            let json = format!(r#"{{"content":"{}"}}"#, piece.repeat(2000));
            let out = strip(&json, CUT);
            let value: serde_json::Value = serde_json::from_str(&out).unwrap();
            assert!(out.len() < 2100, "{piece}");
            assert!(value["content"].as_str().unwrap().ends_with("more bytes]"), "{piece}");
        }
    }

    #[test]
    fn text_that_is_no_json_does_no_harm() {
        for torn in ["\"", "\"\\", "{\"data\":\"", "\"a\":\"\\"] {
            let long = format!("{}{torn}", " ".repeat(2000));
            assert_eq!(strip(&long, CUT), long);
        }
    }
}
