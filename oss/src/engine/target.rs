//! The folder of a target: `data` (a file, or a link to a device, or a link that names an SPDK
//! device), `table/` (the chunk table), `target.lock` (held by the process that serves it),
//! `chains` (`used.rs`) and, while it is being made, `INCOMPLETE`. Damaged tables that were
//! replaced by an empty one are kept as `table.damaged-N`.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::fs::{CWD, RenameFlags};
use strake_fabric::Pool;
use strake_proto::{ChainId, Code, Error, Result};
use strake_runtime::private;
use strake_store::{FjallStore, fjall_store};

use super::{
    api::Engine,
    folder::{Folder, at, lock, sync_dir},
    open::{empty_table, is_of_another},
    options::Options,
    superblock::{Superblock, TargetIdentity},
    table_digest::Mark,
    used::{self, Used},
};
use crate::device::{self, BLOCK, Device};

const DATA: &str = "data";
const TABLE: &str = "table";
/// The empty table that will replace a damaged one; after the swap, the damaged one until renamed.
const NEXT: &str = "table.next";
const INCOMPLETE: &str = "INCOMPLETE";

/// Where a new target stores its data.
#[derive(Clone, Debug)]
pub enum TargetLayout {
    /// A sparse file of this many bytes in the target's folder.
    File {
        /// Bytes.
        size: u64,
    },
    /// A whole block device or NVMe namespace, or an SPDK device; everything on it is lost. Refused
    /// if it seems to hold anything, unless `force`.
    BlockDevice {
        /// The device's path, or the name of an SPDK device.
        path: PathBuf,
        /// Make the target even if something is on the device.
        force: bool,
    },
}

/// Bytes at the start of a block device that must be zeros before a target is made on it: labels of
/// disks, file systems and volume managers lie here.
const LABELS: u64 = 1 << 20;
/// How long to wait for a device that is in use.
const LET_GO: Duration = Duration::from_secs(3);

/// Makes a target in a folder that is empty, absent, or holds a half-made target. `Exist`: there is
/// a target already, or the block device is not blank. The target counts as made only when all of
/// it is durable.
pub async fn create_target_dir(
    path: &Path,
    layout: TargetLayout,
    id: TargetIdentity,
) -> Result<()> {
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
            return Err(Error::new(
                Code::Exist,
                format!("{} holds a target already", path.display()),
            ));
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

/// Opens a device, and waits a moment if it is in use: the kernel releases a block device a little
/// after the last io_uring that used it ended or was killed.
pub(crate) async fn open_device(path: &Path) -> Result<Arc<dyn Device>> {
    let until = tokio::time::Instant::now() + LET_GO;
    loop {
        let opened = match device::of_spdk(path) {
            None => device::open(path),
            Some(_) => {
                let path = path.to_path_buf();
                let task = tokio::task::spawn_blocking(move || device::open(&path)).await;
                task.unwrap_or_else(|e| {
                    Err(Error::new(Code::Io, format!("opening the device: {e}")))
                })
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

/// Announces the device of a target that exists or will be made, before any is opened (see
/// [`device::spdk::announce`]).
pub fn announce_device(path: &Path, device: Option<&Path>) -> Result<()> {
    let named = device.and_then(device::of_spdk).or_else(|| device::of_spdk(&path.join(DATA)));
    named
        .map_or(Ok(()), |text| device::spdk::announce(&text).map_err(|e| e.context(path.display())))
}

/// `Exist` for a device with a target on it, or with anything where labels lie.
async fn check_blank(device: &dyn Device) -> Result<()> {
    let name = device.name();
    let how = "if all data on it may be lost, set force = true for this target, once";
    let pool = Pool::default();
    if let Ok(s) = Superblock::read(device, &pool).await {
        let (id, node) = (s.identity.target_id, s.identity.node);
        let m =
            format!("{name} has a StrakeFS target on it already (target {id} of '{node}'); {how}");
        return Err(Error::new(Code::Exist, m));
    }
    let len = device.capacity().min(LABELS);
    if len < BLOCK {
        return Ok(()); // too small in any case
    }
    let start = device.read(0, pool.get_now(len as usize)).await?;
    match start.iter().position(|b| *b != 0) {
        Some(at) => Err(Error::new(
            Code::Exist,
            format!("{name} is not blank (byte {at} is not zero); {how}"),
        )),
        None => Ok(()),
    }
}

/// The result of opening a target's folder.
pub enum Opened {
    /// The target can be served.
    Whole(Arc<Engine>),
    /// The target cannot be served as it is.
    Damaged(Damaged),
}

impl Opened {
    /// The engine, or the damage as an error.
    pub fn whole(self) -> Result<Arc<Engine>> {
        match self {
            Opened::Whole(engine) => Ok(engine),
            Opened::Damaged(d) => Err(d.why),
        }
    }
}

/// A target that cannot be served as it is. Its folder stays locked as long as this lives.
pub struct Damaged {
    /// The target's folder.
    pub path: PathBuf,
    /// What is damaged.
    pub why: Error,
    /// The target's identity, if its device could be read.
    pub id: Option<TargetIdentity>,
    /// Only the table is damaged, and it is not another target's: [`Damaged::empty`] is possible.
    pub table_only: bool,
    /// The chains that ever stored something here, if known.
    pub used: Option<BTreeSet<ChainId>>,
    lock: File,
}

/// Opens a target and locks its folder for as long as the engine lives. `fs_uuid`: the cluster that
/// the target must belong to, if it belongs to one. `NoEnt`: there is no target here, or a part is
/// missing. `Busy`: another process serves it. `Perm`: it belongs to another cluster.
pub async fn open_target_dir(
    path: &Path,
    fs_uuid: Option<[u8; 16]>,
    pool: Pool,
    options: Options,
) -> Result<Opened> {
    if !path.is_dir() {
        return Err(Error::new(
            Code::NoEnt,
            format!("{}: no such target folder; create the target first", path.display()),
        ));
    }
    let lock = lock(path)?;
    private::mend_all(path);
    if path.join(INCOMPLETE).exists() {
        let m = format!("{} is only partly created; create the target again", path.display());
        return Err(Error::new(Code::NoEnt, m));
    }
    for part in [DATA, TABLE] {
        let at = path.join(part);
        let is_there = at.exists() && !is_empty_dir(&at);
        if !is_there && device::of_spdk(&at).is_none() {
            let m = format!(
                "{}: {part} is missing; if the target is new, create it; otherwise mount or \
                 restore what is missing, or format the target and resync it",
                path.display()
            );
            return Err(Error::new(Code::NoEnt, m));
        }
    }
    open_locked(path, lock, fs_uuid, pool, options).await
}

/// Whether it is an empty folder, like a mount point whose file system is not mounted.
fn is_empty_dir(path: &Path) -> bool {
    path.read_dir().is_ok_and(|mut entries| entries.next().is_none())
}

async fn open_locked(
    path: &Path,
    lock: File,
    fs_uuid: Option<[u8; 16]>,
    pool: Pool,
    options: Options,
) -> Result<Opened> {
    let held = lock.try_clone().map_err(|e| at(path, e))?;
    let damaged = |why: Error, id: Option<TargetIdentity>, table_only| {
        let why = why.context(path.display());
        let used = id.as_ref().and_then(|id| used::read(path, &id.target_uuid));
        Ok(Opened::Damaged(Damaged {
            path: path.to_path_buf(),
            why,
            id,
            table_only,
            used,
            lock: held,
        }))
    };
    let is_damage = |e: &Error| matches!(e.code, Code::Corrupt | Code::Io);
    let device = match open_device(&path.join(DATA)).await {
        Err(e) if is_damage(&e) => return damaged(e, None, false),
        other => other?,
    };
    let id = match Superblock::read(&*device, &pool).await {
        Err(e) if is_damage(&e) => return damaged(e, None, false),
        other => other?.identity,
    };
    if let Some(want) = fs_uuid.filter(|want| id.fs_uuid != [0; 16] && id.fs_uuid != *want) {
        let (path, found, want) = (path.display(), hex::encode(id.fs_uuid), hex::encode(want));
        return Err(Error::new(
            Code::Perm,
            format!("{path} belongs to another cluster ({found}, not {want})"),
        ));
    }
    let store = fjall_store::Options { cache_bytes: options.store_cache, ..Default::default() };
    let table = match FjallStore::open_with(path.join(TABLE), &store) {
        Ok(table) => Arc::new(table),
        // `NoEnt` if one of the store's own files is missing.
        Err(e) if matches!(e.code, Code::Corrupt | Code::NoEnt) => {
            return damaged(e, Some(id), true);
        }
        // The disk may recover; or the store is newer, or a bit of its one format byte flipped:
        // nothing tells which.
        Err(e) if matches!(e.code, Code::Io | Code::OpNotSupp) => {
            return damaged(e, Some(id), false);
        }
        Err(e) => return Err(e),
    };
    let own = !is_of_another(&*table, &id.target_uuid);
    let options = Options { offload_store: true, ..options };
    let folder = Folder { path: path.to_path_buf(), lock };
    match Engine::open_locked(device, table, pool, options, Some(folder)).await {
        Err(e) if is_damage(&e) => {
            let table_only = own && e.code == Code::Corrupt;
            damaged(e, Some(id), table_only)
        }
        other => Ok(Opened::Whole(other?)),
    }
}

impl Engine {
    /// The target's folder, if it is in one.
    pub fn path(&self) -> Option<PathBuf> {
        self.shared.folder.as_ref().map(|f| f.path.clone())
    }

    /// The target as a damaged one: for a target in service whose table cannot be read. This engine
    /// is to be dropped.
    pub fn as_damaged(&self, why: Error) -> Option<Damaged> {
        let Folder { path, lock } = self.shared.folder.as_ref()?;
        let (path, lock) = (path.clone(), lock.try_clone().ok()?);
        Some(Damaged {
            path,
            why,
            id: Some(self.identity()),
            table_only: true,
            used: self.used(),
            lock,
        })
    }

    /// The chains that ever stored something here, if the target is in a folder.
    pub fn used(&self) -> Option<BTreeSet<ChainId>> {
        self.shared.used.as_ref().map(Used::chains)
    }
}

impl Damaged {
    /// Replaces the damaged table with an empty one and opens the target, which then holds nothing,
    /// under the same identity. Use it only if nothing on the target is needed any more. The
    /// damaged table is kept; also returns its new path.
    pub async fn empty(&self, pool: Pool, options: Options) -> Result<(Arc<Engine>, PathBuf)> {
        let (table, next) = (self.path.join(TABLE), self.path.join(NEXT));
        let id = self.id.as_ref().filter(|_| self.table_only).ok_or_else(|| self.why.clone())?;
        if !table.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            let m =
                format!("{} is a link: the folder it points to is not replaced", table.display());
            return Err(Error::new(Code::OpNotSupp, m));
        }
        // fjall finds its files by name: an open store would continue in the empty one.
        if FjallStore::is_open(&table) {
            return Err(Error::new(Code::Busy, format!("{} is still in use", table.display())));
        }
        if next.exists() {
            self.keep(&next)?; // left by an interrupted attempt: perhaps the damaged one
        }
        {
            let device = open_device(&self.path.join(DATA)).await?;
            let known = Mark::read(&*device, &pool, id.target_uuid).await;
            empty_table(&FjallStore::open(&next)?, &id.target_uuid, known)?;
        }
        sync_dir(&self.path)?;
        rustix::fs::renameat_with(CWD, &next, CWD, &table, RenameFlags::EXCHANGE)
            .map_err(|e| at(&table, e.into()))?;
        sync_dir(&self.path)?;
        let kept = self.keep(&next)?;
        let lock = self.lock.try_clone().map_err(|e| at(&self.path, e))?;
        let engine =
            open_locked(&self.path, lock, Some(id.fs_uuid), pool, options).await?.whole()?;
        Ok((engine, kept))
    }

    /// Renames a table that is no longer used.
    fn keep(&self, table: &Path) -> Result<PathBuf> {
        let free =
            (1u32..).map(|n| self.path.join(format!("{TABLE}.damaged-{n}"))).find(|p| !p.exists());
        let to =
            free.ok_or_else(|| Error::new(Code::Exist, "too many damaged tables are kept here"))?;
        fs::rename(table, &to).map_err(|e| at(table, e))?;
        sync_dir(&self.path)?;
        Ok(to)
    }
}
