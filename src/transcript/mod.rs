//! PURE. Reading an agent's transcript: bytes in, values out. `strip` takes photos out of a line while it streams by,
//! `line` cuts the stream into lines and says what each is, `json` reads what is left of a line, `entry` makes what
//! history shows of it, `index` remembers where the shown lines stand, `page` picks a window, `media` decodes a photo.
//!
//! Leaves files, locks and caches to `archive`. Rules a change could break: no line is ever held whole (a bounded
//! buffer per reader); what the first scan counts and what a page shows come from one judgement
//! ([`record::read`]); photos are counted in one place ([`record::Source`] order), by minting and resolving alike.

pub mod entry;
pub mod index;
pub mod json;
pub mod line;
pub mod media;
pub mod page;
pub mod record;
pub mod sniff;
pub mod strip;

#[cfg(test)]
mod strange;

pub use entry::{Block, Entry, EntryType};
pub use media::MediaRef;
pub use page::{Page, Window};

/// Longest stripped line that is parsed, in bytes; what stays longer is shown as a stub (WIRE, Entries).
pub const HELD_BYTES_MAX: usize = 256 * 1024;
/// Longest line that is looked into at all, in bytes; longer ones are stubs and their photos 413.
pub const LINE_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Deepest nesting that is parsed; deeper lines are stubs.
pub const DEPTH_MAX: u32 = 128;
/// Shortest base64 run that never leaves the server inside history, in bytes (CONTRACT §8).
pub const RUN_BYTES_MIN: usize = 1024;

/// The folder name that an agent gives to the transcripts of `box_dir`: every char outside `[0-9A-Za-z]` becomes `-`.
/// Lossy: two boxes can share one.
#[must_use]
pub fn slug(box_dir: &str) -> String {
    // The agent counts UTF-16 units, as its language does: a char outside the basic plane gives two hyphens.
    box_dir
        .chars()
        .flat_map(|c| {
            let (out, times) = if c.is_ascii_alphanumeric() { (c, 1) } else { ('-', c.len_utf16()) };
            std::iter::repeat_n(out, times)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slug_keeps_letters_and_digits_only() {
        for (path, want) in [("/srv/box", "-srv-box"), ("/a-b/c_d.e", "-a-b-c-d-e"), ("/ä/😀", "-----"), ("", "")] {
            assert_eq!(slug(path), want, "{path}");
        }
    }
}
