//! The folder of a metadata server: `lock`, `identity`, `log/` (Raft), `state/` (the namespace),
//! `reserve` (reserved disk space), at times `state.damaged/`.
//!
//! `identity` says which member the folder belongs to and what may be done with it. It is written
//! first, and again when everything is in place; from then on a missing log means damage, never a
//! new log.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
};

use rustix::fs::{FlockOperation, flock, statvfs};
use strake_proto::{Code, Error, Incarnation, Result, cap::derive_key};
use strake_store::{FjallStore, fjall_store};

use crate::consensus::DiskOptions;

const MAGIC: &str = "strake mds";
const VERSION: u32 = 1;
const IDENTITY: &str = "identity";
const LOCK: &str = "lock";
pub(crate) const LOG: &str = "log";
pub(crate) const STATE: &str = "state";
/// A state that was found damaged, kept until there is a whole one.
pub(crate) const DAMAGED: &str = "state.damaged";
pub(crate) const RESERVE: &str = "reserve";
/// Bytes of the Raft log that are kept, unless the disk is small.
pub(crate) const LOG_BYTES: u64 = 64 << 20;

/// The contents of an identity file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub member: u64,
    pub cluster: [u8; 16],
    pub state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The folder is being made.
    New,
    Complete,
    /// The member was removed from its group, or its group was recovered without it.
    Removed,
    /// A recovery has begun that makes it the folder of member `to` of a new incarnation; not
    /// usable before that is done.
    Recovering {
        to: u64,
        incarnation: Incarnation,
    },
    /// A dump is being loaded into it.
    Loading,
}

impl State {
    fn text(self) -> String {
        match self {
            State::New => "new".into(),
            State::Complete => "complete".into(),
            State::Removed => "removed".into(),
            State::Recovering { to, incarnation } => {
                format!("recovering {to} {:016x}", incarnation.0)
            }
            State::Loading => "loading".into(),
        }
    }

    fn parse(text: &str) -> Option<State> {
        let mut words = text.split(' ');
        let state = match words.next()? {
            "new" => State::New,
            "complete" => State::Complete,
            "removed" => State::Removed,
            "loading" => State::Loading,
            "recovering" => {
                let to = words.next()?.parse().ok()?;
                let incarnation = Incarnation(u64::from_str_radix(words.next()?, 16).ok()?);
                State::Recovering { to, incarnation }
            }
            _ => return None,
        };
        (state.text() == text).then_some(state)
    }
}

impl Record {
    pub(crate) fn text(&self) -> String {
        let state = self.state.text();
        format!(
            "{MAGIC} {VERSION}\nmember {}\ncluster {}\nstate {state}\n",
            self.member,
            hex::encode(self.cluster)
        )
    }

    pub(crate) fn parse(text: &str) -> Result<Record> {
        let bad =
            || Error::new(Code::Corrupt, "a metadata server did not write this; restore the file");
        let mut lines = text.lines();
        let version = lines
            .next()
            .and_then(|l| l.strip_prefix(MAGIC))
            .and_then(|v| v.trim().parse::<u32>().ok());
        match version {
            None => return Err(bad()),
            Some(v) if v > VERSION => {
                let m = format!("format {v}, this program knows {VERSION}: run a newer strake");
                return Err(Error::new(Code::Protocol, m));
            }
            Some(_) => (),
        }
        let mut value = |key: &str| {
            lines.next().and_then(|l| l.strip_prefix(key)).map(str::trim).ok_or_else(bad)
        };
        let member = value("member ")?.parse().map_err(|_| bad())?;
        let cluster_hex = value("cluster ")?;
        let state = State::parse(value("state ")?).ok_or_else(bad)?;
        let mut cluster = [0; 16];
        if cluster_hex.len() != 32 || !cluster_hex.is_ascii() {
            return Err(bad());
        }
        for (i, b) in cluster.iter_mut().enumerate() {
            *b = u8::from_str_radix(&cluster_hex[i * 2..i * 2 + 2], 16).map_err(|_| bad())?;
        }
        Ok(Record { member, cluster, state })
    }

    /// Reads the folder's identity, `None` if it has none yet.
    pub(crate) fn read(dir: &Path) -> Result<Option<Record>> {
        let path = dir.join(IDENTITY);
        match fs::read_to_string(&path) {
            Ok(text) => Record::parse(&text).map(Some).map_err(|e| at(&path, e)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(at(&path, e)),
        }
    }

    /// Writes it durably, whole or not at all.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let (path, tmp) = (dir.join(IDENTITY), dir.join("identity.tmp"));
        if fs::read_to_string(&path).is_ok_and(|t| t == self.text()) {
            return Ok(());
        }
        let write = || -> io::Result<()> {
            let mut f = File::create(&tmp)?;
            f.write_all(self.text().as_bytes())?;
            f.sync_all()?;
            fs::rename(&tmp, &path)?;
            File::open(dir)?.sync_all()
        };
        write().map_err(|e| at(&path, e))
    }
}

pub(crate) fn at(path: &Path, e: impl Into<Error>) -> Error {
    e.into().context(path.display())
}

/// The group's id on the wire and on disk: it follows from the secret and the file system name.
pub(crate) fn cluster_id(cluster_key: &[u8; 32], fs_name: &str) -> [u8; 16] {
    let full = derive_key(cluster_key, &format!("strake metadata group v1 {fs_name}"));
    let mut id = [0; 16];
    id.copy_from_slice(&full[..16]);
    id
}

/// Locks the folder until the file is closed. `Busy` while a server or another command uses it.
pub(crate) fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| at(&path, e))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(Error::new(
            Code::Busy,
            format!("{} is in use by another metadata server", dir.display()),
        ));
    }
    Ok(lock)
}

/// A folder without an identity must hold nothing but what an interrupted start leaves.
pub(crate) fn refuse_foreign(dir: &Path) -> Result<()> {
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

/// Sizes that fit the disk below a folder: on a small disk everything is smaller.
pub(crate) struct Sizes {
    /// Bytes of the file system.
    pub total: u64,
    /// Bytes of a segment of the Raft log.
    pub segment: u64,
}

impl Sizes {
    pub(crate) fn of(dir: &Path) -> Result<Sizes> {
        let s = statvfs(dir).map_err(|e| at(dir, io::Error::from(e)))?;
        let total = s.f_blocks.saturating_mul(s.f_frsize);
        Ok(Sizes { total, segment: (total / 64).clamp(1 << 20, LOG_BYTES) & !4095 })
    }

    pub(crate) fn log(&self) -> DiskOptions {
        DiskOptions { segment_bytes: self.segment as usize }
    }

    /// Opens the state, or makes it.
    pub(crate) fn store(&self, dir: &Path, cache_bytes: u64) -> Result<FjallStore> {
        let memtable_bytes = (self.total / 64).clamp(1 << 20, 64 << 20);
        let journal_bytes = (self.total / 8).clamp(64 << 20, 256 << 20);
        let options = fjall_store::Options {
            cache_bytes,
            journal_bytes,
            memtable_bytes,
            ..Default::default()
        };
        FjallStore::open_with(dir.join(STATE), &options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_golden_and_checked() {
        let r = Record { member: 3, cluster: [0xab; 16], state: State::Complete };
        let golden =
            "strake mds 1\nmember 3\ncluster abababababababababababababababab\nstate complete\n";
        assert_eq!(r.text(), golden);
        assert_eq!(Record::parse(golden).unwrap(), r);
        assert_eq!(
            Record::parse(&golden.replace("mds 1", "mds 2")).unwrap_err().code,
            Code::Protocol
        );
        for n in 0..golden.len() - 1 {
            assert!(Record::parse(&golden[..n]).is_err(), "cut at {n}");
        }
        let recovering =
            State::Recovering { to: 4, incarnation: Incarnation(0x0001_00c0_ffee_0000) };
        for (state, text) in [
            (State::New, "new"),
            (State::Removed, "removed"),
            (State::Loading, "loading"),
            (recovering, "recovering 4 000100c0ffee0000"),
        ] {
            let r = Record { state, ..r.clone() };
            assert_eq!(r.text(), golden.replace("complete", text));
            assert_eq!(Record::parse(&r.text()).unwrap(), r);
        }
        let odd = [
            "recovering",
            "recovering 4",
            "recovering 4 1",
            "recovering x 000100c0ffee0000",
            "new 1",
            "else",
        ];
        let odd = odd.map(|o| golden.replace("complete", o));
        let bad =
            ["", "x", "strake oss 1\n", &golden.replace("ab", "zz"), &golden.replace("abab", "é")];
        for bad in bad.into_iter().chain(odd.iter().map(String::as_str)) {
            assert_eq!(Record::parse(bad).unwrap_err().code, Code::Corrupt, "{bad}");
        }
    }
}
