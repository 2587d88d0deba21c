//! The part of the chunk table that is in memory: records changed since the last flush, records
//! being flushed, and a bounded cache of unchanged ones.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

/// A record, or `None` if there is none.
pub(super) type Slot<V> = Option<Arc<V>>;

/// One kind of record. Newest first: `dirty`, `flushing`, `cache`. The store has what is in none of
/// them.
pub(super) struct Overlay<K, V> {
    dirty: BTreeMap<K, Slot<V>>,
    flushing: Arc<BTreeMap<K, Slot<V>>>,
    /// Two generations: when the young one is full it becomes the old one and the old one is
    /// dropped.
    young: BTreeMap<K, Slot<V>>,
    old: BTreeMap<K, Slot<V>>,
    /// Records per generation.
    limit: usize,
}

impl<K: Ord + Copy, V> Overlay<K, V> {
    pub(super) fn new(cached: usize) -> Overlay<K, V> {
        let empty = BTreeMap::new;
        Overlay {
            dirty: empty(),
            flushing: Arc::default(),
            young: empty(),
            old: empty(),
            limit: (cached / 2).max(16),
        }
    }

    /// `None`: not known here.
    pub(super) fn get(&mut self, key: &K) -> Option<Slot<V>> {
        if let Some(v) =
            self.dirty.get(key).or_else(|| self.flushing.get(key)).or_else(|| self.young.get(key))
        {
            return Some(v.clone());
        }
        let v = self.old.remove(key)?;
        self.cache(*key, v.clone());
        Some(v)
    }

    /// As [`Overlay::get`], but only for changed records: `None` also for one that is only cached.
    pub(super) fn changed_one(&self, key: &K) -> Option<Slot<V>> {
        self.dirty.get(key).or_else(|| self.flushing.get(key)).cloned()
    }

    /// A change, to be flushed.
    pub(super) fn put(&mut self, key: K, value: Slot<V>) {
        self.dirty.insert(key, value);
    }

    /// Caches what the store holds. No flush may have ended since it was read.
    pub(super) fn cache(&mut self, key: K, value: Slot<V>) {
        self.young.insert(key, value);
        if self.young.len() >= self.limit {
            self.old = std::mem::take(&mut self.young);
        }
    }

    /// Called if the store's record is damaged: an intact cached record becomes dirty, so that the
    /// next flush writes it again. Returns whether there was one.
    pub(super) fn heal(&mut self, key: &K, is_whole: impl Fn(&V) -> bool) -> bool {
        if self.changed_one(key).is_some() {
            return false;
        }
        let cached = self.get(key).flatten().filter(|v| is_whole(v));
        let found = cached.is_some();
        if found {
            self.put(*key, cached);
        }
        found
    }

    pub(super) fn dirty_len(&self) -> usize {
        self.dirty.len()
    }

    /// Freezes the dirty records for a flush. No other flush may be running.
    pub(super) fn begin(&mut self) {
        debug_assert!(self.flushing.is_empty());
        self.flushing = Arc::new(std::mem::take(&mut self.dirty));
    }

    pub(super) fn flushing(&self) -> Arc<BTreeMap<K, Slot<V>>> {
        self.flushing.clone()
    }

    /// The store now holds the frozen records.
    pub(super) fn end(&mut self) {
        for (k, v) in &*std::mem::take(&mut self.flushing) {
            self.old.remove(k);
            self.cache(*k, v.clone());
        }
    }

    /// The store may not hold the frozen records: they become dirty again, below newer changes.
    pub(super) fn abort(&mut self) {
        for (k, v) in &*std::mem::take(&mut self.flushing) {
            self.dirty.entry(*k).or_insert_with(|| v.clone());
        }
    }

    /// Changed records in `[from, to)` in order, at most `max`, and whether there are more.
    pub(super) fn changed(
        &self,
        from: Bound<K>,
        to: Bound<K>,
        max: usize,
    ) -> (BTreeMap<K, Slot<V>>, bool) {
        let mut out: BTreeMap<K, Slot<V>> = BTreeMap::new();
        for map in [&*self.flushing, &self.dirty] {
            out.extend(map.range((from, to)).take(max + 1).map(|(k, v)| (*k, v.clone())));
        }
        let more = out.len() > max;
        while out.len() > max {
            out.pop_last();
        }
        (out, more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v(n: u32) -> Slot<u32> {
        Some(Arc::new(n))
    }

    #[test]
    fn newest_wins_through_a_flush_and_an_aborted_one() {
        let mut o: Overlay<u32, u32> = Overlay::new(64);
        o.cache(1, v(10));
        o.put(1, v(11));
        o.begin();
        o.put(1, v(12));
        o.put(2, None);
        assert_eq!(o.get(&1), Some(v(12)));
        o.abort();
        o.begin();
        assert_eq!(o.flushing().get(&1), Some(&v(12)));
        o.end();
        assert_eq!((o.get(&1), o.get(&2), o.get(&3)), (Some(v(12)), Some(None), None));
        assert_eq!(o.dirty_len(), 0);
    }

    #[test]
    fn a_flushed_record_replaces_an_older_cached_one() {
        let mut o: Overlay<u32, u32> = Overlay::new(32);
        o.cache(0, v(1));
        for i in 1..16 {
            o.cache(i, None); // record 0 is in the old generation now
        }
        o.put(0, v(2));
        o.begin();
        o.end();
        for i in 100..114 {
            o.cache(i, None);
        }
        assert_eq!(o.get(&0), Some(v(2)));
    }

    #[test]
    fn the_cache_is_bounded_and_changes_are_not() {
        let mut o: Overlay<u32, u32> = Overlay::new(32);
        for i in 0..1000 {
            o.cache(i, v(i));
            o.put(i + 5000, v(i));
        }
        assert!(o.young.len() + o.old.len() <= 32);
        assert_eq!(o.dirty_len(), 1000);
        let (page, more) = o.changed(Bound::Excluded(5009), Bound::Unbounded, 3);
        assert_eq!((page.into_keys().collect::<Vec<_>>(), more), (vec![5010, 5011, 5012], true));
        let (page, more) = o.changed(Bound::Excluded(5997), Bound::Excluded(6000), 3);
        assert_eq!((page.len(), more), (2, false));
    }
}
