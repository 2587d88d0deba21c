//! What a program asked of a mount, and the numbers under which its changes are sent.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use strake_proto::{Ino, SessionId, pb};

use super::{Appended, OperationRecord};

/// On whose behalf a change is made.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// The user.
    pub creds: &'a pb::Creds,
    /// The operation that the change belongs to, if it may come again after a restart.
    pub operation: Option<&'a Operation>,
}

impl<'a> From<&'a pb::Creds> for Caller<'a> {
    fn from(creds: &'a pb::Creds) -> Caller<'a> {
        Caller { creds, operation: None }
    }
}

/// One operation of a mount, and the numbers that its changes use. If the mount is restarted and
/// the operation comes again, it uses the same numbers, so that its effect does not happen twice.
/// All clones are the same operation; its record lasts as long as one of them.
#[derive(Clone)]
pub struct Operation(Arc<Numbers>);

struct Numbers {
    record: Box<dyn OperationRecord>,
    /// What this process has used: see `MUTATION`, `DATA` and `APPEND`.
    used: AtomicU64,
    /// Dropped together with the operation's numbers.
    awaited: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

const MUTATION: u64 = 1;
const DATA: u64 = 2;
const APPEND: u64 = 4;

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Operation").field(&self.0.record.mutation()).finish()
    }
}

impl Operation {
    /// An operation with this record: a new one, or one that an earlier process left.
    pub fn new(record: Box<dyn OperationRecord>) -> Operation {
        let (used, awaited) = (AtomicU64::new(0), Mutex::default());
        Operation(Arc::new(Numbers { record, used, awaited }))
    }

    /// Whether other work waits for the append of this operation.
    pub fn is_awaited(&self) -> bool {
        self.0.awaited.lock().is_some()
    }

    /// What the previous client was about to append, and the inode.
    pub(crate) fn appended(&self) -> Option<(Ino, Appended)> {
        self.0.record.append()
    }

    /// As [`Operation::appended`], for the task that repeats the append: only once.
    pub(crate) fn append_again(&self) -> Option<Appended> {
        self.first_use(APPEND).then(|| self.appended()).flatten().map(|(_, a)| a)
    }

    /// Keeps `append` until the operation is done or given up, so that its append is awaited.
    pub(crate) fn await_append(&self, append: impl Any + Send + Sync) {
        *self.0.awaited.lock() = Some(Box::new(append));
    }

    fn first_use(&self, bit: u64) -> bool {
        self.0.used.fetch_or(bit, Relaxed) & bit == 0
    }

    /// The session and number of the operation's mutation that the previous client may have sent.
    /// `None`: it sent none, or this client has used it already.
    pub(crate) fn mutation(&self) -> Option<(SessionId, u64)> {
        self.0.record.mutation().filter(|_| self.first_use(MUTATION))
    }

    /// Records the number of a mutation that is about to be sent for the first time. Only the first
    /// mutation of an operation is recorded: it is the one that must not run twice.
    pub(crate) fn set_mutation(&self, session: SessionId, n: u64) {
        if self.first_use(MUTATION) {
            self.0.record.set_mutation(session, n);
        }
    }

    /// The first number of the operation's data writes in `session`: the one that the previous
    /// client used, else a new one from `take`.
    pub(crate) fn data(&self, session: SessionId, take: impl FnOnce() -> u64) -> u64 {
        if !self.first_use(DATA) {
            return take();
        }
        match self.0.record.data() {
            Some((of, n)) if of == session => n,
            _ => {
                let n = take();
                self.0.record.set_data(session, n);
                n
            }
        }
    }

    /// Records that nothing was appended.
    pub(crate) fn clear_append(&self) {
        self.0.record.set_append(None);
    }

    /// Records that `len` bytes are about to be appended at `offset`, in this session.
    pub(crate) fn set_append(&self, session: SessionId, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        self.0.record.set_append(Some(Appended { offset, end, session }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is recorded: the mutation, the data writes, the append.
    #[derive(Default)]
    struct Recorded {
        mutation: Option<(SessionId, u64)>,
        data: Option<(SessionId, u64)>,
        append: Option<Appended>,
    }

    impl OperationRecord for Arc<Mutex<Recorded>> {
        fn mutation(&self) -> Option<(SessionId, u64)> {
            self.lock().mutation
        }
        fn set_mutation(&self, session: SessionId, number: u64) {
            self.lock().mutation = Some((session, number));
        }
        fn data(&self) -> Option<(SessionId, u64)> {
            self.lock().data
        }
        fn set_data(&self, session: SessionId, first: u64) {
            self.lock().data = Some((session, first));
        }
        fn append(&self) -> Option<(Ino, Appended)> {
            self.lock().append.map(|a| (77, a))
        }
        fn set_append(&self, append: Option<Appended>) {
            let mut all = self.lock();
            (all.append, all.data) = (append, None);
        }
    }

    #[test]
    fn each_number_is_used_again_once() {
        let record = Arc::<Mutex<Recorded>>::default();
        let first = Operation::new(Box::new(record.clone()));
        assert_eq!(first.mutation(), None);
        first.set_mutation(6, 10);
        first.set_mutation(6, 11);
        assert_eq!((first.mutation(), first.append_again()), (None, None));
        first.set_append(6, 0, 10);
        assert_eq!((first.data(6, || 20), first.data(6, || 21)), (20, 21));
        drop(first);

        let again = Operation::new(Box::new(record.clone()));
        assert_eq!((again.mutation(), again.mutation()), (Some((6, 10)), None));
        assert_eq!((again.data(6, || 99), again.data(6, || 99)), (20, 99));
        let append = Appended { offset: 0, end: 10, session: 6 };
        assert_eq!(again.appended(), Some((77, append)));
        assert_eq!((again.append_again(), again.append_again()), (Some(append), None));
        again.clear_append();
        assert_eq!(again.appended(), None);

        record.lock().data = Some((6, 20));
        let other = Operation::new(Box::new(record.clone()));
        assert_eq!((other.data(7, || 30), record.lock().data), (30, Some((7, 30))));
    }
}
