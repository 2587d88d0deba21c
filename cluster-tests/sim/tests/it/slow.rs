//! Slow targets are drained, and no others.

use std::time::Duration;

use strake_sim::slow::run;

#[test]
fn a_target_whose_disk_becomes_slow_is_emptied_while_clients_write() {
    for seed in 1..=2 {
        let o = run(seed, Some(Duration::from_millis(250)))
            .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
        assert!(o.had > 0 && o.drained == [(1, 0)], "seed {seed}: {o:?}");
    }
}

fn nothing_is_drained_where_disks_are_as_they_should_be_or_a_little_slower() {
    for slow in [None, Some(Duration::from_millis(10))] {
        let o = run(3, slow).unwrap();
        assert!(o.violations.is_empty() && o.drained.is_empty() && o.writes > 1000, "{o:?}");
    }
}

mod long {
    #[test]
    #[ignore = "long tier, 35 s: ./test --long"]
    fn nothing_is_drained_where_disks_are_as_they_should_be_or_a_little_slower() {
        super::nothing_is_drained_where_disks_are_as_they_should_be_or_a_little_slower();
    }
}
