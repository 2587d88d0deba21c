//! Feature levels while this server leads: who knows which, refusing those who know too little, and
//! raising the cluster's. See `docs/feature-levels.md`.

use strake_proto::{Code, Error, Result, SessionId, level, pb};

use super::{evictions::evict, member::Member};
use crate::levels::{in_the_way, of_member, some_of};
use pb::log_command::Command;

/// Refuses a process whose program does not know the cluster's level.
pub(super) fn check(
    member: &Member,
    knows: u32,
    code: Code,
    who: impl FnOnce() -> String,
) -> Result<()> {
    level::check(knows, member.map().map.level, code, who)
}

/// The name of a storage server for people.
pub(super) fn server_name(member: &Member, node: u32) -> String {
    let map = member.map();
    let name = map.node(node).map_or_else(|| node.to_string(), |n| format!("'{}'", n.name));
    format!("storage server {name}")
}

/// The error for a client whose program does not know the cluster's level.
pub(super) fn old_client(member: &Member, knows: u32, code: Code) -> Error {
    level::too_old(knows, member.map().map.level, code, "this client")
}

/// Evicts the session of a client that does not know the cluster's level, and refuses the client
/// (`NoSession`). Otherwise notes what it knows.
pub(super) async fn renewed(member: &Member, session: SessionId, knows: u32) -> Result<()> {
    let (now, cluster) = (member.env.boot(), member.map().map.level);
    let lives = member.machine.namespace.session(session).is_some();
    if lives {
        member.with_lead(|l| {
            l.levels.heard_session(now, session, knows);
            Ok(())
        })?;
    }
    if knows >= cluster {
        return Ok(());
    }
    if lives {
        evict_below(member, cluster).await?;
    }
    Err(old_client(member, knows, Code::NoSession))
}

/// Evicts all sessions that are known to know less.
async fn evict_below(member: &Member, level: u32) -> Result<()> {
    let below = member.with_lead(|l| Ok(l.levels.below(level)))?;
    let why = |knows| old_client(member, knows, Code::NoSession).message;
    evict(member, below.into_iter().map(|(id, knows)| (id, why(knows))).collect()).await
}

/// What everybody knows.
pub(super) async fn report(member: &Member) -> Result<pb::Levels> {
    let (group, map, now) = (member.node.group().await?, member.map(), member.env.boot());
    let of = |m: &crate::consensus::members::Member| {
        let node = u32::try_from(m.id).ok().and_then(|id| map.node(id));
        let (name, version) =
            node.map_or_else(Default::default, |n| (n.name.clone(), n.version.clone()));
        of_member((m.id, name, version), m.level, m.heard)
    };
    let members = group.members.iter().map(of).collect();
    let sessions = member.machine.namespace.sessions();
    member.with_lead(|l| Ok(l.levels.report(now, &map.map, members, sessions)))
}

/// Raises the cluster's level, and evicts the sessions of clients that do not know it. `OpNotSupp`
/// while others know less. A level that the cluster has already is no error.
pub(super) async fn raise(member: &Member, r: pb::RaiseRequest) -> Result<()> {
    member.leading()?;
    member.node.read_barrier().await?;
    if r.to > member.map().map.level {
        let way = in_the_way(&report(member).await?, r.to, r.evict);
        if !way.is_empty() {
            let m = format!("feature level {} cannot be reached yet: {}", r.to, some_of(&way));
            return Err(Error::new(Code::OpNotSupp, m));
        }
        member.propose(Command::RaiseLevel(pb::RaiseLevel { to: r.to })).await?;
        tracing::warn!(level = r.to, "the cluster has another feature level now");
    }
    evict_below(member, r.to.min(member.map().map.level)).await
}
