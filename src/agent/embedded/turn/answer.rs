//! What a turn answers, and how it is cut into deltas. Pure.

use std::fmt::Write as _;

use super::Turn;

/// Words repeated in an answer at most, in characters.
const ECHO_CHARS_MAX: usize = 2000;

impl Turn {
    pub(super) fn answer(&self) -> String {
        if let Some(say) = &self.script.say {
            return say.clone();
        }
        if let Some(flood) = self.script.flood {
            return (0..flood).fold(String::new(), |mut text, n| {
                // Sixteen bytes a delta.
                let _ = write!(text, "flood {n:>9} ");
                text
            });
        }
        if let Some(size) = self.script.size {
            return filler(size);
        }
        // The server's snapshot of flags is no word of the person's.
        let said = crate::transcript::record::without_chat_app(&self.words);
        let said = said.trim();
        let mut answer = match said.split_whitespace().count() {
            0 => "You wrote no words.".to_owned(),
            1 => format!("You wrote 1 word: {}", shortened(said)),
            words => format!("You wrote {words} words: {}", shortened(said)),
        };
        for (n, photo) in self.photos.iter().enumerate() {
            let _ = write!(answer, "\nPhoto {}: {}.", n + 1, photo.words());
        }
        for folded in &self.folded {
            let _ = write!(answer, "\nMeanwhile you wrote: {}", shortened(&folded.words));
        }
        answer
    }
}

fn shortened(words: &str) -> String {
    match words.char_indices().nth(ECHO_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words.to_owned(),
    }
}

/// `size` bytes of numbered lines, so that a reader sees what is missing.
fn filler(size: usize) -> String {
    let mut text = String::with_capacity(size + 32);
    let mut n = 0;
    while text.len() < size {
        n += 1;
        let _ = write!(text, "{n} the quick brown fox; ");
    }
    text.truncate(size);
    text
}

/// Cuts a text into `count` pieces of nearly the same size, at character borders.
pub(super) struct Pieces<'a> {
    pub(super) text: &'a str,
    pub(super) count: usize,
    pub(super) done: usize,
    pub(super) from: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        while self.done < self.count {
            self.done += 1;
            let mut end = self.text.len() * self.done / self.count;
            while !self.text.is_char_boundary(end) {
                end += 1;
            }
            if end > self.from {
                let piece = &self.text[self.from..end];
                self.from = end;
                return Some(piece);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_characters_and_add_up() {
        for (text, count) in [("", 1), ("a", 1), ("abc", 3), ("ääää", 8), ("one two three four", 5), ("😀😀", 3)]
        {
            let pieces: Vec<&str> = Pieces { text, count, done: 0, from: 0 }.collect();
            assert_eq!(pieces.concat(), text);
            assert!(pieces.len() <= count, "{text}");
        }
        assert_eq!(Pieces { text: "abcdef", count: 3, done: 0, from: 0 }.collect::<Vec<_>>(), ["ab", "cd", "ef"]);
    }

    #[test]
    fn fillers_have_the_size_that_was_asked_for() {
        for size in [0, 1, 25, 1000] {
            assert_eq!(filler(size).len(), size);
        }
        assert_eq!(shortened(&"é".repeat(3000)).chars().count(), ECHO_CHARS_MAX + 1);
    }
}
