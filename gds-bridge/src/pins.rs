//! Host memory that is registered with the device: the bridge's own slots, and the regions of the
//! client's buffers as they are used.

use std::{
    collections::HashMap,
    ptr::{self, NonNull},
    sync::Arc,
};

use parking_lot::Mutex;
use rustix::{
    mm::{MapFlags, ProtFlags, mmap_anonymous, munmap},
    process::{Resource, getrlimit},
};
use strake_fabric::{REGION, Region};

use crate::{fault::Fault, mem::GpuMem, numa};

/// Locked memory that a bridge takes where the process has no limit.
const UNLIMITED: u64 = 512 << 20;
/// The smallest slot that is worth a copy, in bytes.
pub const MIN_SLOT: usize = 256 << 10;

/// What is registered with a driver by all bridges of this process that use it. A driver registers
/// the same memory only once, and pins it for all of its devices. So each region of a client's
/// buffers is registered by the first bridge that needs it, and stays until the last one is gone.
#[derive(Default)]
pub struct Registry(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// By region id.
    regions: HashMap<u64, Entry>,
    /// Bytes of regions and slots, each counted once.
    bytes: u64,
}

struct Entry {
    /// Held, so that its memory stays in place.
    region: Arc<Region>,
    /// The device in whose context it was registered. Held, so that the context stays.
    by: Arc<dyn GpuMem>,
    /// Number of bridges that use it.
    uses: usize,
}

impl Registry {
    /// Number of registered bytes.
    pub fn bytes(&self) -> u64 {
        self.0.lock().bytes
    }

    /// As [`GpuMem::pin`], if no more than `limit` bytes are registered with it.
    ///
    /// # Safety
    /// As for [`GpuMem::pin`], until [`Registry::unpin`] returned.
    unsafe fn pin(
        &self,
        device: &Arc<dyn GpuMem>,
        (start, len): (*mut u8, usize),
        limit: u64,
    ) -> Result<(), Fault> {
        let mut known = self.0.lock();
        if !known.has_room(len, limit) {
            let why = format!("the bridges of this process have {} of {limit} bytes", known.bytes);
            return Err(Fault::Pin { bytes: len as u64, why });
        }
        // SAFETY: the caller's promise.
        unsafe { device.pin(start, len)? };
        known.bytes += len as u64;
        Ok(())
    }

    fn unpin(&self, device: &Arc<dyn GpuMem>, (start, len): (*mut u8, usize)) {
        let mut known = self.0.lock();
        device.unpin(start);
        known.bytes -= len as u64;
    }

    /// Registers a region if it is not registered, and adds one use, unless `again`. Returns the
    /// device whose registration it is; `None`: `limit` leaves no room for it.
    fn take(
        &self,
        region: &Arc<Region>,
        Regions { device, limit, near, .. }: &Regions,
        again: bool,
    ) -> Result<Option<Arc<dyn GpuMem>>, Fault> {
        let mut known = self.0.lock();
        let room = known.has_room(REGION, *limit);
        let gone = match known.regions.get_mut(&region.id()) {
            Some(e) if !e.by.is_gone() => {
                e.uses += usize::from(!again);
                return Ok(Some(e.by.clone()));
            }
            // The registration went with the context that made it.
            Some(_) => true,
            None if !room => return Ok(None),
            None => false,
        };
        if let Some(node) = near
            && let Err(e) = numa::prefer(region.as_ptr(), REGION, *node)
        {
            tracing::debug!("a region of the client's buffers was not moved: mbind: {e}");
        }
        // SAFETY: a region is whole pages, and is held until it was unpinned.
        unsafe { device.pin(region.as_ptr(), REGION)? };
        known.bytes += if gone { 0 } else { REGION as u64 };
        let new = || Entry { region: region.clone(), by: device.clone(), uses: 0 };
        let e = known.regions.entry(region.id()).or_insert_with(new);
        e.uses += usize::from(!again);
        let before = std::mem::replace(&mut e.by, device.clone());
        drop(known);
        // May drop the last handle of that device, so not under the lock.
        drop(before);
        Ok(Some(device.clone()))
    }

    /// Removes one use; unpins a region without uses.
    fn release(&self, id: u64) {
        let mut known = self.0.lock();
        let Some(e) = known.regions.get_mut(&id) else { return };
        e.uses -= 1;
        if e.uses > 0 {
            return;
        }
        let Some(last) = known.regions.remove(&id) else { return };
        // Under the lock, before the region or other memory at its address can be registered again.
        last.by.unpin(last.region.as_ptr());
        known.bytes -= REGION as u64;
        drop(known);
        drop(last);
    }

    fn knows(&self, id: u64) -> bool {
        self.0.lock().regions.get(&id).is_some_and(|e| !e.by.is_gone())
    }
}

impl Known {
    fn has_room(&self, len: usize, limit: u64) -> bool {
        self.bytes.checked_add(len as u64).is_some_and(|all| all <= limit)
    }
}

/// A mapping of whole zeroed pages, not touched yet.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its memory exclusively, like a `Box<[u8]>`.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(len: usize) -> Result<Mapping, Fault> {
        let refused = |why: String| Fault::Pin { bytes: len as u64, why };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory in
        // use.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE) };
        let start = start.map_err(|e| refused(format!("mmap: {e}")))?;
        let start =
            NonNull::new(start.cast()).ok_or_else(|| refused("mmap returned no memory".into()))?;
        Ok(Mapping { start, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nobody has it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Host memory of whole pages that is pinned for a device as long as this lives, for copies between
/// the two.
pub struct Slot {
    memory: Mapping,
    device: Arc<dyn GpuMem>,
    registry: Arc<Registry>,
}

impl Slot {
    /// `len` bytes. Fails if more than `limit` bytes would be pinned with it for the device's driver.
    /// `prepare` is called with its memory before that is touched.
    pub fn new(
        device: &Arc<dyn GpuMem>,
        len: usize,
        limit: u64,
        prepare: &dyn Fn(*mut u8, usize),
    ) -> Result<Slot, Fault> {
        let (memory, registry) = (Mapping::new(len)?, device.registry());
        let start = memory.start.as_ptr();
        prepare(start, len);
        // SAFETY: the mapping is whole pages, and lives until `drop` has unpinned it.
        unsafe { registry.pin(device, (start, len), limit)? };
        Ok(Slot { memory, device: device.clone(), registry })
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` lives; who writes through `as_mut_ptr` has `self` to
        // itself meanwhile.
        unsafe { std::slice::from_raw_parts(self.memory.start.as_ptr(), self.memory.len) }
    }

    /// Its start, for copies by the device.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory.start.as_ptr()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.registry.unpin(&self.device, (self.memory.start.as_ptr(), self.memory.len));
    }
}

/// The result of pinning.
pub struct Pins {
    /// For each worker.
    pub slots: Vec<Vec<Slot>>,
    pub slot_bytes: usize,
    pub regions: Arc<Regions>,
    /// What could not be had as wanted, and why; for people.
    pub notice: Option<String>,
}

/// How much may be pinned, and the reason for the limit.
struct Budget {
    /// For all bridges of this process that share the driver.
    limit: u64,
    /// For this bridge.
    own: u64,
    because: String,
}

impl Budget {
    fn new(asked: Option<u64>, taken: u64) -> Budget {
        let memlock = getrlimit(Resource::Memlock).current;
        let (limit, own, because) = match (asked, memlock) {
            (Some(l), _) => (l, l, format!("pinned_limit is {l} bytes")),
            (None, Some(l)) => {
                (l / 2, l / 2, format!("RLIMIT_MEMLOCK is {l} bytes, of which half is used"))
            }
            // There is no limit to share.
            (None, None) => {
                (u64::MAX, UNLIMITED, format!("no more than {UNLIMITED} bytes are used"))
            }
        };
        let others = format!(", and other bridges of this process have {taken} bytes");
        Budget { limit, own, because: if taken > 0 { because + &others } else { because } }
    }
}

impl Pins {
    /// Slots for `workers`, `each` of `slot_bytes` (a power of two of at least [`MIN_SLOT`]). If
    /// that is too much, smaller ones, then fewer. An error if not even two of the smallest are
    /// possible. `limit`: what all bridges that share the driver may have pinned. `prepare` is
    /// called with each slot's memory before that is touched. The client's buffers are moved to the
    /// node `near` when they are pinned.
    pub fn new(
        device: &Arc<dyn GpuMem>,
        (workers, each, slot_bytes): (usize, usize, usize),
        limit: Option<u64>,
        (near, prepare): (Option<u32>, &dyn Fn(*mut u8, usize)),
    ) -> Result<Pins, Fault> {
        let registry = device.registry();
        let before = registry.bytes();
        let Budget { limit, own, because } = Budget::new(limit, before);
        let room = own.min(limit.saturating_sub(before));
        let mut refused = None;
        let sizes =
            std::iter::successors(Some(slot_bytes), |s| Some(s / 2)).take_while(|s| *s >= MIN_SLOT);
        let tries = sizes.map(|size| (workers, each, size)).chain([(1, 2, MIN_SLOT)]);
        for (workers, each, size) in tries {
            let taken = (workers * each * size) as u64;
            if taken > room {
                continue;
            }
            let row = || {
                (0..each)
                    .map(|_| Slot::new(device, size, limit, prepare))
                    .collect::<Result<Vec<_>, _>>()
            };
            match (0..workers).map(|_| row()).collect::<Result<Vec<_>, _>>() {
                Ok(slots) => {
                    let rest = ((room - taken) / REGION as u64) as usize;
                    let smaller = size < slot_bytes || rest == 0;
                    let why = refused.map_or(because, |e: Fault| e.to_string());
                    let notice = smaller.then(|| {
                        let (count, kib) = (workers * each, size >> 10);
                        format!(
                            "{count} pinned slots of {kib} KiB and {rest} pinned regions of the client's buffers: {why}"
                        )
                    });
                    return Ok(Pins {
                        slots,
                        slot_bytes: size,
                        regions: Regions::new(device, limit, own - taken, near),
                        notice,
                    });
                }
                Err(e) => refused = Some(e),
            }
        }
        Err(refused.unwrap_or(Fault::Pin { bytes: 2 * MIN_SLOT as u64, why: because }))
    }
}

/// Regions of the client's buffers that a bridge uses as pinned memory.
pub struct Regions {
    device: Arc<dyn GpuMem>,
    registry: Arc<Registry>,
    limit: u64,
    /// The node to which their memory is moved.
    near: Option<u32>,
    /// Maximum number of regions that it registers.
    most: usize,
    mine: Mutex<Mine>,
}

#[derive(Default)]
struct Mine {
    /// By region id, with the device whose registration it is. Each is one use in the registry.
    used: HashMap<u64, Arc<dyn GpuMem>>,
    /// The device has refused one: no more are tried.
    refused: bool,
}

impl Regions {
    fn new(device: &Arc<dyn GpuMem>, limit: u64, own: u64, near: Option<u32>) -> Arc<Regions> {
        let (registry, most) = (device.registry(), (own / REGION as u64) as usize);
        Arc::new(Regions {
            device: device.clone(),
            registry,
            limit,
            near,
            most,
            mine: Mutex::default(),
        })
    }

    /// An empty set, for devices where nothing can be pinned.
    pub fn none(device: &Arc<dyn GpuMem>) -> Arc<Regions> {
        Regions::new(device, 0, 0, None)
    }

    /// Whether a buffer of this region lies in memory that any bridge has pinned.
    pub fn knows(&self, region: Option<&Arc<Region>>) -> bool {
        region.is_some_and(|r| self.registry.knows(r.id()))
    }

    /// Whether it lies in pinned memory; pins the region if that is allowed.
    pub fn has(&self, region: Option<&Arc<Region>>) -> bool {
        let Some(region) = region else { return false };
        let mut mine = self.mine.lock();
        let again = match mine.used.get(&region.id()) {
            Some(by) if !by.is_gone() => return true,
            Some(_) => true,
            None => {
                // A region that another bridge has registered does not count against this one.
                let full = mine.refused || mine.used.len() >= self.most;
                if full && !self.registry.knows(region.id()) {
                    return false;
                }
                false
            }
        };
        match self.registry.take(region, self, again) {
            Ok(by) => by.map(|by| mine.used.insert(region.id(), by)).is_some(),
            Err(Fault::ContextGone) => false,
            Err(e) => {
                tracing::info!(
                    "{} regions of the client's buffers are pinned; no more can be: {e}",
                    mine.used.len()
                );
                mine.refused = true;
                false
            }
        }
    }

    pub fn count(&self) -> usize {
        self.mine.lock().used.len()
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        for id in self.mine.get_mut().used.keys() {
            self.registry.release(*id);
        }
    }
}

#[cfg(test)]
mod tests {
    use strake_fabric::{Buf, BufMut, Pool};

    use super::*;
    use crate::fake::FakeGpu;

    const MIB: usize = 1 << 20;

    fn pins(limit: u64, ask: Option<u64>) -> (FakeGpu, Result<Pins, Fault>) {
        let m = FakeGpu::new();
        m.limit_pins(limit);
        let device: Arc<dyn GpuMem> = Arc::new(m.clone());
        (m, Pins::new(&device, (4, 3, 4 * MIB), ask, (Some(0), &|_, _| {})))
    }

    fn got(p: &Pins) -> (usize, usize, usize) {
        (p.slots.len(), p.slots[0].len(), p.slot_bytes)
    }

    #[test]
    fn slots_are_as_large_as_the_limits_allow_and_what_is_less_is_said() {
        let (m, p) = pins(1 << 40, Some(512 << 20));
        let p = p.unwrap();
        assert_eq!((got(&p), m.pinned(), p.notice.as_deref()), ((4, 3, 4 * MIB), 48 << 20, None));
        drop(p);
        assert_eq!(m.pinned(), 0);

        // Half of a limit of 8 MiB.
        let (m, p) = pins(1 << 40, Some(4 << 20));
        let p = p.unwrap();
        assert_eq!((got(&p), m.pinned()), ((4, 3, MIN_SLOT), 3 << 20));
        let notice = p.notice.unwrap();
        assert!(notice.contains("12 pinned slots of 256 KiB and 0 pinned regions"), "{notice}");

        let (_, p) = pins(1 << 40, Some(1 << 20));
        assert_eq!(got(&p.unwrap()), (1, 2, MIN_SLOT));

        // The device's own limit applies, too.
        let (m, p) = pins(13 << 20, Some(512 << 20));
        let p = p.unwrap();
        assert_eq!((got(&p), m.pinned()), ((4, 3, MIB), 12 << 20));
        assert!(p.notice.unwrap().contains("cannot be pinned"));

        for (limit, ask) in [(0, Some(512 << 20)), (1 << 40, Some(4096))] {
            let (m, p) = pins(limit, ask);
            let e = p.err().unwrap();
            assert!(matches!(e, Fault::Pin { .. }), "{e}");
            assert_eq!(m.pinned(), 0, "nothing stays pinned");
        }
    }

    #[test]
    fn regions_are_pinned_once_up_to_the_limit_and_let_go_at_the_end() {
        let (m, p) = pins(1 << 40, Some((48 + 9) << 20));
        let (p, pool) = (p.unwrap(), Pool::new(64 << 20));
        let mut bufs: Vec<BufMut> = (0..4).map(|_| pool.get_now(REGION)).collect();
        bufs[0].fill(7);
        let small = pool.get_now(5000);
        let pinned: Vec<bool> =
            bufs.iter().chain(&bufs).map(|b| p.regions.has(b.region())).collect();
        assert_eq!(
            pinned,
            [true, true, false, false, true, true, false, false],
            "9 MiB are two regions"
        );
        assert!(bufs[0].iter().all(|b| *b == 7), "wherever it was moved");
        assert!(
            !p.regions.has(small.region())
                && !p.regions.has(Buf::copy_from(b"not of the pool").region())
        );
        assert_eq!((p.regions.count(), m.pinned()), (2, (48 + 8) << 20));
        let regions = p.regions.clone();
        drop(p);
        // Pinned memory stays, even without the pool.
        drop((bufs, small, pool));
        assert_eq!(m.pinned(), 8 << 20);
        drop(regions);
        assert_eq!(m.pinned(), 0);
    }
}
