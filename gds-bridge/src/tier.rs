//! Paths between storage servers and GPU memory, and which of them a caller permits.

use std::{
    fmt,
    ops::{Index, IndexMut},
    str::FromStr,
};

use serde::{Serialize, Serializer};
use strake_proto::{Code, Error, Result};

/// A path between the storage servers and GPU memory. Ordered as [`Tier::ALL`]: the fewest copies
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// The storage server reads and writes GPU memory by RDMA.
    GpuRdma,
    /// cuFile reads a copy on this node.
    LocalGds,
    /// RDMA directly to pinned host memory, and a copy by the device.
    BounceRdma,
    /// Pinned host memory, filled by any other transport, and a copy by the device.
    BounceTcp,
    /// Host memory that is not pinned: the driver copies every byte once more.
    Pageable,
}

impl Tier {
    /// All tiers, best first.
    pub const ALL: [Tier; 5] =
        [Tier::GpuRdma, Tier::LocalGds, Tier::BounceRdma, Tier::BounceTcp, Tier::Pageable];

    /// The name that users write.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::GpuRdma => "gpu-rdma",
            Tier::LocalGds => "local-gds",
            Tier::BounceRdma => "bounce-rdma",
            Tier::BounceTcp => "bounce-tcp",
            Tier::Pageable => "pageable",
        }
    }

    /// Whether its bytes pass through pinned host memory: the device does the same work in both
    /// tiers, which differ only in the network transport.
    pub const fn is_bounce(self) -> bool {
        matches!(self, Tier::BounceRdma | Tier::BounceTcp)
    }

    /// Whether its bytes bypass host memory, so that only the device can verify them.
    pub const fn is_straight(self) -> bool {
        matches!(self, Tier::GpuRdma | Tier::LocalGds)
    }

    /// Whether it is `other` or a better one.
    pub fn is_at_least(self, other: Tier) -> bool {
        self <= other
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Tier {
    type Err = Error;
    fn from_str(s: &str) -> Result<Tier> {
        Tier::ALL.into_iter().find(|t| t.name() == s).ok_or_else(|| {
            let names = Tier::ALL.map(Tier::name).join(", ");
            Error::new(Code::Inval, format!("`{s}` is not a tier; the tiers are {names}"))
        })
    }
}

impl Serialize for Tier {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

/// The tiers that a call may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Only this tier; otherwise the call fails.
    Require(Tier),
    /// This tier and better ones; otherwise the call fails.
    AtLeast(Tier),
    /// All tiers, the fastest first.
    #[default]
    Prefer,
}

impl Policy {
    /// Whether a byte may take this tier.
    pub fn allows(self, tier: Tier) -> bool {
        match self {
            Policy::Require(t) => tier == t,
            Policy::AtLeast(t) => tier.is_at_least(t),
            Policy::Prefer => true,
        }
    }

    /// The policy that allows a tier only if both do; `None`: they have no tier in common.
    pub fn and(self, other: Policy) -> Option<Policy> {
        match (self, other) {
            (Policy::Prefer, p) | (p, Policy::Prefer) => Some(p),
            (Policy::AtLeast(a), Policy::AtLeast(b)) => Some(Policy::AtLeast(a.min(b))),
            (Policy::Require(t), p) | (p, Policy::Require(t)) => {
                p.allows(t).then_some(Policy::Require(t))
            }
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Require(t) => write!(f, "require:{t}"),
            Policy::AtLeast(t) => write!(f, "at-least:{t}"),
            Policy::Prefer => f.write_str("prefer"),
        }
    }
}

impl FromStr for Policy {
    type Err = Error;
    fn from_str(s: &str) -> Result<Policy> {
        match s.split_once(':') {
            None if s == "prefer" => Ok(Policy::Prefer),
            Some(("require", tier)) => Ok(Policy::Require(tier.parse()?)),
            Some(("at-least", tier)) => Ok(Policy::AtLeast(tier.parse()?)),
            _ => Err(Error::new(
                Code::Inval,
                format!("`{s}` is not a policy; expected prefer, at-least:TIER or require:TIER"),
            )),
        }
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// One value for each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByTier<T>([T; Tier::ALL.len()]);

impl<T> ByTier<T> {
    /// The result of `f` for each tier.
    pub fn new(f: impl FnMut(Tier) -> T) -> ByTier<T> {
        ByTier(Tier::ALL.map(f))
    }

    /// Best first.
    pub fn iter(&self) -> impl Iterator<Item = (Tier, &T)> {
        Tier::ALL.into_iter().zip(&self.0)
    }
}

impl ByTier<u64> {
    /// The sum over all tiers.
    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl<T> Index<Tier> for ByTier<T> {
    type Output = T;
    fn index(&self, tier: Tier) -> &T {
        &self.0[tier as usize]
    }
}

impl<T> IndexMut<Tier> for ByTier<T> {
    fn index_mut(&mut self, tier: Tier) -> &mut T {
        &mut self.0[tier as usize]
    }
}

impl<T: Serialize> Serialize for ByTier<T> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_map(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_and_policies_are_written_as_they_are_read() {
        let mut policies = vec![Policy::Prefer];
        for (i, t) in Tier::ALL.into_iter().enumerate() {
            assert_eq!((t as usize, t.name().parse::<Tier>().unwrap()), (i, t));
            policies.extend([Policy::Require(t), Policy::AtLeast(t)]);
        }
        for p in policies {
            assert_eq!(p.to_string().parse::<Policy>().unwrap(), p);
        }
        for bad in [
            "",
            "require",
            "require:",
            "require:gpu",
            "at-least:prefer",
            "atleast:pageable",
            "Prefer",
            "prefer:",
        ] {
            assert_eq!(bad.parse::<Policy>().unwrap_err().code, Code::Inval, "{bad}");
        }
        let e = "require:rdma".parse::<Policy>().unwrap_err();
        assert!(
            e.message.contains("gpu-rdma, local-gds, bounce-rdma, bounce-tcp, pageable"),
            "{e}"
        );
    }

    #[test]
    fn what_policies_allow() {
        let allowed =
            |p: Policy| Tier::ALL.into_iter().filter(|t| p.allows(*t)).collect::<Vec<_>>();
        assert_eq!(allowed(Policy::Prefer), Tier::ALL);
        assert_eq!(allowed(Policy::Require(Tier::BounceRdma)), [Tier::BounceRdma]);
        assert_eq!(
            allowed(Policy::AtLeast(Tier::BounceRdma)),
            [Tier::GpuRdma, Tier::LocalGds, Tier::BounceRdma]
        );
    }

    #[test]
    fn two_policies_allow_what_both_do() {
        let all = || {
            let of_tiers =
                Tier::ALL.into_iter().flat_map(|t| [Policy::Require(t), Policy::AtLeast(t)]);
            std::iter::once(Policy::Prefer).chain(of_tiers)
        };
        for (a, b) in all().flat_map(|a| all().map(move |b| (a, b))) {
            for t in Tier::ALL {
                let both = a.and(b).is_some_and(|p| p.allows(t));
                assert_eq!(both, a.allows(t) && b.allows(t), "{a} and {b}: {t}");
            }
        }
    }
}
