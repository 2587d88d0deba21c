//! The suite of [`conformance`] on every device, and tests of single devices.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use strake_fabric::{Buf, Pool};
use strake_proto::Code;

use super::{
    conformance::{SIZE, all, fill, power_cut, random_io, read},
    *,
};

/// The suite, and random operations from a random seed.
async fn conformance(d: Arc<dyn Device>) {
    all(d.clone()).await;
    random(d).await;
}

async fn random(d: Arc<dyn Device>) {
    let seed = rand::random();
    let name = d.name();
    let done = random_io(d, seed, Duration::from_secs(2)).await;
    eprintln!("{name}, seed {seed}: {done}");
    assert!(done.verified() > 1000, "{done}");
}

fn file(dir: &tempfile::TempDir) -> PathBuf {
    let path = dir.path().join("data");
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_is_discarded_at_once_than_is_ever_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    std::fs::File::create(&path).unwrap().set_len(3 << 30).unwrap();
    let pool = Pool::new(16 << 20);
    let mut devices: Vec<Arc<dyn Device>> = vec![Arc::new(FileDevice::open(&path).unwrap())];
    match UringDevice::open(&path, 4) {
        Ok(d) => devices.push(Arc::new(d)),
        Err(e) => eprintln!("not run: {e}"),
    }
    for d in devices {
        d.write(2 << 30, vec![fill(&pool, 4096, |_| 1).freeze()]).await.unwrap();
        d.discard(0, 3 << 30).await.unwrap();
        assert_eq!(read(&*d, &pool, 2 << 30, 4096).await, vec![0; 4096]);
    }
}

#[tokio::test]
async fn memory() {
    let d = Arc::new(MemDevice::new(SIZE));
    conformance(d.clone()).await;
    for seed in 0..16 {
        for tear in [mem::Tear::Block, mem::Tear::Sector] {
            power_cut(&*d, async || assert!(d.crash(seed, tear) >= 32)).await;
        }
    }
    d.power_off_after(0);
    let off = d.flush().await.unwrap_err();
    assert!(off.code == Code::Io && off.message.contains("power lost"), "{off}");
}

#[tokio::test]
#[should_panic(expected = "block")]
async fn a_device_that_forgets_its_flush_is_found_out() {
    let d = Arc::new(MemDevice::new(SIZE));
    d.skip_flush();
    for seed in 0..16 {
        power_cut(&*d, async || assert!(d.crash(seed, mem::Tear::Block) >= 32)).await;
    }
}

#[tokio::test]
// "is neither" for a block that is being written, "is not as written" for others.
#[should_panic(expected = "of memory device is")]
async fn a_device_with_a_wrong_bit_is_found_out() {
    let d = Arc::new(MemDevice::new(SIZE));
    let decay = d.clone();
    let decays = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        (0..SIZE / BLOCK).for_each(|block| decay.flip_bit(block * BLOCK + 77, 3));
    });
    random_io(d, 1, Duration::from_secs(1)).await;
    decays.await.unwrap();
}

/// A loop device on a file, gone when dropped.
struct Loop(PathBuf);

impl Loop {
    fn on(file: &Path) -> Option<Loop> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        match made {
            Ok(o) if o.status.success() => {
                Some(Loop(String::from_utf8(o.stdout).unwrap().trim().into()))
            }
            other => {
                eprintln!("not run: no loop device to be had ({other:?})");
                None
            }
        }
    }
}

/// A plain device on a loop device, then one with io_uring: only one at a time may have it open.
async fn on_loop(l: &Loop, test: impl AsyncFn(Arc<dyn Device>)) {
    test(Arc::new(FileDevice::open(&l.0).unwrap())).await;
    match crate::engine::open_device(&l.0).await {
        Ok(d) => test(d).await,
        Err(e) => panic!("{e}"),
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_device() {
    let dir = tempfile::tempdir().unwrap();
    let Some(l) = Loop::on(&file(&dir)) else { return };
    on_loop(&l, conformance).await;
}

/// A loop device whose file system is full: the kernel's errors of a block device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_block_device_fails_at_is_an_error_of_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let Some(fs) = Mount::new(dir, "tmpfs", "size=2m") else { return };
    let Some(l) = Loop::on(&file(&fs.0)) else { return };
    on_loop(&l, async |d| {
        let pool = Pool::default();
        let mut failed = None;
        for at in (0..SIZE).step_by(1 << 20) {
            let wrote = d.write(at, vec![fill(&pool, 1 << 20, |_| 1).freeze()]).await;
            let flushed = d.flush().await;
            failed = failed.or(wrote.err()).or(flushed.err());
        }
        let e = failed.unwrap();
        assert!(matches!(e.code, Code::Io | Code::NoSpc) && e.message.contains(&d.name()), "{e:?}");
        assert_eq!(read(&*d, &pool, 0, 4096).await, [1; 4096]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_file() {
    let dir = tempfile::tempdir().unwrap();
    conformance(Arc::new(FileDevice::open(&file(&dir)).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uring() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    for depth in [1, 7, uring::DEPTH] {
        match UringDevice::open(&path, depth) {
            Ok(d) => conformance(Arc::new(d)).await,
            Err(e) => eprintln!("not run: {e}"),
        }
    }
    // `open` picks one that works in any case.
    conformance(open(&path).unwrap()).await;
}

/// Whether this process has CAP_IPC_LOCK, or a limit that these tests do not reach.
fn may_lock_much() -> bool {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_owned();
        line.split_whitespace().next().unwrap().to_owned()
    };
    let capable =
        u64::from_str_radix(&field("/proc/self/status", "CapEff:"), 16).unwrap() >> 14 & 1 == 1;
    let limit = field("/proc/self/limits", "Max locked memory");
    capable || limit.parse().map_or(limit == "unlimited", |bytes: u64| bytes >= 1 << 30)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buffers_of_a_pool_are_registered_and_stay_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let d = match UringDevice::open(&file(&dir), 4) {
        Ok(d) => d,
        Err(e) => return eprintln!("not run: {e}"),
    };
    for round in 1..=3u64 {
        // A pool that is dropped while the ring still knows its region: the next pool's region must
        // not be taken for it.
        let pool = Pool::new(8 << 20);
        let data = fill(&pool, 65536, |i| (i as u64 * round) as u8).freeze();
        d.write(0, vec![data.clone()]).await.unwrap();
        assert_eq!(read(&d, &pool, 0, 65536).await, data.to_vec());
        if d.fixed_operations() < 2 * round {
            // An ordinary user may lock 8 MiB, which other tests use too. Reads and writes worked
            // without registered memory.
            assert!(!may_lock_much(), "registered {} of {round} regions", d.fixed_operations() / 2);
            return eprintln!("not run to the end: the limit of locked memory is reached");
        }
        assert_eq!(d.fixed_operations(), 2 * round);
    }
    // Memory outside of pools, and pieces in several buffers, are not registered.
    let (a, b) = (Buf::copy_from(&[1; 4096]), Buf::copy_from(&[2; 4096]));
    d.write(0, vec![a]).await.unwrap();
    d.write(4096, vec![b.clone(), b]).await.unwrap();
    assert_eq!(d.fixed_operations(), 6);
    assert_eq!(read(&d, &Pool::new(1 << 20), 4096, 4096).await, [2; 4096]);
}

/// A file system in memory, unmounted when dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(dir: tempfile::TempDir, kind: &str, options: &str) -> Option<Mount> {
        let mount = Command::new("mount")
            .args(["-t", kind, "-o", options, "none"])
            .arg(dir.path())
            .status();
        if !mount.is_ok_and(|s| s.success()) {
            eprintln!("not run: mounting a {kind} needs root");
            return None;
        }
        Some(Mount(dir))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_system_without_direct_io_is_used_through_the_page_cache() {
    let dir = tempfile::tempdir().unwrap();
    let Some(fs) = Mount::new(dir, "ramfs", "noatime") else { return };
    let path = file(&fs.0);
    let devices =
        [Arc::new(FileDevice::open(&path).unwrap()) as Arc<dyn Device>, open(&path).unwrap()];
    for d in devices {
        assert!(!d.direct());
        let pool = Pool::default();
        // Pieces that direct I/O cannot take.
        let data: Vec<u8> = (0..12_288u32).map(|i| (i % 251) as u8).collect();
        d.write(8192, vec![Buf::copy_from(&data[..5]), Buf::copy_from(&data[5..])]).await.unwrap();
        d.flush().await.unwrap();
        assert_eq!(read(&*d, &pool, 8192, 12_288).await, data);
    }
}

#[tokio::test]
async fn what_is_no_device_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(open(&dir.path().join("absent")).err().unwrap().code, Code::NoEnt);
    let e = open(Path::new("/dev/null")).err().unwrap();
    assert!(e.code == Code::Inval && e.message.contains("neither"), "{e}");
}

#[tokio::test]
async fn a_file_cut_short_is_an_error_not_zeros() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let pool = Pool::default();
    let devices =
        [Some(Arc::new(FileDevice::open(&path).unwrap()) as Arc<dyn Device>), open(&path).ok()];
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    for d in devices.into_iter().flatten() {
        assert!(d.read(2 << 20, pool.get_now(4096)).await.is_err());
        assert!(d.read((1 << 20) - 4096, pool.get_now(8192)).await.is_err());
        assert!(d.read(0, pool.get_now(4096)).await.is_ok());
    }
}

#[tokio::test]
async fn power_loss_keeps_what_was_flushed_and_any_part_of_the_rest() {
    let pool = Pool::default();
    let (mut old, mut new, mut torn) = (0, 0, 0);
    for seed in 0..64 {
        let d = MemDevice::new(SIZE);
        for value in [1u8, 2] {
            d.write(0, vec![fill(&pool, 4096, |_| value).freeze()]).await.unwrap();
            if value == 1 {
                d.flush().await.unwrap();
            }
        }
        d.power_off_after(0);
        assert_eq!(d.flush().await.unwrap_err().code, Code::Io);
        d.crash(seed, mem::Tear::Sector);
        let got = read(&d, &pool, 0, 4096).await;
        assert!(got.chunks(512).all(|s| s.iter().all(|b| *b == s[0] && (1..=2).contains(b))));
        match (got.contains(&1), got.contains(&2)) {
            (true, true) => torn += 1,
            (true, false) => old += 1,
            _ => new += 1,
        }
        let d2 = MemDevice::new(SIZE);
        d2.write(0, vec![fill(&pool, 8192, |_| 3).freeze()]).await.unwrap();
        d2.crash(seed, mem::Tear::Block);
        let got = read(&d2, &pool, 0, 8192).await;
        assert!(got.chunks(4096).all(|b| b.iter().all(|x| *x == b[0])));
    }
    assert!(torn > 40 && old + new < 24, "{old} {new} {torn}");
}

#[tokio::test(start_paused = true)]
async fn faults_and_latency_are_as_asked() {
    let d = MemDevice::new(SIZE);
    let pool = Pool::default();
    let block = fill(&pool, 4096, |_| 9).freeze();
    d.fail(mem::Op::Write, 1, Code::NoSpc);
    d.write(0, vec![block.clone()]).await.unwrap();
    assert_eq!(d.write(4096, vec![block.clone()]).await.unwrap_err().code, Code::NoSpc);
    d.write(4096, vec![block.clone()]).await.unwrap();
    d.flip_bit(5000, 3);
    let mut want = vec![9; 8192];
    want[5000] ^= 8;
    assert_eq!(read(&d, &pool, 0, 8192).await, want);
    d.set_latency(mem::OPS, Duration::from_millis(5));
    let start = tokio::time::Instant::now();
    d.flush().await.unwrap();
    assert_eq!(start.elapsed().as_millis(), 5);
    assert_eq!(d.counters().write_bytes, 8192);
}
