//! The negotiation with the kernel at the first request. Pure.

use super::{
    abi::{self, fopen, init as flag},
    request::Init,
};
use crate::vfs::MAX_REQUEST;

/// Flags that are used where the kernel offers them. The writeback cache is left out on purpose:
/// with it the kernel would own size and mtime.
const WANTED: u64 = flag::ASYNC_READ
    | flag::POSIX_LOCKS
    | flag::FLOCK_LOCKS
    | flag::ATOMIC_O_TRUNC
    | flag::EXPORT_SUPPORT
    | flag::BIG_WRITES
    | flag::AUTO_INVAL_DATA
    | flag::DO_READDIRPLUS
    | flag::READDIRPLUS_AUTO
    | flag::ASYNC_DIO
    | flag::PARALLEL_DIROPS
    | flag::ABORT_ERROR
    | flag::MAX_PAGES
    // Symlinks never change and inode numbers are never reused.
    | flag::CACHE_SYMLINKS
    // The kernel checks ACLs as it checks modes; the metadata server keeps ACL and mode consistent.
    | flag::POSIX_ACL
    // A directory's default ACL replaces the umask, so the metadata server applies one or the
    // other.
    | flag::DONT_MASK
    // Writes, truncates and chowns clear set-id bits and file capabilities at the metadata server.
    | flag::HANDLE_KILLPRIV_V2
    | flag::SETXATTR_EXT
    | flag::INIT_EXT
    | flag::DIRECT_IO_ALLOW_MMAP
    | flag::HAS_RESEND;

/// Most background requests that the kernel has in progress at a time, RELEASE among them.
pub const MAX_BACKGROUND: u16 = 256;
const CONGESTION: u16 = 96;
/// From this minor version on, a reply to INIT has 64 bytes.
const LONG_REPLY: u32 = 23;

/// The answer to INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    pub minor: u32,
    pub flags: u64,
    pub max_readahead: u32,
}

/// The outcome of an INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Agreed(Agreed),
    /// The kernel has a newer major version: it is told ours and asks again.
    AskAgain,
    /// The kernel is too old to be served.
    TooOld,
}

/// `readahead`: how many bytes the kernel may read ahead into its page cache.
pub fn negotiate(asked: Init, readahead: u32) -> Outcome {
    if asked.major > abi::MAJOR {
        return Outcome::AskAgain;
    }
    if asked.major < abi::MAJOR || asked.minor < abi::OLDEST_MINOR {
        return Outcome::TooOld;
    }
    let minor = asked.minor.min(abi::NEWEST_MINOR);
    let mut flags = asked.flags & WANTED;
    if flags & flag::INIT_EXT == 0 {
        flags &= u64::from(u32::MAX);
    }
    Outcome::Agreed(Agreed { minor, flags, max_readahead: asked.max_readahead.min(readahead) })
}

impl Agreed {
    pub fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Whether the kernel can be made to forget names without waiting for locks.
    pub fn forgets_names(&self) -> bool {
        self.minor >= abi::EPOCH_MINOR
    }

    /// The words to keep for the next daemon, to which the kernel does not send INIT again.
    pub fn to_words(self) -> [u64; 2] {
        [u64::from(self.minor) << 32 | u64::from(self.max_readahead), self.flags]
    }

    /// `None`: nothing was negotiated yet.
    pub fn from_words([versions, flags]: [u64; 2]) -> Option<Agreed> {
        let minor = (versions >> 32) as u32;
        (minor != 0).then_some(Agreed { minor, flags, max_readahead: versions as u32 })
    }

    /// Flags for the answer to an open of a file; `flags` are those of open(2). The kernel caches
    /// no data, which another mount may write, except for mapped pages. Kernels before 6.6 refuse
    /// shared mappings of files with direct I/O. There, what is opened for reading goes through the
    /// page cache, so it can be mapped, and each read is a page-in.
    pub fn open_flags(&self, flags: u32) -> u32 {
        if self.maps_direct() || flags as i32 & libc::O_ACCMODE != libc::O_RDONLY {
            fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES
        } else {
            0
        }
    }

    /// Whether files with direct I/O can have shared mappings (Linux 6.6 and later).
    pub fn maps_direct(&self) -> bool {
        self.has(flag::DIRECT_IO_ALLOW_MMAP)
    }

    /// `fuse_init_out`.
    pub fn reply(&self) -> Vec<u8> {
        debug_assert!(self.minor >= LONG_REPLY);
        let mut out = Vec::with_capacity(64);
        for n in [abi::MAJOR, self.minor, self.max_readahead, self.flags as u32] {
            out.extend_from_slice(&n.to_ne_bytes());
        }
        out.extend_from_slice(&MAX_BACKGROUND.to_ne_bytes());
        out.extend_from_slice(&CONGESTION.to_ne_bytes());
        out.extend_from_slice(&MAX_REQUEST.to_ne_bytes());
        // Time granularity: one nanosecond.
        out.extend_from_slice(&1u32.to_ne_bytes());
        out.extend_from_slice(&((MAX_REQUEST / 4096) as u16).to_ne_bytes());
        out.extend_from_slice(&0u16.to_ne_bytes());
        out.extend_from_slice(&((self.flags >> 32) as u32).to_ne_bytes());
        out.resize(64, 0);
        out
    }
}

/// The reply to a kernel with a newer major version: our version.
pub fn ask_again() -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    out.extend_from_slice(&abi::MAJOR.to_ne_bytes());
    out.extend_from_slice(&abi::NEWEST_MINOR.to_ne_bytes());
    out.resize(64, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(minor: u32, flags: u64) -> Init {
        Init { major: 7, minor, max_readahead: 131_072, flags }
    }

    #[test]
    fn a_new_kernel_gets_what_is_wanted_and_no_more() {
        let Outcome::Agreed(a) = negotiate(asked(99, u64::MAX), 1 << 20) else { panic!() };
        assert_eq!((a.minor, a.flags, a.max_readahead), (abi::NEWEST_MINOR, WANTED, 131_072));
        let direct = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR] {
            assert_eq!(a.open_flags(flags as u32), direct);
        }
        let out = a.reply();
        assert_eq!(out.len(), 64);
        assert_eq!(out[20..24], (1u32 << 20).to_ne_bytes(), "max_write");
        assert_eq!(out[28..30], 256u16.to_ne_bytes(), "max_pages");
        assert_eq!(out[32..36], ((WANTED >> 32) as u32).to_ne_bytes(), "flags2");
    }

    #[test]
    fn an_old_kernel_gets_only_what_it_offers() {
        let Outcome::Agreed(a) = negotiate(asked(26, flag::BIG_WRITES | flag::ASYNC_DIO), 4096)
        else {
            panic!()
        };
        assert_eq!(
            (a.minor, a.flags, a.max_readahead),
            (26, flag::BIG_WRITES | flag::ASYNC_DIO, 4096)
        );
        assert_eq!(a.open_flags(libc::O_RDONLY as u32), 0, "the page cache, for mappings");
        for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_RDWR | libc::O_CREAT] {
            assert_ne!(a.open_flags(flags as u32) & fopen::DIRECT_IO, 0);
        }
        // The upper flags are ignored without the extension.
        let Outcome::Agreed(a) = negotiate(asked(45, flag::DIRECT_IO_ALLOW_MMAP), 0) else {
            panic!()
        };
        assert_eq!(a.flags, 0);
    }

    #[test]
    fn what_was_agreed_is_kept() {
        let a = Agreed { minor: 45, flags: 1 << 39 | 5, max_readahead: u32::MAX };
        assert_eq!(Agreed::from_words(a.to_words()), Some(a));
        assert_eq!(Agreed::from_words([0, 0]), None);
    }

    #[test]
    fn other_major_versions() {
        assert_eq!(negotiate(Init { major: 8, ..asked(0, 0) }, 0), Outcome::AskAgain);
        assert_eq!(negotiate(Init { major: 6, ..asked(99, 0) }, 0), Outcome::TooOld);
        assert_eq!(negotiate(asked(22, 0), 0), Outcome::TooOld);
        assert_eq!(ask_again().len(), 64);
    }
}
