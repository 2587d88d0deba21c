//! `mount.strake` and `umount.strake`: the helpers that mount(8) and umount(8) call (see "external
//! helpers" in their manual pages).

use std::{ffi::OsString, os::fd::OwnedFd, path::PathBuf, process::ExitCode};

use clap::Parser;
use strake_fuse::table;
use strake_proto::{Code, Error, Result};

use super::{MountArgs, UmountArgs, options::Options};

/// Exit status for wrong arguments.
const USAGE: u8 = 1;
/// Exit status if mounting or unmounting failed.
pub const FAILED: u8 = 32;

/// The names that this program may have as a helper.
pub fn is_helper(name: &str) -> bool {
    matches!(name, "mount.strake" | "mount.fuse.strake" | "umount.strake" | "umount.fuse.strake")
}

/// The exit status of mount(8) for an error.
pub fn status(e: &Error) -> ExitCode {
    ExitCode::from(if e.code == Code::Inval { USAGE } else { FAILED })
}

/// The program under one of these names.
pub fn main(name: &str, args: Vec<OsString>) -> ExitCode {
    let result = Call::parse(args)
        .and_then(|call| if name.starts_with('u') { call.umount() } else { call.mount() });
    match result {
        Ok(code) => code,
        Err(e) => {
            eprintln!("{name}: {e}");
            status(&e)
        }
    }
}

/// A helper's arguments.
#[derive(Debug, Default)]
struct Call {
    operands: Vec<String>,
    options: Vec<String>,
    sloppy: bool,
    fake: bool,
    verbose: bool,
    lazy: bool,
    force: bool,
    namespace: Option<PathBuf>,
}

fn bad(m: impl Into<String>) -> Error {
    Error::new(Code::Inval, m)
}

impl Call {
    /// `-f` means fake for one helper and force for the other; both are noted.
    fn parse(args: Vec<OsString>) -> Result<Call> {
        let mut call = Call::default();
        let mut args = args
            .into_iter()
            .map(|a| a.into_string().map_err(|a| bad(format!("{a:?} is not UTF-8"))));
        let mut only_operands = false;
        while let Some(arg) = args.next().transpose()? {
            if arg == "--" && !only_operands {
                only_operands = true;
                continue;
            }
            if only_operands || !arg.starts_with('-') || arg == "-" {
                call.operands.push(arg);
                continue;
            }
            for (i, letter) in arg[1..].char_indices() {
                if !matches!(letter, 'o' | 't' | 'N') {
                    call.letter(letter, &arg)?;
                    continue;
                }
                let rest = &arg[1 + i + 1..];
                let value = match rest.is_empty() {
                    true => args
                        .next()
                        .transpose()?
                        .ok_or_else(|| bad(format!("-{letter} needs a value")))?,
                    false => rest.to_string(),
                };
                match letter {
                    'o' => call.options.push(value),
                    'N' => call.namespace = Some(value.into()),
                    // The type is ours, otherwise mount(8) would have called another helper.
                    _ => {}
                }
                break;
            }
        }
        Ok(call)
    }

    fn letter(&mut self, letter: char, arg: &str) -> Result<()> {
        match letter {
            's' => self.sloppy = true,
            'f' => (self.fake, self.force) = (true, true),
            'v' => self.verbose = true,
            'l' => self.lazy = true,
            // There is nothing of ours in /etc/mtab; mount(8) itself remounts read-only on `-r`.
            'n' | 'i' => {}
            'r' => self.options.push("ro".into()),
            'w' => self.options.push("rw".into()),
            _ => {
                return Err(bad(format!(
                    "'{arg}' is not an argument of a mount helper; see docs/mounting.md"
                )));
            }
        }
        Ok(())
    }

    /// Enters the requested mount namespace. To be called first, with one thread.
    fn enter(&self) -> Result<()> {
        let Some(path) = &self.namespace else { return Ok(()) };
        let failed = |e: std::io::Error| {
            Error::from(e).context(format!("mount namespace {}", path.display()))
        };
        let namespace = OwnedFd::from(std::fs::File::open(path).map_err(failed)?);
        let kind = Some(rustix::thread::LinkNameSpaceType::Mount);
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind)
            .map_err(|e| failed(e.into()))
    }

    /// Makes the folder absolute before the current folder is left: a mount must not keep that
    /// busy.
    fn folder(&mut self) -> Result<()> {
        if let Some(dir) = self.operands.last_mut() {
            let full = std::path::absolute(&dir)?;
            *dir = full
                .to_str()
                .ok_or_else(|| bad(format!("{} is not UTF-8", full.display())))?
                .into();
        }
        Ok(std::env::set_current_dir("/")?)
    }

    fn mount(mut self) -> Result<ExitCode> {
        if self.operands.len() != 2 {
            return Err(bad(
                "expected SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS]; SOURCE is HOST[:PORT][,...]:/SUBTREE",
            ));
        }
        let mut known = Vec::new();
        for text in &self.options {
            let unknown = Options::default().take(text, self.sloppy)?;
            if unknown.is_empty() {
                known.push(text.clone());
                continue;
            }
            let keep = |o: &&str| !unknown.iter().any(|u| o.split('=').next() == Some(u));
            known.push(text.split(',').filter(keep).collect::<Vec<_>>().join(","));
            if self.verbose {
                eprintln!("unknown options: {}", unknown.join(", "));
            }
        }
        self.enter()?;
        self.folder()?;
        let mut argv: Vec<OsString> = vec!["mount".into()];
        known.splice(0..0, self.base());
        argv.extend(
            known.into_iter().filter(|o| !o.is_empty()).flat_map(|o| ["-o".into(), o.into()]),
        );
        argv.push("--".into());
        argv.extend(self.operands.iter().map(Into::into));
        let args = MountOnly::try_parse_from(&argv).map_err(|e| bad(e.to_string()))?.args;
        if self.verbose {
            eprintln!(
                "strake {}",
                argv.iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ")
            );
        }
        if self.fake {
            return super::check_only(&args).map(|()| ExitCode::SUCCESS);
        }
        super::mount(&args, argv)
    }

    /// Options with lower priority than all options of a remount: mount(8) names all flags that
    /// should be set. It never names set-id bits and devices as wanted, so they stay as they are
    /// unless `allow_suid` or `allow_dev` changes them.
    fn base(&self) -> Option<String> {
        let remount = self.options.iter().any(|o| o.split(',').any(|o| o == "remount"));
        let named = table::clear_names().filter(|n| !matches!(*n, "suid" | "dev"));
        remount.then(|| named.collect::<Vec<_>>().join(","))
    }

    fn umount(mut self) -> Result<ExitCode> {
        if self.operands.len() != 1 {
            return Err(bad("expected DIR [-flnrv] [-N NAMESPACE]"));
        }
        self.enter()?;
        self.folder()?;
        let dir = self.operands.remove(0);
        super::umount(&UmountArgs::new(dir.into(), self.lazy, self.force))
    }
}

#[derive(Parser)]
struct MountOnly {
    #[command(flatten)]
    args: MountArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(args: &[&str]) -> Result<Call> {
        Call::parse(args.iter().map(Into::into).collect())
    }

    #[test]
    fn as_mount_calls_it() {
        let c = call(&[
            "m1:/",
            "/mnt",
            "-sfv",
            "-o",
            "ro,_netdev",
            "-N",
            "/proc/1/ns/mnt",
            "-t",
            "fuse.strake",
        ])
        .unwrap();
        assert_eq!(
            (c.operands, c.options),
            (vec!["m1:/".into(), "/mnt".into()], vec!["ro,_netdev".into()])
        );
        assert!(c.sloppy && c.fake && c.verbose);
        assert_eq!(c.namespace.unwrap(), PathBuf::from("/proc/1/ns/mnt"));
        let c = call(&["-nosoft", "--", "-x:/", "-d"]).unwrap();
        assert_eq!(
            (c.operands, c.options),
            (vec!["-x:/".into(), "-d".into()], vec!["soft".into()])
        );
        let c = call(&["/mnt", "-l", "-f", "-v"]).unwrap();
        assert!(c.lazy && c.force);
    }

    #[test]
    fn what_it_does_not_know_is_an_error() {
        for args in [&["-x"][..], &["a", "b", "-o"], &["-N"], &["--options=ro"]] {
            assert_eq!(call(args).unwrap_err().code, Code::Inval, "{args:?}");
        }
        assert!(call(&["a"]).unwrap().mount().unwrap_err().message.contains("SOURCE DIR"));
        assert!(call(&["a", "b"]).unwrap().umount().unwrap_err().message.contains("DIR"));
        let e = call(&["m:/", "/mnt", "-o", "ro,tiemout=5"]).unwrap().mount().unwrap_err();
        assert!(e.message.contains("did you mean 'timeout'"), "{e}");
    }
}
