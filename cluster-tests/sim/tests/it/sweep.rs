//! Two minutes of all kinds of run, as in `./simulate`, with other seeds each day. A failing seed
//! may be new; its line says how to run it again.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use strake_sim::{
    ledger::Ledger,
    mix::{Mode, one},
};

const LASTS: Duration = Duration::from_secs(120);
/// More seeds than two minutes can run anywhere.
const SEEDS_A_DAY: u64 = 1 << 20;
const DAY: u64 = 24 * 3600;

#[test]
fn two_minutes_of_seeds_that_nobody_has_seen() {
    let (begun, day) =
        (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / DAY);
    let first = day * SEEDS_A_DAY;
    let (mut sum, mut seeds) = (Ledger::default(), 0);
    while begun.elapsed() < LASTS {
        let seed = first + seeds;
        let done = one(Mode::of(seed), seed);
        assert!(done.violations.is_empty(), "{}", done.text());
        sum.add(&done.faults);
        seeds += 1;
    }
    println!("{seeds} seeds from {first} on, {} faults counted:\n{}", sum.counted(), sum.text());
    assert!(seeds >= 20, "{seeds} seeds in {LASTS:?}: not even one of each kind");
}
