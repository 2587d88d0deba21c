//! Memory that outlives the process: a memfd that another process holds too, with fixed-size
//! records and space for buffers.
//!
//! The next process that maps it finds the records that were complete when the last holder died.
//! All access goes through 64 bit atomics, so a process killed at any instruction leaves each word
//! old or new. The file belongs to this mount, but it is read as if it came from outside: every
//! number is checked where it is used.

use std::{
    ffi::c_void,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use rustix::{
    fs::{MemfdFlags, SealFlags, SeekFrom},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

const WORD: usize = size_of::<u64>();

/// A mapping of the whole file, which lasts as long as anything holds it.
pub struct SharedMemory {
    fd: OwnedFd,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is only reached through atomics and through buffers that an allocator gives
// to one owner each.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New memory of `len` bytes, all zero; pages take memory when they are first written.
    pub fn create(len: usize) -> io::Result<Arc<SharedMemory>> {
        let fd = rustix::fs::memfd_create(
            "strake-mount",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        // No holder of the descriptor can remove pages under a mapping.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        SharedMemory::map(fd)
    }

    /// Maps memory that an earlier process made.
    pub fn map(fd: OwnedFd) -> io::Result<Arc<SharedMemory>> {
        let len = rustix::fs::fstat(&fd)?.st_size as usize;
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the shared memory could shrink while it is mapped",
            ));
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, &fd, 0)? };
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Arc::new(SharedMemory { fd, start, len }))
    }

    /// The memfd, to be passed on to the next process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the `len` bytes at `offset`; `None` when they do not lie inside. It is valid as
    /// long as this value. Whoever reads or writes there must be the only one to use these bytes.
    pub fn bytes(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset` is within the mapping, as just checked.
        Some(unsafe { self.start.add(offset) })
    }

    /// The parts of a range that take memory; all of it where that cannot be determined.
    fn written(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let (mut parts, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let start = match rustix::fs::seek(&self.fd, SeekFrom::Data(at as u64)) {
                Ok(start) => start as usize,
                // No data behind `at`.
                Err(Errno::NXIO) => break,
                Err(_) => return vec![range],
            };
            let Ok(end) = rustix::fs::seek(&self.fd, SeekFrom::Hole(start as u64)) else {
                return vec![range];
            };
            parts.push(start.max(range.start)..(end as usize).min(range.end));
            at = end as usize;
        }
        parts
    }

    /// The word at `offset`, a multiple of 8. Panics beyond the end, like indexing.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(WORD), "word at {offset}");
        assert!(
            offset.checked_add(WORD).is_some_and(|end| end <= self.len),
            "the word at {offset} is not within the shared memory"
        );
        // SAFETY: 8 aligned bytes inside the mapping, as just checked, which lives as long as
        // `self`; all access to them is atomic.
        unsafe { AtomicU64::from_ptr(self.start.add(offset).as_ptr().cast()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; whoever uses a part of it holds this value.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
    }
}

/// A table of records of `words` words each. Word 0 of a record is its state: 0 free, else in use.
pub struct Records {
    memory: Arc<SharedMemory>,
    offset: usize,
    words: usize,
    free: Mutex<Vec<u32>>,
}

impl Records {
    /// Bytes that a table of this shape takes.
    pub const fn size(words: usize, count: usize) -> usize {
        (words + 1) * count * WORD
    }

    /// Opens the table at `offset`. Also returns the records that an earlier process left. Panics
    /// when the table does not lie inside the memory.
    pub fn open(
        memory: Arc<SharedMemory>,
        offset: usize,
        words: usize,
        count: usize,
    ) -> (Arc<Records>, Vec<Record>) {
        assert!(
            offset + Records::size(words, count) <= memory.len(),
            "a table beyond the end of the shared memory"
        );
        let table = Arc::new(Records { memory, offset, words, free: Mutex::default() });
        let size = (words + 1) * WORD;
        let written = table.memory.written(offset..offset + size * count);
        let was_written =
            |index: usize| written.iter().any(|w| w.contains(&(offset + index * size)));
        let (mut free, mut left) = (Vec::new(), Vec::new());
        for index in (0..count).rev() {
            // Pages that were never written are not read, because reading would make them take
            // memory.
            let in_use =
                was_written(index) && table.at(index as u32, 0).load(Ordering::Acquire) != 0;
            if in_use {
                left.push(Record { table: table.clone(), index: index as u32 });
            } else {
                free.push(index as u32);
            }
        }
        *table.free.lock() = free;
        (table, left)
    }

    fn at(&self, index: u32, word: usize) -> &AtomicU64 {
        assert!(word <= self.words, "word {word} of a record");
        self.memory.word(self.offset + (index as usize * (self.words + 1) + word) * WORD)
    }

    /// Stores these words, the rest zero, as long as the record is held. `None` when the table is
    /// full.
    pub fn put(self: &Arc<Records>, words: &[u64]) -> Option<Record> {
        let index = self.free.lock().pop()?;
        for i in 0..self.words {
            self.at(index, i + 1).store(words.get(i).copied().unwrap_or(0), Ordering::Relaxed);
        }
        self.at(index, 0).store(1, Ordering::Release);
        Some(Record { table: self.clone(), index })
    }
}

/// A record in use; free again when dropped. A process that dies does not drop it, so it stays in
/// use.
pub struct Record {
    table: Arc<Records>,
    index: u32,
}

impl Record {
    /// A word of the record. Panics beyond the last one, like indexing.
    pub fn get(&self, word: usize) -> u64 {
        self.table.at(self.index, word + 1).load(Ordering::Acquire)
    }

    /// Replaces a word of the record. Panics beyond the last one, like indexing.
    pub fn set(&self, word: usize, value: u64) {
        self.table.at(self.index, word + 1).store(value, Ordering::Release);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.table.at(self.index, 0).store(0, Ordering::Release);
        self.table.free.lock().push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As if the process had been killed: its records stay as they are.
    fn killed(records: Vec<Record>) {
        records.into_iter().for_each(std::mem::forget);
    }

    #[test]
    fn what_a_killed_process_held_is_found_by_the_next() {
        let first = SharedMemory::create(4096).unwrap();
        let (table, left) = Records::open(first.clone(), 64, 3, 4);
        assert!(left.is_empty());
        let records: Vec<Record> = (0..4).map(|n| table.put(&[n, 10 + n]).unwrap()).collect();
        assert!(table.put(&[9]).is_none(), "full");
        let mut records = records.into_iter();
        drop(records.next());
        let reused = table.put(&[7]).unwrap();
        assert_eq!(
            (reused.get(0), reused.get(1), reused.get(2)),
            (7, 0, 0),
            "nothing of the former record"
        );
        drop(reused);
        let kept: Vec<Record> = records.collect();
        kept[0].set(2, 99);
        killed(kept);

        let second = SharedMemory::map(first.fd().try_clone_to_owned().unwrap()).unwrap();
        drop(first);
        let (table, left) = Records::open(second, 64, 3, 4);
        let mut seen: Vec<_> = left.iter().map(|r| (r.get(0), r.get(1), r.get(2))).collect();
        seen.sort_unstable();
        assert_eq!(seen, vec![(1, 11, 99), (2, 12, 0), (3, 13, 0)]);
        assert!(
            table.put(&[5]).is_some() && table.put(&[6]).is_some(),
            "the first came back with its guard"
        );
        drop(left);
        let all: Vec<_> = (0..4).filter_map(|n| table.put(&[n])).collect();
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn a_large_table_takes_memory_only_where_it_is_used() {
        let memory = SharedMemory::create(64 << 20).unwrap();
        let taken = |m: &SharedMemory| rustix::fs::fstat(m.fd()).unwrap().st_blocks * 512;
        let (table, _) = Records::open(memory.clone(), 4096, 7, 1 << 19);
        assert_eq!(taken(&memory), 0);
        let kept: Vec<Record> = (0..1000).map(|n| table.put(&[n]).unwrap()).collect();
        killed(kept);
        let used = taken(&memory);
        assert!(used < 100_000, "{used}");
        let (table, left) = Records::open(memory.clone(), 4096, 7, 1 << 19);
        let mut seen: Vec<u64> = left.iter().map(|r| r.get(0)).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        assert_eq!(taken(&memory), used);
        assert!(table.put(&[7]).is_some());
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(SharedMemory::map(fd).is_err());
    }

    #[test]
    #[should_panic(expected = "within the shared memory")]
    fn no_word_beyond_the_end() {
        SharedMemory::create(4096).unwrap().word(4096);
    }
}
