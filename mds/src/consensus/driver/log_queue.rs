//! Changes on their way to the log: a separate task writes all waiting ones at once.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};
use strake_runtime::Env;
use tokio::{
    sync::mpsc::{self, Permit},
    task::JoinHandle,
};

use super::super::{
    health::SlowLog,
    log::{LogOp, LogStore},
};

/// Most batches that may be on their way to the log.
pub(super) const MAX_UNPERSISTED: usize = 16;
const RETRY: Duration = Duration::from_millis(200);

/// For the log's task: changes to write, and the number of the ready they belong to.
#[derive(Default)]
pub(super) struct Job {
    pub ops: Vec<LogOp>,
    pub number: Option<u64>,
    /// The changes mark the start of this incoming copy.
    pub restoring: Option<u64>,
}

impl Job {
    pub(super) fn of(op: LogOp) -> Job {
        Job { ops: vec![op], ..Job::default() }
    }
}

/// The queue to the log's task.
pub(super) struct LogQueue {
    jobs: mpsc::Sender<Job>,
    slow: Arc<Mutex<SlowLog>>,
}

impl LogQueue {
    /// Starts the task, which reports to `events` what it has written. `late`: see [`SlowLog`].
    pub(super) fn start(
        log: Arc<dyn LogStore>,
        env: &Env,
        late: Duration,
        events: mpsc::Sender<Event>,
    ) -> (LogQueue, JoinHandle<()>) {
        let (jobs, waiting) = mpsc::channel(256);
        let slow = Arc::new(Mutex::new(SlowLog::new(late)));
        let timer = Timer { env: env.clone(), slow: slow.clone() };
        let writer = env.spawn(write_log(log, waiting, events, timer));
        (LogQueue { jobs, slow }, writer)
    }

    /// `Overloaded`: the log cannot keep up.
    pub(super) fn write(&self, job: Job) -> Result<()> {
        self.jobs.try_send(job).map_err(|_| behind())
    }

    /// A place in the queue, for a change that must be made only if it can be written.
    pub(super) fn reserve(&self) -> Result<Permit<'_, Job>> {
        self.jobs.try_reserve().map_err(|_| behind())
    }

    pub(super) fn is_slow(&self, now: Duration) -> bool {
        self.slow.lock().is_slow(now)
    }
}

fn behind() -> Error {
    Error::new(Code::Overloaded, "the raft log cannot keep up")
}

/// Reports of the driver's own tasks.
pub(super) enum Event {
    Persisted { number: Option<u64>, restoring: Vec<u64> },
    Stalled(Error),
    Failed(Error),
    Synced(u64, Result<()>),
    Sent { to: u64, id: u64, result: Result<()> },
}

/// Measures the time of the log's writes.
struct Timer {
    env: Env,
    slow: Arc<Mutex<SlowLog>>,
}

impl Timer {
    fn begin(&self) {
        self.slow.lock().begin(self.env.boot());
    }
    fn end(&self) {
        self.slow.lock().end(self.env.boot());
    }
}

/// Writes all waiting changes at once. Waits while the disk is full; other errors end the member.
async fn write_log(
    log: Arc<dyn LogStore>,
    mut jobs: mpsc::Receiver<Job>,
    events: mpsc::Sender<Event>,
    timer: Timer,
) {
    while let Some(first) = jobs.recv().await {
        let (mut ops, mut number) = (first.ops, first.number);
        let mut restoring: Vec<u64> = first.restoring.into_iter().collect();
        for _ in 0..MAX_UNPERSISTED {
            let Ok(job) = jobs.try_recv() else { break };
            ops.extend(job.ops);
            number = job.number.or(number);
            restoring.extend(job.restoring);
        }
        while !ops.is_empty() {
            timer.begin();
            let written = log.write(&ops).await;
            timer.end();
            match written {
                Ok(()) => break,
                Err(e) if e.code == Code::NoSpc => {
                    let _ = events.send(Event::Stalled(e)).await;
                    tokio::time::sleep(RETRY).await;
                }
                Err(e) => {
                    let _ = events.send(Event::Failed(e)).await;
                    return;
                }
            }
        }
        if events.send(Event::Persisted { number, restoring }).await.is_err() {
            return;
        }
    }
}
