//! A device in memory that can lose power: the simulator's disk. Data written but not flushed
//! survives a crash in part. Each sector on its own keeps any of the contents it had since the last
//! flush, so writes are lost, torn and reordered. Errors and bit flips are injected on request. It
//! needs one thread, and no clock but tokio's.

use std::{collections::BTreeMap, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_fabric::{Buf, BufMut};
use strake_proto::{Code, Error, Result};

use super::{
    api::{BLOCK, Device, check_range},
    meter::{Begun, Class, Meter},
};

type Block = Box<[u8; BLOCK as usize]>;

/// What an injected error hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// [`Device::read`].
    Read,
    /// [`Device::write`].
    Write,
    /// [`Device::flush`].
    Flush,
    /// [`Device::discard`].
    Discard,
}

/// Every kind of operation.
pub const OPS: &[Op] = &[Op::Read, Op::Write, Op::Flush, Op::Discard];

/// How finely a power loss tears writes that were not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tear {
    /// Blocks of 4 KiB stay whole.
    Block,
    /// Sectors of 512 bytes stay whole.
    Sector,
}

/// Operations and bytes since creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads that ended.
    pub reads: u64,
    /// Writes that ended.
    pub writes: u64,
    /// Flushes that ended.
    pub flushes: u64,
    /// Discards that ended.
    pub discards: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Operations that failed, or returned a wrong bit, on request.
    pub failed: u64,
}

#[derive(Default)]
struct Inner {
    /// What reads return; absent blocks are zeros.
    blocks: BTreeMap<u64, Block>,
    /// For each block written since the last flush, every content it had since then, the flushed
    /// one first.
    unflushed: BTreeMap<u64, Vec<Block>>,
    faults: Vec<(Op, u64, Code)>,
    /// Chooses the bit that the next read returns wrong.
    corrupt: Option<u64>,
    power_left: Option<u64>,
    /// Writes fail for lack of space.
    full: bool,
    /// Free space of the file system below; `None`: no limit.
    spare: Option<u64>,
    skip_flush: bool,
    latency: BTreeMap<Op, Duration>,
    counters: Counters,
}

/// See the module documentation.
pub struct MemDevice {
    capacity: u64,
    inner: Mutex<Inner>,
    meter: Meter,
}

/// An operation in progress, or abandoned.
struct Metered<'a>(&'a Meter, Option<Begun>);

impl Drop for Metered<'_> {
    fn drop(&mut self) {
        self.1.take().into_iter().for_each(|op| self.0.end(op));
    }
}

fn zeros() -> Block {
    Box::new([0; BLOCK as usize])
}

impl MemDevice {
    /// Sets how many bytes are free in the file system below.
    pub fn set_spare(&self, bytes: u64) {
        self.inner.lock().spare = Some(bytes);
    }

    /// An empty device of `capacity` bytes, rounded down to whole blocks. Memory is used only for
    /// blocks written.
    pub fn new(capacity: u64) -> MemDevice {
        MemDevice {
            capacity: capacity / BLOCK * BLOCK,
            inner: Mutex::default(),
            meter: Meter::default(),
        }
    }

    /// Power is lost and returns: see the module documentation. Ends a power failure set by
    /// [`MemDevice::power_off_after`]. Returns how many blocks were not flushed.
    pub fn crash(&self, seed: u64, tear: Tear) -> usize {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut inner = self.inner.lock();
        let unit = match tear {
            Tear::Block => BLOCK as usize,
            Tear::Sector => 512,
        };
        let unflushed = std::mem::take(&mut inner.unflushed);
        let count = unflushed.len();
        for (at, mut versions) in unflushed {
            versions.push(inner.blocks.get(&at).cloned().unwrap_or_else(zeros));
            let mut left = zeros();
            for from in (0..BLOCK as usize).step_by(unit) {
                let kept = &versions[rng.random_range(0..versions.len())];
                left[from..from + unit].copy_from_slice(&kept[from..from + unit]);
            }
            inner.blocks.insert(at, left);
        }
        inner.power_left = None;
        count
    }

    /// After `operations` more operations every further one fails, until [`MemDevice::crash`].
    pub fn power_off_after(&self, operations: u64) {
        self.inner.lock().power_left = Some(operations);
    }

    /// The `nth` operation of this kind from now (0 is the next) fails with `code`, once.
    pub fn fail(&self, op: Op, nth: u64, code: Code) {
        self.inner.lock().faults.push((op, nth, code));
    }

    /// The next read returns one wrong bit, chosen by `dice`; the stored bytes stay right.
    pub fn corrupt_read(&self, dice: u64) {
        self.inner.lock().corrupt = Some(dice);
    }

    /// Until [`MemDevice::end_faults`] every write fails for lack of space.
    pub fn fill_up(&self) {
        self.inner.lock().full = true;
    }

    /// Cancels failures that did not happen yet, and frees space again.
    pub fn end_faults(&self) {
        let mut inner = self.inner.lock();
        inner.faults.clear();
        inner.corrupt = None;
        inner.full = false;
    }

    /// Inverts one bit of the byte at `offset`, as a decaying medium would.
    pub fn flip_bit(&self, offset: u64, bit: u8) {
        let mut inner = self.inner.lock();
        let block = inner.blocks.entry(offset / BLOCK).or_insert_with(zeros);
        block[(offset % BLOCK) as usize] ^= 1 << (bit % 8);
    }

    /// Offsets of the blocks that begin with these bytes.
    pub fn find(&self, begin: &[u8]) -> Vec<u64> {
        let inner = self.inner.lock();
        inner
            .blocks
            .iter()
            .filter(|(_, b)| b.starts_with(begin))
            .map(|(at, _)| at * BLOCK)
            .collect()
    }

    /// Offset of a block that `is` accepts: the first one after a place chosen by `dice`.
    pub fn pick(&self, dice: u64, is: impl Fn(&[u8]) -> bool) -> Option<u64> {
        let inner = self.inner.lock();
        let from = dice % (self.capacity / BLOCK).max(1);
        let mut all = inner.blocks.range(from..).chain(inner.blocks.range(..from));
        all.find(|(_, b)| is(&b[..])).map(|(at, _)| at * BLOCK)
    }

    /// Whether a block with these bytes exists.
    pub fn holds(&self, block: &[u8]) -> bool {
        self.inner.lock().blocks.values().any(|b| b[..] == *block)
    }

    /// From now on flushes are acknowledged but do nothing, like a build that forgot its fsync: for
    /// tests that must notice.
    pub fn skip_flush(&self) {
        self.inner.lock().skip_flush = true;
    }

    /// Operations of these kinds take this long by tokio's clock.
    pub fn set_latency(&self, ops: &[Op], latency: Duration) {
        self.inner.lock().latency.extend(ops.iter().map(|op| (*op, latency)));
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.inner.lock().counters
    }

    /// Runs one operation under the lock and takes the set time. A change is made at the start, so
    /// that a power loss in between leaves any part of it. A read looks at the end, when the data
    /// may have changed.
    async fn operate<T>(&self, op: Op, bytes: u64, run: impl FnOnce(&mut Inner) -> T) -> Result<T> {
        let begun = match op {
            Op::Read => Some(self.meter.begin(Class::Read, bytes)),
            Op::Write => Some(self.meter.begin(Class::Change, bytes)),
            Op::Flush => Some(self.meter.begin_flush()),
            Op::Discard => None,
        };
        let _metered = Metered(&self.meter, begun);
        let latency = self.inner.lock().latency.get(&op).copied().unwrap_or_default();
        if op == Op::Read && !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        let done = {
            let mut inner = self.inner.lock();
            if let Some(left) = &mut inner.power_left {
                if *left == 0 {
                    return Err(Error::new(Code::Io, format!("{}: power lost", self.name())));
                }
                *left -= 1;
            }
            let mut fault = None;
            inner.faults.retain_mut(|(kind, nth, code)| {
                if *kind != op {
                    return true;
                }
                if *nth == 0 && fault.is_none() {
                    fault = Some(*code);
                    return false;
                }
                *nth = nth.saturating_sub(1);
                true
            });
            if inner.full && op == Op::Write {
                fault = Some(Code::NoSpc);
            }
            if let Some(code) = fault {
                inner.counters.failed += 1;
                return Err(Error::new(code, format!("{}: injected {op:?} error", self.name())));
            }
            run(&mut inner)
        };
        if op != Op::Read && !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        Ok(done)
    }
}

impl Inner {
    fn set(&mut self, at: u64, new: Option<Block>) {
        let old = match new {
            Some(b) => self.blocks.insert(at, b),
            None => self.blocks.remove(&at),
        };
        self.unflushed.entry(at).or_default().push(old.unwrap_or_else(zeros));
    }
}

#[async_trait]
impl Device for MemDevice {
    fn capacity(&self) -> u64 {
        self.capacity
    }
    fn direct(&self) -> bool {
        true
    }
    fn name(&self) -> String {
        "memory device".into()
    }
    fn spare(&self) -> u64 {
        self.inner.lock().spare.unwrap_or(u64::MAX)
    }
    fn meter(&self) -> &Meter {
        &self.meter
    }

    async fn read(&self, offset: u64, mut buf: BufMut) -> Result<BufMut> {
        let len = buf.len() as u64;
        check_range("memory device", self.capacity, offset, len)?;
        self.operate(Op::Read, len, move |inner| {
            inner.counters.reads += 1;
            inner.counters.read_bytes += buf.len() as u64;
            for (i, part) in buf.chunks_mut(BLOCK as usize).enumerate() {
                match inner.blocks.get(&(offset / BLOCK + i as u64)) {
                    Some(b) => part.copy_from_slice(&b[..]),
                    None => part.fill(0),
                }
            }
            if let Some(dice) = inner.corrupt.take_if(|_| !buf.is_empty()) {
                let at = (dice / 8) as usize % buf.len();
                buf[at] ^= 1 << (dice % 8);
                inner.counters.failed += 1;
            }
            buf
        })
        .await
    }

    async fn write(&self, offset: u64, bufs: Vec<Buf>) -> Result<()> {
        let total: u64 = bufs.iter().map(|b| b.len() as u64).sum();
        check_range("memory device", self.capacity, offset, total)?;
        self.operate(Op::Write, total, move |inner| {
            inner.counters.writes += 1;
            inner.counters.write_bytes += total;
            let (mut at, mut block, mut filled) = (offset / BLOCK, zeros(), 0);
            for buf in &bufs {
                let mut rest: &[u8] = buf;
                while !rest.is_empty() {
                    let n = rest.len().min(BLOCK as usize - filled);
                    block[filled..filled + n].copy_from_slice(&rest[..n]);
                    rest = &rest[n..];
                    filled += n;
                    if filled == BLOCK as usize {
                        inner.set(at, Some(std::mem::replace(&mut block, zeros())));
                        (at, filled) = (at + 1, 0);
                    }
                }
            }
        })
        .await
    }

    async fn flush(&self) -> Result<()> {
        self.operate(Op::Flush, 0, |inner| {
            inner.counters.flushes += 1;
            if !inner.skip_flush {
                inner.unflushed.clear();
            }
        })
        .await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        check_range("memory device", self.capacity, offset, len)?;
        self.operate(Op::Discard, 0, |inner| {
            inner.counters.discards += 1;
            for at in offset / BLOCK..(offset + len) / BLOCK {
                inner.set(at, None);
            }
        })
        .await
    }
}
