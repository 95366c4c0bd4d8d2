//! PURE. A forgiving JSON reader over one stripped line, without copies until a text is wanted.
//!
//! Forgives what real transcripts hold and strict parsers refuse: lone surrogates, invalid UTF-8, raw control bytes,
//! `NaN`, numbers out of range, double keys (the last counts). Leaves meaning to `record`. Rule a change could break:
//! nothing here panics or recurses past [`DEPTH_MAX`], whatever the bytes.

use std::borrow::Cow;

use memchr::{memchr, memchr2};
use serde_json::{Map, Number, Value};

use super::strip::{Cut, cuts_between, shorten_runs};
use super::{DEPTH_MAX, RUN_BYTES_MIN};

/// Why a value cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bad {
    /// Not JSON at this byte.
    Syntax(usize),
    /// Nested deeper than is read.
    Deep,
}

/// The inside of a string as it stands in the line, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Str<'a> {
    /// Its bytes between the quotes, escapes unread.
    pub raw: &'a [u8],
    /// Where `raw` starts in the stripped line.
    pub at: usize,
}

impl<'a> Str<'a> {
    /// True if it is `text`, written without escapes (keys and words of the format are).
    #[must_use]
    pub fn is(&self, text: &[u8]) -> bool {
        self.raw == text
    }

    /// Its end in the stripped line.
    #[must_use]
    pub fn end(&self) -> usize {
        self.at + self.raw.len()
    }

    /// True if nothing was in it, nor taken out of it.
    #[must_use]
    pub fn is_empty(&self, cuts: &[Cut]) -> bool {
        self.raw.is_empty() && cuts_between(cuts, self.at, self.end()).is_empty()
    }

    /// Its text as far as a person should see it: base64 runs of 1 KiB or more are shortened to a note.
    #[must_use]
    pub fn text(&self, cuts: &[Cut]) -> Cow<'a, str> {
        let inside = cuts_between(cuts, self.at, self.end());
        let plain = if inside.is_empty() {
            unescape(self.raw)
        } else {
            let mut out = String::with_capacity(self.raw.len() + 64 * inside.len());
            let mut from = 0;
            for cut in inside {
                let to = cut.at as usize - self.at;
                out.push_str(&unescape(&self.raw[from..to]));
                out.push_str(&note(u64::from(cut.len)));
                from = to;
            }
            out.push_str(&unescape(&self.raw[from..]));
            Cow::Owned(out)
        };
        if plain.len() < RUN_BYTES_MIN {
            return plain;
        }
        // Escapes other than `\/` hide a run from the strip; here they are gone.
        match shorten_runs(&plain) {
            Some(short) => Cow::Owned(short),
            None => plain,
        }
    }

    /// Its text if it is short and whole, for ids and words.
    #[must_use]
    pub fn short(&self, bytes_max: usize) -> Option<Cow<'a, str>> {
        (self.raw.len() <= bytes_max).then(|| unescape(self.raw))
    }
}

/// What stands in for `bytes` of base64 that history does not carry.
#[must_use]
pub fn note(bytes: u64) -> String {
    format!("[{bytes} bytes of base64 not displayed]")
}

/// Reads escapes; lone surrogates and invalid UTF-8 read as U+FFFD, unknown escapes as their letter.
#[must_use]
pub fn unescape(raw: &[u8]) -> Cow<'_, str> {
    let Some(first) = memchr(b'\\', raw) else {
        return String::from_utf8_lossy(raw);
    };
    let mut out: Vec<u8> = Vec::with_capacity(raw.len());
    let mut i = first;
    out.extend_from_slice(&raw[..first]);
    while i < raw.len() {
        if raw[i] != b'\\' {
            let to = memchr(b'\\', &raw[i..]).map_or(raw.len(), |n| i + n);
            out.extend_from_slice(&raw[i..to]);
            i = to;
            continue;
        }
        let Some(&letter) = raw.get(i + 1) else {
            out.extend_from_slice("\u{fffd}".as_bytes());
            break;
        };
        i += 2;
        match letter {
            b'n' => out.push(b'\n'),
            b't' => out.push(b'\t'),
            b'r' => out.push(b'\r'),
            b'b' => out.push(8),
            b'f' => out.push(12),
            b'u' => {
                let c = match hex4(raw, i) {
                    None => '\u{fffd}',
                    Some(unit) => {
                        i += 4;
                        match unit {
                            0xd800..=0xdbff => match low_half(raw, i) {
                                Some(low) => {
                                    i += 6;
                                    char::from_u32(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00))
                                        .unwrap_or('\u{fffd}')
                                }
                                None => '\u{fffd}',
                            },
                            other => char::from_u32(other).unwrap_or('\u{fffd}'),
                        }
                    }
                };
                out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            }
            other => out.push(other),
        }
    }
    Cow::Owned(match String::from_utf8(out) {
        Ok(text) => text,
        Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
    })
}

fn hex4(raw: &[u8], at: usize) -> Option<u32> {
    let digits = raw.get(at..at + 4)?;
    digits.iter().try_fold(0, |n, d| Some(n * 16 + char::from(*d).to_digit(16)?))
}

fn low_half(raw: &[u8], at: usize) -> Option<u32> {
    if raw.get(at..at + 2)? != b"\\u" {
        return None;
    }
    hex4(raw, at + 2).filter(|low| (0xdc00..=0xdfff).contains(low))
}

/// A place in a stripped line.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    bytes: &'a [u8],
    /// Next byte to read.
    pub at: usize,
    depth: u32,
}

/// What kind of value comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// `{`
    Object,
    /// `[`
    Array,
    /// `"`
    String,
    /// A number or a word.
    Scalar,
}

impl<'a> Cursor<'a> {
    /// At byte `at` of a stripped line, outside of any container.
    #[must_use]
    pub fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at, depth: 0 }
    }

    /// Passes blanks.
    pub fn blanks(&mut self) {
        while let Some(b' ' | b'\t' | b'\r' | b'\n') = self.bytes.get(self.at) {
            self.at += 1;
        }
    }

    fn bad<T>(&self) -> Result<T, Bad> {
        Err(Bad::Syntax(self.at))
    }

    /// What comes next, after blanks.
    ///
    /// # Errors
    /// Nothing comes, or no value can start so.
    pub fn peek(&mut self) -> Result<Next, Bad> {
        self.blanks();
        match self.bytes.get(self.at) {
            Some(b'{') => Ok(Next::Object),
            Some(b'[') => Ok(Next::Array),
            Some(b'"') => Ok(Next::String),
            Some(b'0'..=b'9' | b'-' | b'a'..=b'z' | b'A'..=b'Z') => Ok(Next::Scalar),
            Some(_) | None => self.bad(),
        }
    }

    /// Enters an object or array whose bracket comes next; true if it has a member.
    ///
    /// # Errors
    /// Deeper than is read, or cut short.
    pub fn enter(&mut self) -> Result<bool, Bad> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(Bad::Deep);
        }
        let close = if self.bytes.get(self.at) == Some(&b'{') { b'}' } else { b']' };
        self.at += 1;
        self.blanks();
        if self.bytes.get(self.at) == Some(&close) {
            self.at += 1;
            self.depth -= 1;
            return Ok(false);
        }
        Ok(true)
    }

    /// After a member: true if another follows, false if the container closed.
    ///
    /// # Errors
    /// Neither comes.
    pub fn more(&mut self, close: u8) -> Result<bool, Bad> {
        self.blanks();
        match self.bytes.get(self.at) {
            Some(b',') => {
                self.at += 1;
                Ok(true)
            }
            Some(b) if *b == close => {
                self.at += 1;
                self.depth -= 1;
                Ok(false)
            }
            Some(_) | None => self.bad(),
        }
    }

    /// A string.
    ///
    /// # Errors
    /// No string, or it does not end.
    pub fn string(&mut self) -> Result<Str<'a>, Bad> {
        self.blanks();
        if self.bytes.get(self.at) != Some(&b'"') {
            return self.bad();
        }
        let start = self.at + 1;
        let mut i = start;
        loop {
            match memchr2(b'"', b'\\', self.bytes.get(i..).unwrap_or_default()) {
                None => {
                    self.at = self.bytes.len();
                    return self.bad();
                }
                Some(n) if self.bytes[i + n] == b'"' => {
                    self.at = i + n + 1;
                    return Ok(Str { raw: &self.bytes[start..i + n], at: start });
                }
                Some(n) => i += n + 2,
            }
        }
    }

    /// A key and its colon.
    ///
    /// # Errors
    /// Neither comes.
    pub fn key(&mut self) -> Result<Str<'a>, Bad> {
        let key = self.string()?;
        self.blanks();
        if self.bytes.get(self.at) != Some(&b':') {
            return self.bad();
        }
        self.at += 1;
        Ok(key)
    }

    /// A number or word: `true`, `null`, `-1.5e9`, `NaN`.
    ///
    /// # Errors
    /// Another word.
    pub fn scalar(&mut self) -> Result<&'a [u8], Bad> {
        let start = self.at;
        while let Some(b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'+' | b'.') = self.bytes.get(self.at) {
            self.at += 1;
        }
        let token = &self.bytes[start..self.at];
        let number = || {
            let digits = token.strip_prefix(b"-").unwrap_or(token);
            digits.first().is_some_and(u8::is_ascii_digit)
                && token.iter().all(|b| matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E'))
        };
        match token {
            b"true" | b"false" | b"null" | b"NaN" | b"Infinity" | b"-Infinity" => Ok(token),
            _ if number() => Ok(token),
            _ => {
                self.at = start;
                self.bad()
            }
        }
    }

    /// Passes one value.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn skip(&mut self) -> Result<(), Bad> {
        match self.peek()? {
            Next::String => self.string().map(|_| ()),
            Next::Scalar => self.scalar().map(|_| ()),
            Next::Object => {
                if self.enter()? {
                    loop {
                        self.key()?;
                        self.skip()?;
                        if !self.more(b'}')? {
                            break;
                        }
                    }
                }
                Ok(())
            }
            Next::Array => {
                if self.enter()? {
                    loop {
                        self.skip()?;
                        if !self.more(b']')? {
                            break;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// True if the next value is the word `true`; passes it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn is_true(&mut self) -> Result<bool, Bad> {
        match self.peek()? {
            Next::Scalar => Ok(self.scalar()? == b"true"),
            Next::Object | Next::Array | Next::String => self.skip().map(|()| false),
        }
    }

    /// The next value if it is a string; passes it either way.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn string_or_skip(&mut self) -> Result<Option<Str<'a>>, Bad> {
        match self.peek()? {
            Next::String => self.string().map(Some),
            Next::Object | Next::Array | Next::Scalar => self.skip().map(|()| None),
        }
    }

    /// The whole value, its texts (keys too) shortened like every text of history.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn value(&mut self, cuts: &[Cut]) -> Result<Value, Bad> {
        Ok(match self.peek()? {
            Next::String => Value::String(self.string()?.text(cuts).into_owned()),
            Next::Scalar => number(self.scalar()?),
            Next::Object => {
                let mut map = Map::new();
                if self.enter()? {
                    loop {
                        let key = self.key()?.text(cuts).into_owned();
                        let value = self.value(cuts)?;
                        map.insert(key, value);
                        if !self.more(b'}')? {
                            break;
                        }
                    }
                }
                Value::Object(map)
            }
            Next::Array => {
                let mut list = Vec::new();
                if self.enter()? {
                    loop {
                        list.push(self.value(cuts)?);
                        if !self.more(b']')? {
                            break;
                        }
                    }
                }
                Value::Array(list)
            }
        })
    }
}

fn number(token: &[u8]) -> Value {
    let text = std::str::from_utf8(token).unwrap_or("null");
    match text {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        "null" | "NaN" | "Infinity" | "-Infinity" => Value::Null,
        digits => {
            if let Ok(n) = digits.parse::<i64>() {
                return Value::Number(n.into());
            }
            if let Ok(n) = digits.parse::<u64>() {
                return Value::Number(n.into());
            }
            // Out of range reads as nothing: JSON has no way to say infinity.
            digits.parse::<f64>().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &[u8]) -> Result<Value, Bad> {
        let mut cursor = Cursor::new(text, 0);
        let value = cursor.value(&[])?;
        cursor.blanks();
        if cursor.at == text.len() { Ok(value) } else { Err(Bad::Syntax(cursor.at)) }
    }

    #[test]
    fn reads_what_serde_json_reads_and_more() {
        for text in [
            r#"{"a":[1,-2.5,1e3,true,false,null,"x\n\u00e9\ud83d\ude00\/"],"b":{}, "c" : [ ] }"#,
            r#"18446744073709551615"#,
            r#""""#,
        ] {
            assert_eq!(value(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap(), "{text}");
        }
        for (text, want) in [
            (&br#""a\ud83d b""#[..], "\"a\u{fffd} b\""),
            (br#""\ude00\ud83d\ud83d\ude00""#, "\"\u{fffd}\u{fffd}😀\""),
            (br#""\u12""#, "\"\u{fffd}12\""),
            (b"\"a\xffb\0\"", "\"a\u{fffd}b\\u0000\""),
            (b"[NaN,1e400,-Infinity]", "[null,null,null]"),
            (br#"{"a":1,"a":2}"#, r#"{"a":2}"#),
        ] {
            assert_eq!(value(text).unwrap(), serde_json::from_str::<Value>(want).unwrap(), "{want}");
        }
        assert!(value(b"123456789012345678901234567890").unwrap().is_f64());
    }

    #[test]
    fn refuses_what_is_torn_and_what_is_too_deep() {
        for text in
            [&b""[..], b"{", b"[1", b"{\"a\"", b"{\"a\":", b"\"a", b"\"a\\", b"{a:1}", b"[1 2]", b"tru", b"}", b"-"]
        {
            assert!(matches!(value(text), Err(Bad::Syntax(_))), "{text:?}");
        }
        let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(value(deep(128).as_bytes()).is_ok());
        assert_eq!(value(deep(129).as_bytes()), Err(Bad::Deep));
        assert_eq!(value(deep(200_000).as_bytes()), Err(Bad::Deep));
    }
}
