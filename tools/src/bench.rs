//! `strake bench` on a local cluster: what the crate `strake-bench` has to know of it.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use strake_bench::cluster::{BenchArgs, Subject, run};
use strake_client::Client;
use strake_proto::Result;
use tokio::runtime::Runtime;

use crate::{config, dev::Cluster, mount};

struct Local(Cluster);

impl Subject for Local {
    fn dir(&self) -> &Path {
        self.0.dir()
    }

    fn copies(&self) -> u32 {
        self.0.copies()
    }

    fn mountpoint(&self) -> Option<PathBuf> {
        self.0.mountpoint()
    }

    fn mount_config(&self, at: &Path) -> String {
        self.0.mount_config(at)
    }

    fn is_mounted(&self, at: &Path) -> Result<bool> {
        mount::is_mounted(at)
    }

    fn unmount(&self, at: &Path, lazy: bool) -> Result<()> {
        mount::unmount(at, lazy)
    }

    fn connect(&self, runtime: &Runtime) -> Result<Client> {
        let key = config::read_client(&self.0.client_key())?;
        runtime.block_on(mount::connect(&self.0.mds_endpoints(), key))
    }
}

/// `strake bench`.
pub fn bench(args: &BenchArgs) -> Result<ExitCode> {
    run(args, &Local(Cluster::open(args.dir())?))
}
