//! What every device can do.

use async_trait::async_trait;
use strake_fabric::{Buf, BufMut};
use strake_proto::{Code, Error, Result};

use super::meter::Meter;

/// Unit of offsets and lengths, and of what a power loss may tear at best.
pub const BLOCK: u64 = 4096;

/// A device of [`Device::capacity`] bytes. Operations run concurrently and in no order.
///
/// Dropping a future abandons its answer, not the operation, which may still change the device for
/// a while: a [`Device::flush`] called afterwards returns only when every operation begun before
/// it, abandoned ones included, has ended.
#[async_trait]
pub trait Device: Send + Sync + 'static {
    /// Bytes, a multiple of [`BLOCK`].
    fn capacity(&self) -> u64;
    /// Whether reads and writes bypass the kernel's page cache.
    fn direct(&self) -> bool;
    /// For messages to people.
    fn name(&self) -> String;
    /// Bytes that can be written where nothing was written before. Less than the capacity for a
    /// sparse file in a file system that has little space left; others may take of it at any time.
    fn spare(&self) -> u64 {
        u64::MAX
    }
    /// How long its operations take.
    fn meter(&self) -> &Meter;
    /// Whether it is a disk that turns, as far as is known: those are compared with each other
    /// only.
    fn rotates(&self) -> bool {
        false
    }
    /// Bytes that had to be copied once more on their way, since the device does not reach the
    /// memory they lie in.
    fn copied(&self) -> u64 {
        0
    }
    /// Fills `buf` from `offset`; both multiples of [`BLOCK`].
    async fn read(&self, offset: u64, buf: BufMut) -> Result<BufMut>;
    /// Writes `bufs` one after the other from `offset`, which is a multiple of [`BLOCK`] like their
    /// total. Visible to reads when it returns, durable after the next [`Device::flush`].
    async fn write(&self, offset: u64, bufs: Vec<Buf>) -> Result<()>;
    /// Makes every write that returned before this call durable.
    async fn flush(&self) -> Result<()>;
    /// Tells that the bytes are no longer needed; they read as anything afterwards. Best effort.
    async fn discard(&self, offset: u64, len: u64) -> Result<()>;
}

/// Refuses what no caller of a device may ask: unaligned or beyond the end.
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
