//! Open files, as callers see them.
//!
//! | file | what |
//! |---|---|
//! | `opening.rs` | open, create, and the handle from the answer |
//! | `handle.rs` | one open file: its sides for reading and writing, and its end |
//! | `reads.rs` | the reading side |
//! | `writes.rs` | the writing side |
//! | `appends.rs` | appends, and the end of the file between pieces of one |
//! | `mapped.rs` | pages of memory mappings |
//! | `foreign.rs` | foreign memory, such as a GPU's |
//! | `holes.rs` | punched holes, and seeks for holes and data |
//! | `fit.rs` | whether there is space for more bytes |
//! | `told.rs` | which lost writes were reported |

mod appends;
mod fit;
mod foreign;
mod handle;
mod holes;
mod mapped;
mod opening;
mod reads;
mod told;
mod turn;
mod writes;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use strake_fabric::{Buf, Foreign};
use strake_proto::{Code, Error, Ino, Result, SessionId, layout::MAX_FILE_SIZE, pb};

pub use appends::{Landed, Part as AppendPart};
pub use mapped::AsOf;
pub use turn::Turn;

use handle::Handle;
use told::Teller;

use crate::{
    core::Core,
    data::{buffers, foreign::Arrived},
    handover::operation::Operation,
    inode::{Inode, Open},
    locks::page_uses::Using,
    write::back::Taken,
};

/// An open file. All clones share the same open file. Dropping the last one closes it, but only
/// [`File::close`] reports whether the bytes are safe.
#[derive(Clone)]
pub struct File(Arc<Handle>);

impl File {
    pub(crate) fn new(core: &Arc<Core>, open: Arc<Open>, creds: &pb::Creds, flags: u32) -> File {
        File(Arc::new(Handle::new(core, open, creds, flags)))
    }

    pub(crate) fn inode(&self) -> &Arc<Inode> {
        &self.0.inode
    }

    fn is_writable(&self) -> bool {
        self.0.is_writable()
    }

    /// The inode.
    pub fn ino(&self) -> Ino {
        self.0.inode.ino
    }

    /// How the file is striped, and over which chains.
    pub fn layout(&self) -> pb::Layout {
        self.0.inode.placed().layout
    }

    /// The flags it was opened with.
    pub fn flags(&self) -> u32 {
        self.0.flags
    }

    /// The credentials of the opener, on whose behalf the file is written.
    pub fn opener(&self) -> &pb::Creds {
        &self.0.writes.creds
    }

    /// The attributes as last heard, with the size that this client's own writes give.
    /// [`crate::Client::getattr`] asks the server.
    pub fn attr(&self) -> pb::Attr {
        self.0.inode.attr()
    }

    // --- reading ---

    /// The bytes of `[offset, offset + len)` below the end of the file, as segments in order. Holes
    /// read as zeros.
    pub async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        self.0.for_reading()?.read(offset, len).await
    }

    /// Returns what [`File::read`] would, if everything is in memory: never waits. `None`: call
    /// `read`. Must be called where tasks can be spawned, because a sequential read may start the
    /// next fetch.
    pub fn read_ready(&self, offset: u64, len: usize) -> Option<Vec<Buf>> {
        self.0.for_reading().ok()?.ready(offset, len)
    }

    /// The same without asking the metadata servers, for a page of a memory mapping: answers even
    /// while this client gives pages of the file back to others. The caller must also give back
    /// what this returns before [`crate::Forget`] ends.
    pub async fn read_at_once(&self, offset: u64, len: usize) -> Result<(Vec<Buf>, AsOf)> {
        self.0.for_reading()?.read_at_once(offset, len).await
    }

    /// As [`File::read`], but copies into `dst`. Returns the number of bytes read.
    pub async fn read_into(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let mut at = 0;
        for b in self.read(offset, dst.len()).await? {
            dst[at..at + b.len()].copy_from_slice(&b);
            at += b.len();
        }
        Ok(at)
    }

    /// As [`File::read`], for a caller that keeps the bytes for as long as they stay valid. `asked`
    /// is called when the metadata servers are not asked any more. No other client changes the file
    /// until the last part of what is returned is dropped.
    pub async fn read_to_keep(
        &self,
        offset: u64,
        len: usize,
        asked: impl Fn(),
    ) -> Result<(Vec<Buf>, AsOf, Option<Using>)> {
        self.0.for_reading()?.read_to_keep(offset, len, asked).await
    }

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
        self.0.for_reading()?.read_foreign(offset, into).await
    }

    /// The offset of the first data at or behind `offset`. `ENXIO` if there is only a hole up to
    /// the end, or `offset` is not before the end. Bytes that were never written, or that were
    /// punched, may be reported as data; data is never reported as a hole.
    pub async fn seek_data(&self, offset: u64) -> Result<u64> {
        self.0.check_open()?;
        self.0.reads.seek(offset, true).await
    }

    /// The offset of the first hole at or behind `offset`; the end of the file counts as one.
    /// `ENXIO` if `offset` is not before the end.
    pub async fn seek_hole(&self, offset: u64) -> Result<u64> {
        self.0.check_open()?;
        self.0.reads.seek(offset, false).await
    }

    // --- writing ---

    /// Writes `data` at `offset`. When it returns, every byte is with all in-sync replicas, in
    /// memory or on disk (on disk with O_DSYNC or O_SYNC). Overlapping writes of one client are
    /// applied in the order of the calls. The buffers must not change any more.
    ///
    /// Returns the number of bytes written: fewer than given only when space ran out on the way, or
    /// at the largest size of a file (`EFBIG` for a write that begins there). After an error each 4
    /// KiB block is old or new.
    ///
    /// With [`crate::Config::write_back`] it may return before the bytes are sent: then the next
    /// sync or close reports an error.
    pub async fn write(&self, offset: u64, data: Vec<Buf>) -> Result<usize> {
        self.write_in_turn(None, offset, data, ()).await
    }

    /// As [`File::write`], when it is its turn. `operation`: what the write belongs to, if that may
    /// come again after a restart of the mount.
    pub async fn write_in_turn(
        &self,
        operation: Option<&Operation>,
        offset: u64,
        data: Vec<Buf>,
        turn: impl Turn,
    ) -> Result<usize> {
        let taken = self.0.for_writing()?.hold_back_in_turn(&turn, offset, &data)?;
        if taken == Taken::Held {
            return Ok(buffers::total(&data));
        }
        let (h, operation) = (self.0.clone(), operation.cloned());
        let writing =
            async move { h.writes.write(taken, offset, data, operation.as_ref(), &turn).await };
        self.0.core.shared.detached(writing).await
    }

    /// As [`File::write`], from a slice (copied), all of it.
    pub async fn write_all_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut b = self.0.core.shared.fabric.pool().get(data.len()).await?;
        b.copy_from_slice(data);
        let n = self.write(offset, vec![b.freeze()]).await?;
        if n < data.len() {
            Err(Error::new(Code::NoSpc, "no space left for all of the bytes"))
        } else {
            Ok(())
        }
    }

    /// Writes back what was stored through a memory mapping of the file: as [`File::write`], but
    /// the file does not get longer, and bytes beyond its end are dropped. With `only`, fails with
    /// `EIO` and writes nothing in any other session: the bytes were stored before that session was
    /// lost. `operation` is as for [`File::write_in_turn`].
    pub async fn write_mapped(
        &self,
        operation: Option<&Operation>,
        offset: u64,
        data: Buf,
        only: Option<SessionId>,
    ) -> Result<()> {
        self.0.for_writing()?;
        let (h, operation) = (self.0.clone(), operation.cloned());
        let writing =
            async move { h.writes.write_mapped(operation.as_ref(), offset, data, only).await };
        self.0.core.shared.detached(writing).await
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
        self.0.for_writing()?.write_foreign(offset, from, sums).await
    }

    /// Updates mtime, ctime and set-id bits as a write would, without writing bytes.
    pub fn touch(&self) -> Result<()> {
        self.0.inode.touched(&self.0.for_writing()?.creds);
        Ok(())
    }

    /// Makes `[offset, offset + len)` zeros without changing the size; whole 4 KiB blocks no longer
    /// take space. The change is unstable like a write. `EINVAL` for a length of 0.
    pub async fn punch(&self, offset: u64, len: u64) -> Result<()> {
        self.punch_in_turn(None, offset, len, ()).await
    }

    /// As [`File::punch`]; `operation` and `turn` are as for [`File::write_in_turn`].
    pub async fn punch_in_turn(
        &self,
        operation: Option<&Operation>,
        offset: u64,
        len: u64,
        turn: impl Turn,
    ) -> Result<()> {
        self.0.for_writing()?;
        if len == 0 {
            return Err(Error::new(Code::Inval, "a hole must have at least one byte"));
        }
        let (h, operation) = (self.0.clone(), operation.cloned());
        let punching = async move { h.writes.punch(operation.as_ref(), offset, len, &turn).await };
        self.0.core.shared.detached(punching).await
    }

    // --- the end of the file ---

    /// Writes at the end of the file; returns the offset. Appends never overlap, including those of
    /// other clients.
    pub async fn append(&self, data: Vec<Buf>) -> Result<u64> {
        let len = buffers::total(&data);
        let landed = self.append_in_turn(None, data, None, ()).await?;
        if landed.len < len {
            return Err(Error::new(Code::NoSpc, "no space left for all of the bytes"));
        }
        Ok(landed.offset)
    }

    /// As [`File::append`]. A piece goes directly behind the one before it, if that one is recent
    /// enough. `operation` and `turn` are as for [`File::write_in_turn`].
    pub async fn append_in_turn(
        &self,
        operation: Option<&Operation>,
        data: Vec<Buf>,
        part: Option<AppendPart>,
        turn: impl Turn,
    ) -> Result<Landed> {
        self.0.for_writing()?;
        let (h, operation) = (self.0.clone(), operation.cloned());
        let appending =
            async move { h.appends.append(&h.writes, data, part, operation.as_ref(), &turn).await };
        self.0.core.shared.detached(appending).await
    }

    /// The number under which the end of the file is kept for the next piece of an append by this
    /// handle.
    pub fn kept_end(&self) -> Option<u64> {
        self.0.appends.kept_end()
    }

    /// Says that the piece for which the end of the file was kept under this number will not come.
    /// Returns whether the end was still kept.
    pub fn end_append(&self, number: u64) -> bool {
        self.0.appends.end_append(number)
    }

    /// Truncates or extends the file. Returns when the bytes beyond the new size are gone from
    /// every replica.
    pub async fn truncate(&self, size: u64) -> Result<pb::Attr> {
        self.truncate_for(None, size).await
    }

    /// As [`File::truncate`]; `operation` is as for [`File::write_in_turn`].
    pub async fn truncate_for(&self, operation: Option<&Operation>, size: u64) -> Result<pb::Attr> {
        self.0.for_writing()?;
        let (h, operation) = (self.0.clone(), operation.cloned());
        let cutting = async move { h.writes.truncate(operation.as_ref(), size).await };
        self.0.core.shared.detached(cutting).await
    }

    /// Makes the file reach at least to `end`; new bytes read as zeros. Unlike [`File::truncate`]
    /// it never removes what others write at the same time.
    pub async fn extend(&self, end: u64) -> Result<pb::Attr> {
        self.0.for_writing()?;
        if end > MAX_FILE_SIZE {
            return Err(Error::new(Code::FBig, "beyond the largest file"));
        }
        let h = self.0.clone();
        self.0.core.shared.detached(async move { h.writes.extend(end).await }).await
    }

    /// Returns `ENOSPC` if the range does not fit on the chains of the file. Every copy counts;
    /// what is already stored of the range does not. Nothing is reserved. The free space of targets
    /// is what the metadata servers heard last.
    pub async fn check_room(&self, offset: u64, len: u64) -> Result<()> {
        fit::check_room(&self.0.core, &self.0.inode, offset, len).await
    }

    // --- safe bytes, errors, closing ---

    /// Records that bytes of this file are lost: the next write, fsync and close of every open file
    /// of it fail with `EIO`.
    pub fn lost(&self, why: &str) {
        self.0.inode.fail_loudly(why);
    }

    /// Returns when all bytes written are stable on every in-sync replica and the size is in the
    /// metadata servers' log. An error of an earlier write-back is reported once per open file.
    pub async fn fsync(&self) -> Result<()> {
        self.0.check_open()?;
        self.0.sync(Teller::Sync).await
    }

    /// What close(2) does: the same as [`File::fsync`].
    pub fn flush<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.0.check_open()?;
            self.0.sync(Teller::Close).await
        })
    }

    /// Flushes and closes, for all clones. The file is closed even when this fails.
    pub fn close(self) -> BoxFuture<'static, Result<()>> {
        Box::pin(self.0.close())
    }
}
