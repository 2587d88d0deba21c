//! Clients' requests take turns where they would queue behind each other: for the next check with
//! the group which member leads, and for the log. A request with a turn waits for no client, so
//! clients that wait for each other cannot be blocked by this. Requests of servers, renewals of
//! sessions, answers to recalls and waits for locks need no turn.

use std::{sync::Arc, time::Duration};

use strake_fabric::{Peer, Role, Turn, Turns};
use strake_proto::{Result, SessionId, pb};

use super::{
    heavy::{self, Heavy},
    machine::Machine,
};

/// Most turns of each kind at a time. A session may have a quarter of them: as many requests as one
/// connection may have in progress.
const MOST: usize = 1024;
/// This many operations count as one more request.
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

    /// Waits for a turn for a list that changes nothing. The peer must have proved that the session
    /// is its own.
    pub(super) async fn read_turn(&self, peer: &Peer, session: SessionId) -> Result<Option<Turn>> {
        turn_of(&self.reads, peer, session, 0).await
    }

    /// The same for a list of `ops` operations that changes something.
    pub(super) async fn change_turn(
        &self,
        peer: &Peer,
        session: SessionId,
        ops: usize,
    ) -> Result<Option<Turn>> {
        turn_of(&self.changes, peer, session, ops).await
    }

    /// A list that is much work waits until no other such list is being answered. Call this for
    /// every list of a client.
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
