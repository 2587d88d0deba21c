//! What is held back of one file: state. See `writeback.rs`.

use std::{ops::Range, sync::Arc};

use parking_lot::Mutex;
use strake_fabric::{Buf, Record};
use strake_proto::{ChainId, SessionId, TargetId, pb};
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit};

use super::{
    dirty::{Dirty, gaps},
    grants::Cost,
};
use crate::{data::buffers, inode::Inode, read::cache::Tenure};

/// What goes with a write that is held back.
pub(super) struct Write {
    pub creds: pb::Creds,
    pub session: SessionId,
    /// Its share of [`crate::Config::unstable_limit`], until it is sent.
    pub room: Mutex<Option<OwnedSemaphorePermit>>,
    /// What outlives this process, until it has arrived.
    pub _record: Option<Record>,
}

pub(super) type Tag = Arc<Write>;

#[derive(Default)]
pub(super) struct State {
    pub held: Dirty<Tag>,
    /// The tenure in which the lease was seen last.
    pub leased_in: Option<Tenure>,
    /// What it takes of targets: what waits, and what is on its way.
    pub waiting: Cost,
    pub sending: Cost,
}

/// What is held back of one file.
#[derive(Default)]
pub(crate) struct Back {
    pub(super) state: Mutex<State>,
    /// One who sends at a time.
    pub(super) sending: Arc<AsyncMutex<()>>,
}

/// Keeps writes to a file from being held back until it is dropped.
pub(crate) struct Bar(Arc<Inode>);

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.back.state.lock().held.unbar();
    }
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Held,
    /// Not before something was sent.
    Full,
    /// Not before space was asked for.
    Ask,
    /// It is to be sent now.
    Through,
}

impl Back {
    pub fn is_empty(&self) -> bool {
        self.state.lock().held.is_empty()
    }

    /// Bytes that were not sent yet.
    pub fn bytes(&self) -> u64 {
        self.state.lock().held.bytes()
    }

    /// Where the last byte ends that has not arrived.
    pub fn end(&self) -> u64 {
        self.state.lock().held.end()
    }

    /// What of a range has not arrived, to lie over what servers and cache say. To be asked for
    /// before they are.
    pub fn look(&self, r: &Range<u64>) -> Vec<(u64, Buf)> {
        self.state.lock().held.look(r)
    }

    pub fn bar(inode: &Arc<Inode>) -> Bar {
        inode.back.state.lock().held.bar();
        Bar(inode.clone())
    }

    /// The session is lost, and with it what it was granted. `tell`: if anything else goes with it.
    pub fn lose(&self, tell: impl FnOnce(Vec<Range<u64>>)) {
        let mut state = self.state.lock();
        state.waiting = Cost::default();
        let parts = state.held.lose();
        if !parts.is_empty() {
            tell(parts);
        }
    }

    /// Targets that what is held back or on its way goes to, with the chain.
    pub fn targets(&self) -> Vec<(TargetId, ChainId)> {
        let state = self.state.lock();
        state.waiting.targets().chain(state.sending.targets()).collect()
    }
}

/// Whether all of a range is among these.
pub(crate) fn covers(over: &[(u64, Buf)], r: &Range<u64>) -> bool {
    gaps(r, over.iter().map(|(at, b)| *at..*at + b.len() as u64)).is_empty()
}

/// Bytes of a range with others laid over them.
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
