//! Requests about names and attributes.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_client::Mode;
use strake_proto::{Code, Error, Ino, Result, pb};
use tokio::time::Instant;

use super::{
    base::Base,
    claims::Claims,
    gone::Gone,
    handles::Table,
    known::Known,
    open_file::OpenFile,
    subtree::lookup_handle,
    types::{Caller, Change, Stat, Time, is_dir, stale},
};

/// renameat2(2) flags.
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const RENAME_WHITEOUT: u32 = 4;

/// How long a stat waits for the number of stored bytes.
const COUNT_LIMIT: Duration = Duration::from_secs(2);
/// After that wait failed, no stat waits for this long.
const COUNT_PAUSE: Duration = Duration::from_secs(10);

/// Requests about names and attributes.
pub struct Names {
    base: Arc<Base>,
    files: Arc<Table<OpenFile>>,
    gone: Arc<Gone>,
    claims: Arc<Claims>,
    known: Arc<Known>,
    /// When the storage servers last failed to say in time how much they store.
    uncounted: Mutex<Option<Instant>>,
}

impl Names {
    pub(super) fn new(
        base: Arc<Base>,
        files: Arc<Table<OpenFile>>,
        gone: Arc<Gone>,
        claims: Arc<Claims>,
        known: Arc<Known>,
    ) -> Names {
        Names { base, files, gone, claims, known, uncounted: Mutex::default() }
    }

    /// The inode that a name refers to.
    pub async fn lookup(&self, caller: Caller<'_>, parent: Ino, name: &[u8]) -> Result<pb::Attr> {
        let dir = self.base.inner(parent);
        if matches!(name, b"." | b"..") {
            return Box::pin(lookup_handle(&self.base.client, self.base.root, caller, dir, name))
                .await;
        }
        let attr = self.base.client.lookup(&caller.creds(), dir, name).await?;
        self.claims.check(&self.base, caller.pid, (parent, name), attr.ino).await?;
        match is_dir(&attr) {
            true => self.gone.folders.note(&attr, Some(dir)),
            false => self.claims.told(parent, name),
        }
        Ok(self.base.outer(attr))
    }

    /// The result of stat(2). The storage servers are asked for the space of a file that may have
    /// holes; while they do not answer it is left out. Rare cases are boxed: their futures would
    /// make every request's task several times as large.
    pub async fn getattr(&self, ino: Ino) -> Result<Stat> {
        let inner = self.base.inner(ino);
        // Without the caller's credentials: stat(2) needs no permission on the file itself.
        let nobody = pb::Creds::default();
        let client = &self.base.client;
        let attr = match inner == self.base.root.ino() {
            true => Box::pin(self.known.ask_root(client, client.getattr(&nobody, inner))).await,
            false => client.getattr(&nobody, inner).await,
        };
        let attr = match attr {
            Ok(a) => {
                self.gone.folders.note(&a, None);
                self.base.outer(a)
            }
            Err(e) => self.base.outer(self.gone.or_held(inner, e)?),
        };
        let allocated = if attr.sparse { Box::pin(self.count(inner)).await } else { None };
        Ok(Stat { attr, allocated })
    }

    /// The number of stored bytes of a file, if the servers answer. After they did not, no caller
    /// waits for them for a while.
    async fn count(&self, ino: Ino) -> Option<u64> {
        if self.uncounted.lock().is_some_and(|at| at.elapsed() < COUNT_PAUSE) {
            return None;
        }
        match tokio::time::timeout(COUNT_LIMIT, self.base.client.space().allocated(ino)).await {
            Ok(counted) => counted
                .inspect_err(|e| tracing::debug!(ino, "asking for the space in use: {e}"))
                .ok(),
            Err(_) => {
                *self.uncounted.lock() = Some(Instant::now());
                None
            }
        }
    }

    /// chmod(2), chown(2), truncate(2), utimensat(2).
    pub async fn setattr(&self, caller: Caller<'_>, ino: Ino, change: Change) -> Result<pb::Attr> {
        let ino = self.base.inner(ino);
        let mut wanted = pb::SetAttr {
            ino,
            mode: change.mode,
            uid: change.uid,
            gid: change.gid,
            ..Default::default()
        };
        match change.atime {
            Some(Time::Now) => wanted.atime_now = true,
            Some(Time::At(ns)) => wanted.atime_ns = Some(ns),
            None => {}
        }
        match change.mtime {
            Some(Time::Now) => wanted.mtime_now = true,
            Some(Time::At(ns)) => wanted.mtime_ns = Some(ns),
            None => {}
        }
        // chown(2) of neither user nor group, or a write for which Linux wants set-id bits and
        // capabilities cleared.
        wanted.drop_privileges = change == Change { handle: change.handle, ..Change::default() };
        let mut cut = None;
        match (change.size, change.handle) {
            (Some(size), Some(handle)) => {
                let open = self.files.get(handle)?;
                cut = Some(open.file()?.truncate_for(caller.operation, size).await?)
            }
            (size, _) => wanted.size = size,
        }
        match cut {
            Some(attr) if wanted == (pb::SetAttr { ino, ..Default::default() }) => Ok(attr),
            _ => match self.base.client.setattr(caller.with(&caller.creds()), wanted).await {
                Ok(a) => {
                    self.gone.folders.note(&a, None);
                    Ok(self.base.outer(a))
                }
                Err(e) => {
                    self.gone.change_held(caller, ino, &change, e).map(|a| self.base.outer(a))
                }
            },
        }
    }

    /// The target of a symbolic link.
    pub async fn readlink(&self, caller: Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.base.client.readlink(&caller.creds(), ino).await.map_err(stale)
    }

    /// Creates a file without opening it, a fifo, a socket or a device. `mode` includes the type.
    pub async fn mknod(
        &self,
        c: Caller<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
        rdev: u32,
    ) -> Result<pb::Attr> {
        let made = self
            .base
            .client
            .mknod(
                c.with(&c.creds()),
                self.base.inner(parent),
                name,
                Mode { bits: mode, umask },
                rdev,
            )
            .await;
        made.inspect(|_| self.claims.told(parent, name))
    }

    /// mkdir(2): creates a directory.
    pub async fn mkdir(
        &self,
        c: Caller<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
    ) -> Result<pb::Attr> {
        let parent = self.base.inner(parent);
        let made = self
            .base
            .client
            .mkdir(c.with(&c.creds()), parent, name, Mode { bits: mode, umask })
            .await;
        made.inspect(|a| self.gone.folders.note(a, Some(parent)))
    }

    /// symlink(2): creates a symbolic link to `target`.
    pub async fn symlink(
        &self,
        caller: Caller<'_>,
        parent: Ino,
        name: &[u8],
        target: &[u8],
    ) -> Result<pb::Attr> {
        let creds = caller.creds();
        let made = self
            .base
            .client
            .symlink(caller.with(&creds), self.base.inner(parent), name, target)
            .await;
        made.inspect(|_| self.claims.told(parent, name))
    }

    /// link(2): gives the inode another name.
    pub async fn link(
        &self,
        caller: Caller<'_>,
        ino: Ino,
        parent: Ino,
        name: &[u8],
    ) -> Result<pb::Attr> {
        let creds = caller.creds();
        let made =
            self.base.client.link(caller.with(&creds), ino, self.base.inner(parent), name).await;
        made.inspect(|_| self.claims.told(parent, name))
    }

    /// unlink(2): removes a name that is not a directory's.
    pub async fn unlink(&self, caller: Caller<'_>, parent: Ino, name: &[u8]) -> Result<()> {
        let creds = caller.creds();
        self.base.client.unlink(caller.with(&creds), self.base.inner(parent), name).await
    }

    /// rmdir(2): removes an empty directory.
    pub async fn rmdir(&self, caller: Caller<'_>, parent: Ino, name: &[u8]) -> Result<()> {
        let creds = caller.creds();
        let gone =
            self.base.client.rmdir(caller.with(&creds), self.base.inner(parent), name).await?;
        self.gone.folders.removed(gone);
        Ok(())
    }

    /// renameat2(2) with its flags.
    pub async fn rename(
        &self,
        caller: Caller<'_>,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
    ) -> Result<()> {
        let known = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT;
        if flags & !known != 0 || flags & RENAME_EXCHANGE != 0 && flags != RENAME_EXCHANGE {
            return Err(Error::new(
                Code::Inval,
                format!("rename flags {flags:#x} are not supported"),
            ));
        }
        let (old, new) = ((self.base.inner(from.0), from.1), (self.base.inner(to.0), to.1));
        self.base.client.rename(caller.with(&caller.creds()), old, new, flags).await?;
        self.claims.told(to.0, to.1);
        Ok(())
    }

    /// access(2) as `caller`; `mask` of `R_OK` 4, `W_OK` 2, `X_OK` 1.
    pub async fn access(&self, caller: Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        self.base.client.access(&caller.creds(), self.base.inner(ino), mask).await.map_err(stale)
    }
}

/// Whether a rename with these flags exchanges two names.
pub(crate) fn exchanges(flags: u32) -> bool {
    flags & RENAME_EXCHANGE != 0
}
