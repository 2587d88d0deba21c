//! The options of a bridge.

use std::path::PathBuf;

use strake_fabric::REGION;
use strake_proto::{Code, Error, Result};

use crate::{Policy, pins::MIN_SLOT};

/// Where the kernel describes the machine.
pub(crate) const SYSFS: &str = "/sys";

/// Options of a bridge. The defaults are for one device.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads with a stream each, 1 to 64.
    pub workers: usize,
    /// Parts that each worker has under way, and its slots; 2 to 16.
    pub slots: usize,
    /// Largest part, bytes: a power of two from 256 KiB to 4 MiB.
    pub slot_bytes: usize,
    /// Limit of host memory that all bridges of the process have pinned when this one pins more, in
    /// bytes; memory that several use counts once. `None`: half of `RLIMIT_MEMLOCK`, or 512 MiB for
    /// this bridge alone where that is unlimited.
    pub pinned_limit: Option<u64>,
    /// Allows `GpuRdma` and `LocalGds` although the device does not verify their bytes: those are
    /// only verified at the storage server, or when the copy was made.
    pub accept_oss_checksum: bool,
    /// The device computes checksums of what it received and sent, and these are compared with the
    /// host's. This costs a part of the device's and the processor's time. Where the device cannot,
    /// reports say so.
    pub verify_on_gpu: bool,
    /// The tiers that bytes may take, in addition to the policy of each call.
    pub policy: Policy,
    /// Folder with copies of sealed files on this node, for `LocalGds`.
    pub local: Option<PathBuf>,
    /// The program that opens cuFile before this process does: `strake`, by its path or name.
    pub prober: PathBuf,
    /// Where the kernel tells which memory and processors are near the device. A folder other than
    /// `/sys` is for tests.
    pub sysfs: PathBuf,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            workers: 4,
            slots: 3,
            slot_bytes: REGION,
            pinned_limit: None,
            accept_oss_checksum: false,
            verify_on_gpu: false,
            policy: Policy::Prefer,
            local: None,
            prober: "strake".into(),
            sysfs: SYSFS.into(),
        }
    }
}

impl Options {
    /// `EINVAL`: out of range.
    pub(crate) fn check(&self) -> Result<()> {
        let sizes = MIN_SLOT..=REGION;
        let what = match self {
            o if !(1..=64).contains(&o.workers) => "workers must be 1 to 64",
            o if !(2..=16).contains(&o.slots) => "slots must be 2 to 16",
            o if !sizes.contains(&o.slot_bytes) || !o.slot_bytes.is_power_of_two() => {
                "slot_bytes must be a power of two from 256 KiB to 4 MiB"
            }
            _ => return Ok(()),
        };
        Err(Error::new(Code::Inval, what))
    }
}
