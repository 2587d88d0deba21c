//! `lfs path2fid` and `fid2path`.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
};

use strake_proto::Fid;

use super::{
    Failure, Output,
    args::{Opt, Takes::*, lacking, opt, parse},
    fs as mount,
};

const PATH2FID: &[Opt] = &[opt('\0', "parents", Nothing)];
const FID2PATH: &[Opt] = &[
    opt('0', "print0", Nothing),
    opt('n', "name", Nothing),
    opt('f', "print-fid", Nothing),
    lacking('c', "print-link", Nothing),
    lacking('l', "link", Value),
    lacking('r', "rec", Value),
];

pub fn path2fid(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("path2fid", PATH2FID, args)?;
    if p.operands.is_empty() {
        return Err(Failure::usage("path2fid", "no path given".into()));
    }
    for path in &p.operands {
        let at = Path::new(path);
        let result = mount::mount_of(at)
            .and_then(|_| if p.has("parents") { parent_of(at) } else { mount::fid(at) });
        match result {
            Ok(text) if p.operands.len() > 1 => {
                out.print(&format!("{}: {text}\n", path.to_string_lossy()))
            }
            Ok(text) => out.print(&format!("{text}\n")),
            Err(f) => out.fail(f),
        }
    }
    Ok(())
}

/// `[FID of the parent]/name`, for the given name.
fn parent_of(path: &Path) -> Result<String, Failure> {
    let full = std::path::absolute(path).map_err(|e| Failure::new(libc::EIO, e.to_string()))?;
    match (full.parent(), full.file_name()) {
        (Some(parent), Some(name)) => {
            Ok(format!("{}/{}", mount::fid(parent)?, name.to_string_lossy()))
        }
        _ => Err(Failure::invalid(format!("'{}' has no parent", path.display()))),
    }
}

/// Parses the arguments of `fid2path` as FIDs.
pub fn read(args: Vec<OsString>) -> Result<(), Failure> {
    let p = parse("fid2path", FID2PATH, args)?;
    for text in &p.operands {
        let fid: Fid = text.to_string_lossy().parse()?;
        fid.to_ino()?;
        full_path(text, text.as_bytes());
    }
    Ok(())
}

pub fn fid2path(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("fid2path", FID2PATH, args)?;
    let [root, fids @ ..] = &p.operands[..] else {
        return Err(Failure::usage("fid2path", "name a file system or its root, and FIDs".into()));
    };
    if fids.is_empty() {
        return Err(Failure::usage("fid2path", "no FID given".into()));
    }
    let at = mount::by_name_or_path(&root.to_string_lossy())?;
    let end = if p.has("print0") { "\0" } else { "\n" };
    for text in fids {
        let result = text.to_string_lossy().parse::<Fid>().map_err(Failure::from).and_then(|fid| {
            let path = mount::read(&at, &format!("strake.path.{fid}"))?;
            let path =
                path.ok_or_else(|| Failure::new(libc::ENOENT, format!("{fid} has no path")))?;
            Ok((fid, path))
        });
        match result {
            Ok((fid, path)) => {
                let full = full_path(at.as_os_str(), &path);
                let shown = if p.has("name") {
                    Path::new(&full).file_name().unwrap_or(&full)
                } else {
                    &full
                };
                let before = if p.has("print-fid") { format!("{fid} ") } else { String::new() };
                out.print(&format!("{before}{}{end}", shown.to_string_lossy()));
            }
            Err(f) => {
                out.fail(Failure { text: format!("'{}': {}", text.to_string_lossy(), f.text), ..f })
            }
        }
    }
    Ok(())
}

/// The full path, from the mountpoint and a path relative to the root of the file system.
fn full_path(mount: &OsStr, path: &[u8]) -> OsString {
    let path = path.strip_prefix(b"/").unwrap_or(path);
    let mut full = mount.as_bytes().to_vec();
    if !path.is_empty() && !full.ends_with(b"/") {
        full.push(b'/');
    }
    full.extend_from_slice(path);
    OsString::from_vec(full)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lie_below_the_mountpoint() {
        let full = |m: &str, p: &str| full_path(OsStr::new(m), p.as_bytes()).into_string().unwrap();
        assert_eq!(full("/mnt/x", "/a/b"), "/mnt/x/a/b");
        assert_eq!(full("/mnt/x", "a"), "/mnt/x/a");
        assert_eq!(full("/mnt/x", "/"), "/mnt/x");
        assert_eq!(full("/", "/a"), "/a");
    }
}
