//! Opening and creating files.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use strake_proto::{
    Code, Error, Ino, Result, SessionId,
    cap::{self, CAP_LEN},
    layout::StripeMap,
    pb,
};

use super::File;
use crate::{
    Client,
    api::names::Mode,
    core::Core,
    handover::operation::{Caller, Operation},
    inode::openings::{Release, Writer},
    inode::{Inode, O_ACCMODE, O_APPEND, O_EXEC, O_RDWR, O_WRONLY, Open, Placed},
    leases::open_cache,
    metadata::openings::Opening,
    metadata::ops::{ok, op},
};

const O_TRUNC: u32 = 0o1000;

impl Client {
    /// Opens a regular file. `flags` as on Linux: access mode, O_APPEND (use [`File::append`]),
    /// O_TRUNC, O_DSYNC/O_SYNC (writes return when stable), O_DIRECT (no read-ahead). With Linux's
    /// `FMODE_EXEC` the permission to execute is enough.
    pub async fn open(
        &self,
        caller: impl Into<Caller<'_>>,
        ino: Ino,
        flags: u32,
    ) -> Result<(File, pb::Attr)> {
        let Caller { creds, operation } = caller.into();
        let (mut flags, exec) = (flags & !O_EXEC, flags & O_EXEC);
        if open_cache::is_kept(flags)
            && let Some((open, attr)) = self.core.open_cache.open_kept(creds, ino)
        {
            return Ok((File::new(&self.core, open, creds, flags), attr));
        }
        let (core, creds, operation) = (self.core.clone(), creds.clone(), operation.cloned());
        let opening = async move {
            if flags & O_ACCMODE != 0 {
                core.shared.may_alter()?;
            }
            let open = |flags| op(pb::op::Op::Open(pb::Open { ino, flags }));
            let opening = core.metadata.opening(Some(ino), flags).await;
            let mut r =
                ok(core.metadata.meta(&creds, vec![open(flags & (O_ACCMODE | O_APPEND))]).await?);
            // Most executables can be read: try to open them like any other file first, so that the
            // open can be cached.
            if exec != 0
                && flags & O_ACCMODE == 0
                && r.as_ref().is_err_and(|e| e.code == Code::Access)
            {
                flags |= exec;
                r = ok(core.metadata.meta(&creds, vec![open(exec)]).await?);
            }
            let r = r?;
            let file = core.file(r, &creds, flags, opening).await?;
            truncate_at_open(file, operation, flags & O_TRUNC != 0).await
        };
        self.core.shared.detached(opening).await
    }

    /// Whether a file is open in this client. A file that only the open cache holds is not.
    pub fn is_open(&self, ino: Ino) -> bool {
        self.core.files.live_inode(ino).is_some() && !self.core.open_cache.holds_alone(ino)
    }

    /// Creates and opens a regular file in one request. Opens an existing one, unless `exclusive`
    /// (`EEXIST`). `layout` overrides the directory's default.
    pub async fn create(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        name: &[u8],
        mode: impl Into<Mode>,
        flags: u32,
        exclusive: bool,
        layout: Option<pb::LayoutSpec>,
    ) -> Result<(File, pb::Attr)> {
        let Caller { creds, operation } = caller.into();
        let (core, creds, operation) = (self.core.clone(), creds.clone(), operation.cloned());
        let (name, Mode { bits, umask }) = (name.to_vec().into(), mode.into());
        let opening = async move {
            let flags_sent = flags & (O_ACCMODE | O_APPEND);
            let create = pb::Create {
                parent,
                name,
                mode: bits,
                exclusive,
                layout,
                flags: flags_sent,
                umask,
            };
            let opening = core.metadata.opening(None, flags).await;
            let caller = Caller { creds: &creds, operation: operation.as_ref() };
            let create = vec![op(pb::op::Op::Create(create))];
            let r = ok(core.metadata.meta_for(caller, create).await?)?;
            let created = r.last().is_some_and(|r| r.created);
            let file = core.file(r, &creds, flags, opening).await?;
            truncate_at_open(file, operation, flags & O_TRUNC != 0 && !created).await
        };
        self.core.shared.detached(opening).await
    }

    /// Creates and opens a regular file without a name, as if in the directory `parent`. It is
    /// deleted when it is closed, unless [`Client::link`] gave it a name before, which `linkable`
    /// allows.
    pub async fn tmpfile(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        mode: impl Into<Mode>,
        flags: u32,
        linkable: bool,
    ) -> Result<(File, pb::Attr)> {
        let Caller { creds, operation } = caller.into();
        let (core, creds, operation) = (self.core.clone(), creds.clone(), operation.cloned());
        let Mode { bits, umask } = mode.into();
        let opening = async move {
            let flags_sent = flags & (O_ACCMODE | O_APPEND);
            let make = pb::Tmpfile {
                parent,
                mode: bits,
                umask,
                flags: flags_sent,
                linkable,
                layout: None,
            };
            let opening = core.metadata.opening(None, flags).await;
            let caller = Caller { creds: &creds, operation: operation.as_ref() };
            let make = vec![op(pb::op::Op::Tmpfile(make))];
            let r = ok(core.metadata.meta_for(caller, make).await?)?;
            let file = core.file(r, &creds, flags, opening).await?;
            let attr = file.attr();
            Ok((file, attr))
        };
        self.core.shared.detached(opening).await
    }
}

async fn truncate_at_open(
    file: File,
    operation: Option<Operation>,
    wanted: bool,
) -> Result<(File, pb::Attr)> {
    let attr = match wanted && file.is_writable() {
        true => file.truncate_for(operation.as_ref(), 0).await?,
        false => file.attr(),
    };
    Ok((file, attr))
}

fn bad(m: &str) -> Error {
    Error::new(Code::Protocol, m)
}

impl Core {
    /// A handle from the answer to an open.
    pub(crate) fn file<'a>(
        self: &'a Arc<Self>,
        mut r: Vec<pb::OpResult>,
        creds: &'a pb::Creds,
        flags: u32,
        opening: Opening,
    ) -> BoxFuture<'a, Result<File>> {
        Box::pin(async move {
            let r = r.pop().ok_or_else(|| bad("an empty answer to an open"))?;
            let attr = r.attr.ok_or_else(|| bad("no attributes in the answer to an open"))?;
            let (writer, pages) = (r.writer, r.pages);
            let (inode, session) = match self.opened_inode(attr, r, creds, flags).await {
                Ok(opened) => opened,
                Err(e) => {
                    self.take_back_open(attr.ino, writer, opening).await;
                    return Err(e);
                }
            };
            let keep = self.shared.cfg.handover.as_deref();
            let keep = keep.filter(|_| matches!(flags & O_ACCMODE, O_WRONLY | O_RDWR));
            if pages {
                self.pages.mark(inode.ino);
            }
            inode.openings.opened(session, writer, keep);
            self.metadata.counted_open(opening.since);
            if !open_cache::is_kept(flags) {
                self.open_cache.stop_keeping(inode.ino);
            }
            let open = Arc::new(Open { inode, session });
            if open_cache::is_kept(flags) {
                self.open_cache.keep_open(&open, creds);
            }
            let file = File::new(self, open, creds, flags);
            if flags & O_ACCMODE == O_RDWR {
                self.leave_shared_pages(file.ino()).await;
            }
            Ok(file)
        })
    }

    /// The inode from the answer to an open, with layout and capability, and the session of the
    /// open.
    async fn opened_inode(
        self: &Arc<Self>,
        attr: pb::Attr,
        r: pb::OpResult,
        creds: &pb::Creds,
        flags: u32,
    ) -> Result<(Arc<Inode>, SessionId)> {
        let not_regular = || Error::new(Code::IsDir, "only regular files are opened for data");
        let layout = r.layout.ok_or_else(not_regular)?;
        let stripes = Arc::new(self.resolve(attr.ino, &layout).await?);
        let placed = Placed { layout, stripes };
        let sealed: &[u8; CAP_LEN] = r.capability[..]
            .try_into()
            .map_err(|_| bad("the answer to an open has no capability"))?;
        let session = cap::peek(sealed).session;
        let inode = self.files.inode(attr.ino, || Inode::new(attr, placed.clone()));
        inode.set_placed(placed, &attr);
        let flags = flags & (O_ACCMODE | O_APPEND | O_EXEC);
        inode.caps.take(&r.capability, session, flags, creds)?;
        Ok((inode, session))
    }

    /// Closes again what was opened in vain: the server counts the file as open by this client.
    async fn take_back_open(self: &Arc<Self>, ino: Ino, index: u64, opening: Opening) {
        self.metadata.counted_open(opening.since);
        self.metadata.tell_closed(&[ino], opening.since).await;
        let session = self.metadata.current_session().map_or(0, |s| s.id);
        let release = match self.files.live_inode(ino) {
            Some(inode) => inode.openings.opened_again(session, index),
            None => Some(Release {
                writer: Writer { session, index },
                surplus: false,
                kept: Vec::new(),
            }),
        };
        self.files.release_later(ino, release);
    }

    /// The stripe arithmetic of a layout. Fetches a newer map if the layout names chains that this
    /// one lacks.
    async fn resolve(self: &Arc<Self>, ino: Ino, layout: &pb::Layout) -> Result<StripeMap> {
        let map = self.shared.map();
        match StripeMap::resolve(ino, layout, &map) {
            Err(e) if e.code == Code::Io => {
                self.metadata.refresh_map(map.version()).await;
                StripeMap::resolve(ino, layout, &self.shared.map())
            }
            r => r,
        }
    }
}
