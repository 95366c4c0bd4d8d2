//! PURE. The flags a conversation carries: the table, the `<chat-app …/>` tags that change them, the snapshot that
//! tells the agent. Leaves keeping them to `engine`. Rule a change could break: an unknown or illegal value changes
//! nothing, wherever it comes from.

use std::collections::BTreeMap;

/// One flag: its name, the values it may have, the first of them the default.
pub struct Feature {
    /// Its name, as in the tag's attribute.
    pub name: &'static str,
    /// Legal values; the first is the default.
    pub values: &'static [&'static str],
}

/// THE TABLE.
pub const FEATURES: &[Feature] =
    &[Feature { name: "narration", values: &["off", "on"] }, Feature { name: "prose", values: &["on", "off"] }];

/// The flags of one conversation, complete.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(transparent)]
pub struct Features(BTreeMap<&'static str, &'static str>);

impl Default for Features {
    fn default() -> Self {
        Self(FEATURES.iter().filter_map(|f| Some((f.name, *f.values.first()?))).collect())
    }
}

/// Why a flag was not set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadFeature {
    /// No such flag.
    Name,
    /// The flag has other values; here they are.
    Value(&'static [&'static str]),
}

impl Features {
    /// Sets a flag; true if that changed it.
    ///
    /// # Errors
    /// [`BadFeature`] when the table has no such flag or value; nothing changes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<bool, BadFeature> {
        let feature = FEATURES.iter().find(|f| f.name == name).ok_or(BadFeature::Name)?;
        let value = feature.values.iter().find(|v| **v == value).ok_or(BadFeature::Value(feature.values))?;
        Ok(self.0.insert(feature.name, value) != Some(value))
    }

    /// Flags from kept JSON; what the table does not know is left out.
    #[must_use]
    pub fn from_json(json: &str) -> Self {
        let mut features = Self::default();
        if let Ok(kept) = serde_json::from_str::<BTreeMap<String, String>>(json) {
            for (name, value) in kept {
                // An older server's flag that is no more: the default stands.
                let _ = features.set(&name, &value);
            }
        }
        features
    }

    /// The tag that tells the agent: `<chat-app narration="off" prose="on" />`.
    #[must_use]
    pub fn snapshot(&self) -> String {
        let list: Vec<String> = self.0.iter().map(|(n, v)| format!("{n}=\"{v}\"")).collect();
        format!("<chat-app {} />", list.join(" "))
    }
}

/// What the agent sees of a turn's words: the snapshot in front, except before a lone message that starts with `/`
/// (it would hide a slash command).
#[must_use]
pub fn with_snapshot(features: &Features, text: &str, lone: bool) -> String {
    if lone && text.trim_start().starts_with('/') {
        return text.to_owned();
    }
    format!("{}\n{text}", features.snapshot())
}

/// Every `name="value"` of every complete `<chat-app …>` tag in an assistant's text, in order. The tag's name is
/// case-insensitive, self-closing or paired; values are double-quoted; anything malformed ends its tag silently.
#[must_use]
pub fn deltas(text: &str) -> Vec<(String, String)> {
    const TAG: &str = "<chat-app";
    let mut found = Vec::new();
    let lower = text.to_ascii_lowercase();
    let mut from = 0;
    while let Some(at) = lower[from..].find(TAG) {
        let mut rest = from + at + TAG.len();
        from = rest;
        let mut tag = Vec::new();
        let complete = loop {
            let trimmed = text[rest..].trim_start();
            let spaced = trimmed.len() < text.len() - rest;
            rest = text.len() - trimmed.len();
            if trimmed.starts_with("/>") || trimmed.starts_with('>') {
                break true;
            }
            let name_len =
                trimmed.bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'-' || *b == b'_').count();
            let Some(value) = trimmed[name_len..].strip_prefix("=\"").filter(|_| spaced && name_len > 0) else {
                break false;
            };
            let Some(end) = value.find('"') else { break false };
            tag.push((trimmed[..name_len].to_ascii_lowercase(), value[..end].to_owned()));
            rest += name_len + 2 + end + 1;
        };
        if complete {
            found.append(&mut tag);
            from = rest;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_in_an_answer() {
        let table: &[(&str, &[(&str, &str)])] = &[
            ("none", &[]),
            (r#"a <chat-app narration="on"/> b"#, &[("narration", "on")]),
            (r#"<CHAT-App  Narration="on"  prose="off" >x</chat-app>"#, &[("narration", "on"), ("prose", "off")]),
            (r#"<chat-app prose="off"/><chat-app prose="on"/>"#, &[("prose", "off"), ("prose", "on")]),
            (r#"<chat-app narration='on'/>"#, &[]),
            (r#"<chat-app narration="on""#, &[]),
            (r#"<chat-application narration="on"/>"#, &[]),
            (r#"<chat-app"#, &[]),
            (r#"<chat-app narration="o"#, &[]),
            ("İ<chat-app prose=\"off\"/>", &[("prose", "off")]),
        ];
        for (text, expected) in table {
            let found = deltas(text);
            let found: Vec<(&str, &str)> = found.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
            assert_eq!(&found, expected, "{text}");
        }
    }

    #[test]
    fn what_the_table_does_not_know_changes_nothing() {
        let mut features = Features::default();
        assert_eq!(features.set("narration", "on"), Ok(true));
        assert_eq!(features.set("narration", "on"), Ok(false));
        assert_eq!(features.set("colour", "on"), Err(BadFeature::Name));
        assert_eq!(features.set("prose", "maybe"), Err(BadFeature::Value(&["on", "off"])));
        assert_eq!(features.snapshot(), r#"<chat-app narration="on" prose="on" />"#);
        assert_eq!(Features::from_json(r#"{"narration":"on","colour":"red","prose":"maybe"}"#), features);
        assert_eq!(Features::from_json("torn{"), Features::default());
    }

    #[test]
    fn the_snapshot_never_hides_a_slash_command() {
        let mut features = Features::default();
        features.set("prose", "off").unwrap();
        assert_eq!(with_snapshot(&features, "hello", true), "<chat-app narration=\"off\" prose=\"off\" />\nhello");
        assert_eq!(with_snapshot(&features, " /clear", true), " /clear");
        assert!(with_snapshot(&features, "/a\n\nb", false).starts_with("<chat-app "));
    }
}
