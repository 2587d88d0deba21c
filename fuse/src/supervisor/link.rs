//! The socket between a supervisor and its daemon: short messages that may carry descriptors.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use rustix::{
    io::FdFlags,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    },
};

use tokio::net::UnixDatagram;

/// The handover memory, and a `/dev/fuse` for each of up to 64 threads.
const MOST_FDS: usize = 65;
/// Enough for a list of 64 uuids, or a name.
const LONGEST: usize = 2048;

/// The messages.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    /// To the first daemon, with the handover memory: connect.
    Connect {
        /// The uuids of clients that are certainly gone.
        dead: Vec<[u8; 16]>,
    },
    /// From the daemon: connected.
    Connected {
        /// The file system's name.
        name: String,
    },
    /// To the first daemon, with the mount's descriptors: mounted, start serving.
    Mounted,
    /// To every later daemon, with the handover memory and the descriptors.
    TakeOver,
    /// From a daemon: it answers requests now.
    Serving,
    /// To a daemon: refuse changes, or accept them.
    ReadOnly(bool),
    /// To a daemon: asks what is not safe yet.
    Ask,
    /// From the daemon: the answer to `Ask`.
    State(String),
    /// To a daemon: asks for the counters.
    Count,
    /// From the daemon: the answer to `Count`.
    Counts(String),
    /// From the daemon: the file system is unmounted; what was written may not be safe yet.
    Unmounted,
    /// From the daemon, the last message: what was lost; empty if nothing.
    Ended(String),
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        match self {
            Message::Connect { dead } => [b"c", dead.concat().as_slice()].concat(),
            Message::Connected { name } => [b"n", name.as_bytes()].concat(),
            Message::Mounted => b"m".to_vec(),
            Message::TakeOver => b"t".to_vec(),
            Message::Serving => b"s".to_vec(),
            Message::ReadOnly(yes) => vec![b'r', u8::from(*yes)],
            Message::Ask => b"a".to_vec(),
            Message::State(text) => [b"i", short(text)].concat(),
            Message::Count => b"q".to_vec(),
            Message::Counts(text) => [b"k", short(text)].concat(),
            Message::Unmounted => b"u".to_vec(),
            Message::Ended(text) => [b"e", short(text)].concat(),
        }
    }

    fn decode(bytes: &[u8]) -> Option<Message> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            b'c' => {
                let (uuids, []) = rest.as_chunks::<16>() else { return None };
                Some(Message::Connect { dead: uuids.to_vec() })
            }
            b'n' => Some(Message::Connected { name: String::from_utf8(rest.to_vec()).ok()? }),
            b'm' if rest.is_empty() => Some(Message::Mounted),
            b't' if rest.is_empty() => Some(Message::TakeOver),
            b's' if rest.is_empty() => Some(Message::Serving),
            b'r' => match rest {
                [yes @ 0..=1] => Some(Message::ReadOnly(*yes == 1)),
                _ => None,
            },
            b'a' if rest.is_empty() => Some(Message::Ask),
            b'i' => Some(Message::State(String::from_utf8_lossy(rest).into())),
            b'q' if rest.is_empty() => Some(Message::Count),
            b'k' => Some(Message::Counts(String::from_utf8_lossy(rest).into())),
            b'u' if rest.is_empty() => Some(Message::Unmounted),
            b'e' => Some(Message::Ended(String::from_utf8_lossy(rest).into())),
            _ => None,
        }
    }
}

/// The beginning of the text, as far as it fits in a message.
fn short(text: &str) -> &[u8] {
    &text.as_bytes()[..text.len().min(LONGEST - 1)]
}

/// One end of the socket.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Our end, and the one that a child inherits.
    pub fn pair() -> io::Result<(Link, OwnedFd)> {
        let kind = SocketType::SEQPACKET;
        let (ours, its) =
            rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        rustix::io::fcntl_setfd(&its, FdFlags::empty())?;
        Ok((Link(ours), its))
    }

    /// The end that this process inherited under this number. Must be called once, before any other
    /// file is opened.
    pub fn inherited(number: RawFd) -> io::Result<Link> {
        if number <= 2 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor is not a supervisor's socket",
            ));
        }
        // SAFETY: the caller inherited this descriptor for this use, and no other code in the
        // process knows its number. If it were closed or another file, the calls below would fail
        // without harm to this process.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
        rustix::net::sockopt::socket_type(&fd)?;
        Ok(Link(fd))
    }

    /// From now on receiving fails with `WouldBlock` instead of waiting; the returned socket tells
    /// when there is something to receive. Must be called on a tokio runtime.
    pub fn watch(&self) -> io::Result<UnixDatagram> {
        rustix::io::ioctl_fionbio(&self.0, true)?;
        // This is only polled, never used to read.
        UnixDatagram::from_std(self.0.try_clone()?.into())
    }

    /// Sends a message with descriptors. Fails immediately when the other end does not read.
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("too many descriptors for one message"));
        }
        let bytes = message.encode();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags)?;
        Ok(())
    }

    /// The next message; waits for it unless the socket is non-blocking. `None`: the other end is
    /// gone.
    pub fn receive(&self) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        let mut bytes = [0; LONGEST];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got =
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
        let fds = control.drain().filter_map(|m| match m {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds = fds.flatten().collect();
        if got.bytes == 0 {
            return Ok(None);
        }
        let bad = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "a message that neither a supervisor nor a daemon sends",
            )
        };
        Ok(Some((Message::decode(&bytes[..got.bytes]).ok_or_else(bad)?, fds)))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn messages_and_descriptors_arrive() {
        let (a, b) = Link::pair().unwrap();
        let b = Link(b);
        let null = File::open("/dev/null").unwrap();
        let fds = vec![null.as_fd(); MOST_FDS];
        a.send(&Message::Connect { dead: vec![[1; 16], [2; 16]] }, &fds).unwrap();
        b.send(&Message::Connected { name: "fs".into() }, &[]).unwrap();
        let (m, fds) = b.receive().unwrap().unwrap();
        assert_eq!((m, fds.len()), (Message::Connect { dead: vec![[1; 16], [2; 16]] }, MOST_FDS));
        assert_eq!(a.receive().unwrap().unwrap().0, Message::Connected { name: "fs".into() });
        let texts = |t: &str| {
            [Message::State(t.into()), Message::Counts(t.into()), Message::Ended(t.into())]
        };
        let texts = ["", "5 bytes"].map(texts);
        let asked = [Message::Ask, Message::Count];
        let plain = [Message::Mounted, Message::TakeOver, Message::Serving, Message::Unmounted]
            .into_iter()
            .chain(asked);
        for m in
            plain.chain([true, false].map(Message::ReadOnly)).chain(texts.into_iter().flatten())
        {
            assert_eq!(Message::decode(&m.encode()), Some(m));
        }
        assert!(Message::State("x".repeat(9999)).encode().len() <= LONGEST);
        drop(b);
        assert!(a.receive().unwrap().is_none());
        assert!(a.send(&Message::Mounted, &[]).is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        for bytes in [&b""[..], b"x", b"mm", b"c123", b"n\xff", b"r", b"r\x02", b"aa", b"qq"] {
            assert_eq!(Message::decode(bytes), None, "{bytes:?}");
        }
        assert!(Link::inherited(1).is_err());
    }
}
