//! The metadata server's side: the real rules of membership, heartbeats and leases.

use strake_mds::cluster::{
    membership::{self, Facts},
    state::check_transition,
};
use strake_oss::chain::{Input, View};
use strake_proto::{
    map::ChainExt,
    pb::{self, ReplicaState},
};

use super::{
    Action, Asker, Awaits, Fault, Kind, Message, Newest, Pass, Replica, World,
    kinds::{Chunk, N},
    new_core,
};

impl World {
    pub(super) fn actions_of_mds(&self, out: &mut Vec<Action>) {
        if self.left.changes > 0 && self.evaluated().is_some() {
            out.push(Action::Evaluate);
        }
        if self.left.plans > 0 {
            let sets = (1u8..1 << N).filter(|s| s.count_ones() == u32::from(self.left.copies));
            let sets = sets.map(|s| (0..N as u32).filter(|t| s & 1 << t != 0).collect::<Vec<_>>());
            out.extend(sets.filter(|s| *s != self.chain.preferred).map(Action::Plan));
        }
        for (i, r) in self.replicas.iter().enumerate() {
            if r.down {
                out.push(Action::Register(i));
            } else if self.beat_matters(i) {
                out.push(Action::Beat(i));
            }
            let member = self.chain.state_of(i as u32).is_some();
            if self.alive[i] && member && (r.down || self.left.expiries > 0) {
                out.push(Action::LeaseEnds(i));
            }
            if !r.down && member && self.left.crashes > 0 {
                out.push(Action::Crash { at: i, keeps: false });
                if r.chunk != r.durable {
                    out.push(Action::Crash { at: i, keeps: true });
                }
            }
        }
    }

    /// The content of a heartbeat: the epoch that the replica acts on, and whether its successor is
    /// filled.
    fn report(&self, i: usize) -> (u64, bool) {
        let (r, v) = (&self.replicas[i], self.replicas[i].core.view());
        let filled = v.tail && v.syncing_successor().is_some() && r.pass == Pass::Synced;
        let waits = r.core.owes_shown() && self.fault != Fault::FillsShown;
        (v.epoch, filled && !waits)
    }

    fn beat_matters(&self, i: usize) -> bool {
        let (r, t) = (&self.replicas[i], i as u32);
        let member = self.chain.state_of(t).is_some() || self.chain.preferred.contains(&t);
        if !member
            && r.core.view().state == ReplicaState::ReplicaUnknown
            && (r.left || r.chunk == Chunk::default())
        {
            return false; // it stands by
        }
        // Heartbeats decide when a replica counts as filled and when one may leave.
        let leaves = self.chain.replicas.iter().any(|r| !self.chain.preferred.contains(&r.target));
        let heard = self.seen[i] == self.report(i) || !leaves && !self.report(i).1;
        !(self.alive[i]
            && r.leased
            && heard
            && r.epoch() == self.chain.epoch
            && r.losses == self.losses)
    }

    fn evaluated(&self) -> Option<pb::Chain> {
        let epoch = self.chain.epoch;
        let acts = |t: u32| self.fault == Fault::LeavesUnheard || self.seen[t as usize].0 == epoch;
        let tail = self.chain.tail();
        let synced = tail.is_some_and(|t| {
            acts(t) && self.seen[t as usize].0 == epoch && self.seen[t as usize].1
        });
        membership::evaluate(
            &self.chain,
            &Facts { alive: |t| self.alive[t as usize], synced, acts },
        )
    }

    pub(super) fn evaluate(&mut self) {
        let Some(chain) = self.evaluated() else { return };
        // A change that the map refuses would be proposed for ever.
        check_transition(&self.chain, &chain).unwrap_or_else(|e| panic!("the map refuses it: {e}"));
        self.left.changes -= 1;
        self.set_chain(chain);
    }

    fn set_chain(&mut self, chain: pb::Chain) {
        // All replicas in sync are lost at once.
        self.losses += u8::from(self.chain.head().is_some() && chain.head().is_none());
        self.chain = Newest(chain);
    }

    pub(super) fn plan(&mut self, targets: &[u32]) {
        self.left.plans -= 1;
        self.chain.0.preferred = targets.to_vec();
        self.chain.0.epoch += 1;
    }

    pub(super) fn lease_ends(&mut self, i: usize) {
        if !self.replicas[i].down {
            self.left.expiries -= 1;
        }
        self.replicas[i].leased = false;
        self.alive[i] = false;
    }

    pub(super) fn beat(&mut self, i: usize) {
        self.seen[i] = self.report(i);
        self.alive[i] = true;
        self.take_map(i);
        let r = &mut self.replicas[i];
        (r.leased, r.losses) = (true, self.losses);
    }

    /// A server that died has restarted and registers.
    pub(super) fn register(&mut self, i: usize) {
        if self.fault != Fault::RestartUnnoticed {
            let last = self.chain.state_of(i as u32) == Some(ReplicaState::ReplicaLastsrv);
            // It may become the source again.
            self.losses += u8::from(last);
            if let Some(chain) = membership::restarted(&self.chain, i as u32) {
                self.set_chain(chain);
            }
        }
        let takes_part =
            |s| matches!(s, ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing);
        let in_former_life = self.chain.state_of(i as u32).is_some_and(takes_part);
        let r = &mut self.replicas[i];
        r.core = new_core(i, r.life, if in_former_life { self.chain.epoch } else { 0 });
        r.down = false;
        self.take_map(i);
    }

    fn take_map(&mut self, i: usize) {
        let (view, me) = (View::of(&self.chain, i as u32), i as u32);
        let r = &mut self.replicas[i];
        if r.epoch() >= view.epoch {
            return;
        }
        r.pass = Pass::Begin;
        r.left = self.chain.head().is_some()
            && self.chain.state_of(me).is_none()
            && !self.chain.preferred.contains(&me);
        // Answers to what was asked in an older epoch do not count any more.
        r.work
            .values_mut()
            .filter(|w| matches!(w.kind, Kind::Update(_)))
            .for_each(|w| w.awaits = Awaits::Nothing);
        self.feed(i, Input::View(view));
        if self.fault == Fault::Unconfirmed {
            let r = &mut self.replicas[i];
            r.core.heard_predecessor(r.epoch());
        }
    }

    /// A server dies. With `keeps` it keeps all that it had applied, otherwise only what it had
    /// flushed.
    pub(super) fn crash(&mut self, i: usize, keeps: bool) {
        let was = &self.replicas[i];
        let durable = if keeps { was.chunk.clone() } else { was.durable.clone() };
        let mut asked: Vec<(Asker, Option<u64>)> =
            was.work.values().map(|w| (w.asker, session(&w.kind))).collect();
        self.messages.retain(|m| match m {
            Message::Forward { to, asker, .. } | Message::Put { to, asker, .. } if *to == i => {
                asked.push((*asker, None));
                false
            }
            _ => true,
        });
        self.replicas[i] = Replica { down: true, ..Replica::new(i, was.life + 1, durable) };
        for (asker, session) in asked {
            self.broken_off(asker, session);
        }
    }
}

fn session(kind: &Kind) -> Option<u64> {
    match kind {
        Kind::Update(w) => Some(w.session),
        _ => None,
    }
}
