//! How far the threads of a mount have come with the requests that the kernel has queued. A task
//! that must know every close that a program has made waits here: close(2) returns when its RELEASE
//! is queued.
//!
//! A thread announces a read before it reads, and announces that it has noted the request before it
//! continues. All requests are noted when the kernel has nothing to be read, and each thread that
//! was reading at that moment has continued since.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{abi::op, channel::Channel, init::MAX_BACKGROUND};
use crate::vfs::{Queue, Soon};

/// Pause between two checks. A thread takes microseconds to note a request.
const LOOK: Duration = Duration::from_millis(1);
const LOOKS_AT_ONCE: usize = 20;

/// See the module.
pub struct Progress {
    channels: Vec<Weak<Channel>>,
    /// Per thread: odd while it may have read something that it has not noted.
    turns: Vec<AtomicU64>,
    /// Requests in progress that the kernel may count as background ones.
    background: Arc<AtomicUsize>,
}

/// A thread reads. Drop this when the request is noted.
pub struct Reading<'a>(&'a AtomicU64);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// A request in progress that may be in the background.
pub struct InBackground(Arc<AtomicUsize>);

impl Drop for InBackground {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Progress {
    /// For a mount with these descriptors, each read by a thread.
    pub fn new(channels: &[Arc<Channel>]) -> Progress {
        Progress {
            channels: channels.iter().map(Arc::downgrade).collect(),
            turns: channels.iter().map(|_| AtomicU64::new(0)).collect(),
            background: Arc::default(),
        }
    }

    /// The thread with this index begins to read.
    pub fn reading(&self, index: usize) -> Reading<'_> {
        self.turns[index].fetch_add(1, SeqCst);
        Reading(&self.turns[index])
    }

    /// A request of this kind was read. Keep the result until it is answered.
    pub fn in_work(&self, opcode: u32) -> Option<InBackground> {
        matches!(opcode, op::READ | op::WRITE | op::RELEASE | op::RELEASEDIR).then(|| {
            self.background.fetch_add(1, SeqCst);
            InBackground(self.background.clone())
        })
    }

    /// Whether the kernel has something to be read. False once it is unmounted.
    fn is_readable(&self) -> bool {
        let Some(channel) = self.channels.iter().find_map(Weak::upgrade) else { return false };
        let mut fds = [PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // A failure counts as readable: then it is checked again.
        poll(&mut fds, Some(&now)).is_err() || fds[0].revents().contains(PollFlags::IN)
    }

    async fn noted(&self) {
        let odd = |t: &AtomicU64| Some(t.load(SeqCst)).filter(|n| n % 2 == 1);
        let reading: Vec<_> = self.turns.iter().filter_map(|t| Some((t, odd(t)?))).collect();
        let mut looks = Looks::default();
        while reading.iter().any(|(t, then)| t.load(SeqCst) == *then) {
            looks.next().await;
        }
    }
}

/// Checks a few times without a pause, then with pauses.
#[derive(Default)]
struct Looks(usize);

impl Looks {
    async fn next(&mut self) {
        self.0 += 1;
        if self.0 < LOOKS_AT_ONCE {
            tokio::task::yield_now().await
        } else {
            tokio::time::sleep(LOOK).await
        }
    }
}

/// Wraps [`Progress`], so that a wait can last as long as it takes.
pub struct TakenSoFar(pub Arc<Progress>);

impl Queue for TakenSoFar {
    fn taken(&self) -> Soon {
        let p = self.0.clone();
        Box::pin(async move {
            let mut looks = Looks::default();
            loop {
                if !p.is_readable() {
                    p.noted().await;
                    // RELEASE is a background request. The kernel holds back background requests
                    // above its limit of those in progress.
                    if p.background.load(SeqCst) < usize::from(MAX_BACKGROUND) {
                        return;
                    }
                }
                looks.next().await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use futures_util::FutureExt;
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
    };

    use super::*;

    #[tokio::test]
    async fn what_is_queued_or_read_and_not_noted_is_waited_for() {
        let (kernel, its): (OwnedFd, OwnedFd) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let channels = [Arc::new(Channel::new(its))];
        let p = Arc::new(Progress::new(&channels));
        let all = TakenSoFar(p.clone());
        assert!(all.taken().now_or_never().is_some());
        send(&kernel, b"x", SendFlags::empty()).unwrap();
        let mut queued = all.taken();
        assert!(queued.as_mut().now_or_never().is_none());
        let reading = p.reading(0);
        recv(channels[0].fd(), &mut [0; 8], RecvFlags::empty()).unwrap();
        let mut read = all.taken();
        assert!(read.as_mut().now_or_never().is_none(), "it was read and is not noted");
        drop(reading);
        queued.await;
        // It does not wait for what is read later.
        let _reading = p.reading(0);
        let later = all.taken();
        read.await;
        drop(later);
    }

    #[tokio::test]
    async fn what_the_kernel_may_hold_back_is_waited_for() {
        let (_kernel, its) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let channels = [Arc::new(Channel::new(its))];
        let p = Arc::new(Progress::new(&channels));
        assert!(p.in_work(op::LOOKUP).is_none());
        let mut work: Vec<_> = (0..MAX_BACKGROUND).map(|_| p.in_work(op::WRITE)).collect();
        let mut full = TakenSoFar(p).taken();
        assert!(full.as_mut().now_or_never().is_none());
        work.pop();
        full.await;
    }
}
