//! Which lost writes an open file has reported.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use strake_proto::{Error, Result};

/// The calls that report lost writes.
#[derive(Clone, Copy)]
pub(super) enum Teller {
    Write,
    Sync,
    Close,
}

/// Per kind of call: the write-back errors of the inode that this open file has reported, or that
/// came before it was opened.
pub(super) struct Told([AtomicU64; 3]);

impl Told {
    /// `errors`: how many there were when the file was opened.
    pub fn new(errors: u64) -> Told {
        Told([(); 3].map(|()| AtomicU64::new(errors)))
    }

    /// Reports that bytes which were written are lost. The first sync or close reports it, as on
    /// Linux. A loss by a restart of the mount is reported by the first sync, the first close and
    /// the first write. `since`: the number of errors now, the last of them, and whether each kind
    /// of call must report it; `None` when there were no more than the given number.
    pub fn tell(
        &self,
        by: Teller,
        since: impl FnOnce(u64) -> Option<(u64, Error, bool)>,
    ) -> Result<()> {
        let seen = self.0[by as usize].load(Relaxed);
        let Some((errors, e, by_each)) = since(seen) else { return Ok(()) };
        match (by, by_each) {
            (Teller::Write, false) => return Ok(()),
            (_, true) => self.0[by as usize].store(errors, Relaxed),
            (_, false) => self.0.iter().for_each(|t| t.store(errors, Relaxed)),
        }
        Err(e)
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::Code;

    use super::*;

    /// `loud`: the number of the last error that each kind of call must report.
    fn errors(count: u64, loud: u64) -> impl Fn(u64) -> Option<(u64, Error, bool)> {
        move |seen| (count > seen).then(|| (count, Error::new(Code::Io, "lost"), loud > seen))
    }

    #[test]
    fn one_sync_or_close_reports_an_error() {
        let t = Told::new(1);
        assert!(t.tell(Teller::Sync, errors(1, 0)).is_ok(), "it came before the open");
        assert!(t.tell(Teller::Write, errors(2, 0)).is_ok(), "writes go on");
        assert!(t.tell(Teller::Sync, errors(2, 0)).is_err());
        assert!(t.tell(Teller::Sync, errors(2, 0)).is_ok());
        assert!(t.tell(Teller::Close, errors(2, 0)).is_ok(), "it is reported already");
        assert!(t.tell(Teller::Close, errors(3, 0)).is_err(), "another one");
    }

    #[test]
    fn each_kind_of_call_reports_a_loud_error_once() {
        let t = Told::new(0);
        for by in [Teller::Write, Teller::Close, Teller::Sync] {
            assert!(t.tell(by, errors(1, 1)).is_err());
            assert!(t.tell(by, errors(1, 1)).is_ok());
        }
    }
}
