//! Opens that are under way: state. See `opens.rs`.

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
    /// Those for writing that were asked for and whose handles do not count yet, by rising numbers.
    /// Which file one is of may be known only by its answer.
    writing: Mutex<(u64, BTreeMap<u64, Option<Ino>>)>,
    /// Held by all that are under way, and by a reassertion on a connection that is in use.
    pub gate: Arc<RwLock<()>>,
    /// Reassertions that did not wait any longer for those under way.
    pub beside: AtomicUsize,
}

impl Openings {
    pub fn begin(&self, ino: Option<Ino>) -> u64 {
        let (last, under_way) = &mut *self.writing.lock();
        *last += 1;
        under_way.insert(*last, ino);
        *last
    }

    /// An open of this number, or of no number, is under way.
    pub fn opening(
        self: &Arc<Self>,
        since: u64,
        number: Option<u64>,
        gate: OwnedRwLockReadGuard<()>,
    ) -> Opening {
        Opening { openings: self.clone(), since, number, _gate: gate }
    }

    /// The number of the last one for writing.
    pub fn last(&self) -> u64 {
        self.writing.lock().0
    }

    /// Whether one for writing up to `number` is under way that may be of this file.
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

/// An open, from before it is asked for until its handle counts.
pub(crate) struct Opening {
    openings: Arc<Openings>,
    /// See [`super::service::Metadata::reassertions`]. One that never was: during this open all is
    /// told.
    pub since: u64,
    /// Of one for writing.
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
