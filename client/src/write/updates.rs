//! Striped writes: one update per piece of a chunk, in parallel, each retried through failures.
//!
//! An update goes to the head of its chain and keeps its number through every retry, so that it is
//! applied once.

use futures_util::future::BoxFuture;
use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use strake_fabric::{Buf, ByTransport, Message};
use strake_proto::{
    ChainId, ChunkId, Code, Error, Result, SessionId,
    checksum::block_sums,
    data::{DataReply, DataRequest, FLAG_STABLE, Kind, Version},
    layout::Piece,
    map::MapView,
    opcode,
};

use crate::{
    config::Counters,
    data::{
        buffers::{self, Content},
        chains::{is_answer, session_lost},
        clocks::Copies,
        replica_attempts::Retry,
    },
    handover::operation::Operation,
    inode::{Inode, UpdateAt, caps::Cap},
    shared::{
        Attempts,
        retry::{DataVerdict, data_verdict},
    },
    write::{
        service::{Hold, Updates, room_for},
        unstable::Entry,
    },
};

/// How often a write is sent again because its bytes changed on the way, before that is an error.
const MAX_RESENDS: u32 = 8;
/// How long to try to fence at the head of a chain when a copy of an update could be applied at any
/// later time.
const FENCE_FOREVER: Duration = Duration::from_secs(1);

/// An update in progress. If it is dropped without having been settled, it is given up, and may
/// still be on its way.
pub(super) struct UnderWay<'a> {
    pub core: &'a Updates,
    pub inode: &'a Inode,
    pub at: UpdateAt,
    pub session: u64,
    pub settled: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some(s) = self.core.storage.session_of(self.session).filter(|_| !self.settled) {
            let (chain, chunk) = self.at;
            self.inode.given_up.lock().insert(chain, (chunk, s.next_round()));
        }
    }
}

/// The session in which a write is numbered, and its operation.
#[derive(Clone, Copy, Default)]
pub(crate) struct Numbers<'a> {
    /// With a session here, `NoSession` in any other one.
    pub only: Option<SessionId>,
    /// The operation, if it may have come again: then its pieces have their former numbers.
    pub operation: Option<&'a Operation>,
}

/// One update of one chunk.
pub(crate) struct Update<'a> {
    pub inode: &'a Inode,
    pub chain: ChainId,
    pub chunk: ChunkId,
    pub offset: u32,
    pub data: Content,
    pub session: u64,
    pub seq: u64,
    /// The capability for the first attempt, if the sender has just looked it up.
    pub cap: Option<Cap>,
    pub flags: u8,
    pub version: Version,
    /// Copies that servers may still accept.
    pub copies: Copies,
}

impl Updates {
    /// One update, repeated with the same number until it is answered. If it is given up, a new
    /// round begins, and no copy of it is applied any more when this returns.
    pub(crate) async fn update(
        self: &Arc<Self>,
        u: &mut Update<'_>,
        at: &mut Attempts,
    ) -> Result<DataReply> {
        let (inode, at_chunk, session) = (u.inode, (u.chain, u.chunk), u.session);
        let mut under_way = UnderWay { core: self, inode, at: at_chunk, session, settled: false };
        let r = self.repeat_update(u, at).await;
        under_way.settled = match &r {
            Ok(_) => true,
            // The head remembers permanently refused updates.
            Err(e) => !e.is_retryable() && !at.in_doubt,
        };
        if !under_way.settled {
            drop(under_way);
            self.outlive(inode, at_chunk, session, u.copies).await;
        }
        r
    }

    async fn repeat_update(
        self: &Arc<Self>,
        u: &mut Update<'_>,
        at: &mut Attempts,
    ) -> Result<DataReply> {
        let mut resends = 0;
        let mut retry = match u.cap.take() {
            Some(cap) => Retry::with(&self.storage, u.inode, true, 0, cap),
            None => Retry::begin(&self.storage, u.inode, true, 0).await?,
        };
        let sums_of =
            |u: &Update| block_sums(u64::from(u.offset), u.data.bytes().iter().map(|b| &b[..]));
        let mut sums = sums_of(u);
        loop {
            if retry.cap.session != u.session {
                return Err(session_lost());
            }
            let map = self.shared.map();
            let e = match self.try_update(&map, &mut *u, &retry.cap, &sums).await {
                Ok(r) => return Ok(r),
                Err(e) => e,
            };
            if data_verdict(&e) != DataVerdict::Resend || resends == MAX_RESENDS {
                retry.after(&map, at, e).await?;
                continue;
            }
            // The caller's memory is being changed, or a link is bad: from now on send a private
            // copy.
            resends += 1;
            Counters::add(&self.shared.stats.resends, 1);
            if let Content::Bytes(b) = &mut u.data {
                *b = vec![buffers::copy(self.shared.fabric.pool(), b)];
            }
            sums = sums_of(u);
            if resends > 1 {
                at.pause(&self.shared, e).await?;
            }
        }
    }

    async fn try_update(
        self: &Arc<Self>,
        map: &MapView,
        u: &mut Update<'_>,
        cap: &Cap,
        sums: &[u32],
    ) -> Result<DataReply> {
        let _slot = self.storage.slot().await?;
        let (node, heard) = self.storage.clock_of_head(map, u.chain).await?;
        let round = self.storage.round_of(u.session);
        let request = DataRequest {
            kind: if matches!(u.data, Content::Bytes(_)) { Kind::Write } else { Kind::Punch },
            flags: u.flags,
            offset: u.offset,
            len: u.data.span() as u32,
            session: u.session,
            seq: u.seq,
            version: u.version,
            cap: Some(cap.bytes),
            round,
            heard: heard.says(),
            sums: sums.to_vec(),
            ..DataRequest::new(u.chain, 0, 0, u.chunk)
        };
        let m = Message::new(opcode::WRITE, Vec::new()).with_payload(u.data.bytes().to_vec());
        let (handed, before) = (AtomicI64::new(0), u.copies);
        u.copies.sends(&heard);
        let sent = self.storage.to_head(map, u.chain, m, request, Some(&handed)).await;
        let sent = sent
            .inspect_err(|e| self.storage.attempted(u.session, round, handed.load(Relaxed) > 0, e));
        if handed.load(Relaxed) == 0 || sent.as_ref().map_or_else(is_answer, |_| true) {
            u.copies = before;
        }
        let (_, reply, transport) =
            sent.map_err(|e| self.storage.knows_no_clock(node, &heard, e))?;
        for b in u.data.bytes() {
            b.sent_by(transport);
            u.inode.sent.add(ByTransport::of(transport, b.len() as u64));
        }
        Ok(reply)
    }

    /// Writes bytes to all their replicas. The caller holds the range's lock. `stable`: on disk,
    /// not only in memory. `numbers`: see [`Updates::data_numbers`].
    pub(crate) async fn write_range(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[Buf],
        stable: bool,
        numbers: Numbers<'_>,
        mut room: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> (SessionId, u64, Result<()>) {
        let stripes = inode.placed().stripes;
        let len = buffers::total(data) as u64;
        let (cap, first) = match self
            .data_numbers(inode, stripes.split(offset, len).count() as u64, numbers)
            .await
        {
            Ok(n) => n,
            Err(e) => return (0, 0, Err(e)),
        };
        let flags = if stable { FLAG_STABLE } else { 0 };
        let writes = stripes.split(offset, len).zip(first..).map(|(p, seq)| {
            let part = buffers::cut(data, (p.file_offset - offset) as usize, p.len as usize);
            let share = room.as_mut().and_then(|r| {
                let n = (room_for(p.len as usize) as usize).min(r.num_permits());
                r.split(n)
            });
            self.write_piece(
                inode,
                p,
                Content::Bytes(part),
                flags,
                (cap.session, seq),
                Some(cap.clone()),
                share,
            )
        });
        let writes: Vec<_> = writes.collect();
        let mut done = 0;
        let mut first_error = None;
        for (p, r) in stripes.split(offset, len).zip(join_all(writes).await) {
            match r {
                Ok(()) if first_error.is_none() => done += u64::from(p.len),
                Ok(()) => {}
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        Counters::add(&self.shared.stats.written_bytes, done);
        (cap.session, done, first_error.map_or(Ok(()), Err))
    }

    /// Numbers for the `n` pieces of one write: a capability of the present session, and the first
    /// number.
    pub(crate) async fn data_numbers(
        self: &Arc<Self>,
        inode: &Inode,
        n: u64,
        Numbers { only, operation }: Numbers<'_>,
    ) -> Result<(Cap, u64)> {
        let lost = || Error::new(Code::NoSession, "the session was lost before a write");
        let is_other = |id: SessionId| only.is_some_and(|only| only != id);
        // Check before a capability is requested in another session.
        if is_other(self.metadata.current_session().map_or(0, |s| s.id)) {
            return Err(lost());
        }
        let cap = self.files.capability(inode, true, None).await?;
        if is_other(cap.session) {
            return Err(lost());
        }
        let gone = || if only.is_some() { lost() } else { session_lost() };
        let session =
            self.metadata.current_session().filter(|s| s.id == cap.session).ok_or_else(gone)?;
        let take = || session.take_data_numbers(n);
        let first = match operation {
            Some(operation) => operation.data(session.id, take),
            None => take(),
        };
        Ok((cap, first))
    }

    pub(crate) fn write_piece<'a>(
        self: &'a Arc<Self>,
        inode: &'a Arc<Inode>,
        p: Piece,
        data: Content,
        flags: u8,
        (session, seq): (SessionId, u64),
        cap: Option<Cap>,
        room: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let mut at = self.shared.attempts("write");
            let mut u = Update {
                inode,
                chain: p.chain,
                chunk: p.chunk,
                offset: p.offset,
                data,
                session,
                seq,
                cap,
                flags,
                version: Version::default(),
                copies: Copies::default(),
            };
            let r = self.update(&mut u, &mut at).await?;
            let data = u.data;
            self.keep_unstable(p, data, (session, seq), &r, inode, room)
        })
    }

    /// Records an unstable write, so that it outlives this process.
    pub(crate) fn keep_write(&self, chain: ChainId, order: u64, entry: &mut Entry<Hold>) {
        if let Some(k) = &self.shared.cfg.handover {
            entry.kept = k.keep_write(order, &entry.kept_as(chain), entry.data.bytes());
        }
    }

    fn keep_unstable(
        &self,
        p: Piece,
        data: Content,
        (session, seq): (u64, u64),
        r: &DataReply,
        inode: &Arc<Inode>,
        room: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> Result<()> {
        let mut unstable = self.unstable.lock();
        if r.stable && !unstable.overlaps(p.chain, p.chunk, p.offset, u64::from(p.len)) {
            return Ok(());
        }
        if self.metadata.current_session().is_none_or(|s| s.id != session) {
            // The write would never be replayed under its number.
            return Err(session_lost());
        }
        let mut entry = Entry {
            kept: None,
            chunk: p.chunk,
            offset: p.offset,
            file_offset: p.file_offset,
            data,
            session,
            seq,
            version: r.version,
            boot_ids: r.boot_ids.clone(),
            at_ms: self.shared.env.boot().as_millis() as u64,
            tag: Arc::new(Hold { inode: inode.clone(), _room: room }),
        };
        self.keep_write(p.chain, unstable.mark(), &mut entry);
        unstable.add(p.chain, entry);
        Ok(())
    }

    /// Returns when no copy of a given-up update can overwrite what any client writes from now on:
    /// the head of its chain has seen the present round, or accepts no update that old. `copies`:
    /// the copies that were sent.
    pub(crate) async fn outlive(
        self: &Arc<Self>,
        inode: &Inode,
        at: UpdateAt,
        session: SessionId,
        copies: Copies,
    ) {
        let until = match copies {
            Copies::None => return,
            Copies::Until(until) => until,
            Copies::Always => self.shared.env.boot() + FENCE_FOREVER,
        };
        let over = async {
            while let Some(left) =
                until.checked_sub(self.shared.env.boot()).filter(|left| !left.is_zero())
            {
                tokio::time::sleep(left).await;
            }
        };
        let fenced = async {
            // Storage servers may not know yet that a session is lost.
            let is_present = || self.metadata.current_session().is_some_and(|s| s.id == session);
            let fenced = is_present()
                && self
                    .fence_at(inode, at, until.saturating_sub(self.shared.env.boot()))
                    .await
                    .is_ok();
            if !(fenced && is_present()) {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            () = over => {}
            () = fenced => {}
        }
    }
}
