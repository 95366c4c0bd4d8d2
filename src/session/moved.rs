//! The paths that a box had. Transcripts name the path they were written at, and the agent keeps those of one path in a
//! folder named after it; a box that was moved has conversations under both.
//!
//! Invariant: a path counts as a former one of this box only while no box is there. If one is, this box is its copy, and
//! the conversations that only the agent's home knows are the original's.

use std::path::Path;

/// Name of the state in the journal.
pub const STATE_KEY: &str = "box-paths";
/// Paths that are remembered.
const PATHS_MAX: usize = 16;

/// Where the box was, and what the journal has to keep now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Paths {
    /// Former paths at which there is no box now.
    pub former: Vec<String>,
    /// All paths, today's last, for the journal; `None` if it has them.
    pub to_keep: Option<String>,
}

impl Paths {
    /// From what the journal kept (a JSON array of texts) and where the box is.
    #[must_use]
    pub fn read(kept: Option<&str>, box_dir: &Path) -> Self {
        let mut paths: Vec<String> = kept.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let now = std::fs::canonicalize(box_dir).unwrap_or_else(|_| box_dir.to_owned());
        let now = now.to_string_lossy().into_owned();
        let is_news = paths.last() != Some(&now);
        paths.retain(|path| *path != now);
        paths.push(now);
        let over = paths.len().saturating_sub(PATHS_MAX);
        paths.drain(..over);
        let to_keep = is_news.then(|| serde_json::to_string(&paths).unwrap_or_default());
        paths.pop();
        paths.retain(|path| !Path::new(path).join(".beebox").is_dir());
        Self { former: paths, to_keep }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_box_remembers_where_it_was_and_a_copy_claims_nothing_of_the_original() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        std::fs::create_dir_all(one.join(".beebox")).unwrap();
        let first = Paths::read(None, &one);
        assert_eq!(first.former, Vec::<String>::new());
        let kept = first.to_keep.unwrap();
        assert_eq!(Paths::read(Some(&kept), &one), Paths::default(), "nothing new");
        std::fs::create_dir_all(two.join(".beebox")).unwrap();
        assert_eq!(Paths::read(Some(&kept), &two).former, Vec::<String>::new(), "a copy");
        std::fs::remove_dir_all(&one).unwrap();
        let moved = Paths::read(Some(&kept), &two);
        assert_eq!(moved.former, [one.canonicalize().unwrap_or(one.clone()).to_string_lossy()]);
        // Moved back again.
        std::fs::rename(&two, &one).unwrap();
        let back = Paths::read(moved.to_keep.as_deref(), &one);
        assert_eq!(back.former, [two.to_string_lossy()]);
        assert_eq!(Paths::read(Some("not json"), &one).former, Vec::<String>::new());
    }
}
