//! How much of a file is stored.

use futures_util::future::try_join_all;
use strake_proto::{Ino, Result, pb};

use super::client::Client;
use crate::data::holes::chains;

impl Client {
    /// Bytes that the servers store for a regular file, counting one copy only. Holes take no
    /// space.
    pub async fn allocated(&self, ino: Ino) -> Result<u64> {
        let core = &self.core;
        let opened;
        let inode = match core.files.live_inode(ino) {
            Some(inode) => inode,
            None => {
                // As for stat(2), no permission on the file itself is needed.
                let (file, _) = self.open(&pb::Creds::default(), ino, 0).await?;
                opened = file;
                opened.inode().clone()
            }
        };
        core.writeback.send_held(&inode).await;
        let (stripes, size) = (inode.placed().stripes, inode.size());
        let counts = chains(&stripes)
            .into_iter()
            .map(|chain| core.storage.stored(&inode, &stripes, chain, size));
        Ok(try_join_all(counts).await?.into_iter().sum())
    }
}
