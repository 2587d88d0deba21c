//! Striped writes of foreign memory, such as a GPU's: the storage servers read it directly. Two
//! things differ from other writes. A write is stable when it is answered: this process does not
//! have its bytes, so it could not send them again after a storage server lost them. And a write
//! whose bytes changed on the way is not repeated here, because the caller computed the checksums.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
};

use futures_util::future::join_all;
use strake_fabric::{ByTransport, Foreign, Lend, Message};
use strake_proto::{
    Code, Error, Result, SessionId,
    checksum::BLOCK,
    data::{DataReply, DataRequest, FLAG_STABLE, Kind},
    layout::Piece,
    map::{ChainExt, MapView},
    opcode,
};

use crate::{
    config::Counters,
    data::{
        chains::{chain_of, is_answer, session_lost},
        clocks::Copies,
        replica_attempts::{Retry, Way},
    },
    inode::{Inode, caps::Cap},
    shared::Attempts,
    write::service::Updates,
};

use super::updates::{Numbers, UnderWay};

/// A write of foreign memory to one chunk.
struct Sent<'a> {
    inode: &'a Inode,
    piece: Piece,
    from: Foreign,
    sums: &'a [u32],
    session: SessionId,
    seq: u64,
    /// Requests of the write that storage servers may have received.
    handed: &'a AtomicI64,
    /// Copies that servers may still accept.
    copies: parking_lot::Mutex<Copies>,
}

impl Updates {
    /// Makes the storage servers read a range from foreign memory; returns when it is stable.
    /// `sums` has one checksum for each 4 KiB block; the range begins at a multiple of 4 KiB. The
    /// caller holds the range's lock. `handed` counts the requests that servers may have received.
    /// `Resend`: the bytes do not match the sums.
    pub(crate) async fn write_foreign(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        offset: u64,
        (from, sums): (&Foreign, &[u32]),
        handed: &AtomicI64,
    ) -> (SessionId, u64, Result<()>) {
        let stripes = inode.placed().stripes;
        let all: Vec<Piece> = stripes.split(offset, from.len()).collect();
        let (session, first) =
            match self.data_numbers(inode, all.len() as u64, Numbers::default()).await {
                Ok((cap, first)) => (cap.session, first),
                Err(e) => return (0, 0, Err(e)),
            };
        let writes = all.iter().zip(first..).map(|(p, seq)| {
            let at = p.file_offset - offset;
            let (block, blocks) = (at as usize / BLOCK, (p.len as usize).div_ceil(BLOCK));
            let from = from.slice(at..at + u64::from(p.len));
            let sums = &sums[block..block + blocks];
            self.write_foreign_piece(Sent {
                inode,
                piece: *p,
                from,
                sums,
                session,
                seq,
                handed,
                copies: Default::default(),
            })
        });
        let writes: Vec<_> = writes.collect();
        let (mut done, mut first_error) = (0, None);
        for (p, r) in all.iter().zip(join_all(writes).await) {
            match r {
                Ok(()) if first_error.is_none() => done += u64::from(p.len),
                Ok(()) => {}
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        Counters::add(&self.shared.stats.written_bytes, done);
        (session, done, first_error.map_or(Ok(()), Err))
    }

    /// As [`Updates::update`].
    async fn write_foreign_piece(self: &Arc<Self>, w: Sent<'_>) -> Result<()> {
        let mut at = self.shared.attempts("write");
        let at_chunk = (w.piece.chain, w.piece.chunk);
        let mut under_way = UnderWay {
            core: self,
            inode: w.inode,
            at: at_chunk,
            session: w.session,
            settled: false,
        };
        let r = self.repeat_foreign(&w, &mut at).await;
        under_way.settled = match &r {
            Ok(()) => true,
            Err(e) => !e.is_retryable() && e.code != Code::Resend && !at.in_doubt,
        };
        if !under_way.settled {
            drop(under_way);
            let copies = *w.copies.lock();
            self.outlive(w.inode, at_chunk, w.session, copies).await;
        }
        r
    }

    /// As `Updates::repeat_update`.
    async fn repeat_foreign(self: &Arc<Self>, w: &Sent<'_>, at: &mut Attempts) -> Result<()> {
        let mut retry = Retry::begin(&self.storage, w.inode, true, 0).await?;
        loop {
            if retry.cap.session != w.session {
                return Err(session_lost());
            }
            let map = self.shared.map();
            match self.try_foreign(&map, w, &retry.cap).await {
                Ok(()) => return Ok(()),
                Err(e) => retry.after(&map, at, e).await?,
            }
        }
    }

    async fn try_foreign(self: &Arc<Self>, map: &MapView, w: &Sent<'_>, cap: &Cap) -> Result<()> {
        let _slot = self.storage.slot().await?;
        let p = &w.piece;
        let chain = chain_of(map, p.chain)?;
        let head = chain.head().ok_or_else(|| self.storage.deserted(map, chain))?;
        let (node, heard) = self.storage.clock_of_head(map, p.chain).await?;
        let round = self.storage.round_of(w.session);
        let request = DataRequest {
            kind: Kind::Write,
            flags: FLAG_STABLE,
            offset: p.offset,
            len: p.len,
            session: w.session,
            seq: w.seq,
            cap: Some(cap.bytes),
            round,
            heard: heard.says(),
            sums: w.sums.to_vec(),
            ..DataRequest::new(chain.id, chain.epoch, head, p.chunk)
        };
        let lend = Some(Lend::Payload(w.from.clone()));
        let m = Message { lend, ..Message::new(opcode::WRITE, request.encode()) };
        let (before, copies) = (w.handed.load(Relaxed), *w.copies.lock());
        w.copies.lock().sends(&heard);
        let sent = self.storage.data_call(map, chain, head, m, Way::Lane(w.handed)).await;
        let handed = || w.handed.load(Relaxed) > before;
        let sent = sent.inspect_err(|e| self.storage.attempted(w.session, round, handed(), e));
        if sent.as_ref().map_or_else(is_answer, |_| true) {
            *w.copies.lock() = copies;
        }
        let m = sent.map_err(|e| self.storage.knows_no_clock(node, &heard, e))?;
        if !DataReply::decode(&m.body)?.stable {
            return Err(Error::new(
                Code::Protocol,
                format!("chain {} answered a stable write as an unstable one", chain.id),
            ));
        }
        w.inode.sent.add(ByTransport::of(m.went, u64::from(p.len)));
        Ok(())
    }

    /// Whether this client has unstable bytes in a range: those could be sent again over what is
    /// written there.
    pub(crate) fn is_unstable(&self, inode: &Inode, range: &Range<u64>) -> bool {
        let (stripes, unstable) = (inode.placed().stripes, self.unstable.lock());
        stripes
            .split(range.start, range.end - range.start)
            .any(|p| unstable.overlaps(p.chain, p.chunk, p.offset, u64::from(p.len)))
    }
}
