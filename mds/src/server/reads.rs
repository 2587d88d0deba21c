//! Answers lists of operations that change nothing, and says what of the answer may be remembered.
//! See `docs/leases.md`.

use std::{collections::BTreeSet, sync::Arc};

use strake_proto::{Code, Error, Ino, Result, pb};

use super::{
    call::Call, fair::Fair, locks::LockService, member::Member, recalls::Depends,
    session_service::SessionService,
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
    pub(super) async fn read(
        &self,
        call: &Call<'_>,
        request: pb::MetaRequest,
    ) -> Result<pb::MetaReply> {
        let turn = self.fair.read_turn(call.peer, call.session()).await?;
        self.member.node.read_barrier().await?;
        drop(turn);
        self.locks.settle_questions(call, &request.ops).await?;
        let mut look = self.look_once_reported(call, &request).await?;
        // At once: a file without a name is there only as long as somebody has it open.
        self.sessions.note_handles(
            call,
            look.version + 1,
            &request.ops,
            &mut look.reply.results,
        )?;
        self.member.recalls.settled(call.term, &look.depends).await?;
        look.reply.granted = self.member.recalls.held(call, &look.noted)?;
        Ok(look.reply)
    }

    /// Reads, and has others who write a file that is shown report first how it is, and what
    /// evicted ones did not report found out.
    async fn look_once_reported(&self, call: &Call<'_>, request: &pb::MetaRequest) -> Result<Look> {
        let mut reported = BTreeSet::new();
        for _ in 0..ASKS {
            let turn = self.fair.heavy_turn(call.peer, request.session, &request.ops).await?;
            let mut look = self.look(call, request)?;
            drop(turn);
            let shown = shown(&look.reply);
            let new: BTreeSet<Ino> = shown.difference(&reported).copied().collect();
            let asked = self.member.recalls.ask(call, &new)?;
            if asked.is_empty() && look.endless.is_disjoint(&shown) {
                // A listing may show many: they are asked for one by one.
                self.member.recalls.leave_out(call, &mut look.reply.results)?;
                return Ok(look);
            }
            self.member.recalls.reported(call.term, &asked).await?;
            self.member.recalls.ends_known(call.term, &shown).await?;
            reported.extend(new);
        }
        Err(Error::new(Code::Overloaded, "what is asked for changes too fast; try again"))
    }

    fn look(&self, call: &Call<'_>, request: &pb::MetaRequest) -> Result<Look> {
        let creds = request.creds.clone().unwrap_or_default();
        let namespace = &self.member.machine.namespace;
        let tells = call.by.connection != 0 && request.ops.iter().any(effects::tells);
        let mut wanted: BTreeSet<Ino> = if tells {
            request.ops.iter().flat_map(effects::named).collect()
        } else {
            BTreeSet::new()
        };
        let mut looks = 0;
        loop {
            looks += 1;
            if looks > 1 {
                Leader::LookedAgain.taken()
            } else {
                Leader::Looked.taken()
            }
            let before = self.member.recalls.grant(call, &wanted)?;
            let read = namespace.read_at(call.session(), &creds, &request.ops)?;
            if tells {
                wanted.clone_from(&read.looked);
            }
            let (ticket, mut noted) = self.member.recalls.ticket(call, &wanted)?;
            // Who notes a lease after a change is not told of that one.
            let late = !noted.is_subset(&before) && namespace.version() != read.version;
            if late && looks < LOOKS {
                continue;
            }
            if late {
                noted.retain(|ino| before.contains(ino));
            }
            let depends = Depends { inos: Some(read.looked), ticket };
            return Ok(Look {
                reply: read.reply,
                version: read.version,
                depends,
                endless: read.endless,
                noted,
            });
        }
    }
}
