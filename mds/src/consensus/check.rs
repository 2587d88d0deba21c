//! What a raft message from a peer must satisfy before raft-rs sees it: raft-rs panics on messages
//! that no correct peer sends, and a member must not die of what arrives on a socket.

use raft::{
    Raft, Storage,
    eraftpb::{ConfState, Message, MessageType},
};

use super::log::MAX_INDEX;

/// The reason to drop `m`, `None` if it may be stepped. `sent`: the last index up to which this log
/// is known to equal the log of the leader of `m`'s term.
pub(super) fn refuse<S: Storage>(raft: &Raft<S>, sent: u64, m: &Message) -> Option<&'static str> {
    use MessageType::*;
    if m.to != raft.id {
        return Some("is for another member");
    }
    if m.from == 0 || m.from == raft.id {
        return Some("has no valid sender");
    }
    if m.term == 0 || m.term > MAX_INDEX {
        return Some("has no valid term");
    }
    let snapshot_index = m.get_snapshot().get_metadata().index;
    if [m.index, m.commit, m.reject_hint, m.request_snapshot, snapshot_index]
        .iter()
        .any(|i| *i > MAX_INDEX)
    {
        return Some("has an index out of range");
    }
    let log = &raft.raft_log;
    match m.get_msg_type() {
        MsgAppend => refuse_append(raft, sent, m),
        MsgHeartbeat if m.term >= raft.term && m.commit > log.last_index() => {
            Some("says that entries are committed that this member never had")
        }
        MsgAppendResponse => {
            if m.term == raft.term && m.index > log.last_index() {
                return Some("acknowledges entries that do not exist");
            }
            // raft-rs 0.7.0 lets a late rejection set the next index to send to one that the
            // follower is known to have already (fixed upstream by #557).
            let matched = raft.prs().get(m.from).map_or(0, |p| p.matched);
            (m.reject && m.request_snapshot == 0 && m.index <= matched && m.term == raft.term)
                .then_some("rejects entries that its sender has acknowledged")
        }
        MsgSnapshot => {
            let meta = m.get_snapshot().get_metadata();
            if meta.index == 0
                || meta.term == 0
                || meta.term > m.term
                || !is_membership(meta.get_conf_state())
            {
                return Some("has an invalid snapshot");
            }
            // raft-rs would accept it and drop acknowledged entries after it.
            (meta.index < raft.pending_request_snapshot)
                .then_some("has an older snapshot than requested")
        }
        MsgRequestVote
        | MsgRequestPreVote
        | MsgRequestVoteResponse
        | MsgRequestPreVoteResponse
        | MsgHeartbeat
        | MsgHeartbeatResponse
        | MsgTimeoutNow => None,
        _ => Some("is of a kind that members do not send to each other"),
    }
}

/// Ids are above 0, no id appears twice, and `learners_next` holds only voters that are leaving.
fn is_membership(c: &ConfState) -> bool {
    let distinct = |ids: &[&[u64]]| {
        let mut all = ids.concat();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        all.len() == count && !all.contains(&0)
    };
    distinct(&[&c.voters, &c.learners, &c.learners_next])
        && distinct(&[&c.voters_outgoing, &c.learners])
        && c.learners_next.iter().all(|id| c.voters_outgoing.contains(id))
        && !c.voters.is_empty()
}

fn refuse_append<S: Storage>(raft: &Raft<S>, sent: u64, m: &Message) -> Option<&'static str> {
    let log = &raft.raft_log;
    // raft-rs uses term 0 for every index that it does not have.
    if (m.log_term == 0) != (m.index == 0) || m.entries.iter().any(|e| e.term == 0) {
        return Some("has entries without a term");
    }
    let (mut index, mut term) = (m.index, m.log_term);
    for e in &m.entries {
        if index.checked_add(1) != Some(e.index) || e.term < term || e.term > m.term {
            return Some("has entries that are not consecutive");
        }
        (index, term) = (e.index, e.term);
        let known = e.index > log.applied && e.index <= log.committed;
        if known && m.term >= raft.term && log.term(e.index).is_ok_and(|t| t != e.term) {
            return Some("contradicts committed entries");
        }
        // If they arrived again, raft-rs would mistake an earlier write of them for the current
        // one.
        let standing = e.index > log.committed && e.index <= sent;
        if standing && m.term == raft.term && log.term(e.index).is_ok_and(|t| t != e.term) {
            return Some("contradicts earlier entries of the same term's leader");
        }
    }
    None
}
