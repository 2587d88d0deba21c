//! Twenty seeds, each run twice: no promise broken, and both runs alike to the byte.

use std::ops::RangeInclusive;

use strake_sim::run::{Outcome, Scenario, run};

fn twice(seed: u64) -> Outcome {
    let first = run(Scenario::new(seed)).unwrap();
    assert!(first.violations.is_empty(), "seed {seed}: {:#?}", first.violations);
    let second = run(Scenario::new(seed)).unwrap();
    if let Some(how) = first.parting(&second) {
        panic!("seed {seed} took another course at {how}");
    }
    first
}

/// Each is to write and sync; what is done more rarely is to be done by some of them.
fn all_twice(seeds: RangeInclusive<u64>) {
    let all: Vec<Outcome> = seeds.map(twice).collect();
    for o in &all {
        assert!(o.writes > 0 && o.syncs > 0 && o.names > 0 && o.scrubbed > 0, "seed {} did nothing", o.seed);
    }
    let some = |count: fn(&Outcome) -> u64| all.iter().any(|o| count(o) > 0);
    assert!(some(|o| o.punches) && some(|o| o.cuts) && some(|o| o.seeks) && some(|o| o.locks));
}

macro_rules! seeds {
    ($($name:ident: $range:expr,)*) => { $(#[test] fn $name() { all_twice($range); })* };
}

// Four tests, so that a runner with several workers shares them out.
seeds! {
    seeds_1_to_5: 1..=5,
    seeds_6_to_10: 6..=10,
    seeds_11_to_15: 11..=15,
    seeds_16_to_20: 16..=20,
}
