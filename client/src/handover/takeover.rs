//! Takes over from a client that died: see `docs/restart.md`.

use futures_util::future::BoxFuture;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures_util::stream::{self, StreamExt};
use strake_fabric::{Buf, KeptAt, Pool};
use strake_proto::{Code, Ino, Result, pb};
use strake_runtime::Record;

use crate::{
    Client, File, Numbers,
    core::Core,
    data::buffers::{self, Content},
    handover::{Handover, KeptInode, KeptWrite, WriteKind},
    inode::{AwaitedAppend, Inode, O_ACCMODE, O_WRONLY, Release, Writer},
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
    /// again, in the order given, and takes over its unfinished writes. `requests`: the requests it
    /// had in progress, which may be repeated.
    ///
    /// A file that can no longer be opened is an error at its position. Data that could not be
    /// taken over is reported as `EIO` by the file's next write, fsync and close.
    pub fn take_over<'a>(
        &'a self,
        files: &'a [Former],
        requests: &'a [Arc<Numbers>],
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
            for former in keep.left_inodes() {
                let former = Arc::new(former);
                core.inherit(former.clone(), is_same).await;
                if is_same && former.ends() {
                    core.unlock_end(former.ino(), Some(former));
                }
            }
            core.inherit_writes(&keep, writes, is_same).await;
            requests.iter().for_each(|n| core.expect_append(n));
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

    /// Says that a request of the previous client will not be repeated.
    pub fn abandon(&self, request: &Numbers) {
        if let Some(s) = self.core.metadata.current_session() {
            s.abandon(request);
        }
    }
}

impl Core {
    /// Prepares for an append that may be repeated: other clients are told no size without it. A
    /// client that holds the append lock asks for the size first.
    fn expect_append(self: &Arc<Self>, request: &Numbers) {
        let present = self.metadata.current_session().map(|s| s.id);
        let Some((ino, append)) = request.appended().filter(|(_, a)| Some(a.session) == present)
        else {
            return;
        };
        if let Some(inode) = self.files.live_inode(ino) {
            request.await_append(AwaitedAppend::new(inode, append.end));
        }
        self.unlock_end(ino, None);
    }

    /// Opens files that were closed already but whose writes are not known to be stable: the
    /// servers were away when they were closed.
    async fn open_strays(self: &Arc<Self>, writes: &[(u64, KeptWrite, Record)]) -> Vec<File> {
        let inos: BTreeSet<Ino> = writes.iter().map(|(_, w, _)| w.chunk.ino).collect();
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

    async fn inherit(self: &Arc<Self>, former: Arc<KeptInode>, is_same: bool) {
        if let Some(inode) = self.files.live_inode(former.ino()) {
            inode.inherit(&former, is_same);
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

    async fn inherit_writes(
        self: &Arc<Self>,
        keep: &Arc<Handover>,
        writes: Vec<(u64, KeptWrite, Record)>,
        is_same: bool,
    ) {
        let (mut blocks, mut back) = (BTreeMap::new(), BTreeMap::new());
        for (order, w, record) in writes {
            // The file was deleted, or it could not be opened, see `open_strays`.
            let Some(inode) = self.files.live_inode(w.chunk.ino) else { continue };
            if !is_same {
                inode.fail_loudly("bytes written before the mount was restarted may be lost");
                continue;
            }
            // Without its bytes it can only turn out to be stable, or lost.
            let data = w.at.and_then(|at| kept_bytes(keep.pool(), at, &mut blocks));
            match (w.kind, data) {
                (WriteKind::Unstable | WriteKind::Punch, data) => {
                    self.inherit_write(order, w, data, inode, record)
                }
                (WriteKind::Sent | WriteKind::Held, Some(data)) => {
                    self.writeback.go_on_after(order);
                    back.entry(inode.ino)
                        .or_insert_with(|| (inode, Vec::new()))
                        .1
                        .push((w, data, record));
                }
                (WriteKind::Sent | WriteKind::Held, None) => {
                    inode.fail_loudly("bytes written before the mount was restarted are lost");
                }
            }
        }
        for (inode, left) in back.into_values() {
            self.writeback.inherit_back(inode, left).await;
        }
    }

    fn inherit_write(
        &self,
        order: u64,
        w: KeptWrite,
        data: Option<Buf>,
        inode: Arc<Inode>,
        record: Record,
    ) {
        let data = if w.kind == WriteKind::Punch {
            Content::Hole(w.len as u32)
        } else {
            Content::Bytes(data.into_iter().collect())
        };
        let room = self
            .updates
            .room()
            .clone()
            .try_acquire_many_owned(room_for(buffers::total(data.bytes())))
            .ok();
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

/// Bytes in kept memory. Several writes may share one block.
fn kept_bytes(pool: &Pool, at: KeptAt, blocks: &mut BTreeMap<usize, Buf>) -> Option<Buf> {
    let block = match blocks.get(&at.block) {
        Some(b) => b.clone(),
        None => {
            let b = pool.take_kept(at.block, at.capacity)?.freeze();
            blocks.insert(at.block, b.clone());
            b
        }
    };
    let end = at.start.checked_add(at.len)?;
    (end <= block.len()).then(|| block.slice(at.start..end))
}
