//! Explores every order of events of small cases of the leader's lease (`docs/leader-lease.md`), and
//! checks that the explorer finds planted mistakes.

use strake_explore::{
    explore,
    leader::{Bounds, Fault, World},
};

/// The leader's clock is 10 % slow, the others are 10 % fast.
const WORST: [u64; 3] = [45, 55, 55];

fn case() -> Bounds {
    Bounds { clocks: WORST, steps: 3, rounds: 1, campaigns: 1, ..Bounds::default() }
}

fn holds(bounds: Bounds) {
    strake_explore::holds(&bounds, World::new(bounds, Fault::None));
}

#[test]
fn elections() {
    holds(case());
    holds(Bounds { rounds: 2, ..case() });
    holds(Bounds { campaigns: 2, ..case() });
}

#[test]
fn clocks() {
    for clocks in [[50, 50, 50], [55, 45, 45], [45, 55, 45], [50, 55, 45]] {
        holds(Bounds { clocks, ..case() });
    }
}

#[test]
fn restarts() {
    holds(Bounds { crashes: 1, ..case() });
    holds(Bounds { crashes: 2, steps: 2, ..case() });
}

#[test]
fn handovers() {
    holds(Bounds { handovers: 1, rounds: 2, campaigns: 0, steps: 2, ..case() });
    holds(Bounds { handovers: 1, steps: 2, ..case() });
}

#[test]
fn older_programs() {
    holds(Bounds { older: true, ..case() });
    holds(Bounds { older: true, handovers: 1, steps: 2, ..case() });
}

/// The check can fail: the promise covers clocks that differ by 10 %, not more.
#[test]
fn clocks_that_differ_more_let_two_lead() {
    let far = Bounds { clocks: [38, 60, 60], ..case() };
    assert!(explore(World::new(far, Fault::None), 1_000_000).broken.is_some());
}

/// Bounds in which the explorer finds each mistake.
#[test]
fn mistakes_are_found() {
    let two = Bounds { rounds: 2, ..case() };
    let handover = Bounds { handovers: 1, campaigns: 0, ..case() };
    let cases = [
        (Fault::ClocksAgree, case()),
        (Fault::WholeTicks, case()),
        (Fault::FromAnswers, case()),
        (Fault::AnyRound, two),
        (Fault::NobodyAnswers, case()),
        (Fault::VotesAnyway, case()),
        (Fault::RestartForgets, Bounds { crashes: 1, ..case() }),
        (Fault::HandoverKeepsLease, handover),
        (Fault::HandoverOnlySuspends, handover),
        (Fault::OlderCounts, Bounds { older: true, ..case() }),
        (Fault::FormerLeaderAnswers, case()),
    ];
    let mut missed = Vec::new();
    for (fault, bounds) in cases {
        let seen = explore(World::new(bounds, fault), 1_000_000);
        match seen.broken {
            Some((story, why)) => {
                println!("{fault:?}: {} states, {} steps: {why}", seen.states, story.len());
            }
            None => missed.push((fault, seen.states)),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
