//! Histories of a few seeds are linearizable, replay to the byte, and show planted faults.

use strake_histories::{explain::explain, search::LIMIT};
use strake_sim::{
    histories::{CLIENTS, OPS, Report, Scenario, run},
    plant::Plant,
};

fn history(seed: u64, plant: Option<Plant>) -> Report {
    run(Scenario { seed, plant }).unwrap()
}

fn holds(seed: u64) {
    let report = history(seed, None);
    let why = || explain(&report.history, &report.verdict, LIMIT);
    assert_eq!(report.failure(), None, "seed {seed}: {report}\n{}", why());
    assert!(report.history.records.len() > (CLIENTS * OPS / 2) as usize, "{report}");
}

#[test]
fn seeds_1_to_15() {
    (1..=15).for_each(holds);
}

#[test]
fn seeds_16_to_30() {
    (16..=30).for_each(holds);
}

/// The network delivered a second copy of a rename that had been answered. The copy gave back the
/// lease on the moved file a second time.
#[test]
fn a_copy_of_a_request_gives_no_lease_back() {
    holds(1_282_917);
}

/// A leader told a client that its session had ended, and was replaced before the log said so. The
/// client got the same session again and counted its requests from 1, so it got the answers to old
/// requests.
#[test]
fn no_session_is_said_to_have_ended_before_the_log_says_so() {
    holds(11_086_778);
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in [3, 4, 5] {
        let (a, b) = (history(seed, None), history(seed, None));
        assert_eq!(a.history, b.history, "seed {seed}");
        assert_eq!(a.trace, b.trace, "seed {seed}");
    }
}

/// The planted fault is found in at least `least` of the seeds.
fn is_found(plant: Plant, least: usize, seeds: u64) {
    let found =
        (1..=seeds).filter(|seed| history(*seed, Some(plant)).verdict.is_rejected()).count();
    println!("{plant:?}: {found} of {seeds}");
    assert!(found >= least, "{plant:?} was found in {found} of {seeds} seeds only");
}

#[test]
fn a_planted_stale_read_is_rejected() {
    is_found(Plant::StaleRead, 5, 10);
}

#[test]
fn a_planted_repeated_operation_is_rejected() {
    is_found(Plant::Repeat, 5, 20);
}

#[test]
fn a_planted_follower_that_does_not_wait_is_rejected() {
    is_found(Plant::Unsettled, 3, 40);
    // Late recalls alone are no fault.
    for seed in 1..=10 {
        let report = history(seed, Some(Plant::LateRecall));
        assert!(
            report.verdict.is_linearizable() && report.counts.followed > 0,
            "seed {seed}: {report}"
        );
    }
}
