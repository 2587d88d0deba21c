//! Whether a list of operations may be much work: a guess before it runs, so that others need not
//! wait for it.

use strake_proto::{Code, Ino, ids::ROOT_INO, pb};

use super::{
    effects,
    fail::{Fail, Res},
    steps::{self, READDIR_MAX},
    txn::Txn,
};
use pb::op::Op;

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
            t.steps.take(2 * steps::of_inode(&r))?;
        }
    }
    match &op.op {
        Some(Op::PathOf(o)) => climb(t, o.ino)?,
        Some(Op::Readdir(o)) => {
            let each = steps::NEXT + if o.attrs { steps::RECORD } else { 0 };
            t.steps.take(u64::from(o.limit.min(READDIR_MAX)) * each)?;
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
