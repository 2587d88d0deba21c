//! The client as its callers see it.

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

use strake_fabric::Fabric;
use strake_proto::{Ino, Result, SessionId, ids::ROOT_INO};
use strake_runtime::Env;

use super::{
    copies::Copies, layouts::Layouts, seals::Seals, servers::Servers, space::Space, xattrs::Xattrs,
};
use crate::{
    background,
    config::{Config, Stats},
    core::Core,
    locks::Locks,
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

    /// The root directory.
    pub fn root(&self) -> Ino {
        self.core.metadata.current_session().map_or(ROOT_INO, |s| s.root)
    }

    /// The present session at the metadata servers, 0 while there is none.
    pub fn session(&self) -> SessionId {
        self.core.metadata.current_session().map_or(0, |s| s.id)
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

    /// Counters of this client since it was connected.
    pub fn stats(&self) -> Stats {
        let (unstable_bytes, cache_bytes) =
            (self.core.updates.unstable_bytes(), self.core.cache.lock().used());
        let holding: Vec<_> = self.core.writeback.holding();
        let held_bytes = holding.iter().map(|i| i.back.bytes()).sum();
        let relayed = self.core.relays.made.load(std::sync::atomic::Ordering::Relaxed);
        Stats { relayed, unstable_bytes, held_bytes, cache_bytes, ..self.core.shared.stats.read() }
    }

    /// The pool from which buffers for [`crate::File::write`] should come: its buffers are aligned,
    /// so nothing is copied on the way.
    pub fn pool(&self) -> &strake_fabric::Pool {
        self.core.shared.fabric.pool()
    }

    /// File locks between all clients.
    pub fn locks(&self) -> Locks<'_> {
        Locks { core: &self.core }
    }

    /// How files are striped, and what directories give to new files.
    pub fn layouts(&self) -> Layouts<'_> {
        Layouts { core: &self.core }
    }

    /// Which files are sealed.
    pub fn seals(&self) -> Seals<'_> {
        Seals { core: &self.core }
    }

    /// Extended attributes.
    pub fn xattrs(&self) -> Xattrs<'_> {
        Xattrs { core: &self.core }
    }

    /// Free and used space.
    pub fn space(&self) -> Space<'_> {
        Space { core: &self.core }
    }

    /// What the caller may keep of what it was told, and for how long.
    pub fn copies(&self) -> Copies<'_> {
        Copies { core: &self.core }
    }

    /// The servers, and how they are reached.
    pub fn servers(&self) -> Servers<'_> {
        Servers { core: &self.core }
    }
}
