//! The bus read once: which message was accepted, dispatched, cleared or failed where, and how each turn ended.
//! Rule a change could break: a turn is open from its dispatch to its end, and an end closes what is open, once.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Violation;
use super::evidence::{EventLog, marks};

/// One turn as the bus told it.
#[derive(Default)]
pub(super) struct Turn {
    pub(super) dispatched: usize,
    /// Dispatched, and no end since.
    open: bool,
    /// It was told since that it failed and will be tried again: news, not an end.
    retry: bool,
    finals: Vec<i64>,
    excess: bool,
}

/// The bus, read once.
#[derive(Default)]
pub(super) struct Told<'a> {
    /// Message id (by its mark) to acceptance events and uuids.
    pub(super) accepted: HashMap<&'a str, Vec<(i64, &'a str)>>,
    pub(super) turns_of: HashMap<&'a str, Vec<&'a str>>,
    pub(super) turns: BTreeMap<&'a str, Turn>,
    pub(super) cleared: BTreeSet<&'a str>,
    /// Messages sent again by hand after they had failed for good.
    pub(super) retried: BTreeSet<&'a str>,
    pub(super) aliases: Vec<(&'a str, &'a str)>,
    pub(super) unaccepted: Vec<(&'a str, &'a str)>,
    /// Turns that the agent answered and that the server says no transcript holds.
    pub(super) unrecorded: BTreeSet<&'a str>,
}

impl<'a> Told<'a> {
    pub(super) fn read(log: &'a EventLog) -> Self {
        let mut told = Self::default();
        let (mut uuids, mut failed) = (BTreeSet::new(), BTreeSet::new());
        for (id, kept) in log.iter() {
            let text = |key: &str| kept.data[key].as_str().unwrap_or_default();
            let members = || kept.data["messageUuids"].as_array().into_iter().flatten().filter_map(|v| v.as_str());
            match kept.event.as_str() {
                "chat-user-message" => {
                    uuids.insert(text("messageUuid"));
                    for (_, mark) in marks(text("message")) {
                        told.accepted.entry(mark).or_default().push((id, text("messageUuid")));
                    }
                }
                // A thread's message is accepted too; its sender marks nothing.
                "thread-message" => {
                    uuids.insert(text("messageUuid"));
                }
                "chat-message-dispatched" => {
                    let turn = told.turns.entry(text("turnId")).or_default();
                    turn.dispatched += 1;
                    turn.open = true;
                    turn.retry = false;
                    for uuid in members() {
                        told.turns_of.entry(uuid).or_default().push(text("turnId"));
                        if failed.remove(uuid) {
                            told.retried.insert(uuid);
                        }
                        if log.complete && !uuids.contains(uuid) {
                            told.unaccepted.push((text("turnId"), uuid));
                        }
                    }
                }
                "chat-queue-cleared" => {
                    for uuid in members() {
                        told.cleared.insert(uuid);
                        // The try that was promised will not come.
                        for turn in told.turns_of.get(uuid).into_iter().flatten() {
                            if let Some(turn) = told.turns.get_mut(turn).filter(|t| t.retry) {
                                turn.open = false;
                            }
                        }
                    }
                }
                "chat-turn-failed" if kept.data["willRetry"] == true => {
                    told.turns.entry(text("turnId")).or_default().retry = true;
                }
                "chat-complete" | "chat-turn-failed" => {
                    if kept.event == "chat-turn-failed" {
                        failed.extend(members());
                    }
                    if kept.data["recorded"] == false {
                        told.unrecorded.insert(text("turnId"));
                    }
                    let turn = told.turns.entry(text("turnId")).or_default();
                    // A turn we never dispatched is one the agent began itself, or one that could not be started: it
                    // ends once, too.
                    let first_of_its_own = turn.dispatched == 0 && turn.finals.is_empty();
                    turn.excess |= !turn.open && !first_of_its_own && (log.complete || turn.dispatched > 0);
                    turn.open = false;
                    turn.finals.push(id);
                }
                "chat-session-assigned" => told.aliases.push((text("was"), text("sessionId"))),
                _ => {}
            }
        }
        told
    }

    pub(super) fn same_session(&self, a: &str, b: &str) -> bool {
        // Names of a session grow into a chain, seldom longer than a few.
        let mut names = vec![a];
        let mut at = 0;
        while let Some(name) = names.get(at).copied() {
            if name == b {
                return true;
            }
            for (was, now) in &self.aliases {
                for (from, to) in [(was, now), (now, was)] {
                    if *from == name && !names.contains(to) {
                        names.push(to);
                    }
                }
            }
            at += 1;
        }
        false
    }

    pub(super) fn check_turns(&self, settled: bool, found: &mut Vec<Violation>) {
        for (turn, uuid) in &self.unaccepted {
            found.push(Violation::DispatchedUnaccepted { turn: (*turn).to_owned(), uuid: (*uuid).to_owned() });
        }
        for (id, turn) in &self.turns {
            if turn.excess {
                found.push(Violation::TurnEndedTwice { turn: (*id).to_owned(), events: turn.finals.clone() });
            }
            if settled && turn.dispatched > 0 && turn.open {
                found.push(Violation::TurnWithoutEnd { turn: (*id).to_owned() });
            }
        }
    }
}
