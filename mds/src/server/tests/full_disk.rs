//! A server on a small file system that fills: what is refused, what goes on, and service again without a restart.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use super::disk::*;
use super::*;
use strake_proto::ids::ROOT_INO;

/// A file system of its own; unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new(mib: u32) -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={mib}m");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "strake-test"]).arg(dir.path()).output();
        if !mount.is_ok_and(|o| o.status.success()) {
            println!("skipped: mounting a tmpfs needs root");
            return None;
        }
        Some(Small(dir))
    }

    fn fill(&self, leave: usize) -> PathBuf {
        let path = self.0.path().join("ballast");
        let mut f = File::create(&path).unwrap();
        for size in [1 << 20, 4096] {
            while f.write_all(&vec![0; size]).is_ok() {}
        }
        f.set_len(f.metadata().unwrap().len() - leave as u64).unwrap();
        path
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}
