//! Suites of `cluster-tests`, each a command.

use std::{path::Path, process::Command};

/// Runs one of the commands to its end and prints its output.
pub fn run(command: &str, args: &[&str]) {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cluster-tests").join(command);
    let mut c = Command::new("timeout");
    c.args(["--kill-after=30", "600"])
        .arg(script)
        .args(args)
        .env("STRAKE", env!("CARGO_BIN_EXE_strake"));
    let out = c.output().unwrap();
    let (text, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{text}\n{errors}");
    assert!(out.status.success(), "{command}: {:?}\n{text}\n{errors}", out.status);
}
