//! GPU memory as the bridge sees it.

use std::{fmt, path::Path, sync::Arc};

use strake_fabric::Foreign;
use strake_proto::{Code, Error};

use crate::{Tier, Unavailable, local::CuFile, pins::Registry};

/// What a device, its driver or the memory given to it had against something.
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
    /// A range that goes on behind its allocation.
    Beyond {
        /// Where it starts.
        addr: u64,
        /// Its bytes.
        len: u64,
        /// Where the allocation ends.
        end: u64,
    },
    /// The context was destroyed, or an error of the device has ended it.
    ContextGone,
    /// The device has no room.
    NoMemory {
        /// For so many bytes.
        bytes: u64,
    },
    /// What lies in the device's memory is not what was copied there, or what came from it not what
    /// lies there: the checksums differ.
    Damaged {
        /// Where it lies.
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
    /// The device could not sum its memory.
    Sums {
        /// What it, or its driver, said.
        why: String,
    },
    /// Bytes that go by RDMA lie where the device cannot copy them from or to by itself.
    NotStraight {
        /// How many.
        bytes: u64,
        /// What it takes.
        why: String,
    },
    /// cuFile moved bytes, and its counters do not say that they went straight.
    Detour {
        /// So many bytes.
        len: u64,
        /// Reads by way of host memory that it counted meanwhile.
        posix: u64,
        /// Reads that went straight.
        straight: u64,
        /// Bytes that it counted.
        bytes: u64,
    },
    /// A copy on this node is not what it was when it was made.
    BadCopy {
        /// Where it lies.
        copy: String,
        /// From which byte on.
        at: u64,
        /// What is wrong there.
        why: String,
        /// It was put aside.
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
        /// Which.
        call: &'static str,
        /// The code that it returned.
        code: i32,
        /// The code in words.
        name: String,
    },
}

impl Fault {
    /// Whether it is about what the caller gave or about the device as a whole, so that another
    /// tier would meet it, too.
    pub const fn is_of_call(&self) -> bool {
        match self {
            Fault::Foreign { .. }
            | Fault::Freed { .. }
            | Fault::Beyond { .. }
            | Fault::ContextGone => true,
            // Nobody knows whom to trust.
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
                write!(f, "address {addr:#x} is not of memory that this device's context has")
            }
            Fault::Freed { addr } => write!(f, "address {addr:#x} is of memory that was freed"),
            Fault::Beyond { addr, len, end } => {
                write!(
                    f,
                    "{len} bytes from address {addr:#x} are more than its allocation has, which ends at {end:#x}"
                )
            }
            Fault::ContextGone => f.write_str("the device's context is gone"),
            Fault::NoMemory { bytes } => write!(f, "the device has no room for {bytes} bytes"),
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
                write!(f, "{bytes} bytes cannot go straight between RDMA and the device: {why}")
            }
            Fault::Detour { len, posix, straight, bytes } => write!(
                f,
                "cuFile read {len} bytes another way than straight: meanwhile it counted {posix} reads through host memory, {straight} straight ones \
                 and {bytes} bytes"
            ),
            Fault::BadCopy { copy, at, why, aside } => {
                let done = if *aside {
                    "it was put aside: stage the file again"
                } else {
                    "it could not be put aside: remove it"
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

/// Everything that a stream was given before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(pub u64);

/// What a program had given to one of its streams at some moment.
pub trait Before: Send {
    /// Returns when it is done. An error may be of what was waited for.
    fn wait(self: Box<Self>) -> Result<(), Fault>;
}

/// Memory of one device in one context.
pub trait GpuMem: Send + Sync + 'static {
    /// For messages to people.
    fn name(&self) -> String;

    /// Why it can be no end of a tier. `None`: it says nothing against it.
    fn refuses(&self, tier: Tier) -> Option<Unavailable>;

    /// Whether `len` bytes from `addr` lie in one live allocation of this context.
    fn check(&self, addr: u64, len: u64) -> Result<(), Fault>;

    /// Returns when everything is done that the program had given to the device before, on whatever
    /// stream: what another library queued may still write or read the memory that a call is about
    /// to move.
    fn settle(&self) -> Result<(), Fault>;

    /// Notes what the program has given to one of its streams by now (0: the default one), for any
    /// thread to wait for.
    ///
    /// # Safety
    /// The stream is one of this context, and is not destroyed before this returned.
    unsafe fn before(&self, stream: u64) -> Result<Box<dyn Before>, Fault>;

    /// Memory of the device, at least 256-byte aligned, with unspecified contents.
    fn alloc(&self, len: u64) -> Result<u64, Fault>;

    /// Gives back what [`GpuMem::alloc`] returned.
    fn free(&self, addr: u64) -> Result<(), Fault>;

    /// What is pinned for this device and for all others of its driver in this process. Whoever
    /// pins tells it.
    fn registry(&self) -> Arc<Registry>;

    /// Whether the context was destroyed, and with it what was pinned by it.
    fn is_gone(&self) -> bool;

    /// Its PCI address as sysfs writes it (`0000:3b:00.0`); otherwise why none is known, in a
    /// sentence.
    fn pci(&self) -> Result<String, String>;

    /// Pins host memory and makes it known to the device, and to all others of its driver, which
    /// then copy from and to it by themselves. Memory of which a part is pinned already is refused.
    ///
    /// # Safety
    /// The memory, whole pages, stays mapped until [`GpuMem::unpin`] returned.
    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), Fault>;

    /// Undoes a [`GpuMem::pin`] that succeeded, with the same `start`. No stream uses the memory
    /// any more.
    fn unpin(&self, start: *mut u8);

    /// Whether its streams sum memory by the device itself ([`Stream::sum`]); otherwise why not, in
    /// a sentence. May take a while the first time.
    fn sums(&self) -> Result<(), String>;

    /// `len` bytes from `addr` for storage servers to read and write by themselves. What is
    /// exported stays in place as long as anybody holds it, also when it is freed meanwhile.
    /// [`Fault::Export`]: the device does not do that, or not of this memory.
    fn export(&self, addr: u64, len: u64) -> Result<Foreign, Fault>;

    /// Returns when what others had written to exported memory before is seen by all that the
    /// device is given from now on.
    fn arrived(&self) -> Result<(), Fault>;

    /// cuFile for this device, with its driver open. It is known to hang: `prober` (`strake`, by
    /// its path or name) opens it in another process first.
    fn cufile(&self, _prober: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Err(Unavailable::CuFile { why: "there is none for this device".into() })
    }

    /// A new queue of copies, for the thread that calls.
    fn stream(&self) -> Result<Box<dyn Stream>, Fault>;
}

/// Copies in order, beside the program. Must be used by the thread that made it. Dropping it waits
/// for its copies.
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
    /// `to` is valid for writing `len` bytes, and nobody else uses them, until a later mark was
    /// waited for or the stream drained.
    unsafe fn save(&mut self, to: *mut u8, from: u64, len: usize) -> Result<(), Fault>;

    /// Has the device sum its memory behind the copies so far: CRC32C. What it says is asked of
    /// [`Stream::summed`] by the number that this returns. Only where [`GpuMem::sums`] has no
    /// objection.
    fn sum(&mut self, from: u64, len: usize) -> Result<u64, Fault>;

    /// What the device said, told once; a mark behind the sum was waited for. `None`: it failed, as
    /// the wait has told. Forgets all sums before it.
    fn summed(&mut self, number: u64) -> Option<u32>;

    /// As [`Stream::summed`], of each 4 KiB of it, the last of which may be shorter.
    fn summed_blocks(&mut self, number: u64) -> Option<Vec<u32>>;

    /// Notes how far it was filled.
    fn mark(&mut self) -> Result<Mark, Fault>;

    /// Returns when everything before the mark is done. An error is of one of the copies before it,
    /// and told once.
    fn wait(&mut self, mark: Mark) -> Result<(), Fault>;

    /// Returns when no host memory is used any more that was given to it. What became of the copies
    /// is told by [`Stream::wait`].
    fn drain(&mut self);
}
