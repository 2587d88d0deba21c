//! Whether a cluster is healthy, from the answers of its servers. One judgement for `strake
//! status`, `strake wait` and scripts. The checks are in `strake_proto::health`; `docs/health.md`
//! explains them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use strake_mds::cluster::moves::is_moving;
use strake_proto::{
    Code,
    health::{self as checks, Check, Severity},
    map::ChainExt,
    pb,
};
use strake_term::size;

use crate::answers::{Answer, Behind, percent};

/// From what share of its capacity a target or a rack counts as nearly full, in percent.
const NEARLY_FULL: f64 = 85.0;
/// From here on a target counts as full: what is left is less than a few large files.
const FULL: f64 = 99.0;
/// How far the clocks of two servers may differ: file times come from them.
const CLOCKS_MS: u64 = 2000;

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reason {
    pub check: Check,
    /// What is wrong: one text, or one for each server.
    pub texts: Vec<String>,
    /// What to do. Empty where the texts say it.
    pub next: String,
}

/// How many copies there are, beside how many there should be. Bytes are estimates: a target's
/// bytes, divided by its chains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Copies {
    pub chains: usize,
    /// Chains that lack a copy.
    pub lacking: usize,
    /// Chains of which replicas are moving to other targets.
    pub moving: usize,
    /// Bytes that are to be copied until none lacks one.
    pub to_copy: u64,
    /// Bytes of which only one copy is in sync, and more are wanted.
    pub single: u64,
}

/// The judgement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Health {
    /// What is wrong, the worst first.
    pub reasons: Vec<Reason>,
    pub copies: Copies,
}

impl Health {
    pub fn of(answers: &[Answer], map: Option<&pb::ClusterMap>, behind: &[Behind]) -> Health {
        let mut found = Found::default();
        found.servers(answers, behind);
        found.notices(answers);
        found.clocks(answers);
        let known = answers.iter().any(|a| a.reply.is_ok());
        if known && map.is_none_or(|m| m.chains.is_empty()) {
            let next = "start storage servers, as many as `expect_targets` says";
            found.add(checks::NO_CHAINS, "no chains yet: no file data can be stored", next);
        }
        let copies = map.map(Copies::of).unwrap_or_default();
        if let Some(map) = map {
            found.chains(map, &copies);
            found.targets(map);
            found.space(map);
        }
        let order = |c: &Check| checks::ALL.iter().position(|a| a.code == c.code);
        let mut reasons: Vec<Reason> = found.0.into_values().collect();
        reasons.sort_by_key(|r| order(&r.check));
        Health { reasons, copies }
    }

    /// How bad it is. `None`: nothing is wrong.
    pub fn severity(&self) -> Option<Severity> {
        self.reasons.iter().map(|r| r.check.severity).max()
    }

    /// `OK`, `WARN` or `ERROR`.
    pub fn word(&self) -> &'static str {
        match self.severity() {
            None => "OK",
            Some(Severity::Warn) => "WARN",
            Some(Severity::Error) => "ERROR",
        }
    }

    /// Whether all data has the copies that it should, and all servers are there.
    pub fn is_redundant(&self) -> bool {
        self.reasons.iter().all(|r| !r.check.redundancy)
    }

    /// The exit status. 1: no server answers. 2: data is lost or out of service, or one more
    /// failure may cost some. What moves does not count.
    pub fn exit_status(&self) -> u8 {
        let silent = self.reasons.iter().any(|r| r.check == checks::NO_ANSWER);
        match self.severity() {
            _ if silent => 1,
            Some(Severity::Error) => 2,
            _ if !self.is_redundant() => 2,
            _ => 0,
        }
    }

    /// Its first lines of `strake status`.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.word());
        for r in &self.reasons {
            let next = if r.next.is_empty() { String::new() } else { format!("; {}", r.next) };
            text += &format!("  {}: {}{next}\n", r.check.code, r.texts.join("\n    "));
        }
        if self.copies.moving > 0 {
            text += &format!(
                "  {} of {} chains move to other targets, with all their copies\n",
                self.copies.moving, self.copies.chains
            );
        }
        text
    }

    /// The same for scripts.
    pub fn json(&self) -> Value {
        let reason = |r: &Reason| {
            let severity = if r.check.severity == Severity::Error { "ERROR" } else { "WARN" };
            json!({ "code": r.check.code, "severity": severity, "redundancy": r.check.redundancy,
                "texts": r.texts, "next": r.next })
        };
        let c = &self.copies;
        json!({
            "state": self.word(), "redundant": self.is_redundant(),
            "reasons": self.reasons.iter().map(reason).collect::<Vec<_>>(),
            "chains": c.chains, "lacking_copies": c.lacking, "moving": c.moving,
            "bytes_to_copy": c.to_copy, "bytes_with_one_copy": c.single,
        })
    }
}

/// What was found so far, by code.
#[derive(Default)]
struct Found(BTreeMap<&'static str, Reason>);

impl Found {
    fn add(&mut self, check: Check, text: impl Into<String>, next: impl Into<String>) {
        let new = || Reason { check, texts: Vec::new(), next: next.into() };
        let (reason, text) = (self.0.entry(check.code).or_insert_with(new), text.into());
        // Each metadata server says the same of the cluster.
        if !reason.texts.contains(&text) {
            reason.texts.push(text);
        }
    }

    fn servers(&mut self, answers: &[Answer], behind: &[Behind]) {
        let known: Vec<&pb::StatusReply> =
            answers.iter().filter_map(|a| a.reply.as_ref().ok()).collect();
        if known.is_empty() {
            let next = "start the servers, or name others";
            self.add(checks::NO_ANSWER, "no server answers", next);
            for a in answers {
                let why = a.reply.as_ref().err().map_or("", |e| &e.message);
                self.add(checks::NO_ANSWER, format!("{}: {why}", a.addr), next);
            }
            return;
        }
        for a in answers {
            match &a.reply {
                Err(e) if e.code == Code::OpNotSupp => {
                    let text = format!("{}: {}", a.addr, e.message);
                    self.add(checks::OLD_PROGRAM, text, "upgrade it, or ask it by --admin");
                }
                Err(e) => {
                    let text = format!("{} does not answer: {}", a.addr, e.message);
                    self.add(checks::SERVER_SILENT, text, "start it, or see its log");
                }
                Ok(_) => {}
            }
        }
        if !is_led(&known) {
            let next = "a majority of them must run and reach each other";
            self.add(checks::NO_LEADER, "no metadata server leads", next);
        }
        behind.iter().for_each(|b| self.add(checks::MEMBER_BEHIND, b.why(), ""));
    }

    /// What servers said themselves.
    fn notices(&mut self, answers: &[Answer]) {
        for s in answers.iter().filter_map(|a| a.reply.as_ref().ok()) {
            for (text, code) in s.notices.iter().zip(&s.notice_codes) {
                if let Some(check) = checks::check(code) {
                    let of_cluster = [checks::TARGET_SLOW, checks::RECOVERY_WAITS].contains(&check);
                    let text =
                        if of_cluster { text.clone() } else { format!("{}: {text}", s.name) };
                    self.add(check, text, "");
                }
            }
            // What programs from before codes say otherwise.
            if s.notice_codes.is_empty() && !s.refused.is_empty() {
                let text = format!("{} does not serve {} of its targets", s.name, s.refused.len());
                self.add(checks::TARGET_REFUSED, text, "see its notes");
            }
            let lost: u64 = s.targets.iter().map(|t| t.lost).sum();
            if s.notice_codes.is_empty() && lost > 0 {
                let text = format!("{}: {lost} chunks have no good copy", s.name);
                self.add(checks::NO_GOOD_COPY, text, "`strake scrub` names the files");
            }
        }
    }

    fn clocks(&mut self, answers: &[Answer]) {
        let mut ahead: Vec<(i64, &str)> = answers
            .iter()
            .filter_map(|a| Some((a.reply.as_ref().ok()?, a.asked_ms)))
            .filter(|(s, _)| s.unix_ms != 0)
            .map(|(s, asked)| (s.unix_ms.wrapping_sub(asked) as i64, s.name.as_str()))
            .collect();
        ahead.sort_unstable();
        let Some((usual, _)) = ahead.get(ahead.len() / 2).copied() else { return };
        for (ms, name) in ahead {
            let off = ms.wrapping_sub(usual);
            if off.unsigned_abs() > CLOCKS_MS {
                let way = if off > 0 { "ahead of" } else { "behind" };
                let text = format!(
                    "the clock of {name} is {} s {way} the others'",
                    off.unsigned_abs() / 1000
                );
                self.add(checks::CLOCK_OFF, text, "let NTP or chrony set it");
            }
        }
    }

    fn chains(&mut self, map: &pb::ClusterMap, copies: &Copies) {
        let count = |f: &dyn Fn(&pb::Chain) -> bool| map.chains.iter().filter(|c| f(c)).count();
        let gone = |c: &pb::Chain| !c.lost && c.serving().next().is_none();
        // Chains of each number of copies are made; those of one hold nothing unless files ask for
        // one.
        let is_usual = |c: &pb::Chain| c.preferred.len() > 1 || map.default_copies <= 1;
        let all = map.chains.len();
        match count(&|c| gone(c) && is_usual(c)) {
            0 => {}
            n => self.add(
                checks::NO_COPY,
                format!("{n} of {all} chains have no copy in service: files there wait"),
                "start the servers that hold them",
            ),
        }
        match count(&|c| gone(c) && !is_usual(c)) {
            0 => {}
            n => self.add(
                checks::SINGLE_COPY_AWAY,
                format!(
                    "{n} of {all} chains of one copy are out of service: files with one copy \
                     there wait"
                ),
                "start the servers that hold them",
            ),
        }
        match count(&|c| c.lost) {
            0 => {}
            n => self.add(
                checks::DATA_LOST,
                format!("{n} of {all} chains lost their data with targets that were given up"),
                "`strake fsck` names the files; `strake target keep` takes back a target that \
                 returns",
            ),
        }
        match count(&|c| is_short(map, c) && !gone(c)) {
            0 => {}
            n => self.add(
                checks::WRITES_REFUSED,
                format!(
                    "{n} of {all} chains take no writes: fewer copies are in sync than min_copies \
                     = {} asks for",
                    map.min_copies
                ),
                "start the servers that are down",
            ),
        }
        if copies.lacking > 0 {
            let single = match copies.single {
                0 => String::new(),
                n => format!(", about {} have one copy", size(n)),
            };
            self.add(
                checks::COPIES_MISSING,
                format!("{} of {all} chains lack a copy{single}", copies.lacking),
                "`strake wait --redundant` waits until they are made",
            );
        }
    }

    fn targets(&mut self, map: &pb::ClusterMap) {
        for t in map.targets.iter().filter(|t| !t.alive && !t.given_up) {
            let node = map.nodes.iter().find(|n| n.id == t.node).map_or("?", |n| n.name.as_str());
            let next = "start its server; `strake target give-up` if it never comes back";
            self.add(
                checks::TARGET_DEAD,
                format!("target {} of {node} is out of service", t.id),
                next,
            );
        }
    }

    fn space(&mut self, map: &pb::ClusterMap) {
        let mut racks: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        let next = "add targets, or remove files; `strake target list`";
        for t in map.targets.iter().filter(|t| t.alive && !t.draining) {
            let text = format!("target {} is {} % full", t.id, percent(t));
            if percent(t) >= FULL {
                self.add(checks::TARGET_FULL, text, next);
            } else if percent(t) >= NEARLY_FULL {
                self.add(checks::NEARLY_FULL, text, next);
            }
            let node = map.nodes.iter().find(|n| n.id == t.node);
            let sum = racks.entry(node.map_or("", |n| n.rack.as_str())).or_default();
            *sum = (sum.0.saturating_add(t.used), sum.1.saturating_add(t.capacity));
        }
        for (rack, (used, capacity)) in racks.into_iter().filter(|(rack, _)| !rack.is_empty()) {
            let share = used as f64 * 100.0 / capacity.max(1) as f64;
            if share >= NEARLY_FULL {
                self.add(checks::NEARLY_FULL, format!("rack {rack} is {share:.0} % full"), next);
            }
        }
    }
}

/// Whether a notice has no place among the reasons: nothing is wrong, or only a newer program knows
/// what.
pub(crate) fn is_unknown(code: &str) -> bool {
    checks::check(code).is_none()
}

/// Whether a metadata server leads. If the leader itself was not asked, the word of the others
/// counts. Storage servers alone know no leader.
fn is_led(known: &[&pb::StatusReply]) -> bool {
    let rafts: Vec<&pb::RaftStatus> = known.iter().filter_map(|s| s.raft.as_ref()).collect();
    let confirmed = |id: u64| rafts.iter().find(|r| r.id == id).is_none_or(|r| r.leader == id);
    rafts.is_empty() || rafts.iter().any(|r| r.leader != 0 && confirmed(r.leader))
}

/// Whether the chain takes no writes, because it has fewer copies in sync than the cluster
/// requires.
pub(crate) fn is_short(map: &pb::ClusterMap, c: &pb::Chain) -> bool {
    !c.lost && c.serving().count() < c.preferred.len().min(map.min_copies as usize)
}

impl Copies {
    fn of(map: &pb::ClusterMap) -> Copies {
        let mut chains_of: BTreeMap<u32, u64> = BTreeMap::new();
        for r in map.chains.iter().flat_map(|c| &c.replicas) {
            *chains_of.entry(r.target).or_default() += 1;
        }
        let used: BTreeMap<u32, u64> = map.targets.iter().map(|t| (t.id, t.used)).collect();
        let bytes = |t: u32| {
            used.get(&t).copied().unwrap_or(0) / chains_of.get(&t).copied().unwrap_or(1).max(1)
        };
        let mut all = Copies { chains: map.chains.len(), ..Copies::default() };
        for c in map.chains.iter().filter(|c| !c.lost) {
            let serving: BTreeSet<u32> = c.serving().collect();
            let lacks = (c.preferred.len() as u64).saturating_sub(serving.len() as u64);
            let of_one = serving.iter().map(|t| bytes(*t)).min().unwrap_or(0);
            if lacks > 0 && !serving.is_empty() {
                all.lacking += 1;
                all.to_copy = all.to_copy.saturating_add(of_one.saturating_mul(lacks));
                if serving.len() == 1 {
                    all.single = all.single.saturating_add(of_one);
                }
            } else if lacks == 0 && is_moving(c) {
                all.moving += 1;
            }
        }
        all
    }
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;
