//! Revokes the kernel's copies: see "The kernel" in `docs/leases.md`.
//!
//! A notice applies to what the kernel has processed. It may not have processed a reply that was
//! written just before. If that reply brings an inode that the kernel did not have, its content
//! stays valid afterwards for its whole time, because the kernel cannot tell that the reply is
//! older than the notice. But the kernel answers the notice with "no such inode". If more replies
//! have brought that inode than the kernel has forgotten, one is still on its way: then the notice
//! is repeated until the kernel has the inode. Until then, up to a time limit, the recall is not
//! acknowledged.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::{Forget, Forgetting};
use strake_proto::{Ino, ids::ROOT_INO};
use tokio::{runtime::Handle, task::JoinHandle, time::Instant};

use super::{channel::Channel, notify, shared::Shared};

/// The first and the longest pause before a notice is repeated.
const AGAIN: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];
/// How long a recall waits at most, if the program that waits for the reply does not get to run: a
/// client that gives no answer for 5 s is evicted.
const LONGEST: Duration = Duration::from_secs(4);

/// The kernel's copies of what a mount told it.
pub struct Copies {
    channel: OnceLock<Weak<Channel>>,
    /// The inode that is the kernel's root.
    root: Ino,
    runtime: Handle,
    /// Whether the kernel was told names since they were last forgotten.
    has_names: AtomicBool,
    /// Per inode: how many replies brought it that the kernel has not forgotten since.
    brought: Mutex<HashMap<u64, u64>>,
}

impl Copies {
    pub fn new(root: Ino, runtime: Handle) -> Copies {
        let (channel, has_names, brought) =
            (OnceLock::new(), AtomicBool::new(false), Mutex::default());
        Copies { channel, root, runtime, has_names, brought }
    }

    /// Sets the channel over which notices are sent.
    pub fn connect(&self, channel: &Arc<Channel>) {
        let _ = self.channel.set(Arc::downgrade(channel));
    }

    /// A reply is about to be sent that brings these inodes, by the kernel's numbers.
    pub fn brings(&self, nodes: &[u64]) {
        if !nodes.is_empty() {
            let mut brought = self.brought.lock();
            nodes.iter().for_each(|node| *brought.entry(*node).or_default() += 1);
        }
    }

    /// The kernel has forgotten this many replies per inode, or did not accept them.
    pub fn forgotten(&self, nodes: impl Iterator<Item = (u64, u64)>) {
        let mut brought = self.brought.lock();
        for (node, times) in nodes {
            // An earlier daemon may have brought it, too.
            if let Entry::Occupied(mut had) = brought.entry(node) {
                *had.get_mut() = had.get().saturating_sub(times);
                if *had.get() == 0 {
                    had.remove();
                }
            }
        }
    }

    /// Whether the kernel has the inode, or will have it when it has processed a reply.
    fn is_to_come(&self, node: u64) -> bool {
        self.brought.lock().contains_key(&node)
    }

    /// The kernel is about to be told names that it may keep, or was told by an earlier daemon.
    pub fn has_names(&self) {
        self.has_names.store(true, SeqCst);
    }

    /// Makes the kernel look up all names again. Returns false if it was told none.
    pub fn forget_names(&self) -> bool {
        let had = self.has_names.swap(false, SeqCst);
        if had && let Some(c) = self.channel() {
            forget_names(&c);
        }
        had
    }

    fn channel(&self) -> Option<Arc<Channel>> {
        self.channel.get()?.upgrade()
    }
}

/// Handles recalls for the kernel's copies.
pub struct Recalls {
    pub copies: Arc<Copies>,
    pub shared: Arc<Shared>,
}

impl Forget for Recalls {
    fn forget(&self, inos: &[Ino], names: bool) -> Option<Forgetting> {
        let (copies, channel) = (&self.copies, self.copies.channel()?);
        if names {
            copies.forget_names();
        }
        let nodes = inos.iter().map(|ino| if *ino == copies.root { ROOT_INO } else { *ino });
        let unknown = nodes.filter(|node| !forget_inode(&channel, *node));
        let to_come: Vec<u64> = unknown.filter(|node| copies.is_to_come(*node)).collect();
        // Pages that were handed out under the lease, and what was stored to them.
        let mapped: Vec<Ino> =
            inos.iter().copied().filter(|ino| self.shared.has_out(*ino)).collect();
        let mut tasks: Vec<JoinHandle<()>> =
            mapped.into_iter().map(|ino| self.giving_back(ino)).collect();
        if !to_come.is_empty() {
            let copies = copies.clone();
            let gone = move |node| {
                copies.channel().is_none_or(|c| forget_inode(&c, node)) || !copies.is_to_come(node)
            };
            tasks.push(self.copies.runtime.spawn(all_gone(to_come, gone)));
        }
        (!tasks.is_empty()).then(|| Box::pin(waited_for(tasks)) as Forgetting)
    }

    fn give_back(&self, ino: Ino) -> Option<Forgetting> {
        let giving = self.shared.has_out(ino).then(|| self.giving_back(ino))?;
        Some(Box::pin(async move {
            // A long report is announced as being in progress.
            let _ = giving.await;
        }))
    }
}

impl Recalls {
    fn giving_back(&self, ino: Ino) -> JoinHandle<()> {
        let shared = self.shared.clone();
        self.copies.runtime.spawn(async move { shared.give_back(ino).await })
    }
}

/// Ends with the tasks, or when the time limit for waiting is over; then the tasks continue.
async fn waited_for(tasks: Vec<JoinHandle<()>>) {
    let end = Instant::now() + LONGEST;
    for task in tasks {
        if tokio::time::timeout_at(end, task).await.is_err() {
            tracing::warn!(
                "the kernel takes long to drop its cache: programs may see older data for a moment"
            );
            return;
        }
    }
}

/// Ends when every inode is forgotten.
async fn all_gone(mut nodes: Vec<u64>, gone: impl Fn(u64) -> bool) {
    let [mut pause, longest] = AGAIN;
    while !nodes.is_empty() {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(longest);
        nodes.retain(|node| !gone(*node));
    }
}

fn forget_names(channel: &Channel) {
    if let Err(e) = channel.notify(&notify::names_changed()) {
        tracing::warn!("the kernel did not drop cached names: {e}");
    }
}

/// Makes the kernel forget attributes and ACLs; not pages, which would wait for locks. Returns
/// false if the kernel has no such inode.
fn forget_inode(channel: &Channel, node: u64) -> bool {
    match channel.notify(&notify::inode_changed(node, -1, 0)) {
        Ok(()) => true,
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => {
            tracing::warn!(node, "the kernel did not drop cached attributes: {e}");
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::*;
    use crate::transport::dev::{abi, mapped::Mapped};

    #[tokio::test]
    async fn an_inode_is_to_come_until_all_that_was_brought_is_forgotten() {
        let c = Copies::new(77, Handle::current());
        c.brings(&[5, 6, 5]);
        c.forgotten([(5, 1), (6, 1), (8, 3)].into_iter());
        assert!(c.is_to_come(5) && !c.is_to_come(6));
        c.brings(&[5]);
        c.forgotten([(5, 2)].into_iter());
        assert!(!c.is_to_come(5));
        c.brings(&[8]);
        assert!(c.is_to_come(8), "what a former daemon brought counts for nothing");
        c.forgotten([(8, 7)].into_iter());
        assert!(c.brought.lock().is_empty());
    }

    /// Reads a notice as the kernel receives it: the code and, for an inode, its number.
    fn said(kernel: &OwnedFd) -> Option<(i32, u64)> {
        let mut b = [0; 64];
        let (_, n) = recv(kernel, &mut b, RecvFlags::DONTWAIT).ok().filter(|(_, n)| *n > 0)?;
        let number = |at: usize| u64::from_ne_bytes(b[at..at + 8].try_into().unwrap());
        assert_eq!(number(8), 0, "nobody asked");
        let code = i32::from_ne_bytes(b[4..8].try_into().unwrap());
        Some((code, if n > 16 { number(16) } else { 0 }))
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_kernel_has_is_forgotten_at_once() {
        let (kernel, its) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let (copies, channel) =
            (Arc::new(Copies::new(77, Handle::current())), Arc::new(Channel::new(its)));
        copies.connect(&channel);
        // This kernel accepts every notice: it has every inode.
        let all = || std::iter::from_fn(|| said(&kernel)).collect::<Vec<_>>();
        let [inode, epoch] =
            [|node| (abi::NOTIFY_INVAL_INODE, node), |_| (abi::NOTIFY_INC_EPOCH, 0)];
        let mapped = Arc::new(Mapped::new());
        let recalls =
            Recalls { copies: copies.clone(), shared: Arc::new(Shared::new(mapped, Weak::new())) };
        copies.brings(&[6]);
        assert!(recalls.forget(&[5, 6, 77], true).is_none());
        assert_eq!(all(), [inode(5), inode(6), inode(ROOT_INO)], "no name was told");
        copies.has_names();
        assert!(recalls.forget(&[6], false).is_none());
        assert!(recalls.forget(&[6], true).is_none());
        assert_eq!(all(), [inode(6), epoch(0), inode(6)]);
        drop(channel);
        assert!(recalls.forget(&[7], true).is_none());
        assert_eq!(all(), [], "the mount is gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_notice_is_given_again_until_the_kernel_has_the_inode() {
        let (start, asked) = (Instant::now(), Mutex::new(Vec::new()));
        let at = move |ms| start + Duration::from_millis(ms);
        // The kernel processes 5 after 10 ms, and never 6.
        let gone = |node| {
            asked.lock().push(node);
            node == 5 && Instant::now() >= at(10)
        };
        all_gone(vec![5], gone).await;
        assert_eq!(Instant::now(), at(15));
        assert_eq!(std::mem::take(&mut *asked.lock()), [5; 4]);
        let task =
            tokio::spawn(all_gone(vec![5, 6], move |node| node == 5 || Instant::now() >= at(9000)));
        let (again, its) = (task.abort_handle(), Instant::now());
        waited_for(vec![task]).await;
        assert_eq!(Instant::now(), its + LONGEST, "before the session is lost");
        assert!(!again.is_finished());
        tokio::time::sleep_until(at(9050)).await;
        assert!(again.is_finished(), "it is told as soon as it has it");
    }
}
