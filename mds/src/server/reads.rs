//! Answers lists of operations that change nothing, and says what of the answer may be remembered. See `docs/leases.md`.

use std::{collections::BTreeSet, sync::Arc};

use strake_fabric::Peer;
use strake_proto::{Code, Error, Ino, Result, pb};

use super::{
    fair::Fair,
    locks::LockService,
    member::Member,
    recalls::{Asker, Depends},
    session_service::{Gives, SessionService},
};
use crate::{leases::rows::Leader, namespace::effects};

/// How often a state that changes is read for an answer that may be remembered.
const LOOKS: usize = 3;
/// How often writers are asked for what turns out to be shown.
const ASKS: usize = 8;

/// A state as it was read.
struct Look {
    reply: pb::MetaReply,
    /// The last entry that it knows of.
    version: u64,
    depends: Depends,
    /// How far these files go is not known yet.
    endless: BTreeSet<Ino>,
    /// What of it may be remembered, if it is still held when it is answered.
    noted: BTreeSet<Ino>,
}

/// The inodes whose attributes are shown, other than in listings.
pub(super) fn shown(reply: &pb::MetaReply) -> BTreeSet<Ino> {
    reply.results.iter().filter_map(|r| r.attr.as_ref()).map(|a| a.ino).collect()
}

/// See the module.
pub(super) struct Reads {
    pub member: Arc<Member>,
    pub sessions: Arc<SessionService>,
    pub locks: Arc<LockService>,
    pub fair: Arc<Fair>,
}

impl Reads {
    /// A list that changes nothing.
    pub async fn read(&self, peer: &Peer, term: u64, epoch: u64, request: pb::MetaRequest) -> Result<pb::MetaReply> {
        let by = Asker { session: request.session, connection: request.connection };
        let turn = self.fair.read_turn(peer, by.session).await?;
        self.member.node.read_barrier().await?;
        drop(turn);
        self.locks.settle_questions(term, by.session, &request.ops).await?;
        let mut look = self.look_once_reported(peer, term, by, &request).await?;
        // At once: a file without a name is there only as long as somebody has it open.
        self.sessions.note_handles(
            term,
            by,
            (request.seq, request.lowest_unanswered),
            Gives { epoch, looked: look.version + 1 },
            &request.ops,
            &mut look.reply.results,
        )?;
        self.member.recalls.settled(term, &look.depends).await?;
        look.reply.granted = self.member.recalls.held(term, by, &look.noted)?;
        Ok(look.reply)
    }

    /// Reads, and has others who write a file that is shown report first how it is, and what evicted ones did not report found out.
    async fn look_once_reported(&self, peer: &Peer, term: u64, by: Asker, request: &pb::MetaRequest) -> Result<Look> {
        let mut reported = BTreeSet::new();
        for _ in 0..ASKS {
            let turn = self.fair.heavy_turn(peer, request.session, &request.ops).await?;
            let mut look = self.look(term, by, request)?;
            drop(turn);
            let shown = shown(&look.reply);
            let new: BTreeSet<Ino> = shown.difference(&reported).copied().collect();
            let asked = self.member.recalls.ask(term, by.session, &new)?;
            if asked.is_empty() && look.endless.is_disjoint(&shown) {
                // A listing may show many: they are asked for one by one.
                self.member.recalls.leave_out(term, by.session, &mut look.reply.results)?;
                return Ok(look);
            }
            self.member.recalls.reported(term, &asked).await?;
            self.member.recalls.ends_known(term, &shown).await?;
            reported.extend(new);
        }
        Err(Error::new(Code::Overloaded, "what is asked for changes too fast; try again"))
    }

    fn look(&self, term: u64, by: Asker, request: &pb::MetaRequest) -> Result<Look> {
        let creds = request.creds.clone().unwrap_or_default();
        let namespace = &self.member.machine.namespace;
        let tells = by.connection != 0 && request.ops.iter().any(effects::tells);
        let mut wanted: BTreeSet<Ino> =
            if tells { request.ops.iter().flat_map(effects::named).collect() } else { BTreeSet::new() };
        let mut looks = 0;
        loop {
            looks += 1;
            if looks > 1 {
                Leader::LookedAgain.taken()
            } else {
                Leader::Looked.taken()
            }
            let before = self.member.recalls.grant(term, by, &wanted)?;
            let read = namespace.read_at(by.session, &creds, &request.ops)?;
            if tells {
                wanted.clone_from(&read.looked);
            }
            let (ticket, mut noted) = self.member.recalls.ticket(term, by, &wanted)?;
            // Who notes a lease after a change is not told of that one.
            let late = !noted.is_subset(&before) && namespace.version() != read.version;
            if late && looks < LOOKS {
                continue;
            }
            if late {
                noted.retain(|ino| before.contains(ino));
            }
            let depends = Depends { inos: Some(read.looked), ticket };
            return Ok(Look { reply: read.reply, version: read.version, depends, endless: read.endless, noted });
        }
    }
}
