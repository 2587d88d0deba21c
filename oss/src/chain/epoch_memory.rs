//! What a replica remembers of one epoch, because late copies of messages may come: refusals,
//! rounds and removed data. Copies from other epochs are refused for their epoch.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use strake_proto::{ChunkId, Code, Error, SessionId, data::Version};

use super::slot::Refusal;

/// Most chunks for which the replica remembers a refused version. For other chunks a late copy of a
/// refused update may be taken.
const KEPT_SPENT: usize = 4096;

/// Most refusals that the head remembers.
const KEPT_REFUSALS: usize = 1024;

/// Most ids of removed data that a replica remembers.
pub(super) const KEPT_GONE: usize = 8192;

/// A client's update that was refused for good.
#[derive(Clone, Debug, Hash)]
struct Refused {
    session: SessionId,
    seq: u64,
    code: Code,
    message: String,
}

/// A version that was refused for good. Other replicas may have been asked to make it, and a copy
/// of that request may still be in flight.
#[derive(Clone, Copy, Debug, Hash)]
struct Spent {
    version: Version,
    code: Code,
}

/// See the module.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct EpochMemory {
    /// The last refusals. A client that was told of a refusal goes on and may write something newer
    /// there, which a late copy of the refused request must not overwrite.
    refused: VecDeque<Refused>,
    /// The newest refused version of each chunk, until something newer is committed. The head gives
    /// no other update that version; the other replicas take no update with it.
    spent: BTreeMap<ChunkId, Spent>,
    /// The newest round of each session from which an update came; never 0. Updates that the client
    /// gave up have an older round.
    rounds: BTreeMap<SessionId, u64>,
    /// Data removed for good, the latest ones: by data id, and in order.
    gone: (BTreeSet<u64>, VecDeque<u64>),
}

impl EpochMemory {
    /// From now on no late copy may make a chunk of this data.
    pub(super) fn data_is_gone(&mut self, data: u64) {
        let (known, order) = &mut self.gone;
        if known.insert(data) {
            order.push_back(data);
        }
        if order.len() > KEPT_GONE
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
        debug_assert!(known.len() == order.len() && order.len() <= KEPT_GONE);
    }

    pub(super) fn is_gone(&self, data: u64) -> bool {
        self.gone.0.contains(&data)
    }

    /// Whether the session has begun a newer round since this update was sent. An update already
    /// queued before the newer round's first update is not late: it is applied before that one.
    pub(super) fn is_late(&mut self, session: SessionId, round: u64) -> bool {
        match self.rounds.get(&session) {
            Some(newest) if round < *newest => return true,
            None if round == 0 => {}
            _ => drop(self.rounds.insert(session, round)),
        }
        false
    }

    /// Remembers that a client's update was refused for good.
    pub(super) fn refused(&mut self, session: SessionId, seq: u64, e: &Error) {
        if self.refused.len() >= KEPT_REFUSALS {
            self.refused.pop_front();
        }
        self.refused.push_back(Refused { session, seq, code: e.code, message: e.message.clone() });
        debug_assert!(self.refused.len() <= KEPT_REFUSALS);
    }

    /// Why a client's update was refused, if it was.
    pub(super) fn refusal_of(&self, session: SessionId, seq: u64) -> Option<Error> {
        let r = self.refused.iter().find(|r| r.session == session && r.seq == seq)?;
        Some(Error::new(r.code, r.message.clone()))
    }

    /// Remembers a refused version that other replicas may have been asked for, too. Refusals after
    /// which the sender asks again are not remembered.
    pub(super) fn spend(&mut self, chunk: ChunkId, version: Version, e: &Error) {
        if Refusal::of(e.code) != Refusal::Final
            || self.spent.get(&chunk).is_some_and(|s| version <= s.version)
        {
            return;
        }
        if self.spent.len() >= KEPT_SPENT && !self.spent.contains_key(&chunk) {
            self.spent.pop_first(); // of the oldest file
        }
        self.spent.insert(chunk, Spent { version, code: e.code });
        debug_assert!(self.spent.len() <= KEPT_SPENT);
    }

    /// The newest refused version of a chunk.
    pub(super) fn spent_version(&self, chunk: &ChunkId) -> Option<Version> {
        self.spent.get(chunk).map(|s| s.version)
    }

    /// With which code this version of a chunk, or a newer one, was refused.
    pub(super) fn refused_version(&self, chunk: &ChunkId, version: Version) -> Option<Code> {
        self.spent.get(chunk).filter(|s| version <= s.version).map(|s| s.code)
    }

    /// Something newer than what was refused is committed.
    pub(super) fn committed(&mut self, chunk: &ChunkId) {
        self.spent.remove(chunk);
    }
}
