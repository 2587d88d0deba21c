//! The rows measured with ordinary system calls on the mount. Buffers are aligned to pages, as
//! those of dd, fio and IOR are. An unaligned buffer touches 257 pages per MiB, and the kernel
//! splits each such read or write into two requests.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use strake_fabric::BufMut;
use strake_proto::{Result, layout::splitmix64};

use super::scale::{JOBS, MIB, Scale, in_threads, nth};

pub struct Mounted {
    dir: PathBuf,
    scale: Scale,
}

impl Mounted {
    /// `name`: name of its folder below the mount point; one for each mount of the same cluster.
    pub fn new(mnt: &Path, name: &str, scale: Scale) -> Result<Mounted> {
        let dir = mnt.join(format!("strake-bench-{name}"));
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        // One folder per job: the kernel allows only one create at a time in a folder, in every
        // file system.
        for job in 0..JOBS {
            fs::create_dir_all(dir.join(format!("job{job}")))?;
        }
        Ok(Mounted { dir, scale })
    }

    fn large(&self) -> PathBuf {
        self.dir.join("large")
    }

    pub fn write(&self) -> Result<f64> {
        write_file(&self.large(), self.scale.bytes)
    }

    /// Makes sure that the large file exists with its full size.
    pub fn ensure_large(&self) -> Result<()> {
        if fs::metadata(self.large()).is_ok_and(|m| m.len() == self.scale.bytes) {
            Ok(())
        } else {
            self.write().map(|_| ())
        }
    }

    /// Each of `readers` reads its own part of the file, once.
    pub fn read(&self, readers: u64) -> Result<f64> {
        read_parts(&self.large(), self.scale.bytes, readers)
    }

    pub fn random_read(&self) -> Result<f64> {
        random_read(&self.large(), self.scale)
    }

    fn each(&self, job: impl Fn(&Path) -> Result<()> + Sync) -> Result<f64> {
        in_threads(|n| {
            let (dir, per) = (self.dir.join(format!("job{n}")), self.scale.files / JOBS);
            for i in 0..per {
                job(&nth(&dir, i))?;
            }
            Ok(per)
        })
    }

    pub fn create(&self) -> Result<f64> {
        self.each(|p| Ok(OpenOptions::new().write(true).create_new(true).open(p).map(|_| ())?))
    }
    pub fn stat(&self) -> Result<f64> {
        self.each(|p| Ok(fs::metadata(p).map(|_| ())?))
    }
    pub fn ensure_files(&self) -> Result<f64> {
        self.each(|p| Ok(File::create(p).map(|_| ())?))
    }
    pub fn unlink_all(&self) -> Result<f64> {
        self.each(|p| match fs::remove_file(p) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
            _ => Ok(()),
        })
    }

    pub fn clean(&self) -> Result<()> {
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

/// Creates or truncates a file, writes `bytes` to it, 1 MiB at a time, and syncs it.
pub fn write_file(path: &Path, bytes: u64) -> Result<f64> {
    let mut f = File::create(path)?;
    let mut block = BufMut::unpooled(MIB as usize);
    block.fill(0x5a);
    for _ in 0..bytes / MIB {
        f.write_all(&block)?;
    }
    f.sync_all()?;
    Ok(bytes as f64)
}

/// Reads 4 KiB at random places, in threads.
pub fn random_read(path: &Path, scale: Scale) -> Result<f64> {
    let blocks = scale.bytes / 4096;
    in_threads(|n| {
        let f = File::open(path)?;
        let (mut block, mut seed) = ([0u8; 4096], n + 1);
        for _ in 0..scale.random_ops / JOBS {
            f.read_exact_at(&mut block, splitmix64(&mut seed) % blocks * 4096)?;
        }
        Ok(scale.random_ops / JOBS)
    })
}

/// Reads the file in parts of whole MiB, one for each reader, 1 MiB at a time.
pub fn read_parts(path: &Path, bytes: u64, readers: u64) -> Result<f64> {
    let part = bytes / readers / MIB * MIB;
    std::thread::scope(|s| -> Result<()> {
        let threads: Vec<_> = (0..readers)
            .map(|r| {
                s.spawn(move || -> Result<()> {
                    use std::io::Seek;
                    let mut f = File::open(path)?;
                    f.seek(std::io::SeekFrom::Start(r * part))?;
                    let mut block = BufMut::unpooled(MIB as usize);
                    for _ in 0..part / MIB {
                        f.read_exact(&mut block)?;
                    }
                    Ok(())
                })
            })
            .collect();
        for t in threads {
            t.join().map_err(|_| {
                strake_proto::Error::new(strake_proto::Code::Io, "a reader panicked")
            })??;
        }
        Ok(())
    })?;
    Ok((part * readers) as f64)
}
