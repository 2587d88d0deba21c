//! Ways for kernel requests to reach the [VFS core](crate::vfs). Today one: `/dev/fuse` through the fuser crate.

pub(crate) mod fuser;
pub(crate) mod kernel;
