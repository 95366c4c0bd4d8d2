//! The journal through its door, on real files: acceptance, claims, moves, recovery, trouble, other programs.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::ids::MessageId;
use crate::inbox::Image;
use crate::sync::{Receiver, bounded};

/// Longest wait of any test, so that a hang reads as a failure.
const LIMIT: Duration = Duration::from_secs(20);

/// A publisher that keeps what it is told.
#[derive(Default)]
pub(super) struct Heard(Mutex<Vec<(EventId, String, serde_json::Value)>>);

impl Publisher for Heard {
    fn publish_kept(&self, id: EventId, event: &str, data: &serde_json::Value, at: &str) {
        assert!(at.ends_with('Z'), "{at}");
        self.0.lock().push((id, event.to_owned(), data.clone()));
    }
}

impl Heard {
    pub(super) fn ids(&self) -> Vec<EventId> {
        self.0.lock().iter().map(|(id, _, _)| *id).collect()
    }
}

/// An open journal in a directory of its own.
pub(super) struct Desk {
    pub dir: Arc<TempDir>,
    pub journal: Journal,
    pub recovered: Recovered,
    pub heard: Arc<Heard>,
}

impl Desk {
    pub fn new() -> Self {
        Self::with(JournalOptions::default())
    }

    pub fn with(options: JournalOptions) -> Self {
        Self::open(Arc::new(TempDir::new().unwrap()), options)
    }

    pub fn open(dir: Arc<TempDir>, options: JournalOptions) -> Self {
        let heard = Arc::new(Heard::default());
        let (journal, recovered) = Journal::open(dir.path(), options, heard.clone()).unwrap();
        Self { dir, journal, recovered, heard }
    }

    /// Closes and opens again.
    pub fn again(self) -> Self {
        assert!(self.journal.shutdown(LIMIT));
        Self::open(self.dir, JournalOptions::default())
    }

    pub fn place(&self) -> Places {
        self.journal.reserve(1).unwrap()
    }

    pub fn accept(&self, a: Acceptance) -> Result<AcceptOutcome> {
        let place = self.journal.reserve(1)?;
        later(|done| self.journal.accept(a, place, done))
    }

    pub fn submit(&self, changes: Vec<Change>, events: Vec<KeptEvent>) -> Result<Vec<EventId>> {
        let place = self.journal.reserve(1)?;
        later(|done| self.journal.submit(Unit { changes, events }, place, done))
    }

    /// Accepts `text` and returns the message.
    pub fn say(&self, session: &str, text: &str) -> MessageUuid {
        let a = acceptance(session, text, None);
        let uuid = a.message.uuid.clone();
        assert!(matches!(self.accept(a).unwrap(), AcceptOutcome::Recorded { .. }));
        uuid
    }

    pub fn dispatch(&self, session: &str, members: &[&MessageUuid]) -> TurnId {
        let turn = TurnId::of(members[0]);
        let members = members.iter().map(|m| (*m).clone()).collect();
        let change = Change::Dispatch { session: sid(session), turn: turn.clone(), members, attempt: 1, agent: None };
        self.submit(vec![change], vec![event("chat-message-dispatched")]).unwrap();
        turn
    }

    pub fn states(&self, session: &str) -> Vec<(String, &'static str)> {
        let rows = self.journal.pending(&sid(session)).unwrap();
        rows.into_iter().map(|row| (row.text, row.state.word())).collect()
    }

    fn sql(&self) -> Connection {
        let db = Connection::open(schema::path_in(self.dir.path())).unwrap();
        db.busy_timeout(LIMIT).unwrap();
        db
    }
}

/// Waits for the one call of a `done`.
pub(super) fn later<T: Send + 'static>(ask: impl FnOnce(Done<T>)) -> Result<T> {
    start(ask).recv_timeout(LIMIT).unwrap()
}

fn start<T: Send + 'static>(ask: impl FnOnce(Done<T>)) -> Receiver<Result<T>> {
    let (tell, hear) = bounded(1);
    ask(Box::new(move |result| tell.send(result).unwrap()));
    hear
}

pub(super) fn sid(text: &str) -> SessionId {
    SessionId::parse(text).unwrap()
}

pub(super) fn event(name: &'static str) -> KeptEvent {
    KeptEvent { event: name, data: json!({"sessionId": "s"}) }
}

pub(super) fn acceptance(session: &str, text: &str, claim: Option<&str>) -> Acceptance {
    with_images(session, text, claim, Vec::new())
}

fn with_images(session: &str, text: &str, claim: Option<&str>, images: Vec<Image>) -> Acceptance {
    let message =
        Message { uuid: MessageUuid::fresh(), text: text.into(), images, user: None, at_ms: crate::clock::now_ms() };
    Acceptance {
        session: sid(session),
        claim: claim
            .map(|id| Claim { id: MessageId::parse(id).unwrap(), hash: content_hash(text, &message.images, &[]) }),
        thread: None,
        queued: false,
        turn: Some(TurnId::of(&message.uuid)),
        event: KeptEvent { event: "chat-user-message", data: json!({"messageUuid": message.uuid, "message": text}) },
        message: Arc::new(message),
    }
}

fn png(number: u32, bytes: &[u8]) -> Image {
    Image { number, mime: "image/png".into(), bytes: bytes.into() }
}

#[test]
fn an_accepted_message_is_there_after_a_restart_in_the_order_of_acceptance() {
    let desk = Desk::new();
    let epoch = desk.recovered.epoch.clone();
    let uuids: Vec<_> = ["one", "two", "three"].iter().map(|text| desk.say("s", text)).collect();
    let other = desk.say("t", "elsewhere");
    assert_eq!(desk.heard.ids(), [1, 2, 3, 4]);
    let desk = desk.again();
    assert_eq!(desk.recovered.epoch, epoch);
    assert_eq!(desk.recovered.head, 4);
    let owed = desk.recovered.owed.iter().find(|o| o.session == sid("s")).unwrap();
    assert_eq!(owed.queue.iter().map(|m| m.uuid.clone()).collect::<Vec<_>>(), uuids);
    assert!(owed.turn.is_none() && owed.failed.is_empty());
    assert_eq!(desk.recovered.owed.iter().find(|o| o.session == sid("t")).unwrap().queue[0].uuid, other);
}

#[test]
fn a_repeat_has_the_first_answers_ids_before_during_and_after_a_restart() {
    let desk = Desk::new();
    let first = acceptance("s", "hello", Some("key"));
    let uuid = first.message.uuid.clone();
    let turn = first.turn.clone();
    // Two at once, in whatever batches: one is recorded, the other shares its outcome.
    let (a, b) = (desk.place(), desk.place());
    let one = start(|done| desk.journal.accept(first, a, done));
    let two = start(|done| desk.journal.accept(acceptance("new", "hello", Some("key")), b, done));
    assert_eq!(one.recv_timeout(LIMIT).unwrap().unwrap(), AcceptOutcome::Recorded { event_id: 1 });
    let answer =
        ClaimAnswer { session: sid("s"), message_uuid: uuid.clone(), event_id: 1, turn, state: MessageState::Accepted };
    assert_eq!(two.recv_timeout(LIMIT).unwrap().unwrap(), AcceptOutcome::Repeat(answer.clone()));
    let claim = acceptance("s", "hello", Some("key")).claim.unwrap();
    assert_eq!(desk.journal.claim_answer(&claim).unwrap(), Some(Ok(answer.clone())));
    let desk = desk.again();
    assert_eq!(desk.journal.claim_answer(&claim).unwrap(), Some(Ok(answer.clone())));
    let turn = desk.dispatch("s", &[&uuid]);
    let dispatched = ClaimAnswer { state: MessageState::Dispatched, ..answer.clone() };
    assert_eq!(desk.journal.claim_answer(&claim).unwrap(), Some(Ok(dispatched.clone())));
    assert_eq!(desk.accept(acceptance("s", "hello", Some("key"))).unwrap(), AcceptOutcome::Repeat(dispatched));
    desk.submit(vec![Change::Done { turn, outcome: "success".into() }], vec![]).unwrap();
    let done = ClaimAnswer { state: MessageState::Done, ..answer };
    assert_eq!(desk.accept(acceptance("s", "hello", Some("key"))).unwrap(), AcceptOutcome::Repeat(done));
    assert_eq!(desk.journal.stats().accepted, 0);
}

#[test]
fn the_same_key_with_other_content_is_a_conflict_and_records_nothing() {
    let desk = Desk::new();
    desk.accept(acceptance("s", "hello", Some("key"))).unwrap();
    assert_eq!(desk.accept(acceptance("s", "hullo", Some("key"))).unwrap(), AcceptOutcome::Conflict);
    let photo = with_images("s", "hello", Some("key"), vec![png(1, b"x")]);
    assert_eq!(desk.journal.claim_answer(photo.claim.as_ref().unwrap()).unwrap(), Some(Err(Conflict)));
    assert_eq!(desk.accept(photo).unwrap(), AcceptOutcome::Conflict);
    assert_eq!(desk.states("s").len(), 1);
    assert_eq!(desk.heard.ids(), [1]);
}

#[test]
fn every_part_of_the_content_is_in_its_hash() {
    let image = png(1, b"bytes");
    let base = content_hash("text", std::slice::from_ref(&image), &["seed"]);
    let others = [
        content_hash("texu", std::slice::from_ref(&image), &["seed"]),
        content_hash("text", &[png(2, b"bytes")], &["seed"]),
        content_hash("text", &[png(1, b"bytez")], &["seed"]),
        content_hash("text", &[Image { mime: "image/jpeg".into(), ..image.clone() }], &["seed"]),
        content_hash("text", &[image.clone(), image.clone()], &["seed"]),
        content_hash("text", &[], &["seed"]),
        content_hash("text", std::slice::from_ref(&image), &["see", "d"]),
        content_hash("text", std::slice::from_ref(&image), &[]),
    ];
    assert!(others.iter().all(|other| *other != base));
}

#[test]
fn photos_are_kept_while_owed_and_dropped_when_done() {
    let desk = Desk::new();
    let big = vec![7; 300_000];
    let a = with_images("s", "[image#1] [image#2]", None, vec![png(1, b"small"), png(2, &big)]);
    let uuid = a.message.uuid.clone();
    let whole = a.message.clone();
    desk.accept(a).unwrap();
    let rows = desk.journal.pending(&sid("s")).unwrap();
    assert_eq!(rows[0].images[1], ImageMeta { number: 2, mime: "image/png".into(), bytes: 300_000 });
    assert_eq!(desk.journal.pending_image(&uuid, 1).unwrap(), Some(("image/png".into(), big)));
    assert_eq!(desk.journal.pending_image(&uuid, 2).unwrap(), None);
    assert_eq!(desk.journal.message(&uuid).unwrap(), Some(whole.clone()));
    let desk = desk.again();
    assert_eq!(desk.recovered.owed[0].queue, [whole]);
    let turn = desk.dispatch("s", &[&uuid]);
    desk.submit(vec![Change::Done { turn, outcome: "success".into() }], vec![]).unwrap();
    assert_eq!(desk.journal.pending_image(&uuid, 0).unwrap(), None);
    let left: i64 = desk.sql().query_row("SELECT count(*) FROM image", [], |row| row.get(0)).unwrap();
    assert_eq!(left, 0);
}

#[test]
fn a_turn_goes_through_dispatch_recall_dispatch_and_done_with_its_members_and_id() {
    let desk = Desk::new();
    let (a, b) = (desk.say("s", "a"), desk.say("s", "b"));
    let turn = desk.dispatch("s", &[&a, &b]);
    let c = desk.say("s", "c");
    assert_eq!(desk.states("s").iter().map(|(_, s)| *s).collect::<Vec<_>>(), ["dispatched", "dispatched", "accepted"]);
    let desk = desk.again();
    let owed = desk.recovered.owed[0].turn.as_ref().unwrap();
    assert_eq!((owed.attempts, owed.stopped, owed.dispatched), (1, false, true));
    assert_eq!(owed.members.iter().map(|m| &m.uuid).collect::<Vec<_>>(), [&a, &b]);
    assert_eq!(desk.recovered.owed[0].queue[0].uuid, c);
    desk.submit(vec![Change::Recall { turn: turn.clone() }], vec![event("chat-turn-failed")]).unwrap();
    assert_eq!(desk.states("s").iter().map(|(_, s)| *s).collect::<Vec<_>>(), ["accepted"; 3]);
    assert_eq!(desk.journal.pending(&sid("s")).unwrap()[1].turn, Some(turn.clone()));
    let desk = desk.again();
    assert!(!desk.recovered.owed[0].turn.as_ref().unwrap().dispatched);
    let again = |members: Vec<MessageUuid>| Change::Dispatch {
        session: sid("s"),
        turn: turn.clone(),
        members,
        attempt: 2,
        agent: None,
    };
    // Another set of members under the same id would be a re-merge.
    assert!(desk.submit(vec![again(vec![a.clone(), b.clone(), c.clone()])], vec![]).is_err());
    desk.submit(vec![again(vec![a.clone(), b.clone()]), Change::Stopped { turn: turn.clone() }], vec![]).unwrap();
    let desk = desk.again();
    let owed = desk.recovered.owed[0].turn.as_ref().unwrap();
    assert_eq!((owed.attempts, owed.stopped), (2, true));
    desk.submit(vec![Change::Done { turn: turn.clone(), outcome: "interrupted".into() }], vec![]).unwrap();
    assert_eq!(desk.states("s"), [("c".to_owned(), "accepted")]);
    let delivered = desk.journal.delivered_within(&sid("s"), 60_000).unwrap();
    assert_eq!(delivered, [(a, turn.clone()), (b, turn)]);
    assert_eq!(desk.journal.delivered_within(&sid("s"), -1000).unwrap(), []);
}

#[test]
fn a_second_turn_is_refused_while_one_is_unfinished_and_nothing_of_its_unit_is_written() {
    let desk = Desk::new();
    let (a, b) = (desk.say("s", "a"), desk.say("s", "b"));
    desk.dispatch("s", &[&a]);
    let second =
        Change::Dispatch { session: sid("s"), turn: TurnId::of(&b), members: vec![b.clone()], attempt: 1, agent: None };
    let row = Change::SetState { key: "k".into(), value: "v".into() };
    let refused = desk.submit(vec![row, second], vec![event("never")]).unwrap_err();
    assert_eq!(refused.code(), Code::Internal);
    assert_eq!(desk.states("s")[1].1, "accepted");
    let desk = desk.again();
    assert!(desk.recovered.state.is_empty());
    assert_eq!(desk.recovered.head, 3);
}

#[test]
fn a_split_turn_is_single_messages_in_order_before_the_queue() {
    let desk = Desk::new();
    let (a, b) = (desk.say("s", "a"), desk.say("s", "b"));
    let turn = desk.dispatch("s", &[&a, &b]);
    let c = desk.say("s", "c");
    desk.submit(vec![Change::Recall { turn: turn.clone() }, Change::Split { turn }], vec![]).unwrap();
    let desk = desk.again();
    let owed = &desk.recovered.owed[0];
    assert!(owed.turn.is_none());
    assert_eq!(owed.queue.iter().map(|m| &m.uuid).collect::<Vec<_>>(), [&a, &b, &c]);
    assert_eq!(owed.alone, [a.clone(), b]);
    desk.dispatch("s", &[&a]);
}

#[test]
fn a_failed_message_stays_until_a_person_retries_or_discards_it() {
    let desk = Desk::new();
    let first = acceptance("s", "a", Some("key"));
    let a = first.message.uuid.clone();
    desk.accept(first).unwrap();
    let b = desk.say("s", "b");
    let not_failed = desk.submit(vec![Change::Retry { message: a.clone() }], vec![]).unwrap_err();
    assert_eq!(not_failed.code(), Code::NotFailed);
    let unknown = desk.submit(vec![Change::Discard { message: MessageUuid::fresh() }], vec![]).unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let turn = desk.dispatch("s", &[&a]);
    let fail = Change::Fail { messages: vec![a.clone()], error: "the agent died three times".into() };
    desk.submit(vec![Change::Recall { turn }, fail.clone()], vec![event("chat-turn-failed")]).unwrap();
    let rows = desk.journal.pending(&sid("s")).unwrap();
    assert_eq!((rows[0].state, rows[0].error.as_deref()), (MessageState::Failed, Some("the agent died three times")));
    assert_eq!(rows[0].turn, None);
    let desk = desk.again();
    assert_eq!(desk.recovered.owed[0].failed, std::slice::from_ref(&a));
    assert_eq!(desk.recovered.owed[0].queue.len(), 1);
    desk.submit(vec![Change::Retry { message: a.clone() }], vec![]).unwrap();
    let c = desk.say("s", "c");
    assert_eq!(desk.states("s").iter().map(|(t, _)| t.as_str()).collect::<Vec<_>>(), ["b", "a", "c"]);
    let desk = desk.again();
    assert_eq!(desk.recovered.owed[0].queue.iter().map(|m| &m.uuid).collect::<Vec<_>>(), [&b, &a, &c]);
    desk.submit(vec![fail, Change::Discard { message: a }], vec![event("chat-queue-cleared")]).unwrap();
    let claim = acceptance("s", "a", Some("key")).claim.unwrap();
    assert_eq!(desk.journal.claim_answer(&claim).unwrap().unwrap().unwrap().state, MessageState::Cleared);
    assert_eq!(desk.states("s").len(), 2);
}

#[test]
fn clearing_takes_what_is_there_and_passes_over_what_is_gone() {
    let desk = Desk::new();
    let (a, b) = (desk.say("s", "a"), desk.say("s", "b"));
    let turn = desk.dispatch("s", &[&a, &b]);
    let gone = MessageUuid::fresh();
    let clear = Change::Clear { messages: vec![a, gone], why: "stopped".into() };
    desk.submit(vec![clear], vec![event("chat-queue-cleared")]).unwrap();
    assert_eq!(desk.states("s"), [("b".to_owned(), "dispatched")]);
    let desk = desk.again();
    let owed = desk.recovered.owed[0].turn.as_ref().unwrap();
    assert_eq!((owed.turn.clone(), owed.members.len()), (turn.clone(), 1));
    desk.submit(vec![Change::Clear { messages: vec![b], why: "stopped".into() }], vec![]).unwrap();
    let desk = desk.again();
    assert!(desk.recovered.owed.is_empty());
    // The end of a turn without messages of ours is no error.
    desk.submit(vec![Change::Done { turn, outcome: "success".into() }], vec![event("chat-complete")]).unwrap();
}

#[test]
fn facts_of_sessions_survive_a_restart() {
    let desk = Desk::new();
    let row = SessionRow {
        session: sid("s"),
        thread: Some("telegram/7".into()),
        created_ms: 1,
        last_used_ms: 2,
        label: Some("a label".into()),
        resumable: true,
        folder: Some("-srv-box".into()),
        anchor: Some(TurnId::fresh()),
    };
    let a = desk.say("s", "a");
    let changes = vec![
        Change::Session(row.clone()),
        Change::Agent { session: sid("s"), pid: 4_000_000, start_time: 99 },
        Change::Agent { session: sid("t"), pid: 5, start_time: 1 },
        Change::AgentGone { session: sid("t") },
        Change::SetState { key: "main".into(), value: "s".into() },
        Change::Features { session: sid("s"), json: "{}".into() },
        Change::Thread { thread: "telegram/7".into(), json: "{\"n\":1}".into() },
        Change::ThreadAnswer { message: a.clone(), responses_json: "[\"hi\"]".into(), success: true },
        Change::Alias { was: sid("s"), now: sid("late") },
    ];
    desk.submit(changes, vec![event("chat-session-assigned")]).unwrap();
    let desk = desk.again();
    let r = &desk.recovered;
    assert_eq!(r.sessions, [row]);
    assert_eq!(r.agents, [(sid("s"), 4_000_000, 99)]);
    assert_eq!(r.state, [("main".to_owned(), "s".to_owned())]);
    assert_eq!(r.features, [(sid("s"), "{}".to_owned())]);
    assert_eq!(r.threads, [("telegram/7".to_owned(), "{\"n\":1}".to_owned())]);
    assert_eq!(r.aliases, [(sid("s"), sid("late"))]);
    // What is owed moved along.
    assert_eq!(r.owed[0].session, sid("late"));
    let answer = KeptAnswer { responses_json: "[\"hi\"]".into(), success: true };
    assert_eq!(desk.journal.thread_answer(&a).unwrap(), Some(answer));
    let turn = desk.dispatch("late", &[&a]);
    desk.submit(vec![Change::Done { turn, outcome: "success".into() }], vec![]).unwrap();
    assert_eq!(desk.journal.delivered_within(&sid("late"), i64::MAX).unwrap().len(), 1);
}

#[test]
fn events_are_told_in_order_and_read_back_as_told() {
    let desk = Desk::new();
    assert_eq!(desk.journal.bounds().unwrap(), (1, 0));
    for n in 0..30 {
        desk.submit(vec![], vec![event("chat-complete"); 1 + n % 3]).unwrap();
    }
    let told = desk.heard.ids();
    assert_eq!(told, (1..=60).collect::<Vec<_>>());
    assert_eq!(desk.journal.bounds().unwrap(), (1, 60));
    let mut read = Vec::new();
    loop {
        let rows = desk.journal.events_after(read.last().copied().unwrap_or(0), 7).unwrap();
        if rows.is_empty() {
            break;
        }
        read.extend(rows.iter().map(|row| row.id));
    }
    assert_eq!(read, told);
    let row = &desk.journal.events_after(59, 10).unwrap()[0];
    assert_eq!((row.event.as_str(), row.data_json.as_str()), ("chat-complete", "{\"sessionId\":\"s\"}"));
}

#[test]
fn no_place_no_record_and_places_come_back() {
    let desk = Desk::with(JournalOptions { places_max: 3, ..JournalOptions::default() });
    let mut three = desk.journal.reserve(3).unwrap();
    let full = desk.journal.reserve(1).unwrap_err();
    assert_eq!(full.code(), Code::CannotRecord);
    let one = three.take(1);
    assert_eq!((three.count(), one.count()), (2, 1));
    drop(one);
    let unit = Unit { changes: vec![], events: vec![event("chat-complete")] };
    let place = desk.place();
    later(|done| desk.journal.submit(unit, place, done)).unwrap();
    drop(three);
    drop(desk.journal.reserve(3).unwrap());
    assert_eq!(desk.journal.stats().places, 0);
}

#[test]
fn after_the_end_everything_is_refused_and_every_callback_is_called() {
    let desk = Desk::new();
    let (a, b) = (desk.place(), desk.place());
    let before = start(|done| desk.journal.accept(acceptance("s", "in time", None), a, done));
    assert!(desk.journal.shutdown(LIMIT));
    assert!(before.recv_timeout(LIMIT).unwrap().is_ok());
    let late = later(|done| desk.journal.accept(acceptance("s", "late", None), b, done));
    assert_eq!(late.unwrap_err().code(), Code::ShuttingDown);
    assert_eq!(desk.journal.reserve(1).unwrap_err().code(), Code::ShuttingDown);
    assert!(desk.journal.shutdown(LIMIT));
    let desk = Desk::open(desk.dir.clone(), JournalOptions::default());
    assert_eq!(desk.recovered.owed[0].queue.len(), 1);
}

// ---- trouble -------------------------------------------------------------------------------------------------------

fn faulty() -> (Desk, Faults) {
    let faults = Faults::counting();
    let options = JournalOptions { retry_ms: 5, faults: faults.clone(), ..JournalOptions::default() };
    (Desk::with(options), faults)
}

/// Waits until records are made again; `retry_ms` is small, so that is soon.
fn wait_for_health(journal: &Journal) {
    let deadline = Instant::now() + LIMIT;
    while journal.health().is_err() {
        assert!(Instant::now() < deadline, "still {:?}", journal.stats());
        std::thread::yield_now();
    }
}

#[test]
fn a_fault_at_the_nth_call_leaves_all_of_a_record_or_nothing_and_the_repeat_is_recorded_once() {
    for kind in [FaultKind::Full, FaultKind::IoWrite, FaultKind::IoFsync, FaultKind::ReadOnly, FaultKind::Busy] {
        let mut failed = 0;
        for nth in 1..=12 {
            let (desk, faults) = faulty();
            let image = png(1, b"photo");
            let send = || with_images("s", "hello", Some("key"), vec![image.clone()]);
            faults.fail(nth, 1, kind);
            let first = desk.accept(send());
            if let Err(e) = &first {
                failed += 1;
                assert_eq!(e.code(), Code::CannotRecord, "{kind:?} {nth}");
                assert!(desk.heard.ids().is_empty());
                wait_for_health(&desk.journal);
                assert_eq!(desk.journal.claim_answer(&send().claim.unwrap()).unwrap(), None);
                assert!(desk.states("s").is_empty());
                assert!(matches!(desk.accept(send()).unwrap(), AcceptOutcome::Recorded { .. }));
            }
            faults.heal();
            wait_for_health(&desk.journal);
            assert!(matches!(desk.accept(send()).unwrap(), AcceptOutcome::Repeat(_)));
            assert_eq!(desk.heard.ids(), [1]);
            let desk = desk.again();
            assert_eq!(desk.recovered.owed[0].queue.len(), 1);
            assert_eq!(desk.recovered.owed[0].queue[0].images, std::slice::from_ref(&image));
        }
        assert!((4..12).contains(&failed), "{kind:?}: the fault came at {failed} of 12 calls");
    }
}

#[test]
fn an_owed_outcome_is_kept_while_the_disk_is_bad_and_goes_first_and_in_order() {
    let (desk, faults) = faulty();
    let a = desk.say("s", "a");
    let turn = desk.dispatch("s", &[&a]);
    let mut places = desk.journal.reserve(4).unwrap();
    faults.fail(1, u64::MAX, FaultKind::Full);
    let owe =
        |name, changes, place| start(|done| desk.journal.owe(Unit { changes, events: vec![event(name)] }, place, done));
    let first = owe("chat-complete", vec![Change::Done { turn, outcome: "success".into() }], places.take(1));
    let second = owe("chat-phase-kept", vec![], places.take(1));
    let lost = later(|done| desk.journal.accept(acceptance("s", "no", None), places.take(1), done)).unwrap_err();
    assert_eq!(lost.code(), Code::CannotRecord);
    assert!(lost.text().contains("disk is full"), "{lost}");
    assert_eq!(desk.journal.reserve(1).unwrap_err().code(), Code::CannotRecord);
    assert!(desk.journal.health().is_err());
    assert!(first.is_empty() && second.is_empty());
    assert_eq!(desk.journal.stats().owed, 2);
    faults.heal();
    assert_eq!(first.recv_timeout(LIMIT).unwrap().unwrap(), [3]);
    assert_eq!(second.recv_timeout(LIMIT).unwrap().unwrap(), [4]);
    wait_for_health(&desk.journal);
    assert_eq!(desk.journal.stats().owed, 0);
    desk.say("s", "b");
    assert_eq!(desk.states("s"), [("b".to_owned(), "accepted")]);
    assert_eq!(desk.heard.ids(), [1, 2, 3, 4, 5]);
}

#[test]
fn a_full_disk_refuses_with_its_reason_and_service_is_back_without_a_restart() {
    // 60 pages of 4 KiB are a real SQLITE_FULL: SQLite itself says so, at whatever statement it comes to.
    let desk = Desk::with(JournalOptions { pages_max: Some(60), retry_ms: 5, ..JournalOptions::default() });
    let mut kept = Vec::new();
    let full = loop {
        let a = acceptance("s", &"x".repeat(9000), None);
        let uuid = a.message.uuid.clone();
        match desk.accept(a) {
            Ok(_) => kept.push(uuid),
            Err(e) => break e,
        }
        assert!(kept.len() < 60);
    };
    assert_eq!(full.code(), Code::CannotRecord);
    assert!(full.text().contains("disk is full"), "{full}");
    // Nothing half-stored, and what was accepted is all there.
    assert_eq!(desk.journal.pending(&sid("s")).unwrap().len(), kept.len());
    // Taking messages back gives pages back: that needs no new ones.
    wait_for_health(&desk.journal);
    let all = Change::Clear { messages: kept.clone(), why: "stopped".into() };
    desk.submit(vec![all], vec![]).unwrap();
    desk.say("s", "again");
    assert!(desk.journal.health().is_ok());
}

#[test]
fn a_foreign_writer_that_holds_the_file_too_long_is_named_and_waited_out() {
    let desk = Desk::with(JournalOptions { busy_ms: 30, retry_ms: 5, ..JournalOptions::default() });
    let other = desk.sql();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let held = desk.accept(acceptance("s", "a", Some("key"))).unwrap_err();
    assert_eq!(held.code(), Code::CannotRecord);
    assert!(held.text().contains("another program"), "{held}");
    other.execute_batch("ROLLBACK").unwrap();
    wait_for_health(&desk.journal);
    assert!(matches!(desk.accept(acceptance("s", "a", Some("key"))).unwrap(), AcceptOutcome::Recorded { .. }));
}

#[test]
fn one_record_that_can_never_be_made_does_not_take_its_batch_along() {
    let desk = Desk::new();
    // Other programs may meddle with the file: this row makes the next acceptance of the session impossible.
    desk.sql()
        .execute_batch(
            "CREATE TRIGGER odd BEFORE INSERT ON open WHEN new.text='poison' BEGIN SELECT RAISE(ABORT,'odd'); END",
        )
        .unwrap();
    let mut places = desk.journal.reserve(9).unwrap();
    // Holding the write lock gathers all of them into one batch.
    let other = desk.sql();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let gate = start(|done| desk.journal.accept(acceptance("s", "gate", None), places.take(1), done));
    let texts = ["a", "b", "poison", "c"];
    let all: Vec<_> = texts
        .iter()
        .map(|text| start(|done| desk.journal.accept(acceptance("s", text, None), places.take(1), done)))
        .collect();
    other.execute_batch("ROLLBACK").unwrap();
    gate.recv_timeout(LIMIT).unwrap().unwrap();
    let results: Vec<bool> = all.iter().map(|hear| hear.recv_timeout(LIMIT).unwrap().is_ok()).collect();
    assert_eq!(results, [true, true, false, true]);
    assert_eq!(desk.states("s").len(), 4);
    assert!(desk.journal.health().is_ok());
}

// ---- other programs ------------------------------------------------------------------------------------------------

fn foreign(db: &Connection, name: &str) {
    db.execute("INSERT INTO event(event, data) VALUES(?1, '{\"from\":\"outside\"}')", [name]).unwrap();
}

fn wait_for_ids(heard: &Heard, ids: &[EventId]) {
    let deadline = Instant::now() + LIMIT;
    while heard.ids().len() < ids.len() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(heard.ids(), ids);
}

#[test]
fn events_of_other_programs_are_told_once_and_in_order_between_ours() {
    let desk = Desk::with(JournalOptions { watch_ms: 5, ..JournalOptions::default() });
    let db = desk.sql();
    foreign(&db, "outside-a");
    desk.say("s", "ours");
    assert_eq!(desk.heard.ids(), [1, 2], "told before ours, though nobody watches");
    foreign(&db, "outside-b");
    foreign(&db, "outside-c");
    desk.journal.set_watched(true);
    wait_for_ids(&desk.heard, &[1, 2, 3, 4]);
    desk.say("s", "ours");
    for _ in 0..300 {
        foreign(&db, "outside-d");
    }
    desk.say("s", "ours");
    wait_for_ids(&desk.heard, &(1..=306).collect::<Vec<_>>());
    assert_eq!(desk.heard.0.lock()[0], (1, "outside-a".into(), json!({"from": "outside"})));
    let at = &desk.journal.events_after(0, 1).unwrap()[0].at;
    assert_eq!((at.len(), at.ends_with('Z')), (24, true), "{at}");
    for row in ["('x', 'not json')", "('x', '{\n}')", "('a\"b', '1')", "('', '1')"] {
        let sql = format!("INSERT INTO event(event, data) VALUES{row}");
        assert!(db.execute(&sql, []).is_err(), "{row}");
    }
    // What lay there at the start is replayed from the store, not told.
    let desk = desk.again();
    foreign(&desk.sql(), "outside-e");
    desk.say("s", "ours");
    assert_eq!(desk.heard.ids(), [307, 308]);
}

// ---- the file ------------------------------------------------------------------------------------------------------

fn refusal(dir: &Path) -> String {
    let opened = Journal::open(dir, JournalOptions::default(), Arc::new(Heard::default()));
    let text = opened.err().unwrap().text().to_owned();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("journal.db"), "{text}");
    text
}

#[test]
fn a_foreign_or_damaged_file_is_refused_with_one_clear_line_and_left_as_it_was() {
    let dir = TempDir::new().unwrap();
    let path = schema::path_in(dir.path());
    for bytes in [&b"{\"not\":\"a database\"}"[..], &[0xff; 5000]] {
        std::fs::write(&path, bytes).unwrap();
        assert!(refusal(dir.path()).contains("not a journal"));
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
    std::fs::remove_file(&path).unwrap();
    Connection::open(&path).unwrap().execute_batch("CREATE TABLE theirs(x)").unwrap();
    assert!(refusal(dir.path()).contains("another program"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    refusal(dir.path());
}

#[test]
fn a_journal_of_a_newer_program_is_refused() {
    let desk = Desk::new();
    desk.sql().execute("UPDATE meta SET value='999' WHERE key='schema'", []).unwrap();
    assert!(desk.journal.shutdown(LIMIT));
    assert!(refusal(desk.dir.path()).contains("schema 999"));
}

#[test]
fn an_empty_file_becomes_a_journal() {
    let dir = TempDir::new().unwrap();
    std::fs::write(schema::path_in(dir.path()), b"").unwrap();
    let desk = Desk::open(Arc::new(dir), JournalOptions::default());
    desk.say("s", "a");
    assert_eq!(desk.recovered.epoch.len(), 16);
    assert_ne!(desk.recovered.epoch, Desk::new().recovered.epoch);
}

// ---- pruning -------------------------------------------------------------------------------------------------------

#[test]
fn old_events_go_from_the_oldest_end_and_nothing_owed_goes_with_them() {
    let desk = Desk::with(JournalOptions { event_age_ms: -60_000, prune_every_ms: 5, ..JournalOptions::default() });
    let a = desk.say("s", "owed");
    let deadline = Instant::now() + LIMIT;
    while desk.journal.bounds().unwrap().0 <= 1 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    assert_eq!(desk.journal.bounds().unwrap(), (2, 1));
    assert_eq!(desk.states("s").len(), 1);
    let desk = desk.again();
    assert_eq!(desk.recovered.owed[0].queue[0].uuid, a);
    assert_eq!(desk.recovered.head, 1);
    desk.say("s", "b");
    assert_eq!(desk.heard.ids(), [2], "ids are never used twice");
}

#[test]
fn claims_go_after_their_days_unless_their_message_is_still_owed() {
    let desk = Desk::with(JournalOptions { claim_age_ms: -60_000, prune_every_ms: 1, ..JournalOptions::default() });
    desk.accept(acceptance("s", "owed", Some("owed"))).unwrap();
    let done = acceptance("s", "done", Some("done"));
    let uuid = done.message.uuid.clone();
    desk.accept(done).unwrap();
    assert!(matches!(desk.accept(acceptance("s", "owed", Some("owed"))).unwrap(), AcceptOutcome::Repeat(_)));
    let clear = Change::Clear { messages: vec![uuid], why: "stopped".into() };
    desk.submit(vec![clear], vec![]).unwrap();
    let db = desk.sql();
    let claims =
        || db.prepare("SELECT id FROM claim").unwrap().query_map([], |row| row.get(0)).unwrap().collect::<Vec<_>>();
    let deadline = Instant::now() + LIMIT;
    while claims().len() > 1 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    assert_eq!(claims(), [Ok("owed".to_owned())]);
    // An old claim that was not pruned yet does not hold up a new message either.
    assert!(matches!(desk.accept(acceptance("s", "other", Some("done"))).unwrap(), AcceptOutcome::Recorded { .. }));
}

#[test]
fn a_journal_that_was_moved_away_refuses_and_one_that_comes_back_serves() {
    let desk = Desk::with(JournalOptions { retry_ms: 5, ..JournalOptions::default() });
    desk.say("s", "before");
    let (path, away) = (schema::path_in(desk.dir.path()), desk.dir.path().join("away"));
    std::fs::rename(&path, &away).unwrap();
    let refused = desk.accept(acceptance("s", "lost", None)).unwrap_err();
    assert_eq!(refused.code(), Code::CannotRecord);
    assert!(refused.text().contains("moved or deleted"), "{refused}");
    std::fs::rename(&away, &path).unwrap();
    wait_for_health(&desk.journal);
    desk.say("s", "after");
    assert_eq!(desk.states("s").len(), 2);
}

#[test]
fn a_journal_cut_anywhere_in_its_last_page_is_refused_and_left_as_it_was() {
    let desk = Desk::new();
    for n in 0..40 {
        desk.say("s", &format!("{n} {}", "x".repeat(500)));
    }
    assert!(desk.journal.shutdown(LIMIT));
    let whole = std::fs::read(schema::path_in(desk.dir.path())).unwrap();
    let dir = TempDir::new().unwrap();
    let path = schema::path_in(dir.path());
    // The first and last byte of the page and a walk between: 4096 opens would take long for what they add.
    for cut in (1..4096).step_by(37).chain([4095, 4096, 4097]) {
        std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
        refusal(dir.path());
        assert_eq!(std::fs::read(&path).unwrap().len(), whole.len() - cut);
        for beside in ["journal.db-wal", "journal.db-shm"] {
            let _ = std::fs::remove_file(dir.path().join(beside));
        }
    }
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(Desk::open(Arc::new(dir), JournalOptions::default()).recovered.owed[0].queue.len(), 40);
}

#[test]
fn a_log_cut_at_any_byte_is_a_prefix_of_the_commits() {
    let desk = Desk::new();
    for n in 0..12 {
        desk.say("s", &n.to_string());
    }
    let read = |name| std::fs::read(desk.dir.path().join(name)).unwrap();
    let (base, log) = (read("journal.db"), read("journal.db-wal"));
    let mut last = 0;
    // Whole frames are 4120 bytes after a head of 32: look around each border and in the middle of each frame.
    let cuts = (0..log.len() / 4120).flat_map(|n| [31, 32, 33, 2000].map(|more| n * 4120 + more));
    for cut in cuts.filter(|cut| *cut <= log.len()).chain([log.len()]) {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join("journal.db"), &base).unwrap();
        std::fs::write(dir.path().join("journal.db-wal"), &log[..cut]).unwrap();
        let found = Desk::open(Arc::new(dir), JournalOptions::default()).recovered;
        let texts: Vec<_> = found.owed.iter().flat_map(|o| &o.queue).map(|m| m.text.clone()).collect();
        assert_eq!(texts, (0..texts.len()).map(|n| n.to_string()).collect::<Vec<_>>(), "cut at {cut}");
        assert_eq!(found.head, texts.len() as EventId);
        assert!(texts.len() >= last, "cut at {cut}");
        last = texts.len();
    }
    assert_eq!(last, 12);
}

#[test]
fn of_sixty_four_sends_under_one_claim_one_is_recorded_and_all_hear_its_ids() {
    let desk = Desk::new();
    let mut places = desk.journal.reserve(64).unwrap();
    let all: Vec<_> = (0..64)
        .map(|_| start(|done| desk.journal.accept(acceptance("s", "once", Some("key")), places.take(1), done)))
        .collect();
    let outcomes: Vec<_> = all.iter().map(|hear| hear.recv_timeout(LIMIT).unwrap().unwrap()).collect();
    assert_eq!(outcomes[0], AcceptOutcome::Recorded { event_id: 1 });
    let message = desk.journal.pending(&sid("s")).unwrap()[0].message.clone();
    for outcome in &outcomes[1..] {
        let AcceptOutcome::Repeat(answer) = outcome else { panic!("{outcome:?}") };
        assert_eq!((answer.event_id, &answer.message_uuid), (1, &message));
        assert_eq!(answer.turn, Some(TurnId::of(&message)));
    }
    let stats = desk.journal.stats();
    assert_eq!((stats.accepted, stats.repeats, stats.places), (1, 63, 0));
}

#[test]
fn the_log_stays_bounded_while_there_is_no_idle_moment() {
    let desk = Desk::new();
    let text = "x".repeat(50_000);
    let log = desk.dir.path().join("journal.db-wal");
    let mut waiting = std::collections::VecDeque::new();
    // About 80 MB of pages; eight are always under way, so that the journal never rests.
    for _ in 0..800 {
        let place = desk.place();
        waiting.push_back(start(|done| desk.journal.accept(acceptance("s", &text, None), place, done)));
        if waiting.len() > 8 {
            waiting.pop_front().unwrap().recv_timeout(LIMIT).unwrap().unwrap();
        }
    }
    for hear in waiting {
        hear.recv_timeout(LIMIT).unwrap().unwrap();
    }
    let bytes = std::fs::metadata(log).unwrap().len();
    assert!(bytes < 40 * 1024 * 1024, "{bytes} bytes");
}

// ---- real deaths and real limits, in a process of their own --------------------------------------------------------

const CHILD_DIR: &str = "BEEBOX_TEST_JOURNAL_CHILD";

/// Runs the test `name` again in a child that finds its directory in [`CHILD_DIR`]; returns what it printed.
fn in_child(name: &str, dir: &Path, fault: &str) -> (std::process::ExitStatus, String) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("journal::tests::{name}"), "--nocapture", "--test-threads=1"])
        .env(CHILD_DIR, dir)
        .env("BEEBOX_FAULT", fault)
        .output()
        .unwrap();
    (output.status, String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_kill_at_the_record_loses_nothing_acknowledged_and_records_nothing_twice() {
    use std::os::unix::process::ExitStatusExt as _;
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        let (journal, _) =
            Journal::open(Path::new(&dir), JournalOptions::default(), Arc::new(Heard::default())).unwrap();
        for n in 0..20 {
            let key = format!("key-{n}");
            let place = journal.reserve(1).unwrap();
            later(|done| journal.accept(acceptance("s", &n.to_string(), Some(&key)), place, done)).unwrap();
            println!("acknowledged {n}");
        }
        return;
    }
    for (fault, recorded) in [("before_record:8", 7), ("after_record_before_answer:8", 8)] {
        let dir = Arc::new(TempDir::new().unwrap());
        let name = "a_kill_at_the_record_loses_nothing_acknowledged_and_records_nothing_twice";
        let (status, said) = in_child(name, dir.path(), fault);
        assert_eq!(status.signal(), Some(9), "{fault}: {said}");
        assert_eq!(said.matches("acknowledged ").count(), 7, "{fault}: {said}");
        let desk = Desk::open(dir, JournalOptions::default());
        let texts: Vec<_> = desk.recovered.owed[0].queue.iter().map(|m| m.text.clone()).collect();
        assert_eq!(texts, (0..recorded).map(|n| n.to_string()).collect::<Vec<_>>(), "{fault}");
        // The client repeats what it heard no answer to.
        let again = desk.accept(acceptance("s", "7", Some("key-7"))).unwrap();
        assert_eq!(matches!(again, AcceptOutcome::Repeat(_)), recorded == 8, "{fault}: {again:?}");
        assert_eq!(desk.states("s").len(), 8);
    }
}

#[test]
fn a_file_that_may_not_grow_refuses_and_serves_again_once_it_may() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        // A write over the limit is then an error and not a death.
        signal_hook::flag::register(25 /* SIGXFSZ */, Arc::new(AtomicBool::new(false))).unwrap();
        let options = JournalOptions { retry_ms: 5, ..JournalOptions::default() };
        let (journal, _) = Journal::open(Path::new(&dir), options, Arc::new(Heard::default())).unwrap();
        let accept = |text: &str| {
            let place = journal.reserve(1)?;
            later(|done| journal.accept(acceptance("s", text, None), place, done))
        };
        let maximum = getrlimit(Resource::Fsize).maximum;
        setrlimit(Resource::Fsize, Rlimit { current: Some(400_000), maximum }).unwrap();
        let mut recorded = 0;
        let refused = loop {
            match accept(&"x".repeat(5000)) {
                Ok(_) => recorded += 1,
                Err(e) => break e,
            }
            assert!(recorded < 200);
        };
        assert_eq!(refused.code(), Code::CannotRecord, "{refused}");
        assert_eq!(journal.pending(&sid("s")).unwrap().len(), recorded);
        setrlimit(Resource::Fsize, Rlimit { current: maximum, maximum }).unwrap();
        wait_for_health(&journal);
        accept("again").unwrap();
        assert!(journal.shutdown(LIMIT));
        println!("recorded {}", recorded + 1);
        return;
    }
    let dir = Arc::new(TempDir::new().unwrap());
    let name = "a_file_that_may_not_grow_refuses_and_serves_again_once_it_may";
    let (status, said) = in_child(name, dir.path(), "");
    assert!(status.success(), "{said}");
    let count = Desk::open(dir, JournalOptions::default()).recovered.owed[0].queue.len();
    assert!(said.contains(&format!("recorded {count}")), "{count}: {said}");
}

#[test]
fn only_the_owner_reads_what_people_wrote() {
    use std::os::unix::fs::PermissionsExt as _;
    let desk = Desk::new();
    desk.say("s", "private");
    for name in ["journal.db", "journal.db-wal", "journal.db-shm"] {
        let mode = std::fs::metadata(desk.dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn a_log_without_its_journal_is_refused_and_kept() {
    let desk = Desk::new();
    desk.say("s", "only in the log");
    let log = std::fs::read(desk.dir.path().join("journal.db-wal")).unwrap();
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("journal.db-wal"), &log).unwrap();
    assert!(refusal(dir.path()).contains("beside its log"));
    std::fs::write(schema::path_in(dir.path()), b"").unwrap();
    assert!(refusal(dir.path()).contains("beside its log"));
    assert_eq!(std::fs::read(dir.path().join("journal.db-wal")).unwrap(), log);
}

#[test]
fn a_reader_that_stays_in_the_log_holds_up_no_record_and_the_log_shrinks_after_it() {
    let desk = Desk::new();
    desk.say("s", "first");
    let reader = desk.sql();
    reader.execute_batch("BEGIN; SELECT count(*) FROM event").unwrap();
    let text = "x".repeat(100_000);
    for _ in 0..200 {
        desk.say("s", &text);
    }
    // Emptied as far as the reader lets, and not once for each commit.
    let held = desk.journal.stats();
    assert!(held.checkpoints < 40, "{held:?}");
    reader.execute_batch("COMMIT").unwrap();
    let deadline = Instant::now() + LIMIT;
    while desk.journal.stats().wal_pages > 1000 {
        assert!(Instant::now() < deadline, "{:?}", desk.journal.stats());
        desk.say("s", "more");
    }
}
