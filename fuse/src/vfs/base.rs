//! What all parts of the [VFS core](super) use.

use std::sync::Arc;

use strake_client::Client;
use strake_proto::{Ino, pb};

use super::{handles::Numbering, subtree::Root};
use crate::handover::HandoverMemory;

/// See the module.
pub(super) struct Base {
    pub client: Client,
    pub root: Root,
    /// The memory of the mount, for what must outlive this process.
    pub keep: Option<Arc<HandoverMemory>>,
    pub numbering: Numbering,
}

impl Base {
    /// See [`Root::inner`].
    pub fn inner(&self, node: Ino) -> Ino {
        self.root.inner(node)
    }

    /// See [`Root::outer`].
    pub fn outer(&self, attr: pb::Attr) -> pb::Attr {
        self.root.outer(attr)
    }
}
