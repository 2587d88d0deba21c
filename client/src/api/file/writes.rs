//! The writing side of an open file.

use std::sync::Arc;

use strake_fabric::Buf;
use strake_proto::{Code, Error, Result, SessionId, layout::MAX_FILE_SIZE, pb};

use super::{
    told::{Teller, Told},
    turn::{Turn, use_in_turn},
};
use crate::{
    core::Core,
    data::buffers,
    handover::operation::{Caller, Operation},
    inode::Inode,
    metadata::ops::op,
    read::cache::Change,
    write::back::Taken,
    write::updates::Numbers,
};

const O_DSYNC: u32 = 0o10000;

/// How bytes are written.
#[derive(Clone, Copy, Default)]
pub(super) struct Way<'a> {
    /// With a session here, fails with `NoSession` and sends nothing in any other session.
    pub only: Option<SessionId>,
    /// The bytes lie within the size that the file had, and do not make it longer again after a
    /// truncate.
    pub within: bool,
    /// See [`super::File::write_in_turn`].
    pub operation: Option<&'a Operation>,
}

impl Way<'_> {
    pub fn only(session: SessionId) -> Way<'static> {
        Way { only: Some(session), ..Way::default() }
    }
}

pub(super) struct Writes {
    pub(super) core: Arc<Core>,
    pub(super) inode: Arc<Inode>,
    /// The opener, on whose behalf the file is written.
    pub(super) creds: pb::Creds,
    flags: u32,
    told: Told,
}

impl Writes {
    pub fn new(core: &Arc<Core>, inode: &Arc<Inode>, creds: &pb::Creds, flags: u32) -> Writes {
        Writes {
            core: core.clone(),
            inode: inode.clone(),
            creds: creds.clone(),
            flags,
            told: Told::new(inode.errors()),
        }
    }

    /// Whether writes return when they are stable: opened with O_DSYNC or O_SYNC.
    pub fn is_stable(&self) -> bool {
        self.flags & O_DSYNC != 0
    }

    /// See [`Told::tell`].
    pub fn tell_errors(&self, by: Teller) -> Result<()> {
        self.told.tell(by, |seen| self.inode.error_since(seen))
    }

    /// Keeps a write back, if it may be.
    pub fn hold_back(&self, offset: u64, data: &[Buf]) -> Result<Taken> {
        self.tell_errors(Teller::Write)?;
        let end = offset.saturating_add(buffers::total(data) as u64);
        if end > MAX_FILE_SIZE {
            return Ok(Taken::Through);
        }
        Ok(self.core.writeback.hold_back(&self.inode, &self.creds, self.flags, offset, data))
    }

    /// As [`Writes::hold_back`], if the write has its turn.
    pub fn hold_back_in_turn(&self, turn: &dyn Turn, offset: u64, data: &[Buf]) -> Result<Taken> {
        if !turn.begin() {
            return Ok(Taken::Through);
        }
        let taken = self.hold_back(offset, data)?;
        if taken != Taken::Held {
            turn.pause();
        }
        Ok(taken)
    }

    /// Goes on with a write that was not held back.
    pub async fn write(
        &self,
        mut taken: Taken,
        offset: u64,
        data: Vec<Buf>,
        operation: Option<&Operation>,
        turn: &dyn Turn,
    ) -> Result<usize> {
        let (core, inode, len) = (&self.core, &self.inode, buffers::total(&data));
        for _ in 0..2 {
            match taken {
                Taken::Full => core.writeback.send_held_here(inode).await,
                Taken::Ask => core.writeback.ask_space(inode, offset, len as u64).await,
                Taken::Held | Taken::Through => break,
            }
            taken = self.hold_back_in_turn(turn, offset, &data)?;
        }
        if taken == Taken::Held {
            return Ok(len);
        }
        core.writeback.send_held_here(inode).await;
        self.write_alone(offset, data, operation, turn).await
    }

    /// As [`Writes::write_now`], while no other client holds pages of the file.
    async fn write_alone(
        &self,
        offset: u64,
        data: Vec<Buf>,
        operation: Option<&Operation>,
        turn: &dyn Turn,
    ) -> Result<usize> {
        loop {
            let using = use_in_turn(&self.core, self.inode.ino, turn).await?;
            let way = Way { only: using.session(), operation, within: false };
            match self.write_now(offset, data.clone(), way).await {
                // The lock was lost with the session. What was sent was sent under the lock.
                Err(e) if e.code == Code::NoSession && way.only.is_some() => turn.pause(),
                written => return written,
            }
        }
    }

    /// Sends a write to the servers. Returns how many bytes they have.
    pub async fn write_now(
        &self,
        offset: u64,
        data: Vec<Buf>,
        Way { only, within, operation }: Way<'_>,
    ) -> Result<usize> {
        let (core, inode) = (&self.core, &self.inode);
        self.tell_errors(Teller::Write)?;
        let data = up_to_the_largest(offset, data)?;
        let len = buffers::total(&data);
        if len == 0 {
            return Ok(0);
        }
        let end = offset + len as u64;
        let stable = self.is_stable();
        // Reserve memory first: waiting for it under the range lock would hold up the flush that
        // frees it.
        let room = if stable { None } else { Some(core.updates.reserve(len).await?) };
        let _turn = inode.ranges.lock(offset..end).await;
        inode.begins(&(offset..end));
        let change = Change::begin(&core.cache, inode.ino, offset..end);
        let numbers = Numbers { only, operation };
        let (session, done, outcome) =
            core.updates.write_range(inode, offset, &data, stable, numbers, room).await;
        drop(change);
        if done > 0 {
            let range = offset..offset + done;
            match within {
                true => inode.wrote_within(session, range, &self.creds)?,
                false => inode.wrote(session, range, &self.creds)?,
            }
        }
        let unsent = outcome.as_ref().is_err_and(|e| e.code == Code::NoSession);
        if done < len as u64 && !unsent {
            inode.write_failed(end);
        }
        match outcome {
            Err(e) if done == 0 || e.code != Code::NoSpc => return Err(e),
            _ => {}
        }
        if stable {
            core.files.push_size(inode).await?;
        }
        Ok(done as usize)
    }

    pub async fn truncate(&self, operation: Option<&Operation>, size: u64) -> Result<pb::Attr> {
        let set = pb::SetAttr { ino: self.inode.ino, size: Some(size), ..Default::default() };
        self.core.setattr(Caller { creds: &self.creds, operation }, set, true).await
    }

    pub async fn extend(&self, end: u64) -> Result<pb::Attr> {
        let extend = pb::Extend { ino: self.inode.ino, end, holes: true };
        let extend = vec![op(pb::op::Op::Extend(extend))];
        let r = self.core.files.meta_as_opener((&self.creds).into(), extend).await?;
        let attr = r.first().and_then(|r| r.attr.as_ref());
        let attr = attr.ok_or_else(|| {
            Error::new(Code::Protocol, "the answer to an extension has no attributes")
        })?;
        Ok(self.inode.take_attr(attr))
    }

    /// Makes all that was written stable, and reports lost writes.
    pub async fn sync(&self, by: Teller) -> Result<()> {
        let outcome = self.core.sync_inode(&self.inode).await;
        self.tell_errors(by).and(outcome)
    }
}

/// The part of a write that fits below the largest size; an error where nothing fits.
fn up_to_the_largest(offset: u64, data: Vec<Buf>) -> Result<Vec<Buf>> {
    let len = buffers::total(&data) as u64;
    match MAX_FILE_SIZE.saturating_sub(offset) {
        room if room >= len => Ok(data),
        0 => Err(Error::new(Code::FBig, "beyond the largest file size")),
        room => Ok(buffers::cut(&data, 0, room as usize)),
    }
}
