//! A client's list on its way through this server.

use strake_fabric::Peer;
use strake_proto::{SessionId, pb};

use crate::leases::Connection;

/// Who asks, and on which connection.
#[derive(Clone, Copy)]
pub(super) struct Asker {
    pub session: SessionId,
    /// 0: the answer will not be remembered.
    pub connection: Connection,
}

/// What stays the same of a list while it is answered.
pub(super) struct Call<'a> {
    pub peer: &'a Peer,
    /// Of the leader that answers. Once another one leads, what is left to do is refused.
    pub term: u64,
    /// Of the session.
    pub epoch: u64,
    pub by: Asker,
    /// Its number, and the lowest of those whose answers its sender waits for.
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
