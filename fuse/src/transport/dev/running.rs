//! Detects programs that run from files of the mount.
//!
//! The kernel does not allow writes to a running program. For `O_WRONLY` and `O_RDWR` it checks
//! before it sends OPEN. For `O_RDONLY | O_TRUNC` it sends OPEN first and checks afterwards: the
//! file would be truncated although open(2) returns `ETXTBSY`, and the program would die of the
//! missing pages. So the mount checks this case itself.

use std::{fs, path::Path, sync::Arc};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use strake_proto::Ino;

use crate::table;

/// Whether these open flags truncate without a check by the kernel.
pub(super) fn cuts_unseen(flags: u32) -> bool {
    flags & (libc::O_ACCMODE | libc::O_TRUNC) as u32 == libc::O_TRUNC as u32
}

/// Whether a program that this process can see in `/proc` runs from the file `ino` of the file
/// system mounted at `at`.
pub(super) async fn runs(at: &Arc<Path>, ino: Ino) -> bool {
    let at = at.clone();
    tokio::task::spawn_blocking(move || is_run(&at, ino)).await.unwrap_or(false)
}

fn is_run(at: &Path, ino: Ino) -> bool {
    let mounts = table::mounts().unwrap_or_default();
    let Some(device) = table::topmost(&mounts, at).map(|m| &m.device) else { return false };
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    let is_number = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    processes.flatten().filter(|p| is_number(&p.file_name())).any(|p| {
        // Does not ask any file system, least of all this one.
        let program = statx(CWD, p.path().join("exe"), AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
        program.is_ok_and(|s| {
            s.stx_ino == ino && *device == format!("{}:{}", s.stx_dev_major, s.stx_dev_minor)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::MetadataExt, process::Command};

    use super::*;

    #[test]
    fn only_cuts_without_the_right_to_write_are_unseen() {
        let seen = [
            libc::O_TRUNC,
            libc::O_TRUNC | libc::O_APPEND,
            libc::O_RDONLY,
            libc::O_RDWR | libc::O_TRUNC,
        ];
        assert_eq!(seen.map(|f| cuts_unseen(f as u32)), [true, true, false, false]);
        assert!(!cuts_unseen((libc::O_WRONLY | libc::O_TRUNC) as u32));
    }

    #[test]
    fn a_program_is_found_while_it_runs() {
        let mine = fs::metadata("/proc/self/exe").unwrap();
        let device = format!("{}:{}", rustix::fs::major(mine.dev()), rustix::fs::minor(mine.dev()));
        let mounts = table::mounts().unwrap();
        let Some(at) = mounts.iter().find(|m| m.device == device).map(|m| m.at.clone()) else {
            println!("skipped: the mount table does not show where this program lies");
            return;
        };
        if table::topmost(&mounts, &at).is_none_or(|m| m.device != device) {
            println!("skipped: something else is mounted over it");
            return;
        }
        assert!(is_run(&at, mine.ino()));
        let copy =
            tempfile::NamedTempFile::new_in(std::env::current_exe().unwrap().parent().unwrap())
                .unwrap();
        let ino = copy.as_file().metadata().unwrap().ino();
        assert!(!is_run(&at, ino), "nobody runs it");
        fs::copy("/bin/sleep", copy.path()).unwrap();
        fs::set_permissions(copy.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        // The file is not open for writing any more.
        let path = copy.into_temp_path();
        // Other tests start programs, which inherit the open descriptors until they exec.
        let mut program = loop {
            match Command::new(&path).arg("60").spawn() {
                Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                    std::thread::yield_now()
                }
                r => break r.unwrap(),
            }
        };
        assert!(is_run(&at, ino) && !is_run(Path::new("/nowhere"), ino));
        program.kill().unwrap();
        program.wait().unwrap();
        assert!(!is_run(&at, ino));
    }
}
