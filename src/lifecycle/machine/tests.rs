//! Stories of the contract, one test each, and random orders of requests and facts against a small model.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn message(n: usize) -> Arc<Message> {
    Arc::new(Message {
        uuid: MessageUuid::parse(&format!("m{n}")).unwrap(),
        text: format!("text {n}"),
        images: vec![],
        user: None,
        at_ms: 0,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    UnderWay,
    Accepted,
    Done,
    Cleared,
    Failed,
}

/// The world around a machine: a journal, a registry with one place, an agent, a transcript.
#[derive(Default)]
struct World {
    machine: Machine<RunNo>,
    next_message: usize,
    next_run: u64,
    fates: BTreeMap<String, Fate>,
    /// Dispatches that the journal has not committed.
    dispatches: Vec<TurnId>,
    wants_slot: bool,
    starting: Option<RunNo>,
    alive: Option<RunNo>,
    closed: bool,
    /// In the agent's hands: turn, members.
    at_agent: Option<(TurnId, Vec<String>)>,
    agent_turn: Option<TurnId>,
    recorded: BTreeSet<String>,
    look_ups: Vec<(TurnId, Vec<String>)>,
    queue_look_ups: Vec<Vec<String>>,
    timers: usize,
    stops: usize,
    log: Vec<String>,
    sent_turns: Vec<Vec<String>>,
    interrupts: usize,
    start_failures: Vec<bool>,
}

fn names(members: &[Arc<Message>]) -> Vec<String> {
    members.iter().map(|m| m.uuid.to_string()).collect()
}

impl World {
    fn apply(&mut self, fact: Fact<RunNo>) -> Did {
        self.log.push(format!("{fact:?}"));
        let (effects, did) = self.machine.apply(fact);
        for effect in effects {
            self.log.push(format!("    -> {effect:?}"));
            self.carry_out(effect);
        }
        did
    }

    fn carry_out(&mut self, effect: Effect<RunNo>) {
        match effect {
            Effect::WantSlot | Effect::SlotFree => self.wants_slot = self.machine.wants_slot(),
            Effect::Start(run) => {
                assert!(self.alive.is_none() && self.starting.is_none(), "two runs: {}", self.story());
                self.starting = Some(run);
            }
            Effect::Dispatch { turn, members, .. } => {
                for name in names(&members) {
                    assert_eq!(self.fates[&name], Fate::Accepted, "{}", self.story());
                    assert!(!self.recorded.contains(&name), "dispatched though recorded: {}", self.story());
                }
                self.dispatches.push(turn);
            }
            Effect::Send { run, turn, members } => {
                assert_eq!(self.alive, Some(run), "sent to a run that is not there: {}", self.story());
                assert!(!self.closed, "sent in the close window: {}", self.story());
                assert!(self.at_agent.is_none(), "two turns of ours: {}", self.story());
                assert!(self.agent_turn.is_none(), "sent into a turn of the agent's own: {}", self.story());
                let names = names(&members);
                assert_eq!(turn.as_str(), names[0], "a turn is named by its first message: {}", self.story());
                self.sent_turns.push(names.clone());
                self.at_agent = Some((turn, names));
            }
            Effect::AskInterrupt(_) => self.interrupts += 1,
            Effect::Close(run) => {
                assert_eq!(self.alive, Some(run), "{}", self.story());
                self.closed = true;
            }
            Effect::MarkStopped(_) | Effect::Changed | Effect::AgentTurnEnded(..) => {}
            Effect::LookUp { turn, members } => {
                assert!(self.alive.is_none(), "searched before the agent is gone: {}", self.story());
                self.look_ups.push((turn, names(&members)));
            }
            Effect::LookUpQueue(members) => {
                assert!(self.alive.is_none(), "searched before the agent is gone: {}", self.story());
                self.queue_look_ups.push(names(&members));
            }
            Effect::Found { turn, members, .. } => {
                assert_eq!(turn.as_str(), names(&members)[0], "{}", self.story());
                self.settle(&members, Fate::Done);
            }
            Effect::End { members, how, .. } => {
                let fate = match how {
                    EndHow::Result | EndHow::Recovered | EndHow::BrokeOff => Fate::Done,
                    EndHow::Again | EndHow::Split => return,
                    EndHow::Cleared => Fate::Cleared,
                    EndHow::Failed(_) => Fate::Failed,
                };
                self.settle(&members, fate);
            }
            Effect::Cleared(members) => self.settle(&members, Fate::Cleared),
            Effect::Failed(members, _) => self.settle(&members, Fate::Failed),
            Effect::StartFailed { will_retry, .. } => self.start_failures.push(will_retry),
            Effect::RetryIn(_) => self.timers += 1,
            Effect::Bug(bug) => panic!("{bug}: {}", self.story()),
        }
    }

    fn settle(&mut self, members: &[Arc<Message>], fate: Fate) {
        for name in names(members) {
            let was = self.fates.insert(name.clone(), fate);
            assert_eq!(was, Some(Fate::Accepted), "{name} settled twice: {}", self.story());
            assert!(fate != Fate::Cleared || self.stops > 0, "cleared without a stop: {}", self.story());
        }
    }

    fn story(&self) -> String {
        format!("\n{}", self.log.join("\n"))
    }

    fn send(&mut self) -> usize {
        let n = self.take();
        self.commit(n);
        n
    }

    fn take(&mut self) -> usize {
        self.next_message += 1;
        let message = message(self.next_message);
        self.fates.insert(message.uuid.to_string(), Fate::UnderWay);
        self.machine.take_place(message);
        self.next_message
    }

    fn commit(&mut self, n: usize) {
        self.fates.insert(format!("m{n}"), Fate::Accepted);
        self.apply(Fact::Recorded(message(n).uuid.clone()));
    }

    fn grant(&mut self) {
        if self.wants_slot {
            self.wants_slot = false;
            self.next_run += 1;
            self.apply(Fact::SlotGranted(RunNo(self.next_run)));
        }
    }

    fn started(&mut self) {
        if let Some(run) = self.starting.take() {
            self.alive = Some(run);
            self.closed = false;
            self.apply(Fact::Started(run));
        }
    }

    fn start_fails(&mut self) {
        if let Some(run) = self.starting.take() {
            self.apply(Fact::RunEnded { run, spoke: false, refused: false, error: Some("no".into()), hopeless: false });
        }
    }

    fn dispatched(&mut self) {
        if !self.dispatches.is_empty() {
            let turn = self.dispatches.remove(0);
            self.apply(Fact::Dispatched(turn));
        }
    }

    fn refused(&mut self) {
        if !self.dispatches.is_empty() {
            let turn = self.dispatches.remove(0);
            self.apply(Fact::DispatchRefused(turn));
        }
    }

    fn records(&mut self) {
        if let Some((_, members)) = &self.at_agent {
            self.recorded.extend(members.iter().cloned());
        }
    }

    fn result(&mut self) {
        self.records();
        if let (Some(run), Some((turn, _))) = (self.alive, self.at_agent.take()) {
            self.apply(Fact::Spoke(run));
            self.apply(Fact::TurnEnded(run, turn));
        }
    }

    fn agent_turn_begins(&mut self) {
        if let (Some(run), None, None) = (self.alive, &self.at_agent, &self.agent_turn) {
            let turn = TurnId::parse(&format!("own{}", self.log.len())).unwrap();
            self.agent_turn = Some(turn.clone());
            self.apply(Fact::AgentTurnBegan(run, turn));
        }
    }

    fn agent_turn_ends(&mut self) {
        if let (Some(run), Some(turn)) = (self.alive, self.agent_turn.take()) {
            self.apply(Fact::TurnEnded(run, turn));
        }
    }

    fn dies(&mut self, spoke: bool) {
        if let Some(run) = self.alive.take() {
            self.at_agent = None;
            self.agent_turn = None;
            self.apply(Fact::RunEnded { run, spoke, refused: false, error: None, hopeless: false });
        }
    }

    fn look_up(&mut self) {
        if !self.look_ups.is_empty() {
            let (turn, members) = self.look_ups.remove(0);
            let seen = if members.iter().any(|m| self.recorded.contains(m)) { Seen::Unfinished } else { Seen::Absent };
            self.apply(Fact::LookedUp(turn, seen));
        }
    }

    fn timer(&mut self) {
        if self.timers > 0 {
            self.timers -= 1;
            self.apply(Fact::RetryDue);
        }
    }

    fn stop(&mut self) -> Did {
        self.stops += 1;
        self.apply(Fact::Stop)
    }

    /// Lets everything that is under way come to its end; a well-behaved agent from here on.
    fn settle_down(&mut self) {
        for n in 1..=self.next_message {
            if self.fates[&format!("m{n}")] == Fate::UnderWay {
                self.commit(n);
            }
        }
        for _ in 0..200 {
            self.dispatched();
            self.grant();
            self.started();
            self.agent_turn_ends();
            self.result();
            if self.closed {
                self.dies(true);
            }
            self.look_up();
            for _ in self.queue_look_ups.drain(..).collect::<Vec<_>>() {
                self.apply(Fact::QueueLookedUp { found: vec![], unsure: vec![], why: Unknown::Unreadable });
            }
            self.timer();
        }
    }

    fn phase(&self) -> PhaseKind {
        self.machine.phase().kind()
    }

    /// Idle to a streaming turn of one message.
    fn streaming() -> Self {
        let mut world = Self::default();
        world.send();
        world.grant();
        world.started();
        world.dispatched();
        assert_eq!(world.phase(), PhaseKind::Streaming);
        world
    }
}

#[test]
fn message_sent_while_starting_rides_the_first_turn() {
    let mut world = World::default();
    world.send();
    world.grant();
    assert_eq!(world.phase(), PhaseKind::Starting);
    world.send();
    world.send();
    world.started();
    world.dispatched();
    assert_eq!(world.sent_turns, [["m1", "m2", "m3"]]);
}

#[test]
fn messages_queued_in_a_turn_become_one_next_turn() {
    let mut world = World::streaming();
    world.send();
    world.send();
    assert!(world.machine.is_busy());
    assert_eq!(world.machine.queued(), 2);
    world.result();
    world.dispatched();
    assert_eq!(world.sent_turns, [vec!["m1"], vec!["m2", "m3"]]);
}

#[test]
fn nothing_is_sent_before_dispatched_is_committed() {
    let mut world = World::default();
    world.send();
    world.grant();
    world.started();
    assert!(world.sent_turns.is_empty());
    assert!(world.machine.is_busy(), "a turn is being prepared");
    assert_eq!(world.phase(), PhaseKind::Ready);
    world.dispatched();
    assert_eq!(world.sent_turns.len(), 1);
}

#[test]
fn a_place_under_way_waits_for_its_record() {
    let mut world = World::streaming();
    let first = world.take();
    let second = world.take();
    world.commit(second);
    world.result();
    assert!(world.dispatches.is_empty(), "the one in front is not recorded yet");
    world.commit(first);
    world.dispatched();
    // The first commit alone began the turn: both were visible by then.
    assert_eq!(world.sent_turns[1], ["m2", "m3"]);
}

#[test]
fn stop_clears_the_queue_and_its_end_drains_nothing_old() {
    let mut world = World::streaming();
    world.send();
    assert_eq!(world.stop(), Did::Stopped);
    assert_eq!(world.fates["m2"], Fate::Cleared);
    assert!(matches!(world.machine.phase(), Phase::Stopping { was_busy: true, .. }));
    world.send();
    world.result();
    assert!(matches!(world.machine.phase(), Phase::Stopping { was_busy: false, .. }));
    assert_eq!(world.sent_turns.len(), 1, "a late result drains nothing");
    world.dies(true);
    assert_eq!(world.phase(), PhaseKind::Idle);
    world.settle_down();
    assert_eq!(world.sent_turns[1], ["m3"], "what came during the stop starts a fresh run");
}

#[test]
fn a_stopped_turn_is_done_if_recorded_else_cleared_and_never_sent_again() {
    for recorded in [true, false] {
        let mut world = World::streaming();
        if recorded {
            world.records();
        }
        world.stop();
        world.dies(true);
        world.settle_down();
        assert_eq!(world.fates["m1"], if recorded { Fate::Done } else { Fate::Cleared });
        assert_eq!(world.sent_turns.len(), 1);
    }
}

#[test]
fn stop_during_a_start_is_carried_out_the_moment_it_returns() {
    let mut world = World::default();
    world.send();
    world.grant();
    assert_eq!(world.stop(), Did::Stopped);
    assert_eq!(world.fates["m1"], Fate::Cleared);
    world.started();
    assert!(matches!(world.machine.phase(), Phase::Stopping { was_busy: false, .. }));
    world.dies(false);
    assert!(world.start_failures.is_empty(), "a stop is no failed start");
    assert!(!world.wants_slot);
}

#[test]
fn stop_cancels_a_queue_that_waits_in_idle() {
    let mut world = World::default();
    world.send();
    assert!(world.wants_slot);
    assert_eq!(world.stop(), Did::Stopped);
    assert!(!world.wants_slot);
    assert_eq!(world.fates["m1"], Fate::Cleared);
    assert_eq!(world.stop(), Did::Nothing);
}

#[test]
fn restart_drains_the_queue_into_a_fresh_run() {
    let mut world = World::streaming();
    world.records();
    world.send();
    assert_eq!(world.apply(Fact::Restart), Did::Restarted);
    assert_eq!(world.phase(), PhaseKind::Streaming, "phase unchanged, run closed");
    assert!(world.closed);
    world.dies(true);
    world.settle_down();
    assert_eq!(world.fates["m1"], Fate::Done);
    assert_eq!(world.sent_turns[1], ["m2"]);
}

#[test]
fn a_run_that_dies_with_a_queue_is_replaced_and_the_lost_turn_goes_first() {
    let mut world = World::streaming();
    world.send();
    world.dies(true);
    assert!(world.sent_turns.len() == 1 && !world.wants_slot, "the transcript is asked first");
    world.settle_down();
    assert_eq!(world.sent_turns, [vec!["m1"], vec!["m1"], vec!["m2"]]);
}

#[test]
fn a_merged_turn_is_split_after_three_deaths_and_a_single_message_fails() {
    let mut world = World::default();
    world.send();
    world.grant();
    world.send();
    for _ in 0..3 {
        world.started();
        world.dispatched();
        world.dies(true);
        world.look_up();
        world.grant();
    }
    world.started();
    world.dispatched();
    assert_eq!(world.sent_turns[2], ["m1", "m2"]);
    assert_eq!(world.sent_turns[3], ["m1"], "alone");
    for _ in 0..3 {
        world.dies(true);
        world.look_up();
        world.grant();
        world.started();
        world.dispatched();
    }
    assert_eq!(world.fates["m1"], Fate::Failed);
    world.settle_down();
    assert_eq!(world.fates["m2"], Fate::Done);
}

#[test]
fn failed_starts_are_tried_five_times_then_wait_for_a_send() {
    let mut world = World::default();
    world.send();
    for attempt in 1..=START_ATTEMPTS_MAX {
        world.grant();
        world.start_fails();
        assert_eq!(world.start_failures.len(), attempt as usize);
        world.timer();
    }
    assert_eq!(world.start_failures, [true, true, true, true, false]);
    assert!(!world.wants_slot);
    assert_eq!(world.fates["m1"], Fate::Accepted, "never dropped in silence");
    world.send();
    world.settle_down();
    assert_eq!(world.sent_turns, [["m1", "m2"]]);
}

#[test]
fn restart_wakes_a_queue_that_gave_up() {
    let mut world = World::default();
    world.send();
    for _ in 0..START_ATTEMPTS_MAX {
        world.grant();
        world.start_fails();
        world.timer();
    }
    assert_eq!(world.apply(Fact::Restart), Did::Restarted);
    world.settle_down();
    assert_eq!(world.fates["m1"], Fate::Done);
}

#[test]
fn a_conversation_that_cannot_be_resumed_fails_what_waits() {
    let mut world = World::default();
    world.send();
    world.grant();
    let run = world.starting.take().unwrap();
    world.apply(Fact::RunEnded { run, spoke: false, refused: false, error: Some("gone".into()), hopeless: true });
    assert_eq!(world.fates["m1"], Fate::Failed);
    assert_eq!(world.timers, 0);
}

#[test]
fn interrupt_leaves_the_queue_and_is_remembered_in_a_start() {
    let mut world = World::streaming();
    world.send();
    assert_eq!(world.apply(Fact::Interrupt), Did::Asked);
    assert_eq!(world.interrupts, 1);
    world.result();
    world.dispatched();
    assert_eq!(world.sent_turns.len(), 2);

    let mut world = World::default();
    world.send();
    world.grant();
    assert_eq!(world.apply(Fact::Interrupt), Did::Asked);
    world.started();
    assert_eq!(world.interrupts, 0);
    world.dispatched();
    assert_eq!(world.interrupts, 1, "asked once the turn is with the agent");
}

#[test]
fn an_interrupt_that_nobody_heeds_ends_the_run_and_not_the_queue() {
    let mut world = World { stops: 1, ..World::streaming() };
    world.send();
    world.apply(Fact::Interrupt);
    world.apply(Fact::InterruptTimedOut(RunNo(1)));
    assert!(world.closed);
    world.dies(true);
    world.settle_down();
    assert_eq!(world.fates["m1"], Fate::Cleared, "a person stopped it before it was recorded");
    assert_eq!(world.fates["m2"], Fate::Done);
}

#[test]
fn a_turn_of_the_agents_own_makes_sends_queue_and_holds_a_prepared_turn() {
    let mut world = World::streaming();
    world.result();
    world.agent_turn_begins();
    assert!(world.machine.is_busy());
    world.send();
    assert!(world.dispatches.is_empty());
    world.agent_turn_ends();
    // The next one begins while `dispatched` is being committed.
    world.agent_turn_begins();
    world.dispatched();
    assert_eq!(world.sent_turns.len(), 1, "held");
    world.agent_turn_ends();
    assert_eq!(world.sent_turns.len(), 2);
}

#[test]
fn an_invariant_error_closes_the_run_and_keeps_the_queue() {
    let mut world = World::streaming();
    world.send();
    // A second grant for a session that streams is answered with the place, not with a second run.
    world.apply(Fact::SlotGranted(RunNo(9)));
    assert!(world.starting.is_none());
    // A forged start: the machine does not know that run.
    world.apply(Fact::Started(RunNo(77)));
    assert_eq!(world.phase(), PhaseKind::Streaming);
    assert_eq!(world.machine.queued(), 1);
}

#[test]
fn reports_of_an_old_run_are_ignored() {
    let mut world = World::streaming();
    let turn = world.at_agent.clone().unwrap().0;
    world.apply(Fact::TurnEnded(RunNo(99), turn));
    world.apply(Fact::RunEnded { run: RunNo(99), spoke: true, refused: false, error: None, hopeless: false });
    assert_eq!(world.phase(), PhaseKind::Streaming);
}

#[test]
fn what_the_journal_recovered_is_looked_up_before_anything_goes_out() {
    let turn = TurnId::parse("m1").unwrap();
    let owed = Some(OwedTurn { turn, members: vec![message(1), message(2)], deaths: 0, stopped: false });
    let unknown = Seen::Unknowable(Unknown::NotProven);
    for (seen, sent) in [
        (Seen::Absent, vec![vec!["m1", "m2"], vec!["m3"]]),
        (Seen::Finished, vec![vec!["m3"]]),
        (unknown, vec![vec!["m3"]]),
    ] {
        let mut world = World { machine: Machine::recovered(owed.clone(), vec![message(3)], &[]), ..World::default() };
        world.next_message = 3;
        world.fates = ["m1", "m2", "m3"].map(|m| (m.to_owned(), Fate::Accepted)).into();
        world.apply(Fact::RetryDue);
        assert!(!world.wants_slot);
        let (turn, _) = world.look_ups.remove(0);
        world.apply(Fact::LookedUp(turn, seen));
        world.settle_down();
        assert_eq!(world.sent_turns, sent);
        assert_eq!(world.fates["m1"], if seen == unknown { Fate::Failed } else { Fate::Done });
    }
}

#[test]
fn a_queue_that_a_dead_server_left_is_looked_up_before_its_first_byte() {
    let queue: Vec<_> = (1..=4).map(message).collect();
    let mut world = World { machine: Machine::recovered(None, queue, &[]), ..World::default() };
    world.next_message = 4;
    world.fates = ["m1", "m2", "m3", "m4"].map(|m| (m.to_owned(), Fate::Accepted)).into();
    world.apply(Fact::RetryDue);
    assert!(!world.wants_slot && world.queue_look_ups == [["m1", "m2", "m3", "m4"]]);
    // What comes meanwhile waits behind it, and a person's restart hurries nothing.
    world.send();
    world.apply(Fact::Restart);
    assert!(!world.wants_slot && world.queue_look_ups.len() == 1);
    let found = vec![FoundTurn { members: vec![message(1).uuid.clone(), message(2).uuid.clone()], finished: true }];
    let unsure = vec![message(3).uuid.clone()];
    world.apply(Fact::QueueLookedUp { found, unsure, why: Unknown::Unreadable });
    world.settle_down();
    assert_eq!(world.sent_turns, [["m4", "m5"]]);
    assert_eq!(["m1", "m2", "m3"].map(|m| world.fates[m]), [Fate::Done, Fate::Done, Fate::Failed]);
}

#[test]
fn a_turn_that_somebody_else_gave_meanwhile_is_not_given_again() {
    let turn = TurnId::parse("m1").unwrap();
    let owed = Some(OwedTurn { turn: turn.clone(), members: vec![message(1), message(2)], deaths: 0, stopped: false });
    let mut world = World { machine: Machine::recovered(owed, Vec::new(), &[]), ..World::default() };
    world.next_message = 2;
    world.fates = ["m1", "m2"].map(|m| (m.to_owned(), Fate::Accepted)).into();
    world.apply(Fact::RetryDue);
    world.look_ups.clear();
    world.apply(Fact::LookedUp(turn, Seen::Absent));
    world.send();
    world.grant();
    assert_eq!(world.phase(), PhaseKind::Starting);
    assert_eq!(world.machine.waiting_messages().len(), 3);
    let found = vec![FoundTurn { members: vec![message(1).uuid.clone(), message(2).uuid.clone()], finished: true }];
    world.apply(Fact::QueueLookedUp { found, unsure: Vec::new(), why: Unknown::Unreadable });
    world.settle_down();
    assert_eq!(world.sent_turns, [["m3"]]);
    assert_eq!(["m1", "m2"].map(|m| world.fates[m]), [Fate::Done, Fate::Done]);
}

#[test]
fn a_queue_that_is_cleared_while_it_is_looked_up_stays_cleared() {
    let mut world = World { machine: Machine::recovered(None, vec![message(1)], &[]), ..World::default() };
    world.next_message = 1;
    world.fates = [("m1".to_owned(), Fate::Accepted)].into();
    world.apply(Fact::RetryDue);
    world.stops += 1;
    world.apply(Fact::Stop);
    assert_eq!(world.fates["m1"], Fate::Cleared);
    let found = vec![FoundTurn { members: vec![message(1).uuid.clone()], finished: true }];
    world.apply(Fact::QueueLookedUp { found, unsure: Vec::new(), why: Unknown::Unreadable });
    world.send();
    world.settle_down();
    assert_eq!(world.sent_turns, [["m2"]]);
}

#[test]
fn draining_finishes_the_turn_and_begins_nothing() {
    let mut world = World::streaming();
    world.send();
    world.apply(Fact::Drain);
    assert!(!world.closed);
    world.result();
    assert!(world.closed);
    world.dies(true);
    world.grant();
    assert_eq!(world.phase(), PhaseKind::Idle);
    assert_eq!(world.fates["m2"], Fate::Accepted, "it stays in the journal");
}

fn step(world: &mut World, action: u8) {
    match action {
        0..=2 => {
            world.send();
        }
        3 => {
            world.take();
        }
        4 => {
            let under_way = (1..=world.next_message).find(|n| world.fates[&format!("m{n}")] == Fate::UnderWay);
            if let Some(n) = under_way {
                world.commit(n);
            }
        }
        5 => {
            let under_way = (1..=world.next_message).find(|n| world.fates[&format!("m{n}")] == Fate::UnderWay);
            if let Some(n) = under_way {
                world.fates.remove(&format!("m{n}"));
                world.fates.insert(format!("m{n}"), Fate::Failed);
                world.apply(Fact::NotRecorded(message(n).uuid.clone()));
            }
        }
        6..=8 => world.grant(),
        9..=11 => world.started(),
        12 => world.start_fails(),
        13..=16 => world.dispatched(),
        17 => world.refused(),
        18 => world.records(),
        19..=22 => world.result(),
        23 => world.agent_turn_begins(),
        24 => world.agent_turn_ends(),
        25 => world.dies(true),
        26 => world.dies(false),
        27..=28 => world.look_up(),
        29..=30 => world.timer(),
        31 => {
            world.stop();
        }
        32 => {
            world.apply(Fact::Restart);
        }
        33 => {
            if world.at_agent.is_some() || world.starting.is_some() {
                // An interrupted turn may end as cleared.
                world.stops += 1;
                world.apply(Fact::Interrupt);
            }
        }
        34 => {
            if let Some(run) = world.alive {
                world.stops += 1;
                world.apply(Fact::InterruptTimedOut(run));
            }
        }
        _ => {
            if world.closed {
                world.dies(true);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// Never two runs, nothing sent in a close window, nothing settled twice or dropped, busy always ends.
    #[test]
    fn any_order_of_requests_and_facts_keeps_the_promises(actions in prop::collection::vec(0u8..38, 0..120)) {
        let mut world = World::default();
        for action in actions {
            step(&mut world, action);
        }
        world.settle_down();
        // A queue that gave up starting is woken by a restart, as a person would.
        world.apply(Fact::Restart);
        world.settle_down();
        prop_assert!(!world.machine.is_busy(), "busy for ever: {}", world.story());
        prop_assert_eq!(world.machine.queued(), 0, "left behind: {}", world.story());
        for (name, fate) in &world.fates {
            prop_assert!(
                matches!(fate, Fate::Done | Fate::Cleared | Fate::Failed),
                "{} is {:?}: {}", name, fate, world.story()
            );
        }
        // Order of delivery is order of acceptance, but for turns that went out again.
        let mut first_seen = Vec::new();
        for turn in &world.sent_turns {
            for name in turn {
                if !first_seen.contains(name) {
                    first_seen.push(name.clone());
                }
            }
        }
        let number = |name: &String| name[1..].parse::<usize>().unwrap();
        prop_assert!(first_seen.iter().map(number).is_sorted(), "out of order: {}", world.story());
    }
}
