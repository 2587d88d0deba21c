//! The cost limit of one list of operations. Every member applies the log, one entry after the
//! other, and again after a restart, so an expensive list makes everything wait. Work is counted in
//! steps as it is done, by what was read and written and never by a clock: every member gets the
//! same result. A step is about a tenth of a microsecond.

use std::cell::Cell;

use strake_proto::{Code, Ino, ids::ROOT_INO, pb};

use super::{
    effects, ops,
    txn::{Fail, Res, Txn, fail},
};
use pb::op::Op;

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

/// A list that may cost this much is heavy: about 2 ms.
const HEAVY: u64 = 20_000;
/// Lists with at most this many operations are light whatever they do, except moves between
/// directories, path lookups and listings.
const FEW: usize = 4;
/// What an operation costs at least, and what one is that changes something beside the inodes that
/// it names.
const LEAST: u64 = 80;

/// A rename that may have to check the directories up to the root.
fn moves(op: &pb::Op) -> Option<[Ino; 2]> {
    match &op.op {
        Some(Op::Rename(o)) if o.parent != o.new_parent => Some([o.parent, o.new_parent]),
        _ => None,
    }
}

/// Whether a heavy list must be refused because of its renames: each costs up to 10 ms when the
/// directories are deep, and no client's program needs more than one in a list.
pub(super) fn has_too_many_moves(ops: &[pb::Op]) -> bool {
    ops.iter().filter(|o| moves(o).is_some()).nth(1).is_some()
}

/// Whether a list must be checked for being heavy.
pub(super) fn is_looked_at(ops: &[pb::Op]) -> bool {
    ops.len() > FEW
        || ops
            .iter()
            .any(|o| moves(o).is_some() || matches!(o.op, Some(Op::PathOf(_) | Op::Readdir(_))))
}

/// Whether a list may cost much: estimated from what it names, until that is too much.
pub(super) fn is_heavy(t: &Txn<'_>, ops: &[pb::Op]) -> Res<bool> {
    t.steps.allow(HEAVY);
    match ops.iter().try_for_each(|op| guess(t, op)) {
        Ok(()) => Ok(false),
        Err(Fail::Op(e)) if e.code == Code::TooBig => Ok(true),
        Err(e) => Err(e),
    }
}

fn guess(t: &Txn<'_>, op: &pb::Op) -> Res<()> {
    t.steps.take(LEAST)?;
    for ino in effects::named(op) {
        // Its lists are read again for the permission check.
        if let Some(r) = t.inode(ino)? {
            t.steps.take(2 * of_inode(&r))?;
        }
    }
    match &op.op {
        Some(Op::PathOf(o)) => climb(t, o.ino)?,
        Some(Op::Readdir(o)) => {
            let each = NEXT + if o.attrs { RECORD } else { 0 };
            t.steps.take(u64::from(o.limit.min(ops::READDIR_MAX)) * each)?;
        }
        _ => {}
    }
    moves(op).into_iter().flatten().try_for_each(|dir| climb(t, dir))
}

/// Counts the way up to the root.
fn climb(t: &Txn<'_>, dir: Ino) -> Res<()> {
    let mut at = dir;
    while at > ROOT_INO {
        let Some(r) = t.inode(at)? else { return Ok(()) };
        at = r.links.first().map_or(ROOT_INO, |l| l.parent);
    }
    Ok(())
}
