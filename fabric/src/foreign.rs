//! Memory outside a pool: a GPU's, exported as a dma-buf, or host memory in its place. A request
//! may lend it to the peer over a connection that [`crate::Connection::lends`], instead of buffers:
//! the bytes are then not copied through memory of this process.

use std::{
    any::Any,
    fmt,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use crate::buf::ALIGN;

/// Where foreign memory lies.
enum Place {
    /// In this process.
    Host(Arc<dyn Any + Send + Sync>),
    /// In a dma-buf, from this offset on.
    DmaBuf(OwnedFd, u64),
}

struct Memory {
    place: Place,
    addr: u64,
}

/// A range of foreign memory. Clones and slices hold what keeps it valid: the descriptor, or for
/// host memory the `keep` value given with it.
#[derive(Clone)]
pub struct Foreign {
    memory: Arc<Memory>,
    /// Relative to the start of the memory.
    range: Range<u64>,
}

impl Foreign {
    /// `len` bytes of this process's memory. `keep` is held as long as anything may access them.
    ///
    /// # Safety
    /// The memory stays mapped while `keep` is held. A peer that it is lent to may write it at any
    /// time until then, so no references to it may exist.
    pub unsafe fn host(start: *mut u8, len: u64, keep: Arc<dyn Any + Send + Sync>) -> Foreign {
        Foreign {
            memory: Arc::new(Memory {
                place: Place::Host(keep),
                addr: start.expose_provenance() as u64,
            }),
            range: 0..len,
        }
    }

    /// `len` bytes from `offset` of a dma-buf, whose owner knows them by the address `addr`. Offset
    /// and address have the same position within a page. The kernel keeps the memory as long as the
    /// descriptor is open.
    pub fn dma_buf(fd: OwnedFd, offset: u64, addr: u64, len: u64) -> Foreign {
        debug_assert_eq!(offset % ALIGN as u64, addr % ALIGN as u64);
        Foreign {
            memory: Arc::new(Memory { place: Place::DmaBuf(fd, offset), addr }),
            range: 0..len,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The owner's address of the first byte.
    pub fn addr(&self) -> u64 {
        self.memory.addr + self.range.start
    }

    /// A part of it. Panics when out of range, like slicing.
    #[must_use]
    pub fn slice(&self, r: Range<u64>) -> Foreign {
        assert!(r.start <= r.end && r.end <= self.len());
        Foreign {
            memory: self.memory.clone(),
            range: self.range.start + r.start..self.range.start + r.end,
        }
    }

    /// The dma-buf and the offset of the first byte in it. `None`: it is memory of this process, at
    /// [`Foreign::addr`].
    pub fn exported(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.memory.place {
            Place::DmaBuf(fd, offset) => Some((fd.as_fd(), offset + self.range.start)),
            Place::Host(_) => None,
        }
    }

    /// For host memory: the value that keeps it valid, so that its lender can examine it.
    pub fn keeper(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        match &self.memory.place {
            Place::Host(keep) => Some(keep),
            Place::DmaBuf(..) => None,
        }
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.exported().is_some() { "dma-buf" } else { "host" };
        write!(f, "Foreign({} bytes of {kind} memory at {:#x})", self.len(), self.addr())
    }
}

/// What a request lends to the peer instead of buffers, while the request runs.
#[derive(Clone, Debug)]
pub enum Lend {
    /// The payload of the request is here; the peer reads it.
    Payload(Foreign),
    /// The peer writes the payload of the reply here, unless the payload is sent with its frame.
    Room(Foreign),
}

impl Lend {
    /// The memory.
    pub fn memory(&self) -> &Foreign {
        match self {
            Lend::Payload(m) | Lend::Room(m) => m,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_told_by_the_owners_addresses_and_keep_the_memory() {
        let keep: Arc<Vec<u8>> = Arc::new(vec![0; 100]);
        let start = keep.as_ptr().cast_mut();
        // SAFETY: nothing is lent; only addresses are looked at.
        let all = unsafe { Foreign::host(start, 100, keep.clone()) };
        let part = all.slice(10..60).slice(5..20);
        assert_eq!((part.addr(), part.len()), (start.addr() as u64 + 15, 15));
        assert!(part.exported().is_none() && !part.is_empty() && part.slice(3..3).is_empty());
        drop(all);
        assert_eq!(Arc::strong_count(&keep), 2);
        drop(part);
        assert_eq!(Arc::strong_count(&keep), 1);

        let fd = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let part = Foreign::dma_buf(fd, 4096 + 7, (1 << 40) + 7, 9000).slice(100..200);
        assert_eq!((part.addr(), part.exported().unwrap().1), ((1 << 40) + 107, 4096 + 107));
    }
}
