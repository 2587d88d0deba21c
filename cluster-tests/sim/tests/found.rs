//! Seeds that found a bug, each under the faults that did.

use strake_sim::run::{Scenario, run};

fn holds(seed: u64) {
    let report = run(Scenario::harsh(seed)).unwrap();
    assert!(report.violations.is_empty(), "seed {seed}: {:#?}", report.violations);
}

/// A lock for writing that became one for reading, was given back before its caller knew, and could not be what it had been any
/// more: then it stayed for ever.
#[test]
fn a_lock_that_is_given_back_does_not_stay() {
    holds(4024);
}
