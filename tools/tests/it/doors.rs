//! Access by strangers, on clusters of real processes: what other users of the machine can read,
//! who may administer, and who can pose as a server. `cluster-tests/attacks` has a command for
//! each.

mod admin;
#[allow(dead_code, reason = "some of it is for other tests")]
mod followers;
mod modes;
mod servers;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use crate::common::{ok, strake};
use serde_json::Value;

/// A cluster in a folder that every user can reach, stopped when dropped.
struct Doors {
    root: tempfile::TempDir,
}

impl Doors {
    fn new() -> Doors {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        Doors { root }
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn key(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }
    /// Starts the cluster under a umask.
    fn up(&self, umask: &str, mds: &str, mount: &Path) -> Output {
        let mut c = std::process::Command::new("sh");
        c.args([
            "-c",
            "umask $0 && exec \"$@\"",
            umask,
            env!("CARGO_BIN_EXE_strake"),
            "up",
            "--mds",
            mds,
            "--oss",
            "2",
        ]);
        c.args(["--targets-per-oss", "1", "--target-gib", "1", "--dir"])
            .arg(self.dir())
            .arg("--mount")
            .arg(mount);
        let out = c.output().unwrap();
        ok(&out);
        out
    }
    fn run(&self, args: &[&str]) -> Output {
        strake().args(args).arg("--dir").arg(self.dir()).output().unwrap()
    }
    fn status(&self) -> Value {
        serde_json::from_slice(&self.run(&["status", "--json"]).stdout).unwrap()
    }
    /// Address of a server's administration, and its process.
    fn admin(&self, name: &str) -> (String, u64) {
        let status = self.status();
        let s = status["servers"].as_array().unwrap().iter().find(|s| s["name"] == name).unwrap();
        (s["admin"].as_str().unwrap().into(), s["pid"].as_u64().unwrap())
    }
    /// Where a server listens for requests.
    fn endpoint(&self, name: &str) -> String {
        let text = fs::read_to_string(self.dir().join(format!("{name}.toml"))).unwrap();
        let config: toml::Value = toml::from_str(&text).unwrap();
        let section = if name.starts_with("mds") { "mds" } else { "oss" };
        config[section]["listen"].as_str().unwrap().into()
    }
}

impl Drop for Doors {
    fn drop(&mut self) {
        if self.dir().exists() {
            let _ = self.run(&["down"]);
        }
    }
}

fn can_mount() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        println!("skipped: /dev/fuse is missing");
    }
    there
}
