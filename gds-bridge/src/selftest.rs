//! A tier is available when a pattern was sent through it to the device and came back unchanged.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use futures_util::future::try_join_all;
use strake_fabric::{Buf, BufMut};
use strake_proto::Error;

use crate::{
    Tier, Unavailable,
    copier::{Flight, Work},
    direct,
    engine::Engine,
    fault::Fault,
    local::{self, check_folder},
    mem::GpuMem,
    plan::{Measured, Standing},
    scratch::{Scratch, pattern},
};

/// Why the folder for copies cannot be used.
pub fn no_folder(tier: Tier, local: Option<&Path>) -> Option<Unavailable> {
    if tier != Tier::LocalGds {
        return None;
    }
    let Some(dir) = local else { return Some(Unavailable::NoFolder) };
    let bad = |e: Error| Unavailable::BadFolder { dir: dir.display().to_string(), why: e.message };
    check_folder(dir).err().map(bad)
}

/// Why a tier cannot even be tested on a device. `unpinned`: why it has no pinned memory.
/// `no_rdma`: why no bytes arrive by RDMA.
pub fn refused(
    device: &dyn GpuMem,
    tier: Tier,
    local: Option<&Path>,
    unpinned: Option<&Fault>,
    no_rdma: impl FnOnce() -> Option<String>,
) -> Option<Unavailable> {
    let pinned = tier.is_bounce();
    let without = || unpinned.filter(|_| pinned).cloned().map(Unavailable::NotPinned);
    let by_rdma = matches!(tier, Tier::GpuRdma | Tier::BounceRdma);
    let unreached =
        || if by_rdma { no_rdma().map(|why| Unavailable::NoRdma { why }) } else { None };
    device.refuses(tier).or_else(|| no_folder(tier, local)).or_else(unreached).or_else(without)
}

pub(crate) async fn test(engine: &Engine, tier: Tier) -> Standing {
    let outcome =
        match refused(&*engine.device, tier, engine.folder(), engine.unpinned.as_ref(), || {
            engine.network.no_rdma()
        }) {
            Some(why) => Err(why),
            None if tier == Tier::GpuRdma => direct::test(engine, engine.bounce()).await,
            None if tier == Tier::LocalGds => local::test(engine, engine.bounce()).await,
            None => there_and_back(engine, tier).await,
        };
    match outcome {
        Ok(m) => Standing::Available(m),
        Err(why) => Standing::Unavailable(why),
    }
}

async fn there_and_back(engine: &Engine, tier: Tier) -> Result<Measured, Unavailable> {
    let (part, workers) = (engine.part as u64, engine.workers.len());
    // A device that is nearly full may still have memory for one part.
    let room = [workers, 1]
        .into_iter()
        .find_map(|n| Some((n, Scratch::new(&engine.device, n as u64 * part).ok()?)));
    let no_room = || Unavailable::TestStopped(Fault::NoMemory { bytes: part });
    // The memory is freed after the flight is over, also when the test is abandoned.
    let (at_once, scratch) = room.ok_or_else(no_room)?;
    let flight = Flight(Arc::default());
    let mut seed = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
    let mut took = [Duration::ZERO; 2];
    // First buffers outside the pool's regions, then buffers like the client's; the second result
    // counts. RDMA uses only those.
    let kinds: &[bool] = if tier == Tier::BounceRdma { &[true] } else { &[false, true] };
    for pooled in kinds.iter().copied() {
        took = [Duration::ZERO; 2];
        let all: Vec<usize> = (0..workers).collect();
        for group in all.chunks(at_once) {
            let places = || group.iter().map(|w| (*w, scratch.addr + (*w % at_once) as u64 * part));
            let sent: Vec<Buf> =
                group.iter().map(|_| pattern(buffer(engine, pooled), &mut seed)).collect();
            let begun = Instant::now();
            let load = |((w, to), b)| {
                engine.copy_by(w, &flight.0, tier, Work::Load { from: vec![b], to, sum: false })
            };
            let loads = places().zip(sent.iter().cloned()).map(load);
            try_join_all(loads).await.map_err(Unavailable::TestStopped)?;
            let loaded = Instant::now();
            let save = |(w, from)| {
                engine.copy_by(
                    w,
                    &flight.0,
                    tier,
                    Work::Save { from, into: buffer(engine, pooled), sum: false },
                )
            };
            let came = try_join_all(places().map(save)).await.map_err(Unavailable::TestStopped)?;
            took[0] += loaded - begun;
            took[1] += loaded.elapsed();
            for (sent, came) in sent.iter().zip(came) {
                let came = came.unwrap_or_else(|| BufMut::unpooled(0));
                if let Some(at) = sent.iter().zip(came.iter()).position(|(a, b)| a != b) {
                    return Err(Unavailable::TestFailed { at: at as u64 });
                }
                if came.len() < sent.len() {
                    return Err(Unavailable::TestFailed { at: came.len() as u64 });
                }
            }
        }
    }
    let rate = |t: Duration| (workers as u64 * part) as f64 / t.as_secs_f64().max(1e-9);
    Ok(Measured { load: rate(took[0]), save: rate(took[1]) })
}

fn buffer(engine: &Engine, pooled: bool) -> BufMut {
    if pooled { engine.network.pool().get_now(engine.part) } else { BufMut::unpooled(engine.part) }
}
