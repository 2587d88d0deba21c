//! Requests about open files.

use std::sync::Arc;

use strake_client::{AppendPart, AsOf, File, Mode, Turn, Using};
use strake_fabric::Buf;
use strake_proto::{Code, Error, Ino, Result, SessionId, layout::MAX_FILE_SIZE, pb};

use tokio::sync::watch;

use super::{
    base::Base,
    calls,
    claims::Claims,
    handles::Table,
    locks::{Leaving, Locks},
    open_file::OpenFile,
    records,
    types::{Caller, CopyRange, Opened, Place, stale},
};

/// Most bytes that one request copies; the kernel asks again for the rest.
const MOST_COPIED: u64 = 16 << 20;

/// The files that the kernel has open, and the requests for them.
pub struct Files {
    base: Arc<Base>,
    open: Arc<Table<OpenFile>>,
    locks: Arc<Locks>,
    claims: Arc<Claims>,
    /// Number of handles that the kernel has closed and whose close is still in progress.
    closings: watch::Sender<usize>,
    /// Flags that are added to every open.
    always: i32,
}

/// A handle that the kernel has closed.
pub(crate) struct Released {
    open: Arc<OpenFile>,
    locks: Leaving,
    _one: Counted,
}

/// Counts one for as long as it lives.
struct Counted(watch::Sender<usize>);

impl Counted {
    fn new(count: &watch::Sender<usize>) -> Counted {
        count.send_modify(|n| *n += 1);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

impl Files {
    /// `synchronous`: every write is stable before it returns, as if opened with `O_SYNC`.
    pub(super) fn new(
        base: Arc<Base>,
        open: Arc<Table<OpenFile>>,
        locks: Arc<Locks>,
        claims: Arc<Claims>,
        synchronous: bool,
    ) -> Files {
        let always = if synchronous { libc::O_SYNC } else { 0 };
        Files { base, open, locks, claims, closings: watch::Sender::new(0), always }
    }

    /// open(2) of an inode that exists.
    pub async fn open(&self, caller: Caller<'_>, ino: Ino, flags: i32) -> Result<Opened> {
        let flags = known_access(flags) | self.always;
        // An open by a name that is replaced meanwhile opens the former file.
        let (creds, known) =
            (caller.creds(), self.base.client.is_open(ino) || self.base.client.was_found(ino));
        let (file, attr) =
            self.base.client.open(caller.with(&creds), ino, flags as u32).await.map_err(stale)?;
        if attr.nlink == 0 && !known {
            // The file has no name and is not open here: its number comes from an old file handle.
            file.close().await?;
            return Err(Error::new(Code::Stale, "the file was removed"));
        }
        // Linux truncates the file even then; the kernel has checked the permission to write it.
        if flags & libc::O_TRUNC != 0 && flags & libc::O_ACCMODE == libc::O_RDONLY {
            let cut = pb::SetAttr { ino, size: Some(0), ..Default::default() };
            self.base.client.setattr(caller.with(&creds), cut).await?;
        }
        Ok(self.keep(file, ino, flags, caller))
    }

    /// open(2) with `O_CREAT`.
    pub async fn create(
        &self,
        caller: Caller<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
        flags: i32,
    ) -> Result<(pb::Attr, Opened)> {
        let (flags, exclusive) = (known_access(flags) | self.always, flags & libc::O_EXCL != 0);
        let mode = Mode { bits: mode & 0o7777, umask };
        let creds = caller.creds();
        // The kernel takes the file for new and will not truncate it; the client does so if another
        // mount created it first.
        let (file, attr) = self
            .base
            .client
            .create(
                caller.with(&creds),
                self.base.inner(parent),
                name,
                mode,
                flags as u32,
                exclusive,
                None,
            )
            .await?;
        let ino = attr.ino;
        self.claims.told(parent, name);
        Ok((attr, self.keep(file, ino, flags, caller)))
    }

    /// open(2) with `O_TMPFILE`: a file without a name in the directory `parent`. Without `O_EXCL`
    /// it may get a name by [`super::Names::link`] while it is open.
    pub async fn tmpfile(
        &self,
        caller: Caller<'_>,
        parent: Ino,
        mode: u32,
        umask: u32,
        flags: i32,
    ) -> Result<(pb::Attr, Opened)> {
        let mode = Mode { bits: mode & 0o7777, umask };
        let (flags, linkable) = (known_access(flags) | self.always, flags & libc::O_EXCL == 0);
        let creds = caller.creds();
        let (file, attr) = self
            .base
            .client
            .tmpfile(caller.with(&creds), self.base.inner(parent), mode, flags as u32, linkable)
            .await?;
        let ino = attr.ino;
        Ok((attr, self.keep(file, ino, flags, caller)))
    }

    fn keep(&self, file: File, ino: Ino, flags: i32, caller: Caller<'_>) -> Opened {
        let handle = self.base.numbering.next();
        let keep = self.base.keep.as_ref();
        let kept = keep.and_then(|k| records::keep_file(k, (handle, ino), flags, caller));
        self.open.insert(handle, OpenFile::new(Ok(file), ino, flags, kept));
        Opened { handle }
    }

    /// A file that an earlier daemon opened.
    pub(super) fn again(&self, handle: u64, open: OpenFile) {
        self.open.insert(handle, open);
    }

    /// What [`Files::read`] would return, if that needs no waiting. Must be called within the
    /// runtime.
    pub fn read_ready(&self, handle: u64, offset: u64, len: usize) -> Option<Vec<Buf>> {
        let open = self.open.get(handle).ok().filter(|open| !open.lost_locks(&self.base.client))?;
        open.file().ok()?.read_ready(offset, len)
    }

    /// The bytes of `[offset, offset + len)` as far as the file has them, in segments.
    pub async fn read(&self, handle: u64, offset: u64, len: usize) -> Result<Vec<Buf>> {
        let open = self.open.get(handle)?;
        open.check_locks(&self.base.client)?;
        open.file()?.read(offset, len).await
    }

    /// As [`Files::read`], for a caller that keeps the bytes: see [`File::read_to_keep`].
    pub async fn read_to_keep(
        &self,
        handle: u64,
        offset: u64,
        len: usize,
        asked: impl Fn(),
    ) -> Result<(Vec<Buf>, AsOf, Option<Using>)> {
        let open = self.open.get(handle)?;
        open.check_locks(&self.base.client)?;
        open.file()?.read_to_keep(offset, len, asked).await
    }

    /// See [`File::read_at_once`].
    pub async fn read_at_once(
        &self,
        handle: u64,
        offset: u64,
        len: usize,
    ) -> Result<(Vec<Buf>, AsOf)> {
        let open = self.open.get(handle)?;
        open.check_locks(&self.base.client)?;
        open.file()?.read_at_once(offset, len).await
    }

    /// Called before a write by a caller whose writes clear set-id bits. The opener's writes do
    /// that themselves, unless the opener is root and passed the file on.
    pub async fn strip(&self, caller: Caller<'_>, handle: u64) -> Result<()> {
        let open = self.open.get(handle)?;
        let file = open.file()?;
        let (mode, gid) = (file.attr().mode, file.attr().gid);
        if file.opener().uid != 0 || mode & (libc::S_ISUID | libc::S_ISGID) == 0 {
            return Ok(());
        }
        let mut strip = pb::SetAttr { ino: open.ino, drop_privileges: true, ..Default::default() };
        if mode & (libc::S_ISGID | libc::S_IXGRP) == libc::S_ISGID {
            // Without group execute permission, the setgid bit is cleared only for a writer outside
            // the file's group. The metadata server cannot check that, because the request runs
            // with root's rights.
            let writer = caller.creds();
            let member = writer.gid == gid || writer.groups.contains(&gid);
            strip.mode = (!member).then_some(mode & 0o7777 & !(libc::S_ISUID | libc::S_ISGID));
        }
        self.base.client.setattr(caller.with(file.opener()), strip).await.map(drop)
    }

    /// Writes when it is its turn. Returns the number of bytes written.
    pub async fn write(
        &self,
        caller: Caller<'_>,
        handle: u64,
        place: Place,
        data: Buf,
        turn: impl Turn,
    ) -> Result<usize> {
        let open = self.open.get(handle)?;
        open.check_locks(&self.base.client)?;
        let file = open.file()?;
        let written = match place {
            Place::At(offset) => {
                file.write_in_turn(caller.operation, offset, vec![data], turn).await
            }
            Place::End { at, tid } => append(file, caller, (at, tid), data, turn).await,
        };
        written.map_err(|e| given_up(file, e))
    }

    /// Writes back a page of a memory mapping. It never makes the file longer. `only`: fails with
    /// `EIO` in any other session of the client.
    pub async fn write_mapped(
        &self,
        caller: Caller<'_>,
        handle: u64,
        offset: u64,
        data: Buf,
        only: Option<SessionId>,
    ) -> Result<()> {
        let open = self.open.get(handle)?;
        let file = open.file()?;
        let written = file.write_mapped(caller.operation, offset, data, only).await;
        written.map_err(|e| given_up(file, e))
    }

    /// The end of the file as far as this client knows.
    pub fn known_end(&self, handle: u64) -> Option<u64> {
        Some(self.open.get(handle).ok()?.file().ok()?.attr().size)
    }

    /// The inode of an open file, and the flags that it was opened with.
    pub(super) fn opened(&self, handle: u64) -> Option<(Ino, i32)> {
        self.open.get(handle).ok().map(|open| (open.ino, open.flags))
    }

    /// The inodes of all open files.
    pub(crate) fn open_inodes(&self) -> Vec<Ino> {
        self.open.all().iter().map(|open| open.ino).collect()
    }

    /// Whether the kernel has a handle of a file.
    pub fn has_open(&self, ino: Ino) -> bool {
        self.open.any(|open| open.ino == ino)
    }

    /// close(2) of one descriptor by the process with this lock owner. Returns when what the handle
    /// wrote is stable and its size recorded, or the error. Releases the process's POSIX locks on
    /// the file.
    ///
    /// The kernel must send this for every descriptor (no `FOPEN_NOFLUSH`): it does not release
    /// locks by itself.
    pub async fn flush(&self, handle: u64, lock_owner: u64) -> Result<()> {
        let locks = self.note_flush(handle, lock_owner);
        self.finish_flush(handle, locks).await
    }

    /// The first part of [`Files::flush`], which does not wait: locks that the owner takes from now
    /// on are not released by it.
    pub(crate) fn note_flush(&self, handle: u64, lock_owner: u64) -> Leaving {
        let ino = self.open.get(handle).map_or(0, |open| open.ino);
        self.locks.closing(ino, lock_owner)
    }

    pub(crate) async fn finish_flush(&self, handle: u64, locks: Leaving) -> Result<()> {
        let open = self.open.get(handle)?;
        let flushed = match open.file() {
            Ok(file) if open.writes() => file.flush().await,
            Ok(_) => Ok(()),
            Err(e) => Err(e),
        };
        // Flush first: the next holder of a lock must see what was written under it.
        flushed.and(locks.give_up().await)
    }

    /// Whether [`Files::flush`] would only release locks, and succeed: without locks it need not be
    /// called.
    pub fn flush_ready(&self, handle: u64) -> bool {
        self.open.get(handle).is_ok_and(|open| !open.writes() && open.file.is_ok())
    }

    /// fsync(2): what the file's handles wrote is stable when this returns.
    pub async fn fsync(&self, handle: u64) -> Result<()> {
        self.open.get(handle)?.file()?.fsync().await
    }

    /// copy_file_range(2): copies up to `len` bytes, fewer at the source's end or above a limit;
    /// returns how many. The bytes pass through this mount, not through the program. `turn` as in
    /// [`Files::write`].
    pub async fn copy_range(
        &self,
        caller: Caller<'_>,
        range: CopyRange,
        len: u64,
        turn: impl Turn,
    ) -> Result<usize> {
        let (from, to) = (self.open.get(range.from)?, self.open.get(range.to)?);
        let parts = from.file()?.read(range.from_offset, len.min(MOST_COPIED) as usize).await?;
        if parts.is_empty() {
            return Ok(0);
        }
        let to = to.file()?;
        let written = to.write_in_turn(caller.operation, range.to_offset, parts, turn).await;
        written.map_err(|e| given_up(to, e))
    }

    /// syncfs(2): makes everything that was written through this mount stable.
    pub async fn sync_all(&self) -> Result<()> {
        let mut outcome = Ok(());
        for open in self.open.all() {
            if open.writes() {
                let synced = match open.file() {
                    Ok(file) => file.fsync().await,
                    Err(e) => Err(e),
                };
                outcome = outcome.and(synced);
            }
        }
        outcome
    }

    /// Flushes all files that are still open, after the kernel is gone. They are closed by the end
    /// of the session. Returns the first error about bytes that may be lost and that no close
    /// reported.
    pub(super) async fn flush_all(&self) -> Result<()> {
        let mut outcome = Ok(());
        for open in self.open.drain().into_iter().filter(|o| o.writes()) {
            let flushed = match open.file() {
                Ok(file) => file.flush().await,
                Err(e) => Err(e),
            };
            if let Err(e) = flushed {
                tracing::warn!(
                    ino = open.ino,
                    "a file was open when the mount ended, and closing it failed: {e}"
                );
                outcome = outcome.and(Err(e));
            }
        }
        outcome
    }

    /// Waits for handles that were closed before.
    pub(super) async fn all_closed(&self) {
        let _ = self.closings.subscribe().wait_for(|n| *n == 0).await;
    }

    /// The last descriptor and mapping of the handle are closed, and with them the locks that were
    /// taken through it.
    pub async fn release(&self, handle: u64) {
        if let Some(closed) = self.note_release(handle) {
            self.finish_release(closed).await;
        }
    }

    /// The first part of [`Files::release`], which does not wait: from now on the handle is gone,
    /// also for the next daemon, and new locks of the file belong to another owner.
    pub(crate) fn note_release(&self, handle: u64) -> Option<Released> {
        let open = self.open.remove(handle)?;
        open.kept.iter().for_each(records::closing);
        let locks = self.locks.released(handle, open.ino);
        Some(Released { open, locks, _one: Counted::new(&self.closings) })
    }

    pub(crate) async fn finish_release(&self, closed: Released) {
        let Released { open, locks, _one } = closed;
        if !locks.is_empty() {
            // The next holder of a lock must see what was written under it, also through a mapping.
            // The rest can wait.
            if open.writes()
                && let Ok(file) = open.file()
                && let Err(e) = file.flush().await
            {
                tracing::warn!(
                    ino = open.ino,
                    "data written to a file that is closed is not safe: {e}"
                );
            }
            if let Err(e) = locks.give_up().await {
                tracing::warn!(ino = open.ino, "releasing the locks of a closed file: {e}");
            }
        }
        self.end_file(open).await;
    }

    async fn end_file(&self, open: Arc<OpenFile>) {
        let Ok(file) = open.file() else { return };
        if let Err(e) = file.clone().close().await {
            tracing::warn!(ino = open.ino, "closing a file: {e}");
        }
    }

    /// fallocate(2): extends, punches holes and makes ranges zeros. Space is not reserved; an
    /// allocation that does not fit now fails with `ENOSPC`. `turn` as in [`Files::write`].
    pub async fn fallocate(
        &self,
        caller: Caller<'_>,
        handle: u64,
        (offset, len): (u64, u64),
        mode: i32,
        turn: impl Turn,
    ) -> Result<()> {
        let open = self.open.get(handle)?;
        open.check_locks(&self.base.client)?;
        let file = open.file()?;
        if !open.writes() {
            return Err(Error::new(Code::BadF, "the file is not open for writing"));
        }
        let (punches, end) = allocation(offset, len, mode)?;
        // For a write the kernel requests this; here it leaves it to the file system.
        if caller.uid != 0 {
            self.strip(caller, handle).await?;
        }
        if punches {
            file.punch_in_turn(caller.operation, offset, len, turn).await?;
        } else {
            file.check_room(offset, len).await?;
        }
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0
            && self.base.client.getattr(file.opener(), open.ino).await?.size < end
        {
            return file.extend(end).await.map(drop);
        }
        file.touch()
    }

    /// lseek(2) with `SEEK_DATA` or `SEEK_HOLE`; the kernel handles everything else.
    pub async fn seek(&self, handle: u64, offset: u64, whence: i32) -> Result<u64> {
        let open = self.open.get(handle)?;
        match whence {
            libc::SEEK_DATA => open.file()?.seek_data(offset).await,
            libc::SEEK_HOLE => open.file()?.seek_hole(offset).await,
            _ => Err(Error::new(Code::Inval, format!("lseek mode {whence} is not supported"))),
        }
    }
}

/// Whether fallocate(2) in this mode makes bytes zeros.
pub(crate) fn makes_zeros(mode: i32) -> bool {
    mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0
}

/// One piece of an append: the kernel splits what one write(2) appends into requests, between which
/// no other append may happen.
async fn append(
    file: &File,
    caller: Caller<'_>,
    (at, tid): (u64, u32),
    data: Buf,
    turn: impl Turn,
) -> Result<usize> {
    let more = calls::may_be_cut(data.len());
    // Only these cases cost a read of `/proc`.
    let writes = if more || file.kept_end().is_some() { calls::writes(tid) } else { None };
    let part = AppendPart { call: (tid, writes.unwrap_or(0)), offset: at, more };
    let landed = file.append_in_turn(caller.operation, vec![data], Some(part), turn).await?;
    if let Some(kept) = landed.kept {
        tokio::spawn(calls::watch(file.clone(), kept, tid, writes));
    }
    Ok(landed.len)
}

/// Whether this fallocate makes zeros, and the end of its range.
fn allocation(offset: u64, len: u64, mode: i32) -> Result<(bool, u64)> {
    const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
    if !matches!(mode & !KEEP, 0 | libc::FALLOC_FL_ZERO_RANGE) && mode != PUNCH {
        return Err(Error::new(
            Code::OpNotSupp,
            format!("fallocate mode {mode:#x} is not supported"),
        ));
    }
    if len == 0 {
        return Err(Error::new(Code::Inval, "fallocate needs at least one byte"));
    }
    let end = offset.saturating_add(len);
    if end > MAX_FILE_SIZE && mode != PUNCH {
        return Err(Error::new(Code::FBig, "fallocate beyond the largest file"));
    }
    Ok((mode & !KEEP != 0, end))
}

/// A write that a soft mount gave up: some of its bytes may be on some replicas. Not every program
/// checks the result of write(2), so the next calls report it too.
fn given_up(file: &File, e: Error) -> Error {
    if e.code != Code::TimedOut {
        return e;
    }
    file.lost(&format!("a write was given up, its bytes may be lost: {e}"));
    Error { code: Code::Io, ..e }
}

/// Linux's fourth access mode requires the permissions to read and to write, but allows neither;
/// the kernel enforces that.
fn known_access(flags: i32) -> i32 {
    if flags & libc::O_ACCMODE == libc::O_ACCMODE { flags & !libc::O_WRONLY } else { flags }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_modes() {
        let seen =
            [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR, 3 | libc::O_APPEND].map(known_access);
        assert_eq!(seen, [0, 1, 2, 2 | libc::O_APPEND]);
    }

    #[test]
    fn allocations() {
        use libc::{
            FALLOC_FL_KEEP_SIZE as KEEP, FALLOC_FL_PUNCH_HOLE as PUNCH,
            FALLOC_FL_ZERO_RANGE as ZERO,
        };
        let code = |offset, len, mode| allocation(offset, len, mode).map_err(|e| e.code);
        assert_eq!(code(5, 6, 0), Ok((false, 11)));
        assert_eq!(code(5, 6, KEEP), Ok((false, 11)));
        for mode in [ZERO, ZERO | KEEP, PUNCH | KEEP] {
            assert_eq!(code(5, 6, mode), Ok((true, 11)));
        }
        for mode in [PUNCH, PUNCH | ZERO | KEEP, 8 | KEEP, 8, 0x20, 0x40, 0x40 | KEEP, 4, -1] {
            assert_eq!(code(5, 6, mode), Err(Code::OpNotSupp), "{mode:#x}");
        }
        assert_eq!(code(5, 0, KEEP | PUNCH), Err(Code::Inval));
        for mode in [0, KEEP, ZERO, ZERO | KEEP] {
            assert_eq!(code(MAX_FILE_SIZE, 1, mode), Err(Code::FBig));
            assert_eq!(code(u64::MAX, u64::MAX, mode), Err(Code::FBig));
        }
        assert_eq!(code(u64::MAX, u64::MAX, PUNCH | KEEP), Ok((true, u64::MAX)));
    }
}
