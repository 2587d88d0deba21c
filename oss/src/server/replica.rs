//! The shell around one [`ChainCore`]: carries out its outputs, and feeds it the results.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_fabric::{Buf, Message};
use strake_proto::{
    ChainId, ChunkId, Code, Error, Result, SessionId, TargetId,
    data::{
        DataReply, DataRequest, FLAG_GRANTED, FLAG_REPLAY, FLAG_TOMBSTONE, Kind, Stamp, Version,
        Writer,
    },
    opcode,
};
use tokio::sync::oneshot;

use super::{
    copies::{Away, Formers},
    node::{InWork, Node, Target},
    peers::Lane,
    repair::Unrepaired,
    resync::was_removed,
    trim::{Cuts, Forget},
};
use crate::{
    chain::{
        ChainCore, Committed, Input, Local, Op, OpId, Outcome, Output, View, What, rows::Event,
        slot::Refusal,
    },
    engine::{Engine, Key, Staged, Update},
};

/// Pause before a successor that did not take an update is asked again.
const RETRY: Duration = Duration::from_millis(20);

/// An update as it arrived, kept until it is answered.
pub(super) struct Carried {
    pub request: DataRequest,
    pub payload: Vec<Buf>,
    pub trace: u64,
    /// Set for an update of a session.
    pub _in_work: Option<InWork>,
}

struct Running {
    carried: Option<Arc<Carried>>,
    staged: Option<Staged>,
    reply: oneshot::Sender<Outcome>,
}

impl Running {
    /// Whether an update arrives so late that its sender may have reported its failure, and others
    /// may have written since.
    fn is_over(&self, node: &Node) -> bool {
        let heard = self.carried.as_ref().map_or(0, |c| c.request.heard);
        heard != 0 && node.clock().is_some_and(|clock| clock.is_over(heard))
    }
}

struct Inner {
    core: ChainCore,
    ops: BTreeMap<OpId, Running>,
}

pub(super) struct Replica {
    pub node: Arc<Node>,
    pub target: Arc<Target>,
    pub chain: ChainId,
    pub id: TargetId,
    inner: Mutex<Inner>,
    /// The epoch in which the SYNCING successor was completely resynced.
    pub synced: AtomicU64,
    pub cuts: Cuts,
    pub formers: Formers,
    pub away: Away,
    /// Chunks that this target keeps though it has left the chain.
    pub kept: AtomicU64,
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
        let staged = staged
            .ok_or_else(|| Error::new(Code::Io, "an update to be committed was not staged"))?;
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

/// The request's update in the engine's terms.
pub(super) fn update_of(c: &Carried) -> Result<Update> {
    let (r, data) = (&c.request, || c.payload.clone());
    Ok(match r.kind {
        Kind::Write => Update::Write { offset: r.offset, data: data(), sums: r.sums.clone() },
        Kind::Punch => Update::Punch { offset: r.offset, len: r.len },
        Kind::Truncate => Update::Truncate { len: r.offset },
        Kind::Remove => Update::Remove,
        Kind::Replace => {
            let (sums, tombstone, damaged) =
                (r.sums.clone(), r.flags & FLAG_TOMBSTONE != 0, r.damaged.clone());
            Update::Replace { data: data(), sums, tombstone, damaged }
        }
        Kind::None => return Err(Error::new(Code::Inval, "an update that updates nothing")),
    })
}

impl Replica {
    pub(super) fn new(
        node: Arc<Node>,
        target: Arc<Target>,
        id: TargetId,
        chain: ChainId,
        stale_through: u64,
    ) -> Arc<Replica> {
        let core = ChainCore::new(chain, Stamp { target: id, stamp: target.stamp }, stale_through);
        let inner = Mutex::new(Inner { core, ops: BTreeMap::new() });
        let (synced, cuts, kept) = (AtomicU64::new(0), Cuts::default(), AtomicU64::new(0));
        let (formers, away) = (Formers::default(), Away::default());
        Arc::new(Replica { node, target, chain, id, inner, synced, cuts, formers, away, kept })
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
    pub(super) fn stamp(&self) -> Stamp {
        self.inner.lock().core.stamp()
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
                self.node.kick.notify_one();
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
    pub(super) async fn submit(self: &Arc<Self>, carried: Carried, what: What) -> Result<Outcome> {
        let r = &carried.request;
        let (id, chunk, epoch) = (self.node.next_op(), r.chunk, r.epoch);
        let op = Op { id, chunk, epoch, eager: self.target.has_room(), what };
        let (reply, answer) = oneshot::channel();
        let running = Running { carried: Some(Arc::new(carried)), staged: None, reply };
        self.enter(op, running);
        let gone = || Error::new(Code::Disconnected, "this storage server is stopping");
        match answer.await.map_err(|_| gone())? {
            Outcome::Refused(e) => Err(e),
            outcome => Ok(outcome),
        }
    }

    /// Waits until nothing is in flight for a chunk, and keeps it so.
    pub(super) async fn hold(self: &Arc<Self>, chunk: ChunkId, epoch: u64) -> Result<Hold> {
        let id = self.node.next_op();
        let (reply, answer) = oneshot::channel();
        let op = Op { id, chunk, epoch, eager: true, what: What::Hold };
        self.enter(op, Running { carried: None, staged: None, reply });
        // Made before the grant, so that the slot is released even if the caller is dropped.
        let hold = Hold { replica: self.clone(), op: id };
        match answer.await {
            Ok(Outcome::Granted) => Ok(hold),
            Ok(Outcome::Refused(e)) => Err(e),
            _ => Err(Error::new(Code::Disconnected, "this storage server is stopping")),
        }
    }

    fn enter(self: &Arc<Self>, op: Op, running: Running) {
        let mut inner = self.inner.lock();
        // Under the lock: an update queued before newer ones is applied before them.
        if matches!(op.what, What::Client { .. }) && running.is_over(&self.node) {
            Event::ClientExpired.taken();
            let m = "this update was on its way for too long; it is to be sent again";
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
        if self.node.stopped() {
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
        let env = &self.node.env;
        match o {
            Output::Stage { op } => {
                if let Some(c) = inner.ops.get(&op).and_then(|o| o.carried.clone()) {
                    env.spawn(async move { me.stage(op, c).await });
                }
            }
            Output::Forward { op, attempt, to, epoch, version, prev } => {
                if let Some(c) = inner.ops.get(&op).and_then(|o| o.carried.clone()) {
                    env.spawn(async move {
                        let result = me.forward(&c, to, epoch, version, prev).await;
                        me.feed(Input::Answer { op, attempt, result });
                    });
                }
            }
            Output::Push { op, attempt, to, epoch, chunk } => {
                env.spawn(async move {
                    let result = me.push(to, epoch, chunk).await.map(drop);
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
            Output::RefreshMap => self.node.kick.notify_one(),
            Output::Failed { reason } => {
                self.target.fail(&reason);
                self.node.kick.notify_one();
            }
            Output::Alarm { message } => tracing::error!("{message}"),
        }
    }

    async fn stage(self: Arc<Self>, op: OpId, c: Arc<Carried>) {
        let key = self.key(c.request.chunk);
        let granted = (c.request.flags & FLAG_GRANTED != 0).then_some(c.request.session);
        let mut unasked = None;
        let mut result = match update_of(&c) {
            Ok(update) => self.engine().stage_of(key, update, granted).await,
            Err(e) => Err(e),
        };
        if matches!(&result, Err(e) if e.code == Code::Corrupt)
            && let Ok(update) = update_of(&c)
        {
            // Stage again even if some part has no good copy: this update may not build on it.
            let repaired = self.repair_as(c.request.chunk, None).await;
            result = self.engine().stage_of(key, update, granted).await;
            if let (Err(e), Err(Unrepaired { unasked: true, cause, .. })) = (&result, repaired)
                && e.code == Code::Corrupt
            {
                unasked = Some(cause);
            }
        }
        if matches!(&result, Err(e) if e.code == Code::Corrupt)
            && let Some(staged) = self.take_over(op, c.request.chunk).await
        {
            result = Ok(staged);
        }
        result = match (result, unasked) {
            // A possible source did not answer. It will later, or it leaves the chain.
            (Err(_), Some(cause)) => Err(Error::new(Code::NotServing, cause.message)),
            // Only at the head: the head takes refusals of the replicas behind for final.
            (Err(e), None) if self.view().head => Err(self.told_damaged(c.request.chunk, e)),
            (result, _) => result,
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

    // --- to other replicas

    /// Calls the storage server of a target of this chain.
    pub(super) async fn call(
        &self,
        to: TargetId,
        lane: Lane,
        m: Message,
    ) -> Result<(DataReply, Vec<Buf>)> {
        let map = self.node.map.load_full();
        let target = map.target(to).ok_or_else(|| {
            Error::new(
                Code::NotServing,
                format!("target {to} of chain {} is not in the map", self.chain),
            )
        })?;
        let timeout = Duration::from_millis(self.node.cfg.peer_timeout_ms);
        let reply = self.node.peers.call(&map, target.node, lane, m, timeout).await?;
        Ok((DataReply::decode(&reply.body)?, reply.payload))
    }

    /// How many replicas behind this target of the chain take updates.
    fn behind(&self, target: TargetId) -> u8 {
        use strake_proto::map::ChainExt;
        let map = self.node.map.load();
        let Some(chain) = map.chain(self.chain) else { return 0 };
        let (mut n, mut at) = (0, target);
        while let Some((next, _)) = chain.successor(at) {
            (n, at) = (n + 1, next);
        }
        n
    }

    async fn forward(
        &self,
        c: &Carried,
        to: TargetId,
        epoch: u64,
        version: Version,
        prev: Version,
    ) -> Result<Vec<Stamp>> {
        let request = DataRequest {
            epoch,
            target: to,
            version,
            round: 0,
            heard: 0,
            flags: c.request.flags & (FLAG_TOMBSTONE | FLAG_GRANTED),
            cap: None,
            writers: vec![Writer { session: 0, seq: 0, version: prev }],
            regions: Vec::new(),
            ..c.request.clone()
        };
        let mut m = Message::new(opcode::FORWARD, request.encode()).with_payload(c.payload.clone());
        m.trace = c.trace;
        self.call(to, Lane::Forward(self.behind(to)), m).await.map(|(r, _)| r.stamps)
    }

    /// Flushes this replica and all behind it, including the SYNCING one: it may have come into
    /// sync in a newer epoch, and must then hold what is called stable in this one. Returns their
    /// stamps, this replica's first.
    pub(super) async fn flush_chain(&self, epoch: u64) -> Result<Vec<Stamp>> {
        self.flush_all(epoch, None).await.map(|(stamps, _)| stamps)
    }

    /// As [`Replica::flush_chain`]. With `forget`, the replicas behind then forget tombstones; also
    /// returns where they have to continue.
    pub(super) async fn flush_all(
        &self,
        epoch: u64,
        forget: Option<Forget>,
    ) -> Result<(Vec<Stamp>, Option<u64>)> {
        self.check_member(epoch)?;
        let next = self.view().successor.map(|(t, _)| t);
        let behind = async {
            let Some(to) = next else { return Ok((Vec::new(), None)) };
            self.forward_flush(to, epoch, forget).await
        };
        let local = self.flush();
        let (behind, local) = tokio::join!(behind, local);
        local?;
        let (stamps, next) = behind?;
        Ok((std::iter::once(self.stamp()).chain(stamps).collect(), next))
    }

    async fn forward_flush(
        &self,
        to: TargetId,
        epoch: u64,
        forget: Option<Forget>,
    ) -> Result<(Vec<Stamp>, Option<u64>)> {
        let chunk = forget.map_or(ChunkId { ino: 0, data: 0, index: 0 }, |f| f.from);
        let flags = if forget.is_some() { FLAG_TOMBSTONE } else { 0 };
        let len = forget.map_or(0, |f| f.most);
        let r = DataRequest { flags, len, ..DataRequest::new(self.chain, epoch, to, chunk) };
        let m = Message::new(opcode::FORWARD_FLUSH, r.encode());
        let result = self.call(to, Lane::Flush(self.behind(to)), m).await;
        if matches!(&result, Err(e) if e.code == Code::StaleEpoch) {
            self.node.kick.notify_one();
        }
        result.map(|(r, _)| (r.stamps, (r.len != 0).then_some(r.version.number)))
    }

    /// Flushes this target.
    pub(super) async fn flush(&self) -> Result<()> {
        let r = self.engine().flush().await;
        if let Err(e) = &r {
            self.target.note(e);
        }
        r
    }

    /// Flushes the successor that is being resynced, but not this target.
    pub(super) async fn flush_successor(&self, to: TargetId, epoch: u64) -> Result<()> {
        self.forward_flush(to, epoch, None).await.map(drop)
    }

    /// Whether work for an epoch should continue.
    pub(super) fn goes_on(&self, epoch: u64) -> bool {
        !self.node.stopped() && self.view().epoch == epoch
    }

    async fn greet(&self, to: TargetId, epoch: u64) {
        while self.goes_on(epoch) && self.forward_flush(to, epoch, None).await.is_err() {
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Handles a FORWARD.
    pub(super) async fn forwarded(self: &Arc<Self>, carried: Carried) -> Result<DataReply> {
        let r = &carried.request;
        let [prev] = r.writers[..] else {
            return Err(Error::new(Code::Protocol, "FORWARD does not say what it builds on"));
        };
        let (epoch, version) = (r.epoch, r.version);
        let mut prev = prev.version;
        self.prepare(r.chunk, Some(prev)).await;
        if r.kind == Kind::Remove && r.session == 0 && r.flags & FLAG_TOMBSTONE != 0 {
            // The data is gone for good, so this chunk is removed whatever its version here, even
            // if other replicas do not have it.
            prev = self.engine().meta(&self.key(r.chunk))?.map(|m| m.version).unwrap_or_default();
        }
        let what = What::Forward { session: r.session, seq: r.seq, version, prev };
        let outcome = self.submit(carried, what).await?;
        // The update is applied: a failing flush must not be taken for a refusal.
        self.answer(outcome, epoch, false).await.map_err(|e| match Refusal::of(e.code) {
            Refusal::Transient => e,
            _ => Error::new(Code::NotServing, format!("an update is here, but not flushed: {e}")),
        })
    }

    /// Handles an update from a client, or from the mds (session 0).
    pub(super) async fn update(
        self: &Arc<Self>,
        carried: Carried,
        stable: bool,
    ) -> Result<DataReply> {
        let r = &carried.request;
        let epoch = r.epoch;
        let replay = (r.flags & FLAG_REPLAY != 0).then_some(r.version);
        self.prepare(r.chunk, None).await;
        let what = What::Client { session: r.session, seq: r.seq, replay, round: r.round };
        self.answer(self.submit(carried, what).await?, epoch, stable).await
    }

    async fn answer(&self, outcome: Outcome, epoch: u64, stable: bool) -> Result<DataReply> {
        let reply = |version, stable, stamps| DataReply {
            stable,
            version,
            epoch,
            stamps,
            ..DataReply::default()
        };
        Ok(match outcome {
            Outcome::Applied { version, stamps } if !stable => reply(version, false, stamps),
            Outcome::Applied { version, .. } | Outcome::Known { version } => {
                let epoch = self.view().epoch;
                reply(version, true, self.flush_chain(epoch).await?)
            }
            Outcome::Granted => {
                return Err(Error::new(Code::Io, "an update was answered as a hold"));
            }
            Outcome::Refused(e) => return Err(e),
        })
    }

    /// Takes a new view. `left`: set if the target is no replica of the chain in this epoch; the
    /// value says whether all the replicas that the chain should have are in sync.
    pub(super) fn take_view(self: &Arc<Self>, view: View, left: Option<bool>) {
        let epoch = view.epoch;
        let before = self.view().epoch;
        self.feed(Input::View(view));
        let now = self.view();
        if before < epoch {
            self.target.fills.ends(self.chain);
        }
        if before < epoch {
            self.kept.store(0, Ordering::Relaxed);
        }
        if before < epoch
            && let Some(whole) = left
        {
            let me = self.clone();
            self.node.env.spawn(async move { me.leave(epoch, whole).await });
        }
        if before < epoch
            && let (true, Some(to)) = (now.tail, now.syncing_successor())
        {
            let me = self.clone();
            self.node.env.spawn(async move { me.fill(to, epoch).await });
        }
    }

    /// Whether the tail may report that its successor is resynced.
    pub(super) fn has_synced(&self) -> bool {
        let inner = self.inner.lock();
        let v = inner.core.view();
        let filled = v.tail
            && v.syncing_successor().is_some()
            && self.synced.load(Ordering::Acquire) == v.epoch;
        filled && !inner.core.owes_shown()
    }
}

/// A reply with an encoded [`DataReply`] and a payload.
pub(super) fn reply(r: &DataReply, payload: Vec<Buf>) -> Message {
    let body: Bytes = r.encode();
    Message::new(0, body).with_payload(payload)
}
