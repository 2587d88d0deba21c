//! What the kernel of a mount caches under leases, and that it forgets what is recalled.

use std::{
    fs,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    time::Duration,
};

use crate::common::Cluster;
use crate::unmounted::unmounted;
use strake_client::{Client, Creds, SetAttr};
use strake_fuse::{Mount, MountConfig, can_mount, mount};

/// Longer than any test, so that nothing is forgotten because its term ended.
const TERM: Duration = Duration::from_secs(3600);

/// A mount configuration with which the kernel also caches names.
fn keeping(at: &std::path::Path) -> MountConfig {
    MountConfig { entry_timeout: TERM, ..MountConfig::new(at) }
}

/// A mount with its client, and a client of another mount. Prints a reason and returns `None` where
/// this cannot be tested.
async fn mounted(cluster: &Cluster, cfg: MountConfig) -> Option<(Mount, Client, Client)> {
    if let Err(e) = can_mount(&cfg.mountpoint) {
        println!("skipped: {e}");
        return None;
    }
    cluster.lease(TERM);
    let (its, other) = (cluster.client().await, cluster.client().await);
    Some((mount(cfg, its.clone()).await.unwrap(), its, other))
}

/// Runs something that may wait for the mount.
async fn off<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

/// Inode number and permissions behind a path.
async fn stat(path: impl AsRef<Path>) -> Option<(u64, u32)> {
    let path = path.as_ref().to_path_buf();
    off(move || fs::symlink_metadata(path).map(|m| (m.ino(), m.permissions().mode() & 0o7777)).ok())
        .await
}

fn mode(ino: u64, mode: u32) -> SetAttr {
    SetAttr { ino, mode: Some(mode), ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attributes_are_kept_until_they_are_recalled() {
    let (dir, cluster, me) = (tempfile::tempdir().unwrap(), Cluster::new(), Creds::default());
    let Some((m, its, other)) = mounted(&cluster, keeping(dir.path())).await else { return };
    let file = other.mknod(&me, other.root(), b"a", 0o100_644, 0).await.unwrap().ino;
    let at = dir.path().join("a");
    assert_eq!(stat(&at).await, Some((file, 0o644)));
    let asked = cluster.requests();
    assert_eq!(stat(&at).await, Some((file, 0o644)));
    assert_eq!(cluster.requests(), asked, "nobody is asked again");
    // A change through the mount's own client causes no recall. So the old mode below comes from
    // the kernel's cache.
    its.setattr(&me, mode(file, 0o640)).await.unwrap();
    assert_eq!(stat(&at).await, Some((file, 0o644)), "the kernel keeps it");
    other.setattr(&me, mode(file, 0o600)).await.unwrap();
    cluster.recall(&[file]).await;
    assert_eq!(stat(&at).await, Some((file, 0o600)));
    let asked = cluster.requests();
    assert_eq!(stat(&at).await, Some((file, 0o600)));
    assert_eq!(cluster.requests(), asked);
    // The kernel also keeps attributes that it has set itself.
    let path = at.clone();
    off(move || fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap()).await;
    other.setattr(&me, mode(file, 0o604)).await.unwrap();
    assert_eq!(stat(&at).await, Some((file, 0o666)), "recalled it was not");
    cluster.recall(&[file]).await;
    assert_eq!(stat(&at).await, Some((file, 0o604)));
    unmounted(&m).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_kept_until_their_directory_is_recalled() {
    let (dir, cluster, me) = (tempfile::tempdir().unwrap(), Cluster::new(), Creds::default());
    let Some((m, its, other)) = mounted(&cluster, keeping(dir.path())).await else { return };
    let root = other.root();
    let file = other.mknod(&me, root, b"a", 0o100_644, 0).await.unwrap().ino;
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    assert_eq!((stat(&a).await, stat(&b).await), (Some((file, 0o644)), None));
    let asked = cluster.requests();
    assert_eq!((stat(&a).await, stat(&b).await), (Some((file, 0o644)), None));
    assert_eq!(cluster.requests(), asked, "nobody is asked again, nor for what is not there");
    its.rename(&me, (root, b"a"), (root, b"b"), 0).await.unwrap();
    assert_eq!(
        (stat(&a).await, stat(&b).await),
        (Some((file, 0o644)), None),
        "the kernel keeps both"
    );
    // The client now caches names of the directory, so recalling the directory removes them from
    // the kernel, too.
    its.lookup(&me, root, b"b").await.unwrap();
    cluster.recall(&[root]).await;
    assert_eq!((stat(&a).await, stat(&b).await), (None, Some((file, 0o644))));
    other.rename(&me, (root, b"b"), (root, b"a"), 0).await.unwrap();
    cluster.recall(&[root, file]).await;
    assert_eq!((stat(&a).await, stat(&b).await), (Some((file, 0o644)), None));
    unmounted(&m).await;
}

/// The kernel moves its cache entry to the new name, and the client does not learn of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_the_mount_gave_is_looked_up() {
    let (dir, cluster, me) = (tempfile::tempdir().unwrap(), Cluster::new(), Creds::default());
    let Some((m, _, other)) = mounted(&cluster, keeping(dir.path())).await else { return };
    let sub = other.mkdir(&me, other.root(), b"d", 0o755).await.unwrap().ino;
    let file = other.mknod(&me, other.root(), b"a", 0o100_644, 0).await.unwrap().ino;
    let (a, b) = (dir.path().join("a"), dir.path().join("d/b"));
    assert_eq!(stat(&a).await, Some((file, 0o644)));
    let (from, to) = (a.clone(), b.clone());
    off(move || fs::rename(from, to).unwrap()).await;
    other.unlink(&me, sub, b"b").await.unwrap();
    cluster.recall(&[sub, file]).await;
    assert_eq!((stat(&a).await, stat(&b).await), (None, None));
    unmounted(&m).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_bring_names_and_attributes() {
    let (dir, cluster, me) = (tempfile::tempdir().unwrap(), Cluster::new(), Creds::default());
    let Some((m, its, other)) = mounted(&cluster, keeping(dir.path())).await else { return };
    let sub = other.mkdir(&me, other.root(), b"d", 0o755).await.unwrap().ino;
    let mut files = Vec::new();
    for n in 0..50 {
        let made = other.mknod(&me, sub, format!("f{n}").as_bytes(), 0o100_644, 0).await.unwrap();
        files.push(made.ino);
    }
    let at = dir.path().join("d");
    let list = |at: std::path::PathBuf| {
        off(move || {
            let mut all: Vec<_> = fs::read_dir(at)
                .unwrap()
                .map(|e| e.unwrap().metadata().unwrap().permissions().mode() & 0o7777)
                .collect();
            all.sort_unstable();
            all
        })
    };
    assert_eq!(list(at.clone()).await, [0o644; 50]);
    let asked = cluster.requests();
    for (n, ino) in files.iter().enumerate() {
        assert_eq!(stat(at.join(format!("f{n}"))).await, Some((*ino, 0o644)));
    }
    assert_eq!(cluster.requests(), asked);
    its.setattr(&me, mode(files[7], 0o640)).await.unwrap();
    assert_eq!(stat(at.join("f7")).await, Some((files[7], 0o644)), "the kernel keeps it");
    other.unlink(&me, sub, b"f8").await.unwrap();
    cluster.recall(&[sub, files[7], files[8]]).await;
    assert_eq!(
        (stat(at.join("f7")).await, stat(at.join("f8")).await),
        (Some((files[7], 0o640)), None)
    );
    assert_eq!(list(at).await.len(), 49);
    unmounted(&m).await;
}

/// A mounted folder has inode number 1, the kernel's root.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_mounted_folder_as_well() {
    let (dir, cluster, me) = (tempfile::tempdir().unwrap(), Cluster::new(), Creds::default());
    let first = cluster.client().await;
    let sub = first.mkdir(&me, first.root(), b"d", 0o755).await.unwrap().ino;
    let cfg = MountConfig { root: sub, ..keeping(dir.path()) };
    let Some((m, its, other)) = mounted(&cluster, cfg).await else { return };
    let at = dir.path().join("a");
    assert_eq!((stat(dir.path()).await, stat(&at).await), (Some((1, 0o755)), None));
    its.setattr(&me, mode(sub, 0o750)).await.unwrap();
    let file = its.mknod(&me, sub, b"a", 0o100_644, 0).await.unwrap().ino;
    assert_eq!(
        (stat(dir.path()).await, stat(&at).await),
        (Some((1, 0o755)), None),
        "the kernel keeps both"
    );
    other.setattr(&me, mode(sub, 0o700)).await.unwrap();
    cluster.recall(&[sub]).await;
    assert_eq!((stat(dir.path()).await, stat(&at).await), (Some((1, 0o700)), Some((file, 0o644))));
    unmounted(&m).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_of_zero_ask_each_time() {
    let (dir, cluster, me) = (tempfile::tempdir().unwrap(), Cluster::new(), Creds::default());
    let none = Duration::ZERO;
    let cfg =
        MountConfig { attr_timeout: none, entry_timeout: none, ..MountConfig::new(dir.path()) };
    let Some((m, its, _)) = mounted(&cluster, cfg).await else { return };
    let at = dir.path().join("a");
    assert_eq!(stat(&at).await, None);
    let file = its.mknod(&me, its.root(), b"a", 0o100_644, 0).await.unwrap().ino;
    assert_eq!(stat(&at).await, Some((file, 0o644)));
    its.setattr(&me, mode(file, 0o640)).await.unwrap();
    assert_eq!(stat(&at).await, Some((file, 0o640)));
    unmounted(&m).await;
}

/// A recall waits for replies that are on their way to the kernel. An inode that the kernel
/// received and dropped must not count as such, whichever reply carried it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recall_does_not_wait_for_what_the_kernel_has_dropped() {
    let (dir, cluster, me) = (tempfile::tempdir().unwrap(), Cluster::new(), Creds::default());
    let Some((m, _, other)) = mounted(&cluster, MountConfig::new(dir.path())).await else { return };
    let sub = other.mkdir(&me, other.root(), b"d", 0o755).await.unwrap().ino;
    let mut all = Vec::new();
    for n in 0..100 {
        all.push(
            other.mknod(&me, sub, format!("f{n}").as_bytes(), 0o100_644, 0).await.unwrap().ino,
        );
    }
    let at = dir.path().to_path_buf();
    let made = off(move || {
        for _ in 0..2 {
            let listed: Vec<_> = fs::read_dir(at.join("d"))
                .unwrap()
                .map(|e| e.unwrap().metadata().unwrap())
                .collect();
            assert_eq!(listed.len(), 100);
        }
        let [file, folder, link] = ["file", "folder", "link"].map(|n| at.join(n));
        fs::write(&file, b"x").unwrap();
        fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        fs::hard_link(&file, folder.join("also")).unwrap();
        fs::rename(folder.join("also"), folder.join("other")).unwrap();
        fs::File::open(folder.join("other")).unwrap();
        let unnamed =
            fs::OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(&at).unwrap();
        let made = [file, folder, link].map(|p| fs::symlink_metadata(p).unwrap().ino());
        made.into_iter().chain([unnamed.metadata().unwrap().ino()]).collect::<Vec<_>>()
    })
    .await;
    all.extend(made);
    if let Err(e) = fs::write("/proc/sys/vm/drop_caches", "2") {
        println!("skipped: the kernel cannot be told to drop what it does not use: {e}");
        return unmounted(&m).await;
    }
    let quickly = tokio::time::timeout(Duration::from_secs(3), cluster.recall(&all));
    quickly.await.expect("the recall waits for a reply that nobody has to take in");
    unmounted(&m).await;
}
