//! Reading and writing foreign memory, such as a GPU's.

use std::{
    ops::Range,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use strake_fabric::Foreign;
use strake_proto::{Code, Error, Result, checksum::BLOCK, layout::MAX_FILE_SIZE};

use super::{File, O_DSYNC, Teller};
use crate::{
    config::Counters,
    core::Core,
    data::foreign::{Arrived, MOST},
    inode::{Inode, O_ACCMODE, O_WRONLY},
    read::cache::Change,
};

/// How often a write may find that other writes of this client touch the same bytes.
const TURNS: usize = 8;

/// A write in progress. Cached bytes of its range are not valid meanwhile, and if it is dropped in
/// the middle the content of the range is unknown.
struct Writing<'a> {
    inode: &'a Inode,
    end: u64,
    _change: Change<'a>,
    /// Requests that storage servers may have received. If there are none, the write changed
    /// nothing.
    handed: AtomicI64,
    ended: bool,
}

impl<'a> Writing<'a> {
    fn begin(core: &'a Core, inode: &'a Inode, range: Range<u64>) -> Writing<'a> {
        inode.begins(&range);
        let (end, _change) = (range.end, Change::begin(&core.cache, inode.ino, range));
        Writing { inode, end, _change, handed: AtomicI64::new(0), ended: false }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if !self.ended && self.handed.load(Relaxed) > 0 {
            self.inode.write_failed(self.end);
        }
    }
}

impl File {
    /// Reads `[offset, offset + into.len())`, up to the end of the file, into foreign memory. The
    /// storage servers write there over separate connections; only bytes that came with an answer
    /// pass through this process. Returns the pieces of the range, in order. Nothing is written for
    /// holes, so the caller clears them, and the caller compares the checksums. When this returns,
    /// or is dropped, no server can access the memory any more.
    ///
    /// Fails with `EOPNOTSUPP` and an explanation where the storage servers are not reached by
    /// RDMA, or where the memory cannot be registered with the RDMA device that leads there;
    /// otherwise with the errors of [`File::read`]. At most 16 MiB.
    pub async fn read_foreign(&self, offset: u64, into: &Foreign) -> Result<Vec<Arrived>> {
        let h = &self.0;
        self.check(h.flags & O_ACCMODE != O_WRONLY, "reading")?;
        check_len(into)?;
        // Dirty data of this client is on no server yet.
        h.core.writeback.send_held(&h.inode).await;
        let size = h.core.files.fresh_size(&h.inode).await?;
        h.inode.check_missing(h.since, &(offset..offset.saturating_add(into.len())))?;
        let end = offset.saturating_add(into.len()).min(size);
        if offset >= end {
            return Ok(Vec::new());
        }
        h.inode.check_placed()?;
        Counters::add(&h.core.shared.stats.read_bytes, end - offset);
        h.core.storage.read_foreign(&h.inode, offset..end, &into.slice(0..end - offset)).await
    }

    /// Writes foreign memory at `offset`, a multiple of 4 KiB: the storage servers read the memory,
    /// and every byte is on disk in all replicas when this returns. A larger file size is reported
    /// to the metadata server as after other writes: at the next fsync, or before this returns with
    /// O_DSYNC or O_SYNC. `sums`: the CRC32C of each 4 KiB block of the memory (the last may be
    /// shorter); the servers compare and store them. When this returns, or is dropped, no server
    /// can access the memory any more; after an error each 4 KiB block of the file is old or new.
    ///
    /// Fails as [`File::read_foreign`] and [`File::write`] do, and with `Resend` when the bytes
    /// that the servers read do not match the sums.
    pub async fn write_foreign(&self, offset: u64, from: &Foreign, sums: &[u32]) -> Result<()> {
        self.check(self.is_writable(), "writing")?;
        check_len(from)?;
        self.tell_errors(Teller::Write)?;
        let wrong = |m: &str| Error::new(Code::Inval, m);
        if !offset.is_multiple_of(BLOCK as u64)
            || sums.len() as u64 != from.len().div_ceil(BLOCK as u64)
        {
            return Err(wrong(
                "foreign memory is written at multiples of 4096 bytes, with a checksum for each \
                 4096",
            ));
        }
        let end = offset.checked_add(from.len()).filter(|e| *e <= MAX_FILE_SIZE);
        let range =
            offset..end.ok_or_else(|| Error::new(Code::FBig, "beyond the largest file size"))?;
        let (core, inode) = (&self.0.core, &self.0.inode);
        let _using = core.use_to_change(inode.ino).await?;
        for _ in 0..TURNS {
            core.writeback.send_held(inode).await;
            // Unstable writes may be sent again, and must not overwrite this one.
            core.updates.flush_inode(inode.ino).await?;
            self.tell_errors(Teller::Write)?;
            let _turn = inode.ranges.lock(range.clone()).await;
            if !core.updates.is_unstable(inode, &range) {
                return self.write_foreign_now(range, from, sums).await;
            }
        }
        Err(Error::new(
            Code::Busy,
            "other calls of this client keep writing the same bytes of the file",
        ))
    }

    async fn write_foreign_now(
        &self,
        range: Range<u64>,
        from: &Foreign,
        sums: &[u32],
    ) -> Result<()> {
        let h = &self.0;
        let mut writing = Writing::begin(&h.core, &h.inode, range.clone());
        let (session, done, outcome) = h
            .core
            .updates
            .write_foreign(&h.inode, range.start, (from, sums), &writing.handed)
            .await;
        writing.ended = outcome.is_ok();
        if done > 0 {
            h.inode.wrote(session, range.start..range.start + done, &h.creds)?;
        }
        outcome?;
        if h.flags & O_DSYNC != 0 {
            h.core.files.push_size(&h.inode).await?;
        }
        Ok(())
    }
}

fn check_len(m: &Foreign) -> Result<()> {
    if m.is_empty() || m.len() > MOST {
        return Err(Error::new(
            Code::Inval,
            format!("{} bytes of foreign memory in one call; 1 to {MOST} are taken", m.len()),
        ));
    }
    Ok(())
}
