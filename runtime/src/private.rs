//! Files and folders that only their owner may read, whatever umask a process was started under.

use std::{fs, io, os::unix::fs::PermissionsExt, path::Path};

use rustix::{fs::Mode, process};

/// What others may do: nothing.
const OTHERS: u32 = 0o077;

/// Makes files that this process creates from now on accessible to their owner only. Returns the
/// previous umask.
pub fn umask() -> Mode {
    process::umask(Mode::from_raw_mode(OTHERS))
}

/// Runs `f` under another umask, and then restores the previous one. The umask belongs to the whole
/// process, so this must run before it has threads.
pub fn under<T>(mask: Mode, f: impl FnOnce() -> T) -> T {
    let before = process::umask(mask);
    let done = f();
    process::umask(before);
    done
}

/// Creates a folder, or takes an existing one, and makes it accessible to its owner only.
/// `passage`: others may pass through it by name.
pub fn folder(path: &Path, passage: bool) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        made => made?,
    }
    let mode = if passage { 0o711 } else { 0o700 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Removes the rights of others from a file or folder. Returns whether there were any. Leaves
/// symbolic links alone: their targets are not ours.
pub fn mend(path: &Path) -> io::Result<bool> {
    let had = path.symlink_metadata()?;
    let mode = had.permissions().mode();
    if !(had.is_file() || had.is_dir()) || mode & OTHERS == 0 {
        return Ok(false);
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777 & !OTHERS))?;
    Ok(true)
}

/// [`mend`] for a server's folder and everything in it. Writes one line to the log if anything had
/// to be changed. Names and skips what cannot be changed.
pub fn mend_all(folder: &Path) {
    let (mut mended, mut failed) = (0_u64, None);
    walk(folder, &mut |path| match mend(path) {
        Ok(done) => mended += u64::from(done),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => failed = failed.take().or(Some((path.to_path_buf(), e))),
    });
    if mended > 0 {
        let at = folder.display();
        tracing::warn!(
            "{at}: other users could read or reach {mended} files and folders; now only the owner \
             can"
        );
    }
    if let Some((path, e)) = failed {
        let at = path.display();
        tracing::warn!(
            "{at}: other users may read it, and this process could not change that: {e}; run \
             chmod go= on it as its owner"
        );
    }
}

/// Visits the folder and its contents. The folder comes first, so that others lose access before
/// its contents are visited.
fn walk(path: &Path, see: &mut impl FnMut(&Path)) {
    see(path);
    if !path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
        return;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        walk(&entry.path(), see);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn what_others_could_read_is_mended_and_links_are_not_followed() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let set = |p: &Path, m| fs::set_permissions(p, fs::Permissions::from_mode(m)).unwrap();
        let (sub, file, kept) =
            (dir.path().join("sub"), dir.path().join("sub/f"), other.path().join("theirs"));
        fs::create_dir(&sub).unwrap();
        for f in [&file, &kept] {
            fs::write(f, "x").unwrap();
            set(f, 0o666);
        }
        std::os::unix::fs::symlink(&kept, dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink(other.path(), dir.path().join("away")).unwrap();
        set(&sub, 0o777);
        set(dir.path(), 0o755);
        set(other.path(), 0o755);
        mend_all(dir.path());
        assert_eq!([mode(dir.path()), mode(&sub), mode(&file)], [0o700, 0o700, 0o600]);
        assert_eq!([mode(other.path()), mode(&kept)], [0o755, 0o666]);
        assert!(!mend(&file).unwrap(), "nothing is left to do");
        assert!(mend(&dir.path().join("gone")).is_err());
    }

    #[test]
    fn folders_are_private_or_a_passage() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("a");
        for (passage, want) in [(false, 0o700), (true, 0o711), (false, 0o700)] {
            folder(&at, passage).unwrap();
            assert_eq!(mode(&at), want);
        }
        assert!(folder(&dir.path().join("b/c"), false).is_err(), "none above it is made");
    }
}
