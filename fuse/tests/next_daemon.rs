//! A daemon that takes a mount over. The kernel's part is this test's, over a socket whose messages are requests and replies.

mod common;

use std::{
    fs,
    os::fd::{AsRawFd, OwnedFd},
};

use common::Cluster;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use strake_client::Keep;
use strake_fuse::{MountConfig, serve};

const GETATTR: u32 = 3;
const NOTIFY_RESEND: i32 = 7;
const STALLED: &[u8] = b"x";

fn getattr_of_the_root(unique: u64) -> Vec<u8> {
    let mut request = 56u32.to_ne_bytes().to_vec();
    request.extend(GETATTR.to_ne_bytes());
    request.extend(unique.to_ne_bytes());
    request.extend(1u64.to_ne_bytes());
    request.resize(56, 0);
    request
}

/// What a daemon wrote: its number, and the error or the notification's code.
fn said(kernel: &OwnedFd) -> Option<(u64, i32)> {
    let mut bytes = [0; 4096];
    let (n, _) = recv(kernel, &mut bytes, RecvFlags::empty()).unwrap();
    let bytes = &bytes[..n];
    (bytes != STALLED).then(|| {
        let code = i32::from_ne_bytes(bytes[4..8].try_into().unwrap());
        (u64::from_ne_bytes(bytes[8..16].try_into().unwrap()), code)
    })
}

/// Of every other thread of this process, the text of a file in `/proc`.
fn threads(file: &str) -> Vec<String> {
    let me = rustix::thread::gettid().as_raw_nonzero().to_string();
    let all = fs::read_dir("/proc/self/task").unwrap().map(Result::unwrap).filter(|t| *t.file_name() != *me);
    all.filter_map(|t| fs::read_to_string(t.path().join(file)).ok()).collect()
}

/// Returns when a thread waits in writev(2) to this descriptor and no other one has anything left to do.
fn until_it_waits_to_write(fd: i32) {
    let call = format!("{} {fd:#x} ", libc::SYS_writev);
    while !threads("syscall").iter().any(|s| s.starts_with(&call)) {
        std::thread::yield_now();
    }
    let is_running = |stat: &String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'));
    while threads("stat").iter().any(is_running) {
        std::thread::yield_now();
    }
}

/// Otherwise what it reads first comes again, too, and is done twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_asks_for_what_was_not_answered_before_it_reads_anything() {
    let cluster = Cluster::new();
    let keep = Keep::create([7; 16], 64 << 20).unwrap();
    let _former = cluster.client_keeping(&keep).await;
    let keep = Keep::open(keep.fd().try_clone_to_owned().unwrap()).unwrap();
    let client = cluster.client_keeping(&keep).await;

    let (kernel, its) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let (fd, unread) = (its.as_raw_fd(), its.try_clone().unwrap());
    send(&kernel, &getattr_of_the_root(2), SendFlags::empty()).unwrap();
    // The kernel is slow to take what it is told: the first thing that the daemon says is waited for.
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
        // An end with an answer that nobody took is an error to whoever reads on.
        send(&kernel, &getattr_of_the_root(4), SendFlags::empty()).unwrap();
        recv(&kernel, &mut request, RecvFlags::PEEK).unwrap();
    });
    let mount = serve(&MountConfig::new("/"), client, keep, vec![its]).await.unwrap();
    listening.await.unwrap();
    mount.unmounted().await.expect_err("this kernel is gone");
}
