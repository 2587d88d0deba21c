//! Updates that arrive after their client has given them up.

use strake_sim::{late::run, plant::Plant, rivals};

#[test]
fn what_was_given_up_never_lies_on_top_of_newer_bytes() {
    for seed in 1..=4 {
        let o = run(seed, None).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
        assert!(o.given_up >= 6 && o.lived >= 6 && o.late as u64 >= o.given_up + o.lived, "{o:?}");
    }
}

#[test]
fn clients_that_do_not_say_what_they_gave_up_are_found() {
    let outcomes: Vec<_> = (1..=4).map(|seed| run(seed, Some(Plant::Roundless))).collect();
    let found =
        outcomes.iter().filter(|o| o.as_ref().is_ok_and(|o| !o.violations.is_empty())).count();
    assert!(found >= 3, "{outcomes:#?}");
}

#[test]
fn what_was_given_up_never_lies_on_top_of_what_others_write() {
    let (mut soon, mut late) = (0, 0);
    for seed in 1..=8 {
        let o = rivals::run(seed, None).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
        assert!(o.failed >= 6, "{o:?}");
        (soon, late) = (soon + o.soon, late + o.late);
    }
    assert!(soon >= 8 && late >= 64, "{soon} {late}");
}

#[test]
fn updates_without_a_time_or_a_round_are_found() {
    for plant in [Plant::Timeless, Plant::Roundless] {
        let outcomes: Vec<_> = (1..=4).map(|seed| rivals::run(seed, Some(plant))).collect();
        let found =
            outcomes.iter().filter(|o| o.as_ref().is_ok_and(|o| !o.violations.is_empty())).count();
        assert!(found >= 3, "{plant:?}: {outcomes:#?}");
    }
}
