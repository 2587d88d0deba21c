//! Resync of a SYNCING successor.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
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
    copies::{stand_in, stands_for},
    links::{LIST_ONE, NO_CHUNK},
    peers::Lane,
    repair::Repair,
    replica::{Replica, was_removed},
    update_request::UpdateRequest,
};
use crate::{
    chain::rows::Copies as Rows,
    engine::{ChunkMeta, Key, ReadOut},
};

const PAGE: u32 = 1024;
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Pause before asking again whether a target that others resync admits this resync.
const TURN: Duration = Duration::from_millis(200);

/// The result of a push.
pub(super) struct Sent {
    bytes: u64,
    /// Applications wait for the receiving target.
    busy: bool,
}

/// Whether two entries are equal. A tombstone of version 0 counts as no record.
fn same(a: Option<&ListEntry>, b: Option<&ListEntry>) -> bool {
    let state =
        |e: Option<&ListEntry>| e.map_or((Version::default(), true), |e| (e.version, e.tombstone));
    state(a) == state(b)
}

/// See the module.
pub(super) struct Resync {
    replica: Arc<Replica>,
    repair: Arc<Repair>,
    /// The epoch in which the SYNCING successor was completely resynced.
    synced: AtomicU64,
}

impl Resync {
    pub(super) fn new(replica: Arc<Replica>, repair: Arc<Repair>) -> Arc<Resync> {
        Arc::new(Resync { replica, repair, synced: AtomicU64::new(0) })
    }

    /// The epoch in which the successor was completely resynced.
    pub(super) fn synced(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Resyncs the successor until it holds everything committed here, or the epoch is over.
    pub(super) async fn fill(self: Arc<Self>, to: TargetId, epoch: u64) {
        let mut pause = PAUSE_MIN;
        while self.replica.goes_on(epoch) {
            match self.pass(to, epoch).await {
                Ok(pushed) => {
                    tracing::info!(
                        "chain {}: the resync of target {to} is complete ({pushed} chunks sent), \
                         epoch {epoch}",
                        self.replica.chain
                    );
                    // The resync of an earlier epoch may end after this one's.
                    self.synced.fetch_max(epoch, Ordering::AcqRel);
                    self.replica.ctx.kick.notify_one();
                    return;
                }
                Err(e) if e.code == Code::Overloaded => {
                    tracing::debug!("chain {}: {e}", self.replica.chain);
                    tokio::time::sleep(TURN).await;
                }
                Err(e) => {
                    if self.replica.goes_on(epoch) {
                        tracing::warn!(
                            "chain {}: the resync of target {to} was interrupted: {e}",
                            self.replica.chain
                        );
                    }
                    self.replica.ctx.kick.notify_one();
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    /// Compares both lists page by page, pushes the differences, flushes the successor. An
    /// unreadable chunk does not keep others from being sent; the error (`Corrupt`) comes at the
    /// end. Returns how many were sent.
    async fn pass(&self, to: TargetId, epoch: u64) -> Result<usize> {
        let (mut after, mut pushed) = (NO_CHUNK, 0);
        let (mut unread, mut first) = (0, None);
        loop {
            let ours = self.replica.engine().list(
                self.replica.chain,
                (after != NO_CHUNK).then_some(after),
                PAGE as usize,
            )?;
            let theirs = self.replica.links.list_of(to, epoch, after, PAGE, 0).await?;
            if !ListEntry::in_order(&theirs, (after != NO_CHUNK).then_some(after)) {
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
                .buffer_unordered(self.replica.ctx.cfg.sync_parallel);
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
        self.replica.links.forward_flush(to, epoch, None).await?;
        if let Some(e) = first {
            return Err(e.context(format_args!(
                "{unread} chunks cannot be sent, {pushed} other chunks were"
            )));
        }
        // From here on the successor may come into sync. Replicas that know this view must not
        // forget it.
        self.replica.engine().notes().sync().await?;
        Ok(pushed)
    }

    async fn push_held(&self, to: TargetId, epoch: u64, chunk: ChunkId) -> Result<()> {
        let hold = self.replica.hold(chunk, epoch).await?;
        let begun = Instant::now();
        let sent = self.push(to, epoch, chunk).await?;
        drop(hold);
        let (rate, at_a_time) =
            (self.replica.ctx.cfg.sync_rate, self.replica.ctx.cfg.sync_parallel as u64);
        let limit = (sent.bytes * 1000 * at_a_time).checked_div(rate).unwrap_or(0);
        self.replica
            .target
            .foreground
            .make_way(Duration::from_millis(limit), begun.elapsed(), sent.busy)
            .await;
        Ok(())
    }

    /// Sends the committed chunk. The caller holds its slot.
    pub(super) async fn push(&self, to: TargetId, epoch: u64, chunk: ChunkId) -> Result<Sent> {
        let theirs = self.replica.links.list_of(to, epoch, chunk, 1, LIST_ONE).await?;
        let expected = theirs.first().map(|e| e.version).unwrap_or_default();
        let key = self.replica.key(chunk);
        let meta = match self.replica.engine().meta(&key) {
            Err(e) if e.code == Code::Corrupt => {
                self.repair.repair_held(chunk).await?;
                self.replica.engine().meta(&key)?
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
            ..DataRequest::new(self.replica.chain, epoch, to, chunk)
        };
        let mut payload = Vec::new();
        if meta.tombstone {
            r.flags = FLAG_TOMBSTONE;
        } else {
            let (out, damaged) = self.read_out(chunk, meta.len).await?;
            if !damaged.is_empty() {
                tracing::warn!(
                    "chunk {chunk} of chain {} is sent to target {to} with blocks that have no \
                     good copy",
                    self.replica.chain
                );
            }
            (r.len, r.sums, r.damaged, payload) = (out.len, out.sums, damaged, out.data);
        }
        let bytes = u64::from(r.len);
        let m = Message::new(opcode::SYNC_PUT, r.encode()).with_payload(payload);
        let (answer, _) = self.replica.links.call(to, Lane::Other, m).await?;
        Ok(Sent { bytes, busy: answer.len != 0 })
    }

    /// All bytes of a committed chunk, and the ranges without a good copy. Stand-ins in those
    /// ranges carry the checksums of the lost blocks. `Corrupt` while it is unsure whether a copy
    /// exists. The caller holds the chunk's slot.
    async fn read_out(&self, chunk: ChunkId, len: u32) -> Result<(ReadOut, Vec<Range<u32>>)> {
        let key = self.replica.key(chunk);
        match self.replica.engine().read(&key, 0, len).await {
            Err(e) if matches!(e.code, Code::Corrupt | Code::Io) => {}
            other => return Ok((other?, Vec::new())),
        }
        match self.repair.repair_held_at(chunk, None).await {
            Ok(()) => return Ok((self.replica.engine().read(&key, 0, len).await?, Vec::new())),
            // If busy: the update that needs this push is staged, so the chunk is sent as it is.
            Err(u) if !u.lost && !u.busy => return Err(u.cause),
            Err(_) => {} // some of it may be repaired
        }
        let look = self.replica.engine().check_whole(&key).await?.unwrap_or_default();
        let (mut data, mut sums, mut at) = (Vec::new(), Vec::new(), 0);
        for part in &look.damaged {
            self.repair.own(chunk, at..part.start, &mut data, &mut sums).await?;
            let bytes = stand_in(part, &self.replica.engine().sums(&key, part.clone())?);
            sums.extend(block_sums(u64::from(part.start), [&bytes[..]]));
            data.push(Buf::copy_from(&bytes));
            at = part.end;
        }
        self.repair.own(chunk, at..len, &mut data, &mut sums).await?;
        Ok((ReadOut { data, sums, len, version: look.version }, look.damaged))
    }

    /// Handles a SYNC_PUT.
    pub(super) async fn put(&self, request: UpdateRequest) -> Result<DataReply> {
        let mut request = request;
        let (chunk, epoch) = (request.request.chunk, request.request.epoch);
        if self.replica.view().serving() {
            return Err(Error::new(
                Code::NotServing,
                format!("chain {} is in sync here", self.replica.chain),
            ));
        }
        self.replica.target.resync_sources.hears(self.replica.chain, Instant::now());
        let hold = self.replica.hold(chunk, epoch).await?;
        let key = self.replica.key(chunk);
        // A damaged record has no version; any version may replace it.
        let now = match self.replica.engine().meta(&key) {
            Err(e) if e.code == Code::Corrupt => Version::default(),
            other => other?.map(|m| m.version).unwrap_or_default(),
        };
        let r = &request.request;
        // Checked after reading the version: a forgotten tombstone would have told that this
        // message is late.
        if r.flags & FLAG_TOMBSTONE == 0 && self.replica.is_gone(chunk.data) {
            return Err(was_removed(chunk));
        }
        let expected = Version { epoch: r.session, number: r.seq };
        if now != expected && now != r.version {
            let m = format!("chunk {chunk} is at {now:?}, but the sender expects {expected:?}");
            return Err(Error::new(Code::VersionGap, m));
        }
        if now != r.version || now == Version::default() {
            if !r.damaged.is_empty() {
                self.keep_good(&mut request).await;
            }
            let r = &request.request;
            let staged = self.replica.engine().stage(key, request.update()?).await;
            if let Err(e) = &staged {
                self.replica.target.note(e);
            }
            self.replica.check_member(epoch)?;
            self.replica.take_filled(staged?, r)?;
            self.repair.report_given(r);
        }
        let r = &request.request;
        drop(hold);
        let busy = self.replica.target.foreground.is_busy(Instant::now());
        let boot_ids = vec![self.replica.boot_id()];
        Ok(DataReply {
            version: r.version,
            epoch,
            len: u32::from(busy),
            boot_ids,
            ..DataReply::default()
        })
    }

    /// Keeps blocks that are intact here, in whatever version, although they arrive as damaged.
    async fn keep_good(&self, request: &mut UpdateRequest) {
        let all: Vec<u8> = request.payload.iter().flat_map(|b| b.iter().copied()).collect();
        let key = self.replica.key(request.request.chunk);
        let (mut data, mut at, mut damaged) = (Vec::new(), 0, Vec::<Range<u32>>::new());
        for part in std::mem::take(&mut request.request.damaged) {
            for start in (part.start..part.end).step_by(BLOCK) {
                let block = start..part.end.min(start + BLOCK as u32);
                let (from, to) = (block.start as usize, block.end as usize);
                match self.own_block(&key, &block, &all[from..to]).await {
                    Some(own) => {
                        Rows::Keeps.taken();
                        data.push(Buf::copy_from(&all[at..from]));
                        let touched = from / BLOCK;
                        request.request.sums[touched] =
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
            request.payload = data;
        }
        request.request.damaged = damaged;
    }

    /// This target's own copy of the lost block that `stands` stands in for.
    async fn own_block(&self, key: &Key, block: &Range<u32>, stands: &[u8]) -> Option<Vec<u8>> {
        let sum = stands_for(stands)?;
        let own =
            self.replica.engine().read(key, block.start, block.end - block.start).await.ok()?;
        let mut bytes: Vec<u8> = own.data.iter().flat_map(|b| b.iter().copied()).collect();
        bytes.resize(BLOCK, 0);
        (crc32c(&bytes) == sum).then(|| {
            bytes.truncate(stands.len());
            bytes
        })
    }
}
