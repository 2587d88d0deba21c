//! A log in memory that loses what power loss would lose: for tests and the simulator.

use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};

use super::log::{LogImage, LogOp, LogStore};

/// Outlives the node that writes to it, as a disk does. Share it by `Arc`.
pub struct MemLog {
    state: Mutex<State>,
    latency: Mutex<Duration>,
}

struct State {
    durable: LogImage,
    /// The batch on its way to the medium.
    in_flight: Option<Vec<LogOp>>,
    /// Acknowledged without being durable; only after `skip_sync`.
    unsynced: Vec<LogOp>,
    skip_sync: bool,
    fault: Option<Error>,
    lost: bool,
    writes: u64,
    refused: u64,
}

impl MemLog {
    /// An empty log of a group that starts with `voters`; each write takes `latency`. `stamp` must
    /// differ between logs.
    pub fn new(voters: Vec<u64>, stamp: u64, latency: Duration) -> MemLog {
        let durable = LogImage::new(voters, stamp);
        let state = State {
            durable,
            in_flight: None,
            unsynced: Vec::new(),
            skip_sync: false,
            fault: None,
            lost: false,
            writes: 0,
            refused: 0,
        };
        MemLog { state: Mutex::new(state), latency: Mutex::new(latency) }
    }

    /// Power loss, after the node was ended: the batch in flight is kept whole (`keep`) or dropped
    /// as a torn tail. A batch is never half there: the pages of the real log ensure that.
    pub fn crash(&self, keep: bool) {
        let mut s = self.state.lock();
        s.write_back();
        if let Some(ops) = s.in_flight.take().filter(|_| keep) {
            for op in &ops {
                let _ = s.durable.apply(op);
            }
        }
    }
    /// From now on writes are acknowledged but not synced, as by a build without fsync: for tests
    /// that must notice.
    pub fn skip_sync(&self) {
        self.state.lock().skip_sync = true;
    }
    /// Call it before `crash` where the machine dies and not only the process: what `skip_sync`
    /// left unsynced is gone.
    pub fn lose_unsynced(&self) {
        self.state.lock().unsynced.clear();
    }
    /// From now on every write fails with this error (`NoSpc`: a full disk), until `None` is set.
    pub fn set_fault(&self, fault: Option<Error>) {
        self.state.lock().fault = fault;
    }
    /// How long each write takes from now on.
    pub fn set_latency(&self, latency: Duration) {
        *self.latency.lock() = latency;
    }
    /// Damages the medium where the member may have acknowledged something: `load` refuses then.
    pub fn damage(&self) {
        self.state.lock().lost = true;
    }
    /// What is durable now.
    pub fn image(&self) -> LogImage {
        self.state.lock().durable.clone()
    }
    /// Batches that failed so far because of a set fault.
    pub fn refused(&self) -> u64 {
        self.state.lock().refused
    }
    /// Batches written so far.
    pub fn writes(&self) -> u64 {
        self.state.lock().writes
    }
}

impl State {
    fn write_back(&mut self) {
        for op in std::mem::take(&mut self.unsynced) {
            let _ = self.durable.apply(&op);
        }
    }
}

#[async_trait]
impl LogStore for MemLog {
    async fn load(&self) -> Result<LogImage> {
        let mut s = self.state.lock();
        s.in_flight = None;
        if s.lost {
            Err(super::disk_log::refusal("the simulated medium is damaged"))
        } else {
            Ok(s.durable.clone())
        }
    }

    async fn write(&self, ops: &[LogOp]) -> Result<()> {
        {
            let mut s = self.state.lock();
            if let Some(e) = s.fault.clone() {
                s.refused += 1;
                return Err(e);
            }
            s.in_flight = Some(ops.to_vec());
        }
        let latency = *self.latency.lock();
        tokio::time::sleep(latency).await;
        let mut s = self.state.lock();
        let Some(ops) = s.in_flight.take() else {
            return Err(Error::new(Code::Io, "the log was removed during a write"));
        };
        s.writes += 1;
        if s.skip_sync {
            s.unsynced.extend(ops);
            return Ok(());
        }
        ops.iter().try_for_each(|op| s.durable.apply(op))
    }
}
