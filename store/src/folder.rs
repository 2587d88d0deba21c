//! Folders of servers.

use std::{fs, io::ErrorKind, path::Path};

use strake_proto::{Code, Error, Result};

/// Makes a server's folder if it is absent, but none above it: a missing one is more often a disk that is not mounted.
pub fn make_folder(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let above = path.parent().unwrap_or(path).display();
            let m = format!("{}: the folder {above} does not exist; mount its disk, or make it", path.display());
            Err(Error::new(Code::NoEnt, m))
        }
        r => r.map_err(|e| Error::from(e).context(path.display())),
    }
}
