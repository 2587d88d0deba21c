//! The pure core under a hostile scheduler: messages lost, doubled and reordered, writes that hang,
//! crashes that lose what was not persisted, cut logs, states found damaged, copies of states and
//! membership changes, all from one seed. Checked all the time: one leader per term, one entry per
//! index for ever, reads never older than what was applied anywhere before.

use std::collections::VecDeque;

use protobuf::Message as _;
use raft::eraftpb::{
    ConfChangeSingle, ConfChangeTransition, ConfChangeType, ConfChangeV2, ConfState,
    Message as RaftMessage, MessageType,
};
use strake_proto::layout::splitmix64;

use super::super::core::Core;
use super::*;

/// What applying gave: entries by index, and the membership.
#[derive(Clone, Default)]
struct State {
    entries: BTreeMap<u64, (u64, Bytes)>,
    conf: Vec<u8>,
}

impl State {
    fn last(&self) -> (u64, u64) {
        self.entries.last_key_value().map_or((0, 0), |(i, (t, _))| (*i, *t))
    }
}

pub(super) struct Sim {
    pub(super) core: Core,
    pub(super) clock: NodeClock,
    durable: LogImage,
    writes: VecDeque<(u64, Vec<LogOp>)>,
    state: State,
    synced: State,
    /// The state cannot take another entry.
    spoilt: bool,
}

/// A member's clock since boot.
#[derive(Clone, Copy)]
pub(super) struct NodeClock {
    pub(super) offset: Duration,
    pub(super) rate: f64,
}

pub(super) struct World {
    rng: u64,
    /// The true time; it stands still unless a test moves it.
    pub(super) now: Duration,
    pub(super) nodes: BTreeMap<u64, Sim>,
    pub(super) flying: Vec<RaftMessage>,
    pub(super) blocked: BTreeSet<(u64, u64)>,
    /// States being copied, by the number in their snapshot message.
    copies: BTreeMap<u64, State>,
    truth: BTreeMap<u64, (u64, Bytes)>,
    leaders: BTreeMap<u64, u64>,
    /// Number of a read → least index it may be allowed at, and whether it was.
    reads: BTreeMap<u64, (u64, bool)>,
    proposals: u64,
    /// Joint steps proposed.
    joint: usize,
    /// States given up for damage: by leaders, by others.
    given_up: [usize; 2],
}

fn config(id: u64) -> Config {
    Config::new(id, CLUSTER, BTreeMap::new())
}

impl World {
    pub(super) fn new(seed: u64) -> World {
        let mut w = World {
            rng: seed,
            now: Duration::ZERO,
            nodes: BTreeMap::new(),
            flying: vec![],
            blocked: BTreeSet::new(),
            copies: BTreeMap::new(),
            truth: BTreeMap::new(),
            leaders: BTreeMap::new(),
            reads: BTreeMap::new(),
            proposals: 0,
            joint: 0,
            given_up: [0; 2],
        };
        for id in 1..=4 {
            let durable = LogImage::new(if id < 4 { vec![1, 2, 3] } else { vec![] }, id);
            let core = Core::new(&config(id), durable.clone(), (0, 0), &[], w.rand()).unwrap();
            let (state, synced) = (State::default(), State::default());
            let clock = NodeClock { offset: Duration::from_secs(100), rate: 1.0 };
            let (writes, spoilt) = (VecDeque::new(), false);
            w.nodes.insert(id, Sim { core, clock, durable, writes, state, synced, spoilt });
        }
        (1..=4).for_each(|id| w.introduce(id));
        w
    }

    /// Tells a member how long the others wait before they vote.
    fn introduce(&mut self, id: u64) {
        let lease = &mut self.node(id).core.lease;
        (1..=4).for_each(|other| lease.note_vote_wait(other, config(other).vote_wait()));
    }

    /// What this member's clock shows.
    pub(super) fn clock(&self, id: u64) -> Duration {
        let c = self.nodes[&id].clock;
        c.offset + self.now.mul_f64(c.rate)
    }

    fn rand(&mut self) -> u64 {
        splitmix64(&mut self.rng)
    }
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.rand() % n.max(1) as u64) as usize
    }
    pub(super) fn anyone(&mut self) -> u64 {
        1 + self.below(4) as u64
    }
    pub(super) fn node(&mut self, id: u64) -> &mut Sim {
        self.nodes.get_mut(&id).unwrap()
    }

    fn act(&mut self) {
        let id = self.anyone();
        match self.below(100) {
            0..50 => self.fly(),
            50..70 => self.tick(id),
            70..84 => self.persist(id),
            84..90 => self.propose(id),
            90..95 => self.read(id),
            95 => self.cut(id),
            96 => match self.below(8) {
                0 | 1 => self.crash(id),
                2..5 => self.damage(id),
                _ => {}
            },
            97 if self.below(4) == 0 => self.block(),
            98 if self.below(4) == 0 => self.change(id),
            99 => self.node(id).core.transfer(id % 3 + 1),
            _ => {}
        }
        self.drain();
    }

    /// As in the driver: a leader without a state lets another member lead.
    pub(super) fn tick(&mut self, id: u64) {
        let to = self.anyone();
        let n = self.node(id);
        n.core.tick();
        if n.core.has_lost_state() && n.core.is_settled_leader() {
            match n.core.matched(to) == Some(n.core.image().last()) {
                true => n.core.step_down(),
                false => n.core.transfer(to),
            }
        }
    }

    pub(super) fn fly(&mut self) {
        if self.flying.is_empty() {
            return;
        }
        // Mostly in order, as one connection delivers; sometimes not.
        let i = if self.below(10) == 0 { self.below(self.flying.len()) } else { 0 };
        let m = self.flying.remove(i);
        let (lost, doubled) = (self.below(20) == 0, self.below(20) == 0);
        if doubled {
            self.flying.push(m.clone());
        }
        if !lost && !self.blocked.contains(&(m.from, m.to)) {
            self.deliver(m);
        } else if m.get_msg_type() == MessageType::MsgSnapshot {
            self.node(m.from).core.report_snapshot(m.to, false);
        }
    }

    fn deliver(&mut self, m: RaftMessage) {
        if m.get_msg_type() == MessageType::MsgSnapshot {
            // The copy arrived before this message, and replaced the state.
            let meta = m.get_snapshot().get_metadata();
            let (index, term, from) = (meta.index, meta.term, m.from);
            let n = self.node(m.to);
            if n.core.leader() == from && n.core.needs_no_copy(index, term) {
                n.core.step(m.clone());
                self.node(from).core.report_snapshot(m.to, true);
                return;
            }
            if !n.core.wants_snapshot(from, index, term) {
                self.node(from).core.report_snapshot(m.to, false);
                return;
            }
            let op = n.core.begin_restore(index, term);
            n.writes.iter().flat_map(|(_, ops)| ops).for_each(|op| n.durable.apply(op).unwrap());
            n.durable.apply(&op).unwrap();
            let mut released = vec![];
            while let Some((number, _)) = n.writes.pop_front() {
                released.extend(n.core.persisted(number));
            }
            (n.state, n.synced) = (State::default(), State::default());
            self.send(released);
            self.node(from).core.report_snapshot(m.to, true);
        }
        self.node(m.to).core.step(m);
    }

    pub(super) fn persist(&mut self, id: u64) {
        let n = self.node(id);
        if let Some((number, ops)) = n.writes.pop_front() {
            ops.iter().for_each(|op| n.durable.apply(op).unwrap());
            let released = n.core.persisted(number);
            self.send(released);
        }
    }

    fn send(&mut self, messages: Vec<RaftMessage>) {
        for mut m in messages {
            if m.get_msg_type() == MessageType::MsgSnapshot {
                let (copy, number) = (self.node(m.from).state.clone(), self.rand());
                let s = m.mut_snapshot();
                s.data = number.to_le_bytes().to_vec().into();
                (s.mut_metadata().index, s.mut_metadata().term) = copy.last();
                if !copy.conf.is_empty() {
                    s.mut_metadata()
                        .set_conf_state(ConfState::parse_from_bytes(&copy.conf).unwrap());
                }
                self.copies.insert(copy.last().0, copy);
            }
            if self.flying.len() < 2000 {
                self.flying.push(m);
            }
        }
    }

    pub(super) fn propose(&mut self, id: u64) {
        self.proposals += 1;
        let first = self.proposals;
        let count = 1 + self.below(3) as u64;
        self.proposals += count;
        let data = (0..count).map(|i| Bytes::from(format!("{id}:{}", first + i)));
        let n = self.node(id);
        if n.core.is_leader() {
            let _ = n.core.propose(data);
        }
    }

    pub(super) fn read(&mut self, id: u64) {
        if !self.nodes[&id].core.can_read() {
            return;
        }
        let number = self.reads.len() as u64;
        let least = self.truth.last_key_value().map_or(0, |(i, _)| *i);
        self.reads.insert(number, (least, false));
        let now = self.clock(id);
        self.node(id).core.read_index(number, now);
    }

    pub(super) fn cut(&mut self, id: u64) {
        let keep = self.below(8) as u64;
        let n = self.node(id);
        if n.core.has_lost_state() {
            return;
        }
        n.synced = n.state.clone();
        let to = n.state.last().0.saturating_sub(keep);
        if let Some(op) = n.core.cut(to) {
            // Rides with the next batch, in order.
            match n.writes.back_mut() {
                Some((_, ops)) => ops.push(op),
                None => n.durable.apply(&op).unwrap(),
            }
        }
    }

    pub(super) fn crash(&mut self, id: u64) {
        let survive = self.below(self.nodes[&id].writes.len() + 1);
        let (lose_state, lose_all, seed) = (self.below(2) == 0, self.below(5) == 0, self.rand());
        // Two lost states of three are more than the group can restore by itself.
        let lose_all = lose_all && (1..=4).all(|other| !self.nodes[&other].core.has_lost_state());
        let n = self.node(id);
        for (_, ops) in n.writes.drain(..).take(survive) {
            ops.iter().for_each(|op| n.durable.apply(op).unwrap());
        }
        if lose_state {
            n.state = n.synced.clone();
        }
        if lose_all && n.durable.base.0 > 0 {
            (n.state, n.synced) = (State::default(), State::default());
        }
        n.spoilt = false;
        let state = &n.state;
        n.core =
            Core::new(&config(id), n.durable.clone(), state.last(), &state.conf, seed).unwrap();
        self.introduce(id);
    }

    /// The state turns out to be damaged: at once, or when the next entry is applied.
    fn damage(&mut self, id: u64) {
        match self.below(2) {
            0 => self.node(id).spoilt = true,
            _ if self.others_have_state(id) => self.lose(id, None),
            _ => {}
        }
    }

    fn others_have_state(&self, id: u64) -> bool {
        let voters = self.nodes[&id].core.conf().voters.clone();
        voters.len() > 2
            && voters.contains(&id)
            && voters.iter().all(|id| !self.nodes[id].core.has_lost_state())
    }

    fn lose(&mut self, id: u64, handed: Option<u64>) {
        let (to, hands_over) = (self.anyone(), self.below(4) > 0);
        let n = self.node(id);
        let led = n.core.is_leader();
        (n.state, n.synced, n.spoilt) = (State::default(), State::default(), false);
        n.core.lose_state(handed);
        assert!(n.core.propose([Bytes::from_static(b"of nobody")]).is_err() && !n.core.can_read());
        if hands_over {
            n.core.transfer(to);
        }
        self.given_up[usize::from(!led)] += 1;
    }

    pub(super) fn block(&mut self) {
        if self.below(3) == 0 {
            return self.blocked.clear();
        }
        let (a, b) = (self.anyone(), self.anyone());
        match self.below(3) {
            0 => self.blocked.extend([(a, b)]),
            1 => self.blocked.extend([(a, b), (b, a)]),
            _ => self.blocked.extend((1..=4).flat_map(|x| [(a, x), (x, a)])),
        }
    }

    pub(super) fn change(&mut self, id: u64) {
        let (any, what, with) = (self.anyone(), self.below(4), self.anyone());
        let id = leader_of(&self.nodes).filter(|_| any != id).unwrap_or(id);
        // Members that wait for it are more likely to be promoted.
        let who = self.nodes[&id]
            .core
            .conf()
            .learners
            .first()
            .copied()
            .filter(|_| what > 1)
            .unwrap_or(any);
        let has_state = !self.nodes[&who].core.has_lost_state();
        let n = self.node(id);
        let voters = n.core.conf().voters.len();
        let is_voter = n.core.conf().voters.contains(&who);
        let kind = match what {
            0 if who != id && (!is_voter || voters > 3) => ConfChangeType::RemoveNode,
            1 if !is_voter => ConfChangeType::AddLearnerNode,
            // Alone, or in the place of a voter: one joint step.
            2 | 3 if n.core.conf().learners.contains(&who) => ConfChangeType::AddNode,
            _ => return,
        };
        if n.core.is_leader() {
            let one = |id, kind| {
                let mut one = ConfChangeSingle { node_id: id, ..Default::default() };
                one.set_change_type(kind);
                one
            };
            let mut change =
                ConfChangeV2 { changes: vec![one(who, kind)].into(), ..Default::default() };
            let ready = has_state && n.core.matched(who).is_some_and(|m| m > 0);
            if what == 3 && ready && with != id && n.core.conf().voters.contains(&with) {
                change.mut_changes().push(one(with, ConfChangeType::RemoveNode));
                change.set_transition(ConfChangeTransition::Implicit);
            }
            let proposed = n.core.propose_change(&change).is_ok();
            self.joint += usize::from(proposed && change.changes.len() > 1);
        }
    }

    pub(super) fn drain(&mut self) {
        for id in 1..=4 {
            while let Some(out) = self.node(id).core.ready() {
                if let Some((index, _, conf)) = out.restore {
                    let mut copy = self.copies[&index].clone();
                    copy.conf = conf.write_to_bytes().unwrap();
                    let n = self.node(id);
                    n.synced = copy.clone();
                    n.state = copy;
                }
                if let Some(ops) = out.persist {
                    self.node(id).writes.push_back((out.number, ops));
                }
                for (number, index) in out.reads {
                    let (least, done) = self.reads.get_mut(&number).unwrap();
                    assert!(
                        index >= *least,
                        "read {number} is allowed at {index}, {least} was applied before it"
                    );
                    *done = true;
                }
                self.apply(id, &out.committed, out.conf_state);
                self.send(out.messages);
            }
            let core = &self.nodes[&id].core;
            if core.is_leader() {
                assert_eq!(
                    *self.leaders.entry(core.term()).or_insert(id),
                    id,
                    "two leaders in term {}",
                    core.term()
                );
            }
        }
    }

    fn apply(&mut self, id: u64, committed: &[raft::eraftpb::Entry], conf: Option<ConfState>) {
        if self.nodes[&id].spoilt && !committed.is_empty() && self.others_have_state(id) {
            return self.lose(id, committed.last().map(|e| e.index));
        }
        let n = self.nodes.get_mut(&id).unwrap();
        for e in committed {
            assert!(!n.core.has_lost_state(), "member {id} applies without a state");
            assert_eq!(e.index, n.state.last().0 + 1, "member {id} applies in order");
            let now = (e.term, e.data.clone());
            let known = self.truth.entry(e.index).or_insert_with(|| now.clone());
            assert_eq!(*known, now, "member {id} has another entry {}", e.index);
            assert!(
                n.durable.term(e.index) == Some(e.term) || e.index <= n.durable.base.0,
                "member {id} applies entry {} before it is durable in its own log",
                e.index
            );
            n.state.entries.insert(e.index, now);
        }
        if let Some(c) = conf {
            n.state.conf = c.write_to_bytes().unwrap();
        }
        if let Some(e) = committed.last() {
            n.core.applied(e.index, e.term);
        }
    }

    /// Everything works again: all members must reach the same state, with something new in it.
    fn settle(&mut self) {
        self.blocked.clear();
        let mut goal = None;
        for round in 0..4000 {
            for id in 1..=4 {
                self.tick(id);
                self.drain();
            }
            for _ in 0..50 {
                while !self.flying.is_empty() {
                    let m = self.flying.remove(0);
                    self.deliver(m);
                    self.drain();
                }
                for id in 1..=4 {
                    self.persist(id);
                    self.drain();
                }
            }
            let leader =
                self.nodes.values().find(|n| n.core.can_read() && n.core.is_settled_leader());
            if let (None, Some(l), true) = (goal, leader, round > 50) {
                let id =
                    l.core.conf().voters.iter().copied().find(|v| self.nodes[v].core.is_leader());
                if let Some(id) = id {
                    goal = self.node(id).core.propose([Bytes::from_static(b"goal")]).ok();
                }
            }
            if let (Some((index, term)), Some(l)) = (goal, leader_of(&self.nodes)) {
                let conf = self.nodes[&l].core.conf();
                let members: Vec<u64> = conf.voters.iter().chain(&conf.learners).copied().collect();
                if self.truth.get(&index).is_some_and(|(t, _)| *t != term) {
                    goal = None;
                } else if members.iter().all(|m| self.nodes[m].state.last().0 >= index) {
                    return;
                }
            }
        }
        let report: Vec<String> = self
            .nodes
            .iter()
            .map(|(id, n)| {
                let c = &n.core;
                let flags = (c.is_leader(), c.has_lost_state(), c.unpersisted());
                format!(
                    "{id}: term {} leader {} {flags:?} applied {:?} conf {:?}",
                    c.term(),
                    c.leader(),
                    n.state.last(),
                    c.conf()
                )
            })
            .collect();
        panic!("the members do not settle (goal {goal:?}): {report:#?}");
    }
}

fn leader_of(nodes: &BTreeMap<u64, Sim>) -> Option<u64> {
    nodes
        .iter()
        .filter(|(_, n)| n.core.is_leader())
        .max_by_key(|(_, n)| n.core.term())
        .map(|(id, _)| *id)
}

fn run(seed: u64, steps: usize) -> (u64, usize, usize, [usize; 2], String) {
    let mut w = World::new(seed);
    for _ in 0..steps {
        w.act();
    }
    w.settle();
    let trace =
        format!("{:?}", w.truth.iter().map(|(i, (t, d))| (*i, *t, d.clone())).collect::<Vec<_>>());
    (
        w.truth.len() as u64,
        w.reads.values().filter(|(_, done)| *done).count(),
        w.joint,
        w.given_up,
        trace,
    )
}

#[test]
fn members_agree_whatever_the_schedule() {
    let seeds = std::env::var("STRAKE_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(200);
    let from = std::env::var("STRAKE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    let (mut entries, mut reads, mut joint, mut given_up) = (0, 0, 0, [0; 2]);
    for seed in from..from + seeds {
        let ran = std::panic::catch_unwind(|| run(seed, 5000));
        let (e, r, j, g, _) = ran.unwrap_or_else(|_| panic!("seed {seed} fails"));
        entries += e;
        reads += r;
        joint += j;
        given_up = [given_up[0] + g[0], given_up[1] + g[1]];
    }
    let enough = entries > seeds * 20
        && reads as u64 > seeds
        && joint > 0
        && given_up.iter().all(|n| *n as u64 > seeds / 2);
    assert!(
        enough,
        "too little happened: {entries} entries, {reads} reads, {joint} joint steps, states given up by leaders and others: {given_up:?}"
    );
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..5 {
        assert_eq!(run(seed, 3000), run(seed, 3000));
    }
}

impl World {
    /// One tick of these members, at the same moment; then whatever they say to each other arrives.
    fn beat(&mut self, ids: &[u64]) {
        ids.iter().for_each(|id| self.node(*id).core.tick());
        self.drain();
        while !self.flying.is_empty() || ids.iter().any(|id| !self.nodes[id].writes.is_empty()) {
            for m in std::mem::take(&mut self.flying) {
                if ids.contains(&m.from) && ids.contains(&m.to) {
                    self.deliver(m);
                }
            }
            self.drain();
            ids.iter().for_each(|id| self.persist(*id));
            self.drain();
        }
    }
}

/// The leader dies, and both others ask for votes in the same moment: neither has the other's.
#[test]
fn a_tied_election_is_repeated_soon() {
    let half = config(1).election_ticks.1 / 2;
    let (mut ties, mut again) = (0, 0);
    for seed in 0..300 {
        let mut w = World::new(seed);
        while leader_of(&w.nodes).is_none() {
            w.beat(&[1, 2, 3]);
        }
        w.beat(&[1, 2, 3]);
        let dead = leader_of(&w.nodes).unwrap();
        let term = w.nodes[&dead].core.term();
        w.nodes.get_mut(&dead).unwrap().core.step_down();
        let rest: Vec<u64> = (1..=3).filter(|id| *id != dead).collect();
        while rest.iter().all(|id| w.nodes[id].core.term() == term) {
            w.beat(&rest);
        }
        if leader_of(&w.nodes).is_some() {
            continue;
        }
        ties += 1;
        let ticks = (1..100).find(|_| {
            w.beat(&rest);
            leader_of(&w.nodes).is_some()
                || rest.iter().any(|id| w.nodes[id].core.term() > term + 1)
        });
        assert!(ticks.is_some_and(|n| n < half), "seed {seed}: asked again after {ticks:?} ticks");
        again += usize::from(leader_of(&w.nodes).is_none());
    }
    assert!(ties > 10 && again * 3 < ties, "{ties} ties, {again} tied again");
}

impl World {
    /// A message that a broken peer could send: any kind, numbers near or far from what makes
    /// sense.
    fn nonsense(&mut self, to: u64) -> RaftMessage {
        use protobuf::ProtobufEnum as _;
        let (term, last) = (self.nodes[&to].core.term(), self.nodes[&to].core.image().last());
        let mut near = |base: u64| match splitmix64(&mut self.rng) % 12 {
            0 => 0,
            1 => u64::MAX,
            n => base.saturating_add(n).saturating_sub(6),
        };
        let kinds = MessageType::values();
        let kind = kinds[near(7) as usize % kinds.len()];
        let mut m = RaftMessage { to, from: near(8) % 6, term: near(term), ..Default::default() };
        m.set_msg_type(kind);
        (m.log_term, m.index, m.commit, m.commit_term) =
            (near(term), near(last), near(last), near(term));
        (m.reject, m.reject_hint, m.request_snapshot) =
            (near(6) % 2 == 0, near(last), near(last) * (near(6) % 2));
        let mut at = m.index;
        for _ in 0..near(6) % 4 {
            at = if near(6) > 1 { at.wrapping_add(1) } else { near(last) };
            let e =
                raft::eraftpb::Entry { index: at, term: near(m.log_term), ..Default::default() };
            m.mut_entries().push(e);
        }
        if kind == MessageType::MsgSnapshot {
            let meta = m.mut_snapshot().mut_metadata();
            (meta.index, meta.term) = (near(last), near(term));
            meta.set_conf_state(ConfState {
                voters: vec![near(7) % 5, near(7) % 5],
                ..Default::default()
            });
        }
        m
    }
}

/// Asserts only that members survive a lying peer, not what they agree on.
#[test]
fn no_message_brings_a_member_down() {
    let (mut taken, mut all) = (0, 0);
    let seeds = std::env::var("STRAKE_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    for seed in 0..seeds {
        let mut w = World::new(seed);
        for _ in 0..500 {
            w.act();
        }
        let id = 1 + seed % 3;
        for _ in 0..400 {
            let m = w.nonsense(id);
            let what = format!("seed {seed}, member {id}: {m:?}");
            let n = w.nodes.get_mut(&id).unwrap();
            (all, taken) = (all + 1, taken + usize::from(check_passes(n, &m)));
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                n.core.step(m);
                n.core.tick();
                while let Some(out) = n.core.ready() {
                    if let Some(e) = out.committed.last() {
                        n.core.applied(e.index, e.term);
                    }
                    if out.persist.is_some() {
                        n.core.persisted(out.number);
                    }
                }
            }));
            assert!(ran.is_ok(), "{what}");
        }
    }
    assert!(taken * 20 > all, "{taken} of {all} got past the checks");
}

fn check_passes(n: &Sim, m: &RaftMessage) -> bool {
    n.core.refuses(m).is_none()
}
