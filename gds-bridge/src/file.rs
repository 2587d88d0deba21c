//! Files, and the client that serves them, as the bridge sees them.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use async_trait::async_trait;
use strake_client::{Arrived, Client, Creds, File};
use strake_fabric::{Buf, ByTransport, Foreign, Pool, Transport};
use strake_proto::{Code, Error, Result, pb};

use crate::{Policy, local::Sealed};

/// A file from which many parts are read, and to which many are written, at a time.
#[async_trait]
pub trait FileIo: Send + Sync + 'static {
    /// Distinguishes it from other files, for messages and to find overlapping ranges.
    fn id(&self) -> u64;

    /// The verified bytes of a range; fewer only where the file ends. The buffers tell which
    /// transport brought them ([`Buf::transport`]).
    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>>;

    /// Writes all of it, or fails. Returns its bytes by transport, which add up to its length.
    async fn write(&self, offset: u64, data: Buf) -> Result<ByTransport>;

    /// The tiers that its bytes may take, in addition to the policy of a call.
    fn policy(&self) -> Policy {
        Policy::Prefer
    }

    /// As [`File::read_foreign`]. `EOPNOTSUPP`: no server reaches the device's memory. A wrapper of
    /// a file must pass this on.
    async fn read_direct(&self, offset: u64, into: &Foreign) -> Result<Vec<Arrived>>;

    /// As [`File::write_foreign`].
    async fn write_direct(&self, offset: u64, from: &Foreign, sums: &[u32]) -> Result<()>;
}

/// A file with a policy of its own: no call moves its bytes by a tier that the policy does not
/// allow.
#[derive(Clone)]
pub struct Strict {
    file: Arc<dyn FileIo>,
    policy: Policy,
}

impl Strict {
    /// The policy that `file` already has applies as well. `EINVAL` if no tier meets both.
    pub fn new(file: Arc<dyn FileIo>, policy: Policy) -> Result<Strict> {
        let policy = both(("the policy", policy), ("the file's own", file.policy()))?;
        Ok(Strict { file, policy })
    }
}

/// Combines two policies for the same bytes, given with their names. `EINVAL` if no tier meets
/// both.
pub(crate) fn both((what, a): (&str, Policy), (other, b): (&str, Policy)) -> Result<Policy> {
    a.and(b).ok_or_else(|| {
        let m =
            format!("{what} is {a}, and {other} is {b}: no tier meets both, so nothing is moved");
        Error::new(Code::Inval, m)
    })
}

#[async_trait]
impl FileIo for Strict {
    fn id(&self) -> u64 {
        self.file.id()
    }

    fn policy(&self) -> Policy {
        self.policy
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        self.file.read(offset, len).await
    }

    async fn write(&self, offset: u64, data: Buf) -> Result<ByTransport> {
        self.file.write(offset, data).await
    }

    async fn read_direct(&self, offset: u64, into: &Foreign) -> Result<Vec<Arrived>> {
        self.file.read_direct(offset, into).await
    }

    async fn write_direct(&self, offset: u64, from: &Foreign, sums: &[u32]) -> Result<()> {
        self.file.write_direct(offset, from, sums).await
    }
}

/// A file that notes where reads found its end.
pub struct Watched {
    file: Arc<dyn FileIo>,
    end: AtomicU64,
}

impl Watched {
    /// `size`: its size, as far as is known.
    pub fn new(file: Arc<dyn FileIo>, size: u64) -> Watched {
        Watched { file, end: AtomicU64::new(size) }
    }

    /// The lowest end that a read found, or the known size.
    pub fn end(&self) -> u64 {
        self.end.load(Relaxed)
    }

    fn got(&self, offset: u64, len: u64, asked: u64) {
        if len < asked {
            self.end.fetch_min(offset + len, Relaxed);
        }
    }
}

#[async_trait]
impl FileIo for Watched {
    fn id(&self) -> u64 {
        self.file.id()
    }

    fn policy(&self) -> Policy {
        self.file.policy()
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        let bufs = self.file.read(offset, len).await?;
        self.got(offset, bufs.iter().map(|b| b.len() as u64).sum(), len as u64);
        Ok(bufs)
    }

    async fn write(&self, offset: u64, data: Buf) -> Result<ByTransport> {
        self.file.write(offset, data).await
    }

    async fn read_direct(&self, offset: u64, into: &Foreign) -> Result<Vec<Arrived>> {
        let all = self.file.read_direct(offset, into).await?;
        self.got(offset, all.last().map_or(0, |a| a.range.end), into.len());
        Ok(all)
    }

    async fn write_direct(&self, offset: u64, from: &Foreign, sums: &[u32]) -> Result<()> {
        self.file.write_direct(offset, from, sums).await
    }
}

/// The error of a file without storage servers, or with none that reaches the device's memory.
pub fn not_direct() -> Error {
    Error::new(
        Code::OpNotSupp,
        "this file has no storage server that could reach the device's memory",
    )
}

/// What a bridge needs from the client whose files it moves.
#[async_trait]
pub trait Network: Send + Sync + 'static {
    /// The pool for buffers, including those of bytes that arrive.
    fn pool(&self) -> &Pool;

    /// Why no storage server is reached by RDMA; `None`: at least one is.
    fn no_rdma(&self) -> Option<String>;

    /// The seal of a file at this moment; `None`: it is not sealed, or not completely.
    async fn sealed(&self, _ino: u64) -> Result<Option<Sealed>> {
        Ok(None)
    }

    /// A file for the self-test of the direct path, which is deleted when it is dropped.
    async fn scratch(&self) -> Result<Arc<dyn FileIo>> {
        Err(not_direct())
    }
}

#[async_trait]
impl Network for Client {
    fn pool(&self) -> &Pool {
        Client::pool(self)
    }

    fn no_rdma(&self) -> Option<String> {
        self.servers().no_rdma()
    }

    /// With the rights of the process.
    async fn sealed(&self, ino: u64) -> Result<Option<Sealed>> {
        let groups = rustix::process::getgroups()
            .unwrap_or_default()
            .into_iter()
            .map(|g| g.as_raw())
            .collect();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        match self.seals().get(&Creds { uid, gid, groups }, ino, None).await {
            Ok((info, _)) => {
                info.manifest.map(|m| of_manifest(&self.fs_uuid(), ino, &m)).transpose()
            }
            Err(e) if e.code == Code::NoData => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn scratch(&self) -> Result<Arc<dyn FileIo>> {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let me = Creds { uid, gid, groups: Vec::new() };
        let (file, _) = self.tmpfile(&me, self.root(), 0o600, O_RDWR | O_DIRECT, false).await?;
        Ok(Arc::new(file))
    }
}

/// `EPROTO` for an invalid manifest.
pub(crate) fn of_manifest(fs: &[u8], ino: u64, m: &pb::Manifest) -> Result<Sealed> {
    let bad =
        |_| Error::new(Code::Protocol, format!("the manifest of inode {ino:#x} is not valid"));
    Ok(Sealed {
        fs: fs.try_into().map_err(bad)?,
        ino,
        size: m.size,
        sha256: m.sha256[..].try_into().map_err(bad)?,
        root: m.root[..].try_into().map_err(bad)?,
    })
}

const O_RDWR: u32 = 2;
/// Bypasses the cache, so that bytes are read from the servers.
const O_DIRECT: u32 = 0o40000;

/// The reason where there is no cluster to ask.
pub(crate) const NO_CLIENT: &str = "there is no client here that could reach one";

/// A pool without a client, for self-tests.
#[async_trait]
impl Network for Pool {
    fn pool(&self) -> &Pool {
        self
    }

    fn no_rdma(&self) -> Option<String> {
        Some(NO_CLIENT.into())
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

    async fn write(&self, offset: u64, data: Buf) -> Result<ByTransport> {
        let (len, sent) = (data.len(), data.clone());
        match File::write(self, offset, vec![data]).await? {
            n if n < len => Err(Error::new(Code::NoSpc, "no space left for all of the bytes")),
            _ => Ok(once(sent.went(), len as u64)),
        }
    }

    async fn read_direct(&self, offset: u64, into: &Foreign) -> Result<Vec<Arrived>> {
        self.read_foreign(offset, into).await
    }

    async fn write_direct(&self, offset: u64, from: &Foreign, sums: &[u32]) -> Result<()> {
        self.write_foreign(offset, from, sums).await
    }
}

/// Counts each of `len` bytes once. Bytes that were sent again, or by more than one transport,
/// count for the transport that guarantees the least; bytes not sent yet count as local.
fn once(went: ByTransport, len: u64) -> ByTransport {
    let (mut all, mut left) = (ByTransport::default(), len);
    for transport in [Transport::Local, Transport::Tcp, Transport::RdmaStream, Transport::Rdma] {
        let n = went[transport].min(left);
        all.add(transport, n);
        left -= n;
    }
    all.add(Transport::Local, left);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_write_counts_once() {
        let mut went = ByTransport::of(Transport::Rdma, 100);
        assert_eq!(once(went, 100), went);
        assert_eq!(once(went, 130)[Transport::Local], 30, "held back");
        went.add(Transport::Tcp, 40);
        let all = once(went, 100);
        assert_eq!(
            (all[Transport::Tcp], all[Transport::Rdma], all.sum()),
            (40, 60, 100),
            "some were sent again"
        );
    }
}
