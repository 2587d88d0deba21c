//! What the client keeps to talk to the metadata servers. Others see methods only.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use strake_fabric::LeaderFinder;
use strake_proto::{Ino, SessionId};
use tokio::sync::{Mutex as AsyncMutex, Notify, RwLock};

use super::{
    cluster_map::Refresh, follower_policy::Followers, link::Link, openings::Openings,
    session::Session,
};
use crate::{
    data::relays::Relays,
    leases::lease_cache::{Forgetting, LeaseCache},
    shared::Shared,
};

/// Whoever has files open in the session, and is told what becomes of it.
pub(crate) trait SessionOwner: Send + Sync {
    /// Forgets everything that is known under leases.
    fn forget_all(&self) -> Option<Forgetting>;
    /// Frees the memory of bytes that nobody reads any more: their tenure is over.
    fn forget_bytes(&self);
    /// Closes without a word the files that are open only to be opened again.
    fn forget_kept(&self);
    /// The files that the session has open, once for each handle.
    fn open_in(&self, session: SessionId) -> Vec<Ino>;
    /// The session is lost. Before there can be another one: what it wrote beyond the ends of files
    /// is not reported.
    fn forget_ends(&self, session: SessionId);
    /// Likewise, after that: unstable writes are lost to their files.
    fn lost(&self, session: SessionId);
    /// There is a new session: what is open is opened in it.
    fn reopen_all(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// See the module.
pub(crate) struct Metadata {
    pub(super) shared: Arc<Shared>,
    pub(super) relays: Arc<Relays>,
    pub(super) lease_cache: Arc<LeaseCache>,
    owner: Weak<dyn SessionOwner>,
    pub(super) finder: Mutex<LeaderFinder>,
    pub(super) link: AsyncMutex<Link>,
    pub(super) followers: Followers,
    pub(super) session: Mutex<Option<Arc<Session>>>,
    pub(super) session_change: AsyncMutex<()>,
    pub(super) refresh: Refresh,
    pub(super) openings: Arc<Openings>,
    reassertions: AtomicU64,
    /// Held to tell of closes, alone to tell of everything on the same connection.
    pub(super) closing: RwLock<()>,
    /// Leases began on a new connection.
    pub(super) greeted: Notify,
}

impl Metadata {
    pub fn new(
        shared: Arc<Shared>,
        relays: Arc<Relays>,
        lease_cache: Arc<LeaseCache>,
        owner: Weak<dyn SessionOwner>,
    ) -> Metadata {
        let mut finder = LeaderFinder::new(shared.cfg.mds.clone());
        finder.learn(shared.cfg.handover.iter().flat_map(|k| k.mds()));
        Metadata {
            shared,
            relays,
            lease_cache,
            owner,
            finder: Mutex::new(finder),
            link: AsyncMutex::default(),
            followers: Followers::default(),
            session: Mutex::new(None),
            session_change: AsyncMutex::default(),
            refresh: Refresh::default(),
            openings: Arc::default(),
            reassertions: AtomicU64::new(0),
            closing: RwLock::default(),
            greeted: Notify::new(),
        }
    }

    /// `None` while the client is being dropped: then it has nothing open.
    pub(super) fn owner(&self) -> Option<Arc<dyn SessionOwner>> {
        self.owner.upgrade()
    }

    pub fn current_session(&self) -> Option<Arc<Session>> {
        self.session.lock().clone()
    }

    /// Opens for writing that are under way.
    pub fn openings(&self) -> &Openings {
        &self.openings
    }

    /// Returns when leases began on a new connection.
    pub async fn leases_begin(&self) {
        self.greeted.notified().await;
    }

    /// How often all was told, or is being told. To be taken before an open is asked for, and
    /// before a close is counted.
    pub fn reassertions(&self) -> u64 {
        self.reassertions.load(SeqCst)
    }

    /// All that is open from here on is not in this reassertion.
    pub(super) fn begin_reassertion(&self) {
        self.reassertions.fetch_add(1, SeqCst);
    }
}
