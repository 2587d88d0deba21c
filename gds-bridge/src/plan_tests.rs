//! Tests of the plan of a call.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::{Checksums, Fault, reason};

fn tcp(bytes: u64) -> ByTransport {
    ByTransport::of(Transport::Tcp, bytes)
}

fn rdma(bytes: u64) -> ByTransport {
    ByTransport::of(Transport::Rdma, bytes)
}

fn both(by_tcp: u64, by_rdma: u64) -> ByTransport {
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
            assert!(Tier::ALL.iter().all(|t| e.message.contains(&format!("{t}: {why}"))), "{e}");
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
fn bytes_count_as_the_transport_that_they_took() {
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
    let stream = ByTransport::of(Transport::RdmaStream, 10);
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
        (
            report.by_transport[Transport::Rdma],
            report.by_transport[Transport::Tcp],
            report.by_transport.sum()
        ),
        (55, 35, 100)
    );
    let told = |from, to, why| Switch { after: 0, from, to: Some(to), why };
    let all: Vec<Switch> =
        report.switches.iter().map(|s| Switch { after: 0, ..s.clone() }).collect();
    let came = told(Tier::BounceRdma, Tier::BounceTcp, Unavailable::OtherTransport(Transport::Tcp));
    assert_eq!(all, [came, told(Tier::BounceRdma, Tier::BounceTcp, lost())]);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(
        (&json["by_transport"]["rdma-stream"], &json["by_transport"]["tcp"]),
        (&10.into(), &35.into())
    );
}

#[test]
fn a_lower_tier_than_asked_ends_the_call_before_a_byte_of_it_is_copied() {
    let strict = [Policy::Require(Tier::BounceRdma), Policy::AtLeast(Tier::BounceRdma)];
    let lower = [
        tcp(10),
        ByTransport::of(Transport::Local, 10),
        ByTransport::of(Transport::RdmaStream, 10),
        both(1, 9),
    ];
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
fn what_was_saved_by_a_lower_tier_ends_the_call_and_is_told() {
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
    assert_eq!((of(100, Tier::GpuRdma), of(99, Tier::GpuRdma)), (Checksums::Gpu, Checksums::None));
    let none = standings([0, 0, 0, 9, 3]);
    let nothing =
        Run::begin(0, Policy::Prefer, Direction::Load, &none, true).finish(vec![0], Duration::ZERO);
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
    assert!(e.message.contains("allows no tier for them; bounce-tcp: it failed in a call"), "{e}");
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
    r.moved(Tier::LocalGds, ByTransport::of(Transport::Local, 60), 0);
    let (report, outcome) = r.finish(vec![100], Duration::ZERO);
    outcome.unwrap();
    assert!(report.switches.is_empty(), "{report}");
    assert_eq!((report.by_tier[Tier::LocalGds], report.checksum), (60, Some(Checksum::AtOssOnly)));
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
    assert_eq!((r.tier(), r.beside(Tier::GpuRdma)), (Some(Tier::GpuRdma), Some(Tier::BounceTcp)));
    assert_eq!(r.lost_beside(), None);
    r.lost(Tier::BounceTcp, lost());
    assert_eq!((r.tier(), r.beside(Tier::GpuRdma)), (Some(Tier::GpuRdma), Some(Tier::Pageable)));
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
                        _ => ByTransport::of(Transport::RdmaStream, bytes),
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
                    let straight = if t == Tier::BounceRdma { came[Transport::Rdma] } else { 0 };
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
                            under_way.push((t, ByTransport::of(Transport::Local, bytes)));
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
        prop_assert_eq!(report.moved(), report.by_transport.sum());
        for (t, bytes) in report.by_tier.iter() {
            prop_assert!(*bytes == 0 || policy.allows(t));
        }
        for s in &report.switches {
            prop_assert!(policy.allows(s.from) && s.to.is_none_or(|t| policy.allows(t)));
        }
    }
}
