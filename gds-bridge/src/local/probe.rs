//! Opens cuFile's driver in another process first: it is known to hang, and a process in which it
//! hangs cannot be recovered.

use std::{
    io::Read,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::nvidia::Nvidia;
use crate::{
    Unavailable,
    child::{how_it_ended, kill, reap},
};

/// How long the other process may take.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Exit code of the other process when cuFile is unavailable. The reason is on its output then,
/// after [`SAYS`].
pub const REFUSED: u8 = 3;
const SAYS: &str = "cuFile: ";

/// Runs in the other process: opens the driver. The error is the line that [`probe`] reads.
pub fn look() -> Result<(), String> {
    // If the driver hangs here, this process should die with its parent. Where that is not
    // possible, it may outlive it.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    Nvidia::open_here().map(drop).map_err(|why| format!("{SAYS}{why}"))
}

/// Has `prober` (`strake`) call [`look`], and waits for it at most `limit`.
pub fn probe(prober: &Path, limit: Duration) -> Result<(), Unavailable> {
    let mut command = Command::new(prober);
    command
        .args(["gds", "look-cufile"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| Unavailable::NoProbe {
        program: prober.display().to_string(),
        why: e.to_string(),
    })?;
    let Some(status) = reap(&mut child, Instant::now() + limit) else {
        kill(&mut child);
        return Err(Unavailable::Hung { seconds: limit.as_secs() });
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    if status.code() == Some(i32::from(REFUSED))
        && let Some(out) = child.stdout.take()
    {
        // Its end has closed the pipe, unless it has left a process behind. Only one line is
        // needed.
        let _ = out.take(4096).read_to_string(&mut said);
    }
    // Others, such as drivers, may print anything.
    match said.lines().find_map(|l| l.strip_prefix(SAYS)) {
        Some(why) => Err(Unavailable::CuFile { why: why.into() }),
        None => Err(Unavailable::Died { how: how_it_ended(status) }),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn one_that_hangs_dies_or_refuses_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let prober = |name: &str, script: &str| {
            let path = dir.path().join(name);
            fs::write(
                &path,
                format!("#!/bin/sh\n[ \"$*\" = 'gds look-cufile' ] || exit 9\n{script}\n"),
            )
            .unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            path
        };
        let long = Duration::from_secs(60);
        assert_eq!(probe(&prober("good", "exit 0"), long), Ok(()));
        let refused = probe(
            &prober("refuses", "echo a driver chatters; echo 'cuFile: it is too old'; exit 3"),
            long,
        );
        assert_eq!(refused, Err(Unavailable::CuFile { why: "it is too old".into() }));
        let died = |how: &str| Err(Unavailable::Died { how: how.into() });
        assert_eq!(probe(&prober("dies", "kill -SEGV $$"), long), died("was killed by signal 11"));
        assert_eq!(probe(&prober("silent", "exit 3"), long), died("ended with 3"));
        let begun = Instant::now();
        let hung = probe(&prober("hangs", "exec sleep 1000"), Duration::from_secs(1));
        assert_eq!(hung, Err(Unavailable::Hung { seconds: 1 }));
        assert!(begun.elapsed() < Duration::from_secs(30), "it was waited for");
        let none = probe(&dir.path().join("none"), long);
        assert!(matches!(none, Err(Unavailable::NoProbe { .. })), "{none:?}");
    }
}
