//! The interface of all devices.

use async_trait::async_trait;
use strake_fabric::{Buf, BufMut};
use strake_proto::{Code, Error, Result};

use super::meter::Meter;

/// Unit of offsets and lengths, and the smallest unit that a power loss may tear.
pub const BLOCK: u64 = 4096;

/// A device of [`Device::capacity`] bytes. Operations run concurrently and in no order.
///
/// Dropping a future abandons its answer, not the operation, which may still change the device for
/// a while. A [`Device::flush`] called afterwards returns only when every operation begun before
/// it, abandoned ones included, has ended.
#[async_trait]
pub trait Device: Send + Sync + 'static {
    /// Bytes, a multiple of [`BLOCK`].
    fn capacity(&self) -> u64;
    /// Whether reads and writes bypass the kernel's page cache.
    fn direct(&self) -> bool;
    /// For messages.
    fn name(&self) -> String;
    /// Bytes that can be written where nothing was written before. Less than the capacity for a
    /// sparse file in a file system with little free space, which others may use up at any time.
    fn spare(&self) -> u64 {
        u64::MAX
    }
    /// How long its operations take.
    fn meter(&self) -> &Meter;
    /// Whether it is a rotating disk, as far as is known. Rotating disks are compared only with
    /// each other.
    fn rotates(&self) -> bool {
        false
    }
    /// Bytes that had to be copied once more, because the device cannot reach the memory they lie
    /// in.
    fn copied(&self) -> u64 {
        0
    }
    /// Fills `buf` from `offset`; both multiples of [`BLOCK`].
    async fn read(&self, offset: u64, buf: BufMut) -> Result<BufMut>;
    /// Writes `bufs` one after the other from `offset`. The offset and the total length are
    /// multiples of [`BLOCK`]. Visible to reads when it returns, durable after the next
    /// [`Device::flush`].
    async fn write(&self, offset: u64, bufs: Vec<Buf>) -> Result<()>;
    /// Makes every write that returned before this call durable.
    async fn flush(&self) -> Result<()>;
    /// Declares that the bytes are no longer needed. They read as anything afterwards. Best effort.
    async fn discard(&self, offset: u64, len: u64) -> Result<()>;
}

/// Refuses ranges that no caller may ask for: unaligned, empty or beyond the end.
pub(crate) fn check_range(device: &str, capacity: u64, offset: u64, len: u64) -> Result<()> {
    if !offset.is_multiple_of(BLOCK) || !len.is_multiple_of(BLOCK) || len == 0 {
        return Err(Error::new(
            Code::Inval,
            format!("{device}: {len} bytes at {offset} are not whole 4 KiB blocks"),
        ));
    }
    if offset.checked_add(len).is_none_or(|end| end > capacity) {
        return Err(Error::new(
            Code::Inval,
            format!("{device}: {len} bytes at {offset} reach beyond {capacity}"),
        ));
    }
    Ok(())
}
