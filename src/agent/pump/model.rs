//! The agent of the model checker, in place of a process: takes turns, records them, sometimes dies. Leaves what must
//! hold to `crate::model`. Rule a change could break: as with the real one, `ended` comes once, after the agent is gone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::handle::{Order, Shared};
use crate::agent::{Run, RunEnd, RunFact, RunListener, RunSpec, TurnEnd};
use crate::ids::SessionId;
use crate::model::{self, Fate};
use crate::sync::Receiver;

/// Body of a run's thread.
pub(super) fn run(spec: &RunSpec, listener: &dyn RunListener, shared: &Arc<Shared>, orders: &Receiver<Order>) {
    let mut me = spec.session.clone();
    model::run_began(&me);
    let spoke = live(spec, &mut me, listener, shared, orders);
    shared.closed.store(true, Ordering::Release);
    model::run_ended(&me);
    listener.ended(RunEnd {
        run: spec.run,
        spoke,
        start_error: None,
        asked: shared.asked.load(Ordering::Acquire),
        exit: "exit 0".into(),
        stderr_tail: String::new(),
        errors: Vec::new(),
        refused: false,
        has_conversation: false,
    });
}

fn live(
    spec: &RunSpec,
    me: &mut SessionId,
    listener: &dyn RunListener,
    shared: &Arc<Shared>,
    orders: &Receiver<Order>,
) -> bool {
    let mut spoke = false;
    if shared.is_closed() || listener.prepare(spec.run).is_err() || shared.is_closed() {
        return spoke;
    }
    listener.started(&Run { shared: Arc::clone(shared) }, 1, 1);
    loop {
        while let Ok(order) = orders.try_recv() {
            let Order::Turn(turn) = order else { continue };
            if !std::mem::replace(&mut spoke, true) {
                listener.fact(spec.run, RunFact::Spoke);
            }
            if let Some((id, cleared)) = model::another_id(me) {
                // It left the old one before it tells.
                let was = std::mem::replace(me, SessionId::fresh());
                model::run_moved(&was, me);
                listener.fact(spec.run, RunFact::SessionId { id: id.clone(), cleared });
                // The id was another conversation's, or somebody stopped this one.
                if shared.is_closed() {
                    return spoke;
                }
                model::run_moved(me, &id);
                *me = id;
            }
            let fate = model::take_turn(me, &turn.turn, shared.is_closed());
            if fate == Fate::Dies {
                return spoke;
            }
            listener.fact(
                spec.run,
                RunFact::TurnEnded(TurnEnd {
                    turn: turn.turn,
                    ours: true,
                    is_error: false,
                    subtype: "success".into(),
                    errors: Vec::new(),
                    interrupted: false,
                    had_it_already: false,
                    last_assistant_uuid: None,
                    duration_ms: None,
                    num_turns: None,
                    total_cost_usd: None,
                }),
            );
        }
        if shared.is_closed() {
            return spoke;
        }
        let mut woken = shared.woken.0.lock();
        while !std::mem::take(&mut *woken) {
            shared.woken.1.wait(&mut woken);
        }
    }
}
