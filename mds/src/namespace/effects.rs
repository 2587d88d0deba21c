//! What applied entries did that clients could see, and what answers depend on: for the leader's
//! table of leases, see `docs/leases.md`.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
};

use strake_proto::{Ino, Rights, SessionId, pb};

use super::writers;
use pb::op::Op;

/// What was given of these rights to a file's data ends. Session 0: to all sessions; inode 0: to
/// all files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    pub session: SessionId,
    pub ino: Ino,
    pub rights: Rights,
}

/// What a transaction saw and did.
#[derive(Default)]
pub(crate) struct Notes {
    /// Inodes whose records it read, those that are not there included.
    pub looked: RefCell<BTreeSet<Ino>>,
    /// Of those that it read: by how many sessions they may be written, where by any.
    pub written: RefCell<BTreeMap<Ino, u32>>,
    /// Of those that it read: files of which it is yet to be found out how far they go.
    pub endless: RefCell<BTreeSet<Ino>>,
    /// Inodes of which clients see something else now.
    pub changed: BTreeSet<Ino>,
    /// Who may write what from now on, or no longer, in order.
    pub writers: Vec<(SessionId, Ino, bool)>,
    /// Files that sessions could write that were evicted, by the eviction with this number.
    pub fences: Vec<(Ino, u64)>,
    /// Those of them that others write: how far they go is to be found out.
    pub ends: Vec<(Ino, u64)>,
    pub endings: Vec<Ending>,
    /// A file got no chain only because targets are away.
    pub away: Cell<bool>,
}

/// What an entry did. One that was refused has no effect but what it looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// Of the request: who sent it, 0 for an entry of the servers themselves, and on which
    /// connection.
    pub session: SessionId,
    pub seq: u64,
    pub connection: u64,
    /// Inodes that the request named by number: its sender sees to its own copies of them.
    pub named: BTreeSet<Ino>,
    /// Inodes of which its sender may remember what it is answered.
    pub told: BTreeSet<Ino>,
    pub looked: BTreeSet<Ino>,
    pub changed: BTreeSet<Ino>,
    pub writers: Vec<(SessionId, Ino, bool)>,
    pub fences: Vec<(Ino, u64)>,
    pub ends: Vec<(Ino, u64)>,
    /// A session that may hold back what it writes.
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

/// The inodes that an operation is about by number. One that it finds through the operation before
/// it is not meant: its sender did not know of it.
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
        // What these are answered with is not remembered.
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

/// Whether an operation sets what a write changes too.
pub(crate) fn sets(op: &pb::Op) -> bool {
    matches!(op.op, Some(Op::Setattr(_) | Op::Setxattr(_) | Op::Removexattr(_)))
}

/// Whether an operation makes its sender one who may write a file, unless that fails or it is one
/// already.
pub(crate) fn enlists(op: &pb::Op) -> bool {
    match &op.op {
        Some(Op::Open(o)) => writers::asks_to_write(o.flags),
        Some(Op::Create(o)) => writers::asks_to_write(o.flags),
        Some(Op::Tmpfile(o)) => writers::asks_to_write(o.flags),
        _ => false,
    }
}

/// Whether an operation is answered with something that may be remembered.
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

/// The inodes of which a list of changes and its results tell: those that it names, and those that
/// it ended on.
pub(crate) fn told(ops: &[pb::Op], results: &[pb::OpResult]) -> BTreeSet<Ino> {
    let mut out = BTreeSet::new();
    // The first results of a list that was undone tell of what never was.
    if results.len() > 1 && results.last().is_some_and(|r| r.status.is_some()) {
        return out;
    }
    for (op, r) in ops.iter().zip(results).filter(|(op, _)| tells(op)) {
        out.extend(named(op));
        // A name that went leads nowhere: what was behind it is rarely asked for again.
        if r.ino != 0 && !matches!(op.op, Some(Op::Unlink(_) | Op::Rmdir(_))) {
            out.insert(r.ino);
        }
    }
    out
}
