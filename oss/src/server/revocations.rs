//! Sessions that were evicted, rights that have ended, and the updates of sessions that are in
//! work: an eviction is over once none of the session's updates is.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::{Mutex, RwLock};
use strake_proto::{Capability, Code, Error, Result, Rights, SessionId, pb};

use super::endings::Endings;

/// Most evicted sessions remembered. Their capabilities expire long before so many more follow.
const KEPT_EVICTED: usize = 65_536;

/// Minimum epochs of evicted sessions.
#[derive(Default)]
struct Evictions {
    seen: u64,
    min_epoch: BTreeMap<SessionId, (u64, u64)>,
    order: BTreeMap<u64, SessionId>,
    /// All sessions with lower ids are evicted, by the eviction with this number.
    below: (SessionId, u64),
    /// How many updates of each session are in work.
    in_work: BTreeMap<SessionId, usize>,
}

impl Evictions {
    fn add(&mut self, e: &pb::Evicted) {
        self.seen = self.seen.max(e.number);
        if e.below {
            self.below = self.below.max((e.session, e.number));
            return;
        }
        self.min_epoch.insert(e.session, (e.min_epoch, e.number));
        self.order.insert(e.number, e.session);
        while self.order.len() > KEPT_EVICTED {
            let Some((number, session)) = self.order.pop_first() else { return };
            if self.min_epoch.get(&session).is_some_and(|(_, n)| *n == number) {
                self.min_epoch.remove(&session);
            }
        }
    }

    /// The number up to which evictions are complete here: no update of those sessions is in work
    /// any more.
    fn over(&self) -> u64 {
        let evicted_by = |session: &SessionId| {
            let one = self.min_epoch.get(session).map(|(_, number)| *number);
            one.into_iter().chain((*session < self.below.0).then_some(self.below.1)).min()
        };
        let first = self.in_work.keys().filter_map(evicted_by).min();
        first.map_or(self.seen, |number| self.seen.min(number.saturating_sub(1)))
    }
}

/// See the module.
pub(super) struct Revocations {
    evictions: Mutex<Evictions>,
    endings: RwLock<Endings>,
    /// Rights end before their capabilities expire.
    end_capabilities: bool,
}

/// An update of a session, in work until this is dropped.
pub(super) struct InWork {
    revocations: Arc<Revocations>,
    session: SessionId,
}

impl Drop for InWork {
    fn drop(&mut self) {
        let mut ev = self.revocations.evictions.lock();
        if let Some(n) = ev.in_work.get_mut(&self.session) {
            *n -= 1;
            if *n == 0 {
                ev.in_work.remove(&self.session);
            }
        }
    }
}

impl Revocations {
    pub(super) fn new(end_capabilities: bool) -> Arc<Revocations> {
        let (evictions, endings) = (Mutex::default(), RwLock::default());
        Arc::new(Revocations { evictions, endings, end_capabilities })
    }

    /// `NoSession` for a session that was evicted.
    pub(super) fn check_session(&self, session: SessionId, epoch: u64) -> Result<()> {
        let evictions = self.evictions.lock();
        let evicted = evictions.min_epoch.get(&session).is_some_and(|(min, _)| epoch < *min);
        if evicted || session < evictions.below.0 {
            return Err(Error::new(Code::NoSession, format!("session {session:x} was evicted")));
        }
        Ok(())
    }

    /// The rights of a capability that have not ended.
    pub(super) fn rights_left(&self, c: &Capability) -> Rights {
        if self.end_capabilities { self.endings.read().left(c) } else { c.rights }
    }

    /// To be held while an update of a session is in work. Take it before checking whether the
    /// session is evicted.
    pub(super) fn in_work(self: &Arc<Self>, session: SessionId) -> InWork {
        *self.evictions.lock().in_work.entry(session).or_default() += 1;
        InWork { revocations: self.clone(), session }
    }

    pub(super) fn evict(&self, evicted: &[pb::Evicted]) {
        let mut ev = self.evictions.lock();
        evicted.iter().for_each(|e| ev.add(e));
    }

    /// The number up to which evictions are complete here.
    pub(super) fn evictions_over(&self) -> u64 {
        self.evictions.lock().over()
    }

    /// The log index up to which all endings are known; `None`: they are not asked for.
    pub(super) fn endings_known(&self) -> Option<u64> {
        self.end_capabilities.then(|| self.endings.read().known())
    }

    pub(super) fn end_rights(&self, endings: &pb::Endings) {
        if self.end_capabilities {
            self.endings.write().take(endings);
        }
    }

    /// This server joined another log, in which other indices count.
    pub(super) fn forget_endings(&self) {
        *self.endings.write() = Endings::default();
    }
}
