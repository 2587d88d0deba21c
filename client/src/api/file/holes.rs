//! Holes of open files.

use strake_proto::{Code, Error, Result, layout::MAX_FILE_SIZE};

use super::{File, O_DSYNC, Teller};
use crate::{handover::operation::Operation, read::cache::Change, write::back::Back};

impl File {
    /// Makes `[offset, offset + len)` zeros without changing the size; whole 4 KiB blocks no longer
    /// take space. The change is unstable like a write. `EINVAL` for a length of 0.
    pub async fn punch(&self, offset: u64, len: u64) -> Result<()> {
        self.punch_until(None, offset, len, ()).await
    }

    /// As [`File::punch`]; `operation` and `until` are as for [`File::write_until`].
    pub async fn punch_until(
        &self,
        operation: Option<&Operation>,
        offset: u64,
        len: u64,
        until: impl Send + 'static,
    ) -> Result<()> {
        self.check(self.is_writable(), "writing")?;
        if len == 0 {
            return Err(Error::new(Code::Inval, "a hole must have at least one byte"));
        }
        let end = offset.saturating_add(len).min(MAX_FILE_SIZE);
        if offset >= end {
            return Ok(()); // beyond all files
        }
        let (me, operation) = (self.clone(), operation.cloned());
        let punching = async move {
            let _until = until;
            let h = &me.0;
            me.tell_errors(Teller::Write)?;
            let _using = h.core.use_to_change(h.inode.ino).await?;
            let _bar = Back::bar(&h.inode);
            h.core.writeback.send_held(&h.inode).await;
            let _turn = h.inode.ranges.lock(offset..end).await;
            h.inode.check_placed()?;
            h.inode.punches();
            let change = Change::begin(&h.core.cache, h.inode.ino, offset..end);
            let stable = h.flags & O_DSYNC != 0;
            let punched =
                h.core.updates.punch_range(&h.inode, offset..end, stable, operation.as_ref());
            let outcome = punched.await;
            drop(change);
            h.inode.touched(&h.creds);
            if outcome.is_err() {
                h.inode.write_failed(0);
            }
            outcome?;
            if stable { h.core.files.push_size(&h.inode).await } else { Ok(()) }
        };
        self.0.core.shared.detached(punching).await
    }

    /// The offset of the first data at or behind `offset`. `ENXIO` if there is only a hole up to
    /// the end, or `offset` is not before the end. Bytes that were never written, or that were
    /// punched, may be reported as data; data is never reported as a hole.
    pub async fn seek_data(&self, offset: u64) -> Result<u64> {
        self.seek(offset, true).await
    }

    /// The offset of the first hole at or behind `offset`; the end of the file counts as one.
    /// `ENXIO` if `offset` is not before the end.
    pub async fn seek_hole(&self, offset: u64) -> Result<u64> {
        self.seek(offset, false).await
    }

    async fn seek(&self, offset: u64, data: bool) -> Result<u64> {
        let h = &self.0;
        self.check(true, "")?;
        h.core.writeback.send_held(&h.inode).await;
        let size = h.core.files.fresh_size(&h.inode).await?;
        let none = || Error::new(Code::NxIo, "there is no data or hole before the end of the file");
        if offset >= size {
            return Err(none());
        }
        h.inode.check_placed()?;
        match (h.inode.may_have_holes(), data) {
            (false, true) => Ok(offset),
            (false, false) => Ok(size),
            (true, true) => h
                .core
                .storage
                .seek_data(&h.inode, offset)
                .await?
                .filter(|at| *at < size)
                .ok_or_else(none),
            (true, false) => h.core.storage.seek_hole(&h.inode, offset, size).await,
        }
    }
}
