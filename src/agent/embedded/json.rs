//! Writes JSON objects whose keys keep the order they were given in, since readers of the real agent's lines are tested
//! against that order. Leaves reading to serde. Rule a change could break: a string is always escaped here, and `raw`
//! takes only what is JSON already.

use std::fmt::{Display, Write as _};

/// A JSON object under construction.
#[derive(Debug, Clone, Default)]
pub struct Obj {
    text: String,
}

/// `value` as a JSON string with its quotes.
pub fn quoted(value: &str) -> String {
    let mut text = String::with_capacity(value.len() + 2);
    quote_into(&mut text, value);
    text
}

fn quote_into(text: &mut String, value: &str) {
    text.push('"');
    let mut from = 0;
    for (at, byte) in value.bytes().enumerate() {
        let short = match byte {
            b'"' => "\\\"",
            b'\\' => "\\\\",
            b'\n' => "\\n",
            b'\r' => "\\r",
            b'\t' => "\\t",
            0..0x20 => "",
            _ => continue,
        };
        text.push_str(&value[from..at]);
        if short.is_empty() {
            // Writing to a String cannot fail.
            let _ = write!(text, "\\u{byte:04x}");
        } else {
            text.push_str(short);
        }
        from = at + 1;
    }
    text.push_str(&value[from..]);
    text.push('"');
}

/// `values` as a JSON array of strings.
pub fn strings<S: AsRef<str>>(values: &[S]) -> String {
    let mut text = String::from("[");
    for value in values {
        if text.len() > 1 {
            text.push(',');
        }
        quote_into(&mut text, value.as_ref());
    }
    text.push(']');
    text
}

impl Obj {
    /// An object without keys.
    pub fn new() -> Self {
        Self::default()
    }

    fn key(&mut self, key: &str) {
        self.text.push(if self.text.is_empty() { '{' } else { ',' });
        quote_into(&mut self.text, key);
        self.text.push(':');
    }

    /// A string.
    pub fn str(mut self, key: &str, value: &str) -> Self {
        self.key(key);
        quote_into(&mut self.text, value);
        self
    }

    /// Anything whose `Display` is JSON: numbers, booleans, text that is JSON already.
    pub fn raw(mut self, key: &str, json: impl Display) -> Self {
        self.key(key);
        let _ = write!(self.text, "{json}");
        self
    }

    /// A string or null.
    pub fn str_or_null(self, key: &str, value: Option<&str>) -> Self {
        match value {
            Some(value) => self.str(key, value),
            None => self.raw(key, "null"),
        }
    }

    /// A string, or no key at all.
    pub fn str_if(self, key: &str, value: Option<&str>) -> Self {
        match value {
            Some(value) => self.str(key, value),
            None => self,
        }
    }

    /// What is JSON already, or no key at all.
    pub fn raw_if(self, key: &str, json: Option<&str>) -> Self {
        match json {
            Some(json) => self.raw(key, json),
            None => self,
        }
    }

    /// What `more` adds, if `when`.
    pub fn when(self, when: bool, more: impl FnOnce(Self) -> Self) -> Self {
        if when { more(self) } else { self }
    }

    /// The finished object.
    pub fn end(mut self) -> String {
        self.text.push_str(if self.text.is_empty() { "{}" } else { "}" });
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_order_and_strings_are_escaped() {
        let text = Obj::new().str("z", "a\"\\\n\u{1}é").raw("a", 5).str_or_null("n", None).str_if("no", None).end();
        assert_eq!(text, "{\"z\":\"a\\\"\\\\\\n\\u0001é\",\"a\":5,\"n\":null}");
        let back: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back["z"], "a\"\\\n\u{1}é");
        assert_eq!(Obj::new().end(), "{}");
        assert_eq!(strings(&["a", "b"]), r#"["a","b"]"#);
    }
}
