//! The right bytes, at every offset, through a real kernel mount.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_its_pattern_and_takes_writes() {
    let dir = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(dir.path()) {
        println!("skipped: {e}");
        return;
    }
    let size = (5 << 20) + 777;
    let cfg = MountConfig::new(dir.path());
    let limit = mount_memory_limit(&cfg, size).unwrap();
    let path = dir.path().join(MEMORY_FILE);
    let checked = path.clone();
    tokio::task::spawn_blocking(move || {
        assert_eq!(fs::metadata(&checked).unwrap().len(), size);
        let whole = fs::read(&checked).unwrap();
        assert_eq!(whole.len() as u64, size);
        assert!(whole.iter().enumerate().all(|(i, b)| *b == memory_byte(i as u64)));
        let f = File::options().read(true).write(true).open(&checked).unwrap();
        let mut part = [0; 100];
        f.read_exact_at(&mut part, (1 << 20) - 50).unwrap();
        assert_eq!(part[50], memory_byte(0));
        assert_eq!(f.read_at(&mut part, size - 10).unwrap(), 10);
        assert_eq!(f.write_at(&[1; 4096], 0).unwrap(), 4096);
    })
    .await
    .unwrap();

    let here = dir.path().canonicalize().unwrap();
    let mount = strake_fuse::table::mounts().unwrap().into_iter().find(|m| m.at == here).unwrap();
    assert_eq!(mount.kind, "fuse.strake");
    let again = mount_memory_limit(&cfg, 1).err().expect("mounted twice");
    assert_eq!(again.code, strake_proto::Code::Busy);

    let held = File::open(&path).unwrap();
    let limit = match limit.unmount().await {
        Err((e, limit)) => {
            assert_eq!(e.code, strake_proto::Code::Busy, "{e}");
            limit
        }
        Ok(()) => panic!("unmounted while a file is open"),
    };
    drop(held);
    limit.unmount().await.map_err(|(e, _)| e).unwrap();
    assert!(!path.exists());
}
