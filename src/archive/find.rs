//! Where the transcripts of the box are, and the list of its conversations with a label each.
//!
//! The folder's name is a lossy slug of the box's path: two boxes can share a folder, and each line's `cwd` is the
//! truth. Rule a change could break: a transcript of another box is never read.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::file::{Buffers, Source};
use crate::clock::UnixMs;
use crate::ids::SessionId;
use crate::sync::Mutex;
use crate::transcript::entry::{build, label};
use crate::transcript::line::{Scanner, Seen};
use crate::transcript::record::Kind;
use crate::transcript::slug;

/// Slugs longer than this are cut by some agents, with a hash added.
const SLUG_CHARS_MAX: usize = 200;
/// Bytes of a transcript that are looked at for its label and its box.
const HEAD_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Characters of a label.
const LABEL_CHARS_MAX: usize = 80;
/// Longest path of a box that is believed.
const CWD_BYTES_MAX: usize = 8192;
/// Heads remembered.
const HEADS_MAX: usize = 16 * 1024;
/// Files of one folder that are looked at.
const FILES_MAX: usize = 100_000;

/// A conversation in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its id.
    pub session: SessionId,
    /// The first words of a person in it.
    pub label: Option<String>,
    /// When its transcript was last written.
    pub last_used_ms: UnixMs,
}

/// What the beginning of a transcript says.
#[derive(Debug, Clone, Default)]
struct Head {
    cwd: Option<String>,
    label: Option<String>,
    /// More of the file would not say more.
    settled: bool,
    /// Which file it was, and how large.
    identity: Option<(u64, u64, Option<SystemTime>)>,
    size: u64,
    /// Behind the last line that was looked at.
    end: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Finder {
    projects: PathBuf,
    /// The box as it was named and as it is without links.
    boxes: Vec<String>,
    heads: Mutex<HashMap<PathBuf, Head>>,
    buffers: Buffers,
}

impl Finder {
    pub fn new(agent_home: &Path, box_dir: &Path) -> Self {
        let mut boxes = vec![box_dir.to_string_lossy().into_owned()];
        if let Ok(real) = fs::canonicalize(box_dir) {
            let real = real.to_string_lossy().into_owned();
            if !boxes.contains(&real) {
                boxes.push(real);
            }
        }
        let heads = Mutex::new(HashMap::new());
        Self { projects: agent_home.join("projects"), boxes, heads, buffers: Buffers::default() }
    }

    pub fn path_of(&self, session: &SessionId) -> Option<PathBuf> {
        let name = format!("{session}.jsonl");
        let near = self.boxes.iter().map(|b| self.projects.join(slug(b)).join(&name)).find(|path| self.is_ours(path));
        if near.is_some() || !self.has_long_slug() {
            return near;
        }
        self.folders().into_iter().map(|folder| folder.join(&name)).find(|path| self.is_ours_elsewhere(path))
    }

    fn has_long_slug(&self) -> bool {
        self.boxes.iter().any(|b| slug(b).len() > SLUG_CHARS_MAX)
    }

    fn folders(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(&self.projects) else {
            return Vec::new();
        };
        entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).take(FILES_MAX).collect()
    }

    /// In our own folder a file is ours unless it says that it belongs to a box of the same slug.
    fn is_ours(&self, path: &Path) -> bool {
        let meta = match fs::metadata(path) {
            Ok(meta) => meta,
            Err(e) => return is_there(&e),
        };
        if !meta.is_file() {
            // Something stands where the transcript should: it is there and cannot be read.
            return true;
        }
        match self.head(path, &meta, false).cwd {
            Some(cwd) => self.is_box(&cwd) || !self.boxes.iter().any(|b| slug(b) == slug(&cwd)),
            None => true,
        }
    }

    /// In a foreign folder a file is ours only if it says so.
    fn is_ours_elsewhere(&self, path: &Path) -> bool {
        let Ok(meta) = fs::metadata(path) else {
            return false;
        };
        meta.is_file() && self.head(path, &meta, false).cwd.is_some_and(|cwd| self.is_box(&cwd))
    }

    fn is_box(&self, cwd: &str) -> bool {
        self.boxes.iter().any(|b| cwd.trim_end_matches('/') == b.trim_end_matches('/'))
    }

    pub fn list(&self, rows_max: usize) -> Vec<Listed> {
        let long = self.has_long_slug();
        let mut folders: Vec<PathBuf> = self.boxes.iter().map(|b| self.projects.join(slug(b))).collect();
        if long {
            let near = folders.clone();
            folders.extend(self.folders().into_iter().filter(|f| !near.contains(f)));
        }
        let near = self.boxes.len();
        let mut files = Vec::new();
        for (number, folder) in folders.iter().enumerate() {
            let Ok(entries) = fs::read_dir(folder) else {
                continue;
            };
            for entry in entries.flatten().take(FILES_MAX) {
                let name = entry.file_name();
                let Some(session) =
                    name.to_str().and_then(|n| n.strip_suffix(".jsonl")).and_then(|n| SessionId::parse(n).ok())
                else {
                    continue;
                };
                let Ok(meta) = fs::metadata(entry.path()) else {
                    continue;
                };
                if meta.is_file() {
                    let last_used_ms = meta.mtime() * 1000 + meta.mtime_nsec() / 1_000_000;
                    files.push((last_used_ms, session, entry.path(), number < near));
                }
            }
        }
        files.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let mut rows: Vec<Listed> = Vec::new();
        for (last_used_ms, session, path, here) in files {
            if rows.len() == rows_max {
                break;
            }
            let ours = if here { self.is_ours(&path) } else { self.is_ours_elsewhere(&path) };
            if !ours || rows.iter().any(|r| r.session == session) {
                continue;
            }
            let label = fs::metadata(&path).ok().and_then(|meta| self.head(&path, &meta, true).label);
            rows.push(Listed { session, label, last_used_ms });
        }
        rows
    }

    /// The head as far as it is needed: the label only if `labelled`.
    fn head(&self, path: &Path, meta: &fs::Metadata, labelled: bool) -> Head {
        let identity = (meta.dev(), meta.ino(), meta.created().ok());
        let known = self.heads.lock().get(path).cloned();
        // Another file under the same name, or one that was shortened, is read anew.
        let known = known.filter(|h| h.identity == Some(identity) && meta.len() >= h.size);
        if let Some(head) = &known
            && (head.settled || head.size == meta.len() || (!labelled && head.cwd.is_some()))
        {
            return head.clone();
        }
        let head = self.read_head(path, known.unwrap_or_default());
        let head = Head { identity: Some(identity), ..head.unwrap_or_default() };
        let mut heads = self.heads.lock();
        if heads.len() >= HEADS_MAX {
            heads.clear();
        }
        heads.insert(path.to_owned(), head.clone());
        head
    }

    /// Reads on where `head` ends.
    fn read_head(&self, path: &Path, mut head: Head) -> Option<Head> {
        let source = Source::open(path).ok().flatten()?;
        let session = SessionId::parse("label").ok()?;
        head.size = source.size;
        let mut buffer = self.buffers.take();
        let mut scanner = Scanner::new(head.end);
        let mut at = head.end;
        // A small first read: most heads are in it.
        let mut want = 32 * 1024;
        while at < HEAD_BYTES_MAX && !head.settled {
            let n = source.read_at(&mut buffer[..want], at).ok()?;
            if n == 0 {
                head.end = scanner.held_from();
                return Some(head);
            }
            want = buffer.len();
            at += n as u64;
            scanner.push(&buffer[..n], |raw| {
                if !head.settled {
                    raw.each(|seen| head.learn(&seen, &session));
                }
            });
        }
        head.settled = true;
        Some(head)
    }
}

impl Head {
    fn learn(&mut self, seen: &Seen<'_>, session: &SessionId) {
        let (record, line, cuts, offset) = match seen {
            Seen::Record { record, line, cuts, offset, .. } => (record, line, cuts, *offset),
            Seen::Stub { .. } | Seen::Gap => return,
        };
        if self.cwd.is_none() && !record.sidechain {
            let cwd = record.cwd.and_then(|c| c.short(CWD_BYTES_MAX));
            self.cwd = cwd.map(Cow::into_owned);
        }
        if self.label.is_none() && record.kind == Kind::User {
            let (entry, _) = build(record, line, cuts, session, offset);
            self.label = entry.and_then(|e| label(&e, LABEL_CHARS_MAX));
        }
        self.settled = self.cwd.is_some() && self.label.is_some();
    }
}

/// True if the failure says that something stands there: an unreadable transcript is not a missing one.
fn is_there(e: &io::Error) -> bool {
    !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename)
}
