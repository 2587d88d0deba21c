//! Decides which tier each part of a call takes. Pure: no clock, no memory, no I/O. It is told what
//! happens, and returns what to do.

use strake_fabric::{ByTransport, Transport};
use strake_proto::{Code, Error};

use crate::{ByTier, Direction, Policy, Report, Switch, Tier, Unavailable, report::Checksum};

/// What a self-test measured, bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// To the device.
    pub load: f64,
    /// From the device.
    pub save: f64,
}

impl Measured {
    fn of(self, direction: Direction) -> f64 {
        match direction {
            Direction::Load => self.load,
            Direction::Save => self.save,
        }
    }
}

/// What is known about a tier before a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// It passed its self-test.
    Available(Measured),
    /// It cannot be used, and why.
    Unavailable(Unavailable),
}

/// Returns the tiers that a call may take, the fastest first (of equals, the better tier first),
/// and the other tiers that its policy allows, with the reasons why they are unavailable.
/// `consent`: direct tiers may be used although the device does not verify their bytes.
pub fn choose(
    policy: Policy,
    direction: Direction,
    standings: &ByTier<Standing>,
    consent: bool,
) -> (Vec<Tier>, Vec<(Tier, Unavailable)>) {
    let (mut able, mut unable) = (Vec::new(), Vec::new());
    for (tier, standing) in standings.iter().filter(|(t, _)| policy.allows(*t)) {
        match standing {
            Standing::Available(_) if tier.is_straight() && !consent => {
                unable.push((tier, Unavailable::NoConsent))
            }
            Standing::Available(m) => able.push((tier, m.of(direction))),
            Standing::Unavailable(why) => unable.push((tier, why.clone())),
        }
    }
    // A stable sort: of equals the better tier stays first.
    able.sort_by(|a, b| b.1.total_cmp(&a.1));
    (able.into_iter().map(|(t, _)| t).collect(), unable)
}

/// One call: its tiers, and the account of its bytes.
///
/// | state | `lost(the tier in use)` | `lost(another)` | `fail` |
/// |---|---|---|---|
/// | goes by a tier | the next tier, or ended if there is none | struck off, and told | ended |
/// | ended | as it is | as it is | the first cause stays |
///
/// `moved` is accepted in every state: parts that were under way when the call ended, or when its
/// tier changed, may still arrive.
#[derive(Debug)]
pub struct Run {
    policy: Policy,
    direction: Direction,
    /// Remaining tiers, the fastest first. The first one is in use.
    tiers: Vec<Tier>,
    unavailable: Vec<(Tier, Unavailable)>,
    asked: u64,
    by_tier: ByTier<u64>,
    staged: u64,
    by_transport: ByTransport,
    /// Bytes whose checksums the device has confirmed, and those of them that went directly into
    /// its memory or out of it.
    verified: u64,
    verified_direct: u64,
    switches: Vec<Switch>,
    /// A part took another bounce tier than the one in use, and that was reported.
    other_transport: bool,
    ended: Option<Error>,
}

impl Run {
    /// Begins a call of this many bytes. If there is no tier for it, it has ended.
    pub fn begin(
        asked: u64,
        policy: Policy,
        direction: Direction,
        standings: &ByTier<Standing>,
        consent: bool,
    ) -> Run {
        let (tiers, unavailable) = choose(policy, direction, standings, consent);
        let ended = tiers.is_empty().then(|| {
            let why = in_words(&unavailable);
            Error::new(
                Code::OpNotSupp,
                format!("the policy {policy} allows no available tier: {why}"),
            )
        });
        Run {
            policy,
            direction,
            tiers,
            unavailable,
            asked,
            by_tier: ByTier::default(),
            staged: 0,
            by_transport: ByTransport::default(),
            verified: 0,
            verified_direct: 0,
            switches: Vec::new(),
            other_transport: false,
            ended,
        }
    }

    /// Fails the call because the request is wrong: nothing begins, and this cause replaces all
    /// others.
    pub fn refuse(&mut self, e: Error) {
        assert_eq!(self.by_tier.sum(), 0);
        self.ended = Some(e);
    }

    /// The tier that the next part takes; `None`: the call has ended and begins no other part.
    pub fn tier(&self) -> Option<Tier> {
        if self.ended.is_some() { None } else { self.tiers.first().copied() }
    }

    /// As [`Run::tier`], for a part of a file with or without a copy on this node. If only copies
    /// are left and the file has none, this ends the call.
    pub fn tier_for(&mut self, copied: bool) -> Option<Tier> {
        self.tier()?;
        let found = self.tiers.iter().copied().find(|t| copied || *t != Tier::LocalGds);
        if found.is_none() {
            let m = format!(
                "a file has no copy on this node, and no other tier that {} allows is left: {}{}",
                self.policy,
                in_words(&self.unavailable),
                self.last_lost(|_| true).map(|lost| format!("; {lost}")).unwrap_or_default()
            );
            self.ended = Some(Error::new(Code::Io, m));
        }
        found
    }

    /// Notes that some files of the call cannot take a tier that others take. Reported with the
    /// unavailable tiers.
    pub fn not_for_all(&mut self, tier: Tier, why: Unavailable) {
        if self.tiers.contains(&tier) {
            self.unavailable.push((tier, why));
            self.unavailable.sort_by_key(|(t, _)| *t);
        }
    }

    /// The tier for a part that the tier in use cannot take: the next one over host memory.
    pub fn beside(&self, tier: Tier) -> Option<Tier> {
        self.tiers.iter().copied().find(|t| *t != tier && (t.is_bounce() || *t == Tier::Pageable))
    }

    /// The last failure of a tier over host memory in this call.
    pub fn lost_beside(&self) -> Option<String> {
        self.last_lost(|t| t.is_bounce() || t == Tier::Pageable)
    }

    fn last_lost(&self, of: impl Fn(Tier) -> bool) -> Option<String> {
        let failed = |s: &&Switch| {
            matches!(s.why, Unavailable::Lost(_) | Unavailable::Resting(_)) && of(s.from)
        };
        self.switches.iter().rev().find(failed).map(|s| format!("{}: {}", s.from, s.why))
    }

    /// The tier for a part that was fetched and lies in host memory: the first remaining one that
    /// bytes of these transports can take. With [`Tier::BounceRdma`], bytes of other transports
    /// than RDMA are bounced, too, and count as [`Tier::BounceTcp`]. `None`: as for [`Run::tier`],
    /// or this has just ended the call, because the policy allows no tier for the bytes.
    pub fn tier_of(&mut self, came: ByTransport) -> Option<Tier> {
        let first = self.tier()?;
        // It is in host memory already, so a copy on this node does not matter.
        let first = self.tiers.iter().copied().find(|t| *t != Tier::LocalGds).unwrap_or(first);
        let Some(tier) = self.tiers.iter().find_map(|t| self.takes(*t, came)) else {
            let lost = self.last_lost(|_| true).map(|lost| format!("; {lost}")).unwrap_or_default();
            let m = format!(
                "bytes of a part came over {}, and {} allows no tier for them{lost}",
                said(came),
                self.policy
            );
            self.ended = Some(Error::new(Code::Io, m));
            return None;
        };
        let lowest = if came[Transport::Rdma] < came.sum() && tier.is_bounce() {
            Tier::BounceTcp
        } else {
            tier
        };
        if lowest > first && !self.other_transport {
            self.other_transport = true;
            let why = Unavailable::OtherTransport(worst(came));
            self.switches.push(Switch {
                after: self.by_tier.sum(),
                from: first,
                to: Some(lowest),
                why,
            });
        }
        Some(tier)
    }

    /// The tier by which a part is copied if `tier` is chosen, or `None` if its bytes cannot take
    /// it.
    fn takes(&self, tier: Tier, came: ByTransport) -> Option<Tier> {
        if !tier.is_bounce() {
            // The bytes are in host memory already.
            return (tier == Tier::Pageable).then_some(tier);
        }
        let has = |t: Tier| self.tiers.contains(&t);
        let (rdma, others) = (came[Transport::Rdma] > 0, came[Transport::Rdma] < came.sum());
        // If RDMA bytes may not count as `BounceRdma`, they must not count as a lesser tier either.
        let whole = !rdma
            || has(Tier::BounceRdma)
            || (has(Tier::BounceTcp) && self.policy.allows(Tier::BounceRdma));
        let fits = whole && (!others || has(Tier::BounceTcp));
        let by_rdma = rdma && has(Tier::BounceRdma);
        fits.then_some(if by_rdma { Tier::BounceRdma } else { Tier::BounceTcp })
    }

    /// Counts a part that arrived by this tier, its bytes by transport, `staged` of them copied
    /// once more. Returns its bytes by tier.
    pub fn moved(&mut self, tier: Tier, by: ByTransport, staged: u64) -> ByTier<u64> {
        let split = self.count(tier, by, staged);
        for (tier, bytes) in split.iter().filter(|(_, bytes)| **bytes > 0) {
            assert!(
                self.policy.allows(tier),
                "{} does not allow {tier}, which moved {bytes} bytes",
                self.policy
            );
        }
        split
    }

    /// Notes that the device's checksum of a part was right, before the part is counted.
    pub fn verified(&mut self, tier: Tier, bytes: u64) {
        self.verified += bytes;
        self.verified_direct += if tier.is_straight() { bytes } else { 0 };
    }

    /// Counts a saved part. Only now is it known which transports it took. If these make it a tier
    /// that the policy does not allow, the call ends. The bytes still count: they were moved.
    /// Returns its bytes by tier.
    pub fn saved(&mut self, tier: Tier, by: ByTransport, staged: u64) -> ByTier<u64> {
        let less = self.policy.allows(Tier::BounceRdma) && !self.tiers.contains(&Tier::BounceRdma);
        let tier = match tier.is_bounce() {
            true if less || by[Transport::Rdma] == 0 => Tier::BounceTcp,
            true => Tier::BounceRdma,
            false => tier,
        };
        let split = self.count(tier, by, staged);
        let wrong = split.iter().find(|(t, bytes)| **bytes > 0 && !self.policy.allows(*t));
        if let Some((tier, bytes)) = wrong {
            let m = format!(
                "{bytes} bytes of a part went over {}, which makes its tier {tier}, and {} does \
                 not allow that",
                said(by),
                self.policy
            );
            self.fail(Error::new(Code::Io, m));
        }
        split
    }

    fn count(&mut self, tier: Tier, by: ByTransport, staged: u64) -> ByTier<u64> {
        let (bytes, mut split) = (by.sum(), ByTier::default());
        assert!(staged <= bytes);
        let rdma = if tier == Tier::BounceRdma { by[Transport::Rdma] } else { 0 };
        split[Tier::BounceRdma] = rdma;
        split[if tier == Tier::BounceRdma { Tier::BounceTcp } else { tier }] += bytes - rdma;
        split.iter().for_each(|(t, n)| self.by_tier[t] += n);
        self.by_transport += by;
        self.staged += staged;
        assert!(self.by_tier.sum() <= self.asked, "more bytes arrived than were asked for");
        split
    }

    /// A tier failed; several parts may report the same failure. If it is not the first one, then
    /// the network chose it (of the two bounce tiers), or it was used beside the first.
    pub fn lost(&mut self, tier: Tier, why: Unavailable) {
        let Some(at) = self.tiers.iter().position(|t| *t == tier) else { return };
        // Copies on this node serve only parts that have one; the others use the tiers after it.
        let first =
            self.tiers.iter().copied().find(|t| *t != Tier::LocalGds || tier == *t).unwrap_or(tier);
        self.tiers.remove(at);
        if self.ended.is_some() {
            return;
        }
        let mut left = self.tiers.iter().copied().filter(|t| *t != Tier::LocalGds);
        let to = match first == tier {
            // Including parts that had a copy.
            true if at == 0 => self.tiers.first().copied(),
            true => left.next(),
            false if tier.is_bounce() && first.is_bounce() => left.find(|t| !t.is_bounce()),
            false => self.beside(first),
        };
        if self.tiers.is_empty() {
            let (policy, others) = (self.policy, in_words(&self.unavailable));
            let others = if others.is_empty() { others } else { format!("; {others}") };
            let m = format!(
                "{tier} failed during the call, and {policy} allows no other: {why}{others}"
            );
            self.ended = Some(Error::new(Code::Io, m));
        }
        self.switches.push(Switch { after: self.by_tier.sum(), from: tier, to, why });
    }

    /// Fails the call for a reason that no other tier would solve.
    pub fn fail(&mut self, e: Error) {
        self.ended.get_or_insert(e);
    }

    /// Returns the account, and whether the call succeeded. `ranges`: bytes moved of each range,
    /// counted by the code that completed the parts.
    pub fn finish(
        self,
        ranges: Vec<u64>,
        took: std::time::Duration,
    ) -> (Report, Result<(), Error>) {
        let moved = self.by_tier.sum();
        assert_eq!(ranges.iter().sum::<u64>(), moved, "bytes by range and bytes by tier differ");
        assert_eq!(self.by_transport.sum(), moved, "bytes by transport and bytes by tier differ");
        let straight: u64 =
            self.by_tier.iter().filter(|(t, _)| t.is_straight()).map(|(_, n)| n).sum();
        let direct = straight > self.verified_direct;
        assert!(self.verified <= moved);
        let checksum = (moved > 0).then_some(match self.verified == moved {
            true => Checksum::OnGpu,
            false if direct => Checksum::AtOssOnly,
            false => Checksum::AtClient,
        });
        let report = Report {
            direction: self.direction,
            policy: self.policy,
            asked: self.asked,
            ranges,
            by_tier: self.by_tier,
            staged: self.staged,
            by_transport: self.by_transport,
            switches: self.switches,
            unavailable: self.unavailable,
            checksum,
            checksums: checksum.into(),
            not_on_gpu: None,
            took,
        };
        let outcome = match self.ended {
            Some(e) => Err(e),
            None => {
                assert_eq!(moved, self.asked, "a call that did not fail moves everything");
                Ok(())
            }
        };
        (report, outcome)
    }
}

/// The names of the transports in it.
fn said(by: ByTransport) -> String {
    let all: Vec<_> = by
        .iter()
        .filter(|(_, n)| *n > 0)
        .map(|(transport, n)| format!("{transport} ({n})"))
        .collect();
    all.join(" and ")
}

/// The transport in it that guarantees the least.
fn worst(by: ByTransport) -> Transport {
    [Transport::Tcp, Transport::Local, Transport::RdmaStream]
        .into_iter()
        .find(|r| by[*r] > 0)
        .unwrap_or(Transport::Rdma)
}

fn in_words(all: &[(Tier, Unavailable)]) -> String {
    all.iter().map(|(t, why)| format!("{t}: {why}")).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
