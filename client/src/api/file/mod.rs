//! Open files.

mod append;
mod fit;
mod foreign;
mod holes;
mod mapped;

use futures_util::future::BoxFuture;
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use futures_util::future::join_all;
use parking_lot::Mutex;
use strake_fabric::Buf;
use strake_proto::{
    Code, Error, Ino, Result, SessionId,
    cap::{self, CAP_LEN},
    layout::{MAX_FILE_SIZE, StripeMap},
    pb,
};
use strake_runtime::watch;
use tokio::time::Instant;

use append::Tail;
pub use append::{Landed, Part as AppendPart};
pub use mapped::AsOf;

use crate::{
    Client,
    api::names::Mode,
    config::Counters,
    core::Core,
    data::buffers,
    handover::operation::{Caller, Operation},
    inode::{Inode, O_ACCMODE, O_APPEND, O_EXEC, O_RDWR, O_WRONLY, Open, Placed, Release, Writer},
    leases::open_cache,
    metadata::openings::Opening,
    metadata::ops::{ok, op},
    read::cache::{Change, Part, Reader, Tenure, UNIT},
    read::readahead::ReadAhead,
    write::back::{Taken, covers, overlay},
    write::updates::Numbers,
};

const O_TRUNC: u32 = 0o1000;
const O_DSYNC: u32 = 0o10000;
const O_DIRECT: u32 = 0o40000;
/// Reads of fewer bytes than this are copied, so that the cache does not keep pool buffers for
/// them.
const SMALL: usize = 64 << 10;

/// An open file. All clones share the same open file. Dropping the last one closes it, but only
/// [`File::close`] reports whether the bytes are safe.
#[derive(Clone)]
pub struct File(Arc<Handle>);

/// How bytes are written.
#[derive(Clone, Copy, Default)]
struct Way<'a> {
    /// With a session here, fails with `NoSession` and sends nothing in any other session.
    only: Option<SessionId>,
    /// The bytes lie within the size that the file had, and do not make it longer again after a
    /// truncate.
    within: bool,
    /// See [`File::write_until`].
    operation: Option<&'a Operation>,
}

impl Way<'_> {
    fn only(session: SessionId) -> Way<'static> {
        Way { only: Some(session), ..Way::default() }
    }
}

/// The calls that report lost writes.
#[derive(Clone, Copy)]
enum Teller {
    Write,
    Sync,
    Close,
}

struct Handle {
    core: Arc<Core>,
    inode: Arc<Inode>,
    creds: pb::Creds,
    flags: u32,
    /// `Some` until the file is closed.
    open: Mutex<Option<Arc<Open>>>,
    ahead: Mutex<ReadAhead>,
    /// Per kind of call (write, sync, close): the write-back errors of the inode that this handle
    /// has reported, or that came before the handle.
    told_errors: [AtomicU64; 3],
    closed: AtomicBool,
    /// See [`Inode::handle_opened`].
    since: u64,
    /// An append of which more pieces may follow.
    tail: Mutex<Option<Tail>>,
}

impl Client {
    /// Opens a regular file. `flags` as on Linux: access mode, O_APPEND (use [`File::append`]),
    /// O_TRUNC, O_DSYNC/O_SYNC (writes return when stable), O_DIRECT (no read-ahead). With Linux's
    /// `FMODE_EXEC` the permission to execute is enough.
    pub async fn open(
        &self,
        caller: impl Into<Caller<'_>>,
        ino: Ino,
        flags: u32,
    ) -> Result<(File, pb::Attr)> {
        let Caller { creds, operation } = caller.into();
        let (mut flags, exec) = (flags & !O_EXEC, flags & O_EXEC);
        if open_cache::is_kept(flags)
            && let Some((open, attr)) = self.core.open_cache.open_kept(creds, ino)
        {
            return Ok((File::new(&self.core, open, creds, flags), attr));
        }
        let (core, creds, operation) = (self.core.clone(), creds.clone(), operation.cloned());
        let opening = async move {
            if flags & O_ACCMODE != 0 {
                core.shared.may_alter()?;
            }
            let open = |flags| op(pb::op::Op::Open(pb::Open { ino, flags }));
            let opening = core.metadata.opening(Some(ino), flags).await;
            let mut r =
                ok(core.metadata.meta(&creds, vec![open(flags & (O_ACCMODE | O_APPEND))]).await?);
            // Most executables can be read: try to open them like any other file first, so that the
            // open can be cached.
            if exec != 0
                && flags & O_ACCMODE == 0
                && r.as_ref().is_err_and(|e| e.code == Code::Access)
            {
                flags |= exec;
                r = ok(core.metadata.meta(&creds, vec![open(exec)]).await?);
            }
            let r = r?;
            let file = core.file(r, &creds, flags, opening).await?;
            file.truncate_at_open(operation, flags & O_TRUNC != 0).await
        };
        self.core.shared.detached(opening).await
    }

    /// Whether a file is open in this client. A file that only the open cache holds is not.
    pub fn is_open(&self, ino: Ino) -> bool {
        self.core.files.live_inode(ino).is_some() && !self.core.open_cache.holds_alone(ino)
    }

    /// Creates and opens a regular file in one request. Opens an existing one, unless `exclusive`
    /// (`EEXIST`). `layout` overrides the directory's default.
    pub async fn create(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        name: &[u8],
        mode: impl Into<Mode>,
        flags: u32,
        exclusive: bool,
        layout: Option<pb::LayoutSpec>,
    ) -> Result<(File, pb::Attr)> {
        let Caller { creds, operation } = caller.into();
        let (core, creds, operation) = (self.core.clone(), creds.clone(), operation.cloned());
        let (name, Mode { bits, umask }) = (name.to_vec().into(), mode.into());
        let opening = async move {
            let flags_sent = flags & (O_ACCMODE | O_APPEND);
            let create = pb::Create {
                parent,
                name,
                mode: bits,
                exclusive,
                layout,
                flags: flags_sent,
                umask,
            };
            let opening = core.metadata.opening(None, flags).await;
            let caller = Caller { creds: &creds, operation: operation.as_ref() };
            let create = vec![op(pb::op::Op::Create(create))];
            let r = ok(core.metadata.meta_for(caller, create).await?)?;
            let created = r.last().is_some_and(|r| r.created);
            let file = core.file(r, &creds, flags, opening).await?;
            file.truncate_at_open(operation, flags & O_TRUNC != 0 && !created).await
        };
        self.core.shared.detached(opening).await
    }

    /// Creates and opens a regular file without a name, as if in the directory `parent`. It is
    /// deleted when it is closed, unless [`Client::link`] gave it a name before, which `linkable`
    /// allows.
    pub async fn tmpfile(
        &self,
        caller: impl Into<Caller<'_>>,
        parent: Ino,
        mode: impl Into<Mode>,
        flags: u32,
        linkable: bool,
    ) -> Result<(File, pb::Attr)> {
        let Caller { creds, operation } = caller.into();
        let (core, creds, operation) = (self.core.clone(), creds.clone(), operation.cloned());
        let Mode { bits, umask } = mode.into();
        let opening = async move {
            let flags_sent = flags & (O_ACCMODE | O_APPEND);
            let make = pb::Tmpfile {
                parent,
                mode: bits,
                umask,
                flags: flags_sent,
                linkable,
                layout: None,
            };
            let opening = core.metadata.opening(None, flags).await;
            let caller = Caller { creds: &creds, operation: operation.as_ref() };
            let make = vec![op(pb::op::Op::Tmpfile(make))];
            let r = ok(core.metadata.meta_for(caller, make).await?)?;
            let file = core.file(r, &creds, flags, opening).await?;
            let attr = file.attr();
            Ok((file, attr))
        };
        self.core.shared.detached(opening).await
    }
}

impl Core {
    /// A handle from the answer to an open.
    pub(crate) fn file<'a>(
        self: &'a Arc<Self>,
        mut r: Vec<pb::OpResult>,
        creds: &'a pb::Creds,
        flags: u32,
        opening: Opening,
    ) -> BoxFuture<'a, Result<File>> {
        Box::pin(async move {
            let bad = |m: &str| Error::new(Code::Protocol, m);
            let r = r.pop().ok_or_else(|| bad("an empty answer to an open"))?;
            let attr = r.attr.ok_or_else(|| bad("no attributes in the answer to an open"))?;
            let made = async {
                let not_regular =
                    || Error::new(Code::IsDir, "only regular files are opened for data");
                let layout = r.layout.ok_or_else(not_regular)?;
                let stripes = Arc::new(self.resolve(attr.ino, &layout).await?);
                let placed = Placed { layout, stripes };
                let sealed: &[u8; CAP_LEN] = r.capability[..]
                    .try_into()
                    .map_err(|_| bad("the answer to an open has no capability"))?;
                let session = cap::peek(sealed).session;
                let inode = self.files.inode(attr.ino, || Inode::new(attr, placed.clone()));
                inode.set_placed(placed, &attr);
                inode.take_cap(
                    &r.capability,
                    session,
                    flags & (O_ACCMODE | O_APPEND | O_EXEC),
                    creds,
                )?;
                Ok((inode, session))
            };
            let (writer, pages) = (r.writer, r.pages);
            match made.await {
                Ok((inode, session)) => {
                    let keep = self
                        .shared
                        .cfg
                        .handover
                        .as_deref()
                        .filter(|_| matches!(flags & O_ACCMODE, O_WRONLY | O_RDWR));
                    if pages {
                        self.pages.mark(inode.ino);
                    }
                    inode.opened(session, writer, keep);
                    self.metadata.counted_open(opening.since);
                    if !open_cache::is_kept(flags) {
                        self.open_cache.stop_keeping(inode.ino);
                    }
                    let open = Arc::new(Open { inode, session });
                    if open_cache::is_kept(flags) {
                        self.open_cache.keep_open(&open, creds);
                    }
                    let file = File::new(self, open, creds, flags);
                    if flags & O_ACCMODE == O_RDWR {
                        self.leave_shared_pages(file.ino()).await;
                    }
                    Ok(file)
                }
                Err(e) => {
                    // The server counts the file as open by this client.
                    self.metadata.counted_open(opening.since);
                    self.metadata.tell_closed(&[attr.ino], opening.since).await;
                    let session = self.metadata.current_session().map_or(0, |s| s.id);
                    let release = match self.files.live_inode(attr.ino) {
                        Some(inode) => inode.opened_again(session, writer),
                        None => Some(Release {
                            writer: Writer { session, index: writer },
                            surplus: false,
                            kept: Vec::new(),
                        }),
                    };
                    self.files.release_later(attr.ino, release);
                    Err(e)
                }
            }
        })
    }

    /// The stripe arithmetic of a layout. Fetches a newer map if the layout names chains that this
    /// one lacks.
    async fn resolve(self: &Arc<Self>, ino: Ino, layout: &pb::Layout) -> Result<StripeMap> {
        let map = self.shared.map();
        match StripeMap::resolve(ino, layout, &map) {
            Err(e) if e.code == Code::Io => {
                self.metadata.refresh_map(map.version()).await;
                StripeMap::resolve(ino, layout, &self.shared.map())
            }
            r => r,
        }
    }

    /// Fetches a range into the cache, in parts of at most a cache unit, as far as the cache has
    /// space. Returns how far that was.
    fn prefetch(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        tenure: Tenure,
        range: Range<u64>,
        size: u64,
    ) -> u64 {
        let units = range.start / UNIT..range.end.div_ceil(UNIT);
        for unit in units.map(|n| range.start.max(n * UNIT)..((n + 1) * UNIT).min(size)) {
            let mut cache = self.cache.lock();
            for part in cache.missing(inode.ino, tenure, unit) {
                let (done, rx) = watch::channel(false);
                let id = cache.expect_ahead(inode.ino, tenure, part.clone(), Instant::now(), rx);
                let Some(id) = id else { return part.start };
                let (core, inode) = (self.clone(), inode.clone());
                self.shared.env.spawn(async move {
                    let bytes = core.storage.read_range(&inode, part).await.ok();
                    core.cache.lock().arrived(id, bytes, Instant::now());
                    done.send_replace(true);
                });
            }
        }
        range.end
    }

    /// One part of a read: from the cache if it has arrived there, else from the servers.
    fn fetch_part<'a>(
        self: &'a Arc<Self>,
        inode: &'a Inode,
        tenure: Tenure,
        part: Part,
        reader: Reader,
    ) -> BoxFuture<'a, Result<Vec<Buf>>> {
        Box::pin(async move {
            match part {
                Part::Here(bufs) => {
                    Counters::add(&self.shared.stats.cached_bytes, buffers::total(&bufs) as u64);
                    Ok(bufs)
                }
                Part::Fetch(range) => self.fetch(inode, tenure, range, reader).await,
                Part::Coming(mut done, range) => {
                    // An error means that the fetching task is gone; then the range is not cached
                    // either.
                    let _ = done.wait_for(|d| *d).await;
                    let again = self.cache.lock().plan(inode.ino, tenure, range.clone(), reader);
                    match <[Part; 1]>::try_from(again) {
                        Ok([Part::Here(bufs)]) => {
                            Counters::add(
                                &self.shared.stats.cached_bytes,
                                buffers::total(&bufs) as u64,
                            );
                            Ok(bufs)
                        }
                        _ => self.storage.read_range(inode, range).await,
                    }
                }
            }
        })
    }

    /// Fetches bytes that are not cached. They are cached, unless the reader streams through the
    /// file and will not read them again.
    async fn fetch(
        self: &Arc<Self>,
        inode: &Inode,
        tenure: Tenure,
        range: Range<u64>,
        reader: Reader,
    ) -> Result<Vec<Buf>> {
        let id = match reader {
            Reader::Returns => self.cache.lock().expect(inode.ino, tenure, range.clone()),
            Reader::Streams => None,
        };
        let expected = Expected { core: self, id };
        let bufs = self.storage.read_range(inode, range).await?;
        expected.arrived(&bufs);
        Ok(bufs)
    }

    /// Returns when all bytes written through this client are stable and the size is in the
    /// metadata log.
    pub(crate) async fn sync_inode(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<()> {
        self.writeback.send_held(inode).await;
        self.updates.fence(inode).await?;
        self.updates.flush_inode(inode.ino).await?;
        self.files.push_size(inode).await
    }
}

/// A fetch that the cache waits for; dropping it gives the fetch up.
struct Expected<'a> {
    core: &'a Core,
    id: Option<u64>,
}

impl Expected<'_> {
    fn arrived(mut self, bufs: &[Buf]) {
        let Some(id) = self.id.take() else { return };
        // Small ones are copied: long-lived small buffers would leave the pool no contiguous space
        // for large ones.
        let small = buffers::total(bufs) < SMALL && buffers::road(bufs).is_some();
        let kept = if small { vec![buffers::detached(bufs)] } else { bufs.to_vec() };
        self.core.cache.lock().arrived(id, Some(kept), Instant::now());
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.cache.lock().arrived(id, None, Instant::now());
        }
    }
}

impl Handle {
    fn new(core: &Arc<Core>, open: Arc<Open>, creds: &pb::Creds, flags: u32) -> Handle {
        let inode = open.inode.clone();
        Handle {
            core: core.clone(),
            creds: creds.clone(),
            flags,
            open: Mutex::new(Some(open)),
            ahead: Mutex::new(ReadAhead::new(core.shared.cfg.read_ahead_bytes as u64)),
            told_errors: [(); 3].map(|()| AtomicU64::new(inode.errors())),
            closed: AtomicBool::new(false),
            since: inode.handle_opened(flags),
            tail: Mutex::new(None),
            inode,
        }
    }
}

impl File {
    pub(crate) fn new(core: &Arc<Core>, open: Arc<Open>, creds: &pb::Creds, flags: u32) -> File {
        File(Arc::new(Handle::new(core, open, creds, flags)))
    }

    async fn truncate_at_open(
        self,
        operation: Option<Operation>,
        wanted: bool,
    ) -> Result<(File, pb::Attr)> {
        let attr = match wanted && self.is_writable() {
            true => self.truncate_for(operation.as_ref(), 0).await?,
            false => self.attr(),
        };
        Ok((self, attr))
    }

    fn is_writable(&self) -> bool {
        matches!(self.0.flags & O_ACCMODE, O_WRONLY | O_RDWR)
    }

    fn check(&self, ok: bool, what: &str) -> Result<()> {
        match (self.0.closed.load(Relaxed), ok) {
            (true, _) => Err(Error::new(Code::BadF, "the file is closed")),
            (false, false) => {
                Err(Error::new(Code::BadF, format!("the file is not open for {what}")))
            }
            (false, true) => Ok(()),
        }
    }

    /// The inode.
    pub fn ino(&self) -> Ino {
        self.0.inode.ino
    }

    /// How the file is striped, and over which chains.
    pub fn layout(&self) -> pb::Layout {
        self.0.inode.placed().layout
    }

    /// The flags it was opened with.
    pub fn flags(&self) -> u32 {
        self.0.flags
    }

    /// The credentials of the opener, on whose behalf the file is written.
    pub fn opener(&self) -> &pb::Creds {
        &self.0.creds
    }

    /// The attributes as last heard, with the size that this client's own writes give.
    /// [`Client::getattr`] asks the server.
    pub fn attr(&self) -> pb::Attr {
        self.0.inode.attr()
    }

    /// The bytes of `[offset, offset + len)` below the end of the file, as segments in order. Holes
    /// read as zeros.
    pub async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        let h = &self.0;
        self.check(h.flags & O_ACCMODE != O_WRONLY, "reading")?;
        // Under a lease, the lookup of the size also says in which tenure the bytes are.
        let known = h.core.files.known_size(&h.inode).map(|(_, tenure)| tenure);
        let size =
            if known.is_some() { h.inode.size() } else { h.core.files.ask_size(&h.inode).await? };
        self.read_below(size, known, offset, len).await
    }

    /// `tenure`: the tenure, if the caller has just looked it up.
    async fn read_below(
        &self,
        size: u64,
        tenure: Option<Tenure>,
        offset: u64,
        len: usize,
    ) -> Result<Vec<Buf>> {
        let h = &self.0;
        h.inode.check_missing(h.since, &(offset..offset.saturating_add(len as u64)))?;
        let end = offset.saturating_add(len as u64).min(size);
        if offset >= end {
            return Ok(Vec::new());
        }
        h.inode.check_placed()?;
        // Look at dirty data first: if it is sent meanwhile, the read below gets it from the
        // servers.
        let over = h.inode.back.look(&(offset..end));
        Counters::add(&h.core.shared.stats.read_bytes, end - offset);
        if covers(&over, &(offset..end)) {
            return Ok(over.into_iter().map(|(_, b)| b).collect());
        }
        // Bytes that another client may write must not be cached.
        let known = tenure.or_else(|| Some(h.core.files.known_size(&h.inode)?.1));
        let bufs = match known.filter(|_| h.flags & O_DIRECT == 0 && !h.inode.is_doubtful()) {
            Some(tenure) => self.read_cached(offset..end, size, tenure).await?,
            None => h.core.storage.read_range(&h.inode, offset..end).await?,
        };
        Ok(if over.is_empty() { bufs } else { overlay(&bufs, &(offset..end), over) })
    }

    /// Returns what [`File::read`] would, if everything is in memory: never waits. `None`: call
    /// `read`. Must be called where tasks can be spawned, because a sequential read may start the
    /// next fetch.
    pub fn read_ready(&self, offset: u64, len: usize) -> Option<Vec<Buf>> {
        let h = &self.0;
        self.check(h.flags & O_ACCMODE != O_WRONLY, "reading").ok()?;
        let (size, tenure) = h.core.files.known_size(&h.inode)?;
        h.inode.check_placed().ok()?;
        let range = offset..offset.saturating_add(len as u64).min(size);
        if h.flags & O_DIRECT != 0 || range.is_empty() || h.inode.is_doubtful() {
            return None;
        }
        h.inode.check_missing(h.since, &(offset..offset.saturating_add(len as u64))).ok()?;
        let over = h.inode.back.look(&range);
        if !over.is_empty() {
            let all = covers(&over, &range);
            return all.then(|| over.into_iter().map(|(_, b)| b).collect());
        }
        if !h.core.cache.lock().is_here(h.inode.ino, tenure, &range) {
            return None;
        }
        let (parts, ..) = self.plan(range.clone(), size, tenure);
        let mut out = Vec::with_capacity(parts.len());
        for p in parts {
            match p {
                Part::Here(bufs) => out.extend(bufs),
                // The part left the cache just now.
                Part::Coming(..) | Part::Fetch(_) => return None,
            }
        }
        Counters::add(&h.core.shared.stats.cached_bytes, range.end - range.start);
        Counters::add(&h.core.shared.stats.read_bytes, range.end - range.start);
        Some(out)
    }

    /// Plans where the parts of a read come from. Starts more read-ahead if the reads are
    /// sequential.
    fn plan(&self, range: Range<u64>, size: u64, tenure: Tenure) -> (Vec<Part>, Reader) {
        let h = &self.0;
        let (ahead, in_order, expected) = {
            let mut a = h.ahead.lock();
            let expected = range.end <= a.asked();
            (a.on_read(range.start, range.end - range.start, size), a.is_in_order(), expected)
        };
        let (parts, reader) = {
            let mut cache = h.core.cache.lock();
            let reader = if in_order { cache.in_order(size) } else { Reader::Returns };
            (cache.plan(h.inode.ino, tenure, range, reader), reader)
        };
        if expected && parts.iter().any(|p| matches!(p, Part::Fetch(_))) {
            h.ahead.lock().wasted();
        }
        if let Some(ahead) = ahead {
            let end = h.core.prefetch(&h.inode, tenure, ahead, size);
            h.ahead.lock().reached(end);
        }
        (parts, reader)
    }

    async fn read_cached(&self, range: Range<u64>, size: u64, tenure: Tenure) -> Result<Vec<Buf>> {
        let h = &self.0;
        let (parts, reader) = self.plan(range, size, tenure);
        let mut out = Vec::new();
        for r in join_all(parts.into_iter().map(|p| h.core.fetch_part(&h.inode, tenure, p, reader)))
            .await
        {
            out.extend(r?);
        }
        Ok(out)
    }

    /// As [`File::read`], but copies into `dst`. Returns the number of bytes read.
    pub async fn read_into(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let mut at = 0;
        for b in self.read(offset, dst.len()).await? {
            dst[at..at + b.len()].copy_from_slice(&b);
            at += b.len();
        }
        Ok(at)
    }

    /// Writes `data` at `offset`. When it returns, every byte is with all in-sync replicas, in
    /// memory or on disk (on disk with O_DSYNC or O_SYNC). Overlapping writes of one client are
    /// applied in the order of the calls. The buffers must not change any more.
    ///
    /// Returns the number of bytes written: fewer than given only when space ran out on the way, or
    /// at the largest size of a file (`EFBIG` for a write that begins there). After an error each 4
    /// KiB block is old or new.
    ///
    /// With [`crate::Config::write_back`] it may return before the bytes are sent: then the next
    /// sync or close reports an error.
    pub async fn write(&self, offset: u64, data: Vec<Buf>) -> Result<usize> {
        self.write_until(None, offset, data, ()).await
    }

    /// As [`File::write`]; drops `until` when the write can have no further effect, even if the
    /// caller has gone away. `operation`: what the write belongs to, if that may come again after a
    /// restart of the mount.
    pub async fn write_until(
        &self,
        operation: Option<&Operation>,
        offset: u64,
        data: Vec<Buf>,
        until: impl Send + 'static,
    ) -> Result<usize> {
        self.check(self.is_writable(), "writing")?;
        let (mut taken, len) = (self.hold_back(offset, &data)?, buffers::total(&data));
        if taken == Taken::Held {
            return Ok(len);
        }
        let (me, operation) = (self.clone(), operation.cloned());
        let writing = async move {
            let _until = until;
            let (core, inode) = (&me.0.core, &me.0.inode);
            for _ in 0..2 {
                match taken {
                    Taken::Full => core.writeback.send_held_here(inode).await,
                    Taken::Ask => core.writeback.ask_space(inode, offset, len as u64).await,
                    Taken::Held | Taken::Through => break,
                }
                taken = me.hold_back(offset, &data)?;
            }
            if taken == Taken::Held {
                return Ok(len);
            }
            core.writeback.send_held_here(inode).await;
            me.write_alone(offset, data, operation.as_ref()).await
        };
        self.0.core.shared.detached(writing).await
    }

    fn hold_back(&self, offset: u64, data: &[Buf]) -> Result<Taken> {
        let h = &self.0;
        self.tell_errors(Teller::Write)?;
        let end = offset.saturating_add(buffers::total(data) as u64);
        if end > MAX_FILE_SIZE {
            return Ok(Taken::Through);
        }
        Ok(h.core.writeback.hold_back(&h.inode, &h.creds, h.flags, offset, data))
    }

    /// As [`File::write`], from a slice (copied), all of it.
    pub async fn write_all_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut b = self.0.core.shared.fabric.pool().get(data.len()).await?;
        b.copy_from_slice(data);
        let n = self.write(offset, vec![b.freeze()]).await?;
        if n < data.len() {
            Err(Error::new(Code::NoSpc, "no space left for all of the bytes"))
        } else {
            Ok(())
        }
    }

    /// As [`File::write_now`], while no other client holds pages of the file.
    async fn write_alone(
        &self,
        offset: u64,
        data: Vec<Buf>,
        operation: Option<&Operation>,
    ) -> Result<usize> {
        let (core, ino) = (&self.0.core, self.0.inode.ino);
        loop {
            let using = core.use_to_change(ino).await?;
            let way = Way { only: using.session(), operation, within: false };
            match self.write_now(offset, data.clone(), way).await {
                // The lock was lost with the session. What was sent was sent under the lock.
                Err(e) if e.code == Code::NoSession && way.only.is_some() => {}
                written => return written,
            }
        }
    }

    async fn write_now(
        &self,
        offset: u64,
        data: Vec<Buf>,
        Way { only, within, operation }: Way<'_>,
    ) -> Result<usize> {
        let h = &self.0;
        self.tell_errors(Teller::Write)?;
        let data = up_to_the_largest(offset, data)?;
        let len = buffers::total(&data);
        if len == 0 {
            return Ok(0);
        }
        let end = offset + len as u64;
        let stable = h.flags & O_DSYNC != 0;
        // Reserve memory first: waiting for it under the range lock would hold up the flush that
        // frees it.
        let room = if stable { None } else { Some(h.core.updates.reserve(len).await?) };
        let _turn = h.inode.ranges.lock(offset..end).await;
        h.inode.begins(&(offset..end));
        let change = Change::begin(&h.core.cache, h.inode.ino, offset..end);
        let numbers = Numbers { only, operation };
        let (session, done, outcome) =
            h.core.updates.write_range(&h.inode, offset, &data, stable, numbers, room).await;
        drop(change);
        if done > 0 {
            let range = offset..offset + done;
            match within {
                true => h.inode.wrote_within(session, range, &h.creds)?,
                false => h.inode.wrote(session, range, &h.creds)?,
            }
        }
        let unsent = outcome.as_ref().is_err_and(|e| e.code == Code::NoSession);
        if done < len as u64 && !unsent {
            h.inode.write_failed(end);
        }
        match outcome {
            Err(e) if done == 0 || e.code != Code::NoSpc => return Err(e),
            _ => {}
        }
        if stable {
            h.core.files.push_size(&h.inode).await?;
        }
        Ok(done as usize)
    }

    /// Updates mtime, ctime and set-id bits as a write would, without writing bytes.
    pub fn touch(&self) -> Result<()> {
        self.check(self.is_writable(), "writing")?;
        self.0.inode.touched(&self.0.creds);
        Ok(())
    }

    pub(crate) fn inode(&self) -> &Arc<Inode> {
        &self.0.inode
    }

    /// Records that bytes of this file are lost: the next write, fsync and close of every open file
    /// of it fail with `EIO`.
    pub fn lost(&self, why: &str) {
        self.0.inode.fail_loudly(why);
    }

    /// Truncates or extends the file. Returns when the bytes beyond the new size are gone from
    /// every replica.
    pub async fn truncate(&self, size: u64) -> Result<pb::Attr> {
        self.truncate_for(None, size).await
    }

    /// As [`File::truncate`]; `operation` is as for [`File::write_until`].
    pub async fn truncate_for(&self, operation: Option<&Operation>, size: u64) -> Result<pb::Attr> {
        self.check(self.is_writable(), "writing")?;
        let (me, operation) = (self.clone(), operation.cloned());
        let set = pb::SetAttr { ino: self.ino(), size: Some(size), ..Default::default() };
        let cutting = async move {
            let caller = Caller { creds: &me.0.creds, operation: operation.as_ref() };
            me.0.core.setattr(caller, set, true).await
        };
        self.0.core.shared.detached(cutting).await
    }

    /// Makes the file reach at least to `end`; new bytes read as zeros. Unlike [`File::truncate`]
    /// it never removes what others write at the same time.
    pub async fn extend(&self, end: u64) -> Result<pb::Attr> {
        self.check(self.is_writable(), "writing")?;
        if end > MAX_FILE_SIZE {
            return Err(Error::new(Code::FBig, "beyond the largest file"));
        }
        let me = self.clone();
        let extending = async move {
            let (h, extend) =
                (&me.0, op(pb::op::Op::Extend(pb::Extend { ino: me.ino(), end, holes: true })));
            let r = h.core.files.meta_as_opener((&h.creds).into(), vec![extend]).await?;
            let attr = r.first().and_then(|r| r.attr.as_ref());
            let attr = attr.ok_or_else(|| {
                Error::new(Code::Protocol, "the answer to an extension has no attributes")
            })?;
            Ok(h.inode.take_attr(attr))
        };
        self.0.core.shared.detached(extending).await
    }

    /// Returns when all bytes written are stable on every in-sync replica and the size is in the
    /// metadata servers' log. An error of an earlier write-back is reported once per open file.
    pub async fn fsync(&self) -> Result<()> {
        self.check(true, "")?;
        self.sync(Teller::Sync).await
    }

    /// What close(2) does: the same as [`File::fsync`].
    pub fn flush<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.check(true, "")?;
            self.sync(Teller::Close).await
        })
    }

    /// Reports that bytes which were written are lost. The first sync or close reports it, as on
    /// Linux. A loss by a restart of the mount is reported by the first sync, the first close and
    /// the first write.
    fn tell_errors(&self, by: Teller) -> Result<()> {
        let told = &self.0.told_errors;
        let seen = told[by as usize].load(Relaxed);
        let Some((errors, e, by_each)) = self.0.inode.error_since(seen) else { return Ok(()) };
        match (by, by_each) {
            (Teller::Write, false) => return Ok(()),
            (_, true) => told[by as usize].store(errors, Relaxed),
            (_, false) => told.iter().for_each(|t| t.store(errors, Relaxed)),
        }
        Err(e)
    }

    async fn sync(&self, by: Teller) -> Result<()> {
        let me = self.clone();
        let syncing = async move {
            let h = &me.0;
            let outcome = h.core.sync_inode(&h.inode).await;
            me.tell_errors(by).and(outcome)
        };
        self.0.core.shared.detached(syncing).await
    }

    /// Flushes and closes, for all clones. The file is closed even when this fails.
    pub fn close(self) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            if self.0.closed.swap(true, Relaxed) {
                return Err(Error::new(Code::BadF, "the file is closed"));
            }
            self.0.tail.lock().take();
            let outcome = self.sync(Teller::Close).await;
            let h = &self.0;
            let Some(open) = h.open.lock().take().and_then(Arc::into_inner) else { return outcome };
            let core = h.core.clone();
            let gone = h.core.shared.detached(async move {
                forget(core, open).await;
                Ok(())
            });
            let gone = gone.await;
            outcome.and(gone)
        })
    }
}

/// The part of a write that fits below the largest size; an error where nothing fits.
fn up_to_the_largest(offset: u64, data: Vec<Buf>) -> Result<Vec<Buf>> {
    let len = buffers::total(&data) as u64;
    match MAX_FILE_SIZE.saturating_sub(offset) {
        room if room >= len => Ok(data),
        0 => Err(Error::new(Code::FBig, "beyond the largest file size")),
        room => Ok(buffers::cut(&data, 0, room as usize)),
    }
}

/// Tells the metadata server that a handle is closed.
async fn forget(core: Arc<Core>, open: Open) {
    let inode = &open.inode;
    let (now, since) =
        (core.metadata.current_session().map(|s| s.id), core.metadata.reassertions());
    let counted = inode.closed(open.session, now);
    if inode.handles() == 0 {
        // The write or append of a killed program goes on by itself. Wait for it: once this client
        // is no longer on record, nothing waits for its writes.
        drop((inode.appending.lock().await, inode.ranges.lock_all().await));
    }
    // Send the dirty data of a write that ran beside the close: once this client is no longer on
    // record, the next writer does not wait for it.
    core.writeback.send_held(inode).await;
    if inode.handles() == 0 {
        core.leave_closed_pages(inode.ino).await;
    }
    if counted {
        core.metadata.tell_closed(&[inode.ino], since).await;
    }
    core.files.release_later(inode.ino, inode.release());
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inode.handle_closed(self.since, self.flags);
        if self.closed.load(Relaxed)
            || self.core.shared.is_closed()
            || tokio::runtime::Handle::try_current().is_err()
        {
            return;
        }
        let (core, inode) = (self.core.clone(), self.inode.clone());
        let open = self.open.get_mut().take().and_then(Arc::into_inner);
        self.core.shared.env.spawn(async move {
            if let Err(e) = core.sync_inode(&inode).await {
                tracing::warn!(
                    ino = inode.ino,
                    "a file that was dropped without close could not be flushed: {e}"
                );
            }
            if let Some(open) = open {
                forget(core, open).await;
            }
        });
    }
}
