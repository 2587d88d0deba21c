//! A real kernel mount over a cluster in this process, used as programs use it: see `posix.sh` and
//! `names.sh`.

use std::{path::Path, process::Command};

use crate::common::Cluster;
use crate::unmounted::unmounted;
use strake_fuse::{Mount, MountConfig, Transport, can_mount, mount};

async fn mounted(cluster: &Cluster, at: &Path, transport: Transport) -> Mount {
    let mut cfg = MountConfig { transport, ..MountConfig::new(at) };
    cfg.allow_other = rustix::process::geteuid().is_root();
    mount(cfg, cluster.client().await).await.unwrap()
}

/// Runs a script of this folder with the mountpoints as arguments; its output is shown when it
/// fails.
async fn script(name: &str, args: Vec<std::path::PathBuf>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    let run = move || Command::new("timeout").arg("120").arg("bash").arg(path).args(args).output();
    let out = tokio::task::spawn_blocking(run).await.unwrap().unwrap();
    let (text, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{text}");
    assert!(out.status.success(), "{:?}\n{text}\n{errors}", out.status);
}

async fn end(m: Mount) {
    unmounted(&m).await;
}

/// The conformance suite: programs see the same file system with every FUSE transport.
async fn programs_work(transport: Transport) {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    if let Err(e) = can_mount(a.path()) {
        println!("skipped: {e}");
        return;
    }
    let cluster = Cluster::new();
    let first = mounted(&cluster, a.path(), transport).await;
    let kind = if transport == Transport::Dev { "dev" } else { "fuser" };
    script("posix.sh", vec![a.path().into(), kind.into()]).await;
    script("names.sh", vec![a.path().into()]).await;
    // A second mount sees what the first wrote and closed.
    let second = mounted(&cluster, b.path(), transport).await;
    script("two_mounts.sh", vec![a.path().into(), b.path().into()]).await;
    end(second).await;
    end(first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_work_on_a_mount() {
    programs_work(Transport::Dev).await;
}

#[cfg(feature = "fuser")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_work_through_fuser() {
    programs_work(Transport::Fuser).await;
}
