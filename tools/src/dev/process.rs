//! The processes of a local cluster: started in sessions of their own, and found again by their pid
//! files.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use strake_proto::{Code, Error, Result};

use super::Cluster;

/// How long a killed process may take to release everything.
const ENDING_LIMIT: Duration = Duration::from_secs(30);
/// How many bytes at the end of a log are searched for the reason why a process ended.
const LAST_WORDS: usize = 64 << 10;
/// How long a process that was just started may have no command line.
const EXEC_LIMIT: Duration = Duration::from_secs(1);

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

/// The state of the process in a role's pid file.
enum State {
    Gone,
    /// Killed or exiting: it no longer serves, but may still hold its ports and locks.
    Ending,
    Running(Pid),
}

/// Whether a process is ending. `None`: there is no such process.
fn is_ending(pid: i32) -> Option<bool> {
    const PF_EXITING: u64 = 4;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the command, which may contain blanks: the state first, the flags seventh.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let dead = matches!(fields.next()?, "Z" | "X");
    let flags: u64 = fields.nth(5)?.parse().ok()?;
    Some(dead || flags & PF_EXITING != 0 || kill_is_pending(pid))
}

/// Whether SIGKILL was sent and not acted on yet.
fn kill_is_pending(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let masks = status
        .lines()
        .filter_map(|l| l.strip_prefix("SigPnd:").or_else(|| l.strip_prefix("ShdPnd:")));
    masks
        .filter_map(|m| u64::from_str_radix(m.trim(), 16).ok())
        .any(|m| m & (1 << (libc::SIGKILL - 1)) != 0)
}

/// Whether every thread of a process has ended; the state of its first thread does not tell that.
fn all_ended(pid: Pid) -> bool {
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return true };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n == 1)
}

/// A process that was started a moment ago has no command line yet: its parent continues when the
/// files are closed for the new program, which happens before the kernel has set the program's
/// arguments. Kernel threads never have one.
fn command_line(pid: i32) -> Vec<u8> {
    let began = Instant::now();
    loop {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if !line.is_empty() || began.elapsed() > EXEC_LIMIT || is_ending(pid).unwrap_or(true) {
            return line;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Pids are reused, so a running process counts only if it was given this role's configuration
/// file. A process that is ending has no command line any more; if it is a stranger, waiting for it
/// is harmless.
fn state(c: &Cluster, role: &Role) -> State {
    let text = fs::read_to_string(pid_file(c, role)).unwrap_or_default();
    let Some(pid) = text.trim().parse().ok().and_then(Pid::from_raw) else { return State::Gone };
    let number = pid.as_raw_nonzero().get();
    let Some(ends) = is_ending(number).filter(|_| !all_ended(pid)) else { return State::Gone };
    if ends {
        return State::Ending;
    }
    let cmdline = command_line(number);
    let config = c.config_of(role).display().to_string();
    let ours = cmdline.split(|b| *b == 0).any(|arg| arg == config.as_bytes());
    if ours { State::Running(pid) } else { State::Gone }
}

/// The pid of the process that serves this role.
pub fn running(c: &Cluster, role: &Role) -> Option<Pid> {
    match state(c, role) {
        State::Running(pid) => Some(pid),
        State::Gone | State::Ending => None,
    }
}

/// Starts the process unless it runs; true if it was started. Waits for a process that is ending:
/// it may still hold its ports and locks.
pub fn ensure_running(c: &Cluster, role: &Role) -> Result<bool> {
    match state(c, role) {
        State::Running(_) => return Ok(false),
        State::Ending if !wait_end(c, role, ENDING_LIMIT) => {
            let m = format!(
                "{} was killed but has not ended in {} s",
                role.name(),
                ENDING_LIMIT.as_secs()
            );
            return Err(Error::new(Code::Busy, m));
        }
        State::Ending | State::Gone => {}
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
    let child =
        cmd.spawn().map_err(|e| Error::from(e).context(format!("starting {}", role.name())))?;
    fs::write(pid_file(c, role), format!("{}\n", child.id()))?;
    Ok(true)
}

/// Asks the process to end, and kills it after ten seconds.
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

/// Waits until the process is gone and has released everything; false after `limit`.
pub fn wait_end(c: &Cluster, role: &Role, limit: Duration) -> bool {
    let start = Instant::now();
    while !matches!(state(c, role), State::Gone) {
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// The reason why a process ended, according to its log.
pub fn last_words(c: &Cluster, role: &Role) -> String {
    let path = log_file(c, role);
    let text = fs::read(&path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(LAST_WORDS)..]);
    let said = |l: &&str| l.starts_with("strake: ");
    let line = text.lines().rfind(said).map(|l| &l["strake: ".len()..]).or(text.lines().last());
    match line {
        Some(l) => format!("{l} ({})", path.display()),
        None => format!("see {}", path.display()),
    }
}

/// An error with the last lines of the process's log.
pub fn failure(c: &Cluster, role: &Role, what: &str) -> Error {
    let path = log_file(c, role);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(5)..].join("\n  ");
    Error::new(
        Code::Io,
        format!("{} {what}; the end of {}:\n  {tail}", role.name(), path.display()),
    )
}
