//! The task that brings a target back into service (`refused_targets.rs` has the conditions).

use std::{sync::Arc, time::Duration};

use strake_proto::{Code, Result};

use super::{
    config::TargetConfig,
    refused_targets::{NEXT_STEP, RefusedTarget, What, needed},
    target_folders,
    targets::Targets,
};
use crate::engine::{Damaged, Engine, Opened, Options};

/// Between two looks at the map.
const LOOK: Duration = Duration::from_millis(500);
/// Pause after a failure.
const AGAIN: Duration = Duration::from_secs(30);
/// Between two looks at a folder that lacks something (`SOON`), and at one that is complete but
/// refused (`LATER`): opening that one costs a read of its table.
const SOON: Duration = Duration::from_secs(5);
const LATER: Duration = Duration::from_secs(60);

/// Brings a target back into service: as it is, once it is intact again, or empty, once nothing on
/// it is needed.
pub(super) async fn come_back(targets: Arc<Targets>, refused: Arc<RefusedTarget>) {
    loop {
        let damaged = match refused.what() {
            What::Damaged(d) if d.table_only => Some(d),
            _ => None,
        };
        let engine = match damaged {
            Some(d) => emptied(&targets, &refused, &d).await,
            None => whole(&targets, &refused).await,
        };
        let Some((engine, is_empty)) = engine else { continue };
        match register(&targets, &refused, engine).await {
            Ok(id) => return targets.is_back(&refused, id, is_empty),
            Err(e) if e.code == Code::Disconnected => return, // the server stops
            Err(e) => refused.is(What::Refused(e.context(refused.path.display()))),
        }
    }
}

async fn register(targets: &Targets, refused: &RefusedTarget, engine: Arc<Engine>) -> Result<u32> {
    loop {
        match targets.add(engine.clone()).await {
            Err(e) if !matches!(e.code, Code::Disconnected | Code::Inval | Code::NoSpc) => {
                refused.is_now(format!("it is whole but cannot be registered: {e}"));
                tokio::time::sleep(LOOK).await;
            }
            other => return other,
        }
    }
}

/// Looks at it after a pause. `None`: go on with the state that was found.
async fn whole(targets: &Targets, refused: &RefusedTarget) -> Option<(Arc<Engine>, bool)> {
    let lacks =
        matches!(refused.what(), What::Refused(e) if matches!(e.code, Code::NoEnt | Code::Busy));
    let pause = if lacks { SOON } else { LATER };
    refused.is_looked_at(pause);
    if !refused.is_asked() {
        refused.nap(pause).await;
    }
    let asked = refused.take_asked();
    refused.release();
    let path = refused.path.clone();
    let as_it_is = || TargetConfig { path, size: 0, device: None, force: false, create: false };
    let (ctx, config) = (&targets.ctx, asked.unwrap_or_else(as_it_is));
    match target_folders::open(&config, &ctx.cfg.name, targets.group.fs(), &ctx.env, &targets.pool)
        .await
    {
        Ok(Opened::Whole(engine)) => return Some((engine, false)),
        Ok(Opened::Damaged(d)) => refused.is(What::Damaged(Arc::new(d))),
        Err(e) => refused.is(What::Refused(e)),
    }
    None
}

/// Waits until nothing on it is needed, and empties it. `None`: look at it again instead.
async fn emptied(
    targets: &Targets,
    refused: &RefusedTarget,
    damaged: &Arc<Damaged>,
) -> Option<(Arc<Engine>, bool)> {
    loop {
        refused.nap(LOOK).await;
        if refused.is_asked() {
            // A good table may have been put back.
            refused.release();
            return None;
        }
        let Some(of) = &damaged.id else { return None };
        // Without a lease the map may come from a metadata server that lags behind.
        let unsure = || targets.lease.check().err().map(|e| e.message);
        if let Some(why) =
            needed(&targets.ctx.map.load(), of, damaged.used.as_ref()).or_else(unsure)
        {
            refused.is_now(why);
            continue;
        }
        match empty(targets, damaged).await {
            Ok(engine) => return Some((engine, true)),
            // The engine that served it before is still in use.
            Err(e) if e.code == Code::Busy => refused.is_now(e.message),
            Err(e) => {
                refused.is_now(format!("it cannot be emptied: {e}; {NEXT_STEP}"));
                refused.nap(AGAIN).await;
            }
        }
    }
}

/// Empties a target. Before any other server hears of it, it records durably that it is not in
/// sync. Metadata servers recovered from an older state ask for that record.
async fn empty(targets: &Targets, damaged: &Damaged) -> Result<Arc<Engine>> {
    let (engine, kept) = damaged.empty(targets.pool.clone(), Options::default()).await?;
    let (id, kept) = (engine.identity().target_id, kept.display());
    tracing::warn!(
        "target {id} lost its chunk table and comes back empty, to be filled by a resync; the \
         damaged table is kept as {kept}"
    );
    engine.notes().note_chain_views(targets.ctx.map.load().chains_of(id))?;
    engine.notes().sync().await?;
    Ok(engine)
}
