//! What this client's programs wait for: one list, told to the metadata leader again and again, whoever that is. It says
//! whose turn it is; the waiter then asks for the lock. See `docs/locks.md`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Env, Message};
use strake_proto::{Code, Error, Ino, Result, opcode, pb};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use crate::{core::Core, mds::META_TRY, retry::meta_passes};

/// How long a list that changed waits for the answer to the one before: many changes make one list.
const TOGETHER: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_millis(250);

enum State {
    Waits,
    /// It is its turn.
    Ready,
    /// It has been told so, and tries.
    Trying,
    Failed(Error),
}

struct Waiter {
    wait: pb::LockWait,
    state: State,
    news: Arc<Notify>,
}

#[derive(Default)]
struct List {
    /// The highest number given to a wait or a list.
    last: u64,
    all: BTreeMap<u64, Waiter>,
    /// A task sends the list.
    served: bool,
    /// The leader was told of waits that are not on it any more.
    shrunk: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct LockWaits {
    list: Mutex<List>,
    changed: Notify,
}

/// A place in the list; dropped, it is given up.
pub(crate) struct Place {
    core: Arc<Core>,
    id: u64,
    news: Arc<Notify>,
    /// The leader knows by itself that this wait is over.
    pub done: bool,
}

impl Place {
    /// Its number, for the request that ends it.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn new(core: &Arc<Core>, ino: Ino, owner: u64, kind: pb::LockKind, span: pb::LockSpan) -> Place {
        let news = Arc::new(Notify::new());
        let waits = &core.lock_waits;
        let mut list = waits.list.lock();
        let id = list.number(&core.env);
        let wait = pb::LockWait { id, ino, owner, kind: kind as i32, span: Some(span), trying: false };
        list.all.insert(id, Waiter { wait, state: State::Trying, news: news.clone() });
        if !std::mem::replace(&mut list.served, true) {
            core.env.spawn(core.clone().serve_lock_waits());
        }
        Place { core: core.clone(), id, news, done: false }
    }

    /// Returns when the lock may be there for this one. `Deadlock` when it never will be.
    pub async fn turn(&self) -> Result<()> {
        let waits = &self.core.lock_waits;
        if let Some(w) = waits.list.lock().all.get_mut(&self.id) {
            w.state = State::Waits;
        }
        waits.changed.notify_one();
        loop {
            if let Some(w) = waits.list.lock().all.get_mut(&self.id) {
                match &w.state {
                    State::Ready => {
                        w.state = State::Trying;
                        return Ok(());
                    }
                    State::Failed(e) => return Err(e.clone()),
                    State::Waits | State::Trying => {}
                }
            }
            self.news.notified().await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let waits = &self.core.lock_waits;
        let mut list = waits.list.lock();
        list.all.remove(&self.id);
        if !self.done {
            list.shrunk = true;
            drop(list);
            waits.changed.notify_one();
        }
    }
}

impl List {
    /// A number that is used once, also by a later process with the same session: time goes on.
    fn number(&mut self, env: &Env) -> u64 {
        self.last = (self.last + 1).max(env.boot().as_nanos() as u64);
        self.last
    }

    /// What to tell; `None` when there is nothing to tell, and nobody does any more.
    fn told(&mut self, closed: bool) -> Option<Vec<pb::LockWait>> {
        if closed {
            self.fail(&Error::new(Code::Io, "the client was closed"));
        }
        if closed || self.all.is_empty() && !self.shrunk {
            self.served = false;
            return None;
        }
        self.shrunk = false;
        let one = |w: &Waiter| pb::LockWait { trying: matches!(w.state, State::Trying), ..w.wait };
        Some(self.all.values().map(one).collect())
    }

    fn set(&mut self, id: u64, state: State) {
        if let Some(w) = self.all.get_mut(&id)
            && matches!(w.state, State::Waits)
        {
            w.state = state;
            w.news.notify_one();
        }
    }

    fn fail(&mut self, e: &Error) {
        let ids: Vec<u64> = self.all.keys().copied().collect();
        ids.into_iter().for_each(|id| self.set(id, State::Failed(e.clone())));
    }

    fn answered(&mut self, r: pb::LockWaitReply) {
        let deadlock = || Error::new(Code::Deadlock, "whoever has this lock waits for one of its owner's");
        r.deadlock.into_iter().for_each(|id| self.set(id, State::Failed(deadlock())));
        r.ready.into_iter().for_each(|id| self.set(id, State::Ready));
    }
}

impl Core {
    async fn serve_lock_waits(self: Arc<Self>) {
        loop {
            let (waits, number) = {
                let mut list = self.lock_waits.list.lock();
                let Some(waits) = list.told(self.is_closed()) else { return };
                (waits, list.number(&self.env))
            };
            let mut call = std::pin::pin!(self.tell_lock_waits(waits, number));
            let answer = tokio::select! {
                biased;
                r = &mut call => Some(r),
                // The next list says all again, so an answer that is lost here is given again.
                () = self.lock_waits.changed.notified() => timeout(TOGETHER, call).await.ok(),
            };
            match answer {
                None => {}
                Some(Ok(r)) => self.lock_waits.list.lock().answered(r),
                Some(Err(e)) if meta_passes(&e) || e.code == Code::NoSession => {
                    tracing::debug!("waiting for locks: {e}");
                    sleep(PAUSE).await;
                }
                Some(Err(e)) => {
                    self.lock_waits.list.lock().fail(&e);
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn tell_lock_waits(self: &Arc<Self>, waits: Vec<pb::LockWait>, number: u64) -> Result<pb::LockWaitReply> {
        let session = self.session().await?;
        let body = Bytes::from(pb::LockWaitRequest { session: session.id, waits, number }.encode_to_vec());
        let mut at = self.attempts_for("waiting for a lock", META_TRY);
        let reply: Result<Message> = self.mds_call(opcode::LOCK_WAIT, |_| body.clone(), META_TRY, &mut at).await;
        if reply.as_ref().is_err_and(|e| e.code == Code::NoSession) {
            self.session_gone(&session);
        }
        crate::mds::decode(&reply?)
    }
}
