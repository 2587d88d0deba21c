//! The metadata group that this server belongs to.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use strake_proto::{Incarnation, Kin};

use crate::engine::TargetIdentity;

/// See the module.
#[derive(Default)]
pub(super) struct Group {
    fs: Mutex<Option<[u8; 16]>>,
    joined: AtomicU64,
}

impl Group {
    /// The cluster's UUID, once known.
    pub(super) fn fs(&self) -> Option<[u8; 16]> {
        *self.fs.lock()
    }

    /// `fs`: the cluster's UUID as a map has it; not 16 bytes if it does not tell.
    pub(super) fn set_fs(&self, fs: &[u8]) {
        *self.fs.lock() = fs.try_into().ok();
    }

    /// Incarnation of the metadata group that this server last registered with; 0 before.
    pub(super) fn joined(&self) -> u64 {
        self.joined.load(Ordering::Acquire)
    }

    /// This server registered with a group. Returns whether that is another one than before.
    pub(super) fn join(&self, incarnation: u64) -> bool {
        self.joined.swap(incarnation, Ordering::AcqRel) != incarnation
    }
}

/// Whether a target may work with the metadata group of incarnation `now`.
pub(super) fn follows(target: &TargetIdentity, now: u64) -> bool {
    let was = Incarnation(target.incarnation);
    // A target that never joined has no group.
    target.fs_uuid == [0; 16] || matches!(was.kin(Incarnation(now)), Kin::Same | Kin::Newer)
}
