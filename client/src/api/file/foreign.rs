//! Reading and writing foreign memory, such as a GPU's.

use std::{
    ops::Range,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use strake_fabric::Foreign;
use strake_proto::{Code, Error, Result, checksum::BLOCK, layout::MAX_FILE_SIZE};

use super::{reads::Reads, told::Teller, writes::Writes};
use crate::{
    config::Counters,
    core::Core,
    data::foreign::{Arrived, MOST},
    inode::Inode,
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

impl Reads {
    /// See [`super::File::read_foreign`].
    pub(super) async fn read_foreign(&self, offset: u64, into: &Foreign) -> Result<Vec<Arrived>> {
        let (core, inode) = (&self.core, &self.inode);
        check_len(into)?;
        // Dirty data of this client is on no server yet.
        core.writeback.send_held(inode).await;
        let size = core.files.fresh_size(inode).await?;
        inode.check_missing(self.since, &(offset..offset.saturating_add(into.len())))?;
        let end = offset.saturating_add(into.len()).min(size);
        if offset >= end {
            return Ok(Vec::new());
        }
        inode.check_placed()?;
        Counters::add(&core.shared.stats.read_bytes, end - offset);
        core.storage.read_foreign(inode, offset..end, &into.slice(0..end - offset)).await
    }
}

impl Writes {
    /// See [`super::File::write_foreign`].
    pub(super) async fn write_foreign(
        &self,
        offset: u64,
        from: &Foreign,
        sums: &[u32],
    ) -> Result<()> {
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
        let (core, inode) = (&self.core, &self.inode);
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
        let (core, inode) = (&self.core, &self.inode);
        let mut writing = Writing::begin(core, inode, range.clone());
        let (session, done, outcome) =
            core.updates.write_foreign(inode, range.start, (from, sums), &writing.handed).await;
        writing.ended = outcome.is_ok();
        if done > 0 {
            inode.wrote(session, range.start..range.start + done, &self.creds)?;
        }
        outcome?;
        if self.is_stable() {
            core.files.push_size(inode).await?;
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
