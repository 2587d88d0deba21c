//! Work on the folders of metadata servers that do not run, for a group that has lost its quorum or
//! all its members. [`inspect`] says what a folder holds, [`recover`] makes one survivor the first
//! member of a new incarnation of its group, [`dump`] writes a state to one file, and [`load`]
//! makes a first member from that. See `docs/membership.md`, "After a recovery".

pub mod dump;
pub mod inspect;
pub mod load;
pub mod recover;

#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, path::Path, sync::Arc};

use bytes::Bytes;
use prost::Message as _;
use protobuf::Message as _;
use raft::eraftpb::ConfState;
use strake_proto::{Code, Error, Incarnation, Result, map::ROLE_MDS, pb};
use strake_store::MetaStore;

use crate::{
    cluster::state::FIRST_OSS_NODE,
    consensus::DiskLog,
    data_dir::{LOG, Record, Sizes, State},
    namespace::Namespace,
};

/// Bytes of memory for the store's cache while a command works on a folder.
const CACHE: u64 = 64 << 20;

fn inval(m: impl Into<String>) -> Error {
    Error::new(Code::Inval, m)
}

/// Voters and learners in a state; empty if it never had any.
fn membership(conf_state: &[u8]) -> Result<ConfState> {
    ConfState::parse_from_bytes(conf_state).map_err(|_| {
        Error::new(Code::Corrupt, "the state's record of the group's members is unreadable")
    })
}

/// Ids of all present and former members, as far as a state and a membership know them.
fn spent_ids(map: &pb::ClusterMap, conf: &ConfState) -> BTreeSet<u64> {
    let nodes = map.nodes.iter().filter(|n| n.role == ROLE_MDS).map(|n| n.id);
    let named = nodes.chain(map.former.iter().copied()).map(u64::from);
    let lists = [&conf.voters, &conf.learners, &conf.voters_outgoing, &conf.learners_next];
    named.chain(lists.into_iter().flatten().copied()).collect()
}

/// The id to use: `wanted`, or the lowest that no member ever had. `EINVAL` for one that was used
/// or is impossible.
fn new_id(wanted: Option<u64>, spent: &BTreeSet<u64>) -> Result<u64> {
    let ids = 1..u64::from(FIRST_OSS_NODE);
    let free = ids
        .clone()
        .find(|id| !spent.contains(id))
        .ok_or_else(|| inval("all ids of metadata servers are used up"))?;
    match wanted {
        None => Ok(free),
        Some(id) if !ids.contains(&id) => {
            Err(inval(format!("ids of metadata servers are 1 to {}", ids.end - 1)))
        }
        Some(id) if spent.contains(&id) => Err(inval(format!(
            "id {id} is or was a metadata server's and cannot be used again; {free} is free"
        ))),
        Some(id) => Ok(id),
    }
}

/// The incarnation after `own` and after era `beyond`.
fn next_incarnation(own: Incarnation, beyond: u64, random: u64) -> Result<Incarnation> {
    Incarnation::new(own.era().max(beyond) + 1, random)
}

/// Makes the state begin anew: one entry, one commit. Does nothing if that was done before.
fn begin_anew(
    store: &Arc<dyn MetaStore>,
    to: u64,
    incarnation: Incarnation,
    gone: &BTreeSet<u64>,
) -> Result<()> {
    let state = Namespace::open(store.clone())?;
    if state.map().map.incarnation == incarnation.0 {
        return store.sync();
    }
    let header = state.header();
    let gone = gone.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
    let command =
        pb::log_command::Command::Recover(pb::Recover { incarnation: incarnation.0, gone });
    let entry = pb::LogCommand { now_ns: header.now_ns, command: Some(command) }.encode_to_vec();
    let at = (header.applied_index + 1, header.applied_term.max(1));
    let conf = ConfState { voters: vec![to], ..Default::default() };
    let conf = conf.write_to_bytes().map_err(|e| inval(e.to_string()))?;
    let replies = state.apply(&[(at.0, at.1, Bytes::from(entry))], at, Some(&conf))?;
    match replies.into_iter().next().and_then(|r| r.status) {
        Some(s) if s.code != 0 => Err(s.into()),
        _ => store.sync(),
    }
}

/// The last steps: a log that begins with the state as it is, and an identity that makes the folder
/// complete.
fn finish(
    dir: &Path,
    store: &Arc<dyn MetaStore>,
    cluster: [u8; 16],
    member: u64,
    stamp: u64,
) -> Result<()> {
    let header = Namespace::open(store.clone())?.header();
    let base = (header.applied_index, header.applied_term);
    DiskLog::begin(&dir.join(LOG), cluster, member, stamp, base, Sizes::of(dir)?.log())?;
    Record { member, cluster, state: State::Complete }.write(dir)
}
