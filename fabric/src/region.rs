//! The memory of pooled buffers: large regions that a device or a NIC can register once, divided by
//! a buddy allocator (Knowlton 1965).

use std::{
    collections::BTreeSet,
    fmt, ptr,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use strake_runtime::SharedMemory;

use crate::buf::ALIGN;

/// Size of a region in bytes, and of the largest buffer that lies in one.
pub const REGION: usize = 4 << 20;
/// Regions start at multiples of this, so that huge pages fit.
const HUGE: usize = 2 << 20;
const ORDERS: usize = (REGION / ALIGN).trailing_zeros() as usize + 1;

/// Memory that stays in place as long as anything holds it. Code that registers it with the kernel
/// must hold it until that registration has ended, or other memory may appear at its addresses.
pub struct Region {
    id: u64,
    ptr: NonNull<u8>,
    /// The kept memory that it is a part of; `None`: a mapping of its own.
    kept: Option<Arc<SharedMemory>>,
}

// SAFETY: a region is only an address range that it keeps mapped; who may use which part is the
// arena's business.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Relaxed)
}

impl Region {
    fn of_kept(memory: &Arc<SharedMemory>, offset: usize) -> Option<Region> {
        let ptr = memory.bytes(offset, REGION)?;
        for page in (0..REGION).step_by(ALIGN) {
            // The kernel may copy a request into this page while the process is being killed. If
            // the page cannot be written yet, it can no longer be made writable then: the request
            // would fail with EIO instead of going to the next daemon. Adding 0 would not do:
            // compilers turn it into a read.
            let word = memory.word(offset + page);
            let now = word.load(Relaxed);
            let _ = word.compare_exchange(now, now, Relaxed, Relaxed);
        }
        Some(Region { id: next_id(), ptr, kept: Some(memory.clone()) })
    }

    fn map() -> Option<Region> {
        let (long, prot) = (REGION + HUGE, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory in
        // use.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), long, prot, MapFlags::PRIVATE).ok()? }
            .cast::<u8>();
        let skip = start.align_offset(HUGE);
        let at = start.wrapping_add(skip);
        // SAFETY: `at` to `at + REGION` stays; what is unmapped is the rest of the mapping just
        // made, to which no references exist.
        unsafe {
            for (from, len) in [(start, skip), (at.wrapping_add(REGION), HUGE - skip)] {
                if len > 0 {
                    let _ = munmap(from.cast(), len);
                }
            }
            // Huge pages: fewer TLB misses and fewer pages to pin. It works without them.
            let _ = madvise(at.cast(), REGION, Advice::LinuxHugepage);
        }
        Some(Region { id: next_id(), ptr: NonNull::new(at)?, kept: None })
    }

    /// Unique among all regions of this process, past and future.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether it is a part of memory that outlives the process.
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Start of its [`REGION`] bytes.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.kept.is_none() {
            // SAFETY: mapped in `map`, and every buffer in it held this region.
            let _ = unsafe { munmap(self.ptr.as_ptr().cast(), REGION) };
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({})", self.id)
    }
}

/// A block's place: its region, and its position counted over all regions of the arena.
pub struct Place {
    /// The region, which this holds.
    pub region: Arc<Region>,
    at: usize,
}

/// Where an arena's regions come from.
#[derive(Default)]
enum Source {
    #[default]
    System,
    /// From `offset` of the kept memory on, one after the other.
    Kept { memory: Arc<SharedMemory>, offset: usize },
}

impl Place {
    /// Position in the kept memory's area for buffers; `None`: it lies elsewhere.
    pub fn kept_at(&self) -> Option<usize> {
        self.region.kept.as_ref().map(|_| self.at)
    }

    /// The address of the block.
    pub fn as_ptr(&self) -> NonNull<u8> {
        // SAFETY: the remainder is below the region's length.
        unsafe { self.region.ptr.add(self.at % REGION) }
    }
}

/// Divides regions into blocks, whose sizes are powers of two.
#[derive(Default)]
pub struct Arena {
    regions: Vec<Arc<Region>>,
    /// Positions of free blocks of `ALIGN << order` bytes; no two of them are buddies. The lowest
    /// is taken first, so that the same warm memory is used again and again.
    free: [BTreeSet<usize>; ORDERS],
    used: usize,
    source: Source,
}

fn order(cap: usize) -> usize {
    (cap / ALIGN).trailing_zeros() as usize
}

impl Arena {
    /// An arena whose regions are the parts of `memory` from `offset` on.
    pub fn kept(memory: Arc<SharedMemory>, offset: usize) -> Arena {
        Arena { source: Source::Kept { memory, offset }, ..Arena::default() }
    }

    fn add_region(&mut self) -> Option<()> {
        let region = match &self.source {
            Source::System => Region::map()?,
            Source::Kept { memory, offset } => {
                Region::of_kept(memory, offset + self.regions.len() * REGION)?
            }
        };
        self.regions.push(Arc::new(region));
        Some(())
    }

    /// The free block of `cap` bytes at a position that [`Place::kept_at`] returned. `None` if
    /// there is no such block or it is in use.
    pub fn take_at(&mut self, at: usize, cap: usize, regions: usize) -> Option<Place> {
        if !(ALIGN..=REGION).contains(&cap)
            || !cap.is_power_of_two()
            || !at.is_multiple_of(cap)
            || at / REGION >= regions
        {
            return None;
        }
        while self.regions.len() <= at / REGION {
            self.add_region()?;
            self.free[ORDERS - 1].insert((self.regions.len() - 1) * REGION);
        }
        let wanted = order(cap);
        let (mut have, mut whole) = (wanted..ORDERS).find_map(|o| {
            let start = at & !((ALIGN << o) - 1);
            self.free[o].remove(&start).then_some((o, start))
        })?;
        while have > wanted {
            have -= 1;
            let upper = whole + (ALIGN << have);
            let (kept, spare) = if at >= upper { (upper, whole) } else { (whole, upper) };
            self.free[have].insert(spare);
            whole = kept;
        }
        self.used += cap;
        Some(Place { region: self.regions[at / REGION].clone(), at })
    }

    /// `cap` bytes, a power of two from [`ALIGN`] to [`REGION`]; `None` if there is no such block
    /// and more than `regions` regions would be needed.
    pub fn take(&mut self, cap: usize, regions: usize) -> Option<Place> {
        let wanted = order(cap);
        let found = (wanted..ORDERS).find_map(|o| Some((o, self.free[o].pop_first()?)));
        let (mut have, at) = match found {
            Some(f) => f,
            None if self.regions.len() < regions => {
                self.add_region()?;
                (ORDERS - 1, (self.regions.len() - 1) * REGION)
            }
            None => return None,
        };
        while have > wanted {
            have -= 1;
            self.free[have].insert(at + (ALIGN << have));
        }
        self.used += cap;
        Some(Place { region: self.regions[at / REGION].clone(), at })
    }

    /// Takes back what `take` gave for `cap` bytes.
    pub fn put(&mut self, place: &Place, cap: usize) {
        let (mut at, mut o) = (place.at, order(cap));
        while o + 1 < ORDERS && self.free[o].remove(&(at ^ (ALIGN << o))) {
            at &= !(ALIGN << o);
            o += 1;
        }
        self.free[o].insert(at);
        self.used -= cap;
    }

    /// Unused bytes in its regions.
    pub fn spare(&self) -> usize {
        self.regions.len() * REGION - self.used
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn blocks_never_overlap_and_all_come_back(steps in prop::collection::vec((any::<bool>(), 0usize..ORDERS, any::<prop::sample::Index>()), 1..300)) {
            let (mut arena, mut out) = (Arena::default(), Vec::<(Place, usize)>::new());
            for (take, o, which) in steps {
                if take {
                    let cap = ALIGN << o;
                    let Some(p) = arena.take(cap, 3) else { continue };
                    let start = p.as_ptr().addr().get();
                    prop_assert!(start.is_multiple_of(cap.min(HUGE)));
                    prop_assert!(start >= p.region.as_ptr().addr() && start + cap <= p.region.as_ptr().addr() + REGION);
                    for (q, len) in &out {
                        let other = q.as_ptr().addr().get();
                        prop_assert!(start + cap <= other || other + len <= start);
                    }
                    out.push((p, cap));
                } else if !out.is_empty() {
                    let (p, cap) = out.swap_remove(which.index(out.len()));
                    arena.put(&p, cap);
                }
            }
            let used: usize = out.iter().map(|o| o.1).sum();
            prop_assert_eq!(arena.spare(), arena.regions.len() * REGION - used);
            for (p, cap) in out {
                arena.put(&p, cap);
            }
            let regions = arena.regions.len();
            for _ in 0..regions {
                prop_assert!(arena.take(REGION, regions).is_some(), "whole again");
            }
            prop_assert!(arena.take(ALIGN, regions).is_none());
        }
    }

    #[test]
    fn memory_stays_while_anyone_holds_its_region() {
        let mut arena = Arena::default();
        let p = arena.take(ALIGN, 1).unwrap();
        drop(arena);
        // SAFETY: the block is ours and its region is held.
        unsafe { p.as_ptr().write_bytes(7, ALIGN) };
        assert!(arena_is_elsewhere(&p));
    }

    #[test]
    fn blocks_are_taken_again_where_they_were() {
        let memory = SharedMemory::create(3 * REGION).unwrap();
        let mut first = Arena::kept(memory.clone(), REGION);
        let places: Vec<Place> =
            [ALIGN, 1 << 20, ALIGN << 3].map(|cap| first.take(cap, 2).unwrap()).into();
        let at: Vec<usize> = places.iter().map(|p| p.kept_at().unwrap()).collect();
        // SAFETY: the block is ours and its region is held.
        unsafe { places[1].as_ptr().write_bytes(7, 1 << 20) };
        drop((first, places));
        let mut second = Arena::kept(memory, REGION);
        let again = second.take_at(at[1], 1 << 20, 2).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { again.as_ptr().add((1 << 20) - 1).read() }, 7);
        assert!(second.take_at(at[1], ALIGN, 2).is_none(), "in use");
        let small = second.take_at(at[0], ALIGN, 2).unwrap();
        for (at, cap) in
            [(1, ALIGN), (0, 3 * ALIGN), (2 * REGION, ALIGN), (0, 2 * REGION), (REGION, 0)]
        {
            assert!(second.take_at(at, cap, 2).is_none(), "{cap} at {at}");
        }
        second.put(&again, 1 << 20);
        second.put(&small, ALIGN);
        for _ in 0..second.regions.len() {
            assert!(second.take(REGION, second.regions.len()).is_some(), "whole again");
        }
    }

    fn arena_is_elsewhere(p: &Place) -> bool {
        let other = Arena::default().take(ALIGN, 1).unwrap();
        other.region.id() != p.region.id() && other.as_ptr() != p.as_ptr()
    }
}
