//! The cluster as a user sees it: the commands `strake` and `lfs`, and the mount.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{Result, path};

pub struct Cluster {
    strake: PathBuf,
    dir: PathBuf,
    pub mount: PathBuf,
    root: PathBuf,
}

/// A second mount that reads from one replica only; unmounted when dropped.
pub struct ReplicaMount {
    strake: PathBuf,
    pub path: PathBuf,
}

impl Drop for ReplicaMount {
    fn drop(&mut self) {
        let _ = Command::new(&self.strake).arg("umount").arg(&self.path).status();
    }
}

/// Kills a process of the cluster with SIGKILL.
pub fn kill(pid: i32) -> Result<()> {
    // SAFETY: plain kill(2) on a process this demo started.
    if unsafe { libc::kill(pid, libc::SIGKILL) } != 0 {
        return Err(format!("kill {pid}: {}", std::io::Error::last_os_error()).into());
    }
    Ok(())
}

/// The number of damaged chunks that each target has met since its server started, by the server's
/// process and the target.
fn damage(status: &Value) -> BTreeMap<String, u64> {
    let servers = status["servers"].as_array().map_or(&[][..], |a| a);
    let targets = servers
        .iter()
        .flat_map(|s| s["targets"].as_array().into_iter().flatten().map(move |t| (s, t)));
    targets
        .map(|(s, t)| {
            (format!("{} {}", s["pid"], t["id"]), t["checksum_errors"].as_u64().unwrap_or(1))
        })
        .collect()
}

impl Cluster {
    /// `root` holds the cluster's folder and the mount points.
    pub fn new(root: &Path) -> Result<Cluster> {
        // The binary that was built together with this one.
        let strake = env::current_exe()?.with_file_name("strake");
        if !strake.exists() {
            return Err(format!(
                "{} is missing; build it with `cargo build --release`",
                strake.display()
            )
            .into());
        }
        Ok(Cluster {
            strake,
            dir: root.join("cluster"),
            mount: root.join("mnt"),
            root: root.to_path_buf(),
        })
    }

    pub fn strake(&self, args: &[&str]) -> Result<String> {
        let out = Command::new(&self.strake).args(args).output()?;
        if !out.status.success() {
            return Err(format!(
                "strake {} failed: {}",
                args.join(" "),
                String::from_utf8_lossy(&out.stderr)
            )
            .into());
        }
        Ok(String::from_utf8(out.stdout)?)
    }

    pub fn lfs(&self, args: &[&str]) -> Result<String> {
        self.strake(&[&["lfs"], args].concat())
    }

    pub fn up(&self) -> Result<()> {
        let status = Command::new(&self.strake)
            .args([
                "up",
                "--timeout",
                "120",
                "--dir",
                path(&self.dir)?,
                "--mount",
                path(&self.mount)?,
            ])
            .stdout(std::process::Stdio::null())
            .status()?;
        if status.success() { Ok(()) } else { Err("strake up failed".into()) }
    }

    /// The output of `strake status`. Servers that are down are part of it, not an error.
    pub fn status(&self) -> Result<Value> {
        let out = Command::new(&self.strake)
            .args(["status", "--json", "--dir", path(&self.dir)?])
            .output()?;
        serde_json::from_slice(&out.stdout).map_err(|e| {
            format!("strake status: {e}: {}", String::from_utf8_lossy(&out.stderr)).into()
        })
    }

    /// See [`damage`].
    pub fn damage(&self) -> Result<BTreeMap<String, u64>> {
        let all = damage(&self.status()?);
        if all.is_empty() { Err("no storage server reports its targets".into()) } else { Ok(all) }
    }

    pub fn wait_whole(&self, limit: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let s = self.status()?;
            let up =
                s["servers"].as_array().is_some_and(|a| a.iter().all(|v| v["reachable"] == true));
            if up && s["map"]["whole"] == true {
                return Ok(());
            }
            if start.elapsed() > limit {
                return Err(format!(
                    "chains not in sync after {} s: {}",
                    limit.as_secs(),
                    s["map"]["chains"]
                )
                .into());
            }
            sleep(Duration::from_millis(200));
        }
    }

    /// Empties the kernel's caches and the client's, so that reads come from the servers.
    pub fn drop_caches(&self) -> Result<()> {
        self.strake(&["umount", path(&self.mount)?])?;
        if fs::write("/proc/sys/vm/drop_caches", "3").is_err() {
            println!("    (not root: the kernel's page cache below the servers stays warm)");
        }
        self.up()
    }

    /// The running process of a server, from its pid file.
    pub fn pid_of(&self, name: &str) -> Result<i32> {
        Ok(fs::read_to_string(self.dir.join("run").join(format!("{name}.pid")))?.trim().parse()?)
    }

    pub fn mount_replica(&self, replica: u32) -> Result<ReplicaMount> {
        let at = self.root.join(format!("replica{}", replica + 1));
        fs::create_dir_all(&at)?;
        let (config, n) = (self.dir.join("mount.toml"), replica.to_string());
        self.strake(&["mount", "--config", path(&config)?, "--read-replica", &n, path(&at)?])?;
        Ok(ReplicaMount { strake: self.strake.clone(), path: at })
    }

    /// A file outside of the file system under test, for what must be kept about it elsewhere.
    pub fn state_file(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    pub fn next_steps(&self) {
        let (bin, dir, mnt) = (self.strake.display(), self.dir.display(), self.mount.display());
        println!("\nThe cluster stays up. Try next:");
        println!("  {bin} status --dir {dir}");
        println!("  {bin} lfs getstripe {mnt}/demo/checkpoint/rank0.pt");
        println!("  {bin} down --dir {dir}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn damage_is_counted_for_each_life_of_each_target() {
        let of = |pid: u64, errors: u64| {
            json!({ "servers": [{ "pid": 1, "targets": [] },
                { "pid": pid, "targets": [{ "id": 3, "checksum_errors": errors }, { "id": 4 }] }] })
        };
        let one = damage(&of(7, 0));
        assert_eq!(
            one,
            BTreeMap::from([("7 3".into(), 0), ("7 4".into(), 1)]),
            "what is not told is no good news"
        );
        assert_ne!(one, damage(&of(7, 1)));
        assert_ne!(one, damage(&of(8, 0)), "a server that started again forgets what it met");
        assert!(damage(&json!({})).is_empty());
    }
}
