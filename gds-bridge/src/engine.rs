//! What all tiers use: the device, the threads that copy, and what the self-tests have found.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use strake_fabric::BufMut;

use crate::{
    ByTier, Direction, GpuMem, Network, Tier, Unavailable,
    copier::{Call, Copier, Work},
    fault::Fault,
    local::Local,
    plan::{Measured, Standing},
};

/// The part of a bridge that moves single parts, in calls and in self-tests.
pub struct Engine {
    pub device: Arc<dyn GpuMem>,
    pub network: Arc<dyn Network>,
    pub workers: Vec<Copier>,
    /// Largest part, bytes.
    pub part: usize,
    /// Why no memory is pinned.
    pub unpinned: Option<Fault>,
    /// The caller accepts bytes that the device does not verify.
    pub consent: bool,
    /// Whether the device can compute checksums of its memory; otherwise the reason why not. Parts
    /// on a direct path, which does not use host memory, are always verified by the device where it
    /// can.
    pub device_sums: Result<(), String>,
    /// Reads copies on this node; `None`: no folder with copies was named.
    pub local: Option<Local>,
    pub standings: Mutex<ByTier<Standing>>,
    /// Number of copies that workers were chosen for.
    pub next: AtomicUsize,
}

impl Engine {
    /// Makes a tier unavailable until a self-test passes.
    pub fn lose(&self, tier: Tier, why: &Fault) {
        tracing::warn!("{}: {tier} failed: {why}", self.device.name());
        self.standings.lock()[tier] = Standing::Unavailable(Unavailable::Lost(why.clone()));
    }

    pub fn is_available(&self, tier: Tier) -> bool {
        matches!(self.standings.lock()[tier], Standing::Available(_))
    }

    /// The standings for a direction: if the device computes no checksums, nothing is saved
    /// directly from its memory.
    pub fn standings_of(&self, direction: Direction) -> ByTier<Standing> {
        let mut all = self.standings.lock().clone();
        if let (Direction::Save, Standing::Available(_), Err(why)) =
            (direction, &all[Tier::GpuRdma], &self.device_sums)
        {
            all[Tier::GpuRdma] = Standing::Unavailable(Unavailable::NoSums { why: why.clone() });
        }
        if let (Direction::Save, Standing::Available(_)) = (direction, &all[Tier::LocalGds]) {
            all[Tier::LocalGds] = Standing::Unavailable(Unavailable::LoadsOnly);
        }
        all
    }

    /// The folder for copies on this node.
    pub fn folder(&self) -> Option<&Path> {
        self.local.as_ref().map(Local::dir)
    }

    /// What the self-test of the bounce tier measured, or else that of the pageable tier.
    pub fn bounce(&self) -> Option<Measured> {
        let all = self.standings.lock();
        [Tier::BounceTcp, Tier::Pageable].into_iter().find_map(|t| match &all[t] {
            Standing::Available(m) => Some(*m),
            Standing::Unavailable(_) => None,
        })
    }

    /// The next worker in turn.
    pub fn worker(&self) -> &Copier {
        &self.workers[self.next.fetch_add(1, Relaxed) % self.workers.len()]
    }

    /// A copy by one worker, for self-tests.
    pub async fn copy_by(
        &self,
        worker: usize,
        call: &Arc<Call>,
        tier: Tier,
        work: Work,
    ) -> Result<Option<BufMut>, Fault> {
        Ok(self.workers[worker].copy(call, tier, work).await?.saved)
    }

    /// The tier by which the device copies in self-tests.
    pub fn copies_as(&self) -> Tier {
        if self.unpinned.is_none() { Tier::BounceTcp } else { Tier::Pageable }
    }
}
