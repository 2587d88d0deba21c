//! A model of three replicas, their metadata server and two clients. Every message may be lost,
//! duplicated or late; replicas restart and lose what they had not flushed; leases expire; and
//! memberships change by the rules of `docs/replication.md`. It drives the real [`ChainCore`] and
//! checks what that document promises.

mod clients;
mod store;

use std::collections::{BTreeMap, BTreeSet};

use strake_proto::{
    ChunkId, Code, Error, Result,
    data::{BootId, Version},
    layout::splitmix64,
    pb::{self, ReplicaState},
};

use super::{ChainCore, Input, Op, OpId, Outcome, Output, View, What};
use clients::Client;
use store::{Chunk, Store};

pub(super) const CHUNKS: u64 = 2;
const N: usize = 3;
const CLIENTS: usize = 2;
const CHAIN: u32 = 1;

#[derive(Clone, Debug)]
enum From {
    Client {
        value: u64,
    },
    Replica {
        at: usize,
        life: u64,
        op: OpId,
        attempt: u32,
    },
    /// A hold at the source of a push; `op` and `attempt` when the core asked for it.
    Sync {
        asked: Option<(OpId, u32)>,
    },
    /// A hold at its destination.
    Put {
        at: usize,
        life: u64,
        hold: OpId,
        chunk: Chunk,
        expected: Version,
    },
}

#[derive(Clone, Debug)]
struct Ctx {
    chunk: ChunkId,
    value: u64,
    session: u64,
    seq: u64,
    from: From,
}

struct Replica {
    life: u64,
    core: ChainCore,
    store: Store,
    durable: BTreeMap<ChunkId, Chunk>,
    ctx: BTreeMap<OpId, Ctx>,
    staging: BTreeSet<OpId>,
    retries: Vec<(OpId, u32)>,
    map: u64,
    /// The model's count of losses when this replica last reached the mds.
    losses: u64,
    leased: bool,
    /// Cannot reach the mds.
    cut: bool,
    synced: BTreeSet<ChunkId>,
}

#[derive(Clone, Debug)]
enum Msg {
    Update {
        to: usize,
        op: Op,
        ctx: Ctx,
    },
    Answer {
        to: usize,
        life: u64,
        op: OpId,
        attempt: u32,
        result: Result<Vec<BootId>>,
    },
    Greet {
        to: usize,
        epoch: u64,
    },
    Put {
        to: usize,
        epoch: u64,
        chunk: ChunkId,
        body: Chunk,
        expected: Version,
        at: usize,
        life: u64,
        hold: OpId,
    },
    PutAnswer {
        to: usize,
        life: u64,
        hold: OpId,
        result: Result<()>,
    },
    Reply {
        client: usize,
        value: u64,
        losses: u64,
        result: Result<(Version, Vec<BootId>, bool)>,
    },
}

pub(super) struct Cluster {
    rng: u64,
    chains: BTreeMap<u64, pb::Chain>,
    version: u64,
    /// The last life of each target that the mds knows.
    known: Vec<u64>,
    r: Vec<Replica>,
    clients: Vec<Client>,
    msgs: Vec<Msg>,
    next_op: OpId,
    next_value: u64,
    /// How often all in-sync replicas were lost at once.
    losses: u64,
    /// Longest list that was read of each chunk, and the count of losses then.
    seen: BTreeMap<ChunkId, (u64, Vec<u64>)>,
    faults: bool,
    /// Space runs out now and then.
    full: bool,
    /// The chain seldom changes, so that more happens within an epoch.
    calm: bool,
    /// Targets that the chain should have; changed at random if replicas move in this run.
    wanted: BTreeSet<u32>,
    moves: bool,
    /// The map that each replica acted on at its last heartbeat.
    acted: Vec<u64>,
    /// Deliberate mistake: clients do not send their round.
    pub roundless: bool,
    /// Deliberate mistake: replicas leave the chain before they know it, and hear of it late.
    pub hasty: bool,
    pub left: u64,
    pub reads: u64,
    pub writes: u64,
    pub given_up: u64,
}

fn chunk(i: u64) -> ChunkId {
    ChunkId { ino: 2, data: 1, index: i }
}

fn err(code: Code) -> Error {
    Error::new(code, "model")
}

impl Cluster {
    pub(super) fn new(seed: u64) -> Cluster {
        let replicas = (0..N as u32)
            .map(|t| pb::Replica { target: t, state: ReplicaState::ReplicaServing as i32 })
            .collect();
        let chain =
            pb::Chain { id: CHAIN, epoch: 1, replicas, preferred: vec![0, 1, 2], lost: false };
        let r = (0..N).map(|i| fresh(i, 1, 0, BTreeMap::new())).collect();
        let mut c = Cluster {
            rng: seed ^ 0x5eed,
            chains: BTreeMap::from([(1, chain)]),
            version: 1,
            known: vec![1; N],
            r,
            clients: (0..CLIENTS).map(|_| Client { map: 1, ..Client::default() }).collect(),
            msgs: Vec::new(),
            next_op: 1,
            next_value: 1,
            losses: 0,
            seen: BTreeMap::new(),
            faults: true,
            full: seed % 2 == 1,
            calm: seed % 8 == 5,
            wanted: (0..N as u32).collect(),
            moves: seed % 4 >= 2,
            acted: vec![0; N],
            roundless: false,
            hasty: false,
            left: 0,
            reads: 0,
            writes: 0,
            given_up: 0,
        };
        for i in 0..N {
            c.heartbeat(i);
        }
        c
    }

    fn rand(&mut self, n: u64) -> u64 {
        splitmix64(&mut self.rng) % n
    }
    fn op_id(&mut self) -> OpId {
        self.next_op += 1;
        self.next_op
    }
    fn chain(&self) -> &pb::Chain {
        &self.chains[&self.version]
    }

    /// One random thing happens.
    pub(super) fn step(&mut self) {
        let i = self.rand(N as u64) as usize;
        let changes = self.faults && (!self.calm || self.rand(50) == 0);
        match self.rand(if changes { 1000 } else { 960 }) {
            0..300 => self.deliver(),
            300..420 => self.stage(i),
            420..470 => self.retry(i),
            470..560 => self.heartbeat(i),
            560..660 => self.client_write(),
            660..740 => self.client_read(i),
            740..800 => self.client_flush(),
            800..880 => self.sync(i),
            880..900 => self.forget(i),
            900..920 => self.flush_one(i),
            920..960 => self.client_map(),
            960..972 => self.lease_runs_out(i),
            972..980 => self.restart(i),
            980..983 => (0..N).for_each(|i| self.lease_runs_out(i)),
            983..987 if self.moves => self.plan(),
            _ => self.r[i].cut = false,
        }
    }

    /// Faults end; everything must converge.
    pub(super) fn settle(&mut self) {
        self.faults = false;
        self.r.iter_mut().for_each(|r| r.cut = false);
        for _ in 0..40_000 {
            self.step();
            let members: BTreeSet<u32> = self.chain().replicas.iter().map(|r| r.target).collect();
            let whole = members == self.wanted
                && self.chain().replicas.iter().all(|r| r.state() == ReplicaState::ReplicaServing);
            let idle = self.r.iter().all(|r| r.core.busy() == 0 && r.map == self.version)
                && self
                    .clients
                    .iter()
                    .all(|c| c.open.is_none() && c.acked.iter().all(|a| a.stable));
            if whole && idle {
                return self.check_converged();
            }
        }
        panic!(
            "did not settle: {:?} {:?}",
            self.chain(),
            self.r.iter().map(|r| &r.core).collect::<Vec<_>>()
        );
    }

    fn check_converged(&self) {
        // A tombstone of version 0 counts as no record.
        let chunks = |r: &Replica| -> BTreeMap<ChunkId, Chunk> {
            let kept = r.store.chunks.iter().filter(|(_, c)| c.state.version != Version::default());
            kept.map(|(k, c)| (*k, c.clone())).collect()
        };
        let members: Vec<usize> = self.wanted.iter().map(|t| *t as usize).collect();
        let first = members[0];
        for i in members {
            assert_eq!(
                chunks(&self.r[first]),
                chunks(&self.r[i]),
                "replicas {first} and {i} differ"
            );
        }
        for a in self.clients.iter().flat_map(|c| &c.acked) {
            assert!(
                self.r[first].store.chunks[&a.chunk].list.contains(&a.value),
                "stable update {} lost",
                a.value
            );
        }
    }

    // --- the metadata server

    fn set_chain(&mut self, change: impl FnOnce(&mut Vec<pb::Replica>)) {
        let mut c = self.chain().clone();
        change(&mut c.replicas);
        c.epoch += 1;
        let rank = |r: &pb::Replica| match r.state() {
            ReplicaState::ReplicaServing => 0,
            ReplicaState::ReplicaSyncing => 1,
            _ => 2,
        };
        c.replicas.sort_by_key(rank);
        self.version += 1;
        self.chains.insert(self.version, c);
    }

    fn gone(&mut self, lost: &[usize]) {
        use ReplicaState::*;
        let serving: Vec<u32> = self
            .chain()
            .replicas
            .iter()
            .filter(|r| r.state() == ReplicaServing)
            .map(|r| r.target)
            .collect();
        let is_lost = |t: u32| lost.contains(&(t as usize));
        let all = !serving.is_empty() && serving.iter().all(|t| is_lost(*t));
        let any = self.chain().replicas.iter().any(|r| {
            is_lost(r.target)
                && matches!(r.state(), ReplicaServing | ReplicaSyncing | ReplicaWaiting)
        });
        if !any {
            return;
        }
        self.losses += u64::from(all);
        self.set_chain(|rs| {
            for r in rs {
                match r.state() {
                    ReplicaServing if all => r.set_state(ReplicaLastsrv),
                    ReplicaSyncing if all => r.set_state(ReplicaOffline),
                    ReplicaServing | ReplicaSyncing | ReplicaWaiting if is_lost(r.target) => {
                        r.set_state(ReplicaOffline)
                    }
                    _ => {}
                }
            }
        });
    }

    fn lease_runs_out(&mut self, i: usize) {
        self.r[i].cut = true;
        self.r[i].leased = false;
        self.gone(&[i]);
    }

    fn restart(&mut self, i: usize) {
        let durable = self.r[i].durable.clone();
        let epoch = self.chain().epoch;
        let life = self.r[i].life + 1;
        // A restart of a LASTSRV replica is a loss too: it may become the source again.
        let last = self
            .chain()
            .replicas
            .iter()
            .any(|r| r.target == i as u32 && r.state() == ReplicaState::ReplicaLastsrv);
        self.losses += u64::from(last);
        self.r[i] = fresh(i, life, epoch, durable);
    }

    /// The replica reaches the mds: the rows `leaves` to `waits`; it gets the map and a lease.
    fn heartbeat(&mut self, i: usize) {
        use ReplicaState::*;
        if self.r[i].cut || self.hasty && !self.wanted.contains(&(i as u32)) && self.rand(8) > 0 {
            return;
        }
        if self.known[i] != self.r[i].life {
            self.known[i] = self.r[i].life;
            self.gone(&[i]);
        }
        self.acted[i] = self.r[i].map;
        self.join_and_leave();
        let has = |c: &pb::Chain, s| c.replicas.iter().any(|r| r.state() == s);
        let (serving, syncing) =
            (has(self.chain(), ReplicaServing), has(self.chain(), ReplicaSyncing));
        let state = self
            .chain()
            .replicas
            .iter()
            .find(|r| r.target == i as u32)
            .map_or(ReplicaUnknown, pb::Replica::state);
        let wanted = self.wanted.contains(&(i as u32));
        let to = match state {
            ReplicaLastsrv if !serving => Some(ReplicaServing),
            ReplicaOffline | ReplicaWaiting if serving && !syncing && wanted => {
                Some(ReplicaSyncing)
            }
            ReplicaOffline => Some(ReplicaWaiting),
            _ => None,
        };
        if let Some(to) = to {
            self.set_chain(|rs| {
                for r in rs {
                    if r.target == i as u32 {
                        r.set_state(to);
                    } else if state == ReplicaLastsrv && r.state() == ReplicaLastsrv {
                        r.set_state(ReplicaOffline);
                    }
                }
            });
        }
        self.r[i].leased = true;
        self.r[i].losses = self.losses;
        if self.r[i].map != self.version {
            self.r[i].map = self.version;
            self.r[i].synced.clear();
            let view = View::of(self.chain(), i as u32);
            self.feed(i, Input::View(view));
        }
    }

    /// The chain should have other targets from now on.
    fn plan(&mut self) {
        let set = self.rand((1 << N) - 1) + 1;
        self.wanted = (0..N as u32).filter(|t| set & 1 << t != 0).collect();
    }

    /// The rows `joins`, `drops`, `steps-back` and `gone`.
    fn join_and_leave(&mut self) {
        use ReplicaState::*;
        let replicas = self.chain().replicas.clone();
        let state = |t: u32| replicas.iter().find(|r| r.target == t).map(pb::Replica::state);
        if replicas.iter().all(|r| r.state() != ReplicaServing) {
            return;
        }
        if let Some(t) = self.wanted.iter().copied().find(|t| state(*t).is_none()) {
            return self
                .set_chain(|rs| rs.push(pb::Replica { target: t, state: ReplicaOffline as i32 }));
        }
        let whole = self.wanted.iter().all(|t| state(*t) == Some(ReplicaServing));
        let syncing = replicas.iter().any(|r| r.state() == ReplicaSyncing);
        for r in replicas.iter().filter(|r| !self.wanted.contains(&r.target)) {
            let acts = self.hasty || self.acted[r.target as usize] == self.version;
            match r.state() {
                ReplicaServing if whole && !syncing && acts => {
                    return self.set_chain(|rs| {
                        rs.iter_mut()
                            .filter(|x| x.target == r.target)
                            .for_each(|x| x.set_state(ReplicaSyncing));
                    });
                }
                ReplicaOffline | ReplicaWaiting => {}
                ReplicaSyncing if acts => {}
                _ => continue,
            }
            self.left += 1;
            return self.set_chain(|rs| rs.retain(|x| x.target != r.target));
        }
    }

    /// A replica that has left removes one chunk.
    fn forget(&mut self, i: usize) {
        let view = self.r[i].core.view();
        if view.state == ReplicaState::ReplicaUnknown && view.epoch > 0 && !view.serving.is_empty()
        {
            let c = chunk(self.rand(CHUNKS));
            self.r[i].store.chunks.remove(&c);
        }
    }

    // --- replicas

    fn feed(&mut self, i: usize, input: Input) {
        let r = &mut self.r[i];
        let out = r.core.handle(input, &mut r.store);
        for o in out {
            self.carry_out(i, o);
        }
    }

    fn carry_out(&mut self, i: usize, o: Output) {
        let life = self.r[i].life;
        match o {
            Output::Stage { op } => {
                self.r[i].staging.insert(op);
            }
            Output::Forward { op, attempt, to, epoch, version, prev } => {
                let c = self.r[i].ctx[&op].clone();
                let what = What::Forward { session: c.session, seq: c.seq, version, prev };
                let eager = self.rand(2) == 0;
                let sent = Op { id: 0, chunk: c.chunk, epoch, eager, what };
                let ctx = Ctx { from: From::Replica { at: i, life, op, attempt }, ..c };
                self.msgs.push(Msg::Update { to: to as usize, op: sent, ctx });
            }
            Output::Push { op, attempt, to, epoch, chunk } => {
                self.push(i, to as usize, epoch, chunk, op, Some((op, attempt)));
            }
            Output::RetryLater { op, attempt } => self.r[i].retries.push((op, attempt)),
            Output::Greet { to, epoch } => self.msgs.push(Msg::Greet { to: to as usize, epoch }),
            Output::RefreshMap => {}
            Output::Failed { .. } => self.restart(i),
            Output::Alarm { message } => panic!("{message}"),
            Output::Done { op, outcome } => self.done(i, op, outcome),
        }
    }

    fn done(&mut self, i: usize, op: OpId, outcome: Outcome) {
        let life = self.r[i].life;
        let Some(ctx) = self.r[i].ctx.get(&op).cloned() else { return };
        if !matches!(outcome, Outcome::Granted) {
            self.r[i].ctx.remove(&op); // its staging continues
        }
        let result = match outcome {
            Outcome::Applied { version, boot_ids } => Ok((version, boot_ids, false)),
            Outcome::Known { version } => self.flush_from(i).map(|s| (version, s, true)),
            Outcome::Granted => return self.granted(i, op, ctx, life),
            Outcome::Refused(e) => Err(e),
        };
        match ctx.from {
            From::Client { value } => {
                let client = ctx.session as usize - 1;
                let losses = self.r[i].losses;
                self.msgs.push(Msg::Reply { client, value, losses, result });
            }
            From::Replica { at, life, op, attempt } => {
                let result = result.map(|r| r.1);
                self.msgs.push(Msg::Answer { to: at, life, op, attempt, result });
            }
            From::Put { at, life, hold, .. } => {
                let result = result.map(|_| ());
                self.msgs.push(Msg::PutAnswer { to: at, life, hold, result });
            }
            From::Sync { .. } => {}
        }
    }

    fn granted(&mut self, i: usize, op: OpId, ctx: Ctx, life: u64) {
        match ctx.from {
            From::Put { at, life: their, hold, chunk: body, expected } => {
                let now = self.r[i]
                    .store
                    .chunks
                    .get(&ctx.chunk)
                    .map(|c| c.state.version)
                    .unwrap_or_default();
                let result = if now == expected {
                    self.r[i].store.chunks.insert(ctx.chunk, body);
                    Ok(())
                } else {
                    Err(err(Code::VersionGap))
                };
                self.r[i].ctx.remove(&op);
                self.msgs.push(Msg::PutAnswer { to: at, life: their, hold, result });
                self.feed(i, Input::Release { op });
            }
            From::Sync { .. } => {
                let (view, c) = (self.r[i].core.view().clone(), ctx.chunk);
                match view.syncing_successor() {
                    Some(to) => self.push(i, to as usize, view.epoch, c, op, None),
                    None => {
                        debug_assert_eq!(self.r[i].life, life);
                        self.feed(i, Input::Release { op });
                    }
                }
            }
            _ => unreachable!("only holds are granted"),
        }
    }

    fn push(
        &mut self,
        i: usize,
        to: usize,
        epoch: u64,
        c: ChunkId,
        hold: OpId,
        asked: Option<(OpId, u32)>,
    ) {
        let body = self.r[i].store.chunks.get(&c).cloned().unwrap_or_default();
        let expected = self.r[to].store.chunks.get(&c).map(|c| c.state.version).unwrap_or_default();
        let life = self.r[i].life;
        let hold_id = self.op_id();
        // Remember under an id of its own what to do when the answer comes.
        let from = From::Sync { asked: asked.or(Some((hold, u32::MAX))) };
        self.r[i].ctx.insert(hold_id, Ctx { chunk: c, value: 0, session: 0, seq: epoch, from });
        self.msgs.push(Msg::Put {
            to,
            epoch,
            chunk: c,
            body,
            expected,
            at: i,
            life,
            hold: hold_id,
        });
    }

    fn flush(&mut self, i: usize) {
        self.r[i].durable = self.r[i].store.chunks.clone();
    }

    /// A flush of a replica and all behind it, in one step.
    fn flush_from(&mut self, i: usize) -> Result<Vec<BootId>> {
        let (mut at, epoch, mut boot_ids) = (i, self.r[i].core.view().epoch, Vec::new());
        loop {
            if !self.r[at].leased || (at != i && self.rand(10) == 0) {
                return Err(err(Code::Disconnected));
            }
            self.r[at].core.check_member(epoch)?;
            self.flush(at);
            boot_ids.push(self.r[at].core.boot_id());
            match self.r[at].core.view().successor {
                Some((s, _)) => at = s as usize,
                None => return Ok(boot_ids),
            }
        }
    }

    fn flush_one(&mut self, i: usize) {
        self.flush(i);
    }

    fn stage(&mut self, i: usize) {
        let Some(op) = self.r[i].staging.pop_first() else { return };
        let result = if self.full && self.faults && self.rand(if self.calm { 10 } else { 50 }) == 0
        {
            Err(err(Code::NoSpc))
        } else {
            Ok(())
        };
        self.feed(i, Input::Staged { op, result });
    }

    fn retry(&mut self, i: usize) {
        if let Some((op, attempt)) = self.r[i].retries.pop() {
            self.feed(i, Input::Retry { op, attempt });
        }
    }

    /// One step of the resync worker.
    fn sync(&mut self, i: usize) {
        let view = self.r[i].core.view().clone();
        let Some(to) = view.syncing_successor() else { return };
        if !view.tail {
            return;
        }
        let missing: Vec<ChunkId> =
            (0..CHUNKS).map(chunk).filter(|c| !self.r[i].synced.contains(c)).collect();
        if let Some(c) = missing.first() {
            let id = self.op_id();
            let ctx =
                Ctx { chunk: *c, value: 0, session: 0, seq: 0, from: From::Sync { asked: None } };
            self.r[i].ctx.insert(id, ctx);
            let op = Op { id, chunk: *c, epoch: view.epoch, eager: true, what: What::Hold };
            return self.feed(i, Input::Op(op));
        }
        // The pass is done: flush the successor and report. The report counts only at the current
        // map.
        let to = to as usize;
        if self.r[to].core.check_member(view.epoch).is_err()
            || self.r[i].map != self.version
            || self.r[i].cut
        {
            return;
        }
        self.flush(to);
        if !self.wanted.contains(&(to as u32)) {
            return;
        }
        self.set_chain(|rs| {
            rs.iter_mut().filter(|r| r.target == to as u32).for_each(|r| {
                r.set_state(ReplicaState::ReplicaServing);
            })
        });
    }

    // --- messages

    fn deliver(&mut self) {
        if self.msgs.is_empty() {
            return;
        }
        let k = self.rand(self.msgs.len() as u64) as usize;
        let m = self.msgs[k].clone();
        let fate = if self.faults { self.rand(20) } else { 10 };
        if fate != 0 {
            self.msgs.swap_remove(k); // 0: stays, to be delivered again
        }
        if fate == 1 {
            return self.lost(m);
        }
        self.receive(m);
    }

    fn lost(&mut self, m: Msg) {
        match m {
            Msg::Update {
                ctx: Ctx { from: From::Replica { at, life, op, attempt }, .. }, ..
            }
            | Msg::Answer { to: at, life, op, attempt, .. } => {
                let result = Err(err(Code::Disconnected));
                self.receive(Msg::Answer { to: at, life, op, attempt, result });
            }
            Msg::Put { at, life, hold, .. } | Msg::PutAnswer { to: at, life, hold, .. } => {
                let result = Err(err(Code::Disconnected));
                self.receive(Msg::PutAnswer { to: at, life, hold, result });
            }
            Msg::Greet { .. } => self.msgs.push(m),
            Msg::Update { ctx: Ctx { from: From::Client { value }, session, .. }, .. } => {
                let client = session as usize - 1;
                self.client_reply(client, value, 0, Err(err(Code::Disconnected)));
            }
            Msg::Reply { client, value, .. } => {
                self.client_reply(client, value, 0, Err(err(Code::Disconnected)))
            }
            Msg::Update { .. } => unreachable!("updates come from clients and replicas"),
        }
    }

    fn receive(&mut self, m: Msg) {
        match m {
            Msg::Update { to, mut op, ctx } => {
                op.id = self.op_id();
                self.r[to].store.values.insert(op.id, (ctx.chunk, ctx.value));
                self.r[to].ctx.insert(op.id, ctx);
                self.feed(to, Input::Op(op));
            }
            Msg::Answer { to, life, op, attempt, result } if self.r[to].life == life => {
                self.feed(to, Input::Answer { op, attempt, result });
            }
            Msg::Greet { to, epoch } => {
                let r = &mut self.r[to];
                if r.core.check_member(epoch).is_ok() {
                    r.core.heard_predecessor(epoch);
                } else if r.core.view().epoch < epoch {
                    self.msgs.push(Msg::Greet { to, epoch });
                }
            }
            Msg::Put { to, epoch, chunk, body, expected, at, life, hold } => {
                let id = self.op_id();
                let from = From::Put { at, life, hold, chunk: body, expected };
                self.r[to].ctx.insert(id, Ctx { chunk, value: 0, session: 0, seq: 0, from });
                let op = Op { id, chunk, epoch, eager: true, what: What::Hold };
                self.feed(to, Input::Op(op));
            }
            Msg::PutAnswer { to, life, hold, result } if self.r[to].life == life => {
                let Some(ctx) = self.r[to].ctx.remove(&hold) else { return };
                let From::Sync { asked: Some((op, attempt)) } = ctx.from else { return };
                if attempt != u32::MAX {
                    return self.feed(to, Input::Pushed { op, attempt, result });
                }
                if result.is_ok() && ctx.seq == self.r[to].core.view().epoch {
                    self.r[to].synced.insert(ctx.chunk);
                }
                self.r[to].ctx.remove(&op);
                self.feed(to, Input::Release { op });
            }
            Msg::Reply { client, value, losses, result } => {
                self.client_reply(client, value, losses, result)
            }
            Msg::Answer { .. } | Msg::PutAnswer { .. } => {} // for an earlier life
        }
    }
}

fn fresh(i: usize, life: u64, stale_through: u64, durable: BTreeMap<ChunkId, Chunk>) -> Replica {
    Replica {
        life,
        core: ChainCore::new(CHAIN, BootId { target: i as u32, number: life }, stale_through),
        store: Store { chunks: durable.clone(), values: BTreeMap::new() },
        durable,
        ctx: BTreeMap::new(),
        staging: BTreeSet::new(),
        retries: Vec::new(),
        map: 0,
        losses: 0,
        leased: false,
        cut: false,
        synced: BTreeSet::new(),
    }
}
