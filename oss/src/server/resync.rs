//! Resync of a SYNCING successor.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{StreamExt, stream};
use strake_fabric::{Buf, Message};
use strake_proto::{
    ChunkId, Code, Error, Result, TargetId,
    checksum::{BLOCK, block_sums, crc32c},
    data::{DataReply, DataRequest, FLAG_TOMBSTONE, Kind, ListEntry, Version},
    opcode,
};
use tokio::time::Instant;

use super::{
    backpressure::{QUIET, pause},
    copies::{stand_in, stands_for},
    peers::Lane,
    replica::{Carried, Replica, update_of},
};
use crate::{
    chain::rows::Copies,
    engine::{ChunkMeta, Key, ReadOut},
};

const PAGE: u32 = 1024;
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Pause before asking again whether a target that others resync admits this resync.
const TURN: Duration = Duration::from_millis(200);
/// In SYNC_LIST's `offset`: only the chunk named, if it exists.
pub(super) const LIST_ONE: u32 = 1;
const FIRST: ChunkId = ChunkId { ino: 0, data: 0, index: 0 };

/// The result of a push.
pub(super) struct Sent {
    bytes: u64,
    /// Applications wait for the receiving target.
    busy: bool,
}

pub(super) fn was_removed(chunk: ChunkId) -> Error {
    Error::new(Code::Stale, format!("the data of chunk {chunk} was removed"))
}

/// Whether two entries are equal. A tombstone of version 0 counts as no record.
fn same(a: Option<&ListEntry>, b: Option<&ListEntry>) -> bool {
    let state =
        |e: Option<&ListEntry>| e.map_or((Version::default(), true), |e| (e.version, e.tombstone));
    state(a) == state(b)
}

impl Replica {
    /// Resyncs the successor until it holds everything committed here, or the epoch is over.
    pub(super) async fn fill(self: Arc<Self>, to: TargetId, epoch: u64) {
        let mut pause = PAUSE_MIN;
        while self.goes_on(epoch) {
            match self.pass(to, epoch).await {
                Ok(pushed) => {
                    tracing::info!(
                        "chain {}: target {to} is filled ({pushed} chunks sent), epoch {epoch}",
                        self.chain
                    );
                    // The resync of an earlier epoch may end after this one's.
                    self.synced.fetch_max(epoch, Ordering::AcqRel);
                    self.node.kick.notify_one();
                    return;
                }
                Err(e) if e.code == Code::Overloaded => {
                    tracing::debug!("chain {}: {e}", self.chain);
                    tokio::time::sleep(TURN).await;
                }
                Err(e) => {
                    if self.goes_on(epoch) {
                        tracing::warn!(
                            "chain {}: filling target {to} is interrupted: {e}",
                            self.chain
                        );
                    }
                    self.node.kick.notify_one();
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    /// Compares both lists page by page, pushes the differences, flushes the successor. An
    /// unreadable chunk does not keep others from being sent; the error (`Corrupt`) comes at the
    /// end. Returns how many were sent.
    async fn pass(self: &Arc<Self>, to: TargetId, epoch: u64) -> Result<usize> {
        let (mut after, mut pushed) = (FIRST, 0);
        let (mut unread, mut first) = (0, None);
        loop {
            let ours =
                self.engine().list(self.chain, (after != FIRST).then_some(after), PAGE as usize)?;
            let theirs = self.list_of(to, epoch, after, PAGE, 0).await?;
            if !ListEntry::in_order(&theirs, (after != FIRST).then_some(after)) {
                return Err(Error::new(
                    Code::Protocol,
                    format!("target {to} lists its chunks out of order"),
                ));
            }
            // If a page is full, that side may have more entries after its end. Compare only up to
            // the nearer end.
            let full = |l: &[ListEntry]| {
                (l.len() >= PAGE as usize).then(|| l.last().map(|e| e.chunk)).flatten()
            };
            let end = [full(&ours), full(&theirs)].into_iter().flatten().min();
            let within = |e: &&ListEntry| end.is_none_or(|end| e.chunk <= end);
            let mut both: BTreeMap<ChunkId, (Option<&ListEntry>, Option<&ListEntry>)> =
                BTreeMap::new();
            for e in ours.iter().filter(within) {
                both.entry(e.chunk).or_default().0 = Some(e);
            }
            for e in theirs.iter().filter(within) {
                both.entry(e.chunk).or_default().1 = Some(e);
            }
            let differing: Vec<ChunkId> =
                both.iter().filter(|(_, (a, b))| !same(*a, *b)).map(|(c, _)| *c).collect();
            let mut pushes = stream::iter(differing)
                .map(|chunk| self.push_held(to, epoch, chunk))
                .buffer_unordered(self.node.cfg.sync_parallel);
            while let Some(r) = pushes.next().await {
                match r {
                    Err(e) if e.code == Code::Corrupt => {
                        unread += 1;
                        first.get_or_insert(e);
                    }
                    other => {
                        other?;
                        pushed += 1;
                    }
                }
            }
            match end {
                Some(e) => after = e,
                None => break,
            }
        }
        self.flush_successor(to, epoch).await?;
        if let Some(e) = first {
            return Err(
                e.context(format_args!("{unread} chunks cannot be sent, {pushed} others were"))
            );
        }
        // From here on the successor may come into sync. Replicas that know this view must not
        // forget it.
        self.engine().sync_chain_views().await?;
        Ok(pushed)
    }

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

    async fn push_held(self: &Arc<Self>, to: TargetId, epoch: u64, chunk: ChunkId) -> Result<()> {
        let hold = self.hold(chunk, epoch).await?;
        let begun = Instant::now();
        let sent = self.push(to, epoch, chunk).await?;
        drop(hold);
        let (rate, at_a_time) = (self.node.cfg.sync_rate, self.node.cfg.sync_parallel as u64);
        let limit = (sent.bytes * 1000 * at_a_time).checked_div(rate).unwrap_or(0);
        self.make_way(Duration::from_millis(limit), begun.elapsed(), sent.busy).await;
        Ok(())
    }

    /// Waits after a piece: for the rate limit, and while applications wait for this target or, as
    /// reported with the piece, for the successor.
    pub(super) async fn make_way(&self, limit: Duration, took: Duration, busy_there: bool) {
        let begun = Instant::now();
        loop {
            let busy = busy_there || self.target.foreground.is_busy(Instant::now());
            let left = pause(limit, took, busy).saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(if busy { left.min(QUIET) } else { left }).await;
        }
    }

    /// Sends the committed chunk. The caller holds its slot.
    pub(super) async fn push(
        self: &Arc<Self>,
        to: TargetId,
        epoch: u64,
        chunk: ChunkId,
    ) -> Result<Sent> {
        let theirs = self.list_of(to, epoch, chunk, 1, LIST_ONE).await?;
        let expected = theirs.first().map(|e| e.version).unwrap_or_default();
        let key = self.key(chunk);
        let meta = match self.engine().meta(&key) {
            Err(e) if e.code == Code::Corrupt => {
                self.repair_held(chunk).await?;
                self.engine().meta(&key)?
            }
            other => other?,
        };
        let meta = meta.unwrap_or(ChunkMeta { tombstone: true, ..ChunkMeta::default() });
        let mut r = DataRequest {
            kind: Kind::Replace,
            version: meta.version,
            writers: meta.writers,
            // The version that it replaces. If the receiver has another one, this message is late.
            session: expected.epoch,
            seq: expected.number,
            ..DataRequest::new(self.chain, epoch, to, chunk)
        };
        let mut payload = Vec::new();
        if meta.tombstone {
            r.flags = FLAG_TOMBSTONE;
        } else {
            let (out, damaged) = self.read_out(chunk, meta.len).await?;
            if !damaged.is_empty() {
                tracing::warn!(
                    "chunk {chunk} of chain {} goes to target {to} with what has no good copy",
                    self.chain
                );
            }
            (r.len, r.sums, r.damaged, payload) = (out.len, out.sums, damaged, out.data);
        }
        let bytes = u64::from(r.len);
        let m = Message::new(opcode::SYNC_PUT, r.encode()).with_payload(payload);
        let (answer, _) = self.call(to, Lane::Other, m).await?;
        Ok(Sent { bytes, busy: answer.len != 0 })
    }

    /// All bytes of a committed chunk, and the ranges without a good copy. Stand-ins in those
    /// ranges carry the checksums of the lost blocks. `Corrupt` while it is unsure whether a copy
    /// exists. The caller holds the chunk's slot.
    async fn read_out(
        self: &Arc<Self>,
        chunk: ChunkId,
        len: u32,
    ) -> Result<(ReadOut, Vec<Range<u32>>)> {
        let key = self.key(chunk);
        match self.engine().read(&key, 0, len).await {
            Err(e) if matches!(e.code, Code::Corrupt | Code::Io) => {}
            other => return Ok((other?, Vec::new())),
        }
        match self.repair_as(chunk, None).await {
            Ok(()) => return Ok((self.engine().read(&key, 0, len).await?, Vec::new())),
            // If busy: the update that needs this push is staged, so the chunk is sent as it is.
            Err(u) if !u.lost && !u.busy => return Err(u.cause),
            Err(_) => {} // some of it may be repaired
        }
        let look = self.engine().check_whole(&key).await?.unwrap_or_default();
        let (mut data, mut sums, mut at) = (Vec::new(), Vec::new(), 0);
        for part in &look.damaged {
            self.own(chunk, at..part.start, &mut data, &mut sums).await?;
            let bytes = stand_in(part, &self.engine().sums(&key, part.clone())?);
            sums.extend(block_sums(u64::from(part.start), [&bytes[..]]));
            data.push(Buf::copy_from(&bytes));
            at = part.end;
        }
        self.own(chunk, at..len, &mut data, &mut sums).await?;
        Ok((ReadOut { data, sums, len, version: look.version }, look.damaged))
    }

    /// Handles a SYNC_PUT.
    pub(super) async fn put(self: &Arc<Self>, carried: Carried) -> Result<DataReply> {
        let mut carried = carried;
        let (chunk, epoch) = (carried.request.chunk, carried.request.epoch);
        if self.view().serving() {
            return Err(Error::new(
                Code::NotServing,
                format!("chain {} is in sync here", self.chain),
            ));
        }
        self.target.fills.hears(self.chain, Instant::now());
        let hold = self.hold(chunk, epoch).await?;
        let key = self.key(chunk);
        // A damaged record has no version; any version may replace it.
        let now = match self.engine().meta(&key) {
            Err(e) if e.code == Code::Corrupt => Version::default(),
            other => other?.map(|m| m.version).unwrap_or_default(),
        };
        let r = &carried.request;
        // Checked after reading the version: a forgotten tombstone would have told that this
        // message is late.
        if r.flags & FLAG_TOMBSTONE == 0 && self.is_gone(chunk.data) {
            return Err(was_removed(chunk));
        }
        let expected = Version { epoch: r.session, number: r.seq };
        if now != expected && now != r.version {
            let m = format!("chunk {chunk} is at {now:?}, not {expected:?} as the sender believes");
            return Err(Error::new(Code::VersionGap, m));
        }
        if now != r.version || now == Version::default() {
            if !r.damaged.is_empty() {
                self.keep_good(&mut carried).await;
            }
            let r = &carried.request;
            let staged = self.engine().stage(key, update_of(&carried)?).await;
            if let Err(e) = &staged {
                self.target.note(e);
            }
            self.check_member(epoch)?;
            self.take_filled(staged?, r)?;
            self.report_given(r);
        }
        let r = &carried.request;
        drop(hold);
        let busy = self.target.foreground.is_busy(Instant::now());
        let stamps = vec![self.stamp()];
        Ok(DataReply {
            version: r.version,
            epoch,
            len: u32::from(busy),
            stamps,
            ..DataReply::default()
        })
    }

    /// Keeps blocks that are intact here, in whatever version, although they arrive as damaged.
    async fn keep_good(&self, carried: &mut Carried) {
        let all: Vec<u8> = carried.payload.iter().flat_map(|b| b.iter().copied()).collect();
        let key = self.key(carried.request.chunk);
        let (mut data, mut at, mut damaged) = (Vec::new(), 0, Vec::<Range<u32>>::new());
        for part in std::mem::take(&mut carried.request.damaged) {
            for start in (part.start..part.end).step_by(BLOCK) {
                let block = start..part.end.min(start + BLOCK as u32);
                let (from, to) = (block.start as usize, block.end as usize);
                match self.own_block(&key, &block, &all[from..to]).await {
                    Some(own) => {
                        Copies::Keeps.taken();
                        data.push(Buf::copy_from(&all[at..from]));
                        let touched = from / BLOCK;
                        carried.request.sums[touched] =
                            block_sums(u64::from(block.start), [&own[..]])[0];
                        data.push(Buf::copy_from(&own));
                        at = to;
                    }
                    None => match damaged.last_mut() {
                        Some(last) if last.end == block.start => last.end = block.end,
                        _ => damaged.push(block),
                    },
                }
            }
        }
        if at > 0 {
            data.push(Buf::copy_from(&all[at..]));
            data.retain(|b| !b.is_empty());
            carried.payload = data;
        }
        carried.request.damaged = damaged;
    }

    /// This target's own copy of the lost block that `stands` stands in for.
    async fn own_block(&self, key: &Key, block: &Range<u32>, stands: &[u8]) -> Option<Vec<u8>> {
        let sum = stands_for(stands)?;
        let own = self.engine().read(key, block.start, block.end - block.start).await.ok()?;
        let mut bytes: Vec<u8> = own.data.iter().flat_map(|b| b.iter().copied()).collect();
        bytes.resize(BLOCK, 0);
        (crc32c(&bytes) == sum).then(|| {
            bytes.truncate(stands.len());
            bytes
        })
    }
}
