//! This member's position in the group, and what it last heard of the others.

use std::{collections::BTreeMap, time::Duration};

/// What was last heard of another member.
pub(super) struct PeerProgress {
    pub(super) at: Duration,
    pub(super) applied: u64,
    pub(super) disk: u32,
    pub(super) level: u32,
}

/// This member's position in the group: whether it should lead, and whether it is still a member.
#[derive(Default)]
pub(super) struct Standing {
    pub(super) peer_progress: BTreeMap<u64, PeerProgress>,
    /// Term, and whether this member led, at the last look.
    pub was: (u64, bool),
    /// When this member began to lead, and when it last handed leadership over because of its disk.
    pub led_since: Duration,
    pub(super) yielded: Duration,
    /// When its disk became slow or full.
    pub(super) unfit: Option<Duration>,
    /// Ticks since this member applied its own removal.
    pub removed: Option<u32>,
}
