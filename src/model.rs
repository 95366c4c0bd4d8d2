//! The world around the shipped session code in the model checker: what agents have recorded and what the ledger says,
//! and what must hold of both. Leaves agents to `agent::pump::model`, scenarios to `tests/model.rs`. Rule a change could
//! break: nothing here yields to the checker, so each call is one step.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use shuttle::rand::{Rng as _, thread_rng};

use crate::agent::AgentIdentity;
use crate::archive::Trace;
use crate::error::{Code, Error, Result};
use crate::ids::{MessageId, MessageUuid, SessionId, TurnId};
use crate::journal::{AcceptOutcome, Acceptance, Change, Claim, ClaimAnswer, KeptAnswer, MessageState, Unit};

/// Waits that run into their limit in one schedule.
const TIME_OUTS_MAX: usize = 4;

/// What may go wrong in a scenario.
#[derive(Debug, Clone, Copy, Default)]
pub struct Weather {
    /// Live agents of chats at one time.
    pub live_max: usize,
    /// Agents die in a turn, before or after they recorded it.
    pub mortal: bool,
    /// Acceptances fail.
    pub bad_disk: bool,
    /// Agents answer as another conversation than they were started for, also as one that is in use.
    pub renames: bool,
    /// Waits with a time limit run into it.
    pub impatient: bool,
    /// Which agents there are.
    pub agents: Agents,
}

/// What agents keep of what they are given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Agents {
    /// All keep it where the server looks.
    #[default]
    Keep,
    /// None keeps anything.
    KeepNothing,
    /// Any start may be that of another program, which keeps nothing.
    Exchanged,
}

/// What becomes of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It gets its result.
    Ends,
    /// The agent dies.
    Dies,
}

/// A fault put into the shipped code, to see that the checker finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// The queue drains while a turn is in flight.
    DrainBeforeReady,
    /// The pool parks the active thread without waiting for its turn.
    ParkWithoutWaiting,
    /// That one agent keeps what it is given is taken as proof for every other.
    ProofForAnybody,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Accepted,
    Dispatched,
    Settled(&'static str),
}

#[derive(Default)]
struct World {
    weather: Weather,
    planted: Option<Planted>,
    live: HashSet<SessionId>,
    of_threads: HashSet<SessionId>,
    messages: HashMap<MessageUuid, Is>,
    order: HashMap<SessionId, Vec<MessageUuid>>,
    given: HashMap<SessionId, Vec<MessageUuid>>,
    turns: HashMap<TurnId, Vec<MessageUuid>>,
    recorded: HashMap<TurnId, bool>,
    /// Conversations whose live agent keeps nothing.
    keep_nothing: HashSet<SessionId>,
    /// Turns that such an agent took: nobody but it knows.
    unkept: HashSet<TurnId>,
    transcripts: HashSet<SessionId>,
    answers: HashMap<MessageUuid, KeptAnswer>,
    claims: HashMap<MessageId, ([u8; 32], ClaimAnswer)>,
    deaths: usize,
    renames: usize,
    time_outs: usize,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

struct Here(MutexGuard<'static, Option<World>>);

impl Here {
    fn world(&mut self) -> &mut World {
        self.0.get_or_insert_default()
    }
}

fn here() -> Here {
    Here(WORLD.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A fresh world, for one schedule.
pub fn begin(weather: Weather, planted: Option<Planted>) {
    *here().0 = Some(World { weather, planted, ..World::default() });
}

/// True while a scenario runs.
#[must_use]
pub fn is_on() -> bool {
    here().0.is_some()
}

/// True if a wait with a limit times out, at most [`TIME_OUTS_MAX`] times in a schedule, so that every loop ends.
#[must_use]
pub fn times_out() -> bool {
    let mut here = here();
    let Some(world) = here.0.as_mut().filter(|w| w.weather.impatient && w.time_outs < TIME_OUTS_MAX) else {
        return false;
    };
    let now = thread_rng().gen_range(0..4) == 0;
    world.time_outs += usize::from(now);
    now
}

/// No wait times out any more: what is under way is waited for to its end.
pub fn be_patient() {
    here().world().weather.impatient = false;
}

/// True if this fault is planted.
#[must_use]
pub fn is_planted(fault: Planted) -> bool {
    here().0.as_ref().is_some_and(|w| w.planted == Some(fault))
}

/// An agent begins to live.
pub fn run_began(session: &SessionId) {
    let mut here = here();
    let world = here.world();
    assert!(world.live.insert(session.clone()), "two agents live for one conversation");
    let (threads, chats): (Vec<_>, Vec<_>) = world.live.iter().partition(|s| world.of_threads.contains(*s));
    assert!(threads.len() <= 1, "two agents live for the pool");
    assert!(
        chats.len() <= world.weather.live_max,
        "{} agents live on a cap of {}",
        chats.len(),
        world.weather.live_max
    );
}

/// Another id that an agent gives itself, and whether it dropped what was said before.
#[must_use]
pub fn another_id(session: &SessionId) -> Option<(SessionId, bool)> {
    let mut here = here();
    let world = here.world();
    if !world.weather.renames || world.renames == 3 || thread_rng().gen_range(0..2) == 0 {
        return None;
    }
    world.renames += 1;
    let id = SessionId::parse(["late-1", "late-2"][thread_rng().gen_range(0..2)]).ok()?;
    (id != *session).then(|| (id, thread_rng().gen_range(0..2) == 0))
}

/// An agent was followed to its other id.
pub fn run_moved(was: &SessionId, now: &SessionId) {
    let mut here = here();
    let world = here.world();
    assert!(world.live.remove(was), "it lives");
    assert!(world.live.insert(now.clone()), "two agents live for one conversation");
}

/// An agent is gone.
pub fn run_ended(session: &SessionId) {
    assert!(here().world().live.remove(session), "an agent ends once");
}

/// A turn reaches an agent.
pub fn take_turn(session: &SessionId, turn: &TurnId, closed: bool) -> Fate {
    let mut here = here();
    let world = here.world();
    let members = world.turns.get(turn).cloned().unwrap_or_default();
    assert!(!members.is_empty(), "the first byte goes to the agent after `dispatched` is recorded");
    // A few deaths in a schedule say as much as many.
    let dies = world.weather.mortal && world.deaths < 2 && thread_rng().gen_range(0..3) == 0;
    let dies = dies || (closed && thread_rng().gen_range(0..2) == 0);
    if dies {
        world.deaths += 1;
    }
    if !dies || thread_rng().gen_range(0..2) == 0 {
        let is_kept = !world.keep_nothing.contains(session);
        let again = world.unkept.contains(turn) || world.recorded.contains_key(turn);
        assert!(!again, "delivered twice");
        if is_kept {
            world.recorded.insert(turn.clone(), !dies);
            world.transcripts.insert(session.clone());
        } else {
            world.unkept.insert(turn.clone());
        }
        for member in &members {
            assert_eq!(world.messages.get(member), Some(&Is::Dispatched), "the ledger knows what the agent has");
        }
        world.given.entry(session.clone()).or_default().extend(members);
    }
    if dies { Fate::Dies } else { Fate::Ends }
}

/// Whether an agent wrote a transcript of this conversation.
#[must_use]
pub fn has_transcript(session: &SessionId) -> bool {
    here().world().transcripts.contains(session)
}

/// Which program the next agent of a conversation is.
#[must_use]
pub fn agent_of(session: &SessionId) -> Option<AgentIdentity> {
    let mut here = here();
    let world = here.0.as_mut()?;
    let keeps = match world.weather.agents {
        Agents::Keep => true,
        Agents::KeepNothing => false,
        Agents::Exchanged => thread_rng().gen_range(0..2) == 0,
    };
    if keeps {
        world.keep_nothing.remove(session);
    } else {
        world.keep_nothing.insert(session.clone());
    }
    Some(AgentIdentity::from_kept(if keeps { "keeps" } else { "keeps nothing" }.to_owned()))
}

/// What a transcript says of these turns.
#[must_use]
pub fn trace(session: &SessionId, ids: &[&str]) -> Trace {
    let mut here = here();
    let world = here.world();
    match world.recorded.iter().find(|(turn, _)| ids.contains(&turn.as_str())) {
        Some((_, finished)) => Trace::Recorded { finished: *finished, elsewhere: None },
        None if world.transcripts.contains(session) => Trace::NotRecorded { anchored: true },
        None => Trace::NoFile,
    }
}

/// Whether a transcript holds this turn.
#[must_use]
pub fn is_recorded(turn: &str) -> bool {
    here().world().recorded.keys().any(|recorded| recorded.as_str() == turn)
}

/// Records a message.
///
/// # Errors
/// In bad weather.
pub fn accept(acceptance: &Acceptance) -> Result<AcceptOutcome> {
    let mut here = here();
    let world = here.world();
    if let Some(claim) = &acceptance.claim
        && let Some((hash, first)) = world.claims.get(&claim.id)
    {
        return Ok(if *hash == claim.hash { AcceptOutcome::Repeat(first.clone()) } else { AcceptOutcome::Conflict });
    }
    if world.weather.bad_disk && thread_rng().gen_range(0..4) == 0 {
        return Err(Error::new(Code::CannotRecord, "the model's disk"));
    }
    if acceptance.thread.is_some() {
        world.of_threads.insert(acceptance.session.clone());
    }
    let uuid = &acceptance.message.uuid;
    assert!(world.messages.insert(uuid.clone(), Is::Accepted).is_none(), "accepted twice");
    world.order.entry(acceptance.session.clone()).or_default().push(uuid.clone());
    if let Some(claim) = &acceptance.claim {
        let answer = ClaimAnswer {
            session: acceptance.session.clone(),
            message_uuid: uuid.clone(),
            event_id: 1,
            turn: acceptance.turn.clone(),
            state: MessageState::Accepted,
        };
        world.claims.insert(claim.id.clone(), (claim.hash, answer));
    }
    Ok(AcceptOutcome::Recorded { event_id: 1 })
}

/// Conversations of the box that took a message, by the ids they had then; none where ids change and messages move.
#[must_use]
pub fn chats_with_messages() -> Vec<SessionId> {
    let mut here = here();
    let world = here.world();
    let stay = !world.weather.renames;
    world.order.keys().filter(|id| stay && !world.of_threads.contains(*id)).cloned().collect()
}

/// Moves messages as the ledger would, and refuses what it would refuse.
pub fn record(unit: &Unit) {
    let mut here = here();
    let world = here.world();
    for change in &unit.changes {
        match change {
            Change::Dispatch { turn, members, .. } => {
                for member in members {
                    world.set(member, Is::Accepted, Is::Dispatched);
                }
                world.turns.insert(turn.clone(), members.clone());
            }
            Change::Recall { turn } | Change::Split { turn } => {
                for member in world.turns.remove(turn).unwrap_or_default() {
                    world.set(&member, Is::Dispatched, Is::Accepted);
                }
            }
            Change::Done { turn, .. } => {
                for member in world.turns.get(turn).cloned().unwrap_or_default() {
                    world.set(&member, Is::Dispatched, Is::Settled("done"));
                }
            }
            Change::Clear { messages, .. } => {
                for message in messages {
                    world.settle(message, "cleared");
                }
            }
            Change::Fail { messages, .. } => {
                for message in messages {
                    world.settle(message, "failed");
                }
            }
            Change::ThreadAnswer { message, responses_json, success } => {
                let answer = KeptAnswer { responses_json: responses_json.clone(), success: *success };
                assert!(world.answers.insert(message.clone(), answer).is_none(), "answered twice");
            }
            Change::Alias { was, now } | Change::Move { was, now } => {
                let mut all = world.order.get(was).cloned().unwrap_or_default();
                let there = world.order.remove(now).unwrap_or_default();
                all.extend(there.into_iter().filter(|m| !all.contains(m)).collect::<Vec<_>>());
                world.order.insert(now.clone(), all);
            }
            Change::Found { messages, .. } => {
                for message in messages {
                    world.settle(message, "done");
                }
            }
            Change::Stopped { .. }
            | Change::Retry { .. }
            | Change::Discard { .. }
            | Change::Session(_)
            | Change::Agent { .. }
            | Change::AgentGone { .. }
            | Change::SetState { .. }
            | Change::Features { .. }
            | Change::Thread { .. } => {}
        }
    }
}

impl World {
    fn set(&mut self, message: &MessageUuid, from: Is, to: Is) {
        let was = self.messages.insert(message.clone(), to);
        assert_eq!(was, Some(from), "no legal move to {to:?}");
    }

    fn settle(&mut self, message: &MessageUuid, how: &'static str) {
        let was = self.messages.insert(message.clone(), Is::Settled(how));
        assert!(matches!(was, Some(Is::Accepted | Is::Dispatched)), "{was:?} becomes {how}");
    }
}

/// The answer of a thread's message.
#[must_use]
pub fn thread_answer(message: &MessageUuid) -> Option<KeptAnswer> {
    here().world().answers.get(message).cloned()
}

/// The answer of a claim.
#[must_use]
pub fn claim_answer(claim: &Claim) -> Option<ClaimAnswer> {
    here().world().claims.get(&claim.id).map(|(_, first)| first.clone())
}

/// What must hold when everything is over: no agent lives, everything accepted is settled once, in order, and what is
/// done is what an agent recorded.
pub fn end() {
    let world = here().0.take().expect("a scenario began");
    assert!(world.live.is_empty(), "an agent is left");
    let recorded: HashSet<_> = world.given.values().flatten().collect();
    for (message, is) in &world.messages {
        let Is::Settled(how) = is else { panic!("{message} is {is:?} at the end") };
        let was_given = recorded.contains(message);
        assert!(*how != "done" || was_given, "{message} is done, and no agent had it");
        // What an agent that keeps nothing took, nobody can know after its death.
        let is_unknown = world.turns.iter().any(|(turn, all)| world.unkept.contains(turn) && all.contains(message));
        assert!(!was_given || is_unknown || *how == "done", "{message} is {how}");
    }
    for (session, given) in &world.given {
        let accepted = world.order.get(session).cloned().unwrap_or_default();
        let in_order: Vec<_> = accepted.iter().filter(|m| given.contains(m)).collect();
        assert_eq!(in_order, given.iter().collect::<Vec<_>>(), "delivered in the order of acceptance");
    }
}
