//! The bench's own mounts, one with each transport, to compare them.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use clap::ValueEnum;
use rustix::process::{Signal, set_parent_process_death_signal};
use strake_proto::{Code, Error, Result};

use super::subject::Subject;

/// How a mount talks to the kernel; see `docs/fuse.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    Dev,
    Fuser,
}

impl Transport {
    /// Whether this program has it; an error says what to do.
    pub fn check(self) -> Result<()> {
        match self {
            Transport::Dev => strake_fuse::Transport::Dev,
            Transport::Fuser => strake_fuse::Transport::Fuser,
        }
        .check()
    }

    pub fn name(self) -> &'static str {
        match self {
            Transport::Dev => "dev",
            Transport::Fuser => "fuser",
        }
    }
}

/// A mount that lasts as long as this lives.
pub struct OwnMount<'a> {
    cluster: &'a dyn Subject,
    process: Child,
    at: PathBuf,
}

impl<'a> OwnMount<'a> {
    /// Mounts the cluster at `at`, which is created. The mount ends with this process, however that
    /// ends.
    pub fn start(
        cluster: &'a dyn Subject,
        transport: Transport,
        at: &Path,
    ) -> Result<OwnMount<'a>> {
        fs::create_dir_all(at)?;
        let config = at.with_extension("toml");
        fs::write(&config, cluster.mount_config(at))?;
        let mut command = Command::new(std::env::current_exe()?);
        // The reason is on stderr, which both processes share.
        command
            .args(["mount", "--foreground", "-o"])
            .arg(format!("log=error,transport={}", transport.name()));
        command.arg("--config").arg(config).stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let mut m = OwnMount { cluster, process: command.spawn()?, at: at.to_path_buf() };
        let start = Instant::now();
        while !cluster.is_mounted(at)? {
            if start.elapsed() > Duration::from_secs(60) || m.process.try_wait()?.is_some() {
                let m =
                    format!("cannot make the bench's mount with transport '{}'", transport.name());
                return Err(Error::new(Code::Io, m));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(m)
    }

    pub fn at(&self) -> &Path {
        &self.at
    }
}

impl Drop for OwnMount<'_> {
    fn drop(&mut self) {
        if self.cluster.is_mounted(&self.at).is_ok_and(|m| m) {
            if self.cluster.unmount(&self.at, false).is_err() {
                let _ = self.cluster.unmount(&self.at, true);
            }
        } else if let Some(pid) = rustix::process::Pid::from_raw(self.process.id() as i32) {
            // It never mounted, and would keep trying.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        let _ = self.process.wait();
    }
}
