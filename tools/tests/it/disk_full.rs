//! Full disks under real processes: the caller gets the error, nothing is lost, freed space is
//! usable again.

use std::{
    fs::{self, File},
    io::{ErrorKind, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use crate::common::{strake, up};

const MIB: usize = 1 << 20;

/// A cluster of one metadata server and two storage servers with one small target each, mounted;
/// stopped when dropped.
struct Small {
    root: tempfile::TempDir,
    /// A separate small file system that the test mounted.
    tmpfs: Option<PathBuf>,
}

impl Small {
    fn new() -> Small {
        Small { root: tempfile::tempdir().unwrap(), tmpfs: None }
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }

    fn up(&self) {
        let out =
            up(1, 2).arg("--dir").arg(self.dir()).arg("--mount").arg(self.mnt()).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    /// What `strake status` says; an error unless every server answers and every chain is whole.
    fn status(&self) -> std::io::Result<String> {
        let out = strake().arg("status").arg("--dir").arg(self.dir()).output()?;
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        if out.status.success() { Ok(said) } else { Err(std::io::Error::other(said)) }
    }
    #[track_caller]
    fn is_in_service(&self) {
        self.status().unwrap();
    }
    /// Also checks that nothing is left over or missing, once removed files are deleted.
    #[track_caller]
    fn is_whole(&self) {
        self.is_in_service();
        soon("strake fsck", || {
            let out = strake().args(["fsck", "--read-data", "--dir"]).arg(self.dir()).output()?;
            let said = || std::io::Error::other(String::from_utf8_lossy(&out.stdout).into_owned());
            out.status.success().then_some(()).ok_or_else(said)
        });
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = strake().arg("down").arg("--dir").arg(self.dir()).output();
        if let Some(t) = &self.tmpfs {
            let _ = Command::new("umount").arg("-l").arg(t).status();
        }
    }
}

fn can_mount() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        println!("skipped: /dev/fuse is missing");
    }
    there
}

/// As df(1) sees it.
fn free(c: &Small) -> u64 {
    let space = rustix::fs::statvfs(c.mnt()).unwrap();
    space.f_bavail * space.f_frsize
}

/// Writes and syncs a file, so that every error shows.
fn put(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut f = File::create(path)?;
    f.write_all(content)?;
    f.sync_all()
}

/// Tries again until it works; the last error is the failure.
#[track_caller]
fn soon<T>(what: &str, mut f: impl FnMut() -> std::io::Result<T>) -> T {
    let start = Instant::now();
    loop {
        match f() {
            Ok(v) => return v,
            Err(e) if start.elapsed() > Duration::from_secs(120) => panic!("{what}: {e}"),
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

#[test]
fn full_targets_refuse_and_take_again() {
    if !can_mount() {
        return;
    }
    let c = Small::new();
    c.up();
    let content: Vec<u8> = (0..32 * MIB).map(|i| (i * 7 + i / 251) as u8).collect();
    let file = |n: usize| c.mnt().join(format!("f{n}"));
    // Two copies on two targets of 1 GiB each: less than 1 GiB of data fits.
    let (full, error) = (0..40)
        .find_map(|n| put(&file(n), &content).err().map(|e| (n, e)))
        .expect("it never filled");
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert!(full >= 16, "full after {full} files of 32 MiB already");
    c.is_in_service();
    for n in [0, full / 2, full - 1] {
        assert!(fs::read(file(n)).unwrap() == content, "file {n} changed");
    }
    // As df(1) sees it: two copies can use 1 GiB of the 2 GiB, and almost nothing of it is free.
    let space = rustix::fs::statvfs(c.mnt()).unwrap();
    let total = space.f_blocks * space.f_frsize;
    assert!((900 << 20..1 << 30).contains(&total), "{total}");
    soon("df", || match free(&c) {
        n if n < 64 << 20 => Ok(()),
        n => Err(std::io::Error::other(format!("{n} free"))),
    });
    // Existing files can be rewritten, truncated and punched again and again. A write that would
    // not fit is refused before it changes anything.
    let mut first = content.clone();
    for size in [4 * MIB, MIB / 2, MIB / 16, 8192, 4096] {
        let rest = |n: usize| c.mnt().join(format!("rest{size}.{n}"));
        let refused = (0..64)
            .find_map(|n| put(&rest(n), &content[..size]).err())
            .expect("it never filled to the last");
        assert_eq!(refused.kind(), ErrorKind::StorageFull, "{refused}");
    }
    let f = File::options().write(true).open(file(0)).unwrap();
    for n in 0..100usize {
        let at = n * 7 * MIB / 23 % (32 * MIB - 100_000);
        let new: Vec<u8> = (0..100_000).map(|i| (i + n) as u8).collect();
        let overwrite = f.write_all_at(&new, at as u64).and_then(|()| f.sync_all());
        overwrite.unwrap_or_else(|e| panic!("overwrite {n} on a full target: {e}"));
        first[at..at + new.len()].copy_from_slice(&new);
    }
    assert!(fs::read(file(0)).unwrap() == first);
    f.set_len(31 * MIB as u64 + 5).unwrap();
    let keep = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&f, keep, 100, 10_000).unwrap();
    f.sync_all().unwrap();
    first.truncate(31 * MIB + 5);
    first[100..10_100].fill(0);
    assert!(fs::read(file(0)).unwrap() == first);
    let mode = rustix::fs::FallocateFlags::empty();
    let refused = rustix::fs::fallocate(&f, mode, 0, 2 << 30).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::NOSPC);
    assert_eq!(f.metadata().unwrap().len(), first.len() as u64);
    // All of the file is stored, except the hole.
    rustix::fs::fallocate(&f, mode, 20_000, 20 * MIB as u64).unwrap();
    drop(f);
    // Metadata operations still work.
    fs::create_dir(c.mnt().join("d")).unwrap();
    fs::rename(file(1), c.mnt().join("d/f1")).unwrap();
    // Space comes back after deletes.
    for n in 2..=full {
        fs::remove_file(file(n)).unwrap();
    }
    soon("writing after deletes", || put(&c.mnt().join("again"), &content));
    assert!(fs::read(c.mnt().join("again")).unwrap() == content);
    assert!(fs::read(c.mnt().join("d/f1")).unwrap() == content);
    c.is_whole();
}

/// Mounts a tmpfs of this size in the cluster's folder, until the cluster is dropped. Prints a
/// message and returns `None` where it cannot be mounted.
fn small_disk(c: &mut Small, size: &str) -> Option<PathBuf> {
    let tmpfs = c.root.path().join("small");
    fs::create_dir(&tmpfs).unwrap();
    let option = format!("size={size}");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", &option, "strake-test"])
        .arg(&tmpfs)
        .output();
    if !mounted.is_ok_and(|o| o.status.success()) {
        println!("skipped: mounting a tmpfs needs root");
        return None;
    }
    c.tmpfs = Some(tmpfs.clone());
    Some(tmpfs)
}

/// Stops the cluster, moves this part of its folder to another disk, and starts it again.
fn move_to(c: &Small, part: &str, disk: &Path) {
    let down = strake().arg("down").arg("--dir").arg(c.dir()).output().unwrap();
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    let from = c.dir().join(part);
    assert!(
        Command::new("cp")
            .arg("-a")
            .arg("--sparse=always")
            .arg(&from)
            .arg(disk.join(part))
            .status()
            .unwrap()
            .success()
    );
    fs::remove_dir_all(&from).unwrap();
    std::os::unix::fs::symlink(disk.join(part), &from).unwrap();
    c.up();
}

/// Sets the flag when dropped, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Fills a disk, including space that is freed meanwhile, until `stop` is set. Sets `full` once
/// nothing is free.
fn take_all(ballast: &Path, full: &AtomicBool, stop: &AtomicBool) {
    let f = File::create(ballast).unwrap();
    let (mut at, mut step) = (0, 64 << 20);
    while !stop.load(SeqCst) {
        match rustix::fs::fallocate(&f, rustix::fs::FallocateFlags::empty(), at, step) {
            Ok(()) => (at, step) = (at + step, step * 2),
            Err(_) if step > 4096 => step /= 2,
            Err(_) => {
                full.store(true, SeqCst);
                thread::sleep(Duration::from_millis(2));
            }
        }
    }
    assert!(at > 64 << 20, "there was little to take: {at} bytes");
}

/// Another program fills the disk below a target whose file is sparse, in the middle of writes, and
/// later frees it.
#[test]
fn a_full_disk_below_a_target_hurts_nobody_for_long() {
    if !can_mount() {
        return;
    }
    let mut c = Small::new();
    let Some(disk) = small_disk(&mut c, "1g") else { return };
    c.up();
    move_to(&c, "oss1", &disk);
    let oss = || fs::read_to_string(c.dir().join("run/oss1.pid")).unwrap();
    let before = oss();
    let content =
        |n: usize| -> Vec<u8> { (0..MIB).map(|i| (i * 7 + i / 251 + n * 13) as u8).collect() };
    let file = |n: usize| c.mnt().join(format!("f{n}"));
    let (mut n, mut synced, mut refused) = (0, Vec::new(), 0);
    let mut write_for = |time: Duration, may_fail: bool| {
        let start = Instant::now();
        while start.elapsed() < time {
            match put(&file(n), &content(n)) {
                Ok(()) => synced.push(n),
                Err(e) if may_fail && e.kind() == ErrorKind::StorageFull => refused += 1,
                Err(e) => panic!("file {n}: {e}"),
            }
            n += 1;
            // Remove old files, so that the other target does not run full.
            if let Some(old) = synced.len().checked_sub(200) {
                let old = synced.remove(old / 2);
                fs::remove_file(file(old)).unwrap();
            }
        }
    };
    write_for(Duration::from_secs(1), false);
    for _ in 0..3 {
        let (ballast, stop) = (disk.join("ballast"), AtomicBool::default());
        thread::scope(|s| {
            s.spawn(|| {
                thread::sleep(Duration::from_millis(500));
                take_all(&ballast, &AtomicBool::default(), &stop);
            });
            write_for(Duration::from_secs(4), true);
            stop.store(true, SeqCst);
        });
        fs::remove_file(&ballast).unwrap();
        soon("all in service again", || c.status());
        soon("a file after space was made", || put(&c.mnt().join("again"), &content(1)));
    }
    println!("{} files synced, {refused} refused", synced.len());
    assert_eq!(oss(), before, "it came back without a restart");
    for n in synced {
        assert!(fs::read(file(n)).unwrap() == content(n), "file {n} changed");
    }
    c.is_whole();
}

/// A truncate or removal is recorded in the table of each replica. A target that cannot record it
/// leaves its chains, and the remaining replicas do the change.
#[test]
fn files_are_cut_and_written_while_the_disk_below_a_target_is_full() {
    if !can_mount() {
        return;
    }
    let mut c = Small::new();
    let Some(disk) = small_disk(&mut c, "1g") else { return };
    c.up();
    move_to(&c, "oss1", &disk);
    let content =
        |n: usize| -> Vec<u8> { (0..MIB).map(|i| (i * 7 + i / 251 + n * 13) as u8).collect() };
    let file = |n: usize| c.mnt().join(format!("f{n}"));
    (0..20).for_each(|n| put(&file(n), &content(n)).unwrap());
    let (ballast, full, stop) =
        (disk.join("ballast"), AtomicBool::default(), AtomicBool::default());
    thread::scope(|s| {
        let _stop = Stop(&stop);
        s.spawn(|| take_all(&ballast, &full, &stop));
        soon("it is full", || {
            full.load(SeqCst).then_some(()).ok_or_else(|| std::io::Error::other("it is not"))
        });
        let mut longest = Duration::ZERO;
        for n in 0..10 {
            let began = Instant::now();
            drop(File::create(file(n)).unwrap());
            assert_eq!(fs::metadata(file(n)).unwrap().len(), 0);
            longest = longest.max(began.elapsed());
        }
        println!("the longest cut took {longest:?}");
        assert!(longest < Duration::from_secs(5), "{longest:?}");
        soon("it has left its chains", || match c.status() {
            Err(e)
                if e.to_string()
                    .contains("has left its chains, because its file system is full") =>
            {
                Ok(())
            }
            other => Err(std::io::Error::other(format!("{other:?}"))),
        });
        (0..10).for_each(|n| soon("writes go on without it", || put(&file(n), &content(n + 100))));
        fs::remove_file(file(10)).unwrap();
    });
    fs::remove_file(&ballast).unwrap();
    soon("all in service again", || c.status());
    for n in (0..20).filter(|n| *n != 10) {
        let is = if n < 10 { content(n + 100) } else { content(n) };
        assert!(fs::read(file(n)).unwrap() == is, "file {n} changed");
    }
    c.is_whole();
}

#[test]
fn a_full_metadata_disk_loses_nothing_and_recovers() {
    if !can_mount() {
        return;
    }
    let mut c = Small::new();
    let Some(tmpfs) = small_disk(&mut c, "1g") else { return };
    // The whole cluster is made first; then the metadata server's folder moves to the small file
    // system.
    c.up();
    let kept = c.mnt().join("kept");
    put(&kept, b"here before").unwrap();
    put(&c.mnt().join("gone"), &vec![1; 3 * MIB]).unwrap();
    for n in 0..100 {
        fs::create_dir(c.mnt().join(format!("d{n}"))).unwrap();
    }
    move_to(&c, "mds1", &tmpfs);
    assert_eq!(fs::read(&kept).unwrap(), b"here before");
    // Another program now takes the rest of that disk, but not what the server frees meanwhile.
    let ballast = tmpfs.join("ballast");
    let mut f = File::create(&ballast).unwrap();
    for _ in 0..rustix::fs::statvfs(&tmpfs).unwrap().f_bavail {
        if f.write_all(&[0; 4096]).is_err() {
            break;
        }
    }
    // The error is that of a full disk, not a timeout.
    let error = (0..1000).find_map(|n| fs::create_dir(c.mnt().join(format!("new{n}"))).err());
    let error = error.expect("1,000 directories fit into a full disk");
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert_eq!(File::create(c.mnt().join("newer")).unwrap_err().kind(), ErrorKind::StorageFull);
    // Reads and removals still work.
    assert_eq!(fs::read(&kept).unwrap(), b"here before");
    assert!(fs::read_dir(c.mnt()).unwrap().count() >= 101);
    for n in 0..50 {
        fs::remove_dir(c.mnt().join(format!("d{n}"))).unwrap();
    }
    fs::remove_file(c.mnt().join("gone")).unwrap();
    let out = strake().args(["status", "--json", "--dir"]).arg(c.dir()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(!text.contains("\"reachable\": false"), "{text}");
    drop(f);
    fs::remove_file(&ballast).unwrap();
    soon("a change after space was made", || fs::create_dir(c.mnt().join("after")));
    soon("data after space was made", || put(&c.mnt().join("new"), b"here after"));
    assert_eq!(fs::read(c.mnt().join("new")).unwrap(), b"here after");
    assert_eq!(fs::read(&kept).unwrap(), b"here before");
    assert!(
        !c.mnt().join("gone").exists()
            && !c.mnt().join("d49").exists()
            && c.mnt().join("d50").exists()
    );
    c.is_whole();
}
