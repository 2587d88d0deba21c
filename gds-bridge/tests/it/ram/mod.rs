//! Files in memory to test the bridge alone: they return what a client would, at the times a test
//! chooses.

#![allow(dead_code)]

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_client::Arrived;
use strake_fabric::{Buf, BufMut, ByTransport, Foreign, Pool, Transport};
use strake_fake_gpu::FakeGpu;
use strake_gds::{Bridge, FileIo, GpuMem, Network, Options, Policy, Transfer, not_direct};
use strake_proto::{Result, layout::splitmix64};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

pub fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut s = seed;
    (0..len.div_ceil(8)).flat_map(|_| splitmix64(&mut s).to_le_bytes()).take(len as usize).collect()
}

type Hook = Box<dyn Fn(u64) -> Result<()> + Send + Sync>;

pub struct Ram {
    id: u64,
    pub bytes: Mutex<Vec<u8>>,
    pool: Pool,
    calls: AtomicU64,
    /// Called before each read and write with the number of the call.
    hook: Hook,
    /// The transport that the bytes at an offset use.
    transports: Box<dyn Fn(u64) -> Transport + Send + Sync>,
}

impl Ram {
    pub fn new(id: u64, bytes: Vec<u8>, pool: &Pool) -> Arc<Ram> {
        Ram::with(id, bytes, pool, |_| Ok(()))
    }

    pub fn with(
        id: u64,
        bytes: Vec<u8>,
        pool: &Pool,
        hook: impl Fn(u64) -> Result<()> + Send + Sync + 'static,
    ) -> Arc<Ram> {
        let (bytes, pool) = (Mutex::new(bytes), pool.clone());
        Arc::new(Ram {
            id,
            bytes,
            pool,
            calls: AtomicU64::new(0),
            hook: Box::new(hook),
            transports: Box::new(|_| Transport::Tcp),
        })
    }

    /// As [`Ram::new`]; `transports` gives the reported transport of the bytes at an offset.
    pub fn by(
        id: u64,
        bytes: Vec<u8>,
        pool: &Pool,
        transports: impl Fn(u64) -> Transport + Send + Sync + 'static,
    ) -> Arc<Ram> {
        let (bytes, pool) = (Mutex::new(bytes), pool.clone());
        Arc::new(Ram {
            id,
            bytes,
            pool,
            calls: AtomicU64::new(0),
            hook: Box::new(|_| Ok(())),
            transports: Box::new(transports),
        })
    }
}

#[async_trait]
impl FileIo for Ram {
    fn id(&self) -> u64 {
        self.id
    }

    /// Returns segments as a client does: from the pool, the last one from other memory, unless the
    /// bytes come by RDMA.
    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        (self.hook)(self.calls.fetch_add(1, SeqCst))?;
        tokio::task::yield_now().await;
        let all = self.bytes.lock();
        let (start, end) =
            ((offset as usize).min(all.len()), (offset as usize + len).min(all.len()));
        let transport = (self.transports)(offset);
        let cut = if transport == Transport::Rdma { end - start } else { (end - start) / 3 * 2 };
        let (first, last) = all[start..end].split_at(cut);
        let (mut b, mut rest) = (self.pool.get_now(first.len()), BufMut::unpooled(last.len()));
        b.copy_from_slice(first);
        rest.copy_from_slice(last);
        b.came_by(transport);
        rest.came_by(transport);
        Ok(vec![b.freeze(), rest.freeze()])
    }

    async fn write(&self, offset: u64, data: Buf) -> Result<ByTransport> {
        (self.hook)(self.calls.fetch_add(1, SeqCst))?;
        tokio::task::yield_now().await;
        let (mut all, at) = (self.bytes.lock(), offset as usize);
        let end = at + data.len();
        if all.len() < end {
            all.resize(end, 0);
        }
        all[at..end].copy_from_slice(&data);
        Ok(ByTransport::of((self.transports)(offset), data.len() as u64))
    }

    async fn read_direct(&self, _: u64, _: &Foreign) -> Result<Vec<Arrived>> {
        Err(not_direct())
    }
    async fn write_direct(&self, _: u64, _: &Foreign, _: &[u32]) -> Result<()> {
        Err(not_direct())
    }
}

/// A device that can pin `pins` bytes without really locking them, and a bridge to it with small
/// parts.
pub async fn bridge(pins: u64) -> (FakeGpu, Pool, Bridge) {
    let (mem, pool) = (FakeGpu::new(), Pool::new(64 << 20));
    mem.limit_pins(pins);
    let bridge = over(&mem, Arc::new(pool.clone())).await;
    (mem, pool, bridge)
}

/// A bridge with three workers that have two slots of 256 KiB each.
pub async fn over(mem: &FakeGpu, network: Arc<dyn Network>) -> Bridge {
    demanding(mem, network, Policy::Prefer).await
}

/// As [`over`], with a policy of the bridge.
pub async fn demanding(mem: &FakeGpu, network: Arc<dyn Network>, policy: Policy) -> Bridge {
    let pinned_limit = Some(1 << 30);
    let options = Options {
        workers: 3,
        slots: 2,
        slot_bytes: 256 << 10,
        pinned_limit,
        policy,
        ..Options::default()
    };
    Bridge::open(Arc::new(mem.clone()), network, options).await.unwrap()
}

/// A device allocation with these contents.
pub fn device(mem: &FakeGpu, bytes: &[u8]) -> u64 {
    let addr = mem.alloc(bytes.len() as u64).unwrap();
    mem.poke(addr, bytes).unwrap();
    addr
}

pub fn whole(file: &Arc<Ram>, gpu: u64) -> Transfer {
    let len = file.bytes.lock().len() as u64;
    Transfer { file: file.clone(), offset: 0, gpu, len }
}
