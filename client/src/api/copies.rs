//! What callers may keep of what the client told them, and for how long. See `docs/leases.md`.

use std::{sync::Arc, time::Duration};

use parking_lot::RwLockReadGuard;
use strake_proto::{Ino, SessionId, pb::Attr};

use crate::{core::Core, leases::lease_cache::Forget};

/// The copies that a caller keeps of attributes, names and bytes: [`crate::Client::copies`].
#[derive(Clone, Copy)]
pub struct Copies<'a> {
    pub(crate) core: &'a Arc<Core>,
}

impl<'a> Copies<'a> {
    /// While this value stays the same, no other client has changed the bytes of the file. `None`
    /// when that is not known.
    pub fn tenure(self, ino: Ino) -> Option<u64> {
        self.core.lease_cache.tenure(self.core.shared.env.boot(), ino)
    }

    /// The attributes of a file that no other client can change now, with its tenure.
    pub fn leased(self, ino: Ino) -> Option<(Attr, u64)> {
        self.core.lease_cache.data(self.core.shared.env.boot(), ino)
    }

    /// The session in which this lock of a file's pages is held, if it is held. While it is, no
    /// other client changes the file.
    pub fn holds_pages(self, ino: Ino, number: u64) -> Option<SessionId> {
        self.core.pages.holds(ino, number)
    }

    /// From now on the caller may keep copies of what this client returns, for as long as
    /// [`Copies::attr_valid`] and [`Copies::name_valid`] say. `copies` is called when a copy is no
    /// longer valid. Works once; returns false when another caller keeps copies already.
    pub fn keep(self, copies: Arc<dyn Forget>) -> bool {
        self.core.lease_cache.set_copies(copies)
    }

    /// Hold this guard from before you ask how long a copy is valid until the copy is made: no copy
    /// is revoked meanwhile.
    pub fn telling(self) -> RwLockReadGuard<'a, ()> {
        self.core.lease_cache.telling()
    }

    /// For how long a copy of exactly these attributes may be kept; 0 for not at all.
    pub fn attr_valid(self, attr: &Attr) -> Duration {
        self.core.lease_cache.attr_valid(self.core.shared.env.boot(), attr)
    }

    /// For how long a caller may assume that a name in a directory means this inode (or, with
    /// `None`, that the name does not exist). 0 for not at all.
    pub fn name_valid(self, dir: Ino, name: &[u8], to: Option<Ino>) -> Duration {
        self.core.lease_cache.name_valid(self.core.shared.env.boot(), dir, name, to)
    }
}
