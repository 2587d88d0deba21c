//! The cost limit of one list of operations. Every member applies the log, one entry after the
//! other, and again after a restart, so an expensive list makes everything wait. Work is counted in
//! steps as it is done, by what was read and written and never by a clock: every member gets the
//! same result. A step is about a tenth of a microsecond.

use std::cell::Cell;

use strake_proto::{Code, pb};

use super::fail::{Res, fail};

/// Most steps of one list, about 40 ms. 8,192 lookups cost 7/8 of it.
pub(super) const OF_A_LIST: u64 = 400_000;
/// Beginning an operation.
pub(super) const OPERATION: u64 = 10;
/// Reading a record.
pub(super) const RECORD: u64 = 10;
/// Reading the next record in the store.
pub(super) const NEXT: u64 = 4;
/// Writing a record.
pub(super) const WRITE: u64 = 10;
/// Most levels from a directory up to the root that a rename checks. A path of 4,096 bytes has half
/// as many.
pub(super) const DEPTH: u64 = 4_096;

/// Most entries of one listing.
pub(super) const READDIR_MAX: u32 = 16_384;

/// The steps a list has left. Work that is not a client's list has no limit.
pub(super) struct Steps(Cell<u64>);

impl Default for Steps {
    fn default() -> Steps {
        Steps(Cell::new(u64::MAX))
    }
}

impl Steps {
    /// Sets the number of steps left.
    pub(super) fn allow(&self, steps: u64) {
        self.0.set(steps);
    }

    pub(super) fn left(&self) -> u64 {
        self.0.get()
    }

    /// `E2BIG` when there are none left, from then on.
    pub(super) fn take(&self, steps: u64) -> Res<()> {
        if self.spend(steps) {
            return Ok(());
        }
        fail(Code::TooBig, "the list of operations is too large for one request; split it")
    }

    /// Counts work that was done already. Returns whether it was within the limit.
    pub(super) fn spend(&self, steps: u64) -> bool {
        let left = self.0.get().checked_sub(steps);
        self.0.set(left.unwrap_or(0));
        left.is_some()
    }
}

/// The cost of reading an inode and checking permissions by its lists, as operations do up to
/// twice.
pub(super) fn of_inode(r: &pb::InodeRecord) -> u64 {
    // An entry of a list has 8 bytes.
    RECORD + (r.acl.len() + r.default_acl.len()) as u64 / 4 + 2 * r.links.len() as u64
}
