//! The records of files that are open for writing.

use strake_client::FileRecord;
use strake_proto::Ino;
use strake_runtime::Record;

/// Words of a file's record.
mod word {
    pub const INO: usize = 0;
    pub const END: usize = 1;
    pub const FLAGS: usize = 2;
    pub const OWNER: usize = 3;
    pub const WRITER: usize = 4;
    /// How many there are; one is not used.
    pub const ALL: usize = 6;
}

/// Bits of the word `FLAGS`.
mod flag {
    /// Own writes are not reported yet.
    pub const DIRTY: u64 = 1;
    pub const SURPLUS: u64 = 2;
    /// An error waits to be reported.
    pub const FAILED: u64 = 4;
    /// Unreported writes may have left holes.
    pub const HOLES: u64 = 8;
    /// The lock of an append may be held.
    pub const ENDS: u64 = 16;
}

/// Words of a record.
pub(super) const WORDS: usize = word::ALL;

pub(super) fn boxed(record: Record) -> Box<dyn FileRecord> {
    Box::new(File(record))
}

struct File(Record);

impl File {
    fn flag(&self, bit: u64, on: bool) {
        let flags = self.0.get(word::FLAGS);
        self.0.set(word::FLAGS, if on { flags | bit } else { flags & !bit });
    }

    fn has(&self, bit: u64) -> bool {
        self.0.get(word::FLAGS) & bit != 0
    }
}

impl FileRecord for File {
    fn ino(&self) -> Ino {
        self.0.get(word::INO)
    }

    fn wrote(&self, end: u64, holes: bool, (uid, gid): (u32, u32)) {
        if holes {
            self.flag(flag::HOLES, true);
        }
        self.0.set(word::END, end);
        self.0.set(word::OWNER, u64::from(uid) << 32 | u64::from(gid));
        self.flag(flag::DIRTY, true);
    }

    fn reported(&self) {
        self.flag(flag::DIRTY | flag::HOLES, false);
        self.0.set(word::END, 0);
    }

    fn unreported(&self) -> Option<(u64, bool, (u32, u32))> {
        let owner = self.0.get(word::OWNER);
        self.has(flag::DIRTY).then(|| {
            let user = ((owner >> 32) as u32, owner as u32);
            (self.0.get(word::END), self.has(flag::HOLES), user)
        })
    }

    fn set_surplus(&self) {
        self.flag(flag::SURPLUS, true);
    }

    fn surplus(&self) -> bool {
        self.has(flag::SURPLUS)
    }

    fn set_failed(&self) {
        self.flag(flag::FAILED, true);
    }

    fn failed(&self) -> bool {
        self.has(flag::FAILED)
    }

    fn set_ends(&self) {
        self.flag(flag::ENDS, true);
    }

    fn ends(&self) -> bool {
        self.has(flag::ENDS)
    }

    fn set_writer(&self, index: u64) {
        self.0.set(word::WRITER, index);
    }

    fn writer(&self) -> u64 {
        self.0.get(word::WRITER)
    }
}
