//! Targets are drained and later kept, under the faults of the other runs.

use strake_sim::{
    ledger::{Kind, Ledger},
    run::run,
    scenario::Scenario,
};

#[test]
fn no_promise_is_broken_while_replicas_move() {
    let mut sum = Ledger::default();
    for seed in 1..=8 {
        let base = if seed % 2 == 0 { Scenario::harsh(seed) } else { Scenario::new(seed) };
        let o =
            run(Scenario { moves: true, ..base }).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
        sum.add(&o.faults);
    }
    let made = sum.rows().find(|r| r.0 == Kind::Moved.name()).unwrap().1;
    assert!(made > 20, "{made} decisions: the runs show too little");
}

#[test]
fn a_run_replays() {
    let one = || run(Scenario { moves: true, ..Scenario::new(7) }).unwrap();
    if let Some(how) = one().parting(&one()) {
        panic!("another course at {how}");
    }
}
