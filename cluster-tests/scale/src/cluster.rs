//! The cluster under test: real processes, started by `strake up` and observed through `/proc`.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde_json::Value;
use strake_runtime::keyfile::{ClientKey, read_client};

use crate::{Args, Result};

pub struct Cluster {
    strake: PathBuf,
    dir: PathBuf,
    numbers: [String; 2],
    /// Metadata servers' endpoints.
    pub mds: Vec<String>,
    pub client_key: ClientKey,
    pub oss: u32,
}

/// The resources that a process has used, from `/proc`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Seconds of user and system time since it started.
    pub cpu: f64,
    /// Resident memory, bytes.
    pub rss: u64,
    pub threads: u64,
}

impl Cluster {
    pub fn start(args: &Args) -> Result<Cluster> {
        let temp = std::env::temp_dir().join(format!("strake-scale-{}", std::process::id()));
        let mut c = Cluster {
            strake: args.strake.clone(),
            dir: args.dir.clone().unwrap_or(temp),
            numbers: [args.oss.to_string(), args.targets_per_oss.to_string()],
            mds: Vec::new(),
            client_key: ClientKey::from([0; 32]),
            oss: args.oss,
        };
        if c.dir.exists() {
            return Err(format!("{} exists already; name another --dir", c.dir.display()).into());
        }
        let said = c.up()?;
        let mds = said
            .lines()
            .find_map(|l| l.strip_prefix("metadata"))
            .ok_or("`strake up` names no metadata servers")?;
        c.mds = mds.trim().split(',').map(String::from).collect();
        c.client_key = read_client(&c.dir.join("client.key"))?;
        Ok(c)
    }

    /// Starts the servers that do not run and waits until everything is in service. Returns the
    /// output.
    pub fn up(&self) -> Result<String> {
        let mut up = Command::new(&self.strake);
        up.arg("up").arg("--dir").arg(&self.dir);
        up.args([
            "--mount",
            "none",
            "--mds",
            "3",
            "--mirror",
            "2",
            "--target-gib",
            "1",
            "--timeout",
            "900",
        ]);
        up.args(["--oss", &self.numbers[0], "--targets-per-oss", &self.numbers[1]]);
        let out = up.stdin(Stdio::null()).output()?;
        if !out.status.success() {
            return Err(format!("strake up: {}", String::from_utf8_lossy(&out.stderr)).into());
        }
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    pub fn pid(&self, server: &str) -> Result<i32> {
        let file = self.dir.join("run").join(format!("{server}.pid"));
        let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(text.trim().parse()?)
    }

    /// Process numbers of all servers, by name.
    pub fn pids(&self) -> Result<BTreeMap<String, i32>> {
        let names =
            (1..=3).map(|n| format!("mds{n}")).chain((1..=self.oss).map(|n| format!("oss{n}")));
        names.map(|n| self.pid(&n).map(|pid| (n, pid))).collect()
    }

    /// Name of the metadata server that leads.
    pub fn leader(&self) -> Result<String> {
        let out = Command::new(&self.strake)
            .args(["status", "--json", "--dir"])
            .arg(&self.dir)
            .output()?;
        let status: Value = serde_json::from_slice(&out.stdout)?;
        let servers = status["servers"].as_array().ok_or("`strake status` lists no servers")?;
        let leads = |s: &&Value| s["raft"]["id"].is_u64() && s["raft"]["id"] == s["raft"]["leader"];
        let leader = servers.iter().find(leads).ok_or("no metadata server leads")?;
        Ok(leader["name"].as_str().unwrap_or_default().to_string())
    }

    /// Kills a server with SIGKILL.
    pub fn kill(&self, server: &str) -> Result<()> {
        // SAFETY: sends a signal to a process that this cluster started and whose pid file names
        // it.
        match unsafe { libc::kill(self.pid(server)?, libc::SIGKILL) } {
            0 => Ok(()),
            _ => Err(format!("killing {server}: {}", std::io::Error::last_os_error()).into()),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let mut down = Command::new(&self.strake);
        let _ = down
            .args(["down", "--delete", "--dir"])
            .arg(&self.dir)
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .status();
    }
}

/// The resources that a process has used; 0 stands for this process.
pub fn usage(pid: i32) -> Result<Usage> {
    let at = if pid == 0 { "/proc/self".to_string() } else { format!("/proc/{pid}") };
    let stat = fs::read_to_string(format!("{at}/stat"))?;
    // After the command, which may contain blanks. The times are fields 14 and 15, in hundredths of
    // a second (proc(5)).
    let fields: Vec<&str> =
        stat.rsplit_once(')').ok_or("no command in stat")?.1.split_ascii_whitespace().collect();
    let ticks =
        |n: usize| fields.get(n - 3).and_then(|f| f.parse::<f64>().ok()).ok_or("a short stat");
    let status = fs::read_to_string(format!("{at}/status"))?;
    let number = |key: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(key))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let rss = number("VmRSS:").ok_or("no VmRSS")? << 10;
    Ok(Usage {
        cpu: (ticks(14)? + ticks(15)?) / 100.0,
        rss,
        threads: number("Threads:").unwrap_or(0),
    })
}
