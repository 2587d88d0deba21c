//! The client as its callers see it.

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

use strake_fabric::{Endpoint, Fabric, Road};
use strake_links::traffic;
use strake_proto::{
    Ino, Result,
    ids::ROOT_INO,
    map::{MapView, ROLE_MDS},
    pb::{self, Attr, Roads},
};
use strake_runtime::Env;

use crate::{
    background,
    config::{Config, Stats},
    core::Core,
    leases::lease_cache::Forget,
};

/// How long [`Client::close`] waits for the report of the files that are no longer open for
/// writing.
const RELEASING: Duration = Duration::from_secs(2);

/// A mounted file system: one session with the metadata servers. All clones share the same client.
#[derive(Clone)]
pub struct Client {
    pub(crate) core: Arc<Core>,
}

impl Client {
    /// Connects and opens a session. Waits up to [`Config::connect_timeout`] for a metadata leader.
    ///
    /// Fails with `Unauthenticated` when the key belongs to another cluster, and with `TimedOut`
    /// when no leader answers.
    pub fn connect(
        cfg: Config,
        env: Env,
        fabric: Arc<dyn Fabric>,
    ) -> BoxFuture<'static, Result<Client>> {
        Box::pin(async move {
            let core = Core::new(cfg, env, fabric);
            core.metadata.session_within(core.shared.cfg.connect_timeout).await?;
            // The first renewal says hello, so that leases work from the start. If it fails, the
            // next renewal says hello.
            core.metadata.clone().renew().await;
            background::start(&core);
            Ok(Client { core })
        })
    }

    /// Makes everything written stable, then ends the session if the metadata servers can be
    /// reached within seconds; the end of the session closes the open files. An error means that
    /// data was lost. The client does nothing afterwards, even if this fails.
    pub fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let core = self.core.clone();
            let closing = async move {
                let mut outcome = Ok(());
                // Dirty data keeps its inode alive, so live inodes are all there is to sync.
                for inode in core.files.live_inodes() {
                    outcome = outcome.and(core.sync_inode(&inode).await);
                }
                // A release that is not sent in time does no harm: the end of the session closes
                // the files too.
                let _ = tokio::time::timeout(RELEASING, core.files.clone().send_releases()).await;
                if let Err(e) = core.metadata.end_session().await {
                    tracing::info!("the session was not closed and ends with its term: {e}");
                }
                core.shared.set_closed();
                core.storage.close();
                outcome
            };
            self.core.shared.detached(closing).await
        })
    }

    /// The newest cluster map this client has.
    pub fn map(&self) -> Arc<MapView> {
        self.core.shared.map()
    }

    /// The newest cluster map the metadata servers have.
    pub async fn fetch_map(&self) -> Result<Arc<MapView>> {
        self.core.metadata.session().await?;
        self.core.metadata.refresh_map(self.core.shared.map().version()).await;
        Ok(self.core.shared.map())
    }

    /// The connections over which this client reaches the storage servers, and how many bytes went
    /// over each kind of fabric.
    pub fn roads(&self) -> Roads {
        Roads {
            roads: traffic::roads(&*self.core.shared.fabric),
            ways: self.core.storage.ways(),
            ..Default::default()
        }
    }

    /// As [`Client::roads`], with the transports by which bytes of this file were read from and
    /// written to storage servers since this client first used it. The sums count everything that
    /// was moved, including zeros of holes and bytes that were sent again.
    pub fn file_roads(&self, ino: Ino) -> Roads {
        let Some(inode) = self.core.files.live_inode(ino) else { return self.roads() };
        let (fetched, sent) = (inode.fetched.look(), inode.sent.look());
        let of = |road: Road| pb::FileRoad {
            road: road.name().into(),
            fetched: fetched[road],
            sent: sent[road],
        };
        Roads { file: Road::ALL.into_iter().map(of).collect(), ..self.roads() }
    }

    /// Why no storage server is reached by RDMA; `None` when at least one is.
    pub fn no_rdma(&self) -> Option<String> {
        let map = self.core.shared.map();
        let servers = map.map.nodes.iter().filter(|n| n.role != ROLE_MDS);
        let mut why = None;
        for node in servers {
            match self.core.shared.fabric.ways(&node.endpoints) {
                Ok(ways) if ways.iter().any(|w| matches!(w, Endpoint::Rdma(..))) => return None,
                Ok(_) => {}
                Err(e) => why = why.or(Some(e.message)),
            }
            // What is missing is missing on this node, so all servers would give the same reason.
            if node.endpoints.iter().any(|e| e.starts_with("rdma:")) {
                break;
            }
        }
        Some(why.unwrap_or_else(|| {
            "no storage server has an RDMA endpoint that this client may use".into()
        }))
    }

    /// The root directory.
    pub fn root(&self) -> Ino {
        self.core.metadata.current_session().map_or(ROOT_INO, |s| s.root)
    }

    /// The file system's UUID, 16 bytes.
    pub fn fs_uuid(&self) -> Vec<u8> {
        self.core.metadata.current_session().map_or_else(Vec::new, |s| s.fs_uuid.to_vec())
    }

    /// From now on fails with `EROFS` every open for writing and every change of a name, attribute,
    /// layout or byte. What was written before is still made stable and its size reported, and
    /// locks work.
    pub fn set_read_only(&self, yes: bool) {
        self.core.shared.set_read_only(yes);
    }

    /// While this value stays the same, no other client has changed the bytes of the file. `None`
    /// when that is not known.
    pub fn tenure(&self, ino: Ino) -> Option<u64> {
        self.core.lease_cache.tenure(self.core.shared.env.boot(), ino)
    }

    /// The attributes of a file that no other client can change now, with its tenure.
    pub fn leased(&self, ino: Ino) -> Option<(Attr, u64)> {
        self.core.lease_cache.data(self.core.shared.env.boot(), ino)
    }

    /// The session in which this lock of a file's pages is held, if it is held. While it is, no
    /// other client changes the file.
    pub fn holds_pages(&self, ino: Ino, number: u64) -> Option<strake_proto::SessionId> {
        self.core.pages.holds(ino, number)
    }

    /// From now on the caller may keep copies of what this client returns, for as long as
    /// [`Client::attr_valid`] and [`Client::name_valid`] say. `copies` is called when a copy is no
    /// longer valid. Works once; returns false when another caller keeps copies already.
    pub fn set_copies(&self, copies: Arc<dyn Forget>) -> bool {
        self.core.lease_cache.set_copies(copies)
    }

    /// Hold this guard from before you ask how long a copy is valid until the copy is made: no copy
    /// is revoked meanwhile.
    pub fn telling(&self) -> parking_lot::RwLockReadGuard<'_, ()> {
        self.core.lease_cache.telling()
    }

    /// For how long a copy of exactly these attributes may be kept; 0 for not at all.
    pub fn attr_valid(&self, attr: &Attr) -> Duration {
        self.core.lease_cache.attr_valid(self.core.shared.env.boot(), attr)
    }

    /// For how long a caller may assume that a name in a directory means this inode (or, with
    /// `None`, that the name does not exist). 0 for not at all.
    pub fn name_valid(&self, dir: Ino, name: &[u8], to: Option<Ino>) -> Duration {
        self.core.lease_cache.name_valid(self.core.shared.env.boot(), dir, name, to)
    }

    /// Servers that did not answer last time, and why; empty when all answer.
    pub fn away(&self) -> String {
        self.core.shared.unreachable()
    }

    /// Counters of this client since it was connected.
    pub fn stats(&self) -> Stats {
        let (unstable_bytes, cache_bytes) =
            (self.core.updates.unstable_bytes(), self.core.cache.lock().used());
        let holding: Vec<_> = self.core.writeback.holding();
        let held_bytes = holding.iter().map(|i| i.back.bytes()).sum();
        let relayed = self.core.relays.made.load(std::sync::atomic::Ordering::Relaxed);
        Stats { relayed, unstable_bytes, held_bytes, cache_bytes, ..self.core.shared.stats.read() }
    }

    /// The pool from which buffers for [`File::write`] should come: its buffers are aligned, so
    /// nothing is copied on the way.
    pub fn pool(&self) -> &strake_fabric::Pool {
        self.core.shared.fabric.pool()
    }
}
