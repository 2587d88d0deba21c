//! A wrapper of the store that notes damage, whatever the reader does with the error.

use std::{
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};
use strake_store::{Batch, MetaStore, PairIter, Reader};

/// The first damage that was found.
#[derive(Default)]
pub(super) struct Damage {
    any: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl Damage {
    /// Notes an error, if it means damage.
    pub(super) fn note(&self, e: &Error) {
        if e.code == Code::Corrupt {
            self.first.lock().get_or_insert_with(|| e.clone());
            self.any.store(true, Relaxed);
        }
    }

    pub(super) fn found(&self) -> Option<Error> {
        if self.any.load(Relaxed) { self.first.lock().clone() } else { None }
    }

    /// Forgets the damage, as the damaged data is gone.
    pub(super) fn forget(&self) {
        *self.first.lock() = None;
        self.any.store(false, Relaxed);
    }

    fn noted<T>(&self, r: Result<T>) -> Result<T> {
        r.inspect_err(|e| self.note(e))
    }

    fn noted_all<'a>(&'a self, pairs: PairIter<'a>) -> PairIter<'a> {
        Box::new(pairs.map(|pair| self.noted(pair)))
    }
}

/// See the module.
pub(super) struct Watched {
    pub store: Arc<dyn MetaStore>,
    pub damage: Arc<Damage>,
}

struct View {
    view: Box<dyn Reader>,
    damage: Arc<Damage>,
}

impl Reader for View {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.damage.noted(self.view.get(key))
    }
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        self.damage.noted_all(self.view.range(from, to))
    }
}

impl Reader for Watched {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.damage.noted(self.store.get(key))
    }
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        self.damage.noted_all(self.store.range(from, to))
    }
}

impl MetaStore for Watched {
    fn commit(&self, batch: Batch) -> Result<()> {
        self.damage.noted(self.store.commit(batch))
    }
    fn sync(&self) -> Result<()> {
        self.damage.noted(self.store.sync())
    }
    fn snapshot(&self) -> Result<Box<dyn Reader>> {
        let view = self.damage.noted(self.store.snapshot())?;
        Ok(Box::new(View { view, damage: self.damage.clone() }))
    }
    fn disk_bytes(&self) -> u64 {
        self.store.disk_bytes()
    }
    fn free_bytes(&self) -> u64 {
        self.store.free_bytes()
    }
    fn clear(&self) -> Result<()> {
        self.store.clear()
    }
}
