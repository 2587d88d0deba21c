//! Leases that run out under clients and storage servers, and what readers of a file's bytes have
//! seen meanwhile.

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

/// A write had been sent again over another connection. Its late copy came after so many changes of
/// the chunk that the chunk's record no longer knew the write, so it overwrote newer bytes.
#[test]
fn a_late_copy_is_not_made_however_often_the_chunk_was_changed_since() {
    [19, 30].into_iter().for_each(holds);
}

/// A client read its own file while a write to it was on the way, cached what one replica answered,
/// and served it after others had seen the new bytes on another replica.
#[test]
fn what_was_read_during_an_own_write_is_not_kept() {
    [8, 57].into_iter().for_each(holds);
}
