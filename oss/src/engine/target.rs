//! The folder of a target: `data` (a file, or a link to a device, or one that says which device of SPDK), `table/` (the chunk table), `target.lock` (held
//! by the process that serves it) and, while it is being made, `INCOMPLETE`.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use strake_fabric::Pool;
use strake_proto::{Code, Error, Result};
use strake_store::FjallStore;

use super::{Engine, Options, TargetIdentity, superblock::Superblock};
use crate::device::{self, BLOCK, Device};

const DATA: &str = "data";
const TABLE: &str = "table";
const LOCK: &str = "target.lock";
const INCOMPLETE: &str = "INCOMPLETE";

/// Where a new target's bytes go.
#[derive(Clone, Debug)]
pub enum TargetLayout {
    /// A sparse file of this many bytes in the target's folder.
    File { size: u64 },
    /// A whole block device or NVMe namespace, or one of SPDK's; everything on it is lost. Refused if there seems to be anything,
    /// unless `force`.
    BlockDevice { path: PathBuf, force: bool },
}

fn at(path: &Path, e: std::io::Error) -> Error {
    Error::from(e).context(path.display())
}

/// Beginning of a block device that must be zeros before a target is made on it: labels of disks, file systems and volume
/// managers lie here.
const LABELS: u64 = 1 << 20;
/// How long a device that is in use is waited for.
const LET_GO: Duration = Duration::from_secs(3);

/// Makes a target in a folder that is empty, absent, or holds one that was left half made. `Exist`: there is one already, or
/// something is on the block device. Nothing counts until all of it is durable.
pub async fn create_target_dir(path: &Path, layout: TargetLayout, id: TargetIdentity) -> Result<()> {
    strake_store::make_folder(path)?;
    let _lock = lock(path)?;
    let (data, table, marker) = (path.join(DATA), path.join(TABLE), path.join(INCOMPLETE));
    let mut device = None;
    if let TargetLayout::BlockDevice { path, force } = &layout {
        let d = open_device(path).await?;
        if !force {
            check_blank(&*d).await?;
        }
        device = Some(d);
    }
    if !marker.exists() {
        if data.symlink_metadata().is_ok() || table.exists() {
            return Err(Error::new(Code::Exist, format!("{} holds a target already", path.display())));
        }
        File::create(&marker).and_then(|f| f.sync_all()).map_err(|e| at(&marker, e))?;
        sync_dir(path)?;
    }
    if data.symlink_metadata().is_ok() {
        fs::remove_file(&data).map_err(|e| at(&data, e))?;
    }
    match layout {
        TargetLayout::File { size } => {
            let make = |f: File| f.set_len(size).and_then(|()| f.sync_all());
            File::create_new(&data).and_then(make).map_err(|e| at(&data, e))?;
        }
        TargetLayout::BlockDevice { path, .. } => {
            std::os::unix::fs::symlink(&path, &data).map_err(|e| at(&data, e))?;
        }
    }
    let device = match device {
        Some(d) => d,
        None => open_device(&data).await?,
    };
    let store = FjallStore::open(&table)?;
    Engine::format(&*device, &store, id).await?;
    drop(store);
    sync_dir(path)?;
    fs::remove_file(&marker).map_err(|e| at(&marker, e))?;
    sync_dir(path)
}

/// The kernel lets go of a block device a moment after the io_uring that used it last ended, or was killed.
pub(crate) async fn open_device(path: &Path) -> Result<Arc<dyn Device>> {
    let until = tokio::time::Instant::now() + LET_GO;
    loop {
        let opened = match device::of_spdk(path) {
            None => device::open(path),
            Some(_) => {
                let path = path.to_path_buf();
                let task = tokio::task::spawn_blocking(move || device::open(&path)).await;
                task.unwrap_or_else(|e| Err(Error::new(Code::Io, format!("opening the device: {e}"))))
            }
        };
        match opened {
            Err(e) if e.code == Code::Busy && tokio::time::Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            other => return other,
        }
    }
}

/// Tells the devices of what a target is on, or is to be made on, before any is opened (see [`device::spdk::announce`]).
pub fn announce_device(path: &Path, device: Option<&Path>) -> Result<()> {
    let named = device.and_then(device::of_spdk).or_else(|| device::of_spdk(&path.join(DATA)));
    named.map_or(Ok(()), |text| device::spdk::announce(&text).map_err(|e| e.context(path.display())))
}

/// `Exist` for a device with a target on it, or with anything where labels lie.
async fn check_blank(device: &dyn Device) -> Result<()> {
    let name = device.name();
    let how = "if all that is on it may be lost, set force = true for this target, once";
    let pool = Pool::default();
    if let Ok(s) = Superblock::read(device, &pool).await {
        let (id, node) = (s.identity.target_id, s.identity.node);
        let m = format!("{name} has a StrakeFS target on it already (target {id} of '{node}'); {how}");
        return Err(Error::new(Code::Exist, m));
    }
    let len = device.capacity().min(LABELS);
    if len < BLOCK {
        return Ok(()); // too small in any case
    }
    let start = device.read(0, pool.get_now(len as usize)).await?;
    match start.iter().position(|b| *b != 0) {
        Some(at) => Err(Error::new(Code::Exist, format!("{name} is not blank (byte {at} is not zero); {how}"))),
        None => Ok(()),
    }
}

/// Opens a target and locks its folder for as long as the engine lives. `fs_uuid`: the cluster it must belong to, if it
/// belongs to one. `NoEnt`: there is no target here, or a part is missing. `Busy`: another process serves it.
pub async fn open_target_dir(
    path: &Path,
    fs_uuid: Option<[u8; 16]>,
    pool: Pool,
    options: Options,
) -> Result<Arc<Engine>> {
    if !path.is_dir() {
        return Err(Error::new(
            Code::NoEnt,
            format!("{}: no such target folder; create the target first", path.display()),
        ));
    }
    let lock = lock(path)?;
    if path.join(INCOMPLETE).exists() {
        let m = format!("{} was left half made; create the target again", path.display());
        return Err(Error::new(Code::NoEnt, m));
    }
    for part in [DATA, TABLE] {
        let at = path.join(part);
        if !at.exists() && device::of_spdk(&at).is_none() {
            let m = format!(
                "{}: {part} is missing; if the target is new create it, else mount or restore what is missing, or \
                 format the target and resync it",
                path.display()
            );
            return Err(Error::new(Code::NoEnt, m));
        }
    }
    let device = open_device(&path.join(DATA)).await?;
    let table = Arc::new(FjallStore::open(path.join(TABLE))?);
    let options = Options { offload_store: true, ..options };
    let engine = Engine::open_locked(device, table, pool, options, Some(lock)).await?;
    let found = engine.identity().fs_uuid;
    match fs_uuid {
        Some(want) if found != [0; 16] && found != want => {
            let m = format!("{} belongs to another cluster ({}, not {})", path.display(), uuid(&found), uuid(&want));
            Err(Error::new(Code::Perm, m))
        }
        _ => Ok(engine),
    }
}

fn uuid(b: &[u8; 16]) -> String {
    b.iter().map(|x| format!("{x:02x}")).collect()
}

fn lock(path: &Path) -> Result<File> {
    let name = path.join(LOCK);
    let open = OpenOptions::new().create(true).truncate(false).write(true).open(&name);
    let file = open.map_err(|e| at(&name, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Error::new(Code::Busy, format!("{}: another process serves this target", path.display())))
        }
        Err(TryLockError::Error(e)) => Err(at(&name, e)),
    }
}

fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|d| d.sync_all()).map_err(|e| at(path, e))
}
