//! A real store in memory in which some records cannot be read: those whose value contains certain
//! bytes.

use std::{ops::Bound, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};
use strake_store::{Batch, MemStore, MetaStore, Pair, PairIter, Reader};

#[derive(Clone, Default)]
pub(super) struct Spoilt {
    store: MemStore,
    bad: Arc<Mutex<Vec<u8>>>,
}

struct View(Box<dyn Reader>, Arc<Mutex<Vec<u8>>>);

fn check(bad: &Mutex<Vec<u8>>, value: &[u8]) -> Result<()> {
    let bad = bad.lock();
    if !bad.is_empty() && value.windows(bad.len()).any(|w| *w == bad[..]) {
        return Err(Error::new(Code::Corrupt, "a flipped bit"));
    }
    Ok(())
}

fn get(of: &dyn Reader, bad: &Mutex<Vec<u8>>, key: &[u8]) -> Result<Option<Bytes>> {
    let value = of.get(key)?;
    value.iter().try_for_each(|v| check(bad, v))?;
    Ok(value)
}

fn range<'a>(pairs: PairIter<'a>, bad: &'a Mutex<Vec<u8>>) -> PairIter<'a> {
    Box::new(
        pairs.map(|pair: Result<Pair>| pair.and_then(|(k, v)| check(bad, &v).map(|()| (k, v)))),
    )
}

impl Spoilt {
    /// From now on, until all is replaced, records with these bytes cannot be read.
    pub(super) fn spoil(&self, bytes: &[u8]) {
        *self.bad.lock() = bytes.to_vec();
    }
}

impl Reader for View {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        get(&*self.0, &self.1, key)
    }
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        range(self.0.range(from, to), &self.1)
    }
}

impl Reader for Spoilt {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        get(&self.store, &self.bad, key)
    }
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        range(self.store.range(from, to), &self.bad)
    }
}

impl MetaStore for Spoilt {
    fn commit(&self, batch: Batch) -> Result<()> {
        self.store.commit(batch)
    }
    fn sync(&self) -> Result<()> {
        self.store.sync()
    }
    fn snapshot(&self) -> Result<Box<dyn Reader>> {
        Ok(Box::new(View(self.store.snapshot()?, self.bad.clone())))
    }
    fn disk_bytes(&self) -> u64 {
        self.store.disk_bytes()
    }
    fn clear(&self) -> Result<()> {
        self.bad.lock().clear();
        self.store.clear()
    }
}
