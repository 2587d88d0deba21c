mod lfs;
fn main() {
    let mut args: Vec<_> = std::env::args_os().collect();
    if !args.is_empty() { args.remove(0); }
    std::process::exit(lfs::main(args));
}
