//! The ioctls of a descriptor on a real mount report its file, its file system and its servers, and
//! nothing else.

use std::{
    fs::{self, File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

use crate::common::Cluster;
use crate::unmounted::unmounted;
use strake_fuse::{MountConfig, Transport, can_mount, mount};
use strake_proto::ioctl::{FILE, FILE_BYTES, OpenedFile, SERVERS, SERVERS_BYTES, Servers};

fn ask<const N: usize>(file: &File, number: u32) -> Result<[u8; N], i32> {
    let mut answer = [0; N];
    // SAFETY: the ioctl numbers of these tests write at most the bytes that `answer` has.
    let code = unsafe { libc::ioctl(file.as_raw_fd(), number as libc::Ioctl, answer.as_mut_ptr()) };
    if code < 0 { Err(std::io::Error::last_os_error().raw_os_error().unwrap()) } else { Ok(answer) }
}

fn look(at: &Path) {
    let path = at.join("file");
    let file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .unwrap();
    let answer = OpenedFile::decode(&ask::<FILE_BYTES>(&file, FILE).unwrap()).unwrap();
    assert_eq!((answer.uuid, answer.ino), ([7; 16], file.metadata().unwrap().ino()));
    let flags = answer.flags as i32;
    assert_eq!((flags & libc::O_ACCMODE, flags & libc::O_DIRECT), (libc::O_WRONLY, libc::O_DIRECT));
    let servers = Servers::decode(&ask::<SERVERS_BYTES>(&file, SERVERS).unwrap()).unwrap();
    assert_eq!((servers.uuid, servers.endpoints.as_str()), ([7; 16], "tcp:10.0.0.1:7400"));
    // The answer stays the same after the file is renamed and removed.
    fs::rename(&path, at.join("other")).unwrap();
    fs::write(&path, "another").unwrap();
    fs::remove_file(at.join("other")).unwrap();
    assert_eq!(OpenedFile::decode(&ask::<FILE_BYTES>(&file, FILE).unwrap()), Ok(answer));
    // Unknown numbers, a buffer that is too small and a directory are refused.
    let less = FILE & !(0x3fff << 16) | 16 << 16;
    for number in [FILE + 2, FILE + 0x100, less] {
        assert_eq!(ask::<SERVERS_BYTES>(&file, number), Err(libc::ENOTTY), "{number:#x}");
    }
    assert_eq!(ask::<FILE_BYTES>(&File::open(at).unwrap(), FILE), Err(libc::ENOTTY));
}

async fn tells(transport: Transport) {
    let at = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(at.path()) {
        println!("skipped: {e}");
        return;
    }
    let cluster = Cluster::new();
    cluster.are_at(&["tcp:10.0.0.1:7400".into()]);
    let m = mount(MountConfig { transport, ..MountConfig::new(at.path()) }, cluster.client().await)
        .await
        .unwrap();
    let path = at.path().to_path_buf();
    tokio::task::spawn_blocking(move || look(&path)).await.unwrap();
    unmounted(&m).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_descriptor_tells_its_file() {
    tells(Transport::Dev).await;
}

#[cfg(feature = "fuser")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_descriptor_tells_its_file_through_fuser() {
    tells(Transport::Fuser).await;
}
