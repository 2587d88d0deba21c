//! Asks the metadata leader to repair the findings, then looks again.
//!
//! Chunks to be deleted go into the same queues as the chunks of removed files, so that they are
//! deleted even if servers fail meanwhile. The metadata servers act only if their own state agrees
//! with the request, so a change since the look does no harm.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::{Duration, Instant},
};

use bytes::Bytes;
use prost::Message as _;
use serde_json::{Value, json};
use strake_fabric::{Connection, Message};
use strake_proto::{ChunkId, Code, Ino, Result, opcode, pb};

use crate::{
    findings::{Finding, Place},
    look::{Checker, Outcome, written},
};
use pb::{members_request::Change, repair::What};

/// How long deletions may take before they are reported as not done yet.
const DELETION: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(300);

/// What became of a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is gone; the text says how.
    Repaired(&'static str),
    /// It is still there.
    Left {
        /// The cause.
        why: String,
        /// What an admin can do.
        next: &'static str,
    },
}

impl Fate {
    /// Whether it is gone.
    pub fn is_repaired(&self) -> bool {
        matches!(self, Fate::Repaired(_))
    }

    /// As a JSON entry of the report; `finding` is the text of the finding.
    pub fn as_json(&self, finding: &str) -> Value {
        match self {
            Fate::Repaired(what) => json!({ "finding": finding, "repaired": true, "what": what }),
            Fate::Left { why, next } => {
                json!({ "finding": finding, "repaired": false, "why": why, "next": next })
            }
        }
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Repaired(what) => write!(f, "repaired: {what}"),
            Fate::Left { why, next } => write!(f, "not repaired: {why}; {next}"),
        }
    }
}

/// What one request is about. Findings at several targets may need the same request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Job {
    /// `misplaced`: a file has this data, but on another chain.
    Chunks {
        ino: Ino,
        data: u64,
        misplaced: bool,
    },
    End {
        ino: Ino,
        data: u64,
        size: u64,
    },
    Name {
        parent: Ino,
        name: Vec<u8>,
        ino: Ino,
    },
}

impl Job {
    /// The inode and data that the metadata servers' deletion queues handle; `None` for names.
    fn queued(&self) -> Option<(Ino, u64)> {
        match self {
            Job::Chunks { ino, data, .. } | Job::End { ino, data, .. } => Some((*ino, *data)),
            Job::Name { .. } => None,
        }
    }

    fn request(&self, chains: &BTreeSet<u32>) -> pb::Repair {
        let what = match self {
            Job::Chunks { ino, data, misplaced } => What::Chunks(pb::RepairChunks {
                ino: *ino,
                data_id: *data,
                chains: chains.iter().copied().collect(),
                misplaced: *misplaced,
            }),
            Job::End { ino, data, size } => {
                What::End(pb::RepairEnd { ino: *ino, data_id: *data, size: *size })
            }
            Job::Name { parent, name, ino } => What::Name(pb::RepairName {
                parent: *parent,
                name: Bytes::copy_from_slice(name),
                ino: *ino,
            }),
        };
        pb::Repair { what: Some(what) }
    }

    fn done(&self) -> &'static str {
        match self {
            Job::Chunks { .. } => "the chunks are deleted",
            Job::End { .. } => "the file is truncated to its size",
            Job::Name { .. } => "the entry is removed",
        }
    }
}

/// The requests to send, each with the chains it is about; and for each finding the job that
/// repairs it, or why there is none.
struct Plan {
    jobs: BTreeMap<Job, BTreeSet<u32>>,
    each: Vec<Result<Job, Fate>>,
}

fn left(why: impl Into<String>, next: &'static str) -> Fate {
    Fate::Left { why: why.into(), next }
}

/// Reasons not to clear a chain that a file's layout does not use. Clearing such a chain removes
/// all that the file has there: it is all or nothing. Each entry is inode, data and chain.
#[derive(Default)]
struct Protected {
    /// [`Finding::only_copy`] of both looks.
    only: BTreeSet<(Ino, u64, u32)>,
    /// The file has chunks here beyond its end, and a client has it open for writing: the end may
    /// still move past them.
    open: BTreeSet<(Ino, u64, u32)>,
}

impl Protected {
    fn why(&self, chunk: &ChunkId, chain: u32, place: &Place) -> Option<Fate> {
        let at = (chunk.ino, chunk.data, chain);
        if self.only.contains(&at) {
            let why = if place.may_be_only() {
                "the chain where it belongs lacks all or part of it: that is a hole, or this is \
                 the only copy"
            } else {
                "a repair removes all that the file has on this chain, and some of that may be \
                 the only copy"
            };
            let next = "compare the file with another copy of it; if it is right, or after you \
                        wrote it anew, run fsck again";
            return Some(left(why, next));
        }
        let open = self.open.contains(&at);
        open.then(|| {
            left(
                "a client has the file open for writing",
                "run fsck again when no client has it open for writing",
            )
        })
    }
}

/// Where files have chunks that may be removed only because they lie beyond the file's end.
fn beyond(findings: &[Finding]) -> BTreeSet<(Ino, u64, u32)> {
    let of = |f: &Finding| match f {
        Finding::Misplaced { chunk, chain, place, .. }
            if place.beyond.is_some() && !place.there =>
        {
            Some((chunk.ino, chunk.data, *chain))
        }
        _ => None,
    };
    findings.iter().filter_map(of).collect()
}

impl Plan {
    fn new(findings: &[Finding], protected: &Protected) -> Plan {
        let each: Vec<_> = findings.iter().map(|f| job(f, protected)).collect();
        let mut jobs: BTreeMap<Job, BTreeSet<u32>> = BTreeMap::new();
        for (f, job) in findings.iter().zip(&each) {
            let Ok(job) = job else { continue };
            let chains = jobs.entry(job.clone()).or_default();
            match f {
                Finding::Leaked { chains: on, .. } | Finding::Tombstones { chains: on, .. } => {
                    chains.extend(on)
                }
                Finding::Misplaced { chain, .. } if matches!(job, Job::Chunks { .. }) => {
                    chains.insert(*chain);
                }
                _ => {}
            }
        }
        Plan { jobs, each }
    }
}

/// What repairs a finding.
fn job(f: &Finding, protected: &Protected) -> Result<Job, Fate> {
    match f {
        Finding::Leaked { ino, data, .. } | Finding::Tombstones { ino, data, .. } => {
            Ok(Job::Chunks { ino: *ino, data: *data, misplaced: false })
        }
        Finding::BeyondEnd { chunk, size, .. } => {
            Ok(Job::End { ino: chunk.ino, data: chunk.data, size: *size })
        }
        Finding::Dangling { parent, name, ino, gone: true, .. } => {
            Ok(Job::Name { parent: *parent, name: name.clone(), ino: *ino })
        }
        Finding::Dangling { .. } => Err(left(
            "the inode may exist, but cannot be read now",
            "check that all metadata servers are well (`strake status`) and run fsck again",
        )),
        Finding::Misplaced { chunk, place, .. } if place.beside_others => match place.beyond {
            // Truncating a file removes everything from its end on, on each of its chains.
            Some(size) => Ok(Job::End { ino: chunk.ino, data: chunk.data, size }),
            None => Err(left(
                "the chain has other chunks of the file and cannot be cleared, and the chunk is before \
                 the file's end, so truncation does not remove it",
                "copy the file, compare it, and remove the old one",
            )),
        },
        Finding::Misplaced { chunk, chain, place, .. } => match protected.why(chunk, *chain, place)
        {
            Some(fate) => Err(fate),
            None => Ok(Job::Chunks { ino: chunk.ino, data: chunk.data, misplaced: true }),
        },
        Finding::Diverged { .. } => Err(left(
            "fsck cannot tell which replica is right",
            "run `strake scrub start --wait` and fsck again; if the finding stays, run `strake \
             target drain` for the target with the older version",
        )),
        Finding::TwoParents { .. } => Err(left(
            "fsck cannot tell which name is right",
            "move the content of the directory to a new one and tell the developers",
        )),
        Finding::Lost { .. } => Err(left(
            "its last copies were given up",
            "restore the file from elsewhere, or run `strake target keep` if the target is back",
        )),
        Finding::Missing { .. } => Err(left(
            "there is no copy to repair from; reads return zeros there",
            "restore the file from elsewhere",
        )),
        Finding::Unreadable { .. } => Err(left(
            "no good copy was found",
            "see `strake scrub`, and restore the file from elsewhere",
        )),
    }
}

impl Checker {
    /// Repairs what can be repaired. Returns the fate of each finding, in the same order.
    pub async fn repair(&mut self, seen: &Outcome) -> Result<Vec<Fate>> {
        let findings = &seen.findings;
        let plan = Plan::new(findings, &self.protected(seen).await?);
        let mut refused = BTreeMap::new();
        let count = plan.jobs.len();
        for (n, (job, chains)) in plan.jobs.iter().enumerate() {
            (self.progress)(format!("repair {} of {count}", n + 1));
            let request = job.request(chains);
            match self.of_leader(async |c| ask(c, request.clone()).await).await {
                Ok(()) => {}
                // It is gone: by an attempt whose answer was lost, or without our help. The next
                // look tells.
                Err(e) if e.code == Code::NoEnt => {}
                Err(e) => drop(refused.insert(job, e)),
            }
        }
        if refused.len() == count {
            return Ok(plan
                .each
                .iter()
                .map(|j| j.as_ref().map_or_else(Fate::clone, |j| said_no(&refused[j])))
                .collect());
        }
        let waiting = self.deletions(&plan).await?;
        let mut now = self.pass().await?;
        if findings.iter().any(|f| again(f, &now)) {
            (self.progress)("something is still there; checking again".into());
            tokio::time::sleep(Duration::from_secs(3)).await;
            now = self.pass().await?;
        }
        let fate = |(f, job): (&Finding, &Result<Job, Fate>)| match job {
            Ok(job) => match refused.get(job) {
                Some(e) => said_no(e),
                None if waiting.contains(job) => left(
                    "the metadata servers repeat its deletion until all storage servers that have \
                     chunks answer",
                    "see `strake status` for what is missing, and run fsck again",
                ),
                None => proven(f, &now, job.done()),
            },
            // Another repair may have removed it, too.
            Err(_) if !is_judged_by_reading(f) && is_gone(f, &now) => {
                Fate::Repaired("it is gone because of another repair")
            }
            Err(fate) => fate.clone(),
        };
        Ok(findings.iter().zip(&plan.each).map(fate).collect())
    }

    async fn protected(&self, seen: &Outcome) -> Result<Protected> {
        let mut open = beyond(&seen.findings);
        if !open.is_empty() {
            let inos: Vec<Ino> =
                open.iter().map(|at| at.0).collect::<BTreeSet<_>>().into_iter().collect();
            let written = self.of_leader(async |c| written(c, &inos).await).await?;
            open.retain(|at| written.contains(&at.0));
        }
        Ok(Protected { only: seen.only_copies.clone(), open })
    }

    /// Waits until the requested deletions are done. Returns the jobs that are not done in time.
    async fn deletions(&mut self, plan: &Plan) -> Result<BTreeSet<Job>> {
        let start = Instant::now();
        loop {
            let going = self.going().await?;
            let waiting =
                plan.jobs.keys().filter(|j| j.queued().is_some_and(|key| going.contains_key(&key)));
            let waiting: BTreeSet<Job> = waiting.cloned().collect();
            if waiting.is_empty() || start.elapsed() > DELETION {
                return Ok(waiting);
            }
            (self.progress)(format!("{} deletions are not complete yet", waiting.len()));
            tokio::time::sleep(POLL).await;
        }
    }
}

async fn ask(c: &dyn Connection, repair: pb::Repair) -> Result<()> {
    let request = pb::MembersRequest { change: Some(Change::Repair(repair)), levels: false };
    let body = Bytes::from(request.encode_to_vec());
    c.call(Message::new(opcode::MEMBERS, body), Duration::from_secs(10)).await.map(drop)
}

fn said_no(e: &strake_proto::Error) -> Fate {
    let next = match e.code {
        Code::Busy => "run fsck again when it is not in use",
        Code::Exist => {
            "run fsck again; if the finding stays, no path leads to the inode: tell the developers"
        }
        Code::Inval => {
            "if the metadata was recovered from an older state, see \"When the group is lost\" in docs/operations.md"
        }
        _ => "run fsck again",
    };
    left(format!("the metadata servers say: {}", e.message), next)
}

fn proven(f: &Finding, now: &Outcome, done: &'static str) -> Fate {
    if again(f, now) {
        let next = "run fsck again; metadata servers of an older version do not know these repairs";
        return left("it is still there", next);
    }
    match f.targets().iter().find(|t| !now.listed.contains(t)) {
        Some(t) => {
            left(format!("target {t} cannot be asked now"), "run fsck again when it is back")
        }
        None => Fate::Repaired(done),
    }
}

fn is_judged_by_reading(f: &Finding) -> bool {
    matches!(f, Finding::Unreadable { .. })
}

fn is_gone(f: &Finding, now: &Outcome) -> bool {
    !again(f, now) && f.targets().iter().all(|t| now.listed.contains(t))
}

/// Whether a later look found the same inconsistency, or a part of it.
fn again(f: &Finding, now: &Outcome) -> bool {
    use Finding::{BeyondEnd, Dangling, Diverged, Leaked, Misplaced, Tombstones};
    now.findings.iter().any(|n| match (f, n) {
        (Leaked { ino, data, target, .. }, Leaked { ino: i, data: d, target: t, .. }) => {
            (ino, data, target) == (i, d, t)
        }
        (Tombstones { ino, data, target, .. }, Tombstones { ino: i, data: d, target: t, .. }) => {
            (ino, data, target) == (i, d, t)
        }
        (
            Misplaced { chunk, chain, target, .. },
            Misplaced { chunk: c, chain: on, target: t, .. },
        ) => (chunk, chain, target) == (c, on, t),
        (BeyondEnd { chunk, target, .. }, BeyondEnd { chunk: c, target: t, .. }) => {
            (chunk, target) == (c, t)
        }
        (Dangling { parent, name, ino, .. }, Dangling { parent: p, name: n, ino: i, .. }) => {
            (parent, name, ino) == (p, n, i)
        }
        (Diverged { chunk, chain, .. }, Diverged { chunk: c, chain: on, .. }) => {
            (chunk, chain) == (c, on)
        }
        _ => f == n,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leak(target: u32, chain: u32) -> Finding {
        Finding::Leaked { ino: 8, data: 5, target, chains: BTreeSet::from([chain]), chunks: 3 }
    }

    fn misplaced(index: u64, there: bool, beside_others: bool) -> Finding {
        let (chunk, beyond) = (ChunkId { ino: 7, data: 1, index }, (index > 5).then_some(500));
        let place = Place { chain: 2, there, beside_others, beyond };
        Finding::Misplaced { chunk, path: "/f".into(), chain: 1, target: 1, place }
    }

    fn plan(findings: &[Finding], only: &BTreeSet<(Ino, u64, u32)>) -> Plan {
        Plan::new(findings, &Protected { only: only.clone(), ..Protected::default() })
    }

    #[test]
    fn what_is_at_several_targets_is_asked_for_once() {
        let plan = plan(&[leak(1, 4), leak(2, 4), leak(3, 6)], &BTreeSet::new());
        let jobs: Vec<_> = plan.jobs.iter().collect();
        assert_eq!(
            jobs,
            [(&Job::Chunks { ino: 8, data: 5, misplaced: false }, &BTreeSet::from([4, 6]))]
        );
        assert!(plan.each.iter().all(Result::is_ok));
    }

    #[test]
    fn tombstones_go_with_the_chunks_of_the_same_data() {
        let tombstones = Finding::Tombstones {
            ino: 8,
            data: 5,
            target: 2,
            chains: BTreeSet::from([9]),
            tombstones: 4,
        };
        let plan = plan(&[leak(1, 4), tombstones.clone()], &BTreeSet::new());
        let jobs: Vec<_> = plan.jobs.iter().collect();
        assert_eq!(
            jobs,
            [(&Job::Chunks { ino: 8, data: 5, misplaced: false }, &BTreeSet::from([4, 9]))]
        );
        let now = Outcome {
            listed: BTreeSet::from([2]),
            findings: vec![tombstones.clone()],
            ..Default::default()
        };
        assert!(!proven(&tombstones, &now, "done").is_repaired());
    }

    #[test]
    fn what_may_be_the_only_copy_stays() {
        let only = |findings: &[Finding]| findings.iter().filter_map(Finding::only_copy).collect();
        let jobs = |findings: &[Finding]| plan(findings, &only(findings)).jobs.len();
        assert_eq!(jobs(&[misplaced(0, true, false), misplaced(1, true, false)]), 1);
        assert_eq!(
            jobs(&[misplaced(0, true, false), misplaced(1, false, false)]),
            0,
            "a chain is cleared as a whole"
        );
        assert_eq!(jobs(&[misplaced(0, true, true)]), 0);
        let in_one_look_only = only(&[misplaced(1, false, false)]);
        assert_eq!(plan(&[misplaced(0, true, false)], &in_one_look_only).jobs.len(), 0);
    }

    #[test]
    fn what_is_beyond_the_end_goes_though_its_chain_does_not_have_it() {
        let only = |findings: &[Finding]| findings.iter().filter_map(Finding::only_copy).collect();
        let jobs = |findings: &[Finding]| {
            plan(findings, &only(findings)).jobs.into_iter().collect::<Vec<_>>()
        };
        let cleared = Job::Chunks { ino: 7, data: 1, misplaced: true };
        assert_eq!(jobs(&[misplaced(6, false, false)]), [(cleared, BTreeSet::from([1]))]);
        let both = [misplaced(6, false, false), misplaced(1, false, false)];
        assert_eq!(jobs(&both), [], "a chain is cleared as a whole");
        let said = |f: &Finding, protected: &Protected| job(f, protected).unwrap_err().to_string();
        let protected = Protected { only: only(&both), ..Protected::default() };
        assert!(
            said(&both[0], &protected).contains("some of that may be the only copy")
                && said(&both[1], &protected).contains("a hole")
        );
        // On a chain that the file uses, truncation removes it.
        let cut = Job::End { ino: 7, data: 1, size: 500 };
        assert_eq!(
            jobs(&[misplaced(6, false, true), misplaced(1, false, true)]),
            [(cut, BTreeSet::new())]
        );
        // A client that writes the file may be about to report an end that far.
        let open = beyond(&both);
        assert_eq!(open, BTreeSet::from([(7, 1, 1)]));
        let protected = Protected { open, ..Protected::default() };
        assert!(said(&both[0], &protected).contains("open for writing"));
        assert_eq!(
            Plan::new(&[misplaced(0, true, false), both[0].clone()], &protected).jobs.len(),
            0
        );
        assert_eq!(
            beyond(&[misplaced(6, true, false), misplaced(1, false, false)]),
            BTreeSet::new()
        );
    }

    #[test]
    fn an_inode_that_cannot_be_read_keeps_its_name() {
        let dangling = |gone| Finding::Dangling {
            path: "/x".into(),
            parent: 1,
            name: b"x".to_vec(),
            ino: 9,
            error: "e".into(),
            gone,
        };
        assert!(job(&dangling(true), &Protected::default()).is_ok());
        assert!(job(&dangling(false), &Protected::default()).is_err());
    }

    #[test]
    fn what_cannot_be_looked_at_is_not_called_repaired() {
        let mut now = Outcome { listed: BTreeSet::from([1]), ..Default::default() };
        assert_eq!(proven(&leak(1, 4), &now, "done"), Fate::Repaired("done"));
        assert!(!proven(&leak(2, 4), &now, "done").is_repaired());
        now.findings = vec![Finding::Leaked {
            ino: 8,
            data: 5,
            target: 1,
            chains: BTreeSet::from([4]),
            chunks: 1,
        }];
        assert!(!proven(&leak(1, 4), &now, "done").is_repaired(), "some are left");
    }
}
