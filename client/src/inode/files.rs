//! Files that this client has in use: their inodes, the capabilities to read and write them, what
//! is reported about them, and what is released when they are no longer open.

use futures_util::future::BoxFuture;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Ino, Result, SessionId, layout::MAX_FILE_SIZE, pb};
use tokio::time::Instant;

use crate::{
    handover::operation::Caller,
    inode::{Inode, caps::Cap, openings::Release},
    leases::lease_cache::LeaseCache,
    metadata::{
        ops::{ok, op},
        service::Metadata,
    },
    read::cache::Tenure,
    shared::Shared,
};

/// Capabilities are renewed when less than this many milliseconds are left.
const RENEW_BEFORE_MS: u64 = 120_000;

/// How long a change of a file waits for programs that are closing the file.
const CLOSING: Duration = Duration::from_secs(1);

/// Most releases in one request.
const RELEASES_AT_ONCE: usize = 1024;

/// See the module.
pub(crate) struct Files {
    shared: Arc<Shared>,
    metadata: Arc<Metadata>,
    lease_cache: Arc<LeaseCache>,
    inodes: Mutex<BTreeMap<Ino, Weak<Inode>>>,
    /// Files to be released, see [`Files::release_later`], with the last opening before the
    /// release.
    releases: Mutex<BTreeMap<Ino, (Release, u64)>>,
}

impl Files {
    pub fn new(
        shared: Arc<Shared>,
        metadata: Arc<Metadata>,
        lease_cache: Arc<LeaseCache>,
    ) -> Files {
        Files {
            shared,
            metadata,
            lease_cache,
            inodes: Mutex::default(),
            releases: Mutex::default(),
        }
    }

    /// The shared state of an inode, if this client has it in use.
    pub fn live_inode(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.inodes.lock().get(&ino).and_then(Weak::upgrade)
    }

    /// The shared state of an inode; `new` creates it if the inode is not in use yet.
    pub fn inode(&self, ino: Ino, new: impl FnOnce() -> Inode) -> Arc<Inode> {
        let mut all = self.inodes.lock();
        if let Some(i) = all.get(&ino).and_then(Weak::upgrade) {
            return i;
        }
        if all.len() >= 64 && all.len().is_power_of_two() {
            all.retain(|_, w| w.strong_count() > 0);
        }
        let i = Arc::new(new());
        all.insert(ino, Arc::downgrade(&i));
        i
    }

    pub fn live_inodes(&self) -> Vec<Arc<Inode>> {
        self.inodes.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Schedules a report to the metadata servers, many files in one request, that this client no
    /// longer writes this file.
    pub fn release_later(&self, ino: Ino, release: Option<Release>) {
        let Some(mut new) = release.filter(|r| r.writer.index != 0) else { return };
        let mut all = self.releases.lock();
        if let Some((old, _)) =
            all.get(&ino).filter(|(old, _)| old.writer.session == new.writer.session)
        {
            new.writer.index = new.writer.index.max(old.writer.index);
            new.surplus |= old.surplus;
            new.kept.extend(old.kept.iter().cloned());
        }
        all.insert(ino, (new, self.metadata.openings().last()));
    }

    /// The releases of this session that may be sent now; those of a lost session were released by
    /// its end. The servers take the end of a file's last open as the end of all opens before it.
    /// So those opens must have been answered, and none of them may be in use.
    fn due_releases(&self, session: SessionId) -> Vec<(Ino, Release)> {
        let mut all = self.releases.lock();
        let mine =
            std::mem::take(&mut *all).into_iter().filter(|(_, (r, _))| r.writer.session == session);
        let (due, later): (Vec<_>, Vec<_>) = mine.partition(|(ino, (r, last))| {
            let needed = |i: Arc<Inode>| i.openings.are_before(r.writer);
            !self.metadata.openings().may_open(*ino, *last)
                && !self.live_inode(*ino).is_some_and(needed)
        });
        all.extend(later);
        due.into_iter().map(|(ino, (r, _))| (ino, r)).collect()
    }

    /// Sends the releases that are due.
    pub async fn send_releases(self: Arc<Self>) {
        let Some(session) = self.metadata.current_session() else { return };
        let all = self.due_releases(session.id);
        for part in all.chunks(RELEASES_AT_ONCE) {
            let one = |(ino, r): &(Ino, Release)| {
                op(pb::op::Op::Release(pb::Release {
                    ino: *ino,
                    writer: r.writer.index,
                    surplus: r.surplus,
                }))
            };
            if let Err(e) =
                self.metadata.meta(&pb::Creds::default(), part.iter().map(one).collect()).await
            {
                tracing::debug!("releasing files: {e}");
                part.iter().for_each(|(ino, r)| self.release_later(*ino, Some(r.clone())));
            }
        }
    }
}

impl Files {
    /// A request on behalf of an open handle. As for any file descriptor, the permission was
    /// checked at open and still holds when the mode has changed since (or never allowed it, as for
    /// a file created read-only).
    pub(crate) async fn meta_as_opener(
        self: &Arc<Self>,
        caller: Caller<'_>,
        ops: Vec<pb::Op>,
    ) -> Result<Vec<pb::OpResult>> {
        self.as_opener_within(None, caller, ops).await
    }

    fn as_opener_within<'a>(
        self: &'a Arc<Self>,
        only: Option<SessionId>,
        caller: Caller<'a>,
        ops: Vec<pb::Op>,
    ) -> BoxFuture<'a, Result<Vec<pb::OpResult>>> {
        Box::pin(async move {
            let r = ok(self.metadata.meta_within(only, caller, ops.clone()).await?);
            match r {
                Err(e) if matches!(e.code, Code::Access | Code::Perm) && caller.creds.uid != 0 => {
                    let root = Caller { creds: &pb::Creds::default(), ..caller };
                    ok(self.metadata.meta_within(only, root, ops).await?)
                }
                r => r,
            }
        })
    }

    /// A change that needs a file which is not open for writing, else `EBUSY`.
    pub(crate) async fn once_closed(
        self: &Arc<Self>,
        caller: Caller<'_>,
        change: pb::op::Op,
    ) -> Result<pb::OpResult> {
        let end = Instant::now() + CLOSING;
        loop {
            match self.metadata.write_op(caller, change.clone()).await {
                // The file may have been closed a moment ago: the kernel does not wait for the
                // release, and releases are sent in batches.
                Err(e) if e.code == Code::Busy && Instant::now() < end => {
                    self.clone().send_releases().await;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                r => return r,
            }
        }
    }

    /// Reports own writes to the metadata server: size and mtime.
    pub(crate) async fn push_size(self: &Arc<Self>, inode: &Inode) -> Result<()> {
        let _one = inode.reporting.lock().await;
        loop {
            // Look up the session first: what is to be reported may belong to a newer session by
            // then, but never to an older one.
            let session = self.metadata.current_session().map(|s| s.id);
            let Some((writes, extend, creds)) = inode.to_report() else { return Ok(()) };
            let holes = extend.holes;
            let extend = vec![op(pb::op::Op::Extend(extend))];
            match self.as_opener_within(session, (&creds).into(), extend).await {
                Ok(r) => {
                    inode.reported(writes, holes, r.first().and_then(|r| r.attr.as_ref()));
                    return Ok(());
                }
                // The session changed: look again at what is left to report.
                Err(e) if e.code == Code::NoSession => {}
                Err(e) => {
                    if matches!(e.code, Code::NoEnt | Code::Stale) {
                        // The file is deleted; there is nothing left to report to.
                        inode.reported(writes, holes, None);
                    }
                    return Err(e.context("reporting the size"));
                }
            }
        }
    }

    /// The size for a read that begins now, with its tenure, if it is known under a lease. Then no
    /// other client may write the file.
    pub(crate) fn known_size(&self, inode: &Inode) -> Option<(u64, Tenure)> {
        let (attr, tenure) = self.lease_cache.data(self.shared.env.boot(), inode.ino)?;
        Some((inode.take_attr(&attr).size.min(MAX_FILE_SIZE), tenure))
    }

    /// The size for a read that begins now. Asks the metadata server unless the size is known under
    /// a lease.
    pub(crate) async fn fresh_size(self: &Arc<Self>, inode: &Inode) -> Result<u64> {
        if self.known_size(inode).is_some() { Ok(inode.size()) } else { self.ask_size(inode).await }
    }

    /// The size for a read that begins now, always asked from the metadata server.
    pub(crate) async fn ask_size(self: &Arc<Self>, inode: &Inode) -> Result<u64> {
        let get = op(pb::op::Op::Getattr(pb::GetAttr { ino: inode.ino }));
        let r = ok(self.metadata.meta(&pb::Creds::default(), vec![get]).await?)?;
        if let Some(a) = r.first().and_then(|r| r.attr.as_ref()) {
            inode.take_attr(a);
        }
        Ok(inode.size())
    }

    /// A capability that is valid for a while. `refused`: a storage server refused this one.
    pub(crate) fn capability<'a>(
        self: &'a Arc<Self>,
        inode: &'a Inode,
        write: bool,
        refused: Option<&'a Cap>,
    ) -> BoxFuture<'a, Result<Cap>> {
        Box::pin(async move {
            let good = |c: &Cap| {
                self.metadata.current_session().is_some_and(|s| s.id == c.session)
                    && c.expiry_ms
                        > self.shared.env.unix_ms() + RENEW_BEFORE_MS.min(c.expiry_ms / 4)
                    && refused.is_none_or(|r| r.bytes != c.bytes)
                    && inode.openings.strangers(c.session) == 0
            };
            let none = || Error::new(Code::BadF, "the file is not open for this kind of access");
            let c = inode.caps.get(write).ok_or_else(none)?;
            if good(&c) {
                return Ok(c);
            }
            let _one = inode.caps.renewing().await;
            let c = inode.caps.get(write).ok_or_else(none)?;
            if good(&c) {
                return Ok(c);
            }
            self.reopen(inode, &c).await?;
            inode.caps.get(write).ok_or_else(none)
        })
    }

    /// Opens an inode again in the present session to get a new capability. Handles that were
    /// opened in a lost session become known to the present one.
    async fn reopen(self: &Arc<Self>, inode: &Inode, old: &Cap) -> Result<()> {
        let session = self.metadata.session().await?;
        let opening = self.metadata.opening(Some(inode.ino), old.flags).await;
        let strangers = inode.openings.strangers(session.id);
        let open = || op(pb::op::Op::Open(pb::Open { ino: inode.ino, flags: old.flags }));
        let mut ops = vec![open()];
        // One open per handle that the session does not know yet. If it knows all, the single open
        // is closed again in the same request.
        ops.extend((1..strangers).map(|_| open()));
        if strangers == 0 {
            ops.push(op(pb::op::Op::Close(pb::Close { ino: inode.ino })));
        }
        let r = self
            .meta_as_opener((&old.creds).into(), ops)
            .await
            .map_err(|e| e.context("reopening the file"))?;
        if strangers > 0 {
            let closed = inode.openings.adopt(session.id, strangers);
            self.metadata.counted_open(opening.since);
            if closed > 0 {
                self.metadata.tell_closed(&vec![inode.ino; closed], opening.since).await;
            }
        }
        let index = r.iter().map(|r| r.writer).max().unwrap_or(0);
        self.release_later(inode.ino, inode.openings.opened_again(session.id, index));
        let first =
            r.first().ok_or_else(|| Error::new(Code::Protocol, "an empty answer to an open"))?;
        inode.caps.take(&first.capability, session.id, old.flags, &old.creds)
    }

    /// After a lost session: makes all open files known to the new one, so that unlinked files
    /// stay.
    pub(crate) async fn reopen_strangers(self: &Arc<Self>) {
        let Some(s) = self.metadata.current_session() else { return };
        for inode in self.live_inodes() {
            if inode.openings.strangers(s.id) > 0 {
                let write = inode.caps.get(true).is_some();
                if let Err(e) = self.capability(&inode, write, None).await {
                    tracing::warn!(ino = inode.ino, "an open file could not be reopened: {e}");
                }
            }
        }
    }
}
