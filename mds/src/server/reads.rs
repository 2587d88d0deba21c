//! Answers lists of operations that change nothing, and says which part of the answer the client
//! may cache. See `docs/leases.md`.

use std::{collections::BTreeSet, sync::Arc};

use strake_proto::{Code, Error, Ino, Result, pb};

use super::{
    call::Call, fair::Fair, locks::LockService, member::Member, recalls::Depends,
    session_service::SessionService,
};
use crate::{leases::rows::Leader, namespace::effects};

/// How often a changing state is read again for an answer that may be cached.
const LOOKS: usize = 3;
/// How many rounds writers are asked about files that the answer shows.
const ASKS: usize = 8;

/// The result of one reading of the state.
struct Look {
    reply: pb::MetaReply,
    /// The last entry that it includes.
    version: u64,
    depends: Depends,
    /// Files whose size is not known yet.
    endless: BTreeSet<Ino>,
    /// What the client may cache if it still holds the leases when it gets the answer.
    noted: BTreeSet<Ino>,
}

/// The inodes whose attributes are shown outside of listings.
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
    /// Answers a list that changes nothing.
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
        // At once: a file without a name exists only while a session has it open.
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

    /// Reads the state, after other writers of the shown files have reported, and after the size of
    /// files with evicted writers was found out.
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
                // A listing may show many files: clients ask for them one by one.
                self.member.recalls.leave_out(call, &mut look.reply.results)?;
                return Ok(look);
            }
            self.member.recalls.reported(call.term, &asked).await?;
            self.member.recalls.ends_known(call.term, &shown).await?;
            reported.extend(new);
        }
        Err(Error::new(Code::Overloaded, "the state changes too fast for this read; try again"))
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
            // A holder whose lease is noted after a change gets no recall for it.
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
