//! The records of handles that a mount keeps for its next daemon, and how that daemon opens them
//! again: `docs/restart.md`.

use std::sync::atomic::AtomicU64;

use strake_client::{Former, Handover, Operation};
use strake_proto::{Code, Error, Ino};
use strake_runtime::Record;

use super::{Caller, OpenFile, Released, Vfs, dirs::OpenDir, owners::Key};
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

impl Vfs {
    pub(super) fn keep_handle(
        &self,
        handle: u64,
        ino: Ino,
        flags: i32,
        caller: Caller<'_>,
    ) -> Option<Record> {
        let user = u64::from(caller.uid) << 32 | u64::from(caller.gid);
        self.keep.as_ref()?.put_handle(&[handle, ino, FILE, u64::from(flags as u32), user])
    }

    pub(super) fn keep_directory(&self, handle: u64, ino: Ino) -> Option<Record> {
        self.keep.as_ref()?.put_handle(&[handle, ino, DIRECTORY])
    }

    /// Opens again what an earlier daemon of this mount had open. `operations`: what it
    /// had in progress. Returns the handles that it was just closing; the caller continues to close
    /// them.
    pub(crate) async fn take_over(&self, operations: &[Operation]) -> Vec<Released> {
        let Some(keep) = &self.keep else { return Vec::new() };
        let (mut files, mut locks, mut closing) = (Vec::new(), Vec::new(), Vec::new());
        for record in keep.left_handles() {
            let (handle, ino) = (record.get(word::HANDLE), record.get(word::INO));
            match record.get(word::KIND) {
                FILE => files.push(record),
                CLOSING => {
                    closing.push(handle);
                    files.push(record);
                }
                DIRECTORY => self.dirs.insert(handle, OpenDir::again(ino, record)),
                POSIX_LOCK | FLOCK | POSIX_ENDING | FLOCK_ENDING => locks.push(record),
                // Unknown kinds are ignored.
                _ => {}
            }
        }
        let former: Vec<Former> = files.iter().map(former).collect();
        let opened = self.client.take_over(&former, operations).await;
        for ((record, f), file) in files.into_iter().zip(&former).zip(opened) {
            let handle = record.get(word::HANDLE);
            let file = file.map_err(|e| {
                if record.get(word::KIND) == FILE {
                    tracing::warn!(
                        ino = f.ino,
                        handle,
                        "an open file could not be opened again: {e}"
                    );
                }
                Error {
                    code: Code::Io,
                    ..e.context("the file could not be opened again when the mount was restarted")
                }
            });
            let open = OpenFile {
                file,
                ino: f.ino,
                flags: f.flags as i32,
                locked_in: AtomicU64::new(0),
                kept: Some(record),
            };
            self.files.insert(handle, open);
        }
        for record in locks {
            let (handle, ino, owner) =
                (record.get(word::HANDLE), record.get(word::INO), record.get(word::FLAGS));
            let number = Some(record.get(word::USER)).filter(|n| *n != 0).unwrap_or(owner);
            match record.get(word::KIND) {
                POSIX_LOCK => self.adopt_lock(
                    (ino, false, owner),
                    number,
                    handle,
                    keep.former_session(),
                    record,
                ),
                FLOCK => self.adopt_lock(
                    (ino, true, handle),
                    number,
                    handle,
                    keep.former_session(),
                    record,
                ),
                kind => self.adopt_ending((ino, kind == FLOCK_ENDING), number, record),
            }
        }
        closing.into_iter().filter_map(|handle| self.note_release(handle)).collect()
    }

    /// A request of an earlier daemon will not come again.
    pub(crate) fn abandon(&self, operation: &Operation) {
        self.client.abandon(operation);
    }
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
