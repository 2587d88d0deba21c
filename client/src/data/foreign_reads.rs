//! Striped reads into foreign memory, such as a GPU's: the storage servers write there directly.
//! Which replicas are asked, and what is done after an error, is the same as for other reads.

use std::{
    ops::Range,
    sync::{Arc, atomic::AtomicI64},
};

use futures_util::future::join_all;
use strake_fabric::{ByTransport, Foreign, Lend, Message, Transport};
use strake_proto::{
    Code, Error, Result, TargetId,
    data::{DataReply, DataRequest},
    layout::Piece,
    map::MapView,
    opcode, pb,
};

use crate::{
    config::Counters,
    data::{
        foreign::Arrived,
        replica_attempts::{Retry, Round, Way},
        service::{MAX_CORRUPT_ROUNDS, Storage},
    },
    inode::{Inode, caps::Cap},
};

use crate::data::foreign::arrived;

impl Storage {
    /// Reads a range that lies below the file's size into foreign memory of as many bytes.
    pub(crate) async fn read_foreign(
        self: &Arc<Self>,
        inode: &Inode,
        range: Range<u64>,
        into: &Foreign,
    ) -> Result<Vec<Arrived>> {
        let stripes = inode.placed().stripes;
        let reads = stripes.split(range.start, range.end - range.start).map(|p| {
            let at = p.file_offset - range.start;
            self.read_foreign_piece(inode, p, at, into.slice(at..at + u64::from(p.len)))
        });
        let reads: Vec<_> = reads.collect();
        // Waits for all, even if one fails: afterwards no memory is lent any more.
        join_all(reads).await.into_iter().collect()
    }

    /// As [`Storage::ask`].
    async fn read_foreign_piece(
        self: &Arc<Self>,
        inode: &Inode,
        p: Piece,
        at_range: u64,
        into: Foreign,
    ) -> Result<Arrived> {
        let mut at = self.shared.attempts("read");
        let mut retry = Retry::begin(self, inode, false, MAX_CORRUPT_ROUNDS - 1).await?;
        loop {
            let map = self.shared.map();
            match self.read_foreign_round(&map, inode, p, &into, &retry.cap).await {
                Ok(a) => return Ok(Arrived { range: at_range..at_range + u64::from(p.len), ..a }),
                Err(e) => retry.after(&map, &mut at, e).await?,
            }
        }
    }

    /// As `Storage::ask_round`.
    async fn read_foreign_round(
        &self,
        map: &MapView,
        inode: &Inode,
        p: Piece,
        into: &Foreign,
        cap: &Cap,
    ) -> Result<Arrived> {
        let mut round = Round::begin(self, map, p.chain, p.chunk)?;
        while let Some(target) = round.next() {
            match self.read_foreign_from(map, round.chain, target, inode, p, into, cap).await {
                Ok(a) => return Ok(a),
                Err(e) if e.code == Code::OpNotSupp => round.no_lane(e),
                Err(e) => round.failed(e)?,
            }
        }
        Err(round.over())
    }

    async fn read_foreign_from(
        &self,
        map: &MapView,
        chain: &pb::Chain,
        target: TargetId,
        inode: &Inode,
        p: Piece,
        into: &Foreign,
        cap: &Cap,
    ) -> Result<Arrived> {
        let _slot = self.slot().await?;
        let (session, cap) = (cap.session, Some(cap.bytes));
        let request = DataRequest {
            offset: p.offset,
            len: p.len,
            session,
            cap,
            ..DataRequest::new(chain.id, chain.epoch, target, p.chunk)
        };
        let lend = Some(Lend::Room(into.clone()));
        let m = Message { lend, ..Message::new(opcode::READ, request.encode()) };
        let m = self.data_call(map, chain, target, m, Way::Lane(&AtomicI64::default())).await?;
        let r = DataReply::decode(&m.body)?;
        let a = arrived(p, &r, m).map_err(|what| {
            Counters::add(&self.shared.stats.corrupt_replies, 1);
            Error::new(Code::Corrupt, format!("chunk {} from target {target}: {what}", p.chunk))
        })?;
        let mut came = ByTransport::came(&a.here);
        came.add(Transport::Rdma, a.placed);
        came.add(Transport::Local, u64::from(p.len) - came.sum());
        inode.fetched.add(came);
        Ok(a)
    }
}
