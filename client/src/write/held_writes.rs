//! Write-back: the files with dirty data, and the disk space granted for it. Other modules see only
//! methods.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use strake_proto::{Ino, TargetId};
use strake_runtime::watch;
use tokio::sync::Mutex as AsyncMutex;

use super::{grants::Grants, service::Updates};
use crate::{
    data::service::Storage,
    inode::{Inode, files::Files},
    leases::lease_cache::LeaseCache,
    locks::page_uses::PageLocks,
    metadata::service::Metadata,
    read::cache::Cache,
    shared::Shared,
};

/// The services that it uses.
pub(crate) struct Below {
    pub shared: Arc<Shared>,
    pub metadata: Arc<Metadata>,
    pub files: Arc<Files>,
    pub storage: Arc<Storage>,
    pub updates: Arc<Updates>,
    pub pages: Arc<PageLocks>,
    pub lease_cache: Arc<LeaseCache>,
    /// The read cache.
    pub cache: Arc<Mutex<Cache>>,
}

/// See the module.
pub(crate) struct WriteBack {
    pub(super) shared: Arc<Shared>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) files: Arc<Files>,
    pub(super) storage: Arc<Storage>,
    pub(super) updates: Arc<Updates>,
    pub(super) pages: Arc<PageLocks>,
    pub(super) lease_cache: Arc<LeaseCache>,
    pub(super) cache: Arc<Mutex<Cache>>,
    /// Files with dirty data. This lock is taken within the lock of a file's dirty data.
    pub(super) holding: Mutex<BTreeMap<Ino, Arc<Inode>>>,
    /// Positions of held writes, in their order.
    pub(super) held_order: AtomicU64,
    /// Whether it is known what an earlier process left: dirty data, writes and unreported sizes.
    inherited: watch::Sender<bool>,
    /// What may be held back, by the granted space. This lock is taken within the lock of a file's
    /// dirty data.
    pub(super) grants: Mutex<Grants>,
    pub(super) asking_grants: Mutex<BTreeMap<TargetId, Arc<AsyncMutex<()>>>>,
}

impl WriteBack {
    pub fn new(below: Below) -> WriteBack {
        let Below { shared, metadata, files, storage, updates, pages, lease_cache, cache } = below;
        let former = shared.cfg.handover.as_ref().map_or(0, |k| k.former_session());
        WriteBack {
            shared,
            metadata,
            files,
            storage,
            updates,
            pages,
            lease_cache,
            cache,
            holding: Mutex::default(),
            held_order: AtomicU64::new(1),
            inherited: watch::Sender::new(former == 0),
            grants: Mutex::default(),
            asking_grants: Mutex::default(),
        }
    }

    /// The files with dirty data.
    pub fn holding(&self) -> Vec<Arc<Inode>> {
        self.holding.lock().values().cloned().collect()
    }

    /// Forgets the files: a lost session takes all dirty data with it. The files were told already.
    pub fn hold_nothing(&self) {
        self.holding.lock().clear();
    }

    /// An earlier process used the positions up to this one.
    pub fn go_on_after(&self, order: u64) {
        self.held_order.fetch_max(order + 1, Relaxed);
    }

    /// Whether it is known what an earlier process left: dirty data, writes and unreported sizes.
    pub fn has_inherited(&self) -> bool {
        *self.inherited.borrow()
    }

    pub fn set_inherited(&self) {
        self.inherited.send_replace(true);
    }

    /// Returns when that is known.
    pub async fn inheritance_known(&self) {
        let _ = self.inherited.subscribe().wait_for(|known| *known).await;
    }
}
