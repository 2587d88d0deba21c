//! Chunk tables, metadata states and Raft logs decay: no wrong byte is read, and no member
//! continues with a damaged log.

use strake_sim::{
    ledger::{Kind, Ledger},
    run::run,
    scenario::Scenario,
};

#[test]
fn no_promise_is_broken_while_tables_states_and_logs_decay() {
    let (mut sum, mut done) = (Ledger::default(), [0; 3]);
    for seed in 1..=15 {
        let o = run(Scenario::tables(seed)).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
        done = [done[0] + o.reads, done[1] + o.syncs, done[2] + o.names];
        sum.add(&o.faults);
    }
    let hits = |kind: Kind| sum.rows().find(|r| r.0 == kind.name()).map_or(0, |r| r.2);
    let hits = [Kind::TableDecay, Kind::StateDecay, Kind::LogDecay, Kind::Replaced].map(hits);
    assert!(hits[0] > 15 && hits[1] > 8 && hits[2] > 2 && hits[3] > 2, "{hits:?}");
    assert!(done.iter().all(|n| *n > 150), "the runs show too little: {done:?}");
}

#[test]
fn a_run_replays() {
    let one = || run(Scenario::tables(4)).unwrap();
    if let Some(how) = one().parting(&one()) {
        panic!("another course at {how}");
    }
}
