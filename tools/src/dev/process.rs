//! The processes of a local cluster: started in sessions of their own, found again by their pid files.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use strake_proto::{Code, Error, Result};

use super::Cluster;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Mds(u32),
    Oss(u32),
    Mount,
}

impl Role {
    pub fn name(&self) -> String {
        match self {
            Role::Mds(n) => format!("mds{n}"),
            Role::Oss(n) => format!("oss{n}"),
            Role::Mount => "mount".into(),
        }
    }
}

fn pid_file(c: &Cluster, role: &Role) -> PathBuf {
    c.dir().join("run").join(format!("{}.pid", role.name()))
}

fn log_file(c: &Cluster, role: &Role) -> PathBuf {
    c.logs().join(format!("{}.log", role.name()))
}

/// The pid in the file, if that process runs with this role's configuration file (pids are reused).
pub fn running(c: &Cluster, role: &Role) -> Option<Pid> {
    let pid: i32 = fs::read_to_string(pid_file(c, role)).ok()?.trim().parse().ok()?;
    let cmdline = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let config = c.config_of(role).display().to_string();
    let ours = cmdline.split(|b| *b == 0).any(|arg| arg == config.as_bytes());
    if ours { Pid::from_raw(pid) } else { None }
}

/// Starts it unless it runs; true if it was started.
pub fn ensure_running(c: &Cluster, role: &Role) -> Result<bool> {
    if running(c, role).is_some() {
        return Ok(false);
    }
    let log = fs::OpenOptions::new().create(true).append(true).open(log_file(c, role))?;
    let mut cmd = Command::new(std::env::current_exe()?);
    match role {
        Role::Mds(_) => cmd.arg("mds"),
        Role::Oss(_) => cmd.arg("oss"),
        Role::Mount => cmd.args(["mount", "--foreground"]),
    };
    cmd.arg("--config").arg(c.config_of(role)).current_dir("/");
    cmd.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // SAFETY: setsid is async-signal-safe and touches nothing of the parent.
    unsafe {
        cmd.pre_exec(|| {
            libc::setsid();
            Ok(())
        });
    }
    let child = cmd.spawn().map_err(|e| Error::from(e).context(format!("starting {}", role.name())))?;
    fs::write(pid_file(c, role), format!("{}\n", child.id()))?;
    Ok(true)
}

/// Asks it to end, and makes it end after ten seconds.
pub fn stop(c: &Cluster, role: &Role) {
    if let Some(pid) = running(c, role) {
        let _ = kill_process(pid, Signal::TERM);
        if !wait_end(c, role, Duration::from_secs(10)) {
            let _ = kill_process(pid, Signal::KILL);
            wait_end(c, role, Duration::from_secs(5));
        }
    }
    let _ = fs::remove_file(pid_file(c, role));
}

pub fn wait_end(c: &Cluster, role: &Role, limit: Duration) -> bool {
    let start = Instant::now();
    while let Some(pid) = running(c, role) {
        // A child of ours stays a zombie until it is waited for; a zombie has no command line, so this is only tidy.
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// An error with the last lines of the process's log.
pub fn failure(c: &Cluster, role: &Role, what: &str) -> Error {
    let path = log_file(c, role);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(5)..].join("\n  ");
    Error::new(Code::Io, format!("{} {what}; the end of {}:\n  {tail}", role.name(), path.display()))
}
