//! A disk that can lose power or become slow: a FUSE file system in the memory of this process. It
//! loses more than a real disk: any sector, size and directory operation that was not synced, in
//! any order.

mod content;
mod fuse;
mod tree;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use parking_lot::Mutex;
use rand::{SeedableRng, rngs::StdRng};

pub use tree::{Lost, Rule};

use crate::Result;

pub struct Lossy {
    at: PathBuf,
    disk: Arc<Mutex<fuse::Disk>>,
    latency: Arc<fuse::Latency>,
    session: Option<BackgroundSession>,
}

impl Lossy {
    /// Makes and mounts a disk below `dir`. Needs root and `/dev/fuse`.
    pub fn new(dir: &Path, rule: Rule) -> Result<Lossy> {
        let at = dir.join("lossy");
        fs::create_dir(&at)?;
        let disk = Arc::new(Mutex::new(fuse::Disk::new(rule)));
        let latency = Arc::new(fuse::Latency::default());
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("strake-lossy".into()),
            MountOption::DefaultPermissions,
            MountOption::CUSTOM("subtype=lossy".into()),
        ];
        config.acl = SessionACL::Owner;
        config.n_threads = Some(4);
        config.clone_fd = true;
        let session = Session::new(fuse::Transport(disk.clone(), latency.clone()), &at, &config)
            .and_then(Session::spawn)
            .map_err(|e| {
                format!("mounting at {}: {e}; it needs root and /dev/fuse", at.display())
            })?;
        Ok(Lossy { at, disk, latency, session: Some(session) })
    }

    /// Where it is mounted.
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// From here on each read, write and fsync of a file takes this long; they run one after the
    /// other.
    pub fn slow(&self, by: Duration) {
        self.latency.set(by);
    }

    /// Cuts the power of these folders: until [`power_up`](Lossy::power_up) every access in them
    /// fails with `EIO`. The same seed after the same operations leaves the same state.
    pub fn cut_power(&self, folders: &[PathBuf], seed: u64) -> Result<Lost> {
        let mut disk = self.disk.lock();
        let roots: Vec<_> =
            folders.iter().map(|f| disk.find(f.strip_prefix(&self.at)?)).collect::<Result<_>>()?;
        Ok(disk.tree.cut_power(&roots, &mut StdRng::seed_from_u64(seed)))
    }

    /// Shows what is left, after all processes that used the folders have ended.
    pub fn power_up(&self) {
        self.disk.lock().power_up();
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        // Lazily, because a process may still have a file of it open.
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
        drop(self.session.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs::{File, OpenOptions},
        io::{Read, Seek, SeekFrom, Write},
        os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, symlink},
    };

    fn on_a_disk(name: &str, rule: Rule, test: impl FnOnce(&Lossy)) {
        let dir = std::env::temp_dir().join(format!("strake-faults-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        match Lossy::new(&dir, rule) {
            Err(e) => println!("skipped: {e}"),
            Ok(disk) => test(&disk),
        }
        fs::remove_dir_all(dir).unwrap();
    }

    fn errno(r: std::io::Result<impl Sized>) -> Option<i32> {
        r.err().and_then(|e| e.raw_os_error())
    }

    #[test]
    fn is_a_file_system() {
        on_a_disk("lossy-fs", Rule::Posix, |disk| {
            let at = disk.at();
            fs::create_dir_all(at.join("d/e")).unwrap();
            fs::write(at.join("d/a"), b"hello").unwrap();
            let mut f = OpenOptions::new().append(true).read(true).open(at.join("d/a")).unwrap();
            f.write_all(b" world").unwrap();
            f.rewind().unwrap();
            let mut text = String::new();
            f.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello world");
            fs::rename(at.join("d/a"), at.join("d/e/b")).unwrap();
            fs::hard_link(at.join("d/e/b"), at.join("c")).unwrap();
            symlink("d/e", at.join("s")).unwrap();
            assert_eq!(fs::read(at.join("s/b")).unwrap(), b"hello world");
            assert_eq!(fs::metadata(at.join("c")).unwrap().nlink(), 2);
            f.set_len(3 << 30).unwrap();
            assert_eq!(f.seek(SeekFrom::End(0)).unwrap(), 3 << 30);
            assert!(fs::metadata(at.join("c")).unwrap().blocks() < 100);
            fs::remove_file(at.join("c")).unwrap();
            fs::remove_dir_all(at.join("d")).unwrap();
            f.write_all_at(b"open", 1).unwrap(); // appended, as Linux does
            let mut four = [0; 4];
            f.read_exact_at(&mut four, 3 << 30).unwrap();
            assert_eq!(&four, b"open", "unlinked but open");
            let names: Vec<_> = fs::read_dir(at).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert_eq!(names, ["s"]);
            assert!(File::create_new(at.join("s")).is_err());
            File::create_new(at.join("l")).unwrap().try_lock().unwrap();
        });
    }

    #[test]
    fn takes_direct_io_and_punched_holes() {
        on_a_disk("lossy-direct", Rule::Posix, |disk| {
            let mut o = OpenOptions::new();
            let f =
                o.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
            let f = f.open(disk.at().join("a")).unwrap();
            #[repr(align(4096))]
            struct Block([u8; 8192]);
            f.write_all_at(&Block([7; 8192]).0, 1 << 20).unwrap();
            // SAFETY: a system call without pointers on an open file.
            let punched = unsafe {
                use std::os::fd::AsRawFd;
                libc::fallocate(
                    f.as_raw_fd(),
                    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    1 << 20,
                    4096,
                )
            };
            assert_eq!(punched, 0);
            let mut back = Block([1; 8192]);
            f.read_exact_at(&mut back.0, 1 << 20).unwrap();
            assert_eq!(back.0[..4096], [0; 4096]);
            assert_eq!(back.0[4096..], [7; 4096]);
        });
    }

    #[test]
    fn forgets_what_was_not_synced_and_keeps_what_was() {
        on_a_disk("lossy-cut", Rule::Posix, |disk| {
            let (d, other) = (disk.at().join("d"), disk.at().join("other"));
            fs::create_dir(&d).unwrap();
            fs::create_dir(&other).unwrap();
            File::open(disk.at()).unwrap().sync_all().unwrap();
            fs::write(other.join("x"), b"x").unwrap();
            let mut seen = [false; 2];
            for seed in 0..40 {
                let synced = d.join(format!("synced{seed}"));
                let mut f = File::create(&synced).unwrap();
                f.write_all(&[1; 5000]).unwrap();
                f.sync_all().unwrap();
                File::open(&d).unwrap().sync_all().unwrap();
                f.write_all(&[2; 5000]).unwrap();
                let never = d.join(format!("never{seed}"));
                fs::write(&never, b"never").unwrap();
                let lost = disk.cut_power(std::slice::from_ref(&d), seed).unwrap();
                assert_eq!(lost.names_unsynced, 1);
                assert_eq!(errno(f.write_all(b"3")), Some(libc::EIO));
                assert_eq!(errno(fs::read(&synced)), Some(libc::EIO));
                assert_eq!(errno(File::create(d.join("new"))), Some(libc::EIO));
                assert_eq!(fs::read(other.join("x")).unwrap(), b"x", "the others go on");
                drop(f);
                disk.power_up();
                let left = fs::read(&synced).unwrap();
                assert!(
                    left.starts_with(&[1; 5000]) && left[5000..].iter().all(|b| matches!(b, 0 | 2))
                );
                assert_eq!(never.exists(), lost.names == 0);
                seen[usize::from(never.exists())] = true;
            }
            assert_eq!(seen, [true; 2], "sometimes kept, sometimes lost");
            let kept = fs::read_dir(&d).unwrap().filter(|e| {
                let name = e.as_ref().unwrap().file_name();
                name.to_string_lossy().starts_with("synced")
            });
            assert_eq!(kept.count(), 40);
        });
    }
}
