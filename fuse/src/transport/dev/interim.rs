//! Serves a mount whose daemon cannot work: the last one died, and the next one waits for servers.
//! Some callers must not wait for that: umount(8) looks at the mount before it unmounts, and killed
//! programs must be able to exit. Only those are answered; the kernel sends all other requests
//! again when the daemon serves.

use std::{
    collections::BTreeMap, io, os::fd::OwnedFd, sync::Arc, thread::JoinHandle, time::Duration,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};
use strake_fabric::BufMut;
use strake_proto::ids::ROOT_INO;

use super::{
    abi::{self, WRITE_HEAD, op},
    channel::{Channel, Received},
    interrupts::is_dying,
    kept::agreed_before,
    notify,
    reply::{self, Reply, Taken},
    request::{self, Body, Head},
};
use crate::{
    handover::HandoverMemory,
    vfs::{Known, MAX_REQUEST},
};

/// A daemon that reaches its servers starts to serve long before this.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often callers that received a signal are checked.
const LOOK: Duration = Duration::from_millis(50);

/// Answers in the place of a daemon that still waits for servers, after it has waited for two
/// seconds. Ends when it is dropped.
#[derive(Debug)]
pub struct Interim {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Interim {
    /// Starts it for the mount with these descriptors. `None`: this kernel does not send requests
    /// again, so none may be read.
    pub fn start(
        keep: &Arc<HandoverMemory>,
        descriptors: &[OwnedFd],
    ) -> io::Result<Option<Interim>> {
        let resends = agreed_before(keep).is_some_and(|a| a.has(abi::init::HAS_RESEND));
        let Some(first) = descriptors.first().filter(|_| resends) else { return Ok(None) };
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let known = Known::new(Some(keep.clone()));
        let mut work = Work {
            channel: Channel::new(first.try_clone()?),
            stop: stop.clone(),
            known,
            held: BTreeMap::new(),
            interrupted: Vec::new(),
        };
        let run = move || {
            if let Err(e) = work.run() {
                tracing::warn!("while no server answers: {e}");
            }
        };
        let thread = std::thread::Builder::new().name("strake-interim".into()).spawn(run)?;
        Ok(Some(Interim { stop, thread: Some(thread) }))
    }
}

impl Drop for Interim {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        // Should the request that woke the thread be gone before it is read, this waits for the
        // next one.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Work {
    channel: Channel,
    stop: Arc<OwnedFd>,
    known: Known,
    /// The callers of requests that were read and not answered, by request number.
    held: BTreeMap<u64, u32>,
    /// Requests whose callers received a signal.
    interrupted: Vec<u64>,
}

impl Work {
    fn run(&mut self) -> io::Result<()> {
        if self.wait(Some(PATIENCE), false)? == Next::Stop {
            return Ok(());
        }
        // This includes what the last daemon had read: its callers can be released only by their
        // request numbers.
        self.channel.notify(&notify::resend())?;
        let (mut head, mut rest) = ([0; WRITE_HEAD], BufMut::unpooled(MAX_REQUEST as usize));
        loop {
            let limit = (!self.interrupted.is_empty()).then_some(LOOK);
            match self.wait(limit, true)? {
                Next::Stop => return Ok(()),
                Next::Look => {}
                Next::Read => match self.channel.receive(&mut head, &mut rest)? {
                    Received::Request(len) => self.one(&head, &rest, len)?,
                    Received::Nothing => {}
                    Received::Unmounted => return Ok(()),
                },
            }
            self.let_go()?;
        }
    }

    fn wait(&self, limit: Option<Duration>, read: bool) -> io::Result<Next> {
        let limit = limit.and_then(|l| Timespec::try_from(l).ok());
        let (stop, kernel) = (PollFd::new(&*self.stop, PollFlags::IN), self.channel.fd());
        let mut all = [stop, PollFd::from_borrowed_fd(kernel, PollFlags::IN)];
        match poll(&mut all[..1 + usize::from(read)], limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(match all.map(|f| !f.revents().is_empty()) {
            [true, _] => Next::Stop,
            [_, true] => Next::Read,
            _ => Next::Look,
        })
    }

    /// Handles one request of `len` bytes.
    fn one(&mut self, head: &[u8; WRITE_HEAD], rest: &[u8], len: usize) -> io::Result<()> {
        let Ok(request) = Head::read(&head[..len.min(WRITE_HEAD)]) else { return Ok(()) };
        let args = match len.checked_sub(WRITE_HEAD).map(|n| rest.get(..n)) {
            None => head[abi::IN_HEAD..len].to_vec(),
            Some(beyond) => [&head[abi::IN_HEAD..], beyond.unwrap_or_default()].concat(),
        };
        let root = self.known.root().map(Into::into).filter(|_| request.node == ROOT_INO);
        let answer = match request.opcode {
            op::FORGET | op::BATCH_FORGET => return Ok(()),
            op::INTERRUPT => {
                // An interrupt for a request that is not held comes again with its request.
                if let Ok(Body::Interrupt { unique }) = request::read(request, &args, false)
                    && self.held.contains_key(&unique)
                {
                    self.interrupted.push(unique);
                }
                return Ok(());
            }
            op::STATFS => self.known.space().map(|s| reply::statfs(&s)),
            // With a time of 0, so that the kernel does not keep it.
            op::GETATTR => root.map(|a| reply::attr(&a, Taken::InOrder)),
            op::STATX => root.map(|a| reply::statx(&a)),
            _ => None,
        };
        match answer {
            Some(reply) => self.channel.send(request.unique, &reply).map(drop),
            None => {
                // The end of a program's use of a file must reach the servers even if the program
                // is dying: locks end with it.
                let must_stay = matches!(request.opcode, op::FLUSH | op::RELEASE | op::RELEASEDIR)
                    || request.pid == 0;
                if !must_stay {
                    self.held.insert(request.unique, request.pid);
                }
                Ok(())
            }
        }
    }

    /// Answers callers that are dying.
    fn let_go(&mut self) -> io::Result<()> {
        let dying = |unique: &mut u64| self.held.get(unique).is_some_and(|pid| is_dying(*pid));
        for unique in self.interrupted.extract_if(.., dying).collect::<Vec<_>>() {
            self.held.remove(&unique);
            self.channel.send(unique, &Reply::Error(libc::EINTR))?;
        }
        Ok(())
    }
}

#[derive(PartialEq, Eq)]
enum Next {
    Stop,
    Read,
    Look,
}
