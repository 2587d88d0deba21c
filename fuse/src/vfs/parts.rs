//! The file system as the kernel sees it: its parts, and what concerns all of them.

use std::{sync::Arc, time::Duration};

use strake_client::Client;
use strake_fabric::Pool;
use strake_proto::{Ino, Result, ids::ROOT_INO, pb};
use tokio::time::Instant;

use super::{
    base::Base,
    claims::Claims,
    dirs::Dirs,
    files::Files,
    folders::Folders,
    gone::Gone,
    handles::{Numbering, Table},
    known::Known,
    locks::Locks,
    names::Names,
    subtree::Root,
    xattr::Xattrs,
};
use crate::handover::HandoverMemory;

/// What a mount shows of the file system, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The folder that is the root.
    pub root: Ino,
    /// Whether every write is stable before it returns, as if opened with `O_SYNC`.
    pub synchronous: bool,
}

impl Default for View {
    fn default() -> View {
        View { root: ROOT_INO, synchronous: false }
    }
}

/// See the module. Each part has the requests that it is named after.
pub struct Vfs {
    /// Names and attributes.
    pub names: Names,
    /// Open files.
    pub files: Files,
    /// Open directories.
    pub dirs: Dirs,
    /// Extended attributes.
    pub xattrs: Xattrs,
    /// Locks of files.
    pub locks: Arc<Locks>,
    pub(super) base: Arc<Base>,
    known: Arc<Known>,
    claims: Arc<Claims>,
}

impl Vfs {
    /// The whole file system. `keep`: the memory of the mount, for what must outlive this process.
    pub fn new(client: Client, keep: Option<Arc<HandoverMemory>>) -> Vfs {
        Vfs::with(client, keep, View::default())
    }

    /// As [`Vfs::new`], with a view of it.
    pub fn with(client: Client, keep: Option<Arc<HandoverMemory>>, view: View) -> Vfs {
        let known = Arc::new(Known::new(keep.clone()));
        let numbering = Numbering::new(keep.clone());
        let base = Arc::new(Base { client, root: Root::new(view.root), keep, numbering });
        let (files, dirs) = (Arc::new(Table::default()), Arc::new(Table::default()));
        let (folders, claims) = (Arc::new(Folders::default()), Arc::new(Claims::default()));
        let gone = Arc::new(Gone::new(folders.clone(), dirs.clone()));
        let locks = Arc::new(Locks::new(base.clone(), files.clone()));
        Vfs {
            names: Names::new(
                base.clone(),
                files.clone(),
                gone.clone(),
                claims.clone(),
                known.clone(),
            ),
            files: Files::new(base.clone(), files, locks.clone(), claims.clone(), view.synchronous),
            dirs: Dirs::new(base.clone(), dirs, folders, claims.clone()),
            xattrs: Xattrs::new(base.clone(), gone, known.clone()),
            locks,
            base,
            known,
            claims,
        }
    }

    /// The space of the file system, counted with the default layout of the mount's root.
    pub async fn statfs(&self) -> Result<pb::StatfsReply> {
        self.known.ask_space(&self.base).await
    }

    /// Returns after `limit`, or as soon as a server is known not to answer.
    pub(crate) async fn while_served(&self, limit: Duration) {
        const LOOK: Duration = Duration::from_millis(10);
        let end = Instant::now() + limit;
        while self.base.client.servers().away().is_empty() && Instant::now() < end {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Fetches what the mount must show when servers are away. Call this before there is a mount:
    /// see [`Known`].
    pub(crate) async fn learn(&self) -> Result<()> {
        tokio::try_join!(self.names.getattr(ROOT_INO), self.statfs()).map(drop)
    }

    /// The kernel keeps names: then two equal renames cannot be distinguished.
    pub(crate) fn keeps_names(&self) {
        self.claims.keeps_names();
    }

    /// Flushes and forgets all that is still open, after the kernel is gone. Files are closed by
    /// the end of the session. Returns the first error about bytes that may be lost and that no
    /// close reported.
    pub async fn close_all(&self) -> Result<()> {
        let outcome = self.files.flush_all().await;
        self.dirs.forget_all();
        self.files.all_closed().await;
        outcome
    }

    /// The pool for the transport's buffers.
    pub(crate) fn pool(&self) -> &Pool {
        self.base.client.pool()
    }
}
