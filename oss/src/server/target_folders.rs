//! Making and opening the targets that the configuration names.

use std::{path::Path, sync::Arc};

use strake_fabric::{Endpoint, Pool, Use};
use strake_proto::{Code, Error, Result, ids::TARGET_UNASSIGNED};
use strake_runtime::Env;

use super::{
    config::{Config, TargetConfig},
    refused_targets::RefusedTarget,
};
use crate::engine::{self, Engine, Opened, Options, TargetIdentity, TargetLayout};

/// The targets that can be served, and the others.
pub(super) async fn open_all(
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
pub(super) fn pool_for(listen: &[Endpoint]) -> Result<Pool> {
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

/// Opens a target, after making it if its configuration says so and its folder is absent or empty.
/// `fs_uuid`: the cluster that it must belong to, if it belongs to one.
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
                    format!("target {}: give either size or device to create it", t.path.display());
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
