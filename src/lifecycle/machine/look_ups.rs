//! PURE. What follows from a look into the transcript: a turn whose run is gone is done, goes out again, is split or fails;
//! what waits since an earlier life was delivered already or not.

use super::{DEATHS_MAX, Effect, EndHow, FoundTurn, Machine, Queue, RunRef, Seen, Unknown};
use crate::ids::{MessageUuid, TurnId};
use crate::lifecycle::InvariantError;

impl<R: RunRef> Machine<R> {
    pub(super) fn looked_up(
        &mut self,
        turn: &TurnId,
        seen: Seen,
        out: &mut Vec<Effect<R>>,
    ) -> Result<(), InvariantError> {
        let Some(mut owed) = self.owed.take_if(|o| o.turn == *turn && o.unsure) else { return Ok(()) };
        let how = match seen {
            Seen::Finished => EndHow::Recovered,
            Seen::Unfinished => EndHow::BrokeOff,
            Seen::Absent if owed.stopped => EndHow::Cleared,
            Seen::Absent if owed.deaths + 1 < DEATHS_MAX => EndHow::Again,
            Seen::Absent if owed.members.len() > 1 => EndHow::Split,
            Seen::Absent => EndHow::Failed(format!("the agent died {DEATHS_MAX} times before it recorded the message")),
            Seen::Unknowable(_) if owed.stopped => EndHow::Cleared,
            Seen::Unknowable(why) => EndHow::Failed(why.error()),
        };
        out.push(Effect::End { turn: owed.turn.clone(), members: owed.members.clone(), how: how.clone() });
        match how {
            EndHow::Again => {
                owed.deaths += 1;
                owed.unsure = false;
                self.owed = Some(owed);
            }
            EndHow::Split => self.inbox.put_back(owed.members, true),
            EndHow::Result | EndHow::Recovered | EndHow::BrokeOff | EndHow::Cleared | EndHow::Failed(_) => {}
        }
        out.push(Effect::Changed);
        self.advance(out)
    }

    pub(super) fn queue_looked_up(
        &mut self,
        found: Vec<FoundTurn>,
        unsure: &[MessageUuid],
        why: Unknown,
        out: &mut Vec<Effect<R>>,
    ) -> Result<(), InvariantError> {
        self.queue = Queue::Known;
        for FoundTurn { members, finished } in found {
            // A turn that was to go out again, and went out elsewhere meanwhile.
            if let Some(owed) =
                self.owed.take_if(|o| !o.unsure && members.first() == o.members.first().map(|m| &m.uuid))
            {
                out.push(Effect::Found { turn: owed.turn, members: owed.members, finished });
            }
            // One that a person cleared meanwhile is no longer there.
            let members: Vec<_> = members.iter().filter_map(|uuid| self.inbox.take_out(uuid)).collect();
            if let Some(first) = members.first() {
                out.push(Effect::Found { turn: TurnId::of(&first.uuid), members, finished });
            }
        }
        let lost: Vec<_> = unsure.iter().filter_map(|uuid| self.inbox.take_out(uuid)).collect();
        if !lost.is_empty() {
            out.push(Effect::Failed(lost, why.error()));
        }
        out.push(Effect::Changed);
        self.advance(out)
    }
}
