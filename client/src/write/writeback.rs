//! Write-back: writes to a file that no other client may write are held back, and sent later in
//! larger pieces. The rules are in `docs/leases.md`; [`Dirty`] keeps the dirty data.
//!
//! One lock covers the check whether a write may be held back and its insertion. A recall ends the
//! file's tenure before it is acknowledged. After that the metadata leader asks for a report, which
//! sends the dirty data under the same lock. So no write is held back that the report did not send.

use futures_util::future::BoxFuture;
use std::{ops::Range, sync::Arc, time::Duration};

use futures_util::{
    future::join_all,
    stream::{self, StreamExt},
};
use parking_lot::Mutex;
use strake_fabric::Buf;
use strake_proto::{
    Code, Error, Ino, Result, SessionId,
    data::{FLAG_GRANTED, GRANT_UNIT},
    layout::Piece,
    pb,
};
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};

use crate::{
    config::Counters,
    data::buffers::{self, Content},
    data::chains::session_lost,
    handover::{KeptWrite, WriteKind, WriteRecord},
    inode::Inode,
    inode::O_APPEND,
    read::cache::Tenure,
    write::grants::Verdict,
    write::service::room_for,
    write::updates::Numbers,
    write::{
        back::{Tag, Taken, Write},
        dirty::Run,
        held_writes::WriteBack,
    },
};

/// Writes of at least this many bytes gain nothing by waiting.
const LARGE: usize = 1 << 20;
/// With this many bytes of a file, they are sent immediately.
const ENOUGH: u64 = 4 << 20;
/// Most bytes of one file that are held back: above this, writers wait until some are sent.
const MOST: u64 = 32 << 20;
/// The longest piece that is sent; and the longest one that must outlive this process, for which
/// contiguous memory must be found.
const LONGEST: u64 = 16 << 20;
const LONGEST_KEPT: u64 = 1 << 20;
/// How long bytes wait for more.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often to check for bytes that have waited long enough.
pub(crate) const LOOK: Duration = Duration::from_millis(100);
/// Most pieces of a file that are sent at a time.
const RUNS_AT_ONCE: usize = 32;

const O_DSYNC: u32 = 0o10000;
const O_DIRECT: u32 = 0o40000;

impl WriteBack {
    /// Holds a write back if that is allowed.
    pub(crate) fn hold_back(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        creds: &pb::Creds,
        flags: u32,
        offset: u64,
        data: &[Buf],
    ) -> Taken {
        let len = buffers::total(data);
        let through = flags & (O_DSYNC | O_DIRECT | O_APPEND) != 0 || len >= LARGE || len == 0;
        if !self.shared.cfg.write_back || through || inode.is_doubtful() {
            return Taken::Through;
        }
        let Some(session) = self.metadata.current_session().filter(|s| s.may_hold_back) else {
            return Taken::Through;
        };
        // Other clients that map the file must find everything sent.
        let Some(_using) = self.pages.use_freely(inode.ino) else { return Taken::Through };
        let mut state = inode.back.state.lock();
        if state.held.is_barred() || !self.is_sole_writer(inode, session.id, &mut state.leased_in) {
            return Taken::Through;
        }
        let all = room_for(self.shared.cfg.unstable_limit) as usize;
        let room = self.updates.room().clone().try_acquire_many_owned(room_for(len));
        let Some(room) = room.ok().filter(|_| self.updates.room().available_permits() >= all / 4)
        else {
            return Taken::Full;
        };
        if state.held.bytes() + len as u64 > MOST {
            return Taken::Full;
        }
        let joins = state.held.joins(offset, GRANT_UNIT);
        let Some(cost) = self.cost(inode, session.id, offset, len as u64, joins) else {
            return Taken::Through;
        };
        match self.grants.lock().hold(self.shared.env.boot(), &cost) {
            Verdict::Yes => {}
            Verdict::Full => return Taken::Full,
            Verdict::Ask => return Taken::Ask,
            Verdict::No => return Taken::Through,
        }
        let Some(tags) = self.tags(inode.ino, creds, session.id, offset, data, room) else {
            self.grants.lock().release(&cost);
            return Taken::Through;
        };
        state.waiting.merge(cost);
        if state.held.is_empty() {
            self.holding.lock().insert(inode.ino, inode.clone());
        }
        let (now, mut at) = (self.shared.env.boot(), offset);
        for (b, tag) in data.iter().zip(tags).filter(|(b, _)| !b.is_empty()) {
            state.held.hold(now, at, b.clone(), tag);
            at += b.len() as u64;
        }
        let enough =
            state.held.bytes() >= ENOUGH || self.updates.room().available_permits() < all / 2;
        drop(state);
        Counters::add(&self.shared.stats.written_bytes, len as u64);
        Counters::add(&self.shared.stats.held_writes, 1);
        if enough {
            self.send_soon(inode);
        }
        Taken::Held
    }

    /// Whether this session is the only writer on record at the metadata servers, and the lease
    /// guarantees that this client hears of a change.
    fn is_sole_writer(
        &self,
        inode: &Inode,
        session: SessionId,
        leased_in: &mut Option<Tenure>,
    ) -> bool {
        let now = self.shared.env.boot();
        match self.lease_cache.data(now, inode.ino) {
            Some((attr, tenure)) => {
                inode.learn(&attr);
                *leased_in = Some(tenure);
            }
            // While an own change is in progress the attributes are not known, but the lease is
            // still held.
            None if leased_in.is_some()
                && self.lease_cache.tenure(now, inode.ino) == *leased_in => {}
            None => return false,
        }
        // Check the session last: once it is replaced, no write of the old one is held back.
        inode.may_hold_back(session)
            && self.metadata.current_session().is_some_and(|s| s.id == session)
    }

    /// Tags for the buffers of a write. `None`: it would not outlive this process, although it
    /// should.
    fn tags(
        &self,
        ino: Ino,
        creds: &pb::Creds,
        session: SessionId,
        offset: u64,
        data: &[Buf],
        room: OwnedSemaphorePermit,
    ) -> Option<Vec<Tag>> {
        let (mut tags, mut at, mut room) = (Vec::with_capacity(data.len()), offset, Some(room));
        for b in data {
            let record = match &self.shared.cfg.handover {
                Some(k) => {
                    let owner = (creds.uid, creds.gid);
                    let w = KeptWrite::held(ino, session, at, b.len(), owner);
                    Some(k.keep_write(self.next_held(), &w, std::slice::from_ref(b))?)
                }
                None => None,
            };
            at += b.len() as u64;
            tags.push(Arc::new(Write {
                creds: creds.clone(),
                session,
                room: Mutex::new(room.take()),
                _record: record,
            }));
        }
        Some(tags)
    }

    fn next_held(&self) -> u64 {
        self.held_order.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    // --- sending ---

    /// Sends the dirty data of a file. Returns when it is with all replicas, or lost; then the
    /// file's handles report the loss.
    pub(crate) async fn send_held(self: &Arc<Self>, inode: &Arc<Inode>) {
        if !inode.back.is_empty() {
            let (core, inode) = (self.clone(), inode.clone());
            // The caller may go away meanwhile.
            let _ = self.shared.env.spawn(async move { core.send_all(&inode).await }).await;
        }
    }

    /// As [`WriteBack::send_held`], for a task that runs to its end: it spawns no other task.
    pub(crate) async fn send_held_here(self: &Arc<Self>, inode: &Arc<Inode>) {
        if !inode.back.is_empty() {
            self.send_all(inode).await;
        }
    }

    /// Starts to send, unless a task is sending already.
    fn send_soon(self: &Arc<Self>, inode: &Arc<Inode>) {
        if inode.back.sending.try_lock().is_ok() {
            let (core, inode) = (self.clone(), inode.clone());
            self.shared.env.spawn(async move { core.send_all(&inode).await });
        }
    }

    /// Sends what has waited long enough, or all dirty data when memory runs short.
    pub(crate) async fn send_due(self: Arc<Self>) {
        let short = self.updates.room().available_permits()
            < room_for(self.shared.cfg.unstable_limit) as usize / 2;
        let before =
            self.shared.env.boot().saturating_sub(if short { Duration::ZERO } else { PATIENCE });
        let holding: Vec<Arc<Inode>> = self.holding.lock().values().cloned().collect();
        for inode in holding.iter().filter(|i| i.back.state.lock().held.is_due(before)) {
            self.send_soon(inode);
        }
        self.renew_space(&holding);
    }

    async fn send_all(self: &Arc<Self>, inode: &Arc<Inode>) {
        let turn = inode.back.sending.clone().lock_owned().await;
        let join = |a: &Tag, b: &Tag| a.session == b.session && a.creds == b.creds;
        let most = if self.shared.cfg.handover.is_some() { LONGEST_KEPT } else { LONGEST };
        let runs = {
            let state = &mut *inode.back.state.lock();
            state.sending = std::mem::take(&mut state.waiting);
            state.held.take(most, join)
        };
        let sent = runs.into_iter().map(|run| self.send_run(inode, run));
        stream::iter(sent).buffer_unordered(RUNS_AT_ONCE).collect::<()>().await;
        self.has_sent(inode, turn);
    }

    fn has_sent(&self, inode: &Inode, turn: OwnedMutexGuard<()>) {
        drop(turn);
        let mut state = inode.back.state.lock();
        self.grants.lock().settle(&std::mem::take(&mut state.sending));
        if state.held.is_empty() {
            self.holding.lock().remove(&inode.ino);
        }
    }

    fn send_run<'a>(
        self: &'a Arc<Self>,
        inode: &'a Arc<Inode>,
        run: Run<Tag>,
    ) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let range = run.at..run.end();
            // Earlier writes to this range are finished first.
            let _turn = inode.ranges.lock(range.clone()).await;
            let Some(first) = run.parts.first().map(|(_, tag)| tag.clone()) else { return };
            let bytes: Vec<Buf> = run.parts.iter().map(|(b, _)| b.clone()).collect();
            let mut room: Option<OwnedSemaphorePermit> = None;
            for more in run.parts.iter().filter_map(|(_, tag)| tag.room.lock().take()) {
                match &mut room {
                    Some(room) => room.merge(more),
                    None => room = Some(more),
                }
            }
            let mut at = run.at;
            for piece in self.in_one(bytes) {
                let len = buffers::total(&piece) as u64;
                self.send_bytes(inode, &first, at, piece, room.as_mut()).await;
                at += len;
            }
        })
    }

    /// The bytes as they are sent. Bytes that must outlive this process must be contiguous; if
    /// there is no memory for that, each part is sent separately.
    fn in_one(&self, bytes: Vec<Buf>) -> Vec<Vec<Buf>> {
        let Some(keep) = self.shared.cfg.handover.as_ref().filter(|_| bytes.len() > 1) else {
            return vec![bytes];
        };
        let one = buffers::copy(keep.pool(), &bytes);
        if one.kept().is_some() {
            vec![vec![one]]
        } else {
            bytes.into_iter().map(|b| vec![b]).collect()
        }
    }

    async fn send_bytes(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        by: &Write,
        at: u64,
        bytes: Vec<Buf>,
        room: Option<&mut OwnedSemaphorePermit>,
    ) {
        let range = at..at + buffers::total(&bytes) as u64;
        inode.begins(&range);
        let outcome = self.send_pieces(inode, by.session, at, &bytes, room).await;
        self.has_arrived(inode, by, range, outcome);
    }

    /// Bytes have arrived at the servers, or are lost; then the file's handles are told.
    fn has_arrived(&self, inode: &Inode, by: &Write, range: Range<u64>, outcome: Result<()>) {
        // What was fetched meanwhile may be from before the write.
        self.cache.lock().invalidate(inode.ino, range.clone());
        let outcome = outcome.and_then(|()| inode.wrote(by.session, range.clone(), &by.creds));
        // Take the lock before the loss is reported: no sync may find nothing to send before that.
        let mut state = inode.back.state.lock();
        // What was lost with its session was reported then.
        let ours = state.held.settled(range.clone());
        let Some(e) = outcome.err().filter(|_| ours) else { return };
        inode.write_failed(range.end);
        inode.misses(range.clone());
        let m = format!("written bytes {} to {} are lost: {e}", range.start, range.end);
        tracing::warn!(ino = inode.ino, "{m}");
        match e.code {
            Code::NoSpc | Code::DQuot => inode.fail(Error::new(e.code, m)),
            // Not every program checks the result of fsync.
            _ => inode.fail_loudly(&m),
        }
    }

    async fn send_pieces(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        session: SessionId,
        at: u64,
        bytes: &[Buf],
        mut room: Option<&mut OwnedSemaphorePermit>,
    ) -> Result<()> {
        let stripes = inode.placed().stripes;
        let pieces: Vec<Piece> = stripes.split(at, buffers::total(bytes) as u64).collect();
        let (cap, first) =
            self.updates.data_numbers(inode, pieces.len() as u64, Numbers::default()).await?;
        if cap.session != session {
            // Other clients may have written since the session was lost.
            return Err(session_lost());
        }
        let mut sending = Vec::with_capacity(pieces.len());
        for (p, seq) in pieces.into_iter().zip(first..) {
            let part = buffers::cut(bytes, (p.file_offset - at) as usize, p.len as usize);
            let number = (session, seq);
            // Lets the next process repeat it under its number: this request may arrive late.
            let kept = self
                .shared
                .cfg
                .handover
                .as_ref()
                .and_then(|k| k.keep_write(seq, &KeptWrite::sent(&p, number), &part));
            let share = room.as_mut().and_then(|r| {
                let n = (room_for(p.len as usize) as usize).min(r.num_permits());
                r.split(n)
            });
            let flags =
                if self.may_take_granted(&self.shared.map(), p.chain) { FLAG_GRANTED } else { 0 };
            let cap = Some(cap.clone());
            sending.push(async move {
                let part = Content::Bytes(part);
                let done =
                    self.updates.write_piece(inode, p, part, flags, number, cap, share).await;
                drop(kept);
                done
            });
        }
        join_all(sending).await.into_iter().collect()
    }

    // --- after an earlier process ---

    /// Takes over what an earlier process left of a file: held writes, in the order they were
    /// written, and writes that it was sending. Those may have arrived, and are sent again first,
    /// under the same numbers.
    pub(crate) async fn inherit_back(
        self: &Arc<Self>,
        inode: Arc<Inode>,
        left: Vec<(KeptWrite, Buf, Box<dyn WriteRecord>)>,
    ) {
        let turn = inode.back.sending.clone().lock_owned().await;
        let (sent, held): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|(w, ..)| w.kind == WriteKind::Sent);
        let mut again = Vec::new();
        {
            let mut state = inode.back.state.lock();
            self.holding.lock().insert(inode.ino, inode.clone());
            for (w, bytes, record) in held {
                if let Some(cost) =
                    self.cost(&inode, w.session, w.file_offset, bytes.len() as u64, false)
                {
                    self.grants.lock().count(&cost);
                    state.waiting.merge(cost);
                }
                let WriteKind::Held { uid, gid } = w.kind else { continue };
                let creds = pb::Creds { uid, gid, groups: Vec::new() };
                state.held.hold(
                    Duration::ZERO,
                    w.file_offset,
                    bytes.clone(),
                    self.inherited(w.session, creds, record),
                );
            }
            for (w, bytes, record) in sent {
                let by = self.inherited(w.session, pb::Creds::default(), record);
                state.held.put_lower(w.file_offset, bytes.clone(), by.clone());
                again.push((w, bytes, by));
            }
        }
        let core = self.clone();
        self.shared.env.spawn(async move {
            join_all(again.into_iter().map(|(w, bytes, by)| core.send_again(&inode, w, bytes, by)))
                .await;
            core.has_sent(&inode, turn);
        });
    }

    fn inherited(&self, session: SessionId, creds: pb::Creds, record: Box<dyn WriteRecord>) -> Tag {
        Arc::new(Write { creds, session, room: Mutex::new(None), _record: Some(record) })
    }

    async fn send_again(self: &Arc<Self>, inode: &Arc<Inode>, w: KeptWrite, bytes: Buf, by: Tag) {
        let range = w.file_offset..w.file_offset + bytes.len() as u64;
        let _turn = inode.ranges.lock(range.clone()).await;
        let len = bytes.len() as u32;
        let p = Piece {
            chunk: w.chunk,
            chain: w.chain,
            offset: w.offset,
            len,
            file_offset: w.file_offset,
        };
        let outcome = self
            .updates
            .write_piece(inode, p, Content::Bytes(vec![bytes]), 0, (w.session, w.seq), None, None)
            .await;
        self.has_arrived(inode, &by, range, outcome);
    }
}
