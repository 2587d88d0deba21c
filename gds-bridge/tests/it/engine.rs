//! The bridge on host memory: reports, changes of tier in mid-run, faults, bad input.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use crate::ram::*;
use futures_util::FutureExt;
use strake_client::Arrived;
use strake_fabric::{Buf, ByTransport, Foreign, Pool};
use strake_fake_gpu::{Copied, FakeGpu};
use strake_gds::{
    Bridge, Checksum, Checksums, Direction, Fault, FileIo, GpuMem, Options, Policy, Report, Tier,
    Transfer, Unavailable, not_direct,
    plan::{Measured, Standing},
};
use strake_proto::{Code, Error, layout::splitmix64};

const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);

fn driver_error() -> Fault {
    Fault::Driver { call: "cuMemcpyHtoDAsync", code: 999, name: "CUDA_ERROR_UNKNOWN".into() }
}

/// Asserts that a report agrees with what the device itself has counted since `before`.
#[track_caller]
fn agrees(r: &Report, mem: &FakeGpu, before: Copied) {
    let now = mem.copied();
    let (pinned, pageable) = match r.direction {
        Direction::Load => {
            (now.load_pinned - before.load_pinned, now.load_pageable - before.load_pageable)
        }
        Direction::Save => {
            (now.save_pinned - before.save_pinned, now.save_pageable - before.save_pageable)
        }
    };
    assert_eq!((r.by_tier[Tier::BounceTcp], r.by_tier[Tier::Pageable]), (pinned, pageable), "{r}");
    assert_eq!(r.moved(), r.ranges.iter().sum::<u64>());
    assert_eq!(r.moved(), pinned + pageable);
}

#[tokio::test]
async fn many_ranges_of_many_files_arrive_and_go_back() {
    let (mem, pool, bridge) = bridge(1 << 30).await;
    let files: Vec<Arc<Ram>> =
        (0..3).map(|i| Ram::new(i, pattern(i, 3 * MIB + i * 777), &pool)).collect();
    let tensor = mem.alloc(8 * MIB).unwrap();
    let at = |f: usize, offset, to, len| Transfer {
        file: files[f].clone(),
        offset,
        gpu: tensor + to,
        len,
    };
    let all = [
        at(0, 0, 0, 3 * MIB),
        at(1, 100_001, 3 * MIB + 5, 1_000_003),
        at(2, 256 * KIB - 1, 5 * MIB, 2),
        at(2, 7, 6 * MIB, 0),
        at(2, 0, 6 * MIB, 256 * KIB),
    ];
    let before = mem.copied();
    let r = bridge.load(&all, BOUNCE).await.unwrap();
    agrees(&r, &mem, before);
    assert!(r.is_all(Tier::BounceTcp) && r.switches.is_empty() && r.unavailable.is_empty());
    assert_eq!(
        (r.ranges.clone(), r.checksum),
        (all.iter().map(|t| t.len).collect::<Vec<_>>(), Some(Checksum::AtClient))
    );
    // A third of each part came from outside of the pool.
    assert!(r.staged > r.asked / 3 - MIB && r.staged < r.asked / 3 + MIB, "{r}");
    for t in &all {
        let want = files[t.file.id() as usize].bytes.lock()[t.offset as usize..][..t.len as usize]
            .to_vec();
        assert!(mem.peek(t.gpu, t.len).unwrap() == want);
    }
    // The gaps are as they were.
    assert_eq!(mem.peek(tensor + 3 * MIB, 5).unwrap(), [0xee; 5]);

    let out: Vec<Arc<Ram>> = (0..2).map(|i| Ram::new(i, Vec::new(), &pool)).collect();
    let back = |f: usize, offset, from, len| Transfer {
        file: out[f].clone(),
        offset,
        gpu: tensor + from,
        len,
    };
    let all = [
        back(0, 0, 0, 3 * MIB),
        back(1, 500, 5 * MIB, 2),
        back(1, 0, 3 * MIB + 5, 500),
        back(1, 502, 0, 1),
    ];
    let before = mem.copied();
    let r = bridge.save(&all, BOUNCE).await.unwrap();
    agrees(&r, &mem, before);
    assert_eq!(r.staged, 0, "buffers of the pool are pinned: {r}");
    assert!(*out[0].bytes.lock() == files[0].bytes.lock()[..3 << 20]);
    let end =
        [&files[2].bytes.lock()[(256 << 10) - 1..][..2], &files[0].bytes.lock()[..1]].concat();
    assert_eq!(out[1].bytes.lock()[500..], end);
}

#[tokio::test]
async fn without_pinned_regions_every_byte_is_staged_and_still_bounced() {
    // 6 slots of 256 KiB and nothing else.
    let (mem, pool, bridge) = bridge(6 * 256 * KIB).await;
    assert_eq!(bridge.pinned_buffers(), 0);
    let file = Ram::new(1, pattern(1, 2 * MIB + 17), &pool);
    let tensor = device(&mem, &vec![0; 3 << 20]);
    let before = mem.copied();
    let r = bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap();
    agrees(&r, &mem, before);
    assert_eq!(r.staged, r.asked);
    let out = Ram::new(2, Vec::new(), &pool);
    let before = mem.copied();
    let saved = Transfer { file: out.clone(), offset: 0, gpu: tensor, len: 2 * MIB + 17 };
    let r = bridge.save(&[saved], BOUNCE).await.unwrap();
    agrees(&r, &mem, before);
    assert_eq!(r.staged, r.asked);
    assert!(*out.bytes.lock() == *file.bytes.lock());
}

#[tokio::test]
async fn without_pinned_memory_there_is_the_pageable_tier_or_an_error() {
    let (mem, pool, bridge) = bridge(1000).await;
    assert!(bridge.notice().unwrap().starts_with("nothing is pinned: "), "{:?}", bridge.notice());
    let file = Ram::new(1, pattern(1, MIB), &pool);
    let tensor = device(&mem, &vec![0; 1 << 20]);
    let before = mem.copied();
    let r = bridge.load(&[whole(&file, tensor)], Policy::Prefer).await.unwrap();
    agrees(&r, &mem, before);
    assert!(r.is_all(Tier::Pageable) && r.staged == 0);
    assert!(r.to_string().contains("bounce-tcp: no host memory could be pinned"), "{r}");
    let failed =
        bridge.load(&[whole(&file, tensor)], Policy::AtLeast(Tier::BounceTcp)).await.unwrap_err();
    assert!(failed.error.code == Code::OpNotSupp && failed.report.moved() == 0, "{failed}");
    for tier in [
        "gpu-rdma: no storage server is reached by RDMA",
        "local-gds: no folder with copies",
        "bounce-tcp: no host memory",
    ] {
        assert!(failed.error.message.contains(tier), "{failed}");
    }
}

/// Pinned memory stops working in the middle of a call, in both directions.
#[tokio::test]
async fn prefer_goes_on_in_mid_run_and_the_account_tells_both_tiers() {
    for direction in [Direction::Load, Direction::Save] {
        let (mem, pool, bridge) = bridge(1 << 30).await;
        let data = pattern(3, 5 * MIB + 1234);
        let file = Ram::new(
            1,
            if direction == Direction::Load { data.clone() } else { vec![0; data.len()] },
            &pool,
        );
        let tensor = device(
            &mem,
            &if direction == Direction::Load { vec![0; data.len()] } else { data.clone() },
        );
        let all = [whole(&file, tensor)];
        ranked(&bridge, &mem).await;
        let before = mem.copied();
        mem.fail_pinned_after(9, driver_error());
        let policy = Policy::Prefer;
        let r = if direction == Direction::Load {
            bridge.load(&all, policy).await
        } else {
            bridge.save(&all, policy).await
        };
        let r = r.unwrap();
        let (bounced, pageable) = (r.by_tier[Tier::BounceTcp], r.by_tier[Tier::Pageable]);
        assert!(bounced > 0 && pageable > 0 && bounced + pageable == r.asked, "{r}");
        // The device made some copies of the part that failed half way; the other tier moved all
        // bytes of that part again.
        let now = mem.copied();
        let by_device =
            now.load_pageable - before.load_pageable + now.save_pageable - before.save_pageable;
        assert_eq!(by_device, pageable);
        let [s] = &r.switches[..] else { panic!("{r}") };
        assert_eq!(
            (s.from, s.to, &s.why),
            (Tier::BounceTcp, Some(Tier::Pageable), &Unavailable::Lost(driver_error()))
        );
        assert!(r.to_string().contains("from bounce-tcp to pageable: it failed in a call"), "{r}");
        assert!(mem.peek(tensor, data.len() as u64).unwrap() == data && *file.bytes.lock() == data);

        // The next call tests again, finds it broken still, and says so.
        let r = bridge.load(&all, Policy::Prefer).await.unwrap();
        assert!(r.is_all(Tier::Pageable), "{r}");
        let stopped = (Tier::BounceTcp, Unavailable::TestStopped(driver_error()));
        assert!(r.unavailable.contains(&stopped), "{r}");
        mem.mend();
        ranked(&bridge, &mem).await;
        assert!(bridge.load(&all, BOUNCE).await.unwrap().is_all(Tier::BounceTcp));
    }
}

/// Repeats the self-test until pinned memory is the fastest tier: on host memory that is a matter
/// of chance.
async fn ranked(bridge: &Bridge, _mem: &FakeGpu) {
    for _ in 0..1000 {
        let s = bridge.self_test().await;
        let (Standing::Available(a), Standing::Available(b)) =
            (&s[Tier::BounceTcp], &s[Tier::Pageable])
        else {
            panic!("{s:?}");
        };
        if a.load > b.load && a.save > b.save {
            return;
        }
    }
    panic!("never faster");
}

#[tokio::test]
async fn every_refusal_is_told_in_its_words_and_obeyed() {
    let (mem, pool, bridge) = bridge(1 << 30).await;
    let file = Ram::new(1, pattern(1, 1000), &pool);
    let tensor = device(&mem, &[0; 1000]);
    let reasons = [
        Unavailable::NoDmaBuf { device: "this".into() },
        Unavailable::NoLibrary { library: "libcuda.so.1".into(), why: "no such file".into() },
        Unavailable::Device(driver_error()),
        Unavailable::NotPinned(Fault::Pin { bytes: 1, why: "a limit".into() }),
    ];
    for tier in Tier::ALL {
        for why in &reasons {
            mem.refuse(tier, Some(why.clone()));
            let standings = bridge.self_test().await;
            assert_eq!(standings[tier], Standing::Unavailable(why.clone()));
            let before = mem.copied();
            let failed =
                bridge.load(&[whole(&file, tensor)], Policy::Require(tier)).await.unwrap_err();
            assert_eq!((failed.error.code, failed.report.moved()), (Code::OpNotSupp, 0));
            assert!(failed.error.message.contains(&format!("{tier}: {why}")), "{failed}");
            assert_eq!(mem.copied(), before);
        }
        mem.refuse(tier, None);
    }
    bridge.self_test().await;
    bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap();
    bridge.load(&[whole(&file, tensor)], Policy::Require(Tier::Pageable)).await.unwrap();
    for (never, why) in [
        (Tier::GpuRdma, "no storage server is reached by RDMA"),
        (Tier::LocalGds, "no folder with copies"),
        (Tier::BounceRdma, "no storage server is reached by RDMA"),
    ] {
        let failed =
            bridge.load(&[whole(&file, tensor)], Policy::Require(never)).await.unwrap_err();
        assert!(failed.error.message.contains(why), "{failed}");
    }
}

#[tokio::test]
async fn a_device_that_changes_bytes_fails_its_self_test() {
    // Damages each copy of the bounce tier's self-test in turn, in each direction and round.
    for nth in 0..12 {
        let (mem, _pool, bridge) = bridge(1 << 30).await;
        mem.corrupt_after(nth);
        let s = bridge.self_test().await;
        let Standing::Unavailable(Unavailable::TestFailed { at }) = s[Tier::BounceTcp] else {
            panic!("{nth}: {s:?}")
        };
        assert_eq!(at, 128 * KIB);
        assert!(
            matches!(s[Tier::Pageable], Standing::Available(Measured { load, save }) if load > 0.0 && save > 0.0)
        );
    }
}

#[tokio::test]
async fn a_full_device_is_tested_with_less_or_says_so() {
    let (mem, pool, bridge) = bridge(1 << 30).await;
    mem.limit_room(256 * KIB);
    assert!(matches!(bridge.self_test().await[Tier::BounceTcp], Standing::Available(_)));
    let tensor = device(&mem, &[0; 100]);
    let s = bridge.self_test().await;
    let none = Unavailable::TestStopped(Fault::NoMemory { bytes: 256 * KIB });
    assert_eq!(s[Tier::BounceTcp], Standing::Unavailable(none));
    let file = Ram::new(1, pattern(1, 100), &pool);
    assert!(bridge.load(&[whole(&file, tensor)], Policy::Prefer).await.is_err());
}

#[tokio::test]
async fn bad_ranges_are_refused_before_anything_moves() {
    let (mem, pool, bridge) = bridge(1 << 30).await;
    let file = Ram::new(1, pattern(1, MIB), &pool);
    let (a, freed) = (device(&mem, &[0; 4096]), device(&mem, &[0; 4096]));
    mem.free(freed).unwrap();
    let other = FakeGpu::new();
    let _gap = other.alloc(64 * MIB).unwrap();
    let foreign = other.alloc(4096).unwrap();
    let t = |offset, gpu, len| Transfer { file: file.clone(), offset, gpu, len };
    let good = t(0, a, 100);
    let before = mem.copied();
    let cases = [
        (vec![good.clone(), t(0, foreign, 10)], "range 1: address"),
        (vec![t(0, 0, 10)], "does not belong to memory of this device's context"),
        (vec![t(0, freed + 7, 10)], "memory that was freed"),
        (vec![t(0, a + 4000, 97)], "97 bytes from address"),
        (vec![t(0, a, u64::MAX)], "beyond the largest file"),
        (vec![t(u64::MAX - 5, a, 100)], "beyond the largest file"),
        (vec![t(1 << 50, a, 1)], "beyond the largest file"),
        (vec![t(0, u64::MAX - 3, 100)], "does not belong to memory"),
        (
            vec![good.clone(), t(500, a + 99, 10)],
            "range 1: it overlaps range 0 in the device's memory",
        ),
        (vec![t(500, a + 50, 10), good.clone()], "range 0: it overlaps range 1"),
    ];
    for (all, words) in cases {
        for policy in [Policy::Prefer, BOUNCE, Policy::Require(Tier::GpuRdma)] {
            let failed = bridge.load(&all, policy).await.unwrap_err();
            assert!(
                failed.error.code == Code::Inval && failed.error.message.contains(words),
                "{words}: {failed}"
            );
            assert_eq!((failed.report.moved(), failed.report.checksum), (0, None));
        }
    }
    let twice = [t(0, a, 100), t(99, a + 200, 5)];
    let e = bridge.save(&twice, BOUNCE).await.unwrap_err().error;
    assert!(e.code == Code::Inval && e.message.contains("overlaps range 0 in the file"), "{e}");
    // For a load the same ranges are valid: one source for two places.
    assert_eq!(mem.copied(), before);
    bridge.load(&[t(0, a, 100), t(0, a + 100, 100)], BOUNCE).await.unwrap();
    // An empty list is no error, and the address of an empty range does not matter.
    bridge.load(&[], BOUNCE).await.unwrap();
    let r = bridge.load(&[t(0, 0, 0), t(0, foreign, 0)], BOUNCE).await.unwrap();
    assert_eq!((r.asked, r.checksum), (0, None));
}

/// A file that counts the reads and writes that began. Writes wait until the test lets them go.
struct Gated {
    file: Arc<Ram>,
    begun: AtomicU64,
    go: tokio::sync::Semaphore,
}

#[async_trait::async_trait]
impl FileIo for Gated {
    fn id(&self) -> u64 {
        self.file.id()
    }
    async fn read(&self, offset: u64, len: usize) -> strake_proto::Result<Vec<Buf>> {
        self.begun.fetch_add(1, SeqCst);
        self.file.read(offset, len).await
    }
    async fn write(&self, offset: u64, data: Buf) -> strake_proto::Result<ByTransport> {
        self.begun.fetch_add(1, SeqCst);
        self.go.acquire().await.unwrap().forget();
        self.file.write(offset, data).await
    }
    async fn read_direct(&self, offset: u64, into: &Foreign) -> strake_proto::Result<Vec<Arrived>> {
        self.file.read_direct(offset, into).await
    }
    async fn write_direct(
        &self,
        offset: u64,
        from: &Foreign,
        sums: &[u32],
    ) -> strake_proto::Result<()> {
        self.file.write_direct(offset, from, sums).await
    }
}

/// Waits until `what` holds; false after a time limit.
async fn until(what: impl Fn() -> bool) -> bool {
    let wait = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.is_ok()
}

/// Parts are under way side by side: while the device copies one, others are read, written and
/// queued on the device. The test does not rely on time: a part is held until the others were seen.
#[tokio::test]
async fn reads_writes_and_copies_of_parts_overlap() {
    const PART: u64 = 256 << 10;
    let (mem, pool) = (FakeGpu::new(), Pool::new(64 << 20));
    mem.limit_pins(1 << 30);
    let options = Options {
        workers: 1,
        slots: 4,
        slot_bytes: PART as usize,
        pinned_limit: Some(1 << 30),
        ..Options::default()
    };
    let bridge =
        Bridge::open(Arc::new(mem.clone()), Arc::new(pool.clone()), options).await.unwrap();
    let data = pattern(7, 32 * PART);
    let file = Ram::new(1, data.clone(), &pool);
    let (tensor, len) = (device(&mem, &vec![0; data.len()]), data.len() as u64);
    let gated = |file| {
        Arc::new(Gated { file, begun: AtomicU64::new(0), go: tokio::sync::Semaphore::new(0) })
    };
    let f = gated(file);
    let all = [Transfer { file: f.clone(), offset: 0, gpu: tensor, len }];

    // No copy is allowed, and all parts that may be under way are read.
    mem.allow_copies(Some(0));
    let before = mem.copied();
    let (b, ranges) = (bridge.clone(), all.clone());
    let call = tokio::spawn(async move { b.load(&ranges, BOUNCE).await });
    let others_read = until(|| f.begun.load(SeqCst) == 4).await && mem.copied() == before;
    // The first part's two pieces are copied. Then the stream has copies of several parts queued.
    mem.allow_copies(Some(2));
    let others_ordered = until(|| mem.under_way() >= 4).await;
    mem.allow_copies(None);
    assert!(others_read, "{} reads", f.begun.load(SeqCst));
    assert!(others_ordered, "one part at a time is copied");
    assert!(
        call.await.unwrap().unwrap().is_all(Tier::BounceTcp)
            && mem.peek(tensor, len).unwrap() == data
    );

    // No write may end, and all parts that may be under way are copied.
    let f = gated(Ram::new(2, Vec::new(), &pool));
    let ranges = [Transfer { file: f.clone(), offset: 0, gpu: tensor, len }];
    let call = tokio::spawn(async move { bridge.save(&ranges, BOUNCE).await });
    let others_copied = until(|| f.begun.load(SeqCst) == 4).await;
    let copied = mem.copied().save_pinned - before.save_pinned;
    f.go.add_permits(32);
    assert!(others_copied && copied == 4 * PART, "{copied}");
    assert!(call.await.unwrap().unwrap().is_all(Tier::BounceTcp) && *f.file.bytes.lock() == data);
}

#[tokio::test]
async fn options_out_of_range_are_refused() {
    let with = |f: fn(&mut Options)| {
        let mut o = Options::default();
        f(&mut o);
        Bridge::open(Arc::new(FakeGpu::new()), Arc::new(Pool::new(8 << 20)), o)
    };
    let bad: [fn(&mut Options); 7] = [
        |o| o.workers = 0,
        |o| o.workers = 65,
        |o| o.slots = 1,
        |o| o.slots = 17,
        |o| o.slot_bytes = 128 << 10,
        |o| o.slot_bytes = 8 << 20,
        |o| o.slot_bytes = 3 << 20,
    ];
    for f in bad {
        assert_eq!(with(f).await.unwrap_err().code, Code::Inval);
    }
}

#[tokio::test]
async fn a_file_that_ends_too_early_or_fails_fails_the_call() {
    let (mem, pool, bridge) = bridge(1 << 30).await;
    let tensor = device(&mem, &vec![0; 4 << 20]);
    let file = Ram::new(0xf, pattern(1, MIB + 10), &pool);
    let t = |f: &Arc<Ram>, len| [Transfer { file: f.clone(), offset: 0, gpu: tensor, len }];
    let failed = bridge.load(&t(&file, MIB + 11), Policy::Prefer).await.unwrap_err();
    assert!(
        failed.error.code == Code::Io && failed.error.message.contains("ends after 1048586 bytes"),
        "{failed}"
    );
    assert!(failed.error.message.contains("inode 0xf"), "{failed}");
    assert_eq!(failed.report.moved(), failed.report.ranges[0]);
    assert!(failed.report.moved() < MIB + 10);

    for code in [Code::Io, Code::Corrupt, Code::TimedOut, Code::NoSpc] {
        let hook =
            move |n| if n == 5 { Err(Error::new(code, "the file system says no")) } else { Ok(()) };
        let file = Ram::with(2, pattern(1, 4 * MIB), &pool, hook);
        let failed = bridge.load(&t(&file, 4 * MIB), Policy::Prefer).await.unwrap_err();
        assert!(
            failed.error.code == code && failed.error.message.ends_with("the file system says no"),
            "{failed}"
        );
        assert!(failed.report.moved() < 4 * MIB && failed.report.switches.is_empty());
        let file = Ram::with(2, Vec::new(), &pool, hook);
        let failed = bridge.save(&t(&file, 4 * MIB), Policy::Prefer).await.unwrap_err();
        assert!(failed.error.code == code && failed.report.moved() < 4 * MIB, "{failed}");
    }
    assert!(
        matches!(bridge.standings()[Tier::BounceTcp], Standing::Available(_)),
        "no tier is to blame"
    );
}

#[tokio::test]
async fn memory_that_is_freed_in_mid_run_ends_the_call_whatever_the_policy() {
    for policy in [Policy::Prefer, BOUNCE] {
        let (mem, pool, bridge) = bridge(1 << 30).await;
        let tensor = device(&mem, &vec![0; 4 << 20]);
        let freeing = mem.clone();
        let hook = move |n| if n == 7 { freeing.free(tensor).map_err(Error::from) } else { Ok(()) };
        let file = Ram::with(1, pattern(1, 4 * MIB), &pool, hook);
        let failed = bridge.load(&[whole(&file, tensor)], policy).await.unwrap_err();
        assert!(
            failed.error.code == Code::Inval
                && failed.error.message.contains("memory that was freed"),
            "{failed}"
        );
        assert!(
            failed.report.moved() < 4 * MIB && failed.report.switches.is_empty(),
            "{}",
            failed.report
        );
        let again = device(&mem, &vec![0; 4 << 20]);
        bridge.load(&[whole(&file, again)], policy).await.unwrap();
        assert!(mem.peek(again, 4 * MIB).unwrap() == *file.bytes.lock());
    }
}

#[tokio::test]
async fn a_context_that_is_destroyed_in_mid_transfer_ends_the_call_whatever_the_policy() {
    for (i, policy) in
        [Policy::Prefer, BOUNCE, Policy::AtLeast(Tier::Pageable)].into_iter().enumerate()
    {
        for direction in [Direction::Load, Direction::Save] {
            let (mem, pool, bridge) = bridge(1 << 30).await;
            let tensor = device(&mem, &vec![0; 4 << 20]);
            let file = Ram::new(1, pattern(1, 4 * MIB), &pool);
            mem.destroy_after(5 + i as u64);
            let all = [whole(&file, tensor)];
            let r = if direction == Direction::Load {
                bridge.load(&all, policy).await
            } else {
                bridge.save(&all, policy).await
            };
            let failed = r.unwrap_err();
            assert!(
                failed.error.code == Code::NoDev
                    && failed.error.message.contains("context is gone"),
                "{failed}"
            );
            assert!(failed.report.moved() < 4 * MIB && failed.report.switches.is_empty());
            assert_eq!(bridge.load(&all, policy).await.unwrap_err().error.code, Code::NoDev);
            let s = bridge.self_test().await;
            assert!(
                s.iter()
                    .all(|(_, s)| *s
                        == Standing::Unavailable(Unavailable::Device(Fault::ContextGone)))
            );
            // Everything is released, even without a context.
            drop(bridge);
            assert_eq!(mem.pinned(), 0);
        }
    }
}

/// A file whose reads never end.
struct Stuck(Arc<Ram>);

#[async_trait::async_trait]
impl FileIo for Stuck {
    fn id(&self) -> u64 {
        99
    }
    async fn read(&self, offset: u64, len: usize) -> strake_proto::Result<Vec<strake_fabric::Buf>> {
        if offset >= MIB {
            std::future::pending::<()>().await;
        }
        self.0.read(offset, len).await
    }
    async fn write(&self, _: u64, _: strake_fabric::Buf) -> strake_proto::Result<ByTransport> {
        unreachable!("this test loads")
    }

    async fn read_direct(&self, _: u64, _: &Foreign) -> strake_proto::Result<Vec<Arrived>> {
        Err(not_direct())
    }
    async fn write_direct(&self, _: u64, _: &Foreign, _: &[u32]) -> strake_proto::Result<()> {
        Err(not_direct())
    }
}

#[tokio::test]
async fn a_call_that_is_given_up_touches_the_device_no_more() {
    let (mem, pool, bridge) = bridge(1 << 30).await;
    let tensor = device(&mem, &vec![0; 4 << 20]);
    let file = Arc::new(Stuck(Ram::new(1, pattern(1, 4 * MIB), &pool)));
    let all = [Transfer { file, offset: 0, gpu: tensor, len: 4 * MIB }];
    let given_up =
        tokio::time::timeout(Duration::from_millis(100), bridge.load(&all, BOUNCE)).await;
    assert!(given_up.is_err());
    let copied = mem.copied();
    mem.free(tensor).unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(mem.copied(), copied);
    // Copies that the device has begun are waited for.
    let tensor = device(&mem, &vec![0; 4 << 20]);
    let file = Ram::new(1, pattern(1, 4 * MIB), &pool);
    mem.slow_down(Duration::from_millis(100));
    let all = [whole(&file, tensor)];
    let given_up =
        tokio::time::timeout(Duration::from_millis(300), bridge.load(&all, BOUNCE)).await;
    assert!(given_up.is_err());
    let now = mem.copied();
    assert!(now.load_pinned > copied.load_pinned, "some were under way");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(mem.copied(), now);
    mem.slow_down(Duration::ZERO);
    // At whatever moment the call is dropped, nothing is copied after it, and the bridge still
    // works.
    for polls in 0..60 {
        let tensor = device(&mem, &vec![0; 1 << 20]);
        let file = Ram::new(1, pattern(polls, MIB), &pool);
        let all = [whole(&file, tensor)];
        let mut call = Box::pin(bridge.load(&all, BOUNCE));
        for _ in 0..polls {
            if (&mut call).now_or_never().is_some() {
                break;
            }
            std::thread::yield_now();
        }
        drop(call);
        let copied = mem.copied();
        mem.free(tensor).unwrap();
        std::thread::yield_now();
        assert_eq!(mem.copied(), copied);
    }
    let tensor = device(&mem, &vec![0; 1 << 20]);
    let file = Ram::new(1, pattern(5, MIB), &pool);
    bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap();
    assert!(mem.peek(tensor, MIB).unwrap() == *file.bytes.lock());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_beside_each_other_share_the_slots_and_a_small_pool() {
    let (mem, pool) = (FakeGpu::new(), Pool::new(MIB));
    mem.limit_pins(1 << 30);
    let bridge = over(&mem, Arc::new(pool.clone())).await;
    let calls: Vec<_> = (0..8u64)
        .map(|i| {
            let (bridge, mem, pool) = (bridge.clone(), mem.clone(), pool.clone());
            tokio::spawn(async move {
                let data = pattern(i, 2 * MIB + i);
                let (file, out) =
                    (Ram::new(i, data.clone(), &pool), Ram::new(i + 100, Vec::new(), &pool));
                let tensor = device(&mem, &vec![0; data.len()]);
                bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap();
                assert!(mem.peek(tensor, data.len() as u64).unwrap() == data);
                let all = [Transfer {
                    file: out.clone(),
                    offset: 0,
                    gpu: tensor,
                    len: data.len() as u64,
                }];
                bridge.save(&all, BOUNCE).await.unwrap();
                assert!(*out.bytes.lock() == data);
            })
        })
        .collect();
    for c in calls {
        c.await.unwrap();
    }
}

/// Random calls, policies and faults. Whatever the outcome, bytes add up, policies hold, and
/// successful calls have moved the right bytes.
#[tokio::test]
async fn random_calls_with_faults_equal_a_model() {
    for seed in 0..40u64 {
        let mut s = seed + 1;
        let mut next = |n: u64| splitmix64(&mut s) % n;
        let (mem, pool, bridge) = bridge([1 << 30, 6 * 256 * KIB, 0][next(3) as usize]).await;
        let files: Vec<Arc<Ram>> =
            (0..3).map(|i| Ram::new(i, pattern(seed * 10 + i, MIB), &pool)).collect();
        let tensor = device(&mem, &pattern(seed, 4 * MIB));
        for _ in 0..4 {
            let direction = [Direction::Load, Direction::Save][next(2) as usize];
            let policy = [
                BOUNCE,
                Policy::AtLeast(Tier::BounceTcp),
                Policy::Prefer,
                Policy::Require(Tier::Pageable),
            ][next(4) as usize];
            // Places that do not overlap: one for each range.
            let all: Vec<Transfer> = (0..next(6))
                .map(|i| {
                    let len = next(400 * KIB);
                    let offset = i % 2 * 512 * KIB + next(100 * KIB);
                    Transfer {
                        file: files[(i / 2) as usize].clone(),
                        offset,
                        gpu: tensor + i * 600 * KIB + next(1000),
                        len,
                    }
                })
                .collect();
            match next(5) {
                0 => mem.fail_pinned_after(next(8), driver_error()),
                1 => mem.fail_after(next(8), driver_error()),
                _ => mem.mend(),
            }
            bridge.self_test().await;
            let before = mem.copied();
            let models: Vec<Vec<u8>> = files.iter().map(|f| f.bytes.lock().clone()).collect();
            let outcome = match direction {
                Direction::Load => bridge.load(&all, policy).await,
                Direction::Save => bridge.save(&all, policy).await,
            };
            let (report, done) = match outcome {
                Ok(r) => (r, true),
                Err(f) => (*f.report, false),
            };
            assert_eq!(report.moved(), report.ranges.iter().sum::<u64>());
            let now = mem.copied();
            let pageable =
                now.load_pageable - before.load_pageable + now.save_pageable - before.save_pageable;
            assert!(report.by_tier[Tier::Pageable] <= pageable);
            if !policy.allows(Tier::Pageable) {
                assert_eq!(pageable, 0);
            }
            if !done {
                continue;
            }
            for t in &all {
                let (i, at, n) = (t.file.id() as usize, t.offset as usize, t.len as usize);
                let (device, file) =
                    (mem.peek(t.gpu, t.len).unwrap(), files[i].bytes.lock()[at..at + n].to_vec());
                assert!(device == file, "seed {seed}");
                assert!(direction == Direction::Save || file == models[i][at..at + n]);
            }
        }
    }
}

#[tokio::test]
async fn reports_say_how_far_bytes_were_verified() {
    let open = async |mem: &FakeGpu, verify_on_gpu| {
        mem.limit_pins(1 << 30);
        let options = Options {
            workers: 2,
            slots: 2,
            slot_bytes: 256 << 10,
            verify_on_gpu,
            ..Options::default()
        };
        let options = Options { pinned_limit: Some(1 << 30), ..options };
        let pool = Pool::new(64 << 20);
        (Bridge::open(Arc::new(mem.clone()), Arc::new(pool.clone()), options).await.unwrap(), pool)
    };
    let (mem, with) = (FakeGpu::new(), FakeGpu::new());
    with.play_sums();
    for (mem, asked, want, why) in [
        (&mem, false, Checksums::Host, Some("it was not requested")),
        (&mem, true, Checksums::Host, Some("there is no GPU")),
        (&with, false, Checksums::Host, Some("it was not requested")),
        (&with, true, Checksums::Gpu, None),
    ] {
        let (bridge, pool) = open(mem, asked).await;
        let file = Ram::new(1, pattern(1, MIB + 1), &pool);
        let tensor = device(mem, &vec![0; (1 << 20) + 1]);
        let all = [whole(&file, tensor)];
        for r in [
            bridge.load(&all, Policy::Prefer).await.unwrap(),
            bridge.save(&all, Policy::Prefer).await.unwrap(),
        ] {
            assert_eq!(r.checksums, want, "{r}");
            assert_eq!(r.not_on_gpu.is_some(), why.is_some());
            assert!(why.is_none_or(|w| r.not_on_gpu.as_ref().unwrap().contains(w)), "{r}");
            assert_eq!(serde_json::to_value(&r).unwrap()["checksums"], want.to_string());
        }
        assert_eq!(bridge.load(&[], Policy::Prefer).await.unwrap().checksums, Checksums::None);
        // One bit flips on the way to the device. Only device checksums find it.
        mem.corrupt_after(2);
        let r = bridge.load(&all, BOUNCE).await;
        match want {
            Checksums::Gpu => assert_eq!(r.unwrap_err().error.code, Code::Corrupt),
            _ => assert_eq!(r.unwrap().moved(), MIB + 1),
        }
    }
}
