//! Requests of clients take turns where they would queue behind each other: for the next question
//! to the group who leads, and for the log. Nothing waits for a client while it has a turn, so
//! what clients wait for from each other cannot be held up by that. What servers ask, and renewals
//! of sessions, answers to recalls and waits for locks need none.

use std::{sync::Arc, time::Duration};

use strake_fabric::{Peer, Role, Turn, Turns};
use strake_proto::{Result, SessionId, pb};

use super::{
    heavy::{self, Heavy},
    machine::Machine,
};

/// Of each kind, at a time. A session has a quarter of it: as many as one connection may have in
/// work.
const MOST: usize = 1024;
/// So many operations are as much work as one more request.
const HEAVY: usize = 16;
/// How long a request waits for its turn.
const WAIT: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct Fair {
    reads: Turns,
    pub changes: Turns,
    heavy: Heavy,
    machine: Arc<Machine>,
}

impl Fair {
    pub(super) fn new(machine: Arc<Machine>) -> Fair {
        Fair {
            reads: Turns::new(MOST),
            changes: Turns::new(MOST),
            heavy: Heavy::default(),
            machine,
        }
    }

    /// Waits for the turn of a session that the peer has shown to be its own, for a list that
    /// changes nothing.
    pub(super) async fn read_turn(&self, peer: &Peer, session: SessionId) -> Result<Option<Turn>> {
        turn_of(&self.reads, peer, session, 0).await
    }

    /// Likewise for a list of so many operations that changes something.
    pub(super) async fn change_turn(
        &self,
        peer: &Peer,
        session: SessionId,
        ops: usize,
    ) -> Result<Option<Turn>> {
        turn_of(&self.changes, peer, session, ops).await
    }

    /// A list that is much work has to wait until no other such list is answered. Every list of a
    /// client comes here.
    pub(super) async fn heavy_turn(
        &self,
        peer: &Peer,
        session: SessionId,
        ops: &[pb::Op],
    ) -> Result<Option<heavy::Turn>> {
        self.changes.note(session);
        if !self.machine.namespace.is_heavy(ops)? {
            return Ok(None);
        }
        self.heavy.turn(&peer.addr, self.changes.others(session)).await.map(Some)
    }
}

async fn turn_of(
    turns: &Turns,
    peer: &Peer,
    session: SessionId,
    ops: usize,
) -> Result<Option<Turn>> {
    match peer.role {
        Role::Client => turns.take(&peer.addr, session, 1 + ops / HEAVY, WAIT).await.map(Some),
        Role::Server => Ok(None),
    }
}
