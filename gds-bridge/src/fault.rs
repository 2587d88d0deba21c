//! Errors of a device and of the memory given to it.

use std::fmt;

use strake_proto::{Code, Error};

/// An error of a device, its driver, or the memory given to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An address that belongs to no allocation of this context.
    Foreign {
        /// The address.
        addr: u64,
    },
    /// An address of an allocation that was freed.
    Freed {
        /// The address.
        addr: u64,
    },
    /// A range that continues beyond its allocation.
    Beyond {
        /// Where it starts.
        addr: u64,
        /// Its bytes.
        len: u64,
        /// Where the allocation ends.
        end: u64,
    },
    /// The context was destroyed, or an error of the device ended it.
    ContextGone,
    /// The device has no memory left.
    NoMemory {
        /// Bytes requested.
        bytes: u64,
    },
    /// Checksums differ: the device's memory is not what was copied there, or what came from it is
    /// not what it holds.
    Damaged {
        /// Its address.
        addr: u64,
        /// Its bytes.
        len: u64,
    },
    /// The device's memory could not be lent to a storage server.
    Export {
        /// How much of it.
        bytes: u64,
        /// What the driver, the system or the network said.
        why: String,
    },
    /// The device could not compute checksums of its memory.
    Sums {
        /// What the device or its driver reported.
        why: String,
    },
    /// Bytes by RDMA lie where the device cannot copy them from or to directly.
    NotStraight {
        /// Number of bytes.
        bytes: u64,
        /// Why, and what would help.
        why: String,
    },
    /// cuFile moved bytes, but its counters do not say that it was direct.
    Detour {
        /// Number of bytes.
        len: u64,
        /// Reads through host memory that it counted meanwhile.
        posix: u64,
        /// Direct reads that it counted.
        straight: u64,
        /// Bytes that it counted.
        bytes: u64,
    },
    /// A copy on this node has changed since it was made.
    BadCopy {
        /// Its path.
        copy: String,
        /// The first byte that differs.
        at: u64,
        /// What is wrong there.
        why: String,
        /// It was taken out of use.
        aside: bool,
    },
    /// Host memory could not be pinned.
    Pin {
        /// How much of it.
        bytes: u64,
        /// What the system said.
        why: String,
    },
    /// A call of the driver failed.
    Driver {
        /// The name of the call.
        call: &'static str,
        /// The code that it returned.
        code: i32,
        /// The code in words.
        name: String,
    },
}

impl Fault {
    /// Whether it concerns what the caller gave or the device as a whole, so that every other tier
    /// would fail, too.
    pub const fn is_of_call(&self) -> bool {
        match self {
            Fault::Foreign { .. }
            | Fault::Freed { .. }
            | Fault::Beyond { .. }
            | Fault::ContextGone => true,
            // It is unknown which side is wrong.
            Fault::Damaged { .. } => true,
            Fault::NoMemory { .. }
            | Fault::Export { .. }
            | Fault::Sums { .. }
            | Fault::NotStraight { .. } => false,
            Fault::Detour { .. }
            | Fault::BadCopy { .. }
            | Fault::Pin { .. }
            | Fault::Driver { .. } => false,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Foreign { addr } => {
                write!(f, "address {addr:#x} does not belong to memory of this device's context")
            }
            Fault::Freed { addr } => {
                write!(f, "address {addr:#x} belongs to memory that was freed")
            }
            Fault::Beyond { addr, len, end } => {
                write!(
                    f,
                    "{len} bytes from address {addr:#x} go beyond its allocation, which ends at \
                     {end:#x}"
                )
            }
            Fault::ContextGone => f.write_str("the device's context is gone"),
            Fault::NoMemory { bytes } => write!(f, "the device has no memory for {bytes} bytes"),
            Fault::Damaged { addr, len } => write!(
                f,
                "{len} bytes at address {addr:#x} were damaged between host memory and the device: their CRC32Cs differ"
            ),
            Fault::Export { bytes, why } => {
                write!(
                    f,
                    "{bytes} bytes of the device's memory cannot be lent to a storage server: {why}"
                )
            }
            Fault::Sums { why } => write!(f, "the device could not sum its memory: {why}"),
            Fault::NotStraight { bytes, why } => {
                write!(
                    f,
                    "{bytes} bytes cannot be transferred directly between RDMA and the \
                           device: {why}"
                )
            }
            Fault::Detour { len, posix, straight, bytes } => write!(
                f,
                "cuFile did not read {len} bytes directly: meanwhile it counted {posix} reads \
                 through host memory, {straight} direct ones and {bytes} bytes"
            ),
            Fault::BadCopy { copy, at, why, aside } => {
                let done = if *aside {
                    "it was set aside: stage the file again"
                } else {
                    "it could not be set aside: remove it"
                };
                write!(f, "the copy '{copy}' is damaged from byte {at} on ({why}), and {done}")
            }
            Fault::Pin { bytes, why } => {
                write!(f, "{bytes} bytes of host memory cannot be pinned: {why}")
            }
            Fault::Driver { call, code, name } => write!(f, "{call} failed with {code}: {name}"),
        }
    }
}

impl std::error::Error for Fault {}

impl From<Fault> for Error {
    fn from(f: Fault) -> Error {
        let code = match &f {
            Fault::Foreign { .. } | Fault::Freed { .. } | Fault::Beyond { .. } => Code::Inval,
            Fault::ContextGone => Code::NoDev,
            Fault::Damaged { .. } | Fault::BadCopy { .. } => Code::Corrupt,
            Fault::NoMemory { .. } | Fault::NotStraight { .. } | Fault::Pin { .. } => Code::NoMem,
            Fault::Detour { .. }
            | Fault::Export { .. }
            | Fault::Sums { .. }
            | Fault::Driver { .. } => Code::Io,
        };
        Error::new(code, f.to_string())
    }
}
