//! The task that feeds the protocol: it batches proposals, hands changes to the log's task (one durable write for all
//! that waits) and sends messages while the write runs. `apply` has what is done with what is committed, `copy` the snapshots, `damage` what
//! becomes of a state that is damaged, `members` the changes of the group.

mod apply;
mod copy;
mod damage;
mod members;

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use protobuf::Message as _;
use raft::{
    StateRole,
    eraftpb::{ConfState, Entry, Message, MessageType},
};
use strake_fabric::{Endpoint, Env, watch};
use strake_proto::{Code, Error, Result, pb};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::MissedTickBehavior,
};

use super::{
    Config, Leadership, LogImage, LogOp, LogStore, MemberChange, StateMachine,
    core::{Core, Output},
    health::SlowLog,
    members::{Group, NO_STATE},
    reads::{self, Reads},
    snapshot::Incoming,
    transport::{Health, Peers, Word},
};
use members::{PeerProgress, not_member};

/// Batches on their way to the log.
const MAX_UNPERSISTED: usize = 16;
/// Proposals taken together, and their bytes.
const BATCH: (usize, usize) = (1024, 4 << 20);
const RETRY: Duration = Duration::from_millis(200);
/// Metadata servers whose logs are known, those that were replaced too.
const MAX_PEERS: usize = 1024;

pub type Reply = oneshot::Sender<Result<()>>;

pub struct Proposal {
    pub data: Bytes,
    pub reply: oneshot::Sender<Result<Bytes>>,
}

pub enum RaftInput {
    Batch(Batch, Reply),
    Chunk(pb::SnapshotChunk, Reply),
}

/// Raft messages of one peer, and what it says of itself.
pub struct Batch {
    pub from: u64,
    pub stamp: u64,
    pub applied: u64,
    pub disk: u32,
    pub endpoint: Option<Endpoint>,
    pub messages: Vec<Message>,
}

pub enum Control {
    /// To 0: to whoever is placed best.
    Transfer(u64, Reply),
    Change(MemberChange, Reply),
    Group(oneshot::Sender<Group>),
    /// The state may be damaged: is it given up?
    Damaged(oneshot::Sender<bool>),
    /// Another life of the group has begun without this member.
    Retire(Error),
    Stop,
}

pub struct Inputs {
    pub raft: mpsc::Receiver<RaftInput>,
    pub proposals: mpsc::Receiver<Proposal>,
    pub reads: mpsc::Receiver<reads::Reply>,
    pub control: mpsc::Receiver<Control>,
    pub words: mpsc::Receiver<Word>,
}

pub struct Shared {
    pub status: Mutex<pb::RaftStatus>,
    pub stopped: watch::Sender<Option<Error>>,
}

/// For the log's task: changes to write, then which ready they were of.
struct Job {
    ops: Vec<LogOp>,
    number: Option<u64>,
    /// The changes mark the start of this incoming copy.
    restoring: Option<u64>,
}

/// What the driver's own tasks tell it.
enum Event {
    Persisted { number: Option<u64>, restoring: Vec<u64> },
    Stalled(Error),
    Failed(Error),
    Synced(u64, Result<()>),
    Sent { to: u64, id: u64, result: Result<()> },
}

enum Waiter {
    Proposal(oneshot::Sender<Result<Bytes>>),
    Change(Reply),
}

struct ToApply {
    entries: Vec<Entry>,
    conf: Option<ConfState>,
}

pub struct Driver {
    cfg: Arc<Config>,
    env: Env,
    core: Core,
    sm: Arc<dyn StateMachine>,
    peers: Arc<Peers>,
    shared: Arc<Shared>,
    leadership: watch::Sender<Leadership>,
    inputs: Option<Inputs>,
    events: mpsc::Receiver<Event>,
    events_tx: mpsc::Sender<Event>,
    jobs: mpsc::Sender<Job>,
    tasks: Vec<JoinHandle<()>>,
    waiters: BTreeMap<u64, (u64, Waiter)>,
    /// Changes that are applied and wait for the end of the joint configuration, and until a majority knows of it: a
    /// member that does not know still needs a majority of the old members to be elected.
    leaving_joint: Vec<Reply>,
    /// The last entry of those changes, once the joint configuration has ended.
    joint_left: Option<u64>,
    reads: Reads,
    /// Applying these found the disk full.
    backlog: Option<ToApply>,
    /// The end of a copy of the leader's state, which found the disk full.
    unfinished: Option<Output>,
    /// The disk is full, or the state is damaged and no other member has one, with what it said.
    stalled: Option<Error>,
    /// What is wrong with the state, until it is replaced; and how often something was.
    damage: Option<Error>,
    damages: u64,
    /// Ticks without a state and without a leader.
    leaderless_ticks: u32,
    syncing: bool,
    /// Copies on their way out: peer → (id, index, task).
    outgoing: BTreeMap<u64, (u64, u64, JoinHandle<()>)>,
    incoming: Option<Incoming>,
    /// Term and whether this member led, when last looked.
    was: (u64, bool),
    /// The membership is to be given with the next apply, though it did not change.
    conf_unknown: bool,
    peer_progress: BTreeMap<u64, PeerProgress>,
    /// When this member began to lead, and when it last handed on because of its disk.
    led_since: Duration,
    yielded: Duration,
    /// Since when its disk is slow or full.
    unfit: Option<Duration>,
    /// Ticks since this member applied its own removal.
    removed: Option<u32>,
    health: Arc<Health>,
    slow: Arc<Mutex<SlowLog>>,
}

impl Driver {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        cfg: Arc<Config>,
        env: Env,
        image: LogImage,
        log: Arc<dyn LogStore>,
        sm: Arc<dyn StateMachine>,
        peers: Arc<Peers>,
        shared: Arc<Shared>,
        leadership: watch::Sender<Leadership>,
        inputs: Inputs,
    ) -> Result<Driver> {
        let conf = sm.conf_state();
        let core = Core::new(&cfg, image, sm.applied(), &conf, env.random_u64())?;
        if core.has_lost_state() {
            sm.void();
        }
        // The map may not name them yet: the leader that took them in may have been lost in that moment.
        for (id, endpoint) in core.taken_in() {
            endpoint.parse().into_iter().for_each(|e| peers.set(id, e));
        }
        let health = peers.sender().health.clone();
        let (events_tx, events) = mpsc::channel(256);
        let (jobs, jobs_rx) = mpsc::channel(256);
        let slow = Arc::new(Mutex::new(SlowLog::new(cfg.slow_write)));
        let timer = Timer { env: env.clone(), slow: slow.clone() };
        let writer = env.spawn(write_log(log, jobs_rx, events_tx.clone(), timer));
        Ok(Driver {
            cfg,
            env,
            core,
            sm,
            peers,
            shared,
            leadership,
            inputs: Some(inputs),
            events,
            events_tx,
            jobs,
            tasks: vec![writer],
            waiters: BTreeMap::new(),
            leaving_joint: Vec::new(),
            joint_left: None,
            reads: Reads::default(),
            backlog: None,
            unfinished: None,
            stalled: None,
            damage: None,
            damages: 0,
            leaderless_ticks: 0,
            syncing: false,
            outgoing: BTreeMap::new(),
            incoming: None,
            was: (0, false),
            conf_unknown: conf.is_empty(),
            peer_progress: BTreeMap::new(),
            led_since: Duration::ZERO,
            yielded: Duration::ZERO,
            unfit: None,
            removed: None,
            health,
            slow,
        })
    }

    /// Runs until it is stopped or cannot go on.
    pub async fn run(mut self) {
        let Some(mut inputs) = self.inputs.take() else { return };
        let cause = match self.drive(&mut inputs).await {
            Ok(()) => Error::new(Code::Disconnected, "this metadata server was stopped"),
            Err(e) => {
                tracing::error!("this metadata server cannot go on: {e}");
                e
            }
        };
        self.shared.stopped.send_replace(Some(cause.clone()));
        self.fail_all(&cause);
        let l = Leadership { term: self.core.term(), leader: 0, ready: false, since: self.env.boot() };
        self.leadership.send_replace(l);
        self.tasks.iter().for_each(JoinHandle::abort);
        self.outgoing.values().for_each(|(_, _, task)| task.abort());
        self.core.conf().voters.iter().chain(&self.core.conf().learners).for_each(|id| self.peers.remove(*id));
    }

    async fn drive(&mut self, inputs: &mut Inputs) -> Result<()> {
        let mut ticks = tokio::time::interval(self.cfg.tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.process()?;
        loop {
            tokio::select! {
                biased;
                Some(event) = self.events.recv() => self.event(event)?,
                _ = ticks.tick() => {
                    self.core.tick();
                    self.look_after_members()?;
                }
                Some(m) = inputs.raft.recv() => {
                    self.raft_input(m)?;
                    for _ in 0..256 {
                        let Ok(m) = inputs.raft.try_recv() else { break };
                        self.raft_input(m)?;
                    }
                }
                Some(word) = inputs.words.recv() => match word {
                    Word::Lost(id) => self.core.report_unreachable(id),
                    Word::Removed(e) => return Err(e),
                },
                c = inputs.control.recv() => match c {
                    Some(Control::Transfer(to, reply)) => self.transfer(to, reply),
                    Some(Control::Change(change, reply)) => self.change(change, reply),
                    Some(Control::Group(reply)) => drop(reply.send(self.group())),
                    Some(Control::Damaged(reply)) => {
                        self.mind_damage();
                        let _ = reply.send(self.core.has_lost_state());
                    }
                    Some(Control::Retire(e)) => return Err(e),
                    Some(Control::Stop) | None => return Ok(()),
                },
                Some(reply) = inputs.reads.recv() => self.read(reply),
                Some(p) = inputs.proposals.recv() => self.propose(p, &mut inputs.proposals),
            }
            for _ in 0..BATCH.0 {
                let Ok(reply) = inputs.reads.try_recv() else { break };
                self.read(reply);
            }
            self.process()?;
        }
    }

    /// Why this member takes no proposals, if it does not.
    fn not_ready(&self) -> Option<Error> {
        if self.core.is_leader() && self.core.has_lost_state() {
            return Some(Error::not_leader(0));
        }
        if self.core.is_leader() {
            return self.stalled.clone();
        }
        if let (Some(e), 0) = (&self.stalled, self.core.leader()) {
            return Some(e.clone());
        }
        Some(Error::not_leader(self.core.leader() as u32))
    }

    /// The only voter: nobody else could lead.
    fn alone(&self) -> bool {
        let c = self.core.conf();
        c.voters_outgoing.is_empty() && c.voters == [self.cfg.id]
    }

    /// On a full disk this member, alone, still answers reads from what it has applied: that is everything that was
    /// answered in this term, and in terms before. What is committed beyond it nobody was told of.
    fn reads_while_stalled(&self) -> bool {
        self.stalled.is_some() && self.alone() && self.leads_own_term()
    }

    fn leads_own_term(&self) -> bool {
        self.core.is_settled_leader() && self.core.applied_to().1 == self.core.term()
    }

    /// The disk is full, or the state is damaged: another member should lead, where there is one.
    fn stall(&mut self, e: Error) {
        if self.stalled.is_none() {
            tracing::error!("this metadata server takes no changes for now: {e}");
        }
        if self.alone() {
            self.fail_waiters();
        } else {
            self.core.set_stalled(true);
        }
        self.stalled = Some(e);
    }

    fn unstall(&mut self) {
        if self.stalled.take().is_some() {
            tracing::info!("this metadata server takes changes again");
            self.core.set_stalled(false);
        }
    }

    fn read(&mut self, reply: reads::Reply) {
        if self.reads_while_stalled() {
            let _ = reply.send(Ok(()));
            return;
        }
        if let Some(e) = self.not_ready() {
            let _ = reply.send(Err(e));
        } else if self.reads.len() >= self.cfg.queue {
            let _ = reply.send(Err(Error::new(Code::Overloaded, "too many metadata reads wait")));
        } else {
            self.reads.add(reply);
        }
    }

    fn propose(&mut self, first: Proposal, more: &mut mpsc::Receiver<Proposal>) {
        let mut size = first.data.len();
        let mut batch = vec![first];
        while batch.len() < BATCH.0 && size < BATCH.1 {
            let Ok(p) = more.try_recv() else { break };
            size += p.data.len();
            batch.push(p);
        }
        let proposed = match self.not_ready() {
            Some(e) => Err(e),
            None => self.core.propose(batch.iter().map(|p| p.data.clone())),
        };
        for (i, p) in batch.into_iter().enumerate() {
            match &proposed {
                Ok((index, term)) => {
                    self.waiters.insert(index + i as u64, (*term, Waiter::Proposal(p.reply)));
                }
                Err(e) => drop(p.reply.send(Err(e.clone()))),
            }
        }
    }

    fn raft_input(&mut self, input: RaftInput) -> Result<()> {
        match input {
            RaftInput::Batch(batch, reply) => {
                let known = self.known_peer(batch.from, batch.stamp);
                if known.is_ok() {
                    self.heard_of(&batch);
                    batch.messages.into_iter().for_each(|m| self.step(m));
                }
                let _ = reply.send(known);
                Ok(())
            }
            RaftInput::Chunk(chunk, reply) => self.chunk(chunk, reply),
        }
    }

    /// A member that comes back with another log has lost what it acknowledged; one that was removed may not know it yet.
    fn known_peer(&mut self, from: u64, stamp: u64) -> Result<()> {
        if self.sm.is_former(from) {
            return Err(not_member(from));
        }
        match self.core.image().peers.get(&from) {
            Some(s) if *s == stamp => Ok(()),
            Some(_) => {
                let m = format!(
                    "metadata server {from} came back with another raft log; it must not vote again under this id: replace \
                     it (docs/operations.md, 'Changing the group of metadata servers')"
                );
                Err(Error::new(Code::Stale, m))
            }
            None if self.core.image().peers.len() >= MAX_PEERS => Err(Error::new(
                Code::Overloaded,
                format!("{MAX_PEERS} metadata servers are known, {from} is one too many"),
            )),
            None => {
                let slot = self.jobs.try_reserve().map_err(|_| behind())?;
                let op = self.core.note_peer(from, stamp);
                slot.send(Job { ops: vec![op], number: None, restoring: None });
                Ok(())
            }
        }
    }

    fn step(&mut self, m: Message) {
        if m.get_msg_type() == MessageType::MsgSnapshot {
            let s = m.get_snapshot();
            let needless = self.core.needs_no_copy(s.get_metadata().index, s.get_metadata().term);
            let id = s.data.as_ref().try_into().map(u64::from_le_bytes).ok();
            let there = self.incoming.as_ref().is_some_and(|i| {
                let meta = s.get_metadata();
                i.complete && i.from == m.from && Some(i.id) == id && (i.index, i.term) == (meta.index, meta.term)
            });
            if !there && !needless {
                tracing::warn!(from = m.from, "dropped a raft snapshot whose data did not arrive");
                return;
            }
        }
        self.core.step(m);
    }

    fn write(&mut self, job: Job) -> Result<()> {
        self.jobs.try_send(job).map_err(|_| behind())
    }

    fn event(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Persisted { number, restoring } => {
                if !self.is_blocked() {
                    self.unstall();
                }
                if let Some(n) = number {
                    self.core.persisted(n).into_iter().for_each(|m| self.send(m));
                }
                restoring.into_iter().try_for_each(|id| self.restore_marked(id))
            }
            Event::Stalled(e) => {
                self.stall(e);
                Ok(())
            }
            Event::Failed(e) => Err(e),
            Event::Synced(index, result) => self.synced(index, result),
            Event::Sent { to, id, result } => {
                if self.outgoing.get(&to).is_some_and(|o| o.0 == id) {
                    self.outgoing.remove(&to);
                    if let Err(e) = &result {
                        tracing::warn!(to, "copying the state failed, will be tried again: {e}");
                    }
                    self.core.report_snapshot(to, result.is_ok());
                }
                Ok(())
            }
        }
    }

    /// Does all that the protocol asks for.
    fn process(&mut self) -> Result<()> {
        self.mind_damage();
        self.notice_role();
        if self.core.can_read()
            && let Some(number) = self.reads.ask()
        {
            self.core.read_index(number);
        }
        loop {
            self.try_again()?;
            if self.is_blocked() || self.core.unpersisted() >= MAX_UNPERSISTED {
                break;
            }
            let Some(out) = self.core.ready() else { break };
            self.output(out)?;
        }
        self.notice_role();
        self.reads.applied(self.core.applied_to().0);
        if self.reads_while_stalled() {
            self.reads.allow_all();
        }
        self.answer_changes();
        self.maybe_sync();
        self.publish();
        Ok(())
    }

    /// Something that was handed out waits for space for the state.
    fn is_blocked(&self) -> bool {
        self.backlog.is_some() || self.unfinished.is_some()
    }

    fn try_again(&mut self) -> Result<()> {
        if !self.is_blocked() {
            return Ok(());
        }
        if let Some(out) = self.unfinished.take() {
            self.output(out)?;
        }
        if self.unfinished.is_none()
            && let Some(work) = self.backlog.take()
        {
            self.apply(work)?;
        }
        if !self.is_blocked() {
            self.unstall();
        }
        Ok(())
    }

    fn output(&mut self, out: Output) -> Result<()> {
        if let Some((index, term, conf)) = &out.restore {
            match self.finish_restore(*index, *term, conf) {
                // The log must not say that the copy is whole before it is.
                Err(e) if e.code == Code::NoSpc => {
                    self.stall(e);
                    self.unfinished = Some(out);
                    return Ok(());
                }
                r => r?,
            }
        }
        if let Some(ops) = out.persist {
            self.write(Job { ops, number: Some(out.number), restoring: None })?;
        }
        out.messages.into_iter().for_each(|m| self.send(m));
        out.reads.into_iter().for_each(|(number, index)| self.reads.allow(number, index));
        for (id, endpoint) in out.endpoints {
            match endpoint.parse::<Endpoint>() {
                Ok(e) => self.peers.set(id, e),
                Err(e) => tracing::warn!(id, "endpoint of a new metadata server: {e}"),
            }
        }
        self.apply(ToApply { entries: out.committed, conf: out.conf_state })
    }

    fn send(&mut self, m: Message) {
        if m.get_msg_type() == MessageType::MsgSnapshot {
            let to = m.to;
            if let Err(e) = self.send_snapshot(m) {
                tracing::warn!(to, "cannot copy the state: {e}");
                self.core.report_snapshot(to, false);
            }
        } else {
            self.peers.send(m);
        }
    }

    /// What waits for a leadership that ended gets its answer.
    fn notice_role(&mut self) {
        let now = (self.core.term(), self.core.is_leader());
        if now.1 && now != self.was {
            self.led_since = self.env.boot();
        }
        if self.was.1 && now != self.was {
            self.fail_all(&Error::not_leader(self.core.leader() as u32));
        }
        self.was = now;
    }

    fn fail_all(&mut self, reads: &Error) {
        self.fail_waiters();
        self.reads.fail(reads);
    }

    /// Nobody knows (yet) whether what they wait for will happen.
    fn fail_waiters(&mut self) {
        for (_, waiter) in std::mem::take(&mut self.waiters).into_values() {
            match waiter {
                Waiter::Proposal(w) => drop(w.send(Err(lost()))),
                Waiter::Change(w) => drop(w.send(Err(lost()))),
            }
        }
        self.joint_left = None;
        self.leaving_joint.drain(..).for_each(|w| drop(w.send(Err(lost()))));
    }

    fn publish(&mut self) {
        let (term, leader) = (self.core.term(), self.core.leader());
        let ready = self.leads_own_term() && (self.stalled.is_none() || self.alone());
        let since = self.env.boot();
        self.leadership.send_if_modified(|l| {
            let changed = (l.term, l.leader, l.ready) != (term, leader, ready);
            if changed {
                *l = Leadership { term, leader, ready, since };
            }
            changed
        });
        let image = self.core.image();
        let state = match self.core.role() {
            StateRole::Leader => "leader",
            StateRole::Follower if self.core.conf().learners.contains(&self.cfg.id) => "learner",
            StateRole::Follower => "follower",
            StateRole::Candidate | StateRole::PreCandidate => "candidate",
        };
        self.health.applied.store(self.core.applied_to().0, Relaxed);
        match self.core.has_lost_state() {
            true => self.health.disk.fetch_or(NO_STATE, Relaxed),
            false => self.health.disk.fetch_and(!NO_STATE, Relaxed),
        };
        let mut status = self.shared.status.lock();
        status.state.clear();
        status.state.push_str(state);
        (status.id, status.term, status.leader) = (self.cfg.id, term, leader);
        (status.committed, status.applied) = (self.core.committed(), self.core.applied_to().0);
        (status.first_index, status.last_index) = (image.first(), image.last());
        status.voters.clone_from(&self.core.conf().voters);
        status.learners.clone_from(&self.core.conf().learners);
        (status.no_state, status.damages) = (self.core.has_lost_state(), self.damages);
        status.damage = self.damage.as_ref().map(|e| e.message.clone()).unwrap_or_default();
    }
}

fn behind() -> Error {
    Error::new(Code::Overloaded, "the raft log cannot keep up")
}

fn lost() -> Error {
    let m = "this metadata server could not finish a change; it may or may not have been made";
    Error::new(Code::Disconnected, m)
}

fn conf_bytes(conf: &ConfState) -> Result<Vec<u8>> {
    conf.write_to_bytes().map_err(|e| Error::new(Code::Inval, e.to_string()))
}

/// Takes the time of the log's writes.
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

/// Writes what waits, all of it at once. A full disk is waited out; other errors end the member.
async fn write_log(log: Arc<dyn LogStore>, mut jobs: mpsc::Receiver<Job>, events: mpsc::Sender<Event>, timer: Timer) {
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
