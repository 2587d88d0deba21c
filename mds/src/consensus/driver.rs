//! The task that feeds the protocol: it batches proposals, hands changes to the log's task (one
//! durable write for all that wait) and sends messages while the write runs.
//!
//! | file | idea |
//! |---|---|
//! | `inputs.rs` | inputs from outside |
//! | `log_queue.rs` | the log's task and its queue |
//! | `apply.rs` | applying committed entries |
//! | `waiters.rs` | callers that wait for their entries |
//! | `stall.rs` | work that waits for disk space, or for another state |
//! | `copies.rs`, `copy.rs` | copies of a state, sent and received |
//! | `damage.rs` | what is done about a damaged state |
//! | `standing.rs`, `members.rs` | changes of the group, and which member should lead |

mod apply;
mod copies;
mod copy;
mod damage;
mod inputs;
mod log_queue;
mod members;
mod stall;
mod standing;
mod waiters;

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use protobuf::Message as _;
use raft::{
    StateRole,
    eraftpb::{ConfState, Message, MessageType},
};
use strake_fabric::Endpoint;
use strake_proto::{Code, Error, Result};
use strake_runtime::{Env, watch};
use tokio::{sync::mpsc, task::JoinHandle, time::MissedTickBehavior};

use super::{
    core::{Core, Output, is_only_voter, taken_in},
    leader_lease::lease_end,
    log::{LogImage, LogStore},
    members::{NO_STATE, not_member},
    reads::{self, Reads},
    transport::{Health, Peers, Word},
    types::{Config, Leadership, StateMachine},
};
use copies::Copies;
pub(super) use inputs::{Batch, Control, Inputs, Proposal, RaftInput, Shared};
use log_queue::{Event, Job, LogQueue, MAX_UNPERSISTED};
use stall::{Damage, Stall, ToApply};
use standing::Standing;
use waiters::{Waiter, Waiters};

/// Proposals taken together, and their bytes.
const BATCH: (usize, usize) = (1024, 4 << 20);
/// Metadata servers whose log stamps are kept, replaced ones included.
const MAX_PEERS: usize = 1024;

pub(super) struct Driver {
    cfg: Arc<Config>,
    env: Env,
    core: Core,
    sm: Arc<dyn StateMachine>,
    peers: Arc<Peers>,
    shared: Arc<Shared>,
    leadership: watch::Sender<Leadership>,
    events: mpsc::Receiver<Event>,
    events_tx: mpsc::Sender<Event>,
    log: LogQueue,
    tasks: Vec<JoinHandle<()>>,
    waiters: Waiters,
    reads: Reads,
    stall: Stall,
    damage: Damage,
    copies: Copies,
    standing: Standing,
    /// The state is being made durable.
    syncing: bool,
    /// The next apply must pass the membership, though it did not change.
    conf_unknown: bool,
    health: Arc<Health>,
}

impl Driver {
    pub(super) fn new(
        cfg: Arc<Config>,
        env: Env,
        image: LogImage,
        log: Arc<dyn LogStore>,
        sm: Arc<dyn StateMachine>,
        peers: Arc<Peers>,
        shared: Arc<Shared>,
        leadership: watch::Sender<Leadership>,
    ) -> Result<Driver> {
        let conf = sm.conf_state();
        let core = Core::new(&cfg, image, sm.applied(), &conf, env.random_u64())?;
        if core.has_lost_state() {
            sm.void();
        }
        // The map may not name them yet: the leader that added them may have been lost at that
        // moment.
        for (id, endpoint) in taken_in(&core) {
            endpoint.parse().into_iter().for_each(|e| peers.set(id, e));
        }
        let health = peers.sender().health.clone();
        let (events_tx, events) = mpsc::channel(256);
        let (log, writer) = LogQueue::start(log, &env, cfg.slow_write, events_tx.clone());
        Ok(Driver {
            cfg,
            env,
            core,
            sm,
            peers,
            shared,
            leadership,
            events,
            events_tx,
            log,
            tasks: vec![writer],
            waiters: Waiters::default(),
            reads: Reads::default(),
            stall: Stall::default(),
            damage: Damage::default(),
            copies: Copies::default(),
            standing: Standing::default(),
            syncing: false,
            conf_unknown: conf.is_empty(),
            health,
        })
    }

    /// Runs until it is stopped or cannot go on.
    pub(super) async fn run(mut self, mut inputs: Inputs) {
        let cause = match self.drive(&mut inputs).await {
            Ok(()) => Error::new(Code::Disconnected, "this metadata server was stopped"),
            Err(e) => {
                tracing::error!("this metadata server cannot go on: {e}");
                e
            }
        };
        self.shared.lease.set(Duration::ZERO);
        self.shared.stopped.send_replace(Some(cause.clone()));
        self.fail_all(&cause);
        let l =
            Leadership { term: self.core.term(), leader: 0, ready: false, since: self.env.boot() };
        self.leadership.send_replace(l);
        self.tasks.iter().for_each(JoinHandle::abort);
        self.copies.abort();
        self.core
            .conf()
            .voters
            .iter()
            .chain(&self.core.conf().learners)
            .for_each(|id| self.peers.remove(*id));
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
            return self.stall.why.clone();
        }
        if let (Some(e), 0) = (&self.stall.why, self.core.leader()) {
            return Some(e.clone());
        }
        Some(Error::not_leader(self.core.leader() as u32))
    }

    /// If this member is the only voter and its disk is full, it still answers reads from what it
    /// has applied. That is everything that it answered in this term and in earlier ones; no client
    /// has had an answer about committed entries beyond it.
    fn reads_while_stalled(&self) -> bool {
        self.stall.why.is_some() && is_only_voter(&self.core) && self.leads_own_term()
    }

    fn leads_own_term(&self) -> bool {
        self.core.is_settled_leader() && self.core.applied_to().1 == self.core.term()
    }

    /// The disk is full, or the state is damaged: another member should lead, where there is one.
    fn stall(&mut self, e: Error) {
        if self.stall.why.is_none() {
            tracing::error!("this metadata server accepts no changes for now: {e}");
        }
        if is_only_voter(&self.core) {
            self.waiters.fail();
        } else {
            self.core.set_stalled(true);
        }
        self.stall.why = Some(e);
    }

    fn unstall(&mut self) {
        if self.stall.why.take().is_some() {
            tracing::info!("this metadata server accepts changes again");
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
                    self.waiters.add(index + i as u64, *term, Waiter::Proposal(p.reply));
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

    /// A member that returns with another log has lost what it acknowledged. A removed member may
    /// not know of its removal yet.
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
                format!("{MAX_PEERS} metadata servers are known; {from} would be one too many"),
            )),
            None => {
                let slot = self.log.reserve()?;
                let op = self.core.note_peer(from, stamp);
                slot.send(Job::of(op));
                Ok(())
            }
        }
    }

    fn step(&mut self, m: Message) {
        if m.get_msg_type() == MessageType::MsgSnapshot {
            let s = m.get_snapshot();
            let needless = self.core.needs_no_copy(s.get_metadata().index, s.get_metadata().term);
            let id = s.data.as_ref().try_into().map(u64::from_le_bytes).ok();
            if !self.copies.has_come(m.from, id, s.get_metadata()) && !needless {
                tracing::warn!(from = m.from, "dropped a raft snapshot whose data did not arrive");
                return;
            }
        }
        self.core.step(m);
    }

    fn event(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Persisted { number, restoring } => {
                if !self.stall.is_blocked() {
                    self.unstall();
                }
                if let Some(n) = number {
                    self.core.persisted(n).into_iter().for_each(|m| self.send(m));
                }
                restoring.into_iter().try_for_each(|id| self.copies.restore_marked(&*self.sm, id))
            }
            Event::Stalled(e) => {
                self.stall(e);
                Ok(())
            }
            Event::Failed(e) => Err(e),
            Event::Synced(index, result) => self.synced(index, result),
            Event::Sent { to, id, result } => {
                if self.copies.sent(to, id) {
                    if let Err(e) = &result {
                        tracing::warn!(to, "copying the state failed and will be tried again: {e}");
                    }
                    self.core.report_snapshot(to, result.is_ok());
                }
                Ok(())
            }
        }
    }

    /// Does everything that the protocol asks for now.
    fn process(&mut self) -> Result<()> {
        self.mind_damage();
        self.notice_role();
        if self.core.can_read()
            && let Some(number) = self.reads.ask()
        {
            self.core.read_index(number, self.env.boot());
        }
        self.shared.lease.set(lease_end(&self.core));
        loop {
            self.try_again()?;
            if self.stall.is_blocked() || self.core.unpersisted() >= MAX_UNPERSISTED {
                break;
            }
            let Some(out) = self.core.ready() else { break };
            self.shared.lease.set(lease_end(&self.core));
            self.output(out)?;
        }
        self.shared.lease.set(lease_end(&self.core));
        self.notice_role();
        self.reads.applied(self.core.applied_to().0);
        if self.reads_while_stalled() {
            self.reads.allow_all();
        }
        self.waiters.answer_changes(|index| self.core.majority_knows(index));
        self.maybe_sync();
        self.publish();
        Ok(())
    }

    fn try_again(&mut self) -> Result<()> {
        if !self.stall.is_blocked() {
            return Ok(());
        }
        if let Some(out) = self.stall.unfinished.take() {
            self.output(out)?;
        }
        if self.stall.unfinished.is_none()
            && let Some(work) = self.stall.backlog.take()
        {
            self.apply(work)?;
        }
        if !self.stall.is_blocked() {
            self.unstall();
        }
        Ok(())
    }

    fn output(&mut self, out: Output) -> Result<()> {
        if let Some((index, term, conf)) = &out.restore {
            match self.finish_restore(*index, *term, conf) {
                // The log must not record the copy as whole before it is.
                Err(e) if e.code == Code::NoSpc => {
                    self.stall(e);
                    self.stall.unfinished = Some(out);
                    return Ok(());
                }
                r => r?,
            }
        }
        if let Some(ops) = out.persist {
            self.log.write(Job { ops, number: Some(out.number), restoring: None })?;
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

    /// Answers callers that wait for a leadership that has ended.
    fn notice_role(&mut self) {
        let now = (self.core.term(), self.core.is_leader());
        if now.1 && now != self.standing.was {
            self.standing.led_since = self.env.boot();
        }
        if self.standing.was.1 && now != self.standing.was {
            self.fail_all(&Error::not_leader(self.core.leader() as u32));
        }
        self.standing.was = now;
    }

    fn fail_all(&mut self, reads: &Error) {
        self.waiters.fail();
        self.reads.fail(reads);
    }

    fn publish(&mut self) {
        let (term, leader) = (self.core.term(), self.core.leader());
        let ready =
            self.leads_own_term() && (self.stall.why.is_none() || is_only_voter(&self.core));
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
        (status.no_state, status.damages) = (self.core.has_lost_state(), self.damage.count);
        status.damage = self.damage.found.as_ref().map(|e| e.message.clone()).unwrap_or_default();
    }
}

fn conf_bytes(conf: &ConfState) -> Result<Vec<u8>> {
    conf.write_to_bytes().map_err(|e| Error::new(Code::Inval, e.to_string()))
}
