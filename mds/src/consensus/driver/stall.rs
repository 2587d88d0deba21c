//! What was handed out and waits: for space on the disk, or until a damaged state is replaced.

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
