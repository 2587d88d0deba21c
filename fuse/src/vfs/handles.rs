//! Handle numbers for files and directories that the kernel has open.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::RwLock;
use strake_proto::{Code, Error, Result};

use crate::handover::HandoverMemory;

/// Numbers that are never used twice during the life of a mount, across all its daemons.
#[derive(Default)]
pub(super) struct Numbering {
    given: AtomicU64,
    keep: Option<Arc<HandoverMemory>>,
}

/// The word of the handover memory with the count of numbers given out.
const KEPT_COUNT: usize = 0;

impl Numbering {
    pub(super) fn new(keep: Option<Arc<HandoverMemory>>) -> Numbering {
        Numbering { given: AtomicU64::new(0), keep }
    }

    /// The next number; the first one is 1.
    pub(super) fn next(&self) -> u64 {
        let given = self.keep.as_ref().map_or(&self.given, |k| k.mount_word(KEPT_COUNT));
        given.fetch_add(1, Ordering::Relaxed) + 1
    }
}

pub(super) struct Table<T> {
    open: RwLock<BTreeMap<u64, Arc<T>>>,
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table { open: RwLock::default() }
    }
}

impl<T> Table<T> {
    /// `handle` is a new number, see [`Numbering`].
    pub(super) fn insert(&self, handle: u64, value: T) {
        self.open.write().insert(handle, Arc::new(value));
    }

    /// `EBADF` for a number that is not open.
    pub(super) fn get(&self, handle: u64) -> Result<Arc<T>> {
        let found = self.open.read().get(&handle).cloned();
        found.ok_or_else(|| Error::new(Code::BadF, format!("handle {handle} is not open")))
    }

    pub(super) fn remove(&self, handle: u64) -> Option<Arc<T>> {
        self.open.write().remove(&handle)
    }

    pub(super) fn all(&self) -> Vec<Arc<T>> {
        self.open.read().values().cloned().collect()
    }

    pub(super) fn any(&self, is: impl Fn(&T) -> bool) -> bool {
        self.open.read().values().any(|t| is(t))
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
        let keep = HandoverMemory::create([1; 16], 1 << 22).unwrap();
        let (mine, first) = (Numbering::default(), Numbering::new(Some(keep.clone())));
        assert_eq!((mine.next(), mine.next(), first.next()), (1, 2, 1));
        assert_eq!(Numbering::new(Some(keep)).next(), 2, "the next daemon goes on");
    }

    #[test]
    fn what_is_removed_is_gone() {
        let t = Table::default();
        let (a, b) = (1, 2);
        t.insert(a, 'a');
        t.insert(b, 'b');
        assert_eq!((*t.get(a).unwrap(), *t.get(b).unwrap()), ('a', 'b'));
        assert!(t.remove(a).is_some() && t.remove(a).is_none());
        assert_eq!(t.get(a).unwrap_err().code, Code::BadF);
        assert_eq!(t.drain().len(), 1);
        assert!(t.get(b).is_err());
    }
}
