//! Holes of open files.

use strake_proto::{Code, Error, Result, layout::MAX_FILE_SIZE};

use super::{
    reads::Reads,
    told::Teller,
    turn::{Turn, use_in_turn},
    writes::Writes,
};
use crate::{handover::operation::Operation, read::cache::Change, write::back::Back};

impl Writes {
    /// Makes `[offset, offset + len)` zeros.
    pub(super) async fn punch(
        &self,
        operation: Option<&Operation>,
        offset: u64,
        len: u64,
        turn: &dyn Turn,
    ) -> Result<()> {
        let (core, inode) = (&self.core, &self.inode);
        let end = offset.saturating_add(len).min(MAX_FILE_SIZE);
        if offset >= end {
            return Ok(()); // beyond all files
        }
        self.tell_errors(Teller::Write)?;
        let _using = use_in_turn(core, inode.ino, turn).await?;
        let _bar = Back::bar(inode);
        core.writeback.send_held(inode).await;
        let _turn = inode.ranges.lock(offset..end).await;
        inode.check_placed()?;
        inode.punches();
        let change = Change::begin(&core.cache, inode.ino, offset..end);
        let stable = self.is_stable();
        let outcome = core.updates.punch_range(inode, offset..end, stable, operation).await;
        drop(change);
        inode.touched(&self.creds);
        if outcome.is_err() {
            inode.write_failed(0);
        }
        outcome?;
        if stable { core.files.push_size(inode).await } else { Ok(()) }
    }
}

impl Reads {
    /// The offset of the first data, or of the first hole, at or behind `offset`.
    pub(super) async fn seek(&self, offset: u64, data: bool) -> Result<u64> {
        let (core, inode) = (&self.core, &self.inode);
        core.writeback.send_held(inode).await;
        let size = core.files.fresh_size(inode).await?;
        let none = || Error::new(Code::NxIo, "there is no data or hole before the end of the file");
        if offset >= size {
            return Err(none());
        }
        inode.check_placed()?;
        match (inode.may_have_holes(), data) {
            (false, true) => Ok(offset),
            (false, false) => Ok(size),
            (true, true) => {
                let found = core.storage.seek_data(inode, offset).await?;
                found.filter(|at| *at < size).ok_or_else(none)
            }
            (true, false) => core.storage.seek_hole(inode, offset, size).await,
        }
    }
}
