//! The state that all open handles of one inode share in this client: size, layout, capabilities,
//! locks, errors.
//!
//! The size that a reader sees is the larger of the metadata server's and the end of this client's
//! own writes. Own writes are reported (`Extend`) in the background, and before anything returns
//! that promises or shows the size.

pub(crate) mod files;
mod missing;

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use parking_lot::Mutex;
use strake_fabric::RoadCounter;
use strake_proto::{
    ChainId, ChunkId, Code, Error, Ino, Result, Rights, SessionId,
    cap::{self, CAP_LEN},
    checksum::BLOCK,
    layout::{MAX_FILE_SIZE, StripeMap},
    pb,
};
use tokio::sync::{Mutex as AsyncMutex, watch};

use crate::{
    handover::{FileRecord, Handover},
    inode::missing::Missing,
    write::back::Back,
    write::ranges::RangeLock,
};

pub(crate) use strake_proto::ops::O_ACCMODE;
pub(crate) const O_WRONLY: u32 = 1;
pub(crate) const O_RDWR: u32 = 2;
pub(crate) const O_APPEND: u32 = 0o2000;
/// Linux's `FMODE_EXEC`: the kernel opens a program to run it. Programs cannot set it in open(2).
pub(crate) const O_EXEC: u32 = 0o40;

/// Mode bits that a write clears.
const SET_IDS: u32 = 0o6000;

/// A capability, and what is needed to get the next one.
#[derive(Clone)]
pub(crate) struct Cap {
    pub bytes: [u8; CAP_LEN],
    pub session: SessionId,
    pub(super) expiry_ms: u64,
    pub(super) creds: pb::Creds,
    pub(super) flags: u32,
}

/// The session in which a file was opened for writing, and the highest `writer` of the answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Writer {
    pub session: SessionId,
    pub index: u64,
}

#[derive(Clone)]
pub(crate) struct Placed {
    pub layout: pb::Layout,
    pub stripes: Arc<StripeMap>,
}

/// The destination of an update.
pub(crate) type UpdateAt = (ChainId, ChunkId);

/// An open file as the metadata servers know it. Several opens by programs may share one.
pub(crate) struct Open {
    pub inode: Arc<Inode>,
    /// The session that opened it.
    pub session: SessionId,
}

/// Write-back errors of an inode. Each handle reports those that happened while it was open, once.
#[derive(Default)]
struct Errors {
    /// How many there were so far.
    count: u64,
    last: Option<Error>,
    /// Number of the last error that each kind of call reports.
    loud: u64,
}

struct State {
    attr: pb::Attr,
    /// End of the furthest own write that is not reported yet.
    local_end: u64,
    /// `begun`: how far writes of this client were begun. `holes`: whether an unreported write
    /// began beyond the known end, or a punch is unreported.
    begun: u64,
    holes: bool,
    /// Own writes so far, and how many of them the metadata server knows.
    writes: u64,
    reported: u64,
    /// The user on whose behalf they are reported.
    last_writer: pb::Creds,
    /// The last session that was lost. The servers removed what it wrote beyond the end.
    lost: SessionId,
    /// The last session with which written bytes were lost.
    bereft: SessionId,
    missing: Missing,
    /// Number of handles whose memory mappings can be written.
    storable: usize,
    /// Open handles by the session that opened them.
    handles: BTreeMap<SessionId, usize>,
    read_cap: Option<Cap>,
    write_cap: Option<Cap>,
    /// The entry under which the metadata servers have this client on record as a writer, while any
    /// handle is open.
    writer: Option<Writer>,
    /// A write that may have left bytes beyond the end failed.
    surplus: bool,
    /// A write failed: it may still take effect.
    doubtful: bool,
    errors: Errors,
    placed: Placed,
    /// The record that outlives this process, while this client may write the file.
    kept: Option<Arc<dyn FileRecord>>,
}

pub(crate) struct Inode {
    pub ino: Ino,
    pub ranges: RangeLock,
    /// Dirty data: what was written and not sent. Its lock is taken before that of the state.
    pub back: Back,
    /// One report, and one capability renewal, at a time.
    pub(super) reporting: AsyncMutex<()>,
    pub(super) capping: AsyncMutex<()>,
    /// Serialises appends.
    pub appending: Arc<AsyncMutex<()>>,
    /// Held while the offset of an append is decided without a lock, until the append is done.
    /// Reports wait for it.
    pub placing: Arc<AsyncMutex<()>>,
    /// Appends that the previous client of the mount had in progress and that may be repeated.
    /// Reports wait for them, and no other append goes below their end.
    awaited: watch::Sender<Awaited>,
    /// Chains with updates that were given up and may still arrive. Per chain: a chunk of such an
    /// update, and the round that fences them.
    pub given_up: Mutex<BTreeMap<ChainId, (ChunkId, u64)>>,
    /// Bytes that came from storage servers and that went there, by transport.
    pub fetched: RoadCounter,
    pub sent: RoadCounter,
    state: Mutex<State>,
}

#[derive(Default)]
struct Awaited {
    appends: usize,
    /// The highest end of these appends.
    end: u64,
}

/// An append that may be repeated. Dropped when it is done, or will not come.
pub(crate) struct AwaitedAppend(Arc<Inode>);

impl AwaitedAppend {
    pub fn new(inode: Arc<Inode>, end: u64) -> AwaitedAppend {
        inode.awaited.send_modify(|a| *a = Awaited { appends: a.appends + 1, end: end.max(a.end) });
        AwaitedAppend(inode)
    }
}

impl Drop for AwaitedAppend {
    fn drop(&mut self) {
        self.0.awaited.send_modify(|a| {
            a.appends -= 1;
            if a.appends == 0 {
                a.end = 0;
            }
        });
    }
}

/// A file that this client no longer writes.
#[derive(Clone)]
pub(crate) struct Release {
    pub writer: Writer,
    pub surplus: bool,
    /// Kept until the metadata servers know of the release.
    pub kept: Vec<Arc<dyn FileRecord>>,
}

impl State {
    fn note_write(&mut self, end: u64, creds: &pb::Creds) {
        // A report stands for all writes since the last one. A write by a non-root user clears
        // set-id bits and root's does not, so a non-root user stays the reported one.
        let hides = creds.uid == 0 && self.last_writer.uid != 0 && self.writes != self.reported;
        self.local_end = self.local_end.max(end);
        self.writes += 1;
        if self.last_writer != *creds && !hides {
            self.last_writer = creds.clone();
        }
        if let Some(k) = &self.kept {
            k.wrote(self.local_end, self.holes, (creds.uid, creds.gid));
        }
    }

    fn fail(&mut self, e: Error) {
        self.errors.count += 1;
        self.errors.last = Some(e);
        self.holes = true;
        self.kept.iter().for_each(|k| k.set_failed());
    }

    /// Written bytes are lost with a session.
    fn lose(&mut self, session: SessionId) {
        if std::mem::replace(&mut self.bereft, session) != session {
            let m = "the session was evicted; bytes written since the last fsync may be lost";
            self.fail(Error::new(Code::Io, m));
        }
    }

    fn enlisted(&mut self, session: SessionId, index: u64) {
        if index != 0 && self.writer.is_none_or(|w| w.session != session || w.index < index) {
            self.writer = Some(Writer { session, index });
            if let Some(k) = &self.kept {
                k.set_writer(index);
            }
        }
    }

    fn take_attr(&mut self, attr: &pb::Attr) {
        if attr.change >= self.attr.change {
            self.attr = *attr;
        }
    }

    fn release(&mut self) -> Option<Release> {
        if !self.handles.is_empty() {
            return None;
        }
        let writer = self.writer.take()?;
        let kept = self.kept.take().into_iter().collect();
        Some(Release { writer, surplus: std::mem::take(&mut self.surplus), kept })
    }
}

impl Inode {
    pub fn new(attr: pb::Attr, placed: Placed) -> Inode {
        Inode {
            ino: attr.ino,
            ranges: RangeLock::default(),
            back: Back::default(),
            reporting: AsyncMutex::default(),
            capping: AsyncMutex::default(),
            appending: Arc::default(),
            fetched: RoadCounter::default(),
            sent: RoadCounter::default(),
            placing: Arc::default(),
            state: Mutex::new(State {
                attr,
                local_end: 0,
                begun: 0,
                holes: false,
                writes: 0,
                reported: 0,
                last_writer: pb::Creds::default(),
                lost: 0,
                bereft: 0,
                missing: Missing::default(),
                storable: 0,
                handles: BTreeMap::new(),
                read_cap: None,
                write_cap: None,
                writer: None,
                surplus: false,
                doubtful: false,
                errors: Errors::default(),
                placed,
                kept: None,
            }),
            awaited: watch::Sender::default(),
            given_up: Mutex::default(),
        }
    }

    pub fn placed(&self) -> Placed {
        self.state.lock().placed.clone()
    }

    /// Takes a layout if it is newer (it was set on a file without data), and the attributes that
    /// came with it.
    pub fn set_placed(&self, placed: Placed, attr: &pb::Attr) {
        let mut s = self.state.lock();
        if placed.layout.generation > s.placed.layout.generation {
            s.placed = placed;
        }
        s.take_attr(attr);
    }

    /// `ESTALE` when the bytes are stored under another data id than this open file's layout has: a
    /// new layout was set while the file had no data.
    pub fn check_placed(&self) -> Result<()> {
        let s = self.state.lock();
        let here = s.placed.layout.components.first().map_or(0, |c| c.data_id);
        if s.attr.data_id == here {
            return Ok(());
        }
        Err(Error::new(Code::Stale, "the file got another layout while it was open; open it again"))
    }

    // --- attributes and size ---

    /// The attributes as a user of this client must see them.
    pub fn attr(&self) -> pb::Attr {
        // Read this first: dirty data that is sent meanwhile is in the state.
        let held = self.back.end();
        let s = self.state.lock();
        let mut a = s.attr;
        a.size = a.size.max(s.local_end).max(held).max(s.missing.end());
        a
    }

    /// Takes attributes unless they are older than the present ones.
    pub fn learn(&self, attr: &pb::Attr) {
        self.state.lock().take_attr(attr);
    }

    /// Takes attributes unless they are older than the present ones. Returns them as
    /// [`Inode::attr`] does.
    pub fn take_attr(&self, attr: &pb::Attr) -> pb::Attr {
        self.learn(attr);
        self.attr()
    }

    /// The end of the file as far as there are bytes.
    pub fn size(&self) -> u64 {
        // Read this first: dirty data that is sent meanwhile is in the state.
        let held = self.back.end();
        let s = self.state.lock();
        // Limited, because sums of offsets must not overflow, whatever a server says.
        s.attr.size.max(s.local_end).max(held).min(MAX_FILE_SIZE)
    }

    /// A handle was opened. The caller gives the returned value back when the handle is closed.
    pub fn handle_opened(&self, flags: u32) -> u64 {
        let mut s = self.state.lock();
        s.storable += usize::from(flags & O_ACCMODE == O_RDWR);
        s.missing.opened()
    }

    pub fn handle_closed(&self, since: u64, flags: u32) {
        let mut s = self.state.lock();
        s.storable -= usize::from(flags & O_ACCMODE == O_RDWR);
        s.missing.closed(since);
    }

    /// Whether a memory mapping of the file can be written: it is open for reading and writing.
    pub fn may_be_stored_to(&self) -> bool {
        self.state.lock().storable > 0
    }

    /// `EIO` for a handle that would read other bytes in place of lost ones.
    pub fn check_missing(&self, since: u64, range: &Range<u64>) -> Result<()> {
        if self.state.lock().missing.bars(since, range) {
            let m = "these written bytes are lost, because the metadata servers evicted this \
                     client; open the file again";
            return Err(Error::new(Code::Io, m));
        }
        Ok(())
    }

    /// A write of this client to these bytes begins. If it leaves a whole block free behind the
    /// known end, it makes a hole.
    pub fn begins(&self, range: &Range<u64>) {
        let mut s = self.state.lock();
        let known = s.attr.size.max(s.local_end).max(s.begun).min(MAX_FILE_SIZE);
        s.holes |= range.start > known.next_multiple_of(BLOCK as u64);
        s.begun = s.begun.max(range.end);
    }

    /// A part of the file becomes a hole.
    pub fn punches(&self) {
        self.state.lock().holes = true;
    }

    /// Whether there may be holes, as far as this client knows. If not, everything up to the size
    /// is data.
    pub fn may_have_holes(&self) -> bool {
        let s = self.state.lock();
        s.attr.sparse || s.holes
    }

    /// Whether the file was opened for reading.
    pub fn is_readable(&self) -> bool {
        self.state.lock().read_cap.is_some()
    }

    /// A write of this client in `session` is on its replicas. `EIO` when the session is lost.
    pub fn wrote(&self, session: SessionId, range: Range<u64>, creds: &pb::Creds) -> Result<()> {
        let end = range.end;
        self.wrote_up_to(session, &range, end, creds)
    }

    /// As [`Inode::wrote`], for a write that must not move the end of the file.
    pub fn wrote_within(
        &self,
        session: SessionId,
        range: Range<u64>,
        creds: &pb::Creds,
    ) -> Result<()> {
        self.wrote_up_to(session, &range, 0, creds)
    }

    fn wrote_up_to(
        &self,
        session: SessionId,
        range: &Range<u64>,
        end: u64,
        creds: &pb::Creds,
    ) -> Result<()> {
        let mut s = self.state.lock();
        if s.lost == session {
            return Err(crate::data::chains::session_lost());
        }
        s.missing.written(range);
        s.note_write(end, creds);
        Ok(())
    }

    /// The file was changed as by a write, but its end stays.
    pub fn touched(&self, creds: &pb::Creds) {
        self.state.lock().note_write(0, creds);
    }

    /// A session of this client is lost, and with it what it wrote beyond the end. That end must
    /// not be reported, since zeros would be read there. A sync that finds nothing to report finds
    /// the error.
    pub fn forget_end(&self, session: SessionId) {
        let mut s = self.state.lock();
        s.lost = session;
        if s.local_end > s.attr.size {
            s.lose(session);
            let lost = s.attr.size..s.local_end;
            s.missing.lost(lost);
        }
        (s.local_end, s.begun) = (0, 0);
        if let Some(k) = s.kept.as_ref().filter(|_| s.writes != s.reported) {
            k.wrote(0, s.holes, (s.last_writer.uid, s.last_writer.gid));
        }
    }

    /// Whether the metadata servers have this client on record as a writer, as far as this client
    /// knows.
    pub fn is_written(&self) -> bool {
        self.state.lock().writer.is_some()
    }

    /// Whether there are own writes that are not reported.
    pub fn is_dirty(&self) -> bool {
        let s = self.state.lock();
        s.writes != s.reported
    }

    /// Whether writes of this session may be held back, provided no other client may write: the
    /// session is on record as a writer and will be asked, and the first write clears no set-id
    /// bits.
    pub fn may_hold_back(&self, session: SessionId) -> bool {
        let s = self.state.lock();
        let here = s.placed.layout.components.first().map_or(0, |c| c.data_id);
        let listed =
            s.writer.is_some_and(|w| w.session == session) && s.handles.contains_key(&session);
        listed && s.attr.data_id == here && s.attr.mode & SET_IDS == 0 && !s.doubtful
    }

    /// The number of writes so far, the report about them, and the user on whose behalf it is made.
    fn to_report(&self) -> Option<(u64, pb::Extend, pb::Creds)> {
        let s = self.state.lock();
        let extend = pb::Extend { ino: self.ino, end: s.local_end, holes: s.holes };
        (s.writes != s.reported).then(|| (s.writes, extend, s.last_writer.clone()))
    }

    /// `holes`: the report included holes.
    fn reported(&self, writes: u64, holes: bool, attr: Option<&pb::Attr>) {
        let mut s = self.state.lock();
        s.reported = s.reported.max(writes);
        if let Some(a) = attr
            && a.change >= s.attr.change
        {
            s.attr = *a;
        }
        // If holes were not reported, they belong to a write that was begun meanwhile.
        s.holes &= !holes;
        if s.reported == s.writes {
            s.local_end = 0;
            s.kept.iter().for_each(|k| k.reported());
        }
    }

    /// The size was set through this client, while it had no write in progress: earlier own writes
    /// no longer count.
    pub fn resized(&self, attr: &pb::Attr) {
        let mut s = self.state.lock();
        s.reported = s.writes;
        (s.local_end, s.begun, s.holes) = (0, 0, false);
        s.missing.cut(attr.size);
        s.kept.iter().for_each(|k| k.reported());
        s.attr = *attr;
    }

    /// The lock of an append is about to be requested. The caller holds the returned record until
    /// the lock is released.
    pub fn note_end(&self) -> Option<Arc<dyn FileRecord>> {
        let kept = self.state.lock().kept.clone();
        kept.inspect(|k| k.set_ends())
    }

    /// The offset for an append that finds the file ending at `size`.
    pub fn append_end(&self, size: u64) -> u64 {
        size.max(self.awaited.borrow().end)
    }

    /// Returns when no append of the previous client of the mount is awaited any more.
    pub async fn appended_again(&self) {
        let _ = self.awaited.subscribe().wait_for(|a| a.appends == 0).await;
    }

    /// Takes over what the previous client of the mount knew of the file. `is_same`: this client
    /// has its session. If not, what it wrote beyond the end was removed with the session, and the
    /// end must not be reported: zeros would be read there.
    pub fn inherit(&self, former: &dyn FileRecord, is_same: bool) {
        if let Some((end, holes, (uid, gid))) = former.unreported().filter(|_| is_same) {
            let mut s = self.state.lock();
            s.holes |= holes;
            s.note_write(end, &pb::Creds { uid, gid, groups: Vec::new() });
        }
        if former.surplus() {
            let mut s = self.state.lock();
            s.surplus = true;
            s.kept.iter().for_each(|k| k.set_surplus());
        }
        if former.failed() {
            self.fail_loudly("bytes written before the mount was restarted were lost");
        }
    }

    // --- handles and capabilities ---

    /// `keep` is given for a handle that may write.
    pub fn opened(&self, session: SessionId, writer: u64, keep: Option<&dyn Handover>) {
        let mut s = self.state.lock();
        if s.kept.is_none() {
            s.kept = keep.and_then(|k| k.keep_file(self.ino)).map(Arc::from);
        }
        *s.handles.entry(session).or_default() += 1;
        s.enlisted(session, writer);
    }

    /// An open was answered that adds no handle. Returns what to release, if there is no handle
    /// left.
    pub fn opened_again(&self, session: SessionId, writer: u64) -> Option<Release> {
        let mut s = self.state.lock();
        s.enlisted(session, writer);
        s.release()
    }

    /// Whether there are handles, all of them from opens earlier than this one in the same session.
    pub fn is_open_before(&self, last: Writer) -> bool {
        let s = self.state.lock();
        !s.handles.is_empty()
            && s.writer.is_some_and(|w| w.session == last.session && w.index < last.index)
    }

    /// What to release when the last handle is closed.
    pub fn release(&self) -> Option<Release> {
        self.state.lock().release()
    }

    /// A write to bytes below `end` failed; some of them may be on some replicas.
    pub fn write_failed(&self, end: u64) {
        let mut s = self.state.lock();
        s.doubtful = true;
        // There may be no bytes here, and later writes behind them are still reported.
        s.holes = true;
        s.surplus |= end > s.attr.size;
        if s.surplus {
            s.kept.iter().for_each(|k| k.set_surplus());
        }
    }

    /// Bytes were written that lie beyond the end if another client has just truncated the file.
    pub fn may_be_cut(&self) {
        let mut s = self.state.lock();
        s.surplus = true;
        s.kept.iter().for_each(|k| k.set_surplus());
    }

    /// Whether a write of this client failed: then bytes must not be cached, because they may still
    /// change.
    pub fn is_doubtful(&self) -> bool {
        self.state.lock().doubtful
    }

    /// A handle is closed. Returns whether the metadata server counts it.
    pub fn closed(&self, opened_in: SessionId, now: Option<SessionId>) -> bool {
        let mut s = self.state.lock();
        // A handle that was opened in a lost session may have been moved to the present one.
        let session = if s.handles.contains_key(&opened_in) { Some(opened_in) } else { now };
        let Some(session) = session else { return false };
        let Some(n) = s.handles.get_mut(&session) else { return false };
        *n -= 1;
        if *n == 0 {
            s.handles.remove(&session);
        }
        now == Some(session)
    }

    /// The number of handles that the metadata servers know.
    pub fn handles(&self) -> usize {
        self.state.lock().handles.values().sum()
    }

    pub fn handles_of(&self, session: SessionId) -> usize {
        self.state.lock().handles.get(&session).copied().unwrap_or(0)
    }

    /// The number of handles that the present session does not know yet.
    fn strangers(&self, session: SessionId) -> usize {
        self.state.lock().handles.iter().filter(|(s, _)| **s != session).map(|(_, n)| n).sum()
    }

    /// The session has learned of `told` more handles. Returns how many of them are closed already.
    fn adopt(&self, session: SessionId, told: usize) -> usize {
        let (mut s, mut left) = (self.state.lock(), told);
        s.handles.retain(|of, n| {
            let known = if *of == session { 0 } else { left.min(*n) };
            (*n, left) = (*n - known, left - known);
            *n > 0
        });
        if told > left {
            *s.handles.entry(session).or_default() += told - left;
        }
        left
    }

    /// Keeps the capability that came with the answer to an open.
    pub fn take_cap(
        &self,
        bytes: &[u8],
        session: SessionId,
        flags: u32,
        creds: &pb::Creds,
    ) -> Result<()> {
        let m = "the metadata server gave no capability for an open file";
        let bytes: [u8; CAP_LEN] = bytes.try_into().map_err(|_| Error::new(Code::Protocol, m))?;
        let seen = cap::peek(&bytes);
        let c = Cap { bytes, session, expiry_ms: seen.expiry_ms, creds: creds.clone(), flags };
        let mut s = self.state.lock();
        if seen.rights.has(Rights::READ) {
            s.read_cap = Some(c.clone());
        }
        if seen.rights.has(Rights::WRITE) {
            s.write_cap = Some(c);
        }
        Ok(())
    }

    fn cap(&self, write: bool) -> Option<Cap> {
        let s = self.state.lock();
        if write { s.write_cap.clone() } else { s.read_cap.clone() }
    }

    // --- write-back errors ---

    /// Bytes that were written are lost: the next fsync or close of every handle reports it.
    ///
    /// Call this before the bytes are removed from what is to be sent or flushed, or under its
    /// lock: a sync that finds nothing to send must find the error.
    pub fn fail(&self, e: Error) {
        self.state.lock().fail(e);
    }

    /// As [`Inode::fail`], for the bytes of a lost session; reports once for each session. `parts`
    /// are stored nowhere any more.
    pub fn lost_with(&self, session: SessionId, parts: Vec<Range<u64>>) {
        let mut s = self.state.lock();
        s.lose(session);
        parts.into_iter().for_each(|p| s.missing.lost(p));
    }

    pub fn errors(&self) -> u64 {
        self.state.lock().errors.count
    }

    /// Written bytes are stored nowhere any more: handles that are open now must not read older
    /// bytes there.
    pub fn misses(&self, part: Range<u64>) {
        self.state.lock().missing.lost(part);
    }

    /// As [`Inode::fail`], but the next write, fsync and close of each handle report it.
    pub fn fail_loudly(&self, m: &str) {
        self.fail(Error::new(Code::Io, m));
        let mut s = self.state.lock();
        s.errors.loud = s.errors.count;
    }

    /// The last error if there were any since `seen`, and whether each kind of call must report it.
    pub fn error_since(&self, seen: u64) -> Option<(u64, Error, bool)> {
        let s = self.state.lock();
        let error = || s.errors.last.clone().unwrap_or(Error::new(Code::Io, "a write was lost"));
        (s.errors.count > seen).then(|| (s.errors.count, error(), s.errors.loud > seen))
    }
}
