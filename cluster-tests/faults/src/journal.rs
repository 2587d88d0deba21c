//! The promises, recorded outside the cluster: one line per promise, which counts only once it is
//! synced.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use sha2::{Digest, Sha256};

use crate::Result;

pub struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    count: AtomicU64,
}

/// A name that must exist and begin with at least these bytes, or a name that must be gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    pub name: String,
    /// Length and checksum of those bytes; `None`: the name was removed.
    pub content: Option<(u64, String)>,
}

impl Promise {
    /// Compares with what the mount shows.
    pub fn check(&self, mount: &Path) -> Result<()> {
        let path = mount.join(&self.name);
        let Some((len, sum)) = &self.content else {
            // Not `exists()`, which takes an error of a broken mount for absence.
            return if path.try_exists()? {
                Err("was unlinked but is there".into())
            } else {
                Ok(())
            };
        };
        let mut bytes = Vec::new();
        File::open(&path)?.take(*len).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != *len {
            return Err(format!("has {} of {len} bytes", bytes.len()).into());
        }
        if sha256(&bytes) != *sum {
            return Err("content differs".into());
        }
        Ok(())
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

impl Journal {
    pub fn create(path: &Path) -> Result<Journal> {
        let file = OpenOptions::new().create_new(true).append(true).open(path)?;
        Ok(Journal { path: path.to_path_buf(), file: Mutex::new(file), count: AtomicU64::new(0) })
    }

    /// To be called after the call that makes the promise has returned.
    pub fn note(&self, p: &Promise) -> Result<()> {
        let line = match &p.content {
            Some((len, sum)) => format!("has {} {len} {sum}\n", p.name),
            None => format!("gone {}\n", p.name),
        };
        let mut f = self.file.lock().map_err(|_| "journal poisoned")?;
        f.write_all(line.as_bytes())?;
        f.sync_data()?;
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    pub fn len(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The last promise on each name.
    pub fn current(&self) -> Result<Vec<Promise>> {
        let mut last = BTreeMap::new();
        for line in fs::read_to_string(&self.path)?.lines() {
            let f: Vec<&str> = line.split(' ').collect();
            let p = match f[..] {
                ["has", name, len, sum] => {
                    Promise { name: name.into(), content: Some((len.parse()?, sum.into())) }
                }
                ["gone", name] => Promise { name: name.into(), content: None },
                _ => return Err(format!("journal line {line:?}").into()),
            };
            last.insert(p.name.clone(), p);
        }
        Ok(last.into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_promise_on_a_name_counts_and_broken_ones_are_seen() {
        let dir = env_dir("journal");
        let j = Journal::create(&dir.join("j")).unwrap();
        let has = |n: &str, b: &[u8]| Promise {
            name: n.into(),
            content: Some((b.len() as u64, sha256(b))),
        };
        let gone = |n: &str| Promise { name: n.into(), content: None };
        for p in [has("a", b"1"), has("b", b"22"), gone("a")] {
            j.note(&p).unwrap();
        }
        assert_eq!(j.current().unwrap(), vec![gone("a"), has("b", b"22")]);
        assert_eq!(j.len(), 3);
        fs::write(dir.join("b"), b"22 and more").unwrap();
        assert!(has("b", b"22").check(&dir).is_ok());
        assert!(has("b", b"23").check(&dir).is_err());
        assert!(has("b", b"22 and more!").check(&dir).is_err());
        assert!(has("c", b"").check(&dir).is_err());
        assert!(gone("b").check(&dir).is_err());
        assert!(gone("c").check(&dir).is_ok());
        // Here the "mount" is a file, so every name below it is an error, as on a mount whose
        // process has died.
        assert!(gone("c").check(&dir.join("b")).is_err());
        fs::remove_dir_all(dir).unwrap();
    }

    fn env_dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("strake-faults-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }
}
