//! The state of a member: what is stored, what of it is in memory, and how readers see only whole
//! commits.

use std::{ops::Bound, sync::Arc};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use prost::Message;
use strake_proto::{Error, Ino, Result, pb};
use strake_store::MetaStore;

use super::{
    fail::{Fail, Res},
    keys,
    locks::cache::{Cached, LockCache},
    memory::{Memory, load},
    queue::{Found, Queue},
    txn::{Layer, Txn},
    watched::{Damage, Watched},
};

/// Prefixes of the numbered records that workers process from the lowest number on.
const QUEUES: [u8; 3] = [keys::GC, keys::TRIM, keys::ORPHAN];

/// See the module. `memory`, `queues` and `lock_cache` change together with the store, while
/// `memory` is locked for writing.
pub(super) struct State {
    pub store: Arc<dyn MetaStore>,
    pub damage: Arc<Damage>,
    pub memory: RwLock<Memory>,
    /// By key prefix, see [`QUEUES`].
    pub queues: Mutex<[Queue; QUEUES.len()]>,
    pub lock_cache: LockCache,
    /// For [`keys::NameHash`].
    pub hash_mask: u64,
}

impl State {
    pub(super) fn open(store: Arc<dyn MetaStore>, hash_mask: u64, knows: u32) -> Result<State> {
        let damage = Arc::new(Damage::default());
        let store = Arc::new(Watched { store, damage: damage.clone() });
        let memory = RwLock::new(load(&*store, knows)?);
        let (queues, lock_cache) = Default::default();
        Ok(State { store, damage, memory, queues, lock_cache, hash_mask })
    }

    /// Reads everything again after the store was replaced.
    pub(super) fn reload(&self) -> Result<()> {
        let fresh = load(&*self.store, self.memory.read().knows)?;
        let mut memory = self.memory.write();
        *memory = fresh;
        *self.queues.lock() = Default::default();
        self.lock_cache.clear();
        Ok(())
    }

    /// The error of a failure for callers; notes damaged records.
    pub(super) fn told(&self, f: Fail) -> Error {
        let (Fail::Op(e) | Fail::Store(e) | Fail::Later(e)) = f;
        self.damage.note(&e);
        e
    }

    /// The store, for as long as `memory` is locked.
    pub(super) fn cached(&self) -> Cached<'_> {
        Cached { store: &*self.store, cache: &self.lock_cache }
    }

    /// Runs `run` on a transaction over everything that was applied; what it writes is dropped.
    pub(super) fn in_txn<T>(
        &self,
        memory: &Memory,
        run: impl FnOnce(&mut Txn<'_>) -> Res<T>,
    ) -> Result<T> {
        memory.readable()?;
        let (none, store) = (Layer::default(), self.cached());
        let (header, place) = (memory.header.clone(), memory.place.clone());
        let mut t = Txn::new(&store, &none, header, place, self.hash_mask);
        run(&mut t).map_err(|f| self.told(f))
    }

    /// The same for what only looks.
    pub(super) fn looking<T>(&self, look: impl FnOnce(&Txn<'_>) -> Res<T>) -> Result<T> {
        self.in_txn(&self.memory.read(), |t| look(t))
    }

    /// An inode, if there is one and it can be read.
    pub(super) fn inode(&self, ino: Ino) -> Option<pb::InodeRecord> {
        let value = self.store.get(&keys::numbered(keys::INODE, ino)).ok().flatten()?;
        pb::InodeRecord::decode(value).ok()
    }

    /// The first numbers in one of the [`QUEUES`].
    pub(super) fn lowest(&self, prefix: u8, limit: usize) -> Vec<u64> {
        let _whole = self.memory.read();
        let Some(queue) = QUEUES.iter().position(|p| *p == prefix) else { return Vec::new() };
        let search = |from: u64, most: usize| {
            let (from, end) = (keys::numbered(prefix, from), [prefix + 1]);
            let pairs = self.store.range(Bound::Included(&from), Bound::Excluded(&end));
            let (mut keys, mut all) = (Vec::new(), true);
            for pair in pairs {
                match pair {
                    Ok((k, _)) if keys.len() < most => keys.extend(keys::last_number(&k)),
                    // Ended early, by the limit or by a key that cannot be read.
                    _ => {
                        all = false;
                        break;
                    }
                }
            }
            Found { keys, all }
        };
        self.queues.lock()[queue].lowest(limit, search)
    }

    /// Numbered records above `after`. Unreadable ones are left out: these lists are for workers
    /// that look again, and applying an entry to a damaged store stops with the reason.
    pub(super) fn list(&self, prefix: u8, after: u64, limit: usize) -> Vec<(u64, Bytes)> {
        let _whole = self.memory.read();
        let from = keys::numbered(prefix, after.saturating_add(1));
        let end = [prefix + 1];
        let pairs = self.store.range(Bound::Included(&from), Bound::Excluded(&end));
        let good = pairs.take(limit).map_while(Result::ok);
        good.filter_map(|(k, v)| Some((keys::last_number(&k)?, v))).collect()
    }
}

/// Which queue a key belongs to, and its number there.
pub(super) fn queue_of(key: &[u8]) -> Option<(usize, u64)> {
    let queue = QUEUES.iter().position(|p| key.first() == Some(p))?;
    Some((queue, keys::last_number(key)?))
}
