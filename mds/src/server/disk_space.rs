//! Disk space: which changes are still accepted, so that the log and the state practically never
//! meet a full disk.
//!
//! A file of [`DiskSpace::reserve`] bytes is kept in the server's folder. When space gets so short
//! that growth must stop, the file is deleted: removals, and the group's own log entries, continue
//! in its space. It is made again when there is space.

use std::{fs, path::PathBuf, sync::Arc};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, pb};
use strake_store::MetaStore;

use crate::namespace::locks;
use pb::{log_command::Command, op::Op, repair::What, seal::Step};

const MIB: u64 = 1 << 20;
/// By default the reserve is the file system's size divided by this, but at most [`MOST`].
const SHARE: u64 = 10;
const MOST: u64 = 256 * MIB;

/// How much disk space a change needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Need {
    /// Removes things, or keeps the group running.
    Little,
    /// Rewrites existing things.
    Some,
    /// Makes new things.
    Growth,
}

impl Need {
    pub(super) fn of(command: &Command) -> Need {
        match command {
            Command::Meta(m) => Need::of_list(&m.ops),
            Command::PoolChange(_) => Need::Some,
            Command::Repair(r) if matches!(r.what, Some(What::Chunks(_))) => Need::Some,
            _ => Need::Little,
        }
    }

    pub(super) fn of_list(ops: &[pb::Op]) -> Need {
        ops.iter().map(Need::of_op).max().unwrap_or(Need::Little)
    }

    fn of_op(op: &pb::Op) -> Need {
        match &op.op {
            Some(
                Op::Create(_)
                | Op::Mkdir(_)
                | Op::Mknod(_)
                | Op::Symlink(_)
                | Op::Link(_)
                | Op::Setxattr(_),
            ) => Need::Growth,
            Some(Op::Seal(s)) if !matches!(s.step, Some(Step::Undo(_))) => Need::Growth,
            Some(Op::Setattr(s)) if s.size.is_some() => Need::Little,
            Some(Op::SetLock(l)) if locks::is_take(l) => Need::Some,
            Some(Op::Setattr(_) | Op::Rename(_) | Op::Extend(_) | Op::Setlayout(_)) => Need::Some,
            // Operations that remove something or change nothing.
            _ => Need::Little,
        }
    }
}

/// See the module.
pub(super) struct DiskSpace {
    store: Arc<dyn MetaStore>,
    /// The reserve, absent where there are no files.
    file: Option<PathBuf>,
    /// Its size, bytes; 0: everything is accepted.
    reserve: u64,
    /// Bytes that must be free beside it for growth: what the log allocates at once, and a little.
    margin: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes of the reserve that are on the disk now.
    kept: u64,
    short: bool,
}

/// The reserve for a file system of this many bytes.
pub(super) fn default_reserve(total: u64) -> u64 {
    (total / SHARE).min(MOST)
}

impl DiskSpace {
    /// `segment`: bytes that the log allocates at once.
    pub(super) fn new(
        store: Arc<dyn MetaStore>,
        file: Option<PathBuf>,
        reserve: u64,
        segment: u64,
    ) -> DiskSpace {
        let kept = file.as_ref().and_then(|f| fs::metadata(f).ok()).map_or(0, |m| m.len());
        let margin = segment + (reserve / 8).min(MIB * 16);
        DiskSpace { store, file, reserve, margin, state: Mutex::new(State { kept, short: false }) }
    }

    /// Checks the disk, and deletes or makes the reserve. Returns whether growth must wait, and the
    /// free bytes.
    pub(super) fn look(&self) -> (bool, u64) {
        if self.reserve == 0 {
            return (false, u64::MAX);
        }
        let mut state = self.state.lock();
        let free = self.store.free_bytes();
        let usable = free.saturating_add(state.kept);
        // Growth starts again only with a little more space than where it stops.
        let mut needed = self.reserve + self.margin + if state.short { self.margin } else { 0 };
        if usable < needed + MOST {
            // A compaction may rewrite the whole state before it deletes anything.
            needed += self.store.disk_bytes().min(MOST);
        }
        let short = usable < needed;
        if short != state.short {
            state.short = short;
            if short {
                tracing::warn!(
                    free,
                    "the metadata disk is almost full: nothing new is accepted until there is space"
                );
            } else {
                tracing::info!(free, "the metadata disk has space again");
            }
        }
        match (&self.file, short) {
            (Some(file), true) if state.kept > 0 => match fs::remove_file(file) {
                Ok(()) => state.kept = 0,
                Err(e) => tracing::warn!("cannot remove {}: {e}", file.display()),
            },
            (Some(file), false) if state.kept != self.reserve => {
                state.kept = allocate(file, self.reserve).map_or(0, |()| self.reserve);
            }
            _ => return (short, free),
        }
        (short, self.store.free_bytes())
    }

    /// `NoSpc` if the disk has no space for such a change.
    pub(super) fn check(&self, need: Need) -> Result<()> {
        let (short, free) = self.look();
        let least = match need {
            _ if !short => return Ok(()),
            Need::Growth => u64::MAX,
            Need::Some => self.reserve / 2,
            Need::Little => (self.reserve / 8).min(MIB),
        };
        if free >= least {
            return Ok(());
        }
        let m = format!(
            "the metadata server's disk is full ({} MiB free); remove other files from it",
            free / MIB
        );
        Err(Error::new(Code::NoSpc, m))
    }
}

/// Makes a file with all its blocks, or none. File systems that cannot allocate blocks only have
/// the limit.
fn allocate(path: &PathBuf, size: u64) -> std::io::Result<()> {
    let made = fs::File::create(path).and_then(|f| {
        // Not synced: that could take long, and after a crash the file is made again.
        Ok(rustix::fs::fallocate(&f, rustix::fs::FallocateFlags::empty(), 0, size)?)
    });
    if made.is_err() {
        let _ = fs::remove_file(path);
    }
    made
}

#[cfg(test)]
mod tests {
    use std::ops::Bound;

    use bytes::Bytes;
    use strake_store::{Batch, PairIter, Reader};

    use super::*;

    /// A disk with this much free space, the file not counted.
    struct Disk(Mutex<u64>, PathBuf);

    impl Reader for Disk {
        fn get(&self, _: &[u8]) -> Result<Option<Bytes>> {
            Ok(None)
        }
        fn range(&self, _: Bound<&[u8]>, _: Bound<&[u8]>) -> PairIter<'_> {
            Box::new(std::iter::empty())
        }
    }

    impl MetaStore for Disk {
        fn commit(&self, _: Batch) -> Result<()> {
            Ok(())
        }
        fn sync(&self) -> Result<()> {
            Ok(())
        }
        fn snapshot(&self) -> Result<Box<dyn Reader>> {
            Err(Error::new(Code::OpNotSupp, "no snapshot"))
        }
        fn disk_bytes(&self) -> u64 {
            0
        }
        fn free_bytes(&self) -> u64 {
            let kept = fs::metadata(&self.1).map_or(0, |m| m.len());
            self.0.lock().saturating_sub(kept)
        }
        fn clear(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_reserve_goes_when_the_disk_fills_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("reserve");
        let disk = Arc::new(Disk(Mutex::new(100 * MIB), file.clone()));
        let room = DiskSpace::new(disk.clone(), Some(file.clone()), 8 * MIB, 4 * MIB);
        let ok = |need| room.check(need).is_ok();
        assert!(ok(Need::Growth) && file.metadata().unwrap().len() == 8 * MIB);
        *disk.0.lock() = 13 * MIB;
        assert!(ok(Need::Growth) && file.exists());
        *disk.0.lock() = 13 * MIB - 1;
        assert!(!ok(Need::Growth) && ok(Need::Some) && ok(Need::Little) && !file.exists());
        *disk.0.lock() = 3 * MIB;
        assert!(!ok(Need::Growth) && !ok(Need::Some) && ok(Need::Little));
        *disk.0.lock() = MIB - 1;
        assert!(!ok(Need::Little));
        assert_eq!(room.check(Need::Little).unwrap_err().code, Code::NoSpc);
        // Growth does not start at the same point: a disk at the limit would switch all the time.
        *disk.0.lock() = 18 * MIB - 1;
        assert!(!ok(Need::Growth) && !file.exists());
        *disk.0.lock() = 18 * MIB;
        assert!(ok(Need::Growth) && file.exists());
        // A file from an earlier start counts.
        let again = DiskSpace::new(disk.clone(), Some(file.clone()), 8 * MIB, 4 * MIB);
        *disk.0.lock() = 13 * MIB;
        assert!(again.check(Need::Growth).is_ok());
        let off = DiskSpace::new(disk.clone(), None, 0, 4 * MIB);
        *disk.0.lock() = 0;
        assert!(off.check(Need::Growth).is_ok());
    }

    #[test]
    fn only_what_removes_is_always_wanted() {
        let list = |ops: Vec<Op>| {
            let ops = ops.into_iter().map(|op| pb::Op { op: Some(op) }).collect();
            Need::of(&Command::Meta(pb::MetaRequest { ops, ..Default::default() }))
        };
        let cut = Op::Setattr(pb::SetAttr { size: Some(0), ..Default::default() });
        assert_eq!(list(vec![Op::Unlink(Default::default()), cut.clone()]), Need::Little);
        assert_eq!(list(vec![cut, Op::Rename(Default::default())]), Need::Some);
        assert_eq!(
            list(vec![Op::Unlink(Default::default()), Op::Mkdir(Default::default())]),
            Need::Growth
        );
        let lock = |r#type| {
            let span = Some(pb::LockSpan { r#type, ..Default::default() });
            list(vec![Op::SetLock(pb::SetLock { span, ..Default::default() })])
        };
        assert_eq!((lock(0), lock(1), lock(2)), (Need::Little, Need::Some, Need::Some));
        assert_eq!(Need::of(&Command::GcDone(Default::default())), Need::Little);
        assert_eq!(Need::of(&Command::SessionOpen(Default::default())), Need::Little);
        assert!(Need::Little < Need::Some && Need::Some < Need::Growth);
    }
}
