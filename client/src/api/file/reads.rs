//! The reading side of an open file: which bytes are here, on their way, or to be fetched.

use std::{ops::Range, sync::Arc};

use futures_util::future::{BoxFuture, join_all};
use parking_lot::Mutex;
use strake_fabric::Buf;
use strake_proto::Result;
use strake_runtime::watch;
use tokio::time::Instant;

use crate::{
    config::Counters,
    core::Core,
    data::buffers,
    inode::Inode,
    read::cache::{Part, Reader, Tenure, UNIT},
    read::readahead::ReadAhead,
    write::back::{covers, overlay},
};

const O_DIRECT: u32 = 0o40000;
/// Reads of fewer bytes than this are copied, so that the cache does not keep pool buffers for
/// them.
const SMALL: usize = 64 << 10;

pub(super) struct Reads {
    pub(super) core: Arc<Core>,
    pub(super) inode: Arc<Inode>,
    /// Opened with O_DIRECT: nothing is cached.
    direct: bool,
    /// See [`Inode::handle_opened`].
    pub(super) since: u64,
    ahead: Mutex<ReadAhead>,
}

impl Reads {
    pub fn new(core: &Arc<Core>, inode: &Arc<Inode>, flags: u32, since: u64) -> Reads {
        Reads {
            core: core.clone(),
            inode: inode.clone(),
            direct: flags & O_DIRECT != 0,
            since,
            ahead: Mutex::new(ReadAhead::new(core.shared.cfg.read_ahead_bytes as u64)),
        }
    }

    pub async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        let (files, inode) = (&self.core.files, &self.inode);
        // Under a lease, the lookup of the size also says in which tenure the bytes are.
        let known = files.known_size(inode).map(|(_, tenure)| tenure);
        let size = if known.is_some() { inode.size() } else { files.ask_size(inode).await? };
        self.below(size, known, offset, len).await
    }

    /// The bytes below `size`. `tenure`: the tenure, if the caller has just looked it up.
    pub async fn below(
        &self,
        size: u64,
        tenure: Option<Tenure>,
        offset: u64,
        len: usize,
    ) -> Result<Vec<Buf>> {
        let (core, inode) = (&self.core, &self.inode);
        inode.check_missing(self.since, &(offset..offset.saturating_add(len as u64)))?;
        let end = offset.saturating_add(len as u64).min(size);
        if offset >= end {
            return Ok(Vec::new());
        }
        inode.check_placed()?;
        // Look at dirty data first: if it is sent meanwhile, the read below gets it from the
        // servers.
        let over = inode.back.look(&(offset..end));
        Counters::add(&core.shared.stats.read_bytes, end - offset);
        if covers(&over, &(offset..end)) {
            return Ok(over.into_iter().map(|(_, b)| b).collect());
        }
        // Bytes that another client may write must not be cached.
        let known = tenure.or_else(|| Some(core.files.known_size(inode)?.1));
        let bufs = match known.filter(|_| !self.direct && !inode.is_doubtful()) {
            Some(tenure) => self.cached(offset..end, size, tenure).await?,
            None => core.storage.read_range(inode, offset..end).await?,
        };
        Ok(if over.is_empty() { bufs } else { overlay(&bufs, &(offset..end), over) })
    }

    /// The bytes, if all of them are in memory.
    pub fn ready(&self, offset: u64, len: usize) -> Option<Vec<Buf>> {
        let (core, inode) = (&self.core, &self.inode);
        let (size, tenure) = core.files.known_size(inode)?;
        inode.check_placed().ok()?;
        let range = offset..offset.saturating_add(len as u64).min(size);
        if self.direct || range.is_empty() || inode.is_doubtful() {
            return None;
        }
        inode.check_missing(self.since, &(offset..offset.saturating_add(len as u64))).ok()?;
        let over = inode.back.look(&range);
        if !over.is_empty() {
            let all = covers(&over, &range);
            return all.then(|| over.into_iter().map(|(_, b)| b).collect());
        }
        if !core.cache.lock().is_here(inode.ino, tenure, &range) {
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
        Counters::add(&core.shared.stats.cached_bytes, range.end - range.start);
        Counters::add(&core.shared.stats.read_bytes, range.end - range.start);
        Some(out)
    }

    /// Plans where the parts of a read come from. Starts more read-ahead if the reads are
    /// sequential.
    fn plan(&self, range: Range<u64>, size: u64, tenure: Tenure) -> (Vec<Part>, Reader) {
        let (ahead, in_order, expected) = {
            let mut a = self.ahead.lock();
            let expected = range.end <= a.asked();
            (a.on_read(range.start, range.end - range.start, size), a.is_in_order(), expected)
        };
        let (parts, reader) = {
            let mut cache = self.core.cache.lock();
            let reader = if in_order { cache.in_order(size) } else { Reader::Returns };
            (cache.plan(self.inode.ino, tenure, range, reader), reader)
        };
        if expected && parts.iter().any(|p| matches!(p, Part::Fetch(_))) {
            self.ahead.lock().wasted();
        }
        if let Some(ahead) = ahead {
            let end = self.prefetch(tenure, ahead, size);
            self.ahead.lock().reached(end);
        }
        (parts, reader)
    }

    async fn cached(&self, range: Range<u64>, size: u64, tenure: Tenure) -> Result<Vec<Buf>> {
        let (parts, reader) = self.plan(range, size, tenure);
        let mut out = Vec::new();
        for r in join_all(parts.into_iter().map(|p| self.fetch_part(tenure, p, reader))).await {
            out.extend(r?);
        }
        Ok(out)
    }

    /// Fetches a range into the cache, in parts of at most a cache unit, as far as the cache has
    /// space. Returns how far that was.
    fn prefetch(&self, tenure: Tenure, range: Range<u64>, size: u64) -> u64 {
        let (core, inode) = (&self.core, &self.inode);
        let units = range.start / UNIT..range.end.div_ceil(UNIT);
        for unit in units.map(|n| range.start.max(n * UNIT)..((n + 1) * UNIT).min(size)) {
            let mut cache = core.cache.lock();
            for part in cache.missing(inode.ino, tenure, unit) {
                let (done, rx) = watch::channel(false);
                let id = cache.expect_ahead(inode.ino, tenure, part.clone(), Instant::now(), rx);
                let Some(id) = id else { return part.start };
                let (core, inode) = (core.clone(), inode.clone());
                self.core.shared.env.spawn(async move {
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
        &'a self,
        tenure: Tenure,
        part: Part,
        reader: Reader,
    ) -> BoxFuture<'a, Result<Vec<Buf>>> {
        let (core, ino) = (&self.core, self.inode.ino);
        let cached = move |bufs: &[Buf]| {
            Counters::add(&core.shared.stats.cached_bytes, buffers::total(bufs) as u64);
        };
        Box::pin(async move {
            match part {
                Part::Here(bufs) => {
                    cached(&bufs);
                    Ok(bufs)
                }
                Part::Fetch(range) => self.fetch(tenure, range, reader).await,
                Part::Coming(mut done, range) => {
                    // An error means that the fetching task is gone; then the range is not cached
                    // either.
                    let _ = done.wait_for(|d| *d).await;
                    let again = core.cache.lock().plan(ino, tenure, range.clone(), reader);
                    match <[Part; 1]>::try_from(again) {
                        Ok([Part::Here(bufs)]) => {
                            cached(&bufs);
                            Ok(bufs)
                        }
                        _ => core.storage.read_range(&self.inode, range).await,
                    }
                }
            }
        })
    }

    /// Fetches bytes that are not cached. They are cached, unless the reader streams through the
    /// file and will not read them again.
    async fn fetch(&self, tenure: Tenure, range: Range<u64>, reader: Reader) -> Result<Vec<Buf>> {
        let (core, inode) = (&*self.core, &self.inode);
        let id = match reader {
            Reader::Returns => core.cache.lock().expect(inode.ino, tenure, range.clone()),
            Reader::Streams => None,
        };
        let expected = Expected { core, id };
        let bufs = core.storage.read_range(inode, range).await?;
        expected.arrived(&bufs);
        Ok(bufs)
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
        let small = buffers::total(bufs) < SMALL && buffers::transport(bufs).is_some();
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
