//! Work that was handed out and waits for disk space, or until a damaged state is replaced.

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
    /// Applying these failed because the disk is full.
    pub backlog: Option<ToApply>,
    /// The end of a copy of the leader's state, which failed because the disk is full.
    pub unfinished: Option<Output>,
    /// The error, if the disk is full, or the state is damaged and no other member has a good one.
    pub why: Option<Error>,
}

impl Stall {
    /// Whether something that was handed out waits for space for the state.
    pub(super) fn is_blocked(&self) -> bool {
        self.backlog.is_some() || self.unfinished.is_some()
    }
}

/// What is wrong with the state.
#[derive(Default)]
pub(super) struct Damage {
    /// Kept until the state is replaced.
    pub found: Option<Error>,
    /// How often something was found.
    pub count: u64,
    /// Ticks without a state and without a leader.
    pub(super) leaderless_ticks: u32,
}

impl Damage {
    /// Reports and counts damage once, until the state is replaced.
    pub(super) fn note(&mut self, e: Error) {
        if self.found.is_none() {
            tracing::error!("the state of this metadata server is damaged: {e}");
            self.count += 1;
            self.found = Some(e);
        }
    }
}
