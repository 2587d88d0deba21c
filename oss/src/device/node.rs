//! A regular file, block device or NVMe namespace, opened for the devices that use one.

use std::{
    fs::{File, OpenOptions},
    io::{Seek, SeekFrom},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::Path,
};

use strake_fabric::{Buf, Pool};
use strake_proto::{Code, Error, Result};

use super::{
    api::BLOCK,
    uring::passthrough::{self, Namespace},
};

pub(super) struct Node {
    pub file: File,
    /// Bytes, a multiple of whole blocks.
    pub capacity: u64,
    pub direct: bool,
    /// Set only for regular files. Block devices get no discards, because many do them slowly.
    pub can_discard: bool,
    pub name: String,
    pub rotates: bool,
    /// Set if `file` takes NVMe commands instead of reads and writes.
    pub namespace: Option<Namespace>,
}

/// Whether the disk below rotates; `false` if the kernel does not say.
fn rotates(file: &File, block: bool) -> bool {
    let Ok(s) = rustix::fs::fstat(file) else { return false };
    let dev = if block { s.st_rdev } else { s.st_dev };
    let at = format!("/sys/dev/block/{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    // A partition shares the queue of its disk.
    let said = ["queue", "../queue"]
        .iter()
        .find_map(|q| std::fs::read_to_string(format!("{at}/{q}/rotational")).ok());
    said.is_some_and(|s| s.trim() == "1")
}

impl Node {
    /// Bypasses the page cache if the file system allows it, and logs if not. A block device is
    /// opened exclusively: `Busy` if it is mounted or in use.
    pub(super) fn open(path: &Path) -> Result<Node> {
        let name = path.display().to_string();
        if passthrough::is_namespace(path) {
            let (file, ns) = Namespace::open(path)?;
            let capacity = ns.format.capacity();
            return Ok(Node {
                file,
                capacity,
                direct: true,
                can_discard: false,
                name,
                rotates: false,
                namespace: Some(ns),
            });
        }
        let block = path.metadata().is_ok_and(|m| m.file_type().is_block_device());
        let alone = if block { libc::O_EXCL } else { 0 };
        let with = |flags: i32| {
            OpenOptions::new().read(true).write(true).custom_flags(flags | alone).open(path)
        };
        let (mut file, direct) = match with(libc::O_DIRECT) {
            Ok(f) => (f, true),
            Err(e) if block && e.raw_os_error() == Some(libc::EBUSY) => {
                let m = format!(
                    "{name} is in use: it is mounted, part of another device, or another target's"
                );
                return Err(Error::new(Code::Busy, m));
            }
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                tracing::warn!(
                    "{name}: its file system has no direct I/O; data passes through the page cache"
                );
                (with(0).map_err(|e| Error::from(e).context(&name))?, false)
            }
            Err(e) => return Err(Error::from(e).context(&name)),
        };
        let kind = file.metadata().map_err(|e| Error::from(e).context(&name))?;
        let can_discard = kind.is_file();
        if !can_discard && !kind.file_type().is_block_device() {
            return Err(Error::new(
                Code::Inval,
                format!(
                    "{name} is neither a regular file nor a block device nor an NVMe namespace"
                ),
            ));
        }
        let bytes = file.seek(SeekFrom::End(0)).map_err(|e| Error::from(e).context(&name))?;
        let rotates = rotates(&file, !can_discard);
        Ok(Node {
            file,
            capacity: bytes / BLOCK * BLOCK,
            direct,
            can_discard,
            name,
            rotates,
            namespace: None,
        })
    }

    /// See [`Device::spare`](super::api::Device::spare).
    pub(super) fn spare(&self) -> u64 {
        if !self.can_discard {
            return u64::MAX;
        }
        let (Ok(file), Ok(below)) =
            (rustix::fs::fstat(&self.file), rustix::fs::fstatvfs(&self.file))
        else {
            return u64::MAX; // a write will tell
        };
        let free = below.f_bavail.saturating_mul(below.f_frsize);
        let is_sparse = (file.st_blocks as u64).saturating_mul(512) < self.capacity;
        if is_sparse { free } else { u64::MAX }
    }

    /// Makes buffers fit for direct I/O: copies them into one aligned buffer, unless all are
    /// aligned and there are few.
    pub(super) fn aligned(&self, pool: &Pool, bufs: Vec<Buf>) -> Vec<Buf> {
        let fits = |b: &Buf| {
            b.len().is_multiple_of(BLOCK as usize)
                && (b.as_ptr() as usize).is_multiple_of(BLOCK as usize)
        };
        if bufs.len() <= libc::UIO_MAXIOV as usize && (!self.direct || bufs.iter().all(fits)) {
            return bufs;
        }
        let mut one = pool.get_now(bufs.iter().map(Buf::len).sum());
        let mut at = 0;
        for b in &bufs {
            one[at..at + b.len()].copy_from_slice(b);
            at += b.len();
        }
        vec![one.freeze()]
    }

    /// An error of the device. The kernel has many codes for those (`ENODATA` for a bad sector,
    /// `EREMOTEIO`, `EILSEQ`). They all become [`Code::Io`], except for a lack of space or memory.
    pub(super) fn error(&self, what: &str, offset: u64, len: u64, mut e: Error) -> Error {
        if !matches!(e.code, Code::NoSpc | Code::DQuot | Code::NoMem) {
            e.code = Code::Io;
        }
        e.context(format!("{}: {what} of {len} bytes at {offset}", self.name))
    }
}
