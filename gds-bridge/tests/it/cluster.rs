//! Moves files of a cluster to a device and back with the real client. The cluster is the in-memory
//! one of the client's own tests.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use crate::common::*;
use crate::ram::{KIB, MIB, over, pattern};
use strake_client::{Arrived, Client, File};
use strake_fabric::{Buf, ByTransport, Foreign, Transport};
use strake_fake_gpu::FakeGpu;
use strake_gds::{Direction, FileIo, GpuMem, Policy, Tier, Transfer};
use strake_proto::Code;

const RW: u32 = 2;
const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);

async fn written(c: &Client, name: &[u8], bytes: &[u8], stripe: u32) -> File {
    let (f, _) =
        c.create(&user(), c.root(), name, 0o644, RW, true, striped(stripe, -1)).await.unwrap();
    for (i, part) in bytes.chunks(1 << 20).enumerate() {
        f.write_all_at((i as u64) << 20, part).await.unwrap();
    }
    f.fsync().await.unwrap();
    f
}

fn range(f: &File, offset: u64, gpu: u64, len: u64) -> Transfer {
    Transfer { file: Arc::new(f.clone()), offset, gpu, len }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn striped_files_arrive_and_what_is_saved_is_read_by_another_mount() {
    let cluster = Cluster::new(4, 2);
    let (a, b) = (cluster.client(1).await, cluster.client(2).await);
    let mem = FakeGpu::new();
    mem.limit_pins(1 << 30);
    let bridge = over(&mem, Arc::new(a.clone())).await;
    let data: Vec<Vec<u8>> = (0..3).map(|i| pattern(i, 2 * MIB + 4321 * i)).collect();
    let mut files = Vec::new();
    for (i, d) in data.iter().enumerate() {
        files.push(
            written(&a, format!("f{i}").as_bytes(), d, [64 << 10, 256 << 10, 1 << 20][i]).await,
        );
    }
    let tensor = mem.alloc(8 * MIB).unwrap();
    let all = [
        range(&files[0], 0, tensor, 2 * MIB),
        range(&files[1], 1000, tensor + 2 * MIB, MIB + 77),
        range(&files[2], 300 * KIB + 3, tensor + 4 * MIB + 1, 700_000),
    ];
    let before = mem.copied();
    let r = bridge.load(&all, BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && r.direction == Direction::Load, "{r}");
    assert_eq!(mem.copied().load_pinned - before.load_pinned, r.moved());
    for (t, d) in all.iter().zip(&data) {
        assert!(mem.peek(t.gpu, t.len).unwrap() == d[t.offset as usize..][..t.len as usize]);
    }

    // A checkpoint: two tensors into one new file, with a gap between them.
    let (out, _) =
        a.create(&user(), a.root(), b"out", 0o644, RW, true, striped(65536, -1)).await.unwrap();
    let saves =
        [range(&out, 0, tensor, 2 * MIB), range(&out, 3 * MIB + 5, tensor + 2 * MIB, MIB + 77)];
    let r = bridge.save(&saves, BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && r.staged == 0, "{r}");
    out.fsync().await.unwrap();
    assert_eq!(a.stats().unstable_bytes, 0);
    let (seen, attr) = b.open(&user(), out.ino(), 0).await.unwrap();
    assert_eq!(attr.size, 4 * MIB + 5 + 77);
    let mut want = vec![0; attr.size as usize];
    want[..2 << 20].copy_from_slice(&data[0][..2 << 20]);
    want[(3 << 20) + 5..].copy_from_slice(&data[1][1000..][..(1 << 20) + 77]);
    assert!(join(&seen.read(0, 5 << 20).await.unwrap()) == want);

    // Load what the other mount saved; the hole reads as zeros.
    let device = mem.alloc(attr.size).unwrap();
    let r = bridge.load(&[range(&out, 0, device, attr.size)], BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && mem.peek(device, attr.size).unwrap() == want);

    let e = bridge.load(&[range(&out, MIB, device, attr.size)], BOUNCE).await.unwrap_err();
    assert!(e.error.code == Code::Io && e.error.message.contains("the file ends after"), "{e}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_full_and_closed_files_fail_with_their_own_errors() {
    let cluster = Cluster::new(2, 2);
    let c = cluster.client(1).await;
    let mem = FakeGpu::new();
    mem.limit_pins(1 << 30);
    let bridge = over(&mem, Arc::new(c.clone())).await;
    let data = pattern(9, 2 * MIB);
    let f = written(&c, b"f", &data, 65536).await;
    let tensor = crate::ram::device(&mem, &vec![0; 2 << 20]);
    let all = [range(&f, 0, tensor, 2 * MIB)];

    // One replica is bad: the other one is used, and no wrong bytes arrive.
    cluster.oss.faults(|f| f.corrupt.insert(0));
    let uncached = c.open(&user(), f.ino(), 0o40000).await.unwrap().0;
    let r = bridge.load(&[range(&uncached, 0, tensor, 2 * MIB)], BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && mem.peek(tensor, 2 * MIB).unwrap() == data);
    assert!(c.stats().corrupt_replies > 0);
    // No replica is good: the load fails, and the bytes are not counted.
    cluster.oss.faults(|f| f.corrupt.insert(1));
    let failed =
        bridge.load(&[range(&uncached, 0, tensor, 2 * MIB)], Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::Corrupt && failed.report.moved() < 2 * MIB, "{failed}");
    cluster.oss.faults(|f| f.corrupt.clear());

    cluster.oss.faults(|f| f.full = true);
    let failed = bridge.save(&all, Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::NoSpc && failed.report.switches.is_empty(), "{failed}");
    cluster.oss.faults(|f| f.full = false);
    bridge.save(&all, BOUNCE).await.unwrap();

    let read_only = c.open(&user(), f.ino(), 0).await.unwrap().0;
    let failed = bridge.save(&[range(&read_only, 0, tensor, 100)], BOUNCE).await.unwrap_err();
    assert_eq!((failed.error.code, failed.report.moved()), (Code::BadF, 0));
    read_only.clone().close().await.unwrap();
    let failed = bridge.load(&[range(&read_only, 0, tensor, 100)], BOUNCE).await.unwrap_err();
    assert_eq!(failed.error.code, Code::BadF);
}

/// A file of the client. Before its read or write number `at` the network changes its transports.
struct Turning {
    file: File,
    calls: AtomicU64,
    at: u64,
    turn: Box<dyn Fn() + Send + Sync>,
}

impl Turning {
    fn count(&self) {
        if self.calls.fetch_add(1, SeqCst) == self.at {
            (self.turn)();
        }
    }
}

#[async_trait::async_trait]
impl FileIo for Turning {
    fn id(&self) -> u64 {
        FileIo::id(&self.file)
    }
    async fn read(&self, offset: u64, len: usize) -> strake_proto::Result<Vec<Buf>> {
        self.count();
        FileIo::read(&self.file, offset, len).await
    }
    async fn write(&self, offset: u64, data: Buf) -> strake_proto::Result<ByTransport> {
        self.count();
        FileIo::write(&self.file, offset, data).await
    }

    async fn read_direct(&self, offset: u64, into: &Foreign) -> strake_proto::Result<Vec<Arrived>> {
        FileIo::read_direct(&self.file, offset, into).await
    }
    async fn write_direct(
        &self,
        offset: u64,
        from: &Foreign,
        sums: &[u32],
    ) -> strake_proto::Result<()> {
        FileIo::write_direct(&self.file, offset, from, sums).await
    }
}

/// Each server's simulated transport marks the payloads it moves, as the real ones do. Everything
/// from there to the report is the real code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_part_tells_the_transport_it_took_and_the_file_the_same() {
    const O_DIRECT: u32 = 0o40000;
    let cluster = Cluster::new(4, 1);
    let net = cluster.net.clone();
    let all_by =
        move |transport: Transport| (0..4).for_each(|t| net.set_transport(node(t), transport));
    all_by(Transport::Rdma);
    let c = cluster.client(1).await;
    let mem = FakeGpu::new();
    mem.limit_pins(1 << 30);
    let bridge = over(&mem, Arc::new(c.clone())).await;
    let data = pattern(7, 4 * MIB);
    let f = written(&c, b"f", &data, 256 << 10).await;
    let tensor = crate::ram::device(&mem, &vec![0; data.len()]);
    // Do not read from the cache: it would report the transport by which the bytes arrived earlier.
    let (uncached, _) = c.open(&user(), f.ino(), RW | O_DIRECT).await.unwrap();
    let by_transport = || c.servers().file_transports(f.ino()).file;
    let moved = |of: fn(&strake_proto::pb::FileTransport) -> u64| {
        by_transport().iter().map(of).sum::<u64>()
    };
    assert_eq!(
        (moved(|r| r.sent), by_transport()[3].sent),
        (4 * MIB, 4 * MIB),
        "what was written, by RDMA"
    );

    let strict = Policy::Require(Tier::BounceRdma);
    let r = bridge.load(&[range(&uncached, 0, tensor, 4 * MIB)], strict).await.unwrap();
    assert!(r.is_all(Tier::BounceRdma) && r.staged == 0, "{r}");
    assert!(mem.peek(tensor, 4 * MIB).unwrap() == data);
    let r = bridge.save(&[range(&uncached, 0, tensor, 4 * MIB)], strict).await.unwrap();
    assert!(r.is_all(Tier::BounceRdma), "{r}");
    let tiers = || bridge.tier_counters().files().remove(&f.ino()).unwrap_or_default();
    assert_eq!(
        (tiers().loaded[Tier::BounceRdma], tiers().saved[Tier::BounceRdma]),
        (4 * MIB, 4 * MIB)
    );

    for (policy, direction) in [strict, Policy::AtLeast(Tier::BounceTcp)]
        .into_iter()
        .flat_map(|p| [Direction::Load, Direction::Save].map(|d| (p, d)))
    {
        all_by(Transport::Rdma);
        let back = all_by.clone();
        let turn = Box::new(move || back(Transport::Tcp));
        let turning =
            Arc::new(Turning { file: uncached.clone(), calls: AtomicU64::new(0), at: 8, turn });
        let all = [Transfer { file: turning, offset: 0, gpu: tensor, len: 4 * MIB }];
        let (fetched, sent) = (moved(|r| r.fetched), moved(|r| r.sent));
        let (transports, before) = (by_transport(), tiers());
        let outcome = match direction {
            Direction::Load => bridge.load(&all, policy).await,
            Direction::Save => bridge.save(&all, policy).await,
        };
        let r = match outcome {
            Ok(r) => r,
            Err(failed) => {
                assert!(policy == strict && failed.error.code == Code::Io, "{failed}");
                *failed.report
            }
        };
        assert_eq!(r.moved() == r.asked, policy != strict, "a strict call ends: {r}");
        assert_eq!((r.moved(), r.by_transport.sum()), (r.ranges.iter().sum(), r.moved()));
        assert_eq!(
            (r.by_tier[Tier::BounceRdma], r.by_tier[Tier::Pageable]),
            (r.by_transport[Transport::Rdma], 0),
            "{r}"
        );
        assert!(
            r.by_transport[Transport::Rdma] > 0 && r.by_transport[Transport::Local] == 0,
            "{r}"
        );
        let now = tiers();
        let (loaded, saved) = [(now.loaded, before.loaded), (now.saved, before.saved)]
            .map(|(now, before)| strake_gds::ByTier::new(|t| now[t] - before[t]))
            .into();
        let (of_it, other) =
            if direction == Direction::Load { (loaded, saved) } else { (saved, loaded) };
        assert_eq!(
            (of_it, other.sum()),
            (r.by_tier, 0),
            "`lfs path` shows the same by tier, of failed calls too"
        );
        if policy != strict {
            assert!(r.by_tier[Tier::BounceTcp] > 0, "{r}");
            let (fetched, sent) = (moved(|r| r.fetched) - fetched, moved(|r| r.sent) - sent);
            let want = if direction == Direction::Load { (r.moved(), 0) } else { (0, r.moved()) };
            assert_eq!((fetched, sent), want, "`lfs path` counts the same bytes");
            for (was, now) in transports.iter().zip(by_transport()) {
                let transport =
                    Transport::ALL.into_iter().find(|r| r.name() == was.transport).unwrap();
                let went = (now.fetched - was.fetched) + (now.sent - was.sent);
                assert_eq!(
                    (&now.transport, went),
                    (&was.transport, r.by_transport[transport]),
                    "the same by each transport"
                );
            }
        } else if direction == Direction::Load {
            assert_eq!(r.by_tier[Tier::BounceTcp], 0, "{r}");
        }
    }
}
