//! `lfs getstripe`.

use std::{
    ffi::OsString,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::io::Errno;
use strake_proto::{TargetId, map::MapView, pb};

use super::{
    Failure, Output,
    args::{Opt, Parsed, Takes::*, alias, lacking, opt, parse},
    format::{self, Fields, Plain},
    fs as mount, targets,
};

pub const USAGE: &str = "lfs getstripe [-c] [-S] [-i] [-p] [-L] [-F] [-g] [-m] [-N] [--copies] [-O OST] [-d] [-D] [-r] [-R] [-q] [-v] \
                         [-y] [--hex-idx] [--no-follow] PATH...\n";

const OPTIONS: &[Opt] = &[
    opt('c', "stripe-count", Nothing),
    opt('S', "stripe-size", Nothing),
    opt('i', "stripe-index", Nothing),
    alias("stripe-index", '\0', "stripe-offset", Nothing),
    opt('p', "pool", Nothing),
    opt('L', "layout", Nothing),
    opt('F', "fid", Nothing),
    opt('g', "generation", Nothing),
    opt('m', "mdt-index", Nothing),
    alias("mdt-index", '\0', "mdt", Nothing),
    opt('O', "obd", Value),
    alias("obd", '\0', "ost", Value),
    opt('D', "default", Nothing),
    opt('d', "directory", Nothing),
    opt('r', "recursive", Nothing),
    opt('R', "raw", Nothing),
    opt('q', "quiet", Nothing),
    opt('v', "verbose", Nothing),
    opt('y', "yaml", Nothing),
    opt('N', "mirror-count", Nothing),
    opt('\0', "copies", Nothing),
    opt('\0', "hex-idx", Nothing),
    opt('\0', "no-follow", Nothing),
    lacking('I', "component-id", Optional),
    lacking('E', "component-end", Optional),
    lacking('\0', "component-start", Optional),
    lacking('\0', "component-count", Nothing),
    lacking('\0', "component-flags", Optional),
    lacking('z', "extension-size", Optional),
    lacking('\0', "ext-size", Optional),
    lacking('\0', "mirror-index", Value),
    lacking('\0', "mirror-id", Value),
];

struct Job {
    fields: Fields,
    raw: bool,
    /// Levels shown of a given directory: 0 none, 1 its own entries, more all below.
    depth: u32,
    mdt_index: bool,
    default_only: bool,
    only: Option<TargetId>,
    no_follow: bool,
}

pub fn run(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("getstripe", OPTIONS, args)?;
    if p.operands.is_empty() {
        return Err(Failure::usage("getstripe", "no path given".into()));
    }
    let mut job = job(&p)?;
    for path in &p.operands {
        let path = Path::new(path);
        let result = mount::mount_of(path).and_then(|m| mount::map(&m)).and_then(|map| {
            if let Some(name) = p.text("obd") {
                job.only = Some(targets::ost_of(&map, &name)?);
            }
            job.show(path, &map, job.depth, out)
        });
        if let Err(f) = result {
            out.fail(f);
        }
    }
    Ok(())
}

/// Parses arguments with the targets of `map`; returns the OST to show, if one is given.
pub fn read(args: Vec<OsString>, map: &MapView) -> Result<Option<TargetId>, Failure> {
    let p = parse("getstripe", OPTIONS, args)?;
    job(&p)?;
    p.text("obd").map(|name| targets::ost_of(map, &name)).transpose()
}

/// The text of a file and of directories with these layouts; each bit of `flags` is one field.
pub fn show_all(
    flags: u32,
    ino: u64,
    layout: &pb::Layout,
    spec: &pb::LayoutSpec,
    map: &MapView,
) -> String {
    let on = |bit: u32| flags >> bit & 1 == 1;
    let f = Fields {
        path: on(0),
        count: on(1),
        size: on(2),
        pattern: on(3),
        generation: on(4),
        offset: on(5),
        pool: on(6),
        fid: on(7),
        objects: on(8),
        detail: on(9),
        yaml: on(10),
        hex: on(11),
        copies: on(14),
    };
    let file = Plain::of_file(ino, layout, map);
    let all = [Plain::of_default(ino, spec, on(12)), Plain::of_effective(ino, layout)];
    all.into_iter()
        .chain(file)
        .map(|p| format::layout("path", &p, f, on(13).then_some(0)))
        .collect()
}

fn job(p: &Parsed) -> Result<Job, Failure> {
    let picked = Fields {
        count: p.has("stripe-count"),
        size: p.has("stripe-size"),
        pattern: p.has("layout"),
        generation: p.has("generation"),
        offset: p.has("stripe-index"),
        pool: p.has("pool"),
        fid: p.has("fid"),
        copies: p.has("mirror-count"),
        ..Fields::default()
    };
    let beside =
        ["verbose", "quiet", "yaml", "obd"].iter().any(|o| p.has(o)) || picked != Fields::default();
    if p.has("mdt-index") && beside {
        return Err(Failure::invalid("-m shows the MDT alone; ask for other fields without it"));
    }
    let any = picked != Fields::default() || p.has("mdt-index");
    // A field alone, -d and -D concern the path itself; otherwise a directory is listed.
    let alone = any || p.has("directory") || p.has("default");
    let depth =
        if p.has("recursive") { u32::MAX } else { u32::from(!alone || p.has("verbose") && any) };
    let mut fields = if p.has("verbose") {
        Fields { detail: true, ..Fields::DEFAULT }
    } else if p.has("quiet") {
        Fields { objects: true, ..Fields::default() }
    } else if any {
        picked
    } else {
        Fields::DEFAULT
    };
    fields.path = depth > 0;
    fields.copies |= p.has("copies");
    fields.yaml = p.has("yaml");
    fields.hex = p.has("hex-idx");
    Ok(Job {
        fields,
        raw: p.has("raw"),
        depth,
        mdt_index: p.has("mdt-index"),
        default_only: p.has("default"),
        only: None,
        no_follow: p.has("no-follow"),
    })
}

impl Job {
    fn show(
        &self,
        path: &Path,
        map: &MapView,
        depth: u32,
        out: &mut Output,
    ) -> Result<(), Failure> {
        let failed = |e: std::io::Error| {
            Failure::os(
                format_args!("cannot read '{}'", path.display()),
                Errno::from_io_error(&e).unwrap_or(Errno::IO),
            )
        };
        let meta = if self.no_follow { fs::symlink_metadata(path) } else { fs::metadata(path) }
            .map_err(failed)?;
        let shown = path.to_string_lossy();
        if self.mdt_index {
            if self.fields.path {
                out.print(&format!("{shown}\n"));
            }
            // There is one metadata target today, which holds every inode.
            out.print("0\n");
        } else if meta.is_file() && !self.default_only {
            // The kernel must follow the link here: the attribute calls do not.
            let real = if self.no_follow {
                path.to_path_buf()
            } else {
                path.canonicalize().map_err(failed)?
            };
            let plain = Plain::of_file(meta.ino(), &mount::layout(&real)?, map)?;
            let wanted = |o: TargetId| plain.objects.iter().any(|x| x.ost == o);
            if self.only.is_none_or(wanted) {
                out.print(&format::layout(&shown, &plain, self.fields, self.only));
            }
        } else if meta.is_dir() {
            let real = path.canonicalize().map_err(failed)?;
            if self.only.is_none() {
                let plain = self.directory(&real, meta.ino())?;
                out.print(&format::layout(&shown, &plain, self.fields, None));
            }
        }
        if meta.is_dir() && depth > 0 {
            self.list(path, map, depth - 1, out)?;
        }
        Ok(())
    }

    fn directory(&self, path: &Path, ino: u64) -> Result<Plain, Failure> {
        let inherited = || mount::effective(path).map(|layout| Plain::of_effective(ino, &layout));
        Ok(match mount::default_layout(path)? {
            Some(spec) => {
                let mut own = Plain::of_default(ino, &spec, self.raw);
                if own.copies == 0 && self.fields.copies && !self.raw {
                    own.copies = inherited()?.copies;
                }
                own
            }
            None if self.raw => Plain::of_default(ino, &Default::default(), true),
            None => inherited()?,
        })
    }

    fn list(&self, dir: &Path, map: &MapView, depth: u32, out: &mut Output) -> Result<(), Failure> {
        let failed = |e: std::io::Error| {
            Failure::os(
                format_args!("cannot list '{}'", dir.display()),
                Errno::from_io_error(&e).unwrap_or(Errno::IO),
            )
        };
        for entry in fs::read_dir(dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let kind = entry.file_type().map_err(failed)?;
            if !kind.is_file() && !kind.is_dir() {
                continue;
            }
            // Joined with a slash whatever the folder ends with, as Lustre does.
            let mut path = dir.as_os_str().to_os_string();
            path.push("/");
            path.push(entry.file_name());
            if let Err(f) = self.show(&PathBuf::from(path), map, depth, out) {
                out.fail(f);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job_of(args: &[&str]) -> Job {
        job(&parse("getstripe", OPTIONS, args.iter().map(OsString::from).collect()).unwrap())
            .unwrap()
    }

    #[test]
    fn what_options_choose() {
        assert_eq!((job_of(&["f"]).fields, job_of(&["f"]).depth), (Fields::DEFAULT, 1));
        let c = job_of(&["-c", "f"]);
        assert!(c.fields.single() && c.depth == 0 && !c.fields.path);
        let rc = job_of(&["-rc", "f"]);
        assert!(rc.fields.single() && rc.depth == u32::MAX && rc.fields.path);
        assert!(!job_of(&["-d", "f"]).fields.path);
        assert!(job_of(&["-v", "f"]).fields.detail);
        assert!(job_of(&["--yaml", "f"]).fields.yaml);
        assert!(job_of(&["--ost", "1", "f"]).fields.objects);
        assert!(job_of(&["-m", "-r", "f"]).mdt_index);
        assert!(job_of(&["-N", "f"]).fields.single());
        let all = Fields { copies: true, ..Fields::DEFAULT };
        assert_eq!((job_of(&["--copies", "f"]).fields, job_of(&["--copies", "f"]).depth), (all, 1));
        for other in ["-c", "-S", "-v", "-q", "-y", "-O1"] {
            let p = parse("getstripe", OPTIONS, ["-m", other, "f"].map(OsString::from).to_vec())
                .unwrap();
            assert_eq!(job(&p).err().map(|f| f.code), Some(libc::EINVAL), "{other}");
        }
    }
}
