//! PURE. The lines that go to the agent's stdin: a turn with its photos where the text names them, an interrupt, the
//! answer to a question. Rule a change could break: every line is one JSON object and ends in LF, because a line that
//! is not JSON kills the agent.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Turn;
use crate::inbox::Image;
use crate::transcript::media::encode_base64;

/// The stdin line of a turn: the text alone when it has no photos, else blocks with each photo in the place of its
/// first `[image#N]` or `[imageN]`; photos that the text does not name follow at the end.
#[must_use]
pub fn user_line(turn: &Turn) -> Vec<u8> {
    if turn.images.is_empty() {
        return line_with(turn, &turn.text);
    }
    line_with(turn, &blocks(&turn.text, &turn.images))
}

/// Written straight from what it is made of: a tree of values would be a second copy of it.
fn line_with<T: Serialize>(turn: &Turn, content: &T) -> Vec<u8> {
    #[derive(Serialize)]
    struct Message<'a, T> {
        role: &'a str,
        content: &'a T,
    }
    #[derive(Serialize)]
    struct Line<'a, T> {
        message: Message<'a, T>,
        parent_tool_use_id: Option<()>,
        #[serde(rename = "type")]
        kind: &'a str,
        uuid: &'a str,
    }
    line(&Line {
        message: Message { role: "user", content },
        parent_tool_use_id: None,
        kind: "user",
        uuid: turn.turn.as_str(),
    })
}

/// The stdin line that asks the agent to end its turn.
#[must_use]
pub fn interrupt_line(request_id: &str) -> Vec<u8> {
    line(&json!({
        "type": "control_request",
        "request_id": request_id,
        "request": { "subtype": "interrupt" },
    }))
}

/// The stdin line that lets a tool run with the input it was to get.
#[must_use]
pub fn allow_line(request_id: &str, input: Option<&RawValue>) -> Vec<u8> {
    // The agent refuses a yes that does not repeat the input.
    let input: Value = input.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_else(|| json!({}));
    line(&json!({
        "type": "control_response",
        "response": {
            "subtype": "success",
            "request_id": request_id,
            "response": { "behavior": "allow", "updatedInput": input },
        },
    }))
}

/// The stdin line that refuses a tool: nobody sits at the server to ask.
#[must_use]
pub fn deny_line(request_id: &str, tool_name: &str) -> Vec<u8> {
    let message = format!("the tool {tool_name} needs a permission that nobody is there to give; go on without it");
    line(&json!({
        "type": "control_response",
        "response": {
            "subtype": "success",
            "request_id": request_id,
            "response": { "behavior": "deny", "message": message },
        },
    }))
}

/// The stdin line that answers a request that we do not know.
#[must_use]
pub fn refuse_line(request_id: &str, subtype: &str) -> Vec<u8> {
    line(&json!({
        "type": "control_response",
        "response": {
            "subtype": "error",
            "request_id": request_id,
            "error": format!("this host does not know the request {subtype}"),
        },
    }))
}

fn line(value: &impl Serialize) -> Vec<u8> {
    // Writing texts and numbers to memory cannot fail.
    let mut bytes = serde_json::to_vec(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

fn blocks(text: &str, images: &[Image]) -> Vec<Value> {
    let mut out = Vec::new();
    let mut placed = vec![false; images.len()];
    let mut from = 0;
    let mut at = 0;
    while let Some(step) = text[at..].find("[image") {
        let start = at + step;
        at = start + 1;
        let Some((number, len)) = token(&text[start..]) else {
            continue;
        };
        let Some(index) = images.iter().position(|image| image.number == number) else {
            continue;
        };
        // A second mention stays text: the photo is there already.
        if std::mem::replace(&mut placed[index], true) {
            continue;
        }
        push_text(&mut out, &text[from..start]);
        out.push(image_block(&images[index]));
        at = start + len;
        from = at;
    }
    push_text(&mut out, &text[from..]);
    if !out.iter().any(|block| block["type"] == "text") {
        // The API wants words beside photos, and white space does not count.
        let names: Vec<_> = images.iter().map(|image| format!("[image#{}]", image.number)).collect();
        out.push(json!({ "type": "text", "text": names.join(" ") }));
    }
    out.extend(images.iter().zip(placed).filter(|(_, placed)| !placed).map(|(image, _)| image_block(image)));
    out
}

/// The number and the length of an `[image#N]` or `[imageN]` at the start of `text`.
fn token(text: &str) -> Option<(u32, usize)> {
    let rest = text.strip_prefix("[image")?;
    let digits = rest.strip_prefix('#').unwrap_or(rest);
    let end = digits.find(']')?;
    let number = &digits[..end];
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some((number.parse().ok()?, text.len() - digits.len() + end + 1))
}

fn push_text(out: &mut Vec<Value>, text: &str) {
    if !text.trim().is_empty() {
        out.push(json!({ "type": "text", "text": text }));
    }
}

fn image_block(image: &Image) -> Value {
    json!({
        "type": "image",
        "source": { "type": "base64", "media_type": image.mime, "data": encode_base64(&image.bytes) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::TurnId;

    fn image(number: u32) -> Image {
        Image { number, mime: "image/png".into(), bytes: vec![number as u8; 3].into() }
    }

    /// Text blocks as they are, photos as their first byte.
    fn shape(text: &str, numbers: &[u32]) -> Vec<String> {
        let turn =
            Turn { turn: TurnId::fresh(), text: text.into(), images: numbers.iter().map(|n| image(*n)).collect() };
        let bytes = user_line(&turn);
        assert_eq!(bytes.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(bytes.last(), Some(&b'\n'));
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(value["uuid"], turn.turn.as_str());
        let content = &value["message"]["content"];
        if let Some(text) = content.as_str() {
            return vec![format!("plain {text}")];
        }
        content
            .as_array()
            .unwrap()
            .iter()
            .map(|b| match b["text"].as_str() {
                Some(text) => text.to_owned(),
                None => match b["source"]["data"].as_str().unwrap() {
                    "AQEB" => "<1>".into(),
                    "AgIC" => "<2>".into(),
                    "CQkJ" => "<9>".into(),
                    other => panic!("{other}"),
                },
            })
            .collect()
    }

    #[test]
    fn photos_stand_where_the_text_names_them() {
        let table: &[(&str, &[u32], &[&str])] = &[
            ("hi [image#1]\n\u{2028}", &[], &["plain hi [image#1]\n\u{2028}"]),
            ("", &[], &["plain "]),
            ("a [image#1] b", &[1], &["a ", "<1>", " b"]),
            ("a [image1] b", &[1], &["a ", "<1>", " b"]),
            ("[image#2][image#1]x", &[1, 2], &["<2>", "<1>", "x"]),
            ("no token", &[2, 1], &["no token", "<2>", "<1>"]),
            ("[image#7] [image#1]", &[1], &["[image#7] ", "<1>"]),
            ("[image#1] and [image#1]", &[1], &["<1>", " and [image#1]"]),
            ("[image#] [image#x] [image#-1] [image#1", &[1], &["[image#] [image#x] [image#-1] [image#1", "<1>"]),
            ("[image[image#1]", &[1], &["[image", "<1>"]),
            ("[image#99999999999]", &[1], &["[image#99999999999]", "<1>"]),
            ("", &[1, 2], &["[image#1] [image#2]", "<1>", "<2>"]),
            (" [image#9] \n", &[9], &["<9>", "[image#9]"]),
            ("ä[image#009]ö", &[9], &["ä", "<9>", "ö"]),
        ];
        for (text, numbers, want) in table {
            assert_eq!(shape(text, numbers), *want, "{text:?} {numbers:?}");
        }
    }

    #[test]
    fn requests_and_answers_are_single_json_lines() {
        for (bytes, key) in [
            (interrupt_line("r"), "request_id"),
            (deny_line("r", "Ba\nsh"), "response"),
            (refuse_line("r", "brand_new"), "response"),
        ] {
            let value: Value = serde_json::from_slice(&bytes).unwrap();
            assert!(value.get(key).is_some());
            assert_eq!(bytes.iter().filter(|b| **b == b'\n').count(), 1);
        }
    }
}
