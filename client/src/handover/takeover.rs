//! Takes over from a client that died: see `docs/restart.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures_util::{
    future::BoxFuture,
    stream::{self, StreamExt},
};
use strake_proto::{Code, Ino, Result, pb};

use crate::{
    Client, File, Operation,
    core::Core,
    data::buffers::{self, Content},
    handover::{FileRecord, LeftWrite, WriteKind},
    inode::openings::{Release, Writer},
    inode::{AwaitedAppend, Inode, O_ACCMODE, O_WRONLY},
    metadata::ops::{ok, op},
    write::service::{Hold, room_for},
    write::unstable::Entry,
};

/// How many files are opened again at a time.
const OPENS_AT_ONCE: usize = 64;
const O_APPEND: u32 = 0o2000;

/// A file that the previous client had open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Former {
    /// The inode.
    pub ino: Ino,
    /// The flags given to [`Client::open`].
    pub flags: u32,
    /// User id of the opener.
    pub uid: u32,
    /// Group id of the opener.
    pub gid: u32,
}

impl Client {
    /// Continues where the client died whose [`Handover`] this one was given: opens its files
    /// again, in the order given, and takes over its unfinished writes. `operations`: what it had in
    /// progress, which may come again.
    ///
    /// A file that can no longer be opened is an error at its position. Data that could not be
    /// taken over is reported as `EIO` by the file's next write, fsync and close.
    pub fn take_over<'a>(
        &'a self,
        files: &'a [Former],
        operations: &'a [Operation],
    ) -> BoxFuture<'a, Vec<Result<File>>> {
        Box::pin(async move {
            let core = &self.core;
            let opened: Vec<Result<File>> =
                stream::iter(files.iter().copied().map(|f| core.open_again(f)))
                    .buffered(OPENS_AT_ONCE)
                    .collect()
                    .await;
            let Some(keep) = core.shared.cfg.handover.clone() else { return opened };
            let is_same =
                core.metadata.current_session().is_some_and(|s| s.id == keep.former_session());
            if !is_same && keep.former_session() != 0 {
                tracing::warn!(
                    "the session ended while the mount had no daemon: unstable writes of open \
                     files are lost"
                );
            }
            let writes = keep.left_writes();
            let strays = if is_same { core.open_strays(&writes).await } else { Vec::new() };
            for former in keep.left_files() {
                let former = Arc::<dyn FileRecord>::from(former);
                core.inherit(former.clone(), is_same).await;
                if is_same && former.ends() {
                    core.unlock_end(former.ino(), Some(former));
                }
            }
            core.inherit_writes(writes, is_same).await;
            operations.iter().for_each(|o| core.expect_append(o));
            core.writeback.set_inherited();
            // The pending writes of these files keep alive what is needed to flush them.
            drop(core.shared.env.spawn(async move {
                for file in strays {
                    let ino = file.ino();
                    if let Err(e) = file.close().await {
                        tracing::warn!(
                            ino,
                            "data of a file that was closed before the restart is not safe yet: {e}"
                        );
                    }
                }
            }));
            // Reports the number of opens anew, without those of the previous client.
            core.metadata.reassert().await;
            opened
        })
    }

    /// Says that an operation of the previous client will not come again.
    pub fn abandon(&self, operation: &Operation) {
        if let Some(s) = self.core.metadata.current_session() {
            s.abandon(operation);
        }
    }
}

impl Core {
    /// Prepares for an append that may be repeated: other clients are told no size without it. A
    /// client that holds the append lock asks for the size first.
    fn expect_append(self: &Arc<Self>, operation: &Operation) {
        let present = self.metadata.current_session().map(|s| s.id);
        let Some((ino, append)) = operation.appended().filter(|(_, a)| Some(a.session) == present)
        else {
            return;
        };
        if let Some(inode) = self.files.live_inode(ino) {
            operation.await_append(AwaitedAppend::new(inode, append.end));
        }
        self.unlock_end(ino, None);
    }

    /// Opens files that were closed already but whose writes are not known to be stable: the
    /// servers were away when they were closed.
    async fn open_strays(self: &Arc<Self>, writes: &[LeftWrite]) -> Vec<File> {
        let inos: BTreeSet<Ino> = writes.iter().map(|l| l.write.chunk.ino).collect();
        let mut strays = Vec::new();
        for ino in inos.into_iter().filter(|i| self.files.live_inode(*i).is_none()) {
            match self.open_again(Former { ino, flags: O_WRONLY, uid: 0, gid: 0 }).await {
                Ok(file) => strays.push(file),
                Err(e) if matches!(e.code, Code::NoEnt | Code::Stale) => {} // removed since
                Err(e) => {
                    tracing::warn!(
                        ino,
                        "data written to a closed file and not known to be safe is lost: {e}"
                    )
                }
            }
        }
        strays
    }

    async fn open_again(self: &Arc<Self>, f: Former) -> Result<File> {
        let open =
            op(pb::op::Op::Open(pb::Open { ino: f.ino, flags: f.flags & (O_ACCMODE | O_APPEND) }));
        // The permission was checked when the file was first opened.
        let opening = self.metadata.opening(Some(f.ino), f.flags).await;
        let r = ok(self.metadata.meta(&pb::Creds::default(), vec![open]).await?)?;
        self.file(r, &pb::Creds { uid: f.uid, gid: f.gid, groups: Vec::new() }, f.flags, opening)
            .await
    }

    async fn inherit(self: &Arc<Self>, former: Arc<dyn FileRecord>, is_same: bool) {
        if let Some(inode) = self.files.live_inode(former.ino()) {
            inode.inherit(&*former, is_same);
            if former.unreported().is_some() && !is_same {
                inode.fail_loudly(
                    "the session was lost; bytes written since the last fsync may be lost",
                );
            }
            return;
        }
        // Closed, but the metadata servers were not told yet.
        let Some(session) = self.metadata.current_session().filter(|_| is_same) else { return };
        let (ino, index, surplus) = (former.ino(), former.writer(), former.surplus());
        if let Some((end, holes, _)) = former.unreported() {
            let extend = op(pb::op::Op::Extend(pb::Extend { ino, end, holes }));
            if let Err(e) =
                self.metadata.meta(&pb::Creds::default(), vec![extend]).await.and_then(ok)
            {
                tracing::warn!(
                    ino,
                    "the size of a file that was being closed could not be reported: {e}"
                );
            }
        }
        let writer = Writer { session: session.id, index };
        self.files.release_later(ino, Some(Release { writer, surplus, kept: vec![former] }));
    }

    async fn inherit_writes(self: &Arc<Self>, writes: Vec<LeftWrite>, is_same: bool) {
        let mut back = BTreeMap::new();
        for left in writes {
            // The file was deleted, or it could not be opened, see `open_strays`.
            let Some(inode) = self.files.live_inode(left.write.chunk.ino) else { continue };
            if !is_same {
                inode.fail_loudly("bytes written before the mount was restarted may be lost");
                continue;
            }
            if left.write.kind.is_answered() {
                self.inherit_write(left, inode);
                continue;
            }
            let LeftWrite { order, write, bytes: Some(bytes), record } = left else {
                inode.fail_loudly("bytes written before the mount was restarted are lost");
                continue;
            };
            self.writeback.go_on_after(order);
            let of_file = back.entry(inode.ino).or_insert_with(|| (inode, Vec::new()));
            of_file.1.push((write, bytes, record));
        }
        for (inode, left) in back.into_values() {
            self.writeback.inherit_back(inode, left).await;
        }
    }

    /// Without its bytes a write can only turn out to be stable, or lost.
    fn inherit_write(&self, left: LeftWrite, inode: Arc<Inode>) {
        let LeftWrite { order, write: w, bytes, record } = left;
        let data = match w.kind {
            WriteKind::Punch => Content::Hole(w.len as u32),
            _ => Content::Bytes(bytes.into_iter().collect()),
        };
        let room = room_for(buffers::total(data.bytes()));
        let room = self.updates.room().clone().try_acquire_many_owned(room).ok();
        let entry = Entry {
            chunk: w.chunk,
            offset: w.offset,
            file_offset: w.file_offset,
            data,
            session: w.session,
            seq: w.seq,
            version: w.version,
            boot_ids: w.boot_ids,
            at_ms: 0,
            tag: Arc::new(Hold { inode, _room: room }),
            kept: Some(record),
        };
        self.updates.inherit(w.chain, order, entry);
    }
}
