//! Moves bytes between a cluster and memory in place of a GPU's by `gpu-rdma` only, some by
//! `bounce-rdma` only, and compares them. For `cluster-tests/vm/run gpu`.
//!
//! ```text
//! direct_rdma once MDS KEY      a save and a load, with a hole and odd ends; lanes, memory freed in mid-call
//! direct_rdma while MDS KEY F   loads and saves again and again, until there is a file F
//! ```

use std::{
    error::Error,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use strake_client::{Client, Config, Creds, File, LayoutSpec};
use strake_fabric::{Identity, Pool, Transport, Transports, Use, conn::Options as Connections};
use strake_fake_gpu::FakeGpu;
use strake_gds::{Bridge, Checksums, GpuMem, Options, Policy, Report, Tier, Transfer};
use strake_proto::layout::splitmix64;
use strake_runtime::{Env, keyfile};

const MIB: u64 = 1 << 20;
const DIRECT: Policy = Policy::Require(Tier::GpuRdma);
const BOUNCE: Policy = Policy::Require(Tier::BounceRdma);
/// With O_DIRECT: what is loaded comes from the servers.
const RDWR_CREAT: u32 = 2 | 0o100 | 0o40000;

type Done<T> = Result<T, Box<dyn Error>>;

struct Job {
    client: Client,
    mem: FakeGpu,
    bridge: Bridge,
}

fn ensure(is: bool, what: impl std::fmt::Display) -> Done<()> {
    if is { Ok(()) } else { Err(what.to_string().into()) }
}

impl Job {
    async fn new(mds: &str, key: &str) -> Done<Job> {
        let identity = Identity::client(keyfile::read_client(Path::new(key))?);
        let pool = Use::Rdma.pool(Pool::new(64 * MIB))?;
        let transports =
            Transports::new(Env::system(), identity, None, pool, Connections::default())
                .only(Use::Rdma);
        let client =
            Client::connect(Config::new(vec![mds.parse()?]), Env::system(), Arc::new(transports))
                .await?;
        let mem = FakeGpu::new();
        mem.play_sums();
        let options = Options { slot_bytes: 256 << 10, ..Options::default() };
        let bridge = Bridge::open(Arc::new(mem.clone()), Arc::new(client.clone()), options).await?;
        for (tier, standing) in bridge.standings().iter() {
            println!("{tier}: {standing:?}");
        }
        Ok(Job { client, mem, bridge })
    }

    async fn file(&self, name: &str) -> Done<File> {
        let layout =
            Some(LayoutSpec { stripe_size: 128 << 10, stripe_count: -1, ..Default::default() });
        let me = Creds::default();
        Ok(self
            .client
            .create(&me, self.client.root(), name.as_bytes(), 0o644, RDWR_CREAT, false, layout)
            .await?
            .0)
    }

    fn device(&self, seed: u64, len: u64) -> Done<(u64, Vec<u8>)> {
        let mut s = seed;
        let bytes: Vec<u8> = (0..len.div_ceil(8))
            .flat_map(|_| splitmix64(&mut s).to_le_bytes())
            .take(len as usize)
            .collect();
        let addr = self.mem.alloc(len)?;
        self.mem.poke(addr, &bytes)?;
        Ok((addr, bytes))
    }

    /// Saves and loads it elsewhere.
    async fn there_and_back(&self, file: &File, seed: u64, len: u64) -> Done<[Report; 2]> {
        let (from, bytes) = self.device(seed, len)?;
        let to = self.mem.alloc(len)?;
        let range = |gpu| [Transfer { file: Arc::new(file.clone()), offset: 0, gpu, len }];
        let saved = self.bridge.save(&range(from), DIRECT).await?;
        let loaded = self.bridge.load(&range(to), DIRECT).await?;
        ensure(self.mem.peek(to, len)? == bytes, "other bytes came back")?;
        for r in [&saved, &loaded] {
            ensure(
                r.is_all(Tier::GpuRdma)
                    && r.checksums == Checksums::Gpu
                    && r.by_transport[Transport::Tcp] == 0,
                r,
            )?;
        }
        self.mem.free(from)?;
        self.mem.free(to)?;
        Ok([saved, loaded])
    }

    /// The same over pinned host memory, into which the network writes: without another copy.
    async fn bounced(&self, file: &File) -> Done<()> {
        let (from, bytes) = self.device(6, 2 * MIB)?;
        let to = self.mem.alloc(2 * MIB)?;
        let range = |gpu| [Transfer { file: Arc::new(file.clone()), offset: 0, gpu, len: 2 * MIB }];
        let saved = self.bridge.save(&range(from), BOUNCE).await?;
        file.fsync().await?;
        let loaded = self.bridge.load(&range(to), BOUNCE).await?;
        ensure(self.mem.peek(to, 2 * MIB)? == bytes, "other bytes came back over host memory")?;
        for r in [&saved, &loaded] {
            println!("{r}");
            ensure(
                r.is_all(Tier::BounceRdma)
                    && r.staged == 0
                    && r.by_transport[Transport::Rdma] == 2 * MIB,
                r,
            )?;
        }
        self.mem.free(from)?;
        Ok(self.mem.free(to)?)
    }

    async fn once(&self) -> Done<()> {
        let file = self.file("direct").await?;
        for r in self.there_and_back(&file, 1, 3 * MIB + 77).await? {
            println!("{r}");
        }
        // A hole behind it, and an end that comes with its answer.
        file.truncate(4 * MIB).await?;
        file.write_all_at(4 * MIB, b"end").await?;
        let (to, _) = self.device(2, MIB + 3)?;
        let all =
            [Transfer { file: Arc::new(file.clone()), offset: 3 * MIB, gpu: to, len: MIB + 3 }];
        let r = self.bridge.load(&all, DIRECT).await?;
        let got = self.mem.peek(to, MIB + 3)?;
        ensure(
            got[77..1 << 20].iter().all(|b| *b == 0) && got[1 << 20..] == *b"end",
            "a hole is not zeros",
        )?;
        println!("{r}");
        let connections = self.client.servers().transports().connections;
        let lanes: Vec<String> = connections
            .iter()
            .map(|w| format!("{}: {} sent, {} received", w.endpoint, w.sent, w.received))
            .collect();
        println!("connections:\n{}", lanes.join("\n"));
        let mut by_server = std::collections::BTreeMap::<u32, usize>::new();
        connections.iter().for_each(|w| {
            *by_server.entry(w.node).or_default() += usize::from(w.endpoint.starts_with("rdma:"))
        });
        ensure(
            by_server.len() == 2 && by_server.values().all(|n| *n >= 4),
            format!("too few lanes: {by_server:?}"),
        )?;
        println!("queue pairs by server: {by_server:?}");
        self.freed_in_mid_call(&file).await?;
        self.bounced(&file).await?;
        file.close().await?;
        Ok(self.client.close().await?)
    }

    /// The call fails, nothing breaks, and nobody else's memory is written.
    async fn freed_in_mid_call(&self, file: &File) -> Done<()> {
        let (to, _) = self.device(3, 3 * MIB)?;
        let all = [Transfer { file: Arc::new(file.clone()), offset: 0, gpu: to, len: 3 * MIB }];
        let over = AtomicBool::new(false);
        let free = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let was_over = over.load(SeqCst);
            self.mem.free(to).map(|()| was_over)
        };
        let load = async {
            let r = self.bridge.load(&all, DIRECT).await;
            over.store(true, SeqCst);
            r
        };
        match tokio::join!(load, free) {
            (Err(failed), Ok(false)) => println!("freed in mid-call: {}", failed.error),
            (Ok(_), Ok(true)) => println!("freed in mid-call: the load was faster"),
            (r, f) => return Err(format!("freed in mid-call: {r:?} {f:?}").into()),
        }
        self.there_and_back(file, 4, MIB).await.map(drop)
    }

    async fn until(&self, flag: &Path) -> Done<()> {
        let file = self.file("again").await?;
        let mut n = 0;
        while !flag.exists() || n < 3 {
            self.there_and_back(&file, n, MIB + n).await?;
            n += 1;
            println!("{n} times there and back");
        }
        file.close().await?;
        Ok(self.client.close().await?)
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Done<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["once", mds, key] => Job::new(mds, key).await?.once().await,
        ["while", mds, key, flag] => Job::new(mds, key).await?.until(Path::new(flag)).await,
        _ => Err("direct_rdma once MDS KEY | while MDS KEY FLAG".into()),
    }
}
