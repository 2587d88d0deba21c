//! A daemon that takes over a mount. The test plays the kernel, over a socket whose messages are
//! requests and replies.

use std::{
    fs,
    os::fd::{AsRawFd, OwnedFd},
};

use crate::common::Cluster;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use strake_fuse::{HandoverMemory, Interim, MountConfig, learn, serve};

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const STATFS: u32 = 17;
const FLUSH: u32 = 25;
const INTERRUPT: u32 = 36;
const NOTIFY_RESEND: i32 = 7;
const NOTIFY_INC_EPOCH: i32 = 8;
const STALLED: &[u8] = b"x";

/// The root, and a file in it.
const ROOT: u64 = 1;
const FILE: u64 = 5;

/// A request about an inode by the thread `pid`.
fn request(unique: u64, opcode: u32, node: u64, pid: u32, args: &[u8]) -> Vec<u8> {
    let len = 40 + args.len() as u32;
    let mut r = [len, opcode].map(u32::to_ne_bytes).concat();
    r.extend([unique, node].map(u64::to_ne_bytes).concat());
    r.extend([0, 0, pid, 0].map(u32::to_ne_bytes).concat());
    r.extend(args);
    r
}

fn getattr_of_the_root(unique: u64) -> Vec<u8> {
    request(unique, GETATTR, ROOT, 0, &[0; 16])
}

/// The next message of the daemon: its number, and the error or notification code. `None` for a
/// message that stalls the socket.
fn said(kernel: &OwnedFd) -> Option<(u64, i32)> {
    let mut bytes = [0; 4096];
    let (n, _) = recv(kernel, &mut bytes, RecvFlags::empty()).unwrap();
    let bytes = &bytes[..n];
    (bytes != STALLED).then(|| {
        let code = i32::from_ne_bytes(bytes[4..8].try_into().unwrap());
        (u64::from_ne_bytes(bytes[8..16].try_into().unwrap()), code)
    })
}

/// The text of a file in `/proc` for every other thread of this process.
fn threads(file: &str) -> Vec<String> {
    let me = rustix::thread::gettid().as_raw_nonzero().to_string();
    let all = fs::read_dir("/proc/self/task")
        .unwrap()
        .map(Result::unwrap)
        .filter(|t| *t.file_name() != *me);
    all.filter_map(|t| fs::read_to_string(t.path().join(file)).ok()).collect()
}

/// Returns when a thread waits in writev(2) to this descriptor and no other thread is running.
fn until_it_waits_to_write(fd: i32) {
    let call = format!("{} {fd:#x} ", libc::SYS_writev);
    while !threads("syscall").iter().any(|s| s.starts_with(&call)) {
        std::thread::yield_now();
    }
    let is_running =
        |stat: &String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'));
    while threads("stat").iter().any(is_running) {
        std::thread::yield_now();
    }
}

/// Otherwise the kernel resends a request that the daemon has read already, and it is done twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_asks_for_what_was_not_answered_before_it_reads_anything() {
    let cluster = Cluster::new();
    let keep = HandoverMemory::create([7; 16], 64 << 20).unwrap();
    let _former = cluster.client_keeping(&keep).await;
    let keep = HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap()).unwrap();
    let client = cluster.client_keeping(&keep).await;

    let (kernel, its) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let (fd, unread) = (its.as_raw_fd(), its.try_clone().unwrap());
    send(&kernel, &getattr_of_the_root(2), SendFlags::empty()).unwrap();
    // A full socket stands for a slow kernel: the daemon blocks on its first write.
    let mut stalled = 0;
    while send(&its, STALLED, SendFlags::DONTWAIT).is_ok() {
        stalled += 1;
    }
    let listening = tokio::task::spawn_blocking(move || {
        until_it_waits_to_write(fd);
        let mut request = [0; 56];
        let waiting = recv(&unread, &mut request, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        assert!(waiting.is_ok(), "a request was read before RESEND was said");
        for _ in 0..stalled {
            assert_eq!(said(&kernel), None);
        }
        assert_eq!(said(&kernel), Some((0, NOTIFY_RESEND)));
        assert_eq!(said(&kernel), Some((2, 0)), "then it is answered");
        // The test closes the socket with an unread answer in it, so the daemon's next read is an
        // error.
        send(&kernel, &getattr_of_the_root(4), SendFlags::empty()).unwrap();
        recv(&kernel, &mut request, RecvFlags::PEEK).unwrap();
    });
    let mount = serve(&MountConfig::new("/"), client, keep, vec![its], None).await.unwrap();
    listening.await.unwrap();
    mount.unmounted().await.expect_err("this kernel is gone");
}

/// The new daemon does not know which names the old one gave to the kernel, so it could not recall
/// them later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_has_the_kernel_forget_names_first() {
    let cluster = Cluster::new();
    for (minor, hour, forgets) in [(44, 3600, true), (44, 0, false), (43, 3600, false)] {
        let keep = HandoverMemory::create([7; 16], 64 << 20).unwrap();
        let _former = cluster.client_keeping(&keep).await;
        // The FUSE version and flags as negotiated with a kernel of this version that has
        // FUSE_HAS_RESEND.
        for (n, word) in [(1, minor << 32), (2, 1 << 39)] {
            keep.mount_word(n).store(word, std::sync::atomic::Ordering::Relaxed);
        }
        let keep = HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap()).unwrap();
        let client = cluster.client_keeping(&keep).await;
        let (kernel, its) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let entry_timeout = std::time::Duration::from_secs(hour);
        let cfg = MountConfig { entry_timeout, ..MountConfig::new("/") };
        let mount = serve(&cfg, client, keep, vec![its], None).await.unwrap();
        if forgets {
            assert_eq!(said(&kernel), Some((0, NOTIFY_INC_EPOCH)));
        }
        assert_eq!(said(&kernel), Some((0, NOTIFY_RESEND)), "7.{minor}");
        // The test closes the socket with an unread answer in it, so the daemon's next read is an
        // error.
        send(&kernel, &getattr_of_the_root(4), SendFlags::empty()).unwrap();
        recv(&kernel, &mut [0; 56], RecvFlags::PEEK).unwrap();
        drop(kernel);
        mount.unmounted().await.expect_err("this kernel is gone");
    }
}

/// On a hard mount the servers may be away forever. Processes that are ending must not wait for
/// them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_it_waits_for_servers_only_those_who_leave_are_answered() {
    let cluster = Cluster::new();
    let keep = HandoverMemory::create([7; 16], 64 << 20).unwrap();
    let client = cluster.client_keeping(&keep).await;
    learn(&MountConfig::new("/"), &client, &keep).await.unwrap();
    let next = || HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap()).unwrap();
    let (kernel, its) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let its = [its];
    assert!(
        Interim::start(&next(), &its).unwrap().is_none(),
        "what this kernel's requests say cannot be read twice"
    );
    // As negotiated with a kernel that can resend: version 7.40, FUSE_HAS_RESEND.
    for (n, word) in [(1, 40 << 32), (2, 1 << 39)] {
        keep.mount_word(n).store(word, std::sync::atomic::Ordering::Relaxed);
    }
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let (gone, here) = (child.id(), std::process::id());

    let interim = Interim::start(&next(), &its).unwrap().unwrap();
    let asks = |r: Vec<u8>| assert_eq!(send(&kernel, &r, SendFlags::empty()), Ok(r.len()));
    let signal = |of: u64| asks(request(of | 1, INTERRUPT, 0, 0, &of.to_ne_bytes()));
    assert_eq!(said(&kernel), Some((0, NOTIFY_RESEND)));
    asks(getattr_of_the_root(2));
    assert_eq!(said(&kernel), Some((2, 0)));
    asks(request(4, GETATTR, FILE, gone, &[0; 16]));
    asks(request(6, LOOKUP, ROOT, here, b"name\0"));
    signal(6);
    asks(request(8, FLUSH, FILE, gone, &[0; 24]));
    signal(8);
    signal(1000);
    asks(request(10, LOOKUP, ROOT, gone, &[b'n'; 200]));
    signal(10);
    assert_eq!(
        said(&kernel),
        Some((10, -libc::EINTR)),
        "not who lives, nor who must be heard, nor who was not signalled"
    );
    asks(request(12, STATFS, FILE, here, &[]));
    assert_eq!(said(&kernel), Some((12, 0)));
    drop(interim);
    asks(getattr_of_the_root(14));
    let mut head = [0; 40];
    let (_, len) =
        recv(&its[0], &mut head, RecvFlags::DONTWAIT).expect("nobody else reads any more");
    assert_eq!((u64::from_ne_bytes(head[8..16].try_into().unwrap()), len), (14, 40));
}
