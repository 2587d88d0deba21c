//! All kinds of run, as in `./simulate`, with other seeds each day. A failing seed may be new; its
//! line says how to run it again.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use strake_sim::{
    ledger::Ledger,
    mix::{Mode, one},
};

/// More seeds than two minutes can run anywhere.
const SEEDS_A_DAY: u64 = 1 << 20;
const DAY: u64 = 24 * 3600;

#[test]
fn new_seeds_for_a_while() {
    new_seeds(Duration::from_secs(20), 0, 2);
}

mod long {
    #[test]
    #[ignore = "long tier, 120 s: ./test --long"]
    fn new_seeds_for_two_minutes() {
        // Not the seeds of the short run; at least one of each kind.
        super::new_seeds(std::time::Duration::from_secs(120), super::SEEDS_A_DAY / 2, 20);
    }
}

fn new_seeds(lasts: Duration, after: u64, least: u64) {
    let (begun, day) =
        (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / DAY);
    let first = day * SEEDS_A_DAY + after;
    let (mut sum, mut seeds) = (Ledger::default(), 0);
    while begun.elapsed() < lasts {
        let seed = first + seeds;
        let done = one(Mode::of(seed), seed);
        assert!(done.violations.is_empty(), "{}", done.text());
        sum.add(&done.faults);
        seeds += 1;
    }
    println!("{seeds} seeds from {first} on, {} faults counted:\n{}", sum.counted(), sum.text());
    assert!(seeds >= least, "{seeds} seeds in {lasts:?}, expected {least}");
}
