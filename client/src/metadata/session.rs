//! One session with the metadata servers, and the numbers of its requests.

use std::{
    sync::atomic::{
        AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, SessionId, pb};

use super::request_ids::RequestIds;
use crate::handover::{Keep, operation::Operation};

/// One session with the metadata servers.
pub(crate) struct Session {
    pub id: SessionId,
    pub root: u64,
    pub term: Duration,
    pub fs_uuid: Bytes,
    request_ids: Mutex<RequestIds>,
    /// Numbers of data writes, separate from those of mutations. With a handover they are there
    /// instead.
    data_seq: AtomicU64,
    /// See [`strake_proto::data::DataRequest::round`]. With a handover it is there instead.
    round: AtomicU64,
    /// Whether the metadata servers ask for this session's dirty data before they tell others about
    /// a file.
    pub may_hold_back: bool,
    keep: Keep,
}

impl Session {
    /// The session as the servers opened it. With a handover its numbers continue where those of
    /// the previous client ended.
    pub fn new(opened: &pb::SessionOpenReply, may_hold_back: bool, keep: Keep) -> Session {
        let request_ids = match &keep {
            Some(k) => RequestIds::resume(k.next_mutation(), k.in_doubt(opened.session)),
            None => RequestIds::default(),
        };
        Session {
            id: opened.session,
            root: opened.root,
            term: Duration::from_millis(u64::from(opened.term_ms)),
            fs_uuid: opened.fs_uuid.clone(),
            request_ids: Mutex::new(request_ids),
            data_seq: AtomicU64::new(1),
            round: AtomicU64::new(0),
            may_hold_back,
            keep,
        }
    }

    /// Takes `n` numbers for data writes; returns the first.
    pub(crate) fn take_data_numbers(&self, n: u64) -> u64 {
        match &self.keep {
            Some(k) => k.take_data_numbers(n),
            None => self.data_seq.fetch_add(n, Relaxed),
        }
    }

    fn rounds(&self) -> &AtomicU64 {
        self.keep.as_ref().map_or(&self.round, |k| k.round())
    }

    /// The round for data requests that are sent now.
    pub(crate) fn round(&self) -> u64 {
        self.rounds().load(SeqCst)
    }

    /// An update is given up that may be on its way: it must not overwrite what is written from now
    /// on. Returns the round that begins.
    pub(crate) fn next_round(&self) -> u64 {
        self.rounds().fetch_add(1, SeqCst) + 1
    }

    /// An update that was sent in this round may be on its way and is sent again in a later round.
    /// So the old copy cannot be applied after a server has seen the later round.
    pub(crate) fn leave_round(&self, round: u64) {
        // If another task has left the round already, the next one has begun.
        let _ = self.rounds().compare_exchange(round, round + 1, SeqCst, SeqCst);
    }

    /// A number for a mutation, or for a list that opens or closes files: the one that the previous
    /// client used for the same operation, or a new one. `EIO` when that client's session is lost:
    /// the mutation may or may not have run.
    pub(crate) fn begin(&self, operation: Option<&Operation>) -> Result<Turn<'_>> {
        if let Some((session, n)) = operation.and_then(Operation::mutation) {
            if session != self.id {
                let m = "the session was lost while the mount was restarted, and with it the answer \
                     to this request";
                return Err(Error::new(Code::Io, m));
            }
            return Ok(Turn(self, n));
        }
        let mut request_ids = self.request_ids.lock();
        let n = request_ids.begin();
        if let Some(k) = &self.keep {
            k.set_next_mutation(request_ids.next());
        }
        drop(request_ids);
        if let Some(operation) = operation {
            operation.set_mutation(self.id, n);
        }
        Ok(Turn(self, n))
    }

    pub(crate) fn lowest_unanswered(&self) -> u64 {
        self.request_ids.lock().lowest_unanswered()
    }

    /// The operation will not be repeated.
    pub(crate) fn abandon(&self, operation: &Operation) {
        if let Some((session, n)) = operation.mutation()
            && session == self.id
        {
            self.request_ids.lock().end(n);
        }
    }
}

/// A mutation's number, given back when its answer came or is no longer awaited.
pub(crate) struct Turn<'a>(&'a Session, pub u64);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.request_ids.lock().end(self.1);
    }
}
