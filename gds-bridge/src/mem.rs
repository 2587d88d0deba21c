//! GPU memory as the bridge sees it.

use std::{fmt, path::Path, sync::Arc};

use strake_fabric::Foreign;
use strake_proto::{Code, Error};

use crate::{Tier, Unavailable, local::CuFile, pins::Registry};

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

/// A position in a stream: everything that it was given before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(pub u64);

/// Work that a program had given to one of its streams at some moment.
pub trait Before: Send {
    /// Returns when it is done. An error may be of the work that was waited for.
    fn wait(self: Box<Self>) -> Result<(), Fault>;
}

/// Memory of one device in one context.
pub trait GpuMem: Send + Sync + 'static {
    /// For messages to people.
    fn name(&self) -> String;

    /// Why it cannot be used for a tier. `None`: it has no objection.
    fn refuses(&self, tier: Tier) -> Option<Unavailable>;

    /// Whether `len` bytes from `addr` lie in one live allocation of this context.
    fn check(&self, addr: u64, len: u64) -> Result<(), Fault>;

    /// Returns when everything is done that the program had given to the device before, on any
    /// stream: work that another library queued may still write or read the memory that a call is
    /// about to move.
    fn settle(&self) -> Result<(), Fault>;

    /// Records what the program has given to one of its streams by now (0: the default stream), so
    /// that any thread can wait for it.
    ///
    /// # Safety
    /// The stream is one of this context, and is not destroyed before this returned.
    unsafe fn before(&self, stream: u64) -> Result<Box<dyn Before>, Fault>;

    /// Memory of the device, at least 256-byte aligned, with unspecified contents.
    fn alloc(&self, len: u64) -> Result<u64, Fault>;

    /// Gives back what [`GpuMem::alloc`] returned.
    fn free(&self, addr: u64) -> Result<(), Fault>;

    /// What is pinned for this device and for all others of its driver in this process. Code that
    /// pins memory must enter it there.
    fn registry(&self) -> Arc<Registry>;

    /// Whether the context was destroyed, and with it everything that was pinned by it.
    fn is_gone(&self) -> bool;

    /// Its PCI address as sysfs writes it (`0000:3b:00.0`); otherwise a sentence that says why it
    /// is unknown.
    fn pci(&self) -> Result<String, String>;

    /// Pins host memory and registers it with the device, and with all others of its driver, which
    /// then copy from and to it directly. Memory that is partly pinned already is refused.
    ///
    /// # Safety
    /// The memory, whole pages, stays mapped until [`GpuMem::unpin`] returned.
    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), Fault>;

    /// Undoes a [`GpuMem::pin`] that succeeded, with the same `start`. No stream may use the memory
    /// any more.
    fn unpin(&self, start: *mut u8);

    /// Whether the device itself computes checksums of its memory ([`Stream::sum`]); otherwise a
    /// sentence that says why not. May take a while the first time.
    fn sums(&self) -> Result<(), String>;

    /// Exports `len` bytes from `addr` so that storage servers can read and write them directly.
    /// Exported memory stays in place as long as the result is held, also when it is freed in the
    /// meantime. [`Fault::Export`]: the device does not support that, or not for this memory.
    fn export(&self, addr: u64, len: u64) -> Result<Foreign, Fault>;

    /// Returns when everything that others wrote to exported memory before is visible to all later
    /// work of the device.
    fn arrived(&self) -> Result<(), Fault>;

    /// cuFile for this device, with its driver open. It is known to hang, so `prober` (`strake`, by
    /// its path or name) opens it in another process first.
    fn cufile(&self, _prober: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Err(Unavailable::CuFile { why: "there is none for this device".into() })
    }

    /// A new queue of copies, for the calling thread.
    fn stream(&self) -> Result<Box<dyn Stream>, Fault>;
}

/// Ordered copies, independent of the program's streams. Must be used by the thread that made it.
/// Dropping it waits for its copies.
pub trait Stream {
    /// Copies from host memory, pinned or not, to the device.
    ///
    /// # Safety
    /// `from` is valid for reading `len` bytes, and does not change, until a later mark was waited
    /// for or the stream drained.
    unsafe fn load(&mut self, to: u64, from: *const u8, len: usize) -> Result<(), Fault>;

    /// Copies from the device to host memory, pinned or not.
    ///
    /// # Safety
    /// `to` is valid for writing `len` bytes, and nothing else uses them, until a later mark was
    /// waited for or the stream drained.
    unsafe fn save(&mut self, to: *mut u8, from: u64, len: usize) -> Result<(), Fault>;

    /// Has the device compute the CRC32C of its memory after the copies so far. The returned number
    /// identifies the result for [`Stream::summed`]. Only where [`GpuMem::sums`] succeeds.
    fn sum(&mut self, from: u64, len: usize) -> Result<u64, Fault>;

    /// The result of a checksum, returned once. A mark after it must have been waited for. `None`:
    /// it failed, as the wait has reported. Forgets all earlier checksums.
    fn summed(&mut self, number: u64) -> Option<u32>;

    /// As [`Stream::summed`], for each 4 KiB; the last piece may be shorter.
    fn summed_blocks(&mut self, number: u64) -> Option<Vec<u32>>;

    /// Marks the current end of the queue.
    fn mark(&mut self) -> Result<Mark, Fault>;

    /// Returns when everything before the mark is done. An error is of one of the copies before it,
    /// and is reported once.
    fn wait(&mut self, mark: Mark) -> Result<(), Fault>;

    /// Returns when the stream no longer uses any host memory. The results of the copies are
    /// reported by [`Stream::wait`].
    fn drain(&mut self);
}
