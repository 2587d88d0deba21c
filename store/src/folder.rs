//! Folders of servers.

use std::{fs, io::ErrorKind, path::Path};

use strake_proto::{Code, Error, Result};

/// Whether the error means that a folder cannot be synced at all: it belongs to another user, or
/// its file system has nothing to sync (as above a mount point).
fn may_not(e: ErrorKind) -> bool {
    matches!(
        e,
        ErrorKind::PermissionDenied
            | ErrorKind::InvalidInput
            | ErrorKind::Unsupported
            | ErrorKind::ReadOnlyFilesystem
    )
}

/// Makes a server's folder if it is absent, but not its parent: a missing parent is more often a
/// disk that is not mounted. Afterwards the folder's name is durable, so that acknowledged data
/// does not vanish with the folder when power is lost.
pub fn make_folder(path: &Path) -> Result<()> {
    let above = match path.parent() {
        Some(p) if p != Path::new("") => p,
        _ => Path::new("."),
    };
    let sync = || fs::File::open(above).and_then(|d| d.sync_all());
    let made = match fs::create_dir(path) {
        // The folder may come from an interrupted start that did not sync it. One made by an
        // administrator need not be ours to sync.
        Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => {
            sync().or_else(|e| if may_not(e.kind()) { Ok(()) } else { Err(e) })
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let above = above.display();
            let m = format!(
                "{}: the folder {above} does not exist; mount its disk, or create it",
                path.display()
            );
            return Err(Error::new(Code::NoEnt, m));
        }
        made => made.and_then(|()| sync()),
    };
    made.map_err(|e| Error::from(e).context(path.display()))
}
