//! A mount whose root is a folder of the file system: the kernel's root number stands for that
//! folder, and nothing outside of it can be reached. The kernel names only inodes that it was told
//! of, except for "." and "..", with which it finds an inode by a file handle: any user with the
//! right to open handles may forge one.

use strake_client::Client;
use strake_proto::{Code, Error, Ino, Result, ids::ROOT_INO, pb};

use super::types::{Caller, stale};

/// The folder at `path` (plain, from the root), looked up with these credentials. `ENOENT`,
/// `ENOTDIR`, `EACCES`; symbolic links are not followed.
pub async fn find_subtree(client: &Client, creds: &pb::Creds, path: &str) -> Result<Ino> {
    let mut at = client.root();
    for name in path.split('/').filter(|n| !n.is_empty()) {
        let found = client.lookup(creds, at, name.as_bytes()).await;
        let attr = found.map_err(|e| match e.code {
            Code::NoEnt => Error::new(
                Code::NoEnt,
                format!("subtree {path}: there is no '{name}' in the file system"),
            ),
            _ => e.context(format!("subtree {path}: '{name}'")),
        })?;
        let what = match attr.mode & libc::S_IFMT {
            libc::S_IFDIR => {
                at = attr.ino;
                continue;
            }
            libc::S_IFLNK => "it is a symbolic link; these are not followed",
            _ => "not a folder",
        };
        return Err(Error::new(Code::NotDir, format!("subtree {path}: '{name}' is {what}")));
    }
    Ok(at)
}

/// The inode that the kernel knows as the root.
#[derive(Clone, Copy)]
pub(super) struct Root(Ino);

impl Root {
    pub fn new(ino: Ino) -> Root {
        Root(ino)
    }

    pub fn ino(self) -> Ino {
        self.0
    }

    /// The inode that the kernel means by a number.
    pub fn inner(self, node: Ino) -> Ino {
        if node == ROOT_INO { self.0 } else { node }
    }

    /// The number by which the kernel knows an inode.
    pub fn node(self, ino: Ino) -> Ino {
        if ino == self.0 { ROOT_INO } else { ino }
    }

    /// Attributes with the inode number that the kernel uses.
    pub fn outer(self, attr: pb::Attr) -> pb::Attr {
        pb::Attr { ino: self.node(attr.ino), ..attr }
    }

    fn is_subtree(self) -> bool {
        self.0 != ROOT_INO
    }
}

/// "." or "..", by which the kernel looks up an inode that came by handle (open_by_handle_at(2),
/// NFS) and that it does not know. An inode need not be a directory to be its own ".". `ESTALE`,
/// also for inodes outside of the mount's root.
pub(super) async fn lookup_handle(
    client: &Client,
    root: Root,
    caller: Caller<'_>,
    ino: Ino,
    name: &[u8],
) -> Result<pb::Attr> {
    let found = if name == b"." || ino == root.ino() {
        client.getattr(&pb::Creds::default(), ino).await
    } else {
        client.lookup(&caller.creds(), ino, name).await
    };
    let found = root.outer(found.map_err(stale)?);
    if found.nlink == 0 && !client.is_open(ino) {
        return Err(Error::new(Code::Stale, "the file was removed"));
    }
    if root.is_subtree() {
        path_within(client, root, root.inner(found.ino)).await.map_err(stale)?;
    }
    Ok(found)
}

/// The path of an inode from the mount's root. If it lies outside: `ENOENT` by FID, `ESTALE` by
/// handle.
pub(super) async fn path_within(client: &Client, root: Root, ino: Ino) -> Result<Vec<u8>> {
    // Without the caller's credentials: this only tells whether the inode is inside.
    let nobody = pb::Creds::default();
    let path = client.path_of(&nobody, ino).await?;
    if !root.is_subtree() {
        return Ok(path);
    }
    let base = client.path_of(&nobody, root.ino()).await?;
    below(&base, &path)
        .ok_or_else(|| Error::new(Code::Stale, "it is outside of the mounted folder"))
}

/// `path` seen from `base`; `None` when it is not below it.
fn below(base: &[u8], path: &[u8]) -> Option<Vec<u8>> {
    let rest = path.strip_prefix(base)?;
    match rest {
        [] => Some(b"/".to_vec()),
        [b'/', ..] => Some(rest.to_vec()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_from_a_folder() {
        let of = |base: &str, path: &str| {
            below(base.as_bytes(), path.as_bytes()).map(|p| String::from_utf8(p).unwrap())
        };
        assert_eq!(of("/a/b", "/a/b/c/d").as_deref(), Some("/c/d"));
        assert_eq!(of("/a/b", "/a/b").as_deref(), Some("/"));
        for outside in ["/a/bc", "/a", "/", "/x/a/b"] {
            assert_eq!(of("/a/b", outside), None, "{outside}");
        }
    }
}
