//! What a process gets from its environment: time, randomness and tasks. One value per process (or
//! per simulated node), so that the simulator can drive many nodes in one thread from one seed and
//! kill any of them.
//!
//! Monotonic timers are tokio's (`tokio::time`), which the simulator runs paused. Code under
//! simulation must not ask the system for time or randomness in any other way, must not iterate
//! over randomly seeded hash maps, and must mark every `select!` as `biased`, and must use
//! [`crate::watch`] in place of tokio's.

use std::{future::Future, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::task::{AbortHandle, JoinHandle};

/// Where time comes from.
pub trait Clock: Send + Sync + 'static {
    /// Wall clock, nanoseconds since 1970-01-01 UTC. May jump.
    fn unix_ns(&self) -> i64;
    /// Time since boot including suspend (CLOCK_BOOTTIME). Leases are counted on this.
    fn boot(&self) -> Duration;
}

struct SystemClock;

impl Clock for SystemClock {
    fn unix_ns(&self) -> i64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        t.tv_sec * 1_000_000_000 + t.tv_nsec
    }
    fn boot(&self) -> Duration {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    }
}

/// Time, randomness and tasks of one process. Clones share all three.
#[derive(Clone)]
pub struct Env {
    clock: Arc<dyn Clock>,
    rng: Arc<Mutex<StdRng>>,
    tasks: Arc<Mutex<Tasks>>,
}

#[derive(Default)]
struct Tasks {
    handles: Vec<AbortHandle>,
    killed: bool,
}

impl Env {
    /// The system's clock and randomness. Panics when the kernel has no random source.
    pub fn system() -> Env {
        let mut seed = [0u8; 32];
        #[expect(
            clippy::expect_used,
            reason = "without a random source there are no keys and no session ids"
        )]
        getrandom::fill(&mut seed).expect("the kernel's random source");
        Env::new(Arc::new(SystemClock), seed)
    }

    /// A given clock, and random numbers that follow from `seed` alone.
    pub fn new(clock: Arc<dyn Clock>, seed: [u8; 32]) -> Env {
        Env { clock, rng: Arc::new(Mutex::new(StdRng::from_seed(seed))), tasks: Arc::default() }
    }

    /// [`Clock::unix_ns`].
    pub fn unix_ns(&self) -> i64 {
        self.clock.unix_ns()
    }
    /// [`Clock::unix_ns`] in milliseconds; 0 before 1970.
    pub fn unix_ms(&self) -> u64 {
        (self.clock.unix_ns() / 1_000_000).max(0) as u64
    }
    /// [`Clock::boot`].
    pub fn boot(&self) -> Duration {
        self.clock.boot()
    }
    /// A random number; all values are equally likely.
    pub fn random_u64(&self) -> u64 {
        self.rng.lock().next_u64()
    }
    /// Random bytes, good enough for keys and nonces.
    pub fn random_bytes<const N: usize>(&self) -> [u8; N] {
        let mut b = [0; N];
        self.rng.lock().fill_bytes(&mut b);
        b
    }

    /// Starts a task that [`Env::kill`] ends.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let handle = tokio::spawn(future);
        let mut tasks = self.tasks.lock();
        if tasks.killed {
            handle.abort();
        } else {
            if tasks.handles.len() >= 64 && tasks.handles.len().is_power_of_two() {
                tasks.handles.retain(|h| !h.is_finished());
            }
            tasks.handles.push(handle.abort_handle());
        }
        handle
    }

    /// Ends every task started through this value and its clones, and any started later.
    pub fn kill(&self) {
        let mut tasks = self.tasks.lock();
        tasks.killed = true;
        for h in tasks.handles.drain(..) {
            h.abort();
        }
    }
}
