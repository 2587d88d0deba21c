//! The leader's lease under clocks that drift: while one member holds a lease, no other leads in a
//! later term. And what reads cost under it.

use super::super::{core::Core, leader_lease::lease_end};
use super::shuffle::World;
use super::*;

/// A world in which time passes.
struct Timed {
    w: World,
    /// When each member's next tick is due, by its own clock.
    due: BTreeMap<u64, Duration>,
    /// How often a lease was seen, and how often another term began right after one.
    leased: usize,
    terms: BTreeSet<u64>,
}

impl Timed {
    /// `drift`: how far a clock's rate may be from 1.
    fn new(seed: u64, drift: f64) -> Timed {
        let mut w = World::new(seed);
        for id in 1..=4 {
            let part = w.below(2001) as f64 / 1000.0 - 1.0;
            // Often one that is as slow as can be, and others that are as fast.
            let part = if w.below(2) == 0 { part.signum() } else { part };
            w.node(id).clock.rate = 1.0 + drift * part;
        }
        Timed { w, due: BTreeMap::new(), leased: 0, terms: BTreeSet::new() }
    }

    fn act(&mut self) {
        let w = &mut self.w;
        let passed = Duration::from_micros(w.below(4000) as u64);
        w.now += passed;
        let id = w.anyone();
        match w.below(1000) {
            0..40 => w.propose(id),
            40..140 => w.read(id),
            140 => w.cut(id),
            141..143 => {
                w.crash(id);
                // A new process ticks at once.
                self.due.remove(&id);
            }
            143..149 => w.block(),
            149 => w.change(id),
            150..152 => w.node(id).core.transfer(id % 3 + 1),
            _ => {}
        }
        for id in 1..=4 {
            let now = self.w.clock(id);
            // Now and then a member is held up.
            if now >= self.due.get(&id).copied().unwrap_or_default() && self.w.below(4) > 0 {
                self.w.tick(id);
                self.due.insert(id, now + Config::new(1, CLUSTER, BTreeMap::new()).tick);
            }
            self.w.persist(id);
            self.w.drain();
        }
        for _ in 0..self.w.below(12) {
            self.w.fly();
            self.w.drain();
        }
    }

    /// Two members of which one holds a lease while the other leads in a later term.
    fn broken(&mut self) -> Option<String> {
        for (id, n) in &self.w.nodes {
            let (now, end) = (self.w.clock(*id), lease_end(&n.core));
            if now >= end {
                continue;
            }
            self.leased += 1;
            self.terms.insert(n.core.term());
            let later = |o: &Core| o.is_leader() && o.term() > n.core.term();
            if let Some((other, o)) = self.w.nodes.iter().find(|(_, o)| later(&o.core)) {
                return Some(format!(
                    "{id} has a lease in term {} for {:?} more, and {other} leads in term {}",
                    n.core.term(),
                    end - now,
                    o.core.term()
                ));
            }
        }
        None
    }
}

/// Runs seeds; returns how often a lease was seen, in how many terms, and the first that breaks.
fn run(from: u64, seeds: u64, drift: f64) -> (usize, usize, Option<String>) {
    let (mut leased, mut terms) = (0, 0);
    for seed in from..from + seeds {
        let mut t = Timed::new(seed, drift);
        for _ in 0..4000 {
            t.act();
            if let Some(why) = t.broken() {
                return (leased, terms, Some(format!("seed {seed}: {why}")));
            }
        }
        (leased, terms) = (leased + t.leased, terms + t.terms.len());
    }
    (leased, terms, None)
}

#[test]
fn while_a_lease_lasts_nobody_else_leads() {
    let number = |key: &str, default| {
        std::env::var(key).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
    };
    let seeds = number("STRAKE_SEEDS", 150);
    let (leased, terms, broken) = run(number("STRAKE_SEED", 0), seeds, 0.1);
    assert_eq!(broken, None);
    let enough = leased as u64 > seeds * 300 && terms as u64 > seeds * 3;
    assert!(enough, "too little happened: {leased} looks at a lease in {terms} terms");
}

/// The check above can fail.
#[test]
fn clocks_that_drift_by_half_let_two_lead() {
    let (_, _, broken) = run(0, 400, 0.5);
    assert!(broken.is_some(), "no seed found it");
}

fn calls(c: &Cluster) -> usize {
    c.net.calls.load(std::sync::atomic::Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn reads_under_a_lease_cost_no_message_and_no_time() {
    let c = Cluster::new(3, 21, |_| {}).await;
    c.put("a", "1").await;
    let leader = c.leader().await;
    c.node(leader).read_barrier().await.unwrap();
    let (at, before) = (tokio::time::Instant::now(), calls(&c));
    for _ in 0..10_000 {
        c.node(leader).read_barrier().await.unwrap();
    }
    assert_eq!((at.elapsed(), calls(&c) - before), (Duration::ZERO, 0));
    // Read after read for ten seconds: no more messages than an idle group sends for heartbeats,
    // and eight rounds a second.
    let quorum = calls(&c);
    for _ in 0..10_000 {
        c.node(leader).read_barrier().await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let with_reads = calls(&c) - quorum;
    let idle = calls(&c);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let idle = calls(&c) - idle;
    println!("10 s: {idle} batches when idle, {with_reads} with 10,000 reads");
    assert!(with_reads < idle + 2 * 2 * 90, "{with_reads} batches with reads, {idle} without");
}

#[tokio::test(start_paused = true)]
async fn without_leases_each_group_of_reads_asks_the_others() {
    let c = Cluster::new(3, 21, |cfg| cfg.lease_reads = false).await;
    c.put("a", "1").await;
    let leader = c.leader().await;
    for _ in 0..100 {
        let before = calls(&c);
        c.node(leader).read_barrier().await.unwrap();
        assert!(calls(&c) > before);
    }
}

/// The leader is cut off from the others: it answers until its lease ends, and only then can
/// another one lead.
#[tokio::test(start_paused = true)]
async fn a_leader_cut_off_answers_until_its_lease_ends() {
    for seed in 30..60 {
        let c = Cluster::new(3, seed, |_| {}).await;
        c.put("a", "1").await;
        let old = c.leader().await;
        c.node(old).read_barrier().await.unwrap();
        c.net.cut_off.lock().insert(old as u32);
        let (others, mut last) =
            ((1..=3).filter(|id| *id != old).map(|id| c.node(id)).collect::<Vec<_>>(), None);
        let at = tokio::time::Instant::now();
        let leads = |n: &&Node| n.status().state == "leader";
        while !others.iter().any(leads) {
            assert!(at.elapsed() < Duration::from_secs(5), "nobody leads");
            let read = c.node(old).read_barrier();
            if let Ok(Ok(())) = tokio::time::timeout(Duration::from_millis(1), read).await {
                last = Some(at.elapsed());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let last = last.expect("the lease covers the first read");
        assert!(last >= Duration::from_millis(200), "seed {seed}: {last:?}");
        assert!(last + Duration::from_millis(50) < at.elapsed(), "seed {seed}: {last:?}");
        let e = tokio::time::timeout(Duration::from_secs(5), c.node(old).read_barrier()).await;
        assert_eq!(e.unwrap().unwrap_err().code, Code::NotLeader);
    }
}

#[tokio::test(start_paused = true)]
async fn a_transfer_that_fails_leaves_no_lease_in_its_term() {
    let c = Cluster::new(3, 41, |_| {}).await;
    c.put("a", "1").await;
    let leader = c.leader().await;
    c.node(leader).read_barrier().await.unwrap();
    let term = c.node(leader).leadership().borrow().term;
    let to = leader % 3 + 1;
    c.net.cut_off.lock().insert(to as u32);
    // A short while after the last batch it still counts as up.
    let _ = c.node(leader).transfer(to).await;
    within("the end of the transfer", || c.node(leader).leadership().borrow().ready.then_some(()))
        .await;
    assert_eq!(c.node(leader).leadership().borrow().term, term, "it leads on");
    for _ in 0..20 {
        c.node(leader).read_barrier().await.unwrap();
        let before = calls(&c);
        c.node(leader).read_barrier().await.unwrap();
        assert!(calls(&c) > before, "answered without asking");
    }
}
