//! For the fuzz targets: parsers of external input.

use bytes::Bytes;
use strake_proto::Result;

use crate::{transport::dev::fuzzing, vfs};

/// Parses a request as the kernel could send it; returns whether it is well formed.
pub fn read_request(bytes: &[u8], setxattr_ext: bool) -> bool {
    fuzzing::read_request(bytes, setxattr_ext)
}

/// Parses `/proc/TID/status` and `/proc/TID/stat` of a caller that may be dying.
pub fn read_caller(text: &str) -> bool {
    fuzzing::is_dying(text)
}

/// The supplementary groups in the text of `/proc/TID/status`.
pub fn read_groups(status: &str) -> Vec<u32> {
    vfs::groups_in(status)
}

/// The value of the attribute `strake.map.N`.
pub fn map_part(version: u64, map: &[u8], number: usize) -> Result<Bytes> {
    vfs::map_part(version, map, number)
}
