//! The list of waits of this client's programs, sent again and again to the metadata leader,
//! whichever server that is. The answer says whose turn it is; the waiter then asks for the lock.
//! See `docs/locks.md`.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::Message;
use strake_proto::{Code, Error, Ino, Result, opcode, pb};
use strake_runtime::Env;
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use super::waiting_list::List;
use crate::{
    metadata::{link::META_TRY, ops::decode, service::Metadata},
    shared::{Shared, retry::meta_passes},
};

/// How long a changed list waits for the answer to the one before: many changes make one list.
const TOGETHER: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_millis(250);

/// See the module.
pub(crate) struct LockWaiters {
    shared: Arc<Shared>,
    metadata: Arc<Metadata>,
    list: Mutex<List<Arc<Notify>>>,
    changed: Notify,
}

/// A place in the list; dropping it ends the wait.
pub(crate) struct Place {
    waiters: Arc<LockWaiters>,
    id: u64,
    news: Arc<Notify>,
    /// Whether the leader knows without a report that this wait is over.
    pub done: bool,
}

impl Place {
    /// The number of the wait, for the request that ends it.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn new(
        waits: &Arc<LockWaiters>,
        ino: Ino,
        owner: u64,
        kind: pb::LockKind,
        span: pb::LockSpan,
    ) -> Place {
        let news = Arc::new(Notify::new());
        let mut list = waits.list.lock();
        let id = list.number(now(&waits.shared.env));
        let wait =
            pb::LockWait { id, ino, owner, kind: kind as i32, span: Some(span), trying: false };
        if list.enter(wait, news.clone()) {
            waits.shared.env.spawn(waits.clone().serve());
        }
        Place { waiters: waits.clone(), id, news, done: false }
    }

    /// Returns when the lock may be available for this waiter. `Deadlock` when it never will be.
    pub async fn turn(&self) -> Result<()> {
        let waits = &self.waiters;
        waits.list.lock().waits(self.id);
        waits.changed.notify_one();
        loop {
            if let Some(turn) = waits.list.lock().turn(self.id) {
                return turn;
            }
            self.news.notified().await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let waits = &self.waiters;
        if waits.list.lock().leave(self.id, self.done) {
            waits.changed.notify_one();
        }
    }
}

/// Numbers are derived from the time, so that a later process with the same session continues above
/// them.
fn now(env: &Env) -> u64 {
    env.boot().as_nanos() as u64
}

fn wake(waiters: Vec<Arc<Notify>>) {
    waiters.iter().for_each(|news| news.notify_one());
}

impl LockWaiters {
    pub fn new(shared: Arc<Shared>, metadata: Arc<Metadata>) -> LockWaiters {
        LockWaiters { shared, metadata, list: Mutex::default(), changed: Notify::new() }
    }

    async fn serve(self: Arc<Self>) {
        loop {
            let (waits, number) = {
                let mut list = self.list.lock();
                let closed = self.shared.is_closed();
                if closed {
                    wake(list.fail(&Error::new(Code::Io, "the client was closed")));
                }
                let Some(waits) = list.told(closed) else { return };
                (waits, list.number(now(&self.shared.env)))
            };
            let mut call = std::pin::pin!(self.tell(waits, number));
            let answer = tokio::select! {
                biased;
                r = &mut call => Some(r),
                // The next list contains everything again, so an answer that is lost here is
                // repeated.
                () = self.changed.notified() => timeout(TOGETHER, call).await.ok(),
            };
            match answer {
                None => self.list.lock().not_told(),
                Some(Ok(r)) => wake(self.list.lock().answered(&r)),
                Some(Err(e)) if meta_passes(&e) || e.code == Code::NoSession => {
                    tracing::debug!("waiting for locks: {e}");
                    self.list.lock().not_told();
                    sleep(PAUSE).await;
                }
                Some(Err(e)) => {
                    wake(self.list.lock().fail(&e));
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn tell(
        self: &Arc<Self>,
        waits: Vec<pb::LockWait>,
        number: u64,
    ) -> Result<pb::LockWaitReply> {
        let session = self.metadata.session().await?;
        let body =
            Bytes::from(pb::LockWaitRequest { session: session.id, waits, number }.encode_to_vec());
        let mut at = self.shared.attempts_for("waiting for a lock", META_TRY);
        let reply: Result<Message> =
            self.metadata.call(opcode::LOCK_WAIT, |_| body.clone(), META_TRY, &mut at).await;
        if let Err(e) = &reply
            && e.code == Code::NoSession
        {
            self.metadata.session_gone(&session, e);
        }
        decode(&reply?)
    }
}
