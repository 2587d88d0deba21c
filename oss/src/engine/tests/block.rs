//! Targets on block devices: loop devices, which need root. Without root these tests print that
//! they did not run.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use strake_proto::{Code, Result};

use super::*;
use crate::{
    device,
    engine::{TargetLayout, announce_device, create_target_dir, open_target_dir},
};

const SIZE: u64 = 64 << 20;

/// A loop device on a file in its own folder.
struct Loop {
    device: PathBuf,
    dir: tempfile::TempDir,
}

impl Loop {
    fn new() -> Option<Loop> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        File::create(&file).unwrap().set_len(SIZE).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        match made {
            Ok(o) if o.status.success() => {
                Some(Loop { device: String::from_utf8(o.stdout).unwrap().trim().into(), dir })
            }
            other => {
                let _ =
                    writeln!(std::io::stderr(), "not run: no loop device to be had ({other:?})");
                None
            }
        }
    }
    fn target(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    async fn create(&self, name: &str, force: bool) -> Result<()> {
        let layout = TargetLayout::BlockDevice { path: self.device.clone(), force };
        create_target_dir(&self.target(name), layout, identity()).await
    }
    fn put(&self, at: u64, bytes: &[u8]) {
        let f = File::options().write(true).open(&self.device).unwrap(); // not exclusive, as any tool
        f.write_all_at(bytes, at).unwrap();
        f.sync_all().unwrap();
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
    }
}

async fn open(path: &Path) -> Result<Arc<Engine>> {
    open_target_dir(path, Some([1; 16]), Pool::default(), Options::default()).await?.whole()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_on_a_block_device_keeps_what_is_written() {
    let Some(l) = Loop::new() else { return };
    l.create("t0", false).await.unwrap();
    let data = pattern(3, 3_000_000);
    let e = open(&l.target("t0")).await.unwrap();
    // Without the first 256 blocks, and without the reserves for overwriting and truncating: a 64th
    // of the rest, and 16 blocks.
    let blocks = SIZE / BLOCK - 256;
    assert_eq!(e.usage().capacity, (blocks - blocks / 64 - 16) * BLOCK);
    apply(&e, key(0), write(100, &data), 1).await.unwrap();
    e.flush().await.unwrap();
    apply(&e, key(1), write(0, &data[..5000]), 1).await.unwrap();
    e.flush().await.unwrap();
    let busy = device::open(&l.device).err().unwrap();
    assert!(busy.code == Code::Busy && busy.message.contains("another target's"), "{busy}");
    let second = l.create("t1", true).await.unwrap_err();
    assert_eq!(second.code, Code::Busy, "one device for two targets: {second}");
    drop(e);
    let e = open(&l.target("t0")).await.unwrap();
    assert_eq!(read(&e, key(0), 100, 5_000_000).await.unwrap(), data);
    assert_eq!(read_all(&e, key(1)).await.unwrap(), data[..5000]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_with_a_target_on_it_is_left_alone() {
    let Some(l) = Loop::new() else { return };
    l.create("t0", false).await.unwrap();
    let e = open(&l.target("t0")).await.unwrap();
    apply(&e, key(0), write(0, b"precious"), 1).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    let refused = l.create("t1", false).await.unwrap_err();
    assert!(refused.code == Code::Exist, "{refused}");
    assert!(
        refused.message.contains("target 3 of 'oss1'") && refused.message.contains("force = true"),
        "{refused}"
    );
    let left: Vec<_> =
        fs::read_dir(l.target("t1")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["target.lock"], "the folder is still taken for a new one");
    let e = open(&l.target("t0")).await.unwrap();
    assert_eq!(read_all(&e, key(0)).await.unwrap(), b"precious");
    drop(e);
    l.create("t1", true).await.unwrap();
    assert!(open(&l.target("t1")).await.unwrap().meta(&key(0)).unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_with_anything_at_its_beginning_is_left_alone() {
    let Some(l) = Loop::new() else { return };
    for at in [0, 510, 1080, 65_600, (1 << 20) - 1] {
        l.put(at, &[1]);
        let e = l.create("t0", false).await.unwrap_err();
        assert!(
            e.code == Code::Exist && e.message.contains(&format!("byte {at} is not zero")),
            "{e}"
        );
        l.put(at, &[0]);
    }
    l.put(1 << 20, &[1]);
    l.create("t0", false).await.unwrap();
    drop(open(&l.target("t0")).await.unwrap());
}

/// If SPDK is missing, or no controller answers, there is an error that says so, and no half-made
/// target.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_on_spdk_without_its_controller_is_an_error_and_nothing_is_used_instead() {
    let dir = tempfile::tempdir().unwrap();
    let text = "spdk:trtype:TCP traddr:127.0.0.1 trsvcid:1 subnqn:nqn.2024-01.org.example:none";
    let create = async |name: &str, device: &str| {
        let layout = TargetLayout::BlockDevice { path: device.into(), force: true };
        create_target_dir(&dir.path().join(name), layout, identity()).await.unwrap_err()
    };
    let missing = |e: &strake_proto::Error| match e.code {
        Code::NoEnt => {
            e.message.contains("SPDK is not installed") && e.message.contains("build SPDK")
        }
        code => code == Code::NxIo && e.message.contains("no such controller"),
    };
    let e = create("t0", text).await;
    assert!(missing(&e), "{e:?}");
    assert!(!dir.path().join("t0/data").exists() && !dir.path().join("t0/table").exists());
    assert_eq!(create("t0", "spdk:trtype:TCP").await.code, Code::Inval);
    // A target that was made gives the same error, not that its data is missing.
    let t1 = dir.path().join("t1");
    create_target_dir(&t1, TargetLayout::File { size: SIZE }, identity()).await.unwrap();
    fs::remove_file(t1.join("data")).unwrap();
    std::os::unix::fs::symlink(text, t1.join("data")).unwrap();
    let e = open(&t1).await.err().unwrap();
    assert!(missing(&e), "{e:?}");
    announce_device(&t1, None).unwrap();
    let e = announce_device(&t1, Some(Path::new("spdk:trtype:FC traddr:1"))).unwrap_err();
    assert!(e.code == Code::Inval && e.message.contains("not PCIe, TCP or RDMA"), "{e:?}");
}
