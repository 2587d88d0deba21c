//! Adding targets while the others serve.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use strake_fabric::Pool;
use strake_proto::{Code, Error, Result, TargetId};
use tokio::sync::Mutex;

use super::{config::Config, target_folders, targets::Targets};

/// Reads the configuration again. An error keeps the targets as they are.
pub type Reread = Box<dyn Fn() -> Result<Config> + Send + Sync>;

/// What is needed to add targets while the others serve.
pub(super) struct AddTargets {
    reread: Reread,
    pool: Pool,
    /// Folders of the known targets. Locked while some are added.
    known: Mutex<BTreeSet<PathBuf>>,
}

impl AddTargets {
    /// `cfg`: the configuration that the server was started with.
    pub(super) fn new(reread: Reread, pool: Pool, cfg: &Config) -> Arc<AddTargets> {
        let known = Mutex::new(cfg.targets.iter().map(|t| t.path.clone()).collect());
        Arc::new(AddTargets { reread, pool, known })
    }

    /// Makes, opens and registers the targets that are new in the configuration, and returns their
    /// numbers. If one fails, those before it stay. Targets that are out of service are looked at
    /// again.
    pub(super) async fn add(&self, targets: &Arc<Targets>) -> Result<Vec<TargetId>> {
        let busy =
            |_| Error::new(Code::Busy, "targets are being added; try again when that is complete");
        let mut known = self.known.try_lock().map_err(busy)?;
        let cfg = (self.reread)()?;
        cfg.check()?;
        targets.look_again(&cfg.targets);
        let (ctx, mut added) = (&targets.ctx, Vec::new());
        for t in cfg.targets.iter().filter(|t| !known.contains(&t.path)).collect::<Vec<_>>() {
            let engine =
                target_folders::open(t, &ctx.cfg.name, targets.group.fs(), &ctx.env, &self.pool)
                    .await?
                    .whole()?;
            added.push(targets.add(engine).await?);
            known.insert(t.path.clone());
        }
        Ok(added)
    }
}
