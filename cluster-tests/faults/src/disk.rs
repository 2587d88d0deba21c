//! A disk that can lose power: ext4 on a loop device over a sparse file. Its shutdown call, made
//! for such tests, drops what was written but not synced, the journal included. Killing processes
//! alone never loses that.

use std::{
    fs::File,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use crate::Result;

/// Sparse; holds the cluster's sparse targets.
const SIZE: u64 = 64 << 30;
/// `EXT4_IOC_SHUTDOWN`, `_IOR('X', 125, __u32)`.
const SHUTDOWN: libc::Ioctl = 0x8004_587d_u32 as libc::Ioctl;
/// Do not flush the journal first.
const NO_LOG_FLUSH: u32 = 2;

pub struct Disk {
    image: PathBuf,
    at: PathBuf,
}

fn command(name: &str, args: &[&str], paths: &[&Path]) -> Result<()> {
    let out =
        Command::new(name).args(args).args(paths).output().map_err(|e| format!("{name}: {e}"))?;
    if out.status.success() {
        Ok(())
    } else {
        Err(format!("{name}: {}", String::from_utf8_lossy(&out.stderr)).into())
    }
}

impl Disk {
    /// Makes and mounts a disk below `dir`. Needs root and a free loop device.
    pub fn new(dir: &Path) -> Result<Disk> {
        let disk = Disk { image: dir.join("disk.img"), at: dir.join("disk") };
        File::create_new(&disk.image)?.set_len(SIZE)?;
        command("mkfs.ext4", &["-q", "-F"], &[&disk.image])?;
        std::fs::create_dir(&disk.at)?;
        disk.mount()?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn at(&self) -> &Path {
        &self.at
    }

    fn mount(&self) -> Result<()> {
        command("mount", &["-o", "loop"], &[&self.image, &self.at])
    }

    /// Cuts the power: from here on nothing reaches the disk.
    pub fn cut_power(&self) -> Result<()> {
        let top = File::open(&self.at)?;
        let how = NO_LOG_FLUSH;
        // SAFETY: the call reads one u32, which lives through it.
        if unsafe { libc::ioctl(top.as_raw_fd(), SHUTDOWN, &raw const how) } != 0 {
            return Err(format!(
                "shutting {} down: {}",
                self.at.display(),
                std::io::Error::last_os_error()
            )
            .into());
        }
        Ok(())
    }

    /// Mounts the disk again, after all processes that used it have ended. The kernel may close
    /// their last files a moment later.
    pub fn power_up(&self) -> Result<()> {
        let start = Instant::now();
        while let Err(e) = command("umount", &[], &[&self.at]) {
            if start.elapsed() > Duration::from_secs(20) {
                return Err(e);
            }
            sleep(Duration::from_millis(50));
        }
        self.mount()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, io::Write};

    #[test]
    fn power_loss_drops_what_was_not_synced_and_keeps_what_was() {
        let dir = std::env::temp_dir().join(format!("strake-faults-disk-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        match Disk::new(&dir) {
            Err(e) => println!("skipped: no disk that can lose power here: {e}"),
            Ok(disk) => {
                let mut f = File::create(disk.at().join("synced")).unwrap();
                f.write_all(b"first").unwrap();
                f.sync_all().unwrap();
                f.write_all(b" second").unwrap();
                fs::write(disk.at().join("never"), b"x").unwrap();
                drop(f);
                disk.cut_power().unwrap();
                disk.power_up().unwrap();
                assert_eq!(fs::read(disk.at().join("synced")).unwrap(), b"first");
                assert!(!disk.at().join("never").exists());
            }
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
