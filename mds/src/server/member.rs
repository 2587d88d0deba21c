//! This server as a member of the group: its log, its state, and what it knows only while it leads.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::Endpoint;
use strake_proto::{Code, Error, Result, map::MapView, pb};
use strake_runtime::{Env, watch};

use super::{
    config::Config,
    disk_space::{DiskSpace, Need},
    links::Links,
    machine::Machine,
    recalls::Recalls,
};
use crate::{
    cluster::manager::Manager,
    consensus::{Leadership, Node},
    levels::Levels,
    lock_waiters::LockWaiters,
    namespace::level,
    sessions::Sessions,
};

/// Most sessions or inodes named in one log entry.
pub(super) const BATCH: usize = 1024;

/// What only the leader knows; it is gone with its term.
pub(super) struct Lead {
    pub term: u64,
    pub manager: Manager,
    pub sessions: Sessions,
    pub lock_waiters: LockWaiters,
    pub levels: Levels,
}

/// See the module.
pub(super) struct Member {
    pub cfg: Config,
    pub env: Env,
    pub machine: Arc<Machine>,
    pub recalls: Arc<Recalls>,
    pub node: Node,
    pub leadership: watch::Receiver<Leadership>,
    pub lead: Mutex<Option<Lead>>,
    pub links: Links,
    pub disk_space: DiskSpace,
    pub advertised: OnceLock<Endpoint>,
    /// The error, if the state was found damaged when this server started.
    pub set_aside: Option<Error>,
    pub started: Duration,
}

impl Member {
    /// This server's node id in the map: its Raft id, which the configuration keeps small.
    pub(super) fn own_id(&self) -> u32 {
        u32::try_from(self.cfg.id).unwrap_or(0)
    }

    pub(super) fn map(&self) -> Arc<MapView> {
        self.machine.namespace.map()
    }

    pub(super) fn leading(&self) -> Result<u64> {
        self.with_lead(|l| Ok(l.term))
    }

    /// Runs `f` on the leader's knowledge, or returns an error that says which member leads.
    pub(super) fn with_lead<R>(&self, f: impl FnOnce(&mut Lead) -> Result<R>) -> Result<R> {
        let l = *self.leadership.borrow();
        let mut lead = self.lead.lock();
        match lead.as_mut() {
            Some(lead) if l.ready && lead.term == l.term => f(lead),
            _ => {
                let hint = if l.leader == self.cfg.id { 0 } else { l.leader };
                Err(Error::not_leader(u32::try_from(hint).unwrap_or(0)))
            }
        }
    }

    /// Gets a command into the log and applied. Returns errors of consensus and of the command
    /// itself; `NoSpc`: this server's disk has no space for it.
    pub(super) async fn propose(&self, command: pb::log_command::Command) -> Result<pb::LogReply> {
        self.disk_space.check(Need::of(&command))?;
        self.propose_anyway(command).await
    }

    pub(super) async fn propose_anyway(
        &self,
        command: pb::log_command::Command,
    ) -> Result<pb::LogReply> {
        level::check_proposal(&command, self.map().map.level)?;
        let command = pb::LogCommand { now_ns: self.env.unix_ns(), command: Some(command) };
        let bytes: Bytes = self.node.propose(command.encode_to_vec().into()).await?;
        let reply = pb::LogReply::decode(bytes)
            .map_err(|e| Error::new(Code::Io, format!("a command's reply cannot be read: {e}")))?;
        match reply.status {
            Some(s) if s.code != 0 => Err(s.into()),
            _ => Ok(reply),
        }
    }

    /// `Overloaded` until all storage servers know of an eviction: changes that must follow the
    /// session's writes wait until none of those can arrive any more.
    pub(super) fn check_fence(&self, eviction: u64) -> Result<()> {
        let now = self.env.boot();
        if eviction == 0
            || self.with_lead(|l| Ok(l.manager.all_know(now, eviction, &self.map())))?
        {
            return Ok(());
        }
        Err(Error::new(
            Code::Overloaded,
            format!("not all storage servers know of eviction {eviction} yet"),
        ))
    }
}

/// Whether a failed proposal certainly did not and will not run.
pub(super) fn never_ran(e: &Error) -> bool {
    !matches!(e.code, Code::Disconnected | Code::TimedOut)
}
