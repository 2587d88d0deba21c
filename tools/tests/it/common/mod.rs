//! Calling the program and reading what it says.

use std::{
    fs,
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

/// The program that was built, or the one that `STRAKE` names.
pub fn strake() -> Command {
    Command::new(std::env::var_os("STRAKE").unwrap_or_else(|| env!("CARGO_BIN_EXE_strake").into()))
}

/// `strake up` with this many metadata and storage servers, and one target of 1 GiB on each of the
/// latter.
pub fn up(mds: u32, oss: u32) -> Command {
    let mut c = strake();
    c.args(["up", &format!("--mds={mds}"), &format!("--oss={oss}")]);
    c.args(["--targets-per-oss=1", "--target-gib=1"]);
    c
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
pub fn ok(out: &Output) -> String {
    assert!(out.status.success(), "{}\n{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

/// Waits until `f` holds. Fails when that takes longer than `limit`, and says what was waited for.
#[track_caller]
pub fn eventually(what: impl std::fmt::Display, limit: Duration, mut f: impl FnMut() -> bool) {
    let start = Instant::now();
    while !f() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sends SIGKILL to the process with this id. When this returns, the process has released its files
/// and ports.
pub fn kill(pid: &str) {
    signal(pid, rustix::process::Signal::KILL);
    let what = format!("process {pid}, which was killed, ends");
    eventually(what, Duration::from_secs(30), || !holds_something(pid.trim()));
}

/// A process that has ended may remain as a zombie until its parent looks. Its main thread may
/// be one before its other threads, which keep its files open.
fn holds_something(pid: &str) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let zombie = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X']));
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    !zombie || threads > 1
}

pub fn signal(pid: &str, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Asserts that the command failed with a message that contains all of `words`.
#[track_caller]
pub fn refused(out: &Output, words: &[&str]) {
    let err = text(&out.stderr);
    assert!(!out.status.success(), "succeeded: {}", text(&out.stdout));
    for w in words {
        assert!(err.contains(w), "'{w}' is not in: {err}");
    }
    assert!(!err.contains("panicked"), "{err}");
}
