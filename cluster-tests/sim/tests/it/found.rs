//! Seeds that found a bug, each under the faults that did.

use strake_sim::run::{Scenario, run};

fn holds(seed: u64) {
    let report = run(Scenario::harsh(seed)).unwrap();
    assert!(report.violations.is_empty(), "seed {seed}: {:#?}", report.violations);
}

/// A lock for writing that became one for reading, was given back before its caller knew, and could
/// not be what it had been any more: then it stayed for ever.
#[test]
fn a_lock_that_is_given_back_does_not_stay() {
    holds(4024);
}

/// A storage server without space refused what its predecessor forwarded. When there was space a
/// copy of that arrived, was made there alone, and had the version that the next update was given:
/// which was then taken for known.
#[test]
fn what_a_successor_refused_does_not_take_the_place_of_the_next_write() {
    holds(1285469);
}

/// A write whose bytes were known to be stable was forgotten while older bytes below it were not
/// stable yet: those were replayed over it.
#[test]
fn older_bytes_are_not_replayed_over_what_was_written_since() {
    holds(1255373);
}
