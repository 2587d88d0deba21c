//! Which files a keyspace of fjall is made of, looked at before fjall believes it.
//!
//! `current` of each keyspace names a version file (`vN`, N as `u64`) and has its checksum (XXH3, `u128`, then a 0 byte). fjall (3.1) does not compare
//! them: a damaged bit there has it panic, ask for more memory than there is, or remove a keyspace that it finds no name for. Both files are
//! synced before they are used, so a loss of power leaves none that differ.

use std::{
    fs,
    io::{self, ErrorKind},
    path::Path,
};

use xxhash_rust::xxh3::xxh3_128;

/// What is damaged of the store in `path`, if anything is.
pub fn damage(path: &Path) -> io::Result<Option<String>> {
    let keyspaces = match fs::read_dir(path.join("keyspaces")) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None), // not made yet
        other => other?,
    };
    for keyspace in keyspaces {
        let keyspace = keyspace?.path();
        let current = match fs::read(keyspace.join("current")) {
            // It was being made, or removed.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            other => other?,
        };
        if !is_whole(&keyspace, &current)? {
            return Ok(Some(format!("{} and the file that it names do not fit", keyspace.join("current").display())));
        }
    }
    Ok(None)
}

fn is_whole(keyspace: &Path, current: &[u8]) -> io::Result<bool> {
    let parts = current.split_first_chunk::<8>().and_then(|(id, rest)| Some((id, rest.split_first_chunk::<16>()?)));
    let Some((id, (sum, [0]))) = parts else { return Ok(false) };
    match fs::read(keyspace.join(format!("v{}", u64::from_le_bytes(*id)))) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        version => Ok(xxh3_128(&version?) == u128::from_le_bytes(*sum)),
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
                    let e = FjallStore::open(dir.path()).err().unwrap_or_else(|| panic!("{name}: bit {bit}"));
                    assert!(e.code == Code::Corrupt && e.message.contains("current"), "{name}: bit {bit}: {e}");
                    hit += 1;
                }
                fs::write(&path, &good).unwrap();
            }
        }
        assert!(hit > 2000, "{hit}");
        drop(FjallStore::open(dir.path()).unwrap());
    }
}
