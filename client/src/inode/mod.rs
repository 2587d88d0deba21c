//! The state that all open handles of one inode share in this client. Its parts:
//!
//! | file | what |
//! |---|---|
//! | `report.rs` | the size, and own writes that are not reported |
//! | `losses.rs`, `missing.rs` | lost bytes, and the errors that say so |
//! | `openings.rs` | open handles, and this client as a writer on record |
//! | `caps.rs` | capabilities |
//! | `awaited.rs` | appends that may be repeated after a restart of the mount |
//! | `files.rs` | all inodes in use, and what is asked of the metadata servers for them |
//!
//! The size that a reader sees is the larger of the metadata server's and the end of this client's
//! own writes. Own writes are reported (`Extend`) in the background, and before anything returns
//! that promises or shows the size.

pub(crate) mod awaited;
pub(crate) mod caps;
pub(crate) mod files;
mod losses;
mod missing;
pub(crate) mod openings;
mod report;

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use parking_lot::Mutex;
use strake_fabric::TransportCounter;
use strake_proto::{
    ChainId, ChunkId, Code, Error, Ino, Result, SessionId,
    layout::{MAX_FILE_SIZE, StripeMap},
    pb,
};
use tokio::sync::Mutex as AsyncMutex;

use crate::{handover::FileRecord, write::back::Back, write::ranges::RangeLock};
use awaited::Awaited;
use caps::Caps;
use losses::Losses;
use openings::Openings;
use report::Report;

pub(crate) use strake_proto::ops::O_ACCMODE;
pub(crate) const O_WRONLY: u32 = 1;
pub(crate) const O_RDWR: u32 = 2;
pub(crate) const O_APPEND: u32 = 0o2000;
/// Linux's `FMODE_EXEC`: the kernel opens a program to run it. Programs cannot set it in open(2).
pub(crate) const O_EXEC: u32 = 0o40;

/// Mode bits that a write clears.
const SET_IDS: u32 = 0o6000;

#[derive(Clone)]
pub(crate) struct Placed {
    pub layout: pb::Layout,
    pub stripes: Arc<StripeMap>,
}

impl Placed {
    /// The id under which the bytes are stored.
    fn data_id(&self) -> u64 {
        self.layout.components.first().map_or(0, |c| c.data_id)
    }
}

/// The destination of an update.
pub(crate) type UpdateAt = (ChainId, ChunkId);

/// An open file as the metadata servers know it. Several opens by programs may share one.
pub(crate) struct Open {
    pub inode: Arc<Inode>,
    /// The session that opened it.
    pub session: SessionId,
}

struct State {
    report: Report,
    losses: Losses,
    placed: Placed,
    /// Number of handles whose memory mappings can be written.
    storable: usize,
}

impl State {
    /// Whether the bytes are stored under the data id of this layout.
    fn is_placed(&self) -> bool {
        self.report.attr().data_id == self.placed.data_id()
    }
}

pub(crate) struct Inode {
    pub ino: Ino,
    pub ranges: RangeLock,
    /// Dirty data: what was written and not sent. Its lock is taken before that of the state.
    pub back: Back,
    /// One report at a time.
    pub(super) reporting: AsyncMutex<()>,
    pub caps: Caps,
    /// Its lock is taken after that of the state.
    pub openings: Openings,
    /// Serialises appends.
    pub appending: Arc<AsyncMutex<()>>,
    /// Held while the offset of an append is decided without a lock, until the append is done.
    /// Reports wait for it.
    pub placing: Arc<AsyncMutex<()>>,
    pub awaited: Awaited,
    /// Chains with updates that were given up and may still arrive. Per chain: a chunk of such an
    /// update, and the round that fences them.
    pub given_up: Mutex<BTreeMap<ChainId, (ChunkId, u64)>>,
    /// Bytes that came from storage servers and that went there, by transport.
    pub fetched: TransportCounter,
    pub sent: TransportCounter,
    state: Mutex<State>,
}

/// An append that may be repeated. Dropped when it is done, or will not come.
pub(crate) struct AwaitedAppend(Arc<Inode>);

impl AwaitedAppend {
    pub fn new(inode: Arc<Inode>, end: u64) -> AwaitedAppend {
        inode.awaited.begin(end);
        AwaitedAppend(inode)
    }
}

impl Drop for AwaitedAppend {
    fn drop(&mut self) {
        self.0.awaited.end();
    }
}

impl Inode {
    pub fn new(attr: pb::Attr, placed: Placed) -> Inode {
        Inode {
            ino: attr.ino,
            ranges: RangeLock::default(),
            back: Back::default(),
            reporting: AsyncMutex::default(),
            caps: Caps::default(),
            openings: Openings::new(attr.ino),
            appending: Arc::default(),
            placing: Arc::default(),
            awaited: Awaited::default(),
            given_up: Mutex::default(),
            fetched: TransportCounter::default(),
            sent: TransportCounter::default(),
            state: Mutex::new(State {
                report: Report::new(attr),
                losses: Losses::default(),
                placed,
                storable: 0,
            }),
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
        s.report.learn(attr);
    }

    /// `ESTALE` when the bytes are stored under another data id than this open file's layout has: a
    /// new layout was set while the file had no data.
    pub fn check_placed(&self) -> Result<()> {
        if self.state.lock().is_placed() {
            return Ok(());
        }
        Err(Error::new(Code::Stale, "the file got another layout while it was open; open it again"))
    }

    // --- handles of programs ---

    /// A handle was opened. The caller gives the returned value back when the handle is closed.
    pub fn handle_opened(&self, flags: u32) -> u64 {
        let mut s = self.state.lock();
        s.storable += usize::from(flags & O_ACCMODE == O_RDWR);
        s.losses.opened()
    }

    pub fn handle_closed(&self, since: u64, flags: u32) {
        let mut s = self.state.lock();
        s.storable -= usize::from(flags & O_ACCMODE == O_RDWR);
        s.losses.closed(since);
    }

    /// Whether a memory mapping of the file can be written: it is open for reading and writing.
    pub fn may_be_stored_to(&self) -> bool {
        self.state.lock().storable > 0
    }

    // --- attributes and size ---

    /// The attributes as a user of this client must see them.
    pub fn attr(&self) -> pb::Attr {
        // Read this first: dirty data that is sent meanwhile is in the state.
        let held = self.back.end();
        let s = self.state.lock();
        let size = s.report.end().max(held).max(s.losses.missing_end());
        pb::Attr { size, ..*s.report.attr() }
    }

    /// Takes attributes unless they are older than the present ones.
    pub fn learn(&self, attr: &pb::Attr) {
        self.state.lock().report.learn(attr);
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
        // Limited, because sums of offsets must not overflow, whatever a server says.
        self.state.lock().report.end().max(held).min(MAX_FILE_SIZE)
    }

    /// The size was set through this client, while it had no write in progress: earlier own writes
    /// no longer count.
    pub fn resized(&self, attr: &pb::Attr) {
        let mut s = self.state.lock();
        s.report.resized(attr);
        s.losses.cut(attr.size);
        self.openings.record(|k| k.reported());
    }

    /// Whether there may be holes, as far as this client knows. If not, everything up to the size
    /// is data.
    pub fn may_have_holes(&self) -> bool {
        self.state.lock().report.may_have_holes()
    }

    // --- own writes ---

    /// A write of this client to these bytes begins. If it leaves a whole block free behind the
    /// known end, it makes a hole.
    pub fn begins(&self, range: &Range<u64>) {
        self.state.lock().report.begins(range);
    }

    /// A part of the file becomes a hole.
    pub fn punches(&self) {
        self.state.lock().report.set_holes();
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
        if s.losses.is_lost(session) {
            return Err(crate::data::chains::session_lost());
        }
        s.losses.written(range);
        s.report.wrote(end, creds);
        self.record_writes(&s.report, creds);
        Ok(())
    }

    /// The file was changed as by a write, but its end stays.
    pub fn touched(&self, creds: &pb::Creds) {
        let mut s = self.state.lock();
        s.report.wrote(0, creds);
        self.record_writes(&s.report, creds);
    }

    /// Records for the next client of the mount what is not reported, the last of it by `creds`.
    fn record_writes(&self, report: &Report, creds: &pb::Creds) {
        let (end, holes, _) = report.unreported();
        self.openings.record(|k| k.wrote(end, holes, (creds.uid, creds.gid)));
    }

    /// A write to bytes below `end` failed; some of them may be on some replicas.
    pub fn write_failed(&self, end: u64) {
        let mut s = self.state.lock();
        s.losses.doubt();
        // There may be no bytes here, and later writes behind them are still reported.
        s.report.set_holes();
        self.openings.failed(end > s.report.attr().size);
    }

    /// Whether a write of this client failed: then bytes must not be cached, because they may still
    /// change.
    pub fn is_doubtful(&self) -> bool {
        self.state.lock().losses.is_doubtful()
    }

    /// Whether writes of this session may be held back, provided no other client may write: the
    /// session is on record as a writer and will be asked, and the first write clears no set-id
    /// bits.
    pub fn may_hold_back(&self, session: SessionId) -> bool {
        let s = self.state.lock();
        let clears_none = s.report.attr().mode & SET_IDS == 0;
        clears_none
            && s.is_placed()
            && !s.losses.is_doubtful()
            && self.openings.is_written_in(session)
    }

    // --- reports of own writes ---

    /// Whether there are own writes that are not reported.
    pub fn is_dirty(&self) -> bool {
        self.state.lock().report.is_due()
    }

    /// The number of writes so far, the report about them, and the user on whose behalf it is made.
    fn to_report(&self) -> Option<(u64, pb::Extend, pb::Creds)> {
        self.state.lock().report.due(self.ino)
    }

    /// `holes`: the report included holes.
    fn reported(&self, writes: u64, holes: bool, attr: Option<&pb::Attr>) {
        let mut s = self.state.lock();
        if s.report.done(writes, holes, attr) {
            self.openings.record(|k| k.reported());
        }
    }

    /// Takes over what the previous client of the mount knew of the file. `is_same`: this client
    /// has its session. If not, what it wrote beyond the end was removed with the session, and the
    /// end must not be reported: zeros would be read there.
    pub fn inherit(&self, former: &dyn FileRecord, is_same: bool) {
        if let Some((end, holes, (uid, gid))) = former.unreported().filter(|_| is_same) {
            let creds = pb::Creds { uid, gid, groups: Vec::new() };
            let mut s = self.state.lock();
            s.report.inherit(end, holes, &creds);
            self.record_writes(&s.report, &creds);
        }
        if former.surplus() {
            self.openings.set_surplus();
        }
        if former.failed() {
            self.fail_loudly("bytes written before the mount was restarted were lost");
        }
    }

    // --- lost bytes and write-back errors ---

    /// Bytes that were written are lost: the next fsync or close of every handle reports it.
    ///
    /// Call this before the bytes are removed from what is to be sent or flushed, or under its
    /// lock: a sync that finds nothing to send must find the error.
    pub fn fail(&self, e: Error) {
        self.fail_in(&mut self.state.lock(), e);
    }

    /// As [`Inode::fail`], but the next write, fsync and close of each handle report it.
    pub fn fail_loudly(&self, m: &str) {
        let mut s = self.state.lock();
        self.fail_in(&mut s, Error::new(Code::Io, m));
        s.losses.report_loudly();
    }

    fn fail_in(&self, s: &mut State, e: Error) {
        s.losses.fail(e);
        s.report.set_holes();
        self.openings.record(|k| k.set_failed());
    }

    /// As [`Inode::fail`], for the bytes of a lost session; reports once for each session. `parts`
    /// are stored nowhere any more.
    pub fn lost_with(&self, session: SessionId, parts: Vec<Range<u64>>) {
        let mut s = self.state.lock();
        if let Some(e) = s.losses.lost_with(session) {
            self.fail_in(&mut s, e);
        }
        parts.into_iter().for_each(|p| s.losses.misses(p));
    }

    /// A session of this client is lost, and with it what it wrote beyond the end. That end must
    /// not be reported, since zeros would be read there. A sync that finds nothing to report finds
    /// the error.
    pub fn forget_end(&self, session: SessionId) {
        let mut s = self.state.lock();
        s.losses.session_lost(session);
        if let Some(lost) = s.report.forget_end() {
            if let Some(e) = s.losses.lost_with(session) {
                self.fail_in(&mut s, e);
            }
            s.losses.misses(lost);
        }
        if s.report.is_due() {
            let (end, holes, user) = s.report.unreported();
            self.openings.record(|k| k.wrote(end, holes, user));
        }
    }

    pub fn errors(&self) -> u64 {
        self.state.lock().losses.errors()
    }

    /// The last error if there were any since `seen`, and whether each kind of call must report it.
    pub fn error_since(&self, seen: u64) -> Option<(u64, Error, bool)> {
        self.state.lock().losses.since(seen)
    }

    /// Written bytes are stored nowhere any more: handles that are open now must not read older
    /// bytes there.
    pub fn misses(&self, part: Range<u64>) {
        self.state.lock().losses.misses(part);
    }

    /// `EIO` for a handle that would read other bytes in place of lost ones.
    pub fn check_missing(&self, since: u64, range: &Range<u64>) -> Result<()> {
        self.state.lock().losses.check_missing(since, range)
    }
}
