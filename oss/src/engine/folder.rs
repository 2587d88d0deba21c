//! The locked folder of a target.

use std::{
    fs::{File, OpenOptions, TryLockError},
    path::{Path, PathBuf},
};

use strake_proto::{Code, Error, Result};

const LOCK: &str = "target.lock";

/// The folder of a target, locked.
pub(super) struct Folder {
    pub path: PathBuf,
    pub lock: File,
}

/// An error with the path it is about.
pub(super) fn at(path: &Path, e: std::io::Error) -> Error {
    Error::from(e).context(path.display())
}

/// Locks a target's folder until the file and its clones are closed. `Busy`: another process serves
/// the target.
pub(super) fn lock(path: &Path) -> Result<File> {
    let name = path.join(LOCK);
    let open = OpenOptions::new().create(true).truncate(false).write(true).open(&name);
    let file = open.map_err(|e| at(&name, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::new(
            Code::Busy,
            format!("{}: another process serves this target", path.display()),
        )),
        Err(TryLockError::Error(e)) => Err(at(&name, e)),
    }
}

/// Makes names in a folder durable.
pub(super) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|d| d.sync_all()).map_err(|e| at(path, e))
}
