//! A program that uses cuFile, on a mount of a cluster of real processes: leases, recalls and
//! permissions are real. The driver is a stand-in.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::common::{ok, strake, up};

/// A small cluster and its mount, until dropped.
struct Mounted {
    root: tempfile::TempDir,
}

impl Mounted {
    fn new() -> Mounted {
        let m = Mounted { root: tempfile::tempdir().unwrap() };
        ok(&up(1, 2)
            .args(["--mirror=2", "--dir"])
            .arg(m.at("cluster"))
            .arg("--mount")
            .arg(m.at("mnt"))
            .current_dir(m.root.path())
            .output()
            .unwrap());
        m
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = strake().arg("down").arg("--dir").arg(self.at("cluster")).output();
    }
}

/// Puts the library under its usual file name and builds the stand-in of the driver and the
/// program. Prints a message and returns false where there is no compiler.
fn build(dir: &Path) -> bool {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    std::fs::copy(deps.join("libstrake_cufile.so"), dir.join("libcufile.so.0"))
        .expect("cargo builds it with the test");
    std::fs::create_dir(dir.join("elsewhere")).unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gds-bridge");
    let search = format!("-L{}", dir.display());
    let all: [(&str, &str, &[&str]); 2] = [
        ("tests/standin/libcuda.c", "libcuda.so.1", &["-shared", "-fPIC", "-pthread"]),
        (
            "cufile/tests/program.c",
            "program",
            &["-std=gnu11", "-pthread", &search, "-l:libcufile.so.0", "-l:libcuda.so.1"],
        ),
    ];
    for (source, to, flags) in all {
        let mut cc = Command::new("cc");
        match cc
            .arg("-O1")
            .arg("-o")
            .arg(dir.join(to))
            .arg(sources.join(source))
            .args(flags)
            .output()
        {
            Ok(out) => drop(ok(&out)),
            Err(e) => {
                println!("skipped: no C compiler here ({e})");
                return false;
            }
        }
    }
    true
}

#[test]
fn a_program_that_uses_cufile_runs_on_a_cluster() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let m = Mounted::new();
    if !build(m.root.path()) {
        return;
    }
    let mut whats = vec!["io", "turns", "cut", "errors", "streams", "batches", "forks"];
    if rustix::process::geteuid().is_root() {
        whats.push("permission");
    }
    for what in whats {
        let mut c = Command::new(m.at("program"));
        c.arg(what).arg(m.at("mnt")).arg(m.at("elsewhere")).env("LD_LIBRARY_PATH", m.root.path());
        c.env("STRAKE_GDS_KEY", m.at("cluster/client.key")).env("STRAKE_GDS_LOG", m.at("log"));
        let out = c.env("STRAKE_CUFILE_REAL", "/nowhere/libcufile.so.0").output().unwrap();
        let log = std::fs::read_to_string(m.at("log")).unwrap_or_default();
        assert!(
            out.status.success(),
            "{what}: {:?}\n{}\n{log}",
            out.status,
            crate::common::text(&out.stderr)
        );
    }
}
