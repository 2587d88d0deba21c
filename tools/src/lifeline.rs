//! How a mount that replaces a killed one tells the metadata servers about it, instead of waiting
//! until the old session expires.
//!
//! Each mount keeps a file with its client's uuid, locked as long as the process lives. If the file
//! can be locked, its owner is dead: the next mount of the same cluster sends that uuid when it
//! opens its session.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use strake_proto::{Code, Error, Result};
use strake_runtime::private;

/// Sessions expire by themselves within a minute, so older files are useless.
const STALE: Duration = Duration::from_secs(3600);
/// The maximum that one session may name.
const MAX_DEAD: usize = 64;

/// The default folder of the files: root's, or else the user's; none where neither exists.
pub fn default_folder() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/run/strake".into());
    }
    std::env::var_os("XDG_RUNTIME_DIR").map(|d| Path::new(&d).join("strake"))
}

/// The file of this process, which is removed with it.
pub struct Lifeline {
    _locked: File,
    path: PathBuf,
    /// Dead clients of this machine and cluster.
    pub dead: Vec<[u8; 16]>,
    files: Vec<PathBuf>,
}

impl Lifeline {
    /// Announces this process as the client `uuid` of the cluster at `mds`, and looks for dead
    /// clients.
    pub fn start(folder: &Path, mds: &[String], uuid: [u8; 16]) -> Result<Lifeline> {
        let failed =
            |e: std::io::Error| Error::from(e).context(format_args!("{}", folder.display()));
        fs::create_dir_all(folder).map_err(failed)?;
        // A folder that the configuration names may be used for other things, too.
        if default_folder().as_deref() == Some(folder) {
            make_private(folder);
        }
        let cluster = mds.join(",");
        let (dead, files) = look(folder, &cluster).map_err(failed)?;
        let name = hex::encode(uuid);
        // Hidden under another name until it is locked and complete.
        let hidden = folder.join(format!(".{name}"));
        let path = folder.join(format!("{name}.client"));
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&hidden)
            .map_err(failed)?;
        file.try_lock().map_err(|_| {
            Error::new(Code::Busy, format!("{}: locked by another process", hidden.display()))
        })?;
        file.write_all(format!("{name} {cluster}\n").as_bytes()).map_err(failed)?;
        fs::rename(&hidden, &path).map_err(failed)?;
        Ok(Lifeline { _locked: file, path, dead, files })
    }

    /// The metadata servers know about the dead clients: removes their files.
    pub fn told(&mut self) {
        for f in self.files.drain(..) {
            let _ = fs::remove_file(f);
        }
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Closes a file that an older version left readable to everybody.
fn make_private(path: &Path) {
    if private::mend(path).is_ok_and(|changed| changed) {
        tracing::warn!("{}: other users could read it; now only its owner can", path.display());
    }
}

/// The dead clients of a cluster and their files. Removes unlocked files that are invalid, or old
/// and of another cluster.
fn look(folder: &Path, cluster: &str) -> std::io::Result<(Vec<[u8; 16]>, Vec<PathBuf>)> {
    let (mut dead, mut files) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "client") || dead.len() == MAX_DEAD {
            continue;
        }
        // Gone in the meantime, or not readable for us: leave it alone.
        let Ok(file) = File::open(&path) else { continue };
        make_private(&path);
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => continue,
            Err(TryLockError::Error(e)) => return Err(e),
        }
        let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
        let text = fs::read_to_string(&path).unwrap_or_default();
        match parse(&text) {
            Some((uuid, of)) if of == cluster => {
                dead.push(uuid);
                files.push(path);
            }
            Some(_) if age < STALE => {}
            _ => drop(fs::remove_file(&path)),
        }
    }
    Ok((dead, files))
}

fn parse(text: &str) -> Option<([u8; 16], &str)> {
    let (uuid, cluster) = text.strip_suffix('\n')?.split_once(' ')?;
    let number = u128::from_str_radix(uuid, 16).ok().filter(|_| uuid.len() == 32)?;
    Some((number.to_be_bytes(), cluster))
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn only_the_dead_of_the_same_cluster_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (vec!["a:1".to_string(), "b:1".to_string()], vec!["c:1".to_string()]);
        let alive = Lifeline::start(dir.path(), &a, [1; 16]).unwrap();
        assert!(alive.dead.is_empty());
        let second = Lifeline::start(dir.path(), &a, [2; 16]).unwrap();
        assert!(second.dead.is_empty(), "the first one lives");
        // Killed processes leave their files and no locks.
        fs::write(dir.path().join("x.client"), format!("{} a:1,b:1\n", hex::encode([3; 16])))
            .unwrap();
        fs::write(dir.path().join("y.client"), format!("{} c:1\n", hex::encode([4; 16]))).unwrap();
        fs::write(dir.path().join("z.client"), "nonsense").unwrap();
        for f in ["x.client", "y.client"] {
            fs::set_permissions(dir.path().join(f), Permissions::from_mode(0o644)).unwrap();
        }
        let mut third = Lifeline::start(dir.path(), &a, [5; 16]).unwrap();
        assert_eq!(third.dead, vec![[3; 16]]);
        assert!(!dir.path().join("z.client").exists() && dir.path().join("x.client").exists());
        assert_eq!(Lifeline::start(dir.path(), &b, [6; 16]).unwrap().dead, vec![[4; 16]]);
        for entry in fs::read_dir(dir.path()).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(
                entry.metadata().unwrap().permissions().mode() & 0o077,
                0,
                "{:?}",
                entry.file_name()
            );
        }
        third.told();
        assert!(!dir.path().join("x.client").exists());
        drop((alive, second, third));
        assert!(Lifeline::start(dir.path(), &a, [7; 16]).unwrap().dead.is_empty());
    }
}
