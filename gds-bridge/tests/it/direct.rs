//! The direct path, on which storage servers read and write the device's memory. The tests use the
//! real client and bridge, host memory as the device, and the in-memory network of the client's own
//! tests, which lends memory as RDMA does.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use crate::common::*;
use crate::ram::{KIB, MIB, pattern};
use strake_client::{Arrived, Client, File};
use strake_fabric::{Buf, ByTransport, Foreign, Pool, Transport};
use strake_fake_gpu::FakeGpu;
use strake_gds::{
    Bridge, Checksum, Checksums, Fault, FileIo, GpuMem, Network, Options, Policy, Strict, Tier,
    Transfer, Unavailable, Watched, plan::Standing,
};
use strake_proto::{Code, Error, Result};

const RW: u32 = 2;
const O_DSYNC: u32 = 0o10000;
const DIRECT: Policy = Policy::Require(Tier::GpuRdma);
/// Size of a part in bytes.
const PART: u64 = 256 << 10;

/// The client, but with named scratch files: this cluster has no files without a name.
struct Near {
    client: Client,
    files: AtomicU64,
    /// Extra time that each direct transfer of the self-test's file takes.
    slower: Duration,
}

#[async_trait::async_trait]
impl Network for Near {
    fn pool(&self) -> &Pool {
        Network::pool(&self.client)
    }
    fn no_rdma(&self) -> Option<String> {
        Network::no_rdma(&self.client)
    }
    async fn scratch(&self) -> Result<Arc<dyn FileIo>> {
        let name = format!("scratch{}", self.files.fetch_add(1, SeqCst));
        let (me, flags) = (user(), RW | 0o40000);
        let c = &self.client;
        let made = c.create(&me, c.root(), name.as_bytes(), 0o600, flags, true, striped(65536, -1));
        let slower = self.slower;
        let what = Box::new(move |_| std::thread::sleep(slower));
        Ok(Arc::new(Meanwhile { file: made.await?.0, calls: AtomicU64::new(0), what }))
    }
}

struct Stage {
    cluster: Cluster,
    client: Client,
    mem: FakeGpu,
    bridge: Bridge,
}

/// Two replicas on four servers, all reached by RDMA.
async fn stage(sums: bool, options: Options) -> Stage {
    staged(sums, options, Duration::ZERO).await
}

/// As [`stage`], but the self-test sees the direct path slower by `slower`.
async fn staged(sums: bool, options: Options, slower: Duration) -> Stage {
    let cluster = Cluster::new(4, 2);
    (0..4).for_each(|t| cluster.net.set_transport(node(t), Transport::Rdma));
    let client = cluster.client(1).await;
    let mem = FakeGpu::new();
    mem.limit_pins(1 << 30);
    if sums {
        mem.play_sums();
    }
    let network = Arc::new(Near { client: client.clone(), files: AtomicU64::new(0), slower });
    let bridge = Bridge::open(Arc::new(mem.clone()), network, options).await.unwrap();
    Stage { cluster, client, mem, bridge }
}

fn options() -> Options {
    Options {
        workers: 3,
        slots: 2,
        slot_bytes: PART as usize,
        pinned_limit: Some(1 << 30),
        ..Options::default()
    }
}

async fn written(c: &Client, name: &[u8], bytes: &[u8]) -> File {
    let (f, _) =
        c.create(&user(), c.root(), name, 0o644, RW, true, striped(65536, -1)).await.unwrap();
    for (i, part) in bytes.chunks(1 << 20).enumerate() {
        f.write_all_at((i as u64) << 20, part).await.unwrap();
    }
    f
}

fn range(f: &File, offset: u64, gpu: u64, len: u64) -> Transfer {
    Transfer { file: Arc::new(f.clone()), offset, gpu, len }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_go_straight_to_the_device_and_back_and_are_stable_and_verified_there() {
    let s = stage(true, options()).await;
    assert!(
        matches!(s.bridge.standings()[Tier::GpuRdma], Standing::Available(_)),
        "{:?}",
        s.bridge.standings()
    );
    // Whole parts, a hole, and an end that arrives inside the answer. None of it was flushed.
    let mut data = pattern(1, MIB + 77);
    let f = written(&s.client, b"f", &data).await;
    f.truncate(3 * MIB).await.unwrap();
    f.write_all_at(3 * MIB, &data[..100]).await.unwrap();
    data.resize(3 << 20, 0);
    data.extend_from_within(..100);
    let len = data.len() as u64;
    let tensor = crate::ram::device(&s.mem, &vec![0xaa; data.len() + 8]);
    let (lent, before) = (s.cluster.net.lent().0, s.mem.copied());
    let r = s.bridge.load(&[range(&f, 0, tensor + 3, len)], DIRECT).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && r.switches.is_empty(), "{r}");
    assert!(s.mem.peek(tensor + 3, len).unwrap() == data);
    assert_eq!(s.mem.peek(tensor, 3).unwrap(), [0xaa; 3]);
    assert_eq!(s.mem.peek(tensor + 3 + len, 5).unwrap(), [0xaa; 5]);
    assert_eq!(
        (r.checksums, r.checksum, &r.not_on_gpu),
        (Checksums::Gpu, Some(Checksum::OnGpu), &None)
    );
    // Only bytes that no server wrote into the device were copied: zeros, and those inside an
    // answer.
    let copied = s.mem.copied().load_pinned - before.load_pinned + s.mem.copied().load_pageable
        - before.load_pageable;
    assert_eq!(
        (r.staged, r.by_transport[Transport::Rdma] + r.by_transport[Transport::Local]),
        (copied, len),
        "{r}"
    );
    assert!(r.by_transport[Transport::Rdma] >= MIB + 100 && copied < 2 * MIB + 64 * KIB, "{r}");
    assert!(s.cluster.net.lent().0 >= lent + 17, "a request for each stripe");
    assert!(
        s.cluster.net.lent().1 >= 4 * 4,
        "four lanes to each server: {:?}",
        s.cluster.net.lent()
    );

    let (out, _) = s
        .client
        .create(&user(), s.client.root(), b"out", 0o644, RW, true, striped(65536, -1))
        .await
        .unwrap();
    let before = (s.mem.copied(), s.client.stats().unstable_bytes);
    let r = s.bridge.save(&[range(&out, 8 * KIB, tensor + 3, len)], DIRECT).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && r.staged == 0 && r.checksums == Checksums::Gpu, "{r}");
    assert!(
        s.mem.copied() == before.0 && s.client.stats().unstable_bytes <= before.1,
        "{before:?}"
    );
    // The save survives when all servers lose their unflushed state.
    s.cluster.restart(&[0, 1, 2, 3]);
    out.fsync().await.unwrap();
    let other = s.cluster.client(2).await;
    let (seen, attr) = other.open(&user(), out.ino(), 0).await.unwrap();
    assert_eq!(attr.size, 8 * KIB + len);
    assert!(join(&seen.read(8 * KIB, data.len()).await.unwrap()) == data);
    // A range beyond the end of the file gives the same error as on the other paths.
    let e = s.bridge.load(&[range(&f, MIB, tensor, len)], DIRECT).await.unwrap_err();
    assert!(e.error.code == Code::Io && e.error.message.contains("the file ends after"), "{e}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_before_and_is_not_stable_is_not_written_over_a_save() {
    let s = stage(true, options()).await;
    let old = pattern(2, MIB);
    let f = written(&s.client, b"f", &old).await;
    assert!(s.client.stats().unstable_bytes > 0);
    let new = pattern(3, MIB);
    let tensor = crate::ram::device(&s.mem, &new);
    s.bridge.save(&[range(&f, 0, tensor, MIB)], DIRECT).await.unwrap();
    // The servers lose what they had not flushed; a sync resends it.
    s.cluster.restart(&[0, 1, 2, 3]);
    f.fsync().await.unwrap();
    let other = s.cluster.client(2).await;
    let (seen, _) = other.open(&user(), f.ino(), 0).await.unwrap();
    assert!(join(&seen.read(0, 1 << 20).await.unwrap()) == new);
    // This client does not read old bytes from its cache, either.
    assert!(join(&f.read(0, 1 << 20).await.unwrap()) == new);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_is_found_by_the_device_fetched_once_more_and_then_an_error() {
    let s = stage(true, options()).await;
    let data = pattern(4, MIB);
    let f = written(&s.client, b"f", &data).await;
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, MIB)];
    s.cluster.net.damage(1);
    let r = s.bridge.load(&all, DIRECT).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && s.mem.peek(tensor, MIB).unwrap() == data, "{r}");
    s.cluster.net.damage(u64::MAX);
    let failed = s.bridge.load(&all, DIRECT).await.unwrap_err();
    assert!(failed.error.code == Code::Corrupt && failed.report.moved() == 0, "{failed}");
    s.cluster.net.damage(0);
    // If a server finds that the bytes changed, the save computes the checksums again and resends
    // once.
    s.cluster.oss.faults(|f| f.resend = 1);
    s.bridge.save(&all, DIRECT).await.unwrap();
    s.cluster.oss.faults(|f| f.resend = u32::MAX);
    let failed = s.bridge.save(&all, DIRECT).await.unwrap_err();
    assert!(failed.error.code == Code::Corrupt && failed.report.moved() == 0, "{failed}");
    s.cluster.oss.faults(|f| f.resend = 0);
    s.bridge.save(&all, DIRECT).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_go_away_and_refuse_are_waited_for_or_replaced_as_on_other_transports() {
    let s = stage(true, options()).await;
    let data = pattern(5, 2 * MIB);
    let f = written(&s.client, b"f", &data).await;
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, 2 * MIB)];
    // One server is down: the other replicas answer.
    s.cluster.net.set_down(node(1), true);
    let r = s.bridge.load(&all, DIRECT).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && s.mem.peek(tensor, 2 * MIB).unwrap() == data, "{r}");
    // A write waits until the server is back or out of the chains. A lost answer does not cause a
    // second write.
    let save = async {
        let r = s.bridge.save(&all, DIRECT).await;
        r.map(|r| assert!(r.is_all(Tier::GpuRdma), "{r}"))
    };
    let back = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        s.cluster.net.lose_replies(node(2), 2);
        s.cluster.net.set_down(node(1), false);
    };
    tokio::join!(save, back).0.unwrap();
    assert!(s.cluster.oss.counts(|c| c.known) > 0, "an answer was lost");
    for save in [false, true] {
        s.cluster.oss.faults(|f| (f.bad_cap, f.no_session) = (2, 1));
        let r = if save {
            s.bridge.save(&all, DIRECT).await
        } else {
            s.bridge.load(&all, DIRECT).await
        };
        assert!(r.unwrap().is_all(Tier::GpuRdma));
    }
    assert!(s.mem.peek(tensor, 2 * MIB).unwrap() == data);
    s.cluster.oss.faults(|f| f.full = true);
    let failed = s.bridge.save(&all, Policy::Prefer).await.unwrap_err();
    assert_eq!(failed.error.code, Code::NoSpc, "{failed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_without_sums_loads_with_consent_and_does_not_save() {
    let s = stage(false, options()).await;
    let data = pattern(6, MIB);
    let f = written(&s.client, b"f", &data).await;
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, MIB)];
    let failed = s.bridge.load(&all, DIRECT).await.unwrap_err();
    assert!(
        failed.error.code == Code::OpNotSupp
            && failed.error.message.contains("accept_oss_checksum"),
        "{failed}"
    );
    let s = stage(false, Options { accept_oss_checksum: true, ..options() }).await;
    let f = written(&s.client, b"f", &data).await;
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, MIB)];
    let r = s.bridge.load(&all, DIRECT).await.unwrap();
    assert!(
        r.is_all(Tier::GpuRdma)
            && r.checksum == Some(Checksum::AtOssOnly)
            && r.not_on_gpu.is_some(),
        "{r}"
    );
    assert!(s.mem.peek(tensor, MIB).unwrap() == data);
    let failed = s.bridge.save(&all, DIRECT).await.unwrap_err();
    assert!(failed.error.message.contains("accept no bytes without checksums"), "{failed}");
    assert!(matches!(failed.report.unavailable[0].1, Unavailable::NoSums { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nothing_can_be_lent_the_tier_says_so_and_nothing_moves_by_it() {
    let s = stage(true, options()).await;
    let data = pattern(7, MIB);
    let f = written(&s.client, b"f", &data).await;
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, MIB)];
    // The device refuses in the middle of a call. With `prefer` another tier continues; a call that
    // requires this tier fails.
    s.mem.refuse_exports(Some("as asked".into()));
    let failed = s.bridge.load(&all, DIRECT).await.unwrap_err();
    assert!(failed.error.code == Code::Io && failed.error.message.contains("as asked"), "{failed}");
    assert_eq!(failed.report.moved(), 0);
    // The tier's self-test now fails, too, and says why.
    let r = s.bridge.load(&all, Policy::AtLeast(Tier::BounceTcp)).await.unwrap();
    assert!(
        r.by_tier[Tier::GpuRdma] == 0
            && r.unavailable.iter().any(|(_, why)| why.to_string().contains("as asked")),
        "{r}"
    );
    s.mem.refuse_exports(None);
    s.bridge.self_test().await;
    assert!(s.bridge.load(&all, DIRECT).await.unwrap().is_all(Tier::GpuRdma));
    // A part of a save that begins within a block goes through host memory, and is counted for that
    // tier.
    let r = s
        .bridge
        .save(&[range(&f, 100, tensor + 100, MIB - 100)], Policy::AtLeast(Tier::BounceTcp))
        .await
        .unwrap();
    assert_eq!(
        (r.by_tier[Tier::BounceTcp] + r.by_tier[Tier::BounceRdma]) % PART,
        PART - 100,
        "{r}"
    );
    let failed = s.bridge.save(&[range(&f, 100, tensor + 100, 1000)], DIRECT).await.unwrap_err();
    assert!(
        failed.error.code == Code::Inval && failed.error.message.contains("begins at 100"),
        "{failed}"
    );
    // With TCP the tier is not available, and the error says why.
    (0..4).for_each(|t| s.cluster.net.set_transport(node(t), Transport::Tcp));
    let (lent, _) = s.cluster.net.lent();
    let failed = s.bridge.load(&all, DIRECT).await.unwrap_err();
    assert!(
        failed.error.code == Code::OpNotSupp && failed.error.message.contains("by RDMA"),
        "{failed}"
    );
    assert_eq!((s.cluster.net.lent().0, failed.report.moved()), (lent, 0));
    let r = s.bridge.load(&all, Policy::Prefer).await.unwrap();
    assert!(r.by_tier[Tier::GpuRdma] == 0 && s.mem.peek(tensor, MIB).unwrap() == data, "{r}");
}

/// The simulated device sees written bytes only when the bridge makes them visible. The test runs
/// on one thread, so nothing is written at that moment.
#[tokio::test]
async fn what_servers_wrote_is_seen_before_anybody_uses_it() {
    for sums in [true, false] {
        let s = stage(sums, Options { accept_oss_checksum: true, ..options() }).await;
        let data = pattern(21, MIB + 77);
        let f = written(&s.client, b"f", &data).await;
        let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
        s.mem.see_late();
        let r = s.bridge.load(&[range(&f, 0, tensor, MIB + 77)], DIRECT).await.unwrap();
        assert!(r.is_all(Tier::GpuRdma) && s.mem.peek(tensor, MIB + 77).unwrap() == data, "{r}");
        let s = s.bridge.self_test().await;
        assert!(matches!(s[Tier::GpuRdma], Standing::Available(_)), "{s:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_watched_or_have_a_policy_go_the_same_way() {
    let s = stage(true, options()).await;
    let data = pattern(21, MIB + 77);
    let f = Arc::new(written(&s.client, b"f", &data).await);
    let size = data.len() as u64;
    let tensor = crate::ram::device(&s.mem, &vec![0; 2 << 20]);
    let watched = Arc::new(Watched::new(f.clone(), size));
    let strict = Arc::new(Strict::new(watched.clone(), DIRECT).unwrap());
    let of = |file: Arc<dyn FileIo>, len| [Transfer { file, offset: 0, gpu: tensor, len }];
    let r = s.bridge.load(&of(watched.clone(), size), DIRECT).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && s.mem.peek(tensor, size).unwrap() == data, "{r}");
    let (r, before) =
        (s.bridge.save(&of(strict.clone(), size), Policy::Prefer).await.unwrap(), watched.end());
    assert!(r.is_all(Tier::GpuRdma) && r.policy == DIRECT && before == size, "{r}");
    // The file is truncated meanwhile: the read ends there, and `Watched` records the new end.
    f.truncate(MIB - 100).await.unwrap();
    let e = s.bridge.load(&of(strict, size), Policy::Prefer).await.unwrap_err().error;
    assert!(e.code == Code::Io && e.message.contains("the file ends after"), "{e}");
    assert_eq!(watched.end(), MIB - 100);
}

/// A file that runs an action before each direct transfer of a part.
struct Meanwhile {
    file: File,
    calls: AtomicU64,
    /// The action; it gets the number of the call.
    what: Box<dyn Fn(u64) + Send + Sync>,
}

#[async_trait::async_trait]
impl FileIo for Meanwhile {
    fn id(&self) -> u64 {
        FileIo::id(&self.file)
    }
    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        FileIo::read(&self.file, offset, len).await
    }
    async fn write(&self, offset: u64, data: Buf) -> Result<ByTransport> {
        FileIo::write(&self.file, offset, data).await
    }
    async fn read_direct(&self, offset: u64, into: &Foreign) -> Result<Vec<Arrived>> {
        (self.what)(self.calls.fetch_add(1, SeqCst));
        FileIo::read_direct(&self.file, offset, into).await
    }
    async fn write_direct(&self, offset: u64, from: &Foreign, sums: &[u32]) -> Result<()> {
        (self.what)(self.calls.fetch_add(1, SeqCst));
        FileIo::write_direct(&self.file, offset, from, sums).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_is_freed_or_a_context_that_is_destroyed_in_mid_call_ends_it_and_breaks_nothing()
 {
    for (destroy, save) in [(false, false), (false, true), (true, false), (true, true)] {
        let s = stage(true, options()).await;
        let data = pattern(8, 2 * MIB);
        let f = written(&s.client, b"f", &data).await;
        let new = pattern(9, 2 * MIB);
        let tensor = crate::ram::device(&s.mem, &new);
        let mem = s.mem.clone();
        let what = Box::new(move |n| match n {
            1 if destroy => mem.destroy(),
            1 => mem.free(tensor).unwrap(),
            _ => {}
        });
        let file = Arc::new(Meanwhile { file: f.clone(), calls: AtomicU64::new(0), what });
        let all = [Transfer { file, offset: 0, gpu: tensor, len: 2 * MIB }];
        let outcome = if save {
            s.bridge.save(&all, DIRECT).await
        } else {
            s.bridge.load(&all, DIRECT).await
        };
        let failed = outcome.unwrap_err();
        let want = if destroy { Code::NoDev } else { Code::Inval };
        assert!(
            failed.error.code == want && failed.report.moved() < 2 * MIB,
            "{destroy} {save}: {failed}"
        );
        // Every block has either its old or its new content.
        let got = join(&f.read(0, 2 << 20).await.unwrap());
        let whole =
            |(i, b): (usize, &[u8])| [&data, &new].iter().position(|d| d[i * 4096..][..4096] == *b);
        let whose: Vec<usize> =
            got.chunks(4096).enumerate().map(|b| whole(b).expect("a block of both")).collect();
        assert!(whose.contains(&0) && (save || !whose.contains(&1)), "{destroy} {save}: {whose:?}");
        // Foreign pointers are refused before anything moves.
        let (lent, _) = s.cluster.net.lent();
        let e = s.bridge.load(&[range(&f, 0, 4096, 10)], DIRECT).await.unwrap_err().error;
        assert!(matches!(e.code, Code::Inval | Code::NoDev | Code::OpNotSupp), "{e}");
        assert!(destroy || s.cluster.net.lent().0 == lent);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_with_the_answers_did_not_go_straight_to_the_device() {
    let s = stage(true, options()).await;
    let data = pattern(10, MIB);
    let f = written(&s.client, b"f", &data).await;
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, MIB)];
    s.cluster.net.stream(true);
    let failed = s.bridge.load(&all, DIRECT).await.unwrap_err();
    assert!(
        failed.error.message.contains("with its answer") && failed.report.moved() == 0,
        "{failed}"
    );
    let r = s.bridge.load(&all, Policy::AtLeast(Tier::BounceTcp)).await.unwrap();
    assert!(r.by_tier[Tier::GpuRdma] == 0 && s.mem.peek(tensor, MIB).unwrap() == data, "{r}");
    let standings = s.bridge.self_test().await;
    let why = format!("{:?}", standings[Tier::GpuRdma]);
    assert!(why.contains("TestStopped") && why.contains("with its answer"), "{why}");
    s.cluster.net.stream(false);
    s.bridge.self_test().await;
    assert!(s.bridge.load(&all, DIRECT).await.unwrap().is_all(Tier::GpuRdma));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_server_without_rdma_costs_no_load_its_tier_and_a_save_only_its_own() {
    let s = stage(true, options()).await;
    let data = pattern(11, MIB);
    let f = written(&s.client, b"f", &data).await;
    f.fsync().await.unwrap();
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, MIB)];
    s.cluster.net.set_transport(node(1), Transport::Tcp);
    // The other replicas are read.
    let r = s.bridge.load(&all, DIRECT).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && s.mem.peek(tensor, MIB).unwrap() == data, "{r}");
    let failed = s.bridge.save(&all, DIRECT).await.unwrap_err();
    assert!(failed.error.message.contains("is not reachable by RDMA"), "{failed}");
    let r = s.bridge.save(&all, Policy::AtLeast(Tier::BounceTcp)).await.unwrap();
    assert!(r.by_tier[Tier::GpuRdma] < MIB && r.moved() == MIB, "{r}");
    assert!(
        matches!(s.bridge.standings()[Tier::GpuRdma], Standing::Available(_)),
        "{:?}",
        s.bridge.standings()
    );
    assert!(s.bridge.load(&all, DIRECT).await.unwrap().is_all(Tier::GpuRdma));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_could_not_be_lent_to_anybody_changes_nothing_of_what_is_known() {
    let s = stage(true, options()).await;
    let data = pattern(12, MIB);
    let f = written(&s.client, b"f", &data).await;
    f.fsync().await.unwrap();
    (0..4).for_each(|t| s.cluster.net.set_transport(node(t), Transport::Tcp));
    let tensor = crate::ram::device(&s.mem, &data);
    let memory = s.mem.export(tensor, 4096).unwrap();
    // The client caches what it reads, before and after.
    for refused in [false, true] {
        if refused {
            let e = f.write_foreign(0, &memory, &[0]).await.unwrap_err();
            assert_eq!(e.code, Code::OpNotSupp, "{e}");
        }
        f.read(0, 1 << 20).await.unwrap();
        let reads = s.client.stats().data_reads;
        assert!(join(&f.read(0, 1 << 20).await.unwrap()) == data);
        assert_eq!(s.client.stats().data_reads, reads, "refused: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_to_a_file_with_o_dsync_has_told_its_size_when_it_returns() {
    let s = stage(true, options()).await;
    let (me, flags) = (user(), RW | O_DSYNC);
    let made =
        s.client.create(&me, s.client.root(), b"f", 0o644, flags, true, striped(65536, -1)).await;
    let f = made.unwrap().0;
    let tensor = crate::ram::device(&s.mem, &pattern(13, MIB));
    s.bridge.save(&[range(&f, 0, tensor, MIB)], DIRECT).await.unwrap();
    assert_eq!(s.cluster.mds.size_of(f.ino()), MIB);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_whose_bounce_path_fails_goes_on_straight_to_the_device() {
    let s = staged(true, options(), Duration::from_millis(100)).await;
    let data = pattern(14, MIB);
    let f = written(&s.client, b"f", &data).await;
    let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
    let all = [range(&f, 0, tensor, MIB)];
    s.mem.fail_pinned_after(0, Fault::Driver { call: "copy", code: 1, name: "as asked".into() });
    let r = s.bridge.load(&all, Policy::AtLeast(Tier::BounceTcp)).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && s.mem.peek(tensor, MIB).unwrap() == data, "{r}");
    assert!(r.switches.iter().any(|w| w.to == Some(Tier::GpuRdma)), "{r}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_that_found_nothing_to_lend_to_is_remembered_by_saves() {
    let s = stage(true, options()).await;
    let f = written(&s.client, b"f", &pattern(15, MIB)).await;
    f.fsync().await.unwrap();
    let tensor = crate::ram::device(&s.mem, &pattern(16, MIB));
    let all = [range(&f, 0, tensor, MIB)];
    s.cluster.net.set_transport(node(1), Transport::Tcp);
    let failed = s.bridge.save(&all, DIRECT).await.unwrap_err();
    let rests = |why: &Unavailable| matches!(why, Unavailable::Resting(Fault::Export { .. }));
    assert!(
        failed.report.switches.iter().any(|w| w.from == Tier::GpuRdma && rests(&w.why)),
        "{failed}"
    );
    assert!(!failed.error.message.contains("passed no self-test"), "{failed}");
    // The next calls skip the tier: no memory is lent, and the report says why.
    let lent = s.cluster.net.lent();
    for _ in 0..2 {
        let r = s.bridge.save(&all, Policy::AtLeast(Tier::BounceTcp)).await.unwrap();
        assert!(r.by_tier[Tier::GpuRdma] == 0 && r.moved() == MIB && r.switches.is_empty(), "{r}");
        assert!(r.unavailable.iter().any(|(t, why)| *t == Tier::GpuRdma && rests(why)), "{r}");
    }
    assert_eq!(s.cluster.net.lent(), lent);
    // Loads can use other replicas, and a call that allows only this tier tries it.
    assert!(s.bridge.load(&all, DIRECT).await.unwrap().is_all(Tier::GpuRdma));
    s.cluster.net.set_transport(node(1), Transport::Rdma);
    assert!(s.bridge.save(&all, DIRECT).await.unwrap().is_all(Tier::GpuRdma));
    let r = s.bridge.save(&all, Policy::AtLeast(Tier::BounceTcp)).await.unwrap();
    assert!(!r.unavailable.iter().any(|(t, _)| *t == Tier::GpuRdma), "it worked since: {r}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hole_that_cannot_be_copied_fails_what_copies_and_not_the_direct_path() {
    let s = stage(true, options()).await;
    let f = written(&s.client, b"f", &pattern(17, MIB)).await;
    f.truncate(2 * MIB).await.unwrap();
    let want = [pattern(17, MIB), vec![0; 1 << 20]].concat();
    let tensor = crate::ram::device(&s.mem, &vec![0xaa; 2 << 20]);
    s.mem.fail_pinned_after(0, Fault::Driver { call: "copy", code: 1, name: "as asked".into() });
    let r = s.bridge.load(&[range(&f, 0, tensor, 2 * MIB)], DIRECT).await.unwrap();
    assert!(r.is_all(Tier::GpuRdma) && r.staged >= MIB && r.checksums == Checksums::Gpu, "{r}");
    assert!(s.mem.peek(tensor, 2 * MIB).unwrap() == want);
    let standings = s.bridge.standings();
    assert!(
        matches!(standings[Tier::BounceTcp], Standing::Unavailable(Unavailable::Lost(_))),
        "{standings:?}"
    );
    assert!(matches!(standings[Tier::GpuRdma], Standing::Available(_)), "{standings:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_beside_the_direct_transport_that_fails_is_told() {
    let s = stage(true, options()).await;
    let f = written(&s.client, b"f", &pattern(18, MIB)).await;
    f.fsync().await.unwrap();
    let tensor = crate::ram::device(&s.mem, &pattern(19, MIB));
    s.mem.fail_after(0, Fault::Driver { call: "copy", code: 1, name: "as asked".into() });
    // The remaining tiers fail one after the other. The error names their failure, not the
    // alignment of the caller's range.
    let failed = s.bridge.save(&[range(&f, 100, tensor, 1000)], Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::Io && failed.error.message.contains("as asked"), "{failed}");
    for tier in [Tier::BounceTcp, Tier::Pageable] {
        assert!(failed.report.switches.iter().any(|w| w.from == tier), "{tier}: {}", failed.report);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_without_room_for_sums_uses_the_direct_transport_only_with_consent() {
    for consent in [false, true] {
        let s = stage(true, Options { accept_oss_checksum: consent, ..options() }).await;
        let data = pattern(20, MIB);
        let f = written(&s.client, b"f", &data).await;
        f.fsync().await.unwrap();
        let tensor = crate::ram::device(&s.mem, &vec![0; data.len()]);
        let all = [range(&f, 0, tensor, MIB)];
        s.mem.limit_room(MIB + 4095);
        match (consent, s.bridge.load(&all, DIRECT).await) {
            (true, Ok(r)) => {
                assert!(r.is_all(Tier::GpuRdma) && r.checksum == Some(Checksum::AtOssOnly), "{r}");
                assert!(r.not_on_gpu.as_ref().unwrap().contains("no memory for 4096 bytes"), "{r}");
                assert!(s.mem.peek(tensor, MIB).unwrap() == data);
            }
            (false, Err(f)) => {
                assert!(
                    f.error.message.contains("could not sum its memory") && f.report.moved() == 0,
                    "{f}"
                )
            }
            (_, other) => panic!("{consent}: {other:?}"),
        }
        // Storage servers accept no write without checksums.
        let failed = s.bridge.save(&all, DIRECT).await.unwrap_err();
        assert!(
            failed.error.message.contains("could not sum its memory") && failed.report.moved() == 0,
            "{failed}"
        );
        assert!(
            matches!(s.bridge.standings()[Tier::GpuRdma], Standing::Available(_)),
            "{:?}",
            s.bridge.standings()
        );
        s.mem.limit_room(1 << 30);
        assert_eq!(s.bridge.load(&all, DIRECT).await.unwrap().checksums, Checksums::Gpu);
    }
}

/// A cluster that never answers.
struct Away(Pool);

#[async_trait::async_trait]
impl Network for Away {
    fn pool(&self) -> &Pool {
        &self.0
    }
    fn no_rdma(&self) -> Option<String> {
        None
    }
    async fn scratch(&self) -> Result<Arc<dyn FileIo>> {
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_bridge_opens_though_the_cluster_does_not_answer() {
    let mem = FakeGpu::new();
    mem.limit_pins(1 << 30);
    mem.play_sums();
    let bridge =
        Bridge::open(Arc::new(mem), Arc::new(Away(Pool::new(64 << 20))), options()).await.unwrap();
    let why = format!("{:?}", bridge.standings()[Tier::GpuRdma]);
    assert!(why.contains("did not answer"), "{why}");
    assert!(
        matches!(bridge.standings()[Tier::BounceTcp], Standing::Available(_)),
        "{:?}",
        bridge.standings()
    );
}

/// Files that cannot lend memory say so.
#[tokio::test]
async fn a_file_of_no_storage_server_has_no_direct_path() {
    let pool = Pool::new(16 << 20);
    let file = crate::ram::Ram::new(1, pattern(1, MIB), &pool);
    let mem = FakeGpu::new();
    let tensor = mem.alloc(4096).unwrap();
    let m = mem.export(tensor, 4096).unwrap();
    let no = |e: Error| {
        assert!(e.code == Code::OpNotSupp && e.message.contains("has no storage server"), "{e}")
    };
    no(FileIo::read_direct(&*file, 0, &m).await.unwrap_err());
    no(FileIo::write_direct(&*file, 0, &m, &[0]).await.unwrap_err());
    mem.free(tensor).unwrap();
    assert_eq!(m.len(), 4096, "held still");
}
