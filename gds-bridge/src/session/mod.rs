//! A client, a device and a bridge between them, for programs that are not asynchronous: the base
//! of the C library and the Python module.

mod path;
pub mod published;
mod replace;
mod stage;
mod start;
mod tensors;

use std::{fmt, path::PathBuf, process, str::FromStr, sync::Arc, time::Duration};

pub use replace::Content;
use rustix::process::{getegid, geteuid, getgroups};
pub use stage::Staged;
pub use start::Started;
use strake_client::{Client, Creds, File};
use strake_fabric::{Buf, Endpoint, Identity, Pool, REGION, Transports, Use, endpoint::MDS_PORT};
use strake_proto::{Code, Error, Ino, Result, pb};
use strake_runtime::{ClientKey, Env, keyfile};
pub use tensors::TensorFile;
use tokio::runtime::Runtime;

use crate::{
    Bridge, Cuda, Direction, Failed, GpuMem, HostMem, Options, Policy, Report, Transfer,
    fault::Fault,
    status::{TierStatus, of_bridge},
};

/// Default path of the client key.
pub const KEY: &str = "/etc/strake/client.key";

/// The memory that bytes are moved to and from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// On an NVIDIA GPU, by the driver's device number.
    Cuda(u32),
    /// In this process, instead of a device; measurements say nothing about a GPU.
    Host,
}

impl FromStr for Memory {
    type Err = Error;
    /// `cuda`, `cuda:N` or `host`.
    fn from_str(s: &str) -> Result<Memory> {
        let bad =
            || Error::new(Code::Inval, format!("`{s}` is not a memory; expected cuda:N or host"));
        match s.split_once(':') {
            None if s == "host" => Ok(Memory::Host),
            None if s == "cuda" => Ok(Memory::Cuda(0)),
            Some(("cuda", n)) => n.parse().map(Memory::Cuda).map_err(|_| bad()),
            _ => Err(bad()),
        }
    }
}

/// Options of a session. Start from [`Setup::new`].
#[derive(Clone, Debug)]
pub struct Setup {
    /// Metadata servers, `HOST[:PORT]`.
    pub mds: Vec<String>,
    /// File with the client key.
    pub key: PathBuf,
    /// The device.
    pub memory: Memory,
    /// Transports to the storage servers.
    pub transports: Use,
    /// The user for whom files are opened; `None`: the user and groups of the process.
    pub creds: Option<Creds>,
    /// Threads that serve the network, 1 to 64.
    pub threads: usize,
    /// Options of the bridge.
    pub options: Options,
    /// Folder in which this session publishes, for `lfs path`, what it moves of each file; `None`:
    /// it does not ([`published::folder`]).
    pub published: Option<PathBuf>,
}

impl Setup {
    /// The defaults, for a cluster whose metadata servers are given as a list separated by commas.
    pub fn new(mds: &str, memory: Memory) -> Setup {
        Setup {
            mds: mds.split(',').map(|s| s.trim().to_string()).filter(|s| !s.is_empty()).collect(),
            key: KEY.into(),
            memory,
            transports: Use::Best,
            creds: None,
            threads: 4,
            options: Options::default(),
            published: published::folder(),
        }
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>> {
        if self.mds.is_empty() {
            return Err(Error::new(Code::Inval, "no metadata server is given"));
        }
        let one = |s: &String| {
            s.parse().or_else(|e| format!("{s}:{MDS_PORT}").parse().map_err(|_: Error| e))
        };
        self.mds.iter().map(one).collect()
    }
}

/// How files are striped. Zeros are the cluster's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stripes {
    /// Number of targets of a file; -1: all.
    pub count: i32,
    /// Bytes of a stripe, a multiple of 65,536.
    pub size: u32,
}

impl Stripes {
    /// Over all targets.
    pub const ALL: Stripes = Stripes { count: -1, size: 0 };
}

impl From<Stripes> for pb::LayoutSpec {
    fn from(s: Stripes) -> pb::LayoutSpec {
        pb::LayoutSpec { stripe_count: s.count, stripe_size: s.size, ..Default::default() }
    }
}

/// Files of a cluster and memory of a device. Every call except [`Session::start`] blocks until it
/// is done; several threads may call at a time. Not to be used by tasks of a tokio runtime.
///
/// Its threads do not exist after a fork(2): in the child every call fails with `EINVAL`, and
/// dropping it does nothing.
pub struct Session {
    /// Taken on drop.
    inner: Option<Inner>,
    pid: u32,
}

struct Inner {
    /// First: its drop waits for copies.
    bridge: Bridge,
    device: Arc<dyn GpuMem>,
    host: Option<HostMem>,
    client: Client,
    creds: Creds,
    /// As for [`Setup::creds`].
    fixed: Option<Creds>,
    runtime: Runtime,
}

impl Session {
    /// Connects to the cluster and opens the device.
    ///
    /// `EINVAL` for an invalid setup, `ENODEV` (with the reason) when there is no such device, or
    /// errors of the client.
    pub fn open(setup: &Setup) -> Result<Session> {
        let none = |why: crate::Unavailable| Error::new(Code::NoDev, why.to_string());
        Session::connect(setup, || match setup.memory {
            Memory::Cuda(n) => Ok((Arc::new(Cuda::open(n).map_err(none)?) as _, None)),
            Memory::Host => {
                let host = HostMem::new();
                Ok((Arc::new(host.clone()) as _, Some(host)))
            }
        })
    }

    /// As [`Session::open`], with this device in place of the one that the setup names.
    pub fn open_on(setup: &Setup, device: Arc<dyn GpuMem>) -> Result<Session> {
        Session::connect(setup, || Ok((device, None)))
    }

    /// `device` opens it, and says which host memory it is.
    fn connect(
        setup: &Setup,
        device: impl FnOnce() -> Result<(Arc<dyn GpuMem>, Option<HostMem>)>,
    ) -> Result<Session> {
        let endpoints = setup.endpoints()?;
        if !(1..=64).contains(&setup.threads) {
            return Err(Error::new(Code::Inval, "threads must be 1 to 64"));
        }
        let key = keyfile::read_client(&setup.key)?;
        let (device, host) = device()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(setup.threads)
            .enable_all()
            .build()?;
        let (client, bridge) = runtime.block_on(async {
            let client = connect(endpoints, key, setup.transports).await?;
            let bridge =
                Bridge::open(device.clone(), Arc::new(client.clone()), setup.options.clone())
                    .await?;
            Ok::<_, Error>((client, bridge))
        })?;
        if let Some(folder) = &setup.published {
            runtime.spawn(published::publish(
                folder.clone(),
                client.fs_uuid(),
                bridge.tier_counters().clone(),
            ));
        }
        let creds = setup.creds.clone().unwrap_or_else(mine);
        let inner =
            Inner { bridge, device, host, client, creds, fixed: setup.creds.clone(), runtime };
        Ok(Session { inner: Some(inner), pid: process::id() })
    }

    fn inner(&self) -> Result<&Inner> {
        let forked = || {
            Error::new(
                Code::Inval,
                "the session was opened before a fork: open one in this process",
            )
        };
        self.inner.as_ref().filter(|_| self.pid == process::id()).ok_or_else(forked)
    }

    /// Calls the client directly, for tests.
    #[doc(hidden)]
    pub fn with_client<T>(&self, f: impl AsyncFnOnce(&Client) -> Result<T>) -> Result<T> {
        self.run(async |s| f(&s.client).await)
    }

    fn run<T>(&self, f: impl AsyncFnOnce(&Inner) -> Result<T>) -> Result<T> {
        let inner = self.inner()?;
        inner.runtime.block_on(f(inner))
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn GpuMem> {
        &self.inner.as_ref().expect("taken by drop only").device
    }

    /// The host memory of [`Memory::Host`].
    pub fn host(&self) -> Option<&HostMem> {
        self.inner.as_ref().and_then(|i| i.host.as_ref())
    }

    /// The current standing of each tier.
    pub fn tiers(&self) -> Result<Vec<TierStatus>> {
        Ok(of_bridge(&self.inner()?.bridge))
    }

    /// What could not be had as wanted, for people.
    pub fn notice(&self) -> Option<&str> {
        self.inner.as_ref().and_then(|i| i.bridge.notice())
    }

    /// Opens a file. `flags` as of open(2): access mode, O_CREAT (with `mode`), O_EXCL, O_TRUNC,
    /// O_DIRECT.
    pub fn open_file(&self, path: &str, flags: u32, mode: u32) -> Result<File> {
        self.run(async |s| s.open_file(path, flags, mode, None).await)
    }

    /// As [`Session::open_file`]; a file that is created gets these stripes.
    pub fn open_striped(
        &self,
        path: &str,
        flags: u32,
        mode: u32,
        stripes: Stripes,
    ) -> Result<File> {
        self.run(async |s| s.open_file(path, flags, mode, Some(stripes.into())).await)
    }

    /// Sets the stripes of files created in a folder from now on.
    pub fn stripe_folder(&self, path: &str, stripes: Stripes) -> Result<()> {
        self.run(async |s| {
            let ino = match path.trim_matches('/') {
                "" => s.client.root(),
                _ => match path::resolve(&s.client, &s.creds, path).await?.found {
                    Some(attr) if attr.mode & libc::S_IFMT == libc::S_IFDIR => attr.ino,
                    Some(_) => {
                        return Err(Error::new(
                            Code::NotDir,
                            format!("path '{path}' is not a folder"),
                        ));
                    }
                    None => {
                        return Err(Error::new(
                            Code::NoEnt,
                            format!("path '{path}': there is no such folder"),
                        ));
                    }
                },
            };
            s.client.layouts().set(&s.creds, ino, Some(stripes.into())).await
        })
    }

    /// Opens a regular file by its inode, as the user of the session, or else as the user that the
    /// process acts for at this moment. The metadata servers check the file's permissions, not
    /// those of the folders that lead to it. Inode ids are never reused, so it is this file or
    /// none. `flags` as of [`Session::open_file`], but nothing is created or truncated.
    pub fn open_inode(&self, ino: Ino, flags: u32) -> Result<File> {
        let flags = flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC) as u32;
        self.run(async |s| {
            let creds = s.fixed.clone().unwrap_or_else(mine);
            let (file, attr) = s.client.open(&creds, ino, flags).await?;
            if attr.mode & libc::S_IFMT != libc::S_IFREG {
                file.close().await?;
                return Err(Error::new(Code::Inval, "is not a regular file"));
            }
            Ok(file)
        })
    }

    /// The file system's UUID, 16 bytes.
    pub fn fs_uuid(&self) -> Result<Vec<u8>> {
        self.run(async |s| Ok(s.client.fs_uuid()))
    }

    /// Size of a file as currently known to the metadata servers.
    pub fn size(&self, file: &File) -> Result<u64> {
        self.run(async |s| Ok(s.client.getattr(&s.creds, file.ino()).await?.size))
    }

    /// Returns when everything written to the file is durable.
    pub fn fsync(&self, file: &File) -> Result<()> {
        self.run(async |_| file.fsync().await)
    }

    /// Closes a file. An error reports written bytes that were lost.
    pub fn close(&self, file: File) -> Result<()> {
        self.run(async |_| file.close().await)
    }

    /// Reads `len` bytes at `offset`; fewer only where the file ends.
    pub fn read(&self, file: &File, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.run(async |_| {
            let mut bytes = vec![0; len];
            let got = file.read_into(offset, &mut bytes).await?;
            bytes.truncate(got);
            Ok(bytes)
        })
    }

    /// Writes host memory to a file: all of it, or an error.
    pub fn write(&self, file: &File, offset: u64, bytes: &[u8]) -> Result<()> {
        self.run(async |_| {
            for (i, piece) in bytes.chunks(REGION).enumerate() {
                crate::FileIo::write(file, offset + (i * REGION) as u64, Buf::copy_from(piece))
                    .await?;
            }
            Ok(())
        })
    }

    /// Renames a file, atomically.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.run(async |s| s.rename(from, to).await)
    }

    /// Removes a file's name.
    pub fn unlink(&self, path: &str) -> Result<()> {
        self.run(async |s| {
            let place = path::resolve(&s.client, &s.creds, path).await?;
            s.client.unlink(&s.creds, place.parent, &place.name).await
        })
    }

    /// [`Bridge::load`].
    pub fn load(&self, all: &[Transfer], policy: Policy) -> Result<Report, Failed> {
        self.call(Direction::Load, all, policy)
    }

    /// [`Bridge::save`].
    pub fn save(&self, all: &[Transfer], policy: Policy) -> Result<Report, Failed> {
        self.call(Direction::Save, all, policy)
    }

    fn call(
        &self,
        direction: Direction,
        all: &[Transfer],
        policy: Policy,
    ) -> Result<Report, Failed> {
        let refused =
            |error| Failed { error, report: Box::new(start::nothing(direction, policy, all)) };
        let inner = self.inner().map_err(refused)?;
        inner.runtime.block_on(async {
            match direction {
                Direction::Load => inner.bridge.load(all, policy).await,
                Direction::Save => inner.bridge.save(all, policy).await,
            }
        })
    }

    /// Copies host memory to the device, for tests and small data: it is slow.
    pub fn put(&self, to: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.device().check(to, bytes.len() as u64)?;
        let mut stream = self.device().stream()?;
        // SAFETY: `bytes` are borrowed until the stream was drained below.
        let begun = unsafe { stream.load(to, bytes.as_ptr(), bytes.len()) };
        let outcome = begun.and_then(|()| stream.mark()).and_then(|mark| stream.wait(mark));
        stream.drain();
        outcome
    }

    /// Copies the device's memory to the host.
    pub fn get(&self, from: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.device().check(from, bytes.len() as u64)?;
        let mut stream = self.device().stream()?;
        // SAFETY: as in `put`, and borrowed by nobody else.
        let begun = unsafe { stream.save(bytes.as_mut_ptr(), from, bytes.len()) };
        let outcome = begun.and_then(|()| stream.mark()).and_then(|mark| stream.wait(mark));
        stream.drain();
        outcome
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if self.pid != process::id() {
            // Waiting for threads that only the parent has would never end.
            std::mem::forget(inner);
            return;
        }
        let Inner { bridge, client, runtime, .. } = inner;
        drop(bridge);
        if let Err(e) = runtime.block_on(client.close()) {
            tracing::error!("closing the session: {e}");
        }
        runtime.shutdown_timeout(Duration::from_secs(5));
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("bridge", &self.inner.as_ref().map(|i| &i.bridge)).finish()
    }
}

impl Inner {
    async fn open_file(
        &self,
        path: &str,
        flags: u32,
        mode: u32,
        layout: Option<pb::LayoutSpec>,
    ) -> Result<File> {
        let (creat, excl) = (flags & libc::O_CREAT as u32 != 0, flags & libc::O_EXCL as u32 != 0);
        let flags = flags & !(libc::O_CREAT | libc::O_EXCL) as u32;
        let place = path::resolve(&self.client, &self.creds, path).await?;
        let named = |e: Error| e.context(format!("path '{path}'"));
        let opened = match place.found {
            Some(_) if creat && excl => {
                Err(Error::new(Code::Exist, "a file of that name exists already"))
            }
            Some(attr) if attr.mode & libc::S_IFMT == libc::S_IFDIR => {
                Err(Error::new(Code::IsDir, "is a folder"))
            }
            Some(attr) if attr.mode & libc::S_IFMT != libc::S_IFREG => {
                Err(Error::new(Code::Inval, "is not a regular file"))
            }
            Some(attr) => self.client.open(&self.creds, attr.ino, flags).await,
            None if creat => {
                self.client
                    .create(&self.creds, place.parent, &place.name, mode, flags, excl, layout)
                    .await
            }
            None => Err(Error::new(Code::NoEnt, "there is no such file")),
        };
        Ok(opened.map_err(named)?.0)
    }

    async fn rename(&self, from: &str, to: &str) -> Result<()> {
        let from = path::resolve(&self.client, &self.creds, from).await?;
        let to = path::resolve(&self.client, &self.creds, to).await?;
        self.client.rename(&self.creds, (from.parent, &from.name), (to.parent, &to.name), 0).await
    }
}

async fn connect(mds: Vec<Endpoint>, key: ClientKey, transports: Use) -> Result<Client> {
    let env = Env::system();
    let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let config = strake_client::Config { hostname, ..strake_client::Config::new(mds) };
    let pool = transports.pool(Pool::default())?;
    let fabric =
        Transports::new(env.clone(), Identity::client(key), None, pool, Default::default())
            .only(transports);
    Client::connect(config, env, Arc::new(fabric)).await
}

/// The user that the process acts for.
fn mine() -> Creds {
    let groups = getgroups().unwrap_or_default().into_iter().map(|g| g.as_raw()).collect();
    Creds { uid: geteuid().as_raw(), gid: getegid().as_raw(), groups }
}
