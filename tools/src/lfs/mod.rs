//! `lfs`: the commands and the output of Lustre's tool, for existing scripts and habits.
//!
//! It finds a StrakeFS mount and asks it through extended attributes (see `docs/fuse.md`), so it
//! has exactly the rights of its caller. Formats follow Lustre 2.17's as documented in its manual
//! pages. The functions that print them are pure, and are compared with published output byte for
//! byte.

mod args;
mod content;
mod df;
mod dirs;
mod fids;
mod format;
mod fs;
mod getstripe;
mod path;
mod seal;
pub(crate) mod setstripe;
mod sums;
mod targets;
mod verify;

use std::{ffi::OsString, fmt::Write as _, io::Write as _, os::unix::ffi::OsStrExt as _};

use strake_proto::{Error, Ino, map::MapView, pb};

/// Why a command failed: a line for stderr and the exit status, a Linux errno as with Lustre's
/// `lfs`.
#[derive(Debug)]
pub struct Failure {
    pub code: i32,
    /// Without the command's name.
    pub text: String,
    /// Show the command's usage too.
    usage: bool,
}

impl Failure {
    fn new(code: i32, text: impl Into<String>) -> Failure {
        Failure { code, text: text.into(), usage: false }
    }
    fn invalid(text: impl Into<String>) -> Failure {
        Failure::new(libc::EINVAL, text)
    }
    fn usage(_command: &str, text: String) -> Failure {
        Failure { code: libc::EINVAL, text, usage: true }
    }
    fn unsupported(_command: &str, option: &str) -> Failure {
        Failure::new(libc::EOPNOTSUPP, format!("option '{option}' is not supported by StrakeFS"))
    }
    /// A failure with the errno of a failed system call, and what was tried.
    fn os(what: impl std::fmt::Display, e: rustix::io::Errno) -> Failure {
        let why = std::io::Error::from_raw_os_error(e.raw_os_error());
        let why = why.to_string();
        let why = why.split(" (os error").next().unwrap_or_default();
        Failure::new(e.raw_os_error(), format!("{what}: {why}"))
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        Failure::new(e.errno(), e.message)
    }
}

/// The output of a command, kept until it ends, and failures that did not stop it.
#[derive(Default)]
pub struct Output {
    text: Vec<u8>,
    failures: Vec<Failure>,
}

impl Output {
    fn print(&mut self, s: &str) {
        self.print_bytes(s.as_bytes());
    }
    fn print_bytes(&mut self, s: &[u8]) {
        self.text.extend_from_slice(s);
        // Long listings are printed before they are complete.
        if self.text.len() > 64 << 10 {
            self.flush();
        }
    }
    fn flush(&mut self) {
        // If the reader closed the pipe (`| head`), that is not a failure.
        let _ = std::io::stdout().write_all(&self.text);
        let _ = std::io::stdout().flush();
        self.text.clear();
    }
    fn fail(&mut self, f: Failure) {
        self.failures.push(f);
    }
}

type Run = fn(Vec<OsString>, &mut Output) -> Result<(), Failure>;

struct Command {
    name: &'static str,
    about: &'static str,
    usage: &'static str,
    run: Run,
}

const COMMANDS: &[Command] = &[
    Command {
        name: "setstripe",
        about: "Set how a new file, or new files of a directory, are striped and copied.",
        usage: setstripe::USAGE,
        run: setstripe::run,
    },
    Command {
        name: "getstripe",
        about: "Show how files are striped, and where their stripes are.",
        usage: getstripe::USAGE,
        run: getstripe::run,
    },
    Command {
        name: "setdirstripe",
        about: "Make a directory (as mkdir).",
        usage: dirs::MKDIR_USAGE,
        run: dirs::mkdir,
    },
    Command {
        name: "getdirstripe",
        about: "Show which metadata target has a directory.",
        usage: dirs::GET_USAGE,
        run: dirs::getdirstripe,
    },
    Command {
        name: "mkdir",
        about: "Make a directory.",
        usage: dirs::MKDIR_USAGE,
        run: dirs::mkdir,
    },
    Command {
        name: "pool_list",
        about: "Show pools of targets, or the targets of a pool.",
        usage: targets::POOL_USAGE,
        run: targets::pool_list,
    },
    Command {
        name: "check",
        about: "Show whether servers can be reached.",
        usage: targets::CHECK_USAGE,
        run: targets::check,
    },
    Command {
        name: "osts",
        about: "List storage targets (OSTs).",
        usage: "lfs osts [PATH]\n",
        run: targets::osts,
    },
    Command {
        name: "mdts",
        about: "List metadata targets (MDTs).",
        usage: "lfs mdts [PATH]\n",
        run: targets::mdts,
    },
    Command {
        name: "df",
        about: "Show space and inodes by target.",
        usage: df::USAGE,
        run: df::run,
    },
    Command {
        name: "path2fid",
        about: "Show the FID of a path.",
        usage: "lfs path2fid [--parents] PATH...\n",
        run: fids::path2fid,
    },
    Command {
        name: "fid2path",
        about: "Show the paths of a FID.",
        usage: "lfs fid2path [-0] [-n] FSNAME|ROOT FID...\n",
        run: fids::fid2path,
    },
    Command {
        name: "path",
        about: "Show the connections over which a mount reaches the servers of a file.",
        usage: path::USAGE,
        run: path::run,
    },
    Command {
        name: "seal",
        about: "Make files immutable, with their SHA-256.",
        usage: seal::USAGE,
        run: seal::run,
    },
    Command {
        name: "verify",
        about: "Read sealed files and compare them with their sums.",
        usage: verify::USAGE,
        run: verify::run,
    },
    Command {
        name: "help",
        about: "Show the usage of commands.",
        usage: "lfs help [COMMAND]\n",
        run: help,
    },
];

/// Lustre's other commands: known, and refused with an explanation.
const LACKING: &[&str] = &[
    "rm_entry",
    "rmentry",
    "unlink_foreign",
    "find",
    "getname",
    "setquota",
    "quota",
    "project",
    "flushctx",
    "changelog",
    "changelog_clear",
    "rmfid",
    "data_version",
    "hsm",
    "hsm_state",
    "hsm_set",
    "hsm_clear",
    "hsm_action",
    "hsm_archive",
    "hsm_restore",
    "hsm_release",
    "hsm_remove",
    "hsm_cancel",
    "swap_layouts",
    "migrate",
    "mv",
    "ladvise",
    "mirror",
    "getsom",
    "somsync",
    "heat_get",
    "heat_set",
    "pcc",
    // Commands of Lustre's interactive mode.
    "exit",
    "quit",
];

/// Runs `lfs` with its arguments (without the program's name) and returns the exit status.
pub fn main(mut args: Vec<OsString>) -> i32 {
    if args.is_empty() {
        eprint!("{}", overview());
        return libc::EINVAL;
    }
    let name = args.remove(0).to_string_lossy().into_owned();
    match &name[..] {
        "--version" | "-V" => {
            println!("lfs {}", env!("CARGO_PKG_VERSION"));
            return 0;
        }
        "--list-commands" => {
            let names: Vec<&str> = COMMANDS.iter().map(|c| c.name).collect();
            println!("{}", names.join("\n"));
            return 0;
        }
        "--help" | "-h" => {
            print!("{}", overview());
            return 0;
        }
        _ => {}
    }
    let Some(command) = COMMANDS.iter().find(|c| c.name == name) else {
        if LACKING.contains(&&name[..]) {
            eprintln!("lfs: command '{name}' is not supported by StrakeFS");
            return libc::EOPNOTSUPP;
        }
        eprintln!("lfs: '{name}' is not a command; `lfs help` lists them");
        return libc::EINVAL;
    };
    if args.iter().take_while(|a| *a != "--").any(|a| a == "--help") {
        print!("{}", help_of(command));
        return 0;
    }
    let mut out = Output::default();
    let result = (command.run)(args, &mut out);
    out.flush();
    let mut code = 0;
    for f in out.failures.into_iter().chain(result.err()) {
        eprintln!("lfs {name}: {}", f.text);
        if f.usage {
            eprint!("usage: {}", command.usage);
        }
        code = if code == 0 { f.code } else { code };
    }
    code
}

fn overview() -> String {
    let mut s = String::from("usage: lfs COMMAND [OPTION]... [ARGUMENT]...\nCommands:\n");
    for c in COMMANDS {
        let _ = writeln!(s, "\t{:14}{}", c.name, c.about);
    }
    s.push_str("`lfs COMMAND --help` shows a command's options.\n");
    s
}

fn help_of(c: &Command) -> String {
    format!("{}\nusage: {}", c.about, c.usage)
}

fn help(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    if args.is_empty() {
        out.print(&overview());
    }
    for a in args {
        let name = a.to_string_lossy();
        let found = COMMANDS.iter().find(|c| c.name == name);
        let found = found.ok_or_else(|| Failure::invalid(format!("'{name}' is not a command")))?;
        out.print(&help_of(found));
    }
    Ok(())
}

/// Parses the arguments of a command as the command does, and does nothing else.
pub fn read_arguments(command: u8, args: Vec<OsString>, map: &MapView, space: &pb::StatfsReply) {
    let _ = match command % 10 {
        0 => setstripe::read(args).map(drop),
        1 => getstripe::read(args, map).map(drop),
        2 => df::read(args, map, space).map(drop),
        3 => dirs::read(args).map(drop),
        4 => fids::read(args),
        5 => seal::read(args).map(drop),
        6 => verify::read(args).map(drop),
        7 => path::read(args).map(drop),
        8 => {
            args.iter().for_each(|text| drop(sums::parse(text.as_bytes())));
            Ok(())
        }
        _ => targets::read(args, map),
    };
}

/// The output of `lfs getstripe` for a file or a directory, with the options that `flags` stands
/// for.
pub fn show(
    flags: u32,
    ino: Ino,
    layout: &pb::Layout,
    spec: &pb::LayoutSpec,
    map: &MapView,
) -> String {
    getstripe::show_all(flags, ino, layout, spec, map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(args: &[&str]) -> i32 {
        main(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn exit_statuses() {
        assert_eq!(run(&["--version"]), 0);
        assert_eq!(run(&["--list-commands"]), 0);
        assert_eq!(run(&["help", "df"]), 0);
        assert_eq!(run(&["help", "nonsense"]), libc::EINVAL);
        assert_eq!(run(&["nonsense"]), libc::EINVAL);
        assert_eq!(run(&["hsm_state", "f"]), libc::EOPNOTSUPP);
        assert_eq!(run(&["quit"]), libc::EOPNOTSUPP);
        assert_eq!(run(&["getstripe", "-c", "-m", "f"]), libc::EINVAL);
        assert_eq!(run(&["setstripe", "-E", "1M", "f"]), libc::EOPNOTSUPP);
        assert_eq!(run(&["getstripe", "/does/not/exist"]), libc::ENOENT);
        assert_eq!(run(&["setstripe", "-c", "x", "f"]), libc::EINVAL);
        assert_eq!(run(&["path2fid", "/"]), libc::EOPNOTSUPP, "not a StrakeFS mount");
    }

    #[test]
    fn every_command_is_in_one_list() {
        for c in COMMANDS {
            assert!(!LACKING.contains(&c.name), "{}", c.name);
            assert!(c.usage.starts_with("lfs ") && c.usage.ends_with('\n'), "{}", c.name);
            assert_eq!(run(&[c.name, "-x", "--help"]), 0, "{}", c.name);
            assert!(help_of(c).contains("\nusage: lfs "), "{}", c.name);
        }
    }
}
