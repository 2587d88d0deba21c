//! A client's list of operations while this server handles it.

use strake_fabric::Peer;
use strake_proto::{SessionId, pb};

use crate::leases::Connection;

/// The session that asks, and its connection.
#[derive(Clone, Copy)]
pub(super) struct Asker {
    pub session: SessionId,
    /// 0: the client will not cache the answer.
    pub connection: Connection,
}

/// What stays the same for a list while it is answered.
pub(super) struct Call<'a> {
    pub peer: &'a Peer,
    /// The term of the leader that answers. When another one leads, the rest of the work is
    /// refused.
    pub term: u64,
    /// The session's epoch.
    pub epoch: u64,
    pub by: Asker,
    /// The list's number, and the lowest number whose answer the sender still waits for.
    pub seq: u64,
    pub lowest_unanswered: u64,
}

impl<'a> Call<'a> {
    pub(super) fn new(peer: &'a Peer, term: u64, epoch: u64, r: &pb::MetaRequest) -> Call<'a> {
        let by = Asker { session: r.session, connection: r.connection };
        Call { peer, term, epoch, by, seq: r.seq, lowest_unanswered: r.lowest_unanswered }
    }

    pub(super) fn session(&self) -> SessionId {
        self.by.session
    }
}
