//! Pages of memory mappings: bytes that the kernel keeps after a read, and bytes that programs
//! stored there.

use strake_fabric::Buf;
use strake_proto::{Code, Error, Result, SessionId};

use super::{
    reads::Reads,
    writes::{Way, Writes},
};
use crate::{
    data::chains::session_lost, handover::operation::Operation, locks::page_uses::Using,
    locks::pages::Mode,
};

/// The condition under which bytes that were read are still the file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsOf {
    /// No other client has changed them as long as this is the file's tenure:
    /// [`crate::Copies::tenure`].
    Tenure(u64),
    /// No other client changes them as long as this lock is held: [`crate::Copies::holds_pages`].
    Locked(u64),
    /// They are valid as long as the file's attributes have this `change`.
    Change(u64),
}

impl Reads {
    /// See [`super::File::read_to_keep`].
    pub(super) async fn read_to_keep(
        &self,
        offset: u64,
        len: usize,
        asked: impl Fn(),
    ) -> Result<(Vec<Buf>, AsOf, Option<Using>)> {
        let (core, inode) = (&self.core, &self.inode);
        loop {
            if !core.pages.locks_pages() {
                let (bufs, as_of) = self.read_unlocked(offset, len, asked).await?;
                return Ok((bufs, as_of, None));
            }
            if !core.pages.is_marked(inode.ino) {
                core.files.fresh_size(inode).await?;
                let using = core.pages.use_freely(inode.ino);
                let begun = {
                    // Pages that a recall revokes are taken back after this guard is dropped. So
                    // either the recall is seen here, or it waits for this page-in.
                    let _telling = core.lease_cache.telling();
                    let known = core.files.known_size(inode);
                    using.zip(known).inspect(|_| asked())
                };
                if let Some((using, (size, tenure))) = begun {
                    let bufs = self.below(size, None, offset, len).await?;
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
                let bufs = self.below(inode.size(), None, offset, len).await?;
                return Ok((bufs, AsOf::Locked(number), Some(using)));
            }
            // The answer with the size may itself wait until this client gives up the lock.
            drop(using);
            core.files.fresh_size(inode).await?;
            core.pages.sized(inode.ino, number);
        }
    }

    /// See [`super::File::read_at_once`].
    pub(super) async fn read_at_once(&self, offset: u64, len: usize) -> Result<(Vec<Buf>, AsOf)> {
        let (core, inode) = (&self.core, &self.inode);
        let session = core.metadata.current_session().map(|s| s.id);
        let number = session.and_then(|session| core.pages.number(inode.ino, session));
        let bufs = self.below(inode.size(), None, offset, len).await?;
        Ok((bufs, number.map_or(AsOf::Change(0), AsOf::Locked)))
    }

    fn as_of(&self, tenure: u64) -> AsOf {
        let (core, inode) = (&self.core, &self.inode);
        match core.lease_cache.tenure(core.shared.env.boot(), inode.ino) == Some(tenure) {
            true => AsOf::Tenure(tenure),
            // There was a recall meanwhile: the bytes may be older than it.
            false => AsOf::Change(0),
        }
    }

    /// Reads without the lock: other clients may store there.
    async fn read_unlocked(
        &self,
        offset: u64,
        len: usize,
        asked: impl Fn(),
    ) -> Result<(Vec<Buf>, AsOf)> {
        let (core, inode) = (&self.core, &self.inode);
        let size = core.files.fresh_size(inode).await?;
        let leased = core.files.known_size(inode).map(|(_, tenure)| tenure);
        // Bytes that are read from here on are at least as new as this.
        let change = inode.attr().change;
        asked();
        let bufs = self.below(size, None, offset, len).await?;
        Ok((bufs, leased.map_or(AsOf::Change(change), |t| self.as_of(t))))
    }
}

impl Writes {
    /// See [`super::File::write_mapped`].
    pub(super) async fn write_mapped(
        &self,
        operation: Option<&Operation>,
        offset: u64,
        data: Buf,
        only: Option<SessionId>,
    ) -> Result<()> {
        let (core, inode) = (&self.core, &self.inode);
        core.writeback.send_held(inode).await;
        // The metadata server is not asked: its answer may wait for this write.
        let end = inode.size().min(offset.saturating_add(data.len() as u64));
        if end <= offset {
            return Ok(());
        }
        let (len, tenure) =
            ((end - offset) as usize, core.files.known_size(inode).map(|(_, tenure)| tenure));
        let way = Way { only, within: true, operation };
        let n = match self.write_now(offset, vec![data.slice(0..len)], way).await {
            Err(e) if e.code == Code::NoSession => return Err(session_lost()),
            n => n?,
        };
        if !core.pages.is_mine(inode.ino)
            && (tenure.is_none()
                || core.lease_cache.tenure(core.shared.env.boot(), inode.ino) != tenure)
        {
            // Another client may have truncated the file meanwhile: then there are bytes beyond
            // its end.
            inode.openings.set_surplus();
        }
        if n < len {
            Err(Error::new(Code::NoSpc, "no space left for a page of a mapping"))
        } else {
            Ok(())
        }
    }
}
