//! The standings of the tiers, in a form that is passed between processes.

use std::{path::Path, sync::Arc};

use serde::{Deserialize, Serialize};
use strake_fabric::Pool;
use strake_proto::Result;

use crate::{
    Bridge, ByTier, GpuMem, Numa, Options, Tier, Unavailable,
    file::NO_CLIENT,
    options::SYSFS,
    plan::Standing,
    selftest::{no_folder, refused},
};

/// One tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierStatus {
    /// Its name.
    pub tier: String,
    /// Whether it passed a self-test.
    pub available: bool,
    /// A word for the reason if it is not available: see [`Unavailable::kind`].
    pub reason: Option<String>,
    /// The reason in a sentence.
    pub why: Option<String>,
    /// What the self-test measured, bytes per second to the device.
    pub load_bytes_per_s: Option<f64>,
    /// The same, from the device.
    pub save_bytes_per_s: Option<f64>,
}

impl TierStatus {
    /// The status of a tier that cannot be used.
    pub fn unavailable(tier: Tier, why: &Unavailable) -> TierStatus {
        TierStatus {
            tier: tier.name().into(),
            available: false,
            reason: Some(why.kind().into()),
            why: Some(why.to_string()),
            load_bytes_per_s: None,
            save_bytes_per_s: None,
        }
    }

    fn of(tier: Tier, standing: &Standing) -> TierStatus {
        match standing {
            Standing::Unavailable(why) => TierStatus::unavailable(tier, why),
            Standing::Available(m) => TierStatus {
                tier: tier.name().into(),
                available: true,
                reason: None,
                why: None,
                load_bytes_per_s: Some(m.load),
                // A tier that saves nothing.
                save_bytes_per_s: (m.save > 0.0).then_some(m.save),
            },
        }
    }
}

/// The standings without a device, with the reason why there is none. `local`: the folder for
/// copies on this node.
pub fn without(why: &Unavailable, local: Option<&Path>) -> Vec<TierStatus> {
    all(|tier| Standing::Unavailable(no_folder(tier, local).unwrap_or_else(|| why.clone())))
}

/// The standings with a device, without moving a byte.
pub fn untested(device: &dyn GpuMem, local: Option<&Path>) -> Vec<TierStatus> {
    all(|tier| {
        let no_rdma = || Some(NO_CLIENT.to_string());
        Standing::Unavailable(
            refused(device, tier, local, None, no_rdma).unwrap_or(Unavailable::NotTested),
        )
    })
}

/// The NUMA node of a device, or why it is unknown.
pub fn numa(device: &dyn GpuMem) -> Numa {
    Numa::of(Path::new(SYSFS), device.pci())
}

/// The result of self-tests.
pub struct Tested {
    /// The tiers.
    pub tiers: Vec<TierStatus>,
    /// The bridge's notice about its memory.
    pub notice: Option<String>,
    /// The NUMA node of the device, and what was placed there.
    pub numa: Numa,
}

/// Runs the self-tests.
pub async fn tested(device: Arc<dyn GpuMem>, options: Options) -> Result<Tested> {
    let bridge = Bridge::open(device, Arc::new(Pool::default()), options).await?;
    let (notice, numa) = (bridge.notice().map(String::from), bridge.numa().clone());
    Ok(Tested { tiers: of_bridge(&bridge), notice, numa })
}

/// The standings of a bridge.
pub(crate) fn of_bridge(bridge: &Bridge) -> Vec<TierStatus> {
    let standings = bridge.standings();
    all(|tier| standings[tier].clone())
}

fn all(f: impl FnMut(Tier) -> Standing) -> Vec<TierStatus> {
    ByTier::new(f).iter().map(|(tier, s)| TierStatus::of(tier, s)).collect()
}
