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

/// A request is answered on the descriptor it was read from.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
}

impl From<Channel> for OwnedFd {
    fn from(c: Channel) -> OwnedFd {
        c.fd
    }
}

/// How reading a request went.
pub enum Received {
    /// A request of so many bytes.
    Request(usize),
    /// Ended before it was read; there may be another.
    Nothing,
    /// Unmounted.
    Unmounted,
}

/// Where a thread waits for its descriptor. Of several that wait for one mount, a request wakes
/// one.
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

    /// Returns when there may be a request, or the mount is over.
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

/// Parts of a reply in one write: IOV_MAX is 1,024, and 1 MiB has at most 256 pages.
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

    /// Another descriptor of the same mount, with a queue of its own for what it has taken.
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

    /// Whether reading waits by itself. If not, [`Door`] does.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.fd)?;
        Ok(rustix::fs::fcntl_setfl(&self.fd, flags | OFlags::NONBLOCK)?)
    }

    /// Takes a request: its first [`WRITE_HEAD`] bytes go to `head`, the rest to `rest`, so that
    /// the data of a write lies at the start of an aligned buffer. `rest` has at least
    /// [`super::MAX_REQUEST`] bytes.
    pub fn receive(&self, head: &mut [u8; WRITE_HEAD], rest: &mut BufMut) -> io::Result<Received> {
        let mut parts = [IoSliceMut::new(head), IoSliceMut::new(rest)];
        match rustix::io::readv(&self.fd, &mut parts) {
            Ok(n) => Ok(Received::Request(n)),
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => Ok(Received::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Received::Unmounted),
            Err(e) => Err(e.into()),
        }
    }

    /// Answers. False when nobody waits for it any more.
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

    /// Tells the kernel something. `NotFound`: it does not have what the notice is about.
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
            // The request was given up, or the whole mount was.
            Err(Errno::NOENT) if unique != 0 => Ok(false),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}
