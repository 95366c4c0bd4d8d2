//! Writes a session's transcript as the real agent does: whole lines appended, one write per batch, mode 0600, never
//! fsynced, a line feed first after a torn end. Leaves the shape of lines to `lines`. Rule a change could break: batches
//! reach the file in the order they were given, however late the first of them is due.

use std::collections::{HashSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

/// Longest folder name that is not cut; longer ones get a hash, as the real agent does.
const SLUG_UNITS_MAX: usize = 200;

/// The project folder's name for a working directory: every UTF-16 unit outside `[0-9A-Za-z]` becomes `-`.
pub fn slug(cwd: &str) -> String {
    let mut slug = String::with_capacity(cwd.len());
    for letter in cwd.chars() {
        if letter.is_ascii_alphanumeric() {
            slug.push(letter);
        } else {
            (0..letter.len_utf16()).for_each(|_| slug.push('-'));
        }
    }
    if slug.len() > SLUG_UNITS_MAX {
        let hash = cwd.encode_utf16().fold(0i32, |h, unit| h.wrapping_mul(31).wrapping_add(i32::from(unit)));
        slug.truncate(SLUG_UNITS_MAX);
        slug.push('-');
        slug.push_str(&base36(hash.unsigned_abs()));
    }
    slug
}

fn base36(mut number: u32) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(b"0123456789abcdefghijklmnopqrstuvwxyz"[(number % 36) as usize]);
        number /= 36;
        if number == 0 {
            break;
        }
    }
    digits.iter().rev().map(|digit| char::from(*digit)).collect()
}

/// The file of `session`: in the folder of `cwd`, else in whichever project folder has it.
pub fn find(home: &Path, cwd: &str, session: &str) -> Option<PathBuf> {
    let name = format!("{session}.jsonl");
    let own = home.join("projects").join(slug(cwd)).join(&name);
    if own.is_file() {
        return Some(own);
    }
    let folders = std::fs::read_dir(home.join("projects")).ok()?;
    folders.flatten().map(|folder| folder.path().join(&name)).find(|path| path.is_file())
}

/// A session's file, opened at the first batch.
pub struct Transcript {
    path: PathBuf,
    file: Option<File>,
    late: VecDeque<(Instant, String)>,
    /// Uuid of the last line in the chain of parents.
    pub leaf: Option<String>,
    /// Uuids of user lines that were there when the process began: what is not run again.
    pub known: HashSet<String>,
    /// User turns so far.
    pub turns: u64,
}

#[derive(Deserialize)]
struct Past {
    #[serde(rename = "type")]
    kind: Option<String>,
    uuid: Option<String>,
    #[serde(rename = "promptSource")]
    prompt_source: Option<String>,
}

impl Transcript {
    /// A session whose file does not exist yet.
    pub fn fresh(home: &Path, cwd: &str, session: &str) -> Self {
        Self::at(home.join("projects").join(slug(cwd)).join(format!("{session}.jsonl")))
    }

    fn at(path: PathBuf) -> Self {
        Self { path, file: None, late: VecDeque::new(), leaf: None, known: HashSet::new(), turns: 0 }
    }

    /// A session that goes on in `path`; lines that cannot be read are passed over.
    pub fn resumed(path: PathBuf) -> std::io::Result<Self> {
        let mut lines = BufReader::new(File::open(&path)?);
        let mut this = Self::at(path);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            if let Ok(past) = serde_json::from_slice::<Past>(&line) {
                let kind = past.kind.as_deref().unwrap_or_default();
                if let Some(uuid) = past.uuid {
                    if kind == "user" {
                        this.turns += u64::from(past.prompt_source.is_some());
                        this.known.insert(uuid.clone());
                    }
                    this.leaf = Some(uuid);
                }
            }
            line.clear();
        }
        Ok(this)
    }

    /// Appends whole lines (each with its line feed) at once, or behind what is still late.
    pub fn append(&mut self, lines: String) {
        if self.late.is_empty() {
            self.write(&lines);
        } else {
            self.late.push_back((Instant::now(), lines));
        }
    }

    /// Appends whole lines at `due`; everything given later waits behind them.
    pub fn append_at(&mut self, due: Instant, lines: String) {
        self.late.push_back((due, lines));
    }

    /// When the next late batch is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.late.front().map(|(due, _)| *due)
    }

    /// Writes what is due by `now`.
    pub fn flush_due(&mut self, now: Instant) {
        while let Some((_, lines)) = self.late.pop_front_if(|(due, _)| *due <= now) {
            self.write(&lines);
        }
    }

    /// Writes all that is late: a graceful end loses nothing.
    pub fn flush_all(&mut self) {
        while let Some((_, lines)) = self.late.pop_front() {
            self.write(&lines);
        }
    }

    /// Leaves the first half of `lines` without its end.
    pub fn tear(&mut self, lines: &str) {
        self.flush_all();
        let mut half = lines.len() / 2;
        while !lines.is_char_boundary(half) {
            half -= 1;
        }
        self.write(&lines[..half]);
    }

    fn write(&mut self, lines: &str) {
        // The real agent goes on when its disk is full; so does this one, and says so on stderr.
        if let Err(e) = self.try_write(lines) {
            log_line(&format!("cannot write {}: {e}", self.path.display()));
        }
    }

    fn try_write(&mut self, lines: &str) -> std::io::Result<()> {
        if let Some(file) = &mut self.file {
            return write_lines(file, lines);
        }
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&self.path)?;
        let torn = ends_torn(&mut file)?;
        let file = self.file.insert(file);
        if torn { write_lines(file, &format!("\n{lines}")) } else { write_lines(file, lines) }
    }
}

/// One write, unless a test wants to be between its halves.
fn write_lines(file: &mut File, lines: &str) -> std::io::Result<()> {
    let bytes = lines.as_bytes();
    if !crate::faults::is_armed("mid_line") {
        return file.write_all(bytes);
    }
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    file.write_all(first)?;
    crate::faults::point("mid_line");
    file.write_all(rest)
}

fn ends_torn(file: &mut File) -> std::io::Result<bool> {
    let mut last = [0];
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(false);
    }
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

/// One line on stderr, which the server puts into its log.
pub fn log_line(text: &str) {
    // Nobody may be left to read it.
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_folder_is_named_after_the_working_directory() {
        for (cwd, name) in [("/srv/box", "-srv-box"), ("/a_b/c.d é", "-a-b-c-d--"), ("/😀", "---")] {
            assert_eq!(slug(cwd), name, "{cwd}");
        }
        // As both versions of the real program named it.
        let parts: Vec<String> = (0..10).map(|i| format!("dir_name.{i:02}-abcdefghijklmnop")).collect();
        let cut = slug(&format!("/tmp/real/{}", parts.join("/")));
        assert!(cut.ends_with("-dir-name-06-abcd-ad8hvk"), "{cut}");
        let long = slug(&format!("/{}", "x".repeat(300)));
        assert!(long.starts_with(&format!("-{}-", "x".repeat(199))), "{long}");
    }

    #[test]
    fn batches_keep_their_order_and_a_torn_end_is_closed_first() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = Transcript::fresh(dir.path(), "/srv/box", "s");
        let path = one.path.clone();
        one.append("{\"a\":1}\n".into());
        let now = Instant::now();
        one.append_at(now + Duration::from_secs(60), "{\"b\":2}\n".into());
        one.append("{\"c\":3}\n".into());
        one.flush_due(now);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"a\":1}\n");
        one.flush_all();
        one.tear("{\"torn\":true}\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\":2}\n{\"c\":3}\n{\"torn\"");
        let mut again = Transcript::resumed(path.clone()).unwrap();
        again.append("{\"type\":\"user\",\"uuid\":\"u1\",\"promptSource\":\"sdk\"}\n".into());
        assert!(std::fs::read_to_string(&path).unwrap().contains("{\"torn\"\n{\"type\""));
        let again = Transcript::resumed(path).unwrap();
        assert!(again.known.contains("u1"));
        assert_eq!((again.turns, again.leaf.as_deref()), (1, Some("u1")));
        assert_eq!(find(dir.path(), "/elsewhere", "s"), Some(again.path));
        assert_eq!(find(dir.path(), "/srv/box", "none"), None);
    }
}
