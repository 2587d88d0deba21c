//! `lfs verify`: reads sealed files and compares them with their manifests, and compares any files
//! with a checksum file of sha256sum(1). See `docs/seal.md`.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use strake_proto::{
    pb,
    seal::{self, Digest},
};

use super::{
    Failure, Output,
    args::{Opt, Parsed, Takes::*, opt, parse},
    content::{self, Content, Meter},
    fs as mount, sums,
};

pub const USAGE: &str = "lfs verify [-q] [--json] FILE|DIR...           compare sealed files with their manifests\n\
                         \x20      lfs verify [-q] [--json] --sums SUMS [DIR]  also with a file of sha256sum(1), `-` for stdin\n";

const OPTIONS: &[Opt] =
    &[opt('q', "quiet", Nothing), opt('\0', "json", Nothing), opt('s', "sums", Value)];

/// The result for a file, best first: the last one that occurs decides the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Verified,
    /// Not sealed, and it matches its checksum.
    Agrees,
    NotSealed,
    /// Immutable, but without a manifest.
    Unfinished,
    /// Another error, which the command prints.
    Failed,
    Unreadable,
    Differs,
}

impl State {
    fn text(self) -> &'static str {
        match self {
            State::Verified => "OK",
            State::Agrees => "OK (not sealed)",
            State::NotSealed => "not sealed",
            State::Unfinished => "not completely sealed (`lfs seal` completes it)",
            State::Failed => "not verified",
            State::Unreadable => "UNREADABLE",
            State::Differs => "FAILED",
        }
    }

    fn word(self) -> &'static str {
        match self {
            State::Verified => "verified",
            State::Agrees => "agrees",
            State::NotSealed => "not-sealed",
            State::Unfinished => "unfinished",
            State::Failed => "failed",
            State::Unreadable => "unreadable",
            State::Differs => "differs",
        }
    }
}

/// A difference from the sealed state.
#[derive(Debug)]
struct Finding {
    what: &'static str,
    /// For an extent: its first byte and its length.
    extent: Option<(u64, u64)>,
    expected: String,
    found: String,
}

impl Finding {
    fn text(&self) -> String {
        let extent =
            self.extent.map_or(String::new(), |(at, len)| format!(" at {at} ({len} bytes)"));
        format!("  {}{extent}: expected {}, found {}\n", self.what, self.expected, self.found)
    }

    fn json(&self) -> Value {
        let (offset, length) = self.extent.unzip();
        json!({ "what": self.what, "offset": offset, "length": length, "expected": self.expected, "found": self.found })
    }
}

#[derive(Debug)]
struct Report {
    state: State,
    sha256: Option<Digest>,
    findings: Vec<Finding>,
}

struct Job {
    quiet: bool,
    json: bool,
    meter: Meter,
    shown: Vec<Value>,
    states: Vec<State>,
    failures: Vec<Failure>,
}

pub fn read(args: Vec<OsString>) -> Result<Parsed, Failure> {
    let p = parse("verify", OPTIONS, args)?;
    match (p.has("sums"), p.operands.len()) {
        (false, 0) => Err(Failure::usage("verify", "no file or directory given".into())),
        (true, 2..) => Err(Failure::usage(
            "verify",
            "with --sums, one directory that its names are relative to".into(),
        )),
        _ => Ok(p),
    }
}

pub fn run(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = read(args)?;
    let mut job = Job {
        quiet: p.has("quiet"),
        json: p.has("json"),
        meter: Meter::new(),
        shown: Vec::new(),
        states: Vec::new(),
        failures: Vec::new(),
    };
    if let Some(sums) = p.value("sums") {
        job.with_sums(sums, p.operands.first().map(Path::new), out)?;
    } else {
        for path in p.operands.iter().map(Path::new) {
            let mut each = |found: Result<PathBuf, Failure>| match found {
                Ok(path) => job.one(&path, None, out),
                Err(f) => job.failed(f),
            };
            match mount::mount_of(path) {
                Ok(_) => content::walk(path, &mut each),
                Err(f) => each(Err(f)),
            }
        }
    }
    job.meter.clear();
    job.end(out);
    Ok(())
}

impl Job {
    /// Compares the files that a checksum file of sha256sum(1) names.
    fn with_sums(
        &mut self,
        from: &OsStr,
        dir: Option<&Path>,
        out: &mut Output,
    ) -> Result<(), Failure> {
        let shown = from.to_string_lossy();
        let text = if from == "-" {
            let mut text = Vec::new();
            std::io::stdin().read_to_end(&mut text).map(|_| text)
        } else {
            fs::read(from)
        };
        let text = text.map_err(|e| content::failed(Path::new(from), &e))?;
        let inside = match dir {
            Some(d) => Some(d.canonicalize().map_err(|e| content::failed(d, &e))?),
            None => None,
        };
        let (lines, bad) = sums::parse(&text);
        for number in &bad {
            self.failed(Failure::invalid(format!("{shown}:{number}: not a line of sha256sum(1)")));
        }
        if lines.is_empty() && bad.is_empty() {
            return Err(Failure::invalid(format!("{shown}: it names no file")));
        }
        for line in lines {
            let path = dir.map_or(PathBuf::from(&line.name), |d| d.join(&line.name));
            let wrong =
                |f: Failure| Failure { text: format!("{shown}:{}: {}", line.number, f.text), ..f };
            let checked =
                path.canonicalize().map_err(|e| content::failed(&path, &e)).and_then(|real| {
                    if inside.as_ref().is_some_and(|d| !real.starts_with(d)) {
                        let m = format!(
                            "'{}' lies outside of the directory that was named",
                            path.display()
                        );
                        return Err(Failure::invalid(m));
                    }
                    if !real.is_file() {
                        return Err(Failure::invalid(format!(
                            "'{}' is not a regular file",
                            path.display()
                        )));
                    }
                    mount::mount_of(&real)
                });
            match checked {
                Ok(_) => self.one(&path, Some(line.sum), out),
                Err(f) => self.failed(wrong(f)),
            }
        }
        Ok(())
    }

    fn failed(&mut self, f: Failure) {
        self.states.push(State::Failed);
        if self.json {
            self.shown
                .push(json!({ "state": State::Failed.word(), "error": f.text, "errno": f.code }));
        }
        self.failures.push(f);
    }

    fn one(&mut self, path: &Path, sum: Option<Digest>, out: &mut Output) {
        let report = match verify(path, sum, &mut self.meter) {
            Ok(r) => r,
            Err(f) => return self.failed(f),
        };
        self.meter.clear();
        let bad = report.state > State::Agrees;
        if self.json {
            self.shown.push(json!({
                "path": path.to_string_lossy(),
                "state": report.state.word(),
                "sha256": report.sha256.map(hex::encode),
                "findings": report.findings.iter().map(Finding::json).collect::<Vec<_>>(),
            }));
        } else if bad || !self.quiet {
            out.print(&format!("{}: {}\n", path.to_string_lossy(), report.state.text()));
            report.findings.iter().for_each(|f| out.print(&f.text()));
        }
        self.states.push(report.state);
    }

    /// The exit status; also prints how many files there were of each kind if not all are right.
    fn end(self, out: &mut Output) {
        let of = |s: &State| self.states.iter().filter(|x| *x == s).count();
        if self.json {
            let mut doc = json!({ "files": self.shown });
            for s in ALL {
                doc[s.word()] = of(&s).into();
            }
            out.print(&format!("{doc:#}\n"));
        }
        let worst = self.states.iter().max().copied().unwrap_or(State::Verified);
        let code = match worst {
            State::Verified | State::Agrees => 0,
            State::NotSealed | State::Unfinished => libc::ENODATA,
            State::Failed => self.failures.first().map_or(libc::EIO, |f| f.code),
            State::Unreadable => libc::EIO,
            State::Differs => libc::EBADMSG,
        };
        if code != 0 {
            let kinds: Vec<_> = ALL
                .iter()
                .filter(|s| of(s) > 0)
                .map(|s| format!("{} {}", of(s), s.word()))
                .collect();
            out.fail(Failure::new(
                code,
                format!("{} files: {}", self.states.len(), kinds.join(", ")),
            ));
        }
        self.failures.into_iter().for_each(|f| out.fail(f));
    }
}

const ALL: [State; 7] = [
    State::Verified,
    State::Agrees,
    State::NotSealed,
    State::Unfinished,
    State::Failed,
    State::Unreadable,
    State::Differs,
];

/// Reads a file, and compares it with its manifest and with `sum`. Without either, it is not read.
fn verify(path: &Path, sum: Option<Digest>, meter: &mut Meter) -> Result<Report, Failure> {
    let failed = |e| content::failed(path, &e);
    let real = path.canonicalize().map_err(failed)?;
    let sealed = mount::seal(&real)?;
    let manifest = sealed.as_ref().and_then(|s| s.manifest.as_ref());
    if manifest.is_none() && sum.is_none() {
        let state = if sealed.is_some() { State::Unfinished } else { State::NotSealed };
        return Ok(Report { state, sha256: None, findings: Vec::new() });
    }
    let expected = match manifest {
        Some(m) => Some((m, mount::digests(&real, m)?)),
        None => None,
    };
    let file = content::open(&real).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let extent_size = seal::extent_size(size);
    let found = content::read(&file, size, extent_size, |done| meter.at(path, done, size));
    meter.file_done(size);
    Ok(compare(size, &found, expected, sum))
}

/// Compares `size` found bytes with a manifest with these digests, or a checksum, or both.
fn compare(
    size: u64,
    found: &Content,
    expected: Option<(&pb::Manifest, Vec<Digest>)>,
    sum: Option<Digest>,
) -> Report {
    let mut findings = Vec::new();
    let mut note = |what, extent, expected: String, found: String| {
        findings.push(Finding { what, extent, expected, found });
    };
    let sealed = expected.is_some();
    let (extent_size, mut unread) = (seal::extent_size(size), 0);
    for ((at, is), n) in (0..size).step_by(extent_size as usize).zip(&found.extents).zip(0..) {
        let extent = Some((at, extent_size.min(size - at)));
        let should = expected.as_ref().and_then(|(_, digests)| digests.get(n));
        let should = should.map_or_else(|| "anything readable".into(), hex::encode);
        match is {
            Err(u) => {
                unread += 1;
                let why = u.why.to_string();
                let why = why.split(" (os error").next().unwrap_or_default();
                note(
                    "extent",
                    extent,
                    should,
                    format!("nothing, unreadable from byte {} on: {why}", u.offset),
                );
            }
            Ok(d) if sealed && hex::encode(d) != should => {
                note("extent", extent, should, hex::encode(d))
            }
            Ok(_) => {}
        }
    }
    let whole = found.sha256.map(hex::encode);
    if let Some((m, digests)) = &expected {
        if m.size != size {
            note("size", None, m.size.to_string(), size.to_string());
        }
        let root = seal::root(digests);
        if root[..] != m.root[..] {
            note("root of the manifest", None, hex::encode(&m.root), hex::encode(root));
        }
        if let Some(is) = whole.as_ref().filter(|is| **is != hex::encode(&m.sha256)) {
            note("SHA-256", None, hex::encode(&m.sha256), is.clone());
        }
    }
    if let (Some(sum), Some(is)) = (sum, whole)
        && is != hex::encode(sum)
    {
        note("sum", None, hex::encode(sum), is);
    }
    let state = match (findings.len() - unread, unread) {
        (1.., _) => State::Differs,
        (0, 1..) => State::Unreadable,
        (0, 0) if sealed => State::Verified,
        (0, 0) => State::Agrees,
    };
    Report { state, sha256: found.sha256, findings }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;
    use content::Unread;

    const EXTENT: u64 = seal::EXTENT;

    /// A file of three extents, the last of them one byte.
    fn sealed() -> (Content, pb::Manifest, Vec<Digest>) {
        let digests: Vec<Digest> = [1, 2, 3].map(|n| [n; 32]).to_vec();
        let sha256: Digest = Sha256::digest("x").into();
        let m = pb::Manifest {
            size: 2 * EXTENT + 1,
            extent_size: EXTENT,
            sha256: sha256.to_vec().into(),
            root: seal::root(&digests).to_vec().into(),
            time_ns: 0,
        };
        (
            Content { sha256: Some(sha256), extents: digests.iter().copied().map(Ok).collect() },
            m,
            digests,
        )
    }

    #[test]
    fn what_is_as_it_was_sealed_is_verified() {
        let (found, m, digests) = sealed();
        let sum = found.sha256;
        for sum in [None, sum] {
            let r = compare(m.size, &found, Some((&m, digests.clone())), sum);
            assert_eq!((r.state, r.findings.len()), (State::Verified, 0));
        }
        assert_eq!(compare(m.size, &found, None, sum).state, State::Agrees);
    }

    #[test]
    fn each_difference_is_named() {
        let (mut found, m, digests) = sealed();
        found.extents[2] = Ok([9; 32]);
        found.sha256 = Some([8; 32]);
        let r = compare(m.size, &found, Some((&m, digests.clone())), Some([7; 32]));
        assert_eq!(r.state, State::Differs);
        let text: String = r.findings.iter().map(Finding::text).collect();
        let (three, nine) = ("03".repeat(32), "09".repeat(32));
        let extent =
            format!("  extent at {} (1 bytes): expected {three}, found {nine}\n", 2 * EXTENT);
        assert!(text.starts_with(&extent), "{text}");
        assert_eq!(
            r.findings.iter().map(|f| f.what).collect::<Vec<_>>(),
            ["extent", "SHA-256", "sum"]
        );
        assert_eq!(r.findings[0].json()["offset"], 2 * EXTENT);

        let (found, mut m, digests) = sealed();
        m.root = vec![0; 32].into();
        let r = compare(m.size, &found, Some((&m, digests.clone())), None);
        assert_eq!((r.state, r.findings[0].what), (State::Differs, "root of the manifest"));
        m.size -= 1;
        let r = compare(m.size + 1, &found, Some((&m, digests)), None);
        assert_eq!((r.state, r.findings[0].what), (State::Differs, "size"));
    }

    #[test]
    fn what_cannot_be_read_is_no_difference() {
        let (mut found, m, digests) = sealed();
        let why = std::io::Error::from_raw_os_error(libc::EIO);
        found.extents[1] = Err(Unread { offset: EXTENT + 4096, why });
        found.sha256 = None;
        let r = compare(m.size, &found, Some((&m, digests.clone())), None);
        assert_eq!((r.state, r.findings.len()), (State::Unreadable, 1));
        let text = r.findings[0].text();
        assert!(text.contains(&format!("extent at {EXTENT} ({EXTENT} bytes)")), "{text}");
        assert!(text.contains(&format!("byte {} on: Input/output error", EXTENT + 4096)), "{text}");
        assert_eq!(compare(m.size, &found, None, Some([7; 32])).state, State::Unreadable);
        // But another difference is reported.
        found.extents[0] = Ok([7; 32]);
        assert_eq!(compare(m.size, &found, Some((&m, digests)), None).state, State::Differs);
    }

    #[test]
    fn arguments() {
        let code = |args: &[&str]| {
            read(args.iter().map(OsString::from).collect()).err().map_or(0, |f| f.code)
        };
        for good in [
            &["d"][..],
            &["-q", "a", "b"],
            &["--sums", "s"],
            &["--sums=s", "d", "--json"],
            &["-s-", "d"],
        ] {
            assert_eq!(code(good), 0, "{good:?}");
        }
        for wrong in [&[][..], &["--sums"], &["--sums", "s", "a", "b"], &["--all", "d"]] {
            assert_eq!(code(wrong), libc::EINVAL, "{wrong:?}");
        }
    }
}
