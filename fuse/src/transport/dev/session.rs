//! A mount's threads: each reads requests from its own descriptor and passes them to the
//! [`Handler`].

use std::{
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

use strake_fabric::{BufMut, Pool};
use strake_proto::{Code, Error, Result};
use tokio::sync::watch;

use super::{
    abi::{self, WRITE_HEAD, init as flag, op},
    channel::{Channel, Door, Received},
    init::{self, Agreed, Outcome},
    notify::Notice,
    progress::{InBackground, Progress, Reading},
    reply::Reply,
    request::{self, Body, Head, Init, Request},
};
use crate::vfs::MAX_REQUEST;

/// A write of at least this length is passed on in the buffer into which it was read. A shorter one
/// is copied, so that the rest of that buffer is not occupied while the write is kept.
const HAND_ON: usize = MAX_REQUEST as usize / 2;

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// The result of noting a request, needed to handle it.
    type Noted;

    /// Called first, on the thread that read a request: it must not wait at all. What a close ends
    /// has ended when this returns.
    fn note(&self, body: &Body) -> Self::Noted;

    /// Called on a thread that reads requests: it must not wait for long. Called for every request
    /// but FORGET and INIT.
    fn handle(&self, request: Request, noted: Self::Noted, answer: Answer);

    /// The kernel has dropped these inodes; the number says how many replies had brought each.
    fn forgotten(&self, nodes: &[(u64, u64)]);

    /// What is used of the kernel's offer.
    fn accepted(&self, offer: Init) -> Init {
        offer
    }

    /// The kernel's INIT was answered with this result.
    fn agreed(&self, agreed: Agreed);

    /// A signal came for the caller of the request of this number. Returns false if the request is
    /// not known (yet).
    fn interrupt(&self, unique: u64) -> bool;
}

/// The right and the duty to answer one request: if it is dropped without an answer, it answers
/// `EIO`.
pub struct Answer {
    channel: Arc<Channel>,
    /// Index of the mount's descriptor.
    index: usize,
    unique: u64,
    sent: bool,
    /// Kept until the kernel has the answer.
    _in_work: Option<InBackground>,
}

impl Answer {
    pub fn channel(&self) -> usize {
        self.index
    }

    /// Returns false if the kernel did not accept the reply.
    pub fn send(mut self, reply: &Reply) -> bool {
        self.send_now(reply)
    }

    fn send_now(&mut self, reply: &Reply) -> bool {
        self.sent = true;
        self.channel.send(self.unique, reply).unwrap_or_else(|e| {
            tracing::error!("the kernel did not accept the reply to request {}: {e}", self.unique);
            let _ = self.channel.send(self.unique, &Reply::Error(libc::EIO));
            false
        })
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.sent {
            tracing::warn!("request {} ended without an answer", self.unique);
            self.send_now(&Reply::Error(libc::EIO));
        }
    }
}

/// What all threads of a session share.
struct Shared<H> {
    handler: Arc<H>,
    /// The descriptors of the mount. Each lives as long as a thread reads from it or a request must
    /// be answered on it.
    channels: Vec<Weak<Channel>>,
    pool: Pool,
    agreed: Arc<OnceLock<Agreed>>,
    progress: Arc<Progress>,
    is_over: AtomicBool,
    over: watch::Sender<Option<Result<()>>>,
}

/// A running session. It ends when it is unmounted.
pub struct Session {
    first: Arc<Channel>,
    over: watch::Receiver<Option<Result<()>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Session {
    /// Serves a mount from these descriptors, with one thread for each. Requests are read into
    /// buffers from `pool`. `agreed` is set when an earlier daemon has answered the mount's INIT;
    /// otherwise it is set when INIT has come.
    pub fn start<H: Handler>(
        channels: Vec<Arc<Channel>>,
        handler: Arc<H>,
        pool: Pool,
        agreed: Arc<OnceLock<Agreed>>,
        progress: Arc<Progress>,
    ) -> io::Result<Session> {
        let (tell, over) = watch::channel(None);
        let is_over = AtomicBool::new(false);
        let all = channels.iter().map(Arc::downgrade).collect();
        let shared = Arc::new(Shared {
            handler,
            channels: all,
            pool,
            agreed,
            progress,
            is_over,
            over: tell,
        });
        channels.iter().try_for_each(|c| c.set_nonblocking())?;
        let first = channels
            .first()
            .cloned()
            .ok_or_else(|| io::Error::other("a mount needs a descriptor of /dev/fuse"))?;
        let mut threads = Vec::new();
        for (i, channel) in channels.into_iter().enumerate() {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("strake-fuse-{i}"));
            threads.push(thread.spawn(move || shared.serve(&channel, i))?);
        }
        Ok(Session { first, over, threads })
    }

    /// Returns when the mount is unmounted and all its threads have ended.
    pub async fn ended(&self) -> Result<()> {
        let mut over = self.over.clone();
        match over.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Ok(())),
            Err(_) => Err(Error::new(Code::Io, "the threads of the FUSE session died")),
        }
    }

    pub fn is_over(&self) -> bool {
        self.over.borrow().is_some() || self.threads.iter().all(JoinHandle::is_finished)
    }

    pub fn notify(&self, notice: &Notice) -> io::Result<()> {
        self.first.notify(notice)
    }
}

impl<H: Handler> Shared<H> {
    fn serve(&self, channel: &Arc<Channel>, index: usize) {
        let outcome = self.take_requests(channel, index);
        if !self.is_over.swap(true, Relaxed) {
            self.over.send_replace(Some(
                outcome.map_err(|e| Error::from(e).context("reading /dev/fuse")),
            ));
        }
    }

    fn take_requests(&self, channel: &Arc<Channel>, index: usize) -> io::Result<()> {
        let mut head = [0; WRITE_HEAD];
        let mut rest = self.pool.get_now(MAX_REQUEST as usize);
        let door = Door::new(channel)?;
        loop {
            door.wait()?;
            let reading = self.progress.reading(index);
            let len = match channel.receive(&mut head, &mut rest)? {
                Received::Request(n) => n,
                Received::Nothing => continue,
                Received::Unmounted => return Ok(()),
            };
            self.one((channel, index), reading, &head, &mut rest, len);
        }
    }

    /// Handles one request of `len` bytes, whose first bytes are in `head`.
    fn one(
        &self,
        (channel, index): (&Arc<Channel>, usize),
        reading: Reading<'_>,
        head: &[u8; WRITE_HEAD],
        rest: &mut BufMut,
        len: usize,
    ) {
        let Ok(request) = Head::read(&head[..len.min(WRITE_HEAD)]) else {
            tracing::error!("a request of {len} bytes, shorter than its header");
            return;
        };
        let is_silent = matches!(request.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT);
        let answer = (!is_silent).then(|| Answer {
            channel: channel.clone(),
            index,
            unique: request.unique,
            sent: false,
            _in_work: self.progress.in_work(request.opcode),
        });
        let body = if request.len as usize == len {
            self.body(request, head, rest, len)
        } else {
            Err(request::Malformed("a length that differs from the header's"))
        };
        match (body, answer) {
            (Err(e), answer) => {
                tracing::error!("request {} (opcode {}): {}", request.unique, request.opcode, e.0);
                if let Some(a) = answer {
                    a.send(&Reply::Error(libc::EINVAL));
                }
            }
            (Ok(Body::Forget(nodes)), _) => self.handler.forgotten(&nodes),
            (Ok(Body::Interrupt { unique }), _) => self.interrupt(request.unique, unique),
            (Ok(Body::Init(asked)), Some(answer)) => self.init(asked, answer),
            (Ok(body), Some(answer)) => {
                let noted = self.handler.note(&body);
                drop(reading);
                self.handler.handle(Request { head: request, body }, noted, answer);
            }
            (Ok(_), None) => {}
        }
    }

    fn body(
        &self,
        request: Head,
        head: &[u8; WRITE_HEAD],
        rest: &mut BufMut,
        len: usize,
    ) -> request::Parsed {
        let ext = self.agreed.get().is_some_and(|a| a.has(flag::SETXATTR_EXT));
        if request.opcode == op::WRITE && len >= WRITE_HEAD {
            return request::write(&head[abi::IN_HEAD..], self.data(rest, len - WRITE_HEAD));
        }
        if len <= WRITE_HEAD {
            return request::read(request, &head[abi::IN_HEAD..len], ext);
        }
        let beyond =
            rest.get(..len - WRITE_HEAD).ok_or(request::Malformed("longer than the buffer"))?;
        let args = [&head[abi::IN_HEAD..], beyond].concat();
        request::read(request, &args, ext)
    }

    /// The data of a write, in a buffer.
    fn data(&self, rest: &mut BufMut, len: usize) -> strake_fabric::Buf {
        if len >= HAND_ON {
            let mut full = std::mem::replace(rest, self.pool.get_now(MAX_REQUEST as usize));
            full.truncate(len);
            return full.freeze();
        }
        let mut own = self.pool.get_now(len);
        own.copy_from_slice(&rest[..len]);
        own.freeze()
    }

    fn interrupt(&self, unique: u64, of: u64) {
        if self.handler.interrupt(of) {
            return;
        }
        // The kernel asks again until the request is known or over. It looks for the request only
        // among those that were read from the descriptor on which this is answered, and another
        // thread may be reading that request now.
        std::thread::yield_now();
        for channel in self.channels.iter().filter_map(Weak::upgrade) {
            let _ = channel.send(unique, &Reply::Error(libc::EAGAIN));
        }
    }

    fn init(&self, asked: Init, answer: Answer) {
        match init::negotiate(self.handler.accepted(asked), MAX_REQUEST) {
            Outcome::Agreed(agreed) => {
                tracing::debug!(
                    minor = agreed.minor,
                    flags = format!("{:#x}", agreed.flags),
                    "FUSE protocol agreed"
                );
                let _ = self.agreed.set(agreed);
                self.handler.agreed(agreed);
                answer.send(&Reply::Bytes(agreed.reply()));
            }
            Outcome::AskAgain => {
                answer.send(&Reply::Bytes(init::ask_again()));
            }
            Outcome::TooOld => {
                tracing::error!(
                    "this kernel speaks FUSE {}.{}, which is too old",
                    asked.major,
                    asked.minor
                );
                answer.send(&Reply::Error(libc::EPROTO));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
    };

    use super::*;

    /// A handler that knows no requests.
    struct Ignorant;

    impl Handler for Ignorant {
        type Noted = ();
        fn note(&self, _: &Body) {}
        fn handle(&self, _: Request, (): (), _: Answer) {}
        fn forgotten(&self, _: &[(u64, u64)]) {}
        fn agreed(&self, _: Agreed) {}
        fn interrupt(&self, _: u64) -> bool {
            false
        }
    }

    #[test]
    fn an_interrupt_is_asked_for_again_wherever_its_request_may_have_been_read() {
        let pair = || {
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap()
        };
        let (kernel, its): (Vec<_>, Vec<_>) = [pair(), pair()].into_iter().unzip();
        let channels: Vec<_> = its.into_iter().map(|fd| Arc::new(Channel::new(fd))).collect();
        let progress = Arc::new(Progress::new(&channels));
        let pool = Pool::new(8 << 20);
        // A regression must fail, not hang.
        let limit = std::time::Duration::from_secs(60);
        for k in &kernel {
            rustix::net::sockopt::set_socket_timeout(
                k,
                rustix::net::sockopt::Timeout::Recv,
                Some(limit),
            )
            .unwrap();
        }
        let session =
            Session::start(channels, Arc::new(Ignorant), pool, Arc::default(), progress).unwrap();
        let of = 8u64;
        let head = [48u32, op::INTERRUPT].map(u32::to_ne_bytes).concat();
        let request = [head, [of + 1, 0, 0, 0, of].map(u64::to_ne_bytes).concat()].concat();
        let again = [16u32.to_ne_bytes(), (-libc::EAGAIN).to_ne_bytes()].concat();
        let again = [again, (of + 1).to_ne_bytes().to_vec()].concat();
        for flags in [RecvFlags::empty(), RecvFlags::PEEK] {
            send(&kernel[1], &request, SendFlags::empty()).unwrap();
            for k in &kernel {
                let mut reply = [0; 64];
                let (n, _) = recv(k, &mut reply, flags).unwrap();
                assert_eq!(reply[..n], again);
            }
        }
        // If the mount ends before a reply is read, the threads that keep reading get an error.
        drop(kernel);
        let begun = std::time::Instant::now();
        while !session.is_over() {
            assert!(begun.elapsed() < limit, "its threads go on");
            std::thread::yield_now();
        }
    }
}
