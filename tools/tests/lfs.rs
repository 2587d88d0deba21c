//! `lfs` on a real mount over a cluster in this process: see `lfs.sh`.

#[path = "../../fuse/tests/common/mod.rs"]
mod common;

use std::{path::Path, process::Command, time::Duration};

use strake_fuse::{MountConfig, can_mount, mount};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lfs_works_on_a_mount() {
    let dir = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(dir.path()) {
        println!("skipped: {e}");
        return;
    }
    let mut cfg = MountConfig::new(dir.path());
    cfg.allow_other = rustix::process::geteuid().is_root();
    let m = mount(cfg, common::Cluster::new().client().await).await.unwrap();
    let at = dir.path().canonicalize().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lfs.sh");
    let run = move || {
        let mut c = Command::new("timeout");
        c.args(["120", "bash"]).arg(script).arg(env!("CARGO_BIN_EXE_strake")).arg(at).output()
    };
    let out = tokio::task::spawn_blocking(run).await.unwrap().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{text}");
    assert!(out.status.success(), "{:?}\n{text}\n{errors}", out.status);
    let unmounted = tokio::time::timeout(Duration::from_secs(60), async {
        while m.unmount().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    unmounted.await.expect("still in use");
}
