//! The namespace as the state machine that Raft replicates.

use std::{collections::BTreeSet, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use strake_proto::{Code, Error, Incarnation, Ino, Result, pb};
use strake_runtime::watch;
use strake_store::{Batch, MetaStore};

use super::recalls::Recalls;
use crate::{
    consensus::{Committed, StateMachine, StateSnapshot},
    namespace::{Namespace, effects::Effect, level},
    recent_changes::{RecentChanges, endings::Endings},
};

/// See the module.
pub(super) struct Machine {
    pub namespace: Namespace,
    /// The same store as the namespace's.
    store: Arc<dyn MetaStore>,
    applied: watch::Sender<u64>,
    recalls: Arc<Recalls>,
    recent_changes: Mutex<RecentChanges>,
    endings: Mutex<Endings>,
}

impl Machine {
    /// `recalls` learns of everything that is applied. `knows`: the newest feature level that this
    /// program knows.
    pub(super) fn open(
        store: Arc<dyn MetaStore>,
        recalls: Arc<Recalls>,
        knows: u32,
    ) -> Result<Machine> {
        let namespace = Namespace::open_knowing(store, knows)?;
        let index = namespace.header().applied_index;
        let (applied, recent_changes) =
            (watch::Sender::new(index), Mutex::new(RecentChanges::new(index)));
        let endings = Mutex::new(Endings::new(index));
        Ok(Machine {
            store: namespace.store(),
            namespace,
            applied,
            recalls,
            recent_changes,
            endings,
        })
    }

    /// Watches the last applied index.
    pub(super) fn applied_watch(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    /// Whether certainly none of these inodes changed after entry `index`, in the entries applied
    /// so far.
    pub(super) fn same_since(&self, index: u64, inos: &BTreeSet<Ino>) -> bool {
        self.recent_changes.lock().same_since(index, inos)
    }

    /// What ended rights after entry `known`, in the entries applied so far.
    pub(super) fn endings_after(&self, known: u64) -> pb::Endings {
        self.endings.lock().after(known)
    }
}

impl StateMachine for Machine {
    fn applied(&self) -> (u64, u64) {
        let h = self.namespace.header();
        (h.applied_index, h.applied_term)
    }

    fn conf_state(&self) -> Vec<u8> {
        self.namespace.header().conf_state.to_vec()
    }

    fn apply(
        &self,
        entries: Vec<Committed>,
        last: (u64, u64),
        conf_state: Option<Vec<u8>>,
    ) -> Result<Vec<Bytes>> {
        let entries: Vec<_> = entries.into_iter().map(|e| (e.index, e.term, e.data)).collect();
        // Called before any reader can see the entries' effects.
        let tell = |effects: &[Effect]| {
            self.recent_changes
                .lock()
                .note(last.0, effects.iter().flat_map(|e| e.changed.iter().copied()));
            let ended = effects.iter().flat_map(|e| e.endings.iter().map(|x| (e.index, *x)));
            self.endings.lock().note(last.0, ended);
            self.recalls.tell(effects);
        };
        let replies = self.namespace.apply_and_tell(&entries, last, conf_state.as_deref(), tell)?;
        self.applied.send_replace(last.0);
        Ok(replies.into_iter().map(|r| r.encode_to_vec().into()).collect())
    }

    fn sync(&self) -> Result<()> {
        self.store.sync()
    }

    fn snapshot(&self) -> Result<StateSnapshot> {
        let h = self.namespace.header();
        let view = self.store.snapshot()?;
        Ok(StateSnapshot {
            index: h.applied_index,
            term: h.applied_term,
            conf_state: h.conf_state.to_vec(),
            view,
        })
    }

    fn is_former(&self, id: u64) -> bool {
        u32::try_from(id).is_ok_and(|id| self.namespace.map().map.former.contains(&id))
    }

    fn incarnation(&self) -> Option<Incarnation> {
        let map = self.namespace.map();
        (!map.map.fs_uuid.is_empty()).then_some(Incarnation(map.map.incarnation))
    }

    fn level(&self) -> (u32, u64) {
        let map = self.namespace.map();
        (map.map.level, map.map.level_index)
    }

    fn needed_by(&self, data: &Bytes) -> u32 {
        level::needed_by(data)
    }

    fn compare_level(&self, level: u32, since: u64) {
        self.namespace.compare_level(level, since);
    }

    fn void(&self) {
        self.namespace.void();
    }

    fn damage(&self) -> Option<Error> {
        self.namespace.damage()
    }

    fn restore_begin(&self) -> Result<()> {
        self.namespace.clear()
    }

    fn restore_pairs(&self, pairs: Vec<(Bytes, Bytes)>) -> Result<()> {
        let ops = pairs.into_iter().map(|(k, v)| (k, Some(v))).collect();
        self.store.commit(Batch { ops })
    }

    fn restore_end(&self, index: u64, term: u64, conf_state: Vec<u8>) -> Result<()> {
        *self.recent_changes.lock() = RecentChanges::new(index);
        *self.endings.lock() = Endings::new(index);
        self.recalls.begin();
        self.namespace.reload()?;
        let h = self.namespace.header();
        if (h.applied_index, h.applied_term) != (index, term) {
            let m =
                format!("the snapshot of entry {index} holds a state of entry {}", h.applied_index);
            return Err(Error::new(Code::Corrupt, m));
        }
        self.namespace.apply(&[], (index, term), Some(&conf_state))?;
        self.store.sync()?;
        self.applied.send_replace(index);
        Ok(())
    }
}
