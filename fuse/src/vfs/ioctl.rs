//! The few questions that ioctl(2) asks of an open file; everything else is asked by extended
//! attributes ([`super::xattr`]).

use strake_proto::{
    ioctl::{self, OpenedFile, Servers},
    map::ROLE_MDS,
};

use super::Vfs;

impl Vfs {
    /// What [`strake_proto::ioctl`] describes, of an open regular file. `room`: bytes that the
    /// caller has for it. `None`: there is no such question, or none of this handle (`ENOTTY`).
    pub fn ioctl(&self, handle: u64, command: u32, room: usize) -> Option<Vec<u8>> {
        // Those of folders are in another table, and numbers are given out once.
        let open = self.files.get(handle).ok()?;
        let map = self.client.map();
        let uuid = map.map.fs_uuid[..].try_into().ok()?;
        let answer = match command {
            ioctl::FILE => OpenedFile { uuid, ino: open.ino, flags: open.flags as u32 }.encode(),
            ioctl::SERVERS => {
                let servers = map.map.nodes.iter().filter(|n| n.role == ROLE_MDS);
                let endpoints: Vec<String> =
                    servers.flat_map(|n| n.endpoints.iter().cloned()).collect();
                Servers::encode(uuid, &endpoints)
            }
            _ => {
                tracing::debug!("ioctl {command:#x} is not known");
                return None;
            }
        };
        // The kernel makes as much room as the number says; whoever says otherwise gets nothing.
        (room >= answer.len()).then_some(answer)
    }
}
