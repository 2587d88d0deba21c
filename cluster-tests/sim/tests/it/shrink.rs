//! A failing run is shrunk, and the short run fails in the same way.

use strake_sim::{
    draw,
    run::{run, run_with},
    scenario::{Scenario, Sync},
    shrink::{promise, shrink},
};

fn a_planted_mistake_becomes_short() {
    // Servers that leave out a sync lose data when power fails.
    let length = std::time::Duration::from_secs(4);
    let planted =
        |seed| Scenario { skip: Some(Sync::Device), length, moves: false, ..Scenario::new(seed) };
    let fails = |seed: &u64| run(planted(*seed)).is_ok_and(|o| !o.violations.is_empty());
    let seed = (1..=30).find(fails).expect("a seed that notices it");
    let before = run(planted(seed)).unwrap();
    let short = shrink(planted(seed), 120, &mut |step| println!("{step}")).unwrap().unwrap();
    println!("{}", short.text());
    assert_eq!(short.of, draw::draw(&planted(seed)).len());
    assert!(
        short.faults.len() * 10 <= short.of,
        "{} of {} faults are left",
        short.faults.len(),
        short.of
    );
    let again = run_with(short.scenario, &short.faults).unwrap();
    assert_eq!(again.parting(&short.outcome), None);
    let first = promise(&before.violations[0]);
    assert!(again.violations.iter().any(|v| promise(v) == first), "{:?}", again.violations);
    assert!(short.text().contains("loses its power"), "{}", short.text());
}

#[test]
fn a_run_in_order_is_not_made_short() {
    let quiet = Scenario { length: std::time::Duration::from_secs(1), ..Scenario::new(1) };
    assert!(shrink(quiet, 10, &mut |_| {}).unwrap().is_none());
}

mod long {
    #[test]
    #[ignore = "long tier, 25 s: ./test --long"]
    fn a_planted_mistake_becomes_short() {
        super::a_planted_mistake_becomes_short();
    }
}
