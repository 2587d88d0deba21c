//! A metadata server from its folder: `lock`, `identity`, `log/` (Raft), `state/` (the namespace), `reserve` (space kept
//! back, see `room`).
//!
//! `identity` says whose folder it is and whether it was ever complete. It is written before anything else and once more
//! when everything is there; from then on a missing log is a damaged one, never a new one.

use std::{
    fs::{self, File},
    io::Write as _,
    path::Path,
    sync::Arc,
};

use rustix::fs::{FlockOperation, flock, statvfs};
use strake_fabric::{Env, Identity, Pool, tcp::TcpFabric};
use strake_proto::{CapKey, Code, Error, Result, cap::derive_key};
use strake_store::{FjallStore, fjall_store};

use super::{Config, Disk, MdsServer, Parts, admin, room};
use crate::consensus::{DiskLog, DiskOptions, disk_log};

const MAGIC: &str = "strake mds";
const VERSION: u32 = 1;
const IDENTITY: &str = "identity";
const LOCK: &str = "lock";
const LOG: &str = "log";
const STATE: &str = "state";
const RESERVE: &str = "reserve";

/// Starts a server on TCP from `cfg.dir`, making the folder at the first start. `cluster_key` is the secret that all servers
/// of the cluster share; what clients and other clusters must not forge is derived from it.
///
/// Errors name the folder and what is wrong with it: in use, of another member or cluster, newer, damaged.
pub async fn start_on_disk(cfg: Config, env: Env, cluster_key: [u8; 32]) -> Result<MdsServer> {
    cfg.check()?;
    let cluster = cluster_id(&cluster_key, &cfg.fs_name);
    let lock = open_folder(&cfg, cluster)?;
    let total = statvfs(&cfg.dir)
        .map(|s| s.f_blocks.saturating_mul(s.f_frsize))
        .map_err(|e| at(&cfg.dir, std::io::Error::from(e)))?;
    // On a small disk all of it has to do with less at once.
    let segment = (total / 64).clamp(1 << 20, super::LOG_BYTES) & !4095;
    let memtable_bytes = (total / 64).clamp(1 << 20, 64 << 20);
    let journal_bytes = (total / 8).clamp(64 << 20, 256 << 20);
    let options =
        fjall_store::Options { cache_bytes: cfg.cache_bytes, journal_bytes, memtable_bytes, ..Default::default() };
    let store = FjallStore::open_with(cfg.dir.join(STATE), &options)?;
    let mut voters: Vec<u64> = cfg.peers.iter().map(|p| p.0).chain([cfg.id]).collect();
    voters.sort_unstable();
    voters.dedup();
    if cfg.join {
        voters.clear();
    }
    let log_options = DiskOptions { segment_bytes: segment as usize };
    let log = DiskLog::open(&cfg.dir.join(LOG), cluster, cfg.id, &voters, env.random_u64(), log_options)?;
    write_identity(&cfg.dir, &Record { member: cfg.id, cluster, state: State::Complete })?;
    let fabric = TcpFabric::new(env.clone(), Identity::server(&cluster_key), None, Pool::default(), Default::default());
    let parts = Parts {
        env,
        fabric: Arc::new(fabric),
        log: Arc::new(log),
        store: Arc::new(store),
        cap_key: CapKey::from_cluster_key(&cluster_key),
        cluster,
    };
    let admin_at = cfg.admin;
    let reserve = cfg.reserve_bytes.unwrap_or_else(|| room::default_reserve(total));
    let disk = Disk { reserve_file: Some(cfg.dir.join(RESERVE)), reserve, segment };
    let mut server = super::start_with(cfg, parts, disk).await?;
    server.lock = Some(lock);
    if let Some(at) = admin_at {
        let serve = admin::serve(server.mds.clone(), at)?;
        server.tasks.push(server.mds.env.spawn(serve));
    }
    Ok(server)
}

/// The group's name on its wire and its disks: one secret and one file system name make one.
fn cluster_id(cluster_key: &[u8; 32], fs_name: &str) -> [u8; 16] {
    let full = derive_key(cluster_key, &format!("strake metadata group v1 {fs_name}"));
    let mut id = [0; 16];
    id.copy_from_slice(&full[..16]);
    id
}

#[derive(Debug, PartialEq, Eq)]
struct Record {
    member: u64,
    cluster: [u8; 16],
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The folder is being made.
    New,
    Complete,
    /// The member was removed from its group.
    Removed,
}

impl State {
    const ALL: [(State, &str); 3] = [(State::New, "new"), (State::Complete, "complete"), (State::Removed, "removed")];

    fn word(self) -> &'static str {
        State::ALL.iter().find(|(s, _)| *s == self).map_or("", |(_, w)| w)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

impl Record {
    fn text(&self) -> String {
        let state = self.state.word();
        format!("{MAGIC} {VERSION}\nmember {}\ncluster {}\nstate {state}\n", self.member, hex(&self.cluster))
    }

    fn parse(text: &str) -> Result<Record> {
        let bad = || Error::new(Code::Corrupt, "not what a metadata server wrote; restore the file");
        let mut lines = text.lines();
        let version = lines.next().and_then(|l| l.strip_prefix(MAGIC)).and_then(|v| v.trim().parse::<u32>().ok());
        match version {
            None => return Err(bad()),
            Some(v) if v > VERSION => {
                let m = format!("format {v}, this program knows {VERSION}: run a newer strake");
                return Err(Error::new(Code::Protocol, m));
            }
            Some(_) => (),
        }
        let mut value = |key: &str| lines.next().and_then(|l| l.strip_prefix(key)).map(str::trim).ok_or_else(bad);
        let member = value("member ")?.parse().map_err(|_| bad())?;
        let cluster_hex = value("cluster ")?;
        let word = value("state ")?;
        let state = State::ALL.iter().find(|(_, w)| *w == word).ok_or_else(bad)?.0;
        let mut cluster = [0; 16];
        if cluster_hex.len() != 32 || !cluster_hex.is_ascii() {
            return Err(bad());
        }
        for (i, b) in cluster.iter_mut().enumerate() {
            *b = u8::from_str_radix(&cluster_hex[i * 2..i * 2 + 2], 16).map_err(|_| bad())?;
        }
        Ok(Record { member, cluster, state })
    }
}

/// For the fuzz targets: reads the text of an identity file; what reads is written the same way again.
#[doc(hidden)]
pub fn read_identity(text: &str) -> Result<String> {
    Record::parse(text).map(|r| r.text())
}

fn at(path: &Path, e: impl Into<Error>) -> Error {
    e.into().context(path.display())
}

/// Checks that the folder is this member's or nobody's, and locks it until the file is closed.
fn open_folder(cfg: &Config, cluster: [u8; 16]) -> Result<File> {
    let dir = &cfg.dir;
    strake_store::make_folder(dir)?;
    let lock_path = dir.join(LOCK);
    let lock =
        File::options().create(true).truncate(false).write(true).open(&lock_path).map_err(|e| at(&lock_path, e))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(Error::new(Code::Busy, format!("{} is in use by another metadata server", dir.display())));
    }
    let path = dir.join(IDENTITY);
    let record = match fs::read_to_string(&path) {
        Ok(text) => Record::parse(&text).map_err(|e| at(&path, e))?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            refuse_foreign(dir)?;
            let fresh = Record { member: cfg.id, cluster, state: State::New };
            write_identity(dir, &fresh)?;
            fresh
        }
        Err(e) => return Err(at(&path, e)),
    };
    let refuse = |m: String| Err(Error::new(Code::Inval, format!("{}: {m}", dir.display())));
    if record.member != cfg.id {
        return refuse(format!(
            "this folder is of metadata server {}, the configuration says {}",
            record.member, cfg.id
        ));
    }
    if record.cluster != cluster {
        return refuse("this folder is of another cluster: its key or file system name differs".into());
    }
    if record.state == State::Removed {
        return refuse(format!(
            "metadata server {} was removed from its group; to use this machine again give it an empty folder and an id never \
             used before (docs/membership.md)",
            record.member
        ));
    }
    let log = dir.join(LOG);
    if record.state == State::Complete && fs::read_dir(&log).map_or(true, |mut d| d.next().is_none()) {
        return Err(disk_log::refusal(format!("{} is missing", log.display())));
    }
    Ok(lock)
}

/// Has the folder say that its member was removed, so that it is refused from now on.
pub(super) fn mark_removed(cfg: &Config, cluster: [u8; 16]) {
    if let Err(e) = write_identity(&cfg.dir, &Record { member: cfg.id, cluster, state: State::Removed }) {
        tracing::warn!("cannot mark the folder as that of a removed member: {e}");
    }
}

/// A folder without an identity must hold nothing but what a start that was cut short leaves.
fn refuse_foreign(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(|e| at(dir, e))? {
        let name = entry.map_err(|e| at(dir, e))?.file_name();
        if name != LOCK && name != "identity.tmp" && name != "lost+found" {
            let m = format!(
                "{} holds '{}' but no metadata server's identity; give an empty folder",
                dir.display(),
                name.to_string_lossy()
            );
            return Err(Error::new(Code::Inval, m));
        }
    }
    Ok(())
}

fn write_identity(dir: &Path, record: &Record) -> Result<()> {
    let (path, tmp) = (dir.join(IDENTITY), dir.join("identity.tmp"));
    if fs::read_to_string(&path).is_ok_and(|t| t == record.text()) {
        return Ok(());
    }
    let write = || -> std::io::Result<()> {
        let mut f = File::create(&tmp)?;
        f.write_all(record.text().as_bytes())?;
        f.sync_all()?;
        fs::rename(&tmp, &path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|e| at(&path, e))
}

#[cfg(test)]
mod tests {
    use strake_fabric::Endpoint;

    use super::*;

    fn config(dir: &Path) -> Config {
        Config::new(1, Endpoint::Tcp("127.0.0.1".into(), 0), dir.to_path_buf())
    }

    #[test]
    fn identity_is_golden_and_checked() {
        let r = Record { member: 3, cluster: [0xab; 16], state: State::Complete };
        let golden = "strake mds 1\nmember 3\ncluster abababababababababababababababab\nstate complete\n";
        assert_eq!(r.text(), golden);
        assert_eq!(Record::parse(golden).unwrap(), r);
        assert_eq!(Record::parse(&golden.replace("mds 1", "mds 2")).unwrap_err().code, Code::Protocol);
        for n in 0..golden.len() - 1 {
            assert!(Record::parse(&golden[..n]).is_err(), "cut at {n}");
        }
        let removed = Record { state: State::Removed, ..r };
        assert_eq!(removed.text(), golden.replace("complete", "removed"));
        assert_eq!(Record::parse(&removed.text()).unwrap(), removed);
        for bad in ["", "x", "strake oss 1\n", &golden.replace("ab", "zz"), &golden.replace("abab", "é")] {
            assert_eq!(Record::parse(bad).unwrap_err().code, Code::Corrupt, "{bad}");
        }
    }

    #[test]
    fn folders_of_others_are_refused_with_words() {
        let dir = tempfile::tempdir().unwrap();
        let cfg = config(dir.path());
        let cluster = cluster_id(&[1; 32], "a");
        let held = open_folder(&cfg, cluster).unwrap();
        assert_eq!(open_folder(&cfg, cluster).unwrap_err().code, Code::Busy);
        drop(held);
        open_folder(&cfg, cluster).unwrap();
        let other = open_folder(&cfg, cluster_id(&[1; 32], "b")).unwrap_err();
        assert!(other.message.contains("another cluster"), "{other}");
        let moved = open_folder(&Config { id: 2, ..cfg.clone() }, cluster).unwrap_err();
        assert!(moved.message.contains("metadata server 1"), "{moved}");
        mark_removed(&cfg, cluster);
        let removed = open_folder(&cfg, cluster).unwrap_err();
        assert!(removed.message.contains("was removed from its group"), "{removed}");
        write_identity(dir.path(), &Record { member: 1, cluster, state: State::Complete }).unwrap();
        let lost = open_folder(&cfg, cluster).unwrap_err();
        assert!(
            lost.code == Code::Corrupt && lost.message.contains("Changing the group of metadata servers"),
            "{lost}"
        );
        fs::write(dir.path().join(IDENTITY), "strake mds 9\n").unwrap();
        assert!(open_folder(&cfg, cluster).unwrap_err().message.contains("newer"));

        let foreign = tempfile::tempdir().unwrap();
        fs::write(foreign.path().join("photo.jpg"), "x").unwrap();
        let e = open_folder(&config(foreign.path()), cluster).unwrap_err();
        assert!(e.message.contains("photo.jpg"), "{e}");
    }
}
