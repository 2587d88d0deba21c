//! Striped reads and writes of foreign memory, a GPU's for one: the storage servers write there and read from there by themselves, over lanes.
//!
//! What is asked of whom, and what is done after an error, is as for all other reads and writes (`rounds.rs`). There are two differences.
//! A write is stable when it is answered: its bytes are not here, so that they could not be sent again after a storage server lost them.
//! And nobody repeats a write by himself whose bytes changed on the way: the sums are the caller's.

use std::{ops::Range, sync::atomic::AtomicI64};

use strake_fabric::{Foreign, Lend};
use strake_proto::{
    checksum::{BLOCK, combine, pieces},
    frame::MAX_PAYLOAD,
};

use super::*;

/// A piece of a range that was read: so many bytes are in foreign memory, or came with the answer, and the rest of it are zeros of a hole.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// Where it begins, counted from the beginning of the range, and its bytes.
    pub range: Range<u64>,
    /// Bytes from there on that the storage server wrote into the memory that it was lent.
    pub placed: u64,
    /// Their CRC32C, by the block sums that are stored with them. It was not compared with what is in that memory.
    pub sum: u32,
    /// Bytes from there on that came with the answer, because they were few. They are verified.
    pub here: Vec<Buf>,
}

/// A write of foreign memory to one chunk.
struct Sent<'a> {
    inode: &'a Inode,
    piece: Piece,
    from: Foreign,
    sums: &'a [u32],
    session: SessionId,
    seq: u64,
    /// Requests of the write that storage servers may have had.
    handed: &'a AtomicI64,
    /// That they may take yet.
    copies: parking_lot::Mutex<Copies>,
}

impl Core {
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
        // All, though one may fail: then nothing is lent any more.
        join_all(reads).await.into_iter().collect()
    }

    /// As [`Core::ask`].
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

    /// As [`Core::ask_round`].
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
        let _slot = self.pieces.acquire().await.map_err(|_| shut_down())?;
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
        let mut came = ByRoad::came(&a.here);
        came.add(Road::Rdma, a.placed);
        came.add(Road::Local, u64::from(p.len) - came.sum());
        inode.fetched.add(came);
        Ok(a)
    }

    // --- writes ---

    /// Has the storage servers read a range from foreign memory, and returns when it is stable. `sums`: of each 4 KiB of it; it begins at a multiple
    /// of that. The caller holds the range's lock. `handed` counts the requests that servers may have had. `Resend`: the bytes are not those that were summed.
    pub(crate) async fn write_foreign(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        offset: u64,
        (from, sums): (&Foreign, &[u32]),
        handed: &AtomicI64,
    ) -> (SessionId, u64, Result<()>) {
        let stripes = inode.placed().stripes;
        let all: Vec<Piece> = stripes.split(offset, from.len()).collect();
        let (session, first) = match self.data_numbers(inode, all.len() as u64, None).await {
            Ok(n) => n,
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

    /// As [`Core::update`].
    async fn write_foreign_piece(self: &Arc<Self>, w: Sent<'_>) -> Result<()> {
        let mut at = self.shared.attempts("write");
        let at_chunk = (w.piece.chain, w.piece.chunk);
        let mut under_way = UnderWay { core: self, inode: w.inode, at: at_chunk, session: w.session, settled: false };
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

    /// As [`Core::repeat_update`].
    async fn repeat_foreign(self: &Arc<Self>, w: &Sent<'_>, at: &mut Attempts) -> Result<()> {
        let mut retry = Retry::begin(self, w.inode, true, 0).await?;
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
        let _slot = self.pieces.acquire().await.map_err(|_| shut_down())?;
        let p = &w.piece;
        let chain = chain_of(map, p.chain)?;
        let head = chain.head().ok_or_else(|| self.deserted(map, chain))?;
        let (node, heard) = self.clock_of_head(map, p.chain).await?;
        let round = self.round_of(w.session);
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
        let sent = self.data_call(map, chain, head, m, Way::Lane(w.handed)).await;
        let handed = || w.handed.load(Relaxed) > before;
        let sent = sent.inspect_err(|e| self.attempted(w.session, round, handed(), e));
        if sent.as_ref().map_or_else(is_answer, |_| true) {
            *w.copies.lock() = copies;
        }
        let m = sent.map_err(|e| self.knows_no_clock(node, &heard, e))?;
        if !DataReply::decode(&m.body)?.stable {
            return Err(Error::new(
                Code::Protocol,
                format!("chain {} answered a stable write as one that is not", chain.id),
            ));
        }
        w.inode.sent.add(ByRoad::of(m.went, u64::from(p.len)));
        Ok(())
    }

    /// Whether anything of this client's that is not stable lies in a range: what is written there must not be written again over it.
    pub(crate) fn is_unstable(&self, inode: &Inode, range: &Range<u64>) -> bool {
        let (stripes, unstable) = (inode.placed().stripes, self.unstable.lock());
        stripes
            .split(range.start, range.end - range.start)
            .any(|p| unstable.overlaps(p.chain, p.chunk, p.offset, u64::from(p.len)))
    }
}

/// What an answer says, or what is wrong with it. The place in the range is left for the caller to fill in.
fn arrived(p: Piece, r: &DataReply, m: Message) -> std::result::Result<Arrived, String> {
    let here = buffers::total(&m.payload);
    if r.len > p.len || m.placed as usize + here != r.len as usize || (here > 0 && m.placed > 0) {
        return Err("the reply's length is wrong".into());
    }
    if here > 0
        && let Some(i) = verify(u64::from(p.offset), m.payload.iter().map(|b| &b[..]), &r.sums)
    {
        return Err(format!("block {i} does not match its checksum"));
    }
    if r.sums.len() != pieces(u64::from(p.offset), r.len as usize) {
        return Err("the reply has too many checksums, or too few".into());
    }
    let sum = if m.placed > 0 { whole_sum(p.offset, r.len, &r.sums) } else { 0 };
    Ok(Arrived { range: 0..0, placed: m.placed.into(), sum, here: m.payload })
}

/// The CRC32C of a range by those of the blocks that it touches.
fn whole_sum(offset: u32, len: u32, sums: &[u32]) -> u32 {
    let (mut sum, mut left, mut room) = (0, len as usize, BLOCK - offset as usize % BLOCK);
    for s in sums {
        let n = room.min(left);
        sum = combine(sum, *s, n);
        (left, room) = (left - n, BLOCK);
    }
    sum
}

/// Bytes of a range at most, so that each of its pieces is one request.
pub(crate) const MOST: u64 = MAX_PAYLOAD as u64;

#[cfg(test)]
mod tests {
    use strake_proto::checksum::crc32c;

    use super::*;

    #[test]
    fn sums_of_blocks_make_the_sum_of_the_range() {
        let bytes: Vec<u8> = (0..20_000u32).map(|i| (i * 7 / 3) as u8).collect();
        for (offset, len) in [(0, 20_000), (4096, 8192), (1, 4095), (4095, 2), (100, 19_000), (0, 1)] {
            let part = &bytes[..len];
            let sums = block_sums(offset, [part]);
            assert_eq!(whole_sum(offset as u32, len as u32, &sums), crc32c(part), "{offset} {len}");
        }
    }

    #[test]
    fn an_answer_that_does_not_add_up_is_damage() {
        let chunk = ChunkId { ino: 1, data: 2, index: 3 };
        let p = Piece { chunk, chain: 4, offset: 0, len: 10_000, file_offset: 0 };
        let reply = |len, sums: usize| DataReply { len, sums: vec![7; sums], ..DataReply::default() };
        let placed = |placed| Message { placed, ..Message::default() };
        let ok = arrived(p, &reply(9000, 3), placed(9000)).unwrap();
        assert_eq!((ok.placed, ok.here.len()), (9000, 0));
        assert_eq!(arrived(p, &reply(0, 0), placed(0)).unwrap().placed, 0, "all of it is a hole");
        for (r, m) in [
            (reply(9000, 3), placed(8999)),
            (reply(9000, 2), placed(9000)),
            (reply(9000, 4), placed(9000)),
            (reply(10_001, 3), placed(10_001)),
            (reply(0, 0), placed(1)),
            (reply(100, 1), Message::new(0, "").with_payload(vec![Buf::copy_from(&[1; 100])])),
        ] {
            arrived(p, &r, m).unwrap_err();
        }
    }
}
