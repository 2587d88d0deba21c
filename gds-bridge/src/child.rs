//! Other processes that look at a driver, which may hang or crash there: how long they are waited
//! for, and how they ended.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Child, ExitStatus},
    thread,
    time::{Duration, Instant},
};

/// How long a killed one may take to be gone. One that a driver holds in the kernel may stay for
/// ever; it is left then.
pub const GOING: Duration = Duration::from_secs(1);

/// Waits for its end, until then.
pub fn reap(child: &mut Child, until: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
            Ok(status) => return status,
            Err(_) => return None,
        }
    }
}

/// Kills one that is not waited for any longer.
pub fn kill(child: &mut Child) {
    let _ = child.kill();
    reap(child, Instant::now() + GOING);
}

/// For people: "ended with 3", "was killed by signal 11".
pub fn how_it_ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(n), _) => format!("was killed by signal {n}"),
        (None, code) => format!("ended with {}", code.unwrap_or_default()),
    }
}
