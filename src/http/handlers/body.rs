//! A JSON body to typed fields; every refusal names its field. Leaves what fields mean to the handlers.
//! Rule a change could break: an unknown field is ignored and nothing of it is kept, a known one of the wrong type never
//! is; what is kept of a body is no more than its known fields.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::config::{IMAGES_BASE64_BYTES_MAX, IMAGES_MAX, TEXT_BYTES_MAX};
use crate::error::{Code, Error, Result};
use crate::ids::{MessageId, MessageUuid, SessionId};
use crate::inbox::Image;
use crate::transcript::media::decode_base64;

/// The fields that some route knows.
const NAMES: [&str; 10] = [
    "session",
    "message",
    "messageId",
    "messageUuid",
    "images",
    "seedFeatures",
    "feature",
    "value",
    "thread",
    "description",
];
/// Features of a new conversation that are read; there are fewer.
const SEEDS_MAX: usize = 32;

/// The known fields of a JSON object, not yet read; of a field that comes twice the last counts.
pub struct Fields<'a>([Option<&'a RawValue>; NAMES.len()]);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Fields<'de>, A::Error> {
                let mut fields = Fields(Default::default());
                while let Some(key) = map.next_key::<Cow<'de, str>>()? {
                    match NAMES.iter().position(|name| *name == key) {
                        Some(at) => fields.0[at] = Some(map.next_value()?),
                        None => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(fields)
            }
        }
        from.deserialize_map(Read)
    }
}

/// At most so many items of a list are kept, and all are counted.
struct Few<T, const MAX: usize> {
    items: Vec<T>,
    count: usize,
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Few<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Read<T, const MAX: usize>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Read<T, MAX> {
            type Value = Few<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Few<T, MAX>, A::Error> {
                let mut few = Few { items: Vec::new(), count: 0 };
                while few.count < MAX {
                    let Some(item) = list.next_element()? else { return Ok(few) };
                    few.items.push(item);
                    few.count += 1;
                }
                while list.next_element::<IgnoredAny>()?.is_some() {
                    few.count += 1;
                }
                Ok(few)
            }
        }
        from.deserialize_seq(Read(std::marker::PhantomData))
    }
}

/// A JSON object of texts, of which few are kept.
struct Texts(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Texts, A::Error> {
                let mut texts: Vec<(String, String)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    texts.retain(|(other, _)| *other != name);
                    texts.push((name, value));
                    if texts.len() > SEEDS_MAX {
                        return Err(serde::de::Error::custom("too many"));
                    }
                }
                Ok(Texts(texts))
            }
        }
        from.deserialize_map(Read)
    }
}

impl<'a> Fields<'a> {
    /// Reads the outer object.
    ///
    /// # Errors
    /// `bad_json` for what is not a JSON object in UTF-8.
    pub fn read(body: &'a [u8]) -> Result<Self> {
        serde_json::from_slice(body)
            .map_err(|e| Error::new(Code::BadJson, format!("the body is not a JSON object: {e}")))
    }

    fn optional<T: Deserialize<'a>>(&self, name: &str, shape: &str) -> Result<Option<T>> {
        let at = NAMES.iter().position(|known| *known == name);
        debug_assert!(at.is_some(), "{name} is missing in NAMES");
        let Some(raw) = at.and_then(|at| self.0[at]) else { return Ok(None) };
        serde_json::from_str(raw.get()).map_err(|_| bad(name, &format!("is not {shape}")))
    }

    fn required<T: Deserialize<'a>>(&self, name: &str, shape: &str) -> Result<T> {
        self.optional(name, shape)?.ok_or_else(|| bad(name, &format!("is missing ({shape})")))
    }

    /// A field that must be a text.
    pub fn text(&self, name: &str) -> Result<Cow<'a, str>> {
        self.required(name, "a text")
    }

    /// A field that may be a text.
    pub fn optional_text(&self, name: &str) -> Result<Option<String>> {
        self.optional(name, "a text")
    }

    /// The `session` field as an id.
    pub fn session(&self) -> Result<SessionId> {
        SessionId::parse(&self.text("session")?).map_err(|e| bad("session", &e.to_string()))
    }

    /// The `messageUuid` field.
    pub fn message_uuid(&self) -> Result<MessageUuid> {
        MessageUuid::parse(&self.text("messageUuid")?).map_err(|e| bad("messageUuid", &e.to_string()))
    }

    /// The `messageId` field, if given.
    pub fn message_id(&self) -> Result<Option<MessageId>> {
        self.optional_text("messageId")?
            .map(|id| MessageId::parse(&id).map_err(|e| bad("messageId", &e.to_string())))
            .transpose()
    }

    /// The `message` field within its limit.
    pub fn message(&self) -> Result<String> {
        let text = self.text("message")?;
        if text.len() > TEXT_BYTES_MAX {
            return Err(Error::new(
                Code::TooLarge,
                format!("message has {} bytes, at most {TEXT_BYTES_MAX} may be sent", text.len()),
            ));
        }
        Ok(text.into_owned())
    }

    /// The `images` field, decoded.
    pub fn images(&self) -> Result<Vec<Image>> {
        let few: Option<Few<RawImage<'a>, IMAGES_MAX>> =
            self.optional("images", "a list of {id, mimeType, dataBase64}")?;
        let Some(Few { items: list, count }) = few else { return Ok(Vec::new()) };
        if count > IMAGES_MAX {
            return Err(Error::new(
                Code::TooLarge,
                format!("images has {count} photos, at most {IMAGES_MAX} may be sent in one message"),
            ));
        }
        let all: usize = list.iter().map(|i| i.data_base64.len()).sum();
        if all > IMAGES_BASE64_BYTES_MAX {
            return Err(Error::new(
                Code::TooLarge,
                format!("images have {all} base64 bytes in all, at most {IMAGES_BASE64_BYTES_MAX} may be sent"),
            ));
        }
        list.iter().enumerate().map(|(at, image)| image.decode(at)).collect()
    }

    /// The `seedFeatures` field: name to value.
    pub fn seeds(&self) -> Result<Vec<(String, String)>> {
        let map: Option<Texts> = self.optional("seedFeatures", "an object of texts, of which there are few")?;
        let mut seeds = map.map(|texts| texts.0).unwrap_or_default();
        seeds.sort();
        Ok(seeds)
    }
}

fn bad(field: &str, what: &str) -> Error {
    Error::new(Code::BadField, format!("{field} {what}"))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawImage<'a> {
    #[serde(default, borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    mime_type: Cow<'a, str>,
    #[serde(borrow)]
    data_base64: Cow<'a, str>,
}

impl RawImage<'_> {
    fn decode(&self, at: usize) -> Result<Image> {
        let name = |field: &str| format!("images[{at}].{field}");
        let subtype = self.mime_type.strip_prefix("image/").unwrap_or_default();
        if subtype.is_empty()
            || self.mime_type.len() > 64
            || !subtype.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
        {
            return Err(bad(&name("mimeType"), "is not an image type such as image/png"));
        }
        let bytes = decode_base64(&self.data_base64)
            .filter(|b| !b.is_empty())
            .ok_or_else(|| bad(&name("dataBase64"), "is not the base64 of a photo"))?;
        // `[image#N]` names a photo by number; without one, its place in the list counts from 1.
        let place = u32::try_from(at + 1).unwrap_or(u32::MAX);
        let number = match self.id.map(|raw| raw.get()) {
            None | Some("null") => place,
            Some(text) if text.starts_with('"') => {
                let text: Cow<'_, str> = serde_json::from_str(text).map_err(|_| bad(&name("id"), "is not a text"))?;
                text.trim_start_matches("image").trim_start_matches('#').parse().unwrap_or(place)
            }
            Some(number) => {
                number.parse().map_err(|_| bad(&name("id"), "is neither a text nor a number from 0 to 4294967295"))?
            }
        };
        Ok(Image { number, mime: self.mime_type.clone().into_owned(), bytes: bytes.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(body: &str, read: impl Fn(&Fields<'_>) -> Result<()>) -> (Code, String) {
        let e = Fields::read(body.as_bytes()).and_then(|f| read(&f)).unwrap_err();
        (e.code(), e.text().to_owned())
    }

    #[test]
    fn a_refusal_names_its_field() {
        for body in ["", "[]", "5", "{", "\"x\"", "nul"] {
            assert_eq!(error(body, |_| Ok(())).0, Code::BadJson, "{body}");
        }
        for (body, field) in [
            ("{}", "session"),
            (r#"{"session":5}"#, "session"),
            (r#"{"session":"a/b"}"#, "session"),
            (r#"{"session":"a"}"#, "message"),
            (r#"{"session":"a","message":null}"#, "message"),
            (r#"{"session":"a","message":"","messageId":"é"}"#, "messageId"),
            (r#"{"session":"a","message":"","images":{}}"#, "images"),
            (
                r#"{"session":"a","message":"","images":[{"mimeType":"text/html","dataBase64":"QQ=="}]}"#,
                "images[0].mimeType",
            ),
            (
                r#"{"session":"a","message":"","images":[{"mimeType":"image/png","dataBase64":"?"}]}"#,
                "images[0].dataBase64",
            ),
            (
                r#"{"session":"a","message":"","images":[{"mimeType":"image/png","dataBase64":""}]}"#,
                "images[0].dataBase64",
            ),
            (r#"{"session":"a","message":"","seedFeatures":[1]}"#, "seedFeatures"),
        ] {
            let (code, text) = error(body, |f| {
                f.session()?;
                f.message()?;
                f.message_id()?;
                f.images()?;
                f.seeds().map(|_| ())
            });
            assert_eq!(code, Code::BadField, "{body}");
            assert!(text.starts_with(field), "{body}: {text}");
        }
        let long = format!(r#"{{"message":"{}"}}"#, "x".repeat(TEXT_BYTES_MAX + 1));
        assert_eq!(error(&long, |f| f.message().map(|_| ())).0, Code::TooLarge);
    }

    #[test]
    fn a_photo_is_numbered_by_its_id_or_its_place() {
        let body = br#"{"images":[
            {"id":7,"mimeType":"image/png","dataBase64":"QQ=="},
            {"id":"3","mimeType":"image/png","dataBase64":"QQ=="},
            {"id":"image#4","mimeType":"image/png","dataBase64":"QQ=="},
            {"id":"cat","mimeType":"image/png","dataBase64":"QQ=="},
            {"mimeType":"image/svg+xml","dataBase64":"Qg=="}]}"#;
        let images = Fields::read(body).unwrap().images().unwrap();
        assert_eq!(images.iter().map(|i| i.number).collect::<Vec<_>>(), [7, 3, 4, 4, 5]);
        assert_eq!(&*images[4].bytes, b"B");
    }
}
