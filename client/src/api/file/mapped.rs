//! Pages of memory mappings: bytes that their reader keeps, and bytes that were stored there.

use strake_fabric::Buf;
use strake_proto::{Code, Error, Result, SessionId};

use super::{File, Way};
use crate::{
    data::chains::session_lost,
    inode::{O_ACCMODE, O_WRONLY},
    locks::page_uses::Using,
    locks::pages::Mode,
};

/// Since when the bytes of a file are as they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsOf {
    /// Nobody else has changed them as long as this is the file's tenure:
    /// [`crate::Client::tenure`].
    Tenure(u64),
    /// Nobody else changes them as long as this lock is held: [`crate::Client::holds_pages`].
    Locked(u64),
    /// As long as its attributes have this `change`.
    Change(u64),
}

impl File {
    /// As [`File::read`], for whoever keeps the bytes as long as they are as they were. `asked` is
    /// called when nothing more is asked of the metadata servers. Nobody else changes the file
    /// until the last part of what is returned is dropped.
    pub async fn read_to_keep(
        &self,
        offset: u64,
        len: usize,
        asked: impl Fn(),
    ) -> Result<(Vec<Buf>, AsOf, Option<Using>)> {
        let (core, inode) = (&self.0.core, &self.0.inode);
        self.check(self.0.flags & O_ACCMODE != O_WRONLY, "reading")?;
        loop {
            if !core.pages.locks_pages() {
                let (bufs, as_of) = self.read_unlocked(offset, len, asked).await?;
                return Ok((bufs, as_of, None));
            }
            if !core.pages.is_marked(inode.ino) {
                core.files.fresh_size(inode).await?;
                let using = core.pages.use_freely(inode.ino);
                let begun = {
                    // A recall's pages are taken back when this is over: either it is seen here, or
                    // it waits for this page-in.
                    let _telling = core.lease_cache.telling();
                    let known = core.files.known_size(inode);
                    using.zip(known).inspect(|_| asked())
                };
                if let Some((using, (size, tenure))) = begun {
                    let bufs = self.read_below(size, None, offset, len).await?;
                    return Ok((bufs, self.as_of(tenure), Some(using)));
                }
            }
            let mode = if inode.may_be_stored_to() { Mode::Write } else { Mode::Read };
            let using = match core.use_pages(inode.ino, mode, false).await {
                Err(_) if !core.pages.locks_pages() => continue,
                using => using?,
            };
            let Some((number, _)) = using.lock() else { continue };
            if using.is_sized() {
                asked();
                let bufs = self.read_below(inode.size(), None, offset, len).await?;
                return Ok((bufs, AsOf::Locked(number), Some(using)));
            }
            // Whoever is asked for the size may wait for the lock to be given up.
            drop(using);
            core.files.fresh_size(inode).await?;
            core.pages.sized(inode.ino, number);
        }
    }

    fn as_of(&self, tenure: u64) -> AsOf {
        let (core, inode) = (&self.0.core, &self.0.inode);
        match core.lease_cache.tenure(core.shared.env.boot(), inode.ino) == Some(tenure) {
            true => AsOf::Tenure(tenure),
            // Recalled meanwhile: they may be of before.
            false => AsOf::Change(0),
        }
    }

    /// Without the lock: others may store there.
    async fn read_unlocked(
        &self,
        offset: u64,
        len: usize,
        asked: impl Fn(),
    ) -> Result<(Vec<Buf>, AsOf)> {
        let h = &self.0;
        let size = h.core.files.fresh_size(&h.inode).await?;
        let leased = h.core.files.known_size(&h.inode).map(|(_, tenure)| tenure);
        // Bytes that are read from here on are no older.
        let change = h.inode.attr().change;
        asked();
        let bufs = self.read_below(size, None, offset, len).await?;
        Ok((bufs, leased.map_or(AsOf::Change(change), |t| self.as_of(t))))
    }

    /// Writes back what was stored through a memory mapping of the file: as [`File::write`], but
    /// the file does not get longer. What is beyond its end is dropped. `only`: `EIO`, and nothing
    /// is written, in another session: it was stored before that was lost.
    pub async fn write_mapped(
        &self,
        offset: u64,
        data: Buf,
        only: Option<SessionId>,
    ) -> Result<()> {
        self.check(self.is_writable(), "writing")?;
        let me = self.clone();
        let writing = async move {
            let (core, inode) = (&me.0.core, &me.0.inode);
            core.writeback.send_held(inode).await;
            // Nobody else is asked: who asks for the file may wait for this.
            let end = inode.size().min(offset.saturating_add(data.len() as u64));
            if end <= offset {
                return Ok(());
            }
            let (len, tenure) =
                ((end - offset) as usize, core.files.known_size(inode).map(|(_, tenure)| tenure));
            let n = match me
                .write_now(offset, vec![data.slice(0..len)], Way { only, within: true })
                .await
            {
                Err(e) if e.code == Code::NoSession => return Err(session_lost()),
                n => n?,
            };
            if !core.pages.is_mine(inode.ino)
                && (tenure.is_none()
                    || core.lease_cache.tenure(core.shared.env.boot(), inode.ino) != tenure)
            {
                // Somebody may have cut the file meanwhile: then there are bytes beyond its end.
                inode.may_be_cut();
            }
            if n < len {
                Err(Error::new(Code::NoSpc, "no space left for a page of a mapping"))
            } else {
                Ok(())
            }
        };
        self.0.core.shared.detached(writing).await
    }
}
