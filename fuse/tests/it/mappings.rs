//! Memory mappings of files on a real kernel mount, together with all other ways to change the
//! files: see `mappings.py`.

use std::{path::Path, process::Command};

use crate::common::Cluster;
use crate::unmounted::unmounted;
use strake_fuse::{MountConfig, can_mount, mount};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_beside_stores_through_a_mapping() {
    let dir = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(dir.path()) {
        println!("skipped: {e}");
        return;
    }
    let cluster = Cluster::new();
    let m = mount(MountConfig::new(dir.path()), cluster.client().await).await.unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mappings.py");
    let at = dir.path().to_path_buf();
    let run = move || {
        Command::new("timeout").arg("300").arg("python3").arg(script).current_dir(at).output()
    };
    let out = tokio::task::spawn_blocking(run).await.unwrap().unwrap();
    let (text, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{text}");
    unmounted(&m).await;
    assert!(out.status.success(), "{:?}\n{text}\n{errors}", out.status);
}
