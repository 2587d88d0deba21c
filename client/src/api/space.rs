//! Space of the file system, and how much of it a file takes.

use std::sync::Arc;

use futures_util::future::try_join_all;
use strake_proto::{Code, Error, Ino, Result, pb};

use crate::{Client, core::Core, data::holes::chains};

/// Free and used space: [`crate::Client::space`].
#[derive(Clone, Copy)]
pub struct Space<'a> {
    pub(crate) core: &'a Arc<Core>,
}

impl Space<'_> {
    /// Space of the file system, or of one pool if named, counted for files with as many copies as
    /// the root's default layout says.
    pub async fn statfs(self, creds: &pb::Creds, pool: &str) -> Result<pb::StatfsReply> {
        self.statfs_in(creds, pool, 0).await
    }

    /// As [`Space::statfs`], but counted with the default layout of a directory.
    pub async fn statfs_in(
        self,
        creds: &pb::Creds,
        pool: &str,
        dir: Ino,
    ) -> Result<pb::StatfsReply> {
        let o = pb::op::Op::Statfs(pb::Statfs { pool: pool.into(), dir });
        let r = self.core.metadata.read_op(creds, o).await?;
        r.statfs.ok_or_else(|| {
            Error::new(Code::Protocol, "the metadata server's answer has no space figures")
        })
    }

    /// Bytes that the servers store for a regular file, counting one copy only. Holes take no
    /// space.
    pub async fn allocated(self, ino: Ino) -> Result<u64> {
        let core = self.core;
        let opened;
        let inode = match core.files.live_inode(ino) {
            Some(inode) => inode,
            None => {
                // As for stat(2), no permission on the file itself is needed.
                let (file, _) =
                    Client { core: core.clone() }.open(&pb::Creds::default(), ino, 0).await?;
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
