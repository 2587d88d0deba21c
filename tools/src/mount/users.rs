//! Which processes keep a mount busy, according to `/proc`. Does not access the mount itself: its
//! servers may be away.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use strake_fuse::table::{self, Mounted};

/// Maximum number of lines; the rest is only counted.
const MOST: usize = 20;
/// Time limit for one process.
const PATIENCE: Duration = Duration::from_secs(1);

/// One reason why a mount is busy.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    pid: u32,
    what: String,
}

/// The processes that keep `mount` busy, one line each.
pub fn of(mount: &Mounted) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for m in table::mounts()
        .unwrap_or_default()
        .iter()
        .filter(|m| m.parent == mount.id && m.id != mount.id)
    {
        lines.push(format!("mounted below: {} ({})", m.at.display(), m.kind));
    }
    let mut pids: Vec<u32> = match fs::read_dir("/proc") {
        Ok(all) => all.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect(),
        Err(_) => Vec::new(),
    };
    pids.sort_unstable();
    for pid in pids {
        lines.extend(lines_of(mount.clone(), pid));
    }
    let more = lines.len().saturating_sub(MOST);
    lines.truncate(MOST);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    if lines.is_empty() {
        let who = if rustix::process::geteuid().is_root() {
            ""
        } else {
            "a process of another user, or "
        };
        lines.push(format!(
            "by {who}something that no process shows, such as a loop device, an \
                            NFS export or another namespace"
        ));
    }
    lines
}

/// In a thread with a time limit: a program that is being started (execve) while a file is closed
/// for it can be examined only when the file's server has answered.
fn lines_of(mount: Mounted, pid: u32) -> Vec<String> {
    let (looked, seen) = mpsc::channel();
    thread::spawn(move || {
        let (user, command) = (user_of(pid), command_of(pid));
        let line = |u: Use| format!("pid {pid}, {user}, {command}: {}", u.what);
        let _ = looked.send(uses_of(&mount, pid).into_iter().map(line).collect());
    });
    seen.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        vec![format!(
            "pid {pid}, {}: waits in a call, and cannot be examined before that ends",
            command_of(pid)
        )]
    })
}

fn uses_of(mount: &Mounted, pid: u32) -> Vec<Use> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let is_within = |p: &Path| p.starts_with(&mount.at);
    let mut all = Vec::new();
    for (link, what) in
        [("cwd", "current folder"), ("root", "root folder"), ("exe", "running program")]
    {
        // Only the link's text: following it could wait for a server.
        if let Ok(at) = fs::read_link(proc.join(link))
            && is_within(&at)
            && !in_other_namespace(&proc)
        {
            all.push(Use { pid, what: format!("{what} {}", at.display()) });
        }
    }
    for fd in fs::read_dir(proc.join("fdinfo")).into_iter().flatten().flatten() {
        let info = fs::read_to_string(fd.path()).unwrap_or_default();
        if mount_id(&info) != Some(mount.id) {
            continue;
        }
        let number = fd.file_name().to_string_lossy().into_owned();
        let at = fs::read_link(proc.join("fd").join(&number)).unwrap_or_default();
        all.push(Use { pid, what: format!("open file {} (descriptor {number})", at.display()) });
    }
    let maps = fs::read_to_string(proc.join("maps")).unwrap_or_default();
    let mut mapped: Vec<&str> = maps
        .lines()
        .filter_map(|l| mapping(l, &mount.device))
        .filter(|p| is_within(Path::new(p)))
        .collect();
    mapped.sort_unstable();
    mapped.dedup();
    all.extend(mapped.into_iter().map(|p| Use { pid, what: format!("mapped file {p}") }));
    if all.is_empty() && waits(&proc) {
        all.push(Use {
            pid,
            what: "waits in a call for servers that do not answer, of this mount or of another"
                .into(),
        });
    }
    all
}

/// Whether one of its threads waits for the answer of a FUSE mount, in a call that may hold a file
/// that no descriptor shows: stat(2) of a path, or close(2).
fn waits(proc: &Path) -> bool {
    let threads = fs::read_dir(proc.join("task")).into_iter().flatten().flatten();
    threads
        .map(|t| fs::read_to_string(t.path().join("wchan")).unwrap_or_default())
        .any(|w| is_answer_wait(&w))
}

fn is_answer_wait(wchan: &str) -> bool {
    wchan.contains("fuse") && !wchan.contains("dev_do_read") || wchan == "request_wait_answer"
}

/// Whether the process is in another mount namespace, where paths mean other mounts.
fn in_other_namespace(proc: &Path) -> bool {
    let of = |p: &Path| fs::read_link(p.join("ns/mnt")).ok();
    matches!((of(proc), of(Path::new("/proc/self"))), (Some(a), Some(b)) if a != b)
}

/// Parses `/proc/PID/fdinfo/N`.
fn mount_id(info: &str) -> Option<u64> {
    info.lines().find_map(|l| l.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// The path in a line of `/proc/PID/maps` if its file lies on `device` (`MAJOR:MINOR`, decimal; the
/// line has hexadecimal numbers).
fn mapping<'a>(line: &'a str, device: &str) -> Option<&'a str> {
    let mut rest = line;
    let mut fields = [""; 5];
    for field in &mut fields {
        let (first, tail) = rest.split_once(' ')?;
        (*field, rest) = (first, tail.trim_start());
    }
    let (major, minor) = fields[3].split_once(':')?;
    let number = |s| u32::from_str_radix(s, 16).ok();
    let found = format!("{}:{}", number(major)?, number(minor)?);
    (found == device && rest.starts_with('/')).then_some(rest)
}

fn command_of(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm"))
        .map_or_else(|_| "?".into(), |c| c.trim_end().into())
}

/// The name of the process's user, or the number if it has none.
fn user_of(pid: u32) -> String {
    let Ok(meta) = fs::metadata(format!("/proc/{pid}")) else { return "?".into() };
    let uid = meta.uid().to_string();
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    users.lines().find_map(|l| name_of(l, &uid)).unwrap_or(uid.clone())
}

fn name_of(line: &str, uid: &str) -> Option<String> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    (fields.nth(1)? == uid).then(|| name.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc() {
        assert_eq!(mount_id("pos:\t0\nflags:\t02\nmnt_id:\t45\nino:\t3\n"), Some(45));
        assert_eq!(mount_id("pos:\t0\n"), None);
        let line = "7f0 r--s 00000000 00:2d 17                         /mnt/a b/f (deleted)";
        assert_eq!(mapping(line, "0:45"), Some("/mnt/a b/f (deleted)"));
        assert_eq!(mapping(line, "0:46"), None);
        assert_eq!(mapping("7f0 rw-p 00000000 00:00 0 ", "0:0"), None);
        assert_eq!(mapping("nonsense", "0:0"), None);
        assert!(is_answer_wait("request_wait_answer") && is_answer_wait("__fuse_simple_request"));
        assert!(!is_answer_wait("fuse_dev_do_read.constprop.0") && !is_answer_wait("0"));
        assert_eq!(name_of("alice:x:1000:1000::/home/alice:/bin/sh", "1000"), Some("alice".into()));
        assert_eq!(name_of("alice", "1000"), None);
    }

    #[test]
    fn this_process_keeps_its_folders_mount_busy() {
        let table = table::mounts().unwrap();
        let at = table.iter().rfind(|m| m.at == Path::new("/proc")).unwrap();
        let _open = fs::File::open("/proc/self/status").unwrap();
        let me = uses_of(at, std::process::id());
        assert!(me.iter().any(|u| u.what.starts_with("open file /proc/")), "{me:?}");
        assert!(!of(at).is_empty());
    }
}
