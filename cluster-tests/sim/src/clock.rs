//! The clocks of a node: tokio's paused time, a wall clock that may be wrong, and a boot clock that
//! may run at another rate.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_runtime::{Clock, Env};
use tokio::time::Instant;

/// 2026-01-01 00:00:00 UTC.
const BASE_NS: i64 = 1_767_225_600_000_000_000;

#[derive(Clone)]
pub struct SimClock {
    start: Instant,
    /// Offset of this node's wall clock in nanoseconds.
    skew_ns: Arc<AtomicI64>,
    boot: Arc<Mutex<Boot>>,
}

/// The boot clock: what it showed when it was last set, when that was (time since the start), and
/// its rate since then.
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

    /// Sets the rate of the boot clock from now on.
    pub fn set_rate(&self, rate: f64) {
        let showed = self.boot();
        *self.boot.lock() = Boot { showed, at: self.start.elapsed(), rate };
    }

    /// Sets the offset of the wall clock.
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
        // Avoids rounding when the rate is exactly 1.
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
