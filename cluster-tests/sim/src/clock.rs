//! A node's clocks: tokio's paused time, with a wall clock that may be wrong, and a clock since
//! boot that may run at another rate.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_fabric::{Clock, Env};
use tokio::time::Instant;

/// 2026-01-01 00:00:00 UTC.
const BASE_NS: i64 = 1_767_225_600_000_000_000;

#[derive(Clone)]
pub struct SimClock {
    start: Instant,
    /// Nanoseconds this node's wall clock is off.
    skew_ns: Arc<AtomicI64>,
    boot: Arc<Mutex<Boot>>,
}

/// The clock since boot: what it showed when it was set last, how long after the start that was,
/// and its rate since.
struct Boot {
    showed: Duration,
    at: Duration,
    rate: f64,
}

impl SimClock {
    pub fn new(start: Instant, skew_ns: i64) -> SimClock {
        // Nodes did not boot at the same moment; an hour keeps subtraction safe.
        let boot = Boot { showed: Duration::from_secs(3600), at: Duration::ZERO, rate: 1.0 };
        SimClock {
            start,
            skew_ns: Arc::new(AtomicI64::new(skew_ns)),
            boot: Arc::new(Mutex::new(boot)),
        }
    }

    /// From now on the clock since boot runs at this rate.
    pub fn set_rate(&self, rate: f64) {
        let showed = self.boot();
        *self.boot.lock() = Boot { showed, at: self.start.elapsed(), rate };
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
        let b = self.boot.lock();
        let passed = self.start.elapsed().saturating_sub(b.at);
        // What runs at the right rate is exact.
        b.showed + if b.rate == 1.0 { passed } else { passed.mul_f64(b.rate) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_clock_since_boot_drifts_and_never_jumps() {
        let (s, start) = (Duration::from_secs, Instant::now());
        let (good, bad) = (SimClock::new(start, 0), SimClock::new(start, -5));
        assert_eq!(good.boot(), s(3600));
        bad.set_rate(1.5);
        tokio::time::advance(s(10)).await;
        assert_eq!((good.boot(), bad.boot()), (s(3610), s(3615)));
        bad.set_rate(0.5);
        assert_eq!(bad.boot(), s(3615));
        tokio::time::advance(s(10)).await;
        assert_eq!((good.boot(), bad.boot()), (s(3620), s(3620)));
        assert_eq!(good.unix_ns() - bad.unix_ns(), 5, "another clock");
    }
}
