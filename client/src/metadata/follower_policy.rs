//! Which reads go to followers, and to which follower: the state. See `followers.rs`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_fabric::{Connection, Endpoint};
use strake_proto::{Ino, pb};
use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use crate::config::FollowerReads;
use pb::op::Op;

/// How long a follower that failed is not asked.
const LEFT_ALONE: Duration = Duration::from_secs(2);
/// After this many lists in a row that only the leader could answer, a follower is not asked for a
/// while either.
const MOST_MISSES: u32 = 8;
/// How long a hint about an inode is valid.
const HINT: Duration = Duration::from_secs(1);
/// Most hints that are remembered. Lists that name more than [`FEW`] inodes leave no hints.
const MOST_HINTS: usize = 4096;
const FEW: usize = 16;
/// A list of this many operations is not worth its leases.
const MANY_OPS: usize = 256;
/// Nor is the rest of a directory listing after this many entries: a quarter of the leases that a
/// session may have.
const LARGE: usize = 16_384;
/// Most listings that are counted.
const MOST_LISTINGS: usize = 256;

/// What is known of inodes and servers. Pure: times come from outside.
#[derive(Default)]
pub(super) struct Policy {
    /// Per inode: until when the hint is valid, and whether a follower should be asked.
    hints: BTreeMap<Ino, (Instant, bool)>,
    /// Number of entries received from a directory since its listing began.
    listed: BTreeMap<Ino, usize>,
    left_alone: BTreeMap<Endpoint, Instant>,
    pub misses: u32,
}

impl Policy {
    /// Whether a read-only list should be sent to a follower.
    pub fn wants(&self, now: Instant, mode: FollowerReads, ops: &[pb::Op]) -> bool {
        let hint = |ino| {
            self.hints.get(&ino).filter(|(until, _)| now < *until).map(|(_, follower)| *follower)
        };
        let few = ops.len() <= FEW;
        match mode {
            FollowerReads::Never => false,
            _ if few && ops.iter().any(|o| hint(named(o)) == Some(false)) => false,
            FollowerReads::Always => true,
            FollowerReads::Auto => {
                ops.len() >= MANY_OPS
                    || few && ops.iter().any(|o| hint(named(o)) == Some(true) || self.goes_on(o))
            }
        }
    }

    /// Whether this is a later part of a large listing.
    fn goes_on(&self, op: &pb::Op) -> bool {
        let Some(Op::Readdir(o)) = &op.op else { return false };
        o.cookie != 0 && self.listed.get(&o.dir).is_some_and(|n| *n >= LARGE)
    }

    pub fn hint(
        &mut self,
        now: Instant,
        ops: &[pb::Op],
        follower: bool,
        which: impl Fn(Ino) -> bool,
    ) {
        if ops.len() > FEW {
            return;
        }
        for ino in ops.iter().map(named).filter(|ino| *ino != 0 && which(*ino)) {
            // What a follower could not answer stays with the leader until the hint expires.
            let sent_back =
                self.hints.get(&ino).is_some_and(|(until, follower)| now < *until && !follower);
            if !(follower && sent_back) {
                self.hints.insert(ino, (now + HINT, follower));
            }
        }
        if self.hints.len() > MOST_HINTS {
            self.hints.retain(|_, (until, _)| now < *until);
        }
        if self.hints.len() > MOST_HINTS {
            self.hints.clear();
        }
    }

    /// A list was answered, by the leader or a follower.
    pub fn answered(&mut self, ops: &[pb::Op], results: &[pb::OpResult]) {
        for (op, r) in ops.iter().zip(results) {
            let Some(Op::Readdir(o)) = &op.op else { continue };
            let before =
                if o.cookie == 0 { 0 } else { self.listed.get(&o.dir).copied().unwrap_or(0) };
            self.listed.remove(&o.dir);
            if !r.end && o.dir != 0 && self.listed.len() < MOST_LISTINGS {
                self.listed.insert(o.dir, before + r.entries.len());
            }
        }
        if self.listed.len() >= MOST_LISTINGS {
            // Most of these listings were abandoned.
            self.listed.clear();
        }
    }

    /// The server to ask: the next one in this client's order that is not left alone.
    pub fn whom(
        &self,
        now: Instant,
        all: &[Endpoint],
        leader: Option<&Endpoint>,
        turn: u64,
    ) -> Option<Endpoint> {
        let followers: Vec<&Endpoint> = all.iter().filter(|e| Some(*e) != leader).collect();
        let first = (turn % followers.len().max(1) as u64) as usize;
        let mut in_turn = followers.iter().cycle().skip(first).take(followers.len());
        in_turn
            .find(|e| self.left_alone.get(**e).is_none_or(|until| *until <= now))
            .map(|e| (*e).clone())
    }

    /// The follower failed (`miss`: it answered that only the leader can answer this).
    pub fn failed(&mut self, now: Instant, at: &Endpoint, miss: bool) {
        self.misses += 1;
        if !miss || self.misses >= MOST_MISSES {
            self.misses = 0;
            self.left_alone.retain(|_, until| now < *until);
            self.left_alone.insert(at.clone(), now + LEFT_ALONE);
        }
    }
}

/// The inode that an operation names, if it can be leased; 0: none.
fn named(op: &pb::Op) -> Ino {
    match &op.op {
        Some(Op::Lookup(o)) => o.parent,
        Some(Op::Getattr(o)) => o.ino,
        Some(Op::Readdir(o)) => o.dir,
        Some(Op::Readlink(o)) => o.ino,
        Some(Op::Getxattr(o)) => o.ino,
        Some(Op::Listxattr(o)) => o.ino,
        Some(Op::Access(o)) => o.ino,
        _ => 0,
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Followers {
    pub(super) policy: Mutex<Policy>,
    /// The connection to the follower that was asked last.
    pub(super) link: AsyncMutex<Option<(Endpoint, Arc<dyn Connection>)>>,
    /// The last known address of the leader.
    pub(super) leader: Mutex<Option<Endpoint>>,
}

impl Followers {
    pub fn leader_is(&self, at: &Endpoint) {
        *self.leader.lock() = Some(at.clone());
    }

    /// The leader has answered a read-only list: followers can answer as well for inodes on which
    /// it grants no lease.
    pub fn told_by_leader(&self, ops: &[pb::Op], reply: &pb::MetaReply) {
        let mut policy = self.policy.lock();
        policy.hint(Instant::now(), ops, true, |ino| !reply.granted.contains(&ino));
        policy.answered(ops, &reply.results);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(op: Op) -> pb::Op {
        pb::Op { op: Some(op) }
    }
    fn stat(ino: Ino) -> pb::Op {
        op(Op::Getattr(pb::GetAttr { ino }))
    }
    fn list(dir: Ino, cookie: u64) -> pb::Op {
        op(Op::Readdir(pb::Readdir { dir, cookie, limit: 1000, attrs: true }))
    }
    fn page(n: usize, end: bool) -> pb::OpResult {
        pb::OpResult { entries: vec![pb::DirEntry::default(); n], end, ..Default::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_leased_goes_to_followers() {
        use FollowerReads::{Always, Auto, Never};
        let (mut p, now) = (Policy::default(), Instant::now());
        assert!(
            !p.wants(now, Auto, &[stat(7)])
                && p.wants(now, Always, &[stat(7)])
                && !p.wants(now, Never, &[stat(7)])
        );
        assert!(
            p.wants(now, Auto, &vec![stat(7); MANY_OPS])
                && !p.wants(now, Auto, &vec![stat(7); MANY_OPS - 1])
        );
        p.hint(now, &[stat(7), stat(8)], true, |ino| ino == 7);
        assert!(
            p.wants(now, Auto, &[stat(7)])
                && !p.wants(now, Auto, &[stat(8)])
                && !p.wants(now, Never, &[stat(7)])
        );
        assert!(
            !p.wants(now + HINT, Auto, &[stat(7)]),
            "then it is looked again whether there are leases"
        );
        p.hint(now, &[stat(7)], false, |_| true);
        assert!(!p.wants(now, Auto, &[stat(9), stat(7)]) && !p.wants(now, Always, &[stat(7)]));
        p.hint(now, &[stat(7)], true, |_| true);
        assert!(!p.wants(now, Auto, &[stat(7)]), "the leader's answer does not send it back");
        assert!(p.wants(now + HINT, Always, &[stat(7)]));
        for n in 0..3 * MOST_HINTS as Ino {
            p.hint(now, &[stat(n + 1)], true, |_| true);
        }
        assert!(p.hints.len() <= MOST_HINTS);
    }

    #[tokio::test(start_paused = true)]
    async fn large_listings_go_on_at_followers() {
        let (mut p, now) = (Policy::default(), Instant::now());
        let wants = |p: &Policy, o| p.wants(now, FollowerReads::Auto, &[o]);
        for n in 0..LARGE / 1000 + 1 {
            assert!(!wants(&p, list(7, n as u64)));
            p.answered(&[list(7, n as u64)], &[page(1000, false)]);
        }
        assert!(
            wants(&p, list(7, 99)) && !wants(&p, list(8, 99)) && !wants(&p, list(7, 0)),
            "one that begins does not"
        );
        p.answered(&[list(7, 99)], &[page(10, true)]);
        assert!(!wants(&p, list(7, 99)) && p.listed.is_empty());
        (1..2000).for_each(|dir| p.answered(&[list(dir, 0)], &[page(5, false)]));
        assert!(p.listed.len() <= MOST_LISTINGS);
    }

    #[tokio::test(start_paused = true)]
    async fn followers_are_asked_in_turn_and_left_alone_when_they_fail() {
        let (mut p, now) = (Policy::default(), Instant::now());
        let e = Endpoint::Sim;
        let all = [e(1), e(2), e(3)];
        let whom = |p: &Policy, now, turn| p.whom(now, &all, Some(&e(2)), turn);
        assert_eq!(
            (whom(&p, now, 0), whom(&p, now, 1), whom(&p, now, 2)),
            (Some(e(1)), Some(e(3)), Some(e(1)))
        );
        p.failed(now, &e(1), false);
        assert_eq!((whom(&p, now, 0), whom(&p, now + LEFT_ALONE, 0)), (Some(e(3)), Some(e(1))));
        (1..MOST_MISSES).for_each(|_| p.failed(now, &e(3), true));
        assert_eq!(whom(&p, now, 0), Some(e(3)));
        p.failed(now, &e(3), true);
        assert_eq!((whom(&p, now, 0), p.whom(now, &[], None, 5)), (None, None));
    }
}
