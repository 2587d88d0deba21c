//! Random updates against a model, with power lost at every single operation of device and table.
//! Afterwards the target must hold exactly the model's state after some commit since the last
//! flush, for all chunks together.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_proto::{Code, Error, Result};
use strake_store::{Batch, MetaStore, PairIter, Reader};

use super::*;
use crate::{
    device::mem::{OPS, Tear},
    engine::ListEntry,
};

/// A table on the same power supply as the device.
pub(super) struct Powered {
    pub store: MemStore,
    pub device: Arc<MemDevice>,
    /// Commits and syncs left until power fails.
    pub left: Mutex<Option<u64>>,
    pub written: Mutex<(u64, u64)>,
}

impl Powered {
    pub(super) fn new(bed: &Bed, left: Option<u64>) -> Arc<Powered> {
        let (store, device) = (bed.table.clone(), bed.device.clone());
        Arc::new(Powered { store, device, left: Mutex::new(left), written: Mutex::default() })
    }
    fn tick(&self) -> Result<()> {
        match &mut *self.left.lock() {
            Some(0) => {
                self.device.power_off_after(0);
                Err(Error::new(Code::Io, "power lost"))
            }
            Some(n) => {
                *n -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Reader for Powered {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.store.get(key)
    }
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        self.store.range(from, to)
    }
}

impl MetaStore for Powered {
    fn commit(&self, batch: Batch) -> Result<()> {
        self.tick()?;
        let bytes: usize =
            batch.ops.iter().map(|(k, v)| k.len() + v.as_ref().map_or(0, Bytes::len)).sum();
        let mut w = self.written.lock();
        *w = (w.0 + 1, w.1 + bytes as u64);
        self.store.commit(batch)
    }
    fn sync(&self) -> Result<()> {
        self.tick()?;
        self.store.sync()
    }
    fn snapshot(&self) -> Result<Box<dyn Reader>> {
        self.store.snapshot()
    }
    fn disk_bytes(&self) -> u64 {
        self.store.disk_bytes()
    }
    fn clear(&self) -> Result<()> {
        self.store.clear()
    }
}

#[derive(Clone, PartialEq, Eq)]
struct Chunk {
    bytes: Vec<u8>,
    number: u64,
    tombstone: bool,
    /// Blocks that hold data.
    stored: BTreeSet<usize>,
}

impl std::fmt::Debug for Chunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (len, sum) = (self.bytes.len(), strake_proto::checksum::crc32c(&self.bytes));
        write!(
            f,
            "{len} bytes ({sum:08x}), number {}, {} {:?}",
            self.number, self.tombstone, self.stored
        )
    }
}

type Model = BTreeMap<u64, Chunk>;

struct Run {
    rng: StdRng,
    engine: Arc<Engine>,
    /// The model after each commit. A crash may leave any of those from `flushed` on.
    history: Vec<Model>,
    flushed: usize,
    number: u64,
    /// Drop some operations halfway.
    abandon: bool,
    /// Update while flushes run.
    overlap: bool,
}

/// An update and the chunk after it.
fn random_update(rng: &mut StdRng, old: &Chunk, number: u64) -> (Update, Chunk) {
    let mut bytes = old.bytes.clone();
    let mut tombstone = old.tombstone;
    let mut stored = old.stored.clone();
    let blocks = |from: usize, to: usize| from / 4096..to.div_ceil(4096);
    let span = [5_000u32, 40_000, 600_000][rng.random_range(0..3)];
    let update = match rng.random_range(0..12) {
        10.. => {
            let (mut offset, mut len) = (rng.random_range(0..span), rng.random_range(1..span));
            if rng.random_bool(0.4) {
                (offset, len) = (offset / 4096 * 4096, (len / 4096 + 1) * 4096);
            }
            let (from, to) =
                (bytes.len().min(offset as usize), bytes.len().min((offset + len) as usize));
            bytes[from..to].fill(0);
            let is_left = |b: usize| {
                bytes[b * 4096..((b + 1) * 4096).min(bytes.len())].iter().any(|b| *b != 0)
            };
            stored.retain(|b| !blocks(from, to).contains(b) || from == to || is_left(*b));
            tombstone |= old.number == 0;
            Update::Punch { offset, len }
        }
        0..6 => {
            let mut offset = rng.random_range(0..span);
            let most = [200, 9_000, 60_000][rng.random_range(0..3)];
            let mut len = rng.random_range(1..most);
            if rng.random_bool(0.4) {
                (offset, len) = (offset / 4096 * 4096, (len / 4096 + 1) * 4096);
            }
            let data = pattern(number, len as usize);
            let end = (offset + len) as usize;
            bytes.resize(bytes.len().max(end), 0);
            bytes[offset as usize..end].copy_from_slice(&data);
            stored.extend(blocks(offset as usize, end));
            tombstone = false;
            write(offset, &data)
        }
        6..8 => {
            let len = rng.random_range(0..span);
            bytes.truncate(len as usize);
            stored.retain(|b| b * 4096 < len as usize);
            Update::Truncate { len }
        }
        8 => {
            (bytes, tombstone) = (Vec::new(), true);
            stored.clear();
            Update::Remove
        }
        _ => {
            bytes = pattern(number, rng.random_range(0..span / 8) as usize);
            stored = blocks(0, bytes.len()).collect();
            tombstone = false;
            replace(&bytes)
        }
    };
    (update, Chunk { bytes, number, tombstone, stored })
}

impl Run {
    /// Runs `op`, or drops it halfway: `None`.
    async fn maybe<T>(&mut self, op: impl Future<Output = T>) -> Option<T> {
        if self.abandon && self.rng.random_bool(0.2) {
            let limit = Duration::from_millis(self.rng.random_range(0..40));
            return tokio::time::timeout(limit, op).await.ok();
        }
        Some(op.await)
    }

    fn model(&self) -> &Model {
        self.history.last().unwrap()
    }

    async fn step(&mut self) -> Result<()> {
        let e = self.engine.clone();
        match self.rng.random_range(0..20) {
            0..3 if self.overlap => {
                // Updates continue while a flush runs.
                let now = self.history.len() - 1;
                let (flushed, updated) = futures_util::future::join(e.flush(), async {
                    for _ in 0..3 {
                        self.update(false).await?;
                    }
                    Ok(())
                })
                .await;
                flushed?;
                self.flushed = now;
                updated
            }
            0..2 => {
                let now = self.history.len() - 1;
                if let Some(done) = self.maybe(e.flush()).await {
                    done?;
                    self.flushed = now;
                }
                Ok(())
            }
            2 => {
                let mut model = self.model().clone();
                let before = model.len();
                model.retain(|_, c| !c.tombstone);
                let forgotten = e.forget_tombstones(CHAIN, (5, 6), 0, usize::MAX)?.forgotten;
                assert_eq!(forgotten, before - model.len());
                self.history.push(model);
                Ok(())
            }
            3 => {
                assert_eq!(state(&e).await?, *self.model());
                Ok(())
            }
            roll => self.update(roll == 4).await,
        }
    }

    /// A random update, committed or only staged.
    async fn update(&mut self, only_stage: bool) -> Result<()> {
        let e = self.engine.clone();
        let index = self.rng.random_range(0..5);
        self.number += 1;
        let absent =
            Chunk { bytes: Vec::new(), number: 0, tombstone: false, stored: BTreeSet::new() };
        let old = self.model().get(&index).cloned().unwrap_or(absent);
        let (update, new) = random_update(&mut self.rng, &old, self.number);
        let staged = match self.maybe(e.stage(key(index), update)).await {
            Some(Err(e)) if e.code == Code::NoSpc => return Ok(()),
            Some(r) => r?,
            None => return Ok(()),
        };
        if only_stage {
            return Ok(());
        }
        e.commit(staged, version(self.number), Vec::new())?;
        let mut model = self.model().clone();
        model.insert(index, new);
        self.history.push(model);
        Ok(())
    }
}

async fn check(e: &Engine, model: &Model) {
    assert_eq!(state(e).await.unwrap(), *model);
}

async fn state(e: &Engine) -> Result<Model> {
    let mut out = Model::new();
    for ListEntry { chunk, version, len, tombstone } in e.list(CHAIN, None, 100)? {
        let bytes = read_all(e, key(chunk.index)).await?;
        assert_eq!(bytes.len(), len as usize);
        out.insert(
            chunk.index,
            Chunk { bytes, number: version.number, tombstone, stored: BTreeSet::new() },
        );
    }
    let (mut from, mut sum) = ((0, 0), 0);
    loop {
        let page = e.extents(CHAIN, 5, 6, from, 3)?;
        sum += page.bytes;
        for x in page.found {
            let blocks = x.offset as usize / 4096..(x.offset + x.len) as usize / 4096;
            out.get_mut(&x.index).expect("data of a chunk that is not there").stored.extend(blocks);
        }
        let Some(next) = page.next else { break };
        assert!(next > from);
        from = next;
    }
    assert_eq!(sum, out.values().map(|c| c.stored.len() as u64 * BLOCK).sum::<u64>());
    assert_eq!(e.extents(CHAIN, 5, 6, (0, 0), 0)?.bytes, sum, "without the extents");
    assert_eq!(e.stored(), if sum > 0 { vec![(CHAIN, sum)] } else { Vec::new() });
    Ok(out)
}

/// Blocks in use must be those that a newly opened engine finds in the table.
async fn check_space(bed: &Bed, e: Arc<Engine>) {
    e.shared.flush_now().await.unwrap();
    e.shared.flush_now().await.unwrap();
    let (used, chunks) = (e.usage().used, e.usage().chunks);
    let model = state(&e).await.unwrap();
    drop(e);
    let e = bed.open().await;
    assert_eq!((e.usage().used, e.usage().chunks, e.usage().checksum_errors), (used, chunks, 0));
    check(&e, &model).await;
}

/// How a run differs from the plain one.
#[derive(Clone, Copy, PartialEq)]
enum Style {
    Plain,
    Abandon,
    Overlap,
}

async fn one_run(
    seed: u64,
    device_ops: Option<u64>,
    table_ops: Option<u64>,
    style: Style,
) -> (u64, bool) {
    let mut bed = Bed::new(420).await;
    bed.options.dirty_bytes = 300_000;
    bed.options.cached_records = 32;
    let table = Powered::new(&bed, table_ops);
    let engine = Engine::open(bed.device.clone(), table, Pool::default(), bed.options.clone())
        .await
        .unwrap();
    let before = bed.device.counters();
    if style != Style::Plain {
        bed.device.set_latency(OPS, Duration::from_millis(7));
    }
    if let Some(n) = device_ops {
        bed.device.power_off_after(n);
    }
    let rng = StdRng::seed_from_u64(seed);
    let (abandon, overlap) = (style == Style::Abandon, style == Style::Overlap);
    let mut run =
        Run { rng, engine, history: vec![Model::new()], flushed: 0, number: 0, abandon, overlap };
    let mut lost = false;
    for _ in 0..70 {
        if let Err(e) = run.step().await {
            assert!(e.message.contains("power lost"), "{e}");
            lost = true;
            break;
        }
    }
    let after = bed.device.counters();
    let ops = after.reads + after.writes + after.flushes + after.discards
        - (before.reads + before.writes + before.flushes + before.discards);
    let Run { mut rng, engine, history, flushed, number, .. } = run;
    drop(engine);
    let crash_seed = rng.random_range(0..u64::MAX);
    bed.device.crash(crash_seed, if crash_seed % 2 == 0 { Tear::Sector } else { Tear::Block });
    bed.device.set_latency(OPS, Duration::ZERO);
    bed.table.crash(|unsynced| (crash_seed % (unsynced as u64 + 1)) as usize);

    let engine = bed.open().await;
    let found = state(&engine).await.unwrap();
    assert!(
        history[flushed..].contains(&found),
        "seed {seed}, power lost after {device_ops:?} device and {table_ops:?} table operations: not a state since the flush"
    );
    // The target works on.
    let mut run =
        Run { rng, engine, history: vec![found], flushed: 0, number, abandon: false, overlap };
    for _ in 0..10 {
        run.step().await.unwrap();
    }
    check(&run.engine, run.model()).await;
    check_space(&bed, run.engine).await;
    (ops, lost)
}

#[tokio::test(start_paused = true)]
async fn power_lost_at_any_device_operation() {
    for (seed, style) in [(0, Style::Plain), (2, Style::Overlap)] {
        let (ops, lost) = one_run(seed, None, None, style).await;
        assert!(ops > 40 && !lost, "{ops} operations");
        for n in 0..ops {
            one_run(seed, Some(n), None, style).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn power_lost_at_any_table_operation() {
    for seed in 100..108 {
        let style = if seed % 2 == 0 { Style::Plain } else { Style::Overlap };
        let mut n = 0;
        while one_run(seed, None, Some(n), style).await.1 {
            n += 1;
        }
        assert!(n >= 4, "only {n} table operations");
    }
}

#[tokio::test(start_paused = true)]
async fn callers_that_go_away_halfway_leave_no_trace() {
    for seed in 200..220 {
        let (ops, _) = one_run(seed, None, None, Style::Abandon).await;
        one_run(seed, Some(ops / 2), None, Style::Abandon).await;
        one_run(seed, None, Some(seed % 8), Style::Abandon).await;
    }
}
