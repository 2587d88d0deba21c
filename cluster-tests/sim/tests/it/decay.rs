//! Blocks decay while servers are away and others take their place: a block that any target has a
//! good copy of can be read at the end.

use strake_sim::{
    coverage,
    ledger::{Kind, Ledger},
    run::run,
    scenario::Scenario,
};

#[test]
fn no_good_copy_is_given_up() {
    coverage::reset();
    let (mut sum, mut lost) = (Ledger::default(), 0);
    for seed in 1..=10 {
        let o = run(Scenario::decay(seed)).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(o.violations.is_empty(), "seed {seed}: {:#?}", o.violations);
        (lost, _) = (lost + o.lost, sum.add(&o.faults));
    }
    let made = sum.rows().find(|r| r.0 == Kind::Decay.name()).unwrap().1;
    let counts = coverage::counts();
    let taken = |row: &str| counts.iter().flat_map(|t| &t.1).find(|r| r.0 == row).unwrap().1;
    println!("{made} blocks decayed, {lost} were lost\n{}", coverage::text(&counts));
    assert!(made > 60 && lost * 50 <= made, "{made} blocks decayed, {lost} lost");
    for row in ["copy-same", "vouched", "vouch-mended", "former-waits"] {
        assert!(taken(row) > 0, "{row} was never taken");
    }
}

#[test]
fn a_run_replays() {
    let one = || run(Scenario::decay(5)).unwrap();
    if let Some(how) = one().parting(&one()) {
        panic!("another course at {how}");
    }
}
