//! One descriptor of `/dev/fuse`: requests are read from it and replies written to it.

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use rustix::{event::epoll, fs::OFlags, io::Errno};
use strake_fabric::BufMut;

use super::{
    abi::{self, OUT_HEAD, WRITE_HEAD},
    notify::Notice,
    reply::Reply,
};

/// A descriptor of `/dev/fuse`. A request is answered on the descriptor from which it was read.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
}

impl From<Channel> for OwnedFd {
    fn from(c: Channel) -> OwnedFd {
        c.fd
    }
}

/// The result of reading a request.
pub enum Received {
    /// A request of this many bytes.
    Request(usize),
    /// The request ended before it was read; there may be another one.
    Nothing,
    /// Unmounted.
    Unmounted,
}

/// The epoll instance at which a thread waits for its descriptor. A request wakes one of the
/// threads that wait for a mount.
pub struct Door {
    epoll: OwnedFd,
}

impl Door {
    pub fn new(channel: &Channel) -> io::Result<Door> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
        epoll::add(&epoll, &channel.fd, epoll::EventData::new_u64(0), flags)?;
        Ok(Door { epoll })
    }

    /// Returns when there may be a request, or the mount has ended.
    pub fn wait(&self) -> io::Result<()> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        match epoll::wait(&self.epoll, &mut events[..], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// Most parts of a reply in one write: IOV_MAX is 1,024, and 1 MiB has at most 256 pages.
const MOST_PARTS: usize = 300;

impl Channel {
    pub fn new(fd: OwnedFd) -> Channel {
        Channel { fd }
    }

    /// A fresh `/dev/fuse`, to be mounted.
    pub fn open() -> io::Result<Channel> {
        let fd = File::options().read(true).write(true).open("/dev/fuse")?.into();
        Ok(Channel { fd })
    }

    /// Another descriptor of the same mount, with its own queue of requests in progress.
    pub fn another(&self) -> io::Result<Channel> {
        let new = Channel::open()?;
        let old = self.fd.as_raw_fd() as u32;
        // SAFETY: the ioctl reads the `u32` it is given and changes nothing else of this process.
        let r = unsafe { libc::ioctl(new.fd.as_raw_fd(), abi::IOC_CLONE, &raw const old) };
        if r == 0 { Ok(new) } else { Err(io::Error::last_os_error()) }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Makes reads non-blocking. Then [`Door`] waits instead.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.fd)?;
        Ok(rustix::fs::fcntl_setfl(&self.fd, flags | OFlags::NONBLOCK)?)
    }

    /// Reads a request: its first [`WRITE_HEAD`] bytes go to `head`, the rest to `rest`, so that
    /// the data of a write lies at the start of an aligned buffer. `rest` has at least
    /// [`crate::vfs::MAX_REQUEST`] bytes.
    pub fn receive(&self, head: &mut [u8; WRITE_HEAD], rest: &mut BufMut) -> io::Result<Received> {
        let mut parts = [IoSliceMut::new(head), IoSliceMut::new(rest)];
        match rustix::io::readv(&self.fd, &mut parts) {
            Ok(n) => Ok(Received::Request(n)),
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => Ok(Received::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Received::Unmounted),
            Err(e) => Err(e.into()),
        }
    }

    /// Sends a reply. Returns false when the kernel no longer waits for it.
    pub fn send(&self, unique: u64, reply: &Reply) -> io::Result<bool> {
        let error = if let Reply::Error(e) = reply { -*e } else { 0 };
        match reply {
            Reply::Error(_) => self.write(unique, error, &[]),
            Reply::Bytes(b) => self.write(unique, 0, &[b]),
            Reply::Told(t) => self.write(unique, 0, &[t.bytes()]),
            Reply::Data(parts) if parts.len() <= MOST_PARTS => {
                let parts: Vec<&[u8]> = parts.iter().map(|b| &b[..]).collect();
                self.write(unique, 0, &parts)
            }
            Reply::Data(parts) => self.write(
                unique,
                0,
                &[&parts.iter().flat_map(|b| &b[..]).copied().collect::<Vec<_>>()],
            ),
        }
    }

    /// Sends a notification to the kernel. `NotFound`: the kernel does not have the object.
    pub fn notify(&self, (code, body): &Notice) -> io::Result<()> {
        self.write(0, *code, &[body]).map(drop)
    }

    fn write(&self, unique: u64, error: i32, parts: &[&[u8]]) -> io::Result<bool> {
        let len = OUT_HEAD + parts.iter().map(|p| p.len()).sum::<usize>();
        let mut head = [0; OUT_HEAD];
        head[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        head[4..8].copy_from_slice(&error.to_ne_bytes());
        head[8..].copy_from_slice(&unique.to_ne_bytes());
        let result = match parts {
            [] => rustix::io::writev(&self.fd, &[IoSlice::new(&head)]),
            [part] => rustix::io::writev(&self.fd, &[IoSlice::new(&head), IoSlice::new(part)]),
            parts => {
                let parts = parts.iter().map(|p| IoSlice::new(p));
                rustix::io::writev(
                    &self.fd,
                    &std::iter::once(IoSlice::new(&head)).chain(parts).collect::<Vec<_>>(),
                )
            }
        };
        match result {
            Ok(_) => Ok(true),
            // The kernel gave up the request, or the whole mount.
            Err(Errno::NOENT) if unique != 0 => Ok(false),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}
