//! The VFS core without a kernel: cases that no request of the fuser transport reaches.

use std::time::Duration;

use crate::common::Cluster;
use strake_fuse::vfs::{Caller, Change, Place, Vfs};
use strake_proto::Code;
use tokio::time::Instant;

const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 0, operation: None };

#[tokio::test]
async fn files_without_a_name() {
    let client = Cluster::new().client().await;
    let top = client.root();
    let vfs = Vfs::new(client.clone(), None);
    let user = Caller { uid: 5, gid: 6, pid: 0, operation: None };
    let (attr, open) = vfs.files.tmpfile(user, top, 0o666, 0o022, libc::O_RDWR).await.unwrap();
    assert_eq!((attr.nlink, attr.mode & 0o7777, attr.uid, attr.gid), (0, 0o644, 5, 6));
    let mut data = client.pool().get_now(5);
    data.copy_from_slice(b"hello");
    assert_eq!(
        vfs.files.write(ROOT, open.handle, Place::At(0), data.freeze(), ()).await.unwrap(),
        5
    );
    assert_eq!(vfs.names.getattr(attr.ino).await.unwrap().attr.size, 5);
    let named = vfs.names.link(user, attr.ino, top, b"named").await.unwrap();
    assert_eq!((named.nlink, named.size), (1, 5));
    vfs.files.release(open.handle).await;
    let again = vfs.names.lookup(ROOT, top, b"named").await.unwrap();
    let open = vfs.files.open(ROOT, again.ino, libc::O_RDONLY).await.unwrap();
    assert_eq!(vfs.files.read(open.handle, 0, 100).await.unwrap()[0][..], b"hello"[..]);
    vfs.files.release(open.handle).await;

    let (attr, open) =
        vfs.files.tmpfile(ROOT, top, 0o600, 0, libc::O_WRONLY | libc::O_EXCL).await.unwrap();
    assert_eq!(vfs.names.link(ROOT, attr.ino, top, b"never").await.unwrap_err().code, Code::NoEnt);
    vfs.files.release(open.handle).await;
}

/// A name is replaced between the lookup and the use of its inode.
#[tokio::test]
async fn what_a_name_led_to_can_be_opened_and_followed_when_it_has_gone() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let (vfs, strange) = (Vfs::new(client.clone(), None), Vfs::new(other.clone(), None));
    let (top, me) = (client.root(), ROOT);
    let (old, open) = vfs.files.create(me, top, b"f", 0o644, 0, libc::O_RDWR).await.unwrap();
    let mut data = client.pool().get_now(3);
    data.copy_from_slice(b"old");
    vfs.files.write(ROOT, open.handle, Place::At(0), data.freeze(), ()).await.unwrap();
    vfs.files.release(open.handle).await;
    strange.names.symlink(me, top, b"l", b"there").await.unwrap();
    let file = vfs.names.lookup(me, top, b"f").await.unwrap();
    let link = vfs.names.lookup(me, top, b"l").await.unwrap();
    let creds = strake_client::Creds::default();
    other.mknod(&creds, top, b"n", 0o100_644, 0).await.unwrap();
    other.rename(&creds, (top, b"n"), (top, b"f"), 0).await.unwrap();
    other.unlink(&creds, top, b"l").await.unwrap();
    assert_eq!(
        (file.ino, vfs.names.readlink(me, link.ino).await.unwrap()),
        (old.ino, b"there".to_vec())
    );
    let open = vfs.files.open(me, file.ino, libc::O_RDONLY).await.unwrap();
    assert_eq!(vfs.files.read(open.handle, 0, 9).await.unwrap()[0][..], b"old"[..]);
    // A mount that does not have the file open cannot reach it by its inode number.
    assert_eq!(
        strange.files.open(me, file.ino, libc::O_RDONLY).await.unwrap_err().code,
        Code::Stale
    );
    assert_eq!(strange.names.lookup(me, file.ino, b".").await.unwrap_err().code, Code::Stale);
    assert_eq!(vfs.names.lookup(me, file.ino, b".").await.unwrap().ino, file.ino);
    vfs.files.release(open.handle).await;
    assert_eq!(vfs.names.lookup(me, file.ino, b".").await.unwrap_err().code, Code::Stale);
    assert_ne!(vfs.names.lookup(me, top, b"f").await.unwrap().ino, file.ino);
}

#[tokio::test]
async fn acls_are_answered_from_what_is_known_until_they_change() {
    let cluster = Cluster::new();
    cluster.lease(Duration::from_secs(3600));
    let client = cluster.client().await;
    let vfs = Vfs::new(client.clone(), None);
    let (dir, name) = (
        vfs.names.mkdir(ROOT, client.root(), b"d", 0o755, 0).await.unwrap().ino,
        b"system.posix_acl_access",
    );
    let asked = client.stats().operations;
    assert_eq!(vfs.xattrs.get(ROOT, dir, name).await.unwrap_err().code, Code::NoData);
    assert_eq!(client.stats().operations, asked, "the mkdir's answer said so");
    let entry = |tag: u8, id: u32| [&[tag, 0, 5, 0][..], &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let list = [
        vec![2, 0, 0, 0],
        entry(1, none),
        entry(2, 7),
        entry(4, none),
        entry(16, none),
        entry(32, none),
    ];
    vfs.xattrs.set(ROOT, dir, name, &list.concat(), 0).await.unwrap();
    assert_eq!(vfs.xattrs.get(ROOT, dir, name).await.unwrap(), list.concat());
    assert_eq!(vfs.names.getattr(dir).await.unwrap().attr.acls, 1);
    assert_eq!(vfs.xattrs.get(ROOT, dir, name).await.unwrap(), list.concat());
    vfs.xattrs.remove(ROOT, dir, name).await.unwrap();
    assert_eq!(vfs.xattrs.get(ROOT, dir, name).await.unwrap_err().code, Code::NoData);
    // An open directory stays readable when its mode changes.
    let user = Caller { uid: 5, gid: 5, pid: 0, operation: None };
    let open = vfs.dirs.opendir(user, dir);
    vfs.dirs.readdir(open, 0, false, |_| true).await.unwrap();
    vfs.names.setattr(ROOT, dir, Change { mode: Some(0), ..Change::default() }).await.unwrap();
    vfs.dirs.readdir(open, 0, false, |_| true).await.unwrap();
    let again = vfs.dirs.opendir(user, dir);
    assert_eq!(vfs.dirs.readdir(again, 0, false, |_| true).await.unwrap_err().code, Code::Access);
}

/// A stat of a sparse file reports its allocated space while the storage servers answer, and waits
/// for silent ones only now and then.
#[tokio::test(start_paused = true)]
async fn space_is_told_while_the_servers_tell_it() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let vfs = Vfs::new(client.clone(), None);
    let mut made = Vec::new();
    for name in [b"a", b"b"] {
        let (attr, open) =
            vfs.files.create(ROOT, client.root(), name, 0o600, 0, libc::O_RDWR).await.unwrap();
        let mut data = client.pool().get_now(5);
        data.copy_from_slice(b"hello");
        vfs.files.write(ROOT, open.handle, Place::At(1 << 20), data.freeze(), ()).await.unwrap();
        vfs.files.flush(open.handle, 0).await.unwrap();
        vfs.files.release(open.handle).await;
        made.push(attr.ino);
    }
    let usual = Duration::from_secs(1);
    let told = async |ino| {
        let (at, s) = (Instant::now(), vfs.names.getattr(ino).await.unwrap());
        (s.allocated, s.blocks(), s.timeout(usual) == usual, at.elapsed().as_secs())
    };
    assert_eq!(told(made[0]).await, (Some(4096), 8, true, 0));
    assert!(vfs.names.lookup(ROOT, client.root(), b"a").await.unwrap().sparse);
    cluster.hide_extents(true);
    assert_eq!(told(made[0]).await, (None, 2049, false, 2));
    assert_eq!(told(made[1]).await, (None, 2049, false, 0), "not for each file anew");
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(told(made[1]).await.3, 0);
    cluster.hide_extents(false);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(told(made[1]).await, (Some(4096), 8, true, 0));
}
