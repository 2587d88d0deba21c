//! How to mount: what is chosen for one mount.

use std::{path::PathBuf, time::Duration};

use rustix::mount::MountFlags;
use strake_proto::{Code, Error, Ino, Result, ids::ROOT_INO};

use crate::table;

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// The folder to mount at.
    pub mountpoint: PathBuf,
    /// Allow users other than the mounting one. Permissions are checked by the kernel and by the
    /// metadata server either way.
    pub allow_other: bool,
    /// Refuse changes.
    pub read_only: bool,
    /// Flags of mount(2), without the read-only flag; [`crate::table::DEFAULT_FLAGS`] unless set
    /// otherwise.
    pub flags: MountFlags,
    /// Threads that receive requests from the kernel; 1 to 64. The work itself runs on the tokio
    /// runtime.
    pub threads: usize,
    /// One `/dev/fuse` descriptor per thread.
    pub clone_fd: bool,
    /// First column of `df` and `/proc/mounts`; empty: the name of the file system.
    pub fsname: String,
    /// The displayed type is `fuse.SUBTYPE`. `lfs` looks for `fuse.strake`.
    pub subtype: String,
    /// How long the kernel may use attributes without asking again, at most: its copies expire with
    /// the leases. 0: it asks each time.
    pub attr_timeout: Duration,
    /// The same for names. If it is not 0, the kernel detaches what is mounted on a folder inside
    /// this mount when names are taken back.
    pub entry_timeout: Duration,
    /// Requests worked on at a time; more wait in the kernel.
    pub max_requests: usize,
    /// What speaks with the kernel.
    pub transport: Transport,
    /// For tests: uses of the kernel only what those before 6.6 offer.
    pub old_kernel: bool,
    /// The folder that is the root of the mount.
    pub root: Ino,
}

impl MountConfig {
    /// Defaults for a mount at `mountpoint`.
    pub fn new(mountpoint: impl Into<PathBuf>) -> MountConfig {
        MountConfig {
            mountpoint: mountpoint.into(),
            allow_other: false,
            read_only: false,
            flags: table::DEFAULT_FLAGS,
            threads: 2,
            clone_fd: true,
            fsname: String::new(),
            subtype: "strake".into(),
            attr_timeout: Duration::from_secs(3600),
            entry_timeout: Duration::ZERO,
            max_requests: 256,
            transport: Transport::default(),
            old_kernel: false,
            root: ROOT_INO,
        }
    }
}

/// The implementation that speaks with the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Our own.
    #[default]
    Dev,
    /// The fuser crate, in builds with the feature `fuser`. It cannot release killed programs, has
    /// no `O_TMPFILE`, and does not let the kernel keep copies.
    Fuser,
}

impl Transport {
    /// Whether this build has the implementation: `EOPNOTSUPP` with what to do if not.
    pub fn check(self) -> Result<()> {
        match self {
            Transport::Fuser if cfg!(not(feature = "fuser")) => Err(Transport::left_out()),
            Transport::Fuser | Transport::Dev => Ok(()),
        }
    }

    pub(crate) fn left_out() -> Error {
        let m = "transport 'fuser' is not in this program; leave the option out, or build the \
                 program with `--features fuser`";
        Error::new(Code::OpNotSupp, m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_that_was_left_out_is_refused() {
        assert!(Transport::Dev.check().is_ok());
        let refused = Transport::Fuser.check().map_err(|e| e.code);
        let expected = if cfg!(feature = "fuser") { Ok(()) } else { Err(Code::OpNotSupp) };
        assert_eq!(refused, expected);
    }
}
