//! The judge: what clients sent, what the agents' transcripts hold, what is pending and what the bus told, held against
//! the promises of the server. Pure but for `disk`.
//!
//! The promises: every send answered 200 is in the transcript exactly once, or visibly pending, cleared or failed; every
//! send without an answer is there at most once; the order of acceptance is kept per session; event ids have no hole and
//! no double, or one explicit resync; every dispatched turn has exactly one end; nothing is delivered or told that was
//! not recorded first. Rule a change could break: a promise that is not checked here is not kept under load.

pub mod disk;
mod evidence;
mod told;
mod violation;

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use super::client::Accepted;
use super::proc::Usage;
pub use evidence::{EventLog, Evidence, Kept, Pending, Sent, Try, mark};
use evidence::{holds_words, marks};
use told::Told;
pub use violation::Violation;

/// The judgement, with the figures that say how much was looked at.
#[derive(Debug, Clone, Default)]
pub struct Verdict {
    /// Broken promises, sorted.
    pub violations: Vec<Violation>,
    /// Messages sent.
    pub messages: usize,
    /// Answered 200 at least once.
    pub accepted: usize,
    /// Never answered 200.
    pub unanswered: usize,
    /// Delivered.
    pub delivered: usize,
    /// Still pending, failed ones included.
    pub pending: usize,
    /// Told as cleared.
    pub cleared: usize,
    /// Turns dispatched.
    pub turns: usize,
    /// Kept events looked at.
    pub events: usize,
    /// Subscribers whose ids were followed, and resyncs among them.
    pub subscribers: usize,
    /// Explicit resyncs.
    pub resyncs: u64,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} messages: {} answered 200, {} not; {} delivered, {} pending, {} cleared; {} turns, {} events, \
             {} subscribers ({} resyncs); violations = {}",
            self.messages,
            self.accepted,
            self.unanswered,
            self.delivered,
            self.pending,
            self.cleared,
            self.turns,
            self.events,
            self.subscribers,
            self.resyncs,
            self.violations.len()
        )
    }
}

/// Where one mark stands in the transcripts.
struct Place<'a> {
    session: &'a str,
    line: usize,
    offset: usize,
}

/// Holds the evidence against the promises.
#[must_use]
pub fn check(evidence: &Evidence) -> Verdict {
    let bus = Told::read(&evidence.log);
    let mut places: HashMap<&str, Vec<Place<'_>>> = HashMap::new();
    for (session, transcript) in &evidence.disk.sessions {
        for (line, user) in transcript.users.iter().enumerate() {
            for (offset, id) in marks(&user.text) {
                places.entry(id).or_default().push(Place { session, line, offset });
            }
        }
    }
    let pending: HashMap<&str, &Pending> = evidence.pending.iter().map(|p| (p.uuid.as_str(), p)).collect();

    let mut verdict = Verdict {
        messages: evidence.sent.len(),
        turns: bus.turns.values().filter(|t| t.dispatched > 0).count(),
        events: evidence.log.len(),
        subscribers: evidence.subscribers.len(),
        resyncs: evidence.subscribers.iter().map(|(_, o)| o.resyncs).sum(),
        pending: evidence.pending.len(),
        ..Verdict::default()
    };
    let mut found = Vec::new();
    for sent in &evidence.sent {
        let there = places.get(sent.message_id.as_str()).map(Vec::as_slice).unwrap_or_default();
        verdict.accepted += usize::from(sent.accepted().is_some());
        verdict.unanswered += usize::from(sent.accepted().is_none());
        verdict.delivered += usize::from(!there.is_empty());
        check_message(sent, there, &bus, &pending, evidence, &mut verdict, &mut found);
    }
    check_order(&evidence.sent, &places, &bus, &mut found);
    check_photos(evidence, &mut found);
    bus.check_turns(evidence.settled, &mut found);
    for id in &evidence.log.differing {
        found.push(Violation::EventDiffers { id: *id });
    }
    for (name, order) in &evidence.subscribers {
        for fault in &order.faults {
            found.push(Violation::EventOrder { subscriber: name.clone(), fault: fault.clone() });
        }
    }
    if evidence.settled {
        for p in evidence.pending.iter().filter(|p| p.state != "failed") {
            found.push(Violation::Stuck { session: p.session.clone(), uuid: p.uuid.clone(), state: p.state.clone() });
        }
    }
    found.sort();
    found.dedup();
    verdict.violations = found;
    verdict
}

fn check_message(
    sent: &Sent,
    there: &[Place<'_>],
    bus: &Told<'_>,
    pending: &HashMap<&str, &Pending>,
    evidence: &Evidence,
    verdict: &mut Verdict,
    found: &mut Vec<Violation>,
) {
    let id = || sent.message_id.clone();
    let accepted = sent.accepted();
    let told = bus.accepted.get(sent.message_id.as_str());

    if there.len() > 1 {
        found.push(Violation::Doubled { message_id: id(), times: there.len(), answered: accepted.is_some() });
    }
    if sent.surely_refused() && !there.is_empty() {
        found.push(Violation::RefusedDelivered { message_id: id() });
    }
    let answers = sent.tries.iter().filter_map(|t| match t {
        Try::Accepted(a) => Some(a),
        Try::Refused { .. } | Try::NoAnswer => None,
    });
    if let Some(first) = accepted {
        let name = |a: &Accepted| format!("{} event {}", a.message_uuid, a.event_id);
        for later in answers {
            if (&later.message_uuid, later.event_id) != (&first.message_uuid, first.event_id) {
                found.push(Violation::RepeatsDiffer { message_id: id(), first: name(first), later: name(later) });
            }
        }
        if evidence.log.complete {
            let event = evidence.log.events.get(&first.event_id);
            let right = event.is_some_and(|k| {
                k.event == "chat-user-message" && k.data["messageUuid"] == first.message_uuid.as_str()
            });
            if !right {
                found.push(Violation::AnswerWithoutEvent { message_id: id(), event_id: first.event_id });
            }
        }
    }
    if let Some(events) = told.filter(|events| events.len() > 1) {
        let events = events.iter().map(|(event, _)| *event).collect();
        found.push(Violation::AcceptedTwice { message_id: id(), events });
    }

    // The server's own name of the message: from the answer, or, for a send without one, from the bus.
    let uuid = accepted
        .map(|a| a.message_uuid.as_str())
        .or_else(|| told.and_then(|events| events.first()).map(|(_, uuid)| *uuid));
    let cleared = uuid.is_some_and(|u| bus.cleared.contains(u));
    verdict.cleared += usize::from(cleared);

    let Some(place) = there.first() else {
        // The agent answered it, and the server told that no transcript has it: delivered, though nothing shows it.
        let of = |u: &str| bus.turns_of.get(u).into_iter().flatten().any(|turn| bus.unrecorded.contains(turn));
        let kept = uuid.is_some_and(|u| pending.contains_key(u) || of(u)) || cleared || sent.discarded;
        if let (Some(a), false) = (accepted, kept) {
            found.push(Violation::Lost { message_id: id(), uuid: a.message_uuid.clone() });
        }
        return;
    };
    let line = &evidence.disk.sessions[place.session].users[place.line];
    if !holds_words(&line.text, &sent.text) {
        found.push(Violation::TextChanged { message_id: id() });
    }
    if let Some(a) = accepted
        && !bus.same_session(&a.session_id, place.session)
    {
        found.push(Violation::WrongSession {
            message_id: id(),
            accepted: a.session_id.clone(),
            delivered: place.session.to_owned(),
        });
    }
    if evidence.log.complete && told.is_none() {
        found.push(Violation::DeliveredUnrecorded { message_id: id() });
    }
    let Some(uuid) = uuid else { return };
    let turns = bus.turns_of.get(uuid).map(Vec::as_slice).unwrap_or_default();
    if evidence.log.complete && turns.is_empty() {
        found.push(Violation::DeliveredUndispatched { message_id: id() });
    }
    // Under our own uuid the server can know that it was recorded; an agent that keeps none leaves it in the dark.
    let ours = !evidence.unseen && line.uuids.iter().any(|u| u == uuid || turns.contains(&u.as_str()));
    if ours && cleared {
        found.push(Violation::ClearedButDelivered { message_id: id() });
    }
    if ours && pending.get(uuid).is_some_and(|p| p.state == "failed") {
        found.push(Violation::FailedButDelivered { message_id: id() });
    }
}

/// Acceptance event, place in the transcript, message id.
type InOrder<'a> = (i64, (usize, usize), &'a str);

/// Per session, the order of first delivery must be the order of acceptance.
fn check_order(sent: &[Sent], places: &HashMap<&str, Vec<Place<'_>>>, bus: &Told<'_>, found: &mut Vec<Violation>) {
    let mut sessions: BTreeMap<&str, Vec<InOrder<'_>>> = BTreeMap::new();
    for message in sent {
        let Some(place) = places.get(message.message_id.as_str()).and_then(|p| p.first()) else {
            continue;
        };
        let told = bus.accepted.get(message.message_id.as_str()).and_then(|events| events.first());
        let event = message.accepted().map(|a| a.event_id).or_else(|| told.map(|(event, _)| *event));
        let uuid = message.accepted().map(|a| a.message_uuid.as_str()).or_else(|| told.map(|(_, uuid)| *uuid));
        // One that had failed and was sent again by hand goes to the end of the queue.
        if uuid.is_some_and(|u| bus.retried.contains(u)) {
            continue;
        }
        if let Some(event) = event {
            sessions.entry(place.session).or_default().push((event, (place.line, place.offset), &message.message_id));
        }
    }
    for (session, mut messages) in sessions {
        messages.sort_unstable();
        for pair in messages.windows(2) {
            if pair[1].1 < pair[0].1 {
                found.push(Violation::OutOfOrder {
                    session: session.to_owned(),
                    first: pair[0].2.to_owned(),
                    second: pair[1].2.to_owned(),
                });
            }
        }
    }
}

/// Each line must hold as many photos as its messages had.
fn check_photos(evidence: &Evidence, found: &mut Vec<Violation>) {
    let photos: HashMap<&str, usize> = evidence.sent.iter().map(|s| (s.message_id.as_str(), s.photos)).collect();
    for (session, transcript) in &evidence.disk.sessions {
        for line in &transcript.users {
            let members: Vec<&str> = marks(&line.text).into_iter().map(|(_, id)| id).collect();
            if members.is_empty() || !members.iter().all(|id| photos.contains_key(id)) {
                continue;
            }
            let sent = members.iter().map(|id| photos[id]).sum();
            if sent != line.photos {
                found.push(Violation::PhotosChanged { session: session.clone(), sent, delivered: line.photos });
            }
        }
    }
}

/// How much more than before is still no leak.
#[derive(Debug, Clone, Copy)]
pub struct Slack {
    /// Threads.
    pub threads: u64,
    /// Open files.
    pub fds: u64,
    /// Live children.
    pub children: u64,
    /// Resident memory in KiB.
    pub rss_kib: u64,
}

impl Default for Slack {
    /// Nothing but memory, of which allocators and caches with a bound keep some.
    fn default() -> Self {
        Self { threads: 0, fds: 0, children: 0, rss_kib: 24 * 1024 }
    }
}

/// What grew from one look at the idle server to the next.
#[must_use]
pub fn leaks(before: &Usage, after: &Usage, slack: Slack) -> Vec<Violation> {
    [
        ("threads", before.threads, after.threads, slack.threads),
        ("open files", before.fds, after.fds, slack.fds),
        ("child processes", before.children, after.children, slack.children),
        ("resident KiB", before.rss_kib, after.rss_kib, slack.rss_kib),
    ]
    .into_iter()
    .filter(|(_, before, after, slack)| *after > before + slack)
    .map(|(what, before, after, _)| Violation::Leak { what: what.to_owned(), before, after })
    .collect()
}

#[cfg(test)]
mod tests;
