//! The state that the client keeps to talk to the metadata servers. Other modules see only its
//! methods.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use strake_links::LeaderFinder;
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

/// The owner of the open files in the session, which is told what becomes of the session.
pub(crate) trait SessionOwner: Send + Sync {
    /// Forgets everything that is known under leases.
    fn forget_all(&self) -> Option<Forgetting>;
    /// Frees the memory of cached bytes that can no longer be used: their tenure is over.
    fn forget_bytes(&self);
    /// Closes the files that only the open cache holds, without telling the metadata servers.
    fn forget_kept(&self);
    /// The files that the session has open, once for each handle.
    fn open_in(&self, session: SessionId) -> Vec<Ino>;
    /// The session is lost. Called before there can be another one, so that what the session wrote
    /// beyond the ends of files is not reported.
    fn forget_ends(&self, session: SessionId);
    /// Called after [`SessionOwner::forget_ends`]: unstable writes of the session are lost to their
    /// files.
    fn lost(&self, session: SessionId);
    /// There is a new session: opens the open files in it.
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
    /// Held shared to report closes; held alone to reassert everything on the same connection.
    pub(super) closing: RwLock<()>,
    /// Notified when leases begin on a new connection.
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

    /// The owner; `None` while the client is being dropped: then it has no open files.
    pub(super) fn owner(&self) -> Option<Arc<dyn SessionOwner>> {
        self.owner.upgrade()
    }

    pub fn current_session(&self) -> Option<Arc<Session>> {
        self.session.lock().clone()
    }

    /// Opens for writing that are in progress.
    pub fn openings(&self) -> &Openings {
        &self.openings
    }

    /// Returns when leases have begun on a new connection.
    pub async fn leases_begin(&self) {
        self.greeted.notified().await;
    }

    /// The number of reassertions so far, including one in progress. Read it before an open is
    /// requested, and before a close is counted.
    pub fn reassertions(&self) -> u64 {
        self.reassertions.load(SeqCst)
    }

    /// Files opened from here on are not in this reassertion.
    pub(super) fn begin_reassertion(&self) {
        self.reassertions.fetch_add(1, SeqCst);
    }
}
