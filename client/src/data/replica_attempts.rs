//! The reaction to errors, for all reads and writes: which replica to ask next, and when and with
//! what to try again.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering::Relaxed},
};

use strake_proto::{
    ChainId, ChunkId, Code, Error, Result, TargetId,
    map::{ChainExt, MapView},
    pb,
};

use super::{
    chains::{chain_of, not_serving},
    service::Storage,
};
use crate::{
    config::Counters,
    data::route,
    inode::{Inode, caps::Cap},
    shared::{
        Attempts, Shared,
        retry::{DataVerdict, data_verdict},
    },
};

/// How many new capabilities one request may ask for before a refusal becomes an error.
/// Capabilities may end while requests are on their way, and each storage server learns of it at
/// its own time, so one request may be refused more than once.
const MAX_NEW_CAPS: u32 = 8;

/// The new capabilities that one request may still ask for.
pub(crate) struct NewCaps(u32);

impl Default for NewCaps {
    fn default() -> NewCaps {
        NewCaps(MAX_NEW_CAPS)
    }
}

impl NewCaps {
    /// Returns when the next one may be asked for: the first immediately. Returns the refusal when
    /// too many were asked for.
    pub async fn next(&mut self, shared: &Shared, at: &mut Attempts, refusal: Error) -> Result<()> {
        let first = self.0 == MAX_NEW_CAPS;
        if self.0 == 0 {
            return Err(refusal);
        }
        self.0 -= 1;
        if first {
            Counters::add(&shared.stats.retries, 1);
            return Ok(());
        }
        at.pause(shared, refusal).await
    }
}

/// The connection that a request uses.
#[derive(Clone, Copy)]
pub(crate) enum Way<'a> {
    /// A shared connection to its node. The number counts the requests that servers may have
    /// received.
    Shared(Option<&'a AtomicI64>),
    /// A lane: a connection that is closed when a call on it ends early. The number counts
    /// likewise.
    Lane(&'a AtomicI64),
}

impl Way<'_> {
    pub fn hands(self, n: i64) {
        if let Way::Shared(Some(handed)) | Way::Lane(handed) = self {
            handed.fetch_add(n, Relaxed);
        }
    }
}

/// Retries of one request, or of the rounds of a question, through failures.
pub(crate) struct Retry<'a> {
    storage: &'a Arc<Storage>,
    inode: &'a Inode,
    as_writer: bool,
    /// The capability for the next attempt.
    pub cap: Cap,
    caps: NewCaps,
    corrupt: u32,
}

impl<'a> Retry<'a> {
    /// `as_writer`: under the capability to write. `corrupt`: how many more attempts there are when
    /// all replicas had bad bytes.
    pub async fn begin(
        storage: &'a Arc<Storage>,
        inode: &'a Inode,
        as_writer: bool,
        corrupt: u32,
    ) -> Result<Retry<'a>> {
        let cap = storage.files.capability(inode, as_writer, None).await?;
        Ok(Retry::with(storage, inode, as_writer, corrupt, cap))
    }

    /// As [`Retry::begin`], but with a capability for the first attempt that the caller has just
    /// looked up.
    pub fn with(
        storage: &'a Arc<Storage>,
        inode: &'a Inode,
        as_writer: bool,
        corrupt: u32,
        cap: Cap,
    ) -> Retry<'a> {
        Retry { storage, inode, as_writer, cap, caps: NewCaps::default(), corrupt }
    }

    /// Pauses after a failed attempt under `map`, and does what may help. Returns the error where
    /// nothing can.
    pub async fn after(&mut self, map: &MapView, at: &mut Attempts, e: Error) -> Result<()> {
        match data_verdict(&e) {
            DataVerdict::OtherReplica if self.corrupt > 0 => {
                self.corrupt -= 1;
                self.storage.refresh_and_pause(map, at, e).await
            }
            DataVerdict::NewCapability => {
                self.caps.next(&self.storage.shared, at, e).await?;
                self.cap = self
                    .storage
                    .files
                    .capability(self.inode, self.as_writer, Some(&self.cap))
                    .await?;
                Ok(())
            }
            DataVerdict::SessionLost => {
                self.storage.verify_session().await;
                at.pause(&self.storage.shared, e).await?;
                self.cap = self.storage.files.capability(self.inode, self.as_writer, None).await?;
                Ok(())
            }
            DataVerdict::Refresh | DataVerdict::AskTail => {
                self.storage.refresh_and_pause(map, at, e).await
            }
            _ => Err(e),
        }
    }
}

/// Asks the replicas of a chain in turn, each once.
pub(crate) struct Round<'a> {
    storage: &'a Storage,
    map: &'a MapView,
    pub chain: &'a pb::Chain,
    order: Vec<TargetId>,
    /// The last transient error.
    passing: Option<Error>,
    /// The error of a replica to which no memory can be lent.
    no_lane: Option<Error>,
    last: Error,
}

impl<'a> Round<'a> {
    /// Begins with the replicas that may be asked for a chunk; an error where there is none.
    pub fn begin(
        storage: &'a Storage,
        map: &'a MapView,
        chain: ChainId,
        chunk: ChunkId,
    ) -> Result<Round<'a>> {
        let chain = chain_of(map, chain)?;
        let order = match storage.shared.cfg.read_replica {
            Some(n) => route::only_replica(chain, n)?,
            None => route::read_order(
                map,
                chain,
                chunk,
                route::local_node(map, &storage.shared.cfg.hostname),
            ),
        };
        if order.is_empty() {
            return Err(storage.deserted(map, chain));
        }
        let last = not_serving(format!("chain {} has no replica in sync", chain.id));
        Ok(Round { storage, map, chain, order, passing: None, no_lane: None, last })
    }

    pub fn next(&mut self) -> Option<TargetId> {
        (!self.order.is_empty()).then(|| self.order.remove(0))
    }

    /// Notes a replica's error. Returns the error where no other replica would do better.
    pub fn failed(&mut self, e: Error) -> Result<()> {
        match data_verdict(&e) {
            DataVerdict::Fail | DataVerdict::NewCapability | DataVerdict::SessionLost => {
                return Err(e);
            }
            DataVerdict::AskTail => {
                // The tail always knows what is committed.
                if let Some(i) =
                    self.chain.tail().and_then(|t| self.order.iter().position(|o| *o == t))
                {
                    let tail = self.order.remove(i);
                    self.order.insert(0, tail);
                }
                self.passing = Some(e);
            }
            DataVerdict::Refresh | DataVerdict::Resend => self.passing = Some(e),
            DataVerdict::OtherReplica => self.last = e,
        }
        Ok(())
    }

    /// No memory can be lent to one replica: another one may have a lane.
    pub fn no_lane(&mut self, e: Error) {
        self.no_lane = Some(e);
    }

    /// The error of a round in which no replica answered: the last one. It is `Corrupt` only if all
    /// replicas that answered had bad bytes.
    pub fn over(self) -> Error {
        if let Some(e) = self.passing.as_ref().filter(|e| e.code == Code::NotServing) {
            self.storage.wait_for_absent(self.map, self.chain, e);
        }
        self.passing.or(self.no_lane).unwrap_or(self.last)
    }
}
