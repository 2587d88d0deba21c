//! What a replica sends to the other targets of its chain, and what they answer.

use std::{ops::Range, sync::Arc, time::Duration};

use strake_fabric::{Buf, Message};
use strake_proto::{
    ChainId, ChunkId, Code, Error, Result, TargetId, checksum,
    data::{
        BootId, DataReply, DataRequest, FLAG_GRANTED, FLAG_TOMBSTONE, Kind, ListEntry, Version,
        Writer,
    },
    map::ChainExt,
    opcode,
};

use super::{context::Context, peers::Lane, update_request::UpdateRequest};

/// In SYNC_LIST's `offset`: only the chunk named, if it exists.
pub(super) const LIST_ONE: u32 = 1;
/// A request about no chunk; in a list, where it starts.
pub(super) const NO_CHUNK: ChunkId = ChunkId { ino: 0, data: 0, index: 0 };

/// Which tombstones to forget, for data that is gone for good: those of at most `most` chunks,
/// starting with `from`. 0: of all.
#[derive(Clone, Copy)]
pub(super) struct Forget {
    pub from: ChunkId,
    pub most: u32,
}

impl Forget {
    /// From a FORWARD_FLUSH.
    pub(super) fn of(r: &DataRequest) -> Option<Forget> {
        (r.flags & FLAG_TOMBSTONE != 0).then_some(Forget { from: r.chunk, most: r.len })
    }
}

/// Where an update stands in the order of its chunk's changes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub epoch: u64,
    pub version: Version,
    /// The version that it builds on.
    pub prev: Version,
}

/// See the module.
pub(super) struct ChainLinks {
    ctx: Arc<Context>,
    chain: ChainId,
}

impl ChainLinks {
    pub(super) fn new(ctx: Arc<Context>, chain: ChainId) -> ChainLinks {
        ChainLinks { ctx, chain }
    }

    /// Calls the storage server of a target of this chain.
    pub(super) async fn call(
        &self,
        to: TargetId,
        lane: Lane,
        m: Message,
    ) -> Result<(DataReply, Vec<Buf>)> {
        let map = self.ctx.map.load_full();
        let target = map.target(to).ok_or_else(|| {
            Error::new(
                Code::NotServing,
                format!("target {to} of chain {} is not in the map", self.chain),
            )
        })?;
        let timeout = Duration::from_millis(self.ctx.cfg.peer_timeout_ms);
        let reply = self.ctx.peers.call(&map, target.node, lane, m, timeout).await?;
        Ok((DataReply::decode(&reply.body)?, reply.payload))
    }

    /// How many replicas behind this target of the chain take updates.
    fn behind(&self, target: TargetId) -> u8 {
        let map = self.ctx.map.load();
        let Some(chain) = map.chain(self.chain) else { return 0 };
        let (mut n, mut at) = (0, target);
        while let Some((next, _)) = chain.successor(at) {
            (n, at) = (n + 1, next);
        }
        n
    }

    /// Passes an update on. Returns the boot ids of the replicas that have committed it.
    pub(super) async fn forward(
        &self,
        update: &UpdateRequest,
        to: TargetId,
        at: Place,
    ) -> Result<Vec<BootId>> {
        let Place { epoch, version, prev } = at;
        let request = DataRequest {
            epoch,
            target: to,
            version,
            round: 0,
            heard: 0,
            flags: update.request.flags & (FLAG_TOMBSTONE | FLAG_GRANTED),
            cap: None,
            writers: vec![Writer { session: 0, seq: 0, version: prev }],
            regions: Vec::new(),
            ..update.request.clone()
        };
        let mut m =
            Message::new(opcode::FORWARD, request.encode()).with_payload(update.payload.clone());
        m.trace = update.trace;
        self.call(to, Lane::Forward(self.behind(to)), m).await.map(|(r, _)| r.boot_ids)
    }

    /// Has a target and all behind it flush. With `forget`, they then forget tombstones; also
    /// returns where they have to continue.
    pub(super) async fn forward_flush(
        &self,
        to: TargetId,
        epoch: u64,
        forget: Option<Forget>,
    ) -> Result<(Vec<BootId>, Option<u64>)> {
        let chunk = forget.map_or(NO_CHUNK, |f| f.from);
        let flags = if forget.is_some() { FLAG_TOMBSTONE } else { 0 };
        let len = forget.map_or(0, |f| f.most);
        let r = DataRequest { flags, len, ..DataRequest::new(self.chain, epoch, to, chunk) };
        let m = Message::new(opcode::FORWARD_FLUSH, r.encode());
        let result = self.call(to, Lane::Flush(self.behind(to)), m).await;
        if matches!(&result, Err(e) if e.code == Code::StaleEpoch) {
            self.ctx.kick.notify_one();
        }
        result.map(|(r, _)| (r.boot_ids, (r.len != 0).then_some(r.version.number)))
    }

    /// A target's chunks after `chunk`, at most `len`. `mode`: [`LIST_ONE`], or 0.
    pub(super) async fn list_of(
        &self,
        to: TargetId,
        epoch: u64,
        chunk: ChunkId,
        len: u32,
        mode: u32,
    ) -> Result<Vec<ListEntry>> {
        let r = DataRequest { len, offset: mode, ..DataRequest::new(self.chain, epoch, to, chunk) };
        let (_, payload) =
            self.call(to, Lane::Other, Message::new(opcode::SYNC_LIST, r.encode())).await?;
        let mut entries = Vec::new();
        for p in payload {
            entries.extend(ListEntry::decode_all(&p)?);
        }
        Ok(entries)
    }

    /// A part of a chunk from a replica in sync. `even_dirty`: the caller knows which version it
    /// wants, so the replica may answer while an update is in flight.
    pub(super) async fn fetch(
        &self,
        to: TargetId,
        epoch: u64,
        chunk: ChunkId,
        part: Range<u32>,
        even_dirty: bool,
    ) -> Result<(DataReply, Vec<Buf>)> {
        let kind = if even_dirty { Kind::Replace } else { Kind::None };
        let (offset, len) = (part.start, part.end - part.start);
        let r = DataRequest { kind, offset, len, ..DataRequest::new(self.chain, epoch, to, chunk) };
        self.call(to, Lane::Other, Message::new(opcode::READ, r.encode())).await
    }

    /// A target's bytes of a part of a chunk, as far as its copy reaches, at whatever version.
    pub(super) async fn copy_of(
        &self,
        to: TargetId,
        epoch: u64,
        chunk: ChunkId,
        part: Range<u32>,
    ) -> Result<(DataReply, Vec<Buf>)> {
        let (offset, len) = (part.start, part.end - part.start);
        let r = DataRequest { offset, len, ..DataRequest::new(self.chain, epoch, to, chunk) };
        let (reply, data) =
            self.call(to, Lane::Other, Message::new(opcode::READ_COPY, r.encode())).await?;
        if checksum::verify(u64::from(offset), data.iter().map(|b| &b[..]), &reply.sums).is_some() {
            return Err(Error::new(
                Code::Resend,
                format!("the copy of chunk {chunk} from target {to} was damaged in transit"),
            ));
        }
        Ok((reply, data))
    }
}
