//! Requests about names and attributes.

use std::time::Duration;

use strake_client::Mode;
use strake_proto::{Code, Error, Ino, Result, pb};
use tokio::time::Instant;

use super::{Caller, Change, Stat, Time, Vfs, gone::is_dir, stale};

/// renameat2(2) flags.
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const RENAME_WHITEOUT: u32 = 4;

/// How long a stat waits for the number of stored bytes.
const COUNT_LIMIT: Duration = Duration::from_secs(2);
/// After that wait failed, no stat waits for this long.
const COUNT_PAUSE: Duration = Duration::from_secs(10);

impl Vfs {
    /// The inode that a name refers to.
    pub async fn lookup(&self, caller: Caller<'_>, parent: Ino, name: &[u8]) -> Result<pb::Attr> {
        let dir = self.inner(parent);
        if matches!(name, b"." | b"..") {
            return Box::pin(self.lookup_handle(caller, dir, name)).await;
        }
        let attr = self.client.lookup(&self.creds(caller), dir, name).await?;
        self.claimed(caller.pid, (parent, name), attr.ino).await?;
        match is_dir(&attr) {
            true => self.folders.note(&attr, Some(dir)),
            false => self.claims.told(parent, name),
        }
        Ok(self.outer(attr))
    }

    /// The result of stat(2). The storage servers are asked for the space of a file that may have
    /// holes; while they do not answer it is left out. Rare cases are boxed: their futures would
    /// make every request's task several times as large.
    pub async fn getattr(&self, ino: Ino) -> Result<Stat> {
        let inner = self.inner(ino);
        // Without the caller's credentials: stat(2) needs no permission on the file itself.
        let nobody = pb::Creds::default();
        let attr = match inner == self.root {
            true => {
                Box::pin(self.or_last(&self.known.root, self.client.getattr(&nobody, inner))).await
            }
            false => self.client.getattr(&nobody, inner).await,
        };
        let attr = match attr {
            Ok(a) => {
                self.folders.note(&a, None);
                self.outer(a)
            }
            Err(e) => self.outer(self.or_held(inner, e)?),
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
        match tokio::time::timeout(COUNT_LIMIT, self.client.space().allocated(ino)).await {
            Ok(counted) => counted
                .inspect_err(|e| tracing::debug!(ino, "asking for the space in use: {e}"))
                .ok(),
            Err(_) => {
                *self.uncounted.lock() = Some(Instant::now());
                None
            }
        }
    }

    pub async fn setattr(&self, caller: Caller<'_>, ino: Ino, change: Change) -> Result<pb::Attr> {
        let ino = self.inner(ino);
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
            _ => match self.client.setattr(caller.with(&self.creds(caller)), wanted).await {
                Ok(a) => {
                    self.folders.note(&a, None);
                    Ok(self.outer(a))
                }
                Err(e) => self.change_held(caller, ino, &change, e).map(|a| self.outer(a)),
            },
        }
    }

    pub async fn readlink(&self, caller: Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.client.readlink(&self.creds(caller), ino).await.map_err(stale)
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
            .client
            .mknod(
                c.with(&self.creds(c)),
                self.inner(parent),
                name,
                Mode { bits: mode, umask },
                rdev,
            )
            .await;
        made.inspect(|_| self.claims.told(parent, name))
    }

    pub async fn mkdir(
        &self,
        c: Caller<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
    ) -> Result<pb::Attr> {
        let parent = self.inner(parent);
        let made = self
            .client
            .mkdir(c.with(&self.creds(c)), parent, name, Mode { bits: mode, umask })
            .await;
        made.inspect(|a| self.folders.note(a, Some(parent)))
    }

    pub async fn symlink(
        &self,
        caller: Caller<'_>,
        parent: Ino,
        name: &[u8],
        target: &[u8],
    ) -> Result<pb::Attr> {
        let creds = self.creds(caller);
        let made = self.client.symlink(caller.with(&creds), self.inner(parent), name, target).await;
        made.inspect(|_| self.claims.told(parent, name))
    }

    pub async fn link(
        &self,
        caller: Caller<'_>,
        ino: Ino,
        parent: Ino,
        name: &[u8],
    ) -> Result<pb::Attr> {
        let creds = self.creds(caller);
        let made = self.client.link(caller.with(&creds), ino, self.inner(parent), name).await;
        made.inspect(|_| self.claims.told(parent, name))
    }

    pub async fn unlink(&self, caller: Caller<'_>, parent: Ino, name: &[u8]) -> Result<()> {
        let creds = self.creds(caller);
        self.client.unlink(caller.with(&creds), self.inner(parent), name).await
    }

    pub async fn rmdir(&self, caller: Caller<'_>, parent: Ino, name: &[u8]) -> Result<()> {
        let creds = self.creds(caller);
        let gone = self.client.rmdir(caller.with(&creds), self.inner(parent), name).await?;
        self.folders.removed(gone);
        Ok(())
    }

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
        let (old, new) = ((self.inner(from.0), from.1), (self.inner(to.0), to.1));
        self.client.rename(caller.with(&self.creds(caller)), old, new, flags).await?;
        self.claims.told(to.0, to.1);
        Ok(())
    }

    /// Whether a rename with these flags exchanges two names.
    pub(crate) fn exchanges(flags: u32) -> bool {
        flags & RENAME_EXCHANGE != 0
    }

    /// access(2) as `caller`; `mask` of `R_OK` 4, `W_OK` 2, `X_OK` 1.
    pub async fn access(&self, caller: Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        self.client.access(&self.creds(caller), self.inner(ino), mask).await.map_err(stale)
    }
}
