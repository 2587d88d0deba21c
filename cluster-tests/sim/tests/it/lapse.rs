//! Leases that run out under clients and storage servers, and what any reader of a file's bytes has
//! seen.

use strake_sim::lapse::run;

fn holds(seed: u64) {
    let o = run(seed).unwrap();
    assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
    assert!(o.looks > 500 && o.reads > 200 && o.writes > 500, "seed {seed}: {o:?}");
}

#[test]
fn seeds_1_to_6() {
    (1..=6).for_each(holds);
}

#[test]
fn the_same_seed_takes_the_same_course() {
    assert_eq!(run(2).unwrap().trace, run(2).unwrap().trace);
}

/// A copy of a write that had been sent again over another connection came when its chunk had been
/// changed so often since that its record knew the write no more, and lay down on top of all that.
#[test]
fn a_late_copy_is_not_made_however_often_the_chunk_was_changed_since() {
    [19, 30].into_iter().for_each(holds);
}

/// A client read its own file while a write of it was on its way, kept what one replica said, and
/// told it when others had seen the new bytes on another.
#[test]
fn what_was_read_during_an_own_write_is_not_kept() {
    [8, 57].into_iter().for_each(holds);
}
