//! What is done after an error, for all reads and writes: whom to ask next, and when and with what
//! to try again.

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
    inode::{Cap, Inode},
    shared::{
        Attempts, Shared,
        retry::{DataVerdict, data_verdict},
    },
};

/// New capabilities asked for one request, before a refusal is an error. Rights end while requests
/// are on their way, and each storage server learns of it in its own time, so one request may be
/// refused more than once.
const MAX_NEW_CAPS: u32 = 8;

/// The new capabilities that one request may have yet.
pub(crate) struct NewCaps(u32);

impl Default for NewCaps {
    fn default() -> NewCaps {
        NewCaps(MAX_NEW_CAPS)
    }
}

impl NewCaps {
    /// Returns when the next one may be asked for: the first at once. The refusal, if there were
    /// too many.
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

/// The connection that a request takes.
#[derive(Clone, Copy)]
pub(crate) enum Way<'a> {
    /// The one to its node. Counts the requests that servers may have had.
    Shared(Option<&'a AtomicI64>),
    /// A lane, which ends with a call that ends early. Counts likewise.
    Lane(&'a AtomicI64),
}

impl Way<'_> {
    pub fn hands(self, n: i64) {
        if let Way::Shared(Some(handed)) | Way::Lane(handed) = self {
            handed.fetch_add(n, Relaxed);
        }
    }
}

/// A request, or the rounds of a question, through failures.
pub(crate) struct Retry<'a> {
    storage: &'a Arc<Storage>,
    inode: &'a Inode,
    as_writer: bool,
    /// What the next attempt is made with.
    pub cap: Cap,
    caps: NewCaps,
    corrupt: u32,
}

impl<'a> Retry<'a> {
    /// `as_writer`: under the right to write. `corrupt`: other attempts, where all had bad bytes.
    pub async fn begin(
        storage: &'a Arc<Storage>,
        inode: &'a Inode,
        as_writer: bool,
        corrupt: u32,
    ) -> Result<Retry<'a>> {
        let cap = storage.files.capability(inode, as_writer, None).await?;
        Ok(Retry::with(storage, inode, as_writer, corrupt, cap))
    }

    /// As [`Retry::begin`], the first attempt with a capability that the caller has just looked up.
    pub fn with(
        storage: &'a Arc<Storage>,
        inode: &'a Inode,
        as_writer: bool,
        corrupt: u32,
        cap: Cap,
    ) -> Retry<'a> {
        Retry { storage, inode, as_writer, cap, caps: NewCaps::default(), corrupt }
    }

    /// The pause after an attempt under `map`, and what may help. The error, where nothing does.
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

/// The replicas of a chain in turn, each once.
pub(crate) struct Round<'a> {
    storage: &'a Storage,
    map: &'a MapView,
    pub chain: &'a pb::Chain,
    order: Vec<TargetId>,
    /// The last error that may pass by itself.
    passing: Option<Error>,
    /// Nothing can be lent to one of them.
    no_lane: Option<Error>,
    last: Error,
}

impl<'a> Round<'a> {
    /// Those that may be asked for a chunk; an error where there is none.
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

    /// Takes in what one answered. The error, where no other one would do better.
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

    /// Nothing can be lent to one of them: another one may have a lane.
    pub fn no_lane(&mut self, e: Error) {
        self.no_lane = Some(e);
    }

    /// The error of a round in which nobody answered: the last one, `Corrupt` only if all that
    /// answered had bad bytes.
    pub fn over(self) -> Error {
        if let Some(e) = self.passing.as_ref().filter(|e| e.code == Code::NotServing) {
            self.storage.wait_for_absent(self.map, self.chain, e);
        }
        self.passing.or(self.no_lane).unwrap_or(self.last)
    }
}
