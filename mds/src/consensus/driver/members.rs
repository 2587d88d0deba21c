//! The driver's part in changes of the members and of the leadership: what it knows of the other
//! members, and what follows from it.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use strake_proto::{Code, Error, Result};

use super::{
    super::{
        members::{DISK_FULL, DISK_SLOW, Group, Member, not_member},
        types::MemberChange,
    },
    Driver,
    inputs::{Batch, Reply},
    standing::PeerProgress,
    waiters::Waiter,
};

/// A removed member keeps voting for this many election timeouts: until the others know that its
/// removal is committed, one of them may need its vote.
const LINGER: u32 = 6;
/// A leader leads for at least this many election timeouts before it hands over because of its
/// disk, and waits as long between two tries.
const OFFICE: u32 = 40;

impl Driver {
    fn election(&self) -> Duration {
        self.cfg.tick * self.cfg.election_ticks.1 as u32
    }

    pub(super) fn heard_of(&mut self, b: &Batch) {
        let (applied, disk, level) = (b.applied, b.disk, b.level);
        self.standing
            .peer_progress
            .insert(b.from, PeerProgress { at: self.env.boot(), applied, disk, level });
        self.core.lease.note_vote_wait(b.from, b.vote_wait);
        let conf = self.core.conf();
        // A new member's configuration may be older than the group, and it knows of no other source
        // before its first copy.
        let of_group = conf.voters.is_empty()
            || conf.voters.contains(&b.from)
            || conf.learners.contains(&b.from);
        if let Some(at) =
            b.endpoint.clone().filter(|_| of_group && self.peers.endpoint(b.from).is_none())
        {
            self.peers.set(b.from, at);
        }
    }

    pub(super) fn group(&self) -> Group {
        let (conf, now) = (self.core.conf(), self.env.boot());
        let outgoing = &conf.voters_outgoing;
        let mut ids: Vec<(u64, bool)> =
            conf.voters.iter().chain(outgoing).map(|id| (*id, true)).collect();
        ids.extend(
            conf.learners.iter().chain(&conf.learners_next).map(|id| (*id, outgoing.contains(id))),
        );
        ids.sort_unstable_by_key(|(id, voter)| (*id, !voter));
        ids.dedup_by_key(|(id, _)| *id);
        let member = |(id, voter): (u64, bool)| {
            let own = id == self.cfg.id;
            let heard = self.standing.peer_progress.get(&id);
            Member {
                id,
                endpoint: self.peers.endpoint(id),
                voter,
                leaving: outgoing.contains(&id) && !conf.voters.contains(&id),
                matched: if own {
                    self.core.image().last()
                } else {
                    self.core.matched(id).unwrap_or(0)
                },
                applied: if own {
                    self.core.applied_to().0
                } else {
                    heard.map_or(0, |h| h.applied)
                },
                heard: if own {
                    Some(Duration::ZERO)
                } else {
                    heard.map(|h| now.saturating_sub(h.at))
                },
                copying: self.copies.is_sending(id),
                stamp: if own {
                    Some(self.core.image().stamp)
                } else {
                    self.core.image().peers.get(&id).copied()
                },
                disk: if own {
                    self.health.disk.load(Relaxed)
                } else {
                    heard.map_or(0, |h| h.disk)
                },
                level: if own { Some(self.cfg.level) } else { heard.map(|h| h.level) },
            }
        };
        let patience = 2 * self.election();
        Group {
            me: self.cfg.id,
            leader: self.core.leader(),
            term: self.core.term(),
            last: self.core.image().last(),
            committed: self.core.committed(),
            members: ids.into_iter().map(member).collect(),
            patience,
            fresh: now.saturating_sub(self.standing.led_since) < patience,
        }
    }

    /// `to` 0: the best successor.
    pub(super) fn transfer(&mut self, to: u64, reply: Reply) {
        let _ = reply.send(self.begin_transfer(to));
    }

    fn begin_transfer(&mut self, to: u64) -> Result<()> {
        if let Some(e) = self.not_ready() {
            return Err(e);
        }
        let group = self.group();
        let nobody = || {
            Error::new(Code::Busy, "no other voter is up and up to date, so nobody can take over")
        };
        let to = if to == 0 { group.successor().ok_or_else(nobody)? } else { to };
        group.check_transfer(to)?;
        self.core.transfer(to);
        Ok(())
    }

    pub(super) fn change(&mut self, change: MemberChange, reply: Reply) {
        let checked = match self.not_ready() {
            Some(e) => Err(e),
            None => self.group().check_change(&change),
        };
        match checked.and_then(|c| self.core.propose_change(&c)) {
            Ok((index, term)) => {
                if let MemberChange::AddLearner { id, endpoint } = change {
                    self.peers.set(id, endpoint);
                }
                self.waiters.add(index, term, Waiter::Change(reply));
            }
            Err(e) => drop(reply.send(Err(e))),
        }
    }

    /// Called once a tick. Ends a removed member when its time is over; hands leadership over if
    /// the disk is unfit.
    pub(super) fn look_after_members(&mut self) -> Result<()> {
        if let Some(ticks) = &mut self.standing.removed {
            *ticks += 1;
            if *ticks > LINGER * self.cfg.election_ticks.1 as u32 {
                return Err(not_member(self.cfg.id));
            }
        }
        let slow = self.log.is_slow(self.env.boot());
        let was = if slow {
            self.health.disk.fetch_or(DISK_SLOW, Relaxed)
        } else {
            self.health.disk.fetch_and(!DISK_SLOW, Relaxed)
        };
        if slow != (was & DISK_SLOW != 0) {
            match slow {
                true => tracing::warn!("the disk of the metadata log is slow"),
                false => tracing::info!("the disk of the metadata log is no longer slow"),
            }
        }
        self.yield_unfit_disk();
        self.wait_for_state()
    }

    /// If this leader's disk is full or slow, and another member's is neither, that member should
    /// lead. Leadership goes only to a member with a healthy disk, and this one waits between two
    /// tries, so that leadership does not circle.
    fn yield_unfit_disk(&mut self) {
        let disk = self.health.disk.load(Relaxed);
        let now = self.env.boot();
        if disk == 0 {
            self.standing.unfit = None;
            return;
        }
        // The cause may slow the other disks, too: gives those members time to notice and report
        // it.
        let unfit = *self.standing.unfit.get_or_insert(now);
        let settled = now.saturating_sub(unfit) >= 2 * self.election();
        let since = self.standing.led_since.max(self.standing.yielded);
        if !settled
            || !self.leads_own_term()
            || now.saturating_sub(since) < OFFICE * self.election()
        {
            return;
        }
        let group = self.group();
        let fit = |id: &u64| group.get(*id).is_some_and(|m| m.disk == 0);
        if let Some(to) = group.successor().filter(fit) {
            let why = if disk & DISK_FULL != 0 { "full" } else { "slow" };
            tracing::warn!(to, "hands the leadership over: the disk here is {why}");
            self.standing.yielded = now;
            self.core.transfer(to);
        }
    }
}
