//! Which agents were seen to keep our messages' ids in the transcripts that we read. Only of such an agent does a
//! transcript without a message say that the agent does not have it.
//!
//! A proof is of one program in one home ([`AgentIdentity`]) and of the version it told; it is kept in the journal, the
//! newest few of them, so that what was handed to the agent before an exchange is judged by what that agent did.
//! Invariant: a program that tells another version than the one that was proven has no proof.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::agent::AgentIdentity;
use crate::sync::Mutex;

/// Name of the state in the journal.
pub const STATE_KEY: &str = "agents-that-keep-ids";
/// Agents that are remembered.
const PROOFS_MAX: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Proof {
    agent: String,
    /// The version it told when it was proven, if it tells one.
    version: Option<String>,
}

/// See the head of this file. A leaf lock inside.
#[derive(Debug, Default)]
pub struct Proofs {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The newest last.
    proofs: Vec<Proof>,
    /// Agents that ended a turn and left no transcript where we look, in this life of the server.
    keep_none: HashSet<AgentIdentity>,
}

impl Proofs {
    /// As the journal kept them; what is not what we write is no proof.
    #[must_use]
    pub fn from_kept(text: Option<&str>) -> Self {
        let proofs = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        Self { known: Mutex::new(Known { proofs, keep_none: HashSet::new() }) }
    }

    /// True if this agent was seen to keep our ids.
    #[must_use]
    pub fn holds(&self, agent: &AgentIdentity) -> bool {
        #[cfg(feature = "model")]
        if crate::model::is_planted(crate::model::Planted::ProofForAnybody) {
            return !self.known.lock().proofs.is_empty();
        }
        self.known.lock().proofs.iter().any(|proof| proof.agent == agent.as_str())
    }

    /// This agent was seen to keep our ids. Returns what the journal has to keep, if that is news.
    pub fn add(&self, agent: &AgentIdentity, version: Option<&str>) -> Option<String> {
        let proof = Proof { agent: agent.as_str().to_owned(), version: version.map(str::to_owned) };
        let mut known = self.known.lock();
        known.keep_none.remove(agent);
        if known.proofs.contains(&proof) {
            return None;
        }
        known.proofs.retain(|other| other.agent != proof.agent);
        known.proofs.push(proof);
        let over = known.proofs.len().saturating_sub(PROOFS_MAX);
        known.proofs.drain(..over);
        Some(kept(&known))
    }

    /// This agent told its version: a proof of another version is void. Returns what the journal has to keep, if that is
    /// news.
    pub fn told_version(&self, agent: &AgentIdentity, version: &str) -> Option<String> {
        let mut known = self.known.lock();
        let before = known.proofs.len();
        known.proofs.retain(|proof| proof.agent != agent.as_str() || proof.version.as_deref() == Some(version));
        (known.proofs.len() != before).then(|| kept(&known))
    }

    /// This agent ended a turn, and no transcript of it is where we look.
    pub fn keeps_none(&self, agent: &AgentIdentity) {
        let mut known = self.known.lock();
        if known.keep_none.len() < PROOFS_MAX {
            known.keep_none.insert(agent.clone());
        }
    }

    /// True if this agent was seen to leave no transcript where we look.
    #[must_use]
    pub fn is_known_to_keep_none(&self, agent: &AgentIdentity) -> bool {
        self.known.lock().keep_none.contains(agent)
    }
}

fn kept(known: &Known) -> String {
    serde_json::to_string(&known.proofs).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(n: usize) -> AgentIdentity {
        AgentIdentity::from_kept(format!("agent {n}"))
    }

    #[test]
    fn a_proof_is_of_one_agent_and_one_version_and_survives_a_restart() {
        let proofs = Proofs::from_kept(None);
        assert!(!proofs.holds(&agent(1)));
        let text = proofs.add(&agent(1), Some("2.1")).unwrap();
        assert_eq!(proofs.add(&agent(1), Some("2.1")), None, "no news");
        assert_eq!(proofs.told_version(&agent(1), "2.1"), None);
        let again = Proofs::from_kept(Some(&text));
        assert!(again.holds(&agent(1)) && !again.holds(&agent(2)));
        assert!(again.told_version(&agent(1), "2.2").is_some());
        assert!(!again.holds(&agent(1)), "another version has to be seen anew");
        assert!(!Proofs::from_kept(Some("true")).holds(&agent(1)), "what an older server kept is no proof");
    }

    #[test]
    fn the_newest_agents_are_remembered_and_one_that_keeps_none_until_it_keeps_one() {
        let proofs = Proofs::default();
        for n in 0..PROOFS_MAX + 2 {
            proofs.add(&agent(n), None);
        }
        assert!(!proofs.holds(&agent(1)) && proofs.holds(&agent(2)));
        proofs.keeps_none(&agent(1));
        assert!(proofs.is_known_to_keep_none(&agent(1)));
        proofs.add(&agent(1), None);
        assert!(!proofs.is_known_to_keep_none(&agent(1)));
    }
}
