//! Two small files in the state directory: the box's own conversation, and the conversations it ever had, for people and
//! other tools. Invariant: a reader sees the old or the new one whole, also after a crash.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::Registry;
use crate::clock;
use crate::ids::SessionId;
use crate::session::Context;

/// File that keeps the box's own conversation.
const MAIN_FILE: &str = "chat-session-id.json";
/// File that lists the conversations the box ever had, newest first, for people and other tools.
const HISTORY_FILE: &str = "chat-session-history.json";
/// Conversations the history file lists.
const HISTORY_ROWS_MAX: usize = 200;

impl Registry {
    pub(super) fn write_files(&self) {
        let _alone = self.files.lock();
        let (main, history) = {
            let map = self.sessions.lock();
            let mut rows: Vec<_> = map.known.values().filter(|r| r.thread.is_none()).cloned().collect();
            rows.sort_by_key(|r| std::cmp::Reverse(r.last_used_ms));
            rows.truncate(HISTORY_ROWS_MAX);
            (map.main.clone(), rows)
        };
        let dir = self.context.config.state_dir();
        let history: Vec<_> = history
            .iter()
            .map(|r| json!({"sessionId": r.session, "label": r.label, "lastUsedAt": clock::rfc3339(r.last_used_ms)}))
            .collect();
        for (name, value) in [(MAIN_FILE, json!({"sessionId": main})), (HISTORY_FILE, json!(history))] {
            if let Err(e) = write_whole(&dir.join(name), &value) {
                log::warn!("{name}: {e}");
            }
        }
    }
}

pub(super) fn read_main(context: &Context) -> Option<SessionId> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Main {
        session_id: Option<SessionId>,
    }
    let path = context.config.state_dir().join(MAIN_FILE);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
        Err(e) => {
            log::warn!("{}: {e}", path.display());
            return None;
        }
    };
    match serde_json::from_slice::<Main>(&text) {
        Ok(main) => main.session_id,
        Err(e) => {
            set_aside(&path, &e.to_string());
            None
        }
    }
}

/// Renames a state file that nobody can read, so that it neither stops the start nor is lost.
fn set_aside(path: &PathBuf, why: &str) {
    let aside = path.with_extension(format!("set-aside-{}", clock::now_ms()));
    match std::fs::rename(path, &aside) {
        Ok(()) => log::error!("{} is not what we write ({why}): kept as {}", path.display(), aside.display()),
        Err(e) => log::error!("{} is not what we write ({why}) and cannot be set aside: {e}", path.display()),
    }
}

/// Writes a small file whole: a reader sees the old or the new one, also after a crash.
fn write_whole(path: &Path, value: &serde_json::Value) -> std::io::Result<()> {
    use std::io::Write as _;
    let dir = path.parent().ok_or_else(|| std::io::Error::other("a state file lies in a folder"))?;
    let fresh = path.with_extension("new");
    let mut file = std::fs::File::create(&fresh)?;
    file.write_all(value.to_string().as_bytes())?;
    file.sync_data()?;
    std::fs::rename(&fresh, path)?;
    std::fs::File::open(dir)?.sync_data()
}
