//! What was found damaged on one target, by the scrub, a read, a write onto a bad block or a
//! resync. A chunk is reported when it is found damaged, and not again while it stays damaged.
//! Findings that stay open are kept on the target and survive a restart.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use strake_proto::{TargetId, data::Version, pb};

use crate::engine::{Engine, Found, Key, Look};

/// Most findings in the list; those left out are counted.
pub(super) const KEPT: usize = 1024;
/// Most chunks known as still damaged. Chunks beyond that count each time they are found.
const KEPT_OPEN: usize = 65_536;

/// A chunk that stays damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Still {
    /// Epoch of its chain at the last attempt to repair it.
    pub epoch: u64,
    /// The chunk's version then.
    pub version: Version,
    /// No in-sync replica had a good copy then: reads of the damaged part return `Corrupt`. If
    /// false, a replica could not be asked, or space was short, and the repair is tried again.
    pub lost: bool,
    /// The damaged ranges.
    pub left: Vec<Range<u32>>,
    /// Why it is not repaired.
    pub cause: String,
}

/// What became of a damaged chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Repaired from another target, or from this one's memory (`None`).
    Repaired(Option<TargetId>),
    /// Still damaged.
    Still(Still),
    /// Written anew, truncated or removed since.
    Gone,
}

#[derive(Clone, Debug)]
pub(super) struct Finding {
    pub key: Key,
    /// From the first to the last damaged byte of the chunk; the whole chunk if empty.
    pub part: Range<u32>,
    /// Bytes damaged in `part`.
    pub bytes: u32,
    /// The chunk's own record was damaged.
    pub record: bool,
    pub outcome: Outcome,
    /// When it was found, milliseconds since 1970.
    pub unix_ms: u64,
}

/// Numbers of chunks in this run of the server, including those that an earlier run left damaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Found damaged, whatever became of them.
    pub damaged: u64,
    pub repaired: u64,
    /// Those that have no good copy now.
    pub lost: u64,
}

#[derive(Default)]
struct Inner {
    counts: Counts,
    list: VecDeque<Finding>,
    left_out: u64,
    open: BTreeMap<Key, Still>,
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Damage {
    inner: Mutex<Inner>,
    /// Stores the findings that stay open.
    engine: Option<Arc<Engine>>,
    /// Something was stored and is not durable yet.
    unsynced: AtomicBool,
}

impl Damage {
    /// Begins with the findings of earlier runs of the server.
    pub(super) fn of(engine: Arc<Engine>) -> Damage {
        let mut inner = Inner::default();
        for (key, found) in engine.notes().findings(KEPT_OPEN) {
            let Found { lost, record, part, bytes, unix_ms, epoch, version, left, cause } = found;
            let still = Still { epoch, version, lost, left, cause };
            inner.open.insert(key, still.clone());
            inner.add(Finding {
                key,
                part,
                bytes,
                record,
                outcome: Outcome::Still(still),
                unix_ms,
            });
        }
        let (damaged, lost) = (inner.open.len() as u64, inner.lost());
        inner.counts = Counts { damaged, repaired: 0, lost };
        if damaged > 0 {
            let name = engine.device().name();
            tracing::warn!(
                "{name}: {damaged} chunks were found damaged before, {lost} of them without a good copy"
            );
        }
        Damage { inner: Mutex::new(inner), engine: Some(engine), unsynced: AtomicBool::new(false) }
    }

    /// Makes stored findings durable.
    pub(super) async fn sync(&self) {
        let Some(engine) =
            self.engine.as_ref().filter(|_| self.unsynced.swap(false, Ordering::AcqRel))
        else {
            return;
        };
        if let Err(e) = engine.notes().sync().await {
            tracing::warn!("{}: cannot record the damage found: {e}", engine.device().name());
        }
    }

    /// Stores the state of a chunk. Under the lock, so that the last state is the one that stays.
    fn keep(&self, inner: &Inner, key: &Key) {
        let Some(engine) = &self.engine else { return };
        let found = inner.open.get(key).map(|s| {
            let is_it = |f: &&Finding| f.key == *key && matches!(f.outcome, Outcome::Still(_));
            let f = inner.list.iter().rev().find(is_it);
            Found {
                lost: s.lost,
                record: f.is_some_and(|f| f.record),
                part: f.map_or(0..0, |f| f.part.clone()),
                bytes: f.map_or(0, |f| f.bytes),
                unix_ms: f.map_or(0, |f| f.unix_ms),
                epoch: s.epoch,
                version: s.version,
                left: s.left.clone(),
                cause: s.cause.clone(),
            }
        });
        match engine.notes().note_finding(key, found.as_ref()) {
            Ok(()) => self.unsynced.store(true, Ordering::Release),
            Err(e) => tracing::warn!("{key}: cannot record its damage: {e}"),
        }
    }

    /// Records a look at a damaged chunk and its outcome. Returns whether that is news.
    pub(super) fn report(&self, key: Key, look: &Look, outcome: &Outcome, unix_ms: u64) -> bool {
        let mut inner = self.inner.lock();
        let was = inner.open.get(&key).cloned();
        let before = was.as_ref().map(|s| s.lost);
        if before.is_some() {
            inner.settle(&key, outcome);
        } else {
            inner.counts.damaged += 1;
            let (first, last) = (look.damaged.first(), look.damaged.last());
            let part = first.map_or(0, |d| d.start)..last.map_or(0, |d| d.end);
            let bytes = look.damaged.iter().map(|d| d.end - d.start).sum();
            let record = look.headless || look.healed > 0;
            inner.add(Finding { key, part, bytes, record, outcome: outcome.clone(), unix_ms });
        }
        let now = match outcome {
            Outcome::Repaired(_) => {
                inner.counts.repaired += 1;
                None
            }
            Outcome::Gone => None,
            Outcome::Still(s) => {
                if before.is_some() || inner.open.len() < KEPT_OPEN {
                    inner.open.insert(key, s.clone());
                }
                Some(s.lost)
            }
        };
        inner.counts.lost = inner.lost();
        if inner.open.get(&key) != was.as_ref() {
            self.keep(&inner, &key);
        }
        before != now || now.is_none()
    }

    /// The chunk is intact, or no longer exists.
    pub(super) fn whole(&self, key: &Key) {
        let mut inner = self.inner.lock();
        if inner.open.contains_key(key) {
            inner.settle(key, &Outcome::Gone);
            inner.counts.lost = inner.lost();
            self.keep(&inner, key);
        }
    }

    /// Why the last search found no good copy of some bytes in this part of a chunk; `None` if that
    /// search was in another epoch.
    pub(super) fn lost_in(&self, key: &Key, epoch: u64, part: &Range<u32>) -> Option<String> {
        let inner = self.inner.lock();
        let still = inner.open.get(key).filter(|s| s.lost && s.epoch == epoch)?;
        let overlaps = |d: &Range<u32>| d.start < part.end && part.start < d.end;
        still.left.iter().any(overlaps).then(|| still.cause.clone())
    }

    /// Chunks that are still damaged.
    pub(super) fn open(&self) -> Vec<(Key, Still)> {
        self.inner.lock().open.iter().map(|(k, s)| (*k, s.clone())).collect()
    }

    pub(super) fn counts(&self) -> Counts {
        self.inner.lock().counts
    }

    /// The listed findings, oldest first, and how many were left out.
    pub(super) fn findings(&self) -> (Vec<pb::DamageFinding>, u64) {
        let inner = self.inner.lock();
        (inner.list.iter().map(Finding::on_the_wire).collect(), inner.left_out)
    }
}

impl Inner {
    fn lost(&self) -> u64 {
        self.open.values().filter(|s| s.lost).count() as u64
    }

    /// Updates the outcome of a chunk that was reported as damaged.
    fn settle(&mut self, key: &Key, outcome: &Outcome) {
        if matches!(outcome, Outcome::Repaired(_) | Outcome::Gone) {
            self.open.remove(key);
        }
        let is_open = |f: &&mut Finding| matches!(f.outcome, Outcome::Still(_));
        if let Some(f) = self.list.iter_mut().filter(is_open).find(|f| f.key == *key) {
            f.outcome = outcome.clone();
        }
    }

    /// Adds to the list; findings that are still open are kept the longest.
    fn add(&mut self, finding: Finding) {
        if self.list.len() >= KEPT {
            self.left_out += 1;
            let settled = self.list.iter().position(|f| !matches!(f.outcome, Outcome::Still(_)));
            let Some(at) = settled else { return };
            self.list.remove(at);
        }
        self.list.push_back(finding);
    }
}

impl Finding {
    fn on_the_wire(&self) -> pb::DamageFinding {
        let chunk = self.key.chunk;
        let (from, still) = match &self.outcome {
            Outcome::Repaired(from) => (*from, None),
            Outcome::Still(s) => (None, Some(s)),
            Outcome::Gone => (None, None),
        };
        pb::DamageFinding {
            chain: self.key.chain,
            ino: chunk.ino,
            data_id: chunk.data,
            index: chunk.index,
            offset: self.part.start,
            len: self.part.end - self.part.start,
            bytes: self.bytes,
            record: self.record,
            repaired: matches!(self.outcome, Outcome::Repaired(_)),
            lost: still.is_some_and(|s| s.lost),
            gone: self.outcome == Outcome::Gone,
            repaired_from: from,
            unix_ms: self.unix_ms,
            cause: still.map_or_else(String::new, |s| s.cause.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::ChunkId;

    use super::*;

    fn key(index: u64) -> Key {
        Key { chain: 1, chunk: ChunkId { ino: 2, data: 3, index } }
    }

    fn look() -> Look {
        Look { len: 20_000, damaged: vec![4096..8192, 16_384..20_000], ..Look::default() }
    }

    fn still(epoch: u64, lost: bool) -> Outcome {
        let cause = if lost { "no other copy" } else { "unreachable" }.to_string();
        Outcome::Still(Still {
            epoch,
            version: Version::default(),
            lost,
            left: look().damaged,
            cause,
        })
    }

    #[test]
    fn what_stays_damaged_is_reported_once_and_follows_what_becomes_of_it() {
        let d = Damage::default();
        let counts = |damaged, repaired, lost| Counts { damaged, repaired, lost };
        let news: Vec<bool> =
            (0..3).map(|_| d.report(key(1), &look(), &still(5, true), 9)).collect();
        assert_eq!((news, d.counts()), (vec![true, false, false], counts(1, 0, 1)));
        let (list, left_out) = d.findings();
        assert_eq!((list.len(), left_out), (1, 0));
        let f = &list[0];
        assert_eq!(
            (f.offset, f.len, f.bytes, f.lost, f.repaired),
            (4096, 15_904, 7712, true, false)
        );
        let lost = |epoch, part| d.lost_in(&key(1), epoch, &part);
        assert_eq!(
            (lost(5, 8000..9000).as_deref(), lost(6, 8000..9000)),
            (Some("no other copy"), None)
        );
        assert_eq!((lost(5, 8192..16_384), lost(5, 0..4096)), (None, None), "only what is damaged");
        assert!(d.report(key(1), &look(), &still(6, false), 10));
        assert_eq!((d.counts(), d.open().len()), (counts(1, 0, 0), 1));
        assert!(d.report(key(1), &look(), &Outcome::Repaired(Some(7)), 11));
        assert_eq!((d.counts(), d.open().len()), (counts(1, 1, 0), 0));
        let f = d.findings().0.remove(0);
        assert_eq!((f.repaired, f.lost, f.repaired_from, f.unix_ms), (true, false, Some(7), 9));
        // Damaged again: that is another finding.
        d.report(key(1), &look(), &still(7, true), 12);
        d.whole(&key(1));
        d.whole(&key(2));
        assert_eq!((d.counts(), d.findings().0.len()), (counts(2, 1, 0), 2));
        assert!(d.findings().0[1].gone && d.lost_in(&key(1), 7, &(0..20_000)).is_none());
    }

    #[test]
    fn the_list_is_bounded_and_keeps_what_is_damaged_still() {
        let d = Damage::default();
        for i in 0..KEPT as u64 {
            let outcome = if i % 2 == 0 { still(1, true) } else { Outcome::Repaired(None) };
            d.report(key(i), &look(), &outcome, i);
        }
        for i in 0..600 {
            d.report(key(10_000 + i), &look(), &still(1, true), i);
        }
        let (list, left_out) = d.findings();
        assert_eq!((list.len(), left_out), (KEPT, 600));
        assert!(list.iter().all(|f| f.lost));
        assert_eq!(d.counts(), Counts { damaged: 1624, repaired: 512, lost: 1112 });
    }
}
