//! Clients: they send unanswered requests again, flush, and send again what a flush did not cover.

use strake_oss::chain::What;
use strake_proto::{
    Code,
    data::{BootId, Version},
};

use super::{
    Action, Asker, Fault, Kind, World,
    kinds::{Acked, CLIENTS, GivenUp, Open, Write},
};

pub(super) fn session(client: usize) -> u64 {
    client as u64 + 1
}

impl World {
    pub(super) fn actions_of_clients(&self, out: &mut Vec<Action>) {
        // A client with an older map sends to the head in that map, which takes requests only if it
        // acts on the same map.
        let is_head = |i: &usize| {
            let r = &self.replicas[*i];
            r.leased && r.core.view().serving() && r.core.view().head
        };
        let heads: Vec<usize> = (0..self.replicas.len()).filter(is_head).collect();
        for c in 0..CLIENTS {
            let client = &self.clients[c];
            // Clients that have done nothing yet are equivalent, so the first one begins.
            let turn = c == 0 || client.seq > 0 || self.clients[c - 1].seq > 0;
            for to in &heads {
                match &client.open {
                    None if self.left.writes > 0 && turn => {
                        out.push(Action::Write { client: c, to: *to })
                    }
                    Some(o) if !o.sent => out.push(Action::Send { client: c, to: *to }),
                    _ => {}
                }
                if client.open.is_none() && self.left.given_up > 0 && self.left.writes > 0 && turn {
                    out.push(Action::GiveUp { client: c, to: *to });
                }
                let arrives = |epoch: u64| epoch == self.replicas[*to].epoch();
                let late = client.given_up.iter().filter(|g| g.on_its_way && arrives(g.epoch));
                out.extend(late.map(|g| Action::Late { client: c, to: *to, write: g.write }));
                // A client's map never goes back to an older one.
                let knows = client.given_up.iter().all(|g| g.epoch <= self.replicas[*to].epoch());
                if self.may_tell(c) && knows {
                    out.push(Action::Fence { client: c, to: *to });
                }
                let unstable = client.open.is_none() && client.acked.iter().any(|a| !a.stable);
                if unstable && self.left.flushes > 0 && self.flush_path(*to).is_ok() {
                    out.push(Action::Flush { client: c, to: *to });
                }
                let twice = |epoch| self.left.doubles > 0 && self.replicas[*to].epoch() == epoch;
                if client.last.is_some_and(|(_, _, epoch)| twice(epoch)) {
                    out.push(Action::Twice { client: c, to: *to });
                }
            }
            if self.may_tell(c) {
                out.push(Action::TimeOver(c));
            }
            if self.left.breaks > 0 && client.open.as_ref().is_some_and(|o| o.sent) {
                out.push(Action::HangUp(c));
            }
        }
    }

    fn next_write(&mut self, c: usize) -> Write {
        self.left.writes -= 1;
        self.next_value += 1;
        let client = &mut self.clients[c];
        client.seq += 1;
        if self.checks_given_up {
            client.values.push(self.next_value);
        }
        Write { value: self.next_value, session: session(c), seq: client.seq }
    }

    fn round(&self, c: usize) -> u64 {
        if self.fault == Fault::Roundless { 0 } else { self.clients[c].round }
    }

    pub(super) fn give_up(&mut self, c: usize, to: usize) {
        self.left.given_up -= 1;
        let (write, epoch, round) = (self.next_write(c), self.replicas[to].epoch(), self.round(c));
        let client = &mut self.clients[c];
        client.given_up.push(GivenUp { write, epoch, round, on_its_way: true, told: None });
        client.round += 1;
    }

    /// Whether a program must still be told that its write failed.
    fn may_tell(&self, c: usize) -> bool {
        self.left.tells && self.clients[c].given_up.iter().any(|g| g.told.is_none())
    }

    fn tell(&mut self, c: usize) {
        let newest = self.next_value;
        for g in &mut self.clients[c].given_up {
            g.told.get_or_insert(newest);
        }
    }

    /// Tells the head of a chain the client's current round.
    pub(super) fn fence(&mut self, c: usize, to: usize) {
        let (epoch, round) = (self.replicas[to].epoch(), self.round(c));
        let told = self.fault == Fault::TellsAtOnce
            || self.replicas[to].core.heard_round(epoch, session(c), round).is_ok();
        if told {
            self.tell(c);
        }
    }

    /// Enough time has passed: no server takes the updates that the client gave up any more.
    pub(super) fn time_over(&mut self, c: usize) {
        let live = self.fault == Fault::TellsAtOnce;
        self.clients[c].given_up.iter_mut().for_each(|g| g.on_its_way &= live);
        self.tell(c);
    }

    pub(super) fn late(&mut self, c: usize, to: usize, late: Write) {
        let Some(g) = self.clients[c].given_up.iter_mut().find(|g| g.write == late) else { return };
        g.on_its_way = false;
        let (write, epoch) = (g.write, g.epoch);
        let what =
            What::Client { session: write.session, seq: write.seq, replay: None, round: g.round };
        self.admit(to, epoch, Asker::Nobody, Kind::Update(write), what);
    }

    pub(super) fn write(&mut self, c: usize, to: usize) {
        let write = self.next_write(c);
        let client = &mut self.clients[c];
        client.open = Some(Open { write, replay: None, sent: false });
        self.send(c, to);
    }

    pub(super) fn send(&mut self, c: usize, to: usize) {
        let (epoch, round) = (self.replicas[to].epoch(), self.round(c));
        let doubles = self.left.doubles > 0;
        let client = &mut self.clients[c];
        let Some(o) = &mut client.open else { return };
        o.sent = true;
        let (write, replay) = (o.write, o.replay);
        client.last = doubles.then_some((write, replay, epoch));
        let what = What::Client { session: write.session, seq: write.seq, replay, round };
        self.admit(to, epoch, Asker::Client, Kind::Update(write), what);
    }

    /// The last request that was sent arrives a second time.
    pub(super) fn twice(&mut self, c: usize, to: usize) {
        self.left.doubles -= 1;
        let Some((write, replay, epoch)) = self.clients[c].last else { return };
        if self.left.doubles == 0 {
            self.clients.iter_mut().for_each(|c| c.last = None);
        }
        let what =
            What::Client { session: write.session, seq: write.seq, replay, round: self.round(c) };
        self.admit(to, epoch, Asker::Nobody, Kind::Update(write), what);
    }

    pub(super) fn hang_up(&mut self, c: usize) {
        self.left.breaks -= 1;
        self.hung_up(session(c));
        for w in self.replicas.iter_mut().flat_map(|r| r.work.values_mut()) {
            if w.asker == Asker::Client
                && matches!(w.kind, Kind::Update(u) if u.session == session(c))
            {
                w.asker = Asker::Nobody;
            }
        }
    }

    pub(super) fn hung_up(&mut self, session: u64) {
        if let Some(o) = self.clients.get_mut(session as usize - 1).and_then(|c| c.open.as_mut()) {
            o.sent = false;
        }
    }

    pub(super) fn client_answered(
        &mut self,
        from: usize,
        write: Write,
        result: Result<(Version, Vec<BootId>, bool), Code>,
    ) {
        let losses = self.replicas[from].losses;
        let client = &mut self.clients[write.session as usize - 1];
        let Some(o) = client.open.as_mut().filter(|o| o.write == write) else { return };
        o.sent = false;
        let again = o.replay.is_some();
        match result {
            Ok((version, boot_ids, stable)) => {
                client.open = None;
                client.acked.retain(|a| a.write != write);
                client.acked.push(Acked { write, version, boot_ids, stable, losses }.forgetful());
            }
            Err(Code::Overtaken) => {
                if !again || self.losses == 0 {
                    let m = format!(
                        "update {} is overtaken without a loss of all replicas",
                        write.value
                    );
                    self.broken.get_or_insert(m);
                }
                client.open = None;
                client.acked.retain(|a| a.write != write);
            }
            Err(Code::NoSpc) if !again => client.open = None,
            Err(_) => {}
        }
        self.clients[write.session as usize - 1].acked.sort_by_key(|a| a.write.value);
    }

    pub(super) fn flush(&mut self, c: usize, to: usize) {
        self.left.flushes -= 1;
        let Ok(boot_ids) = self.flush_from(to) else { return };
        let any = self.fault == Fault::AnyStamp;
        let client = &mut self.clients[c];
        for a in client.acked.iter_mut().filter(|a| !a.stable) {
            if any || boot_ids.first().is_some_and(|head| a.boot_ids.contains(head)) {
                a.stable = true;
                *a = a.clone().forgetful();
            } else if client.open.is_none() {
                client.open = Some(Open { write: a.write, replay: Some(a.version), sent: false });
            }
        }
    }
}

impl Acked {
    /// Drops what is not needed any more: a stable write is never sent again.
    fn forgetful(self) -> Acked {
        if self.stable {
            Acked { version: Version::default(), boot_ids: Vec::new(), losses: 0, ..self }
        } else {
            self
        }
    }
}
