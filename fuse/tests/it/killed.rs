//! Programs that wait for servers which do not answer: a kill ends them, other signals leave them
//! waiting, and the mount can still be unmounted.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::common::Cluster;
use crate::unmounted::unmounted;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use strake_fuse::{
    HandoverMemory, Mount, MountConfig, Transport, attach, can_mount, learn, mount, serve,
};

/// Longer than any step takes; reached only where something hangs.
const LIMIT: Duration = Duration::from_secs(30);

/// A program whose working directory is the mount.
struct Program(Child);

impl Program {
    /// Runs `before` to its end; `then` is kept for [`Program::go_on`].
    async fn start(at: &Path, before: &str, then: &str) -> Program {
        let code = format!(
            "import os, signal, sys\n{before}\nprint('ready', flush=True)\nsys.stdin.readline()\n{then}"
        );
        let mut python = Command::new("python3");
        python.arg("-c").arg(code).current_dir(at).stdin(Stdio::piped()).stdout(Stdio::piped());
        tokio::task::spawn_blocking(move || {
            let mut child = python.spawn().unwrap();
            let mut line = [0; 6];
            child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
            assert_eq!(&line, b"ready\n");
            Program(child)
        })
        .await
        .unwrap()
    }

    /// Returns when the program waits for the mount.
    async fn go_on(&mut self) {
        self.0.stdin.take().unwrap().write_all(b"\n").unwrap();
        let stack = format!("/proc/{}/stack", self.0.id());
        until(|| fs::read_to_string(&stack).unwrap().contains("fuse"), "the program never waited")
            .await;
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// What it printed after "ready", when it has ended.
    async fn ended(mut self) -> String {
        let pid = Pid::from_child(&self.0);
        until(
            || waitpid(Some(pid), WaitOptions::NOHANG).unwrap().is_some(),
            "the program did not end",
        )
        .await;
        let mut out = String::new();
        BufReader::new(self.0.stdout.take().unwrap()).read_line(&mut out).unwrap();
        out
    }
}

async fn until(mut is_so: impl FnMut() -> bool, otherwise: &str) {
    let looking = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, looking).await.expect(otherwise);
}

/// A mount without caches, so that every call asks the servers. Prints a reason and returns `None`
/// where this cannot be tested.
async fn mounted(cluster: &Cluster, at: &Path) -> Option<Mount> {
    if let Err(e) = can_mount(at) {
        println!("skipped: {e}");
        return None;
    }
    if fs::read_to_string("/proc/self/stack").is_err() {
        println!("skipped: only root sees in /proc/PID/stack what a program waits for");
        return None;
    }
    let cfg = MountConfig {
        attr_timeout: Duration::ZERO,
        entry_timeout: Duration::ZERO,
        ..MountConfig::new(at)
    };
    Some(mount(cfg, cluster.client().await).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_programs_go_away() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::new();
    let Some(m) = mounted(&cluster, dir.path()).await else { return };
    let programs = [
        ("", "os.stat('nothing')"),
        ("", "os.mkdir('d')"),
        ("", "os.listdir('.')"),
        ("f = os.open('a', os.O_RDWR | os.O_CREAT); os.write(f, b'x')", "os.pread(f, 100, 0)"),
        ("f = os.open('b', os.O_RDWR | os.O_CREAT)", "os.write(f, b'x' * 3000000)"),
        // The program's death closes its descriptor, which waits for servers, too.
        ("f = os.open('c', os.O_RDWR | os.O_CREAT); os.write(f, b'x')", "os.stat('nothing')"),
    ];
    for (before, then) in programs {
        let mut p = Program::start(dir.path(), before, then).await;
        cluster.stall(true);
        p.go_on().await;
        p.signal(Signal::KILL);
        p.ended().await;
        cluster.stall(false);
    }
    // The mount works, whatever the killed programs had begun.
    let file = dir.path().join("after");
    let written = tokio::task::spawn_blocking(move || {
        fs::write(&file, b"works").and_then(|()| fs::read(&file))
    });
    assert_eq!(written.await.unwrap().unwrap(), b"works");
    unmounted(&m).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_that_does_not_kill_is_not_seen_by_the_call() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::new();
    let Some(m) = mounted(&cluster, dir.path()).await else { return };
    // A handler without SA_RESTART, so that an EINTR would be seen.
    let before = "f = os.open('a', os.O_RDWR | os.O_CREAT); os.write(f, b'0123456789')
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'signal '))
signal.siginterrupt(signal.SIGUSR1, True)
import ctypes
libc, buf = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(100)";
    let then = "n = libc.pread(f, buf, 100, 0); print(n, ctypes.get_errno(), flush=True)";
    let mut p = Program::start(dir.path(), before, then).await;
    cluster.stall(true);
    p.go_on().await;
    p.signal(Signal::USR1);
    // Long enough for the mount to have handled the signal's INTERRUPT: the request is still
    // waiting.
    tokio::time::sleep(Duration::from_millis(200)).await;
    cluster.stall(false);
    assert_eq!(p.ended().await, "signal 10 0\n");
    unmounted(&m).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_kernel_forgets_what_it_is_told_to() {
    let dir = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(dir.path()) {
        println!("skipped: {e}");
        return;
    }
    let cluster = Cluster::new();
    cluster.lease(Duration::from_secs(3600));
    let client = cluster.client().await;
    let cfg =
        MountConfig { entry_timeout: Duration::from_secs(3600), ..MountConfig::new(dir.path()) };
    let m = mount(cfg, client.clone()).await.unwrap();
    let root = client.root();
    let (at, me) = (dir.path().to_path_buf(), strake_client::Creds::default());
    let len = |name: &'static str| {
        let file = at.join(name);
        async move {
            tokio::task::spawn_blocking(move || fs::metadata(file).map(|m| m.len()).ok())
                .await
                .unwrap()
        }
    };
    let (file, attr) = client.create(&me, root, b"a", 0o644, 2, false, None).await.unwrap();
    assert_eq!(len("a").await, Some(0));
    file.write_all_at(0, b"12345").await.unwrap();
    file.fsync().await.unwrap();
    assert_eq!(len("a").await, Some(0), "cached for an hour");
    m.invalidate_inode(attr.ino, true).unwrap();
    assert_eq!(len("a").await, Some(5));
    client.rename(&me, (root, b"a"), (root, b"b"), 0).await.unwrap();
    assert_eq!(len("a").await, Some(5), "cached for an hour");
    m.invalidate_name(root, b"a").unwrap();
    assert_eq!((len("a").await, len("b").await), (None, Some(5)));
    // Invalidating an inode or a name that the kernel does not know succeeds.
    m.invalidate_inode(attr.ino + 1000, false).unwrap();
    m.invalidate_name(root, b"nothing").unwrap();
    drop(file);
    unmounted(&m).await;
}

/// Runs umount(8) while no server answers. It looks at the mount before it unmounts it.
async fn umount(cluster: &Cluster, at: &Path) {
    let at = at.to_path_buf();
    let unmounting = tokio::task::spawn_blocking(move || {
        Command::new("umount").arg("-i").arg(at).output().unwrap()
    });
    let out = tokio::time::timeout(LIMIT, unmounting).await;
    cluster.stall(false);
    let out = out.expect("it waits for servers").unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn umount_does_not_wait_for_servers_that_went_away_just_after_mounting() {
    let dir = tempfile::tempdir().unwrap();
    if can_mount(dir.path()).is_err() || !rustix::process::geteuid().is_root() {
        println!("skipped: umount(8) unmounts for root only");
        return;
    }
    let cluster = Cluster::new();
    let other = cfg!(feature = "fuser").then_some(Transport::Fuser);
    for transport in [Transport::Dev].into_iter().chain(other) {
        let cfg = MountConfig { transport, ..MountConfig::new(dir.path()) };
        let m = mount(cfg, cluster.client().await).await.unwrap();
        cluster.stall(true);
        umount(&cluster, dir.path()).await;
        m.wait().await.unwrap();
    }
    // As a supervisor and its daemon do it: the mount exists before a daemon serves it.
    let cfg = MountConfig { fsname: "test".into(), ..MountConfig::new(dir.path()) };
    let keep = HandoverMemory::create([7; 16], 64 << 20).unwrap();
    let client = cluster.client_keeping(&keep).await;
    learn(&cfg, &client, &keep).await.unwrap();
    let descriptors = attach(&cfg).unwrap();
    cluster.stall(true);
    let m = serve(&cfg, client, keep, descriptors, None).await.unwrap();
    umount(&cluster, dir.path()).await;
    m.wait().await.unwrap();
}
