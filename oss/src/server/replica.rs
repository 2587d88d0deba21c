//! The shell around one [`ChainCore`]: carries out its outputs, and feeds it the results.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use strake_proto::{
    ChainId, ChunkId, Code, Error, Result, SessionId, TargetId,
    data::{BootId, DataRequest, FLAG_TOMBSTONE, Version, Writer},
};
use tokio::sync::oneshot;

use super::{
    context::Context,
    links::{ChainLinks, Forget, Place},
    target::Target,
    update_request::UpdateRequest,
};
use crate::{
    chain::{
        ChainCore, Committed, Input, Local, Op, OpId, Outcome, Output, View, What, rows::Event,
    },
    engine::{Engine, Key, Staged},
};

/// Pause before a successor that did not take an update is asked again.
const RETRY: Duration = Duration::from_millis(20);

/// What the shell leaves to others: work on a chunk's bytes that may need good copies from other
/// targets.
pub(super) trait ChunkData: Send + Sync {
    /// Stores the bytes of an update that is in its chunk's slot.
    fn stage(
        self: Arc<Self>,
        op: OpId,
        update: Arc<UpdateRequest>,
    ) -> BoxFuture<'static, Result<Staged>>;

    /// Sends the committed chunk to the successor that is resynced. The chunk's slot is held.
    fn push(
        self: Arc<Self>,
        to: TargetId,
        epoch: u64,
        chunk: ChunkId,
    ) -> BoxFuture<'static, Result<()>>;
}

fn stopping() -> Error {
    Error::new(Code::Disconnected, "this storage server is stopping")
}

/// The error for data that was removed for good.
pub(super) fn was_removed(chunk: ChunkId) -> Error {
    Error::new(Code::Stale, format!("the data of chunk {chunk} was removed"))
}

struct Running {
    request: Option<Arc<UpdateRequest>>,
    staged: Option<Staged>,
    reply: oneshot::Sender<Outcome>,
}

impl Running {
    /// Whether an update arrives so late that its sender may have reported its failure, and others
    /// may have written since.
    fn is_over(&self, ctx: &Context) -> bool {
        let heard = self.request.as_ref().map_or(0, |r| r.request.heard);
        heard != 0 && ctx.clock().is_some_and(|clock| clock.is_over(heard))
    }
}

struct Inner {
    core: ChainCore,
    ops: BTreeMap<OpId, Running>,
}

/// One target's part in one chain: the chain's state machine with its clock, store and peers.
pub(super) struct Replica {
    pub ctx: Arc<Context>,
    pub target: Arc<Target>,
    pub chain: ChainId,
    pub id: TargetId,
    /// To the other targets of the chain.
    pub links: ChainLinks,
    inner: Mutex<Inner>,
    data: Weak<dyn ChunkData>,
}

struct Store<'a> {
    engine: &'a Engine,
    chain: ChainId,
    ops: &'a mut BTreeMap<OpId, Running>,
}

impl Local for Store<'_> {
    fn committed(&self, chunk: &ChunkId) -> Result<Committed> {
        let meta = self.engine.meta(&Key { chain: self.chain, chunk: *chunk })?.unwrap_or_default();
        Ok(Committed { version: meta.version, writers: meta.writers })
    }

    fn commit(&mut self, op: OpId, version: Version, writer: Writer) -> Result<()> {
        let staged = self.ops.get_mut(&op).and_then(|o| o.staged.take());
        let staged = staged.ok_or_else(|| {
            Error::new(Code::Io, "an update was to be committed before it was staged")
        })?;
        self.engine.commit(staged, version, vec![writer]).map(drop)
    }
}

/// A chunk's slot, held; released when dropped.
pub(super) struct Hold {
    replica: Arc<Replica>,
    op: OpId,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.replica.feed(Input::Release { op: self.op });
    }
}

impl Replica {
    /// `stale_through`: see [`ChainCore::new`]. `data`: does what the shell leaves to others.
    pub(super) fn new(
        ctx: Arc<Context>,
        target: Arc<Target>,
        (id, chain): (TargetId, ChainId),
        stale_through: u64,
        data: Weak<dyn ChunkData>,
    ) -> Arc<Replica> {
        let core =
            ChainCore::new(chain, BootId { target: id, number: target.boot_id }, stale_through);
        let inner = Mutex::new(Inner { core, ops: BTreeMap::new() });
        let links = ChainLinks::new(ctx.clone(), chain);
        Arc::new(Replica { ctx, target, chain, id, links, inner, data })
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.target.engine
    }
    pub(super) fn key(&self, chunk: ChunkId) -> Key {
        Key { chain: self.chain, chunk }
    }
    pub(super) fn view(&self) -> View {
        self.inner.lock().core.view().clone()
    }
    /// See [`ChainCore::busy_from`].
    pub(super) fn busy_from(&self, from: ChunkId) -> Vec<u64> {
        self.inner.lock().core.busy_from(from)
    }
    /// See [`ChainCore::data_is_gone`].
    pub(super) fn data_is_gone(&self, data: u64) {
        self.inner.lock().core.data_is_gone(data);
    }
    pub(super) fn is_gone(&self, data: u64) -> bool {
        self.inner.lock().core.is_gone(data)
    }
    /// See [`ChainCore::version_of`].
    pub(super) fn version_of(&self, op: OpId) -> Option<Version> {
        self.inner.lock().core.version_of(op)
    }
    pub(super) fn boot_id(&self) -> BootId {
        self.inner.lock().core.boot_id()
    }
    pub(super) fn check_read(&self, chunk: &ChunkId, epoch: u64) -> Result<()> {
        self.target.check_in()?;
        self.inner.lock().core.read(chunk, epoch)
    }
    /// As [`Replica::check_read`], of all chunks of the file from this one on.
    pub(super) fn check_read_from(&self, chunk: &ChunkId, epoch: u64) -> Result<()> {
        self.target.check_in()?;
        self.inner.lock().core.read_all(chunk..=&ChunkId { index: u64::MAX, ..*chunk }, epoch)
    }
    pub(super) fn check_member(&self, epoch: u64) -> Result<()> {
        let known = {
            let inner = self.inner.lock();
            inner.core.check_member(epoch).map_err(|e| (e, inner.core.view().epoch))
        };
        known.map_err(|(e, ours)| {
            if epoch > ours {
                self.ctx.kick.notify_one();
            }
            e
        })
    }
    /// See [`ChainCore::heard_round`].
    pub(super) fn heard_round(&self, epoch: u64, session: SessionId, round: u64) -> Result<()> {
        self.inner.lock().core.heard_round(epoch, session, round)
    }
    pub(super) fn has_failed(&self) -> bool {
        self.inner.lock().core.failed()
    }
    pub(super) fn heard_predecessor(&self, epoch: u64) {
        self.inner.lock().core.heard_predecessor(epoch);
    }

    // --- into the core

    /// Hands an update to the chain and waits for its outcome.
    pub(super) async fn submit(
        self: &Arc<Self>,
        request: UpdateRequest,
        what: What,
    ) -> Result<Outcome> {
        let r = &request.request;
        let (id, chunk, epoch) = (self.ctx.next_op(), r.chunk, r.epoch);
        let op = Op { id, chunk, epoch, eager: self.target.has_space(), what };
        let (reply, answer) = oneshot::channel();
        let running = Running { request: Some(Arc::new(request)), staged: None, reply };
        self.enter(op, running);
        match answer.await.map_err(|_| stopping())? {
            Outcome::Refused(e) => Err(e),
            outcome => Ok(outcome),
        }
    }

    /// Waits until nothing is in flight for a chunk, and keeps it so.
    pub(super) async fn hold(self: &Arc<Self>, chunk: ChunkId, epoch: u64) -> Result<Hold> {
        let id = self.ctx.next_op();
        let (reply, answer) = oneshot::channel();
        let op = Op { id, chunk, epoch, eager: true, what: What::Hold };
        self.enter(op, Running { request: None, staged: None, reply });
        // Made before the grant, so that the slot is released even if the caller is dropped.
        let hold = Hold { replica: self.clone(), op: id };
        match answer.await {
            Ok(Outcome::Granted) => Ok(hold),
            Ok(Outcome::Refused(e)) => Err(e),
            _ => Err(stopping()),
        }
    }

    fn enter(self: &Arc<Self>, op: Op, running: Running) {
        let mut inner = self.inner.lock();
        // Under the lock: an update queued before newer ones is applied before them.
        if matches!(op.what, What::Client { .. }) && running.is_over(&self.ctx) {
            Event::ClientExpired.taken();
            let m = "this update took too long to arrive; send it again";
            let _ = running.reply.send(Outcome::Refused(Error::new(Code::Overloaded, m)));
            return;
        }
        inner.ops.insert(op.id, running);
        self.run(&mut inner, Input::Op(op));
    }

    pub(super) fn feed(self: &Arc<Self>, input: Input) {
        self.run(&mut self.inner.lock(), input);
    }

    /// Processes an input and everything that follows from it at once, in order, under the lock.
    fn run(self: &Arc<Self>, inner: &mut Inner, input: Input) {
        if self.ctx.stopped() {
            inner.ops.clear(); // their callers get an error
            return;
        }
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let Inner { core, ops } = inner;
            let out = core
                .handle(input, &mut Store { engine: &self.target.engine, chain: self.chain, ops });
            for o in out {
                self.carry_out(inner, o, &mut inputs);
            }
        }
    }

    fn carry_out(self: &Arc<Self>, inner: &mut Inner, o: Output, inputs: &mut VecDeque<Input>) {
        let me = self.clone();
        let env = &self.ctx.env;
        match o {
            Output::Stage { op } => {
                if let Some(c) = inner.ops.get(&op).and_then(|o| o.request.clone()) {
                    env.spawn(async move { me.stage(op, c).await });
                }
            }
            Output::Forward { op, attempt, to, epoch, version, prev } => {
                if let Some(c) = inner.ops.get(&op).and_then(|o| o.request.clone()) {
                    env.spawn(async move {
                        let result = me.links.forward(&c, to, Place { epoch, version, prev }).await;
                        me.feed(Input::Answer { op, attempt, result });
                    });
                }
            }
            Output::Push { op, attempt, to, epoch, chunk } => {
                env.spawn(async move {
                    let result = match me.data.upgrade() {
                        Some(data) => data.push(to, epoch, chunk).await,
                        None => Err(stopping()),
                    };
                    me.feed(Input::Pushed { op, attempt, result });
                });
            }
            Output::RetryLater { op, attempt } => {
                env.spawn(async move {
                    tokio::time::sleep(RETRY).await;
                    me.feed(Input::Retry { op, attempt });
                });
            }
            Output::Done { op, outcome } => {
                let granted = matches!(outcome, Outcome::Granted);
                let sent = inner.ops.remove(&op).map(|o| o.reply.send(outcome));
                if granted && !matches!(sent, Some(Ok(()))) {
                    inputs.push_back(Input::Release { op });
                }
            }
            Output::Greet { to, epoch } => {
                env.spawn(async move { me.greet(to, epoch).await });
            }
            Output::RefreshMap => self.ctx.kick.notify_one(),
            Output::Failed { reason } => {
                self.target.fail(&reason);
                self.ctx.kick.notify_one();
            }
            Output::Alarm { message } => tracing::error!("{message}"),
        }
    }

    async fn stage(self: Arc<Self>, op: OpId, request: Arc<UpdateRequest>) {
        let result = match self.data.upgrade() {
            Some(data) => data.stage(op, request).await,
            None => Err(stopping()),
        };
        let mut inner = self.inner.lock();
        let result = match (result, inner.ops.get_mut(&op)) {
            (Ok(staged), Some(running)) => {
                running.staged = Some(staged);
                Ok(())
            }
            (Ok(dropped), None) => {
                drop(dropped);
                Ok(())
            }
            (Err(e), _) => {
                self.target.note(&e);
                Err(self.told(e, inner.core.view()))
            }
        };
        self.run(&mut inner, Input::Staged { op, result });
    }

    /// The error for an update that could not be stored. A failed device takes its target out of
    /// the chain. If other replicas are in sync, they can make the update: the sender is told to
    /// retry.
    fn told(&self, e: Error, view: &View) -> Error {
        if e.code != Code::Io || view.serving.iter().all(|t| *t == self.id) {
            return e;
        }
        Error::new(
            Code::NotServing,
            format!("target {} has failed and leaves chain {} ({e})", self.id, self.chain),
        )
    }

    /// Makes a staged removal visible, unless the epoch is over: then the target may be a replica
    /// again, and its list of chunks must not change without the chain.
    pub(super) fn forget_staged(&self, staged: Staged, epoch: u64) -> Result<()> {
        let inner = self.inner.lock();
        match inner.core.view() {
            v if v.epoch == epoch && !v.takes_updates() => self.engine().forget(staged),
            _ => Err(Error::new(Code::StaleEpoch, format!("chain {} has changed", self.chain))),
        }
    }

    /// Makes a resynced chunk visible, unless its data was removed meanwhile. Under the lock:
    /// before the data's tombstones are forgotten, the data is marked as gone, which either finds
    /// this chunk or keeps it from being made.
    pub(super) fn take_filled(&self, staged: Staged, r: &DataRequest) -> Result<()> {
        let inner = self.inner.lock();
        inner.core.check_member(r.epoch)?;
        let gone = inner.core.is_gone(r.chunk.data);
        match r.flags & FLAG_TOMBSTONE != 0 {
            // The source has no record of it, or forgets it too.
            true if gone || r.version == Version::default() => self.engine().forget(staged),
            false if gone => Err(was_removed(r.chunk)),
            _ => self.engine().commit(staged, r.version, r.writers.clone()).map(drop),
        }
    }

    /// Flushes this replica and all behind it, including the SYNCING one: it may have come into
    /// sync in a newer epoch, and must then hold what is called stable in this one. Returns their
    /// boot_ids, this replica's first.
    pub(super) async fn flush_chain(&self, epoch: u64) -> Result<Vec<BootId>> {
        self.flush_all(epoch, None).await.map(|(boot_ids, _)| boot_ids)
    }

    /// As [`Replica::flush_chain`]. With `forget`, the replicas behind then forget tombstones; also
    /// returns where they have to continue.
    pub(super) async fn flush_all(
        &self,
        epoch: u64,
        forget: Option<Forget>,
    ) -> Result<(Vec<BootId>, Option<u64>)> {
        self.check_member(epoch)?;
        let next = self.view().successor.map(|(t, _)| t);
        let behind = async {
            let Some(to) = next else { return Ok((Vec::new(), None)) };
            self.links.forward_flush(to, epoch, forget).await
        };
        let local = self.flush();
        let (behind, local) = tokio::join!(behind, local);
        local?;
        let (boot_ids, next) = behind?;
        Ok((std::iter::once(self.boot_id()).chain(boot_ids).collect(), next))
    }

    /// Flushes this target.
    pub(super) async fn flush(&self) -> Result<()> {
        let r = self.engine().flush().await;
        if let Err(e) = &r {
            self.target.note(e);
        }
        r
    }

    /// Whether work for an epoch should continue.
    pub(super) fn goes_on(&self, epoch: u64) -> bool {
        !self.ctx.stopped() && self.view().epoch == epoch
    }

    async fn greet(&self, to: TargetId, epoch: u64) {
        while self.goes_on(epoch) && self.links.forward_flush(to, epoch, None).await.is_err() {
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Whether the tail may report that its successor is resynced. `synced`: the epoch in which it
    /// was.
    pub(super) fn may_report_synced(&self, synced: u64) -> bool {
        let inner = self.inner.lock();
        let v = inner.core.view();
        let filled = v.tail && v.syncing_successor().is_some() && synced == v.epoch;
        filled && !inner.core.owes_shown()
    }
}
