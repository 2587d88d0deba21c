//! The lease that this server holds from the metadata servers: without one it serves nobody.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};
use strake_runtime::Env;

/// See the module. Times are on the boot clock.
pub(super) struct Lease {
    env: Env,
    /// This server's name, for messages.
    server: String,
    until: Mutex<Duration>,
    beats: AtomicU64,
}

impl Lease {
    pub(super) fn new(env: Env, server: String) -> Lease {
        Lease { env, server, until: Mutex::default(), beats: AtomicU64::new(0) }
    }

    /// How long the lease still holds; zero without one.
    pub(super) fn left(&self) -> Duration {
        self.until.lock().saturating_sub(self.env.boot())
    }

    /// `LeaseExpired` without a lease.
    pub(super) fn check(&self) -> Result<()> {
        if self.left().is_zero() {
            let m = format!(
                "storage server '{}' has no lease: it does not reach the metadata leader",
                self.server
            );
            return Err(Error::new(Code::LeaseExpired, m));
        }
        Ok(())
    }

    /// The lease holds at least until then.
    pub(super) fn extend(&self, until: Duration) {
        let mut lease = self.until.lock();
        *lease = until.max(*lease);
    }

    /// Ends the lease. Returns whether there was one.
    pub(super) fn end(&self) -> bool {
        std::mem::take(&mut *self.until.lock()) > self.env.boot()
    }

    /// The number of the next heartbeat, from 1. One at a time: the answer to an earlier one grants
    /// no lease.
    pub(super) fn next_beat(&self) -> u64 {
        self.beats.fetch_add(1, Ordering::Relaxed) + 1
    }
}
