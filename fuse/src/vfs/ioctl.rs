//! The few requests that programs make with ioctl(2) on an open file; for everything else they use
//! extended attributes ([`super::xattr`]).

use strake_proto::{
    ioctl::{self, OpenedFile, Servers},
    map::ROLE_MDS,
};

use super::parts::Vfs;

impl Vfs {
    /// Answers the requests of [`strake_proto::ioctl`] for an open regular file. `room`: the bytes
    /// that the caller can take. `None`: the request does not exist, or not for this handle
    /// (`ENOTTY`).
    pub fn ioctl(&self, handle: u64, command: u32, room: usize) -> Option<Vec<u8>> {
        // Directories are in another table, and numbers are given out once.
        let (ino, flags) = self.files.opened(handle)?;
        let map = self.base.client.servers().map();
        let uuid = map.map.fs_uuid[..].try_into().ok()?;
        let answer = match command {
            ioctl::FILE => OpenedFile { uuid, ino, flags: flags as u32 }.encode(),
            ioctl::SERVERS => {
                let servers = map.map.nodes.iter().filter(|n| n.role == ROLE_MDS);
                let endpoints: Vec<String> =
                    servers.flat_map(|n| n.endpoints.iter().cloned()).collect();
                Servers::encode(uuid, &endpoints)
            }
            _ => {
                tracing::debug!("ioctl {command:#x} is not supported");
                return None;
            }
        };
        // The kernel provides as many bytes as the request number says; a caller with fewer gets
        // nothing.
        (room >= answer.len()).then_some(answer)
    }
}
