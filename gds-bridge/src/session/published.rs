//! What the running sessions of this node moved, by file and tier, for `lfs path`. Each session has
//! a file in a folder of its user, locked as long as it runs.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use rustix::process::{geteuid, getuid};
use serde_json::{Value, json};

use crate::{
    Tier,
    tier::ByTier,
    tier_counters::{FileTiers, TierCounters},
};

/// Minimum time between two writes.
const PAUSE: Duration = Duration::from_millis(250);
/// A larger file was not written by a session.
const LARGEST: u64 = 4 << 20;
/// The file is written in place: a reader that sees a half-written file reads again.
const READS: u32 = 20;

/// The folder of this process's sessions: below `/run/strake` for root, else below
/// `$XDG_RUNTIME_DIR/strake`; none where neither exists.
pub fn folder() -> Option<PathBuf> {
    if geteuid().is_root() {
        return Some("/run/strake/gds".into());
    }
    // Ignored in a program with more rights than the user who started it.
    let dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| geteuid() == getuid())?;
    Some(Path::new(&dir).join("strake/gds"))
}

/// The folders whose sessions this user may see: root sees all users'.
pub fn folders() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = folder().into_iter().collect();
    if geteuid().is_root()
        && let Ok(users) = fs::read_dir("/run/user")
    {
        all.extend(users.flatten().map(|u| u.path().join("strake/gds")));
    }
    all
}

/// One session's file, which is removed with it.
struct Published {
    path: PathBuf,
    file: File,
    fs_uuid: String,
}

impl Drop for Published {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Published {
    fn start(folder: &Path, fs_uuid: &[u8]) -> io::Result<Published> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(folder)?;
        remove_dead(folder);
        let name = format!("{}-{}.json", process::id(), NEXT.fetch_add(1, Relaxed));
        // Hidden by another name until it is locked.
        let hidden = folder.join(format!(".{name}"));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&hidden)?;
        let p = Published { path: folder.join(name), file, fs_uuid: hex::encode(fs_uuid) };
        p.file.try_lock()?;
        fs::rename(&hidden, &p.path)?;
        Ok(p)
    }

    fn write(&mut self, tier_counters: &TierCounters) -> io::Result<()> {
        let program = fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let files = tier_counters.files();
        let all = json!({ "version": 1, "pid": process::id(), "program": program.trim_end(), "fs_uuid": self.fs_uuid, "files": files });
        let bytes = serde_json::to_vec(&all)?;
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(&bytes)
    }
}

/// All files of sessions; those that begin with a dot are not locked yet.
fn all(folder: &Path) -> Vec<PathBuf> {
    let is_one = |p: &PathBuf| {
        let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        !name.starts_with('.') && name.ends_with(".json")
    };
    let entries =
        fs::read_dir(folder).map(|all| all.flatten().map(|e| e.path()).filter(is_one).collect());
    entries.unwrap_or_default()
}

/// Removes files of killed processes; another process may do the same concurrently.
fn remove_dead(folder: &Path) {
    for path in all(folder) {
        if open(&path)
            .is_ok_and(|f| f.metadata().is_ok_and(|m| m.is_file()) && f.try_lock_shared().is_ok())
        {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Opens a file to read. Other users' folders may hold anything: follows no link, waits for no
/// pipe.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Publishes until it is dropped. A session also works where publishing fails.
pub async fn publish(folder: PathBuf, fs_uuid: Vec<u8>, tier_counters: Arc<TierCounters>) {
    let failed = |e: io::Error| {
        tracing::debug!("`lfs path` will not know of this session: {}: {e}", folder.display())
    };
    let mut p = match Published::start(&folder, &fs_uuid) {
        Ok(p) => p,
        Err(e) => return failed(e),
    };
    loop {
        tier_counters.changed().await;
        if let Err(e) = p.write(&tier_counters) {
            return failed(e);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// What one running session moved of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Its process id, as the process sees it.
    pub pid: u64,
    /// The program's name.
    pub program: String,
    /// Bytes by tier.
    pub tiers: FileTiers,
}

/// The running sessions in a folder that moved bytes of this file, by process. Skips files that are
/// not of a session.
pub fn look(folder: &Path, fs_uuid: &[u8], ino: u64) -> Vec<Seen> {
    let mut seen: Vec<Seen> =
        all(folder).iter().filter_map(|p| read(p, &hex::encode(fs_uuid), ino)).collect();
    seen.sort_by_key(|s| s.pid);
    seen
}

fn read(path: &Path, fs_uuid: &str, ino: u64) -> Option<Seen> {
    let mut file = open(path).ok()?;
    let is_small = |f: &File| f.metadata().is_ok_and(|m| m.is_file() && m.len() <= LARGEST);
    for _ in 0..READS {
        if !is_small(&file) || file.try_lock_shared().is_ok() {
            // Its owner is gone: nothing writes it any more.
            return None;
        }
        let mut bytes = Vec::new();
        file.rewind().ok()?;
        (&file).take(LARGEST).read_to_end(&mut bytes).ok()?;
        if bytes.is_empty() {
            // Nothing moved yet.
            return None;
        }
        match serde_json::from_slice::<Value>(&bytes) {
            Ok(v) => return seen(&v, fs_uuid, ino),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    None
}

fn seen(v: &Value, fs_uuid: &str, ino: u64) -> Option<Seen> {
    if v["version"] != 1 || v["fs_uuid"] != fs_uuid {
        return None;
    }
    let file = v["files"].get(ino.to_string())?;
    let by = |way: &str| ByTier::new(|t: Tier| file[way][t.name()].as_u64().unwrap_or(0));
    // For a terminal: a process can choose any name for itself.
    let program = v["program"].as_str()?.chars().filter(|c| !c.is_control()).take(64).collect();
    Some(Seen {
        pid: v["pid"].as_u64()?,
        program,
        tiers: FileTiers { loaded: by("loaded"), saved: by("saved") },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Direction;

    #[tokio::test]
    async fn a_living_session_is_seen_and_a_dead_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("gds");
        let tier_counters = Arc::new(TierCounters::default());
        let by = |n| ByTier::new(|t| if t == Tier::BounceTcp { n } else { 0 });
        tier_counters.add(5, Direction::Load, &by(100));
        let task = tokio::spawn(publish(folder.clone(), vec![1, 0xab], tier_counters.clone()));
        let until = async |ino, loaded: u64| {
            while look(&folder, &[1, 0xab], ino)
                .first()
                .is_none_or(|s| s.tiers.loaded.sum() != loaded)
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        until(5, 100).await;
        tier_counters.add(5, Direction::Load, &by(11));
        tier_counters.add(6, Direction::Save, &by(3));
        until(5, 111).await;
        let seen = look(&folder, &[1, 0xab], 6);
        assert_eq!(
            (seen.len(), seen[0].pid, seen[0].tiers.saved[Tier::BounceTcp]),
            (1, process::id().into(), 3)
        );
        assert!(!seen[0].program.is_empty());
        assert_eq!(
            (look(&folder, &[2], 5), look(&folder, &[1, 0xab], 7)),
            (vec![], vec![]),
            "another's, another file"
        );

        // Other things that may lie there: rubbish, a link to it, a pipe, and the file of a killed
        // process.
        let mine = fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
        fs::copy(&mine, folder.join("1-0.json")).unwrap();
        fs::write(folder.join("2-0.json"), b"{").unwrap();
        std::os::unix::fs::symlink(&mine, folder.join("3-0.json")).unwrap();
        let pipe = folder.join("4-0.json");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        assert_eq!(look(&folder, &[1, 0xab], 5).len(), 1);

        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        assert!(!mine.exists() && look(&folder, &[1, 0xab], 5).is_empty());
        let beginning = folder.join(".5-0.json");
        fs::copy(folder.join("1-0.json"), &beginning).unwrap();
        let next = Published::start(&folder, &[1]).unwrap();
        let mut left: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
        left.sort();
        let mut want = vec![folder.join("3-0.json"), pipe, beginning, next.path.clone()];
        want.sort();
        assert_eq!(left, want, "files of the dead are removed by the next one");
    }

    #[test]
    fn what_it_says_is_not_believed_blindly() {
        let file = json!({ "loaded": { "bounce-tcp": 7, "no-tier": 5, "pageable": -1 } });
        let v = json!({ "version": 1, "pid": 3, "program": "a\u{1b}[2Jb", "fs_uuid": "01", "files": { "9": file } });
        let s = seen(&v, "01", 9).unwrap();
        assert_eq!(
            (s.program.as_str(), s.tiers.loaded.sum(), s.tiers.saved.sum()),
            ("a[2Jb", 7, 0)
        );
        for (key, bad) in [
            ("version", json!(2)),
            ("pid", json!("x")),
            ("program", json!(1)),
            ("files", json!([])),
        ] {
            let mut v = v.clone();
            v[key] = bad;
            assert_eq!(seen(&v, "01", 9), None, "{key}");
        }
    }
}
