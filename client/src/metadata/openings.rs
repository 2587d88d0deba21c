//! Opens in progress: the state. See `opens.rs`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use strake_proto::Ino;
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

#[derive(Default)]
pub(crate) struct Openings {
    /// Opens for writing that were requested and whose handles do not count yet, by rising numbers.
    /// The file of an open may be known only from its answer.
    writing: Mutex<(u64, BTreeMap<u64, Option<Ino>>)>,
    /// Held by all opens in progress, and by a reassertion on a connection that is in use.
    pub gate: Arc<RwLock<()>>,
    /// Number of reassertions that stopped waiting for opens in progress.
    pub beside: AtomicUsize,
}

impl Openings {
    pub fn begin(&self, ino: Option<Ino>) -> u64 {
        let (last, under_way) = &mut *self.writing.lock();
        *last += 1;
        under_way.insert(*last, ino);
        *last
    }

    /// An open is in progress; `number` is `None` for one that is not for writing.
    pub fn opening(
        self: &Arc<Self>,
        since: u64,
        number: Option<u64>,
        gate: OwnedRwLockReadGuard<()>,
    ) -> Opening {
        Opening { openings: self.clone(), since, number, _gate: gate }
    }

    /// The number of the last open for writing.
    pub fn last(&self) -> u64 {
        self.writing.lock().0
    }

    /// Whether an open for writing with a number up to `number` is in progress that may be of this
    /// file.
    pub fn may_open(&self, ino: Ino, number: u64) -> bool {
        self.writing.lock().1.range(..=number).any(|(_, of)| of.is_none_or(|of| of == ino))
    }
}

/// Counts one of [`Openings::beside`].
pub(crate) struct Beside<'a>(&'a AtomicUsize);

impl<'a> Beside<'a> {
    pub fn begin(n: &'a AtomicUsize) -> Beside<'a> {
        n.fetch_add(1, SeqCst);
        Beside(n)
    }
}

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// An open, from before it is requested until its handle counts.
pub(crate) struct Opening {
    openings: Arc<Openings>,
    /// See [`super::service::Metadata::reassertions`]. A value that never occurs means that a
    /// reassertion runs during this open.
    pub since: u64,
    /// The number of an open for writing.
    number: Option<u64>,
    _gate: OwnedRwLockReadGuard<()>,
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(n) = self.number {
            self.openings.writing.lock().1.remove(&n);
        }
    }
}
