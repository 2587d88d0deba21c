//! A real file system that is full: refusals, reads, and writes again once there is space, without
//! a restart.

use std::{fs::File, io::Write as _, path::Path, process::Command};

use bytes::Bytes;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use strake_proto::Code;
use strake_store::{Batch, FjallStore, MetaStore, Reader as _};

/// A small file system of its own; unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new(mib: u32) -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={mib}m");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "strake-test"])
            .arg(dir.path())
            .output();
        if !mount.is_ok_and(|o| o.status.success()) {
            println!("skipped: mounting a tmpfs needs root");
            return None;
        }
        Some(Small(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

fn fill(path: &Path) {
    let mut f = File::create(path).unwrap();
    for size in [1 << 20, 4096] {
        while f.write_all(&vec![0; size]).is_ok() {}
    }
}

fn key(n: u32, part: u32) -> Bytes {
    format!("{n:06}-{part}").into()
}

/// Two puts, and the removal of a key that an earlier batch made.
fn batch(n: u32, rng: &mut StdRng) -> Batch {
    let mut value = vec![0; 3000];
    rng.fill(&mut value[..]);
    let mut b = Batch::default();
    b.put(key(n, 0), value);
    b.put(key(n, 1), n.to_string());
    b.delete(key(n.wrapping_sub(1), 1));
    b
}

fn check(s: &FjallStore, committed: &[u32]) {
    let keys: Vec<Bytes> = s.prefix(b"").map(|p| p.unwrap().0).collect();
    let mut wanted: Vec<Bytes> = committed.iter().map(|n| key(*n, 0)).collect();
    wanted.extend(committed.iter().filter(|n| !committed.contains(&(*n + 1))).map(|n| key(*n, 1)));
    wanted.sort();
    assert!(
        keys == wanted,
        "{} keys instead of {}, last {:?}",
        keys.len(),
        wanted.len(),
        keys.last()
    );
}

/// Each round stops at another place of the journal, so that a failed write leaves something else
/// there.
#[test]
fn a_full_disk_is_waited_out() {
    let Some(disk) = Small::new(48) else { return };
    let (dir, ballast) = (disk.0.path().join("store"), disk.0.path().join("ballast"));
    let mut s = FjallStore::open(&dir).unwrap();
    let mut rng = StdRng::seed_from_u64(7);
    let (mut n, mut committed) = (1, Vec::new());
    for round in 0..8 {
        let end = n + 100 + round * 7;
        while n < end {
            s.commit(batch(n, &mut rng)).unwrap();
            committed.push(n);
            n += 1;
        }
        fill(&ballast);
        // The rest of the last page, and then no more.
        let e = loop {
            match s.commit(batch(n, &mut rng)) {
                Ok(()) => committed.push(n),
                Err(e) => break e,
            }
            n += 1;
        };
        assert_eq!(e.code, Code::NoSpc, "{e}");
        for _ in 0..3 {
            n += 1;
            assert_eq!(s.commit(batch(n, &mut rng)).unwrap_err().code, Code::NoSpc);
        }
        check(&s, &committed);
        std::fs::remove_file(&ballast).unwrap();
        n += 1;
        s.commit(batch(n, &mut rng)).unwrap();
        committed.push(n);
        n += 1;
        check(&s, &committed);
        if round % 2 == 1 {
            drop(s);
            s = FjallStore::open(&dir).unwrap();
            check(&s, &committed);
        }
        s.sync().unwrap();
    }
}

/// The store fills the disk itself: fjall's journal, flushes and compactions meet the end of the
/// disk, too.
#[test]
fn a_disk_filled_by_commits_alone_is_read_and_grows_again() {
    let Some(disk) = Small::new(96) else { return };
    let s = FjallStore::open(disk.0.path().join("store")).unwrap();
    let mut rng = StdRng::seed_from_u64(8);
    let mut committed = Vec::new();
    let mut n = 1;
    let e = loop {
        match s.commit(batch(n, &mut rng)) {
            Ok(()) => committed.push(n),
            Err(e) => break e,
        }
        n += 1;
        assert!(n < 1_000_000, "it never filled");
    };
    assert_eq!(e.code, Code::NoSpc, "{e}");
    check(&s, &committed);
    let grown = Command::new("mount")
        .args(["-o", "remount,size=400m"])
        .arg(disk.0.path())
        .status()
        .unwrap();
    assert!(grown.success());
    for n in n + 1..n + 1000 {
        s.commit(batch(n, &mut rng)).unwrap();
        committed.push(n);
    }
    s.sync().unwrap();
    check(&s, &committed);
}
