//! What a folder holds, and which of several folders a group should be recovered from.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use protobuf::Message as _;
use raft::eraftpb::{ConfChangeV2, ConfState, EntryType};
use strake_fabric::Endpoint;
use strake_proto::{Code, Error, Incarnation, Result, map::ROLE_MDS, pb};
use strake_store::MetaStore;

use super::{CACHE, membership};
use crate::{
    consensus::{DiskLog, LogImage},
    data_dir::{self, LOG, Record, STATE, Sizes, State},
    namespace::Namespace,
};

/// A member as a folder knows it: its id, and its endpoint, if known.
pub type Known = (u64, Option<String>);

/// What a folder of a metadata server holds.
#[derive(Clone, Debug)]
pub struct Report {
    pub dir: PathBuf,
    pub member: u64,
    pub cluster: [u8; 16],
    pub identity: State,
    /// The log's term, and index and term of the last entry; or why it cannot be used.
    pub log: Result<LogReport>,
    pub fs_name: String,
    pub incarnation: Incarnation,
    pub map_version: u64,
    /// Index and term of the last entry that the state has applied.
    pub applied: (u64, u64),
    pub voters: Vec<Known>,
    pub learners: Vec<Known>,
    pub inodes: u64,
    /// Why nothing can be recovered from it.
    pub void: Option<String>,
}

#[derive(Clone, Debug)]
pub struct LogReport {
    pub term: u64,
    pub first: u64,
    pub last: (u64, u64),
    /// Entries after the last applied one, and whether one of them changes the members.
    pub unapplied: u64,
    pub changes_members: bool,
}

impl Report {
    /// Era, and term and index of the last entry, that can be recovered from it: the folder with
    /// the highest rank knows most. `None`: nothing can be recovered.
    pub fn rank(&self) -> Option<(u64, u64, u64)> {
        let applied = (self.applied.1, self.applied.0);
        let logged = self.log.as_ref().map_or(applied, |l| (l.last.1, l.last.0));
        let (term, index) = logged.max(applied);
        self.void.is_none().then_some((self.incarnation.era(), term, index))
    }

    /// Whether it is the only voter of its group, with all it needs: then its server only needs to
    /// be started.
    pub fn is_whole(&self) -> bool {
        let alone = self.voters.len() == 1 && self.voters[0].0 == self.member;
        self.identity == State::Complete && alone && self.log.is_ok() && self.void.is_none()
    }
}

/// Of several folders, the one that a group should be recovered from.
pub fn best(reports: &[Report]) -> Option<&Report> {
    reports
        .iter()
        .filter(|r| r.rank().is_some())
        .max_by_key(|r| (r.rank(), std::cmp::Reverse(r.member)))
}

/// Whether these folders together cannot lack anything that was ever acknowledged: every majority
/// of the voters includes one of them. (With an odd number of voters they are then a majority
/// themselves.)
pub fn is_complete(reports: &[Report]) -> bool {
    let Some(best) = best(reports) else { return false };
    let sure = |r: &&Report| {
        r.rank().is_some()
            && r.incarnation == best.incarnation
            && r.log.as_ref().is_ok_and(|l| !l.changes_members)
    };
    let voters: Vec<u64> = best.voters.iter().map(|v| v.0).collect();
    let mut seen: Vec<u64> =
        reports.iter().filter(sure).map(|r| r.member).filter(|m| voters.contains(m)).collect();
    seen.sort_unstable();
    seen.dedup();
    best.log.as_ref().is_ok_and(|l| !l.changes_members)
        && seen.len() + voters.len() / 2 + 1 > voters.len()
}

/// A locked folder and what it holds.
pub(super) struct Folder {
    pub dir: PathBuf,
    pub record: Record,
    pub log: Result<LogImage>,
    pub store: Arc<dyn MetaStore>,
    pub conf: ConfState,
    pub map: pb::ClusterMap,
    pub report: Report,
    _lock: File,
}

/// Opens the folder of a server that does not run (`Busy` if it does), as a start would; changes
/// none of its contents.
pub(super) fn open(dir: &Path) -> Result<Folder> {
    let absent = |m: &str| Error::new(Code::NoEnt, format!("{}: {m}", dir.display()));
    if !dir.is_dir() {
        return Err(absent("there is no such folder"));
    }
    let record = Record::read(dir)?
        .ok_or_else(|| absent("this is not a metadata server's folder: it has no identity"))?;
    let lock = data_dir::lock(dir)
        .map_err(|e| Error::new(e.code, format!("{}; stop that server first", e.message)))?;
    if !dir.join(STATE).is_dir() {
        return Err(absent("it holds no state, so nothing can be recovered from it"));
    }
    let store: Arc<dyn MetaStore> = Arc::new(Sizes::of(dir)?.store(dir, CACHE)?);
    let log = DiskLog::peek(&dir.join(LOG), record.cluster, record.member);
    let state = Namespace::open(store.clone()).map_err(|e| data_dir::at(dir, e))?;
    let (header, map) = (state.header(), state.map().map.clone());
    let mut conf = membership(&header.conf_state)?;
    if conf.voters.is_empty()
        && let Ok(l) = &log
    {
        conf.voters.clone_from(&l.voters);
    }
    let report = Report {
        dir: dir.to_path_buf(),
        member: record.member,
        cluster: record.cluster,
        identity: record.state,
        log: log.as_ref().map(|l| log_report(l, header.applied_index)).map_err(Clone::clone),
        fs_name: header.fs_name.clone(),
        incarnation: Incarnation(map.incarnation),
        map_version: map.version,
        applied: (header.applied_index, header.applied_term),
        voters: known(&conf.voters, &map),
        learners: known(&conf.learners, &map),
        inodes: header.inodes,
        void: void(&record, &header, log.as_ref().ok()),
    };
    Ok(Folder { dir: dir.to_path_buf(), record, log, store, conf, map, report, _lock: lock })
}

/// What the folder of a stopped server holds. `Busy` while a server runs on it, `NoEnt` if there is
/// none.
pub fn inspect(dir: &Path) -> Result<Report> {
    open(dir).map(|f| f.report)
}

fn void(record: &Record, header: &pb::StateHeader, log: Option<&LogImage>) -> Option<String> {
    let why = match log {
        _ if matches!(record.state, State::New | State::Loading) => "it was never completed",
        Some(l) if l.restoring.is_some() => {
            "it stopped while its state was being replaced by a copy of another member's"
        }
        Some(l)
            if header.applied_index < l.base.0
                && !matches!(record.state, State::Recovering { .. }) =>
        {
            "its state lacks entries that its log no longer has"
        }
        _ if header.fs_uuid.is_empty() => "its state is empty",
        _ => return None,
    };
    Some(why.into())
}

fn log_report(l: &LogImage, applied: u64) -> LogReport {
    let unapplied = l.entries.iter().filter(|e| e.index > applied);
    let changes = |e: &raft::eraftpb::Entry| e.get_entry_type() != EntryType::EntryNormal;
    LogReport {
        term: l.hard.term,
        first: l.first(),
        last: (l.last(), l.term(l.last()).unwrap_or(0)),
        unapplied: unapplied.clone().count() as u64,
        changes_members: unapplied.clone().any(changes),
    }
}

fn known(ids: &[u64], map: &pb::ClusterMap) -> Vec<Known> {
    let at = |id: u64| {
        let node = map.nodes.iter().find(|n| n.role == ROLE_MDS && u64::from(n.id) == id);
        node.and_then(|n| n.endpoints.iter().find(|e| e.parse::<Endpoint>().is_ok()).cloned())
    };
    ids.iter().map(|id| (*id, at(*id))).collect()
}

/// Member ids named by log entries that the state has not applied.
pub(super) fn named_in(log: &LogImage, applied: u64) -> Vec<u64> {
    let changes = log
        .entries
        .iter()
        .filter(|e| e.index > applied && e.get_entry_type() == EntryType::EntryConfChangeV2);
    let parsed = changes.filter_map(|e| ConfChangeV2::parse_from_bytes(&e.data).ok());
    parsed.flat_map(|c| c.changes.iter().map(|s| s.node_id).collect::<Vec<_>>()).collect()
}
