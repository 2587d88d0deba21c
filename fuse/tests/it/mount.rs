//! A real kernel mount over a cluster in this process, used as programs use it: see `posix.sh` and
//! `names.sh`.

use std::{path::Path, process::Command, time::Duration};

use crate::common::Cluster;
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
    // The kernel releases closed files a little later.
    let unmounted = tokio::time::timeout(Duration::from_secs(60), async {
        while let Err(e) = m.unmount().await {
            assert_eq!(e.code, strake_proto::Code::Busy, "{e}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    unmounted.await.expect("still in use");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_work_through_fuser() {
    programs_work(Transport::Fuser).await;
}
