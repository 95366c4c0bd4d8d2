//! PURE. One session's waiting messages, and the merge of a queue into one turn.
//! Leaves phases to `lifecycle`, durability to `journal`. Rule a change could break: places leave in the order they
//! were taken, and a place whose record is not committed yet hides itself and everything behind it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use crate::clock::UnixMs;
use crate::ids::MessageUuid;

/// One photo of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The N of the `[image#N]` token that stands for it in the text.
    pub number: u32,
    /// Its media type as the client named it.
    pub mime: String,
    /// The decoded bytes.
    pub bytes: Arc<[u8]>,
}

/// One message of a person, as recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Minted at acceptance.
    pub uuid: MessageUuid,
    /// The words, verbatim.
    pub text: String,
    /// The photos, in the order of the request.
    pub images: Vec<Image>,
    /// Who wrote it, if the text says so.
    pub user: Option<String>,
    /// When it was accepted.
    pub at_ms: UnixMs,
}

impl Message {
    /// What it counts against the queue's limit: text and decoded photos, in bytes.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.text.len() + self.images.iter().map(|i| i.bytes.len()).sum::<usize>()
    }
}

#[derive(Debug, Clone)]
struct Place {
    message: Arc<Message>,
    recorded: bool,
    /// Part of a merged turn that was split: it travels alone.
    alone: bool,
}

/// The waiting messages of one session, oldest first.
#[derive(Debug, Default, Clone)]
pub struct Inbox {
    places: VecDeque<Place>,
    weight_bytes: usize,
}

impl Inbox {
    /// An empty inbox.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the last place for a message whose record is under way.
    pub fn take_place(&mut self, message: Arc<Message>) {
        self.push_back(message, false, false);
    }

    /// Puts a recorded message at the end; one that is `alone` is never merged.
    pub fn push_recorded(&mut self, message: Arc<Message>, alone: bool) {
        self.push_back(message, true, alone);
    }

    fn push_back(&mut self, message: Arc<Message>, recorded: bool, alone: bool) {
        self.weight_bytes += message.weight_bytes();
        self.places.push_back(Place { message, recorded, alone });
    }

    /// Puts recorded messages back to the front, in their order; `alone` ones are never merged again.
    pub fn put_back(&mut self, messages: Vec<Arc<Message>>, alone: bool) {
        for message in messages.into_iter().rev() {
            self.weight_bytes += message.weight_bytes();
            self.places.push_front(Place { message, recorded: true, alone });
        }
    }

    /// The record of `uuid` is committed: its place becomes visible. False if it has no place.
    pub fn recorded(&mut self, uuid: &MessageUuid) -> bool {
        match self.places.iter_mut().rev().find(|p| p.message.uuid == *uuid) {
            Some(place) => {
                place.recorded = true;
                true
            }
            None => false,
        }
    }

    /// Gives the place of `uuid` up. False if it has none.
    pub fn give_up(&mut self, uuid: &MessageUuid) -> bool {
        self.take_out(uuid).is_some()
    }

    fn visible(&self) -> usize {
        self.places.iter().take_while(|p| p.recorded).count()
    }

    /// True if a turn could be made now.
    #[must_use]
    pub fn has_visible(&self) -> bool {
        self.places.front().is_some_and(|p| p.recorded)
    }

    /// True if nothing waits, recorded or under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Recorded messages that wait; places under way do not show.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.places.iter().filter(|p| p.recorded).count()
    }

    /// Ids of the recorded messages that wait, oldest first.
    pub fn recorded_uuids(&self) -> impl Iterator<Item = MessageUuid> + '_ {
        self.places.iter().filter(|p| p.recorded).map(|p| p.message.uuid.clone())
    }

    /// The recorded messages that wait, oldest first.
    #[must_use]
    pub fn recorded_messages(&self) -> Vec<Arc<Message>> {
        self.places.iter().filter(|p| p.recorded).map(|p| Arc::clone(&p.message)).collect()
    }

    /// Takes one message out, wherever it stands; `None` if it is not there.
    pub fn take_out(&mut self, uuid: &MessageUuid) -> Option<Arc<Message>> {
        let at = self.places.iter().position(|p| p.message.uuid == *uuid)?;
        let place = self.places.remove(at)?;
        self.weight_bytes -= place.message.weight_bytes();
        Some(place.message)
    }

    /// All places, recorded or under way.
    #[must_use]
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// What all places weigh, in bytes.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Takes what the next turn carries: every visible place up to the first hidden one, or the single one that
    /// travels alone. Empty if nothing is visible.
    pub fn drain_turn(&mut self) -> Vec<Arc<Message>> {
        let count = match self.places.front() {
            Some(first) if first.alone => usize::from(first.recorded),
            Some(_) | None => self.places.iter().take(self.visible()).take_while(|p| !p.alone).count(),
        };
        self.take(count)
    }

    /// Takes every recorded message, wherever it stands; places under way stay.
    pub fn clear_recorded(&mut self) -> Vec<Arc<Message>> {
        let (gone, kept): (VecDeque<Place>, VecDeque<Place>) = self.places.drain(..).partition(|p| p.recorded);
        self.places = kept;
        gone.into_iter()
            .map(|p| {
                self.weight_bytes -= p.message.weight_bytes();
                p.message
            })
            .collect()
    }

    fn take(&mut self, count: usize) -> Vec<Arc<Message>> {
        self.places
            .drain(..count)
            .map(|p| {
                self.weight_bytes -= p.message.weight_bytes();
                p.message
            })
            .collect()
    }
}

/// Where `[image#N]` or `[imageN]` tokens stand in a text: byte range and N.
fn tokens(text: &str) -> Vec<(std::ops::Range<usize>, u32)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].find("[image") {
        let start = from + at;
        let mut rest = start + "[image".len();
        if text[rest..].starts_with('#') {
            rest += 1;
        }
        let digits = text[rest..].bytes().take_while(u8::is_ascii_digit).count();
        let end = rest + digits;
        from = rest;
        if (1..=9).contains(&digits)
            && text[end..].starts_with(']')
            && let Ok(number) = text[rest..end].parse()
        {
            found.push((start..end + 1, number));
            from = end + 1;
        }
    }
    found
}

/// Merges messages into the words and photos of one turn: texts joined by a blank line, photos in order, their numbers
/// changed only where two could be taken for each other. A single message comes out as it is.
///
/// A token without a photo of its own message stays text, and no photo of another message gets its number.
#[must_use]
pub fn merge(members: &[Arc<Message>]) -> (String, Vec<Image>) {
    if let [only] = members {
        return (only.text.clone(), only.images.clone());
    }
    let known: Vec<BTreeSet<u32>> = members.iter().map(|m| m.images.iter().map(|i| i.number).collect()).collect();
    let marks: Vec<_> = members.iter().map(|m| tokens(&m.text)).collect();
    // A number that some text names without having the photo must stay without one.
    let mut taken: BTreeSet<u32> =
        marks.iter().zip(&known).flat_map(|(m, k)| m.iter().map(|t| t.1).filter(|n| !k.contains(n))).collect();
    let mut free = 1 + known.iter().flatten().chain(taken.iter()).copied().max().unwrap_or(0);

    let mut text = String::new();
    let mut images = Vec::new();
    for (at, member) in members.iter().enumerate() {
        let mut renamed = HashMap::new();
        for image in &member.images {
            let number = if taken.contains(&image.number) {
                free += 1;
                free - 1
            } else {
                image.number
            };
            taken.insert(number);
            renamed.entry(image.number).or_insert(number);
            images.push(Image { number, ..image.clone() });
        }
        if at > 0 {
            text.push_str("\n\n");
        }
        let mut done = 0;
        for (range, number) in &marks[at] {
            if let Some(new) = renamed.get(number).filter(|new| *new != number) {
                text.push_str(&member.text[done..range.start]);
                text.push_str(&format!("[image#{new}]"));
                done = range.end;
            }
        }
        text.push_str(&member.text[done..]);
    }
    (text, images)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(uuid: &str, text: &str, numbers: &[u32]) -> Arc<Message> {
        let images = numbers
            .iter()
            .map(|n| Image { number: *n, mime: "image/png".into(), bytes: uuid.as_bytes().into() })
            .collect();
        Arc::new(Message { uuid: MessageUuid::parse(uuid).unwrap(), text: text.into(), images, user: None, at_ms: 0 })
    }

    fn merged(members: &[Arc<Message>]) -> (String, Vec<u32>) {
        let (text, images) = merge(members);
        (text, images.iter().map(|i| i.number).collect())
    }

    #[test]
    fn one_message_comes_out_verbatim() {
        assert_eq!(
            merged(&[message("a", "x [image#7] [image3]", &[7, 7])]),
            ("x [image#7] [image3]".into(), vec![7, 7])
        );
    }

    #[test]
    fn texts_are_joined_by_a_blank_line_and_numbers_shifted_apart() {
        /// Text and numbers of photos.
        type Part<'a> = (&'a str, &'a [u32]);
        let table: &[(&[Part<'_>], &str, &[u32])] = &[
            (&[("a", &[]), ("b", &[])], "a\n\nb", &[]),
            (&[("see [image#1]", &[1]), ("and [image#1]", &[1])], "see [image#1]\n\nand [image#2]", &[1, 2]),
            (
                &[("[image#1][image#2]", &[1, 2]), ("[image2]", &[1, 2])],
                "[image#1][image#2]\n\n[image#4]",
                &[1, 2, 3, 4],
            ),
            // The first text names a photo it does not have: nobody else's photo may take its place.
            (&[("what is [image#2]?", &[1]), ("x [image#1]", &[1])], "what is [image#2]?\n\nx [image#3]", &[1, 3]),
            (&[("a", &[1]), ("no photo [image#1]", &[])], "a\n\nno photo [image#1]", &[2]),
            (&[("", &[1]), ("", &[1])], "\n\n", &[1, 2]),
            (
                &[("[image#x] [image#] [image#1", &[1]), ("[image#99999999999]", &[])],
                "[image#x] [image#] [image#1\n\n[image#99999999999]",
                &[1],
            ),
        ];
        for (parts, text, numbers) in table {
            let members: Vec<_> = parts.iter().enumerate().map(|(i, (t, n))| message(&format!("m{i}"), t, n)).collect();
            assert_eq!(merged(&members), ((*text).to_owned(), numbers.to_vec()), "{parts:?}");
        }
    }

    #[test]
    fn a_place_under_way_hides_itself_and_what_is_behind_it() {
        let mut inbox = Inbox::new();
        for id in ["a", "b", "c"] {
            inbox.take_place(message(id, id, &[]));
        }
        assert!(!inbox.has_visible());
        assert!(inbox.recorded(&MessageUuid::parse("b").unwrap()));
        assert!(inbox.drain_turn().is_empty());
        assert!(inbox.recorded(&MessageUuid::parse("a").unwrap()));
        let uuids = |v: Vec<Arc<Message>>| v.iter().map(|m| m.uuid.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(uuids(inbox.drain_turn()), "a b");
        assert_eq!(inbox.queued(), 0);
        assert_eq!(inbox.places(), 1);
        assert!(inbox.give_up(&MessageUuid::parse("c").unwrap()));
        assert!(inbox.is_empty());
        assert_eq!(inbox.weight_bytes(), 0);
    }

    #[test]
    fn a_split_turn_travels_one_by_one_before_the_queue() {
        let mut inbox = Inbox::new();
        inbox.push_recorded(message("q", "q", &[]), false);
        inbox.put_back(vec![message("a", "a", &[]), message("b", "b", &[])], true);
        let uuids = |v: Vec<Arc<Message>>| v.iter().map(|m| m.uuid.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(uuids(inbox.drain_turn()), "a");
        assert_eq!(uuids(inbox.drain_turn()), "b");
        assert_eq!(uuids(inbox.drain_turn()), "q");
    }

    #[test]
    fn clearing_takes_what_is_recorded_and_leaves_places_under_way() {
        let mut inbox = Inbox::new();
        inbox.push_recorded(message("a", "a", &[]), false);
        inbox.take_place(message("b", "b", &[]));
        inbox.push_recorded(message("c", "c", &[]), false);
        assert_eq!(inbox.clear_recorded().len(), 2);
        assert_eq!(inbox.places(), 1);
    }
}
