//! One suite for every device.

use std::sync::Arc;

use futures_util::future::join_all;
use strake_fabric::{Buf, BufMut, Pool};
use strake_proto::Code;

use super::*;

const SIZE: u64 = 8 << 20;

fn fill(pool: &Pool, len: usize, with: impl Fn(usize) -> u8) -> BufMut {
    let mut b = pool.get_now(len);
    b.iter_mut().enumerate().for_each(|(i, x)| *x = with(i));
    b
}

async fn read(d: &dyn Device, pool: &Pool, offset: u64, len: usize) -> Vec<u8> {
    d.read(offset, pool.get_now(len)).await.unwrap().to_vec()
}

async fn conformance(d: Arc<dyn Device>) {
    let pool = Pool::default();
    assert_eq!(d.capacity(), SIZE);
    assert!(!d.name().is_empty());
    // What was never written reads as something, in full.
    assert_eq!(read(&*d, &pool, SIZE - 4096, 4096).await.len(), 4096);

    // Vectored writes, whole or in odd pieces, land one after the other.
    let whole = fill(&pool, 3 * 4096, |i| (i / 7) as u8).freeze();
    d.write(4096, vec![whole.slice(0..4096), whole.slice(4096..12288)]).await.unwrap();
    assert_eq!(read(&*d, &pool, 4096, 12288).await, whole.to_vec());
    let odd = [0..1, 1..5000, 5000..5001, 5001..12288].map(|r| Buf::copy_from(&whole[r]));
    d.write(1 << 20, odd.to_vec()).await.unwrap();
    assert_eq!(read(&*d, &pool, 1 << 20, 12288).await, whole.to_vec());
    let many: Vec<Buf> = (0..1500).map(|i| fill(&pool, 4096, |_| i as u8).freeze()).collect();
    d.write(2 << 20, many).await.unwrap();
    for i in [0u64, 1023, 1024, 1499] {
        assert_eq!(read(&*d, &pool, (2 << 20) + i * 4096, 4096).await, vec![i as u8; 4096]);
    }

    // Concurrent operations, more than the device takes at a time, do not mix.
    join_all((0..1000u64).map(|i| {
        let (d, pool) = (&d, &pool);
        async move {
            let b = fill(pool, 4096, |n| (i as usize * 31 + n) as u8).freeze();
            d.write(i * 4096, vec![b.clone()]).await.unwrap();
            assert_eq!(d.read(i * 4096, pool.get_now(4096)).await.unwrap()[..], b[..]);
        }
    }))
    .await;
    d.flush().await.unwrap();

    for (offset, len) in [(0, 0), (1, 4096), (0, 100), (SIZE, 4096), (SIZE - 4096, 8192), (u64::MAX - 4095, 4096)] {
        assert_eq!(d.read(offset, pool.get_now(len)).await.unwrap_err().code, Code::Inval, "{offset} {len}");
        let buf = pool.get_now(len).freeze();
        assert_eq!(d.write(offset, vec![buf]).await.unwrap_err().code, Code::Inval, "{offset} {len}");
    }

    // Abandoned operations end, and a flush waits for them; the device serves on.
    for i in 0..50 {
        let op = d.write(i * 4096, vec![fill(&pool, 4096, |_| 1).freeze()]);
        let _ = tokio::time::timeout(std::time::Duration::ZERO, op).await;
        let op = d.read(i * 4096, pool.get_now(4096));
        let _ = tokio::time::timeout(std::time::Duration::ZERO, op).await;
    }
    d.flush().await.unwrap();
    d.discard(0, 1 << 20).await.unwrap();
    d.write(0, vec![whole.clone()]).await.unwrap();
    d.flush().await.unwrap();
    assert_eq!(read(&*d, &pool, 0, 12288).await, whole.to_vec());
}

fn file(dir: &tempfile::TempDir) -> std::path::PathBuf {
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
    conformance(Arc::new(MemDevice::new(SIZE))).await;
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
    // Opening picks one that works in any case.
    conformance(open(&path).unwrap()).await;
}

/// Whether this process has CAP_IPC_LOCK, or a limit that these tests do not reach.
fn may_lock_much() -> bool {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_owned();
        line.split_whitespace().next().unwrap().to_owned()
    };
    let capable = u64::from_str_radix(&field("/proc/self/status", "CapEff:"), 16).unwrap() >> 14 & 1 == 1;
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
        // A pool that goes while the ring still knows its region: the next one's must not be taken for it.
        let pool = Pool::new(8 << 20);
        let data = fill(&pool, 65536, |i| (i as u64 * round) as u8).freeze();
        d.write(0, vec![data.clone()]).await.unwrap();
        assert_eq!(read(&d, &pool, 0, 65536).await, data.to_vec());
        if d.fixed_operations() < 2 * round {
            // An ordinary user may lock 8 MiB, which other tests use too. Reads and writes went on without.
            assert!(!may_lock_much(), "registered {} of {round} regions", d.fixed_operations() / 2);
            return eprintln!("not run to the end: the limit of locked memory is reached");
        }
        assert_eq!(d.fixed_operations(), 2 * round);
    }
    // Memory that belongs to no pool, and pieces in several buffers, go the plain way.
    let (a, b) = (Buf::copy_from(&[1; 4096]), Buf::copy_from(&[2; 4096]));
    d.write(0, vec![a]).await.unwrap();
    d.write(4096, vec![b.clone(), b]).await.unwrap();
    assert_eq!(d.fixed_operations(), 6);
    assert_eq!(read(&d, &Pool::new(1 << 20), 4096, 4096).await, [2; 4096]);
}

/// A ramfs, unmounted when dropped: a file system without direct I/O.
struct Ramfs(tempfile::TempDir);

impl Drop for Ramfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_system_without_direct_io_is_used_through_the_page_cache() {
    let dir = tempfile::tempdir().unwrap();
    let mount = std::process::Command::new("mount").args(["-t", "ramfs", "none"]).arg(dir.path()).status();
    if !mount.is_ok_and(|s| s.success()) {
        return eprintln!("not run: mounting a ramfs needs root");
    }
    let fs = Ramfs(dir);
    let path = file(&fs.0);
    let devices = [Arc::new(FileDevice::open(&path).unwrap()) as Arc<dyn Device>, open(&path).unwrap()];
    for d in devices {
        assert!(!d.direct());
        let pool = Pool::default();
        // Pieces that direct I/O could not take.
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
    let e = open(std::path::Path::new("/dev/null")).err().unwrap();
    assert!(e.code == Code::Inval && e.message.contains("neither"), "{e}");
}

#[tokio::test]
async fn a_file_cut_short_is_an_error_not_zeros() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let pool = Pool::default();
    let devices = [Some(Arc::new(FileDevice::open(&path).unwrap()) as Arc<dyn Device>), open(&path).ok()];
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
    d.set_latency(mem::OPS, std::time::Duration::from_millis(5));
    let start = tokio::time::Instant::now();
    d.flush().await.unwrap();
    assert_eq!(start.elapsed().as_millis(), 5);
    assert_eq!(d.counters().write_bytes, 8192);
}
