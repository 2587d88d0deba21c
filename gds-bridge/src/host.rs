//! Host memory that behaves like a device's, for machines without one.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    path::Path,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use strake_fabric::{Foreign, REGION};
use strake_proto::checksum::{BLOCK, block_sums, combine};

use crate::{
    Tier, Unavailable,
    local::{CuFile, HostCuFile, Tricks},
    mem::{Before, Fault, GpuMem, Mark, Stream},
    pins::Registry,
};

/// First address; nothing of the process can lie there (not canonical on x86-64, beyond user space
/// on AArch64).
const BASE: u64 = 0x00d0_0000_0000_0000;
const ALIGN: u64 = 2 << 20;

/// A stand-in for a device. Its addresses are invalid in the process, its streams copy as late as
/// possible, and it fails where and how a test requests. Clones are the same device.
#[derive(Clone, Default)]
pub struct HostMem(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    blocks: BTreeMap<u64, Arc<Block>>,
    /// Start and end of freed allocations. Addresses are never reused.
    freed: Vec<(u64, u64)>,
    lent: Vec<Lent>,
    allocated: u64,
    driver: Arc<Driver>,
    pci: Option<String>,
    room: Option<u64>,
    refused: HashMap<Tier, Unavailable>,
    context_gone: bool,
    /// Its number among the devices of its driver.
    number: u64,
    gone_after: Option<u64>,
    failing: Option<Failing>,
    corrupt_after: Option<u64>,
    copied: Copied,
    copies: u64,
    pace: Duration,
    sums: bool,
    no_exports: Option<String>,
    cufile: Arc<Tricks>,
    busy: Arc<Busy>,
    gate: Arc<Gate>,
    /// Memory exported while writes of others are seen late; `None`: they are seen at once.
    late: Option<Vec<Late>>,
}

/// Memory that others write instead of the device's, until the device is told to look.
struct Late {
    outside: Arc<Block>,
    /// The bytes that the device has seen.
    seen: Vec<u8>,
    addr: u64,
}

/// How many copies may still be made, and how many were ordered and not made yet.
#[derive(Default)]
struct Gate(Mutex<(Option<u64>, u64)>, Condvar);

impl Gate {
    fn ordered(&self) {
        self.0.lock().1 += 1;
        self.1.notify_all();
    }

    /// Waits until a copy may be made.
    fn pass(&self) {
        let mut s = self.0.lock();
        self.1.wait_while(&mut s, |s| s.0 == Some(0));
        *s = (s.0.map(|n| n - 1), s.1 - 1);
    }
}

/// Streams of the program that have work to do.
#[derive(Default)]
struct Busy(Mutex<BTreeSet<u64>>, Condvar);

struct Work {
    busy: Arc<Busy>,
    stream: u64,
}

impl Before for Work {
    fn wait(self: Box<Self>) -> Result<(), Fault> {
        let Busy(streams, changed) = &*self.busy;
        let mut busy = streams.lock();
        while busy.contains(&self.stream) {
            changed.wait(&mut busy);
        }
        Ok(())
    }
}

/// State that the devices of one driver share.
#[derive(Default)]
struct Driver {
    registry: Arc<Registry>,
    pins: Mutex<Pins>,
    /// Number of devices created so far.
    devices: AtomicU64,
}

/// Pinned host memory. If both are locked, this is locked after a device's own state.
#[derive(Default)]
struct Pins {
    /// By its start: its length, and the device that pinned it.
    all: BTreeMap<usize, (usize, u64)>,
    limit: Option<u64>,
    told: Pinned,
}

impl Pins {
    fn bytes(&self) -> u64 {
        self.all.values().map(|(n, _)| *n as u64).sum()
    }

    fn remove(&mut self, start: usize) -> bool {
        let Some((len, _)) = self.all.remove(&start) else { return false };
        if self.limit.is_none() {
            // SAFETY: locked in `pin`, and mapped until that is undone, as its caller promised.
            let _ = unsafe { rustix::mm::munlock(ptr::with_exposed_provenance_mut(start), len) };
        }
        true
    }
}

/// Counts of pinned host memory, kept by a [`HostMem`] for all devices of its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// Successful pins.
    pub made: u64,
    /// Attempts to pin memory that was partly pinned already: refused, as a driver does.
    pub twice: u64,
    /// Attempts to unpin memory that was not pinned.
    pub stray: u64,
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

/// Copies that are to fail.
struct Failing {
    from: u64,
    fault: Fault,
    pinned_only: bool,
}

/// Bytes that a [`HostMem`] copied, by the kind of host memory that it saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// From pinned host memory to the device.
    pub load_pinned: u64,
    /// From other host memory.
    pub load_pageable: u64,
    /// From the device to pinned host memory.
    pub save_pinned: u64,
    /// To other host memory.
    pub save_pageable: u64,
}

impl HostMem {
    /// A device without failures that really locks what it pins (mlock(2)), as far as the process
    /// may.
    pub fn new() -> HostMem {
        HostMem::default()
    }

    /// Another device of the same driver: what one of them pins is pinned for both.
    pub fn beside(&self) -> HostMem {
        let driver = self.0.lock().driver.clone();
        let number = 1 + driver.devices.fetch_add(1, Relaxed);
        HostMem(Arc::new(Mutex::new(State { driver, number, ..State::default() })))
    }

    /// Limits pinned bytes, without locking them. To be called before anything is pinned.
    pub fn limit_pins(&self, bytes: u64) {
        self.0.lock().driver.pins.lock().limit = Some(bytes);
    }

    /// Sets the PCI address of the device.
    pub fn play_pci(&self, address: &str) {
        self.0.lock().pci = Some(address.into());
    }

    /// Limits the device's memory.
    pub fn limit_room(&self, bytes: u64) {
        self.0.lock().room = Some(bytes);
    }

    /// Refuses to serve a tier from now on; `None`: no longer.
    pub fn refuse(&self, tier: Tier, why: Option<Unavailable>) {
        let refused = &mut self.0.lock().refused;
        match why {
            Some(why) => refused.insert(tier, why),
            None => refused.remove(&tier),
        };
    }

    /// Destroys the context before the copy that follows the next `copies` ones.
    pub fn destroy_after(&self, copies: u64) {
        let mut s = self.0.lock();
        s.gone_after = Some(s.copies + copies);
    }

    /// Destroys the context now.
    pub fn destroy(&self) {
        self.0.lock().destroy();
    }

    /// The copy after the next `copies` ones fails, and all later ones, until [`HostMem::mend`].
    pub fn fail_after(&self, copies: u64, fault: Fault) {
        let mut s = self.0.lock();
        s.failing = Some(Failing { from: s.copies + copies, fault, pinned_only: false });
    }

    /// As [`HostMem::fail_after`], but copies from and to memory that is not pinned still work.
    pub fn fail_pinned_after(&self, copies: u64, fault: Fault) {
        let mut s = self.0.lock();
        s.failing = Some(Failing { from: s.copies + copies, fault, pinned_only: true });
    }

    /// No copy fails any more.
    pub fn mend(&self) {
        self.0.lock().failing = None;
    }

    /// The copy after the next `copies` ones changes one bit.
    pub fn corrupt_after(&self, copies: u64) {
        let mut s = self.0.lock();
        s.corrupt_after = Some(s.copies + copies);
    }

    /// Each copy takes at least this long from now on.
    pub fn slow_down(&self, copy: Duration) {
        self.0.lock().pace = copy;
    }

    /// Allows only this many more copies, until this is called again; `None`: all.
    pub fn allow_copies(&self, copies: Option<u64>) {
        let gate = self.0.lock().gate.clone();
        gate.0.lock().0 = copies;
        gate.1.notify_all();
    }

    /// Copies and checksums that streams were given and that are not made yet.
    pub fn under_way(&self) -> u64 {
        let gate = self.0.lock().gate.clone();
        gate.0.lock().1
    }

    /// From now on, writes of others into exported memory are seen only when the device is told to
    /// look ([`GpuMem::arrived`]). Others must not write while it looks: for tests on one thread.
    pub fn see_late(&self) {
        self.0.lock().late.get_or_insert_default();
    }

    /// From now on the device computes checksums of its memory. This machine does the work: for
    /// tests.
    pub fn play_sums(&self) {
        self.0.lock().sums = true;
    }

    /// Marks a stream of the program as busy or done.
    pub fn occupy(&self, stream: u64, busy: bool) {
        let all = self.0.lock().busy.clone();
        let mut streams = all.0.lock();
        if busy {
            streams.insert(stream)
        } else {
            streams.remove(&stream)
        };
        all.1.notify_all();
    }

    /// Refuses from now on to lend memory to storage servers, for this reason; `None`: no longer.
    pub fn refuse_exports(&self, why: Option<String>) {
        self.0.lock().no_exports = why;
    }

    /// Controls of its stand-in for cuFile.
    pub fn tricks(&self) -> Arc<Tricks> {
        self.0.lock().cufile.clone()
    }

    /// Bytes copied so far.
    pub fn copied(&self) -> Copied {
        self.0.lock().copied
    }

    /// Bytes of host memory that are pinned now.
    pub fn pinned(&self) -> u64 {
        self.0.lock().driver.pins.lock().bytes()
    }

    /// Counts of pins so far.
    pub fn pins(&self) -> Pinned {
        self.0.lock().driver.pins.lock().told
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

    /// Reads the device's memory.
    pub fn peek(&self, addr: u64, len: u64) -> Result<Vec<u8>, Fault> {
        let mut s = self.0.lock();
        let from = s.place(addr, len)?;
        let mut bytes = vec![0; len as usize];
        // SAFETY: `place` says that so many bytes are there, and the lock keeps them.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len()) };
        Ok(bytes)
    }

    /// Holds memory of the device for a borrower: see [`HostMem::fill`].
    pub(crate) fn hold(&self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        self.0.lock().hold(addr, len)
    }

    /// Writes bytes into memory that [`HostMem::hold`] holds, whether it was freed in the meantime
    /// or not.
    pub(crate) fn fill(&self, memory: &Foreign, bytes: &[u8]) -> Result<(), Fault> {
        let s = self.0.lock();
        if s.context_gone {
            return Err(Fault::ContextGone);
        }
        let to: *mut u8 = ptr::with_exposed_provenance_mut(memory.addr() as usize);
        let n = bytes.len().min(memory.len() as usize);
        // SAFETY: what is held is there, and the lock keeps others from it.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), n) };
        Ok(())
    }

    /// Writes the device's memory.
    pub fn poke(&self, addr: u64, bytes: &[u8]) -> Result<(), Fault> {
        let mut s = self.0.lock();
        let to = s.place(addr, bytes.len() as u64)?;
        // SAFETY: as in `peek`.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

impl State {
    fn has_room(&self, bytes: u64) -> bool {
        let used: u64 = self.blocks.values().map(|b| b.len as u64).sum();
        self.room.is_none_or(|room| bytes <= room.saturating_sub(used))
    }

    /// The allocation, and the offset in it.
    fn find(&self, addr: u64, len: u64) -> Result<(u64, usize), Fault> {
        if self.context_gone {
            return Err(Fault::ContextGone);
        }
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

    /// The address of a range in this process, valid for reading and writing `len` bytes while the
    /// lock is held.
    fn place(&mut self, addr: u64, len: u64) -> Result<*mut u8, Fault> {
        if let Some(lent) = self.is_lent(addr, len).filter(|_| !self.context_gone) {
            return Ok(lent);
        }
        let (block, at) = self.find(addr, len)?;
        Ok(self.blocks[&block].start.wrapping_add(at))
    }

    /// Memory from there, which stays in place as long as the result is held, also when it is freed
    /// in the meantime.
    fn hold(&mut self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        let start = self.place(addr, len)?;
        let keep: Arc<dyn Any + Send + Sync> = match self.is_lent(addr, len) {
            Some(_) => Arc::new(()),
            None => self.blocks[&self.find(addr, len)?.0].clone(),
        };
        // SAFETY: a block is in place as long as it is held; what was lent to this device, as long
        // as a call moves it, by the promise of its lender.
        Ok(unsafe { Foreign::host(start, len, keep) })
    }

    /// As [`State::hold`], but of other memory with the same bytes.
    fn hold_late(&mut self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        let from = self.place(addr, len)?;
        let (outside, mut seen) = (Arc::new(Block::new(len)), vec![0; len as usize]);
        // SAFETY: `place` says that so many bytes are there, and the other ends have as many.
        unsafe {
            seen.as_mut_ptr().copy_from_nonoverlapping(from, seen.len());
            outside.start.copy_from_nonoverlapping(from, seen.len());
        }
        let (start, keep) = (outside.start, outside.clone());
        self.late.get_or_insert_default().push(Late { outside, seen, addr });
        // SAFETY: a block is in place as long as it is held.
        Ok(unsafe { Foreign::host(start, len, keep) })
    }

    /// Copies what was written late.
    fn look(&mut self) {
        let mut all = self.late.take();
        for l in all.iter_mut().flatten() {
            // Freed in the meantime: not copied.
            let Ok(to) = self.place(l.addr, l.seen.len() as u64) else { continue };
            for (i, seen) in l.seen.iter_mut().enumerate() {
                // SAFETY: within both, as `place` and the block say, and nobody writes them now.
                let now = unsafe { *l.outside.start.add(i) };
                // Bytes that nothing wrote stay as the device has them.
                if now != *seen {
                    *seen = now;
                    // SAFETY: as above.
                    unsafe { *to.add(i) = now };
                }
            }
        }
        // Memory that cannot be written any more was copied for the last time.
        all.iter_mut().for_each(|all| all.retain(|l| Arc::strong_count(&l.outside) > 1));
        self.late = all;
    }

    fn is_lent(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let within = |l: &&Lent| {
            let at = addr.checked_sub(l.start.addr() as u64);
            at.is_some_and(|at| at < l.len as u64 && len <= l.len as u64 - at)
        };
        let l = self.lent.iter().find(within)?;
        Some(l.start.wrapping_add(addr as usize - l.start.addr()))
    }

    fn is_pinned(&self, host: usize, len: usize) -> bool {
        let pins = self.driver.pins.lock();
        let before = pins.all.range(..=host).next_back();
        before.is_some_and(|(start, (n, _))| host + len <= start + n)
    }

    /// What this device pinned goes with its context.
    fn destroy(&mut self) {
        self.context_gone = true;
        let mut pins = self.driver.pins.lock();
        let mine: Vec<usize> =
            pins.all.iter().filter(|(_, (_, by))| *by == self.number).map(|(at, _)| *at).collect();
        for at in mine {
            pins.remove(at);
        }
    }

    /// Makes one copy of a stream.
    fn copy(&mut self, c: &Pending) -> Result<(), Fault> {
        let n = self.copies;
        self.copies += 1;
        if self.gone_after.is_some_and(|at| n >= at) {
            self.destroy();
        }
        let pinned = self.is_pinned(c.host.addr(), c.len);
        if let Some(f) = self.failing.as_ref().filter(|f| n >= f.from && (pinned || !f.pinned_only))
        {
            return Err(f.fault.clone());
        }
        let device = self.place(c.device, c.len as u64)?;
        let corrupt = self.corrupt_after.take_if(|at| n >= *at).is_some();
        let (from, to) = if c.to_device { (c.host, device) } else { (device, c.host) };
        // SAFETY: the host's end is valid until this copy was waited for, as the caller of `load`
        // or `save` promised; the device's is as `place` says. They may be the same memory only if
        // a buffer of the bridge's own was lent: hence `copy_from`.
        unsafe {
            to.copy_from(from, c.len);
            *to.add(c.len / 2) ^= u8::from(corrupt);
        }
        let counter = match (c.to_device, pinned) {
            (true, true) => &mut self.copied.load_pinned,
            (true, false) => &mut self.copied.load_pageable,
            (false, true) => &mut self.copied.save_pinned,
            (false, false) => &mut self.copied.save_pageable,
        };
        *counter += c.len as u64;
        Ok(())
    }
}

impl GpuMem for HostMem {
    fn name(&self) -> String {
        "host memory in place of a device".into()
    }

    fn refuses(&self, tier: Tier) -> Option<Unavailable> {
        let s = self.0.lock();
        if s.context_gone {
            return Some(Unavailable::Device(Fault::ContextGone));
        }
        s.refused.get(&tier).cloned()
    }

    fn check(&self, addr: u64, len: u64) -> Result<(), Fault> {
        self.0.lock().place(addr, len).map(|_| ())
    }

    fn settle(&self) -> Result<(), Fault> {
        // Only the bridge's own copies run on it.
        if self.0.lock().context_gone { Err(Fault::ContextGone) } else { Ok(()) }
    }

    unsafe fn before(&self, stream: u64) -> Result<Box<dyn Before>, Fault> {
        self.settle()?;
        Ok(Box::new(Work { busy: self.0.lock().busy.clone(), stream }))
    }

    fn alloc(&self, len: u64) -> Result<u64, Fault> {
        let mut s = self.0.lock();
        if s.context_gone {
            return Err(Fault::ContextGone);
        }
        if !s.has_room(len) {
            return Err(Fault::NoMemory { bytes: len });
        }
        // A gap after each allocation, so that the next is never a continuation of it.
        let addr = BASE + s.allocated;
        s.allocated += len.next_multiple_of(ALIGN) + ALIGN;
        s.blocks.insert(addr, Arc::new(Block::new(len)));
        Ok(addr)
    }

    fn free(&self, addr: u64) -> Result<(), Fault> {
        let mut s = self.0.lock();
        let (block, at) = s.find(addr, 0)?;
        if at > 0 {
            return Err(Fault::Foreign { addr });
        }
        let gone = s.blocks.remove(&block).expect("just found");
        s.freed.push((block, block + gone.len as u64));
        Ok(())
    }

    fn registry(&self) -> Arc<Registry> {
        self.0.lock().driver.registry.clone()
    }

    fn is_gone(&self) -> bool {
        self.0.lock().context_gone
    }

    fn pci(&self) -> Result<String, String> {
        self.0
            .lock()
            .pci
            .clone()
            .ok_or_else(|| "there is no GPU, only host memory in its place".into())
    }

    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), Fault> {
        let s = self.0.lock();
        let mut pins = s.driver.pins.lock();
        let refused = |why: String| Fault::Pin { bytes: len as u64, why };
        if s.context_gone {
            return Err(Fault::ContextGone);
        }
        let at = start.expose_provenance();
        // As in CUDA: 712, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED.
        if pins.all.range(..at + len).next_back().is_some_and(|(other, (n, _))| other + n > at) {
            pins.told.twice += 1;
            return Err(refused("a part of them is pinned already".into()));
        }
        let already = pins.bytes();
        match pins.limit {
            Some(limit) if already + len as u64 > limit => {
                return Err(refused(format!("{already} of {limit} bytes are taken")));
            }
            Some(_) => {}
            // SAFETY: the caller says that these pages are mapped; locking them changes none of
            // their bytes.
            None => unsafe { rustix::mm::mlock(start.cast(), len) }
                .map_err(|e| refused(format!("mlock: {e}")))?,
        }
        pins.told.made += 1;
        pins.all.insert(at, (len, s.number));
        Ok(())
    }

    fn unpin(&self, start: *mut u8) {
        let s = self.0.lock();
        let mut pins = s.driver.pins.lock();
        // If the pinning device's context is gone, its pins went with it.
        if !pins.remove(start.addr()) && !s.context_gone {
            pins.told.stray += 1;
        }
    }

    fn sums(&self) -> Result<(), String> {
        if self.0.lock().sums {
            Ok(())
        } else {
            Err("there is no GPU, only host memory in its place".into())
        }
    }

    fn export(&self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        let mut s = self.0.lock();
        if let Some(why) = s.no_exports.clone() {
            return Err(Fault::Export { bytes: len, why });
        }
        if s.late.is_some() { s.hold_late(addr, len) } else { s.hold(addr, len) }
    }

    fn arrived(&self) -> Result<(), Fault> {
        let mut s = self.0.lock();
        if s.context_gone {
            return Err(Fault::ContextGone);
        }
        s.look();
        Ok(())
    }

    fn cufile(&self, _prober: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Ok(Arc::new(HostCuFile::new(self.clone())))
    }

    fn stream(&self) -> Result<Box<dyn Stream>, Fault> {
        if self.0.lock().context_gone {
            return Err(Fault::ContextGone);
        }
        let (copies, faults) = (VecDeque::new(), VecDeque::new());
        let told = BTreeMap::new();
        Ok(Box::new(HostStream { device: self.clone(), copies, faults, given: 0, done: 0, told }))
    }
}

/// A copy that was ordered and not made yet; without a host address, a checksum.
struct Pending {
    host: *mut u8,
    device: u64,
    len: usize,
    to_device: bool,
}

/// A stream whose copies are made only when a caller waits for them.
struct HostStream {
    device: HostMem,
    copies: VecDeque<Pending>,
    /// Errors of failed copies, by their numbers, until a caller has waited for them.
    faults: VecDeque<(u64, Fault)>,
    given: u64,
    done: u64,
    /// Checksums of blocks by the numbers of their orders, and the total bytes.
    told: BTreeMap<u64, (Vec<u32>, usize)>,
}

impl HostStream {
    /// The next error of a copy before this one.
    fn told_before(&mut self, n: u64) -> Option<(u64, Fault)> {
        if self.faults.front()?.0 < n { self.faults.pop_front() } else { None }
    }

    /// Makes the copies before this one.
    fn make(&mut self, before: u64) {
        while self.done < before {
            let Some(c) = self.copies.pop_front() else { break };
            let (pace, gate) = {
                let s = self.device.0.lock();
                (s.pace, s.gate.clone())
            };
            gate.pass();
            if !pace.is_zero() {
                thread::sleep(pace);
            }
            if c.host.is_null() {
                match self.device.peek(c.device, c.len as u64) {
                    Ok(bytes) => drop(
                        self.told.insert(self.done, (block_sums(0, [&bytes[..]]), bytes.len())),
                    ),
                    Err(e) => self.faults.push_back((self.done, e)),
                }
            } else if let Err(e) = self.device.0.lock().copy(&c) {
                self.faults.push_back((self.done, e));
            }
            self.done += 1;
        }
    }

    fn push(&mut self, c: Pending) -> Result<(), Fault> {
        let s = self.device.0.lock();
        if s.context_gone {
            return Err(Fault::ContextGone);
        }
        if c.len > 0 {
            s.gate.ordered();
            drop(s);
            self.copies.push_back(c);
            self.given += 1;
        }
        Ok(())
    }
}

impl Stream for HostStream {
    unsafe fn load(&mut self, to: u64, from: *const u8, len: usize) -> Result<(), Fault> {
        self.push(Pending { host: from.cast_mut(), device: to, len, to_device: true })
    }

    unsafe fn save(&mut self, to: *mut u8, from: u64, len: usize) -> Result<(), Fault> {
        self.push(Pending { host: to, device: from, len, to_device: false })
    }

    fn sum(&mut self, from: u64, len: usize) -> Result<u64, Fault> {
        // Like a device that stores its results there, for each 4 KiB.
        let bytes = 4 * (REGION / BLOCK) as u64;
        if !self.device.0.lock().has_room(bytes) {
            return Err(Fault::NoMemory { bytes });
        }
        let number = self.given;
        self.push(Pending { host: ptr::null_mut(), device: from, len, to_device: false })?;
        Ok(number)
    }

    fn summed(&mut self, number: u64) -> Option<u32> {
        let (blocks, all) = self.told.remove(&number)?;
        self.told.retain(|n, _| *n > number);
        let lens = (0..all).step_by(BLOCK).map(|at| BLOCK.min(all - at));
        Some(blocks.iter().zip(lens).fold(0, |sum, (word, len)| combine(sum, *word, len)))
    }

    fn summed_blocks(&mut self, number: u64) -> Option<Vec<u32>> {
        let told = self.told.remove(&number);
        self.told.retain(|n, _| *n > number);
        told.map(|(blocks, _)| blocks)
    }

    fn mark(&mut self) -> Result<Mark, Fault> {
        Ok(Mark(self.given))
    }

    fn wait(&mut self, mark: Mark) -> Result<(), Fault> {
        self.make(mark.0);
        let mut outcome = Ok(());
        while let Some((_, fault)) = self.told_before(mark.0) {
            outcome = outcome.and(Err(fault));
        }
        outcome
    }

    fn drain(&mut self) {
        self.make(self.given);
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        self.drain();
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
