//! The read cache: bytes of files that were read, or are being read ahead, kept while no other
//! client can change them. That is as long as a *tenure* lasts, see
//! [`crate::leases::lease_cache::LeaseCache::data`]. Pure bookkeeping over all files, with a memory
//! limit.
//!
//! The cache has three queues, each in the order of last use. *Ahead*: bytes that were read ahead
//! and are not read to their end yet. *Once*: bytes that were read once. *Often*: bytes that were
//! read again. Memory is freed at the old end of *Once*. *Often* may take half of the memory; above
//! that it moves its least recently used bytes to *Once*. So a scan, which reads everything once,
//! never evicts what is read again and again.

use std::{collections::BTreeMap, ops::Range, time::Duration};

use parking_lot::Mutex;
use strake_fabric::Buf;
use strake_proto::Ino;
use strake_runtime::watch;
use tokio::time::Instant;

use crate::data::buffers;

/// Read-ahead fetches aligned parts of this many bytes.
pub(crate) const UNIT: u64 = 1 << 20;
/// How long bytes that were read ahead wait for their reader before they may be evicted.
const PATIENCE: Duration = Duration::from_secs(5);
/// Buffer sizes are powers of two, beginning here.
const SMALLEST: u64 = 4096;

/// While a tenure lasts, only this client changed a file's bytes. The numbers rise.
pub(crate) type Tenure = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Ahead,
    Once,
    Often,
}

enum State {
    /// Being fetched by a task; the receiver is notified when the task ends, with or without
    /// success.
    Coming(watch::Receiver<bool>),
    Here(Vec<Buf>),
}

struct Extent {
    len: u64,
    /// Memory that the extent uses.
    held: u64,
    state: State,
    /// Bytes of it that were read, counting repeated reads.
    served: u64,
    queue: Queue,
    /// Its position in its queue. While it is being fetched: the number of the fetch.
    stamp: u64,
    /// When it arrived.
    since: Instant,
}

struct File {
    tenure: Tenure,
    /// By start offset; they do not overlap.
    extents: BTreeMap<u64, Extent>,
}

/// A fetch in progress whose bytes are to be cached.
struct Fetch {
    ino: Ino,
    tenure: Tenure,
    range: Range<u64>,
    ahead: bool,
}

/// See the module.
pub(crate) struct Cache {
    limit: u64,
    used: u64,
    /// Parts of `used`: bytes in *Ahead* or being fetched for it, and bytes in *Often*.
    ahead: u64,
    often: u64,
    files: BTreeMap<Ino, File>,
    fetches: BTreeMap<u64, Fetch>,
    queues: [BTreeMap<u64, (Ino, u64)>; 3],
    stamps: u64,
    /// Ranges that this client is changing now.
    changes: BTreeMap<u64, (Ino, Range<u64>)>,
}

/// A change of bytes by this client that is in progress. Until it is over, a replica may return the
/// old bytes to one reader and another replica the new ones: bytes that are read there meanwhile
/// are not cached.
pub(crate) struct Change<'a> {
    cache: &'a Mutex<Cache>,
    number: u64,
}

impl Change<'_> {
    pub fn begin(cache: &Mutex<Cache>, ino: Ino, range: Range<u64>) -> Change<'_> {
        let number = cache.lock().changing(ino, range);
        Change { cache, number }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.cache.lock().changed(self.number);
    }
}

/// Where a part of a read comes from.
pub(crate) enum Part {
    Here(Vec<Buf>),
    Coming(watch::Receiver<bool>, Range<u64>),
    Fetch(Range<u64>),
}

/// The access pattern of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// Bytes that it read may be read again.
    Returns,
    /// It reads sequentially more than the cache can hold: bytes that were read ahead for it are
    /// dropped once they were read.
    Streams,
}

/// The memory that buffers of these bytes use.
fn memory(bufs: &[Buf]) -> u64 {
    bufs.iter().map(|b| (b.len() as u64).next_power_of_two().max(SMALLEST)).sum()
}

impl Cache {
    /// `limit`: bytes of memory; 0 caches nothing.
    pub fn new(limit: u64) -> Cache {
        Cache {
            limit,
            used: 0,
            ahead: 0,
            often: 0,
            files: BTreeMap::new(),
            fetches: BTreeMap::new(),
            queues: [const { BTreeMap::new() }; 3],
            stamps: 0,
            changes: BTreeMap::new(),
        }
    }

    /// Bytes of memory in use.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// The access pattern of a sequential reader of a file of this size.
    pub fn in_order(&self, size: u64) -> Reader {
        if size > self.limit / 4 { Reader::Streams } else { Reader::Returns }
    }

    // --- reading ---

    /// Splits a read into parts.
    pub fn plan(
        &mut self,
        ino: Ino,
        tenure: Tenure,
        range: Range<u64>,
        reader: Reader,
    ) -> Vec<Part> {
        let mut out = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let found = self.part_at(ino, tenure, at, range.end);
            let end = found.as_ref().map_or(range.end, |(_, end, _)| *end);
            out.push(match found {
                Some((start, _, true)) => self.take(ino, start, at..end, reader),
                Some((_, _, false)) | None => Part::Fetch(at..end),
            });
            at = end;
        }
        out
    }

    /// What is cached at a position before `end`: the start of its extent, the end of the part, and
    /// whether it is an extent (else it is a gap).
    fn part_at(&self, ino: Ino, tenure: Tenure, at: u64, end: u64) -> Option<(u64, u64, bool)> {
        let file = self.files.get(&ino).filter(|f| f.tenure == tenure)?;
        if let Some((start, e)) =
            file.extents.range(..=at).next_back().filter(|(start, e)| *start + e.len > at)
        {
            return Some((*start, (start + e.len).min(end), true));
        }
        let next = file.extents.range(at..end).next()?;
        Some((at, *next.0, false))
    }

    /// Whether all of a range is cached: [`Cache::plan`] would return it without a wait.
    pub fn is_here(&self, ino: Ino, tenure: Tenure, range: &Range<u64>) -> bool {
        let mut at = range.start;
        while at < range.end {
            let Some((start, end, true)) = self.part_at(ino, tenure, at, range.end) else {
                return false;
            };
            if !matches!(self.files[&ino].extents[&start].state, State::Here(_)) {
                return false;
            }
            at = end;
        }
        true
    }

    fn take(&mut self, ino: Ino, start: u64, range: Range<u64>, reader: Reader) -> Part {
        let gap = Part::Fetch(range.clone());
        let Some(e) = self.files.get_mut(&ino).and_then(|f| f.extents.get_mut(&start)) else {
            return gap;
        };
        let bufs = match &e.state {
            State::Coming(rx) => return Part::Coming(rx.clone(), range),
            State::Here(bufs) => bufs,
        };
        let len = range.end - range.start;
        let part = buffers::cut(bufs, (range.start - start) as usize, len as usize);
        e.served += len;
        let (read, again) = (e.served >= e.len, e.served > e.len);
        match (e.queue, reader) {
            (Queue::Ahead, Reader::Streams) if read => self.remove(ino, start),
            (Queue::Ahead, _) if !read => {}
            (Queue::Ahead, _) => self.enqueue(ino, start, Queue::Once),
            (_, Reader::Returns) if again => self.enqueue(ino, start, Queue::Often),
            (queue, _) => self.enqueue(ino, start, queue),
        }
        Part::Here(part)
    }

    // --- filling ---

    /// The parts of a range that are neither cached nor being fetched.
    pub fn missing(&self, ino: Ino, tenure: Tenure, range: Range<u64>) -> Vec<Range<u64>> {
        let mut out = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let found = self.part_at(ino, tenure, at, range.end);
            let end = found.map_or(range.end, |(_, end, _)| end);
            if !matches!(found, Some((_, _, true))) {
                out.push(at..end);
            }
            at = end;
        }
        out
    }

    /// A fetch of bytes that are not cached begins; [`Cache::arrived`] must be called for it.
    /// `None`: the bytes will not be cached.
    pub fn expect(&mut self, ino: Ino, tenure: Tenure, range: Range<u64>) -> Option<u64> {
        if self.limit == 0
            || self.files.get(&ino).is_some_and(|f| f.tenure > tenure)
            || self.is_changing(ino, &range)
        {
            return None;
        }
        self.stamps += 1;
        self.fetches.insert(self.stamps, Fetch { ino, tenure, range, ahead: false });
        Some(self.stamps)
    }

    /// A read-ahead of a missing range begins. `None`: there is no memory for it, or it is being
    /// changed.
    pub fn expect_ahead(
        &mut self,
        ino: Ino,
        tenure: Tenure,
        range: Range<u64>,
        now: Instant,
        done: watch::Receiver<bool>,
    ) -> Option<u64> {
        let len = range.end - range.start;
        let held = len.next_power_of_two().max(SMALLEST);
        let no_room = self.ahead + held > self.limit / 4 * 3;
        if no_room
            || self.is_changing(ino, &range)
            || !self.open(ino, tenure)
            || !self.make_room(held)
        {
            return None;
        }
        self.stamps += 1;
        (self.used, self.ahead) = (self.used + held, self.ahead + held);
        let (stamp, start) = (self.stamps, range.start);
        let e = Extent {
            len,
            held,
            state: State::Coming(done),
            served: 0,
            queue: Queue::Ahead,
            stamp,
            since: now,
        };
        let file =
            self.files.entry(ino).or_insert_with(|| File { tenure, extents: BTreeMap::new() });
        file.extents.insert(start, e);
        self.fetches.insert(stamp, Fetch { ino, tenure, range, ahead: true });
        Some(stamp)
    }

    /// A fetch ended, with or without bytes. The bytes are dropped if they became void meanwhile.
    pub fn arrived(&mut self, id: u64, bytes: Option<Vec<Buf>>, now: Instant) {
        let Some(f) = self.fetches.remove(&id) else { return };
        let bytes = bytes.filter(|b| buffers::total(b) as u64 == f.range.end - f.range.start);
        match bytes {
            Some(bytes) if f.ahead => {
                let file = self.files.get_mut(&f.ino);
                let Some(e) = file
                    .and_then(|file| file.extents.get_mut(&f.range.start))
                    .filter(|e| e.stamp == id)
                else {
                    return;
                };
                (e.state, e.since) = (State::Here(bytes), now);
                self.queues[Queue::Ahead as usize].insert(id, (f.ino, f.range.start));
            }
            Some(bytes) => self.keep(&f, bytes, now),
            None if f.ahead => self.remove(f.ino, f.range.start),
            None => {}
        }
    }

    fn keep(&mut self, f: &Fetch, bytes: Vec<Buf>, now: Instant) {
        let held = memory(&bytes);
        let alone = self.missing(f.ino, f.tenure, f.range.clone()) == [f.range.clone()];
        if !alone || !self.open(f.ino, f.tenure) || !self.make_room(held) {
            return;
        }
        self.stamps += 1;
        self.used += held;
        let (len, stamp) = (f.range.end - f.range.start, self.stamps);
        let e = Extent {
            len,
            held,
            state: State::Here(bytes),
            served: len,
            queue: Queue::Once,
            stamp,
            since: now,
        };
        let file = self
            .files
            .entry(f.ino)
            .or_insert_with(|| File { tenure: f.tenure, extents: BTreeMap::new() });
        file.extents.insert(f.range.start, e);
        self.queues[Queue::Once as usize].insert(stamp, (f.ino, f.range.start));
    }

    /// Drops what is cached of a file under an earlier tenure. Returns false if this tenure is
    /// over.
    fn open(&mut self, ino: Ino, tenure: Tenure) -> bool {
        let kept = self.files.get(&ino).map(|f| f.tenure);
        if kept.is_some_and(|t| t < tenure) {
            self.forget(ino);
        }
        kept.is_none_or(|t| t <= tenure)
    }

    // --- dropping ---

    /// Frees memory by evicting bytes that were read once, oldest first.
    fn make_room(&mut self, held: u64) -> bool {
        while self.used + held > self.limit {
            match self.queues[Queue::Once as usize].first_key_value() {
                Some((_, (ino, start))) => self.remove(*ino, *start),
                None => return false,
            }
        }
        true
    }

    /// Moves an extent to the new end of a queue.
    fn enqueue(&mut self, ino: Ino, start: u64, queue: Queue) {
        self.stamps += 1;
        self.move_to(ino, start, queue, self.stamps);
        while self.often > self.limit / 2
            && let Some((_, (ino, start))) = self.queues[Queue::Often as usize].pop_first()
        {
            self.stamps += 1;
            self.move_to(ino, start, Queue::Once, self.stamps);
        }
    }

    fn move_to(&mut self, ino: Ino, start: u64, queue: Queue, stamp: u64) {
        let Some(e) = self.files.get_mut(&ino).and_then(|f| f.extents.get_mut(&start)) else {
            return;
        };
        let (held, from, old) = (e.held, e.queue, e.stamp);
        (e.queue, e.stamp) = (queue, stamp);
        self.queues[from as usize].remove(&old);
        self.queues[queue as usize].insert(stamp, (ino, start));
        self.count(from, held, false);
        self.count(queue, held, true);
    }

    fn count(&mut self, queue: Queue, held: u64, comes: bool) {
        let of = match queue {
            Queue::Ahead => &mut self.ahead,
            Queue::Often => &mut self.often,
            Queue::Once => return,
        };
        *of = if comes { *of + held } else { *of - held };
    }

    fn remove(&mut self, ino: Ino, start: u64) {
        let Some(f) = self.files.get_mut(&ino) else { return };
        let Some(e) = f.extents.remove(&start) else { return };
        if f.extents.is_empty() {
            self.files.remove(&ino);
        }
        self.used -= e.held;
        self.queues[e.queue as usize].remove(&e.stamp);
        self.count(e.queue, e.held, false);
    }

    fn changing(&mut self, ino: Ino, range: Range<u64>) -> u64 {
        self.invalidate(ino, range.clone());
        self.stamps += 1;
        self.changes.insert(self.stamps, (ino, range));
        self.stamps
    }

    fn changed(&mut self, number: u64) {
        if let Some((ino, range)) = self.changes.remove(&number) {
            self.invalidate(ino, range);
        }
    }

    fn is_changing(&self, ino: Ino, range: &Range<u64>) -> bool {
        self.changes.values().any(|(i, r)| *i == ino && r.start < range.end && range.start < r.end)
    }

    /// This client changed these bytes: what is cached or being fetched there may be old.
    pub fn invalidate(&mut self, ino: Ino, range: Range<u64>) {
        if range.start >= range.end {
            return;
        }
        let overlaps =
            |f: &Fetch| f.ino == ino && f.range.start < range.end && range.start < f.range.end;
        self.fetches.retain(|_, f| !overlaps(f));
        let Some(f) = self.files.get(&ino) else { return };
        let first =
            f.extents.range(..range.start).next_back().filter(|(s, e)| **s + e.len > range.start);
        let gone: Vec<u64> = first
            .into_iter()
            .chain(f.extents.range(range.clone()))
            .map(|(start, _)| *start)
            .collect();
        gone.into_iter().for_each(|start| self.remove(ino, start));
    }

    /// Forgets a file.
    pub fn forget(&mut self, ino: Ino) {
        self.invalidate(ino, 0..u64::MAX);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        // Stamps continue: a fetch in progress must not be taken for another one.
        let changes = std::mem::take(&mut self.changes);
        *self = Cache { stamps: self.stamps, changes, ..Cache::new(self.limit) };
    }

    /// Makes bytes that were read ahead, and not read for too long, available for eviction.
    pub fn age(&mut self, now: Instant) {
        while let Some((stamp, (ino, start))) = self.queues[Queue::Ahead as usize].first_key_value()
        {
            let (stamp, ino, start) = (*stamp, *ino, *start);
            let since = self.files.get(&ino).and_then(|f| f.extents.get(&start)).map(|e| e.since);
            match since {
                Some(since) if now.duration_since(since) < PATIENCE => return,
                // It keeps its stamp, so it is older than what was read meanwhile.
                Some(_) => self.move_to(ino, start, Queue::Once, stamp),
                None => drop(self.queues[Queue::Ahead as usize].remove(&stamp)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INO: Ino = 7;
    const KIB: u64 = 1 << 10;

    fn bytes(byte: u8, len: u64) -> Vec<Buf> {
        vec![Buf::copy_from(&vec![byte; len as usize])]
    }

    /// Reads bytes of a file through the cache, as the client does. Returns the bytes and where
    /// they came from.
    fn read(
        c: &mut Cache,
        ino: Ino,
        tenure: Tenure,
        r: Range<u64>,
        fill: u8,
    ) -> (Vec<u8>, Vec<&'static str>) {
        let mut kinds = Vec::new();
        let mut out = Vec::new();
        for p in c.plan(ino, tenure, r, Reader::Returns) {
            match p {
                Part::Here(b) => {
                    kinds.push("here");
                    b.iter().for_each(|b| out.extend_from_slice(b));
                }
                Part::Coming(_, r) => {
                    kinds.push("coming");
                    out.resize(out.len() + (r.end - r.start) as usize, fill);
                }
                Part::Fetch(r) => {
                    kinds.push("fetch");
                    let id = c.expect(ino, tenure, r.clone());
                    let b = bytes(fill, r.end - r.start);
                    out.extend_from_slice(&b[0]);
                    if let Some(id) = id {
                        c.arrived(id, Some(b), Instant::now());
                    }
                }
            }
        }
        (out, kinds)
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_read_is_there_until_it_is_changed() {
        let mut c = Cache::new(1 << 20);
        assert_eq!(read(&mut c, INO, 1, 10..20, 5).1, ["fetch"]);
        assert_eq!(
            read(&mut c, INO, 1, 5..30, 6),
            ([vec![6; 5], vec![5; 10], vec![6; 10]].concat(), vec!["fetch", "here", "fetch"])
        );
        assert!(
            c.is_here(INO, 1, &(5..30))
                && !c.is_here(INO, 1, &(4..30))
                && !c.is_here(INO, 1, &(5..31))
        );
        assert!(!c.is_here(INO, 2, &(5..30)) && !c.is_here(8, 1, &(5..30)));
        // Overlapping extents are dropped, and nothing else.
        c.invalidate(INO, 19..20);
        assert_eq!(read(&mut c, INO, 1, 5..30, 7).1, ["here", "fetch", "here"]);
        // Another tenure drops everything.
        assert_eq!(read(&mut c, INO, 2, 5..30, 8), (vec![8; 25], vec!["fetch"]));
        assert_eq!(read(&mut c, INO, 1, 5..30, 9).1, ["fetch"], "that of one who was late");
        assert_eq!(read(&mut c, INO, 2, 5..30, 9).0, vec![8; 25]);
        c.forget(INO);
        assert_eq!((c.used(), c.files.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_changed_on_its_way_is_not_kept() {
        let mut c = Cache::new(1 << 20);
        let now = Instant::now();
        let (_tx, rx) = watch::channel(false);
        let one = c.expect(INO, 1, 0..10).unwrap();
        let two = c.expect(INO, 1, 10..20).unwrap();
        let ahead = c.expect_ahead(INO, 1, 20..40, now, rx.clone()).unwrap();
        let later = c.expect_ahead(INO, 1, 40..50, now, rx).unwrap();
        c.invalidate(INO, 9..10);
        c.invalidate(INO, 30..31);
        for (id, range) in [(one, 10), (two, 10), (ahead, 20), (later, 10)] {
            c.arrived(id, Some(bytes(1, range)), now);
        }
        assert_eq!(c.missing(INO, 1, 0..60), [0..10, 20..40, 50..60]);
        // Bytes that are too short, missing, or of an ended tenure are not cached either.
        let id = c.expect(INO, 1, 0..10).unwrap();
        c.arrived(id, Some(bytes(1, 9)), now);
        let id = c.expect(INO, 1, 0..10).unwrap();
        c.arrived(id, None, now);
        let old = c.expect(INO, 1, 0..10).unwrap();
        assert_eq!(read(&mut c, INO, 2, 50..60, 3).1, ["fetch"]);
        c.arrived(old, Some(bytes(1, 10)), now);
        assert_eq!(c.missing(INO, 2, 0..60).first(), Some(&(0..50)));
        let cleared = c.expect(INO, 2, 0..10).unwrap();
        c.clear();
        c.arrived(cleared, Some(bytes(1, 10)), now);
        assert_eq!((c.used(), c.is_here(INO, 2, &(0..10))), (0, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_scan_does_not_push_out_what_is_read_again() {
        let mut c = Cache::new(64 * KIB);
        for _ in 0..2 {
            for at in 0..4 {
                read(&mut c, INO, 1, at * 4 * KIB..(at + 1) * 4 * KIB, 1);
            }
        }
        for at in 0..1000 {
            assert_eq!(read(&mut c, 8, 1, at * 8 * KIB..(at + 1) * 8 * KIB, 2).1, ["fetch"]);
            assert!(c.used() <= 64 * KIB);
        }
        assert_eq!(read(&mut c, INO, 1, 0..16 * KIB, 3).0, vec![1; 16 << 10]);
        // More is read often than *Often* may hold: its oldest bytes are evicted.
        for _ in 0..2 {
            for at in 0..10 {
                read(&mut c, 9, 1, at * 4 * KIB..(at + 1) * 4 * KIB, 1);
            }
        }
        assert!(c.often <= 32 * KIB && c.used() <= 64 * KIB);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_read_ahead_waits_for_its_reader_a_while() {
        let mut c = Cache::new(16 * KIB);
        let now = Instant::now();
        let (_tx, rx) = watch::channel(false);
        let ahead = |c: &mut Cache, r: Range<u64>| {
            let id = c.expect_ahead(INO, 1, r.clone(), now, rx.clone())?;
            c.arrived(id, Some(bytes(1, r.end - r.start)), now);
            Some(id)
        };
        for at in 0..3 {
            assert!(ahead(&mut c, at * 4 * KIB..(at + 1) * 4 * KIB).is_some());
        }
        assert!(ahead(&mut c, 12 * KIB..16 * KIB).is_none(), "three quarters are for that");
        for at in 0..5 {
            read(&mut c, 8, 1, at * 4 * KIB..(at + 1) * 4 * KIB, 2);
        }
        assert!(c.is_here(INO, 1, &(0..12 * KIB)), "other reads do not take it away");
        c.age(now + PATIENCE / 2);
        // Once read to its end it is treated like other bytes that were read, or dropped.
        assert!(matches!(c.plan(INO, 1, 0..KIB, Reader::Streams)[..], [Part::Here(_)]));
        assert!(matches!(c.plan(INO, 1, KIB..4 * KIB, Reader::Streams)[..], [Part::Here(_)]));
        assert!(!c.is_here(INO, 1, &(0..1)));
        assert!(matches!(c.plan(INO, 1, 4 * KIB..8 * KIB, Reader::Returns)[..], [Part::Here(_)]));
        assert!(c.is_here(INO, 1, &(4 * KIB..12 * KIB)));
        c.age(now + PATIENCE);
        assert_eq!(c.ahead, 0);
        for at in 0..5 {
            read(&mut c, 9, 1, at * 4 * KIB..(at + 1) * 4 * KIB, 2);
        }
        assert!(!c.is_here(INO, 1, &(8 * KIB..8 * KIB + 1)), "nobody came for it");
    }

    /// Replicas may answer with old bytes until a write is over, and other clients may have seen
    /// the new ones by then.
    #[tokio::test(start_paused = true)]
    async fn what_is_read_while_it_is_changed_is_not_kept() {
        let cache = Mutex::new(Cache::new(1 << 20));
        let (_tx, rx) = watch::channel(false);
        assert_eq!(read(&mut cache.lock(), INO, 1, 0..40, 1).1, ["fetch"]);
        let change = Change::begin(&cache, INO, 10..20);
        {
            let mut c = cache.lock();
            assert_eq!(read(&mut c, INO, 1, 0..40, 2).1, ["fetch"], "what was here");
            assert_eq!(read(&mut c, INO, 1, 19..40, 3).1, ["fetch"]);
            assert!(c.expect_ahead(INO, 1, 0..11, Instant::now(), rx).is_none());
            c.clear();
            assert!(c.expect(INO, 1, 15..16).is_none() && c.expect(9, 1, 15..16).is_some());
            assert_eq!(read(&mut c, INO, 1, 20..40, 4).1, ["fetch"], "not of the change");
            assert_eq!(read(&mut c, INO, 1, 20..40, 5).1, ["here"]);
        }
        drop(change);
        assert_eq!(read(&mut cache.lock(), INO, 1, 10..20, 6).1, ["fetch"]);
        assert_eq!(read(&mut cache.lock(), INO, 1, 10..20, 7).1, ["here"]);
    }

    #[tokio::test(start_paused = true)]
    async fn without_memory_nothing_is_kept() {
        let mut c = Cache::new(0);
        let (_tx, rx) = watch::channel(false);
        assert!(c.expect(INO, 1, 0..10).is_none());
        assert!(c.expect_ahead(INO, 1, 0..10, Instant::now(), rx).is_none());
        assert_eq!((read(&mut c, INO, 1, 0..10, 1).1, c.used()), (vec!["fetch"], 0));
    }

    proptest! {
        /// For any order of reads, writes, recalls and read-ahead: a read never returns bytes other
        /// than those at its time, the memory stays within the limit, and the counts are right.
        #[test]
        fn reads_are_never_old(ops in prop::collection::vec((0u8..8, 0u64..3, 0u64..40, 1u64..20), 1..200), limit in 0u64..20) {
            let now = Instant::now();
            let mut c = Cache::new(limit * SMALLEST);
            let mut files = [[0u8; 64]; 3];
            let mut tenures = [1u64; 3];
            let mut coming: Vec<(u64, Vec<Buf>)> = Vec::new();
            let (_tx, rx) = watch::channel(false);
            for (i, (what, ino, at, len)) in ops.into_iter().enumerate() {
                let (f, r) = (ino as usize, at..at + len);
                let now_there = |files: &[[u8; 64]; 3], r: &Range<u64>| {
                    vec![Buf::copy_from(&files[f][r.start as usize..r.end as usize])]
                };
                match what {
                    0 => {
                        let change = c.changing(ino, r.clone());
                        files[f][r.start as usize..r.end as usize].fill((i as u8).wrapping_add(1));
                        c.changed(change);
                    }
                    1 => {
                        tenures[f] = i as u64 + 2;
                        files[f].fill((i as u8).wrapping_add(101));
                    }
                    2 => for r in c.missing(ino, tenures[f], r) {
                        let there = now_there(&files, &r);
                        coming.extend(c.expect_ahead(ino, tenures[f], r, now, rx.clone()).map(|id| (id, there)));
                    },
                    3 => {
                        let there = now_there(&files, &r);
                        coming.extend(c.expect(ino, tenures[f], r).map(|id| (id, there)));
                    }
                    4 => if !coming.is_empty() {
                        let (id, b) = coming.remove(at as usize % coming.len());
                        c.arrived(id, Some(b), now);
                    },
                    5 if at == 0 => c.age(now + PATIENCE),
                    n => {
                        let reader = if n == 7 { Reader::Streams } else { Reader::Returns };
                        for p in c.plan(ino, tenures[f], r.clone(), reader) {
                            if let Part::Fetch(r) = p
                                && let Some(id) = c.expect(ino, tenures[f], r.clone())
                            {
                                c.arrived(id, Some(now_there(&files, &r)), now);
                            }
                        }
                        let mut there = r.start;
                        for p in c.plan(ino, tenures[f], r.clone(), reader) {
                            there += match p {
                                Part::Here(b) => {
                                    let got: Vec<u8> = b.iter().flat_map(|b| b.to_vec()).collect();
                                    let want = &files[f][there as usize..there as usize + got.len()];
                                    prop_assert_eq!(&got[..], want);
                                    got.len() as u64
                                }
                                Part::Coming(_, r) | Part::Fetch(r) => r.end - r.start,
                            };
                        }
                        prop_assert_eq!(there, r.end);
                    }
                }
                prop_assert!(c.used() <= c.limit && c.ahead <= c.limit && c.often <= c.limit / 2 + SMALLEST);
                let all = || c.files.values().flat_map(|f| f.extents.values());
                prop_assert_eq!(all().map(|e| e.held).sum::<u64>(), c.used());
                let of = |q| all().filter(|e| e.queue == q).map(|e| e.held).sum::<u64>();
                prop_assert_eq!((of(Queue::Ahead), of(Queue::Often)), (c.ahead, c.often));
                let queued: usize = c.queues.iter().map(BTreeMap::len).sum();
                prop_assert_eq!(all().filter(|e| matches!(e.state, State::Here(_))).count(), queued);
            }
        }
    }
}
