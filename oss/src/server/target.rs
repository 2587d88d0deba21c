//! One target in this run of the server: its engine, and what is known of its health.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::{ChainId, Code, Error, Result, TargetId, pb};
use tokio::sync::Semaphore;

use super::{
    backpressure::{Foreground, ResyncSources},
    damage::Damage,
    scrub::Scrub,
};
use crate::engine::{Engine, Position};

/// With less free space than this, an update is staged before it is forwarded.
const LITTLE_SPACE: u64 = 256 << 20;
/// How long a chunk table refuses writes before other servers are told.
const TABLE_FULL: Duration = Duration::from_secs(1);
/// Chunks of one target that are repaired at a time.
const REPAIRS: usize = 4;

/// See the module.
pub(super) struct Target {
    pub engine: Arc<Engine>,
    /// A random number of this run, which acknowledgements carry.
    pub boot_id: u64,
    pub damage: Damage,
    pub scrub: Scrub,
    /// Limits how many chunks repairs have in memory.
    pub repairs: Semaphore,
    pub foreground: Arc<Foreground>,
    pub resync_sources: ResyncSources,
    /// `TARGET_UNASSIGNED` until registered.
    id: AtomicU32,
    failed: AtomicBool,
    /// Why its chunk table cannot be read, if so.
    unreadable: Mutex<Option<Error>>,
    /// How often it has left its chains for lack of space, plus how often it returned. Odd: it is
    /// out.
    lapses: AtomicU32,
    /// Since when its chunk table refuses writes for lack of space, on the boot clock.
    table_full: Mutex<Option<Duration>>,
    /// The chains of which it is the only replica in sync.
    only_copy: Mutex<BTreeSet<ChainId>>,
}

impl Target {
    pub(super) fn new(engine: Arc<Engine>, boot_id: u64) -> Arc<Target> {
        let id = AtomicU32::new(engine.identity().target_id);
        let position = engine.notes().scrub_position().unwrap_or_else(|e| {
            tracing::warn!("the scrub begins anew: {e}");
            Position::default()
        });
        Arc::new(Target {
            damage: Damage::of(engine.clone()),
            engine,
            boot_id,
            scrub: Scrub::new(position),
            repairs: Semaphore::new(REPAIRS),
            foreground: Arc::default(),
            resync_sources: ResyncSources::default(),
            id,
            failed: AtomicBool::new(false),
            unreadable: Mutex::default(),
            lapses: AtomicU32::new(0),
            table_full: Mutex::default(),
            only_copy: Mutex::default(),
        })
    }

    pub(super) fn id(&self) -> TargetId {
        self.id.load(Ordering::Acquire)
    }

    pub(super) fn set_id(&self, id: TargetId) {
        self.id.store(id, Ordering::Release);
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// A replica lacks what its successor has. If for lack of space, the target is out until there
    /// is space. Otherwise it is out for good.
    pub(super) fn fail(&self, why: &Error) {
        if why.code == Code::NoSpc {
            let is_in = |n: u32| n.is_multiple_of(2).then_some(n + 1);
            if self.lapses.fetch_update(Ordering::AcqRel, Ordering::Acquire, is_in).is_ok() {
                tracing::error!(
                    "target {} leaves its chains until there is space: {why}",
                    self.id()
                );
            }
        } else if !self.failed.swap(true, Ordering::AcqRel) {
            tracing::error!("target {} has failed and leaves its chains: {why}", self.id());
        }
    }

    /// The chunk table itself cannot be read in places, which no copy of a chunk repairs. If all
    /// its chains can continue without it, the target leaves them, and comes back empty if the
    /// table is damaged (`refused_targets.rs`). Otherwise it serves what it can.
    pub(super) fn cannot_look(&self, e: &Error) {
        if matches!(e.code, Code::Corrupt | Code::Io) && !self.is_last() {
            if e.code == Code::Corrupt {
                self.unreadable.lock().get_or_insert_with(|| e.clone());
            }
            self.fail(e);
        }
    }

    /// Why its chunk table cannot be read, if so. The target is taken out of service once nothing
    /// on it is needed.
    pub(super) fn unreadable(&self) -> Option<Error> {
        self.unreadable.lock().clone()
    }

    /// Whether it is the only in-sync replica of a chain that ever stored something on it.
    fn is_last(&self) -> bool {
        let only_copy = self.only_copy.lock();
        !only_copy.is_empty()
            && self
                .engine
                .used()
                .is_none_or(|used| only_copy.iter().any(|chain| used.contains(chain)))
    }

    /// Notes whether it is the only replica of a chain that is in sync.
    pub(super) fn note_only_copy(&self, chain: ChainId, is_only: bool) {
        let mut only_copy = self.only_copy.lock();
        if is_only {
            only_copy.insert(chain);
        } else {
            only_copy.remove(&chain);
        }
    }

    pub(super) fn lapses(&self) -> u32 {
        self.lapses.load(Ordering::Acquire)
    }

    pub(super) fn lacks_space(&self) -> bool {
        self.lapses() % 2 == 1
    }

    /// `NotServing` if this target is out. It holds before the mds is told, because from then on
    /// the target may be behind in each of its chains.
    pub(super) fn check_in(&self) -> Result<()> {
        if self.failed() || self.lacks_space() {
            return Err(Error::new(
                Code::NotServing,
                format!("target {} has left its chains", self.id()),
            ));
        }
        Ok(())
    }

    /// There is space again: if the target was out for lack of it, it may come back.
    pub(super) fn has_space_again(&self) {
        let is_out = |n: u32| (n % 2 == 1).then_some(n + 1);
        if self.lapses.fetch_update(Ordering::AcqRel, Ordering::Acquire, is_out).is_ok() {
            tracing::info!("target {} has space again and rejoins its chains", self.id());
        }
    }

    /// Notes the result of the latest flush.
    pub(super) fn flushed(&self, now: Duration, result: &Result<()>) {
        let mut full = self.table_full.lock();
        match result {
            Err(e) if e.code == Code::NoSpc => *full = full.or(Some(now)),
            _ => *full = None,
        }
        drop(full);
        if let Err(e) = result {
            self.note(e);
        }
    }

    /// Whether its chunk table has refused writes for lack of space for a while.
    pub(super) fn table_is_full(&self, now: Duration) -> bool {
        self.table_full.lock().is_some_and(|since| now.saturating_sub(since) >= TABLE_FULL)
    }

    /// Notes an error of the engine: an error of the device takes the target out.
    pub(super) fn note(&self, e: &Error) {
        if e.code == Code::Io {
            self.fail(e);
        }
    }

    /// Latencies of its device.
    pub(super) fn times(&self) -> pb::DeviceTimes {
        let device = self.engine.device();
        pb::DeviceTimes { rotates: device.rotates(), ..device.meter().summary() }
    }

    /// Whether updates may be forwarded before they are staged here.
    pub(super) fn has_space(&self) -> bool {
        let u = self.engine.usage();
        u.capacity.saturating_sub(u.used + u.granted) > LITTLE_SPACE.min(u.capacity / 8)
            && self.engine.device().spare() > LITTLE_SPACE
    }
}
