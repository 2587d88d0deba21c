//! The locked ranges of recently used files, in memory. Until it compacts, the store steps over
//! every removed version of a record, so a file whose ranges are locked and unlocked all the time
//! would become ever slower. The cache always equals the store: both change together, while nothing
//! reads.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    iter,
    ops::Bound,
    sync::Arc,
};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::{Ino, Result};
use strake_store::{Batch, MetaStore, Pair, PairIter, Reader};

use crate::namespace::keys;

/// Most records of all files together, of about 200 bytes each; a file counts as one more.
const MOST: usize = 131_072;
/// The part of a key that names the file: prefix and inode.
const FILE: usize = 9;

/// Records of one file.
type Records = Arc<BTreeMap<Bytes, Bytes>>;

/// See the module.
#[derive(Default)]
pub(crate) struct LockCache(Mutex<Files>);

#[derive(Default)]
struct Files {
    of: HashMap<Ino, Records>,
    /// Files in the order in which they were loaded: the oldest is dropped first.
    order: VecDeque<Ino>,
    records: usize,
}

/// The file of a lock's key, or of the key of its place in the index.
fn file(key: &[u8]) -> Option<Ino> {
    let is_lock = matches!(key.first(), Some(&(keys::LOCK | keys::LOCK_INDEX)));
    key.get(..FILE).filter(|_| is_lock).and_then(keys::last_number)
}

fn load(store: &dyn MetaStore, ino: Ino) -> Result<Records> {
    let [locks, index] = [keys::LOCK, keys::LOCK_INDEX].map(|p| keys::numbered(p, ino));
    let all = store.prefix(&locks).chain(store.prefix(&index));
    all.collect::<Result<BTreeMap<_, _>>>().map(Arc::new)
}

impl Files {
    fn add(&mut self, ino: Ino, records: Records) {
        let more = records.len() + 1;
        if self.of.insert(ino, records).is_some() {
            return;
        }
        self.order.push_back(ino);
        self.records += more;
        self.shrink(ino);
    }

    /// Drops other files until there is space; one file always has it.
    fn shrink(&mut self, but: Ino) {
        while self.records > MOST && self.order.len() > 1 {
            let Some(first) = self.order.pop_front() else { return };
            if first == but {
                self.order.push_back(first);
            } else if let Some(gone) = self.of.remove(&first) {
                self.records -= gone.len() + 1;
            }
        }
    }

    fn change(&mut self, ino: Ino, key: &Bytes, value: Option<&Bytes>) {
        let Some(records) = self.of.get_mut(&ino) else { return };
        let records = Arc::make_mut(records);
        let before = records.len();
        match value {
            Some(v) => drop(records.insert(key.clone(), v.clone())),
            None => drop(records.remove(key)),
        }
        self.records = self.records + records.len() - before;
        self.shrink(ino);
    }
}

impl LockCache {
    /// To be called after a commit, before anything reads again.
    pub(crate) fn committed<'a>(&self, ops: impl Iterator<Item = &'a (Bytes, Option<Bytes>)>) {
        let mut files = self.0.lock();
        for (key, value) in ops {
            if let Some(ino) = file(key) {
                files.change(ino, key, value.as_ref());
            }
        }
    }

    /// The store was replaced.
    pub(crate) fn clear(&self) {
        *self.0.lock() = Files::default();
    }

    fn of(&self, store: &dyn MetaStore, ino: Ino) -> Result<Records> {
        if let Some(known) = self.0.lock().of.get(&ino) {
            return Ok(known.clone());
        }
        let records = load(store, ino)?;
        self.0.lock().add(ino, records.clone());
        Ok(records)
    }
}

/// The part of a batch for [`LockCache::committed`].
pub(crate) fn of_locks(batch: &Batch) -> Vec<(Bytes, Option<Bytes>)> {
    batch.ops.iter().filter(|(key, _)| file(key).is_some()).cloned().collect()
}

/// The store read through the cache. No commit may happen while this is used.
pub(crate) struct Cached<'a> {
    pub store: &'a dyn MetaStore,
    pub cache: &'a LockCache,
}

impl Reader for Cached<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.store.get(key)
    }

    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        let ino = match (from, to) {
            (Bound::Included(from) | Bound::Excluded(from), Bound::Excluded(to)) => {
                // The range may end at most with the first key after the file's keys.
                let ino = file(from);
                ino.filter(|_| {
                    strake_store::prefix_end(&from[..FILE]).is_some_and(|end| to <= &end[..])
                })
            }
            _ => None,
        };
        let Some(ino) = ino else { return self.store.range(from, to) };
        match self.cache.of(self.store, ino) {
            Ok(records) => Box::new(pairs(
                records,
                from.map(Bytes::copy_from_slice),
                to.map(Bytes::copy_from_slice),
            )),
            Err(e) => Box::new(iter::once(Err(e))),
        }
    }
}

fn pairs(
    records: Records,
    mut from: Bound<Bytes>,
    to: Bound<Bytes>,
) -> impl Iterator<Item = Result<Pair>> + Send {
    iter::from_fn(move || {
        let bounds = (from.as_ref().map(|b| &b[..]), to.as_ref().map(|b| &b[..]));
        let is_none = matches!(bounds, (Bound::Included(a) | Bound::Excluded(a), Bound::Excluded(b)) if a >= b);
        let (key, value) = if is_none { None } else { records.range::<[u8], _>(bounds).next() }?;
        from = Bound::Excluded(key.clone());
        Some(Ok((key.clone(), value.clone())))
    })
}

#[cfg(test)]
mod tests {
    use strake_proto::pb::LockKind::LockPosix;
    use strake_store::{MemStore, prefix_end};

    use super::*;

    fn key(ino: Ino, end: u64) -> Bytes {
        keys::lock_range(ino, 1, 1, LockPosix, end)
    }

    fn commit(store: &MemStore, cache: &LockCache, ops: Vec<(Bytes, Option<Bytes>)>) {
        let batch = Batch { ops };
        let locks = of_locks(&batch);
        store.commit(batch).unwrap();
        cache.committed(locks.iter());
    }

    #[test]
    fn it_shows_what_the_store_has() {
        let (store, cache) = (MemStore::new(), LockCache::default());
        let mut seed = 5u64;
        let mut rnd = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        for round in 0..2000 {
            let ops = (0..rnd(4)).map(|_| {
                let (ino, end) = (rnd(3), rnd(20));
                let index = keys::lock_index(ino, LockPosix, (true, 0), end, 1, 1);
                let key = if rnd(2) == 0 { key(ino, end) } else { index };
                (key, (rnd(2) == 0).then(|| Bytes::from(vec![round as u8])))
            });
            commit(&store, &cache, ops.collect());
            let cached = Cached { store: &store, cache: &cache };
            let (ino, a, b) = (rnd(3), rnd(20), rnd(20));
            let (from, to) = (key(ino, a), key(ino, b));
            let end = prefix_end(&from[..FILE]);
            let all = |r: &dyn Reader, from, to| {
                r.range(from, to).map(Result::unwrap).collect::<Vec<_>>()
            };
            for (from, to) in [
                (Bound::Included(&from[..]), Bound::Excluded(&to[..])),
                (Bound::Excluded(&from[..]), Bound::Excluded(&to[..])),
                (Bound::Included(&from[..]), Bound::Excluded(end.as_deref().unwrap())),
                (Bound::Included(&from[..FILE]), Bound::Unbounded),
                (Bound::Included(&[keys::LOCK_INDEX][..]), Bound::Excluded(&[keys::LOCK + 1][..])),
            ] {
                assert_eq!(all(&cached, from, to), all(&store, from, to));
            }
            if rnd(50) == 0 {
                cache.clear();
            }
        }
    }

    #[test]
    fn it_is_bounded() {
        let (store, cache) = (MemStore::new(), LockCache::default());
        let each = MOST as u64 / 10;
        for ino in 0..30 {
            commit(
                &store,
                &cache,
                (0..each).map(|end| (key(ino, end), Some(Bytes::new()))).collect(),
            );
            let cached = Cached { store: &store, cache: &cache };
            assert_eq!(cached.prefix(&keys::numbered(keys::LOCK, ino)).count() as u64, each);
            assert!(cache.0.lock().records <= MOST);
        }
        let files = cache.0.lock();
        #[allow(clippy::disallowed_methods, reason = "a sum has no order")]
        let records = files.of.values().map(|r| r.len() + 1).sum::<usize>();
        assert_eq!(files.records, records);
        assert!(files.of.len() == files.order.len() && files.of.contains_key(&29));
    }
}
