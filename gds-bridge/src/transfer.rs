//! Ranges of files and of the device's memory that are moved, and what became of a part on a direct
//! path.

use std::sync::Arc;

use strake_fabric::ByTransport;
use strake_proto::Error;

use crate::{FileIo, fault::Fault};

/// A range of a file, and where it lies in the device's memory.
#[derive(Clone)]
pub struct Transfer {
    /// The file.
    pub file: Arc<dyn FileIo>,
    /// First byte in the file.
    pub offset: u64,
    /// First byte in the device's memory.
    pub gpu: u64,
    /// Bytes.
    pub len: u64,
}

/// Why a part could not take the direct path.
pub enum Stop {
    /// The tier failed: another one may work.
    Tier(Fault),
    /// As `Tier`, for this call: these servers or the device lack something of which others and
    /// later calls may have enough.
    Want(Fault),
    /// As `Tier`, but later calls should still try the tier.
    Once(Fault),
    /// Every other path would fail, too.
    Call(Error),
}

impl From<Fault> for Stop {
    fn from(f: Fault) -> Stop {
        if f.is_of_call() { Stop::Call(f.into()) } else { Stop::Tier(f) }
    }
}

/// A part that took the direct path.
#[derive(Clone, Debug, Default)]
pub struct Went {
    /// Its bytes by transport.
    pub by: ByTransport,
    /// Bytes that no storage server wrote, but that the device copied from a slot: zeros of holes,
    /// and bytes that came with an answer.
    pub staged: u64,
    /// The device has computed the checksum of all of it.
    pub summed: bool,
    /// Why it has not, although it should.
    pub unsummed: Option<Fault>,
}

/// A range of a file, and its destination in the device's memory.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub file: &'a dyn FileIo,
    pub offset: u64,
    pub gpu: u64,
    pub len: u64,
}

/// Classifies a fault in what the tier needs from others.
pub fn wanting(f: Fault) -> Stop {
    if f.is_of_call() { Stop::Call(f.into()) } else { Stop::Want(f) }
}

/// The failure of the device to compute a checksum.
pub fn no_sums(f: Fault) -> Fault {
    if f.is_of_call() { f } else { Fault::Sums { why: f.to_string() } }
}
