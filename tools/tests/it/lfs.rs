//! `lfs` on a real mount over a cluster in this process: see `lfs.sh`.

#[path = "../../../fuse/tests/it/common/mod.rs"]
mod mounted;

use std::{
    ffi::{CStr, CString},
    fs::File,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::Path,
    process::Command,
    time::Duration,
};

use strake_fuse::{MountConfig, can_mount, mount};

fn c_path(p: &Path) -> CString {
    CString::new(p.as_os_str().as_bytes()).unwrap()
}

/// A mount with the same name whose process has died.
struct Dead(tempfile::TempDir);

impl Dead {
    /// `None` where the test is not root and cannot make one.
    fn new(name: &CStr) -> Option<Dead> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can leave a dead mount");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = c_path(dir.path());
        let fuse = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
        let (kind, options) = (c"fuse.strake", CString::new(options).unwrap());
        // SAFETY: the strings end with a zero and outlive the call.
        let r = unsafe {
            libc::mount(name.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast())
        };
        assert_eq!(r, 0, "{}", std::io::Error::last_os_error());
        drop(fuse);
        let gone = std::fs::read_dir(dir.path()).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ENOTCONN));
        Some(Dead(dir))
    }
}

impl Drop for Dead {
    fn drop(&mut self) {
        // SAFETY: the string ends with a zero and lives until the end of the statement.
        unsafe { libc::umount2(c_path(self.0.path()).as_ptr(), libc::MNT_DETACH) };
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lfs_works_on_a_mount() {
    let dir = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(dir.path()) {
        println!("skipped: {e}");
        return;
    }
    // Commands that find a mount by name must use the living one.
    let _dead = Dead::new(c"lfstest");
    let mut cfg = MountConfig::new(dir.path());
    cfg.allow_other = rustix::process::geteuid().is_root();
    let m = mount(cfg, mounted::Cluster::new().client().await).await.unwrap();
    let at = dir.path().canonicalize().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lfs.sh");
    let run = move || {
        let mut c = Command::new("timeout");
        c.args(["120", "bash"]).arg(script).arg(env!("CARGO_BIN_EXE_strake")).arg(at).output()
    };
    let out = tokio::task::spawn_blocking(run).await.unwrap().unwrap();
    let (text, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{text}");
    assert!(out.status.success(), "{:?}\n{text}\n{errors}", out.status);
    let unmounted = tokio::time::timeout(Duration::from_secs(60), async {
        while m.unmount().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    unmounted.await.expect("still in use");
}
