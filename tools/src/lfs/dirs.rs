//! `lfs mkdir` (`setdirstripe`) and `getdirstripe`: there is one metadata target, so directories
//! are never striped.

use std::{ffi::OsString, path::Path};

use rustix::fs::{Mode, mkdir as make};

use super::{
    Failure, Output,
    args::{Opt, Parsed, Takes::*, alias, lacking, opt, parse},
    fs as mount,
};

pub const MKDIR_USAGE: &str = "lfs mkdir [-c 1] [-i 0|-1] [-H HASH] [-o MODE] DIRECTORY...\n";
pub const GET_USAGE: &str = "lfs getdirstripe [-c] [-H] [-i] DIRECTORY...\n";

const MKDIR: &[Opt] = &[
    opt('c', "mdt-count", Value),
    alias("mdt-count", 'T', "stripe-count", Value),
    alias("mdt-count", '\0', "count", Value),
    opt('i', "mdt-index", Value),
    alias("mdt-index", 'm', "index", Value),
    alias("mdt-index", '\0', "mdt", Value),
    opt('H', "mdt-hash", Value),
    alias("mdt-hash", '\0', "hash-type", Value),
    opt('o', "mode", Value),
    lacking('C', "mdt-overcount", Value),
    lacking('D', "default_stripe", Nothing),
    lacking('\0', "default", Nothing),
    lacking('d', "delete", Nothing),
    lacking('X', "max-inherit", Value),
    lacking('\0', "max-inherit-rr", Value),
    lacking('\0', "foreign", Optional),
    lacking('\0', "flags", Value),
    lacking('x', "xattr", Value),
];

const GET: &[Opt] = &[
    opt('c', "mdt-count", Nothing),
    alias("mdt-count", 'T', "count", Nothing),
    opt('H', "mdt-hash", Nothing),
    opt('i', "mdt-index", Nothing),
    alias("mdt-index", 'm', "index", Nothing),
    lacking('D', "default", Nothing),
    lacking('O', "obd", Value),
    lacking('r', "recursive", Nothing),
    lacking('R', "raw", Nothing),
    lacking('v', "verbose", Nothing),
    lacking('y', "yaml", Nothing),
    lacking('X', "max-inherit", Nothing),
];

/// The mode that the arguments of `mkdir` give.
pub fn read(args: Vec<OsString>) -> Result<u32, Failure> {
    mode(&parse("mkdir", MKDIR, args)?)
}

/// The new directory's mode. Options for features that do not exist are errors.
fn mode(p: &Parsed) -> Result<u32, Failure> {
    if let Some(i) = p.text("mdt-index").filter(|i| !["0", "-1"].contains(&&i[..])) {
        return Err(Failure::new(
            libc::EOPNOTSUPP,
            format!("MDT index {i}: there is one MDT, so it can only be 0 or -1"),
        ));
    }
    if let Some(hash) = p.text("mdt-hash")
        && !["crush", "crush2", "fnv_1a_64", "all_char"].contains(&&hash[..])
    {
        return Err(Failure::invalid(format!("invalid hash type '{hash}'")));
    }
    match p.text("mode") {
        None => Ok(0o777),
        Some(m) => u32::from_str_radix(&m, 8)
            .ok()
            .filter(|m| *m <= 0o7777)
            .ok_or_else(|| Failure::invalid(format!("invalid mode '{m}'"))),
    }
}

pub fn mkdir(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("mkdir", MKDIR, args)?;
    if p.operands.is_empty() {
        return Err(Failure::usage("mkdir", "no directory given".into()));
    }
    if let Some(n) = p.text("mdt-count").filter(|n| !["0", "1"].contains(&&n[..])) {
        return Err(Failure::new(
            libc::EOPNOTSUPP,
            format!("MDT count {n}: there is one MDT, so it can only be 1"),
        ));
    }
    let mode = mode(&p)?;
    for path in &p.operands {
        let at = Path::new(path);
        let parent = at.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let made = mount::mount_of(parent).and_then(|_| {
            make(at, Mode::from_raw_mode(mode)).map_err(|e| {
                Failure::os(format_args!("cannot create directory '{}'", at.display()), e)
            })
        });
        if let Err(f) = made {
            out.fail(f);
        }
    }
    Ok(())
}

pub fn getdirstripe(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("getdirstripe", GET, args)?;
    if p.operands.is_empty() {
        return Err(Failure::usage("getdirstripe", "no directory given".into()));
    }
    for path in &p.operands {
        let at = Path::new(path);
        match mount::mount_of(at) {
            Err(f) => out.fail(f),
            Ok(_) if !at.is_dir() => {
                out.fail(Failure::new(
                    libc::ENOTDIR,
                    format!("'{}' is not a directory", at.display()),
                ));
            }
            Ok(_) => out.print(match (p.has("mdt-count"), p.has("mdt-index"), p.has("mdt-hash")) {
                (true, ..) => "0\n",
                (_, true, _) => "0\n",
                (_, _, true) => "none\n",
                _ => "lmv_stripe_count: 0 lmv_stripe_offset: 0 lmv_hash_type: none\n",
            }),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_one_mdt_is_refused_in_words() {
        let run = |args: &[&str]| {
            mkdir(args.iter().map(OsString::from).collect(), &mut Output::default())
        };
        for (args, code) in [
            (&["-c", "2", "/x"][..], libc::EOPNOTSUPP),
            (&["-i", "1", "/x"], libc::EOPNOTSUPP),
            (&["-i0,1", "/x"], libc::EOPNOTSUPP),
            (&["-H", "md5", "/x"], libc::EINVAL),
            (&["-o", "8", "/x"], libc::EINVAL),
            (&["-D", "/x"], libc::EOPNOTSUPP),
            (&[], libc::EINVAL),
        ] {
            assert_eq!(run(args).unwrap_err().code, code, "{args:?}");
        }
    }
}
