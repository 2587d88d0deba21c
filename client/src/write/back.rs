//! The dirty data of one file: the state. See `writeback.rs`.

use std::{ops::Range, sync::Arc};

use parking_lot::Mutex;
use strake_fabric::Buf;
use strake_proto::{ChainId, SessionId, TargetId, pb};
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit};

use super::{
    dirty::{Dirty, gaps},
    grants::Cost,
};
use crate::{data::buffers, handover::WriteRecord, inode::Inode, read::cache::Tenure};

/// Data that belongs to a write that is held back.
pub(super) struct Write {
    pub creds: pb::Creds,
    pub session: SessionId,
    /// Its share of [`crate::Config::unstable_limit`], until it is sent.
    pub room: Mutex<Option<OwnedSemaphorePermit>>,
    /// The record that outlives this process; kept until the bytes have arrived.
    pub _record: Option<Box<dyn WriteRecord>>,
}

pub(super) type Tag = Arc<Write>;

#[derive(Default)]
pub(super) struct State {
    pub held: Dirty<Tag>,
    /// The tenure in which the lease was last seen.
    pub leased_in: Option<Tenure>,
    /// Blocks of targets that are needed: for waiting bytes, and for bytes being sent.
    pub waiting: Cost,
    pub sending: Cost,
}

/// The dirty data of one file.
#[derive(Default)]
pub(crate) struct Back {
    pub(super) state: Mutex<State>,
    /// One task sends at a time.
    pub(super) sending: Arc<AsyncMutex<()>>,
}

/// Prevents writes to a file from being held back until it is dropped.
pub(crate) struct Bar(Arc<Inode>);

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.back.state.lock().held.unbar();
    }
}

/// The outcome of trying to hold a write back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Held,
    /// Some dirty data must be sent first.
    Full,
    /// Disk space must be requested first.
    Ask,
    /// The write must be sent now.
    Through,
}

impl Back {
    pub fn is_empty(&self) -> bool {
        self.state.lock().held.is_empty()
    }

    /// Number of bytes that are not being sent yet.
    pub fn bytes(&self) -> u64 {
        self.state.lock().held.bytes()
    }

    /// The end of the last byte that has not arrived.
    pub fn end(&self) -> u64 {
        self.state.lock().held.end()
    }

    /// The bytes of a range that have not arrived. They override what the servers and the cache
    /// say. Call this before asking those.
    pub fn look(&self, r: &Range<u64>) -> Vec<(u64, Buf)> {
        self.state.lock().held.look(r)
    }

    pub fn bar(inode: &Arc<Inode>) -> Bar {
        inode.back.state.lock().held.bar();
        Bar(inode.clone())
    }

    /// The session is lost, and with it its dirty data. `tell` is called if any data is lost.
    pub fn lose(&self, tell: impl FnOnce(Vec<Range<u64>>)) {
        let mut state = self.state.lock();
        state.waiting = Cost::default();
        let parts = state.held.lose();
        if !parts.is_empty() {
            tell(parts);
        }
    }

    /// The targets that dirty data goes to, with the chain.
    pub fn targets(&self) -> Vec<(TargetId, ChainId)> {
        let state = self.state.lock();
        state.waiting.targets().chain(state.sending.targets()).collect()
    }
}

/// Whether these bytes cover all of a range.
pub(crate) fn covers(over: &[(u64, Buf)], r: &Range<u64>) -> bool {
    gaps(r, over.iter().map(|(at, b)| *at..*at + b.len() as u64)).is_empty()
}

/// The bytes of a range, overridden by others.
pub(crate) fn overlay(under: &[Buf], r: &Range<u64>, over: Vec<(u64, Buf)>) -> Vec<Buf> {
    let (mut out, mut at) = (Vec::new(), r.start);
    for (from, bytes) in over {
        out.extend(buffers::cut(under, (at - r.start) as usize, (from - at) as usize));
        at = from + bytes.len() as u64;
        out.push(bytes);
    }
    out.extend(buffers::cut(under, (at - r.start) as usize, (r.end - at) as usize));
    out
}
