//! `strake`: every role of StrakeFS in one binary; called as `lfs` it is the Lustre-compatible tool.

mod lfs;

fn main() {
    let mut args: Vec<_> = std::env::args_os().collect();
    let called = args.first().map(std::path::PathBuf::from).unwrap_or_default();
    let as_lfs = called.file_name().is_some_and(|n| n == "lfs");
    if as_lfs {
        args.remove(0);
    } else if args.get(1).is_some_and(|a| a == "lfs") {
        args.drain(..2);
    } else {
        eprintln!("usage: strake lfs COMMAND ...");
        std::process::exit(2);
    }
    std::process::exit(lfs::main(args));
}
