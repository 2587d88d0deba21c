//! Every order of events of small cases of chains (`docs/replication.md`), and that the explorer finds mistakes made on purpose.

use strake_explore::{
    chain::{Bounds, Fault, World},
    explore,
};

/// One write to three replicas.
fn one() -> Bounds {
    Bounds { copies: 3, writes: 1, ..Bounds::default() }
}

/// Two copies, on three targets.
fn two_of_three() -> Bounds {
    Bounds { copies: 2, ..one() }
}

fn holds(bounds: Bounds) {
    let start = std::time::Instant::now();
    let seen = explore(World::new(bounds, Fault::None), 1_000_000);
    if let Some((story, why)) = &seen.broken {
        let story: Vec<String> = story.iter().map(|a| format!("  {a:?}")).collect();
        panic!("{why}:\n{}", story.join("\n"));
    }
    println!("{bounds:?}: {} states, {} steps, depth {}, {:?}", seen.states, seen.steps, seen.depth, start.elapsed());
    assert!(!seen.cut, "{} states were not all", seen.states);
}

#[test]
fn writes() {
    holds(Bounds { writes: 2, flushes: 1, ..one() });
}
