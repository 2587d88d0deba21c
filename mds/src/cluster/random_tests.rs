//! Random histories of storage servers that come, go and are cut off: all membership rules.

use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

use super::*;

/// One storage server as the random test sees it.
#[derive(Clone, Default)]
struct Oss {
    up: bool,
    cut: bool,
    stamp: u64,
    map_version: u64,
    /// The map it acts on says it is SERVING in these chains.
    serves: BTreeSet<ChainId>,
    lease_until: Duration,
    failed: bool,
    /// Heartbeats sent.
    number: u64,
}

/// An answer to a heartbeat on its way.
struct Answer {
    arrives: Duration,
    node: u32,
    /// Boot id and number of the heartbeat.
    to: (u64, u64),
    /// Zero: the lease must be given up.
    until: Duration,
    map_version: u64,
}

struct World {
    rng: StdRng,
    now: Duration,
    map: MapView,
    history: BTreeMap<u64, pb::ClusterMap>,
    m: Manager,
    oss: Vec<Oss>,
    /// Heartbeats on their way: sent at, arrives at, what.
    sent: Vec<(Duration, Duration, pb::HeartbeatRequest)>,
    answers: Vec<Answer>,
    /// Pairs of servers that cannot reach each other.
    unlinked: BTreeSet<(usize, usize)>,
    proposals: Vec<(Duration, pb::MapUpdate, u64)>,
    term: u64,
    /// Per chain: targets that hold everything that was acknowledged.
    holds: BTreeMap<ChainId, BTreeSet<TargetId>>,
    rounds: [usize; 5],
}

impl World {
    fn new(seed: u64) -> World {
        let map = MapView::new(with_chains(4, 1)).unwrap();
        let m = Manager::new(options(0), ms(0), &map);
        let oss = map
            .map
            .targets
            .iter()
            .map(|t| Oss { up: true, stamp: t.stamp, ..Oss::default() })
            .collect();
        let holds = map.map.chains.iter().map(|c| (c.id, c.serving().collect())).collect();
        let history = BTreeMap::from([(map.version(), map.map.clone())]);
        World {
            rng: StdRng::seed_from_u64(seed),
            now: ms(0),
            map,
            history,
            m,
            oss,
            sent: vec![],
            answers: vec![],
            unlinked: BTreeSet::new(),
            proposals: vec![],
            term: 1,
            holds,
            rounds: [0; 5],
        }
    }

    fn adopt(&mut self, next: pb::ClusterMap) {
        for (old, new) in self.map.map.chains.iter().zip(&next.chains) {
            if old == new {
                continue;
            }
            let serving: BTreeSet<TargetId> = new.serving().collect();
            let holds = self.holds.get_mut(&new.id).unwrap();
            assert!(
                serving.is_subset(holds),
                "chain {}: {serving:?} serve, {holds:?} hold all",
                new.id
            );
            let last: BTreeSet<TargetId> = new
                .replicas
                .iter()
                .filter(|r| r.state() == ReplicaLastsrv)
                .map(|r| r.target)
                .collect();
            assert!(
                last.is_subset(holds),
                "chain {}: {last:?} are not of the last in-sync set",
                new.id
            );
            if old.head().is_none() {
                assert!(serving.len() <= 1, "two sources");
                self.rounds[1] += serving.len();
            }
            // From here on acknowledged writes are on the SERVING ones only.
            if !serving.is_empty() {
                *holds = serving;
            }
        }
        self.map = MapView::new(next).unwrap();
        self.history.insert(self.map.version(), self.map.map.clone());
        self.m.map_changed(self.now, &self.map);
    }

    fn report(&mut self, i: usize) -> pb::HeartbeatRequest {
        let (o, id) = (&self.oss[i], i as u32);
        let mut report =
            pb::TargetReport { target: id, stamp: o.stamp, failed: o.failed, ..Default::default() };
        if let Some(known) = self.history.get(&o.map_version) {
            for c in &known.chains {
                let syncing = c.replicas.iter().find(|r| r.state() == ReplicaSyncing);
                let Some(syncing) = syncing.filter(|_| c.tail() == Some(id)) else { continue };
                // It was resynced, if it is still the process that was made SYNCING.
                let s = &self.oss[syncing.target as usize];
                if s.up && !s.cut && s.map_version >= o.map_version && self.rng.random_ratio(1, 4) {
                    report.synced_chains.push(c.id);
                    if self.map.chain(c.id).unwrap().epoch == c.epoch {
                        self.holds.get_mut(&c.id).unwrap().insert(syncing.target);
                    }
                }
            }
        }
        pb::HeartbeatRequest {
            node: 1001 + id,
            map_version: o.map_version,
            targets: vec![report],
            unreachable: self
                .unlinked
                .iter()
                .filter_map(|(a, b)| (*a == i).then_some(1001 + *b as u32))
                .collect(),
            leaseless: o.lease_until <= self.now,
            number: o.number,
            ..Default::default()
        }
    }

    fn know(&mut self, i: usize, version: u64) {
        if version > self.oss[i].map_version {
            let map = &self.history[&version];
            let serves = map.chains.iter().filter(|c| c.state_of(i as u32) == Some(ReplicaServing));
            self.oss[i].serves = serves.map(|c| c.id).collect();
            self.oss[i].map_version = version;
        }
    }

    fn start(&mut self, i: usize) {
        let mut r = request(&format!("n{i}"), &[i as u8]);
        r.targets[0].stamp = self.rng.next_u64();
        self.oss[i] = Oss { up: true, stamp: r.targets[0].stamp, ..Oss::default() };
        // Its former process may have been resynced; this one may have lost what was not flushed
        // and is behind.
        let id = i as u32;
        for c in self.map.map.chains.clone() {
            if c.serving().any(|t| t != id) || c.state_of(id) == Some(ReplicaSyncing) {
                self.holds.get_mut(&c.id).unwrap().remove(&id);
            }
        }
        let mut map = self.map.map.clone();
        state::register(&mut map, &r).unwrap();
        self.adopt(map);
        self.know(i, self.map.version());
    }

    fn step(&mut self) {
        self.now += ms(50);
        let now = self.now;
        for i in 0..self.oss.len() {
            match self.rng.random_range(0..1200) {
                0..8 => self.oss[i].up = false,
                8..16 => self.oss[i].cut = !self.oss[i].cut,
                16..18 => self.oss[i].failed = true,
                60..62 => {
                    let other = (i + self.rng.random_range(1..self.oss.len())) % self.oss.len();
                    if !self.unlinked.remove(&(i, other)) {
                        self.unlinked.insert((i, other));
                    }
                }
                18..60 if !self.oss[i].up || self.oss[i].failed => self.start(i),
                _ => (),
            }
            if self.oss[i].up && !self.oss[i].cut && self.rng.random_ratio(1, 5) {
                self.oss[i].number += 1;
                // Few arrive very late; no sender waits for their answers any more.
                let late = if self.rng.random_ratio(1, 50) { 15_000 } else { 100 };
                let arrives = now + ms(self.rng.random_range(0..late));
                let h = self.report(i);
                self.sent.push((now, arrives, h));
            }
        }
        self.talk();
        self.lead();
        self.check();
    }

    /// Heartbeats arrive, and answers to them, of which each counts only until the next is sent.
    fn talk(&mut self) {
        let now = self.now;
        for (at, arrives, h) in std::mem::take(&mut self.sent) {
            if arrives > now {
                self.sent.push((at, arrives, h));
                continue;
            }
            if self.m.heartbeat(now, &h, &self.map).is_err() {
                continue;
            }
            if let Ok(lease) = self.m.grant(now, h.node, &self.map) {
                self.rounds[if lease > 0 { 2 } else { 4 }] += 1;
                let arrives = now + ms(self.rng.random_range(0..100));
                let until = if lease > 0 { at + LEASE } else { ms(0) };
                let (to, map_version) = ((h.targets[0].stamp, h.number), self.map.version());
                self.answers.push(Answer { arrives, node: h.node, to, until, map_version });
            }
        }
        for a in std::mem::take(&mut self.answers) {
            let i = (a.node - 1001) as usize;
            if a.arrives > now {
                self.answers.push(a);
            } else if self.oss[i].up
                && (self.oss[i].stamp, self.oss[i].number) == a.to
                && !self.oss[i].cut
            {
                self.know(i, a.map_version);
                let o = &mut self.oss[i];
                o.lease_until =
                    if a.until.is_zero() { a.until } else { o.lease_until.max(a.until) };
            }
        }
    }

    fn lead(&mut self) {
        let now = self.now;
        if let Some(p) = self.m.tick(now, &self.map) {
            self.rounds[0] += 1;
            let at = now + ms(self.rng.random_range(0..400));
            self.proposals.push((at, p.update, self.term));
        }
        for (at, u, term) in std::mem::take(&mut self.proposals) {
            if at > now {
                self.proposals.push((at, u, term));
                continue;
            }
            let mut map = self.map.map.clone();
            match state::update(&mut map, &u) {
                Ok(()) => self.adopt(map),
                Err(e) => assert_eq!(e.code, Code::Busy, "{e}"),
            }
            if term == self.term {
                self.m.resolved(true);
            }
        }
        if self.rng.random_ratio(1, 300) {
            // A new leader: what the old one proposed is applied before it is ready, or never.
            self.rounds[3] += 1;
            self.term += 1;
            for (_, u, _) in std::mem::take(&mut self.proposals) {
                let mut map = self.map.map.clone();
                if self.rng.random() && state::update(&mut map, &u).is_ok() {
                    self.adopt(map);
                }
            }
            self.m = Manager::new(options(0), now, &self.map);
        }
    }

    /// No server that might serve old bytes has a lease.
    fn check(&self) {
        for (i, o) in self.oss.iter().enumerate().filter(|(_, o)| o.up && o.lease_until > self.now)
        {
            for c in &o.serves {
                let state = self.map.chain(*c).unwrap().state_of(i as u32);
                let ok = o.failed || matches!(state, Some(ReplicaServing | ReplicaLastsrv));
                assert!(ok, "target {i} answers reads of chain {c} and is {state:?}");
            }
        }
    }
}

#[test]
fn random_histories_keep_the_invariants() {
    let mut total = [0; 5];
    for seed in 0..60 {
        let mut w = World::new(seed);
        for _ in 0..2500 {
            w.step();
        }
        // When faults end, everything serves again.
        for i in 0..w.oss.len() {
            w.start(i);
        }
        let done =
            |w: &World| w.map.map.chains.iter().all(|c| c.serving().count() == c.replicas.len());
        let mut left = 4000;
        while !done(&w) && left > 0 {
            w.unlinked.clear();
            for o in &mut w.oss {
                (o.up, o.cut) = (true, false);
            }
            for i in 0..w.oss.len() {
                if w.oss[i].failed {
                    w.start(i);
                }
            }
            w.step();
            left -= 1;
        }
        assert!(left > 0, "seed {seed}: not all chains recovered: {:?}", w.map.map.chains);
        for (t, r) in total.iter_mut().zip(w.rounds) {
            *t += r;
        }
    }
    assert!(total.iter().all(|t| *t > 100), "the histories reach little: {total:?}");
}
