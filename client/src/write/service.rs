//! Writes that are not stable yet, and the memory for them. Other modules see only methods.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use strake_proto::{ChainId, Ino, SessionId};
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedSemaphorePermit, Semaphore};

use crate::{
    data::service::Storage,
    inode::{Inode, files::Files},
    metadata::service::Metadata,
    read::cache::Cache,
    shared::Shared,
    write::unstable::{Entry, Unstable},
};

/// What an unstable write keeps alive until it is stable.
pub(crate) struct Hold {
    pub inode: Arc<Inode>,
    /// Its share of [`Config::unstable_limit`].
    pub _room: Option<OwnedSemaphorePermit>,
}

/// Granularity of the memory limits, bytes.
pub(crate) const ROOM_UNIT: usize = 4096;

pub(crate) fn room_for(bytes: usize) -> u32 {
    bytes.div_ceil(ROOM_UNIT).min(u32::MAX as usize) as u32
}

/// See the module.
pub(crate) struct Updates {
    pub(super) shared: Arc<Shared>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) files: Arc<Files>,
    pub(super) storage: Arc<Storage>,
    /// The read cache.
    pub(super) cache: Arc<Mutex<Cache>>,
    pub(super) unstable: Mutex<Unstable<Hold>>,
    /// Free memory for unstable bytes, in [`ROOM_UNIT`]s.
    room: Arc<Semaphore>,
    pub(super) flush_wanted: Notify,
    pub(super) flushing: Mutex<BTreeMap<ChainId, Arc<AsyncMutex<()>>>>,
}

impl Updates {
    pub fn new(
        shared: Arc<Shared>,
        metadata: Arc<Metadata>,
        files: Arc<Files>,
        storage: Arc<Storage>,
        cache: Arc<Mutex<Cache>>,
    ) -> Updates {
        let room = (shared.cfg.unstable_limit / ROOM_UNIT).clamp(1, Semaphore::MAX_PERMITS);
        Updates {
            shared,
            metadata,
            files,
            storage,
            cache,
            unstable: Mutex::default(),
            room: Arc::new(Semaphore::new(room)),
            flush_wanted: Notify::new(),
            flushing: Mutex::default(),
        }
    }

    /// Free memory for unstable bytes, in [`ROOM_UNIT`]s.
    pub fn room(&self) -> &Arc<Semaphore> {
        &self.room
    }

    /// Returns when a task waits for a flush.
    pub async fn flush_wanted(&self) {
        self.flush_wanted.notified().await;
    }

    pub fn unstable_bytes(&self) -> u64 {
        self.unstable.lock().bytes()
    }

    /// A file was truncated: bytes beyond the new size are not written again.
    pub fn clip(&self, ino: Ino, size: u64) {
        self.unstable.lock().clip(ino, size);
    }

    /// The unstable writes of a lost session are lost to their files.
    pub fn lose(&self, session: SessionId) {
        let mut unstable = self.unstable.lock();
        unstable
            .forget_session(session)
            .values()
            .for_each(|h| h.inode.lost_with(session, Vec::new()));
    }

    /// Adds an unstable write of an earlier client, which had this position.
    pub fn inherit(&self, chain: ChainId, order: u64, entry: Entry<Hold>) {
        let mut unstable = self.unstable.lock();
        unstable.add_again(chain, order, entry);
        unstable.resume_after(order);
    }
}
