//! A node's clocks: tokio's paused time, with a wall clock that may be wrong.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use strake_fabric::{Clock, Env};
use tokio::time::Instant;

/// 2026-01-01 00:00:00 UTC.
const BASE_NS: i64 = 1_767_225_600_000_000_000;

#[derive(Clone)]
pub struct SimClock {
    start: Instant,
    /// Nanoseconds this node's wall clock is off.
    skew_ns: Arc<AtomicI64>,
}

impl SimClock {
    pub fn new(start: Instant, skew_ns: i64) -> SimClock {
        SimClock { start, skew_ns: Arc::new(AtomicI64::new(skew_ns)) }
    }
    /// The wall clock jumps.
    pub fn set_skew(&self, ns: i64) {
        self.skew_ns.store(ns, Ordering::Relaxed);
    }
    pub fn env(&self, seed: [u8; 32]) -> Env {
        Env::new(Arc::new(self.clone()), seed)
    }
}

impl Clock for SimClock {
    fn unix_ns(&self) -> i64 {
        BASE_NS + self.start.elapsed().as_nanos() as i64 + self.skew_ns.load(Ordering::Relaxed)
    }
    fn boot(&self) -> Duration {
        // Nodes did not boot at the same moment; an hour keeps subtraction safe.
        Duration::from_secs(3600) + self.start.elapsed()
    }
}
