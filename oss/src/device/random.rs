//! Random operations on a device, each block verified against a model, from one seed.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_fabric::{Buf, Pool};
use tokio::task::JoinSet;

use super::api::{BLOCK, Device};

const PAGE: usize = BLOCK as usize;
/// Each worker has its own blocks, and does one operation after the other.
const WORKERS: u64 = 32;
/// Most blocks of one operation: 1 MiB.
const MOST: u64 = 256;
/// Most bytes of the device that are used.
const SPAN: u64 = 1 << 30;

/// Counts of what was done.
#[derive(Default)]
pub struct Done {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    /// Writes that were abandoned before their answer.
    abandoned: AtomicU64,
    read_blocks: AtomicU64,
    written_blocks: AtomicU64,
    /// Blocks compared with what was written.
    verified: AtomicU64,
}

impl Done {
    /// Blocks compared with what was written.
    pub fn verified(&self) -> u64 {
        self.verified.load(Relaxed)
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = |c: &AtomicU64| c.load(Relaxed);
        let mib = |c: &AtomicU64| (n(c) * BLOCK) >> 20;
        write!(
            f,
            "{} reads of {} MiB, {} writes of {} MiB ({} abandoned), {} flushes, {} discards; {} blocks verified",
            n(&self.reads),
            mib(&self.read_blocks),
            n(&self.writes),
            mib(&self.written_blocks),
            n(&self.abandoned),
            n(&self.flushes),
            n(&self.discards),
            n(&self.verified)
        )
    }
}

/// What a block may hold.
#[derive(Clone, Copy)]
enum Is {
    /// Never written, or discarded.
    Anything,
    Version(u32),
    /// The second was written over the first, and its answer was abandoned.
    Either(Option<u32>, u32),
}

/// Runs for so long and verifies everything at the end. Panics, with the seed, if the device
/// returns wrong data or fails.
pub async fn random_io(d: Arc<dyn Device>, seed: u64, time: Duration) -> Done {
    let done = Arc::new(Done::default());
    let blocks = d.capacity().min(SPAN) / BLOCK / WORKERS;
    assert!(blocks > 0, "{} is too small", d.name());
    let until = Instant::now() + time;
    let mut workers = JoinSet::new();
    for n in 0..WORKERS {
        let rng = StdRng::seed_from_u64(seed.wrapping_mul(WORKERS + 1).wrapping_add(n));
        let is = vec![Is::Anything; blocks as usize];
        let (device, done, pool) = (d.clone(), done.clone(), Pool::default());
        let mut w = Worker { device, pool, done, rng, seed, first: n * blocks, is, version: 0 };
        workers.spawn(async move {
            while Instant::now() < until {
                w.step().await;
                tokio::task::yield_now().await;
            }
            w.flush().await;
            for at in (0..blocks).step_by(MOST as usize) {
                w.read(at, MOST.min(blocks - at)).await;
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        if let Err(e) = ended {
            panic!("seed {seed}: {e}");
        }
    }
    Arc::into_inner(done).unwrap_or_default()
}

struct Worker {
    device: Arc<dyn Device>,
    pool: Pool,
    done: Arc<Done>,
    rng: StdRng,
    seed: u64,
    /// Its first block.
    first: u64,
    is: Vec<Is>,
    version: u32,
}

/// The words of a block. Those of any two blocks or versions are equal only by chance.
fn words(seed: u64, block: u64, version: u32) -> impl Iterator<Item = u64> {
    let mut x = seed
        ^ block.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ u64::from(version).wrapping_mul(0xd6e8_feb8_6659_fd93);
    std::iter::repeat_with(move || {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let y = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        y ^ (y >> 32)
    })
}

fn holds(bytes: &[u8], seed: u64, block: u64, version: u32) -> bool {
    bytes.chunks_exact(8).zip(words(seed, block, version)).all(|(b, w)| b == w.to_le_bytes())
}

impl Worker {
    async fn step(&mut self) {
        let blocks = self.is.len() as u64;
        let (mut at, mut n) = (self.rng.random_range(0..blocks), 1);
        if self.rng.random_bool(0.5) {
            n = self.rng.random_range(1..=MOST.min(blocks));
            at = at.min(blocks - n);
        }
        match self.rng.random_range(0..100) {
            0..45 => self.read(at, n).await,
            45..90 => self.write(at, n).await,
            90..96 => self.abandon(at, n).await,
            96..99 => self.flush().await,
            _ => self.discard(at, n).await,
        }
    }

    /// The next version of `n` blocks, in one buffer or in several, split at blocks or anywhere.
    fn next(&mut self, at: u64, n: u64) -> Vec<Buf> {
        self.version += 1;
        let mut buf = self.pool.get_now(n as usize * PAGE);
        for (i, block) in buf.chunks_exact_mut(PAGE).enumerate() {
            let words = words(self.seed, self.first + at + i as u64, self.version);
            block
                .chunks_exact_mut(8)
                .zip(words)
                .for_each(|(b, w)| b.copy_from_slice(&w.to_le_bytes()));
        }
        let (mut rest, mut bufs) = (buf.freeze(), Vec::new());
        let unit = if self.rng.random_bool(0.2) { 1 } else { PAGE };
        for _ in 0..self.rng.random_range(0..4) {
            let cut = self.rng.random_range(0..rest.len().div_ceil(unit)) * unit;
            if cut > 0 {
                bufs.push(rest.split_to(cut));
            }
        }
        bufs.push(rest);
        bufs
    }

    async fn write(&mut self, at: u64, n: u64) {
        self.settle(at, n).await;
        let bufs = self.next(at, n);
        let wrote = self.device.write((self.first + at) * BLOCK, bufs).await;
        wrote.unwrap_or_else(|e| panic!("seed {}: {e}", self.seed));
        self.is[at as usize..(at + n) as usize].fill(Is::Version(self.version));
        self.done.writes.fetch_add(1, Relaxed);
        self.done.written_blocks.fetch_add(n, Relaxed);
    }

    async fn abandon(&mut self, at: u64, n: u64) {
        self.settle(at, n).await;
        let bufs = self.next(at, n);
        let write = self.device.write((self.first + at) * BLOCK, bufs);
        let _ = tokio::time::timeout(Duration::ZERO, write).await;
        for is in &mut self.is[at as usize..(at + n) as usize] {
            *is = match *is {
                Is::Version(old) => Is::Either(Some(old), self.version),
                _ => Is::Either(None, self.version),
            };
        }
        self.done.abandoned.fetch_add(1, Relaxed);
    }

    /// Flushes. Afterwards abandoned writes have ended, done or not.
    async fn flush(&mut self) {
        self.device.flush().await.unwrap_or_else(|e| panic!("seed {}: {e}", self.seed));
        self.done.flushes.fetch_add(1, Relaxed);
        for at in 0..self.is.len() as u64 {
            let Is::Either(old, new) = self.is[at as usize] else { continue };
            let (buf, block) = (self.get(at, 1).await, self.first + at);
            self.is[at as usize] = match old {
                _ if holds(&buf, self.seed, block, new) => Is::Version(new),
                Some(old) if holds(&buf, self.seed, block, old) => Is::Version(old),
                None => Is::Anything,
                Some(_) => {
                    panic!("seed {}: block {block} of {} is neither", self.seed, self.device.name())
                }
            };
        }
    }

    /// Waits for abandoned writes of these blocks, which might otherwise overwrite what follows.
    async fn settle(&mut self, at: u64, n: u64) {
        if self.is[at as usize..(at + n) as usize].iter().any(|is| matches!(is, Is::Either(..))) {
            self.flush().await;
        }
    }

    async fn discard(&mut self, at: u64, n: u64) {
        self.settle(at, n).await;
        let done = self.device.discard((self.first + at) * BLOCK, n * BLOCK).await;
        done.unwrap_or_else(|e| panic!("seed {}: {e}", self.seed));
        self.is[at as usize..(at + n) as usize].fill(Is::Anything);
        self.done.discards.fetch_add(1, Relaxed);
    }

    async fn get(&self, at: u64, n: u64) -> strake_fabric::BufMut {
        let got = self
            .device
            .read((self.first + at) * BLOCK, self.pool.get_now((n * BLOCK) as usize))
            .await;
        got.unwrap_or_else(|e| panic!("seed {}: {e}", self.seed))
    }

    async fn read(&mut self, at: u64, n: u64) {
        let buf = self.get(at, n).await;
        self.done.reads.fetch_add(1, Relaxed);
        self.done.read_blocks.fetch_add(n, Relaxed);
        for (i, bytes) in buf.chunks_exact(PAGE).enumerate() {
            let block = self.first + at + i as u64;
            // The contents of a block that is being written are not known.
            let Is::Version(v) = self.is[at as usize + i] else { continue };
            let right = holds(bytes, self.seed, block, v);
            assert!(
                right,
                "seed {}: block {block} of {} is not as written",
                self.seed,
                self.device.name()
            );
            self.done.verified.fetch_add(1, Relaxed);
        }
    }
}
