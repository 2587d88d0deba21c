//! A history of real processes: a short form of `cluster-tests/histories/run`.

use std::{path::Path, process::Command};

#[test]
fn histories_of_real_processes_are_linearizable() {
    let histories = Path::new(env!("CARGO_BIN_EXE_strake-histories"));
    // Built with the workspace.
    let strake = histories.with_file_name("strake");
    for needed in [Path::new("/dev/fuse"), &strake] {
        if !needed.exists() {
            return println!("skipped: {} is missing", needed.display());
        }
    }
    let kept = tempfile::tempdir().unwrap().keep();
    let mut c = Command::new("timeout");
    c.args(["--kill-after=30", "600"]).arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("run"));
    c.env("STRAKE", strake).env("HISTORIES", histories).env("RUNS", "1").env("KEEP", &kept);
    let out = c.output().unwrap();
    let (text, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{text}\n{errors}");
    assert!(out.status.success(), "{:?}, kept in {}\n{text}\n{errors}", out.status, kept.display());
    std::fs::remove_dir_all(kept).unwrap();
}
