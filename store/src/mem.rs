//! The store in memory, for the simulator and tests: every read, commit and crash is exact and
//! repeatable.
//!
//! Each key holds its versions (commit number and value). So a snapshot is a commit number, and a
//! crash drops all versions above a number: a power loss may take whole commits made since the last
//! sync, newest first. Versions that neither a snapshot nor a crash can reach are dropped when a
//! key is written and at each sync.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Bound,
    sync::Arc,
};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};

use crate::{Batch, MetaStore, Pair, PairIter, Reader, check_key, is_empty_range};

/// Pairs an iterator takes from the map at a time, so that it holds no lock between calls.
const PAGE: usize = 64;

/// What [`MemStore::fail_next`] makes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// `get`, and the next page of a range.
    Read,
    /// `commit` and `clear`: nothing of the batch becomes visible.
    Commit,
    /// `sync`: unsynced commits stay unsynced.
    Sync,
}

/// A [`MetaStore`] in memory. Clones share the contents, so a simulated machine keeps one across
/// restarts of its process.
#[derive(Clone, Default)]
pub struct MemStore {
    inner: Arc<Mutex<Inner>>,
}

type Versions = Vec<(u64, Option<Bytes>)>;

#[derive(Default)]
struct Inner {
    map: BTreeMap<Bytes, Versions>,
    /// Number of the last commit, and of the last one that is durable.
    last: u64,
    synced: u64,
    /// Keys of each commit after `synced`, oldest first.
    unsynced: VecDeque<Vec<Bytes>>,
    /// `sync` does nothing.
    skip_sync: bool,
    /// Keys with versions that only a snapshot or a crash can reach, or with only a deletion.
    dirty: BTreeSet<Bytes>,
    snapshots: BTreeMap<u64, usize>,
    faults: BTreeMap<Fault, (u64, Code)>,
    /// Keys whose values cannot be read until they are written anew.
    spoilt: BTreeSet<Bytes>,
    bytes: u64,
}

impl MemStore {
    /// An empty store.
    pub fn new() -> MemStore {
        MemStore::default()
    }

    /// Loses power. `keep` receives the number of unsynced commits and returns how many of them,
    /// counted from the oldest, reached the disk all the same. Snapshots opened before must not be
    /// used any more.
    pub fn crash(&self, keep: impl FnOnce(usize) -> usize) {
        let mut s = self.inner.lock();
        let unsynced = s.unsynced.len();
        let keep = keep(unsynced).min(unsynced);
        let cut = s.synced + keep as u64;
        for key in s.unsynced.split_off(keep).into_iter().flatten() {
            s.edit(key, |versions| versions.retain(|(n, _)| *n <= cut));
        }
        s.last = cut;
        s.faults.clear();
        s.mark_synced();
    }

    /// From now on syncs are acknowledged but do nothing, like a build that forgot its fsync: for
    /// tests that must notice.
    pub fn skip_sync(&self) {
        self.inner.lock().skip_sync = true;
    }

    /// Makes the next `n` operations of a kind fail with `code`, as a full (`NoSpc`) or broken
    /// (`Io`) disk does. 0 ends it.
    pub fn fail_next(&self, what: Fault, n: u64, code: Code) {
        self.inner.lock().faults.insert(what, (n, code));
    }

    /// Inverts one bit in the value of one key that `these` accepts, as a decaying medium does
    /// without the store's checksums noticing: reads return the wrong bytes. `dice` picks value and
    /// bit. Returns the key; `None` if no key fits.
    pub fn flip(&self, dice: u64, these: impl Fn(&[u8]) -> bool) -> Option<Bytes> {
        let mut s = self.inner.lock();
        let (key, len) = s.pick(dice, these)?;
        let bit = (dice >> 20) as usize % (len * 8);
        s.edit(key.clone(), |versions| {
            if let Some((_, Some(value))) = versions.last_mut() {
                let mut bytes = value.to_vec();
                bytes[bit / 8] ^= 1 << (bit % 8);
                *value = bytes.into();
            }
        });
        Some(key)
    }

    /// Makes the value of one key that `these` accepts unreadable (`Corrupt`) until it is written
    /// again, like a store whose own checksum does not match. `dice` picks the value. Returns the
    /// key; `None` if no key fits.
    pub fn spoil(&self, dice: u64, these: impl Fn(&[u8]) -> bool) -> Option<Bytes> {
        let mut s = self.inner.lock();
        let (key, _) = s.pick(dice, these)?;
        s.spoilt.insert(key.clone());
        Some(key)
    }

    /// Commits that a crash could lose.
    pub fn unsynced(&self) -> usize {
        self.inner.lock().unsynced.len()
    }

    fn view(&self) -> MemView {
        let mut s = self.inner.lock();
        let at = s.last;
        *s.snapshots.entry(at).or_default() += 1;
        MemView { inner: self.inner.clone(), at }
    }
}

impl Inner {
    fn fault(&mut self, what: Fault) -> Result<()> {
        match self.faults.get_mut(&what) {
            Some((n, code)) if *n > 0 => {
                *n -= 1;
                Err(Error::new(*code, format!("injected fault: {what:?} fails")))
            }
            _ => Ok(()),
        }
    }

    /// Picks a key that `these` accepts and that has a value; also returns the value's length.
    fn pick(&self, dice: u64, these: impl Fn(&[u8]) -> bool) -> Option<(Bytes, usize)> {
        let live = |(k, v): (&Bytes, &Versions)| Some((k.clone(), v.last()?.1.as_ref()?.len()));
        let all: Vec<_> = self
            .map
            .iter()
            .filter(|(k, _)| these(k))
            .filter_map(live)
            .filter(|(_, len)| *len > 0)
            .collect();
        all.get((dice & 0xf_ffff) as usize % all.len().max(1)).cloned()
    }

    fn readable(&self, key: &[u8]) -> Result<()> {
        match self.spoilt.contains(key) {
            true => Err(Error::new(Code::Corrupt, format!("the checksum of {key:02x?} is wrong"))),
            false => Ok(()),
        }
    }

    /// The oldest commit number that a snapshot or a crash can still reach.
    fn oldest_view(&self) -> u64 {
        self.snapshots.keys().next().map_or(self.synced, |s| self.synced.min(*s))
    }

    /// Changes a key's versions, keeping the byte count and the map free of empty entries.
    fn edit(&mut self, key: Bytes, change: impl FnOnce(&mut Versions)) {
        let size = |v: &Versions| {
            v.iter()
                .map(|(_, value)| (key.len() + value.as_ref().map_or(0, Bytes::len)) as u64)
                .sum::<u64>()
        };
        let mut versions = self.map.remove(&key).unwrap_or_default();
        let before = size(&versions);
        change(&mut versions);
        self.bytes = self.bytes - before + size(&versions);
        if versions.is_empty() {
            self.dirty.remove(&key);
            return;
        }
        if versions.len() > 1 || versions[0].1.is_none() {
            self.dirty.insert(key.clone());
        } else {
            self.dirty.remove(&key);
        }
        self.map.insert(key, versions);
    }

    fn prune(&mut self, key: Bytes) {
        let oldest = self.oldest_view();
        self.edit(key, |versions| {
            let visible = versions.iter().rposition(|(n, _)| *n <= oldest).unwrap_or(0);
            versions.drain(..visible);
            if versions.len() == 1 && versions[0].1.is_none() && versions[0].0 <= oldest {
                versions.clear();
            }
        });
    }

    fn apply(&mut self, ops: BTreeMap<Bytes, Option<Bytes>>) {
        self.last += 1;
        let n = self.last;
        let mut keys = Vec::with_capacity(ops.len());
        for (key, value) in ops {
            keys.push(key.clone());
            self.spoilt.remove(&key);
            self.edit(key.clone(), |versions| versions.push((n, value)));
            self.prune(key);
        }
        self.unsynced.push_back(keys);
    }

    fn mark_synced(&mut self) {
        self.synced = self.last;
        self.unsynced.clear();
        for key in self.dirty.clone() {
            self.prune(key);
        }
    }

    fn get(&self, key: &[u8], at: u64) -> Option<Bytes> {
        visible(self.map.get(key)?, at)
    }

    fn page(&self, from: Bound<&[u8]>, to: Bound<&[u8]>, at: u64) -> VecDeque<Pair> {
        let live = |(k, v): (&Bytes, &Versions)| Some((k.clone(), visible(v, at)?));
        self.map.range::<[u8], _>((from, to)).filter_map(live).take(PAGE).collect()
    }
}

fn visible(versions: &Versions, at: u64) -> Option<Bytes> {
    versions.iter().rev().find(|(n, _)| *n <= at).and_then(|(_, v)| v.clone())
}

/// The store as it was after commit `at`.
struct MemView {
    inner: Arc<Mutex<Inner>>,
    at: u64,
}

impl Drop for MemView {
    fn drop(&mut self) {
        let mut s = self.inner.lock();
        if let Some(n) = s.snapshots.get_mut(&self.at) {
            *n -= 1;
            if *n == 0 {
                s.snapshots.remove(&self.at);
            }
        }
    }
}

struct MemIter<V> {
    view: V,
    from: Bound<Bytes>,
    to: Bound<Bytes>,
    page: VecDeque<Result<Pair>>,
    done: bool,
}

impl<V: std::borrow::Borrow<MemView>> MemIter<V> {
    fn new(view: V, from: Bound<&[u8]>, to: Bound<&[u8]>) -> MemIter<V> {
        let done = is_empty_range(from, to);
        MemIter {
            view,
            from: from.map(Bytes::copy_from_slice),
            to: to.map(Bytes::copy_from_slice),
            page: VecDeque::new(),
            done,
        }
    }

    fn refill(&mut self) -> Result<()> {
        let view = self.view.borrow();
        let mut s = view.inner.lock();
        s.fault(Fault::Read)?;
        let page = s.page(as_slice(&self.from), as_slice(&self.to), view.at);
        match page.back() {
            Some((last, _)) if page.len() == PAGE => self.from = Bound::Excluded(last.clone()),
            _ => self.done = true,
        }
        self.page = page.into_iter().map(|(k, v)| s.readable(&k).map(|()| (k, v))).collect();
        if is_empty_range(as_slice(&self.from), as_slice(&self.to)) {
            self.done = true;
        }
        Ok(())
    }
}

fn as_slice(b: &Bound<Bytes>) -> Bound<&[u8]> {
    b.as_ref().map(|k| &k[..])
}

impl<V: std::borrow::Borrow<MemView>> Iterator for MemIter<V> {
    type Item = Result<Pair>;

    fn next(&mut self) -> Option<Result<Pair>> {
        if self.page.is_empty()
            && !self.done
            && let Err(e) = self.refill()
        {
            self.done = true;
            return Some(Err(e));
        }
        self.page.pop_front()
    }
}

impl Reader for MemView {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        let mut s = self.inner.lock();
        s.fault(Fault::Read)?;
        s.readable(key)?;
        Ok(s.get(key, self.at))
    }

    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        Box::new(MemIter::new(self, from, to))
    }
}

impl Reader for MemStore {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        let mut s = self.inner.lock();
        s.fault(Fault::Read)?;
        s.readable(key)?;
        Ok(s.get(key, s.last))
    }

    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        Box::new(MemIter::new(self.view(), from, to))
    }
}

impl MetaStore for MemStore {
    fn commit(&self, batch: Batch) -> Result<()> {
        let mut ops = BTreeMap::new();
        for (key, value) in batch.ops {
            check_key(&key)?;
            ops.insert(key, value);
        }
        let mut s = self.inner.lock();
        s.fault(Fault::Commit)?;
        if !ops.is_empty() {
            s.apply(ops);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        let mut s = self.inner.lock();
        s.fault(Fault::Sync)?;
        if !s.skip_sync {
            s.mark_synced();
        }
        Ok(())
    }

    fn snapshot(&self) -> Result<Box<dyn Reader>> {
        Ok(Box::new(self.view()))
    }

    fn disk_bytes(&self) -> u64 {
        self.inner.lock().bytes
    }

    fn clear(&self) -> Result<()> {
        let mut s = self.inner.lock();
        s.fault(Fault::Commit)?;
        s.spoilt.clear();
        let all = s.map.keys().map(|k| (k.clone(), None)).collect();
        s.apply(all);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(s: &MemStore, k: &str, v: &str) {
        let mut b = Batch::default();
        b.put(k.to_string(), v.to_string());
        s.commit(b).unwrap();
    }

    fn all(r: &dyn Reader) -> Vec<(String, String)> {
        let text = |b: Bytes| String::from_utf8(b.to_vec()).unwrap();
        r.prefix(b"").map(|p| p.unwrap()).map(|(k, v)| (text(k), text(v))).collect()
    }

    /// One history of commits; each run does a part of it.
    fn history(s: &MemStore, part: std::ops::Range<usize>) {
        for i in part {
            match i % 4 {
                0 => put(s, &format!("k{}", i % 8), &i.to_string()),
                1 => {
                    let mut b = Batch::default();
                    b.delete(format!("k{}", (i - 1) % 8));
                    b.put("x", i.to_string());
                    s.commit(b).unwrap();
                }
                2 => put(s, "y", &i.to_string()),
                _ if i % 16 == 3 => s.clear().unwrap(),
                _ => put(s, "z", &i.to_string()),
            }
        }
    }

    #[test]
    fn a_crash_keeps_the_synced_commits_and_a_prefix_of_the_others() {
        for synced in [0, 1, 7, 20] {
            for keep in 0..=20 {
                let (s, want) = (MemStore::new(), MemStore::new());
                history(&want, 0..synced + keep);
                history(&s, 0..synced);
                s.sync().unwrap();
                history(&s, synced..40);
                assert_eq!(s.unsynced(), 40 - synced);
                s.crash(|_| keep);
                assert_eq!(all(&s), all(&want), "synced {synced}, kept {keep}");
                want.sync().unwrap();
                assert_eq!((s.unsynced(), s.disk_bytes()), (0, want.disk_bytes()));
                put(&s, "after", "1");
                s.crash(|n| n);
                assert!(s.get(b"after").unwrap().is_some());
            }
        }
    }

    #[test]
    fn nothing_piles_up() {
        let s = MemStore::new();
        for i in 0..1000 {
            put(&s, "k", &i.to_string());
            put(&s, &format!("t{i}"), "v");
            let mut b = Batch::default();
            b.delete(format!("t{i}"));
            s.commit(b).unwrap();
            let view = s.snapshot().unwrap();
            s.sync().unwrap();
            drop(view);
        }
        s.sync().unwrap();
        let inner = s.inner.lock();
        assert_eq!((inner.map.len(), inner.dirty.len(), inner.snapshots.len()), (1, 0, 0));
        assert_eq!(inner.bytes, 4);
    }

    #[test]
    fn what_decays_is_wrong_or_cannot_be_read_until_it_is_written_anew() {
        let s = MemStore::new();
        (0..200).for_each(|i| put(&s, &format!("k{i:03}"), "value"));
        s.sync().unwrap();
        let key = s.flip(77 << 20 | 5, |k| k.starts_with(b"k1")).unwrap();
        assert_eq!((&key[..], s.flip(1, |k| k.starts_with(b"x"))), (&b"k105"[..], None));
        let wrong = s.get(&key).unwrap().unwrap();
        assert_eq!(wrong.iter().zip(b"value").map(|(a, b)| (a ^ b).count_ones()).sum::<u32>(), 1);
        s.crash(|n| n);
        assert_eq!(s.get(&key).unwrap().unwrap(), wrong, "it stays so");
        let view = s.snapshot().unwrap();
        let key = s.spoil(70, |_| true).unwrap();
        assert_eq!(
            (s.get(&key).unwrap_err().code, view.get(&key).unwrap_err().code),
            (Code::Corrupt, Code::Corrupt)
        );
        assert!(s.get(b"k071").is_ok());
        let read: Vec<_> = s.prefix(b"k").collect();
        assert!(
            read.len() == 200
                && read.iter().filter(|r| r.is_err()).count() == 1
                && read[70].is_err()
        );
        put(&s, "k070", "new");
        assert_eq!(
            (&s.get(&key).unwrap().unwrap()[..], s.prefix(b"k").all(|r| r.is_ok())),
            (&b"new"[..], true)
        );
        s.spoil(70, |_| true).unwrap();
        s.clear().unwrap();
        assert!(s.get(&key).unwrap().is_none());
    }

    #[test]
    fn injected_faults_change_nothing_and_end() {
        let s = MemStore::new();
        put(&s, "a", "1");
        s.fail_next(Fault::Commit, 2, Code::NoSpc);
        for _ in 0..2 {
            let mut b = Batch::default();
            b.put("a", "2");
            assert_eq!(s.commit(b).unwrap_err().code, Code::NoSpc);
        }
        assert_eq!(&s.get(b"a").unwrap().unwrap()[..], b"1");
        put(&s, "a", "3");
        s.fail_next(Fault::Sync, 1, Code::Io);
        assert_eq!(s.sync().unwrap_err().code, Code::Io);
        assert_eq!(s.unsynced(), 2);
        s.fail_next(Fault::Read, 1, Code::Io);
        assert!(s.get(b"a").is_err());
        assert!(s.get(b"a").is_ok());
        s.fail_next(Fault::Read, 1, Code::Io);
        let got: Vec<_> = s.prefix(b"").collect();
        assert!(got.len() == 1 && got[0].is_err());
    }
}
