//! Shared by all services of the client: its configuration, the newest cluster map, counters, and
//! the retries of operations.

pub mod retry;
pub mod unreachable;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use strake_fabric::Fabric;
use strake_proto::{Code, Error, Result, map::MapView};
use strake_runtime::{Env, watch};
use tokio::time::Instant;

use self::{
    retry::{Backoff, in_doubt},
    unreachable::{Kind, Unreachable},
};
use crate::config::{Config, Counters, FOREVER};

/// A longer wait for servers is reported in the log.
const TOO_LONG: Duration = Duration::from_secs(3);

/// See the module. It is below all services and knows none of them.
pub(crate) struct Shared {
    pub cfg: Config,
    pub env: Env,
    pub fabric: Arc<dyn Fabric>,
    pub stats: Counters,
    pub uuid: [u8; 16],
    map: ArcSwap<MapView>,
    map_changed: watch::Sender<u64>,
    closed: AtomicBool,
    /// The session ends, and there will be no other one.
    ending: AtomicBool,
    read_only: AtomicBool,
    unreachable: Mutex<Unreachable>,
}

/// Time limit and pauses of one operation.
pub(crate) struct Attempts {
    what: &'static str,
    began: Instant,
    deadline: Instant,
    backoff: Backoff,
    /// Whether an attempt may have run without an answer.
    pub in_doubt: bool,
}

impl Attempts {
    pub fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// After a failed attempt: pauses, or gives up with the cause when the time is over. A new
    /// cluster map ends the pause early.
    pub async fn pause(&mut self, shared: &Shared, cause: Error) -> Result<()> {
        self.in_doubt |= in_doubt(&cause);
        Counters::add(&shared.stats.retries, 1);
        let waited = self.began.elapsed();
        shared.stats.stalled(waited);
        let left = self.left();
        if waited >= TOO_LONG {
            shared.tell_stuck();
        }
        if left.is_zero() || shared.is_closed() {
            let m = format!("{}: gave up after {:.1} s: {cause}", self.what, waited.as_secs_f64());
            return Err(Error::new(Code::TimedOut, m));
        }
        let mut changed = shared.map_changes();
        let pause = self.backoff.next(shared.env.random_u64()).min(left);
        tokio::select! {
            biased;
            _ = changed.changed() => {}
            () = tokio::time::sleep(pause) => {}
        }
        Ok(())
    }
}

impl Shared {
    pub fn new(cfg: Config, env: Env, fabric: Arc<dyn Fabric>) -> Shared {
        let uuid = cfg
            .handover
            .as_ref()
            .map(|k| k.uuid())
            .or(cfg.uuid)
            .unwrap_or_else(|| env.random_bytes());
        Shared {
            uuid,
            map: ArcSwap::default(),
            map_changed: watch::Sender::new(0),
            closed: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            read_only: AtomicBool::new(cfg.read_only),
            unreachable: Mutex::default(),
            stats: Counters::default(),
            fabric,
            env,
            cfg,
        }
    }

    pub fn attempts(&self, what: &'static str) -> Attempts {
        self.attempts_for(what, self.cfg.op_timeout)
    }

    pub fn attempts_for(&self, what: &'static str, limit: Duration) -> Attempts {
        let began = Instant::now();
        Attempts {
            what,
            began,
            deadline: began + limit,
            backoff: Backoff::default(),
            in_doubt: false,
        }
    }

    // --- how far the client's life is ---

    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    pub fn set_closed(&self) {
        self.closed.store(true, Relaxed);
    }

    pub fn is_ending(&self) -> bool {
        self.ending.load(Relaxed)
    }

    pub fn set_ending(&self) {
        self.ending.store(true, Relaxed);
    }

    pub fn set_read_only(&self, yes: bool) {
        self.read_only.store(yes, Relaxed);
    }

    /// `EROFS` for a client that must change nothing.
    pub fn may_alter(&self) -> Result<()> {
        if self.read_only.load(Relaxed) {
            return Err(Error::new(Code::RoFs, "the mount is read-only"));
        }
        Ok(())
    }

    /// Runs an operation to its end even if the caller goes away: it is finished or retried, never
    /// left half done.
    pub async fn detached<T, F>(&self, f: F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let running = self.env.spawn(f);
        running.await.map_err(|_| Error::new(Code::Io, "the client is being shut down"))?
    }

    // --- servers that do not answer ---

    /// A server did not answer, or cannot do its job.
    pub fn failed(&self, kind: Kind, who: &str, e: &Error) {
        self.unreachable.lock().failed(kind, who, &e.message, Instant::now());
    }

    pub fn answered(&self, kind: Kind, who: &str) {
        let back = self.unreachable.lock().answered(kind, who, Instant::now());
        if let Some((what, after)) = back {
            tracing::info!("{what} again after {:.1} s", after.as_secs_f64());
        }
    }

    /// Servers that did not answer last time, and why; empty when all answer.
    pub fn unreachable(&self) -> String {
        self.unreachable.lock().list()
    }

    fn tell_stuck(&self) {
        let Some(list) = self.unreachable.lock().stuck() else { return };
        let limit = self.cfg.op_timeout;
        match limit >= FOREVER {
            true => tracing::warn!("waiting for {list}; programs wait until they answer"),
            false => tracing::warn!("waiting for {list}; calls fail after {} s", limit.as_secs()),
        }
    }

    // --- cluster map ---

    /// The newest cluster map that this client has.
    pub fn map(&self) -> Arc<MapView> {
        self.map.load_full()
    }

    /// Receives the version of every new map.
    pub fn map_changes(&self) -> watch::Receiver<u64> {
        self.map_changed.subscribe()
    }

    /// Replaces the map, and notifies the tasks that wait for a change.
    pub fn put_map(&self, map: Arc<MapView>) {
        let version = map.version();
        self.map.store(map);
        self.map_changed.send_replace(version);
    }
}
