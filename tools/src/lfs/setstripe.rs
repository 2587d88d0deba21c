//! `lfs setstripe`.

use std::{collections::BTreeSet, ffi::OsString, os::unix::fs::FileTypeExt, path::Path};

use rustix::{
    fs::{CWD, FileType, Mode, mknodat, unlink},
    io::Errno,
};
use strake_mds::cluster::state::MAX_COPIES;
use strake_proto::{
    layout::{MAX_STRIPES, STRIPE_UNIT},
    map::MapView,
    pb,
};

use super::{
    Failure, Output,
    args::{Opt, Parsed, Takes::*, alias, lacking, opt, parse},
    fs as mount,
};

pub const USAGE: &str = "lfs setstripe [-c COUNT] [-C COUNT] [-S SIZE] [-i OST] [-o OST,...] [-p POOL] [-L raid0]\n\
                         \x20                   [--copies N | -N[N]] PATH...\n\
                         \x20      lfs setstripe -d DIRECTORY...\n";

const OPTIONS: &[Opt] = &[
    opt('c', "stripe-count", Value),
    alias("stripe-count", '\0', "stripe_count", Value),
    opt('C', "overstripe-count", Value),
    opt('S', "stripe-size", Value),
    alias("stripe-size", 's', "stripe_size", Value),
    opt('i', "stripe-index", Value),
    alias("stripe-index", '\0', "stripe-offset", Value),
    opt('o', "ost", Value),
    alias("ost", '\0', "ost-list", Value),
    alias("ost", '\0', "ost-index", Value),
    opt('p', "pool", Value),
    opt('d', "delete", Nothing),
    opt('L', "layout", Value),
    opt('\0', "copies", Value),
    opt('N', "mirror-count", Optional),
    lacking('E', "component-end", Value),
    lacking('z', "extension-size", Value),
    lacking('\0', "ext-size", Value),
    lacking('I', "component-id", Value),
    lacking('\0', "component-add", Nothing),
    lacking('\0', "component-del", Nothing),
    lacking('\0', "component-set", Nothing),
    lacking('\0', "comp-set", Nothing),
    lacking('\0', "component-flags", Value),
    lacking('\0', "comp-flags", Value),
    lacking('y', "yaml", Value),
    lacking('\0', "copy", Value),
    lacking('\0', "foreign", Optional),
    lacking('\0', "flags", Value),
    lacking('x', "xattr", Value),
    lacking('\0', "mode", Value),
    lacking('\0', "ec", Value),
    lacking('\0', "ec-expert", Value),
];

pub fn run(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("setstripe", OPTIONS, args)?;
    if p.operands.is_empty() {
        return Err(Failure::usage("setstripe", "no path given".into()));
    }
    if p.has("delete") {
        if p.options.iter().any(|(id, _)| *id != "delete") {
            return Err(Failure::invalid(
                "-d deletes a directory's default and takes no other option",
            ));
        }
        for path in &p.operands {
            if let Err(f) = delete(Path::new(path)) {
                out.fail(f);
            }
        }
        return Ok(());
    }
    let spec = spec(&p)?;
    for path in &p.operands {
        if let Err(f) = set(Path::new(path), &spec) {
            out.fail(f);
        }
    }
    Ok(())
}

/// The layout that the arguments give.
pub fn read(args: Vec<OsString>) -> Result<pb::LayoutSpec, Failure> {
    spec(&parse("setstripe", OPTIONS, args)?)
}

fn delete(path: &Path) -> Result<(), Failure> {
    mount::mount_of(path)?;
    mount::delete_default(path).map_err(|e| {
        Failure::os(format_args!("cannot delete the default of '{}'", path.display()), e)
    })
}

fn set(path: &Path, spec: &pb::LayoutSpec) -> Result<(), Failure> {
    let what = format!("setstripe error for '{}'", path.display());
    let set = |at: &Path| mount::set_layout(at, spec);
    match std::fs::metadata(path) {
        Ok(meta) => {
            there(&mount::map(&mount::mount_of(path)?)?, spec)?;
            let kind = meta.file_type();
            if kind.is_fifo() || kind.is_socket() || kind.is_block_device() || kind.is_char_device()
            {
                return Err(Failure::invalid(format!("{what}: not a file or directory")));
            }
            set(&path.canonicalize().unwrap_or_else(|_| path.into())).map_err(|e| refused(&what, e))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let parent =
                path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            there(&mount::map(&mount::mount_of(parent)?)?, spec)?;
            make(path, set).map_err(|e| refused(&what, e))
        }
        Err(e) => Err(Failure::os(&what, Errno::from_io_error(&e).unwrap_or(Errno::IO))),
    }
}

/// Creates an empty file whose layout `set` sets; if the layout is refused, the file is removed.
/// mknod creates the name and fails if it exists.
fn make(path: &Path, set: impl FnOnce(&Path) -> Result<(), Errno>) -> Result<(), Errno> {
    mknodat(CWD, path, FileType::RegularFile, Mode::from_raw_mode(0o666), 0)?;
    set(path).inspect_err(|e| {
        // Only if the layout itself was refused is it certain that no program wrote the file in the
        // meantime.
        if matches!(*e, Errno::INVAL | Errno::NODEV | Errno::ACCESS | Errno::NOSPC)
            && fs_is_empty(path)
        {
            let _ = unlink(path);
        }
    })
}

fn fs_is_empty(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.len() == 0)
}

/// Why a layout was not set, as text.
fn refused(what: &str, e: Errno) -> Failure {
    match e {
        Errno::EXIST => Failure::new(libc::EEXIST, format!("{what}: stripe already set")),
        Errno::BUSY => Failure::new(
            libc::EBUSY,
            format!(
                "{what}: the file is open for writing; set its layout when it is closed and still \
                 empty"
            ),
        ),
        Errno::INVAL => {
            Failure::invalid(format!("{what}: the file system refused these parameters"))
        }
        Errno::NODEV => Failure::new(
            libc::ENODEV,
            format!(
                "{what}: a requested OST takes no new files now; see `lfs osts` and `strake status`"
            ),
        ),
        e => Failure::os(what, e),
    }
}

/// `EINVAL` with the name of the pool or OST that is not in the map.
fn there(map: &MapView, spec: &pb::LayoutSpec) -> Result<(), Failure> {
    let m = &map.map;
    let pool = match &spec.pool[..] {
        "" => None,
        name => Some(m.pools.iter().find(|p| p.name == name).ok_or_else(|| {
            Failure::invalid(format!(
                "pool '{}.{name}' not found; `lfs pool_list {0}` lists them",
                m.fs_name
            ))
        })?),
    };
    for ost in spec.targets.iter().chain(&spec.start) {
        if map.target(*ost).is_none() {
            return Err(Failure::invalid(format!(
                "there is no OST with index {ost}; `lfs osts` lists them"
            )));
        }
    }
    if let (Some(pool), Some(start)) = (pool, spec.start)
        && !pool.targets.contains(&start)
    {
        return Err(Failure::invalid(format!(
            "OST {start} is not in pool '{}.{}'",
            m.fs_name, pool.name
        )));
    }
    // What is inherited may be another number, but rarely is.
    let copies = if spec.copies == 0 { m.default_copies.max(1) } else { spec.copies };
    let servers = servers_of(m, pool);
    if (pool.is_some() || spec.copies != 0) && servers < copies as usize {
        let of = pool.map_or_else(
            || "the file system has".to_string(),
            |p| format!("pool '{}.{}' has", m.fs_name, p.name),
        );
        return Err(Failure::invalid(format!(
            "{of} targets on {servers} storage servers, and {copies} copies need as many: add \
             targets of others, or ask for fewer by --copies"
        )));
    }
    Ok(())
}

/// The number of storage servers with targets, of a pool or of all.
pub fn servers_of(map: &pb::ClusterMap, pool: Option<&pb::Pool>) -> usize {
    let among = |t: &&pb::Target| pool.is_none_or(|p| p.targets.contains(&t.id)) && !t.given_up;
    map.targets.iter().filter(among).map(|t| t.node).collect::<BTreeSet<_>>().len()
}

/// The layout that the options give.
fn spec(p: &Parsed) -> Result<pb::LayoutSpec, Failure> {
    let mut s = pb::LayoutSpec::default();
    if p.has("stripe-count") && p.has("overstripe-count") {
        return Err(Failure::invalid("-c and -C exclude each other"));
    }
    if let Some(text) = p.text("stripe-count") {
        s.stripe_count = count(&text, -1)?;
    }
    if let Some(text) = p.text("overstripe-count") {
        s.overstripe = count(&text, -32)?;
    }
    if let Some(text) = p.text("stripe-size") {
        s.stripe_size = stripe_size(&text)?;
    }
    let mut start = None;
    if let Some(text) = p.text("stripe-index") {
        start = match text.parse::<i64>() {
            Ok(-1) => None,
            Ok(n) if (0..=i64::from(u32::MAX - 1)).contains(&n) => Some(n as u32),
            _ => return Err(Failure::invalid(format!("invalid stripe index '{text}'"))),
        };
    }
    for (_, text) in p.options.iter().filter(|(id, _)| *id == "ost") {
        let text = text.as_deref().unwrap_or_default().to_string_lossy();
        s.targets.extend(ost_list(&text)?);
    }
    if s.targets.is_empty() {
        s.start = start;
    } else {
        place_list(&mut s, start)?;
    }
    match p.text("layout").as_deref() {
        None | Some("raid0") => {}
        Some(other) => return Err(Failure::unsupported("setstripe", &format!("--layout {other}"))),
    }
    if let Some(pool) = p.text("pool") {
        s.pool = pool_name(&pool)?;
    }
    s.copies = copies(p)?;
    Ok(s)
}

/// Copies of each stripe; 0: as inherited. Lustre's mirrors of one layout are the same.
fn copies(p: &Parsed) -> Result<u32, Failure> {
    let given = p.options.iter().filter(|(id, _)| ["copies", "mirror-count"].contains(id));
    let all: Vec<_> = given.map(|(_, v)| v.as_deref().unwrap_or("1".as_ref())).collect();
    match &all[..] {
        [] => Ok(0),
        [one] => {
            let text = one.to_string_lossy();
            let n = text.parse().ok().filter(|n| (1..=MAX_COPIES as u32).contains(n));
            n.ok_or_else(|| {
                Failure::invalid(format!("invalid number of copies '{text}': 1 to {MAX_COPIES}"))
            })
        }
        _ => Err(Failure::invalid(
            "the number of copies is given once; mirrors with different layouts are not supported",
        )),
    }
}

/// An explicit list: the count must match, and a start index rotates the list so that it begins
/// there.
fn place_list(s: &mut pb::LayoutSpec, start: Option<u32>) -> Result<(), Failure> {
    let n = i32::try_from(s.targets.len()).unwrap_or(i32::MAX);
    let asked = if s.overstripe != 0 { s.overstripe } else { s.stripe_count };
    if asked != 0 && asked != n {
        return Err(Failure::invalid(format!(
            "stripe count {asked} does not match the {n} OSTs listed"
        )));
    }
    if let Some(start) = start {
        let at = s.targets.iter().position(|t| *t == start);
        let at = at.ok_or_else(|| {
            Failure::invalid(format!("stripe index {start} is not in the OST list"))
        })?;
        s.targets.rotate_left(at);
    }
    Ok(())
}

fn count(text: &str, least: i32) -> Result<i32, Failure> {
    match text.parse::<i32>() {
        Ok(n) if (least..=MAX_STRIPES as i32).contains(&n) => Ok(n),
        _ => Err(Failure::invalid(format!(
            "invalid stripe count '{text}': -1 (all) or 0 to {MAX_STRIPES}"
        ))),
    }
}

/// Parses `N[KMGTP]`, in bytes; below 4096 without a unit it is KiB. Must be a multiple of 64 KiB
/// below 4 GiB; 0 is the default.
fn stripe_size(text: &str) -> Result<u32, Failure> {
    let bad = || {
        Failure::invalid(format!(
            "invalid stripe size '{text}': a multiple of 64K below 4G, with K, M or G as unit"
        ))
    };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_uppercase();
    let shift = match unit.trim_end_matches("IB").trim_end_matches('B') {
        "" if unit.is_empty() => None,
        "K" => Some(10),
        "M" => Some(20),
        "G" => Some(30),
        "T" => Some(40),
        "P" => Some(50),
        _ => return Err(bad()),
    };
    let n: u64 = digits.parse().map_err(|_| bad())?;
    let bytes = match shift {
        Some(s) => n.checked_mul(1 << s).ok_or_else(bad)?,
        None if n < 4096 => n << 10,
        None => n,
    };
    let bytes = u32::try_from(bytes).map_err(|_| bad())?;
    if bytes.is_multiple_of(STRIPE_UNIT) { Ok(bytes) } else { Err(bad()) }
}

/// `1,2-4,0x1f`.
fn ost_list(text: &str) -> Result<Vec<u32>, Failure> {
    let bad =
        || Failure::invalid(format!("invalid OST list '{text}': indices and ranges as in 1,2-4,7"));
    let number = |s: &str| match s.strip_prefix("0x").or(s.strip_prefix("0X")) {
        Some(hex) => u32::from_str_radix(hex, 16).map_err(|_| bad()),
        None => s.parse::<u32>().map_err(|_| bad()),
    };
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((a, b)) => (number(a)?, number(b)?),
            None => (number(part)?, number(part)?),
        };
        if first > last || (last - first) as usize >= MAX_STRIPES || all.len() >= MAX_STRIPES {
            return Err(bad());
        }
        all.extend(first..=last);
    }
    Ok(all)
}

/// Empty means the parent's pool.
fn pool_name(pool: &str) -> Result<String, Failure> {
    // FSNAME.POOL is accepted too.
    let name = pool.rsplit('.').next().unwrap_or_default();
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match name {
        "" | "inherit" => Ok(String::new()),
        "none" | "ignore" => Err(Failure::unsupported("setstripe", &format!("--pool {name}"))),
        _ if name.len() > 15 || !name.chars().all(allowed) => Err(Failure::invalid(format!(
            "invalid pool name '{name}': at most 15 of A-Z a-z 0-9 _ -"
        ))),
        _ => Ok(name.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(args: &[&str]) -> Result<pb::LayoutSpec, Failure> {
        spec(&parse("setstripe", OPTIONS, args.iter().map(OsString::from).collect())?)
    }

    #[test]
    fn options_make_the_spec() {
        let s = ask(&["-c4", "-S", "1M", "-i", "2", "-p", "fs.flash", "f"]).unwrap();
        let want = pb::LayoutSpec {
            stripe_count: 4,
            stripe_size: 1 << 20,
            start: Some(2),
            pool: "flash".into(),
            ..Default::default()
        };
        assert_eq!(s, want);
        assert_eq!(ask(&["f"]).unwrap(), pb::LayoutSpec::default());
        assert_eq!(ask(&["-c", "-1", "-i", "-1", "f"]).unwrap().stripe_count, -1);
        assert_eq!(ask(&["--overstripe-count=-2", "f"]).unwrap().overstripe, -2);
        assert_eq!(ask(&["-o", "1,4-6", "-o", "0x10", "f"]).unwrap().targets, [1, 4, 5, 6, 16]);
        let turned = ask(&["-o", "1,2,3", "-i", "2", "-c", "3", "f"]).unwrap();
        assert_eq!((turned.targets, turned.start), (vec![2, 3, 1], None));
    }

    #[test]
    fn sizes() {
        for (text, want) in [
            ("0", 0),
            ("64", 65_536),
            ("64k", 65_536),
            ("1M", 1 << 20),
            ("1MiB", 1 << 20),
            ("65536", 65_536),
            ("1g", 1 << 30),
        ] {
            assert_eq!(stripe_size(text).unwrap(), want, "{text}");
        }
        for text in [
            "",
            "M",
            "1",
            "65537",
            "4G",
            "1X",
            "-1",
            "99999999999999999999",
            "1T",
            "1.5M",
            "20000000P",
        ] {
            assert_eq!(stripe_size(text).unwrap_err().code, libc::EINVAL, "{text}");
        }
    }

    #[test]
    fn wrong_values_are_refused() {
        for args in [
            &["-c", "2001", "f"][..],
            &["-c", "-2", "f"],
            &["-C", "-33", "f"],
            &["-c", "1", "-C", "2", "f"],
            &["-i", "-2", "f"],
            &["-o", "3-1", "f"],
            &["-o", "x", "f"],
            &["-o", "0-4000000000", "f"],
            &["-o", "1,2", "-c", "3", "f"],
            &["-o", "1,2", "-i", "3", "f"],
            &["-p", "a/b", "f"],
            &["-p", "abcdefghijklmnop", "f"],
        ] {
            assert_eq!(ask(args).unwrap_err().code, libc::EINVAL, "{args:?}");
        }
        let lacking: [&[&str]; 6] = [
            &["-L", "mdt", "f"],
            &["--pool=none", "f"],
            &["--ext-size", "64M", "f"],
            &["--ec-expert=40+20", "f"],
            &["--ec", "4+2", "f"],
            &["--ext=64M", "f"],
        ];
        for args in lacking {
            assert_eq!(ask(args).unwrap_err().code, libc::EOPNOTSUPP, "{args:?}");
        }
    }

    #[test]
    fn a_file_that_somebody_wrote_meanwhile_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for e in [Errno::EXIST, Errno::BUSY] {
            let set = |at: &Path| std::fs::write(at, "theirs").map_err(|_| Errno::IO).and(Err(e));
            assert_eq!(make(&path, set), Err(e));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "theirs");
            std::fs::remove_file(&path).unwrap();
        }
        assert_eq!(make(&path, |_| Err(Errno::INVAL)), Err(Errno::INVAL));
        assert!(!path.exists());
        assert_eq!(make(&path, |_| Ok(())), Ok(()));
        assert_eq!(make(&path, |_| Ok(())), Err(Errno::EXIST));
        assert!(path.exists());
        assert!(refused("f", Errno::BUSY).text.contains("open for writing"));
    }

    #[test]
    fn pools_and_osts_that_are_not_there_are_named() {
        let targets = (0..4).map(|id| pb::Target { id, ..Default::default() }).collect();
        let pools = vec![pb::Pool { name: "flash".into(), targets: vec![0, 1] }];
        let map = pb::ClusterMap { fs_name: "fs".into(), targets, pools, ..Default::default() };
        let map = MapView::new(map).unwrap();
        for args in [&["-p", "flash", "-i", "1", "f"][..], &["-o", "3,0", "f"], &["-c", "-1", "f"]]
        {
            there(&map, &ask(args).unwrap()).unwrap();
        }
        for (args, says) in [
            (&["-p", "nope", "f"][..], "pool 'fs.nope' not found"),
            (&["-i", "99", "f"], "no OST with index 99"),
            (&["-o", "0,4", "f"], "no OST with index 4"),
            (&["-p", "flash", "-i", "2", "f"], "OST 2 is not in pool 'fs.flash'"),
        ] {
            let e = there(&map, &ask(args).unwrap()).unwrap_err();
            assert_eq!(e.code, libc::EINVAL);
            assert!(e.text.contains(says), "{}", e.text);
        }
    }
}
