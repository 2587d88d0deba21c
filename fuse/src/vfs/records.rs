//! The records of handles and locks that a mount keeps for its next daemon: `docs/restart.md`.

use strake_client::Former;
use strake_proto::Ino;
use strake_runtime::Record;

use super::{owners::Key, types::Caller};
use crate::handover::HandoverMemory;

/// Words of a handle's record: its number, the inode, the kind, and further values by kind.
mod word {
    pub const HANDLE: usize = 0;
    pub const INO: usize = 1;
    pub const KIND: usize = 2;
    /// For a file: its flags. For a lock: its owner.
    pub const FLAGS: usize = 3;
    /// For a file: uid and gid of the opener. For a lock: the number by which the servers know its
    /// owner; 0, from an older version: the owner itself.
    pub const USER: usize = 4;
}

const FILE: u64 = 1;
const DIRECTORY: u64 = 2;
/// An owner took locks through the handle.
const POSIX_LOCK: u64 = 3;
const FLOCK: u64 = 4;
/// A file that is being closed: it may be closed already.
const CLOSING: u64 = 5;
/// An owner that took locks through the handle has ended, and its locks are being released.
const POSIX_ENDING: u64 = 6;
const FLOCK_ENDING: u64 = 7;

/// Records an open file.
pub(super) fn keep_file(
    keep: &HandoverMemory,
    (handle, ino): (u64, Ino),
    flags: i32,
    caller: Caller<'_>,
) -> Option<Record> {
    let user = u64::from(caller.uid) << 32 | u64::from(caller.gid);
    keep.put_handle(&[handle, ino, FILE, u64::from(flags as u32), user])
}

/// Records an open directory.
pub(super) fn keep_directory(keep: &HandoverMemory, handle: u64, ino: Ino) -> Option<Record> {
    keep.put_handle(&[handle, ino, DIRECTORY])
}

/// The handle of a file is being closed.
pub(super) fn closing(record: &Record) {
    record.set(word::KIND, CLOSING);
}

/// Records that an owner takes locks through a handle.
pub(super) fn keep_owner(
    keep: &HandoverMemory,
    (ino, flock, owner): Key,
    handle: u64,
    number: u64,
) -> Option<Record> {
    keep.put_handle(&[handle, ino, if flock { FLOCK } else { POSIX_LOCK }, owner, number])
}

/// The owner has ended.
pub(super) fn ending(record: &Record, flock: bool) {
    record.set(word::KIND, if flock { FLOCK_ENDING } else { POSIX_ENDING });
}

/// What a record says that an earlier daemon left.
pub(super) enum Left {
    File {
        /// It was being closed, and may be closed already.
        closing: bool,
        former: Former,
    },
    Directory,
    Locks(LeftLocks),
}

/// The locks of an owner in a file; servers know the owner by `number`.
pub(super) enum LeftLocks {
    /// There may be some that were taken through the handle.
    Held { key: Key, number: u64 },
    /// All are being released.
    Ending { ino: Ino, flock: bool, number: u64 },
}

/// The handle of a record.
pub(super) fn handle(record: &Record) -> u64 {
    record.get(word::HANDLE)
}

/// The inode of a record.
pub(super) fn ino(record: &Record) -> Ino {
    record.get(word::INO)
}

/// Reads a record. `None`: its kind is not known.
pub(super) fn read(record: &Record) -> Option<Left> {
    let (handle, ino) = (record.get(word::HANDLE), record.get(word::INO));
    let owner = record.get(word::FLAGS);
    let number = Some(record.get(word::USER)).filter(|n| *n != 0).unwrap_or(owner);
    Some(match record.get(word::KIND) {
        kind @ (FILE | CLOSING) => Left::File { closing: kind == CLOSING, former: former(record) },
        DIRECTORY => Left::Directory,
        POSIX_LOCK => Left::Locks(LeftLocks::Held { key: (ino, false, owner), number }),
        FLOCK => Left::Locks(LeftLocks::Held { key: (ino, true, handle), number }),
        kind @ (POSIX_ENDING | FLOCK_ENDING) => {
            Left::Locks(LeftLocks::Ending { ino, flock: kind == FLOCK_ENDING, number })
        }
        _ => return None,
    })
}

fn former(record: &Record) -> Former {
    let user = record.get(word::USER);
    Former {
        ino: record.get(word::INO),
        flags: record.get(word::FLAGS) as u32,
        uid: (user >> 32) as u32,
        gid: user as u32,
    }
}
