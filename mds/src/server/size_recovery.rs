//! The leader finds out the size of a file that evicted sessions wrote while other sessions may
//! still write it. Bytes that the evicted ones had not reported cannot be trimmed, so they become
//! part of the file before any client is told its size. See `docs/leases.md`, "What evicted
//! sessions have sent".

use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use strake_fabric::{Connection, Message};
use strake_proto::{
    ChainId, ChunkId, Code, Error, Ino, Result,
    checksum::BLOCK,
    data::{DataReply, DataRequest, Extent, Extents, MAX_EXTENTS},
    layout::{MAX_FILE_SIZE, StripeMap},
    map::{ChainExt, MapView},
    opcode, pb,
};

use super::{
    chunks::{CHAINS_AT_ONCE, work_off},
    member::Member,
};
use crate::{leases::rows::Leader, trim_progress::Did};
use pb::log_command::Command;

/// Most files that are handled at the same time.
const AT_ONCE: usize = 16;
const POLL: Duration = Duration::from_millis(100);
/// Short, because a client waits for each of them.
const RETRY_MAX: Duration = Duration::from_millis(500);
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
const BLOCK_LEN: u32 = BLOCK as u32;

/// Finds the ends of all such files and puts them into the log, for ever.
pub(super) async fn find_ends(member: &Member, term: u64) {
    let list = |n: usize| {
        member.recalls.endless(n).into_iter().map(|file| (file, file.0)).collect::<Vec<_>>()
    };
    let done = |found: Vec<(Ino, u64)>| async move { member.recalls.ends_found(term, &found) };
    let job = |ino| async move { find_end(member, ino).await.map(|()| Did::All) };
    work_off(AT_ONCE, (POLL, RETRY_MAX), std::future::pending, list, job, done).await;
}

/// `Ok`: the end is known, or no longer needed.
async fn find_end(member: &Member, ino: Ino) -> Result<()> {
    let Some(r) = member.machine.namespace.backlog().endless(ino)? else { return Ok(()) };
    if r.trim.is_some() {
        // Bytes about to be trimmed must not count as written.
        return Err(Error::new(Code::Overloaded, "the file waits for a truncation"));
    }
    member.check_fence(r.fence)?;
    let attr = r.attr.unwrap_or_default();
    let end = match &r.layout {
        Some(layout) if attr.size < MAX_FILE_SIZE => {
            stored_end(member, ino, layout, attr.size, r.fence).await?
        }
        _ => 0,
    };
    Leader::EndSought.taken();
    let found = pb::EndFound { ino, fence: r.fence, change: attr.change, end };
    match member.propose(Command::EndFound(found)).await {
        Ok(_) => {
            if end > attr.size {
                Leader::EndFound.taken();
                tracing::info!(
                    end,
                    "inode {ino:#x} is larger than an evicted session had reported"
                );
            }
            Ok(())
        }
        Err(e) => {
            if e.code == Code::Stale {
                Leader::EndMoved.taken();
            }
            Err(e)
        }
    }
}

/// The end of the last byte that the storage servers have from `size` on, 0 if they have none.
/// Waits (with an error) until no session evicted up to this number can write there any more.
async fn stored_end(
    member: &Member,
    ino: Ino,
    layout: &pb::Layout,
    size: u64,
    fence: u64,
) -> Result<u64> {
    let map = member.map();
    let stripes = StripeMap::resolve(ino, layout, &map)?;
    let mut chains = stripes.chains.clone();
    chains.sort_unstable();
    chains.dedup();
    let ends = chains.into_iter().map(|chain| end_on(member, &map, &stripes, chain, size, fence));
    let ends = stream::iter(ends).buffer_unordered(CHAINS_AT_ONCE);
    ends.try_fold(0, |all, end| async move { Ok(end.max(all)) }).await
}

/// The same on one chain. Any replica that may answer a reader may answer this; the tail always
/// may.
async fn end_on(
    member: &Member,
    map: &MapView,
    stripes: &StripeMap,
    id: ChainId,
    size: u64,
    fence: u64,
) -> Result<u64> {
    let chain = map
        .chain(id)
        .ok_or_else(|| Error::new(Code::Io, format!("chain {id} is not in the map")))?;
    if chain.lost {
        return Ok(0); // its data is lost, too
    }
    let not_yet = |m: String| Error::new(Code::NotServing, m);
    if !member.with_lead(|l| Ok(l.manager.chain_knows(fence, chain, map)))? {
        return Err(not_yet(format!("not all of chain {id} know of eviction {fence} yet")));
    }
    let (mut unsure, mut failed) = (None, None);
    let mut replicas: Vec<_> = chain.serving().collect();
    replicas.reverse();
    for target in replicas {
        let node = map
            .node_of(target)
            .ok_or_else(|| Error::new(Code::Io, format!("target {target} has no node")))?;
        let chunk = ChunkId { ino: stripes.ino, data: stripes.data, index: 0 };
        let looked = async {
            let conn = member.links.get(node).await?;
            end_at(&*conn, DataRequest::new(id, chain.epoch, target, chunk), stripes, size).await
        };
        match looked.await {
            Ok(End { at, sure: true }) => return Ok(at),
            // Another replica may know better. If none does, this is the most that any of them may
            // have.
            Ok(end) => unsure = unsure.max(Some(end.at)),
            Err(e) => failed = Some(e.context(format_args!("chain {id} at '{}'", node.name))),
        }
    }
    let nobody = || not_yet(format!("chain {id} has no replica to ask"));
    failed.map_or_else(|| unsure.ok_or_else(nobody), Err)
}

/// The end of a replica's last byte, and whether it could read it.
struct End {
    at: u64,
    sure: bool,
}

/// The same for one replica, to which `request` is addressed.
async fn end_at(
    conn: &dyn Connection,
    request: DataRequest,
    stripes: &StripeMap,
    size: u64,
) -> Result<End> {
    let (first, _) = stripes.locate(size);
    let mut from = (first.chunk.index, first.offset - first.offset % BLOCK_LEN);
    let of_chunk =
        |index| DataRequest { chunk: ChunkId { index, ..request.chunk }, ..request.clone() };
    let mut last: Option<Extent> = None;
    loop {
        let r = DataRequest { offset: from.1, len: MAX_EXTENTS as u32, ..of_chunk(from.0) };
        let (_, payload) = call(conn, opcode::EXTENTS, &r).await?;
        let page = Extents::decode(&payload, from)?;
        // Chunks that the layout has elsewhere do not belong to the file.
        let own = |e: &&Extent| {
            stripes.chain_of(e.index) == request.chain && stripes.place_of(e.index).is_some()
        };
        last = page.found.iter().rev().find(own).copied().or(last);
        match page.next {
            Some(next) => from = next,
            None => break,
        }
    }
    let Some(e) = last else { return Ok(End { at: 0, sure: true }) };
    // Extents are whole blocks: a read tells how much of the last one is used.
    let Some(offset) = e.offset.checked_add(e.len).and_then(|end| end.checked_sub(BLOCK_LEN))
    else {
        return Err(Error::new(Code::Protocol, "a storage server names an impossible extent"));
    };
    let (len, sure) = match call(
        conn,
        opcode::READ,
        &DataRequest { offset, len: BLOCK_LEN, ..of_chunk(e.index) },
    )
    .await
    {
        // Data without bytes: if the record of existing blocks is damaged, all of them count.
        Ok((head, _)) => (head.len.min(BLOCK_LEN), head.len > 0),
        // A bad block: its contents are unknown, but there was something.
        Err(e) if e.code == Code::Corrupt => (BLOCK_LEN, false),
        Err(e) => return Err(e),
    };
    let (start, most) = stripes.place_of(e.index).unwrap_or_default();
    Ok(End { at: (start + most.min(u64::from(offset) + u64::from(len))).min(MAX_FILE_SIZE), sure })
}

async fn call(
    conn: &dyn Connection,
    op: u16,
    request: &DataRequest,
) -> Result<(DataReply, Vec<u8>)> {
    let reply = conn.call(Message::new(op, request.encode()), CALL_TIMEOUT).await?;
    let payload = reply.payload.iter().flat_map(|b| b.iter().copied()).collect();
    Ok((DataReply::decode(&reply.body)?, payload))
}
