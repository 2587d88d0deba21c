//! How long the kernel may keep a copy of what it is told: as long as the client knows it under a
//! lease. See `docs/leases.md`.

use std::{sync::Arc, time::Duration};

use parking_lot::RwLockReadGuard;
use strake_client::Forget;
use strake_proto::{Ino, pb};

use super::Vfs;

impl Vfs {
    /// Takes copies back through `copies` from now on. Returns `false` if copies are kept already.
    pub(crate) fn set_copies(&self, copies: Arc<dyn Forget>) -> bool {
        self.client.copies().keep(copies)
    }

    /// Hold this from before you ask how long a copy is valid until the copy is made.
    pub(crate) fn telling(&self) -> RwLockReadGuard<'_, ()> {
        self.client.copies().telling()
    }

    /// For how long a copy of these attributes may be kept.
    pub(crate) fn attr_valid(&self, attr: &pb::Attr) -> Duration {
        self.client.copies().attr_valid(&pb::Attr { ino: self.inner(attr.ino), ..*attr })
    }

    /// For how long the kernel may assume that a name refers to this inode (or, with `None`, that
    /// it does not exist).
    pub(crate) fn name_valid(&self, dir: Ino, name: &[u8], to: Option<Ino>) -> Duration {
        self.client.copies().name_valid(self.inner(dir), name, to.map(|ino| self.inner(ino)))
    }
}
