//! The bytes of a file: what programs see, and what a power cut may leave of the changes since the
//! last sync.

use std::{collections::BTreeMap, sync::Arc};

use rand::{Rng, RngExt, seq::IndexedRandom};

use super::tree::Lost;

const PAGE: u64 = 4096;
/// The unit, in bytes, that a disk writes completely or not at all.
const SECTOR: usize = 512;
/// How many older versions of a page are kept between two syncs; the durable one is always among
/// them.
const VERSIONS: usize = 8;

type Bytes = [u8; PAGE as usize];
/// `None`: zeros.
type Page = Option<Arc<Bytes>>;

static ZEROS: Bytes = [0; PAGE as usize];

fn bytes(page: &Page) -> &Bytes {
    page.as_deref().unwrap_or(&ZEROS)
}

/// Sparse: only pages that are not all zeros are held.
#[derive(Default)]
pub struct Content {
    size: u64,
    pages: BTreeMap<u64, Arc<Bytes>>,
    /// Older versions of the pages that changed since the last sync, the durable one first.
    before: BTreeMap<u64, Vec<Page>>,
    /// Older sizes since the last sync, the durable one first.
    sizes: Vec<u64>,
}

impl Content {
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that are held in memory.
    pub fn allocated(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let len = (len as u64).min(self.size.saturating_sub(offset));
        let mut out = vec![0; len as usize];
        for (at, page) in self.pages.range(offset / PAGE..(offset + len).div_ceil(PAGE)) {
            let (start, end) = ((at * PAGE).max(offset), ((at + 1) * PAGE).min(offset + len));
            let from = (start - at * PAGE) as usize;
            out[(start - offset) as usize..(end - offset) as usize]
                .copy_from_slice(&page[from..from + (end - start) as usize]);
        }
        out
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        for at in offset / PAGE..end.div_ceil(PAGE) {
            let (start, stop) = ((at * PAGE).max(offset), ((at + 1) * PAGE).min(end));
            let from = (start - at * PAGE) as usize;
            let part = &data[(start - offset) as usize..(stop - offset) as usize];
            self.change(at, |page| page[from..from + part.len()].copy_from_slice(part));
        }
        if end > self.size {
            self.sizes.push(self.size);
            self.size = end;
        }
    }

    pub fn set_size(&mut self, size: u64) {
        if size < self.size {
            self.zero(size, u64::MAX - size);
        }
        if size != self.size {
            self.sizes.push(self.size);
            self.size = size;
        }
    }

    /// Makes these bytes zeros; the size stays.
    pub fn zero(&mut self, offset: u64, len: u64) {
        let end = offset + len;
        let held: Vec<u64> =
            self.pages.range(offset / PAGE..end.div_ceil(PAGE)).map(|(at, _)| *at).collect();
        for at in held {
            let from = offset.max(at * PAGE) - at * PAGE;
            let to = end.min((at + 1).saturating_mul(PAGE)) - at * PAGE;
            self.change(at, |page| page[from as usize..to as usize].fill(0));
        }
    }

    fn change(&mut self, at: u64, how: impl FnOnce(&mut Bytes)) {
        let old = self.pages.get(&at).cloned();
        let mut new = *bytes(&old);
        how(&mut new);
        self.put(at, &new);
        let before = self.before.entry(at).or_default();
        if before.len() == VERSIONS {
            before.remove(1);
        }
        before.push(old);
    }

    fn put(&mut self, at: u64, page: &Bytes) {
        if *page == ZEROS {
            self.pages.remove(&at);
        } else {
            self.pages.insert(at, Arc::new(*page));
        }
    }

    /// Makes bytes and size durable.
    pub fn sync(&mut self) {
        self.before.clear();
        self.sizes.clear();
    }

    /// Cuts the power: each unsynced sector and the size get any version since the last sync.
    pub fn cut(&mut self, rng: &mut impl Rng, lost: &mut Lost) {
        // Sometimes all newest versions survive, sometimes none, mostly some.
        let newest = how_much_survives(rng);
        for (at, before) in std::mem::take(&mut self.before) {
            let now = self.pages.get(&at).cloned();
            let mut left = *bytes(&now);
            for s in (0..PAGE as usize).step_by(SECTOR) {
                let sector = s..s + SECTOR;
                if before.iter().all(|p| bytes(p)[sector.clone()] == left[sector.clone()]) {
                    continue;
                }
                lost.sectors_unsynced += 1;
                if !rng.random_bool(newest)
                    && let Some(old) = before.choose(rng)
                    && bytes(old)[sector.clone()] != left[sector.clone()]
                {
                    lost.sectors += 1;
                    left[sector.clone()].copy_from_slice(&bytes(old)[sector]);
                }
            }
            self.put(at, &left);
        }
        if !rng.random_bool(newest)
            && let Some(size) = self.sizes.choose(rng).copied()
        {
            self.size = size;
        }
        // A sector may have survived past the size that is left.
        self.zero(self.size, u64::MAX - self.size);
        self.sync();
    }
}

/// Draws the probability that an unsynced change survives.
pub fn how_much_survives(rng: &mut impl Rng) -> f64 {
    match rng.random_range(0..4) {
        0 => 0.0,
        1 => 1.0,
        _ => rng.random(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::StdRng};
    use std::collections::BTreeSet;

    fn after_cut(make: impl Fn() -> Content) -> BTreeSet<Vec<u8>> {
        let left = |seed| {
            let mut c = make();
            c.cut(&mut StdRng::seed_from_u64(seed), &mut Lost::default());
            assert!(c.before.is_empty() && c.sizes.is_empty());
            c.read(0, 1 << 20)
        };
        (0..400).map(left).collect()
    }

    #[test]
    fn reads_what_was_written_zeroed_and_cut_short() {
        let mut c = Content::default();
        c.write(4000, &[7; 200]);
        assert_eq!(c.size(), 4200);
        assert_eq!(c.read(3999, 1000), [vec![0], vec![7; 200]].concat());
        assert_eq!(c.read(4200, 10), []);
        c.zero(4050, 100);
        assert_eq!(c.read(4000, 200), [vec![7; 50], vec![0; 100], vec![7; 50]].concat());
        c.set_size(4010);
        c.set_size(10 << 30);
        assert_eq!(c.read(4000, 20), [vec![7; 10], vec![0; 10]].concat());
        assert_eq!(c.allocated(), 4096, "the second page is zeros, the rest a hole");
        c.set_size(0);
        assert_eq!((c.size(), c.allocated()), (0, 0));
    }

    #[test]
    fn what_was_synced_survives_every_cut() {
        let left = after_cut(|| {
            let mut c = Content::default();
            c.write(0, &[1; 9000]);
            c.write(100, &[2; 600]);
            c.set_size(8000);
            c.sync();
            c
        });
        let mut want = vec![1; 8000];
        want[100..700].fill(2);
        assert_eq!(left, BTreeSet::from([want]));
    }

    #[test]
    fn unsynced_sectors_survive_each_on_its_own_in_any_version_since_the_last_sync() {
        let left = after_cut(|| {
            let mut c = Content::default();
            c.write(0, &[9; 1024]);
            c.write(0, &[1; 1024]);
            c.sync();
            c.write(0, &[2; 1024]);
            c.write(0, &[3; 1024]);
            c
        });
        let both = |a, b| [vec![a; 512], vec![b; 512]].concat();
        let all = (1..=3).flat_map(|a| (1..=3).map(move |b| both(a, b))).collect();
        assert_eq!(
            left, all,
            "each of both sectors old, newer or newest; never as before the sync; never torn inside"
        );
    }

    #[test]
    fn an_unsynced_size_survives_or_not_and_a_hole_may_be_where_the_data_was() {
        let left = after_cut(|| {
            let mut c = Content::default();
            c.write(0, &[1; 512]);
            c.sync();
            c.write(512, &[2; 512]);
            c
        });
        let both = |b| [vec![1; 512], vec![b; 512]].concat();
        assert_eq!(left, BTreeSet::from([vec![1; 512], both(0), both(2)]));
        let left = after_cut(|| {
            let mut c = Content::default();
            c.write(0, &[1; 512]);
            c.sync();
            c.set_size(0);
            c
        });
        assert_eq!(left, BTreeSet::from([vec![], vec![0; 512], vec![1; 512]]));
    }
}
