//! Host memory that is registered with the device: slots of the bridge's own, and the regions of the client's buffers as they are seen.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use strake_fabric::{BufMut, REGION, Region};

use crate::mem::{Fault, GpuMem};

/// Locked memory that a bridge takes where the process may lock as much as it wants.
const UNLIMITED: u64 = 512 << 20;
/// The smallest slot that is worth a copy.
pub const MIN_SLOT: usize = 256 << 10;

/// Pinned memory that a worker copies through.
pub struct Slot {
    memory: BufMut,
    device: Arc<dyn GpuMem>,
}

impl Slot {
    pub fn new(device: &Arc<dyn GpuMem>, len: usize) -> Result<Slot, Fault> {
        let mut memory = BufMut::unpooled(len);
        // SAFETY: the buffer is page-aligned and whole pages, and lives until `drop` has unpinned it.
        unsafe { device.pin(memory.as_mut_ptr(), len)? };
        Ok(Slot { memory, device: device.clone() })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory
    }

    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let start = self.memory.as_mut_ptr();
        self.device.unpin(start);
    }
}

/// What could be pinned.
pub struct Pins {
    /// For each worker.
    pub slots: Vec<Vec<Slot>>,
    pub slot_bytes: usize,
    pub regions: Arc<Regions>,
    /// What there is less of than was wanted, and why; for people.
    pub notice: Option<String>,
}

impl Pins {
    /// Slots for `workers`, `each` of `slot_bytes` (a power of two of at least [`MIN_SLOT`]); smaller ones, then fewer, where that is too
    /// much. An error if there cannot be even two of the smallest.
    pub fn new(
        device: &Arc<dyn GpuMem>,
        (workers, each, slot_bytes): (usize, usize, usize),
        limit: Option<u64>,
    ) -> Result<Pins, Fault> {
        let memlock = getrlimit(Resource::Memlock).current;
        let budget = limit.unwrap_or_else(|| memlock.map_or(UNLIMITED, |l| l / 2));
        let because = match (limit, memlock) {
            (Some(l), _) => format!("pinned_limit is {l} bytes"),
            (None, Some(l)) => format!("RLIMIT_MEMLOCK is {l} bytes, of which half is taken"),
            (None, None) => format!("no more than {UNLIMITED} bytes are taken"),
        };
        let mut refused = None;
        let sizes = std::iter::successors(Some(slot_bytes), |s| Some(s / 2)).take_while(|s| *s >= MIN_SLOT);
        let tries = sizes.map(|size| (workers, each, size)).chain([(1, 2, MIN_SLOT)]);
        for (workers, each, size) in tries {
            let taken = (workers * each * size) as u64;
            if taken > budget {
                continue;
            }
            let row = || (0..each).map(|_| Slot::new(device, size)).collect::<Result<Vec<_>, _>>();
            match (0..workers).map(|_| row()).collect::<Result<Vec<_>, _>>() {
                Ok(slots) => {
                    let rest = ((budget - taken) / REGION as u64) as usize;
                    let smaller = size < slot_bytes || rest == 0;
                    let why = refused.map_or(because, |e: Fault| e.to_string());
                    let notice = smaller.then(|| {
                        let (count, kib) = (workers * each, size >> 10);
                        format!(
                            "{count} pinned slots of {kib} KiB and {rest} pinned regions of the client's buffers: {why}"
                        )
                    });
                    return Ok(Pins { slots, slot_bytes: size, regions: Regions::new(device, rest), notice });
                }
                Err(e) => refused = Some(e),
            }
        }
        Err(refused.unwrap_or(Fault::Pin { bytes: 2 * MIN_SLOT as u64, why: because }))
    }
}

/// Regions of the client's buffers that are pinned.
pub struct Regions {
    device: Arc<dyn GpuMem>,
    inner: Mutex<Inner>,
}

struct Inner {
    /// By their ids. Held, so that their memory stays where it is.
    pinned: HashMap<u64, Arc<Region>>,
    /// How many more there may be.
    left: usize,
}

impl Regions {
    fn new(device: &Arc<dyn GpuMem>, left: usize) -> Arc<Regions> {
        Arc::new(Regions { device: device.clone(), inner: Mutex::new(Inner { pinned: HashMap::new(), left }) })
    }

    /// None, for where nothing can be pinned.
    pub fn none(device: &Arc<dyn GpuMem>) -> Arc<Regions> {
        Regions::new(device, 0)
    }

    /// False: none is pinned, and none ever will be.
    pub fn may_have_any(&self) -> bool {
        let inner = self.inner.lock();
        inner.left > 0 || !inner.pinned.is_empty()
    }

    /// Whether a buffer of this region lies in memory that is pinned by now.
    pub fn knows(&self, region: Option<&Arc<Region>>) -> bool {
        region.is_some_and(|r| self.inner.lock().pinned.contains_key(&r.id()))
    }

    /// Whether it lies in pinned memory; the region is pinned for that if it may be.
    pub fn has(&self, region: Option<&Arc<Region>>) -> bool {
        let Some(region) = region else { return false };
        let mut inner = self.inner.lock();
        if inner.pinned.contains_key(&region.id()) {
            return true;
        }
        if inner.left == 0 {
            return false;
        }
        // SAFETY: a region is whole pages, and is held until it was unpinned.
        if let Err(e) = unsafe { self.device.pin(region.as_ptr(), REGION) } {
            tracing::info!("{} regions of the client's buffers are pinned, no more: {e}", inner.pinned.len());
            inner.left = 0;
            return false;
        }
        inner.left -= 1;
        inner.pinned.insert(region.id(), region.clone());
        true
    }

    pub fn count(&self) -> usize {
        self.inner.lock().pinned.len()
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        for region in self.inner.get_mut().pinned.values() {
            self.device.unpin(region.as_ptr());
        }
    }
}

#[cfg(test)]
mod tests {
    use strake_fabric::{Buf, Pool};

    use super::*;
    use crate::HostMem;

    const MIB: usize = 1 << 20;

    fn pins(limit: u64, ask: Option<u64>) -> (HostMem, Result<Pins, Fault>) {
        let m = HostMem::new();
        m.limit_pins(limit);
        let device: Arc<dyn GpuMem> = Arc::new(m.clone());
        (m, Pins::new(&device, (4, 3, 4 * MIB), ask))
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

        // What half of a limit of 8 MiB is.
        let (m, p) = pins(1 << 40, Some(4 << 20));
        let p = p.unwrap();
        assert_eq!((got(&p), m.pinned()), ((4, 3, MIN_SLOT), 3 << 20));
        let notice = p.notice.unwrap();
        assert!(notice.contains("12 pinned slots of 256 KiB and 0 pinned regions"), "{notice}");

        let (_, p) = pins(1 << 40, Some(1 << 20));
        assert_eq!(got(&p.unwrap()), (1, 2, MIN_SLOT));

        // The device has the last word.
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
        let bufs: Vec<BufMut> = (0..4).map(|_| pool.get_now(REGION)).collect();
        let small = pool.get_now(5000);
        let pinned: Vec<bool> = bufs.iter().chain(&bufs).map(|b| p.regions.has(b.region())).collect();
        assert_eq!(pinned, [true, true, false, false, true, true, false, false], "9 MiB are two regions");
        assert!(!p.regions.has(small.region()) && !p.regions.has(Buf::copy_from(b"not of the pool").region()));
        assert_eq!((p.regions.count(), m.pinned()), (2, (48 + 8) << 20));
        let regions = p.regions.clone();
        drop(p);
        // Its memory stays while it is pinned, even without the pool.
        drop((bufs, small, pool));
        assert_eq!(m.pinned(), 8 << 20);
        drop(regions);
        assert_eq!(m.pinned(), 0);
    }
}
