//! Random lives of messages against a small model: accept, repeat, dispatch, recall, split, stop, done, clear, fail,
//! retry, discard, with clean restarts and with crashes (a copy of the files as they lie on the disk) at random points.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use tempfile::TempDir;

use super::tests::{Desk, acceptance, event, sid};
use super::*;

const SESSIONS: [&str; 2] = ["s", "t"];

#[derive(Debug, Clone)]
enum Act {
    /// Session, claim (some of few, so that repeats and conflicts come), text.
    Accept(usize, Option<u8>, u8),
    /// Everything that waits in the session becomes its turn; a split message goes alone.
    Dispatch(usize),
    Recall(usize),
    Stopped(usize),
    Done(usize),
    Split(usize),
    Clear(usize, u8),
    Fail(usize, u8),
    Retry(usize, u8),
    Discard(usize, u8),
    Restart,
    Crash,
}

fn act() -> impl Strategy<Value = Act> {
    let s = 0..SESSIONS.len();
    prop_oneof![
        6 => (s.clone(), proptest::option::of(0..3u8), 0..2u8).prop_map(|(s, c, t)| Act::Accept(s, c, t)),
        4 => s.clone().prop_map(Act::Dispatch),
        2 => s.clone().prop_map(Act::Recall),
        1 => s.clone().prop_map(Act::Stopped),
        3 => s.clone().prop_map(Act::Done),
        1 => s.clone().prop_map(Act::Split),
        1 => (s.clone(), any::<u8>()).prop_map(|(s, n)| Act::Clear(s, n)),
        2 => (s.clone(), any::<u8>()).prop_map(|(s, n)| Act::Fail(s, n)),
        1 => (s.clone(), any::<u8>()).prop_map(|(s, n)| Act::Retry(s, n)),
        1 => (s, any::<u8>()).prop_map(|(s, n)| Act::Discard(s, n)),
        1 => Just(Act::Restart),
        1 => Just(Act::Crash),
    ]
}

#[derive(Debug, Clone, PartialEq)]
struct Held {
    uuid: MessageUuid,
    text: String,
    failed: bool,
    alone: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Turn {
    turn: TurnId,
    members: Vec<MessageUuid>,
    attempts: u32,
    stopped: bool,
    dispatched: bool,
}

#[derive(Debug, Default)]
struct Place {
    /// In the order of delivery.
    held: Vec<Held>,
    turn: Option<Turn>,
    delivered: Vec<(MessageUuid, TurnId)>,
}

#[derive(Debug, Default)]
struct Model {
    places: [Place; 2],
    /// Claim, the text under it, what it was answered first.
    claims: BTreeMap<u8, (String, ClaimAnswer)>,
    cleared: Vec<MessageUuid>,
    events: i64,
}

impl Place {
    fn waiting(&self) -> Vec<&Held> {
        let taken = self.turn.as_ref().map(|t| t.members.as_slice()).unwrap_or_default();
        self.held.iter().filter(|h| !h.failed && !taken.contains(&h.uuid)).collect()
    }

    fn remove(&mut self, uuid: &MessageUuid) {
        self.held.retain(|h| h.uuid != *uuid);
        self.leave(uuid);
    }

    fn leave(&mut self, uuid: &MessageUuid) {
        if let Some(turn) = &mut self.turn {
            turn.members.retain(|m| m != uuid);
            if turn.members.is_empty() {
                self.turn = None;
            }
        }
    }

    fn state(&self, uuid: &MessageUuid) -> Option<MessageState> {
        let held = self.held.iter().find(|h| h.uuid == *uuid)?;
        let dispatched = self.turn.as_ref().is_some_and(|t| t.dispatched && t.members.contains(uuid));
        Some(match (held.failed, dispatched) {
            (true, _) => MessageState::Failed,
            (false, true) => MessageState::Dispatched,
            (false, false) => MessageState::Accepted,
        })
    }

    fn any(&self, n: u8) -> Option<Held> {
        if self.held.is_empty() { None } else { self.held.get(usize::from(n) % self.held.len()).cloned() }
    }
}

impl Model {
    fn answer_now(&self, answer: &ClaimAnswer) -> ClaimAnswer {
        let uuid = &answer.message_uuid;
        let state = self.places.iter().find_map(|p| p.state(uuid)).unwrap_or(if self.cleared.contains(uuid) {
            MessageState::Cleared
        } else {
            MessageState::Done
        });
        ClaimAnswer { state, ..answer.clone() }
    }
}

struct Round {
    desk: Desk,
    model: Model,
    said: u32,
}

impl Round {
    /// Submits one change with one event.
    fn change(&mut self, change: Change) -> Result<()> {
        let result = self.desk.submit(vec![change], vec![event("told")]);
        if let Ok(ids) = &result {
            self.model.events += 1;
            assert_eq!(*ids, [self.model.events]);
        }
        result.map(|_| ())
    }

    fn act(mut self, act: Act) -> Self {
        match act {
            Act::Accept(s, key, text) => self.accept(s, key, text),
            Act::Dispatch(s) => self.dispatch(s),
            Act::Recall(s) => {
                if let Some(turn) = self.model.places[s].turn.clone() {
                    self.change(Change::Recall { turn: turn.turn.clone() }).unwrap();
                    self.model.places[s].turn = Some(Turn { dispatched: false, ..turn });
                }
            }
            Act::Stopped(s) => {
                if let Some(turn) = self.model.places[s].turn.clone() {
                    self.change(Change::Stopped { turn: turn.turn.clone() }).unwrap();
                    self.model.places[s].turn = Some(Turn { stopped: true, ..turn });
                }
            }
            Act::Done(s) => {
                if let Some(turn) = self.model.places[s].turn.take() {
                    self.change(Change::Done { turn: turn.turn.clone(), outcome: "success".into() }).unwrap();
                    let place = &mut self.model.places[s];
                    place.held.retain(|h| !turn.members.contains(&h.uuid));
                    place.delivered.extend(turn.members.into_iter().map(|m| (m, turn.turn.clone())));
                }
            }
            Act::Split(s) => {
                if let Some(turn) = self.model.places[s].turn.take() {
                    self.change(Change::Split { turn: turn.turn }).unwrap();
                    for held in &mut self.model.places[s].held {
                        held.alone |= turn.members.contains(&held.uuid);
                    }
                }
            }
            Act::Clear(s, n) => {
                if let Some(held) = self.model.places[s].any(n) {
                    self.change(Change::Clear { messages: vec![held.uuid.clone()], why: "stopped".into() }).unwrap();
                    self.model.places[s].remove(&held.uuid);
                    self.model.cleared.push(held.uuid);
                }
            }
            Act::Fail(s, n) => {
                if let Some(held) = self.model.places[s].any(n) {
                    self.change(Change::Fail { messages: vec![held.uuid.clone()], error: "odd".into() }).unwrap();
                    let place = &mut self.model.places[s];
                    place.leave(&held.uuid);
                    place.held.iter_mut().filter(|h| h.uuid == held.uuid).for_each(|h| h.failed = true);
                }
            }
            Act::Retry(s, n) => {
                if let Some(held) = self.model.places[s].any(n) {
                    let result = self.change(Change::Retry { message: held.uuid.clone() });
                    assert_eq!(result.is_ok(), held.failed);
                    if held.failed {
                        let place = &mut self.model.places[s];
                        place.held.retain(|h| h.uuid != held.uuid);
                        place.held.push(Held { failed: false, ..held });
                    }
                }
            }
            Act::Discard(s, n) => {
                if let Some(held) = self.model.places[s].any(n) {
                    let result = self.change(Change::Discard { message: held.uuid.clone() });
                    assert_eq!(result.is_ok(), held.failed);
                    if held.failed {
                        self.model.places[s].remove(&held.uuid);
                        self.model.cleared.push(held.uuid);
                    }
                }
            }
            Act::Restart => {
                self.desk = self.desk.again();
                self.check_recovered();
            }
            Act::Crash => {
                let dir = TempDir::new().unwrap();
                for name in ["journal.db", "journal.db-wal"] {
                    let from = self.desk.dir.path().join(name);
                    if from.exists() {
                        std::fs::copy(from, dir.path().join(name)).unwrap();
                    }
                }
                self.desk = Desk::open(Arc::new(dir), JournalOptions::default());
                self.check_recovered();
            }
        }
        self
    }

    fn accept(&mut self, s: usize, key: Option<u8>, text: u8) {
        self.said += 1;
        // Under a claim few texts, so that some repeats are repeats and some are conflicts.
        let text = if key.is_some() { format!("text {text}") } else { format!("said {}", self.said) };
        let a = acceptance(SESSIONS[s], &text, key.map(|k| format!("key-{k}")).as_deref());
        let (uuid, turn) = (a.message.uuid.clone(), a.turn.clone());
        let outcome = self.desk.accept(a).unwrap();
        if let Some((was, answer)) = key.and_then(|k| self.model.claims.get(&k)) {
            if *was == text {
                assert_eq!(outcome, AcceptOutcome::Repeat(self.model.answer_now(answer)));
            } else {
                assert_eq!(outcome, AcceptOutcome::Conflict);
            }
            return;
        }
        self.model.events += 1;
        let event_id = self.model.events;
        assert_eq!(outcome, AcceptOutcome::Recorded { event_id });
        if let Some(key) = key {
            let answer = ClaimAnswer {
                session: sid(SESSIONS[s]),
                message_uuid: uuid.clone(),
                event_id,
                turn,
                state: MessageState::Accepted,
            };
            self.model.claims.insert(key, (text.clone(), answer));
        }
        self.model.places[s].held.push(Held { uuid, text, failed: false, alone: false });
    }

    fn dispatch(&mut self, s: usize) {
        let place = &self.model.places[s];
        let (turn, members, attempts) = match &place.turn {
            Some(turn) => (turn.turn.clone(), turn.members.clone(), turn.attempts + 1),
            None => {
                let waiting = place.waiting();
                let Some(first) = waiting.first() else { return };
                let count = if first.alone { 1 } else { waiting.iter().take_while(|h| !h.alone).count() };
                let members: Vec<_> = waiting[..count].iter().map(|h| h.uuid.clone()).collect();
                (TurnId::of(&members[0]), members, 1)
            }
        };
        let change = Change::Dispatch {
            session: sid(SESSIONS[s]),
            turn: turn.clone(),
            members: members.clone(),
            attempt: attempts,
            agent: None,
        };
        self.change(change).unwrap();
        let stopped = self.model.places[s].turn.as_ref().is_some_and(|t| t.stopped);
        self.model.places[s].turn = Some(Turn { turn, members, attempts, stopped, dispatched: true });
    }

    /// What readers see is the model.
    fn check(&self) {
        for (place, session) in self.model.places.iter().zip(SESSIONS) {
            let rows = self.desk.journal.pending(&sid(session)).unwrap();
            let seen: Vec<_> = rows.iter().map(|r| (r.message.clone(), r.text.clone(), r.state)).collect();
            let want: Vec<_> =
                place.held.iter().map(|h| (h.uuid.clone(), h.text.clone(), place.state(&h.uuid).unwrap())).collect();
            assert_eq!(seen, want);
            for row in &rows {
                let turn = place.turn.as_ref().filter(|t| t.members.contains(&row.message));
                assert_eq!(row.turn, turn.map(|t| t.turn.clone()));
            }
            let mut delivered = self.desk.journal.delivered_within(&sid(session), i64::MAX).unwrap();
            let mut want = place.delivered.clone();
            delivered.sort();
            want.sort();
            assert_eq!(delivered, want);
        }
        for (key, (text, answer)) in &self.model.claims {
            let claim = acceptance("s", text, Some(&format!("key-{key}"))).claim.unwrap();
            assert_eq!(self.desk.journal.claim_answer(&claim).unwrap(), Some(Ok(self.model.answer_now(answer))));
        }
        let store = self.desk.journal.events_after(0, usize::MAX).unwrap();
        assert_eq!(store.iter().map(|e| e.id).collect::<Vec<_>>(), (1..=self.model.events).collect::<Vec<_>>());
        let told = self.desk.heard.ids();
        let from = self.desk.recovered.head + 1;
        assert_eq!(told, (from..=self.model.events).collect::<Vec<_>>());
    }

    /// What a start finds is the model.
    fn check_recovered(&self) {
        assert_eq!(self.desk.recovered.head, self.model.events);
        for (place, session) in self.model.places.iter().zip(SESSIONS) {
            let owed = self.desk.recovered.owed.iter().find(|o| o.session == sid(session));
            let Some(owed) = owed else {
                assert!(place.held.is_empty());
                continue;
            };
            let queue: Vec<_> = owed.queue.iter().map(|m| (m.uuid.clone(), m.text.clone())).collect();
            let waiting = place.waiting();
            assert_eq!(queue, waiting.iter().map(|h| (h.uuid.clone(), h.text.clone())).collect::<Vec<_>>());
            let alone: Vec<_> = waiting.iter().filter(|h| h.alone).map(|h| h.uuid.clone()).collect();
            assert_eq!(owed.alone, alone);
            let failed: Vec<_> = place.held.iter().filter(|h| h.failed).map(|h| h.uuid.clone()).collect();
            assert_eq!(owed.failed, failed);
            let turn = owed.turn.as_ref().map(|t| Turn {
                turn: t.turn.clone(),
                members: t.members.iter().map(|m| m.uuid.clone()).collect(),
                attempts: t.attempts,
                stopped: t.stopped,
                dispatched: t.dispatched,
            });
            assert_eq!(turn, place.turn);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_message_is_where_the_model_says_through_restarts_and_crashes(
        acts in proptest::collection::vec(act(), 1..60)
    ) {
        let mut round = Round { desk: Desk::new(), model: Model::default(), said: 0 };
        for act in acts {
            round = round.act(act);
            round.check();
        }
        round.act(Act::Crash).check();
    }
}
