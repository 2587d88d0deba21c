//! Which tier each part of a call takes. No clock, no memory, no I/O: what happens is told to it, what to do is asked of it.

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

/// What is known of a tier before a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// It passed its self-test.
    Available(Measured),
    /// It cannot be used, and why.
    Unavailable(Unavailable),
}

/// Tiers that a call may take, the fastest first; a draw goes to the better tier. And the others that its policy allows, with their
/// reasons. `consent`: `GpuRdma` may be used though nobody verifies its bytes behind the storage server.
pub fn choose(
    policy: Policy,
    direction: Direction,
    standings: &ByTier<Standing>,
    consent: bool,
) -> (Vec<Tier>, Vec<(Tier, Unavailable)>) {
    let (mut able, mut unable) = (Vec::new(), Vec::new());
    for (tier, standing) in standings.iter().filter(|(t, _)| policy.allows(*t)) {
        match standing {
            Standing::Available(_) if tier == Tier::GpuRdma && !consent => unable.push((tier, Unavailable::NoConsent)),
            Standing::Available(m) => able.push((tier, m.of(direction))),
            Standing::Unavailable(why) => unable.push((tier, why.clone())),
        }
    }
    // Stable: of equals the better tier stays first.
    able.sort_by(|a, b| b.1.total_cmp(&a.1));
    (able.into_iter().map(|(t, _)| t).collect(), unable)
}

/// One call: its tiers, and the account of its bytes.
///
/// | state | `lost(the tier in use)` | `lost(another)` | `fail` |
/// |---|---|---|---|
/// | goes by a tier | the next tier, or ended if there is none | struck off | ended |
/// | ended | as it is | as it is | the first cause stays |
///
/// `moved` is taken in every state: parts that were under way when the call was ended, or its tier changed, may arrive.
#[derive(Debug)]
pub struct Run {
    policy: Policy,
    direction: Direction,
    /// Not lost, the fastest first. The first one is in use.
    roads: Vec<Tier>,
    unavailable: Vec<(Tier, Unavailable)>,
    asked: u64,
    by_tier: ByTier<u64>,
    staged: u64,
    over_rdma: u64,
    switches: Vec<Switch>,
    ended: Option<Error>,
}

impl Run {
    /// A call of so many bytes. Without a tier for it, it has ended.
    pub fn begin(asked: u64, policy: Policy, direction: Direction, standings: &ByTier<Standing>, consent: bool) -> Run {
        let (roads, unavailable) = choose(policy, direction, standings, consent);
        let ended = roads.is_empty().then(|| {
            let why = in_words(&unavailable);
            Error::new(Code::OpNotSupp, format!("no tier is available that the policy {policy} allows: {why}"))
        });
        Run {
            policy,
            direction,
            roads,
            unavailable,
            asked,
            by_tier: ByTier::default(),
            staged: 0,
            over_rdma: 0,
            switches: Vec::new(),
            ended,
        }
    }

    /// What was asked is wrong: nothing begins, and this is the cause before all others.
    pub fn refuse(&mut self, e: Error) {
        assert_eq!(self.by_tier.sum(), 0);
        self.ended = Some(e);
    }

    /// The tier that the next part takes; `None`: the call has ended and begins no other part.
    pub fn road(&self) -> Option<Tier> {
        if self.ended.is_some() { None } else { self.roads.first().copied() }
    }

    /// A part arrived, `staged` of its bytes by way of one more copy.
    pub fn moved(&mut self, tier: Tier, bytes: u64, staged: u64) {
        assert!(self.policy.allows(tier), "{} does not allow {tier}, by which {bytes} bytes went", self.policy);
        assert!(staged <= bytes);
        self.by_tier[tier] += bytes;
        self.staged += staged;
        assert!(self.by_tier.sum() <= self.asked, "more bytes arrived than were asked for");
    }

    /// A tier failed; several parts may say so of the same one.
    pub fn lost(&mut self, tier: Tier, why: Unavailable) {
        let Some(at) = self.roads.iter().position(|t| *t == tier) else { return };
        self.roads.remove(at);
        if at > 0 || self.ended.is_some() {
            return;
        }
        let to = self.roads.first().copied();
        if to.is_none() {
            let (policy, others) = (self.policy, in_words(&self.unavailable));
            let others = if others.is_empty() { others } else { format!("; {others}") };
            let m = format!("{tier} failed in the middle of the call, and {policy} allows no other: {why}{others}");
            self.ended = Some(Error::new(Code::Io, m));
        }
        self.switches.push(Switch { after: self.by_tier.sum(), from: tier, to, why });
    }

    /// At the end: so many bytes went over the client's RDMA meanwhile. Then it is not certain that `BounceTcp` was what it says, and who
    /// required exactly that is told. For all others it is a lower bound.
    pub fn over_rdma(&mut self, bytes: u64) {
        self.over_rdma = bytes;
        if bytes > 0 && self.policy == Policy::Require(Tier::BounceTcp) && self.by_tier.sum() > 0 {
            let m = format!(
                "{} is not certain: the client had {bytes} bytes over RDMA meanwhile; use fabric=tcp",
                self.policy
            );
            self.fail(Error::new(Code::Io, m));
        }
    }

    /// Something happened that no tier helps against.
    pub fn fail(&mut self, e: Error) {
        self.ended.get_or_insert(e);
    }

    /// The account, and whether the call succeeded. `ranges`: bytes moved of each, counted by who completed the parts.
    pub fn finish(self, ranges: Vec<u64>, took: std::time::Duration) -> (Report, Result<(), Error>) {
        let moved = self.by_tier.sum();
        assert_eq!(ranges.iter().sum::<u64>(), moved, "bytes by range and bytes by tier differ");
        let direct = self.by_tier[Tier::GpuRdma] > 0;
        let checksum = (moved > 0).then_some(if direct { Checksum::AtOssOnly } else { Checksum::AtClient });
        let report = Report {
            direction: self.direction,
            policy: self.policy,
            asked: self.asked,
            ranges,
            by_tier: self.by_tier,
            staged: self.staged,
            over_rdma: self.over_rdma,
            switches: self.switches,
            unavailable: self.unavailable,
            checksum,
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

fn in_words(all: &[(Tier, Unavailable)]) -> String {
    all.iter().map(|(t, why)| format!("{t}: {why}")).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{Fault, reason};

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
        assert_eq!(order(Policy::Prefer, [24, 0, 20, 35, 3]), [BounceTcp, GpuRdma, BounceRdma, Pageable]);
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
        assert_eq!(choose(Policy::Prefer, Direction::Load, &two, true).0, [Tier::Pageable, Tier::BounceTcp]);
        assert_eq!(choose(Policy::Prefer, Direction::Save, &two, true).0, [Tier::BounceTcp, Tier::Pageable]);
    }

    #[test]
    fn gpu_rdma_needs_consent_and_says_that_nobody_verified() {
        let all = standings([5, 0, 0, 4, 0]);
        let (roads, unable) = choose(Policy::Prefer, Direction::Load, &all, false);
        assert_eq!((roads, &unable[0]), (vec![Tier::BounceTcp], &(Tier::GpuRdma, Unavailable::NoConsent)));
        let refused = Run::begin(1, Policy::Require(Tier::GpuRdma), Direction::Load, &all, false);
        let (report, r) = refused.finish(vec![0], Duration::ZERO);
        let e = r.unwrap_err();
        assert!(e.code == Code::OpNotSupp && e.message.contains("accept_oss_checksum"), "{e}");
        assert_eq!(report.checksum, None);

        let mut r = run(Policy::Prefer, [5, 0, 0, 4, 0]);
        r.moved(Tier::GpuRdma, 40, 0);
        r.lost(Tier::GpuRdma, lost());
        r.moved(Tier::BounceTcp, 60, 0);
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
                assert_eq!(r.road(), None);
                let (report, outcome) = r.finish(vec![0], Duration::ZERO);
                let e = outcome.unwrap_err();
                assert!(e.message.contains(&format!("{tier}: {why}")), "{e}");
                assert_eq!((e.code, report.moved()), (Code::OpNotSupp, 0));
                assert_eq!(report.unavailable, [(tier, why.clone())]);
                let all = Run::begin(1, Policy::Prefer, Direction::Save, &none, true).finish(vec![0], Duration::ZERO);
                assert_eq!(all.0.unavailable.len(), 5);
                let e = all.1.unwrap_err();
                assert!(Tier::ALL.iter().all(|t| e.message.contains(&format!("{t}: {why}"))), "{e}");
            }
        }
    }

    #[test]
    fn prefer_goes_down_in_mid_run_and_says_so() {
        let mut r = run(Policy::Prefer, [0, 0, 0, 9, 3]);
        assert_eq!(r.road(), Some(Tier::BounceTcp));
        r.moved(Tier::BounceTcp, 30, 10);
        r.lost(Tier::BounceTcp, lost());
        assert_eq!(r.road(), Some(Tier::Pageable));
        // Others were under way: one more failure says nothing new, an arrival counts as what it was.
        r.lost(Tier::BounceTcp, lost());
        r.moved(Tier::BounceTcp, 20, 0);
        r.moved(Tier::Pageable, 50, 0);
        let (report, outcome) = r.finish(vec![60, 40], Duration::ZERO);
        outcome.unwrap();
        assert_eq!((report.by_tier[Tier::BounceTcp], report.by_tier[Tier::Pageable], report.staged), (50, 50, 10));
        let to = Some(Tier::Pageable);
        assert_eq!(report.switches, [Switch { after: 30, from: Tier::BounceTcp, to, why: lost() }]);
        assert!(!report.is_all(Tier::BounceTcp));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((&json["by_tier"]["bounce-tcp"], &json["switches"][0]["to"]), (&50.into(), &"pageable".into()));
        assert!(json["unavailable"]["gpu-rdma"].as_str().unwrap().contains("not tested"), "{json}");
    }

    #[test]
    fn require_and_at_least_never_degrade_in_mid_run() {
        for policy in [Policy::Require(Tier::BounceTcp), Policy::AtLeast(Tier::BounceTcp)] {
            let mut r = run(policy, [0, 0, 0, 9, 30]);
            assert_eq!(r.road(), Some(Tier::BounceTcp), "the faster one is not allowed");
            r.moved(Tier::BounceTcp, 30, 0);
            r.lost(Tier::BounceTcp, lost());
            assert_eq!(r.road(), None);
            r.fail(Error::new(Code::Io, "a later cause"));
            let (report, outcome) = r.finish(vec![30], Duration::ZERO);
            let e = outcome.unwrap_err();
            assert!(e.code == Code::Io && e.message.contains("allows no other") && e.message.contains("999"), "{e}");
            assert_eq!((report.moved(), report.by_tier[Tier::Pageable]), (30, 0));
            assert_eq!(report.switches[0].to, None);
        }
        // At least: a better one goes on.
        let mut r = run(Policy::AtLeast(Tier::BounceRdma), [7, 0, 9, 9, 9]);
        r.lost(Tier::BounceRdma, lost());
        assert_eq!(r.road(), Some(Tier::GpuRdma));
    }

    #[test]
    #[should_panic(expected = "does not allow pageable")]
    fn a_byte_by_a_tier_that_is_not_allowed_is_a_bug() {
        run(Policy::Require(Tier::BounceTcp), [0, 0, 0, 9, 3]).moved(Tier::Pageable, 1, 0);
    }

    #[test]
    #[should_panic(expected = "differ")]
    fn accounts_that_differ_are_a_bug() {
        let mut r = run(Policy::Prefer, [0, 0, 0, 9, 3]);
        r.moved(Tier::BounceTcp, 100, 0);
        let _ = r.finish(vec![99], Duration::ZERO);
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
        /// Parts begin on the tier that is told, and end in any order and way.
        #[test]
        fn bytes_add_up_and_policies_hold_whatever_happens(
            policy in policies(),
            speeds in prop::array::uniform5(0u32..4),
            steps in prop::collection::vec((0u8..8, any::<prop::sample::Index>(), 1u64..50), 0..60),
            consent in any::<bool>(),
        ) {
            let standings = standings(speeds);
            let asked = 1_000_000;
            let mut run = Run::begin(asked, policy, Direction::Load, &standings, consent);
            let (mut under_way, mut moved, mut ended) = (Vec::new(), ByTier::<u64>::default(), run.road().is_none());
            let mut gone = Vec::new();
            for (what, which, bytes) in steps {
                match what {
                    0..4 => match run.road() {
                        Some(t) => {
                            prop_assert!(!ended && policy.allows(t) && speeds[t as usize] > 0 && !gone.contains(&t));
                            prop_assert!(consent || t != Tier::GpuRdma);
                            under_way.push((t, bytes));
                        }
                        None => ended = true,
                    },
                    4..6 if !under_way.is_empty() => {
                        let (t, bytes) = under_way.swap_remove(which.index(under_way.len()));
                        run.moved(t, bytes, bytes / 2);
                        moved[t] += bytes;
                    }
                    6 if !under_way.is_empty() => {
                        let (t, _) = under_way.swap_remove(which.index(under_way.len()));
                        run.lost(t, lost());
                        gone.push(t);
                    }
                    7 if bytes == 7 => run.fail(Error::new(Code::Io, "the file system")),
                    _ => {}
                }
            }
            ended |= run.road().is_none();
            if !ended {
                run.fail(Error::new(Code::Io, "given up"));
            }
            let (report, outcome) = run.finish(vec![moved.sum()], Duration::ZERO);
            prop_assert!(outcome.is_err());
            prop_assert_eq!(report.by_tier, moved);
            prop_assert_eq!(report.moved(), report.ranges.iter().sum::<u64>());
            for (t, bytes) in report.by_tier.iter() {
                prop_assert!(*bytes == 0 || policy.allows(t));
            }
            for s in &report.switches {
                prop_assert!(policy.allows(s.from) && s.to.is_none_or(|t| policy.allows(t)));
            }
        }
    }
}
