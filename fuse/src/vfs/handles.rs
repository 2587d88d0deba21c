//! Handle numbers for what the kernel holds open.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::RwLock;
use strake_proto::{Code, Error, Result};

pub(super) struct Table<T> {
    next: AtomicU64,
    open: RwLock<BTreeMap<u64, Arc<T>>>,
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table { next: AtomicU64::new(1), open: RwLock::default() }
    }
}

impl<T> Table<T> {
    pub(super) fn insert(&self, value: T) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(handle, Arc::new(value));
        handle
    }

    /// `EBADF` for a number that is not open.
    pub(super) fn get(&self, handle: u64) -> Result<Arc<T>> {
        let found = self.open.read().get(&handle).cloned();
        found.ok_or_else(|| Error::new(Code::BadF, format!("handle {handle} is not open")))
    }

    pub(super) fn remove(&self, handle: u64) -> Option<Arc<T>> {
        self.open.write().remove(&handle)
    }

    pub(super) fn drain(&self) -> Vec<Arc<T>> {
        std::mem::take(&mut *self.open.write()).into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_not_reused() {
        let t = Table::default();
        let (a, b) = (t.insert('a'), t.insert('b'));
        assert_eq!((*t.get(a).unwrap(), *t.get(b).unwrap()), ('a', 'b'));
        assert!(t.remove(a).is_some() && t.remove(a).is_none());
        assert_eq!(t.get(a).unwrap_err().code, Code::BadF);
        assert!(![a, b].contains(&t.insert('c')));
        assert_eq!(t.drain().len(), 2);
        assert!(t.get(b).is_err());
    }
}
