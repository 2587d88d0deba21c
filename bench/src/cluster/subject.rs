//! The cluster that is measured.

use std::path::{Path, PathBuf};

use strake_client::Client;
use strake_proto::Result;
use tokio::runtime::Runtime;

/// The running local cluster that is measured, and what the program that runs this knows of mounts.
pub trait Subject {
    /// The cluster's folder. Scratch files go below it, so that the limits are of the same device.
    fn dir(&self) -> &Path;
    /// Copies of each byte.
    fn copies(&self) -> u32;
    /// Where the cluster is to be mounted; `None`: nowhere.
    fn mountpoint(&self) -> Option<PathBuf>;
    /// Configuration file for a mount of the cluster at this place.
    fn mount_config(&self, at: &Path) -> String;
    /// Whether a StrakeFS is mounted there.
    fn is_mounted(&self, at: &Path) -> Result<bool>;
    /// Unmounts what is mounted there.
    fn unmount(&self, at: &Path, lazy: bool) -> Result<()>;
    /// A client of the cluster, whose tasks run on this runtime.
    fn connect(&self, runtime: &Runtime) -> Result<Client>;
}
