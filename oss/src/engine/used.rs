//! Which chains ever stored something on a target. Kept beside the chunk table, in case that is
//! lost: the other chains lose nothing with it.
//!
//! `chains` in the target's folder (`docs/formats.md`): a magic number and the target's UUID, then
//! a record for each chain. A record is durable before the first update of its chain is staged, and
//! is never removed. A file with any damage counts as no file.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::Path,
};

use parking_lot::Mutex;
use strake_proto::{ChainId, checksum::crc32c};

const NAME: &str = "chains";
const NEXT: &str = "chains.next";
const MAGIC: &[u8; 8] = b"STRKCHN1";
const HEAD: usize = 24;
const RECORD: usize = 8;

pub(super) struct Used {
    uuid: [u8; 16],
    known: Mutex<Known>,
}

struct Known {
    chains: BTreeSet<ChainId>,
    file: File,
}

fn record(uuid: &[u8; 16], chain: ChainId) -> [u8; RECORD] {
    let id = chain.to_le_bytes();
    let mut out = [0; RECORD];
    out[..4].copy_from_slice(&id);
    out[4..].copy_from_slice(&crc32c(&[&uuid[..], &id].concat()).to_le_bytes());
    out
}

/// The contents of the file in this folder; `None` if it is absent, damaged or belongs to another
/// target.
pub(super) fn read(folder: &Path, uuid: &[u8; 16]) -> Option<BTreeSet<ChainId>> {
    let bytes = fs::read(folder.join(NAME)).ok()?;
    let (head, records) = bytes.split_at_checked(HEAD)?;
    if head[..8] != MAGIC[..] || head[8..] != uuid[..] {
        return None;
    }
    let chain = |r: &[u8]| {
        let chain = ChainId::from_le_bytes(*r.first_chunk()?);
        (r == record(uuid, chain)).then_some(chain)
    };
    records.chunks(RECORD).map(chain).collect()
}

impl Used {
    /// For a target whose table is intact and has records of the chains in `has`.
    pub(super) fn open(folder: &Path, uuid: [u8; 16], has: &BTreeSet<ChainId>) -> io::Result<Used> {
        let before = read(folder, &uuid);
        let chains: BTreeSet<ChainId> = before.iter().flatten().chain(has).copied().collect();
        if before.as_ref() != Some(&chains) {
            let mut bytes = [&MAGIC[..], &uuid].concat();
            chains.iter().for_each(|c| bytes.extend(record(&uuid, *c)));
            let mut file = File::create(folder.join(NEXT))?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(folder.join(NEXT), folder.join(NAME))?;
            File::open(folder)?.sync_all()?;
        }
        let file = OpenOptions::new().append(true).open(folder.join(NAME))?;
        Ok(Used { uuid, known: Mutex::new(Known { chains, file }) })
    }

    /// Records that something of this chain is about to be stored. The first time, waits for the
    /// disk and delays others that are noted for the first time.
    pub(super) fn note(&self, chain: ChainId) -> io::Result<()> {
        let mut k = self.known.lock();
        if k.chains.contains(&chain) {
            return Ok(());
        }
        // A partial record would make the file invalid. The next start notices that, and errs on
        // the safe side.
        k.file.write_all(&record(&self.uuid, chain))?;
        k.file.sync_data()?;
        k.chains.insert(chain);
        Ok(())
    }

    pub(super) fn chains(&self) -> BTreeSet<ChainId> {
        self.known.lock().chains.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_known_for_ever_and_what_is_damaged_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let (at, uuid) = (dir.path(), [7; 16]);
        let set = |all: &[ChainId]| BTreeSet::from_iter(all.iter().copied());
        assert_eq!(read(at, &uuid), None);
        let used = Used::open(at, uuid, &set(&[3])).unwrap();
        [9, 3, 9, 1].into_iter().for_each(|c| used.note(c).unwrap());
        assert_eq!((read(at, &uuid), used.chains()), (Some(set(&[1, 3, 9])), set(&[1, 3, 9])));
        drop(used);
        // A chain stays recorded even when nothing of it is left.
        drop(Used::open(at, uuid, &set(&[4])).unwrap());
        assert_eq!(read(at, &uuid), Some(set(&[1, 3, 4, 9])));
        assert_eq!(read(at, &[8; 16]), None, "of another target");
        let whole = fs::read(at.join(NAME)).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut bad = whole.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            fs::write(at.join(NAME), bad).unwrap();
            assert_eq!(read(at, &uuid), None, "bit {bit}");
        }
        for cut in (0..whole.len()).filter(|n| *n < HEAD || !(n - HEAD).is_multiple_of(RECORD)) {
            fs::write(at.join(NAME), &whole[..cut]).unwrap();
            assert_eq!(read(at, &uuid), None, "{cut} bytes");
        }
        // The table is intact, so the file is written anew.
        drop(Used::open(at, uuid, &set(&[4])).unwrap());
        assert_eq!(read(at, &uuid), Some(set(&[4])));
    }
}
