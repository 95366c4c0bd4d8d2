//! A reader of transcripts of its own, slow and simple, so that the checker does not trust the server's.
//! Rule a change could break: it shares no code with the server's readers.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;

use serde_json::Value;

/// One line in which words of a person reached the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserLine {
    /// Its uuid, and those of messages the agent merged into it or folded into a turn.
    pub uuids: Vec<String>,
    /// All its text.
    pub text: String,
    /// Photos in it.
    pub photos: usize,
}

/// What one transcript says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transcript {
    /// Lines with a person's words, in file order.
    pub users: Vec<UserLine>,
    /// Lines of the agent.
    pub assistants: u64,
    /// Lines that could not be read.
    pub bad: u64,
}

/// Every transcript of a box, by session id.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    /// The transcripts.
    pub sessions: BTreeMap<String, Transcript>,
}

impl Disk {
    /// Reads the transcripts under an agent's home whose session `wanted` likes.
    ///
    /// # Errors
    /// What the kernel says; a home that is not there yet is an empty disk.
    pub fn read(agent_home: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<Self> {
        let mut disk = Self::default();
        let projects = match std::fs::read_dir(agent_home.join("projects")) {
            Ok(projects) => projects,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(disk),
            Err(e) => return Err(e),
        };
        for project in projects {
            let project = project?.path();
            if !project.is_dir() {
                continue;
            }
            for file in std::fs::read_dir(project)? {
                let path = file?.path();
                let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
                if let Some(session) = name.strip_suffix(".jsonl").filter(|s| wanted(s)) {
                    let mut bytes = Vec::new();
                    std::fs::File::open(&path)?.read_to_end(&mut bytes)?;
                    disk.sessions.insert(session.to_owned(), parse(&bytes));
                }
            }
        }
        Ok(disk)
    }
}

/// Reads the whole lines of a transcript.
#[must_use]
pub fn parse(bytes: &[u8]) -> Transcript {
    let mut transcript = Transcript::default();
    // What follows the last line end is a line still being written.
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    for line in bytes[..whole].split(|b| *b == b'\n') {
        let line = String::from_utf8_lossy(line);
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let parsed = serde_json::from_str::<Value>(line).ok().or_else(|| glued(line));
        match parsed {
            Some(value) if value.is_object() => take_line(&mut transcript, &value),
            Some(_) | None => transcript.bad += 1,
        }
    }
    transcript
}

/// The record at the end of a line that begins with a torn one.
fn glued(line: &str) -> Option<Value> {
    ["{\"parentUuid\"", "{\"type\"", "{\"uuid\""]
        .iter()
        .filter_map(|start| line.rfind(start))
        .filter(|at| *at > 0)
        .find_map(|at| serde_json::from_str(&line[at..]).ok())
}

fn take_line(transcript: &mut Transcript, line: &Value) {
    let is = |key: &str| line[key].as_bool().unwrap_or(false);
    if is("isSidechain") || is("isMeta") || is("isCompactSummary") {
        return;
    }
    match line["type"].as_str().unwrap_or_default() {
        "assistant" => transcript.assistants += 1,
        "user" => {
            let (text, photos) = words(&line["message"]["content"]);
            if text.is_empty() && photos == 0 {
                return;
            }
            let mut uuids: Vec<String> = line["uuid"].as_str().map(str::to_owned).into_iter().collect();
            uuids.extend(strings(&line["mergedSendUuids"]));
            transcript.users.push(UserLine { uuids, text, photos });
        }
        "attachment" if line["attachment"]["type"] == "queued_command" => {
            let inner = &line["attachment"];
            let (text, photos) = words(&inner["prompt"]);
            let uuids = inner["source_uuid"].as_str().map(str::to_owned).into_iter().collect();
            transcript.users.push(UserLine { uuids, text, photos });
        }
        _ => {}
    }
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect()
}

/// Text and number of photos of a content that is a string or blocks; what a tool said is not a person's.
fn words(content: &Value) -> (String, usize) {
    if let Some(text) = content.as_str() {
        return (text.to_owned(), 0);
    }
    let (mut text, mut photos) = (String::new(), 0);
    for block in content.as_array().into_iter().flatten() {
        match block["type"].as_str().unwrap_or_default() {
            "text" => {
                if !text.is_empty() {
                    text.push('\n');
                }
                text.push_str(block["text"].as_str().unwrap_or_default());
            }
            "image" => photos += 1,
            _ => {}
        }
    }
    (text, photos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_person_are_found_wherever_the_agent_puts_them() {
        let file = concat!(
            r#"{"type":"queue-operation","operation":"enqueue","content":"one"}"#,
            "\n",
            r#"{"type":"user","message":{"role":"user","content":"one"},"uuid":"u1"}"#,
            "\n\n",
            r#"{"type":"user","isMeta":true,"message":{"content":"meta"},"uuid":"u2"}"#,
            "\n",
            r#"{"type":"assistant","message":{"content":[{"type":"text","text":"two"}]},"uuid":"a1"}"#,
            "\n",
            r#"{"type":"user","message":{"content":[{"type":"tool_result","content":"x"}]},"uuid":"u3"}"#,
            "\n",
            r#"{"type":"user","message":{"content":[{"type":"image","source":{}},{"type":"text","text":"see"}]},"mergedSendUuids":["m"],"uuid":"u4"}"#,
            "\n",
            r#"{"type":"attachment","attachment":{"type":"queued_command","prompt":"folded","source_uuid":"q"},"uuid":"u5"}"#,
            "\n",
            r#"{"parentUuid":null,"type":"user","mess{"parentUuid":"x","type":"user","message":{"content":"glued"},"uuid":"u6"}"#,
            "\n",
            "torn {\n",
            r#"{"type":"user","message":{"content":"not yet"},"uuid":"u7"}"#,
        );
        let t = parse(file.as_bytes());
        let got: Vec<(String, String, usize)> =
            t.users.iter().map(|u| (u.uuids.join("+"), u.text.clone(), u.photos)).collect();
        let want = [("u1", "one", 0), ("u4+m", "see", 1), ("q", "folded", 0), ("u6", "glued", 0)];
        let want: Vec<(String, String, usize)> =
            want.iter().map(|(a, b, c)| ((*a).to_owned(), (*b).to_owned(), *c)).collect();
        assert_eq!(got, want);
        assert_eq!((t.assistants, t.bad), (1, 1));
    }
}
