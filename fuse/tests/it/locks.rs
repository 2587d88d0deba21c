//! What a program sees of locks that its mount has lost, or has requested and given back.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    time::Duration,
};

use crate::common::Cluster;
use crate::unmounted::unmounted;
use strake_client::{Creds, Lock, LockKind, LockType};
use strake_fuse::{MountConfig, can_mount, mount};

/// fcntl(2) with a lock of the whole file.
fn lock(f: &File, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: all zeros are a valid `flock`.
    let mut l: libc::flock = unsafe { std::mem::zeroed() };
    l.l_type = kind as i16;
    // SAFETY: the descriptor is open, and the kernel reads the structure during the call only.
    let r = unsafe { libc::fcntl(f.as_raw_fd(), libc::F_SETLK, &raw const l) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_whose_locks_are_lost_is_not_read_or_written_as_if_they_were_there() {
    let dir = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(dir.path()) {
        println!("skipped: {e}");
        return;
    }
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let (before, at) = (client.session(), dir.path().to_path_buf());
    let m = mount(MountConfig::new(dir.path()), client.clone()).await.unwrap();
    let work = tokio::task::spawn_blocking(move || {
        let open = || {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(at.join("f"))
                .unwrap()
        };
        let (locked, other) = (open(), open());
        lock(&locked, libc::F_WRLCK).unwrap();
        locked.write_at(b"mine", 0).unwrap();
        cluster.evict(before);
        // The mount notices the eviction with its next request.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        // (The test does not open the file: closing it again would release the lock.)
        while at.join("nobody").exists() || client.session() == before {
            assert!(std::time::Instant::now() < deadline, "it does not notice");
        }
        let failed = |r: io::Result<usize>| r.unwrap_err().raw_os_error();
        assert_eq!(failed(locked.write_at(b"not mine", 0)), Some(libc::EIO));
        assert_eq!(failed(locked.read_at(&mut [0; 4], 0)), Some(libc::EIO));
        // This offset is behind the bytes that were lost with the session. Reading those is an
        // error for every handle that had the file open.
        assert_eq!(other.read_at(&mut [0; 4], 100).expect("it took no locks"), 0);
        assert_eq!(failed(other.read_at(&mut [0; 4], 0)), Some(libc::EIO));
        lock(&locked, libc::F_UNLCK).unwrap();
        lock(&locked, libc::F_WRLCK).unwrap();
        locked.write_at(b"mine again", 0).unwrap();
    });
    work.await.unwrap();
    unmounted(&m).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_comes_after_its_caller_has_gone_is_given_back_before_others_are_told_of_it() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let (_, attr) =
        client.create(&Creds::default(), client.root(), b"f", 0o644, 2, false, None).await.unwrap();
    let lock = |owner, mode| Lock {
        kind: LockKind::LockPosix,
        owner,
        mode,
        start: 0,
        end: u64::MAX,
        pid: 1,
    };
    for owner in 10..30 {
        cluster.stall(true);
        let asked = lock(owner, LockType::LockWrite);
        let asking = client.locks().set(attr.ino, &asked, false);
        tokio::time::timeout(Duration::from_millis(20), asking)
            .await
            .expect_err("no server answers");
        let mut given_back = std::pin::pin!(client.locks().unlocked(attr.ino));
        let early = tokio::time::timeout(Duration::from_millis(1), given_back.as_mut()).await;
        early.expect_err("the request is under way");
        cluster.stall(false);
        given_back.await;
        assert!(!client.locks().is_unlocking(attr.ino, owner), "it is just being given back");
        for mode in [LockType::LockWrite, LockType::LockUnlock] {
            client.locks().set(attr.ino, &lock(1, mode), false).await.unwrap();
        }
    }
}
