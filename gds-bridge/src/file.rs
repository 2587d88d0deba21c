//! Files, and the client that has them, as the bridge sees them.

use async_trait::async_trait;
use strake_client::{Client, File};
use strake_fabric::{Buf, Pool};
use strake_proto::{Code, Error, Result};

/// A file that parts are read from and written to, many at a time.
#[async_trait]
pub trait FileIo: Send + Sync + 'static {
    /// What tells it from other files, for messages and to find ranges that overlap.
    fn id(&self) -> u64;

    /// The bytes of a range, verified; fewer only where the file ends.
    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>>;

    /// Writes all of it, or fails.
    async fn write(&self, offset: u64, data: Buf) -> Result<()>;
}

/// What a bridge asks of the client whose files it moves.
pub trait Network: Send + Sync + 'static {
    /// Where buffers come from, those of bytes that arrive too.
    fn pool(&self) -> &Pool;

    /// Bytes that went over RDMA since the beginning, whichever way and for whom.
    fn over_rdma(&self) -> u64;
}

impl Network for Client {
    fn pool(&self) -> &Pool {
        Client::pool(self)
    }

    fn over_rdma(&self) -> u64 {
        self.roads().roads.iter().filter(|r| r.road == "rdma").map(|r| r.sent + r.received).sum()
    }
}

/// Buffers without a client, for self-tests.
impl Network for Pool {
    fn pool(&self) -> &Pool {
        self
    }

    fn over_rdma(&self) -> u64 {
        0
    }
}

#[async_trait]
impl FileIo for File {
    fn id(&self) -> u64 {
        self.ino()
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        File::read(self, offset, len).await
    }

    async fn write(&self, offset: u64, data: Buf) -> Result<()> {
        let len = data.len();
        match File::write(self, offset, vec![data]).await? {
            n if n < len => Err(Error::new(Code::NoSpc, "no space left for all of the bytes")),
            _ => Ok(()),
        }
    }
}
