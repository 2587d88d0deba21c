//! The mount for the FUSE limit, in a process of its own: a process that is killed while it has a
//! file of its own mount open waits in the kernel for an answer that never comes.

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
};

use clap::Args;
use strake_fuse::MountConfig;
use strake_proto::{Code, Error, Result};

use super::memory_fs::{MEMORY_FILE, mount_memory_limit};

#[allow(missing_docs, reason = "clap shows what is written here as the help of the command")]
#[derive(Args)]
pub struct MemoryArgs {
    at: PathBuf,
    bytes: u64,
}

/// Mounts, reports it on stdout, and unmounts when stdin ends, that is, when the parent is done or
/// dead.
pub fn serve(args: &MemoryArgs) -> Result<ExitCode> {
    let mount = mount_memory_limit(&MountConfig::new(&args.at), args.bytes)?;
    writeln!(std::io::stdout(), "mounted")?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    drop(mount);
    Ok(ExitCode::SUCCESS)
}

/// A mount that lasts as long as this lives.
pub struct MemoryMount {
    server: Child,
    at: PathBuf,
}

impl MemoryMount {
    pub fn start(at: &Path, bytes: u64) -> Result<MemoryMount> {
        fs::create_dir_all(at)?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("memory-mount")
            .arg(at)
            .arg(bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut m = MemoryMount { server: command.spawn()?, at: at.to_path_buf() };
        let mut said = [0; 8];
        let out = m
            .server
            .stdout
            .as_mut()
            .ok_or_else(|| Error::new(Code::Io, "the memory mount printed nothing"))?;
        // The reason is on stderr, which both processes share.
        out.read_exact(&mut said).map_err(|_| {
            Error::new(Code::Io, "cannot make the mount that measures the limit of FUSE")
        })?;
        Ok(m)
    }

    pub fn file(&self) -> PathBuf {
        self.at.join(MEMORY_FILE)
    }
}

impl Drop for MemoryMount {
    fn drop(&mut self) {
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}
