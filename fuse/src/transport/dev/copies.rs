//! Takes back what the kernel keeps copies of: see "The kernel" in `docs/leases.md`.
//!
//! A notice goes by what the kernel has taken in. A reply that was written just before may not be among that yet, and what it says
//! counts afterwards, where the kernel does not see that it is older than the notice. So a notice about what was told a moment
//! ago is given again a few times.

use std::{
    collections::BTreeSet,
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::Forget;
use strake_proto::{Ino, ids::ROOT_INO};
use tokio::{runtime::Handle, time::Instant};

use super::{channel::Channel, notify, reply::Taken};

/// Pauses before a notice is given again.
const AGAIN: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(4), Duration::from_millis(15), Duration::from_millis(80)];
/// How long a reply counts as told a moment ago, at least.
const LATELY: Duration = Duration::from_secs(1);
/// Inodes that are remembered for that; when there are more, all count.
const MOST: usize = 32_768;

/// The kernel's copies of what a mount told it.
pub struct Copies {
    channel: OnceLock<Weak<Channel>>,
    /// What the kernel knows as its root.
    root: Ino,
    runtime: Handle,
    /// Names were told since they were forgotten last.
    has_names: AtomicBool,
    lately: Mutex<Lately>,
}

impl Copies {
    pub fn new(root: Ino, runtime: Handle) -> Copies {
        let lately = Mutex::new(Lately::new(Instant::now()));
        Copies { channel: OnceLock::new(), root, runtime, has_names: AtomicBool::new(false), lately }
    }

    /// Through which the kernel is told.
    pub fn connect(&self, channel: &Arc<Channel>) {
        let _ = self.channel.set(Arc::downgrade(channel));
    }

    /// The kernel is about to be told attributes that it may keep, of the inode that it knows by this number.
    pub fn told(&self, node: u64, taken: Taken) {
        if taken != Taken::InOrder {
            self.lately.lock().told(node, Instant::now());
        }
    }

    /// The kernel is about to be told names that it may keep.
    pub fn told_names(&self, taken: Taken) {
        self.has_names.store(true, SeqCst);
        if taken == Taken::Listed {
            self.lately.lock().listed(Instant::now());
        }
    }

    /// A former daemon told names.
    pub fn has_names(&self) {
        self.has_names.store(true, SeqCst);
    }

    /// The kernel looks up again all names that it was told. False: there were none.
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

impl Forget for Copies {
    fn forget(&self, inos: &[Ino], names: bool) {
        let Some(channel) = self.channel() else { return };
        let names = names && self.forget_names();
        let nodes = inos.iter().map(|ino| if *ino == self.root { ROOT_INO } else { *ino });
        let unknown: Vec<u64> = nodes.filter(|node| !forget_inode(&channel, *node)).collect();
        let (nodes, names) = {
            let (mut lately, now) = (self.lately.lock(), Instant::now());
            let nodes: Vec<u64> = unknown.into_iter().filter(|node| lately.is_to_come(*node, now)).collect();
            (nodes, names && lately.has_listed(now))
        };
        if nodes.is_empty() && !names {
            return;
        }
        let channel = Arc::downgrade(&channel);
        self.runtime.spawn(async move {
            for pause in AGAIN {
                tokio::time::sleep(pause).await;
                let Some(c) = channel.upgrade() else { return };
                if names {
                    forget_names(&c);
                }
                for node in &nodes {
                    forget_inode(&c, *node);
                }
            }
        });
    }
}

fn forget_names(channel: &Channel) {
    if let Err(e) = channel.notify(&notify::names_changed()) {
        tracing::warn!("the kernel does not forget names: {e}");
    }
}

/// Attributes and ACLs; pages wait for locks. False: the kernel has no such inode.
fn forget_inode(channel: &Channel, node: u64) -> bool {
    match channel.notify(&notify::inode_changed(node, -1, 0)) {
        Ok(()) => true,
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => {
            tracing::warn!(node, "the kernel does not forget attributes: {e}");
            true
        }
    }
}

/// What the kernel was told in the last one or two seconds, and may not have taken in.
struct Lately {
    young: Generation,
    old: Generation,
    /// When the young one began.
    since: Instant,
}

#[derive(Default)]
struct Generation {
    inodes: BTreeSet<u64>,
    /// They were too many to be remembered.
    all: bool,
    /// Names of directories were listed.
    listed: bool,
}

impl Lately {
    fn new(now: Instant) -> Lately {
        Lately { young: Generation::default(), old: Generation::default(), since: now }
    }

    fn turn(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age >= LATELY {
            let young = std::mem::take(&mut self.young);
            self.old = if age < 2 * LATELY { young } else { Generation::default() };
            self.since = now;
        }
    }

    fn told(&mut self, node: u64, now: Instant) {
        self.turn(now);
        let young = &mut self.young;
        if young.inodes.len() >= MOST {
            young.inodes.clear();
            young.all = true;
        }
        if !young.all {
            young.inodes.insert(node);
        }
    }

    fn listed(&mut self, now: Instant) {
        self.turn(now);
        self.young.listed = true;
    }

    fn has_listed(&mut self, now: Instant) -> bool {
        self.turn(now);
        self.young.listed || self.old.listed
    }

    /// Whether an inode that the kernel did not have when a notice was given may come with a reply that it has not taken in yet.
    fn is_to_come(&mut self, node: u64, now: Instant) -> bool {
        self.turn(now);
        [&self.young, &self.old].iter().any(|g| g.all || g.inodes.contains(&node))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::*;
    use crate::transport::dev::abi;

    #[test]
    fn what_was_told_is_remembered_for_a_second_or_two() {
        let start = Instant::now();
        let mut l = Lately::new(start);
        let at = |ms| start + Duration::from_millis(ms);
        l.told(5, at(900));
        l.listed(at(900));
        for ms in [900, 1899] {
            assert!(l.is_to_come(5, at(ms)) && !l.is_to_come(7, at(ms)) && l.has_listed(at(ms)));
        }
        assert!(!l.is_to_come(5, at(2900)) && !l.has_listed(at(2900)));
        l.told(8, at(2950));
        assert!(!l.is_to_come(8, at(9000)), "nothing was told for long");
    }

    #[test]
    fn memory_is_bounded_and_forgets_nothing() {
        let now = Instant::now();
        let mut l = Lately::new(now);
        (0..3 * MOST as u64).for_each(|node| l.told(node, now));
        assert!(l.young.inodes.len() <= MOST);
        assert!([0, MOST as u64, 1 << 40].into_iter().all(|node| l.is_to_come(node, now)));
    }

    /// What the kernel is told: the code, and of an inode its number.
    fn said(kernel: &OwnedFd) -> Option<(i32, u64)> {
        let mut b = [0; 64];
        let (_, n) = recv(kernel, &mut b, RecvFlags::DONTWAIT).ok().filter(|(_, n)| *n > 0)?;
        let number = |at: usize| u64::from_ne_bytes(b[at..at + 8].try_into().unwrap());
        assert_eq!(number(8), 0, "nobody asked");
        let code = i32::from_ne_bytes(b[4..8].try_into().unwrap());
        Some((code, if n > 16 { number(16) } else { 0 }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_notice_is_given_again_where_a_reply_may_be_on_its_way() {
        let (kernel, its) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let (channel, root) = (Arc::new(Channel::new(its)), 77);
        let copies = Copies::new(root, Handle::current());
        copies.connect(&channel);
        let all = || std::iter::from_fn(|| said(&kernel)).collect::<Vec<_>>();
        let [inode, epoch] = [|node| (abi::NOTIFY_INVAL_INODE, node), |_| (abi::NOTIFY_INC_EPOCH, 0)];
        copies.told(5, Taken::InOrder);
        copies.told(6, Taken::Found);
        copies.forget(&[5, 6, root], true);
        assert_eq!(all(), [inode(5), inode(6), inode(ROOT_INO)], "no name was told");
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(all(), [], "the kernel had them all");
        copies.told_names(Taken::Found);
        copies.forget(&[6], true);
        assert_eq!(all(), [epoch(0), inode(6)]);
        copies.told_names(Taken::Listed);
        copies.forget(&[6], false);
        copies.forget(&[6], true);
        assert_eq!(all(), [inode(6), epoch(0), inode(6)]);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(all(), [epoch(0); AGAIN.len()]);
        drop(channel);
        copies.forget(&[7], true);
        assert_eq!(all(), [], "the mount is gone");
    }
}
