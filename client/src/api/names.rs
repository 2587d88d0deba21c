//! The namespace: one method per operation, each one request. Attributes include this client's own
//! writes.
//!
//! Mutations run to their end even if the caller's future is dropped.

use futures_util::future::BoxFuture;
use std::sync::Arc;

use bytes::Bytes;
use strake_proto::{Code, Error, Ino, Result, pb};

use crate::{
    Client,
    core::Core,
    handover::operation::Caller,
    metadata::ops::{ok, one, op},
    write::back::Back,
};

fn attr_of(r: pb::OpResult) -> Result<pb::Attr> {
    r.attr
        .ok_or_else(|| Error::new(Code::Protocol, "the metadata server's answer has no attributes"))
}

/// The permission bits with which something is created. Converted from a number: exactly these
/// bits, whatever the caller's umask is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    /// Permission bits; for a node also its type.
    pub bits: u32,
    /// Bits to leave out, unless the directory has a default ACL, which then decides.
    pub umask: u32,
}

impl From<u32> for Mode {
    fn from(bits: u32) -> Mode {
        Mode { bits, umask: 0 }
    }
}

/// A page of a directory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DirPage {
    /// In the order of their cookies. A cookie belongs to one name as long as that name exists.
    pub entries: Vec<pb::DirEntry>,
    /// Whether nothing comes after the last entry.
    pub end: bool,
}

impl Client {
    /// The inode that a name refers to. `ENOENT`, `ENOTDIR`, `EACCES`.
    pub async fn lookup(&self, creds: &pb::Creds, parent: Ino, name: &[u8]) -> Result<pb::Attr> {
        match self.core.lease_cache.lookup(self.core.shared.env.boot(), creds, parent, name) {
            Some(Some(attr)) => {
                self.core.recent_lookups.note(attr.ino, Bytes::new());
                return self.core.merge(attr).await;
            }
            Some(None) => return Err(Error::new(Code::NoEnt, "no such name")),
            None => {}
        }
        let o = pb::op::Op::Lookup(pb::Lookup { parent, name: name.to_vec().into() });
        let r = self.core.metadata.read_op(creds, o).await?;
        self.core.recent_lookups.note(r.ino, r.data.clone());
        self.core.merge(attr_of(r)?).await
    }

    /// The inode that a name refers to as the metadata servers know it now, regardless of this
    /// client's caches and of permissions.
    pub async fn lookup_now(&self, parent: Ino, name: &[u8]) -> Result<pb::Attr> {
        let o = pb::op::Op::Lookup(pb::Lookup { parent, name: name.to_vec().into() });
        attr_of(self.core.metadata.read_op(&pb::Creds::default(), o).await?)
    }

    /// The attributes, with the size and mtime of this client's own writes.
    pub async fn getattr(&self, creds: &pb::Creds, ino: Ino) -> Result<pb::Attr> {
        if let Some(inode) = self.core.files.live_inode(ino)
            && (inode.is_dirty() || !inode.back.is_empty())
        {
            self.core.tell_all(&inode).await?;
        }
        if let Some(attr) = self.core.lease_cache.attr(self.core.shared.env.boot(), ino) {
            return self.core.merge(attr).await;
        }
        let o = pb::op::Op::Getattr(pb::GetAttr { ino });
        self.core.merge(attr_of(self.core.metadata.read_op(creds, o).await?)?).await
    }

    /// Changes attributes. With a size it returns when the bytes beyond it are gone from every
    /// replica; earlier writes of this client are finished first.
    pub async fn setattr(
        &self,
        caller: impl Into<Caller<'_>>,
        set: pb::SetAttr,
    ) -> Result<pb::Attr> {
        let Caller { creds, operation } = caller.into();
        let (core, creds, operation) = (self.core.clone(), creds.clone(), operation.cloned());
        let setting = async move {
            let caller = Caller { creds: &creds, operation: operation.as_ref() };
            core.setattr(caller, set, false).await
        };
        self.core.shared.detached(setting).await
    }

    /// Whether `creds` may do what `mask` (R_OK 4 | W_OK 2 | X_OK 1) asks. `EACCES`.
    pub async fn access(&self, creds: &pb::Creds, ino: Ino, mask: u32) -> Result<()> {
        self.core
            .metadata
            .read_op(creds, pb::op::Op::Access(pb::Access { ino, mask }))
            .await
            .map(drop)
    }

    /// Creates a directory.
    pub async fn mkdir(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        name: &[u8],
        mode: impl Into<Mode>,
    ) -> Result<pb::Attr> {
        let (name, Mode { bits, umask }) = (name.to_vec().into(), mode.into());
        let o = pb::op::Op::Mkdir(pb::Mkdir { parent, name, mode: bits, umask });
        attr_of(self.core.metadata.write_op(caller.into(), o).await?)
    }

    /// Creates a file, fifo, socket or device, by the type in `mode`; `rdev` is Linux-encoded.
    pub async fn mknod(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        name: &[u8],
        mode: impl Into<Mode>,
        rdev: u32,
    ) -> Result<pb::Attr> {
        let (name, Mode { bits, umask }) = (name.to_vec().into(), mode.into());
        let o = pb::op::Op::Mknod(pb::Mknod { parent, name, mode: bits, rdev, umask });
        attr_of(self.core.metadata.write_op(caller.into(), o).await?)
    }

    /// Creates a symbolic link to `target`, which need not exist.
    pub async fn symlink(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        name: &[u8],
        target: &[u8],
    ) -> Result<pb::Attr> {
        let (name, target) = (name.to_vec().into(), target.to_vec().into());
        let o = pb::op::Op::Symlink(pb::Symlink { parent, name, target });
        attr_of(self.core.metadata.write_op(caller.into(), o).await?)
    }

    /// Whether a lookup found the inode recently.
    pub fn was_found(&self, ino: Ino) -> bool {
        self.core.recent_lookups.has(ino)
    }

    /// The target of a symbolic link, also of one that was found recently and has been deleted
    /// since. `EINVAL` for anything else.
    pub async fn readlink(&self, creds: &pb::Creds, ino: Ino) -> Result<Vec<u8>> {
        if let Some(target) = self.core.recent_lookups.target(ino) {
            return Ok(target.to_vec());
        }
        let o = pb::op::Op::Readlink(pb::Readlink { ino });
        Ok(self.core.metadata.read_op(creds, o).await?.data.to_vec())
    }

    /// Gives an inode another name. Returns its attributes, with the new link count. `EPERM` for a
    /// directory.
    pub async fn link(
        &self,
        caller: impl Into<Caller<'_>>,
        ino: Ino,
        parent: Ino,
        name: &[u8],
    ) -> Result<pb::Attr> {
        let o = pb::op::Op::Link(pb::Link { ino, parent, name: name.to_vec().into() });
        self.core.merge(attr_of(self.core.metadata.write_op(caller.into(), o).await?)?).await
    }

    /// Removes a name that is not a directory's. The data is deleted when neither a name nor an
    /// open file is left.
    pub async fn unlink(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        name: &[u8],
    ) -> Result<()> {
        let o = pb::op::Op::Unlink(pb::Unlink { parent, name: name.to_vec().into() });
        self.core.metadata.write_op(caller.into(), o).await.map(drop)
    }

    /// Removes an empty directory, else `ENOTEMPTY`. Returns its inode number.
    pub async fn rmdir(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        name: &[u8],
    ) -> Result<Ino> {
        let o = pb::op::Op::Rmdir(pb::Rmdir { parent, name: name.to_vec().into() });
        self.core.metadata.write_op(caller.into(), o).await.map(|r| r.ino)
    }

    /// `flags`: RENAME_NOREPLACE 1, RENAME_EXCHANGE 2, RENAME_WHITEOUT 4 (`EINVAL` from older
    /// metadata servers).
    pub async fn rename(
        &self,
        caller: impl Into<Caller<'_>>,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
    ) -> Result<()> {
        let o = pb::op::Op::Rename(pb::Rename {
            parent: from.0,
            name: from.1.to_vec().into(),
            new_parent: to.0,
            new_name: to.1.to_vec().into(),
            flags,
        });
        self.core.metadata.write_op(caller.into(), o).await.map(drop)
    }

    /// At most `limit` entries after `cookie` (0 for the start, else the cookie of the last entry
    /// seen), with attributes if wanted.
    pub async fn readdir(
        &self,
        creds: &pb::Creds,
        dir: Ino,
        cookie: u64,
        limit: u32,
        attrs: bool,
    ) -> Result<DirPage> {
        let o = pb::op::Op::Readdir(pb::Readdir { dir, cookie, limit, attrs });
        let r = self.core.metadata.read_op(creds, o).await?;
        let mut page = DirPage { entries: r.entries, end: r.end };
        for e in &mut page.entries {
            if let Some(a) = e.attr.take() {
                e.attr = Some(self.core.merge(a).await?);
            }
        }
        Ok(page)
    }

    /// One path from the root to an inode.
    pub async fn path_of(&self, creds: &pb::Creds, ino: Ino) -> Result<Vec<u8>> {
        Ok(self
            .core
            .metadata
            .read_op(creds, pb::op::Op::PathOf(pb::PathOf { ino }))
            .await?
            .data
            .to_vec())
    }

    /// Runs a list of operations in one round trip (many stats, a walk, create and set): see
    /// `MetaRequest`. If any of them mutates, the list is atomic. The results end with the first
    /// failure, if any, as a status.
    ///
    /// Sizes are the metadata server's. The caller must `Close` what an `Open` or `Create` in the
    /// list opened; such an open is not reasserted after a failover. Use [`Client::open`] and
    /// [`Client::create`] for files to be kept open.
    pub async fn compound(&self, creds: &pb::Creds, ops: Vec<pb::Op>) -> Result<Vec<pb::OpResult>> {
        let (core, creds) = (self.core.clone(), creds.clone());
        let running = async move {
            let holding: Vec<_> = core.writeback.holding();
            for inode in holding {
                core.tell_all(&inode).await?;
            }
            core.metadata.meta(&creds, ops).await
        };
        self.core.shared.detached(running).await
    }
}

impl Core {
    /// Attributes from the metadata server, with this client's own writes. Those are reported
    /// first, so that the mtime seen now is the one seen later.
    pub(crate) async fn merge(self: &Arc<Self>, attr: pb::Attr) -> Result<pb::Attr> {
        let Some(inode) = self.files.live_inode(attr.ino) else { return Ok(attr) };
        if inode.is_dirty() || !inode.back.is_empty() {
            self.tell_all(&inode).await?;
        }
        Ok(inode.take_attr(&attr))
    }

    /// `by_handle`: the change comes through a handle that is open for writing.
    pub(crate) fn setattr<'a>(
        self: &'a Arc<Self>,
        caller: Caller<'a>,
        mut set: pb::SetAttr,
        by_handle: bool,
    ) -> BoxFuture<'a, Result<pb::Attr>> {
        Box::pin(async move {
            set.holes = set.size.is_some();
            let inode = self.files.live_inode(set.ino);
            let size = set.size;
            // Then no other client has pages beyond the new end, unless the lock is lost before the
            // truncate. The lock cannot be held until then: a client that is asked for a report
            // first may wait for it.
            let used = match size {
                Some(_) => self.use_to_cut(set.ino).await?,
                None => None,
            };
            // Own writes count as made before the truncate, including those not sent yet.
            let bar = inode.as_ref().filter(|_| size.is_some()).map(Back::bar);
            if let Some(i) = &inode {
                self.writeback.send_held(i).await;
            }
            // A new size waits for writes in progress and holds up later ones; what was read ahead
            // is dropped.
            let guard = match (&inode, size) {
                (Some(i), Some(_)) => Some(i.ranges.lock_all().await),
                _ => None,
            };
            if let (Some(i), Some(_)) = (&inode, size) {
                self.updates.fence(i).await?;
            }
            if let Some(i) = &inode {
                // Own writes count as made before: an mtime that is set now must not be overwritten
                // by them.
                self.files.push_size(i).await?;
            }
            let ops = vec![op(pb::op::Op::Setattr(set))];
            let r = if by_handle {
                self.files.meta_as_opener(caller, ops).await?
            } else {
                ok(self.metadata.meta_for(caller, ops).await?)?
            };
            let r = one(r)?;
            if r.pages {
                self.pages.mark(r.ino);
            }
            let (ino, attr) = (r.ino, attr_of(r)?);
            let cut = async {
                if size.is_some()
                    && !used.is_some_and(|used| self.pages.lasts(ino, used))
                    && let Err(e) = self.use_to_cut(ino).await
                {
                    tracing::warn!(ino, "others may have pages of a truncated file: {e}");
                }
            };
            let Some(i) = inode else {
                cut.await;
                self.leave_closed_pages(ino).await;
                return Ok(attr);
            };
            if let Some(size) = size {
                self.updates.clip(i.ino, size);
                self.cache.lock().forget(i.ino);
                i.resized(&attr);
            }
            drop((guard, bar));
            cut.await;
            Ok(i.take_attr(&attr))
        })
    }
}
