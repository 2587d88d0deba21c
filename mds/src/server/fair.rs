//! Requests of clients take turns where they would queue behind each other: for the next question
//! to the group who leads, and for the log. Nothing waits for a client while it has a turn, so
//! what clients wait for from each other cannot be held up by that. What servers ask, and renewals
//! of sessions, answers to recalls and waits for locks need none.

use std::time::Duration;

use strake_fabric::{Peer, Role, Turn, Turns};
use strake_proto::{Result, SessionId};

use super::Mds;

/// Of each kind, at a time. A session has a quarter of it: as many as one connection may have in work.
const MOST: usize = 1024;
/// So many operations are as much work as one more request.
const HEAVY: usize = 16;
/// How long a request waits for its turn.
const WAIT: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct Fair {
    pub reads: Turns,
    pub changes: Turns,
}

impl Default for Fair {
    fn default() -> Fair {
        Fair { reads: Turns::new(MOST), changes: Turns::new(MOST) }
    }
}

impl Mds {
    /// Waits for the turn of a session that the peer has shown to be its own.
    pub(super) async fn turn_of(
        &self,
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
}
