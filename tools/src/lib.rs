//! `strake`: every role of StrakeFS in one binary. Invoked as `lfs`, it is the Lustre-like tool; as
//! `mount.strake`, the helper of mount(8). It is a library so that its parsers of external text can
//! be fuzzed; the program is [`main`].
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

mod add_target;
mod address;
mod admin;
mod answers;
mod bench;
mod clients;
mod config;
mod config_check;
mod dev;
mod fsck;
mod gds;
mod health;
mod init;
mod key;
mod lfs;
mod lifeline;
mod losses;
mod members;
mod mount;
mod nodes;
mod pools;
mod pretend;
mod scrub;
mod serve;
mod server_config;
mod servers;
mod status;
mod targets;
mod upgrade;
mod wait;

use std::{ffi::OsString, path::Path, process::ExitCode};

use clap::{Parser, Subcommand};
use strake_proto::{Code, Error, Result};
use tokio::signal::unix::{SignalKind, signal};

const MAX_THREADS: usize = 1024;

/// A scale-out parallel file system for AI clusters.
#[derive(Parser)]
#[command(name = "strake", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a metadata server. With a command: manage the group of metadata servers.
    Mds(serve::MdsArgs),
    /// Run a storage server.
    Oss(serve::OssArgs),
    /// Mount a file system.
    Mount(mount::MountArgs),
    /// Unmount a file system and wait until all written data is safe.
    Umount(mount::UmountArgs),
    /// Show the counters of a mount: requests, bytes, answers from memory.
    Stats(mount::StatsArgs),
    /// Start a cluster of real processes on this machine, or restart the missing ones.
    Up(dev::UpArgs),
    /// Unmount and stop a local cluster. Its data stays.
    Down(dev::DownArgs),
    /// Add, empty, replace and remove storage targets while the file system is in use.
    #[command(subcommand)]
    Target(targets::Command),
    /// Drain and remove all targets of a storage server.
    #[command(subcommand)]
    Node(nodes::Command),
    /// Show the clients that have the file system mounted, and end their sessions.
    #[command(subcommand)]
    Client(clients::Command),
    /// Create, fill and remove pools of targets.
    #[command(subcommand)]
    Pool(pools::Command),
    /// Raise the feature level of a cluster once all its members run a newer version.
    #[command(subcommand)]
    Upgrade(upgrade::Command),
    /// Write the keys and the configuration files of one host of a new cluster.
    Init(init::InitArgs),
    /// Make the cluster key and the clients' key file.
    #[command(subcommand)]
    Key(key::Command),
    /// As `key client`.
    #[command(hide = true)]
    ClientKey(key::ClientArgs),
    /// Show whether the cluster is healthy and why not, its servers, targets, space and clients.
    Status(status::StatusArgs),
    /// Wait until the cluster is healthy, or all its data has the copies that it should.
    Wait(wait::WaitArgs),
    /// Measure the file system, and beside it the limits of this machine.
    Bench(strake_bench::cluster::BenchArgs),
    /// The mount with which `bench` measures the limit of FUSE.
    #[cfg(feature = "fuser")]
    #[command(hide = true)]
    MemoryMount(strake_bench::cluster::MemoryArgs),
    /// Compare metadata with stored chunks. With --repair: repair what differs.
    Fsck(fsck::FsckArgs),
    /// Have storage targets verify all data they hold and repair damage. Or show what was found.
    Scrub(scrub::ScrubArgs),
    /// Show which paths between files and GPU memory this machine has.
    #[command(subcommand)]
    Gds(gds::Command),
    /// The user tool with Lustre's commands. The binary also runs it when called as `lfs`.
    #[command(disable_help_flag = true)]
    Lfs {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// The program: parses the command line and runs the command.
pub fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    let called_as = argv.first().and_then(|a| Path::new(a).file_name()).unwrap_or_default();
    if called_as == "lfs" {
        end_with_the_pipe();
        return exit_code(lfs::main(argv[1..].to_vec()));
    }
    if let Some(name) = called_as.to_str().filter(|n| mount::helper::is_helper(n)) {
        return mount::helper::main(name, argv[1..].to_vec());
    }
    let command = Cli::parse().command;
    let mounts = matches!(command, Command::Mount(_) | Command::Umount(_));
    let prints = matches!(
        command,
        Command::Status(_)
            | Command::Wait(_)
            | Command::Client(_)
            | Command::Scrub(_)
            | Command::Stats(_)
            | Command::Gds(_)
    );
    if prints || matches!(command, Command::Lfs { .. }) {
        end_with_the_pipe();
    }
    let result = match command {
        Command::Mds(a) => serve::mds(a),
        Command::Oss(a) => serve::oss(a),
        Command::Mount(a) => mount::mount(&a, argv[1..].to_vec()),
        Command::Umount(a) => mount::umount(&a),
        Command::Stats(a) => mount::stats(&a),
        Command::Up(a) => dev::up(a),
        Command::Down(a) => dev::down(&a),
        Command::Target(c) => targets::run(c),
        Command::Node(c) => nodes::run(c),
        Command::Client(c) => clients::run(c),
        Command::Pool(c) => pools::run(c),
        Command::Upgrade(c) => upgrade::run(c),
        Command::Init(a) => init::init(&a),
        Command::Key(c) => key::run(&c),
        Command::ClientKey(a) => key::client(&a),
        Command::Status(a) => status::status(&a),
        Command::Wait(a) => wait::wait(&a),
        Command::Bench(a) => bench::bench(&a),
        #[cfg(feature = "fuser")]
        Command::MemoryMount(a) => strake_bench::cluster::memory_mount(&a),
        Command::Fsck(a) => fsck::fsck(&a),
        Command::Scrub(a) => scrub::scrub(&a),
        Command::Gds(c) => gds::run(c),
        Command::Lfs { args } => return exit_code(lfs::main(args)),
    };
    match result {
        Ok(code) => code,
        Err(e) => {
            eprintln!("strake: {e}");
            if mounts { mount::helper::status(&e) } else { ExitCode::FAILURE }
        }
    }
}

/// A closed pipe (`strake status | head`) ends the program quietly instead of by a panic in
/// println. Only for commands that just print: it would end a server or a mount whose peer or log
/// reader goes away.
fn end_with_the_pipe() {
    // SAFETY: restoring a signal's default disposition before any thread exists.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// For the fuzz targets: parsers of external text, without acting on what they read.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::{
        config::decode_hex,
        config_check::read_text,
        lfs::{read_arguments, show},
        mount::check_words as read_mount_words,
    };
}

fn exit_code(status: i32) -> ExitCode {
    ExitCode::from(u8::try_from(status).unwrap_or(1))
}

/// Runs a future on a multi-threaded runtime with `threads` workers (0 = one per core).
fn run<T>(threads: usize, future: impl Future<Output = Result<T>>) -> Result<T> {
    if threads > MAX_THREADS {
        return Err(Error::new(
            Code::Inval,
            format!("`threads` is at most {MAX_THREADS}; 0 means one per core"),
        ));
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if threads > 0 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build()?.block_on(future)
}

/// Waits for SIGTERM or SIGINT.
async fn until_signal() -> Result<()> {
    let mut term = signal(SignalKind::terminate()).map_err(Error::from)?;
    let mut int = signal(SignalKind::interrupt()).map_err(Error::from)?;
    tokio::select! {
        biased;
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}

/// `filter` comes from [`config::log_filter`].
fn init_log(filter: &str) {
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_ansi(ansi)
        .with_target(false)
        .with_writer(std::io::stderr)
        // A log line that cannot be written (full disk, closed pipe) is lost; reporting that on
        // stderr would panic.
        .log_internal_errors(false)
        .init();
}
