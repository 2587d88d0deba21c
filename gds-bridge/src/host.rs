//! Host memory in place of a device's, for machines without one (`memory=host`).

use std::{any::Any, collections::BTreeMap, path::Path, ptr, sync::Arc};

use parking_lot::Mutex;
use rustix::mm::{mlock, munlock};
use strake_fabric::Foreign;

use crate::{
    Tier, Unavailable,
    fault::Fault,
    local::{CuFile, HostCuFile},
    mem::{Before, GpuMem, Mark, Stream},
    pins::Registry,
};

/// First address; nothing of the process can lie there (not canonical on x86-64, beyond user space
/// on AArch64).
const BASE: u64 = 0x00d0_0000_0000_0000;
const ALIGN: u64 = 2 << 20;
/// Why it cannot do what only a GPU can.
const NO_GPU: &str = "there is no GPU, only host memory in its place";

/// Memory of this process that is treated as a device's. What it allocates has addresses that are
/// invalid in the process, as a device's may be; memory that is lent to it has its own. Streams
/// copy at once. Clones are the same device.
#[derive(Clone, Default)]
pub struct HostMem(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    blocks: BTreeMap<u64, Arc<Block>>,
    /// Start and end of freed allocations. Addresses are never reused.
    freed: Vec<(u64, u64)>,
    lent: Vec<Lent>,
    allocated: u64,
    /// Bytes of pinned memory, by its start.
    pinned: BTreeMap<usize, usize>,
    registry: Arc<Registry>,
}

/// An allocation. A borrower of a part of it keeps it in place when it is freed.
struct Block {
    start: *mut u8,
    len: usize,
}

// SAFETY: memory of its own, which is only reached through addresses; those who do keep to the
// promises of `GpuMem`.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    fn new(len: u64) -> Block {
        let memory = vec![0xee_u8; len as usize].into_boxed_slice();
        Block { len: memory.len(), start: Box::into_raw(memory).cast() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: made in `new` of a box of so many bytes, and nobody has it any more.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.start, self.len)) });
    }
}

/// Memory of the process that is treated as the device's.
struct Lent {
    start: *mut u8,
    len: usize,
}

// SAFETY: only an address; what makes it valid is the promise of its lender, which is not bound to
// a thread.
unsafe impl Send for Lent {}

impl HostMem {
    /// A device without memory yet.
    pub fn new() -> HostMem {
        HostMem::default()
    }

    /// Treats memory of the process as the device's, at its own address, until
    /// [`HostMem::take_back`] is called with the same range.
    ///
    /// # Safety
    /// Until then the memory stays mapped, and nothing else writes it while a call moves it (nor
    /// reads it while a call loads into it).
    pub unsafe fn lend(&self, start: *mut u8, len: usize) {
        self.0.lock().lent.push(Lent { start, len });
    }

    /// Undoes one [`HostMem::lend`]. No call may use the memory any more.
    pub fn take_back(&self, start: *mut u8, len: usize) {
        let lent = &mut self.0.lock().lent;
        if let Some(at) = lent.iter().position(|l| l.start == start && l.len == len) {
            lent.swap_remove(at);
        }
    }
}

impl State {
    /// The allocation, and the offset in it.
    fn find(&self, addr: u64, len: u64) -> Result<(u64, usize), Fault> {
        if let Some((start, bytes)) = self.blocks.range(..=addr).next_back() {
            let end = start + bytes.len as u64;
            if addr < end {
                let beyond = Fault::Beyond { addr, len, end };
                return if len <= end - addr {
                    Ok((*start, (addr - start) as usize))
                } else {
                    Err(beyond)
                };
            }
        }
        let freed = self.freed.iter().any(|(start, end)| (*start..*end).contains(&addr));
        Err(if freed { Fault::Freed { addr } } else { Fault::Foreign { addr } })
    }

    /// The address of a range in this process, and what keeps it valid: nothing but the promise of
    /// its lender for memory that was lent.
    fn place(&self, addr: u64, len: u64) -> Result<(*mut u8, Arc<dyn Any + Send + Sync>), Fault> {
        if let Some(lent) = self.is_lent(addr, len) {
            return Ok((lent, Arc::new(())));
        }
        let (block, at) = self.find(addr, len)?;
        let block = &self.blocks[&block];
        Ok((block.start.wrapping_add(at), block.clone()))
    }

    fn is_lent(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let within = |l: &&Lent| {
            let at = addr.checked_sub(l.start.addr() as u64);
            at.is_some_and(|at| at < l.len as u64 && len <= l.len as u64 - at)
        };
        let l = self.lent.iter().find(within)?;
        Some(l.start.wrapping_add(addr as usize - l.start.addr()))
    }
}

/// Nothing to wait for: there are no streams but those that copy at once.
struct Nothing;

impl Before for Nothing {
    fn wait(self: Box<Self>) -> Result<(), Fault> {
        Ok(())
    }
}

impl GpuMem for HostMem {
    fn name(&self) -> String {
        "host memory in place of a device".into()
    }

    fn refuses(&self, _tier: Tier) -> Option<Unavailable> {
        None
    }

    fn check(&self, addr: u64, len: u64) -> Result<(), Fault> {
        self.0.lock().place(addr, len).map(|_| ())
    }

    fn settle(&self) -> Result<(), Fault> {
        Ok(())
    }

    unsafe fn before(&self, _stream: u64) -> Result<Box<dyn Before>, Fault> {
        Ok(Box::new(Nothing))
    }

    fn alloc(&self, len: u64) -> Result<u64, Fault> {
        let mut s = self.0.lock();
        // A gap after each allocation, so that the next is never a continuation of it.
        let addr = BASE + s.allocated;
        s.allocated += len.next_multiple_of(ALIGN) + ALIGN;
        s.blocks.insert(addr, Arc::new(Block::new(len)));
        Ok(addr)
    }

    fn free(&self, addr: u64) -> Result<(), Fault> {
        let mut s = self.0.lock();
        match s.find(addr, 0)? {
            (_, 1..) => Err(Fault::Foreign { addr }),
            (block, 0) => {
                let gone = s.blocks.remove(&block).ok_or(Fault::Foreign { addr })?;
                s.freed.push((block, block + gone.len as u64));
                Ok(())
            }
        }
    }

    fn registry(&self) -> Arc<Registry> {
        self.0.lock().registry.clone()
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn pci(&self) -> Result<String, String> {
        Err(NO_GPU.into())
    }

    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), Fault> {
        let mut s = self.0.lock();
        let refused = |why: String| Fault::Pin { bytes: len as u64, why };
        let at = start.expose_provenance();
        if s.pinned.range(..at + len).next_back().is_some_and(|(other, n)| other + n > at) {
            return Err(refused("a part of this memory is pinned already".into()));
        }
        // SAFETY: the caller says that these pages are mapped; locking them changes none of their
        // bytes.
        unsafe { mlock(start.cast(), len) }.map_err(|e| refused(format!("mlock: {e}")))?;
        s.pinned.insert(at, len);
        Ok(())
    }

    fn unpin(&self, start: *mut u8) {
        if let Some(len) = self.0.lock().pinned.remove(&start.addr()) {
            // SAFETY: locked in `pin`, and mapped until that is undone, as its caller promised.
            let _ = unsafe { munlock(start.cast(), len) };
        }
    }

    fn sums(&self) -> Result<(), String> {
        Err(NO_GPU.into())
    }

    fn export(&self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        let (start, keep) = self.0.lock().place(addr, len)?;
        // SAFETY: a block is in place as long as it is held; what was lent to this device, as long
        // as a call moves it, by the promise of its lender.
        Ok(unsafe { Foreign::host(start, len, keep) })
    }

    fn arrived(&self) -> Result<(), Fault> {
        Ok(())
    }

    fn cufile(&self, _prober: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Ok(Arc::new(HostCuFile::new(self.clone())))
    }

    fn stream(&self) -> Result<Box<dyn Stream>, Fault> {
        Ok(Box::new(HostStream(self.clone())))
    }
}

/// A stream that copies at once.
struct HostStream(HostMem);

impl Stream for HostStream {
    unsafe fn load(&mut self, to: u64, from: *const u8, len: usize) -> Result<(), Fault> {
        let (to, _keep) = self.0.0.lock().place(to, len as u64)?;
        // SAFETY: the caller's end is valid, by its promise; the device's is held. They may be the
        // same memory only if a buffer of the bridge's own was lent: hence `copy_from`.
        unsafe { to.copy_from(from, len) };
        Ok(())
    }

    unsafe fn save(&mut self, to: *mut u8, from: u64, len: usize) -> Result<(), Fault> {
        let (from, _keep) = self.0.0.lock().place(from, len as u64)?;
        // SAFETY: as in `load`.
        unsafe { to.copy_from(from, len) };
        Ok(())
    }

    fn sum(&mut self, _from: u64, _len: usize) -> Result<u64, Fault> {
        Err(Fault::Sums { why: NO_GPU.into() })
    }

    fn summed(&mut self, _number: u64) -> Option<u32> {
        None
    }

    fn summed_blocks(&mut self, _number: u64) -> Option<Vec<u32>> {
        None
    }

    fn mark(&mut self) -> Result<Mark, Fault> {
        Ok(Mark(0))
    }

    fn wait(&mut self, _mark: Mark) -> Result<(), Fault> {
        Ok(())
    }

    fn drain(&mut self) {}
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
