//! The suites of `cluster-tests/posix` that are short enough for every change, on a cluster of processes.

use std::{path::Path, process::Command};

/// Runs one of the commands to its end; what it printed is shown.
fn suite(name: &str, args: &[&str]) {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cluster-tests/posix").join(name);
    let mut c = Command::new("timeout");
    c.args(["--kill-after=30", "600"]).arg(script).args(args).env("STRAKE", env!("CARGO_BIN_EXE_strake"));
    let out = c.output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{text}\n{errors}");
    assert!(out.status.success(), "{name}: {:?}\n{text}\n{errors}", out.status);
}

#[test]
fn pjdfstest() {
    suite("pjdfstest", &[]);
}

#[test]
fn acl() {
    as_root("acl");
}

#[test]
fn mounting() {
    as_root("mounting");
}

fn as_root(name: &str) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: not root");
        return;
    }
    suite(name, &[]);
}

#[test]
fn holes() {
    suite("holes", &["200"]);
}

#[test]
fn fsx() {
    suite("fsx", &["1000"]);
}

#[test]
fn file_io() {
    suite("file-io", &[]);
}

#[test]
fn programs() {
    suite("programs", &["fast"]);
}

#[test]
fn handles() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: not root");
        return;
    }
    suite("handles", &["--no-nfs"]);
}
