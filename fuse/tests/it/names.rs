//! Names and directories that another mount changes between two requests of one system call,
//! without a kernel.

use crate::common::Cluster;
use strake_client::{Client, Creds};
use strake_fuse::vfs::{Caller, Change, Time, Vfs};
use strake_proto::{Code, Ino};

const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 0, operation: None };
const USER: Caller = Caller { uid: 5, gid: 5, pid: 0, operation: None };
/// Linux's `FMODE_EXEC`: the kernel opens a program to run it.
const EXEC: i32 = 0x20;

/// A mount, and the client of another one.
async fn two() -> (Vfs, Client) {
    let cluster = Cluster::new();
    let (its, other) = (cluster.client().await, cluster.client().await);
    (Vfs::new(its, None), other)
}

fn thread(pid: u32) -> Caller<'static> {
    Caller { pid, ..ROOT }
}

/// Another mount renames the same file between the two lookups of rename(2).
#[tokio::test]
async fn a_rename_that_another_mount_was_faster_with_begins_anew() {
    let (vfs, other) = two().await;
    let (me, top) = (Creds::default(), other.root());
    let a = other.mkdir(&me, top, b"a", 0o755).await.unwrap().ino;
    let b = other.mkdir(&me, top, b"b", 0o755).await.unwrap().ino;
    for links in [1, 2] {
        let name = format!("{links}").into_bytes();
        let file = other.mknod(&me, a, &name, 0o100_644, 0).await.unwrap().ino;
        if links == 2 {
            other.link(&me, file, top, b"third").await.unwrap();
        }
        let look = |pid, dir: Ino| vfs.names.lookup(thread(pid), dir, &name);
        let found =
            |r: strake_proto::Result<strake_proto::pb::Attr>| r.map(|a| a.ino).map_err(|e| e.code);
        assert_eq!(found(look(1, a).await), Ok(file));
        other.rename(&me, (a, &name), (b, &name), 0).await.unwrap();
        assert_eq!(
            found(look(2, b).await),
            Ok(file),
            "another thread has not seen the former name"
        );
        assert_eq!(
            found(look(1, b).await),
            Err(Code::Stale),
            "the kernel would take both names for one file's"
        );
        // The kernel starts again from the directories.
        vfs.names.lookup(thread(1), top, b"a").await.unwrap();
        assert_eq!(found(look(1, a).await), Err(Code::NoEnt));
        assert_eq!(found(look(1, b).await), Ok(file));
    }
    // Both names of a file with two names are found.
    let file = vfs.names.lookup(thread(1), top, b"third").await.unwrap().ino;
    for (dir, name) in [(b, &b"2"[..]), (top, b"third"), (b, b"2")] {
        assert_eq!(vfs.names.lookup(thread(1), dir, name).await.unwrap().ino, file);
    }
    // A plain lookup succeeds when the kernel starts again. Before that, the kernel asks twice if
    // it already had an entry for the name.
    let mut former = (b, &b"2"[..]);
    for (dir, name, times) in [(a, &b"2"[..], 2), (top, b"fresh", 1), (b, b"fresh", 1)] {
        other.rename(&me, former, (dir, name), 0).await.unwrap();
        for _ in 0..times {
            assert_eq!(vfs.names.lookup(thread(1), dir, name).await.unwrap_err().code, Code::Stale);
        }
        assert_eq!(vfs.names.lookup(thread(1), dir, name).await.unwrap().ino, file);
        former = (dir, name);
    }
}

async fn names(vfs: &Vfs, handle: u64) -> Vec<String> {
    let mut names = Vec::new();
    vfs.dirs
        .readdir(handle, 0, true, |e| {
            names.push(String::from_utf8(e.name.clone()).unwrap());
            true
        })
        .await
        .unwrap();
    names
}

#[tokio::test]
async fn a_removed_directory_is_there_for_those_who_have_it() {
    let (vfs, other) = two().await;
    let (me, top) = (Creds::default(), other.root());
    let code = |r: strake_proto::Result<()>| r.unwrap_err().code;
    for by_other in [true, false] {
        let outer = vfs.names.mkdir(ROOT, top, b"outer", 0o755, 0).await.unwrap().ino;
        vfs.names.mkdir(ROOT, outer, b"inner", 0o2750, 0).await.unwrap();
        vfs.names.lookup(ROOT, top, b"outer").await.unwrap();
        let inner = vfs.names.lookup(ROOT, outer, b"inner").await.unwrap().ino;
        let open = vfs.dirs.opendir(ROOT, inner);
        assert_eq!(names(&vfs, open).await, [".", ".."]);
        if by_other {
            other.rmdir(&me, outer, b"inner").await.unwrap();
            other.rmdir(&me, top, b"outer").await.unwrap();
        } else {
            vfs.names.rmdir(ROOT, outer, b"inner").await.unwrap();
            vfs.names.rmdir(ROOT, top, b"outer").await.unwrap();
        }
        // The open directory, and the one that ".." leads to.
        for ino in [inner, outer] {
            let attr = vfs.names.getattr(ino).await.unwrap().attr;
            assert_eq!(
                (attr.ino, attr.nlink, attr.mode & libc::S_IFMT),
                (ino, 0, libc::S_IFDIR),
                "{by_other}"
            );
        }
        let change = Change {
            mode: Some(0o2711),
            uid: Some(5),
            mtime: Some(Time::At(77)),
            atime: Some(Time::Now),
            ..Change::default()
        };
        let set = vfs.names.setattr(ROOT, inner, change).await.unwrap();
        let attr = vfs.names.getattr(inner).await.unwrap().attr;
        assert_eq!(set, attr);
        assert_eq!((attr.mode & 0o7777, attr.uid, attr.mtime_ns, attr.nlink), (0o2711, 5, 77, 0));
        assert!(attr.atime_ns > 1 << 60 && attr.ctime_ns > 1 << 60);
        let set = vfs
            .names
            .setattr(USER, inner, Change { mode: Some(0o2700), ..Change::default() })
            .await
            .unwrap();
        assert_eq!(set.mode & 0o7777, 0o700, "of a group that the caller is not in");
        assert_eq!(names(&vfs, open).await, [".", ".."]);
        assert_eq!(
            vfs.xattrs.get(ROOT, inner, b"system.posix_acl_access").await.unwrap_err().code,
            Code::NoData
        );
        assert_eq!(vfs.xattrs.list(ROOT, inner).await.unwrap(), b"");
        // The directory is empty, and no name can be made in it.
        assert_eq!(code(vfs.names.lookup(ROOT, inner, b"x").await.map(drop)), Code::NoEnt);
        assert_eq!(code(vfs.names.mkdir(ROOT, inner, b"x", 0o755, 0).await.map(drop)), Code::NoEnt);
        assert_eq!(
            code(vfs.files.create(ROOT, inner, b"x", 0o644, 0, libc::O_RDWR).await.map(drop)),
            Code::NoEnt
        );
        assert_eq!(
            code(vfs.files.tmpfile(ROOT, inner, 0o644, 0, libc::O_RDWR).await.map(drop)),
            Code::NoEnt
        );
        assert_eq!(code(vfs.names.symlink(ROOT, inner, b"x", b"to").await.map(drop)), Code::NoEnt);
        assert_eq!(
            code(vfs.names.mknod(ROOT, inner, b"x", 0o100_644, 0, 0).await.map(drop)),
            Code::NoEnt
        );
        assert_eq!(code(vfs.names.unlink(ROOT, inner, b"x").await), Code::NoEnt);
        assert_eq!(code(vfs.names.rmdir(ROOT, inner, b"x").await), Code::NoEnt);
        assert_eq!(code(vfs.names.rename(ROOT, (inner, b"x"), (top, b"x"), 0).await), Code::NoEnt);
        let file = vfs.names.mknod(ROOT, top, b"file", 0o100_644, 0, 0).await.unwrap().ino;
        assert_eq!(
            code(vfs.names.rename(ROOT, (top, b"file"), (inner, b"x"), 0).await),
            Code::NoEnt
        );
        assert_eq!(code(vfs.names.link(ROOT, file, inner, b"x").await.map(drop)), Code::NoEnt);
        vfs.names.unlink(ROOT, top, b"file").await.unwrap();
        // A lookup by its inode number does not find it any more.
        assert_eq!(code(vfs.names.lookup(ROOT, inner, b".").await.map(drop)), Code::Stale);
        // If this mount's kernel has seen the removal, it asks only while a program uses the
        // directory. Otherwise it must walk the path again.
        vfs.dirs.releasedir(open);
        for ino in [inner, outer] {
            assert_eq!(
                vfs.names.getattr(ino).await.map(|s| s.attr.nlink).map_err(|e| e.code),
                match by_other {
                    true => Err(Code::Stale),
                    false => Ok(0),
                }
            );
        }
    }
    let strange = Vfs::new(other.clone(), None);
    let d = vfs.names.mkdir(ROOT, top, b"d", 0o755, 0).await.unwrap().ino;
    strange.names.lookup(ROOT, top, b"d").await.unwrap();
    vfs.names.rmdir(ROOT, top, b"d").await.unwrap();
    assert_eq!(
        strange.names.getattr(d).await.unwrap_err().code,
        Code::Stale,
        "nobody there has it"
    );
    assert_eq!(
        code(strange.names.setattr(ROOT, d, Change::default()).await.map(drop)),
        Code::Stale
    );
}

#[tokio::test]
async fn a_program_may_be_run_by_those_who_may_not_read_it() {
    let (vfs, other) = two().await;
    let (me, top) = (Creds::default(), other.root());
    let open = |ino, flags| {
        let vfs = &vfs;
        async move {
            let opened = vfs.files.open(USER, ino, flags).await.map_err(|e| e.code);
            if let Ok(o) = opened {
                vfs.files.read(o.handle, 0, 10).await.unwrap();
                vfs.files.release(o.handle).await;
            }
            opened.map(drop)
        }
    };
    for (mode, reads, runs) in [
        (0o711, Err(Code::Access), Ok(())),
        (0o4711, Err(Code::Access), Ok(())),
        (0o001, Err(Code::Access), Ok(())),
        (0o744, Ok(()), Ok(())),
        (0o755, Ok(()), Ok(())),
        (0o770, Err(Code::Access), Err(Code::Access)),
    ] {
        let name = format!("{mode:o}").into_bytes();
        let ino = other.mknod(&me, top, &name, 0o100_000 | mode, 0).await.unwrap().ino;
        assert_eq!(open(ino, libc::O_RDONLY).await, reads, "{mode:o}");
        // The kernel has checked the execute permission itself before this open.
        assert_eq!(open(ino, libc::O_RDONLY | EXEC).await, runs, "{mode:o}");
        assert_eq!(
            open(ino, libc::O_RDONLY).await,
            reads,
            "{mode:o}: having run it gives no right"
        );
        assert_eq!(open(ino, libc::O_WRONLY | EXEC).await, Err(Code::Access), "{mode:o}");
    }
}

#[tokio::test]
async fn a_rename_leaves_a_whiteout() {
    let (vfs, other) = two().await;
    let top = other.root();
    let file = vfs.names.mknod(ROOT, top, b"f", 0o100_644, 0, 0).await.unwrap().ino;
    for flags in [6, 7, 8, 3] {
        let refused = vfs.names.rename(ROOT, (top, b"f"), (top, b"g"), flags).await;
        assert_eq!(refused.unwrap_err().code, Code::Inval, "{flags}");
    }
    vfs.names.rename(ROOT, (top, b"f"), (top, b"g"), 4).await.unwrap();
    assert_eq!(vfs.names.lookup(ROOT, top, b"g").await.unwrap().ino, file);
    let left = vfs.names.lookup(ROOT, top, b"f").await.unwrap();
    assert_eq!((left.mode, left.rdev, left.nlink), (libc::S_IFCHR, 0, 1));
}
