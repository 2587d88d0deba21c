//! Child processes that test a driver, which may hang or crash there: how long to wait for them,
//! and how they ended.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Child, ExitStatus},
    thread,
    time::{Duration, Instant},
};

/// How long a killed process may take to disappear. If a driver holds it in the kernel it may stay
/// for ever; then it is left alone.
pub const GOING: Duration = Duration::from_secs(1);

/// Waits for the end of the process, at most until this time.
pub fn reap(child: &mut Child, until: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
            Ok(status) => return status,
            Err(_) => return None,
        }
    }
}

/// Kills a process whose time is up.
pub fn kill(child: &mut Child) {
    let _ = child.kill();
    reap(child, Instant::now() + GOING);
}

/// Text for people: "ended with 3", "was killed by signal 11".
pub fn how_it_ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(n), _) => format!("was killed by signal {n}"),
        (None, code) => format!("ended with {}", code.unwrap_or_default()),
    }
}
