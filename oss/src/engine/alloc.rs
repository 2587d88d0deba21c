//! Free space of a target: which device blocks are not in use. Kept in memory only; rebuilt from
//! the chunk table.

use std::collections::{BTreeMap, BTreeSet};

/// `count` blocks from `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Extent {
    pub start: u64,
    pub count: u64,
}

impl Extent {
    /// Whether the two have a block in common.
    pub(super) fn overlaps(&self, other: &Extent) -> bool {
        self.start < other.start + other.count && other.start < self.start + self.count
    }
}

/// Appends blocks to a list, growing its last extent where they adjoin.
pub(super) fn push_block(list: &mut Vec<Extent>, block: u64) {
    match list.last_mut() {
        Some(last) if last.start + last.count == block => last.count += 1,
        _ => list.push(Extent { start: block, count: 1 }),
    }
}

/// Sorted and with adjoining extents joined.
pub(super) fn coalesce(mut list: Vec<Extent>) -> Vec<Extent> {
    list.sort_unstable();
    let mut out: Vec<Extent> = Vec::with_capacity(list.len());
    for e in list {
        match out.last_mut() {
            Some(last) if last.start + last.count == e.start => last.count += e.count,
            _ => out.push(e),
        }
    }
    out
}

/// Free extents by place and by size. Best fit: takes the smallest extent that holds the whole
/// request, lowest place first. A request larger than every free extent is served in pieces,
/// largest first.
#[derive(Debug, Default)]
pub(super) struct Allocator {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    free: u64,
}

impl Allocator {
    /// All of `[start, end)` free.
    pub(super) fn new(start: u64, end: u64) -> Allocator {
        let mut a = Allocator::default();
        if end > start {
            a.insert(Extent { start, count: end - start });
        }
        a
    }

    pub(super) fn free_blocks(&self) -> u64 {
        self.free
    }

    /// `count` blocks in as few extents as possible, or `None` if fewer than `count` + `reserve`
    /// are free.
    pub(super) fn alloc(&mut self, count: u64, reserve: u64) -> Option<Vec<Extent>> {
        if count.checked_add(reserve).is_none_or(|need| need > self.free) {
            return None;
        }
        let mut out = Vec::with_capacity(1);
        let mut need = count;
        while need > 0 {
            let fit =
                self.by_size.range((need, 0)..).next().or_else(|| self.by_size.last()).copied();
            let (size, start) = fit?; // cannot be empty: `free` counts what is in it
            self.remove(start, size);
            let taken = need.min(size);
            out.push(Extent { start, count: taken });
            if taken < size {
                self.insert(Extent { start: start + taken, count: size - taken });
            }
            need -= taken;
        }
        Some(out)
    }

    /// Gives blocks back. They must be allocated: if some are free already, nothing changes there
    /// and the result is `false`.
    #[must_use]
    pub(super) fn free(&mut self, e: Extent) -> bool {
        if e.count == 0 {
            return true;
        }
        let before = self.by_start.range(..e.start + e.count).next_back().map(|(s, c)| (*s, *c));
        let mut joined = e;
        if let Some((start, count)) = before {
            if start + count > e.start {
                return false;
            }
            if start + count == e.start {
                self.remove(start, count);
                joined = Extent { start, count: count + e.count };
            }
        }
        if let Some(count) = self.by_start.get(&(e.start + e.count)).copied() {
            self.remove(e.start + e.count, count);
            joined.count += count;
        }
        self.insert(joined);
        true
    }

    /// Marks blocks of a free area as taken (rebuilding from the table); `false` if any of them is
    /// taken or outside.
    #[must_use]
    pub(super) fn take(&mut self, e: Extent) -> bool {
        let Some((start, count)) =
            self.by_start.range(..=e.start).next_back().map(|(s, c)| (*s, *c))
        else {
            return false;
        };
        let (end, taken_end) = (start + count, e.start.saturating_add(e.count));
        if taken_end > end {
            return false;
        }
        self.remove(start, count);
        if e.start > start {
            self.insert(Extent { start, count: e.start - start });
        }
        if end > taken_end {
            self.insert(Extent { start: taken_end, count: end - taken_end });
        }
        true
    }

    fn insert(&mut self, e: Extent) {
        self.by_start.insert(e.start, e.count);
        self.by_size.insert((e.count, e.start));
        self.free += e.count;
    }
    fn remove(&mut self, start: u64, count: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(count, start));
        self.free -= count;
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    /// Compares with one flag per block through random allocations, frees and rebuilds.
    #[test]
    fn agrees_with_a_bitmap() {
        for seed in 0..20 {
            let mut rng = StdRng::seed_from_u64(seed);
            let (start, end) = (16u64, 400u64);
            let mut a = Allocator::new(start, end);
            let mut taken = vec![false; end as usize];
            let mut held: Vec<Extent> = Vec::new();
            for _ in 0..600 {
                if rng.random_bool(0.55) {
                    let want = rng.random_range(1..40);
                    let before = a.free_blocks();
                    match a.alloc(want, 8) {
                        Some(got) => {
                            assert_eq!(got.iter().map(|e| e.count).sum::<u64>(), want);
                            for e in got {
                                for b in e.start..e.start + e.count {
                                    assert!(
                                        b >= start
                                            && !std::mem::replace(&mut taken[b as usize], true),
                                        "block {b}"
                                    );
                                }
                                held.push(e);
                            }
                        }
                        None => assert!(before < want + 8),
                    }
                } else if !held.is_empty() {
                    // Give back a part of an extent, as copy-on-write of single blocks does.
                    let e = held.swap_remove(rng.random_range(0..held.len()));
                    let cut = rng.random_range(0..e.count);
                    let (keep, give) = (
                        Extent { count: cut, ..e },
                        Extent { start: e.start + cut, count: e.count - cut },
                    );
                    assert!(a.free(give));
                    assert!(!a.free(give), "a second free is noticed");
                    taken[give.start as usize..(give.start + give.count) as usize].fill(false);
                    if keep.count > 0 {
                        held.push(keep);
                    }
                }
                assert_eq!(
                    a.free_blocks(),
                    taken[start as usize..].iter().filter(|t| !**t).count() as u64
                );
            }
            let mut rebuilt = Allocator::new(start, end);
            for e in &held {
                assert!(rebuilt.take(*e));
                assert!(!rebuilt.take(*e), "overlap is noticed");
            }
            assert_eq!(rebuilt.by_start, a.by_start);
            assert_eq!(rebuilt.by_size, a.by_size);
        }
    }

    #[test]
    fn prefers_one_contiguous_run_and_the_tightest_hole() {
        let mut a = Allocator::new(0, 100);
        assert!(a.take(Extent { start: 10, count: 1 }) && a.take(Extent { start: 20, count: 1 }));
        assert_eq!(a.alloc(9, 0).unwrap(), vec![Extent { start: 11, count: 9 }]);
        assert_eq!(
            a.alloc(85, 0).unwrap(),
            vec![Extent { start: 21, count: 79 }, Extent { start: 0, count: 6 }]
        );
        assert_eq!(a.alloc(5, 0), None);
    }

    #[test]
    fn outside_and_huge_extents_are_refused() {
        let mut a = Allocator::new(4, 8);
        for e in [(0, 1), (3, 2), (7, 2), (8, 1), (4, u64::MAX), (u64::MAX, 2)] {
            assert!(!a.take(Extent { start: e.0, count: e.1 }), "{e:?}");
        }
    }

    #[test]
    fn coalescing_joins_neighbours() {
        let e = |start, count| Extent { start, count };
        assert_eq!(coalesce(vec![e(5, 1), e(1, 2), e(3, 2), e(9, 1)]), vec![e(1, 5), e(9, 1)]);
    }
}
