//! Calling the program and reading what it says.

use std::process::{Command, Output};

pub fn strake() -> Command {
    Command::new(env!("CARGO_BIN_EXE_strake"))
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
pub fn ok(out: &Output) -> String {
    assert!(out.status.success(), "{}\n{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

/// SIGKILL to the process of a file with a process id.
pub fn kill(pid: &str) {
    signal(pid, rustix::process::Signal::KILL);
}

pub fn signal(pid: &str, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Fails with a message that has all of `words`.
#[track_caller]
pub fn refused(out: &Output, words: &[&str]) {
    let err = text(&out.stderr);
    assert!(!out.status.success(), "succeeded: {}", text(&out.stdout));
    for w in words {
        assert!(err.contains(w), "'{w}' is not in: {err}");
    }
    assert!(!err.contains("panicked"), "{err}");
}
