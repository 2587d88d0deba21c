//! The end of fjall's journal after a loss of power.
//!
//! Data written to the journal since its last fsync reaches the disk in any order, sector by
//! sector. fjall (3.1) cuts the journal at an incomplete batch. But it treats a complete batch with
//! wrong bytes in its middle as damage, and does not open. This module cuts the active journal
//! before the first such batch, as fjall does with incomplete ones. Earlier journals were fsynced
//! as a whole. The store's users find out whether a synced batch was lost: the metadata server's
//! log starts after what the server had applied, and a storage target's mark tells how far its
//! table was synced.
//!
//! The format is that of fjall's `journal/entry.rs`: a batch is a start (tag 1, items `u32`,
//! sequence number `u64`), items (tag 2, type `u8`, compression `u8`, keyspace `u64`, key length
//! `u16`, value length `u32`, stored length `u32`, key, value) or clears (tag 4, keyspace `u64`),
//! and an end (tag 3, XXH3 of its items `u64`, magic).

use std::{
    fs::{self, OpenOptions},
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 4] = b"FJL\x03";
const START: u8 = 1;
const ITEM: u8 = 2;
const END: u8 = 3;
const CLEAR: u8 = 4;

/// Cuts the journal of the store in `path` before its first batch that is complete but wrong.
/// Returns how many bytes were cut; `None` if there is no such batch.
pub fn cut_torn_end(path: &Path) -> io::Result<Option<u64>> {
    let Some(journal) = active(path)? else { return Ok(None) };
    let file = OpenOptions::new().read(true).write(true).open(journal)?;
    let Some(good) = end_of_good(BufReader::with_capacity(1 << 20, &file))? else {
        return Ok(None);
    };
    let gone = file.metadata()?.len().saturating_sub(good);
    file.set_len(good)?;
    file.sync_all()?;
    Ok(Some(gone))
}

/// The journal that is written to: the one with the highest number.
fn active(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut newest: Option<(u64, PathBuf)> = None;
    for entry in fs::read_dir(path)? {
        let journal = entry?.path();
        let number =
            journal.file_name().and_then(|n| n.to_str()?.strip_suffix(".jnl")?.parse().ok());
        if let Some(n) = number.filter(|n| newest.as_ref().is_none_or(|(newest, _)| n > newest)) {
            newest = Some((n, journal));
        }
    }
    Ok(newest.map(|(_, journal)| journal))
}

struct Journal<R> {
    from: R,
    at: u64,
    sum: Xxh3,
}

impl<R: Read> Journal<R> {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut b = [0; N];
        self.from.read_exact(&mut b)?;
        self.at += N as u64;
        Ok(b)
    }

    /// Adds the next `len` bytes to the batch's checksum.
    fn sum(&mut self, len: u64) -> io::Result<()> {
        let mut piece = [0; 8192];
        let mut left = len;
        while left > 0 {
            let n = left.min(piece.len() as u64) as usize;
            self.from.read_exact(&mut piece[..n])?;
            self.sum.update(&piece[..n]);
            left -= n as u64;
        }
        self.at += len;
        Ok(())
    }
}

/// Where the last good batch ends, if a complete but wrong batch follows it. fjall itself cuts
/// incomplete batches.
fn end_of_good(from: impl Read) -> io::Result<Option<u64>> {
    let mut j = Journal { from, at: 0, sum: Xxh3::new() };
    match walk(&mut j) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        other => other,
    }
}

fn walk<R: Read>(j: &mut Journal<R>) -> io::Result<Option<u64>> {
    let mut good = 0;
    // How many items the current batch still lacks; `None` between batches.
    let mut lacks: Option<u32> = None;
    loop {
        let [tag] = j.take()?;
        match (tag, lacks) {
            (START, None) => {
                let [a, b, c, d, ..]: [u8; 12] = j.take()?;
                lacks = Some(u32::from_le_bytes([a, b, c, d]));
                j.sum.reset();
            }
            (ITEM, Some(n)) if n > 0 => {
                let head: [u8; 20] = j.take()?;
                let [_, packed, .., k0, k1, v0, v1, v2, v3, s0, s1, s2, s3] = head;
                if packed == 0 && [v0, v1, v2, v3] != [s0, s1, s2, s3] {
                    return Ok(Some(good));
                }
                let (key, stored) =
                    (u16::from_le_bytes([k0, k1]), u32::from_le_bytes([s0, s1, s2, s3]));
                j.sum.update(&[tag]);
                j.sum.update(&head);
                j.sum(u64::from(key) + u64::from(stored))?;
                lacks = Some(n - 1);
            }
            (CLEAR, Some(n)) if n > 0 => {
                j.sum.update(&[tag]);
                j.sum(8)?;
                lacks = Some(n - 1);
            }
            (END, Some(n)) => {
                let sum = u64::from_le_bytes(j.take()?);
                if &j.take::<4>()? != MAGIC {
                    return Ok(None);
                }
                if n > 0 || sum != j.sum.digest() {
                    return Ok(Some(good));
                }
                (good, lacks) = (j.at, None);
            }
            (ITEM | CLEAR, Some(_)) => return Ok(Some(good)),
            _ => return Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, MetaStore, Reader, fjall_store::FjallStore};

    const BATCHES: u8 = 20;

    fn key(n: u8) -> String {
        format!("key{n:02}")
    }

    /// A store with some batches of two keys each, of over a sector each.
    fn store() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let s = FjallStore::open(dir.path()).unwrap();
        for n in 0..BATCHES {
            let mut b = Batch::default();
            b.put(key(n), vec![n + 100; 1500]);
            b.put("last", vec![n; 3]);
            s.commit(b).unwrap();
        }
        s.sync().unwrap();
        drop(s);
        let journal = active(dir.path()).unwrap().unwrap();
        (dir, journal)
    }

    /// How many batches are there, in order and none beyond. Also checks that writes still work.
    fn left(dir: &Path) -> u8 {
        let s = FjallStore::open(dir).unwrap();
        let n =
            (0..BATCHES).take_while(|n| s.get(key(*n).as_bytes()).unwrap().is_some()).count() as u8;
        let whole =
            |i| s.get(key(i).as_bytes()).unwrap() == (i < n).then(|| vec![i + 100; 1500].into());
        assert!((0..BATCHES).all(whole), "{n}");
        assert_eq!(s.get(b"last").unwrap(), n.checked_sub(1).map(|n| vec![n; 3].into()));
        let mut b = Batch::default();
        b.put("more", "1");
        s.commit(b).unwrap();
        s.sync().unwrap();
        drop(s);
        assert_eq!(FjallStore::open(dir).unwrap().get(b"more").unwrap().unwrap(), "1");
        n
    }

    fn place_of(bytes: &[u8], n: u8) -> usize {
        bytes.windows(1500).position(|w| w.iter().all(|b| *b == n + 100)).unwrap()
    }

    #[test]
    fn a_batch_that_is_torn_within_ends_the_journal() {
        for (n, what) in [
            (12, "a sector"),
            (0, "a sector"),
            (19, "a sector"),
            (7, "fewer items"),
            (7, "more items"),
            (7, "a length"),
        ] {
            let (dir, journal) = store();
            let mut bytes = fs::read(&journal).unwrap();
            let at = place_of(&bytes, n);
            // The key, its lengths and the start of the batch lie before the value.
            let count = at - 5 - 21 - 12;
            assert_eq!((bytes[count - 1], bytes[count]), (START, 2));
            match what {
                "a sector" => bytes[at + 400..at + 912].fill(0),
                "a length" => bytes[at - 9..at - 5].fill(0),
                "fewer items" => bytes[count] = 1,
                _ => bytes[count] = 3,
            }
            fs::write(&journal, bytes).unwrap();
            assert_eq!(left(dir.path()), n, "{what}");
        }
    }

    #[test]
    fn what_is_whole_or_only_incomplete_is_left_to_fjall() {
        let (dir, journal) = store();
        assert_eq!(cut_torn_end(dir.path()).unwrap(), None);
        let bytes = fs::read(&journal).unwrap();
        let at = place_of(&bytes, 9);
        fs::write(&journal, &bytes[..at + 700]).unwrap();
        assert_eq!(cut_torn_end(dir.path()).unwrap(), None);
        assert_eq!(left(dir.path()), 9);
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(cut_torn_end(empty.path()).unwrap(), None);
    }

    /// Length fields stay as they are, because fjall allocates as much memory as they say. Its
    /// checksum does not cover the sequence number.
    #[test]
    fn any_damage_leaves_what_stands_before_it() {
        let (dir, journal) = store();
        let bytes = fs::read(&journal).unwrap();
        drop(dir);
        let from = place_of(&bytes, 9) - 5 - 21 - 13;
        for at in (from..from + 5).chain((from + 13..from + 1560).step_by(113)) {
            let (dir, journal) = store();
            let mut torn = bytes.clone();
            torn[at] ^= 1;
            fs::write(&journal, torn).unwrap();
            assert_eq!(left(dir.path()), 9, "byte {}", at - from);
        }
    }
}
