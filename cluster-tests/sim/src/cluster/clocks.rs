//! The clocks of all nodes.

use std::{collections::BTreeMap, ops::Range};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::clock::SimClock;

/// Clock rates: no two differ by more than a tenth.
pub(super) const DRIFT: Range<f64> = 0.955..1.045;

#[derive(Default)]
pub(super) struct Clocks {
    /// By node.
    pub servers: BTreeMap<u32, SimClock>,
    /// In the order in which the clients were made.
    pub clients: Vec<SimClock>,
}

impl Clocks {
    /// The clock of a server.
    pub fn of(&self, node: u32) -> &SimClock {
        &self.servers[&node]
    }

    fn all(&self) -> impl Iterator<Item = &SimClock> {
        self.servers.values().chain(&self.clients)
    }

    /// Gives each boot clock another rate from now on, and lets some clients' wall clocks jump.
    pub fn drift_by(&self, dice: u64) {
        let mut rng = StdRng::seed_from_u64(dice);
        self.all().for_each(|c| c.set_rate(rng.random_range(DRIFT)));
        for c in &self.clients {
            if rng.random_bool(0.3) {
                c.set_skew(rng.random_range(-240..240) * 1_000_000_000);
            }
        }
    }

    /// Gives a server's boot clock the slowest rate that is allowed and all others the fastest.
    pub fn slow(&self, node: u32) {
        self.all().for_each(|c| c.set_rate(DRIFT.end));
        self.servers.get(&node).into_iter().for_each(|c| c.set_rate(DRIFT.start));
    }

    /// Sets the offset of a server's wall clock.
    pub fn set(&self, node: u32, seconds: i64) {
        self.servers.get(&node).into_iter().for_each(|c| c.set_skew(seconds * 1_000_000_000));
    }
}
