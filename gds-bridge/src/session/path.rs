//! Resolves a path to an inode as a kernel would, by the metadata servers.

use strake_client::{Attr, Client, Creds};
use strake_proto::{Code, Error, Ino, Result};

/// Symbolic links that are followed in one path, as in Linux.
const LINKS: u32 = 40;
/// Longest path of Linux, bytes.
const LONGEST: usize = 4095;

/// The result of resolving a path.
pub struct Place {
    /// The folder that contains the last name.
    pub parent: Ino,
    /// The last name; that of a symbolic link only if the link leads nowhere.
    pub name: Vec<u8>,
    /// The inode with that name, if it exists.
    pub found: Option<Attr>,
}

fn is(attr: &Attr, kind: u32) -> bool {
    attr.mode & libc::S_IFMT == kind
}

/// Resolves a path from the root of the file system (a leading `/` changes nothing). Symbolic links
/// are followed, including the last one.
///
/// `EINVAL` for a path without a name or a link to an absolute path, whose place in the file system
/// is not known here; `ELOOP`; `ENOTDIR`; `ENOENT` for a missing folder; `EACCES`.
pub async fn resolve(client: &Client, creds: &Creds, path: &str) -> Result<Place> {
    let what = |code: Code, m: &str| Error::new(code, format!("path '{path}': {m}"));
    if path.len() > LONGEST {
        return Err(what(Code::NameTooLong, "is longer than a path can be"));
    }
    let names = |p: &[u8]| -> Vec<Vec<u8>> {
        let plain = |n: &&[u8]| !n.is_empty() && *n != b".";
        p.split(|b| *b == b'/').filter(plain).map(<[u8]>::to_vec).rev().collect()
    };
    let (mut todo, mut folders, mut links) = (names(path.as_bytes()), vec![client.root()], 0);
    while let Some(name) = todo.pop() {
        let parent = folders[folders.len() - 1];
        if name == b".." {
            // The parent of the root is the root.
            folders.truncate((folders.len() - 1).max(1));
            continue;
        }
        let shown = String::from_utf8_lossy(&name).into_owned();
        let last = todo.is_empty();
        let attr = match client.lookup(creds, parent, &name).await {
            Ok(attr) => attr,
            Err(e) if e.code == Code::NoEnt && last => {
                return Ok(Place { parent, name, found: None });
            }
            Err(e) if e.code == Code::NoEnt => {
                return Err(what(Code::NoEnt, &format!("there is no folder '{shown}'")));
            }
            Err(e) => return Err(e.context(format!("path '{path}': '{shown}'"))),
        };
        if is(&attr, libc::S_IFLNK) {
            links += 1;
            if links > LINKS {
                return Err(what(Code::Loop, "leads through too many symbolic links"));
            }
            let target = client.readlink(creds, attr.ino).await?;
            if target.first() == Some(&b'/') {
                let m = format!(
                    "'{shown}' is a link to {}; where that is in the file system is not known here",
                    String::from_utf8_lossy(&target)
                );
                return Err(what(Code::Inval, &m));
            }
            todo.extend(names(&target));
        } else if last {
            return Ok(Place { parent, name, found: Some(attr) });
        } else if is(&attr, libc::S_IFDIR) {
            folders.push(attr.ino);
        } else {
            return Err(what(Code::NotDir, &format!("'{shown}' is not a folder")));
        }
    }
    Err(what(Code::Inval, "does not name a file"))
}
