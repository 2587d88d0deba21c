//! Decides which tier each part of a call takes. Pure: no clock, no memory, no I/O. It is told what
//! happens, and returns what to do.

use strake_fabric::{ByRoad, Road};
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
    by_road: ByRoad,
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
            by_road: ByRoad::default(),
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

    /// As [`Run::road`], for a part of a file with or without a copy on this node. If only copies
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
    /// than RDMA are bounced, too, and count as [`Tier::BounceTcp`]. `None`: as for [`Run::road`],
    /// or this has just ended the call, because the policy allows no tier for the bytes.
    pub fn tier_of(&mut self, came: ByRoad) -> Option<Tier> {
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
        let lowest =
            if came[Road::Rdma] < came.sum() && tier.is_bounce() { Tier::BounceTcp } else { tier };
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
    fn takes(&self, tier: Tier, came: ByRoad) -> Option<Tier> {
        if !tier.is_bounce() {
            // The bytes are in host memory already.
            return (tier == Tier::Pageable).then_some(tier);
        }
        let has = |t: Tier| self.tiers.contains(&t);
        let (rdma, others) = (came[Road::Rdma] > 0, came[Road::Rdma] < came.sum());
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
    pub fn moved(&mut self, tier: Tier, by: ByRoad, staged: u64) -> ByTier<u64> {
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
    pub fn saved(&mut self, tier: Tier, by: ByRoad, staged: u64) -> ByTier<u64> {
        let less = self.policy.allows(Tier::BounceRdma) && !self.tiers.contains(&Tier::BounceRdma);
        let tier = match tier.is_bounce() {
            true if less || by[Road::Rdma] == 0 => Tier::BounceTcp,
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

    fn count(&mut self, tier: Tier, by: ByRoad, staged: u64) -> ByTier<u64> {
        let (bytes, mut split) = (by.sum(), ByTier::default());
        assert!(staged <= bytes);
        let rdma = if tier == Tier::BounceRdma { by[Road::Rdma] } else { 0 };
        split[Tier::BounceRdma] = rdma;
        split[if tier == Tier::BounceRdma { Tier::BounceTcp } else { tier }] += bytes - rdma;
        split.iter().for_each(|(t, n)| self.by_tier[t] += n);
        self.by_road += by;
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
        assert_eq!(self.by_road.sum(), moved, "bytes by transport and bytes by tier differ");
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
            by_road: self.by_road,
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
fn said(by: ByRoad) -> String {
    let all: Vec<_> =
        by.iter().filter(|(_, n)| *n > 0).map(|(road, n)| format!("{road} ({n})")).collect();
    all.join(" and ")
}

/// The transport in it that guarantees the least.
fn worst(by: ByRoad) -> Road {
    [Road::Tcp, Road::Local, Road::RdmaStream]
        .into_iter()
        .find(|r| by[*r] > 0)
        .unwrap_or(Road::Rdma)
}

fn in_words(all: &[(Tier, Unavailable)]) -> String {
    all.iter().map(|(t, why)| format!("{t}: {why}")).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{Checksums, Fault, reason};

    fn tcp(bytes: u64) -> ByRoad {
        ByRoad::of(Road::Tcp, bytes)
    }

    fn rdma(bytes: u64) -> ByRoad {
        ByRoad::of(Road::Rdma, bytes)
    }

    fn both(by_tcp: u64, by_rdma: u64) -> ByRoad {
        let mut all = tcp(by_tcp);
        all += rdma(by_rdma);
        all
    }

    fn lost() -> Unavailable {
        Unavailable::Lost(Fault::Driver { call: "cuMemcpy", code: 999, name: "unknown".into() })
    }

    /// Available with these speeds, best tier first; 0: not tested.
    fn standings(speeds: [u32; 5]) -> ByTier<Standing> {
        ByTier::new(|t| match speeds[t as usize] {
            0 => Standing::Unavailable(Unavailable::NotTested),
            n => Standing::Available(Measured { load: f64::from(n), save: f64::from(n) }),
        })
    }

    fn run(policy: Policy, speeds: [u32; 5]) -> Run {
        Run::begin(100, policy, Direction::Load, &standings(speeds), true)
    }

    #[test]
    fn the_fastest_is_first_and_a_draw_goes_to_the_better_tier() {
        let order = |p, speeds| choose(p, Direction::Load, &standings(speeds), true).0;
        use Tier::*;
        assert_eq!(
            order(Policy::Prefer, [24, 0, 20, 35, 3]),
            [BounceTcp, GpuRdma, BounceRdma, Pageable]
        );
        assert_eq!(order(Policy::Prefer, [9, 9, 9, 9, 9]), Tier::ALL);
        assert_eq!(order(Policy::AtLeast(BounceRdma), [24, 0, 20, 35, 3]), [GpuRdma, BounceRdma]);
        assert_eq!(order(Policy::Require(Pageable), [24, 0, 20, 35, 3]), [Pageable]);
        assert!(order(Policy::Require(LocalGds), [24, 0, 20, 35, 3]).is_empty());
    }

    #[test]
    fn each_direction_has_its_own_ranking() {
        let two = ByTier::new(|t| match t {
            Tier::BounceTcp => Standing::Available(Measured { load: 1.0, save: 2.0 }),
            Tier::Pageable => Standing::Available(Measured { load: 2.0, save: 1.0 }),
            _ => Standing::Unavailable(Unavailable::NotTested),
        });
        assert_eq!(
            choose(Policy::Prefer, Direction::Load, &two, true).0,
            [Tier::Pageable, Tier::BounceTcp]
        );
        assert_eq!(
            choose(Policy::Prefer, Direction::Save, &two, true).0,
            [Tier::BounceTcp, Tier::Pageable]
        );
    }

    #[test]
    fn gpu_rdma_needs_consent_and_says_that_nobody_verified() {
        let all = standings([5, 0, 0, 4, 0]);
        let (tiers, unable) = choose(Policy::Prefer, Direction::Load, &all, false);
        assert_eq!(
            (tiers, &unable[0]),
            (vec![Tier::BounceTcp], &(Tier::GpuRdma, Unavailable::NoConsent))
        );
        let refused = Run::begin(1, Policy::Require(Tier::GpuRdma), Direction::Load, &all, false);
        let (report, r) = refused.finish(vec![0], Duration::ZERO);
        let e = r.unwrap_err();
        assert!(e.code == Code::OpNotSupp && e.message.contains("accept_oss_checksum"), "{e}");
        assert_eq!(report.checksum, None);

        let mut r = run(Policy::Prefer, [5, 0, 0, 4, 0]);
        r.moved(Tier::GpuRdma, tcp(40), 0);
        r.lost(Tier::GpuRdma, lost());
        r.moved(Tier::BounceTcp, tcp(60), 0);
        let (report, outcome) = r.finish(vec![100], Duration::ZERO);
        outcome.unwrap();
        // A part of it is not verified, so the whole is not.
        assert_eq!(report.checksum, Some(Checksum::AtOssOnly));
        assert!(report.to_string().contains("checksum: at oss only"), "{report}");
    }

    #[test]
    fn every_reason_of_every_tier_is_told_by_the_error() {
        for why in reason::tests::all() {
            for tier in Tier::ALL {
                let none = ByTier::new(|_| Standing::Unavailable(why.clone()));
                let r = Run::begin(1, Policy::Require(tier), Direction::Save, &none, true);
                assert_eq!(r.tier(), None);
                let (report, outcome) = r.finish(vec![0], Duration::ZERO);
                let e = outcome.unwrap_err();
                assert!(e.message.contains(&format!("{tier}: {why}")), "{e}");
                assert_eq!((e.code, report.moved()), (Code::OpNotSupp, 0));
                assert_eq!(report.unavailable, [(tier, why.clone())]);
                let all = Run::begin(1, Policy::Prefer, Direction::Save, &none, true)
                    .finish(vec![0], Duration::ZERO);
                assert_eq!(all.0.unavailable.len(), 5);
                let e = all.1.unwrap_err();
                assert!(
                    Tier::ALL.iter().all(|t| e.message.contains(&format!("{t}: {why}"))),
                    "{e}"
                );
            }
        }
    }

    #[test]
    fn prefer_goes_down_in_mid_run_and_says_so() {
        let mut r = run(Policy::Prefer, [0, 0, 0, 9, 3]);
        assert_eq!(r.tier(), Some(Tier::BounceTcp));
        r.moved(Tier::BounceTcp, tcp(30), 10);
        r.lost(Tier::BounceTcp, lost());
        assert_eq!(r.tier(), Some(Tier::Pageable));
        // Other parts were under way: another failure adds nothing, and an arrival counts for the
        // tier that it took.
        r.lost(Tier::BounceTcp, lost());
        r.moved(Tier::BounceTcp, tcp(20), 0);
        r.moved(Tier::Pageable, tcp(50), 0);
        let (report, outcome) = r.finish(vec![60, 40], Duration::ZERO);
        outcome.unwrap();
        assert_eq!(
            (report.by_tier[Tier::BounceTcp], report.by_tier[Tier::Pageable], report.staged),
            (50, 50, 10)
        );
        let to = Some(Tier::Pageable);
        assert_eq!(report.switches, [Switch { after: 30, from: Tier::BounceTcp, to, why: lost() }]);
        assert!(!report.is_all(Tier::BounceTcp));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["by_tier"]["bounce-tcp"], &json["switches"][0]["to"]),
            (&50.into(), &"pageable".into())
        );
        assert!(json["unavailable"]["gpu-rdma"].as_str().unwrap().contains("not tested"), "{json}");
    }

    #[test]
    fn require_and_at_least_never_degrade_in_mid_run() {
        for policy in [Policy::Require(Tier::BounceTcp), Policy::AtLeast(Tier::BounceTcp)] {
            let mut r = run(policy, [0, 0, 0, 9, 30]);
            assert_eq!(r.tier(), Some(Tier::BounceTcp), "the faster one is not allowed");
            r.moved(Tier::BounceTcp, tcp(30), 0);
            r.lost(Tier::BounceTcp, lost());
            assert_eq!(r.tier(), None);
            r.fail(Error::new(Code::Io, "a later cause"));
            let (report, outcome) = r.finish(vec![30], Duration::ZERO);
            let e = outcome.unwrap_err();
            assert!(
                e.code == Code::Io
                    && e.message.contains("allows no other")
                    && e.message.contains("999"),
                "{e}"
            );
            assert_eq!((report.moved(), report.by_tier[Tier::Pageable]), (30, 0));
            assert_eq!(report.switches[0].to, None);
        }
        // `AtLeast`: a better tier continues.
        let mut r = run(Policy::AtLeast(Tier::BounceRdma), [7, 0, 9, 9, 9]);
        r.lost(Tier::BounceRdma, lost());
        assert_eq!(r.tier(), Some(Tier::GpuRdma));
    }

    #[test]
    #[should_panic(expected = "does not allow pageable")]
    fn a_byte_by_a_tier_that_is_not_allowed_is_a_bug() {
        run(Policy::Require(Tier::BounceTcp), [0, 0, 0, 9, 3]).moved(Tier::Pageable, tcp(1), 0);
    }

    #[test]
    #[should_panic(expected = "differ")]
    fn accounts_that_differ_are_a_bug() {
        let mut r = run(Policy::Prefer, [0, 0, 0, 9, 3]);
        r.moved(Tier::BounceTcp, tcp(100), 0);
        let _ = r.finish(vec![99], Duration::ZERO);
    }

    #[test]
    fn bytes_count_as_the_road_that_they_took() {
        let mut r = run(Policy::Prefer, [0, 0, 9, 9, 3]);
        assert_eq!(r.tier(), Some(Tier::BounceRdma));
        assert_eq!(r.tier_of(rdma(20)), Some(Tier::BounceRdma));
        r.moved(Tier::BounceRdma, rdma(20), 0);
        // The network changes: reported once, and counted for each byte.
        for _ in 0..2 {
            assert_eq!(r.tier_of(tcp(10)), Some(Tier::BounceTcp));
            r.moved(Tier::BounceTcp, tcp(10), 0);
        }
        assert_eq!(r.tier_of(both(15, 5)), Some(Tier::BounceRdma));
        r.moved(Tier::BounceRdma, both(15, 5), 1);
        // The RDMA stream is not direct.
        let stream = ByRoad::of(Road::RdmaStream, 10);
        assert_eq!(r.tier_of(stream), Some(Tier::BounceTcp));
        r.moved(Tier::BounceTcp, stream, 0);
        // Where RDMA can no longer be direct, it is no better than TCP.
        r.lost(Tier::BounceRdma, lost());
        assert_eq!(r.tier_of(rdma(30)), Some(Tier::BounceTcp));
        r.moved(Tier::BounceTcp, rdma(30), 30);
        let (report, outcome) = r.finish(vec![100], Duration::ZERO);
        outcome.unwrap();
        assert_eq!((report.by_tier[Tier::BounceRdma], report.by_tier[Tier::BounceTcp]), (25, 75));
        assert_eq!(
            (report.by_road[Road::Rdma], report.by_road[Road::Tcp], report.by_road.sum()),
            (55, 35, 100)
        );
        let told = |from, to, why| Switch { after: 0, from, to: Some(to), why };
        let all: Vec<Switch> =
            report.switches.iter().map(|s| Switch { after: 0, ..s.clone() }).collect();
        let came = told(Tier::BounceRdma, Tier::BounceTcp, Unavailable::OtherTransport(Road::Tcp));
        assert_eq!(all, [came, told(Tier::BounceRdma, Tier::BounceTcp, lost())]);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["by_road"]["rdma-stream"], &json["by_road"]["tcp"]),
            (&10.into(), &35.into())
        );
    }

    #[test]
    fn a_lower_road_than_asked_ends_the_call_before_a_byte_of_it_is_copied() {
        let strict = [Policy::Require(Tier::BounceRdma), Policy::AtLeast(Tier::BounceRdma)];
        let lower =
            [tcp(10), ByRoad::of(Road::Local, 10), ByRoad::of(Road::RdmaStream, 10), both(1, 9)];
        for (policy, came) in strict.into_iter().flat_map(|p| lower.map(|l| (p, l))) {
            let mut r = run(policy, [0, 0, 9, 9, 30]);
            assert_eq!(r.tier_of(rdma(30)), Some(Tier::BounceRdma));
            r.moved(Tier::BounceRdma, rdma(30), 0);
            assert_eq!((r.tier_of(came), r.tier()), (None, None));
            let (report, outcome) = r.finish(vec![30], Duration::ZERO);
            let e = outcome.unwrap_err();
            assert!(e.code == Code::Io && e.message.contains("allows no tier for them"), "{e}");
            assert_eq!((report.moved(), report.by_tier[Tier::BounceRdma]), (30, 30));
        }
        // A policy that requires TCP is not met by RDMA.
        let mut r = run(Policy::Require(Tier::BounceTcp), [0, 0, 9, 9, 30]);
        assert_eq!(r.tier_of(tcp(30)), Some(Tier::BounceTcp));
        assert_eq!(r.tier_of(both(29, 1)), None);
        let e = r.finish(vec![0], Duration::ZERO).1.unwrap_err();
        assert!(
            e.message.contains("came over tcp (29) and rdma (1), and require:bounce-tcp allows"),
            "{e}"
        );
        // Other tiers do not depend on the network.
        assert_eq!(
            run(Policy::Require(Tier::Pageable), [0, 0, 9, 9, 3]).tier_of(both(1, 2)),
            Some(Tier::Pageable)
        );
    }

    #[test]
    fn what_was_saved_by_a_lower_road_ends_the_call_and_is_told() {
        let mut r = run(Policy::AtLeast(Tier::BounceRdma), [0, 0, 9, 9, 30]);
        r.saved(Tier::BounceRdma, rdma(30), 0);
        r.saved(Tier::BounceRdma, both(10, 20), 0);
        assert_eq!(r.tier(), None);
        let (report, outcome) = r.finish(vec![60], Duration::ZERO);
        let e = outcome.unwrap_err();
        assert!(
            e.code == Code::Io
                && e.message.contains("10 bytes of a part went over tcp (10) and rdma (20)"),
            "{e}"
        );
        assert_eq!((report.by_tier[Tier::BounceRdma], report.by_tier[Tier::BounceTcp]), (50, 10));
        let mut r = run(Policy::Require(Tier::BounceTcp), [0, 0, 9, 9, 30]);
        r.saved(Tier::BounceTcp, rdma(30), 0);
        assert!(
            r.finish(vec![30], Duration::ZERO)
                .1
                .unwrap_err()
                .message
                .contains("makes its tier bounce-rdma")
        );
    }

    #[test]
    fn only_what_was_verified_to_the_last_byte_is_called_so() {
        let of = |verified, tier| {
            let mut r = run(Policy::Prefer, [9, 0, 0, 9, 3]);
            r.verified(tier, verified);
            r.moved(tier, tcp(100), 0);
            r.finish(vec![100], Duration::ZERO).0.checksums
        };
        assert_eq!(
            (of(100, Tier::BounceTcp), of(99, Tier::BounceTcp)),
            (Checksums::Gpu, Checksums::Host)
        );
        assert_eq!(
            (of(100, Tier::GpuRdma), of(99, Tier::GpuRdma)),
            (Checksums::Gpu, Checksums::None)
        );
        let none = standings([0, 0, 0, 9, 3]);
        let nothing = Run::begin(0, Policy::Prefer, Direction::Load, &none, true)
            .finish(vec![0], Duration::ZERO);
        assert_eq!(nothing.0.checksums, Checksums::None);
    }

    #[test]
    fn a_copy_that_fails_is_told_also_of_the_second_tier_that_bounces() {
        let mut r = run(Policy::Prefer, [0, 0, 9, 9, 3]);
        r.lost(Tier::BounceTcp, lost());
        assert_eq!(r.tier_of(tcp(60)), Some(Tier::Pageable));
        r.moved(Tier::Pageable, tcp(60), 0);
        assert_eq!(r.tier_of(rdma(40)), Some(Tier::BounceRdma));
        r.moved(Tier::BounceRdma, rdma(40), 0);
        let (report, outcome) = r.finish(vec![100], Duration::ZERO);
        outcome.unwrap();
        assert_eq!(report.switches[0].to, Some(Tier::Pageable));
        let mut r = run(Policy::AtLeast(Tier::BounceTcp), [0, 0, 9, 9, 3]);
        r.lost(Tier::BounceTcp, lost());
        assert_eq!(r.tier_of(tcp(60)), None);
        let e = r.finish(vec![0], Duration::ZERO).1.unwrap_err();
        assert!(
            e.message.contains("allows no tier for them; bounce-tcp: it failed in a call"),
            "{e}"
        );
    }

    #[test]
    fn a_part_without_a_copy_takes_the_next_tier_or_ends_the_call() {
        let mut r = run(Policy::Prefer, [0, 9, 0, 5, 3]);
        r.not_for_all(Tier::LocalGds, Unavailable::NotSealed { ino: 7 });
        assert_eq!(
            (r.tier_for(true), r.tier_for(false)),
            (Some(Tier::LocalGds), Some(Tier::BounceTcp))
        );
        // That another file has a copy does not make this a lower tier than asked.
        assert_eq!(r.tier_of(tcp(40)), Some(Tier::BounceTcp));
        r.moved(Tier::BounceTcp, tcp(40), 0);
        r.moved(Tier::LocalGds, ByRoad::of(Road::Local, 60), 0);
        let (report, outcome) = r.finish(vec![100], Duration::ZERO);
        outcome.unwrap();
        assert!(report.switches.is_empty(), "{report}");
        assert_eq!(
            (report.by_tier[Tier::LocalGds], report.checksum),
            (60, Some(Checksum::AtOssOnly))
        );
        assert!(report.unavailable.contains(&(Tier::LocalGds, Unavailable::NotSealed { ino: 7 })));

        let mut r = run(Policy::AtLeast(Tier::LocalGds), [5, 9, 9, 9, 9]);
        r.not_for_all(Tier::LocalGds, Unavailable::NotSealed { ino: 7 });
        assert_eq!(r.tier_for(false), Some(Tier::GpuRdma));
        r.lost(Tier::GpuRdma, lost());
        assert_eq!(
            (r.tier_for(true), r.tier_for(false), r.tier_for(true)),
            (Some(Tier::LocalGds), None, None)
        );
        let e = r.finish(vec![0], Duration::ZERO).1.unwrap_err();
        assert!(
            e.code == Code::Io
                && e.message.contains("has no copy")
                && e.message.contains("is not sealed"),
            "{e}"
        );
        assert!(e.message.contains("; gpu-rdma: it failed in a call"), "{e}");
    }

    #[test]
    fn a_tier_beside_the_first_one_that_fails_is_told() {
        let mut r = run(Policy::Prefer, [9, 0, 0, 5, 3]);
        assert_eq!(
            (r.tier(), r.beside(Tier::GpuRdma)),
            (Some(Tier::GpuRdma), Some(Tier::BounceTcp))
        );
        assert_eq!(r.lost_beside(), None);
        r.lost(Tier::BounceTcp, lost());
        assert_eq!(
            (r.tier(), r.beside(Tier::GpuRdma)),
            (Some(Tier::GpuRdma), Some(Tier::Pageable))
        );
        r.lost(Tier::Pageable, lost());
        assert_eq!((r.tier(), r.beside(Tier::GpuRdma)), (Some(Tier::GpuRdma), None));
        assert!(r.lost_beside().unwrap().starts_with("pageable: it failed in a call"));
        r.moved(Tier::GpuRdma, rdma(100), 0);
        let (report, outcome) = r.finish(vec![100], Duration::ZERO);
        outcome.unwrap();
        let told = |from, to| Switch { after: 0, from, to, why: lost() };
        assert_eq!(
            report.switches,
            [told(Tier::BounceTcp, Some(Tier::Pageable)), told(Tier::Pageable, None)]
        );
    }

    fn policies() -> impl Strategy<Value = Policy> {
        (0usize..3, 0usize..5).prop_map(|(kind, t)| match kind {
            0 => Policy::Prefer,
            1 => Policy::AtLeast(Tier::ALL[t]),
            _ => Policy::Require(Tier::ALL[t]),
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        /// Parts begin on the tier that they are given, and end in any order and way.
        #[test]
        fn bytes_add_up_and_policies_hold_whatever_happens(
            policy in policies(),
            speeds in prop::array::uniform5(0u32..4),
            steps in prop::collection::vec((0u8..9, any::<prop::sample::Index>(), 1u64..50), 0..60),
            consent in any::<bool>(),
        ) {
            let standings = standings(speeds);
            let asked = 1_000_000;
            let mut run = Run::begin(asked, policy, Direction::Load, &standings, consent);
            let (mut under_way, mut moved, mut ended) = (Vec::new(), ByTier::<u64>::default(), run.tier().is_none());
            let mut gone = Vec::new();
            for (what, which, bytes) in steps {
                match what {
                    0..4 => {
                        let part = bytes % 7;
                        let came = match what {
                            0 => tcp(bytes),
                            1 => rdma(bytes),
                            2 => both(part, bytes - part),
                            _ => ByRoad::of(Road::RdmaStream, bytes),
                        };
                        match run.tier_of(came) {
                            Some(t) => {
                                prop_assert!(!ended && policy.allows(t) && speeds[t as usize] > 0 && !gone.contains(&t));
                                prop_assert!(!t.is_straight());
                                under_way.push((t, came));
                            }
                            None => ended = true,
                        }
                    }
                    4..6 if !under_way.is_empty() => {
                        let (t, came) = under_way.swap_remove(which.index(under_way.len()));
                        run.moved(t, came, came.sum() / 2);
                        let straight = if t == Tier::BounceRdma { came[Road::Rdma] } else { 0 };
                        moved[Tier::BounceRdma] += straight;
                        moved[if t == Tier::BounceRdma { Tier::BounceTcp } else { t }] += came.sum() - straight;
                    }
                    6 if !under_way.is_empty() => {
                        let (t, _) = under_way.swap_remove(which.index(under_way.len()));
                        run.lost(t, lost());
                        gone.push(t);
                    }
                    8 => match run.tier_for(bytes % 2 == 0) {
                        Some(t) => {
                            prop_assert!(!ended && policy.allows(t) && speeds[t as usize] > 0 && !gone.contains(&t));
                            prop_assert!(bytes % 2 == 0 || t != Tier::LocalGds);
                            prop_assert!(consent || !t.is_straight());
                            if t == Tier::LocalGds {
                                under_way.push((t, ByRoad::of(Road::Local, bytes)));
                            }
                        }
                        None => ended = true,
                    },
                    7 if bytes == 7 => run.fail(Error::new(Code::Io, "the file system")),
                    _ => {}
                }
            }
            ended |= run.tier().is_none();
            if !ended {
                run.fail(Error::new(Code::Io, "given up"));
            }
            let (report, outcome) = run.finish(vec![moved.sum()], Duration::ZERO);
            prop_assert!(outcome.is_err());
            prop_assert_eq!(report.by_tier, moved);
            prop_assert_eq!(report.moved(), report.ranges.iter().sum::<u64>());
            prop_assert_eq!(report.moved(), report.by_road.sum());
            for (t, bytes) in report.by_tier.iter() {
                prop_assert!(*bytes == 0 || policy.allows(t));
            }
            for s in &report.switches {
                prop_assert!(policy.allows(s.from) && s.to.is_none_or(|t| policy.allows(t)));
            }
        }
    }
}
