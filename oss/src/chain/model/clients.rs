//! The two clients of the model: what they send, give up, flush and read, and the checks of what
//! they see.

use std::collections::BTreeMap;

use strake_proto::{
    ChunkId, Code, Result,
    data::{BootId, Version},
    map::ChainExt,
};

use super::{CHUNKS, CLIENTS, Cluster, Ctx, From, Msg, Op, What, chunk, store::KEPT};

#[derive(Clone, Debug)]
pub(super) struct Acked {
    pub(super) chunk: ChunkId,
    pub(super) value: u64,
    pub(super) seq: u64,
    pub(super) version: Version,
    pub(super) boot_ids: Vec<BootId>,
    pub(super) stable: bool,
    pub(super) losses: u64,
}

#[derive(Default)]
pub(super) struct Client {
    pub(super) map: u64,
    pub(super) seq: u64,
    /// The one unanswered request: chunk, value, seq, replay.
    pub(super) open: Option<(ChunkId, u64, u64, Option<Version>)>,
    pub(super) acked: Vec<Acked>,
    /// `round`: how many requests it has given up. `values`: all values it wrote, and whether it
    /// gave each up.
    pub(super) round: u64,
    pub(super) values: BTreeMap<u64, bool>,
}

impl Cluster {
    pub(super) fn client_map(&mut self) {
        let c = self.rand(CLIENTS as u64) as usize;
        self.clients[c].map = self.version;
    }

    pub(super) fn client_write(&mut self) {
        let c = self.rand(CLIENTS as u64) as usize;
        if self.clients[c].open.is_none() {
            if !self.faults {
                return;
            }
            let (k, value) = (self.rand(CHUNKS), self.next_value);
            self.next_value += 1;
            self.clients[c].seq += 1;
            self.clients[c].open = Some((chunk(k), value, self.clients[c].seq, None));
            self.clients[c].values.insert(value, false);
        } else if self.clients[c].open.is_some_and(|o| o.3.is_none())
            && self.faults
            && self.rand(20) == 0
        {
            return self.give_up(c);
        }
        self.send(c);
    }

    /// Gives up the open request, while copies of it may still be in flight.
    pub(super) fn give_up(&mut self, c: usize) {
        let client = &mut self.clients[c];
        let Some((_, value, ..)) = client.open.take() else { return };
        client.values.insert(value, true);
        client.round += 1;
        self.given_up += 1;
    }

    /// Checks that nothing given up lies on top of what its client wrote afterwards.
    pub(super) fn check_given_up(&self, list: &[u64]) {
        for client in &self.clients {
            let mut newest = 0;
            for value in list.iter().filter(|v| client.values.contains_key(v)) {
                assert!(
                    *value > newest || !client.values[value],
                    "{value} was given up before {newest}: {list:?}"
                );
                newest = newest.max(*value);
            }
        }
    }

    pub(super) fn send(&mut self, c: usize) {
        let Some((chunk, value, seq, replay)) = self.clients[c].open else { return };
        let chain = &self.chains[&self.clients[c].map];
        let (Some(head), epoch) = (chain.head(), chain.epoch) else { return };
        let (session, round) =
            (c as u64 + 1, if self.roundless { 0 } else { self.clients[c].round });
        let what = What::Client { session, seq, replay, round };
        let op = Op { id: 0, chunk, epoch, eager: self.rand(2) == 0, what };
        let ctx = Ctx { chunk, value, session, seq, from: From::Client { value } };
        if self.r[head as usize].leased {
            self.msgs.push(Msg::Update { to: head as usize, op, ctx });
        }
    }

    pub(super) fn client_reply(
        &mut self,
        c: usize,
        value: u64,
        losses: u64,
        result: Result<(Version, Vec<BootId>, bool)>,
    ) {
        let Some((chunk, open, seq, replay)) = self.clients[c].open else { return };
        if open != value {
            return;
        }
        match result {
            Ok((version, boot_ids, stable)) => {
                self.writes += 1;
                self.clients[c].open = None;
                let acked = Acked { chunk, value, seq, version, boot_ids, stable, losses };
                self.clients[c].acked.retain(|a| a.value != value);
                self.clients[c].acked.push(acked);
            }
            Err(e) if e.code == Code::Overtaken => {
                let forgotten =
                    || self.r.iter().any(|r| r.store.changes_since(chunk, value) >= KEPT);
                let may = replay.is_some() && (self.losses > 0 || forgotten());
                assert!(may, "overtaken without a loss of all replicas");
                self.clients[c].open = None;
                self.clients[c].acked.retain(|a| a.value != value);
            }
            Err(e) if e.code == Code::NoSpc && replay.is_none() => self.clients[c].open = None,
            Err(_) => {}
        }
    }

    pub(super) fn client_flush(&mut self) {
        let c = self.rand(CLIENTS as u64) as usize;
        if self.clients[c].open.is_some() {
            return;
        }
        let chain = &self.chains[&self.clients[c].map];
        let (Some(head), epoch) = (chain.head(), chain.epoch) else { return };
        let head = head as usize;
        if self.r[head].core.view().epoch != epoch || !self.r[head].core.view().head {
            return;
        }
        let Ok(boot_ids) = self.flush_from(head) else { return };
        let mut again = None;
        for a in self.clients[c].acked.iter_mut().filter(|a| !a.stable) {
            if boot_ids.first().is_some_and(|head| a.boot_ids.contains(head)) {
                a.stable = true;
            } else {
                again = again.or(Some((a.chunk, a.value, a.seq, Some(a.version))));
            }
        }
        self.clients[c].open = again;
    }

    pub(super) fn client_read(&mut self, i: usize) {
        let epoch = self.chains[&self.clients[0].map].epoch;
        let c = chunk(self.rand(CHUNKS));
        let r = &self.r[i];
        let all: Vec<ChunkId> = (0..CHUNKS).map(chunk).collect();
        if let [first, .., last] = &all[..] {
            let each = all.iter().all(|c| r.core.read(c, epoch).is_ok());
            assert_eq!(
                r.core.read_all(first..=last, epoch).is_ok(),
                each,
                "what may be read of all at {i}"
            );
        }
        if !r.leased || r.core.read(&c, epoch).is_err() {
            return;
        }
        self.reads += 1;
        let got = r.store.chunks.get(&c).map(|x| x.list.clone()).unwrap_or_default();
        for a in self.clients.iter().flat_map(|c| &c.acked).filter(|a| a.chunk == c) {
            let must = a.stable || a.losses == self.losses;
            assert!(
                !must || got.contains(&a.value),
                "read at {i} lacks acknowledged {}: {got:?} {a:?}",
                a.value
            );
        }
        self.check_given_up(&got);
        let losses = self.losses;
        let (at, seen) = self.seen.entry(c).or_default();
        // With full disks, an update that failed for lack of space may have been seen on a replica
        // that was lost since.
        if *at == losses && !self.full {
            assert!(got.starts_with(seen), "a read at {i} went back: {got:?} after {seen:?}");
        }
        (*at, *seen) = (losses, got);
    }
}
