//! One thing broken at a time: no call takes five seconds. In each of these seeds a link of a
//! client is cut for longer than that; calls would take 9 to 13 s if there were no way round the
//! cut link.

use strake_sim::outage;

fn holds(seed: u64) {
    let o = outage::run(seed).unwrap();
    assert!(o.violations.is_empty(), "seed {seed}: {:?}", o.violations);
    assert!(o.calls > 1000, "seed {seed}: {} calls", o.calls);
}

#[test]
fn a_cut_link_to_the_metadata_leader_holds_no_call() {
    [2, 17].into_iter().for_each(holds);
}

#[test]
fn a_cut_link_to_a_storage_server_holds_no_call() {
    [33, 44].into_iter().for_each(holds);
}

#[test]
fn a_run_with_a_way_round_can_be_repeated() {
    let run = || outage::run(33).unwrap().trace;
    assert_eq!(run(), run());
}
