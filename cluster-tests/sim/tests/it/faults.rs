//! Faults are made, and those that hit something are counted.

use strake_sim::{
    ledger::Ledger,
    mix::{Mode, one},
    run::run,
    scenario::{Scenario, TASKS},
};

fn every_kind_of_fault_hits_an_operation() {
    let mut sum = Ledger::default();
    for seed in 1..=12 {
        let o = run(Scenario { joins: true, ..Scenario::harsh(seed) }).unwrap();
        assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
        assert!(o.faults.counted() > 50, "seed {seed}: {}", o.faults.text());
        sum.add(&o.faults);
    }
    // Blocks decay only in runs of their own.
    let decay = run(Scenario::decay(1)).unwrap();
    assert!(decay.violations.is_empty(), "{:#?}", decay.violations);
    sum.add(&decay.faults);
    for seed in 1..=6 {
        sum.add(&run(Scenario::tables(seed)).unwrap().faults);
    }
    print!("{}", sum.text());
    let never: Vec<_> = sum.rows().filter(|(.., counted)| *counted == 0).map(|r| r.0).collect();
    assert!(never.is_empty(), "never counted: {never:?}");
    assert!(sum.rows().all(|(_, made, counted)| counted <= made), "{}", sum.text());
}

/// Without clients there is less to hit: only what servers do among themselves after a fault.
fn what_hits_nothing_is_not_counted() {
    let (mut working, mut without) = (0, 0);
    for seed in 1..=6 {
        let busy = Scenario::harsh(seed);
        let idle = Scenario { without: (1 << TASKS) - 1, ..busy };
        let (busy, idle) =
            (run(busy).unwrap().faults.counted(), run(idle).unwrap().faults.counted());
        println!("seed {seed}: {busy} with clients at work, {idle} without");
        working += busy;
        without += idle;
    }
    assert!(without * 3 < working * 2, "{without} of {working}");
}

fn the_other_kinds_of_run_count_too() {
    for mode in [Mode::Rivals, Mode::Lapse, Mode::Baton, Mode::History] {
        let seed = (1..).find(|s| Mode::of(*s) == mode).unwrap();
        let (a, b) = (one(mode, seed), one(mode, seed));
        assert!(a.violations.is_empty(), "{a}");
        assert!(a.faults.counted() > 5, "{a}");
        assert_eq!((a.faults, a.trace), (b.faults, b.trace), "{mode:?}");
    }
}

mod long {
    #[test]
    #[ignore = "long tier, 45 s: ./test --long"]
    fn every_kind_of_fault_hits_an_operation() {
        super::every_kind_of_fault_hits_an_operation();
    }

    #[test]
    #[ignore = "long tier, 20 s: ./test --long"]
    fn what_hits_nothing_is_not_counted() {
        super::what_hits_nothing_is_not_counted();
    }

    #[test]
    #[ignore = "long tier, 20 s: ./test --long"]
    fn the_other_kinds_of_run_count_too() {
        super::the_other_kinds_of_run_count_too();
    }
}
