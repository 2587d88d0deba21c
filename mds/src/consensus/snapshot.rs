//! Copies a whole state to a member that is too far behind for the log: the key-value pairs in
//! order, in SNAPSHOT frames over a separate connection, and then the Raft message that names the
//! copy.
//!
//! The receiver writes the pairs over its own state as they arrive (its log records that first),
//! and counts as a member without a state until the Raft message ends the copy. See
//! `docs/decisions/raft.md`.

use std::{ops::Bound, sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use raft::eraftpb;
use strake_fabric::{Connection, Endpoint, Message};
use strake_proto::{Code, Result, opcode, pb};
use strake_store::Reader;
use tokio::sync::oneshot;

use super::transport::Sender;

const CHUNK: usize = 1 << 20;
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A copy being sent to a peer.
pub(super) struct Outgoing {
    pub id: u64,
    pub index: u64,
    pub term: u64,
    pub view: Box<dyn Reader>,
    /// Ends the copy.
    pub message: eraftpb::Message,
    pub endpoint: Endpoint,
}

/// A copy being received.
pub(super) struct Incoming {
    pub from: u64,
    pub id: u64,
    pub index: u64,
    pub term: u64,
    /// Number of the next chunk.
    pub next: u64,
    pub complete: bool,
    /// The first chunk, kept until the log has recorded the start of the copy.
    pub first: Option<(pb::SnapshotChunk, oneshot::Sender<Result<()>>)>,
}

pub(super) async fn send(s: Arc<Sender>, out: Outgoing) -> Result<()> {
    let conn = s.fabric.connect(&out.endpoint, None).await?;
    let sent = send_over(&s, &out, &*conn).await;
    conn.close();
    sent
}

async fn send_over(s: &Sender, out: &Outgoing, conn: &dyn Connection) -> Result<()> {
    let to = out.message.to;
    let knows = s.greet(to, conn).await?;
    s.may_have(to, knows, &[])?;
    let mut after: Option<Bytes> = None;
    for number in 0.. {
        let (pairs, last) = read_chunk(&*out.view, after.as_ref())?;
        after = pairs.last().map(|p| p.key.clone());
        let chunk = pb::SnapshotChunk {
            from: s.id,
            to,
            snapshot: out.id,
            index: out.index,
            number,
            last,
            total_keys: 0,
            pairs,
            term: out.term,
            cluster: s.cluster.to_vec().into(),
            incarnation: s.sm.incarnation().map(|i| i.0),
            level: s.level,
        };
        match conn.call(Message::new(opcode::SNAPSHOT, chunk.encode_to_vec()), CALL_TIMEOUT).await {
            Ok(_) if last => break,
            Ok(_) => {}
            // The receiver's log has everything already; the Raft message alone tells it so.
            Err(e) if e.code == Code::Exist && number == 0 => break,
            Err(e) => return Err(e),
        }
    }
    conn.call(s.batch(to, std::slice::from_ref(&out.message))?, CALL_TIMEOUT).await.map(drop)
}

/// About [`CHUNK`] bytes of pairs after a key, and whether they are the last.
fn read_chunk(view: &dyn Reader, after: Option<&Bytes>) -> Result<(Vec<pb::Pair>, bool)> {
    let from = after.map_or(Bound::Unbounded, |k| Bound::Excluded(&k[..]));
    let mut pairs = Vec::new();
    let mut size = 0;
    for pair in view.range(from, Bound::Unbounded) {
        let (key, value) = pair?;
        if size >= CHUNK {
            return Ok((pairs, false));
        }
        size += key.len() + value.len() + 16;
        pairs.push(pb::Pair { key, value });
    }
    Ok((pairs, true))
}
