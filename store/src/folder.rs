//! Folders of servers.

use std::{fs, io::ErrorKind, path::Path};

use strake_proto::{Code, Error, Result};

/// Whether a folder cannot be synced at all: it is not ours, or of a file system that has nothing
/// to sync, as below a mount point.
fn may_not(e: ErrorKind) -> bool {
    matches!(
        e,
        ErrorKind::PermissionDenied
            | ErrorKind::InvalidInput
            | ErrorKind::Unsupported
            | ErrorKind::ReadOnlyFilesystem
    )
}

/// Makes a server's folder if it is absent, but none above it: a missing one is more often a disk
/// that is not mounted. Its name is durable then: what a server says it has stored must not vanish
/// with the folder when the power goes.
pub fn make_folder(path: &Path) -> Result<()> {
    let above = match path.parent() {
        Some(p) if p != Path::new("") => p,
        _ => Path::new("."),
    };
    let sync = || fs::File::open(above).and_then(|d| d.sync_all());
    let made = match fs::create_dir(path) {
        // It may be what a start that was cut short made and did not sync; an administrator's need
        // not be ours to sync.
        Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => {
            sync().or_else(|e| if may_not(e.kind()) { Ok(()) } else { Err(e) })
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let above = above.display();
            let m = format!(
                "{}: the folder {above} does not exist; mount its disk, or make it",
                path.display()
            );
            return Err(Error::new(Code::NoEnt, m));
        }
        made => made.and_then(|()| sync()),
    };
    made.map_err(|e| Error::from(e).context(path.display()))
}
