//! PURE. The five phases of a session and the one table of legal moves between them; `machine` turns facts into the
//! next phase and effects. Leaves carrying effects out to `session`. Rule a change could break: a phase that has a run
//! carries it, one that has none cannot, and every move goes through [`Lifecycle::move_to`].

pub mod machine;

use std::fmt;

/// What a session is in; `R` is the handle of its run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase<R> {
    /// No run, the last one reaped: the start, and where every run ends.
    Idle,
    /// A start is under way; no run handle yet.
    Starting,
    /// A run is open, waiting for the next turn.
    Ready {
        /// The open run.
        run: R,
    },
    /// A turn is in flight.
    Streaming {
        /// The run that thinks.
        run: R,
    },
    /// A graceful stop closed the run.
    Stopping {
        /// The run that is going.
        run: R,
        /// A turn was in flight when the stop came.
        was_busy: bool,
    },
}

/// A phase without its data, for tables, logs and the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PhaseKind {
    /// [`Phase::Idle`]
    Idle,
    /// [`Phase::Starting`]
    Starting,
    /// [`Phase::Ready`]
    Ready,
    /// [`Phase::Streaming`]
    Streaming,
    /// [`Phase::Stopping`]
    Stopping,
}

impl PhaseKind {
    /// All five, in the order of the contract's table.
    pub const ALL: [PhaseKind; 5] =
        [PhaseKind::Idle, PhaseKind::Starting, PhaseKind::Ready, PhaseKind::Streaming, PhaseKind::Stopping];

    /// The word on the wire.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            PhaseKind::Idle => "idle",
            PhaseKind::Starting => "starting",
            PhaseKind::Ready => "ready",
            PhaseKind::Streaming => "streaming",
            PhaseKind::Stopping => "stopping",
        }
    }

    /// THE TABLE: may a session move from `self` to `to`?
    #[must_use]
    pub fn may_move_to(self, to: PhaseKind) -> bool {
        use PhaseKind::{Idle, Ready, Starting, Stopping, Streaming};
        matches!(
            (self, to),
            (Idle, Starting)
                | (Starting, Ready | Idle)
                | (Ready, Streaming | Stopping | Idle)
                | (Streaming, Ready | Stopping | Idle)
                | (Stopping, Idle)
        )
    }
}

/// A move that the table does not have: a bug of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvariantError {
    /// Where the session was.
    pub from: PhaseKind,
    /// Where the move would have led.
    pub to: PhaseKind,
}

impl fmt::Display for InvariantError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no move leads from {} to {}", self.from.word(), self.to.word())
    }
}

impl std::error::Error for InvariantError {}

impl<R> Phase<R> {
    /// The phase without its data.
    #[must_use]
    pub fn kind(&self) -> PhaseKind {
        match self {
            Phase::Idle => PhaseKind::Idle,
            Phase::Starting => PhaseKind::Starting,
            Phase::Ready { .. } => PhaseKind::Ready,
            Phase::Streaming { .. } => PhaseKind::Streaming,
            Phase::Stopping { .. } => PhaseKind::Stopping,
        }
    }

    /// The run of the phases that have one.
    #[must_use]
    pub fn run(&self) -> Option<&R> {
        match self {
            Phase::Idle | Phase::Starting => None,
            Phase::Ready { run } | Phase::Streaming { run } | Phase::Stopping { run, .. } => Some(run),
        }
    }

    /// A run is open for turns; the caller also asks the run whether it is closed.
    #[must_use]
    pub fn is_running(&self) -> bool {
        match self {
            Phase::Ready { .. } | Phase::Streaming { .. } => true,
            Phase::Idle | Phase::Starting | Phase::Stopping { .. } => false,
        }
    }

    /// A start or a turn is under way.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        match self {
            Phase::Idle | Phase::Ready { .. } => false,
            Phase::Starting | Phase::Streaming { .. } => true,
            Phase::Stopping { was_busy, .. } => *was_busy,
        }
    }
}

/// The phase of one session, written by one function only.
#[derive(Debug, Clone)]
pub struct Lifecycle<R> {
    phase: Phase<R>,
}

impl<R: Clone> Default for Lifecycle<R> {
    fn default() -> Self {
        Self { phase: Phase::Idle }
    }
}

impl<R: Clone> Lifecycle<R> {
    /// The phase now.
    pub fn phase(&self) -> &Phase<R> {
        &self.phase
    }

    /// The only writer.
    ///
    /// # Errors
    /// [`InvariantError`] for a move that is not in [`PhaseKind::may_move_to`]; the phase stays.
    pub fn move_to(&mut self, next: Phase<R>) -> Result<(), InvariantError> {
        let (from, to) = (self.phase.kind(), next.kind());
        if !from.may_move_to(to) {
            return Err(InvariantError { from, to });
        }
        self.phase = next;
        Ok(())
    }

    /// A turn ended: Streaming becomes Ready, Stopping goes on with nothing in flight, anything else stays.
    pub fn after_turn_result(&mut self) {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Streaming { run } => Phase::Ready { run },
            Phase::Stopping { run, .. } => Phase::Stopping { run, was_busy: false },
            Phase::Idle => Phase::Idle,
            Phase::Starting => Phase::Starting,
            Phase::Ready { run } => Phase::Ready { run },
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(kind: PhaseKind) -> Phase<u8> {
        match kind {
            PhaseKind::Idle => Phase::Idle,
            PhaseKind::Starting => Phase::Starting,
            PhaseKind::Ready => Phase::Ready { run: 1 },
            PhaseKind::Streaming => Phase::Streaming { run: 1 },
            PhaseKind::Stopping => Phase::Stopping { run: 1, was_busy: true },
        }
    }

    #[test]
    fn the_whole_grid_of_moves() {
        // Rows: from; columns: to, in the order idle starting ready streaming stopping.
        let grid = ["01000", "10100", "10011", "10101", "10000"];
        for (from, row) in PhaseKind::ALL.into_iter().zip(grid) {
            for (to, legal) in PhaseKind::ALL.into_iter().zip(row.chars()) {
                let mut lifecycle = Lifecycle { phase: at(from) };
                let moved = lifecycle.move_to(at(to));
                if legal == '1' {
                    assert_eq!(moved, Ok(()), "{from:?} -> {to:?}");
                    assert_eq!(lifecycle.phase(), &at(to));
                } else {
                    assert_eq!(moved, Err(InvariantError { from, to }));
                    assert_eq!(lifecycle.phase(), &at(from), "a refused move changes nothing");
                }
            }
        }
    }

    #[test]
    fn running_and_busy_as_the_contract_says() {
        let table =
            [("idle", false, false), ("starting", false, true), ("ready", true, false), ("streaming", true, true)];
        for (word, running, busy) in table {
            let kind = PhaseKind::ALL.into_iter().find(|k| k.word() == word).unwrap();
            assert_eq!((at(kind).is_running(), at(kind).is_busy()), (running, busy), "{word}");
        }
        for was_busy in [false, true] {
            let phase = Phase::Stopping { run: 1, was_busy };
            assert_eq!((phase.is_running(), phase.is_busy()), (false, was_busy));
        }
    }

    #[test]
    fn after_a_result_streaming_is_ready_and_stopping_is_no_longer_busy() {
        for (from, to) in [
            (Phase::Streaming { run: 1 }, Phase::Ready { run: 1 }),
            (Phase::Stopping { run: 1, was_busy: true }, Phase::Stopping { run: 1, was_busy: false }),
            (Phase::Idle, Phase::Idle),
            (Phase::Starting, Phase::Starting),
            (Phase::Ready { run: 1 }, Phase::Ready { run: 1 }),
        ] {
            let mut lifecycle = Lifecycle { phase: from };
            lifecycle.after_turn_result();
            assert_eq!(lifecycle.phase(), &to);
        }
    }
}
