//! Parts of sealed files read by cuFile from copies on this node. A stand-in of cuFile reads them;
//! the tests make it fail and report wrong results.

use std::{
    collections::HashMap,
    fs::{self, File},
    os::unix::fs::{FileExt, PermissionsExt},
    sync::Arc,
    time::Duration,
};

use crate::ram::*;
use parking_lot::Mutex;
use strake_fabric::{Pool, Transport};
use strake_fake_gpu::{FakeGpu, Trick};
use strake_gds::{
    Bridge, Checksum, Checksums, Fault, FileIo, GpuMem, Network, Options, Policy, Report, Tier,
    Transfer, Unavailable,
    local::{self, Header, Making, Sealed},
    plan::Standing,
};
use strake_proto::{Code, Error, Result};

const LOCAL: Policy = Policy::Require(Tier::LocalGds);

/// A client that knows how files are sealed. The cluster's files are slow, so that copies on this
/// node are the fastest.
struct Cluster {
    pool: Pool,
    sealed: Mutex<HashMap<u64, Sealed>>,
}

#[async_trait::async_trait]
impl Network for Cluster {
    fn pool(&self) -> &Pool {
        &self.pool
    }
    fn no_rdma(&self) -> Option<String> {
        Some("there is no device".into())
    }
    async fn sealed(&self, ino: u64) -> Result<Option<Sealed>> {
        Ok(self.sealed.lock().get(&ino).cloned())
    }
    async fn scratch(&self) -> Result<Arc<dyn FileIo>> {
        let slow = |n: u64| {
            // Each part is written, then read.
            std::thread::sleep(Duration::from_millis(500 * (n % 2)));
            Ok(())
        };
        Ok(Ram::with(99, Vec::new(), &self.pool, slow))
    }
}

struct Rig {
    mem: FakeGpu,
    cluster: Arc<Cluster>,
    dir: tempfile::TempDir,
}

impl Rig {
    /// A device that can compute checksums.
    fn new() -> Rig {
        let rig = Rig::without_sums();
        rig.mem.play_sums();
        rig
    }

    fn without_sums() -> Rig {
        let mem = FakeGpu::new();
        mem.limit_pins(1 << 30);
        let cluster = Arc::new(Cluster { pool: Pool::new(64 << 20), sealed: Mutex::default() });
        Rig { mem, cluster, dir: tempfile::tempdir().unwrap() }
    }

    fn options(&self) -> Options {
        let local = Some(self.dir.path().to_path_buf());
        Options {
            workers: 3,
            slots: 2,
            slot_bytes: 256 << 10,
            pinned_limit: Some(1 << 30),
            local,
            ..Options::default()
        }
    }

    async fn bridge(&self) -> Bridge {
        let bridge = Bridge::open(Arc::new(self.mem.clone()), self.cluster.clone(), self.options())
            .await
            .unwrap();
        ranked(&bridge).await;
        bridge
    }

    /// A sealed file of the cluster. Reading it from the cluster is an error unless `readable`.
    fn sealed(&self, ino: u64, bytes: Vec<u8>, readable: bool) -> Arc<Ram> {
        let sealed = Sealed {
            fs: [7; 16],
            ino,
            size: bytes.len() as u64,
            sha256: [1; 32],
            root: [ino as u8; 32],
        };
        self.cluster.sealed.lock().insert(ino, sealed);
        let read = move |_| {
            if readable {
                Ok(())
            } else {
                Err(Error::new(Code::Io, "it was read from the cluster"))
            }
        };
        Ram::with(ino, bytes, &self.cluster.pool, read)
    }

    fn stage(&self, f: &Ram) -> std::path::PathBuf {
        let sealed = self.cluster.sealed.lock()[&f.id()].clone();
        let path = self.dir.path().join(format!("{}.copy", sealed.name()));
        let mut m =
            Making::begin(self.dir.path(), Header { sealed, staged_ns: 1, path: "/f".into() })
                .unwrap();
        f.bytes.lock().chunks(1 << 20).for_each(|b| m.push(b).unwrap());
        assert!(m.publish().unwrap());
        path
    }
}

/// Repeats the self-test until copies are the fastest tier, if they can be used at all: on a busy
/// machine a self-test may be slow.
async fn ranked(bridge: &Bridge) {
    let slower = || {
        let all = bridge.standings();
        let load = |t| if let Standing::Available(m) = &all[t] { Some(m.load) } else { None };
        load(Tier::LocalGds)
            .is_some_and(|n| Tier::ALL.into_iter().filter_map(load).any(|other| other > n))
    };
    for _ in 0..100 {
        if !slower() {
            return;
        }
        bridge.self_test().await;
    }
    panic!("{:?}", bridge.standings());
}

#[track_caller]
fn adds_up(r: &Report) {
    assert_eq!((r.by_tier.sum(), r.by_transport.sum()), (r.moved(), r.moved()), "{r}");
    assert_eq!(r.ranges.iter().sum::<u64>(), r.moved());
    assert!(r.by_transport[Transport::Local] >= r.by_tier[Tier::LocalGds], "{r}");
}

fn flip(path: &std::path::Path, at: u64) {
    let f = File::options().read(true).write(true).open(path).unwrap();
    let mut b = [0];
    f.read_exact_at(&mut b, at).unwrap();
    f.write_all_at(&[b[0] ^ 4], at).unwrap();
    f.sync_all().unwrap();
}

#[tokio::test]
async fn ranges_of_copies_arrive_without_the_cluster_and_the_device_verifies_them() {
    let rig = Rig::new();
    let data = pattern(1, 2 * MIB + 12_345);
    let (f, g) = (rig.sealed(1, data.clone(), false), rig.sealed(2, pattern(2, 100), false));
    rig.stage(&f);
    rig.stage(&g);
    let bridge = rig.bridge().await;
    let to = rig.mem.alloc(8 * MIB).unwrap();
    let at = |f: &Arc<Ram>, offset, to, len| Transfer { file: f.clone(), offset, gpu: to, len };
    let all = [
        at(&f, 0, to, MIB),
        // Not aligned to blocks at either end, and with another alignment than in the file.
        at(&f, MIB + 1000, to + 2 * MIB + 3, MIB + 11_345),
        at(&f, 5000, to + 4 * MIB, 100),
        at(&f, 4000, to + 5 * MIB, 200),
        at(&g, 3, to + 6 * MIB, 97),
        at(&g, 0, to, 0),
    ];
    let reads = rig.mem.tricks().reads();
    let r = bridge.load(&all, LOCAL).await.unwrap();
    adds_up(&r);
    assert!(
        r.is_all(Tier::LocalGds)
            && r.by_transport[Transport::Local] == r.asked
            && r.switches.is_empty(),
        "{r}"
    );
    assert_eq!(
        (r.checksum, r.checksums, &r.not_on_gpu),
        (Some(Checksum::OnGpu), Checksums::Gpu, &None)
    );
    // Only the partial blocks at the ends of a range are staged.
    assert!(r.staged >= 100 + 200 + 97 && r.staged < 100 + 200 + 97 + 2 * 4096, "{r}");
    // 4 parts of a range, and 5 or 6 of the other.
    assert!((8..=12).contains(&(rig.mem.tricks().reads() - reads)));
    for t in &all {
        let want = pattern(t.file.id(), if t.file.id() == 1 { data.len() as u64 } else { 100 });
        assert!(rig.mem.peek(t.gpu, t.len).unwrap() == want[t.offset as usize..][..t.len as usize]);
    }
    assert_eq!(rig.mem.peek(to + 2 * MIB, 3).unwrap(), [0xee; 3], "a gap stays as it is");
    // Behind the end of the file.
    let e = bridge.load(&[at(&g, 50, to, 51)], LOCAL).await.unwrap_err();
    assert!(
        e.error.code == Code::Io && e.error.message.contains("the file ends after 100 bytes"),
        "{e}"
    );
    // The local tier cannot save.
    let e = bridge.save(&[at(&f, 0, to, 100)], LOCAL).await.unwrap_err();
    assert!(
        e.error.code == Code::OpNotSupp && e.error.message.contains("nothing can be saved to them"),
        "{e}"
    );
}

#[tokio::test]
async fn without_the_devices_sums_it_takes_consent_and_the_report_says_so() {
    let rig = Rig::without_sums();
    let f = rig.sealed(1, pattern(1, MIB), false);
    rig.stage(&f);
    let to = rig.mem.alloc(MIB).unwrap();
    let e = rig.bridge().await.load(&[whole(&f, to)], LOCAL).await.unwrap_err();
    assert!(
        e.error.code == Code::OpNotSupp && e.error.message.contains("accept_oss_checksum"),
        "{e}"
    );
    let options = Options { accept_oss_checksum: true, ..rig.options() };
    let bridge =
        Bridge::open(Arc::new(rig.mem.clone()), rig.cluster.clone(), options).await.unwrap();
    let r = bridge.load(&[whole(&f, to)], LOCAL).await.unwrap();
    adds_up(&r);
    assert!(r.is_all(Tier::LocalGds) && r.checksum == Some(Checksum::AtOssOnly), "{r}");
    assert!(r.not_on_gpu.is_some() && rig.mem.peek(to, MIB).unwrap() == pattern(1, MIB));
}

#[tokio::test]
async fn a_device_without_room_for_sums_makes_the_tier_rest_or_takes_consent() {
    let rig = Rig::new();
    let f = rig.sealed(1, pattern(1, MIB), true);
    rig.stage(&f);
    let bridge = rig.bridge().await;
    let options = Options { accept_oss_checksum: true, ..rig.options() };
    let agreed =
        Bridge::open(Arc::new(rig.mem.clone()), rig.cluster.clone(), options).await.unwrap();
    let to = rig.mem.alloc(MIB).unwrap();
    // Whole blocks, and ends within one.
    for part in [whole(&f, to), Transfer { file: f.clone(), offset: 100, gpu: to, len: 200 }] {
        rig.mem.limit_room(MIB + 4095);
        let r = agreed.load(std::slice::from_ref(&part), LOCAL).await.unwrap();
        adds_up(&r);
        assert!(r.is_all(Tier::LocalGds) && r.checksum == Some(Checksum::AtOssOnly), "{r}");
        assert!(r.not_on_gpu.as_ref().unwrap().contains("did not sum all of the data"), "{r}");
        let failed = bridge.load(std::slice::from_ref(&part), LOCAL).await.unwrap_err();
        assert!(
            failed.error.message.contains("could not sum its memory") && failed.report.moved() == 0,
            "{failed}"
        );
        // Other calls skip the tier from now on, without a self-test.
        let reads = rig.mem.tricks().reads();
        let r = bridge.load(std::slice::from_ref(&part), Policy::Prefer).await.unwrap();
        assert!(
            r.by_tier[Tier::LocalGds] == 0
                && r.switches.is_empty()
                && reads == rig.mem.tricks().reads(),
            "{r}"
        );
        let rests = |why: &Unavailable| matches!(why, Unavailable::Resting(Fault::Sums { .. }));
        assert!(r.unavailable.iter().any(|(t, why)| *t == Tier::LocalGds && rests(why)), "{r}");
        // A call that allows only this tier tries it; after its success other calls use the tier
        // again.
        rig.mem.limit_room(64 * MIB);
        assert!(
            bridge.load(std::slice::from_ref(&part), LOCAL).await.unwrap().is_all(Tier::LocalGds)
        );
        assert!(
            bridge
                .load(std::slice::from_ref(&part), Policy::Prefer)
                .await
                .unwrap()
                .is_all(Tier::LocalGds)
        );
    }
}

/// Every fault that cuFile may show in the middle of a call.
async fn no_lie_of_cufile_counts_and_strict_calls_never_degrade() {
    let size = 3 * MIB + 77;
    for (trick, words) in [
        (Trick::Positive(5006), "returned like a number of bytes"),
        (Trick::Fails(5008), "cuFileRead failed with -5008"),
        (Trick::Errno(5008), "cuFileRead failed with -1: errno 5008, an error code of cuFile"),
        (Trick::Errno(5024), "cuFileRead failed with -1: errno 5024, an error code of cuFile"),
        (Trick::Errno(libc::ENXIO), "No such device or address"),
        (Trick::NoCounters, "cuFileGetStatsL3 failed with 5030"),
        (Trick::Short, "were requested"),
        (Trick::Posix, "cuFile did not read"),
        (Trick::Uncounted, "cuFile did not read"),
        (Trick::Flips, "their CRC32Cs differ"),
    ] {
        let rig = Rig::new();
        let f = rig.sealed(1, pattern(1, size), true);
        rig.stage(&f);
        let bridge = rig.bridge().await;
        let to = rig.mem.alloc(size).unwrap();
        let tricks = rig.mem.tricks();
        for policy in [LOCAL, Policy::AtLeast(Tier::LocalGds)] {
            tricks.play(4, Some(trick));
            let before = rig.mem.copied();
            let failed = bridge.load(&[whole(&f, to)], policy).await.unwrap_err();
            adds_up(&failed.report);
            assert_eq!(failed.error.code.errno(), libc::EIO, "{failed}");
            assert!(failed.error.message.contains(words), "{trick:?}: {failed}");
            let r = &failed.report;
            assert!(
                r.moved() > 0 && r.moved() < size && r.moved() == r.by_tier[Tier::LocalGds],
                "{trick:?}: {r}"
            );
            // The device copied only the ends of parts.
            let now = rig.mem.copied();
            let copied =
                now.load_pinned + now.load_pageable - before.load_pinned - before.load_pageable;
            assert!(copied < 4096, "{trick:?}: {copied}");
            tricks.play(0, None);
            // The next call runs the self-test and finds the tier available again.
            let r = bridge.load(&[whole(&f, to)], policy).await.unwrap();
            assert!(
                r.is_all(Tier::LocalGds) && rig.mem.peek(to, size).unwrap() == pattern(1, size),
                "{r}"
            );
        }
        // A call that allows other tiers continues with one. After a checksum mismatch it fails,
        // because it is unknown which side is wrong.
        ranked(&bridge).await;
        tricks.play(4, Some(trick));
        let outcome = bridge.load(&[whole(&f, to)], Policy::Prefer).await;
        if trick == Trick::Flips {
            assert_eq!(outcome.unwrap_err().error.code, Code::Corrupt);
            continue;
        }
        let r = outcome.unwrap();
        adds_up(&r);
        assert!(
            r.by_tier[Tier::LocalGds] > 0 && r.by_tier[Tier::LocalGds] < size,
            "{trick:?}: {r}"
        );
        assert!(
            r.by_transport[Transport::Local] == r.by_tier[Tier::LocalGds]
                && r.switches[0].from == Tier::LocalGds,
            "{r}"
        );
        assert!(r.switches[0].why.to_string().contains(words), "{r}");
        assert!(rig.mem.peek(to, size).unwrap() == pattern(1, size));
    }
}

#[tokio::test]
async fn a_damaged_copy_is_never_returned_nor_used_again() {
    let size = 2 * MIB + 77;
    // In the middle of a part, and in the last block.
    for at in [MIB + 5, 2 * MIB + 70] {
        let rig = Rig::new();
        let f = rig.sealed(1, pattern(1, size), true);
        let g = rig.sealed(2, pattern(2, MIB), false);
        let (path, _) = (rig.stage(&f), rig.stage(&g));
        let bridge = rig.bridge().await;
        let to = rig.mem.alloc(4 * MIB).unwrap();
        flip(&path, at);
        let failed = bridge.load(&[whole(&f, to)], LOCAL).await.unwrap_err();
        adds_up(&failed.report);
        assert_eq!(failed.error.code.errno(), libc::EIO, "{failed}");
        assert!(
            failed.error.message.contains("is damaged from byte")
                && failed.error.message.contains("set aside")
        );
        assert!(!path.exists() && path.with_extension("damaged").exists());
        let e = bridge.load(&[whole(&f, to)], LOCAL).await.unwrap_err();
        assert!(
            e.error.code == Code::OpNotSupp && e.error.message.contains("has no copy on this node"),
            "{e}"
        );
        // The tier still works for other files.
        assert!(bridge.load(&[whole(&g, to)], LOCAL).await.unwrap().is_all(Tier::LocalGds));

        rig.stage(&f);
        flip(&path, at);
        let r = bridge.load(&[whole(&f, to)], Policy::Prefer).await.unwrap();
        adds_up(&r);
        assert!(
            matches!(&r.switches[0].why, Unavailable::Lost(Fault::BadCopy { aside: true, .. })),
            "{r}"
        );
        assert!(
            r.by_tier[Tier::LocalGds] < size && rig.mem.peek(to, size).unwrap() == pattern(1, size),
            "{r}"
        );
        assert!(
            local::list(rig.dir.path()).unwrap().iter().any(|c| c.inode == Some(1) && !c.usable)
        );
        let r = bridge.load(&[whole(&f, to)], Policy::Prefer).await.unwrap();
        assert!(
            r.by_tier[Tier::LocalGds] == 0 && rig.mem.peek(to, size).unwrap() == pattern(1, size),
            "{r}"
        );
        assert!(
            r.unavailable.iter().any(|(t, why)| *t == Tier::LocalGds && why.kind() == "no-copy"),
            "{r}"
        );
    }
}

#[tokio::test]
async fn files_without_a_copy_take_other_tiers_or_fail_before_a_byte_moves() {
    let rig = Rig::new();
    let (f, g) = (rig.sealed(1, pattern(1, MIB), false), rig.sealed(2, pattern(2, MIB), true));
    let open = Ram::new(3, pattern(3, MIB), &rig.cluster.pool);
    rig.stage(&f);
    let bridge = rig.bridge().await;
    let to = rig.mem.alloc(4 * MIB).unwrap();
    for (other, word, kind) in
        [(&g, "has no copy", "no-copy"), (&open, "is not sealed", "not-sealed")]
    {
        let both = [whole(&f, to), whole(other, to + 2 * MIB)];
        for policy in [LOCAL, Policy::AtLeast(Tier::LocalGds)] {
            for all in [&both[1..], &both[..]] {
                let e = bridge.load(all, policy).await.unwrap_err();
                assert!(e.error.code == Code::OpNotSupp && e.error.message.contains(word), "{e}");
                assert_eq!(e.report.moved(), 0);
            }
        }
        let r = bridge.load(&both, Policy::Prefer).await.unwrap();
        adds_up(&r);
        assert_eq!((r.by_tier[Tier::LocalGds], r.by_transport[Transport::Tcp]), (MIB, MIB), "{r}");
        assert!(r.switches.is_empty(), "nothing failed: {r}");
        assert!(
            r.unavailable.iter().any(|(t, why)| *t == Tier::LocalGds && why.kind() == kind),
            "{r}"
        );
        assert!(rig.mem.peek(to + 2 * MIB, MIB).unwrap() == pattern(other.id(), MIB));
    }
    // When the file is sealed again with other content, the old copy does not belong to it. An
    // unsealed file has no copy at all.
    rig.cluster.sealed.lock().get_mut(&1).unwrap().root = [9; 32];
    assert!(
        bridge
            .load(&[whole(&f, to)], LOCAL)
            .await
            .unwrap_err()
            .error
            .message
            .contains("has no copy")
    );
    rig.cluster.sealed.lock().remove(&1);
    assert!(
        bridge
            .load(&[whole(&f, to)], LOCAL)
            .await
            .unwrap_err()
            .error
            .message
            .contains("is not sealed")
    );
}

#[tokio::test]
async fn the_self_test_tells_why_there_is_no_such_tier() {
    let standing = async |rig: &Rig| match rig.bridge().await.standings()[Tier::LocalGds].clone() {
        Standing::Available(m) => panic!("{m:?}"),
        Standing::Unavailable(why) => why,
    };
    for trick in [
        Trick::Positive(5006),
        Trick::Fails(1),
        Trick::Errno(5024),
        Trick::Short,
        Trick::Posix,
        Trick::Uncounted,
        Trick::NoCounters,
        Trick::Flips,
    ] {
        let rig = Rig::new();
        rig.mem.tricks().play(0, Some(trick));
        let why = standing(&rig).await;
        assert!(matches!(why, Unavailable::TestStopped(_)), "{trick:?}: {why}");
        let bridge = rig.bridge().await;
        rig.mem.tricks().play(0, None);
        let s = bridge.self_test().await;
        let Standing::Available(m) = s[Tier::LocalGds] else { panic!("{s:?}") };
        assert!(m.load > 0.0 && m.save == 0.0);
    }
    // Without device checksums the self-test finds the damage by reading back.
    let rig = Rig::without_sums();
    rig.mem.tricks().play(0, Some(Trick::Flips));
    let why = standing(&rig).await;
    assert!(matches!(why, Unavailable::TestFailed { .. }), "{why}");

    let rig = Rig::new();
    fs::set_permissions(rig.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let why = standing(&rig).await;
    assert!(why.kind() == "bad-folder" && why.to_string().contains("chmod go-w"), "{why}");
    fs::remove_dir(rig.dir.path()).unwrap();
    assert_eq!(standing(&rig).await.kind(), "bad-folder");
    let rig = Rig::new();
    rig.mem.refuse(Tier::LocalGds, Some(Unavailable::NoModules { why: "/proc/modules".into() }));
    assert_eq!(standing(&rig).await.kind(), "no-modules");
    // No folder for copies was named.
    let e = bridge(1 << 30).await.2.standings()[Tier::LocalGds].clone();
    assert_eq!(e, Standing::Unavailable(Unavailable::NoFolder));
    assert_eq!(fs::read_dir(Rig::new().dir.path()).unwrap().count(), 0);
}

/// cuFile 1.15 refuses files like this on FUSE and on disks that it does not support.
#[tokio::test]
async fn files_that_cufile_refuses_have_no_such_path() {
    let rig = Rig::new();
    let f = rig.sealed(1, pattern(1, MIB), true);
    rig.stage(&f);
    let bridge = rig.bridge().await;
    let to = rig.mem.alloc(MIB).unwrap();
    let (tricks, words) = (rig.mem.tricks(), "cuFileHandleRegister failed with 5027");
    // Only the file of a copy is refused, after the self-test.
    tricks.refuse_files(Some(5027));
    let e = bridge.load(&[whole(&f, to)], LOCAL).await.unwrap_err();
    assert!(
        e.error.code == Code::OpNotSupp && e.error.message.contains(words) && e.report.moved() == 0,
        "{e}"
    );
    let r = bridge.load(&[whole(&f, to)], Policy::Prefer).await.unwrap();
    adds_up(&r);
    assert!(
        r.by_tier[Tier::LocalGds] == 0 && rig.mem.peek(to, MIB).unwrap() == pattern(1, MIB),
        "{r}"
    );
    let told = |why: &Unavailable| why.kind() == "no-copy" && why.to_string().contains(words);
    assert!(r.unavailable.iter().any(|(t, why)| *t == Tier::LocalGds && told(why)), "{r}");
    // Now the self-test's own file is refused.
    let s = bridge.self_test().await;
    let Standing::Unavailable(why @ Unavailable::TestStopped(_)) = &s[Tier::LocalGds] else {
        panic!("{s:?}")
    };
    assert!(why.to_string().contains(words), "{why}");
    tricks.refuse_files(None);
    bridge.self_test().await;
    assert!(bridge.load(&[whole(&f, to)], LOCAL).await.unwrap().is_all(Tier::LocalGds));
}

/// This happens while a read is under way. The read still ends, because the real cuFile has the
/// memory pinned. With device checksums and without.
#[tokio::test]
async fn memory_that_is_freed_or_a_context_that_is_destroyed_in_mid_call_ends_it() {
    for (destroy, sums, policy) in [
        (false, true, LOCAL),
        (false, false, LOCAL),
        (true, true, LOCAL),
        (true, false, LOCAL),
        (false, false, Policy::Prefer),
        (true, false, Policy::Prefer),
    ] {
        let rig = if sums { Rig::new() } else { Rig::without_sums() };
        let f = rig.sealed(1, pattern(1, 2 * MIB), true);
        rig.stage(&f);
        let options = Options { accept_oss_checksum: true, ..rig.options() };
        let bridge =
            Bridge::open(Arc::new(rig.mem.clone()), rig.cluster.clone(), options).await.unwrap();
        ranked(&bridge).await;
        let to = rig.mem.alloc(2 * MIB).unwrap();
        let tricks = rig.mem.tricks();
        tricks.play(0, Some(Trick::Hangs));
        let begun = tricks.reads();
        let (b, all) = (bridge.clone(), [whole(&f, to)]);
        let call = tokio::spawn(async move { b.load(&all, policy).await });
        while tricks.reads() < begun + 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if destroy {
            rig.mem.destroy()
        } else {
            rig.mem.free(to).unwrap()
        }
        let before = rig.mem.copied();
        tricks.play(0, None);
        let failed = call.await.unwrap().unwrap_err();
        let what = format!("{destroy} {sums} {policy}: {failed}");
        adds_up(&failed.report);
        let want = if destroy {
            (Code::NoDev, "context is gone")
        } else {
            (Code::Inval, "memory that was freed")
        };
        assert!(failed.error.code == want.0 && failed.error.message.contains(want.1), "{what}");
        let r = &failed.report;
        assert!(r.moved() == 0, "what was read went where nobody has memory: {what}");
        assert!(
            r.switches.is_empty() && rig.mem.copied() == before,
            "no other tier is to blame, or to try: {what}"
        );
        if !destroy {
            let to = rig.mem.alloc(2 * MIB).unwrap();
            assert!(bridge.load(&[whole(&f, to)], LOCAL).await.unwrap().is_all(Tier::LocalGds));
        }
    }
}

#[tokio::test]
async fn a_read_that_does_not_end_is_left_behind_with_its_memory() {
    let rig = Rig::new();
    let tricks = rig.mem.tricks();
    tricks.play(0, Some(Trick::Hangs));
    let bridge = rig.bridge().await;
    let hung = Standing::Unavailable(Unavailable::Hung { seconds: 5 });
    assert_eq!(bridge.standings()[Tier::LocalGds], hung);
    // The self-test does not try the tier again: the hung read holds what every other read would
    // wait for.
    assert_eq!(bridge.self_test().await[Tier::LocalGds], hung);
    assert_eq!(tricks.reads(), 1);
    let f = rig.sealed(1, pattern(1, MIB), true);
    let to = rig.mem.alloc(MIB).unwrap();
    assert_eq!(
        bridge.load(&[whole(&f, to)], Policy::Prefer).await.unwrap().by_tier[Tier::LocalGds],
        0
    );
    drop(bridge);
    tricks.play(0, None);
}

/// The hung read blocks its own call, and other calls only for a while.
#[tokio::test]
async fn a_read_of_a_call_that_does_not_end_holds_no_other_call() {
    let rig = Rig::new();
    let f = rig.sealed(1, pattern(1, 2 * MIB), true);
    rig.stage(&f);
    let bridge = rig.bridge().await;
    let tricks = rig.mem.tricks();
    tricks.hurry(Duration::from_secs(2));
    let to = rig.mem.alloc(4 * MIB).unwrap();
    let load = |to, policy| {
        let (b, all) = (bridge.clone(), [whole(&f, to)]);
        tokio::spawn(async move { b.load(&all, policy).await })
    };
    tricks.play(2, Some(Trick::HangsOnce));
    let before = tricks.reads();
    let held = load(to, Policy::Prefer);
    while tricks.reads() < before + 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let failed = load(to + 2 * MIB, LOCAL).await.unwrap().unwrap_err();
    adds_up(&failed.report);
    assert!(failed.error.code == Code::Io && failed.to_string().contains("not ended"), "{failed}");
    // The bridge tests the tier, which also fails, and goes on without it.
    let r = load(to + 2 * MIB, Policy::Prefer).await.unwrap().unwrap();
    adds_up(&r);
    assert!(
        r.by_tier[Tier::LocalGds] == 0
            && rig.mem.peek(to + 2 * MIB, 2 * MIB).unwrap() == pattern(1, 2 * MIB),
        "{r}"
    );
    assert!(!held.is_finished());
    tricks.play(0, None);
    let r = held.await.unwrap().unwrap();
    adds_up(&r);
    assert!(
        r.moved() == 2 * MIB && rig.mem.peek(to, 2 * MIB).unwrap() == pattern(1, 2 * MIB),
        "{r}"
    );
    // When the read has ended, the tier is available again.
    tricks.hurry(Duration::from_secs(30));
    let s = bridge.self_test().await;
    assert!(matches!(s[Tier::LocalGds], Standing::Available(_)), "{s:?}");
    assert!(load(to, LOCAL).await.unwrap().unwrap().is_all(Tier::LocalGds));
}

#[tokio::test]
async fn a_call_that_is_dropped_waits_for_reads_that_began() {
    let rig = Rig::new();
    let f = rig.sealed(1, pattern(1, 2 * MIB), false);
    rig.stage(&f);
    let bridge = rig.bridge().await;
    let to = rig.mem.alloc(2 * MIB).unwrap();
    let tricks = rig.mem.tricks();
    tricks.play(2, Some(Trick::Hangs));
    let begun = tricks.reads();
    let (b, all) = (bridge.clone(), [whole(&f, to)]);
    let call = tokio::spawn(async move { b.load(&all, LOCAL).await.map(|_| ()) });
    while tricks.reads() < begun + 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    call.abort();
    let after = std::thread::spawn({
        let tricks = tricks.clone();
        move || {
            std::thread::sleep(Duration::from_millis(300));
            tricks.play(0, None);
        }
    });
    assert!(call.await.unwrap_err().is_cancelled());
    // The hung read and the reads that had begun beside it have ended, and no other begins: the
    // memory belongs to the caller again.
    let reads = tricks.reads();
    assert!((begun + 3..=begun + 5).contains(&reads), "{begun} {reads}");
    rig.mem.free(to).unwrap();
    after.join().unwrap();
    // The bridge's threads have ended after this.
    drop(bridge);
    assert_eq!(tricks.reads(), reads);
}

mod long {
    #[tokio::test]
    #[ignore = "long tier, 45 s: ./test --long"]
    async fn no_lie_of_cufile_counts_and_strict_calls_never_degrade() {
        super::no_lie_of_cufile_counts_and_strict_calls_never_degrade().await;
    }
}
