//! GPU memory as the bridge sees it.

use std::{path::Path, sync::Arc};

use strake_fabric::Foreign;

use crate::{Tier, Unavailable, fault::Fault, local::CuFile, pins::Registry};

/// A position in a stream: everything that it was given before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(pub u64);

/// Work that a program had given to one of its streams at some moment.
pub trait Before: Send {
    /// Returns when it is done. An error may be of the work that was waited for.
    fn wait(self: Box<Self>) -> Result<(), Fault>;
}

/// Memory of one device in one context.
pub trait GpuMem: Send + Sync + 'static {
    /// For messages to people.
    fn name(&self) -> String;

    /// Why it cannot be used for a tier. `None`: it has no objection.
    fn refuses(&self, tier: Tier) -> Option<Unavailable>;

    /// Whether `len` bytes from `addr` lie in one live allocation of this context.
    fn check(&self, addr: u64, len: u64) -> Result<(), Fault>;

    /// Returns when everything is done that the program had given to the device before, on any
    /// stream: work that another library queued may still write or read the memory that a call is
    /// about to move.
    fn settle(&self) -> Result<(), Fault>;

    /// Records what the program has given to one of its streams by now (0: the default stream), so
    /// that any thread can wait for it.
    ///
    /// # Safety
    /// The stream is one of this context, and is not destroyed before this returned.
    unsafe fn before(&self, stream: u64) -> Result<Box<dyn Before>, Fault>;

    /// Memory of the device, at least 256-byte aligned, with unspecified contents.
    fn alloc(&self, len: u64) -> Result<u64, Fault>;

    /// Gives back what [`GpuMem::alloc`] returned.
    fn free(&self, addr: u64) -> Result<(), Fault>;

    /// What is pinned for this device and for all others of its driver in this process. Code that
    /// pins memory must enter it there.
    fn registry(&self) -> Arc<Registry>;

    /// Whether the context was destroyed, and with it everything that was pinned by it.
    fn is_gone(&self) -> bool;

    /// Its PCI address as sysfs writes it (`0000:3b:00.0`); otherwise a sentence that says why it
    /// is unknown.
    fn pci(&self) -> Result<String, String>;

    /// Pins host memory and registers it with the device, and with all others of its driver, which
    /// then copy from and to it directly. Memory that is partly pinned already is refused.
    ///
    /// # Safety
    /// The memory, whole pages, stays mapped until [`GpuMem::unpin`] returned.
    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), Fault>;

    /// Undoes a [`GpuMem::pin`] that succeeded, with the same `start`. No stream may use the memory
    /// any more.
    fn unpin(&self, start: *mut u8);

    /// Whether the device itself computes checksums of its memory ([`Stream::sum`]); otherwise a
    /// sentence that says why not. May take a while the first time.
    fn sums(&self) -> Result<(), String>;

    /// Exports `len` bytes from `addr` so that storage servers can read and write them directly.
    /// Exported memory stays in place as long as the result is held, also when it is freed in the
    /// meantime. [`Fault::Export`]: the device does not support that, or not for this memory.
    fn export(&self, addr: u64, len: u64) -> Result<Foreign, Fault>;

    /// Returns when everything that others wrote to exported memory before is visible to all later
    /// work of the device.
    fn arrived(&self) -> Result<(), Fault>;

    /// cuFile for this device, with its driver open. It is known to hang, so `prober` (`strake`, by
    /// its path or name) opens it in another process first.
    fn cufile(&self, _prober: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Err(Unavailable::CuFile { why: "there is none for this device".into() })
    }

    /// A new queue of copies, for the calling thread.
    fn stream(&self) -> Result<Box<dyn Stream>, Fault>;
}

/// Ordered copies, independent of the program's streams. Must be used by the thread that made it.
/// Dropping it waits for its copies.
pub trait Stream {
    /// Copies from host memory, pinned or not, to the device.
    ///
    /// # Safety
    /// `from` is valid for reading `len` bytes, and does not change, until a later mark was waited
    /// for or the stream drained.
    unsafe fn load(&mut self, to: u64, from: *const u8, len: usize) -> Result<(), Fault>;

    /// Copies from the device to host memory, pinned or not.
    ///
    /// # Safety
    /// `to` is valid for writing `len` bytes, and nothing else uses them, until a later mark was
    /// waited for or the stream drained.
    unsafe fn save(&mut self, to: *mut u8, from: u64, len: usize) -> Result<(), Fault>;

    /// Has the device compute the CRC32C of its memory after the copies so far. The returned number
    /// identifies the result for [`Stream::summed`]. Only where [`GpuMem::sums`] succeeds.
    fn sum(&mut self, from: u64, len: usize) -> Result<u64, Fault>;

    /// The result of a checksum, returned once. A mark after it must have been waited for. `None`:
    /// it failed, as the wait has reported. Forgets all earlier checksums.
    fn summed(&mut self, number: u64) -> Option<u32>;

    /// As [`Stream::summed`], for each 4 KiB; the last piece may be shorter.
    fn summed_blocks(&mut self, number: u64) -> Option<Vec<u32>>;

    /// Marks the current end of the queue.
    fn mark(&mut self) -> Result<Mark, Fault>;

    /// Returns when everything before the mark is done. An error is of one of the copies before it,
    /// and is reported once.
    fn wait(&mut self, mark: Mark) -> Result<(), Fault>;

    /// Returns when the stream no longer uses any host memory. The results of the copies are
    /// reported by [`Stream::wait`].
    fn drain(&mut self);
}
