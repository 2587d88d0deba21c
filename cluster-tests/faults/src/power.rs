//! The disk that the servers' folders are on, whose power can be cut.

use std::path::{Path, PathBuf};

use crate::{
    Result,
    disk::Disk,
    lossy::{Lossy, Rule},
};

/// What is lost beside the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// Nothing: the kernel keeps what the processes wrote.
    Stays,
    /// The disk that everything is on, ext4 on a loop device; so every process is killed. Needs
    /// root.
    Ext4,
    /// The disks of the killed servers, on a FUSE file system of this program. Needs root and
    /// `/dev/fuse`.
    Lossy(Rule),
}

/// The disks for a [`Power`].
pub enum Disks {
    None,
    Ext4(Disk),
    Lossy(Lossy),
}

impl Disks {
    pub fn new(power: Power, dir: &Path) -> Result<Disks> {
        Ok(match power {
            Power::Stays => Disks::None,
            Power::Ext4 => Disks::Ext4(Disk::new(dir)?),
            Power::Lossy(rule) => Disks::Lossy(Lossy::new(dir, rule)?),
        })
    }

    /// The folder for the cluster.
    pub fn at<'a>(&'a self, dir: &'a Path) -> &'a Path {
        match self {
            Disks::None => dir,
            Disks::Ext4(d) => d.at(),
            Disks::Lossy(d) => d.at(),
        }
    }

    pub fn stay(&self) -> bool {
        matches!(self, Disks::None)
    }

    /// Cuts the power of these servers' folders, or of everything if the disk cannot cut it for
    /// single folders. Returns a text about the loss, as far as it is known.
    pub fn cut_power(&self, servers: &[PathBuf], seed: u64) -> Result<String> {
        match self {
            Disks::None => Ok(String::new()),
            Disks::Ext4(d) => d.cut_power().map(|()| "; power cut".into()),
            Disks::Lossy(d) => {
                let l = d.cut_power(servers, seed)?;
                Ok(format!(
                    "; power cut: lost {} of {} unsynced sectors, {} of {} unsynced names",
                    l.sectors, l.sectors_unsynced, l.names, l.names_unsynced
                ))
            }
        }
    }

    /// Gives the power back, after all processes that used the disks have ended.
    pub fn power_up(&self) -> Result<()> {
        match self {
            Disks::None => Ok(()),
            Disks::Ext4(d) => d.power_up(),
            Disks::Lossy(d) => {
                d.power_up();
                Ok(())
            }
        }
    }
}
