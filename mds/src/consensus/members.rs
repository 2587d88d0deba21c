//! The rules for changing the members and for choosing who leads next: pure functions of what a
//! member knows of its group.

use std::time::Duration;

use raft::eraftpb::{ConfChangeSingle, ConfChangeTransition, ConfChangeType, ConfChangeV2};
use strake_fabric::Endpoint;
use strake_proto::{Code, Error, Result};

use super::types::MemberChange;

/// A member that is at most this many entries behind has caught up.
pub(crate) const CAUGHT_UP: u64 = 1000;

/// What a member reports about its disk, as bits of `RaftBatch.disk`.
pub(crate) const DISK_FULL: u32 = 1;
pub(crate) const DISK_SLOW: u32 = 2;
/// The member waits for a copy of the state.
pub(crate) const NO_STATE: u32 = 4;

/// A member as another one knows it. Fields that only a leader learns are zero elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    pub id: u64,
    pub endpoint: Option<Endpoint>,
    /// It votes; otherwise it is a learner.
    pub voter: bool,
    /// A change under way removes it.
    pub leaving: bool,
    /// Last entry known to be in its log; 0 also for one that has no copy of the state yet.
    pub matched: u64,
    /// Last entry it said it has applied.
    pub applied: u64,
    /// How long ago it was heard of; `None`: not since this process started.
    pub heard: Option<Duration>,
    /// It is being given a copy of the state.
    pub copying: bool,
    /// Bits: [`DISK_FULL`], [`DISK_SLOW`] and [`NO_STATE`].
    pub disk: u32,
    /// The stamp of its log, once it was heard of.
    pub stamp: Option<u64>,
    /// The newest feature level that its program knows, once it was heard of.
    pub level: Option<u32>,
}

/// The group as one member knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub me: u64,
    /// 0: not known.
    pub leader: u64,
    pub term: u64,
    /// Last entry of its log.
    pub last: u64,
    pub committed: u64,
    pub members: Vec<Member>,
    /// Members that were not heard of for longer than this count as dead.
    pub patience: Duration,
    /// This member has led for so short a time that it may not have heard of all members yet.
    pub fresh: bool,
}

impl Group {
    pub fn get(&self, id: u64) -> Option<&Member> {
        self.members.iter().find(|m| m.id == id)
    }
    pub fn voters(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| m.voter && !m.leaving)
    }

    /// Whether it answers.
    pub fn is_up(&self, m: &Member) -> bool {
        m.id == self.me || m.heard.is_some_and(|ago| ago <= self.patience)
    }
    /// Whether it answers and can acknowledge new entries at once.
    pub fn counts(&self, m: &Member) -> bool {
        self.is_up(m) && self.has_caught_up(m)
    }
    pub fn has_caught_up(&self, m: &Member) -> bool {
        m.id == self.me || m.matched != 0 && m.matched + CAUGHT_UP >= self.last && !m.copying
    }

    /// The best member to lead instead of this one: a voter that answers and has caught up, with a
    /// healthy disk if there is one, and with the longest log.
    pub fn successor(&self) -> Option<u64> {
        let able =
            self.voters().filter(|m| m.id != self.me && self.counts(m) && m.disk & NO_STATE == 0);
        able.max_by_key(|m| (m.disk == 0, m.matched, std::cmp::Reverse(m.id))).map(|m| m.id)
    }

    /// Whether another voter that answers has the state.
    pub fn another_has_state(&self) -> bool {
        self.voters().any(|m| m.id != self.me && self.is_up(m) && m.disk & NO_STATE == 0)
    }

    /// Whether leadership may go to `to`.
    pub fn check_transfer(&self, to: u64) -> Result<()> {
        let Some(m) = self.voters().find(|m| m.id == to && to != self.me) else {
            return Err(inval(format!("metadata server {to} is not another voter of this group")));
        };
        if !self.is_up(m) {
            return Err(self.refusal(format!("metadata server {to} {}", self.silence(m))));
        }
        if !self.has_caught_up(m) {
            return Err(busy(format!(
                "metadata server {to} is {} entries behind; try again later",
                self.lag(m)
            )));
        }
        if m.disk & NO_STATE != 0 {
            return Err(busy(format!(
                "metadata server {to} waits for a copy of the state; try again later"
            )));
        }
        Ok(())
    }

    pub fn lag(&self, m: &Member) -> u64 {
        self.last.saturating_sub(m.matched)
    }

    fn silence(&self, m: &Member) -> String {
        match m.heard {
            Some(ago) => format!("was last heard from {:.0} s ago; is it up?", ago.as_secs_f64()),
            None => "does not answer; is it up?".into(),
        }
    }

    /// A refusal for good (`Inval`), or `Busy` while this member has only just begun to lead.
    fn refusal(&self, m: String) -> Error {
        Error::new(if self.fresh { Code::Busy } else { Code::Inval }, m)
    }

    /// The change in raft-rs's form. `Inval`: it would be wrong. `Busy`: not yet.
    pub fn check_change(&self, change: &MemberChange) -> Result<ConfChangeV2> {
        match change {
            MemberChange::AddLearner { id, endpoint } => {
                if *id == 0 || self.get(*id).is_some() {
                    return Err(inval(format!(
                        "metadata server {id} is a member already, or not a valid id"
                    )));
                }
                let mut c = single(*id, ConfChangeType::AddLearnerNode);
                c.context = format!("{id}={endpoint}").into_bytes().into();
                Ok(c)
            }
            MemberChange::Step { promote, remove } => self.check_step(promote, remove),
        }
    }

    fn check_step(&self, promote: &[u64], remove: &[u64]) -> Result<ConfChangeV2> {
        let mut named: Vec<u64> = [promote, remove].concat();
        named.sort_unstable();
        if named.is_empty() || named.windows(2).any(|w| w[0] == w[1]) {
            return Err(inval("a change must name at least one member, and none twice".into()));
        }
        for id in remove {
            if *id == self.me {
                return Err(inval(format!(
                    "metadata server {id} leads; transfer the leadership first"
                )));
            }
            if self.get(*id).is_none() {
                return Err(inval(format!("metadata server {id} is not a member")));
            }
        }
        for id in promote {
            let Some(m) = self.get(*id).filter(|m| !m.voter) else {
                return Err(inval(format!("metadata server {id} is not a learner; add it first")));
            };
            // A member acknowledges nothing before its first copy of the state has arrived.
            if !self.counts(m) {
                return Err(busy(format!("metadata server {id} has not caught up yet")));
            }
        }
        self.check_quorum(promote, remove)?;
        let mut c = ConfChangeV2::default();
        remove.iter().for_each(|id| c.mut_changes().push(one(*id, ConfChangeType::RemoveNode)));
        promote.iter().for_each(|id| c.mut_changes().push(one(*id, ConfChangeType::AddNode)));
        if c.changes.len() > 1 {
            c.set_transition(ConfChangeTransition::Implicit);
        }
        Ok(c)
    }

    /// The voters that remain after a step must have a working majority: otherwise the step itself
    /// would stop the group.
    fn check_quorum(&self, promote: &[u64], remove: &[u64]) -> Result<()> {
        if promote.is_empty() && remove.iter().all(|id| self.get(*id).is_some_and(|m| !m.voter)) {
            return Ok(());
        }
        let after: Vec<&Member> = self
            .members
            .iter()
            .filter(|m| (m.voter || promote.contains(&m.id)) && !remove.contains(&m.id))
            .collect();
        let (good, bad): (Vec<&Member>, Vec<&Member>) = after.iter().partition(|m| self.counts(m));
        let need = after.len() / 2 + 1;
        if good.len() >= need {
            return Ok(());
        }
        let list =
            |all: &[&Member]| all.iter().map(|m| m.id.to_string()).collect::<Vec<_>>().join(", ");
        Err(self.refusal(format!(
            "the group would have {} voters and needs {need} of them, but only {} up and up to date ({}); start or replace {} \
             first",
            after.len(),
            if good.len() == 1 { "1 is".to_string() } else { format!("{} are", good.len()) },
            list(&good),
            list(&bad)
        )))
    }
}

fn inval(m: String) -> Error {
    Error::new(Code::Inval, m)
}

fn busy(m: String) -> Error {
    Error::new(Code::Busy, m)
}

fn one(id: u64, kind: ConfChangeType) -> ConfChangeSingle {
    let mut c = ConfChangeSingle { node_id: id, ..Default::default() };
    c.set_change_type(kind);
    c
}

fn single(id: u64, kind: ConfChangeType) -> ConfChangeV2 {
    ConfChangeV2 { changes: vec![one(id, kind)].into(), ..Default::default() }
}

/// The error that ends a member that was removed.
pub(crate) fn not_member(id: u64) -> Error {
    let m = format!(
        "metadata server {id} was removed from its group; its folder is of no further use, and \
         its id must not be used again"
    );
    Error::new(Code::NotMember, m)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group with leader 1 at entry 5000. Each word is a member: `v2` votes, `l4` is a learner; a
    /// suffix `-`: silent, `~`: far behind, `!`: with a bad disk.
    fn group(text: &str) -> Group {
        let members = text.split_whitespace().map(|w| Member {
            id: w[1..].trim_end_matches(['-', '~', '!']).parse().unwrap(),
            voter: w.starts_with('v'),
            matched: if w.ends_with('~') { 1000 } else { 5000 },
            heard: Some(Duration::from_secs(if w.ends_with('-') { 60 } else { 0 })),
            disk: if w.ends_with('!') { DISK_SLOW } else { 0 },
            ..Default::default()
        });
        let members = members.collect();
        Group {
            me: 1,
            leader: 1,
            last: 5000,
            patience: Duration::from_secs(2),
            members,
            ..Default::default()
        }
    }

    #[test]
    fn a_step_leaves_a_majority_that_works() {
        for (g, promote, remove, want) in [
            ("v1 v2 v3", &[][..], &[2][..], Ok(())),
            ("v1 v2 v3", &[], &[1], Err(Code::Inval)),
            ("v1 v2 v3", &[], &[9], Err(Code::Inval)),
            ("v1 v2 v3", &[], &[], Err(Code::Inval)),
            ("v1 v2 v3", &[], &[2, 2], Err(Code::Inval)),
            ("v1 v2 v3-", &[], &[3], Ok(())),
            ("v1 v2 v3-", &[], &[2], Err(Code::Inval)),
            ("v1 v2 v3~", &[], &[2], Err(Code::Inval)),
            ("v1 v2- v3-", &[], &[3], Err(Code::Inval)),
            ("v1 v2-", &[], &[2], Ok(())),
            ("v1 v2 v3- l4-", &[], &[4], Ok(())),
            ("v1 v2 v3 l4", &[4], &[], Ok(())),
            ("v1 v2 v3 l4~", &[4], &[], Err(Code::Busy)),
            ("v1 v2 v3 l4-", &[4], &[], Err(Code::Busy)),
            ("v1 v2 v3", &[3], &[], Err(Code::Inval)),
            ("v1 v2 v3", &[4], &[], Err(Code::Inval)),
            ("v1 v2 v3- l4", &[4], &[], Ok(())),
            ("v1 v2- v3- l4", &[4], &[], Err(Code::Inval)),
            ("v1 v2- v3- l4", &[4], &[2], Ok(())),
            ("v1 v2 v3- l4", &[4], &[3], Ok(())),
            ("v1 v2 v3 l4 l5", &[4, 5], &[2, 3], Ok(())),
        ] {
            let got = group(g).check_step(promote, remove).map(drop).map_err(|e| e.code);
            assert_eq!(got, want, "{g}: +{promote:?} -{remove:?}");
        }
        let e = group("v1 v2 v3-").check_step(&[], &[2]).unwrap_err();
        assert!(
            e.message.contains("needs 2 of them, but only 1 is up")
                && e.message.contains("start or replace 3"),
            "{e}"
        );
        // A leader that has only just begun may simply not have heard of it.
        let fresh = Group { fresh: true, ..group("v1 v2 v3-") };
        assert_eq!(fresh.check_step(&[], &[2]).unwrap_err().code, Code::Busy);
    }

    #[test]
    fn several_at_once_are_one_joint_step() {
        let g = group("v1 v2 v3 l4");
        let joint = g.check_step(&[4], &[2]).unwrap();
        assert_eq!((joint.changes.len(), joint.transition), (2, ConfChangeTransition::Implicit));
        let simple = g.check_step(&[4], &[]).unwrap();
        assert_eq!((simple.changes.len(), simple.transition), (1, ConfChangeTransition::Auto));
    }

    #[test]
    fn a_server_is_taken_in_once() {
        let g = group("v1 v2 l3");
        let add = |id| g.check_change(&MemberChange::AddLearner { id, endpoint: Endpoint::Sim(9) });
        assert_eq!(&add(4).unwrap().context[..], b"4=sim:9");
        for id in [0, 1, 3] {
            assert_eq!(add(id).unwrap_err().code, Code::Inval);
        }
    }

    #[test]
    fn the_next_leader_is_the_best_that_is_there() {
        for (g, want) in [
            ("v1 v2 v3", Some(2)),
            ("v1 v2! v3", Some(3)),
            ("v1 v2! v3!", Some(2)),
            ("v1 v2- v3!", Some(3)),
            ("v1 v2- v3~", None),
            ("v1 l2", None),
            ("v1", None),
        ] {
            assert_eq!(group(g).successor(), want, "{g}");
        }
        let mut ahead = group("v1 v2 v3");
        ahead.members[2].matched = 5001;
        assert_eq!(ahead.successor(), Some(3));
        for (g, to, want) in [
            ("v1 v2", 2, Ok(())),
            ("v1 v2", 1, Err(Code::Inval)),
            ("v1 v2", 9, Err(Code::Inval)),
            ("v1 l2", 2, Err(Code::Inval)),
            ("v1 v2-", 2, Err(Code::Inval)),
            ("v1 v2~", 2, Err(Code::Busy)),
        ] {
            assert_eq!(group(g).check_transfer(to).map_err(|e| e.code), want, "{g} -> {to}");
        }
    }
}
