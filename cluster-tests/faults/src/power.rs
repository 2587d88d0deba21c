//! The disk that the servers' folders lie on, and whose power it can lose.

use std::path::{Path, PathBuf};

use crate::{
    Result,
    disk::Disk,
    lossy::{Lossy, Rule},
};

/// What dies beside the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// Nothing: the kernel keeps what they wrote.
    Stays,
    /// The disk that everything is on: ext4 on a loop device, so every process dies. Needs root.
    Ext4,
    /// The disks of the killed servers, on a file system of our own. Needs root and `/dev/fuse`.
    Lossy(Rule),
}

/// As [`Power`] says.
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

    /// Where the cluster goes.
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

    /// The power of these servers' folders goes; all of it where it cannot go apart. Says what it
    /// took, where that is known.
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

    /// After all processes that used them are gone.
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
