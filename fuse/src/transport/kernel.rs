//! What every FUSE session of this crate asks of the kernel, so that the mount and the memory-limit bench differ only
//! in who answers.

use std::path::Path;

use fuser::{Config, FopenFlags, InitFlags, KernelConfig, MountOption, SessionACL};

use crate::MountConfig;

/// Largest read or write request: 256 pages of 4 KiB, the kernel's default limit.
pub(crate) const MAX_REQUEST: u32 = 1 << 20;

/// Used where the kernel offers it. Not among them, on purpose: the writeback cache (it would make the kernel the owner
/// of size and mtime) and remote locks (the kernel's own are kept, local to the mount).
const WANTED: [InitFlags; 9] = [
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_READDIRPLUS_AUTO,
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_AUTO_INVAL_DATA,
    // Symlinks never change and inode numbers are never reused.
    InitFlags::FUSE_CACHE_SYMLINKS,
    InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    InitFlags::FUSE_MAX_PAGES,
    InitFlags::FUSE_BIG_WRITES,
];

/// Answers the kernel's INIT. Returns the flags every open is answered with.
pub(crate) fn negotiate(kernel: &mut KernelConfig) -> FopenFlags {
    for flag in WANTED {
        // An error only says that this kernel does not offer it.
        let _ = kernel.add_capabilities(flag);
    }
    let _ = kernel.set_max_write(MAX_REQUEST);
    if let Err(most) = kernel.set_max_readahead(MAX_REQUEST) {
        let _ = kernel.set_max_readahead(most);
    }
    let _ = kernel.set_max_background(128);
    let _ = kernel.set_congestion_threshold(96);
    open_flags(kernel.capabilities())
}

/// Data is not cached by the kernel (another mount may write it), except for mapped pages. Kernels before 6.6 refuse
/// shared mappings of direct files; there the page cache is used and dropped at each open.
fn open_flags(offered: InitFlags) -> FopenFlags {
    if offered.contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP) {
        FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
    } else {
        FopenFlags::empty()
    }
}

pub(crate) fn session_config(cfg: &MountConfig) -> Config {
    let mut c = Config::default();
    c.mount_options = vec![
        MountOption::FSName(cfg.fsname.clone()),
        // As a plain option: fuser hands `Subtype` only to fusermount3, and root mounts without it.
        MountOption::CUSTOM(format!("subtype={}", cfg.subtype)),
        MountOption::DefaultPermissions,
        if cfg.read_only { MountOption::RO } else { MountOption::RW },
    ];
    c.acl = if cfg.allow_other { SessionACL::All } else { SessionACL::Owner };
    c.n_threads = Some(cfg.threads.clamp(1, 64));
    c.clone_fd = cfg.clone_fd;
    c
}

/// A path for messages.
pub(crate) fn shown(p: &Path) -> std::path::Display<'_> {
    p.display()
}
