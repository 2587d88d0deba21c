//! Starting a storage server from its target folders.

use futures_util::future::BoxFuture;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use strake_fabric::{Endpoint, Identity, Pool, Roads, Use};
use strake_proto::{CapKey, Code, Error, Result, TargetId, ids::TARGET_UNASSIGNED};
use strake_runtime::Env;
use tokio::sync::Mutex;

use super::{
    Config, OssServer, Parts, TargetConfig, admin, node::Node, refused_targets::RefusedTarget,
};
use crate::engine::{self, Engine, Opened, Options, TargetIdentity, TargetLayout};

/// Reads the configuration again.
pub type Reread = Box<dyn Fn() -> Result<Config> + Send + Sync>;

/// What is needed to add targets while the others serve.
pub(super) struct More {
    reread: Reread,
    pool: Pool,
    /// Folders of the known targets. Locked while some are added.
    known: Mutex<BTreeSet<PathBuf>>,
}

impl More {
    /// Makes, opens and registers the targets that are new in the configuration, and returns their
    /// numbers. If one fails, those before it stay. Targets that are out of service are looked at
    /// again.
    pub(super) async fn add(&self, node: &Arc<Node>) -> Result<Vec<TargetId>> {
        let busy = |_| Error::new(Code::Busy, "targets are being added; try again when they are");
        let mut known = self.known.try_lock().map_err(busy)?;
        let cfg = (self.reread)()?;
        cfg.check()?;
        node.look_again(&cfg.targets);
        let mut added = Vec::new();
        for t in cfg.targets.iter().filter(|t| !known.contains(&t.path)).collect::<Vec<_>>() {
            let engine =
                open(t, &node.cfg.name, node.fs(), &node.env, &self.pool).await?.whole()?;
            added.push(node.add_target(engine).await?);
            known.insert(t.path.clone());
        }
        Ok(added)
    }
}

/// Starts a server from `cfg.targets`, making targets whose folders are absent or empty.
/// `cluster_key` is the secret that all servers of the cluster share.
///
/// A target that cannot be served is left out and looked at again from time to time: one that is
/// missing, in use, of another cluster, newer, incomplete or damaged. Errors are those of the
/// configuration.
pub async fn start_on_disk(cfg: Config, env: Env, cluster_key: [u8; 32]) -> Result<OssServer> {
    let fixed = || {
        Err(Error::new(
            Code::OpNotSupp,
            "this server was given its configuration by its program, for good",
        ))
    };
    start_on_disk_with(cfg, env, cluster_key, Box::new(fixed)).await
}

/// As [`start_on_disk`]; `reread` returns the current configuration, which may name more targets
/// than before.
pub fn start_on_disk_with(
    cfg: Config,
    env: Env,
    cluster_key: [u8; 32],
    reread: Reread,
) -> BoxFuture<'static, Result<OssServer>> {
    Box::pin(async move {
        cfg.check()?;
        if cfg.targets.is_empty() {
            return Err(Error::new(
                Code::Inval,
                "storage server configuration: targets must name at least one folder",
            ));
        }
        let pool = pool_for(&cfg.listen)?;
        let (targets, refused) = open_all(&cfg, &env, &pool).await?;
        let known = Mutex::new(cfg.targets.iter().map(|t| t.path.clone()).collect());
        let more = Arc::new(More { reread, pool: pool.clone(), known });
        let fabric =
            Roads::new(env.clone(), Identity::server(&cluster_key), None, pool, Default::default());
        let cap_key = CapKey::from_cluster_key(&cluster_key);
        let at = cfg.admin;
        let parts = Parts { env: env.clone(), fabric: Arc::new(fabric), targets, cap_key };
        let mut server = super::start_without(cfg, parts, refused).await?;
        if let Some(at) = at {
            server.tasks.push(env.spawn(admin::serve(
                server.node.clone(),
                more.clone(),
                at,
                &cluster_key,
            )?));
        }
        server.more = Some(more);
        Ok(server)
    })
}

/// The targets that can be served, and the others.
async fn open_all(
    cfg: &Config,
    env: &Env,
    pool: &Pool,
) -> Result<(Vec<Arc<Engine>>, Vec<Arc<RefusedTarget>>)> {
    let (mut targets, mut refused) = (Vec::new(), Vec::new());
    let announced: Vec<Result<()>> =
        cfg.targets.iter().map(|t| engine::announce_device(&t.path, t.device.as_deref())).collect();
    for (t, announced) in cfg.targets.iter().zip(announced) {
        let opened = match announced {
            // Without a cluster to check against: registering finds out whether the target fits.
            Ok(()) => open(t, &cfg.name, None, env, pool).await,
            Err(e) => Err(e),
        };
        match opened {
            Ok(Opened::Whole(engine)) => targets.push(engine),
            Ok(Opened::Damaged(d)) => refused.push(RefusedTarget::damaged(d)),
            Err(e) if e.code == Code::Inval => return Err(e),
            Err(e) => refused.push(RefusedTarget::refused(t.path.clone(), e)),
        }
    }
    Ok((targets, refused))
}

/// As large as may be registered, if clients come by RDMA.
fn pool_for(listen: &[Endpoint]) -> Result<Pool> {
    let pool = Pool::default();
    if !listen.iter().any(|e| matches!(e, Endpoint::Rdma(..))) {
        return Ok(pool);
    }
    Use::Rdma.pool(pool)
}

fn is_new(path: &Path) -> bool {
    let empty = path.read_dir().is_ok_and(|mut entries| {
        // An interrupted creation leaves these besides its marker; a fresh ext4 has `lost+found`.
        entries.all(|e| {
            e.is_ok_and(|e| e.file_name() == "lost+found" || e.file_name() == "target.lock")
        })
    });
    !path.exists() || empty || path.join("INCOMPLETE").exists()
}

pub(super) async fn open(
    t: &TargetConfig,
    node: &str,
    fs_uuid: Option<[u8; 16]>,
    env: &Env,
    pool: &Pool,
) -> Result<Opened> {
    if t.create && is_new(&t.path) {
        let layout = match (&t.device, t.size) {
            (Some(path), 0) => TargetLayout::BlockDevice { path: path.clone(), force: t.force },
            (None, size) if size > 0 => TargetLayout::File { size: size / 4096 * 4096 },
            _ => {
                let m =
                    format!("target {}: give either size or device to make it", t.path.display());
                return Err(Error::new(Code::Inval, m));
            }
        };
        let (target_uuid, target_id) = (env.random_bytes(), TARGET_UNASSIGNED);
        let id = TargetIdentity {
            fs_uuid: [0; 16],
            target_uuid,
            target_id,
            node: node.into(),
            incarnation: 0,
        };
        tracing::info!("making target {}", t.path.display());
        engine::create_target_dir(&t.path, layout, id).await?;
    }
    engine::open_target_dir(&t.path, fs_uuid, pool.clone(), Options::default()).await
}
