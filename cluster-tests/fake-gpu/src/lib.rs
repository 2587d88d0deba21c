//! A device for tests: [`HostMem`] that fails where and how a test requests. Its streams copy as
//! late as possible, so that a buffer that is reused too early is seen; its own counters say what
//! was copied and pinned. [`FakeGpu::tricks`] has the controls of its cuFile.
//!
//! Tests of other crates use this crate. The unit tests of `strake-gds` compile these files in.

mod cufile;
mod stream;

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use cufile::FakeCuFile;
pub use cufile::{Trick, Tricks};
use parking_lot::{Condvar, Mutex};
use rustix::mm::{mlock, munlock};
use strake_fabric::Foreign;
use strake_gds::{
    Before, Fault, GpuMem, HostMem, Registry, Stream, Tier, Unavailable, local::CuFile,
};
use stream::{FakeStream, Pending};

/// The device. Clones are the same device.
#[derive(Clone, Default)]
pub struct FakeGpu {
    memory: HostMem,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Bytes of each allocation, by its address.
    sizes: HashMap<u64, u64>,
    driver: Arc<Driver>,
    pci: Option<String>,
    room: Option<u64>,
    refused: HashMap<Tier, Unavailable>,
    context_gone: bool,
    /// Its number among the devices of its driver.
    number: u64,
    orders: Orders,
    copied: Copied,
    /// Copies so far.
    copies: u64,
    sums: bool,
    no_exports: Option<String>,
    cufile: Arc<Tricks>,
    busy: Arc<Busy>,
    gate: Arc<Gate>,
    /// Memory exported while writes of others are seen late; `None`: they are seen at once.
    late: Option<Vec<Late>>,
}

/// What is to happen to copies. Numbers are of copies, counted from the first.
#[derive(Default)]
struct Orders {
    gone_after: Option<u64>,
    failing: Option<Failing>,
    corrupt_after: Option<u64>,
    pace: Duration,
}

/// Copies that are to fail.
struct Failing {
    from: u64,
    fault: Fault,
    pinned_only: bool,
}

/// Memory that others write instead of the device's, until the device is told to look.
struct Late {
    outside: Arc<Outside>,
    /// The bytes that the device has seen.
    seen: Vec<u8>,
    addr: u64,
}

/// Memory of its own.
struct Outside(*mut [u8]);

// SAFETY: only reached through addresses; those who do keep to the promises of `GpuMem`.
unsafe impl Send for Outside {}
// SAFETY: as above.
unsafe impl Sync for Outside {}

impl Outside {
    fn new(bytes: &[u8]) -> Outside {
        Outside(Box::into_raw(bytes.to_vec().into_boxed_slice()))
    }

    fn start(&self) -> *mut u8 {
        self.0.cast()
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        // SAFETY: made in `new` of a box, and nobody has it any more.
        drop(unsafe { Box::from_raw(self.0) });
    }
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

    /// Whether all of a range is pinned as one piece.
    fn holds(&self, host: usize, len: usize) -> bool {
        let before = self.all.range(..=host).next_back();
        before.is_some_and(|(start, (n, _))| host + len <= start + n)
    }

    /// Forgets a piece. With a limit it was never locked.
    fn remove(&mut self, start: usize) -> bool {
        let Some((len, _)) = self.all.remove(&start) else { return false };
        if self.limit.is_none() {
            // SAFETY: locked in `pin`, and mapped until that is undone, as its caller promised.
            let _ = unsafe { munlock(ptr::with_exposed_provenance_mut(start), len) };
        }
        true
    }
}

/// Counts of pinned host memory, kept for all devices of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// Successful pins.
    pub made: u64,
    /// Attempts to pin memory that was partly pinned already: refused, as a driver does.
    pub twice: u64,
    /// Attempts to unpin memory that was not pinned.
    pub stray: u64,
}

/// Bytes that a [`FakeGpu`] copied, by the kind of host memory that it saw.
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

impl FakeGpu {
    /// A device without failures that really locks what it pins (mlock(2)), as far as the process
    /// may.
    pub fn new() -> FakeGpu {
        FakeGpu::default()
    }

    /// Another device of the same driver: what one of them pins is pinned for both.
    pub fn beside(&self) -> FakeGpu {
        let driver = self.state.lock().driver.clone();
        let number = 1 + driver.devices.fetch_add(1, Relaxed);
        let state = State { driver, number, ..State::default() };
        FakeGpu { memory: HostMem::new(), state: Arc::new(Mutex::new(state)) }
    }

    /// Limits pinned bytes, without locking them. To be called before anything is pinned.
    pub fn limit_pins(&self, bytes: u64) {
        self.state.lock().driver.pins.lock().limit = Some(bytes);
    }

    /// Sets the PCI address of the device.
    pub fn play_pci(&self, address: &str) {
        self.state.lock().pci = Some(address.into());
    }

    /// Limits the device's memory.
    pub fn limit_room(&self, bytes: u64) {
        self.state.lock().room = Some(bytes);
    }

    /// Refuses to serve a tier from now on; `None`: no longer.
    pub fn refuse(&self, tier: Tier, why: Option<Unavailable>) {
        let refused = &mut self.state.lock().refused;
        match why {
            Some(why) => refused.insert(tier, why),
            None => refused.remove(&tier),
        };
    }

    /// Destroys the context before the copy that follows the next `copies` ones.
    pub fn destroy_after(&self, copies: u64) {
        let mut s = self.state.lock();
        s.orders.gone_after = Some(s.copies + copies);
    }

    /// Destroys the context now.
    pub fn destroy(&self) {
        self.state.lock().destroy();
    }

    /// The copy after the next `copies` ones fails, and all later ones, until [`FakeGpu::mend`].
    pub fn fail_after(&self, copies: u64, fault: Fault) {
        let mut s = self.state.lock();
        s.orders.failing = Some(Failing { from: s.copies + copies, fault, pinned_only: false });
    }

    /// As [`FakeGpu::fail_after`], but copies from and to memory that is not pinned still work.
    pub fn fail_pinned_after(&self, copies: u64, fault: Fault) {
        let mut s = self.state.lock();
        s.orders.failing = Some(Failing { from: s.copies + copies, fault, pinned_only: true });
    }

    /// No copy fails any more.
    pub fn mend(&self) {
        self.state.lock().orders.failing = None;
    }

    /// The copy after the next `copies` ones changes one bit.
    pub fn corrupt_after(&self, copies: u64) {
        let mut s = self.state.lock();
        s.orders.corrupt_after = Some(s.copies + copies);
    }

    /// Each copy takes at least this long from now on.
    pub fn slow_down(&self, copy: Duration) {
        self.state.lock().orders.pace = copy;
    }

    /// Allows only this many more copies, until this is called again; `None`: all.
    pub fn allow_copies(&self, copies: Option<u64>) {
        let gate = self.state.lock().gate.clone();
        gate.0.lock().0 = copies;
        gate.1.notify_all();
    }

    /// Copies and checksums that streams were given and that are not made yet.
    pub fn under_way(&self) -> u64 {
        let gate = self.state.lock().gate.clone();
        gate.0.lock().1
    }

    /// From now on, writes of others into exported memory are seen only when the device is told to
    /// look ([`GpuMem::arrived`]). Others must not write while it looks: for tests on one thread.
    pub fn see_late(&self) {
        self.state.lock().late.get_or_insert_default();
    }

    /// From now on the device computes checksums of its memory. This machine does the work.
    pub fn play_sums(&self) {
        self.state.lock().sums = true;
    }

    /// Marks a stream of the program as busy or done.
    pub fn occupy(&self, stream: u64, busy: bool) {
        let all = self.state.lock().busy.clone();
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
        self.state.lock().no_exports = why;
    }

    /// Controls of its cuFile.
    pub fn tricks(&self) -> Arc<Tricks> {
        self.state.lock().cufile.clone()
    }

    /// Bytes copied so far.
    pub fn copied(&self) -> Copied {
        self.state.lock().copied
    }

    /// Bytes of host memory that are pinned now.
    pub fn pinned(&self) -> u64 {
        self.state.lock().driver.pins.lock().bytes()
    }

    /// Counts of pins so far.
    pub fn pins(&self) -> Pinned {
        self.state.lock().driver.pins.lock().told
    }

    /// As [`HostMem::lend`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn lend(&self, start: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.memory.lend(start, len) };
    }

    /// As [`HostMem::take_back`].
    pub fn take_back(&self, start: *mut u8, len: usize) {
        self.memory.take_back(start, len);
    }

    /// Reads the device's memory.
    pub fn peek(&self, addr: u64, len: u64) -> Result<Vec<u8>, Fault> {
        let s = self.state.lock();
        let from = s.hold(&self.memory, addr, len)?;
        let mut bytes = vec![0; len as usize];
        // SAFETY: so many bytes are held there, and the lock keeps others from them.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(start_of(&from), bytes.len()) };
        Ok(bytes)
    }

    /// Writes the device's memory.
    pub fn poke(&self, addr: u64, bytes: &[u8]) -> Result<(), Fault> {
        let held = self.hold(addr, bytes.len() as u64)?;
        self.fill(&held, bytes)
    }

    /// Holds memory of the device for a borrower: see [`FakeGpu::fill`].
    fn hold(&self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        self.state.lock().hold(&self.memory, addr, len)
    }

    /// Writes bytes into memory that [`FakeGpu::hold`] holds, whether it was freed in the meantime
    /// or not.
    fn fill(&self, memory: &Foreign, bytes: &[u8]) -> Result<(), Fault> {
        let s = self.state.lock();
        s.alive()?;
        let n = bytes.len().min(memory.len() as usize);
        // SAFETY: what is held is there, and the lock keeps others from it.
        unsafe { start_of(memory).copy_from_nonoverlapping(bytes.as_ptr(), n) };
        Ok(())
    }
}

/// Where memory of this process starts.
fn start_of(memory: &Foreign) -> *mut u8 {
    ptr::with_exposed_provenance_mut(memory.addr() as usize)
}

impl State {
    fn alive(&self) -> Result<(), Fault> {
        if self.context_gone { Err(Fault::ContextGone) } else { Ok(()) }
    }

    fn has_room(&self, bytes: u64) -> bool {
        let used: u64 = self.sizes.values().sum();
        self.room.is_none_or(|room| bytes <= room.saturating_sub(used))
    }

    /// Memory from there, which stays in place as long as the result is held.
    fn hold(&self, memory: &HostMem, addr: u64, len: u64) -> Result<Foreign, Fault> {
        self.alive()?;
        memory.export(addr, len)
    }

    /// As [`State::hold`], but of other memory with the same bytes.
    fn hold_late(&mut self, memory: &HostMem, addr: u64, len: u64) -> Result<Foreign, Fault> {
        let from = self.hold(memory, addr, len)?;
        let mut seen = vec![0; len as usize];
        // SAFETY: so many bytes are held there.
        unsafe { seen.as_mut_ptr().copy_from_nonoverlapping(start_of(&from), seen.len()) };
        let outside = Arc::new(Outside::new(&seen));
        let (start, keep) = (outside.start(), outside.clone() as Arc<dyn Any + Send + Sync>);
        self.late.get_or_insert_default().push(Late { outside, seen, addr });
        // SAFETY: it is in place as long as it is held.
        Ok(unsafe { Foreign::host(start, len, keep) })
    }

    /// Copies what was written late.
    fn look(&mut self, memory: &HostMem) {
        let mut all = self.late.take();
        for l in all.iter_mut().flatten() {
            // Freed in the meantime: not copied.
            let Ok(to) = self.hold(memory, l.addr, l.seen.len() as u64) else { continue };
            for (i, seen) in l.seen.iter_mut().enumerate() {
                // SAFETY: within both, and nobody writes them now.
                let now = unsafe { *l.outside.start().add(i) };
                // Bytes that nothing wrote stay as the device has them.
                if now != *seen {
                    *seen = now;
                    // SAFETY: as above.
                    unsafe { *start_of(&to).add(i) = now };
                }
            }
        }
        // Memory that cannot be written any more was copied for the last time.
        all.iter_mut().for_each(|all| all.retain(|l| Arc::strong_count(&l.outside) > 1));
        self.late = all;
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
    fn copy(&mut self, memory: &HostMem, c: &Pending) -> Result<(), Fault> {
        let n = self.copies;
        self.copies += 1;
        if self.orders.gone_after.is_some_and(|at| n >= at) {
            self.destroy();
        }
        let pinned = self.driver.pins.lock().holds(c.host.addr(), c.len);
        let fails = |f: &&Failing| n >= f.from && (pinned || !f.pinned_only);
        if let Some(f) = self.orders.failing.as_ref().filter(fails) {
            return Err(f.fault.clone());
        }
        let held = self.hold(memory, c.device, c.len as u64)?;
        let device = start_of(&held);
        let corrupt = self.orders.corrupt_after.take_if(|at| n >= *at).is_some();
        let (from, to) = if c.to_device { (c.host, device) } else { (device, c.host) };
        // SAFETY: the host's end is valid until this copy was waited for, as the caller of `load`
        // or `save` promised; the device's is held. They may be the same memory only if a buffer of
        // the bridge's own was lent: hence `copy_from`.
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

impl GpuMem for FakeGpu {
    fn name(&self) -> String {
        self.memory.name()
    }

    fn refuses(&self, tier: Tier) -> Option<Unavailable> {
        let s = self.state.lock();
        match s.alive() {
            Err(gone) => Some(Unavailable::Device(gone)),
            Ok(()) => s.refused.get(&tier).cloned(),
        }
    }

    fn check(&self, addr: u64, len: u64) -> Result<(), Fault> {
        self.settle()?;
        self.memory.check(addr, len)
    }

    fn settle(&self) -> Result<(), Fault> {
        // Only the bridge's own copies run on it.
        self.state.lock().alive()
    }

    unsafe fn before(&self, stream: u64) -> Result<Box<dyn Before>, Fault> {
        self.settle()?;
        Ok(Box::new(Work { busy: self.state.lock().busy.clone(), stream }))
    }

    fn alloc(&self, len: u64) -> Result<u64, Fault> {
        let mut s = self.state.lock();
        s.alive()?;
        if !s.has_room(len) {
            return Err(Fault::NoMemory { bytes: len });
        }
        let addr = self.memory.alloc(len)?;
        s.sizes.insert(addr, len);
        Ok(addr)
    }

    fn free(&self, addr: u64) -> Result<(), Fault> {
        let mut s = self.state.lock();
        s.alive()?;
        self.memory.free(addr)?;
        s.sizes.remove(&addr);
        Ok(())
    }

    fn registry(&self) -> Arc<Registry> {
        self.state.lock().driver.registry.clone()
    }

    fn is_gone(&self) -> bool {
        self.state.lock().context_gone
    }

    fn pci(&self) -> Result<String, String> {
        self.state.lock().pci.clone().map_or_else(|| self.memory.pci(), Ok)
    }

    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), Fault> {
        let s = self.state.lock();
        let mut pins = s.driver.pins.lock();
        let refused = |why: String| Fault::Pin { bytes: len as u64, why };
        s.alive()?;
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
            None => {
                // SAFETY: the caller says that these pages are mapped; locking them changes none of
                // their bytes.
                unsafe { mlock(start.cast(), len) }.map_err(|e| refused(format!("mlock: {e}")))?
            }
        }
        pins.told.made += 1;
        pins.all.insert(at, (len, s.number));
        Ok(())
    }

    fn unpin(&self, start: *mut u8) {
        let s = self.state.lock();
        let mut pins = s.driver.pins.lock();
        // If the pinning device's context is gone, its pins went with it.
        if !pins.remove(start.addr()) && !s.context_gone {
            pins.told.stray += 1;
        }
    }

    fn sums(&self) -> Result<(), String> {
        if self.state.lock().sums { Ok(()) } else { self.memory.sums() }
    }

    fn export(&self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        let mut s = self.state.lock();
        if let Some(why) = s.no_exports.clone() {
            return Err(Fault::Export { bytes: len, why });
        }
        if s.late.is_some() {
            s.hold_late(&self.memory, addr, len)
        } else {
            s.hold(&self.memory, addr, len)
        }
    }

    fn arrived(&self) -> Result<(), Fault> {
        let mut s = self.state.lock();
        s.alive()?;
        s.look(&self.memory);
        Ok(())
    }

    fn cufile(&self, _prober: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Ok(Arc::new(FakeCuFile::new(self.clone())))
    }

    fn stream(&self) -> Result<Box<dyn Stream>, Fault> {
        self.settle()?;
        Ok(Box::new(FakeStream::new(self)))
    }
}
