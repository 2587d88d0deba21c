//! Runs protocol cores through every order of events of small cases, breadth first, so that the
//! first trace found for a broken promise is a shortest one.
//!
//! A [`Model`] is a world of real cores and the network between them: `leases` is the world of
//! `docs/leases.md`, `writeback` of its section "Write-back", `chain` of `docs/replication.md`,
//! `pages` of "Between nodes" in `docs/mappings.md`, `locks` of `docs/locks.md`, `leader` of
//! `docs/leader-lease.md`.

pub mod chain;
pub mod leader;
pub mod leases;
pub mod locks;
pub mod pages;
pub mod writeback;

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    fmt::Debug,
    hash::{Hash, Hasher},
};

/// A world that can continue in several ways.
pub trait Model: Clone + Hash {
    /// One thing that can happen.
    type Action: Clone + Debug;

    /// All that can happen next.
    fn actions(&self) -> Vec<Self::Action>;

    /// Makes it happen. `Err`: a promise was broken; the text says which.
    fn act(&mut self, action: &Self::Action) -> Result<(), String>;
}

/// For each line takes the first action whose text begins like it. Panics if there is none, or if
/// one breaks a promise.
pub fn after<M: Model>(mut world: M, script: &[&str]) -> M {
    for line in script {
        let action = world.actions().into_iter().find(|a| format!("{a:?}").starts_with(line));
        let action = action
            .unwrap_or_else(|| panic!("{line} cannot happen; what can is {:?}", world.actions()));
        world.act(&action).unwrap();
    }
    world
}

/// The result of an exploration.
#[derive(Debug)]
pub struct Explored<A> {
    /// Different worlds.
    pub states: usize,
    /// Steps between them.
    pub steps: usize,
    /// Steps from the first world to the most distant one.
    pub depth: usize,
    /// The limit was reached: not all worlds were visited.
    pub cut: bool,
    /// A shortest trace to a broken promise, and which one it is.
    pub broken: Option<(Vec<A>, String)>,
}

fn fingerprint(m: &impl Hash) -> u64 {
    let mut h = DefaultHasher::new();
    m.hash(&mut h);
    h.finish()
}

/// Explores all worlds that `first` can lead to, up to `most`. Worlds are told apart by a 64-bit
/// hash: with ten million worlds, two are taken for one with a probability of 3 in a million.
pub fn explore<M: Model>(first: M, most: usize) -> Explored<M::Action> {
    let mut out = Explored { states: 1, steps: 0, depth: 0, cut: false, broken: None };
    // How each world was reached: from which world, and by which of its actions.
    let mut seen: HashMap<u64, (u64, u32)> = HashMap::from([(fingerprint(&first), (0, 0))]);
    let mut level = vec![first.clone()];
    while !level.is_empty() {
        let mut next = Vec::new();
        for world in level {
            let from = fingerprint(&world);
            for (i, action) in world.actions().into_iter().enumerate() {
                let mut then = world.clone();
                out.steps += 1;
                if let Err(why) = then.act(&action) {
                    let mut story = story(&first, &seen, from);
                    story.push(action);
                    out.broken = Some((story, why));
                    return out;
                }
                let to = fingerprint(&then);
                if seen.contains_key(&to) {
                    continue;
                }
                if seen.len() >= most {
                    out.cut = true;
                    return out;
                }
                seen.insert(to, (from, i as u32));
                out.states += 1;
                next.push(then);
            }
        }
        out.depth += usize::from(!next.is_empty());
        level = next;
    }
    out
}

/// The actions that lead from the first world to one that was visited.
fn story<M: Model>(first: &M, seen: &HashMap<u64, (u64, u32)>, mut to: u64) -> Vec<M::Action> {
    let start = fingerprint(first);
    let mut choices = Vec::new();
    while to != start
        && let Some((from, i)) = seen.get(&to)
    {
        choices.push(*i as usize);
        to = *from;
    }
    let (mut world, mut out) = (first.clone(), Vec::new());
    for i in choices.into_iter().rev() {
        let Some(action) = world.actions().into_iter().nth(i) else { break };
        let _ = world.act(&action);
        out.push(action);
    }
    out
}

/// Panics with the trace if a promise is broken in any world of these bounds, or if there are more
/// worlds than a test may take.
pub fn holds<M: Model>(bounds: &impl Debug, first: M) {
    let start = std::time::Instant::now();
    let seen = explore(first, 1_000_000);
    if let Some((story, why)) = &seen.broken {
        let story: Vec<String> = story.iter().map(|a| format!("  {a:?}")).collect();
        panic!("{why}:\n{}", story.join("\n"));
    }
    println!(
        "{bounds:?}: {} states, {} steps, depth {}, {:?}",
        seen.states,
        seen.steps,
        seen.depth,
        start.elapsed()
    );
    assert!(!seen.cut, "{} states were not all", seen.states);
}
