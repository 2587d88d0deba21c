//! `lfs seal`: makes files immutable, with a manifest of their content. See `docs/seal.md`.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use rustix::io::Errno;
use serde_json::{Value, json};
use strake_proto::{
    pb::{self, seal::Step},
    seal::{self, PAGE},
};

use super::{
    Failure, Output,
    args::{Opt, Parsed, Takes::*, opt, parse},
    content::{self, Meter},
    fs as mount, sums,
};

pub const USAGE: &str = "lfs seal [-r] [-q] [--json] FILE...          make files immutable, print their SHA-256 sums\n\
                         \x20      lfs seal --status [-r] [--json] FILE...  tell how files are sealed\n\
                         \x20      lfs seal --sums [-r] FILE...             print the sums of sealed files, for sha256sum -c\n\
                         \x20      lfs seal --undo [-r] FILE...             make them changeable again (root)\n";

const OPTIONS: &[Opt] = &[
    opt('r', "recursive", Nothing),
    opt('q', "quiet", Nothing),
    opt('\0', "json", Nothing),
    opt('\0', "status", Nothing),
    opt('\0', "sums", Nothing),
    opt('\0', "undo", Nothing),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Seal,
    Status,
    Sums,
    Undo,
}

pub fn read(args: Vec<OsString>) -> Result<(Parsed, Action), Failure> {
    let p = parse("seal", OPTIONS, args)?;
    let all = [("status", Action::Status), ("sums", Action::Sums), ("undo", Action::Undo)];
    let mut asked = all.into_iter().filter(|(id, _)| p.has(id)).map(|(_, a)| a);
    let action = asked.next().unwrap_or(Action::Seal);
    if asked.next().is_some() {
        return Err(Failure::usage(
            "seal",
            "--status, --sums and --undo exclude each other".into(),
        ));
    }
    if p.has("json") && matches!(action, Action::Sums | Action::Undo) {
        return Err(Failure::usage("seal", "--json goes with sealing and with --status".into()));
    }
    if p.operands.is_empty() {
        return Err(Failure::usage("seal", "no file given".into()));
    }
    Ok((p, action))
}

struct Job {
    action: Action,
    quiet: bool,
    json: bool,
    meter: Meter,
    shown: Vec<Value>,
}

pub fn run(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let (p, action) = read(args)?;
    let mut job = Job {
        action,
        quiet: p.has("quiet"),
        json: p.has("json"),
        meter: Meter::new(),
        shown: Vec::new(),
    };
    for path in &p.operands {
        let path = Path::new(path);
        let mut each = |found: Result<PathBuf, Failure>| {
            if let Err(f) = found.and_then(|path| job.one(&path, out)) {
                job.meter.clear();
                out.fail(f);
            }
        };
        if let Err(f) = mount::mount_of(path) {
            each(Err(f));
        } else if p.has("recursive") || !path.is_dir() {
            content::walk(path, &mut each);
        } else {
            each(Err(Failure::new(
                libc::EISDIR,
                format!("'{}' is a directory; -r seals what is in it", path.display()),
            )));
        }
    }
    job.meter.clear();
    if job.json {
        out.print(&format!("{:#}\n", json!({ "files": job.shown })));
    }
    Ok(())
}

impl Job {
    fn one(&mut self, path: &Path, out: &mut Output) -> Result<(), Failure> {
        let real = path.canonicalize().map_err(|e| content::failed(path, &e))?;
        let sealed = match self.action {
            Action::Seal => Some(seal(path, &real, &mut self.meter)?),
            Action::Undo => return undo(path, &real),
            Action::Status | Action::Sums => mount::seal(&real)?,
        };
        let manifest = sealed.as_ref().and_then(|s| s.manifest.as_ref());
        self.meter.clear();
        if self.json {
            self.shown.push(shown(path, sealed.as_ref()));
        } else if self.action == Action::Status {
            out.print(&status(path, sealed.as_ref()));
        } else if let Some(m) = manifest {
            if !self.quiet {
                out.print_bytes(&sums::line(&m.sha256, path.as_os_str()));
            }
        } else {
            return Err(Failure::new(libc::ENODATA, format!("'{}' is not sealed", path.display())));
        }
        Ok(())
    }
}

/// Seals a file, completes a seal that was begun, or finds the file sealed. `real`: the file
/// itself, not a link to it.
fn seal(path: &Path, real: &Path, meter: &mut Meter) -> Result<pb::SealInfo, Failure> {
    let failed = |e| content::failed(path, &e);
    if !fs::metadata(real).map_err(failed)?.is_file() {
        return Err(Failure::invalid(format!("'{}' is not a regular file", path.display())));
    }
    // First: a file that cannot be read must not be sealed.
    let file = content::open(real).map_err(failed)?;
    let before = mount::seal(real)?;
    if let Some(info) = before.as_ref().filter(|s| s.manifest.is_some()) {
        return Ok(info.clone());
    }
    mount::seal_step(real, 0, Step::Begin(pb::SealBegin {})).map_err(|e| refused(path, e))?;
    let begun = mount::seal(real)?.ok_or_else(|| undone(path))?;
    if begun.manifest.is_some() {
        return Ok(begun);
    }
    // From here on the file cannot change.
    let result = file
        .metadata()
        .map_err(failed)
        .and_then(|m| attach(path, real, &file, m.len(), begun.id, meter));
    match result {
        Ok(()) => mount::seal(real)?.filter(|s| s.manifest.is_some()).ok_or_else(|| undone(path)),
        Err(mut f) => {
            // Another run that began or continued the seal may have been faster.
            if let Some(info) = mount::seal(real)?.filter(|s| s.manifest.is_some()) {
                return Ok(info);
            }
            // A seal that another run began is left for that run to complete.
            let undo = before
                .is_none()
                .then(|| mount::seal_step(real, begun.id, Step::Undo(pb::SealUndo {})));
            let left = "; it is immutable but has no manifest (run `lfs seal` again, or `lfs seal \
                 --undo`)";
            f.text.push_str(if matches!(undo, Some(Ok(()))) { "; it is not sealed" } else { left });
            Err(f)
        }
    }
}

/// Reads the file and attaches its manifest.
fn attach(
    path: &Path,
    real: &Path,
    file: &fs::File,
    size: u64,
    id: u64,
    meter: &mut Meter,
) -> Result<(), Failure> {
    let extent_size = seal::extent_size(size);
    let read = content::read(file, size, extent_size, |done| meter.at(path, done, size));
    meter.file_done(size);
    let digests = read.extents.into_iter().collect::<Result<Vec<_>, _>>().map_err(|u| {
        let f = content::failed(path, &u.why);
        Failure::new(f.code, format!("{} (at byte {})", f.text, u.offset))
    })?;
    let sha256 = read.sha256.unwrap_or_default().to_vec().into();
    let root = seal::root(&digests).to_vec().into();
    let step = |s| mount::seal_step(real, id, s).map_err(|e| refused(path, e));
    for (number, page) in (0..).zip(digests.chunks(PAGE)) {
        step(Step::Page(pb::SealPage { number, digests: page.concat().into() }))?;
    }
    step(Step::Finish(pb::Manifest { size, extent_size, sha256, root, time_ns: 0 }))
}

fn undo(path: &Path, real: &Path) -> Result<(), Failure> {
    mount::seal_step(real, 0, Step::Undo(pb::SealUndo {})).map_err(|e| match e {
        Errno::NODATA => Failure::new(libc::ENODATA, format!("'{}' is not sealed", path.display())),
        Errno::PERM => {
            Failure::new(libc::EPERM, format!("'{}': only root may undo a seal", path.display()))
        }
        e => Failure::os(format_args!("'{}'", path.display()), e),
    })
}

fn undone(path: &Path) -> Failure {
    Failure::new(libc::ESTALE, format!("'{}': its seal was undone meanwhile", path.display()))
}

/// Why a step was refused, as text.
fn refused(path: &Path, e: Errno) -> Failure {
    let path = path.display();
    match e {
        Errno::BUSY => Failure::new(
            libc::EBUSY,
            format!(
                "'{path}' is open for writing, here or on another mount, or was just truncated; \
                 seal it when it is closed everywhere"
            ),
        ),
        Errno::PERM => {
            Failure::new(libc::EPERM, format!("'{path}': only the owner and root may seal a file"))
        }
        Errno::STALE => {
            Failure::new(libc::ESTALE, format!("'{path}': its seal was undone meanwhile"))
        }
        e => Failure::os(format_args!("'{path}'"), e),
    }
}

fn shown(path: &Path, sealed: Option<&pb::SealInfo>) -> Value {
    let mut v = json!({ "path": path.to_string_lossy(), "sealed": sealed.is_some() });
    if sealed.is_some() {
        v["complete"] = false.into();
    }
    if let Some(m) = sealed.and_then(|s| s.manifest.as_ref()) {
        v["complete"] = true.into();
        v["size"] = m.size.into();
        v["sha256"] = hex::encode(&m.sha256).into();
        v["root"] = hex::encode(&m.root).into();
        v["extent_size"] = m.extent_size.into();
        v["extents"] = seal::extents(m.size).into();
        v["sealed_ns"] = m.time_ns.into();
    }
    v
}

fn status(path: &Path, sealed: Option<&pb::SealInfo>) -> String {
    let path = path.to_string_lossy();
    match sealed.map(|s| s.manifest.as_ref()) {
        None => format!("{path}: not sealed\n"),
        Some(None) => format!("{path}: immutable without a manifest (`lfs seal` completes it)\n"),
        Some(Some(m)) => format!(
            "{path}: sealed\n  size:    {}\n  sha256:  {}\n  root:    {}\n  extents: {} of {}\n",
            m.size,
            hex::encode(&m.sha256),
            hex::encode(&m.root),
            seal::extents(m.size),
            m.extent_size,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action(args: &[&str]) -> Result<Action, i32> {
        read(args.iter().map(OsString::from).collect()).map(|(_, a)| a).map_err(|f| f.code)
    }

    #[test]
    fn what_options_ask_for() {
        assert_eq!(action(&["f"]), Ok(Action::Seal));
        assert_eq!(action(&["-rq", "--json", "f", "g"]), Ok(Action::Seal));
        assert_eq!(action(&["--status", "--json", "f"]), Ok(Action::Status));
        assert_eq!(action(&["--sums", "f"]), Ok(Action::Sums));
        assert_eq!(action(&["f", "--undo"]), Ok(Action::Undo));
        for wrong in [
            &[][..],
            &["--undo"],
            &["--undo", "--sums", "f"],
            &["--undo", "--json", "f"],
            &["-x", "f"],
        ] {
            assert_eq!(action(wrong), Err(libc::EINVAL), "{wrong:?}");
        }
    }

    #[test]
    fn statuses_in_words() {
        let path = Path::new("f");
        assert_eq!(status(path, None), "f: not sealed\n");
        assert!(status(path, Some(&pb::SealInfo::default())).contains("without a manifest"));
        let (sha256, root) = (vec![0xab; 32].into(), vec![0xcd; 32].into());
        let m =
            pb::Manifest { size: (4 << 20) + 1, extent_size: 4 << 20, sha256, root, time_ns: 7 };
        let info = pb::SealInfo { id: 1, pages: 1, manifest: Some(m) };
        let text = status(path, Some(&info));
        assert!(
            text.contains(&"ab".repeat(32)) && text.ends_with("extents: 2 of 4194304\n"),
            "{text}"
        );
        let v = shown(path, Some(&info));
        assert_eq!(
            (&v["extents"], &v["sealed_ns"], &v["complete"]),
            (&json!(2), &json!(7), &json!(true))
        );
        assert_eq!(shown(path, None), json!({ "path": "f", "sealed": false }));
    }
}
