//! Checks that fjall's lists of tables are intact.
//!
//! A keyspace's folder has a list `vN` for each version of its tables. Its file `current` holds the
//! number N (`u64`), the XXH3 of the whole list (`u128`) and 0 (`u8`: the kind of checksum). fjall
//! (3.1) writes the checksum and never checks it: with a flipped bit it opens with a table missing,
//! or with the tables of another version. The list is synced before `current` names it, so the two
//! match after any crash.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use strake_proto::{Code, Error, Result};
use xxhash_rust::xxh3::xxh3_128;

/// `Corrupt` unless each list in the store in `path` is whole.
pub fn check(path: &Path) -> Result<()> {
    let keyspaces = match fs::read_dir(path.join("keyspaces")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for keyspace in keyspaces {
        let keyspace = keyspace?.path();
        match fs::read(keyspace.join("current")) {
            // Being made, or being removed.
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                continue;
            }
            current => check_list(&keyspace, &current?)?,
        }
    }
    Ok(())
}

fn check_list(keyspace: &Path, current: &[u8]) -> Result<()> {
    let damaged = |at: PathBuf| {
        Error::new(
            Code::Corrupt,
            format!("{} is damaged: it differs from what was written", at.display()),
        )
    };
    let parts = current
        .split_first_chunk::<8>()
        .and_then(|(n, rest)| Some((n, rest.split_first_chunk::<16>()?)));
    let Some((number, (sum, [0]))) = parts else { return Err(damaged(keyspace.join("current"))) };
    let list = keyspace.join(format!("v{}", u64::from_le_bytes(*number)));
    match fs::read(&list) {
        Ok(bytes) if xxh3_128(&bytes) == u128::from_le_bytes(*sum) => Ok(()),
        Ok(_) => Err(damaged(list)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(damaged(keyspace.join("current"))),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::Code;

    use super::*;
    use crate::{FjallStore, MetaStore};

    #[test]
    fn any_bit_of_what_names_the_files_of_a_store_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let store = FjallStore::open(dir.path()).unwrap();
        store.clear().unwrap();
        drop(store);
        let mut hit = 0;
        for keyspace in fs::read_dir(dir.path().join("keyspaces")).unwrap() {
            let keyspace = keyspace.unwrap().path();
            let current = fs::read(keyspace.join("current")).unwrap();
            let version = format!("v{}", u64::from_le_bytes(*current.first_chunk().unwrap()));
            for name in ["current", &version] {
                let (path, good) = (keyspace.join(name), fs::read(keyspace.join(name)).unwrap());
                for bit in 0..good.len() * 8 {
                    let mut bad = good.clone();
                    bad[bit / 8] ^= 1 << (bit % 8);
                    fs::write(&path, &bad).unwrap();
                    let e = FjallStore::open(dir.path())
                        .err()
                        .unwrap_or_else(|| panic!("{name}: bit {bit}"));
                    assert!(
                        e.code == Code::Corrupt
                            && e.message.contains("differs from what was written"),
                        "{name}: bit {bit}: {e}"
                    );
                    hit += 1;
                }
                fs::write(&path, &good).unwrap();
            }
        }
        assert!(hit > 2000, "{hit}");
        drop(FjallStore::open(dir.path()).unwrap());
    }
}
