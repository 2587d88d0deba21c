//! The promises of the world of chains, as checks.

use std::collections::BTreeSet;

use strake_proto::{layout::splitmix64, pb::ReplicaState};

use super::{
    Fault, World,
    kinds::{CHUNK, N},
};
use crate::Model;

/// Within this many steps a chain must become whole again; about 60 are usual.
const PATIENCE: usize = 3_000;

impl World {
    pub(super) fn promises(&mut self) -> Result<(), String> {
        if let Some(why) = self.broken.take() {
            return Err(why);
        }
        self.stable_is_durable()?;
        self.idle_are_alike()?;
        self.reads()
    }

    /// Reads everything that a client could read now, whatever map it has.
    fn reads(&mut self) -> Result<(), String> {
        let readable = |i: &usize| {
            let r = &self.replicas[*i];
            let leased = r.leased || self.fault == Fault::NoLease && !r.down;
            leased && r.core.read(&CHUNK, r.epoch()).is_ok()
        };
        let served: Vec<usize> = (0..N).filter(readable).collect();
        let Some(first) = served.first() else { return Ok(()) };
        let got = &self.replicas[*first].chunk.list;
        for i in &served {
            let here = &self.replicas[*i].chunk.list;
            self.nothing_late(here)?;
            if here != got {
                return Err(format!("{here:?} is read at {i}, {got:?} at {first}"));
            }
        }
        for a in self.clients.iter().flat_map(|c| &c.acked) {
            if (a.stable || a.losses == self.losses) && !got.contains(&a.write.value) {
                return Err(format!("{got:?} is read at {first}: {} was answered", a.write.value));
            }
        }
        let (at, before) = &self.read;
        // An update that fails for lack of space may have been read at a replica that was lost
        // since.
        if *at == self.losses && !self.full && !got.starts_with(before) {
            return Err(format!("{got:?} is read at {first} after {before:?}"));
        }
        self.read = (self.losses, got.clone());
        Ok(())
    }

    /// No update that was given up lies on top of a later write of its client, or of any write that
    /// began after its program was told of the failure.
    fn nothing_late(&self, list: &[u8]) -> Result<(), String> {
        for client in &self.clients {
            let mut newest = 0;
            for value in list.iter().filter(|v| client.values.contains(v)) {
                if *value < newest && client.given_up.iter().any(|g| g.write.value == *value) {
                    return Err(format!(
                        "{list:?} is read: {value} was given up before {newest} was written"
                    ));
                }
                newest = newest.max(*value);
            }
        }
        for g in self.clients.iter().flat_map(|c| &c.given_up) {
            let mut before = list.iter().take_while(|v| **v != g.write.value);
            let newer = g.told.and_then(|told| before.find(|v| **v > told));
            if let Some(newer) = newer.filter(|_| list.contains(&g.write.value)) {
                let late = g.write.value;
                return Err(format!(
                    "{list:?} is read: that {late} had failed was told before {newer} was written"
                ));
            }
        }
        Ok(())
    }

    fn stable_is_durable(&self) -> Result<(), String> {
        let in_sync = |s| matches!(s, ReplicaState::ReplicaServing | ReplicaState::ReplicaLastsrv);
        for a in self.clients.iter().flat_map(|c| &c.acked).filter(|a| a.stable) {
            for r in self.chain.replicas.iter().filter(|r| in_sync(r.state())) {
                let durable = &self.replicas[r.target as usize].durable.list;
                if !durable.contains(&a.write.value) {
                    return Err(format!(
                        "stable update {} is not durable at {}: {durable:?}",
                        a.write.value, r.target
                    ));
                }
            }
        }
        Ok(())
    }

    /// Replicas that serve and act on the head's epoch, with nothing in flight, must be equal.
    fn idle_are_alike(&self) -> Result<(), String> {
        let Some(first) =
            self.replicas.iter().find(|r| r.core.view().serving() && r.core.view().head)
        else {
            return Ok(());
        };
        let all = &first.core.view().serving;
        let idle = |t: &u32| {
            let r = &self.replicas[*t as usize];
            r.epoch() == first.epoch() && r.core.view().serving() && r.core.busy() == 0
        };
        if !all.iter().all(idle) {
            return Ok(());
        }
        match all.iter().find(|t| self.replicas[**t as usize].chunk != first.chunk) {
            Some(t) => Err(format!(
                "with nothing in flight {t} has {:?}, the head {:?}",
                self.replicas[*t as usize].chunk.list, first.chunk.list
            )),
            None => Ok(()),
        }
    }

    /// With no more faults, the chain must become whole.
    pub(super) fn settles(mut self) -> Result<(), String> {
        let left = &mut self.left;
        (left.writes, left.crashes, left.expiries, left.breaks) = (0, 0, 0, 0);
        (left.doubles, left.repeats, left.plans, left.full, left.given_up) = (0, 0, 0, 0, 0);
        (left.changes, left.flushes) = (u8::MAX, u8::MAX);
        let mut rng = 7;
        for _ in 0..PATIENCE {
            if self.is_whole() {
                return Ok(());
            }
            let actions = self.actions();
            if actions.is_empty() {
                break;
            }
            let action = &actions[splitmix64(&mut rng) as usize % actions.len()];
            self.go(action)
                .map_err(|why| format!("when faults have ended, after {action:?}: {why}"))?;
        }
        Err(format!("does not become whole again: {:?}, then {:?}", self.chain, self.actions()))
    }

    fn is_whole(&self) -> bool {
        let wanted: BTreeSet<u32> = self.chain.preferred.iter().copied().collect();
        let serving = |r: &strake_proto::pb::Replica| r.state() == ReplicaState::ReplicaServing;
        let members: BTreeSet<u32> = self.chain.replicas.iter().map(|r| r.target).collect();
        let idle = |t: &u32| {
            let r = &self.replicas[*t as usize];
            r.core.busy() == 0 && r.epoch() == self.chain.epoch
        };
        self.chain.replicas.iter().all(serving)
            && members == wanted
            && members.iter().all(idle)
            && self.clients.iter().all(|c| c.open.is_none() && c.acked.iter().all(|a| a.stable))
    }
}
