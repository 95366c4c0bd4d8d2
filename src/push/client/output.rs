//! Writing to a client: new frames in one piece for all who have everything before them, else what the ring or a
//! batch has for this one. Rule a change could break: every byte that went out is accounted for once, and what cuts a
//! frame off is always its own rest.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, send, sendmsg, shutdown};

use super::{Client, Kind, Place, Round, Want};
use crate::bus::{Frame, Reading, Taken};
use crate::error::Result;
use crate::ids::EventId;
use crate::push::Counters;

/// Frames of one write: what an array of slices on the stack holds.
const WRITE_FRAMES_MAX: usize = 64;
/// Bytes after which a write takes no further frame.
const WRITE_BYTES_MAX: usize = 64 * 1024;

/// New frames, for the many clients that have everything before them.
#[derive(Default)]
pub(in crate::push) struct LiveFrames {
    /// Number of the first.
    pub(in crate::push) start: u64,
    pub(in crate::push) frames: Vec<Arc<Frame>>,
    /// Id of the first kept one and of the last; 0 if none is.
    pub(in crate::push) first_kept: EventId,
    pub(in crate::push) last_kept: EventId,
    /// The kept ids have no gap.
    pub(in crate::push) dense: bool,
    /// All of them in one piece, once somebody needs it.
    pub(in crate::push) joined_ws: Vec<u8>,
    pub(in crate::push) joined_sse: Vec<u8>,
}

impl LiveFrames {
    pub(in crate::push) fn set(&mut self, start: u64) {
        self.start = start;
        self.joined_ws.clear();
        self.joined_sse.clear();
        let mut kept = self.frames.iter().map(|f| f.id()).filter(|id| *id > 0);
        self.first_kept = kept.next().unwrap_or(0);
        self.last_kept = self.first_kept;
        self.dense = true;
        for id in kept {
            self.dense &= id == self.last_kept + 1;
            self.last_kept = id;
        }
    }

    fn joined(&mut self, sse: bool, epoch: &str) -> &[u8] {
        if let [only] = &self.frames[..] {
            return if sse { only.sse(epoch) } else { only.ws() };
        }
        let joined = if sse { &mut self.joined_sse } else { &mut self.joined_ws };
        if joined.is_empty() {
            for frame in &self.frames {
                joined.extend_from_slice(if sse { frame.sse(epoch) } else { frame.ws() });
            }
        }
        joined
    }
}

impl Client {
    /// New frames are there.
    pub(in crate::push) fn live(&mut self, live: &mut LiveFrames, round: &mut Round<'_>) {
        let Place::Live = self.place else { return };
        if self.blocked {
            return;
        }
        let fits = self.partial.is_none()
            && self.control.is_empty()
            && self.reader.next == live.start
            && self.reader.transient_from <= live.start
            && (live.first_kept == 0 || (live.dense && self.reader.after + 1 == live.first_kept));
        if !fits {
            return self.pump(round);
        }
        let epoch = round.shared.bus.epoch();
        let sse = self.is_sse();
        let bytes = live.joined(sse, epoch);
        let total = bytes.len();
        let sent = match send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(_) => {
                self.gone = true;
                return;
            }
        };
        Counters::add(&round.shared.counters.bytes_sent, sent as u64);
        if sent == total {
            self.reader.next = live.start + live.frames.len() as u64;
            self.reader.after = self.reader.after.max(live.last_kept);
            Counters::add(&round.shared.counters.frames_sent, live.frames.len() as u64);
            return;
        }
        round.taken.clear();
        let numbered = live.frames.iter().zip(live.start..);
        round.taken.extend(numbered.map(|(frame, number)| Taken { frame: frame.clone(), number, dropped: 0 }));
        self.account_frames(sent, round);
        self.block(round);
    }

    fn block(&mut self, round: &Round<'_>) {
        self.blocked = true;
        self.progress_ms = round.now_ms;
    }

    /// Writes until there is nothing to write or the socket is full.
    pub(in crate::push) fn pump(&mut self, round: &mut Round<'_>) {
        while !self.gone && !self.blocked {
            self.take_frames(round);
            if self.partial.is_none() && self.control.is_empty() && round.taken.is_empty() {
                self.nothing_left();
                return;
            }
            let (total, sent) = match self.write(round) {
                (total, Ok(sent)) => (total, sent),
                (total, Err(Errno::AGAIN)) => (total, 0),
                (_, Err(Errno::INTR)) => continue,
                (_, Err(_)) => {
                    self.gone = true;
                    return;
                }
            };
            Counters::add(&round.shared.counters.bytes_sent, sent as u64);
            self.account(sent, round);
            if sent < total {
                self.block(round);
            }
        }
    }

    /// Puts the next frames for this client into `round.taken`.
    fn take_frames(&mut self, round: &mut Round<'_>) {
        round.taken.clear();
        let bus = &round.shared.bus;
        if let Place::Replaying(Some((batch, passed))) = &self.place
            && *passed == batch.frames.len()
        {
            if self.partial.is_some() {
                // One batch or one frame is what a client may hold: the next is asked for when this is out.
                return;
            }
            self.place = Place::Replaying(None);
            if bus.join(&mut self.reader) {
                self.place = Place::Live;
            } else {
                self.want = Some(Want::RowsAfter(self.reader.after));
            }
        }
        match &self.place {
            Place::Live => {
                let (seen, lost) = bus.read(&mut self.reader, WRITE_FRAMES_MAX, WRITE_BYTES_MAX, round.taken);
                Counters::add(&round.shared.counters.transient_dropped, lost);
                if seen == Reading::Behind {
                    self.reader.transient_from = self.reader.transient_from.max(self.reader.next);
                    self.want = Some(Want::RowsAfter(self.reader.after));
                    self.place = Place::Replaying(None);
                }
            }
            Place::Replaying(Some((batch, passed))) => {
                let rest = batch.frames[*passed..].iter().take(WRITE_FRAMES_MAX);
                round.taken.extend(rest.map(|frame| Taken { frame: frame.clone(), number: 0, dropped: 0 }));
            }
            Place::Opening(_) | Place::Seeking(_) | Place::Replaying(None) | Place::Closing(_) => {}
        }
    }

    fn write(&self, round: &Round<'_>) -> (usize, Result<usize, Errno>) {
        let epoch = round.shared.bus.epoch();
        let mut slices = [IoSlice::new(&[]); WRITE_FRAMES_MAX + 2];
        let (mut count, mut total) = (0, 0);
        let rest = self.partial.as_ref().map(|(frame, at)| &self.bytes_of(frame, epoch)[*at..]);
        let control = (!self.control.is_empty()).then_some(&self.control[..]);
        let frames = round.taken.iter().map(|t| self.bytes_of(&t.frame, epoch));
        for bytes in rest.into_iter().chain(control).chain(frames) {
            slices[count] = IoSlice::new(bytes);
            count += 1;
            total += bytes.len();
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = match &slices[..count] {
            [only] => send(&self.stream, only, flags),
            several => sendmsg(&self.stream, several, &mut SendAncillaryBuffer::default(), flags),
        };
        (total, sent)
    }

    fn bytes_of<'f>(&self, frame: &'f Frame, epoch: &str) -> &'f [u8] {
        match self.kind {
            Kind::WebSocket(_) => frame.ws(),
            Kind::Sse => frame.sse(epoch),
        }
    }

    /// Notes that `sent` bytes went out: of the unfinished frame, of the control bytes, of the frames taken.
    fn account(&mut self, mut sent: usize, round: &mut Round<'_>) {
        if let Some((frame, at)) = &mut self.partial {
            let len = match self.kind {
                Kind::WebSocket(_) => frame.ws().len(),
                Kind::Sse => frame.sse(round.shared.bus.epoch()).len(),
            };
            let took = sent.min(len - *at);
            *at += took;
            sent -= took;
            if *at < len {
                return;
            }
            self.partial = None;
        }
        let took = sent.min(self.control.len());
        if took == self.control.len() {
            self.control = Vec::new();
        } else {
            self.control.drain(..took);
        }
        self.account_frames(sent - took, round);
    }

    fn account_frames(&mut self, mut sent: usize, round: &mut Round<'_>) {
        let epoch = round.shared.bus.epoch();
        let mut passed_now = 0;
        for taken in round.taken.iter() {
            if sent == 0 {
                break;
            }
            let len = self.bytes_of(&taken.frame, epoch).len();
            if let Place::Live = self.place {
                self.reader.pass(taken);
                Counters::add(&round.shared.counters.transient_dropped, u64::from(taken.dropped));
            } else {
                self.reader.after = taken.frame.id();
            }
            passed_now += 1;
            if sent < len {
                self.partial = Some((taken.frame.clone(), sent));
                break;
            }
            sent -= len;
        }
        if let Place::Replaying(Some((_, passed))) = &mut self.place {
            *passed += passed_now;
        }
        round.shared.counters.frames_sent.fetch_add(passed_now as u64, Ordering::Relaxed);
        // Frames must not outlive the write because of us.
        round.taken.clear();
    }

    /// All is written: a closing client is shut, then awaited.
    fn nothing_left(&mut self) {
        if let Place::Closing(closing) = &mut self.place
            && !closing.shut
        {
            closing.shut = true;
            self.gone |= closing.peer_is_done || shutdown(&self.stream, Shutdown::Write).is_err();
        }
    }
}
