//! Where the transcripts of the box are, and the list of its conversations with a label each.
//!
//! The folder's name is a lossy slug of the box's path: two boxes can share a folder, and each line's `cwd` is the
//! truth. A box that was moved has its older transcripts in the folder of its former path, and the agent goes on in
//! that very file; so a conversation of ours is looked for by its file's name in every project folder, where it was
//! seen last first. Rule a change could break: a transcript of another box is never read. A file is ours if the journal
//! knows the conversation, if its lines name this box or a path this box had, or if the agent's home lies in the box.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
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

/// A file that is named like a transcript.
#[derive(Debug)]
struct Candidate {
    session: SessionId,
    path: PathBuf,
    last_used_ms: UnixMs,
    /// It lies in the folder of the box's own path.
    is_near: bool,
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
    /// Paths that this box had before and that no box has now.
    former: Vec<String>,
    /// The agent's home lies in the box, so every transcript in it is the box's, whatever path its lines name.
    is_own_home: bool,
    /// Conversations that the journal knows, and the folder below `projects` where each was seen last.
    known: Mutex<HashMap<SessionId, Option<String>>>,
    heads: Mutex<HashMap<PathBuf, Head>>,
    buffers: Buffers,
}

impl Finder {
    pub fn new(agent_home: &Path, box_dir: &Path, former: Vec<String>) -> Self {
        let mut boxes = vec![box_dir.to_string_lossy().into_owned()];
        let real = fs::canonicalize(box_dir);
        if let Ok(real) = &real {
            let real = real.to_string_lossy().into_owned();
            if !boxes.contains(&real) {
                boxes.push(real);
            }
        }
        let is_below =
            |home: &Path| home.starts_with(box_dir) || real.as_ref().is_ok_and(|real| home.starts_with(real));
        Self {
            projects: agent_home.join("projects"),
            is_own_home: is_below(agent_home) || fs::canonicalize(agent_home).is_ok_and(|home| is_below(&home)),
            boxes,
            former,
            known: Mutex::default(),
            heads: Mutex::default(),
            buffers: Buffers::default(),
        }
    }

    /// The journal knows this conversation; `folder` is where its transcript was seen last, below `projects`.
    pub fn remember(&self, session: &SessionId, folder: Option<&str>) {
        let mut known = self.known.lock();
        let kept = known.entry(session.clone()).or_default();
        if let Some(folder) = folder {
            *kept = Some(folder.to_owned());
        }
    }

    /// True if the journal knows this conversation.
    pub fn is_known(&self, session: &SessionId) -> bool {
        self.known.lock().contains_key(session)
    }

    /// The folder below `projects` that a transcript lies in, for [`Finder::remember`] in a later life.
    pub fn folder_of(&self, path: &Path) -> Option<String> {
        let folder = path.parent()?;
        (folder.parent() == Some(&self.projects)).then(|| folder.file_name()?.to_str().map(str::to_owned))?
    }

    /// The transcript of `session`: where it was seen last, else in the folder of the box, else wherever a file of its
    /// name is, the one written last if there are several.
    pub fn path_of(&self, session: &SessionId) -> Option<PathBuf> {
        let name = format!("{session}.jsonl");
        let known = self.known.lock().get(session).cloned();
        if let Some(Some(folder)) = &known
            && let path = self.projects.join(folder).join(&name)
            && fs::metadata(&path).is_ok()
        {
            return Some(path);
        }
        let near = self.boxes.iter().map(|b| self.projects.join(slug(b)).join(&name)).find(|path| self.is_ours(path));
        if near.is_some() || (known.is_none() && !self.looks_everywhere()) {
            return near;
        }
        let ours = |path: &PathBuf| {
            if known.is_some() {
                fs::metadata(path).is_ok_and(|meta| meta.is_file())
            } else {
                self.is_ours_elsewhere(path)
            }
        };
        let all = self.folders().into_iter().map(|folder| folder.join(&name)).filter(ours);
        all.max_by_key(|path| fs::metadata(path).and_then(|meta| meta.modified()).ok())
    }

    /// Makes the transcript of `session`, which lies in another project folder, appear in the folder of the box's own path,
    /// by a link: some agents look nowhere else. False if it is there already, or is nowhere.
    pub fn link_here(&self, session: &SessionId) -> io::Result<bool> {
        let (Some(path), Some(real)) = (self.path_of(session), self.boxes.last()) else { return Ok(false) };
        let here = self.projects.join(slug(real));
        let link = here.join(format!("{session}.jsonl"));
        let Some(folder) = self.folder_of(&path) else { return Ok(false) };
        if fs::symlink_metadata(&link).is_ok() {
            return Ok(false);
        }
        fs::create_dir_all(&here)?;
        // Relative: a home that moves along with its box keeps it whole.
        std::os::unix::fs::symlink(Path::new("..").join(folder).join(format!("{session}.jsonl")), &link)?;
        Ok(true)
    }

    /// Every file that may be the transcript of `session`, the one of [`Finder::path_of`] first.
    pub fn paths_of(&self, session: &SessionId) -> Vec<PathBuf> {
        let Some(first) = self.path_of(session) else { return Vec::new() };
        let mut paths = vec![first];
        if self.is_known(session) {
            let name = format!("{session}.jsonl");
            let others = self.folders().into_iter().map(|folder| folder.join(&name));
            paths.extend(
                others.filter(|p| fs::metadata(p).is_ok_and(|m| m.is_file()) && *p != paths[0]).collect::<Vec<_>>(),
            );
        }
        paths
    }

    /// Transcripts in the folder of the box, the one written last first, that belong to no conversation the journal
    /// knows: an agent that named its session itself left one before anybody was told the name.
    pub fn strangers(&self) -> Vec<(SessionId, PathBuf)> {
        let mut found = self.files(&self.boxes.iter().map(|b| self.projects.join(slug(b))).collect::<Vec<_>>());
        found.retain(|file| !self.is_known(&file.session) && self.is_ours(&file.path));
        found.sort_by_key(|file| std::cmp::Reverse(file.last_used_ms));
        found.into_iter().map(|file| (file.session, file.path)).collect()
    }

    /// A transcript of the box can lie in another folder than that of its path.
    fn looks_everywhere(&self) -> bool {
        self.is_own_home || !self.former.is_empty() || self.boxes.iter().any(|b| slug(b).len() > SLUG_CHARS_MAX)
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
        if self.is_own_home {
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
        meta.is_file() && (self.is_own_home || self.head(path, &meta, false).cwd.is_some_and(|cwd| self.is_box(&cwd)))
    }

    fn is_box(&self, cwd: &str) -> bool {
        self.boxes.iter().chain(&self.former).any(|b| cwd.trim_end_matches('/') == b.trim_end_matches('/'))
    }

    /// The files named like transcripts in these folders; a folder may stand twice.
    fn files(&self, folders: &[PathBuf]) -> Vec<Candidate> {
        let mut files = Vec::new();
        for (number, folder) in folders.iter().enumerate().filter(|(n, folder)| !folders[..*n].contains(folder)) {
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
                    let is_near = number < self.boxes.len();
                    files.push(Candidate { session, path: entry.path(), last_used_ms, is_near });
                }
            }
        }
        files
    }

    pub fn list(&self, rows_max: usize) -> Vec<Listed> {
        let mut folders: Vec<PathBuf> = self.boxes.iter().map(|b| self.projects.join(slug(b))).collect();
        if self.looks_everywhere() {
            folders.extend(self.folders());
        }
        let mut files = self.files(&folders);
        files.sort_by(|a, b| b.last_used_ms.cmp(&a.last_used_ms).then_with(|| a.session.cmp(&b.session)));
        let mut rows: Vec<Listed> = Vec::new();
        let mut listed = HashSet::new();
        for Candidate { session, path, last_used_ms, is_near } in files {
            if rows.len() == rows_max {
                break;
            }
            let ours = if is_near { self.is_ours(&path) } else { self.is_ours_elsewhere(&path) };
            if !ours || !listed.insert(session.clone()) {
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
