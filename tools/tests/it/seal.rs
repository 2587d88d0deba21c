//! Sealed files on a real cluster: a damaged device is detected, and seals survive a restart of all
//! processes.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::common::{kill, ok, refused, strake, text, up};
use serde_json::Value;

/// One server each, one copy; stopped when dropped.
struct Cluster {
    root: tempfile::TempDir,
}

impl Cluster {
    fn new() -> Cluster {
        let c = Cluster { root: tempfile::tempdir().unwrap() };
        ok(&c.up());
        c
    }
    fn up(&self) -> Output {
        let mut up = up(1, 1);
        up.args(["--mirror=1", "--dir"])
            .arg(self.dir())
            .arg("--mount")
            .arg(self.mnt())
            .output()
            .unwrap()
    }
    fn down(&self) -> Output {
        strake().args(["down", "--dir"]).arg(self.dir()).output().unwrap()
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    fn kill(&self, server: &str) {
        kill(&fs::read_to_string(self.dir().join("run").join(format!("{server}.pid"))).unwrap());
    }
    /// The only target's device.
    fn device(&self) -> PathBuf {
        let mut found = Vec::new();
        let mut dirs = vec![self.dir()];
        while let Some(d) = dirs.pop() {
            for e in fs::read_dir(d).unwrap().map(Result::unwrap) {
                if e.file_type().unwrap().is_dir() {
                    dirs.push(e.path());
                } else if e.file_name() == "data" {
                    found.push(e.path());
                }
            }
        }
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.down();
    }
}

fn lfs(args: &[&str], path: &Path) -> Output {
    strake().arg("lfs").args(args).arg(path).output().unwrap()
}

/// Bytes in which no two blocks are equal.
fn pattern(len: usize) -> Vec<u8> {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    (0..len / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// Flips one bit of a block on a device. Returns how often the block was there.
fn flip(device: &Path, block: &[u8]) -> usize {
    let file = File::options().read(true).write(true).open(device).unwrap();
    let (mut at, mut times, mut buf) = (0, 0, vec![0; 1 << 20]);
    loop {
        let n = file.read_at(&mut buf, at).unwrap();
        if n == 0 {
            return times;
        }
        for (i, b) in buf[..n].chunks(4096).enumerate().filter(|(_, b)| *b == block) {
            file.write_all_at(&[b[100] ^ 1], at + i as u64 * 4096 + 100).unwrap();
            times += 1;
        }
        at += n as u64;
    }
}

#[test]
fn a_flipped_bit_is_named_with_its_extent_and_seals_outlive_the_servers() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    const EXTENT: usize = 4 << 20;
    let c = Cluster::new();
    let (dir, bytes) = (c.mnt().join("d"), pattern(3 * EXTENT));
    fs::create_dir(&dir).unwrap();
    let (good, bad) = (dir.join("good"), dir.join("bad"));
    fs::write(&good, &bytes[..EXTENT + 1]).unwrap();
    // Blocks that differ from those of the first file.
    let others: Vec<u8> = bytes.iter().map(|b| !b).collect();
    fs::write(&bad, &others).unwrap();
    let sums = ok(&lfs(&["seal", "-r"], &dir));
    assert_eq!(sums.lines().count(), 2);
    let list = c.root.path().join("sums");
    fs::write(&list, &sums).unwrap();
    let judge = |expected: bool| {
        let out = Command::new("sha256sum").args(["-c", "--strict"]).arg(&list).output().unwrap();
        assert_eq!(out.status.success(), expected, "{}{}", text(&out.stdout), text(&out.stderr));
    };
    judge(true);
    ok(&lfs(&["verify"], &dir));

    c.kill("mds1");
    c.kill("oss1");
    ok(&c.up());
    ok(&lfs(&["verify"], &dir));
    ok(&c.down());
    // Damage the last block of the second extent.
    let at = 2 * EXTENT - 4096;
    assert_eq!(flip(&c.device(), &others[at..at + 4096]), 1);
    ok(&c.up());
    judge(false);
    let out = lfs(&["verify"], &dir);
    let (told, errors) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.code(), Some(libc::EIO), "{told}{errors}");
    assert!(told.contains(&format!("{}: OK\n", good.display())), "{told}");
    assert!(told.contains(&format!("{}: UNREADABLE\n", bad.display())), "{told}");
    assert!(told.contains(&format!("extent at {EXTENT} ({EXTENT} bytes)")), "{told}");
    assert_eq!(told.matches("extent at").count(), 1, "{told}");
    assert!(errors.contains("2 files: 1 verified, 1 unreadable"), "{errors}");
    let out = lfs(&["verify", "--json"], &dir);
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&v["verified"], &v["unreadable"]), (&1.into(), &1.into()), "{v:#}");
    let file = v["files"].as_array().unwrap().iter().find(|f| f["state"] == "unreadable").unwrap();
    let finding = &file["findings"][0];
    assert_eq!((&finding["offset"], &finding["length"]), (&EXTENT.into(), &EXTENT.into()), "{v:#}");
    assert_eq!(file["sha256"], Value::Null);

    // The file is still immutable, and its manifest still describes the original bytes.
    assert_eq!(fs::write(&bad, "new").unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert_eq!(fs::remove_file(&bad).unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert_eq!(ok(&lfs(&["seal", "--sums", "-r"], &dir)), sums);
    let out = strake().args(["lfs", "verify", "--sums"]).arg(&list).output().unwrap();
    assert_eq!(out.status.code(), Some(libc::EIO));

    // After the seal is undone, a file that cannot be read cannot be sealed; a rewritten file can.
    ok(&lfs(&["seal", "--undo"], &bad));
    refused(&lfs(&["seal"], &bad), &["Input/output error", "at byte", "it is not sealed"]);
    fs::write(&bad, &others).unwrap();
    ok(&lfs(&["seal"], &bad));
    ok(&lfs(&["verify"], &dir));
    judge(true);
}
