//! Appends, including appends in pieces: the kernel cuts one write(2) of a program into several
//! requests, and no other write may get between them.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_fabric::Buf;
use strake_proto::{Code, Error, Result};
use tokio::{sync::OwnedMutexGuard, time::Instant};

use super::{
    turn::{Turn, use_in_turn},
    writes::{Way, Writes},
};
use crate::{
    core::Core,
    data::buffers,
    handover::{Appended, operation::Operation},
    inode::Inode,
    locks::End,
};

/// While an append goes on in pieces without a lock, no other client is told the size of the file.
/// After this time the lock is taken.
const UNLOCKED: Duration = Duration::from_millis(500);
/// The most bytes of one append: no write(2) is longer, so what follows belongs to another call.
const LONGEST: u64 = 2 << 30;

/// A piece of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Identifies the call that this is a piece of: the same for all its pieces and, as far as can
    /// be told, different for every other call.
    pub call: (u32, u64),
    /// Where the caller believes that the piece goes; the pieces of a call are contiguous there.
    pub offset: u64,
    /// Whether another piece may follow.
    pub more: bool,
}

/// The outcome of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// Where the bytes were written.
    pub offset: u64,
    /// Bytes written, fewer than given when space ran out or at the largest size of a file.
    pub len: usize,
    /// Set when the end of the file is kept for the next piece. It is kept until that piece
    /// arrives, [`crate::File::end_append`] is called with this number, or
    /// [`crate::Config::append_hold`] is over.
    pub kept: Option<u64>,
}

/// The end of a file, kept for the next piece of an append.
struct Tail {
    number: u64,
    call: (u32, u64),
    /// Where the caller believes that the next piece goes.
    next: u64,
    /// The time of the first piece.
    since: Instant,
    bytes: u64,
    end: End,
    _one: OwnedMutexGuard<()>,
}

impl Tail {
    fn is_for(&self, part: &Part) -> bool {
        self.call == part.call && self.next == part.offset && self.bytes < LONGEST
    }
}

/// The end of the file as this open file keeps it between the pieces of an append.
#[derive(Default)]
struct KeptEnd(Mutex<Option<Tail>>);

impl KeptEnd {
    fn number(&self) -> Option<u64> {
        self.0.lock().as_ref().map(|t| t.number)
    }

    fn keep(&self, tail: Tail) {
        *self.0.lock() = Some(tail);
    }

    fn take(&self) -> Option<Tail> {
        self.0.lock().take()
    }

    /// Gives up the end that is kept under this number. Returns whether it was.
    fn end(&self, number: u64) -> bool {
        self.0.lock().take_if(|t| t.number == number).is_some()
    }
}

/// The appends of an open file.
pub(super) struct Appends {
    core: Arc<Core>,
    inode: Arc<Inode>,
    kept: Arc<KeptEnd>,
}

impl Appends {
    pub fn new(core: &Arc<Core>, inode: &Arc<Inode>) -> Appends {
        Appends { core: core.clone(), inode: inode.clone(), kept: Arc::default() }
    }

    /// The number under which the end of the file is kept.
    pub fn kept_end(&self) -> Option<u64> {
        self.kept.number()
    }

    /// The piece for which the end was kept under this number will not come. Returns whether the
    /// end was still kept.
    pub fn end_append(&self, number: u64) -> bool {
        self.kept.end(number)
    }

    /// No piece will come any more.
    pub fn forget_end(&self) {
        drop(self.kept.take());
    }

    /// Writes at the end of the file, through `writes`.
    pub async fn append(
        &self,
        writes: &Writes,
        data: Vec<Buf>,
        part: Option<Part>,
        operation: Option<&Operation>,
        turn: &dyn Turn,
    ) -> Result<Landed> {
        match operation.and_then(Operation::append_again) {
            Some(a) => Ok(Landed {
                offset: a.offset,
                len: self.append_again(writes, a, data, operation, turn).await?,
                kept: None,
            }),
            None => self.append_new(writes, data, part, operation, turn).await,
        }
    }

    /// The end of the file for the next append, with the guards that keep other writers away: the
    /// one kept since the last piece, or a new one.
    async fn tail(&self, kept: Option<Tail>, part: Option<&Part>) -> Result<Tail> {
        if let Some(mut t) = kept
            && (t.since.elapsed() < UNLOCKED && !self.core.pages.is_marked(self.inode.ino)
                || self.core.lock_end_now(&self.inode, &mut t.end).await)
        {
            return Ok(t);
        }
        let (core, inode) = (&self.core, &self.inode);
        let one = inode.appending.clone().lock_owned().await;
        loop {
            // The capability comes first, so that the session is on record as a writer before the
            // end is looked up. A new session may also wait for reports of other clients.
            let session = core.files.capability(inode, true, None).await?.session;
            let end = core.lock_end(inode).await?;
            if end.session == session {
                let (call, next) = part.map_or(((0, 0), 0), |p| (p.call, p.offset));
                return Ok(Tail {
                    number: 0,
                    call,
                    next,
                    since: Instant::now(),
                    bytes: 0,
                    end,
                    _one: one,
                });
            }
        }
    }

    async fn append_new(
        &self,
        writes: &Writes,
        data: Vec<Buf>,
        part: Option<Part>,
        operation: Option<&Operation>,
        turn: &dyn Turn,
    ) -> Result<Landed> {
        // A new append by this handle ends the one before, unless this is a piece of it.
        let mut kept = self.kept.take().filter(|t| part.is_some_and(|p| t.is_for(&p)));
        let len = buffers::total(&data);
        loop {
            let mut tail = self.tail(kept.take(), part.as_ref()).await?;
            let ino = self.inode.ino;
            let using = match self.core.pages.use_freely(ino) {
                Some(using) => using,
                // Without the lock other clients must be told the size meanwhile: a holder of page
                // locks may wait for it.
                None if !self.core.lock_end_now(&self.inode, &mut tail.end).await => continue,
                None => self.core.use_to_change(ino).await?,
            };
            if using.session().is_some_and(|session| session != tail.end.session) {
                continue;
            }
            if !turn.begin() {
                // Other clients may wait for these.
                drop((using, tail));
                turn.wait().await;
                continue;
            }
            let offset = self.inode.awaited.offset(tail.end.size);
            if let Some(o) = operation {
                o.set_append(tail.end.session, offset, len as u64);
            }
            let way = Way { operation, ..Way::only(tail.end.session) };
            let done = match writes.write_now(offset, data.clone(), way).await {
                // The end was lost with the session. Nothing was sent.
                Err(e) if e.code == Code::NoSession => {
                    operation.into_iter().for_each(Operation::clear_append);
                    turn.pause();
                    continue;
                }
                r => r?,
            };
            tail.end.size = offset + done as u64;
            tail.bytes += len as u64;
            let more = part.filter(|p| p.more && done == len);
            return Ok(Landed { offset, len: done, kept: more.and_then(|_| self.keep(tail, len)) });
        }
    }

    /// Keeps the end of the file for the next piece; returns its number.
    fn keep(&self, mut tail: Tail, len: usize) -> Option<u64> {
        let limit = self.core.shared.cfg.append_hold;
        if limit.is_zero() {
            return None;
        }
        let number = self.core.shared.env.random_u64();
        (tail.number, tail.next) = (number, tail.next + len as u64);
        self.kept.keep(tail);
        let kept = Arc::downgrade(&self.kept);
        self.core.shared.env.spawn(async move {
            tokio::time::sleep(limit).await;
            if let Some(kept) = kept.upgrade() {
                kept.end(number);
            }
        });
        Some(number)
    }

    /// An append that an earlier daemon of the mount had in progress is written again at the same
    /// place. Other clients are told no size without it, so it waits for nothing.
    async fn append_again(
        &self,
        writes: &Writes,
        a: Appended,
        data: Vec<Buf>,
        operation: Option<&Operation>,
        turn: &dyn Turn,
    ) -> Result<usize> {
        let lost = |e: Error| match e.code {
            Code::NoSession => Error::new(
                Code::Io,
                "the session was lost during an append; the bytes may have been written",
            ),
            _ => e,
        };
        let _using = use_in_turn(&self.core, self.inode.ino, turn).await?;
        let way = Way { operation, ..Way::only(a.session) };
        writes.write_now(a.offset, data, way).await.map_err(lost)
    }
}
