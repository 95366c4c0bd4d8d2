//! Which program an agent is, and in which home: what was once seen of one says nothing of another.
//!
//! Made of what can be known without starting the program: the words of its command line, for each of them that names a
//! file the file's identity, size and time of change, and the home it keeps its transcripts in. Leaves the version that
//! a running agent tells of itself to whoever compares. Invariant: two programs that may behave differently have
//! different identities; one that was only moved along with its box keeps its own.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::transcript::media::Digest;

/// Variables that change what the embedded agent does.
const VARIABLES: &[&str] = &["BEEBOX_AGENT_DIRECTIVES", "BEEBOX_AGENT_OWN_HOME", "BEEBOX_AGENT_PROFILE"];

/// See the head of this file: 32 hexadecimal characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AgentIdentity(String);

impl AgentIdentity {
    /// The identity of what `program` starts now, with its transcripts in `home`, for the box `box_dir`. Costs one look
    /// at each file that the command line names.
    #[must_use]
    pub fn of(program: &[OsString], home: &Path, box_dir: &Path) -> Self {
        let mut text = String::new();
        for (at, word) in program.iter().enumerate() {
            let file = if at == 0 { on_path(word) } else { Some(PathBuf::from(word)) };
            match file.and_then(|file| std::fs::metadata(file).ok()).filter(std::fs::Metadata::is_file) {
                Some(m) => {
                    let _ = write!(text, "file {} {} {} {}.{}", m.dev(), m.ino(), m.len(), m.mtime(), m.mtime_nsec());
                }
                None => {
                    let _ = write!(text, "word {}", word.to_string_lossy());
                }
            }
            text.push('\0');
        }
        for name in VARIABLES {
            let _ = write!(text, "{name}={}\0", std::env::var_os(name).unwrap_or_default().to_string_lossy());
        }
        let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let (home, box_dir) = (real(home), real(box_dir));
        // A home inside the box moves with it.
        let _ = match home.strip_prefix(&box_dir) {
            Ok(inside) => write!(text, "in the box {}", inside.display()),
            Err(_) => write!(text, "home {}", home.display()),
        };
        let mut digest = Digest::default();
        digest.feed(text.as_bytes());
        Self(digest.text())
    }

    /// One that was kept.
    #[must_use]
    pub fn from_kept(text: String) -> Self {
        Self(text)
    }

    /// As it is kept.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The file that a command's first word starts.
fn on_path(word: &OsStr) -> Option<PathBuf> {
    if word.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(word));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(word)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_another_word_or_another_home_is_another_agent_and_a_moved_box_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        std::fs::create_dir_all(one.join("home")).unwrap();
        let script = dir.path().join("agent.py");
        std::fs::write(&script, "1").unwrap();
        let program = |word: &str| vec![OsString::from("sh"), script.clone().into(), word.into()];
        let first = AgentIdentity::of(&program("x"), &one.join("home"), &one);
        assert_eq!(first, AgentIdentity::of(&program("x"), &one.join("home"), &one));
        assert_ne!(first, AgentIdentity::of(&program("y"), &one.join("home"), &one));
        assert_ne!(first, AgentIdentity::of(&program("x"), dir.path(), &one));
        std::fs::rename(&one, &two).unwrap();
        assert_eq!(first, AgentIdentity::of(&program("x"), &two.join("home"), &two));
        std::fs::write(&script, "12").unwrap();
        assert_ne!(first, AgentIdentity::of(&program("x"), &two.join("home"), &two));
    }
}
