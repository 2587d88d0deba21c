//! Mounts the memory limit at a folder until it is unmounted: `cargo run --release -p strake-bench
//! --example fuse_limit -- FOLDER [MIB] [THREADS]`. Then, for example, `dd if=FOLDER/data
//! of=/dev/null bs=1M iflag=direct`.

use strake_bench::cluster::memory_fs::mount_memory_limit;
use strake_fuse::MountConfig;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("usage: fuse_limit FOLDER [MIB] [THREADS]")?;
    let mib: u64 = args.next().map_or(Ok(4096), |a| a.parse())?;
    let mut cfg = MountConfig::new(folder);
    if let Some(threads) = args.next() {
        cfg.threads = threads.parse()?;
    }
    let limit = mount_memory_limit(&cfg, mib << 20)?;
    limit.ended().await?;
    Ok(())
}
