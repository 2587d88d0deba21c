//! The kernel's table of mounts. Does not access any file system, because it may hang.

#![warn(missing_docs)]

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

/// A line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounted {
    /// Id of this mount in this namespace.
    pub id: u64,
    /// Id of the mount that contains the mountpoint.
    pub parent: u64,
    /// `MAJOR:MINOR`, the same for all mounts of one file system.
    pub device: String,
    /// The part of the file system that the mount shows: `/` is all of it, anything else is a bind
    /// mount of a part.
    pub root: PathBuf,
    /// The mountpoint.
    pub at: PathBuf,
    /// Options of this mount, separated by commas.
    pub options: String,
    /// Type, with subtype.
    pub kind: String,
    /// What is mounted.
    pub source: String,
    /// Options of the file system, separated by commas.
    pub super_options: String,
}

impl Mounted {
    /// Parses a line of the table; `None` for an invalid line. Paths and sources may contain any
    /// bytes.
    pub fn parse(line: &[u8]) -> Option<Mounted> {
        let dash = line.windows(3).position(|w| w == b" - ")?;
        let front: Vec<&[u8]> = line[..dash].split(|b| *b == b' ').collect();
        let back: Vec<&[u8]> = line[dash + 3..].split(|b| *b == b' ').collect();
        let ([id, parent, device, root, at, options, ..], [kind, source, super_options]) =
            (&front[..], &back[..])
        else {
            return None;
        };
        let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
        Some(Mounted {
            id: number(id)?,
            parent: number(parent)?,
            device: text(device.to_vec()),
            root: OsString::from_vec(unescape(root)).into(),
            at: OsString::from_vec(unescape(at)).into(),
            options: text(options.to_vec()),
            kind: text(unescape(kind)),
            source: text(unescape(source)),
            super_options: text(super_options.to_vec()),
        })
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
}

/// The mounts of a table; lines that are none are left out.
pub fn parse(table: &[u8]) -> Vec<Mounted> {
    table.split(|b| *b == b'\n').filter_map(Mounted::parse).collect()
}

/// The mounts in this process's namespace; later mounts come later in the list.
pub fn mounts() -> io::Result<Vec<Mounted>> {
    Ok(parse(&fs::read("/proc/self/mountinfo")?))
}

/// The topmost of the mounts at exactly this path.
pub fn topmost<'a>(mounts: &'a [Mounted], at: &Path) -> Option<&'a Mounted> {
    let here = || mounts.iter().filter(|m| m.at == at);
    here().rfind(|m| !here().any(|on| on.parent == m.id && on.id != m.id))
}

/// Whether unmounting this mount leaves its file system mounted: it is a bind mount of a part, or
/// the file system is mounted elsewhere in this namespace, too.
pub fn stays_mounted(mounts: &[Mounted], m: &Mounted) -> bool {
    m.root != Path::new("/")
        || mounts.iter().any(|other| other.device == m.device && other.id != m.id)
}

/// Decodes `\ooo`, which the kernel writes for blank, tab, newline and backslash.
fn unescape(mut rest: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(rest.len());
    while let Some((&first, tail)) = rest.split_first() {
        let octal =
            tail.get(..3).filter(|_| first == b'\\').and_then(|d| std::str::from_utf8(d).ok());
        match octal.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_table() {
        let line = r"36 35 0:45 / /mnt/a\040b rw,noatime master:1 - fuse.strake h1,h2:/x\040y ro,user_id=0,group_id=0";
        let m = Mounted::parse(line.as_bytes()).unwrap();
        assert_eq!((m.id, m.parent, m.device.as_str()), (36, 35, "0:45"));
        assert_eq!((m.at, m.source.as_str()), (PathBuf::from("/mnt/a b"), "h1,h2:/x y"));
        let options = (m.options.as_str(), m.kind.as_str(), m.super_options.as_str());
        assert_eq!(options, ("rw,noatime", "fuse.strake", "ro,user_id=0,group_id=0"));
        for bad in
            ["", "nonsense", "1 2 3 - a b c", "x 35 0:1 / /a rw - t s o", "36 35 0:1 / /a rw - t s"]
        {
            assert_eq!(Mounted::parse(bad.as_bytes()), None, "{bad}");
        }
        for (written, is) in [
            (&br"a\134b\04"[..], &br"a\b\04"[..]),
            (br"/a\040b", b"/a b"),
            (br"/a\", br"/a\"),
            (br"/a\09x", br"/a\09x"),
            (br"\134\012", b"\\\n"),
        ] {
            assert_eq!(unescape(written), is);
        }
        assert!(mounts().unwrap().iter().any(|m| m.at == Path::new("/proc")));
    }

    #[test]
    fn what_is_not_utf8_is_as_good_as_any() {
        let m = Mounted::parse(b"36 35 0:45 / /mnt/\xff\\040\xfe rw - tmpfs s\xff rw").unwrap();
        assert_eq!(m.at.into_os_string().into_vec(), b"/mnt/\xff \xfe");
        assert_eq!((m.source.as_str(), m.kind.as_str()), ("s\u{fffd}", "tmpfs"));
    }

    #[test]
    fn one_on_top_of_another_hides_it() {
        let line = |l: &str| Mounted::parse(l.as_bytes()).unwrap();
        let below = line("40 30 0:45 / /a rw - fuse.strake h:/ rw");
        let above = line("41 40 0:46 / /a rw - tmpfs t rw");
        let inside = line("42 41 0:47 / /a/b rw - tmpfs t rw");
        for all in
            [[below.clone(), above.clone(), inside.clone()], [inside, above.clone(), below.clone()]]
        {
            assert_eq!(topmost(&all, Path::new("/a")), Some(&above));
            assert_eq!(topmost(&all, Path::new("/c")), None);
        }
        assert_eq!(topmost(std::slice::from_ref(&below), Path::new("/a")), Some(&below));
    }

    #[test]
    fn a_bind_mount_is_not_the_file_system() {
        let line = |l: &str| Mounted::parse(l.as_bytes()).unwrap();
        let own = line("40 30 0:45 / /a rw - fuse.strake h:/ rw");
        let part = line(r"41 40 0:45 /d\040e /a/b rw - fuse.strake h:/ rw");
        let all = line("42 30 0:45 / /c rw - fuse.strake h:/ rw");
        let other = line("43 30 0:46 / /d rw - fuse.strake h:/ rw");
        assert_eq!((part.root.as_path(), own.root.as_path()), (Path::new("/d e"), Path::new("/")));
        let stays = |m: &Mounted, with: &[&Mounted]| {
            let table: Vec<Mounted> = with.iter().map(|m| (*m).clone()).collect();
            stays_mounted(&table, m)
        };
        assert!(!stays(&own, &[&own, &other]));
        assert!(
            stays(&part, &[&own, &part]) && stays(&part, &[&part]),
            "also where the rest is mounted elsewhere"
        );
        assert!(stays(&all, &[&own, &all]) && stays(&own, &[&own, &all]), "whichever goes first");
    }
}
