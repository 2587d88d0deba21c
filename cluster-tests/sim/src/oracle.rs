//! What a reader may see: for each file and each cell of 512 bytes, the tags of the writes whose
//! bytes may be there.
//!
//! Each write has its own tag; every word of its bytes names the tag and the place. A cell holds
//! what the last fsync made durable, or any later write; after a successful fsync only the newest.
//! A write that failed, or whose fsync failed, may be there or not, and a later fsync does not
//! change that. A cell that was never written reads as zeros. Anything else breaks a promise.

use std::collections::{BTreeMap, BTreeSet};

pub const CELL: usize = 512;
/// Tag of bytes never written: zeros.
const NEVER: u32 = 0;

/// The bytes of a write: 8-byte words, tag in the high half, offset in the file in words in the low
/// half.
pub fn fill(tag: u32, offset: u64, out: &mut [u8]) {
    for (i, word) in out.chunks_exact_mut(8).enumerate() {
        let place = (offset / 8 + i as u64) as u32;
        word.copy_from_slice(&((u64::from(tag) << 32) | u64::from(place)).to_le_bytes());
    }
}

#[derive(Clone, Debug, Default)]
struct Cell {
    /// Every tag that may be read; the last one is the newest write.
    tags: Vec<u32>,
    /// The tags among these whose writer was told of an error.
    failed: BTreeSet<u32>,
    /// The tags among these that are punched holes.
    holes: BTreeSet<u32>,
}

impl Cell {
    fn matches(&self, offset: u64, got: &[u8]) -> bool {
        self.tags
            .iter()
            .any(|t| matches(if self.holes.contains(t) { NEVER } else { *t }, offset, got))
    }
}

/// The model of one file, kept by its only writer.
#[derive(Clone, Debug, Default)]
pub struct FileModel {
    cells: BTreeMap<u64, Cell>,
    /// Bytes that an fsync made durable, and the end of the furthest write that was sent.
    pub durable_size: u64,
    pub most_size: u64,
    /// The end of the furthest write that was answered and for which no error was reported since.
    good_size: u64,
}

impl FileModel {
    /// A write was answered.
    pub fn answered(&mut self, end: u64) {
        self.good_size = self.good_size.max(end);
    }

    /// A write was sent. Whether it is answered or not, its bytes may be there from now on.
    pub fn wrote(&mut self, tag: u32, offset: u64, len: usize) {
        for c in offset / CELL as u64..(offset + len as u64) / CELL as u64 {
            let cell = self.cells.entry(c).or_default();
            if cell.tags.is_empty() {
                cell.tags.push(NEVER);
            }
            cell.tags.push(tag);
        }
        self.most_size = self.most_size.max(offset + len as u64);
    }

    /// A punch was sent. It never makes the file longer.
    pub fn punched(&mut self, tag: u32, offset: u64, len: u64) {
        for c in offset / CELL as u64..(offset + len) / CELL as u64 {
            if let Some(cell) = self.cells.get_mut(&c) {
                cell.tags.push(tag);
                cell.holes.insert(tag);
            }
        }
    }

    /// The size is about to be set: what lies past it may be gone from now on.
    pub fn sizing(&mut self, tag: u32, size: u64) {
        for (_, cell) in self.cells.range_mut(size / CELL as u64..) {
            cell.tags.push(tag);
            cell.holes.insert(tag);
        }
        self.most_size = self.most_size.max(size);
        self.good_size = self.good_size.min(size);
        self.durable_size = self.durable_size.min(size);
    }

    /// The size was set: what lay past it is gone.
    pub fn sized(&mut self, size: u64) {
        self.cells.split_off(&(size / CELL as u64));
        (self.most_size, self.good_size, self.durable_size) = (size, size, size);
    }

    /// Whether this range may be a hole, that is, whether it may read as zeros.
    pub fn check_hole(&self, from: u64, to: u64) -> Result<(), String> {
        for c in from / CELL as u64..to.min(self.most_size).div_ceil(CELL as u64) {
            self.check(c * CELL as u64, &[0; CELL])
                .map_err(|e| format!("hole {from} to {to}: {e}"))?;
        }
        Ok(())
    }

    /// An fsync succeeded, and the model is as it was when that began.
    pub fn synced(&mut self) {
        for cell in self.cells.values_mut() {
            let newest = cell.tags.iter().rposition(|t| !cell.failed.contains(t)).unwrap_or(0);
            cell.tags.drain(..newest);
            let left: BTreeSet<u32> = cell.tags.iter().copied().collect();
            cell.holes.retain(|t| left.contains(t));
        }
        self.durable_size = self.durable_size.max(self.good_size);
    }

    /// A write was answered with an error.
    pub fn write_failed(&mut self, tag: u32) {
        for cell in self.cells.values_mut().filter(|c| c.tags.contains(&tag)) {
            cell.failed.insert(tag);
        }
    }

    /// An fsync was answered with an error: what was not durable before may be lost.
    pub fn sync_failed(&mut self) {
        for cell in self.cells.values_mut() {
            cell.failed.extend(cell.tags.iter().skip(1));
        }
        self.good_size = self.durable_size;
    }

    /// Whether `bytes`, read at `offset` (a multiple of the cell size), may be what the file holds.
    pub fn check(&self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        for (i, got) in bytes.chunks(CELL).enumerate() {
            let at = offset + (i * CELL) as u64;
            let cell = self.cells.get(&(at / CELL as u64));
            if !cell.map_or_else(|| matches(NEVER, at, got), |c| c.matches(at, got)) {
                let word = got.first_chunk::<8>().map_or(0, |w| u64::from_le_bytes(*w));
                return Err(format!(
                    "at {at}: found tag {} place {}, allowed {cell:?}",
                    word >> 32,
                    word & 0xffff_ffff
                ));
            }
        }
        Ok(())
    }

    /// Whether a reader may be told this size.
    pub fn check_size(&self, size: u64) -> Result<(), String> {
        if size < self.durable_size || size > self.most_size {
            return Err(format!("size {size}, allowed {}..={}", self.durable_size, self.most_size));
        }
        Ok(())
    }
}

fn matches(tag: u32, offset: u64, got: &[u8]) -> bool {
    if tag == NEVER {
        return *got == [0; CELL][..got.len()];
    }
    let mut want = [0u8; CELL];
    fill(tag, offset, &mut want);
    got == &want[..got.len()]
}

/// The names of one directory, kept by its only user.
#[derive(Clone, Debug, Default)]
pub struct NameModel {
    /// Names whose creation was acknowledged.
    pub there: BTreeSet<String>,
    /// Names with an operation that was not answered: they may exist or not.
    pub open: BTreeSet<String>,
}

impl NameModel {
    pub fn check(&self, listed: &BTreeSet<String>) -> Result<(), String> {
        if let Some(lost) =
            self.there.iter().find(|n| !listed.contains(*n) && !self.open.contains(*n))
        {
            return Err(format!("acknowledged name {lost} is gone"));
        }
        match listed.iter().find(|n| !self.there.contains(*n) && !self.open.contains(*n)) {
            Some(extra) => Err(format!("name {extra} was never there or was removed")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_torn_foreign_and_zeroed_bytes_are_found() {
        let mut m = FileModel::default();
        let mut a = vec![0; 2048];
        m.wrote(1, 0, 2048);
        m.answered(2048);
        fill(1, 0, &mut a);
        assert!(m.check(0, &a).is_ok());
        assert!(m.check(0, &[0; 2048]).is_ok(), "not synced yet: may be lost");
        m.synced();
        assert!(m.check(0, &[0; 2048]).is_err(), "zeros for synced bytes");
        let mut b = vec![0; 512];
        m.wrote(2, 512, 512);
        fill(2, 512, &mut b);
        assert!(m.check(512, &b).is_ok() && m.check(512, &a[512..1024]).is_ok());
        assert!(m.check(0, &b).is_err(), "bytes of another place");
        let mut torn = b.clone();
        torn[256..].copy_from_slice(&a[768..1024]);
        assert!(m.check(512, &torn).is_err(), "torn within a cell");
        m.synced();
        assert!(m.check(512, &a[512..1024]).is_err(), "stale");
        assert!(
            m.check_size(2048).is_ok() && m.check_size(512).is_err() && m.check_size(4096).is_err()
        );
    }

    #[test]
    fn a_reported_failure_leaves_both_possible() {
        let bytes = |tag| {
            let mut b = vec![0; 512];
            fill(tag, 0, &mut b);
            b
        };
        let mut m = FileModel::default();
        for tag in 1..=2 {
            m.wrote(tag, 0, 512);
            m.answered(512);
        }
        m.wrote(3, 0, 512);
        m.write_failed(3);
        m.synced();
        assert!(m.check(0, &bytes(1)).is_err(), "older than what was synced");
        assert!(m.check(0, &bytes(2)).is_ok() && m.check(0, &bytes(3)).is_ok());
        m.wrote(4, 0, 1024);
        m.answered(1024);
        m.sync_failed();
        m.synced();
        assert!((2..=4).all(|t| m.check(0, &bytes(t)).is_ok()), "lost, and the writer was told");
        assert!(m.check_size(512).is_ok() && m.check_size(1024).is_ok());
        m.wrote(5, 0, 512);
        m.answered(512);
        m.synced();
        assert!(m.check(0, &bytes(5)).is_ok() && (1..=4).all(|t| m.check(0, &bytes(t)).is_err()));
    }

    #[test]
    fn lost_and_untimely_holes_are_found() {
        let mut m = FileModel::default();
        let mut a = vec![0; 2048];
        fill(1, 0, &mut a);
        m.wrote(1, 0, 2048);
        m.answered(2048);
        m.synced();
        assert!(m.check_hole(0, 512).is_err() && m.check_hole(2048, 9000).is_ok());
        m.punched(2, 512, 1024);
        let punched = [&a[..512], &[0; 1024], &a[1536..]].concat();
        assert!(
            m.check(0, &a).is_ok()
                && m.check(0, &punched).is_ok()
                && m.check_hole(512, 1536).is_ok()
        );
        m.synced();
        assert!(
            m.check(0, &a).is_err()
                && m.check(0, &punched).is_ok()
                && m.check_hole(0, 1536).is_err()
        );
        m.wrote(3, 512, 512);
        m.punched(4, 512, 512);
        m.write_failed(4);
        m.synced();
        let mut b = vec![0; 512];
        fill(3, 512, &mut b);
        assert!(
            m.check(512, &b).is_ok()
                && m.check(512, &[0; 512]).is_ok()
                && m.check(512, &a[512..1024]).is_err()
        );
    }

    #[test]
    fn lost_and_resurrected_names_are_found() {
        let set = |n: &[&str]| n.iter().map(|s| s.to_string()).collect::<BTreeSet<_>>();
        let m = NameModel { there: set(&["a", "b"]), open: set(&["c"]) };
        assert!(m.check(&set(&["a", "b"])).is_ok() && m.check(&set(&["a", "b", "c"])).is_ok());
        assert!(m.check(&set(&["a"])).is_err() && m.check(&set(&["a", "b", "d"])).is_err());
    }
}
