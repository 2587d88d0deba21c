//! Starting a storage server from its target folders.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use strake_fabric::{Identity, Transports};
use strake_proto::{CapKey, Code, Error, Result};
use strake_runtime::Env;

use super::{
    add_targets::{AddTargets, Reread},
    admin,
    config::Config,
    node::Parts,
    start::{self, OssServer},
    target_folders,
};

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
            "this server's configuration was given by its program and cannot be read again",
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
        let pool = target_folders::pool_for(&cfg.listen)?;
        let (targets, refused) = target_folders::open_all(&cfg, &env, &pool).await?;
        let more = AddTargets::new(reread, pool.clone(), &cfg);
        let fabric = Transports::new(
            env.clone(),
            Identity::server(&cluster_key),
            None,
            pool,
            Default::default(),
        );
        let cap_key = CapKey::from_cluster_key(&cluster_key);
        let at = cfg.admin;
        let parts = Parts { env: env.clone(), fabric: Arc::new(fabric), targets, cap_key };
        let mut server = start::start_without(cfg, parts, refused).await?;
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
