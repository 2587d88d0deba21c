//! Pages of memory mappings: bytes that their reader keeps, and bytes that were stored there.

use strake_fabric::Buf;
use strake_proto::{Code, Error, Result, SessionId};

use super::{File, Way};
use crate::{
    data::session_lost,
    inode::{O_ACCMODE, O_WRONLY},
};

/// Since when the bytes of a file are as they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsOf {
    /// Nobody else has changed them as long as this is the file's tenure:
    /// [`crate::Client::tenure`].
    Tenure(u64),
    /// As long as its attributes have this `change`.
    Change(u64),
}

impl File {
    /// As [`File::read`], for whoever keeps the bytes as long as they are as they were. `asked` is
    /// called when nothing more is asked of the metadata servers.
    pub async fn read_to_keep(&self, offset: u64, len: usize, asked: impl FnOnce()) -> Result<(Vec<Buf>, AsOf)> {
        let h = &self.0;
        self.check(h.flags & O_ACCMODE != O_WRONLY, "reading")?;
        let size = h.core.fresh_size(&h.inode).await?;
        let leased = h.core.known_size(&h.inode).map(|(_, tenure)| tenure);
        // Bytes that are read from here on are no older.
        let change = h.inode.attr().change;
        asked();
        let bufs = self.read_below(size, offset, len).await?;
        let as_of = match leased {
            None => AsOf::Change(change),
            Some(t) if h.core.memory.tenure(h.core.env.boot(), h.inode.ino) == leased => AsOf::Tenure(t),
            // Recalled meanwhile: they may be of before.
            Some(_) => AsOf::Change(0),
        };
        Ok((bufs, as_of))
    }

    /// Writes back what was stored through a memory mapping of the file: as [`File::write`], but
    /// the file does not get longer. What is beyond its end is dropped. `only`: `EIO`, and nothing
    /// is written, in another session: it was stored before that was lost.
    pub async fn write_mapped(&self, offset: u64, data: Buf, only: Option<SessionId>) -> Result<()> {
        self.check(self.is_writable(), "writing")?;
        let me = self.clone();
        let writing = async move {
            let (core, inode) = (&me.0.core, &me.0.inode);
            core.send_held(inode).await;
            // Nobody else is asked: who asks for the file may wait for this.
            let end = inode.size().min(offset.saturating_add(data.len() as u64));
            if end <= offset {
                return Ok(());
            }
            let (len, tenure) = ((end - offset) as usize, core.known_size(inode).map(|(_, tenure)| tenure));
            let n = match me.write_now(offset, vec![data.slice(0..len)], Way { only, within: true }).await {
                Err(e) if e.code == Code::NoSession => return Err(session_lost()),
                n => n?,
            };
            if tenure.is_none() || core.memory.tenure(core.env.boot(), inode.ino) != tenure {
                // Somebody may have cut the file meanwhile: then there are bytes beyond its end.
                inode.may_be_cut();
            }
            if n < len { Err(Error::new(Code::NoSpc, "no space left for a page of a mapping")) } else { Ok(()) }
        };
        self.0.core.detached(writing).await
    }
}
