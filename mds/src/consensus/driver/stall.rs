//! What was handed out and waits for space on the disk, or until a damaged state is replaced.

use raft::eraftpb::{ConfState, Entry};
use strake_proto::Error;

use super::super::core::Output;

/// Committed entries for the state.
pub(super) struct ToApply {
    pub entries: Vec<Entry>,
    pub conf: Option<ConfState>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Stall {
    /// Applying these found the disk full.
    pub backlog: Option<ToApply>,
    /// The end of a copy of the leader's state, which found the disk full.
    pub unfinished: Option<Output>,
    /// The disk is full, or the state is damaged and no other member has one, with what it said.
    pub why: Option<Error>,
}

impl Stall {
    /// Something that was handed out waits for space for the state.
    pub(super) fn is_blocked(&self) -> bool {
        self.backlog.is_some() || self.unfinished.is_some()
    }
}

/// What is wrong with the state.
#[derive(Default)]
pub(super) struct Damage {
    /// Until the state is replaced.
    pub found: Option<Error>,
    /// How often something was found.
    pub count: u64,
    /// Ticks without a state and without a leader.
    pub(super) leaderless_ticks: u32,
}

impl Damage {
    /// Reported and counted once, until the state is replaced.
    pub(super) fn note(&mut self, e: Error) {
        if self.found.is_none() {
            tracing::error!("the state of this metadata server is damaged: {e}");
            self.count += 1;
            self.found = Some(e);
        }
    }
}
