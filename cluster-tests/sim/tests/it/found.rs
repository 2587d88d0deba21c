//! Seeds that found a bug; the faults are those of harsh runs.

use strake_sim::{run::run, scenario::Scenario};

fn holds(seed: u64) {
    let report = run(Scenario::harsh(seed)).unwrap();
    assert!(report.violations.is_empty(), "seed {seed}: {:#?}", report.violations);
}

/// A write lock was turned into a read lock and given back before the caller knew, and could not
/// become a write lock again: then it stayed for ever.
#[test]
fn a_lock_that_is_given_back_does_not_stay() {
    holds(4024);
}

/// A storage server without disk space refused an update that its predecessor forwarded. Once there
/// was space, a late copy of that update was applied there alone. It had the version that the next
/// update got, which was then taken for already applied.
#[test]
fn what_a_successor_refused_does_not_take_the_place_of_the_next_write() {
    holds(1285469);
}

/// A write whose bytes were known to be stable was dropped while older bytes under it were not
/// stable yet. When those were sent again, they overwrote the newer bytes.
#[test]
fn older_bytes_are_not_replayed_over_what_was_written_since() {
    holds(1255373);
}
