//! How long what the kernel was told is valid: copies of attributes and names as long as the client
//! knows them under a lease (`docs/leases.md`), pages of memory mappings until the file changes
//! elsewhere (`docs/mappings.md`).

use std::{sync::Arc, time::Duration};

use parking_lot::RwLockReadGuard;
use strake_client::Forget;
use strake_proto::{Ino, Result, SessionId, pb};

use super::parts::Vfs;

impl Vfs {
    /// Takes copies back through `copies` from now on. Returns `false` if copies are kept already.
    pub(crate) fn set_copies(&self, copies: Arc<dyn Forget>) -> bool {
        self.base.client.copies().keep(copies)
    }

    /// Hold this from before you ask how long a copy is valid until the copy is made.
    pub(crate) fn telling(&self) -> RwLockReadGuard<'_, ()> {
        self.base.client.copies().telling()
    }

    /// For how long a copy of these attributes may be kept.
    pub(crate) fn attr_valid(&self, attr: &pb::Attr) -> Duration {
        let ino = self.base.root.inner(attr.ino);
        self.base.client.copies().attr_valid(&pb::Attr { ino, ..*attr })
    }

    /// For how long the kernel may assume that a name refers to this inode (or, with `None`, that
    /// it does not exist).
    pub(crate) fn name_valid(&self, dir: Ino, name: &[u8], to: Option<Ino>) -> Duration {
        let root = self.base.root;
        self.base.client.copies().name_valid(root.inner(dir), name, to.map(|ino| root.inner(ino)))
    }

    /// The client's session; 0: none.
    pub(crate) fn session(&self) -> SessionId {
        self.base.client.session()
    }

    /// While this value stays the same, no other client has changed the bytes of a file.
    pub(crate) fn tenure(&self, ino: Ino) -> Option<u64> {
        self.base.client.copies().tenure(ino)
    }

    /// The session in which this lock of a file's pages is held, if it is held.
    pub(crate) fn holds_pages(&self, ino: Ino, number: u64) -> Option<SessionId> {
        self.base.client.copies().holds_pages(ino, number)
    }

    /// The tenure, if no other client can change the file now and its last change is this one.
    pub(crate) fn leased(&self, ino: Ino, change: u64) -> Option<u64> {
        self.base
            .client
            .copies()
            .leased(ino)
            .filter(|(attr, _)| attr.change == change)
            .map(|(_, tenure)| tenure)
    }

    /// The number of the last change of a file, including what other clients have written up to
    /// now.
    pub(crate) async fn change_of(&self, ino: Ino) -> Result<u64> {
        self.base.client.getattr(&pb::Creds::default(), ino).await.map(|attr| attr.change)
    }
}
