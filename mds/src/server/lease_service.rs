//! Clients ask what they must forget or report; a client that does not do so in time is evicted.

use bytes::Bytes;
use std::time::Duration;
use strake_proto::{Result, pb};
use tokio::time::{Instant, timeout_at};

use super::{
    member::{BATCH, Member},
    wire::encode,
};
use crate::leases::rows::Reporting;
use pb::log_command::Command;

/// How long a client's request waits for something to forget. Less than the client waits for an
/// answer.
const POLL: Duration = Duration::from_secs(3);

/// Answers a client that asks what it must forget, report or check.
pub(super) async fn recall(member: &Member, request: pb::RecallRequest) -> Result<Bytes> {
    let term = member.leading()?;
    let deadline = Instant::now() + POLL;
    let (mut reply, bell) = member.recalls.poll(term, &request)?;
    // A request with a report comes in parallel to the one that waits, and is answered at once.
    let tells = !(request.reported.is_empty()
        && request.working.is_empty()
        && request.locks_checked.is_empty());
    while reply == pb::RecallReply::default() && !tells {
        let rung = bell.notified();
        tokio::pin!(rung);
        // From here on no wake-up is missed.
        rung.as_mut().enable();
        reply = member.recalls.poll(term, &request)?.0;
        if reply != pb::RecallReply::default() || timeout_at(deadline, rung).await.is_err() {
            break;
        }
    }
    Ok(encode(&reply))
}

/// Handles what ends through time, while this server leads.
pub(super) async fn end_leases(member: &Member) {
    loop {
        if !member.recalls.next_end().await {
            continue;
        }
        let (now, silence) = (member.env.boot(), member.recalls.limits.silence);
        let gone = match member.recalls.asked() {
            asked if asked.is_empty() => asked,
            asked => {
                member.with_lead(|l| Ok(l.sessions.silent(now, silence, asked))).unwrap_or_default()
            }
        };
        let (mut silent, late) = member.recalls.tick(&gone);
        // Like everything that makes a file grow, a report waits while the file is being trimmed,
        // or its end searched; the sender is not to blame.
        let namespace = &member.machine.namespace;
        let held_up = |ino| {
            namespace.backlog().trim_of(ino).is_some()
                || !matches!(namespace.backlog().endless(ino), Ok(None))
        };
        let (excused, late): (Vec<_>, Vec<_>) =
            late.into_iter().partition(|(_, ino)| held_up(*ino));
        member.recalls.excuse(&excused);
        late.iter().for_each(|_| Reporting::Late.taken());
        silent.extend(late.into_iter().map(|(id, _)| id));
        silent.sort_unstable();
        silent.dedup();
        for batch in silent.chunks(BATCH) {
            tracing::warn!(sessions = ?batch, "evicting sessions that do not acknowledge recalls");
            let end = pb::SessionEnd { sessions: batch.to_vec(), evict: true };
            if let Err(e) = member.propose(Command::SessionEnd(end)).await {
                tracing::warn!("ending sessions: {e}");
            }
        }
    }
}
