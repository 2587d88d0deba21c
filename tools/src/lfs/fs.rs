//! What `lfs` asks of a mount: where it is, and its virtual extended attributes.

use std::path::{Path, PathBuf};

use prost::Message;
use rustix::{
    fs::{XattrFlags, getxattr, lgetxattr, lsetxattr, removexattr},
    io::Errno,
};
use strake_fuse::{table, vfs};
use strake_proto::{map::MapView, pb, seal};

use super::Failure;

/// The type of a StrakeFS mount in `/proc/self/mountinfo`.
const FS_TYPE: &str = "fuse.strake";
/// Maximum size of a cluster map in bytes.
const MAX_MAP: u64 = 64 << 20;

/// The mount points of StrakeFS, with the file system's name (the mount's source). Does not access
/// the mounts: the servers of another one may be down.
fn named_mounts() -> Result<Vec<(PathBuf, String)>, Failure> {
    let table = table::mounts()
        .map_err(|e| Failure::new(libc::EIO, format!("/proc/self/mountinfo: {e}")))?;
    Ok(table.into_iter().filter(|m| m.kind == FS_TYPE).map(|m| (m.at, m.source)).collect())
}

fn all_mounts() -> Result<Vec<PathBuf>, Failure> {
    Ok(named_mounts()?.into_iter().map(|(at, _)| at).collect())
}

/// As [`all_mounts`], but an error if there is none.
fn mounts() -> Result<Vec<PathBuf>, Failure> {
    let found = all_mounts()?;
    if found.is_empty() {
        Err(Failure::new(libc::ENODEV, "StrakeFS is not mounted here"))
    } else {
        Ok(found)
    }
}

/// The mount that a path lies in.
pub fn mount_of(path: &Path) -> Result<PathBuf, Failure> {
    let full = path.canonicalize().map_err(|e| {
        let errno = Errno::from_io_error(&e).unwrap_or(Errno::IO);
        Failure::os(format_args!("cannot find '{}'", path.display()), errno)
    })?;
    let mut found = all_mounts()?;
    found.retain(|m| full.starts_with(m));
    found.sort_by_key(|m| m.as_os_str().len());
    found.pop().ok_or_else(|| not_ours(path))
}

/// The given mount points, or those of one file system, or all.
pub fn chosen(
    paths: &[std::ffi::OsString],
    fs_name: Option<&str>,
) -> Result<Vec<PathBuf>, Failure> {
    if let (true, Some(name)) = (paths.is_empty(), fs_name) {
        return Ok(named_mounts()?
            .into_iter()
            .filter(|m| is_named(m, name))
            .map(|(at, _)| at)
            .collect());
    }
    if paths.is_empty() { mounts() } else { paths.iter().map(|p| mount_of(Path::new(p))).collect() }
}

/// The mount of the file system with this name, or the one that a path lies in.
pub fn by_name_or_path(name: &str) -> Result<PathBuf, Failure> {
    if name.contains('/') || Path::new(name).exists() {
        return mount_of(Path::new(name));
    }
    let mut found: Vec<_> =
        named_mounts()?.into_iter().filter(|m| is_named(m, name)).map(|(at, _)| at).collect();
    // A mount whose process has died stays in the table until it is unmounted. If all are such, the
    // error of the last one is returned.
    found.sort_by_key(|at| is_dead(at));
    found.into_iter().next().ok_or_else(|| {
        Failure::new(libc::ENODEV, format!("file system '{name}' is not mounted here"))
    })
}

/// Whether the process of a mount has died.
fn is_dead(at: &Path) -> bool {
    matches!(
        lgetxattr(at, "strake.name", &mut [0u8; 64][..]),
        Err(Errno::NOTCONN | Errno::CONNABORTED)
    )
}

/// Whether a mount is of the file system with this name. Only asks mounts whose source is a list of
/// servers.
fn is_named((at, source): &(PathBuf, String), name: &str) -> bool {
    source == name
        || source.contains(":/")
            && matches!(read(at, "strake.name"), Ok(Some(n)) if n == name.as_bytes())
}

fn not_ours(path: &Path) -> Failure {
    Failure::new(libc::EOPNOTSUPP, format!("'{}' is not on a StrakeFS mount", path.display()))
}

/// A virtual attribute's value; `None` if it has none. Does not follow a symlink at the end.
pub fn read(path: &Path, name: &str) -> Result<Option<Vec<u8>>, Failure> {
    read_by(path, |value| lgetxattr(path, name, value))
}

/// As [`read`], through a symlink at the end.
fn read_following(path: &Path, name: &str) -> Result<Option<Vec<u8>>, Failure> {
    read_by(path, |value| getxattr(path, name, value))
}

fn read_by(
    path: &Path,
    get: impl FnOnce(&mut [u8]) -> Result<usize, Errno>,
) -> Result<Option<Vec<u8>>, Failure> {
    let mut value = vec![0; 64 << 10];
    match get(&mut value) {
        Ok(n) => {
            value.truncate(n);
            Ok(Some(value))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(Errno::OPNOTSUPP) => Err(not_ours(path)),
        Err(e) => Err(Failure::os(format_args!("'{}'", path.display()), e)),
    }
}

fn decoded<M: Message + Default>(path: &Path, name: &str) -> Result<Option<M>, Failure> {
    let Some(bytes) = read(path, name)? else { return Ok(None) };
    let bad = |e| {
        Failure::new(
            libc::EPROTO,
            format!("'{}': the mount's answer is not understood: {e}", path.display()),
        )
    };
    M::decode(&bytes[..]).map(Some).map_err(bad)
}

/// The layout of a regular file.
pub fn layout(path: &Path) -> Result<pb::Layout, Failure> {
    decoded(path, "strake.layout")?.ok_or_else(|| not_ours(path))
}

/// A directory's own default.
pub fn default_layout(path: &Path) -> Result<Option<pb::LayoutSpec>, Failure> {
    decoded(path, "strake.layout")
}

/// The layout that a file created in the directory now would get.
pub fn effective(path: &Path) -> Result<pb::Layout, Failure> {
    decoded(path, "strake.effective")?.ok_or_else(|| not_ours(path))
}

pub fn statfs(mount: &Path) -> Result<pb::StatfsReply, Failure> {
    decoded(mount, "strake.statfs")?.ok_or_else(|| not_ours(mount))
}

/// The transports by which the mount reaches the storage servers.
pub fn transports(path: &Path) -> Result<pb::Transports, Failure> {
    let found = match decoded(path, "strake.transports")? {
        None => decoded(path, "strake.roads")?, // a mount of 0.1.0
        found => found,
    };
    found.ok_or_else(|| not_ours(path))
}

/// Sets a directory's default layout, or the layout of a file that was never written.
pub fn set_layout(path: &Path, spec: &pb::LayoutSpec) -> Result<(), Errno> {
    lsetxattr(path, "strake.spec", &spec.encode_to_vec(), XattrFlags::empty())
}

pub fn delete_default(path: &Path) -> Result<(), Errno> {
    removexattr(path, "strake.spec")
}

/// The seal of a file, `None` if it is not sealed.
pub fn seal(path: &Path) -> Result<Option<pb::SealInfo>, Failure> {
    decoded(path, "strake.seal")
}

/// The digests of the extents that a manifest covers.
pub fn digests(path: &Path, manifest: &pb::Manifest) -> Result<Vec<seal::Digest>, Failure> {
    let mut all = Vec::new();
    for number in 0..seal::pages(manifest.size) {
        let page = read(path, &format!("strake.seal.{number}"))?.unwrap_or_default();
        if page.len() != seal::digests_in(manifest.size, number) * seal::DIGEST {
            let m = format!(
                "'{}': page {number} of its manifest has {} bytes",
                path.display(),
                page.len()
            );
            return Err(Failure::new(libc::EPROTO, m));
        }
        all.extend(
            page.chunks_exact(seal::DIGEST).map(|d| seal::Digest::try_from(d).unwrap_or_default()),
        );
    }
    Ok(all)
}

/// Does one step of sealing a file. For an attribute of this name the kernel leaves the check of
/// rights to the metadata servers.
pub fn seal_step(path: &Path, id: u64, step: pb::seal::Step) -> Result<(), Errno> {
    let step = pb::Seal { ino: 0, id, step: Some(step) };
    lsetxattr(path, "system.strake.seal", &step.encode_to_vec(), XattrFlags::empty())
}

/// The FID of a path, in text.
pub fn fid(path: &Path) -> Result<String, Failure> {
    let value = read(path, "strake.fid")?.ok_or_else(|| not_ours(path))?;
    Ok(String::from_utf8_lossy(&value).into_owned())
}

/// The cluster map, assembled from its parts. If parts have different versions, it starts again.
pub fn map(mount: &Path) -> Result<MapView, Failure> {
    'again: for _ in 0..16 {
        let (mut bytes, mut version) = (Vec::new(), None);
        for number in 0.. {
            let name = format!("strake.map.{number}");
            let part = match read_following(mount, &name)? {
                Some(p) if p.len() >= vfs::MAP_HEAD => p,
                _ => return Err(not_ours(mount)),
            };
            let word =
                |at: usize| u64::from_le_bytes(part[at..at + 8].try_into().unwrap_or_default());
            let (this, whole) = (word(0), word(8));
            if whole > MAX_MAP {
                return Err(Failure::new(libc::EPROTO, format!("a cluster map of {whole} bytes")));
            }
            if *version.get_or_insert(this) != this {
                continue 'again;
            }
            bytes.extend_from_slice(&part[vfs::MAP_HEAD..]);
            if bytes.len() as u64 >= whole {
                let map = pb::ClusterMap::decode(&bytes[..]).map_err(|e| {
                    Failure::new(libc::EPROTO, format!("the cluster map is not understood: {e}"))
                })?;
                return Ok(MapView::new(map)?);
            }
            if part.len() == vfs::MAP_HEAD {
                continue 'again;
            }
        }
    }
    Err(Failure::new(libc::EAGAIN, "the cluster map changes too fast to be read; try again"))
}
