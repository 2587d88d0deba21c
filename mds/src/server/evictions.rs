//! Evictions that are not for silence: their clients are told why.

use strake_proto::{Result, SessionId, pb};

use super::member::{BATCH, Member};
use pb::log_command::Command;

/// Ends living sessions, each for a reason that its client is told.
pub(super) async fn evict(member: &Member, mut those: Vec<(SessionId, String)>) -> Result<()> {
    those.retain(|(id, _)| member.machine.namespace.session(*id).is_some());
    for batch in those.chunks(BATCH) {
        for (session, why) in batch {
            tracing::warn!(session, why, "a session is evicted");
        }
        // Before they end: a client may ask at once, and once only.
        member.with_lead(|l| {
            batch.iter().for_each(|(id, why)| l.sessions.note_why(*id, why.clone()));
            Ok(())
        })?;
        let sessions = batch.iter().map(|(id, _)| *id).collect();
        member.propose(Command::SessionEnd(pb::SessionEnd { sessions, evict: true })).await?;
        let _ = member.with_lead(|l| {
            for (id, _) in batch {
                l.sessions.remove(*id);
                l.lock_waiters.remove(*id);
            }
            Ok(())
        });
    }
    Ok(())
}
