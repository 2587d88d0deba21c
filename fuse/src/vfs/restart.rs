//! How the next daemon of a mount opens again what the last one had open: `docs/restart.md`.

use strake_client::{Former, Handover, Operation};
use strake_proto::{Code, Error};

use super::{
    files::Released,
    open_file::OpenFile,
    parts::Vfs,
    records::{self, Left, LeftLocks},
};

impl Vfs {
    /// Opens again what an earlier daemon of this mount had open. `operations`: what it
    /// had in progress. Returns the handles that it was just closing; the caller continues to close
    /// them.
    pub(crate) async fn take_over(&self, operations: &[Operation]) -> Vec<Released> {
        let Some(keep) = &self.base.keep else { return Vec::new() };
        let (mut files, mut former, mut locks) = (Vec::new(), Vec::new(), Vec::new());
        for record in keep.left_handles() {
            match records::read(&record) {
                Some(Left::File { closing, former: f }) => {
                    files.push((record, closing));
                    former.push(f);
                }
                Some(Left::Directory) => self.dirs.again(record),
                Some(Left::Locks(left)) => locks.push((record, left)),
                // Unknown kinds are ignored.
                None => {}
            }
        }
        let opened = self.base.client.take_over(&former, operations).await;
        let mut being_closed = Vec::new();
        for (((record, closing), f), file) in files.into_iter().zip(&former).zip(opened) {
            let handle = records::handle(&record);
            if closing {
                being_closed.push(handle);
            }
            let file = file.map_err(|e| unopened(e, f, handle, closing));
            let open = OpenFile::new(file, f.ino, f.flags as i32, Some(record));
            self.files.again(handle, open);
        }
        for (record, left) in locks {
            match left {
                LeftLocks::Held { key, number } => {
                    let handle = records::handle(&record);
                    self.locks.adopt(key, number, handle, keep.former_session(), record);
                }
                LeftLocks::Ending { ino, flock, number } => {
                    self.locks.adopt_ending((ino, flock), number, record);
                }
            }
        }
        being_closed.into_iter().filter_map(|handle| self.files.note_release(handle)).collect()
    }

    /// A request of an earlier daemon will not come again.
    pub(crate) fn abandon(&self, operation: &Operation) {
        self.base.client.abandon(operation);
    }
}

/// The error of all requests for a file that could not be opened again.
fn unopened(e: Error, former: &Former, handle: u64, closing: bool) -> Error {
    if !closing {
        tracing::warn!(ino = former.ino, handle, "an open file could not be opened again: {e}");
    }
    Error {
        code: Code::Io,
        ..e.context("the file could not be opened again when the mount was restarted")
    }
}
