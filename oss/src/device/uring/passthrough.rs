//! NVMe commands through io_uring to the kernel's character device of a namespace (`/dev/ngXnY`):
//! below the block layer, so without its scheduler, merging, splitting and retrying. Structures and
//! numbers are from `linux/nvme_ioctl.h`.

use std::{
    fs::{File, Metadata, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use io_uring::{opcode, squeue, types};
use strake_proto::{Code, Error, Result};

use crate::device::nvme::{FLUSH, Format, IDENTIFY, READ, WRITE};

const IOCTL_ID: libc::c_ulong = 0x4e40;
const IOCTL_ADMIN: libc::c_ulong = 0xc048_4e41;
const URING_CMD_IO: u32 = 0xc048_4e80;
const URING_CMD_IO_VEC: u32 = 0xc048_4e81;
/// Identify, an admin command.
const IDENTIFY_COMMAND: u8 = 0x06;

/// A namespace that this process may send commands to.
pub(crate) struct Namespace {
    id: u32,
    pub format: Format,
    /// Most bytes of one command.
    pub most: u64,
    /// The block device of the same namespace, held so that it is not mounted or used by another
    /// target.
    _claim: File,
}

/// `struct nvme_uring_cmd`, and `struct nvme_passthru_cmd` too, whose last field is a result.
#[repr(C)]
#[derive(Default)]
struct Command {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    last: u32,
}

const _: () = assert!(size_of::<Command>() == 72);

impl Command {
    /// In the layout of a submission queue entry.
    fn bytes(&self) -> [u8; 80] {
        let mut out = [0; 80];
        out[0] = self.opcode;
        let words = [
            self.nsid,
            self.cdw2,
            self.cdw3,
            self.metadata as u32,
            (self.metadata >> 32) as u32,
            self.addr as u32,
            (self.addr >> 32) as u32,
            self.metadata_len,
            self.data_len,
            self.cdw10,
            self.cdw11,
            self.cdw12,
        ];
        for (to, word) in out[4..].chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        out
    }
}

/// The memory of a command's data.
pub(crate) enum Data {
    None,
    /// With the index of its registered region, if any.
    One(*const u8, Option<u16>),
    Many(*const libc::iovec, usize),
}

/// Whether it is a character device of an NVMe namespace, by the kernel's name for it, whatever
/// `path` is called.
pub(crate) fn is_namespace(path: &Path) -> bool {
    path.metadata().ok().and_then(|m| kernel_name(&m)).is_some_and(|n| n.starts_with("ng"))
}

fn kernel_name(node: &Metadata) -> Option<String> {
    let kind = match node.file_type() {
        t if t.is_char_device() => "char",
        t if t.is_block_device() => "block",
        _ => return None,
    };
    let (major, minor) = (rustix::fs::major(node.rdev()), rustix::fs::minor(node.rdev()));
    let at = std::fs::canonicalize(format!("/sys/dev/{kind}/{major}:{minor}")).ok()?;
    Some(at.file_name()?.to_str()?.to_string())
}

impl Namespace {
    /// Opens the character device exclusively: `Busy` if its block device is mounted or another
    /// target uses it.
    pub(crate) fn open(path: &Path) -> Result<(File, Namespace)> {
        let name = path.display();
        let about = |e: std::io::Error| Error::from(e).context(path.display());
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(about)?;
        let own = kernel_name(&file.metadata().map_err(about)?).unwrap_or_default();
        let block = own.replacen("ng", "nvme", 1);
        let claim = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_EXCL)
            .open(format!("/dev/{block}"));
        let claim = claim.map_err(|e| match e.raw_os_error() {
            Some(libc::EBUSY) => {
                let m =
                    format!("{name} is in use: /dev/{block} is mounted, part of another device, or another target's");
                Error::new(Code::Busy, m)
            }
            _ => Error::from(e).context(format!("{name}: cannot hold /dev/{block}, which is the same namespace")),
        })?;
        let id = namespace_id(&file).map_err(about)?;
        let held = claim.metadata().ok().and_then(|m| kernel_name(&m));
        if held.as_ref() != Some(&block) || namespace_id(&claim).map_err(about)? != id {
            return Err(Error::new(
                Code::Inval,
                format!("{name} and /dev/{block} are not the same namespace"),
            ));
        }
        let format = identify(&file, id).map_err(about)?;
        let format = Format::parse(&format).map_err(|e| e.context(name))?;
        let most = largest(&Path::new("/sys/class/block").join(&block).join("queue"), format);
        Ok((file, Namespace { id, format, most, _claim: claim }))
    }

    /// The entry for a read, a write or a flush of `len` bytes at `offset`.
    pub(crate) fn entry(
        &self,
        opcode: u8,
        offset: u64,
        len: u64,
        data: &Data,
        user_data: u64,
    ) -> squeue::Entry128 {
        let mut c = Command { opcode, nsid: self.id, ..Command::default() };
        let (mut op, mut slot) = (URING_CMD_IO, None);
        match *data {
            Data::None => {}
            Data::One(at, registered) => {
                (c.addr, c.data_len, slot) = (at.expose_provenance() as u64, len as u32, registered)
            }
            Data::Many(at, n) => {
                (op, c.addr, c.data_len) =
                    (URING_CMD_IO_VEC, at.expose_provenance() as u64, n as u32)
            }
        }
        if opcode != FLUSH {
            debug_assert!(matches!(opcode, READ | WRITE) && len > 0 && len <= self.most);
            let (lba, blocks) = self.format.range(offset, len);
            (c.cdw10, c.cdw11, c.cdw12) = (lba as u32, (lba >> 32) as u32, blocks - 1);
        }
        opcode::UringCmd80::new(types::Fixed(0), op)
            .cmd(c.bytes())
            .buf_index(slot)
            .build()
            .user_data(user_data)
    }
}

/// Most bytes of one command that the kernel accepts, however the memory lies: the controller's
/// limit, and one page for each segment.
fn largest(queue: &Path, format: Format) -> u64 {
    let number = |name: PathBuf| std::fs::read_to_string(name).ok()?.trim().parse::<u64>().ok();
    let transfer = number(queue.join("max_hw_sectors_kb")).map_or(128 << 10, |kb| kb << 10);
    let segments = number(queue.join("max_segments")).map_or(1, |n| n * 4096);
    (transfer.min(segments).min(65536 << format.shift) / 4096 * 4096).max(4096)
}

fn namespace_id(file: &File) -> std::io::Result<u32> {
    // SAFETY: this ioctl takes no argument and returns a number.
    let id = unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ID) };
    if id < 0 { Err(std::io::Error::last_os_error()) } else { Ok(id as u32) }
}

fn identify(file: &File, nsid: u32) -> std::io::Result<Box<[u8; IDENTIFY]>> {
    let mut data = Box::new([0u8; IDENTIFY]);
    let mut c =
        Command { opcode: IDENTIFY_COMMAND, nsid, data_len: IDENTIFY as u32, ..Command::default() };
    c.addr = data.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the kernel reads the command, writes its last field, and at most `data_len` bytes at
    // `addr`; both outlive the call.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ADMIN, &raw mut c) };
    match rc {
        0 => Ok(data),
        n if n < 0 => Err(std::io::Error::last_os_error()),
        status => {
            Err(std::io::Error::other(format!("Identify failed with NVMe status {status:#x}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_lie_as_the_kernel_reads_them() {
        let c = Command {
            opcode: 2,
            nsid: 7,
            addr: 0x1122_3344_5566_7788,
            data_len: 9,
            cdw10: 10,
            cdw12: 12,
            ..Command::default()
        };
        let b = c.bytes();
        assert_eq!(b[..12], [2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(b[24..32], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!((b[32..36].to_vec(), b[36], b[40], b[44], b[48]), (vec![0; 4], 9, 10, 0, 12));
        assert_eq!(std::mem::offset_of!(Command, addr), 24);
        assert_eq!(std::mem::offset_of!(Command, cdw10), 40);
    }

    #[test]
    fn other_devices_are_none() {
        for other in ["/dev/null", "/dev/zero", "/", "/no-such"] {
            assert!(!is_namespace(Path::new(other)), "{other}");
        }
    }
}
