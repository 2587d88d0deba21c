//! What one list of operations may cost. The log is executed by every member, one entry after the
//! other, and again after a restart: whoever sends a list that costs much has everybody wait. So
//! work is counted in steps as it is done, by what was looked at and written and never by a clock:
//! every member comes to the same end. A step is about a tenth of a microsecond.

use std::cell::Cell;

use strake_proto::{Code, Ino, ids::ROOT_INO, pb};

use super::{
    effects, ops,
    txn::{Fail, Res, Txn, fail},
};
use pb::op::Op;

/// What one list may cost, about 40 ms. 8,192 lookups cost 7 parts in 8 of it.
pub(super) const OF_A_LIST: u64 = 400_000;
/// Beginning an operation.
pub(super) const OPERATION: u64 = 10;
/// Reading a record.
pub(super) const RECORD: u64 = 10;
/// Another one that lies beside it in the store.
pub(super) const NEXT: u64 = 4;
/// Writing a record.
pub(super) const WRITE: u64 = 10;
/// Levels from a directory up to the root that a rename looks at. A path of 4,096 bytes has half as
/// many.
pub(super) const DEPTH: u64 = 4_096;

/// What is left to a list. What is no list of a client's has no bound.
pub(super) struct Steps(Cell<u64>);

impl Default for Steps {
    fn default() -> Steps {
        Steps(Cell::new(u64::MAX))
    }
}

impl Steps {
    /// From now on there are so many.
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
        fail(Code::TooBig, "the list of operations is too much work for one request; split it")
    }

    /// Takes what was done already. Whether that was allowed.
    pub(super) fn spend(&self, steps: u64) -> bool {
        let left = self.0.get().checked_sub(steps);
        self.0.set(left.unwrap_or(0));
        left.is_some()
    }
}

/// What it costs to read an inode and to decide by its lists who may do something, as operations do
/// up to twice.
pub(super) fn of_inode(r: &pb::InodeRecord) -> u64 {
    // An entry of a list has 8 bytes.
    RECORD + (r.acl.len() + r.default_acl.len()) as u64 / 4 + 2 * r.links.len() as u64
}

/// A list that may cost this much is heavy: about 2 ms.
const HEAVY: u64 = 20_000;
/// Lists of so few operations are light whatever they are, but for renames.
const FEW: usize = 4;
/// What an operation costs at least, and what one is that changes something beside the inodes that
/// it names.
const LEAST: u64 = 80;

/// A rename that may have to look at the directories up to the root.
fn moves(op: &pb::Op) -> Option<[Ino; 2]> {
    match &op.op {
        Some(Op::Rename(o)) if o.parent != o.new_parent => Some([o.parent, o.new_parent]),
        _ => None,
    }
}

/// Whether it has to be looked at if a list is heavy.
pub(super) fn is_looked_at(ops: &[pb::Op]) -> bool {
    ops.len() > FEW
        || ops
            .iter()
            .any(|o| moves(o).is_some() || matches!(o.op, Some(Op::PathOf(_) | Op::Readdir(_))))
}

/// Whether a list may cost much: guessed from what it names, as far as that is too much already.
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
        // Its lists are looked at again when it is decided who may.
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

/// Goes up to the root.
fn climb(t: &Txn<'_>, dir: Ino) -> Res<()> {
    let mut at = dir;
    while at > ROOT_INO {
        let Some(r) = t.inode(at)? else { return Ok(()) };
        at = r.links.first().map_or(ROOT_INO, |l| l.parent);
    }
    Ok(())
}
