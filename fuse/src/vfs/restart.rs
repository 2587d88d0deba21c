//! What a mount writes down of its handles for its next daemon, and how that one opens them again: `docs/restart.md`.

use std::sync::{Arc, atomic::AtomicU64};

use strake_client::{Former, Keep, Numbers};
use strake_fabric::Record;
use strake_proto::{Code, Error, Ino};

use super::{Caller, OpenFile, Vfs, dirs::OpenDir};

/// Words of a kept handle: its number, the inode, what it is, and by kind what else must be known.
mod word {
    pub const HANDLE: usize = 0;
    pub const INO: usize = 1;
    pub const KIND: usize = 2;
    /// Of a file: its flags. Of a lock: its owner.
    pub const FLAGS: usize = 3;
    /// Of a file: uid and gid of who opened it.
    pub const USER: usize = 4;
}

const FILE: u64 = 1;
const DIRECTORY: u64 = 2;
/// An owner took locks through the handle.
const POSIX_LOCK: u64 = 3;
const FLOCK: u64 = 4;
/// A file that is being closed: it may be gone already.
const CLOSING: u64 = 5;

/// The handle of a file is being closed.
pub(super) fn closing(record: &Record) {
    record.set(word::KIND, CLOSING);
}

/// Keeps that `owner` took locks through a handle.
pub(super) fn keep_owner(keep: &Keep, (ino, flock, owner): (Ino, bool, u64), handle: u64) -> Option<Record> {
    keep.put_handle(&[handle, ino, if flock { FLOCK } else { POSIX_LOCK }, owner])
}

impl Vfs {
    pub(super) fn keep_handle(&self, handle: u64, ino: Ino, flags: i32, caller: Caller) -> Option<Record> {
        let user = u64::from(caller.uid) << 32 | u64::from(caller.gid);
        self.keep.as_ref()?.put_handle(&[handle, ino, FILE, u64::from(flags as u32), user])
    }

    pub(super) fn keep_directory(&self, handle: u64, ino: Ino) -> Option<Record> {
        self.keep.as_ref()?.put_handle(&[handle, ino, DIRECTORY])
    }

    /// Opens again what a former daemon of this mount had open. `requests`: those it had in work.
    pub(crate) async fn take_over(&self, requests: &[Arc<Numbers>]) {
        let Some(keep) = &self.keep else { return };
        let (mut files, mut locks) = (Vec::new(), Vec::new());
        for record in keep.left_handles() {
            let (handle, ino) = (record.get(word::HANDLE), record.get(word::INO));
            match record.get(word::KIND) {
                FILE | CLOSING => files.push(record),
                DIRECTORY => self.dirs.insert(handle, OpenDir::again(ino, record)),
                POSIX_LOCK | FLOCK => locks.push(record),
                // Unknown kinds are nobody's.
                _ => {}
            }
        }
        let former: Vec<Former> = files.iter().map(former).collect();
        let opened = self.client.take_over(&former, requests).await;
        for ((record, f), file) in files.into_iter().zip(&former).zip(opened) {
            let handle = record.get(word::HANDLE);
            let file = file.map_err(|e| {
                if record.get(word::KIND) == FILE {
                    tracing::warn!(ino = f.ino, handle, "a file that was open could not be opened again: {e}");
                }
                Error { code: Code::Io, ..e.context("the file could not be opened again when the mount was restarted") }
            });
            let open =
                OpenFile { file, ino: f.ino, flags: f.flags as i32, locked_in: AtomicU64::new(0), kept: Some(record) };
            self.files.insert(handle, open);
        }
        for record in locks {
            let (handle, ino, owner) = (record.get(word::HANDLE), record.get(word::INO), record.get(word::FLAGS));
            let key = (ino, record.get(word::KIND) == FLOCK, owner);
            self.adopt_lock(key, handle, keep.former_session(), record);
        }
    }

    /// A request of a former daemon does not come again.
    pub(crate) fn abandon(&self, request: &Numbers) {
        self.client.abandon(request);
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
