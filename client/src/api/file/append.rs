//! Appends, and those that come in pieces: the kernel cuts what a program writes by one call into
//! requests, and others must not get in between.

use std::time::Duration;

use strake_fabric::Buf;
use strake_proto::{Code, Error, Result};
use tokio::{sync::OwnedMutexGuard, time::Instant};

use super::{File, Way};
use crate::{
    data::buffers,
    handover::{self, Appended},
    locks::End,
};

/// Without a lock, nobody is told the size of the file while an append goes on in pieces: after so
/// long the lock is taken.
const UNLOCKED: Duration = Duration::from_millis(500);
/// Bytes that go in one go at most: no write(2) is longer, so what follows is another.
const LONGEST: u64 = 2 << 30;

/// A piece of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The call that it is a piece of: the same for its pieces, another for every other call as far
    /// as that can be told.
    pub call: (u32, u64),
    /// Where the caller believes that it goes; its pieces follow each other there.
    pub offset: u64,
    /// Another piece may come.
    pub more: bool,
}

/// What became of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// Where it went.
    pub offset: u64,
    /// Bytes written, fewer than given when space ran out or at the largest size of a file.
    pub len: usize,
    /// The end of the file is kept for the next piece: until it is here, [`File::end_append`] is
    /// called with this number, or [`crate::Config::append_hold`] is over.
    pub kept: Option<u64>,
}

/// The end of a file, kept for the next piece of an append.
pub(super) struct Tail {
    number: u64,
    call: (u32, u64),
    /// Where the caller believes that the next one goes.
    next: u64,
    /// Since the first piece.
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

impl File {
    /// Writes at the end of the file; returns where. Appends never overlap, those of other clients
    /// included.
    pub async fn append(&self, data: Vec<Buf>) -> Result<u64> {
        let len = buffers::total(&data);
        let landed = self.append_piece(data, None, ()).await?;
        if landed.len < len {
            return Err(Error::new(Code::NoSpc, "no space left for all of the bytes"));
        }
        Ok(landed.offset)
    }

    /// As [`File::append`]; a piece goes directly behind the one before it if that is not too long
    /// ago. Drops `until` as [`File::write_until`].
    pub async fn append_part(
        &self,
        data: Vec<Buf>,
        part: Part,
        until: impl Send + 'static,
    ) -> Result<Landed> {
        self.append_piece(data, Some(part), until).await
    }

    async fn append_piece(
        &self,
        data: Vec<Buf>,
        part: Option<Part>,
        until: impl Send + 'static,
    ) -> Result<Landed> {
        self.check(self.is_writable(), "writing")?;
        let me = self.clone();
        let appending = async move {
            let _until = until;
            match handover::numbers().and_then(|n| n.append_again()) {
                Some(a) => Ok(Landed {
                    offset: a.offset,
                    len: me.append_again(a, data).await?,
                    kept: None,
                }),
                None => me.append_new(data, part).await,
            }
        };
        self.0.core.shared.detached(appending).await
    }

    /// Under which number the end of the file is kept for a piece of an append by this handle.
    pub fn kept_end(&self) -> Option<u64> {
        self.0.tail.lock().as_ref().map(|t| t.number)
    }

    /// The piece that the end of the file was kept for under this number does not come. Whether it
    /// was kept until now.
    pub fn end_append(&self, number: u64) -> bool {
        self.0.tail.lock().take_if(|t| t.number == number).is_some()
    }

    /// Where the next append goes, with what keeps others away: kept since the last piece, or anew.
    async fn tail(&self, kept: Option<Tail>, part: Option<&Part>) -> Result<Tail> {
        if let Some(mut t) = kept
            && (t.since.elapsed() < UNLOCKED && !self.0.core.pages.is_marked(self.0.inode.ino)
                || self.0.core.lock_end_now(&self.0.inode, &mut t.end).await)
        {
            return Ok(t);
        }
        let (core, inode) = (&self.0.core, &self.0.inode);
        let one = inode.appending.clone().lock_owned().await;
        loop {
            // First, so that the session is on record as a writer before the end is looked for; and
            // a new one may wait for reports of others.
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

    async fn append_new(&self, data: Vec<Buf>, part: Option<Part>) -> Result<Landed> {
        // Whoever appends by this handle now has done with the append before, unless this is a
        // piece of it.
        let mut kept = self.0.tail.lock().take().filter(|t| part.is_some_and(|p| t.is_for(&p)));
        let len = buffers::total(&data);
        loop {
            let mut tail = self.tail(kept.take(), part.as_ref()).await?;
            let ino = self.0.inode.ino;
            let using = match self.0.core.pages.use_freely(ino) {
                Some(using) => using,
                // Others must be told the size meanwhile: who has pages may wait for it.
                None if !self.0.core.lock_end_now(&self.0.inode, &mut tail.end).await => continue,
                None => self.0.core.use_to_change(ino).await?,
            };
            if using.session().is_some_and(|session| session != tail.end.session) {
                continue;
            }
            let offset = self.0.inode.append_end(tail.end.size);
            if let Some(n) = handover::numbers() {
                n.set_append(tail.end.session, offset, len as u64);
            }
            let done = match self.write_now(offset, data.clone(), Way::only(tail.end.session)).await
            {
                // With it the end was lost. Nothing was sent.
                Err(e) if e.code == Code::NoSession => {
                    handover::numbers().iter().for_each(|n| n.clear_append());
                    continue;
                }
                r => r?,
            };
            tail.end.size = offset + done as u64;
            tail.bytes += len as u64;
            let more = part.filter(|p| p.more && done == len);
            return Ok(Landed {
                offset,
                len: done,
                kept: more.and_then(|_| self.keep_end(tail, len)),
            });
        }
    }

    /// Keeps the end of the file for the next piece; its number.
    fn keep_end(&self, mut tail: Tail, len: usize) -> Option<u64> {
        let limit = self.0.core.shared.cfg.append_hold;
        if limit.is_zero() {
            return None;
        }
        let number = self.0.core.shared.env.random_u64();
        (tail.number, tail.next) = (number, tail.next + len as u64);
        *self.0.tail.lock() = Some(tail);
        let handle = std::sync::Arc::downgrade(&self.0);
        self.0.core.shared.env.spawn(async move {
            tokio::time::sleep(limit).await;
            if let Some(h) = handle.upgrade() {
                File(h).end_append(number);
            }
        });
        Some(number)
    }

    /// An append that a former client of the mount had in work goes where it went. Others are told
    /// of no size without it, so it waits for nobody.
    async fn append_again(&self, a: Appended, data: Vec<Buf>) -> Result<usize> {
        let lost = |e: Error| match e.code {
            Code::NoSession => Error::new(
                Code::Io,
                "the session was lost during an append; the bytes may be there",
            ),
            _ => e,
        };
        let _using = self.0.core.use_to_change(self.0.inode.ino).await?;
        self.write_now(a.offset, data, Way::only(a.session)).await.map_err(lost)
    }
}
