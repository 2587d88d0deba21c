//! The effects of applied entries that clients could see, and what answers depend on: for the
//! leader's table of leases, see `docs/leases.md`.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
};

use strake_proto::{Ino, Rights, SessionId, pb};

use super::perm::asks_to_write;
use pb::op::Op;

/// These rights to a file's data end for those that were given them. Session 0: for all sessions;
/// inode 0: for all files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    pub session: SessionId,
    pub ino: Ino,
    pub rights: Rights,
}

/// What a transaction read and changed.
#[derive(Default)]
pub(crate) struct Notes {
    /// Inodes whose records it read, including those that do not exist.
    pub looked: RefCell<BTreeSet<Ino>>,
    /// Of those: how many sessions may write each, if any may.
    pub written: RefCell<BTreeMap<Ino, u32>>,
    /// Of those: files whose size must still be found out.
    pub endless: RefCell<BTreeSet<Ino>>,
    /// Inodes that look different to clients now.
    pub changed: BTreeSet<Ino>,
    /// Sessions that may write a file from now on, or no longer, in order.
    pub writers: Vec<(SessionId, Ino, bool)>,
    /// Files that evicted sessions could write, with the number of that eviction.
    pub fences: Vec<(Ino, u64)>,
    /// Those of them that others write: their size must be found out.
    pub ends: Vec<(Ino, u64)>,
    pub endings: Vec<Ending>,
    /// A file got no chain only because targets are away.
    pub away: Cell<bool>,
}

/// What an entry did. An entry that was refused has no effect but what it read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// The sender of the request, 0 for an entry of the servers themselves; its number and
    /// connection.
    pub session: SessionId,
    pub seq: u64,
    pub connection: u64,
    /// Inodes that the request named by number: its sender updates its own copies of them.
    pub named: BTreeSet<Ino>,
    /// Inodes that the sender may cache as it is answered.
    pub told: BTreeSet<Ino>,
    pub looked: BTreeSet<Ino>,
    pub changed: BTreeSet<Ino>,
    pub writers: Vec<(SessionId, Ino, bool)>,
    pub fences: Vec<(Ino, u64)>,
    pub ends: Vec<(Ino, u64)>,
    /// A session that may keep dirty data.
    pub holds_back: Option<SessionId>,
    /// Sessions that ended, and whether they said goodbye.
    pub ended: Vec<(SessionId, bool)>,
    /// Rights that ended, and the index of the entry.
    pub endings: Vec<Ending>,
    pub index: u64,
}

impl Effect {
    pub(super) fn of(notes: Notes) -> Effect {
        let Notes { looked, changed, writers, fences, ends, endings, .. } = notes;
        Effect {
            looked: looked.into_inner(),
            changed,
            writers,
            fences,
            ends,
            endings,
            ..Default::default()
        }
    }

    /// The part that stays if the entry was undone.
    pub(super) fn undone(notes: Notes) -> Effect {
        Effect { looked: notes.looked.into_inner(), ..Default::default() }
    }
}

/// The inodes that an operation names by number. An inode that it finds through the operation
/// before it does not count: its sender did not know it.
pub(crate) fn named(op: &pb::Op) -> impl Iterator<Item = Ino> {
    let both = match &op.op {
        Some(Op::Lookup(o)) => [o.parent, 0],
        Some(Op::Getattr(o)) => [o.ino, 0],
        Some(Op::Open(o)) => [o.ino, 0],
        Some(Op::Readdir(o)) => [o.dir, 0],
        Some(Op::Readlink(o)) => [o.ino, 0],
        Some(Op::Getxattr(o)) => [o.ino, 0],
        Some(Op::Listxattr(o)) => [o.ino, 0],
        Some(Op::Access(o)) => [o.ino, 0],
        Some(Op::Create(o)) => [o.parent, 0],
        Some(Op::Tmpfile(o)) => [o.parent, 0],
        Some(Op::Mkdir(o)) => [o.parent, 0],
        Some(Op::Mknod(o)) => [o.parent, 0],
        Some(Op::Symlink(o)) => [o.parent, 0],
        Some(Op::Link(o)) => [o.ino, o.parent],
        Some(Op::Unlink(o)) => [o.parent, 0],
        Some(Op::Rmdir(o)) => [o.parent, 0],
        Some(Op::Rename(o)) => [o.parent, o.new_parent],
        Some(Op::Setattr(o)) => [o.ino, 0],
        Some(Op::Setxattr(o)) => [o.ino, 0],
        Some(Op::Removexattr(o)) => [o.ino, 0],
        Some(Op::Extend(o)) => [o.ino, 0],
        Some(Op::Setlayout(o)) => [o.ino, 0],
        Some(Op::Seal(o)) => [o.ino, 0],
        // The answers to these are not cached.
        Some(
            Op::Close(_)
            | Op::Statfs(_)
            | Op::Getlayout(_)
            | Op::PathOf(_)
            | Op::GetLock(_)
            | Op::GetSeal(_)
            | Op::SetLock(_)
            | Op::Release(_),
        )
        | None => [0, 0],
    };
    both.into_iter().filter(|ino| *ino != 0)
}

/// Whether an operation sets something that a write changes, too.
pub(crate) fn sets(op: &pb::Op) -> bool {
    matches!(op.op, Some(Op::Setattr(_) | Op::Setxattr(_) | Op::Removexattr(_)))
}

/// Whether an operation makes its sender a writer of a file, unless it fails or the sender is one
/// already.
pub(crate) fn enlists(op: &pb::Op) -> bool {
    match &op.op {
        Some(Op::Open(o)) => asks_to_write(o.flags),
        Some(Op::Create(o)) => asks_to_write(o.flags),
        Some(Op::Tmpfile(o)) => asks_to_write(o.flags),
        _ => false,
    }
}

/// Whether an operation's answer has something that may be cached.
pub(crate) fn tells(op: &pb::Op) -> bool {
    use Op::{Close, GetLock, GetSeal, Getlayout, PathOf, Release, SetLock, Statfs};
    !matches!(
        op.op,
        None | Some(
            Close(_)
                | Statfs(_)
                | Getlayout(_)
                | PathOf(_)
                | GetLock(_)
                | GetSeal(_)
                | SetLock(_)
                | Release(_)
        )
    )
}

/// The inodes that the results of a list of changes show: those that it names, and those that it
/// ended on.
pub(crate) fn told(ops: &[pb::Op], results: &[pb::OpResult]) -> BTreeSet<Ino> {
    let mut out = BTreeSet::new();
    // The first results of a list that was undone show changes that never happened.
    if results.len() > 1 && results.last().is_some_and(|r| r.status.is_some()) {
        return out;
    }
    for (op, r) in ops.iter().zip(results).filter(|(op, _)| tells(op)) {
        out.extend(named(op));
        // A removed name leads nowhere: its inode is rarely asked for again.
        if r.ino != 0 && !matches!(op.op, Some(Op::Unlink(_) | Op::Rmdir(_))) {
            out.insert(r.ino);
        }
    }
    out
}
