//! A mount whose daemon is killed while programs work on it: `cluster-tests/posix/restart`, ten
//! times.

use std::{path::Path, process::Command};

#[test]
fn a_mount_outlives_ten_daemons() {
    if let Err(e) = strake_fuse::can_mount(&std::env::temp_dir()) {
        println!("skipped: {e}");
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cluster-tests/posix/restart");
    let out = Command::new("timeout")
        .arg("300")
        .arg(script)
        .arg("10")
        .arg(env!("CARGO_BIN_EXE_strake"))
        .output()
        .unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{said}");
    assert!(out.status.success(), "{said}\n{errors}");
    assert!(said.contains("daemon killed 10 times"), "{said}");
}
