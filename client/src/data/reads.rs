//! Striped reads: one request per piece of a chunk, in parallel. The client chooses the replica,
//! and checks the answer against the checksums in the reply.

use futures_util::future::BoxFuture;
use std::{ops::Range, sync::Arc};

use futures_util::future::join_all;
use strake_fabric::{Buf, ByTransport, Message};
use strake_proto::{
    Code, Error, Result, TargetId,
    checksum::verify,
    data::{DataReply, DataRequest},
    layout::Piece,
    map::MapView,
    opcode, pb,
};

use crate::{
    config::Counters,
    data::{
        buffers::{self},
        replica_attempts::{Retry, Round, Way},
        service::{MAX_CORRUPT_ROUNDS, Question, Storage},
    },
    inode::{Inode, caps::Cap},
};

impl Storage {
    /// The bytes of a range that lies below the file's size; holes read as zeros.
    pub(crate) async fn read_range(
        self: &Arc<Self>,
        inode: &Inode,
        range: Range<u64>,
    ) -> Result<Vec<Buf>> {
        let stripes = inode.placed().stripes;
        let reads =
            stripes.split(range.start, range.end - range.start).map(|p| self.read_piece(inode, p));
        let reads: Vec<_> = reads.collect();
        let mut out = Vec::new();
        for r in join_all(reads).await {
            out.extend(r?);
        }
        Ok(out)
    }

    fn read_piece<'a>(
        self: &'a Arc<Self>,
        inode: &'a Inode,
        p: Piece,
    ) -> BoxFuture<'a, Result<Vec<Buf>>> {
        Box::pin(async move {
            let read = |target, r: DataReply, payload: Vec<Buf>| {
                let bad = |what: &str| {
                    Counters::add(&self.shared.stats.corrupt_replies, 1);
                    Error::new(
                        Code::Corrupt,
                        format!("chunk {} from target {target}: {what}", p.chunk),
                    )
                };
                if r.len > p.len || buffers::total(&payload) != r.len as usize {
                    return Err(bad("the reply's length is wrong"));
                }
                if let Some(i) =
                    verify(u64::from(p.offset), payload.iter().map(|b| &b[..]), &r.sums)
                {
                    return Err(bad(&format!("block {i} does not match its checksum")));
                }
                let mut out = payload;
                buffers::push_zeros(&mut out, &self.zero, (p.len - r.len) as usize);
                inode.fetched.add(ByTransport::came(&out));
                Ok(out)
            };
            let request = DataRequest {
                offset: p.offset,
                len: p.len,
                ..DataRequest::new(p.chain, 0, 0, p.chunk)
            };
            let question = Question { opcode: opcode::READ, chain: p.chain, request, read: &read };
            self.ask(inode, "read", false, &question).await
        })
    }

    /// Asks replicas until one answers. `as_writer`: under the capability to write.
    pub(crate) async fn ask<T>(
        self: &Arc<Self>,
        inode: &Inode,
        what: &'static str,
        as_writer: bool,
        q: &Question<'_, T>,
    ) -> Result<T> {
        let mut at = self.shared.attempts(what);
        let mut retry = Retry::begin(self, inode, as_writer, MAX_CORRUPT_ROUNDS - 1).await?;
        loop {
            let map = self.shared.map();
            match self.ask_round(&map, q, &retry.cap).await {
                Ok(answer) => return Ok(answer),
                Err(e) => retry.after(&map, &mut at, e).await?,
            }
        }
    }

    async fn ask_round<T>(&self, map: &MapView, q: &Question<'_, T>, cap: &Cap) -> Result<T> {
        let mut round = Round::begin(self, map, q.chain, q.request.chunk)?;
        while let Some(target) = round.next() {
            match self.ask_one(map, round.chain, target, q, cap).await {
                Ok(answer) => return Ok(answer),
                Err(e) => round.failed(e)?,
            }
        }
        Err(round.over())
    }

    async fn ask_one<T>(
        &self,
        map: &MapView,
        chain: &pb::Chain,
        target: TargetId,
        q: &Question<'_, T>,
        cap: &Cap,
    ) -> Result<T> {
        let _slot = self.slot().await?;
        let (session, cap) = (cap.session, Some(cap.bytes));
        let request = DataRequest {
            chain: chain.id,
            epoch: chain.epoch,
            target,
            session,
            cap,
            ..q.request.clone()
        };
        let m = self
            .data_call(
                map,
                chain,
                target,
                Message::new(q.opcode, request.encode()),
                Way::Shared(None),
            )
            .await?;
        (q.read)(target, DataReply::decode(&m.body)?, m.payload)
    }
}
